"""Intervals of means over cells of site and class, by resampling cases."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedatlas.evaluation.statistics import LEAST_PAIRS

DRAWS = 1000
"""Resamples of cases."""


class Cell(NamedTuple):
    """One term of a weighted mean: the mean of `values`, case -> value, of a site's cases. column: of the table, whose cells
    share its weight."""

    site: str
    weight: float
    values: Mapping[str, float]
    column: Hashable = None


def interval_by_case(
    cells: Sequence[Cell], rng: np.random.Generator, *, draws: int = DRAWS
) -> dict[str, Any]:
    """The weighted mean of the cells' means, and its 95 % percentile interval over resamples of cases.

    A resample draws as many cases of every site as there are, with replacement, the same ones in all cells; a cell that
    is left without a case is left out of that resample, and its weight goes to the others of its column. value, low, high, cases, and reason where there is none of the
    first, or no interval: with fewer than LEAST_PAIRS cases, or a single one of a site, which no resample varies.
    """
    used = [cell for cell in cells if cell.values]
    cases = {site: sorted({case for cell in used if cell.site == site for case in cell.values}) for site in
             dict.fromkeys(cell.site for cell in used)}  # fmt: skip
    count = sum(len(names) for names in cases.values())
    if not used:
        return {"value": None, "low": None, "high": None, "cases": 0, "reason": "no case has a value"}
    weights = np.array([cell.weight for cell in used])
    value = float(np.average([np.mean(list(cell.values.values())) for cell in used], weights=weights))
    alone = [site for site, names in cases.items() if len(names) == 1]
    if count < LEAST_PAIRS or alone:
        reason = (
            f"{count} cases, fewer than {LEAST_PAIRS}" if count < LEAST_PAIRS else f"one case of {alone[0]}"
        )
        return {"value": value, "low": None, "high": None, "cases": count, "reason": reason}
    columns = {column: place for place, column in enumerate(dict.fromkeys(cell.column for cell in used))}
    total, weight = np.zeros((2, len(columns), draws))
    for site, names in cases.items():
        drawn = rng.multinomial(len(names), np.full(len(names), 1 / len(names)), draws).astype(float)
        for cell in (cell for cell in used if cell.site == site):
            values = np.array([cell.values.get(name, np.nan) for name in names])
            there = ~np.isnan(values)
            n = drawn @ there.astype(float)
            mean = np.divide(drawn @ np.where(there, values, 0.0), n, out=np.zeros(draws), where=n > 0)
            total[columns[cell.column]] += cell.weight * mean
            weight[columns[cell.column]] += cell.weight * (n > 0)
    means = np.divide(total, weight, out=np.zeros_like(total), where=weight > 0)
    whole = np.bincount([columns[cell.column] for cell in used], weights)[:, None]
    # no weights are all 0: every resample has a case, and every case a cell
    found = np.average(means, axis=0, weights=whole * (weight > 0))
    low, high = np.percentile(found, [2.5, 97.5])
    return {"value": value, "low": float(low), "high": float(high), "cases": count, "reason": ""}
