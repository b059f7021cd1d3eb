"""Validation over the rounds, radar plots, and tables after post-processing."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import yaml
from test_compare_tables import IN, ORGANS, OUT, line, menu, pretend

from fedatlas.compare import Comparison, collect
from fedatlas.compare.curves import class_figure, curve_figure, curves
from fedatlas.compare.radar import dots, radars
from fedatlas.core.errors import FederationError
from fedatlas.evaluation.statistics import POST, read_rows, rows_text
from fedatlas.report.comparison import Section, html, markdown
from fedatlas.transport.store import write_atomic

CELLS = ("c1/liver", "c2/kidney", "btcv/liver")
PLAIN = {"columns": "site-class"}


def finish(comparison: Comparison, arm: str, value: float, after: float | None = None, seed: int = 0) -> None:
    """A run with two cases in every cell; after: the value after post-processing."""
    models = {"best": value, "local/c5": value} | ({POST + "best": after} if after is not None else {})
    pretend(
        comparison,
        arm,
        {model: {cell: [of] * 2 for cell in (*IN, *OUT)} for model, of in models.items()},
        seed,
    )


def validate(comparison: Comparison, arm: str, values: Sequence[float | None], seed: int = 0) -> None:
    """Round by round the mean Dice; cells lie around it, and one more that the first arm lacks. None: not validated."""
    for number, value in enumerate(values, 1):
        folder = comparison.path(arm, seed) / "rounds" / f"{number:04d}"
        folder.mkdir(exist_ok=True)
        cells = {"c1/liver": -0.1, "c2/kidney": 0.1} | ({"c5/spleen": 0.3} if arm == "menu" else {})
        rows = [
            {
                "split": "validation", "grid": "federation", "model": "global", "round": number, "case": f"case-{case}",
                "site": cell.partition("/")[0], "class": cell.partition("/")[2], "metric": "dice",
                "value": value + apart + 0.01 * case, "known": True, "reason": "",
            }
            for cell, apart in cells.items() for case in (-1, 1) if value is not None
        ]  # fmt: skip
        (folder / "rows.json").write_text(json.dumps(rows))
        log = (comparison.path(arm, seed) / "rounds" / "0001" / "log.json").read_text()
        (folder / "log.json").write_text(log)


def test_of_distances_a_rise_is_the_step_for_the_worse(tmp_path) -> None:
    arms = {arm: {"evaluation.round_metrics": ["dice", "asd"]} for arm in ("localized", "menu")}
    comparison = menu(tmp_path, measure={"metric": "asd"}, layout=dict(PLAIN), arms=arms)
    for arm, values in (("localized", [20.0, 10.0, 5.0]), ("menu", [5.0, 10.0, 20.0])):
        finish(comparison, arm, 0.5)
        validate(comparison, arm, values, 0)
        for file in (comparison.path(arm, 0) / "rounds").rglob("rows.json"):
            file.write_text(file.read_text().replace('"dice"', '"asd"'))
    told = collect(comparison)["curves"]
    assert told["localized"]["metric"] == "asd" and told["localized"]["fall"] == [0]
    assert told["menu"]["fall"] == told["menu"]["change"] == pytest.approx([7.5])


def test_a_swing_is_told_from_a_rise(tmp_path) -> None:
    comparison = menu(tmp_path, seeds=(0, 1), layout=dict(PLAIN))
    rise, swing = [0.1, None, 0.3, 0.4, 0.6], [0.2, 0.6, 0.2, 0.6, 0.2]
    for seed in (0, 1):
        for arm, values in (("localized", rise), ("menu", swing)):
            finish(comparison, arm, 0.5, seed=seed)
            validate(comparison, arm, values, seed)
    finish(comparison, "unet", 0.5)
    found = collect(comparison)
    told = found["curves"]
    assert list(told) == ["localized", "menu"] and told["localized"]["rounds"] == [[1, 3, 4, 5]] * 2
    assert told["localized"]["values"][0] == pytest.approx([0.1, 0.3, 0.4, 0.6])
    assert told["localized"]["change"] == pytest.approx([0.5 / 3] * 2) and told["localized"]["fall"] == [0, 0]
    assert told["menu"]["values"][1] == pytest.approx(swing), "a cell that the first arm lacks is not counted"
    assert told["menu"]["change"] == pytest.approx([0.4] * 2) and told["menu"]["fall"] == pytest.approx(
        [0.2] * 2
    )
    text = markdown(found)
    assert "| menu | 5 | 0.600 ± 0.000 | 0.200 ± 0.000 | 0.4000 ± 0.0000 | 0.2000 ± 0.0000 |" in text
    assert "| unet | – | – | – | – | – |" in text and "different numbers of rounds" in text
    figure = curve_figure(found)
    assert figure.count(">change 0.") == 2
    rise_of = told["localized"]["classes"]
    assert rise_of["liver"][0] == [
        [n, pytest.approx(v - 0.1)] for n, v in zip((1, 3, 4, 5), (0.1, 0.3, 0.4, 0.6), strict=True)
    ]
    by_class = class_figure(found)
    assert list(rise_of) == ["liver", "kidney"] and all(f">{name}<" in by_class for name in rise_of)
    assert curve_figure({**found, "curves": {}}) == class_figure({**found, "curves": {}}) == ""
    assert curves(comparison, dict.fromkeys(comparison.arms, ())) == {}


def test_findings_do_not_enter_the_curves_of_voxels(tmp_path) -> None:
    comparison = menu(tmp_path, layout=dict(PLAIN))
    for arm in ("localized", "menu"):
        finish(comparison, arm, 0.5)
        validate(comparison, arm, [0.5, 0.6])
    before = collect(comparison)["curves"]
    for file in (comparison.path("menu", 0) / "rounds").rglob("rows.json"):
        rows = json.loads(file.read_text())
        file.write_text(json.dumps([*rows, rows[0] | {"case": "", "class": "nodule", "value": 0.0}]))
    assert collect(comparison)["curves"] == before


def test_a_round_whose_validation_lost_a_site_is_no_swing(tmp_path) -> None:
    comparison = menu(tmp_path, layout=dict(PLAIN))
    for arm in ("localized", "menu"):
        finish(comparison, arm, 0.5)
        validate(comparison, arm, [0.6, 0.6, 0.9, 0.6])
    log = comparison.path("menu", 0) / "rounds" / "0003" / "log.json"
    log.write_text(json.dumps(json.loads(log.read_text()) | {"lacking": ["c1"]}))
    found = curves(comparison, {"localized": [0], "unet": [], "menu": [0]})
    assert found["localized"]["rounds"] == [[1, 2, 3, 4]] and found["localized"]["change"][0] > 0.1
    assert found["menu"]["rounds"] == [[1, 2, 4]] and found["menu"]["change"] == [0.0]


def test_an_arm_whose_every_validation_lost_a_site_hides_no_other(tmp_path) -> None:
    comparison = menu(tmp_path, layout=dict(PLAIN))
    for arm in ("localized", "menu"):
        finish(comparison, arm, 0.5)
        validate(comparison, arm, [0.5, 0.6])
    for log in (comparison.path("localized", 0) / "rounds").rglob("log.json"):
        log.write_text(json.dumps(json.loads(log.read_text()) | {"lacking": ["c1"]}))
    assert list(curves(comparison, {"localized": [0], "unet": [], "menu": [0]})) == ["menu"]


def test_what_counts_in_a_curve_is_what_the_first_arm_knows(tmp_path) -> None:
    """An arm that was given more labels, or fewer, is drawn on the same cells."""
    comparison = menu(tmp_path, layout=dict(PLAIN), measure={"known": False})
    for arm in ("localized", "menu"):
        finish(comparison, arm, 0.5)
        validate(comparison, arm, [0.2, 0.4])
        for file in (comparison.path(arm, 0) / "rounds").rglob("rows.json"):
            rows = json.loads(file.read_text())
            for row in rows:
                row["known"] = arm == "menu" or row["site"] != "c2"
            file.write_text(json.dumps(rows))
    told = curves(comparison, {"localized": [0], "menu": [0], "unet": []})
    assert told["localized"]["values"] == told["menu"]["values"] == [pytest.approx([0.3, 0.5])]


def test_a_table_of_known_classes_names_the_arm_that_knows_them_where_it_is_not_the_first(tmp_path) -> None:
    comparison = menu(tmp_path, layout=dict(PLAIN), measure={"known": True})
    assert "since localized" not in markdown(collect(comparison)), "where no arm is finished none decides"
    finish(comparison, "menu", 0.5)
    text = markdown(collect(comparison))
    assert "classes that the case's own site annotates (as in menu, since localized is not finished)" in text
    finish(comparison, "localized", 0.5)
    assert "since localized" not in markdown(collect(comparison))


def test_tables_with_and_without_post_processing_are_of_one_run(tmp_path) -> None:
    sites = [{"layout": dict(PLAIN), "postprocess": True, "title": "Post"}]
    given = {"seeds": (0, 1), "layout": dict(PLAIN), "tables": sites}
    arms = {"localized": {"method.name": "standalone"}, "menu": {"method.name": "fedprox"}}
    processed = {arm: {**of, "evaluation.postprocess": {}} for arm, of in arms.items()}
    comparison = menu(tmp_path, arms=processed, **given)
    for seed in (0, 1):
        finish(comparison, "localized", 0.5, 0.6 + 0.1 * seed, seed)
        finish(comparison, "menu", 0.7, 0.8, seed)
    found = collect(comparison)
    text = markdown(found)
    assert (
        line(text, "localized")[-1] == "0.500 ± 0.000"
        and "Post: dice, test cases, model best, after post" in text
    )
    assert line(text, "localized", 1)[-1] == f"0.650 ± {np.std([0.6, 0.7], ddof=1):.3f}"
    assert line(text, "menu", 1)[-1] == "**0.800 ± 0.000**"
    with pytest.raises(FederationError, match=r"arm localized has no evaluation\.postprocess"):
        menu(tmp_path, arms=arms, **given)


def test_a_metric_that_findings_share_is_of_voxels_where_it_is_evaluated(tmp_path) -> None:
    changes = {"evaluation.metrics": ["dice", "sensitivity"]}
    comparison = menu(tmp_path, arms={"menu": changes}, measure={"metric": "sensitivity"}, layout=dict(PLAIN))
    pretend(comparison, "menu", {"best": {cell: [0.5, 0.7] for cell in IN}}, metric="sensitivity")
    file = comparison.path("menu", 0) / "rows.csv"
    rows = read_rows(file)
    more = [*rows, {**rows[0], "case": "", "class": "pneumothorax", "value": 0.0}]
    write_atomic(file, rows_text(more).encode())
    found = collect(comparison)
    assert found["arms"]["menu"]["mean"] == [pytest.approx(0.6)] and "pneumothorax" not in found["classes"]
    told = {"metric": "auroc"}
    with pytest.raises(FederationError, match="auroc"):
        menu(tmp_path, arms={"menu": changes}, measure=told, layout=dict(PLAIN))


@pytest.mark.parametrize("kind", ["values", "normalised"])
def test_radar_plots_over_sites_and_classes(tmp_path, monkeypatch, kind) -> None:
    drawn = []
    monkeypatch.setattr("fedatlas.compare.radar.radar_plots", lambda *of: drawn.append(of) or "<svg/>")
    layout = {**PLAIN, "radar": kind, "percent": True}
    comparison = menu(tmp_path, layout=layout, tables=[{"sites": ["c1", "c5"], "layout": layout}])
    finish(comparison, "unet", 0.5)
    pretend(comparison, "menu", {"best": {cell: [0.8 if cell[:2] == "c5" else 0.6] for cell in (*IN, *OUT)}})
    found = collect(comparison)
    text = {side: radars(found, side) for side in ("sites", "classes")}
    ((sites,), name), ((classes, inner), _) = drawn
    assert name == "radar-sites" and len(inner.axes) == 5
    assert sites.title.startswith("Dice, %: dice in %, test cases")
    assert (sites.decimals, sites.lower, sites.normalised) == (1, False, kind == "normalised")
    assert sites.axes == ["c1", "c2", "c3", "c4", "c5", "btcv"] and list(sites.lines) == ["unet", "menu"]
    assert sites.lines["menu"] == pytest.approx([60, 60, 60, 60, 80, 60])
    assert classes.axes == list(ORGANS) and classes.lines["menu"][0] == pytest.approx((60 + 80 + 60) / 3)
    assert "there are 2 sites" in text["sites"] and "there are" not in text["classes"], (
        "two axes make no radar"
    )


def test_dots_are_means_over_seeds_with_the_tables_average(tmp_path, monkeypatch) -> None:
    drawn = []
    monkeypatch.setattr("fedatlas.compare.radar.dot_panels", lambda *of: drawn.append(of) or "<svg/>")
    comparison = menu(tmp_path, seeds=(0, 1), layout={**PLAIN, "average": "sites", "dots": True}, tables=[{}])
    for seed in (0, 1):
        cells = {cell: [(0.8 if cell[:2] == "c5" else 0.6) + 0.1 * seed] for cell in (*IN, *OUT)}
        pretend(comparison, "menu", {"best": cells}, seed)
    finish(comparison, "unet", 0.5)
    found = collect(comparison)
    for side in ("sites", "classes"):
        dots(found, side)
    ((sites,), name), ((classes,), _) = drawn
    assert name == "dots-sites" and sites.unit == "Dice" and list(sites.lines) == ["unet", "menu"]
    assert sites.axes == ["c1", "c2", "c3", "c4", "c5", "btcv", "mean"] and classes.axes == [*ORGANS, "mean"]
    sd = float(np.std([0.6, 0.7], ddof=1))
    assert sites.lines["menu"][0] == (pytest.approx(0.65), pytest.approx(sd))
    assert sites.lines["menu"][4][0] == pytest.approx(0.85)
    assert sites.lines["menu"][-1][0] == pytest.approx(found["arms"]["menu"]["mean"][0] + 0.05)
    assert sites.lines["unet"][0] == (pytest.approx(0.5), None), "one seed has no spread"
    assert classes.lines["menu"][0][0] == pytest.approx((0.6 + 0.8 + 0.6) / 3 + 0.05)


def test_the_radar_is_drawn(tmp_path) -> None:
    from fedatlas.report.figures.arms import Radar, radar_plots

    axes = ["kidney", "liver", "inferior vena cava and more"]
    lines = {"a": [1.0, 2.0, 3.0], "b": [4.0, 2.0, None]}
    panel = Radar("HD, mm: over classes", axes, lines, 1, lower=True, normalised=True)
    one = radar_plots([panel], "r")
    assert "4.0 – 1.0" in one and ">inferior vena cav…" in one and one == radar_plots([panel], "r")
    rings = re.findall(r">(-?[\d.]+)<", radar_plots([panel._replace(normalised=False)], "r"))
    assert [float(ring) for ring in rings] == sorted(map(float, rings), reverse=True), "the best is outside"
    page = html(collect(menu(tmp_path)), sections=[Section("radar", "Radar", "", one)])
    assert one in page


def test_no_radar_unless_asked(tmp_path) -> None:
    comparison = menu(tmp_path)
    finish(comparison, "unet", 0.5)
    found = collect(comparison)
    assert radars(found, "sites") == radars(found, "classes") == dots(found, "sites") == ""
    with pytest.raises(FederationError, match="radar"):
        menu(tmp_path, layout={"radar": "spider"})


def test_the_how_to_shows_post_processing_that_loads(tmp_path) -> None:
    page = (Path(__file__).parents[1] / "docs" / "how-to" / "compare.md").read_text()
    shown = yaml.safe_load(page.partition("Table 2 of UFPS")[2].partition("```yaml\n")[2].partition("```")[0])
    comparison = menu(tmp_path, arms={"ufps": {"evaluation.postprocess": {}}}, **shown)
    assert not comparison.measure.postprocess and comparison.tables[0].postprocess
    assert comparison.layout.radar == comparison.tables[0].layout.radar == "normalised"
