"""Softmax losses under missing labels: what a sample does not annotate is merged into its background.

The merge is done on logits: the log of the sum of exponentials of all merged classes is the logit of
"none of the known classes", and what follows is the ordinary loss of the merged logits. It is exact, and
stable for logits of any size.

What receives a gradient: through the merge, the logits of classes that are not annotated do. The value of the loss depends on the sum
of the merged probabilities alone, never on how it is divided. Its gradient, whatever the voxel's label, is within the merged set (the
background included) proportional to the probabilities of its classes, so that a step favours those that are the most probable
already. Labels of classes that are not annotated change nothing.

A batch may mix label sets. Each sample is merged by its own row of `known`; a class is then pooled over the
samples that annotate it, and channel 0 over all samples, each with its own merge.

Shapes: B batch, C classes, K the background and the classes known in at least one sample, *S spatial.
Source: Shi et al., Marginal loss and exclusion loss for partially supervised multi-organ segmentation, 2021.
"""

import math
from collections.abc import Sequence
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from fedatlas.core.errors import FederationError
from fedatlas.core.options import option, options
from fedatlas.losses.dice import dice_loss, require_smoothing
from fedatlas.losses.heads import full_precision, over_heads


class Merged(NamedTuple):
    """A batch after the merge.

    log_m: [B, K, *S] log-probabilities, -inf where the sample does not annotate the class.
    onehot: [B, K, *S] bool, the target. valid: [B, K] bool, always True in column 0.
    classes: [K] the class of every channel, ascending; classes[0] is 0.
    """

    log_m: Tensor
    onehot: Tensor
    valid: Tensor
    classes: list[int]


def merge_probabilities(q: Tensor, known: Tensor) -> Tensor:
    """m [B, C, *S]: the probabilities q with those of all unknown classes added to channel 0 (P1)."""
    keep = _as(_foreground(known), q)
    return torch.cat([(q * ~keep).sum(1, keepdim=True), (q * keep)[:, 1:]], 1)


def merge_logits(z: Tensor, known: Tensor) -> tuple[Tensor, Tensor, list[int]]:
    """Logits [B, K, *S] whose softmax is the merged probability, valid [B, K], and the K classes.

    Channel 0 is log sum exp over the background and the unknown classes; a class that only other samples
    know is -inf.
    """
    rows = known.tolist()
    foreground = range(1, z.shape[1])
    kept = [c for c in foreground if any(row[c] for row in rows)]
    merged = [0] + [c for c in foreground if not all(row[c] for row in rows)]
    valid = known[:, [0, *kept]].clone()
    valid[:, 0] = True
    if merged == [0]:
        return z, valid, [0, *kept]
    rest, own = channels(z, merged), channels(z, kept)
    if any(row != rows[0] for row in rows):
        rest = rest.masked_fill(_as(_foreground(known)[:, merged], z), -math.inf)
        own = own.masked_fill(_as(~valid[:, 1:], z), -math.inf)
    return torch.cat([rest.logsumexp(1, keepdim=True), own], 1), valid, [0, *kept]


def merge(z: Tensor, target: Tensor, known: Tensor) -> Merged:
    """The merged log-probabilities and target of logits z [B, C, *S], target [B, *S] class index."""
    merged, valid, classes = merge_logits(z, known)
    return Merged(merged.log_softmax(1), merge_target(target, valid, classes), valid, classes)


def merge_target(target: Tensor, valid: Tensor, classes: Sequence[int]) -> Tensor:
    """[B, K, *S] bool: a voxel of a class that its sample does not annotate belongs to channel 0."""
    index = torch.tensor(classes[1:], dtype=target.dtype, device=target.device)
    onehot = target.unsqueeze(1) == index.reshape(1, -1, *[1] * (target.dim() - 1))
    onehot = onehot & valid[:, 1:].reshape(*valid[:, 1:].shape, *[1] * (target.dim() - 1))
    return torch.cat([~onehot.any(1, keepdim=True), onehot], 1)


