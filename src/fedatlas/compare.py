"""Comparisons: several arms that differ in what they say they differ in, each with several seeds, under one budget.

A comparison file names a federation file and what every arm changes in it. Each (arm, seed) is an ordinary run in a
folder of its own, so that a comparison that was stopped goes on where it was, run by run and round by round.
"""

import copy
import io
import re
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import yaml

from fedatlas.build import Experiment, cache_folder
from fedatlas.engine.run import read_json
from fedatlas.engine.store import write_atomic
from fedatlas.errors import DataError, FedAtlasError, FederationError, RunFolderError
from fedatlas.evaluation.classification import Predictions, Threshold, bootstrap_difference
from fedatlas.evaluation.statistics import (
    cell_means,
    class_means,
    differences,
    mean_of_defined,
    mean_ranks,
    read_rows,
    select,
)
from fedatlas.experiment import (
    METRICS_OF,
    Federation,
    flat_difference,
    hash_of,
    load_federation,
    make_method,
    parse_federation,
    read_yaml,
    resolved,
    selects,
)
from fedatlas.labels import LabelSpace
from fedatlas.method import declared, eval_members
from fedatlas.options import from_dict, not_known, option, options
from fedatlas.report.comparison import LOWER, html, markdown
from fedatlas.seeds import seed_of
from fedatlas.session import git_revision, run_federation
from fedatlas.trained import Trained
from fedatlas.trained_images import probabilities

Tell = Callable[[str], None]

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
PUBLISHED = ("docs", "results.md")
"""The page that holds nothing but what the profile `full` finished."""


@options
class Measure:
    """What the tables of a comparison average."""

    metric: str | None = option(
        None, "Of the final evaluation; null: dice, or auroc for labels of whole images."
    )
    split: Literal["test", "validation"] = option("test", "The cases that are scored.")
    model: str = option("best", "best, last or local/<site>.", pattern=r"^(best|last|local/.+)$")
    sites: tuple[str, ...] | None = option(None, "Sites that are averaged over; null: all.")
    known: bool | None = option(
        None,
        "true: only classes that the case's own site annotates for the first arm; false: only the others; null: all.",
    )


@options
class Profile:
    """A budget of a comparison. Every further key of it changes the federation file of all arms."""

    seeds: int | None = option(None, "How many of the file's seeds; null: all.", ge=1)
    rounds: int | None = option(None, "Rounds of every arm; null: as the base says.", ge=1)
    steps: int | None = option(
        None,
        "Optimizer steps per site and round; a method that pools the sites gets those of all sites. Null: as the base "
        "says.",
        ge=1,
    )
    arms: dict[str, dict[str, Any]] = option({}, "Arm -> what it changes in this profile, beside its own.")


@options
class ComparisonFile:
    """A comparison file."""

    name: str = option(
        ..., "Names the folder of its runs and its place on a page.", pattern=f"^{NAME.pattern}$"
    )
    base: str = option(..., "The federation file, relative to this one.")
    arms: dict[str, dict[str, Any] | None] = option(
        ..., "Arm -> what it changes in the base; the first is the reference.", min_length=1
    )
    seeds: tuple[int, ...] = option((0,), "Seeds of every arm.", min_length=1)
    profiles: dict[str, dict[str, Any]] = option({}, "Name -> budget, and what it changes for all arms.")
    measure: Measure = option(Measure(), "What the tables average.")  # type: ignore[call-arg]
    tables: tuple[Measure, ...] = option((), "Further tables of means, beside that of `measure`.")
    printed: dict[str, dict[str, float]] = option(
        {}, "Published numbers: arm -> class, or mean -> value; they stand beside ours."
    )


@dataclass(frozen=True)
class Comparison:
    """What is to be run and compared. federations: arm -> seed -> federation, in order; the first arm is the reference.
    folder: holds a run folder per arm and seed. command: what makes the table, for a reader."""

    name: str
    profile: str | None
    federations: Mapping[str, Mapping[int, Federation]]
    measure: Measure
    printed: Mapping[str, Mapping[str, float]]
    folder: Path = Path()
    command: str = ""
    tables: Sequence[Measure] = ()

    @property
    def arms(self) -> list[str]:
        return list(self.federations)

    @property
    def seeds(self) -> list[int]:
        return list(next(iter(self.federations.values())))

    @property
    def metric(self) -> str:
        return self.measure.metric or selects(self.first)

    @property
    def first(self) -> Federation:
        """Of the reference arm."""
        return next(iter(next(iter(self.federations.values())).values()))

    def path(self, arm: str, seed: int) -> Path:
        """The run folder."""
        return self.folder / f"{arm}-s{seed}"


