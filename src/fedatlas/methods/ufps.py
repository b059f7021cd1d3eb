"""UFPS.

Jiang, Ma, Zeng, Ying. UFPS: a unified framework for partially annotated federated segmentation in heterogeneous data
distribution. Patterns 2024, with its supplement; the algorithms are numbered as in the preprint.

Every site trains a teacher on its own labels, all teachers are handed to all sites once, and every batch is completed by
their pseudo labels (`teachers`). On top of that, each in rounds of its own (of 500, by default: WS 10 to 199, aRCE from 200,
GMT, UA and sUSAM from 300; `fedatlas check` says yours):

    unified label learning
        GMT    the global model of the round teaches, its boundaries refined by the teachers      gmt, Eq. (5)
        WS     a sample's loss is weighed by the uncertainty of its pseudo labels                 ws, Eq. (6), (8)
        aRCE   reverse cross-entropy, ever more of it                                             rce, Eq. (9)
        UA     the decoder is averaged by the sites' uncertainty                                  ua, Eq. (7)
    sparse unified sharpness-aware minimisation
        sUSAM  the ascent on a strong augmentation, masked                                        sam, Eq. (11) to (14)

A module that is null is off; with all of them off it is FedAvg on pseudo labels, `pseudo_labels` on `fedavg`. What a site
adds to FedAvg's message is two numbers and one bit for each parameter, and it gets one bit for each.

A round r is counted from 1. Where an option asks for one, a number below 1 is that share of all rounds: 0.6 is the 300th
of 500, as published (`phases`). The options of the modules are in `ufps_options`; Algorithms 1 to 4 follow one another in the
class below, and their equations come after it. Teachers and their pseudo labels are `shared.teachers`, which other methods
have, too; what is masked and perturbed, Eq. (11) to (14), is `shared.sharpness`.

Differences from the paper and from the official code, whose own choices are switches:
    The uncertainty's entropy is over classes (code: over the depth of the volume): `uncertainty.softmax`; its mean over
    all classes (code: those present): `uncertainty.average`; from the teachers throughout (code: from the global model
    once that teaches): `uncertainty.source`. High variance lowers a site's weight (code: raises it) and is that of the
    population (code: of a sample): `ua.variance_sign`, `ua.ddof`. Tail shift and base decrement run over the rounds up to
    the end of WS, as in the code (paper: over all rounds): `ws.period`; round trip is centred on the lowest uncertainty,
    as in the code (paper: on the mean, which is 0 after normalisation): `ws.centre`. aRCE as printed, with the sign that
    makes it a loss (code: linear in the logits): `rce.form`. Pseudo labels exclude each other: `teachers.exclusive`. The
    masks' own switches are in `sharpness.Sparsity`. While samples are weighed the Dice is that of each sample, as in the
    code, and not pooled over the batch; the code has a softmax there: `ws.activation`. An uncertainty beyond all before it
    counts as the largest of them, so that no weight of TS or BD is below 2 - e (code: goes on): `ws.beyond`. GMT's share v is of voxels, not of their
    integer part. The gradient is clipped by `local.clip` (12 in the code), before the ascent too. Uncertainty is gathered
    from round 1 on; samples are weighed by that of all rounds before, and sites by that of all rounds.

Shapes: B batch, C classes with the background, N sites, *S spatial.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from fedatlas import losses
from fedatlas.core.batch import Batch
from fedatlas.core.contract import Clients, Replies, Site, State, at_site
from fedatlas.core.errors import FederationError
from fedatlas.core.labels import LabelSpace
from fedatlas.core.options import not_known, option, options
from fedatlas.core.outputs import heads, voxel_logits
from fedatlas.core.tensors import Tensors, Tree, average, parts, tensors_of
from fedatlas.learning.loop import Loop
from fedatlas.losses import LossChoice, LossFunction
from fedatlas.losses.onehot import DiceBCE, arce_coefficient, rce
from fedatlas.methods.shared.averaging import Weighted, Weighting, site_weights
from fedatlas.methods.shared.cmidg import cmidg
from fedatlas.methods.shared.phases import begins, check_begins, runs
from fedatlas.methods.shared.pseudo import Merged
from fedatlas.methods.shared.sharpness import Sharp, SparseMask, disagreement, pack_bits, top, unpack_bits
from fedatlas.methods.shared.teachers import (
    SENDS,
    Maker,
    TaughtState,
    Teaching,
    remember,
    require_exclusive,
    train_teacher,
    with_teachers,
)
from fedatlas.methods.ufps_options import (
    AdaptiveRCE,
    GlobalMainTeacher,
    Uncertainty,
    UncertaintyAggregation,
    UnifiedSharpness,
    WeightScheduler,
)

BANK = "ufps.uncertainty"
"""The key in a site's memory of the uncertainties of all samples so far, in the order in which they were seen."""
PARTS = ("encoder", "decoder", "head", "deep_supervision")
"""Parts that nets commonly have."""
MASKS = "ufps.masks"
"""The key in a site's memory of the gradient's momentum and the last mask."""


