"""How alike two nets are, layer by layer: linear centred kernel alignment (CKA).

Kornblith, Norouzi, Lee, Hinton. Similarity of neural network representations revisited. ICML 2019. UFPS (Supplementary
Figure S3) applies it to a layer's parameters, whose rows are the output filters; Kornblith et al. to its activations.

CKA is 1 for matrices that are equal up to a rotation of their columns, a scale and a shift, and 0 where no column of one
is correlated with a column of the other. All sums are in float64.

Shapes: n rows, p and q columns, B batch, I input channels, *S spatial, C channels of a layer's output, *s its size.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedatlas.analysis.landscape import filters, transposed_of
from fedatlas.core.errors import FederationError, NameMismatch
from fedatlas.core.outputs import evaluating

Rows = Literal["positions", "samples"]

EQUAL = 1e-12
"""The part of a matrix below which what its rows differ by is rounding."""

_LAYERS = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)


def cka(x: Tensor, y: Tensor) -> float:
    """||Y^T X||^2 / (||X^T X|| ||Y^T Y||) in Frobenius norms, 0 to 1, of x [n, p] and y [n, q] with centred columns.

    NaN where it is not defined: all rows of x or of y are equal. Raises FederationError for anything but two matrices of
    finite numbers with the same number of rows.
    """
    if x.dim() != 2 or y.dim() != 2 or len(x) != len(y) or not len(x):
        raise FederationError(
            f"CKA: matrices of shapes {list(x.shape)} and {list(y.shape)}; expected [n, p] and [n, q], n of 1 or more"
        )
    if not bool(x.isfinite().all()) or not bool(y.isfinite().all()):
        raise FederationError("CKA: a matrix has numbers that are not finite")
    x, y = _centred(x), _centred(y)
    n = len(x)
    if n <= max(x.shape[1], y.shape[1]):
        k, l = x @ x.T, y @ y.T
        return _ratio((k * l).sum(), k.norm(), l.norm())
    return _ratio((y.T @ x).square().sum(), (x.T @ x).norm(), (y.T @ y).norm())


def cka_parameters(first: nn.Module, second: nn.Module) -> dict[str, float]:
    """CKA of the weights of every convolution and linear layer that both nets have: layer -> value. A row is an output
    filter, its columns the filter's weights; biases take no part. NaN as in `cka`, so for a layer of one filter.

    Raises NameMismatch where the nets' layers differ in names or in the shapes of their weights.
    """
    one, two = _layers(first), _layers(second)
    _require_same(one, two)
    groups = transposed_of(first)
    return {
        name: cka(*(filters(_weight(each), groups.get(id(layer.weight))) for each in (layer, two[name])))
        for name, layer in one.items()
    }


def cka_activations(
    first: nn.Module,
    second: nn.Module,
    images: Sequence[Tensor],
    *,
    rows: Rows = "positions",
    layers: Sequence[str] | None = None,
) -> dict[str, float]:
    """CKA of the outputs of layers of two nets on the same images: layer -> value.

    images: batches [B, I, *S]. layers: names of modules that both nets have and that give one tensor [B, C, *s] or
    [B, C] (a linear layer: [B, *s, C]); by default every convolution and linear layer that is run. Of a layer that runs
    several times the last output counts.

    rows: "positions": a row is a position of an image, its columns the C channels; nothing is kept but sums [C, C].
    "samples": a row is an image, its columns all numbers of its output, as in Kornblith et al.; with fewer images than
    columns the values are biased upwards, and the outputs of all images are kept.

    Both nets are asked in evaluation mode and are as before afterwards. Raises FederationError for no images, for a
    layer that there is not, is not run or gives something else, and for outputs whose rows differ in number;
    NameMismatch where `layers` is left out and the nets' layers differ.
    """
    if not len(images):
        raise FederationError("CKA: no images; at least one batch is needed")
    if rows not in ("positions", "samples"):
        raise FederationError(f"CKA: rows are {rows!r}; allowed: positions, samples")
    if layers is None:
        _require_same(_layers(first), _layers(second))
        names = list(_layers(first))
    else:
        names = list(layers)
    sums: dict[str, _Sums] = {}
    kept: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for batch in images:
        one, two = (_outputs(net, batch, names) for net in (first, second))
        for name in names:
            if layers is None and name not in one and name not in two:
                continue
            if name not in one or name not in two:
                raise FederationError(f"CKA: the layer {name!r} did not run in both nets; leave it out")
            x, y = _rows(one[name], rows, name), _rows(two[name], rows, name)
            if len(x) != len(y):
                raise FederationError(
                    f"CKA: layer {name!r} gives {list(one[name].shape)} in one net and {list(two[name].shape)} in the "
                    "other; the rows must be of the same number"
                )
            if rows == "positions":
                sums.setdefault(name, _Sums(x, y)).add(x, y)
            else:
                kept.setdefault(name, []).append((x, y))
    if rows == "positions":
        return {name: each.cka() for name, each in sums.items()}
    return {
        name: cka(*(torch.cat(list(side)) for side in zip(*pairs, strict=True)))
        for name, pairs in kept.items()
    }


def cka_between(
    first: nn.Module, second: nn.Module, images: Sequence[Tensor], *, cells: int = 4
) -> tuple[list[str], list[str], Tensor]:
    """CKA of the outputs of every layer of one net with every layer of another, on the same images: (layers of the
    first, layers of the second, values [K, L] float64), of every convolution and linear layer that is run.

    images: batches [B, I, *S]. As layers differ in size, each output is averaged over `cells` cells along every spatial
    axis first (one without axes is the same in all cells): a row is a cell of an image, its columns the C channels. The
    diagonal of a net with itself is 1. NaN as in `cka`.

    Both nets are asked in evaluation mode and are as before afterwards. Raises FederationError for no images, cells below
    1, and layers that give something else than one tensor.
    """
    if not len(images) or cells < 1:
        raise FederationError(
            f"CKA: {len(images)} batches of images and {cells} cells; allowed: 1 or more of both"
        )
    kept: list[dict[str, list[Tensor]]] = [{}, {}]
    for batch in images:
        for net, of_net in zip((first, second), kept, strict=True):
            for name, output in _outputs(net, batch, list(_layers(net))).items():
                of_net.setdefault(name, []).append(_cells(output, cells, batch.dim() - 2, name))
    one, two = ({name: torch.cat(rows) for name, rows in of_net.items()} for of_net in kept)
    values = [[cka(x, y) for y in two.values()] for x in one.values()]
    return list(one), list(two), torch.tensor(values, dtype=torch.float64)


def _cells(output: Any, cells: int, axes: int, name: str) -> Tensor:
    """[B * cells ** axes, C] the means of a layer's output over cells."""
    if not isinstance(output, Tensor) or output.dim() < 2:
        return _rows(output, "positions", name)  # raises
    if output.dim() == 2:
        output = output[(..., *[None] * axes)]
    pool = (
        nn.functional.adaptive_avg_pool1d,
        nn.functional.adaptive_avg_pool2d,
        nn.functional.adaptive_avg_pool3d,
    )
    mean: Tensor = pool[output.dim() - 3](output.float(), cells)
    return _rows(mean, "positions", name)


