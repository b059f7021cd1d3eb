"""FedSM: the pull, its limits, the selector's step, and who is asked of which image."""

import dataclasses
import itertools
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fakes import Replies, Server, same
from image_sites import SETUP_1, ImageSite, cnn
from torch import Tensor, nn

from fedatlas import nets
from fedatlas.core.batch import Batch
from fedatlas.core.contract import Member
from fedatlas.core.errors import FederationError
from fedatlas.core.labels import LabelSpace
from fedatlas.core.tensors import Tensors, average, from_tree, tensors_of, to_tree
from fedatlas.evaluation.images import Panel
from fedatlas.federation.design import Experiment, training_sites
from fedatlas.federation.file import parse_federation
from fedatlas.learning.inference import Inference, chosen_by, predict, predict_together, selected
from fedatlas.learning.loop import Local
from fedatlas.methods.fedavg import FedAvg
from fedatlas.methods.fedsm import (
    FedSM,
    FedSMState,
    Selector,
    SelectorState,
    selector_mean,
    soft_pull,
    train_selector,
)
from fedatlas.methods.standalone import Standalone

VECTORS = Path(__file__).parents[1] / "vectors"
LOCAL = Local(optimizer="adamw", batch=4, steps=2, lr=1e-2)
SITES = sorted(SETUP_1)


def main_net() -> nn.Module:
    return cnn(norm="batch")


def selector_net(outputs: int = len(SITES)) -> nn.Module:
    chosen = {"filters": [4], "convolutions": [1], "norm": "none"}
    return nets.build("cnn", chosen, in_channels=1, classes=outputs, spatial_dims=2, seed=5)


class RoutedSite(ImageSite):
    def network(self, model: Tensors | None = None, name: str = "main") -> nn.Module:
        made = ImageSite(self.name, {0}, 1, main_net if name == "main" else selector_net)
        return made.network(model)


class RoutedServer(Server):
    outputs = len(SITES)

    def network(self, model: Tensors | None = None, name: str = "main") -> nn.Module:
        assert name == "selector" and model is None
        return selector_net(self.outputs).eval()


def server() -> Any:
    return RoutedServer(*(RoutedSite(name, own, 4 + k) for k, (name, own) in enumerate(SETUP_1.items())))


def play(method: Any, clients: Any, rounds: int = 2) -> Any:
    state = dataclasses.replace(method.start(main_net(), clients), rounds=rounds)
    for _ in range(rounds):
        state = method.round(state, clients)
        state = from_tree(type(state), to_tree(state))
    return state


# ------------------------------------------------------------------------------------------------------------ training


def test_soft_pull_as_nvflare_computes_it() -> None:
    v = np.load(VECTORS / "nvflare_fedsm_softpull.npz")
    names = ("b", "a", "c")  # any order: it is by name
    pulled = soft_pull(
        {name: {"w": torch.from_numpy(v["person_in"][k])} for k, name in enumerate(names)}, 0.7
    )
    assert list(pulled) == sorted(names)
    for k, name in enumerate(names):
        assert torch.allclose(pulled[name]["w"], torch.from_numpy(v["person_out"][k]), rtol=0, atol=1e-6)
    mean = average(({"w": torch.from_numpy(w)} for w in v["global_in"]), v["steps"].tolist())
    assert torch.allclose(mean["w"].double(), torch.from_numpy(v["global_out"]), rtol=0, atol=1e-6)


def test_counters_are_not_averaged() -> None:
    models = {name: {"n": torch.tensor(k), "w": torch.tensor(float(k))} for k, name in enumerate("abc")}
    assert [int(m["n"]) for m in soft_pull(models, 0.7).values()] == [2, 2, 2]
    assert [int(m["n"]) for m in soft_pull(models, 1.0).values()] == [0, 1, 2]
    assert [float(m["w"]) for m in soft_pull(models, 0.0).values()] == [1.5, 1.0, 0.5]
    assert same(soft_pull({"a": models["b"]}, 0.0)["a"], models["b"])


def test_a_person_that_keeps_all_of_itself_is_trained_alone() -> None:
    """E7, lam = 1, bit for bit, optimizer and counters included."""
    state = play(FedSM(lam=1.0, local=LOCAL), server())
    alone = play(Standalone(local=LOCAL), server())
    assert all(same(state.persons[site], alone.models[site]) for site in SITES)


