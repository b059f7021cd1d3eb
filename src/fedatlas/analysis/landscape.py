"""The loss around a trained net, over a plane of two filter-normalised random directions.

Li, Xu, Taylor, Studer, Goldstein. Visualizing the loss landscape of neural nets. NeurIPS 2018, section 4.

A direction has a normal random number for every weight; each filter of it (the weights that make one output channel)
is scaled to the norm of the same filter of the net. Biases and the parameters of normalisation layers have the
direction 0, as in the paper's figures. The two directions of a plane are drawn independently and are not made
orthogonal.

The net is asked in evaluation mode. Its parameters, modes and gradients are as before afterwards, bit for bit.

Shapes: F filters, P a parameter's shape.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedatlas.core.errors import FederationError
from fedatlas.core.outputs import evaluating
from fedatlas.core.tensors import Tensors, require_same

Loss = Callable[[nn.Module, Any], Tensor]
"""(net, batch) -> the loss of the batch, one number; the net stands in evaluation mode."""

_NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(frozen=True)
class Surface:
    """The mean loss over a plane: losses[i, j] at weights + first[i] * direction 1 + second[j] * direction 2, float64;
    not finite where the loss is not."""

    first: Tensor
    second: Tensor
    losses: Tensor


def random_direction(net: nn.Module, generator: torch.Generator) -> Tensors:
    """A filter-normalised direction: name -> [P] of the parameter's dtype, on the CPU, for every parameter.

    generator: a CPU generator; what is drawn depends on it and the parameters' order and shapes only.
    """
    zero = {id(p) for module in net.modules() if isinstance(module, _NORMS) for p in module.parameters()}
    transposed = transposed_of(net)
    direction: Tensors = {}
    for name, parameter in net.named_parameters():
        values = parameter.detach().to("cpu", torch.float64)
        if values.dim() < 2 or id(parameter) in zero:
            direction[name] = torch.zeros(parameter.shape, dtype=parameter.dtype)
            continue
        drawn = torch.randn(values.shape, generator=generator, dtype=torch.float64)
        groups = transposed.get(id(parameter))
        scale = filters(values, groups).norm(dim=1) / filters(drawn, groups).norm(dim=1)
        direction[name] = (drawn * _per_filter(scale, values, groups)).to(parameter.dtype)
    return direction


def surface(
    net: nn.Module,
    loss: Loss,
    batches: Sequence[Any],
    directions: tuple[Mapping[str, Tensor], Mapping[str, Tensor]],
    *,
    first: Sequence[float],
    second: Sequence[float] | None = None,
    weights: Sequence[float] | None = None,
) -> Surface:
    """The mean loss over `batches` at every point of a plane. Cost: len(first) * len(second) * len(batches) forwards.

    first, second: the steps along each direction, in units of it; second is first by default, and -1 to 1 is usual.
    weights: of the batches, as their numbers of samples; equal by default.

    Raises FederationError for no batches or no steps, for steps that are not finite, for weights that do not fit, or a
    loss that is not one number; NameMismatch for directions of another net.
    """
    parameters = dict(net.named_parameters())
    for place, direction in enumerate(directions, 1):
        require_same(parameters, direction, asked=f"loss landscape: direction {place}")
    steps = [
        torch.tensor(list(each), dtype=torch.float64) for each in (first, first if second is None else second)
    ]
    if any(each.numel() == 0 or not bool(each.isfinite().all()) for each in steps):
        raise FederationError(
            f"loss landscape: the steps are {list(first)} and {None if second is None else list(second)}; "
            "expected one or more finite numbers each"
        )
    shares = shares_of(batches, weights, what="loss landscape")
    one, two = (
        {name: direction[name].to(p.device) for name, p in parameters.items()} for direction in directions
    )
    kept = {name: p.detach().clone() for name, p in parameters.items()}
    losses = torch.zeros(len(steps[0]), len(steps[1]), dtype=torch.float64)
    with evaluating(net), torch.no_grad():
        try:
            for i, a in enumerate(steps[0].tolist()):
                for j, b in enumerate(steps[1].tolist()):
                    for name, p in parameters.items():
                        p.copy_(kept[name]).add_(one[name], alpha=a).add_(two[name], alpha=b)
                    losses[i, j] = sum(
                        share * float(one_number(loss(net, batch), what="loss landscape"))
                        for share, batch in zip(shares, batches, strict=True)
                    )
        finally:
            for name, p in parameters.items():
                p.copy_(kept[name])
    return Surface(steps[0], steps[1], losses)


def filters(weight: Tensor, transposed: int | None = None) -> Tensor:
    """A weight of two axes or more as [F, weights of a filter]: all that makes one output channel is a row.

    transposed: the groups of the transposed convolution whose weight it is, as its output channels are not the first
    axis; None for any other layer.
    """
    if transposed is None:
        return weight.flatten(1)
    grouped = weight.unflatten(0, (transposed, -1)).transpose(1, 2)
    return grouped.flatten(0, 1).flatten(1)


def transposed_of(net: nn.Module) -> dict[int, int]:
    """id of the weight of every transposed convolution -> its groups."""
    return {id(module.weight): module.groups for module in net.modules() if isinstance(module, _TRANSPOSED)}


def _per_filter(scale: Tensor, weight: Tensor, transposed: int | None) -> Tensor:
    """[F] in the form that multiplies a weight filter by filter."""
    if transposed is None:
        return scale.view(-1, *[1] * (weight.dim() - 1))
    rows = scale.view(transposed, 1, -1).expand(-1, len(weight) // transposed, -1).flatten(0, 1)
    return rows.view(*rows.shape, *[1] * (weight.dim() - 2))


def shares_of(batches: Sequence[Any], weights: Sequence[float] | None, *, what: str) -> list[float]:
    """The share of every batch in a mean; they sum to 1. Raises FederationError for no batches, or weights of another
    number, negative, not finite or with the sum 0."""
    if not len(batches):
        raise FederationError(f"{what}: no batches; at least one is needed")
    given = torch.ones(len(batches), dtype=torch.float64)
    if weights is not None:
        given = torch.tensor(list(weights), dtype=torch.float64)
        if (
            len(given) != len(batches)
            or not bool(given.isfinite().all())
            or bool((given < 0).any())
            or not given.sum()
        ):
            raise FederationError(
                f"{what}: weights {list(weights)} for {len(batches)} batches; expected one finite number of 0 or more "
                "each, not all of them 0"
            )
    return (given / given.sum()).tolist()


def one_number(loss: Any, *, what: str) -> Tensor:
    """The loss as a scalar. Raises FederationError for anything but a tensor of one number."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise FederationError(f"{what}: the loss of a batch is a tensor of one number; got {got}")
    return loss.reshape(())
