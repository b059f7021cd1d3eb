"""CKA against its literal definition, what it does not see, and layers of nets."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedatlas.analysis.similarity import cka, cka_activations, cka_parameters
from fedatlas.core.errors import FederationError, NameMismatch
from fedatlas.core.seeds import generator, isolated


def drawn(*shape: int, name: str = "x") -> Tensor:
    return torch.randn(*shape, generator=generator(name), dtype=torch.float64)


def rotation(size: int) -> Tensor:
    return torch.linalg.qr(drawn(size, size, name="rotation"))[0]


def literal(x: Tensor, y: Tensor) -> float:
    """HSIC(K, L) / sqrt(HSIC(K, K) HSIC(L, L)), Kornblith et al., Eqs. 3 and 4."""
    n = len(x)
    h = torch.eye(n, dtype=torch.float64) - 1 / n
    k, l = x @ x.T, y @ y.T

    def hsic(k: Tensor, l: Tensor) -> float:
        return float((k @ h @ l @ h).trace())

    return hsic(k, l) / math.sqrt(hsic(k, k) * hsic(l, l))


@pytest.mark.parametrize("n", [6, 40])
@pytest.mark.parametrize(("p", "q"), [(5, 9), (9, 5), (1, 1)])
def test_literal_definition(n: int, p: int, q: int) -> None:
    x, y = drawn(n, p) + 3, drawn(n, q, name="y") - 1
    y[:, 0] += x[:, 0]
    assert math.isclose(cka(x, y), literal(x, y), rel_tol=1e-9)
    assert math.isclose(cka(x, y), cka(y, x), rel_tol=1e-12)
    assert 0 < cka(x, y) < 1


@pytest.mark.parametrize("n", [6, 40])
def test_what_it_does_not_see(n: int) -> None:
    x, y = drawn(n, 8), drawn(n, 8, name="y")
    turned = -2.5 * x @ rotation(8) + drawn(8, name="shift")
    assert math.isclose(cka(x, turned), 1, rel_tol=1e-12)
    assert math.isclose(cka(turned, y), cka(x, y), rel_tol=1e-9)
    assert cka(x, x * torch.arange(1, 9)) < 0.99
    order = torch.randperm(n, generator=generator("order"))
    assert math.isclose(cka(x[order], y[order]), cka(x, y), rel_tol=1e-9)
    assert cka(x[order], x) < 0.9


def test_no_correlation_and_no_variation() -> None:
    x = torch.tensor([[1.0], [-1.0], [1.0], [-1.0]])
    assert cka(x, torch.tensor([[1.0], [1.0], [-1.0], [-1.0]])) == 0
    for n in (1, 3, 7):
        same = torch.full((n, 2), 0.1)
        assert math.isnan(cka(same, drawn(n, 5))) and math.isnan(cka(drawn(n, 5), same))


class Net(nn.Module):
    """Layers of every kind, one of them followed by what works in place, and one that only training runs."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        with isolated(seed):
            self.down = nn.Conv2d(1, 6, 3, stride=2, padding=1)
            self.norm = nn.BatchNorm2d(6)
            self.up = nn.ConvTranspose2d(6, 4, 2, 2, groups=2)
            self.flat = nn.Linear(4, 3)
            self.extra = nn.Conv2d(6, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.relu_(self.down(x))
        if self.training:
            self.extra(x)
        return self.flat(self.up(self.norm(x)).movedim(1, -1)).movedim(-1, 1)


def outputs(net: Net, x: Tensor) -> dict[str, Tensor]:
    with torch.no_grad():
        net.eval()
        down = net.down(x)
        up = net.up(net.norm(down.relu()))
        return {"down": down, "up": up, "flat": net.flat(up.movedim(1, -1)).movedim(-1, 1)}


def test_parameters_by_output_filter() -> None:
    one, two = Net(1), Net(2)
    assert all(math.isclose(each, 1, rel_tol=1e-9) for each in cka_parameters(one, one).values())
    found = cka_parameters(one, two)
    assert list(found) == ["down", "up", "flat", "extra"]
    assert math.isclose(
        found["down"], literal(*(net.down.weight.detach().double().flatten(1) for net in (one, two)))
    )
    by_filter = [
        torch.stack([net.up.weight[3 * (o // 2) : 3 * (o // 2) + 3, o % 2].flatten() for o in range(4)])
        for net in (one, two)
    ]
    assert math.isclose(found["up"], literal(*(each.detach().double() for each in by_filter)))
    with torch.no_grad():
        two.load_state_dict(one.state_dict())
        two.flat.weight.copy_(one.flat.weight[:, [2, 0, 3, 1]])
        two.down.weight.copy_(one.down.weight[[1, 2, 3, 4, 5, 0]])
    turned = cka_parameters(one, two)
    assert math.isclose(turned["flat"], 1, rel_tol=1e-9) and turned["down"] < 0.95


def _positions(x: Tensor) -> Tensor:
    return x.movedim(1, -1).flatten(0, -2).double()


def test_activations() -> None:
    one, two = Net(1), Net(2)
    x = drawn(7, 1, 6, 4, name="images").float()
    batches = [x[:3], 5 + x[3:6], x[6:]]
    whole = torch.cat(batches)
    for rows, form in (("positions", _positions), ("samples", lambda x: x.flatten(1).double())):
        found = cka_activations(one, two, batches, rows=rows)  # type: ignore[arg-type]
        assert list(found) == ["down", "up", "flat"]
        for name, a in outputs(one, whole).items():
            expected = literal(form(a), form(outputs(two, whole)[name]))
            assert math.isclose(found[name], expected, rel_tol=1e-5), name
            assert found[name] < 0.999
        same = cka_activations(one, one, batches, rows=rows)  # type: ignore[arg-type]
        assert all(math.isclose(each, 1, rel_tol=1e-9) for each in same.values())
    assert list(cka_activations(one, two, batches, layers=["norm"])) == ["norm"]


def test_activations_do_not_see_the_order_of_channels() -> None:
    one, two = Net(1), Net(1)
    with torch.no_grad():
        for each in (two.down.weight, two.down.bias):
            each.copy_(each[[1, 2, 3, 4, 5, 0]].clone())
    found = cka_activations(one, two, [drawn(2, 1, 6, 4).float()])
    assert math.isclose(found["down"], 1, rel_tol=1e-6) and found["up"] < 0.99


def test_channels_that_do_not_vary() -> None:
    one, two = Net(1), Net(2)
    nn.init.zeros_(two.down.weight)
    for rows in ("positions", "samples"):
        found = cka_activations(one, two, [drawn(4, 1, 6, 4).float()] * 2, rows=rows)  # type: ignore[arg-type]
        assert math.isnan(found["down"])


def test_the_nets_are_as_before() -> None:
    net = Net(1)
    net.norm.eval()
    modes = [module.training for module in net.modules()]
    before = {name: each.clone() for name, each in net.state_dict().items()}
    cka_activations(net, net, [drawn(2, 1, 6, 4).float()])
    cka_parameters(net, net)
    assert [module.training for module in net.modules()] == modes
    assert all(torch.equal(each, before[name]) for name, each in net.state_dict().items())
    assert not any(module._forward_hooks for module in net.modules())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"images": []}, "no images"),
        ({"rows": "voxels"}, "positions, samples"),
        ({"layers": ["middle"]}, "no layer 'middle'"),
        ({"layers": ["extra"]}, "did not run"),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"images": [drawn(2, 1, 6, 4).float()]} | options
    with pytest.raises(FederationError, match=message):
        cka_activations(Net(1), Net(2), given.pop("images"), **given)


def test_matrices_and_nets_that_do_not_fit() -> None:
    with pytest.raises(FederationError, match="expected \\[n, p\\]"):
        cka(drawn(3, 2), drawn(4, 2))
    with pytest.raises(FederationError, match="not finite"):
        cka(drawn(3, 2), drawn(3, 2) / 0)
    with pytest.raises(NameMismatch, match="extra: \\[2, 6, 1, 1\\] and none"):
        other = Net(1)
        other.extra = nn.Identity()  # type: ignore[assignment]
        cka_parameters(Net(1), other)
