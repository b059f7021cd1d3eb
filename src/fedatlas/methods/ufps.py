"""UFPS.

Jiang, Ma, Zeng, Ying. UFPS: a unified framework for partially annotated federated segmentation in heterogeneous data
distribution. Patterns 2024, with its supplement; the algorithms are numbered as in the preprint.

Every site trains a teacher on its own labels, all teachers are handed to all sites once, and every batch is completed by
their pseudo labels (`teachers`). On top of that, each from a round of its own on:

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
of 500, as published (`phases`).

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
from typing import Any, ClassVar, Literal, cast

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
from fedatlas.learning.loop import Local, Loss, Step, train
from fedatlas.losses import LossChoice
from fedatlas.losses.onehot import DiceBCE, arce_coefficient, rce
from fedatlas.methods.shared.averaging import Weighted, Weighting, site_weights
from fedatlas.methods.shared.cmidg import CMIDG, cmidg
from fedatlas.methods.shared.phases import begins, check_begins, check_when, runs
from fedatlas.methods.shared.pseudo import Merged
from fedatlas.methods.shared.sharpness import (
    AscentStep,
    Masks,
    Sharpness,
    SparseMask,
    Sparsity,
    disagreement,
    pack_bits,
    top,
    unpack_bits,
)
from fedatlas.methods.shared.teachers import (
    SENDS,
    CompletedSite,
    Maker,
    TaughtState,
    Teaching,
    remember,
    require_exclusive,
    train_teacher,
    with_teachers,
)

BANK = "ufps.uncertainty"
"""The key in a site's memory of the uncertainties of all samples so far, in their order."""
PARTS = ("encoder", "decoder", "head", "deep_supervision")
"""Parts that nets commonly have."""
MASKS = "ufps.masks"
"""The key in a site's memory of the gradient's momentum and the last mask."""


# ------------------------------------------------------------------------------------------------------------ options


@options
class Uncertainty:
    """How sure teachers are of a sample, Eq. (6)."""

    softmax: Literal["classes", "depth"] = option(
        "classes", "Over what logits become probabilities; depth: the volume's last axis (published code)."
    )
    average: Literal["all", "present"] = option(
        "all", "Whether the mean is over all classes, or those with an uncertainty above 0 (published code)."
    )
    source: Literal["teachers", "pseudo"] = option(
        "teachers",
        "Whose predictions are judged: the teachers' throughout, or those of whoever makes the pseudo labels (published "
        "code: the global model once it teaches).",
    )


@options
class WeightScheduler:
    """Weights of samples by their uncertainty, Eq. (8)."""

    schedule: Literal["tail_shift", "base_decrement", "round_trip"] = option(
        "tail_shift", "TS, BD or RG (round-trip Gaussian)."
    )
    start: float = option(0.02, "The round from which samples are weighed; below 1: a share of all.", ge=0)
    end: float = option(0.4, "The round from which they count equally again; below 1: a share of all.", ge=0)
    period: Literal["end", "all"] = option(
        "end", "R of the schedule: the rounds up to `end` (published code), or all rounds (the paper's text)."
    )
    threshold: float = option(0.7, "Quantile of the uncertainties so far that is U_T.", ge=0, le=1)
    alpha: float = option(1.0, "BD: the base in the last round.", gt=0, le=math.e)
    beta: float = option(0.7, "RG: share of the static weight.", ge=0, le=1)
    width: float = option(0.28, "RG: s, the standard deviation of the Gaussian (rho in the paper).", ge=0.01)
    centre: Literal["least", "mean"] = option(
        "least",
        "RG: where the Gaussian starts: at the least uncertainty (published code) or at the mean (paper).",
    )
    beyond: Literal["nearest", "extrapolate"] = option(
        "nearest",
        "An uncertainty outside of those so far counts as the nearest of them, or as what it is (published code), with which "
        "a weight may be below 0.",
    )
    activation: Literal["sigmoid", "softmax"] | None = option(
        None,
        "The probabilities of the Dice while samples are weighed; null: as the loss says; published code: softmax.",
    )

    def __post_init__(self) -> None:
        check_when("method ufps: ws", start=self.start, end=self.end)
        if (self.start < 1) == (self.end < 1) and self.end <= self.start:
            raise FederationError(
                f"method ufps: ws: end is {self.end} and start is {self.start}, so that no sample is ever weighed; take a "
                "later end, or set ws to null"
            )


