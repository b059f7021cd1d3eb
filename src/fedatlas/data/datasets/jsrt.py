"""JSRT: 247 frontal radiographs, 154 with a lung nodule, with the masks of SCR: lungs, heart, clavicles.

Shiraishi, Katsuragawa, Ikezoe, Matsumoto, Kobayashi, Komatsu, Matsui, Fujita, Kodera, Doi, "Development of a digital image
database for chest radiographs with and without a lung nodule", AJR 174, 2000. http://db.jsrt.or.jp/eng.php
Masks: van Ginneken, Stegmann, Loog, "Segmentation of anatomical structures in chest radiographs using supervised methods",
Med. Image Anal. 10, 2006 (the SCR database).

Licence: both ask for registration or the citation of their papers, for research; neither may be passed on. Nothing of
them is part of this package.

Classes: left lung, right lung, heart, left clavicle, right clavicle. Finding: lung nodule, from the name (JPCLN with,
JPCNN without). The two folds of SCR are one set here; the paper of ConDistFL counts 246 pictures, one fewer than there
are: `split: {validation: 49, test: 50}` (148 train, where it says 147).

Layout (from memory of the releases): `JPCLN001.IMG` … in any folder of the site, 2048×2048 pixels of 16 bit, the high byte
first, 12 bit used, low values white, 0.175 mm; or the same converted to PNG, TIFF … under the same names, which are read
as they are. Masks: `scratch/fold1/masks/heart/JPCLN001.gif` …, and `fold2`, 1024×1024. left is taken for the patient's left, on
the right of the picture; `fedatlas check` says where masks lie the other way round, and `reading: {swap: true}` exchanges
left and right.
"""

import os
import re
from pathlib import Path
from typing import Literal

from fedatlas.core.errors import DataError
from fedatlas.core.options import option, options
from fedatlas.data.datasets import DataSet
from fedatlas.data.datasets.shared.listing import Layout, Listing, Problem, shown, some
from fedatlas.data.datasets.shared.pictures import (
    PICTURES,
    RASTER,
    count_note,
    files_in,
    picture_case,
    table_of,
    there,
    without_picture,
)

SOURCE = "JSRT"
FINDING = "lung nodule"
STRUCTURES = ("left lung", "right lung", "heart", "left clavicle", "right clavicle")
FOLDS = ("fold1", "fold2")
NAME = re.compile(r"JPC(L|N)N\d{3}")
COUNT, MILLIMETRES, SIDE = 247, 0.175, 2048


@options
class Jsrt:
    """How JSRT with the masks of SCR is read."""

    structures: tuple[str, ...] = option(
        ("left lung", "right lung", "heart"), "The structures of SCR that are classes.", min_length=1
    )
    side: int = option(SIDE, "Rows and columns of the .IMG files, where they were scaled.", ge=1)
    swap: bool = option(False, "Whether what SCR calls left is the patient's right.")
    channels: Literal[1, 3] = option(1, "1: pictures are read as grey; 3: the grey three times.")


def read(layout: Layout) -> Listing:
    """A case for each picture that has all masks."""
    form: Jsrt = layout.options
    for name in form.structures:
        if name not in STRUCTURES:
            raise DataError(
                f"site {layout.site}: reading.structures: got {name!r}; SCR draws: {', '.join(STRUCTURES)}"
            )
    problems: list[Problem] = []
    base = _scr(layout)
    masks: dict[str, dict[str, Path]] = {}
    for name in form.structures:
        own = _swapped(name) if form.swap else name
        masks[name] = {}
        for fold in FOLDS:
            folder = (base / fold / "masks" / own).relative_to(layout.root)
            masks[name] |= files_in(layout, str(folder), RASTER, "", problems)
    pictures = _pictures(layout, base, problems)
    if not pictures:
        raise DataError(
            f"site {layout.site}: {layout.root}: no picture of {SOURCE}; expected JPCLN001.IMG to JPCLN154.IMG and "
            "JPCNN001.IMG to JPCNN093.IMG, or the same as PNG"
        )
    cases, wrong = [], []
    for name, file in sorted(pictures.items()):
        missing = [label for label, files in masks.items() if name not in files]
        if missing:
            what = f"missing: the mask of {missing[0]!r}; SCR draws every structure in every picture"
            remedy = f"see that fold1 and fold2 are both in {base.name}, or take the picture out"
            wrong.append(Problem(layout.site, shown(file, layout.root), what, remedy))
            continue
        drawn = [(label, files[name]) for label, files in masks.items()]
        finding = ((FINDING, name.startswith("JPCL")),)
        raw = form.side if file.suffix.lower() == ".img" else None
        mm = None if raw is None else MILLIMETRES * SIDE / raw
        pixel = None if mm is None else (mm, mm)
        cases.append(picture_case(name, file, "train", drawn, form.structures, finding, pixel, raw))
    problems += some(wrong, "pictures without their masks")
    problems += without_picture(layout, masks, pictures)
    problems += count_note(layout, "", len(pictures), COUNT, SOURCE, "pictures")
    return Listing(table_of(form.structures), tuple(cases), form.channels, tuple(problems), (FINDING,))


def _scr(layout: Layout) -> Path:
    """The folder of SCR: with fold1/masks and fold2/masks in it. Raises DataError where there is none."""
    for base, folders, _ in os.walk(layout.root):
        folders.sort()
        if all((Path(base) / fold / "masks").is_dir() for fold in FOLDS):
            return Path(base)
    raise DataError(
        f"site {layout.site}: {layout.root}: no masks of SCR; expected scratch/fold1/masks/heart/JPCLN001.gif … and "
        f"scratch/fold2/masks. {there(layout.root)}"
    )


def _pictures(layout: Layout, scr: Path, problems: list[Problem]) -> dict[str, Path]:
    """Case -> its picture; raw files go before converted ones of the same case."""
    found: dict[str, Path] = {}
    for base, folders, files in os.walk(layout.root):
        folders[:] = sorted(
            f
            for f in folders
            if not f.startswith(".") and Path(base) / f not in (scr / "fold1", scr / "fold2")
        )
        for name in sorted(files):
            file = Path(base) / name
            ending = file.suffix.lower()
            if ending not in (".img", *PICTURES) or not NAME.fullmatch(file.stem):
                continue
            other = found.get(file.stem)
            if other is not None and other.suffix.lower() == ending:
                what = f"case {file.stem!r} is also {shown(other, layout.root)}"
                problems.append(Problem(layout.site, shown(file, layout.root), what, "take one out"))
            elif other is None or ending == ".img":
                found[file.stem] = file
    return found


def _swapped(name: str) -> str:
    return name.replace("left", "right") if "left" in name else name.replace("right", "left")


DATASET = DataSet(
    name="jsrt",
    kind="masks",
    title="JSRT: JPCLN001.IMG …, and scratch/fold1 and fold2 of SCR with masks; lungs, heart, and nodules.",
    read=read,
    pixels="grey",
    options=Jsrt,
)
