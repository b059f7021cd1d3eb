"""Tables as Fed-MENU's II and III: cells over cases, the client-wise index, tests by cell, local models."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from scipy import stats

from fedatlas.compare import Comparison, Layout, collect, load_comparison, write_table
from fedatlas.compare.cells import Counted, UnitOf, cell_tests, over_cases, pairs_of
from fedatlas.compare.plan import of_findings
from fedatlas.compare.running import average
from fedatlas.core.errors import FederationError
from fedatlas.evaluation.statistics import holm, rows_text
from fedatlas.federation.file import hash_of, resolved
from fedatlas.report.comparison import html, markdown
from fedatlas.report.verdict import verdict
from fedatlas.transport.store import write_atomic

ORGANS = ("liver", "kidney", "pancreas", "spleen", "gallbladder")
SITES = {
    "c1": ORGANS[:1],
    "c2": ORGANS[1:2],
    "c3": ORGANS[2:3],
    "c4": ORGANS[3:4],
    "c5": ORGANS,
    "btcv": ORGANS,
}
"""Site -> what is scored there; btcv trains nothing."""
IN = [f"{site}/{name}" for site, names in SITES.items() for name in names if site != "btcv"]
OUT = [f"btcv/{name}" for name in ORGANS]
MENU = dict(zip(IN, (94.07, 95.94, 80.05, 94.65, 96.70, 93.74, 82.14, 96.34, 86.08), strict=True))
"""Table II, federated MENU-Net: DSC in %."""
LOCALIZED = dict(zip(IN, (93.46, 91.17, 76.82, 91.98, 95.93, 94.80, 78.91, 95.47, 80.29), strict=True))
LOCALIZED_OUT = {"c1": (92.63,), "c2": (85.07,), "c3": (73.78,), "c4": (85.01,),
                 "c5": (92.78, 89.14, 57.13, 88.18, 53.45)}  # fmt: skip
"""Table III, each client's own model on the organs that it annotates."""
TABLE: Mapping[str, Any] = {"columns": "site-class", "average": "sites", "cells": "cases", "percent": True}

Cases = Mapping[str, Mapping[str, Sequence[float | None]]]
"""model -> "site/class" -> the value of every case."""


def menu(folder: Path, *, seeds: Sequence[int] = (0,), **changes: Any) -> Comparison:
    """A comparison of three arms; the data of its sites are not here."""
    base = {
        "name": "menu",
        "labels": {"names": ["background", *ORGANS]},
        "sites": [{"name": s, "path": s, "role": "test" if s == "btcv" else "train"} for s in SITES],
        "preprocessing": {"spacing": [4, 4, 4], "window": [-100, 200], "patch": [16, 16], "context": 1},
        "net": {"name": "unet"},
        "method": {"name": "fedavg"},
        "rounds": 2,
        "evaluation": {"metrics": ["dice", "asd"]},
    }
    arms = {"localized": {"method.name": "standalone"}, "unet": {}, "menu": {"method.name": "fedprox"}}
    file = {"name": "menu", "base": "base.yaml", "arms": arms, "seeds": [*seeds], "layout": dict(TABLE)}
    folder.mkdir(exist_ok=True)
    (folder / "base.yaml").write_text(yaml.safe_dump(base))
    (folder / "menu.yaml").write_text(yaml.safe_dump({**file, **changes}, sort_keys=False))
    return load_comparison([folder / "menu.yaml"], runs=folder / "runs")


def pretend(comparison: Comparison, arm: str, values: Cases, seed: int = 0, metric: str = "dice") -> None:
    """A finished run that never ran."""
    path, federation = comparison.path(arm, seed), comparison.federations[arm][seed]
    (path / "rounds" / "0001").mkdir(parents=True)
    (path / "federation.yaml").write_text(yaml.safe_dump(resolved(federation)))
    about = {
        "hash": hash_of(federation), "finished": "then", "git": "0123", "rounds": 1, "model_bytes": 2**20, "channels": 1,
        "labels": {"names": federation.labels.names, "groups": [], "exclusive": True},
        "sites": {site: {"annotated": names} for site, names in SITES.items()},
    }  # fmt: skip
    (path / "run.json").write_text(json.dumps(about))
    cost = {"bytes_up": 1, "bytes_down": 1, "seconds": 1}
    log = {"round": 1, "phases": {"round": 1}, "sites": {"c1": {"step_seconds": 1}}, "cost": {"c1": cost}}
    (path / "rounds" / "0001" / "log.json").write_text(json.dumps(log))
    rows = [
        {
            "split": "test", "grid": "original", "model": model, "round": 1, "site": cell.partition("/")[0],
            "case": f"case-{number}", "class": cell.partition("/")[2], "metric": metric, "value": value,
            "known": not cell.startswith("btcv/"), "reason": "",
        }
        for model, cells in values.items() for cell, of in cells.items() for number, value in enumerate(of)
    ]  # fmt: skip
    write_atomic(path / "rows.csv", rows_text(rows).encode())


