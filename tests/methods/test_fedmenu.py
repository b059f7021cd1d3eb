"""Fed-MENU: the official local step and aggregation, what a site trains, the auxiliary decoder, limiting cases."""

import dataclasses
from collections.abc import Callable, Collection
from typing import Any, cast

import pytest
import torch
from fakes import FakeSite, Replies, Server, same
from menunet_vectors import under, vectors
from torch import nn

from fedatlas import losses, nets
from fedatlas.core.batch import Batch
from fedatlas.core.contract import sends_of
from fedatlas.core.errors import FederationError
from fedatlas.core.labels import LabelSpace, SiteLabels
from fedatlas.core.seeds import generator
from fedatlas.core.tensors import Tensors, forms_of, from_tree, parts, tensors_of, to_tree
from fedatlas.learning.loop import Local, lr_factor, make_optimizer
from fedatlas.losses import LossChoice
from fedatlas.losses.marginal import exclusion, merge_probabilities
from fedatlas.methods.fedavg import FedAvg
from fedatlas.methods.fedmenu import FedMENU, MENUState, alone, auxiliary_loss, menu_of, organ_mask
from fedatlas.methods.strategies import StrategyChoice, expert_weights
from fedatlas.nets.menunet import MENUNet
from fedatlas.transport import egress, wire

SPACE = LabelSpace(("background", "liver", "tumour", "spleen", "kidney"), groups=((1, 2),))
"""Organs: 0 liver and tumour, 1 spleen, 2 kidney."""
LOCAL = Local(optimizer="sgd", lr=0.01, momentum=0.9, nesterov=True, batch=2, steps=2, schedule="poly")
ANNOTATED: dict[str, set[int]] = {"a": {1, 2}, "b": {3}, "c": {2, 3}, "d": set()}
OWN = {"a": {0}, "b": {1}, "c": {0, 1}, "d": set()}
EXPERTS: LossChoice = LossChoice(name="marginal_dice_ce_exclusion")


def menunet(**options: Any) -> nn.Module:
    chosen = {"width": 1, "levels": 2, "groups": [[1, 2]]} | options
    return nets.build("menunet", chosen, in_channels=1, classes=len(SPACE), spatial_dims=2, seed=3)


def selector() -> nn.Module:
    """Of fedsm: an output per site."""
    chosen = {"filters": [2], "convolutions": [1], "norm": "none"}
    return nets.build("cnn", chosen, in_channels=1, classes=len(ANNOTATED), spatial_dims=2, seed=4)


class Site(FakeSite):
    """Images of 8 x 8 that depend on the site's name and the round; with a selector."""

    def __init__(self, name: str, annotated: Collection[int], n: int, make: Callable[[], nn.Module]) -> None:
        super().__init__(name, annotated, n, make, space=SPACE, nets={"selector": selector})


def federation(make: Callable[[], nn.Module] = menunet, **annotated: set[int]) -> Server:
    chosen = annotated or ANNOTATED
    return Server(*(Site(name, classes, 3 + n, make) for n, (name, classes) in enumerate(chosen.items())))


def play(method: Any, server: Server, rounds: int = 2, net: nn.Module | None = None) -> Any:
    state = dataclasses.replace(method.start(net or menunet(), server), rounds=rounds)
    for _ in range(rounds):
        state = method.round(state, server)
        again = from_tree(type(state), wire.decode(wire.encode(to_tree(state))))
        assert wire.encode(to_tree(again)) == wire.encode(to_tree(state))
    return state


def reply(site: Any, method: FedMENU, model: Tensors | None = None, round: int = 0) -> dict[str, Any]:
    start = tensors_of(menunet()) if model is None else model
    return method.local_update(cast(Any, site), model=start, round=round, rounds=2)


def site_of(name: str, make: Callable[[], nn.Module] = menunet) -> Site:
    return Site(name, ANNOTATED[name], 3, make)


def moved(old: Tensors, new: Tensors) -> set[str]:
    """The parts of which a tensor has changed."""
    named = parts(menunet())
    return {
        part
        for part, names in named.items()
        if any(not torch.equal(old[n], new[n]) for n in names if n in new)
    }


