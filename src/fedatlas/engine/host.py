"""A site's end of the wire: it runs what it is asked to run, if that is allowed, and answers in bytes.

Nothing of one call is left for the next but the site's memory, so any process may serve any call.
"""

import resource
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fedatlas.engine import wire
from fedatlas.engine.store import MemoryStore
from fedatlas.engine.wire import Data
from fedatlas.errors import FedAtlasError
from fedatlas.labels import SiteLabels
from fedatlas.method import Batches
from fedatlas.seeds import generator, isolated
from fedatlas.tensors import Tensors, Tree, load, to_tree


class SiteSource(Protocol):
    """The data of a site, as a host needs them."""

    labels: SiteLabels
    n_train: int
    n_labelled: Tensor

    def batches(
        self,
        rng_parts: tuple[str | int, ...],
        *,
        batch: int,
        steps: int | None,
        epochs: float | None,
        device: torch.device,
    ) -> Batches: ...
    def volumes(self, split: str) -> Any: ...


NetMaker = Callable[[str], nn.Module]
"""Makes a net of the federation: "main", or a name that the method declares."""


@dataclass
class HostedSite:
    """The `method.Site` of one call, and what evaluation needs beyond it."""

    name: str
    source: SiteSource
    make_net: NetMaker
    memory: dict[str, Tree]
    rng: torch.Generator
    device: torch.device
    folder: Path
    seed_parts: tuple[str | int, ...]
    logged: dict[str, float] = field(default_factory=dict)
    _batch_calls: int = 0

    @property
    def labels(self) -> SiteLabels:
        return self.source.labels

    @property
    def n_train(self) -> int:
        return self.source.n_train

    @property
    def n_labelled(self) -> Tensor:
        return self.source.n_labelled

    def network(self, model: Tensors | None = None, name: str = "main") -> nn.Module:
        net = self.make_net(name)
        if model is not None:
            load(net, model)
        return net.to(self.device).train()

    def batches(self, *, batch: int, steps: int | None = None, epochs: float | None = None) -> Batches:
        self._batch_calls += 1
        parts = (*self.seed_parts, "batches", self._batch_calls)
        return self.source.batches(parts, batch=batch, steps=steps, epochs=epochs, device=self.device)

    def volumes(self, split: str) -> "Any":
        return self.source.volumes(split)

    def log(self, **numbers: float) -> None:
        self.logged.update({name: float(value) for name, value in numbers.items()})


class Host:
    """Serves the calls of one site.

    functions: name -> function(site, **payload); the only ones that are ever run.
    seed: the federation's; with site, round and call it decides everything random.
    """

    def __init__(
        self,
        name: str,
        source: SiteSource,
        functions: Mapping[str, Callable[..., Any]],
        make_net: NetMaker,
        folder: Path,
        *,
        seed: int,
        threads: int = 1,
        device: str = "cpu",
    ) -> None:
        self.name, self.source, self.functions, self.make_net = name, source, dict(functions), make_net
        self.folder, self.seed, self.threads, self.device = folder, seed, threads, torch.device(device)
        self.memory = MemoryStore(folder / "memory")

    def handle(self, function: str, round: int, call: int, shared: Data, own: Data | None = None) -> Data:
        """Answers one call. The reply is a tree with "value", "log" and "cost", or with "error".

        Whatever goes wrong in the function, the answer is an error reply: its code, its text, and the
        traceback, which stays in `errors.log` of the site's folder.
        """
        reset_peak()
        began = time.perf_counter()
        try:
            value, logged = self._run(function, round, call, shared, own)
        except Exception as error:
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / "errors.log").open("a") as log:
                log.write(f"round {round}, call {call}, {function}\n{traceback.format_exc()}\n")
            known = isinstance(error, FedAtlasError | FloatingPointError | OSError | MemoryError)
            text = str(error) if known else f"{error} (see {self.folder / 'errors.log'})"
            return wire.encode({"error": {"code": type(error).__name__, "text": text}})
        cost: Tree = {"seconds": time.perf_counter() - began, "peak_mb": peak_mb()}
        return wire.encode({"value": value, "log": logged, "cost": cost})

    def _run(
        self, function: str, round: int, call: int, shared: Data, own: Data | None
    ) -> tuple[Tree, dict[str, Tree]]:
        if function not in self.functions:
            allowed = ", ".join(sorted(self.functions))
            raise FedAtlasError(f"site {self.name}: asked to run {function!r}; allowed: {allowed}")
        torch.set_num_threads(self.threads)
        payload = wire.decode(shared)
        extra = wire.decode(own) if own is not None else {}
        assert isinstance(payload, dict) and isinstance(extra, dict)
        parts = (self.seed, self.name, round, call)
        memory = self.memory.before(round, call)
        site = HostedSite(
            name=self.name,
            source=self.source,
            make_net=self.make_net,
            memory=memory,
            rng=generator(*parts),
            device=self.device,
            folder=self.folder,
            seed_parts=parts,
        )
        with isolated(*parts, "libraries"):
            value = to_tree(self.functions[function](site, **payload, **extra))
        self.memory.save(round, call, site.memory)
        return value, dict(site.logged)


def reset_peak() -> None:
    """Starts a new measurement of peak memory, where the system can (Linux)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def peak_mb() -> float:
    """The process's largest resident memory since `reset_peak` (elsewhere: since it began), in MiB."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
