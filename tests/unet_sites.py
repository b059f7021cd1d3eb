"""Sites with a few small slices that each annotate some organs, a U-Net for them, and whole federations of it, made of
tensors; `image_sites.Server` calls them."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any, cast

import torch
from fakes import HeldSite, Server
from torch import nn

from fedatlas import nets
from fedatlas.core.labels import LabelSpace
from fedatlas.core.seeds import generator
from fedatlas.core.tensors import from_tree, to_tree
from fedatlas.learning.loop import Local

SPACE = LabelSpace(("background", "kidney", "liver", "spleen"))
ANNOTATED = {"a": {1}, "b": {2, 3}}
LOCAL = Local(optimizer="adamw", lr=0.01, batch=2, steps=2)


def unet(**options: Any) -> nn.Module:
    chosen = {"filters": [4, 4, 8], **options}
    return nets.build("unet", chosen, in_channels=1, classes=len(SPACE), spatial_dims=2, seed=3)


class UNetSite(HeldSite):
    """n slices of 16 x 16; only annotated classes are drawn."""

    def __init__(self, name: str, annotated: set[int], n: int, make: Callable[[], nn.Module] = unet) -> None:
        super().__init__(name, annotated, n, make, space=SPACE)
        rng = generator(name, "data")
        self.image = torch.randn(n, 1, 16, 16, generator=rng)
        drawn = torch.randint(0, len(SPACE), (n, 4, 4), generator=rng).repeat_interleave(4, 1)
        drawn = drawn.repeat_interleave(4, 2)
        self.target = torch.where(torch.tensor(self.labels.known)[drawn], drawn, 0)
        self.known = torch.tensor([self.labels.known] * n)

    @property
    def rng(self) -> torch.Generator:
        return generator(self.name, self.round, "site")

    @rng.setter
    def rng(self, given: Any) -> None:
        """Of every round it is a new one."""


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
