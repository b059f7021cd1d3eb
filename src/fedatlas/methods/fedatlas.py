"""FedAtlas: exclusion, momentum at the server, and teaching of what a site does not annotate.

This project's own method; docs/explanation/fedatlas.md derives it, docs/results.md shows what each part is worth.

    1  for each round t:
    2      for each site k, at the same time:
    3          for each batch:
    4              L = supervised loss with exclusion, in which small classes go on learning
    5              in every n-th batch, from the second round on:  L += n * teach * L_taught(F, F_t)
    6          send F
    7      Delta = mean_k F_k - F_t;  m = momentum m + Delta;  F_{t+1} = F_t + m

A site that annotates a few organs leaves all others free. Three things follow. A voxel that it labels is none of the
organs that it does not annotate, which the exclusion loss says (line 4). What only one of K sites knows enters
their mean with 1/K of its strength, to which the server's momentum adds what came in earlier rounds (line 7). And where a site labels
nothing, its loss does not say how the free classes share a voxel; the model that it received does (line 5): F_t gives the expected
labels, F is trained on them, and where both agree nothing is taught.

A small class that is not found early could be lost for good: where little of it is found, the Dice part of the loss goes on
as a logarithm (line 4).

Where a site annotates all classes, it is taught nothing. With `exclusion` false, `server_momentum` 0 and teach 0 this is FedAvg
with equal weights, bit for bit.

Shapes: K sites, B batch, C classes, *S spatial (none for labels of whole images).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from fedatlas import losses
from fedatlas.core.contract import Site, at_site
from fedatlas.core.errors import FederationError
from fedatlas.core.labels import LabelSpace
from fedatlas.core.options import option, options
from fedatlas.core.outputs import voxel_logits
from fedatlas.core.tensors import Tensors, tensors_of
from fedatlas.learning.loop import Loop
from fedatlas.losses import LossChoice
from fedatlas.losses.heads import full_precision
from fedatlas.losses.marginal import labelled
from fedatlas.methods.shared.averaging import Weighting
from fedatlas.methods.shared.server_step import MeanWithMomentum
from fedatlas.methods.shared.swa import WithSWA

NO_CLASS_LOST = {
    "marginal": {"power": 2, "smooth_numerator": 1e-3, "smooth_denominator": 1e-3, "log_below": 0.2}
}
"""Options of marginal_dice_ce_exclusion with which a class of which little is found goes on learning. What they leave out is as that loss has
it, so that its cross-entropy has no gradient below 1e-4."""

RETIRED = ("gate", "floor", "full")
"""Options of an earlier teaching, class by class and with a Dice part, which files of earlier versions hold."""


@options
class FedAtlas(WithSWA, MeanWithMomentum):
    """FedAvg with exclusion and momentum at the server, in which the received model teaches what a site does not annotate."""

    exclusion: bool = option(
        True,
        "Whether the loss auto is marginal_dice_ce_exclusion where classes exclude each other, without options of its own with those "
        "that keep small classes learning (log_below 0.2, smoothing 0.001); false: as everywhere else.",
    )
    server_momentum: float = option(0.6, "Momentum of the server's step; 0: the mean itself.", ge=0, lt=1)
    teach: float = option(
        1.0,
        "Weight of what the received model teaches of classes that a site lacks; 0: nothing. With 1, and the marginal cross-entropy of "
        "exclusive classes, the two are the cross-entropy with expected labels.",
        ge=0,
    )
    every: int = option(
        2,
        "n: teaching takes every n-th step, counted over all rounds, with n times its weight, to save the teacher's time.",
        gt=0,
    )
    weights: Weighting = option("equal", "All sites count equally, or by their training cases.")

    @classmethod
    def upgraded(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        gone = [name for name in RETIRED if name in given]
        if gone and given.get("teach", cls.teach):
            raise FederationError(
                f"method fedatlas: got {', '.join(gone)}, options of a teaching that this version does not have; leave them out to train "
                "with that of this version, or set teach to 0 to train without"
            )
        return {name: value for name, value in given.items() if name not in gone}

    def supervised(self, space: LabelSpace) -> LossChoice:
        """The supervised loss, with exclusion where it is left open."""
        if self.exclusion and self.loss.name == "auto" and space.exclusive:
            own = self.loss.options or NO_CLASS_LOST
            return dataclasses.replace(self.loss, name="marginal_dice_ce_exclusion", options=own)
        return self.loss

    @property
    def reads_target(self) -> bool:
        return self.teach > 0

    @at_site
    def local_update(self, site: Site, model: Tensors, round: int, rounds: int) -> dict[str, Any]:
        space = site.labels.space
        self.check(space)
        choice = self.supervised(space)
        L_sup = losses.for_site(choice, site)
        F = site.network(model)
        F_t = site.network(model).eval().requires_grad_(False) if self.teach > 0 and round > 0 else None

        loop = Loop(site, F, self.local, round=round, rounds=rounds)
        for number, batch in enumerate(loop, start=loop.first_step + 1):  # line 3, counted over all rounds
            with loop.autocast():
                z_t = None
                if F_t is not None and number % self.every == 0 and bool(lacking(batch.known, space).any()):
                    with torch.inference_mode():  # before F, whose activations then reuse this memory
                        z_t = voxel_logits(F_t(batch.image))
                outputs = F(batch.image)
                L = {"supervised": losses.on_batch(L_sup, outputs, batch, choice.findings)}  # line 4
                if z_t is not None:
                    taught = L_taught(voxel_logits(outputs), z_t, batch.target, batch.known, space)
                    L["taught"] = self.every * self.teach * taught  # line 5
            loop.step(L)
        return {"model": tensors_of(F), "n": site.n_train}  # line 6


def L_taught(z: Tensor, z_t: Tensor, target: Tensor, known: Tensor, space: LabelSpace) -> Tensor:
    """What the received model teaches, a scalar: a cross-entropy with the labels that it expects of the classes that a sample lacks.

    Exclusive classes: let p and q be the probabilities of the model in training and of the teacher over the background and the classes that
    the sample lacks, given that the voxel is one of them. The mean over all voxels of -sum_c q_c log p_c, which is 0 at voxels that carry a
    label. Together with the marginal cross-entropy -log P(the voxel is one of them), unclamped, this is the cross-entropy with expected
    labels of expectation maximisation (Dempster, Laird & Rubin 1977).

    Overlapping classes: the mean of -(q log p + (1 - q) log(1 - p)) over the voxels, or images, and the classes that their samples lack.

    z, z_t: [B, C, *S] logits of the model in training and of the teacher; target: [B, *S] class index if exclusive, else
    [B, C, *S]; known: [B, C]. Its gradient is 0 where z = z_t, and where nothing is lacked.
    """
    z, z_t = full_precision(z), full_precision(z_t)
    lacked = lacking(known, space)
    shape = (*known.shape, *[1] * (z.dim() - 2))
    if space.exclusive:
        free = lacked.clone()
        free[:, 0] = True
        log_p, log_q = (one.masked_fill(~free.reshape(shape), -1e4).log_softmax(1) for one in (z, z_t))
        terms = -(log_q.exp() * log_p).sum(1)
        return torch.where(labelled(target, known), 0, terms).mean()
    q = z_t.sigmoid()
    terms = -(q * logsigmoid(z) + (1 - q) * logsigmoid(-z))
    where = lacked.reshape(shape).expand(z.shape)
    return torch.where(where, terms, 0).sum() / where.sum().clamp(min=1)


def lacking(known: Tensor, space: LabelSpace) -> Tensor:
    """[B, C] bool: the classes that a sample does not annotate, the background of exclusive classes not among them. known: [B, C]."""
    lacked = ~known
    if space.exclusive:
        lacked[:, 0] = False
    return lacked
