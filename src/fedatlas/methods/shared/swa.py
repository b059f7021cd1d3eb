"""Stochastic weight averaging (SWA) at the server: the model of the federation is the mean of its models in late rounds.

Izmailov, Podoprikhin, Garipov, Vetrov, Wilson. Averaging weights leads to wider optima and better generalization. UAI 2018. In federated
learning: Caldarola, Caputo, Ciccone. Improving generalization in federated learning by seeking flat minima. ECCV 2022.

    w_SWA <- (n w_SWA + w) / (n + 1)        after each round from the start on; n models are in the mean already

Sites go on from the plain model w; the mean is taken at the end, in place of the model of the last round, and is the only one that can
be the run's best. Nothing more travels. Running statistics of batch normalisation are averaged like weights; the paper gathers them
anew with the mean, so take group or instance normalisation. With a learning rate that falls to 0 late models hardly differ, and
neither does their mean; a constant one keeps them moving around an optimum, and their mean is nearer to it than any of them.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from torch import Tensor

from fedatlas.core import tensors
from fedatlas.core.contract import Clients, State
from fedatlas.core.errors import FederationError
from fedatlas.core.labels import LabelSpace
from fedatlas.core.options import option, options
from fedatlas.core.tensors import Tensors
from fedatlas.methods.shared.averaging import Supervised
from fedatlas.methods.shared.phases import begins, check_begins, check_when

S = TypeVar("S", bound=State)


@options
class WithSWA(Supervised):
    """A method whose model may be the mean of those of late rounds; its paper need not have that, and it is off by default.

    A class names it before the base whose `round` it completes: `class FedAvg(WithSWA, Averaging)`.
    """

    swa_start: float | None = option(
        None,
        "Stochastic weight averaging: the first round, from 1, whose model is in the mean that is the result, or below 1 a share of all "
        "rounds; null: the result is the model of the last round. For a learning rate that does not fall to 0 (`local.schedule`).",
        ge=0,
    )

    def check(self, space: LabelSpace) -> None:
        super().check(space)
        if self.swa_start is not None:
            check_when("method", swa_start=self.swa_start)

    def plan(self, rounds: int) -> list[str]:
        """What `check` should tell: which rounds are in the mean. Raises FederationError where there would be none."""
        told = super().plan(rounds)
        if self.swa_start is None:
            return told
        check_begins("method", rounds, swa_start=self.swa_start)
        told.append(
            f"swa_start: the model is the mean of those after rounds {first(self.swa_start, rounds)} to {rounds}"
        )
        if self.local.schedule != "constant":
            told.append(
                f"swa_start: the learning rate changes (local.schedule: {self.local.schedule}); where it falls to 0 late models hardly "
                "differ, and their mean gains little: constant is meant for it"
            )
        return told

    def best_from(self, rounds: int) -> int:
        """The mean is there after the last round, and no plain model stands in for it."""
        return super().best_from(rounds) if self.swa_start is None else rounds

    def round(self, state: Any, clients: Clients) -> State:
        return self.with_mean(super().round(state, clients))  # type: ignore[safe-super]

    def with_mean(self, state: S) -> S:
        """The state after a round, whose models enter the mean; after the last round with the mean in their place.

        Of a model that is there later than the mean began, a site's own that was lost until then, the first one counts for those rounds."""
        start = self.swa_start
        if start is None or state.round < first(start, state.rounds):
            return state
        n = state.round - first(start, state.rounds)
        late = {
            name: swa(state.late[name], model, n) if name in state.late else model
            for name, model in self.models(state).items()
        }
        if state.round < state.rounds:
            return dataclasses.replace(state, late=late)
        return dataclasses.replace(self.replaced(state, late), late={})

    def models(self, state: Any) -> dict[str, Tensors]:
        """Name -> a model that is averaged over rounds by itself."""
        return {"model": state.model}

    def replaced(self, state: Any, models: dict[str, Tensors]) -> Any:
        """The state with other models in place of those that `models` gives."""
        return dataclasses.replace(state, model=models["model"])


def first(start: float, rounds: int) -> int:
    """The first round, from 1, whose model is in the mean."""
    return max(begins(start, rounds), 1)


def swa(average: Mapping[str, Tensor], model: Mapping[str, Tensor], n: int) -> Tensors:
    """(1 - a) average + a model with a = 1 / (n + 1), where the average is over n models; n = 0 gives the model.

    Summed as by `core.tensors.average`: in float64, cast once; of integer tensors the larger. Raises FederationError for a
    negative n, NameMismatch for models of different form.
    """
    if n < 0:
        raise FederationError(f"swa: the average is over {n} models; allowed: 0 and more")
    return tensors.average([average, model], [n, 1])


def swa_count(round: int, *, start: int, cycle: int) -> int | None:
    """The n with which the model of a round enters `swa`; None: it does not. It enters at `start` and every `cycle`
    rounds after it. As in FedSAM's code n is 0 a second time at start + cycle: that model replaces the first.

    Raises FederationError for a cycle below 1.
    """
    if cycle < 1:
        raise FederationError(f"swa: a cycle of {cycle} rounds; allowed: 1 and more")
    if round < start or (round - start) % cycle:
        return None
    return max((round - start) // cycle - 1, 0)
