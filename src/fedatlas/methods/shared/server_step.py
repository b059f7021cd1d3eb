"""A step of the server: the sites' mean gives a direction, and an optimizer of the server's own walks along it.

Where FedAvg takes the mean as it is, here Delta_t = mean - x_t is one reading of the way, from which the server keeps
moments over the rounds. Only parameters are stepped; buffers (running statistics, counters) are what
`core.tensors.average` makes of them.

Everything is computed per tensor and entry by entry, in float32 (float64 for float64 parameters), with one rounding
per operation: equal replies give equal bits, with any number of threads and after a resume.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fedatlas.core.contract import Clients, State
from fedatlas.core.options import option, options
from fedatlas.core.tensors import Tensors, head_of, tensors_of
from fedatlas.methods.shared.averaging import MeanOfModels, RowState, mean

Rule = Callable[..., tuple[Tensor, ...]]
"""(Delta_t, moments of round t - 1, …) -> (what is added to x_t, moments of round t, …), all of one shape."""

S = TypeVar("S", bound="StepState")


@dataclass(frozen=True)
class StepState(State):
    """A state with the server's moments, each by the names of the parameters, which are what is stepped: the first
    is m, the velocity; an adaptive optimizer has v, the second moment, too."""

    moments: tuple[Tensors, ...] = ()


@dataclass(frozen=True)
class StepRowState(StepState, RowState):
    """The same where the sites' mean of the head is taken row by row."""


@options
class MeanWithMomentum(MeanOfModels):
    """A method that takes the mean of the sites' models, and may walk on along it: the same server's step for any."""

    server_momentum: float = option(
        0.0,
        "Momentum of the server's step, m = momentum m + Delta and x + m, as in fedavgm; 0: the mean itself.",
        ge=0,
        lt=1,
    )

    @property
    def state(self) -> type[State]:
        return StepState if self.server_momentum > 0 else State

    def start(self, net: nn.Module, clients: Clients) -> State:
        if self.server_momentum > 0:
            return started(net, initial=(0.0,), per_class=False)
        return super().start(net, clients)

    def round(self, state: Any, clients: Clients) -> State:
        if self.server_momentum == 0:
            return super().round(state, clients)
        replies = clients.call(self.local_update, model=state.model, round=state.round, rounds=state.rounds)
        return stepped(state, mean(replies, state, self.weights), with_momentum(self.server_momentum))


def with_momentum(beta: float) -> Rule:
    """The step m_t = beta m_{t-1} + Delta_t, x_{t+1} = x_t + m_t; with beta = 0 the mean itself, bit for bit."""

    def rule(Delta: Tensor, m: Tensor) -> tuple[Tensor, ...]:
        m = velocity(Delta, m, beta)
        return m, m

    return rule


def started(net: nn.Module, *, initial: tuple[float, ...], per_class: bool) -> StepState:
    """The state before the first round, with one moment for each value in `initial`. Raises as `head_of`."""
    model = tensors_of(net)
    moments = tuple(
        {
            name: torch.full_like(model[name], value, dtype=_precision(model[name]))
            for name, _ in net.named_parameters()
        }
        for value in initial
    )
    if per_class:
        return StepRowState(model, head=head_of(net), moments=moments)
    return StepState(model, moments=moments)


def stepped(state: S, average: Tensors, rule: Rule) -> S:
    """The state after a round in which `average` is the mean of the sites' models."""
    model, moments = dict(average), tuple({} for _ in state.moments)
    for name in state.moments[0]:
        precision = _precision(average[name])
        near = average[name].to(precision)
        Delta = near - state.model[name].to(precision)
        step, *kept = rule(Delta, *(moment[name] for moment in state.moments))
        model[name] = (near - (Delta - step)).to(
            average[name].dtype
        )  # x_t + step; where step = Delta, the mean exactly
        for moment, value in zip(moments, kept, strict=True):
            moment[name] = value
    return dataclasses.replace(state, model=model, moments=moments, round=state.round + 1)


def velocity(Delta: Tensor, m: Tensor, beta: float, gain: float = 1.0) -> Tensor:
    """beta * m + gain * Delta: momentum in torch's form with a gain of 1, a running mean with 1 - beta."""
    return beta * m + gain * Delta


def _precision(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
