"""Federated MS-KD: a student of several teachers, each in the region that it knows.

Feng, Zhou, Zhang, Zhang, Wang. MS-KD: multi-organ segmentation with multiple binary-labeled datasets. arXiv:2108.02559,
2021. In a federation, on pseudo labels, as a baseline of UFPS (Note S6 of its supplement).

Before the first round every site trains a teacher on its own labels, and all teachers are handed to all sites, once
(`teachers`). After that every site trains the global model, the student s, on labels that the teachers complete, and every
teacher t, of the classes L_t, teaches it in its region R_t: the voxels that pseudo labels give to a class of L_t, or that
all teachers call background.

    L = L_seg + lambda_logits sum_t mean_{R_t} T^2 KL( p_t || p_s )
              + lambda_features sum_t mean_l mean_{R_t at l} mean_channels (F_s^l - F_t^l)^2

p are softmaxes, at temperature T, of the logits of the background and L_t alone; F^l are the maps at the resolution l. Both
weights 0 is FedAvg on pseudo labels, `pseudo_labels` on `fedavg`.

Reconstruction: UFPS names the terms and their regions; the weights, T and the direction of the divergence, here that of
distillation (the teacher is the target), are ours. Maps are those of the encoder, one of every resolution; a region is
thinned to their voxels. Labels that a site has take no part in the regions.

Differences from the paper: a teacher may know several classes, and all teachers have the form of the student.

Shapes: B batch, C classes with the background, d channels, *S spatial, *s of a level.
"""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax

from fedatlas import losses
from fedatlas.core.batch import Batch
from fedatlas.core.contract import Clients, Site, State, at_site
from fedatlas.core.labels import LabelSpace
from fedatlas.core.options import option, options
from fedatlas.core.outputs import voxel_logits
from fedatlas.core.tensors import Tensors, tensors_of
from fedatlas.learning.loop import Loop
from fedatlas.losses import LossChoice, LossFunction
from fedatlas.losses.heads import full_precision, thinned
from fedatlas.methods.shared import teachers as teaching
from fedatlas.methods.shared.averaging import SENDS, Weighted, answer, mean
from fedatlas.methods.shared.features import watched
from fedatlas.methods.shared.pseudo import Merge, none_of
from fedatlas.methods.shared.teachers import (
    Maker,
    TaughtState,
    Teaching,
    remember,
    require_exclusive,
    train_teacher,
    with_teachers,
)


@dataclasses.dataclass(frozen=True)
class Lesson:
    """What a teacher says of a batch. logits [B, C, *S], see `none_of`; levels: the maps [B, d, *s] of its encoder, the finest first;
    empty where features are not distilled; speaks [C] bool: the background and its classes."""

    logits: Tensor
    levels: list[Tensor]
    speaks: Tensor


