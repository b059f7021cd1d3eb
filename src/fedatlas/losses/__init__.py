"""Losses: pure functions of tensors, and the choices that a federation file can make among them.

A loss knows no trainer, site or round. Label sets may differ within a batch; `known` [B, C] tells them.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from fedatlas.data.batch import Batch
from fedatlas.errors import FederationError
from fedatlas.labels import LabelSpace
from fedatlas.losses.marginal import MarginalDiceCE, MarginalDiceCEExclusion
from fedatlas.losses.masked import MaskedBCE, MaskedDiceBCE
from fedatlas.options import from_dict, not_known, option, options


class LossFunction(Protocol):
    """What `make` returns. outputs: logits [B, C, *S], or a list of them, the head of full resolution first;
    target: [B, *S] class index if exclusive, else [B, C, *S]; known: [B, C] bool. Returns a scalar."""

    def __call__(self, outputs: Tensor | Sequence[Tensor], target: Tensor, known: Tensor) -> Tensor: ...


REGISTRY: dict[str, type] = {
    "marginal_dice_ce": MarginalDiceCE,
    "marginal_dice_ce_exclusion": MarginalDiceCEExclusion,
    "masked_dice_bce": MaskedDiceBCE,
    "masked_bce": MaskedBCE,
}


@options
class LossChoice:
    """The supervised loss, by name."""

    name: str = option(
        "auto", "A registered loss; auto is marginal_dice_ce for exclusive classes, else masked_dice_bce."
    )
    options: dict[str, Any] = option({}, "The options of that loss.")


def make(choice: LossChoice, space: LabelSpace) -> LossFunction:
    """The chosen loss. Raises FederationError for an unknown name or option, and for a loss of the other kind
    of label space (softmax losses need exclusive classes, sigmoid losses the others)."""
    name = choice.name
    if name == "auto":
        name = "marginal_dice_ce" if space.exclusive else "masked_dice_bce"
    if name not in REGISTRY:
        raise not_known("the loss", name, ["auto", *REGISTRY])
    loss = from_dict(REGISTRY[name], choice.options, what=f"loss {name}")
    if loss.exclusive != space.exclusive:
        fitting = ", ".join(n for n, cls in REGISTRY.items() if cls.exclusive == space.exclusive)
        kind = "exclusive" if space.exclusive else "not exclusive"
        raise FederationError(f"loss {name}: does not fit, the classes are {kind}; allowed: auto, {fitting}")
    weights = getattr(loss, "pos_weight", None)
    if weights is not None and len(weights) != len(space):
        raise FederationError(
            f"loss {name}: pos_weight has {len(weights)} values for {len(space)} classes; give one per class"
        )
    return loss


def supervised(loss: LossFunction) -> Callable[[nn.Module, Batch], Tensor]:
    """The plain local objective: the loss of a net's outputs on the labels of a batch."""
    return lambda net, batch: loss(net(batch.image), batch.target, batch.known)