def load_comparison(
    files: Sequence[Path],
    *,
    profile: str | None = None,
    data: Path | None = None,
    runs: Path = Path("runs"),
    seeds: int | None = None,
    workers: int | None = None,
) -> Comparison:
    """One comparison file, or federation files of which each is an arm.

    data: the folder from which relative site paths of the base are taken. seeds: how many; of federation files the
    seeds 0, 1, … in place of their own. workers: in place of `engine.workers`.

    Raises FederationError naming the file, the key, what was got and what is allowed.
    """
    raw = read_yaml(files[0])
    if len(files) == 1 and ("arms" in raw or "base" in raw):
        given = _from_file(files[0], raw, profile, data, seeds)
    else:
        given = _from_federations(files, profile, data, seeds)
    folder = runs / (f"{given.name}-{given.profile}" if given.profile else given.name)

    def placed(federation: Federation) -> Federation:
        engine = federation.engine
        cache = engine.cache or str((runs / ".cache").resolve())
        workers_ = engine.workers if workers is None else workers
        return replace(federation, engine=replace(engine, cache=cache, workers=workers_))

    federations = {
        arm: {seed: placed(federation) for seed, federation in of_arm.items()}
        for arm, of_arm in given.federations.items()
    }
    words = ["fedatlas compare", *map(_shown, files)]
    words += [f"--profile {profile}"] if profile else []
    words += ["--data DIR"] if data else []
    words += [f"--seeds {seeds}"] if seeds else []
    found = replace(given, federations=federations, folder=folder, command=" ".join(words))
    for measure in (found.measure, *found.tables):
        _check_measure(replace(found, measure=measure), files[0])
    return found


def _shown(path: Path) -> str:
    if path.is_absolute() and path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    return path.name if path.is_absolute() else str(path)


def _from_file(
    file: Path, raw: dict[str, Any], profile: str | None, data: Path | None, seeds: int | None
) -> Comparison:
    given = from_dict(ComparisonFile, raw, what=str(file))
    for what, names in (("arm", given.arms), ("profile", given.profiles)):
        for name in names:
            if not NAME.fullmatch(name):
                raise FederationError(
                    f"{file}: the {what} {name!r}: a name of letters, digits, '.', '_' and '-' is expected"
                )
    if profile is None and given.profiles:
        raise FederationError(
            f"{file}: say which profile, with --profile; there are: {', '.join(given.profiles)}"
        )
    if profile is not None and profile not in given.profiles:
        raise not_known(f"{file}: the profile", profile, given.profiles)
    budget, common = _budget(file, given, profile)
    chosen = _seeds(file, given.seeds, budget.seeds, seeds)
    for arm in budget.arms:
        if arm not in given.arms:
            raise not_known(f"{file}: profiles: {profile}: the arm", arm, given.arms)
    for arm in given.printed:
        if arm not in given.arms:
            raise not_known(f"{file}: printed: the arm", arm, given.arms)
    base_path = file.parent / given.base
    base = read_yaml(base_path)
    if data is not None:
        base["sites"] = _from_data(base_path, base, data)
    federations: dict[str, dict[int, Federation]] = {}
    for arm, changes in given.arms.items():
        what = f"{file}: arm {arm}"
        own = [changes or {}, budget.arms.get(arm, {})]
        federation = _arm(base, base_path, what, budget, common, own)
        named = "-".join(part for part in (given.name, profile, arm) if part)
        federations[arm] = {seed: replace(federation, name=f"{named}-s{seed}", seed=seed) for seed in chosen}
    return Comparison(given.name, profile, federations, given.measure, given.printed, tables=given.tables)


def _budget(file: Path, given: ComparisonFile, profile: str | None) -> tuple[Profile, dict[str, Any]]:
    """A profile, and what it changes in the federation of all arms."""
    if profile is None:
        return Profile(), {}  # type: ignore[call-arg]
    raw = given.profiles[profile] or {}
    keys = [*Profile.__pydantic_fields__]  # type: ignore[attr-defined]
    allowed = [*Federation.__pydantic_fields__]  # type: ignore[attr-defined]
    for key in raw:
        if key not in keys and key.partition(".")[0] not in allowed:
            raise not_known(f"{file}: profiles: {profile}: the key", key, [*keys, *allowed])
    own = from_dict(Profile, {k: v for k, v in raw.items() if k in keys}, what=f"{file}: profiles: {profile}")
    return own, {k: v for k, v in raw.items() if k not in keys}


def _seeds(file: Path, listed: Sequence[int], wanted: int | None, asked: int | None) -> list[int]:
    if len(set(listed)) < len(listed):
        raise FederationError(f"{file}: seeds: {list(listed)} holds one twice")
    count = asked or wanted or len(listed)
    if count > len(listed):
        raise FederationError(f"{file}: {count} seeds were asked for, and the file lists {list(listed)}")
    return list(listed[:count])


