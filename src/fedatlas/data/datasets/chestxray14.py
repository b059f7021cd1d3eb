"""ChestX-ray14: 112,120 frontal chest X-rays of 30,805 patients of the NIH Clinical Center, with 14 findings.

Wang, Peng, Lu, Lu, Bagheri, Summers, "ChestX-ray8: Hospital-Scale Chest X-ray Database and Benchmarks on
Weakly-Supervised Classification and Localization of Common Thorax Diseases", CVPR 2017.
https://nihcc.app.box.com/v/ChestXray-NIHCC

Licence: no restrictions on use. The NIH Clinical Center asks to link to the address above, to cite the paper, and to be
named as the provider of the data. Nothing of it is part of this package.

Labels were mined from reports by text, with errors; "No Finding" and a finding that is not listed are read as verified
absent, as every publication on this set does.

Layout, as the data set is published and mirrored (from its listing and from memory of it, not from the paper):

* `Data_Entry_2017.csv` or `Data_Entry_2017_v2020.csv` with the columns Image Index, Finding Labels (joined by `|`),
  Follow-up #, Patient ID and others that are not used here;
* `train_val_list.txt` and `test_list.txt`, an image name per line: the official split, by patient;
* the images in twelve archives. Unpacked as they come they all lie in `images/`; mirrors keep `images_001/images/` to
  `images_012/images/`. Both are read.

The archives are the batches of FedPSL (Dong et al.: "batch 2 to batch 5, with default batch splits"). They cut through
patients: all archives but 1, 2 and 11 begin in the middle of one (patient 3923 lies in 2 and 3). Sites made of batches
would share these patients, so an image outside the batch of its patient's first image is left out, unless `straddling` is keep.
FedPSL does not say that it does so. Batch 1 holds 4,999 images, batch 12 holds 7,121, each other one 10,000.
"""

import bisect
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

from fedatlas.core.errors import DataError
from fedatlas.core.options import option, options
from fedatlas.data.datasets import DataSet
from fedatlas.data.datasets.shared.findings import (
    Row,
    empty,
    find_images,
    listing,
    read_table,
    split_patients,
)
from fedatlas.data.datasets.shared.listing import (
    Case,
    Layout,
    Listing,
    Problem,
    Split,
    image_case,
    shown,
    some,
)

SOURCE = "ChestX-ray14"
CLASSES = (
    "Atelectasis",
    "Cardiomegaly",
    "Effusion",
    "Infiltration",
    "Mass",
    "Nodule",
    "Pneumonia",
    "Pneumothorax",
    "Consolidation",
    "Edema",
    "Emphysema",
    "Fibrosis",
    "Pleural_Thickening",
    "Hernia",
)
NOTHING = "No Finding"
FILE, FINDINGS, PATIENT = "Image Index", "Finding Labels", "Patient ID"
LISTS: Mapping[str, Split] = {"train_val_list.txt": "train", "test_list.txt": "test"}

# The first image of each archive.
BATCHES = (
    "00000001_000.png",
    "00001336_000.png",
    "00003923_014.png",
    "00006585_007.png",
    "00009232_004.png",
    "00011558_008.png",
    "00013774_026.png",
    "00016051_010.png",
    "00018387_035.png",
    "00020945_050.png",
    "00024718_000.png",
    "00028173_003.png",
)
_NAME = re.compile(r"(\d{8})_\d{3}\.png")
_FOLDER = re.compile(r"images_0*(\d{1,2})")


@options
class ChestXray14:
    """Which part of ChestX-ray14 a site holds."""

    table: str | None = option(None, "The table; null: the one file Data_Entry_2017*.csv.")
    classes: tuple[str, ...] = option(CLASSES, "The findings that are classes.", min_length=1)
    others: tuple[str, ...] = option((), "Further texts of the table, beside the 14, that are no class here.")
    splits: Literal["official", "seed", "train"] = option(
        "official",
        "official: the two lists, validation by seed; seed: all by seed; train: nothing is tested on, validation by "
        "seed.",
    )
    batches: tuple[int, ...] | None = option(None, "Archives to read, 1 to 12; null: all images.")
    first: int | None = option(
        None, "Images per batch, the first ones by name; null: all (FedPSL's n; its clients hold 1000).", ge=1
    )
    straddling: Literal["drop", "keep"] = option(
        "drop", "Images outside the batch of their patient's first image, where batches are given."
    )
    source: str = option(
        SOURCE, "Whose patient names these are; for another collection in the same columns, its own."
    )


