"""Pictures: bits, colour, orientation, what is refused; and the pixel logic of DICOM against its written formulas."""

import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from fedatlas.core.errors import DataError
from fedatlas.data.formats import picture
from fedatlas.data.formats.picture import (
    PictureError,
    Stored,
    Table,
    Window,
    grey_of,
    look_up,
    read_picture,
    rescaled,
    turned,
    upright,
    windowed,
)

GREY = np.arange(12, dtype=np.uint8).reshape(3, 4) * 20
COLOUR = np.stack([GREY, GREY + 10, 255 - GREY], axis=-1)


def save(path: Path, pixels: np.ndarray, mode: str | None = None, **how: Any) -> Path:
    image = Image.fromarray(pixels)
    (image if mode is None else image.convert(mode)).save(path, **how)
    return path


def read(path: Path, **how: Any) -> picture.Picture:
    return read_picture(path, site="north", **how)


def png(width: int, height: int, depth: int, colour: int, rows: bytes) -> bytes:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        )

    head = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    body = zlib.compress(rows)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


# ------------------------------------------------------------------------------------------- PNG and JPEG


def test_8_bit_grey_is_divided_by_255(tmp_path: Path) -> None:
    found = read(save(tmp_path / "a.png", GREY))
    assert found.pixels.dtype == np.float32 and found.pixels.shape == (1, 3, 4)
    assert np.array_equal(found.pixels[0], (GREY / np.float32(255)).astype(np.float32))
    assert found.notes == ()


def test_16_bit_grey_is_divided_by_65535_and_keeps_its_low_bits(tmp_path: Path) -> None:
    values = np.array([[0, 1, 256], [257, 40000, 65535]], np.uint16)
    found = read(save(tmp_path / "a.png", values))
    assert np.allclose(found.pixels[0] * 65535, values, atol=0.01)
    assert len(np.unique(found.pixels)) == 6


@pytest.mark.parametrize(("depth", "row", "steps"), [(1, 0b0110_0000, 1), (2, 0b0001_1011, 3), (4, 0x0F, 15)])
def test_fewer_bits_span_the_whole_range(tmp_path: Path, depth: int, row: int, steps: int) -> None:
    width = 4 if depth < 4 else 2
    (tmp_path / "a.png").write_bytes(png(width, 1, depth, 0, bytes([0, row])))
    expected = [(row >> (8 - depth * (x + 1)) & (2**depth - 1)) / steps for x in range(width)]
    assert np.allclose(read(tmp_path / "a.png").pixels.ravel(), expected)


def test_colour_is_three_channels(tmp_path: Path) -> None:
    found = read(save(tmp_path / "a.png", COLOUR))
    assert found.pixels.shape == (3, 3, 4)
    assert np.allclose(found.pixels, COLOUR.transpose(2, 0, 1) / 255, atol=1e-7)


def test_jpeg_grey_and_colour(tmp_path: Path) -> None:
    flat = np.full((16, 16), 100, np.uint8)
    assert np.allclose(read(save(tmp_path / "a.jpg", flat)).pixels, 100 / 255, atol=0.01)
    assert read(save(tmp_path / "b.jpeg", np.stack([flat] * 3, -1))).pixels.shape == (3, 16, 16)


def test_palette_and_bilevel_are_expanded(tmp_path: Path) -> None:
    found = read(save(tmp_path / "p.png", COLOUR, "P"))
    assert found.pixels.shape == (3, 3, 4)
    assert set(np.unique(read(save(tmp_path / "b.png", GREY, "1")).pixels)) <= {0.0, 1.0}


def test_the_file_decides_not_its_name(tmp_path: Path) -> None:
    save(tmp_path / "a.png", np.full((8, 8), 9, np.uint8), format="JPEG")
    assert read(tmp_path / "a.png").pixels.shape == (1, 8, 8)


@pytest.mark.parametrize("opaque", [True, False])
def test_alpha_is_dropped_with_a_note(tmp_path: Path, opaque: bool) -> None:
    alpha = np.full((3, 4), 255, np.uint8)
    alpha[0, :2] = 255 if opaque else 7
    found = read(save(tmp_path / "a.png", np.dstack([COLOUR, alpha])))
    assert np.allclose(found.pixels, COLOUR.transpose(2, 0, 1) / 255)
    assert len(found.notes) == 1 and "alpha channel was dropped" in found.notes[0]
    assert ("2 pixels were not opaque" in found.notes[0]) is not opaque
    grey = read(save(tmp_path / "b.png", np.dstack([GREY, alpha])))
    assert grey.pixels.shape == (1, 3, 4) and np.allclose(grey.pixels[0], GREY / 255)


