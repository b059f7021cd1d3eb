"""Shenzhen Hospital chest X-ray set: 662 frontal radiographs, 336 with tuberculosis; lung masks for a part of them.

Jaeger, Candemir, Antani, Wáng, Lu, Thoma, "Two public chest X-ray datasets for computer-aided screening of pulmonary
diseases", Quant. Imaging Med. Surg. 4, 2014.
https://data.lhncbc.nlm.nih.gov/public/Tuberculosis-Chest-X-ray-Datasets/Shenzhen-Hospital-CXR-Set/

Licence: none by name. Released by the US National Library of Medicine and Shenzhen No. 3 Hospital, who ask to be named
and the paper to be cited. Masks are not part of it and have terms of their own (Stirenko et al.: CC BY-NC-SA 4.0).
Nothing of either is part of this package.

Classes: left lung, right lung. Finding: tuberculosis, from the last digit of a name (1 present, 0 absent). No official
split. ConDistFL uses 388 pictures and names Rajaraman et al., Diagnostics 11(616), 2021, for their masks:
`split: {validation: 77, test: 79}` (232 train).

Layout. Pictures, as released: `CXR_png/CHNCXR_0001_0.png`. Of the masks of Rajaraman et al. no layout is published that
we know of; two are read, beside or in the folder of the pictures:

* a folder per lung, `leftMask/` and `rightMask/` (also in `ManualMask/`), files named as the pictures, or with _mask;
* `mask/` with both lungs in one file, CHNCXR_0001_0_mask.png (Stirenko et al., 566 files): its two largest connected parts
  are the lungs, see `data.formats.flat.one_side`.

`reading` names other folders. Pictures without a mask are left out, unless `unmasked: true` keeps them for the finding.
left is the patient's left, on the right of the picture; `fedatlas check` says where masks lie the other way round, and
`reading: {swap: true}` exchanges the two folders.
"""

import re
from pathlib import Path
from typing import Literal

from fedatlas.core.errors import DataError, FederationError
from fedatlas.core.options import option, options
from fedatlas.data.datasets import DataSet
from fedatlas.data.datasets.shared.listing import Layout, Listing, Mask, Problem, Side, shown, some
from fedatlas.data.datasets.shared.pictures import (
    RASTER,
    count_note,
    expected,
    files_in,
    picture_case,
    sides,
    table_of,
)

SOURCE = "the Shenzhen set"
FINDING = "tuberculosis"
IMAGES = "CXR_png"
NAME = re.compile(r"CHNCXR_\d{4}_([01])")
COUNT = 662
PAIRS = (("leftMask", "rightMask"), ("ManualMask/leftMask", "ManualMask/rightMask"))
BOTH = "mask"


@options
class Shenzhen:
    """How the Shenzhen set is read."""

    left: str | None = option(None, "Folder of the masks of left lungs; null: leftMask, where it is there.")
    right: str | None = option(
        None, "Folder of the masks of right lungs; null: rightMask, where it is there."
    )
    both: str | None = option(None, "Folder of masks with both lungs; null: mask, where the others are not.")
    swap: bool = option(
        False, "Whether the folder of left lungs holds the patient's right ones; not with `both`."
    )
    unmasked: bool = option(False, "Whether pictures without a mask are kept, for tuberculosis alone.")
    channels: Literal[1, 3] = option(1, "1: pictures are read as grey; 3: the grey three times.")

    def __post_init__(self) -> None:
        if (self.left is None) != (self.right is None) or (self.left is not None and self.both is not None):
            raise FederationError(
                "reading: give `left` and `right` together, or `both` alone, or none of them"
            )


def read(layout: Layout) -> Listing:
    """A case for each picture with a mask; with `unmasked` for each picture."""
    form: Shenzhen = layout.options
    base = expected(layout, SOURCE, (IMAGES,))
    within = "" if base == layout.root else f"{base.name}/"
    problems: list[Problem] = []
    pictures = files_in(layout, within + IMAGES, RASTER, "", problems)
    left, right = sides(form.swap)
    masks: dict[str, dict[str, Mask]] = {left: {}, right: {}}
    folders, both = _folders(layout, form, base)
    if both is not None:
        if form.swap:
            raise FederationError(
                f"site {layout.site}: reading: swap is true, and {both}/ has both lungs in a file, where sides follow from the "
                "picture; it is for a folder per lung, leave it out"
            )
        for name, file in _without_suffix(files_in(layout, both, RASTER, "", problems)).items():
            masks[left][name], masks[right][name] = Side(file, "left"), Side(file, "right")
    else:
        for label, folder in zip((left, right), folders, strict=True):
            masks[label] |= _without_suffix(files_in(layout, folder, RASTER, "", problems))
    cases, wrong = [], []
    for name, file in sorted(pictures.items()):
        match = NAME.fullmatch(name)
        drawn = [(label, masks[label][name]) for label in sorted(masks) if name in masks[label]]
        if match is None:
            what = "a picture of another set: names are CHNCXR_0001_0 …, the last digit 1 for tuberculosis"
            wrong.append(Problem(layout.site, shown(file, layout.root), what, "take it out"))
        elif drawn or form.unmasked:
            finding = ((FINDING, match[1] == "1"),)
            cases.append(picture_case(name, file, "train", drawn, [n for n, _ in drawn], finding))
    strangers = sorted({name for files in masks.values() for name in files} - set(pictures))
    if strangers:
        what = f"{len(strangers)} masks without a picture, the first of {strangers[0]}"
        problems.append(
            Problem(layout.site, both or folders[0], what, "unpack the pictures again, or remove them")
        )
    problems += some(wrong, "pictures that do not fit the release")
    problems += count_note(layout, within + IMAGES, len(pictures), COUNT, SOURCE, "pictures")
    return Listing(table_of(sorted(masks)), tuple(cases), form.channels, tuple(problems), (FINDING,))


def _folders(layout: Layout, form: Shenzhen, base: Path) -> tuple[tuple[str, str], str | None]:
    """The folders of left and right masks, or the one of both, relative to the site's. Raises DataError where there
    is none."""
    if form.both is not None:
        return ("", ""), form.both
    if form.left is not None and form.right is not None:
        return (form.left, form.right), None
    for root in dict.fromkeys((base, layout.root)):
        within = "" if root == layout.root else f"{root.name}/"
        for left, right in PAIRS:
            if (root / left).is_dir() and (root / right).is_dir():
                return (within + left, within + right), None
        if (root / BOTH).is_dir():
            return ("", ""), within + BOTH
    raise DataError(
        f"site {layout.site}: {layout.root}: no masks of the lungs; the release of the pictures has none. Expected beside "
        f"{IMAGES}/: leftMask/ and rightMask/, or mask/ with CHNCXR_0001_0_mask.png …; or name the folders in `reading`"
    )


def _without_suffix(files: dict[str, Path]) -> dict[str, Path]:
    return {name.removesuffix("_mask"): file for name, file in files.items()}


DATASET = DataSet(
    name="shenzhen",
    kind="masks",
    title="Shenzhen: CXR_png, and masks of the lungs in leftMask and rightMask or in mask; lungs, and tuberculosis.",
    read=read,
    pixels="grey",
    options=Shenzhen,
)
