"""Stand-ins for what a method is given: sites, whose data are tensors, a server that calls them, and their replies."""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fedatlas.core.batch import Batch
from fedatlas.core.labels import LabelSpace, SiteLabels
from fedatlas.core.seeds import generator
from fedatlas.core.tensors import Tensors, load


class FakeSite:
    """All that a method may touch at a hospital. Derived classes say what a batch holds.

    make: the federation's net; nets: those that the method has beside it, by name. The server sets `round`.
    """

    device = torch.device("cpu")
    n_labelled: Tensor
    n_positive: Tensor

    def __init__(
        self,
        name: str,
        annotated: Collection[int],
        n: int,
        make: Callable[[], nn.Module],
        *,
        space: LabelSpace,
        nets: Mapping[str, Callable[[], nn.Module]] | None = None,
    ) -> None:
        self.name, self.n_train, self.make, self.nets = name, n, make, dict(nets or {})
        self.labels = SiteLabels(space, frozenset(annotated))
        self.n_labelled = self.n_positive = torch.tensor([n * known for known in self.labels.known])
        self.memory: dict[str, Any] = {}
        self.lasting: dict[str, Any] = {}
        self.rng: Any = generator(name)
        self.logged: dict[str, float] = {}
        self.round = 0

    def network(self, model: Tensors | None = None, name: str = "main") -> nn.Module:
        net = self.nets.get(name, self.make)()
        if model is not None:
            load(net, model)
        return net.train()

    def batches(self, *, batch: int, steps: int | None = None, epochs: float | None = None) -> list[Batch]:
        """They depend on the site's name and the round."""
        rng = generator(self.name, self.round)
        count = steps or max(1, round((epochs or 0) * self.n_train / batch))
        return [self.drawn(rng, batch) for _ in range(count)]

    def drawn(self, rng: torch.Generator, batch: int) -> Batch:
        """New images of 8 x 8, and labels of all classes."""
        image = torch.randn(batch, 1, 8, 8, generator=rng)
        target = torch.randint(0, len(self.labels.space), (batch, 8, 8), generator=rng).to(torch.uint8)
        return Batch(image, target, torch.tensor([self.labels.known] * batch), ["case"] * batch)

    def once(self, what: str, of: Any, make: Callable[[], Any]) -> Any:
        return make()

    def log(self, **numbers: float) -> None:
        self.logged.update(numbers)


class HeldSite(FakeSite):
    """A site whose images, targets and known labels [n, …] are always the same; a derived class makes them."""

    image: Tensor
    target: Tensor
    known: Tensor

    def drawn(self, rng: torch.Generator, batch: int) -> Batch:
        return self.batch(torch.randint(0, len(self.image), (batch,), generator=rng))

    def batch(self, chosen: Tensor) -> Batch:
        """Its images by their numbers."""
        return Batch(
            self.image[chosen], self.target[chosen], self.known[chosen], [str(int(i)) for i in chosen]
        )


class Replies:
    """What the sites answered."""

    def __init__(self, replies: dict[str, dict[str, Any]]):
        self.replies, self.sites = replies, sorted(replies)

    def __iter__(self) -> Iterator[tuple[str, dict[str, Any]]]:
        return iter((site, self.replies[site]) for site in self.sites)

    def each(self, key: str) -> Iterator[Any]:
        return iter(self.replies[site][key] for site in self.sites)

    def plain(self, key: str) -> list[Any]:
        return [self.replies[site][key] for site in self.sites]


class Server:
    """Calls sites in the order of their names. silent: one that never answers. functions: what a call of a name runs, as
    an engine does; else the function itself."""

    def __init__(self, *sites: Any, silent: str = ""):
        self.members = {site.name: site for site in sites}
        self.sites, self.silent = sorted(self.members), silent
        self.lost: dict[str, str] = {}
        self.functions: dict[str, Any] = {}

    def network(self, model: Tensors | None = None, name: str = "main") -> nn.Module:
        return next(iter(self.members.values())).network(model, name).eval()

    def call(
        self, function: Any, *, each: Mapping[str, dict[str, Any]] | None = None, **payload: Any
    ) -> Replies:
        replies, function = {}, self.functions.get(getattr(function, "__name__", ""), function)
        for name in self.sites:
            if name != self.silent:
                self.members[name].round = payload.get("round", 0)
                replies[name] = function(self.members[name], **payload, **(each or {}).get(name, {}))
        return Replies(replies)


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """Whether two models have the same tensors in the same order, each of the same values."""
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)
