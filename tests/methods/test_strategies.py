"""Strategies with MENU-Net: what each changes against FedAvg, its neutral parameter, and what stays where it is."""

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from fakes import Replies, Server, same
from test_fedmenu import ANNOTATED, LOCAL, SPACE, Site, federation, menunet, play, selector
from torch import nn

from fedatlas import nets
from fedatlas.core.contract import sends_of
from fedatlas.core.errors import FederationError
from fedatlas.core.tensors import Tensors, forms_of, parts, tensors_of
from fedatlas.methods import fedmenu as fedmenu_module
from fedatlas.methods.fedmenu import FedMENU
from fedatlas.methods.strategies import STRATEGIES, StrategyChoice, expert_weights, make_strategy
from fedatlas.transport import egress

OPTIONS: dict[str, dict[str, Any]] = {"fednorm": {"groups": {"portal": ["a"], "arterial": ["b", "c"]}}}
NEUTRAL: dict[str, dict[str, Any]] = {
    "fedprox": {"mu": 0.0},
    "fedavgm": {"beta": 0.0},
    "feddyn": {"alpha": 0.0},
    "fednorm": {},
}
"""The parameters with which a strategy is FedAvg; of fednorm one group of all sites."""


def affine() -> nn.Module:
    return menunet(affine=True)


def fedmenu(name: str, agd: Any = "shared", **options: Any) -> FedMENU:
    chosen: Any = StrategyChoice(name=cast(Any, name), options=OPTIONS.get(name, {}) | options)
    return FedMENU(strategy=chosen, agd=agd, local=LOCAL)


@functools.cache
def trained(name: str, rounds: int = 2, make: Any = affine, **options: Any) -> Any:
    return play(fedmenu(name, **options), federation(make), rounds=rounds, net=make())


def differing(a: Tensors, b: Tensors) -> set[str]:
    return {name for name in a if not torch.equal(a[name], b[name])}


@pytest.mark.parametrize("name", sorted(set(STRATEGIES) - {"fedavg", "fedsm"}))
def test_every_strategy_differs_from_fedavg_in_named_tensors(name: str) -> None:
    """In the model that is evaluated at a site; a sub-encoder that nobody trains stays as it was in all of them."""
    plain, own, method = trained("fedavg"), trained(name), fedmenu(name)
    start, named = tensors_of(affine()), parts(affine())
    evaluated = {site: method.eval_members(own, site)[0].model for site in ("a", "unseen")}
    different = differing(plain.model, evaluated["a"])
    expected = "norms" if name in ("fedbn", "fednorm") else "convs.0.weight"
    assert any(expected in n for n in different & set(named["encoder:0"])), sorted(different)
    assert any(expected in n for n in different & set(named["decoder"])), sorted(different)
    for model in (own.model, *evaluated.values()):
        assert not differing(start, model) & set(named["encoder:2"])


@pytest.mark.parametrize("name", sorted(NEUTRAL))
def test_the_neutral_parameter_is_fedavg(name: str) -> None:
    neutral = FedMENU(strategy=StrategyChoice(name=cast(Any, name), options=NEUTRAL[name]), local=LOCAL)
    state = play(neutral, federation(affine), net=affine())
    plain = trained("fedavg")
    for site in ("a", "unseen"):
        assert same(neutral.eval_members(state, site)[0].model, plain.model)


def test_a_net_without_parameters_of_normalisation_makes_fedbn_fedavg() -> None:
    """E8. Of running statistics there are none either."""
    assert same(trained("fedbn", make=menunet).model, trained("fedavg", make=menunet).model)


def test_the_first_round_of_scaffold_is_fedavg() -> None:
    """E6: all controls are 0. From the second on they are not."""
    assert same(trained("scaffold", rounds=1).model, trained("fedavg", rounds=1).model)
    assert not same(trained("scaffold").model, trained("fedavg").model)


