"""Sites with labels of whole images, made of tensors, and a server that calls them."""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fedatlas import nets
from fedatlas.core.batch import Batch
from fedatlas.core.labels import LabelSpace, SiteLabels
from fedatlas.core.seeds import generator
from fedatlas.core.tensors import Tensors, load

FINDINGS = ("Infiltration", "Effusion", "Atelectasis", "Nodule", "Consolidation", "Pneumothorax")
SPACE = LabelSpace(FINDINGS, exclusive=False, level="image")
SETUP_1 = {"1": {0, 1, 2}, "2": {1, 2, 3}, "3": {2, 3, 4}, "4": {3, 4, 5}}
"""The label matrix of FedPSL's first setup: client -> classes."""


def cnn(**options: Any) -> nn.Module:
    return nets.build(
        "cnn", {"filters": [8, 8], **options}, in_channels=1, classes=len(SPACE), spatial_dims=2, seed=3
    )


class ImageSite:
    """n images of 8 x 8, all annotated for the same classes."""

    device = torch.device("cpu")

    def __init__(
        self,
        name: str,
        annotated: Collection[int],
        n: int,
        make: Callable[[], nn.Module] = cnn,
        *,
        space: LabelSpace = SPACE,
        label_rate: float = 1.0,
    ) -> None:
        rng = generator(name, "data")
        self.name, self.n_train, self.make = name, n, make
        self.labels = SiteLabels(space, frozenset(annotated))
        self.image = torch.randn(n, 1, 8, 8, generator=rng)
        self.target = (torch.rand(n, len(space), generator=rng) < 0.4).float()
        self.known = torch.tensor([self.labels.known] * n)
        self.known &= torch.rand(n, len(space), generator=rng) < label_rate
        self.n_labelled = self.known.sum(0)
        self.n_positive = (self.known & (self.target > 0)).sum(0)
        self.memory: dict[str, Any] = {}
        self.rng = generator(name)
        self.logged: dict[str, float] = {}
        self.round = 0

    def network(self, model: Tensors | None = None, name: str = "main") -> nn.Module:
        net = self.make()
        if model is not None:
            load(net, model)
        return net.train()

    def batches(self, *, batch: int, steps: int | None = None, epochs: float | None = None) -> list[Batch]:
        rng = generator(self.name, self.round)
        count = steps or max(1, round((epochs or 0) * self.n_train / batch))
        return [self.batch(torch.randint(0, self.n_train, (batch,), generator=rng)) for _ in range(count)]

    def batch(self, chosen: Tensor) -> Batch:
        return Batch(
            self.image[chosen], self.target[chosen], self.known[chosen], [str(int(i)) for i in chosen]
        )

    def log(self, **numbers: float) -> None:
        self.logged.update(numbers)


class Replies:
    def __init__(self, replies: dict[str, dict[str, Any]]):
        self.replies, self.sites = replies, sorted(replies)

    def __iter__(self) -> Iterator[tuple[str, dict[str, Any]]]:
        return iter((site, self.replies[site]) for site in self.sites)

    def each(self, key: str) -> Iterator[Any]:
        return iter(self.replies[site][key] for site in self.sites)

    def plain(self, key: str) -> list[Any]:
        return [self.replies[site][key] for site in self.sites]


class Server:
    """`silent`: a site that never answers."""

    def __init__(self, *sites: Any, silent: str = ""):
        self.members = {site.name: site for site in sites}
        self.sites, self.silent = sorted(self.members), silent
        self.lost: dict[str, str] = {}

    def call(
        self, function: Any, *, each: Mapping[str, dict[str, Any]] | None = None, **payload: Any
    ) -> Replies:
        replies = {}
        for name in self.sites:
            if name != self.silent:
                self.members[name].round = payload["round"]
                replies[name] = function(self.members[name], **payload, **(each or {}).get(name, {}))
        return Replies(replies)
