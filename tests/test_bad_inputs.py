"""What a user may get wrong: every input here is refused by a sentence, before anything is computed, written or lost."""

import gzip
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import yaml
from PIL import Image
from test_check import checked, copied, texts

from fedatlas.cli import main
from fedatlas.core import memory
from fedatlas.core.contract import State
from fedatlas.core.errors import DataChanged, DataError, FederationError, RunFolderError, SiteLost
from fedatlas.data.datasets import csv as csv_table
from fedatlas.data.datasets.csv import CsvForm
from fedatlas.data.datasets.shared.listing import Layout, Splitting
from fedatlas.data.inputs import FAT, look_of, other_kind, ranges_of, trained_on
from fedatlas.evaluation.statistics import COLUMNS, read_rows, rows_text
from fedatlas.federation.across import join
from fedatlas.federation.deploy import write_shared
from fedatlas.federation.design import Experiment
from fedatlas.federation.file import load_federation, parse_federation
from fedatlas.federation.known import KNOWN
from fedatlas.federation.session import gather_local, run_federation
from fedatlas.federation.site import SiteDesk
from fedatlas.federation.trained import Trained
from fedatlas.federation.yaml import require_known
from fedatlas.phantoms.organs import phantom_sites
from fedatlas.report import page
from fedatlas.transport import wire
from fedatlas.transport.local import InProcess
from fedatlas.transport.rounds import Round, RunFolder
from fedatlas.transport.store import guard_data, write_atomic

GIB = 2**30


@pytest.fixture
def machine(monkeypatch) -> None:
    """A machine of 8 GiB."""
    monkeypatch.setattr(memory, "machine_memory", lambda: 8 * GIB)


# ------------------------------------------------------------------------------------------------------ memory


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"local": {"batch": 1_000_000, "steps": 1}},
            "training a site on batches of 1000000 samples of 3×16×16 takes",
        ),
        (
            {"net": {"name": "unet", "filters": [4096, 8192, 16384]}},
            "of memory or more, and this machine has 8.0 GiB",
        ),
        ({"preprocessing": {"patch": [100_000, 100_000]}}, "samples of 3×100000×100000 takes"),
    ],
)
def test_what_the_machine_cannot_hold_is_refused_at_once(changes, text, small, machine) -> None:
    for key, value in changes.items():
        small[key] = {**small[key], **value} if key != "net" else value
    federation = parse_federation(small, base=Path())
    experiment = Experiment(federation, Path(small["engine"]["cache"]))
    with pytest.raises(FederationError) as told:
        experiment.check_net()
    assert text in str(told.value)


def test_workers_train_at_the_same_time(small, machine, monkeypatch) -> None:
    federation = parse_federation(small, base=Path())
    experiment = Experiment(federation, Path(small["engine"]["cache"]))
    least = experiment.step_memory().least
    experiment.require_memory()
    monkeypatch.setattr(memory, "machine_memory", lambda: 2 * least)
    experiment.require_memory()
    small["engine"]["workers"] = 3
    several = Experiment(parse_federation(small, base=Path()), Path(small["engine"]["cache"]))
    with pytest.raises(FederationError, match="training 3 sites at a time .* or `engine.workers`"):
        several.require_memory()


@pytest.mark.parametrize(
    ("preprocessing", "text"),
    [
        ({"spacing": [0.01, 0.01, 0.01]}, "voxels of 0.01×0.01×0.01 mm it takes"),
        (
            {"spacing": [5000, 4, 4]},
            "mm long towards R, and `preprocessing.spacing` makes voxels of 5000 mm there",
        ),
        ({"context": 100}, "gives 100 slices on each side of a slice, and its longest scan has"),
    ],
)
def test_check_refuses_a_grid_that_makes_no_sense(preprocessing, text, small, tmp_path, machine) -> None:
    small["preprocessing"] |= preprocessing
    small["engine"]["cache"] = str(tmp_path / "cache")
    (told,) = texts(checked(small, tmp_path), fatal=True)
    assert told.startswith("site s0") and text in told


def test_more_rounds_than_a_run_can_count(small) -> None:
    with pytest.raises(FederationError, match="rounds: got 1000000000; .*999998 or less"):
        parse_federation(small | {"rounds": 1_000_000_000}, base=Path())


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("test", 0.3, r"test: is for classification, and the task is segmentation; .*sites\[\]\.split\.test"),
        (
            "threshold",
            "youden",
            "threshold: is for classification, and the task is segmentation; leave it out",
        ),
        ("bins", 5, "bins: is for classification"),
        ("draws", 5, "draws: is for classification"),
        ("histogram", 5, "histogram: is for classification"),
        ("batch", 5, "batch: is for classification"),
    ],
)
def test_evaluation_of_findings_is_refused_for_segmentation(key, value, text, small, tmp_path) -> None:
    small["evaluation"] |= {key: value}
    with pytest.raises(FederationError, match=f"evaluation: {text}"):
        parse_federation(small, base=Path())
    # a run of a version that ignored it is read as it is
    (tmp_path / "federation.yaml").write_text(yaml.safe_dump(small))
    (tmp_path / "run.json").write_text("{}")
    kept = load_federation(tmp_path / "federation.yaml")
    assert getattr(kept.evaluation, key) == value


