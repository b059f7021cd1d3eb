"""A table with one row per image and one column per class."""

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from fedatlas.core.errors import DataError, FederationError
from fedatlas.core.options import option, options
from fedatlas.data.datasets import DataSet
from fedatlas.data.datasets.shared.findings import (
    Row,
    empty,
    find_images,
    is_mark,
    listing,
    mark,
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


@options
class CsvForm:
    """A table with one row per image and one column per class: 1 present, 0 absent, empty not annotated."""

    table: str = option("labels.csv", "The table, in the site's folder.")
    images: str = option(".", "The folder that the column of files is relative to.")
    delimiter: str = option(",", "What separates the columns.", min_length=1, max_length=1)
    file: str = option("file", "Column with the image file.")
    classes: tuple[str, ...] | None = option(
        None, "Columns that are classes; null: all but those of file, patient, split and `ignored`."
    )
    ignored: tuple[str, ...] = option((), "Columns that are no classes, as age or view.")
    patient: str | None = option(None, "Column with the patient; null: an image each, or by `patient_in`.")
    patient_in: str | None = option(
        None, "Regular expression with one group that finds the patient in the column of files."
    )
    split: str | None = option(None, "Column with train, validation or test; null: by seed.")
    no_finding: str | None = option(
        None, "Column whose 1 says that every class left empty in the row is absent; null: none."
    )
    uncertain: Literal["ignore", "ones", "zeros"] = option(
        "ignore",
        "What -1 is read as: not annotated, present, or absent (CheXpert's U-Ignore, U-Ones, U-Zeros).",
    )
    source: str | None = option(
        None, "Whose patient names these are; sites that share them give the same text. Null: the site's own."
    )

    def __post_init__(self) -> None:
        if self.patient is not None and self.patient_in is not None:
            raise FederationError("csv: `patient` and `patient_in` are both given; one is allowed")
        if self.patient_in is not None:
            try:
                groups = re.compile(self.patient_in).groups
            except re.error as error:
                raise FederationError(
                    f"csv: patient_in: {self.patient_in!r} is not a regular expression ({error})"
                ) from None
            if groups != 1:
                raise FederationError(
                    f"csv: patient_in: {self.patient_in!r} has {groups} groups; it needs exactly one"
                )


_SPLITS: Mapping[str, Split] = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "test": "test",
}


