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
import re
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
SAME_PLACE = 1e-3
"""Millimetres up to which slices lie at one place."""
HEAD = 132
"""Bytes at the beginning of a DICOM file, the last four of which are its mark."""
FIRST = (b"\2\0", b"\x08\0")
"""How elements begin of the groups that come first in a DICOM object."""
NO_MARK = "it lacks the mark of DICOM at its beginning"
LARGEST = 1 << 32
"""Bytes of one object in an archive, at most."""
DEFERRED = 1 << 12
"""Bytes of a value from which on it stays in its file until it is asked for, where a header is kept."""
LPS = np.diag([-1.0, -1.0, 1.0, 1.0])
"""From LPS to RAS, and back."""

_PIXELS, _PADDING = 0x7FE00010, 0xFFFCFFFC
"""The tags of Pixel Data and Data Set Trailing Padding."""
_EXPORT = "export the series again, as a whole"
_TAGS = """
    SOPClassUID SOPInstanceUID SeriesInstanceUID StudyInstanceUID FrameOfReferenceUID PatientID IssuerOfPatientID
    Modality Rows Columns NumberOfFrames ReferencedSeriesSequence SegmentSequence SegmentationType
    SharedFunctionalGroupsSequence PerFrameFunctionalGroupsSequence ImagePositionPatient ImageOrientationPatient PixelSpacing
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
        return read(BytesIO(self.bytes_of(part)) if part.member else part.path, **how)

    def bytes_of(self, part: Part) -> bytes:
        """The whole file of an object. Raises whatever zipfile does."""
        if not part.member:
            return part.path.read_bytes()
        if self._archive is None or part.path != self._path:
            self.__exit__()
            self._archive, self._path = zipfile.ZipFile(part.path), part.path
        if self._archive.getinfo(part.member).file_size > LARGEST:
            raise Unfit(f"an object of more than {LARGEST >> 30} GiB")
        try:
            return self._archive.read(part.member)
        except (
            RuntimeError,
            zipfile.BadZipFile,
            zlib.error,
        ) as error:  # which quote the name of the file in it
            how_so = (
                "encrypted, or packed in an unknown way" if isinstance(error, RuntimeError) else "damaged"
            )
            raise Unfit(f"its archive is {how_so}") from None


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
class Item:
    """A segment of a SEG, or an ROI of an RTSTRUCT. drawn: does it hold a voxel, or a closed contour; frame: the UID of the frame of
    reference of an ROI, empty where it says none; starts: [N, 3] the first point of each closed contour, mm in LPS, while it is
    not known on which series it lies; else None."""

    number: int
    name: str
    drawn: bool
    frame: str = ""
    starts: np.ndarray | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class Drawing:
    """A DICOM SEG or RTSTRUCT. series, frame: the UIDs of the series and the frames of reference that it names.

    Of a drawing on a series, items are those of the series' frame of reference, and an ROI wholly beyond the series is not
    drawn. elsewhere: how many items belong to another frame of reference; beyond: how many lie wholly beyond the series.
    """

    part: Part = field(repr=False)
    uid: str
    kind: str
    series: frozenset[str]
    frame: frozenset[str]
    items: tuple[Item, ...]
    elsewhere: int = 0
    beyond: int = 0

    @property
    def name(self) -> str:
        return pseudonym(self.uid, self.kind.lower())

    def masks(self) -> Iterator[tuple[str, Drawn]]:
        """Its names with what is drawn for each, also where that is nothing."""
        for item in self.items:
            yield item.name, Drawn(self.part.path, self.part.member, item.number)


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
            return file.read(HEAD)[128:] == b"DICM"
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
    """The series in folders, with all that lies below them, files and archives. No pixel is read. Files of other kinds
    are passed over, and so are copies of an object. Two different objects of one UID are damaged, and so are files that hold no
    DICOM, though their names say that they should.

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
    others = 0
    for number, header, part in _headers(parts, damaged, keep):
        modality = modality_of(header)
        if modality in DRAWINGS:
            try:
                drawings.append(_drawing(header, part))
            except Exception as error:
                damaged.append((part.path, f"{modality}: {reason(error)}"))
        elif modality in IMAGES and header.get("Rows") and header.get("SeriesInstanceUID"):
            images.setdefault(str(header.SeriesInstanceUID), []).append((number, header, part))
        elif modality in ("", *IMAGES) and _read_by_us(header):
            damaged.append((part.path, "its header is cut off"))
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
        here = _drawn_on([header for _, header, _ in members], drawn.get(uid, ()))
        found.append(
            Series(
                uid,
                str(first.get("StudyInstanceUID") or ""),
                str(first.get("FrameOfReferenceUID") or ""),
                modality_of(first),
                person if first.get("PatientID") else "",
                tuple(part for *_, part in members),
                tuple(sorted(here, key=lambda drawing: drawing.name)),
            )
        )
    return Found(tuple(sorted(found, key=lambda of: of.name)), tuple(stray), others, tuple(damaged))


