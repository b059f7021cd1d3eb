"""A federation whose labels are of whole images, as a user runs it: files in, scores out, errors before training."""

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from findings import CLASSES, findings_federation, write_findings
from PIL import Image

from fedatlas.core.errors import DataError, FedAtlasError, FederationError
from fedatlas.core.labels import LabelSpace
from fedatlas.evaluation.classification import Threshold
from fedatlas.evaluation.images import SILENT
from fedatlas.evaluation.statistics import read_rows, select
from fedatlas.federation.design import Experiment
from fedatlas.federation.file import parse_federation
from fedatlas.federation.predict import predict_images
from fedatlas.federation.session import run_federation
from fedatlas.federation.tasks import TASKS
from fedatlas.federation.trained import Trained, evaluate_folder, fitted_thresholds


def run(values: dict[str, Any], path: Path, **more: Any) -> Path:
    run_federation(parse_federation(values, base=Path()), path, tell=lambda text: None, **more)
    return path


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A finished run, and the folder of its data."""
    folder = write_findings(tmp_path_factory.mktemp("data"))
    values = findings_federation(folder, tmp_path_factory.mktemp("cache"))
    values["evaluation"] = {"metrics": ["auroc", "f1"], "draws": 20, "overlays": True}
    return run(values, tmp_path_factory.mktemp("runs") / "run"), folder


def test_rows_are_of_whole_sites_and_name_no_case(ran) -> None:
    path, _ = ran
    rows = read_rows(path / "rows.csv")
    assert rows and {row["case"] for row in rows} == {""}
    test = select(rows, split="test", model="best", metric="auroc")
    assert {(row["site"], row["class"]) for row in test} == {(f"s{n}", c) for n in range(3) for c in CLASSES}
    known = {(row["site"], row["class"]) for row in test if row["known"]}
    assert known == {("s0", "blob"), ("s0", "bar"), ("s1", "bar"), ("s2", "ring")}
    undefined = [row for row in rows if row["value"] is None]
    assert all(row["reason"] for row in undefined)


def test_thresholds_are_fitted_on_all_sites_together(ran) -> None:
    """No site annotates all three classes, and every class has a threshold; only its annotators' images decide."""
    path, _ = ran
    kept = json.loads((path / "thresholds.json").read_text())
    assert set(kept["classes"]) == set(CLASSES) and kept["split"] == "validation"
    counts: dict[str, int] = {}
    for entry in json.loads((path / "histograms.json").read_text()):
        if entry["split"] == "validation" and entry["model"] == "best":
            n = sum(entry["histogram"]["positives"]) + sum(entry["histogram"]["negatives"])
            counts[entry["class"]] = counts.get(entry["class"], 0) + n
    assert counts == {"blob": 4, "bar": 8, "ring": 4}  # two sites annotate bar; score_all is of test images
    for name, entry in kept["models"]["best"].items():
        assert (entry["value"] is None) == bool(entry["reason"]), name


def test_a_model_that_is_both_best_and_last_has_its_thresholds_by_either_name(ran, tmp_path) -> None:
    run = shutil.copytree(ran[0], tmp_path / "run")
    kept = json.loads((run / "thresholds.json").read_text())
    name, other = ("best", "last") if "best" in kept["models"] else ("last", "best")
    kept["models"] = {name: {c: {"value": 0.25, "reason": None} for c in CLASSES}}
    (run / "thresholds.json").write_text(json.dumps(kept))
    best = json.loads((run / "best.json").read_text())
    for number, there in ((2, True), (1, False)):  # it has two rounds
        moved = {of: one | {"round": number} for of, one in best.get("sites", {}).items()}
        (run / "best.json").write_text(json.dumps(best | {"round": number, "sites": moved}))
        assert [one.value for one in fitted_thresholds(run, name, CLASSES).values()] == [0.25] * 3
        wanted = [0.25 if there else None] * 3
        assert [one.value for one in fitted_thresholds(run, other, CLASSES).values()] == wanted


