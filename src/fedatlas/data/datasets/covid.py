"""COVID-19 Radiography Database: 3,616 images with COVID-19, 10,192 normal, 6,012 with another lung opacity and 1,345
with viral pneumonia (counts of its second update), 299×299 PNG.

Chowdhury, Rahman, Khandakar, Mazhar, Kadir, Mahbub, Islam, Khan, Iqbal, Al Emadi, Reaz, Islam, "Can AI Help in Screening
Viral and COVID-19 Pneumonia?", IEEE Access 8, 2020; Rahman, Khandakar, Qiblawey, Tahir, Kiranyaz, Kashem, Islam,
Al Maadeed, Zughaier, Khan, Chowdhury, "Exploring the effect of image enhancement techniques on COVID-19 detection using
chest X-ray images", Computers in Biology and Medicine 132, 2021.
https://www.kaggle.com/datasets/tawsifurrahman/covid19-radiography-database

Licence: we know of none that allows redistribution. The images come from other collections (PadChest, SIRM, RSNA and
more), each with terms of its own; read these and the page above before use. Nothing of it is part of this package.

The counts are those that the publishers state. The layout is from memory of the public archive and from its mirrors:
`COVID-19_Radiography_Dataset/` with the folders `COVID/`, `Normal/`, `Lung_Opacity/` and `Viral Pneumonia/`, each with
`images/` and `masks/` (of lungs, not read), and a metadata table for each, which names no patients and is not read.
Images that lie in these folders themselves are read, too. The folder may be the site's own or lie in it. Every image counts as its own patient, which the data cannot confirm.

FedPSL has 262 positives among 1,000 images (its Table III): the share of COVID-19 among COVID-19 and normal images
(26.2 %), not among all (17.1 %). So its negatives seem to be the normal images only: `negatives: [Normal]`.

A caution: normal and opacity images from RSNA were taken out of ChestX-ray14, at another size. A federation of both may
train at one site on what it tests at the other, and neither names nor file contents show it.
"""

from typing import Literal

from fedatlas.core.options import option, options
from fedatlas.data.datasets import DataSet
from fedatlas.data.datasets.shared.findings import read_folders
from fedatlas.data.datasets.shared.listing import Layout, Listing

SOURCE = "COVID-19 Radiography Database"
FOLDERS = ("COVID-19_Radiography_Dataset", "COVID-19 Radiography Database")
CLASSES = ("COVID-19",)


@options
class Covid:
    """Which part of the COVID-19 Radiography Database a site holds."""

    negatives: tuple[Literal["Normal", "Lung_Opacity", "Viral Pneumonia"], ...] = option(
        ("Normal", "Lung_Opacity", "Viral Pneumonia"),
        "Folders in which COVID-19 is verified absent; others are not read.",
        min_length=1,
    )


def read(layout: Layout) -> Listing:
    """The folder COVID and those of `negatives`, split per image by seed, with the same share of COVID-19 in every
    split.

    The one class is COVID-19. Raises DataError for a folder that is missing.
    """
    form: Covid = layout.options
    base = next((layout.root / name for name in FOLDERS if (layout.root / name).is_dir()), layout.root)
    folders = {"COVID": (CLASSES, ()), **{name: ((), CLASSES) for name in form.negatives}}
    return read_folders(layout, base, folders, classes=CLASSES, source=SOURCE)


DATASET = DataSet(
    name="covid",
    kind="findings",
    title="COVID-19 Radiography Database: the folders COVID, Normal, Lung_Opacity and Viral Pneumonia.",
    read=read,
    pixels="grey or colour",
    options=Covid,
)
