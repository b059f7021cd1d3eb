"""The live page of a run, made from its folder alone: what is going on, who is late or lost, how long it will take."""

import json
import os
import re
import socket
import threading
import time
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import mean
from typing import Any, Literal

from fedatlas import __version__
from fedatlas.core.errors import FedAtlasError, require_run
from fedatlas.report import markup, page, read, tables
from fedatlas.report.read import Run

LATE = 3
"""So many times the usual length of a call, and a site that has not answered is late."""


@dataclass(frozen=True)
class Call:
    """What the sites are asked right now. answered, waits: the names of sites; late: has it taken `LATE` times as long as
    usual?"""

    function: str
    seconds: float
    answered: tuple[str, ...]
    waits: tuple[str, ...]
    late: bool


@dataclass(frozen=True)
class Now:
    """Where a run stands. why: of a run that stopped; done, rounds: complete rounds, and all; left: seconds, None where no
    round is complete yet."""

    state: Literal["waits", "prepares", "runs", "finished", "stopped"]
    why: str = ""
    done: int = 0
    rounds: int | None = None
    left: float | None = None
    call: Call | None = None

    @property
    def over(self) -> bool:
        """Is nothing more to come, until somebody resumes the run?"""
        return self.state in ("finished", "stopped")


class Watched:
    """A run folder that is looked at again and again, also one that `fedatlas run` has yet to make. Raises RunFolderError
    where it is none.

    every: seconds after which the page is loaded again."""

    def __init__(self, folder: Path, every: float = 5) -> None:
        if folder.exists() and not (folder / "lock").exists():  # the lock is the first that a run writes
            require_run(folder, "federation.yaml")
        self.folder, self.every = folder, every
        self._drawn: tuple[Any, list[tuple[str, str, str]]] = (None, [])
        self._one = threading.Lock()  # what charts are drawn with is shared by the whole process

    def look(self) -> tuple[Now, str]:
        """Where the run stands, and the page that says so; one at a time, whoever asks."""
        with self._one:
            return self._look()

    def _look(self) -> tuple[Now, str]:
        run = read.read(self.folder) if (self.folder / "run.json").exists() else None
        now = stand(self.folder, run)
        return now, markup.render(
            "watch.html",
            now=now,
            run=run,
            name=self.folder.name if run is None else run.info.get("name") or self.folder.name,
            every=None if now.over else self.every,
            sites=[] if run is None else _sites(run, now),
            score="" if run is None else tables.METRICS[run.measure].title,
            sections=[] if run is None else self._sections(run),
            version=__version__,
            seen=time.strftime("%Y-%m-%d %H:%M:%S"),
        )

    def _sections(self, run: Run) -> list[tuple[str, str, str]]:
        """Anchor, title and content of the report's sections that a run has so far; drawn anew when a round is complete."""
        state = (len(run.rounds), run.info.get("finished"), run.rows is None)
        if self._drawn[0] != state:
            shown = [("curves", "Training", "curves")]
            if run.images and read.first_with(run, read.examples, 1)[1]:
                shown.append(("overlays", "Examples", "examples"))
            if not run.images and read.first_with(run, read.overlays)[1]:
                shown.append(("overlays", "Overlays", "overlays"))
            self._drawn = state, [(a, title, page.section(run, template)) for a, title, template in shown]
        return self._drawn[1]


def stand(folder: Path, run: Run | None) -> Now:
    """Where a run stands. run: as it is read; None where it has no record yet."""
    rounds, done, left = None, 0, None
    if run is not None:
        rounds, done = read.number(run.info.get("rounds")), len(run.rounds)
        spent = sum(map(sum, tables.phase_seconds(run).values()))
        left = spent / done * (rounds - done) if done and rounds is not None else None
    where: dict[str, Any] = {"done": done, "rounds": None if rounds is None else int(rounds)}
    if run is not None and run.info.get("finished"):
        return Now("finished", **where)
    why = _stopped(folder)
    if why is not None:
        return Now("stopped", why, **where)
    if run is None:
        return Now("prepares" if folder.exists() else "waits", **where)
    call = _call(folder, run)
    if left is not None and call is not None and done != rounds:
        left = max(left - call.seconds, 0)
    return Now("runs", left=left, call=call, **where)


