"""FixMatch: simplifying semi-supervised learning with consistency and confidence.

Sohn, Berthelot, Li, Zhang, Carlini, Cubuk, Kurakin, Zhang, Raffel. NeurIPS 2020. For partial labels as in FedPSL
(Dong et al., IEEE Trans. Med. Imaging 2023, Section VII-B): centralised, on the union of all cases.

What a sample annotates is learnt from its labels, as ever. A class that it does not annotate gets a pseudo label from
the net's own output on the batch as it comes (the weak view), where that output is sure enough, and the output on a
strongly varied view is to agree with it.

Differences from the paper: every class is a yes or no of its own; p, the confidence max(p, 1 - p) and the pseudo label
1[p > 1/2] are per sample and class. Labelled and unlabelled samples are not separate batches: a sample is labelled for
some classes and unlabelled for the others. The weak view serves the supervised term too. tau is 0.75, FedMatch's, as
FedPSL states; the paper has 0.95. As in the official code the mean is over all unlabelled pairs, sure or not. The result is
the net as trained, where the official code evaluates the moving mean of its weights, of which FedPSL says nothing.

Shapes: B batch, C classes.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fedatlas import losses
from fedatlas.core.batch import Batch
from fedatlas.core.contract import Site, at_site
from fedatlas.core.options import option, options
from fedatlas.core.tensors import Tensors, tensors_of
from fedatlas.learning import augment
from fedatlas.learning.augment import Augmentation
from fedatlas.learning.loop import train
from fedatlas.losses import LossChoice
from fedatlas.losses.consistency import is_confident, mean_over, pseudo_bce
from fedatlas.losses.heads import full_precision
from fedatlas.methods.shared.averaging import Pooled


@options
class FixMatch(Pooled):
    """Pseudo labels of one's own where one is sure, for strongly varied images; centralised (Sohn 2020)."""

    tasks: ClassVar[tuple[str, ...]] = ("classification",)

    threshold: float = option(
        0.75, "tau: least confidence of a pseudo label; above 1 there are none.", ge=0.5
    )
    lambda_u: float = option(1.0, "lambda_u: weight of the pseudo labels.", ge=0)
    strong: Augmentation = option(
        augment.STRONG, "The strong view; keys left out have the values of this default."
    )
    loss: LossChoice = option(LossChoice(), "l_s, the supervised loss.")

    @at_site
    def local_update(self, site: Site, model: Tensors, round: int, rounds: int) -> dict[str, Any]:
        net = site.network(model)
        supervised = losses.for_site(self.loss, site)
        pairs = torch.zeros(2, dtype=torch.float64)
        """Confident pairs, and all that are not annotated."""

        def L(net: nn.Module, batch: Batch) -> dict[str, Tensor]:
            z = net(batch.image)
            p = full_precision(z).detach().sigmoid()
            sure = is_confident(p, batch.known, self.threshold)
            pairs.add_(torch.stack([sure.sum(), (~batch.known).sum()]).cpu())
            l_u = p.new_zeros(())
            if self.lambda_u and bool(sure.any()):
                x, _ = augment.augment(batch.image, batch.target, self.strong, site.rng)
                l_u = self.lambda_u * unlabelled(full_precision(net(x)), p, batch.known, self.threshold)
            return {"supervised": supervised(z, batch.target, batch.known), "pseudo": l_u}

        train(site, net, L, self.local, round=round, rounds=rounds)
        site.log(confident=float(pairs[0] / pairs[1].clamp(min=1)))
        return {"model": tensors_of(net), "n": site.n_train}


def unlabelled(z: Tensor, p: Tensor, known: Tensor, tau: float) -> Tensor:
    """l_u, Eq. (4), a scalar. z: logits of the strong view [B, C]; p: probabilities of the weak view [B, C], from which
    no gradient comes; known [B, C] bool. 0 where all is annotated."""
    sure = is_confident(p, known, tau)
    return mean_over(pseudo_bce(z, p > 0.5), sure, (~known).sum())
