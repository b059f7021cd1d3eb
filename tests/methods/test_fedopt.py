"""FedOpt and FedAvgM: the server's step, written out in numpy; limiting cases; buffers; resume."""

import dataclasses
from typing import Any, cast

import numpy as np
import pytest
import torch
import unet_sites as voxels
from fakes import Replies, Server, same
from image_sites import SETUP_1, ImageSite, cnn
from pydantic import ValidationError
from torch import nn

from fedatlas.core.tensors import Tensors, average, from_tree, tensors_of, to_tree
from fedatlas.learning.loop import Local
from fedatlas.methods.condistfl import ConDistFL
from fedatlas.methods.fedalign import FedAlign
from fedatlas.methods.fedavg import FedAvg
from fedatlas.methods.fedavgm import FedAvgM
from fedatlas.methods.fedopt import FedOpt
from fedatlas.methods.moon import MOON
from fedatlas.methods.shared.averaging import RowState
from fedatlas.methods.shared.server_step import StepRowState, StepState, started, stepped
from fedatlas.transport import wire

LOCAL = Local(optimizer="sgd", batch=4, steps=2, lr=0.1)
N = (3, 5)
PLAIN = FedOpt(lr=1.0, momentum=0.0, local=LOCAL)
OPTIMIZERS = ("sgd", "adam", "yogi", "adagrad")


def batch_norm() -> nn.Module:
    return cnn(norm="batch")


def trained(method: Any, rounds: int = 2, annotated: "set[int] | None" = None) -> Any:
    """The state after some rounds at four sites of 4 to 7 cases with a net that has buffers."""
    sites = [
        ImageSite(name, annotated or own, 4 + index, batch_norm)
        for index, (name, own) in enumerate(SETUP_1.items())
    ]
    server = cast(Any, Server(*sites))
    state = dataclasses.replace(method.start(batch_norm(), server), rounds=rounds)
    for _ in range(rounds):
        state = method.round(state, server)
    return state


class Small(nn.Module):
    """Two parameters; one buffer of each kind."""

    def __init__(self) -> None:
        super().__init__()
        rng = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(3, 4, generator=rng))
        self.bias = nn.Parameter(torch.randn(3, generator=rng))
        self.mean: torch.Tensor
        self.count: torch.Tensor
        self.register_buffer("mean", torch.randn(3, generator=rng))
        self.register_buffer("count", torch.tensor(7))


class Scripted:
    """Sites "a" and "b" that answer a given change of the model they get; None: the model as it came."""

    def __init__(self, *changes: "list[Tensors] | None"):
        self.changes, self.answers = list(changes), []

    def call(self, function: Any, *, model: Tensors, round: int, rounds: int) -> Replies:
        moved = self.changes[round] or [{name: torch.zeros_like(x) for name, x in model.items()}] * 2
        models = [{name: x + change[name] for name, x in model.items()} for change in moved]
        self.answers.append(models)
        return Replies({s: {"model": m, "n": n} for s, m, n in zip("ab", models, N, strict=True)})


def random_changes(seed: int) -> list[Tensors]:
    rng = torch.Generator().manual_seed(seed)
    return [
        {
            name: torch.randn(x.shape, generator=rng).mul_(0.1)
            if x.is_floating_point()
            else torch.tensor(seed + site)
            for name, x in tensors_of(Small()).items()
        }
        for site in range(2)
    ]


def scripted(method: Any, *changes: "list[Tensors] | None") -> tuple[list[Any], Scripted]:
    """The states from the first on, and what the sites answered."""
    clients = Scripted(*changes)
    states = [dataclasses.replace(method.start(Small(), clients), rounds=len(changes))]
    for _ in changes:
        states.append(method.round(states[-1], clients))
    return states, clients


@pytest.mark.parametrize("weights", ["cases", "equal"])
def test_a_plain_step_of_the_server_is_fedavg(weights: Any) -> None:
    """E3 and E4, bit for bit, buffers too."""
    expected = trained(FedAvg(weights=weights, local=LOCAL)).model
    assert same(trained(dataclasses.replace(PLAIN, weights=weights)).model, expected)
    for damping in (0, "beta"):
        method = FedAvgM(beta=0.0, damping=cast(Any, damping), weights=weights, local=LOCAL)
        assert same(trained(method).model, expected)
    assert not same(trained(FedOpt(weights=weights, local=LOCAL)).model, expected)
    assert not same(trained(FedAvgM(weights=weights, local=LOCAL)).model, expected)


def test_the_first_round_with_momentum_is_fedavg() -> None:
    """v = Delta in the first round: (1, 0.6) is FedAvg there, bit for bit, and no longer in the second."""
    expected = trained(FedAvg(local=LOCAL), rounds=1).model
    assert same(trained(FedOpt(weights="cases", local=LOCAL), rounds=1).model, expected)
    assert same(trained(FedAvgM(local=LOCAL), rounds=1).model, expected)
    assert not same(trained(FedAvgM(damping="beta", local=LOCAL), rounds=1).model, expected)


