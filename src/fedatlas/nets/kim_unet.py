"""The 3D U-Net of Kim's system (Kim et al. 2024), as far as it is described: a reconstruction.

Its description: a residual U-Net with group norm like DoDNet's (Zhang, Xie, Xia, Shen, DoDNet: learning to segment
multi-organ and tumors from multiple partially labeled datasets, CVPR 2021), of 60.4 MB (ConDistFL, Table 6, where 1 MB
is 2^20 bytes: 15.8 million float32 parameters). DoDNet: residual blocks of two convolutions of size 3; a convolution
with stride 2 halves the resolution; 32 maps at first, doubled with every halving; in the decoder the maps from below,
at twice the resolution, are added to those of the encoder and refined by a residual block.

Reconstruction: four halvings, and no more than 256 maps, with which the size is about the published one (for the
seven channels of ConDistFL's heads 15,986,887 parameters, 61.0 MB; with 512 maps at the bottom 108.5 MB); a convolution
of size 1 brings maps to the width of those that they are added to; trilinear interpolation; 8 groups; norm after every
convolution, and ReLU, after a sum where there is one. The heads of the organs are those of `organ_heads`:
`net: {name: organ_heads, backbone: {name: kim_unet}}`.

Shapes: B batch, I input channels, C classes, *S spatial.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from fedatlas.core.errors import FederationError
from fedatlas.core.options import Natural, option, options
from fedatlas.nets.module import Net

GROUPS = 8
"""Of the group norms."""


@options
class KimUNet:
    """Residual U-Net with group norm in 2D or 3D; Kim's own, reconstructed, is 3D (Kim 2024)."""

    filters: tuple[Natural, ...] = option(
        (32, 64, 128, 256, 256),
        "Channels per level, from the top; each level has half the resolution.",
        min_length=2,
    )

    def build(self, *, in_channels: int, classes: int, spatial_dims: int) -> "KimUNetModule":
        """The net, with weights from torch's global generator. Raises FederationError for channels that the norm
        cannot divide."""
        if any(width % GROUPS or width < GROUPS for width in self.filters):
            raise FederationError(
                f"kim_unet: filters are {list(self.filters)}; allowed: multiples of {GROUPS}, the groups of a norm"
            )
        return KimUNetModule(self.filters, in_channels, classes, spatial_dims)


class KimUNetModule(Net):
    """[B, I, *S] -> logits [B, C, *S]."""

    def __init__(self, filters: tuple[int, ...], in_channels: int, classes: int, spatial_dims: int) -> None:
        super().__init__(in_channels, classes, [2 ** (len(filters) - 1)] * spatial_dims)
        inputs, strides = (in_channels, *filters[:-1]), (1, *[2] * (len(filters) - 1))
        self.downs = nn.ModuleList(
            nn.Sequential(convolution(a, b, 3, spatial_dims, stride=stride), Residual(b, spatial_dims))
            for a, b, stride in zip(inputs, filters, strides, strict=True)
        )
        self.ups = nn.ModuleList(
            Up(below, width, spatial_dims)
            for below, width in zip(filters[:0:-1], filters[-2::-1], strict=True)
        )
        self.head = _of(spatial_dims)(filters[0], classes, 1)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Conv3d) and module is not self.head:
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, C, *S]."""
        skips: list[Tensor] = []
        for down in self.downs:
            x = down(x)
            skips.append(x)
        x = skips.pop()
        for up in self.ups:
            x = up(x, skips.pop())
        return self.head(x)

    def parts(self) -> dict[str, nn.Module | list[nn.Module]]:
        """encoder: all levels down to the bottom; decoder: the levels up."""
        return {"encoder": self.downs, "decoder": self.ups, "head": self.head}


class Residual(nn.Module):
    """x and two convolutions of it, summed before the last ReLU."""

    def __init__(self, width: int, spatial_dims: int) -> None:
        super().__init__()
        self.first = convolution(width, width, 3, spatial_dims)
        self.second = convolution(width, width, 3, spatial_dims, relu=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.second(self.first(x)))


class Up(nn.Module):
    """Maps of twice the resolution, added to those of the encoder and refined."""

    def __init__(self, below: int, width: int, spatial_dims: int) -> None:
        super().__init__()
        self.mode = "trilinear" if spatial_dims == 3 else "bilinear"
        self.narrow = convolution(below, width, 1, spatial_dims)
        self.refine = Residual(width, spatial_dims)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        x = F.interpolate(self.narrow(x), size=skip.shape[2:], mode=self.mode, align_corners=False)
        return self.refine(x + skip)


def convolution(
    channels: int, width: int, kernel: int, spatial_dims: int, *, stride: int = 1, relu: bool = True
) -> nn.Sequential:
    """A convolution, group norm, and ReLU unless it follows a sum."""
    layers: list[nn.Module] = [
        _of(spatial_dims)(channels, width, kernel, stride=stride, padding=kernel // 2, bias=False),
        nn.GroupNorm(GROUPS, width),
    ]
    return nn.Sequential(*layers, *([nn.ReLU()] if relu else []))


def _of(spatial_dims: int) -> type[nn.Conv2d] | type[nn.Conv3d]:
    return nn.Conv3d if spatial_dims == 3 else nn.Conv2d
