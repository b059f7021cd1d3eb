"""Series in DICOM and what is drawn on them: read, told apart, written, and compared with independent readers."""

import re
import shutil
import subprocess
import warnings
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
import pytest
from dicom_series import NAME, NUMBER, item, sample, write_enhanced, write_series
from pydicom.dataelem import RawDataElement
from pydicom.tag import Tag
from pydicom.uid import ExplicitVRLittleEndian, ImplicitVRLittleEndian

from fedatlas.core.labels import LabelSpace
from fedatlas.data.formats import dicom, drawings
from fedatlas.data.transforms import FileError, skew_of

STRAIGHT = np.array([[-2.0, 0, 0, 30], [0, -2.0, 0, 40], [0, 0, 3.0, -50], [0, 0, 0, 1]])
SPACE = LabelSpace(("background", "liver", "left_kidney", "made up"))
OVERLAPPING = LabelSpace(("liver", "left_kidney", "made up"), exclusive=False)


def voxels_of(shape: tuple[int, int, int] = (24, 20, 8), seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(-1000, 1500, shape)


def turned() -> np.ndarray:
    """An oblique affine whose slices run against their normal."""
    a, b = np.deg2rad((20, 35))
    one = np.array([[np.cos(a), -np.sin(a), 0], [np.sin(a), np.cos(a), 0], [0, 0, 1]])
    two = np.array([[1, 0, 0], [0, np.cos(b), -np.sin(b)], [0, np.sin(b), np.cos(b)]])
    affine = np.eye(4)
    affine[:3, :3] = one @ two @ np.diag([1.5, 2.5, -4.0])
    affine[:3, 3] = 11, -7, 23
    return affine


def labels_of(shape: tuple[int, ...]) -> np.ndarray:
    """Class indices with a ring, parts that touch by a corner, a lone voxel and voxels at the rim."""
    labels = np.zeros(shape, np.uint8)
    labels[4:14, 4:14, 2:6] = 1
    labels[7:11, 7:10, 2:6] = 0
    labels[8, 8, 3] = 1
    labels[14:18, 14:18, 3] = 1
    labels[0:3, 0:2, 0] = labels[-2:, -1, -1] = 2
    labels[20, 10, 4] = 2
    return labels


def one(*paths: Path) -> dicom.Series:
    (series,) = dicom.find(paths).series
    return series


def itk(folder: Path) -> Any:
    """What SimpleITK reads of the series in a folder."""
    sitk = pytest.importorskip("SimpleITK")
    reader = sitk.ImageSeriesReader()
    (uid,) = reader.GetGDCMSeriesIDs(str(folder))
    reader.SetFileNames(reader.GetGDCMSeriesFileNames(str(folder), uid))
    return reader.Execute()


def points(image: Any, indices: np.ndarray) -> np.ndarray:
    """Of SimpleITK, in RAS."""
    return np.array([image.TransformIndexToPhysicalPoint([int(n) for n in at]) for at in indices]) * (
        -1,
        -1,
        1,
    )


@pytest.mark.parametrize("affine", [STRAIGHT, turned()], ids=["straight", "oblique"])
@pytest.mark.parametrize("modality", ["CT", "MR"])
def test_a_series_lies_where_an_independent_reader_says(affine, modality, tmp_path) -> None:
    voxels = voxels_of()
    write_series(tmp_path / "s", voxels, affine, modality=modality, suffix="")
    series = one(tmp_path)
    volume, other = dicom.load(series), itk(tmp_path / "s")
    pytest.importorskip("SimpleITK")
    from SimpleITK import GetArrayViewFromImage

    assert series.modality == modality and volume.notes == () and len(volume.headers) == 8
    assert np.array_equal(volume.voxels, GetArrayViewFromImage(other).transpose(2, 1, 0))
    corners = np.array([[x, y, z] for x in (0, 23) for y in (0, 19) for z in (0, 7)])
    ours = corners @ volume.affine[:3, :3].T + volume.affine[:3, 3]
    assert np.abs(ours - points(other, corners)).max() < 1e-5
    assert volume.voxels.dtype == np.int16


def test_a_real_scan_comes_back(tmp_path) -> None:
    voxels, affine, _ = sample()
    write_series(tmp_path, voxels, affine)
    volume = dicom.load(one(tmp_path))
    flipped = volume.affine @ np.array(
        [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, -1, voxels.shape[2] - 1], [0, 0, 0, 1]]
    )
    assert np.array_equal(volume.voxels[..., ::-1], voxels) and np.allclose(flipped, affine, atol=1e-4)


