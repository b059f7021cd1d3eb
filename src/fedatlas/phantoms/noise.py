"""Sites of noise in any size, with a box of each class as its label: what is read where a run is tried without data.

Cases are case-0, case-1, …, no two alike. Each function writes a site into a folder and returns the keys that say how it is
read, as of a site of a federation file.
"""

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
from PIL import Image

from fedatlas.core.labels import BACKGROUND
from fedatlas.core.seeds import seed_of


def write_scans(
    folder: Path,
    classes: Sequence[str],
    shape: Sequence[int],
    spacing: Sequence[float],
    *,
    channels: int,
    cases: int,
    window: Sequence[float] | None = None,
) -> dict[str, Any]:
    """Scans with label maps, as nnU-Net raw. shape, spacing: voxels and mm along left-right, back-front, foot-head; window: between
    which two intensities the noise is, None: -1000 and 1000."""
    for name in ("imagesTr", "labelsTr"):
        (folder / name).mkdir(parents=True)
    affine = np.diag([*spacing, 1.0])
    label = np.zeros(shape, dtype=np.uint8)
    for number, box in enumerate(_boxes(shape, len(classes)), start=1):
        label[box] = number
    low, high = window or (-1000.0, 1000.0)
    values = np.linspace(low, high, 256, dtype=np.float32)
    for case in range(cases):
        rng = np.random.default_rng(seed_of(folder.name, case))
        for channel in range(channels):
            image = values[rng.integers(256, size=tuple(shape), dtype=np.uint8)]
            file = folder / "imagesTr" / f"case-{case}_{channel:04d}.nii.gz"
            nib.save(nib.Nifti1Image(image, affine), file)  # type: ignore[attr-defined]
        nib.save(nib.Nifti1Image(label, affine), folder / "labelsTr" / f"case-{case}.nii.gz")  # type: ignore[attr-defined]
    table = {
        "labels": {name: number for number, name in enumerate((BACKGROUND, *classes))},
        "channel_names": {str(channel): "noise" for channel in range(channels)},
        "numTraining": cases,
        "file_ending": ".nii.gz",
    }
    (folder / "dataset.json").write_text(json.dumps(table), encoding="utf-8")
    return {"format": "nnunet"}


def write_pictures(
    folder: Path,
    classes: Sequence[str],
    shape: Sequence[int],
    pixel: Sequence[float],
    *,
    channels: int,
    cases: int,
    findings: Sequence[str] = (),
) -> dict[str, Any]:
    """Pictures with a mask per class. shape, pixel: columns and rows, and the mm between them; findings: of the whole picture, all
    present."""
    columns, rows = shape
    boxes = list(_boxes((rows, columns), len(classes)))
    for name in ("images", *(f"masks/{place}" for place in range(len(classes)))):
        (folder / name).mkdir(parents=True)
    for case in range(cases):
        _write_noise(folder / "images" / f"case-{case}.png", (rows, columns), channels)
        for place, box in enumerate(boxes):
            mask = np.zeros((rows, columns), dtype=np.uint8)
            mask[box] = 255
            Image.fromarray(mask).save(folder / "masks" / str(place) / f"case-{case}.png")
    reading: dict[str, Any] = {
        "classes": {name: str(place) for place, name in enumerate(classes)},
        "channels": channels,
        "pixel": [pixel[1], pixel[0]],
    }
    if findings:
        told = ([f"case-{case}", *("1" for _ in findings)] for case in range(cases))
        _write_table(folder / "findings.csv", ["case", *findings], told)
        reading["findings"] = "findings.csv"
    return {"format": "masks", "reading": reading}


def write_images(
    folder: Path, classes: Sequence[str], size: Sequence[int], *, channels: int, cases: Mapping[str, int]
) -> dict[str, Any]:
    """Images with findings of the whole, in a table. size: rows and columns; cases: per split. A class is present in every other
    image."""
    folder.mkdir(parents=True)
    splits = [split for split, count in cases.items() for _ in range(count)]
    for case in range(len(splits)):
        _write_noise(folder / f"case-{case}.png", size, channels)
    told = (
        [f"case-{case}.png", split, *(str((case + place) % 2) for place in range(len(classes)))]
        for case, split in enumerate(splits)
    )
    _write_table(folder / "labels.csv", ["file", "split", *classes], told)
    return {"format": "csv", "reading": {"split": "split"}}


def _boxes(shape: Sequence[int], count: int) -> list[tuple[slice, ...]]:
    """So many boxes, beside each other along the first axis."""
    rest = tuple(slice(n // 3, n // 3 + max(1, n // 4)) for n in shape[1:])
    found = []
    for number in range(count):
        first, stop = (shape[0] * n // count for n in (number, number + 1))
        found.append((slice(first, max(first + 1, (first + stop) // 2)), *rest))
    return found


def _write_noise(file: Path, size: Sequence[int], channels: int) -> None:
    shape = tuple(size) if channels == 1 else (*size, channels)
    rng = np.random.default_rng(seed_of(*file.parts[-3:]))
    pixels = rng.integers(256, size=shape, dtype=np.uint8)
    Image.fromarray(pixels).save(file, compress_level=1)


def _write_table(file: Path, header: Sequence[str], rows: Any) -> None:
    with file.open("w", newline="", encoding="utf-8") as opened:
        csv.writer(opened).writerows([header, *rows])
