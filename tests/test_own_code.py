"""Code of one's own: a method of another package that changes between runs, that fails at the server, or has something to say."""

import json
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedatlas import methods
from fedatlas.compare import load_comparison, run_comparison
from fedatlas.core.errors import FedAtlasError
from fedatlas.core.extensions import Extensions
from fedatlas.federation.file import parse_federation
from fedatlas.federation.record import git_revision
from fedatlas.federation.session import run_federation

MODULE = """
from dataclasses import replace

from fedatlas.core.options import options
from fedatlas.methods.fedavg import FedAvg


@options
class Mine(FedAvg):
    def round(self, state, clients):
        {body}
        return super().round(state, clients)

    def examine(self, net, sites):
        return ["mine is told of " + ", ".join(sites)]
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes the method `mine` into a module of an installed package: called with the code in its `round`."""
    folder = tmp_path / "package"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    entry = EntryPoint("mine", "module_of_mine:Mine", "fedatlas.methods")
    monkeypatch.setattr(methods.OTHERS, "installed", {"mine": entry})
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write(body: str) -> None:
        sys.modules.pop("module_of_mine", None)
        (folder / "module_of_mine.py").write_text(MODULE.format(body=body))

    yield write
    sys.modules.pop("module_of_mine", None)


def federation(small: dict[str, Any], tmp_path: Path, **changes: Any) -> Any:
    return parse_federation(small | {"method": {"name": "mine"}, "rounds": 3} | changes, base=tmp_path)


class Stopped(Exception):
    """Raised by a test after a round."""


def stop(record: Any, best: Any) -> None:
    if record.number == 1:
        raise Stopped


def test_a_run_that_goes_on_with_other_code_says_so(small, tmp_path, mine) -> None:
    mine("pass")
    told: list[str] = []
    with pytest.raises(Stopped):
        run_federation(federation(small, tmp_path), tmp_path / "run", tell=told.append, after_round=stop)
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    assert list(about["code"]) == ["method mine"] and len(about["code"]["method mine"]) == 64
    assert any(text.startswith("note: mine is told of ") for text in told), "what a method has to say"
    mine("pass  # otherwise")
    told.clear()
    run_federation(federation(small, tmp_path), tmp_path / "run", resume=True, tell=told.append)
    assert sum("goes on with other code of method mine" in text for text in told) == 1
    assert not any("is told of" in text for text in told), "that was said when the run began"
    after = json.loads((tmp_path / "run" / "run.json").read_text())
    assert after["code"] != about["code"]
    assert after["code_changed"] == [{"after_round": 1, "of": ["method mine"]}]
    assert (tmp_path / "run" / "rounds" / "0003").is_dir()


def test_code_that_did_not_change_and_that_of_the_package_are_not_told(small, tmp_path, mine) -> None:
    mine("pass")
    told: list[str] = []
    with pytest.raises(Stopped):
        run_federation(federation(small, tmp_path), tmp_path / "run", after_round=stop)
    mine("pass")
    run_federation(federation(small, tmp_path), tmp_path / "run", resume=True, tell=told.append)
    assert not any("other code" in text for text in told)
    run_federation(federation(small, tmp_path, method={"name": "fedavg"}, rounds=1), tmp_path / "theirs")
    assert "code" not in json.loads((tmp_path / "theirs" / "run.json").read_text())


def test_a_comparison_names_the_runs_of_other_code(small, tmp_path, mine) -> None:
    mine("pass")
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(small | {"rounds": 1}))
    plain = {
        "name": "own",
        "base": "base.yaml",
        "arms": {"mine": {"method": {"name": "mine"}}, "fedavg": {"method": {"name": "fedavg"}}},
        "measure": {"metric": "dice", "split": "validation"},
    }
    file = tmp_path / "own.yaml"
    file.write_text(yaml.safe_dump(plain))
    comparison = load_comparison([file], runs=tmp_path / "runs")
    assert not run_comparison(comparison)
    mine("state = state")
    told: list[str] = []
    assert not run_comparison(comparison, tell=told.append)
    notes = [text for text in told if "other code" in text]
    assert len(notes) == 1 and "mine-s" in notes[0] and "method mine" in notes[0] and "remove " in notes[0]


def test_what_a_method_keeps_on_itself_is_told_where_to_keep(small, tmp_path, mine) -> None:
    mine("self.kept = 1")
    with pytest.raises(FedAtlasError, match=r"Mine.round, round 1: .*'kept'.* is a field of its State"):
        run_federation(federation(small, tmp_path), tmp_path / "run")


def test_an_error_at_the_server_names_method_and_round(small, tmp_path, mine) -> None:
    mine("state.no_such_thing")
    with pytest.raises(AttributeError) as error:
        run_federation(federation(small, tmp_path), tmp_path / "run")
    assert error.value.__notes__ == ["in Mine.round, round 1"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return {'model': state.model}", r"Mine.round, round 1: returned a dict, expected a State"),
        (
            "return replace(state, model={k: v / 0 for k, v in state.model.items()}, round=1)",
            r"Mine.round, round 1: the model holds values that are NaN or infinite, in .* the round is not kept",
        ),
    ],
)
def test_what_is_no_state_or_no_model_is_not_kept(small, tmp_path, mine, body, said) -> None:
    mine(body)
    with pytest.raises(FedAtlasError, match=said):
        run_federation(federation(small, tmp_path), tmp_path / "run")
    assert [folder.name for folder in (tmp_path / "run" / "rounds").iterdir()] == ["0000"]


def test_a_class_of_no_file_has_no_code() -> None:
    others = Extensions("method", "fedatlas.methods")
    others.here["made"] = type("Made", (), {"__module__": "nowhere"})
    assert others.code_of("made") is None and others.code_of("unknown") is None


def test_a_changed_file_of_any_part_of_the_package_marks_the_revision(tmp_path) -> None:
    package = tmp_path / "package"
    for part in ("federation", "methods"):
        (package / part).mkdir(parents=True)
        (package / part / "code.py").write_text("")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "all"]):
        subprocess.run([*git, *command], check=True, capture_output=True)
    clean = git_revision(package)
    assert clean is not None and len(clean) == 40
    (package / "methods" / "code.py").write_text("changed = True")
    assert git_revision(package) == f"{clean}+"
    assert git_revision(tmp_path.parent / "nowhere") is None