def around(mean: float, cases: int, rng: np.random.Generator, spread: float = 0.02) -> list[float]:
    """Values whose mean is the given one."""
    values = rng.normal(0, spread, cases)
    return (mean + values - values.mean()).tolist()


def line(text: str, row: str, table: int = 0) -> list[str]:
    """The cells of a row of a table of means, by the number of that table."""
    of_table = text.split("| arm | seeds |")[table + 1].partition("\n\n")[0]
    (found,) = (found for found in of_table.splitlines() if found.startswith(f"| {row} |"))
    return [cell.strip() for cell in found.split("|")[3:-1]]


def test_the_global_column_is_that_of_the_printed_row(tmp_path) -> None:
    printed = {"menu": {**MENU, "mean": 91.14}, "unet": {"mean": 90.39}}
    tables = [{"sites": "train", "layout": {"columns": "site-class", "percent": True}}]
    comparison = menu(tmp_path, measure={"sites": "train"}, printed=printed, tables=tables)
    pretend(comparison, "menu", {"best": {cell: [v / 100] * 2 for cell, v in MENU.items()}})
    found = collect(comparison)
    cells = {(c.partition("/")[0], c.partition("/")[2]): v for c, v in MENU.items()}
    assert average(comparison, cells) == pytest.approx(91.142)
    assert found["arms"]["menu"]["mean"] == pytest.approx([0.91142])
    assert found["sites"] == ["c1", "c2", "c3", "c4", "c5"]
    text = markdown(found)
    assert line(text, "menu")[-1] == "91.14" and "| c5: gallbladder | global |" in text
    assert line(text, "menu")[0] == "94.07 (0.00)", "the SD over two equal cases"
    assert "| 86.08 (86.08) | 91.14 (91.14) |" in text and "| 90.39 (not run) |" in text
    assert line(text, "menu", 1)[-1] == f"{np.mean(list(MENU.values())):.2f}", "over columns, as by default"
    assert "dice in %, test cases" in text and "the mean over sites of the mean over a site's classes" in text
    assert json.loads(json.dumps(found)) == found


def test_a_cell_is_the_mean_and_the_sd_over_cases_averaged_over_seeds(tmp_path) -> None:
    comparison = menu(
        tmp_path, seeds=[0, 1], measure={"metric": "asd"}, layout={**TABLE, "percent": False, "decimals": 2}
    )
    values = np.random.default_rng(0).uniform(1, 4, (2, 7))
    for seed, of in enumerate(values):
        pretend(
            comparison, "menu", {"best": {"c1/liver": of.tolist(), "c2/kidney": [1.0, None]}}, seed, "asd"
        )
    text = markdown(collect(comparison))
    assert line(text, "menu")[:2] == [f"{values.mean():.2f} ({values.mean(0).std(ddof=1):.2f})", "1.00"]
    index = (values.mean(1) + 1) / 2
    assert line(text, "menu")[2] == f"{index.mean():.2f} ± {index.std(ddof=1):.2f}"
    holes = [{("s", case, "c"): value for case, value in of.items()} for of in
             ({"a": 1.0, "b": 4.0, "d": None}, {"a": 3.0, "b": None, "d": None})]  # fmt: skip
    assert over_cases(holes) == {("s", "c"): (2, 3.0, pytest.approx(np.std([2, 4], ddof=1)))}
    gaps = menu(
        tmp_path / "gaps",
        seeds=[0, 1],
        measure={"metric": "asd"},
        layout={**TABLE, "percent": False, "decimals": 2},
    )
    for seed, of in enumerate(([1.0, None], [2.0, 6.0])):  # a case with a value in one seed counts once
        pretend(gaps, "menu", {"best": {"c1/liver": of}}, seed, "asd")
    assert line(markdown(collect(gaps)), "menu")[0] == "3.75 (3.18)"


def test_underlined_is_what_the_paired_t_test_finds(tmp_path) -> None:
    rng = np.random.default_rng(5)
    layout = {**TABLE, "against": "menu"}
    tables = [{"layout": {**layout, "correction": "holm"}}]
    comparison = menu(tmp_path, layout=layout, tables=tables)
    cells = ["c1/liver", "c2/kidney", "c3/pancreas", "c4/spleen"]
    ours = {cell: around(0.8, 8, rng) for cell in cells}
    # near the limit: found alone, and not among three
    shift = {"c1/liver": 0.05, "c2/kidney": 0.021, "c3/pancreas": 0.0, "c4/spleen": -0.2}
    theirs: dict[str, list[float | None]] = {c: around(0.8 + shift[c], 8, rng) for c in cells}
    theirs["c4/spleen"][:3] = [None] * 3
    pretend(comparison, "menu", {"best": ours})
    pretend(comparison, "unet", {"best": theirs})
    p = [stats.ttest_rel(theirs[c], ours[c]).pvalue for c in cells[:3]]  # type: ignore[union-attr]
    assert p[0] < 0.01 and 0.03 < p[1] < 0.05 < p[2], "what the rest of this test rests on"
    found = collect(comparison)
    assert found["tests"]["p"]["unet"] == pytest.approx(dict(zip(cells[:3], p, strict=True)))
    assert found["tables"][0]["tests"]["p"]["unet"] == pytest.approx(
        dict(zip(cells[:3], holm(p), strict=True))
    )
    text = markdown(found)
    row = line(text, "unet")
    assert row[0].startswith("**<ins>85.00</ins>** (") and row[1].startswith("**<ins>82.10</ins>** (")
    assert "<ins>" not in row[2] + row[3] and "<ins>" not in "".join(line(text, "menu"))
    assert line(text, "unet", 1)[0].startswith("**<ins>85.00") and "<ins>" not in line(text, "unet", 1)[1]
    assert "against menu; 3 tests, not corrected for their number." in text
    assert "3 tests, Holm-adjusted over these tests." in text
    assert "Not tested, with fewer than 6 pairs of cases: c4/spleen 5." in text
    assert "only one of the two models has a value there: unet c4/spleen 3." in text
    page = html(found)
    assert "<b><u>85.00</u></b> (" in page and "ins&gt;" not in page


