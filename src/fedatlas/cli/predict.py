"""`fedatlas predict`: segments scans or pictures, or tells the findings of images."""

import argparse
import json
import os
from pathlib import Path
from typing import Any

from fedatlas.cli import shared
from fedatlas.cli.progress import Counter

NAME = "predict"
SENTENCE = "Segment scans or pictures, in their own geometry, or tell the findings of images."
EXAMPLE = "fedatlas predict runs/demo-1a2b3c4d scan.nii.gz -o out/"


def options(made: argparse.ArgumentParser) -> None:
    made.add_argument("run", type=Path, help="the run folder")
    made.add_argument(
        "scan",
        type=Path,
        nargs="+",
        help="scans: NIfTI files, those of several channels joined by commas; pictures: PNG, JPEG, TIFF, BMP, GIF or DICOM; "
        "findings: PNG, JPEG or DICOM",
    )
    made.add_argument(
        "-o",
        "--out",
        type=Path,
        required=True,
        help="folder for the result. Scans: a label map each; pictures: labels/<name>.png or masks/<class>/<name>.png, and "
        "predictions.csv; both: classes.json. Findings: findings.csv",
    )
    made.add_argument("--overwrite", action="store_true", help="replace results that are there already")
    shared.trained_model(made, "write labels after post-processing")


def call(arguments: argparse.Namespace) -> int:
    from fedatlas.federation.predict import predict_scans
    from fedatlas.federation.trained import task_name

    if task_name(arguments.run) == "classification":
        return _predict_images(arguments)
    scans = [_files_of(scan) for scan in arguments.scan]
    chosen = _prediction(arguments) | {"post": arguments.postprocess}
    with Counter(arguments.quiet) as counter:
        result = predict_scans(arguments.run, scans, arguments.out, **chosen, seen=counter.seen)
    if arguments.json:
        print(json.dumps(result, indent=1))
    else:
        for entry in result["scans"]:
            results = [f"{name} {volume:.1f} ml" for name, volume in entry["millilitres"].items()]
            results += [f"{name} {count:,} pixels" for name, count in entry.get("pixels", {}).items()]
            results += [f"{name} {p:.3f}" for name, p in entry.get("findings", {}).items()]
            print(f"{entry['labels']}: {', '.join(results) or 'nothing found'}")
    return 0


def _predict_images(arguments: argparse.Namespace) -> int:
    from fedatlas.federation.predict import predict_images

    shared.only_of_voxels(arguments)
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