@pytest.mark.parametrize(
    ("key", "value"), [("tolerance", 1.0), ("empty", "zero"), ("inference", {"overlap": 0.25})]
)
def test_evaluation_of_outlines_is_refused_for_findings(key, value, small_images) -> None:
    small_images["evaluation"] |= {key: value}
    with pytest.raises(FederationError, match=f"evaluation: {key}: is for segmentation, and the task is"):
        parse_federation(small_images, base=Path())


def test_an_axis_that_is_not_there_is_not_mirrored(small, small_images) -> None:
    flat = small | {"augmentation": {"mirror": [0, 2]}}
    for values in (flat, small_images | {"augmentation": {"mirror": [2]}}):
        with pytest.raises(
            FederationError, match="augmentation: mirror: got the axis 2, and .* have 2 axes; allowed: 0, 1"
        ):
            parse_federation(values, base=Path())
    flat["preprocessing"] |= {"patch": [16, 16, 16]}
    parse_federation(flat, base=Path())


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"rounds": True}, "rounds: got True"),
        ({"local": {"lr": True}}, "local.lr: got True"),
        ({"local": {"batch": False}}, "local.batch: got False"),
        ({"net": {"name": "unet", "filters": [True, 8, 8]}}, r"net: filters: got \[True, 8, 8\]"),
        ({"images": {"channels": True}}, "images.channels: got True"),
        ({"method": {"name": "fedatlas", "server_momentum": True}}, "method: server_momentum: got True"),
    ],
)
def test_true_is_no_number(change, text, small) -> None:
    with pytest.raises(FederationError, match=f"{text}; a number is expected, not (true|false)$"):
        parse_federation(small | change, base=Path())


def test_memory_is_not_known_where_the_system_does_not_say(monkeypatch) -> None:
    monkeypatch.setattr(memory, "_LIMITS", ())
    monkeypatch.delattr(memory.os, "sysconf_names")
    monkeypatch.setitem(sys.modules, "resource", None)  # as on Windows, where a bundle may run
    assert memory.machine_memory() is None


def test_memory_is_of_the_container(monkeypatch, tmp_path) -> None:
    (tmp_path / "memory.max").write_text(f"{3 * GIB}\n")
    (tmp_path / "none").write_text("max\n")
    monkeypatch.setattr(memory, "_LIMITS", (str(tmp_path / "none"), str(tmp_path / "memory.max")))
    assert memory.machine_memory() == min(3 * GIB, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


# ---------------------------------------------------------------------------------------------------- run folder


def hold(path: Path) -> int:
    """Another process that holds a run folder; its number."""
    told, tells = os.pipe()
    child = os.fork()
    if child == 0:
        with RunFolder(path).held(print):
            os.write(tells, b".")
            time.sleep(60)
        os._exit(0)
    assert os.read(told, 1) == b"."
    return child


def test_a_run_folder_is_for_one_process_and_free_after_a_kill(small, tmp_path) -> None:
    path = tmp_path / "one"
    other = hold(path)
    try:
        federation = parse_federation(small, base=tmp_path)
        with pytest.raises(
            RunFolderError, match=rf"process {other} on \S+, since .* works on this run; wait"
        ):
            run_federation(federation, path, tell=lambda text: None)
        assert sorted(file.name for file in path.iterdir()) == ["lock"]
    finally:
        os.kill(other, signal.SIGKILL)
        os.waitpid(other, 0)
    with RunFolder(path).held(print):
        pass


def test_a_log_that_was_changed_is_not_gone_on_with(tmp_path) -> None:
    folder = RunFolder(tmp_path)
    folder.save(Round(1, State({}), {"round": 1, "memory": {"a": "000001-000"}, "sites": {}}, []))
    assert folder.log(1)["memory"] == {"a": "000001-000"}
    file = tmp_path / "rounds" / "0001" / "log.json"
    log = json.loads(file.read_text())
    log["memory"]["a"] = "000000-000"
    file.write_text(json.dumps(log))
    with pytest.raises(
        RunFolderError, match="log.json: was changed after the run wrote it, in memory, round, sites"
    ):
        folder.log(1)
    del log["seal"]  # as older versions wrote it
    file.write_text(json.dumps(log))
    assert folder.log(1)["round"] == 1


# ------------------------------------------------------------------------------------------------- changed data


def kill(record: Any, best: Any) -> None:
    if record.number == 1:
        raise KeyboardInterrupt


def go(values: dict[str, Any], folder: Path, **how: Any) -> list[str]:
    told: list[str] = []
    run_federation(parse_federation(values, base=folder), folder / "run", tell=told.append, **how)
    return told


def change(image: Path) -> None:
    """One voxel, with the file's time as it was."""
    stat = image.stat()
    scan: Any = nib.load(image)  # type: ignore[attr-defined]
    voxels = np.asarray(scan.dataobj).copy()
    voxels[3, 3, 3] += 1
    nib.save(nib.Nifti1Image(voxels, scan.affine), image)  # type: ignore[attr-defined]
    os.utime(image, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))


def first_image(values: dict[str, Any], site: int = 0) -> Path:
    return sorted((Path(values["sites"][site]["path"]) / "imagesTr").iterdir())[0]


