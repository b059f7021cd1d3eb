"""One engine with four sites and no training, in a process of its own: what `benchmarks.engines` measures.

    python -m benchmarks.engine_party KIND MB FOLDER

KIND: `local` (worker processes), `nvflare`, `flower` (real servers and clients over loopback, with keys and TLS), or
`bare-nvflare`, `bare-flower`: on the same engine, an application that echoes an array in the engine's plain way.
MB: 10**6 bytes of the model. This process is that of `fedatlas run`: what it holds is what a server of ours holds.
Commands come on standard input, a line each; every answer is a line of JSON on standard output.

    ping    asks every site for a number; {"seconds"}
    round   a call that sends the model and gets one from every site, and their average; {"seconds", "server", "site"},
            the peaks of memory in float32 models, beyond what the process held before it had a model
    raw     as many opaque bytes to every site, and others back; {"seconds"}
"""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fedatlas.core.contract import State, at_site
from fedatlas.core.labels import LabelSpace, SiteLabels
from fedatlas.core.seeds import generator
from fedatlas.core.tensors import Tensors, average
from fedatlas.federation.across import Deployed, free_ports
from fedatlas.federation.deploy import Keeper, adapter
from fedatlas.transport.allocator import return_freed_blocks
from fedatlas.transport.clients import SiteClients
from fedatlas.transport.deployment import Job, Launch, Plan
from fedatlas.transport.egress import Declaration, EgressLog, NetForms
from fedatlas.transport.frames import Question
from fedatlas.transport.host import Host, peak_mb, reset_peak
from fedatlas.transport.local import Workers
from fedatlas.transport.pipeline import Policy, ServerPipeline
from fedatlas.transport.relay import SiteRelay

ROOT = Path(__file__).parents[1]
SITES = tuple(f"site-{number}" for number in range(1, 5))
DEADLINE = 900.0
MIB = 2**20 / 1e6