def test_images_that_are_drawn_by_class_are_not_scored_for_others(small_images, tmp_path) -> None:
    small_images["sites"][0]["balanced"] = 1
    with pytest.raises(FederationError, match="site s0: score_all and balanced: test images are drawn by"):
        run(small_images, tmp_path / "run")


def test_why_a_local_model_has_no_threshold(small_images, tmp_path) -> None:
    """It may not speak for the class, though validation images of other sites, or its own, are annotated for it."""
    small_images |= {"method": {"name": "standalone"}, "rounds": 1}
    small_images["evaluation"] |= {"models": ["local"], "draws": 0}
    path = run(small_images, tmp_path / "run")
    fitted = json.loads((path / "thresholds.json").read_text())["models"]["local/s2"]
    assert {name for name, entry in fitted.items() if entry["reason"] == SILENT} == {"bar", "blob"}
    assert "no validation image" not in str(fitted)
    space = LabelSpace(CLASSES, exclusive=False, level="image")
    fitted = TASKS["classification"].fit(
        [], [{"class": "bar", "reason": SILENT}], parse_federation(small_images, base=Path()), space
    )
    assert list(fitted) == list(CLASSES) and fitted["bar"]["reason"] == SILENT
    assert fitted["ring"]["reason"] == "no validation image of any site is annotated for it"


def test_no_score_of_an_image_leaves(ran) -> None:
    path, _ = ran
    lines = [
        json.loads(line.partition(" ")[2])
        for line in (path / "sites" / "s0" / "egress.jsonl").read_text().splitlines()
    ]
    evaluations = [line for line in lines if line["function"] == "evaluate"]
    assert evaluations
    for line in evaluations:
        tensors = [what for what in line["contents"].values() if "float" in what and "[" in what]
        assert not tensors
    assert not list((path / "rounds").rglob("*.npz")) and list(
        (path / "sites" / "s0" / "overlays").rglob("*.npz")
    )


def test_predict_and_evaluate(ran, tmp_path) -> None:
    path, folder = ran
    file = sorted((folder / "site-0" / "images").glob("*.png"))[0]
    result = predict_images(path, [file], tmp_path)
    [entry] = result["images"]
    assert set(entry["probability"]) == set(CLASSES) and all(
        0 <= p <= 1 for p in entry["probability"].values()
    )
    [header, row] = list(csv.reader((tmp_path / "findings.csv").open()))
    assert header[:4] == ["image", *CLASSES] and float(row[1]) == entry["probability"]["blob"]
    reading = {"patient": "patient", "split": "split"}
    rows, ignored = evaluate_folder(path, folder / "site-1", format="csv", reading=reading)
    assert not ignored and {row["class"] for row in rows} == set(CLASSES)
    counts = [row["value"] for row in rows if row["metric"] in ("n_positive", "n_negative")]
    assert sum(counts) == 3 * 16  # every image of the folder, whatever its split
    assert evaluate_folder(path, folder / "site-1") == (rows, []), "as the federation file says of the site"
    copy = shutil.copytree(folder / "site-1", tmp_path / "tested")
    head, *lines = (copy / "labels.csv").read_text().splitlines()
    place = head.split(",").index("split")
    tests = [line for line in lines if line.split(",")[place] == "test"]
    (copy / "labels.csv").write_text("\n".join([head, *tests, ""]))
    few, _ = evaluate_folder(path, copy, reading=reading)
    counts = [row["value"] for row in few if row["metric"] in ("n_positive", "n_negative")]
    assert sum(counts) == 3 * len(tests), "a folder of test images alone"
    with pytest.raises(FederationError, match="none of its classes"):
        evaluate_folder(
            path, folder / "site-1", format="csv", reading=reading | {"classes": ["split"], "split": None}
        )


