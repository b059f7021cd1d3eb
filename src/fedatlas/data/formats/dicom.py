"""Series in DICOM (CT, MR, PET): found in folders and archives, told apart, and put together to volumes.

A series is called by a pseudonym, a hash of its UID; messages name that and no file, since names of files may hold those
of patients. What is drawn on a series, DICOM SEG and RTSTRUCT, is in `data.formats.drawings`.

Shapes: X columns, Y rows and Z slices of a series, in the order of the slices' normal. An affine leads from voxel indices
to mm in RAS, as that of NIfTI does; DICOM's own coordinates are LPS.
"""

import hashlib
import importlib
import logging
import math
import os
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from fedatlas.core.errors import DataError
from fedatlas.data.datasets.shared.listing import Drawn
from fedatlas.data.transforms import FileError

IMAGES = ("CT", "MR", "PT")
"""Modalities whose series are read as volumes."""
DRAWINGS = ("SEG", "RTSTRUCT")
EVEN, UNEVEN, GAP = 0.01, 0.25, 1.6
"""In distances of slices: so far beside an even stack a slice may lie without a note, and at all; a gap that is so many times
larger or smaller than the usual one is none of rounding."""
LARGEST = 1 << 32
"""Bytes of one object in an archive, at most."""
DEFERRED = 1 << 12
"""Bytes of a value from which on it stays in its file until it is asked for, where a header is kept."""
LPS = np.diag([-1.0, -1.0, 1.0, 1.0])
"""From LPS to RAS, and back."""

_EXPORT = "export the series again, as a whole"
_TAGS = """
    SOPClassUID SOPInstanceUID SeriesInstanceUID StudyInstanceUID FrameOfReferenceUID PatientID IssuerOfPatientID
    Modality Rows NumberOfFrames ReferencedSeriesSequence SegmentSequence SegmentationType PerFrameFunctionalGroupsSequence
    StructureSetROISequence ReferencedFrameOfReferenceSequence ROIContourSequence InstanceNumber"""


def pydicom() -> Any:
    """The package. Raises DataError, which says what to install, where it is missing."""
    try:
        return importlib.import_module("pydicom")
    except ImportError:
        raise DataError(
            'DICOM needs pydicom 3, which is not installed; run pip install "fedatlas[dicom]"'
        ) from None


@contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings and the log of pydicom, which may quote a value of the header, and with it a patient."""
    log = logging.getLogger("pydicom")
    level = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)


def pseudonym(uid: str, kind: str = "case") -> str:
    """What stands for a UID in names and messages."""
    return f"{kind}-{hashlib.sha256(f'fedatlas {kind} {uid}'.encode()).hexdigest()[:12]}"


def shown_uid(text: str) -> str:
    """A UID or a pseudonym as messages may show it."""
    return text if text.startswith("case-") else pseudonym(text)


# ------------------------------------------------------------------------------------------------ finding


@dataclass(frozen=True)
class Part:
    """One DICOM object. path: its file, or the archive that holds it as `member`; content: itself, a pydicom Dataset, of
    one that was received and lies in no file, or that `find` kept; `load` takes its pixels out."""

    path: Path
    member: str = ""
    content: Any = field(default=None, repr=False)


class Reader:
    """Reads objects one after another; an archive stays open from one to the next. A context."""

    def __init__(self) -> None:
        self._archive: zipfile.ZipFile | None = None
        self._path: Path | None = None

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *error: object) -> None:
        if self._archive is not None:
            self._archive.close()

    def read(self, part: Part, **how: Any) -> Any:
        """A pydicom Dataset; how: as of `pydicom.dcmread`. Raises whatever pydicom and zipfile do."""
        read = pydicom().dcmread
        if part.content is not None:
            return part.content
        if not part.member:
            return read(part.path, **how)
        if self._archive is None or part.path != self._path:
            self.__exit__()
            self._archive, self._path = zipfile.ZipFile(part.path), part.path
        if self._archive.getinfo(part.member).file_size > LARGEST:
            raise Unfit(f"an object of more than {LARGEST >> 30} GiB")
        try:
            content = self._archive.read(part.member)
        except (
            RuntimeError,
            zipfile.BadZipFile,
            zlib.error,
        ) as error:  # which quote the name of the file in it
            how_so = (
                "encrypted, or packed in an unknown way" if isinstance(error, RuntimeError) else "damaged"
            )
            raise Unfit(f"its archive is {how_so}") from None
        return read(BytesIO(content), **how)


@dataclass(frozen=True)
class Series:
    """A series of images. person: equal for series of one patient, also where only some of them name the issuer of its ID,
    and never shown; drawings: what is drawn on it."""

    uid: str
    study: str
    frame: str
    modality: str
    person: str = field(repr=False)
    parts: tuple[Part, ...] = field(repr=False)
    drawings: tuple["Drawing", ...] = ()

    @property
    def name(self) -> str:
        return pseudonym(self.uid)

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(dict.fromkeys(part.path for part in self.parts))

    def __str__(self) -> str:
        """As it is shown to choose from."""
        count = len(self.parts)
        return f"{self.name} ({self.modality}, {count} object{'s' if count > 1 else ''})"


@dataclass(frozen=True)
class Drawing:
    """A DICOM SEG or RTSTRUCT. series, frame: the UIDs of the series and the frames of reference that it names; items:
    number, name and whether anything is drawn, of each segment or ROI."""

    part: Part = field(repr=False)
    uid: str
    kind: str
    series: frozenset[str]
    frame: frozenset[str]
    items: tuple[tuple[int, str, bool], ...]

    @property
    def name(self) -> str:
        return pseudonym(self.uid, self.kind.lower())

    def masks(self) -> Iterator[tuple[str, Drawn]]:
        """Its names with what is drawn for each, also where that is nothing."""
        for number, name, _ in self.items:
            yield name, Drawn(self.part.path, self.part.member, number)


@dataclass(frozen=True)
class Found:
    """What folders, files and archives hold: series in the order of their names, drawings of no series that is there, how
    many other DICOM objects, and a sentence for each file that could not be read."""

    series: tuple[Series, ...]
    stray: tuple[Drawing, ...]
    others: int
    damaged: tuple[tuple[Path, str], ...]


def is_dicom(path: Path) -> bool:
    """Is a file DICOM, by its beginning."""
    try:
        with path.open("rb") as file:
            return file.read(132)[128:] == b"DICM"
    except OSError:
        return False


def is_series(path: Path) -> bool:
    """May a path hold a series: a folder, an archive, or a DICOM file with several frames. A file of one frame is a
    picture unless somebody knows better."""
    if path.is_dir() or path.suffix.lower() == ".zip":
        return True
    if not is_dicom(path):
        return False
    try:
        header = pydicom().dcmread(path, stop_before_pixels=True, specific_tags=["NumberOfFrames"])
        return int(header.get("NumberOfFrames") or 1) > 1
    except Exception:  # whatever pydicom meets in a damaged file; who reads it says so
        return False


@quiet()
def find(paths: Iterable[Path], *, keep: bool = False) -> Found:
    """The series in folders, with all that lies below them, files and archives. No pixel is read. Files that are not
    DICOM are passed over, and so is an object that is there twice.

    keep: hold the whole headers of images, so that `load` parses them no second time; it can then load each series once.
    """
    damaged: list[tuple[Path, str]] = []
    return _told_apart(_parts(paths, damaged), damaged, keep)


@quiet()
def received(contents: Iterable[Any], where: str) -> Found:
    """As `find`, of objects that were received. where: whence, for messages."""
    return _told_apart((Part(Path(where), str(n), content) for n, content in enumerate(contents)), [])


def _told_apart(parts: Iterable[Part], damaged: list[tuple[Path, str]], keep: bool = False) -> Found:
    images: dict[str, list[tuple[int, Any, Part]]] = {}
    drawings: list[Drawing] = []
    seen: set[str] = set()
    others = 0
    for number, header, part in _headers(parts, damaged, keep):
        uid, modality = str(header.get("SOPInstanceUID") or ""), str(header.get("Modality") or "")
        if uid and uid in seen:
            continue
        seen.add(uid)
        if modality in DRAWINGS:
            try:
                drawings.append(_drawing(header, part))
            except Exception as error:
                damaged.append((part.path, f"{modality}: {reason(error)}"))
        elif not modality or (
            modality in IMAGES and not (header.get("Rows") and header.get("SeriesInstanceUID"))
        ):
            damaged.append((part.path, "its header is cut off"))
        elif modality in IMAGES:
            images.setdefault(str(header.SeriesInstanceUID), []).append((number, header, part))
        else:
            others += 1
    frames: dict[str, list[str]] = {}
    for series, members in images.items():
        frames.setdefault(str(members[0][1].get("FrameOfReferenceUID") or ""), []).append(series)
    drawn: dict[str, list[Drawing]] = {}
    stray: list[Drawing] = []
    for drawing in drawings:
        here = sorted(drawing.series & images.keys())
        if not drawing.series:  # it names no series: a frame of reference that one series alone has will do
            same = [uid for frame in drawing.frame for uid in frames.get(frame, ())]
            here = same if len(same) == 1 else []
        for uid in here:
            drawn.setdefault(uid, []).append(drawing)
        stray += [] if here else [drawing]
    found = []
    unissued = {
        str(members[0][1].get("PatientID")) for members in images.values() if not _issuer(members[0][1])
    }
    for uid, members in images.items():
        members.sort(key=lambda of: (of[0], str(of[1].get("SOPInstanceUID"))))
        first = members[0][1]
        # an ID that one series has without an issuer may be anybody's who has it, and a patient must not be split
        number = str(first.get("PatientID"))
        person = f"{'' if number in unissued else _issuer(first)}|{number}"
        found.append(
            Series(
                uid,
                str(first.get("StudyInstanceUID") or ""),
                str(first.get("FrameOfReferenceUID") or ""),
                str(first.Modality),
                person if first.get("PatientID") else "",
                tuple(part for *_, part in members),
                tuple(sorted(drawn.get(uid, ()), key=lambda drawing: drawing.name)),
            )
        )
    return Found(tuple(sorted(found, key=lambda of: of.name)), tuple(stray), others, tuple(damaged))


def _issuer(header: Any) -> str:
    return str(header.get("IssuerOfPatientID") or "")


def _headers(
    parts: Iterable[Part], damaged: list[tuple[Path, str]], keep: bool
) -> Iterator[tuple[int, Any, Part]]:
    """The number of each object in its series, its header, and where it is."""
    pydicom()
    other = importlib.import_module("pydicom.errors").InvalidDicomError
    some = {"stop_before_pixels": True, "specific_tags": _TAGS.split()}
    with Reader() as reader:
        for part in parts:
            kept = keep and not part.member  # in an archive nothing can be left for later
            try:
                header = reader.read(part, **({"defer_size": DEFERRED} if kept else some))
                number = int(header.get("InstanceNumber") or 0)
            except other:
                continue  # a file of another kind
            except DataError:
                raise
            except Exception as error:  # pydicom raises whatever it meets in a damaged file
                damaged.append((part.path, reason(error)))
                continue
            kept = kept and str(header.get("Modality")) in IMAGES
            yield number, header, replace(part, content=header) if kept else part


def _parts(paths: Iterable[Path], damaged: list[tuple[Path, str]]) -> Iterator[Part]:
    for path in paths:
        if path.is_dir():
            for base, folders, files in os.walk(path):
                folders[:] = sorted(name for name in folders if not name.startswith("."))
                inner = (Path(base, name) for name in sorted(files) if not name.startswith("."))
                yield from _parts((file for file in inner if file.name != "DICOMDIR"), damaged)
        elif path.suffix.lower() == ".zip":
            try:
                with zipfile.ZipFile(path) as archive:
                    members = [item.filename for item in archive.infolist() if not item.is_dir()]
            except (OSError, zipfile.BadZipFile) as error:
                damaged.append((path, f"no archive that can be read ({reason(error)})"))
                continue
            yield from (Part(path, name) for name in sorted(members) if Path(name).name != "DICOMDIR")
        else:
            yield Part(path)


def _drawing(header: Any, part: Part) -> Drawing:
    uid, kind = str(header.SOPInstanceUID), str(header.Modality)
    if kind == "SEG":
        # numbers of the frames' segments; a LABELMAP does not say them, and then all count as drawn
        there = {
            int(item.ReferencedSegmentNumber)
            for frame in header.get("PerFrameFunctionalGroupsSequence") or ()
            for item in frame.get("SegmentIdentificationSequence") or ()
        }
        every = str(header.get("SegmentationType") or "") == "LABELMAP"
        items = tuple(
            (int(s.SegmentNumber), str(s.SegmentLabel).strip(), every or int(s.SegmentNumber) in there)
            for s in header.SegmentSequence
            if int(s.SegmentNumber) > 0
        )
        series = {str(item.SeriesInstanceUID) for item in header.get("ReferencedSeriesSequence") or ()}
        frames = {str(header.get("FrameOfReferenceUID") or "")}
        return Drawing(part, uid, kind, frozenset(series), frozenset(frames - {""}), items)
    there = {
        int(roi.ReferencedROINumber)
        for roi in header.get("ROIContourSequence") or ()
        if roi.get("ContourSequence")
    }
    items = tuple(
        (int(roi.ROINumber), str(roi.ROIName).strip(), int(roi.ROINumber) in there)
        for roi in header.StructureSetROISequence
    )
    references = header.get("ReferencedFrameOfReferenceSequence") or ()
    series = {
        str(item.SeriesInstanceUID)
        for reference in references
        for study in reference.get("RTReferencedStudySequence") or ()
        for item in study.get("RTReferencedSeriesSequence") or ()
    }
    frames = {str(reference.get("FrameOfReferenceUID") or "") for reference in references}
    return Drawing(part, uid, kind, frozenset(series), frozenset(frames - {""}), items)


class Unfit(ValueError):
    """Why an object cannot be used, in words that hold nothing of a patient."""


def reason(error: BaseException) -> str:
    """Why something failed. Texts that may quote a value of the header, and with it a patient, are left out."""
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    plain = isinstance(error, Unfit | EOFError | RuntimeError | zipfile.BadZipFile)
    return str(error).splitlines()[0] if plain and str(error) else type(error).__name__


# ------------------------------------------------------------------------------------------------ volumes


@dataclass(frozen=True)
class Volume:
    """A series put together. voxels: [X, Y, Z] in the units of its header (HU of CT); affine: [4, 4]; headers: of its
    objects without pixels, in the order of the slices; frames: of each slice its number in its object, from 1 on; notes:
    what was assumed or left out, a sentence each."""

    voxels: np.ndarray
    affine: np.ndarray
    headers: tuple[Any, ...]
    frames: tuple[int, ...]
    notes: tuple[str, ...]


@dataclass
class _Plane:
    """A slice. place: of its first voxel, mm in LPS; along: where columns' and rows' indices lead [2, 3]; spacing: mm
    between columns and between rows."""

    place: np.ndarray
    along: np.ndarray
    spacing: tuple[float, float]
    pixels: np.ndarray
    thickness: float
    header: Any
    frame: int = 1


def series_of(files: Iterable[Path], uid: str) -> Series:
    """The series of a UID in these files and archives. Raises FileError where it is not there any more."""
    found = next((series for series in find(files, keep=True).series if series.uid == uid), None)
    if found is None:
        raise FileError(
            Path(pseudonym(uid)), "its files hold the series no more", "add them, or take the case out"
        )
    return found


@quiet()
def load(series: Series) -> Volume:
    """The volume of a series, of one object per slice or of objects with many frames.

    Raises FileError, which names the series, for objects that cannot be read, for slices of different size, spacing,
    direction or frame of reference, for slices at one place that differ, for missing ones, and for a stack whose
    slices are shifted against each other. Slices that are tilted against their stack, as by a gantry, stay so: the affine is
    skew.
    """
    where, notes = Path(series.name), list[str]()
    planes: list[_Plane] = []
    headers: list[Any] = []
    with Reader() as reader:
        for number, part in enumerate(series.parts, start=1):
            try:
                data = reader.read(part)
                planes += _planes(data)
                if "PixelData" in data:
                    del data["PixelData"]
                headers.append(data)
            except (DataError, MemoryError):
                raise
            except Exception as error:  # pydicom and its decoders raise whatever they meet in a damaged file
                what = f"object {number} of {len(series.parts)} is not readable ({reason(error)})"
                remedy = f"{_EXPORT}; for compressed pixels also install pylibjpeg with its decoders"
                raise FileError(where, what, remedy) from None
    _require_alike(where, planes, headers)
    normal = np.cross(*planes[0].along)
    planes.sort(key=lambda plane: float(plane.place @ normal))
    planes = _without_twins(where, planes, normal, notes)
    step = _step(where, planes, normal, notes)
    affine = np.eye(4)
    affine[:3, 0] = planes[0].along[0] * planes[0].spacing[0]
    affine[:3, 1] = planes[0].along[1] * planes[0].spacing[1]
    affine[:3, 2], affine[:3, 3] = step, planes[0].place
    kinds = {plane.pixels.dtype for plane in planes}
    voxels = np.empty((*planes[0].pixels.T.shape, len(planes)), np.result_type(*kinds), order="F")
    for z, plane in enumerate(planes):
        voxels[..., z] = plane.pixels.T
    if np.issubdtype(voxels.dtype, np.floating) and not np.isfinite(voxels).all():
        raise FileError(where, "holds values that are not finite", _EXPORT)
    ordered = tuple({id(plane.header): plane.header for plane in planes}.values())
    return Volume(voxels, LPS @ affine, ordered, tuple(plane.frame for plane in planes), tuple(notes))


def _planes(data: Any) -> Iterator[_Plane]:
    """The slices of an object. Raises what pydicom does."""
    interpretation = str(data.get("PhotometricInterpretation") or "")
    if interpretation != "MONOCHROME2":
        raise Unfit(f"photometric interpretation {interpretation or 'not given'}, and MONOCHROME2 is read")
    groups = data.get("PerFrameFunctionalGroupsSequence")
    if not groups and int(data.get("NumberOfFrames") or 1) > 1:
        raise Unfit(f"{data.NumberOfFrames} frames that do not say where they lie")
    # unlike `data.pixel_array` it keeps no copy in the header
    pixels = importlib.import_module("pydicom.pixels").pixel_array(data)
    if not groups:
        yield _plane(data, data, data, data, pixels)
        return
    shared = (data.get("SharedFunctionalGroupsSequence") or [None])[0]

    def of(frame: Any, name: str) -> Any:
        found = frame.get(name) or (shared.get(name) if shared is not None else None)
        return found[0] if found else {}

    for number, (frame, values) in enumerate(
        zip(groups, pixels.reshape(-1, *pixels.shape[-2:]), strict=True)
    ):
        place, turn = of(frame, "PlanePositionSequence"), of(frame, "PlaneOrientationSequence")
        size, scale = of(frame, "PixelMeasuresSequence"), of(frame, "PixelValueTransformationSequence")
        yield replace(_plane(data, place, turn, size, values, scale), frame=number + 1)


def _plane(data: Any, place: Any, turn: Any, size: Any, pixels: np.ndarray, scale: Any = None) -> _Plane:
    scale = data if scale is None else scale
    missing = [
        name
        for of, name in (
            (place, "ImagePositionPatient"),
            (turn, "ImageOrientationPatient"),
            (size, "PixelSpacing"),
        )
        if not of.get(name)
    ]
    if missing:
        raise Unfit(f"without {missing[0]}, which says where it lies")
    rows, columns = (float(mm) for mm in size.PixelSpacing)
    slope, intercept = scale.get("RescaleSlope"), float(scale.get("RescaleIntercept") or 0)
    slope = 1.0 if slope is None else float(slope)
    if not (rows > 0 and columns > 0 and math.isfinite(rows * columns * slope * intercept) and slope):
        raise Unfit(f"pixel spacing {rows:g}, {columns:g}, rescale slope {slope:g}, intercept {intercept:g}")
    if slope == int(slope) and intercept == int(intercept):
        ends = int(slope) * np.array([int(pixels.min()), int(pixels.max())]) + int(intercept)
        kind = np.int16 if ends.min() >= -(2**15) and ends.max() < 2**15 else np.int32
        values = pixels.astype(kind) * kind(slope) + kind(intercept)
    else:
        values = pixels.astype(np.float32) * np.float32(slope) + np.float32(intercept)
    return _Plane(
        np.array([float(mm) for mm in place.ImagePositionPatient]).reshape(3),
        np.array([float(mm) for mm in turn.ImageOrientationPatient]).reshape(2, 3),
        (columns, rows),
        values,
        float(size.get("SpacingBetweenSlices") or size.get("SliceThickness") or 0),
        data,
    )


def _require_alike(where: Path, planes: Sequence[_Plane], headers: Sequence[Any]) -> None:
    """Raises FileError unless all slices have one direction, size, spacing and frame of reference."""
    groups: list[list[_Plane]] = []
    for plane in planes:
        if not np.isfinite(plane.place).all() or not np.allclose(
            plane.along @ plane.along.T, np.eye(2), atol=1e-3
        ):
            raise FileError(where, "a slice whose position or direction is none", _EXPORT)
        for group in groups:
            if np.allclose(group[0].along, plane.along, atol=1e-3):
                group.append(plane)
                break
        else:
            groups.append([plane])
    if len(groups) > 1:
        counts = ", ".join(str(n) for n in sorted(map(len, groups), reverse=True))
        what = f"holds slices of {len(groups)} directions ({counts} slices): localizers, or several stacks"
        raise FileError(where, what, "export each direction as a series of its own")
    tests: tuple[tuple[str, Callable[[_Plane], Any]], ...] = (
        ("rows and columns", lambda plane: plane.pixels.shape),
        ("millimetres per pixel", lambda plane: tuple(round(mm, 4) for mm in plane.spacing)),
    )
    for what, of in tests:
        values = sorted({of(plane) for plane in planes})
        if len(values) > 1:
            shown = " and ".join("×".join(f"{n:g}" for n in value) for value in values[:2])
            raise FileError(where, f"holds slices of different {what}: {shown}", _EXPORT)
    frames = {str(header.get("FrameOfReferenceUID") or "") for header in headers}
    if len(frames) > 1:
        what = (
            f"holds slices of {len(frames)} frames of reference, which do not say how they lie to each other"
        )
        raise FileError(where, what, "export each as a series of its own")


def _without_twins(where: Path, planes: list[_Plane], normal: np.ndarray, notes: list[str]) -> list[_Plane]:
    """The slices, each place once. Raises FileError where two at one place differ."""
    kept, equal, other = planes[:1], 0, 0
    for plane in planes[1:]:
        if abs(float((plane.place - kept[-1].place) @ normal)) > 1e-3:
            kept.append(plane)
        elif np.array_equal(plane.pixels, kept[-1].pixels):
            equal += 1
        else:
            other += 1
    if other:
        what = f"holds {other} slices at places where there is another one that differs: phases, echoes or repetitions"
        raise FileError(where, what, "export each of them as a series of its own")
    if equal:
        notes.append(f"{equal} slices are there twice, with equal values; each was taken once")
    return kept


def _step(where: Path, planes: Sequence[_Plane], normal: np.ndarray, notes: list[str]) -> np.ndarray:
    """[3] from a slice to the next, mm in LPS. Raises FileError for a gap, for slices that are spaced unevenly and for slices beside
    their line.

    Positions that a scanner rounds, as .625 mm to a tenth, make gaps uneven and move no slice far; small differences of many gaps add up.
    """
    if len(planes) == 1:
        thickness = planes[0].thickness
        if not thickness > 0:
            notes.append("a single slice without a thickness; 1 mm was taken")
        return normal * (thickness if thickness > 0 else 1.0)
    places = np.stack([plane.place for plane in planes])
    away = np.diff(places @ normal)
    usual = float(np.median(away))
    worst = int(np.maximum(away / usual, usual / away).argmax())
    if not 1 / GAP < away[worst] / usual < GAP:
        what = (
            f"between slices {worst + 1} and {worst + 2} of {len(planes)} lie {away[worst]:.4g} mm, and {usual:.4g} mm "
            "between most others: slices are missing, or spaced unevenly"
        )
        raise FileError(where, what, f"{_EXPORT}, or resample it evenly")
    step = (places[-1] - places[0]) / (len(planes) - 1)
    even = float(step @ normal)
    beside = places - (places[0] + np.arange(len(planes))[:, None] * step)
    off = np.abs(beside @ normal)
    apart = f"its slices lie {away.min():.4g} to {away.max():.4g} mm apart"
    if off.max() > UNEVEN * even:
        what = (
            f"{apart}: spaced evenly, slice {off.argmax() + 1} of {len(planes)} would lie {off.max():.3g} mm away from where it is, "
            f"and {UNEVEN * even:.3g} mm are allowed"
        )
        raise FileError(where, what, f"{_EXPORT}, or resample it evenly")
    if off.max() > EVEN * even:
        notes.append(f"{apart}, and were taken as even: {off.max():.2g} mm off at the most")
    beside -= (beside @ normal)[:, None] * normal
    shift = float(np.sqrt((beside**2).sum(1)).max())
    if shift > 0.5 * min(planes[0].spacing):
        what = f"its slices are shifted against each other by up to {shift:.3g} mm"
        raise FileError(where, what, f"{_EXPORT}, or resample it onto one grid")
    return step
