"""Labels in DICOM, segmentations (SEG) and structure sets (RTSTRUCT): read onto the grid of a series, and written for it.

Shapes: C classes; X columns, Y rows and Z slices of a series, as in `data.formats.dicom`.
"""

import colorsys
import hashlib
import importlib
import re
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from scipy import ndimage

import fedatlas
from fedatlas.core.errors import DataError
from fedatlas.core.labels import SHORT_SIDES, LabelSpace
from fedatlas.data.datasets.shared.listing import Drawn
from fedatlas.data.formats.dicom import (
    LPS,
    UNEVEN,
    Part,
    Reader,
    Volume,
    closed_of,
    contours_of,
    modality_of,
    pseudonym,
    pydicom,
    quiet,
    reason,
    slice_at,
    within,
)
from fedatlas.data.formats.flat import Note
from fedatlas.data.transforms import FileError, saved

OFF_GRID = (0.1, 0.1, UNEVEN)
"""So many voxels a frame of a SEG may lie beside the series' grid: across slices as far as the slices of the series themselves."""
ONE_PLANE = 0.01
"""In distances of slices: contours that lie nearer to each other are of one plane."""


# ------------------------------------------------------------------------------------------------ reading


@quiet()
def read_masks(
    masks: Sequence[tuple[str, Drawn]], shape: Sequence[int], affine: np.ndarray, case: str
) -> tuple[dict[str, np.ndarray], list[Note]]:
    """Own name -> what is drawn, bool [X, Y, Z]; several of one name are united. shape, affine: the grid of the series.

    Raises FileError, which names the case and the object by its pseudonym, for one that cannot be read, does not hold the number that is
    asked for, or is drawn on another grid.
    """
    found: dict[str, np.ndarray] = {}
    notes: list[Note] = []
    to_index = np.linalg.inv(LPS @ affine)
    objects: dict[tuple[Path, str], dict[int, list[str]]] = {}
    for name, mask in masks:
        objects.setdefault((mask.path, mask.member), {}).setdefault(mask.number, []).append(name)
    for (path, member), names in objects.items():
        title = Path(case, "label")
        try:
            with Reader() as reader:
                data = reader.read(Part(path, member))
                kind = modality_of(data).lower()
                title = Path(case, pseudonym(str(data.SOPInstanceUID), kind))
                draw = _segments if kind == "seg" else _rois
                for number, plane in draw(data, names, tuple(shape), to_index, title, notes).items():
                    for name in names[number]:
                        found[name] = found[name] | plane if name in found else plane
        except (DataError, MemoryError):
            raise
        except Exception as error:  # pydicom and its decoders raise whatever they meet in a damaged file
            what = f"not readable as DICOM SEG or RTSTRUCT ({reason(error)})"
            raise FileError(title, what, "export it again") from None
    return found, notes


def _segments(
    data: Any, wanted: Any, shape: tuple[int, ...], to_index: np.ndarray, title: Path, notes: list[Note]
) -> dict[int, np.ndarray]:
    """Segment number -> bool [X, Y, Z]."""
    masks = {number: np.zeros(shape, dtype=bool, order="F") for number in wanted}
    frames = data.get("PerFrameFunctionalGroupsSequence") or ()
    if not frames or "PixelData" not in data:
        return masks
    kind = str(data.get("SegmentationType") or "BINARY")
    pixels = importlib.import_module("pydicom.pixels").pixel_array(data)
    pixels = pixels if pixels.ndim == 3 else pixels[None]
    half = float(data.get("MaximumFractionalValue") or 255) / 2 if kind == "FRACTIONAL" else 0
    shared = (data.get("SharedFunctionalGroupsSequence") or [{}])[0]
    for frame, values in zip(frames, pixels, strict=True):
        number = 0
        if kind != "LABELMAP":
            number = int(frame.SegmentIdentificationSequence[0].ReferencedSegmentNumber)
            if number not in masks:
                continue
        measures, turn, place = (
            (frame.get(name) or shared[name])[0]
            for name in ("PixelMeasuresSequence", "PlaneOrientationSequence", "PlanePositionSequence")
        )
        z, exchanged = _slice_of(place, turn, measures, values.shape, shape, to_index, title)
        for segment in list(masks) if kind == "LABELMAP" else [number]:
            drawn = values == segment if kind == "LABELMAP" else values > half
            masks[segment][..., z] |= drawn if exchanged else drawn.T
    return masks


