"""Pictures as scans of one slice, and their masks.

Shapes: C classes, I input channels; H rows, from top to bottom; W columns, from left to right.
"""

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import numpy as np
from PIL import Image, UnidentifiedImageError
from scipy import ndimage

from fedatlas.core.labels import LabelSpace
from fedatlas.data.datasets.shared.listing import PictureMask, Runs, Side
from fedatlas.data.formats import rle
from fedatlas.data.formats.picture import (
    PIXELS,
    Picture,
    exif_orientation,
    read_picture,
    turned,
    upright,
    with_channels,
)
from fedatlas.data.transforms import FileError, saved

FORMATS = ("PNG", "JPEG", "TIFF", "BMP", "GIF")
RASTER = (".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp", ".gif")
DICOM = (".dcm", ".dicom")
RAW = ".img"
RAW_SIDE, RAW_LARGEST = 2048, 4095
"""Rows and columns of JSRT's files without a header, and the largest of their 12 bit values."""
OVERLAP = 0.05
"""Where classes are exclusive: so much of the smaller of two masks may lie in the other."""

_AGAIN = "copy or export it again"


@dataclass(frozen=True)
class Note:
    """What was assumed or changed about a file. share: how much of it was concerned, where that is a number."""

    file: Path
    what: str
    remedy: str
    share: float | None = None


@dataclass(frozen=True)
class Flat:
    """A picture. image: [I, W, H, 1] float32, 0 black to 1 white; affine: [4, 4], mm; towards: where rows and columns of
    its file lead (DICOM's Patient Orientation), None where the file does not say it; modality, colour: see `Picture`;
    measured: does the file say its millimetres."""

    image: np.ndarray
    affine: np.ndarray
    towards: tuple[str, str] | None
    notes: tuple[Note, ...]
    modality: str = ""
    colour: bool = False
    measured: bool = False


def is_picture(path: Path) -> bool:
    """Is it a picture, by its name, and no NIfTI file."""
    suffix = path.suffix.lower()
    return suffix in (*RASTER, *DICOM) or (suffix == RAW and not path.with_suffix(".hdr").exists())


def standing(pixels: np.ndarray) -> np.ndarray:
    """Pixels [..., H, W] as voxels [..., W, H, 1]; see `data.reading`. `lying` undoes it."""
    return np.ascontiguousarray(np.swapaxes(pixels[..., ::-1, ::-1], -1, -2))[..., None]


def lying(voxels: np.ndarray) -> np.ndarray:
    """Voxels [..., W, H, 1] as pixels [..., H, W]."""
    return np.ascontiguousarray(np.swapaxes(voxels[..., 0], -1, -2)[..., ::-1, ::-1])


def read_flat(
    paths: Sequence[Path],
    *,
    channels: int = 1,
    pixel: tuple[float, float] | None = None,
    raw: int | None = None,
    site: str = "",
) -> Flat:
    """A picture from its file: PNG, JPEG, TIFF, BMP, GIF, DICOM, or JSRT's .IMG.

    channels: 1 grey, 3 red, green, blue. pixel: millimetres between rows and between columns, where the file does not
    say it (DICOM does); 1 if neither does. raw: rows and columns of an .IMG, 2048 if None. Raises FileError for what
    cannot be read, for several files, and for a number of channels other than 1 or 3.
    """
    path = paths[0]
    if len(paths) > 1:
        raise FileError(paths[1], f"one of {len(paths)} pictures of one case", "a case is one picture")
    if channels not in (1, 3):
        raise FileError(path, f"a picture, where {channels} channels are asked for", "pictures have 1 or 3")
    towards = told = None
    if path.suffix.lower() == RAW:
        picture = with_channels(_read_raw(path, raw or RAW_SIDE), channels)
    else:
        picture = read_picture(path, site=site, channels=channels, formats=FORMATS)
        if path.suffix.lower() in DICOM:
            towards, told = _header(path)
    rows, columns = told or pixel or (1.0, 1.0)
    notes = tuple(Note(path, note, "see that this is meant") for note in picture.notes)
    affine = np.diag([columns, rows, 1.0, 1.0])
    return Flat(
        standing(picture.pixels),
        affine,
        towards,
        notes,
        picture.modality,
        picture.colour,
        measured=told is not None,
    )


