"""Modeling the background for incremental learning in semantic segmentation (MiB).

Cermelli, Mancini, Rota Bulò, Ricci, Caputo. CVPR 2020.

An older model, whose weights `init_from` gives, knows the classes Y^{t-1}; new classes C^t are learnt, also by sites that
annotate these alone. What is not annotated is the background of the labels, so the loss merges it (Eq. 5 and 6: here any
loss that respects missing labels). The old model teaches the old classes. What it calls background may be a new class by
now, so the new model's background is merged with the new classes before the two are compared (Eq. 8 and 9).

The server takes the mean of the sites' models and walks on along it: what one of K sites learns of a new class enters the
mean with 1/K of its strength, which momentum makes good. The old model goes with every call, so that a site need not
remember it; where no class is old, or nothing is distilled, nothing goes along.

Differences from the paper
    The label set is that of a sample, not of a step: old classes that the sample annotates are merged into the background,
    too, and voxels that its labels give to a class are left out, so that a label counts more than the old model. The
    supervised loss is the federation's (by default cross-entropy with Dice). Rows of new classes begin with the net's first
    weights, not with those of the background (Eq. 10, 11), so that the first model has the old rows as they were. Classes
    may overlap, or be of whole images, one sigmoid each: the old model then teaches each old class that a sample does not
    annotate, by binary cross-entropy. lambda_kd is 10, as in the official code for Pascal VOC.

Shapes: B batch, C classes, *S spatial.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from fedatlas import losses
from fedatlas.core.batch import Batch
from fedatlas.core.contract import Clients, Site, State, at_site
from fedatlas.core.labels import LabelSpace
from fedatlas.core.options import option, options
from fedatlas.core.outputs import voxel_logits
from fedatlas.core.tensors import Tensors, tensors_of
from fedatlas.learning.loop import Loss, train
from fedatlas.losses.heads import full_precision
from fedatlas.losses.marginal import labelled
from fedatlas.methods.shared.averaging import answer, mean
from fedatlas.methods.shared.server_step import MeanWithMomentum, StepState, started, stepped, with_momentum


@dataclass(frozen=True)
class OldState(StepState):
    """A state that keeps the older model. old: the classes that it knows; teacher: theta^{t-1}, in the form of the new model,
    whose rows of new classes are not asked. Both are empty where it does not teach."""

    old: tuple[int, ...] = ()
    teacher: Tensors = field(default_factory=dict)


@options
class MiB(MeanWithMomentum):
    """FedAvg that learns new classes and keeps those of an older model by distillation (Cermelli 2020)."""

    lambda_kd: float = option(10.0, "lambda: weight of the distillation from the older model; 0: none.", ge=0)
    server_momentum: float = option(
        0.6,
        "Momentum of the server's step, m = momentum m + Delta and x + m, as in fedavgm; 0: the mean itself.",
        ge=0,
        lt=1,
    )

    @property
    def state(self) -> type[State]:
        return OldState

    def start(self, net: nn.Module, clients: Clients) -> OldState:
        old = tuple(getattr(net, "old", ())) if self.lambda_kd else ()
        moments = started(net, initial=(0.0,), per_class=False).moments if self.server_momentum else ()
        return OldState(tensors_of(net), moments=moments, old=old, teacher=tensors_of(net) if old else {})

    def round(self, state: OldState, clients: Clients) -> State:
        older = {"old": list(state.old), "teacher": state.teacher} if state.old else {}
        where = {"round": state.round, "rounds": state.rounds}
        replies = clients.call(self.local_update, model=state.model, **where, **older)
        average = mean(replies, state, self.weights)
        if state.moments:
            return stepped(state, average, with_momentum(self.server_momentum))
        return dataclasses.replace(state, model=average, round=state.round + 1)

    @property
    def reads_target(self) -> bool:
        return self.lambda_kd > 0

    @at_site
    def local_update(
        self,
        site: Site,
        model: Tensors,
        round: int,
        rounds: int,
        old: Sequence[int] = (),
        teacher: Tensors | None = None,
    ) -> dict[str, Any]:
        loss = losses.supervised(self.loss, site)
        if teacher:
            theta_old = site.network(teacher).eval().requires_grad_(False)
            loss = self.L(theta_old, old, site)
        net = site.network(model)
        train(site, net, loss, self.local, round=round, rounds=rounds)
        return answer(site, net, per_class=False)

    def L(self, theta_old: nn.Module, old: Sequence[int], site: Site) -> Loss:
        """The local objective, Eq. (3), with its two terms. theta_old: the older model, in evaluation mode."""
        l_ce, space = losses.for_site(self.loss, site), site.labels.space

        def terms(net: nn.Module, batch: Batch) -> dict[str, Tensor]:
            with torch.inference_mode():  # before the net, whose activations then reuse this memory
                z_old = voxel_logits(theta_old(batch.image))
            outputs = net(batch.image)
            z = voxel_logits(outputs)
            return {
                "supervised": losses.on_batch(l_ce, outputs, batch, self.loss.findings),
                "distillation": self.lambda_kd * l_kd(z, z_old, batch.target, batch.known, old, space),
            }

        return terms

    def examine(self, net: nn.Module, sites: Sequence[str]) -> list[str]:
        """Notes what the older model costs, or that there is none."""
        if not getattr(net, "old", ()):
            return [
                "method mib: `init_from` gives no model that knows a class of this federation; nothing is distilled"
            ]
        return (
            ["method mib: the older model goes to the sites beside that of every round"]
            if self.lambda_kd
            else []
        )


def l_kd(
    z: Tensor, z_old: Tensor, target: Tensor, known: Tensor, old: Sequence[int], space: LabelSpace
) -> Tensor:
    """The distillation loss, Eq. (8), a scalar: the mean cross-entropy over voxels. It is 0, with a gradient of 0, where
    every old class is annotated.

    z, z_old: [B, C, *S] logits of the new and of the older model ([B, C] of whole images); target: [B, *S] class index if
    exclusive, else masks [B, C, *S]; known: [B, C]; old: the classes that the older model knows."""
    z, z_old = full_precision(z), full_precision(z_old).detach()
    is_old = torch.zeros(len(space), dtype=torch.bool, device=z.device)
    is_old[list(old)] = True
    taught = is_old & ~known  # [B, C] by the older model
    among = taught.reshape(*taught.shape, *[1] * (z.dim() - 2))
    if not space.exclusive:
        each = binary_cross_entropy_with_logits(z, z_old.sigmoid(), reduction="none")
        return _mean(each, among.expand_as(each))
    is_old[0] = True
    q_old = z_old.masked_fill(~is_old.reshape(1, -1, *[1] * (z.dim() - 2)), -math.inf).softmax(1)
    log_q = z.log_softmax(1)
    # what is not taught is one class, "background": of the new model with the new classes, Eq. (9)
    log_b = log_q.masked_fill(among, -math.inf).logsumexp(1)
    q_b = q_old.masked_fill(among, 0).sum(1)
    each = -(q_old * log_q).masked_fill(~among, 0).sum(1) - q_b * log_b
    some = taught.any(1).reshape(-1, *[1] * (z.dim() - 2))
    return _mean(each, some & ~labelled(target, known))


def _mean(each: Tensor, counted: Tensor) -> Tensor:
    return each.masked_fill(~counted, 0).sum() / counted.sum().clamp(min=1)