def test_a_run_does_not_go_on_with_changed_data_unless_told_to(small, tmp_path) -> None:
    values = copied(small, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        go(values, tmp_path, after_round=kill)
    image = first_image(values)
    case, site = image.name.removesuffix("_0000.nii.gz"), values["sites"][0]["name"]
    change(image)
    with pytest.raises(
        DataChanged, match=rf"site {site}: .*\(changed: \w+/{case}\); put them back.*--data-changed"
    ):
        go(values, tmp_path, resume=True)
    told = go(values, tmp_path, resume=True, gather=partial(gather_local, data_changed=True))
    assert f"goes on with data that changed since the run began, at {site}" in told
    info = json.loads((tmp_path / "run" / "run.json").read_text())
    assert info["data_changed"] == [{"after_round": 1, "sites": [site]}] and info["finished"]


def test_a_case_that_is_gone_is_found(small, tmp_path) -> None:
    values = copied(small, tmp_path)
    federation, folder = parse_federation(values, base=tmp_path), RunFolder(tmp_path / "run")
    gather_local(federation, folder, print)
    (folder.rounds / "0001").mkdir(parents=True)  # a complete round
    gather_local(federation, folder, print)
    image = first_image(values, 1)
    case = image.name.removesuffix("_0000.nii.gz")
    image.unlink()
    (image.parents[1] / "labelsTr" / f"{case}.nii.gz").unlink()
    with pytest.raises(DataChanged, match=rf"\(.*gone: \w+/{case}"):
        gather_local(federation, folder, print)


def test_a_run_without_a_complete_round_takes_the_data_as_they_are(tmp_path) -> None:
    file = tmp_path / "data.json"
    guard_data(file, {"train/a": "1"}, "s")
    guard_data(file, {"train/a": "2"}, "s", begins=True)
    assert not guard_data(file, {"train/a": "2"}, "s")
    file.write_text("[1")
    with pytest.raises(RunFolderError, match=r"data\.json: cannot be read"):
        guard_data(file, {}, "s")


class Desks(InProcess):
    """Sites that keep their data and folders to themselves, as deployed ones do, in this process."""

    def __init__(self, values: dict[str, Any], folder: Path) -> None:
        federation = parse_federation(values, base=folder)
        write_shared(federation, folder / "shared.yaml")
        cache = Path(values["engine"]["cache"])
        self.desks = {
            s.name: SiteDesk(
                s.name, folder / "shared.yaml", {s.name: str(s.path)}, folder / "at" / s.name, cache
            )
            for s in federation.sites
        }
        self.sites = sorted(self.desks)
        super().__init__(lambda question: self.desks[question.site].answer(question))


def test_of_changed_data_a_deployed_site_tells_no_case(small, tmp_path) -> None:
    values = copied(small, tmp_path)
    federation, folder = parse_federation(values, base=tmp_path), RunFolder(tmp_path / "run")
    joined: Any = partial(join, federation, folder, print)
    assert not joined(Desks(values, tmp_path)).changed
    (folder.rounds / "0001").mkdir(parents=True)  # a complete round
    image, name = first_image(values), values["sites"][0]["name"]
    case = image.name.removesuffix("_0000.nii.gz")
    change(image)
    with pytest.raises(SiteLost) as told:
        joined(Desks(values, tmp_path))
    assert f"{name}: DataChanged: its data are not those with which this run began" in str(told.value)
    assert case not in str(told.value)
    errors = (tmp_path / "at" / name / "errors.log").read_text()
    assert f"changed: train/{case}" in errors or f"changed: validation/{case}" in errors
    assert joined(Desks(values, tmp_path), data_changed=True).changed == [name]
    assert not joined(Desks(values, tmp_path)).changed


# ---------------------------------------------------------------------------------------------- damaged files


def at_end(packed: bytes) -> bytes:
    """A compressed file that is damaged in its checksum, which stands after all voxels."""
    damaged = bytearray(packed)
    damaged[-6] ^= 1
    return bytes(damaged)


def headed(packed: bytes, **fields: Any) -> bytes:
    """A compressed NIfTI file with other values in its header, as its unpacked bytes."""
    raw = gzip.decompress(packed)
    header = np.frombuffer(raw[:348], nib.Nifti1Header.template_dtype.newbyteorder("<")).copy()  # type: ignore[attr-defined]
    for name, value in fields.items():
        header[name] = value
    return header.tobytes() + raw[348:]


HEADERS = [
    ({"datatype": 9999}, "truncated or damaged (data code 9999 not recognized)"),
    ({"dim": [9, 30, 30, 20, 1, 1, 1, 1]}, "truncated or damaged (vox offset 0 too low"),
    ({"dim": [3, -5, 30, 20, 1, 1, 1, 1]}, "truncated or damaged ("),
    (
        {"dim": [3, *[32767] * 3, 1, 1, 1, 1], "datatype": 64, "bitpix": 64},
        "its header claims 32767×32767×32767 voxels, 262,120.0 GiB, more than memory holds",
    ),
]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (at_end, "truncated or damaged (CRC check failed"),
        *((lambda packed, f=fields: gzip.compress(headed(packed, **f)), text) for fields, text in HEADERS),
    ],
)
def test_a_damaged_image_is_named(change, text, small, tmp_path) -> None:
    values = copied(small, tmp_path)
    image = first_image(values)
    image.write_bytes(change(image.read_bytes()))
    (told,) = texts(checked(values, tmp_path), fatal=True)
    assert f"imagesTr/{image.name}: {text}" in told
    with pytest.raises(DataError) as raised:
        go(values, tmp_path)
    assert text in str(raised.value)


def test_a_loop_of_links_is_no_image(small, tmp_path) -> None:
    values = copied(small, tmp_path)
    image = first_image(values)
    image.unlink()
    image.symlink_to(image.name)
    told = texts(checked(values, tmp_path), fatal=True)
    assert any(f"imagesTr/{image.name}: " in text and "symbolic links" in text for text in told), told