def test_the_official_local_step() -> None:
    """One batch of a client that annotates the second of three organs: both steps, with their own momentum."""
    v = vectors("fedmenu_local_step")
    before = {name: value for name, value in under(v, "before/").items() if not name.startswith("heads")}
    after = {name: value for name, value in under(v, "after/").items() if not name.startswith("heads")}
    space = LabelSpace(("background", "one", "two", "three"))

    def make() -> nn.Module:
        return MENUNet(width=1, grouped=False).build(in_channels=1, classes=4, spatial_dims=3)

    site: Any = Site("a", {2}, 1, make)
    site.labels = SiteLabels(space, frozenset({2}))
    batch = Batch(v["x"], v["y"][:, 0].to(torch.uint8), torch.tensor([site.labels.known]), ["case"])
    site.batches = lambda **asked: [batch]
    local = Local(
        optimizer="sgd", lr=0.01, momentum=0.99, nesterov=True, weight_decay=3e-5, batch=1, steps=1,
        schedule="constant",
    )  # fmt: skip
    # the federation's schedule, poly over 400 rounds, gives the rate after the first
    poly = dataclasses.replace(local, schedule="poly")
    assert poly.lr * lr_factor(poly, 1, 400) == pytest.approx(float(v["lr_after"]), abs=1e-9)
    end = FedMENU(local=local).local_update(site, model=before, round=0, rounds=400)["model"]
    assert site.logged["loss"] == pytest.approx(float(v["train_loss"]), abs=1e-5)
    for name, value in after.items():
        torch.testing.assert_close(end[name], value, atol=1e-5, rtol=1e-4)
        assert torch.equal(value, before[name]) == (name.startswith(("encoders.0", "encoders.2"))), name
        assert torch.equal(end[name], before[name]) == torch.equal(value, before[name]), name


def test_the_official_aggregation() -> None:
    v = vectors("fedmenu_aggregation")
    owns, sizes = v["node_flag"], v["node_weight"]
    stacked, expected = under(v, "in/"), under(v, "out/")

    class Given:
        sites = tuple(str(k) for k in range(len(owns)))

        def call(self, function: Any, **payload: Any) -> Any:
            return Replies(
                {
                    str(k): {
                        "model": {name: value[k] for name, value in stacked.items()},
                        "n": float(sizes[k]),
                        "annotated": (owns[k].nonzero()[:, 0] + 1).tolist(),
                    }
                    for k in range(len(owns))
                }
            )

    names = {f"encoder:{m}": [n for n in stacked if n.startswith(f"encoders.{m}")] for m in range(3)}
    model = {name: value[0] for name, value in stacked.items()}
    state = MENUState(model, organs=[[1], [2], [3]], parts=names)
    got = FedMENU().round(state, cast(Any, Given())).model
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, atol=1e-6, rtol=0)
    for m in range(3):
        weights = torch.tensor(expert_weights(owns[:, m].tolist(), 0.5), dtype=torch.float64)
        torch.testing.assert_close(weights / weights.sum(), v["sub_encoder_weights"][m])
    plain = FedMENU(agg="fedavg").round(state, cast(Any, Given())).model
    assert not torch.allclose(plain[names["encoder:0"][0]], got[names["encoder:0"][0]])


def test_weights_of_experts() -> None:
    assert expert_weights([True, False, False], 0.5) == [1, 0.5, 0.5]
    assert expert_weights([True, False, True], 0.0) == [1, 0, 1]
    assert expert_weights([False, False], 0.0) == expert_weights([True, True], 0.5) == [1, 1]


@pytest.mark.parametrize("name", sorted(ANNOTATED))
@pytest.mark.parametrize("agd", ["shared", "local", "none"])
def test_a_site_trains_its_own_sub_encoders_only(name: str, agd: Any) -> None:
    """I2, I3; a site with two organs, and one with none."""
    site, start, method = site_of(name), tensors_of(menunet()), FedMENU(agd=agd, local=LOCAL)
    found = reply(site, method)
    forms = forms_of(menunet())
    egress.check(
        found, sends_of(method)["local_update"], what="", classes=len(SPACE), forms=lambda net: forms
    )
    expected = {f"encoder:{m}" for m in OWN[name]} | ({"decoder", "head"} if OWN[name] else set())
    expected |= {"agd"} if agd == "shared" and OWN[name] else set()
    assert moved(start, found["model"]) == expected
    assert found["annotated"] == sorted(ANNOTATED[name])
    assert list(found["model"]) == list(start)
    assert ("auxiliary optimizer" in site.memory) == (agd != "none" and bool(OWN[name]))
    assert ("agd" in site.memory) == (agd == "local")
    if agd == "local" and OWN[name]:
        own = site.memory["agd"]
        assert any(not torch.equal(own[n], start[n]) for n in parts(menunet())["agd"])


