"""The engine for one machine: sites in turn in this process, or several at once in worker processes.

Both give the same bits: every payload passes through `wire` either way, and nothing of a call survives it.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from mmap import ACCESS_READ, mmap
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal

from fedatlas.engine import wire
from fedatlas.engine.host import Host
from fedatlas.engine.store import read_whole, write_atomic
from fedatlas.engine.wire import Data
from fedatlas.engine.worker import read_frame, write_frame
from fedatlas.errors import FedAtlasError, NameMismatch, SiteLost, WireError
from fedatlas.options import option, options
from fedatlas.tensors import Tree, is_finite, require_same, to_tree


@options
class Faults:
    """What happens when a site does not answer a call, or its answer is refused."""

    on_lost: Literal["stop", "drop"] = option(
        "stop", "stop: the run ends after the last complete round; drop: the round goes on without the site."
    )
    min_sites: int = option(1, "With drop: how many sites must answer for a round to count.", ge=1)


@dataclass(frozen=True)
class Call:
    """One call, for the log: who answered, at what cost, who was lost and why."""

    function: str
    logs: dict[str, dict[str, float]]
    cost: dict[str, dict[str, float]]
    lost: dict[str, str]


class Spool:
    """The replies to one call, kept on disk: `method.Replies`."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        self.files = dict(sorted(files.items()))
        self.sites = list(self.files)

    def __iter__(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for site, path in self.files.items():
            tree = wire.decode(read_whole(path), copy=False)
            assert isinstance(tree, dict)
            yield site, tree["value"]  # type: ignore[misc]
            del tree

    def each(self, key: str) -> Iterator[Any]:
        for path in self.files.values():
            tree: Any = wire.decode(read_whole(path), copy=False)
            item = tree["value"][key]
            del tree
            yield item
            del item

    def plain(self, key: str) -> list[Any]:
        return [self._forms(site)[key] for site in self.sites]

    def has(self, key: str) -> bool:
        """Does every reply hold this key?"""
        return bool(self.sites) and all(key in self._forms(site) for site in self.sites)

    def _forms(self, site: str) -> dict[str, Any]:
        with self.files[site].open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as data:
            tree = wire.plain(memoryview(data))
        assert isinstance(tree, dict) and isinstance(tree["value"], dict)
        return tree["value"]


@dataclass
class LocalClients:
    """`method.Clients` on this machine.

    hosts: site -> its host in this process, or a function that serves a site's call in another.
    scratch: a folder for replies; only those of the last two calls are kept.
    at_once: how many sites may work at the same time.
    watch: told of every answer: (site, function, log, cost).
    """

    sites: list[str]
    serve: "Callable[[str, str, int, int, Data, Data | None], Data]"
    scratch: Path
    faults: Faults = field(default_factory=lambda: Faults())  # type: ignore[call-arg]
    at_once: int = 1
    watch: Callable[[str, str, dict[str, float], dict[str, float]], None] | None = None
    lost: dict[str, str] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    models: Spool | None = None
    """The last replies that held a model each: the sites' local models."""
    _round: int = 0
    _call: int = 0

    def __post_init__(self) -> None:
        self.sites = sorted(self.sites)

    def begin(self, round: int) -> None:
        """A round begins, counted from 1; 0 is what a method does at its start. Calls are numbered from 0."""
        self._round, self._call = round, 0
        self.calls = []

    def call(
        self,
        function: Callable[..., Any],
        *,
        each: Mapping[str, dict[str, Any]] | None = None,
        **payload: Any,
    ) -> Spool:
        if not getattr(function, "at_site", False):
            raise FedAtlasError(
                f"{function.__qualname__} is not marked @at_site; only such functions run at a site"
            )
        chosen = self.sites if each is None else sorted(each)
        unknown = [site for site in chosen if site not in self.sites]
        if unknown:
            raise FedAtlasError(
                f"call of {function.__name__}: no site {unknown[0]!r}; known: {', '.join(self.sites)}"
            )
        form = to_tree(payload)
        shared = wire.encode(form)
        own = {site: wire.encode(to_tree(each[site])) if each and each[site] else None for site in chosen}
        folder = self.scratch / f"{self._round:06d}-{self._call:03d}"
        record = Call(function.__name__, {}, {}, {})

        def ask(site: str) -> Data:
            return self.serve(site, function.__name__, self._round, self._call, shared, own[site])

        files: dict[str, Path] = {}
        for site, answer in self._answers(chosen, ask):
            reason = self._refuse(answer, form)
            if reason:
                record.lost[site] = reason
                continue
            head = wire.plain(answer)
            assert isinstance(head, dict)
            down = len(shared) + len(own[site] or b"")
            cost = {**head["cost"], "bytes_down": down, "bytes_up": len(answer)}  # type: ignore[dict-item]
            record.logs[site], record.cost[site] = head["log"], cost  # type: ignore[assignment]
            files[site] = folder / f"{site}.fa"
            write_atomic(files[site], answer)
            del answer
            if self.watch:
                self.watch(site, function.__name__, record.logs[site], record.cost[site])
        self._call += 1
        self.calls.append(record)
        self.lost = dict(sorted(record.lost.items()))
        self._judge(function.__name__, chosen, len(files))
        self._forget(folder)
        replies = Spool(files)
        if replies.has("model"):
            self.models = replies
        return replies

    def _answers(self, sites: Sequence[str], ask: Callable[[str], Data]) -> Iterator[tuple[str, Data]]:
        """(site, answer) in the order of `sites`, whoever is first."""
        if self.at_once == 1:
            yield from ((site, ask(site)) for site in sites)
            return
        pool = ThreadPoolExecutor(self.at_once)
        waiting: list[tuple[str, Future[Data]]] = [(site, pool.submit(ask, site)) for site in sites]
        try:
            for site, future in waiting:
                yield site, future.result()
        finally:  # on Ctrl-C too: nobody waits for what is still at work
            pool.shutdown(wait=False, cancel_futures=True)

    @staticmethod
    def _refuse(answer: Data, asked: Tree) -> str | None:
        """Why an answer cannot be used; None if it can."""
        try:
            tree = wire.decode(answer, copy=False)
        except WireError as error:
            return str(error)
        assert isinstance(tree, dict) and isinstance(asked, dict)
        if "error" in tree:
            error = tree["error"]
            assert isinstance(error, dict)
            return f"{error['code']}: {error['text']}"
        value = tree["value"]
        if not isinstance(value, dict):
            return f"answered a {type(value).__name__}; functions at a site return a dict"
        for key, item in value.items():
            if not is_finite(item):
                return f"its answer holds a number that is not finite, in {key!r}"
        sent, got = asked.get("model"), value.get("model")
        if isinstance(sent, dict) and isinstance(got, dict):
            try:
                require_same(sent, got, asked="its model")  # type: ignore[arg-type]
            except NameMismatch as error:
                return str(error)
        return None

    def _judge(self, function: str, chosen: Sequence[str], answered: int) -> None:
        if not self.lost:
            return
        reasons = "\n".join(f"  {site}: {reason}" for site, reason in self.lost.items())
        where = f"round {self._round}, {function}"
        if self.faults.on_lost == "stop":
            raise SiteLost(
                f"{where}: no usable answer from\n{reasons}\nThe last complete round is kept. (faults.on_lost is stop)"
            )
        if answered < min(self.faults.min_sites, len(chosen)):
            raise SiteLost(
                f"{where}: {answered} sites answered, faults.min_sites is {self.faults.min_sites}; lost:\n{reasons}"
            )

    def _forget(self, newest: Path) -> None:
        kept = {newest} | ({path.parent for path in self.models.files.values()} if self.models else set())
        for folder in sorted(self.scratch.glob("[0-9]*-[0-9]*")):
            if folder not in kept:
                for path in folder.iterdir():
                    path.unlink()
                folder.rmdir()


def in_process(hosts: Mapping[str, Host]) -> "Callable[[str, str, int, int, Data, Data | None], Data]":
    """Serves every site in this process."""

    def serve(site: str, function: str, round: int, call: int, shared: Data, own: Data | None) -> Data:
        return hosts[site].handle(function, round, call, shared, own)

    return serve


class Workers:
    """Worker processes, each of which can serve any site. A worker that dies is replaced, and what it was doing
    is asked again once: a call depends on nothing but its payload and the site's memory."""

    def __init__(self, target: str, arguments: Mapping[str, Any], n: int, log: Path) -> None:
        self.command = [sys.executable, "-m", "fedatlas.engine.worker", target, json.dumps(dict(arguments))]
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        self.free: SimpleQueue[subprocess.Popen[bytes] | None] = SimpleQueue()
        self.running: list[subprocess.Popen[bytes]] = []
        self.closed = False
        for _ in range(n):
            self.free.put(None)

    def __call__(
        self, site: str, function: str, round: int, call: int, shared: Data, own: Data | None
    ) -> Data:
        head = wire.encode({"site": site, "function": function, "round": round, "call": call})
        worker = self.free.get()
        try:
            ended = ""
            for _ in range(2):
                if self.closed:
                    break
                if worker is None:
                    worker = self._start()
                reply = _exchange(worker, (head, shared, own or b""))
                if reply is not None:
                    return reply
                ended = _how_it_ended(worker)
                worker = None
            text = f"its worker process ended twice ({ended}); see {self.log}"
            return wire.encode({"error": {"code": "WorkerEnded", "text": text}})
        finally:
            self.free.put(worker)

    def _start(self) -> "subprocess.Popen[bytes]":
        with self.log.open("ab") as log:
            worker = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        self.running.append(worker)
        return worker

    def close(self) -> None:
        """Ends all workers, at once."""
        self.closed = True
        for worker in self.running:
            worker.kill()
        for worker in self.running:
            worker.wait()


def _exchange(worker: "subprocess.Popen[bytes]", frames: Sequence[Data]) -> Data | None:
    assert worker.stdin and worker.stdout
    try:
        for frame in frames:
            write_frame(worker.stdin, frame)  # type: ignore[arg-type]
        return read_frame(worker.stdout)  # type: ignore[arg-type]
    except BrokenPipeError:
        return None


def _how_it_ended(worker: "subprocess.Popen[bytes]") -> str:
    deadline = time.monotonic() + 5
    while worker.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    if worker.returncode is None:
        worker.kill()
        worker.wait()
    code = worker.wait()
    return (
        f"signal {-code}" + (", perhaps for memory" if code == -9 else "")
        if code < 0
        else f"exit code {code}"
    )
