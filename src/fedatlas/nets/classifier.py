"""Nets for findings of whole images: a feature extractor and one linear row per class.

Shapes: B batch, I input channels, H, W the image, d features, h, w the last maps, C classes.
"""

from collections.abc import Sequence
from typing import Literal

import torch.nn.functional as F
from monai.networks.nets.densenet import DenseNet121 as MonaiDenseNet121
from torch import Tensor, nn

from fedatlas.errors import FederationError
from fedatlas.nets.module import Net
from fedatlas.options import option, options


class Classifier(Net):
    """A net whose output is one logit per class and image: [B, I, H, W] -> [B, C].

    maps: the extractor's last maps, after their activation, [B, I, H, W] -> [B, d, h, w]. smallest: the least size of
    each axis of an image.
    """

    level = "image"

    def __init__(
        self, maps: nn.Module, n_features: int, in_channels: int, classes: int, *, smallest: int
    ) -> None:
        super().__init__(in_channels, classes, (1, 1))
        self.extractor, self.n_features, self.smallest = maps, n_features, smallest
        self.head = nn.Linear(n_features, classes)

    def maps(self, x: Tensor) -> Tensor:
        """[B, d, h, w]."""
        return self.extractor(x)

    def features(self, x: Tensor) -> Tensor:
        """f(x) of the papers: the mean of each map, [B, d]."""
        return self.maps(x).mean((2, 3))

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, C]."""
        return self.head(self.features(x))

    def parts(self) -> dict[str, nn.Module | list[nn.Module]]:
        """encoder: the extractor; head: the rows of the classes."""
        return {"encoder": self.extractor, "head": self.head}

    def check_patch(self, patch: Sequence[int]) -> None:
        """Raises FederationError for an image of another number of axes, or smaller than the net's strides."""
        if len(patch) != 2:
            raise FederationError(f"size {list(patch)}: has {len(patch)} axes, the net has 2")
        if min(patch) < self.smallest:
            raise FederationError(
                f"size {list(patch)}: the net needs at least {self.smallest} along each axis"
            )


@options
class DenseNet121:
    """DenseNet-121 with batch norm (Huang 2017; MONAI's), 1,024 features."""

    dropout: float = option(0.0, "Probability of dropout in every dense layer.", ge=0, lt=1)

    def build(self, *, in_channels: int, classes: int, spatial_dims: int) -> Classifier:
        """The net, with weights from torch's global generator."""
        _two_axes("densenet121", spatial_dims)
        net = MonaiDenseNet121(
            spatial_dims=2, in_channels=in_channels, out_channels=classes, dropout_prob=self.dropout
        )
        maps = nn.Sequential(net.features, nn.ReLU())
        features = int(net.class_layers[-1].in_features)  # type: ignore[arg-type]
        return Classifier(maps, features, in_channels, classes, smallest=32)


@options
class CNN:
    """A small convolutional net for CPUs: blocks of two convolutions, halved between them."""

    filters: tuple[int, ...] = option((16, 32, 64, 128), "Channels of each block.", min_length=1)
    norm: Literal["group", "batch", "instance"] = option(
        "group",
        "Normalisation; group has 8 groups, and nothing of it depends on the other images of a batch.",
    )
    dropout: float = option(0.0, "Probability of dropout of the maps.", ge=0, lt=1)

    def build(self, *, in_channels: int, classes: int, spatial_dims: int) -> Classifier:
        """The net, with weights from torch's global generator."""
        _two_axes("cnn", spatial_dims)
        if self.norm == "group" and any(width % 8 for width in self.filters):
            raise FederationError(
                f"cnn: filters {list(self.filters)} with group norm; allowed: multiples of 8"
            )
        blocks: list[nn.Module] = []
        width = in_channels
        for number, wider in enumerate(self.filters):
            blocks.append(_Block(width, wider, self.norm, halved=number > 0))
            width = wider
        if self.dropout:
            blocks.append(nn.Dropout2d(self.dropout))
        return Classifier(
            nn.Sequential(*blocks), width, in_channels, classes, smallest=2 ** (len(self.filters) - 1)
        )


class _Block(nn.Module):
    def __init__(self, width: int, wider: int, norm: str, *, halved: bool) -> None:
        super().__init__()
        self.halved = halved
        self.first = nn.Conv2d(width, wider, 3, padding=1, bias=False)
        self.first_norm = _norm(norm, wider)
        self.second = nn.Conv2d(wider, wider, 3, padding=1, bias=False)
        self.second_norm = _norm(norm, wider)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(x, 2) if self.halved else x
        x = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.second_norm(self.second(x)))


def _norm(kind: str, width: int) -> nn.Module:
    if kind == "group":
        return nn.GroupNorm(8, width)
    return nn.BatchNorm2d(width) if kind == "batch" else nn.InstanceNorm2d(width, affine=True)


def _two_axes(name: str, spatial_dims: int) -> None:
    if spatial_dims != 2:
        raise FederationError(f"net {name}: takes images of 2 axes, got {spatial_dims}")
