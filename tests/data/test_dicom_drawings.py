"""What other systems draw on a DICOM series: contours of a finer series, copies, points, other frames of reference, exchanged rows."""

import re
import shutil
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
import pytest
from dicom_series import item, write_series

from fedatlas.core.errors import DataError
from fedatlas.core.labels import LabelSpace
from fedatlas.data.checks import check_site
from fedatlas.data.datasets.dicom import Dicom, read
from fedatlas.data.datasets.shared.listing import Layout, Listing
from fedatlas.data.formats import dicom, drawings
from fedatlas.data.index import SiteConfig, SiteIndex, naming_of, read_site
from fedatlas.data.reading import read_case
from fedatlas.data.transforms import FileError

SHAPE = (24, 20, 8)
AFFINE = np.array([[-2.0, 0, 0, 30], [0, -2.0, 0, 40], [0, 0, 3.0, -50], [0, 0, 0, 1]])
SPACE = LabelSpace(("background", "liver", "kidney"))
Points = list[tuple[float, float, float]]


def labels() -> np.ndarray:
    found = np.zeros(SHAPE, np.uint8)
    found[4:10, 3:9, 2:5] = 1
    found[6:8, 5:7, 2:5] = 0  # a hole
    found[15:18, 12:16, 3] = 2
    return found


def draw(folder: Path, kind: str, key: str = "p/ct", **how: Any) -> Any:
    """A series with a drawing of `labels`, which is returned and not yet in a file."""
    write_series(folder, np.random.default_rng(0).integers(-100, 200, SHAPE), AFFINE, key, **how)
    volume = dicom.load(dicom.find([folder]).series[0])
    codes, _ = drawings.meanings(SPACE, {})
    return drawings.WRITERS[kind](None, labels(), volume, SPACE, codes, "planner")


def save(data: Any, path: Path) -> None:
    data.save_as(path, enforce_file_format=True)


def square(x: tuple[float, float], y: tuple[float, float], z: float) -> Points:
    """Voxels."""
    return [(x[0], y[0], z), (x[1], y[0], z), (x[1], y[1], z), (x[0], y[1], z)]


def contour(points: Points, kind: str = "CLOSED_PLANAR") -> Any:
    places = np.column_stack([points, np.ones(len(points))]) @ (dicom.LPS @ AFFINE).T
    data = [f"{mm:.3f}" for mm in places[:, :3].ravel()]
    return item(ContourGeometricType=kind, NumberOfContourPoints=len(points), ContourData=data)


def redrawn(folder: Path, contours: Sequence[Any]) -> None:
    """A series with an RTSTRUCT whose liver has these contours."""
    data = draw(folder, "rtstruct")
    data.ROIContourSequence[0].ContourSequence = list(contours)
    save(data, folder / "rtstruct.dcm")


def masks(folder: Path, modality: str = "CT") -> tuple[dict[str, np.ndarray], list[str]]:
    """What is drawn on the series, and the notes on it."""
    (series,) = (one for one in dicom.find([folder]).series if one.modality == modality)
    (drawing,) = series.drawings
    volume = dicom.load(series)
    wanted = [of for of, one in zip(drawing.masks(), drawing.items, strict=True) if one.drawn]
    found, notes = drawings.read_masks(wanted, volume.voxels.shape, volume.affine, "case")
    return found, [note.what for note in notes]


def listed(folder: Path, **options: Any) -> Listing:
    return read(Layout("s", folder, options=Dicom(**options)))


def annotated(folder: Path) -> tuple[str, ...]:
    (case,) = listed(folder).cases
    return case.annotated


def test_contours_of_a_finer_series_are_united(tmp_path) -> None:
    """1.2 mm apart on slices of 3 mm; the hole stays, which two planes of one slice have in common."""
    data = draw(tmp_path, "rtstruct")
    for roi in data.ROIContourSequence:
        finer = []
        for one in roi.ContourSequence:
            for up in (0, 1.2, -1.2):
                points = np.array(one.ContourData, float).reshape(-1, 3) + np.array([0, 0, up])
                finer.append(deepcopy(one))
                finer[-1].ContourData = [f"{mm:.3f}" for mm in points.ravel()]
        roi.ContourSequence = finer
    save(data, tmp_path / "rtstruct.dcm")
    found, notes = masks(tmp_path)
    assert np.array_equal(found["liver"], labels() == 1) and np.array_equal(found["kidney"], labels() == 2)
    assert notes == ["slices hold contours of several planes, which were united"]


