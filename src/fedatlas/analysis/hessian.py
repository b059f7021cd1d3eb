"""The Hessian of a trained net's loss: its largest eigenvalues, its trace and its spectral density.

Yao, Gholami, Keutzer, Mahoney. PyHessian: neural networks through the lens of the Hessian. IEEE Big Data 2020. Ghorbani,
Krishnan, Xiao. An investigation into neural net optimization via Hessian eigenvalue density. ICML 2019.

The Hessian itself is never formed: all that is asked of it are its products with vectors, each of which costs about four
gradients (U-Nets in 3D on a CPU: 3.2 to 3.9).

Differences from PyHessian: eigenvalues come from Lanczos' method with full reorthogonalisation, with a bound on the
error of each; power iteration with deflation, where eigenvalues are of like size, gives wrong ones and does not say so.
Sums, inner products and projections are in float64.

The net is asked in evaluation mode. Its parameters, modes and gradients are as before afterwards.

Shapes: n parameters, m steps of Lanczos' method, k eigenvalues, R random vectors, G points of a grid.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedatlas.analysis.landscape import Loss, one_number, shares_of
from fedatlas.core.errors import FederationError
from fedatlas.core.outputs import evaluating

BREAKDOWN = 1e-12
"""The part of an operator's size below which what is left of a product counts as 0."""


