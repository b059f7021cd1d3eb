"""`fedatlas list`: what is registered."""

import argparse

from fedatlas.cli import shared

NAME = "list"
SENTENCE = "List what is registered, a sentence each."
EXAMPLE = "fedatlas list methods"


def options(made: argparse.ArgumentParser) -> None:
    made.add_argument("what", choices=["methods", "nets", "datasets", "losses", "metrics"])
    shared.as_json(made)


def call(arguments: argparse.Namespace) -> int:
    from fedatlas.federation.known import installed, known

    kept = known()
    entries = kept["registered"][arguments.what] if kept else {}
    if not installed([arguments.what]) <= entries.keys() or not kept:
        from fedatlas.federation.catalogue import catalogue

        entries = catalogue(arguments.what)
    width = max(len(name) for name in entries)
    shared.show(arguments, entries, "\n".join(f"{name:{width}}  {text}" for name, text in entries.items()))
    return 0