def test_contours_half_way_between_slices_belong_to_one(tmp_path) -> None:
    """Rounding of their coordinates is no reason to refuse them."""
    jitter = [
        (x, y, z + 1e-4 * n)
        for z in (1.5, 2.5, 3.5)
        for n, (x, y, _) in enumerate(square((2.5, 6.5), (2.5, 6.5), z))
    ]
    redrawn(tmp_path, [contour(jitter[n : n + 4]) for n in (0, 4, 8)])
    assert np.flatnonzero(masks(tmp_path)[0]["liver"].any((0, 1))).tolist() == [2, 3, 4]


def test_outline_and_hole_are_of_one_plane(tmp_path) -> None:
    """Also as two contours."""
    redrawn(
        tmp_path,
        [contour(square((1.5, 8.5), (1.5, 8.5), 3)), contour(square((3.5, 5.5), (3.5, 5.5), 3.0005))],
    )
    found, notes = masks(tmp_path)
    assert found["liver"].sum() == 7 * 7 - 2 * 2 and notes == []


@pytest.mark.parametrize(
    "copy",
    [lambda p: p, lambda p: p[::-1], lambda p: [*p[2:], *p[:2]], lambda p: [*p, p[0]]],
    ids=["equal", "backwards", "begun elsewhere", "ended at its begin"],
)
def test_a_contour_that_is_there_twice_is_taken_once(copy: Callable[[Points], Points], tmp_path) -> None:
    outline = square((1.5, 8.5), (1.5, 8.5), 3)
    redrawn(tmp_path, [contour(outline), contour(copy(outline))])
    found, notes = masks(tmp_path)
    assert found["liver"].sum() == 49 and notes == ["contours are there twice, and were taken once"]


def test_contours_that_cancel_each_other_are_an_error(tmp_path) -> None:
    one, two = square((1.5, 8.5), (1.5, 8.5), 3), square((1.6, 8.4), (1.6, 8.4), 3)
    redrawn(tmp_path, [contour(one), contour(two)])
    with pytest.raises(FileError, match=r"case/rtstruct-\w+: the contours of 'liver' cancel each other"):
        masks(tmp_path)


def test_an_roi_smaller_than_a_voxel_is_not_lost(tmp_path) -> None:
    """A marker of a millimetre is drawn, and counts as present; one that is drawn elsewhere, too, adds nothing."""
    small = contour(square((5.2, 5.4), (6.3, 6.4), 3))
    redrawn(tmp_path / "a", [small])
    found, notes = masks(tmp_path / "a")
    assert np.argwhere(found["liver"]).tolist() == [[5, 6, 3]]
    assert notes == [
        "no contour of 'liver' holds the centre of a voxel; the voxel in which each lies was taken"
    ]
    redrawn(tmp_path / "b", [small, contour(square((1.5, 8.5), (1.5, 8.5), 2))])
    found, notes = masks(tmp_path / "b")
    assert found["liver"].sum() == 49 and not found["liver"][..., 3].any() and notes == []


@pytest.mark.parametrize(
    "contours",
    [
        [contour([(3, 3, 3)], "POINT")],
        [contour(square((1, 8), (1, 8), 3), "OPEN_PLANAR")],
        [contour([(3, 3, 3), (4, 4, 3)])],
    ],
    ids=["point", "open line", "closed line of two points"],
)
def test_an_roi_without_a_closed_contour_is_not_annotated(contours, tmp_path) -> None:
    redrawn(tmp_path, contours)
    assert annotated(tmp_path) == ("kidney",)
    told = "1 ROIs have no closed contour; they count as not annotated"
    assert [problem.what for problem in listed(tmp_path).problems] == [told]


@pytest.mark.parametrize(
    "outline",
    [square((2, 8), (2, 8), -3), square((2, 8), (2, 8), 8), square((30, 40), (2, 8), 3)],
    ids=["below", "above", "beside"],
)
def test_an_roi_wholly_beyond_the_series_is_not_annotated(outline, tmp_path) -> None:
    redrawn(tmp_path, [contour(outline)])
    assert annotated(tmp_path) == ("kidney",)
    (problem,) = listed(tmp_path).problems
    assert problem.what == "1 ROIs lie wholly beyond their series; they count as not annotated there"
    assert not problem.fatal
    (drawing,) = dicom.find([tmp_path]).series[0].drawings
    with pytest.raises(FileError, match="every contour of 'liver' lies beyond its series"):
        drawings.read_masks(list(drawing.masks()), SHAPE, AFFINE, "case")