CASES = UnitOf("case", {})


def one_cell(**cases: float | None) -> dict[tuple[str, str, str], float | None]:
    """Values of a cell."""
    return {("s", case, "c"): value for case, value in cases.items()}


def test_pairs_of_patients_are_means_over_their_cases() -> None:
    """p1 has three cases, of one of which only one row has a value; p2 has one."""
    one, other = (
        one_cell(p1_a=1.0, p1_b=3.0, p1_c=None, p2_a=0.5),
        one_cell(p1_a=0.0, p1_b=0.0, p1_c=1.0, p2_a=0.25),
    )
    patients = UnitOf("patient", {"s": re.compile("^(p.)_")})
    found = pairs_of({0: one}, {0: other}, patients)["s", "c"]
    assert found.one == [2.0, 0.5] and found.other == [0.0, 0.25] and found.lost == 0
    assert patients("elsewhere", "p1_a") == "p1_a" and patients("s", "unlike") == "unlike"


def test_pairs_are_of_the_seeds_that_both_have() -> None:
    one = {
        0: one_cell(a=1.0, b=2.0, d=None, e=None),
        1: one_cell(a=3.0, b=None, d=None, e=5.0),
        2: one_cell(a=99.0),
    }
    other = {0: one_cell(a=0.0, b=1.0, d=None, e=1.0), 1: one_cell(a=1.0, b=7.0, d=None, e=None)}
    found = pairs_of(one, other, CASES)["s", "c"]
    assert found.one == [2.0, 2.0] and found.other == [0.5, 1.0], "a of both seeds, b of the first"
    assert found.lost == 1, "e; d has no value in either"
    assert pairs_of(one, {}, CASES) == {}
    few = cell_tests(Layout(against="x", columns="site-class"), {"row": one}, other, CASES)  # type: ignore[call-arg]
    assert few == {
        "unit": "case",
        "made": 0,
        "p": {},
        "few": {"row": {"s/c": 2}},
        "lost": {"row": {"s/c": 1}},
    }
    same = {0: one_cell(**{str(n): 0.5 for n in range(6)})}
    made = cell_tests(Layout(against="x", columns="site-class"), {"row": same}, same, CASES)  # type: ignore[call-arg]
    assert made["p"] == {"row": {"s/c": 1.0}} and made["few"] == made["lost"] == {}