def test_a_plain_step_keeps_the_mean_where_the_change_cannot_be_represented() -> None:
    """x + (mean - x) is not the mean in float32 if x is much larger."""
    net = nn.Linear(1, 2, bias=False)
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[3e4], [-0.0]]))
    state = started(net, initial=(0.0,), per_class=False)
    mean = {"weight": torch.tensor([[1.2345e-6], [7.0]])}
    assert (state.model["weight"] + (mean["weight"] - state.model["weight"]) != mean["weight"]).any()
    assert same(stepped(state, mean, lambda Delta, m: (Delta, Delta)).model, mean)


def literal(method: Any, changes: list[list[Tensors]], name: str) -> list[np.ndarray]:
    """x_1, x_2, … of one parameter, in float64, as the papers write it."""
    x = tensors_of(Small())[name].double().numpy()
    share = np.array([0.5, 0.5] if method.weights == "equal" else [3 / 8, 5 / 8])
    m, v, path = np.zeros_like(x), np.full_like(x, getattr(method, "tau", 0.0) ** 2), []
    for pair in changes:
        Delta = sum(w * change[name].double().numpy() for w, change in zip(share, pair, strict=True))
        if isinstance(method, FedAvgM):
            m = method.beta * m + (1 - method.beta if method.damping == "beta" else 1) * Delta
            x = x + m
        elif method.optimizer == "sgd":
            m = method.momentum * m + Delta
            x = x + method.lr * m
        else:
            m = method.beta1 * m + (1 - method.beta1) * Delta
            if method.optimizer == "adam":
                v = method.beta2 * v + (1 - method.beta2) * Delta**2
            elif method.optimizer == "yogi":
                v = v - (1 - method.beta2) * Delta**2 * np.sign(v - Delta**2)
            else:
                v = v + Delta**2
            x = x + method.lr * m / (np.sqrt(v) + method.tau)
        path.append(x)
    return path


@pytest.mark.parametrize(
    "method",
    [FedOpt(optimizer=cast(Any, name), lr=0.3, tau=0.05, weights="cases") for name in OPTIMIZERS]
    + [FedOpt(optimizer="yogi", lr=0.3, beta1=0.0, tau=0.5), FedAvgM(), FedAvgM(beta=0.7, damping="beta")],
    ids=lambda method: f"{type(method).__name__}-{getattr(method, 'optimizer', method.weights)}",
)
def test_rounds_against_numpy(method: Any) -> None:
    changes = [random_changes(seed) for seed in (1, 2, 3)]
    states, _ = scripted(method, *changes)
    for name in ("weight", "bias"):
        for state, x in zip(states[1:], literal(method, changes, name), strict=True):
            np.testing.assert_allclose(state.model[name].numpy(), x, rtol=1e-6, atol=2e-6)


def test_the_optimizers_differ() -> None:
    changes = [random_changes(seed) for seed in (1, 2)]
    ends = [
        scripted(FedOpt(optimizer=cast(Any, name), lr=0.3), *changes)[0][-1].model["weight"]
        for name in OPTIMIZERS
    ]
    for i, a in enumerate(ends):
        assert all(not torch.allclose(a, b, atol=1e-3) for b in ends[:i])


def test_sgd_is_that_of_torch_with_its_schedule() -> None:
    """The pseudo-gradient is -Delta; the learning rate goes from 1 along a cosine to 0.9."""
    changes = [random_changes(seed) for seed in (1, 2, 3)]
    states, _ = scripted(FedOpt(lr_end=0.9), *changes)
    x = nn.Parameter(tensors_of(Small())["weight"])
    optimizer = torch.optim.SGD([x], lr=1.0, momentum=0.6)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3, eta_min=0.9)
    for pair, state in zip(changes, states[1:], strict=True):
        x.grad = -(pair[0]["weight"] + pair[1]["weight"]) / 2
        optimizer.step()
        schedule.step()
        torch.testing.assert_close(state.model["weight"], x.detach(), rtol=1e-6, atol=2e-6)


def test_without_a_learning_rate_it_is_that_of_the_optimizer() -> None:
    assert FedOpt().eta(3, 9) == 1.0
    assert FedOpt(optimizer="yogi").eta(3, 9) == 0.01
    assert FedOpt(lr=0.5, lr_end=0.1).eta(0, 9) == 0.5


@pytest.mark.parametrize("method", [FedOpt(), FedOpt(optimizer="adam"), FedAvgM(damping="beta")])
def test_buffers_are_averaged_and_have_no_moments(method: Any) -> None:
    states, clients = scripted(method, *(random_changes(seed) for seed in (1, 2)))
    weights = N if method.weights == "cases" else (1, 1)
    for state, models in zip(states[1:], clients.answers, strict=True):
        mean = average(models, weights)
        assert all(list(moment) == ["weight", "bias"] for moment in state.moments)
        assert list(state.model) == list(mean)
        assert torch.equal(state.model["mean"], mean["mean"])
        assert torch.equal(state.model["count"], torch.maximum(models[0]["count"], models[1]["count"]))
    assert not torch.equal(states[-1].model["weight"], average(clients.answers[-1], weights)["weight"])


