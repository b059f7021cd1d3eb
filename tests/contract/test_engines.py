"""Every registered method gives the same bits on every engine: real servers and clients, on loopback.

One deployment per engine serves all methods and tasks; a line in the registry is enough to be tested here. Four
methods run by default, all of them with `-m slow`.
"""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from deployments import Deployment
from method_cases import PAIRS, with_method

from fedatlas.evaluation.statistics import read_rows
from fedatlas.federation.audit import logs_of
from fedatlas.federation.deploy import ENGINES
from fedatlas.federation.file import parse_federation
from fedatlas.federation.session import run_federation

BY_DEFAULT = (
    ("condistfl", "segmentation"),
    ("fedavg", "segmentation"),
    ("fedpsl", "classification"),
    ("standalone", "segmentation"),
)
CASES = [pair if pair in BY_DEFAULT else pytest.param(*pair, marks=pytest.mark.slow) for pair in PAIRS]


@pytest.fixture(scope="module")
def folders(phantom: Path, findings: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of sites that hold scans with label maps, and images with findings: one deployment serves both."""
    both = shutil.copytree(phantom, tmp_path_factory.mktemp("both") / "data")
    for root in findings.glob("site-*"):
        shutil.copytree(root, both / root.name, dirs_exist_ok=True)
    return both


@pytest.fixture
def federation(request: pytest.FixtureRequest, folders: Path) -> dict[str, Any]:
    """A small federation of the test's method and task, with two rounds."""
    name, task = request.node.callspec.params["name"], request.node.callspec.params["task"]
    chosen = request.getfixturevalue("small" if task == "segmentation" else "small_images")
    for site in chosen["sites"]:
        site["path"] = str(folders / Path(site["path"]).name)
    return with_method(chosen, name)


@pytest.fixture(scope="module", params=sorted(ENGINES))
def deployed(request, tmp_path_factory) -> Iterator[Callable[[dict[str, Any]], Deployment]]:
    """A deployment that is started at its first use and takes the federation that it is given."""
    pytest.importorskip({"nvflare": "nvflare", "flower": "flwr"}[request.param])
    started: list[Deployment] = []

    def give(small: dict[str, Any]) -> Deployment:
        if not started:
            started.append(Deployment(request.param, small, tmp_path_factory.mktemp(request.param)))
        started[0].accept(small)
        return started[0]

    yield give
    for deployment in started:
        deployment.close()


@pytest.mark.parametrize(("name", "task"), CASES)
def test_equal_bits_on_every_engine(name: str, task: str, deployed, federation, tmp_path) -> None:
    small = federation
    small["evaluation"]["models"] = ["best", "last"]
    parsed = parse_federation(small, base=Path())
    run_federation(parsed, tmp_path / "local", tell=lambda text: None)
    deployment = deployed(small)
    first = tmp_path / f"{name}-{task}-{deployment.engine}"
    deployment.run(parsed, first)
    for file in ("last.fa", "best.fa"):
        assert (first / "models" / file).read_bytes() == (tmp_path / "local" / "models" / file).read_bytes()
    values = [
        sorted(
            (r["site"], r["class"], r["split"], r["model"], r["metric"], str(r["value"]))
            for r in read_rows(path / "rows.csv")
        )
        for path in (first, tmp_path / "local")
    ]
    assert values[0] == values[1] and values[0]
    for site in deployment.sites:
        lines = logs_of(deployment.out / site)[site]
        mine = [line for line in lines if line["run"].startswith(first.name)]
        assert not any(line["broken"] for line in lines)
        assert {"hello", "join", "evaluate"} <= {line["function"] for line in mine}
        assert mine[-1]["method"] == name
