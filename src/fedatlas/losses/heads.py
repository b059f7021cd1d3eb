"""One loss over the heads of a deeply supervised net.

Differences from MONAI's DeepSupervisionLoss, which the published code of ConDistFL calls: of a head with half the resolution,
voxel i has the target of voxel 2i, on which its strided convolution is centred, where MONAI's `nearest-exact` takes 2i + 1;
and for any number of heads the weights sum to 1, where the code's four are cut off.

Shapes: B batch, C classes, *S spatial.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

HeadLoss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(logits [B, C, *S], target, known [B, C]) -> a scalar."""


def head_weights(heads: int) -> list[float]:
    """1, 1/2, 1/4, … over their sum; for four heads .5333, .2667, .1333, .0667 (ConDistFL)."""
    return [2.0 ** (heads - 1 - i) / (2**heads - 1) for i in range(heads)]


def over_heads(loss: HeadLoss, outputs: Tensor | Sequence[Tensor], target: Tensor, known: Tensor) -> Tensor:
    """The weighted sum of a loss over heads, the one of full resolution first; a lone Tensor is one head.

    The target is given at full resolution and thinned for the heads of lower resolution.
    """
    if isinstance(outputs, Tensor):
        return loss(outputs, target, known)
    terms = [
        weight * loss(head, thinned(target, head.shape[2:]), known)
        for weight, head in zip(head_weights(len(outputs)), outputs, strict=True)
    ]
    return torch.stack(terms).sum()


def thinned(target: Tensor, size: Sequence[int]) -> Tensor:
    """A target [..., *S] at a lower resolution: index floor(i * S / size) of every axis, which is the voxel
    on which a strided convolution is centred. A target without spatial axes is returned as it is."""
    first = target.dim() - len(size)
    for axis, wanted in enumerate(size, start=first):
        length = target.shape[axis]
        if wanted != length:
            index = torch.arange(wanted, device=target.device) * length // wanted
            target = target.index_select(axis, index)
    return target


def full_precision(logits: Tensor) -> Tensor:
    """Half-precision logits as float32; others as they are."""
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
