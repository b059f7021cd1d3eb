"""The layouts in which a site may keep its data. A reader turns a folder into a `Listing`; it reads no voxels."""

from collections.abc import Callable, Mapping

from fedatlas.data.datasets import monai_datalist, msd, nnunet
from fedatlas.data.datasets.listing import Layout, Listing, read_json

REGISTRY: Mapping[str, Callable[[Layout], Listing]] = {
    "nnunet": nnunet.read,
    "msd": msd.read,
    "monai": monai_datalist.read,
}


def detect(layout: Layout) -> str:
    """The layout of a folder, from its table file: with no list of training entries it is nnU-Net raw; with
    the keys of MSD it is that; else a MONAI datalist."""
    found = read_json(layout.root / layout.table, layout.site)
    if not isinstance(found.get("training"), list):
        return "nnunet"
    return "msd" if "modality" in found or "tensorImageSize" in found else "monai"