def layers(mb: float) -> dict[str, int]:
    """Numbers in each tensor of a model of so many 10**6 bytes: 20 tensors, 40 where it is large."""
    count = 20 if mb < 100 else 40
    return {f"layer {i}": int(mb * 1e6 / 4) // count for i in range(count)}


# ------------------------------------------------------------------------------------------------------------ a site


class Net(nn.Module):
    """Holds the numbers, and computes nothing."""

    def __init__(self, mb: float) -> None:
        super().__init__()
        for name, numbers in layers(mb).items():
            self.register_buffer(name, torch.zeros(numbers))


class NoData:
    """A site's data, where nothing is trained."""

    labels = SiteLabels(LabelSpace(("background", "anything")), frozenset())
    n_train = 1
    n_labelled = torch.zeros(2, dtype=torch.int64)

    def batches(self, *_: Any, **__: Any) -> Any:
        return iter(())

    volumes = batches


@at_site
def ping(site: Any) -> dict[str, Any]:
    return {"n": 1}


@at_site
def turned(site: Any, model: Tensors) -> dict[str, Any]:
    """The model it got, with its sign turned in place: an engine that knows bytes again that it has seen gains nothing."""
    for tensor in model.values():
        tensor.neg_()
    return {"model": model, "n": 1}


SENDS = {"ping": {"n": "number"}, "turned": {"model": "model", "n": "number"}}


def open_sites(folder: str, mb: float) -> Any:
    """`answer(question)` for the worker process of any of the sites."""
    hosts: dict[str, Host] = {}

    def answer(question: Question) -> None:
        if question.function == "raw":
            np.invert(np.fromfile(question.shared, np.uint8)).tofile(question.reply)
            return
        if question.site not in hosts:
            place = Path(folder) / "sites" / question.site
            hosts[question.site] = Host(
                question.site,
                NoData(),
                {"ping": ping, "turned": turned},
                lambda name: Net(mb),
                place,
                Policy(SENDS, log=EgressLog(place / "egress.jsonl")),
                seed=0,
            )
        hosts[question.site].answer(question)

    return answer


# ------------------------------------------------------------------------------------------------- an engine of ours


class Ours:
    """FedAtlas over an engine, "local" included; a context. `begin` starts everything and waits for an answer."""

    def __init__(self, engine: str, mb: float, folder: Path) -> None:
        self.engine, self.mb, self.folder = engine, mb, folder
        self.stack = ExitStack()
        self.keepers: dict[str, Keeper] = {}
        self.workers: list[Workers] = []
        self.state: State | None = None
        self.calls = 0
        if engine != "local":
            provision(engine, folder)

    def begin(self) -> float:
        began = time.perf_counter()
        if self.engine == "local":
            workers = self._workers(len(SITES), "sites")
            self.transport: Any = workers
        else:
            self.keepers = keep(self.engine, self.folder, self.stack)
            for site in SITES:
                workers = self._workers(1, site)
                relay = SiteRelay(self.folder / site / "relay", workers.serve, workers.end)
                self.stack.callback(relay.close)
            self.transport = Deployed(
                self.engine, self.folder, SITES, lambda text: print(text, file=sys.stderr)
            )
            self.stack.callback(self.transport.close)
        self.clients = SiteClients(
            list(SITES),
            self.transport,
            self.folder / "scratch",
            pipeline=ServerPipeline(declaration=Declaration(SENDS, 2, NetForms(lambda name: Net(self.mb)))),
        )
        self.clients.faults = replace(self.clients.faults, deadline=DEADLINE)
        self.ping()
        seconds = time.perf_counter() - began
        self.ping()
        self.before = peak_mb() * MIB
        self.before_site = self._site_peak()
        return seconds

    def _workers(self, n: int, name: str) -> Workers:
        arguments = {"folder": str(self.folder), "mb": self.mb}
        made = Workers(f"{__spec__.name}:open_sites", arguments, n, self.folder / f"{name}.log")
        self.stack.callback(made.close)
        self.workers.append(made)
        return made

    def _site_peak(self) -> float:
        """Of any site in the last call, 10**6 bytes: a host starts the measurement anew when it is asked, and what it
        tells itself is from before its answer was encoded."""
        pids = [worker.process.pid for workers in self.workers for worker in workers.running]
        return max(peak_of(pid) for pid in pids)

    def _begin_call(self) -> float:
        self.calls += 1
        self.clients.begin(self.calls)
        reset_peak()
        return time.perf_counter()

    def ping(self) -> dict[str, float]:
        began = self._begin_call()
        assert self.clients.call(ping).plain("n") == [1] * len(SITES)
        return {"seconds": time.perf_counter() - began}

    def round(self) -> dict[str, float]:
        if self.state is None:
            rng = generator("model")
            self.state = State({name: torch.rand(n, generator=rng) for name, n in layers(self.mb).items()})
        first = float(self.state.model["layer 0"][0])
        began = self._begin_call()
        replies = self.clients.call(turned, model=self.state.model)
        self.state = State(average(replies.each("model"), replies.plain("n")))
        seconds = time.perf_counter() - began
        assert float(self.state.model["layer 0"][0]) == -first
        return {
            "seconds": seconds,
            "server": (peak_mb() * MIB - self.before) / self.mb,
            "site": (self._site_peak() - self.before_site) / self.mb,
        }

    def raw(self) -> dict[str, float]:
        """The transport alone: neither `wire`, nor checks, nor an average."""
        self.calls += 1
        folder = self.folder / "raw"
        folder.mkdir(exist_ok=True)
        shared = folder / "shared"
        payload(int(self.mb * 1e6), self.calls).tofile(shared)
        asked = [Question(site, "raw", self.calls, 0, shared, None, folder / site) for site in SITES]
        began = time.perf_counter()
        answers = dict(self.transport.ask(asked, DEADLINE))
        seconds = time.perf_counter() - began
        assert answers == dict.fromkeys(SITES), answers
        for question in asked:
            assert np.array_equal(np.fromfile(question.reply, np.uint8), ~np.fromfile(shared, np.uint8))
            question.reply.unlink()
        return {"seconds": seconds}


def peak_of(pid: int) -> float:
    """The largest resident memory of a process since it was last reset, 10**6 bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / 1e6
    return float("nan")


def payload(size: int, number: int) -> Any:
    """Bytes that no round had before."""
    return np.random.default_rng(number).integers(0, 256, size, np.uint8)


def provision(engine: str, folder: Path) -> None:
    port, admin_port = free_ports(2)
    adapter(engine).provision(Plan("benchmark", "localhost", port, admin_port, SITES), folder)


def keep(
    engine: str, folder: Path, stack: ExitStack, launch: Any = None, relay: Path | None = None
) -> dict[str, Keeper]:
    """Starts the engine's process of every party. launch: what to start, of a party's name; relay: the variable
    `RELAY` of all processes, each party's own if None."""
    made = adapter(engine)
    keepers = {}
    for party in ("server", *SITES):
        kit = folder / party
        start: Launch = (
            launch(party)
            if launch
            else (made.server_process if party == "server" else made.site_process)(kit)
        )
        keepers[party] = Keeper(
            start,
            relay or kit / "relay",
            kit / "engine.log",
            kit / "engine.pid",
            lambda text: print(text, file=sys.stderr),
            party,
        )
        stack.callback(keepers[party].close)
    return keepers


# ---------------------------------------------------------------------------------------------------- a bare echo


class Bare:
    """An application on the same engine, with the same keys and TLS, that sends an array and gets one back. Its job at
    the server listens to us on a socket of its own."""

    def __init__(self, engine: str, mb: float, folder: Path) -> None:
        self.engine, self.mb, self.folder = engine, mb, folder
        self.stack = ExitStack()
        self.keepers: dict[str, Keeper] = {}
        self.calls = 0
        provision(engine, folder)

    def begin(self) -> float:
        from benchmarks import bare

        began = time.perf_counter()
        listener = self.stack.enter_context(Listener(family="AF_UNIX"))
        address = Path(str(listener.address))
        launch = {"nvflare": bare.launch_nvflare, "flower": bare.launch_flower}[self.engine]
        self.keepers = keep(
            self.engine, self.folder, self.stack, lambda party: launch(self.folder, party), address
        )
        submit = {"nvflare": bare.submit_nvflare, "flower": bare.submit_flower}[self.engine]
        job: Job = patiently(lambda: submit(self.folder, SITES))
        self.stack.callback(job.stop)
        self.line = self.stack.enter_context(listener.accept())
        self._ask(1000)
        return time.perf_counter() - began

    def _ask(self, size: int) -> dict[str, float]:
        self.calls += 1
        self.line.send((size, self.calls, len(SITES)))
        if not self.line.poll(DEADLINE):
            raise TimeoutError(f"the bare echo on {self.engine} gave no answer within {DEADLINE:g} s")
        return {"seconds": self.line.recv()}

    def ping(self) -> dict[str, float]:
        return self._ask(1000)

    def raw(self) -> dict[str, float]:
        return self._ask(int(self.mb * 1e6))


def patiently(submit: Any) -> Job:
    """The server may not be up yet."""
    end = time.monotonic() + 90
    while True:
        try:
            return submit()
        except Exception:
            if time.monotonic() > end:
                raise
        time.sleep(1.0)


def commands() -> Iterator[str]:
    for line in sys.stdin:
        yield line.strip()


def main(arguments: Sequence[str]) -> None:
    kind, mb, folder = arguments[0], float(arguments[1]), Path(arguments[2])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was started is ended on the way out
    torch.set_num_threads(1)
    return_freed_blocks()  # as `fedatlas run` does
    party: Any = (Bare if kind.startswith("bare-") else Ours)(kind.removeprefix("bare-"), mb, folder)
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    with party.stack:
        print(json.dumps({"seconds": party.begin()}), file=out)
        pids = {name: keeper.process.pid for name, keeper in party.keepers.items() if keeper.process}
        print(json.dumps(pids), file=out)
        for command in commands():
            print(json.dumps(getattr(party, command)()), file=out)


if __name__ == "__main__":
    main(sys.argv[1:])