def test_persons_that_keep_one_part_of_k_are_the_mean() -> None:
    """E7, lam = 1/K: everyone has what FedAvg with equal weights has."""
    state = play(FedSM(lam=1 / len(SITES), local=LOCAL), server())
    expected = play(FedAvg(weights="equal", local=LOCAL), server()).model
    for site in SITES:
        for name, value in expected.items():
            assert torch.allclose(state.persons[site][name].float(), value.float(), rtol=1e-4, atol=1e-5)


def test_the_global_model_is_that_of_fedavg() -> None:
    state = play(FedSM(local=LOCAL), server())
    assert same(state.model, play(FedAvg(local=LOCAL), server()).model)
    assert not any(same(state.persons[a], state.persons[b]) for a, b in [("1", "2"), ("2", "3")])


def test_a_silent_site_keeps_its_model_and_pulls_no_other() -> None:
    method = FedSM(local=LOCAL)

    def second(moved: float) -> tuple[FedSMState, FedSMState]:
        clients = server()
        first = dataclasses.replace(play(method, clients, rounds=1), rounds=2)
        first.persons["3"]["head.bias"] += moved
        clients.silent = "3"
        return first, method.round(first, clients)

    (before, after), (_, moved) = second(0.0), second(1.0)
    assert same(after.persons["3"], before.persons["3"]) and not same(after.persons["1"], before.persons["1"])
    assert all(same(after.persons[site], moved.persons[site]) for site in ("1", "2", "4"))


class InOrder(RoutedSite):
    """Every image once, in order, `batch` at a time."""

    def batches(self, *, batch: int, steps: int | None = None, epochs: float | None = None) -> list[Batch]:
        assert epochs == 1
        return [self.batch(part) for part in torch.arange(self.n_train).split(batch)]


@pytest.mark.parametrize("batch", [1, 3, 7])
def test_the_selectors_step_has_the_gradient_of_all_images(batch: int) -> None:
    """Two rounds of two steps of Adam at one site are four steps of Adam, whatever the batches."""
    site, how = cast(Any, InOrder("x", {0}, 7)), Selector(steps=2, lr=0.05)
    state = SelectorState(tensors_of(selector_net()))
    for _ in range(2):
        reply = train_selector(site, state, 2, how, batch)
        assert set(reply) == set(how.sends)
        state = SelectorState(reply["selector"], reply["exp_avg"], reply["exp_avg_sq"], state.steps + 2)
    by_hand = selector_net()
    optimizer = torch.optim.Adam(by_hand.parameters(), lr=0.05)
    for _ in range(4):
        optimizer.zero_grad()
        F.cross_entropy(by_hand(site.image), torch.full((7,), 2)).backward()
        optimizer.step()
    for name, value in tensors_of(by_hand).items():
        assert torch.allclose(state.model[name], value, rtol=1e-4, atol=1e-5), name


def test_selector_and_moments_are_averaged_by_cases() -> None:
    method, clients = FedSM(local=LOCAL), server()
    start = method.start(main_net(), clients)
    state = method.round(start, clients)
    replies = {}
    for k, site in enumerate(SITES):
        replies[site] = train_selector(clients.members[site], start.selector, k, method.selector, LOCAL.batch)
    n = [clients.members[site].n_train for site in SITES]
    for field, key in [("model", "selector"), ("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq")]:
        expected = average(Replies(replies).each(key), n)
        assert same(getattr(state.selector, field), expected) and expected
    assert state.selector.steps == 1
    plain = FedSM(local=LOCAL, selector=Selector(optimizer="sgd"))
    assert not {"exp_avg", "exp_avg_sq"} & set(plain.sends)
    assert play(plain, server()).selector.exp_avg == {}


def test_the_selector_learns_who_is_who() -> None:
    """By one step per round and site, as published; no site has images of another class than its own."""
    sites: dict[str, Any] = {name: InOrder(name, {0}, 6) for name in ("a", "d")}
    sites["d"].image += 3
    label, how = {"a": 0, "d": 3}, Selector(lr=0.1)
    state = SelectorState(tensors_of(selector_net()))
    for _ in range(40):
        told = {s: {"n": 6} | train_selector(site, state, label[s], how, 6) for s, site in sites.items()}
        state = selector_mean(Replies(told), state, how, [6, 6])
    net = selector_net().eval()
    net.load_state_dict(state.model)
    for name, site in sites.items():
        assert (net(site.image).argmax(1) == label[name]).double().mean() > 0.8
        assert site.logged["selector_loss"] < 0.5


