"""`format: auto`: which of the layouts with a label table a folder has."""

import os
from pathlib import Path

from fedatlas.core.errors import DataError
from fedatlas.data.datasets import names
from fedatlas.data.datasets.shared.listing import Layout, read_json
from fedatlas.data.datasets.shared.pictures import PICTURES


def detect(layout: Layout) -> str:
    """The layout of a folder, from its table file: without `training` it is nnU-Net raw; with
    the keys of MSD it is that; else a MONAI datalist. Raises DataError where there is no such file, or `training` is no list."""
    table = layout.root / layout.table
    picture = None if table.is_file() else _first_picture(layout.root)
    if picture:
        others = ", ".join(name for name in names("masks") if name != "masks")
        raise DataError(
            f"site {layout.site}: {layout.root}: no {layout.table}, by which scans are read, and pictures, as {picture}; "
            f"set `format: masks` for a folder of masks per class, or one of {others}"
        )
    found = read_json(table, layout.site)
    training = found.get("training")
    if training is None:
        return "nnunet"
    if not isinstance(training, list):
        raise DataError(
            f"site {layout.site}: {table}: training is a {type(training).__name__}; expected is a list of entries, as MSD and MONAI "
            "have it, or no such key, as nnU-Net has it"
        )
    return "msd" if "modality" in found or "tensorImageSize" in found else "monai"


def _first_picture(root: Path) -> str:
    """The first picture in a folder or those in it, as it is shown; empty if there is none."""
    for base, folders, files in os.walk(root):
        folders[:] = sorted(f for f in folders if not f.startswith("."))
        for name in sorted(files):
            if not name.startswith(".") and Path(name).suffix.lower() in (*PICTURES, ".img"):
                return str(Path(base, name).relative_to(root))
    return ""
