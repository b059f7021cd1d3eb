"""Series in DICOM by the command line: predicted, trained on, evaluated; and no patient in what is printed or kept."""

import json
import shutil
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pydicom
import pytest
import yaml
from dicom_series import NAME, NUMBER, sample, write_series

from fedatlas.cli import main
from fedatlas.core.errors import RunFolderError
from fedatlas.core.labels import LabelSpace
from fedatlas.data.formats import dicom, drawings
from fedatlas.federation.file import hash_of, parse_federation
from fedatlas.federation.session import run_federation
from fedatlas.federation.usable import record_of

ORGANS = (
    "background",
    "brainstem",
    "spinal_cord",
    "right_parotid",
    "left_parotid",
    "esophagus",
    "larynx",
    "mandible",
)
CASES = ("hn_018", "hn_033", "hn_048")


def write_case(folder: Path, number: int, kind: str) -> None:
    """A bundled CT as a series, and two organs drawn on it."""
    voxels, affine, labels = sample(case=CASES[number], split="Tr")
    write_series(folder, voxels, affine, f"p{number}/ct", patient=f"{NUMBER}-{number}")
    volume = dicom.load(dicom.find([folder]).series[0])
    here = np.ascontiguousarray(labels[..., ::-1]) if affine[2, 2] < 0 else labels
    space = LabelSpace(ORGANS[:3])
    codes, _ = drawings.meanings(space, {})
    drawings.WRITERS[kind](folder / f"{kind}.dcm", here * (here < 3), volume, space, codes, "planner")


@pytest.fixture(scope="module")
def hospital(tmp_path_factory) -> Path:
    """A folder per patient, called by her name, as an export makes it."""
    root = tmp_path_factory.mktemp("hospital") / "data"
    for number, kind in enumerate(("seg", "rtstruct", "seg")):
        write_case(root / f"{NAME.replace('^', '_')} {number}", number, kind)
    return root


@pytest.fixture(scope="module")
def values(hospital, tmp_path_factory) -> dict[str, Any]:
    return {
        "name": "dicom",
        "labels": {"names": ORGANS[:3], "codes": {"brainstem": ["15926001", "SCT", "Brainstem"]}},
        "sites": [{"name": "h", "path": str(hospital), "format": "dicom"}],
        "preprocessing": {"spacing": [6, 6, 6], "window": [-200, 400], "patch": [32, 32], "context": 1},
        "net": {"name": "unet", "filters": [4, 8, 8]},
        "local": {"batch": 2, "steps": 2},
        "rounds": 1,
        "evaluation": {"validation": 0.34, "metrics": ["dice"], "models": ["best"]},
        "engine": {"cache": str(tmp_path_factory.mktemp("dicom-cache"))},
    }


