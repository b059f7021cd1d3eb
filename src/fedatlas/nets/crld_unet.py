"""The net of FedCRLD: a shared and a private encoder, whose lowest maps attention joins.

Qi, Yang, He, Liu, Islam, Li. Contrastive re-localization and history distillation in federated CMR segmentation. MICCAI
2022; a baseline of UFPS (Jiang et al., Patterns, 2024), on whose U-Net it is built here (`nets.ufps_unet`).

Both encoders read the image. At the bottom, the private maps ask the shared ones (cross-attention), and the result
asks itself (self-attention), each with a sum and a layer norm behind it:

    z = LN(l + cross(l; g)),  z = LN(z + self(z))

for the tokens g and l, the voxels of the lowest maps of the shared and the private encoder. z takes their place in the
decoder.

Reconstruction: the papers say that there are two encoders, cross-attention and self-attention. That they meet at the
bottom with z as above, without positions, and that the decoder's skips and the heads of deep supervision read the mean
of both encoders' maps, is chosen here. The official code has other choices: skips of the private encoder alone, and the private
maps' self-attention beside cross-attention, both joined.

Shapes: B batch, I input channels, C classes with the background, d channels and n voxels of the lowest maps, *S spatial.
"""

from typing import ClassVar

from torch import Tensor, nn
from torch.nn import functional as F

from fedatlas.core.errors import FederationError
from fedatlas.core.options import option, options
from fedatlas.nets.module import Net
from fedatlas.nets.ufps_unet import UFPSUNet, UFPSUNetModule


@options
class CRLDUNet(UFPSUNet):
    """The U-Net of UFPS with a shared and a private encoder, joined by attention (Qi 2022), for fedcrld."""

    name: ClassVar[str] = "crld_unet"
    attention_heads: int = option(
        4, "Heads of both attentions; they divide the channels of the lowest level.", ge=1
    )

    def build(  # type: ignore[override]
        self, *, in_channels: int, classes: int, spatial_dims: int
    ) -> "CRLDUNetModule":
        """The net, with weights from torch's global generator. Raises as `UFPSUNet.build`, and FederationError where
        the attention's heads do not divide its channels."""
        d = min(self.width * 2 ** (self.levels - 1), self.max_width)
        if d % self.attention_heads:
            raise FederationError(
                f"net crld_unet: attention_heads is {self.attention_heads}, the lowest level has {d} channels; allowed: a "
                "divisor of them"
            )
        one, other = (
            UFPSUNet.build(self, in_channels=in_channels, classes=classes, spatial_dims=spatial_dims)
            for _ in range(2)
        )
        return CRLDUNetModule(one, other.encoder, d, self.attention_heads)


class CRLDUNetModule(Net):
    """Two encoders, attention, a decoder and heads. plain: whose encoder is the shared one."""

    def __init__(self, plain: UFPSUNetModule, private: nn.ModuleList, d: int, attention_heads: int) -> None:
        super().__init__(plain.in_channels, plain.classes, plain.divisor)
        self.encoder, self.private_encoder = plain.encoder, private
        self.attention = Attention(d, attention_heads)
        self.decoder, self.head, self.heads = plain.decoder, plain.head, plain.heads

    def forward(
        self, x: Tensor, bottlenecks: bool = False
    ) -> Tensor | list[Tensor] | tuple[Tensor | list[Tensor], tuple[Tensor, Tensor]]:
        """Logits [B, C, *S]; in training with deep supervision a list of them, as `UFPSUNetModule` gives them.
        bottlenecks: beside them, the lowest maps [B, d, *S] of the shared and of the private encoder."""
        size, mode = x.shape[2:], "bilinear" if x.dim() == 4 else "trilinear"
        g, l = _maps(self.encoder, x), _maps(self.private_encoder, x)
        maps = [*((a + b) / 2 for a, b in zip(g[:-1], l[:-1], strict=True)), self.attention(l[-1], g[-1])]
        decoded: Tensor = self.head(self.decoder(maps))
        logits: Tensor | list[Tensor] = decoded
        if self.training and len(self.heads):
            supervised = zip(self.heads, maps[1:-1], strict=True)
            logits = [decoded, *(F.interpolate(head(each), size, mode=mode) for head, each in supervised)]
        return (logits, (g[-1], l[-1])) if bottlenecks else logits

    def parts(self) -> dict[str, nn.Module | list[nn.Module]]:
        """encoder: the shared one; private_encoder; attention; decoder, head and deep_supervision as `UFPSUNetModule`
        has them."""
        named: dict[str, nn.Module | list[nn.Module]] = {
            "encoder": self.encoder,
            "private_encoder": self.private_encoder,
            "attention": self.attention,
            "decoder": self.decoder,
            "head": self.head,
        }
        if len(self.heads):
            named["deep_supervision"] = self.heads
        return named


class Attention(nn.Module):
    """Cross-attention, then self-attention, of maps whose voxels are tokens."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.cross, self.own = (nn.MultiheadAttention(d, heads, batch_first=True) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(d) for _ in range(2))

    def forward(self, asking: Tensor, asked: Tensor) -> Tensor:
        """[B, d, *S], for maps of this shape."""
        z, g = (maps.flatten(2).transpose(1, 2) for maps in (asking, asked))  # [B, n, d]
        z = self.norms[0](z + self.cross(z, g, g, need_weights=False)[0])
        z = self.norms[1](z + self.own(z, z, z, need_weights=False)[0])
        return z.transpose(1, 2).unflatten(2, asking.shape[2:])


def _maps(encoder: nn.ModuleList, x: Tensor) -> list[Tensor]:
    maps: list[Tensor] = []
    for level in encoder:
        x = level(x)
        maps.append(x)
    return maps