def test_one_output_per_site_that_trains(small: dict[str, Any]) -> None:
    clients = server()
    clients.outputs = 3
    with pytest.raises(FederationError, match="has 3 outputs for 4 sites that train"):
        FedSM().start(main_net(), clients)
    small["sites"][1] |= {"role": "test"}
    small["method"] = {"name": "fedsm"}
    federation = parse_federation(small, base=Path())
    experiment = Experiment(federation, Path(small["engine"]["cache"]))
    assert training_sites(federation) == sorted(experiment.training) and len(experiment.training) == 2
    made: Any = experiment.make_net("selector")
    assert (made.classes, made.in_channels) == (2, 3)
    experiment.check_net()


def test_a_selector_that_is_too_deep_for_the_patch(small: dict[str, Any]) -> None:
    small["method"] = {"name": "fedsm", "selector": {"filters": [4] * 6}}
    federation = parse_federation(small, base=Path())
    experiment = Experiment(federation, Path(small["engine"]["cache"]))
    with pytest.raises(FederationError, match="method fedsm: its net 'selector': .*at least 32"):
        experiment.check_net()


@pytest.mark.parametrize(("axes", "cells"), [(2, 7 * 7), (3, 7 * 7 * 7)])
def test_the_published_selector_is_vgg11(axes: int, cells: int) -> None:
    """Its weights, counted by hand for 1 channel and 3 sites; on shapes alone."""
    spec = Selector(net="vgg11").spec
    with torch.device("meta"):
        net = nets.build(spec.name, spec.options, in_channels=1, classes=3, spatial_dims=axes, seed=0)
    widths = [1, 64, 128, 256, 256, 512, 512, 512, 512]
    expected = sum(a * b * 3**axes + b for a, b in itertools.pairwise(widths))
    expected += 512 * cells * 4096 + 4096 + 4096 * 4096 + 4096 + 4096 * 3 + 3
    assert sum(p.numel() for p in net.parameters()) == expected
    nets.check_output(net, 3, in_channels=1, patch=(64,) * axes)


# ------------------------------------------------------------------------------------------------------------- routing


class Says(nn.Module):
    """A voxel's class, everywhere: the one it was made for."""

    def __init__(self, c: int, classes: int = 4) -> None:
        super().__init__()
        self.logits = nn.Parameter(20.0 * F.one_hot(torch.tensor(c), classes).float())

    def forward(self, x: Tensor) -> Tensor:
        logits = self.logits.reshape(1, -1, *[1] * (x.dim() - 2))
        return logits.expand(len(x), -1, *x.shape[2:])


class Brightness(nn.Module):
    """A selector of two: the logit of the second is the mean of what it is given, times `sure`; it keeps what it saw."""

    def __init__(self, sure: float) -> None:
        super().__init__()
        self.sure, self.seen = nn.Parameter(torch.tensor(float(sure))), list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        assert not self.training
        self.seen.append(x)
        mean = x.flatten(1).mean(1) * self.sure
        return torch.stack([torch.zeros_like(mean), mean], 1)


MEMBERS = [Member({}), Member({}, net="selector", chooses=0.9), Member({}), Member({})]
VOXELS = LabelSpace(("background", "a", "b", "c"))