def test_localized_rows_are_every_sites_own_model(tmp_path) -> None:
    own = {"local": ["localized"]}
    printed = {"localized": {"mean": 88.50, "c1/liver": 93.46}}
    outside = {"localized/c5": {"btcv/liver": 92.78, "mean": 76.13}}
    layout = {**TABLE, "against": "menu"}
    tables = [{"title": "Table III", "sites": "test", **own, "printed": outside, "layout": layout}]
    comparison = menu(
        tmp_path, measure={"sites": "train", **own}, printed=printed, tables=tables, layout=layout
    )
    models: dict[str, dict[str, list[float]]] = {}
    for site, values in LOCALIZED_OUT.items():
        models[f"local/{site}"] = {cell: [0.01] * 6 for cell in (*IN, *OUT)}
        of_site = {cell: v for cell, v in LOCALIZED.items() if cell.startswith(site)}
        of_site |= {f"btcv/{name}": v for name, v in zip(SITES[site], values, strict=True)}
        models[f"local/{site}"] |= {cell: [v / 100] * 6 for cell, v in of_site.items()}
    pretend(comparison, "localized", models | {"best": {cell: [0.5] * 6 for cell in (*IN, *OUT)}})
    text = markdown(collect(comparison))
    assert line(text, "localized")[:-1] == [""] * 9 and line(text, "localized")[-1] == "88.50"
    assert line(text, "localized/c2") == ["–", "91.17 (0.00)", *["–"] * 8]
    assert line(text, "localized/c5")[4:] == [f"{LOCALIZED[c]:.2f} (0.00)" for c in IN[4:]] + ["–"]
    assert re.search(r"Not run \(\d+ of \d+ arms\):.* unet", text) and "| unet |" not in text
    assert "| 93.46 (93.46) | 88.50 (88.50) |" in text
    assert line(text, "localized/c2", 1) == ["–", "85.07 (0.00)", *["–"] * 4]
    assert line(text, "localized/c5", 1)[-1] == "76.14", "76.136, of a model that has all columns"
    assert "| localized/c5 | 92.78 (92.78) | 76.13 (76.14) |" in text
    assert text.count("| localized | 1 |") == 2, (
        "of means and of costs: as a whole it has nothing out of the federation"
    )
    assert "only one of the two" not in text and "\\*" not in text

    assert "Nothing is tested" not in text
    pretend(
        comparison,
        "menu",
        {"best": {cell: around(0.95, 6, np.random.default_rng(1), 0.002) for cell in (*IN, *OUT)}},
    )
    found = collect(comparison)
    assert found["tests"]["made"] == 9 and found["tables"][0]["tests"]["made"] == 9
    assert set(found["tests"]["p"]) == {f"localized/c{n}" for n in range(1, 6)}
    text = markdown(found)
    assert line(text, "localized/c2")[1] == "<ins>91.17</ins> (0.00)"
    assert line(text, "localized/c5")[4].startswith("**<ins>95.93</ins>**"), "bold is the best of all rows"
    assert line(text, "menu", 1)[-1] == "**95.00**" and line(text, "menu")[-1] == "**95.00**"
    assert found["arms"]["localized"]["mean"] == pytest.approx([0.88502], abs=1e-4)
    interval = found["bootstrap"]["menu"]["value"]
    means = [found["arms"][arm]["mean"][0] for arm in ("menu", "localized")]
    assert interval == pytest.approx(means[0] - means[1]), "weighted as the column is"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"layout": {"cells": "cases"}}, "set columns to site-class"),
        ({"layout": {"against": "menu"}}, "set columns to site-class"),
        ({"layout": {**TABLE, "correction": "holm"}}, "set against to an arm"),
        ({"layout": {**TABLE, "against": "mennu"}}, "layout: against: the arm 'mennu' does not exist; did you mean 'menu'"),
        ({"layout": {**TABLE, "decimals": 7}}, "6 or less"),
        ({"measure": {"metric": "asd"}}, "percent: asd is in mm"),
        ({"measure": {"local": ["local"]}}, "measure: local: the arm 'local' does not exist"),
        ({"measure": {"sites": "tests"}}, "'train' or 'test'"),
        ({"printed": {"menu/c1": {"mean": 1.0}}}, "the arm 'menu/c1' does not exist"),
        ({"layout": {}, "measure": {"local": ["menu"]}, "printed": {"menu/c1": {"mean": 1.0}}},
         "the arm 'menu/c1' does not exist"),
        ({"layout": {}, "printed": {"menu": {"background": 1.0}}}, "the class 'background' does not exist"),
        ({"measure": {"model": "local/c9"}}, "measure: model: local/, the site 'c9' does not exist"),
        ({"measure": {"postprocess": True}}, "postprocess is true, and the arm localized has no evaluation.postprocess"),
        ({"measure": {"local": ["menu"]}, "arms": {"menu": {"evaluation.models": ["best"]}}},
         "measure.local holds the arm, and the arm menu evaluates only best"),
        ({"tables": [{"title": "Outside", "model": "last"}], "arms": {"menu": {"evaluation.models": ["best"]}}},
         "tables: 'Outside': model is last, and the arm menu evaluates only best"),
    ],
)  # fmt: skip
def test_what_a_table_cannot_show_is_told(tmp_path, changes, told) -> None:
    with pytest.raises(FederationError) as error:
        menu(tmp_path, **changes)
    assert told in str(error.value)


def test_a_table_may_be_of_the_model_of_one_site(tmp_path) -> None:
    assert menu(tmp_path, measure={"model": "local/c1"}).measure.model == "local/c1"


def test_findings_are_measured_without_cases_and_outlines(tmp_path) -> None:
    """Sensitivity is of voxels where it is evaluated of them, and of findings where it is not."""
    labels = {"labels.findings": {"ill": None}, "labels.exclusive": False, "labels.names": [*ORGANS]}
    voxels = {"evaluation.metrics": ["dice", "sensitivity"]}

    def found(metric: str, arm: Mapping[str, Any] = labels, **changes: Any) -> Comparison:
        measure = {"metric": metric, **changes.pop("measure", {})}
        return menu(tmp_path, arms={"a": dict(arm)}, measure=measure, layout={}, **changes)

    assert found("auroc", printed={"a": {"ill": 0.5}}).metric == "auroc"
    assert [of_findings(found("sensitivity", arm)) for arm in (labels, {**labels, **voxels})] == [True, False]
    for told, how in (
        ("measure.postprocess: auroc of findings is of no outline", {"measure": {"postprocess": True}}),
        ("measure: local: auroc has no values by case", {"measure": {"local": ["a"]}}),
        ("metric: for segmentation the metric 'auroc' does not exist", {"arm": {}}),
    ):
        with pytest.raises(FederationError, match=told):
            found("auroc", **how)


