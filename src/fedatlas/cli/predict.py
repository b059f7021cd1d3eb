"""`fedatlas predict`: segments scans or pictures, or tells the findings of images."""

import argparse
import json
import os
from pathlib import Path
from typing import Any

from fedatlas.cli import shared
from fedatlas.cli.progress import Counter
from fedatlas.core.errors import FedAtlasError

NAME = "predict"
SENTENCE = "Segment scans or pictures, in their own geometry, or tell the findings of images."
EXAMPLE = "fedatlas predict runs/demo-1a2b3c4d scan.nii.gz -o out/"


def options(made: argparse.ArgumentParser) -> None:
    made.add_argument("run", type=Path, help="the run folder")
    made.add_argument(
        "scan",
        type=Path,
        nargs="*",
        help="scans: NIfTI files, those of several channels joined by commas, or folders, zip or files with series in DICOM; "
        "pictures: PNG, JPEG, TIFF, BMP, GIF or DICOM; findings: PNG, JPEG or DICOM",
    )
    made.add_argument(
        "-o",
        "--out",
        type=Path,
        help="folder for the result, which only --store can do without. Scans: a label map each; pictures: labels/<name>.png or masks/<class>/<name>.png, and "
        "predictions.csv, which scans have where the model tells findings, too; both: classes.json. Findings: findings.csv",
    )
    made.add_argument(
        "--as",
        dest="form",
        choices=("nifti", "seg", "rtstruct"),
        help="what labels of a DICOM series are written as: NIfTI, DICOM SEG or RTSTRUCT (default: nifti; with --store seg)",
    )
    made.add_argument(
        "--series",
        action="append",
        default=[],
        metavar="UID",
        help="the DICOM series to predict, by UID or by the name that fedatlas gives it; once for each",
    )
    pacs = made.add_argument_group("a PACS with DICOMweb, in place of SCAN")
    pacs.add_argument(
        "--dicomweb", metavar="URL", help="fetch the series from there, as https://pacs/dicom-web"
    )
    pacs.add_argument("--store", action="store_true", help="store the result there")
    pacs.add_argument(
        "--credentials",
        type=Path,
        metavar="FILE",
        help="YAML with user and password, or token, that nobody else can read; or set FEDATLAS_PACS_USER and "
        "FEDATLAS_PACS_PASSWORD, or FEDATLAS_PACS_TOKEN",
    )
    pacs.add_argument(
        "--timeout", type=float, metavar="SECONDS", help="wait so long for it, at most (default: 30)"
    )
    made.add_argument("--overwrite", action="store_true", help="replace results that are there already")
    shared.trained_model(made, "write labels after post-processing")


def call(arguments: argparse.Namespace) -> int:
    _require_whole(arguments)
    from fedatlas.federation.predict import predict_scans
    from fedatlas.federation.trained import task_name

    if task_name(arguments.run) == "classification":
        return _predict_images(arguments)
    scans = [_files_of(scan) for scan in arguments.scan]
    chosen = _prediction(arguments) | {"post": arguments.postprocess, "series": arguments.series}
    if arguments.dicomweb:
        from fedatlas.federation.pacs import Credentials, Pacs

        chosen["pacs"] = Pacs(
            arguments.dicomweb,
            Credentials.read(arguments.credentials),
            30.0 if arguments.timeout is None else arguments.timeout,
        )
        chosen["store"] = arguments.store
        if chosen["pacs"].in_the_clear:
            shared.warn(f"{arguments.dicomweb}: images cross the network without encryption; use https")
    chosen["form"] = arguments.form or ("seg" if arguments.store else "nifti")
    with Counter(arguments.quiet) as counter:
        result = predict_scans(arguments.run, scans, arguments.out, **chosen, seen=counter.seen)
    if arguments.json:
        print(json.dumps(result, indent=1))
    else:
        for entry in result["scans"]:
            results = [f"{name} {volume:.1f} ml" for name, volume in entry["millilitres"].items()]
            results += [f"{name} {count:,} pixels" for name, count in entry.get("pixels", {}).items()]
            results += [f"{name} {p:.3f}" for name, p in entry.get("findings", {}).items() if p is not None]
            print(f"{entry['labels']}: {', '.join(results) or 'nothing found'}")
        if result["stored"]:
            print(f"stored at {arguments.dicomweb}: {result['stored']} ({chosen['form']})")
    return 0


def _require_whole(arguments: argparse.Namespace) -> None:
    """Raises FedAtlasError for options that do not go together, before anything heavy is imported."""
    if bool(arguments.scan) == bool(arguments.dicomweb):
        given = "both" if arguments.scan else "neither"
        raise FedAtlasError(f"predict: give scans, or a PACS with --dicomweb and --series; got {given}")
    if not arguments.dicomweb:
        for flag in ("store", "credentials", "timeout"):
            if getattr(arguments, flag):
                raise FedAtlasError(f"--{flag}: is for a PACS; give it with --dicomweb")
    elif not arguments.series:
        raise FedAtlasError("--dicomweb: which series? Give its Series Instance UID with --series")
    if arguments.store and arguments.form == "nifti":
        raise FedAtlasError("--store: a PACS takes DICOM; give --as seg or --as rtstruct")
    if arguments.out is not None and arguments.out.exists() and not arguments.out.is_dir():
        raise FedAtlasError(f"-o {arguments.out}: is a file; give a folder for the result")
    if arguments.out is None and not arguments.store:
        raise FedAtlasError("-o: the folder for the result is missing; give one, or store it with --store")


def _predict_images(arguments: argparse.Namespace) -> int:
    from fedatlas.federation.predict import predict_images

    shared.only_of_voxels(arguments)
    for flag in ("form", "series", "dicomweb"):
        if getattr(arguments, flag):
            raise FedAtlasError(
                f"--{'as' if flag == 'form' else flag}: is for outlines of scans, and {arguments.run} is a run of findings "
                "of whole images; leave it out"
            )
    with Counter(arguments.quiet) as counter:
        result = predict_images(
            arguments.run, arguments.scan, arguments.out, seen=counter.seen, **_prediction(arguments)
        )
    if arguments.json:
        print(json.dumps(result, indent=1))
        return 0
    for entry in result["images"]:
        probabilities = {name: f"{p:.3f}" for name, p in entry["probability"].items() if p is not None}
        results = [
            name + (" *" if entry["present"].get(name) else "") + f" {text}"
            for name, text in probabilities.items()
        ]
        print(f"{entry['image']}: {', '.join(results)}")
    if any(limit is not None for limit in result["thresholds"].values()):
        print("* at or above the threshold that was fitted in the run")
    for name, reason in result["no_threshold"].items():
        print(f"{name}: probabilities only, no threshold ({reason})")
    print(f"table: {result['table']}")
    return 0


def _prediction(arguments: argparse.Namespace) -> dict[str, Any]:
    given = {name: getattr(arguments, name) for name in ("model", "device", "overwrite", "anyway")}
    return given | {"warn": shared.warn}


def _files_of(scan: Path) -> list[Path]:
    """The files of one scan, joined by commas, unless the comma is in the name of a file that is there."""
    text = str(scan)
    return [scan] if "," not in text or os.path.exists(text) else [Path(part) for part in text.split(",")]
