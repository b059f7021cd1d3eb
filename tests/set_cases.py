"""A tiny folder of every registered data set, and what can go wrong in it, as the contract of data sets runs them.

A new data set adds a `Fake` to `FAKES`: a writer of a small valid folder, and what its layout calls things.
"""

import csv
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import nibabel as nib
import numpy as np
import pydicom
from dicom_series import uid, write_series
from fake_sets import (
    anatomy,
    picture,
    write_jsrt,
    write_masks,
    write_montgomery,
    write_shenzhen,
    write_siim,
)
from fake_volumes import (
    write_abdomenct1k,
    write_amos22,
    write_btcv,
    write_kits19,
    write_lits,
    write_msd,
    write_word,
)

from fedatlas.core.labels import LabelSpace
from fedatlas.data.formats import dicom, drawings

State = Literal["present", "absent", "open"]
STATES: frozenset[State] = frozenset(("present", "absent", "open"))


@dataclass(frozen=True)
class Said:
    """What FedAtlas says of a folder that was changed: a word of it, as the name of the file."""

    word: str


@dataclass(frozen=True)
class Rule:
    """What FedAtlas does without a word. sentence: the rule; drops: what no case's name holds then; open: a case and a
    class that is not annotated in it then."""

    sentence: str
    drops: str = ""
    open: tuple[str, str] | None = None


Outcome = Said | Rule
Change = Callable[[Path], Outcome]


@dataclass(frozen=True)
class Fake:
    """A data set in small.

    write: makes a valid folder, with three cases or more, in an empty one; returns the site's folder. reading: the
    site's options. image, label, table: patterns that find its images, label files and tables; empty where it has none.
    examples: a state -> a case and a class in that state; never: a state that its layout cannot show -> why. changes: what can go wrong -> a function that makes
    the change and says what follows, in place of the one for all (`CHANGES`).
    """

    write: Callable[[Path], Path]
    examples: Mapping[State, tuple[str, str]]
    image: str
    label: str = ""
    table: str = ""
    reading: Mapping[str, Any] = field(default_factory=dict)
    never: Mapping[State, str] = field(default_factory=dict)
    changes: Mapping[str, Change] = field(default_factory=dict)

    def first(self, root: Path, pattern: str) -> Path:
        """The first file of a pattern."""
        return sorted(file for file in root.glob(pattern) if not file.name.startswith("."))[0]


# ------------------------------------------------------------------------------------------------- changes


def cut(file: Path) -> Said:
    """Leaves the first half of a file."""
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    return Said(file.name)


def removed(file: Path, word: str = "") -> Said:
    """Removes a file. word: what names it then; else the part of its name that image and label share."""
    file.unlink()
    name = file.parent.name if file.parent.name.startswith("case_") else file.name
    return Said(word or name.removesuffix(file.suffix).removesuffix(".nii").removesuffix("_0000"))


def odd(file: Path) -> Said:
    """Copies a file under a name with blanks, umlauts and signs."""
    endings = "".join(file.suffixes[-2:]) if file.name.endswith(".nii.gz") else file.suffix
    other = file.with_name(f"größe (1) #é%s{endings}")
    shutil.copy(file, other)
    return Said("größe (1) #é%s")


def unknown_integer(file: Path) -> Said:
    """Writes an integer into a label map that no table holds."""
    found = nib.load(file)  # type: ignore[attr-defined]
    voxels = np.asarray(found.dataobj).copy()  # type: ignore[attr-defined]
    voxels[0, 0, 0] = 99
    nib.save(nib.Nifti1Image(voxels, found.affine), file)  # type: ignore[attr-defined]
    return Said(file.name)


def other_ending(file: Path) -> Said:
    """The same case once more, in a file of another ending."""
    twin = file.with_name(file.name.removesuffix(".gz")) if file.name.endswith(".gz") else None
    if twin is not None:
        nib.save(nib.load(file), twin)  # type: ignore[attr-defined]
    else:
        twin = file.with_suffix(".jpg")
        shutil.copy(file, twin)
    return Said(twin.name)


