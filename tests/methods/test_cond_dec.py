"""Cond-dec: the conditional net, who is asked for which class, and the limit at which it is FedAvg."""

import dataclasses
from itertools import pairwise
from typing import Any, cast

import pytest
import torch
from fakes import Server, same
from test_fed_dodnet import ANNOTATED, LOCAL, SPACE, Site
from torch import Tensor, nn

from fedatlas import nets
from fedatlas.core.contract import sends_of
from fedatlas.core.errors import FederationError
from fedatlas.core.labels import LabelSpace
from fedatlas.core.options import from_dict
from fedatlas.core.seeds import generator
from fedatlas.core.tensors import average, forms_of, from_tree, parts, tensors_of, to_tree
from fedatlas.losses import LossChoice
from fedatlas.methods.cond_dec import CondDec, CondState, asked
from fedatlas.methods.fedavg import FedAvg
from fedatlas.transport import egress, wire

VALUE = "condition.value"


def net(dims: int = 2, name: str = "cond_unet", **options: Any) -> Any:
    chosen = {"width": 2, "levels": 3} | options
    return nets.build(name, chosen, in_channels=1, classes=len(SPACE), spatial_dims=dims, seed=3)


def federation(**more: Any) -> Server:
    return Server(*(Site(site, own, 3 + n, net) for n, (site, own) in enumerate(ANNOTATED.items())), **more)


def play(method: Any, server: Server, rounds: int = 2) -> Any:
    state = dataclasses.replace(method.start(net(), server), rounds=rounds)
    for _ in range(rounds):
        state = method.round(state, server)
        again = from_tree(type(state), wire.decode(wire.encode(to_tree(state))))
        assert wire.encode(to_tree(again)) == wire.encode(to_tree(state))
    return state


def said(model: Any, x: Tensor, *condition: float) -> Tensor:
    model.condition.value.copy_(torch.tensor(condition))
    with torch.no_grad():
        return model.eval()(x)


@pytest.mark.parametrize("dims", [2, 3])
def test_a_class_is_asked_with_its_number_and_the_background_is_the_mean(dims: int) -> None:
    model = net(dims)
    nets.check_output(model, len(SPACE))
    x = torch.randn(2, 1, *[8] * dims, generator=generator("images"))
    one, two, three = (said(model, x, *[h] * 5) for h in (0.5, -1.0, 2.0))
    assert not torch.allclose(one, two) and not torch.allclose(two, three)
    mixed = said(model, x, 7.0, 0.5, -1.0, 2.0, 0.5)
    rows = [(one + two + three)[:, 0] / 3, one[:, 1], two[:, 2], three[:, 3], one[:, 4]]
    torch.testing.assert_close(mixed, torch.stack(rows, 1))


def test_the_condition_is_one_more_channel_behind_every_norm_of_the_decoder() -> None:
    """With weights of 0 for that channel it is the net of UFPS; the channels are counted."""
    plain, model = net(name="ufps_unet"), net()
    assert set(parts(model)) == set(parts(plain)) | {"condition"}
    more = {name: value for name, value in tensors_of(model).items() if name != VALUE}
    wide, filled = [], {}
    for name, value in tensors_of(plain).items():
        filled[name] = value
        if more[name].shape == value.shape:
            continue
        axis = 0 if "ups" in name else 1
        assert more[name].shape[axis] == value.shape[axis] + 1
        wide.append(name)
        # the condition is the last channel
        one = torch.zeros_like(value.narrow(axis, 0, 1))
        filled[name] = torch.cat([value, one], axis)
    expected = ["decoder.ups.1", *(f"decoder.levels.{i}.convs.1" for i in (0, 1)), "head"]
    assert sorted(wide) == sorted(f"{name}.weight" for name in expected)
    model.load_state_dict(filled | {VALUE: torch.zeros(5)})
    x = torch.randn(2, 1, 8, 8, generator=generator("images"))
    with torch.no_grad():
        torch.testing.assert_close(said(model, x, *[1.5] * 5), plain.eval()(x))
        heads, supervised = model.train()(x), plain.train()(x)
    torch.testing.assert_close(heads, supervised)


def test_conditions_are_within_the_scale_and_far_from_each_other() -> None:
    values = sorted(CondDec().h(k) for k in range(1, 31))
    assert values[0] > -2 and values[-1] < 2
    assert min(b - a for a, b in pairwise(values)) > 4 / 31 / 3
    # by the golden ratio: a run that goes on with another number would be another
    assert [CondDec().h(k) for k in (1, 2)] == pytest.approx([2 * 5**0.5 - 4, 4 * 5**0.5 - 10])


def test_of_several_sites_the_one_with_most_cases_is_asked() -> None:
    labelled = {"a": [5, 5, 0, 2, 0], "b": [4, 0, 0, 4, 0], "c": [4, 4, 0, 4, 0]}
    told = asked(labelled, {"a": 0.25, "b": -1.0, "c": 1.5})
    assert told[1:].tolist() == [0.25, 0.25, -1.0, 0.25]
    assert len(set(told.tolist())) == 2
    assert asked({"b": [2, 0, 0, 0, 0]}, {"b": -1.0}).tolist() == [-1.0] * 5