# --------------------------------------------------------------------------------------- another kind of input


@pytest.fixture(scope="module")
def trained(tmp_path_factory, phantom, phantom_cache) -> Path:
    """A run of one round, whose training images are taken for CT in Hounsfield units."""
    folder = tmp_path_factory.mktemp("inputs")
    values = {
        "name": "one",
        "sites": phantom_sites(phantom),
        "preprocessing": {"spacing": [4, 4, 4], "window": [-100, 200], "patch": [16, 16], "context": 1},
        "net": {"name": "unet", "filters": [4, 8, 8]},
        "local": {"batch": 2, "steps": 1},
        "rounds": 1,
        "evaluation": {"validation": 0.25, "metrics": ["dice"], "overlays": False, "models": ["best"]},
        "engine": {"cache": str(phantom_cache)},
    }
    run_federation(parse_federation(values, base=folder), folder / "run", tell=lambda text: None)
    return folder / "run"


def site_of(phantom: Path) -> Path:
    return Path(phantom_sites(phantom)[0]["path"])


@pytest.fixture
def scan(phantom) -> Path:
    return sorted((site_of(phantom) / "imagesTs").iterdir())[0]


def saved(voxels: np.ndarray, like: Path, path: Path) -> Path:
    affine = nib.load(like).affine  # type: ignore[attr-defined]
    nib.save(nib.Nifti1Image(voxels, affine), path)  # type: ignore[attr-defined]
    return path


def voxels_of(path: Path) -> np.ndarray:
    return np.asarray(nib.load(path).dataobj)  # type: ignore[attr-defined]


def asked(capsys, *arguments: Any) -> tuple[int, str]:
    status = main([str(argument) for argument in arguments])
    return status, capsys.readouterr().err


def test_ranges_of_all_sites_are_kept_without_names(trained, phantom) -> None:
    info = json.loads((trained / "run.json").read_text())
    known = trained_on(info)
    assert (
        known and known["kinds"] == ["scan"] and known["axes"] == [3] and known["percentiles"][0][0][1] < FAT
    )
    case = sorted((site_of(phantom) / "imagesTr").iterdir())[0].name.removesuffix("_0000.nii.gz")
    assert case and case not in json.dumps(info["sites"])
    assert trained_on({"sites": {"a": {"role": "train"}}}) is None


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda v: (v - v.min()).astype(np.float32), "none below 0, and every training image held such of"),
        (lambda v: v[:, :, :1], "is a single slice, and the model was trained on volumes"),
    ],
)
def test_a_scan_of_another_kind_is_refused(change, text, trained, scan, tmp_path, capsys) -> None:
    other = saved(change(voxels_of(scan)), scan, tmp_path / "other.nii.gz")
    status, error = asked(capsys, "predict", trained, other, "-o", tmp_path / "out")
    assert status == 1 and text in error and "--anyway" in error and not (tmp_path / "out").exists()
    status, error = asked(capsys, "predict", trained, other, "-o", tmp_path / "out", "--anyway")
    assert status == 0 and f"note: {other}: " in error and text in error


def test_a_label_map_is_no_image(trained, phantom, tmp_path, capsys) -> None:
    label = sorted((site_of(phantom) / "labelsTr").iterdir())[0]
    status, error = asked(capsys, "predict", trained, label, "-o", tmp_path / "out")
    assert status == 1 and "it looks like a label map" in error


@pytest.mark.parametrize(("fields", "text"), HEADERS)
def test_predict_names_a_scan_with_a_damaged_header(fields, text, trained, scan, tmp_path, capsys) -> None:
    file = tmp_path / "scan.nii"
    file.write_bytes(headed(scan.read_bytes(), **fields))
    status, error = asked(capsys, "predict", trained, file, "-o", tmp_path / "out")
    assert status == 1 and f"{file}: {text}" in error and not (tmp_path / "out").exists()


def test_a_picture_is_no_scan(trained, tmp_path, capsys) -> None:
    picture = tmp_path / "chest.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64)).astype(np.uint8)).save(picture)
    status, error = asked(capsys, "predict", trained, picture, "-o", tmp_path / "out")
    assert status == 1 and "is a picture, and the model was trained on scans (NIfTI)" in error


def test_a_scan_outside_of_the_training_ranges_is_told(trained, scan, tmp_path, capsys) -> None:
    affine = np.diag([9.0, 9.0, 9.0, 1.0])
    far = nib.Nifti1Image(voxels_of(scan).astype(np.float32) * 10, affine)  # type: ignore[attr-defined]
    nib.save(far, tmp_path / "far.nii.gz")  # type: ignore[attr-defined]
    status, error = asked(capsys, "predict", trained, tmp_path / "far.nii.gz", "-o", tmp_path / "out")
    assert status == 0 and "voxels of 9×9×9 mm; the training images had" in error
    assert "(1st, 99th and 50th percentile)" in error
    status, error = asked(capsys, "predict", trained, scan, "-o", tmp_path / "other")
    assert status == 0 and error == ""


def test_evaluate_refuses_a_folder_of_another_kind(trained, phantom, tmp_path, capsys) -> None:
    shutil.copytree(site_of(phantom), tmp_path / "mr")
    for image in sorted((tmp_path / "mr").glob("images*/*")):
        voxels = voxels_of(image)
        saved((voxels - voxels.min()).astype(np.float32), image, image)
    status, error = asked(capsys, "evaluate", trained, "--data", tmp_path / "mr")
    assert status == 1 and "imagesT" in error and "none below 0" in error


