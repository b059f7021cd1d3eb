"""FedAtlas: exclusion, momentum at the server, and, if asked for, teaching of what a site does not annotate.

This project's own method; docs/explanation/fedatlas.md derives it, docs/results.md shows what each part is worth.

    1  for each round t:
    2      for each site k, at the same time:
    3          for each batch:
    4              L = supervised loss with exclusion, which gives no class up
    5              in every n-th batch:  L += n * teach * L_taught(F, F_t; r)
    6              count how well F finds the classes that the site annotates: overlap_k^c, size_k^c
    7          send F, overlap_k, size_k
    8      d^c = 2 sum_k overlap_k^c / sum_k size_k^c            the Dice coefficient of class c in training
    9      r^c = clip((d^c - floor) / (full - floor), 0, 1)      how far class c is to be trusted
    10     Delta = mean_k F_k - F_t;  m = momentum m + Delta;  F_{t+1} = F_t + m

A site that annotates a few organs leaves all others free. Two things follow: a voxel that it labels is none of the
organs that it does not annotate, which the exclusion loss says (line 4); and what only one of K sites knows enters
their mean with 1/K of its strength, which the server's momentum makes good (line 10). A small class that is not found
early could be lost for good that way: where little of it is found, the Dice part of the loss goes on as a logarithm, and
nothing is clamped (line 4).

Where a site annotates nothing, the model that it received can teach (line 5; off by default): within the background and the classes that
a sample does not annotate, each such class against the rest of them. Only classes that are good teach, each by its
r^c; it starts at 0 for all, so that a model that knows nothing teaches nothing.

Of a class that is annotated at no site, or everywhere, nothing is taught. With `exclusion` false, `server_momentum`
0 and teach 0 this is FedAvg, bit for bit.

Shapes: K sites, B batch, C classes, *S spatial (none for labels of whole images).
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from fedatlas import losses
from fedatlas.core.contract import Clients, Site, State, at_site
from fedatlas.core.errors import FederationError
from fedatlas.core.labels import LabelSpace
from fedatlas.core.options import option, options
from fedatlas.core.outputs import voxel_logits
from fedatlas.core.tensors import Tensors, tensors_of
from fedatlas.learning.loop import Loop
from fedatlas.losses import LossChoice
from fedatlas.losses.heads import full_precision
from fedatlas.losses.marginal import labelled
from fedatlas.methods.shared.averaging import SENDS, Weighting, mean
from fedatlas.methods.shared.server_step import MeanWithMomentum, StepState, started, stepped, with_momentum

NO_CLASS_LOST = {
    "marginal": {"power": 2, "smooth_numerator": 1e-3, "smooth_denominator": 1e-3, "log_below": 0.2}
}
"""Options of marginal_dice_ce_exclusion with which a class of which nothing is found goes on learning."""

SENDS_COUNTS = SENDS | {"overlap": "per class", "size": "per class"}
"""What a site answers where a class teaches by how well it is known."""


@dataclass(frozen=True)
class AtlasState(StepState):
    """trust: [C] r^c, how far every class may teach in the next round; empty before the first."""

    trust: list[float] = field(default_factory=list)


@options
class FedAtlas(MeanWithMomentum):
    """FedAvg with exclusion and momentum at the server; what is known well can be taught where it is not annotated."""

    exclusion: bool = option(
        True,
        "Whether the loss auto is marginal_dice_ce_exclusion where classes exclude each other, without options of its own with those "
        "that give no class up (log_below 0.2, no clamp); false: as everywhere else.",
    )
    server_momentum: float = option(0.6, "Momentum of the server's step; 0: the mean itself.", ge=0, lt=1)
    teach: float = option(
        0.0, "Weight of what the received model teaches of classes that a site lacks; 0: nothing.", ge=0
    )
    every: int = option(
        2, "n: teaching takes every n-th step, with n times its weight, to save the teacher's time.", gt=0
    )
    gate: bool = option(
        True,
        "Whether a class teaches by how well it is known, for which every site sends two counts per class; false: all "
        "classes teach from the second round on, and secure aggregation is possible.",
    )
    floor: float = option(0.2, "d^c in training up to which a class teaches nothing.", ge=0, lt=1)
    full: float = option(
        0.7, "d^c in training from which on a class teaches with its full weight.", gt=0, le=1
    )
    weights: Weighting = option("equal", "All sites count equally, or by their training cases.")

    @property
    def state(self) -> type[State]:
        return AtlasState

    @property
    def counts(self) -> bool:
        """Whether the sites say how well each class is known."""
        return self.gate and self.teach > 0

    @property
    def sends(self) -> dict[str, str]:
        return SENDS_COUNTS if self.counts else SENDS

    def check(self, space: LabelSpace) -> None:
        """Raises FederationError where the options do not fit the label space or each other."""
        if self.floor >= self.full:
            raise FederationError(
                f"method fedatlas: floor is {self.floor} and full is {self.full}; a class that is known better teaches "
                "more, so floor is to be below full"
            )
        super().check(space)

    def start(self, net: nn.Module, clients: Clients) -> AtlasState:
        first = started(net, initial=(0.0,), per_class=False)
        return AtlasState(first.model, moments=first.moments)

    def round(self, state: AtlasState, clients: Clients) -> AtlasState:
        replies = clients.call(
            self.local_update, model=state.model, trust=state.trust, round=state.round, rounds=state.rounds
        )
        trust = state.trust
        if self.counts:
            trust = self.trust(replies.plain("overlap"), replies.plain("size"), state.trust)  # lines 8, 9
        average = mean(replies, state, self.weights)
        moved = stepped(state, average, with_momentum(self.server_momentum))  # line 10
        return dataclasses.replace(moved, trust=trust)

    def trust(
        self, overlap: Sequence[Sequence[float]], size: Sequence[Sequence[float]], old: Sequence[float]
    ) -> list[float]:
        """[C] r^c, how far every class is to be trusted; the old one where no site that answered annotates the class.

        overlap, size: [K, C] as `counted` gives them.
        """
        r = []
        for c, (both, either) in enumerate(
            zip(zip(*overlap, strict=True), zip(*size, strict=True), strict=True)
        ):
            if sum(either) > 0:
                d = 2 * sum(both) / sum(either)
                r.append(min(max((d - self.floor) / (self.full - self.floor), 0.0), 1.0))
            else:
                r.append(old[c] if old else 0.0)
        return r

    def supervised(self, space: LabelSpace) -> LossChoice:
        """The supervised loss, with exclusion where it is left open."""
        if self.exclusion and self.loss.name == "auto" and space.exclusive:
            own = self.loss.options or NO_CLASS_LOST
            return dataclasses.replace(self.loss, name="marginal_dice_ce_exclusion", options=own)
        return self.loss

    @at_site
    def local_update(
        self, site: Site, model: Tensors, trust: list[float], round: int, rounds: int
    ) -> dict[str, Any]:
        space = site.labels.space
        self.check(space)
        choice = self.supervised(space)
        L_sup = losses.for_site(choice, site)
        r = self.teaching(trust, round, space)
        F = site.network(model)
        F_t = site.network(model).eval().requires_grad_(False) if r.any() else None
        found = torch.zeros(2, len(space), dtype=torch.float64)

        loop = Loop(site, F, self.local, round=round, rounds=rounds)
        for number, batch in enumerate(loop, start=1):  # line 3
            now = number % self.every == 0
            with loop.autocast():
                z_t = None
                if now and F_t is not None and bool((~batch.known & r.gt(0).to(batch.known.device)).any()):
                    with torch.inference_mode():  # before F, whose activations then reuse this memory
                        z_t = voxel_logits(F_t(batch.image))
                outputs = F(batch.image)
                z = voxel_logits(outputs)
                L = {"supervised": losses.on_batch(L_sup, outputs, batch, choice.findings)}  # line 4
                if z_t is not None:
                    taught = L_taught(z, z_t, batch.target, batch.known, r, space)
                    L["taught"] = self.every * self.teach * taught  # line 5
            loop.step(L)
            if self.counts and now:
                found += counted(z.detach(), batch.target, batch.known, space)  # line 6

        counts = {"overlap": found[0].tolist(), "size": found[1].tolist()} if self.counts else {}
        return {"model": tensors_of(F), "n": site.n_train} | counts  # line 7

    def teaching(self, trust: Sequence[float], round: int, space: LabelSpace) -> Tensor:
        """[C] how far every class is taught in a round, counted from 0. The background never is, nor anything in the
        first round, when the model knows nothing."""
        r = torch.zeros(len(space))
        if self.teach > 0 and round > 0:
            foreground = list(space.foreground)
            r[foreground] = torch.tensor(trust)[foreground] if self.gate else 1.0
        return r


def L_taught(z: Tensor, z_t: Tensor, target: Tensor, known: Tensor, r: Tensor, space: LabelSpace) -> Tensor:
    """What the received model teaches, a scalar: the mean of r^c (cross-entropy + Dice) over the classes that any
    sample lacks, each class pooled over the samples that lack it.

    For such a class c and sample, p and q are the probabilities of c against the rest, of the model in training and
    of the teacher. Where classes exclude each other the rest are the background and the other classes that the sample
    lacks, and voxels labelled as an annotated class are left out; where they overlap, the rest is "not c".

        cross-entropy  the mean of -(q log p + (1 - q) log(1 - p))
        Dice           1 - (2 sum p q + 1) / (sum p^2 + sum q^2 + 1); labels of whole images have none

    z, z_t: [B, C, *S] logits of the model in training and of the teacher; target: [B, *S] class index if exclusive, else
    [B, C, *S]; known: [B, C]; r: [C]. Returns 0, with a gradient of 0, where nothing is taught.
    """
    z, z_t, r = full_precision(z), full_precision(z_t), r.to(z.device)
    lacking = ~known
    if space.exclusive:
        lacking[:, 0] = False
    taught = lacking & (r > 0)
    shape = (*known.shape, *[1] * (z.dim() - 2))
    where = taught.reshape(shape)
    if space.exclusive:
        where = where & ~labelled(target, known).unsqueeze(1)
    log_p, log_rest = against_rest(z, known, space)
    q = against_rest(z_t, known, space)[0].exp()
    over = (0, *range(2, z.dim()))
    number = where.expand(z.shape).sum(over).clamp(min=1)
    terms = -torch.where(where, q * log_p + (1 - q) * log_rest, 0).sum(over) / number
    if z.dim() > 2:
        p, q = torch.where(where, log_p.exp(), 0), torch.where(where, q, 0)
        terms = terms + 1 - (2 * (p * q).sum(over) + 1) / ((p * p).sum(over) + (q * q).sum(over) + 1)
    each = torch.where(taught.any(0), r * terms, 0)
    return each.sum() / lacking.any(0).sum().clamp(min=1)


def against_rest(z: Tensor, known: Tensor, space: LabelSpace) -> tuple[Tensor, Tensor]:
    """[B, C, *S] log p and log(1 - p) of every class that a sample lacks; of the others any finite values.

    Exclusive classes: p is the softmax over the background and the classes that the sample lacks, which is the
    probability of the class given that the voxel is none of those that are annotated. Else the sigmoid.
    z: [B, C, *S]; known: [B, C].
    """
    if not space.exclusive:
        return logsigmoid(z), logsigmoid(-z)
    annotated = known.clone()
    annotated[:, 0] = False
    log_p = z.masked_fill(annotated.reshape(*known.shape, *[1] * (z.dim() - 2)), -1e4).log_softmax(1)
    return log_p, (-log_p.clamp(max=-1e-6).expm1()).log()


def counted(z: Tensor, target: Tensor, known: Tensor, space: LabelSpace) -> Tensor:
    """[2, C] float64 for every class, over the samples that annotate it: the voxels, or images, that both the model and
    the labels give to it, and those of the model plus those of the labels. 0 for the background.

    z: [B, C, *S] logits; target: [B, *S] class index if exclusive, else [B, C, *S]; known: [B, C].
    """
    found = torch.zeros(2, len(space), dtype=torch.float64)
    hard = z.argmax(1) if space.exclusive else z > 0
    for c in space.foreground:
        rows = known[:, c]
        if bool(rows.any()):
            p = hard[rows] == c if space.exclusive else hard[rows, c]
            y = target[rows] == c if space.exclusive else target[rows, c] > 0.5
            found[0, c], found[1, c] = int((p & y).sum()), int(p.sum()) + int(y.sum())
    return found
