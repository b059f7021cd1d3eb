"""`fedatlas demo`: trains on the images that come with the package, or writes them as hospitals' folders of DICOM."""

import argparse
from pathlib import Path
from shlex import quote

from fedatlas.cli import shared
from fedatlas.core.errors import FedAtlasError

NAME = "demo"
SENTENCE = (
    "Train on the real images that come with the package, or write them as hospitals' folders of DICOM."
)
EXAMPLE = "fedatlas demo"

FILES = {"compare": "demo.yaml", "ct": "quickstart.yaml", "xray": "quickstart-xray.yaml"}
SCAN = {"compare": "site-a/imagesTs", "ct": "site-a/imagesTs", "xray": "chest-xray/site-a/images"}


def options(made: argparse.ArgumentParser) -> None:
    made.add_argument(
        "which",
        nargs="?",
        default="compare",
        choices=(*FILES, "dicom"),
        help="compare: one model of four sites' CT beside FedAvg and each site alone (default); ct: the first of these alone; "
        "xray: findings of chest X-rays of three sites; dicom: train nothing, and write CT of two hospitals as DICOM, with SEG and RTSTRUCT",
    )
    made.add_argument(
        "-o",
        "--override",
        action="append",
        default=[],
        metavar="KEY.PATH=VALUE",
        help="override a key of the federation file, as -o rounds=2; of ct and xray",
    )
    made.add_argument(
        "--out", type=Path, help="of dicom: a new folder for the hospitals' folders (default: hospitals)"
    )
    shared.runs(made)


def call(arguments: argparse.Namespace) -> int:
    from fedatlas.cli import main
    from fedatlas.data.samples import path

    which, folder = arguments.which, path()
    if which == "dicom":
        return _write_hospitals(arguments)
    if arguments.out is not None:
        raise FedAtlasError(f"--out {arguments.out}: is for `fedatlas demo dicom`; runs go into --runs")
    file, runs = folder / FILES[which], ["--runs", str(arguments.runs)]
    print(f"the file that says what is done: {file}", flush=True)
    if which == "compare":
        if arguments.override:
            raise FedAtlasError(
                f"-o {arguments.override[0]}: changes one federation, and `demo compare` trains three arms of one budget; use "
                "`fedatlas demo ct`, or copy the file and change it"
            )
        status = main(["compare", str(file), *runs])
        run, where = str(arguments.runs / "demo" / "fedatlas-s0"), ""
    else:
        chosen = [part for text in arguments.override for part in ("-o", text)]
        status = main(["run", str(file), "--resume", *runs, *chosen])
        run, where = "RUN", ", where RUN is the folder above"
    if not status:
        image = min(p for p in (folder / SCAN[which]).rglob("*") if p.name.endswith((".nii.gz", ".png")))
        print(
            f"try:      fedatlas predict {quote(run)} {quote(str(image))} -o out/{where}\n"
            "your own: copy the file, and give your folders in the place of its sites"
        )
    return status


def _write_hospitals(arguments: argparse.Namespace) -> int:
    from fedatlas.data.exports import write_hospitals

    if arguments.override:
        raise FedAtlasError(
            f"-o {arguments.override[0]}: is for demos that train, and `demo dicom` trains nothing; leave it out"
        )
    out = arguments.out or Path("hospitals")
    for name, text in write_hospitals(out).items():
        print(f"{out / name}: {text}")
    print("try:      fedatlas describe " + f"{out / 'north'} -o north.json; docs/how-to/hospital.md goes on")
    return 0
