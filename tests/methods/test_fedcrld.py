"""FedCRLD: its terms in numbers, what the momentum model does and where it stays, and the limit at which it is FedAvg."""

import dataclasses
from typing import Any, cast

import pytest
import torch
from fakes import Server, same
from test_fed_dodnet import ANNOTATED, LOCAL, SPACE, Site
from torch import Tensor, nn

from fedatlas import losses, nets
from fedatlas.core.contract import sends_of
from fedatlas.core.errors import FederationError
from fedatlas.core.seeds import generator
from fedatlas.core.tensors import Tensors, average, forms_of, from_tree, parts, to_tree
from fedatlas.losses import LossChoice
from fedatlas.methods.fedavg import FedAvg
from fedatlas.methods.fedcrld import MOMENTUM, OWN, FedCRLD, cross_entropy, moved, symmetric_kl
from fedatlas.transport import egress, wire

OFF = {"lambda_ce": 0.0, "lambda_mse": 0.0, "lambda_kl": 0.0}


def net(name: str = "crld_unet") -> nn.Module:
    options = {"width": 2, "levels": 3}
    return nets.build(name, options, in_channels=1, classes=len(SPACE), spatial_dims=2, seed=3)


def federation(**more: Any) -> Server:
    return Server(*(Site(site, own, 3 + n, net) for n, (site, own) in enumerate(ANNOTATED.items())), **more)


def play(method: Any, server: Server, rounds: int = 2) -> Any:
    state = dataclasses.replace(method.start(net(), server), rounds=rounds)
    for _ in range(rounds):
        state = method.round(state, server)
        again = from_tree(type(state), wire.decode(wire.encode(to_tree(state))))
        assert wire.encode(to_tree(again)) == wire.encode(to_tree(state))
    return state


def offered(method: Any, state: Any, site: str) -> Tensors:
    """The site's own model."""
    [member] = dataclasses.replace(method, speaks="site").eval_members(state, site)
    return member.model


def test_symmetric_kl_in_loops() -> None:
    a, b = (torch.randn(2, 3, 2, 2, generator=generator("maps", i), dtype=torch.float64) for i in range(2))
    total = 0.0
    for n in range(2):
        for i in range(2):
            for j in range(2):
                p, q = a[n, :, i, j].softmax(0), b[n, :, i, j].softmax(0)
                total += float((p * (p / q).log()).sum() + (q * (q / p).log()).sum()) / 2
    assert float(symmetric_kl(a, b)) == pytest.approx(total / 8, rel=1e-5)
    assert symmetric_kl(a, a + 3) == pytest.approx(0, abs=1e-6)


def test_cross_entropy_in_loops() -> None:
    z, told = (torch.randn(2, 3, 4, generator=generator("logits", i)) for i in range(2))
    p, q = z.softmax(1), told.softmax(1)
    expected = (
        -sum(float(q[n, c, v] * p[n, c, v].log()) for n in range(2) for c in range(3) for v in range(4)) / 8
    )
    assert float(cross_entropy(z, told, exclusive=True)) == pytest.approx(expected, rel=1e-5)
    p, q = z.sigmoid(), told.sigmoid()
    binary = -(q * p.log() + (1 - q) * (1 - p).log()).mean()
    torch.testing.assert_close(cross_entropy(z, told, exclusive=False), binary)


def test_the_momentum_model_is_a_moving_mean() -> None:
    old, new = ({"w": torch.full((2,), w), "n": torch.tensor(n)} for w, n in ((1.0, 3), (5.0, 7)))
    after = moved(old, new, 0.75)
    assert after["w"].tolist() == [2.0, 2.0] and int(after["n"]) == 7
    assert same(moved(None, new, 0.75), new)


def test_the_objective_by_hand() -> None:
    site, model, other = cast(Any, Site("a", {1, 2}, make=net)), cast(Any, net()), cast(Any, net())
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.5)
    method, [batch] = FedCRLD(lambda_ce=0.2, lambda_mse=3.0, lambda_kl=0.5), site.batches(batch=2, steps=1)
    terms = cast("dict[str, Tensor]", method.L(site, other.eval())(model, batch))
    outputs, (g, l) = model(batch.image, bottlenecks=True)
    told, (g_mo, l_mo) = other(batch.image, bottlenecks=True)
    torch.testing.assert_close(
        terms["supervised"], losses.on_batch(losses.for_site(method.loss, site), outputs, batch)
    )
    torch.testing.assert_close(terms["kl"], 0.5 * symmetric_kl(g, l))
    torch.testing.assert_close(terms["momentum_ce"], 0.2 * cross_entropy(outputs[0], told, exclusive=True))
    distance = (g - g_mo).square().mean() + (l - l_mo).square().mean()
    torch.testing.assert_close(terms["momentum_mse"], 3 * distance)
    sum(terms.values(), torch.zeros(())).backward()
    assert all(p.grad is None for p in other.parameters())
    # nothing of the momentum model's without one
    assert set(cast(Any, method.L(site, None)(model, batch))) == {"supervised", "kl"}