def test_an_roi_in_part_beyond_the_series_is_annotated(tmp_path) -> None:
    """Each of its contours begins outside; one runs around the series."""
    redrawn(tmp_path, [contour(square((2, 8), (2, 8), -3)), contour(square((-9, 40), (-9, 40), 3))])
    assert annotated(tmp_path) == ("kidney", "liver")
    found, notes = masks(tmp_path)
    assert found["liver"][..., 3].all() and found["liver"].sum() == 24 * 20
    assert notes == ["contours lie beyond its series, and were left out"]


def both_series(folder: Path, frames: Sequence[str]) -> None:
    """CT and MR with one RTSTRUCT that names both: the liver is drawn on the CT, the kidney on the MR. frames: of reference, of the two
    ROIs, where they are not those of their series."""
    ct, mr = draw(folder / "ct", "rtstruct", "p/ct"), draw(folder / "mr", "rtstruct", "q/mr", modality="MR")
    ct.ReferencedFrameOfReferenceSequence += mr.ReferencedFrameOfReferenceSequence
    ct.StructureSetROISequence[1] = mr.StructureSetROISequence[1]
    ct.ROIContourSequence[1] = mr.ROIContourSequence[1]
    for roi, frame in zip(ct.StructureSetROISequence, frames, strict=False):
        roi.ReferencedFrameOfReferenceUID = frame
    save(ct, folder / "rtstruct.dcm")


def test_an_roi_is_drawn_on_the_series_of_its_frame_of_reference(tmp_path) -> None:
    both_series(tmp_path, ())
    assert {name: mask.sum() for name, mask in masks(tmp_path, "CT")[0].items()} == {"liver": 96}
    assert {name: mask.sum() for name, mask in masks(tmp_path, "MR")[0].items()} == {"kidney": 12}
    listing = listed(tmp_path)
    assert sorted(case.annotated for case in listing.cases) == [("kidney",), ("liver",)]
    (problem,) = listing.problems
    assert problem.what.startswith("2 ROIs are drawn in another frame of reference than a series")
    (problem,) = listed(tmp_path, modality="CT").problems
    assert problem.what.startswith("1 ROIs are drawn in another frame of reference") and not problem.fatal


def test_an_roi_that_names_no_frame_of_reference_is_drawn_on_each_series(tmp_path) -> None:
    both_series(tmp_path, ("", ""))
    assert [case.annotated for case in listed(tmp_path).cases] == [("kidney", "liver")] * 2


def spelled(folder: Path, *spellings: str) -> None:
    """A patient for each spelling of the liver."""
    for number, spelling in enumerate(spellings):
        place = folder / f"p{number}"
        data = draw(place, "rtstruct", f"p{number}/ct", patient=f"P{number}")
        data.StructureSetROISequence[0].ROIName = spelling
        save(data, place / "rtstruct.dcm")


def site_of(folder: Path, **config: Any) -> SiteIndex:
    return read_site(SiteConfig(name="s", path=str(folder), format="dicom", **config), folder)


def known(index: SiteIndex) -> set[str]:
    """The classes that all cases know."""
    naming = naming_of(index, SPACE)[0]
    return {SPACE.names[c] for c in frozenset.intersection(*(naming.known(c.annotated) for c in index.cases))}


def test_spellings_that_are_aliases_of_one_class_are_told_to_be_known_nowhere(tmp_path) -> None:
    spelled(tmp_path, "Liver", "LIVER", "Liver")
    index = site_of(tmp_path, aliases={"Liver": "liver", "LIVER": "liver"})
    assert known(index) == {"kidney"}
    notes = [problem for problem in check_site(index, SPACE) if "training cases" in problem.what]
    assert [(note.fatal, note.what, note.remedy) for note in notes] == [
        (
            False,
            "'liver' is annotated in none of its 3 training cases: it is made of 'LIVER', 'Liver', and known only where all of "
            "them are annotated",
            "if they are spellings of one structure, make them one name with `reading.names`; if they are its parts, draw them "
            "all, or leave it out with `annotated`",
        )
    ]
    assert not any('"annotated"' in problem.remedy for problem in check_site(index, SPACE))


def test_spellings_become_one_name(tmp_path) -> None:
    spelled(tmp_path, "Liver", "LIVER", "Liver")
    index = site_of(tmp_path, reading={"names": {"LIVER": "Liver"}}, aliases={"Liver": "liver"})
    assert list(index.table) == ["background", "Liver", "kidney"] and known(index) == {"liver", "kidney"}
    assert not [problem for problem in check_site(index, SPACE) if "annotated" in str(problem)]


