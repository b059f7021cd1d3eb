"""Small folders in the exact layouts of KiTS19, LiTS, AMOS22, BTCV, WORD, AbdomenCT-1K and the Medical Segmentation
Decathlon, with a rough abdomen."""

import json
from collections.abc import Mapping
from pathlib import Path

import nibabel as nib
import numpy as np

SHAPE = (28, 28, 20)
SPACING = (4.0, 4.0, 5.0)
ORGANS: Mapping[str, tuple[tuple[float, float, float], float, float]] = {
    "liver": ((0.30, 0.55, 0.60), 0.20, 110.0),
    "spleen": ((0.76, 0.45, 0.65), 0.12, 130.0),
    "pancreas": ((0.55, 0.62, 0.45), 0.10, 90.0),
    "right kidney": ((0.32, 0.30, 0.25), 0.10, 160.0),
    "left kidney": ((0.68, 0.28, 0.25), 0.10, 160.0),
    "stomach": ((0.62, 0.75, 0.75), 0.11, 30.0),
    "gallbladder": ((0.42, 0.78, 0.42), 0.08, 5.0),
}
"""name -> (centre, radius, HU) in parts of the scan, axes R, A, S from the patient's left, back and feet."""
AMOS_TABLE = {
    "0": "background",
    "1": "spleen",
    "2": "right kidney",
    "3": "left kidney",
    "4": "gall bladder",
    "5": "esophagus",
    "6": "liver",
    "7": "stomach",
    "8": "arota",
    "9": "postcava",
    "10": "pancreas",
    "11": "right adrenal gland",
    "12": "left adrenal gland",
    "13": "duodenum",
    "14": "bladder",
    "15": "prostate/uterus",
}
BTCV_NAMES = (
    "spleen",
    "right kidney",
    "left kidney",
    "gallbladder",
    "esophagus",
    "liver",
    "stomach",
    "aorta",
    "inferior vena cava",
    "portal and splenic veins",
    "pancreas",
    "right adrenal gland",
    "left adrenal gland",
)
"""Of the integers from 1 on."""
WORD_NAMES = (
    "liver",
    "spleen",
    "left kidney",
    "right kidney",
    "stomach",
    "gallbladder",
    "esophagus",
    "pancreas",
    "duodenum",
    "colon",
    "intestine",
    "adrenal",
    "rectum",
    "bladder",
    "left head of femur",
    "right head of femur",
)
ABDOMENCT1K_NAMES = ("liver", "kidney", "spleen", "pancreas")
MSD_TASKS: Mapping[str, tuple[str, dict[str, str], str]] = {
    "Task03_Liver": ("liver", {"0": "background", "1": "liver", "2": "cancer"}, "liver"),
    "Task07_Pancreas": ("pancreas", {"0": "background", "1": "pancreas", "2": "cancer"}, "pancreas"),
    "Task09_Spleen": ("spleen", {"0": "background", "1": "spleen"}, "spleen"),
}
"""task -> the stem of its files, its label table, its organ."""


