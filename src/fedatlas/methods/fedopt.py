"""FedOpt: FedAdagrad, FedAdam, FedYogi, and SGD with momentum.

Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan. Adaptive federated optimization. ICLR 2021.

The sites train as in FedAvg. For the server, Delta_t, the change from the global model x_t to the mean of the sites',
is a descent direction (a negated pseudo-gradient), with which an optimizer makes x_{t+1}:

    sgd      m_t = momentum m_{t-1} + Delta_t;  x_{t+1} = x_t + eta m_t
    others   m_t = beta1 m_{t-1} + (1 - beta1) Delta_t;  x_{t+1} = x_t + eta m_t / (sqrt(v_t) + tau)
             adagrad  v_t = v_{t-1} + Delta_t^2
             yogi     v_t = v_{t-1} - (1 - beta2) Delta_t^2 sign(v_{t-1} - Delta_t^2)
             adam     v_t = beta2 v_{t-1} + (1 - beta2) Delta_t^2

Before the first round m is 0 and v is tau^2. There is no bias correction: the paper has none (torch's Adam has).
`sgd` is torch's form, m = Delta in the first round; with eta = 1 and momentum 0 it is FedAvg, bit for bit.

The model may go on moving when every site returns it as it came: only with m = 0 are equal models a fixed point.

Differences from the paper: all sites take part in every round. Buffers are averaged plainly.
"""

import math
from typing import Literal

from torch import Tensor, nn

from fedatlas.core.contract import Clients
from fedatlas.core.options import option, options
from fedatlas.methods.shared.averaging import Averaging, Weighting, mean
from fedatlas.methods.shared.server_step import StepRowState, StepState, started, stepped, velocity


@options
class FedOpt(Averaging):
    """An optimizer at the server, for which the sites' mean is a descent direction (Reddi 2021)."""

    optimizer: Literal["sgd", "adam", "yogi", "adagrad"] = option("sgd", "The server's optimizer.")
    lr: float | None = option(
        None, "eta: the server's learning rate, to be tuned; null: 1 for sgd, 0.01 for the others.", gt=0
    )
    lr_end: float | None = option(
        None,
        "The learning rate falls to this one along half a cosine over all rounds, as in ConDistFL's public code "
        "(0.9); null: it stays.",
        ge=0,
    )
    momentum: float = option(0.6, "Momentum of sgd; 0.6 as in the ConDistFL paper.", ge=0, lt=1)
    beta1: float = option(0.9, "beta1: decay of the first moment of adam, yogi and adagrad.", ge=0, lt=1)
    beta2: float = option(0.99, "beta2: decay of the second moment of adam and yogi.", ge=0, lt=1)
    tau: float = option(
        1e-3, "tau: adaptivity of adam, yogi and adagrad; a larger one is nearer to plain momentum.", gt=0
    )
    weights: Weighting = option("equal", "n_k/n: a site counts by its training cases, or all count equally.")

    def start(self, net: nn.Module, clients: Clients) -> StepState:
        initial = (0.0,) if self.optimizer == "sgd" else (0.0, self.tau**2)
        return started(net, initial=initial, per_class=self.per_class)

    @property
    def state(self) -> type[StepState]:
        return StepRowState if self.per_class else StepState

    def round(self, state: StepState, clients: Clients) -> StepState:
        replies = clients.call(self.local_update, model=state.model, round=state.round, rounds=state.rounds)
        eta = self.eta(state.round, state.rounds)

        def sgd(Delta: Tensor, m: Tensor) -> tuple[Tensor, ...]:
            m = velocity(Delta, m, self.momentum)
            return eta * m, m

        def adaptive(Delta: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, ...]:
            m = velocity(Delta, m, self.beta1, 1 - self.beta1)  # Alg. 2
            v = self.second(Delta * Delta, v)
            return eta * m / (v.sqrt() + self.tau), m, v  # Alg. 2, last line

        rule = sgd if self.optimizer == "sgd" else adaptive
        return stepped(state, mean(replies, state, self.weights), rule)

    def eta(self, round: int, rounds: int) -> float:
        """The server's learning rate after `round` complete rounds of `rounds`."""
        first = self.lr if self.lr is not None else 1.0 if self.optimizer == "sgd" else 0.01
        if self.lr_end is None:
            return first
        return self.lr_end + (first - self.lr_end) * (1 + math.cos(math.pi * round / rounds)) / 2

    def second(self, square: Tensor, v: Tensor) -> Tensor:
        """v_t of v_{t-1} and Delta_t^2, for the adaptive optimizers (Alg. 2)."""
        if self.optimizer == "adagrad":
            return v + square
        if self.optimizer == "yogi":
            return v - (1 - self.beta2) * square * (v - square).sign()
        return self.beta2 * v + (1 - self.beta2) * square