@options
class AdaptiveRCE:
    """Reverse cross-entropy with a coefficient that grows, Eq. (9)."""

    start: float = option(0.4, "The round from which it is added; below 1: a share of all.", ge=0)
    coefficient: float = option(0.01, "Its coefficient in the last round.", ge=0)
    growing: bool = option(
        True, "Whether it grows as exp(-20 (1 - r / R)); false: it is the same throughout."
    )
    form: Literal["paper", "official"] = option(
        "paper", "official: what the published code computes, linear in the logits and without a lower bound."
    )
    log_zero: float = option(-4.0, "What log 0 stands for.", lt=0)

    def __post_init__(self) -> None:
        check_when("method ufps: rce", start=self.start)


@options
class UncertaintyAggregation:
    """Weights of sites by the uncertainty of their samples, Eq. (7)."""

    start: float = option(0.6, "The round from which it is used; below 1: a share of all.", ge=0)
    parts: list[str] = option(
        ["decoder", "head"],
        "The parts of the net that are averaged so; a part that the net lacks is left out if another is there.",
        min_length=1,
    )
    tau_mean: float = option(0.05, "Temperature of the means.", gt=0)
    tau_variance: float = option(0.001, "Temperature of the variances.", gt=0)
    variance_sign: Literal[-1, 1] = option(
        -1, "-1: a site of high variance counts less (paper); 1: more (published code)."
    )
    ddof: Literal[0, 1] = option(0, "0: variance of the population (paper); 1: of a sample (published code).")

    def __post_init__(self) -> None:
        check_when("method ufps: ua", start=self.start)


@options
class GlobalMainTeacher:
    """The global model as teacher, Eq. (5)."""

    start: float = option(0.6, "The round from which it teaches; below 1: a share of all.", ge=0)
    rule: Literal["refined", "global", "intersection", "teachers"] = option(
        "refined",
        "refined, Eq. (5): the intersection with the teachers where it is at least v of the global foreground, else the "
        "global model; or always the one or the other.",
    )
    v: float = option(0.8, "Share of the global model's foreground on which the teachers must agree.", ge=0)

    def __post_init__(self) -> None:
        check_when("method ufps: gmt", start=self.start)


@options
class UnifiedSharpness:
    """Sharpness-aware minimisation with the ascent on a strong augmentation, and masked, Eq. (11) to (14)."""

    start: float = option(0.6, "The round from which it is used; below 1: a share of all.", ge=0)
    ascent: Literal["cmidg", "original", "none"] = option(
        "cmidg",
        "What the ascent sees; none: there is no ascent, and CMIDG, in the descent, is plain augmentation.",
    )
    descent: Literal["original", "cmidg"] = option("original", "What the descent sees.")
    masks: Literal["sparse", "local", "none"] = option(
        "sparse",
        "sparse: sUSAM; local: the top of each batch's own gradient, nothing is exchanged; none: USAM (with ascent: "
        "original, ASAM).",
    )
    every: int = option(5, "r_fre: masks and momentum follow in rounds r with r mod r_fre = 1.", ge=1)
    gradients: bool = option(
        False,
        "Whether sites log how the gradients of their ascent steps differ from plain ones, Eq. (10), which takes one more "
        "pass a step: steeper, the share with r > 0, and quantiles of r.",
    )
    sharpness: Sharpness = option(Sharpness(), "The perturbation.")
    sparsity: Sparsity = option(Sparsity(), "The masks.")
    cmidg: CMIDG = option(CMIDG(), "The augmentation; published code: channels 1, order 1.")

    def __post_init__(self) -> None:
        check_when("method ufps: sam", start=self.start)
        if self.ascent == "none" and self.descent == "original":
            raise FederationError(
                "method ufps: sam: ascent is none and descent is original, so that it does nothing; set sam to null, or "
                "descent to cmidg"
            )
        if self.gradients and self.ascent == "none":
            raise FederationError(
                "method ufps: sam: gradients is true and ascent is none, so that there is nothing to compare; take an ascent"
            )


