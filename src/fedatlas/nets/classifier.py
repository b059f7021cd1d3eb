"""Nets for findings of whole images: a feature extractor and one linear row per class.

Shapes: B batch, I input channels, *S the image's axes (H, W; `cnn` takes volumes, too), d features, *s those of the
last maps, C classes.
"""

from collections.abc import Sequence
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from fedatlas.core.errors import FederationError
from fedatlas.core.options import Natural, option, options
from fedatlas.nets.module import Net


class Classifier(Net):
    """A net whose output is one logit per class and image: [B, I, *S] -> [B, C].

    maps: the extractor's last maps, after their activation, [B, I, *S] -> [B, d, *s]. smallest: the least size of
    each axis of an image. neck: makes the features of the maps, [B, d, *s] -> [B, n_features]; None: their means.
    """

    level = "image"

    def __init__(
        self,
        maps: nn.Module,
        n_features: int,
        in_channels: int,
        classes: int,
        *,
        smallest: int,
        spatial_dims: int = 2,
        neck: nn.Module | None = None,
    ) -> None:
        super().__init__(in_channels, classes, (1,) * spatial_dims)
        self.extractor, self.n_features, self.smallest = maps, n_features, smallest
        self.neck = neck
        self.head = nn.Linear(n_features, classes)

    def maps(self, x: Tensor) -> Tensor:
        """[B, d, *s]."""
        return self.extractor(x)

    def features(self, x: Tensor) -> Tensor:
        """f(x) of the papers: the mean of each map, or what the neck makes of them, [B, n_features]."""
        maps = self.maps(x)
        return self.neck(maps) if self.neck is not None else maps.mean(tuple(range(2, maps.dim())))

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, C]."""
        return self.head(self.features(x))

    def parts(self) -> dict[str, nn.Module | list[nn.Module]]:
        """encoder: the extractor; head: the rows of the classes. A neck is neither."""
        return {"encoder": self.extractor, "head": self.head}

    def check_patch(self, patch: Sequence[int]) -> None:
        """Raises FederationError for an image of another number of axes, or smaller than the net's strides."""
        if len(patch) != self.spatial_dims:
            raise FederationError(
                f"size {list(patch)}: has {len(patch)} axes, the net has {self.spatial_dims}"
            )
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
        from monai.networks.nets.densenet import (  # MONAI takes seconds to import
            DenseNet121 as MonaiDenseNet121,
        )

        net = MonaiDenseNet121(
            spatial_dims=2, in_channels=in_channels, out_channels=classes, dropout_prob=self.dropout
        )
        maps = nn.Sequential(net.features, nn.ReLU())
        features = int(net.class_layers[-1].in_features)  # type: ignore[arg-type]
        return Classifier(maps, features, in_channels, classes, smallest=32)


