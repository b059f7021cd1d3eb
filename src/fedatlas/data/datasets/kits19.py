"""KiTS19, the 2019 kidney tumour segmentation challenge: 300 contrast CT scans, 210 of them with labels.

Source: https://github.com/neheller/kits19 (Heller et al., arXiv:1904.00445); licence CC BY-NC-SA 4.0. A clone of the
repository holds the labels in data/case_00000 … case_00209; the scans are fetched into the same folders by its own
script. Labels: 1 kidney, 2 kidney tumour; an integer 2 is never kidney, so that the two together are the organ.
Cases 210 to 299 have no public label and are unlabelled test cases. ConDistFL trains on 126 of the 210, validates on
42 and tests on 42: `split: {validation: 42, test: 42}`.
"""

import re
from pathlib import Path

from fedatlas.core.errors import DataError
from fedatlas.data.datasets import DataSet
from fedatlas.data.datasets.shared.listing import Case, Layout, Listing, Problem

TABLE = {"background": 0, "kidney": 1, "kidney tumour": 2}
LABELLED = 210
SCAN, LABEL = "imaging.nii.gz", "segmentation.nii.gz"
OTHER_RELEASES = {
    "instances": "KiTS23",
    "segmentations": "KiTS21",
    "aggregated_MAJ_seg.nii.gz": "KiTS21",
    "raw": "KiTS21",
}
"""What stands in a case's folder of a later release, which has cysts as a third label."""


def read(layout: Layout) -> Listing:
    """A case for each folder case_00000 ….

    Raises DataError for a folder without case folders, and for a later release of the challenge.
    """
    where = f"site {layout.site}: {layout.root}"
    base = layout.root / "data" if (layout.root / "data").is_dir() else layout.root
    folders = sorted(f for f in base.glob("case_*") if f.is_dir() and re.fullmatch(r"case_\d{5}", f.name))
    if not folders:
        other = " (dataset/ is there: that is KiTS23)" if (layout.root / "dataset").is_dir() else ""
        raise DataError(
            f"{where}: KiTS19 is expected, with folders data/case_00000 …; found none{other}; give the folder that holds "
            "data/, or the case folders themselves"
        )
    for folder in folders:
        for name, release in OTHER_RELEASES.items():
            if (folder / name).exists():
                raise DataError(
                    f"{where}: KiTS19 is expected; {folder.relative_to(layout.root)}/{name} is of {release}, whose "
                    f"labels differ; give a folder of KiTS19"
                )
    cases: list[Case] = []
    without: dict[str, list[Path]] = {SCAN: [], LABEL: []}
    for folder in folders:
        number = int(folder.name[-5:])
        scan, label = folder / SCAN, folder / LABEL
        drawn = label.exists()
        if not scan.exists():
            without[SCAN].append(scan)
        elif not drawn and number < LABELLED:
            without[LABEL].append(label)
        else:
            names = tuple(name for name in TABLE if TABLE[name]) if drawn else ()
            split = "train" if drawn else "test"
            cases.append(Case(folder.name, (scan,), label if drawn else None, split, folder.name, names))
    remedies = {
        SCAN: "a clone holds the labels alone: fetch the scans with the script of the KiTS19 repository",
        LABEL: f"cases below {LABELLED} have one: unpack the release again",
    }
    problems = [
        Problem(
            layout.site,
            str(files[0].relative_to(layout.root)),
            f"missing: {len(files)} of {len(folders)} case folders have no {name}",
            remedies[name],
        )
        for name, files in without.items()
        if files
    ]
    labelled = sum(case.label is not None for case in cases)
    if labelled != LABELLED and not problems:
        what = f"{labelled} labelled cases; KiTS19 has {LABELLED}, case_00000 to case_{LABELLED - 1:05d}"
        problems.append(Problem(layout.site, base.name, what, "see that all of it was unpacked", False))
    return Listing(dict(TABLE), tuple(cases), 1, tuple(problems))


DATASET = DataSet(
    name="kits19",
    kind="volumes",
    title="KiTS19: data/case_00000/imaging.nii.gz and segmentation.nii.gz, or the case folders themselves.",
    read=read,
    pixels="CT in HU",
)
