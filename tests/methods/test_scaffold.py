"""SCAFFOLD: exact numbers, the published local step, its three control variates, limiting cases."""

import copy
import dataclasses
import random
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from fakes import Server, same
from image_sites import SETUP_1, ImageSite, cnn
from torch import Tensor, nn

from fedatlas.core.batch import Batch
from fedatlas.core.errors import FederationError
from fedatlas.core.labels import LabelSpace, SiteLabels
from fedatlas.core.tensors import Tensors, load, tensors_of
from fedatlas.learning.loop import Local, Loop, Stepper
from fedatlas.losses import LossChoice
from fedatlas.methods.fedavg import FedAvg
from fedatlas.methods.scaffold import MEMORY, Control, Scaffold, gradient_at, moved
from fedatlas.methods.shared.server_step import StepState

LOCAL = Local(optimizer="sgd", batch=4, steps=2, lr=0.1)
PLAIN = Local(optimizer="sgd", momentum=0.0, weight_decay=0.0, schedule="constant", batch=4, steps=3, lr=0.1)
VECTORS = Path(__file__).parents[1] / "vectors"
SPACE = LabelSpace(("background", "a", "b"))


def batch_norm() -> nn.Module:
    return cnn(norm="batch")


def sites(make: Any = batch_norm) -> list[ImageSite]:
    return [ImageSite(name, own, 4 + index, make) for index, (name, own) in enumerate(SETUP_1.items())]


def play(method: Any, server: Any, rounds: int = 2, net: nn.Module | None = None) -> Any:
    state = dataclasses.replace(method.start(net or batch_norm(), server), rounds=rounds)
    for _ in range(rounds):
        state = method.round(state, server)
    return state


# ------------------------------------------------------------------------------------------------------ one weight


class Weight(nn.Module):
    """One number, and one that nothing depends on."""

    def __init__(self, w: float = 0.0) -> None:
        super().__init__()
        self.w, self.idle = nn.Parameter(torch.tensor([w])), nn.Parameter(torch.ones(1))


class Toy:
    """f(w) = s/2 (w - a)^2."""

    device = torch.device("cpu")

    def __init__(self, a: float, s: float) -> None:
        self.a, self.s, self.memory = a, s, cast(dict[str, Any], {})

    def batches(self, *, batch: int, steps: int | None = None, epochs: float | None = None) -> list[Any]:
        return [None] * (steps or 0)

    def log(self, **numbers: float) -> None: ...

    def f(self, net: Any, batch: Any) -> Tensor:
        return self.s / 2 * (net.w - self.a).square().sum()


def descend(toy: Toy, net: Weight, control: Control, local: Local) -> None:
    """The paper's Alg. 1, lines 9 to 12."""
    loop = Loop(cast(Any, toy), net, local, round=0, rounds=1)
    for _ in loop:
        step(toy, net, control, loop)


def step(toy: Toy, net: Weight, control: Control, by: Stepper) -> None:
    g_i = by.gradients(toy.f(net, None))
    control.see(g_i, by.rate)
    by.move(control.corrected(g_i))


def scaffold_round(x: Tensors, c: Tensors, toys: list[Toy], local: Local) -> tuple[Tensors, Tensors]:
    """One round of the paper's Alg. 1 with eta_g = 1."""
    ends, changes = [], []
    for toy in toys:
        net = Weight()
        load(net, x)
        kept = toy.memory.get(MEMORY, {})
        control = Control(net, c, kept)
        descend(toy, net, control, local)
        new = control.mean_gradient()
        changes.append({name: value - kept.get(name, 0) for name, value in new.items()})
        toy.memory[MEMORY] = new
        ends.append(tensors_of(net))
    mean = {name: torch.stack([end[name] for end in ends]).mean(0) for name in x}
    return mean, moved(c, [(str(i), change) for i, change in enumerate(changes)], {}, len(toys))[0]


