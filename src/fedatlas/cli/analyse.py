"""`fedatlas analyse …`: loss landscape, Hessian, similarity of models, membership inference. The options of a kind are
those of its class in `fedatlas.analysis.runs`."""

import argparse
import sys
from pathlib import Path
from typing import Any

from fedatlas.cli import shared

NAME = "analyse"
SENTENCE = "Analyse the models of a run."
EXAMPLE = "fedatlas analyse hessian runs/demo-1a2b3c4d --top 5"


def options(made: argparse.ArgumentParser) -> None:
    kinds = made.add_subparsers(title="kinds", required=True, metavar="KIND")
    for kind, schema in _schemas().items():
        sentence = schema["description"]
        one = kinds.add_parser(kind, help=sentence, description=sentence)
        one.set_defaults(verb=call, kind=kind, keys=schema["properties"])
        one.add_argument("run", type=Path, help="the run folder")
        for key, entry in schema["properties"].items():
            one.add_argument(f"--{key}", **_flag(entry))
        one.add_argument(
            "--data",
            action="append",
            default=[],
            metavar="SITE=PATH",
            help="where a site's data lie, if not where the run's file says",
        )
        shared.device(one)
        shared.as_json(one)


def _schemas() -> dict[str, Any]:
    """Kind -> the JSON schema of its options."""
    from fedatlas.federation.known import known

    kept = known()
    if kept is not None:
        return kept["analyses"]
    from fedatlas.analysis.runs import schemas

    return schemas()


def _flag(entry: dict[str, Any]) -> dict[str, Any]:
    """How argparse is told of an option, by its JSON schema. What is not given stays None, and has its default."""
    default = entry.get("default")
    text = entry["description"].replace("%", "%%")
    text += "" if default is None or default is False else f" (default: {default})"
    entry = next((part for part in entry.get("anyOf", []) if part.get("type") != "null"), entry)
    if entry["type"] == "boolean":
        return {"help": text, "action": "store_true", "default": None}
    if entry["type"] == "array":
        return {"help": f"{text} Several are joined by commas.", "type": _several, "metavar": "A,B"}
    kind = {"integer": int, "number": float, "string": str}[entry["type"]]
    choices = entry.get("enum")
    return {"help": text, "type": kind} | (
        {"choices": choices} if choices else {"metavar": kind.__name__.upper()}
    )


def _several(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def call(arguments: argparse.Namespace) -> int:
    from fedatlas.analysis.runs import analyse

    chosen = {key: value for key in arguments.keys if (value := getattr(arguments, key)) is not None}
    data = shared.pairs("--data", arguments.data, "SITE=PATH", "site-a=/path/of/the/data")
    out = sys.stderr if arguments.json else sys.stdout
    result = analyse(
        arguments.kind,
        arguments.run,
        chosen,
        device=arguments.device,
        data=data,
        tell=lambda text: print(text, file=out, flush=True),
    )
    file = arguments.run / "analysis" / f"{arguments.kind}.json"
    shared.show(
        arguments,
        result,
        f"numbers: {file}\nfigures: in the report, with `fedatlas report {arguments.run}`",
    )
    return 0
