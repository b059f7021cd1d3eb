"""Local parts: what stays, what is shared and offered for evaluation, and the limits between FedAvg and training alone."""

import dataclasses
from typing import Any, cast

import pytest
import torch
from fakes import Server, same
from test_fed_dodnet import ANNOTATED, LOCAL, SPACE, Site
from torch import nn

from fedatlas import nets
from fedatlas.core.contract import sends_of
from fedatlas.core.errors import FederationError
from fedatlas.core.tensors import average, forms_of, from_tree, parts, tensors_of, to_tree
from fedatlas.losses import LossChoice
from fedatlas.methods.fedavg import FedAvg
from fedatlas.methods.local_parts import MEMORY, LocalParts, LocalPartsState
from fedatlas.methods.standalone import Standalone
from fedatlas.transport import egress, wire

KEPT = {
    "multi_head": ["head"],
    "multi_encoder": ["encoder", "deep_supervision"],
    "multi_decoder": ["decoder", "head"],
}


def net() -> nn.Module:
    options = {"width": 2, "levels": 3}
    return nets.build("ufps_unet", options, in_channels=1, classes=len(SPACE), spatial_dims=2, seed=3)


def federation(**more: Any) -> Server:
    return Server(*(Site(site, own, 3 + n, net) for n, (site, own) in enumerate(ANNOTATED.items())), **more)


def play(method: Any, server: Server, rounds: int = 2) -> Any:
    state = dataclasses.replace(method.start(net(), server), rounds=rounds)
    for _ in range(rounds):
        state = method.round(state, server)
        again = from_tree(type(state), wire.decode(wire.encode(to_tree(state))))
        assert wire.encode(to_tree(again)) == wire.encode(to_tree(state))
    return state


def test_with_nothing_kept_it_is_fedavg() -> None:
    """Bit for bit, and evaluated after averaging."""
    method, server = LocalParts(keep=[], local=LOCAL), federation()
    state, expected = play(method, server), play(FedAvg(local=LOCAL), federation()).model
    assert same(state.model, expected) and state.models == {}
    [member] = method.eval_members(state, "a")
    assert same(member.model, expected) and member.classes is None
    assert all(MEMORY not in site.memory for site in server.members.values())
    assert method.examine(net(), []) == ["method local_parts: keep names no part, so that it is FedAvg"]


def test_with_every_part_kept_it_is_training_alone() -> None:
    method = LocalParts(keep=list(parts(net())), local=LOCAL)
    state, alone = play(method, federation()), play(Standalone(local=LOCAL), federation())
    mine, theirs = (m.eval_members(s, "a") for m, s in ((method, state), (Standalone(), alone)))
    assert [member.classes for member in mine] == [member.classes for member in theirs]
    assert all(same(a.model, b.model) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("kind", list(KEPT))
def test_a_part_stays_and_the_rest_is_shared(kind: str) -> None:
    method, server = LocalParts(keep=KEPT[kind], local=LOCAL), federation()
    first = play(method, server, rounds=1)
    named = parts(net())
    assert set(first.kept) == {name for part in KEPT[kind] for name in named[part]}
    # the second round of a site, done by hand: its own parts, and the mean of the rest
    kept = server.members["b"].memory[MEMORY]
    assert set(kept) == set(first.kept)
    site = Site("b", ANNOTATED["b"], 4, net)
    site.memory, site.round = {"optimizer": server.members["b"].memory["optimizer"]}, 1
    begin = first.model | kept
    expected = FedAvg(local=LOCAL).local_update(cast(Any, site), begin, 1, 2)["model"]
    assert not same(begin, first.model)
    second: LocalPartsState = method.round(dataclasses.replace(first, rounds=2), server)
    assert same(second.models["b"], expected)
    assert same(second.model, average((second.models[site] for site in ANNOTATED), [3, 4, 5]))


@pytest.mark.parametrize("evaluate", ["before", "after"])
def test_every_site_is_asked_for_what_it_annotates(evaluate: Any) -> None:
    method, server = LocalParts(evaluate=evaluate, local=LOCAL), federation()
    assert len(method.eval_members(method.start(net(), server), "a")) == 1
    state = play(method, server, rounds=1)
    members = method.eval_members(state, "a")
    assert [member.classes for member in members] == [tuple(sorted(own)) for own in ANNOTATED.values()]
    for site, member in zip(ANNOTATED, members, strict=True):
        own = server.members[site].memory[MEMORY]
        assert set(own) == set(state.kept) and all(torch.equal(member.model[name], own[name]) for name in own)
        shared = {name: value for name, value in member.model.items() if name not in own}
        assert same(shared, {name: state.model[name] for name in shared}) == (evaluate == "after")


def test_what_a_site_sends_is_its_model_and_what_it_annotates() -> None:
    site, forms = Site("a", ANNOTATED["a"], make=net), forms_of(net())
    method = LocalParts(local=LOCAL, loss=LossChoice(name="dice_bce"))
    reply = method.local_update(cast(Any, site), tensors_of(net()), [], 0, 1)
    egress.check(reply, sends_of(method)["local_update"], what="a", classes=5, forms=lambda net: forms)
    assert reply["classes"] == [1, 2]


def test_a_silent_site_keeps_what_it_had() -> None:
    method, server = LocalParts(local=LOCAL), federation()
    first = dataclasses.replace(play(method, server, rounds=1), rounds=2)
    server.silent = "c"
    second = method.round(first, server)
    assert same(second.models["c"], first.models["c"]) and not same(second.models["a"], first.models["a"])


def test_a_part_that_the_net_does_not_have_is_named() -> None:
    with pytest.raises(
        FederationError, match=r"local_parts: keep: the part of UFPSUNetModule 'haed'.*'head'"
    ):
        LocalParts(keep=["haed"]).examine(net(), [])
