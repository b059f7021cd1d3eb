"""Shared by all tests: the phantom federation, and one thread."""

import contextlib
import copy
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# of the processes that tests start, too; read when torch is imported
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from findings import findings_federation, write_findings

from fedatlas.phantoms.organs import phantom_sites, write_phantom
from fedatlas.transport import local

torch.set_num_threads(1)


ENGINES = {"test_deployed.py", "test_engines.py", "test_flower.py", "test_nvflare.py"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that start engines come first: they wait much, so that one process of xdist is at them while the other
    does the rest, and what is left at the end is short and goes to whoever is idle."""
    items.sort(key=lambda item: item.path.name not in ENGINES)


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
        "evaluation": {
            "validation": 0.25,
            "metrics": ["dice"],
            "overlays": False,
            "models": ["best", "last"],
            "inference": {"batch": 64},
        },
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


@pytest.fixture(scope="session")
def idle_workers() -> Iterator[list[local.Worker]]:
    workers: list[local.Worker] = []
    yield workers
    for worker in workers:
        worker.end()


@pytest.fixture
def shared_workers(idle_workers: list[local.Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs with `engine.workers` use the same worker processes, which are started for the first of them."""
    monkeypatch.setattr(local, "_kept", idle_workers)


@pytest.fixture(scope="session", autouse=True)
def workers_that_are_measured() -> Iterator[None]:
    """With `make coverage` a worker may write what it ran before it is ended; otherwise it is ended at once."""
    end = local.Worker.end

    def later(worker: local.Worker) -> None:
        assert worker.process.stdin
        with contextlib.suppress(BrokenPipeError, subprocess.TimeoutExpired):
            worker.process.stdin.close()  # a worker that has no more to read leaves its loop
            worker.process.wait(timeout=10)
        end(worker)

    with pytest.MonkeyPatch.context() as patch:
        if "COVERAGE_PROCESS_CONFIG" in os.environ:
            patch.setattr(local.Worker, "end", later)
        yield
