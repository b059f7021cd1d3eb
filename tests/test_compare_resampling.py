"""Intervals over resamples of cases, and of patients, against a literal version with loops."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy import stats

from fedatlas.compare.resampling import Cell, interval_of
from fedatlas.compare.results import _weighted

COLUMNS = ("liver", "spleen")


def cells(own: dict[tuple[str, str], dict[str, list[float]]]) -> list[Cell]:
    """Mean over the columns of the mean over the sites."""
    sites_of = {name: sum(of == name for _, of in own) for name in COLUMNS}
    return [
        Cell(site, 1 / (sites_of[name] * len(COLUMNS)), values, column=name)
        for (site, name), values in own.items()
    ]


def literal(of: Sequence[Cell], rng: np.random.Generator, draws: int) -> tuple[float, float]:
    """Draw by draw: the mean over the columns of the mean over the sites that still have a case."""
    sites = list(dict.fromkeys(cell.site for cell in of))
    cases = {
        site: sorted({case for cell in of if cell.site == site for case in cell.values}) for site in sites
    }
    drawn = {
        site: rng.multinomial(len(cases[site]) - 1, [1 / len(cases[site])] * len(cases[site]), draws)
        for site in sites
    }
    found = []
    for draw in range(draws):
        columns = []
        for name in COLUMNS:
            means = []
            for cell in of:
                if cell.column == name:
                    times = dict(zip(cases[cell.site], drawn[cell.site][draw], strict=True))
                    values = [
                        value
                        for case, of_case in cell.values.items()
                        for _ in range(times[case])
                        for value in of_case
                    ]
                    if values:
                        means.append(np.mean(values))
            if means:
                columns.append(np.mean(means))
        found.append(np.mean(columns))
    t = stats.t.ppf(0.975, sum(len(of) - 1 for of in cases.values()))
    low, high = np.percentile(found, [100 * stats.norm.cdf(-t), 100 * stats.norm.cdf(t)])
    return float(low), float(high)


@pytest.mark.parametrize("most", [1, 4])
def test_the_interval_is_that_of_a_literal_version(most: int) -> None:
    """At site b one case of four has a spleen, so that a third of the resamples have none there. most: cases of a patient."""
    rng = np.random.default_rng(0)
    own = {
        (site, name): {f"{site}{i}": rng.normal(size=1 + i % most).tolist() for i in range(n)}
        for (site, name), n in {("a", "liver"): 5, ("a", "spleen"): 5, ("b", "liver"): 4, ("b", "spleen"): 1}.items()
    }  # fmt: skip
    found = interval_of(cells(own), np.random.default_rng(7), draws=400)
    assert (found["low"], found["high"]) == pytest.approx(literal(cells(own), np.random.default_rng(7), 400))
    assert found["low"] < found["value"] < found["high"] and found["n"] == 9


def test_a_cell_without_a_case_leaves_its_weight_to_its_column() -> None:
    """Livers differ by 0 and spleens by 1 in every case, so that the mean is 1/2 whatever is drawn."""
    own = {
        ("a", "liver"): {case: [0.0] for case in "abcd"},
        ("a", "spleen"): {case: [1.0, 1.0] for case in "abcd"},
        ("b", "liver"): {case: [0.0] for case in "efg"},
        ("b", "spleen"): {"e": [1.0]},
    }
    found = interval_of(cells(own), np.random.default_rng(0))
    assert (found["low"], found["high"]) == pytest.approx((0.5, 0.5))


def test_a_column_of_one_case_has_no_interval() -> None:
    """A resample would have it as it is or not at all, and of 100 such intervals 63 held the true mean."""
    rng = np.random.default_rng(0)
    livers = {f"{i}": [float(rng.normal())] for i in range(20)}
    own = {("a", "liver"): livers, ("a", "spleen"): {"3": [0.3]}}
    made = [cell._replace(name=str(cell.column)) for cell in cells(own)]
    found = interval_of(made, np.random.default_rng(0))
    assert found["reason"] == "one case of spleen" and found["low"] is found["high"] is None
    assert found["value"] == pytest.approx((np.mean([of[0] for of in livers.values()]) + 0.3) / 2)
    two = [*made[:1], made[1]._replace(values={"3": [0.3], "4": [0.2]})]
    assert interval_of(two, np.random.default_rng(0))["reason"] == ""


@pytest.mark.parametrize(
    ("sizes", "skewed", "least", "most"),
    [
        ((8, 8, 5, 7), False, 0.925, 0.97),
        ((4, 4, 4), False, 0.925, 0.97),
        ((8, 8, 5, 7), True, 0.9, 0.94),
        ((2, 2, 2, 2), False, 0.81, 0.87),
    ],
    ids=lambda given: str(given),
)
def test_of_intervals_of_few_cases_so_many_hold_the_true_mean(
    sizes: tuple[int, ...], skewed: bool, least: float, most: float
) -> None:
    """28 cases of four sites, as on CT, and 12 of three, as on MR: 94 of 100. Percentiles of 2.5 and 97.5 of as many cases as there are
    hold it in 91 and 87. Of values as lopsided as an exponential distribution 92, and with two cases at each site, as in the demo, of
    which a resample draws one alone, 84."""
    rng = np.random.default_rng(0)
    held = []
    for _ in range(1000):
        of = [
            Cell(
                str(site),
                1 / len(sizes),
                {str(i): [float(rng.exponential() - 1 if skewed else rng.normal())] for i in range(n)},
                column=site,
            )
            for site, n in enumerate(sizes)
        ]
        found = interval_of(of, rng, draws=400)
        held.append(found["low"] <= 0 <= found["high"])
    assert least < np.mean(held) < most


@pytest.mark.parametrize(
    ("average", "columns", "shared"),
    [("sites", "class", 3), ("columns", "class", 3), ("columns", "site-class", 4)],
)
def test_every_seed_counts_alike_in_the_mean_that_is_resampled(
    average: str, columns: str, shared: int
) -> None:
    """Also where a site has no value in one of them. shared: columns, whose cells take each other's weight."""
    comparison: Any = SimpleNamespace(layout=SimpleNamespace(average=average, columns=columns))
    apart = {key: {"p": [0.1]} for key in [(0, "a", "x"), (0, "a", "y"), (0, "b", "x"), (1, "a", "x")]}
    cells = _weighted(comparison, apart)
    of_seed = [sum(cell.weight for cell in cells if cell.column[0] == seed) for seed in (0, 1)]
    assert of_seed == [pytest.approx(1), pytest.approx(1)] and len({cell.column for cell in cells}) == shared