def test_structures_of_one_object_that_become_one_name_are_united_and_told(tmp_path) -> None:
    save(draw(tmp_path, "rtstruct"), tmp_path / "rtstruct.dcm")
    index = site_of(tmp_path, reading={"names": {"kidney": "liver"}})
    (case,) = index.cases
    assert list(index.table) == ["background", "liver"]
    raw = read_case(index, case, SPACE, naming_of(index, SPACE))
    assert raw.label is not None and np.array_equal(raw.label.voxels > 0, labels() > 0)
    (note,) = index.problems
    assert not note.fatal and note.what.startswith(
        "1 series have several structures that `reading.names` makes one"
    )


def test_structures_of_two_objects_that_become_one_name_are_an_error(tmp_path) -> None:
    save(draw(tmp_path, "rtstruct"), tmp_path / "rtstruct.dcm")
    other = draw(tmp_path / "again", "rtstruct")
    shutil.rmtree(tmp_path / "again")
    other.SOPInstanceUID = other.file_meta.MediaStorageSOPInstanceUID = "2.25.7"
    other.StructureSetROISequence[0].ROIName = "LIVER"
    del other.StructureSetROISequence[1], other.ROIContourSequence[1]
    save(other, tmp_path / "other.dcm")
    assert not [problem for problem in listed(tmp_path).problems if problem.fatal]
    (problem,) = [p for p in listed(tmp_path, names={"LIVER": "liver"}).problems if p.fatal]
    assert "'liver' is drawn by" in problem.what


def test_a_name_that_no_structure_has_is_refused(tmp_path) -> None:
    save(draw(tmp_path, "rtstruct"), tmp_path / "rtstruct.dcm")
    words = "no segment or ROI is called 'Lever'; did you mean 'liver'? it has: 'kidney', 'liver'"
    with pytest.raises(DataError, match=re.escape(f"reading.names: {words}")):
        listed(tmp_path, names={"Lever": "liver"})


@pytest.mark.parametrize("shape", [(24, 20, 8), (20, 20, 8)], ids=["oblong", "square"])
def test_a_segmentation_whose_rows_are_the_columns_of_its_series_is_read(shape, tmp_path) -> None:
    """Its voxels are those of the series; only their order in the file is another one."""
    write_series(tmp_path, np.random.default_rng(0).integers(-100, 200, shape), AFFINE)
    volume = dicom.load(dicom.find([tmp_path]).series[0])
    wanted = labels()[: shape[0]]
    codes, _ = drawings.meanings(SPACE, {})
    data = drawings.write_seg(None, wanted, volume, SPACE, codes, "planner")
    shared = data.SharedFunctionalGroupsSequence[0]
    turn = shared.PlaneOrientationSequence[0]
    pixels = data.pixel_array.transpose(0, 2, 1)
    data.Rows, data.Columns = pixels.shape[1:]
    data.PixelData = np.packbits(np.ascontiguousarray(pixels).ravel(), bitorder="little").tobytes()
    turn.ImageOrientationPatient = [*turn.ImageOrientationPatient[3:], *turn.ImageOrientationPatient[:3]]
    save(data, tmp_path / "seg.dcm")
    found, _ = masks(tmp_path)
    assert np.array_equal(found["liver"], wanted == 1) and np.array_equal(found["kidney"], wanted == 2)


def test_a_segmentation_with_other_rows_between_the_same_corners_is_refused(tmp_path) -> None:
    data = draw(tmp_path, "seg")
    pixels = data.pixel_array
    data.Rows, data.Columns = 39, 24
    data.PixelData = np.packbits(np.zeros((len(pixels), 39, 24), bool).ravel(), bitorder="little").tobytes()
    data.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence[0].PixelSpacing = [1, 2]
    save(data, tmp_path / "seg.dcm")
    with pytest.raises(FileError, match="is drawn on 24×39 voxels that are not those of its series, 24×20×8"):
        masks(tmp_path)


@pytest.mark.parametrize("keep", [False, True])
def test_what_begins_in_the_series_is_told_without_reading_again(keep, tmp_path, monkeypatch) -> None:
    save(draw(tmp_path, "rtstruct"), tmp_path / "rtstruct.dcm")
    parsed = []
    parse = pydicom.dcmread
    monkeypatch.setattr(pydicom, "dcmread", lambda *a, **b: parsed.append(a) or parse(*a, **b))
    (series,) = dicom.find([tmp_path], keep=keep).series
    assert len(parsed) == 9 and [one.drawn for one in series.drawings[0].items] == [True, True]
