"""The U-Net of nnU-Net, in two and three dimensions, from the blocks of MONAI's DynUNet.

DynUNet registers every block twice, once by itself and once within the recursion that runs it, and stacks its
deep supervision heads at full resolution. Here the blocks are held once, under one name, and a head keeps the
resolution of its level.

Shapes: B batch, I input channels, C classes, F findings, d features, *S spatial.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn

from fedatlas.core.errors import FederationError
from fedatlas.core.options import Natural, option, options
from fedatlas.core.outputs import Mixed
from fedatlas.nets.module import Net, Outputs

if TYPE_CHECKING:
    from monai.networks.nets.dynunet import DynUNet


@options
class UNet:
    """U-Net in 2D or 3D, with instance norm and strided convolutions (MONAI's DynUNet)."""

    filters: list[Natural] = option(
        [16, 32, 64, 128],
        "Channels per level, from the top; three levels or more. [16, 32, 64, 128] by default.",
        min_length=3,
    )
    strides: list[int | list[int]] | None = option(
        None, "Stride into each level, one number or one per axis; 1, then 2 at every level by default."
    )
    kernels: list[int | list[int]] | None = option(
        None, "Kernel of each level, one odd number or one per axis; 3 by default."
    )
    norm: Literal["instance", "batch", "group"] = option("instance", "Normalisation; group has 8 groups.")
    res_block: bool = option(False, "Whether a block adds its input to its output.")
    deep_supervision: bool = option(False, "Whether levels below the first have a head in training.")
    supervised: int | None = option(
        None, "How many of them, from the top, with deep supervision; null: all but the two lowest.", ge=1
    )
    dropout: float = option(0.0, "Probability of dropout after every convolution.", ge=0, lt=1)

    def build(self, *, in_channels: int, classes: int, spatial_dims: int, findings: int = 0) -> "UNetModule":
        """The net, with weights from torch's global generator. findings: of the whole image; 0: no head for them."""
        arguments = self.arguments(in_channels, classes, spatial_dims)
        from monai.networks.nets.dynunet import DynUNet  # MONAI takes seconds to import

        divisor = [math.prod(level[axis] for level in arguments["strides"]) for axis in range(spatial_dims)]
        return UNetModule(DynUNet(**arguments), in_channels, classes, divisor, self.filters[-1], findings)

    def arguments(self, in_channels: int, classes: int, spatial_dims: int) -> dict[str, Any]:
        """Those of MONAI's DynUNet, plain values. Raises FederationError for options that do not go together."""
        levels = len(self.filters)
        strides = _per_level(self.strides or [1] + [2] * (levels - 1), levels, spatial_dims, "strides")
        kernels = _per_level(self.kernels or [3] * levels, levels, spatial_dims, "kernels")
        if any(size < 1 for level in strides for size in level) or any(size != 1 for size in strides[0]):
            raise FederationError(
                f"unet: strides are {strides}; allowed: 1 into the first level, then 1 or more"
            )
        if any(size % 2 == 0 or size < 1 for level in kernels for size in level):
            raise FederationError(f"unet: kernels are {kernels}; allowed: odd numbers")
        if any(
            stride > kernel
            for a, b in zip(strides, kernels, strict=True)
            for stride, kernel in zip(a, b, strict=True)
        ):
            raise FederationError(
                f"unet: strides {strides} exceed kernels {kernels}; a kernel covers its stride"
            )
        if self.norm == "group" and any(channels % 8 for channels in self.filters):
            raise FederationError(f"unet: filters {self.filters} with group norm; allowed: multiples of 8")
        most = levels - 2
        if self.supervised is not None and (self.supervised > most or not self.deep_supervision):
            raise FederationError(
                f"unet: supervised is {self.supervised}, deep_supervision {self.deep_supervision}; allowed: 1 to {most} "
                f"for {levels} levels, with deep_supervision"
            )
        return {
            "spatial_dims": spatial_dims,
            "in_channels": in_channels,
            "out_channels": classes,
            "kernel_size": kernels,
            "strides": strides,
            "upsample_kernel_size": strides[1:],
            "filters": self.filters,
            "dropout": self.dropout or None,
            "norm_name": ("group", {"num_groups": 8})
            if self.norm == "group"
            else (self.norm, {"affine": True}),
            "res_block": self.res_block,
            "deep_supervision": self.deep_supervision,
            "deep_supr_num": self.supervised or most,
        }


def _per_level(
    values: Sequence[int | list[int]], levels: int, spatial_dims: int, what: str
) -> list[list[int]]:
    rows = [value if isinstance(value, list) else [value] * spatial_dims for value in values]
    if len(rows) != levels or any(len(row) != spatial_dims for row in rows):
        raise FederationError(
            f"unet: {what} are {values}; allowed: {levels} entries, one per level of filters, each a number or "
            f"{spatial_dims} numbers"
        )
    return rows


class UNetModule(Net):
    """The blocks of a DynUNet, run from top to bottom and up again. n_features: d, of the lowest maps."""

    def __init__(
        self,
        net: "DynUNet",
        in_channels: int,
        classes: int,
        divisor: list[int],
        n_features: int,
        findings: int = 0,
    ) -> None:
        super().__init__(in_channels, classes, divisor, findings)
        self.n_features = n_features
        self.downs = nn.ModuleList([net.input_block, *net.downsamples, net.bottleneck])
        self.ups = net.upsamples
        self.head = net.output_block
        self.heads = net.deep_supervision_heads if net.deep_supervision else nn.ModuleList()
        # drawn last, so that all other weights are those of the net without it
        self.image_head = nn.Linear(n_features, findings) if findings else None

    def forward(self, x: Tensor) -> Outputs:
        """Logits [B, C, *S], or in training with deep supervision the list of them; with findings `Mixed`, whose
        logits [B, F] are linear in the means [B, d] of the lowest maps."""
        skips: list[Tensor] = []
        for down in self.downs:
            x = down(x)
            skips.append(x)
        x = skips.pop()
        bottom = x
        supervised = self.training and len(self.heads) > 0
        lower: list[Tensor] = []
        for up in self.ups:
            lower = [x, *lower] if supervised else lower
            x = up(x, skips.pop())
        logits = self.head(x)
        voxels: Tensor | list[Tensor] = logits
        if supervised:
            voxels = [logits, *(head(lower[place]) for place, head in enumerate(self.heads))]
        if self.image_head is None:
            return voxels
        return Mixed(voxels, self.image_head(bottom.flatten(2).mean(2)))

    def parts(self) -> dict[str, nn.Module | list[nn.Module]]:
        """encoder: all blocks down to the bottom; decoder: the blocks up."""
        named: dict[str, nn.Module | list[nn.Module]] = {
            "encoder": self.downs,
            "decoder": self.ups,
            "head": self.head,
        }
        if len(self.heads):
            named["deep_supervision"] = self.heads
        if self.image_head is not None:
            named["image_head"] = self.image_head
        return named
