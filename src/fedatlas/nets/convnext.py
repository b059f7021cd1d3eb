"""ConvNeXt V2 (Woo et al., ConvNeXt V2: co-designing and scaling ConvNets with masked autoencoders, CVPR
2023), in the eight published sizes, written from the paper, and its ImageNet weights from a local file.

Shapes: B batch, I input channels, H, W the image, d channels.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from fedatlas.core.errors import FederationError

Size = Literal["atto", "femto", "pico", "nano", "tiny", "base", "large", "huge"]

SIZES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "atto": ((2, 2, 6, 2), (40, 80, 160, 320)),
    "femto": ((2, 2, 6, 2), (48, 96, 192, 384)),
    "pico": ((2, 2, 6, 2), (64, 128, 256, 512)),
    "nano": ((2, 2, 8, 2), (80, 160, 320, 640)),
    "tiny": ((3, 3, 9, 3), (96, 192, 384, 768)),
    "base": ((3, 3, 27, 3), (128, 256, 512, 1024)),
    "large": ((3, 3, 27, 3), (192, 384, 768, 1536)),
    "huge": ((3, 3, 27, 3), (352, 704, 1408, 2816)),
}
"""Size -> blocks and channels of each stage."""

EPS = 1e-6


class ChannelNorm(nn.LayerNorm):
    """Layer norm over the channels of each pixel: [B, d, H, W] -> [B, d, H, W]."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, eps=EPS)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class GRN(nn.Module):
    """Global response normalisation of [B, H, W, d]: x + gamma · x · n + beta, where n is each channel's L2
    norm over the image, divided by the mean of these norms over the channels. The identity at first.

    The norms are summed in at least float32.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gamma, self.beta = nn.Parameter(torch.zeros(channels)), nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        summed = torch.promote_types(x.dtype, torch.float32)
        norms = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True, dtype=summed)
        scale = self.gamma * norms / (norms.mean(-1, keepdim=True) + EPS)
        return x + torch.addcmul(self.beta.to(x.dtype), x, scale.to(x.dtype))


class Block(nn.Module):
    """x + branch(x): depthwise 7 × 7, layer norm, 4 × wider, GELU, GRN, back; without layer scale.

    drop_path: the probability that an image in training skips the branch. dilation: of the depthwise
    convolution.
    """

    def __init__(self, channels: int, *, drop_path: float = 0.0, dilation: int = 1) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(
            channels, channels, 7, padding=3 * dilation, dilation=dilation, groups=channels
        )
        self.norm = nn.LayerNorm(channels, eps=EPS)
        self.expand = nn.Linear(channels, 4 * channels)
        self.grn = GRN(4 * channels)
        self.project = nn.Linear(4 * channels, channels)
        self.drop_path = drop_path

    def forward(self, x: Tensor) -> Tensor:
        branch = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        branch = self.project(self.grn(F.gelu(self.expand(branch)))).permute(0, 3, 1, 2)
        if self.training and self.drop_path > 0:
            branch = branch * F.dropout(branch.new_ones(len(x), 1, 1, 1), self.drop_path)
        return x + branch


class Down(nn.Module):
    """Layer norm and a 2 × 2 convolution into the next stage.

    stride 1 keeps the resolution: one row and one column of zeros follow the image, so that every second
    pixel of the output is a pixel of the output with stride 2.
    """

    def __init__(self, channels: int, wider: int, *, stride: int = 2) -> None:
        super().__init__()
        self.norm = ChannelNorm(channels)
        self.conv = nn.Conv2d(channels, wider, 2, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.conv(x if self.conv.stride[0] == 2 else F.pad(x, (0, 1, 0, 1)))


class ConvNeXtV2(nn.Module):
    """The four stages: [B, I, H, W] -> the maps of each, at strides 4, 8, 16 and 32.

    depths, dims: blocks and channels of each stage. drop_path: of the last block; it rises linearly from 0.
    output_stride: 16 keeps the last stage at stride 16 and dilates its depthwise convolutions by 2, so that
    weights trained at stride 32 keep their meaning: up to the image-wide norms of GRN, every second pixel has
    the value that it has at stride 32.

    Raises FederationError unless there are four stages of at least one block and one channel.
    """

    def __init__(
        self,
        depths: Sequence[int],
        dims: Sequence[int],
        in_channels: int,
        *,
        drop_path: float = 0.0,
        output_stride: Literal[16, 32] = 32,
    ) -> None:
        super().__init__()
        if not len(depths) == len(dims) == 4 or min(*depths, *dims) < 1:
            raise FederationError(
                f"convnext: depths {list(depths)}, dims {list(dims)}; allowed: four numbers each, 1 or more"
            )
        self.depths, self.dims = tuple(depths), tuple(dims)
        dense = output_stride == 16
        self.stem = nn.Sequential(nn.Conv2d(in_channels, dims[0], 4, stride=4), ChannelNorm(dims[0]))
        self.downs = nn.ModuleList(
            Down(dims[i], dims[i + 1], stride=1 if dense and i == 2 else 2) for i in range(3)
        )
        self.stages = nn.ModuleList()
        for i, width in enumerate(dims):
            numbers = range(sum(depths[:i]), sum(depths[: i + 1]))
            rates = [drop_path * number / (sum(depths) - 1) for number in numbers]
            dilation = 2 if dense and i == 3 else 1
            blocks = (Block(width, drop_path=rate, dilation=dilation) for rate in rates)
            self.stages.append(nn.Sequential(*blocks))
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> list[Tensor]:
        x = self.stem(x)
        maps = [self.stages[0](x)]
        for down, stage in zip(self.downs, list(self.stages)[1:], strict=True):
            maps.append(stage(down(maps[-1])))
        return maps


def timm_names(depths: Sequence[int]) -> dict[str, str]:
    """Name of a tensor here -> its name in timm's ConvNeXt V2, for every tensor of `ConvNeXtV2`.

    ==========================================  ==============================================
    here                                        timm
    ==========================================  ==============================================
    stem.0, stem.1                              stem.0, stem.1
    downs.{s - 1}.norm, .conv                   stages.{s}.downsample.0, .1, for s = 1, 2, 3
    stages.{s}.{b}.depthwise, .norm             stages.{s}.blocks.{b}.conv_dw, .norm
    stages.{s}.{b}.expand, .project             stages.{s}.blocks.{b}.mlp.fc1, .mlp.fc2
    stages.{s}.{b}.grn.gamma, .grn.beta         stages.{s}.blocks.{b}.mlp.grn.weight, .bias
    ==========================================  ==============================================

    timm's head (head.norm, head.fc) has no counterpart.
    """
    both = [(kind, kind) for kind in ("weight", "bias")]
    modules = [("stem.0", "stem.0", both), ("stem.1", "stem.1", both)]
    for s, depth in enumerate(depths):
        if s > 0:
            modules.append((f"downs.{s - 1}.norm", f"stages.{s}.downsample.0", both))
            modules.append((f"downs.{s - 1}.conv", f"stages.{s}.downsample.1", both))
        for b in range(depth):
            here, there = f"stages.{s}.{b}", f"stages.{s}.blocks.{b}"
            modules += [
                (f"{here}.depthwise", f"{there}.conv_dw", both),
                (f"{here}.norm", f"{there}.norm", both),
                (f"{here}.expand", f"{there}.mlp.fc1", both),
                (f"{here}.grn", f"{there}.mlp.grn", [("gamma", "weight"), ("beta", "bias")]),
                (f"{here}.project", f"{there}.mlp.fc2", both),
            ]
    return {f"{here}.{ours}": f"{there}.{theirs}" for here, there, kinds in modules for ours, theirs in kinds}


def load_timm(net: ConvNeXtV2, path: str | Path) -> None:
    """Copies weights in timm's names from a .safetensors or .pth file into a net, in place.

    timm's head is ignored. Where the file's first convolution has another number of input channels than the
    net, it is summed over them and divided by the net's, so that a grey image repeated over the channels
    gives the same maps. Half precision is widened; the layers of a block may be linear or 1 × 1 convolutions.

    Raises FederationError, before anything is changed, for a file that is missing, of another kind, damaged,
    holds anything but tensors, or whose names or shapes are not those of the net.
    """
    values = read_weights(path)
    values = {name: value for name, value in values.items() if not name.startswith("head.")}
    names, own = timm_names(net.depths), dict(net.named_parameters())
    missing = [there for there in names.values() if there not in values]
    unexpected = sorted(values.keys() - set(names.values()))
    fitted = {here: _fit(values[there], own[here]) for here, there in names.items() if there in values}
    differ = [
        f"{names[here]} is {_form(values[names[here]])}, expected {_form(own[here])}"
        for here, value in fitted.items()
        if value is None
    ]
    if missing or unexpected or differ:
        listed = [("missing", missing), ("unexpected", unexpected), ("of another form", differ)]
        raise FederationError(
            f"weights {path}: are not those of a ConvNeXt V2 with depths {list(net.depths)} and dims "
            f"{list(net.dims)} in timm's naming; nothing was loaded. "
            + "; ".join(f"{what}: {_first(entries)}" for what, entries in listed if entries)
        )
    with torch.no_grad():
        for here, value in fitted.items():
            assert value is not None
            own[here].copy_(value)


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """Name -> tensor of a .safetensors or .pth file, on the CPU; in a .pth also in "state_dict" or "model".

    Nothing in the file is executed. Raises FederationError for a file that is missing, of another kind,
    damaged, or holds anything but tensors by name.
    """
    path = Path(path)
    if not path.is_file():
        raise FederationError(
            f"weights {path}: there is no such file; give a local .safetensors or .pth, or null"
        )
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        if path.suffix in (".pth", ".pt"):
            return _tensors_in(torch.load(path, map_location="cpu", weights_only=True), path)
    except FederationError:
        raise
    except Exception as error:  # whatever a damaged file makes its reader raise
        if type(error).__name__ == "UnpicklingError":
            raise FederationError(
                f"weights {path}: holds Python objects, or is damaged; such a file could run code and is "
                "refused. Allowed: tensors by name; save the state dict alone, best as .safetensors"
            ) from None
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise FederationError(f"weights {path}: cannot be read ({reason}); fetch the file again") from None
    raise FederationError(
        f"weights {path}: is a {path.suffix or 'file without suffix'}; allowed: .safetensors, .pth"
    )


def _tensors_in(content: Any, path: Path) -> dict[str, Tensor]:
    for key in ("state_dict", "model"):
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        raise FederationError(
            f"weights {path}: holds a {type(content).__name__} with more than tensors; allowed: tensors by "
            'name, alone or under "state_dict" or "model"'
        )
    return {str(name): value for name, value in content.items()}


def _fit(value: Tensor, own: Tensor) -> Tensor | None:
    """The value in the form of a net's own tensor; None where it has no such form."""
    if not value.is_floating_point():
        return None
    value = value.to(own.dtype)
    if own.ndim == 2 and value.ndim == 4 and value.shape[2:] == (1, 1):
        value = value[:, :, 0, 0]
    if own.ndim == 4 and value.ndim == 4 and own.shape[2:] == (4, 4) and value.shape[1] != own.shape[1]:
        value = (value.sum(1, keepdim=True) / own.shape[1]).expand(-1, own.shape[1], -1, -1)
    return value if value.shape == own.shape else None


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _first(names: Sequence[str], most: int = 6) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
