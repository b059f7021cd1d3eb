"""Training what a comparison still lacks, run by run."""

import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from fedatlas.compare.plan import Comparison, of_cases
from fedatlas.core.errors import DataError, FedAtlasError, RunFolderError
from fedatlas.core.options import not_known
from fedatlas.evaluation.statistics import (
    POST,
    cell_means,
    class_means,
    mean_of_defined,
    read_rows,
    require_rows,
    select,
    site_index,
)
from fedatlas.federation.design import Experiment, cache_folder, slow_precision
from fedatlas.federation.file import Federation, flat_difference, hash_of, load_federation, resolved
from fedatlas.federation.record import changed_evaluation, differing_code
from fedatlas.federation.session import run_federation
from fedatlas.federation.yaml import read_yaml
from fedatlas.transport.local import keeping_workers
from fedatlas.transport.rounds import RunFolder, read_run

Tell = Callable[[str], None]
AfterRun = Callable[[str, int], object]
"""Called with the arm and the seed of a run that was just finished."""


def state_of(
    comparison: Comparison, arm: str, seed: int
) -> Literal["finished", "to evaluate", "begun", "absent"]:
    """How far a run is; to evaluate: trained, and evaluated with other options than are asked for. Raises RunFolderError if its
    folder is of another configuration."""
    path, federation = comparison.path(arm, seed), comparison.federations[arm][seed]
    info = path / "run.json"
    if not info.exists():
        return "begun" if path.exists() else "absent"
    about = read_run(path)
    if not is_of(federation, path):
        if changed_evaluation(RunFolder(path), federation):
            return "begun" if about["finished"] is None else "to evaluate"
        raise RunFolderError(
            f"{path}: belongs to another configuration:\n"
            f"{flat_difference(read_yaml(path / 'federation.yaml'), resolved(federation))}\n"
            "Put the values back, give the comparison or the arm another name, or remove the folder"
        )
    return "finished" if about["finished"] is not None else "begun"


def is_of(federation: Federation, path: Path) -> bool:
    """Whether a run folder, or an unpacked record, is of a federation. In a finished run an option that did not exist when it was made
    has its default."""
    about = read_run(path)
    if about["hash"] == hash_of(federation):
        return True
    return about["finished"] is not None and hash_of(load_federation(path / "federation.yaml")) == hash_of(
        federation
    )


@keeping_workers()
def run_comparison(
    comparison: Comparison,
    *,
    arms: Sequence[str] | None = None,
    tell: Tell = print,
    passing: Tell = lambda text: None,
    after_run: AfterRun = lambda arm, seed: None,
) -> dict[str, str]:
    """Trains what is not finished, seed by seed over all arms; returns run -> why it failed. Raises DataError, before any training, if
    the data of no run are there, or no case of what is measured.

    arms: those to train; None: all. tell: is given a line per finished run; passing: what is going on. after_run: is called with the arm and
    the seed of every run that it finished.
    """
    named = dict.fromkeys([*comparison.arms, *comparison.federations])
    for arm in arms or ():
        if arm not in named:
            raise not_known(f"{comparison.name}: the arm", arm, named)
    chosen = [
        trained
        for arm in comparison.arms
        for trained in comparison.trained(arm)
        if arms is None or arm in arms or trained in arms
    ]
    stale: set[str] = set()
    todo: list[tuple[str, int]] = []
    failed: dict[str, str] = {}
    done = 0
    for seed in comparison.seeds:
        for arm in chosen:
            try:
                if state_of(comparison, arm, seed) == "finished":
                    done += 1
                    _tell_of_code(comparison, arm, seed, tell)
                else:
                    todo.append((arm, seed))
            except FedAtlasError as error:
                failed[f"{arm}-s{seed}"] = str(error)
                tell(f"{arm}-s{seed}: {str(error).splitlines()[0] if arm in stale else error}")
                stale.add(arm)
    _some_data([comparison.federations[arm][seed] for arm, seed in todo])
    _some_cases(comparison, todo)
    total = len(chosen) * len(comparison.seeds)
    tell(f"{comparison.folder}: {total} runs, {done} finished, {len(todo)} to do")
    for note in dict.fromkeys(
        note for arm, seed in todo for note in slow_precision(comparison.federations[arm][seed])
    ):
        tell(f"note: {note}")
    spent: dict[str, list[float]] = {}
    for number, (arm, seed) in enumerate(todo):
        run, began = f"{arm}-s{seed}", time.monotonic()
        place = f"{total - len(todo) + number + 1} of {total}"
        error = _run_one(comparison, arm, seed, lambda text, place=place: passing(f"{place}, {text}"))
        minutes = (time.monotonic() - began) / 60
        if error:
            failed[run] = error
            tell(f"{run}: failed: {error}")
        else:
            after_run(arm, seed)
            spent.setdefault(arm, []).append(minutes)
            value = _mean_text(comparison, arm, seed)
            left = sum(_expected(spent, name) for name, _ in todo[number + 1 :])
            more = len(todo) - number - 1
            rest = f"; {more} left, about {_clock(left)}" if more else ""
            tell(f"{run}: {minutes:.1f} minutes, {value}{rest}")
    return failed