@pytest.mark.parametrize("name", sorted(STRATEGIES))
@pytest.mark.parametrize("agd", ["shared", "local", "none"])
def test_what_a_site_answers(name: str, agd: Any) -> None:
    """It is declared; foreign sub-encoders are bit for bit as they came (I2); of a local AGD nothing leaves (I3)."""
    if (name, agd) == ("fedsm", "local"):
        with pytest.raises(FederationError, match="set agd to shared or none"):
            fedmenu(name, agd).check(SPACE)
        return
    method, server = fedmenu(name, agd), federation(affine)
    start = tensors_of(affine())
    state = dataclasses.replace(play(method, server, rounds=1, net=affine()), rounds=2)
    named, chosen = parts(affine()), forms_of(selector())
    forms = {"main": forms_of(affine()), "selector": chosen, "selector.parameters": chosen}
    strategy: Any = method
    for site in ANNOTATED:
        member = cast(Any, server.members[site])
        member.round = 1
        told: dict[str, Any] = {}

        class Listening:
            sites, lost = server.sites, server.lost

            def call(self, function: Any, *, each: Any, **payload: Any) -> Any:
                told.update(payload | each[site])  # noqa: B023
                raise InterruptedError

        with pytest.raises(InterruptedError):
            strategy.round(state, cast(Any, Listening()))
        reply = method.local_update(member, **told)
        egress.check(
            reply, sends_of(method)["local_update"], what="", classes=len(SPACE), forms=forms.__getitem__
        )
        foreign = {m for m in range(3) if not ANNOTATED[site] & ({1, 2}, {3}, {4})[m]}
        came = state.model | told["told_to"].get("norms", {})
        for m in foreign:
            assert not differing({n: came[n] for n in named[f"encoder:{m}"]}, reply["model"]), (site, m)
            if "person" in reply:
                person = told["told_to"]["person"]
                assert not differing({n: person[n] for n in named[f"encoder:{m}"]}, reply["person"])
        if agd == "local":
            assert not differing({n: start[n] for n in named["agd"]}, reply["model"])
            assert not set(reply.get("control", {})) & set(named["agd"])


def test_feddyn_and_scaffold_leave_foreign_sub_encoders_out_of_their_memory() -> None:
    for name, key in (("feddyn", "feddyn.g"), ("scaffold", "scaffold.control")):
        server = federation(affine)
        play(fedmenu(name), server, net=affine())
        kept = server.members["a"].memory[key]
        own = [n for n in parts(affine())["encoder:0"] if n in kept]
        assert own and any(bool(kept[n].any()) for n in own)
        assert not any(bool(kept[n].any()) for n in parts(affine())["encoder:1"] if n in kept)


def test_fedprox_is_a_pull_in_both_steps() -> None:
    """With one step per round, the gradient of the term is 0 at w^t: the second batch feels it, and AGD and decoder do."""
    near, far = trained("fedprox", rounds=1, mu=50.0), trained("fedavg", rounds=1)
    start, named = tensors_of(affine()), parts(affine())
    for part in ("decoder", "agd", "encoder:0"):
        length = [
            sum(float((s.model[n] - start[n]).square().sum()) for n in named[part]) for s in (near, far)
        ]
        assert length[0] < length[1], part


def test_a_site_keeps_the_normalisation_that_it_trains() -> None:
    """fedbn: its own of the decoder and of its organ; of another organ the mean."""
    method, server = fedmenu("fedbn", speaks="site"), federation(affine)
    state = play(method, server, net=affine())
    names = parts(affine())
    at_a, at_b = (method.eval_members(state, site)[0].model for site in "ab")
    norms = {part: [n for n in names[part] if "norms" in n] for part in ("decoder", "encoder:0", "encoder:1")}
    assert all(not torch.equal(at_a[n], at_b[n]) for n in norms["decoder"])
    assert all(torch.equal(at_a[n], state.model[n]) for n in norms["encoder:1"])
    assert any(not torch.equal(at_a[n], state.model[n]) for n in norms["encoder:0"])
    assert set(server.members["a"].memory["fedbn.own"]) == {
        n for part in ("decoder", "encoder:0", "agd") for n in names[part] if "norms" in n
    }
    members = fedmenu("fedbn").eval_members(state, "unseen")
    told = {site: tuple(sorted(own)) for site, own in sorted(ANNOTATED.items()) if own}
    assert [member.classes for member in members] == list(told.values()), "by default of the owners"
    assert same(members[0].model, at_a)