def marginal_ce(batch: Merged, *, clamp: float | None = None, ce_on_probs: bool = False) -> Tensor:
    """The mean over voxels of -log m_target (P3).

    clamp: m is raised to at least this, so that the gradient is 0 below it (Fed-MENU: 1e-4).
    ce_on_probs: the cross-entropy of a second softmax, over m instead of logits, as the public code of
        ConDistFL executes it.
    """
    log_m = batch.log_m
    if ce_on_probs:
        log_m = log_m.exp().masked_fill(_as(~batch.valid, log_m), -math.inf).log_softmax(1)
    if clamp is not None:
        log_m = log_m.clamp(min=math.log(clamp))
    voxels = batch.onehot.numel() // batch.onehot.shape[1]
    return -torch.where(batch.onehot, log_m, 0).sum() / voxels


def marginal_dice(
    batch: Merged,
    *,
    power: int = 1,
    smooth_numerator: float = 0.0,
    smooth_denominator: float = 1e-5,
    pooled: bool = True,
    background: bool = True,
    log_below: float = 0.0,
) -> Tensor:
    """The soft Dice loss of the merged probabilities (P2): the mean over the K channels, channel 0 only if
    `background`. In a mixed batch a class is pooled over the samples that know it. log_below: see `dice.dice_loss`."""
    first = 0 if background else 1
    return dice_loss(
        batch.log_m[:, first:].exp(),
        batch.onehot[:, first:],
        valid=batch.valid[:, first:],
        power=power,
        smooth_numerator=smooth_numerator,
        smooth_denominator=smooth_denominator,
        pooled=pooled,
        log_below=log_below,
    )