def test_a_class_that_a_site_of_the_run_leaves_out_is_not_scored_in_its_folder(ran, tmp_path) -> None:
    run = shutil.copytree(ran[0], tmp_path / "run")
    values = yaml.safe_load((run / "federation.yaml").read_text())
    site = values["sites"][1]
    site |= {"score_all": False, "annotated": ["blob"], "aliases": {"bar": "ring"}}
    (run / "federation.yaml").write_text(yaml.safe_dump(values))
    record = json.loads((run / "run.json").read_text())
    del record["seal"], record["federation"]  # which would tell that the file was changed
    (run / "run.json").write_text(json.dumps(record))
    said: list[str] = []
    rows, _ = evaluate_folder(run, Path(site["path"]), warn=said.append)
    assert {row["class"] for row in rows} == {"blob"}
    assert any("`annotated` of the run's site s1 leaves out bar, ring; not scored" in text for text in said)


def test_a_finding_is_present_from_its_threshold_on_and_empty_where_nothing_says_so(
    ran, tmp_path, monkeypatch
) -> None:
    path, folder = ran
    files = sorted((folder / "site-0" / "images").glob("*.png"))[:2]
    scores = iter(([0.0, 0.25, float("nan")], [0.5, 0.75, 0.5]))
    limits = (Threshold(0.0), Threshold(0.5), Threshold(0.5))
    monkeypatch.setattr(Trained, "findings", lambda *_: torch.tensor([next(scores)], dtype=torch.float64))
    monkeypatch.setattr(Trained, "thresholds", lambda _: dict(zip(CLASSES, limits, strict=True)))
    seen: list[tuple[int, int, str]] = []
    result = predict_images(path, files, tmp_path / "one", seen=lambda *of: seen.append(of))
    blob, bar, ring = CLASSES
    assert result["images"][0]["probability"] == {blob: 0.0, bar: 0.25, ring: None}
    assert [entry["present"] for entry in result["images"]] == [
        {blob: 1, bar: 0},
        {blob: 1, bar: 1, ring: 1},
    ]
    assert result["no_threshold"] == {} and seen == [(n, 2, file.name) for n, file in enumerate(files)]
    assert list(csv.reader((tmp_path / "one" / "findings.csv").open())) == [
        ["image", *CLASSES, *(f"{name} present" for name in CLASSES)],
        [str(files[0]), "0.0", "0.25", "", "1", "0", ""],
        [str(files[1]), "0.5", "0.75", "0.5", "1", "1", "1"],
    ]
    scores = iter(([0.5, 0.75, 0.5],))
    limits = (Threshold(0.5), Threshold(None, reason="too few images"), Threshold(0.5))
    result = predict_images(path, files[:1], tmp_path / "two")
    assert result["no_threshold"] == {bar: "too few images"} and bar not in result["images"][0]["present"]


def test_findings_replace_nothing_and_are_of_images_alone(ran, tmp_path) -> None:
    path, folder = ran
    images = folder / "site-0" / "images"
    file = sorted(images.glob("*.png"))[0]
    with pytest.raises(FederationError, match="is the folder of"):
        predict_images(path, [file], images)
    written = Path(predict_images(path, [file], tmp_path)["table"])
    written.write_text("kept")
    with pytest.raises(FederationError, match=r"findings\.csv: exists already"):
        predict_images(path, [file], tmp_path)
    assert written.read_text() == "kept"
    predict_images(path, [file], tmp_path, overwrite=True)
    assert written.read_text().startswith("image,")
    out = tmp_path / "none"
    (tmp_path / "text.png").write_text("no image")
    with pytest.raises(DataError, match=r"text\.png: .*; nothing was written"):
        predict_images(path, [tmp_path / "text.png"], out)
    with pytest.raises(DataError, match=r"gone\.png: no such file"):
        predict_images(
            path, [file, tmp_path / "gone.png"], out, seen=lambda *of: pytest.fail("after the work")
        )
    colours = np.random.default_rng(0).integers(0, 256, (16, 16, 3)).astype(np.uint8)
    Image.fromarray(colours).save(tmp_path / "colours.png")
    with pytest.raises(DataError, match="in colour"):
        predict_images(path, [tmp_path / "colours.png"], out)
    assert not out.exists()
    told: list[str] = []
    predict_images(path, [tmp_path / "colours.png"], out, anyway=True, warn=told.append)
    assert any("in colour" in text for text in told)


