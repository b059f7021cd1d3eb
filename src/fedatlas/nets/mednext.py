"""MedNeXt (Roy et al., MedNeXt: transformer-driven scaling of ConvNets for medical image segmentation, MICCAI
2023), in the four published sizes, from the blocks of MONAI.

MONAI's own factory gives a block that halves the resolution the expansion ratio of the stage above it; the
published nets have that of the stage below, and so have these (sizes B, M and L differ).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from torch import Tensor, nn

from fedatlas.core.options import option, options
from fedatlas.nets.module import Net, Outputs

if TYPE_CHECKING:
    from monai.networks.nets.mednext import MedNeXt as MonaiMedNeXt

WIDTH = 32
EXPANSION = {
    "S": (2, 2, 2, 2, 2, 2, 2, 2, 2),
    "B": (2, 3, 4, 4, 4, 4, 4, 3, 2),
    "M": (2, 3, 4, 4, 4, 4, 4, 3, 2),
    "L": (3, 4, 8, 8, 8, 8, 8, 4, 3),
}
"""Size -> expansion ratio of every stage: four down, the bottom, four up."""
BLOCKS = {
    "S": (2, 2, 2, 2, 2, 2, 2, 2, 2),
    "B": (2, 2, 2, 2, 2, 2, 2, 2, 2),
    "M": (3, 4, 4, 4, 4, 4, 4, 4, 3),
    "L": (3, 4, 8, 8, 8, 8, 8, 4, 3),
}
"""Size -> blocks of every stage."""


@options
class MedNeXt:
    """MedNeXt in 2D or 3D: a U-Net of depthwise convolutions (MONAI); ConDistFL uses size B, kernel 3."""

    size: Literal["S", "B", "M", "L"] = option("B", "Small, Base, Medium or Large.")
    kernel: Literal[3, 5] = option(3, "Kernel of the depthwise convolutions.")
    deep_supervision: bool = option(False, "Whether every level has a head in training.")

    def build(self, *, in_channels: int, classes: int, spatial_dims: int) -> "MedNeXtModule":
        """The net, with weights from torch's global generator."""
        net = mednext(
            EXPANSION[self.size],
            BLOCKS[self.size],
            WIDTH,
            kernel=self.kernel,
            in_channels=in_channels,
            classes=classes,
            spatial_dims=spatial_dims,
            deep_supervision=self.deep_supervision,
        )
        return MedNeXtModule(net, in_channels, classes, [2 ** len(net.down_blocks)] * spatial_dims)


class MedNeXtModule(Net):
    """MONAI's net, whose outputs are a list."""

    def __init__(self, net: "MonaiMedNeXt", in_channels: int, classes: int, divisor: list[int]) -> None:
        super().__init__(in_channels, classes, divisor)
        self.net = net

    def forward(self, x: Tensor) -> Outputs:
        """Logits, or in training with deep supervision the list of them."""
        outputs = self.net(x)
        return outputs if isinstance(outputs, Tensor) else list(outputs)

    def parts(self) -> dict[str, nn.Module | list[nn.Module]]:
        """encoder: the stem and all blocks down to the bottom; decoder: the blocks up."""
        net = self.net
        named: dict[str, nn.Module | list[nn.Module]] = {
            "encoder": [net.stem, net.enc_stages, net.down_blocks, net.bottleneck],
            "decoder": [net.up_blocks, net.dec_stages],
            "head": net.out_0,
        }
        return named | ({"deep_supervision": net.out_blocks} if net.do_ds else {})


def mednext(
    expansion: Sequence[int],
    blocks: Sequence[int],
    width: int,
    *,
    kernel: int,
    in_channels: int,
    classes: int,
    spatial_dims: int,
    deep_supervision: bool,
) -> "MonaiMedNeXt":
    """A MedNeXt of any size. expansion, blocks: of the stages down, the bottom and the stages up, an odd number
    of them; width: channels of the first stage."""
    bottom = len(blocks) // 2
    from monai.networks.blocks.mednext_block import MedNeXtDownBlock  # MONAI takes seconds to import
    from monai.networks.nets.mednext import MedNeXt as MonaiMedNeXt

    net = MonaiMedNeXt(
        spatial_dims=spatial_dims,
        init_filters=width,
        in_channels=in_channels,
        out_channels=classes,
        encoder_expansion_ratio=expansion[:bottom],
        bottleneck_expansion_ratio=expansion[bottom],
        decoder_expansion_ratio=expansion[bottom + 1 :],
        kernel_size=kernel,
        deep_supervision=deep_supervision,
        use_residual_connection=True,
        blocks_down=blocks[:bottom],
        blocks_bottleneck=blocks[bottom],
        blocks_up=blocks[bottom + 1 :],
    )
    net.down_blocks = nn.ModuleList(
        MedNeXtDownBlock(
            width * 2**stage,
            width * 2 ** (stage + 1),
            expansion[stage + 1],
            kernel,
            use_residual_connection=True,
            dim=f"{spatial_dims}d",
        )
        for stage in range(bottom)
    )
    return net
