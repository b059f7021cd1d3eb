"""Grad-CAM of the sub-encoders of a MENU-Net: what the expert of an organ looks at where the net finds that organ.

Xu, Deng, Gateno, Yan. Federated multi-organ segmentation with inconsistent labels. IEEE Trans. Med. Imaging, 2023,
Figure 4: "the activation (output) of the third convolutional block in the sub-encoders". Selvaraju et al., Grad-CAM,
ICCV 2017, Eqs. 1 and 2.

The paper does not say what the gradient is of. Here y is the sum of the logits of the organ's classes, each over the
voxels that the net predicts to be of that class.

Shapes: I input channels, C classes, *S spatial, d maps of a block, *s their size.
"""

from collections.abc import Sequence
from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedatlas.core.errors import FederationError
from fedatlas.core.outputs import evaluating
from fedatlas.nets.menunet import MENUNetModule, SubEncoder

LEVEL = 3
"""The block whose output the paper shows, counted from 1."""


def has_subencoders(net: nn.Module) -> TypeGuard[MENUNetModule]:
    """Is the net one that `activation` can explain?"""
    return isinstance(net, MENUNetModule)


def activation(
    net: MENUNetModule, image: Tensor, organ: int, *, level: int = LEVEL, exclusive: bool = True
) -> Tensor:
    """A map [*S] float32 of 0 or more on the CPU, for an image [I, *S] of a size that the net takes: one window or slice.

    organ: a place in `net.organs`. ReLU(sum_k alpha_k A_k), scaled up linearly: A the maps [d, *s] of block `level`, from
    1, of the organ's sub-encoder (of its last block where there are fewer); alpha_k the mean of dy/dA_k. Where the net
    predicts none of the organ, y is 0 and so is the map. exclusive: a voxel is of the class with the largest logit;
    otherwise of every class whose logit is above 0.

    The net is asked in evaluation mode, sub-encoder by sub-encoder; its mode, its choice of the grouped form and its
    gradients are as before afterwards. Raises FederationError for an organ or a level that there is not, or an image of
    another shape.
    """
    if not 0 <= organ < len(net.organs):
        raise FederationError(f"Grad-CAM: organ {organ}; the net has 0 to {len(net.organs) - 1}")
    if level < 1:
        raise FederationError(f"Grad-CAM: level {level}; allowed: 1 to {len(net.strides)}")
    if image.dim() != len(net.strides[0]) + 1 or len(image) != net.in_channels:
        axes = ", ".join("HWD"[: len(net.strides[0])])
        raise FederationError(
            f"Grad-CAM: an image of shape {list(image.shape)}; expected [{net.in_channels}, {axes}]"
        )
    encoder = net.parts()[f"encoder:{organ}"]
    assert isinstance(encoder, SubEncoder)
    block = encoder.levels[min(level, len(encoder.levels)) - 1]
    kept: list[Tensor] = []

    def keep(module: nn.Module, given: tuple[Tensor, ...], maps: Tensor) -> Tensor:
        kept.append(maps.detach().requires_grad_())
        return kept[-1]

    grouped = net.grouped
    handle = block.register_forward_hook(keep)
    try:
        net.grouped = False
        with evaluating(net), torch.enable_grad():
            logits = net(image[None].to(next(net.parameters()).device, torch.float32))
            assert isinstance(logits, Tensor)
            y = _score(logits, net.organs[organ], exclusive)
            (gradient,) = torch.autograd.grad(y, kept[-1])
    finally:
        handle.remove()
        net.grouped = grouped
    alpha = gradient.flatten(2).mean(2).view(*gradient.shape[:2], *(1,) * (gradient.dim() - 2))  # Eq. 1
    coarse = F.relu((alpha * kept[-1].detach()).sum(1, keepdim=True)).float()  # Eq. 2
    mode = "bilinear" if image.dim() == 3 else "trilinear"
    return F.interpolate(coarse, image.shape[1:], mode=mode, align_corners=False)[0, 0].cpu()


def _score(logits: Tensor, organ: Sequence[int], exclusive: bool) -> Tensor:
    """y: the sum over an organ's classes of the class's logits at the voxels predicted to be of it. logits
    [1, C, *S]."""
    with torch.no_grad():
        decided = F.one_hot(logits.argmax(1), logits.shape[1]).movedim(-1, 1) if exclusive else logits > 0
    return sum((logits[:, c][decided[:, c] > 0].sum() for c in organ), logits.sum() * 0)