def test_a_run_of_an_older_version_predicts_with_a_note(trained, scan, tmp_path, capsys) -> None:
    old = shutil.copytree(trained, tmp_path / "old")
    info = json.loads((old / "run.json").read_text())
    del info["seal"]
    for site in info["sites"].values():
        del site["inputs"]
    info["versions"]["torch"] = "1.0.0"
    (old / "run.json").write_text(json.dumps(info))
    status, error = asked(capsys, "predict", old, scan, "-o", tmp_path / "out")
    assert status == 0 and "does not say what its model was trained on" in error
    assert "was made by other versions (torch 1.0.0 then, " in error


def test_colour_modality_and_label_maps_of_pictures() -> None:
    rng = np.random.default_rng(0)
    grey = rng.integers(0, 256, (1, 40, 40)) / np.float32(255)
    known = ranges_of(
        [look_of(grey, picture=True, modality="DX"), look_of(grey, picture=True, modality="CR")]
    )
    assert known and other_kind(known, look_of(grey, picture=True, modality="DX")) == ""
    assert "in colour" in other_kind(known, look_of(grey, picture=True, colour=True))
    assert "of the modality CT" in other_kind(known, look_of(grey, picture=True, modality="CT"))
    labels = rng.integers(0, 4, (1, 40, 40)) / np.float32(255)
    assert "label map" in other_kind(known, look_of(labels, picture=True))


# ------------------------------------------------------------------------------------------- what is in the way


def test_predict_replaces_nothing_and_writes_not_among_its_inputs(trained, scan, tmp_path, capsys) -> None:
    shutil.copy(scan, tmp_path / "a,b.nii.gz")
    own, out = tmp_path / "a,b.nii.gz", tmp_path / "out"
    status, error = asked(capsys, "predict", trained, own, "-o", tmp_path)
    assert status == 1 and f"-o {tmp_path}: is the folder of a,b.nii.gz" in error
    assert asked(capsys, "predict", trained, own, "-o", out) == (0, "")
    status, error = asked(capsys, "predict", trained, own, "-o", out)
    assert status == 1 and "a,b_labels.nii.gz: exists already" in error
    assert asked(capsys, "predict", trained, own, "-o", out, "--overwrite") == (0, "")
    status, error = asked(capsys, "predict", trained, tmp_path, "-o", out)
    assert status == 1 and f"{tmp_path}: a folder" in error


def test_a_format_that_does_not_exist(trained, phantom, capsys) -> None:
    status, error = asked(capsys, "evaluate", trained, "--data", site_of(phantom), "--format", "nnunett")
    assert status == 1 and "--format: the layout 'nnunett' does not exist; did you mean 'nnunet'?" in error


def nested(depth: int = 100_000) -> str:
    return '{"a":' * depth + "1" + "}" * depth


def malformed(tree: Any) -> bytes:
    """A message whose structure is not of our making, with a digest that is right."""
    text = json.dumps(
        {"__metadata__": {"tree": tree if isinstance(tree, str) else json.dumps(tree)}}
    ).encode()
    body = len(text).to_bytes(8, "little") + text
    return wire.MAGIC + hashlib.sha256(body).digest() + body


@pytest.mark.parametrize(
    ("file", "change", "text"),
    [
        ("run.json", lambda old: nested(), "run.json: cannot be read (nested too deeply)"),
        (
            "run.json",
            lambda old: old.replace('"channels": 1', '"channels": ' + "1" * 400),
            "run.json: cannot be read (a whole number of 400 digits)",
        ),
        ("run.json", lambda old: "[]", "run.json: lacks labels, channels, hash, sites"),
        ("run.json", lambda old: old.replace('"labels"', '"lables"'), "run.json: lacks labels"),
        (
            "run.json",
            lambda old: old.replace('"liver"', '"lever"'),
            "run.json: was changed after the run wrote it",
        ),
        (
            "run.json",
            lambda old: old.replace('"channels": 1', '"channels": 2'),
            "was changed after the run wrote it",
        ),
        (
            "federation.yaml",
            lambda old: old.replace("seed: 0", "seed: 1"),
            "federation.yaml: was changed after the run",
        ),
        ("federation.yaml", lambda old: nested(), "federation.yaml: cannot be read (nested too deeply)"),
        ("models/best.fa", lambda old: malformed(nested()), "best.fa: cannot be read (message: its header"),
        (
            "models/best.fa",
            lambda old: malformed(["d", "text"]),
            "best.fa: cannot be read (message: its structure",
        ),
        (
            "models/best.fa",
            lambda old: malformed(["d", {"round": ["l", 5]}]),
            "cannot be read (message: its structure",
        ),
        (
            "models/best.fa",
            lambda old: wire.encode({"model": {}, "round": 1, "rounds": 1}),
            "tensors do not fit",
        ),
        (
            "models/best.fa",
            lambda old: wire.encode({"model": ["x"], "round": 1, "rounds": 1}),
            "holds something else than tensors",
        ),
    ],
)
def test_run_folders_that_were_made_to_harm(file, change, text, trained, scan, tmp_path, capsys) -> None:
    run = shutil.copytree(
        trained, tmp_path / "run", ignore=shutil.ignore_patterns("rounds", "sites", "scratch")
    )
    path = run / file
    made = change(path.read_bytes() if path.suffix == ".fa" else path.read_text())
    path.write_bytes(made.encode() if isinstance(made, str) else made)
    status, error = asked(capsys, "predict", run, scan, "-o", tmp_path / "out")
    assert status == 1 and text in error, error


