"""Reading one picture: PNG, JPEG, or DICOM of a single frame. A file's own bytes decide which it is.

Every pixel value is returned on one scale, 0 to 1, by what the file declares (its bits, or its window), never by the
values that happen to occur: two images of one machine stay comparable.

The pixel logic of DICOM follows PS3.3 of the standard: C.11.1 modality, C.11.2 values of interest, C.7.6.3.1.2
photometric interpretation, C.7.6.1.1.1 patient orientation. It is written as functions on arrays; pydicom, the extra
`[dicom]`, only reads the file.

Shapes: H rows, from top to bottom; W columns, from left to right; I channels, 1 (grey) or 3 (red, green, blue).
"""

import importlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image, UnidentifiedImageError

from fedatlas.core.errors import DataError
from fedatlas.data.transforms import FileError

Function = Literal["LINEAR", "LINEAR_EXACT", "SIGMOID"]
FUNCTIONS: dict[str, Function] = {
    "LINEAR": "LINEAR",
    "LINEAR_EXACT": "LINEAR_EXACT",
    "SIGMOID": "SIGMOID",
}
PIXELS = 80_000_000  # beyond this a header is taken to be damaged, or hostile
LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601

_AGAIN = "copy or export it again"
_CONVERT = "export it as greyscale or RGB PNG, JPEG or DICOM"


class PictureError(FileError):
    """What is wrong with one picture of a site, in parts: site, file, what, remedy."""

    def __init__(self, site: str, file: Path, what: str, remedy: str) -> None:
        super().__init__(file, what, remedy)
        self.args = (f"site {site}: {file}: {what}; {remedy}",)
        self.site = site


@dataclass(frozen=True)
class Picture:
    """pixels: float32 [I, H, W] from 0 (black) to 1 (white), upright. notes: what was changed or assumed, a sentence
    each; they are worth a line in a report and no reason to stop. modality: as a DICOM header names it; colour: do the
    file's channels differ."""

    pixels: np.ndarray
    notes: tuple[str, ...] = ()
    modality: str = ""
    colour: bool = False


def read_picture(
    path: Path,
    *,
    site: str,
    channels: Literal[1, 3] | None = None,
    formats: tuple[str, ...] = ("PNG", "JPEG"),
) -> Picture:
    """A picture from its file.

    channels: 1 turns colour into grey by its luma, 3 repeats grey; None keeps what the file has. 8 and 16 bit PNG and
    JPEG are divided by the largest value of their bits, and turned as their EXIF orientation says. DICOM: see
    `grey_of`. formats: beside DICOM, of those that Pillow knows, as TIFF, BMP, GIF.

    Raises PictureError, a DataError that names site, file and remedy, for a file that is missing, empty, truncated, of
    another kind, or DICOM with several frames or without pydicom installed.
    """
    try:
        with path.open("rb") as stream:
            head = stream.read(132)
        if not head:
            raise FileError(path, "empty", _AGAIN)
        if head[128:132] == b"DICM":
            picture = _read_dicom(path)
        elif path.suffix.lower() in (".dcm", ".dicom"):
            raise FileError(path, "not a DICOM file: no mark DICM after its first 128 bytes", _AGAIN)
        else:
            picture = _read_raster(path, head, formats)
        return with_channels(picture, channels)
    except FileNotFoundError:
        raise PictureError(site, path, "no such file", "add it, or take its row out") from None
    except FileError as error:
        raise PictureError(site, error.file, error.what, error.remedy) from None
    except DataError as error:
        raise PictureError(site, path, str(error), _AGAIN) from None
    except OSError as error:
        raise PictureError(site, path, f"not readable ({error.strerror or error})", _AGAIN) from None


