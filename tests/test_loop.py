"""The loop over a round's batches: plain steps, steps by given gradients, what is kept, noted and refused."""

import dataclasses
import math
from typing import Any, cast

import pytest
import torch
from fakes import same
from torch import Tensor, nn

from fedatlas.core.batch import Batch
from fedatlas.core.errors import FederationError
from fedatlas.core.seeds import generator, isolated
from fedatlas.core.tensors import Tensors, tensors_of
from fedatlas.learning.loop import (
    Local,
    Loop,
    Stepper,
    forget_optimizer,
    lr_factor,
    optimizer_tree,
    restore_optimizer,
    train,
)

LOCALS = {
    "adamw": Local(lr=0.05, batch=3, steps=4),
    "sgd": Local(optimizer="sgd", lr=0.05, batch=3, steps=4, nesterov=True, clip=0.2),
    "bf16": Local(optimizer="adam", lr=0.05, batch=3, steps=4, precision="bf16", schedule="poly"),
    "reset": Local(lr=0.05, batch=3, steps=4, opt_state="reset"),
}


class Site:
    """Batches that depend on the round."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.round, self.memory, self.logged = 0, cast(dict[str, Any], {}), cast(dict[str, float], {})

    def batches(self, *, batch: int, steps: int | None = None, epochs: float | None = None) -> list[Batch]:
        rng = generator("loop", self.round)
        return [
            Batch(
                torch.randn(batch, 2, generator=rng), torch.randn(batch, 1, generator=rng), torch.ones(0), []
            )
            for _ in range(steps or 0)
        ]

    def log(self, **numbers: float) -> None:
        self.logged |= numbers


def site() -> Any:
    return Site()


def make() -> nn.Module:
    """Two layers, and a parameter on which nothing depends."""
    with isolated("net", 1):
        net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    net.register_parameter("idle", nn.Parameter(torch.ones(2)))
    return net


def terms(net: nn.Module, batch: Batch) -> dict[str, Tensor]:
    z = net(batch.image)
    return {"near": (z - batch.target).square().mean(), "small": 0.1 * z.abs().mean()}


def two_rounds(local: Local, how: Any) -> tuple[Tensors, Site]:
    at, net = site(), make()
    for at.round in range(2):
        how(at, net, local, at.round)
    return tensors_of(net), at


def shorthand(at: Any, net: nn.Module, local: Local, round: int) -> None:
    means = train(at, net, terms, local, round=round, rounds=2)
    assert means == {name: at.logged[name] for name in ("loss", "near", "small")}


def by_steps(at: Any, net: nn.Module, local: Local, round: int) -> None:
    loop = Loop(at, net, local, round=round, rounds=2)
    for batch in loop:
        with loop.autocast():
            value = terms(net, batch)
        loop.step(value)


def by_gradients(at: Any, net: nn.Module, local: Local, round: int) -> None:
    loop = Loop(at, net, local, round=round, rounds=2)
    for batch in loop:
        with loop.autocast():
            other, value = terms(net, batch)["near"], terms(net, batch)
        loop.gradients(3 * other)  # moves nothing
        g = loop.gradients(value)
        assert "idle" not in g
        loop.move({name: gradient.clone() for name, gradient in g.items()})
        loop.note(value)


def written_out(at: Any, net: nn.Module, local: Local, round: int) -> None:
    """With torch alone, for sgd."""
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0, momentum=0.9, nesterov=True, weight_decay=1e-2)
    if "kept" in at.memory:
        optimizer.load_state_dict(at.memory["kept"])
    for step, batch in enumerate(at.batches(batch=3, steps=4)):
        optimizer.param_groups[0]["lr"] = local.lr * 0.5 * (1 + math.cos(math.pi * (4 * round + step) / 8))
        optimizer.zero_grad()
        found = terms(net, batch)
        (found["near"] + found["small"]).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.2)
        optimizer.step()
    at.memory["kept"] = optimizer.state_dict()


@pytest.mark.parametrize("local", LOCALS.values(), ids=LOCALS)
def test_the_shorthand_is_the_loop_and_steps_are_moves_along_gradients(local: Local) -> None:
    (short, at), (long, other), (moved, third) = (
        two_rounds(local, how) for how in (shorthand, by_steps, by_gradients)
    )
    assert same(short, long) and same(short, moved)
    assert torch.equal(short["idle"], torch.ones(2)) and not same(short, tensors_of(make()))
    for one in (other, third):
        assert {k: v for k, v in one.logged.items() if k != "step_seconds"} == {
            k: v for k, v in at.logged.items() if k != "step_seconds"
        }
        assert (
            one.memory.keys()
            == at.memory.keys()
            == ({"optimizer"} if local.opt_state == "persist" else set())
        )


def test_it_is_a_loop_written_out() -> None:
    for name, value in two_rounds(LOCALS["sgd"], written_out)[0].items():
        torch.testing.assert_close(two_rounds(LOCALS["sgd"], by_steps)[0][name], value, atol=1e-7, rtol=1e-6)


def test_a_second_optimizer_follows_the_schedule_and_keeps_its_own_state() -> None:
    at, first, second = site(), make(), make()
    local = LOCALS["adamw"]
    loop = Loop(at, first, local, round=1, rounds=3, memory="one", prefix="a_")
    also = loop.also(
        second, memory="two", optimizer=torch.optim.SGD(second[2].parameters(), lr=9.0, momentum=0.5)
    )  # type: ignore[index]
    assert set(also.named) == {"2.weight", "2.bias"}
    for count, batch in enumerate(loop):
        factor = lr_factor(local, 4 + count, 12)
        assert loop.factor == also.factor == factor and loop.rate == also.rate == local.lr * factor
        loop.step(terms(first, batch))
        also.step(terms(second, batch))
        loop.note(extra=torch.tensor(float(count)))
    assert set(at.memory["one"]) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert set(at.memory["two"]) == {"2.weight", "2.bias"}
    assert set(at.logged) == {"a_loss", "a_near", "a_small", "a_extra", "steps", "step_seconds"}
    assert at.logged["a_extra"] == loop.means["extra"] == 1.5 and len(loop) == at.logged["steps"] == 4
    begun = tensors_of(make())
    assert [name for name, value in tensors_of(second).items() if not torch.equal(value, begun[name])] == [
        "2.weight",
        "2.bias",
    ]
    again = Loop(at, first, local, round=2, rounds=3, memory="one")
    assert len(again.optimizer.state) == 4


def test_gradients_of_modules_are_clipped_each_by_itself() -> None:
    local = dataclasses.replace(LOCALS["sgd"], clip=0.01)
    net = make()
    by = Stepper(net, local, torch.device("cpu"), clipped=(net[0], net[2]))  # type: ignore[index]
    by.gradients(terms(net, site().batches(batch=3, steps=1)[0]))
    by.clip()
    for layer in (net[0], net[2]):  # type: ignore[index]
        norm = math.sqrt(sum(float(p.grad.square().sum()) for p in layer.parameters()))  # type: ignore[union-attr]
        assert norm == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("opt_state", ["persist", "reset"])
def test_two_rounds_of_scaled_steps_are_one_of_twice_as_many(opt_state: Any, monkeypatch) -> None:
    """The scale of the loss is not sought again in every round: here nine of the first round's twelve steps overflow. As with fp16, of a
    scale at which float32 overflows."""
    scaler = torch.amp.GradScaler
    monkeypatch.setattr(torch.amp, "GradScaler", lambda device, enabled: scaler(device, init_scale=2.0**127))
    local = Local(optimizer="sgd", momentum=0.0, lr=0.001, batch=3, steps=12, opt_state=opt_state)

    def trained(at: Any, *, rounds: int) -> Tensors:
        net = make()
        for at.round in range(rounds):
            every = [batch for r in range(2) for batch in Site.batches(site_of(r), batch=3, steps=12)]
            at.batches = lambda every=every, **how: every[12 * at.round :][: 24 // rounds]
            loop = Loop(at, net, local, round=at.round, rounds=rounds)
            for batch in loop:
                loop.step({name: 300 * value for name, value in terms(net, batch).items()})
            logged.append(at.logged.pop("overflows", 0))
        return tensors_of(net)

    def site_of(round: int) -> Any:
        made = Site()
        made.round = round
        return made

    logged: list[float] = []
    two, one = trained(site(), rounds=2), trained(site(), rounds=1)
    assert same(two, one) and not same(two, tensors_of(make()))
    assert logged == [9, 0, 9]
    at = site()
    trained(at, rounds=2)
    forget_optimizer(at, "optimizer")
    assert at.memory == {}


@pytest.mark.parametrize("clip", [None, 0.2])
def test_a_scaled_loss_changes_nothing_and_an_overflow_moves_nothing(clip: float | None) -> None:
    """As with fp16, whose scale a loop can only be given on a GPU."""
    ends = []
    for scale in (None, 2.0**10):
        net = make()
        by = Stepper(net, dataclasses.replace(LOCALS["sgd"], clip=clip), torch.device("cpu"))
        if scale:
            by.scaler = torch.amp.GradScaler("cpu", init_scale=scale)  # type: ignore[assignment]
        for batch in site().batches(batch=3, steps=3):
            by.step(terms(net, batch))
            by.move(by.gradients(terms(net, batch)))
        ends.append(tensors_of(net))
        if scale:
            g = by.gradients(terms(net, batch)["near"] * 1e38)
            assert g == {}
            by.move(g)
            assert same(tensors_of(net), ends[-1]) and by.scaler.get_scale() == scale / 2
    for name, value in ends[0].items():
        torch.testing.assert_close(ends[1][name], value)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_moments_of_another_width_are_refused(optimizer: Any) -> None:
    """torch's fused optimizers would write beyond them."""
    local, small = Local(optimizer=optimizer, momentum=0.9), nn.Linear(3, 4)
    stepper = Stepper(small, local, torch.device("cpu"))
    stepper.step(small(torch.ones(2, 3)).sum())
    tree = optimizer_tree(stepper.optimizer, small)
    large = nn.Linear(3, 5)
    with pytest.raises(FederationError, match="optimizer's state is of another net"):
        restore_optimizer(Stepper(large, local, torch.device("cpu")).optimizer, large, cast(Any, tree))
    again = Stepper(small, local, torch.device("cpu"))
    restore_optimizer(again.optimizer, small, cast(Any, tree))
    assert optimizer_tree(again.optimizer, small).keys() == tree.keys()


