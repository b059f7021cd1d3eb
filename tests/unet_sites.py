"""Sites with a few small slices that each annotate some organs, a U-Net for them, and whole federations of it, made of
tensors; `image_sites.Server` calls them."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any, cast

import torch
from image_sites import Server
from torch import Tensor, nn

from fedatlas import nets
from fedatlas.core.batch import Batch
from fedatlas.core.labels import LabelSpace, SiteLabels
from fedatlas.core.seeds import generator
from fedatlas.core.tensors import Tensors, from_tree, load, to_tree
from fedatlas.learning.loop import Local

SPACE = LabelSpace(("background", "kidney", "liver", "spleen"))
ANNOTATED = {"a": {1}, "b": {2, 3}}
LOCAL = Local(optimizer="adamw", lr=0.01, batch=2, steps=2)


def unet(**options: Any) -> nn.Module:
    chosen = {"filters": [4, 4, 8], **options}
    return nets.build("unet", chosen, in_channels=1, classes=len(SPACE), spatial_dims=2, seed=3)


class UNetSite:
    """n slices of 16 x 16; only annotated classes are drawn."""

    device = torch.device("cpu")

    def __init__(self, name: str, annotated: set[int], n: int, make: Callable[[], nn.Module] = unet) -> None:
        rng = generator(name, "data")
        self.name, self.n_train, self.make = name, n, make
        self.labels = SiteLabels(SPACE, frozenset(annotated))
        self.image = torch.randn(n, 1, 16, 16, generator=rng)
        drawn = torch.randint(0, len(SPACE), (n, 4, 4), generator=rng).repeat_interleave(4, 1)
        drawn = drawn.repeat_interleave(4, 2)
        self.target = torch.where(torch.tensor(self.labels.known)[drawn], drawn, 0)
        self.known = torch.tensor([self.labels.known] * n)
        self.n_labelled = self.n_positive = self.known.sum(0)
        self.memory: dict[str, Any] = {}
        self.round = 0

    @property
    def rng(self) -> torch.Generator:
        return generator(self.name, self.round, "site")

    def network(self, model: Tensors | None = None, name: str = "main") -> nn.Module:
        net = self.make()
        if model is not None:
            load(net, model)
        return net.train()

    def batches(self, *, batch: int, steps: int | None = None, epochs: float | None = None) -> list[Batch]:
        rng = generator(self.name, self.round)
        return [
            self.batch(torch.randint(0, self.n_train, (batch,), generator=rng)) for _ in range(steps or 1)
        ]

    def batch(self, chosen: Tensor) -> Batch:
        return Batch(
            self.image[chosen], self.target[chosen], self.known[chosen], [str(int(i)) for i in chosen]
        )

    def log(self, **numbers: float) -> None: ...


class UNetServer(Server):
    """Calls what the method declares under the name of a function, as an engine does; method: None: the function itself.
    What is asked for before the first round has no number of a round."""

    method: Any = None

    def call(self, function: Any, *, each: Any = None, **payload: Any) -> Any:
        if self.method is not None:
            function = self.method.functions()[function.__name__]
        if "round" in payload:
            return super().call(function, each=each, **payload)
        return super().call(lambda site, round, **rest: function(site, **rest), each=each, round=0, **payload)


Make = Callable[[], nn.Module]


def server(annotated: dict[str, set[int]] = ANNOTATED, make: Make = unet) -> UNetServer:
    sites = (UNetSite(name, own, 2 + i, make) for i, (name, own) in enumerate(annotated.items()))
    return UNetServer(*sites)


def begin(method: Any, at: UNetServer, rounds: int, make: Make = unet) -> Any:
    at.method = method
    return dataclasses.replace(method.start(make(), cast(Any, at)), rounds=rounds)


def play(method: Any, rounds: int = 2, annotated: dict[str, set[int]] = ANNOTATED, make: Make = unet) -> Any:
    """The state after all rounds."""
    at = server(annotated, make)
    state = begin(method, at, rounds, make)
    for _ in range(rounds):
        state = method.round(state, at)
    return state


def resumed(method: Any, rounds: int) -> Any:
    """As `play`, but from what is kept after every round."""
    at = server()
    state = begin(method, at, rounds)
    for _ in range(rounds):
        state = method.round(from_tree(type(state), to_tree(state)), at)
        memories = {name: copy.deepcopy(site.memory) for name, site in at.members.items()}
        at = server()
        at.method = method
        for name, memory in memories.items():
            at.members[name].memory = memory
    return state


def same(a: Tensors, b: Tensors) -> bool:
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)
