"""Shared by all tests: the phantom federation, and one thread."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from findings import findings_federation, write_findings

from fedatlas.data.phantom import phantom_sites, write_phantom

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def phantom(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the phantom's sites; read only."""
    return write_phantom(tmp_path_factory.mktemp("phantom"), sites=3, cases=4, test_cases=1, seed=1)


@pytest.fixture(scope="session")
def phantom_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def small(phantom: Path, phantom_cache: Path) -> dict[str, Any]:
    """A federation on the phantom that trains in a second or two; plain values, to be changed by a test."""
    federation = {
        "name": "phantom",
        "sites": phantom_sites(phantom),
        "preprocessing": {"spacing": [4, 4, 4], "window": [-100, 200], "patch": [16, 16], "context": 1},
        "net": {"name": "unet", "filters": [4, 8, 8]},
        "method": {"name": "fedavg"},
        "local": {"optimizer": "adamw", "lr": 0.01, "batch": 4, "steps": 3},
        "rounds": 2,
        "seed": 3,
        "evaluation": {"validation": 0.25, "metrics": ["dice"], "overlays": False},
        "engine": {"cache": str(phantom_cache)},
    }
    return copy.deepcopy(federation)


@pytest.fixture(scope="session")
def findings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with sites whose labels are of whole images; read only."""
    return write_findings(tmp_path_factory.mktemp("findings"))


@pytest.fixture
def small_images(findings: Path, phantom_cache: Path) -> dict[str, Any]:
    """As `small`, with labels of whole images."""
    return copy.deepcopy(findings_federation(findings, phantom_cache / "findings"))
