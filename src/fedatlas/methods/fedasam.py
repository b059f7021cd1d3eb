"""FedASAM with SWA at the server.

Caldarola, Caputo, Ciccone. Improving generalization in federated learning by seeking flat minima. ECCV 2022. Its two
halves: Kwon, Kim, Park, Choi. ASAM. ICML 2021 (`sharpness`); Izmailov, Podoprikhin, Garipov, Vetrov, Wilson. Averaging
weights leads to wider optima and better generalization. UAI 2018.

Sites take adaptive sharpness-aware steps, the server averages as FedAvg does, and from three quarters of the rounds on it
also keeps a running mean of its own models. That mean is what is evaluated; sites go on from the plain model.

    site      w' = w + rho T_w^2 g / ||T_w g||, T_w = |w| + eta;  a step of the base optimizer from w with grad F(w')
    server    w_SWA <- (n w_SWA + w) / (n + 1) every c rounds from the start on

The defaults of rho, eta, start and cycle are those of UFPS, of which FedASAM is a baseline.

Within a cycle the rate falls linearly, to its lowest in the round whose model is averaged: times 1 - t (1 - low) with
t = 1/c, 2/c, …, 1. Reconstruction: this factor is on top of `local.schedule`, where the paper has a constant rate before
the start; UFPS does not name its lowest rate, 0.01 is the ratio of the rates of the paper's own SWA.

Differences from the paper: all sites take part in every round. As in its code the first update of the mean replaces the
model with which it began (`shared.swa.swa_count`).
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import nn

from fedatlas import losses
from fedatlas.core.contract import Clients, Member, Site, State, at_site
from fedatlas.core.options import option, options
from fedatlas.core.tensors import Tensors, tensors_of
from fedatlas.learning.loop import Local, Loop, train
from fedatlas.methods.shared.averaging import MeanOfModels, answer, mean
from fedatlas.methods.shared.phases import share_of
from fedatlas.methods.shared.sharpness import Sharp, Sharpness
from fedatlas.methods.shared.swa import swa, swa_count


@options
class SWA:
    """The running mean of the server's models."""

    start: float = option(0.75, "Part of all rounds after which the mean begins; 1 or more: never.", ge=0)
    cycle: int = option(2, "c: every so many rounds a model enters the mean.", ge=1)
    low: float = option(
        0.01,
        "Part of the learning rate to which it falls within each cycle after the start; 1: it is not cycled, as with a "
        "cycle of 1.",
        gt=0,
        le=1,
    )


@dataclass(frozen=True)
class FedASAMState(State):
    """swa: the running mean of the models; empty before it begins."""

    swa: Tensors = field(default_factory=dict)


@options
class FedASAM(MeanOfModels):
    """FedAvg with sharpness-aware local steps, and the running mean of late models (Caldarola 2022)."""

    state: ClassVar[type[State]] = FedASAMState

    asam_start: int = option(
        0, "The first round, from 0, with sharpness-aware steps; rounds before it are those of FedAvg.", ge=0
    )
    sharpness: Sharpness = option(Sharpness(), "The sharpness-aware step.")
    swa: SWA = option(SWA(), "The running mean at the server.")

    def start_of_mean(self, rounds: int) -> int:
        """The round, from 0, whose model the mean begins with; `rounds` or more: none."""
        return share_of(self.swa.start, rounds)

    def plan(self, rounds: int) -> list[str]:
        """What `check` should tell: which of its two halves has no round."""
        told = super().plan(rounds)
        if self.asam_start >= rounds:
            told.append(
                f"fedasam: asam_start is {self.asam_start}, counted from 0, and the federation has {rounds} rounds: no step "
                "is sharpness-aware"
            )
        if self.start_of_mean(rounds) >= rounds:
            told.append(
                f"fedasam: swa.start is {self.swa.start:g}, with which the mean begins in none of {rounds} rounds: the model is "
                "that of the last round"
            )
        return told

    def lr_factor(self, round: int, rounds: int) -> float:
        """1 - t (1 - low) in the rounds after the mean has begun, else 1."""
        after, c = round - self.start_of_mean(rounds), self.swa.cycle
        if after < 1 or c == 1:
            return 1.0
        return 1 - ((after - 1) % c + 1) / c * (1 - self.swa.low)

    def start(self, net: nn.Module, clients: Clients) -> FedASAMState:
        return FedASAMState(tensors_of(net))

    def round(self, state: FedASAMState, clients: Clients) -> FedASAMState:
        replies = clients.call(self.local_update, model=state.model, round=state.round, rounds=state.rounds)
        model = mean(replies, state, self.weights)
        average = self.averaged(state.swa, model, state.round, state.rounds)
        return dataclasses.replace(state, model=model, swa=average, round=state.round + 1)

    def averaged(self, average: Tensors, model: Tensors, round: int, rounds: int) -> Tensors:
        """The running mean after a round that gave `model`; average: before it, empty where there was none."""
        n = swa_count(round, start=self.start_of_mean(rounds), cycle=self.swa.cycle)
        if n is None:
            return average
        return swa(average, model, n) if average else model

    def eval_members(self, state: FedASAMState, site: str) -> list[Member]:
        """The running mean, or the plain model as long as there is none."""
        return [Member(state.swa or state.model)]

    @at_site
    def local_update(self, site: Site, model: Tensors, round: int, rounds: int) -> dict[str, Any]:
        net = site.network(model)
        F = losses.supervised(self.loss, site)
        local = slowed(self.local, self.lr_factor(round, rounds))
        if round < self.asam_start:
            train(site, net, F, local, round=round, rounds=rounds)
            return answer(site, net, per_class=False)
        loop = Loop(site, net, local, round=round, rounds=rounds)
        sharp = Sharp(loop, self.sharpness, rng=site.rng)
        for batch in loop:
            value, _, eps = sharp.ascend(F, batch)  # w' = w + eps
            told = sharp.step(F, batch, eps)  # from w, with grad F(w')
            loop.note(**told, ascent=value)
        return answer(site, net, per_class=False)


def slowed(local: Local, factor: float) -> Local:
    """With all learning rates times `factor`."""
    rates = {name: getattr(local, name) for name in ("lr", "lr_min", "warmup_from")}
    return dataclasses.replace(
        local, **{name: rate * factor for name, rate in rates.items() if rate is not None}
    )
