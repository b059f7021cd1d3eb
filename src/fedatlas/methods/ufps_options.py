"""The options of UFPS, one class for each of its modules; the method is `ufps`, whose equations these names stand in.

Where an option asks for a round, a number below 1 is that share of all rounds (`shared.phases`).
"""

import math
from typing import Literal

from fedatlas.core.errors import FederationError
from fedatlas.core.options import option, options
from fedatlas.methods.shared.cmidg import CMIDG
from fedatlas.methods.shared.phases import check_when
from fedatlas.methods.shared.sharpness import Sharpness, Sparsity


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
