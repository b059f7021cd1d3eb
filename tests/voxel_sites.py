"""A site with labels of voxels, made of tensors, and a net for it."""

import torch
from fakes import HeldSite
from torch import Tensor, nn

from fedatlas.core.labels import LabelSpace
from fedatlas.core.seeds import generator
from fedatlas.core.tensors import load

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


class VoxelSite(HeldSite):
    """Three images of 4 x 4."""

    def __init__(self, name: str, annotated: set[int], space: LabelSpace = SPACE) -> None:
        super().__init__(name, annotated, 3, lambda: Pointwise(len(space)), space=space)
        rng, C = generator(name, "data"), len(space)
        self.image = torch.randn(3, 1, 4, 4, generator=rng)
        self.target = torch.randint(0, C, (3, 4, 4), generator=rng)
        if not space.exclusive:
            self.target = torch.randint(0, 2, (3, C, 4, 4), generator=rng).float()
        self.known = torch.tensor([self.labels.known] * 3)