def elsewhere(file: Path, folder: str = "again") -> Said:
    """The same file once more, in a folder beside it."""
    twin = file.parent / folder / file.name
    twin.parent.mkdir()
    shutil.copy(file, twin)
    return Said(file.name)


def same_content(file: Path, other: Path) -> Said:
    """Another case with the same content."""
    shutil.copy(file, other)
    return Said(other.name)


def changes_of(fake: Fake) -> dict[str, Change]:
    """What can go wrong in a data set's folder."""
    found: dict[str, Change] = {
        "an image is cut off": lambda root: cut(fake.first(root, fake.image)),
        "an image has an odd name": lambda root: odd(fake.first(root, fake.image)),
        "an image is missing": lambda root: removed(fake.first(root, fake.image)),
    }
    if fake.label:
        found["a label is cut off"] = lambda root: cut(fake.first(root, fake.label))
        found["a label is missing"] = lambda root: removed(fake.first(root, fake.label))
    if fake.label and "a value is unknown" not in fake.changes:
        found["a value is unknown"] = lambda root: unknown_integer(fake.first(root, fake.label))
    if fake.table:
        found["a table is cut off"] = lambda root: cut(fake.first(root, fake.table))
        found["a table is missing"] = lambda root: removed_table(fake.first(root, fake.table))
        found["a table is empty"] = lambda root: emptied(fake.first(root, fake.table))
    missing = REQUIRED - found.keys() - fake.changes.keys()
    assert not missing, f"its Fake must say in `changes` what follows if {' and if '.join(sorted(missing))}"
    return found | dict(fake.changes)


REQUIRED = {
    "an image is cut off",
    "an image has an odd name",
    "an image is missing",
    "a label is missing",
    "a value is unknown",
    "a case is there twice",
}


def removed_table(file: Path) -> Said:
    file.unlink()
    return Said(file.parent.name)


def emptied(file: Path) -> Said:
    file.write_bytes(b"")
    return Said(file.name)


# -------------------------------------------------------------------------------------------------- writers


def small(path: Path, number: int) -> Path:
    """A picture of 16 x 16 pixels."""
    return picture(path, anatomy(number, (16, 16))[0])


def cleared(root: Path, pattern: str) -> Path:
    """Takes the highest integer, or a mask's, out of the last file of a pattern: its class is verified absent."""
    file = sorted(file for file in root.glob(pattern) if not file.name.startswith("."))[-1]
    if file.name.endswith((".nii", ".nii.gz")):
        found = nib.load(file)  # type: ignore[attr-defined]
        voxels = np.asarray(found.dataobj).copy()  # type: ignore[attr-defined]
        voxels[voxels == voxels.max()] = 0
        nib.save(nib.Nifti1Image(voxels, found.affine), file)  # type: ignore[attr-defined]
    else:
        picture(file, np.zeros((16, 16), bool))
    return root


def one_more(root: Path) -> Path:
    """A picture of which one lung was drawn."""
    image, masks = anatomy(3, (16, 16))
    picture(root / "images" / "cxr_003.png", image)
    picture(root / "masks" / "right_lung" / "cxr_003.png", masks["right lung"])
    return root


def scan(root: Path, image: str, label: str | None, number: int) -> None:
    """A scan of 8 x 8 x 8 voxels with liver 1 and spleen 2; the first one has no spleen."""
    rng = np.random.default_rng(number)
    labels = np.zeros((8, 8, 8), np.uint8)
    labels[1:4, 1:4, 1:4] = 1
    labels[5:7, 5:7, 5:7] = 2 if number else 0
    voxels = (rng.normal(0, 10, labels.shape) + 50 * labels).astype(np.float32)
    for name, values in ((image, voxels), (label, labels)):
        if name is not None:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            nib.save(nib.Nifti1Image(values, np.diag([4.0, 4.0, 4.0, 1.0])), root / name)  # type: ignore[attr-defined]


