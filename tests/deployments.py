"""A deployment on loopback, with every party started as a user starts it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from fedatlas.federation.deploy import accept, free_ports, gather, init
from fedatlas.federation.file import Federation, parse_federation
from fedatlas.federation.session import run_federation


class Deployment:
    """The parties of a federation, each in processes of its own. small: plain values of a federation file."""

    def __init__(self, engine: str, small: dict[str, Any], folder: Path, *, pooled: bool = True) -> None:
        self.engine, self.out = engine, folder / "deploy"
        federation = parse_federation(small, base=Path())
        self.data = {site["name"]: site["path"] for site in small["sites"]}
        self.cache = small["engine"]["cache"]
        self.sites = sorted(self.data)
        port, admin_port = free_ports(2)
        extra = ["pooled"] if pooled else []
        init(federation, self.out, engine=engine, port=port, admin_port=admin_port, extra_sites=extra)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        for party in ("server", *self.sites, *extra):
            self.start(party)

    def start(self, party: str) -> None:
        """As start.sh does."""
        kit = self.out / party
        data = self.data if party == "pooled" else {party: self.data.get(party)}
        more = [f"--data={name}={path}" for name, path in data.items()] if party != "server" else []
        more += ["--cache", self.cache, "--case-names"] if party != "server" else []
        (kit / "logs").mkdir(exist_ok=True)
        with (kit / "logs" / "party.log").open("ab") as log:
            self.processes[party] = subprocess.Popen(
                [sys.executable, "-m", "fedatlas.cli", "deploy", "start", str(kit), *more],
                stdout=log,
                stderr=log,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )

    def accept(self, small: dict[str, Any]) -> None:
        """All parties agree to another federation file."""
        from fedatlas.federation.deploy import write_shared

        file = self.out / "next.yaml"
        write_shared(parse_federation(small, base=Path()), file)
        for party in self.processes:
            if party != "pooled":
                accept(self.out / party, file, lambda text: None)
            else:
                (self.out / party / "federation.yaml").write_bytes(file.read_bytes())

    def run(self, federation: Federation, path: Path, **options: Any) -> bytes:
        """As `fedatlas run --engine … --deploy …`; returns the bytes of the last state."""
        options = {"tell": lambda text: None} | options
        run_federation(federation, path, gather=gather(self.engine, self.out), **options)
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
        for process in self.processes.values():
            process.terminate()
        end = time.monotonic() + 40
        for process in self.processes.values():
            try:
                process.wait(max(end - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
