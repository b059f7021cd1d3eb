"""statistics.py: averages as the papers define them, tests, tables on disk."""

import numpy as np
import pytest
from scipy import stats

from fedatlas.core.errors import RunFolderError
from fedatlas.evaluation.evaluate import Row, selection_score
from fedatlas.evaluation.statistics import (
    bootstrap_interval,
    client_wise_index,
    differences,
    holm,
    interval_levels,
    macro_over_classes,
    mean_of_defined,
    mean_ranks,
    paired,
    read_rows,
    rows_text,
    summarise,
    table,
)
from fedatlas.transport.store import write_atomic


def row(
    site: str, name: str, value: float | None, *, known: bool = True, case: str = "1", model: str = "best"
) -> dict:
    return Row(
        "test",
        "original",
        model,
        3,
        site,
        case,
        name,
        "dice",
        value,
        known,
        "" if value is not None else "truth empty",
    ).to_dict()


def test_the_printed_global_index() -> None:
    """Fed-MENU, Table II: clients 94.07, 95.94, 80.05, 94.65 and one with five organs give 91.14."""
    rows = [row(str(i), "organ", value) for i, value in enumerate((94.07, 95.94, 80.05, 94.65))]
    rows += [row("amos", str(i), value) for i, value in enumerate((96.70, 93.74, 82.14, 96.34, 86.08))]
    assert client_wise_index(rows) == pytest.approx(91.142, abs=5e-4)


def test_averages_skip_what_is_not_defined_or_not_annotated() -> None:
    rows = [
        row("a", "x", 1.0),
        row("a", "x", 0.0, case="2"),
        row("a", "y", None),
        row("b", "x", 0.2, known=False),
    ]
    assert client_wise_index(rows) == 0.5
    assert macro_over_classes(rows, known=None) == pytest.approx(0.4)
    assert macro_over_classes(rows, known=False) == 0.2
    assert client_wise_index([row("a", "y", None)]) is None
    found = summarise(rows)
    assert (found.n, found.n_undefined) == (3, 1) and found.sd == pytest.approx(np.std([1, 0, 0.2], ddof=1))
    assert table(rows, "site", "class")["a", "y"].mean is None


def test_selection_counts_every_annotated_class_of_every_site_once() -> None:
    rows = [row("a", "x", 1.0), row("a", "x", 0.8, case="2"), row("a", "y", 0.5), row("b", "x", 0.1)]
    assert selection_score(rows) == pytest.approx((0.9 + 0.5 + 0.1) / 3)
    assert selection_score(rows, "sites") == pytest.approx(((0.9 + 0.5) / 2 + 0.1) / 2)
    assert selection_score([row("a", "x", 0.9, known=False)]) is None


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])


def test_shares_tie_as_they_are_written() -> None:
    """.3 - .2 and .8 - .7 are one rank, though floats differ."""
    one, other = [0.30, 0.41, 0.52, 0.63, 0.74, 0.85, 0.96], [0.20, 0.31, 0.42, 0.53, 0.64, 0.75, 1.06]
    assert paired(one, other)["wilcoxon"] == 2 * (1 + 7) / 128
    assert paired([0.3, 0.8], [0.2, 0.7])["t"] == 0 and paired([0.1 + 0.2, 0.3], [0.3, 0.3])["wilcoxon"] == 1


def test_paired_tests() -> None:
    rng = np.random.default_rng(0)
    one = rng.random(20)
    assert paired(one, one) == {"t": 1.0, "wilcoxon": 1.0}
    p = paired(one, one + 0.1 + 0.01 * rng.random(20))
    assert p["t"] < 1e-6 and p["wilcoxon"] < 1e-4
    with pytest.raises(ValueError, match="at least 2"):
        paired([1.0], [2.0])