def test_frames_of_one_object_archives_and_other_files(tmp_path) -> None:
    voxels = voxels_of()
    write_enhanced(tmp_path / "a" / "multi", voxels, STRAIGHT, key="p/enhanced")
    write_series(tmp_path / "b", voxels, STRAIGHT, key="p/plain", suffix="")
    (tmp_path / "b" / "README.txt").write_text("no DICOM")
    shutil.copytree(tmp_path / "b", tmp_path / "b again")
    with zipfile.ZipFile(tmp_path / "b.zip", "w") as archive:
        for file in (tmp_path / "b").iterdir():
            archive.write(file, f"inner/{file.name}")
    found = dicom.find([tmp_path])
    assert [len(series.parts) for series in found.series] in ([1, 8], [8, 1]) and not found.damaged
    for series in [*found.series, one(tmp_path / "b.zip")]:
        volume = dicom.load(series)
        assert np.array_equal(volume.voxels, voxels) and np.allclose(volume.affine, STRAIGHT, atol=1e-6)
    assert one(tmp_path / "b.zip").name == one(tmp_path / "b").name
    assert dicom.is_series(tmp_path / "a" / "multi") and dicom.is_series(tmp_path / "b.zip")


def test_a_modality_in_small_letters_is_read_as_one_in_capitals(volume, tmp_path) -> None:
    shutil.copytree(tmp_path / "scan", tmp_path / "small")
    labels, (codes, _) = labels_of(volume.voxels.shape), drawings.meanings(SPACE, {})
    drawings.write_seg(tmp_path / "small" / "seg.dcm", labels, volume, SPACE, codes, "run")
    for file in (tmp_path / "small").iterdir():
        content = file.read_bytes()
        for name in (b"CS\x02\x00CT", b"CS\x04\x00SEG "):
            content = content.replace(name, name[:4] + name[4:].lower())
        file.write_bytes(content)
    assert pydicom.dcmread(file).Modality in ("ct", "seg")
    series = one(tmp_path / "small")
    (drawing,) = series.drawings
    assert series.modality == "CT" and drawing.kind == "SEG"
    again = dicom.load(series)
    masks, _ = drawings.read_masks(list(drawing.masks()), again.voxels.shape, again.affine, series.name)
    assert sum(int(mask.sum()) for mask in masks.values()) == (labels > 0).sum()


def test_a_patient_is_one_whether_or_not_the_issuer_of_the_number_is_named(tmp_path) -> None:
    """Otherwise one patient could be in training and in validation."""
    issuers = {"a": "Here", "b": None, "c": "There", "d": "Here", "e": "Here"}
    for key, issuer in issuers.items():
        number = "4711" if key in "abc" else f"{4711 + (key == 'e')}X"
        for file in write_series(tmp_path / key, voxels_of(), turned(), key, patient=number):
            if issuer is not None:
                resaved(file, lambda data, issuer=issuer: setattr(data, "IssuerOfPatientID", issuer))
    found = dicom.find([tmp_path])
    people = {series.parts[0].path.parent.name: series.person for series in found.series}
    assert people["a"] == people["b"] == people["c"]
    assert len({people["a"], people["d"], people["e"]}) == 3


def shifted(by: Any) -> np.ndarray:
    """Positions of eight slices 3 mm apart, changed."""
    places = np.array([-30.0, -40, -50]) + np.arange(8)[:, None] * (0, 0, 3.0)
    return by(places)


def gap(places: np.ndarray) -> np.ndarray:
    places[5:] += (0, 0, 3)
    return places


def uneven(places: np.ndarray) -> np.ndarray:
    places[5:] += (0, 0, 0.1)
    return places


def drifting(places: np.ndarray) -> np.ndarray:
    """No gap is a tenth off, and the differences add up."""
    places[:, 2] = -50 + np.cumsum([0, 2.72, 2.72, 2.72, 3, 3.28, 3.28, 3.28])
    return places


def bent(places: np.ndarray) -> np.ndarray:
    places[4] += (5, 0, 0)
    return places


def twice(places: np.ndarray) -> np.ndarray:
    places[4:] -= (0, 0, 3)
    return places


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (gap, "between slices 5 and 6 of 8 lie 6 mm, and 3 mm between most others: slices are missing"),
        (
            drifting,
            "its slices lie 2.72 to 3.28 mm apart: spaced evenly, slice 4 of 8 would lie 0.84 mm away from where it is, "
            "and 0.75 mm are allowed",
        ),
        (bent, "its slices are shifted against each other by up to 5 mm"),
        (twice, "holds 1 slices at places where there is another one that differs: phases, echoes"),
    ],
)
def test_stacks_that_are_none(change, text, tmp_path) -> None:
    write_series(tmp_path, voxels_of(), STRAIGHT, places=shifted(change))
    with pytest.raises(FileError, match=text) as told:
        dicom.load(one(tmp_path))
    assert str(told.value).startswith(one(tmp_path).name) and str(tmp_path) not in str(told.value)


