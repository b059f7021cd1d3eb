"""First weights of a second net, drawn from those of the first."""

import torch
from torch import nn

from fedatlas.core.tensors import Tensors, tensors_of


def redrawn(net: nn.Module, rng: torch.Generator) -> Tensors:
    """The tensors of a net, the entries of each of its parameters in an order drawn by `rng`, a CPU generator; buffers
    stay as they are."""
    parameters = {name for name, _ in net.named_parameters()}
    return {
        name: value.flatten()[torch.randperm(value.numel(), generator=rng)].reshape(value.shape)
        if name in parameters
        else value
        for name, value in tensors_of(net).items()
    }
