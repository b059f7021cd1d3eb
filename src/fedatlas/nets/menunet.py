"""The multi-encoding U-Net of Fed-MENU, in two and three dimensions.

Xu, Deng, Gateno, Yan. Federated multi-organ segmentation with inconsistent labels. IEEE Trans. Med. Imaging, 2023.

A sub-encoder for every organ sees the image by itself; the maps of all of them, side by side, feed one decoder. The
auxiliary generic decoder (AGD) is one small head per level, shared by all organs: from the maps of a single
sub-encoder it tells that organ from everything else. It is for training alone.

With one organ that holds all classes and without AGD it is the paper's U-Net: 96,612,126 parameters at width 96, five
classes besides the background and deep supervision; MENU-Net has 77,603,558 at width 20 with five organs.

Differences from the paper: the heads of deep supervision, which the official code has and does not train, are there
only if asked for. A level may be pooled by another number per axis.

Shapes: B batch, I input channels, C classes with the background, M organs, b width, *S spatial.
"""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedatlas.core.errors import FederationError
from fedatlas.core.options import option, options
from fedatlas.core.organs import Groups, check_groups, complete
from fedatlas.nets.module import Net, Outputs

SLOPE = 0.01
"""Of the leaky ReLU."""

Grouped = bool | Literal["auto"]


@options
class MENUNet:
    """MENU-Net in 2D or 3D: an encoder per organ, a shared decoder, and an auxiliary generic decoder (Xu 2023)."""

    width: int = option(
        20, "b: channels of the first level of one sub-encoder; each further level doubles it.", ge=1
    )
    levels: int = option(4, "Levels of a sub-encoder; each ends with a pooling.", ge=1)
    strides: list[int | list[int]] | None = option(
        None, "By how much each level is pooled, one number or one per axis; 2 by default."
    )
    groups: tuple[tuple[int, ...], ...] | None = option(
        None,
        "Organs of several classes, as class indices, the organ first; any other class is an organ of its own. "
        "Null: those of labels.groups.",
    )
    agd: bool = option(True, "Whether there is an auxiliary generic decoder.")
    deep_supervision: bool = option(False, "Whether every level of the decoder has a head in training.")
    affine: bool = option(False, "Whether instance norm has a scale and a shift per channel.")
    grouped: Grouped = option(
        "auto",
        "Whether the sub-encoders run as one grouped computation, whose numbers are the same within rounding; auto: on "
        "a CPU, three or more at once, where it was measured to be faster.",
    )

    def build(self, *, in_channels: int, classes: int, spatial_dims: int) -> "MENUNetModule":
        """The net, with weights from torch's global generator. Raises FederationError for strides or groups that do
        not fit the levels, the axes or the classes."""
        given = self.strides or [2] * self.levels
        strides = [level if isinstance(level, list) else [level] * spatial_dims for level in given]
        if len(strides) != self.levels or any(
            len(level) != spatial_dims or min(level) < 1 for level in strides
        ):
            raise FederationError(
                f"net menunet: strides are {given}; allowed: {self.levels} entries, one per level, each a number of 1 "
                f"or more, or {spatial_dims} of them"
            )
        check_groups(self.groups or (), classes, what="net menunet")
        net = MENUNetModule(self, in_channels, classes, strides)
        net.apply(_initialise)
        return net


def _initialise(module: nn.Module) -> None:
    """Xavier's normal distribution for convolutions, transposed ones excepted, and a bias of 0."""
    if isinstance(module, nn.Conv2d | nn.Conv3d):
        nn.init.xavier_normal_(module.weight)
        assert module.bias is not None
        nn.init.zeros_(module.bias)


