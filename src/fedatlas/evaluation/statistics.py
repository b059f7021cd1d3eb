"""Means, spread and tests over rows of results; numpy and scipy only. Rows are dicts, as `Row.to_dict` gives."""

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedatlas.core.errors import RunFolderError

COLUMNS = ("split", "grid", "model", "round", "site", "case", "class", "metric", "value", "known", "reason")

POST = "post/"
"""Before the name of a model in rows of what it predicts after post-processing, as in post/best and post/local/a."""

RowDict = Mapping[str, Any]


@dataclass(frozen=True)
class Summary:
    """n values that are defined, n_undefined that are not; mean and SD (n-1) of the defined ones, None if there
    are too few."""

    n: int
    n_undefined: int
    mean: float | None
    sd: float | None


def select(rows: Iterable[RowDict], **wanted: Any) -> list[RowDict]:
    """The rows whose columns have the given values; use class_ for the column "class"."""
    wanted = {key.rstrip("_"): value for key, value in wanted.items()}
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def summarise(rows: Iterable[RowDict]) -> Summary:
    """One summary of all rows; they should be of one metric."""
    rows = list(rows)
    values = [row["value"] for row in rows if row["value"] is not None]
    mean = float(np.mean(values)) if values else None
    sd = float(np.std(values, ddof=1)) if len(values) > 1 else None
    return Summary(len(values), len(rows) - len(values), mean, sd)


def grouped(rows: Iterable[RowDict], *columns: str) -> dict[tuple[Any, ...], list[RowDict]]:
    """Rows by the values of some columns, in the order of first appearance."""
    groups: dict[tuple[Any, ...], list[RowDict]] = {}
    for row in rows:
        groups.setdefault(tuple(row[column] for column in columns), []).append(row)
    return groups


def table(rows: Iterable[RowDict], *columns: str) -> dict[tuple[Any, ...], Summary]:
    """A summary per combination of columns, as ("site", "class", "model")."""
    return {key: summarise(group) for key, group in grouped(rows, *columns).items()}


def mean_of_defined(values: Iterable[float | None]) -> float | None:
    """None if no value is defined."""
    defined = [value for value in values if value is not None]
    return float(np.mean(defined)) if defined else None


def client_wise_index(rows: Iterable[RowDict], *, known: bool | None = True) -> float | None:
    """The client-wise global index (Fed-MENU): mean over sites of the mean over classes of the mean over cases.

    rows: of one metric, model and split. known: only classes that are (or are not) annotated; None: all.
    """
    return site_index(cell_means(row for row in rows if known is None or row["known"] == known))


def site_index(cells: Mapping[tuple[str, str], float | None]) -> float | None:
    """The client-wise global index of (site, class) -> mean over cases: Q = 1/K sum_k 1/C_k sum_c Q_c^k (Fed-MENU,
    section IV.B), over what is defined; None where nothing is."""
    of_site: dict[str, list[float | None]] = {}
    for (site, _), value in cells.items():
        of_site.setdefault(site, []).append(value)
    return mean_of_defined(mean_of_defined(values) for values in of_site.values())


def macro_over_classes(rows: Iterable[RowDict], *, known: bool | None = True) -> float | None:
    """The mean over classes of the mean over all cases of all sites; arguments as `client_wise_index`."""
    rows = [row for row in rows if known is None or row["known"] == known]
    return mean_of_defined(summarise(group).mean for group in grouped(rows, "class").values())


def paired(one: Sequence[float], other: Sequence[float]) -> dict[str, float]:
    """p values, two-sided, of the paired t test and of Wilcoxon's signed-rank test, in which pairs that are equal do not count; 1 where
    all are. Wilcoxon's is exact for up to 12 other pairs, with ties among them, too, and for up to 50 without ties. Differences count to
    nine decimals, so that .3 - .2 is .8 - .7.

    Raises ValueError for lists of different length, or of fewer than two pairs.
    """
    a, b = np.asarray(one, dtype=float), np.asarray(other, dtype=float)
    if a.shape != b.shape or len(a) < 2:
        raise ValueError(f"paired test: {len(a)} and {len(b)} values; expected as many of both, at least 2")
    differences = np.round(a - b, 9)
    if not differences.any():
        return {"t": 1.0, "wilcoxon": 1.0}
    from scipy import stats  # takes half a second to import

    t = 0.0 if np.ptp(differences) == 0 else float(stats.ttest_rel(a, b).pvalue)  # type: ignore[union-attr]
    return {"t": t, "wilcoxon": _wilcoxon(differences[differences != 0])}


EXACT = 12
"""So many pairs that differ have a test over all their signs, 4,096 of them."""


