"""Federated CPS: two nets that teach each other.

Chen, Yuan, Zeng, Wang. Semi-supervised semantic segmentation with cross pseudo supervision. CVPR 2021. In a federation
as a baseline of UFPS, where both nets are averaged.

Two nets of one form and different first weights see every batch. Each learns from its labels, and from the class that the
other one finds most probable at every voxel:

    L = L_seg(p_1) + L_seg(p_2) + w [CE(p_1, argmax p_2) + CE(p_2, argmax p_1)]

At inference only the first is used.

Differences from the paper: cross supervision is on every voxel of the same batches, of which the paper has labelled and
unlabelled ones; with several heads it is between those of full resolution. Both nets move in one step of one optimizer,
whose moments, and the clipping of the gradient, are each net's own. Where classes overlap, "most probable" is a
probability above one half, class by class, and CE is binary.

Reconstruction: the second net's first weights are those of the first, the entries of every parameter in another order. For
entries that were drawn independently of one another, as initialisation draws them, this is another draw; a net that begins
with weights from a file loses what these had learnt, in the second net.

Shapes: B batch, C classes, *S spatial.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from fedatlas import losses
from fedatlas.core.batch import Batch
from fedatlas.core.contract import Clients, Site, State, at_site
from fedatlas.core.options import option, options
from fedatlas.core.outputs import Outputs, voxel_logits
from fedatlas.core.seeds import generator
from fedatlas.core.tensors import Tensors, average, tensors_of
from fedatlas.learning.loop import Loop
from fedatlas.losses import LossChoice, LossFunction
from fedatlas.losses.heads import full_precision
from fedatlas.methods.shared.averaging import SENDS, Weighted, site_weights
from fedatlas.methods.shared.redrawn import redrawn


@dataclass(frozen=True)
class CPSState(State):
    """second: the mean of the second nets."""

    second: Tensors = field(default_factory=dict)


@options
class CPS(Weighted):
    """Two nets at every site that learn from labels and from each other (Chen 2021)."""

    state: ClassVar[type[State]] = CPSState
    tasks: ClassVar[tuple[str, ...]] = ("segmentation",)
    sends: ClassVar[dict[str, str]] = SENDS | {"second": "model:main"}

    w: float = option(1.5, "Weight of the cross supervision; 0: the first net is that of FedAvg.", ge=0)
    loss: LossChoice = option(LossChoice(), "L_seg, the supervised loss.")

    def start(self, net: nn.Module, clients: Clients) -> CPSState:
        return CPSState(tensors_of(net), second=redrawn(net, generator("cps")))

    def round(self, state: CPSState, clients: Clients) -> CPSState:
        replies = clients.call(
            self.local_update,
            model=state.model,
            second=state.second,
            round=state.round,
            rounds=state.rounds,
        )
        weights = site_weights(replies, self.weights)
        model, second = (average(replies.each(key), weights) for key in ("model", "second"))
        return dataclasses.replace(state, model=model, second=second, round=state.round + 1)

    @at_site
    def local_update(
        self, site: Site, model: Tensors, second: Tensors, round: int, rounds: int
    ) -> dict[str, Any]:
        L_seg, exclusive = losses.for_site(self.loss, site), site.labels.space.exclusive
        pair = nn.ModuleDict({"first": site.network(model), "second": site.network(second)})
        f_1, f_2 = pair.values()
        loop = Loop(site, pair, self.local, round=round, rounds=rounds, clipped=(f_1, f_2))
        for batch in loop:
            with loop.autocast():
                terms = self.L(L_seg, f_1(batch.image), f_2(batch.image), batch, exclusive)
            loop.step(terms)
        return {"model": tensors_of(f_1), "second": tensors_of(f_2), "n": site.n_train}

    def L(
        self, L_seg: LossFunction, p_1: Outputs, p_2: Outputs, batch: Batch, exclusive: bool
    ) -> dict[str, Tensor]:
        """The objective of both nets, with its terms. p_1, p_2: what they make of the images of a batch."""
        terms = {
            name: losses.on_batch(L_seg, p, batch, self.loss.findings)
            for name, p in (("first", p_1), ("second", p_2))
        }
        if self.w:
            z_1, z_2 = voxel_logits(p_1), voxel_logits(p_2)
            terms["cross"] = self.w * (taught_by(z_1, z_2, exclusive) + taught_by(z_2, z_1, exclusive))
        return terms


def taught_by(z: Tensor, other: Tensor, exclusive: bool) -> Tensor:
    """The cross-entropy of logits z [B, C, *S] with what is most probable by the logits of the other net, which get no
    gradient; the mean over all voxels, and where classes overlap over all classes."""
    z, other = full_precision(z), full_precision(other).detach()
    if exclusive:
        return cross_entropy(z, other.argmax(1))
    return binary_cross_entropy_with_logits(z, (other > 0).to(z.dtype))
