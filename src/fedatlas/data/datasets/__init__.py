"""The layouts in which a site may keep its data. A reader turns a folder into a `Listing`; it reads no voxels."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedatlas.core.errors import DataError
from fedatlas.data.datasets import (
    abdomenct1k,
    amos22,
    btcv,
    jsrt,
    kits19,
    lits,
    masks,
    monai_datalist,
    montgomery,
    msd,
    nnunet,
    shenzhen,
    siim,
    word,
)
from fedatlas.data.datasets.listing import Layout, Listing, read_json

REGISTRY: Mapping[str, Callable[[Layout], Listing]] = {
    "nnunet": nnunet.read,
    "msd": msd.read,
    "monai": monai_datalist.read,
    "kits19": kits19.read,
    "amos22": amos22.read,
    "lits": lits.read,
    "btcv": btcv.read,
    "word": word.read,
    "abdomenct1k": abdomenct1k.read,
    "masks": masks.read,
    "montgomery": montgomery.read,
    "shenzhen": shenzhen.read,
    "jsrt": jsrt.read,
    "siim": siim.read,
}
"""format -> its reader."""

OPTIONS: Mapping[str, type[Any]] = {
    "amos22": amos22.Amos22,
    "word": word.Word,
    "abdomenct1k": abdomenct1k.AbdomenCT1K,
    "masks": masks.Masks,
    "montgomery": montgomery.Montgomery,
    "shenzhen": shenzhen.Shenzhen,
    "jsrt": jsrt.Jsrt,
    "siim": siim.Siim,
}
"""format -> the class of the site's key `reading`, for those that have options."""


def detect(layout: Layout) -> str:
    """The layout of a folder, from its table file: with no list of training entries it is nnU-Net raw; with
    the keys of MSD it is that; else a MONAI datalist. Raises DataError where there is no such file."""
    table = layout.root / layout.table
    picture = None if table.is_file() else _first_picture(layout.root)
    if picture:
        raise DataError(
            f"site {layout.site}: {layout.root}: no {layout.table}, by which scans are read, and pictures, as {picture}; "
            "set `format: masks` for a folder of masks per class, or montgomery, shenzhen, jsrt or siim"
        )
    found = read_json(layout.root / layout.table, layout.site)
    if not isinstance(found.get("training"), list):
        return "nnunet"
    return "msd" if "modality" in found or "tensorImageSize" in found else "monai"


def _first_picture(root: Path) -> str:
    """The first picture in a folder or those in it, as it is shown; empty if there is none."""
    for base, folders, files in os.walk(root):
        folders[:] = sorted(f for f in folders if not f.startswith("."))
        for name in sorted(files):
            if not name.startswith(".") and Path(name).suffix.lower() in (*masks.PICTURES, ".img"):
                return str(Path(base, name).relative_to(root))
    return ""
