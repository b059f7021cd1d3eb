"""FedDyn: closed forms of one weight, the two server forms, limiting cases."""

import dataclasses
from typing import Any, cast

import pytest
import torch
from fakes import Server, same
from image_sites import SETUP_1, ImageSite, cnn
from torch import Tensor, nn

from fedatlas.core.tensors import Tensors, average, tensors_of
from fedatlas.learning.loop import Local, Loop
from fedatlas.methods.fedavg import FedAvg
from fedatlas.methods.feddyn import MEMORY, Dynamic, FedDyn, server_rule

LOCAL = Local(optimizer="sgd", batch=4, steps=2, lr=0.1)


def batch_norm() -> nn.Module:
    return cnn(norm="batch")


class Lossy(Server):
    """Says who did not answer, as an engine does."""

    def call(self, function: Any, **payload: Any) -> Any:
        self.lost = {self.silent: "silent"} if self.silent else {}
        return super().call(function, **payload)


def server(silent: str = "") -> Any:
    found = [ImageSite(name, own, 4 + index, batch_norm) for index, (name, own) in enumerate(SETUP_1.items())]
    return Lossy(*found, silent=silent)


def play(method: Any, clients: Any, rounds: int = 2) -> Any:
    state = dataclasses.replace(method.start(batch_norm(), clients), rounds=rounds)
    for _ in range(rounds):
        state = method.round(state, clients)
    return state


class Weight(nn.Module):
    """One number, and one that nothing depends on."""

    def __init__(self, w: float = 0.0) -> None:
        super().__init__()
        self.w, self.idle = nn.Parameter(torch.tensor([w])), nn.Parameter(torch.ones(1))


class Toy:
    """f(w) = s/2 (w - a)^2."""

    device = torch.device("cpu")

    def __init__(self, a: float, s: float) -> None:
        self.a, self.s = a, s
        self.memory: dict[str, Any] = {}
        self.g: Tensors = {}

    def batches(self, *, batch: int, steps: int | None = None, epochs: float | None = None) -> list[Any]:
        return [None] * (steps or 0)

    def log(self, **numbers: float) -> None: ...

    def f(self, net: Any, batch: Any) -> Tensor:
        return self.s / 2 * (net.w - self.a).square().sum()

    def solve(self, w_t: float, alpha: float, **local: Any) -> Weight:
        """The local minimum, and g after it."""
        net = Weight(w_t)
        dynamic = Dynamic(net, self.g, alpha)
        how = Local(
            **{"optimizer": "sgd", "momentum": 0.0, "weight_decay": 0.0, "schedule": "constant"} | local
        )
        loop = Loop(cast(Any, self), net, how, round=0, rounds=1)
        for batch in loop:
            loop.move(dynamic.corrected(loop.gradients(self.f(net, batch))))
        self.g = dynamic.g_after()
        return net


def test_the_local_minimum_and_its_gradient() -> None:
    """w_k = (s a + g + alpha w_t) / (s + alpha), and g_k becomes f'(w_k) = s (w_k - a), for any g_k before."""
    toy, alpha, w_t = Toy(3, 2), 0.5, 1.0
    toy.g = {"w": torch.tensor([0.4])}
    net = toy.solve(w_t, alpha, lr=0.2, steps=60)
    expected = (2 * 3 + 0.4 + alpha * w_t) / (2 + alpha)
    assert net.w.item() == pytest.approx(expected, abs=1e-6)
    assert float(toy.g["w"]) == pytest.approx(2 * (expected - 3), abs=1e-5)


def test_one_step_by_hand() -> None:
    """Two steps of 0.1 from w_t = 0 with f' = w - 1, g = 0.5, alpha = 0.2: 0.15, then 0.15 - 0.1 (-0.85 + 0.03 - 0.5)."""
    toy = Toy(1, 1)
    toy.g = {"w": torch.tensor([0.5])}
    net = toy.solve(0.0, 0.2, lr=0.1, steps=2)
    assert net.w.item() == pytest.approx(0.15 + 0.132)
    assert float(toy.g["w"]) == pytest.approx(0.5 - 0.2 * 0.282)


