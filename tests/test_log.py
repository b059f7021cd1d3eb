"""The key `log`: what is written of a run for TensorBoard and MLflow."""

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from runs import last_state

from fedatlas.core.contract import State
from fedatlas.core.errors import FederationError
from fedatlas.federation.file import hash_of, parse_federation
from fedatlas.federation.log import Log, numbers, writers
from fedatlas.transport.rounds import Round


def record(number: int, rows: Any = ()) -> Round:
    log = {
        "sites": {"a": {"loss": 0.5 / number, "bad": float("nan")}},
        "cost": {"a": {"seconds": 2.0, "peak_mb": 7.0}},
    }
    return Round(number, State({}), log, list(rows))


def row(site: str, class_: str, value: float | None) -> dict[str, Any]:
    return {"site": site, "case": "case_7", "class": class_, "metric": "dice", "value": value}


def test_scores_are_means_and_no_case_is_named() -> None:
    got = numbers(record(1, [row("a", "liver", 0.5), row("b", "liver", 1.0), row("b", "spleen", None)]))
    assert got == {
        "loss/a": 0.5,
        "seconds/a": 2.0,
        "peak_mb/a": 7.0,
        "validation dice by class/liver": 0.75,
        "validation dice by site/a": 0.5,
        "validation dice by site/b": 1.0,
    }


def test_it_is_of_one_machine(small) -> None:
    plain = parse_federation(small, base=Path())
    logged = parse_federation(small | {"log": {"tensorboard": "tb"}}, base=Path("/there"))
    assert hash_of(plain) == hash_of(logged) and logged.log.tensorboard == "/there/tb"


def test_tensorboard_of_a_resumed_run(small, tmp_path) -> None:
    """By its own reader; the round that was done twice counts once."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    federation = parse_federation(small | {"log": {"tensorboard": "tb"}, "rounds": 3}, base=tmp_path)
    states = [last_state(federation, tmp_path / "run") for _ in range(2)]
    plain = parse_federation(small | {"rounds": 3}, base=tmp_path)
    assert states[0] == states[1] == last_state(plain, tmp_path / "plain"), "bits are what they are without"
    with writers(federation.log, "x", tmp_path / "run", print) as write:
        for number in (2, 2):
            write(record(number))
    read = EventAccumulator(str(tmp_path / "tb" / "run")).Reload()
    names = read.Tags()["scalars"]
    assert {"loss/s0", "seconds/s0", "loss/a"} <= set(names) and any(
        n.startswith("validation dice by class/") for n in names
    )
    assert [event.step for event in read.Scalars("loss/s0")] == [1], "purged from round 2 on"


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A stand-in with the functions that are used; what they were given."""
    seen: list[Any] = []
    fake = ModuleType("mlflow")

    def start_run(**how: Any) -> Any:
        seen.append(("start_run", how))
        return SimpleNamespace(info=SimpleNamespace(run_id="r1"))

    for name in ("set_tracking_uri", "set_experiment", "end_run"):
        setattr(fake, name, lambda value, name=name: seen.append((name, value)))
    fake.start_run = start_run  # type: ignore[attr-defined]
    fake.log_metrics = lambda values, step: seen.append(("log_metrics", step, values))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    return seen


def test_mlflow_goes_on_with_its_run(mlflow: list[Any], tmp_path: Path) -> None:
    log = Log(mlflow="http://127.0.0.1:5000")  # type: ignore[call-arg]
    with pytest.raises(KeyboardInterrupt), writers(log, "trial", tmp_path, print) as write:
        write(record(1, [row("a", "liver (left)", 0.5)]))
        raise KeyboardInterrupt
    assert [entry[0] for entry in mlflow] == [
        "set_tracking_uri",
        "set_experiment",
        "start_run",
        "log_metrics",
        "end_run",
    ]
    assert mlflow[2][1] == {"run_name": tmp_path.name} and mlflow[-1] == ("end_run", "KILLED")
    assert mlflow[3][1] == 1 and mlflow[3][2]["validation dice by class/liver _left_"] == 0.5
    with writers(log, "trial", tmp_path, print):
        pass
    assert mlflow[-2] == ("start_run", {"run_id": "r1"}) and mlflow[-1] == ("end_run", "FINISHED")
    assert json.loads((tmp_path / "mlflow.json").read_text())["run"] == "r1"


def test_a_writer_that_fails_stops_nothing(mlflow: list[Any], tmp_path: Path) -> None:
    def gone(values: Any, step: int) -> None:
        raise ConnectionError("no route to host")

    sys.modules["mlflow"].log_metrics = gone  # type: ignore[attr-defined]
    told: list[str] = []
    with writers(Log(mlflow="x"), "trial", tmp_path, told.append) as write:  # type: ignore[call-arg]
        write(record(1))
        write(record(2))
    assert told == ["log.mlflow: cannot be written any more (no route to host); the run goes on without it"]


@pytest.mark.parametrize(
    ("module", "log", "said"),
    [
        ("mlflow", {"mlflow": "x"}, "pip install mlflow"),
        ("torch.utils.tensorboard", {"tensorboard": "x"}, r"pip install 'fedatlas\[log\]'"),
    ],
)
def test_a_package_that_is_missing_is_told_before_anything_trains(
    small, tmp_path: Path, monkeypatch, module: str, log: dict[str, str], said: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(FederationError, match=said):
        last_state(parse_federation(small | {"log": log}, base=tmp_path), tmp_path / "run")
    assert not (tmp_path / "run" / "rounds").exists()


def test_places_that_cannot_be_used(mlflow: list[Any], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(FederationError, match="cannot be made"),
        writers(Log(tensorboard=str(tmp_path / "file")), "x", tmp_path, print),
    ):  # type: ignore[call-arg]
        pass

    def refused(**how: Any) -> None:
        raise ConnectionError("refused")

    sys.modules["mlflow"].start_run = refused  # type: ignore[attr-defined]
    with (
        pytest.raises(FederationError, match="log.mlflow: x: cannot be used .refused.; is the server up"),
        writers(Log(mlflow="x"), "x", tmp_path, print),
    ):  # type: ignore[call-arg]
        pass