def abdomen(
    rng: np.random.Generator, numbers: Mapping[str, int], lesion: tuple[str, int] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """A scan [X, Y, Z] in HU and its labels. numbers: organ -> its integer; lesion: (organ it lies in, its integer)."""
    grid = np.stack(np.meshgrid(*((np.arange(n) + 0.5) / n for n in SHAPE), indexing="ij"), -1)
    body = (((grid - 0.5) / (0.48, 0.46, 0.9)) ** 2).sum(-1) < 1
    scan = np.where(body, 20.0, -1000.0)
    labels = np.zeros(SHAPE, np.uint8)
    for name, (centre, radius, intensity) in ORGANS.items():
        middle = np.asarray(centre) + rng.uniform(-0.03, 0.03, 3)
        inside = ((grid - middle) ** 2).sum(-1) < (radius * rng.uniform(0.9, 1.1)) ** 2
        scan[inside] = intensity
        labels[inside] = numbers.get(name, 0)
        if lesion and lesion[0] == name:
            small = ((grid - middle) ** 2).sum(-1) < (0.45 * radius) ** 2
            scan[small] = intensity - 60
            labels[small] = lesion[1]
    return scan + rng.normal(0, 10, SHAPE), labels


def save(path: Path, voxels: np.ndarray, affine: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    nib.save(nib.Nifti1Image(voxels, affine), path)  # type: ignore[attr-defined]


def write_kits19(root: Path, cases: int = 6, unlabelled: int = 1, seed: int = 0) -> Path:
    """data/case_00000 … with slices along the first axis, and from case_00210 on without labels."""
    x, y, z = SPACING
    affine = np.array([[0, 0, -x, 0], [0, -y, 0, 0], [-z, 0, 0, 0], [0, 0, 0, 1]], dtype=float)
    for number in [*range(cases), *range(210, 210 + unlabelled)]:
        rng = np.random.default_rng([seed, 19, number])
        scan, labels = abdomen(rng, {"right kidney": 1, "left kidney": 1}, ("left kidney", 2))
        folder = root / "data" / f"case_{number:05d}"
        # R, A, S run against the axes of these files, and the slices come first
        turned = [v[::-1, ::-1, ::-1].transpose(2, 1, 0) for v in (scan, labels)]
        save(folder / "imaging.nii.gz", turned[0].astype(np.int16), affine)
        if number < 210:
            save(folder / "segmentation.nii.gz", turned[1], affine)
    (root / "data" / "kits.json").write_text("[]")
    (root / "LICENSE").write_text("")
    return root


def write_amos22(
    root: Path, train: tuple[int, int] = (3, 1), validation: tuple[int, int] = (2, 1), test: int = 1
) -> Path:
    """dataset.json with its three lists; train, validation: how many CT and MR scans of each."""
    affine = np.diag([-SPACING[0], -SPACING[1], SPACING[2], 1.0])
    table = {name.replace("gall bladder", "gallbladder"): int(number) for number, name in AMOS_TABLE.items()}
    lists: dict[str, list[dict[str, str]]] = {"training": [], "validation": [], "test": []}
    ct, mr = iter(range(1, 500)), iter(range(507, 600))
    wanted = (("training", "Tr", train), ("validation", "Va", validation), ("test", "Ts", (test, 0)))
    for key, ending, counts in wanted:
        for number in [*(next(ct) for _ in range(counts[0])), *(next(mr) for _ in range(counts[1]))]:
            scan, labels = abdomen(np.random.default_rng([22, number]), table)
            name = f"amos_{number:04d}.nii.gz"
            entry = {"image": f"./images{ending}/{name}"}
            save(root / entry["image"], scan[::-1, ::-1].astype(np.float32), affine)
            if ending != "Ts":
                entry["label"] = f"./labels{ending}/{name}"
                save(root / entry["label"], labels[::-1, ::-1].copy(), affine)
            lists[key].append(entry)
    content = {
        "name": "AMOS",
        "tensorImageSize": "3D",
        "modality": {"0": "CT"},
        "labels": AMOS_TABLE,
        "numTraining": len(lists["training"]),
        "numValidation": len(lists["validation"]),
        "numTest": len(lists["test"]),
        **lists,
    }
    (root / "dataset.json").write_text(json.dumps(content))
    return root


def write_msd(root: Path, task: str, cases: int = 6, test: int = 1) -> Path:
    """One task of the Decathlon, as it is unpacked on a Mac; the folder of the task."""
    stem, table, organ = MSD_TASKS[task]
    folder = root / task
    affine = np.diag([*SPACING, 1.0])
    numbers = {name: int(number) for number, name in table.items()}
    lesion = (organ, 2) if "cancer" in numbers else None
    training, tests = [], []
    for number in range(1, cases + test + 1):
        rng = np.random.default_rng([sum(map(ord, task)), number])
        scan, labels = abdomen(rng, {organ: 1}, lesion)
        name = f"{stem}_{number}.nii.gz"
        split = "Tr" if number <= cases else "Ts"
        save(folder / f"images{split}" / name, scan.astype(np.float32), affine)
        (folder / f"images{split}" / f"._{name}").write_bytes(b"\0\5\x16\7")
        if split == "Ts":
            tests.append(f"./imagesTs/{name}")
            continue
        save(folder / "labelsTr" / name, labels, affine)
        (folder / "labelsTr" / f"._{name}").write_bytes(b"\0\5\x16\7")
        training.append({"image": f"./imagesTr/{name}", "label": f"./labelsTr/{name}"})
    content = {
        "name": task.partition("_")[2],
        "description": "",
        "licence": "CC-BY-SA 4.0",
        "release": "1.0",
        "tensorImageSize": "3D",
        "modality": {"0": "CT"},
        "labels": table,
        "numTraining": cases,
        "numTest": test,
        "training": training,
        "test": tests,
    }
    (folder / "dataset.json").write_text(json.dumps(content))
    return folder


def write_lits(root: Path, cases: int = 6, test: int = 1, ending: str = ".nii") -> Path:
    """Training Batch 1 and 2, each with its volumes and segmentations, the test volumes beside them."""
    affine = np.diag([-SPACING[0], -SPACING[1], SPACING[2], 1.0])
    for number in range(cases):
        scan, labels = abdomen(np.random.default_rng([17, number]), {"liver": 1}, ("liver", 2))
        folder = root / f"Training Batch {1 if number < cases // 3 else 2}"
        save(folder / f"volume-{number}{ending}", scan[::-1, ::-1].astype(np.int16), affine)
        save(folder / f"segmentation-{number}{ending}", labels[::-1, ::-1].copy(), affine)
    for number in range(test):
        scan, _ = abdomen(np.random.default_rng([17, 1000 + number]), {})
        save(root / "Test Data" / f"test-volume-{number}{ending}", scan[::-1, ::-1].astype(np.int16), affine)
    return root


def write_btcv(root: Path, cases: int = 3, test: int = 1) -> Path:
    """RawData/Training/img and label from number 1 on, RawData/Testing/img from 61 on."""
    affine = np.diag([-SPACING[0], SPACING[1], SPACING[2], 1.0])
    table = {name: number for number, name in enumerate(BTCV_NAMES, 1)}
    for number in [*range(1, cases + 1), *range(61, 61 + test)]:
        scan, labels = abdomen(np.random.default_rng([13, number]), table)
        folder = root / "RawData" / ("Training" if number < 61 else "Testing")
        save(folder / "img" / f"img{number:04d}.nii.gz", scan[::-1].astype(np.float32), affine)
        if number < 61:
            save(folder / "label" / f"label{number:04d}.nii.gz", labels[::-1].copy(), affine)
    return root


def write_word(root: Path, cases: tuple[int, int, int] = (3, 1, 1), test_labels: bool = False) -> Path:
    """imagesTr, labelsTr, the same with Val and Ts; cases: scans of each list, the first of which is a validation scan."""
    affine = np.diag([-SPACING[0], SPACING[1], SPACING[2], 1.0])
    table = {name: number for number, name in enumerate(WORD_NAMES, 1)}
    numbers = iter(range(1, 151))
    for ending, count in (("Val", cases[1]), ("Tr", cases[0]), ("Ts", cases[2])):
        for number in (next(numbers) for _ in range(count)):
            scan, labels = abdomen(np.random.default_rng([16, number]), table)
            save(root / f"images{ending}" / f"word_{number:04d}.nii.gz", scan[::-1].astype(np.int16), affine)
            if ending != "Ts" or test_labels:
                save(root / f"labels{ending}" / f"word_{number:04d}.nii.gz", labels[::-1].copy(), affine)
    return root


def write_abdomenct1k(root: Path, cases: int = 6, unlabelled: int = 1) -> Path:
    """AbdomenCT-1K-ImagePart1 to 3 and Mask; the scans from the second half on are larger files."""
    affine = np.diag([-SPACING[0], -SPACING[1], SPACING[2], 1.0])
    numbers = {"liver": 1, "right kidney": 2, "left kidney": 2, "spleen": 3, "pancreas": 4}
    for number in range(1, cases + unlabelled + 1):
        scan, labels = abdomen(np.random.default_rng([1000, number]), numbers)
        form = np.int16 if number <= cases // 2 else np.float64
        part = root / f"AbdomenCT-1K-ImagePart{1 + (number - 1) % 3}"
        save(part / f"Case_{number:05d}_0000.nii.gz", scan[::-1, ::-1].astype(form), affine)
        if number <= cases:
            save(root / "Mask" / f"Case_{number:05d}.nii.gz", labels[::-1, ::-1].copy(), affine)
    return root
