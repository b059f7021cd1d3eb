"""Shared by all tests: the phantom federation, and one thread."""

import contextlib
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
from runs import phantom_federation

from fedatlas.phantoms.organs import write_phantom
from fedatlas.transport import local
from fedatlas.transport.store import DoneWork

torch.set_num_threads(1)


FIRST = {"test_deployed.py", "test_flower.py", "test_nvflare.py"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that start engines come first: they wait much, so that one process of xdist is at them while the other
    does the rest, and what is left at the end is short and goes to whoever is idle."""
    items.sort(key=lambda item: item.path.name not in FIRST)


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
    return phantom_federation(phantom, phantom_cache)


@pytest.fixture(scope="session")
def findings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with sites whose labels are of whole images; read only."""
    return write_findings(tmp_path_factory.mktemp("findings"))


@pytest.fixture
def small_images(findings: Path, phantom_cache: Path) -> dict[str, Any]:
    """As `small`, with labels of whole images."""
    return findings_federation(findings, phantom_cache / "findings")


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
def unsynced() -> Iterator[None]:
    """No file of a test need outlive a crash of the machine: a run waits for the disk some eighty times, a fifth of its time.
    Tests of full disks put their own function there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def nothing_taken_from_other_runs() -> Iterator[None]:
    """Runs of tests share a cache; a test that compares two of them would else read the work of the first in the second.
    Tests of just that put `runs.FIND` there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DoneWork, "find", lambda self, file: None)
        yield


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