def modality_of(header: Any) -> str:
    """The modality of an object, in capitals, as DICOM writes it; empty where it says none."""
    return str(header.get("Modality") or "").strip().upper()


def _read_by_us(header: Any) -> bool:
    """Is an object an image or a drawing by its class, or does it say none. A DICOMDIR is neither, nor are raw data of a scanner, which
    have the modality of its images."""
    meta = getattr(header, "file_meta", None) or {}
    kind = str(header.get("SOPClassUID") or meta.get("MediaStorageSOPClassUID") or "")
    return not kind or bool(re.search("Image|Segmentation|Structure Set", pydicom().uid.UID(kind).name))


def _issuer(header: Any) -> str:
    return str(header.get("IssuerOfPatientID") or "")


def _headers(
    parts: Iterable[Part], damaged: list[tuple[Path, str]], keep: bool
) -> Iterator[tuple[int, Any, Part]]:
    """The number of each object in its series, its header, and where it is; an object of a UID that was there before is left out."""
    pydicom()
    other = importlib.import_module("pydicom.errors").InvalidDicomError
    some = {"stop_before_pixels": True, "specific_tags": _TAGS.split()}
    seen: dict[str, Part] = {}
    shapes: set[str] = set()
    blank: list[tuple[Part, str]] = []
    with Reader() as reader, Reader() as earlier:
        for part in parts:
            kept = keep and not part.member  # in an archive nothing can be left for later
            try:
                header = reader.read(part, **({"defer_size": DEFERRED} if kept else some))
                number = int(header.get("InstanceNumber") or 0)
                uid = str(header.get("SOPInstanceUID") or "")
                shapes.add(_shape(part))
                if uid and (first := seen.setdefault(uid, part)) is not part:
                    if told := _difference(earlier, first, reader, part):
                        damaged.append((part.path, told))
                    continue
            except other:
                blank += [(part, told)] if (told := _lacks(reader, part)) else []
                continue
            except DataError:
                raise
            except Exception as error:  # pydicom raises whatever it meets in a damaged file
                damaged.append((part.path, reason(error)))
                continue
            kept = kept and modality_of(header) in IMAGES
            yield number, header, replace(part, content=header) if kept else part
    for part, told in blank:
        if told == NO_MARK or _named_as_dicom(part) or _shape(part) in shapes:
            damaged.append((part.path, told))


def _lacks(reader: Reader, part: Part) -> str:
    """What a file without the mark of DICOM lacks; empty for one that may well be of another kind."""
    with BytesIO(reader.bytes_of(part)) if part.member else part.path.open("rb") as file:
        head = file.read(HEAD)
        if not head:
            return "it is empty"
        if not head.strip(b"\0") and not any(
            block.strip(b"\0") for block in iter(lambda: file.read(1 << 20), b"")
        ):
            return "it holds zeros alone"
    if len(head) < HEAD:
        return f"it ends after {len(head)} bytes"
    return NO_MARK if _named_as_dicom(part) or _bare(head) else ""


def _bare(head: bytes) -> bool:
    """Does a file begin with two elements of DICOM in place of its mark."""
    length = int.from_bytes(head[6:8] if head[4:6].isalpha() else head[4:8], "little")
    return head[:2] in FIRST and head[8 + length : 10 + length] in FIRST


def _named_as_dicom(part: Part) -> bool:
    return Path(part.member or part.path).suffix.lower() in (".dcm", ".dicom")


def _shape(part: Part) -> str:
    """A file's name with its numbers and hashes replaced: equal for objects that are exported together, and for no README."""
    name = Path(part.member or part.path).name
    return re.sub(r"[0-9A-Fa-f]{8,}(-[0-9A-Fa-f]{4,})*|[0-9]+(\.[0-9]+)*", "#", name)


def _difference(earlier: Reader, one: Part, reader: Reader, other: Part) -> str:
    """How two objects of one UID differ; empty where they are copies. Raises whatever pydicom and zipfile do."""
    if one.content is None and earlier.bytes_of(one) == reader.bytes_of(other):
        return ""
    first, second = earlier.read(one), reader.read(other)
    if first.get("PatientID") != second.get("PatientID"):
        return "two different objects of one UID, of two patients"
    return "" if _equal(first, second) else "two different objects of one UID"