@dataclass(frozen=True)
class UFPSState(TaughtState):
    """disagree: M_G, packed, in which the sites' last masks differ; empty before any were sent."""

    disagree: dict[str, Tensor] = field(default_factory=dict)


# ------------------------------------------------------------------------------------------------------------- method


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

    def check(self, space: LabelSpace) -> None:
        """Raises FederationError where the hyper-parameters do not fit the label space."""
        require_exclusive("ufps", space)
        self.teachers.check(space, self.loss)
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

    def start(self, net: nn.Module, clients: Clients) -> UFPSState:
        return UFPSState(tensors_of(net))

    def round(self, state: UFPSState, clients: Clients) -> UFPSState:
        r, to = state.round + 1, with_teachers(clients, state, self.teacher_update)
        replies = to.call(
            self.local_update,
            each=self.drawn(clients),
            model=state.model,
            disagree=state.disagree,
            round=state.round,
            rounds=state.rounds,
        )
        model = average(
            replies.each("model"),
            site_weights(replies, self.weights),
            each=self.part_weights(replies, clients, state),
        )
        disagree = state.disagree
        if self.exchanged and runs(self.sam, r, state.rounds):
            disagree = self.M_G(replies, clients) or disagree
        return UFPSState(model, r, state.rounds, disagree=disagree, **to.left())

    def drawn(self, clients: Clients) -> dict[str, dict[str, Any]] | None:
        """The sites that take part in a round; None: all."""
        if self.participation is None or self.participation >= len(clients.sites):
            return None
        order = torch.randperm(len(clients.sites), generator=clients.rng)[: self.participation]
        return {clients.sites[i]: {} for i in sorted(order.tolist())}

    def part_weights(self, replies: Replies, clients: Clients, state: UFPSState) -> dict[str, list[float]]:
        """Tensor name -> A^ [N], for the parts that UA averages; empty before its first round."""
        if self.ua is None or not runs(self.ua, state.round + 1, state.rounds):
            return {}
        mu, sigma = replies.plain("mean"), replies.plain("variance")
        weights = A_hat(mu, sigma, site_weights(replies, self.weights), self.ua)
        return dict.fromkeys(part_names(clients.network(), self.ua.parts), weights)

    def M_G(self, replies: Replies, clients: Clients) -> dict[str, Tensor]:
        """The global mask, packed, Eq. (12); of the sites that sent a mask."""
        like = own_parameters(clients.network())
        masks = (unpack_bits(mask, like) for mask in replies.each("mask") if mask)
        first = next(masks, None)
        return {} if first is None else pack_bits(disagreement(itertools.chain([first], masks)))

    @at_site
    def teacher_update(self, site: Site, model: Tensors, rounds: int) -> dict[str, Any]:
        """Alg. 1: a teacher of the site alone, from the common start."""
        return train_teacher(site, model, rounds, self.teachers, local=self.local, loss=self.loss)

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
        """Alg. 3 and 4: one round at a site. teachers: the other sites', given once, then remembered."""
        remember(site, teachers)
        net, r = site.network(model), round + 1
        labels = Labels(self, site, model, r, rounds)
        step, masks = self.steps(site, net, disagree, r, rounds)
        train(
            cast(Site, CompletedSite(site, labels.maker.labels, labels)),
            net,
            self.F(site.labels.space, r, rounds),
            self.local,
            round=round,
            rounds=rounds,
            step=step,
        )
        labels.close()
        answer: dict[str, Any] = {"model": tensors_of(net), "n": site.n_train}
        if self.ua is not None:
            answer["mean"], answer["variance"] = 0.0, 0.0
            if runs(self.ua, r, rounds):
                answer["mean"], answer["variance"] = moments(labels.bank, self.ua.ddof)
        if self.exchanged:
            answer["mask"] = {} if masks is None else masks.sent()
            if masks is not None:
                site.memory[MASKS] = cast(Tree, masks.memory())
        return answer

    def F(self, space: LabelSpace, r: int, rounds: int) -> Loss:
        """The objective of round r, with its terms."""
        l_seg = losses.make(self.loss, space)
        head_weights = l_seg.head_weights if isinstance(l_seg, DiceBCE) else "encoder"
        l_weighed = l_seg
        if self.ws is not None and self.ws.activation is not None and isinstance(l_seg, DiceBCE):
            l_weighed = dataclasses.replace(l_seg, activation=self.ws.activation)

        def objective(net: nn.Module, batch: Batch) -> dict[str, Tensor]:
            outputs = net(batch.image)
            weight = batch.weight if isinstance(batch, Weighed) else None

            def seg(outputs: Tensor | Sequence[Tensor], target: Tensor, known: Tensor) -> Tensor:
                if weight is None or not isinstance(l_weighed, DiceBCE):
                    return l_seg(outputs, target, known)
                return (weight * l_weighed.per_sample(outputs, target, known)).mean()

            terms = {"supervised": losses.on_batch(seg, outputs, batch, self.loss.findings)}
            if self.rce is not None and runs(self.rce, r, rounds):
                value = rce(
                    heads(outputs),
                    batch.target,
                    batch.known,
                    head_weights=head_weights,
                    form=self.rce.form,
                    log_zero=self.rce.log_zero,
                )
                factor = arce_coefficient(r, rounds, self.rce.coefficient, self.rce.growing)
                terms["reverse"] = factor * value
            return terms

        return objective

    def steps(
        self, site: Site, net: nn.Module, disagree: dict[str, Tree], r: int, rounds: int
    ) -> tuple[Callable[[torch.optim.Optimizer, Local, torch.device], Step] | None, SparseMask | None]:
        """What makes the steps of round r (None: plain ones), and the masks of sUSAM if they are used."""
        if self.sam is None or not runs(self.sam, r, rounds):
            return None, None
        sam = self.sam
        masks = None
        if self.exchanged:
            M_G = unpack_bits(disagree, own_parameters(net)) if disagree else None
            kept, update = site.memory.get(MASKS), r % sam.every == 1 % sam.every
            masks = SparseMask(sam.sparsity, kept, M_G, update=update, rng=site.rng)

        def local(gradient: Tensors) -> Masks:
            return top(gradient, sam.sparsity.top)

        def views(batch: Batch) -> tuple[Batch, Batch]:
            strong = batch
            if "cmidg" in (sam.ascent, sam.descent):
                strong = dataclasses.replace(batch, image=cmidg(batch.image, sam.cmidg, site.rng))
            return (
                strong if sam.ascent == "cmidg" else batch,
                strong if sam.descent == "cmidg" else batch,
            )

        def make(optimizer: torch.optim.Optimizer, chosen: Local, device: torch.device) -> Step:
            if sam.ascent == "none":
                return AugmentedStep(optimizer, chosen, device, lambda batch: views(batch)[1])
            mask = masks if masks is not None else local if sam.masks == "local" else None
            how: dict[str, Any] = {"views": views, "mask": mask, "rng": site.rng, "gradients": sam.gradients}
            return AscentStep(optimizer, chosen, device, sam.sharpness, **how)

        return make, masks