def write_nnunet(root: Path) -> Path:
    for number in range(4):
        tr = number < 3
        image, label = (
            f"images{'Tr' if tr else 'Ts'}/scan_{number:02d}_0000.nii.gz",
            f"labelsTr/scan_{number:02d}.nii.gz",
        )
        scan(root, image, label if tr else None, number)
    content = {
        "channel_names": {"0": "CT"},
        "labels": {"background": 0, "liver": 1, "spleen": 2},
        "file_ending": ".nii.gz",
    }
    (root / "dataset.json").write_text(json.dumps(content))
    return root


def write_monai(root: Path) -> Path:
    entries = []
    for number in range(4):
        image, label = f"scans/scan_{number:02d}.nii.gz", f"labels/scan_{number:02d}.nii.gz"
        scan(root, image, label if number < 3 else None, number)
        entries.append({"image": image, "label": label} if number < 3 else {"image": image})
    content = {
        "labels": {"background": 0, "liver": 1, "spleen": 2},
        "training": entries[:3],
        "test": entries[3:],
    }
    (root / "dataset.json").write_text(json.dumps(content))
    return root


def write_csv(root: Path) -> Path:
    rows = [("file", "Effusion", "Nodule"), ("a/00.png", 1, 0), ("a/01.png", 0, ""), ("b/02.png", "", 1)]
    rewrite(root / "labels.csv", rows)
    for number, row in enumerate(rows[1:]):
        small(root / str(row[0]), number)
    return root


def write_chestxray14(root: Path) -> Path:
    found = {"00000001_000.png": "Mass|Nodule", "00000002_000.png": "No Finding", "00000003_000.png": ""}
    rows = [("Image Index", "Finding Labels", "Follow-up #", "Patient ID")]
    rows += [(name, text, "0", str(int(name[:8]))) for name, text in found.items()]
    rewrite(root / "Data_Entry_2017.csv", rows)
    for number, name in enumerate(found):
        small(root / "images" / name, number)
    (root / "train_val_list.txt").write_text("00000001_000.png\n00000002_000.png\n")
    (root / "test_list.txt").write_text("00000003_000.png\n")
    return root


def write_folders(folders: Mapping[str, str]) -> Callable[[Path], Path]:
    """Folders of pictures: folder -> the beginning of the names in it."""

    def write(root: Path) -> Path:
        for place, (folder, name) in enumerate(folders.items()):
            for number in range(2):
                small(root / folder / f"{name}-{number + 1}.png", 10 * place + number)
        return root

    return write


