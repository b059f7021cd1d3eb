"""`fedatlas export`: the forms say what the run says, and need FedAtlas no more."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
from findings import findings_federation
from headers import without_orientation
from runs import phantom_federation
from safetensors import safe_open

from fedatlas import methods, nets
from fedatlas.cli import main
from fedatlas.core.errors import DataError, FederationError
from fedatlas.data.transforms import read_image
from fedatlas.export.card import card
from fedatlas.export.forms import TOLERANCE, export
from fedatlas.export.scripts import SaveLabels, files_of, label_files, require_room
from fedatlas.export.source import extracted
from fedatlas.export.subject import subject
from fedatlas.federation.file import parse_federation
from fedatlas.federation.predict import predict_images, predict_scans
from fedatlas.federation.session import run_federation
from fedatlas.learning.inference import neighbours
from fedatlas.report import read

WITHOUT_FEDATLAS = (
    "import sys; sys.modules['fedatlas'] = None; sys.path.insert(0, '.')\n"
    "from monai.bundle import run\n"
    "run(config_file='configs/inference.json', dataset_dir=sys.argv[1], output_dir=sys.argv[2])"
)


def trained(chosen: dict[str, Any], path: Path) -> Path:
    run_federation(parse_federation(chosen, base=Path()), path, tell=lambda text: None)
    return path


@pytest.fixture(scope="module")
def run(phantom: Path, phantom_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    chosen = phantom_federation(phantom, phantom_cache) | {"rounds": 1}
    chosen["evaluation"] |= {"models": ["best", "local"]}
    return trained(chosen, tmp_path_factory.mktemp("runs") / "ct")


@pytest.fixture(scope="module")
def other_net(phantom: Path, phantom_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A net that is not MONAI's, of classes that overlap, in volumes."""
    chosen = phantom_federation(phantom, phantom_cache) | {"rounds": 1}
    chosen |= {"labels": {"exclusive": False}, "net": {"name": "kim_unet", "filters": [8, 8, 8]}}
    chosen["preprocessing"] |= {"patch": [32, 16, 16]}
    return trained(chosen, tmp_path_factory.mktemp("runs") / "other")


