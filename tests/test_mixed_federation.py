"""One federation with a segmentation head and an image-level head: a site with masks alone, one with masks from which a
finding follows, one with findings alone, and one that is only tested."""

import csv
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
from fake_sets import anatomy, picture
from PIL import Image
from runs import last_state

import fedatlas
from fedatlas.cli import main
from fedatlas.core.errors import DataError, FederationError
from fedatlas.evaluation.evaluate import own_score
from fedatlas.evaluation.statistics import read_rows
from fedatlas.federation.check import check_federation_file, text_of
from fedatlas.federation.design import Experiment
from fedatlas.federation.file import Federation, load_federation, parse_federation
from fedatlas.federation.predict import predict_scans
from fedatlas.federation.session import run_federation
from fedatlas.federation.trained import Trained
from fedatlas.learning.inference import Prediction
from fedatlas.planning.description import read_description
from fedatlas.report.conclusion import lines
from fedatlas.report.read import read


def write_site(root: Path, first: int, masks: tuple[str, ...], *, table: bool, cases: int = 6) -> Path:
    """Pictures, of which every second has a bright disc of air; the table `findings.csv` says which."""
    lines = ["case,has air,ill"]
    for number in range(first, first + cases):
        image, drawn = anatomy(number)
        air = np.zeros(image.shape, dtype=bool)
        if number % 2:
            air[4:12, 20:28] = True
            image = np.where(air, np.uint8(255), image)
        name = f"p{number:03d}"
        picture(root / "images" / f"{name}.png", image)
        for label in masks:
            picture(root / "masks" / label / f"{name}.png", {**drawn, "air": air}[label])
        lines.append(f"{name},{number % 2},{'' if number == first else (number // 2) % 2}")
    if table:
        (root / "findings.csv").write_text("\n".join(lines) + "\n")
    return root


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("mixed")
    write_site(root / "lungs", 0, ("left lung", "right lung"), table=False)
    write_site(root / "air", 20, ("air",), table=False)
    write_site(root / "told", 40, (), table=True)
    write_site(root / "test", 60, ("left lung", "air"), table=True)
    return root


def federation(folder: Path, **changes: Any) -> Federation:
    reading = {"findings": "findings.csv"}
    plain: dict[str, Any] = {
        "name": "mixed",
        "labels": {
            "names": ["left lung", "right lung", "air"],
            "exclusive": False,
            "findings": {"has air": "air", "ill": None},
        },
        "sites": [
            {"name": "lungs", "path": "lungs", "format": "masks"},
            {"name": "air", "path": "air", "format": "masks"},
            {"name": "told", "path": "told", "format": "masks", "reading": reading},
            {"name": "test", "path": "test", "format": "masks", "reading": reading, "role": "test"},
        ],
        "preprocessing": {"size": [32, 32], "patch": [32, 32], "context": 0},
        "net": {"name": "unet", "filters": [8, 8, 8]},
        "method": {"name": "condistfl"},
        "local": {"optimizer": "sgd", "lr": 0.05, "batch": 2, "steps": 2},
        "rounds": 2,
        "evaluation": {"validation": 0.34, "metrics": ["dice"], "overlays": False},
    }
    return parse_federation(plain | changes, base=folder)


def finished(federation: Federation, run: Path, **how: Any) -> Path:
    run_federation(federation, run, tell=lambda text: None, **how)
    return run