def _equal(one: Any, other: Any) -> bool:
    """Do two objects say the same, however they are encoded. Lengths, padding and private elements do not count."""
    first, second = (
        {e.tag: e for e in data if e.tag.element and e.tag != _PADDING and not e.tag.is_private}
        for data in (one, other)
    )
    if _PIXELS in first and _PIXELS in second and _syntax(one) != _syntax(other):
        unpacked = importlib.import_module("pydicom.pixels").pixel_array
        if not np.array_equal(unpacked(one), unpacked(other)):
            return False
        del first[_PIXELS], second[_PIXELS]
    return first == second


def _syntax(data: Any) -> str:
    return str(data.file_meta.get("TransferSyntaxUID"))


def _parts(paths: Iterable[Path], damaged: list[tuple[Path, str]]) -> Iterator[Part]:
    for path in paths:
        if path.is_dir():
            walked = {os.path.realpath(path)}  # a link may lead back

            def closed(error: OSError) -> None:
                damaged.append((Path(error.filename), f"its folder cannot be read: {reason(error)}"))

            for base, folders, files in os.walk(path, onerror=closed, followlinks=True):
                inside = {
                    name: os.path.realpath(Path(base, name)) for name in sorted(folders) if name[0] != "."
                }
                folders[:] = [name for name, place in inside.items() if place not in walked]
                walked |= set(inside.values())
                inner = (Path(base, name) for name in sorted(files) if not name.startswith("."))
                yield from _parts((file for file in inner if file.name != "DICOMDIR"), damaged)
        elif path.suffix.lower() == ".zip":
            try:
                with zipfile.ZipFile(path) as archive:
                    members = [item.filename for item in archive.infolist() if not _hidden(item)]
            except Exception as error:  # zipfile raises whatever it meets in a damaged archive
                damaged.append((path, f"no archive that can be read ({reason(error)})"))
                continue
            yield from (Part(path, name) for name in sorted(members) if Path(name).name != "DICOMDIR")
        else:
            yield Part(path)


def _hidden(item: zipfile.ZipInfo) -> bool:
    """Is a member of an archive a folder, or in one or a file whose name begins with a point, as those that systems add."""
    return item.is_dir() or any(part[0] == "." and part != ".." for part in Path(item.filename).parts)


def _drawing(header: Any, part: Part) -> Drawing:
    uid, kind = str(header.SOPInstanceUID), modality_of(header)
    if kind == "SEG":
        # numbers of the frames' segments; a LABELMAP does not say them, and then all count as drawn
        there = {
            int(item.ReferencedSegmentNumber)
            for frame in header.get("PerFrameFunctionalGroupsSequence") or ()
            for item in frame.get("SegmentIdentificationSequence") or ()
        }
        every = str(header.get("SegmentationType") or "") == "LABELMAP"
        items = tuple(
            Item(int(s.SegmentNumber), str(s.SegmentLabel).strip(), every or int(s.SegmentNumber) in there)
            for s in header.SegmentSequence
            if int(s.SegmentNumber) > 0
        )
        series = {str(item.SeriesInstanceUID) for item in header.get("ReferencedSeriesSequence") or ()}
        frames = {str(header.get("FrameOfReferenceUID") or "")}
        return Drawing(part, uid, kind, frozenset(series), frozenset(frames - {""}), items)
    items = _roi_items(header)
    references = header.get("ReferencedFrameOfReferenceSequence") or ()
    series = {
        str(item.SeriesInstanceUID)
        for reference in references
        for study in reference.get("RTReferencedStudySequence") or ()
        for item in study.get("RTReferencedSeriesSequence") or ()
    }
    frames = {str(reference.get("FrameOfReferenceUID") or "") for reference in references}
    return Drawing(part, uid, kind, frozenset(series), frozenset(frames - {""}), items)


def _roi_items(header: Any) -> tuple[Item, ...]:
    contours, items = contours_of(header), list[Item]()
    for roi in header.StructureSetROISequence:
        number, frame = int(roi.ROINumber), str(roi.get("ReferencedFrameOfReferenceUID") or "").strip()
        try:
            closed = [points[0] for points in closed_of(contours.get(number, ()), 3)]
            drawn, starts = bool(closed), np.array(closed, float).reshape(-1, 3)
        except Exception:  # who reads such an ROI says what is wrong with it
            drawn, starts = True, None
        items.append(Item(number, str(roi.ROIName).strip(), drawn, frame, starts))
    return tuple(items)


