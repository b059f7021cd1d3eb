"""The files of experiments/condistfl on fake folders in the exact layouts of the nine data sets."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from data.fake_sets import write_jsrt, write_montgomery, write_shenzhen, write_siim
from data.fake_volumes import MSD_TASKS, write_amos22, write_kits19, write_msd

from fedatlas.experiment import Federation, load_federation, read_yaml

FOLDER = Path(__file__).parents[2] / "experiments" / "condistfl"
CT, XRAY = FOLDER / "ct-federation.yaml", FOLDER / "xray-federation.yaml"
FEDERATIONS = sorted(FOLDER.glob("*federation.yaml"))
COMPARISONS = sorted({*FOLDER.glob("*.yaml")} - {*FEDERATIONS})
ARMS = [(file, arm) for file in COMPARISONS for arm in read_yaml(file)["arms"]]

LUNGS = {"left lung", "right lung"}
ORGANS = {"kidney", "liver", "pancreas", "spleen"}
# Tables 2 and 3: site -> (what it annotates for training, its training, validation and test cases)
TABLE_2 = {
    "kits19": ({"kidney", "kidney tumour"}, (126, 42, 42)),
    "liver": ({"liver", "liver tumour"}, (79, 26, 26)),
    "pancreas": ({"pancreas", "pancreas tumour"}, (169, 56, 56)),
    "spleen": ({"spleen"}, (25, 8, 8)),
    "amos22": (set[str](), (0, 0, 300)),
}
TABLE_3 = {
    "montgomery": ({"left lung"}, (82, 27, 29)),
    "shenzhen": ({"right lung"}, (232, 77, 79)),
    "jsrt": ({"heart"}, (147, 49, 50)),
    "siim": ({"pneumothorax"}, (7226, 2410, 2411)),
}
# The stars of Table 5
STARRED = {"montgomery": {"right lung"}, "shenzhen": {"left lung"}, "jsrt": LUNGS, "siim": set[str]()}
STARS = {f"{site}/{name}" for site, names in STARRED.items() for name in names}
# Labelled cases of a data set, as published or, of Shenzhen, as the paper counts them
SIZES = {"kits19": 210, "liver": 131, "pancreas": 281, "spleen": 41}
SIZES |= {"montgomery": 138, "shenzhen": 388, "jsrt": 247, "siim": 12047}
MEGABYTE = 2**20
SIDE = 32
"""Rows and columns of the radiographs of JSRT and SIIM-ACR, here."""


# ------------------------------------------------------------------------------------------------- fake folders


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data sets under the names that the federation files give them: of each two cases to train on."""
    root = tmp_path_factory.mktemp("condistfl")
    write_kits19(root / "kits19", cases=4)
    for task in MSD_TASKS:
        write_msd(root, task, cases=4)
    write_amos22(root / "amos22", train=(1, 1), validation=(1, 0))
    write_montgomery(root / "montgomery", cases=4)
    write_shenzhen(root / "shenzhen", cases=5)
    write_jsrt(root / "jsrt", cases=4, side=SIDE)
    write_siim(root / "siim", cases=16, side=SIDE)
    return root


def small(federation: Federation, cache: Path, **evaluation: Any) -> Federation:
    """The federation on coarse grids and one small step a round; net, losses, methods and phases are its own."""
    sites = []
    for site in federation.sites:
        if site.name in ("jsrt", "siim"):
            site = replace(site, reading={"side": SIDE})
        if site.split and site.name != "siim":
            site = replace(site, split=replace(site.split, validation=1, test=1))
        sites.append(site)
    preprocessing = federation.preprocessing
    assert preprocessing is not None
    if preprocessing.size is None:
        # the least that leaves the lowest level of each net two voxels
        patch = (64, 32, 16) if federation.net["name"] == "unet" else (32, 16, 16)
        preprocessing = replace(preprocessing, spacing=(7.0, 7.0, 7.0), patch=patch)
    else:
        preprocessing = replace(preprocessing, size=(64, 64), patch=(64, 64))
    scored: dict[str, Any] = {"metrics": ("dice",), "overlays": False} | evaluation
    return replace(
        federation,
        sites=tuple(sites),
        preprocessing=preprocessing,
        local=replace(federation.local, batch=2, steps=1, epochs=None),
        evaluation=replace(federation.evaluation, **scored),
        engine=replace(federation.engine, cache=str(cache)),
    )


def at(file: Path, folders: Path) -> Federation:
    """A federation file, beside which the data sets lie."""
    return load_federation(file, paths(file, folders))


def paths(file: Path, folders: Path) -> list[str]:
    sites = load_federation(file).sites
    return [f"sites.{site.name}.path={folders / Path(site.path or '').name}" for site in sites]