def _arm(
    base: Mapping[str, Any],
    base_path: Path,
    what: str,
    budget: Profile,
    common: Mapping[str, Any],
    own: Sequence[Mapping[str, Any]],
) -> Federation:
    """The federation of an arm: base, what the profile changes, its budget, what the arm changes."""
    raw = copy.deepcopy(dict(base))
    change(raw, common, what)
    if budget.rounds:
        raw["rounds"] = budget.rounds
    if budget.steps:
        change(raw, {"local": {"steps": budget.steps, "epochs": None}}, what)
    for changes in own:
        change(raw, changes, what)
    named = {key for changes in own for key in _keys(changes)}
    if "local.epochs" in named and "local.steps" not in named:
        raw["local"]["steps"] = None
    if "local.steps" in named and "local.epochs" not in named:
        raw["local"]["epochs"] = None
    federation = parse_federation(raw, base=base_path.parent, source=what)
    own_steps = named & {"local.steps", "local.epochs"}
    if budget.steps and not own_steps and declared(make_method(federation), "pooled"):
        training = sum(site.role == "train" for site in federation.sites)
        federation = replace(federation, local=replace(federation.local, steps=budget.steps * training))
    return federation


def _keys(changes: Any, prefix: str = "") -> Iterable[str]:
    for key, value in changes.items():
        yield f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _keys(value, f"{prefix}{key}.")


def change(raw: dict[str, Any], changes: Mapping[str, Any], what: str) -> None:
    """Changes a raw federation in place. A key is a key of the file, with a mapping that is merged, or a key.path;
    under `sites` names stand for entries, and * for all of them. Another method or net by name replaces the whole
    block.

    Raises FederationError for a path that leads nowhere.
    """
    for key, value in changes.items():
        _change(raw, str(key).split("."), copy.deepcopy(value), f"{what}: {key}", ())


def _change(place: Any, path: list[str], value: Any, what: str, above: tuple[str, ...]) -> None:
    part, rest = path[0], path[1:]
    if isinstance(place, list):
        names = [item.get("name") if isinstance(item, dict) else None for item in place]
        if part != "*" and part not in names:
            raise not_known(f"{what}: the entry of {'.'.join(above)}", part, [str(name) for name in names])
        for entry, name in zip(place, names, strict=True):
            if part in ("*", name):
                _into(entry, rest, value, what, (*above, str(name)))
        return
    if not isinstance(place, dict):
        raise FederationError(f"{what}: {'.'.join(above)} is {place!r} and has no keys")
    old = place.get(part)
    if not rest and not isinstance(value, Mapping):
        # options of one method or net do not fit another
        if part == "name" and above in (("method",), ("net",)) and old != value:
            place.clear()
        place[part] = value
    elif not rest and above == () and part in ("method", "net"):
        if not isinstance(old, dict) or value.get("name", old.get("name")) != old.get("name"):
            place[part] = value
        else:
            _into(old, [], value, what, (part,))
    elif not rest and not isinstance(old, dict | list):
        place[part] = value
    else:
        _into(place.setdefault(part, {}), rest, value, what, (*above, part))


def _into(place: Any, rest: list[str], value: Any, what: str, above: tuple[str, ...]) -> None:
    if rest:
        _change(place, rest, value, what, above)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _change(place, [str(key)], item, what, above)
    else:
        raise FederationError(
            f"{what}: {value!r} given for the whole of {'.'.join(above)}; expected its keys"
        )


def _from_data(path: Path, base: Mapping[str, Any], data: Path) -> Any:
    """The sites of a federation file, with those of their paths that the file gives as relative ones under `data`."""
    sites = base.get("sites")
    if not isinstance(sites, list):
        return sites
    written = _as_written(path)
    found = []
    for site, own in zip(sites, written, strict=True):
        given = own.get("path") if isinstance(own, dict) else None
        if (
            isinstance(given, str)
            and not given.startswith(("bundled:", "~"))
            and not Path(given).is_absolute()
        ):
            site = {**site, "path": str((data.expanduser() / given).resolve())}
        found.append(site)
    return found


def _as_written(path: Path) -> list[Any]:
    """The list `sites` where the file, or the nearest one that it extends, gives it."""
    raw = yaml.safe_load(path.read_text())
    return raw["sites"] if "sites" in raw else _as_written(path.parent / str(raw["extends"]))