def _wilcoxon(differences: np.ndarray) -> float:
    """Of differences none of which is 0, one at least."""
    from scipy import stats

    ranks = stats.rankdata(np.abs(differences))
    n = len(ranks)
    if n > EXACT:
        return float(stats.wilcoxon(differences).pvalue)  # type: ignore[union-attr]
    signs = (np.arange(2**n)[:, None] >> np.arange(n)) & 1
    sums = signs @ ranks
    seen, whole = float(ranks[differences > 0].sum()), float(ranks.sum())
    extreme = abs(seen - whole / 2)
    return float(np.mean(np.abs(sums - whole / 2) >= extreme - 1e-9))


def holm(p: Sequence[float]) -> list[float]:
    """Holm's adjustment of p values for being tested together, in their order."""
    order = np.argsort(p, kind="stable")
    adjusted = np.empty(len(p))
    running = 0.0
    for rank, index in enumerate(order):
        running = max(running, min(1.0, (len(p) - rank) * p[index]))
        adjusted[index] = running
    return adjusted.tolist()


def interval_levels(freedom: int, *, level: float = 0.95) -> tuple[float, float]:
    """The two percentiles of resampled means between which an interval of that level lies, in percent.

    2.5 and 97.5 hold for many values only. With few, the percentiles move out as far as the bounds of Student's t lie outside those
    of a normal distribution (the expanded percentile interval of Hesterberg, 2015, "What teachers should know about the
    bootstrap"). freedom: as many values as were drawn from, less one for each site; at least 1.
    """
    from scipy import stats  # takes half a second to import

    low = 100 * float(stats.norm.sf(stats.t.ppf(0.5 + level / 2, freedom)))
    return low, 100 - low


def bootstrap_interval(
    values: Sequence[float], rng: np.random.Generator, *, level: float = 0.95, draws: int = 2000
) -> tuple[float, float]:
    """The percentile interval of the mean; draws whole values, which should be one per patient.

    A resample is one value short of all, so that its variance is that of a mean (that of as many as there are is too small by
    1/n), and the percentiles are those of `interval_levels`. A single value has itself as both bounds. Raises ValueError if there are no values.
    """
    array = np.asarray(values, dtype=float)
    if not len(array):
        raise ValueError("bootstrap: no values; at least one is needed")
    if len(array) == 1:
        return float(array[0]), float(array[0])
    means = array[rng.integers(0, len(array), (draws, len(array) - 1))].mean(1)
    low, high = np.percentile(means, interval_levels(len(array) - 1, level=level))
    return float(low), float(high)


def rows_text(rows: Iterable[RowDict]) -> str:
    """Rows as CSV; a value that is not defined is left empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in rows:
        values = {
            **row,
            "value": "" if row["value"] is None else repr(float(row["value"])),
            "known": int(row["known"]),
        }
        writer.writerow([values[column] for column in COLUMNS])
    return text.getvalue()


def read_rows(path: Path) -> list[dict[str, Any]]:
    """What `rows_text` made. Raises RunFolderError if the file is missing or not of this form."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            text = file.read()
        reader = csv.DictReader(io.StringIO(text, newline=""))
        header = tuple(reader.fieldnames or ())
        if header != COLUMNS:
            lacking = ", ".join(repr(column) for column in COLUMNS if column not in header)
            expected = f"no {lacking}" if lacking else f"{','.join(COLUMNS)!r} is expected"
            raise ValueError(f"its first line is {','.join(header)[:200]!r}: {expected}")
        rows: list[dict[str, Any]] = list(reader)
        if not text.endswith("\n"):
            raise ValueError(f"it ends within line {len(rows) + 1}")
        for number, row in enumerate(rows, start=2):
            if None in row or None in row.values():
                raise ValueError(f"line {number} has not as many columns as its header")
            row["value"] = float(row["value"]) if row["value"] else None
            row["known"], row["round"] = bool(int(row["known"])), int(row["round"])
    except FileNotFoundError:
        raise RunFolderError(
            f"{path}: missing; a run writes it when it is finished: go on with it, by the command that began it, or restore the file where "
            "it was finished"
        ) from None
    except (OSError, ValueError, TypeError, csv.Error) as error:
        raise RunFolderError(
            f"{path}: no whole table of results ({error}); restore it, or run again"
        ) from error
    return rows


def cell_means(rows: Iterable[RowDict]) -> dict[tuple[str, str], float | None]:
    """(site, class) -> mean over its cases, None where no case has a value. rows: of one metric, model and split."""
    return {key: found.mean for key, found in table(rows, "site", "class").items()}