def rewrite(path: Path, rows: list[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)


def rows_of(path: Path) -> list[list[str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.reader(file))


def row_changed(table: str, change: Callable[[list[list[str]]], str]) -> Change:
    """Changes the rows of a table, the header first; the function returns a word of what follows."""

    def apply(root: Path) -> Said:
        rows = rows_of(root / table)
        word = change(rows)
        rewrite(root / table, rows)
        return Said(word)

    return apply


def row_twice(rows: list[list[str]]) -> str:
    rows.append(rows[1])
    return Path(rows[1][0]).stem


def row_gone(rows: list[list[str]]) -> str:
    return Path(rows.pop()[0]).name


def cell(column: int, value: str, word: str = "") -> Callable[[list[list[str]]], str]:
    def change(rows: list[list[str]]) -> str:
        rows[1][column] = value
        return word or value.split("|")[0]

    return change


def entry_twice(root: Path) -> Said:
    """An entry of the list "training" once more."""
    path = root / "dataset.json"
    content = json.loads(path.read_text())
    content["training"].append(content["training"][0])
    path.write_text(json.dumps(content))
    return Said(Path(content["training"][0]["image"]).name)


def folder_gone(folder: str) -> Change:
    def apply(root: Path) -> Said:
        shutil.rmtree(root / folder)
        return Said(folder)

    return apply


def passed_over(pattern: str, sentence: str = "files of other names are passed over") -> Change:
    """An image of an odd name, which the layout does not take for its own."""
    return lambda root: Rule(sentence, drops=odd(sorted(root.glob(pattern))[0]).word)


def left_open(file: str, sentence: str, case: str, name: str) -> Change:
    """A label file is missing, and its class is not annotated in the case."""

    def apply(root: Path) -> Rule:
        (root / file).unlink()
        return Rule(sentence, open=(case, name))

    return apply


def fewer(file: str) -> Change:
    """An image is missing, and nothing lists it."""

    def apply(root: Path) -> Rule:
        (root / file).unlink()
        return Rule("no table lists the images, so that one fewer is not noticed", drops=Path(file).stem)

    return apply


def other_folder(root: Path) -> Rule:
    small(root / "Pleurisy" / "Pleurisy-1.png", 99)
    return Rule("folders of other names are not read", drops="Pleurisy")


def grey_mask(pattern: str) -> Change:
    """A mask with three values."""

    def apply(root: Path) -> Said:
        file = sorted(root.glob(pattern))[0]
        values = np.zeros((16, 16), np.uint8)
        values[:4], values[8:] = 1, 77
        picture(file, values)
        return Said(file.name)

    return apply


def of_a_list(images: str) -> dict[str, Change]:
    """The changes of a layout that lists its files."""
    passed = passed_over(images, "files that no list names are passed over")
    return {"an image has an odd name": passed, "a case is there twice": entry_twice}


EVERY_MASK = "every picture of the release has all masks; one without is a problem"
TABLE_SAYS_ALL = "its readers looked for every finding in every image"


def write_dicom(root: Path) -> Path:
    """Three series: of the first both classes are drawn, of the second no spleen is there, of the third none is drawn."""
    for number in range(3):
        voxels, affine = anatomy_of_series(number)
        folder = root / f"scan {number}"
        write_series(folder, voxels, affine, f"p{number}/ct", patient=f"MRN{number}")
        volume = dicom.load(dicom.find([folder]).series[0])
        labels = np.zeros(voxels.shape, np.uint8)
        labels[1:4, 1:4, 1:4], labels[5:7, 5:7, 4:6] = 1, 0 if number == 1 else 2
        space = LabelSpace(("background", "liver", *(("spleen",) if number < 2 else ())))
        labels[labels >= len(space)] = 0
        codes, _ = drawings.meanings(space, {})
        drawings.write_seg(folder / "seg.dcm", labels, volume, space, codes, "tests")
    return root


def anatomy_of_series(number: int) -> tuple[np.ndarray, np.ndarray]:
    voxels = np.random.default_rng(number).integers(-100, 200, (8, 8, 6))
    return voxels, np.diag([-4.0, -4.0, 4.0, 1.0])


def case_of(number: int) -> str:
    return dicom.pseudonym(uid(f"p{number}/ct"))


def seg_again(root: Path) -> Said:
    """Another object that draws the same."""
    data = pydicom.dcmread(root / "scan 0/seg.dcm")
    data.SOPInstanceUID = data.file_meta.MediaStorageSOPInstanceUID = uid("again")
    data.save_as(root / "scan 0/seg again.dcm")
    return Said("'liver' is drawn by seg-")


def slice_gone(root: Path) -> Said:
    sorted((root / "scan 0").glob("Planted*"))[2].unlink()
    return Said("slices are missing")


def seg_gone(root: Path) -> Said:
    (root / "scan 0/seg.dcm").unlink()
    return Said(
        "1 series have no segmentation and were left out; export their SEG or RTSTRUCT, too, or set `reading.unlabelled: true`"
    )


def segment_renamed(root: Path) -> Rule:
    data = pydicom.dcmread(root / "scan 0/seg.dcm")
    data.SegmentSequence[0].SegmentLabel = "gut"
    data.save_as(root / "scan 0/seg.dcm")
    return Rule("segments have names, and every name is a class", open=(case_of(0), "liver"))


def slice_odd(root: Path) -> Rule:
    odd(sorted((root / "scan 0").glob("Planted*"))[2])
    return Rule("an object that is there twice, under whatever names, counts once")


FAKES: Mapping[str, Fake] = {
    "dicom": Fake(
        write_dicom,
        examples={
            "present": (case_of(0), "spleen"),
            "absent": (case_of(1), "spleen"),
            "open": (case_of(2), "spleen"),
        },
        image="scan 0/Planted*",
        label="scan 0/seg.dcm",
        reading={"paths": True},
        changes={
            "an image is missing": slice_gone,
            "a label is missing": seg_gone,
            "an image has an odd name": slice_odd,
            "a case is there twice": seg_again,
            "a value is unknown": segment_renamed,
        },
    ),
    "nnunet": Fake(
        write_nnunet,
        examples={
            "present": ("scan_01", "spleen"),
            "absent": ("scan_00", "spleen"),
            "open": ("scan_03", "liver"),
        },
        image="imagesTr/*",
        label="labelsTr/*",
        table="dataset.json",
        changes={
            "a case is there twice": lambda root: same_content(
                root / "imagesTr/scan_00_0000.nii.gz", root / "imagesTr/scan_01_0000.nii.gz"
            )
        },
    ),
    "monai": Fake(
        write_monai,
        examples={
            "present": ("scan_01", "spleen"),
            "absent": ("scan_00", "spleen"),
            "open": ("scan_03", "liver"),
        },
        image="scans/*",
        label="labels/*",
        table="dataset.json",
        changes=of_a_list("scans/*"),
    ),
    "msd": Fake(
        lambda root: cleared(write_msd(root, "Task03_Liver", 3), "labelsTr/*.nii.gz"),
        examples={
            "present": ("liver_1", "cancer"),
            "absent": ("liver_3", "cancer"),
            "open": ("liver_4", "liver"),
        },
        image="imagesTr/*.nii.gz",
        label="labelsTr/*.nii.gz",
        table="dataset.json",
        changes=of_a_list("imagesTr/*.nii.gz"),
    ),
    "amos22": Fake(
        lambda root: cleared(write_amos22(root, (3, 0), (1, 0)), "labelsTr/*.nii.gz"),
        examples={
            "present": ("amos_0001", "liver"),
            "absent": ("amos_0001", "duodenum"),
            "open": ("amos_0005", "liver"),
        },
        image="imagesTr/*",
        label="labelsTr/*",
        table="dataset.json",
        changes=of_a_list("imagesTr/*"),
    ),
    "kits19": Fake(
        lambda root: cleared(write_kits19(root, 3), "data/case_*/segmentation.nii.gz"),
        examples={
            "present": ("case_00000", "kidney tumour"),
            "absent": ("case_00002", "kidney tumour"),
            "open": ("case_00210", "kidney"),
        },
        image="data/case_*/imaging.nii.gz",
        label="data/case_*/segmentation.nii.gz",
        changes={
            "an image has an odd name": passed_over("data/case_*/imaging.nii.gz"),
            "a case is there twice": lambda root: same_content(
                root / "data/case_00000/imaging.nii.gz", root / "data/case_00001/imaging.nii.gz"
            ),
        },
    ),
    "lits": Fake(
        lambda root: cleared(write_lits(root, 3), "*/segmentation-*"),
        examples={
            "present": ("volume-0", "liver tumour"),
            "absent": ("volume-2", "liver tumour"),
            "open": ("test-volume-0", "liver"),
        },
        image="*/volume-*",
        label="*/segmentation-*",
        changes={
            "a label is missing": lambda root: removed(
                root / "Training Batch 1/segmentation-0.nii", "volume-0.nii"
            ),
            "an image is missing": lambda root: removed(
                root / "Training Batch 1/volume-0.nii", "segmentation-0.nii"
            ),
            "an image has an odd name": passed_over("*/volume-*"),
            "a case is there twice": lambda root: same_content(
                root / "Training Batch 1/volume-0.nii", root / "Training Batch 2/volume-0.nii"
            ),
        },
    ),
    "btcv": Fake(
        lambda root: cleared(write_btcv(root), "RawData/Training/label/*"),
        examples={
            "present": ("img0001", "liver"),
            "absent": ("img0001", "aorta"),
            "open": ("img0061", "liver"),
        },
        image="RawData/Training/img/*",
        label="RawData/Training/label/*",
        changes={
            "a label is missing": lambda root: removed(
                root / "RawData/Training/label/label0001.nii.gz", "img0001.nii.gz"
            ),
            "an image is missing": lambda root: removed(
                root / "RawData/Training/img/img0001.nii.gz", "label0001.nii.gz"
            ),
            "an image has an odd name": passed_over("RawData/Training/img/*"),
            "a case is there twice": lambda root: other_ending(root / "RawData/Training/img/img0001.nii.gz"),
        },
    ),
    "word": Fake(
        lambda root: cleared(write_word(root), "labelsTr/*"),
        examples={
            "present": ("word_0002", "liver"),
            "absent": ("word_0002", "colon"),
            "open": ("word_0005", "liver"),
        },
        image="imagesTr/*",
        label="labelsTr/*",
        changes={
            "an image has an odd name": passed_over("imagesTr/*"),
            "a case is there twice": lambda root: other_ending(root / "imagesTr/word_0002.nii.gz"),
        },
    ),
    "abdomenct1k": Fake(
        lambda root: cleared(write_abdomenct1k(root, 3), "Mask/*"),
        examples={
            "present": ("Case_00001", "pancreas"),
            "absent": ("Case_00003", "pancreas"),
            "open": ("Case_00004", "liver"),
        },
        image="AbdomenCT*/*",
        label="Mask/*",
        changes={
            "a label is missing": left_open(
                "Mask/Case_00001.nii.gz",
                "a scan without a label map is an unlabelled test case",
                "Case_00001",
                "liver",
            ),
            "an image has an odd name": passed_over("AbdomenCT*/*"),
            "a case is there twice": lambda root: other_ending(root / "Mask/Case_00001.nii.gz"),
        },
    ),
    "masks": Fake(
        lambda root: one_more(cleared(write_masks(root, 3, shape=(16, 16)), "masks/left_lung/*")),
        examples={
            "present": ("cxr_000", "left_lung"),
            "absent": ("cxr_002", "left_lung"),
            "open": ("cxr_003", "left_lung"),
        },
        image="images/*",
        label="masks/left_lung/*",
        changes={
            "a label is missing": left_open(
                "masks/left_lung/cxr_000.png",
                "a class without a mask is not annotated",
                "cxr_000",
                "left_lung",
            ),
            "a case is there twice": lambda root: other_ending(root / "images/cxr_000.png"),
            "a value is unknown": grey_mask("masks/left_lung/*"),
        },
    ),
    "montgomery": Fake(
        lambda root: cleared(write_montgomery(root, 3, (16, 16)), "MontgomerySet/ManualMask/leftMask/*"),
        examples={"present": ("MCUCXR_0001_0", "left lung"), "absent": ("MCUCXR_0003_0", "left lung")},
        image="MontgomerySet/CXR_png/*",
        label="MontgomerySet/ManualMask/leftMask/*",
        never={"open": EVERY_MASK},
        changes={
            "a case is there twice": lambda root: other_ending(
                root / "MontgomerySet/CXR_png/MCUCXR_0001_0.png"
            ),
            "a value is unknown": grey_mask("MontgomerySet/ManualMask/leftMask/*"),
        },
    ),
    "shenzhen": Fake(
        lambda root: cleared(write_shenzhen(root, 4, (16, 16)), "leftMask/*"),
        examples={
            "present": ("CHNCXR_0001_0", "left lung"),
            "absent": ("CHNCXR_0003_0", "left lung"),
            "open": ("CHNCXR_0004_1", "left lung"),
        },
        image="CXR_png/*",
        label="leftMask/*",
        reading={"unmasked": True},
        changes={
            "a label is missing": left_open(
                "leftMask/CHNCXR_0001_0.png",
                "a lung without a mask is not annotated",
                "CHNCXR_0001_0",
                "left lung",
            ),
            "a case is there twice": lambda root: other_ending(root / "CXR_png/CHNCXR_0001_0.png"),
            "a value is unknown": grey_mask("leftMask/*"),
        },
    ),
    "jsrt": Fake(
        lambda root: cleared(write_jsrt(root, 3, 32), "scratch/fold1/masks/heart/*"),
        examples={"present": ("JPCLN001", "heart"), "absent": ("JPCLN002", "heart")},
        image="All247images/*",
        label="scratch/fold1/masks/heart/*",
        reading={"side": 32},
        never={"open": EVERY_MASK},
        changes={
            "an image has an odd name": passed_over("All247images/*"),
            "a case is there twice": lambda root: elsewhere(root / "All247images/JPCLN001.IMG"),
            "a value is unknown": grey_mask("scratch/fold1/masks/heart/*"),
        },
    ),
    "siim": Fake(
        lambda root: write_siim(root, 4, 16, dicom=False),
        examples={
            "present": ("1.2.276.0.7230010.3.1.4.8323329.1000.1517875000.100000", "pneumothorax"),
            "absent": ("1.2.276.0.7230010.3.1.4.8323329.1001.1517875000.100001", "pneumothorax"),
        },
        image="png/*",
        table="stage_2_train.csv",
        reading={"side": 16},
        never={"open": EVERY_MASK},
        changes={
            "a label is missing": row_changed("stage_2_train.csv", row_gone),
            "a case is there twice": lambda root: elsewhere(sorted(root.glob("png/*"))[0]),
            "a value is unknown": row_changed(
                "stage_2_train.csv", cell(1, "left half", "stage_2_train.csv, line 2")
            ),
        },
    ),
    "csv": Fake(
        write_csv,
        examples={
            "present": ("a/00", "Effusion"),
            "absent": ("a/01", "Effusion"),
            "open": ("a/01", "Nodule"),
        },
        image="a/*",
        table="labels.csv",
        changes={
            "a label is missing": row_changed("labels.csv", row_gone),
            "a case is there twice": row_changed("labels.csv", row_twice),
            "a value is unknown": row_changed("labels.csv", cell(1, "7")),
        },
    ),
    "chestxray14": Fake(
        write_chestxray14,
        examples={
            "present": ("00000001_000", "Mass"),
            "absent": ("00000002_000", "Mass"),
            "open": ("00000003_000", "Mass"),
        },
        image="images/*",
        table="Data_Entry_2017.csv",
        changes={
            "a label is missing": row_changed("Data_Entry_2017.csv", row_gone),
            "a case is there twice": row_changed("Data_Entry_2017.csv", row_twice),
            "a value is unknown": row_changed("Data_Entry_2017.csv", cell(1, "Unheard|Mass")),
            "a list of the split is cut off": lambda root: cut(root / "train_val_list.txt"),
        },
    ),
    "tbx": Fake(
        write_folders({"Tuberculosis": "Tuberculosis", "Normal": "Normal"}),
        examples={
            "present": ("Tuberculosis/Tuberculosis-1", "Tuberculosis"),
            "absent": ("Normal/Normal-1", "Tuberculosis"),
        },
        image="Tuberculosis/*",
        never={"open": TABLE_SAYS_ALL},
        changes={
            "an image is missing": fewer("Tuberculosis/Tuberculosis-1.png"),
            "a label is missing": folder_gone("Normal"),
            "a value is unknown": other_folder,
            "a case is there twice": lambda root: other_ending(root / "Tuberculosis/Tuberculosis-1.png"),
        },
    ),
    "covid": Fake(
        write_folders(
            {
                "COVID": "COVID",
                "Normal": "Normal",
                "Lung_Opacity": "Lung_Opacity",
                "Viral Pneumonia": "Viral Pneumonia",
            }
        ),
        examples={"present": ("COVID/COVID-1", "COVID-19"), "absent": ("Normal/Normal-1", "COVID-19")},
        image="COVID/*",
        never={"open": TABLE_SAYS_ALL},
        changes={
            "an image is missing": fewer("COVID/COVID-1.png"),
            "a label is missing": folder_gone("Normal"),
            "a value is unknown": other_folder,
            "a case is there twice": lambda root: other_ending(root / "COVID/COVID-1.png"),
        },
    ),
}