def _slice_of(
    place: Any,
    turn: Any,
    measures: Any,
    size: Sequence[int],
    shape: Sequence[int],
    to_index: Any,
    title: Path,
) -> tuple[int, bool]:
    """The slice of the series that a frame lies on, and whether the rows of one are the columns of the other. Raises FileError where its
    voxels are not those of the series."""
    along = np.array([float(v) for v in turn.ImageOrientationPatient]).reshape(2, 3)
    rows, columns = (float(mm) for mm in measures.PixelSpacing)
    first = np.array([float(mm) for mm in place.ImagePositionPatient])
    row = first + along[0] * columns * (size[1] - 1)
    last = row + along[1] * rows * (size[0] - 1)
    corners = [(to_index @ [*point, 1])[:3] for point in (first, row, last)]
    z = round(float(corners[0][2]))
    for exchanged in (False, True):
        of_row = (0, shape[1] - 1, z) if exchanged else (shape[0] - 1, 0, z)
        wanted = [(0, 0, z), of_row, (shape[0] - 1, shape[1] - 1, z)]
        alike = tuple(size) == (tuple(shape[:2]) if exchanged else (shape[1], shape[0]))
        if alike and 0 <= z < shape[2] and (np.abs(np.subtract(corners, wanted)) <= OFF_GRID).all():
            return z, exchanged
    what = f"is drawn on {size[1]}×{size[0]} voxels that are not those of its series, {'×'.join(map(str, shape))}"
    raise FileError(title, what, "export it on the grid of the series")


def _rois(
    data: Any, wanted: Any, shape: tuple[int, ...], to_index: np.ndarray, title: Path, notes: list[Note]
) -> dict[int, np.ndarray]:
    """ROI number -> bool [X, Y, Z]."""
    every, told, masks = contours_of(data), Counter[str](), dict[int, np.ndarray]()
    for number in wanted:
        names = " and ".join(map(repr, wanted[number]))
        contours = every.get(number, ())
        closed = list(closed_of(contours))
        told["contours"] += len(contours)
        told["open"] += len(contours) - len(closed)
        kept = _without_copies(closed)
        told["copies"] += len(closed) - len(kept)
        planes = _planes([points @ to_index[:3, :3].T + to_index[:3, 3] for points in kept], title)
        masks[number], small = _filled(planes, shape, names, title, told)
        if small:
            what = (
                f"no contour of {names} holds the centre of a voxel; the voxel in which each lies was taken"
            )
            notes.append(Note(title, what, "see that an ROI so small is meant"))
        notes += _gaps(masks[number], names, title)
    notes += _told(told, title)
    return masks


_TOLD = {
    "beyond": (
        "contours",
        "contours lie beyond its series, and were left out",
        "see that the series is whole",
    ),
    "open": ("contours", "contours are points or open lines, and were left out", "close them"),
    "copies": ("contours", "contours are there twice, and were taken once", "see that each is meant once"),
    "united": (
        "slices",
        "slices hold contours of several planes, which were united",
        "see that they are drawn on the slices of this series",
    ),
}
"""What is counted over the ROIs of an object -> of what it is a share, what is told of it, and what to do."""


def _told(told: Counter[str], title: Path) -> list[Note]:
    return [
        Note(title, what, remedy, told[found] / told[of])
        for found, (of, what, remedy) in _TOLD.items()
        if told[found]
    ]