def _tell_of_code(comparison: Comparison, arm: str, seed: int, tell: Tell) -> None:
    """Says of a finished run if a method or a loss of one's own was written otherwise when it was trained."""
    path = comparison.path(arm, seed)
    if changed := differing_code(read_run(path), comparison.federations[arm][seed]):
        tell(
            f"note: {arm}-s{seed} was trained with other code of {' and '.join(changed)} than there is now; remove {path} to train it again"
        )


def _some_data(federations: Sequence[Federation]) -> None:
    """Raises DataError, with the folders that are not there, if every federation lacks one."""
    lacking = [
        [site.path for site in of.sites if site.path and not Path(site.path).expanduser().is_dir()]
        for of in federations
    ]
    if lacking and all(lacking):
        folders = list(dict.fromkeys(path for paths in lacking for path in paths))
        raise DataError(
            f"nothing was trained, as every run lacks data; no such folder: {', '.join(folders)}. Correct --data, or `path` of "
            "the sites in the federation file"
        )


def _some_cases(comparison: Comparison, todo: Sequence[tuple[str, int]]) -> None:
    """Raises DataError if the sites that count have no case of the split that `measure` asks for in the first of these runs that scores
    any, or none has a validation case though it asks for the best model. What is wrong with a site's data is for the run to say."""
    split = comparison.measure.split
    for arm, seed in todo:
        federation = comparison.federations[arm][seed]
        sites = [site.name for site in federation.sites if comparison.counts(arm, site.name)]
        if sites:
            break
    else:
        return
    try:
        sources = Experiment(federation, cache_folder(federation, comparison.folder)).sources
    except FedAtlasError:
        return
    if not any(sources[name].items[split] for name in sites):
        sited = split == "test" and federation.task == "segmentation"
        key = "`split: {test: …}` of the sites" if sited else f"`evaluation.{split}`"
        raise DataError(
            f"nothing was trained, as nothing could be measured: `measure` asks for {split} cases, and there are none at "
            f"{', '.join(sites)}. Set {key} in the federation file, or ask for `split: "
            f"{'validation' if split == 'test' else 'test'}` in `measure`"
        )
    best = comparison.measure.model == "best" and arm not in comparison.measure.local
    if best and not any(source.items["validation"] for source in sources.values()):
        raise DataError(
            "nothing was trained, as nothing could be measured: `measure` asks for the model of the round that was best on validation "
            "cases, and no site has any. Set `evaluation.validation` in the federation file, or ask for `model: last` in `measure`"
        )


def _run_one(comparison: Comparison, arm: str, seed: int, passing: Tell) -> str | None:
    """Trains one run to its end; why it failed, or None."""
    path, federation = comparison.path(arm, seed), comparison.federations[arm][seed]
    run = f"{arm}-s{seed}"

    ends: list[float] = []

    def after_round(record: Any, best: Any) -> None:
        ends.append(time.monotonic())
        score = "" if best.last_score is None else f", validation {best.last_score:.3f}"
        left = ""
        if len(ends) > 1:
            minutes = (ends[-1] - ends[0]) / (len(ends) - 1) * (federation.rounds - record.number) / 60
            left = f", about {_clock(minutes)} left of this run"
        passing(f"{run}: round {record.number} of {federation.rounds}{score}{left}")

    passing(f"{run}: begins")
    try:
        run_federation(
            federation,
            path,
            resume=True,
            tell=lambda text: passing(f"{run}: {text}"),
            after_round=after_round,
        )
    except FedAtlasError as error:
        return str(error)
    except Exception as error:
        # the other arms go on; where this one broke stands in its folder
        path.mkdir(parents=True, exist_ok=True)
        (path / "error.txt").write_text(traceback.format_exc(), encoding="utf-8")
        return f"{type(error).__name__}: {error} (where: {path / 'error.txt'})"
    (path / "error.txt").unlink(missing_ok=True)
    return None


