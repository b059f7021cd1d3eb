"""Pseudo labels of classes that are not annotated, each a yes or no of its own.

Shapes: B batch, C classes.
"""

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits


def is_confident(p: Tensor, known: Tensor, threshold: float) -> Tensor:
    """[B, C] bool: the class is not annotated in the sample, and max(p, 1 - p) >= threshold.

    p: probabilities [B, C]; known [B, C] bool. Above 1 the threshold is met by nothing.
    """
    return ~known & (torch.maximum(p, 1 - p) >= threshold)


def mean_over(values: Tensor, chosen: Tensor, count: Tensor) -> Tensor:
    """The sum of values [B, C] over the chosen pairs [B, C] bool, by `count`, which is at least 1 here.

    Returns 0, with a gradient of 0, where nothing is chosen; what is not chosen may be of any value.
    """
    return torch.where(chosen, values, 0).sum() / count.clamp(min=1)


def pseudo_bce(z: Tensor, y: Tensor) -> Tensor:
    """[B, C] binary cross-entropy of logits z with hard or soft labels y, which are constants."""
    return binary_cross_entropy_with_logits(z, y.detach().to(z.dtype), reduction="none")