class MENUNetModule(Net):
    """M sub-encoders, a decoder, and the AGD.

    organs: the classes of each organ, in the order of their first class; sub-encoder m is for organs[m]. grouped: as
    the option; set it to False to hook into a sub-encoder, which a grouped computation does not call.
    """

    by_organ = True

    def __init__(
        self, chosen: MENUNet, in_channels: int, classes: int, strides: Sequence[Sequence[int]]
    ) -> None:
        dims = len(strides[0])
        super().__init__(in_channels, classes, [math.prod(axis) for axis in zip(*strides, strict=True)])
        self.organs: Groups = tuple(sorted(complete(chosen.groups or (), classes), key=min))
        self.strides, self.grouped = [tuple(level) for level in strides], chosen.grouped
        widths = [chosen.width * 2**level for level in range(chosen.levels)]
        affine = chosen.affine
        self.encoders = nn.ModuleList(
            SubEncoder(in_channels, widths, self.strides, affine) for _ in self.organs
        )
        self.decoder = Decoder([len(self.organs) * width for width in widths], self.strides, affine)
        self.head = _conv(dims)(self.decoder.widths[0], classes, 1)
        self.heads = nn.ModuleList(
            _conv(dims)(width, classes, 1) for width in self.decoder.widths[1:] if chosen.deep_supervision
        )
        self.agd = nn.ModuleList(
            nn.Sequential(DoubleConv(width, chosen.width, dims, affine), _conv(dims)(chosen.width, 2, 1))
            for width in widths
            if chosen.agd
        )

    def forward(self, x: Tensor, experts: Sequence[int] | None = None) -> Outputs | list[list[Tensor]]:
        """Logits [B, C, *S], or in training with deep supervision the list of them, the full resolution first.

        With `experts`, places of sub-encoders: for each of them, and every level, the logits [B, 2, *S] of the AGD
        for "not this organ" and "this organ"; the decoder takes no part. A FederationError where there is no AGD.
        """
        if experts is not None:
            return self._auxiliary(x, experts)
        levels = self._encoded(x, range(len(self.encoders)))
        skips = [level[0] if len(level) == 1 else torch.cat(list(level), 1) for level in levels]
        maps = self.decoder(skips)
        logits = self.head(maps[0])
        if not self.training or not len(self.heads):
            return logits
        return [logits, *(head(each) for head, each in zip(self.heads, maps[1:], strict=True))]

    def _auxiliary(self, x: Tensor, experts: Sequence[int]) -> list[list[Tensor]]:
        if not len(self.agd):
            raise FederationError("net menunet: has no auxiliary generic decoder; set its option agd to true")
        size, mode = x.shape[2:], "bilinear" if x.dim() == 4 else "trilinear"
        levels = self._encoded(x, experts)
        maps = [level[0].chunk(len(experts), 1) if len(level) == 1 else level for level in levels]
        return [
            [
                F.interpolate(head(level[place]), size, mode=mode, align_corners=False)
                for head, level in zip(self.agd, maps, strict=True)
            ]
            for place in range(len(experts))
        ]

    def _encoded(self, x: Tensor, experts: Sequence[int]) -> list[Sequence[Tensor]]:
        """The maps of every level before its pooling: those of each given sub-encoder, or of all of them in one."""
        chosen = [self.encoders[m] for m in experts]
        grouped = len(chosen) > 2 and x.device.type == "cpu" if self.grouped == "auto" else self.grouped
        if not grouped or len(chosen) == 1:
            return list(zip(*(encoder(x) for encoder in chosen), strict=True))
        # a grouped convolution has the gradients of all its weights or of none: what is not trained runs by itself
        trained = [i for i, e in enumerate(chosen) if any(p.requires_grad for p in e.parameters())]
        frozen = [i for i in range(len(chosen)) if i not in trained]
        if not trained or not frozen or not torch.is_grad_enabled():
            return [[level] for level in encode_grouped(chosen, x)]
        place = {i: at for at, i in enumerate([*frozen, *trained])}
        runs = [encode_grouped([chosen[i] for i in run], x) for run in (frozen, trained)]
        levels = [[*a.chunk(len(frozen), 1), *b.chunk(len(trained), 1)] for a, b in zip(*runs, strict=True)]
        return [[level[place[i]] for i in range(len(chosen))] for level in levels]

    def parts(self) -> dict[str, nn.Module | list[nn.Module]]:
        """encoder:m: the sub-encoder of organ m; decoder; head: its last convolution, a row per class; agd."""
        named: dict[str, nn.Module | list[nn.Module]] = {
            f"encoder:{m}": encoder for m, encoder in enumerate(self.encoders)
        }
        named |= {"decoder": self.decoder, "head": self.head}
        if len(self.heads):
            named["deep_supervision"] = self.heads
        if len(self.agd):
            named["agd"] = self.agd
        return named