@options
class MSKD(Weighted):
    """FedAvg on pseudo labels, plus distillation from every teacher in the region that it knows (Feng 2021)."""

    state: ClassVar[type[State]] = TaughtState
    tasks: ClassVar[tuple[str, ...]] = ("segmentation",)
    sends: ClassVar[dict[str, dict[str, str]]] = {"teacher_update": teaching.SENDS, "local_update": SENDS}

    lambda_logits: float = option(1.0, "Weight of the distillation of logits.", ge=0)
    lambda_features: float = option(1.0, "Weight of the distillation of the encoder's maps.", ge=0)
    T: float = option(1.0, "Temperature of teachers and student.", gt=0)
    teachers: Teaching = option(Teaching(), "How teachers are trained and asked.")
    loss: LossChoice = option(LossChoice(), "L_seg, the supervised loss.")

    def start(self, net: nn.Module, clients: Clients) -> TaughtState:
        return TaughtState(tensors_of(net))

    def round(self, state: TaughtState, clients: Clients) -> TaughtState:
        to = with_teachers(clients, state, self.teacher_update)
        replies = to.call(self.local_update, model=state.model, round=state.round, rounds=state.rounds)
        model = mean(replies, state, self.weights)
        return TaughtState(model, state.round + 1, state.rounds, **to.left())

    @at_site
    def teacher_update(self, site: Site, model: Tensors, rounds: int) -> dict[str, Any]:
        """A teacher of the site alone, from the common start."""
        return train_teacher(site, model, rounds, self.teachers, local=self.local, loss=self.loss)

    @at_site
    def local_update(
        self,
        site: Site,
        model: Tensors,
        round: int,
        rounds: int,
        teachers: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> dict[str, Any]:
        """teachers: the other sites', given once, then remembered."""
        remember(site, teachers)
        net, maker = site.network(model), Maker(site, self.teachers, self.local, self.loss)
        L_seg, L_plain = losses.make(self.loss, site.labels.space), losses.supervised(self.loss, site)
        distils = maker.models and (self.lambda_logits or self.lambda_features)
        loop = Loop(site, net, self.local, round=round, rounds=rounds)
        for batch in loop:
            if distils:
                lessons, masks = self.lessons(maker, batch.image)
                pairs = [(lesson, region(masks, lesson.speaks)) for lesson in lessons]
                with loop.autocast():
                    value = self.L(L_seg, net, maker.complete(batch, masks), pairs)
            else:
                batch = maker(batch)
                with loop.autocast():
                    value = L_plain(net, batch)
            loop.step(value)
        maker.log()
        return answer(site, net, per_class=False)

    def L(
        self, L_seg: LossFunction, net: nn.Module, batch: Batch, pairs: Sequence[tuple[Lesson, Tensor]]
    ) -> dict[str, Tensor]:
        """The local objective with its terms. batch: completed. pairs: every teacher's lesson with its region R_t."""
        with watched(net) as seen:
            outputs = net(batch.image)
        terms = {"supervised": losses.on_batch(L_seg, outputs, batch, self.loss.findings)}
        if self.lambda_logits:
            z = full_precision(voxel_logits(outputs))
            each = [L_logits(z, lesson.logits, lesson.speaks, R, self.T) for lesson, R in pairs]
            terms["logits"] = self.lambda_logits * torch.stack(each).sum()
        if self.lambda_features:
            each = [L_features(seen.levels, lesson.levels, R) for lesson, R in pairs]
            terms["features"] = self.lambda_features * torch.stack(each).sum()
        return terms

    @torch.no_grad()
    def lessons(self, maker: Maker, image: Tensor) -> tuple[list[Lesson], Tensor]:
        """What every teacher says of images [B, I, *S], and the pseudo labels of all, masks [B, C, *S] bool."""
        began, merge, lessons = time.perf_counter(), Merge(maker.others), []
        for name, speaks in maker.speaks.items():
            teacher = maker.net(name)
            with maker.within(), watched(teacher) as seen:
                logits = full_precision(voxel_logits(teacher(image)))
            merge.add(logits, speaks)
            logits = none_of(logits, speaks, maker.others)
            lessons.append(Lesson(logits, seen.levels if self.lambda_features else [], speaks))
        maker.seconds += time.perf_counter() - began
        return lessons, merge.result().masks

    def check(self, space: LabelSpace) -> None:
        """Raises FederationError where the hyper-parameters do not fit the label space."""
        require_exclusive("ms_kd", space)
        self.teachers.check(space, self.loss, self.local)

    def examine(self, net: nn.Module, sites: Sequence[str]) -> list[str]:
        """What `check` should tell. Raises FederationError for a net that names no encoder."""
        with watched(net):
            return self.teachers.notes(len(sites), net, self.local)

    def steps_before(self, rounds: int, sites: int, cases: int | None = None) -> int | None:
        return self.teachers.steps(self.local, rounds, sites, cases)


def region(masks: Tensor, speaks: Tensor) -> Tensor:
    """R_t [B, *S] bool: where the pseudo labels, masks [B, C, *S] bool, have a class that speaks [C], or the background of
    all teachers."""
    return masks[:, speaks].any(1)


def L_logits(z: Tensor, z_t: Tensor, speaks: Tensor, R: Tensor, T: float) -> Tensor:
    """T^2 KL( p_t || p_s ), the mean over the voxels of the region R [B, *S] bool; 0, with a gradient of 0, where it is
    empty. z, z_t: logits [B, C, *S] of student and teacher, of which those that speak [C] count."""
    log_p, log_t = (log_softmax(each[:, speaks] / T, 1) for each in (z, z_t))
    divergence = (log_t.exp() * (log_t - log_p)).sum(1)
    return T**2 * _mean_over(divergence, R)


def L_features(levels: Sequence[Tensor], levels_t: Sequence[Tensor], R: Tensor) -> Tensor:
    """The squared difference of the maps [B, d, *s] of student and teacher, the mean over channels and over the voxels of
    the region R [B, *S] bool, thinned to each level; the mean over the levels."""
    each = []
    for F_s, F_t in zip(levels, levels_t, strict=True):
        difference = (full_precision(F_s) - full_precision(F_t)).square().mean(1)
        each.append(_mean_over(difference, thinned(R, F_s.shape[2:])))
    return torch.stack(each).mean()


def _mean_over(values: Tensor, R: Tensor) -> Tensor:
    return torch.where(R, values, 0).sum() / R.sum().clamp(min=1)
