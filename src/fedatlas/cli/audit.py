"""`fedatlas audit`: shows what left a hospital."""

import argparse
from pathlib import Path

from fedatlas.cli import shared

NAME = "audit"
SENTENCE = "Show what left a hospital: when, what, how many bytes, which digest."
EXAMPLE = "fedatlas audit deploy/site-a"


def options(made: argparse.ArgumentParser) -> None:
    made.add_argument("folder", type=Path, help="a hospital's folder, a site's in a run, or a run")
    made.add_argument("--full", action="store_true", help="every tensor with its shape")
    shared.as_json(made)


def call(arguments: argparse.Namespace) -> int:
    from fedatlas.federation.audit import logs_of, text_of

    logs = logs_of(arguments.folder)
    shared.show(arguments, logs, text_of(logs, full=arguments.full))
    return 1 if any(line["broken"] for lines in logs.values() for line in lines) else 0