def read(layout: Layout) -> Listing:
    """A case for each row. Values are those of `mark`.

    With neither `patient` nor `patient_in` every image is its own patient, and a note says so. Where the table gives no test or no
    validation cases, `splitting` draws them. A row that cannot be read, or whose file is missing, is a problem; an
    image without a row is a note. Raises DataError for a table that cannot be understood at all.
    """
    site, root, splitting = layout.site, layout.root, layout.splitting
    form: CsvForm = layout.options
    path = root / form.table
    special = [name for name in (form.file, form.patient, form.split, form.no_finding) if name is not None]
    header, rows, problems = read_table(
        site, path, [*special, *(form.classes or ()), *form.ignored], delimiter=form.delimiter
    )
    classes = form.classes or tuple(n for n in header if n and n not in (*special, *form.ignored))
    if not classes:
        raise DataError(
            f"site {site}: {path}: line 1: no column is left to be a class; it has: {', '.join(header)}"
        )
    folder = root / form.images
    there, _ = find_images(folder)
    known = {os.path.normpath(file) for file in there}
    listed: dict[str, int] = {}
    cases: list[Case] = []
    bad: list[Problem] = []
    twice: list[Problem] = []
    gone: list[Problem] = []
    cells = Counter(row.values[name] for row in rows for name in classes)
    open_cells = sum(count for cell, count in cells.items() if is_mark(cell) and mark(cell) == -1)
    if open_cells:
        meaning = {"ignore": "not annotated", "ones": "present", "zeros": "absent"}[form.uncertain]
        what = (
            f"{open_cells} cells hold -1, uncertain, and are read as {meaning} (uncertain: {form.uncertain})"
        )
        problems.append(Problem(site, form.table, what, "change `uncertain` if that is not meant", False))
    for row in rows:
        file = folder / row.values[form.file]
        first = listed.setdefault(os.path.normpath(file), row.line)
        if first != row.line:
            what = f"{row.values[form.file]!r} is listed in line {first}, too"
            twice.append(Problem(site, f"{form.table}, line {row.line}", what, "take one row out"))
            continue
        case, faults = _csv_case(site, form, classes, row, file, header)
        bad += [replace(fault, file=f"{form.table}, line {row.line}") for fault in faults]
        if case is None:
            continue
        if os.path.normpath(file) in known or os.path.isfile(file):
            cases.append(case)
        else:
            what = f"missing: listed in {form.table}, line {row.line}, column {form.file!r}"
            remedy = "add the file, correct `images`, or take the row out"
            gone.append(Problem(site, shown(file, root), what, remedy))
    unused = [
        Problem(
            site, shown(file, root), f"an image without a row in {form.table}", "add a row to use it", False
        )
        for file in there
        if os.path.normpath(file) not in listed
    ]
    problems = some([replace(p, file=form.table) for p in problems], "rows of another length")
    if form.patient is None and form.patient_in is None and len(cases) > 1:
        what = "no column names the patient, so that every image counts as a patient of its own"
        remedy = (
            "give `patient`, its column, or `patient_in`, an expression that finds it in the path; where each image is a "
            f"patient's only one, `patient: {form.file}`"
        )
        problems.append(Problem(site, form.table, what, remedy, False))
    problems += some(bad, "values that cannot be read") + some(gone, "missing files")
    problems += some(twice, "listed twice")
    problems += some(unused, "images without a row")
    return listing(
        site, root, classes, split_patients(cases, site, splitting), form.source or f"site {site}", problems
    )


def _csv_case(
    site: str, form: CsvForm, classes: Sequence[str], row: Row, file: Path, header: Sequence[str]
) -> tuple[Case | None, list[Problem]]:
    faults: list[Problem] = []

    def wrong(column: str, allowed: str) -> None:
        what = f"column {column!r} holds {row.values[column]!r}; allowed: {allowed}"
        faults.append(Problem(site, "", what, "correct the row, or take it out"))

    name = os.path.splitext(row.values[form.file])[0]
    if not name:
        wrong(form.file, "the path of an image")
    patient = row.values[form.patient] if form.patient else name
    if form.patient and empty(patient):
        wrong(form.patient, "a name or number of the patient")
    if form.patient_in:
        match = re.search(form.patient_in, row.values[form.file])
        if match is None or not match[1]:
            wrong(form.file, f"a path in which `patient_in`, {form.patient_in!r}, finds the patient")
        else:
            patient = match[1]
    split: Split | None = "train"
    if form.split:
        split = _SPLITS.get(row.values[form.split].lower())
        if split is None:
            wrong(form.split, "train, validation, test")
    marks = {"ignore": None, "ones": 1, "zeros": 0}
    values: dict[str, int | None] = {}
    for column in [*classes, *([form.no_finding] if form.no_finding else [])]:
        text = row.values[column]
        try:
            number = mark(text)
        except ValueError:
            wrong(
                column,
                "1 (or True) present, 0 (or False) absent, -1 uncertain, empty not annotated; other columns go into `ignored`",
            )
            continue
        values[column] = marks[form.uncertain] if number == -1 else number
    if faults or split is None:
        return None, faults
    if form.no_finding and values[form.no_finding] == 1:
        values = {column: 0 if empty(row.values[column]) else value for column, value in values.items()}
    present = frozenset(name for name in classes if values[name] == 1)
    absent = frozenset(name for name in classes if values[name] == 0)
    return image_case(name, file, patient, split, present, absent), []


DATASET = DataSet(
    name="csv",
    kind="findings",
    title="A table with a row per image and a column per class: 1 present, 0 absent, empty not annotated, -1 uncertain (CheXpert).",
    read=read,
    pixels="grey or colour",
    options=CsvForm,
)
