"""FedDyn.

Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama. Federated learning based on dynamic regularization.
ICLR 2021.

A linear and a quadratic term in the local objective, renewed in every round, make the stationary points of all local
objectives those of the global one.

    site k:   w_k = argmin f_k(w) - <g_k, w> + alpha/2 ||w - w^t||^2      Alg. 1; Eq. (1)
              g_k <- g_k - alpha (w_k - w^t)                              the gradient of f_k at w_k, at a minimum
    server:   h <- h - alpha/m sum_k (w_k - w^t);   w <- mean_k w_k - h / alpha

Differences from the paper: all sites take part in every round; m is the number of sites, and the sums are over those
that answered. The local minimum is what `local` reaches. The gradient of both terms is added to that of f_k before it
is clipped and before the optimizer sees it; a parameter that gets no gradient from a batch is not moved by that batch.
Both terms are of parameters; buffers are averaged plainly. h is made of the models that arrive: what compression or
privacy changes in them adds up in it.

Differences from the official code: it keeps -g_k / alpha, divides alpha by K n_k / n, and clips at 10
(`local.clip`).

The server steps beyond the mean even where alpha is tiny: after one round h / alpha is w^0 - mean, whatever alpha is.
alpha = 0 has no such limit; it is defined here as no term and no h, FedAvg with equal weights.
"""

from collections.abc import Collection
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fedatlas import losses
from fedatlas.core.contract import Clients, Site, State, at_site
from fedatlas.core.options import option, options
from fedatlas.core.tensors import Tensors, average
from fedatlas.learning.loop import Loop
from fedatlas.methods.shared.averaging import SENDS, Supervised, answer
from fedatlas.methods.shared.server_step import Rule, StepState, started, stepped

MEMORY = "feddyn.g"
"""The key of a site's memory with g_k, by the names of the parameters."""


@options
class FedDyn(Supervised):
    """Local objectives whose regularisation is renewed so that all agree in the end (Acar 2021)."""

    state: ClassVar[type[State]] = StepState
    """Its only moment is h."""
    sends: ClassVar[dict[str, str]] = SENDS
    summed: ClassVar[str] = "equal"

    alpha: float = option(
        0.01, "alpha: strength of the dynamic regulariser; 0 is FedAvg with equal weights.", ge=0
    )

    def start(self, net: nn.Module, clients: Clients) -> StepState:
        return started(net, initial=(0.0,), per_class=False)  # h = 0

    def round(self, state: StepState, clients: Clients) -> StepState:
        replies = clients.call(self.local_update, model=state.model, round=state.round, rounds=state.rounds)
        mean = average(replies.each("model"), [1] * len(replies.sites))
        share = 1 - len(clients.lost) / len(clients.sites)
        return stepped(state, mean, server_rule(self.alpha, share))

    @at_site
    def local_update(self, site: Site, model: Tensors, round: int, rounds: int) -> dict[str, Any]:
        net = site.network(model)
        f_k = losses.supervised(self.loss, site)
        kept: Any = site.memory.get(MEMORY, {})
        dynamic = Dynamic(net, kept, self.alpha)
        loop = Loop(site, net, self.local, round=round, rounds=rounds)
        for batch in loop:
            with loop.autocast():
                value = f_k(net, batch)
            loop.note(value)
            loop.move(dynamic.corrected(loop.gradients(value)))  # Eq. (1)
        site.memory[MEMORY] = dict(dynamic.g_after())
        return answer(site, net, per_class=False)


class Dynamic:
    """A site's half of FedDyn in one round. net: with w^t, the global model, in it. g_k: by the names of its
    parameters; 0 where it has none. without: names of parameters that are not regularised. Several optimizers may go by
    one regulariser."""

    def __init__(self, net: nn.Module, g_k: Tensors, alpha: float, without: Collection[str] = ()) -> None:
        self.alpha = alpha
        self.w = {name: p for name, p in net.named_parameters() if name not in without}
        self.w_t = {name: p.detach().clone() for name, p in self.w.items()}
        self.g_k = {
            name: g_k[name].to(p) if name in g_k else torch.zeros_like(p) for name, p in self.w.items()
        }

    @torch.no_grad()
    def corrected(self, gradients: Tensors) -> Tensors:
        """The gradients of f_k with those of the linear and the quadratic term, alpha (w - w^t) - g_k. A parameter that
        has no gradient of f_k gets none."""
        return {
            name: g + (self.alpha * (self.w[name] - self.w_t[name]) - self.g_k[name]) if name in self.w else g
            for name, g in gradients.items()
        }

    @torch.no_grad()
    def g_after(self) -> Tensors:
        """g_k - alpha (w_k - w^t), on the CPU."""
        return {
            name: (self.g_k[name] - self.alpha * (p - self.w_t[name])).cpu() for name, p in self.w.items()
        }


def server_rule(alpha: float, share: float) -> Rule:
    """The server's step from Delta = mean - w^t and h. share: of the sites that answered, |P| / m."""

    def rule(Delta: Tensor, h: Tensor) -> tuple[Tensor, ...]:
        if alpha == 0:
            return Delta, h
        h = h - alpha * share * Delta
        return Delta - h / alpha, h

    return rule