@pytest.mark.parametrize("agd", ["shared", "none"])
def test_a_batch_moves_the_sub_encoders_of_the_organs_that_it_annotates(agd: Any) -> None:
    """A site with cases of two organs, as where all cases lie in one place, which draws cases of the first alone."""

    class OfOne(Site):
        def batches(self, **given: Any) -> Any:
            known = torch.tensor([True, *(c in ANNOTATED["a"] for c in range(1, 5))])
            return [
                dataclasses.replace(batch, known=known.expand_as(batch.known))
                for batch in super().batches(**given)
            ]

    site, start = OfOne("c", ANNOTATED["c"], 3, menunet), tensors_of(menunet())
    method = FedMENU(agd=agd, local=LOCAL, loss=EXPERTS)
    found = reply(site, method, start)
    assert moved(start, found["model"]) == {"encoder:0", "decoder", "head"} | (
        {"agd"} if agd == "shared" else set()
    )


def test_a_step_for_every_organ() -> None:
    """The variant of UFPS by hand: two steps for every batch of a site with two organs, each of one sub-encoder."""
    method = FedMENU(agd="none", agg="owner_only", per_organ=True, local=LOCAL, loss=EXPERTS)
    found = {}
    for name in ("b", "c"):
        site = Site(name, ANNOTATED[name], 3, menunet)
        found[name] = method.local_update(cast(Any, site), tensors_of(menunet()), 0, 1)["model"]
    plain = dataclasses.replace(method, per_organ=False)
    one = plain.local_update(cast(Any, Site("b", {3}, 3, menunet)), tensors_of(menunet()), 0, 1)["model"]
    assert same(found["b"], one)  # one organ: nothing is different

    site, net = Site("c", ANNOTATED["c"], 3, menunet), menunet()
    named, menu = dict(net.named_parameters()), parts(net)
    loss = losses.supervised(EXPERTS, cast(Any, site))
    trained = [
        p for part in ("encoder:0", "encoder:1", "decoder", "head") for p in (named[n] for n in menu[part])
    ]
    optimizer = make_optimizer(nn.ParameterList(trained), LOCAL)
    for step, batch in enumerate(site.batches(batch=2, steps=2)):
        for group in optimizer.param_groups:
            group["lr"] = LOCAL.lr * (1 - step / 2) ** 0.9
        for organ, other, c in ((0, 1, 2), (1, 0, 3)):
            batch.known = torch.tensor([[True, *(k == c for k in range(1, 5))]] * 2)
            optimizer.zero_grad()
            loss(net, batch).backward()
            for name in menu[f"encoder:{other}"]:
                named[name].grad = None
            assert all(named[name].grad is not None for name in menu[f"encoder:{organ}"])
            optimizer.step()
    for name, value in tensors_of(net).items():
        torch.testing.assert_close(found["c"][name], value, rtol=1e-4, atol=1e-6)
    with pytest.raises(FederationError, match="per_organ is true and strategy is fedavgm"):
        dataclasses.replace(method, strategy=StrategyChoice(name="fedavgm")).check(SPACE)


def test_grouped_or_not_a_site_trains_the_same() -> None:
    ends = [
        reply(site_of("c", lambda g=g: menunet(grouped=g)), FedMENU(local=LOCAL))["model"]
        for g in (False, True)
    ]
    for name, value in ends[0].items():
        torch.testing.assert_close(value, ends[1][name], atol=1e-4, rtol=1e-3)
    start = tensors_of(menunet())
    assert moved(start, ends[1]) == moved(start, ends[0])