def test_what_is_told_of_a_stack(tmp_path) -> None:
    voxels = voxels_of()
    write_series(tmp_path / "uneven", voxels, STRAIGHT, places=shifted(uneven))
    assert dicom.load(one(tmp_path / "uneven")).notes == (
        "its slices lie 3 to 3.1 mm apart, and were taken as even: 0.057 mm off at the most",
    )
    voxels[..., 4] = voxels[..., 3]
    write_series(tmp_path / "twice", voxels, STRAIGHT, places=shifted(twice))
    volume = dicom.load(one(tmp_path / "twice"))
    assert (
        volume.voxels.shape == (24, 20, 7)
        and "1 slices are there twice, with equal values" in volume.notes[0]
    )
    tilted = STRAIGHT.copy()
    tilted[1, 2] = 0.8  # the gantry: slices stay axial, and their stack leans
    write_series(tmp_path / "tilted", voxels_of(), tilted)
    volume = dicom.load(one(tmp_path / "tilted"))
    assert volume.notes == () and skew_of(volume.affine) == pytest.approx(
        np.degrees(np.arctan2(0.8, 3)), abs=1e-3
    )
    assert np.allclose(volume.affine, tilted, atol=1e-6)


@pytest.mark.parametrize("step", [0.625, 0.75])
def test_a_series_whose_positions_are_rounded_is_even(step, tmp_path) -> None:
    """To a tenth of a millimetre, as scanners write them: gaps are a seventh off, and no slice is a tenth beside its place. Its SEG lies
    on it; without one slice it is refused."""
    shape = (24, 20, 40)
    places = np.zeros((40, 3))
    places[:, 2] = np.round(np.arange(40) * step, 1)
    write_series(tmp_path / "whole", voxels_of(shape), STRAIGHT, places=places)
    volume = dicom.load(one(tmp_path / "whole"))
    (note,) = volume.notes
    assert re.fullmatch(
        r"its slices lie 0\.\d to 0\.\d mm apart, and were taken as even: 0\.0\d+ mm off at the most", note
    )
    assert np.abs(volume.affine[2, 2] * np.arange(40) - places[:, 2]).max() < 0.1
    labels = np.zeros(shape, np.uint8)
    labels[4:14, 4:14] = 1
    codes, _ = drawings.meanings(SPACE, {})
    drawings.write_seg(tmp_path / "whole" / "seg.dcm", labels, volume, SPACE, codes, "run")
    (drawing,) = one(tmp_path / "whole").drawings
    masks, _ = drawings.read_masks(list(drawing.masks()), shape, volume.affine, "case-x")
    assert np.array_equal(masks["liver"], labels == 1)
    rest = np.delete(np.arange(40), 20)
    write_series(tmp_path / "lacking", voxels_of(shape)[..., rest], STRAIGHT, places=places[rest])
    with pytest.raises(
        FileError, match=r"between slices 20 and 21 of 39 lie 1\.\d mm, .*: slices are missing"
    ):
        dicom.load(one(tmp_path / "lacking"))


def resaved(file: Path, change: Any) -> None:
    data = pydicom.dcmread(file)
    change(data)
    data.save_as(file)


def with_table(data: Any) -> None:
    table = item(ModalityLUTType="HU")
    table.add_new("LUTDescriptor", "US", [2, 0, 16])
    table.add_new("LUTData", "OW", bytes(4))
    data.ModalityLUTSequence = [table]


