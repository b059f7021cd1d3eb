"""Whose model says a class: its owners', of methods whose sites keep a part of the net for themselves."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fakes import FakeSite, Server, same
from test_fed_dodnet import ANNOTATED, LOCAL, SPACE, Site, dodnet
from torch import nn

from fedatlas import nets
from fedatlas.core.batch import Batch
from fedatlas.core.contract import Member
from fedatlas.core.labels import LabelSpace
from fedatlas.core.tensors import from_tree, load, to_tree
from fedatlas.learning.inference import Inference, Nets, predict_each, predict_together
from fedatlas.methods.fed_dodnet import FedDoDNet
from fedatlas.methods.fedbn import FedBN
from fedatlas.methods.fedcrld import FedCRLD
from fedatlas.methods.local_parts import LocalParts
from fedatlas.methods.shared.owners import by_owner, speakers
from fedatlas.methods.standalone import Standalone


def net(name: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: nets.build(name, options, in_channels=1, classes=len(SPACE), spatial_dims=2, seed=3)


METHODS: dict[str, tuple[Any, Callable[[], nn.Module]]] = {
    "dod": (FedDoDNet(own=["decoder", "controller"], local=LOCAL), dodnet),
    "fedcrld": (FedCRLD(local=LOCAL), net("crld_unet", width=2, levels=3)),
    "fedbn": (FedBN(local=LOCAL), net("unet", filters=[4, 8, 8], norm="batch")),
}


def play(name: str, annotated: dict[str, set[int]] = ANNOTATED, **changed: Any) -> tuple[Any, Any]:
    """The method and its state after a round. changed: its options."""
    method, make = METHODS[name]
    method = dataclasses.replace(method, **changed)
    server = Server(*(Site(site, own, 3, make) for site, own in annotated.items()))
    state = dataclasses.replace(method.start(make(), server), rounds=1)
    return method, method.round(state, server)


@pytest.mark.parametrize("name", METHODS)
def test_a_class_is_asked_of_the_sites_that_annotate_it(name: str) -> None:
    method, state = play(name)
    alone = dataclasses.replace(method, speaks="site")
    own = {site: alone.eval_members(state, site)[0].model for site in ANNOTATED}
    assert not same(own["a"], own["b"]) and not same(own["a"], state.model)
    # class 2 is annotated at a and at c: each of them asks its own model, and a site without training both
    for site, told in {
        "a": {"a": (1, 2), "b": (3,), "c": (4,)},
        "b": {"a": (1, 2), "b": (3,), "c": (2, 4)},
        "c": {"a": (1,), "b": (3,), "c": (2, 4)},
        "tested": {"a": (1, 2), "b": (3,), "c": (2, 4)},
    }.items():
        members = method.eval_members(state, site)
        assert [member.classes for member in members] == list(told.values()), site
        assert all(same(member.model, own[name]) for member, name in zip(members, told, strict=True))


@pytest.mark.parametrize("name", METHODS)
def test_the_sites_own_model_is_a_switch(name: str) -> None:
    method, state = play(name, speaks="site")
    for site in (*ANNOTATED, "tested"):
        [member] = method.eval_members(state, site)
        assert member.classes is None
    assert same(method.eval_members(state, "tested")[0].model, state.model)


@pytest.mark.parametrize("name", METHODS)
def test_a_site_that_annotates_everything_is_asked_alone(name: str) -> None:
    every = set(SPACE.foreground)
    method, state = play(name, {"a": every, "b": every})
    alone = dataclasses.replace(method, speaks="site").eval_members(state, "a")[0].model
    [member] = method.eval_members(state, "a")
    assert set(member.classes or ()) == every and same(member.model, alone)


@pytest.mark.parametrize("name", METHODS)
def test_a_state_of_an_earlier_version_tells_no_owners(name: str) -> None:
    method, state = play(name)
    kept: Any = to_tree(state)
    del kept["classes"]
    old = from_tree(method.state, kept)
    [member] = method.eval_members(old, "a")
    assert same(member.model, dataclasses.replace(method, speaks="site").eval_members(state, "a")[0].model)


def test_what_a_site_does_not_annotate_is_found_by_the_model_that_learnt_it() -> None:
    """Two sites, one organ each, and models that know their own alone: DOD* as it was scored found nothing of the other."""
    space, make = LabelSpace(("background", "liver", "spleen")), Fixed
    models = {"a": {"says": torch.tensor([0.0, 4.0, -9.0])}, "b": {"says": torch.tensor([0.0, -9.0, 4.0])}}
    mean, classes = {"says": torch.zeros(3)}, {"a": [1], "b": [2]}
    image = torch.ones(1, 4, 4, 4)
    image[:, 2:] = -1  # the liver is where it is bright, the spleen where it is dark

    def found(members: list[Member]) -> set[int]:
        nets = [make() for _ in members]
        for one, member in zip(nets, members, strict=True):
            load(one, member.model)
        how = Inference()  # type: ignore[call-arg]
        told = predict_together(members, nets.__getitem__, image, (4, 4, 4), 0, how, space)
        return set(told.voxels.argmax(0).unique().tolist())

    for site in ("a", "b", "tested"):
        assert found(speakers(mean, models, classes, site, "owners")) == {1, 2}
    assert found(speakers(mean, models, classes, "a", "site")) == {0, 1}
    assert by_owner(mean, {}, {}) == [Member(mean)]


def test_a_class_that_a_net_was_trained_for_stays_in_its_softmax() -> None:
    """Site a speaks for the cord itself, and d, which annotates it, too, is asked for the oesophagus alone: at a voxel of the cord the net
    of d is low in background and oesophagus, as nothing but the cord was ever taught there."""
    space = LabelSpace(("background", "cord", "oesophagus"))
    says = {"a": [-1.0, 0.5, 0.0], "d": [-8.0, 4.0, -6.0]}
    models = {site: {"says": torch.tensor(of)} for site, of in says.items()}
    members = by_owner({}, models, {"a": [1], "d": [1, 2]}, "a")
    assert [(m.classes, m.taught) for m in members] == [((1,), (1,)), ((2,), (1, 2))]
    assert [Member.from_payload(m.to_payload()) == m for m in members] == [True, True]
    how, image = Inference(others="ignored"), torch.ones(1, 4, 4, 4)  # type: ignore[call-arg]
    nets = Nets(lambda model, name: Same(model["says"]))
    together = predict_together(
        members, lambda i: Same(members[i].model["says"]), image, (4, 4, 4), 0, how, space
    )
    (each,) = predict_each([members], nets, image, (4, 4, 4), 0, how, space)
    for found in (together, each):
        assert set(found.voxels.argmax(0).unique().tolist()) == {1}
        assert torch.allclose(found.voxels[1], torch.tensor([-1.0, 0.5]).softmax(0)[1])


FINDING = LabelSpace(("background", "liver", "spleen"), findings=("ill", "worse"), finding_of=(None, None))


class FindingSite(FakeSite):
    """A site with findings of the whole image, which its labels name."""

    def drawn(self, rng: torch.Generator, batch: int) -> Batch:
        drawn = super().drawn(rng, batch)
        told = torch.randint(0, 2, (batch, 2), generator=rng).float()
        known = torch.tensor([[f in self.labels.findings for f in range(2)]] * batch)
        return dataclasses.replace(drawn, finding=told, finding_known=known)


@pytest.mark.parametrize("method", [Standalone(local=LOCAL), FedBN(local=LOCAL), LocalParts(local=LOCAL)])
def test_a_finding_is_asked_of_the_sites_that_annotate_it(method: Any) -> None:
    """Sites b and c annotate the finding 1, c nothing else; nobody annotates the finding 0."""

    def make() -> nn.Module:
        chosen = {"filters": [4, 8, 8]}
        return nets.build("unet", chosen, in_channels=1, classes=3, spatial_dims=2, seed=3, findings=2)

    annotated: dict[str, set[int]] = {"a": {1}, "b": {2}, "c": set()}
    server = Server(*(FindingSite(name, own, 3, make, space=FINDING) for name, own in annotated.items()))
    for name in "bc":
        labels = server.members[name].labels
        server.members[name].labels = dataclasses.replace(labels, findings=frozenset({1}))
    state = dataclasses.replace(method.start(make(), server), rounds=2)
    state = from_tree(method.state, to_tree(method.round(state, server)))
    assert state.findings == {"a": [], "b": [1], "c": [1]}

    def told(site: str) -> list[Any]:
        return [(member.classes, member.findings) for member in method.eval_members(state, site)]

    assert told("") == [((1,), ()), ((2,), (1,)), ((), (1,))]
    at_c = [((1,), ()), ((2,), ()), ((), (1,))] if isinstance(method, FedBN) else told("")
    assert told("c") == at_c  # its own model, which says no class
    nothing = dataclasses.replace(state, findings={"a": [], "b": [], "c": []})
    assert {member.findings for member in method.eval_members(nothing, "")} == {None}


class Same(nn.Module):
    """Gives `says` [C] at every voxel."""

    says: torch.Tensor

    def __init__(self, says: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("says", says)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.says.reshape(1, 3, 1, 1, 1).expand(len(x), 3, *x.shape[2:])


class Fixed(nn.Module):
    """Gives a class where the image has its sign, as much as `says` [C]."""

    says: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("says", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sign = torch.cat([torch.zeros_like(x), (x > 0).float(), (x < 0).float()], 1)
        return sign * self.says.reshape(1, 3, 1, 1, 1)