def test_without_its_terms_and_with_nothing_private_it_is_fedavg() -> None:
    """One round, in which no site has anything of its own yet; the second differs, by the private encoder alone."""
    method = FedCRLD(local=LOCAL, **OFF)
    state, plain = play(method, federation(), rounds=1), play(FedAvg(local=LOCAL), federation(), rounds=1)
    assert same(state.model, plain.model)
    server = federation()
    again = dataclasses.replace(play(method, server, rounds=1), rounds=2)
    site = Site("b", ANNOTATED["b"], 4, net)
    site.memory, site.round = {"optimizer": server.members["b"].memory["optimizer"]}, 1
    begin = again.model | server.members["b"].memory[OWN]
    expected = FedAvg(local=LOCAL).local_update(cast(Any, site), begin, 1, 2)["model"]
    assert same(method.round(again, server).models["b"], expected)


def test_every_term_moves_the_second_round() -> None:
    plain = play(FedCRLD(local=LOCAL, **OFF), federation()).model
    for name in OFF:
        method = FedCRLD(local=LOCAL, **OFF | {name: 1.0})
        one, two = play(method, federation(), rounds=1), play(method, federation())
        assert not same(two.model, plain)
        first = play(FedCRLD(local=LOCAL, **OFF), federation(), rounds=1).model
        assert same(one.model, first) == (name != "lambda_kl"), "a first round has no momentum model"


def test_the_momentum_model_stays_and_the_private_encoder_is_used_by_its_site_alone() -> None:
    method, server = FedCRLD(local=LOCAL, momentum=0.75), federation()
    state, forms = play(method, server, rounds=1), forms_of(net())
    assert set(state.private) == set(parts(net())["private_encoder"])
    before = {site: dict(server.members[site].memory[MOMENTUM]) for site in ANNOTATED}
    model = state.model
    for n, name in enumerate(ANNOTATED):
        site = Site(name, ANNOTATED[name], 3 + n, net)
        site.memory, site.round = dict(server.members[name].memory), 1
        own = site.memory[OWN]
        assert set(own) == set(state.private)
        reply = method.local_update(cast(Any, site), model, list(state.private), 1, 2)
        egress.check(reply, sends_of(method)["local_update"], what=name, classes=5, forms=lambda net: forms)
        assert same(site.memory[MOMENTUM], moved(before[name], reply["model"], 0.75))
        sent = [value for value in reply["model"].values() if value.is_floating_point() and value.numel() > 4]
        kept = [value for value in site.memory[MOMENTUM].values() if value.numel() > 4]
        assert not any(torch.equal(a, b) for a in sent for b in kept if a.shape == b.shape)
        # the private encoder of the mean is not read by a site that has one
        site.memory, site.round = dict(server.members[name].memory), 1
        changed = model | {key: torch.zeros_like(model[key]) for key in state.private}
        again = method.local_update(cast(Any, site), changed, list(state.private), 1, 2)
        assert same(again["model"], reply["model"])


def test_the_encoder_alone_is_common() -> None:
    """As in the official code: a site goes on from the mean of the shared encoders, and from all else of its own."""
    method, server, known = FedCRLD(local=LOCAL, common="encoder"), federation(), parts(net())
    state = dataclasses.replace(play(method, server, rounds=1), rounds=2)
    assert set(state.private) == {name for part in known if part != "encoder" for name in known[part]}
    before = {site: dict(server.members[site].memory) for site in ANNOTATED}
    after = method.round(state, server)
    for n, (name, own) in enumerate(ANNOTATED.items()):
        site = Site(name, own, 3 + n, net)
        site.memory, site.round = dict(before[name]), 1
        only = {key: state.model[key] for key in known["encoder"]}
        begin = only | {key: torch.zeros_like(state.model[key]) for key in state.private}
        reply = method.local_update(cast(Any, site), begin, list(state.private), 1, 2)
        assert same(reply["model"], after.models[name])


@pytest.mark.parametrize("common", ["all_but_private_encoder", "encoder"])
@pytest.mark.parametrize("evaluate", ["before", "after"])
def test_what_is_evaluated(evaluate: Any, common: Any) -> None:
    method, server = FedCRLD(local=LOCAL, evaluate=evaluate, common=common), federation()
    state = play(method, server)
    models = {site: offered(method, state, site) for site in ANNOTATED}
    for site, model in models.items():
        own = server.members[site].memory[OWN]
        assert all(torch.equal(model[name], own[name]) for name in state.private)
        shared = {name: value for name, value in model.items() if name not in own}
        assert same(shared, {name: state.model[name] for name in shared}) == (evaluate == "after")
    assert same(offered(method, state, "elsewhere"), state.model)
    if evaluate == "before":
        assert same(state.model, average((models[site] for site in ANNOTATED), [3, 4, 5]))
    equal = play(dataclasses.replace(method, weights="equal"), federation(), rounds=1)
    assert not same(equal.model, play(method, federation(), rounds=1).model)


def test_what_does_not_fit_is_named() -> None:
    with pytest.raises(FederationError, match=r"has no private encoder; set net\.name to crld_unet"):
        FedCRLD().examine(net("ufps_unet"), [])
    with pytest.raises(FederationError, match="loss"):
        FedCRLD(loss=LossChoice(name="nothing")).check(SPACE)
