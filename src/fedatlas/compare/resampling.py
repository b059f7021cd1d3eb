"""Intervals of means over cells of site and class, by resampling cases, or patients where one has several."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedatlas.evaluation.statistics import LEAST_PAIRS, interval_levels

DRAWS = 4000
"""Resamples of cases or patients."""


class Cell(NamedTuple):
    """One term of a weighted mean: the mean over a site's cases. values: what is drawn, a case or a patient -> the values of its
    cases. column: of the table, whose cells share its weight. name: of the column, for messages."""

    site: str
    weight: float
    values: Mapping[str, Sequence[float]]
    column: Hashable = None
    name: str = ""


def interval_of(
    cells: Sequence[Cell], rng: np.random.Generator, *, unit: str = "case", draws: int = DRAWS
) -> dict[str, Any]:
    """The weighted mean of the cells' means, and its 95 % interval over resamples.

    A resample draws cases (patients, each with all of its cases) of every site with replacement, the same ones in all cells. It draws
    one fewer than the site has, so that the variance of a site's mean is not too small with few (McCarthy and Snowden, 1985, "The
    bootstrap and finite population sampling"), and the interval lies between the percentiles of `interval_levels`. A cell that is
    left without a case is left out of that resample, and its weight goes to the others of its column; a column that is left without any, which
    of two cases happens in one resample of seven or fewer, is left out too. unit: what is drawn, "case" or "patient". value, low, high, n (how
    many there are to draw from), and reason where there is none of the first, or no interval: with fewer than LEAST_PAIRS, with a single one
    of a site, which no resample varies, or of a column, which a resample has as it is or not at all.
    """
    used = [cell for cell in cells if cell.values]
    units = {site: sorted({name for cell in used if cell.site == site for name in cell.values}) for site in
             dict.fromkeys(cell.site for cell in used)}  # fmt: skip
    count = sum(len(names) for names in units.values())
    if not used:
        return {"value": None, "low": None, "high": None, "n": 0, "reason": f"no {unit} has a value"}
    weights = np.array([cell.weight for cell in used])
    value = float(np.average([np.mean(_flat(cell.values)) for cell in used], weights=weights))
    alone = [site for site, names in units.items() if len(names) == 1]
    of_column: dict[Hashable, set[tuple[str, str]]] = {}
    for cell in used:
        of_column.setdefault(cell.column, set()).update((cell.site, name) for name in cell.values)
    alone += [cell.name for cell in used if len(of_column[cell.column]) == 1]
    if count < LEAST_PAIRS or alone:
        reason = (
            f"{count} {unit}s, fewer than {LEAST_PAIRS}"
            if count < LEAST_PAIRS
            else f"one {unit} of {alone[0]}"
        )
        return {"value": value, "low": None, "high": None, "n": count, "reason": reason}
    columns = {column: place for place, column in enumerate(dict.fromkeys(cell.column for cell in used))}
    total, weight = np.zeros((2, len(columns), draws))
    for site, names in units.items():
        drawn = rng.multinomial(len(names) - 1, np.full(len(names), 1 / len(names)), draws).astype(float)
        for cell in (cell for cell in used if cell.site == site):
            values = [cell.values.get(name, ()) for name in names]
            n = drawn @ np.array([len(of) for of in values], dtype=float)
            sums = drawn @ np.array([sum(of) for of in values], dtype=float)
            mean = np.divide(sums, n, out=np.zeros(draws), where=n > 0)
            total[columns[cell.column]] += cell.weight * mean
            weight[columns[cell.column]] += cell.weight * (n > 0)
    means = np.divide(total, weight, out=np.zeros_like(total), where=weight > 0)
    whole = np.bincount([columns[cell.column] for cell in used], weights)[:, None]
    # no weights are all 0: every resample has something drawn, and all of that is in a cell
    found = np.average(means, axis=0, weights=whole * (weight > 0))
    low, high = np.percentile(found, interval_levels(count - len(units)))
    return {"value": value, "low": float(low), "high": float(high), "n": count, "reason": ""}


def _flat(values: Mapping[str, Sequence[float]]) -> list[float]:
    return [value for of in values.values() for value in of]
