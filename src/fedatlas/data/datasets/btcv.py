"""BTCV, multi-atlas labelling beyond the cranial vault, abdomen: 50 portal venous CT scans, 30 of them with labels.

Source: https://www.synapse.org/#!Synapse:syn3193805 (Landman et al., MICCAI challenge 2015); after registration, under
the terms that stand there. 13 organs: spleen, right kidney, left kidney, gallbladder, esophagus, liver, stomach, aorta,
inferior vena cava, portal and splenic veins, pancreas, right adrenal gland, left adrenal gland. A kidney is two labels.
The 20 test scans have no public label. Fed-MENU tests on the 30, of which no site has trained:

    {name: btcv, path: …, format: btcv, role: test, aliases: {right kidney: kidney, left kidney: kidney}}
"""

from fedatlas.core.errors import DataError
from fedatlas.data.datasets import DataSet
from fedatlas.data.datasets.shared import numbered
from fedatlas.data.datasets.shared.listing import Layout, Listing

TABLE = {
    "background": 0,
    "spleen": 1,
    "right kidney": 2,
    "left kidney": 3,
    "gallbladder": 4,
    "esophagus": 5,
    "liver": 6,
    "stomach": 7,
    "aorta": 8,
    "inferior vena cava": 9,
    "portal and splenic veins": 10,
    "pancreas": 11,
    "right adrenal gland": 12,
    "left adrenal gland": 13,
}
NUMBERS = (*range(1, 11), *range(21, 41))
SCAN, LABEL = (rf"{name}(\d{{4}})\.nii(?:\.gz)?" for name in ("img", "label"))


def read(layout: Layout) -> Listing:
    """A case for each number.

    The site's folder may be that of RawData, RawData itself, or Training. Raises DataError for another folder, and for
    a scan that is there twice.
    """
    tops = ("Abdomen/RawData/Training", "RawData/Training", "Training", ".")
    training = next((layout.root / top for top in tops if (layout.root / top / "img").is_dir()), None)
    if training is None:
        raise DataError(
            f"site {layout.site}: {layout.root}: BTCV is expected, with RawData/Training/img/img0001.nii.gz …; found no "
            "folder img; give the folder that holds RawData, or RawData"
        )
    testing = () if training == layout.root else (training.parent / "Testing" / "img",)
    scans = numbered.by_number(layout, [training / "img"], SCAN)
    labels = numbered.by_number(layout, [training / "label"], LABEL)
    tests = numbered.by_number(layout, testing, SCAN)
    if not scans:
        raise DataError(
            f"site {layout.site}: {training / 'img'}: BTCV is expected, with img0001.nii.gz …; found none; see that all "
            "of it was unpacked"
        )
    return numbered.listing(layout, scans, labels, tests, table=TABLE, numbers=NUMBERS, release="BTCV")


DATASET = DataSet(
    name="btcv",
    kind="volumes",
    title="BTCV: RawData/Training/img/img0001.nii.gz and label/label0001.nii.gz …, Testing/img beside Training.",
    read=read,
    pixels="CT in HU",
)
