"""Montgomery County chest X-ray set: 138 frontal radiographs, 58 with tuberculosis, with a mask of each lung.

Jaeger, Candemir, Antani, Wáng, Lu, Thoma, "Two public chest X-ray datasets for computer-aided screening of pulmonary
diseases", Quant. Imaging Med. Surg. 4, 2014; masks: Candemir et al., IEEE Trans. Med. Imaging 33, 2014.
https://data.lhncbc.nlm.nih.gov/public/Tuberculosis-Chest-X-ray-Datasets/Montgomery-County-CXR-Set/MontgomerySet/

Licence: none by name. Released by the US National Library of Medicine and the Montgomery County Department of Health and
Human Services, who ask to be named and the papers to be cited. Nothing of it is part of this package.

Classes: left lung, right lung. Finding: tuberculosis, from the last digit of a name (1 present, 0 absent). No official
split; the paper of ConDistFL: `split: {validation: 27, test: 29}` (82 train).

Layout (from memory of the release, not from a paper): `CXR_png/MCUCXR_0001_0.png`, `ManualMask/leftMask/` and
`ManualMask/rightMask/` with the same names; `ClinicalReadings/` is not read. The folder may be the site's own or lie in it
(`MontgomerySet/`). Pixels are 0.0875 mm. leftMask is taken for the patient's left lung, which is on the right of the
picture; `fedatlas check` says where a site's masks lie the other way round, and `reading: {swap: true}` exchanges them.
"""

import re
from typing import Literal

from fedatlas.core.options import option, options
from fedatlas.data.datasets import DataSet
from fedatlas.data.datasets.shared.listing import Layout, Listing, Problem, shown, some
from fedatlas.data.datasets.shared.pictures import (
    RASTER,
    count_note,
    expected,
    files_in,
    picture_case,
    sides,
    table_of,
    without_picture,
)

SOURCE = "the Montgomery County set"
FINDING = "tuberculosis"
IMAGES, LEFT, RIGHT = "CXR_png", "ManualMask/leftMask", "ManualMask/rightMask"
NAME = re.compile(r"MCUCXR_\d{4}_([01])")
COUNT, MILLIMETRES = 138, 0.0875


@options
class Montgomery:
    """How the Montgomery County set is read."""

    swap: bool = option(False, "Whether leftMask holds the patient's right lung.")
    channels: Literal[1, 3] = option(1, "1: pictures are read as grey; 3: the grey three times.")


def read(layout: Layout) -> Listing:
    """A case for each picture with both masks."""
    form: Montgomery = layout.options
    base = expected(layout, SOURCE, (IMAGES, LEFT, RIGHT))
    within = "" if base == layout.root else f"{base.name}/"
    problems: list[Problem] = []
    pictures = files_in(layout, within + IMAGES, RASTER, "", problems)
    masks = {
        name: files_in(layout, within + folder, RASTER, "", problems)
        for name, folder in zip(sides(form.swap), (LEFT, RIGHT), strict=True)
    }
    cases, wrong = [], []
    for name, file in sorted(pictures.items()):
        match = NAME.fullmatch(name)
        missing = [label for label, files in masks.items() if name not in files]
        what = ""
        if match is None:
            what = "a picture of another set: names are MCUCXR_0001_0 …, the last digit 1 for tuberculosis"
        elif missing:
            what = f"missing: the mask of the {missing[0]}; every picture of {SOURCE} has both"
        if match is None or missing:
            remedy = "unpack the release again, or take it out"
            wrong.append(Problem(layout.site, shown(file, layout.root), what, remedy))
            continue
        drawn = [(label, masks[label][name]) for label in sorted(masks)]
        finding = ((FINDING, match[1] == "1"),)
        pixel = (MILLIMETRES, MILLIMETRES)
        cases.append(picture_case(name, file, "train", drawn, sorted(masks), finding, pixel))
    problems += some(wrong, "pictures that do not fit the release")
    problems += without_picture(layout, masks, pictures)
    problems += count_note(layout, within + IMAGES, len(pictures), COUNT, SOURCE, "pictures")
    return Listing(table_of(sorted(masks)), tuple(cases), form.channels, tuple(problems), (FINDING,))


DATASET = DataSet(
    name="montgomery",
    kind="masks",
    title="Montgomery County: CXR_png, ManualMask/leftMask and ManualMask/rightMask; lungs, and tuberculosis.",
    read=read,
    pixels="grey",
    options=Montgomery,
)
