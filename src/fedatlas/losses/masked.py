"""Sigmoid losses under missing labels: what a sample does not annotate takes no part.

The gradient of an unknown channel is exactly 0, whatever its logit and its target hold.

Shapes: B batch, C classes, *S spatial (none for classification).
"""

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from fedatlas.core.options import option, options
from fedatlas.losses.dice import dice_loss, require_smoothing
from fedatlas.losses.heads import full_precision, over_heads


def masked_bce(z: Tensor, target: Tensor, known: Tensor, *, pos_weight: Tensor | None = None) -> Tensor:
    """Binary cross-entropy over the known (sample, class) pairs, by their number and that of voxels (P6).

    z, target: [B, C, *S]; pos_weight: [C], for instance negatives over positives among the labelled cases.
    Returns 0, with a gradient of 0, where nothing is known.
    """
    axes = [1] * (z.dim() - 2)
    weight = None if pos_weight is None else pos_weight.to(z).reshape(-1, *axes)
    each = binary_cross_entropy_with_logits(z, target.to(z.dtype), reduction="none", pos_weight=weight)
    sums = torch.where(known.reshape(*known.shape, *axes), each, 0).sum()
    return sums / (known.sum() * (z.numel() // known.numel())).clamp(min=1)


def masked_dice(
    z: Tensor,
    target: Tensor,
    known: Tensor,
    *,
    power: int = 1,
    smooth_numerator: float = 0.0,
    smooth_denominator: float = 1e-5,
    pooled: bool = True,
) -> Tensor:
    """The soft Dice loss of sigmoids [B, C, *S] over the known channels; 0 where nothing is known."""
    return dice_loss(
        z.sigmoid(),
        target.to(z.dtype),
        valid=known,
        power=power,
        smooth_numerator=smooth_numerator,
        smooth_denominator=smooth_denominator,
        pooled=pooled,
    )


def _pos_weight(values: str | Sequence[float] | None, like: Tensor) -> Tensor | None:
    if values == "balanced":
        raise ValueError("pos_weight is 'balanced', which the counts of a site decide; see losses.for_site")
    return None if values is None else torch.tensor(list(values), dtype=like.dtype, device=like.device)


@options
class MaskedBCE:
    """Binary cross-entropy over what is annotated (sigmoid; classification or segmentation)."""

    exclusive: ClassVar[bool] = False

    pos_weight: list[float] | Literal["balanced"] | None = option(
        None,
        "Weight of the positives: one value per class, or balanced (labels of whole images): the site's cases "
        "without the class over those with it.",
    )

    def __call__(self, outputs: Tensor | Sequence[Tensor], target: Tensor, known: Tensor) -> Tensor:
        """A scalar. outputs: logits [B, C, *S], or one per head; target: the same shape; known [B, C]."""
        return over_heads(self.of_head, outputs, target, known)

    def of_head(self, logits: Tensor, target: Tensor, known: Tensor) -> Tensor:
        """The loss of one head."""
        z = full_precision(logits)
        return masked_bce(z, target, known, pos_weight=_pos_weight(self.pos_weight, z))


@options
class MaskedDiceBCE:
    """Dice and binary cross-entropy over what is annotated (sigmoid; overlapping classes)."""

    exclusive: ClassVar[bool] = False

    dice: float = option(1.0, "Weight of the Dice part.", ge=0)
    bce: float = option(1.0, "Weight of the cross-entropy part.", ge=0)
    power: Literal[1, 2] = option(1, "Exponent of the probabilities in the Dice denominator.")
    smooth_numerator: float = option(0.0, "Added to the Dice numerator.", ge=0)
    smooth_denominator: float = option(1e-5, "Added to the Dice denominator.", gt=0)
    pooled: bool = option(True, "Whether the Dice sums run over the whole batch instead of each sample.")
    pos_weight: list[float] | None = option(None, "Weight of the positives, one per class.")

    def __post_init__(self) -> None:
        require_smoothing("masked_dice_bce", self.smooth_numerator, self.smooth_denominator)

    def __call__(self, outputs: Tensor | Sequence[Tensor], target: Tensor, known: Tensor) -> Tensor:
        """A scalar. outputs: logits [B, C, *S], or one per head; target: the same shape; known [B, C]."""
        return over_heads(self.of_head, outputs, target, known)

    def of_head(self, logits: Tensor, target: Tensor, known: Tensor) -> Tensor:
        """The loss of one head."""
        z = full_precision(logits)
        bce = masked_bce(z, target, known, pos_weight=_pos_weight(self.pos_weight, z))
        dice = masked_dice(
            z,
            target,
            known,
            power=self.power,
            smooth_numerator=self.smooth_numerator,
            smooth_denominator=self.smooth_denominator,
            pooled=self.pooled,
        )
        return self.dice * dice + self.bce * bce
