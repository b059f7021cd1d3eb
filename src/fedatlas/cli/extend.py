"""`fedatlas extend`: a federation file that goes on from a run."""

import argparse
from pathlib import Path
from shlex import quote

NAME = "extend"
SENTENCE = "Write a federation file that goes on from a run, with sites that join and new classes."
EXAMPLE = "fedatlas extend runs/trial new-site.yaml -o extended.yaml"


def options(made: argparse.ArgumentParser) -> None:
    made.add_argument("run", type=Path, help="the run's folder")
    made.add_argument(
        "file", type=Path, help="what is new, as keys of a federation file: sites, labels, rounds, …"
    )
    made.add_argument("-o", "--out", type=Path, required=True, help="the federation file to write")
    made.add_argument(
        "--model", default="best", choices=("best", "last"), help="which to go on from (default: best)"
    )
    made.add_argument(
        "--without", action="append", default=[], metavar="SITE", help="a site of the run that takes no part"
    )


def call(arguments: argparse.Namespace) -> int:
    from fedatlas.federation.extend import extend

    told = extend(
        arguments.run, arguments.file, arguments.out, model=arguments.model, without=arguments.without
    )
    out = quote(str(arguments.out))
    print("\n".join([*told, f"next: fedatlas check {out}, then fedatlas run {out}"]))
    return 0
