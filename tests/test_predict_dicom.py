"""What `predict` makes of files, folders and archives with series in DICOM, by a model that draws all that is bright."""

import csv
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nibabel as nib
import numpy as np
import pydicom
import pytest
import torch
from dicom_series import uid, write_series

from fedatlas.core.errors import DataError, FedAtlasError, FederationError
from fedatlas.core.labels import LabelSpace
from fedatlas.data import exports
from fedatlas.data.formats import dicom
from fedatlas.data.transforms import Preprocessing
from fedatlas.federation import predict
from fedatlas.learning.inference import Prediction

AFFINE = np.diag([-2.0, -2.0, 3.0, 1.0])
SHAPE = (12, 10, 4)
CT, MR = uid("p1/ct"), uid("p2/mr")


def voxels_of(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(-1000, 1500, SHAPE)


class Bright:
    """A model of scans: what is above 250 HU is the liver. It tells which site's model it took."""

    inputs: Any = {"kinds": ["scan"]}  # noqa: RUF012
    space = LabelSpace(("background", "liver"))
    preprocessing = Preprocessing(window=(-1000, 1500), patch=(8, 8))
    federation = SimpleNamespace(labels=SimpleNamespace(codes={"liver": ("10200004", "SCT", "Liver")}))
    channels = 1
    told: torch.Tensor | None = None

    def __init__(self, *given: Any) -> None:
        pass

    def predict(self, image: torch.Tensor) -> Any:
        bright = (image[0] > 0.5).float()
        return Prediction(torch.stack([1 - bright, bright]), self.told)

    def choice(self, found: Any) -> dict[str, str]:
        return {"chosen": "north"}


@pytest.fixture
def model(monkeypatch) -> type[Bright]:
    made = type("Model", (Bright,), {})
    monkeypatch.setattr(predict, "Trained", made)
    monkeypatch.setattr(predict, "judge", lambda *given, **how: [])
    return made


@pytest.fixture
def folder(tmp_path) -> Path:
    """Two series below one folder."""
    write_series(tmp_path / "in" / "a", voxels_of(1), AFFINE, "p1/ct")
    write_series(tmp_path / "in" / "b", voxels_of(2), AFFINE, "p2/mr", modality="MR")
    return tmp_path / "in"


def given(*paths: Path, series: Sequence[str] = (), kinds: Sequence[str] = ("scan",)) -> list[predict.Given]:
    trained: Any = SimpleNamespace(inputs={"kinds": list(kinds)})
    return predict._given([[path] for path in paths], series, trained)


def described(found: Sequence[predict.Given]) -> list[tuple[str, int]]:
    return [(one.series.uid, len(one.series.parts)) for one in found if one.series]


# ------------------------------------------------------------------------------------------------ what is given


def test_loose_slices_are_one_series_in_the_place_of_the_first(folder, tmp_path) -> None:
    """However often one of them is given, and whatever stands between them; they go by the pseudonym alone."""
    a, b = sorted((folder / "a").iterdir()), tmp_path / "scan.nii.gz"
    found = given(a[2], folder / "b", a[2], b, *a)
    assert described(found) == [(CT, 4), (MR, 4)] and [one.files for one in found] == [(), (), (b,)]
    assert [one.shown for one in found] == [
        dicom.pseudonym(CT),
        f"{folder / 'b'} {dicom.pseudonym(MR)}",
        str(b),
    ]


def test_loose_slices_are_pictures_to_a_model_of_pictures(folder) -> None:
    a = sorted((folder / "a").iterdir())
    assert [one.files for one in given(*a, kinds=["picture"])] == [(file,) for file in a]


@pytest.mark.parametrize("call", [str, dicom.pseudonym], ids=["uid", "pseudonym"])
@pytest.mark.parametrize("where", ["folder", "folders", "slices", "archives"])
def test_a_series_is_chosen_wherever_it_lies(call, where, folder, tmp_path) -> None:
    for name in "ab":
        shutil.make_archive(str(tmp_path / name), "zip", folder / name)
    places = {
        "folder": [folder],
        "folders": [folder / "a", folder / "b"],
        "slices": sorted(folder.rglob("*.dcm")),
        "archives": [tmp_path / "a.zip", tmp_path / "b.zip"],
    }[where]
    assert described(given(*places, series=[call(MR)])) == [(MR, 4)]
    both = given(*places, series=[call(MR), call(CT)])
    assert sorted(described(both)) == sorted([(MR, 4), (CT, 4)])
    if where in ("folders", "archives"):
        assert described(given(*places)) == [(CT, 4), (MR, 4)]


def test_series_of_one_folder_go_by_their_pseudonyms(folder) -> None:
    found = given(folder, series=[CT, MR])
    assert [one.shown for one in found] == [one.name for one in found] != []


@pytest.mark.parametrize("where", ["folder", "slices"])
def test_several_series_are_an_error_that_lists_them(where, folder) -> None:
    paths = [folder] if where == "folder" else sorted(folder.rglob("*.dcm"))
    with pytest.raises(DataError) as told:
        given(*paths)
    there = sorted([f"{dicom.pseudonym(CT)} (CT, 4 objects)", f"{dicom.pseudonym(MR)} (MR, 4 objects)"])
    wanted = "holds 2 series; choose with --series, once for each. There are: " + "; ".join(there)
    assert str(told.value) == f"{folder if where == 'folder' else '8 files'}: {wanted}"


def test_a_series_that_is_nowhere_is_an_error_that_lists_all(folder) -> None:
    with pytest.raises(DataError) as told:
        given(folder / "a", folder / "b", series=[CT, "1.2.3"])
    text = str(told.value)
    assert text.startswith(
        f"{folder / 'a'}, {folder / 'b'}: --series {dicom.pseudonym('1.2.3')}: not there. There are: "
    )
    assert dicom.pseudonym(CT) in text and dicom.pseudonym(MR) in text
    with pytest.raises(FederationError, match="--series: chooses among series in DICOM, and none was given"):
        given(folder / "scan.nii.gz", series=[CT])


def test_dicom_is_not_joined_by_commas(folder, tmp_path) -> None:
    """The second would be left out."""
    a = sorted((folder / "a").iterdir())
    shutil.make_archive(str(tmp_path / "a"), "zip", folder / "a")
    trained: Any = SimpleNamespace(inputs={"kinds": ["scan"]})
    for files in (a[:2], [folder / "a", folder / "b"], [tmp_path / "x.nii.gz", tmp_path / "a.zip"]):
        joined = files[0] if files[0].exists() else files[1]
        with pytest.raises(DataError) as told:
            predict._given([files], (), trained)
        assert str(told.value).startswith(
            f"{joined}: is joined by a comma, as the channels of a scan in NIfTI"
        )


@pytest.mark.parametrize("loose", [False, True])
@pytest.mark.parametrize("count", [1, 2])
def test_files_that_are_not_readable_are_counted(count, loose, folder) -> None:
    a = sorted((folder / "a").iterdir())
    for file in a[:count]:
        file.write_bytes(file.read_bytes()[:600])
    with pytest.raises(DataError) as told:
        given(*(a if loose else [folder / "a"]))
    counted = "1 file" if count == 1 else "2 files"
    assert str(told.value) == (
        f"{'4 files' if loose else folder / 'a'}: {counted} not readable as DICOM (its header is cut off); export the "
        "series again, as a whole"
    )


@pytest.mark.parametrize("suffix", [".dcm", ".DICOM"])
def test_a_loose_slice_that_holds_nothing_is_not_left_out(suffix, folder) -> None:
    """The last one, without which the series would be even all the same."""
    a = sorted((folder / "a").iterdir())
    last = a[-1].rename(a[-1].with_suffix(suffix))
    last.write_bytes(b"")
    with pytest.raises(DataError, match=r"^4 files: 1 file not readable as DICOM \(it is empty\)"):
        given(*a[:-1], last)


def test_objects_without_a_series_are_counted(tmp_path) -> None:
    """Also segmentations, of which the series is not there, and a DICOMDIR that is given itself."""
    write_series(tmp_path / "s", voxels_of(1), AFFINE)
    volume = dicom.load(dicom.find([tmp_path / "s"]).series[0])
    drawn = np.ones(SHAPE, np.uint8)
    codes, _ = predict.drawings.meanings(Bright.space, {})
    for form, write in predict.drawings.WRITERS.items():
        write(tmp_path / "drawn" / f"{form}.dcm", drawn, volume, Bright.space, codes, "m")
    listed = exports.header("x", "", "1.2.840.10008.1.3.10", 1, {})
    for name in ("SOPClassUID", "SOPInstanceUID", "SeriesInstanceUID", "Modality"):
        del listed[name]
    listed.save_as(tmp_path / "DICOMDIR", enforce_file_format=True)
    texts = {
        tmp_path
        / "drawn": f"{tmp_path / 'drawn'}: a folder without a series of CT, MR or PET (2 other DICOM objects); ",
        tmp_path / "DICOMDIR": "1 file: DICOM without a series of CT, MR or PET (1 other DICOM object); ",
    }
    for path, text in texts.items():
        with pytest.raises(DataError) as told:
            given(path)
        remedy = "of scans in other formats give the files themselves, of a DICOMDIR its folder"
        assert str(told.value) == text + remedy


# ------------------------------------------------------------------------------------------------ what is made of it


@pytest.mark.parametrize("form", ["nifti", "seg"])
def test_every_volume_has_its_own_labels(form, folder, model, tmp_path) -> None:
    """The file, the entry and the millilitres of each of two are of that one."""
    told = predict.predict_scans(
        tmp_path, [[folder / "b"], [folder / "a"]], tmp_path / "out", form=form, series=[CT, MR]
    )
    assert [entry["scan"] for entry in told["scans"]] == [
        [f"{folder / 'b'} {dicom.pseudonym(MR)}"],
        [f"{folder / 'a'} {dicom.pseudonym(CT)}"],
    ]
    assert [entry["chosen"] for entry in told["scans"]] == ["north", "north"] and told["stored"] == 0
    for entry, key, seed in zip(told["scans"], (MR, CT), (2, 1), strict=True):
        wanted = voxels_of(seed) > 250
        ending = "labels.nii.gz" if form == "nifti" else "seg.dcm"
        file = tmp_path / "out" / f"{dicom.pseudonym(key)}_{ending}"
        assert entry["labels"] == str(file)
        assert entry["millilitres"] == {"liver": pytest.approx(wanted.sum() * 12 / 1000)}
        if form == "nifti":
            image: Any = nib.load(file)  # type: ignore[attr-defined]
            assert np.array_equal(np.asarray(image.dataobj), wanted) and np.allclose(image.affine, AFFINE)
        else:
            seg = pydicom.dcmread(file)
            assert seg.ReferencedSeriesSequence[0].SeriesInstanceUID == key
            places = [
                f.PlanePositionSequence[0].ImagePositionPatient for f in seg.PerFrameFunctionalGroupsSequence
            ]
            frames = seg.pixel_array[np.argsort([place[2] for place in places])]
            assert np.array_equal(frames.transpose(2, 1, 0), wanted)


def test_the_files_of_every_channel_are_told(model, tmp_path) -> None:
    """The first of them names the result."""
    model.channels = 2
    files = [tmp_path / f"case_000{n}.nii.gz" for n in (0, 1)]
    for seed, file in enumerate(files):
        nib.save(nib.Nifti1Image(voxels_of(seed).astype(np.int16), AFFINE), file)  # type: ignore[attr-defined]
    told = predict.predict_scans(tmp_path, [files], tmp_path / "out")
    (entry,) = told["scans"]
    assert entry["scan"] == [str(file) for file in files]
    assert entry["labels"] == str(tmp_path / "out" / "case_0000_labels.nii.gz")
    with pytest.raises(DataError, match=r"case_0000.nii.gz: has 1 channels; the model was trained on 2"):
        predict.predict_scans(tmp_path, [files[:1]], tmp_path / "out", overwrite=True)


@pytest.mark.parametrize("of", ["nifti", "series"])
def test_findings_of_scans_are_told_and_written(of, folder, model, tmp_path) -> None:
    """The probability of each, as of a picture; NaN, of which no model speaks, is left empty."""
    findings = ("lesion", "bleeding")
    model.space = LabelSpace(("background", "liver"), findings=findings, finding_of=(1, None))
    model.told = torch.tensor([0.25, float("nan")])
    scan, shown = folder / "a", f"{folder / 'a'} {dicom.pseudonym(CT)}"
    if of == "nifti":
        scan, shown = tmp_path / "case.nii.gz", str(tmp_path / "case.nii.gz")
        nib.save(nib.Nifti1Image(voxels_of(1).astype(np.int16), AFFINE), scan)  # type: ignore[attr-defined]
    out = tmp_path / "out"
    (entry,) = predict.predict_scans(tmp_path, [[scan]], out)["scans"]
    assert entry["findings"] == {"lesion": 0.25, "bleeding": None}
    with (out / "predictions.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert [(row["picture"], row["kind"], row["name"], row["probability"]) for row in rows] == [
        (shown, "finding", "lesion", "0.250000"),
        (shown, "finding", "bleeding", ""),
    ]
    (out / Path(entry["labels"]).name).unlink()
    with pytest.raises(FederationError, match=r"predictions\.csv: exists already"):
        predict.predict_scans(tmp_path, [[scan]], out)


def test_label_maps_of_a_prediction_that_broke_off_are_not_mixed_with_those_of_another_model(
    folder, model, tmp_path
) -> None:
    sorted((folder / "b").iterdir())[1].unlink()
    out, said = tmp_path / "out", list[str]()
    with pytest.raises(FedAtlasError, match="its slices lie 3 to 6 mm apart"):
        predict.predict_scans(tmp_path, [[folder / "a"], [folder / "b"]], out, warn=said.append)
    assert sorted(file.name for file in out.iterdir()) == [
        f"{dicom.pseudonym(CT)}_labels.nii.gz",
        "classes.json",
    ]
    assert said[-1].startswith(f"{out}: has the results of the first 1 of 2 inputs")
    model.space = LabelSpace(("background", "spleen"))
    write_series(tmp_path / "in" / "c", voxels_of(3), AFFINE, "p3/ct")
    with pytest.raises(FederationError, match=r"classes\.json: exists already"):
        predict.predict_scans(tmp_path, [[folder / "c"]], out)


def test_nothing_is_written_of_a_series_that_lacks_a_slice(folder, model, tmp_path) -> None:
    sorted((folder / "b").iterdir())[1].unlink()
    with pytest.raises(FedAtlasError, match=r"case-\w+: its slices lie 3 to 6 mm apart"):
        predict.predict_scans(tmp_path, [[folder / "b"]], tmp_path / "out")
    assert not (tmp_path / "out").exists()