def _stopped(folder: Path) -> str | None:
    """Why a run goes on no more; None where it does, or where nothing says that it does not."""
    try:
        told = json.loads((folder / "stopped.json").read_text(encoding="utf-8"))
        return f"{told['why']} ({markup.time(told['when'])})"
    except FileNotFoundError:
        pass
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return "for a reason that cannot be read, stopped.json is damaged"
    try:
        lock = (folder / "lock").read_text(encoding="utf-8", errors="replace")
        held = re.match(r"process (\d+) on (\S+), since", lock)
    except OSError:
        held = None
    if held and held[2] == socket.gethostname() and not _alive(int(held[1])):
        return "its process ended without a word: it was killed, or the machine went down"
    return None


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _call(folder: Path, run: Run) -> Call | None:
    """The newest question in the folder whose answers are not all there."""
    calls = [folder / "scratch"]
    for _ in range(3):
        calls = [inner for outer in calls for inner in _listed(outer)]
    asked = sorted((file for call in calls if (file := call / "to-all.fa").exists()), key=_written)
    if not asked:
        return None
    function = asked[-1].parent
    tests = function.name.startswith("evaluate")
    try:
        parties = (function / "asked.txt").read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError):  # the call has ended since, or an earlier version made it
        return None
    answered = tuple(site for site in parties if (function / f"{site}.fa").exists())
    waits = tuple(site for site in parties if site not in answered)
    seconds = max(time.time() - _written(asked[-1]), 0)
    usual = tables.phase_seconds(run).get("evaluate" if tests else "round", ())
    usual = [length for length in usual if length > 1]
    if len(run.rounds) == run.info.get("rounds"):  # the final evaluation: no call before it was like it
        usual = []
    return Call(function.name, seconds, answered, waits, bool(usual) and seconds > LATE * mean(usual))


def _listed(folder: Path) -> list[Path]:
    """What is in a folder; of one that is not there, or has gone since, nothing."""
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _written(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # the call has ended since
        return 0.0


def _sites(run: Run, now: Now) -> list[dict[str, Any]]:
    """A row of the table for every party."""
    rows = []
    last = run.rounds[-1] if run.rounds else None
    validated = next((entry.rows for entry in reversed(run.rounds) if entry.rows), ())
    for site in run.parties:
        state = "tested on only" if run.sites.get(site, read.SiteInfo()).role == "test" else "–"
        if last is not None and site in last.lost:
            state = f"lost in round {last.number}: {last.lost[site]}"
        if now.call and site in now.call.waits and state != "tested on only":
            late = " late:" if now.call.late else ""
            state = f"{state + '; ' if state != '–' else ''}{late} has not answered for {now.call.seconds:.0f} s".strip()
        elif now.call and site in now.call.answered:
            state = "answered"
        log, cost = (dict(last.sites.get(site, {})), dict(last.cost.get(site, {}))) if last else ({}, {})
        term = tables.main_loss(log)
        values = [row["value"] for row in validated if row["site"] == site and row["metric"] == run.measure]
        rows.append(
            {
                "site": site,
                "state": state,
                "bad": state.startswith(("lost", "late")),
                "loss": log.get(term) if term else None,
                "score": markup.mean_of_defined(values) if values else None,
                "seconds": cost.get("seconds"),
                "memory": max(
                    filter(None, (read.number(cost.get(key)) for key in ("peak_mb", "evaluate_peak_mb"))),
                    default=None,
                ),
                "lost": sum(site in entry.lost for entry in run.records),
            }
        )
    return rows


def write(watched: Watched, out: Path) -> Now:
    """Writes the page as it is now, whole or not at all."""
    now, text = watched.look()
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(out.name + ".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, out)
    return now


def server(watched: Watched, port: int) -> ThreadingHTTPServer:
    """A server of the page on the loopback address, which other machines cannot reach; port 0: any that is free.

    Raises FedAtlasError for a port that is taken."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            host = (self.headers.get("Host") or "").rpartition(":")[0]
            if self.path != "/" or host not in ("127.0.0.1", "localhost"):
                self.send_error(HTTPStatus.NOT_FOUND)
                return
            try:
                status, text = HTTPStatus.OK, watched.look()[1]
            except (
                FedAtlasError,
                OSError,
            ) as error:  # a file that is being written, or gone; the next look will tell
                status, text = (
                    HTTPStatus.SERVICE_UNAVAILABLE,
                    markup.render("plain.html", said=str(error), every=watched.every),
                )
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: Any) -> None:
            """The terminal is for the person who watches."""

    try:
        return ThreadingHTTPServer(("127.0.0.1", port), Page)
    except OSError as error:
        raise FedAtlasError(
            f"--port {port}: cannot be used ({error.strerror}); choose another, or 0 for any that is free"
        ) from None
