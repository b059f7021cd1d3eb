"""`fedatlas plan`: what the rules propose for a federation file, and what a run of it will take."""

import argparse
from pathlib import Path

from fedatlas.cli import shared
from fedatlas.cli.progress import Counter

NAME = "plan"
SENTENCE = "Propose spacing, patch, net and batch with reasons, and predict memory, time and bytes of a run."
EXAMPLE = "fedatlas plan federation.yaml"


def options(made: argparse.ArgumentParser) -> None:
    shared.federation(made)
    made.add_argument(
        "--sites",
        nargs="+",
        type=Path,
        default=[],
        metavar="JSON",
        help="descriptions of sites whose data are not here",
    )
    shared.planning(made)
    made.add_argument("--no-trial", action="store_true", help="predict nothing: no step is timed")
    made.add_argument("--quiet", action="store_true", help="show no progress on the terminal")
    shared.as_json(made)


def call(arguments: argparse.Namespace) -> int:
    shared.require_known(arguments)
    shared.require_positive(arguments, "memory")
    from fedatlas.planning.description import read_description
    from fedatlas.planning.plan import plan_file, text_of

    with Counter(arguments.quiet) as counter:
        result = plan_file(
            arguments.federation,
            arguments.override,
            [read_description(path) for path in arguments.sites],
            memory=arguments.memory,
            dimensions=arguments.dimensions,
            trial=not arguments.no_trial,
            tell=counter.show,
        )
    shared.show(arguments, result, text_of(result))
    return 0