def _read_raw(path: Path, side: int) -> Picture:
    """JSRT: 16 bit, the high byte first, of which 12 are used; a low value is bright film, and so white bone."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise FileError(path, "no such file", "add it, or take the case out") from None
    except OSError as error:
        raise FileError(path, f"not readable ({error.strerror or error})", _AGAIN) from None
    if len(content) != 2 * side * side:
        what = f"{len(content):,} bytes; {side}×{side} pixels of 16 bit are {2 * side * side:,}"
        raise FileError(path, what, "copy it again from the release, or set the size of scaled files")
    values = np.frombuffer(content, dtype=">u2").reshape(side, side)
    if int(values.max()) > RAW_LARGEST:
        what = f"holds {int(values.max())}, above {RAW_LARGEST}, the largest value of 12 bit"
        raise FileError(path, what, "it is no file of the release, or its bytes were swapped: copy it again")
    return Picture(1 - values.astype(np.float32)[None] / np.float32(RAW_LARGEST))


def _header(path: Path) -> tuple[tuple[str, str] | None, tuple[float, float] | None]:
    """Of a DICOM file that could be read: where rows and columns lead, and mm between rows and between columns as the
    picture stands upright."""
    data = importlib.import_module("pydicom").dcmread(path, stop_before_pixels=True)
    towards = [str(part) for part in data.get("PatientOrientation") or []]
    pair = (towards[0], towards[1]) if len(towards) == 2 and all(towards) else None
    try:
        mm = [float(v) for v in data.get("PixelSpacing") or data.get("ImagerPixelSpacing") or []]
    except (TypeError, ValueError):
        mm = []
    if len(mm) != 2 or not all(np.isfinite(mm)) or min(mm) <= 0:
        return pair, None
    swapped = pair is not None and pair[0][:1].upper() in "HF"
    return pair, (mm[1], mm[0]) if swapped else (mm[0], mm[1])


def label_paths(out: Path, case: str, space: LabelSpace) -> dict[str, Path]:
    """class -> the file of `write_labels` that holds it."""
    if space.exclusive:
        return {space.names[c]: out / "labels" / f"{case}.png" for c in space.foreground}
    return {name: out / "masks" / quote(name, safe=" ") / f"{case}.png" for name in space.names}


def write_labels(out: Path, case: str, labels: np.ndarray, space: LabelSpace) -> dict[str, Path]:
    """Writes the labels of a picture as PNG of its size, as it stands upright: class -> the file that holds it.

    labels: class index [W, H, 1], written to labels/<case>.png, or masks [C, W, H, 1], written to
    masks/<class>/<case>.png with 0 and 255, as the layout `masks` has them; what cannot stand in a file name is
    percent-encoded. Raises DataError where the folder cannot be written.
    """
    files = label_paths(out, case, space)
    if space.exclusive:
        planes = {out / "labels" / f"{case}.png": lying(labels)}
    else:
        planes = {files[name]: lying(labels[c]) * np.uint8(255) for c, name in enumerate(space.names)}
    for path, plane in planes.items():
        kind = np.uint8 if plane.max(initial=0) < 256 else np.uint16
        with saved(path) as temporary:
            Image.fromarray(plane.astype(kind)).save(temporary, format="PNG")
    return files


# ------------------------------------------------------------------------------------------------- masks


def read_masks(
    masks: Sequence[tuple[str, PictureMask]], shape: tuple[int, int] | None, towards: tuple[str, str] | None
) -> tuple[dict[str, np.ndarray], list[Note]]:
    """Own name -> mask, bool [H, W], upright; masks of one name are united. shape: of the picture, None where it could
    not be read: the masks are then only looked at, and keep their own sizes. towards: how run lengths have to be
    turned, which were drawn on the file's own pixels; mask files are taken as upright, with a note where the picture is
    turned.

    Raises FileError for a mask that cannot be read, or is of another aspect than the picture.
    """
    found: dict[str, np.ndarray] = {}
    notes: list[Note] = []
    for name, mask in masks:
        if isinstance(mask, Runs):
            plane = np.zeros(mask.shape, dtype=bool)
            for text in mask.text:
                plane |= rle.decode(text, mask.shape, mask.source)
            if towards is not None:
                plane = upright(plane, towards)
            source = Path(mask.source)
        else:
            source = mask.path if isinstance(mask, Side) else mask
            plane, more = read_mask(source)
            notes += more
            if towards is not None and _is_turned(towards):
                what = (
                    "a mask file of a DICOM picture that its patient orientation turns upright "
                    f"({towards[0]}\\{towards[1]}); the mask is taken as upright already"
                )
                notes.append(Note(source, what, "if it was drawn on the pixels as stored, turn it likewise"))
            if isinstance(mask, Side):
                plane = one_side(plane, mask.side, source)
        if shape is not None:
            if plane.shape != shape:
                what = "a mask of another size than its picture, and of the same aspect: resized"
                notes.append(Note(source, what, "if that is not meant, export it on the picture's pixels"))
            plane = fitted(plane, shape, source)
            found[name] = found[name] | plane if name in found else plane
    return found, [*notes, *_mirrored(found, dict(masks))]


def _is_turned(towards: tuple[str, str]) -> bool:
    """Does `upright` turn a picture of this orientation."""
    corners = np.arange(4).reshape(2, 2)
    return not np.array_equal(upright(corners, towards), corners)


def read_mask(path: Path) -> tuple[np.ndarray, list[Note]]:
    """A mask file, bool [H, W], and what is worth a note.

    Of two values, one of them 0, the other is inside. Of more values, as smoothed edges or JPEG make them, those above
    half of what the file's bits can hold. Colour counts by its brightest channel, transparency does not count. It is turned
    as its EXIF orientation says, as pictures are. Raises FileError for a file that is no picture, holds no 0, or holds
    several values and none above that half: a label map.
    """
    said: list[str] = []
    try:
        with Image.open(path, formats=FORMATS) as image:
            if image.width * image.height > PIXELS:
                raise Image.DecompressionBombError
            if image.format in ("GIF", "TIFF") and getattr(image, "n_frames", 1) != 1:
                frames = getattr(image, "n_frames", 0)
                raise FileError(path, f"a mask of {frames} frames", "give one file per mask")
            image.load()
            code = exif_orientation(image, said)
            values, largest = _mask_values(path, image)
    except FileError:
        raise
    except FileNotFoundError:
        raise FileError(path, "no such mask", "add it, or take the case out") from None
    except UnidentifiedImageError:
        what = f"no mask: neither {', '.join(FORMATS[:-1])} nor {FORMATS[-1]}, or its beginning is damaged"
        raise FileError(path, what, "export it as PNG with 0 and 255") from None
    except Image.DecompressionBombError:
        what = f"too large: its header promises more than {PIXELS:,} pixels"
        raise FileError(path, what, "see that it is the right file, and scale it down") from None
    except (OSError, SyntaxError, ValueError, EOFError, IndexError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise FileError(path, f"truncated or damaged ({first})", _AGAIN) from None
    notes = [Note(path, what, "see that this is meant") for what in said]
    values = turned(values, code)
    occurring = np.unique(values)
    half = largest / 2
    if len(occurring) <= 2 and (occurring[0] == 0 or len(occurring) == 1):
        mask = values != 0
    elif len(occurring) == 2:
        what = f"a mask of the values {occurring[0]} and {occurring[1]}, without 0"
        raise FileError(path, what, "outside is 0, inside another value: export it again")
    elif occurring[-1] <= half:
        listed = ", ".join(str(v) for v in occurring[:6]) + (", …" if len(occurring) > 6 else "")
        what = f"a mask of the values {listed}, none above half of {largest}: it looks like a label map"
        raise FileError(path, what, "give one file per class, with 0 and 255")
    else:
        mask = values > half
        between = int(((values > 0) & (values < occurring[-1])).sum()) / values.size
        what = "a mask of more than two values, as smoothed edges or JPEG make them; above half is inside"
        remedy = "export masks as PNG with 0 and 255"
        areas = plateaus(values, largest)
        if len(areas) > 1:
            kept, dropped = (
                ", ".join(str(v) for v in areas if (v > half) is inside) or "none" for inside in (True, False)
            )
            what = f"a mask of more than two values in areas of their own: {kept} counts as inside, {dropped} as outside"
            remedy = f"if they are classes, give one file per class; {remedy}"
        notes.append(Note(path, what, remedy, between))
    if not mask.any():
        what = "an empty mask: the class counts as annotated there, and absent"
        notes.append(Note(path, what, "take the file out where the class was not drawn"))
    elif mask.all():
        notes.append(Note(path, "a mask that covers the whole picture", "see that it is the right file"))
    return mask, notes


def plateaus(values: np.ndarray, largest: int) -> list[int]:
    """The grey values above 0 that fill areas: of the sixteen parts of the range, those with a tenth of all such pixels
    or more, each by its most frequent value."""
    grey = values[values > 0].astype(np.int64)
    part = grey * 16 // (largest + 1)
    found = [n for n, count in enumerate(np.bincount(part, minlength=16)) if count >= 0.1 * len(grey) > 0]
    return [int(np.bincount(grey[part == n]).argmax()) for n in found]


def _mask_values(path: Path, image: Image.Image) -> tuple[np.ndarray, int]:
    """[H, W] whole numbers, and the largest that its bits can hold."""
    mode = image.mode
    if mode in ("P", "PA"):
        grey = np.asarray(image.convert("RGB")).max(axis=-1)
        # a palette that paints everything black still tells the regions apart
        return (grey, 255) if grey.any() else ((np.asarray(image) != 0).astype(np.uint8), 1)
    if mode == "1":
        return np.asarray(image, np.uint8), 1
    if mode == "L":
        return np.asarray(image), 255
    if mode == "LA":
        return np.asarray(image)[..., 0], 255
    if mode in ("RGB", "RGBA"):
        return np.asarray(image)[..., :3].max(axis=-1), 255
    if mode in ("I;16", "I;16B", "I;16L", "I"):
        return np.asarray(image).astype(np.int64), 65535
    raise FileError(path, f"a mask of colour mode {mode}", "export it as PNG with 0 and 255")


def fitted(mask: np.ndarray, shape: tuple[int, int], source: Path) -> np.ndarray:
    """A mask [h, w] on the pixels of its picture [H, W], by nearest neighbour. Raises FileError where their aspects
    differ: by more than a pixel of the mask over its whole height."""
    if mask.shape == shape:
        return mask
    if abs(mask.shape[0] - mask.shape[1] * shape[0] / shape[1]) >= 1:
        what = f"a mask of {mask.shape[0]}×{mask.shape[1]} pixels for a picture of {shape[0]}×{shape[1]}"
        raise FileError(
            source, what, "both must show the same field: export the mask on the picture's pixels"
        )
    rows, columns = (
        ((np.arange(new) + 0.5) * old / new).astype(np.int64)
        for old, new in zip(mask.shape, shape, strict=True)
    )
    return mask[np.ix_(rows, columns)]


def one_side(mask: np.ndarray, side: str, source: Path) -> np.ndarray:
    """Of two organs in one mask [H, W] the one on the patient's left or right. The two largest connected parts are
    the organs, the left one of the patient further right in the picture; smaller parts go to the nearer one. An empty
    mask stays empty. Raises FileError where there are no two such parts, the smaller a tenth of the larger or more."""
    if not mask.any():
        return mask
    parts = np.zeros(mask.shape, dtype=np.int32)
    count = int(ndimage.label(mask, structure=np.ones((3, 3)), output=parts))  # type: ignore[arg-type]
    sizes = np.bincount(parts.ravel(), minlength=count + 1)[1:]
    order = np.argsort(-sizes, kind="stable")
    if count < 2 or sizes[order[1]] < 0.1 * sizes[order[0]]:
        what = "a mask of both sides that does not fall into two parts"
        raise FileError(source, what, "separate left and right in it, or take the case out")
    columns = np.array([at[1] for at in ndimage.center_of_mass(mask, parts, np.arange(1, count + 1))])
    right, left = sorted(columns[order[:2]])
    is_left = np.abs(columns - left) < np.abs(columns - right)
    chosen = np.flatnonzero(is_left if side == "left" else ~is_left) + 1
    return np.isin(parts, chosen)


def _mirrored(found: Mapping[str, np.ndarray], masks: Mapping[str, PictureMask]) -> list[Note]:
    """Notes on pairs like "left lung" and "right lung" of which the left one lies further left in the picture."""
    notes = []
    for name, left in found.items():
        other = name.replace("left", "right")
        if other == name or other not in found or not left.any() or not found[other].any():
            continue
        middles = [float(np.flatnonzero(mask.any(0)).mean()) for mask in (left, found[other])]
        if middles[0] < middles[1]:
            mask = masks[name]
            file = (
                Path(mask.source) if isinstance(mask, Runs) else mask.path if isinstance(mask, Side) else mask
            )
            what = f"{name!r} lies left of {other!r}; a frontal picture shows the patient's left on the right"
            notes.append(
                Note(file, what, "exchange the two if sides are the patient's, with `aliases` or `swap`")
            )
    return notes


def join(
    planes: Mapping[int, np.ndarray], space: LabelSpace, shape: tuple[int, ...], file: Path
) -> tuple[np.ndarray, dict[int, int], list[Note]]:
    """Masks per class, bool of one shape, as labels: class index of that shape, or masks [C, …]; pixels per class; notes.

    Where classes are exclusive, a pixel in several masks takes a lesion before any organ, and else the last of them in the
    order of the label space. Classes of one group may overlap freely. Of others up to 5 % of the smaller mask may, with a
    note; beyond that FileError names both.
    """
    kind = np.uint8 if len(space) < 256 else np.int16
    if not space.exclusive:
        voxels = np.zeros((len(space), *shape), dtype=np.uint8)
        for c, plane in planes.items():
            voxels[c] = plane
        return voxels, {c: int(plane.sum()) for c, plane in planes.items()}, []
    group_of = {c: number for number, group in enumerate(space.organs) for c in group}
    index = np.zeros(shape, dtype=kind)
    notes: list[Note] = []
    order = sorted(planes, key=lambda c: (c in space.organ_of, c))
    for place, c in enumerate(order):
        for other in order[:place]:
            smaller = min(int(planes[c].sum()), int(planes[other].sum()))
            if group_of[c] == group_of[other] or not smaller:
                continue
            share = int((planes[c] & planes[other]).sum()) / smaller
            if share > OVERLAP:
                what = (
                    f"{100 * share:.3g} % of the smaller of {space.names[other]!r} and {space.names[c]!r} lies in the "
                    "other, though classes are exclusive"
                )
                raise FileError(file, what, "set `labels.exclusive: false`, or correct the masks")
            if share:
                what = f"{space.names[other]!r} and {space.names[c]!r} overlap; the latter takes the common pixels"
                notes.append(Note(file, what, "set `labels.exclusive: false` if that is not meant", share))
        index[planes[c]] = c
    return index, {c: int((index == c).sum()) for c in planes}, notes