def test_what_cannot_be_is_told() -> None:
    at = site()
    with pytest.raises(FederationError, match="precision fp16 needs a GPU"):
        train(at, make(), terms, dataclasses.replace(LOCALS["adamw"], precision="fp16"), round=0, rounds=1)

    def broken(net: nn.Module, batch: Batch) -> dict[str, Tensor]:
        return {"near": net(batch.image).mean() * math.inf, "small": batch.image.mean()}

    with pytest.raises(FloatingPointError, match="loss, near not finite within 1 steps"):
        train(at, make(), broken, dataclasses.replace(LOCALS["sgd"], steps=1), round=0, rounds=1)
    assert at.logged == {}


def test_a_loop_puts_its_net_into_training_mode() -> None:
    net = nn.Sequential(make(), nn.Dropout(0.5)).eval()
    Loop(site(), net, LOCALS["sgd"], round=0, rounds=1)
    assert all(module.training for module in net.modules())


def test_moments_of_an_earlier_choice_are_not_taken_up_where_they_are_reset() -> None:
    """As where a run goes on with another `opt_state`."""
    at, net = site(), make()
    for batch in (loop := Loop(at, net, LOCALS["adamw"], round=0, rounds=2)):
        loop.step(terms(net, batch))
    assert at.memory["optimizer"]
    assert Loop(at, net, LOCALS["adamw"], round=1, rounds=2).optimizer.state
    assert not Loop(at, net, LOCALS["reset"], round=1, rounds=2).optimizer.state


def test_a_loop_counts_warm_up_and_restarts_in_the_unit_that_is_asked_for() -> None:
    """Four steps a round: a round of warm-up is four steps, a restart every two rounds every eight."""
    chosen = Local(
        optimizer="sgd",
        lr=1.0,
        batch=3,
        steps=4,
        warmup=1,
        schedule="restarts",
        restart=2,
        schedule_unit="rounds",
    )
    same = dataclasses.replace(chosen, warmup=4, restart=8, schedule_unit="steps")
    rates: list[list[float]] = [[], []]
    for seen, local in zip(rates, (chosen, same), strict=True):
        at, net = site(), make()
        for round in range(4):
            loop = Loop(at, net, local, round=round, rounds=4)
            for batch in loop:
                seen.append(loop.rate)
                loop.step(terms(net, batch))
    assert rates[0] == pytest.approx(rates[1])
    assert rates[0][:4] == pytest.approx([0.2, 0.4, 0.6, 0.8]) and rates[0][4] == rates[0][12] == 1.0