def _without_copies(contours: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Contours, points [n, 3], each once, wherever it begins and whichever way it runs."""
    found: dict[bytes, np.ndarray] = {}
    for points in contours:
        ring = points[:-1] if np.array_equal(points[0], points[-1]) else points
        found.setdefault((ring[np.lexsort(ring.T)] + 0.0).tobytes(), points)
    return list(found.values())


def _planes(contours: Sequence[np.ndarray], title: Path) -> list[tuple[int, list[np.ndarray]]]:
    """Contours, points [n, 3] in voxels, by the plane that they lie in, each with its slice. Raises FileError for one that lies in none."""
    planes: list[tuple[float, list[np.ndarray]]] = []
    for z, points in sorted(((float(of[:, 2].mean()), of) for of in contours), key=lambda of: of[0]):
        if float(np.abs(points[:, 2] - z).max()) > 0.5:
            what = "holds a contour that lies in no slice of its series"
            raise FileError(title, what, "export it for the series on which it is drawn")
        if planes and z - planes[-1][0] < ONE_PLANE:
            planes[-1][1].append(points)
        else:
            planes.append((z, [points]))
    return [(int(slice_at(z)), members) for z, members in planes]


def _filled(
    planes: Sequence[tuple[int, list[np.ndarray]]],
    shape: tuple[int, ...],
    names: str,
    title: Path,
    told: Counter[str],
) -> tuple[np.ndarray, bool]:
    """Voxels [X, Y, Z] whose centres lie inside an odd number of the contours of a plane, so that holes stay; planes of one slice are
    united. names: of the ROI; told: what is counted.

    Where the contours hold no centre at all, the voxel that each lies in is taken; whether that is so comes second. Raises
    FileError where all contours lie beyond the series, or cancel each other.
    """
    from skimage.draw import polygon2mask

    mask = np.zeros(shape, dtype=bool, order="F")
    lone, slices, covered = list[tuple[int, ...]](), Counter[int](), False
    for z, contours in planes:
        drawn = np.zeros(shape[:2], dtype=bool)
        before = len(lone)
        for points in contours:
            places = points[:, :2]
            if not within(z, places.min(0), places.max(0), shape):
                told["beyond"] += 1
                continue
            lone.append((*np.clip(np.rint(places.mean(0)).astype(int), 0, np.subtract(shape[:2], 1)), z))
            low = np.maximum(np.floor(places.min(0)).astype(int), 0)
            high = np.minimum(np.ceil(places.max(0)).astype(int) + 1, shape[:2])
            inside = polygon2mask(tuple(high - low), places - low)
            covered |= bool(inside.any())
            drawn[low[0] : high[0], low[1] : high[1]] ^= inside
        if len(lone) > before:
            mask[..., z] |= drawn
            slices[z] += 1
    told["slices"] += len(slices)
    told["united"] += sum(count > 1 for count in slices.values())
    if planes and not lone:
        what = f"every contour of {names} lies beyond its series"
        raise FileError(title, what, "export the whole series, or take the ROI out")
    if covered and not mask.any():
        what = f"the contours of {names} cancel each other: no voxel lies inside an odd number of them"
        raise FileError(title, what, "export it again, with each contour once")
    small = bool(lone) and not covered
    if small:
        mask[tuple(np.transpose(lone))] = True
    return mask, small


def _gaps(mask: np.ndarray, names: str, title: Path) -> list[Note]:
    """A note on slices without a voxel between the first and the last of an ROI, if there are any."""
    slices = np.flatnonzero(mask.any(axis=(0, 1)))
    between = int(slices[-1] - slices[0]) - 1 if len(slices) else 0
    empty = between + 2 - len(slices)
    if between <= 0 or not empty:
        return []
    what = f"slices between the first and the last contour of {names} are empty"
    remedy = "they count as without it: draw it on every slice, or see that it has such gaps"
    return [Note(title, what, remedy, empty / between)]


# ------------------------------------------------------------------------------------------------ writing


CATEGORY = ("91723000", "SCT", "Anatomical Structure")
ALTERED = ("49755003", "SCT", "Morphologically Altered Structure")
LESION = re.compile(r"\b(tumou?r|lesion|mass|nodule|cyst|o?edema|necros[ie]s)(s|es)?\b")
"""Words for what is no organ, in names of classes and meanings of codes."""


@dataclass(frozen=True)
class Meaning:
    """What a class is in DICOM's codes: value, scheme and meaning of its kind, its side, if it has one, and its category."""

    value: str
    scheme: str
    meaning: str
    side: str = ""
    category: tuple[str, str, str] = CATEGORY


SIDES = {"left": ("7771000", "SCT", "Left"), "right": ("24028007", "SCT", "Right")}


def meanings(
    space: LabelSpace, codes: Mapping[str, Sequence[str]]
) -> tuple[dict[str, Meaning], dict[str, str]]:
    """Class -> its code: of `codes` (value, scheme, meaning), else that of SNOMED CT's structure of the class's name, else
    "anatomical structure", or of a lesion "morphologically altered structure"; and of classes without one in `codes` a text of what was taken."""
    known = importlib.import_module("pydicom.sr.codedict").codes.SCT
    keywords = {name.lower(): name for name in dir(known)}
    found, told = dict[str, Meaning](), dict[str, str]()
    for name in (space.names[c] for c in space.foreground):
        words = [word for word in name.replace("-", "_").replace(" ", "_").lower().split("_") if word]
        words = [SHORT_SIDES.get(word, word) for word in words]
        side = next((word for word in words if word in SIDES), "")
        if name in codes:
            value, scheme, meaning = codes[name]
            category = ALTERED if LESION.search(" ".join([*words, meaning.lower()])) else CATEGORY
            found[name] = Meaning(value, scheme, meaning, side, category)
            continue
        category = ALTERED if LESION.search(" ".join(words)) else CATEGORY
        bare = "".join(word for word in words if word not in SIDES)
        bare = bare.replace("tumour", "tumor").replace("oedema", "edema")
        # "parotid" is in the dictionary as "parotid gland"
        keyword = next(
            (keywords[k] for k in (bare, f"{bare}gland", f"{bare}structure") if k in keywords), None
        )
        value, scheme, meaning = category if keyword is None else tuple(getattr(known, keyword))[:3]
        found[name] = Meaning(value, scheme, meaning, side, category)
        told[name] = f"{meaning} ({scheme} {value}{', ' + side if side else ''})"
    return found, told


def _uid(*parts: Any) -> str:
    """A UID that follows from these parts, so that the same result is the same object."""
    return f"2.25.{uuid.uuid5(uuid.NAMESPACE_OID, '|'.join(map(str, parts))).int}"


def _content(
    labels: np.ndarray, volume: Volume, space: LabelSpace, codes: Mapping[str, Meaning], model: str
) -> tuple[Any, ...]:
    """What the UIDs of a result follow from: the series, the labels, names and codes of the classes, and the model."""
    digest = hashlib.sha256(np.ascontiguousarray(labels).data).hexdigest()
    classes = [(name, *astuple(codes[name])) for name in (space.names[c] for c in space.foreground)]
    return volume.headers[0].SeriesInstanceUID, digest, classes, model


@quiet()
def write_seg(
    path: Path | None,
    labels: np.ndarray,
    volume: Volume,
    space: LabelSpace,
    codes: Mapping[str, Meaning],
    model: str,
) -> Any:
    """Labels, class index [X, Y, Z] or masks [C, X, Y, Z], as a DICOM SEG of the series: a segment per class, also of one
    that is nowhere. codes: of `meanings`. model: names what made them.

    Returns the pydicom Dataset, and writes it where `path` is given, whole or not at all.
    """
    try:
        hd = importlib.import_module("highdicom")
    except ImportError:
        raise DataError('DICOM SEG needs highdicom; run pip install "fedatlas[dicom]"') from None
    coded = importlib.import_module("pydicom.sr.coding").Code
    algorithm = hd.AlgorithmIdentificationSequence(
        name=model[:64],
        family=coded("123110", "DCM", "Artificial Intelligence"),
        version=fedatlas.__version__,
    )
    classes = list(space.foreground)
    described = []
    for number, c in enumerate(classes, start=1):
        code = codes[space.names[c]]
        segment = hd.seg.SegmentDescription(
            number,
            space.names[c][:64],
            coded(*code.category),
            coded(code.value, code.scheme, code.meaning),
            hd.seg.SegmentAlgorithmTypeValues.AUTOMATIC,
            algorithm_identification=algorithm,
        )
        if code.side:
            modifier = hd.sr.CodedConcept(*SIDES[code.side])
            segment.SegmentedPropertyTypeCodeSequence[0].SegmentedPropertyTypeModifierCodeSequence = [
                modifier
            ]
        described.append(segment)
    # slices, rows, columns, and of classes that overlap segments; exclusive ones have the numbers of the segments
    frames = labels.transpose(2, 1, 0) if space.exclusive else labels.transpose(3, 2, 1, 0)
    frames = frames.astype(np.uint8 if len(space) < 256 else np.uint16, order="C")
    if _frames_of_one(volume):  # in the order of the source's frames
        count = int(volume.headers[0].NumberOfFrames)
        placed = np.zeros((count, *frames.shape[1:]), frames.dtype)
        placed[np.subtract(volume.frames, 1)] = frames
        frames = placed
    content = _content(labels, volume, space, codes, model)
    with _of_headers(volume, "a SEG"):
        _complete(volume)
        made = hd.seg.Segmentation(
            source_images=list(volume.headers),
            pixel_array=frames,
            segmentation_type=hd.seg.SegmentationTypeValues.BINARY,
            segment_descriptions=described,
            series_instance_uid=_uid("seg series", *content),
            series_number=_number(volume),
            sop_instance_uid=_uid("seg", *content),
            instance_number=1,
            manufacturer="FedAtlas",
            manufacturer_model_name=model[:64],
            software_versions=fedatlas.__version__,
            device_serial_number="1",
            content_description="Segmentation by a model",
            content_label="FEDATLAS",
            content_creator_name="FedAtlas^",
            omit_empty_frames=bool(labels.any()),
            specific_character_set="ISO_IR 192",  # that of the source may lack letters of a class
        )
        # read all items of the source, or they would be written in its letters
        for _ in made.iterall():
            pass
        made.SeriesDescription = "FedAtlas segmentation"
        if path is not None:
            with saved(path) as temporary:
                made.save_as(temporary)
    return made


@quiet()
def write_rtstruct(
    path: Path | None,
    labels: np.ndarray,
    volume: Volume,
    space: LabelSpace,
    codes: Mapping[str, Meaning],
    model: str,
) -> Any:
    """Labels as an RTSTRUCT of the series, with an ROI per class, also for one that is nowhere; the others as of `write_seg`.

    A contour runs half-way between voxels inside and outside, and holes are joined to their outline by a line to and fro,
    as the standard has it, so that whoever fills contours gets the voxels back.
    """
    with _of_headers(volume, "an RTSTRUCT"):
        made = _structure_set(volume, model, _content(labels, volume, space, codes, model))
        frame = _frame_of_reference(volume)
        made.FrameOfReferenceUID, made.PositionReferenceIndicator = frame, ""
        made.ReferencedFrameOfReferenceSequence = [_reference(volume, frame)]
        slices = np.ascontiguousarray(np.moveaxis(labels, -1, -3))  # [Z, X, Y], or [C, Z, X, Y]
        rois, contours, observations, drawn = [], [], [], list[tuple[Any, bytes]]()
        for number, c in enumerate(space.foreground, start=1):
            name = space.names[c]
            rois.append(
                _item(
                    ROINumber=number,
                    ReferencedFrameOfReferenceUID=frame,
                    ROIName=name[:64],
                    ROIGenerationAlgorithm="AUTOMATIC",
                )
            )
            mask = slices == c if space.exclusive else slices[c] > 0
            contours.append(_contours(number, mask, volume, drawn))
            observations.append(_observation(number, codes[name]))
        _store(drawn, made.file_meta)
        made.StructureSetROISequence = rois
        made.ROIContourSequence = contours
        made.RTROIObservationsSequence = observations
        if path is not None:
            with saved(path) as temporary:
                made.save_as(temporary, enforce_file_format=True)
    return made


@contextmanager
def _of_headers(volume: Volume, what: str) -> Iterator[None]:
    """Raises FileError where the headers lack, or hold wrongly, something that is copied from them."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        where = Path(pseudonym(str(volume.headers[0].SeriesInstanceUID)))
        lacking = error.name if isinstance(error, AttributeError) else None
        told = f"its headers lack what {what} needs ({lacking or reason(error)})"
        raise FileError(where, told, "export the series again, or take --as nifti") from None


def _complete(volume: Volume) -> None:
    """Adds to the headers, in memory, what a SEG is made of and images may lack, as those without a name do: what the standard lets be
    empty, a frame of reference, and the thickness of slices, which is the distance between them."""
    for header in volume.headers:
        for name in _REQUIRED.split():
            if name not in header:
                setattr(header, name, "")
        if not header.get("FrameOfReferenceUID"):
            header.FrameOfReferenceUID = _frame_of_reference(volume)
        if not (_frames_of_one(volume) or header.get("SliceThickness")):
            header.SliceThickness = f"{np.linalg.norm(volume.affine[:3, 2]):.6g}"


def _frame_of_reference(volume: Volume) -> str:
    source = volume.headers[0]
    return str(source.get("FrameOfReferenceUID") or _uid("frame", source.SeriesInstanceUID))


def _item(**values: Any) -> Any:
    """A pydicom Dataset, as items of sequences are."""
    made = pydicom().Dataset()
    for name, value in values.items():
        setattr(made, name, value)
    return made


def _structure_set(volume: Volume, model: str, content: Sequence[Any]) -> Any:
    """What an RTSTRUCT says of itself, its patient and its study. content: of `_content`, from which its UIDs follow."""
    module, source = pydicom(), volume.headers[0]
    day, time = datetime.now().strftime("%Y%m%d %H%M%S").split()
    made = _item(
        SOPClassUID="1.2.840.10008.5.1.4.1.1.481.3",
        SOPInstanceUID=_uid("rtstruct", *content),
        Modality="RTSTRUCT",
        SeriesInstanceUID=_uid("rtstruct series", *content),
        SeriesNumber=_number(volume),
        SeriesDescription="FedAtlas structures",
        InstanceNumber=1,
        OperatorsName="",
        Manufacturer="FedAtlas",
        ManufacturerModelName=model[:64],
        SoftwareVersions=fedatlas.__version__,
        StructureSetLabel="FEDATLAS",
        StructureSetName="Structures by a model",
        StructureSetDate=day,
        StructureSetTime=time,
        InstanceCreationDate=day,
        InstanceCreationTime=time,
        SeriesDate=day,
        SeriesTime=time,
        ApprovalStatus="UNAPPROVED",
        SpecificCharacterSet="ISO_IR 192",
    )
    _copy_modules(source, made)
    meta = module.dataset.FileMetaDataset()
    meta.MediaStorageSOPClassUID, meta.MediaStorageSOPInstanceUID = made.SOPClassUID, made.SOPInstanceUID
    made.file_meta = meta
    made.preamble = bytes(128)  # or else what stores it leaves the beginning of a file out
    return made


def _image(header: Any) -> Any:
    """An object of the series, as items refer to it."""
    return _item(ReferencedSOPClassUID=header.SOPClassUID, ReferencedSOPInstanceUID=header.SOPInstanceUID)


def _reference(volume: Volume, frame: str) -> Any:
    """The frame of reference with the study and the series that an RTSTRUCT is drawn on, and all its objects."""
    source = volume.headers[0]
    series = _item(
        SeriesInstanceUID=source.SeriesInstanceUID,
        ContourImageSequence=[_image(header) for header in volume.headers],
    )
    study = _item(
        ReferencedSOPClassUID="1.2.840.10008.3.1.2.3.1",
        ReferencedSOPInstanceUID=source.StudyInstanceUID,
        RTReferencedSeriesSequence=[series],
    )
    return _item(FrameOfReferenceUID=frame, RTReferencedStudySequence=[study])


def _contours(number: int, slices: np.ndarray, volume: Volume, drawn: list[tuple[Any, bytes]]) -> Any:
    """The contours of an ROI, a mask [Z, X, Y]; each names the object, or the frame, that it is drawn on. They are added to
    `drawn`, with their points, which `_store` puts in."""
    to_patient, one = LPS @ volume.affine, _frames_of_one(volume)
    first = len(drawn)
    for z in np.flatnonzero(slices.any(axis=(1, 2))).tolist():
        for outline in outlines(slices[z]):
            image = _image(volume.headers[0 if one else z])
            if one:
                image.ReferencedFrameNumber = volume.frames[z]
            indices = np.column_stack([outline, np.full(len(outline), z), np.ones(len(outline))])
            drawn.append(_contour(image, (indices @ to_patient.T)[:, :3]))
    roi = _item(ReferencedROINumber=number, ROIDisplayColor=_colour(number))
    if drawn[first:]:
        roi.ContourSequence = [contour for contour, _ in drawn[first:]]
    return roi


def _contour(image: Any, points: np.ndarray) -> tuple[Any, bytes]:
    """A closed contour through points [n, 3], mm in LPS, drawn on an image, and these as a file holds them."""
    made = _item(
        ContourImageSequence=[image],
        ContourGeometricType="CLOSED_PLANAR",
        NumberOfContourPoints=len(points),
    )
    text = "\\".join([f"{value:.3f}" for value in points.ravel().tolist()])
    return made, f"{text}{' ' * (len(text) % 2)}".encode()


def _store(drawn: Sequence[tuple[Any, bytes]], meta: Any) -> None:
    """Puts the points of contours in, in the form in which a file holds them: pydicom would check and keep every number by itself.

    With explicit VR, which is what the web service of an archive wants, none can have more than 64 kB; a file with such a contour has
    implicit VR.
    """
    elements, tag = importlib.import_module("pydicom.dataelem"), importlib.import_module("pydicom.tag")
    implicit = any(len(value) > 0xFFFE for _, value in drawn)
    meta.TransferSyntaxUID = "1.2.840.10008.1.2" if implicit else "1.2.840.10008.1.2.1"
    for contour, value in drawn:
        contour.add(
            elements.RawDataElement(tag.Tag("ContourData"), "DS", len(value), value, 0, implicit, True)
        )
        contour.set_original_encoding(implicit, True, pydicom().charset.default_encoding)


def _observation(number: int, code: Meaning) -> Any:
    """What an ROI is of, in codes."""
    kind = _item(CodeValue=code.value, CodingSchemeDesignator=code.scheme, CodeMeaning=code.meaning[:64])
    if code.side:
        value, scheme, meaning = SIDES[code.side]
        kind.SegmentedPropertyTypeModifierCodeSequence = [
            _item(CodeValue=value, CodingSchemeDesignator=scheme, CodeMeaning=meaning)
        ]
    return _item(
        ObservationNumber=number,
        ReferencedROINumber=number,
        RTROIIdentificationCodeSequence=[kind],
        RTROIInterpretedType="" if code.category == ALTERED else "ORGAN",
        ROIInterpreter="",
    )


_COPIED = """PatientName PatientID IssuerOfPatientID PatientBirthDate PatientSex OtherPatientIDs PatientAge PatientSize
    PatientWeight EthnicGroup PatientIdentityRemoved DeidentificationMethod StudyInstanceUID StudyDate StudyTime StudyID
    AccessionNumber StudyDescription ReferringPhysicianName"""
_REQUIRED = """PatientName PatientID PatientBirthDate PatientSex StudyDate StudyTime StudyID AccessionNumber
    ReferringPhysicianName"""
"""Attributes of the patient and the study, and those that may be empty and not be missing."""


def _copy_modules(source: Any, made: Any) -> None:
    for name in _COPIED.split():
        if name in source:
            value = source[name].value
            # names of persons keep the encoding of the source unless they are texts
            setattr(made, name, str(value) if source[name].VR == "PN" else value)
        elif name in _REQUIRED.split():
            setattr(made, name, "")


def outlines(mask: np.ndarray) -> list[np.ndarray]:
    """The outline of each connected part of a mask [X, Y], points [n, 2] in voxels; the last is not the first again. Holes
    are joined to it."""
    from skimage.measure import find_contours

    found = []
    found_parts: Any = ndimage.label(mask)
    parts = found_parts[0]
    for number, box in enumerate(ndimage.find_objects(parts), start=1):
        part = np.pad(parts[box] == number, 1)
        corner = np.array([box[0].start - 1, box[1].start - 1])
        rings = sorted((ring[:-1] for ring in find_contours(part.astype(np.uint8), 0.5)), key=_area)
        outer = rings.pop()
        for hole in reversed(rings):
            apart = ((outer[:, None] - hole[None]) ** 2).sum(-1)
            here, there = np.unravel_index(int(apart.argmin()), apart.shape)
            turned = np.concatenate([hole[there:], hole[: there + 1]])
            outer = np.concatenate([outer[: here + 1], turned, outer[here:]])
        found.append(outer + corner)
    return found


def _area(ring: np.ndarray) -> float:
    x, y = ring.T
    return abs(float(x @ np.roll(y, 1) - y @ np.roll(x, 1))) / 2


def _colour(number: int) -> list[int]:
    return [round(255 * v) for v in colorsys.hsv_to_rgb(number * 0.618 % 1, 0.7, 0.95)]


WRITERS = {"seg": write_seg, "rtstruct": write_rtstruct}
"""Form of the result -> what writes it."""


def _frames_of_one(volume: Volume) -> bool:
    """Are the slices frames of one object, and not an object each? Raises FileError for frames of several."""
    if len(volume.headers) == volume.voxels.shape[2]:
        return int(volume.headers[0].get("NumberOfFrames") or 1) > 1
    if len(volume.headers) > 1:
        where = Path(pseudonym(str(volume.headers[0].SeriesInstanceUID)))
        what = f"its slices are frames of {len(volume.headers)} objects, for which NIfTI alone is written"
        raise FileError(where, what, "take --as nifti")
    return True


def _number(volume: Volume) -> int:
    """A series number that tells the series of results from others: that of the source, and 9000 more."""
    return int(volume.headers[0].get("SeriesNumber") or 0) % 1000 + 9000