def less(trained: Path, folder: Path) -> Path:
    """A copy of a run without its states."""
    return shutil.copytree(trained, folder, ignore=shutil.ignore_patterns("rounds", "sites", "scratch"))


@pytest.mark.parametrize(
    ("file", "made", "text"),
    [
        ("best.json", "null", "best.json: holds null; an object is expected"),
        ("best.json", "[]", "best.json: holds a list; an object is expected"),
        ("best.json", "{}", "best.json: has no round; a whole number is expected"),
        ("best.json", '{"round": "two"}', 'best.json: round is "two"; a whole number is expected'),
        ("best.json", '{"round": true}', "best.json: round is true; a whole number is expected"),
        ("best.json", '{"round": 1, "sites": []}', "sites is a list; an object or null is expected"),
        ("best.json", '{"round": 1, "sites": {"a": 5}}', "best.json, a: holds 5; an object is expected"),
        ("run.json", "[]", "run.json: holds a list; an object is expected"),
        ("run.json", {"hash": 7}, "run.json: hash is 7; a text or null is expected"),
        ("run.json", {"versions": 7}, "run.json: versions is 7; an object or null is expected"),
        ("run.json", {"machine": []}, "run.json: machine is a list; an object or null is expected"),
        ("run.json", {"sites": {"a": 5}}, "run.json, a: holds 5; an object is expected"),
        (
            "run.json",
            {"labels": {"names": ["a"], "findings": 7}},
            "run.json, labels: findings is 7; a list or null is expected",
        ),
        ("run.json", nested(), "run.json: not valid JSON ("),
        ("run.json", {"sites": {"\ud800": {}}}, "run.json: not valid JSON ("),
        ("rounds/0001/log.json", "[]", "log.json: holds a list; an object is expected"),
        ("rounds/0001/log.json", '{"round": "x"}', 'round is "x"; a whole number or null is expected'),
        ("rounds/0001/log.json", '{"cost": 3}', "log.json, cost: holds 3; an object is expected"),
        ("rounds/0001/rows.json", "{}", "rows.json: a list of rows is expected"),
        ("rounds/0001/rows.json", "[3]", "rows.json, row 1: holds 3; an object is expected"),
    ],
)
def test_a_report_of_a_damaged_run_folder(file, made, text, trained, tmp_path) -> None:
    run = shutil.copytree(trained, tmp_path / "run")
    if isinstance(made, dict):
        made = json.dumps(json.loads((run / file).read_text()) | made)
    (run / file).write_text(made)
    with pytest.raises(RunFolderError) as told:
        page.write(run, tmp_path / "report.html")
    assert text in str(told.value) and str(run / file) in str(told.value)


def test_figure_pages_need_a_record_that_is_an_object(trained, tmp_path, capsys) -> None:
    run = less(trained, tmp_path / "run")
    (run / "run.json").write_text("[]")
    status, error = asked(capsys, "report", run)
    assert status == 1 and "no figure pages: " in error
    assert error.count(f"{run / 'run.json'}: holds a list; an object is expected") == 2


@pytest.mark.parametrize(
    ("made", "text"),
    [
        ([], "thresholds.json: holds a list; an object is expected"),
        ({}, "thresholds.json: has no models; an object is expected"),
        ({"models": []}, "thresholds.json: models is a list; an object is expected"),
        ({"models": {"best": []}}, "thresholds.json, best: holds a list; an object is expected"),
        ({"models": {"best": {"liver": 3}}}, "thresholds.json, best, liver: holds 3; an object is expected"),
        ({"models": {"best": {"liver": {"value": "high"}}}}, 'liver: value is "high"; a whole number or a'),
    ],
)
def test_thresholds_that_are_none(made, text, trained, tmp_path) -> None:
    run = less(trained, tmp_path / "run")
    model = Trained(run)
    assert model.thresholds()["liver"].value is None
    (run / "thresholds.json").write_text(json.dumps(made))
    with pytest.raises(RunFolderError) as told:
        model.thresholds()
    assert text in str(told.value)


def test_a_model_that_is_not_finite_says_nothing(trained, scan, tmp_path, capsys) -> None:
    run = shutil.copytree(trained, tmp_path / "run")
    path = run / "models" / "best.fa"
    tree: Any = wire.decode(path.read_bytes())
    next(iter(tree["model"].values())).fill_(float("nan"))
    path.write_bytes(wire.encode(tree))
    status, error = asked(capsys, "predict", run, scan, "-o", tmp_path / "out")
    assert status == 1 and "model best: holds numbers that are not finite" in error


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"net": {"name": "unet", "filters": [1_000_000] * 3}}, "parameters on a sample of"),
        (
            {"preprocessing": {"spacing": [4, 4, 4], "window": [-100, 200], "patch": [100_000] * 2}},
            "100000×100000 takes",
        ),
    ],
)
def test_a_federation_that_does_not_fit_in_memory(
    change, text, trained, scan, tmp_path, capsys, machine
) -> None:
    run = shutil.copytree(
        trained, tmp_path / "run", ignore=shutil.ignore_patterns("rounds", "sites", "scratch")
    )
    values = yaml.safe_load((run / "federation.yaml").read_text()) | change
    (run / "federation.yaml").write_text(yaml.safe_dump(values))
    info = json.loads((run / "run.json").read_text())
    del info["seal"], info["federation"]
    (run / "run.json").write_text(json.dumps(info))
    status, error = asked(capsys, "predict", run, scan, "-o", tmp_path / "out")
    assert status == 1 and text in error and "this machine has 8.0 GiB" in error


