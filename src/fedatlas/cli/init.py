"""`fedatlas init`: writes the federation file, from folders or from sites' descriptions."""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import Any

from fedatlas.cli import shared
from fedatlas.cli.progress import Counter
from fedatlas.core.errors import FedAtlasError, FederationError

NAME = "init"
SENTENCE = "Write the federation file, from sites' folders or from their descriptions."
EXAMPLE = "fedatlas init data/north data/south data/west -o federation.yaml"


def options(made: argparse.ArgumentParser) -> None:
    made.add_argument(
        "sites",
        nargs="+",
        type=Path,
        help="a folder per site, or what `fedatlas describe` wrote there (*.json)",
    )
    made.add_argument(
        "-o", "--out", type=Path, default=Path("federation.yaml"), help="default: federation.yaml"
    )
    made.add_argument("--name", help="of the federation (default: of the folder that holds the sites)")
    made.add_argument(
        "--yes", action="store_true", help="take every proposal where sites' labels are in doubt, and say so"
    )
    made.add_argument(
        "--device", default="cpu", help="where sites train: cpu, cuda, cuda:0, … (default: cpu)"
    )
    made.add_argument(
        "--workers", type=int, help="sites that train at a time (default: one per processor core, 4 at most)"
    )
    made.add_argument(
        "--hours", type=float, help="time a few steps, and propose no more rounds than so many hours allow"
    )
    shared.planning(made)
    shared.layout(made)
    made.add_argument("--overwrite", action="store_true", help="replace a file that is there")
    made.add_argument("--quiet", action="store_true", help="show no progress on the terminal")


def call(arguments: argparse.Namespace) -> int:
    out: Path = arguments.out
    shared.require_out(out, arguments.overwrite)
    shared.require_positive(arguments, "memory", "hours")
    if arguments.workers is not None and arguments.workers < 0:
        raise FedAtlasError(f"--workers {arguments.workers}: 0 or more is expected")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", arguments.device):
        raise FedAtlasError(f"--device {arguments.device}: cpu, cuda, cuda:0, … is expected")
    from fedatlas.planning.draft import drafted, parsed, text_of
    from fedatlas.planning.rules import this_machine
    from fedatlas.transport.store import write_atomic

    with Counter(arguments.quiet) as counter:
        sites, paths = _sites(arguments, counter)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = arguments.workers if arguments.workers is not None else min(4, cores, len(sites))
    if workers > len(sites):
        print(
            f"note: --workers {workers}: a site answers one question at a time; {len(sites)}, one for each, are written"
        )
        workers = len(sites)
    workers = 0 if arguments.device != "cpu" and arguments.workers is None else workers
    machine = this_machine(arguments.device, workers, arguments.memory)
    asking = Asking(arguments.yes)
    draft = drafted(
        arguments.name or _name(arguments.sites), sites, paths, asking.ask, machine, arguments.dimensions
    )
    asking.require_answers()
    text = text_of(draft, out)
    if arguments.hours is not None:
        from fedatlas.planning.plan import in_time

        with Counter(arguments.quiet) as counter:
            draft = in_time(draft, parsed(text, out), arguments.hours, counter.show)
        text = text_of(draft, out)
    parsed(text, out)
    write_atomic(out, text.encode())
    for note in [*draft.labels.notes, *draft.findings.notes, *draft.notes]:
        print(f"note: {note}")
    classes = ", ".join(draft.labels.names)
    print(
        f"{out}: {_counted(len(sites), 'site')}, {_counted(len(draft.labels.names), 'class', 'classes')} ({classes}). Read it, then:"
    )
    if len(paths) == len(sites):
        verbs = [f"{verb} {quote(str(out))}" for verb in ("plan", "check", "run")]
    else:
        described = " ".join(quote(str(path)) for path in arguments.sites if path.is_file())
        verbs = [
            f"plan {quote(str(out))} --sites {described}",
            f"deploy init {quote(str(out))} -o deploy/ --host NAME, where NAME is this machine's",
        ]
    for verb in verbs:
        print(f"  fedatlas {verb}")
    return 0


def _name(given: Sequence[Path]) -> str:
    from fedatlas.planning.recognise import site_name

    folders = {path.resolve().parent for path in given if path.is_dir()}
    return site_name(folders.pop()) if len(folders) == 1 else "federation"


def _counted(n: int, one: str, several: str = "") -> str:
    return f"{n} {one if n == 1 else several or one + 's'}"


def _sites(arguments: argparse.Namespace, counter: Counter) -> tuple[list[Any], dict[str, Path]]:
    """The descriptions of all sites, and the folders of those that lie here."""
    from fedatlas.planning.description import describe, read_description
    from fedatlas.planning.recognise import columns_told, recognised, site_name

    reading = shared.options_of_a_layout(arguments.reading)
    given = list(arguments.sites)
    places = [path.resolve() for path in given]
    if twice := [path for n, path in enumerate(given) if places[n] in places[:n]]:
        raise FedAtlasError(
            f"{twice[0]}: was given twice; every site has a folder or a description of its own"
        )
    names = [site_name(path) for path in given]
    found, paths = [], {}
    for path, name in zip(given, names, strict=True):
        if path.is_file():
            found.append(read_description(path))
            continue
        if names.count(name) > 1:  # a/data and b/data
            name = f"{site_name(path.resolve().parent)}-{name}"
        site = recognised(path, name, arguments.format, reading)
        if arguments.format is None and (note := columns_told(*site)):
            print(f"note: {note}")
        found.append(describe(*site, counter.show))
        paths[name] = path
    return found, paths


class Asking:
    """Who answers questions: a terminal, `--yes` with the proposals, or nobody, which is an error that lists them."""

    def __init__(self, yes: bool) -> None:
        self.yes, self.terminal = yes, sys.stdin.isatty() and sys.stdout.isatty()
        self.open: list[Any] = []

    def ask(self, question: Any) -> int:
        """The number of a choice."""
        if self.yes:
            print(f"{question.text}\n  taken: {question.choices[0][0]}")
            return 0
        if not self.terminal:
            self.open.append(question)
            return 0
        print(f"\n{question.text}")
        for number, (text, _) in enumerate(question.choices, start=1):
            print(f"  {number}  {text}{'  (proposed)' if number == 1 else ''}")
        return _answer(len(question.choices))

    def require_answers(self) -> None:
        """Raises FederationError where a question is open."""
        if self.open:
            listed = "\n".join(
                f"  {question.text}\n    proposed: {question.choices[0][0]}" for question in self.open
            )
            raise FederationError(
                f"{len(self.open)} doubt{'s' * (len(self.open) > 1)} about the sites' labels, and no terminal to ask at:\n{listed}\n"
                "take the proposals with --yes, or answer at a terminal"
            )


def _answer(count: int) -> int:
    while True:
        try:
            text = input(f"1 to {count}, Enter for 1: ").strip()
        except EOFError:
            raise KeyboardInterrupt from None
        if not text:
            return 0
        if text.isdigit() and 1 <= int(text) <= count:
            return int(text) - 1
        print(f"{text!r} is none of 1 to {count}")