def test_the_table_is_written_to_a_page(tmp_path) -> None:
    comparison = menu(tmp_path, layout={**TABLE, "against": "menu"}, measure={"sites": "test"})
    for arm, mean in (("menu", 0.9), ("unet", 0.8)):
        rng = np.random.default_rng(2)
        pretend(comparison, arm, {"best": {cell: around(mean, 6, rng) for cell in OUT}})
    found, page = collect(comparison), tmp_path / "page.md"
    write_table(comparison, found, page)
    text = page.read_text()
    assert line(text, "unet")[0].startswith("<ins>80.00</ins> (") and "| btcv: liver |" in text
    assert "<u>80.00</u> (" in html(found)


def test_on_a_page_further_tables_are_folded(tmp_path) -> None:
    """They open with a click; all that `markdown` has is there, the first table, its differences and the footer outside of the fold."""
    tables = [{"title": "One's <1>", "sites": ["btcv"]}]
    comparison = menu(tmp_path, layout={"columns": "site-class"}, tables=tables)
    for arm, mean in (("menu", 0.9), ("unet", 0.8)):
        rng = np.random.default_rng(2)
        cells = dict.fromkeys(("c1/liver", *OUT))
        pretend(comparison, arm, {"best": {cell: around(mean, 6, rng) for cell in cells}})
    found, page = collect(comparison), tmp_path / "page.md"
    write_table(comparison, found, page)
    before, _, rest = page.read_text().partition('<details markdown="1">\n')
    folded, _, after = rest.partition("\n</details>\n")
    assert after.strip() == f"<!-- /{comparison.name} -->"
    assert folded.startswith("<summary>Further tables: One's &lt;1&gt;; costs</summary>\n\n**One's <1>: ")
    plain = [part for part in markdown(found).split("\n\n") if part.strip()]
    assert sorted(line for part in plain for line in part.splitlines()) == sorted(
        line for line in f"{before}{folded}".splitlines()[2:] if line and "<summary>" not in line
    )
    assert "menu: no difference to localized, which was not run." in before and "`fedatlas compare" in before
    assert "Cost of a run" in folded and "<details" not in markdown(found)


def test_the_how_to_shows_tables_that_load(tmp_path) -> None:
    page = (Path(__file__).parents[1] / "docs" / "how-to" / "compare.md").read_text()
    shown = yaml.safe_load(
        page.partition("Tables II and III")[2].partition("```yaml\n")[2].partition("```")[0]
    )
    comparison = menu(tmp_path, **shown)
    assert comparison.measure.sites == tuple(SITES)[:5] and comparison.tables[0].sites == ("btcv",)
    assert comparison.layout == comparison.tables[0].layout and comparison.layout.against == "menu"
    assert comparison.printed == {"menu": {"c1/liver": 94.07, "mean": 91.14}}


def test_the_verdict_names_the_best_arm_and_how_sure_that_is(tmp_path) -> None:
    """Nothing is said of one arm. Means and differences are those of the tables, in their unit."""
    tables = [{"title": "Outside", "sites": ["btcv"], "metric": "asd"}]
    comparison = menu(tmp_path, layout={"columns": "site-class", "percent": True}, tables=tables)
    rng = np.random.default_rng(0)
    cells = {"c1/liver": around(0.8, 8, rng), "c2/kidney": around(0.6, 8, rng)}
    lower = {cell: [value - 0.1 for value in of] for cell, of in cells.items()}
    pretend(comparison, "localized", {"best": lower})
    assert verdict(collect(comparison)) == []
    pretend(comparison, "unet", {"best": cells})
    told = verdict(collect(comparison))
    assert told[0].startswith("Best: unet. Mean over the columns of dice in %, test cases")
    assert told[0].endswith(": unet 70.00, localized 60.00.")
    assert told[1] == "Difference to localized, 95 % interval by case: unet +10.00 (+10.00 to +10.00)."
    assert told[2] == "One seed: how much another seed would change is not known." and len(told) == 3
    page = html(collect(comparison), verdict=told)
    assert page.index('class="verdict"') < page.index("<table") and "Best: unet." in page


def test_the_verdict_names_an_arm_once_and_counts_the_seeds_of_those_that_are_ranked(tmp_path) -> None:
    comparison = menu(tmp_path, seeds=[0, 1], layout={"columns": "site-class"})
    for arm, seeds in (("localized", (0, 1)), ("menu", (0, 1)), ("unet", (0,))):
        for seed in seeds:
            cells = {"c1/liver": [0.8, 0.6] * 2, "c2/kidney": [0.6, 0.8] * 2}
            pretend(comparison, arm, {"best": cells}, seed)
    found = collect(comparison)
    found["bootstrap"]["menu"] = found["bootstrap"]["menu"] | {"value": 0.001, "low": -0.1, "high": 0.1}
    told = verdict(found)
    assert told[0].startswith("Best: localized and menu. ") and not any("One seed" in line for line in told)


