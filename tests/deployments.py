"""A deployment on loopback, with every party started as a user starts it. Runs follow each other on one job of the engine;
that a run starts its job and ends it is tested where it brings servers of its own."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from fedatlas.federation.across import Deployed, _with_pool, free_ports, join
from fedatlas.federation.deploy import accept, init, write_shared
from fedatlas.federation.file import Federation, make_method, parse_federation
from fedatlas.federation.session import Parties, run_federation
from fedatlas.transport.frames import Question
from fedatlas.transport.rounds import RunFolder

POOLED = "pooled"


class _Open:
    """A way to the sites that is not closed with a run."""

    def __init__(self, way: Deployed) -> None:
        self.way, self.sites = way, way.sites

    def ask(self, questions: Sequence[Question], deadline: float) -> Iterator[tuple[str, str | None]]:
        return self.way.ask(questions, deadline)

    def close(self) -> None: ...


class Deployment:
    """The parties of a federation, each in processes of its own; all are there when it is made. small: plain values of a
    federation file."""

    def __init__(self, engine: str, small: dict[str, Any], folder: Path) -> None:
        self.engine, self.out = engine, folder / "deploy"
        federation = parse_federation(small, base=Path())
        self.data = {site["name"]: site["path"] for site in small["sites"]}
        self.cache = small["engine"]["cache"]
        self.sites = sorted(self.data)
        port, admin_port = free_ports(2)
        init(federation, self.out, engine=engine, port=port, admin_port=admin_port, extra_sites=[POOLED])
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.way: Deployed | None = None
        for party in ("server", *self.sites):
            self.start(party)
        try:
            self.gather(federation, RunFolder(folder / "first"), lambda text: None)
        except BaseException:
            self.close()
            raise

    def start(self, party: str) -> None:
        """As start.sh does."""
        kit = self.out / party
        data = self.data if party == POOLED else {party: self.data.get(party)}
        more = [f"--data={name}={path}" for name, path in data.items()] if party != "server" else []
        more += ["--cache", self.cache, "--case-names"] if party != "server" else []
        (kit / "logs").mkdir(exist_ok=True)
        with (kit / "logs" / "party.log").open("ab") as log:
            self.processes[party] = subprocess.Popen(
                [sys.executable, "-m", "fedatlas", "deploy", "start", str(kit), *more],
                stdout=log,
                stderr=log,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )

    def accept(self, small: dict[str, Any]) -> None:
        """All parties agree to another federation file; who holds the union of all data is started for the first method
        that asks for it."""
        file, federation = self.out / "next.yaml", parse_federation(small, base=Path())
        write_shared(federation, file)
        if make_method(federation).pooled and POOLED not in self.processes:
            self.start(POOLED)
        for party in self.processes:
            if party != POOLED:
                accept(self.out / party, file, lambda text: None)
            else:
                (self.out / party / "federation.yaml").write_bytes(file.read_bytes())

    def gather(self, federation: Federation, folder: RunFolder, tell: Any) -> Parties:
        """As `fedatlas run --engine … --deploy …`, but the engine's job goes on after the run."""
        sites = sorted(_with_pool(federation, self.out))
        if self.way is None or self.way.sites != sites:
            self.end_job()
            self.way = Deployed(self.engine, self.out, sites, tell)
        self.way.tell = tell
        return join(federation, folder, tell, _Open(self.way))  # type: ignore[arg-type]

    def end_job(self) -> None:
        way, self.way = self.way, None
        if way is not None:
            way.close()

    def run(self, federation: Federation, path: Path, **options: Any) -> bytes:
        """Returns the bytes of the last state."""
        options = {"tell": lambda text: None} | options
        run_federation(federation, path, gather=self.gather, **options)
        return (path / "models" / "last.fa").read_bytes()

    def descendants(self, party: str) -> list[int]:
        """The processes of a party that descend from its supervisor, parents first."""
        parents: dict[int, list[int]] = {}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError, ValueError):
                continue
            parents.setdefault(parent, []).append(int(entry.name))
        found, queue = [], [self.processes[party].pid]
        while queue:
            children = parents.get(queue.pop(0), [])
            found += children
            queue += children
        return found

    def worker(self, party: str) -> int | None:
        """The process that holds a site's data and trains, if it is running."""
        for pid in self.descendants(party):
            try:
                if b"fedatlas.transport.worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return pid
            except OSError:
                continue
        return None

    def kill(self, party: str) -> None:
        """As the power does: everything of a party at once, without a word."""
        pids = [self.processes[party].pid, *self.descendants(party)]
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.processes[party].wait()

    def log(self, party: str, file: str = "engine.log") -> str:
        return (self.out / party / "logs" / file).read_text(errors="replace")

    def close(self) -> None:
        self.end_job()
        for process in self.processes.values():
            process.terminate()
        end = time.monotonic() + 40
        for process in self.processes.values():
            try:
                process.wait(max(end - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def computed(pid: int | None) -> float:
    """Seconds of a processor that a process has taken."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def until(done: Callable[[], object], seconds: float = 40.0, what: str | Callable[[], str] = "") -> None:
    """Waits until something is so, and fails with what it is if it is not within so many seconds."""
    end = time.monotonic() + seconds
    while not done():
        if time.monotonic() > end:
            pytest.fail(f"{what if isinstance(what, str) else what()}: not within {seconds:g} s")
        time.sleep(0.05)