def with_channels(picture: Picture, channels: Literal[1, 3] | None) -> Picture:
    """The picture with so many channels. Colour whose channels are equal becomes exactly that grey."""
    pixels, notes = picture.pixels, picture.notes
    colour = len(pixels) == 3 and not (
        np.array_equal(pixels[0], pixels[1]) and np.array_equal(pixels[0], pixels[2])
    )
    picture = replace(picture, colour=colour)
    if channels is None or len(pixels) == channels:
        return picture
    if channels == 3:
        return replace(picture, pixels=np.repeat(pixels, 3, axis=0))
    if not colour:
        return replace(picture, pixels=pixels[:1].copy())
    grey = np.tensordot(np.asarray(LUMA, np.float32), pixels, axes=1)[None]
    return replace(picture, pixels=np.clip(grey, 0, 1), notes=(*notes, "colour was turned into grey"))


# ------------------------------------------------------------------------------------------- PNG and JPEG


def _read_raster(path: Path, head: bytes, formats: tuple[str, ...]) -> Picture:
    notes: list[str] = []
    try:
        with Image.open(path, formats=formats) as image:
            if image.format in ("GIF", "TIFF") and getattr(image, "n_frames", 1) != 1:
                raise FileError(path, f"{getattr(image, 'n_frames', 0)} frames", "give one file per picture")
            if image.width * image.height > PIXELS:
                raise Image.DecompressionBombError
            image.load()
            mode, information = image.mode, dict(image.info)
            orientation = exif_orientation(image, notes)
            values, scale = _values(path, image, notes)
    except UnidentifiedImageError:
        what = f"neither {', '.join(formats)} nor DICOM, or its beginning is damaged"
        raise FileError(path, what, _CONVERT) from None
    except Image.DecompressionBombError:
        what = f"too large: its header promises more than {PIXELS:,} pixels"
        raise FileError(path, what, "see that it is the right file, and scale it down") from None
    except FileError:
        raise
    except (OSError, SyntaxError, ValueError, EOFError, IndexError) as error:
        raise FileError(path, f"truncated or damaged ({_first_line(error)})", _AGAIN) from None
    if "transparency" in information and mode not in ("P", "LA", "RGBA"):
        notes.append("one colour is declared transparent; that was not heeded")
    if head[:8] == b"\x89PNG\r\n\x1a\n" and head[24:25] == b"\x10" and head[25:26] != b"\x00":
        notes.append("16 bit colour was read with 8 bits")
    pixels = (values.astype(np.float32) / np.float32(scale)).reshape(*values.shape[:2], -1)
    return Picture(turned(np.ascontiguousarray(pixels.transpose(2, 0, 1)), orientation), tuple(notes))


def _values(path: Path, image: Image.Image, notes: list[str]) -> tuple[np.ndarray, int]:
    """[H, W] or [H, W, 3], and the largest value that its bits can hold."""
    if image.mode == "P":
        image = image.convert("RGBA" if "transparency" in image.info else "RGB")
    if image.mode in ("LA", "PA", "RGBA"):
        alpha = np.asarray(image.getchannel("A"))
        shares = "" if (alpha == 255).all() else f", {int((alpha < 255).sum())} pixels were not opaque"
        notes.append(f"the alpha channel was dropped{shares}")
        image = image.convert("L" if image.mode == "LA" else "RGB")
    if image.mode == "1":
        return np.asarray(image, np.uint8), 1
    if image.mode in ("L", "RGB"):
        return np.asarray(image), 255
    if image.mode in ("I;16", "I;16B", "I;16L", "I"):
        return np.asarray(image), 65535
    raise FileError(path, f"of colour mode {image.mode}", _CONVERT)


def exif_orientation(image: Image.Image, notes: list[str]) -> int:
    """The EXIF orientation, 1 to 8; 1 where there is none that can be read."""
    try:
        code = image.getexif().get(0x0112, 1)
    except Exception:  # a damaged EXIF block says nothing about the pixels, and fails in many ways
        notes.append("the EXIF block cannot be read; the picture is taken as upright")
        return 1
    if code not in range(1, 9):
        notes.append(f"the EXIF orientation is {code!r}, not 1 to 8; the picture is taken as upright")
        return 1
    return int(code)


