"""A site that is only tested on: it is scored, and nothing that is sent for training knows of it."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from fedatlas.evaluation.statistics import read_rows
from fedatlas.federation.file import parse_federation
from fedatlas.federation.session import run_federation
from fedatlas.phantoms.organs import write_phantom
from fedatlas.transport.egress import read_log

LABELS = {
    "names": ["background", "liver", "spleen", "kidney", "tumour"],
    "groups": [["kidney", "tumour"]],
}


def run(federation: dict[str, Any], path: Path) -> Path:
    run_federation(parse_federation(federation, base=path.parent), path, tell=lambda text: None)
    return path


def sent(folder: Path, sites: list[str]) -> list[Any]:
    """What sites sent: the models of the last round bit by bit, and what was in every answer of training."""
    logs = [entry for site in sites for entry in read_log(folder / "sites" / site / "egress.jsonl")]
    told = [(entry["function"], entry["contents"]) for entry in logs if entry["function"] != "evaluate"]
    models = sorted((folder / "rounds" / "0002" / "local").glob("*.fa"))
    return [told, [(model.name, model.read_bytes()) for model in models]]


@pytest.mark.parametrize("method", ["condistfl", "centralized"])
def test_a_tested_site_changes_no_bit_of_training(small: dict[str, Any], tmp_path: Path, method: str) -> None:
    small |= {"labels": LABELS, "method": {"name": method}}
    small["evaluation"]["models"] = ["last"]
    without = run(copy.deepcopy(small), tmp_path / "without")
    # the held-out site draws organs whole, under names of its own, and one organ that the space does not know
    outside = write_phantom(tmp_path / "outside", sites=3, cases=4, test_cases=1, seed=9) / "site-0"
    table = json.loads((outside / "dataset.json").read_text())
    renamed = {"background": 0, "Leber": 1, "something else": 2}
    (outside / "dataset.json").write_text(json.dumps(table | {"labels": renamed}))
    tested = {
        "name": "a-tested",
        "path": str(outside),
        "role": "test",
        "whole": True,
        "aliases": {"Leber": "liver"},
    }
    within = run(small | {"sites": [tested, *small["sites"]]}, tmp_path / "within")
    for number in (1, 2):
        name = f"rounds/{number:04d}"
        rows = [json.loads((folder / name / "rows.json").read_text()) for folder in (without, within)]
        assert rows[0] == rows[1], "validation knows nothing of it"
        cost = json.loads((without / name / "log.json").read_text())["cost"]
        validated = {row["site"] for row in rows[0]}
        assert {site for site, spent in cost.items() if spent.get("evaluate_bytes_up")} == validated != set()
    states = [(folder / "models" / "last.fa").read_bytes() for folder in (without, within)]
    assert states[0] == states[1]
    training = ["pooled"] if method == "centralized" else [site["name"] for site in small["sites"]]
    one, other = sent(without, training), sent(within, training)
    assert (
        one == other
        and one[0]
        and [name for name, _ in one[1]] == [f"{name}.fa" for name in sorted(training)]
    )
    asked = read_log(within / "sites" / "a-tested" / "egress.jsonl")
    assert asked and {entry["function"] for entry in asked} <= {"evaluate", "evaluate_several"}
    rows = read_rows(within / "rows.csv")
    mine = [row for row in rows if row["site"] == "a-tested"]
    assert {row["split"] for row in mine} == {"test"} and len({row["case"] for row in mine}) == 5
    assert {row["class"] for row in mine} == {"liver"} and not any(row["known"] for row in mine)
    summary = json.loads((within / "run.json").read_text())["sites"]["a-tested"]
    assert summary["role"] == "test" and summary["annotated"] == []