@pytest.mark.parametrize("method", [*(FedOpt(optimizer=cast(Any, o)) for o in OPTIMIZERS), FedAvgM()])
def test_equal_models_are_a_fixed_point_without_velocity_only(method: Any) -> None:
    (first, second), _ = scripted(method, None)
    assert same(first.model, second.model)
    (_, second, third), _ = scripted(method, random_changes(1), None)
    assert not torch.equal(second.model["weight"], third.model["weight"])
    assert torch.equal(second.model["mean"], third.model["mean"])


@pytest.mark.parametrize("method", [*(FedOpt(optimizer=cast(Any, o)) for o in OPTIMIZERS), FedAvgM()])
def test_a_resumed_state_goes_on_with_equal_bits(method: Any) -> None:
    changes = [random_changes(seed) for seed in (1, 2)]
    states, _ = scripted(method, *changes)
    kept = from_tree(StepState, wire.decode(wire.encode(to_tree(states[1]))))
    again = method.round(kept, cast(Any, Scripted(*changes)))
    assert wire.encode(to_tree(again)) == wire.encode(to_tree(states[2]))
    assert all(value.dtype == torch.float32 for moment in again.moments for value in moment.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_moments_have_the_precision_of_the_parameters_or_more(dtype: torch.dtype) -> None:
    net = nn.Linear(2, 2).to(dtype)
    state = started(net, initial=(0.0, 0.25), per_class=False)
    mean = {name: value + 1 for name, value in state.model.items()}
    after = stepped(state, mean, lambda Delta, m, v: (Delta, m, v))
    assert same(after.model, mean)
    expected = torch.promote_types(dtype, torch.float32)
    assert all(x.dtype == expected for moment in after.moments for x in moment.values())
    assert after.moments[1]["bias"].tolist() == [0.25, 0.25]


@pytest.mark.parametrize("make", [FedOpt, FedAvgM])
def test_rows_of_the_head_can_be_averaged_by_their_annotations(make: Any) -> None:
    """A row that nobody annotates has Delta = 0 and stays; else it is FedAvg with the same switch."""
    method = make(aggregate_unlabelled_rows=False, weights="cases", local=LOCAL)
    assert method.state is StepRowState and issubclass(StepRowState, RowState)
    assert method.summed is None
    assert make(weights="equal").summed == "equal"
    start = tensors_of(batch_norm())
    state = trained(method, rounds=1, annotated={0, 1})
    expected = trained(FedAvg(aggregate_unlabelled_rows=False, local=LOCAL), rounds=1, annotated={0, 1})
    assert type(state) is StepRowState and same(state.model, expected.model)
    moved = (state.model["head.weight"] != start["head.weight"]).any(1)
    assert moved.tolist() == [True, True, False, False, False, False]


@pytest.mark.parametrize(
    ("make", "wrong"),
    [
        (FedOpt, {"optimizer": "rmsprop"}),
        (FedOpt, {"lr": 0.0}),
        (FedOpt, {"momentum": 1.0}),
        (FedOpt, {"beta2": -0.1}),
        (FedOpt, {"tau": 0.0}),
        (FedAvgM, {"beta": 1.0}),
        (FedAvgM, {"damping": 0.9}),
    ],
)
def test_options_out_of_range_are_refused(make: Any, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        make(**wrong)


@pytest.mark.parametrize("kind", [FedAlign, MOON], ids=lambda kind: kind.__name__)
def test_any_mean_of_models_may_step_with_momentum(kind: Any) -> None:
    """It is stepped as FedAvgM steps FedAvg's mean; with momentum 0 nothing is kept between rounds."""
    method = kind(server_momentum=0.6, weights="equal", local=LOCAL)
    plain = kind(weights="equal", local=LOCAL)
    one, mean_of_one = trained(method, rounds=1), trained(plain, rounds=1)
    assert same(one.model, mean_of_one.model), "m starts at 0"
    assert type(one) is StepState and not isinstance(mean_of_one, StepState)
    assert not same(trained(method).model, trained(plain).model)


def test_condistfl_with_momentum_and_without_distillation_is_fedopt() -> None:
    options: dict[str, Any] = {"weights": "equal", "local": voxels.LOCAL}
    condistfl = ConDistFL(lambda_start=0.0, lambda_end=0.0, server_momentum=0.6, **options)
    assert same(
        voxels.play(condistfl, rounds=3).model, voxels.play(FedOpt(momentum=0.6, **options), rounds=3).model
    )