def test_both_momenta_persist_at_the_site() -> None:
    start, method = tensors_of(menunet()), FedMENU(local=LOCAL)
    site = site_of("a")
    reply(site, method)
    first, second = site.memory["optimizer"], site.memory["auxiliary optimizer"]
    shared = {name for name in first if name in second}
    assert shared and all("encoders.0" in name for name in shared)
    assert all(name.startswith(("encoders.0", "agd")) for name in second)
    assert not any(name.startswith("agd") for name in first)
    name = min(shared)
    assert not torch.equal(first[name]["momentum_buffer"], second[name]["momentum_buffer"])
    kept = reply(site, method, round=1)["model"]
    for forgotten, same_key in (("optimizer", "decoder"), ("auxiliary optimizer", "agd")):
        other = site_of("a")
        reply(other, method)
        del other.memory[forgotten]
        again = reply(other, method, round=1)["model"]
        assert same_key in moved(kept, again)
    reset = FedMENU(local=dataclasses.replace(LOCAL, opt_state="reset"))
    fresh = site_of("a")
    reply(fresh, reset)
    assert not fresh.memory
    assert start.keys() == kept.keys()


def test_the_schedule_holds_for_both_steps() -> None:
    """The second of two steps of the poly schedule is .5^.9 = .536 of a constant one."""
    start, lengths = tensors_of(menunet()), []
    for schedule in ("constant", "poly"):
        local = dataclasses.replace(LOCAL, schedule=schedule, steps=1)
        end = reply(site_of("a"), FedMENU(local=local), round=1)["model"]
        steps = {part: [end[n] - start[n] for n in names] for part, names in parts(menunet()).items()}
        lengths.append([sum(float((s**2).sum()) for s in steps[part]) ** 0.5 for part in ("decoder", "agd")])
    for constant, poly in zip(*lengths, strict=True):
        assert poly / constant == pytest.approx(0.5**0.9, rel=0.1)


def test_auxiliary_decoders_that_stay_at_their_site() -> None:
    """ALD: the server's stays as it began, a site goes on from its own, and sites differ."""
    method, server = FedMENU(agd="local", local=LOCAL), federation()
    state = play(method, server)
    names = parts(menunet())["agd"]
    start = tensors_of(menunet())
    assert all(torch.equal(state.model[n], start[n]) for n in names)
    kept = {site: server.members[site].memory["agd"] for site in "ab"}
    assert any(not torch.equal(kept["a"][n], kept["b"][n]) for n in names)
    went_on, began_again = server.members["a"], site_of("a")
    began_again.memory = {k: v for k, v in went_on.memory.items() if k != "agd"}
    for site in (went_on, began_again):
        site.round = 1
        reply(site, method, state.model, round=1)
    assert any(not torch.equal(went_on.memory["agd"][n], began_again.memory["agd"][n]) for n in names)
    assert list(state.model) == list(start)
    other = federation()
    silent = [site for site in other.members.values() if not ANNOTATED[site.name]]
    play(method, other)
    assert [site.name for site in silent] == ["d"]
    assert same(silent[0].memory["agd"], {n: start[n] for n in names})


def test_organs_by_which_a_sub_encoder_moves() -> None:
    """theta_m + rho_m mean_experts(theta_m,k - theta_m), rho_m = N_experts / (N_experts + N_others / 2)."""
    start = tensors_of(menunet())
    ends = {name: reply(site_of(name), FedMENU(local=LOCAL))["model"] for name in ANNOTATED}
    for agg, rho in (("expert_half", 2 / 3), ("owner_only", 1.0)):
        method, server = FedMENU(agg=cast(Any, agg), local=LOCAL), cast(Any, federation())
        got = method.round(dataclasses.replace(method.start(menunet(), server), rounds=2), server)
        for name in parts(menunet())["encoder:0"]:
            step = (ends["a"][name] - start[name] + ends["c"][name] - start[name]) / 2
            torch.testing.assert_close(got.model[name], start[name] + rho * step, atol=1e-6, rtol=1e-5)
        assert all(torch.equal(got.model[n], start[n]) for n in parts(menunet())["encoder:2"])


