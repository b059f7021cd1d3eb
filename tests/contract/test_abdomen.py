"""Every method of segmentation on the tiny phantom abdomen: organs with lesions, sites that annotate one organ each, and a
site that is only tested."""

import math
from pathlib import Path
from typing import Any

import pytest
from method_cases import PAIRS, with_method

from fedatlas.evaluation.statistics import read_rows
from fedatlas.federation.file import parse_federation
from fedatlas.federation.session import run_federation
from fedatlas.phantoms.abdomen import CLASSES, GROUPS, abdomen_sites, write_abdomen

METHODS = [name for name, task in PAIRS if task == "segmentation"]


@pytest.fixture(scope="module")
def abdomen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_abdomen(tmp_path_factory.mktemp("abdomen"), cases=3, test_cases=1, size="tiny")


@pytest.mark.parametrize("name", METHODS)
def test_two_rounds_with_lesions_and_a_site_that_is_only_tested(
    name: str, abdomen: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    plain: dict[str, Any] = {
        "name": "abdomen",
        "labels": {"names": ["background", *CLASSES], "groups": [list(group) for group in GROUPS]},
        "sites": abdomen_sites(abdomen),
        "preprocessing": {"spacing": [10, 10, 10], "window": [-160, 240], "patch": [16, 16], "context": 1},
        "net": {"name": "unet", "filters": [4, 8, 8]},
        "local": {"optimizer": "sgd", "lr": 0.01, "batch": 4, "steps": 2},
        "rounds": 2,
        "evaluation": {
            "validation": 0.34,
            "every": 2,
            "metrics": ["dice"],
            "overlays": False,
            "models": ["best"],
            "inference": {"batch": 64},
        },
        "engine": {"cache": str(abdomen / ".cache")},
    }
    plain = with_method(plain, name)
    run_federation(parse_federation(plain, base=abdomen), tmp_path / "run", tell=lambda text: None)
    rows = [row for row in read_rows(tmp_path / "run" / "rows.csv") if row["split"] == "test"]
    assert {row["site"] for row in rows} == {site["name"] for site in abdomen_sites(abdomen)}
    unseen = [row for row in rows if row["site"] == "unseen"]
    assert not any(row["known"] for row in unseen)
    assert {row["class"] for row in unseen} == set(CLASSES)
    values = [row["value"] for row in rows if row["value"] is not None]
    assert values and all(math.isfinite(value) and 0 <= value <= 1 for value in values)
