"""Records of finished runs: what the tables need of them, without models, images or paths."""

import io
import json
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from findings import findings_federation, write_findings
from runs import last_state, phantom_federation

from fedatlas.cli import main
from fedatlas.compare import (
    collect,
    keep_record,
    keep_records,
    load_comparison,
    markdown,
    records,
    restore_runs,
    run_comparison,
    state_of,
)
from fedatlas.core.errors import RunFolderError
from fedatlas.federation import record
from fedatlas.federation.design import arithmetic
from fedatlas.federation.file import parse_federation
from fedatlas.federation.session import run_federation
from fedatlas.transport.rounds import read_json


@pytest.fixture(scope="module")
def trained(phantom: Path, phantom_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison of two arms that is trained; read only."""
    folder = tmp_path_factory.mktemp("records")
    federation = phantom_federation(phantom, phantom_cache) | {"rounds": 1}
    (folder / "base.yaml").write_text(yaml.safe_dump(federation))
    file = {"name": "both", "base": "base.yaml", "arms": {"fedavg": {}, "prox": {"method.name": "fedprox"}}}
    (folder / "both.yaml").write_text(yaml.safe_dump(file))
    assert (
        run_comparison(load_comparison([folder / "both.yaml"], runs=folder / "runs"), tell=lambda text: None)
        == {}
    )
    return folder


def test_tables_from_records_are_those_of_the_runs(trained: Path, tmp_path: Path) -> None:
    there = load_comparison([trained / "both.yaml"], runs=trained / "runs")
    assert keep_records(there, tmp_path / "records") == ["fedavg-s0", "prox-s0"]
    assert keep_records(there, tmp_path / "records") == []
    here = load_comparison([trained / "both.yaml"], runs=tmp_path / "runs")
    assert collect(here)["arms"]["fedavg"]["seeds"] == []
    assert restore_runs(here, tmp_path / "records") == ["fedavg-s0", "prox-s0"]
    assert collect(here) == collect(there)
    assert markdown(collect(here)) == markdown(collect(there))
    assert state_of(here, "prox", 0) == "finished"
    assert not list((tmp_path / "runs").rglob("*.fa"))


def test_an_analysis_made_later_is_put_into_the_record(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path / "mine")
    there = load_comparison([tmp_path / "mine" / "both.yaml"], runs=tmp_path / "mine" / "runs")
    folder = tmp_path / "records"
    keep_records(there, folder)
    for told in ({"one": 1}, {"one": 2}):
        kept = there.path("prox", 0) / "analysis" / "hessian.json"
        kept.parent.mkdir(exist_ok=True)
        kept.write_text(json.dumps(told))
        assert keep_records(there, folder) == ["prox-s0"] and keep_records(there, folder) == []
    here = load_comparison([trained / "both.yaml"], runs=tmp_path / "runs")
    restore_runs(here, folder)
    assert read_json(here.path("prox", 0) / "analysis" / "hessian.json") == {"one": 2}
    assert not (here.path("fedavg", 0) / "analysis").exists()
    assert keep_records(here, folder) == [], "a restored run without it leaves the record's"


def test_a_record_is_small_the_same_each_time_and_names_no_path(trained: Path, tmp_path: Path) -> None:
    there = load_comparison([trained / "both.yaml"], runs=trained / "runs")
    for folder in ("one", "other"):
        keep_records(there, tmp_path / folder)
    one = tmp_path / "one" / "both" / "fedavg-s0.tar.xz"
    assert one.read_bytes() == (tmp_path / "other" / "both" / "fedavg-s0.tar.xz").read_bytes()
    run = sum(file.stat().st_size for file in there.path("fedavg", 0).rglob("*") if file.is_file())
    assert one.stat().st_size < run / 10
    with tarfile.open(one) as archive:
        for entry in archive:
            reader = archive.extractfile(entry)
            assert reader is not None
            text = reader.read().decode()
            assert str(trained) not in text and str(there.first.sites[0].path) not in text, entry.name
            if entry.name == "run.json":
                machine = json.loads(text)["machine"]
                assert "platform" not in machine
                assert machine["arithmetic"].startswith(torch.backends.cpu.get_cpu_capability())
    # a record made from a restored run is that of the run
    here = load_comparison([trained / "both.yaml"], runs=tmp_path / "runs")
    restore_runs(here, tmp_path / "one")
    keep_records(here, tmp_path / "third")
    assert (tmp_path / "third" / "both" / "fedavg-s0.tar.xz").read_bytes() == one.read_bytes()


def test_the_command_keeps_and_takes_records(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["compare", str(trained / "both.yaml"), "--records", str(tmp_path / "records")]
    assert main([*command, "--runs", str(trained / "runs"), "--only-table"]) == 0
    first = capsys.readouterr().out
    assert f"{tmp_path / 'records' / 'both'}: no records yet" in first
    # nothing is left to train, though the folder of runs is empty
    assert main([*command, "--runs", str(tmp_path / "runs")]) == 0
    second = capsys.readouterr().out
    assert "2 finished runs taken from" in second and "2 finished, 0 to do" in second
    assert main([*command[:-1], str(trained / "both.yaml")]) == 1
    assert "records are kept in a folder, and this is a file" in capsys.readouterr().err
    table = first[first.index("yet\n") + 4 : first.index("page:")]
    assert table.strip() in second


def test_another_configuration_is_not_taken_and_replaced_when_it_is_run(
    trained: Path, tmp_path: Path
) -> None:
    there = load_comparison([trained / "both.yaml"], runs=trained / "runs")
    keep_records(there, tmp_path / "records")
    file = yaml.safe_load((trained / "both.yaml").read_text())
    file["arms"]["prox"] = {"method": {"name": "fedprox", "mu": 0.5}}
    file["base"] = str(trained / "base.yaml")
    (tmp_path / "both.yaml").write_text(yaml.safe_dump(file))
    changed = load_comparison([tmp_path / "both.yaml"], runs=tmp_path / "runs")
    told: list[str] = []
    assert restore_runs(changed, tmp_path / "records", told.append) == ["fedavg-s0"]
    assert any("prox-s0.tar.xz: a record of another configuration" in line for line in told)
    assert state_of(changed, "prox", 0) == "absent"
    assert run_comparison(changed, arms=["prox"], tell=lambda text: None) == {}
    assert keep_records(changed, tmp_path / "records") == ["prox-s0"]
    shutil.rmtree(tmp_path / "runs")
    assert restore_runs(changed, tmp_path / "records") == ["fedavg-s0", "prox-s0"]


@pytest.mark.parametrize(("changed", "restored"), [("older", True), ("other", False), ("unknown", False)])
def test_a_record_of_before_an_option_existed_is_taken(
    trained: Path, tmp_path: Path, changed: str, restored: bool
) -> None:
    """An option that was added since has its default; a run with another value, or with a key that is known no more, is another."""
    there = load_comparison([trained / "both.yaml"], runs=trained / "runs")
    keep_records(there, tmp_path / "records")
    file = tmp_path / "records" / "both" / "prox-s0.tar.xz"
    with tarfile.open(file) as archive:
        files = {entry.name: archive.extractfile(entry).read() for entry in archive}
    plain = yaml.safe_load(files["federation.yaml"])
    if changed == "older":
        del plain["evaluation"]["tolerance"]
    elif changed == "other":
        plain["local"]["lr"] = 0.5
    else:
        plain["local"]["momentous"] = 0.5
    about = json.loads(files["run.json"]) | {"hash": "of before"}
    del about["seal"]  # as of a version without it
    file.write_bytes(
        _archive(
            files
            | {"federation.yaml": yaml.safe_dump(plain).encode(), "run.json": json.dumps(about).encode()}
        )
    )
    here = load_comparison([trained / "both.yaml"], runs=tmp_path / "runs")
    told: list[str] = []
    assert ("prox-s0" in restore_runs(here, tmp_path / "records", told.append)) == restored
    assert any("another configuration" in line for line in told) == (not restored)
    assert state_of(here, "prox", 0) == ("finished" if restored else "absent")
    assert not list(here.folder.glob(".*"))
    kept = file.read_bytes()
    assert keep_records(there, tmp_path / "records") == ([] if restored else ["prox-s0"]), (
        "trained here once more"
    )
    assert (file.read_bytes() == kept) == restored


def test_other_values_than_the_record_are_told(trained: Path, tmp_path: Path) -> None:
    there = load_comparison([trained / "both.yaml"], runs=trained / "runs")
    keep_records(there, tmp_path / "records")
    here = load_comparison([trained / "both.yaml"], runs=tmp_path / "runs")
    restore_runs(here, tmp_path / "records")
    rows = here.path("fedavg", 0) / "rows.csv"
    rows.write_text(rows.read_text().replace("dice,0.", "dice,0.9", 1))
    before = (tmp_path / "records" / "both" / "fedavg-s0.tar.xz").read_bytes()
    told: list[str] = []
    assert keep_records(here, tmp_path / "records", told.append) == []
    assert len(told) == 1 and "other values than its record" in told[0]
    assert (tmp_path / "records" / "both" / "fedavg-s0.tar.xz").read_bytes() == before


def _archive(names: dict[str, bytes]) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:xz") as archive:
        for name, data in names.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return made.getvalue()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"no archive", "cannot be read as a record"),
        (b"", "cannot be read as a record"),
        (_archive({"../outside": b"x"}), "it holds '../outside'"),
        (_archive({"rounds/../log.json": b"x"}), "it holds 'rounds/../log.json'"),
        (_archive({"run.json": b"{}"}), "it has no federation.yaml and no rows.csv"),
        (_archive({"run.json": b"{", "federation.yaml": b"", "rows.csv": b""}), "run.json"),
        (_archive({"run.json": b"[]", "federation.yaml": b"", "rows.csv": b""}), "run.json"),
        (
            _archive(
                {"run.json": b'{"hash": "", "finished": null}', "federation.yaml": b"", "rows.csv": b""}
            ),
            "not of a finished run",
        ),
    ],
)
def test_what_is_no_record_is_refused_in_words(
    trained: Path, tmp_path: Path, content: bytes, said: str
) -> None:
    here = load_comparison([trained / "both.yaml"], runs=tmp_path / "runs")
    file = tmp_path / "records" / "both" / "fedavg-s0.tar.xz"
    file.parent.mkdir(parents=True)
    file.write_bytes(content)
    with pytest.raises(RunFolderError, match="fedavg-s0.tar.xz") as refused:
        restore_runs(here, tmp_path / "records")
    assert said in str(refused.value)
    assert not here.path("fedavg", 0).exists() and not (tmp_path / "outside").exists()


def test_a_run_too_large_for_a_record_is_told(trained: Path, tmp_path: Path, monkeypatch) -> None:
    """Before it is written, and not when its folder is gone; what is there already is refused for what it is."""
    there = load_comparison([trained / "both.yaml"], runs=trained / "runs")
    assert len(keep_records(there, tmp_path / "kept")) == 2
    monkeypatch.setattr(records, "LARGEST", 2**12)
    told: list[str] = []
    assert keep_records(there, tmp_path / "records", told.append) == []
    assert len(told) == 2 and "fedavg-s0: has no record, which would hold" in told[0]
    assert not list((tmp_path / "records").rglob("*.xz"))
    here = load_comparison([trained / "both.yaml"], runs=tmp_path / "runs")
    with pytest.raises(RunFolderError, match=r"fedavg-s0\.tar\.xz: holds more than 0 MiB"):
        restore_runs(here, tmp_path / "kept")


def test_a_cut_record_is_refused(trained: Path, tmp_path: Path) -> None:
    there = load_comparison([trained / "both.yaml"], runs=trained / "runs")
    keep_records(there, tmp_path)
    file = tmp_path / "both" / "fedavg-s0.tar.xz"
    file.write_bytes(file.read_bytes()[:-200])
    here = load_comparison([trained / "both.yaml"], runs=tmp_path / "runs")
    with pytest.raises(RunFolderError, match="cannot be read as a record"):
        restore_runs(here, tmp_path)


def test_a_restored_run_says_that_its_models_are_not_there(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = load_comparison([trained / "both.yaml"], runs=trained / "runs")
    keep_records(there, tmp_path / "records")
    here = load_comparison([trained / "both.yaml"], runs=tmp_path / "runs")
    restore_runs(here, tmp_path / "records")
    assert main(["evaluate", str(here.path("fedavg", 0)), "--data", str(here.first.sites[0].path)]) == 1
    error = capsys.readouterr().err
    assert "Traceback" not in error and "this run has no models" in error


def test_a_record_is_kept_as_soon_as_its_run_is_finished(trained: Path, tmp_path: Path) -> None:
    """A run that fails, or a process that is killed, later does not take it away."""
    here = load_comparison([trained / "both.yaml"], runs=tmp_path / "runs")
    seen: list[list[str]] = []

    def after_run(arm: str, seed: int) -> None:
        assert keep_record(here, tmp_path / "records", arm, seed)
        assert not keep_record(here, tmp_path / "records", arm, seed)
        seen.append(sorted(file.name for file in (tmp_path / "records" / "both").iterdir()))

    assert run_comparison(here, tell=lambda text: None, after_run=after_run) == {}
    assert seen == [["fedavg-s0.tar.xz"], ["fedavg-s0.tar.xz", "prox-s0.tar.xz"]]


def test_records_of_findings_hold_what_intervals_by_patient_need(tmp_path: Path) -> None:
    """The interval without models and without images, with patients as numbers and no names of images."""
    data = write_findings(tmp_path / "data", cases=28)
    base = findings_federation(data, tmp_path / "cache") | {"rounds": 1}
    for site in base["sites"]:
        site["reading"] = {"patient": "patient", "ignored": ["split"]}
    base["evaluation"] |= {"test": 0.5, "draws": 100}
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(base))
    file = {
        "name": "findings",
        "base": "base.yaml",
        "arms": {"fedavg": {}, "prox": {"method.name": "fedprox"}},
        "seeds": [0],
        "measure": {"metric": "auroc", "split": "test", "model": "last"},
    }
    (tmp_path / "findings.yaml").write_text(yaml.safe_dump(file))
    there = load_comparison([tmp_path / "findings.yaml"], runs=tmp_path / "runs")
    assert run_comparison(there, tell=lambda text: None) == {}
    assert keep_records(there, tmp_path / "records") == ["fedavg-s0", "prox-s0"]
    found = collect(there)
    assert found["bootstrap"]["prox"]["value"] is not None
    # a record that was made while the images were away has its predictions once they are back
    data.rename(tmp_path / "away")
    shutil.rmtree(there.path("prox", 0) / "sites")
    told: list[str] = []
    assert keep_record(there, tmp_path / "mended", "prox", 0, told.append) and len(told) == 1
    assert not keep_record(there, tmp_path / "mended", "prox", 0, told.append)
    (tmp_path / "away").rename(data)
    assert keep_record(there, tmp_path / "mended", "prox", 0)
    assert not keep_record(there, tmp_path / "mended", "prox", 0)
    mended, made = (tmp_path / name / "findings" / "prox-s0.tar.xz" for name in ("mended", "records"))
    assert mended.read_bytes() == made.read_bytes()

    record = tmp_path / "records" / "findings" / "prox-s0.tar.xz"
    with tarfile.open(record) as archive:
        held = [entry.name for entry in archive if entry.name.startswith("sites/")]
        assert held == [f"sites/{site}/predictions-test-best.npz" for site in ("s0", "s1", "s2")]
        reader = archive.extractfile(held[0])
        assert reader is not None
        with np.load(io.BytesIO(reader.read())) as kept:
            assert set(kept["patients"].tolist()) == {f"s0/{i:06}" for i in range(len(set(kept["patients"])))}
            assert sorted(kept) == ["finished", "images", "known", "patients", "scores", "truth"]

    shutil.rmtree(data)
    shutil.rmtree(tmp_path / "cache")
    here = load_comparison([tmp_path / "findings.yaml"], runs=tmp_path / "elsewhere")
    restore_runs(here, tmp_path / "records")
    assert collect(here)["bootstrap"] == found["bootstrap"]
    # damaged predictions are as none, and without images and models that is said
    (here.path("prox", 0) / held[0]).write_bytes(b"PK")
    said = collect(here)["bootstrap"]["prox"]
    assert said["value"] is None and "this run has no models" in said["reason"]
    # a run whose images are gone has a record, without predictions
    shutil.rmtree(there.path("prox", 0) / "sites")
    told.clear()
    assert keep_record(there, tmp_path / "other", "prox", 0, told.append)
    assert any("without predictions, of which intervals by patient are made" in line for line in told)


def test_a_run_that_goes_on_elsewhere_says_so(small, tmp_path, monkeypatch) -> None:
    run, info = tmp_path / "run", tmp_path / "run" / "run.json"
    small["evaluation"] |= {"models": ["last"]}
    last_state(small, run)
    here = read_json(info)["machine"]["arithmetic"]
    last_state(small, run)
    assert read_json(info)["machine"]["arithmetic"] == here
    monkeypatch.setattr(record, "arithmetic", lambda device: f"another {device}")
    told: list[str] = []
    run_federation(parse_federation(small, base=Path()), run, tell=told.append, resume=True)
    assert read_json(info)["machine"]["arithmetic"] == f"{here} and then another cpu"
    assert f"on another kind of processor (another cpu; it was {here}), which rounds differently" in "".join(
        told
    )


def test_arithmetic_of_devices_that_are_not_here() -> None:
    """As of a server, whose sites train on GPUs."""
    assert arithmetic("mps") == "mps"
    if not torch.cuda.is_available():
        assert arithmetic("cuda:1") == "cuda"