@pytest.fixture(scope="module")
def run(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished(federation(folder), tmp_path_factory.mktemp("runs") / "run")


def test_a_site_brings_masks_findings_or_both(folder: Path, tmp_path: Path) -> None:
    experiment = Experiment(federation(folder), tmp_path)
    known = {}
    for name, source in experiment.sources.items():
        batches = (
            list(source.batches(("t",), batch=2, steps=4, epochs=None, device="cpu"))
            if name != "test"
            else []
        )
        known[name] = {tuple(row) for b in batches for row in b.finding_known.tolist()}
        for batch in batches:
            air = [int(case[1:]) % 2 == 1 for case in batch.case]
            assert batch.finding[:, 0].tolist() == [float(a) for a in air] or name == "lungs"
            assert batch.known.any() == (name != "told")
    assert known["lungs"] == {(False, False)}
    assert known["air"] == {(True, False)}
    assert known["told"] <= {(True, True), (True, False)} and (True, True) in known["told"]
    owned = {name: set(source.labels.findings) for name, source in experiment.sources.items()}
    assert owned == {
        "lungs": set(),
        "air": {0},
        "told": {0, 1},
        "test": set(),
    }  # from the tables, before any batch
    assert experiment.space.finding_of == (2, None)


def test_a_site_with_findings_alone_is_described_and_planned(folder: Path, tmp_path: Path) -> None:
    files = {name: tmp_path / f"{name}.json" for name in ("told", "air")}
    given = ["--format", "masks", "--reading", "findings=findings.csv"]
    assert main(["describe", str(folder / "told"), *given, "-o", str(files["told"])]) == 0
    assert main(["describe", str(folder / "air"), "-o", str(files["air"])]) == 0
    told = read_description(files["told"])
    assert not told.labels and told.findings["has air"].annotated == 6 and told.findings["ill"].annotated == 5
    assert told.shape["50"][:2] == read_description(files["air"]).shape["50"][:2]
    assert told.intensities[0].foreground is None and told.intensities[0].percentiles["50"] > 0
    out = tmp_path / "federation.yaml"
    assert main(["init", *map(str, files.values()), "-o", str(out)]) == 0
    federation = load_federation(out)
    assert federation.labels.names == ("air",) and set(federation.labels.findings) == {"has air", "ill"}
    assert main(["plan", str(out), "--sites", *map(str, files.values()), "--no-trial"]) == 0


def test_the_method_of_the_complete_file_learns_both(folder: Path, tmp_path: Path) -> None:
    method = {"name": "fedatlas", "loss": {"findings": 1.0}}
    ran = finished(federation(folder, method=method), tmp_path / "run")
    assert {row["class"] for row in read_rows(ran / "rows.csv")} >= {"left lung", "air", "ill"}


def test_findings_are_rows_of_a_site(run: Path) -> None:
    rows = read_rows(run / "rows.csv")
    told = [row for row in rows if row["class"] in ("has air", "ill") and row["split"] == "test"]
    assert {row["site"] for row in told} == {"test"}
    assert {row["case"] for row in told} == {""}
    assert {(row["class"], row["metric"]) for row in told} >= {("has air", "auroc"), ("ill", "specificity")}
    counts = {
        row["class"]: row["value"] for row in told if row["metric"] == "n_positive" and row["model"] == "best"
    }
    assert counts == {"has air": 3.0, "ill": 2.0}
    assert not any(row["known"] for row in told)
    voxels = {row["class"] for row in rows if row["site"] == "test" and row["metric"] == "dice"}
    assert voxels == {"left lung", "air"}


def test_in_process_equals_workers_equals_resumed(
    folder: Path, run: Path, shared_workers: None, tmp_path: Path
) -> None:
    one = (run / "models" / "last.fa").read_bytes()
    assert last_state(federation(folder, engine={"workers": 1}), tmp_path / "run") == one
    assert last_state(federation(folder), tmp_path / "run") == one


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "fedopt", "fedpsl", "standalone", "centralized"])
def test_methods_learn_findings_beside_masks(folder: Path, method: str, tmp_path: Path) -> None:
    done = finished(federation(folder, method={"name": method}, rounds=1), tmp_path / method)
    rows = read_rows(done / "rows.csv")
    assert [row for row in rows if row["class"] == "has air" and row["metric"] == "auroc"]


def test_a_picture_is_predicted_with_its_findings(folder: Path, run: Path, tmp_path: Path) -> None:
    result = predict_scans(run, [[folder / "test" / "images" / "p061.png"]], tmp_path)
    [entry] = result["scans"]
    assert set(entry["findings"]) == {"has air", "ill"}
    table = (tmp_path / "predictions.csv").read_text()
    assert "finding,has air" in table
    if entry["findings"]["has air"] < 0.5:
        assert "air" not in entry["pixels"]


