"""The soft Dice loss in all its published conventions, as one function.

Shapes: B batch, C channels, *S spatial.
"""

import torch
from torch import Tensor

from fedatlas.core.errors import FederationError


def require_smoothing(loss: str, numerator: float, denominator: float) -> None:
    """Raises FederationError for a numerator's smoothing above the denominator's: the Dice of a class that is neither there nor
    found would then be above 1, up to numerator / denominator, and its loss far below 0."""
    if numerator > denominator:
        raise FederationError(
            f"loss {loss}: smooth_numerator is {numerator:g} and smooth_denominator {denominator:g}, so that a class which is nowhere "
            f"could have a Dice of {numerator / denominator:g}; allowed: at most smooth_denominator"
        )


def dice_loss(
    a: Tensor,
    b: Tensor,
    *,
    valid: Tensor | None = None,
    power: int = 1,
    smooth_numerator: float = 0.0,
    smooth_denominator: float = 1e-5,
    pooled: bool = True,
    log_below: float = 0.0,
) -> Tensor:
    """The mean over channels of 1 - d, d = (2 sum ab + sn) / (sum a^p + sum b^p + sd).

    a: [B, C, *S] probabilities; b: [B, C, *S] probabilities, or a bool mask.
    valid: [B, C] bool, whether the channel counts in the sample; all by default.
    power: p, 1 or 2. smooth_numerator, smooth_denominator: sn and sd.
    pooled: True: the sums of a channel run over all samples in which it counts, and the mean over channels
        that count in some sample. False: one Dice for each sample and channel that counts, and their mean.
    log_below: l, between 0 and 1: below d = l the loss goes on as 1 - l - l log(d / l), without a step or a bend; 1: it is
        -log d. Where a class is small and nothing of it is found yet, the gradient of 1 - d vanishes with its
        probabilities, and that of the logarithm does not (Wong et al., 3D segmentation with exponential logarithmic
        loss for highly unbalanced object sizes, MICCAI 2018). sn is above 0 then, as d may be 0 without it. Where b is 0
        throughout, nothing can be found, and the loss stays 1 - d.

    Returns 0, with a gradient of 0, where no channel counts.
    """
    space = tuple(range(2, a.dim()))
    overlap = (a * b).sum(space)
    wanted = (b if power == 1 else b * b).sum(space)
    size = (a if power == 1 else a * a).sum(space) + wanted
    counts = torch.ones_like(size, dtype=torch.bool) if valid is None else valid
    overlap, size, wanted = overlap * counts, size * counts, wanted * counts
    if pooled:
        overlap, size, wanted, counts = overlap.sum(0), size.sum(0), wanted.sum(0), counts.any(0)
    # what does not count is kept from a division 0 / 0, whose gradient would not be finite
    denominator = torch.where(counts, size + smooth_denominator, 1)
    d = (2 * overlap + smooth_numerator) / denominator
    term = 1 - d
    if log_below:
        term = torch.where(
            (d < log_below) & (wanted > 0), 1 - log_below - log_below * (d / log_below).log(), term
        )
    loss = torch.where(counts, term, 0)
    return loss.sum() / counts.sum().clamp(min=1)
