"""`fedatlas demo`: trains on the images that come with the package."""

import argparse

from fedatlas.cli import shared
from fedatlas.core.errors import FedAtlasError

NAME = "demo"
SENTENCE = "Train on the real images that come with the package, and say what to look at."
EXAMPLE = "fedatlas demo"

FILES = {"compare": "demo.yaml", "ct": "quickstart.yaml", "xray": "quickstart-xray.yaml"}
SCAN = {"ct": "site-a/imagesTs", "xray": "chest-xray/site-a/images"}


def options(made: argparse.ArgumentParser) -> None:
    made.add_argument(
        "which",
        nargs="?",
        default="compare",
        choices=FILES,
        help="compare: one model of four sites' CT beside FedAvg and each site alone (default); ct: the first of these alone; "
        "xray: findings of chest X-rays of three sites",
    )
    made.add_argument(
        "-o",
        "--override",
        action="append",
        default=[],
        metavar="KEY.PATH=VALUE",
        help="override a key of the federation file, as -o rounds=2; of ct and xray",
    )
    shared.runs(made)


def call(arguments: argparse.Namespace) -> int:
    from fedatlas.cli import main
    from fedatlas.data.samples import path

    which, folder = arguments.which, path()
    file, runs = folder / FILES[which], ["--runs", str(arguments.runs)]
    print(f"the file that says what is done: {file}", flush=True)
    if which == "compare":
        if arguments.override:
            raise FedAtlasError(
                f"-o {arguments.override[0]}: changes one federation, and `demo compare` trains three arms of one budget; use "
                "`fedatlas demo ct`, or copy the file and change it"
            )
        return main(["compare", str(file), *runs])
    chosen = [part for text in arguments.override for part in ("-o", text)]
    status = main(["run", str(file), "--resume", *runs, *chosen])
    if not status:
        image = sorted(p for p in (folder / SCAN[which]).rglob("*") if p.name.endswith((".nii.gz", ".png")))[
            0
        ]
        print(
            f"try:      fedatlas predict RUN {image} -o out/, where RUN is the folder above\n"
            "your own: copy the file, and give your folders in the place of its sites"
        )
    return status