def test_two_rounds_by_hand() -> None:
    """a = 1, 3; s = 1; one step of 0.1 from 0. The gradients are -1 and -3; then all sites walk along their mean."""
    toys, local = [Toy(1, 1), Toy(3, 1)], dataclasses.replace(PLAIN, steps=1)
    x, c = tensors_of(Weight()), {"w": torch.zeros(1), "idle": torch.zeros(1)}
    x, c = scaffold_round(x, c, toys, local)
    assert float(x["w"]) == pytest.approx(0.2) and float(c["w"]) == pytest.approx(-2)
    assert [float(toy.memory[MEMORY]["w"]) for toy in toys] == pytest.approx([-1, -3])
    net = Weight()
    load(net, x)
    descend(toys[0], net, Control(net, c, toys[0].memory[MEMORY]), local)
    assert net.w.item() == pytest.approx(0.2 + 0.1 * (0.8 + 2 - 1))  # y - eta (g + c - c_i)


def test_sites_of_unequal_curvature_reach_the_common_optimum() -> None:
    """Many local steps: FedAvg stays near the mean of the sites' own minima, (0 + 4) / 2; the optimum is 3.2."""
    toys, local = [Toy(0, 1), Toy(4, 4)], dataclasses.replace(PLAIN, steps=10, lr=0.05)
    x, c = tensors_of(Weight()), {"w": torch.zeros(1), "idle": torch.zeros(1)}
    for _ in range(60):
        x, c = scaffold_round(x, c, toys, local)
    assert float(x["w"]) == pytest.approx(3.2, abs=1e-3)
    assert float(c["w"]) == pytest.approx(0, abs=1e-2)
    assert float(c["idle"]) == 0 and float(x["idle"]) == 1
    plain = tensors_of(Weight())
    for _ in range(60):
        fresh = [Toy(0, 1), Toy(4, 4)]
        plain, _ = scaffold_round(plain, {"w": torch.zeros(1), "idle": torch.zeros(1)}, fresh, local)
    assert abs(float(plain["w"]) - 3.2) > 0.2


def test_the_mean_control_is_over_the_sites_that_train_a_parameter() -> None:
    c = {"w": torch.tensor([1.0]), "idle": torch.tensor([5.0]), "one": torch.tensor([0.0])}
    changes = [
        ("x", {"w": torch.tensor([2.0])}),
        ("y", {"w": torch.tensor([4.0]), "one": torch.tensor([9.0])}),
    ]
    out, untrained = moved(
        c, changes, {}, sites=4
    )  # half of the sites answered; the others' c_i are 0, as in Eq. (5)
    assert {name: float(value) for name, value in out.items()} == {"w": 2.5, "idle": 10.0, "one": 3.0}
    assert untrained == {"x": ["idle", "one"], "y": ["idle"]}


def test_c_is_the_mean_of_the_c_i_whoever_is_lost_and_whatever_a_site_trains() -> None:
    """Against the definition, over rounds in which any sites answer and train any parameters of theirs."""
    generator = random.Random(7)
    mine = {"a": "pq", "b": "p", "c": "r", "d": ""}  # nobody is told that d trains nothing until it answers
    c = {name: torch.zeros(1) for name in "pqr"}
    c_i: dict[str, dict[str, float]] = {site: {} for site in mine}
    answered, untrained = set(), {}
    for _ in range(40):
        changes = []
        for site in sorted(generator.sample(sorted(mine), generator.randint(1, 4))):
            new = {name: generator.uniform(-1, 1) for name in mine[site] if generator.random() < 0.7}
            changes.append((site, {n: torch.tensor([v - c_i[site].get(n, 0)]) for n, v in new.items()}))
            c_i[site] |= new
            answered.add(site)
        c, untrained = moved(c, changes, untrained, sites=len(mine))
        for name, value in c.items():
            count = len([site for site in mine if name in c_i[site] or site not in answered])
            total = sum(of.get(name, 0.0) for of in c_i.values())
            assert float(value) == pytest.approx(total / count if count else 0.0, abs=1e-5)