def class_means(cells: Mapping[tuple[str, str], float | None]) -> dict[str, float | None]:
    """class -> mean over the sites that have a value for it, of what `cell_means` gives."""
    names = dict.fromkeys(name for _, name in cells)
    return {name: mean_of_defined(v for (_, c), v in cells.items() if c == name) for name in names}


LEAST_PAIRS = 6
"""Fewer pairs get no p value: Wilcoxon's smallest for five is 0.06."""


@dataclass(frozen=True)
class Difference:
    """n pairs; mean of (one - other) and SD (n-1), None where there are too few; p values of `paired`, adjusted by
    `holm` over all that were tested together, None for fewer than LEAST_PAIRS pairs."""

    n: int
    mean: float | None
    sd: float | None
    wilcoxon: float | None
    t: float | None


def differences(
    reference: Mapping[Any, float | None], others: Mapping[str, Mapping[Any, float | None]]
) -> dict[str, Difference]:
    """Each of the others against the reference, over the keys for which both have a value."""
    shared = {
        name: [key for key, value in values.items() if value is not None and reference.get(key) is not None]
        for name, values in others.items()
    }
    tests: dict[str, dict[str, float]] = {}
    for name, keys in shared.items():
        if len(keys) >= LEAST_PAIRS:
            tests[name] = paired([others[name][k] for k in keys], [reference[k] for k in keys])  # type: ignore[misc]
    adjusted = {
        test: dict(zip(tests, holm([found[test] for found in tests.values()]), strict=True))
        for test in ("wilcoxon", "t")
    }
    made = {}
    for name, keys in shared.items():
        apart = [others[name][key] - reference[key] for key in keys]  # type: ignore[operator]
        made[name] = Difference(
            len(keys),
            float(np.mean(apart)) if apart else None,
            float(np.std(apart, ddof=1)) if len(apart) > 1 else None,
            adjusted["wilcoxon"].get(name),
            adjusted["t"].get(name),
        )
    return made


@dataclass(frozen=True)
class Ranks:
    """How several rank over n blocks (1 is best; ties share the mean rank).

    mean: name -> mean rank, the best first. friedman: p value that all rank alike. critical: mean ranks that are
    closer than this do not differ at the level 0.05 (Nemenyi). groups: largest sets of neighbours that do not differ.
    The last three are None or empty for fewer than LEAST_PAIRS blocks or two names.
    """

    n: int
    mean: dict[str, float]
    friedman: float | None
    critical: float | None
    groups: tuple[tuple[str, ...], ...]


def mean_ranks(values: Mapping[str, Mapping[Any, float | None]], *, higher: bool = True) -> Ranks:
    """Ranks over the keys for which all have a value (Demšar, JMLR 7, 2006). higher: are higher values better? Values count to
    nine decimals, as differences do in `paired`, so that means of the same values in another order are a tie."""
    names = list(values)
    keys = [
        k
        for k in dict.fromkeys(k for v in values.values() for k in v)
        if all(v.get(k) is not None for v in values.values())
    ]
    if not keys:
        return Ranks(0, {}, None, None, ())
    table = np.round([[float(values[name][key]) for name in names] for key in keys], 9)  # type: ignore[arg-type]
    from scipy import stats  # takes half a second to import

    ranks = stats.rankdata(-table if higher else table, axis=1)
    means = dict(sorted(zip(names, ranks.mean(0).tolist(), strict=True), key=lambda item: item[1]))
    n, k = table.shape
    if n < LEAST_PAIRS or k < 2:
        return Ranks(n, means, None, None, ())
    critical = float(stats.studentized_range.ppf(0.95, k, np.inf)) * math.sqrt(k * (k + 1) / (12 * n))
    friedman = None
    if k > 2:
        friedman = 1.0 if np.all(ranks == ranks[:, :1]) else float(stats.friedmanchisquare(*table.T).pvalue)
    ordered = list(means)
    runs = [[b for b in ordered[i:] if means[b] - means[a] < critical] for i, a in enumerate(ordered)]
    groups = [
        tuple(run) for i, run in enumerate(runs) if len(run) > 1 and (not i or runs[i - 1][-1] != run[-1])
    ]
    return Ranks(n, means, friedman, critical, tuple(groups))


def require_rows(path: Path, info: Mapping[str, Any], count: int) -> None:
    """Raises RunFolderError unless a finished run's rows.csv has as many rows as its run.json says; runs of before this was kept
    say nothing."""
    written = info.get("rows")
    if info.get("finished") and isinstance(written, int) and written != count:
        raise RunFolderError(
            f"{path}: holds {count} rows, and the run wrote {written}: it was cut short or edited. "
            "Restore it, or delete it and go on with --resume, which evaluates again"
        )
