"""The Hessian's spectrum against closed forms, a dense Hessian and PyHessian, and what it leaves behind."""

import math

import pytest
import torch
import torch.nn.functional as F
from menunet_vectors import vectors
from torch import Tensor, nn

from fedatlas.analysis.hessian import Hessian, Quadrature, spectral_density, top_eigenvalues, trace
from fedatlas.core.errors import FederationError
from fedatlas.core.seeds import generator, isolated


class Quadratic(nn.Module):
    """Parameters [n] split in two, of which the loss for a matrix is (1/2) w^T A w."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(3, generator=generator("a"), dtype=torch.float64))
        self.b = nn.Parameter(torch.randn(size - 3, 1, generator=generator("b"), dtype=torch.float64))

    def forward(self, matrix: Tensor) -> Tensor:
        w = torch.cat([self.a, self.b.flatten()])
        return w @ matrix @ w / 2


def value(net: nn.Module, batch: Tensor) -> Tensor:
    return net(batch)


def matrix(eigenvalues: list[float]) -> Tensor:
    n = len(eigenvalues)
    q = torch.linalg.qr(torch.randn(n, n, generator=generator("q"), dtype=torch.float64))[0]
    return q @ torch.tensor(eigenvalues, dtype=torch.float64).diag() @ q.T


def quadratic(a: Tensor) -> Hessian:
    return Hessian(Quadratic(len(a)), value, [a])


SPECTRUM = [10.0, -8.0, 5.0, 4.9, -3.0, *[i / 20 for i in range(20)]]


def perceptron() -> tuple[nn.Module, list[tuple[Tensor, Tensor]], dict[str, Tensor]]:
    v = vectors("pyhessian_small")
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    net.load_state_dict({key.removeprefix("sd/"): each for key, each in v.items() if key.startswith("sd/")})
    return net.double(), [(v["X"].double(), v["Y"])], v


def cross_entropy(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(net(batch[0]), batch[1])


def test_products_are_those_of_the_matrix() -> None:
    a, b = matrix(SPECTRUM), matrix([1.0] * 5 + [2.0] * 20)
    vector = torch.randn(25, generator=generator("v"), dtype=torch.float64)
    torch.testing.assert_close(quadratic(a)(vector), a @ vector)
    both = Hessian(Quadratic(25), value, [a, b], weights=[3, 1])
    torch.testing.assert_close(both(vector), (0.75 * a + 0.25 * b) @ vector)


@pytest.mark.parametrize(
    ("by", "expected"), [("magnitude", [10.0, -8.0, 5.0, 4.9, -3.0]), ("value", [10.0, 5.0, 4.9, 0.95, 0.9])]
)
@pytest.mark.parametrize("keep", [torch.float64, torch.float32])
def test_eigenvalues_of_a_known_spectrum(by: str, expected: list[float], keep: torch.dtype) -> None:
    h = quadratic(matrix(SPECTRUM))
    found = top_eigenvalues(h, 5, generator=generator("start"), by=by, keep=keep)  # type: ignore[arg-type]
    precise = 1e-8 if keep == torch.float64 else 1e-5
    assert found.converged and found.steps <= 25
    torch.testing.assert_close(
        found.values, torch.tensor(expected, dtype=torch.float64), atol=precise, rtol=0
    )
    for vector, eigenvalue, error in zip(found.vectors.double(), found.values, found.errors, strict=True):
        rest = float((h(vector) - eigenvalue * vector).norm())
        assert rest <= float(error) + 10 * precise
        assert math.isclose(float(vector.norm()), 1, rel_tol=1e-6)


def test_it_stops_when_the_largest_are_found_and_says_when_they_are_not() -> None:
    h = quadratic(matrix([100.0, 50.0, *[i / 200 for i in range(198)]]))
    found = top_eigenvalues(h, 2, generator=generator("start"), tolerance=1e-8)
    assert found.converged and found.steps < 20
    torch.testing.assert_close(found.values, torch.tensor([100.0, 50.0], dtype=torch.float64))
    early = top_eigenvalues(h, 2, generator=generator("start"), steps=2, tolerance=1e-8)
    assert not early.converged and early.steps == 2
    for told, error in zip(early.values, early.errors, strict=True):
        assert min(abs(float(told) - each) for each in (100.0, 50.0, *[i / 200 for i in range(198)])) <= error


@pytest.mark.parametrize("spectrum", [[1.0] * 6, [0.0] * 6, [5.0, 5.0, 5.0, 3.0, 0.0, 0.0], [2.0, -2.0] * 3])
def test_eigenvalues_that_repeat(spectrum: list[float]) -> None:
    found = top_eigenvalues(quadratic(matrix(spectrum)), 4, generator=generator("start"))
    magnitudes = sorted(map(abs, spectrum), reverse=True)[:4]
    torch.testing.assert_close(found.values.abs(), torch.tensor(magnitudes, dtype=torch.float64))


def test_pyhessian_where_it_is_right_and_where_it_is_not() -> None:
    net, batches, v = perceptron()
    h = Hessian(net, cross_entropy, batches)
    exact = v["eig_exact"][v["eig_exact"].abs().argsort(descending=True)]
    found = top_eigenvalues(h, 5, generator=generator("start"), tolerance=1e-9).values
    torch.testing.assert_close(found, exact[:5], rtol=1e-5, atol=1e-7)
    official = v["eig_top5_pyhessian"]
    torch.testing.assert_close(found[:2], official[:2], rtol=1e-3, atol=0)
    assert bool(((official[2:] - exact[2:5]).abs() > 0.01 * exact[2:5].abs()).all())
    dense = torch.stack([h(row) for row in torch.eye(26, dtype=torch.float64)])
    torch.testing.assert_close(dense, dense.T)
    torch.testing.assert_close(dense.trace(), v["trace_exact"].double(), rtol=1e-5, atol=0)
    told = trace(h, generator=generator("trace"), samples=200)
    assert abs(told.value - float(v["trace_exact"])) < 4 * told.error
    samples = v["trace_samples"]
    spread = float(samples.std()) / math.sqrt(len(samples))
    assert abs(told.value - float(samples.mean())) < 4 * math.hypot(told.error, spread)
    assert math.isclose(told.error * math.sqrt(200), float(samples.std()), rel_tol=0.2)
    nodes = spectral_density(h, generator=generator("density"), steps=20).nodes[0]
    for extreme in (torch.max, torch.min):
        assert math.isclose(float(extreme(nodes)), float(extreme(v["slq_eigs"])), rel_tol=1e-3)


def test_trace_of_a_diagonal_matrix_is_exact() -> None:
    told = trace(
        quadratic(torch.tensor(SPECTRUM, dtype=torch.float64).diag()), generator=generator(1), samples=3
    )
    assert math.isclose(told.value, sum(SPECTRUM)) and told.error < 1e-12 and told.samples == 3
    rotated = trace(quadratic(matrix(SPECTRUM)), generator=generator(2), samples=200)
    assert abs(rotated.value - sum(SPECTRUM)) < 4 * rotated.error
    assert 0.1 < rotated.error < 3


def test_quadrature_has_the_moments_of_its_start() -> None:
    """m steps are exact for polynomials of degree 2 m - 1."""
    a = matrix(SPECTRUM)
    told = spectral_density(quadratic(a), generator=generator("q"), runs=2, steps=4)
    draws = generator("q")
    for nodes, weights in zip(told.nodes, told.weights, strict=True):
        v = 2 * torch.randint(2, (25,), generator=draws, dtype=torch.float64) - 1
        for power in range(8):
            expected = v @ torch.linalg.matrix_power(a, power) @ v / 25
            torch.testing.assert_close((weights * nodes**power).sum(), expected, rtol=1e-9, atol=1e-9)


def test_density_of_two_values() -> None:
    told = spectral_density(
        quadratic(torch.tensor([1.0] * 10 + [4.0] * 30, dtype=torch.float64).diag()),
        generator=generator(3),
        steps=9,
    )
    assert told.weights[0, 2:].count_nonzero() == 0
    torch.testing.assert_close(told.nodes[0, :2], torch.tensor([1.0, 4.0], dtype=torch.float64))
    torch.testing.assert_close(told.weights[0, :2], torch.tensor([0.25, 0.75], dtype=torch.float64))
    grid, density = told.density(points=2001, sigma=0.05)
    assert math.isclose(float(torch.trapezoid(density, grid)), 1, abs_tol=1e-4)
    low = grid < 2.5
    assert math.isclose(float(torch.trapezoid(density[low], grid[low])), 0.25, abs_tol=1e-4)
    one = Quadrature(torch.tensor([[3.0]]), torch.tensor([[1.0]])).density()
    assert math.isclose(float(torch.trapezoid(one[1], one[0])), 1, abs_tol=1e-4)


def test_the_net_is_as_before() -> None:
    with isolated("net"):
        net = nn.Sequential(
            nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Softplus(), nn.Flatten(), nn.Linear(48, 2)
        )
    net[0].eval()
    net[4].bias.grad = torch.ones(2)
    modes = [module.training for module in net.modules()]
    before = {name: each.clone() for name, each in net.state_dict().items()}
    state = torch.random.get_rng_state()
    batch = (torch.randn(4, 1, 6, 6, generator=generator("x")), torch.tensor([0, 1, 1, 0]))
    h = Hessian(net, cross_entropy, [batch])
    with torch.no_grad():
        found = [
            top_eigenvalues(h, 2, generator=generator("s")).values,
            torch.tensor(trace(h, generator=generator("s"), samples=4).value),
            spectral_density(h, generator=generator("s"), steps=5).nodes,
        ]
    assert all(bool(each.isfinite().all()) for each in found) and float(found[0][0]) > 0
    assert torch.equal(top_eigenvalues(h, 2, generator=generator("s")).values, found[0])
    assert all(torch.equal(each, before[name]) for name, each in net.state_dict().items())
    assert [module.training for module in net.modules()] == modes
    assert torch.equal(net[4].bias.grad, torch.ones(2)) and net[0].weight.grad is None  # type: ignore[arg-type]
    assert torch.equal(torch.random.get_rng_state(), state)


def test_parameters_without_curvature() -> None:
    net = Quadratic(5)
    vector = torch.ones(5, dtype=torch.float64)
    assert not Hessian(net, lambda net, batch: net.a.sum() * batch, [2.0])(vector).any()
    partly = Hessian(net, lambda net, batch: net.a.square().sum(), [None])(vector)
    assert partly.tolist() == [2, 2, 2, 0, 0]
    net.a.requires_grad_(False)
    assert Hessian(net, lambda net, batch: (net.a.sum() * net.b).square().sum(), [None]).size == 2


def test_what_is_refused() -> None:
    net, h = Quadratic(5), quadratic(matrix([1.0, 2.0, 3.0, 4.0, 5.0]))
    draws = generator("x")
    with pytest.raises(FederationError, match="no batches"):
        Hessian(net, value, [])
    with pytest.raises(FederationError, match="weights"):
        Hessian(net, value, [1], weights=[-1.0])
    with pytest.raises(FederationError, match="no parameter"):
        Hessian(nn.ReLU(), value, [1])
    vector = torch.ones(5, dtype=torch.float64)
    with pytest.raises(FederationError, match="one number; got shape"):
        Hessian(net, lambda net, batch: net.a, [1])(vector)
    with pytest.raises(FederationError, match="does not depend"):
        Hessian(net, lambda net, batch: torch.ones(()), [1])(vector)
    with pytest.raises(FederationError, match="not finite"):
        Hessian(net, lambda net, batch: (net.a - net.a).sqrt().sum(), [1])(vector)
    with pytest.raises(FederationError, match="1 to 5"):
        top_eigenvalues(h, 6, generator=draws)
    with pytest.raises(FederationError, match="2 steps for 3"):
        top_eigenvalues(h, 3, generator=draws, steps=2)
    with pytest.raises(FederationError, match="magnitude, value"):
        top_eigenvalues(h, 3, generator=draws, by="size")  # type: ignore[arg-type]
    with pytest.raises(FederationError, match="at least 2"):
        trace(h, generator=draws, samples=1)
    with pytest.raises(FederationError, match="at least 1 of each"):
        spectral_density(h, generator=draws, runs=0)
    with pytest.raises(FederationError, match="2 or more"):
        Quadrature(vector[None], vector[None]).density(points=1)


def test_attention_has_a_second_derivative() -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            with isolated("attends"):
                self.linear = nn.Linear(4, 12)

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.scaled_dot_product_attention(*self.linear(x)[None].chunk(3, -1))

    net = Attends()
    x = torch.randn(2, 5, 4, generator=generator("x"))
    operator = Hessian(net, lambda net, batch: net(batch).square().mean(), [x])
    e, f = torch.eye(operator.size, dtype=torch.float64)[[3, 40]]
    assert torch.isclose(f @ operator(e), e @ operator(f), rtol=1e-4) and bool(operator(e).any())