def test_a_group_without_an_expert_takes_the_mean_of_all() -> None:
    """fednorm: group portal is site a, which has no spleen."""
    method = fedmenu("fednorm")
    state = play(method, federation(affine), net=affine())
    at_a, at_b = (method.eval_members(state, site)[0].model for site in "ab")
    spleen = [n for n in parts(affine())["encoder:1"] if "norms" in n]
    assert spleen and all(torch.equal(at_a[n], state.model[n]) for n in spleen)
    assert any(not torch.equal(at_b[n], state.model[n]) for n in spleen)


def test_a_group_keeps_what_its_expert_told_while_it_is_lost() -> None:
    """fednorm: of the group arterial, b alone has the spleen and does not answer in the second round."""
    method, server = fedmenu("fednorm"), federation(affine, a={1, 2, 3}, b={3}, c={1, 2})
    once = dataclasses.replace(play(method, server, rounds=1, net=affine()), rounds=2)
    server.silent = "b"
    twice = method.round(once, cast(Any, server))
    before, after = (method.eval_members(state, "c")[0].model for state in (once, twice))
    spleen = [n for n in parts(affine())["encoder:1"] if "norms" in n]
    assert spleen and all(torch.equal(before[n], after[n]) for n in spleen)
    assert differing(before, after) & set(parts(affine())["decoder"])


def test_fedsm_has_the_global_model_of_fedavg_and_models_of_its_own() -> None:
    """E7: with lam 1 nobody else's comes in, with lam 1/K all are the mean. The site's two models have optimizers of
    their own, which see other batches."""
    plain, server = trained("fedavg"), federation(affine)
    method = fedmenu("fedsm", lam=1.0)
    state = play(method, server, net=affine())
    assert same(state.model, plain.model)
    persons = state.kept["persons"]
    site = server.members["a"]
    assert {"optimizer", "auxiliary optimizer", "fedsm.person optimizer"} <= set(site.memory)
    assert not differing(tensors_of(affine()), persons["d"]), "a site that annotates nothing, alone"
    named = parts(affine())
    assert not differing(tensors_of(affine()), persons["a"]) & set(named["encoder:1"])
    assert differing(persons["a"], persons["b"]) & set(named["decoder"])
    alike = trained("fedsm", lam=0.25).kept["persons"]
    assert all(same(alike["a"], alike[other]) for other in "bcd")
    members = method.eval_members(state, "a")
    assert [m.net for m in members] == ["main", "selector", *["main"] * 4] and members[1].chooses == 0.9
    assert same(members[2].model, persons["a"])


def test_fedavgm_steps_along_the_expert_mean() -> None:
    """After two rounds: w2 = w1 + beta (w1 - w0) + Delta2, with Delta2 from w1 by the rule of every part."""
    method, server = fedmenu("fedavgm", beta=0.5), federation(affine)
    w0 = tensors_of(affine())
    once = play(method, server, rounds=1, net=affine())
    ends = []
    for site in server.sites:
        member = cast(Any, server.members[site])
        member.round = 1
        ends.append(method.local_update(member, model=once.model, round=1, rounds=2)["model"])
    again = federation(affine)
    play(method, again, rounds=1, net=affine())
    state = method.round(dataclasses.replace(once, rounds=2), cast(Any, again))
    owns = [{1, 2} & ANNOTATED[site] != set() for site in server.sites]
    weights = torch.tensor(expert_weights(owns, 0.5), dtype=torch.float64)
    for name in parts(affine())["encoder:0"]:
        mean = sum(w * end[name].double() for w, end in zip(weights, ends, strict=True)) / weights.sum()
        expected = mean + 0.5 * (once.model[name].double() - w0[name].double())
        torch.testing.assert_close(state.model[name].double(), expected, atol=1e-6, rtol=1e-5)


