"""FedProx.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith. Federated optimization in heterogeneous networks. MLSys 2020.

FedAvg, with a term in the local objective that holds the weights near the global model of the round.

Differences from the paper: all sites take part in every round, and all do the same local work.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedatlas import losses
from fedatlas.core.batch import Batch
from fedatlas.core.contract import Clients, Site, State, at_site
from fedatlas.core.options import option, options
from fedatlas.core.tensors import Tensors
from fedatlas.learning.loop import train
from fedatlas.methods.shared.averaging import Averaging, answer, mean


@options
class FedProx(Averaging):
    """FedAvg whose local weights are pulled towards the global model (Li 2020)."""

    mu: float = option(0.01, "mu: strength of the pull towards the global model; 0 is FedAvg.", ge=0)

    @at_site
    def local_update(self, site: Site, model: Tensors, round: int, rounds: int) -> dict[str, Any]:
        net = site.network(model)
        w_t = [parameter.detach().clone() for parameter in net.parameters()]
        F_k = losses.supervised(self.loss, site)

        def h_k(net: nn.Module, batch: Batch) -> dict[str, Tensor]:  # Eq. (2)
            return {"supervised": F_k(net, batch), "proximal": self.proximal(list(net.parameters()), w_t)}

        train(site, net, h_k, self.local, round=round, rounds=rounds)
        return answer(site, net, per_class=self.per_class)

    def proximal(self, w: Sequence[Tensor], w_t: Sequence[Tensor]) -> Tensor:
        """mu / 2 * ||w - w_t||^2 over all parameters; buffers are no parameters."""
        squares = [(a - b).square().sum() for a, b in zip(w, w_t, strict=True)]
        return self.mu / 2 * torch.stack(squares).sum()  # Eq. (2), second term

    def round(self, state: State, clients: Clients) -> State:
        replies = clients.call(self.local_update, model=state.model, round=state.round, rounds=state.rounds)
        model = mean(replies, state, self.weights)  # Alg. 2, line 6
        return dataclasses.replace(state, model=model, round=state.round + 1)