def _from_federations(
    files: Sequence[Path], profile: str | None, data: Path | None, seeds: int | None
) -> Comparison:
    if profile is not None:
        raise FederationError(
            f"--profile {profile}: federation files have no profiles; give a comparison file"
        )
    federations: dict[str, dict[int, Federation]] = {}
    for file in files:
        raw = read_yaml(file)
        if "arms" in raw:
            raise FederationError(f"{file}: is a comparison file; give one alone, or federation files only")
        if data is not None:
            raw["sites"] = _from_data(file, raw, data)
            federation = parse_federation(raw, base=file.parent, source=str(file))
        else:
            federation = load_federation(file)
        if federation.name in federations:
            raise FederationError(
                f"{file}: is called {federation.name!r}, as another of the files; every arm needs a name of its own"
            )
        chosen = range(seeds) if seeds else [federation.seed]
        federations[federation.name] = {seed: replace(federation, seed=seed) for seed in chosen}
    first, *others = federations
    kinds = {name: next(iter(of_arm.values())).task for name, of_arm in federations.items()}
    for name in others:
        if kinds[name] != kinds[first]:
            raise FederationError(
                f"{first} is for {kinds[first]}, {name} for {kinds[name]}; they do not compare"
            )
        (one, *_), (another, *_) = federations[first], federations[name]
        if one != another:
            raise FederationError(
                f"{first} has the seed {one}, {name} {another}; give --seeds, so that all have the same"
            )
    title = "-vs-".join(federations) if len(federations) < 3 else f"{first}-and-{len(others)}-others"
    return Comparison(title, None, federations, Measure(), {})  # type: ignore[call-arg]


def _check_measure(comparison: Comparison, file: Path) -> None:
    """FederationError where the runs will not hold what the tables average."""
    measure = comparison.measure
    for arm, of_arm in comparison.federations.items():
        federation = next(iter(of_arm.values()))
        known = METRICS_OF[federation.task][0]
        if comparison.metric not in known:
            raise not_known(
                f"{file}: measure: metric: for {federation.task} the metric", comparison.metric, known
            )
        evaluation = federation.evaluation
        if comparison.metric not in evaluation.metrics:
            raise FederationError(
                f"{file}: measure.metric is {comparison.metric}, and the arm {arm} evaluates only "
                f"{', '.join(evaluation.metrics)}; add it to evaluation.metrics"
            )
        model = measure.model.partition("/")[0]
        if model not in evaluation.models:
            raise FederationError(
                f"{file}: measure.model is {measure.model}, and the arm {arm} evaluates only "
                f"{', '.join(evaluation.models)}; add it to evaluation.models"
            )
        names = [site.name for site in federation.sites]
        for site in measure.sites or ():
            if site not in names:
                raise not_known(f"{file}: measure: sites: the site", site, names)


def state_of(comparison: Comparison, arm: str, seed: int) -> Literal["finished", "begun", "absent"]:
    """How far a run is. Raises RunFolderError if its folder is of another configuration."""
    path, federation = comparison.path(arm, seed), comparison.federations[arm][seed]
    info = path / "run.json"
    if not info.exists():
        return "begun" if path.exists() else "absent"
    about = read_json(info)
    if about["hash"] != hash_of(federation):
        # an option that did not exist when the run was made has its default in both
        then = load_federation(path / "federation.yaml")
        if about["finished"] is None or hash_of(then) != hash_of(federation):
            raise RunFolderError(
                f"{path}: belongs to another configuration:\n"
                f"{flat_difference(read_yaml(path / 'federation.yaml'), resolved(federation))}\n"
                "Put the values back, give the comparison or the arm another name, or remove the folder"
            )
    return "finished" if about["finished"] is not None else "begun"


def run_comparison(
    comparison: Comparison,
    *,
    arms: Sequence[str] | None = None,
    tell: Tell = print,
    passing: Tell = lambda text: None,
) -> dict[str, str]:
    """Trains what is not finished, seed by seed over all arms; returns run -> why it failed.

    arms: those to train; None: all. tell: is given a line per finished run; passing: what is going on.
    """
    for arm in arms or ():
        if arm not in comparison.federations:
            raise not_known(f"{comparison.name}: the arm", arm, comparison.federations)
    chosen = [arm for arm in comparison.arms if arms is None or arm in arms]
    stale: set[str] = set()
    todo: list[tuple[str, int]] = []
    failed: dict[str, str] = {}
    done = 0
    for seed in comparison.seeds:
        for arm in chosen:
            try:
                if state_of(comparison, arm, seed) == "finished":
                    done += 1
                else:
                    todo.append((arm, seed))
            except FedAtlasError as error:
                failed[f"{arm}-s{seed}"] = str(error)
                tell(f"{arm}-s{seed}: {str(error).splitlines()[0] if arm in stale else error}")
                stale.add(arm)
    total = len(chosen) * len(comparison.seeds)
    tell(f"{comparison.folder}: {total} runs, {done} finished, {len(todo)} to do")
    spent: dict[str, list[float]] = {}
    for number, (arm, seed) in enumerate(todo):
        run, began = f"{arm}-s{seed}", time.monotonic()
        error = _run_one(comparison, arm, seed, passing)
        minutes = (time.monotonic() - began) / 60
        if error:
            failed[run] = error
            tell(f"{run}: failed: {error}")
        else:
            spent.setdefault(arm, []).append(minutes)
            value = _mean_text(comparison, arm, seed)
            left = sum(_expected(spent, name) for name, _ in todo[number + 1 :])
            more = len(todo) - number - 1
            rest = f"; {more} left, about {_clock(left)}" if more else ""
            tell(f"{run}: {minutes:.1f} minutes, {value}{rest}")
    return failed


