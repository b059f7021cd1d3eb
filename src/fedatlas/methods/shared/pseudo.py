"""Pseudo labels from models that each know some classes: pure functions of tensors.

Jiang, Ma, Zeng, Ying. UFPS: a unified framework for partially annotated federated segmentation in heterogeneous data
distribution. Patterns 2024, Algorithm 3; the part that all methods compared there have in common.

A teacher has learnt {background} and the classes of its site, where background is "none of mine": channel 0 as with the
Dice and cross-entropy of that paper, and channel 0 and those of all other classes together where the loss sums them, as a
marginal loss does. Together

    background    where every teacher says background
    class c       where its teacher does

and the annotated classes of a sample are overwritten by its ground truth.

Generalisation: where several teachers know a class their logits are averaged, and the class is where at least half of
them say so. In the paper every class has one owner.

Shapes: B batch, C classes with the background, *S spatial.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedatlas.core.errors import FederationError
from fedatlas.core.outputs import Others


@dataclass(frozen=True)
class Merged:
    """What the teachers say together.

    logits [B, C, *S]: of the background the mean over all teachers, of a class that of its teachers; masks [B, C, *S] bool:
    where classes may overlap and a voxel may belong to none, not even the background; taught [C] bool: the classes that
    some teacher knows, and the background. What is not taught is 0 and False.
    """

    logits: Tensor
    masks: Tensor
    taught: Tensor


def none_of(logits: Tensor, speaks: Tensor, others: Others) -> Tensor:
    """A teacher's logits [B, C, *S], with that of "none of mine" in channel 0. speaks [C] bool: the classes that it knows,
    always the background; others: what its other channels say."""
    rest = ~speaks
    rest[0] = True
    if others == "ignored" or int(rest.sum()) == 1:
        return logits
    background = logits[:, rest].logsumexp(1, keepdim=True)
    return torch.cat([background, logits[:, 1:]], 1)


class Merge:
    """Merges the predictions of teachers one after another, with one teacher in memory at a time. others: as in `none_of`."""

    def __init__(self, others: Others) -> None:
        self.others: Others = others
        self.sums: Tensor | None = None
        self.votes: Tensor | None = None
        self.speakers: Tensor | None = None

    def add(self, logits: Tensor, speaks: Tensor) -> None:
        """A teacher's logits [B, C, *S], and speaks [C] bool: the classes that it knows, always the background.

        Raises FederationError for a teacher that does not know the background.
        """
        if not bool(speaks[0]):
            raise FederationError("pseudo labels: a teacher does not know the background; every teacher must")
        axes = (1, -1, *[1] * (logits.dim() - 2))
        heard, logits = speaks.reshape(axes), none_of(logits, speaks, self.others)
        own = torch.where(heard, logits, 0)
        winner = logits.masked_fill(~heard, -torch.inf).argmax(1, keepdim=True)
        says = winner == torch.arange(len(speaks), device=logits.device).reshape(axes)
        if self.sums is None or self.votes is None or self.speakers is None:
            self.sums, self.votes, self.speakers = own, says.int(), speaks.int()
        else:
            self.sums, self.votes = self.sums + own, self.votes + says
            self.speakers = self.speakers + speaks

    def result(self) -> Merged:
        """Raises FederationError where no teacher was added."""
        if self.sums is None or self.votes is None or self.speakers is None:
            raise FederationError("pseudo labels: there is no teacher; at least one is needed")
        count = self.speakers.reshape(1, -1, *[1] * (self.sums.dim() - 2))
        masks = (2 * self.votes >= count) & (count > 0)
        masks[:, 0] = self.votes[:, 0] == self.speakers[0]
        return Merged(self.sums / count.clamp(min=1), masks, self.speakers > 0)


def completed(target: Tensor, known: Tensor, masks: Tensor, taught: Tensor) -> tuple[Tensor, Tensor]:
    """The labels of a batch, and what was not annotated from pseudo labels: (class index [B, *S], known [B, C]).

    A voxel that the sample's own labels give to an annotated class stays there. Any other gets the first of the taught
    classes that the sample does not annotate and whose mask holds it, and else the background.

    target: [B, *S] class index, where a class that the sample does not annotate counts as 0; known [B, C] bool; masks [B, C, *S] bool; taught [C].
    """
    own = known.gather(1, target.flatten(1).long()).reshape(target.shape)
    target, made = torch.where(own, target, 0), torch.zeros_like(target)
    axes = (-1, *[1] * (target.dim() - 1))
    for c in reversed(range(1, known.shape[1])):
        lent = masks[:, c] & (taught[c] & ~known[:, c]).reshape(axes)
        made = torch.where(lent, c, made)
    known = known | taught
    known[:, 0] = True
    return torch.where(target > 0, target, made), known


def completed_overlapping(
    target: Tensor, known: Tensor, masks: Tensor, taught: Tensor
) -> tuple[Tensor, Tensor]:
    """As `completed`, as the published code has it: (masks [B, C, *S] float, known [B, C]) that may overlap, in which the
    background is that of the teachers, so that a voxel may be background and an organ, or nothing at all."""
    axes = (1, -1, *[1] * (target.dim() - 1))
    classes = torch.arange(known.shape[1], device=target.device)
    own = target[:, None] == classes.reshape(axes)
    annotated = known & (classes > 0)
    made = torch.where(annotated.reshape(*known.shape, *axes[2:]), own, masks & taught.reshape(axes))
    known = known | taught
    known[:, 0] = True
    return made.float(), known
