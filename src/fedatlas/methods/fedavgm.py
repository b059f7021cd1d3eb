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

from typing import Literal

from torch import Tensor, nn

from fedatlas.core.contract import Clients
from fedatlas.core.options import option, options
from fedatlas.methods.shared.averaging import Averaging, mean
from fedatlas.methods.shared.server_step import Rule, StepRowState, StepState, started, stepped, velocity


@options
class FedAvgM(Averaging):
    """FedAvg with momentum at the server (Hsu 2019)."""

    beta: float = option(0.9, "beta: momentum of the server; 0 is FedAvg.", ge=0, lt=1)
    damping: Literal[0, "beta"] = option(
        0,
        "0: v <- beta v + Delta, as published; beta: v <- beta v + (1 - beta) Delta, as in MOON's public code.",
    )

    def start(self, net: nn.Module, clients: Clients) -> StepState:
        return started(net, initial=(0.0,), per_class=self.per_class)

    @property
    def state(self) -> type[StepState]:
        return StepRowState if self.per_class else StepState

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