def test_strategies_that_do_not_fit() -> None:
    def check(name: str, **options: Any) -> None:
        FedMENU(strategy=StrategyChoice(name=cast(Any, name), options=options)).check(SPACE)

    with pytest.raises(FederationError, match=r"fedprox: the option 'nu' does not exist.*known: mu"):
        check("fedprox", nu=1)
    with pytest.raises(FederationError, match=r"fedprox: the option 'loss' does not exist"):
        check("fedprox", loss={"name": "auto"})
    with pytest.raises(FederationError, match=r"fedavg: the option 'swa_start' does not exist"):
        check("fedavg", swa_start=0.5)
    with pytest.raises(FederationError, match="fedprox: mu: got -1"):
        check("fedprox", mu=-1)
    with pytest.raises(FederationError, match="allowed: steps"):
        check("scaffold", control="weights")
    with pytest.raises(FederationError, match="training site 'x' does not exist"):
        method = FedMENU(strategy=StrategyChoice(name="fednorm", options={"groups": {"p": ["x"]}}))
        method.start(menunet(), cast(Any, federation()))
    with pytest.raises(FederationError, match="the part"):
        method = FedMENU(strategy=StrategyChoice(name="fedbn", options={"keep": ["stem"]}))
        method.start(menunet(), cast(Any, federation()))


def test_what_check_tells_before_anything_is_trained() -> None:
    """Errors that need the net or the training sites, and strategies that have nothing to do."""
    sites = sorted(ANNOTATED)

    def told(name: str, make: Any = affine, **options: Any) -> list[str]:
        chosen: Any = StrategyChoice(name=cast(Any, name), options=options)
        return FedMENU(strategy=chosen).examine(make(), sites)

    assert told("fedbn") == told("fedsm") == told("fednorm", groups={"p": ["a"]}) == []
    assert "so that it is FedAvg; set net.affine to true" in told("fedbn", menunet)[0]
    assert "so that it is FedAvg" in told("fedbn", norms="batch")[0]
    assert "names no site" in told("fednorm")[0]
    assert "never trained" in FedMENU(agd="none").examine(affine(), sites)[0]
    with pytest.raises(FederationError, match="'s9' does not exist"):
        told("fednorm", groups={"p": ["s9"]})
    with pytest.raises(FederationError, match="named twice"):
        told("fednorm", groups={"p": ["a"], "q": ["a"]})
    with pytest.raises(FederationError, match="the part"):
        told("fedbn", keep=["stem"])
    dodnet = nets.build("dodnet", {"filters": [8, 8]}, in_channels=1, classes=5, spatial_dims=2, seed=1)
    with pytest.raises(FederationError, match=r"no sub-encoder per organ; set net\.name to menunet"):
        FedMENU(agd="none").examine(dodnet, sites)
    for wrong in ({"strategy": StrategyChoice(name="fednorm")}, {"agd": "local"}):
        with pytest.raises(FederationError, match="centralized training is one site"):
            FedMENU(pooled=True, **cast(Any, wrong)).check(SPACE)


def test_the_log_of_two_trainings() -> None:
    """fedsm: the loss is that of the global model, and of the other beside it."""
    server = federation(affine)
    play(fedmenu("fedsm"), server, rounds=1, net=affine())
    plain = federation(affine)
    play(fedmenu("fedavg"), plain, rounds=1, net=affine())
    ours = server.members["a"].logged
    assert ours["loss"] == plain.members["a"].logged["loss"]
    assert {"person_loss", "person_segmentation", "person_auxiliary", "selector_loss"} <= set(ours)