# ------------------------------------------------------------------------------------------- unclear ones


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"sites": []}, "sites: has 0 entries; 1 or more are needed"),
        (
            {"sites": {"a": {"path": "x"}}},
            "sites: is a mapping; expected a list, whose entries begin with a dash",
        ),
        (
            {"sites": [{"name": "a", "path": "."}, {"name": "A", "path": "."}]},
            "'a' and 'A' differ in capitals alone",
        ),
        ({"sites": [{"name": "a" * 300, "path": "."}]}, "at most 100 characters"),
        ({"name": "a" * 300}, "at most 100 characters"),
    ],
)
def test_sites_and_names(small, change, text) -> None:
    with pytest.raises(FederationError) as told:
        parse_federation(small | change, base=Path())
    assert text in str(told.value)


@pytest.mark.parametrize("verb", ["check", "run"])
@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            "local.leraning=1",
            "-o local.leraning=1: the key 'local.leraning' does not exist; known: optimizer, lr,",
        ),
        ("net.filtres=3", "-o net.filtres=3: the key 'filtres' does not exist; did you mean 'filters'?"),
        ("sites.s1.paht=x", "federation.yaml: the key 'sites.1.paht' does not exist; did you mean 'path'?"),
        ("local.lr=high", "-o local.lr=high: local.lr: got 'high'"),
    ],
)
def test_who_gave_a_key_is_blamed(verb, given, text, small, tmp_path, capsys) -> None:
    file = tmp_path / "federation.yaml"
    file.write_text(yaml.safe_dump(small))
    status, error = asked(capsys, verb, file, "-o", given, "--runs", tmp_path / "runs")
    assert status == 1 and text in error
    assert "lr_min'?" not in error


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ("seed: 2020-13-45", "'2020-13-45' is no timestamp that can be used"),
        ("seed: 0x" + "f" * 5000, "is no int that can be used"),
        ("seed: " + "9" * 5000, "is no int that can be used"),
        ("seed: 1:2:3", "'1:2:3' is no int that can be used"),
        ("local: {lr: 1:30.5}", "'1:30.5' is no float that can be used"),
        ("seed: !!bool x", "'x' is no bool that can be used"),
        ("seed: !!timestamp x", "'x' is no timestamp that can be used"),
        ('sites: [{name: a, path: "a\\0b"}]', "'a\\x00b' is no str that can be used"),
        ('sites: [{name: a, path: "\\ud800"}]', "'\\ud800' is no str that can be used"),
        (
            "sites: [{name: a, path: ~nobody-here/ct}]",
            "~nobody-here is the folder of a user whom this machine",
        ),
        ("init_from: ~nobody-here/run", "~nobody-here is the folder of a user whom this machine"),
        ("sites: [{name: a, path: loop}]", "loop': is no path that can be followed"),
        ("extends: loop", "loop': is no path that can be followed"),
        ("extends: [a.yaml, b.yaml]", "extends: got ['a.yaml', 'b.yaml']; the name of one file is expected"),
        ("extends: ''", "extends: got ''; the name of one file is expected"),
    ],
)
def test_values_and_paths_that_can_be_none(written, text, tmp_path, capsys) -> None:
    (tmp_path / "loop").symlink_to("loop")
    file = tmp_path / "federation.yaml"
    file.write_text(f"name: trial\n{written}\n")
    status, error = asked(capsys, "check", file)
    assert status == 1 and error.startswith("error: ") and text in error
    assert ("line 2" in error) == ("can be used" in text)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_a_terminal_without_our_letters(encoding) -> None:
    command = [sys.executable, "-m", "fedatlas", "run", "--help"]
    said = subprocess.run(
        command, env=os.environ | {"PYTHONIOENCODING": encoding}, capture_output=True, check=False
    )
    assert said.returncode == 0 and said.stderr == b""
    assert ("\u2026" in said.stdout.decode(encoding)) == (encoding == "utf-8")


def test_a_cache_of_an_unknown_user_and_links_in_a_loop(small, tmp_path, capsys) -> None:
    file = tmp_path / "federation.yaml"
    file.write_text(yaml.safe_dump(small))
    status, error = asked(capsys, "check", file, "-o", "engine.cache=~nobody-here/x")
    assert status == 1 and "error: ~nobody-here/x: ~nobody-here is the folder of a user" in error
    loop = tmp_path / "loop"
    loop.symlink_to("loop")
    for verb in (["init", loop], ["describe", loop], ["compare", loop]):
        out = [] if verb[0] == "compare" else ["-o", tmp_path / "out"]
        status, error = asked(capsys, *verb, *out)
        assert status == 1 and error.startswith("error: ") and str(loop) in error


