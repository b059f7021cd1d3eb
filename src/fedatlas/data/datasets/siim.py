"""SIIM-ACR Pneumothorax Segmentation: 12,047 frontal radiographs, 2,669 of them with the mask of a pneumothorax.

Zawacki, Wu, Shih, Elliott, Fomitchev, Hussain, Lakhani, Culliton, Bao, "SIIM-ACR Pneumothorax Segmentation", Kaggle, 2019.
https://www.kaggle.com/c/siim-acr-pneumothorax-segmentation (images of ChestX-ray14)

Licence: the rules of the competition; read them before use. Nothing of it is part of this package.

Class: pneumothorax. Finding: has pneumothorax, which follows from the mask. No public test labels; the paper of ConDistFL
keeps the ratio of both kinds: `split: {validation: 2410, test: 2411}` (7,226 train); a split keeps it, too.

Layout, as published on Kaggle: a table with the columns ImageId and EncodedPixels, and the pictures ImageId.dcm in folders of
their own (dicom-images-train/<study>/<series>/). `train-rle.csv` has the 10,675 pictures of stage 1, `stage_2_train.csv` all
12,047. EncodedPixels holds run lengths, see `data.formats.rle`, or -1 for a picture without pneumothorax; a picture with several
rows has the union of them. Pictures of any folder and of other kinds (PNG) are found by their names; run lengths are those
of 1024×1024 pixels.
"""

import os
from dataclasses import replace
from pathlib import Path
from typing import Literal

from fedatlas.core.errors import DataError
from fedatlas.core.options import option, options
from fedatlas.data.datasets import DataSet
from fedatlas.data.datasets.shared.findings import read_table
from fedatlas.data.datasets.shared.listing import EMPTY, Layout, Listing, Problem, Runs, shown, some
from fedatlas.data.datasets.shared.pictures import PICTURES, count_note, picture_case, table_of

SOURCE = "SIIM-ACR (stage 2)"
CLASS, FINDING = "pneumothorax", "has pneumothorax"
CASE, RUNS = "ImageId", "EncodedPixels"
TABLES = ("stage_2_train.csv", "train-rle.csv")
COUNTS = {"stage_2_train.csv": 12_047, "train-rle.csv": 10_675}
SIDE = 1024


@options
class Siim:
    """How the SIIM-ACR set is read."""

    table: str | None = option(
        None,
        "The table of run lengths; null: stage_2_train.csv, or train-rle.csv, in any folder of the site.",
    )
    side: int = option(SIDE, "Rows and columns of the pictures that the run lengths were drawn on.", ge=1)
    channels: Literal[1, 3] = option(1, "1: pictures are read as grey; 3: the grey three times.")


def read(layout: Layout) -> Listing:
    """A case for each picture of the table."""
    form: Siim = layout.options
    pictures, tables, problems = _files(layout)
    table = layout.root / form.table if form.table else next((tables[n] for n in TABLES if n in tables), None)
    if table is None:
        raise DataError(
            f"site {layout.site}: {layout.root}: no table of run lengths; expected {' or '.join(TABLES)} with the "
            f"columns {CASE} and {RUNS}, or name it with `reading.table`"
        )
    if not table.is_file():
        raise DataError(
            f"site {layout.site}: {table}: no such file; it holds the run lengths, name it with `reading.table`"
        )
    header, rows, wrong = read_table(layout.site, table, [CASE, RUNS])
    if len(header) != 2:
        raise DataError(
            f"site {layout.site}: {table}: line 1: {len(header)} columns, {', '.join(header)}; {SOURCE} has {CASE} and "
            f"{RUNS} alone: give the table of the release"
        )
    texts: dict[str, list[tuple[int, str]]] = {}
    for row in rows:
        texts.setdefault(row.values[CASE], []).append((row.line, row.values[RUNS]))
    cases, gone = [], []
    for name, runs in sorted(texts.items()):
        where = f"{table}, line {runs[0][0]}"
        drawn = [(line, text) for line, text in runs if text != EMPTY]
        if drawn and len(drawn) < len(runs):
            what = f"picture {name} has run lengths, and {EMPTY} for none in another row"
            wrong.append(
                Problem(layout.site, shown(Path(where), layout.root), what, "take one of the rows out")
            )
        elif name not in pictures:
            what = f"missing: the picture of {shown(Path(where), layout.root)}"
            gone.append(
                Problem(layout.site, f"{name}.dcm", what, "download the pictures, or take the row out")
            )
        else:
            shape = (form.side, form.side)
            masks = [(CLASS, Runs((text,), shape, f"{table}, line {line}")) for line, text in drawn]
            finding = ((FINDING, bool(drawn)),)
            cases.append(picture_case(name, pictures[name], "train", masks, (CLASS,), finding))
    wrong = [replace(problem, file=shown(Path(problem.file), layout.root)) for problem in wrong]
    problems += some(wrong, "rows that cannot be read") + some(gone, "missing pictures")
    unused = [file for name, file in sorted(pictures.items()) if name not in texts]
    if unused:
        what = f"a picture without a row in {table.name}, which is not used; {len(unused)} such files"
        remedy = "add rows to use them, or leave it so if they are of the test"
        problems.append(Problem(layout.site, shown(unused[0], layout.root), what, remedy, False))
    if table.name in COUNTS:
        whole = COUNTS[table.name]
        problems += count_note(layout, table.name, len(texts), whole, table.name, "pictures")
    return Listing(table_of([CLASS]), tuple(cases), form.channels, tuple(problems), (FINDING,))


def _files(layout: Layout) -> tuple[dict[str, Path], dict[str, Path], list[Problem]]:
    """Case -> its picture, name -> table, and a problem for each case with two pictures."""
    pictures: dict[str, Path] = {}
    tables: dict[str, Path] = {}
    twice: list[Problem] = []
    for base, folders, files in os.walk(layout.root):
        folders[:] = sorted(f for f in folders if not f.startswith("."))
        for name in sorted(files):
            file = Path(base) / name
            if name in TABLES:
                tables.setdefault(name, file)
            elif file.suffix.lower() in PICTURES:
                if file.stem in pictures:
                    what = f"case {file.stem!r} is also {shown(pictures[file.stem], layout.root)}"
                    twice.append(Problem(layout.site, shown(file, layout.root), what, "take one out"))
                pictures.setdefault(file.stem, file)
    return pictures, tables, some(twice, "pictures found twice")


DATASET = DataSet(
    name="siim",
    kind="masks",
    title="SIIM-ACR: stage_2_train.csv or train-rle.csv, and DICOM files in any folder; pneumothorax.",
    read=read,
    pixels="grey",
    options=Siim,
)