@pytest.fixture(scope="module")
def trained(values, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    run_federation(parse_federation(values, base=folder.parent), folder, tell=lambda text: None)
    return folder


def asked(capsys, *arguments: Any) -> tuple[int, str, str]:
    capsys.readouterr()
    status = main([str(argument) for argument in arguments])
    return (status, *capsys.readouterr())


def write_nifti(folder: Path) -> Path:
    """The first case as NIfTI, on the grid of its series."""
    voxels, affine, _ = sample(case=CASES[0], split="Tr")
    folder.mkdir()
    nib.save(nib.Nifti1Image(voxels.astype(np.int16), affine), folder / "scan.nii.gz")  # type: ignore[attr-defined]
    return folder / "scan.nii.gz"


def test_a_series_is_predicted_as_its_nifti_is(trained, hospital, tmp_path, capsys) -> None:
    """And written as NIfTI, SEG and RTSTRUCT, which agree voxel by voxel."""
    folder = next(hospital.glob("*0"))
    nifti = write_nifti(tmp_path / "nifti")
    assert asked(capsys, "predict", trained, nifti, "-o", tmp_path / "out")[0] == 0
    (name,) = (series.name for series in dicom.find([folder]).series)
    for form in ("nifti", "seg", "rtstruct"):
        status, out, err = asked(capsys, "predict", trained, folder, "-o", tmp_path / "out", "--as", form)
        assert status == 0, err
        assert f"{name}_" in out and ("Spinal cord (SCT 2748008)" in err) == (form != "nifti")
        assert "brainstem:" not in err  # its code is in the federation file
    one: Any = nib.load(tmp_path / "out" / "scan_labels.nii.gz")  # type: ignore[attr-defined]
    two: Any = nib.load(tmp_path / "out" / f"{name}_labels.nii.gz")  # type: ignore[attr-defined]
    ours, theirs = (nib.as_closest_canonical(of) for of in (one, two))  # type: ignore[attr-defined]
    assert np.array_equal(ours.dataobj, theirs.dataobj) and np.allclose(ours.affine, theirs.affine, atol=1e-3)
    assert np.asarray(two.dataobj).any()
    for form in ("seg", "rtstruct"):
        (drawing,) = (
            dicom.find([*folder.glob("*ct*.dcm"), tmp_path / "out" / f"{name}_{form}.dcm"]).series[0].drawings
        )
        masks, _ = drawings.read_masks(list(drawing.masks()), two.shape, two.affine, name)
        for c, organ in enumerate(ORGANS[1:3], start=1):
            assert np.array_equal(masks[organ], np.asarray(two.dataobj) == c)
    seg = pydicom.dcmread(tmp_path / "out" / f"{name}_seg.dcm")
    assert seg.SegmentSequence[0].SegmentedPropertyTypeCodeSequence[0].CodeValue == "15926001"


def test_a_folder_of_series_is_evaluated_and_checked(trained, hospital, tmp_path, capsys, values) -> None:
    status, out, err = asked(capsys, "evaluate", trained, "--data", hospital, "--format", "dicom")
    assert status == 0 and "brainstem" in out, err
    (tmp_path / "f.yaml").write_text(json.dumps(values))
    status, out, err = asked(capsys, "check", tmp_path / "f.yaml")
    assert status == 0 and "site h: 2 train, 1 validation" in out, out + err


def test_organs_contoured_on_every_second_slice_are_told(hospital, tmp_path, capsys, values) -> None:
    """And no others are: the planner's own contours have no gap."""
    shutil.copytree(hospital, tmp_path / "sparse")
    (file,) = (tmp_path / "sparse").rglob("rtstruct.dcm")
    data = pydicom.dcmread(file)
    for roi in data.ROIContourSequence:
        places = sorted({float(contour.ContourData[2]) for contour in roi.ContourSequence})
        roi.ContourSequence = [c for c in roi.ContourSequence if float(c.ContourData[2]) in places[::2]]
    data.save_as(file)
    for folder, told in ((hospital, 0), (tmp_path / "sparse", 2)):
        site = values["sites"][0] | {"path": str(folder)}
        (tmp_path / "f.yaml").write_text(json.dumps(values | {"sites": [site]}))
        status, out, err = asked(capsys, "check", tmp_path / "f.yaml")
        assert status == 0 and (out + err).count("between the first and the last contour of") == told, (
            out + err
        )
    assert "contour of 'brainstem' are empty (up to 5" in out + err


def test_series_without_labels_are_not_evaluated(trained, hospital, tmp_path, capsys) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in next(hospital.glob("*0")).glob("*ct*.dcm"):
        (bare / file.name).write_bytes(file.read_bytes())
    status, _, err = asked(capsys, "evaluate", trained, "--data", bare, "--format", "dicom")
    assert status == 1 and "holds no labels, and scores need them; " in err and "1 series have no" in err


def test_codes_decide_no_result(values, tmp_path) -> None:
    without = values | {"labels": {"names": ORGANS[:3]}}
    assert hash_of(parse_federation(values, base=tmp_path)) == hash_of(
        parse_federation(without, base=tmp_path)
    )


def test_codes_may_be_added_to_a_finished_run(trained, tmp_path) -> None:
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    record_of(run)
    plain = yaml.safe_load((run / "federation.yaml").read_text())
    plain["labels"]["codes"] = {plain["labels"]["names"][1]: ["10200004", "SCT", "Liver"]}
    (run / "federation.yaml").write_text(yaml.safe_dump(plain))
    record_of(run)
    plain["rounds"] += 1
    (run / "federation.yaml").write_text(yaml.safe_dump(plain))
    with pytest.raises(RunFolderError, match="was changed after the run wrote it"):
        record_of(run)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (["{root}"], "holds 3 series; choose with --series, once for each. There are: case-"),
        (["{one}", "--series", "1.2.3"], "--series case-"),
        (["{empty}"], "a folder without a series of CT, MR or PET (0 other DICOM objects)"),
        (["{nifti}", "--as", "seg"], "--as seg: is for series in DICOM, to which it refers"),
        (["{nifti}", "--series", "1.2.3"], "--series: chooses among series in DICOM, and none was given"),
        (["{zip}"], "1 file not readable as DICOM (no archive that can be read"),
        (["{cut}"], "1 file not readable as DICOM (its header is cut off); export the series again"),
        (["{one}", "--store"], "--store: is for a PACS; give it with --dicomweb"),
        (["{one}", "-o", "{zip}"], "a.zip: is a file; give a folder for the result"),
        ([], "give scans, or a PACS with --dicomweb and --series; got neither"),
        (["{one}", "--dicomweb", "http://h/"], "got both"),
        (["--dicomweb", "http://h/"], "Give its Series Instance UID with --series"),
        (["--dicomweb", "http://h/", "--series", "1.2", "--store", "--as", "nifti"], "a PACS takes DICOM"),
        (
            ["--dicomweb", "http://u:p@h/", "--series", "1.2"],
            "the URL holds credentials, which others would see",
        ),
        (["--dicomweb", "ftp://h/", "--series", "1.2"], "not a URL of a DICOMweb service"),
        (["--dicomweb", "http://localhost:1/", "--series", "x y"], "--series: not a UID"),
        (["--dicomweb", "http://localhost:1/", "--series", "1.2"], "could not be reached; see that it runs"),
        (["--dicomweb", "http://localhost:1/", "--series", "1.2", "--timeout", "-1"], "seconds are above 0"),
        (["--dicomweb", "http://localhost:1/", "--series", "1.2", "--timeout", "inf"], "and 86400 at most"),
    ],
)
def test_what_is_asked_wrongly_is_a_sentence(given, text, trained, hospital, tmp_path, capsys) -> None:
    one = next(hospital.glob("*0"))
    places = {
        "root": hospital,
        "one": one,
        "empty": tmp_path / "empty",
        "zip": tmp_path / "a.zip",
        "cut": tmp_path / "cut",
    }
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.zip").write_bytes(b"PK none")
    (tmp_path / "cut").mkdir()
    for file in sorted(one.glob("*ct*.dcm"))[:3]:
        (tmp_path / "cut" / file.name).write_bytes(file.read_bytes())
    (tmp_path / "cut" / file.name).write_bytes(file.read_bytes()[:600])
    places["nifti"] = write_nifti(tmp_path / "nifti")
    arguments = [argument.format(**places) for argument in given]
    where = [] if "-o" in arguments else ["-o", tmp_path / "out"]
    status, out, err = asked(capsys, "predict", trained, *arguments, *where)
    assert status == 1 and out == "" and text in err.replace("\n", " "), err
    assert not (tmp_path / "out").exists() and "Traceback" not in err


