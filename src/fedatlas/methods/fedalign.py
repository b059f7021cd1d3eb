"""FedAlign.

Mendieta, Yang, Wang, Lee, Ding, Chen. Local learning matters: rethinking data heterogeneity in federated learning.
CVPR 2022.

FedAvg, with a term in the local objective that holds the last block of the net near a slimmed one, which uses the first
of its channels alone, in how much they may stretch their input (their Lipschitz constants). For maps F_in and F_out of a
block, with the input averaged to the output's resolution of |s| voxels,

    X = F_in F_out^T / |s|                  transmitting matrix, channels in by channels out
    K = sqrt(top eigenvalue of X X^T)       by 10 steps of power iteration, per image
    L = L_sup + mu (L_sup / L_lip) L_lip    with L_lip = (K_slim - K)^2, and the ratio in brackets a constant

so that the term is always mu times the supervised loss in value, and only its gradient is of interest.

Reconstruction: the block. In the paper's classifier it is the deepest one, and of a U-Net it is that, too: the module with
which the encoder ends, its bottleneck; of several encoders the mean over theirs. What is slimmed are the inputs of all
convolutions in it: each is given the first share of its channels, and zeros for the rest; of the block's output the first
share is taken. For norms that treat each channel by itself that is the sub-block that keeps these channels. Its input is not
trained by the term, and the full block is the target, a constant.

Differences from the paper: all sites take part in every round.

Shapes: B batch, I and O channels into and out of a block, *s spatial.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import adaptive_avg_pool2d, adaptive_avg_pool3d, mse_loss

from fedatlas import losses
from fedatlas.core.batch import Batch
from fedatlas.core.contract import Site, at_site
from fedatlas.core.errors import FederationError
from fedatlas.core.options import option, options
from fedatlas.core.tensors import Tensors
from fedatlas.learning.loop import Loss, train
from fedatlas.losses import LossChoice
from fedatlas.methods.shared.averaging import answer
from fedatlas.methods.shared.features import Call, is_one_module, watched
from fedatlas.methods.shared.server_step import MeanWithMomentum
from fedatlas.methods.shared.swa import WithSWA

LEAST = 1e-12
"""Least L_lip by which the supervised loss is divided."""


@options
class FedAlign(WithSWA, MeanWithMomentum):
    """FedAvg whose last block is held near a slimmed one in its Lipschitz constant (Mendieta 2022)."""

    tasks: ClassVar[tuple[str, ...]] = ("segmentation",)

    mu: float = option(0.45, "mu: the term's part of the supervised loss; 0 is FedAvg.", ge=0)
    width: float = option(0.25, "omega: share of its channels that the slimmed block keeps.", gt=0, le=1)
    iterations: int = option(10, "Steps of power iteration.", ge=1)
    loss: LossChoice = option(LossChoice(), "L_sup, the supervised loss.")

    @at_site
    def local_update(self, site: Site, model: Tensors, round: int, rounds: int) -> dict[str, Any]:
        net = site.network(model)
        L_sup: Loss = losses.supervised(self.loss, site)
        loss = self.L(L_sup) if self.mu else L_sup
        train(site, net, loss, self.local, round=round, rounds=rounds)
        return answer(site, net, per_class=False)

    def L(self, L_sup: Loss) -> Loss:
        """The local objective with its terms."""

        def of(net: nn.Module, batch: Batch) -> dict[str, Tensor]:
            with watched(net) as seen:
                supervised = L_sup(net, batch)
            assert isinstance(supervised, Tensor)
            each = [L_lip(block, self.width, self.iterations) for block in seen.blocks]
            lipschitz = torch.stack(each).mean()
            ratio = supervised.detach() / lipschitz.detach().clamp(min=LEAST)
            return {"supervised": supervised, "lipschitz": self.mu * ratio * lipschitz}

        return of

    def examine(self, net: nn.Module, sites: Sequence[str]) -> list[str]:
        """Raises FederationError for a net that names no encoder, or whose last block is the whole encoder."""
        if is_one_module(net) and self.mu:
            raise FederationError(
                f"method fedalign: the encoder of the net {type(net).__name__} is one module, so that its last block is the "
                "whole encoder, from the image on; allowed: a net whose encoder is a list of blocks, as unet"
            )
        return []


def L_lip(block: Call, width: float, iterations: int) -> Tensor:
    """(K_slim - K)^2, the mean over the images: a scalar. block: a call of the last block; it is run once more, slimmed;
    its running statistics stay those of that call."""
    F_in = block.given.detach()
    statistics = {name: buffer.clone() for name, buffer in block.module.named_buffers()}
    with slimmed(block.module, width):
        made = functional_call(block.module, statistics, (F_in,))
    F_slim = made if isinstance(made, Tensor) else made[-1]
    a, b = (maps[:, : kept(maps.shape[1], width)] for maps in (F_in, F_slim))
    with torch.autocast(F_in.device.type, enabled=False):
        K_slim = K(a, b, iterations)
        return mse_loss(K_slim, K(F_in, block.maps[-1].detach(), iterations))


def K(F_in: Tensor, F_out: Tensor, iterations: int = 10) -> Tensor:
    """[B, 1, 1] of maps F_in [B, I, *s] and F_out [B, O, *s]."""
    X = transmitting_matrix(F_in.float(), F_out.float())
    return top_eigenvalue(X @ X.transpose(1, 2), iterations).clamp(min=torch.finfo(X.dtype).tiny).sqrt()


def transmitting_matrix(F_in: Tensor, F_out: Tensor) -> Tensor:
    """[B, I, O]: F_in F_out^T over the voxels, by their number; of maps of two resolutions the finer are averaged."""
    size = [min(pair) for pair in zip(F_in.shape[2:], F_out.shape[2:], strict=True)]
    pool = adaptive_avg_pool2d if len(size) == 2 else adaptive_avg_pool3d
    a, b = (maps if list(maps.shape[2:]) == size else pool(maps, size) for maps in (F_in, F_out))  # type: ignore[arg-type]
    return a.flatten(2) @ b.flatten(2).transpose(1, 2) / math.prod(size)


def top_eigenvalue(K: Tensor, iterations: int = 10) -> Tensor:
    """[B, 1, 1] of symmetric matrices [B, n, n] without negative eigenvalues, by power iteration from a vector of ones; 0
    for a matrix of zeros."""
    v = torch.ones(*K.shape[:2], 1, dtype=K.dtype, device=K.device)
    length = v
    for _ in range(iterations):
        m = K @ v
        length = torch.linalg.vector_norm(m, dim=1, keepdim=True)
        v = m / length.clamp(min=torch.finfo(K.dtype).tiny)
    return length


def kept(channels: int, width: float) -> int:
    """How many channels the share `width` is: rounded down, but one at least."""
    return max(1, int(channels * width))


@contextmanager
def slimmed(block: nn.Module, width: float) -> Iterator[None]:
    """Within it every convolution of a block sees the first of its channels alone. Raises FederationError for a block
    without convolutions."""
    layers = [layer for layer in block.modules() if isinstance(layer, nn.modules.conv._ConvNd)]
    if not layers:
        raise FederationError(
            f"method fedalign: the encoder ends with a {type(block).__name__}, which has no convolutions that could be "
            "slimmed; take another net, as unet"
        )

    def first(layer: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        x: Tensor = given[0]
        use = torch.arange(x.shape[1], device=x.device) < kept(x.shape[1], width)
        return (torch.where(use.reshape(-1, *[1] * (x.dim() - 2)), x, 0), *given[1:])

    hooks = [layer.register_forward_pre_hook(first) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
