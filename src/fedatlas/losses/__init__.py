"""Losses: pure functions of tensors, and the choices that a federation file can make among them.

A loss knows no trainer, site or round. Label sets may differ within a batch; `known` [B, C] tells them.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from fedatlas.core.batch import Batch
from fedatlas.core.errors import FederationError
from fedatlas.core.extensions import Extensions
from fedatlas.core.labels import LabelSpace, SiteLabels
from fedatlas.core.options import from_dict, not_known, option, options
from fedatlas.core.outputs import Mixed, Others, Outputs
from fedatlas.core.outputs import heads as heads_of  # `heads` is the module of this package
from fedatlas.losses.heads import full_precision
from fedatlas.losses.marginal import MarginalDiceCE, MarginalDiceCEExclusion
from fedatlas.losses.masked import MaskedBCE, MaskedDiceBCE, masked_bce
from fedatlas.losses.onehot import DiceBCE


class LossFunction(Protocol):
    """What `make` returns. outputs: logits [B, C, *S], or a list of them, the head of full resolution first;
    target: [B, *S] class index if exclusive, else [B, C, *S]; known: [B, C] bool. Returns a scalar."""

    def __call__(self, outputs: Tensor | Sequence[Tensor], target: Tensor, known: Tensor) -> Tensor: ...


REGISTRY: dict[str, type] = {
    "marginal_dice_ce": MarginalDiceCE,
    "marginal_dice_ce_exclusion": MarginalDiceCEExclusion,
    "dice_bce": DiceBCE,
    "masked_dice_bce": MaskedDiceBCE,
    "masked_bce": MaskedBCE,
}

OTHERS = Extensions("loss", "fedatlas.losses")
"""Losses of other packages, and of this process."""

L = TypeVar("L", bound=type)


def register(name: str) -> Callable[[L], L]:
    """A decorator: registers a loss in this process, see `Extensions.register`. The class is one of `options`, with
    `exclusive`, for which kind of classes it is, and `__call__` as of `LossFunction`."""
    return OTHERS.register(name, lambda: ["auto", *REGISTRY])


def find(name: str) -> type[Any] | None:
    """The class of a loss; None for a name that there is not."""
    return REGISTRY.get(name) or OTHERS.find(name)


def names() -> list[str]:
    """All losses: of this package, then of others."""
    return [*REGISTRY, *OTHERS.names()]


@options
class LossChoice:
    """The supervised loss, by name."""

    name: str = option(
        "auto",
        "A registered loss; auto is marginal_dice_ce for exclusive classes, masked_bce with balanced weights for "
        "labels of whole images, else masked_dice_bce.",
    )
    options: dict[str, Any] = option({}, "The options of that loss.")
    findings: float = option(
        1.0, "Weight of the cross-entropy of findings of the whole image, beside segmentation.", ge=0
    )


def others_of(choice: LossChoice) -> Others:
    """What a loss makes of the channels that its samples do not annotate: its attribute `others`, background where it has
    none. Raises FederationError for an option that the loss does not have."""
    cls = find(choice.name)
    made = from_dict(cls, choice.options, what=f"loss {choice.name}") if cls else None
    return getattr(made, "others", "background")


class Counts(Protocol):
    """What a loss may know of the data of a site: `core.contract.Site` is one."""

    labels: SiteLabels
    n_labelled: Tensor
    n_positive: Tensor


def for_site(choice: LossChoice, site: Counts) -> LossFunction:
    """The chosen loss with what it takes from a site's own counts: `pos_weight: balanced` becomes N_neg,c / N_pos,c
    over the training cases in which class c is annotated (P6), and 1 where one of them is 0. Raises as `make`."""
    loss = make(choice, site.labels.space)
    if getattr(loss, "pos_weight", None) != "balanced":
        return loss
    positive, negative = site.n_positive.double(), (site.n_labelled - site.n_positive).double()
    both = (positive > 0) & (negative > 0)
    weights = torch.where(both, negative / positive.clamp(min=1), 1.0)
    return dataclasses.replace(loss, pos_weight=weights.tolist())  # type: ignore[type-var]


def make(choice: LossChoice, space: LabelSpace) -> LossFunction:
    """The chosen loss, as it is before it meets a site. Raises FederationError for an unknown name or option, and for
    a loss of another kind of label space (softmax losses need exclusive classes, sigmoid losses the others; labels of
    whole images have no Dice)."""
    name, chosen = choice.name, choice.options
    if name == "auto":
        other = "masked_bce" if space.level == "image" else "masked_dice_bce"
        name = "marginal_dice_ce" if space.exclusive else other
        chosen = ({"pos_weight": "balanced"} if space.level == "image" else {}) | chosen
    cls = find(name)
    if cls is None:
        raise not_known("the loss", name, ["auto", *names()])
    if not isinstance(getattr(cls, "exclusive", None), bool):
        raise FederationError(
            f"loss {name}: {cls.__name__} does not say for which classes it is; write exclusive: ClassVar[bool] = True for a "
            "softmax, False for sigmoids"
        )
    loss: Any = from_dict(cls, chosen, what=f"loss {name}")
    if space.level == "image" and name in REGISTRY and name != "masked_bce":
        raise FederationError(
            f"loss {name}: is for segmentation, labels are of whole images; allowed: auto, masked_bce"
        )
    if loss.exclusive != space.exclusive:
        kinds = ((n, getattr(find(n), "exclusive", None)) for n in names())
        fitting = ", ".join(n for n, exclusive in kinds if exclusive is space.exclusive)
        kind = "exclusive" if space.exclusive else "not exclusive"
        raise FederationError(f"loss {name}: does not fit, the classes are {kind}; allowed: auto, {fitting}")
    weights = getattr(loss, "pos_weight", None)
    if weights == "balanced" and space.level != "image":
        raise FederationError(
            f"loss {name}: pos_weight is balanced, which counts images; labels are of voxels, give one value per class"
        )
    if isinstance(weights, list) and len(weights) != len(space):
        raise FederationError(
            f"loss {name}: pos_weight has {len(weights)} values for {len(space)} classes; give one per class"
        )
    return loss


def supervised(choice: LossChoice, site: Counts) -> Callable[[nn.Module, Batch], Tensor]:
    """The plain local objective: the loss, as `for_site` makes it, of a net's outputs on the labels of a batch."""
    loss = for_site(choice, site)
    return lambda net, batch: on_batch(loss, net(batch.image), batch, choice.findings)


def on_batch(loss: LossFunction, outputs: Outputs, batch: Batch, findings: float = 1.0) -> Tensor:
    """The loss of outputs on the labels of a batch, a scalar; of `Mixed` outputs, with the masked binary cross-entropy
    of the findings times `findings`. Where no sample of the batch has an annotated finding, their head gets no
    gradient at all, so that no optimizer moves it."""
    value = loss(heads_of(outputs), batch.target, batch.known)
    if not isinstance(outputs, Mixed) or batch.finding is None or batch.finding_known is None:
        return value
    if not bool(batch.finding_known.any()):
        return value
    z = full_precision(outputs.findings)
    return value + findings * masked_bce(z, batch.finding, batch.finding_known)