def test_nothing_names_a_patient(values, hospital, trained, tmp_path, capsys) -> None:
    """Not the terminal, the run folder with its report, the cache, nor a result, but for objects in DICOM, which go into
    the patient's own study."""
    said = []
    federation = tmp_path / "f.yaml"
    federation.write_text(json.dumps(values))
    said.append(asked(capsys, "check", federation))
    said.append(asked(capsys, "report", trained))
    for number, form in enumerate(("nifti", "seg")):
        folder = next(hospital.glob(f"*{number}"))
        said.append(asked(capsys, "predict", trained, hospital, "-o", tmp_path / "out"))
        found = dicom.find([folder]).series[0]
        said.append(
            asked(
                capsys,
                "predict",
                trained,
                hospital,
                "--series",
                found.uid,
                "-o",
                tmp_path / "out",
                "--as",
                form,
                "--json",
            )
        )
        assert said[-1][0] == 0
    table = tmp_path / "rows.csv"
    said.append(asked(capsys, "evaluate", trained, "--data", hospital, "--format", "dicom", "--out", table))
    broken = tmp_path / "broken"
    write_case(broken / NAME, 0, "seg")
    sorted((broken / NAME).glob("*ct*"))[3].unlink()
    (broken / NAME / f"{NUMBER}.dcm").write_bytes(next((broken / NAME).glob("*ct*")).read_bytes()[:500])
    federation.write_text(json.dumps(values | {"sites": [values["sites"][0] | {"path": str(broken)}]}))
    said.append(asked(capsys, "check", federation))
    assert said[-1][0] == 1 and "slices are missing" in "".join(said[-1][1:])
    words = [word.lower().encode() for word in (*NAME.split("^"), NUMBER)]
    texts = {f"call {n}": "".join(map(str, of)).lower().encode() for n, of in enumerate(said)}
    kept = [trained, Path(values["engine"]["cache"]), tmp_path / "out", table]
    for place in kept:
        for file in [place] if place.is_file() else place.rglob("*"):
            if file.is_file() and file.suffix != ".dcm":
                texts[str(file)] = file.read_bytes().lower() + file.name.lower().encode()
    assert len(texts) > 20
    assert [name for name, text in texts.items() for word in words if word in text] == []