def test_one_site_without_extras_is_fedavg() -> None:
    """E23 with all labels; and FedAvg's weights with agg: fedavg are FedAvg wherever all train all."""
    everything = {1, 2, 3, 4}
    plain = {"loss": EXPERTS, "local": LOCAL}
    one = play(FedMENU(agd="none", **plain), federation(a=everything))
    assert same(one.model, play(FedAvg(**plain), federation(a=everything)).model)
    both = {"a": everything, "b": everything}
    many = play(FedMENU(agd="none", agg="fedavg", **plain), federation(**both))
    assert same(many.model, play(FedAvg(**plain), federation(**both)).model)
    halves = play(FedMENU(agd="none", **plain), federation(**both))
    assert moved(many.model, halves.model) >= {"encoder:0", "encoder:1", "encoder:2"}
    aided = play(FedMENU(**plain), federation(a=everything))
    assert moved(one.model, aided.model) >= {"agd", "encoder:0"}


def test_one_sub_encoder_is_a_unet_with_fedavg() -> None:
    """M = 1: every site trains it, and all weights are alike where sites are of one size."""

    def unet() -> nn.Module:
        return menunet(groups=[[1, 2, 3, 4]], agd=False)

    def sites() -> Server:
        return Server(*(Site(name, {1, 3}, 4, unet) for name in "ab"))

    plain = {"loss": EXPERTS, "local": LOCAL}
    alone = play(FedMENU(agd="none", **plain), sites(), net=unet())
    assert same(alone.model, play(FedAvg(**plain), sites(), net=unet()).model)