def _run_one(comparison: Comparison, arm: str, seed: int, passing: Tell) -> str | None:
    """Trains one run to its end; why it failed, or None."""
    path, federation = comparison.path(arm, seed), comparison.federations[arm][seed]
    run = f"{arm}-s{seed}"

    def after_round(record: Any, best: Any) -> None:
        score = "" if best.last_score is None else f", validation {best.last_score:.3f}"
        passing(f"{run}: round {record.number} of {federation.rounds}{score}")

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
        (path / "error.txt").write_text(traceback.format_exc())
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
    mean = mean_of_defined(class_means(cell_means(rows_of(comparison, arm, seed))).values())
    what = f"mean {comparison.metric} ({comparison.measure.split})"
    return f"{what} {mean:.3f}" if mean is not None else f"{what} not defined"


def rows_of(comparison: Comparison, arm: str, seed: int) -> list[Mapping[str, Any]]:
    """The rows of a finished run that the tables average, before `measure.known`.

    Where the best round was the last, the run holds its rows once, as "best"."""
    path, measure = comparison.path(arm, seed), comparison.measure
    rows = select(read_rows(path / "rows.csv"), metric=comparison.metric, split=measure.split)
    rows = select(rows, model="best" if _last_is_best(path, measure.model) else measure.model)
    return [row for row in rows if measure.sites is None or row["site"] in measure.sites]


Cells = dict[tuple[str, str], float | None]
"""(site, class) -> the mean over its cases."""


def collect(
    comparison: Comparison, *, means_only: bool = False, tell: Tell = lambda text: None
) -> dict[str, Any]:
    """What the finished runs came to, as plain values; runs that are not finished have none.

    arms: name -> seeds (finished), per_class (class -> a value or None per seed, the mean over sites of the mean over
    cases), mean (per seed, over classes), undefined (cells without a value that another arm has), hours (of the
    rounds), commits, problems. differences: arm -> against the first, over cells of site, class and seed.
    ranks: of the arms of which every seed is finished, over cells of site and class, each the mean over seeds.
    bootstrap: where labels are of whole images, arm -> the interval by patient of the same difference. tables: the same of
    the further tables, without these comparisons (means_only).

    A cell that the first finished arm does not have is not counted for any: an arm that was given more labels is
    scored on what all are.
    """
    counted: dict[tuple[str, str, str], bool] = {}
    cells: dict[str, dict[int, Cells]] = {}
    arms: dict[str, dict[str, Any]] = {}
    for arm in comparison.arms:
        cells[arm], problems, hours, commits = {}, [], 0.0, []
        rows: dict[int, list[Mapping[str, Any]]] = {}
        for seed in comparison.seeds:
            path = comparison.path(arm, seed)
            try:
                if state_of(comparison, arm, seed) == "finished":
                    rows[seed] = rows_of(comparison, arm, seed)
                    hours += _hours(path)
                    commits.append(read_json(path / "run.json")["git"])
            except FedAtlasError as error:
                problems.append(str(error))
        if not counted:
            counted = {_place(row): row["known"] for of_seed in rows.values() for row in of_seed}
        wanted = [key for key, known in counted.items() if comparison.measure.known in (None, known)]
        for seed, of_seed in rows.items():
            cells[arm][seed] = cell_means(row for row in of_seed if _place(row) in set(wanted))
        means = {seed: class_means(found) for seed, found in cells[arm].items()}
        names = dict.fromkeys(name for of_seed in means.values() for name in of_seed)
        arms[arm] = {
            "seeds": list(means),
            "per_class": {name: [of_seed.get(name) for of_seed in means.values()] for name in names},
            "mean": [mean_of_defined(of_seed.values()) for of_seed in means.values()],
            "hours": hours,
            "commits": list(dict.fromkeys(commits)),
            "problems": problems,
        }
    there = {
        (seed, key)
        for of_arm in cells.values()
        for seed, found in of_arm.items()
        for key, value in found.items()
        if value is not None
    }
    for arm, of_arm in cells.items():
        arms[arm]["undefined"] = sum(of_arm[seed].get(key) is None for seed, key in there if seed in of_arm)
    federation = comparison.first
    found = {
        "name": comparison.name,
        "profile": comparison.profile,
        "command": comparison.command,
        "commit": git_revision(),
        "task": federation.task,
        "seeds": comparison.seeds,
        "metric": comparison.metric,
        "split": comparison.measure.split,
        "model": comparison.measure.model,
        "sites": None if comparison.measure.sites is None else list(comparison.measure.sites),
        "known": comparison.measure.known,
        "classes": _classes(comparison, arms),
        "budget": {arm: _budget_of(of_arm) for arm, of_arm in comparison.federations.items()},
        "arms": arms,
        "printed": {arm: dict(values) for arm, values in comparison.printed.items()},
    }
    if not means_only:
        others = [replace(comparison, measure=measure) for measure in comparison.tables]
        found |= _compared(comparison, cells)
        found["bootstrap"] = _bootstrap(comparison, cells, tell)
        found["tables"] = [collect(other, means_only=True) for other in others]
    return found