def test_a_site_that_is_only_tested_on_changes_nothing_of_the_training(small_images, tmp_path) -> None:
    """Optimizer moments are private memory: they must outlive the calls for evaluation between the rounds."""
    small_images["rounds"] = 3
    small_images["evaluation"]["models"] = ["last"]
    without = run(small_images, tmp_path / "without")
    root = shutil.copytree(small_images["sites"][2]["path"], tmp_path / "apart")
    for file in (root / "images").glob("*.png"):  # other images of other patients
        pixels = np.asarray(Image.open(file))
        Image.fromarray(255 - pixels).save(file)
    text = (root / "labels.csv").read_text().replace("p2-", "q-").replace("images/q-", "images/p2-")
    (root / "labels.csv").write_text(text)
    apart = small_images["sites"][2] | {"name": "apart", "path": str(root), "role": "test", "annotated": None}
    small_images["sites"].append(apart)
    with_it = run(small_images, tmp_path / "with")
    last = [path / "models" / "last.fa" for path in (without, with_it)]
    assert last[0].read_bytes() == last[1].read_bytes()
    rows = select(read_rows(with_it / "rows.csv"), site="apart", metric="n_positive")
    assert {row["split"] for row in rows} == {"test"}
    # and a resumed run finds the memory again
    third = with_it / "rounds" / "0003"
    shutil.rmtree(third)
    (with_it / "rows.csv").unlink()
    assert run(small_images, with_it, resume=True) and last[1].read_bytes() == last[0].read_bytes()


def test_fewer_cases_are_among_more(findings, small_images, tmp_path) -> None:
    taken = []
    for n in (2, 4, 8):
        small_images["sites"][0]["cases"] = n
        data = Experiment(parse_federation(small_images, base=Path()), tmp_path).sources["s0"]
        taken.append({item.title for item in data.items["train"]})  # type: ignore[attr-defined]
        assert data.n_train == n
    assert taken[0] < taken[1] < taken[2]


def test_counts_are_those_of_the_table(small_images, tmp_path) -> None:
    data = Experiment(parse_federation(small_images, base=Path()), tmp_path).sources["s0"]
    with (Path(small_images["sites"][0]["path"]) / "labels.csv").open() as file:
        train = [row for row in csv.DictReader(file) if row["split"] == "train"]
    assert data.n_labelled.tolist() == [len(train), len(train), 0]
    assert data.n_positive.tolist() == [sum(int(row[c]) for row in train) for c in CLASSES[:2]] + [0]


def changed(values: dict[str, Any], tmp_path: Path, change: Any) -> dict[str, Any]:
    """The federation with its data copied and changed."""
    for site in values["sites"]:
        root = shutil.copytree(site["path"], tmp_path / "data" / site["name"])
        site["path"] = str(root)
    change(values, tmp_path / "data")
    return values


def edit(root: Path, old: str, new: str) -> None:
    table = root / "labels.csv"
    text = table.read_text()
    assert old in text
    table.write_text(text.replace(old, new))


def _same_patient(values: dict[str, Any], data: Path) -> None:
    for site in values["sites"]:
        site["reading"] = site["reading"] | {"source": "one hospital"}
    edit(data / "s1", ",p1-0,", ",p0-0,")


def _twin(values: dict[str, Any], data: Path) -> None:
    """The same pixels in another file, in the test images of another site."""
    pixels = Image.open(data / "s0" / "images" / "p0-00.png")
    pixels.save(data / "s1" / "images" / "p1-15.png", compress_level=0)