@pytest.mark.parametrize("optimizer", ["adamw", "adam", "sgd"])
def test_what_has_no_gradient_does_not_move(optimizer: Any) -> None:
    """c of a parameter that this site does not train is that of others."""
    toy, net = Toy(1, 1), Weight()
    c = {"w": torch.zeros(1), "idle": torch.ones(1)}
    local = Local(optimizer=optimizer, steps=3, weight_decay=0.1)
    control = Control(net, c, {})
    descend(toy, net, control, local)
    assert net.idle.item() == 1 and net.w.item() != 0
    assert control.trained == ["w"]


@pytest.mark.parametrize("clip", [None, 0.5])
def test_a_scaled_loss_changes_nothing(clip: float | None) -> None:
    """As with fp16: gradients arrive multiplied; what overflows is no step and tells nothing."""
    found = []
    for scale in (None, 1024.0):
        net, toy = Weight(), Toy(3, 1)
        control = Control(
            net, {"w": torch.tensor([-2.0]), "idle": torch.zeros(1)}, {"w": torch.tensor([-1.0])}
        )
        local = dataclasses.replace(PLAIN, clip=clip)
        by = Stepper(net, local, torch.device("cpu"))
        if scale:
            by.scaler = torch.amp.GradScaler("cpu", init_scale=scale)  # type: ignore[assignment]
        for _ in range(2):
            step(toy, net, control, by)
        if scale:
            toy.s = 1e38
            step(toy, net, control, by)
        found.append((net.w.item(), control.mean_gradient()["w"].item(), control.change()["w"].item()))
    assert found[1] == pytest.approx(found[0])
    assert found[0][0] == pytest.approx(0.1 if clip else 0.4 + 0.1 * 3.6)


# -------------------------------------------------------------------------------------------------------- a real net


class PublishedSite:
    """The whole data of the published step, as one batch with every class known."""

    device, n_train, name = torch.device("cpu"), 6, "x"

    def __init__(self) -> None:
        self.memory: dict[str, Any] = {}
        self.labels = SiteLabels(SPACE, frozenset({1, 2}))
        self.n_labelled = self.n_positive = torch.tensor([6, 6, 6])

    def network(self, model: Tensors) -> nn.Module:
        net = nn.Linear(4, 3)
        load(net, model)
        return net

    def batches(self, *, batch: int, steps: int | None = None, epochs: float | None = None) -> list[Batch]:
        v = vectors()
        known = torch.ones(len(v["x"]), 3, dtype=torch.bool)
        return [Batch(v["x"], v["y"].long().flatten(), known, [])] * (steps or 0)

    def log(self, **numbers: float) -> None: ...


def vectors() -> dict[str, Tensor]:
    with np.load(VECTORS / "fedprox_scaffold_fedavg_step.npz") as file:
        return {key: torch.from_numpy(file[key]) for key in file.files}


@pytest.mark.parametrize("split", [0.0, 0.7])
def test_the_local_step_equals_the_published_one(split: float) -> None:
    """state_diff = c - c_k, however the two share it."""
    v = vectors()
    local = Local(
        optimizer="sgd", lr=0.1, momentum=0.0, weight_decay=1e-3, clip=10.0, steps=3, schedule="constant"
    )
    loss = LossChoice(name="marginal_dice_ce", options={"dice": 0.0})

    def of(values: Tensor) -> Tensors:
        return {"weight": values[:12].reshape(3, 4), "bias": values[12:]}

    site = PublishedSite()
    site.memory[MEMORY] = of(-split * v["state_diff"])
    reply = Scaffold(loss=loss, local=local).local_update(
        cast(Any, site), model=of(v["w_global"]), c=of((1 - split) * v["state_diff"]), round=0, rounds=1
    )
    got = torch.cat([reply["model"]["weight"].flatten(), reply["model"]["bias"]])
    torch.testing.assert_close(got, v["w_scaffold"], atol=1e-5, rtol=0)
    assert not torch.allclose(got, v["w_fedavg"], atol=1e-3)


