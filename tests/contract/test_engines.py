"""Every registered method gives the same bits on every engine: real servers and clients, on loopback.

One deployment per engine serves all methods; a line in the registry is enough to be tested here. Three methods
run by default, all of them with `-m slow`.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from deployments import Deployment

from fedatlas import methods
from fedatlas.audit import logs_of
from fedatlas.deploy import ENGINES
from fedatlas.evaluation.statistics import read_rows
from fedatlas.experiment import parse_federation
from fedatlas.session import run_federation

BY_DEFAULT = ("condistfl", "fedavg", "standalone")
METHODS = [
    name if name in BY_DEFAULT else pytest.param(name, marks=pytest.mark.slow)
    for name in sorted(methods.REGISTRY)
]


@pytest.fixture(scope="module", params=sorted(ENGINES))
def deployed(request, phantom, tmp_path_factory) -> Iterator[Callable[[dict[str, Any]], Deployment]]:
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


@pytest.mark.parametrize("name", METHODS)
def test_equal_bits_on_every_engine(name: str, deployed, small, tmp_path) -> None:
    small["method"] = {"name": name}
    small["evaluation"]["models"] = ["best", "last"]
    federation = parse_federation(small, base=Path())
    run_federation(federation, tmp_path / "local", tell=lambda text: None)
    deployment = deployed(small)
    first = tmp_path / f"{name}-{deployment.engine}"
    deployment.run(federation, first)
    for file in ("last.fa", "best.fa"):
        assert (first / "models" / file).read_bytes() == (tmp_path / "local" / "models" / file).read_bytes()
    values = [
        sorted(
            (r["site"], r["class"], r["split"], r["model"], r["value"]) for r in read_rows(path / "rows.csv")
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
