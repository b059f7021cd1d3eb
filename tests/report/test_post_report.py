"""What a report shows of an evaluation that scored twice."""

import re

from synthetic_run import write_run

from fedatlas.evaluation.statistics import POST
from fedatlas.report import page, read, tables


def test_post_processed_models_stand_apart(tmp_path) -> None:
    given = {
        "classes": ("liver", "spleen"),
        "sites": ("alpha", "beta"),
        "rounds": 2,
        "cases": 2,
        "overlays": False,
    }
    run = read.read(write_run(tmp_path / "run", models=("best", "last", f"{POST}best"), **given))
    rows, _ = tables.scored(run)
    assert {row["model"] for row in rows} == {"best", "last", *run.locals}
    assert {row["model"] for row in tables.processed(run)} == {"best"}
    text = page.section(run, "results")
    summaries = re.findall(r"<summary>([^<]*), after post-processing</summary>", text)
    assert summaries[:2] == ["Dice", "HD95, mm"] and POST not in text
    assert len(set(ids := re.findall(r' id="([^"]+)"', text))) == len(ids)