def test_a_transparent_grey_value_is_noted(tmp_path: Path) -> None:
    found = read(save(tmp_path / "a.png", GREY, transparency=20))
    assert np.allclose(found.pixels[0], GREY / 255) and "transparent" in found.notes[0]


def test_16_bit_colour_is_noted(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png(1, 1, 16, 2, bytes([0, 255, 0, 128, 0, 0, 0])))
    found = read(tmp_path / "a.png")
    assert found.pixels.shape == (3, 1, 1) and found.notes == ("16 bit colour was read with 8 bits",)


def test_channels_on_request(tmp_path: Path) -> None:
    path = save(tmp_path / "a.png", COLOUR)
    grey = read(path, channels=1)
    r, g, b = COLOUR.transpose(2, 0, 1) / 255
    assert grey.pixels.shape == (1, 3, 4)
    assert np.allclose(grey.pixels[0], 0.299 * r + 0.587 * g + 0.114 * b, atol=1e-6)
    assert "grey" in grey.notes[0]
    equal = read(save(tmp_path / "b.png", np.stack([GREY] * 3, -1)), channels=1)
    assert np.array_equal(equal.pixels, read(save(tmp_path / "c.png", GREY)).pixels) and equal.notes == ()
    three = read(tmp_path / "c.png", channels=3)
    assert three.pixels.shape == (3, 3, 4) and np.array_equal(three.pixels[0], three.pixels[2])


@pytest.mark.parametrize("code", range(1, 9))
def test_exif_orientation(tmp_path: Path, code: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = code
    path = save(tmp_path / "a.png", GREY, exif=exif)
    expected = np.asarray(ImageOps.exif_transpose(Image.open(path)))
    assert np.allclose(read(path).pixels[0] * 255, expected, atol=1e-4)


def test_exif_orientation_by_its_meaning() -> None:
    stored = np.array([[1, 2], [3, 4], [5, 6]])
    assert turned(stored, 6).tolist() == [[5, 3, 1], [6, 4, 2]]
    assert turned(stored, 8).tolist() == [[2, 4, 6], [1, 3, 5]]
    with pytest.raises(DataError, match="1 to 8"):
        turned(stored, 9)


def test_an_impossible_orientation_is_noted(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 12
    found = read(save(tmp_path / "a.png", GREY, exif=exif))
    assert np.allclose(found.pixels[0] * 255, GREY, atol=1e-4) and "12" in found.notes[0]


@pytest.mark.parametrize("ending", ["png", "jpg"])
@pytest.mark.parametrize("kept", [0.3, 0.9])
def test_truncated_files_are_refused(tmp_path: Path, ending: str, kept: float) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64), dtype=np.uint8)
    path = save(tmp_path / f"a.{ending}", noise)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * kept)])
    with pytest.raises(PictureError, match=r"site north: .*a\.\w+: truncated or damaged .*; copy or export"):
        read(path)


def test_damaged_png_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "a.png", np.random.default_rng(0).integers(0, 256, (64, 64), dtype=np.uint8))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(PictureError, match="truncated or damaged"):
        read(path)


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("a.png", b"", "empty"),
        ("a.png", b"not an image", "neither PNG, JPEG nor DICOM"),
        ("a.jpg", b"%PDF-1.4" + bytes(200), "neither PNG, JPEG nor DICOM"),
        ("a.dcm", bytes(200), "not a DICOM file"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, name: str, content: bytes, what: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(PictureError, match=f"site north: .*{name}: {what}.*; ") as error:
        read(tmp_path / name)
    assert error.value.site == "north" and error.value.file == tmp_path / name and error.value.remedy


def test_missing_files_and_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PictureError, match="no such file; add it"):
        read(tmp_path / "a.png")
    with pytest.raises(PictureError, match="site north: .*not readable"):
        read(tmp_path)


def test_other_formats_and_modes_are_refused(tmp_path: Path) -> None:
    Image.fromarray(GREY).save(tmp_path / "a.tiff")
    with pytest.raises(PictureError, match="neither PNG, JPEG nor DICOM"):
        read(tmp_path / "a.tiff")
    save(tmp_path / "a.jpg", COLOUR, "CMYK")
    with pytest.raises(PictureError, match="colour mode CMYK; export it"):
        read(tmp_path / "a.jpg")