def looked_up(data: Any) -> None:
    """A table in place of slope and intercept."""
    with_table(data)
    del data.RescaleSlope, data.RescaleIntercept


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda d: setattr(d, "ImageOrientationPatient", [0, 1, 0, 0, 0, -1]),
            r"slices of 2 directions \(7, 1 slices\)",
        ),
        (lambda d: setattr(d, "PixelSpacing", [1, 1]), "different millimetres per pixel: 1×1 and 2×2"),
        (lambda d: setattr(d, "FrameOfReferenceUID", "1.2.3"), "slices of 2 frames of reference"),
        (lambda d: setattr(d, "PatientID", "ANOTHER"), "holds slices of 2 patients; export"),
        (lambda d: setattr(d, "StudyInstanceUID", "1.2.3"), "holds slices of 2 studies; export"),
        (
            lambda d: setattr(d, "ImageType", ["ORIGINAL", "PRIMARY", "M", "ND", "MOSAIC"]),
            "object 1 of 8 is not readable .a mosaic of slices, which do not say where they lie",
        ),
        (looked_up, "object 1 of 8 is not readable .a lookup table of its values"),
        (
            lambda d: d.pop("ImagePositionPatient"),
            "object 1 of 8 is not readable .without ImagePositionPatient",
        ),
        (lambda d: setattr(d, "PixelData", d.PixelData[:100]), "object 1 of 8 is not readable"),
        (lambda d: setattr(d, "RescaleSlope", 0), "pixel spacing 2, 2, rescale slope 0"),
        (lambda d: setattr(d, "PixelSpacing", [0, 2]), "pixel spacing 0, 2"),
        (
            lambda d: setattr(d, "PhotometricInterpretation", "MONOCHROME1"),
            "MONOCHROME1, and MONOCHROME2 is read",
        ),
        (lambda d: setattr(d, "PatientID", NUMBER) or d.pop("PixelData"), "object 1 of 8 is not readable"),
    ],
)
def test_objects_that_do_not_fit(change, text, tmp_path) -> None:
    files = write_series(tmp_path, voxels_of(), STRAIGHT)
    resaved(files[0], change)
    with pytest.raises(FileError, match=text) as told:
        dicom.load(one(tmp_path))
    assert not any(word in str(told.value) for word in (NUMBER, *NAME.split("^")))


def test_slope_and_intercept_count_beside_a_table(tmp_path) -> None:
    (file,) = write_series(tmp_path, voxels_of((4, 3, 1)), STRAIGHT)
    resaved(file, with_table)
    assert np.array_equal(dicom.load(one(tmp_path)).voxels, voxels_of((4, 3, 1)))


@pytest.mark.parametrize(
    ("kind", "shift", "slope", "intercept", "wanted"),
    [
        ("<f4", 0.25, 1, 0, np.float32),
        ("<f8", 0.25, 1, 0, np.float32),
        ("<u4", 2**31, 1, 0, np.float32),
        ("<u4", 0, 2, -(2**32), np.float32),
        ("<i4", 70_000, 1, -70_000, np.int32),
        ("<u2", 40_000, 1, -40_000, np.int32),
        ("<i2", 0, 1, -(2**15), np.int16),
        ("<i2", 0, 1, -(2**15) - 1, np.int32),
        ("<i2", 2**15 - 1 - 20, 1, 10, np.int16),
        ("<i2", 2**15 - 1 - 20, 1, 11, np.int32),
        ("<i2", 0, 2.5, 0.5, np.float32),
    ],
)
def test_values_of_every_kind_are_what_the_header_says(
    kind, shift, slope, intercept, wanted, tmp_path
) -> None:
    """None is cut to whole numbers, and none is another one because its bits were too few."""
    (file,) = write_series(tmp_path, np.zeros((2, 3, 1)), STRAIGHT)
    stored = (np.array([[0, 1], [2, 3], [4, 10]]) + shift).astype(kind)
    data = pydicom.dcmread(file)
    bits = 8 * stored.itemsize
    data.BitsAllocated, data.RescaleSlope, data.RescaleIntercept = bits, slope, intercept
    if stored.dtype.kind == "f":
        del data.PixelData, data.BitsStored, data.HighBit, data.PixelRepresentation
        setattr(data, "FloatPixelData" if bits == 32 else "DoubleFloatPixelData", stored.tobytes())
    else:
        data.BitsStored, data.HighBit, data.PixelRepresentation = bits, bits - 1, int(kind[1] == "i")
        data.PixelData = stored.tobytes()
    data.save_as(file)
    volume = dicom.load(one(tmp_path))
    exact = slope * stored.T.astype(float)[..., None] + intercept
    assert volume.voxels.dtype == wanted and np.allclose(volume.voxels, exact, rtol=1e-7)
    assert not any("PixelData" in element.keyword for element in volume.headers[0])


def wrong(name: str, kind: str, value: bytes) -> Any:
    """A change that puts a value into a header as a device wrote it, whatever the standard allows."""

    def change(data: Any) -> None:
        tag = Tag(name)
        data[tag] = RawDataElement(tag, kind, len(value), value, 0, False, True)
        data.set_original_encoding(False, True, data._character_set)

    return change


