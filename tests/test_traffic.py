"""The traffic of tables 6 and 7: the formula's numbers, and the formula against the wire."""

from pathlib import Path
from typing import Any

import pytest

from fedatlas.compare.costs import formula_gigabytes
from fedatlas.compare.plan import Comparison, Measure
from fedatlas.compare.results import collect
from fedatlas.compare.running import run_comparison
from fedatlas.federation.file import parse_federation


@pytest.mark.parametrize(
    ("rounds", "megabytes", "printed"), [(120, 40.6, 38.06), (30, 336.3, 78.82), (1000, 60.4, 471.9)]
)
def test_the_formula_gives_the_papers_numbers(rounds: int, megabytes: float, printed: float) -> None:
    assert formula_gigabytes(rounds, 4, megabytes) == pytest.approx(printed, abs=0.03)


def test_formula_and_wire_agree(small: dict[str, Any], tmp_path: Path) -> None:
    small |= {"net": {"name": "unet", "filters": [16, 32, 64]}, "rounds": 2}
    small["local"] |= {"steps": 1, "batch": 1}
    small["evaluation"] |= {"every": 2, "models": ["last"]}
    arms = {
        "fedavg": small,
        "half": small | {"comm": {"up": "bf16"}},
        "pooled": small | {"method": {"name": "centralized"}},
    }
    federations = {arm: {3: parse_federation(raw, base=tmp_path, source=arm)} for arm, raw in arms.items()}
    comparison = Comparison("traffic", None, federations, Measure(model="last"), {}, folder=tmp_path)
    assert run_comparison(comparison, tell=lambda text: None) == {}
    costs = collect(comparison)["costs"]
    whole, half = costs["fedavg"], costs["half"]
    assert (whole["rounds"], whole["sites"]) == (2, 3)
    assert whole["megabytes"] > 0.4, "a small net does not outweigh the rest of a message"
    assert whole["wire"] == pytest.approx(whole["formula"], rel=0.01)
    assert whole["wire"] > whole["formula"], "a message holds more than the model"
    assert half["formula"] == whole["formula"], "the formula knows no compression"
    assert half["wire"] == pytest.approx(0.75 * half["formula"], rel=0.01)
    assert costs["pooled"]["formula"] is None and costs["pooled"]["wire"] is None
    assert whole["step_relative"] == whole["site_relative"] == 1
    assert 0 < whole["step_hours"] <= whole["site_hours"]
    assert whole["server_seconds"] is not None and 0 <= whole["server_seconds"] < 60