@pytest.mark.parametrize(
    ("patch", "context", "shape"),
    [((4, 4, 4), 0, (9, 4, 6)), ((4, 4, 4), 0, (4, 4, 4)), ((4, 4), 1, (6, 5, 3)), ((4, 4), 0, (4, 4, 5))],
)
def test_the_certain_selector_decides_for_a_case(patch: Any, context: int, shape: Any) -> None:
    """In 3D and in slices; the selector sees the windows that a model would see, and no other."""
    how = Inference(batch=2)
    for brightness, sure, chosen, says in [
        (-1, 9, 0, 2),
        (1, 9, 1, 3),
        (1, 0.1, None, 1),
        (-1, 0.1, None, 1),
    ]:
        image = torch.full((1, *shape), float(brightness)) + 0.01 * torch.randn(
            1, *shape, generator=torch.Generator().manual_seed(0)
        )
        selector = Brightness(sure).train()
        all_nets = [Says(1), selector, Says(2), Says(3)]
        asked: list[int] = []

        def net_of(i: int, all_nets: Any = all_nets, asked: list[int] = asked) -> nn.Module:
            asked.append(i)
            return all_nets[i]

        found = predict_together(MEMBERS, net_of, image, patch, context, how, VOXELS)
        assert found.chosen == chosen and found.voxels.shape == (4, *shape)
        assert bool((found.voxels.argmax(0) == says).all())
        assert asked == [1, says if says > 1 else 0] and selector.training

        class Watched(Says):
            def forward(self, x: Tensor, seen: list[Tensor] = selector.seen) -> Tensor:
                assert torch.equal(x, seen.pop(0))
                return super().forward(x)

        predict(Watched(1), image, patch, context, how, exclusive=True)
        assert not selector.seen


def test_the_mean_over_windows_decides() -> None:
    image = torch.zeros(1, 4, 4, 12)
    image[..., :4], image[..., 4:] = 5, -0.1
    told = selected(Brightness(1.0), image, (4, 4, 4), 0, Inference(overlap=0))
    logits = torch.tensor([5.0, -0.1, -0.1]).double()
    assert torch.allclose(told[1], logits.sigmoid().mean(), atol=1e-6) and float(told.sum()) == pytest.approx(
        1
    )


def test_images_are_routed_one_by_one() -> None:
    class Image(Says):
        def forward(self, x: Tensor) -> Tensor:
            return self.logits[None].expand(len(x), -1)

    images = torch.tensor([-1.0, 0.0, 1.0, 0.01])[:, None, None, None].expand(4, 1, 3, 3)
    panel = Panel(MEMBERS, [Image(1), Brightness(9.0), Image(2), Image(3)])
    said = panel.predict(images)
    assert said.chosen == [0, None, 1, None]
    assert said.scores.argmax(1).tolist() == [2, 1, 3, 1]
    assert len(panel.speaking(0, 1)) == 1 and panel.speaking(0, 1)[0] is panel.nets[3]


def test_members_that_cannot_be_routed() -> None:
    image, how = torch.zeros(1, 4, 4, 4), Inference()

    def of(*members: Member) -> Any:
        all_nets = [Brightness(9.0) if m.chooses is not None else Says(1) for m in members]
        return predict_together(members, all_nets.__getitem__, image, (4, 4, 4), 0, how, VOXELS)

    one, chooses = Member({}), Member({}, net="selector", chooses=0.4)
    assert of(one, chooses, one, one).chosen == 0
    with pytest.raises(FederationError, match="2 outputs chooses among 1"):
        of(one, chooses, one)
    with pytest.raises(FederationError, match=r"the places \[0\] of 3"):
        of(chooses, one, one)
    with pytest.raises(FederationError, match="some classes only"):
        of(one, chooses, one, Member({}, (1,)))


def test_everyone_is_offered_the_same_and_it_survives_the_wire() -> None:
    state: FedSMState = play(FedSM(local=LOCAL, threshold=0.8), server(), rounds=1)
    members = FedSM(threshold=0.8).eval_members(state, "elsewhere")
    assert [m.net for m in members] == ["main", "selector", *["main"] * 4]
    assert [m.chooses for m in members] == [None, 0.8, *[None] * 4]
    assert all(m.model is state.persons[s] for m, s in zip(members[2:], SITES, strict=True))
    assert [Member.from_payload(m.to_payload()) for m in members] == members
    assert Member.from_payload({"model": {}, "classes": [1, 2]}) == Member({}, (1, 2))


def test_adams_count_is_of_all_steps() -> None:
    method = FedSM(local=LOCAL, selector=Selector(steps=2))
    assert play(method, server()).selector.steps == 2 * 2


def test_a_selector_chooses_only_what_is_more_probable_than_its_limit() -> None:
    members = [Member({}), Member({}, net="selector", chooses=0.75), Member({}), Member({})]
    assert chosen_by(torch.tensor([0.25, 0.75]), members) is None
    assert chosen_by(torch.tensor([0.2, 0.8]), members) == 1