def test_the_verdict_ranks_what_is_whole(tmp_path) -> None:
    """An arm with a seed to go is no best one, nor one that misses a class that others find: as in the table."""
    comparison = menu(tmp_path, seeds=[0, 1], layout={"columns": "site-class"})
    for arm, seeds, level in (("localized", (0, 1), 0.6), ("menu", (0, 1), 0.7), ("unet", (0,), 0.8)):
        for seed in seeds:
            pretend(comparison, arm, {"best": {"c1/liver": [level] * 2, "c2/kidney": [level] * 2}}, seed)
    told = verdict(collect(comparison))
    assert told[0].startswith("Best: menu. ") and told[0].endswith(
        ": unet 0.800, menu 0.700, localized 0.600."
    )
    assert (
        told[1]
        == "Not ranked, as their means are of less than the others': unet (1 of 2 seeds are finished)."
    )
    assert "| menu | 2 | **0.700 ± 0.000** |" in markdown(collect(comparison))
    comparison = menu(tmp_path / "hard", measure={"metric": "asd"}, layout={"columns": "site-class"})
    for arm, kidney in (("localized", 9.0), ("menu", 8.0), ("unet", None)):
        pretend(comparison, arm, {"best": {"c1/liver": [2.0, 2.0], "c2/kidney": [kidney, kidney]}}, 0, "asd")
    told = verdict(collect(comparison))
    assert told[0].startswith("Best: menu. ") and "unet (2 of its 4 values are lacking)" in told[1]
    text = markdown(collect(comparison))
    assert "(an empty prediction has no distance): unet 2 of 4. " in text
    assert "| unet | 1 | **2.0** | – | 2.0 |" in text and "| menu | 1 | **2.0** | **8.0** | **5.0** |" in text


def test_in_a_seed_that_the_first_arm_lacks_its_sites_and_classes_are_counted() -> None:
    """Validation cases follow the seed, so that no case of it need be one of the first arm's."""

    def row(case: str, name: str, known: bool = True) -> dict[str, Any]:
        return {"site": "c1", "case": case, "class": name, "known": known}

    counted = Counted({0: [row("one", "liver"), row("one", "kidney", False)]}, known=True)
    assert counted(0, row("one", "liver")) and not counted(0, row("two", "liver"))
    assert counted(1, row("two", "liver")) and not counted(1, row("two", "kidney"))
    assert not counted(1, {**row("two", "liver"), "site": "c2"})


def test_what_a_site_annotates_is_read_of_the_first_arm_even_if_it_forgets_nothing(tmp_path) -> None:
    """`standalone` has nothing to forget; an arm with more labels comes after it."""
    comparison = menu(tmp_path, arms={"localized": {"method.name": "standalone"}, "unet": {}})
    local = {"c2/kidney": [0.2] * 6}
    for arm in comparison.arms:
        pretend(comparison, arm, {"best": {"c2/kidney": [0.9] * 6}, "local/c1": local})
    file = comparison.path("unet", 0) / "run.json"
    about = json.loads(file.read_text())
    about["sites"]["c1"]["annotated"] = [*ORGANS]
    file.write_text(json.dumps(about))
    found = collect(comparison)["forgetting"]
    assert list(found) == ["unet"] and found["unet"]["value"] == pytest.approx(-0.7)


def test_the_verdict_says_of_a_further_table_which_means_are_of_less(tmp_path) -> None:
    """Beside what holds of the first table, too."""
    table = {"metric": "dice", "model": "last", "title": "Last", "layout": {"columns": "site-class"}}
    comparison = menu(tmp_path, layout={"columns": "site-class"}, tables=[table])
    for arm, kidney in (("localized", 0.4), ("menu", 0.5), ("unet", None)):
        pretend(
            comparison,
            arm,
            {
                "best": {"c1/liver": [0.6], "c2/kidney": [0.6]},
                "last": {"c1/liver": [0.6], "c2/kidney": [kidney]},
            },
        )
    told = verdict(collect(comparison))
    less = "Not ranked, as their means are of less than the others': unet (1 of its 2 values are lacking)."
    assert f"Last: unet 0.600, menu 0.550, localized 0.500. {less}" in told
    assert " ".join(told).count("Not ranked") == 1


def test_an_arm_without_values_where_it_is_bad_is_neither_best_nor_first(tmp_path) -> None:
    """The distances of `localized` are longer in every case that it segments, and it finds nothing in the harder ones."""
    comparison = menu(tmp_path, measure={"metric": "asd"}, layout={"columns": "site-class"})
    easy, hard = [1.0, 1.1, 1.2], [9.0, 9.1, 9.2]
    pretend(comparison, "unet", {"best": {cell: easy + hard for cell in (*IN, *OUT)}}, metric="asd")
    worse: list[float | None] = [*(value + 0.5 for value in easy), None, None, None]
    pretend(comparison, "localized", {"best": {cell: worse for cell in (*IN, *OUT)}}, metric="asd")
    found = collect(comparison)
    (ranks,) = found["ranks"]
    assert ranks["mean"] == {"unet": 1.0, "localized": 2.0}
    assert found["arms"]["localized"]["lacking"] == 3 * len((*IN, *OUT))
    assert set(found["arms"]["localized"]["lacking_in"]) == {*IN, *OUT}
    row = next(each for each in markdown(found).splitlines() if each.startswith("| localized | 1"))
    assert "**" not in row
    of = found["arms"]["localized"]
    assert f"localized ({of['lacking']} of its {of['values']} values are lacking)" in " ".join(verdict(found))


