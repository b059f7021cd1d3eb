"""A finished run that is asked for other metrics is evaluated again and not trained."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from runs import phantom_federation

from fedatlas.compare.plan import Comparison, load_comparison
from fedatlas.compare.results import collect
from fedatlas.compare.running import run_comparison, state_of
from fedatlas.core.errors import RunFolderError
from fedatlas.evaluation.statistics import read_rows
from fedatlas.federation import record, session
from fedatlas.federation.file import parse_federation
from fedatlas.federation.session import run_federation
from fedatlas.federation.usable import record_of
from fedatlas.report.comparison import markdown
from fedatlas.transport.rounds import RunFolder, read_json
from fedatlas.transport.store import write_atomic

MORE: dict[str, Any] = {"metrics": ["dice", "nsd"], "postprocess": {"share": 0.9}}


def federation(plain: dict[str, Any], **evaluation: Any) -> Any:
    return parse_federation(plain | {"evaluation": plain["evaluation"] | evaluation}, base=Path())


@pytest.fixture(scope="module")
def trained(phantom: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """A federation with one round, and its finished run; read only."""
    folder = tmp_path_factory.mktemp("trained")
    plain = phantom_federation(phantom, folder / "cache") | {"rounds": 1}
    plain["sites"] = plain["sites"][:1]
    run_federation(federation(plain), folder / "run", tell=lambda text: None)
    return plain, folder / "run"


@pytest.fixture
def run(trained: tuple[dict[str, Any], Path], tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(trained[1], tmp_path / "run"))


def test_a_finished_run_whose_rounds_are_gone_is_not_trained_again(trained, run) -> None:
    plain, _ = trained
    shutil.rmtree(run / "rounds")
    before = (run / "rows.csv").read_bytes()
    with pytest.raises(
        RunFolderError, match=r"run.json says that the run is finished, and .* put the rounds back"
    ):
        run_federation(federation(plain), run, resume=True, tell=lambda text: None)
    assert (run / "rows.csv").read_bytes() == before and not list(run.glob("rounds/*"))


def test_it_has_the_values_of_a_run_with_these_options(trained, run, tmp_path, monkeypatch) -> None:
    plain, _ = trained
    run_federation(federation(plain, **MORE), tmp_path / "fresh", tell=lambda text: None)
    told: list[str] = []
    monkeypatch.setattr(RunFolder, "save", lambda *_: pytest.fail("a round was trained"))
    run_federation(federation(plain, **MORE), run, resume=True, tell=told.append)
    assert (run / "rows.csv").read_bytes() == (tmp_path / "fresh" / "rows.csv").read_bytes()
    assert (run / "federation.yaml").read_bytes() == (tmp_path / "fresh" / "federation.yaml").read_bytes()
    assert read_json(run / "run.json")["hash"] == read_json(tmp_path / "fresh" / "run.json")["hash"]
    assert read_json(run / "run.json")["finished"]
    record_of(run)  # its seal and its file agree
    assert "is evaluated again, not trained, as it differs in evaluation.metrics" in told[0]
    assert "evaluation.postprocess" in told[0]


def test_scores_of_other_options_do_not_stay_where_it_breaks_off(trained, run, monkeypatch) -> None:
    assert read_json(run / "run.json")["rows"] == len(read_rows(run / "rows.csv"))
    whole = (run / "rows.csv").read_bytes()
    asked = federation(trained[0], **MORE)
    with monkeypatch.context() as broken:
        broken.setattr(session, "_finish", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run_federation(asked, run, resume=True, tell=lambda text: None)
    assert not (run / "rows.csv").exists() and "rows" not in read_json(run / "run.json")
    run_federation(federation(trained[0]), run, resume=True, tell=lambda text: None)
    assert (run / "rows.csv").read_bytes() == whole


def test_one_that_broke_off_between_its_files_goes_on(trained, run, monkeypatch) -> None:
    asked = federation(trained[0], **MORE)
    monkeypatch.setattr(RunFolder, "save", lambda *_: pytest.fail("a round was trained"))

    def killed(path: Path, data: bytes) -> None:
        if path.name == "federation.yaml":
            raise KeyboardInterrupt
        write_atomic(path, data)

    monkeypatch.setattr(record, "write_atomic", killed)
    with pytest.raises(KeyboardInterrupt):
        run_federation(asked, run, resume=True, tell=lambda text: None)
    monkeypatch.setattr(record, "write_atomic", write_atomic)
    run_federation(asked, run, resume=True, tell=lambda text: None)
    assert ",nsd," in (run / "rows.csv").read_text()
    record_of(run)


@pytest.mark.parametrize(
    "change", [{"tolerance": 3.0}, {"validation": 0.5}, {"metrics": ["nsd"], "every": 3}]
)
def test_what_training_sees_may_not_change(trained, run, change) -> None:
    """The tolerance, since a validation between rounds may have it."""
    with pytest.raises(RunFolderError, match=f"evaluation.{list(change)[-1]}"):
        run_federation(federation(trained[0], **change), run, resume=True)


def test_an_option_that_did_not_exist_when_it_was_trained_has_its_default(trained, run, monkeypatch) -> None:
    file = run / "federation.yaml"
    plain = yaml.safe_load(file.read_text())
    del plain["evaluation"]["inference"]["merge"]
    file.write_text(yaml.safe_dump(plain, sort_keys=False))
    monkeypatch.setattr(RunFolder, "save", lambda *_: pytest.fail("a round was trained"))
    run_federation(federation(trained[0], **MORE), run, resume=True, tell=lambda text: None)
    assert ",nsd," in (run / "rows.csv").read_text() and "merge: surest" in file.read_text()
    assert read_json(run / "run.json")["finished"]


def test_a_run_without_its_state_is_left_alone(trained, run) -> None:
    """As one that was restored from a record."""
    (run / "rounds" / "0001" / "state.fa").unlink()
    before = (run / "run.json").read_bytes()
    with pytest.raises(RunFolderError, match="another configuration"):
        run_federation(federation(trained[0], **MORE), run, resume=True)
    assert (run / "run.json").read_bytes() == before


def test_without_resume_nothing_is_touched(trained, run) -> None:
    before = (run / "run.json").read_bytes()
    with pytest.raises(RunFolderError, match="go on with --resume"):
        run_federation(federation(trained[0], **MORE), run)
    assert (run / "run.json").read_bytes() == before


def test_a_comparison_evaluates_its_runs_again(trained, tmp_path, monkeypatch) -> None:
    plain, file = trained[0], tmp_path / "c.yaml"
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(plain))

    def loaded(**evaluation: Any) -> Comparison:
        arms = {"one": {f"evaluation.{key}": value for key, value in evaluation.items()}}
        file.write_text(yaml.safe_dump({"name": "c", "base": "base.yaml", "arms": arms}))
        return load_comparison([file], runs=tmp_path / "runs")

    assert run_comparison(loaded(), tell=lambda text: None) == {}
    assert state_of(loaded(), "one", 0) == "finished"
    asked = loaded(**MORE)
    assert state_of(asked, "one", 0) == "to evaluate"
    assert "one: not counted: " in (text := markdown(collect(asked))) and "evaluates it again" in text
    monkeypatch.setattr(RunFolder, "save", lambda *_: pytest.fail("a round was trained"))
    assert run_comparison(asked, tell=lambda text: None) == {}
    assert state_of(asked, "one", 0) == "finished"
    assert ",nsd," in (asked.path("one", 0) / "rows.csv").read_text()