def contours_of(data: Any) -> dict[int, list[Any]]:
    """ROI number -> its contours, of an RTSTRUCT."""
    contours: dict[int, list[Any]] = {}
    for roi in data.get("ROIContourSequence") or ():
        contours.setdefault(int(roi.ReferencedROINumber), []).extend(roi.get("ContourSequence") or ())
    return contours


def closed_of(contours: Iterable[Any], most: int = 0) -> Iterator[np.ndarray]:
    """The points of those contours that are closed; most: as of `_closed_points`."""
    return (points for contour in contours if (points := _closed_points(contour, most)) is not None)


def _closed_points(contour: Any, most: int = 0) -> np.ndarray | None:
    """The points [n, 3] of a closed contour of an RTSTRUCT, mm in LPS; None of points, of an open line, and of one with fewer than three
    points, which encloses nothing. most: so many of the first, at least 3; 0: all. Raises ValueError for something else than numbers.
    """
    kind = str(contour.get("ContourGeometricType") or "")
    if not kind.startswith("CLOSED") or "ContourData" not in contour:
        return None
    # as it lies in the file: pydicom would check and keep every number, and with explicit VR takes one above 64 kB for bytes of
    # an unknown kind
    value = contour.get_item("ContourData").value
    value = value if isinstance(value, bytes) else contour.ContourData
    texts = value.rstrip(b" \0").split(b"\\", 3 * most or -1) if isinstance(value, bytes) else value or ()
    if len(texts) < 9:
        return None
    points = np.array([float(text) for text in (texts[: 3 * most] if most else texts)]).reshape(-1, 3)
    if not np.isfinite(points).all():
        raise Unfit("a contour with numbers that are not finite")
    return points


def _drawn_on(headers: Sequence[Any], drawings: Sequence[Drawing]) -> Iterator[Drawing]:
    """Drawings as they are on a series of these headers."""
    frame = str(headers[0].get("FrameOfReferenceUID") or "")
    rois = any(item.starts is not None for drawing in drawings for item in drawing.items)
    grid = _grid(headers) if rois else None
    for drawing in drawings:
        here = [item for item in drawing.items if not frame or item.frame in ("", frame)]
        beyond = _beyond(drawing, here, *grid) if grid is not None else set()
        items = tuple(
            replace(item, drawn=item.drawn and item.number not in beyond, starts=None) for item in here
        )
        elsewhere = len(drawing.items) - len(here)
        yield replace(drawing, items=items, elsewhere=elsewhere, beyond=len(beyond))


def _beyond(drawing: Drawing, items: Sequence[Item], to_index: np.ndarray, shape: np.ndarray) -> set[int]:
    """The numbers of those ROIs that lie wholly beyond a grid, whose contours are read again where none begins in it."""
    doubtful = [
        item.number
        for item in items
        if item.starts is not None and len(item.starts) and not _reach(item.starts[:, None], to_index, shape)
    ]
    if not doubtful:
        return set()
    try:
        with Reader() as reader:
            contours = contours_of(reader.read(drawing.part))
        return {
            number
            for number in doubtful
            if not any(_reach(points[None], to_index, shape) for points in closed_of(contours[number]))
        }
    except Exception:  # who reads such an ROI says what is wrong with it
        return set()


def _reach(points: np.ndarray, to_index: np.ndarray, shape: np.ndarray) -> bool:
    """May any of these contours [N, n, 3], mm in LPS, hold something of a grid."""
    places = points @ to_index[:3, :3].T + to_index[:3, 3]
    z, across = slice_at(places[..., 2].mean(1)), places[..., :2]
    return bool(within(z, across.min(1), across.max(1), shape).any())


def _grid(headers: Sequence[Any]) -> tuple[np.ndarray, np.ndarray] | None:
    """From mm in LPS to voxel indices [4, 4], and the number of voxels [3], as the headers of a series have it; None where they hold no
    even stack of several slices, as `load` says."""
    try:
        header, frames = headers[0], [frame for header in headers for frame in _frames(header)]
        _, turn, size, _ = frames[0]
        along, (rows, columns) = _direction(turn), map(float, size.PixelSpacing)
        places = np.array([[float(mm) for mm in place.ImagePositionPatient] for place, *_ in frames])
        if not all(np.allclose(_direction(turn), along, atol=1e-3) for _, turn, *_ in frames):
            return None
        places = places[np.argsort(places @ np.cross(*along))]
        count = 1 + int((np.diff(places @ np.cross(*along)) > SAME_PLACE).sum())
        if count == 1:
            return None
        affine = np.eye(4)
        affine[:3, 0], affine[:3, 1] = along[0] * columns, along[1] * rows
        affine[:3, 2], affine[:3, 3] = (places[-1] - places[0]) / (count - 1), places[0]
        return np.linalg.inv(affine), np.array([int(header.Columns), int(header.Rows), count])
    except Exception:  # pydicom raises whatever it meets in a damaged header
        return None