@pytest.fixture(scope="module")
def images(findings: Path, phantom_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    chosen = findings_federation(findings, phantom_cache / "findings") | {"rounds": 1}
    return trained(chosen, tmp_path_factory.mktemp("runs") / "images")


def scans(phantom: Path) -> list[Path]:
    return sorted(phantom.rglob("imagesTs/*.nii.gz"))[:2]


def in_metres(scan: Path, path: Path) -> Path:
    image: Any = nib.load(scan)  # type: ignore[attr-defined]
    made = nib.Nifti1Image(np.asanyarray(image.dataobj), np.diag([1e-3, 1e-3, 1e-3, 1]) @ image.affine)  # type: ignore[attr-defined]
    made.header.set_xyzt_units("meter")
    nib.save(made, path)  # type: ignore[attr-defined]
    return path


def run_bundle(bundle: Path, files: list[Path], out: Path) -> None:
    folder = out.parent / "in"
    folder.mkdir()
    for file in files:
        (folder / file.name).symlink_to(file)
    error = bundle_said(bundle, folder, out)
    assert not error, error


def test_a_bundle_tells_of_a_scan_without_orientation(run: Path, phantom: Path, tmp_path: Path) -> None:
    export(run, "bundle", tmp_path / "bundle")
    (tmp_path / "in").mkdir()
    shutil.copy(scans(phantom)[0], tmp_path / "in/sound.nii.gz")
    without_orientation(scans(phantom)[0], tmp_path / "in/plain.nii.gz")
    command = [sys.executable, "-c", WITHOUT_FEDATLAS, str(tmp_path / "in"), str(tmp_path / "out")]
    done = subprocess.run(command, cwd=tmp_path / "bundle", capture_output=True, text=True, check=True)
    (note,) = [line for line in done.stdout.splitlines() if "left and right are a guess" in line]
    assert note.startswith(f"note: {tmp_path / 'in/plain.nii.gz'}: neither qform nor sform is set")


def test_a_bundle_refuses_what_predict_refuses_in_the_same_words(
    run: Path, phantom: Path, tmp_path: Path
) -> None:
    export(run, "bundle", tmp_path / "bundle")
    (tmp_path / "in").mkdir()
    file = in_metres(scans(phantom)[0], tmp_path / "in/p1.nii.gz")
    image: Any = nib.load(file)  # type: ignore[attr-defined]
    unsaid = nib.Nifti1Image(np.asanyarray(image.dataobj), image.affine)  # type: ignore[attr-defined]
    unsaid.header.set_xyzt_units("unknown")
    nib.save(unsaid, file)  # type: ignore[attr-defined]
    with pytest.raises(DataError, match="a single one; its header seems to count in metres") as refused:
        predict_scans(run, [[file]], tmp_path / "ours")
    assert str(refused.value) in bundle_said(tmp_path / "bundle", tmp_path / "in", tmp_path / "theirs")
    assert not list((tmp_path / "theirs").glob("*.nii.gz"))


def test_a_bundle_notes_what_predict_notes(run: Path, phantom: Path, tmp_path: Path) -> None:
    export(run, "bundle", tmp_path / "bundle")
    (tmp_path / "in").mkdir()
    scan: Any = nib.load(scans(phantom)[0])  # type: ignore[attr-defined]
    skewed, flipped = scan.affine.copy(), scan.affine @ np.diag([-1, 1, 1, 1])
    skewed[1, 2] += 0.3 * scan.affine[2, 2]
    for name, sform, qform in (("flipped", scan.affine, flipped), ("skewed", skewed, skewed)):
        made = nib.Nifti1Image(np.asanyarray(scan.dataobj), None)  # type: ignore[attr-defined]
        made.set_sform(sform, 1)
        made.set_qform(qform, 1)
        nib.save(made, tmp_path / f"in/{name}.nii.gz")  # type: ignore[attr-defined]
    told: list[str] = []
    files = sorted((tmp_path / "in").iterdir())
    predict_scans(run, [[file] for file in files], tmp_path / "ours", warn=told.append)
    command = [sys.executable, "-c", WITHOUT_FEDATLAS, str(tmp_path / "in"), str(tmp_path / "out")]
    done = subprocess.run(command, cwd=tmp_path / "bundle", capture_output=True, text=True, check=True)
    notes = [line.removeprefix("note: ") for line in done.stdout.splitlines() if line.startswith("note: ")]
    assert notes == [text for text in told if any(str(file) in text for file in files)]
    assert "left and right are in doubt" in notes[0] and "off a right angle" in notes[1]


def bundle_said(bundle: Path, folder: Path, out: Path) -> str:
    """What a bundle says that fails; nothing where it does not."""
    command = [sys.executable, "-c", WITHOUT_FEDATLAS, str(folder), str(out)]
    done = subprocess.run(command, cwd=bundle, capture_output=True, text=True)
    return done.stderr if done.returncode else ""


@pytest.mark.parametrize("name", ["run", "other_net"])
def test_a_bundle_needs_monai_alone_and_gives_the_labels_of_predict(
    name: str, phantom: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(name)
    found = export(path, "bundle", tmp_path / "bundle")
    assert found["net"] == ("monai.networks.nets.DynUNet" if name == "run" else "scripts.Program")
    given = [*scans(phantom), in_metres(scans(phantom)[0], tmp_path / "metres_0000.nii.gz")]
    run_bundle(tmp_path / "bundle", given, tmp_path / "theirs")
    predict_scans(path, [[file] for file in given], tmp_path / "ours")
    files = sorted((tmp_path / "ours").glob("*.nii.gz"))
    assert len(files) == 3
    for file in files:
        ours, theirs = nib.load(file), nib.load(tmp_path / "theirs" / file.name)
        assert np.array_equal(np.asanyarray(ours.dataobj), np.asanyarray(theirs.dataobj))  # type: ignore[attr-defined]
        # files hold affines in float32, ours that of the scan in metres
        assert np.allclose(read_image(file)[1], theirs.affine, atol=1e-4)  # type: ignore[attr-defined]
        assert theirs.header.get_xyzt_units()[0] == "mm"  # type: ignore[attr-defined]
    if name == "run":  # what is there stays
        (tmp_path / "theirs" / files[0].name).write_text("mine")
        assert "exists already" in bundle_said(tmp_path / "bundle", tmp_path / "in", tmp_path / "theirs")
        assert (tmp_path / "theirs" / files[0].name).read_text() == "mine"


def test_a_bundle_of_findings_writes_the_table_of_predict(
    images: Path, findings: Path, tmp_path: Path
) -> None:
    files = sorted(findings.rglob("*.png"))[:3]
    export(images, "bundle", tmp_path / "bundle")
    folder = tmp_path / "in"
    predict_images(images, [folder / file.name for file in copied(files, folder)], tmp_path / "ours")
    run = [sys.executable, "-c", WITHOUT_FEDATLAS, str(folder), str(tmp_path / "theirs")]
    subprocess.run(run, cwd=tmp_path / "bundle", check=True, capture_output=True)
    table = tmp_path / "theirs/findings.csv"
    assert (tmp_path / "ours/findings.csv").read_text() == table.read_text()
    about = json.loads((tmp_path / "bundle/configs/metadata.json").read_text())
    assert set(about["required_packages_version"]) == {"pillow", "pydicom"}
    table.write_text("mine")
    assert "exists already" in bundle_said(tmp_path / "bundle", folder, tmp_path / "theirs")
    assert table.read_text() == "mine"


def touched(folder: Path, *names: str) -> str:
    folder.mkdir()
    for name in names:
        (folder / name).touch()
    return str(folder)


def test_the_channels_of_a_case_are_found_by_their_numbers(tmp_path: Path) -> None:
    names = [f"{case}_000{c}.nii{gz}" for case, gz in (("a_1.5T", ".gz"), ("a_3.0T", "")) for c in (0, 1)]
    found = files_of(touched(tmp_path / "in", *names), (".nii", ".nii.gz"), 2)
    assert [[Path(file).name for file in item["image"]] for item in found] == [names[:2], names[2:]]
    assert [file.name for file in label_files(found, "out")] == [
        "a_1.5T_0000_labels.nii.gz",
        "a_3.0T_0000_labels.nii.gz",
    ]


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("a_1.5T_0000.nii.gz", "a_3.0T_0001.nii.gz"), "case a_1.5T has the channels _0000; expected"),
        (("c_0000.nii.gz", "c_0002.nii.gz"), "case c has the channels _0000, _0002; expected"),
        (("c_0000.nii.gz", "c_0001.nii.gz", "c_0002.nii.gz"), "_0000, _0001, _0002; expected"),
        (("c_0000.nii.gz", "c_labels.nii.gz"), "c_labels.nii.gz: its name does not end in the number"),
        (("c_0000.nii", "c_0000.nii.gz"), "c_0000.nii and c_0000.nii.gz: are one channel of one case"),
    ],
)
def test_a_case_without_its_channels_is_refused(names: tuple[str, ...], words: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=re.escape(words)):
        files_of(touched(tmp_path / "in", *names), (".nii", ".nii.gz"), 2)