def batch_of(name: str) -> int | None:
    """The archive, 1 to 12, that holds an image by its published name; None for any other name."""
    return bisect.bisect_right(BATCHES, name) if _NAME.fullmatch(name) and name >= BATCHES[0] else None


def read(layout: Layout) -> Listing:
    """A case for each row of the table whose image is there; of any part of the layout above with the same columns.

    An empty finding, or "nan", is not annotated. A row whose image is missing is a problem, an image without a row a
    note; with `batches` only the rows of these archives count. Raises DataError where the table or the lists of the
    official split are missing, or `batches` names an archive that does not exist.
    """
    site, root, splitting = layout.site, layout.root, layout.splitting
    form: ChestXray14 = layout.options
    table = _table(site, root, form.table)
    _, rows, ragged = read_table(site, table, (FILE, FINDINGS, PATIENT))
    problems = some([_at(problem, table.name) for problem in ragged], "rows of another length")
    images, _ = find_images(root)
    files: dict[str, Path] = {}
    doubled: list[Problem] = []
    for file in images:
        first = files.setdefault(file.name, file)
        if first != file:
            what = f"an image of this name is also {shown(first, root)}"
            doubled.append(Problem(site, shown(file, root), what, "keep one of them"))
    problems += some(doubled, "names that are there twice")
    folders = {folder: _batch(folder, root) for folder in {file.parent for file in files.values()}}
    places = {name: folders[file.parent] or batch_of(name) for name, file in files.items()}
    chosen, left_out = _choose(site, table.name, rows, places, form)
    lists = _official(site, root) if form.splits == "official" else None
    known = dict.fromkeys((*CLASSES, *form.classes, *form.others))
    cases: list[Case] = []
    bad: list[Problem] = []
    gone: list[Problem] = []
    unlisted: list[Problem] = []
    for row in chosen:
        name, where = row.values[FILE], f"{table.name}, line {row.line}"
        case, wrong = _case(row, files.get(name, root), form, known)
        if case is None:
            allowed = "correct the row, or take it out"
            bad.append(Problem(site, where, wrong, allowed))
        elif name not in files:
            remedy = "add the file, or name the archives that are there with `batches`"
            gone.append(Problem(site, name, f"missing: listed in {where}", remedy))
        elif lists is not None and name not in lists:
            what = f"in neither of {', '.join(LISTS)}"
            unlisted.append(Problem(site, name, what, "add it to one, or set `splits` to seed"))
        else:
            if lists is not None:
                case = replace(case, split=lists[name])
            cases.append(case)
    listed = {row.values[FILE] for row in rows}
    unused = [
        Problem(
            site, shown(file, root), f"an image without a row in {table.name}", "add a row to use it", False
        )
        for name, file in files.items()
        if name not in listed
    ]
    problems += some(bad, "values that cannot be read") + some(gone, "missing files")
    problems += some(unlisted, "images outside the official split")
    problems += some(unused, "images without a row") + left_out
    if form.splits == "train":
        splitting = replace(splitting, test=0)
    split = split_patients(cases, site, splitting)
    return listing(site, root, form.classes, split, form.source, problems)


def _at(problem: Problem, file: str) -> Problem:
    return Problem(problem.site, file, problem.what, problem.remedy, problem.fatal)


def _table(site: str, root: Path, named: str | None) -> Path:
    if named is not None:
        return root / named
    found = sorted(root.glob("Data_Entry_2017*.csv"))
    if len(found) != 1:
        got = ", ".join(file.name for file in found) or "none"
        raise DataError(
            f"site {site}: {root}: one file Data_Entry_2017*.csv is expected, got {got}; name the table with `table`"
        )
    return found[0]


def _batch(folder: Path, root: Path) -> int | None:
    """The archive that a folder is named for, as images_001 or images_001/images."""
    matches = (_FOLDER.fullmatch(part) for part in folder.relative_to(root).parts)
    return next((int(match[1]) for match in matches if match), None)