class Wrapped(nn.Module):
    """A wrapper that renames every tensor, and forwards the call alone."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


@pytest.mark.parametrize(("wrap", "prefix"), [(Wrapped, "inner."), (nn.DataParallel, "module.")])
@pytest.mark.parametrize("agd", ["shared", "local"])
def test_wrapping_the_net_changes_nothing(wrap: Any, prefix: str, agd: Any) -> None:
    method = FedMENU(agd=agd, local=LOCAL)
    bare = play(method, federation())
    wrapped = play(method, federation(lambda: wrap(menunet())), net=wrap(menunet()))
    assert same({prefix + name: value for name, value in bare.model.items()}, wrapped.model)
    assert wrapped.parts == {p: [prefix + name for name in names] for p, names in bare.parts.items()}
    assert moved(tensors_of(menunet()), bare.model) >= {"encoder:0", "encoder:1", "decoder"}


def test_a_compiled_net_has_the_same_parts() -> None:
    net = torch.compile(menunet(), backend="eager")
    assert menu_of(cast(Any, net), agd=True).parts().keys() == parts(menunet()).keys()
    named = parts(cast(Any, net))
    expected = {p: tuple(f"_orig_mod.{n}" for n in names) for p, names in parts(menunet()).items()}
    assert named == expected


def test_auxiliary_loss_written_out() -> None:
    """Organs of a mixed batch: each by the samples that annotate it, a lesion where it is annotated."""
    known = torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 1, 0], [1, 0, 0, 1, 0]], dtype=torch.bool)
    rng = generator("auxiliary")
    target = torch.randint(0, 5, (3, 4, 4), generator=rng).to(torch.uint8)
    told = [[torch.randn(3, 2, 4, 4, generator=rng) for _ in range(2)] for _ in range(2)]
    expected = 0.0
    for levels, (classes, samples) in zip(told, [([[1], [1, 2]], [0, 1]), ([[3], [3]], [1, 2])], strict=True):
        y = torch.stack(
            [torch.isin(target[s], torch.tensor(c)) for s, c in zip(samples, classes, strict=True)]
        )
        onehot = torch.stack([~y, y], 1).double()
        for z in levels:
            q = z[samples].double().softmax(1)
            expected -= float((onehot * q.clamp(min=1e-4).log()).sum(1).mean())
            for c in (0, 1):
                a, b = q[:, c], onehot[:, c]
                dice = 1 - (2 * (a * b).sum() + 1) / ((a * a).sum() + b.sum() + 1)
                expected += float(dice) / 2
    got = auxiliary_loss(told, target, known, [(1, 2), (3,)])
    assert float(got) == pytest.approx(expected, rel=1e-5)
    hidden = target.clone()
    hidden[0][target[0] == 2] = 4  # the tumour of a sample that does not annotate it
    assert torch.equal(organ_mask(hidden, known, (1, 2)), organ_mask(target, known, (1, 2)))


@pytest.mark.parametrize("flags", range(16))
def test_exclusion_loss_in_its_written_form(flags: int) -> None:
    """P5 for every set of labels of four classes, E10: with all of them only channel 0 is penalised; with none nothing is."""
    row = [True, *(bool(flags >> c & 1) for c in range(4))]
    rng = generator("exclusion", flags)
    z = torch.randn(2, 5, 3, 4, generator=rng, dtype=torch.float64).requires_grad_()
    target, known = torch.randint(0, 5, (2, 3, 4), generator=rng), torch.tensor([row] * 2)
    q = z.detach().softmax(1)
    L = [c for c in range(1, 5) if row[c]]
    e = torch.isin(target, torch.tensor(L)).double()
    ce, dice = [], []
    for c in (c for c in range(5) if c not in L):
        q_c = q[:, c]
        ce.append(float((e * (q_c + 1).log()).sum() / e.sum()) if e.any() else 0.0)
        dice.append(float((2 * (q_c * e).sum() + 1) / ((q_c**2).sum() + (e**2).sum() + 1)))
    if not L:
        ce, dice = [0.0], [1.0]
    got = exclusion(z, target, known)
    assert got[0].item() == pytest.approx(sum(ce) / len(ce), abs=1e-12)
    assert got[1].item() == pytest.approx(sum(dice) / len(dice), abs=1e-12)
    assert min(term.item() for term in got) >= 0
    (grad,) = torch.autograd.grad(got[0] + got[1], z)
    torch.testing.assert_close(grad.sum(1), torch.zeros_like(grad[:, 0]), atol=1e-12, rtol=0)
    if all(row):
        assert len(ce) == 1
        torch.testing.assert_close(merge_probabilities(q, known), q)


def test_blind_to_labels_that_are_not_annotated() -> None:
    class Hidden(Site):
        def batches(self, **asked: Any) -> list[Batch]:  # type: ignore[override]
            batches = super().batches(**asked)
            for batch in batches:
                batch.target[~torch.tensor(self.labels.known)[batch.target.long()]] = 0
            return batches

    for name in ANNOTATED:
        hidden = Hidden(name, ANNOTATED[name], 3, menunet)
        method = FedMENU(local=LOCAL)
        assert same(reply(site_of(name), method)["model"], reply(hidden, method)["model"])


def test_a_batch_without_any_annotation_takes_no_auxiliary_step() -> None:
    class Half(Site):
        def batches(self, **asked: Any) -> list[Batch]:  # type: ignore[override]
            first, second = super().batches(**asked)
            second.known = torch.zeros_like(second.known)
            return [first, second]

    site = Half("a", {1}, 3, menunet)
    once = dataclasses.replace(LOCAL, opt_state="reset")
    end = reply(site, FedMENU(local=once))["model"]
    single = site_of("a")
    single.labels = site.labels
    single.batches = lambda **asked: Site.batches(single, batch=2, steps=2)[:1]  # type: ignore[method-assign]
    # the first step of one round in one: its rate does not depend on how many follow
    start = reply(single, FedMENU(local=once))["model"]
    assert all(torch.equal(end[n], start[n]) for n in parts(menunet())["agd"])
    assert site.logged["auxiliary"] > 0


def test_what_does_not_fit() -> None:
    unet = nets.build("unet", {"filters": [4, 4, 4]}, in_channels=1, classes=5, spatial_dims=2, seed=1)
    with pytest.raises(FederationError, match=r"set net\.name to menunet"):
        FedMENU().start(unet, cast(Any, None))
    with pytest.raises(FederationError, match=r"set net\.agd to true"):
        FedMENU().start(menunet(agd=False), cast(Any, None))
    FedMENU(agd="none").start(menunet(agd=False), cast(Any, federation()))
    with pytest.raises(FederationError, match="exclusive"):
        FedMENU().check(LabelSpace(("a", "b"), exclusive=False))
    with pytest.raises(FederationError, match="exclusive"):
        FedMENU(loss=LossChoice(name="auto")).check(LabelSpace(("a", "b"), exclusive=False))
    FedMENU().check(SPACE)


def test_an_organ_that_one_sample_of_a_batch_annotates_is_learnt() -> None:
    class Mixed(Site):
        def batches(self, **given: Any) -> Any:
            batches = super().batches(**given)
            for batch in batches:
                batch.known = torch.tensor(
                    [[True, True, True, False, False], [True, False, False, True, False]]
                )
            return batches

    start, site = tensors_of(menunet()), Mixed("c", ANNOTATED["c"], 3, menunet)
    found = reply(site, FedMENU(local=LOCAL, loss=EXPERTS), start)
    assert moved(start, found["model"]) == {"encoder:0", "encoder:1", "decoder", "head", "agd"}
    assert site.logged["auxiliary"] > 0


def test_with_a_step_for_every_organ_the_mean_of_their_losses_is_logged() -> None:
    """At a rate with which nothing moves."""
    local = dataclasses.replace(LOCAL, lr=1e-12, steps=1)
    site = site_of("c")
    reply(site, FedMENU(agd="none", per_organ=True, local=local, loss=EXPERTS))
    loss = losses.supervised(EXPERTS, cast(Any, site))
    (batch,) = site.batches(batch=2, steps=1)
    values = [float(cast(Any, loss(menunet(), alone(batch, organ))).detach()) for organ in ((1, 2), (3,))]
    assert site.logged["loss"] == pytest.approx(sum(values) / 2, abs=1e-5)
    assert abs(values[0] - values[1]) > 1e-3


def test_both_steps_run_in_the_precision_that_is_asked_for() -> None:
    """A convolution of the decoder is of S1 alone, one of the AGD of S2."""
    kinds: dict[str, set[torch.dtype]] = {"decoder": set(), "agd": set()}

    def make() -> nn.Module:
        net = menunet()
        for part in kinds:
            conv = next(m for m in net.get_submodule(part).modules() if isinstance(m, nn.Conv2d))
            conv.register_forward_hook(lambda m, given, out, part=part: kinds[part].add(out.dtype))
        return net

    reply(site_of("a", make), FedMENU(local=dataclasses.replace(LOCAL, precision="bf16")))
    assert kinds == {"decoder": {torch.bfloat16}, "agd": {torch.bfloat16}}


def test_with_a_step_for_every_organ_the_auxiliary_step_moves_all_of_them() -> None:
    """One batch of a site with two organs: the moments of the second optimizer are of both sub-encoders."""
    site = site_of("c")
    local = dataclasses.replace(LOCAL, steps=1)
    found = reply(site, FedMENU(per_organ=True, local=local, loss=EXPERTS))
    kept = site.memory["auxiliary optimizer"]
    for part in ("encoder:0", "encoder:1", "agd"):
        assert any(bool(kept[n]["momentum_buffer"].any()) for n in parts(menunet())[part] if n in kept), part
    assert moved(tensors_of(menunet()), found["model"]) >= {"encoder:0", "encoder:1", "decoder", "agd"}


@pytest.mark.parametrize(
    ("options", "decoder", "encoder"),
    [
        ({}, [1, 3], [1, 0.5]),
        ({"weights": "equal"}, [1, 1], [1, 0.5]),
        ({"non_expert": 0.25}, [1, 3], [1, 0.25]),
        ({"weights": "equal", "agg": "fedavg"}, [1, 1], [1, 1]),
    ],
)
def test_which_weights_a_part_has(
    options: dict[str, Any], decoder: list[float], encoder: list[float]
) -> None:
    """Of two sites the first, with one case of four, alone has the first organ."""
    net = menunet()
    replies = Replies({s: {"n": n, "annotated": own} for s, n, own in (("a", 1, [1]), ("b", 3, [3]))})
    method = FedMENU(**options)
    mean = method.averaging(cast(Any, replies), method.start(net, cast(Any, None)))
    values = [{name: torch.full_like(v, k) for name, v in tensors_of(net).items()} for k in (0.0, 1.0)]
    got = mean(values)
    for part, (one, other) in (("decoder", decoder), ("encoder:0", encoder)):
        for name in parts(net)[part]:
            assert float(got[name].flatten()[0]) == pytest.approx(other / (one + other)), part