def _no_positive(values: dict[str, Any], data: Path) -> None:
    for root in data.iterdir():
        rows = list(csv.DictReader((root / "labels.csv").open()))
        with (root / "labels.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(row | {"bar": 0} for row in rows)


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)


BAD = {
    "exclusive": (lambda v, d: v["labels"].update(exclusive=True), "labels: exclusive is true"),
    "preprocessing": (
        lambda v, d: v.update(preprocessing={"patch": [16, 16]}),
        "preprocessing: is for segmentation, and the task is classification",
    ),
    "net": (lambda v, d: v.update(net={"name": "unet"}), "net unet: is for segmentation.*cnn, densenet121"),
    "method": (lambda v, d: v.update(method={"name": "condistfl"}), "condistfl is for segmentation"),
    "metric": (lambda v, d: v["evaluation"].update(metrics=["dice"]), "for classification the metric 'dice'"),
    "format": (
        lambda v, d: v["sites"][0].update(format="nnunet"),
        "labels of whole images are read from: chestxray14, covid, csv",
    ),
    "misspelt": (
        lambda v, d: v["sites"][0].update(annotated=["blobb"]),
        "annotated.*'blobb'.*known: blob, bar",
    ),
    "no row": (
        lambda v, d: (d / "s0" / "images" / "p0-00.png").unlink(),
        "p0-00.png: missing: listed in labels.csv",
    ),
    "no image": (
        lambda v, d: _write(d / "s1" / "images" / "p1-00.png", b"nothing"),
        "site s1: .*p1-00.png: neither PNG, JPEG nor DICOM",
    ),
    "one grey": (
        lambda v, d: Image.new("L", (16, 16), 7).save(d / "s1" / "images" / "p1-00.png"),
        "all of its pixels are equal",
    ),
    "two sites": (_same_patient, "patient 'p0-0' of one hospital is also at site s0"),
    "two splits": (
        lambda v, d: edit(d / "s0", "p0-7,test", "p0-0,test"),
        "patient 'p0-0' is in the train cases",
    ),
    "twin": (_twin, "value by value|byte by byte"),
    "no positive": (_no_positive, "class 'bar' is present in no training case of any site"),
    "nobody trains": (
        lambda v, d: [s.update(role="test") for s in v["sites"]],
        "no site trains|no site annotates",
    ),
    "empty": (lambda v, d: edit(d / "s2", ",train,", ",test,"), "site s2: empty"),
    "privacy": (
        lambda v, d: v.update(method={"name": "fedmatch"}, privacy={"noise": 1.0, "clip": 1.0}),
        "privacy: method fedmatch answers",
    ),
    "noise on batch norm": (
        lambda v, d: v.update(
            net={"name": "densenet121"},
            images=v["images"] | {"size": [64, 64]},
            privacy={"noise": 1.0, "clip": 1.0},
        ),
        r"privacy: .*running_var is a variance of batch normalisation.*group or instance",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_named_before_training(what, small_images, tmp_path) -> None:
    change, message = BAD[what]
    values = changed(small_images, tmp_path, change)
    with pytest.raises(FedAtlasError, match=f"(?s){message}"):
        run(values, tmp_path / "run")
    assert not (tmp_path / "run" / "rounds" / "0001").exists()


def test_an_image_without_a_row_is_a_note(small_images, tmp_path) -> None:
    def change(values: dict[str, Any], data: Path) -> None:
        pixels = np.random.default_rng(0).integers(0, 255, (16, 16)).astype(np.uint8)
        Image.fromarray(pixels).save(data / "s0" / "images" / "extra.png")

    values = changed(small_images, tmp_path, change)
    problems = Experiment(parse_federation(values, base=Path()), tmp_path / "cache").check()
    [note] = [problem for problem in problems if "extra.png" in problem.file]
    assert not note.fatal and "without a row" in note.what
