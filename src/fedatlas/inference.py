"""From a net and a volume to class probabilities: windows in 3D, slices with their neighbours in 2.5D.

Shapes: C classes, I input channels, *S spatial.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from monai.inferers.utils import sliding_window_inference
from torch import Tensor, nn

from fedatlas.options import option, options


@options
class Inference:
    """How a volume that is larger than a patch is predicted."""

    overlap: float = option(0.5, "Share of a window that the next one covers again.", ge=0, lt=1)
    blend: Literal["gaussian", "constant"] = option(
        "gaussian", "Weight of a window's voxels where windows overlap."
    )
    batch: int = option(8, "Windows, or slices, at a time.", gt=0)


def neighbours(image: Tensor, index: Tensor, context: int) -> Tensor:
    """Slices [N, I * (2 * context + 1), X, Y] of a volume [I, X, Y, Z], each with its neighbours along the last
    axis, as training sees them: channel by channel from the lowest neighbour to the highest; at the ends the
    last slice is repeated."""
    offsets = torch.arange(-context, context + 1)
    near = (index[:, None] + offsets[None, :]).clamp(0, image.shape[-1] - 1)
    stack = image[..., near]  # [I, X, Y, N, 2 * context + 1]
    return stack.permute(3, 0, 4, 1, 2).flatten(1, 2)


@torch.inference_mode()
def probabilities(
    net: nn.Module, image: Tensor, patch: Sequence[int], context: int, options: Inference, *, exclusive: bool
) -> Tensor:
    """[C, *S] float32 on the CPU for an image [I, *S].

    patch: three numbers for windows in 3D, two for slices along the last axis with `context` neighbours on
    either side. Softmax if exclusive, else sigmoid, in float32; probabilities are blended, not logits. A volume
    smaller than a patch is padded with 0 on both sides. The mode of the net and of each of its modules is put back.
    """
    modes = [(module, module.training) for module in net.modules()]
    net.eval()
    try:
        device = next((tensor.device for tensor in net.parameters()), image.device)

        def predict(windows: Tensor) -> Tensor:
            logits = net(windows).float()
            return logits.softmax(1) if exclusive else logits.sigmoid()

        def slide(inputs: Tensor) -> Tensor:
            if tuple(inputs.shape[2:]) == tuple(patch):
                return predict(inputs)
            found = sliding_window_inference(
                inputs, tuple(patch), options.batch, predict, overlap=options.overlap, mode=options.blend
            )
            assert isinstance(found, Tensor)
            return found

        image = image.float()
        if len(patch) == 3:
            return slide(image[None].to(device))[0].cpu()
        slices = []
        for index in torch.arange(image.shape[-1]).split(options.batch):
            slices.append(slide(neighbours(image, index, context).to(device)).cpu())
        return torch.cat(slices).movedim(0, -1).contiguous()
    finally:
        for module, mode in modes:
            module.training = mode


def restrict(probabilities: Tensor, classes: Sequence[int], exclusive: bool) -> Tensor:
    """Probabilities [C, *S] of a model that may speak for `classes` alone: what it gives to other foreground
    classes goes to the background if exclusive, and becomes 0 otherwise."""
    kept = torch.zeros_like(probabilities)
    for c in sorted(classes):
        kept[c] = probabilities[c]
    if exclusive:
        others = [c for c in range(1, len(probabilities)) if c not in classes]
        kept[0] = probabilities[[0, *others]].sum(0)
    return kept


def merge(members: Sequence[Tensor], exclusive: bool) -> Tensor:
    """Probabilities [C, *S] of several models as one.

    Exclusive: at a voxel where a member's largest probability is of the foreground, the member with the
    largest such probability decides; where there is none, the mean of all. Otherwise the largest per class.
    """
    if len(members) == 1:
        return members[0]
    if not exclusive:
        return torch.stack(list(members)).amax(0)
    merged = torch.stack(list(members)).mean(0)
    highest = torch.zeros_like(merged[0])
    for member in members:
        value, best = member.max(0)
        wins = (best > 0) & (value > highest)
        merged = torch.where(wins, member, merged)
        highest = torch.where(wins, value, highest)
    return merged
