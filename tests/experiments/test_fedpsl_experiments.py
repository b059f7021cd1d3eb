"""The files of experiments/fedpsl on fake folders in the exact layouts of the three data sets."""

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedatlas.data.datasets.chestxray14 import BATCHES, LISTS

FOLDER = Path(__file__).parents[2] / "experiments" / "fedpsl"
FINDINGS = ("Infiltration", "Effusion", "Atelectasis", "Nodule", "Consolidation", "Pneumothorax")


# ------------------------------------------------------------------------------------------------- fake folders


def texture(path: Path, size: int, rng: np.random.Generator) -> None:
    """An 8-bit grey PNG of random texture."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(rng.integers(0, 256, (size, size), dtype=np.uint8)).save(path)


def write_chestxray14(root: Path, *, per_batch: int = 16, size: int = 40) -> Path:
    """Data_Entry_2017_v2020.csv, the official lists, and images_001/images to images_012/images.

    A batch that begins in the middle of a patient does so here, with one image; the patient's first image ends the
    batch before it. All other patients have two images. Every class is present in half of the patients.
    """
    rng = np.random.default_rng(14)
    rows: list[list[object]] = []
    lists: dict[str, list[str]] = {file: [] for file in LISTS}
    ends: dict[int, str] = {}
    for batch, first in enumerate(BATCHES, 1):
        names = []
        patient, follow_up = int(first[:8]), int(first[9:12])
        if follow_up:
            names.append(first)
            ends[batch - 1] = f"{patient:08d}_000.png"
        for number in range(per_batch):
            names.append(f"{patient + 1 + number // 2:08d}_{number % 2:03d}.png")
        for name in names:
            rows.append([name, batch])
    rows += [[name, batch] for batch, name in ends.items()]
    entries = []
    for name, batch in sorted(rows):
        texture(root / f"images_{batch:03d}" / "images" / str(name), size, rng)
        patient = int(str(name)[:8])
        present = [f for place, f in enumerate(FINDINGS) if (patient >> (place % 3)) % 2 == place // 3]
        present += ["Cardiomegaly"] if patient % 5 == 0 else []
        found = "|".join(sorted(present)) or "No Finding"
        entries.append([name, found, int(str(name)[9:12]), patient, 57, "M", "PA", size, size, 0.143, 0.143])
        lists["test_list.txt" if patient % 4 == 0 else "train_val_list.txt"].append(str(name))
    header = "Image Index,Finding Labels,Follow-up #,Patient ID,Patient Age,Patient Gender,View Position"
    header += ",OriginalImage[Width,Height],OriginalImagePixelSpacing[x,y]"
    with (root / "Data_Entry_2017_v2020.csv").open("w", newline="") as file:
        file.write(header + "\n")
        csv.writer(file).writerows(entries)
    for list_, names in lists.items():
        (root / list_).write_text("\n".join(names) + "\n")
    return root


def write_folders(
    root: Path, classes: Sequence[tuple[str, str, int]], *, size: int, inner: str | None = None
) -> Path:
    """A folder per class, with images `stem-1.png` … and a metadata table beside it. classes: (folder, stem, images);
    inner: the folder inside that holds the images, beside `masks`."""
    rng = np.random.default_rng(len(classes))
    for folder, stem, count in classes:
        for number in range(1, count + 1):
            texture(root / folder / (inner or ".") / f"{stem}-{number}.png", size, rng)
            if inner:
                texture(root / folder / "masks" / f"{stem}-{number}.png", size, rng)
        (root / f"{folder}.metadata.xlsx").write_bytes(b"PK")
    return root


def write_tuberculosis(root: Path) -> Path:
    """TB_Chest_Radiography_Database/Tuberculosis and Normal."""
    classes = [("Tuberculosis", "Tuberculosis", 16), ("Normal", "Normal", 24)]
    write_folders(root / "TB_Chest_Radiography_Database", classes, size=40)
    return root


def write_covid(root: Path) -> Path:
    """COVID-19_Radiography_Dataset/COVID/images and masks, and so on."""
    classes = [
        ("COVID", "COVID", 16),
        ("Normal", "Normal", 24),
        ("Lung_Opacity", "Lung_Opacity", 3),
        ("Viral Pneumonia", "Viral Pneumonia", 3),
    ]
    write_folders(root / "COVID-19_Radiography_Dataset", classes, size=40, inner="images")
    return root


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The three data sets under the names that the federation files give them."""
    root = tmp_path_factory.mktemp("fedpsl")
    write_chestxray14(root / "chestxray14")
    write_tuberculosis(root / "tuberculosis")
    write_covid(root / "covid")
    return root
