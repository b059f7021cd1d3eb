"""MONAI datalist: a JSON file with lists "training", "validation" and "test", and a table "labels".

An entry is {"image": path or one path per channel, "label": path}, with two optional keys of ours:
"annotated", the label names drawn in it, and "patient". The key "fold" of Auto3DSeg is not used. Where a site
lists validation cases, those are its validation cases and none are split from the training cases.
"""

from dataclasses import replace

from fedatlas.data.datasets import DataSet
from fedatlas.data.datasets.shared import datalist
from fedatlas.data.datasets.shared.listing import Layout, Listing, names_of_channels, parse_table, read_json


def read(layout: Layout) -> Listing:
    """The cases of the three lists."""
    found = read_json(layout.root / layout.table, layout.site)
    where = f"site {layout.site}: {layout.root / layout.table}"
    listing = datalist.listing(layout, found, parse_table(found.get("labels"), where), None)
    names = found.get("channel_names", found.get("modality"))
    return replace(listing, channel_names=names_of_channels(names))


DATASET = DataSet(
    name="monai",
    kind="volumes",
    title="MONAI datalist: a JSON file with lists of training, validation and test entries.",
    read=read,
    has_table=True,
)
