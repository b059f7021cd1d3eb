"""`fedatlas check`: reads everything, trains nothing."""

import argparse

from fedatlas.cli import shared

NAME = "check"
SENTENCE = "Read everything, train nothing."
EXAMPLE = "fedatlas check federation.yaml"


def options(made: argparse.ArgumentParser) -> None:
    shared.federation(made)
    shared.runs(made)
    shared.as_json(made)


def call(arguments: argparse.Namespace) -> int:
    shared.require_known(arguments)
    from fedatlas.federation.check import check_federation_file, text_of

    result = check_federation_file(arguments.federation, arguments.override, arguments.runs)
    shared.show(arguments, result, text_of(result))
    return 1 if any(problem["fatal"] for problem in result["problems"]) else 0
