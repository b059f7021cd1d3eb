"""AMOS22, multi-organ segmentation of the abdomen: 500 CT and 100 MR scans of many scanners, phases and diseases.

Source: https://zenodo.org/records/7262581 (Ji et al., arXiv:2206.08023); its licence, which stands there, is
non-commercial. The folder holds dataset.json with the lists "training" (200 CT, 40 MR), "validation" (100 CT, 20 MR), both labelled, and
"test", not labelled; imagesTr, labelsTr, imagesVa, labelsVa, imagesTs. The number in a name tells CT (up to 500) from
MR. 15 organs: spleen, right kidney, left kidney, gall bladder, esophagus, liver, stomach, arota (so spelt), postcava,
pancreas, right adrenal gland, left adrenal gland, duodenum, bladder, prostate/uterus. Lesions are part of their organ,
and a kidney is two labels:

    {name: amos, path: …, format: amos22, role: test, whole: true,
     aliases: {right kidney: kidney, left kidney: kidney}}

ConDistFL tests on the 300 labelled CT scans. Fed-MENU has a site of the 200 of the list "training", of which it trains
on 120, validates on 20 and tests on 60:

    {name: amos, path: …, format: amos22, reading: {lists: training}, split: {validation: 0.1, test: 0.3},
     annotated: [liver, kidney, pancreas, spleen, gallbladder],
     aliases: {right kidney: kidney, left kidney: kidney, gall bladder: gallbladder}}
"""

import re
from dataclasses import replace
from typing import Literal

from fedatlas.core.errors import DataError
from fedatlas.core.options import option, options
from fedatlas.data.datasets import DataSet
from fedatlas.data.datasets.shared import datalist
from fedatlas.data.datasets.shared.listing import Case, Layout, Listing, Problem, parse_table, read_json

LAST_CT = 500
EXPECTED = {"training": {"ct": 200, "mr": 40}, "validation": {"ct": 100, "mr": 20}}
"""Labelled scans of the release, by list and modality."""


@options
class Amos22:
    """The options of AMOS22."""

    modality: Literal["ct", "mr", "both"] = option("ct", "Which scans are used.")
    lists: Literal["training", "validation", "both"] = option(
        "both", "From which lists labelled scans are taken."
    )


def read(layout: Layout) -> Listing:
    """The cases of the lists and the modality that the options name.

    Raises DataError for another data set, for a release without the validation labels, and for a name without a number.
    """
    form: Amos22 = layout.options
    path = layout.root / layout.table
    where = f"site {layout.site}: {path}"
    found = read_json(path, layout.site)
    table = parse_table(found.get("labels"), where)
    if len(table) != 16 or not {"spleen", "right kidney", "left kidney", "postcava"} <= set(table):
        raise DataError(
            f"{where}: AMOS22 is expected, with 15 organs, spleen to prostate/uterus; found {len(table) - 1}: "
            f"{', '.join(list(table)[1:])}; give its folder, or the `format` of this one"
        )
    if form.lists != "training" and not found.get("validation"):
        raise DataError(
            f'{where}: the list "validation" is missing: AMOS22 is expected as published with labelsVa '
            "(zenodo 7262581); the first release of the challenge has no validation labels: of it set reading.lists to "
            "training"
        )
    left = {"training": "validation", "validation": "training"}.get(form.lists)
    listing = datalist.listing(layout, {k: v for k, v in found.items() if k != left}, table, 1)
    chosen = tuple(case for case in listing.cases if form.modality in ("both", _modality(case, where)))
    labelled = sum(case.label is not None for case in chosen)
    problems = list(listing.problems)
    expected = sum(
        count
        for name, counts in EXPECTED.items()
        for modality, count in counts.items()
        if form.lists in ("both", name) and form.modality in ("both", modality)
    )
    if labelled != expected and not problems:
        of_list = "" if form.lists == "both" else f", list {form.lists}"
        what = f"{labelled} labelled scans ({form.modality}{of_list}); AMOS22 has {expected}"
        problems.append(Problem(layout.site, layout.table, what, "see that all of it was unpacked", False))
    return replace(listing, cases=chosen, problems=tuple(problems))


def _modality(case: Case, where: str) -> str:
    match = re.fullmatch(r"amos_(\d+)", case.name)
    if match is None:
        raise DataError(f"{where}: {case.name!r}: names of AMOS22 are amos_0001 …; give the folder of AMOS22")
    return "ct" if int(match[1]) <= LAST_CT else "mr"


DATASET = DataSet(
    name="amos22",
    kind="volumes",
    title="AMOS22: dataset.json with imagesTr, labelsTr, imagesVa, labelsVa, imagesTs.",
    read=read,
    pixels="CT in HU or MR",
    options=Amos22,
    has_table=True,
)