def test_of_sites_that_annotate_a_class_equally_the_first_by_name_is_asked() -> None:
    """In whatever order they came; the background, which all annotate, is asked of whom the first organ is."""
    values = {"a": 0.25, "b": -1.0}
    assert asked({"b": [9, 3, 5], "a": [1, 3, 0]}, values).tolist() == [0.25, 0.25, -1.0]
    assert asked({"b": [9, 0, 1], "a": [1, 0, 0]}, values).tolist() == [-1.0, -1.0, -1.0], (
        "one case is enough"
    )
    assert asked({"b": [9, 0, 0], "a": [1, 0, 0]}, values).tolist() == [0.25, 0.25, 0.25]


def test_who_is_asked_follows_what_sites_annotate_now() -> None:
    method, server = CondDec(local=LOCAL), federation()
    first = method.start(net(), cast(Any, server))
    before = {site: [9, 9, 9, 9, 9] for site in ANNOTATED}
    after = method.round(dataclasses.replace(first, labelled=before, rounds=2), cast(Any, server))
    assert after.labelled == {
        site: [(3 + n) * (c in {0, *own}) for c in range(5)]
        for n, (site, own) in enumerate(ANNOTATED.items())
    }
    assert after.round == 1


def test_a_round_by_hand() -> None:
    method, server = CondDec(local=LOCAL), federation()
    state = play(method, server, rounds=1)
    models = []
    for n, (name, own) in enumerate(ANNOTATED.items()):
        site = cast(Any, Site(name, own, 3 + n, net))
        begin = tensors_of(net()) | {VALUE: torch.full((5,), method.h(n + 1))}
        models.append(FedAvg(local=LOCAL).local_update(site, begin, 0, 1)["model"])
        assert torch.equal(models[-1][VALUE], begin[VALUE])
    expected = average(models, [3, 4, 5])
    h = {name: method.h(n + 1) for n, name in enumerate(ANNOTATED)}
    # class 2 is annotated by a and c, which has more cases
    expected[VALUE] = torch.tensor([h["a"], h["a"], h["c"], h["b"], h["c"]])
    assert same(state.model, expected)
    [member] = method.eval_members(state, "a")
    assert same(member.model, expected) and type(state) is CondState


def test_the_rate_is_that_of_the_round() -> None:
    method, start = CondDec(local=dataclasses.replace(LOCAL, schedule="poly")), tensors_of(net())
    models = [
        method.local_update(cast(Any, Site("a", {1, 2}, make=net)), start, VALUE, 1.0, round, 2)["model"]
        for round in (0, 0, 1)
    ]
    assert same(models[0], models[1]) and not same(models[0], models[2])


def test_with_a_scale_of_0_it_is_fedavg() -> None:
    state, plain = (
        play(CondDec(scale=0.0, local=LOCAL), federation()),
        play(FedAvg(local=LOCAL), federation()),
    )
    assert same(state.model, plain.model)
    assert not same(play(CondDec(local=LOCAL), federation()).model, plain.model)


def test_what_is_sent_is_declared_and_a_silent_site_is_still_asked() -> None:
    method, server = CondDec(local=LOCAL), federation()
    forms = forms_of(net())
    reply = method.local_update(server.members["a"], tensors_of(net()), VALUE, 1.0, 0, 1)
    egress.check(reply, sends_of(method)["local_update"], what="a", classes=5, forms=lambda net: forms)
    first = dataclasses.replace(play(method, server, rounds=1), rounds=2)
    server.silent = "c"
    assert torch.equal(method.round(first, server).model[VALUE], first.model[VALUE])


def test_what_does_not_fit_is_named() -> None:
    with pytest.raises(FederationError, match=r"reads no condition; set net\.name to cond_unet"):
        CondDec().examine(cast(nn.Module, net(name="ufps_unet")), [])
    with pytest.raises(FederationError, match="is for exclusive classes"):
        CondDec().check(LabelSpace(("lung", "heart"), exclusive=False))
    with pytest.raises(FederationError, match="is for exclusive classes"):
        nets.check_classes("cond_unet", net(), exclusive=False)
    with pytest.raises(FederationError, match="net cond_unet: strides are"):
        net(strides=[2])
    with pytest.raises(FederationError, match="does not fit, the classes are exclusive"):
        CondDec(loss=LossChoice(name="masked_dice_bce")).check(SPACE)
    two: Any = net()
    two.condition.register_buffer("other", torch.zeros(5))
    with pytest.raises(FederationError, match="reads no condition"):
        CondDec().examine(two, [])
    with pytest.raises(FederationError, match=r"scale: got -1\.0"):
        from_dict(CondDec, {"scale": -1.0}, what="file")


def test_a_site_that_comes_later_has_a_number_of_its_own() -> None:
    server, method = federation(), CondDec(local=LOCAL)
    state = dataclasses.replace(method.start(net(), cast(Any, server)), rounds=2)
    *before, last = server.sites
    old = {site: state.values[site] for site in before}
    after = method.round(dataclasses.replace(state, values=old), cast(Any, server))
    assert after.values == old | {last: method.h(len(server.sites))}
    assert len(set(after.values.values())) == len(server.sites)


@pytest.mark.parametrize("h", [-1.5, 1.5])
def test_the_condition_stands_beside_the_maps_as_it_is(h: float) -> None:
    """Behind the leaky ReLU, which would all but remove a negative number."""
    level = net().decoder.levels[0]  # type: ignore[union-attr,index]
    x = torch.randn(2, level.convs[0].in_channels, 4, 4)
    made = level(x, h)
    assert made.shape[1] == level.convs[0].out_channels + 1
    assert torch.equal(made[:, -1], torch.full((2, 4, 4), h))
