"""DoDNet: one net for all organs, whose head is made anew for every organ and image.

Zhang, Xie, Xia, Shen. DoDNet: learning to segment multi-organ and tumors from multiple partially labeled datasets.
CVPR 2021.

A task is an organ with its lesions. A controller reads the means of the encoder's lowest maps beside the number of the
task (one-hot) and says the 162 values of a head of three convolutions of size 1, with 8, 8 and 2 channels and ReLU
between them. The head reads the last eight maps of the decoder and gives two logits: of the organ with its lesions, and
of the lesion. All other parameters are common to all tasks.

The logits of exclusive classes are the merge of the heads (`core.organs.merge_heads`), from which `core.organs.read_heads` gives
the heads back.

Differences from the paper
    It runs the whole net once per task. As a task enters behind the encoder only, encoder and decoder run once here,
    and the head once per task; the numbers are the same. An organ with several lesions has a channel for each, and the
    heads of all tasks as many channels as the longest needs; those that an organ does not have are not read.

Its papers train it with SGD at a rate of 0.01. At 0.05 the first steps can leave the ReLUs of a head 0 everywhere, from
which it does not come back: the loss stays where it is, and nothing is found.

Reconstruction: the net between image and head, of which the paper says what `kim_unet` repeats; 8 groups, linear
interpolation, a convolution of size 1 before a sum and before the head; standardised weights as in the official code.
With seven tasks it has 16,029,688 parameters, the official net 17,329,528.

Shapes: B batch, I input channels, C classes with the background, M tasks, F channels of the lowest maps, n values of a
head, N voxels, *S spatial.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedatlas.core.errors import FederationError
from fedatlas.core.options import Natural, option, options
from fedatlas.core.organs import Groups, check_groups, complete, merge_heads
from fedatlas.nets.module import Net

WIDTH = 8
"""Channels of the maps that a head reads, and of its first two layers."""
NORM_GROUPS = 8
"""Of a group norm."""

Norm = Literal["group", "instance"]


@options
class DoDNet:
    """Residual U-Net in 2D or 3D with a dynamic head: a controller makes it for every organ and image (Zhang 2021)."""

    filters: tuple[Natural, ...] = option(
        (32, 64, 128, 256, 256), "Channels per level, from the top.", min_length=2
    )
    strides: list[int | list[int]] | None = option(
        None,
        "Stride into each level, one number or one per axis, 1 to 3; 1, then 2 at every level by default.",
    )
    norm: Norm = option("group", "Normalisation; group has 8 groups.")
    standardised: bool = option(
        True,
        "Whether the weights of a convolution are used with mean 0 and variance 1 per filter (official code).",
    )
    groups: tuple[tuple[int, ...], ...] | None = option(
        None,
        "Organs with lesions, as class indices, the organ first; any other class is an organ without. Null: "
        "those of labels.groups.",
    )

    def build(self, *, in_channels: int, classes: int, spatial_dims: int) -> "DoDNetModule":
        """The net, with weights from torch's global generator. Raises FederationError for strides or groups that do
        not fit the levels, the axes or the classes, and for channels that the norm cannot divide."""
        if self.norm == "group" and any(width % NORM_GROUPS for width in self.filters):
            raise FederationError(
                f"net dodnet: filters are {list(self.filters)}; allowed with norm group: multiples of {NORM_GROUPS}"
            )
        given = self.strides or [1, *[2] * (len(self.filters) - 1)]
        strides = [level if isinstance(level, list) else [level] * spatial_dims for level in given]
        if (
            [len(level) for level in strides] != [spatial_dims] * len(self.filters)
            or set(strides[0]) != {1}
            or not {size for level in strides for size in level} <= {1, 2, 3}
        ):
            raise FederationError(
                f"net dodnet: strides are {given}; allowed: {len(self.filters)} entries, one per level of filters, "
                f"each a number of 1 to 3 or {spatial_dims} of them, the first of them 1"
            )
        check_groups(self.groups or (), classes, what="net dodnet")
        return DoDNetModule(self, in_channels, classes, strides)


class DoDNetModule(Net):
    """Encoder, decoder, controller. organs: the classes of each organ, in the order of their first class; task m is
    organs[m]."""

    by_organ = True

    def __init__(
        self, chosen: DoDNet, in_channels: int, classes: int, strides: Sequence[Sequence[int]]
    ) -> None:
        dims, filters = len(strides[0]), chosen.filters
        super().__init__(in_channels, classes, [math.prod(axis) for axis in zip(*strides, strict=True)])
        self.organs: Groups = tuple(sorted(complete(chosen.groups or (), classes), key=min))
        self.outputs = max(2, *map(len, self.organs))

        def layer(channels: int, width: int, kernel: int, stride: Sequence[int] = (1,) * dims) -> "Layer":
            return Layer(channels, width, kernel, stride, chosen.norm, standardised=chosen.standardised)

        def residual(width: int) -> "Residual":
            return Residual(layer(width, width, 3), layer(width, width, 3))

        self.downs = nn.ModuleList(
            nn.Sequential(layer(a, b, 3, stride), nn.ReLU(), residual(b))
            for a, b, stride in zip((in_channels, *filters[:-1]), filters, strides, strict=True)
        )
        self.ups = nn.ModuleList(
            Up(layer(below, width, 1), residual(width))
            for below, width in zip(filters[:0:-1], filters[-2::-1], strict=True)
        )
        self.last = _conv(dims)(filters[0], WIDTH, 1)
        # on one voxel, which the means are, a convolution of size 1 is a linear map
        self.controller = nn.Linear(filters[-1] + len(self.organs), sum(head_sizes(self.outputs)))

    def forward(self, x: Tensor, tasks: Iterable[int] | None = None) -> Tensor | list[Tensor]:
        """Logits [B, C, *S] of all classes, or with `tasks` the heads [B, len(organs[m]), *S] of each of them, in the
        order in which they are asked for: logits of the organ with its lesions, then of each lesion."""
        skips: list[Tensor] = []
        for down in self.downs:
            x = down(x)
            skips.append(x)
        x = skips.pop()
        means = x.flatten(2).mean(2)
        for up in self.ups:
            x = up(x, skips.pop())
        maps = self.last(x)
        if tasks is not None:
            return [self._head(maps, means, m) for m in tasks]
        h: list[Tensor] = [maps[:, 0]] * (self.classes - 1)
        for m, organ in enumerate(self.organs):
            for c, logit in zip(organ, self._head(maps, means, m).unbind(1), strict=True):
                h[c - 1] = logit
        return merge_heads(torch.stack(h, 1), self.organs)

    def _head(self, maps: Tensor, means: Tensor, m: int) -> Tensor:
        """[B, len(organs[m]), *S]; maps [B, 8, *S]; means [B, F]."""
        task = means.new_zeros(len(means), len(self.organs))
        task[:, m] = 1
        values = self.controller(torch.cat([means, task], 1))
        return dynamic_head(maps, values)[:, : len(self.organs[m])]

    def parts(self) -> dict[str, nn.Module | list[nn.Module]]:
        """encoder: all levels down to the bottom; decoder: the levels up, and the maps that a head reads; controller,
        which is in the place of a head."""
        return {"encoder": self.downs, "decoder": [self.ups, self.last], "controller": self.controller}


def head_sizes(outputs: int) -> list[int]:
    """How many values of a head are of its three weights, then of its three biases: 162 together for two outputs."""
    return [WIDTH * WIDTH, WIDTH * WIDTH, outputs * WIDTH, WIDTH, WIDTH, outputs]


def dynamic_head(maps: Tensor, values: Tensor) -> Tensor:
    """The logits [B, outputs, *S] of heads, one for each sample, of maps [B, 8, *S].

    values [B, n]: three weights, row by row, then three biases; n tells the outputs. A convolution of size 1 with a
    group for each sample is one product of matrices per sample.
    """
    outputs = (values.shape[1] - sum(head_sizes(0))) // (WIDTH + 1)
    *weights, b1, b2, b3 = values.split(head_sizes(outputs), 1)
    x = maps.flatten(2)
    for place, (w, b) in enumerate(zip(weights, (b1, b2, b3), strict=True)):
        x = torch.baddbmm(b[:, :, None], w.unflatten(1, (-1, WIDTH)), x.relu() if place else x)
    return x.unflatten(2, maps.shape[2:])


class Layer(nn.Module):
    """A convolution without bias, and a norm."""

    def __init__(
        self, channels: int, width: int, kernel: int, stride: Sequence[int], norm: Norm, *, standardised: bool
    ) -> None:
        super().__init__()
        conv, dims = _conv(len(stride)), len(stride)
        self.conv = conv(channels, width, kernel, tuple(stride), kernel // 2, bias=False)  # type: ignore[arg-type]
        nn.init.kaiming_normal_(self.conv.weight, nonlinearity="relu")
        instance = nn.InstanceNorm2d if dims == 2 else nn.InstanceNorm3d
        self.norm = nn.GroupNorm(NORM_GROUPS, width) if norm == "group" else instance(width, affine=True)
        self.standardised = standardised

    def forward(self, x: Tensor) -> Tensor:
        weight = standardise(self.conv.weight) if self.standardised else self.conv.weight
        convolve: Callable[..., Tensor] = F.conv2d if x.dim() == 4 else F.conv3d
        return self.norm(convolve(x, weight, stride=self.conv.stride, padding=self.conv.padding))


def standardise(weight: Tensor) -> Tensor:
    """The weights [out, in, *kernel] of a convolution with mean 0 and variance 1, unbiased, per filter."""
    axes = tuple(range(1, weight.dim()))
    variance, mean = torch.var_mean(weight, axes, keepdim=True)
    return (weight - mean) / (variance + 1e-12).sqrt()


class Residual(nn.Module):
    """x and two layers of it, summed before the last ReLU."""

    def __init__(self, first: Layer, second: Layer) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.second(F.relu(self.first(x))))


class Up(nn.Module):
    """Maps from below at the resolution of those of the encoder, added to them and refined."""

    def __init__(self, narrow: Layer, refine: Residual) -> None:
        super().__init__()
        self.narrow, self.refine = narrow, refine

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        x, mode = F.relu(self.narrow(x)), "bilinear" if x.dim() == 4 else "trilinear"
        return self.refine(skip + F.interpolate(x, size=skip.shape[2:], mode=mode, align_corners=False))


def _conv(dims: int) -> type[nn.Conv2d] | type[nn.Conv3d]:
    return nn.Conv2d if dims == 2 else nn.Conv3d
