"""Tuberculosis (TB) Chest X-ray Database: 700 images with tuberculosis and 3,500 normal ones, 512×512 PNG.

Rahman, Khandakar, Kadir, Islam, Islam, Mazhar, Hamid, Islam, Kashem, Mahbub, Ayari, Chowdhury, "Reliable Tuberculosis
Detection Using Chest X-Ray With Deep Learning, Segmentation and Visualization", IEEE Access 8, 2020.
https://www.kaggle.com/datasets/tawsifurrahman/tuberculosis-tb-chest-xray-dataset

Licence: we know of none that allows redistribution. The images come from other collections (NLM Montgomery and Shenzhen,
Belarus, RSNA), each with terms of its own; read these and the page above before use. Nothing of it is part of this
package.

From the paper: the sources, the two classes, the size of the images. The layout is from memory of the public archive and
from its mirrors: `TB_Chest_Radiography_Database/` with the folders `Tuberculosis/` and `Normal/` (Tuberculosis-1.png,
Normal-1.png …) and a metadata table for each, which names sources but no patients and is not read. The folder may be the
site's own or lie in it. So every image counts as its own patient here, which the data cannot confirm.

The share of positives, 700 of 4,200, is that of FedPSL's Table III (167 of 1,000 images).

A caution: normal images from RSNA were taken out of ChestX-ray14, at another size. A federation of both may train at one
site on what it tests at the other, and neither names nor file contents show it.
"""

from fedatlas.data.datasets import DataSet
from fedatlas.data.datasets.shared.findings import read_folders
from fedatlas.data.datasets.shared.listing import Layout, Listing

SOURCE = "Tuberculosis Chest X-ray Database"
FOLDER = "TB_Chest_Radiography_Database"
CLASSES = ("Tuberculosis",)


def read(layout: Layout) -> Listing:
    """The two folders, split per image by seed, with the same share of tuberculosis in every split.

    The one class is Tuberculosis: present in one folder, verified absent in the other. Raises DataError for a folder
    that is missing.
    """
    base = layout.root / FOLDER if (layout.root / FOLDER).is_dir() else layout.root
    folders = {"Tuberculosis": (CLASSES, ()), "Normal": ((), CLASSES)}
    return read_folders(layout, base, folders, classes=CLASSES, source=SOURCE)


DATASET = DataSet(
    name="tbx",
    kind="findings",
    title="Tuberculosis Chest X-ray Database: the folders Tuberculosis and Normal.",
    read=read,
    pixels="grey or colour",
)
