"""`fedatlas schema`: the JSON schema of the federation file, with the methods and nets of installed packages."""

import argparse
import json

NAME = "schema"
SENTENCE = "Print the JSON schema of the federation file."
EXAMPLE = "fedatlas schema > federation.schema.json"


def options(made: argparse.ArgumentParser) -> None:
    """It has none."""


def call(arguments: argparse.Namespace) -> int:
    from fedatlas.federation.known import installed, known

    kept = known()
    if kept is None or installed(["methods", "nets"]):
        from fedatlas.federation.file import json_schema

        print(json.dumps(json_schema(others=True), indent=1))
    else:
        print(json.dumps(kept["schema"], indent=1))
    return 0
