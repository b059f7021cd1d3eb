"""What the finished runs of a comparison came to, as plain values."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedatlas.compare.cells import (
    Counted,
    UnitOf,
    Values,
    cell_tests,
    means_of,
    over_cases,
    place_of,
    unit_of,
)
from fedatlas.compare.costs import costs
from fedatlas.compare.curves import curves
from fedatlas.compare.flatness import flatness
from fedatlas.compare.forgetting import forgetting
from fedatlas.compare.intervals import bootstrap
from fedatlas.compare.plan import Comparison
from fedatlas.compare.resampling import Cell, interval_of
from fedatlas.compare.running import Cells, Tell, average, local_rows, rows_of, state_of
from fedatlas.core.errors import FedAtlasError
from fedatlas.core.labels import LabelSpace
from fedatlas.core.pictures import lengths_in_pixels
from fedatlas.core.seeds import seed_of
from fedatlas.evaluation.statistics import LEAST_PAIRS, class_means, differences, mean_of_defined, mean_ranks
from fedatlas.federation.file import Federation, make_method
from fedatlas.federation.record import git_revision
from fedatlas.report.comparison import LOWER
from fedatlas.transport.rounds import RunFolder, read_json, read_run


class Finished(NamedTuple):
    """The finished runs. seeds: arm of the tables -> those of which all that is trained for it is finished; problems: arm -> why
    others do not count."""

    seeds: dict[str, list[int]]
    problems: dict[str, list[str]]


def finished(comparison: Comparison) -> Finished:
    """Which runs are finished."""
    found = Finished({}, {})
    for arm in comparison.arms:
        found.seeds[arm], found.problems[arm] = [], []
        for seed in comparison.seeds:
            states: set[str] = set()
            for one in comparison.trained(arm):
                try:
                    states.add(state := state_of(comparison, one, seed))
                    if state == "to evaluate":
                        found.problems[arm].append(
                            f"{comparison.path(one, seed)}: trained, and evaluated with other options than the file has; without "
                            "--only-table the command evaluates it again, and trains nothing"
                        )
                except FedAtlasError as error:
                    states.add("of another configuration")
                    found.problems[arm].append(str(error))
            if states == {"finished"}:
                found.seeds[arm].append(seed)
    return found


def collect(comparison: Comparison, *, tell: Tell = lambda text: None) -> dict[str, Any]:
    """What the finished runs came to, as plain values; runs that are not finished have none.

    As `means` gives it, and budget: arm -> rounds, steps, epochs, steps before the first round, total steps. compared: arm -> its reference, the arm that
    its difference is to. differences: arm -> against that, over `pairs`:
    "case", or "patient" where `sites[].patient` is set, each the mean over its classes and the seeds (and a patient's cases), or, where labels are of whole images, "cell" of site, class
    and seed. bootstrap: arm -> an interval of the difference of the table's means, by these cases or patients, and by patient where labels
    are of whole images. ranks: of each family of arms that are compared with one another, those of which every seed is
    finished, over cells of site and class, each the mean over seeds; with fewer than LEAST_PAIRS cases or patients no test. tables: `means` of the further tables. costs,
    forgetting, curves, flatness: as the functions of these names give them.
    """
    done = finished(comparison)
    found, values = means(comparison, done)
    cells = {arm: {seed: means_of(of) for seed, of in of_arm.items()} for arm, of_arm in values.items()}
    found["budget"] = {arm: _budget_of(comparison.federation(arm)) for arm in comparison.arms}
    by_case = any(case for of_arm in values.values() for of_seed in of_arm.values() for _, case, _ in of_seed)
    found["compared"] = comparison.compared
    unit = unit_of(comparison)
    found["pairs"] = unit.name if by_case else "cell"
    if by_case:
        found |= _by_case(comparison, values, unit)
        units = {
            (site, unit(site, case)) for arm in values.values() for of in arm.values() for site, case, _ in of
        }
        found["ranks"] = _ranks(comparison, values, tested=len(units) >= LEAST_PAIRS)
    else:
        found["differences"] = _by_cell(comparison, cells)
        found["ranks"] = _ranks(comparison, values)
        found["bootstrap"] = bootstrap(comparison, cells, tell)
    found["tables"] = [means(comparison.table(table), done)[0] for table in comparison.tables]
    found["costs"] = costs(comparison, done.seeds)
    found["forgetting"] = forgetting(comparison, done.seeds)
    found["curves"] = curves(comparison, done.seeds)
    found["flatness"] = flatness(comparison, done.seeds)
    return found


def means(comparison: Comparison, done: Finished) -> tuple[dict[str, Any], dict[str, dict[int, Values]]]:
    """The table of `measure`, and arm -> seed -> the values behind it.

    columns: those of the table, see `_columns`. arms: name -> seeds (finished), per_class (class -> a value or None
    per seed, the mean over sites of the mean over cases), per_cell ("site/class" -> a value or None per seed, the mean
    over cases), mean (per seed, over the columns) and, with columns of site and class, exclude (the same without those
    with a star), undefined (cells of a seed without a value where another arm has one), lacking (the same of single values, by case),
    lacking_in (the cells of these, "site/class"), values (of how many), hours (of the rounds), commits, arithmetic (of the processors,
    None where a run does not say), problems.
    families: the arms in groups, each of those that are compared with one another. rows: with columns of site and class,
    "arm/site" of every arm of `measure.local` -> the same of this site's local model, with a mean only where it has all
    columns; own: `measure.local`. layout: how all is printed. cases, with layout.cells: row ->
    "site/class" -> `OverCases`. tests, with layout.against: see `cell_tests`. Those two have the rows of an arm
    in its place.

    A cell that the first finished arm does not have is not counted for any (see `Counted`): an arm that was given more labels is
    scored on what all are. known_of: that arm, which also says which classes a site annotates.
    """
    scored = _scored(comparison, done)
    values, own = scored.values, scored.own
    starred = _starred(comparison, scored.known)
    cells = {arm: {seed: means_of(of) for seed, of in of_arm.items()} for arm, of_arm in values.items()}
    arms = {
        arm: _row(comparison, of_arm, starred)
        | _of_runs(comparison, arm, of_arm)
        | {"problems": done.problems[arm]}
        for arm, of_arm in cells.items()
    }
    for arm, (undefined, _) in _lacking(cells).items():
        arms[arm]["undefined"] = len(undefined)
    for arm, (lacking, of) in _lacking(values).items():
        there = sorted({f"{site}/{name}" for site, _, name in lacking})
        arms[arm] |= {"lacking": len(lacking), "lacking_in": there, "values": of}
    of_rows = {row: {seed: means_of(of) for seed, of in of_row.items()} for row, of_row in own.items()}
    there_at = dict.fromkeys(
        key for of in (*cells.values(), *of_rows.values()) for of_seed in of.values() for key in of_seed
    )
    own_rows = {row: _row(comparison, of, starred, whole=set(there_at)) for row, of in of_rows.items()}
    measure = comparison.measure
    table = {
        "name": comparison.name,
        "profile": comparison.profile,
        "command": comparison.command,
        "commit": git_revision(),
        "task": comparison.first.task,
        "title": comparison.title,
        "seeds": comparison.seeds,
        "families": comparison.families,
        "metric": comparison.metric,
        "split": measure.split,
        "model": measure.model,
        "sites": None if measure.sites is None else list(measure.sites),
        "left_out": bool(comparison.left_out),
        "folds": comparison.folds,
        "known": measure.known,
        "known_of": scored.known_of,
        "pixels": _in_pixels(comparison, done),
        "postprocess": measure.postprocess,
        "classes": _classes(comparison, arms | own_rows),
        "arms": arms,
        "printed": {arm: dict(values) for arm, values in comparison.printed.items()},
    }
    table["columns"] = _columns(comparison, table["classes"], list(there_at), starred)
    table["layout"] = asdict(comparison.layout)
    table["own"] = list(measure.local)
    table["rows"] = own_rows
    replaced = {row.partition("/")[0] for row in own}
    table |= _by_cases(comparison, {a: of for a, of in values.items() if a not in replaced} | own, values)
    return table, values


def _in_pixels(comparison: Comparison, done: Finished) -> bool:
    """Are lengths those of pixels, in the runs of the first arm that has any?"""
    first = next(((comparison.trained(arm)[0], seeds[0]) for arm, seeds in done.seeds.items() if seeds), None)
    return first is not None and lengths_in_pixels(read_run(comparison.path(*first))["sites"])


class _Scored(NamedTuple):
    """The values that count. values: arm -> seed -> of its runs; own: "arm/site" -> seed -> of this site's local model, for the
    arms of `measure.local`; known_of, known: the first finished arm, and whether a site annotates a class in its runs."""

    values: dict[str, dict[int, Values]]
    own: dict[str, dict[int, Values]]
    known_of: str
    known: Mapping[tuple[str, str, str], bool]


def _scored(comparison: Comparison, done: Finished) -> _Scored:
    counted = Counted({}, None)
    found = _Scored({}, {}, next(iter(comparison.arms)), counted.known)
    by_site = comparison.layout.columns == "site-class"
    for arm in comparison.arms:
        rows: dict[str, dict[int, list[Mapping[str, Any]]]] = {arm: {}}
        for seed in done.seeds[arm]:
            rows[arm][seed] = [
                row for one in comparison.trained(arm) for row in rows_of(comparison, one, seed)
            ]
            if by_site and arm in comparison.measure.local:
                for site, of_seed in local_rows(comparison, arm, seed).items():
                    rows.setdefault(f"{arm}/{site}", {})[seed] = of_seed
        if not counted.seeds and done.seeds[arm]:
            of_seeds = {
                seed: [row for of in rows.values() for row in of.get(seed, ())] for seed in done.seeds[arm]
            }
            counted = Counted(of_seeds, comparison.measure.known)
            found = found._replace(known_of=arm, known=counted.known)
        for name, of in rows.items():
            of_name = found.values if name == arm else found.own
            of_name[name] = {
                seed: {place_of(row): row["value"] for row in of_seed if counted(seed, row)}
                for seed, of_seed in of.items()
            }
    return found


def _of_runs(comparison: Comparison, arm: str, seeds: Iterable[int]) -> dict[str, Any]:
    """What the run folders of an arm say of how it was made: hours, commits and arithmetic, see `means`."""
    paths = [comparison.path(one, seed) for seed in seeds for one in comparison.trained(arm)]
    runs = [read_run(path) for path in paths]
    return {
        "hours": sum(_hours(path) for path in paths),
        "commits": list(dict.fromkeys(run["git"] for run in runs)),
        "arithmetic": list(dict.fromkeys((run.get("machine") or {}).get("arithmetic") for run in runs)),
    }


def _starred(comparison: Comparison, counted: Mapping[tuple[str, str, str], bool]) -> set[tuple[str, str]]:
    """The cells of classes that their site does not annotate; none where that holds of all."""
    trained = {(site, name) for (site, _, name), known in counted.items() if known}
    wanted = comparison.measure.known
    cells = {(site, name) for (site, _, name), known in counted.items() if wanted in (None, known)}
    return cells - trained if cells & trained else set()


def _lacking(
    found: Mapping[str, Mapping[int, Mapping[Any, float | None]]],
) -> dict[str, tuple[list[Any], int]]:
    """arm -> the keys of values that it lacks and another arm has, over its seeds, and how many values there are. found: arm -> seed ->
    values."""
    there: dict[int, set[Any]] = {}
    for of_arm in found.values():
        for seed, of_seed in of_arm.items():
            there.setdefault(seed, set()).update(key for key, value in of_seed.items() if value is not None)
    return {
        arm: (
            [key for seed, of_seed in of_arm.items() for key in there[seed] if of_seed.get(key) is None],
            sum(len(there[seed]) for seed in of_arm),
        )
        for arm, of_arm in found.items()
    }


def _row(
    comparison: Comparison,
    cells: Mapping[int, Cells],
    starred: set[tuple[str, str]],
    whole: set[tuple[str, str]] | None = None,
) -> dict[str, Any]:
    """What stands in a row of a table, see `means`. whole: no mean in a seed that lacks one of these cells."""
    found = [class_means(of_seed) for of_seed in cells.values()]

    def mean(of_seed: Cells, without: set[tuple[str, str]]) -> float | None:
        if whole is not None and any(of_seed.get(cell) is None for cell in whole - without):
            return None
        return average(comparison, {key: value for key, value in of_seed.items() if key not in without})

    row = {
        "seeds": list(cells),
        "per_class": _per_seed(found),
        "per_cell": {f"{site}/{name}": v for (site, name), v in _per_seed(cells.values()).items()},
        "mean": [mean(of_seed, set()) for of_seed in cells.values()],
    }
    if comparison.layout.columns == "site-class":
        row["exclude"] = [mean(of_seed, starred) for of_seed in cells.values()]
    return row


def _by_cases(
    comparison: Comparison,
    rows: Mapping[str, Mapping[int, Values]],
    arms: Mapping[str, Mapping[int, Values]],
) -> dict[str, Any]:
    """What the layout asks of cases: their spread, and tests against an arm."""
    layout, found = comparison.layout, {}
    if layout.cells == "cases":
        found["cases"] = {
            row: {
                f"{site}/{name}": over._asdict() for (site, name), over in over_cases(values.values()).items()
            }
            for row, values in rows.items()
        }
    if layout.against is not None:
        others = {row: values for row, values in rows.items() if row.partition("/")[0] != layout.against}
        found["tests"] = cell_tests(layout, others, arms[layout.against], unit_of(comparison))
    return found


def _per_seed(found: Iterable[Mapping[Any, float | None]]) -> dict[Any, list[float | None]]:
    """key -> a value or None per seed."""
    found = list(found)
    return {
        key: [of_seed.get(key) for of_seed in found] for key in dict.fromkeys(k for f in found for k in f)
    }


def _columns(
    comparison: Comparison,
    classes: Sequence[str],
    cells: Sequence[tuple[str, str]],
    starred: set[tuple[str, str]],
) -> list[dict[str, Any]]:
    """The columns that hold means, in order: key (in per_class or per_cell), title, group (the site or organ that
    several columns share, or ""), starred (with columns of site and class: does the site not annotate it)."""
    layout = comparison.layout
    organ_of = _organs(comparison)
    order = {name: place for place, name in enumerate(classes)}
    # an organ stands where its first class does
    first = {organ_of.get(name, name): place for name, place in reversed(order.items())}

    def organ(name: str) -> str:
        return organ_of.get(name, name)

    if layout.columns == "class":
        names = classes
        if layout.group == "organ":
            names = sorted(classes, key=lambda name: (first[organ(name)], order[name]))
        grouped = layout.group == "organ"
        return [
            {"key": name, "title": name, "group": organ(name) if grouped else "", "starred": False}
            for name in names
        ]
    listed = [site.name for site in comparison.first.sites]
    sites = {site: place for place, site in enumerate(dict.fromkeys([*listed, *(site for site, _ in cells)]))}
    by_organ = layout.group == "organ"

    def place(cell: tuple[str, str]) -> tuple[int, ...]:
        site, name = cell
        at = (sites[site], order[name])
        return (first[organ(name)], *reversed(at)) if by_organ else at

    return [
        {
            "key": f"{site}/{name}",
            "title": f"{name}, {site}" if by_organ else name,
            "group": organ(name) if by_organ else site,
            "starred": (site, name) in starred,
        }
        for site, name in sorted(cells, key=place)
    ]


def _organs(comparison: Comparison) -> dict[str, str]:
    """class -> its organ, the first class of its group."""
    for arm in comparison.federations:
        for seed in comparison.seeds:
            path = comparison.path(arm, seed)
            if (path / "run.json").exists():
                space = LabelSpace.from_plain(read_run(path)["labels"])
                return {space.names[c]: space.names[group[0]] for group in space.organs for c in group}
    return {name: group[0] for group in comparison.first.labels.groups for name in group}


def _by_cell(comparison: Comparison, cells: Mapping[str, Mapping[int, Cells]]) -> dict[str, dict[str, Any]]:
    """Differences of the arms to their references, paired by site, class and seed."""
    flat = {
        arm: {(seed, *key): value for seed, found in of_arm.items() for key, value in found.items()}
        for arm, of_arm in cells.items()
    }
    return _tested(
        {
            arm: {
                key: value - other
                for key, value in flat[arm].items()
                if value is not None and (other := flat[reference].get(key)) is not None
            }
            for arm, reference in comparison.compared.items()
        }
    )


def _tested(apart: Mapping[str, Mapping[Any, float | None]]) -> dict[str, dict[str, Any]]:
    """Arm -> what its differences come to, and whether they are told from 0; adjusted over the arms."""
    nothing = {key: 0.0 for of_arm in apart.values() for key in of_arm}
    return {arm: asdict(found) for arm, found in differences(nothing, apart).items()}


def _by_case(
    comparison: Comparison, values: Mapping[str, Mapping[int, Values]], unit: UnitOf
) -> dict[str, dict[str, Any]]:
    """Differences of the arms to their references, paired by case or patient, each the mean over its classes and the seeds; and the
    interval of the difference of the table's means, by the same."""
    of_unit: dict[str, dict[tuple[str, str], float | None]] = {}
    intervals: dict[str, dict[str, Any]] = {}
    for arm, of_reference in comparison.compared.items():
        apart: dict[tuple[int, str, str], dict[str, list[float]]] = {}
        for seed, found in values[arm].items():
            for (site, case, name), value in found.items():
                reference = values[of_reference].get(seed, {}).get((site, case, name))
                if value is not None and reference is not None:
                    of_cell = apart.setdefault((seed, site, name), {})
                    of_cell.setdefault(unit(site, case), []).append(value - reference)
        every: dict[tuple[str, str], list[float]] = {}
        for (_, site, _), units in apart.items():
            for name, of in units.items():
                every.setdefault((site, name), []).extend(of)
        of_unit[arm] = {key: mean_of_defined(found) for key, found in every.items()}
        rng = np.random.default_rng(seed_of("comparison", comparison.name, arm))
        if apart:
            intervals[arm] = interval_of(_weighted(comparison, apart), rng, unit=unit.name)
    return {"differences": _tested(of_unit), "bootstrap": intervals}


def _weighted(
    comparison: Comparison, apart: Mapping[tuple[int, str, str], Mapping[str, Sequence[float]]]
) -> list[Cell]:
    """The cells of (seed, site, class) with the weights that they have in the table's mean."""
    if comparison.layout.average == "sites":
        classes = Counter((seed, site) for seed, site, _ in apart)
        sites = Counter(seed for seed, _ in classes)
        return [
            Cell(site, 1 / (classes[seed, site] * sites[seed]), units, column=(seed, site), name=site)
            for (seed, site, _), units in apart.items()
        ]
    sites_of = Counter((seed, name) for seed, _, name in apart)
    columns = Counter(seed for seed, _ in sites_of)
    own = comparison.layout.columns == "site-class"
    if own:
        sites_of, columns = Counter(dict.fromkeys(sites_of, 1)), Counter(seed for seed, _, _ in apart)
    return [
        Cell(
            site,
            1 / (sites_of[seed, name] * columns[seed]),
            units,
            column=(seed, site, name) if own else (seed, name),
            name=f"{name} at {site}" if own else name,
        )
        for (seed, site, name), units in apart.items()
    ]


def _ranks(
    comparison: Comparison, values: Mapping[str, Mapping[int, Values]], *, tested: bool = True
) -> list[dict[str, Any]]:
    """Of every family of arms of which two or more are finished, over cells of site and class, of the values that all of them have: an arm
    that has no value where it is bad would be first by the rest. tested: are there enough cases for a test?"""
    found = []
    for family in comparison.families:
        every = {arm: values[arm] for arm in family if len(values.get(arm, ())) == len(comparison.seeds)}
        if len(every) < 2:
            continue
        shared = {
            seed: set.intersection(
                *(
                    {key for key, value in of_arm[seed].items() if value is not None}
                    for of_arm in every.values()
                )
            )
            for seed in comparison.seeds
        }
        there = {}
        for arm, of_arm in every.items():
            cells = [
                means_of({k: v for k, v in of_arm[s].items() if k in shared[s]}) for s in comparison.seeds
            ]
            there[arm] = {key: mean_of_defined(of.get(key) for of in cells) for each in cells for key in each}
        if not any(value is not None for of_arm in there.values() for value in of_arm.values()):
            continue  # there is no such case, or nothing is defined in it
        ranks = mean_ranks(there, higher=comparison.metric not in LOWER)
        if not tested:
            ranks = replace(ranks, friedman=None, critical=None, groups=())
        found.append(asdict(ranks) | {"groups": [list(group) for group in ranks.groups]})
    return found


def _classes(comparison: Comparison, found: Mapping[str, Any]) -> list[str]:
    """In the order of the label space where the file gives one."""
    there = dict.fromkeys(name for arm in found.values() for name in arm["per_class"])
    listed = [name for name in comparison.first.labels.names or () if name != "background"]
    return list(dict.fromkeys([*(name for name in listed if name in there or not there), *there]))


def _budget_of(federation: Federation) -> dict[str, Any]:
    """rounds; steps or epochs of a round; before: steps of a site before the first; total: optimizer steps of all sites together, None where epochs
    are given."""
    local, method = federation.local, make_method(federation)
    training = 1 if method.pooled else sum(site.role == "train" for site in federation.sites)
    before = method.steps_before(federation.rounds, training)
    total = None
    if local.steps is not None and before is not None:
        total = (federation.rounds * local.steps * method.updates_per_step() + before) * training
    return {
        "rounds": federation.rounds,
        "steps": local.steps,
        "epochs": local.epochs,
        "before": before,
        "total": total,
    }


def _hours(path: Path) -> float:
    """Of all rounds: training and validation."""
    return sum(sum(read_json(log)["phases"].values()) for log in RunFolder(path).files("log.json")) / 3600
