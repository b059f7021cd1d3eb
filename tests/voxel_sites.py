"""A site with labels of voxels, made of tensors, and a net for it."""

from typing import Any

import torch
from torch import Tensor, nn

from fedatlas.core.batch import Batch
from fedatlas.core.labels import LabelSpace, SiteLabels
from fedatlas.core.seeds import generator
from fedatlas.core.tensors import Tensors, load

SPACE = LabelSpace(("background", "liver", "tumour", "spleen", "cyst", "kidney"), groups=((1, 2), (5, 4)))
"""The kidney's group names it before its cyst, whose class comes first. Heads: liver, tumour, spleen, cyst, kidney."""


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=generator("test", seed), dtype=torch.float64)


class Pointwise(nn.Module):
    """Logits from a convolution of size 1."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, classes, 1)
        values = torch.randn(classes, 2, generator=generator("net"))
        load(self, {"conv.weight": values[:, :1, None, None], "conv.bias": values[:, 1]})

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


class VoxelSite:
    """Three images of 4 x 4."""

    device = torch.device("cpu")
    n_train = 3

    def __init__(self, name: str, annotated: set[int], space: LabelSpace = SPACE) -> None:
        self.name, self.labels = name, SiteLabels(space, frozenset(annotated))
        rng, C = generator(name, "data"), len(space)
        self.image = torch.randn(3, 1, 4, 4, generator=rng)
        self.target = torch.randint(0, C, (3, 4, 4), generator=rng)
        if not space.exclusive:
            self.target = torch.randint(0, 2, (3, C, 4, 4), generator=rng).float()
        self.known = torch.tensor([self.labels.known] * 3)
        self.n_labelled = self.n_positive = self.known.sum(0)
        self.memory: dict[str, Any] = {}
        self.rng, self.round = generator(name), 0

    def network(self, model: Tensors | None = None, name: str = "main") -> nn.Module:
        net = Pointwise(len(self.labels.space))
        if model is not None:
            load(net, model)
        return net.train()

    def batches(self, *, batch: int, steps: int | None = None, epochs: float | None = None) -> list[Batch]:
        rng = generator(self.name, self.round)
        chosen = [torch.randint(0, 3, (batch,), generator=rng) for _ in range(steps or 1)]
        return [Batch(self.image[i], self.target[i], self.known[i], ["?"] * batch) for i in chosen]

    def log(self, **numbers: float) -> None:
        pass
