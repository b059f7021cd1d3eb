"""FedAvg.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas. Communication-efficient learning of deep networks from
decentralized data. AISTATS 2017.

Every site trains the global model on its own cases; the server takes the weighted mean. With the marginal loss
(or the masked loss, where classes overlap) it is the baseline for partial labels of all later papers.

Differences from the paper: all sites take part in every round.
"""

import dataclasses
from typing import Any

from torch import nn

from fedatlas import losses
from fedatlas.core.contract import Clients, Site, State, at_site
from fedatlas.core.labels import LabelSpace
from fedatlas.core.options import option, options
from fedatlas.core.tensors import Tensors
from fedatlas.learning.loop import Local, train
from fedatlas.losses import LossChoice
from fedatlas.methods.shared.weighting import (
    SENDS,
    SENDS_PER_CLASS,
    RowState,
    Weighting,
    answer,
    mean,
    started,
)


@options
class FedAvg:
    """The mean of locally trained models, with a loss that respects missing labels (McMahan 2017)."""

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

    def start(self, net: nn.Module, clients: Clients) -> State:
        return started(net, per_class=not self.aggregate_unlabelled_rows)

    @property
    def state(self) -> type[State]:
        return State if self.aggregate_unlabelled_rows else RowState

    @property
    def sends(self) -> dict[str, str]:
        return SENDS if self.aggregate_unlabelled_rows else SENDS_PER_CLASS

    @property
    def summed(self) -> Weighting | None:
        return self.weights if self.aggregate_unlabelled_rows else None

    def round(self, state: State, clients: Clients) -> State:
        replies = clients.call(self.local_update, model=state.model, round=state.round, rounds=state.rounds)
        model = mean(replies, state, self.weights)  # Alg. 1, w_{t+1}
        return dataclasses.replace(state, model=model, round=state.round + 1)

    @at_site
    def local_update(self, site: Site, model: Tensors, round: int, rounds: int) -> dict[str, Any]:
        net = site.network(model)
        loss = losses.supervised(self.loss, site)
        train(site, net, loss, self.local, round=round, rounds=rounds)  # Alg. 1, ClientUpdate
        return answer(site, net, per_class=not self.aggregate_unlabelled_rows)