PLANTED = NAME.partition("^")[0].encode() + b" "


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (wrong("InstanceNumber", "IS", PLANTED), "ValueError"),
        (wrong("InstanceNumber", "IS", b"1\\2 "), "TypeError"),
    ],
)
def test_a_header_without_a_number_is_a_damaged_file(change, text, tmp_path) -> None:
    files = write_series(tmp_path, voxels_of(), STRAIGHT)
    resaved(files[2], change)
    assert dicom.find([tmp_path]).damaged == ((files[2], text),)


@pytest.mark.parametrize("what", ["encrypted, or packed in an unknown way", "damaged"])
def test_an_archive_that_cannot_be_unpacked_is_not_quoted(what, tmp_path) -> None:
    """zipfile names the file in it, and with that the patient."""
    (file, *_) = write_series(tmp_path / "scan", voxels_of(), STRAIGHT)
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(file, file.name)
    packed = bytearray(path.read_bytes())
    if what == "damaged":
        packed[len(packed) // 2] ^= 1  # the sum of its bytes is another now
    else:
        packed[packed.index(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(packed)
    assert dicom.find([path]).damaged == ((path, f"its archive is {what}"),)


def test_a_position_has_three_numbers(tmp_path) -> None:
    files = write_series(tmp_path, voxels_of(), STRAIGHT)
    for file in files:
        resaved(file, wrong("ImagePositionPatient", "DS", b"1\\2 "))
    with pytest.raises(FileError, match=r"object 1 of 8 is not readable \(ValueError\)"):
        dicom.load(one(tmp_path))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "change",
    [
        wrong("SeriesNumber", "IS", PLANTED),
        wrong("PatientSize", "DS", PLANTED),
        lambda data: data.pop("StudyInstanceUID"),
        lambda data: data.pop("SOPClassUID"),
    ],
    ids=["SeriesNumber", "PatientSize", "study", "class"],
)
def test_headers_that_lack_what_a_result_needs(change, tmp_path, caplog) -> None:
    """An error, nothing half written, and what is wrong in a header is in no warning and no log."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for file in write_series(tmp_path / "scan", voxels_of(), STRAIGHT):
            resaved(file, change)
    caplog.clear()
    volume = dicom.load(one(tmp_path / "scan"))
    codes, _ = drawings.meanings(SPACE, {})
    labels = labels_of(volume.voxels.shape)
    with pytest.raises(FileError, match=r"case-\w+: its headers lack what an RTSTRUCT needs \(\w+\)"):
        drawings.write_rtstruct(tmp_path / "out" / "a.dcm", labels, volume, SPACE, codes, "run")
    assert not (tmp_path / "out").exists() and caplog.text == ""


def test_a_file_is_parsed_once_and_an_archive_opened_no_more_for_more_objects(tmp_path, monkeypatch) -> None:
    files = write_series(tmp_path / "scan", voxels_of(), turned())
    with zipfile.ZipFile(tmp_path / "scan.zip", "w") as archive:
        for file in files:
            archive.write(file, file.name)
    wanted = dicom.load(one(tmp_path / "scan"))
    parsed, opened = [], []
    read, unpack = pydicom.dcmread, zipfile.ZipFile
    monkeypatch.setattr(pydicom, "dcmread", lambda *a, **b: parsed.append(a) or read(*a, **b))
    monkeypatch.setattr(zipfile, "ZipFile", lambda *a, **b: opened.append(a) or unpack(*a, **b))
    for path in (tmp_path / "scan", tmp_path / "scan.zip"):
        (series,) = dicom.find([path], keep=True).series
        found = dicom.load(series)
        assert np.array_equal(found.voxels, wanted.voxels) and np.array_equal(found.affine, wanted.affine)
        assert [str(header) for header in found.headers] == [str(header) for header in wanted.headers]
        assert len(parsed) == (len(files) if path.is_dir() else 3 * len(files))
    assert len(opened) == 3  # for the names, the headers and the pixels of all


@pytest.fixture
def volume(tmp_path) -> dicom.Volume:
    write_series(tmp_path / "scan", voxels_of(), turned())
    return dicom.load(one(tmp_path / "scan"))


def inside(seg: Any, number: int) -> np.ndarray:
    """[n, 3] RAS of the voxels of a segment, from its frames and nothing else of ours."""
    found = []
    shared = seg.SharedFunctionalGroupsSequence[0]
    rows, columns = shared.PixelMeasuresSequence[0].PixelSpacing
    along = np.array(shared.PlaneOrientationSequence[0].ImageOrientationPatient, float).reshape(2, 3)
    for frame, plane in zip(seg.PerFrameFunctionalGroupsSequence, seg.pixel_array, strict=True):
        if frame.SegmentIdentificationSequence[0].ReferencedSegmentNumber == number:
            r, c = np.nonzero(plane)
            place = np.array(frame.PlanePositionSequence[0].ImagePositionPatient, float)
            found.append(place + np.outer(c * columns, along[0]) + np.outer(r * rows, along[1]))
    return np.concatenate(found) * (-1, -1, 1)


def test_a_segmentation_lies_where_an_independent_reader_says(volume, tmp_path) -> None:
    """SimpleITK says where the voxels of the CT lie; the frames of the SEG say where its own lie."""
    labels = labels_of(volume.voxels.shape)
    codes, _ = drawings.meanings(SPACE, {})
    drawings.write_seg(tmp_path / "out" / "seg.dcm", labels, volume, SPACE, codes, "run")
    seg, other = pydicom.dcmread(tmp_path / "out" / "seg.dcm"), itk(tmp_path / "scan")
    for number in (1, 2):
        wanted = points(other, np.argwhere(labels == number))
        got = inside(seg, number)
        order = [of[np.lexsort(of.round(3).T)] for of in (wanted, got)]
        assert len(got) == len(wanted) and np.abs(order[0] - order[1]).max() < 1e-4


@pytest.mark.parametrize("space", [SPACE, OVERLAPPING], ids=["exclusive", "overlapping"])
@pytest.mark.parametrize("kind", ["seg", "rtstruct"])
@pytest.mark.parametrize("source", ["slices", "frames"])
def test_labels_come_back_as_they_were(space, kind, source, tmp_path) -> None:
    if source == "slices":
        write_series(tmp_path, voxels_of(), turned())
    else:
        write_enhanced(tmp_path / "scan.dcm", voxels_of(), STRAIGHT)
    volume = dicom.load(one(tmp_path))
    labels = labels_of(volume.voxels.shape)
    if not space.exclusive:
        labels = np.stack([labels == c + 1 for c in range(3)]).astype(np.uint8)
        labels[1, 5:9, 5:9, 3] = 1
    codes, _ = drawings.meanings(space, {})
    made = drawings.WRITERS[kind](tmp_path / f"{kind}.dcm", labels, volume, space, codes, "run")
    series = one(tmp_path)
    (drawing,) = series.drawings
    assert [item.name for item in drawing.items] == [space.names[c] for c in space.foreground]
    assert [item.drawn for item in drawing.items] == [True, True, False]
    masks, notes = drawings.read_masks(list(drawing.masks()), volume.voxels.shape, volume.affine, series.name)
    for c in space.foreground:
        wanted = labels == c if space.exclusive else labels[c] > 0
        assert np.array_equal(masks[space.names[c]], wanted), space.names[c]
    gap = "slices between the first and the last contour of 'left_kidney' are empty"
    assert [note.what for note in notes] == ([gap] if kind == "rtstruct" else [])
    assert (made.PatientName, made.PatientID) == (NAME, NUMBER)
    header = volume.headers[0]
    for name in (
        "StudyInstanceUID",
        "FrameOfReferenceUID",
        "AccessionNumber",
        "PatientBirthDate",
        "StudyDate",
    ):
        assert made[name].value == header[name].value, name
    assert made.SeriesInstanceUID != header.SeriesInstanceUID
    again = drawings.WRITERS[kind](None, labels, volume, space, codes, "run")
    stored = BytesIO()
    pydicom.dcmwrite(stored, again)  # as a client of a PACS sends it
    assert stored.getvalue()[128:132] == b"DICM"
    assert again.SOPInstanceUID == made.SOPInstanceUID  # the same result is the same object
    assert again.file_meta.TransferSyntaxUID == ExplicitVRLittleEndian  # unless a contour is too long for it


@pytest.mark.parametrize("kind", ["seg", "rtstruct"])
def test_a_result_with_other_codes_or_names_is_another_object(kind, tmp_path) -> None:
    write_series(tmp_path, voxels_of(), STRAIGHT)
    volume = dicom.load(one(tmp_path))
    labels = labels_of(volume.voxels.shape)

    def made(space: LabelSpace, codes: dict[str, tuple[str, str, str]]) -> tuple[str, str]:
        meant = drawings.meanings(space, codes)[0]
        data = drawings.WRITERS[kind](None, labels, volume, space, meant, "run")
        return data.SOPInstanceUID, data.SeriesInstanceUID

    renamed = LabelSpace((*SPACE.names[:-1], "bladder"))
    corrected = {SPACE.names[1]: ("4147007", "SCT", "Mass")}
    all_of = [made(SPACE, {}), made(SPACE, corrected), made(renamed, {})]
    assert all_of[0] == made(SPACE, {})
    assert len({uid for both in all_of for uid in both}) == 6


@pytest.mark.parametrize("syntax", ["ours", "explicit"])
def test_a_contour_above_64_kb_comes_back(syntax, tmp_path) -> None:
    """An outline with teeth; with explicit VR, as others write it, its points are bytes of an unknown kind."""
    write_series(tmp_path / "scan", voxels_of((96, 64, 3)), turned())
    volume = dicom.load(one(tmp_path / "scan"))
    labels = np.zeros(volume.voxels.shape, np.uint8)
    labels[1:-1, 1:4, 1] = labels[1:-1:2, 1:-1, 1] = 1
    file = tmp_path / "scan" / "rtstruct.dcm"
    drawings.write_rtstruct(file, labels, volume, SPACE, drawings.meanings(SPACE, {})[0], "run")
    data = pydicom.dcmread(file)
    assert data.file_meta.TransferSyntaxUID == ImplicitVRLittleEndian
    if syntax == "explicit":
        data.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
        with pytest.warns(UserWarning, match="exceeds the size of 64 kByte"):
            data.save_as(file)
        data = pydicom.dcmread(file)
    kind = data.ROIContourSequence[0].ContourSequence[0]["ContourData"].VR
    assert kind == ("DS" if syntax == "ours" else "UN")
    series = one(tmp_path / "scan")
    (drawing,) = series.drawings
    masks, _ = drawings.read_masks(list(drawing.masks()), volume.voxels.shape, volume.affine, series.name)
    assert np.array_equal(masks["liver"], labels == 1)


@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize("kind", ["seg", "rtstruct"])
@pytest.mark.skipif(
    shutil.which("dciodvfy") is None, reason="dciodvfy (Debian: dicom3tools) is not installed"
)
def test_what_is_written_keeps_to_the_standard(kind, empty, volume, tmp_path) -> None:
    labels = labels_of(volume.voxels.shape) * (not empty)
    codes, _ = drawings.meanings(SPACE, {"made up": ("X1", "99TEST", "Made up")})
    drawings.WRITERS[kind](tmp_path / "made.dcm", labels, volume, SPACE, codes, "run")
    told = subprocess.run(["dciodvfy", tmp_path / "made.dcm"], capture_output=True, text=True).stderr
    assert [line for line in told.splitlines() if line.startswith("Error")] == [] and kind[
        :2
    ].upper() in told.upper()


@pytest.mark.parametrize("kind", ["seg", "rtstruct"])
@pytest.mark.parametrize(
    ("letters", "name"),
    [
        (["", "ISO 2022 IR 87"], "Yamada^Tarou=山田^太郎"),
        ("ISO_IR 100", "Müller^Jürgen"),
        ("ISO_IR 192", "Ж^Ω"),
        (None, "Plain^Name"),
    ],
)
def test_names_of_patients_and_classes_keep_their_letters(letters, name, kind, tmp_path) -> None:
    """Those of a class need not be in the letters of the patient's name."""
    for file in write_series(tmp_path / "scan", voxels_of(), STRAIGHT):
        data = pydicom.dcmread(file)
        data.PatientName, data.StudyDescription = name, name.partition("=")[2]
        # an item is encoded as its object is
        code = item(CodeValue="1", CodingSchemeDesignator="99X", CodeMeaning=name)
        data.ProcedureCodeSequence = [code]
        if letters is None:
            del data.SpecificCharacterSet
        else:
            data.SpecificCharacterSet = letters
        data.save_as(file)
    volume = dicom.load(one(tmp_path / "scan"))
    space = LabelSpace(("background", "肝臓", "Größe"))
    labels = np.minimum(labels_of(volume.voxels.shape), 2)
    codes, _ = drawings.meanings(space, {})
    drawings.WRITERS[kind](tmp_path / "scan" / "made.dcm", labels, volume, space, codes, "run")
    made = pydicom.dcmread(tmp_path / "scan" / "made.dcm")
    assert (str(made.PatientName), made.StudyDescription) == (name, name.partition("=")[2])
    if kind == "seg":
        assert made.ProcedureCodeSequence[0].CodeMeaning == name
    assert [found.name for found in one(tmp_path / "scan").drawings[0].items] == ["肝臓", "Größe"]


@pytest.mark.parametrize("kind", ["seg", "rtstruct"])
def test_what_images_without_a_name_lack_is_added_to_a_result(kind, tmp_path) -> None:
    """The result fits the images, and reads back."""
    absent = "PatientID PatientName PatientBirthDate PatientSex AccessionNumber StudyID StudyDate StudyTime"
    for file in write_series(tmp_path, voxels_of(), STRAIGHT):
        for name in [*absent.split(), "ReferringPhysicianName", "FrameOfReferenceUID", "SliceThickness"]:
            resaved(file, lambda data, name=name: data.pop(name, None))
    volume = dicom.load(one(tmp_path))
    codes, _ = drawings.meanings(SPACE, {})
    labels = labels_of(volume.voxels.shape)
    drawings.WRITERS[kind](tmp_path / "made.dcm", labels, volume, SPACE, codes, "run")
    made = pydicom.dcmread(tmp_path / "made.dcm")
    assert all(not str(made[name].value or "") for name in absent.split())
    assert made.FrameOfReferenceUID.startswith("2.25.")
    if kind == "seg":
        (measures,) = made.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence
        assert float(measures.SliceThickness) == pytest.approx(np.linalg.norm(STRAIGHT[:3, 2]))
    (drawn,) = one(tmp_path).drawings
    assert {found.name for found in drawn.items} == set(SPACE.names) - {"background"}


def test_what_a_header_lacks_is_named(tmp_path) -> None:
    for file in write_series(tmp_path, voxels_of(), STRAIGHT):
        resaved(file, lambda data: data.pop("StudyInstanceUID"))
    volume = dicom.load(one(tmp_path))
    codes, _ = drawings.meanings(SPACE, {})
    with pytest.raises(FileError, match=r"its headers lack what a SEG needs \(StudyInstanceUID\); export"):
        drawings.write_seg(None, labels_of(volume.voxels.shape), volume, SPACE, codes, "run")


def test_codes_of_classes() -> None:
    codes, told = drawings.meanings(SPACE, {"liver": ("T-1", "99X", "My liver")})
    assert codes["liver"] == drawings.Meaning("T-1", "99X", "My liver")
    assert codes["left_kidney"] == drawings.Meaning("64033007", "SCT", "Kidney", "left")
    assert told == {
        "left_kidney": "Kidney (SCT 64033007, left)",
        "made up": "Anatomical Structure (SCT 91723000)",
    }


def test_lesions_are_no_organs(volume, tmp_path) -> None:
    space = LabelSpace(("background", "liver", "Kidney-tumour", "tumor", "left_cysts", "biomass", "a", "b"))
    given = {"a": ("1", "99X", "Pulmonary nodule"), "b": ("2", "99X", "Lobe")}
    codes, told = drawings.meanings(space, given)
    lesions = {"Kidney-tumour", "tumor", "left_cysts", "a"}
    assert {name for name, code in codes.items() if code.category == drawings.ALTERED} == lesions
    assert told["Kidney-tumour"] == "Morphologically Altered Structure (SCT 49755003)"
    assert told["tumor"] == "Tumor (SCT 108369006)"
    labels = labels_of(volume.voxels.shape)
    seg = drawings.write_seg(None, labels, volume, space, codes, "run")
    for segment in seg.SegmentSequence:
        (category,) = segment.SegmentedPropertyCategoryCodeSequence
        wanted = "49755003" if segment.SegmentLabel in lesions else "91723000"
        assert (category.CodeValue, category.CodingSchemeDesignator) == (wanted, "SCT")
    rtstruct = drawings.write_rtstruct(None, labels, volume, space, codes, "run")
    kinds = [one.RTROIInterpretedType for one in rtstruct.RTROIObservationsSequence]
    assert kinds == ["ORGAN", "", "", "", "ORGAN", "", "ORGAN"]


def test_sides_of_classes_may_be_short() -> None:
    codes, _ = drawings.meanings(LabelSpace(("background", "Parotid_L", "Kidney-Rt", "SpinalCord")), {})
    assert codes["Parotid_L"] == drawings.Meaning("45289007", "SCT", "Parotid gland", "left")
    assert codes["Kidney-Rt"] == drawings.Meaning("64033007", "SCT", "Kidney", "right")
    assert codes["SpinalCord"].meaning == "Spinal cord"


def test_a_segmentation_on_another_grid_is_refused(volume, tmp_path) -> None:
    codes, _ = drawings.meanings(SPACE, {})
    drawings.write_seg(
        tmp_path / "scan" / "seg.dcm", labels_of(volume.voxels.shape), volume, SPACE, codes, "run"
    )
    (drawing,) = one(tmp_path / "scan").drawings
    moved = volume.affine.copy()
    moved[:3, 3] += 1
    with pytest.raises(
        FileError, match=r"case-x/seg-\w+: is drawn on 24×20 voxels that are not those of its series"
    ):
        drawings.read_masks(list(drawing.masks()), volume.voxels.shape, moved, "case-x")
