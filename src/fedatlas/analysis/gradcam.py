"""Grad-CAM: where in an image a class's logit comes from.

Selvaraju et al., "Grad-CAM: Visual Explanations from Deep Networks via Gradient-based Localization", ICCV 2017,
Eqs. 1 and 2.

Shapes: I input channels, H, W the image, d features, h, w the last maps.
"""

from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedatlas.core.errors import FederationError
from fedatlas.core.outputs import evaluating
from fedatlas.nets.classifier import Classifier


def has_maps(net: nn.Module) -> TypeGuard[Classifier]:
    """Is the net one that `gradcam` can explain?"""
    return isinstance(net, Classifier)


def gradcam(net: Classifier, image: Tensor, class_index: int) -> Tensor:
    """A map [H, W] float32 in 0..1 on the CPU, for an image [I, H, W] as the net takes it.

    The last maps, each weighted by the mean of the logit's gradient over it, summed; what is negative is 0. The sum
    is scaled up bilinearly and divided by its largest value; where nothing is positive the map is 0 everywhere.

    The net is asked in evaluation mode; its mode and its gradients are as before afterwards. Raises FederationError
    for a class that the net does not have, or an image of another shape.
    """
    if not 0 <= class_index < net.classes:
        raise FederationError(f"Grad-CAM: class {class_index}; the net has 0 to {net.classes - 1}")
    if image.dim() != 3 or len(image) != net.in_channels:
        raise FederationError(
            f"Grad-CAM: an image of shape {list(image.shape)}; expected [{net.in_channels}, H, W]"
        )
    with evaluating(net):
        with torch.no_grad():
            maps = net.maps(image[None].to(next(net.parameters()).device))
        with torch.enable_grad():
            maps.requires_grad_()
            logit = net.head(maps.mean((2, 3)))[0, class_index]
            (gradient,) = torch.autograd.grad(logit, maps)
    alpha = gradient.mean((2, 3), keepdim=True)  # Eq. 1
    coarse = F.relu((alpha * maps.detach()).sum(1, keepdim=True))  # Eq. 2
    fine = F.interpolate(coarse.float(), image.shape[1:], mode="bilinear", align_corners=False)[0, 0].cpu()
    highest = fine.max()
    return fine / highest if highest > 0 else torch.zeros_like(fine)
