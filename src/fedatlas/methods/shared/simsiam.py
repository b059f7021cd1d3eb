"""Federated SimSiam: the self-supervised phase that comes before FedSSP and FedMatch+. Not a method of its own.

Chen, He. Exploring simple Siamese representation learning. CVPR 2021.

Every image is seen in two strongly varied views. A predictor on one view's projected features is to give the other's,
through which no gradient flows. Labels are not looked at. The extractor and both heads are averaged like any model.

Differences from the paper: the views are made of images that the federation's augmentation has varied already.
Differences from the official code: lr is the rate itself, not one for batches of 256; `hidden` is as wide as the
projector's output, where the code has it as wide as the features (equal for its ResNet-50); the predictor's rate falls with
all others, where the command that the code recommends holds it (`schedule: constant` holds all).

Shapes: B batch, d features.
"""

from typing import Any, Literal, cast

from torch import Tensor, nn

from fedatlas.core.batch import Batch
from fedatlas.core.contract import NetSpec, Replies, Site
from fedatlas.core.errors import FederationError
from fedatlas.core.options import option, options
from fedatlas.core.tensors import Tensors, average, tensors_of
from fedatlas.learning import augment
from fedatlas.learning.augment import Augmentation
from fedatlas.learning.loop import Local, forget_optimizer, train
from fedatlas.losses.similarity import negative_cosine as D
from fedatlas.methods.shared.averaging import Weighting, site_weights

HEADS = "simsiam_heads"
"""The heads' name among a method's nets, and in the registry of nets."""

SENDS = {"model": "model", "heads": f"model:{HEADS}", "n": "cases"}
"""What a site answers in this phase."""

MEMORY = "optimizer.pretrain"
"""Where a site keeps this phase's optimizer state."""


@options
class PreTraining(Local):
    """Local training of the self-supervised phase, with SimSiam's own defaults."""

    optimizer: Literal["adamw", "adam", "sgd"] = option("sgd", "The local optimizer.")
    lr: float = option(0.05, "Learning rate at the first step.", gt=0)
    weight_decay: float = option(1e-4, "Decoupled for adamw, added to the gradient for the others.", ge=0)
    batch: int = option(32, "Images per step; the heads normalise over them.", ge=2)
    views: Augmentation = option(
        augment.STRONG, "How both views are varied; keys left out have the values of this default."
    )
    dim: int = option(2048, "Features that the projector gives.", gt=0)
    hidden: int | None = option(None, "Width of the projector's two inner layers; null: dim.", gt=0)
    bottleneck: int = option(512, "Width of the predictor's inner layer.", gt=0)

    @property
    def nets(self) -> dict[str, NetSpec]:
        """The heads, as a method declares them."""
        widths = {"dim": self.dim, "hidden": self.hidden, "bottleneck": self.bottleneck}
        return {HEADS: NetSpec(HEADS, widths, on="features")}


class Siamese(nn.Module):
    """f and h of the paper: images [B, I, *S] -> (p, z) of `nets.heads`. The classifier's own head takes no part."""

    def __init__(self, net: nn.Module, heads: nn.Module) -> None:
        super().__init__()
        self.net, self.heads = net, heads

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(p, z), each [B, dim]."""
        return self.heads(cast(Any, self.net).features(x))


def phase_rounds(chosen: int | None, rounds: int, *, method: str) -> int:
    """How many of a federation's rounds are of this phase: the chosen number, or half of all where it is None.

    Raises FederationError where none is left after it.
    """
    if chosen is not None and chosen >= rounds:
        raise FederationError(
            f"method {method}: pretrain_rounds is {chosen}, the federation has rounds: {rounds}; allowed: fewer, so "
            "that rounds with labels follow"
        )
    if chosen is None and rounds < 2:
        raise FederationError(
            f"method {method}: the federation has rounds: {rounds}; it needs 2 or more, one for each phase, or "
            "pretrain_rounds: 0"
        )
    return rounds // 2 if chosen is None else chosen


def pretrain(
    site: Site, model: Tensors, heads: Tensors, how: PreTraining, *, round: int, rounds: int
) -> dict[str, Any]:
    """One round of the phase at a site: its reply, of the form `SENDS`. round, rounds: of the phase."""
    siamese = Siamese(site.network(model), site.network(heads, HEADS))

    def L(f: nn.Module, batch: Batch) -> Tensor:
        x_1, x_2 = (augment.augment(batch.image, batch.target, how.views, site.rng)[0] for _ in range(2))
        (p_1, z_1), (p_2, z_2) = f(x_1), f(x_2)
        return D(p_1, z_2) / 2 + D(p_2, z_1) / 2  # Eq. (4)

    train(site, siamese, L, how, round=round, rounds=rounds, memory=MEMORY)
    return {"model": tensors_of(siamese.net), "heads": tensors_of(siamese.heads), "n": site.n_train}


def averaged(replies: Replies, rule: Weighting, *, model: str = "model") -> tuple[Tensors, Tensors]:
    """The means of the sites' nets and heads. model: the key of the nets in the replies."""
    weights = site_weights(replies, rule)
    return average(replies.each(model), weights), average(replies.each("heads"), weights)


def forget(site: Site) -> None:
    """Takes what the phase kept at a site out of its memory."""
    forget_optimizer(site, MEMORY)