@pytest.mark.parametrize("width", [10_000, 60_000])
def test_a_header_that_promises_too_much_is_refused(tmp_path: Path, width: int) -> None:
    (tmp_path / "a.png").write_bytes(png(width, 10_000, 8, 0, bytes(100)))
    with pytest.raises(PictureError, match="too large"):
        read(tmp_path / "a.png")


# ----------------------------------------------------------------------------------------- pixel logic


def literal(x: float, c: float, w: float, function: str) -> float:
    """PS3.3 C.11.2.1.2 and C.11.2.1.3 with y from 0 to 1, as they are written there, value by value."""
    if function == "SIGMOID":
        return 1 / (1 + np.exp(min(-4 * (x - c) / w, 700)))
    if function == "LINEAR":
        if x <= c - 0.5 - (w - 1) / 2:
            return 0.0
        if x > c - 0.5 + (w - 1) / 2:
            return 1.0
        return (x - (c - 0.5)) / (w - 1) + 0.5
    if x <= c - w / 2:
        return 0.0
    if x > c + w / 2:
        return 1.0
    return (x - c) / w + 0.5


@pytest.mark.parametrize("function", ["LINEAR", "LINEAR_EXACT", "SIGMOID"])
@pytest.mark.parametrize(("c", "w"), [(2048, 4096), (0, 100), (40.5, 1), (-600, 1500), (0, 2)])
def test_windows_follow_the_standard(function: Any, c: float, w: float) -> None:
    x = np.concatenate([np.arange(-1500, 5000, 7), c + np.arange(-3, 3, 0.25)])
    expected = [literal(value, c, w, function) for value in x]
    with np.errstate(all="raise", under="ignore"):
        found = windowed(x, Window(c, w, function))
    assert np.allclose(found, expected, atol=1e-12)


def test_the_standards_own_example() -> None:
    """C.11.2.1.2.1: centre 2048, width 4096 maps 0 to 4095 onto the whole range; centre 0, width 100: −50 to 49."""
    assert windowed(np.array([0, 4095]), Window(2048, 4096)).tolist() == [0, 1]
    assert windowed(np.array([-50, 49]), Window(0, 100)).tolist() == [0, 1]
    assert windowed(np.array([-50, 50]), Window(0, 100, "LINEAR_EXACT")).tolist() == [0, 1]
    assert windowed(np.array([7.0]), Window(7, 3, "SIGMOID"))[0] == 0.5


@pytest.mark.parametrize(
    ("width", "function"), [(0.5, "LINEAR"), (0, "LINEAR_EXACT"), (-4, "SIGMOID"), (np.nan, "LINEAR")]
)
def test_widths_that_are_not_allowed(width: float, function: Any) -> None:
    with pytest.raises(DataError, match=f"the width of {function} is"):
        windowed(np.zeros(1), Window(0, width, function))


def test_rescaling_and_lookup() -> None:
    assert rescaled(np.array([0, 10]), 2, -1024).tolist() == [-1024, -1004]
    with pytest.raises(DataError, match="slope 0"):
        rescaled(np.zeros(1), 0, 0)
    table = Table(100, np.array([5, 6, 9]), 4)
    assert look_up(np.array([-3, 100, 101, 102, 500]), table).tolist() == [5, 5, 6, 9, 9]


def test_grey_of_applies_the_steps_in_order() -> None:
    values = np.array([[0, 1000, 2000]])
    shown = grey_of(values, Stored(12, slope=0.5, intercept=-100, interest=Window(400, 1000, "LINEAR_EXACT")))
    assert shown.dtype == np.float32
    assert np.allclose(shown, [[0.0, 0.5, 1.0]])
    turned_round = grey_of(
        values,
        Stored(12, slope=0.5, intercept=-100, interest=Window(400, 1000, "LINEAR_EXACT"), inverted=True),
    )
    assert np.allclose(turned_round, [[1.0, 0.5, 0.0]])


