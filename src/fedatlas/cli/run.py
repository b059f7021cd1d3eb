"""`fedatlas run`: trains a federation, evaluates it, writes its report."""

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from fedatlas.cli import shared
from fedatlas.cli.progress import Progress
from fedatlas.core.errors import FedAtlasError
from fedatlas.transport.deployment import ENGINES

NAME = "run"
SENTENCE = "Train a federation, evaluate it, write its report."
EXAMPLE = "fedatlas run federation.yaml -o rounds=20"


def options(made: argparse.ArgumentParser) -> None:
    shared.federation(made)
    shared.runs(made)
    made.add_argument(
        "--resume", action="store_true", help="go on from the last complete round, whatever engine made it"
    )
    made.add_argument(
        "--engine",
        default="local",
        choices=["local", *ENGINES, *(f"{name}-local" for name in ENGINES)],
        help="how sites are reached; …-local starts real servers and clients on this machine (default: local)",
    )
    made.add_argument("--deploy", type=Path, help="the deployment's folder, with --engine nvflare or flower")
    made.add_argument("--id", help="name of the run's folder (default: the file's name and hash)")
    made.add_argument(
        "--data-changed",
        action="store_true",
        help="with --resume: go on though a site's data are not those with which the run began",
    )
    shared.as_json(made)


def call(arguments: argparse.Namespace) -> int:
    shared.require_known(arguments)
    if arguments.data_changed and not arguments.resume:
        raise FedAtlasError("--data-changed: says how a run goes on; give --resume with it, or leave it out")
    from fedatlas.federation.file import load_federation
    from fedatlas.federation.session import run_federation, run_path
    from fedatlas.report.conclusion import lines
    from fedatlas.report.page import write
    from fedatlas.report.read import read

    federation = load_federation(arguments.federation, arguments.override)
    path = run_path(federation, arguments.runs, arguments.id)
    gather = _gather(arguments.engine, arguments.deploy, arguments.data_changed)
    out = sys.stderr if arguments.json else sys.stdout
    progress = Progress(federation.rounds, out)
    try:
        run_federation(
            federation,
            path,
            resume=arguments.resume,
            tell=progress.tell,
            watch=progress.site,
            after_round=progress.round,
            gather=gather,
        )
    except KeyboardInterrupt:
        progress.tell(f"stopped; complete rounds are kept in {path}. Go on with --resume")
        return shared.INTERRUPTED
    page = write(path)
    if arguments.json:
        from fedatlas.federation.session import summary

        print(json.dumps(summary(path) | {"report": str(page)}, indent=1))
    else:
        progress.tell("\n".join(lines(read(path), page)))
    return 0


def _gather(engine: str, deploy: Path | None, data_changed: bool) -> Any:
    """How the sites of a run are found."""
    from fedatlas.federation import across
    from fedatlas.federation.session import gather_local

    name, _, local = engine.partition("-")
    if (name != "local" and not local) != (deploy is not None):
        raise FedAtlasError(
            f"--engine {engine} needs --deploy, the folder that `fedatlas deploy init` made"
            if deploy is None
            else f"--deploy goes with --engine nvflare or flower, not with {engine}"
        )
    if deploy is not None:
        return across.gather(name, deploy, data_changed=data_changed)
    if name == "local":
        return partial(gather_local, data_changed=data_changed)
    return across.gather_trial(name, data_changed=data_changed)
