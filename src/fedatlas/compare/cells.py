"""Cells of site and class by their cases: what is paired, the spread over cases, and the tests of one row of a table against another."""

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from fedatlas.compare.plan import Comparison, Layout
from fedatlas.compare.running import Cells
from fedatlas.evaluation.statistics import LEAST_PAIRS, cell_means, holm, mean_of_defined, paired

Values = dict[tuple[str, str, str], float | None]
"""(site, case, class) -> the value of the metric; labels of whole images have the case "", which is all of them."""


def place_of(row: Mapping[str, Any]) -> tuple[str, str, str]:
    """Where a row of scores stands among `Values`."""
    return row["site"], row["case"], row["class"]


class Counted:
    """Which rows of scores are counted for all arms: those of a site, case and class that one arm, the first that is finished, has.

    In a seed that this arm lacks other cases may be validated on; there its sites and classes are counted, whatever the case.
    known: whether each is annotated, as that arm says.
    """

    def __init__(self, of_seeds: Mapping[int, Iterable[Mapping[str, Any]]], known: bool | None) -> None:
        self.seeds = set(of_seeds)
        self.known = {place_of(row): bool(row["known"]) for rows in of_seeds.values() for row in rows}
        self._places = {place for place, of in self.known.items() if known in (None, of)}
        self._cells = {(site, name) for site, _, name in self._places}

    def __call__(self, seed: int, row: Mapping[str, Any]) -> bool:
        if seed in self.seeds:
            return place_of(row) in self._places
        return (row["site"], row["class"]) in self._cells


class UnitOf(NamedTuple):
    """(site, case) -> what is paired and resampled. name: "case", or "patient" where sites say how a case's name tells its patient.
    patterns: site -> the expression that finds it."""

    name: str
    patterns: Mapping[str, re.Pattern[str]]

    def __call__(self, site: str, case: str) -> str:
        """The patient, or the case itself."""
        found = self.patterns[site].search(case) if site in self.patterns else None
        return case if found is None or found[1] is None else found[1]


def unit_of(comparison: Comparison) -> UnitOf:
    """By `sites[].patient`. A site's own table of patients stays at the site, so that its cases are themselves here."""
    patterns = {
        site.name: re.compile(site.patient) for site in comparison.first.sites if site.patient is not None
    }
    return UnitOf("patient" if patterns else "case", patterns)


def means_of(values: Values) -> Cells:
    """The means over cases."""
    return cell_means({"site": s, "class": c, "value": value} for (s, _, c), value in values.items())


class OverCases(NamedTuple):
    """Of a cell: the number of cases with a value, their mean, and the SD (n-1) over them; None for fewer than one, or two."""

    n: int
    mean: float | None
    sd: float | None


def over_cases(values: Iterable[Values]) -> dict[tuple[str, str], OverCases]:
    """(site, class) -> its cases, of which each has the mean over the seeds in which it has a value. values: one per seed."""
    of_case: dict[tuple[str, str], dict[str, list[float | None]]] = {}
    for of_seed in values:
        for (site, case, name), value in of_seed.items():
            of_case.setdefault((site, name), {}).setdefault(case, []).append(value)
    found = {}
    for cell, cases in of_case.items():
        over = [mean for mean in map(mean_of_defined, cases.values()) if mean is not None]
        sd = float(np.std(over, ddof=1)) if len(over) > 1 else None
        found[cell] = OverCases(len(over), mean_of_defined(over), sd)
    return found


class Pairs(NamedTuple):
    """Of a cell, case by case, or patient by patient: the values of both rows, and in how many of them only one row has a value."""

    one: list[float]
    other: list[float]
    lost: int


def pairs_of(
    one: Mapping[int, Values], other: Mapping[int, Values], unit: UnitOf
) -> dict[tuple[str, str], Pairs]:
    """(site, class) -> pairs, each the mean over the cases of the unit and the seeds in which both rows have a value, of the cells that
    `one` has. one, other: seed -> values."""
    both: dict[tuple[str, str], dict[str, list[tuple[float, float]]]] = {}
    single: dict[tuple[str, str], set[str]] = {}
    for seed in one:
        for (site, case, name), value in one[seed].items() if seed in other else ():
            cell, reference = (site, name), other[seed].get((site, case, name))
            pairs, of = both.setdefault(cell, {}), unit(site, case)
            if value is not None and reference is not None:
                pairs.setdefault(of, []).append((value, reference))
            elif value is not None or reference is not None:
                single.setdefault(cell, set()).add(of)
    found = {}
    for cell, units in both.items():
        means = [np.mean(pairs, axis=0) for pairs in units.values()]
        lost = len(single.get(cell, set()) - set(units))
        found[cell] = Pairs([float(a) for a, _ in means], [float(b) for _, b in means], lost)
    return found


def cell_tests(
    layout: Layout, rows: Mapping[str, Mapping[int, Values]], against: Mapping[int, Values], unit: UnitOf
) -> dict[str, Any]:
    """Paired t tests, two-sided, of every cell of rows (name -> seed -> values) against the same cell of another row.

    unit: what is paired. made: how many. p: row -> "site/class" -> p value, adjusted as `layout.correction` says. few: row -> "site/class" ->
    pairs, where they are fewer than LEAST_PAIRS and nothing is tested. lost: row -> "site/class" -> those left out
    because only one of both has a value there.
    """
    p: dict[tuple[str, str], float] = {}
    few: dict[str, dict[str, int]] = {}
    lost: dict[str, dict[str, int]] = {}
    for row, values in rows.items():
        for (site, name), pairs in pairs_of(values, against, unit).items():
            key = f"{site}/{name}"
            if len(pairs.one) >= LEAST_PAIRS:
                p[row, key] = paired(pairs.one, pairs.other)["t"]
            else:
                few.setdefault(row, {})[key] = len(pairs.one)
            if pairs.lost:
                lost.setdefault(row, {})[key] = pairs.lost
    if layout.correction == "holm":
        p = dict(zip(p, holm(list(p.values())), strict=True))
    by_row: dict[str, dict[str, float]] = {}
    for (row, key), value in p.items():
        by_row.setdefault(row, {})[key] = value
    return {"unit": unit.name, "made": len(p), "p": by_row, "few": few, "lost": lost}
