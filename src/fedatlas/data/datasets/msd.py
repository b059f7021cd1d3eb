"""Medical Segmentation Decathlon: dataset.json with its own lists of "training" and "test" files.

Source: http://medicaldecathlon.com (Antonelli et al., Nature Communications 13, 2022); licence CC BY-SA 4.0. The test
files of the release have no labels. Several modalities are the last axis of one 4D file, as MSD has them, or a list of
files. Of its ten tasks ConDistFL takes three, with splits of the labelled cases (training, validation, test):

    Task03_Liver      1 liver, 2 cancer       131 cases: 79, 26, 26
    Task07_Pancreas   1 pancreas, 2 cancer    281 cases: 169, 56, 56
    Task09_Spleen     1 spleen                 41 cases: 25, 8, 8

"cancer" of the liver and of the pancreas are two classes: give each an alias, `aliases: {cancer: liver tumour}`, and a
split, `split: {validation: 26, test: 26}`.
"""

from dataclasses import replace

from fedatlas.data.datasets import DataSet
from fedatlas.data.datasets.shared import datalist
from fedatlas.data.datasets.shared.listing import (
    Layout,
    Listing,
    Problem,
    names_of_channels,
    parse_table,
    read_json,
)


def read(layout: Layout) -> Listing:
    """The cases of the lists in dataset.json."""
    found = read_json(layout.root / layout.table, layout.site)
    where = f"site {layout.site}: {layout.root / layout.table}"
    names = found.get("modality", found.get("channel_names"))
    channels = len(names) if isinstance(names, dict | list) else None
    listing = datalist.listing(layout, found, parse_table(found.get("labels"), where), channels)
    listing = replace(listing, channel_names=names_of_channels(names))
    said, listed = found.get("numTraining"), len(found.get("training") or [])
    if isinstance(said, int) and said != listed:
        what = f'numTraining is {said}, the list "training" has {listed} entries'
        problem = Problem(layout.site, layout.table, what, "see that no case was left behind", False)
        listing = replace(listing, problems=(*listing.problems, problem))
    return listing


DATASET = DataSet(
    name="msd",
    kind="volumes",
    title="Medical Segmentation Decathlon: dataset.json with lists of training and test files.",
    read=read,
    has_table=True,
)
