"""What several verbs share: options, pairs of KEY=VALUE, the way a result is printed."""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedatlas.core.errors import FedAtlasError

INTERRUPTED = 130
"""The exit status after Ctrl-C."""


def federation(made: argparse.ArgumentParser, *override: str) -> None:
    """The federation file, and overrides of its keys. override: the flags of these, "-o" and "--override" if none is given."""
    made.add_argument("federation", type=Path, help="the federation file (YAML)")
    made.add_argument(
        *(override or ("-o", "--override")),
        dest="override",
        action="append",
        default=[],
        metavar="KEY.PATH=VALUE",
        help="override a key of the file",
    )


def runs(made: argparse.ArgumentParser) -> None:
    made.add_argument("--runs", type=Path, default=Path("runs"), help="folder of all runs (default: runs)")


def as_json(made: argparse.ArgumentParser) -> None:
    made.add_argument("--json", action="store_true", help="print the result as JSON")


def device(made: argparse.ArgumentParser) -> None:
    made.add_argument("--device", help="cpu, cuda, cuda:0, … (default: that of the run, if it is here)")


def trained_model(made: argparse.ArgumentParser, postprocess: str) -> None:
    """Of verbs that use a trained model on other images. postprocess: what `--postprocess` does there."""
    made.add_argument("--model", default="best", help="best, last or local/<site> (default: best)")
    device(made)
    made.add_argument(
        "--anyway",
        action="store_true",
        help="go on with images of another kind than the model was trained on",
    )
    made.add_argument("--quiet", action="store_true", help="show no progress on the terminal")
    made.add_argument(
        "--postprocess",
        action="store_true",
        help=f"{postprocess} (segmentation): the run's evaluation.postprocess, or else holes are filled and components "
        "under 20 %% of the largest of their class removed",
    )
    as_json(made)


OF_SCANS = ("table", "labels", "test_labels")
"""Options of `evaluate` that name what lies in a folder of scans."""


def only_of_voxels(arguments: argparse.Namespace) -> None:
    """Raises FedAtlasError where a run of findings of whole images is asked for what outlines alone have."""
    if arguments.postprocess:
        raise FedAtlasError(
            f"--postprocess: processes outlines, and {arguments.run} is a run of findings of whole images; leave it out"
        )
    for name in OF_SCANS:
        if getattr(arguments, name, None) is not None:
            flag = f"--{name.replace('_', '-')} {getattr(arguments, name)}"
            raise FedAtlasError(
                f"{flag}: is of folders of scans, and {arguments.run} is a run of findings of whole images; of these "
                "--reading names the table, as in --reading table=labels.csv"
            )


def require_known(arguments: argparse.Namespace) -> None:
    """Raises FederationError for a misspelt key of the file before anything heavy is imported."""
    from fedatlas.federation.yaml import require_known

    require_known(arguments.federation, arguments.override)


def pairs(flag: str, given: Sequence[str], form: str, example: str) -> dict[str, str]:
    """The values of an option that is given as LEFT=RIGHT, any number of times. form, example: for the error."""
    result = {}
    for text in given:
        left, equals, right = text.partition("=")
        if not (left and equals):
            raise FedAtlasError(f"{flag} {text}: expected {form}, as in {flag} {example}")
        if left in result:
            raise FedAtlasError(f"{flag} {text}: {left} was given as {result[left]} before; leave one out")
        result[left] = right
    return result


def reading(made: argparse.ArgumentParser) -> None:
    made.add_argument(
        "--reading",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an option of that format, as table=labels.csv, patient=subject or mask_suffix=_mask",
    )


def values(flag: str, given: Sequence[str], example: str) -> dict[str, Any]:
    """The values of an option that is given as KEY=VALUE, any number of times, each as a YAML file would hold it."""
    import yaml

    def plain(text: str) -> Any:
        try:
            return yaml.safe_load(text)
        except (yaml.YAMLError, ValueError):  # ValueError: a date that does not exist
            return text

    return {key: plain(value) for key, value in pairs(flag, given, "KEY=VALUE", example).items()}


def options_of_a_layout(given: Sequence[str]) -> dict[str, Any]:
    """The values of `--reading`."""
    return values("--reading", given, "table=labels.csv")


def layout(made: argparse.ArgumentParser) -> None:
    """How folders are read where that does not show."""
    made.add_argument(
        "--format", help="layout of the folder, one that `fedatlas list datasets` names (default: recognised)"
    )
    reading(made)


def planning(made: argparse.ArgumentParser) -> None:
    """What limits the proposals for training."""
    made.add_argument(
        "--memory",
        type=float,
        metavar="GIB",
        help="memory of a training step (default: 1 on a processor, 8 on a GPU)",
    )
    made.add_argument(
        "--dimensions",
        type=int,
        choices=[2, 3],
        help="train on slices (2) or blocks (3) (default: by spacing and device)",
    )


def require_positive(arguments: argparse.Namespace, *names: str) -> None:
    """Raises FedAtlasError where an option is given and is no number above 0."""
    for name in names:
        value = getattr(arguments, name)
        if value is not None and not 0 < value < 1e6:
            raise FedAtlasError(f"--{name} {value:g}: a number above 0 is expected")


def require_out(out: Path, overwrite: bool, flag: str = "-o") -> None:
    """Raises FedAtlasError where a file would be replaced that nobody gave up, or cannot be written. flag: by which it was
    named."""
    _require_file(out, flag)
    if out.exists() and not overwrite:
        raise FedAtlasError(
            f"{out}: exists already; give another name with {flag}, or replace it with --overwrite"
        )
    try:
        with tempfile.TemporaryFile(dir=next(folder for folder in out.absolute().parents if folder.exists())):
            pass
    except OSError as error:
        raise FedAtlasError(
            f"{flag} {out}: cannot be written ({error.strerror or error}); give another name"
        ) from None


def require_page(out: Path | None) -> None:
    """Raises FedAtlasError where a file would be replaced, by a page, that is none itself."""
    if out is None:
        return
    _require_file(out, "--out")
    if out.exists():
        with out.open("rb") as file:
            begins = file.read(64).lstrip().lower()
        if begins and not begins.startswith(b"<!doctype html"):
            raise FedAtlasError(f"--out {out}: exists already, and is no page; give another name")


def _require_file(out: Path, flag: str) -> None:
    if out.exists() and (not out.is_file() or out.absolute().parent == Path("/dev")):
        what = "a folder" if out.is_dir() else "a device or a pipe, which a file would replace"
        raise FedAtlasError(f"{flag} {out}: is {what}; give the name of a file")


def warn(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


def show(arguments: argparse.Namespace, result: Any, text: str) -> None:
    """Prints a result as JSON where `--json` is given, else as a text."""
    print(json.dumps(result, indent=1) if arguments.json else text)