def test_a_bundle_without_images_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere: there is no such folder; .*--dataset_dir"):
        files_of(str(tmp_path / "nowhere"), (".nii.gz",))
    with pytest.raises(DataError, match=r"holds no file that ends in \.nii\.gz; give --dataset_dir"):
        files_of(touched(tmp_path / "in", "notes.txt"), (".nii.gz",))


def test_a_bundle_replaces_nothing_unless_asked(tmp_path: Path) -> None:
    folder, endings = touched(tmp_path / "in", "p1.nii", "p1.nii.gz"), (".nii", ".nii.gz")
    data = files_of(folder, endings)
    with pytest.raises(DataError, match="would be written of two scans"):
        require_room(data, label_files(data, str(tmp_path / "out")), overwrite=True)
    data = files_of(touched(tmp_path / "one", "p1.nii"), endings)
    results = label_files(data, touched(tmp_path / "out", "p1_labels.nii.gz"))
    with pytest.raises(DataError, match="exists already"):
        require_room(data, results)
    require_room(data, results, overwrite=True)
    folder = touched(tmp_path / "both", "p1.nii", "p1_labels.nii.gz")
    data = files_of(folder, endings)
    with pytest.raises(DataError, match="p1_labels.nii.gz: is an input"):
        require_room(data, label_files(data, folder), overwrite=True)


