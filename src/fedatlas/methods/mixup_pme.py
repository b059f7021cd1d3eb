"""MixUp-PME: mixed images, with pseudo labels where one of the two lacks an annotation.

Dong, Wang, Voiculescu. Revisiting vicinal risk minimization for partially supervised multi-label classification under
data scarcity. CVPR workshops 2022, arXiv 2204.08954. Used as a centralised baseline by FedPSL (Dong et al., IEEE Trans.
Med. Imaging 2023, Section VII-B).

RECONSTRUCTION. We had neither code nor the paper's equations; FedPSL says no more than "data augmentation and pseudo
labeling", with "the default hyperparameters". Ours: two images of a batch are mixed as in MixUp (Zhang et al., ICLR 2018). Of a class that both
annotate the labels are mixed; of one that only one annotates, the net's own probability stands for the missing label,
told in evaluation mode, so that this pass moves no statistics of normalisation; of one that neither annotates nothing is
learnt. alpha is MixUp's own for CIFAR-10.

Shapes: B batch, C classes, *S spatial.
"""

from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from fedatlas import losses
from fedatlas.core.batch import Batch
from fedatlas.core.contract import Site, at_site
from fedatlas.core.options import option, options
from fedatlas.core.outputs import evaluating
from fedatlas.core.tensors import Tensors, tensors_of
from fedatlas.learning.loop import train
from fedatlas.losses import LossChoice
from fedatlas.losses.heads import full_precision
from fedatlas.methods.shared.averaging import Pooled


@options
class MixUpPME(Pooled):
    """MixUp whose missing labels are the net's own; centralised, a reconstruction (Dong 2022)."""

    tasks: ClassVar[tuple[str, ...]] = ("classification",)

    alpha: float = option(1.0, "alpha: of the Beta(alpha, alpha) from which the share lambda comes.", gt=0)
    loss: LossChoice = option(LossChoice(), "The supervised loss, here of mixed labels.")

    @at_site
    def local_update(self, site: Site, model: Tensors, round: int, rounds: int) -> dict[str, Any]:
        net = site.network(model)
        supervised = losses.for_site(self.loss, site)

        def L(net: nn.Module, batch: Batch) -> Tensor:
            with torch.no_grad(), evaluating(net):
                p = full_precision(net(batch.image)).sigmoid()
            lambda_, j = self.pairs(len(batch.image), site.rng)
            x, y, known = mixed(batch, p, lambda_, j)
            return supervised(net(x), y, known)

        train(site, net, L, self.local, round=round, rounds=rounds)
        return {"model": tensors_of(net), "n": site.n_train}

    def pairs(self, count: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        """(lambda, j): the share of every image in its pair, [B] float32, and its partner, [B] int64."""
        j = torch.randperm(count, generator=rng)
        drawn = np.random.default_rng(int(torch.randint(2**62, (), generator=rng)))
        return torch.from_numpy(drawn.beta(self.alpha, self.alpha, count)).float(), j


def mixed(batch: Batch, p: Tensor, lambda_: Tensor, j: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(image [B, I, *S], target [B, C], known [B, C]): every sample i mixed with its partner j[i].

    x = lambda x_i + (1 - lambda) x_j, and likewise y, in which p [B, C], the net's probability, stands for what its
    sample does not annotate; a class is known where either of the two annotates it.
    """
    lambda_, j = lambda_.to(p), j.to(p.device)
    share = lambda_.reshape(-1, *[1] * (batch.image.dim() - 1)).to(batch.image.dtype)
    image = share * batch.image + (1 - share) * batch.image[j]
    y = torch.where(batch.known, batch.target.to(p.dtype), p)
    target = lambda_[:, None] * y + (1 - lambda_[:, None]) * y[j]
    return image, target, batch.known | batch.known[j]
