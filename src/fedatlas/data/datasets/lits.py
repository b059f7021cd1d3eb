"""LiTS, the liver tumour segmentation benchmark: 201 contrast CT scans of seven hospitals, 131 of them with labels.

Source: https://competitions.codalab.org/competitions/17094 (Bilic et al., Medical Image Analysis 84, 2023,
arXiv:1901.04056); its licence, which stands there, is non-commercial. Labels: 1 liver, 2 liver tumour; an integer 2 is
never liver, so that the two together are the organ. The 70 test scans have no public label. Task03_Liver of the
Decathlon (`msd`) holds the same 131 patients: never use both.

Fed-MENU trains on 79 of the 131, validates on 13 and tests on 39, with tumours as part of the liver:

    {name: lits, path: …, format: lits, split: {validation: 0.1, test: 0.3}, aliases: {liver tumour: liver}}
"""

from fedatlas.core.errors import DataError
from fedatlas.data.datasets import DataSet
from fedatlas.data.datasets.shared import numbered
from fedatlas.data.datasets.shared.listing import Layout, Listing

TABLE = {"background": 0, "liver": 1, "liver tumour": 2}
NUMBERS = range(131)
SCAN, LABEL, TEST = (rf"{name}-(\d+)\.nii(?:\.gz)?" for name in ("volume", "segmentation", "test-volume"))


def read(layout: Layout) -> Listing:
    """A case for each number.

    Files may be .nii or .nii.gz. Raises DataError for a folder without them, and for a scan that is there twice.
    """
    inner = sorted(f for f in layout.root.iterdir() if f.is_dir() and not f.name.startswith("."))
    scans, labels, tests = (
        numbered.by_number(layout, (layout.root, *inner), pattern) for pattern in (SCAN, LABEL, TEST)
    )
    if not scans and not labels:
        raise DataError(
            f"site {layout.site}: {layout.root}: LiTS is expected, with volume-0.nii and segmentation-0.nii …, here or "
            "in the folders Training Batch 1 and Training Batch 2; found none; give the folder that holds them"
        )
    return numbered.listing(layout, scans, labels, tests, table=TABLE, numbers=NUMBERS, release="LiTS")


DATASET = DataSet(
    name="lits",
    kind="volumes",
    title="LiTS: volume-0.nii and segmentation-0.nii …, in one folder or in folders, as Training Batch 1 and 2.",
    read=read,
    pixels="CT in HU",
)