@dataclass(frozen=True)
class UFPSState(TaughtState):
    """disagree: M_G, packed, in which the sites' last masks differ; empty before any were sent."""

    disagree: dict[str, Tensor] = field(default_factory=dict)


@options
class UFPS(Weighted):
    """Unified label learning and sparse unified sharpness-aware minimisation (Jiang 2024)."""

    tasks: ClassVar[tuple[str, ...]] = ("segmentation",)
    state: ClassVar[type[State]] = UFPSState

    teachers: Teaching = option(Teaching(), "How teachers are trained and asked.")
    uncertainty: Uncertainty = option(Uncertainty(), "How sure teachers are of a sample.")
    ws: WeightScheduler | None = option(
        WeightScheduler(), "Weights of samples by their uncertainty; null: none."
    )
    rce: AdaptiveRCE | None = option(AdaptiveRCE(), "Reverse cross-entropy; null: none.")
    gmt: GlobalMainTeacher | None = option(
        GlobalMainTeacher(), "The global model as teacher; null: the teachers alone."
    )
    ua: UncertaintyAggregation | None = option(
        UncertaintyAggregation(), "Weights of sites by uncertainty; null: by `weights` alone."
    )
    sam: UnifiedSharpness | None = option(UnifiedSharpness(), "Sharpness-aware minimisation; null: none.")
    participation: int | None = option(
        None, "So many sites, drawn anew for every round, take part in it; null: all.", ge=1
    )
    weights: Weighting = option("cases", "A_i: a site counts by its training cases, or all count equally.")
    loss: LossChoice = option(LossChoice(name="dice_bce"), "The supervised loss; dice_bce with options.")

    # ---------------------------------------------------------------------------------- Algorithm 1: pretraining

    @at_site
    def teacher_update(self, site: Site, model: Tensors, rounds: int) -> dict[str, Any]:
        """Alg. 1, lines 2 to 4: a teacher of the site alone, from the common start."""
        return train_teacher(site, model, rounds, self.teachers, local=self.local, loss=self.loss)

    # ---------------------------------------------------------------------------- Algorithm 2: federated training

    def start(self, net: nn.Module, clients: Clients) -> UFPSState:
        return UFPSState(tensors_of(net))

    def round(self, state: UFPSState, clients: Clients) -> UFPSState:
        """Alg. 2, lines 3 to 28, with Alg. 1 before the first round."""
        r, w_0, M_G = state.round + 1, state.model, state.disagree
        taught = with_teachers(clients, state, self.teacher_update)  # line 1
        # what is sent, w_0 and M_G, is lines 24 and 27 of the round before
        replies = taught.call(  # lines 3 to 17
            self.local_update,
            each=self.drawn(clients),
            model=w_0,
            disagree=M_G,
            round=state.round,
            rounds=state.rounds,
        )
        A, own_weights = site_weights(replies, self.weights), {}
        if self.ua is not None and runs(self.ua, r, state.rounds):  # line 18
            mu, sigma = replies.plain("mean"), replies.plain("variance")
            A_w = A_hat(mu, sigma, A, self.ua)  # line 21, Eq. (7)
            own_weights = dict.fromkeys(part_names(clients.network(w_0), self.ua.parts), A_w)
        w_0 = average(replies.each("model"), A, each=own_weights)  # lines 19, 22
        if self.exchanged and runs(self.sam, r, state.rounds):  # line 25
            M_G = global_mask(replies, clients.network(w_0)) or M_G  # line 26, Eq. (12)
        return UFPSState(w_0, r, state.rounds, disagree=M_G, **taught.left())

    def drawn(self, clients: Clients) -> dict[str, dict[str, Any]] | None:
        """The sites that take part in a round; None: all."""
        if self.participation is None or self.participation >= len(clients.sites):
            return None
        order = torch.randperm(len(clients.sites), generator=clients.rng)[: self.participation]
        return {clients.sites[i]: {} for i in sorted(order.tolist())}

    # ------------------------------------------------------------------------------- Algorithm 3: local training

    @at_site
    def local_update(
        self,
        site: Site,
        model: Tensors,
        disagree: dict[str, Tree],
        round: int,
        rounds: int,
        teachers: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> dict[str, Any]:
        """Alg. 3: one round at a site. model: of the round, the global one. disagree: M_G, packed. round: counted from 0, as
        everywhere but in the paper, whose r is round + 1. teachers: those of the other sites, in the site's first call alone;
        with its own one, which it kept, they all make labels in every round."""
        remember(site, teachers)
        net, r = site.network(model), round + 1
        maker = Maker(site, self.teachers, self.local, self.loss)
        gmt = self.gmt if runs(self.gmt, r, rounds) else None
        F_G = None
        if gmt is not None and gmt.rule != "teachers":
            F_G = site.network(model).eval().requires_grad_(False)
        U_bank = cast(Tensor, site.memory.get(BANK, torch.zeros(0)))
        seen: list[Tensor] = []
        intersected: list[Tensor] = []
        w_of = self.w(U_bank, r, rounds)  # Eq. (8)
        l_seg = losses.make(self.loss, site.labels.space)
        sam = self.sam if runs(self.sam, r, rounds) else None
        loop = Loop(site, net, self.local, round=round, rounds=rounds)
        sharp = masks = None
        if sam is not None and sam.ascent != "none":
            sharp = Sharp(loop, sam.sharpness, rng=site.rng, measure=sam.gradients)
            if sam.masks == "sparse":
                M_G = unpack_bits(disagree, own_parameters(net)) if disagree else None
                kept, update = site.memory.get(MASKS), r % sam.every == 1 % sam.every  # r mod r_fre = 1
                masks = SparseMask(sam.sparsity, kept, M_G, update=update, rng=site.rng)

        for batch in loop:  # line 2
            w_U = None
            if maker.models and (F_G is not None or self.gathers):  # GMT and U need all teachers
                q_T = q = maker.merged(batch.image)  # lines 3, 5
                pseudo = q_T.masks
                if F_G is not None and gmt is not None:  # line 6
                    q = global_labels(F_G, batch.image, q_T.taught, maker)  # line 7
                    pseudo, is_intersection = refined(q.masks, q_T.masks, gmt)  # line 8, Eq. (5)
                    intersected.append(is_intersection)
                batch = maker.complete(batch, pseudo)  # line 9
                if self.gathers:
                    judged = q_T if self.uncertainty.source == "teachers" else q
                    U = uncertainty(judged, self.uncertainty)  # line 4, Eq. (6)
                    seen.append(U.cpu())
                    w_U = None if w_of is None else w_of(U)
            else:
                batch = maker(batch)  # lines 3, 5, 9, of those teachers that are needed

            f = partial(self.calculate_loss, l_seg, w_U, r, rounds)
            ascent = descent = batch
            if sam is not None and "cmidg" in (sam.ascent, sam.descent):
                x_aug = dataclasses.replace(batch, image=cmidg(batch.image, sam.cmidg, site.rng))  # line 16
                ascent = x_aug if sam.ascent == "cmidg" else batch
                descent = x_aug if sam.descent == "cmidg" else batch
            if sam is None or sharp is None:  # line 11
                with loop.autocast():
                    value = f(net, descent)  # lines 12, 13
                loop.step(value)  # line 14
            else:  # line 15
                value, nabla_f, eps = sharp.ascend(f, ascent)  # lines 17, 18
                M = None
                if masks is not None:
                    M = masks(nabla_f)  # lines 19 to 27
                elif sam.masks == "local" and nabla_f:  # {} after an overflow in fp16
                    M = top(nabla_f, sam.sparsity.top)
                told = sharp.step(f, descent, eps, M)  # lines 28 to 31, Eq. (14)
                loop.note(**told, ascent=value)

        maker.log()
        if seen:
            U_bank = torch.cat([U_bank, *seen])
            site.memory[BANK] = U_bank
            site.log(uncertainty=float(torch.cat(seen).mean()))
        if intersected:
            site.log(refined=float(torch.cat(intersected).double().mean()))
        answer: dict[str, Any] = {"model": tensors_of(net), "n": site.n_train}
        if self.ua is not None:
            answer |= {"mean": 0.0, "variance": 0.0}
            if runs(self.ua, r, rounds):  # line 34
                answer["mean"], answer["variance"] = moments(U_bank, self.ua.ddof)  # lines 35, 36
        if self.exchanged:
            answer["mask"] = {}
            if masks is not None:  # line 38
                answer["mask"] = masks.sent()  # line 39
                site.memory[MASKS] = cast(Tree, masks.memory())
        return answer  # lines 41 to 47

    # -------------------------------------------------------------------------------- Algorithm 4: CalculateLoss

    def calculate_loss(
        self, l_seg: LossFunction, w_U: Tensor | None, r: int, rounds: int, net: nn.Module, batch: Batch
    ) -> dict[str, Tensor]:
        """Alg. 4: the objective of round r, with its terms. l_seg: the supervised loss. w_U [B]: w(U) of each sample; None:
        all count equally."""

        def l(outputs: Tensor | Sequence[Tensor], target: Tensor, known: Tensor) -> Tensor:  # noqa: E743
            if w_U is None:  # line 1
                return l_seg(outputs, target, known)  # line 2
            assert isinstance(l_seg, DiceBCE) and self.ws is not None
            weighed = l_seg
            if self.ws.activation is not None:
                weighed = dataclasses.replace(l_seg, activation=self.ws.activation)
            return (w_U * weighed.per_sample(outputs, target, known)).mean()  # line 4

        q = net(batch.image)
        terms = {"supervised": losses.on_batch(l, q, batch, self.loss.findings)}
        if self.rce is not None and runs(self.rce, r, rounds):  # line 5
            value = rce(
                heads(q),
                batch.target,
                batch.known,
                head_weights=l_seg.head_weights if isinstance(l_seg, DiceBCE) else "encoder",
                form=self.rce.form,
                log_zero=self.rce.log_zero,
            )
            factor = arce_coefficient(r, rounds, self.rce.coefficient, self.rce.growing)
            terms["reverse"] = factor * value  # line 6, Eq. (9)
        return terms  # line 8

    def w(self, U_bank: Tensor, r: int, rounds: int) -> Callable[[Tensor], Tensor] | None:
        """w(U) of round r; None: all samples count equally."""
        ws = self.ws
        if ws is None or not begins(ws.start, rounds) <= r < begins(ws.end, rounds) or not len(U_bank):
            return None
        return weigher(U_bank, ws, r, begins(ws.end, rounds) if ws.period == "end" else rounds)

    # ---------------------------------------------------------------------------------------- what it declares

    @property
    def gathers(self) -> bool:
        """Whether anything asks for the uncertainty of samples."""
        return self.ws is not None or self.ua is not None

    @property
    def exchanged(self) -> bool:
        """Whether masks travel."""
        return self.sam is not None and self.sam.masks == "sparse" and self.sam.ascent != "none"

    @property
    def sends(self) -> dict[str, dict[str, str]]:
        update = {"model": "model", "n": "cases"}
        if self.ua is not None:
            update |= {"mean": "number", "variance": "number"}
        if self.exchanged:
            update |= {"mask": "bits:main.parameters"}
        return {"teacher_update": SENDS, "local_update": update}

    def check(self, space: LabelSpace) -> None:
        """Raises FederationError where the hyper-parameters do not fit the label space."""
        require_exclusive("ufps", space)
        self.teachers.check(space, self.loss, self.local)
        fits = isinstance(losses.make(self.loss, space), DiceBCE)
        for name, needs in (("ws", self.ws), ("rce", self.rce)):
            if needs is not None and not fits:
                raise FederationError(
                    f"method ufps: loss is {self.loss.name}, with which {name} cannot be; take dice_bce, or set {name} to "
                    "null"
                )

    def examine(self, net: nn.Module, sites: Sequence[str]) -> list[str]:
        """What `check` should tell. Raises FederationError for parts of `ua` that the net lacks, and for more sites than
        there are."""
        if self.ua is not None:
            part_names(net, self.ua.parts)
        if self.sam is not None and self.sam.gradients and self.local.precision == "fp16":
            raise FederationError(
                "method ufps: sam: gradients is true and local.precision is fp16, which loses small ones; take bf16 or float32"
            )
        if self.participation is not None and self.participation > len(sites):
            raise FederationError(
                f"method ufps: participation is {self.participation}; allowed: 1 to {len(sites)}, the sites that train"
            )
        return self.teachers.notes(len(sites), net, self.local)

    def steps_before(self, rounds: int, sites: int, cases: int | None = None) -> int | None:
        return self.teachers.steps(self.local, rounds, sites, cases)

    def plan(self, rounds: int) -> list[str]:
        """What `check` should tell: the rounds of every module. Raises FederationError for one that would never begin."""
        modules = {"ws": self.ws, "rce": self.rce, "gmt": self.gmt, "ua": self.ua, "sam": self.sam}
        used = {name: one for name, one in modules.items() if one is not None}
        check_begins("method ufps", rounds, **{f"{name}.start": one.start for name, one in used.items()})
        lines = []
        for name, one in used.items():
            first, last = max(begins(one.start, rounds), 1), rounds
            if isinstance(one, WeightScheduler):  # there is nothing to weigh by in the first round
                first, last = max(first, 2), min(begins(one.end, rounds) - 1, rounds)
            lines.append(f"{name} in rounds {first} to {last}" if first <= last else f"{name} in no round")
        return ["ufps: " + ", ".join(lines)] if lines else []


# ------------------------------------------------------------------------------------------- pseudo labels, Eq. (5)


@torch.no_grad()
def global_labels(F_G: nn.Module, image: Tensor, taught: Tensor, maker: Maker) -> Merged:
    """What the global model of the round says of images [B, I, *S], in the form of what teachers say."""
    with maker.within():
        logits = voxel_logits(F_G(image))
    axes = (1, -1, *[1] * (logits.dim() - 2))
    z = torch.where(taught.reshape(axes), logits.float(), 0)
    winner = logits.float().masked_fill(~taught.reshape(axes), -math.inf).argmax(1, keepdim=True)
    return Merged(z, winner == torch.arange(len(taught), device=z.device).reshape(axes), taught)


def agreement(by_global: Tensor, by_teachers: Tensor) -> Tensor:
    """[B] float64: the share of the global model's foreground on which the teachers agree; infinite where it has none.
    Masks as of `refined`."""
    space = tuple(range(1, by_global.dim()))
    agreed, alone = ((masks[:, 1:]).sum(space).double() for masks in (by_global & by_teachers, by_global))
    return torch.where(alone > 0, agreed / alone, math.inf)


def refined(by_global: Tensor, by_teachers: Tensor, how: GlobalMainTeacher) -> tuple[Tensor, Tensor]:
    """Eq. (5): masks [B, C, *S] bool of the global model, made fine by those of the teachers, sample by sample; and [B] bool,
    for which samples they are the intersection."""
    both, every = (
        by_global & by_teachers,
        torch.ones(len(by_global), dtype=torch.bool, device=by_global.device),
    )
    if how.rule == "intersection":
        return both, every
    if how.rule != "refined":
        return (by_teachers if how.rule == "teachers" else by_global), ~every
    enough = agreement(by_global, by_teachers) >= how.v - 1e-9
    return torch.where(enough.reshape(-1, *[1] * (both.dim() - 1)), both, by_global), enough


# --------------------------------------------------------------------- uncertainty and its weights, Eq. (6) and (8)


@torch.no_grad()
def uncertainty(merged: Merged, how: Uncertainty) -> Tensor:
    """U [B], Eq. (6): for each taught class the mean entropy of the voxels that are given to it, and of these the mean."""
    taught = merged.taught
    z, m = merged.logits[:, taught], merged.masks[:, taught].float()
    p = z.softmax(1 if how.softmax == "classes" else -1)
    # in the code's form the axis of the softmax is not that of the sum; 0 log 0 is 0
    E = -torch.special.xlogy(p, p).sum(1, keepdim=True) / z.shape[1]
    space = tuple(range(2, z.dim()))
    U_c = (E * m).sum(space) / (m.sum(space) + 1)
    if how.average == "all":
        return U_c.mean(1)
    return U_c.sum(1) / (U_c > 0).sum(1).clamp(min=1)


def weigher(bank: Tensor, ws: WeightScheduler, r: int, period: int) -> Callable[[Tensor], Tensor]:
    """w(U), Eq. (8), in round r of a schedule of `period` rounds; bank: the uncertainties before this round. Where all are
    equal every weight is 1."""
    values = bank.double()
    mean, least, most = (float(value) for value in (values.mean(), values.min(), values.max()))
    span = most - least
    if span <= 0:
        return torch.ones_like
    U_T = float(values.quantile(ws.threshold))
    done = min(r / period, 1.0)

    def norm(U: Tensor | float) -> Any:
        return (U - mean) / span

    def tail_shift(n: Tensor) -> Tensor:
        return 2 - torch.where(n > norm(U_T), n - done, n).exp()

    def base_decrement(n: Tensor) -> Tensor:
        return 2 - ((ws.alpha - math.e) * done + math.e) ** n

    def round_trip(n: Tensor) -> Tensor:
        reach, half = norm(U_T) - norm(least), max(period // 2, 1)
        there = min(r, half) / half
        back = min(max(r - half, 0) / half, 1.0)
        centre = (norm(least) if ws.centre == "least" else 0.0) + reach * (there - back)
        G = torch.exp(-((n - centre) ** 2) / (2 * ws.width**2)) / (math.sqrt(2 * math.pi) * ws.width)
        return (1 - ws.beta) * G + ws.beta * (2 - n.exp())

    schedule = {"tail_shift": tail_shift, "base_decrement": base_decrement, "round_trip": round_trip}[
        ws.schedule
    ]
    if ws.beyond == "extrapolate":
        return lambda U: schedule(norm(U.double())).float()
    return lambda U: schedule(norm(U.double().clamp(least, most))).float()


def moments(bank: Tensor, ddof: int) -> tuple[float, float]:
    """Mean and variance of a site's uncertainties; 0 and 0 where it has none, a variance of 0 where it has too few."""
    values = bank.double()
    if len(values) == 0:
        return 0.0, 0.0
    variance = float(values.var(correction=ddof)) if len(values) > ddof else 0.0
    return float(values.mean()), variance


# --------------------------------------------------------------------------------------------------------- the server


def A_hat(
    mu: Sequence[float], sigma: Sequence[float], n: Sequence[float], how: UncertaintyAggregation
) -> list[float]:
    """Eq. (7): (softmax(-mu / tau_mean) + softmax(-sigma / tau_variance) + n / sum n) / 3, of N sites; sigma: variances."""
    by_mean = (-torch.tensor(mu, dtype=torch.float64) / how.tau_mean).softmax(0)
    by_variance = (how.variance_sign * torch.tensor(sigma, dtype=torch.float64) / how.tau_variance).softmax(0)
    A = torch.tensor(n, dtype=torch.float64)
    return ((by_mean + by_variance + A / A.sum()) / 3).tolist()


def part_names(net: nn.Module, wanted: Sequence[str]) -> list[str]:
    """The tensors of some parts of a net. Of PARTS some may be missing, as in a net without a decoder of its own. Raises
    FederationError for any other part that the net does not have, and where none of them is there."""
    known = parts(net)
    missing = [part for part in wanted if part not in known]
    strange = [part for part in missing if part not in PARTS]
    if strange or len(missing) == len(wanted):
        raise not_known("method ufps: ua.parts: the part of the net", (strange or missing)[0], known)
    return [name for part in wanted for name in known.get(part, ())]


def global_mask(replies: Replies, net: nn.Module) -> dict[str, Tensor]:
    """M_G, packed, Eq. (12); of the sites that sent a mask."""
    like = own_parameters(net)
    masks = (unpack_bits(mask, like) for mask in replies.each("mask") if mask)
    first = next(masks, None)
    return {} if first is None else pack_bits(disagreement(itertools.chain([first], masks)))


def own_parameters(net: nn.Module) -> dict[str, Tensor]:
    """The parameters that are trained, by name."""
    return {name: p for name, p in net.named_parameters() if p.requires_grad}
