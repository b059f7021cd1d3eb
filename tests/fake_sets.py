"""Folders in the exact layouts of the chest X-ray sets, with small drawn pictures: lungs, heart, pneumothorax.

Every writer returns the site's folder. Shapes: H rows, W columns.
"""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedatlas.data.formats import rle


def anatomy(number: int, shape: tuple[int, int] = (32, 32)) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """A radiograph, uint8 [H, W], and its masks, bool [H, W]. The patient's left lung is on the right."""
    rng = np.random.default_rng(number)
    y, x = np.meshgrid(*(np.linspace(-1, 1, n) for n in shape), indexing="ij")
    dx, dy, size = rng.uniform(-0.06, 0.06), rng.uniform(-0.06, 0.06), rng.uniform(0.9, 1.1)

    def ellipse(cx: float, cy: float, rx: float, ry: float) -> np.ndarray:
        return ((x - cx - dx) / (rx * size)) ** 2 + ((y - cy - dy) / (ry * size)) ** 2 < 1

    heart = ellipse(0.14, 0.3, 0.2, 0.3)
    masks = {
        "left lung": ellipse(0.5, 0, 0.26, 0.6) & ~heart,
        "right lung": ellipse(-0.5, 0, 0.28, 0.62) & ~heart,
        "heart": heart,
        "left clavicle": ellipse(0.4, -0.7, 0.25, 0.08),
        "right clavicle": ellipse(-0.4, -0.7, 0.25, 0.08),
        "pneumothorax": ellipse(0.5, -0.35, 0.24, 0.2),
    }
    image = np.full(shape, 120.0) + 60 * heart - 70 * (masks["left lung"] | masks["right lung"])
    image += rng.normal(0, 6, shape)
    return image.clip(0, 255).astype(np.uint8), masks


def picture(path: Path, values: np.ndarray) -> Path:
    """Writes a picture; a mask becomes 0 and 255."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(values.astype(np.uint8) * 255 if values.dtype == bool else values).save(path)
    return path


def write_masks(
    root: Path,
    cases: int = 4,
    classes: Sequence[str] = ("left_lung", "right_lung"),
    shape: tuple[int, int] = (32, 32),
    first: int = 0,
) -> Path:
    """images/<case>.png and masks/<class>/<case>.png."""
    for number in range(first, first + cases):
        image, masks = anatomy(number, shape)
        picture(root / "images" / f"cxr_{number:03d}.png", image)
        for name in classes:
            picture(root / "masks" / name / f"cxr_{number:03d}.png", masks[name.replace("_", " ")])
    return root


def write_montgomery(root: Path, cases: int = 6, shape: tuple[int, int] = (32, 40)) -> Path:
    """The Montgomery County set."""
    base = root / "MontgomerySet"
    for number in range(cases):
        image, masks = anatomy(number, shape)
        name = f"MCUCXR_{number + 1:04d}_{number % 2}.png"
        picture(base / "CXR_png" / name, image)
        picture(base / "ManualMask" / "leftMask" / name, masks["left lung"])
        picture(base / "ManualMask" / "rightMask" / name, masks["right lung"])
        text = base / "ClinicalReadings" / name.replace(".png", ".txt")
        text.parent.mkdir(exist_ok=True)
        text.write_text("Patient's Sex: F\nnormal\n")
    return root


def write_shenzhen(
    root: Path, cases: int = 6, shape: tuple[int, int] = (36, 32), both: bool = False, unmasked: int = 1
) -> Path:
    """The Shenzhen set, with masks in two folders or `both` in one; the last pictures have none."""
    for number in range(cases):
        image, masks = anatomy(50 + number, shape)
        name = f"CHNCXR_{number + 1:04d}_{number % 2}"
        picture(root / "CXR_png" / f"{name}.png", image)
        if number >= cases - unmasked:
            continue
        if both:
            picture(root / "mask" / f"{name}_mask.png", masks["left lung"] | masks["right lung"])
        else:
            picture(root / "leftMask" / f"{name}.png", masks["left lung"])
            picture(root / "rightMask" / f"{name}.png", masks["right lung"])
    return root


def write_jsrt(root: Path, cases: int = 6, side: int = 32) -> Path:
    """JSRT's raw files of `side`×`side` pixels, and the masks of SCR at half of it."""
    for number in range(cases):
        image, masks = anatomy(100 + number, (side, side))
        name = f"JPC{'LN'[number % 2]}N{number // 2 + 1:03d}"
        file = root / "All247images" / f"{name}.IMG"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes((4095 - image.astype(np.int64) * 16).astype(">u2").tobytes())
        for structure in ("left lung", "right lung", "heart", "left clavicle", "right clavicle"):
            folder = root / "scratch" / f"fold{1 + number % 2}" / "masks" / structure
            picture(folder / f"{name}.gif", masks[structure][::2, ::2])
    return root


def write_siim(
    root: Path, cases: int = 8, side: int = 32, table: str = "stage_2_train.csv", dicom: bool = True
) -> Path:
    """SIIM-ACR: every fourth picture has a pneumothorax, every eighth in two rows."""
    rows = []
    for number in range(cases):
        image, masks = anatomy(200 + number, (side, side))
        name = f"1.2.276.0.7230010.3.1.4.8323329.{1000 + number}.1517875000.{100000 + number}"
        folder = root / "dicom-images-train" / f"{name}.study" / f"{name}.series"
        if dicom:
            write_dicom(folder / f"{name}.dcm", image)
        else:
            picture(root / "png" / f"{name}.png", image)
        mask = masks["pneumothorax"]
        if number % 4:
            rows.append((name, "-1"))
        elif number % 8:
            rows.append((name, rle.encode(mask)))
        else:
            upper = np.arange(side)[:, None] < np.flatnonzero(mask.any(1)).mean()
            rows += [(name, rle.encode(mask & upper)), (name, rle.encode(mask & ~upper))]
    write_rle(root / table, rows)
    return root


def write_rle(path: Path, rows: Sequence[tuple[str, str]]) -> None:
    """The table as Kaggle has it, with a blank before the second column."""
    with path.open("w", newline="") as stream:
        csv.writer(stream).writerows([("ImageId", " EncodedPixels"), *((n, f" {text}") for n, text in rows)])


def write_dicom(path: Path, values: np.ndarray, **header: object) -> Path:
    """A grey DICOM file of 8 bit; skips the test where pydicom is not installed."""
    pydicom = pytest.importorskip("pydicom")
    data = pydicom.Dataset()
    data.SOPClassUID, data.SOPInstanceUID = "1.2.840.10008.5.1.4.1.1.7", pydicom.uid.generate_uid()
    data.Rows, data.Columns = values.shape
    data.SamplesPerPixel, data.PhotometricInterpretation = 1, "MONOCHROME2"
    data.BitsAllocated = data.BitsStored = 8
    data.HighBit, data.PixelRepresentation = 7, 0
    standard: Mapping[str, object] = {"PatientOrientation": ["L", "F"], "PixelSpacing": [0.143, 0.143]}
    for name, value in (dict(standard) | header).items():
        setattr(data, name, value)
    data.PixelData = values.tobytes() + b"\0" * (values.size % 2)
    data["PixelData"].VR = "OB"
    data.file_meta = pydicom.dataset.FileMetaDataset()
    data.file_meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
    path.parent.mkdir(parents=True, exist_ok=True)
    pydicom.dcmwrite(path, data, enforce_file_format=True)
    return path