LOST: Any = SimpleNamespace(sites=["a", "b", "c", "d"], lost={"b": "gone"})


def after(name: Any, kept: Any, controls: dict[str, Any], **options: Any) -> Any:
    """What a strategy makes of a round from 0 to a mean of 2, in which site b was lost."""
    replies: Any = Replies({site: {"model": {}, "control": control} for site, control in controls.items()})

    def mean(models: Any) -> Tensors:
        return {"w": torch.tensor(2.0)}

    strategy = make_strategy(StrategyChoice(name=name, options=options))
    return strategy.after(kept, {"w": torch.tensor(0.0)}, replies, mean, LOST)


def test_a_lost_site_counts_in_the_share_of_feddyn() -> None:
    """h - alpha 3/4 Delta, as in `feddyn`."""
    model, kept = after(
        "feddyn", {"moment": {"w": torch.tensor(1.0)}}, {"a": {}, "c": {}, "d": {}}, alpha=0.5
    )
    assert kept["moment"]["w"].item() == pytest.approx(1 - 0.5 * 0.75 * 2)
    assert model["w"].item() == pytest.approx(2 - 0.25 / 0.5)


def test_a_lost_site_counts_in_the_control_of_scaffold_and_one_that_trains_nothing_does_not() -> None:
    change = {"w": torch.tensor(4.0)}
    _, kept = after("scaffold", {"moment": {"w": torch.tensor(1.0)}}, {"a": change, "c": change})
    assert kept["moment"]["w"].item() == pytest.approx(1 + 2 / 4 * 4)
    # d leaves w alone: c is the mean over the three others, and stays it where nothing changes
    _, kept = after("scaffold", kept, {"a": {"w": torch.tensor(0.0)}, "d": {}})
    assert kept["moment"]["w"].item() == pytest.approx(4) and kept["untrained"]["d"] == ["w"]
    _, kept = after("scaffold", kept, {"a": {"w": torch.tensor(0.0)}, "d": {}})
    assert kept["moment"]["w"].item() == pytest.approx(4)


@pytest.mark.parametrize("name", sorted(set(STRATEGIES) - {"fedsm"}))
def test_a_local_agd_goes_on_from_what_the_site_kept(monkeypatch, name: str) -> None:
    method, server = fedmenu(name, "local"), federation(affine)
    state = dataclasses.replace(play(method, server, rounds=1, net=affine()), rounds=2)
    kept = {site: dict(server.members[site].memory["agd"]) for site in "abc"}
    begun: dict[str, Any] = {}
    real = fedmenu_module.train_experts

    def spied(site: Any, net: Any, *given: Any, **more: Any) -> None:
        begun[site.name] = tensors_of(net)
        real(site, net, *given, **more)

    monkeypatch.setattr(fedmenu_module, "train_experts", spied)
    method.round(state, cast(Any, server))
    agd, start = parts(affine())["agd"], tensors_of(affine())
    for site in "abc":
        assert all(torch.equal(begun[site][n], kept[site][n]) for n in agd)
        assert any(not torch.equal(begun[site][n], start[n]) for n in agd if "norms" in n)


def test_the_selector_of_fedsm_sees_as_many_samples_at_a_time_as_the_nets() -> None:
    asked: list[int] = []

    class Asked(Site):
        def batches(self, **given: Any) -> Any:
            asked.append(given["batch"])
            return super().batches(**given)

    method = fedmenu("fedsm")
    method = dataclasses.replace(method, local=dataclasses.replace(method.local, batch=3))
    play(method, Server(*(Asked(name, own, 3, menunet) for name, own in ANNOTATED.items())), rounds=1)
    assert len(asked) == 4 + 2 * 3 and set(asked) == {3}


@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_a_site_trains_from_tensors_of_its_own_where_the_strategy_says_so(name: str) -> None:
    assert fedmenu(name).own_tensors == (name in ("fedbn", "fednorm"))