def test_without_a_window_the_bits_give_the_range() -> None:
    assert np.allclose(grey_of(np.array([[0, 4095]]), Stored(12)), [[0, 1]])
    assert np.allclose(
        grey_of(np.array([[-2048, 2047]]), Stored(12, signed=True, slope=3, intercept=7)), [[0, 1]]
    )
    assert np.allclose(grey_of(np.array([[0, 4095]]), Stored(12, slope=-1, intercept=4095)), [[1, 0]])
    table = Table(0, np.array([0, 255, 510]), 9)
    assert np.allclose(
        grey_of(np.array([[0, 1, 2]]), Stored(8, modality=table)), np.array([[0, 255, 510]]) / 511
    )
    assert np.allclose(
        grey_of(np.array([[0, 1, 2]]), Stored(8, interest=table)), np.array([[0, 255, 510]]) / 511
    )


def test_two_images_of_one_machine_stay_comparable() -> None:
    dark, bright = grey_of(np.full((2, 2), 100), Stored(12)), grey_of(np.full((2, 2), 3000), Stored(12))
    assert (dark < bright).all()


def test_upright_by_patient_orientation() -> None:
    """The picture: patient's right upper corner 1, left upper 2, right lower 3, left lower 4."""
    wanted = np.array([[1, 2], [3, 4]])
    assert upright(wanted, ("L", "F")).tolist() == wanted.tolist()
    assert upright(wanted[:, ::-1], ("R", "F")).tolist() == wanted.tolist()
    assert upright(wanted[::-1], ("L", "H")).tolist() == wanted.tolist()
    assert upright(wanted[::-1, ::-1], ("R", "H")).tolist() == wanted.tolist()
    assert upright(wanted.T, ("F", "L")).tolist() == wanted.tolist()
    assert upright(wanted.T[:, ::-1], ("H", "L")).tolist() == wanted.tolist()
    assert upright(wanted.T[::-1], ("F", "R")).tolist() == wanted.tolist()
    assert upright(wanted, ("LP", "FA")).tolist() == wanted.tolist()
    assert upright(wanted, ("P", "F")).tolist() == wanted.tolist()
    assert upright(wanted[::-1], ("A", "H")).tolist() == wanted.tolist()
    assert upright(wanted, ("L", "P")).tolist() == wanted.tolist()
    for wrong in (("L", "R"), ("X", "F"), ("", "F")):
        with pytest.raises(DataError, match="right angle"):
            upright(wanted, wrong)


# ------------------------------------------------------------------------------------------------- DICOM


def test_without_pydicom_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.dcm").write_bytes(bytes(128) + b"DICM" + bytes(50))

    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(picture.importlib, "import_module", missing)
    with pytest.raises(PictureError, match=r'site north: .*a\.dcm: DICOM needs pydicom.*"fedatlas\[dicom\]"'):
        read(tmp_path / "a.dcm")


def dicom(path: Path, values: np.ndarray, **header: Any) -> Path:
    pydicom = pytest.importorskip("pydicom")
    from pydicom.dataset import Dataset, FileMetaDataset  # type: ignore[import-not-found]
    from pydicom.uid import ExplicitVRLittleEndian, generate_uid  # type: ignore[import-not-found]

    data = Dataset()
    data.SOPClassUID, data.SOPInstanceUID = "1.2.840.10008.5.1.4.1.1.1.1", generate_uid()
    data.Rows, data.Columns = values.shape[:2]
    data.SamplesPerPixel = 3 if values.ndim == 3 else 1
    if values.ndim == 3:
        data.PlanarConfiguration = 0
    data.PhotometricInterpretation = "RGB" if values.ndim == 3 else "MONOCHROME2"
    data.BitsAllocated = data.BitsStored = 8 * values.dtype.itemsize
    data.HighBit = data.BitsStored - 1
    data.PixelRepresentation = int(values.dtype.kind == "i")
    for name, value in header.items():
        setattr(data, name, value)
    data.PixelData = values.tobytes() + b"\0" * (values.nbytes % 2)
    data["PixelData"].VR = "OW" if values.dtype.itemsize == 2 else "OB"
    data.file_meta = FileMetaDataset()
    data.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    pydicom.dcmwrite(path, data, enforce_file_format=True)
    return path


VALUES = np.array([[0, 1000], [2000, 4095]], np.uint16)


