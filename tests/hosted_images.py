"""A federation of image sites made of tensors, with the real wire, egress checks, site memory and server."""

import dataclasses
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedatlas import nets
from fedatlas.core.batch import Batch
from fedatlas.core.contract import sends_of
from fedatlas.core.labels import LabelSpace, SiteLabels
from fedatlas.core.seeds import generator
from fedatlas.core.tensors import from_tree, to_tree
from fedatlas.transport import wire
from fedatlas.transport.clients import SiteClients
from fedatlas.transport.egress import Declaration, NetForms
from fedatlas.transport.host import Host
from fedatlas.transport.local import InProcess
from fedatlas.transport.pipeline import Policy, ServerPipeline

SPACE = LabelSpace(("a", "b", "c", "d"), exclusive=False, level="image")
SITES = {"x": {0, 1}, "y": {1, 2}, "z": {2, 3}}


def cnn(**options: Any) -> nn.Module:
    chosen = {"filters": [8, 8], **options}
    return nets.build("cnn", chosen, in_channels=1, classes=len(SPACE), spatial_dims=2, seed=3)


class Images:
    """n images of 8 x 8, of which all are annotated for the same classes, or each for one site's of `SITES`."""

    def __init__(self, name: str, n: int, annotated: Collection[int] | None) -> None:
        rng = generator(name, "data")
        self.n_train = n
        self.image = torch.randn(n, 1, 8, 8, generator=rng)
        self.target = (torch.rand(n, len(SPACE), generator=rng) < 0.4).float()
        sets = list(SITES.values())
        rows = [annotated if annotated is not None else sets[i % len(sets)] for i in range(n)]
        self.labels = SiteLabels(SPACE, frozenset(c for row in rows for c in row))
        self.known = torch.tensor([[c in row for c in range(len(SPACE))] for row in rows])
        self.n_labelled = self.known.sum(0)
        self.n_positive = (self.known & (self.target > 0)).sum(0)

    def batches(self, rng_parts: Any, *, batch: int, steps: int | None, epochs: Any, device: Any) -> Any:
        rng = generator(*rng_parts)
        chosen = [torch.randint(0, self.n_train, (batch,), generator=rng) for _ in range(steps or 1)]
        return [Batch(self.image[i], self.target[i], self.known[i], ["case"] * batch) for i in chosen]

    def volumes(self, split: str) -> Any:
        return []


class Federation:
    """A method on its sites, or on their union if it is pooled; everything is kept under `folder`."""

    def __init__(self, method: Any, folder: Path, net: dict[str, Any] | None = None) -> None:
        self.method, self.net = method, net or {}
        pooled = method.pooled
        sources = {"pooled": Images("pooled", 12, None)} if pooled else {}
        for number, (name, classes) in enumerate(SITES.items()):
            if not pooled:
                sources[name] = Images(name, 6 + number, classes)
        self.hosts = {
            name: Host(
                name,
                source,
                method.functions(),
                self.make_net,
                folder / "sites" / name,
                Policy(sends_of(method)),
                seed=5,
            )
            for name, source in sources.items()
        }
        self.gone: set[str] = set()
        self.asked: list[Any] = []
        self.clients = SiteClients(
            list(sources),
            InProcess(self._answer),
            folder / "scratch",
            pipeline=ServerPipeline(declaration=Declaration(sends_of(method), 4, NetForms(self.make_net))),
            make_net=self.make_net,
            sample_shape=(1, 8, 8),
        )

    def _answer(self, question: Any) -> None:
        self.asked.append(question)
        if question.site in self.gone:
            raise OSError("gone")
        self.hosts[question.site].answer(question)

    def make_net(self, name: str = "main", **how: Any) -> nn.Module:
        main = cnn(**self.net)
        if name == "main":
            return main
        spec = self.method.nets[name]
        assert spec.on == "features"
        return nets.build(
            spec.name, spec.options, in_channels=main.n_features, classes=4, spatial_dims=2, seed=3
        )

    def start(self, rounds: int) -> Any:
        self.clients.begin(0)
        return dataclasses.replace(self.method.start(self.make_net(), self.clients), rounds=rounds)

    def play(self, state: Any, until: int) -> Any:
        while state.round < until:
            self.clients.begin(state.round + 1)
            before = state.round
            state = self.method.round(state, self.clients)
            assert state.round == before + 1 and type(state) is self.method.state
        return state


def encoded(state: Any) -> bytes:
    return bytes(wire.encode(to_tree(state)))


def run(method: Any, folder: Path, rounds: int, net: dict[str, Any] | None = None) -> Any:
    federation = Federation(method, folder, net)
    return federation.play(federation.start(rounds), rounds)


def run_with_a_stop(method: Any, folder: Path, rounds: int, stop: int, net: Any = None) -> Any:
    """The same, of which the rounds after `stop` are done by another process, as it were."""
    first = Federation(method, folder, net)
    state = first.play(first.start(rounds), stop)
    kept = wire.decode(encoded(state))
    second = Federation(method, folder, net)
    second.clients.remembered = dict(first.clients.remembered)
    return second.play(from_tree(type(state), kept), rounds)
