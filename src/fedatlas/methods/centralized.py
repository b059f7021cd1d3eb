"""Centralised training: the upper end of the scale.

One site holds the cases of all. Its batches mix samples of different label sets, each with its own `known`, so
the loss is the same as in the federation. One round is one exchange's worth of local training.
"""

from typing import Any

from fedatlas import losses
from fedatlas.core.contract import Site, at_site
from fedatlas.core.options import options
from fedatlas.core.tensors import Tensors, tensors_of
from fedatlas.learning.loop import train
from fedatlas.methods.shared.averaging import Pooled
from fedatlas.methods.shared.swa import WithSWA


@options
class Centralized(WithSWA, Pooled):
    """Ordinary training on the union of all cases, each with its own label set; no federation."""

    @at_site
    def local_update(self, site: Site, model: Tensors, round: int, rounds: int) -> dict[str, Any]:
        net = site.network(model)
        loss = losses.supervised(self.loss, site)
        train(site, net, loss, self.local, round=round, rounds=rounds)
        return {"model": tensors_of(net), "n": site.n_train}