# ------------------------------------------------------------------------------------------------------------- labels


@dataclass
class Weighed(Batch):
    """A batch with weight [B], w(U) of each sample; None: all count equally."""

    weight: Tensor | None = None


class Labels:
    """Completes the batches of one round at a site, and gathers their uncertainty. model: the global one of the round."""

    def __init__(self, method: UFPS, site: Site, model: Tensors, r: int, rounds: int) -> None:
        self.method, self.site, self.r, self.rounds = method, site, r, rounds
        self.maker = Maker(site, method.teachers, method.local)
        self.bank = cast(Tensor, site.memory.get(BANK, torch.zeros(0)))
        self.seen: list[Tensor] = []
        self.agreed, self.samples = 0, 0
        self.F_global: nn.Module | None = None
        if method.gmt is not None and method.gmt.rule != "teachers" and runs(method.gmt, r, rounds):
            self.F_global = site.network(model).eval().requires_grad_(False)
        ws = method.ws
        self.weigher: Callable[[Tensor], Tensor] | None = None
        if ws is not None and begins(ws.start, rounds) <= r < begins(ws.end, rounds) and len(self.bank):
            period = begins(ws.end, rounds) if ws.period == "end" else rounds
            self.weigher = weigher(self.bank, ws, r, period)

    @property
    def gathers(self) -> bool:
        """Whether anything asks for the uncertainty of samples."""
        return self.method.ws is not None or self.method.ua is not None

    @torch.no_grad()
    def __call__(self, batch: Batch) -> Batch:
        maker, how = self.maker, self.method.uncertainty
        if not maker.models:
            return batch
        if self.F_global is None and not self.gathers:
            return maker(batch)
        merged = maker.merged(batch.image)
        lent, masks = merged, merged.masks
        if self.F_global is not None and self.method.gmt is not None:
            lent = self.by_global(batch.image, merged.taught)
            masks, agreed = refined(lent.masks, merged.masks, self.method.gmt)
            self.agreed, self.samples = self.agreed + int(agreed.sum()), self.samples + len(agreed)
        done = maker.complete(batch, masks)
        if not self.gathers:
            return done
        U = uncertainty(merged if how.source == "teachers" else lent, how)
        self.seen.append(U.cpu())
        weight = None if self.weigher is None else self.weigher(U)
        shallow = {f.name: getattr(done, f.name) for f in dataclasses.fields(Batch)}
        return Weighed(**shallow, weight=weight)

    def by_global(self, image: Tensor, taught: Tensor) -> Merged:
        """What the global model of the round says, in the form of what teachers say."""
        assert self.F_global is not None
        with self.maker.within():
            logits = voxel_logits(self.F_global(image))
        axes = (1, -1, *[1] * (logits.dim() - 2))
        z = torch.where(taught.reshape(axes), logits.float(), 0)
        winner = logits.float().masked_fill(~taught.reshape(axes), -math.inf).argmax(1, keepdim=True)
        return Merged(z, winner == torch.arange(len(taught), device=z.device).reshape(axes), taught)

    def close(self) -> None:
        """Keeps what was gathered."""
        self.maker.log()
        if self.seen:
            self.bank = torch.cat([self.bank, *self.seen])
            self.site.memory[BANK] = self.bank
            self.site.log(uncertainty=float(torch.cat(self.seen).mean()))
        if self.samples:
            self.site.log(refined=self.agreed / self.samples)


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


def own_parameters(net: nn.Module) -> dict[str, Tensor]:
    """The parameters that are trained, by name."""
    return {name: p for name, p in net.named_parameters() if p.requires_grad}


# -------------------------------------------------------------------------------------------------------------- steps


class AugmentedStep(Step):
    """A plain step on another view of the batch."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        local: Local,
        device: torch.device,
        view: Callable[[Batch], Batch],
    ) -> None:
        super().__init__(optimizer, local, device)
        self.view = view

    def __call__(self, net: nn.Module, loss: Loss, batch: Batch) -> dict[str, Tensor]:
        return super().__call__(net, loss, self.view(batch))