class DoubleConv(nn.Module):
    """Twice a convolution of size 3, instance norm and leaky ReLU."""

    def __init__(self, channels: int, out: int, dims: int, affine: bool) -> None:
        super().__init__()
        self.convs = nn.ModuleList(_conv(dims)(c, out, 3, padding=1) for c in (channels, out))
        norm = nn.InstanceNorm2d if dims == 2 else nn.InstanceNorm3d
        self.norms = nn.ModuleList(norm(out, affine=affine) for _ in self.convs)

    def forward(self, x: Tensor) -> Tensor:
        """[B, channels, *S] -> [B, out, *S]."""
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.leaky_relu(norm(conv(x)), SLOPE)
        return x


class SubEncoder(nn.Module):
    """The encoder of one organ."""

    def __init__(
        self, in_channels: int, widths: Sequence[int], strides: Sequence[Sequence[int]], affine: bool
    ) -> None:
        super().__init__()
        self.strides, dims = strides, len(strides[0])
        self.levels = nn.ModuleList(
            DoubleConv(before, width, dims, affine) for before, width in pairwise((in_channels, *widths))
        )

    def forward(self, x: Tensor) -> list[Tensor]:
        """The maps of every level, before its pooling."""
        maps: list[Tensor] = []
        for level, block in enumerate(self.levels):
            x = block(x if level == 0 else pooled(x, self.strides[level - 1]))
            maps.append(x)
        return maps


class Decoder(nn.Module):
    """The blocks from the bottom up. widths: channels of the maps that it gives."""

    def __init__(self, skips: Sequence[int], strides: Sequence[Sequence[int]], affine: bool) -> None:
        super().__init__()
        self.strides, dims = strides, len(strides[0])
        up = nn.ConvTranspose2d if dims == 2 else nn.ConvTranspose3d
        self.widths = [skips[0], *skips]
        incoming = [skips[0] * 2, *(2 * width for width in skips[1:]), skips[-1]]
        self.blocks = nn.ModuleList(
            DoubleConv(channels, width, dims, affine)
            for channels, width in zip(incoming, self.widths, strict=True)
        )
        self.ups = nn.ModuleList(
            up(width, width, tuple(stride), tuple(stride))  # type: ignore[arg-type]
            for width, stride in zip(skips, strides, strict=True)
        )

    def forward(self, skips: Sequence[Tensor]) -> list[Tensor]:
        """The maps of every block, the full resolution first. skips: of every level, before its pooling."""
        x = self.blocks[-1](pooled(skips[-1], self.strides[-1]))
        maps = [x]
        for level in reversed(range(len(skips))):
            x = self.blocks[level](torch.cat([skips[level], self.ups[level](x)], 1))
            maps.append(x)
        return maps[::-1]


def encode_grouped(encoders: Sequence[nn.Module], x: Tensor) -> list[Tensor]:
    """The maps of several sub-encoders side by side, every convolution of all of them at once."""
    maps: list[Tensor] = []
    strides = encoders[0].strides
    for level, blocks in enumerate(zip(*(encoder.levels for encoder in encoders), strict=True)):  # type: ignore
        x = x if level == 0 else pooled(x, strides[level - 1])  # type: ignore[index]
        for place in range(2):
            convs = [block.convs[place] for block in blocks]
            norms = [block.norms[place] for block in blocks]
            weight, bias = (torch.cat([getattr(conv, name) for conv in convs]) for name in ("weight", "bias"))
            convolve: Callable[..., Tensor] = F.conv2d if x.dim() == 4 else F.conv3d
            # all read the same image
            x = convolve(x, weight, bias, padding=1, groups=1 if level == place == 0 else len(convs))
            scale, shift = None, None
            if norms[0].affine:
                scale, shift = (
                    torch.cat([getattr(norm, name) for norm in norms]) for name in ("weight", "bias")
                )
            x = F.leaky_relu(F.instance_norm(x, weight=scale, bias=shift, eps=norms[0].eps), SLOPE)
        maps.append(x)
    return maps


def pooled(x: Tensor, stride: Sequence[int]) -> Tensor:
    """The largest value of every cell of the size of a stride."""
    pool: Callable[..., Tensor] = F.max_pool2d if x.dim() == 4 else F.max_pool3d
    return pool(x, tuple(stride))


def _conv(dims: int) -> type[nn.Conv2d] | type[nn.Conv3d]:
    return nn.Conv2d if dims == 2 else nn.Conv3d
