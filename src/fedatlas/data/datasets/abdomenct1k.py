"""AbdomenCT-1K: 1112 abdominal CT scans of twelve centres with liver, kidney, spleen and pancreas, 1000 with labels.

Source: https://github.com/JunMa11/AbdomenCT-1K (Ma et al., IEEE TPAMI 44, 2022, doi 10.1109/TPAMI.2021.3100536); under
the terms that stand there, and those of the sets that it was put together from. Scans are Case_00001_0000.nii.gz …, in
the folders AbdomenCT-1K-ImagePart1 to 3 or in imagesTr; labels are Case_00001.nii.gz … in Mask or labels.
Labels: 1 liver, 2 kidney (both), 3 spleen, 4 pancreas; tumours are part of their organ. Scans without a label map, of
which 63 were published, are unlabelled test cases.

Most scans are those of LiTS, KiTS19, the Decathlon's Task07_Pancreas and Task09_Spleen, and NIH Pancreas-CT: never use
one of these beside it.

UFPS has a site of the 266 labelled scans with the smallest files, of which it trains on 186, validates on 27 and tests
on 53:

    {name: abdomenct1k, path: …, format: abdomenct1k, reading: {smallest: 266},
     split: {validation: 0.1, test: 0.2}, annotated: [spleen, pancreas]}

The layout is that of the release as it is described; no copy was at hand to read.
"""

from pathlib import Path

from fedatlas.core.errors import DataError
from fedatlas.core.options import option, options
from fedatlas.data.datasets import DataSet
from fedatlas.data.datasets.shared import numbered
from fedatlas.data.datasets.shared.listing import Case, Layout, Listing, Problem, shown, stem

TABLE = {"background": 0, "liver": 1, "kidney": 2, "spleen": 3, "pancreas": 4}
LABELLED = 1000
SCAN, LABEL = r"Case_(\d{5})_0000\.nii(?:\.gz)?", r"Case_(\d{5})\.nii(?:\.gz)?"


@options
class AbdomenCT1K:
    """The options of AbdomenCT-1K."""

    smallest: int | None = option(
        None, "Only so many of the labelled scans, those whose files have the fewest bytes; null: all.", ge=1
    )


def read(layout: Layout) -> Listing:
    """A case for each scan.

    Files lie in the site's folder or in those in it, whatever these are called. Raises DataError for a folder without
    them, and for a scan or a label map that is there twice.
    """
    form: AbdomenCT1K = layout.options
    inner = sorted(f for f in layout.root.iterdir() if f.is_dir() and not f.name.startswith("."))
    scans, labels = (numbered.by_number(layout, (layout.root, *inner), pattern) for pattern in (SCAN, LABEL))
    if not scans or not labels:
        lacking = "scans, Case_00001_0000.nii.gz …" if not scans else "label maps, Case_00001.nii.gz …"
        raise DataError(
            f"site {layout.site}: {layout.root}: AbdomenCT-1K is expected; found no {lacking} here or in its folders; "
            "give the folder that holds those of the scans and that of the label maps"
        )
    names = tuple(name for name, number in TABLE.items() if number)
    pairs = sorted(scans.keys() & labels.keys())
    chosen = set(pairs)
    if form.smallest is not None:
        chosen = set(sorted(pairs, key=lambda n: (scans[n].stat().st_size, n))[: form.smallest])
    cases = [_case(scans[n], labels[n], names) for n in pairs if n in chosen]
    cases += [_case(scans[n], None, ()) for n in scans if n not in labels]
    lone = [label for number, label in labels.items() if number not in scans]
    problems: list[Problem] = []
    if lone:
        what = f"missing: {len(lone)} of {len(labels)} label maps have no scan"
        remedy = "unpack all three parts of the scans"
        problems.append(Problem(layout.site, shown(lone[0], layout.root), what, remedy))
    elif len(pairs) != LABELLED:
        what = f"{len(pairs)} labelled scans; AbdomenCT-1K has {LABELLED}"
        if form.smallest is not None and form.smallest > len(pairs):
            what += f", of which reading.smallest asks for {form.smallest}"
        problems.append(Problem(layout.site, "", what, "see that all of it was unpacked", False))
    return Listing(dict(TABLE), tuple(cases), 1, tuple(problems))


def _case(scan: Path, label: Path | None, names: tuple[str, ...]) -> Case:
    name = stem(scan).removesuffix("_0000")
    return Case(name, (scan,), label, "train" if label else "test", name, names)


DATASET = DataSet(
    name="abdomenct1k",
    kind="volumes",
    title="AbdomenCT-1K: Case_00001_0000.nii.gz … and label maps Case_00001.nii.gz …, in folders of any name.",
    read=read,
    pixels="CT in HU",
    options=AbdomenCT1K,
)