@options
class CNN:
    """A small convolutional net for CPUs: blocks of two convolutions, halved between them; of images or volumes.

    VGG-11 (Simonyan 2015, configuration A) is filters [64, 128, 256, 512, 512], convolutions [1, 1, 2, 2, 2], norm
    none, halve_last, cells 7, hidden [4096, 4096].
    """

    filters: tuple[Natural, ...] = option((16, 32, 64, 128), "Channels of each block.", min_length=1)
    convolutions: tuple[Literal[1, 2], ...] = option((), "Convolutions of each block; empty: two.")
    norm: Literal["group", "batch", "instance", "none"] = option(
        "group",
        "Normalisation; group has 8 groups, and nothing of it depends on the other images of a batch.",
    )
    dropout: float = option(0.0, "Probability of dropout of the maps.", ge=0, lt=1)
    halve_last: bool = option(False, "Whether the maps of the last block are halved, too.")
    hidden: tuple[Natural, ...] = option(
        (), "Widths of fully connected layers, each with dropout of a half, before the rows of the classes."
    )
    cells: int = option(
        1, "With hidden: maps are averaged to so many cells along each axis before these.", ge=1
    )

    def build(self, *, in_channels: int, classes: int, spatial_dims: int) -> Classifier:
        """The net, with weights from torch's global generator. Raises FederationError for options that do not go
        together."""
        if self.norm == "group" and any(width % 8 for width in self.filters):
            raise FederationError(
                f"cnn: filters {list(self.filters)} with group norm; allowed: multiples of 8"
            )
        convolutions = self.convolutions or (2,) * len(self.filters)
        if len(convolutions) != len(self.filters):
            raise FederationError(
                f"cnn: convolutions {list(convolutions)} for {len(self.filters)} filters; give one number for each block"
            )
        blocks: list[nn.Module] = []
        width = in_channels
        for number, (wider, count) in enumerate(zip(self.filters, convolutions, strict=True)):
            blocks.append(_Block(width, wider, self.norm, spatial_dims, count=count, halved=number > 0))
            width = wider
        if self.halve_last:
            blocks.append((nn.MaxPool2d, nn.MaxPool3d)[spatial_dims - 2](2))
        if self.dropout:
            blocks.append((nn.Dropout2d, nn.Dropout3d)[spatial_dims - 2](self.dropout))
        neck, features = self._neck(width, spatial_dims) if self.hidden else (None, width)
        return Classifier(
            nn.Sequential(*blocks),
            features,
            in_channels,
            classes,
            smallest=2 ** (len(self.filters) - 1 + self.halve_last),
            spatial_dims=spatial_dims,
            neck=neck,
        )

    def _neck(self, width: int, spatial_dims: int) -> tuple[nn.Module, int]:
        pool = (nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)[spatial_dims - 2]
        layers: list[nn.Module] = [pool(self.cells), nn.Flatten()]
        width *= self.cells**spatial_dims
        for wider in self.hidden:
            layers += [nn.Linear(width, wider), nn.ReLU(), nn.Dropout(0.5)]
            width = wider
        return nn.Sequential(*layers), width


class _Block(nn.Module):
    """One or two convolutions. Without normalisation they have a bias and begin as He 2015 has them, or a deep net
    would begin with outputs that hardly depend on the image."""

    def __init__(
        self, width: int, wider: int, norm: str, spatial_dims: int, *, count: int, halved: bool
    ) -> None:
        super().__init__()
        self.pool = (F.max_pool2d, F.max_pool3d)[spatial_dims - 2] if halved else None
        self.first = _convolution(width, wider, norm, spatial_dims)
        self.first_norm = _norm(norm, wider, spatial_dims)
        self.second = _convolution(wider, wider, norm, spatial_dims) if count == 2 else None
        self.second_norm = _norm(norm, wider, spatial_dims) if count == 2 else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(x, 2) if self.pool else x
        x = F.relu(self.first_norm(self.first(x)))
        if self.second is None or self.second_norm is None:
            return x
        return F.relu(self.second_norm(self.second(x)))


def _convolution(width: int, wider: int, norm: str, spatial_dims: int) -> nn.Module:
    kind = (nn.Conv2d, nn.Conv3d)[spatial_dims - 2]
    made = kind(width, wider, 3, padding=1, bias=norm == "none")
    if made.bias is not None:
        nn.init.kaiming_normal_(made.weight, mode="fan_out", nonlinearity="relu")
        nn.init.zeros_(made.bias)
    return made


def _norm(kind: str, width: int, spatial_dims: int) -> nn.Module:
    if kind == "none":
        return nn.Identity()
    if kind == "group":
        return nn.GroupNorm(8, width)
    if kind == "batch":
        return (nn.BatchNorm2d, nn.BatchNorm3d)[spatial_dims - 2](width)
    return (nn.InstanceNorm2d, nn.InstanceNorm3d)[spatial_dims - 2](width, affine=True)


def _two_axes(name: str, spatial_dims: int) -> None:
    if spatial_dims != 2:
        raise FederationError(f"net {name}: takes images of 2 axes, got {spatial_dims}")
