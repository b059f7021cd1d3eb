"""A forward and backward pass in other arithmetic and another order of memory, over the plain one: bf16 autocast,
channels-last (2D)."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.timing import alternate, show
from fedatlas import nets
from fedatlas.core.outputs import voxel_logits

NETS = {
    "U-Net, 2D, 8 × 128²": ("unet", {"filters": [16, 32, 64, 128]}, (8, 1, 128, 128)),
    "U-Net, 3D, 2 × 48³": ("unet", {"filters": [16, 32, 64, 128]}, (2, 1, 48, 48, 48)),
    "DeepLabV3+ on ConvNeXt V2-atto, 4 × 128²": ("deeplabv3plus", {"depths": (2, 2, 6, 2), "dims": (40, 80, 160, 320)}, (4, 1, 128, 128)),
}  # fmt: skip


def passes(name: str, options: dict, shape: tuple[int, ...]) -> dict[str, Callable[[], None]]:
    axes = len(shape) - 2

    def made(last: bool) -> tuple[nn.Module, Tensor]:
        net = nets.build(name, options, in_channels=1, classes=4, spatial_dims=axes, seed=0)
        image = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        if last:
            return net.to(memory_format=torch.channels_last), image.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return net, image

    def once(net: nn.Module, image: Tensor, bf16: bool) -> Callable[[], None]:
        def run() -> None:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
                value = voxel_logits(net(image)).float().square().mean()
            net.zero_grad(set_to_none=True)
            value.backward()

        return run

    found = {"plain": once(*made(False), False), "bf16": once(*made(False), True)}
    if axes == 2:
        found |= {"channels-last": once(*made(True), False), "both": once(*made(True), True)}
    return found


def main() -> dict[str, float]:
    torch.set_num_threads(1)
    ratios: dict[str, float] = {}
    for title, (name, options, shape) in NETS.items():
        seconds = alternate(passes(name, options, shape), repeats=5)
        ratios |= {
            f"{title}: {way} over plain": s / seconds["plain"] for way, s in seconds.items() if way != "plain"
        }
    return ratios


if __name__ == "__main__":
    show(main())
