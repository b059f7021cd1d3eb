"""Medical Segmentation Decathlon: dataset.json with its own lists of "training" and "test" files.

Several modalities are the last axis of one 4D file, as MSD has them, or a list of files.
"""

from fedatlas.data.datasets import datalist
from fedatlas.data.datasets.listing import Layout, Listing, parse_table, read_json


def read(layout: Layout) -> Listing:
    """Medical Segmentation Decathlon: dataset.json with lists of training and test files."""
    found = read_json(layout.root / layout.table, layout.site)
    where = f"site {layout.site}: {layout.root / layout.table}"
    names = found.get("modality", found.get("channel_names"))
    channels = len(names) if isinstance(names, dict | list) else None
    return datalist.listing(layout, found, parse_table(found.get("labels"), where), channels)