def _compared(comparison: Comparison, cells: Mapping[str, Mapping[int, Cells]]) -> dict[str, dict[str, Any]]:
    """Differences to the first arm, and ranks."""
    first, *others = comparison.arms
    flat = {
        arm: {(seed, *key): value for seed, found in of_arm.items() for key, value in found.items()}
        for arm, of_arm in cells.items()
    }
    over_seeds = {
        arm: {key: mean_of_defined(c.get(key) for c in of_arm.values()) for c in of_arm.values() for key in c}
        for arm, of_arm in cells.items()
        if len(of_arm) == len(comparison.seeds)
    }
    ranks = mean_ranks(over_seeds, higher=comparison.metric not in LOWER)
    compared = differences(flat[first], {arm: flat[arm] for arm in others})
    return {
        "differences": {arm: asdict(found) for arm, found in compared.items()},
        "ranks": asdict(ranks) | {"groups": [list(group) for group in ranks.groups]},
    }


def _place(row: Mapping[str, Any]) -> tuple[str, str, str]:
    return row["site"], row["case"], row["class"]


def _classes(comparison: Comparison, found: Mapping[str, Any]) -> list[str]:
    """In the order of the label space where the file gives one."""
    there = dict.fromkeys(name for arm in found.values() for name in arm["per_class"])
    listed = [name for name in comparison.first.labels.names or () if name != "background"]
    return list(dict.fromkeys([*(name for name in listed if name in there or not there), *there]))


def _budget_of(of_arm: Mapping[int, Federation]) -> dict[str, Any]:
    federation = next(iter(of_arm.values()))
    local = federation.local
    return {"rounds": federation.rounds, "steps": local.steps, "epochs": local.epochs}


def _hours(path: Path) -> float:
    """Of all rounds: training and validation."""
    logs = sorted((path / "rounds").glob("[0-9]*/log.json"))
    return sum(sum(read_json(log)["phases"].values()) for log in logs) / 3600


DRAWS = 1000
"""Resamples of patients where the federation file has none of its own."""

LEAST_PATIENTS = 5
"""With fewer patients on either side a class is left out of intervals: many resamples would have no value."""


@dataclass(frozen=True, eq=False)
class Predicted:
    """What a run's model says of a site's images. scores, truth [N, C]; known [N, C]: is there a truth."""

    cases: list[str]
    patients: list[str]
    scores: np.ndarray
    truth: np.ndarray
    known: np.ndarray


class Predictor:
    """Predictions of an arm's runs on the images of its sites, which are on this machine."""

    def __init__(self, comparison: Comparison, arm: str) -> None:
        self.comparison, self.arm = comparison, arm
        self._experiment: Experiment | None = None

    def _sources(self) -> Mapping[str, Any]:
        if self._experiment is None:
            federation = next(iter(self.comparison.federations[self.arm].values()))
            self._experiment = Experiment(federation, cache_folder(federation, self.comparison.folder))
            self._experiment.prepare()
        return self._experiment.sources

    def of(self, seed: int, site: str) -> Predicted:
        """Of a finished run; kept in the site's folder of the run. Raises DataError or FederationError where the
        images are not here."""
        path, measure = self.comparison.path(self.arm, seed), self.comparison.measure
        model = "best" if _last_is_best(path, measure.model) else measure.model
        finished = read_json(path / "run.json")["finished"]
        file = path / "sites" / site / f"predictions-{measure.split}-{model.replace('/', '_')}.npz"
        if file.exists():
            with np.load(file, allow_pickle=False) as kept:
                if str(kept["finished"]) == finished:
                    names = [[str(name) for name in kept[key]] for key in ("cases", "patients")]
                    return Predicted(names[0], names[1], kept["scores"], kept["truth"], kept["known"])
        found = _predict(Trained(path, model), self._sources()[site], site, measure.split)
        file.parent.mkdir(parents=True, exist_ok=True)
        made = io.BytesIO()
        np.savez_compressed(
            made,
            finished=np.array(finished),
            cases=np.array(found.cases, dtype=np.str_),
            patients=np.array(found.patients, dtype=np.str_),
            scores=found.scores,
            truth=found.truth,
            known=found.known,
        )
        write_atomic(file, made.getvalue())
        return found


