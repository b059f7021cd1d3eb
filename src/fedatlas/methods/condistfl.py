"""Federated learning with partially labeled data: a conditional distillation approach (ConDistFL).

Wang, Shen, Oda, Fuh, Mori, Wang, Roth. Extends: ConDistFL: conditional distillation for federated learning
from partially annotated data, MICCAI workshop DeCaF 2023.

A site learns its own classes F_k with the marginal loss. For all other classes B_k it learns from the global
model that it received this round: both models' probabilities are conditioned on the voxel being in B_k, the
organs of B_k are taken together with their lesions, voxels that either the label or the global model gives to
F_k are left out, and a soft Dice loss compares what remains. So no class is forgotten between two exchanges.

Differences from the paper
    Classes may overlap, one sigmoid each: Eq. (2) to (5) under independent Bernoulli variables, derived in
    docs/explanation/condistfl.md. The label set is that of a sample, not of a site; in a mixed batch an organ is
    pooled over the samples in which it is not annotated, and a sample with every class annotated takes no part. An
    organ of which only a part is annotated is represented by the rest. The paper is silent about groups that are
    empty (every voxel left out, or no mass): they are skipped, switch `empty_group`. The teacher may be asked once
    per case and round instead of once per augmented patch, switch `teacher`.

Differences from the official code (NVFlare, research/condist-fl, which is that of the workshop paper)
    tau is 0.5 as printed; the code smooths with 2.0. The conditional probability is exact, its code adds 1e-5
    to the denominator (`cond`), which leaks a gradient into F_k. The cross-entropy is that of the merged
    probabilities, its code applies a second softmax (`loss.options.ce_on_probs`). The server takes the mean
    with equal weights, its configuration steps with momentum (`server_momentum`).

Shapes: B batch, C classes, G groups, *S spatial.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from fedatlas import losses
from fedatlas.core.batch import Batch
from fedatlas.core.contract import Site, at_site
from fedatlas.core.errors import FederationError
from fedatlas.core.labels import LabelSpace
from fedatlas.core.options import option, options
from fedatlas.core.outputs import voxel_logits
from fedatlas.core.tensors import Tensors, tensors_of
from fedatlas.learning.loop import Loss, autocast, train
from fedatlas.losses import LossChoice
from fedatlas.losses.heads import full_precision
from fedatlas.losses.marginal import channels, labelled
from fedatlas.methods.shared.averaging import Weighting
from fedatlas.methods.shared.server_step import MeanWithMomentum
from fedatlas.methods.shared.swa import WithSWA

SMOOTH = 1e-5
"""Added to the denominator of the Dice loss of Eq. (7)."""


@options
class Cached:
    """How `teacher: cached` predicts the training cases, and what it keeps of it until the round ends."""

    overlap: float = option(0.25, "Share of a window that the next one covers again.", ge=0, lt=1)
    windows: int = option(4, "Windows, or slices, at a time.", gt=0)
    classes: int | None = option(
        None,
        "Probabilities kept per voxel, the largest ones, 3 bytes each; null: of all classes, 2 bytes each.",
        gt=0,
    )
    gigabytes: float = option(20.0, "The most that a site may keep on disk.", gt=0)


@options
class ConDistFL(WithSWA, MeanWithMomentum):
    """FedAvg plus conditional distillation of every class that a site does not annotate (Wang 2025)."""

    tasks: ClassVar[tuple[str, ...]] = ("segmentation",)

    tau: float = option(0.5, "tau: temperature of both models' softmax; the official code has 2.0.", gt=0)
    lambda_start: float = option(0.01, "lambda: weight of the distillation in the first round.", ge=0)
    lambda_end: float = option(1.0, "lambda in the last round; it changes linearly.", ge=0)
    group: bool = option(True, "Whether an organ and its lesions are distilled as one (Section 3.4.2).")
    filter: bool | None = option(
        None,
        "M: whether voxels of annotated classes are left out (Eq. 6); null: true for exclusive classes, false where "
        "classes overlap.",
    )
    cond: Literal["exact", "eps"] = option(
        "exact",
        "The conditional probability as printed, or with cond_eps in the denominator (official code).",
    )
    cond_eps: float = option(1e-5, "The constant of cond: eps.", gt=0)
    empty_group: Literal["skip", "one"] = option(
        "skip", "A group without mass is left out of the mean, or has the loss 1 (official code)."
    )
    teacher: Literal["online", "cached"] = option(
        "online",
        "The global model is shown every augmented patch, or every case once per round, whose probabilities are then "
        "cropped and moved with the labels.",
    )
    cached: Cached = option(Cached(), "For teacher: cached.")
    weights: Weighting = option("equal", "All sites count equally, or by their training cases.")
    loss: LossChoice = option(LossChoice(), "L_sup, the supervised loss.")

    @property
    def reads_target(self) -> bool:
        return self.filter is not False

    @at_site
    def local_update(self, site: Site, model: Tensors, round: int, rounds: int) -> dict[str, Any]:
        space = site.labels.space
        self.check(space)
        F_g = site.network(model).eval().requires_grad_(False)
        lambda_ = self.lambda_at(round, rounds)
        if self.teacher == "online":
            F_k = site.network(model)
            train(site, F_k, self.L_total(F_g, lambda_, space), self.local, round=round, rounds=rounds)
        else:
            with self.predictions(site, F_g) as told:
                del F_g
                F_k = site.network(model)
                train(told, F_k, self.L_total(None, lambda_, space), self.local, round=round, rounds=rounds)
        return {"model": tensors_of(F_k), "n": site.n_train}

    def predictions(self, site: Site, F_g: nn.Module) -> AbstractContextManager[Site]:
        """The site with what the global model says of its training cases, for the length of the context."""
        return site.with_predictions(
            F_g,
            overlap=self.cached.overlap,
            windows=self.cached.windows,
            keep=self.cached.classes,
            partly=self.cond == "exact",
            gigabytes=self.cached.gigabytes,
            within=autocast(self.local, site.device),
        )

    def L_total(self, F_g: nn.Module | None, lambda_: float, space: LabelSpace) -> Loss:
        """The local objective, Eq. (8), with its two terms. F_g: the global model, in evaluation mode; None where the
        batches say what it predicts."""
        L_sup = losses.make(self.loss, space)

        def L(F_k: nn.Module, batch: Batch) -> dict[str, Tensor]:
            if F_g is None:
                assert batch.along is not None
                z_g = logits_of(batch.along, space.exclusive)
            else:
                # before F_k, whose activations then reuse this memory
                with torch.inference_mode():
                    z_g = voxel_logits(F_g(batch.image))
            outputs = F_k(batch.image)
            z_k = voxel_logits(outputs)
            return {
                "supervised": losses.on_batch(L_sup, outputs, batch, self.loss.findings),
                "condist": lambda_ * self.L_ConDist(z_k, z_g, batch.target, batch.known, space),
            }

        return L

    def lambda_at(self, round: int, rounds: int) -> float:
        """The weight of the distillation in a round, counted from 0."""
        return self.lambda_start + (self.lambda_end - self.lambda_start) * round / max(rounds - 1, 1)

    def L_ConDist(self, z_k: Tensor, z_g: Tensor, target: Tensor, known: Tensor, space: LabelSpace) -> Tensor:
        """The conditional distillation loss, a scalar.

        z_k, z_g: [B, C, *S] logits of the local and the global model; target: [B, *S] class index if exclusive,
        else masks [B, C, *S]; known: [B, C].
        Each organ's Dice is pooled over the samples in which it, or a part of it, is not annotated; G_0 over
        all samples that lack any class. Returns 0, with a gradient of 0, if there are none.
        """
        z_k, z_g = full_precision(z_k), full_precision(z_g).detach()
        organs = space.organs if self.group else tuple((c,) for c in space.foreground)
        # place 0 is that of G_0
        overlap, mass = z_k.new_zeros(1 + len(organs)), z_k.new_zeros(1 + len(organs))
        distilled = [False] * (1 + len(organs))
        for row, samples in _by_label_set(known):
            U = [c for c in space.foreground if not row[c]]
            if not U and self.cond == "exact":
                continue
            groups = [(i, tuple(c for c in organ if c in U)) for i, organ in enumerate(organs, start=1)]
            index, O_k = [0, *(i for i, G in groups if G)], [G for _, G in groups if G]
            chosen = slice(None) if samples is None else samples
            local, teacher, y = z_k[chosen], z_g[chosen], target[chosen]
            if space.exclusive:
                y_k = self.conditional(local, [0, *U], [(0,), *O_k])
                y_g = self.conditional(teacher, [0, *U], [(0,), *O_k])
            else:
                y_k, y_g = self.overlapping(local, O_k), self.overlapping(teacher, O_k)
            M = self.M(teacher, y, row, space).to(z_k.dtype)
            y_g = M * y_g
            axes = (0, *range(2, y_k.dim()))
            at = torch.tensor(index, device=z_k.device)
            overlap = overlap.index_add(0, at, (y_k * y_g).sum(axes))
            mass = mass.index_add(0, at, (y_k * M).sum(axes) + y_g.sum(axes))
            for i in index:
                distilled[i] = True
        counts = torch.tensor(distilled, device=z_k.device)
        if self.empty_group == "skip":
            counts = counts & (mass.detach() >= SMOOTH)
        terms = torch.where(counts, 1 - 2 * overlap / (mass + SMOOTH), 0)
        return terms.sum() / counts.sum().clamp(min=1)  # Eq. (7)

    def conditional(self, z: Tensor, B_k: Sequence[int], O_k: Sequence[Sequence[int]]) -> Tensor:
        """[B, G, *S] the probability of every group, given that the voxel is in B_k (exclusive classes)."""
        if self.cond == "exact":
            # the softmax of the logits of B_k alone is y_i / (1 - y_F), without a division
            y = (channels(z, B_k) / self.tau).softmax(1)
            position = {c: i for i, c in enumerate(B_k)}
            return _grouped(y, [[position[c] for c in G] for G in O_k])  # Eq. (4), (5)
        y = (z / self.tau).softmax(1)
        F_k = [c for c in range(z.shape[1]) if c not in B_k]
        y_F = channels(y, F_k).sum(1, keepdim=True)  # Eq. (2)
        return _grouped(y, O_k) / (1 - y_F + self.cond_eps)  # Eq. (4), (5)

    def overlapping(self, z: Tensor, O_k: Sequence[Sequence[int]]) -> Tensor:
        """[B, 1 + G, *S] the probabilities of G_0, "no class of any group", and of every group, "any of its
        classes", given that the voxel is in no annotated class. Under independent Bernoulli variables the condition
        changes none of them."""
        log_none = [logsigmoid(-channels(z, G) / self.tau).sum(1, keepdim=True) for G in O_k]
        none = torch.cat(log_none, 1)
        return torch.cat([none.sum(1, keepdim=True).exp(), -none.expm1()], 1)

    def M(self, z_g: Tensor, target: Tensor, row: Sequence[bool], space: LabelSpace) -> Tensor:
        """[B, 1, *S] bool: neither the global model nor the label gives the voxel to an annotated class."""
        F_k = [c for c in space.foreground if row[c]]
        if not (space.exclusive if self.filter is None else self.filter) or not F_k:
            return torch.ones_like(z_g[:, :1], dtype=torch.bool)
        if not space.exclusive:
            given = (channels(z_g, F_k) > 0) | (channels(target, F_k) > 0)
            return ~given.any(1, keepdim=True)
        B_k = [c for c in range(z_g.shape[1]) if c not in F_k]
        by_teacher = channels(z_g, F_k).amax(1) > channels(z_g, B_k).amax(1)
        known = torch.tensor([list(row)], device=z_g.device).expand(len(z_g), -1)
        return ~(by_teacher | labelled(target, known)).unsqueeze(1)  # Eq. (6)

    def check(self, space: LabelSpace) -> None:
        """Raises FederationError where the hyper-parameters do not fit the label space."""
        if self.cond == "eps" and not space.exclusive:
            raise FederationError(
                "method condistfl: cond is eps, which is added to the sum of a softmax, but the label space is not "
                "exclusive; overlapping classes allow: exact"
            )
        super().check(space)


def logits_of(p: Tensor, exclusive: bool) -> Tensor:
    """Logits [B, C, *S] of probabilities: their logarithms, which are logits up to a constant per voxel, if exclusive,
    else their log-odds. A probability is taken as at least 1e-30, and where it has odds at most 1 - 2^-24."""
    if exclusive:
        return p.clamp(min=1e-30).log()
    p = p.clamp(1e-30, 1 - 2**-24)
    return p.log() - (-p).log1p()


def _grouped(y: Tensor, O_k: Sequence[Sequence[int]]) -> Tensor:
    """[B, G, *S] the sums over the classes of every group, given by their channels."""  # Eq. (3)
    if [tuple(G) for G in O_k] == [(i,) for i in range(y.shape[1])]:
        return y
    return torch.cat([channels(y, G).sum(1, keepdim=True) for G in O_k], 1)


def _by_label_set(known: Tensor) -> list[tuple[list[bool], list[int] | None]]:
    """The label sets of a batch, in the order of their first sample, with their samples (None: all)."""
    rows = known.tolist()
    samples: dict[tuple[bool, ...], list[int]] = {}
    for sample, row in enumerate(rows):
        samples.setdefault(tuple(row), []).append(sample)
    alone = len(samples) == 1
    return [(list(row), None if alone else chosen) for row, chosen in samples.items()]
