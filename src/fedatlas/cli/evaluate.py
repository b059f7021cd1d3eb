"""`fedatlas evaluate`: scores a trained model on any folder with ground truth."""

import argparse
import json
from pathlib import Path

from fedatlas.cli import shared
from fedatlas.cli.progress import Counter
from fedatlas.core.errors import FedAtlasError

NAME = "evaluate"
SENTENCE = "Score a trained model on any folder with ground truth."
EXAMPLE = "fedatlas evaluate runs/demo-1a2b3c4d --data site-x/"


def options(made: argparse.ArgumentParser) -> None:
    made.add_argument("run", type=Path, help="the run folder")
    made.add_argument(
        "--data",
        type=Path,
        required=True,
        help="a folder as a site has it; its layout: --format. One of the run's own sites is read as the federation file "
        "says of it, where the options here say nothing else",
    )
    made.add_argument(
        "--table", help="of scans: file in that folder with the label table (default: dataset.json)"
    )
    made.add_argument("--labels", help="of scans: folder of training labels in it (default: labelsTr)")
    made.add_argument("--test-labels", help="of scans: folder of test labels in it (default: labelsTs)")
    made.add_argument(
        "--format",
        help="layout of the folder, one that `fedatlas list datasets` names; default: csv for findings of whole images, "
        "auto (nnunet, msd or monai) for segmentation",
    )
    shared.reading(made)
    made.add_argument(
        "--alias",
        action="append",
        default=[],
        metavar="THEIRS=OURS",
        help="another name of a class or finding",
    )
    made.add_argument("-o", "--out", type=Path, help="write all rows to this CSV file")
    made.add_argument("--overwrite", action="store_true", help="replace that file if it exists")
    shared.trained_model(made, "score once more after post-processing")


def call(arguments: argparse.Namespace) -> int:
    from fedatlas.federation.trained import evaluate_folder, evaluation_table, image_table, task_name

    if arguments.out:
        shared.require_out(arguments.out, arguments.overwrite, "--out")
    aliases = shared.pairs("--alias", arguments.alias, "THEIRS=OURS", "cord=spinal_cord")
    reading = shared.options_of_a_layout(arguments.reading)
    of_images = task_name(arguments.run) == "classification"
    if not arguments.data.is_dir():
        what = "is a file" if arguments.data.exists() else "no such folder"
        raise FedAtlasError(
            f"--data {arguments.data}: {what}; give a folder of images and labels, as a site has it"
        )
    if of_images:
        shared.only_of_voxels(arguments)
    names = ("model", "out", "device", "anyway", "format")
    tables = {name: given for name in shared.OF_SCANS if (given := getattr(arguments, name)) is not None}
    notes: list[str] = []

    def warn(text: str) -> None:
        notes.append(text)
        shared.warn(text)

    with Counter(arguments.quiet) as counter:
        rows, ignored = evaluate_folder(
            arguments.run,
            arguments.data,
            aliases=aliases,
            reading=reading,
            post=arguments.postprocess,
            warn=warn,
            seen=counter.seen,
            **{name: getattr(arguments, name) for name in names},
            **tables,
        )
    if arguments.json:
        print(json.dumps({"rows": rows, "ignored": ignored, "notes": notes}, indent=1))
    else:
        print(image_table(rows) if of_images else evaluation_table(rows))
        if ignored:
            print(f"not scored, the model does not know them: {', '.join(ignored)}")
    return 0