def test_sites_of_unequal_curvature_reach_the_common_optimum() -> None:
    """The mean of the sites' own minima is 2; the optimum of the mean of f is 3.2, and there h = 0."""
    toys, alpha, w, h = [Toy(0, 1), Toy(4, 4)], 1.0, torch.zeros(1), torch.zeros(1)
    rule = server_rule(alpha, 1.0)
    for _ in range(40):
        ends = [toy.solve(float(w), alpha, lr=0.1, steps=40) for toy in toys]
        step, h = rule(torch.stack([net.w.detach() for net in ends]).mean(0) - w, h)
        w = w + step
        assert all(net.idle.item() == 1 for net in ends)
    assert float(w) == pytest.approx(3.2, abs=1e-3)
    assert float(h) == pytest.approx(0, abs=1e-2)
    assert [float(toy.g["w"]) for toy in toys] == pytest.approx([3.2, -3.2], abs=1e-2)


def test_the_server_equals_the_form_of_the_official_code() -> None:
    """w <- mean_k w_k + mean_k hist_k with hist_k = -g_k / alpha, all sites answering."""
    rng = torch.Generator().manual_seed(0)
    alpha, w, h, hist = 0.3, torch.zeros(5), torch.zeros(5), torch.zeros(3, 5)
    other = w
    for _ in range(4):
        changes = torch.randn(3, 5, generator=rng)
        step, h = server_rule(alpha, 1.0)(changes.mean(0), h)
        w = w + step
        hist = hist + changes
        other = (other + changes).mean(0) + hist.mean(0)
        torch.testing.assert_close(w, other, atol=1e-5, rtol=0)


@pytest.mark.parametrize("optimizer", ["adamw", "adam", "sgd"])
def test_what_has_no_gradient_does_not_move(optimizer: Any) -> None:
    toy = Toy(1, 1)
    toy.g = {"idle": torch.ones(1)}
    net = toy.solve(0.0, 0.1, optimizer=optimizer, steps=3, weight_decay=0.1)
    assert net.idle.item() == 1 and net.w.item() != 0
    assert float(toy.g["idle"]) == 1


def test_a_vanishing_regulariser_trains_as_fedavg_does() -> None:
    """E5, at the sites; bit for bit at 0, where the server takes the mean, too."""
    start = tensors_of(batch_norm())
    for alpha, tolerance in ((0.0, 0.0), (1e-6, 1e-6)):
        a, b = server(), server()
        for name in a.sites:
            got = FedDyn(alpha=alpha, local=LOCAL).local_update(a.members[name], start, 0, 1)["model"]
            expected = FedAvg(local=LOCAL).local_update(b.members[name], start, 0, 1)["model"]
            for key in start:
                torch.testing.assert_close(got[key], expected[key], atol=tolerance, rtol=0)
    expected = play(FedAvg(weights="equal", local=LOCAL), server()).model
    assert same(play(FedDyn(alpha=0, local=LOCAL), server()).model, expected)
    assert not same(play(FedDyn(local=LOCAL), server()).model, expected)


def test_after_one_round_the_server_is_as_far_beyond_the_mean() -> None:
    """w^1 = 2 mean - w^0 for any alpha, with all sites answering; buffers are the mean."""
    start, method = tensors_of(batch_norm()), FedDyn(local=LOCAL)
    clients = server()
    each = [clients.members[name].name for name in clients.sites]
    models = [method.local_update(server().members[name], start, 0, 1)["model"] for name in each]
    mean, got = average(models, [1] * len(models)), play(method, clients, 1)
    stepped = {name for name, _ in batch_norm().named_parameters()}
    for name in start:
        if name in stepped:
            torch.testing.assert_close(got.model[name], 2 * mean[name] - start[name], atol=1e-5, rtol=0)
        else:
            assert torch.equal(got.model[name], mean[name])
    assert any(name not in stepped for name in start)


def test_h_is_the_mean_of_the_sites_terms() -> None:
    clients = server()
    state = play(FedDyn(alpha=0.1, local=LOCAL), clients, 3)
    for name, h in state.moments[0].items():
        own = torch.stack([site.memory[MEMORY][name] for site in clients.members.values()])
        torch.testing.assert_close(h, own.mean(0), atol=1e-5, rtol=1e-4)
    # one does not answer: the sum is over three, m stays 4
    clients.silent = "2"
    after = FedDyn(alpha=0.1, local=LOCAL).round(state, clients)
    for name, h in after.moments[0].items():
        own = torch.stack([site.memory[MEMORY][name] for site in clients.members.values()])
        torch.testing.assert_close(h, own.mean(0), atol=1e-5, rtol=1e-4)