def test_what_is_told_of_a_picture_is_what_is_written(
    folder: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every class its file, under the folder of results; in words only classes that were found, and whose model it was."""
    picture = folder / "test" / "images" / "p061.png"
    predicted = Trained.predict

    def left_alone(self: Trained, image: torch.Tensor) -> Prediction:
        found = predicted(self, image)
        voxels = torch.zeros_like(found.voxels)
        voxels[0, :16] = 1
        return replace(found, voxels=voxels)

    monkeypatch.setattr(Trained, "predict", left_alone)
    monkeypatch.setattr(Trained, "choice", lambda *_: {"site": "lungs"})
    (entry,) = predict_scans(run, [[picture]], tmp_path)["scans"]
    assert list(entry["pixels"]) == ["left lung"] and entry["site"] == "lungs"
    with (tmp_path / "predictions.csv").open() as stream:
        rows = {row["name"]: row for row in csv.DictReader(stream)}
    files = {name: row["file"] for name, row in rows.items() if row["kind"] == "class"}
    assert files == {name: f"masks/{name}/p061.png" for name in ("left lung", "right lung", "air")}
    assert [rows[name]["pixels"] for name in ("right lung", "air")] == ["0", "0"]
    for name, value in entry["findings"].items():
        assert float(rows[name]["probability"]) == pytest.approx(value, abs=1e-6)
    shutil.rmtree(tmp_path / "masks")
    (tmp_path / "classes.json").unlink()
    with pytest.raises(FederationError, match=r"predictions\.csv: exists already"):
        predict_scans(run, [[picture]], tmp_path)


@pytest.mark.parametrize("how", ["damaged", "stopped"])
def test_a_prediction_that_breaks_off_leaves_whole_what_it_made(
    folder: Path, run: Path, tmp_path: Path, how: str
) -> None:
    """What labels mean and the rows of what is done, none of before; how many there are is told."""
    first = folder / "test" / "images" / "p061.png"
    second = picture(tmp_path / "second.png", anatomy(62)[0])
    out, said = tmp_path / "out", list[str]()
    predict_scans(run, [[second]], out)
    (out / "classes.json").write_text("{}")

    def seen(number: int, *_: Any) -> None:
        if number == 1 and how == "stopped":
            raise KeyboardInterrupt

    if how == "damaged":
        second.write_bytes(second.read_bytes()[:100])
    with pytest.raises(DataError if how == "damaged" else KeyboardInterrupt):
        predict_scans(run, [[first], [second]], out, overwrite=True, warn=said.append, seen=seen)
    assert said[-1].startswith(f"{out}: has the results of the first 1 of 2 inputs")
    classes = json.loads((out / "classes.json").read_text())
    assert list(classes.values()) == ["left lung", "right lung", "air"]
    with (out / "predictions.csv").open() as stream:
        assert {row["picture"] for row in csv.DictReader(stream)} == {str(first)}


def test_a_prediction_that_breaks_off_before_its_first_result_changes_nothing(
    folder: Path, run: Path, tmp_path: Path
) -> None:
    file, out = picture(tmp_path / "p.png", anatomy(62)[0]), tmp_path / "out"
    predict_scans(run, [[file]], out)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(DataError):
        predict_scans(run, [[file]], out, overwrite=True)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_a_picture_from_python_is_as_the_command_writes_it(folder: Path, run: Path, tmp_path: Path) -> None:
    file = folder / "test" / "images" / "p061.png"
    predict_scans(run, [[file]], tmp_path)
    masks = fedatlas.Model(run).predict(file)
    assert masks.shape == (3, *np.asarray(Image.open(file)).shape)
    for name, mask in zip(("left lung", "right lung", "air"), masks, strict=True):
        assert np.array_equal(np.asarray(Image.open(tmp_path / "masks" / name / "p061.png")) > 0, mask > 0), (
            name
        )


def test_a_model_of_pictures_says_so_of_a_scan(run: Path, tmp_path: Path, capsys) -> None:
    scan = tmp_path / "scan.nii.gz"
    nib.save(nib.Nifti1Image(np.zeros((8, 8, 8), np.float32), np.eye(4)), scan)  # type: ignore[attr-defined]
    assert main(["predict", str(run), str(scan), "-o", str(tmp_path / "out")]) == 1
    assert "the model was trained on pictures: give it one" in capsys.readouterr().err
    assert "IMAGE.png" in lines(read(run), Path("report.html"))[-1]


def test_a_sites_own_model_says_the_findings_that_its_site_tells(folder: Path, tmp_path: Path) -> None:
    """The head of a finding that a site does not tell was never trained there, and must empty no class that the site draws."""
    path = finished(federation(folder, method={"name": "standalone"}), tmp_path / "run")
    said = {name: Trained(path, f"local/{name}").members[0].findings for name in ("lungs", "air", "told")}
    assert said == {"lungs": (), "air": (0,), "told": (0, 1)}


def test_a_site_is_scored_by_the_findings_that_it_tells() -> None:
    asked = []

    def evaluate(site: Any, members: list[dict[str, Any]], **how: Any) -> dict[str, Any]:
        asked.extend((member["classes"], member["findings"]) for member in members)
        return {"rows": []}

    labels = SimpleNamespace(annotated=frozenset({2, 1}), findings=frozenset())
    score = own_score(SimpleNamespace(evaluate=evaluate), "dice")
    assert score(SimpleNamespace(labels=labels), torch.nn.Linear(1, 1)) is None
    assert asked == [([1, 2], [])]


def test_a_finding_that_no_model_speaks_for_is_left_empty(
    folder: Path,
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    members = Trained._members
    monkeypatch.setattr(
        Trained, "_members", lambda self, *given: [replace(m, classes=(1,)) for m in members(self, *given)]
    )
    picture = folder / "test" / "images" / "p061.png"

    def asked(*more: str) -> str:
        assert main(["predict", str(run), str(picture), "-o", str(tmp_path), "--overwrite", *more]) == 0
        return capsys.readouterr().out

    assert "has air" not in asked() and "ill 0." in asked()
    (entry,) = json.loads(asked("--json"), parse_constant=pytest.fail)["scans"]
    assert entry["findings"]["has air"] is None and 0 < entry["findings"]["ill"] < 1
    lines = (tmp_path / "predictions.csv").read_text().splitlines()
    assert next(line for line in lines if ",finding,has air," in line).endswith(",")


def test_check_shows_findings(folder: Path, tmp_path: Path) -> None:
    import yaml

    from fedatlas.federation.file import resolved

    file = tmp_path / "f.yaml"
    file.write_text(yaml.safe_dump(resolved(federation(folder))))
    found = check_federation_file(file, [], tmp_path)
    assert not [p for p in found["problems"] if p["fatal"]]
    assert found["sites"]["told"]["findings"]["has air"]["labelled"] > 0
    text = text_of(found)
    assert "site air: 4 train, 2 validation, 0 test pictures\n" in text and "1×1×1" not in text


def test_the_report_tells_findings_apart_from_classes(run: Path) -> None:
    from fedatlas.report.page import render
    from fedatlas.report.read import read

    found = read(run)
    assert found.classes == ("left lung", "right lung", "air")
    page = render(found)
    assert 'id="findings"' in page and "Findings on test cases" in page


# ------------------------------------------------------------------------------------------ findings' names


def checked(folder: Path, tmp_path: Path, **changes: Any) -> list[str]:
    """What `check` finds, the fatal ones marked."""
    problems = Experiment(federation(folder, **changes), tmp_path).check()
    return [("fatal: " if p.fatal else "note: ") + str(p) for p in problems]


def sites(**told: Any) -> list[dict[str, Any]]:
    """The sites of the federation, with changes of the one that has findings alone."""
    reading = {"findings": "findings.csv"}
    return [
        {"name": "lungs", "path": "lungs", "format": "masks"},
        {"name": "air", "path": "air", "format": "masks"},
        {"name": "told", "path": "told", "format": "masks", "reading": reading} | told,
    ]


def labels(**findings: str | None) -> dict[str, Any]:
    names = ["left lung", "right lung", "air"]
    return {
        "names": names,
        "exclusive": False,
        "findings": {k.replace("_", " "): v for k, v in findings.items()},
    }


def test_findings_that_nobody_tells_and_that_nobody_asks_for(folder: Path, tmp_path: Path) -> None:
    found = checked(folder, tmp_path, labels=labels(has_air="air", sick=None), sites=sites())
    assert any(
        p.startswith(
            "fatal: site (all): no site that trains tells the finding 'sick'; they tell: told: has air, ill"
        )
        for p in found
    )
    assert any(
        p.startswith("note: site told: its findings 'ill' are not in `labels.findings`") for p in found
    )
    found = checked(
        folder, tmp_path, labels=labels(has_air="air", sick=None), sites=sites(aliases={"ill": "sick"})
    )
    assert not [p for p in found if p.startswith("fatal") or "labels.findings" in p]
    # what follows from a mask is told
    found = checked(folder, tmp_path, labels=labels(gas="air"), sites=sites()[:2] + sites()[:0])
    assert not [p for p in found if "tells the finding" in p]


def test_aliases_of_findings(folder: Path, tmp_path: Path) -> None:
    for aliases, text in (
        (
            {"ill": "sik"},
            "alias 'ill' is of a finding and points to 'sik', which `labels.findings` does not name",
        ),
        ({"ill": "has air"}, "its findings 'has air' and 'ill' both become 'has air'"),
    ):
        with pytest.raises(FederationError, match=re.escape(text)):
            Experiment(federation(folder, sites=sites(aliases=aliases)), tmp_path).sources  # noqa: B018
    half = sites(aliases={"ill": "has air"}, annotated=["ill"])
    with pytest.raises(FederationError, match="both become 'has air'; correct `aliases`"):
        Experiment(federation(folder, sites=half), tmp_path).sources  # noqa: B018
