"""Centralised training: the upper end of the scale.

One site holds the cases of all. Its batches mix samples of different label sets, each with its own `known`, so
the loss is the same as in the federation. One round is one exchange's worth of local training.
"""

import dataclasses
from typing import Any, ClassVar

from torch import nn

from fedatlas import losses
from fedatlas.core.contract import Clients, Site, State, at_site
from fedatlas.core.labels import LabelSpace
from fedatlas.core.options import option, options
from fedatlas.core.tensors import Tensors, tensors_of
from fedatlas.learning.loop import Local, train
from fedatlas.losses import LossChoice


@options
class Centralized:
    """Ordinary training on the union of all cases, each with its own label set; no federation."""

    pooled: ClassVar[bool] = True

    loss: LossChoice = option(LossChoice(), "The supervised loss.")
    local: Local = option(Local(), "Training between two evaluations.")

    def check(self, space: LabelSpace) -> None:
        """Raises FederationError where the hyper-parameters do not fit the label space."""
        losses.make(self.loss, space)

    def start(self, net: nn.Module, clients: Clients) -> State:
        return State(model=tensors_of(net))

    def round(self, state: State, clients: Clients) -> State:
        replies = clients.call(self.local_update, model=state.model, round=state.round, rounds=state.rounds)
        [(_, reply)] = replies
        return dataclasses.replace(state, model=reply["model"], round=state.round + 1)

    @at_site
    def local_update(self, site: Site, model: Tensors, round: int, rounds: int) -> dict[str, Any]:
        net = site.network(model)
        loss = losses.supervised(self.loss, site)
        train(site, net, loss, self.local, round=round, rounds=rounds)
        return {"model": tensors_of(net), "n": site.n_train}