class _Sums:
    """CKA from sums over rows x [n, p] and y [n, q] that come in batches: of their products about a fixed row, and of
    the rows.

    x, y: the first of them, not yet added.
    """

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.count, self.split = 0, x.shape[1]
        # near the mean, so that what is subtracted at the end is small
        self.shift = torch.cat([x.double(), y.double()], 1).mean(0)
        self.total = torch.zeros_like(self.shift)
        self.products = torch.zeros(len(self.shift), len(self.shift), dtype=torch.float64)

    def add(self, x: Tensor, y: Tensor) -> None:
        """Further rows."""
        both = torch.cat([x.double(), y.double()], 1) - self.shift
        self.count += len(both)
        self.total += both.sum(0)
        self.products += both.T @ both

    def cka(self) -> float:
        """Of all rows so far."""
        scatter = self.products - self.total.outer(self.total) / self.count
        if not bool(scatter.isfinite().all()):
            raise FederationError("CKA: a layer's output has numbers that are not finite")
        raw = self.products.diag() + self.count * self.shift.square()
        p = self.split
        x, y, between = scatter[:p, :p], scatter[p:, p:], scatter[p:, :p]
        if x.trace() <= EQUAL**2 * raw[:p].sum() or y.trace() <= EQUAL**2 * raw[p:].sum():
            return math.nan
        return _ratio(between.square().sum(), x.norm(), y.norm())


def _centred(x: Tensor) -> Tensor:
    x = x.detach().double()
    centred = x - x.mean(0)
    return centred if centred.norm() > EQUAL * x.norm() else torch.zeros_like(x)


def _ratio(between: Tensor, x: Tensor, y: Tensor) -> float:
    below = float(x * y)
    return float(between) / below if below > 0 else math.nan


def _layers(net: nn.Module) -> dict[str, Any]:
    return {name: module for name, module in net.named_modules() if isinstance(module, _LAYERS)}


def _weight(layer: Any) -> Tensor:
    return layer.weight.detach().cpu()


def _require_same(one: Mapping[str, Any], two: Mapping[str, Any]) -> None:
    shapes = [{name: tuple(layer.weight.shape) for name, layer in each.items()} for each in (one, two)]
    if shapes[0] != shapes[1]:
        names = sorted(name for name in shapes[0] | shapes[1] if shapes[0].get(name) != shapes[1].get(name))
        difference = "; ".join(
            f"{name}: " + " and ".join(str(list(each[name])) if name in each else "none" for each in shapes)
            for name in names[:4]
        )
        more = f"; and {len(names) - 4} more" if len(names) > 4 else ""
        raise NameMismatch(f"CKA: the layers of the two nets differ. {difference}{more}")


def _outputs(net: nn.Module, batch: Tensor, names: Sequence[str]) -> dict[str, Any]:
    """What every named layer gives for a batch, if it is run; tensors on the CPU."""
    modules = dict(net.named_modules())
    activations: dict[str, Any] = {}
    handles = []
    try:
        for name in names:
            if name not in modules:
                raise FederationError(f"CKA: {type(net).__name__} has no layer {name!r}")

            def keep(module: nn.Module, given: Any, output: Any, name: str = name) -> None:
                # a copy, as what follows may work in place
                output = output.to("cpu", copy=True) if isinstance(output, Tensor) else output
                activations[name] = output.movedim(-1, 1) if isinstance(module, nn.Linear) else output

            handles.append(modules[name].register_forward_hook(keep))
        device = next((p.device for p in net.parameters()), batch.device)
        with evaluating(net), torch.no_grad():
            net(batch.to(device))
    finally:
        for handle in handles:
            handle.remove()
    return activations


def _rows(output: Any, rows: Rows, name: str) -> Tensor:
    """The output of a layer as a matrix."""
    if not isinstance(output, Tensor) or output.dim() < 2:
        got = f"shape {list(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
        raise FederationError(
            f"CKA: the layer {name!r} gives {got}; expected one tensor [B, C] or [B, C, *s]"
        )
    if rows == "samples":
        return output.flatten(1)
    return output.movedim(1, -1).flatten(0, -2)
