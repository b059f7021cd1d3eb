"""The U-Net of UFPS, with deep supervision on its encoder, in two and three dimensions.

Jiang, Ma, Zeng, Ying. UFPS: a unified framework for partially annotated federated segmentation in heterogeneous data
distribution. Patterns, 2024. The net is nnU-Net's modular U-Net (Isensee et al., nnU-Net: a self-configuring method
for deep learning-based biomedical image segmentation, Nature Methods, 2021) with its supervision moved.

A level of the encoder is two convolutions of size 3, the first of them with the level's stride; a transposed convolution
of the size of that stride leads up again, and the level's maps are put beside its output. In training, every level of
the encoder but the first and the lowest has a head, whose logits are interpolated to full resolution.

With the default options, one channel and five classes it has 30,787,584 parameters, as published: encoder 14,025,120,
decoder 16,758,464, head 160, deep supervision 3,840.

Batch norm keeps no running statistics: in evaluation too a batch is normalised by itself, so an image's logits depend
on what else is in its batch.

The first weights are PyTorch's own.

Differences from the official code: slices are the last axis here, so it is the last that the sixth level does not
halve.

Shapes: B batch, I input channels, C classes with the background, *S spatial.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedatlas.core.errors import FederationError
from fedatlas.core.options import option, options
from fedatlas.nets.module import Net

SLOPE = 0.01
"""Of the leaky ReLU."""

KERNEL = 3

Norm = Literal["batch", "instance"]


@options
class UFPSUNet:
    """nnU-Net's modular U-Net in 2D or 3D, with deep supervision on its encoder (UFPS)."""

    name: ClassVar[str] = "ufps_unet"
    """As it is registered."""

    width: int = option(32, "Channels of the first level; each further level doubles them.", ge=1)
    max_width: int = option(320, "The most channels that a level has.", ge=1)
    levels: int = option(6, "Levels of the encoder, the lowest included.", ge=2)
    strides: list[int | list[int]] | None = option(
        None,
        "Stride into each level after the first, one number or one per axis, 1 to 3; by default 2, and in 3D 1 along "
        "the last axis from the sixth level on.",
    )
    norm: Norm = option("batch", "Normalisation; batch: by the statistics of the batch, in evaluation too.")
    deep_supervision: bool = option(
        True, "Whether the levels of the encoder between the first and the lowest have heads in training."
    )

    def build(self, *, in_channels: int, classes: int, spatial_dims: int) -> "UFPSUNetModule":
        """The net, with weights from torch's global generator. Raises FederationError for strides that do not fit the
        levels or the axes."""
        given = self.strides
        if given is None:
            later = [2, 2, 1] if spatial_dims == 3 else [2, 2]
            given = [2 if level < 5 else later for level in range(1, self.levels)]
        strides = [level if isinstance(level, list) else [level] * spatial_dims for level in given]
        if len(strides) != self.levels - 1 or any(
            len(level) != spatial_dims or not all(1 <= size <= KERNEL for size in level) for level in strides
        ):
            raise FederationError(
                f"net {self.name}: strides are {given}; allowed: {self.levels - 1} entries, one per level after the "
                f"first, each a number from 1 to {KERNEL}, or {spatial_dims} of them"
            )
        return UFPSUNetModule(self, in_channels, classes, strides)