def test_a_class_that_is_scored_at_easy_sites_alone_is_never_bold(tmp_path) -> None:
    comparison = menu(tmp_path, layout={})
    for arm, hard in (("localized", 0.4), ("menu", 0.5), ("unet", None)):
        pretend(comparison, arm, {"best": {"c1/liver": [0.6], "c5/liver": [hard]}})
    text = markdown(collect(comparison))
    assert line(text, "unet")[0] == "0.600" and line(text, "menu")[0] == "**0.550**"


def test_the_verdict_says_which_arms_are_not_told_apart(tmp_path) -> None:
    comparison = menu(tmp_path, layout={"columns": "site-class"})
    for arm, shift in (("localized", 0.0), ("unet", 0.05), ("menu", -0.3)):
        of = [0.5 + shift, 0.6 - shift, 0.5 + shift, 0.6 - shift, 0.5 + shift, 0.7, 0.5 + shift]
        pretend(comparison, arm, {"best": {"c1/liver": of}})
    told = verdict(collect(comparison))
    assert told[0].startswith("Best: unet, not told apart from localized. "), told[0]
    # of both sides: its own reference, and those whose reference it is
    chain = menu(
        tmp_path / "chain",
        layout={"columns": "site-class"},
        references={"unet": "localized", "menu": "unet"},
    )
    for arm, shift in (("localized", 0.0), ("unet", 0.05), ("menu", 0.01)):
        of = [0.5 + shift, 0.6 - shift, 0.5 + shift, 0.6 - shift, 0.5 + shift, 0.7, 0.5 + shift]
        pretend(chain, arm, {"best": {"c1/liver": of}})
    told = verdict(collect(chain))
    assert told[0].startswith("Best: unet, not told apart from localized and menu. "), told[0]
    pretend(
        alone := menu(tmp_path / "b", layout={"columns": "site-class"}),
        "localized",
        {"best": {"c1/liver": [0.9] * 7}},
    )
    pretend(alone, "unet", {"best": {"c1/liver": [0.5] * 7}})
    assert verdict(collect(alone))[0].startswith("Best: localized. ")


def test_the_verdict_ranks_by_what_is_printed_and_ties_are_all_named(tmp_path) -> None:
    comparison = menu(tmp_path, layout={"columns": "site-class"})
    for arm, level in (("localized", 0.5), ("unet", 0.70004), ("menu", 0.70011)):
        pretend(comparison, arm, {"best": {"c1/liver": [level] * 7}})
    found = collect(comparison)
    assert verdict(found)[0].startswith("Best: unet and menu. ")
    # an interval that only touches 0 does not tell apart; a difference of exactly 0 is a tie of its own
    of = {"value": 0.2, "low": 0.0, "high": 0.4, "reason": ""}
    told = verdict(found | {"bootstrap": {"unet": of, "menu": of}})
    assert told[0].startswith("Best: unet and menu, not told apart from localized. ")
    told = verdict(
        found | {"bootstrap": {"unet": of | {"value": 0.0, "low": -0.1}, "menu": of | {"low": None}}}
    )
    assert told[0].startswith("Best: unet and menu. ") and "menu +" not in told[1]
    apart = verdict(found | {"families": [["localized"], ["unet", "menu"]]})
    assert apart[0].startswith("Best of unet, menu: unet and menu. ")
    assert apart[0].endswith(": localized 0.500; unet 0.700, menu 0.700.")


def test_an_arm_is_compared_with_the_reference_that_the_file_names(tmp_path) -> None:
    """menu against unet; unet, which is a reference, and localized, the first arm, against nobody."""
    comparison = menu(tmp_path, layout={"columns": "site-class"}, references={"menu": "unet"})
    rng = np.random.default_rng(0)
    levels = {"localized": 0.9, "unet": 0.5, "menu": 0.6}
    of = around(0.0, 8, rng)
    for arm, level in levels.items():
        pretend(comparison, arm, {"best": {"c1/liver": [level + value for value in of]}})
    found = collect(comparison)
    assert found["compared"] == {"menu": "unet"} and list(found["differences"]) == ["menu"]
    assert found["bootstrap"]["menu"]["value"] == pytest.approx(0.1)
    text = markdown(found)
    assert "difference to unet" in text and "| menu | 8 | +0.100 | +0.100 to +0.100 |" in text
    assert "Difference to unet, 95 % interval by case: menu +0.100" in verdict(found)[1]
    both = menu(tmp_path, layout={"columns": "site-class"}, references={"menu": "unet", "unet": "localized"})
    text = markdown(collect(both))
    assert "| menu - unet | 8 | +0.100 |" in text and "| unet - localized | 8 | -0.400 |" in text
    assert "Differences to the arm that is named" in text