class Operator(Protocol):
    """A symmetric matrix [n, n], known by its products. size: n; device: where vectors lie."""

    @property
    def size(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    def __call__(self, vector: Tensor) -> Tensor:
        """[n] float64 -> [n] float64."""
        ...


class Hessian:
    """The Hessian of the mean loss over batches, with respect to a net's parameters that require gradients, in the order
    of `net.named_parameters()`.

    weights: of the batches, as their numbers of samples; equal by default. The loss must be twice differentiable and
    must not draw random numbers. A net in float32 gives products of about six digits; `net.double()` gives all of them.

    Raises FederationError for no batches, weights that do not fit, a net without such parameters, and, where a product
    is asked for, a loss that is not one number, that no parameter takes part in, or products that are not finite.
    """

    def __init__(
        self, net: nn.Module, loss: Loss, batches: Sequence[Any], *, weights: Sequence[float] | None = None
    ) -> None:
        self.net, self.loss, self.batches = net, loss, batches
        self.shares = shares_of(batches, weights, what="Hessian")
        self.parameters = [p for p in net.parameters() if p.requires_grad]
        if not self.parameters:
            raise FederationError(
                f"Hessian: {type(net).__name__} has no parameter that requires a gradient; expected one or more"
            )

    @property
    def size(self) -> int:
        """n."""
        return sum(p.numel() for p in self.parameters)

    @property
    def device(self) -> torch.device:
        """Of the net."""
        return self.parameters[0].device

    def __call__(self, vector: Tensor) -> Tensor:
        """The product with a vector: [n] -> [n] float64 on the net's device. Cost: about four gradients of every batch."""
        given = vector.to(self.device).split([p.numel() for p in self.parameters])
        pieces = [v.view_as(p).to(p.dtype) for v, p in zip(given, self.parameters, strict=True)]
        total = torch.zeros(self.size, dtype=torch.float64, device=self.device)
        # the faster forms of attention have no second derivative
        with evaluating(self.net), torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
            for share, batch in zip(self.shares, self.batches, strict=True):
                for place, product in self._of_batch(batch, pieces):
                    total[place : place + product.numel()] += share * product.flatten().double()
        if not bool(total.isfinite().all()):
            raise FederationError(
                "Hessian: a product is not finite; the loss or its second derivative is not finite on these batches"
            )
        return total

    def _of_batch(self, batch: Any, pieces: Sequence[Tensor]) -> list[tuple[int, Tensor]]:
        """The product for one batch, parameter by parameter, each with its place."""
        value = one_number(self.loss(self.net, batch), what="Hessian")
        if not value.requires_grad:
            raise FederationError("Hessian: the loss does not depend on a parameter that requires a gradient")
        first = torch.autograd.grad(value, self.parameters, create_graph=True, materialize_grads=True)
        # a gradient that does not depend on any parameter has no graph
        curved = [(g, v) for g, v in zip(first, pieces, strict=True) if g.requires_grad]
        if not curved:
            return []
        second = torch.autograd.grad(
            [g for g, _ in curved], self.parameters, [v for _, v in curved], materialize_grads=True
        )
        pieces, place = [], 0
        for product in second:
            pieces.append((place, product.detach()))
            place += product.numel()
        return pieces


@dataclass(frozen=True)
class Eigenpairs:
    """Eigenvalues [k] float64, in the order asked for, with vectors [k, n] of norm 1.

    errors: [k], ||H v - value v||, rounding aside: an eigenvalue of H lies within it of each value. steps: m, that is,
    products. converged: whether every error is within the tolerance.
    """

    values: Tensor
    vectors: Tensor
    errors: Tensor
    steps: int
    converged: bool


def top_eigenvalues(
    operator: Operator,
    count: int,
    *,
    generator: torch.Generator,
    by: Literal["magnitude", "value"] = "magnitude",
    tolerance: float = 1e-6,
    steps: int = 100,
    keep: torch.dtype = torch.float64,
) -> Eigenpairs:
    """The `count` eigenvalues that are largest, in magnitude or in value, the largest first.

    Lanczos' method from one random vector, until the error of each is at most `tolerance` times the largest magnitude,
    or after `steps` products. Of an eigenvalue that occurs several times exactly, fewer copies may be found, unless
    steps reaches n. generator: a CPU generator. keep: the type in which the m vectors of length n are kept; float32
    halves their memory, m * n * 8 bytes.

    Raises FederationError for a count above n or below 1, steps below count, and any other `by`.
    """
    if not 1 <= count <= operator.size:
        raise FederationError(f"Hessian: {count} eigenvalues; allowed: 1 to {operator.size}, the parameters")
    if by not in ("magnitude", "value"):
        raise FederationError(f"Hessian: the largest by {by!r}; allowed: magnitude, value")
    if steps < count:
        raise FederationError(f"Hessian: {steps} steps for {count} eigenvalues; at least as many are needed")
    run = _Lanczos(operator, _normal(operator, generator), min(steps, operator.size), keep)
    while run.step():
        if run.closed:
            run.restart(_normal(operator, generator))
        elif len(run.alpha) >= count and not run.restarted:
            values, _, errors = run.ritz()
            best = _order(values, by)[:count]
            if bool((errors[best] <= tolerance * values.abs().max()).all()):
                break
    values, weights, errors = run.ritz()
    best = _order(values, by)[:count]
    return Eigenpairs(
        values[best],
        run.combine(weights[:, best]),
        errors[best],
        len(run.alpha),
        bool((errors[best] <= tolerance * values.abs().max()).all()),
    )


@dataclass(frozen=True)
class Estimate:
    """A mean of random samples, and its standard error."""

    value: float
    error: float
    samples: int


def trace(operator: Operator, *, generator: torch.Generator, samples: int = 100) -> Estimate:
    """The trace by Hutchinson's estimator: the mean of v^T H v over vectors v of -1 and 1. Cost: `samples` products.

    generator: a CPU generator. Raises FederationError for fewer than two samples, of which no error can be told.
    """
    if samples < 2:
        raise FederationError(f"Hessian: a trace of {samples} samples; at least 2 are needed")
    products = []
    for _ in range(samples):
        v = _signs(operator, generator)
        products.append(float(v @ operator(v)))
    values = torch.tensor(products, dtype=torch.float64)
    return Estimate(float(values.mean()), float(values.std() / math.sqrt(samples)), samples)


@dataclass(frozen=True)
class Quadrature:
    """A spectral density as point masses: nodes and weights [R, m] float64, the weights of a row summing to 1. Where a
    run ends before m steps, what is left of its row has the weight 0 and the node 0."""

    nodes: Tensor
    weights: Tensor

    def density(self, *, points: int = 1000, sigma: float | None = None) -> tuple[Tensor, Tensor]:
        """(grid [G], density [G]) float64: every mass spread as a normal distribution with the standard deviation
        sigma, by default a hundredth of the range of the nodes; the mean over runs. The grid reaches five of sigma
        beyond the outermost nodes, so the density integrates to 1 over it.

        Raises FederationError for fewer than two points, or a sigma that is not above 0.
        """
        if points < 2 or (sigma is not None and not sigma > 0):
            raise FederationError(
                f"Hessian: a density of {points} points and sigma {sigma}; allowed: 2 or more, and above 0"
            )
        used = self.nodes[self.weights > 0]
        low, high = float(used.min()), float(used.max())
        if sigma is None:
            sigma = (high - low or abs(high) or 1.0) / 100
        grid = torch.linspace(low - 5 * sigma, high + 5 * sigma, points, dtype=torch.float64)
        value = torch.zeros_like(grid)
        for node, weight in zip(self.nodes.flatten(), self.weights.flatten(), strict=True):
            value += weight * torch.exp(-0.5 * ((grid - node) / sigma) ** 2)
        return grid, value / (len(self.nodes) * sigma * math.sqrt(2 * math.pi))


def spectral_density(
    operator: Operator,
    *,
    generator: torch.Generator,
    runs: int = 1,
    steps: int = 100,
    keep: torch.dtype = torch.float64,
) -> Quadrature:
    """The density of the n eigenvalues, each of the mass 1 / n, by stochastic Lanczos quadrature.

    Each run starts at a random vector of -1 and 1. Cost: runs * steps products; memory and `keep` as in
    `top_eigenvalues`. generator: a CPU generator. Raises FederationError for fewer than one run or step.
    """
    if runs < 1 or steps < 1:
        raise FederationError(
            f"Hessian: a density of {runs} runs of {steps} steps; at least 1 of each is needed"
        )
    steps = min(steps, operator.size)
    nodes, weights = (torch.zeros(runs, steps, dtype=torch.float64) for _ in range(2))
    for row in range(runs):
        run = _Lanczos(operator, _signs(operator, generator), steps, keep)
        while run.step() and not run.closed:
            pass
        values, vectors, _ = run.ritz()
        nodes[row, : len(values)], weights[row, : len(values)] = values, vectors[0] ** 2
    return Quadrature(nodes, weights)


class _Lanczos:
    """Lanczos' method: H in the basis q_1 … q_m is the tridiagonal T of alpha and beta, but for a rest beta_m q_{m+1}.

    closed: the rest is 0, so that the basis spans an invariant subspace; restarted: so it was before.
    """

    def __init__(self, operator: Operator, start: Tensor, most: int, keep: torch.dtype) -> None:
        self.operator, self.most = operator, most
        self.basis = torch.empty(most, operator.size, dtype=keep, device=operator.device)
        self.alpha: list[float] = []
        self.beta: list[float] = []
        self.next = start / start.norm()
        self.closed = self.restarted = False

    def step(self) -> bool:
        """One product. False, with nothing done, after the last."""
        m = len(self.alpha)
        if m == self.most:
            return False
        self.basis[m] = self.next
        q = self.basis[m].double()
        rest = self.operator(q)
        self.alpha.append(float(q @ rest))
        rest = self._off(self._off(rest))
        size = float(rest.norm())
        self.closed = size <= BREAKDOWN * max(map(abs, (*self.alpha, *self.beta)))
        self.beta.append(0.0 if self.closed else size)
        if not self.closed:
            self.next = rest / size
        return True

    def restart(self, start: Tensor) -> None:
        """Goes on from a vector beside the subspace that is closed."""
        rest = self._off(self._off(start))
        self.next = rest / rest.norm()
        self.restarted = True

    def _off(self, vector: Tensor) -> Tensor:
        """A vector less its part within the basis, row by row, so that no copy of the basis in float64 is made."""
        for row in self.basis[: len(self.alpha)]:
            q = row.double()
            vector = vector - (q @ vector) * q
        return vector

    def ritz(self) -> tuple[Tensor, Tensor, Tensor]:
        """(values [m], vectors [m, m] in columns, errors [m]) of T, float64 on the CPU."""
        alpha = torch.tensor(self.alpha, dtype=torch.float64)
        beta = torch.tensor(self.beta, dtype=torch.float64)
        between = beta[:-1]
        values, vectors = torch.linalg.eigh(alpha.diag() + between.diag(1) + between.diag(-1))
        return values, vectors, beta[-1] * vectors[-1].abs()

    def combine(self, weights: Tensor) -> Tensor:
        """Vectors [k, n] of norm 1 on the CPU, in the type kept; weights [m, k]."""
        used = self.basis[: len(self.alpha)]
        ritz = weights.T.to(used) @ used
        return (ritz / ritz.norm(dim=1, keepdim=True)).cpu()


def _order(values: Tensor, by: str) -> Tensor:
    return (values.abs() if by == "magnitude" else values).argsort(descending=True)


def _normal(operator: Operator, generator: torch.Generator) -> Tensor:
    return torch.randn(operator.size, generator=generator, dtype=torch.float64).to(operator.device)


def _signs(operator: Operator, generator: torch.Generator) -> Tensor:
    drawn = torch.randint(2, (operator.size,), generator=generator, dtype=torch.float64)
    return (2 * drawn - 1).to(operator.device)