def _expected(spent: Mapping[str, Sequence[float]], arm: str) -> float:
    """Minutes of a run: the mean of its arm so far, else of all."""
    of_arm = spent.get(arm) or [minutes for values in spent.values() for minutes in values]
    return sum(of_arm) / len(of_arm)


def _clock(minutes: float) -> str:
    return f"{minutes / 60:.1f} hours" if minutes >= 90 else f"{minutes:.0f} minutes"


def _mean_text(comparison: Comparison, arm: str, seed: int) -> str:
    known, rows = comparison.measure.known, rows_of(comparison, arm, seed)
    mean = average(comparison, cell_means([row for row in rows if known in (None, bool(row["known"]))]))
    what = f"mean {comparison.metric} ({comparison.measure.split})"
    return f"{what} {mean:.3f}" if mean is not None else f"{what} not defined"


Cells = dict[tuple[str, str], float | None]
"""(site, class) -> the mean over its cases."""


def average(comparison: Comparison, cells: Cells) -> float | None:
    """The mean of a table: over its columns, which are classes, or cells of site and class; or over sites."""
    if comparison.layout.average == "sites":
        return site_index(cells)
    by_site = comparison.layout.columns == "site-class"
    return mean_of_defined((cells if by_site else class_means(cells)).values())


def all_rows(comparison: Comparison, arm: str, seed: int) -> list[dict[str, Any]]:
    """The rows of a finished run's final evaluation: before post-processing, or with `measure.postprocess` after it,
    under the same names of models. Of a metric that voxels and findings share those of voxels, if they are evaluated."""
    path = comparison.path(arm, seed)
    rows = read_rows(path / "rows.csv")
    require_rows(path / "rows.csv", read_run(path), len(rows))
    if of_cases(comparison):
        rows = [row for row in rows if row["case"]]
    if comparison.measure.postprocess:
        after = [row for row in rows if row["model"].startswith(POST)]
        return [{**row, "model": row["model"].removeprefix(POST)} for row in after]
    return [row for row in rows if not row["model"].startswith(POST)]


def rows_of(comparison: Comparison, arm: str, seed: int) -> list[Mapping[str, Any]]:
    """The rows of a finished run that the tables average, before `measure.known`: of an arm of `measure.local` those
    of every site's local model at its own site.

    Where the best round was the last, the run holds its rows once, as "best"."""
    measure = comparison.measure
    if arm in measure.local:
        of_models = local_rows(comparison, arm, seed)
        return [row for owner, rows in of_models.items() for row in rows if row["site"] == owner]
    kept = kept_model(comparison.path(arm, seed), measure.model)
    return select(_measured(comparison, arm, seed), model=kept)


def local_rows(comparison: Comparison, arm: str, seed: int) -> dict[str, list[Mapping[str, Any]]]:
    """Site -> the rows of its local model on the classes that it annotates, at the site itself and at those that do
    not train."""
    about = read_run(comparison.path(arm, seed))["sites"]
    sites = comparison.federations[arm][seed].sites
    tested = {site.name for site in sites if site.role == "test"}
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in _measured(comparison, arm, seed):
        kind, _, owner = row["model"].partition("/")
        if kind == "local" and row["site"] in {owner, *tested} and row["class"] in about[owner]["annotated"]:
            found.setdefault(owner, []).append(row)
    return {site.name: found[site.name] for site in sites if site.name in found}


def _measured(comparison: Comparison, arm: str, seed: int) -> list[Mapping[str, Any]]:
    """The rows of all models, of the metric, split and sites of `measure`."""
    measure = comparison.measure
    rows = select(all_rows(comparison, arm, seed), metric=comparison.metric, split=measure.split)
    return [row for row in rows if comparison.counts(arm, row["site"])]


def kept_model(path: Path, model: str) -> str:
    """The name under which a finished run holds the rows of a model: "best" for "last" where both were to be evaluated
    and are the same round."""
    if model != "last" or any(row["model"] == model for row in read_rows(path / "rows.csv")):
        return model
    return "best"
