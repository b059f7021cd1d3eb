"""`fedatlas export`: writes a model for others: a MONAI bundle, ONNX or safetensors."""

import argparse
from pathlib import Path

from fedatlas.cli import shared

NAME = "export"
SENTENCE = "Write a model for others to use: a MONAI bundle, ONNX or safetensors, with a model card."
EXAMPLE = "fedatlas export runs/demo-1a2b3c4d --to bundle -o liver-bundle/"


def options(made: argparse.ArgumentParser) -> None:
    made.add_argument("run", type=Path, help="the run folder")
    made.add_argument(
        "--to",
        required=True,
        metavar="FORM",
        help="bundle: `python -m monai.bundle run` predicts scans; onnx: the net, for any runtime; safetensors: the weights",
    )
    made.add_argument(
        "-o", "--out", type=Path, help="the folder to write (default: exports/FORM in the run folder)"
    )
    made.add_argument("--model", default="best", help="best, last or local/<site> (default: best)")
    made.add_argument("--overwrite", action="store_true", help="replace an export that is there already")
    shared.as_json(made)


def call(arguments: argparse.Namespace) -> int:
    from fedatlas.export.forms import export

    made = export(
        arguments.run,
        arguments.to,
        arguments.out,
        model=arguments.model,
        overwrite=arguments.overwrite,
        warn=shared.warn,
    )
    lines = [f"{made['out']}: {', '.join(made['files'])}", f"read first: {made['out']}/model_card.md"]
    if "largest_difference" in made:
        lines.insert(1, f"onnxruntime differs from the net by at most {made['largest_difference']:.2g}")
    shared.show(arguments, made, "\n".join(lines))
    return 0