def _last_is_best(path: Path, model: str) -> bool:
    """Was "last" asked for, and is it kept as "best" because it is the same round?"""
    rounds, file = read_json(path / "run.json")["rounds"], path / "best.json"
    return model == "last" and file.exists() and read_json(file)["round"] == rounds


def _predict(trained: Trained, source: Any, site: str, split: str) -> Predicted:
    """The model that the site is given as that of the federation, on all images of a split; full batches, as in the
    final evaluation."""
    if not trained.model.startswith("local/"):
        file = trained.folder.path / "models" / f"{trained.model}.fa"
        trained.members = eval_members(trained.method, trained.folder.state(file, trained.method), site)
    size, samples = trained.federation.evaluation.batch, list(source.volumes(split))
    scores = np.zeros((len(samples), len(trained.space)))
    for start in range(0, len(samples), size):
        images = torch.stack([sample.image for sample in samples[start : start + size]])
        count = len(images)
        full = torch.cat([images, images[:1].expand(size - count, -1, -1, -1)])
        scores[start : start + count] = probabilities(trained, full)[:count].numpy()
    stacked = {
        key: np.stack([getattr(sample, key).numpy() for sample in samples])
        if samples
        else np.zeros((0, len(trained.space)))
        for key in ("truth", "scored")
    }
    return Predicted(
        [sample.case for sample in samples],
        [f"{site}/{sample.patient}" for sample in samples],
        scores,
        stacked["truth"],
        stacked["scored"].astype(bool),
    )


def _bootstrap(
    comparison: Comparison, cells: Mapping[str, Mapping[int, Cells]], tell: Tell
) -> dict[str, dict[str, Any]]:
    """arm -> interval by patient of its difference to the first arm; {} where labels are not of whole images.

    A resample takes the same patients in all cells. The difference is the mean over all cells of site, class and seed
    where each has LEAST_PATIENTS with and without the class; else, over classes and seeds, of the images of all sites
    put together, of the classes that then have as many.
    """
    federation = comparison.first
    if federation.task != "classification":
        return {}
    first, *others = comparison.arms
    reference, found = Predictor(comparison, first), {}
    for arm in others:
        seeds = [seed for seed in cells[first] if seed in cells[arm]]
        if not seeds:
            continue
        tell(f"{arm}: interval by patient")
        try:
            found[arm] = _interval(comparison, reference, Predictor(comparison, arm), seeds, cells)
        except FedAtlasError as error:
            found[arm] = {"value": None, "reason": str(error).splitlines()[0]}
    return found