@pytest.mark.parametrize("differing", range(1, 13))
def test_wilcoxon_is_exact_where_few_pairs_differ(differing: int) -> None:
    """All in one direction, among twenty: 2 of the 2**k signs are as far out."""
    one, other = np.zeros(20), np.zeros(20)
    one[:differing] = np.arange(1, differing + 1)
    assert paired(one, other)["wilcoxon"] == 2 / 2**differing
    one[:differing] = 0.25  # with ties
    assert paired(one, other)["wilcoxon"] == 2 / 2**differing


def test_wilcoxon_agrees_with_the_literal_one() -> None:
    rng = np.random.default_rng(1)
    for n in (6, 9, 12, 20, 40):
        one, other = rng.normal(size=n), rng.normal(size=n)
        assert paired(one, other)["wilcoxon"] == pytest.approx(
            stats.wilcoxon(one, other, method="exact").pvalue
        )


def test_bootstrap_covers_the_mean_and_repeats() -> None:
    values = np.random.default_rng(1).normal(5, 1, 50).tolist()
    low, high = bootstrap_interval(values, np.random.default_rng(2))
    assert low < np.mean(values) < high and 0.3 < high - low < 0.9
    assert (low, high) == bootstrap_interval(values, np.random.default_rng(2))


def test_an_interval_of_few_values_is_as_wide_as_its_level_says() -> None:
    """Of 8 values; with percentiles of 2.5 and 97.5 of 8 draws 88 of 100 hold the mean."""
    rng = np.random.default_rng(0)
    held = [low <= 0 <= high for low, high in
            (bootstrap_interval(rng.normal(size=8).tolist(), rng, draws=400) for _ in range(1000))]  # fmt: skip
    assert 0.925 < np.mean(held) < 0.97
    assert interval_levels(10**6) == pytest.approx((2.5, 97.5), abs=1e-3)
    assert bootstrap_interval([0.3], rng) == (0.3, 0.3)


def test_rows_survive_on_disk(tmp_path) -> None:
    rows = [row("a", "x, y", 0.1 + 0.2), row("b", "z", None, known=False)]
    write_atomic(tmp_path / "rows.csv", rows_text(rows).encode())
    assert read_rows(tmp_path / "rows.csv") == rows
    (tmp_path / "rows.csv").write_text("a,b\n1,2\n")
    with pytest.raises(RunFolderError, match="no whole table of results"):
        read_rows(tmp_path / "rows.csv")


def test_means_of_the_same_values_in_another_order_are_a_tie() -> None:
    one, other = (mean_of_defined(values) for values in ((0.1, 0.2, 0.3), (0.3, 0.2, 0.1)))
    assert one is not None and one != other, "by rounding alone"
    values = {"one": dict.fromkeys(range(8), one), "other": dict.fromkeys(range(8), other)}
    found = mean_ranks(values)
    assert found.mean == {"one": 1.5, "other": 1.5} and found.groups == (("one", "other"),)
    found = mean_ranks({**values, "third": dict.fromkeys(range(8), 0.1)})
    assert found.mean == {"one": 1.5, "other": 1.5, "third": 3.0}
    assert found.friedman == pytest.approx(stats.friedmanchisquare([2] * 8, [2] * 8, [1] * 8).pvalue)
    apart = mean_ranks({"one": values["one"], "more": dict.fromkeys(range(8), one + 2e-9)})
    assert apart.mean == {"more": 1.0, "one": 2.0}


def test_the_spread_of_differences_is_that_of_a_sample() -> None:
    keys = range(6)
    other = {key: 0.1 * key for key in keys}
    found = differences(dict.fromkeys(keys, 0.0), {"one": other})["one"]
    assert found.sd == pytest.approx(np.std(list(other.values()), ddof=1))
    assert found.mean == pytest.approx(0.25)


def test_ranks_count_to_nine_decimals() -> None:
    found = mean_ranks({"one": dict.fromkeys(range(8), 0.5), "more": dict.fromkeys(range(8), 0.5 + 4e-10)})
    assert found.mean == {"one": 1.5, "more": 1.5}