def exclusion(z: Tensor, target: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
    """The cross-entropy and the Dice part of the exclusion loss (P5), both to be added to a loss.

    With e(v) = 1 where the label of v is a known class, and U(s) the background and the classes that sample s
    does not know, for every class c and the samples in which c is in U, pooled:
    sum e log(q_c + 1) / sum e, which is 0 where no voxel has a known class, and
    (2 sum q_c e + 1) / (sum q_c^2 + sum e + 1); then the mean over all c that are in some U.

    A sample that knows no class at all, of which the paper has none, has no part in it: its U would hold every class, and the
    second term would have all of them fill its image. Where no sample knows one, the parts are 0 and 1, without a gradient.
    """
    space = tuple(range(2, z.dim()))
    inside = _foreground(known)
    outside = ~inside & inside.any(1, keepdim=True)  # [B, C]
    classes = [c for c in range(z.shape[1]) if c == 0 or bool(outside[:, c].any())]
    outside = outside[:, classes]
    q = channels(z.softmax(1), classes)
    e = labelled(target, known).unsqueeze(1)  # [B, 1, *S]
    n = (e.sum(space) * outside).sum(0)  # [classes]
    log = ((q.log1p() * e).sum(space) * outside).sum(0)
    overlap = ((q * e).sum(space) * outside).sum(0)
    size = ((q * q).sum(space) * outside).sum(0) + n
    return (log / n.clamp(min=1)).mean(), ((2 * overlap + 1) / (size + 1)).mean()


def channels(z: Tensor, classes: Sequence[int]) -> Tensor:
    """The channels [B, len(classes), *S] of z [B, C, *S]; z itself if they are all of them, in order."""
    if list(classes) == list(range(z.shape[1])):
        return z
    return z.index_select(1, torch.tensor(list(classes), dtype=torch.long, device=z.device))


def labelled(target: Tensor, known: Tensor) -> Tensor:
    """[B, *S] bool: the voxel's label is a class that its sample annotates."""
    index = target.flatten(1).long()
    return _foreground(known).gather(1, index).reshape(target.shape)


def _foreground(known: Tensor) -> Tensor:
    """[B, C] known, False in column 0."""
    keep = known.clone()
    keep[:, 0] = False
    return keep


def _as(rows: Tensor, like: Tensor) -> Tensor:
    """[B, C] as [B, C, 1, …], to be broadcast over `like` [B, C, *S]."""
    return rows.reshape(*rows.shape, *[1] * (like.dim() - 2))


@options
class MarginalDiceCE:
    """Dice and cross-entropy after merging what is not annotated into the background (softmax)."""

    exclusive: ClassVar[bool] = True

    dice: float = option(1.0, "Weight of the Dice part.", ge=0)
    ce: float = option(1.0, "Weight of the cross-entropy part.", ge=0)
    power: Literal[1, 2] = option(1, "Exponent of the probabilities in the Dice denominator.")
    smooth_numerator: float = option(0.0, "Added to the Dice numerator.", ge=0)
    smooth_denominator: float = option(1e-5, "Added to the Dice denominator.", gt=0)
    pooled: bool = option(True, "Whether the Dice sums run over the whole batch instead of each sample.")
    background: bool = option(True, "Whether the merged background is a channel of the Dice part.")
    log_below: float = option(
        0.0,
        "The Dice d of a class below which its loss goes on as a logarithm, 1 - l - l log(d / l), which keeps a small class "
        "learning of which nothing is found yet; 0: nowhere, 1: -log d. It needs smooth_numerator above 0.",
        ge=0,
        le=1,
    )
    clamp: float | None = option(
        None, "Smallest probability in the cross-entropy, below which it has no gradient.", gt=0, lt=1
    )
    ce_on_probs: bool = option(
        False, "Whether a second softmax is applied in the cross-entropy, as ConDistFL's public code does."
    )

    def __post_init__(self) -> None:
        require_smoothing("marginal_dice_ce", self.smooth_numerator, self.smooth_denominator)
        if self.log_below and self.smooth_numerator == 0:
            raise FederationError(
                f"loss marginal_dice_ce: log_below is {self.log_below:g} and smooth_numerator is 0, so that a class without overlap would "
                "have an infinite loss; take a smooth_numerator above 0 and a smooth_denominator as large, as 0.001 both"
            )

    def __call__(self, outputs: Tensor | Sequence[Tensor], target: Tensor, known: Tensor) -> Tensor:
        """A scalar. outputs: logits [B, C, *S], or one per head; target [B, *S] class index; known [B, C]."""
        return over_heads(self.of_head, outputs, target, known)

    def of_head(self, logits: Tensor, target: Tensor, known: Tensor) -> Tensor:
        """The loss of one head."""
        batch = merge(full_precision(logits), target, known)
        ce = marginal_ce(batch, clamp=self.clamp, ce_on_probs=self.ce_on_probs)
        dice = marginal_dice(
            batch,
            power=self.power,
            smooth_numerator=self.smooth_numerator,
            smooth_denominator=self.smooth_denominator,
            pooled=self.pooled,
            background=self.background,
            log_below=self.log_below,
        )
        return self.dice * dice + self.ce * ce


@options
class MarginalDiceCEExclusion:
    """Marginal Dice and cross-entropy, plus the exclusion loss of what is not annotated (softmax)."""

    exclusive: ClassVar[bool] = True

    marginal: MarginalDiceCE = option(
        MarginalDiceCE(power=2, smooth_numerator=1.0, smooth_denominator=1.0, clamp=1e-4),
        "The marginal part, with the conventions of Fed-MENU by default.",
    )
    exclusion_ce: float = option(1.0, "Weight of the cross-entropy part of the exclusion loss.", ge=0)
    exclusion_dice: float = option(1.0, "Weight of the Dice part of the exclusion loss.", ge=0)

    def __call__(self, outputs: Tensor | Sequence[Tensor], target: Tensor, known: Tensor) -> Tensor:
        """A scalar. outputs: logits [B, C, *S], or one per head; target [B, *S] class index; known [B, C]."""
        return over_heads(self.of_head, outputs, target, known)

    def of_head(self, logits: Tensor, target: Tensor, known: Tensor) -> Tensor:
        """The loss of one head."""
        logits = full_precision(logits)
        ce, dice = exclusion(logits, target, known)
        total = self.marginal.of_head(logits, target, known)
        return total + self.exclusion_ce * ce + self.exclusion_dice * dice
