"""`fedatlas watch`: a page that shows a run while it goes on."""

import argparse
import time
from pathlib import Path

from fedatlas.cli import shared

NAME = "watch"
SENTENCE = "Show a run while it goes on, as a page on this machine."
EXAMPLE = "fedatlas watch runs/trial"


DAY = 24 * 60 * 60
"""Seconds that a page may be waited for at most."""


def options(made: argparse.ArgumentParser) -> None:
    made.add_argument("run", type=Path, help="the run folder")
    made.add_argument(
        "--port",
        type=int,
        default=8750,
        help="of the page, on 127.0.0.1; 0: any that is free (default: 8750)",
    )
    made.add_argument("--out", type=Path, help="write the page into a file instead, until the run is over")
    made.add_argument("--every", type=float, default=5, help="seconds between two looks (default: 5)")


def call(arguments: argparse.Namespace) -> int:
    from fedatlas.core.errors import FedAtlasError
    from fedatlas.report.watch import Watched, server, write

    if not 1 <= arguments.every <= DAY:
        raise FedAtlasError(f"--every {arguments.every:g}: allowed are 1 to {DAY} seconds")
    if not 0 <= arguments.port <= 65535:
        raise FedAtlasError(f"--port {arguments.port}: allowed are ports from 0 to 65535")
    shared.require_page(arguments.out)
    watched = Watched(arguments.run, arguments.every)
    if not arguments.run.exists():
        shared.warn(f"{arguments.run}: no such folder yet; the page waits until `fedatlas run` makes it")
    if arguments.out is None:
        with server(watched, arguments.port) as serving:
            print(
                f"http://127.0.0.1:{serving.server_address[1]}/   (Ctrl-C ends the page, not the run)",
                flush=True,
            )
            serving.serve_forever()
        return 0
    print(f"{arguments.out}   (Ctrl-C ends the page, not the run)", flush=True)
    while not (now := write(watched, arguments.out)).over:
        time.sleep(arguments.every)
    rounds = f"{now.done} of {now.rounds} rounds" if now.rounds is not None else "before its first round"
    print(f"{now.state}{': ' if now.why else ''}{now.why}, {rounds}")
    return 0