def _interval(
    comparison: Comparison,
    reference: Predictor,
    other: Predictor,
    seeds: Sequence[int],
    cells: Mapping[str, Mapping[int, Cells]],
) -> dict[str, Any]:
    parts: list[_Part] = []
    patients: dict[str, list[str]] = {}
    limits: dict[tuple[int, str], tuple[Threshold, Threshold]] = {}
    for seed in seeds:
        ours, theirs = (_thresholds(comparison, arm, seed) for arm in (other.arm, reference.arm))
        theirs_too = {site for site, _ in cells[other.arm][seed]}
        for site in dict.fromkeys(site for site, _ in cells[reference.arm][seed] if site in theirs_too):
            a, b = other.of(seed, site), reference.of(seed, site)
            if a.cases != b.cases or list(ours) != list(theirs):
                raise DataError(
                    f"{other.arm} and {reference.arm} have other images or classes at site {site}"
                )
            patients[site] = a.patients
            for c, name in enumerate(ours):
                if all(cells[p.arm][seed].get((site, name)) is not None for p in (other, reference)):
                    known = a.known[:, c] & b.known[:, c]
                    truth = a.truth[:, c]
                    parts.append(_Part((seed, name), site, a.scores[:, c], b.scores[:, c], truth, known))
                    limits[seed, name] = (ours[name], theirs[name])
    apart = all(_fewest([part], patients) >= LEAST_PATIENTS for part in parts)
    columns = [[part] for part in parts]
    if not apart:
        together = dict.fromkeys(part.of for part in parts)
        columns = [[part for part in parts if part.of == of] for of in together]
        columns = [column for column in columns if _fewest(column, patients) >= LEAST_PATIENTS]
    if not columns:
        return {
            "value": None,
            "reason": f"no class has {LEAST_PATIENTS} patients with it and {LEAST_PATIENTS} without it",
        }
    starts, count = {}, 0
    for site, names in patients.items():
        starts[site], count = count, count + len(names)
    who = [name for names in patients.values() for name in names]

    def spread(key: str, empty: Any) -> np.ndarray:
        """[N of all sites, columns]"""
        made = np.full((len(who), len(columns)), empty)
        for index, column in enumerate(columns):
            for part in column:
                values = getattr(part, key)
                made[starts[part.site] : starts[part.site] + len(values), index] = values
        return made

    truth, known = spread("truth", 0.0), spread("known", False)
    found = bootstrap_difference(
        Predictions(spread("one", 0.0), truth, known, who),
        Predictions(spread("other", 0.0), truth, known, who),
        comparison.metric,
        np.random.default_rng(seed_of("comparison", comparison.name, other.arm)),
        thresholds=[limits[column[0].of][0] for column in columns],
        other_thresholds=[limits[column[0].of][1] for column in columns],
        bins=comparison.first.evaluation.bins,
        draws=comparison.first.evaluation.draws or DRAWS,
    )
    made = asdict(found)
    made.pop("classes")
    over = dict.fromkeys(column[0].of[1] for column in columns)
    return made | {"unit": "site" if apart else "together", "columns": len(columns), "over": list(over)}


@dataclass(frozen=True, eq=False)
class _Part:
    """Of one class and seed (`of`), the images [N] of a site: the scores of both arms, truth, and where it is known."""

    of: tuple[int, str]
    site: str
    one: np.ndarray
    other: np.ndarray
    truth: np.ndarray
    known: np.ndarray


def _fewest(column: Sequence[_Part], patients: Mapping[str, Sequence[str]]) -> int:
    """The smaller one of the numbers of patients with a positive image and with a negative one."""
    counts = [0, 0]
    for part in column:
        names = np.array(patients[part.site])
        for value in (0, 1):
            counts[value] += len(set(names[part.known & (part.truth == value)].tolist()))
    return min(counts)


def _thresholds(comparison: Comparison, arm: str, seed: int) -> dict[str, Threshold]:
    """class -> threshold, of every class in the order of the label space."""
    path = comparison.path(arm, seed)
    names = LabelSpace.from_plain(read_json(path / "run.json")["labels"]).names
    model = "best" if _last_is_best(path, comparison.measure.model) else comparison.measure.model
    file = path / "thresholds.json"
    fitted = read_json(file)["models"].get(model, {}) if file.exists() else {}
    values = {name: fitted.get(name, {}).get("value") for name in names}
    return {
        name: Threshold(value, None, "" if value is not None else "not fitted")
        for name, value in values.items()
    }


def write_page(comparison: Comparison, found: Mapping[str, Any]) -> Path:
    """comparison.html beside the runs: the tables and the critical-difference diagram."""
    page = comparison.folder / "comparison.html"
    page.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(page, html(found).encode())
    return page


def write_table(comparison: Comparison, found: Mapping[str, Any], page: Path) -> None:
    """Puts the tables between the marks of the comparison, <!-- NAME --> and <!-- /NAME -->, on a page; where the page
    has no marks they are added at its end.

    Raises FederationError for a page with one mark only, and as `check_page`.
    """
    check_page(comparison, page)
    begin, end = f"<!-- {comparison.name} -->", f"<!-- /{comparison.name} -->"
    text = page.read_text() if page.exists() else ""
    marked = f"{begin}\n\n{markdown(found)}\n{end}"
    first, last = text.find(begin), text.find(end)
    if first < 0 and last < 0:
        text += ("\n" if text and not text.endswith("\n\n") else "") + marked + "\n"
    elif 0 <= first < last and text.count(begin) == text.count(end) == 1:
        text = text[:first] + marked + text[last + len(end) :]
    else:
        raise FederationError(f"{page}: expected {begin} once, and {end} once after it")
    page.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(page, text.encode())


def check_page(comparison: Comparison, page: Path) -> None:
    """FederationError for a page of results and another profile than full."""
    if page.resolve().parts[-2:] == PUBLISHED and comparison.profile != "full":
        raise FederationError(
            f"--table {page}: holds only what the profile full finished, and this is "
            f"{comparison.profile or 'no profile of a comparison file'}; write to another file"
        )
