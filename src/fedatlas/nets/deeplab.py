"""DeepLabV3+ (Chen et al., Encoder-decoder with atrous separable convolution for semantic image segmentation,
ECCV 2018) on a ConvNeXt V2 encoder, written from the papers.

The paper has an Xception or a ResNet as encoder; ConDistFL has a ConvNeXt V2. Its stage 1 gives the low-level
features at stride 4, its stage 4 the maps for the pyramid.

Shapes: B batch, I input channels, H, W the image, C classes, F findings, d features, h, w the encoder's last maps.
"""

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedatlas.core.errors import FederationError
from fedatlas.core.options import Natural, option, options
from fedatlas.core.outputs import Mixed
from fedatlas.nets.convnext import SIZES, ConvNeXtV2, Size, load_timm
from fedatlas.nets.module import Net, Outputs

LOW_LEVEL = 48
"""Channels to which the low-level features are reduced."""

Norm = Literal["batch", "group"]


@options
class DeepLabV3Plus:
    """DeepLabV3+ in 2D on a ConvNeXt V2 encoder, as ConDistFL has it for chest radiographs."""

    encoder: Size = option("tiny", "Size of the ConvNeXt V2.")
    depths: tuple[Natural, ...] | None = option(None, "Blocks of the four stages, in place of the size's.")
    dims: tuple[Natural, ...] | None = option(None, "Channels of the four stages, in place of the size's.")
    weights: str | None = option(
        None,
        "Local .safetensors or .pth file with the encoder's ImageNet weights in timm's naming, from which the server's "
        "first model starts, no site needs it; null: random.",
    )
    drop_path: float = option(
        0.0, "Probability that an image skips the encoder's last block; it rises to it linearly.", ge=0, lt=1
    )
    output_stride: Literal[16, 32] = option(
        16,
        "Stride of the encoder's last maps: 16, the paper's, by dilation; 32 is ConvNeXt's own, and cheaper.",
    )
    rates: tuple[Natural, ...] | None = option(
        None,
        "Dilations of the pyramid; 6, 12, 18 at output stride 16 by default, half of it at 32.",
        min_length=1,
    )
    width: int = option(256, "Channels of the pyramid and of the decoder.", ge=1)
    separable: bool = option(
        True,
        "Whether a 3 × 3 convolution of pyramid and decoder is a depthwise and a 1 × 1 one, as in the paper.",
    )
    norm: Norm = option(
        "batch", "Normalisation of pyramid and decoder; batch is the paper's, group has 8 groups."
    )
    dropout: float = option(0.0, "Probability of dropout of the pyramid's output.", ge=0, lt=1)

    def build(
        self, *, in_channels: int, classes: int, spatial_dims: int, findings: int = 0
    ) -> "DeepLabV3PlusModule":
        """The net, with weights from torch's global generator. findings: of the whole image; 0: no head for them.

        Raises FederationError for three axes, and for stages that do not fit.
        """
        if spatial_dims != 2:
            raise FederationError(
                f"net deeplabv3plus: takes images of 2 axes, got {spatial_dims}; give a patch of two "
                "numbers, or take unet or mednext"
            )
        depths, dims = SIZES[self.encoder]
        encoder = ConvNeXtV2(
            self.depths or depths,
            self.dims or dims,
            in_channels,
            drop_path=self.drop_path,
            output_stride=self.output_stride,
        )
        rates = self.rates or tuple(rate * 16 // self.output_stride for rate in (6, 12, 18))
        if self.norm == "group" and (self.width % 8 or self.width < 16):
            raise FederationError(
                f"deeplabv3plus: width {self.width} with group norm; allowed: multiples of 8 from 16 on"
            )
        return DeepLabV3PlusModule(
            encoder,
            in_channels,
            classes,
            output_stride=self.output_stride,
            rates=rates,
            width=self.width,
            separable=self.separable,
            norm=self.norm,
            dropout=self.dropout,
            findings=findings,
        )

    def initialise(self, net: Net) -> None:
        """Copies the file's weights, if one is given, into the encoder of a net that `build` gave; raises as
        `convnext.load_timm`."""
        assert isinstance(net, DeepLabV3PlusModule)
        if self.weights is not None:
            load_timm(net.encoder, self.weights)


class DeepLabV3PlusModule(Net):
    """[B, I, H, W] -> logits [B, C, H, W], or `Mixed` with findings. n_features: d."""

    def __init__(
        self,
        encoder: ConvNeXtV2,
        in_channels: int,
        classes: int,
        *,
        output_stride: int,
        rates: Sequence[int],
        width: int,
        separable: bool,
        norm: Norm,
        dropout: float,
        findings: int = 0,
    ) -> None:
        super().__init__(in_channels, classes, [output_stride] * 2, findings)
        low, self.n_features = encoder.dims[0], encoder.dims[-1]
        self.encoder = encoder
        self.pyramid = ASPP(self.n_features, width, rates, separable=separable, norm=norm, dropout=dropout)
        self.low_level = conv(low, LOW_LEVEL, 1, norm=norm)
        self.fuse = nn.Sequential(
            conv(width + LOW_LEVEL, width, 3, norm=norm, separable=separable),
            conv(width, width, 3, norm=norm, separable=separable),
        )
        self.head = nn.Conv2d(width, classes, 1)
        for part in (self.pyramid, self.low_level, self.fuse):
            for module in part.modules():
                if isinstance(module, nn.Conv2d):
                    nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
        nn.init.zeros_(self.head.bias)  # type: ignore[arg-type]
        # drawn last, so that all other weights are those of the net without it
        self.image_head = nn.Linear(self.n_features, findings) if findings else None

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The low-level features [B, d_1, H/4, W/4] and the last maps [B, d, h, w].

        Raises FederationError for images that do not divide by the output stride, and in training with batch
        norm for a batch of one, of which the pyramid's pooled branch leaves one value per channel.
        """
        by = self.divisor[0]
        if x.shape[2] % by or x.shape[3] % by:
            raise FederationError(
                f"deeplabv3plus: images of {list(x.shape[2:])} do not divide by the output stride {by}; "
                "pad or resize them"
            )
        if self.training and len(x) == 1 and self.pyramid.norm == "batch":
            raise FederationError(
                "deeplabv3plus: one image in a batch cannot be normalised in training; set local.batch to 2 "
                "or more, or the net's norm to group"
            )
        low, *_, high = self.encoder(x)
        return low, high

    def decode(self, low: Tensor, high: Tensor) -> Tensor:
        """Logits [B, C, H, W] of what `encode` gives."""
        x = resized(self.pyramid(high), low.shape[2:])
        x = self.head(self.fuse(torch.cat([x, self.low_level(low)], 1)))
        return resized(x, [4 * size for size in low.shape[2:]])

    def pooled(self, high: Tensor) -> Tensor:
        """The mean of each of the last maps, [B, d]."""
        return high.mean((2, 3))

    def features(self, x: Tensor) -> Tensor:
        """The pooled features of the encoder, [B, d]; not normalised: timm's head.norm belongs to a head."""
        return self.pooled(self.encode(x)[1])

    def forward(self, x: Tensor) -> Outputs:
        """Logits [B, C, H, W]; with findings `Mixed`, whose logits [B, F] are linear in the pooled features."""
        low, high = self.encode(x)
        voxels = self.decode(low, high)
        return voxels if self.image_head is None else Mixed(voxels, self.image_head(self.pooled(high)))

    def parts(self) -> dict[str, nn.Module | list[nn.Module]]:
        """decoder: the pyramid and all after it but the last 1 × 1 convolution, which is the head."""
        named: dict[str, nn.Module | list[nn.Module]] = {
            "encoder": self.encoder,
            "decoder": [self.pyramid, self.low_level, self.fuse],
            "head": self.head,
        }
        return named | ({} if self.image_head is None else {"image_head": self.image_head})


class ASPP(nn.Module):
    """Atrous spatial pyramid pooling: [B, d, h, w] -> [B, width, h, w]. A 1 × 1 convolution, a 3 × 3 one per
    rate and the mean of the image, each with `width` channels, merged by a 1 × 1 convolution."""

    def __init__(
        self, d: int, width: int, rates: Sequence[int], *, separable: bool, norm: Norm, dropout: float
    ) -> None:
        super().__init__()
        self.norm = norm
        self.point = conv(d, width, 1, norm=norm)
        self.atrous = nn.ModuleList(
            conv(d, width, 3, norm=norm, separable=separable, dilation=rate) for rate in rates
        )
        self.image = conv(d, width, 1, norm=norm)
        self.merge = conv((2 + len(rates)) * width, width, 1, norm=norm)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        image = self.image(x.mean((2, 3), keepdim=True)).expand(-1, -1, *x.shape[2:])
        branches = [self.point(x), *(branch(x) for branch in self.atrous), image]
        return self.dropout(self.merge(torch.cat(branches, 1)))


def conv(
    channels: int, width: int, kernel: int, *, norm: Norm, separable: bool = False, dilation: int = 1
) -> nn.Sequential:
    """A convolution that keeps the resolution, normalisation, ReLU. separable: a depthwise convolution and a
    1 × 1 one, with nothing between them."""
    padding = dilation * (kernel // 2)
    if separable:
        layers: list[nn.Module] = [
            nn.Conv2d(
                channels, channels, kernel, padding=padding, dilation=dilation, groups=channels, bias=False
            ),
            nn.Conv2d(channels, width, 1, bias=False),
        ]
    else:
        layers = [nn.Conv2d(channels, width, kernel, padding=padding, dilation=dilation, bias=False)]
    normalise = nn.BatchNorm2d(width) if norm == "batch" else nn.GroupNorm(8, width)
    return nn.Sequential(*layers, normalise, nn.ReLU())


def resized(x: Tensor, size: Sequence[int]) -> Tensor:
    """Bilinear, pixel centres as they lie."""
    return F.interpolate(x, size=list(size), mode="bilinear", align_corners=False)
