"""Averages over the number of rounds, on the page of a comparison."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_compare_tables import IN, OUT, menu, pretend

from fedatlas.compare import Comparison, collect, load_comparison, write_page
from fedatlas.compare.plan import Sweep
from fedatlas.compare.sweep import kinds, lacks_sweeps, number_of, sweeps

EXPERIMENTS = Path(__file__).parents[1] / "experiments"
ARMS: Mapping[str, Any] = {
    f"{name}-{rounds}": {**method, "rounds": rounds, "local.steps": 800 // rounds}
    for rounds in (40, 4, 80)
    for name, method in (("unet", {}), ("menu", {"method.name": "fedprox"}))
}
POOLED: Mapping[str, Any] = {"method.name": "centralized", "rounds": 40, "local.steps": 100}
PERCENT = {"layout": {"average": "sites", "percent": True}}


def swept(folder: Path, arms: Mapping[str, Any] = ARMS, **changes: Any) -> Comparison:
    measure = {"sites": "train"}
    return menu(folder, arms={**arms, "pooled": POOLED}, measure=measure, **{**PERCENT, **changes})


def done(comparison: Comparison, arm: str, mean: float, seed: int = 0, cells: tuple[str, ...] = ()) -> None:
    pretend(comparison, arm, {"best": {cell: [mean] * 2 for cell in cells or (*IN, *OUT)}}, seed)


def test_arms_that_differ_in_rounds_only_are_one_kind(tmp_path) -> None:
    found = kinds(swept(tmp_path))
    assert found.swept == {n: [f"{n}-{r}" for r in (4, 40, 80)] for n in ("unet", "menu")}
    assert found.pooled == ["pooled"]
    arms = {
        "a": {"rounds": 2}, "b": {"rounds": 4}, "x-2": {"local.lr": 0.1}, "x-4": {"local.lr": 0.1, "rounds": 4},
        "x.2": {"local.lr": 0.2}, "x.4": {"local.lr": 0.2, "rounds": 4}, "r2-own": {"method.name": "fedprox"},
        "r4-own": {"method.name": "fedprox", "rounds": 4, "evaluation.every": 2},
        "alone": {"local.lr": 0.3, "rounds": 9},
    }  # fmt: skip
    assert kinds(swept(tmp_path, arms)).swept == {
        "fedavg, unet": ["a", "b"],
        "x-2, x-4": ["x-2", "x-4"],
        "x.2, x.4": ["x.2", "x.4"],
        "own": ["r2-own", "r4-own"],
    }, "another learning rate is another kind; two of one name are called by their arms"
    both = kinds(swept(tmp_path, {"c-4": {**POOLED, "rounds": 4}}))
    assert both.swept == {"centralized, unet": ["c-4", "pooled"]} and both.pooled == []


@pytest.mark.parametrize(
    ("file", "lines", "pooled"),
    [
        ("phantom-abdomen/rounds", {"fedavg": (4, 10, 20, 40, 80), "condistfl": (4, 10, 20, 40, 80)}, []),
        (
            "phantom-abdomen/menu-rounds",
            {"unet": (4, 10, 20, 40, 80), "menunet": (4, 10, 20, 40, 80)},
            ["menunet-centralized"],
        ),
    ],
)
def test_the_kinds_of_the_experiments(file, lines, pooled) -> None:
    comparison = load_comparison([EXPERIMENTS / f"{file}.yaml"], profile="full")
    found = kinds(comparison)
    assert found.swept == {name: [f"{name}-{r}" for r in rounds] for name, rounds in lines.items()}
    assert found.pooled == pooled


def test_the_page_shows_the_averages_of_every_table(tmp_path, monkeypatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr("fedatlas.compare.sweep.sweep_curves", lambda *of: drawn.append(of) or "<svg/>")
    tables = [{"title": "Out", "sites": "test", "printed": {"pooled": {"mean": 0.5}}}]
    comparison = swept(tmp_path, seeds=[0, 1], tables=tables, printed={"menu-80": {"mean": 91.14}})
    for seed in (0, 1):
        done(comparison, "unet-40", 0.5 + 0.1 * seed, seed)
        done(comparison, "pooled", 0.9, seed)
    done(comparison, "unet-4", 0.4, cells=tuple(IN))
    found = collect(comparison)
    text = sweeps(comparison, found)
    ((panels, ticks, label, name),) = drawn
    inside, out = panels
    assert (
        inside.title.startswith("dice in %, test cases, model best, sites c1,") and inside.unit == "Dice, %"
    )
    assert out.title.startswith("Out: dice, test cases") and out.unit == "Dice"
    one, two, three = inside.lines["unet"]
    assert one == (4, pytest.approx(40.0), None, None) and three == (80, None, None, None)
    assert two == (40, pytest.approx(55.0), pytest.approx(100 * np.std([0.5, 0.6], ddof=1)), None)
    assert inside.lines["menu"] == [(4, None, None, None), (40, None, None, None), (80, None, None, 91.14)]
    assert inside.levels == {"pooled": (40, pytest.approx(90.0), pytest.approx(0.0), None)}
    assert out.levels == {"pooled": (40, pytest.approx(0.9), pytest.approx(0.0), 0.5)}
    assert out.lines["unet"][0] == (4, None, None, None) and out.lines["unet"][1].mean == pytest.approx(0.55)
    assert ticks == {4: "4 × 200", 40: "40 × 20", 80: "80 × 10"} and label == "rounds × steps"
    assert name == "sweep-0"
    assert "Not finished: unet-4 (1 of 2 seeds), unet-80 (0 of 2 seeds), menu-4 (0" in text
    assert "Without an average in “Out: dice" in text and text.endswith(": unet-4.</p>")
    assert "in all at every" not in text and "union of all sites (pooled)" in text


def test_nothing_is_drawn_without_two_numbers_of_rounds(tmp_path) -> None:
    alone = swept(tmp_path / "alone", {"unet": {}, "menu": {"method.name": "fedprox", "rounds": 9}})
    done(alone, "unet", 0.5)
    assert sweeps(alone, collect(alone)) == ""
    nothing = swept(tmp_path / "nothing")
    done(nothing, "pooled", 0.5)
    assert sweeps(nothing, collect(nothing)) == "", "a level has nothing to stand beside"


def test_the_figure(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("fedatlas.compare.parts.box_plots", lambda *of: "<svg></svg>")
    arms = {**ARMS, "unet-10": {"rounds": 10, "local.epochs": 2}}
    printed = {"unet-4": {"mean": 41.0}, "pooled": {"mean": 90.0}}
    comparison = swept(tmp_path, arms, seeds=[0, 1], printed=printed, tables=[{"sites": "test"}])
    for seed in (0, 1):
        for place, arm in enumerate(arms):
            done(comparison, arm, 0.6 + 0.02 * place + 0.01 * seed, seed)
        done(comparison, "pooled", 0.9, seed)
    found = collect(comparison)
    text = write_page(comparison, found).read_text()
    figure = text.partition("How often to exchange</h3>")[2].partition("</figure>")[0]
    for told in (
        "4 × 200 steps",
        "10 × 2 epochs",
        "rounds × steps or epochs",
        "Dice, %",
        "hollow: published",
    ):
        assert told in figure, told
    assert figure.count("stroke: var(--bad); stroke-width: 1.4") == 3, "a level in each panel, and the legend"
    assert (
        "every number of rounds: unet." in figure
        and "Not finished" not in text
        and "<h2>Global and local" in text
        and '<section id="sweeps">' in text
    )
    assert sweeps(comparison, found) in text, "the same bytes again"


def numbered(**arms: Any) -> dict[str, Any]:
    """Arms with so many images at c1 and c2."""
    return {
        f"{name}-n{n}": {
            **method,
            "sites.c1.cases": n,
            "sites.c2.cases": n,
        }
        for name, method in arms.items()
        for n in (250, 1000, 100)
    }


def test_a_sweep_is_over_any_number_of_the_plan(tmp_path, monkeypatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr("fedatlas.compare.sweep.sweep_curves", lambda *of: drawn.append(of) or "<svg/>")
    arms = numbered(unet={}, menu={"method.name": "fedprox"})
    both, one = ["sites.c1.cases", "sites.c2.cases"], ["sites.c1.cases"]
    told = [{"over": both, "title": "n, images"}, {"over": one}, {"over": ["local.lr"]}]
    comparison = swept(tmp_path, arms, sweeps=told, seeds=[0, 1])
    found = kinds(comparison, comparison.sweeps[0])
    assert found.swept == {n: [f"{n}-n{k}" for k in (100, 250, 1000)] for n in ("unet", "menu")}
    assert found.numbers["menu-n250"] == 250 and "pooled" not in found.numbers and found.pooled == ["pooled"]
    assert kinds(comparison, comparison.sweeps[1]).swept == {}, "c2 differs as well"
    assert kinds(comparison, comparison.sweeps[2]).swept == {}, "the same in all"
    assert kinds(comparison).swept == {}, "no two arms differ in rounds"
    for arm, mean in (("unet-n100", 0.4), ("unet-n1000", 0.6)):
        for seed in (0, 1):
            done(comparison, arm, mean + 0.02 * seed, seed)
    text = sweeps(comparison, collect(comparison))
    ((panels, ticks, label, _),) = drawn
    assert ticks == {100: "100", 250: "250", 1000: "1000"} and label == "n, images"
    points = [(at.at, at.mean) for at in panels[0].lines["unet"]]
    assert points == [(100, pytest.approx(41.0)), (250, None), (1000, pytest.approx(61.0))]
    assert "Averages by n, images</h3>" in text and "Not finished: unet-n250" in text


def test_a_star_stands_for_the_sites_that_train(tmp_path) -> None:
    arms = {f"a-{n}": {f"sites.{site}.cases": n for site in ("c1", "c2", "c3", "c4", "c5")} for n in (20, 40)}
    star = Sweep(over=("sites.*.cases",))  # type: ignore[call-arg]
    assert kinds(swept(tmp_path, arms), star).swept == {"a": ["a-20", "a-40"]}, "btcv has none, and is tested"
    arms["a-40"]["sites.c3.cases"] = 41
    assert kinds(swept(tmp_path / "other", arms), star).swept == {}, "not one number in all"


def test_a_line_is_called_by_words_that_no_other_has(tmp_path) -> None:
    arms = {
        "u_2": {}, "u_4": {"rounds": 4}, "2-own-net": {"local.lr": 0.1}, "4-own-net": {"local.lr": 0.1, "rounds": 4},
        "a": {"local.lr": 0.2}, "a-b-a": {"local.lr": 0.2, "rounds": 4},
        "pooled-2": {"local.lr": 0.3}, "pooled-4": {"local.lr": 0.3, "rounds": 4},
    }  # fmt: skip
    found = kinds(swept(tmp_path, arms))
    assert list(found.swept) == ["u", "own-net", "a", "pooled-2, pooled-4"], "pooled is a level's name"
    assert found.pooled == ["pooled"]
    twice = {name: {"rounds": 2, "evaluation.every": every} for name, every in (("a", 1), ("b", 2))}
    assert kinds(swept(tmp_path / "twice", twice)).swept == {}, "two arms, and one number"


def test_what_is_no_number_in_all_of_the_keys_has_none() -> None:
    plain = {"rounds": 2, "local": {"steps": 2}, "on": True, "patch": [2, 2], "name": "2", "method": {}}

    def number(*over: str) -> float | None:
        return number_of(plain, Sweep(over=over))  # type: ignore[call-arg]

    assert number("rounds", "local.steps") == 2
    for other in ("on", "patch", "name", "method.sam.start", "nowhere"):
        assert number("rounds", other) is None and number(other) is None, other


def test_why_there_is_no_sweep_is_told_by_its_keys(tmp_path) -> None:
    both = [{"over": ["local.lr", "seed"]}, {"over": ["rounds"], "beside": ["local.steps"]}]
    assert lacks_sweeps(swept(tmp_path / "some", sweeps=both)) == "", "one of the two has a line"
    alone = {"unet": {}}
    told = "sweeps is over {}, in which alone no two arms differ"
    assert lacks_sweeps(swept(tmp_path / "none", alone, sweeps=both)) == told.format("local.lr, seed; rounds")
    assert lacks_sweeps(swept(tmp_path / "empty", alone, sweeps=[])) == told.format("nothing")


def test_budgets_are_told_of_sweeps_over_rounds_alone(tmp_path, monkeypatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr("fedatlas.compare.sweep.sweep_curves", lambda *of: drawn.append(of) or "<svg/>")
    arms = {
        "a-40": {"rounds": 40, "local.steps": 20}, "b-40": {"rounds": 40, "local.steps": 5},
        "a-80": {"rounds": 80, "local.steps": 10},
        "lr-1": {"rounds": 9, "local.steps": 5, "local.lr": 0.25, "method": {"name": "fedprox", "mu": 0.25}},
        "lr-2": {"rounds": 9, "local.steps": 6, "local.lr": 0.5, "method": {"name": "fedprox", "mu": 0.5}},
        "mixed-2": {"rounds": 2, "local.steps": 3}, "mixed-3": {"rounds": 3, "local.epochs": 2},
        "even-1": {"rounds": 1, "local.epochs": 0.3, "local.lr": 1.5},
        "even-3": {"rounds": 3, "local.epochs": 0.1, "local.lr": 1.5},
    }  # fmt: skip
    rounds = {"over": ["rounds"], "beside": ["local.steps", "local.epochs"]}
    rates = {"over": ["local.lr", "method.mu"], "beside": ["local.steps"]}
    told = {}
    for name, sweep, of in (
        ("uneven", rounds, ("a-40", "b-40", "a-80")),
        ("even", rounds, ("even-1", "even-3")),
        ("mixed", rounds, ("mixed-2", "mixed-3")),
        ("rates", rates, ("lr-1", "lr-2")),
    ):
        comparison = swept(tmp_path / name, {arm: arms[arm] for arm in of}, sweeps=[sweep])
        done(comparison, of[0], 0.5)
        told[name] = sweeps(comparison, collect(comparison))
    assert [ticks for _, ticks, *_ in drawn] == [
        {40: "40 × 20 or 5", 80: "80 × 10"},
        {1: "1 × 0.3", 3: "3 × 0.1"},
        {2: "2 × 3 steps", 3: "3 × 2 epochs"},
        {0.25: "0.25", 0.5: "0.5"},
    ]
    labels = ["rounds × steps", "rounds × epochs", "rounds × steps or epochs", "local.lr"]
    assert [label for *_, label, _ in drawn] == labels
    uneven = [name for name, text in told.items() if "in all at every number of rounds" in text]
    assert uneven == ["uneven", "mixed"], "steps are no epochs, though they are as many"


def test_the_words_beside_a_sweep_are_of_what_it_shows(tmp_path, monkeypatch) -> None:
    """Published averages alone are drawn, too; where a table has two averages it is include*."""
    drawn: list[Any] = []
    monkeypatch.setattr("fedatlas.compare.sweep.sweep_curves", lambda *of: drawn.append(of) or "<svg/>")
    arms = {"a-2": {}, "a-4": {"rounds": 4}}
    over = [{"over": ["local.lr"]}, {"over": ["rounds"]}]

    def told(name: str, values: Mapping[str, float], **changes: Any) -> str:
        comparison = swept(tmp_path / name, arms, **{"sweeps": over, **changes})
        for arm, mean in values.items():
            done(comparison, arm, mean)
        return sweeps(comparison, collect(comparison))

    plain = told("plain", {"a-2": 0.5, "pooled": 0.5})
    assert "include*" not in plain and "Hollow" not in plain and "pooled (0 of" not in plain
    level = told("level", {"a-2": 0.5}, printed={"pooled": {"mean": 0.5}})
    assert "Hollow: published" in level and "pooled (0 of 1 seeds)" in level
    both = {"include*": 60.0, "exclude*": 70.0}
    layout = {"columns": "site-class", "percent": True}
    published = told("published", {}, layout=layout, printed={"a-4": both})
    assert "Hollow: published" in published and drawn[-1][0][0].lines["a"][1].published == 60.0
    told("mean", {}, layout=layout, printed={"a-4": {**both, "mean": 65.0}})
    assert drawn[-1][0][0].lines["a"][1].published == 65.0, "the mean, where it is published"
    assert {name for *_, name in drawn} == {"sweep-1"}, "its place among the sweeps"
    starred = told("starred", {"a-2": 0.5}, tables=[{"sites": ["c1", "btcv"], "layout": layout}])
    assert "Where a table has two averages it is include*." in starred
    first = menu(tmp_path / "first", arms=arms, measure={"sites": ["c1", "btcv"]}, layout=layout)
    done(first, "a-2", 0.5)
    assert "it is include*." in sweeps(first, collect(first))
    for seed, mean in enumerate((0.2, 0.3, 0.7)):
        comparison = swept(tmp_path / "seeds", arms, seeds=[0, 1, 2])
        done(comparison, "a-2", mean, seed)
    sweeps(comparison, collect(comparison))
    assert drawn[-1][0][0].lines["a"][0].mean == pytest.approx(40.0), (
        "the mean over three seeds, not their middle"
    )


def test_the_axis_is_logarithmic_where_numbers_are_far_apart() -> None:
    from fedatlas.report.figures.arms import Average, Swept, sweep_curves

    def places(numbers: tuple[float, ...]) -> list[float]:
        """Of the ticks, from 0 to 1."""
        line = {"a": [Average(n, 0.5) for n in numbers]}
        svg = sweep_curves([Swept("t", "Dice", line, {})], {n: f"{n:g}" for n in numbers}, "x", "s")
        ticks = re.findall(r'id="s-xtick_\d+">.*?<use[^>]* x="([\d.]+)"', svg)
        at = [float(x) for x in ticks]
        return [round((x - at[0]) / (at[-1] - at[0]), 3) for x in at]

    assert places((10, 100, 1000)) == [0, 0.5, 1] and places((0.4, 0.6, 0.8)) == [0, 0.5, 1]
    assert places((0, 250, 1000)) == [0, 0.25, 1], "0 has no logarithm"
