"""WORD, Whole abdominal ORgan Dataset: 150 CT scans of one hospital, taken before radiation therapy, with 16 organs.

Source: https://github.com/HiLab-git/WORD (Luo et al., Medical Image Analysis 82, 2022, arXiv:2111.02403); on request,
for academic research only, under the terms that stand there. The folder holds imagesTr and labelsTr (100 scans),
imagesVal and labelsVal (20), imagesTs (30), and labelsTs where the test labels were released with it; names are
word_0001.nii.gz …, the same for a scan and its labels. Labels are read by the numbers of the release, whether or not a
dataset.json lies beside: a kidney is two labels, both adrenal glands are one.

UFPS has a site of the 120 scans of the first two lists, of which it trains on 84, validates on 12 and tests on 24:

    {name: word, path: …, format: word, reading: {splits: seed}, split: {validation: 0.1, test: 0.2},
     annotated: [kidney], aliases: {left kidney: kidney, right kidney: kidney}}

The layout and the names of the lists are those of the release as it is described; no copy was at hand to read.
"""

from pathlib import Path
from typing import Literal

from fedatlas.core.errors import DataError
from fedatlas.core.options import option, options
from fedatlas.data.datasets import DataSet
from fedatlas.data.datasets.shared import numbered
from fedatlas.data.datasets.shared.listing import Case, Layout, Listing, Problem, Split, shown, stem

TABLE = {
    "background": 0,
    "liver": 1,
    "spleen": 2,
    "left kidney": 3,
    "right kidney": 4,
    "stomach": 5,
    "gallbladder": 6,
    "esophagus": 7,
    "pancreas": 8,
    "duodenum": 9,
    "colon": 10,
    "intestine": 11,
    "adrenal": 12,
    "rectum": 13,
    "bladder": 14,
    "left head of femur": 15,
    "right head of femur": 16,
}
LISTS: tuple[tuple[str, Split, int], ...] = (
    ("Tr", "train", 100),
    ("Val", "validation", 20),
    ("Ts", "test", 30),
)
"""Ending of the two folders of a list, its split, and its scans in the release."""
NAME = r"word_(\d{4})\.nii(?:\.gz)?"


@options
class Word:
    """The options of WORD."""

    splits: Literal["official", "seed"] = option(
        "official",
        "official: the lists of the release. seed: the scans of the first two lists are one, which `split` divides, "
        "and the third is not scored.",
    )


def read(layout: Layout) -> Listing:
    """The cases of the three lists.

    The site's folder may be that of imagesTr, or hold it in one folder. Raises DataError for another folder, and for a
    scan that is in two lists.
    """
    form: Word = layout.options
    inner = sorted(f for f in layout.root.iterdir() if f.is_dir() and (f / "imagesTr").is_dir())
    root = layout.root if (layout.root / "imagesTr").is_dir() else inner[0] if len(inner) == 1 else None
    scans = {
        ending: numbered.by_number(layout, [root / f"images{ending}"], NAME) if root else {}
        for ending, _, _ in LISTS
    }
    if root is None or not scans["Tr"]:
        raise DataError(
            f"site {layout.site}: {layout.root}: WORD is expected, with imagesTr/word_0002.nii.gz …; found none; give "
            "the folder that holds imagesTr"
        )
    numbered.by_number(layout, [root / f"images{ending}" for ending, _, _ in LISTS], NAME)
    cases: list[Case] = []
    problems: list[Problem] = []
    notes: list[Problem] = []
    for ending, split, expected in LISTS:
        found = scans[ending]
        labels = numbered.by_number(layout, [root / f"labels{ending}"], NAME)
        problems += _unpaired(layout, found, labels, ending)
        place: Split = "train" if form.splits == "seed" and split == "validation" else split
        scored = split != "test" or form.splits == "official"
        names = tuple(name for name, number in TABLE.items() if number)
        for number, scan in found.items():
            label = labels.get(number) if scored else None
            if label is not None:
                cases.append(Case(stem(scan), (scan,), label, place, stem(scan), names))
            elif split == "test":
                cases.append(Case(stem(scan), (scan,), None, "test", stem(scan), ()))
        if len(found) != expected:
            what = f"{len(found)} scans; WORD has {expected} there"
            file = shown(root / f"images{ending}", layout.root)
            notes.append(Problem(layout.site, file, what, "see that all of it was unpacked", False))
    return Listing(dict(TABLE), tuple(cases), 1, tuple(problems or notes))


def _unpaired(layout: Layout, scans: dict[int, Path], labels: dict[int, Path], ending: str) -> list[Problem]:
    """Scans without labels, other than those for the test, and labels without a scan: a fatal problem each."""
    lone_scans = [scan for number, scan in scans.items() if number not in labels]
    lone_labels = [label for number, label in labels.items() if number not in scans]
    if ending == "Ts" and not labels:
        lone_scans = []
    wrong = ((lone_scans, len(scans), "scans", "label map"), (lone_labels, len(labels), "label maps", "scan"))
    return [
        Problem(
            layout.site,
            shown(files[0], layout.root),
            f"missing: {len(files)} of {count} {kind} in its folder have no {other}",
            "unpack it again",
        )
        for files, count, kind, other in wrong
        if files
    ]


DATASET = DataSet(
    name="word",
    kind="volumes",
    title="WORD: imagesTr/word_0002.nii.gz and labelsTr/word_0002.nii.gz …, the same with Val and Ts.",
    read=read,
    pixels="CT in HU",
    options=Word,
)