class UFPSUNetModule(Net):
    """An encoder, a decoder and their heads."""

    def __init__(
        self, chosen: UFPSUNet, in_channels: int, classes: int, strides: Sequence[Sequence[int]]
    ) -> None:
        dims = len(strides[0])
        super().__init__(in_channels, classes, [math.prod(axis) for axis in zip(*strides, strict=True)])
        widths = [min(chosen.width * 2**level, chosen.max_width) for level in range(chosen.levels)]
        self.encoder = nn.ModuleList(
            Level(before, width, stride, chosen.norm)
            for (before, width), stride in zip(
                pairwise((in_channels, *widths)), ([1] * dims, *strides), strict=True
            )
        )
        self.decoder = Decoder(widths, strides, chosen.norm)
        self.head = _conv(dims)(widths[0], classes, 1, bias=False)
        self.heads = nn.ModuleList(
            _conv(dims)(width, classes, 1, bias=False)
            for width in (widths[1:-1] if chosen.deep_supervision else [])
        )

    def forward(self, x: Tensor) -> Tensor | list[Tensor]:
        """Logits [B, C, *S]; in training with deep supervision a list of them, all at full resolution: of the decoder,
        then of the encoder's levels from the second on."""
        size, mode = x.shape[2:], "bilinear" if x.dim() == 4 else "trilinear"
        maps: list[Tensor] = []
        for level in self.encoder:
            x = level(x)
            maps.append(x)
        logits = self.head(self.decoder(maps))
        if not self.training or not len(self.heads):
            return logits
        supervised = zip(self.heads, maps[1:-1], strict=True)
        return [logits, *(F.interpolate(head(each), size, mode=mode) for head, each in supervised)]

    def parts(self) -> dict[str, nn.Module | list[nn.Module]]:
        """encoder: all levels down to the lowest; decoder: the levels up; head: its last convolution;
        deep_supervision: the encoder's heads."""
        named: dict[str, nn.Module | list[nn.Module]] = {
            "encoder": self.encoder,
            "decoder": self.decoder,
            "head": self.head,
        }
        if len(self.heads):
            named["deep_supervision"] = self.heads
        return named


class Level(nn.Module):
    """Twice a convolution, norm and leaky ReLU; the first convolution has a stride."""

    def __init__(self, channels: int, width: int, stride: Sequence[int], norm: Norm) -> None:
        super().__init__()
        dims = len(stride)
        self.convs = nn.ModuleList(
            _conv(dims)(before, width, KERNEL, stride=tuple(step), padding=KERNEL // 2)  # type: ignore[arg-type]
            for before, step in ((channels, stride), (width, [1] * dims))
        )
        self.norms = nn.ModuleList(_norm(norm, dims, width) for _ in self.convs)

    def forward(self, x: Tensor) -> Tensor:
        """[B, channels, *S] -> [B, width, *S / stride]."""
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.leaky_relu(norm(conv(x)), SLOPE)
        return x


class Decoder(nn.Module):
    """The levels from the bottom up. widths: channels of the encoder's levels; strides: into all but the first."""

    def __init__(self, widths: Sequence[int], strides: Sequence[Sequence[int]], norm: Norm) -> None:
        super().__init__()
        dims = len(strides[0])
        up = nn.ConvTranspose2d if dims == 2 else nn.ConvTranspose3d
        upward = list(zip(pairwise(widths), strides, strict=True))[::-1]
        self.ups = nn.ModuleList(
            up(below, width, tuple(stride), tuple(stride), bias=False)  # type: ignore[arg-type]
            for (width, below), stride in upward
        )
        self.levels = nn.ModuleList(Level(2 * width, width, [1] * dims, norm) for (width, _), _ in upward)

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        """The maps [B, width, *S] of full resolution. maps: of the encoder's levels."""
        x = maps[-1]
        for up, level, skip in zip(self.ups, self.levels, maps[-2::-1], strict=True):
            x = level(torch.cat([up(x), skip], 1))
        return x


def _conv(dims: int) -> type[nn.Conv2d] | type[nn.Conv3d]:
    return nn.Conv2d if dims == 2 else nn.Conv3d


def _norm(norm: Norm, dims: int, width: int) -> nn.Module:
    if norm == "instance":
        return (nn.InstanceNorm2d if dims == 2 else nn.InstanceNorm3d)(width, affine=True)
    return (nn.BatchNorm2d if dims == 2 else nn.BatchNorm3d)(width, track_running_stats=False)