@pytest.mark.parametrize("local", [LOCAL, Local(batch=4, steps=2, lr=1e-2, clip=1.0)])
def test_the_first_round_is_uniform_fedavg(local: Local) -> None:
    """E6, bit for bit; the second round is not, and the control variates are why."""
    method, other = Scaffold(local=local), FedAvg(weights="equal", local=local)
    assert same(play(method, Server(*sites()), 1).model, play(other, Server(*sites()), 1).model)
    assert not same(play(method, Server(*sites())).model, play(other, Server(*sites())).model)


def test_the_server_keeps_the_mean_of_the_controls() -> None:
    """c = mean c_i after any round in which all sites answered, Eq. (5)."""
    server = Server(*sites())
    state: StepState = play(Scaffold(local=LOCAL), server, 3)
    for name, c in state.moments[0].items():
        own = torch.stack([site.memory[MEMORY][name] for site in server.members.values()])
        torch.testing.assert_close(c, own.mean(0), atol=1e-6, rtol=1e-4)


def test_a_site_that_is_lost_counts_in_the_share() -> None:
    method, names = Scaffold(local=LOCAL), list(SETUP_1)
    state = play(method, Server(*sites()), 1)
    all_four = method.round(state, cast(Any, Server(*sites())))
    partial = method.round(state, cast(Any, Server(*sites(), silent=names[0])))
    three = method.round(state, cast(Any, Server(*sites()[1:])))
    assert same(partial.model, three.model) and not same(partial.model, all_four.model)
    for name, c in state.moments[0].items():
        whole, part = three.moments[0][name] - c, partial.moments[0][name] - c
        torch.testing.assert_close(part, 0.75 * whole, atol=1e-6, rtol=1e-4)


def test_the_step_of_the_server() -> None:
    full, half = play(Scaffold(local=LOCAL), Server(*sites()), 1), Scaffold(eta_g=0.5, local=LOCAL)
    start, got = tensors_of(batch_norm()), play(half, Server(*sites()), 1).model
    for name, _ in batch_norm().named_parameters():
        torch.testing.assert_close(got[name], (start[name] + full.model[name]) / 2, atol=1e-6, rtol=0)


def test_for_plain_sgd_the_mean_gradient_is_option_two() -> None:
    """Eq. (4): c_i - c + (x - y) / (K eta), over two rounds with c != 0."""
    a, b = Server(*sites()), Server(*sites())
    play(Scaffold(local=PLAIN), a)
    play(Scaffold(control="weights", local=PLAIN), b)
    for name in a.members:
        one, other = a.members[name].memory[MEMORY], b.members[name].memory[MEMORY]
        assert list(one) == list(other)
        for key in one:
            torch.testing.assert_close(one[key], other[key], atol=2e-6, rtol=1e-3)


def test_option_one_is_the_gradient_at_the_global_model() -> None:
    """With a rate of almost 0 the local steps never leave it, and the site gives the same batches again."""
    slow = dataclasses.replace(PLAIN, lr=1e-12)
    a, b = Server(*sites(cnn)), Server(*sites(cnn))
    play(Scaffold(local=slow), a, 1, cnn())
    play(Scaffold(control="start", local=slow), b, 1, cnn())
    for name in a.members:
        one, other = a.members[name].memory[MEMORY], b.members[name].memory[MEMORY]
        assert list(one) == list(other)
        for key in one:
            torch.testing.assert_close(one[key], other[key], atol=1e-6, rtol=1e-4)
    site = b.members["1"]
    before = copy.deepcopy(site.memory)
    gradient_at(cast(Any, site), cnn(), lambda net, batch: net(batch.image).square().mean(), slow)
    assert list(before) == list(site.memory)


def test_option_two_is_refused_where_a_change_is_no_gradient() -> None:
    for local in (Local(), LOCAL):
        with pytest.raises(FederationError, match="control: steps"):
            Scaffold(control="weights", local=local).check(SPACE)
    Scaffold(control="weights", local=PLAIN).check(SPACE)