def test_dicom_window_rescale_inversion_and_orientation(tmp_path: Path) -> None:
    path = dicom(
        tmp_path / "a",
        VALUES,
        BitsStored=12,
        HighBit=11,
        RescaleSlope=2,
        RescaleIntercept=-100,
        WindowCenter=[2000, 50],
        WindowWidth=[3000, 10],
        VOILUTFunction="SIGMOID",
        PhotometricInterpretation="MONOCHROME1",
        PatientOrientation=["R", "F"],
    )
    found = read(path)
    expected = [[literal(2 * x - 100, 2000, 3000, "SIGMOID") for x in row] for row in VALUES.tolist()]
    assert found.pixels.dtype == np.float32 and found.pixels.shape == (1, 2, 2)
    assert np.allclose(found.pixels[0], 1 - np.array(expected)[:, ::-1], atol=1e-6)
    assert found.notes == ("the header has 2 windows; the first was taken",)


def test_dicom_without_window(tmp_path: Path) -> None:
    found = read(dicom(tmp_path / "a.dcm", VALUES, BitsStored=12, HighBit=11))
    assert np.allclose(found.pixels[0], VALUES / 4095, atol=1e-6)
    assert any("no window" in note for note in found.notes) and any(
        "orientation" in note for note in found.notes
    )
    signed = np.array([[-2048, 0], [5, 2047]], np.int16)
    found = read(dicom(tmp_path / "b.dcm", signed, BitsStored=12, HighBit=11))
    assert np.allclose(found.pixels[0], (signed + 2048) / 4095, atol=1e-6)


def test_dicom_lookup_table(tmp_path: Path) -> None:
    pytest.importorskip("pydicom")
    from pydicom.dataset import Dataset  # type: ignore[import-not-found]

    item = Dataset()
    item.add_new("LUTDescriptor", "US", [3, 999, 8])
    item.add_new("LUTData", "US", [10, 20, 255])
    found = read(dicom(tmp_path / "a.dcm", VALUES, VOILUTSequence=[item], PatientOrientation=["L", "F"]))
    assert np.allclose(found.pixels[0] * 255, [[10, 20], [255, 255]]) and found.notes == ()
    found = read(
        dicom(tmp_path / "b.dcm", VALUES, VOILUTSequence=[item], WindowCenter=2000, WindowWidth=4000)
    )
    assert found.pixels[0, 0, 1] == pytest.approx(literal(1000, 2000, 4000, "LINEAR"))
    assert any("window was taken" in note for note in found.notes)


def test_dicom_lookup_table_of_signed_values(tmp_path: Path) -> None:
    """The first input of a descriptor is signed where the values are; a modality table replaces slope and intercept."""
    pytest.importorskip("pydicom")
    from pydicom.dataset import Dataset  # type: ignore[import-not-found]

    item = Dataset()
    item.add_new("LUTDescriptor", "SS", [3, -2, 8])
    item.add_new("LUTData", "OW", np.array([10, 20, 255], "<u2").tobytes())
    values = np.array([[-2, -1], [0, 7]], np.int16)
    for name in ("VOILUTSequence", "ModalityLUTSequence"):
        found = read(dicom(tmp_path / f"{name}.dcm", values, **{name: [item]}))
        assert np.allclose(found.pixels[0] * 255, [[10, 20], [255, 255]])


def test_dicom_colour(tmp_path: Path) -> None:
    found = read(dicom(tmp_path / "a.dcm", COLOUR))
    assert np.allclose(found.pixels, COLOUR.transpose(2, 0, 1) / 255)


@pytest.mark.parametrize(
    ("header", "what"),
    [
        ({"NumberOfFrames": 2}, "2 frames"),
        ({"PhotometricInterpretation": "PALETTE COLOR"}, "photometric interpretation"),
        ({"WindowCenter": [1, 2], "WindowWidth": 5}, "2 window centres and 1 widths"),
        ({"WindowCenter": 1, "WindowWidth": 0}, "the width of LINEAR is 1 or more"),
        ({"WindowCenter": 1, "WindowWidth": 5, "VOILUTFunction": "CUBIC"}, "'CUBIC'; allowed: LINEAR"),
        ({"PatientOrientation": ["L", "R"]}, "right angle"),
    ],
)
def test_dicom_that_is_refused(tmp_path: Path, header: dict[str, Any], what: str) -> None:
    path = dicom(tmp_path / "a.dcm", VALUES, **header)
    with pytest.raises(PictureError, match=f"site north: .*{what}"):
        read(path)


@pytest.mark.parametrize("cut", [6, 120])
def test_truncated_dicom_is_refused(tmp_path: Path, cut: int) -> None:
    path = dicom(tmp_path / "a.dcm", VALUES)
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(PictureError, match=r"site north: .*a\.dcm: "):
        read(path)
