"""Dice and binary cross-entropy on one channel per exclusive class, the background among them, and their noise-robust
complement: the losses of UFPS.

Jiang, Ma, Zeng, Ying. UFPS: a unified framework for partially annotated federated segmentation in heterogeneous data
distribution. Patterns, 2024. The reverse cross-entropy is that of Wang et al., Symmetric cross entropy for robust
learning with noisy labels, 2019.

A target is a class index [B, *S], or [B, C, *S] in [0, 1] with one channel per class, where channels may overlap and
a voxel may have none. Its background, channel 0, is what no annotated class has: a voxel of a class that its sample does
not annotate counts as background. Where a target has channels, channel 0 stands as given beside that. A sample that annotates nothing
says nothing of the background either, and takes no part.

Shapes: B batch, C classes with the background, *S spatial.
"""

import math
from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedatlas.core.errors import FederationError
from fedatlas.core.options import option, options
from fedatlas.core.outputs import Others
from fedatlas.losses.dice import dice_loss, require_smoothing
from fedatlas.losses.heads import full_precision, thinned
from fedatlas.losses.heads import head_weights as halving
from fedatlas.losses.masked import masked_bce

Outputs = Tensor | Sequence[Tensor]
"""Logits [B, C, *S], or one per head, the head of full resolution first."""

HeadWeights = list[float] | Literal["encoder", "halving"]


@options
class DiceBCE:
    """Dice and binary cross-entropy, one channel per class, background included (exclusive classes; UFPS)."""

    exclusive: ClassVar[bool] = True

    dice: float = option(0.5, "Weight of the Dice part.", ge=0)
    bce: float = option(0.5, "Weight of the cross-entropy part.", ge=0)
    power: Literal[1, 2] = option(2, "Exponent of the probabilities in the Dice denominator.")
    smooth_numerator: float = option(0.01, "Added to the Dice numerator.", ge=0)
    smooth_denominator: float = option(0.01, "Added to the Dice denominator.", gt=0)
    pooled: bool = option(True, "Whether the Dice sums run over the whole batch instead of each sample.")
    activation: Literal["sigmoid", "softmax"] = option(
        "sigmoid", "The probabilities of the Dice part; a softmax runs over the channels that are trained."
    )
    channels: Literal["known", "foreground", "all"] = option(
        "known",
        "The channels that are trained: known: the annotated classes, and with them the background; foreground: the annotated "
        "classes alone; all: every class, what is not annotated being background.",
    )
    head_weights: HeadWeights = option(
        "encoder",
        "Weights of a net's heads, the one of full resolution first: a list, encoder for 1, .1, .2, .3, … or halving "
        "for 1, 1/2, 1/4, … over their sum; a net with one head takes none.",
    )

    @property
    def others(self) -> Others:
        """What is not annotated, see `core.outputs.Others`: a channel is one class against all, so that no other takes part in the background."""
        return "background" if self.channels == "all" else "ignored"

    def __post_init__(self) -> None:
        require_smoothing("dice_bce", self.smooth_numerator, self.smooth_denominator)
        if self.dice == 0 and self.bce == 0:
            raise FederationError(
                "loss dice_bce: dice and bce are 0, so that nothing is trained; give one of them a weight"
            )
        if self.activation == "softmax" and self.channels == "foreground":
            raise FederationError(
                "loss dice_bce: activation is softmax and channels is foreground; a softmax needs the background, "
                "take sigmoid, or channels: known or all"
            )
        if isinstance(self.head_weights, list) and not all(0 <= w < math.inf for w in self.head_weights):
            raise FederationError(
                f"loss dice_bce: head_weights are {self.head_weights}; allowed: finite numbers of at least 0"
            )

    def __call__(self, outputs: Outputs, target: Tensor, known: Tensor) -> Tensor:
        """A scalar; 0, with a gradient of 0, where no channel is trained. outputs: logits [B, C, *S], or one per head;
        target: [B, *S] class index or [B, C, *S] in [0, 1]; known: [B, C] bool, column 0 is not looked at.

        The cross-entropy is the mean over (sample, channel) pairs and voxels, the Dice that of `dice.dice_loss`.
        Raises FederationError for more or fewer heads than `head_weights` has.
        """
        y, valid = channel_target(target, known), self.trained(known)
        terms = [
            weight * self._of_head(full_precision(head), thinned(y, head.shape[2:]), valid)
            for weight, head in weighted(outputs, self.head_weights)
        ]
        return torch.stack(terms).sum()

    def per_sample(self, outputs: Outputs, target: Tensor, known: Tensor) -> Tensor:
        """[B], the loss of each sample alone; otherwise as the call."""
        heads = [outputs] if isinstance(outputs, Tensor) else outputs
        each = []
        for i in range(len(target)):
            own = [head[i : i + 1] for head in heads]
            alone = own[0] if isinstance(outputs, Tensor) else own
            each.append(self(alone, target[i : i + 1], known[i : i + 1]))
        return torch.stack(each)

    def trained(self, known: Tensor) -> Tensor:
        """[B, C] bool, the channels that `channels` names. known: [B, C]."""
        if self.channels == "all":
            return _annotates(known)[:, None].expand_as(known)
        return _with_background(known, _annotates(known) & (self.channels == "known"))

    def _of_head(self, z: Tensor, y: Tensor, valid: Tensor) -> Tensor:
        p = z.sigmoid() if self.activation == "sigmoid" else _softmax(z, valid)
        dice = dice_loss(
            p,
            y,
            valid=valid,
            power=self.power,
            smooth_numerator=self.smooth_numerator,
            smooth_denominator=self.smooth_denominator,
            pooled=self.pooled,
        )
        return self.dice * dice + self.bce * masked_bce(z, y, valid)


