"""FedAvgM.

Hsu, Qi, Brown. Measuring the effects of non-identical data distribution for federated visual classification.
arXiv:1909.06335, 2019.

FedAvg whose server moves the global model with momentum: v <- beta v + Delta; w <- w + v, with Delta the change from
the global model to the weighted mean of the sites'.

The model may go on moving when every site returns it as it came: only with v = 0 are equal models a fixed point.

Differences from the paper: all sites take part in every round. Its Delta is w - mean, with the signs turned.
`damping: beta` is the form of MOON's public code (Li, He, Song, CVPR 2021), which the paper does not have.
Buffers are averaged plainly.
"""

from typing import Any, Literal

from torch import Tensor, nn

from fedatlas import losses
from fedatlas.core.contract import Clients, Site, at_site
from fedatlas.core.labels import LabelSpace
from fedatlas.core.options import option, options
from fedatlas.core.tensors import Tensors
from fedatlas.learning.loop import Local, train
from fedatlas.losses import LossChoice
from fedatlas.methods.shared.server_step import Rule, StepRowState, StepState, started, stepped, velocity
from fedatlas.methods.shared.weighting import SENDS, SENDS_PER_CLASS, Weighting, answer, mean


@options
class FedAvgM:
    """FedAvg with momentum at the server (Hsu 2019)."""

    beta: float = option(0.9, "beta: momentum of the server; 0 is FedAvg.", ge=0, lt=1)
    damping: Literal[0, "beta"] = option(
        0,
        "0: v <- beta v + Delta, as published; beta: v <- beta v + (1 - beta) Delta, as in MOON's public code.",
    )
    weights: Weighting = option("cases", "n_k/n: a site counts by its training cases, or all count equally.")
    aggregate_unlabelled_rows: bool = option(
        True,
        "Whether row c of the head counts for sites that do not annotate class c; false weighs it by the cases "
        "annotated for c, as FedPSL does.",
    )
    loss: LossChoice = option(LossChoice(), "The supervised loss.")
    local: Local = option(Local(), "Training at a site between two exchanges.")

    def check(self, space: LabelSpace) -> None:
        """Raises FederationError where the hyper-parameters do not fit the label space."""
        losses.make(self.loss, space)

    def start(self, net: nn.Module, clients: Clients) -> StepState:
        return started(net, initial=(0.0,), per_class=not self.aggregate_unlabelled_rows)

    @property
    def state(self) -> type[StepState]:
        return StepState if self.aggregate_unlabelled_rows else StepRowState

    @property
    def sends(self) -> dict[str, str]:
        return SENDS if self.aggregate_unlabelled_rows else SENDS_PER_CLASS

    @property
    def summed(self) -> Weighting | None:
        return self.weights if self.aggregate_unlabelled_rows else None

    def round(self, state: StepState, clients: Clients) -> StepState:
        replies = clients.call(self.local_update, model=state.model, round=state.round, rounds=state.rounds)
        return stepped(state, mean(replies, state, self.weights), self.rule())

    def rule(self) -> Rule:
        """The server's step from Delta and v."""
        gain = 1 - self.beta if self.damping == "beta" else 1.0

        def rule(Delta: Tensor, v: Tensor) -> tuple[Tensor, ...]:
            v = velocity(Delta, v, self.beta, gain)  # v <- beta v + Delta
            return v, v  # w <- w + v

        return rule

    @at_site
    def local_update(self, site: Site, model: Tensors, round: int, rounds: int) -> dict[str, Any]:
        net = site.network(model)
        loss = losses.supervised(self.loss, site)
        train(site, net, loss, self.local, round=round, rounds=rounds)
        return answer(site, net, per_class=not self.aggregate_unlabelled_rows)
