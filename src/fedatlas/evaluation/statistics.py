"""Means, spread and tests over rows of results; numpy and scipy only. Rows are dicts, as `Row.to_dict` gives."""

import csv
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from fedatlas.errors import RunFolderError

COLUMNS = ("split", "grid", "model", "round", "site", "case", "class", "metric", "value", "known", "reason")

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
    rows = [row for row in rows if known is None or row["known"] == known]
    return mean_of_defined(
        mean_of_defined(summarise(group).mean for group in grouped(of_site, "class").values())
        for of_site in grouped(rows, "site").values()
    )


def macro_over_classes(rows: Iterable[RowDict], *, known: bool | None = True) -> float | None:
    """The mean over classes of the mean over all cases of all sites; arguments as `client_wise_index`."""
    rows = [row for row in rows if known is None or row["known"] == known]
    return mean_of_defined(summarise(group).mean for group in grouped(rows, "class").values())


def forgetting_matrix(rows: Iterable[RowDict]) -> dict[tuple[str, str], Summary]:
    """(model, class) -> summary over every site's cases, those of sites that never annotated the class included.

    rows: of one metric and split, for the global model and every local one.
    """
    return {(str(model), str(name)): found for (model, name), found in table(rows, "model", "class").items()}


def paired(one: Sequence[float], other: Sequence[float]) -> dict[str, float]:
    """p values, two-sided, of the paired t test and of Wilcoxon's signed-rank test; 1 where all pairs are equal.

    Raises ValueError for lists of different length, or of fewer than two pairs.
    """
    a, b = np.asarray(one, dtype=float), np.asarray(other, dtype=float)
    if a.shape != b.shape or len(a) < 2:
        raise ValueError(f"paired test: {len(a)} and {len(b)} values; expected as many of both, at least 2")
    if np.all(a == b):
        return {"t": 1.0, "wilcoxon": 1.0}
    t = 0.0 if np.ptp(a - b) == 0 else float(stats.ttest_rel(a, b).pvalue)  # type: ignore[union-attr]
    return {"t": t, "wilcoxon": float(stats.wilcoxon(a, b).pvalue)}  # type: ignore[union-attr]


def holm(p: Sequence[float]) -> list[float]:
    """Holm's adjustment of p values for being tested together, in their order."""
    order = np.argsort(p, kind="stable")
    adjusted = np.empty(len(p))
    running = 0.0
    for rank, index in enumerate(order):
        running = max(running, min(1.0, (len(p) - rank) * p[index]))
        adjusted[index] = running
    return adjusted.tolist()


def bootstrap_interval(
    values: Sequence[float], rng: np.random.Generator, *, level: float = 0.95, draws: int = 2000
) -> tuple[float, float]:
    """The percentile interval of the mean; draws whole values, which should be one per patient.

    Raises ValueError if there are no values.
    """
    array = np.asarray(values, dtype=float)
    if not len(array):
        raise ValueError("bootstrap: no values; at least one is needed")
    means = array[rng.integers(0, len(array), (draws, len(array)))].mean(1)
    low, high = np.percentile(means, [50 * (1 - level), 50 * (1 + level)])
    return float(low), float(high)


def write_rows(path: Path, rows: Iterable[RowDict]) -> None:
    """Rows as CSV; a value that is not defined is left empty. The file is whole or absent."""
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
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    part.write_text(text.getvalue())
    os.replace(part, path)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """What `write_rows` wrote. Raises RunFolderError if the file is missing or not of this form."""
    try:
        with path.open(newline="") as file:
            rows: list[dict[str, Any]] = list(csv.DictReader(file))
        for row in rows:
            row["value"] = float(row["value"]) if row["value"] else None
            row["known"], row["round"] = bool(int(row["known"])), int(row["round"])
    except (OSError, KeyError, ValueError, TypeError) as error:
        raise RunFolderError(f"{path}: not a table of results ({type(error).__name__}: {error})") from error
    return rows


def cell_means(rows: Iterable[RowDict]) -> dict[tuple[str, str], float | None]:
    """(site, class) -> mean over its cases, None where no case has a value. rows: of one metric, model and split."""
    return {key: found.mean for key, found in table(rows, "site", "class").items()}


def class_means(cells: Mapping[tuple[str, str], float | None]) -> dict[str, float | None]:
    """class -> mean over the sites that have a value for it, of what `cell_means` gives."""
    names = dict.fromkeys(name for _, name in cells)
    return {name: mean_of_defined(v for (_, c), v in cells.items() if c == name) for name in names}