def rce(
    outputs: Outputs,
    target: Tensor,
    known: Tensor,
    *,
    head_weights: HeadWeights = "encoder",
    form: Literal["paper", "official"] = "paper",
    log_zero: float = -4.0,
) -> Tensor:
    """The reverse cross-entropy of UFPS (Eq. 9), over the background and the annotated classes, a scalar.

    paper: the mean over voxels of -sum_c q_c log p_c; q is the softmax of the logits, p the target, and log p is at
    least `log_zero`: 0 where all of q is on the target, -log_zero where none is.
    official: what the public code computes, binary cross-entropy with the target in the place of the logits and the
    logits in that of the target; it is linear in the logits, and unbounded below.

    outputs, target, known: as `DiceBCE.__call__` takes them.
    """
    y, valid = channel_target(target, known), _with_background(known, _annotates(known))
    log_y = y if form == "official" else y.log().clamp(min=log_zero)
    terms = []
    for weight, head in weighted(outputs, head_weights):
        z = full_precision(head)
        p = thinned(log_y, head.shape[2:]).to(z.dtype)
        value = masked_bce(p, z, valid) if form == "official" else -(_softmax(z, valid) * p).sum(1).mean()
        terms.append(weight * value)
    return torch.stack(terms).sum()


def arce_coefficient(r: int, rounds: int, alpha: float = 0.01, growing: bool = True) -> float:
    """What `rce` is multiplied by in round r of R, counted from 1: alpha exp(-20 (1 - r / R)), or alpha."""
    return alpha * math.exp(-20 * (1 - r / rounds)) if growing else alpha


def channel_target(target: Tensor, known: Tensor) -> Tensor:
    """[B, C, *S] float32, zero in the channels of classes that are not annotated, whose voxels belong to channel 0.
    target: [B, *S] class index, or [B, C, *S] in [0, 1]; known: [B, C] bool."""
    if target.is_floating_point():
        y = target.float()
    else:
        classes = torch.arange(known.shape[1], device=target.device)
        y = (target.unsqueeze(1) == classes.reshape(-1, *[1] * (target.dim() - 1))).float()
    foreign = ~known
    foreign[:, 0] = False
    if not bool(foreign.any()):
        return y
    foreign = _as(foreign, y)
    own = y.masked_fill(foreign, 0)
    left = (y * foreign).amax(1) * (1 - own[:, 1:].amax(1))
    own[:, 0] = torch.maximum(own[:, 0], left)
    return own


def weighted(outputs: Outputs, weights: HeadWeights) -> list[tuple[float, Tensor]]:
    """Every head of a net's outputs with its weight; a lone Tensor has the weight 1. Raises FederationError for more or
    fewer heads than weights."""
    if isinstance(outputs, Tensor):
        return [(1.0, outputs)]
    count = len(outputs)
    if weights == "encoder":
        values = [1.0] + [i / 10 for i in range(1, count)]
    else:
        values = halving(count) if weights == "halving" else list(weights)
    if len(values) != count:
        raise FederationError(
            f"loss: head_weights has {len(values)} values, the net has {count} heads; give one per head, encoder or "
            "halving"
        )
    return list(zip(values, outputs, strict=True))


def _softmax(z: Tensor, valid: Tensor) -> Tensor:
    """The softmax of z [B, C, *S] over the background and the channels that are valid [B, C]; 0 in the others."""
    return z.masked_fill(_as(~_with_background(valid, True), z), -math.inf).softmax(1)


def _annotates(known: Tensor) -> Tensor:
    """[B] bool: does a sample annotate any class? known: [B, C], the background in column 0."""
    return known[:, 1:].any(1)


def _with_background(valid: Tensor, background: Tensor | bool) -> Tensor:
    """valid [B, C] with another column 0: [B], or one value for all."""
    other = valid.clone()
    other[:, 0] = background
    return other


def _as(rows: Tensor, like: Tensor) -> Tensor:
    """[B, C] as [B, C, 1, …], to be broadcast over `like` [B, C, *S]."""
    return rows.reshape(*rows.shape, *[1] * (like.dim() - 2))
