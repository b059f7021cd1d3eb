"""How much each site counts in the mean: of the whole model, or of each class's row of its head.

Shapes: K sites, C classes.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvTransposeNd

from fedatlas.core.contract import Replies, Site, State
from fedatlas.core.errors import FederationError
from fedatlas.core.tensors import Tensors, average, forms_of, parts, tensors_of

Weighting = Literal["cases", "equal"]

SENDS = {"model": "model", "n": "cases"}
SENDS_PER_CLASS = SENDS | {"labelled": "per class"}
"""What a site answers where every row of the head has weights of its own."""


@dataclass(frozen=True)
class RowState(State):
    """A state whose head is averaged row by row. head: tensor of the head -> its axis of classes."""

    head: dict[str, int] = field(default_factory=dict)


def started(net: nn.Module, *, per_class: bool) -> State:
    """The state before the first round; with `per_class` the head will be averaged row by row. Raises as `head_of`."""
    return RowState(tensors_of(net), head=head_of(net)) if per_class else State(tensors_of(net))


def mean(replies: Replies, state: State, rule: Weighting) -> Tensors:
    """The next global model: the weighted mean of the replies, its head row by row for a `RowState`."""
    models, weights = replies.each("model"), site_weights(replies, rule)
    if not isinstance(state, RowState):
        return average(models, weights)
    return average_rows(models, weights, row_weights(replies, rule), head=state.head, old=state.model)


def site_weights(replies: Replies, rule: Weighting) -> list[float]:
    """[K] the training cases "n" of every reply, or 1 for each."""
    return replies.plain("n") if rule == "cases" else [1] * len(replies.sites)


def row_weights(replies: Replies, rule: Weighting) -> list[list[float]]:
    """[K, C] the training cases "labelled" in which class c is annotated, or 1 where there is any."""
    labelled = replies.plain("labelled")
    return labelled if rule == "cases" else [[int(n > 0) for n in row] for row in labelled]


def answer(site: Site, net: nn.Module, *, per_class: bool) -> dict[str, Any]:
    """The reply of a trained site: its model and n_k, and with `per_class` n_k^c for each class c."""
    own = {"model": tensors_of(net), "n": site.n_train}
    return own | ({"labelled": site.n_labelled.tolist()} if per_class else {})


def head_of(net: nn.Module) -> dict[str, int]:
    """The tensors of a net's part "head", each with the axis along which its classes lie: the first, but the
    second of the kernel of a transposed convolution.

    Raises FederationError where the net names no head, or a tensor of it does not have one entry per class.
    """
    names = parts(net).get("head", ())
    if not names:
        raise FederationError(
            f'net {type(net).__name__}: names no part "head", whose rows are to be averaged one by one; take a '
            "registered net, or average all rows alike"
        )
    kernels = {
        f"{name}.weight".lstrip(".")
        for name, module in net.named_modules()
        if isinstance(module, _ConvTransposeNd)
    }
    shapes = {name: shape for name, (_, shape) in forms_of(net).items()}
    axes = {name: int(name in kernels) for name in names}
    sizes = {name: shapes[name][axis] if shapes[name] else 0 for name, axis in axes.items()}
    classes = getattr(net, "classes", max(sizes.values()))
    for name, size in sizes.items():
        if size != classes:
            raise FederationError(
                f"net {type(net).__name__}: {name} of its head is {list(shapes[name])}, not one row for each "
                f"of {classes} classes; its rows cannot be averaged one by one"
            )
    return axes


def average_rows(
    models: Iterable[Mapping[str, Tensor]],
    weights: Sequence[float],
    rows: Sequence[Sequence[float]],
    *,
    head: Mapping[str, int],
    old: Tensors,
) -> Tensors:
    """The weighted mean of K models (`tensors.average`) in which row c of the head has weights of its own.

    weights: [K], of everything but the head. rows: [K, C], of the head, as `head_of` gives it. A row whose weights
    are all 0 stays as it is in `old`.

    Source: FedPSL (`methods.fedpsl`), Eq. (9). Raises FederationError unless there is one weight per row.
    """
    phi = torch.as_tensor(rows, dtype=torch.float64)
    for name, axis in head.items():
        if phi.dim() != 2 or phi.shape[1] != old[name].shape[axis]:
            raise FederationError(
                f"the sites count annotated cases for {[len(row) for row in rows]} classes; {name} has "
                f"{old[name].shape[axis]}"
            )
    nobody = phi.sum(0) == 0
    phi[:, nobody] = 1  # any weights that can be divided by: these rows are not used
    moved = ({name: _turned(tensor, head.get(name, 0)) for name, tensor in model.items()} for model in models)
    mean = average(moved, weights, each=dict.fromkeys(head, phi))
    for name, axis in head.items():
        mean[name][nobody] = _turned(old[name], axis)[nobody]
        mean[name] = _turned(mean[name], axis).contiguous()
    return mean


def _turned(tensor: Tensor, axis: int) -> Tensor:
    """With the given axis and the first exchanged."""
    return tensor.transpose(0, axis) if axis else tensor