def _official(site: str, root: Path) -> dict[str, Split]:
    found: dict[str, Split] = {}
    for file, split in LISTS.items():
        path = root / file
        try:
            names = path.read_text(encoding="utf-8-sig").split()
        except FileNotFoundError:
            raise DataError(
                f"site {site}: {path}: no such file; it holds the official split. Add it, or set `splits` to seed"
            ) from None
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"site {site}: {path}: not readable ({error}); download it again") from None
        for name in names:
            if found.setdefault(name, split) != split:
                raise DataError(
                    f"site {site}: {path}: {name} is in both lists; a test image must not be trained on, "
                    "take it out of one"
                )
    return found


def _choose(
    site: str, table: str, rows: list[Row], places: Mapping[str, int | None], form: ChestXray14
) -> tuple[list[Row], list[Problem]]:
    """The rows of the chosen batches, and a note on those left out because their patient began in another batch."""
    if form.batches is None and form.first is None:
        return rows, []
    wrong = [batch for batch in form.batches or () if not 1 <= batch <= len(BATCHES)]
    if wrong:
        raise DataError(f"site {site}: `batches` names {wrong[0]}; there are 1 to {len(BATCHES)}")
    wanted = set(form.batches or range(1, len(BATCHES) + 1))
    of: dict[int, list[Row]] = {batch: [] for batch in sorted(wanted)}
    home: dict[str, int] = {}
    nowhere: list[Problem] = []
    for row in rows:
        name, patient = row.values[FILE], _patient(row)
        batch = places.get(name) or batch_of(name)
        if batch is None:
            what = f"line {row.line}: column {FILE!r} holds {name!r}, which is in no batch"
            remedy = "put its file into a folder images_001 to images_012, or leave `batches` and `first` out"
            nowhere.append(Problem(site, table, what, remedy))
            continue
        home[patient] = min(home.get(patient, batch), batch)
        if batch in of:
            of[batch].append(row)
    chosen: list[Row] = []
    notes: list[Problem] = []
    for batch, members in of.items():
        kept = [row for row in members if form.straddling == "keep" or home[_patient(row)] in wanted]
        out = [row for row in members if home[_patient(row)] not in wanted]
        if out and form.straddling == "drop":
            patients = ", ".join(sorted({_patient(row) for row in out}))
            what = f"batch {batch}: {len(out)} images left out, whose patient ({patients}) begins in another batch"
            notes.append(Problem(site, table, what, "set `straddling` to keep to use them", False))
        kept.sort(key=lambda row: row.values[FILE])
        chosen += kept[: form.first]
    return chosen, some(nowhere, "images in no batch") + notes


def _patient(row: Row) -> str:
    text = row.values[PATIENT]
    return str(int(text)) if text.isascii() and text.isdigit() else text


def _case(row: Row, file: Path, form: ChestXray14, known: Iterable[str]) -> tuple[Case | None, str]:
    """A row's case, for now in the training split; or None, and what is wrong with the row."""
    name, text, patient = row.values[FILE], row.values[FINDINGS], _patient(row)
    match = _NAME.fullmatch(name)
    if not name:
        return None, f"column {FILE!r} is empty; it holds the name of an image"
    if empty(patient):
        return (
            None,
            f"column {PATIENT!r} holds {row.values[PATIENT]!r}; allowed: a name or number of the patient",
        )
    if match and patient != str(int(match[1])):
        return (
            None,
            f"column {PATIENT!r} holds {patient!r}, but the image {name} is of patient {int(match[1])}",
        )
    found = [] if empty(text) else [part.strip() for part in text.split("|")]
    strange = [part for part in found if part not in known and part != NOTHING]
    if strange:
        return None, (
            f"column {FINDINGS!r} holds {strange[0]!r}; allowed, joined by |: {', '.join(known)}; or {NOTHING}; "
            "further ones go into `others` or `classes`"
        )
    if NOTHING in found and len(found) > 1:
        return None, f"column {FINDINGS!r} holds {text!r}; {NOTHING} stands alone"
    present = frozenset(found) & frozenset(form.classes)
    absent = frozenset(form.classes) - present if found else frozenset()
    return image_case(os.path.splitext(name)[0], file, patient, "train", present, absent), ""


DATASET = DataSet(
    name="chestxray14",
    kind="findings",
    title="ChestX-ray14: Data_Entry_2017.csv, train_val_list.txt, test_list.txt, and images in any folders; 14 findings.",
    read=read,
    pixels="grey",
    options=ChestXray14,
)
