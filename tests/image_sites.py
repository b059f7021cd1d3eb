"""Sites with labels of whole images, made of tensors, and a server that calls them."""

from collections.abc import Callable, Collection
from typing import Any

import torch
from fakes import HeldSite
from torch import nn

from fedatlas import nets
from fedatlas.core.labels import LabelSpace
from fedatlas.core.seeds import generator

FINDINGS = ("Infiltration", "Effusion", "Atelectasis", "Nodule", "Consolidation", "Pneumothorax")
SPACE = LabelSpace(FINDINGS, exclusive=False, level="image")
SETUP_1 = {"1": {0, 1, 2}, "2": {1, 2, 3}, "3": {2, 3, 4}, "4": {3, 4, 5}}
"""The label matrix of FedPSL's first setup: client -> classes."""


def cnn(**options: Any) -> nn.Module:
    return nets.build(
        "cnn", {"filters": [8, 8], **options}, in_channels=1, classes=len(SPACE), spatial_dims=2, seed=3
    )


class ImageSite(HeldSite):
    """n images of 8 x 8, all annotated for the same classes."""

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
        super().__init__(name, annotated, n, make, space=space)
        rng = generator(name, "data")
        self.image = torch.randn(n, 1, 8, 8, generator=rng)
        self.target = (torch.rand(n, len(space), generator=rng) < 0.4).float()
        self.known = torch.tensor([self.labels.known] * n)
        self.known &= torch.rand(n, len(space), generator=rng) < label_rate
        self.n_labelled = self.known.sum(0)
        self.n_positive = (self.known & (self.target > 0)).sum(0)