def turned(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """Pixels [..., H, W], stored with an EXIF orientation, as they are to be seen.

    1 as stored, 2 mirrored left to right, 3 turned by 180°, 4 mirrored top to bottom, 5 rows and columns exchanged, 6 to
    be turned clockwise by 90°, 7 exchanged along the other diagonal, 8 to be turned anticlockwise by 90° (EXIF 2.3, tag
    0x0112).
    """
    if orientation not in range(1, 9):
        raise DataError(f"EXIF orientation is {orientation}; allowed: 1 to 8")
    if orientation in (5, 6, 7, 8):
        pixels = pixels.swapaxes(-1, -2)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[..., ::-1, :]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[..., ::-1]
    return np.ascontiguousarray(pixels)


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


# ------------------------------------------------------------------------------------------------- DICOM


@dataclass(frozen=True)
class Window:
    """Which values are shown from black to white: a centre and a width, in the values after the modality."""

    centre: float
    width: float
    function: Function = "LINEAR"


@dataclass(frozen=True)
class Table:
    """A lookup table. first: the input that its first value stands for; inputs outside take its first or last value;
    bits: how many its values have."""

    first: int
    values: np.ndarray
    bits: int


@dataclass(frozen=True)
class Stored:
    """What a DICOM header says of how grey values are stored and shown.

    bits, signed: of the stored integers; slope, intercept: to modality values, unless `modality` is a table; interest:
    the window or table that shows them, if there is one; inverted: MONOCHROME1, the lowest value is white; towards: where
    the rows and the columns lead (Patient Orientation), None if it is not said.
    """

    bits: int
    signed: bool = False
    slope: float = 1.0
    intercept: float = 0.0
    modality: Table | None = None
    interest: Window | Table | None = None
    inverted: bool = False
    towards: tuple[str, str] | None = None


def grey_of(values: np.ndarray, stored: Stored) -> np.ndarray:
    """Stored integers [H, W] as they are to be seen: float32 [H, W], 0 black to 1 white.

    Modality, then values of interest, then MONOCHROME1 turned round, then `upright`. Without window or table for the
    values of interest, 0 to 1 is the range that the stored bits can express after the modality. Padding is not treated
    apart. Raises DataError for a width or slope that is not allowed, and for an orientation that is none.
    """
    if stored.modality is not None:
        shown = look_up(values, stored.modality)
        low, high = 0.0, float(2**stored.modality.bits - 1)
    else:
        shown = rescaled(values, stored.slope, stored.intercept)
        least = -(2 ** (stored.bits - 1)) if stored.signed else 0
        ends = [stored.slope * v + stored.intercept for v in (least, least + 2**stored.bits - 1)]
        low, high = min(ends), max(ends)
    if isinstance(stored.interest, Window):
        shown = windowed(shown, stored.interest)
    elif stored.interest is not None:
        shown = look_up(shown, stored.interest) / (2**stored.interest.bits - 1)
    else:
        shown = np.clip((shown - low) / (high - low), 0, 1)
    if stored.inverted:
        shown = 1 - shown
    if stored.towards is not None:
        shown = upright(shown, stored.towards)
    return np.ascontiguousarray(shown, dtype=np.float32)


def rescaled(values: np.ndarray, slope: float, intercept: float) -> np.ndarray:
    """Rescale slope and intercept (PS3.3 C.11.1.1.2): slope · values + intercept, float64."""
    if not np.isfinite([slope, intercept]).all() or slope == 0:
        raise DataError(f"rescale slope {slope:g} and intercept {intercept:g}; both finite, the slope not 0")
    return values.astype(np.float64) * slope + intercept


def look_up(values: np.ndarray, table: Table) -> np.ndarray:
    """The table's values, float64 (PS3.3 C.11.1.1.1 and C.11.2.1.1)."""
    if table.values.size == 0:
        raise DataError("a lookup table without values")
    place = np.clip(np.rint(values).astype(np.int64) - table.first, 0, table.values.size - 1)
    return table.values.astype(np.float64)[place]


def windowed(values: np.ndarray, window: Window) -> np.ndarray:
    """Values x through a window of centre c and width w: float64, 0 to 1 (PS3.3 C.11.2.1.2 and C.11.2.1.3).

        LINEAR        0 for x ≤ c − 0.5 − (w−1)/2, 1 for x > c − 0.5 + (w−1)/2, between (x − (c − 0.5))/(w−1) + 0.5
        LINEAR_EXACT  0 for x ≤ c − w/2, 1 for x > c + w/2, between (x − c)/w + 0.5
        SIGMOID       1 / (1 + exp(−4 (x − c)/w))

    Raises DataError for a width below 1 (LINEAR), or of 0 and less.
    """
    x, c, w = values.astype(np.float64), window.centre, window.width
    least = "1 or more" if window.function == "LINEAR" else "above 0"
    if not np.isfinite([c, w]).all() or w <= 0 or (window.function == "LINEAR" and w < 1):
        raise DataError(f"window centre {c:g}, width {w:g}; the width of {window.function} is {least}")
    if window.function == "SIGMOID":
        return 1 / (1 + np.exp(np.clip(-4 * (x - c) / w, -700, 700)))
    if window.function == "LINEAR":
        c, w = c - 0.5, w - 1
    if w == 0:
        return (x > c).astype(np.float64)
    return np.clip((x - c) / w + 0.5, 0, 1)


def upright(pixels: np.ndarray, towards: tuple[str, str]) -> np.ndarray:
    """Pixels [..., H, W] turned so that a frontal view shows the patient's left on the right and the feet below.

    towards: where the rows lead, and where the columns lead, in the letters of Patient Orientation (L left, R right, H
    head, F feet, A anterior, P posterior; the first letter counts). A lateral view is turned head up and is not mirrored;
    a view from above is left as it is. Raises DataError if the two are not directions at a right angle.
    """
    axes = {"L": "side", "R": "side", "H": "height", "F": "height", "A": "depth", "P": "depth"}
    row, column = (name[:1].upper() for name in towards)
    if row not in axes or column not in axes or axes[row] == axes[column]:
        raise DataError(
            f"patient orientation is {towards[0]}\\{towards[1]}; allowed: two directions of L/R, H/F, A/P at a right angle"
        )
    if "height" not in (axes[row], axes[column]):
        return pixels
    if axes[row] == "height":
        pixels, row, column = pixels.swapaxes(-1, -2), column, row
    if column == "H":
        pixels = pixels[..., ::-1, :]
    if row == "R":
        pixels = pixels[..., ::-1]
    return np.ascontiguousarray(pixels)


def _read_dicom(path: Path) -> Picture:
    try:
        pydicom = importlib.import_module("pydicom")
        pixel_array = importlib.import_module("pydicom.pixels").pixel_array
    except ImportError:
        raise FileError(
            path, "DICOM needs pydicom 3, which is not installed", 'run pip install "fedatlas[dicom]"'
        ) from None
    try:
        data = pydicom.dcmread(path)
        frames = int(data.get("NumberOfFrames") or 1)
        if frames != 1:
            raise FileError(path, f"{frames} frames", "one file per image: export the frames one by one")
        if "PixelData" not in data:
            raise FileError(path, "DICOM without pixel data", "export the image, not a report or a series")
        photometric = str(data.get("PhotometricInterpretation") or "")
        modality = str(data.get("Modality") or "").upper()[:16]
        values = pixel_array(data)
        stored, notes = (None, []) if values.ndim == 3 else _stored(data)
    except DataError:
        raise
    except Exception as error:  # pydicom and its decoders raise whatever they meet in a damaged file
        remedy = f"{_AGAIN}; for a compressed file also install pylibjpeg with its decoders, or decompress it"
        raise FileError(path, f"not readable as DICOM ({_first_line(error)})", remedy) from None
    if stored is not None and photometric in ("MONOCHROME1", "MONOCHROME2") and values.ndim == 2:
        return Picture(grey_of(values, stored)[None], tuple(notes), modality)
    if photometric == "RGB" or photometric.startswith("YBR"):
        whole = np.float32(2 ** int(data.BitsStored) - 1)
        pixels = np.ascontiguousarray(values.transpose(2, 0, 1).astype(np.float32) / whole)
        return Picture(np.clip(pixels, 0, 1), tuple(notes), modality)
    raise FileError(path, f"photometric interpretation {photometric or 'not given'!r}", _CONVERT)


def _stored(data: Any) -> tuple[Stored, list[str]]:
    """A DICOM header's part in showing its pixels, and what was chosen among alternatives. data: a pydicom Dataset."""
    notes: list[str] = []
    signed = int(data.get("PixelRepresentation") or 0) == 1
    slope, intercept = _number(data, "RescaleSlope", 1.0), _number(data, "RescaleIntercept", 0.0)
    modality = _table(data, "ModalityLUTSequence", signed)
    modality_signed = modality is None and (signed or intercept < 0)
    interest: Window | Table | None = _table(data, "VOILUTSequence", modality_signed)
    centres, widths = _numbers(data, "WindowCenter"), _numbers(data, "WindowWidth")
    if len(centres) != len(widths):
        raise DataError(f"{len(centres)} window centres and {len(widths)} widths; both must be given alike")
    if centres:
        if interest is not None:
            notes.append("the header has a window and a lookup table; the window was taken")
        if len(centres) > 1:
            notes.append(f"the header has {len(centres)} windows; the first was taken")
        named = str(data.get("VOILUTFunction") or "LINEAR").upper()
        function = FUNCTIONS.get(named)
        if function is None:
            raise DataError(f"VOI LUT function is {named!r}; allowed: {', '.join(FUNCTIONS)}")
        interest = Window(centres[0], widths[0], function)
    elif interest is None:
        notes.append("the header has no window; the range of its bits was taken")
    towards = [str(part) for part in data.get("PatientOrientation") or []]
    if len(towards) != 2 or not all(towards):
        notes.append("the header gives no patient orientation; the picture is taken as upright")
    inverted = str(data.get("PhotometricInterpretation")) == "MONOCHROME1"
    pair = (towards[0], towards[1]) if len(towards) == 2 and all(towards) else None
    return Stored(int(data.BitsStored), signed, slope, intercept, modality, interest, inverted, pair), notes


def _numbers(data: Any, name: str) -> list[float]:
    value = data.get(name)
    if value is None or value == "":
        return []
    return [
        float(v) for v in ([value] if isinstance(value, str | int | float) else value) if v not in (None, "")
    ]


def _number(data: Any, name: str, default: float) -> float:
    return next(iter(_numbers(data, name)), default)


def _table(data: Any, name: str, signed: bool) -> Table | None:
    """The first lookup table of a sequence. Its descriptor is: how many values (0: 65536), the first input, bits."""
    sequence = data.get(name)
    if not sequence:
        return None
    count, first, bits = (int(v) for v in sequence[0].LUTDescriptor)
    count = (count & 0xFFFF) or 65536
    first &= 0xFFFF
    content = sequence[0].LUTData
    if isinstance(content, bytes):
        values = np.frombuffer(content, np.uint8 if bits <= 8 and len(content) < 2 * count else "<u2")
    else:
        values = np.asarray(content, np.int64) & 0xFFFF
    if values.size < count:
        raise DataError(f"{name}: {values.size} values, where its descriptor promises {count}")
    return Table(first - 65536 if signed and first >= 32768 else first, values[:count], bits)