@pytest.mark.parametrize("exclusive", [True, False])
def test_labels_of_one_slice_are_written(exclusive: bool, tmp_path: Path) -> None:
    labels = torch.randint(0, 2, (1 if exclusive else 3, 5, 4, 1), dtype=torch.uint8)
    affine = np.diag([1.0, 2, 3, 1])
    data = {"pred": labels, "file": "in/a.b.nii.gz", "geometry": SimpleNamespace(affine=affine)}
    SaveLabels(str(tmp_path / "out"), exclusive)(data)
    written: Any = nib.load(tmp_path / "out/a.b_labels.nii.gz")  # type: ignore[attr-defined]
    wanted = labels[0].numpy() if exclusive else np.moveaxis(labels.numpy(), 0, -1)
    assert written.shape == wanted.shape and np.array_equal(np.asanyarray(written.dataobj), wanted)
    assert np.array_equal(written.affine, affine)


def copied(files: list[Path], folder: Path) -> Iterator[Path]:
    folder.mkdir()
    for file in files:
        (folder / file.name).write_bytes(file.read_bytes())
        yield folder / file.name


@pytest.mark.parametrize("name", ["run", "images"])
def test_onnx_says_what_the_net_says(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    import onnxruntime

    path = request.getfixturevalue(name)
    found = export(path, "onnx", tmp_path / "onnx")
    assert found["free_sizes"] and found["largest_difference"] <= TOLERANCE
    session = onnxruntime.InferenceSession(str(tmp_path / "onnx/model.onnx"))
    about = session.get_modelmeta().custom_metadata_map
    model = subject(path)
    assert json.loads(about["classes"]) == list(model.trained.space.names)
    size = [n + 2 * by for n, by in zip(model.size, model.net.divisor, strict=True)]
    image = model.example(5, size)
    (said,) = session.run(None, {"image": image.numpy()})
    with torch.no_grad():
        assert np.abs(said - model.net(image).numpy()).max() <= TOLERANCE


def as_the_card_says(text: str, logits: np.ndarray) -> np.ndarray:
    """Probabilities [N, C, ...] of logits, by the sentence of the card; NaN for channels that are not to be used."""
    (sentence,) = re.findall(r"^Of the logits: (.*)\.$", text, re.MULTILINE)
    found = logits.astype(np.float64)
    for step in re.split(", then |; ", sentence):
        at = [int(c) for c in re.findall(r"\d+", step.split("channel")[1])] if "channel" in step else []
        if step == "set logit 0 to 0":
            found[:, 0] = 0
        elif step.endswith("to -inf"):
            found[:, at] = -np.inf
        elif step == "softmax over axis 1":
            found = np.exp(found - found.max(1, keepdims=True))
            found /= found.sum(1, keepdims=True)
        elif step.startswith("add the probability"):
            found[:, 0] += found[:, at].sum(1)
            found[:, at] = 0
        elif step == "sigmoid":
            found = 1 / (1 + np.exp(-found))
        else:
            assert step.endswith("not to be used"), step
            found[:, at] = np.nan
    return found


@pytest.mark.parametrize("background", ["channel", "zero"])
@pytest.mark.parametrize("others", ["background", "ignored"])
@pytest.mark.parametrize("classes", [None, (1,), (1, 2)])
@pytest.mark.parametrize("name", ["run", "other_net", "images"])
def test_the_card_of_onnx_says_what_predict_makes_of_logits(
    name: str, classes: Any, others: Any, background: Any, request: pytest.FixtureRequest, monkeypatch: Any
) -> None:
    path = request.getfixturevalue(name)
    model = replace(subject(path), classes=classes)
    own, (member,) = model.trained, model.trained.members
    how = replace(own.federation.evaluation.inference, others=others, background=background)
    evaluation = replace(own.federation.evaluation, inference=how)
    monkeypatch.setattr(own, "federation", replace(own.federation, evaluation=evaluation))
    monkeypatch.setattr(own, "members", [replace(member, classes=classes)])
    text = card(model, "onnx", {"free_sizes": False, "largest_difference": 0}, Path("out"))
    if name == "images":
        inputs = model.example()
        wanted = own.findings(inputs).numpy()
    else:
        image = torch.randn(1, *model.size, *([1] if len(model.size) == 2 else []))
        flat = len(model.size) == 2
        inputs = neighbours(image, torch.arange(1), own.preprocessing.context) if flat else image[None]
        wanted = own.predict(image).voxels.numpy()
        wanted = np.moveaxis(wanted, -1, 0) if flat else wanted[None]
    with torch.no_grad():
        said = as_the_card_says(text, model.net(inputs).numpy())
    if name == "other_net":  # `predict` has 0 there
        said = np.nan_to_num(said)
    assert np.allclose(said, wanted, atol=1e-5, equal_nan=True)


def test_safetensors_hold_the_weights_and_what_they_are_of(run: Path, tmp_path: Path) -> None:
    export(
        run,
        "safetensors",
        tmp_path / "weights",
        model="local/a" if (run / "models/local/a.fa").exists() else "best",
    )
    with safe_open(tmp_path / "weights/model.safetensors", "pt") as file:
        about, weights = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert json.loads(about["labels"])["names"] == json.loads(about["classes"])
    chosen = json.loads(about["net"])
    net = nets.build(
        chosen.pop("name"),
        chosen,
        in_channels=int(about["in_channels"]),
        classes=len(json.loads(about["classes"])),
        spatial_dims=len(json.loads(about["preprocessing"])["patch"]),
        seed=1,
    )
    net.load_state_dict(weights)


def test_the_card_tells_data_results_and_limits(run: Path, tmp_path: Path) -> None:
    export(run, "safetensors", tmp_path / "weights")
    text = (tmp_path / "weights/model_card.md").read_text()
    info = json.loads((run / "run.json").read_text())
    for site, about in info["sites"].items():
        assert f"| {site} | {', '.join(name.replace('_', ' ') for name in about['annotated'])} |" in text
    for words in (
        "## Results",
        "95 % interval",
        "not a medical device",
        "Few annotated",
        "## Licence",
        "safe_open",
    ):
        assert words in text


def test_the_card_names_the_sites_that_trained_the_model(
    phantom: Path, phantom_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are only tested did not, nor did the others where sites train alone."""
    chosen = phantom_federation(phantom, phantom_cache) | {"rounds": 1, "method": {"name": "standalone"}}
    chosen["sites"][2]["role"] = "test"
    chosen["evaluation"] |= {"models": ["local"]}
    path = trained(chosen, tmp_path / "alone")
    own, other, tested = (site["name"] for site in chosen["sites"])
    model = subject(path, f"local/{own}")
    text = card(model, "safetensors", {}, Path("out"))
    assert f"Trained at site {own} alone (method `standalone`" in text
    assert f"SCAN.nii.gz --model local/{own} -o out/`" in text
    assert f"| {other} (not of this model) |" in text and f"| {tested} (tested only) |" in text
    assert f"Site {own} did not annotate: kidney. The model" in text
    assert re.findall("Few annotated training cases: (.*)\\.", text) == ["liver (3), spleen (3)"]
    model.trained.method = methods.get("fedavg")()  # of which no model is of one site
    run = read.read(path)
    sites = {**run.sites, tested: replace(run.sites[tested], annotated=("kidney", "tumour"))}
    monkeypatch.setattr(read, "read", lambda _: replace(run, sites=sites, classes=(*run.classes, "tumour")))
    text = card(model, "safetensors", {}, Path("out"))
    assert "Trained by federated learning (method" in text and "across 2 sites, each" in text
    assert "No training site annotated: tumour. The model" in text
    assert re.findall("Few annotated training cases: (.*)\\.", text) == ["liver (3), spleen (6), kidney (3)"]


@pytest.mark.parametrize(
    ("plain", "words"),
    [
        ({}, "on; training was not differentially private."),
        (
            {"privacy": {"mode": "local", "noise": 1.0, "delta": 1e-5}},
            "what each site sent was made differentially private for a site's data: ε 4.5 at δ 1e-05 by",
        ),
        (
            {"privacy": {"mode": "central", "noise": 1.0, "delta": 1e-5}},
            "the sum of what sites sent, against the server, was made differentially private for a site's data: ε 4.5",
        ),
        (
            {"privacy": {"mode": "local", "noise": 0.0, "delta": 1e-5}},
            "private for a site's data, but with noise 0, which promises nothing.",
        ),
        (
            {"dp_sgd": {"noise": 2.0, "delta": 1e-6, "randomness": "system"}},
            "on; sites trained by DP-SGD, for a case, trainings that were repeated after a fault or a resume counted each time: "
            "ε 7 at δ 1e-06 by",
        ),
        (
            {"dp_sgd": {"noise": 0.0, "delta": 1e-6, "randomness": "system"}},
            "a fault or a resume counted each time, but with noise 0, which promises nothing",
        ),
        (
            {"teachers": {"dp_sgd": {"noise": 2.0, "delta": 1e-6, "randomness": "seed"}}},
            "on; its teachers, and not the model itself, trained by DP-SGD, for a case, by noise that whoever knows "
            "the federation's seed can take off, but the log has no finite ε",
        ),
    ],
)
def test_the_card_promises_no_more_privacy_than_there_is(
    plain: dict[str, Any], words: str, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_method = {key: value for key, value in plain.items() if key != "privacy"}
    model = subject(run)
    method = model.plain["method"] | of_method
    model = replace(model, plain={**model.plain, "privacy": plain.get("privacy"), "method": method})
    found = read.read(run)
    (entry,) = found.rounds
    spent = {name: {"epsilon": epsilon} for name, epsilon in zip(found.sites, (3.0, 7.0, 5.0), strict=True)}
    rounds = (replace(entry, epsilon=4.5, sites=spent),)
    monkeypatch.setattr(read, "read", lambda _: replace(found, rounds=rounds))
    assert words in card(model, "safetensors", {}, Path("out"))


def test_errors_say_what_is_allowed_and_leave_what_is_there(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*arguments: str) -> str:
        assert main(["export", *arguments]) == 1
        return capsys.readouterr().err

    out = tmp_path / "out"
    assert "did you mean 'onnx'" in fails(str(run), "--to", "onx", "-o", str(out))
    assert "not a run folder" in fails(str(tmp_path), "--to", "onnx")
    assert "the local model 'z' does not exist" in fails(str(run), "--to", "onnx", "--model", "local/z")
    assert "allowed: best, last, local/<site>" in fails(str(run), "--to", "onnx", "--model", "first")
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    assert "it is no export" in fails(str(run), "--to", "safetensors", "-o", str(out), "--overwrite")
    (out / "mine.txt").rename(out / "model_card.md")  # a card of one's own makes no export of a folder
    assert "it is no export" in fails(str(run), "--to", "safetensors", "-o", str(out), "--overwrite")
    (out / "model_card.md").rename(out / "mine.txt")
    below = out / "mine.txt" / "below"
    assert f"-o {below}: cannot be written" in fails(str(run), "--to", "safetensors", "-o", str(below))
    assert [file.name for file in tmp_path.rglob("*") if file.is_file()] == ["mine.txt"]


def test_a_card_needs_a_record_that_is_whole(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = shutil.copytree(run, tmp_path / "run")
    for key, wanted in {"id": "a text", "seed": "a whole number", "n_parameters": "a whole number"}.items():
        info = json.loads((run / "run.json").read_text())
        del info[key]
        (cut / "run.json").write_text(json.dumps(info))
        assert main(["export", str(cut), "--to", "safetensors", "-o", str(tmp_path / "out")]) == 1
        assert f"run.json: has no {key}; {wanted} is expected" in capsys.readouterr().err
        assert not (tmp_path / "out").exists()


def test_several_nets_are_refused_and_a_sites_own_is_offered(
    phantom: Path, phantom_cache: Path, tmp_path: Path
) -> None:
    chosen = phantom_federation(phantom, phantom_cache) | {"rounds": 1, "method": {"name": "standalone"}}
    path = trained(chosen, tmp_path / "alone")
    with pytest.raises(FederationError, match="is 3 nets that speak together, and an export holds one"):
        export(path, "onnx")
    assert not (path / "exports").exists()


def test_a_missing_package_is_named(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedatlas.export.forms.find_spec", lambda name: None)
    with pytest.raises(FederationError, match=r"pip install 'fedatlas\[onnx\]'"):
        export(run, "onnx")


def test_what_is_extracted_is_complete_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "one.py").write_text(
        "import math\nLOW, HIGH = 1, 2\ndef area(r: 'Unknown') -> float:\n    return helper(r) * HIGH\n"
        "def helper(r):\n    return math.pi * r\ndef unused():\n    return 0\ndef wrong():\n    return nowhere\n"
    )
    made: dict[str, Any] = {}
    text = extracted("one", ["area"], "title")
    exec(text, made)
    assert made["area"](1) == 2 * np.pi and "unused" not in text
    with pytest.raises(ValueError, match="does not define nowhere"):
        extracted("one", ["wrong"], "title")