@pytest.mark.parametrize(
    ("change", "written"),
    [
        ({"local.steps": 3}, "the key 'local.steps' does not exist; write local: {steps: …}"),
        (
            {"evaluation": {"inference.merge": "mean"}},
            "'evaluation.inference.merge' does not exist; write inference: {merge: …}",
        ),
        ({"evaluation.inference.merge": "mean"}, "write evaluation: {inference: {merge: …}}"),
    ],
)
def test_a_key_with_points_is_shown_as_a_file_has_it(change, written, small, tmp_path, capsys) -> None:
    """Arms of a comparison and -o have such keys; both the first look at a file and the whole reading know them."""
    file = tmp_path / "federation.yaml"
    file.write_text(yaml.safe_dump(small | change))
    status, error = asked(capsys, "check", file)
    assert status == 1 and written in error
    with pytest.raises(FederationError) as told:
        load_federation(file)
    assert written in str(told.value)


@pytest.fixture
def current() -> None:
    """Code that was not changed since known.json was made of it, which a test of the documentation sees to."""
    os.utime(KNOWN)


def test_the_first_look_at_keys_says_what_the_whole_reading_says(small, tmp_path, current) -> None:
    file = tmp_path / "federation.yaml"
    for key in (
        "local.leraning",
        "rouns",
        "net.filtres",
        "method.foo",
        "labels.nams",
        "evaluation.inference.blnd",
    ):
        file.write_text(yaml.safe_dump(small))
        with pytest.raises(FederationError) as first:
            require_known(file, [f"{key}=1"])
        with pytest.raises(FederationError) as whole:
            load_federation(file, [f"{key}=1"])
        assert str(first.value).partition("known:")[0] in str(whole.value)
    require_known(file)


def test_lists_and_misspelt_keys_need_neither_torch_nor_numpy(small, tmp_path, current) -> None:
    file = tmp_path / "federation.yaml"
    file.write_text(yaml.safe_dump(small))
    code = (
        "import sys\nfrom fedatlas.cli import main\n"
        f"assert main(['check', {str(file)!r}, '-o', 'rouns=2']) == 1\n"
        "assert main(['list', 'methods']) == 0\n"
        "heavy = {'torch', 'monai', 'numpy'} & set(sys.modules)\nassert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "condistfl" in done.stdout and "'rouns' does not exist; did you mean 'rounds'?" in done.stderr


def test_a_place_for_runs_that_cannot_be_written(small, tmp_path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(
        RunFolderError, match="cannot be made or written .*; choose another place with --runs"
    ):
        run_federation(parse_federation(small, base=tmp_path), tmp_path / "runs" / "one")


@pytest.mark.parametrize(
    ("cut", "text"), [(-5, "it ends within line 3"), (None, "line 3 has not as many columns as its header")]
)
def test_a_table_of_results_that_was_cut_off(cut, text, tmp_path) -> None:
    row = {"split": "test", "grid": "original", "model": "best", "round": 1, "site": "a", "case": "x"}
    row |= {"class": "liver", "metric": "dice", "value": 0.5, "known": True, "reason": "because"}
    file = tmp_path / "rows.csv"
    write_atomic(file, rows_text([row, row]).encode())
    assert len(read_rows(file)) == 2
    whole = file.read_text()
    file.write_text(whole[:cut] if cut else whole.rpartition(",")[0] + "\n")
    with pytest.raises(RunFolderError, match=text):
        read_rows(file)


@pytest.mark.parametrize(
    ("made", "text"),
    [
        ("", "its first line is '': no 'split', 'grid', 'model', 'round', "),
        ("a,b\n", "its first line is 'a,b': no 'split', 'grid', "),
        (",".join(COLUMNS).replace("split", "splitt") + "\n", "its first line is 'splitt,.*': no 'split'"),
        (
            ",".join((*COLUMNS, "more")) + "\n",
            "its first line is 'split,.*,more': 'split,.*,reason' is expected",
        ),
        (",".join(COLUMNS) + "\n" + "x" * 200_000 + "\n", "field larger than field limit"),
    ],
)
def test_a_table_of_results_has_the_header_that_is_written(made, text, trained, tmp_path, capsys) -> None:
    run = less(trained, tmp_path / "run")
    (run / "rows.csv").write_text(made)
    status, error = asked(capsys, "report", run)
    assert status == 1 and re.search(rf"rows\.csv: no whole table of results \({text}", error), error


def test_a_row_that_is_there_twice_is_named_by_its_lines(tmp_path) -> None:
    Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8)).save(tmp_path / "a.png")
    (tmp_path / "labels.csv").write_text("file,mass\na.png,1\na.png,0\n")
    form = CsvForm(table="labels.csv", file="file")  # type: ignore[call-arg]
    found = csv_table.read(Layout("s", tmp_path, options=form, splitting=Splitting(test=0, validation=0)))  # type: ignore[call-arg]
    (problem,) = [p for p in found.problems if p.fatal]
    assert str(problem) == "site s: labels.csv, line 3: 'a.png' is listed in line 2, too; take one row out"


def test_skew_axes_are_told(small, tmp_path) -> None:
    values = copied(small, tmp_path)
    image = first_image(values)
    affine = nib.load(image).affine.copy()  # type: ignore[attr-defined]
    affine[1, 2] = 0.3 * affine[2, 2]
    for file in (image, *image.parents[1].glob(f"labelsTr*/{image.name.replace('_0000', '')}")):
        nib.save(nib.Nifti1Image(voxels_of(file).copy(), affine), file)  # type: ignore[attr-defined]
    (told,) = [text for text in texts(checked(values, tmp_path), fatal=False) if "right angle" in text]
    assert "its axes are 16.7° off a right angle" in told
