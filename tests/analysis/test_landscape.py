"""The loss landscape: directions filter by filter, closed forms, and a net that is the same afterwards."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedatlas.analysis.landscape import Surface, random_direction, surface
from fedatlas.core.errors import FederationError, NameMismatch
from fedatlas.core.seeds import generator, isolated


def net_of(seed: int = 1) -> nn.Sequential:
    with isolated(seed):
        net = nn.Sequential(
            nn.Conv3d(2, 6, 3, padding=1),
            nn.BatchNorm3d(6),
            nn.ReLU(inplace=True),
            nn.ConvTranspose3d(6, 6, 2, 2, groups=2),
            nn.LayerNorm([4, 4, 4]),
            nn.Flatten(),
            nn.Linear(384, 3),
        )
        for p in net.parameters():
            nn.init.normal_(p)
    with torch.no_grad():
        net[0].weight[2] = 0  # type: ignore[index]
    return net


def squares(net: nn.Module, batch: float) -> Tensor:
    return batch * sum(
        (p.double().square().sum() for p in net.parameters()), torch.zeros((), dtype=torch.float64)
    )


def output(net: nn.Module, batch: Tensor) -> Tensor:
    assert not any(module.training for module in net.modules())
    return net(batch).square().mean()


def test_a_direction_has_the_norms_of_the_filters() -> None:
    net = net_of()
    d = random_direction(net, generator("d"))
    values = {name: p.detach() for name, p in net.named_parameters()}
    assert list(d) == list(values)
    assert all(each.shape == values[name].shape and each.dtype == torch.float32 for name, each in d.items())
    for name in ("0.weight", "6.weight"):
        torch.testing.assert_close(d[name].flatten(1).norm(dim=1), values[name].flatten(1).norm(dim=1))
        assert not torch.allclose(d[name], values[name])
    assert not d["0.weight"][2].any() and bool(d["0.weight"][1].any())
    for o in range(6):  # two groups of three channels in and three out
        rows, column = slice(3 * (o // 3), 3 * (o // 3) + 3), o % 3
        found, expected = d["3.weight"][rows, column].norm(), values["3.weight"][rows, column].norm()
        assert math.isclose(float(found), float(expected), rel_tol=1e-5)
    still = [name for name, each in d.items() if not each.any()]
    assert still == ["0.bias", "1.weight", "1.bias", "3.bias", "4.weight", "4.bias", "6.bias"]


def test_a_direction_depends_on_its_generator_only() -> None:
    state = torch.random.get_rng_state()
    one, same, other = (random_direction(net_of(), generator(name)) for name in ("d", "d", "e"))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["0.weight"], other["0.weight"])
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_rescaled_net_has_the_same_landscape() -> None:
    """Doubling a layer before a norm changes no output, and filter-normalised directions no loss around it."""
    net, x = net_of(), torch.randn(2, 2, 2, 2, 2, generator=generator("x"))
    scaled = net_of()
    with torch.no_grad():
        for p in (*scaled[0].parameters(), scaled[1].running_mean):
            p.mul_(2)
        scaled[1].running_var.mul_(4)  # type: ignore[union-attr]
        scaled[1].eps *= 4
    found = [
        surface(each, output, [x], (random_direction(each, generator(1)), random_direction(each, generator(2))),
                first=[-1, 0, 0.5]).losses
        for each in (net, scaled)
    ]  # fmt: skip
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=0)
    assert found[0].unique().numel() == 9


def test_the_closed_form_of_a_sum_of_squares() -> None:
    net = net_of()
    one, two = (random_direction(net, generator(i)) for i in range(2))
    first, second = [-1.0, 0.0, 0.5], [0.0, 2.0]
    found = surface(net, squares, [1.0, 4.0], (one, two), first=first, second=second, weights=[2, 1])
    assert isinstance(found, Surface) and found.losses.dtype == torch.float64
    assert found.first.tolist() == first and found.second.tolist() == second
    expected = torch.tensor(
        [
            [2 * sum(float((p.detach() + a * one[n] + b * two[n]).double().square().sum())
                     for n, p in net.named_parameters()) for b in second]
            for a in first
        ],
        dtype=torch.float64,
    )  # fmt: skip
    torch.testing.assert_close(found.losses, expected, rtol=1e-6, atol=0)
    assert math.isclose(float(found.losses[1, 0]), float(2 * squares(net, 1.0).detach()), rel_tol=1e-12)


class Broken(Exception):
    pass


@pytest.mark.parametrize("fails", [False, True])
def test_the_net_is_as_before(fails: bool) -> None:
    net = net_of()
    net[1].eval()
    with torch.no_grad():
        net[6].bias[0] = -0.0  # type: ignore[index]
    net[6].bias.grad = torch.ones(3)
    modes = [module.training for module in net.modules()]
    before = {name: each.clone() for name, each in net.state_dict().items()}
    directions = random_direction(net, generator(1)), random_direction(net, generator(2))
    seen: list[float] = []

    def loss(net: nn.Module, batch: Tensor) -> Tensor:
        value = output(net, batch)
        seen.append(float(value))
        if fails and len(seen) == 3:
            raise Broken
        return value

    x = torch.randn(2, 2, 2, 2, 2, generator=generator("x"))
    try:
        surface(net, loss, [x], directions, first=[-0.3, 0.1, 0.7])
        assert not fails
    except Broken:
        assert fails
    assert len(set(seen)) == (3 if fails else 9)
    for name, each in net.state_dict().items():
        assert torch.equal(each, before[name]) and torch.equal(each.signbit(), before[name].signbit())
    assert [module.training for module in net.modules()] == modes
    assert torch.equal(net[6].bias.grad, torch.ones(3))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batches": []}, "no batches"),
        ({"first": []}, "finite numbers"),
        ({"second": [math.inf]}, "finite numbers"),
        ({"weights": [1, 2]}, "for 1 batches"),
        ({"weights": [0]}, "not all of them 0"),
        ({"loss": lambda net, batch: 1.0}, "got float"),
        ({"loss": lambda net, batch: torch.ones(2)}, "got shape"),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    net = net_of()
    direction = random_direction(net, generator(1))
    given: dict[str, Any] = {"batches": [1.0], "loss": squares, "first": [0.0]} | options
    with pytest.raises(FederationError, match=message):
        surface(net, given.pop("loss"), given.pop("batches"), (direction, direction), **given)


def test_a_direction_of_another_net() -> None:
    direction = random_direction(net_of(), generator(1))
    with pytest.raises(NameMismatch, match="direction 2"):
        surface(net_of(), squares, [1.0], (direction, {}), first=[0.0])
