"""A U-Net whose decoder is told, by one number, for whom it segments.

Dmitriev, Kaufman. Learning multi-class segmentations from single-class datasets. CVPR 2019, whose condition is the
class; as Cond-dec in the empirical study of UFPS (Jiang et al., Patterns, 2024, Figure 2), where it is the client. The
net is that of UFPS (`nets.ufps_unet`): after every normalisation of the decoder, a channel that holds the condition at
every voxel is put beside the maps.

The condition is a saved tensor of the net, one number per class. Training sets all of them alike. Where they differ,
the decoder runs once for each number that occurs, and gives the logits of the classes that have it; those of the
background are the mean of all runs. The entry of the background is not read.

Reconstruction: the channel is put beside the maps behind the leaky ReLU, which would all but remove a negative number.

Shapes: B batch, I input channels, C classes with the background, *S spatial.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedatlas.core.options import options
from fedatlas.nets.module import Net
from fedatlas.nets.ufps_unet import SLOPE, Decoder, Level, UFPSUNet, UFPSUNetModule


@options
class CondUNet(UFPSUNet):
    """The U-Net of UFPS with a condition beside all maps of its decoder (Dmitriev 2019), for cond_dec."""

    name: ClassVar[str] = "cond_unet"

    def build(  # type: ignore[override]
        self, *, in_channels: int, classes: int, spatial_dims: int
    ) -> "CondUNetModule":
        """The net, with weights from torch's global generator. Raises as `UFPSUNet.build`."""
        plain = UFPSUNet.build(self, in_channels=in_channels, classes=classes, spatial_dims=spatial_dims)
        return CondUNetModule(plain)


class Condition(nn.Module):
    """value [C]: the number that stands for who is asked, per class."""

    value: Tensor

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.register_buffer("value", torch.zeros(classes))


class CondUNetModule(Net):
    """The encoder of a U-Net, a decoder with a condition, and their heads."""

    by_organ = True

    def __init__(self, plain: UFPSUNetModule) -> None:
        super().__init__(plain.in_channels, plain.classes, plain.divisor)
        self.encoder, self.heads = plain.encoder, plain.heads
        self.decoder = CondDecoder(plain.decoder)
        conv, head = type(plain.head), plain.head
        self.head = conv(head.in_channels + 1, plain.classes, 1, bias=False)
        self.condition = Condition(plain.classes)

    def forward(self, x: Tensor) -> Tensor | list[Tensor]:
        """Logits [B, C, *S]; in training with deep supervision a list of them, as `UFPSUNetModule` gives them."""
        size, mode = x.shape[2:], "bilinear" if x.dim() == 4 else "trilinear"
        maps: list[Tensor] = []
        for level in self.encoder:
            x = level(x)
            maps.append(x)
        logits = self._asked(maps)
        if not self.training or not len(self.heads):
            return logits
        supervised = zip(self.heads, maps[1:-1], strict=True)
        return [logits, *(F.interpolate(head(each), size, mode=mode) for head, each in supervised)]

    def _asked(self, maps: Sequence[Tensor]) -> Tensor:
        value = self.condition.value
        # a net that is run on shapes only has no numbers
        asked = [0.0] * self.classes if value.is_meta else value.tolist()
        runs = {h: self.head(self.decoder(maps, h)) for h in sorted(set(asked[1:]))}
        if len(runs) == 1:
            return next(iter(runs.values()))
        background = torch.stack([z[:, 0] for z in runs.values()]).mean(0)
        return torch.stack([background, *(runs[h][:, c] for c, h in enumerate(asked) if c)], 1)

    def parts(self) -> dict[str, nn.Module | list[nn.Module]]:
        """encoder, decoder, head and deep_supervision as `UFPSUNetModule` has them; condition: its numbers."""
        named: dict[str, nn.Module | list[nn.Module]] = {
            "encoder": self.encoder,
            "decoder": self.decoder,
            "head": self.head,
            "condition": self.condition,
        }
        if len(self.heads):
            named["deep_supervision"] = self.heads
        return named


class CondDecoder(nn.Module):
    """The usual decoder, whose layers also read the condition after each normalisation."""

    def __init__(self, plain: Decoder) -> None:
        super().__init__()
        self.ups = nn.ModuleList(
            type(up)(up.in_channels + bool(place), up.out_channels, up.kernel_size, up.stride, bias=False)  # type: ignore
            for place, up in enumerate(plain.ups)
        )
        self.levels = nn.ModuleList(CondLevel(level) for level in plain.levels)  # type: ignore[arg-type]

    def forward(self, maps: Sequence[Tensor], h: float) -> Tensor:
        """[B, width + 1, *S] of full resolution. maps: of the encoder's levels; h: the condition."""
        x = maps[-1]
        for up, level, skip in zip(self.ups, self.levels, maps[-2::-1], strict=True):
            x = level(torch.cat([up(x), skip], 1), h)
        return x


class CondLevel(nn.Module):
    """Twice a convolution, norm and leaky ReLU, and the condition beside what they give."""

    def __init__(self, plain: Level) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            type(conv)(conv.in_channels + place, conv.out_channels, conv.kernel_size, padding=conv.padding)  # type: ignore
            for place, conv in enumerate(plain.convs)
        )
        self.norms = plain.norms

    def forward(self, x: Tensor, h: float) -> Tensor:
        """[B, channels, *S] -> [B, width + 1, *S]."""
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.leaky_relu(norm(conv(x)), SLOPE)
            x = torch.cat([x, torch.full_like(x[:, :1], h)], 1)
        return x