def within(z: Any, low: np.ndarray, high: np.ndarray, shape: Sequence[int] | np.ndarray) -> Any:
    """May contours hold something of a grid. z: their slice; low, high: [..., 2] their lowest and highest places in it, in voxels."""
    beside = (high < -0.5) | (low > np.subtract(shape[:2], 0.5))
    return (z >= 0) & (z < shape[2]) & ~beside.any(-1)


def slice_at(z: Any) -> Any:
    """The slice in which places lie along the slices, in voxels; one half-way between two is of the upper one."""
    return np.floor(np.round(z, 3) + 0.5).astype(int)


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
    direction, patient, study or frame of reference, for slices at one place that differ, for missing ones, and for a stack whose
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
                for name in ("PixelData", "FloatPixelData", "DoubleFloatPixelData"):
                    if name in data:
                        del data[name]
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
    if not data.get("PerFrameFunctionalGroupsSequence") and int(data.get("NumberOfFrames") or 1) > 1:
        raise Unfit(f"{data.NumberOfFrames} frames that do not say where they lie")
    if "MOSAIC" in (data.get("ImageType") or ()):
        raise Unfit("a mosaic of slices, which do not say where they lie")
    if data.get("ModalityLUTSequence") and data.get("RescaleSlope") is None:
        raise Unfit("a lookup table of its values, and a slope and an intercept are read")
    # unlike `data.pixel_array` it keeps no copy in the header
    pixels = importlib.import_module("pydicom.pixels").pixel_array(data)
    frames = pixels.reshape(-1, *pixels.shape[-2:])
    for number, (about, values) in enumerate(zip(_frames(data), frames, strict=True), start=1):
        yield replace(_plane(data, *about, values), frame=number)


def _frames(data: Any) -> Iterator[tuple[Any, Any, Any, Any]]:
    """What says of each frame of an object where it lies, its direction, its spacing and its scale; of one of a single frame itself."""
    groups = data.get("PerFrameFunctionalGroupsSequence")
    if not groups:
        yield data, data, data, data
        return
    shared = (data.get("SharedFunctionalGroupsSequence") or [None])[0]

    def of(frame: Any, name: str) -> Any:
        found = frame.get(name) or (shared.get(name) if shared is not None else None)
        return found[0] if found else {}

    for frame in groups:
        place, turn = of(frame, "PlanePositionSequence"), of(frame, "PlaneOrientationSequence")
        size, scale = of(frame, "PixelMeasuresSequence"), of(frame, "PixelValueTransformationSequence")
        yield place, turn, size, scale


def _direction(turn: Any) -> np.ndarray:
    """Where the indices of columns and rows lead [2, 3]."""
    return np.array([float(mm) for mm in turn.ImageOrientationPatient]).reshape(2, 3)


def _plane(data: Any, place: Any, turn: Any, size: Any, scale: Any, pixels: np.ndarray) -> _Plane:
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
    whole = pixels.dtype.kind in "iu" and slope == int(slope) and intercept == int(intercept)
    ends = [slope * value + intercept for value in (float(pixels.min()), float(pixels.max()))]
    least, most = min(*ends, slope, intercept), max(*ends, slope, intercept)
    if whole and least >= -(2**31) and most < 2**31:
        kind = np.int16 if least >= -(2**15) and most < 2**15 else np.int32
        values = pixels.astype(kind) * kind(slope) + kind(intercept)
    else:
        values = pixels.astype(np.float32) * np.float32(slope) + np.float32(intercept)
    return _Plane(
        np.array([float(mm) for mm in place.ImagePositionPatient]).reshape(3),
        _direction(turn),
        (columns, rows),
        values,
        float(size.get("SpacingBetweenSlices") or size.get("SliceThickness") or 0),
        data,
    )


def _require_alike(where: Path, planes: Sequence[_Plane], headers: Sequence[Any]) -> None:
    """Raises FileError unless all slices have one direction, size, spacing, patient, study and frame of reference."""
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
    for what, name in (("patients", "PatientID"), ("studies", "StudyInstanceUID")):
        count = len({str(header.get(name) or "") for header in headers})
        if count > 1:
            raise FileError(where, f"holds slices of {count} {what}", _EXPORT)
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
        if abs(float((plane.place - kept[-1].place) @ normal)) > SAME_PLACE:
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