def test_cases_of_a_patient_are_paired_and_drawn_together(tmp_path) -> None:
    """Of sixteen cases seven are of one patient, case-1 and case-10 to case-15, and on these alone the arms differ."""
    found, texts = {}, {}
    for patient in (None, r"-(\d)"):
        arms = {arm: {"sites.c1.patient": patient} for arm in ("localized", "menu")}
        comparison = menu(
            tmp_path / f"{bool(patient)}", layout={"columns": "site-class", "against": "localized"}, arms=arms
        )
        for arm in arms:
            better = [0.1 if arm == "menu" and (n == 1 or n > 9) else 0.0 for n in range(16)]
            pretend(comparison, arm, {"best": {"c1/liver": [0.5 + value for value in better]}})
        found[patient] = collect(comparison)
        texts[patient] = markdown(found[patient])
    one, several = found.values()
    assert (one["pairs"], several["pairs"]) == ("case", "patient")
    assert (one["differences"]["menu"]["n"], several["differences"]["menu"]["n"]) == (16, 10)
    assert several["differences"]["menu"]["mean"] == pytest.approx(0.01), "one patient of ten"
    by_case, by_patient = (of["bootstrap"]["menu"] for of in (one, several))
    assert by_case["value"] == by_patient["value"] == pytest.approx(0.1 * 7 / 16), (
        "the table's mean is over cases"
    )
    assert (
        by_patient["low"] == 0 < by_case["low"]
        and by_patient["high"] > by_case["high"]
        and by_patient["n"] == 10
    )
    before, after = texts.values()
    assert "| arm | cases | difference to localized | 95 % interval by case |" in before
    assert "| arm | patients | difference to localized | 95 % interval by patient |" in after
    assert "over resamples of the patients of every site" in after and "over the patients of a cell" in after
    assert "95 % interval by patient: menu +0.044" in verdict(several)[1]


def test_arms_of_settings_that_are_not_compared_are_not_ranked_together(tmp_path) -> None:
    """menu is compared with unet, and neither with localized."""
    apart = menu(tmp_path, layout={"columns": "site-class"}, references={"menu": "unet"})
    for arm, level in {"localized": 0.9, "unet": 0.5, "menu": 0.6}.items():
        pretend(apart, arm, {"best": {"c1/liver": [level] * 8}})
    assert apart.families == [["localized"], ["unet", "menu"]]
    (ranks,) = collect(apart)["ranks"]
    assert ranks["mean"] == {"menu": 1.0, "unet": 2.0}
    assert html(collect(apart)).count("Critical-difference diagram") == 1
    # nor is one of them called the best of all, in words or by bold numbers
    told = verdict(collect(apart))
    assert told[0].startswith("Best of menu, unet: menu. Mean ") and told[0].endswith(
        ": localized 0.900; menu 0.600, unet 0.500."
    )
    assert "**0.600" in markdown(collect(apart)) and "**0.900" not in markdown(collect(apart))
    # by way of unet menu is compared with localized, too
    both = menu(tmp_path, layout={"columns": "site-class"}, references={"menu": "unet", "unet": "localized"})
    assert both.families == [["localized", "unet", "menu"]]
    assert list(collect(both)["ranks"][0]["mean"]) == ["localized", "menu", "unet"]
    plain = menu(tmp_path, layout={"columns": "site-class"})
    assert plain.families == [list(plain.arms)]
    arms: dict[str, dict[str, Any]] = {arm: {} for arm in "zyxw"}
    pairs = menu(tmp_path, arms=arms, references={"x": "z", "y": "w"})
    assert pairs.families == [["z", "x"], ["y", "w"]], (
        "in the order of the file, whichever pair is joined first"
    )
    assert pairs.compared == {"y": "w", "x": "z"}


@pytest.mark.parametrize(
    ("references", "told"),
    [
        ({"men": "unet"}, "references: the arm 'men'"),
        ({"menu": "net"}, "references: the arm 'net'"),
        ({"menu": "menu"}, "references: menu is its own reference"),
    ],
)
def test_a_reference_that_cannot_be_is_refused(tmp_path, references, told) -> None:
    with pytest.raises(FederationError, match=told):
        menu(tmp_path, references=references)


def test_of_distances_the_verdict_takes_the_least(tmp_path) -> None:
    comparison = menu(tmp_path, seeds=[0, 1], measure={"metric": "asd"}, layout={"columns": "site-class"})
    for seed in (0, 1):
        pretend(comparison, "unet", {"best": {"c1/liver": [2.0, 4.0]}}, seed, "asd")
        pretend(comparison, "menu", {"best": {"c1/liver": [1.0, 2.0]}}, seed, "asd")
    told = verdict(collect(comparison))
    assert told[0].startswith("Best: menu. ") and told[0].endswith(": menu 1.5, unet 3.0.")
    assert not any("seed" in sentence for sentence in told)
