"""MOON: model-contrastive federated learning.

Li, He, Song. Model-contrastive federated learning. CVPR 2021.

FedAvg, with a term in the local objective that draws the features z of an image towards those that the global model of
the round gives it, and away from those of the site's own model of the round before:

    l_con = -log( exp(sim(z, z_glob) / tau) / (exp(sim(z, z_glob) / tau) + exp(sim(z, z_prev) / tau)) )     Eq. (3)
    l     = l_sup + mu l_con                                                                               Eq. (4)

sim is the cosine. In its first round a site has no model of before, and l_con is 0 (UFPS, of which MOON is a baseline); by
`first` it can be a net with weights of its own, as the site's first net is in the official code.

Features are the means of the maps that the encoder ends with, of a U-Net its bottleneck, as UFPS has it.

The server takes the mean, Alg. 1, line 8.

Differences from the paper: no projection between encoder and features, which in the paper lies within its classifier, on
the way to the logits; a U-Net has no such place. All sites take part in every round, so that the model of before is that
of the last round.

Shapes: B batch, d features.
"""

from collections.abc import Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, cross_entropy

from fedatlas import losses
from fedatlas.core.batch import Batch
from fedatlas.core.contract import Site, at_site
from fedatlas.core.options import option, options
from fedatlas.core.tensors import Tensors
from fedatlas.learning.loop import Loss, train
from fedatlas.methods.shared.averaging import answer
from fedatlas.methods.shared.features import pooled, watched
from fedatlas.methods.shared.redrawn import redrawn
from fedatlas.methods.shared.server_step import MeanWithMomentum
from fedatlas.methods.shared.swa import WithSWA

MEMORY = "moon.previous"
"""The key of a site's memory with its model of the round before."""


@options
class MOON(WithSWA, MeanWithMomentum):
    """FedAvg whose features are held near the global model's and away from the site's last ones (Li 2021)."""

    mu: float = option(1.0, "mu: weight of the contrastive term; 0 is FedAvg.", ge=0)
    tau: float = option(0.5, "tau: temperature of the cosines.", gt=0)
    first: Literal["none", "redrawn"] = option(
        "none",
        "What features are held away from in a site's first round: nothing, so that there is no contrastive term; or "
        "those of a net whose weights are drawn anew.",
    )

    @at_site
    def local_update(self, site: Site, model: Tensors, round: int, rounds: int) -> dict[str, Any]:
        net = site.network(model)
        loss: Loss = losses.supervised(self.loss, site)
        if self.mu:
            before = cast(Tensors, site.memory.get(MEMORY, {}))
            if not before and self.first == "redrawn":
                before = redrawn(net, site.rng)
            if before:
                w_glob, w_prev = (frozen(site, values) for values in (model, before))
                loss = self.l(loss, w_glob, w_prev)
        train(site, net, loss, self.local, round=round, rounds=rounds)
        reply = answer(site, net, per_class=False)
        if self.mu:
            site.memory[MEMORY] = dict(reply["model"])
        return reply

    def l(self, l_sup: Loss, w_glob: nn.Module, w_prev: nn.Module) -> Loss:  # noqa: E743  (the paper's letter)
        """The local objective with its terms, Eq. (4)."""

        def of(net: nn.Module, batch: Batch) -> dict[str, Tensor]:
            with watched(net) as seen:
                supervised = l_sup(net, batch)
            assert isinstance(supervised, Tensor)
            z_glob, z_prev = (features(frozen, batch.image) for frozen in (w_glob, w_prev))
            contrast = l_con(pooled(seen.bottleneck), z_glob, z_prev, self.tau)
            return {"supervised": supervised, "contrast": self.mu * contrast}

        return of

    def examine(self, net: nn.Module, sites: Sequence[str]) -> list[str]:
        """Raises FederationError for a net that names no encoder."""
        with watched(net):
            return []


def l_con(z: Tensor, z_glob: Tensor, z_prev: Tensor, tau: float) -> Tensor:
    """Eq. (3), the mean over the batch. z: features [B, d], of the net that is trained, the global and the previous one."""
    cosines = torch.stack([cosine_similarity(z, other, dim=1) for other in (z_glob, z_prev)], 1)
    return cross_entropy(cosines / tau, torch.zeros(len(z), dtype=torch.long, device=z.device))


def features(net: nn.Module, image: Tensor) -> Tensor:
    """[B, d] of a net that is not trained; only its encoder is asked."""
    with torch.no_grad(), watched(net, encoder_only=True) as seen:
        net(image)
    return pooled(seen.bottleneck)


def frozen(site: Site, values: Tensors) -> nn.Module:
    """A net that is not trained, in evaluation mode."""
    return site.network(values).eval().requires_grad_(False)
