"""FedMatch and FedMatch+: each part of the loss, what each step leaves alone, the sparse exchange, helpers."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import same
from hosted_images import Federation, cnn, encoded, run, run_with_a_stop

from fedatlas.core.batch import Batch
from fedatlas.core.errors import NameMismatch
from fedatlas.core.tensors import dense, load, sparse, tensors_of
from fedatlas.learning.augment import OFF
from fedatlas.learning.loop import Local, Stepper
from fedatlas.methods import fedmatch
from fedatlas.methods.fedavg import FedAvg
from fedatlas.methods.fedmatch import (
    FedMatch,
    FedMatchPlus,
    bernoulli_kl,
    nearest,
    output,
    theta,
    vote,
)
from fedatlas.methods.shared.simsiam import MEMORY, PreTraining
from fedatlas.transport import wire
from fedatlas.transport.clients import Faults
from fedatlas.transport.egress import EgressError, check

LOCAL = Local(batch=3, steps=3, optimizer="sgd", weight_decay=0.0, lr=1e-3)
METHOD = FedMatch(local=LOCAL, h_interval=2, confidence=0.5)
PLUS = FedMatchPlus(
    local=LOCAL,
    h_interval=2,
    confidence=0.5,
    pretrain_rounds=1,
    pretrain=PreTraining(batch=4, steps=2, dim=8, bottleneck=4),
)
OFF_LAMBDAS = {"lambda_icc": 0.0, "lambda_a": 0.0, "lambda_l1": 0.0, "lambda_l2": 0.0}
EXACT = {"l1_thres": 0.0, "delta_thres": 0.0}


# ------------------------------------------------------------------------------------------------------ the equations


def test_kl_between_yes_or_no_distributions() -> None:
    rng = torch.Generator().manual_seed(0)
    z_j, z = 3 * torch.randn(4, 3, generator=rng), 3 * torch.randn(4, 3, generator=rng)
    got = bernoulli_kl(z_j, z)
    for b in range(4):
        for c in range(3):
            p, q = torch.sigmoid(z_j[b, c].double()).item(), torch.sigmoid(z[b, c].double()).item()
            expected = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
            assert got[b, c].item() == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert torch.isfinite(bernoulli_kl(torch.tensor([500.0]), torch.tensor([-500.0]))).all()
    assert bernoulli_kl(z, z).abs().max() < 1e-6


def test_no_gradient_reaches_a_helper() -> None:
    z_j, z = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    bernoulli_kl(z_j, z).sum().backward()
    assert z_j.grad is None and z.grad is not None
    torch.testing.assert_close(z.grad, (z.sigmoid() - z_j.sigmoid()).detach())


@pytest.mark.parametrize(
    ("own", "helpers", "expected"),
    [
        (1, [], True), (-1, [], False),
        (1, [-1, -1], False), (-1, [1, 1], True), (1, [1, -1], True), (-1, [-1, 1], False),
        (1, [-1], True), (-1, [1], False),  # tied: its own
        (1, [-1, -1, 1], True), (-1, [1, 1, 1], True),
    ],
)  # fmt: skip
def test_vote(own: int, helpers: list[int], expected: bool) -> None:
    z_h = [torch.tensor([[float(z)]]) for z in helpers]
    assert bool(vote(torch.tensor([[float(own)]]), z_h)) is expected


def test_nearest_models_with_ties_by_name() -> None:
    points = {"d": [0.0, 1.0], "c": [0.0, 0.0], "b": [2.0, 0.0], "a": [0.0, -1.0]}
    outputs = {name: torch.tensor(point) for name, point in points.items()}
    near = nearest(outputs, 2)
    assert near == {"d": ["c", "a"], "c": ["a", "d"], "b": ["c", "a"], "a": ["c", "d"]}
    assert nearest({"a": outputs["a"]}, 2) == {"a": []}
    assert nearest(outputs, 0)["a"] == []


def toy(seed: int = 0) -> tuple[Any, Any, list[Any], Batch]:
    rng = torch.Generator().manual_seed(seed)
    nets = [cnn() for _ in range(4)]
    with torch.no_grad():
        for number, net in enumerate(nets):
            for parameter in net.parameters():
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=rng))
            if number == 1:
                for parameter in net.parameters():
                    parameter.mul_(0.2)
    known = torch.tensor([[True, False, False, True], [False, False, True, True]])
    image, target = torch.randn(2, 1, 8, 8, generator=rng), torch.rand(2, 4, generator=rng) < 0.5
    batch = Batch(image, target.float(), known, ["", ""])
    return nets[0], nets[1], [net.eval() for net in nets[2:]], batch


def test_the_unlabelled_loss_literally() -> None:
    sigma, psi, helpers, batch = toy()
    with torch.no_grad():
        sure = (output(batch.image, sigma, psi, learn="psi").sigmoid() - 0.5).abs()[~batch.known].sort()[0]
    tau = 0.5 + float(sure[0] + sure[1]) / 2  # one pair of four is left out
    method = FedMatch(confidence=tau, strong=OFF, lambda_icc=0.3, lambda_a=0.7, lambda_l1=0.01, lambda_l2=0.5)
    pairs = torch.zeros(2, dtype=torch.float64)
    terms = method.L_u(sigma, helpers, torch.Generator(), pairs)(psi, batch)
    assert isinstance(terms, dict)
    net = cnn()
    net.load_state_dict(theta(sigma.state_dict(), tensors_of(sigma), tensors_of(psi)))
    with torch.no_grad():
        p = net(batch.image).double().sigmoid()
        p_h = [helper(batch.image).double().sigmoid() for helper in helpers]
    icc = agreement = count = 0.0
    for b in range(2):
        for c in range(4):
            q = p[b, c].item()
            if batch.known[b, c] or max(q, 1 - q) < tau:
                continue
            count += 1
            for r in (h[b, c].item() for h in p_h):
                icc += (r * math.log(r / q) + (1 - r) * math.log((1 - r) / (1 - q))) / 2
            says = sum([q > 0.5, *(h[b, c].item() > 0.5 for h in p_h)]) >= 2
            agreement -= math.log(q if says else 1 - q)
    assert count == 3
    assert pairs.tolist() == [count, 4]
    assert terms["consistency"].item() == pytest.approx(0.3 * icc / count, rel=1e-4)
    assert terms["agreement"].item() == pytest.approx(0.7 * agreement / count, rel=1e-4)
    flat_s = torch.cat([v.flatten() for v in sigma.parameters()]).double()
    flat_p = torch.cat([v.flatten() for v in psi.parameters()]).double()
    assert terms["sparsity"].item() == pytest.approx(0.01 * flat_p.abs().sum().item(), rel=1e-5)
    assert terms["distance"].item() == pytest.approx(0.5 * (flat_s - flat_p).square().sum().item(), rel=1e-5)


def test_without_a_confident_pair_only_the_weights_are_held() -> None:
    sigma, psi, helpers, batch = toy()
    method = FedMatch(confidence=1.5, lambda_l1=0.0, lambda_l2=0.0)
    pairs = torch.zeros(2, dtype=torch.float64)
    terms = method.L_u(sigma, helpers, torch.Generator(), pairs)(psi, batch)
    assert isinstance(terms, dict)
    total = torch.stack(list(terms.values())).sum()
    total.backward()
    assert total.item() == 0 and pairs.tolist() == [0, 4]
    assert all(not parameter.grad.any() for parameter in psi.parameters())


def test_each_loss_moves_its_own_part() -> None:
    sigma, psi, helpers, batch = toy()
    method = FedMatch(confidence=0.5, strong=OFF)
    local = dataclasses.replace(LOCAL, lr=1e-2)
    L_u = method.L_u(sigma, helpers, torch.Generator(), torch.zeros(2, dtype=torch.float64))
    first, second = (Stepper(net, local, torch.device("cpu")) for net in (sigma, psi))
    before_s, before_p = tensors_of(sigma), tensors_of(psi)
    first.step(output(batch.image, sigma, psi, learn="sigma").square().mean())
    middle_s, middle_p = tensors_of(sigma), tensors_of(psi)
    assert same(middle_p, before_p) and not same(middle_s, before_s)
    assert all(not torch.equal(middle_s[name], before_s[name]) for name in before_s)
    second.step(L_u(psi, batch))
    assert same(tensors_of(sigma), middle_s)
    assert all(not torch.equal(tensors_of(psi)[name], before_p[name]) for name in before_p)


@pytest.mark.parametrize("learn", ["sigma", "psi"])
def test_gradients_reach_the_part_that_learns_and_no_other(learn: Any) -> None:
    sigma, psi, _, batch = toy()
    output(batch.image, sigma, psi, learn=learn).sum().backward()
    moved = {"sigma": sigma, "psi": psi}
    assert all((p.grad is not None) == (part == learn) for part in moved for p in moved[part].parameters())


# ------------------------------------------------------------------------------------------------- the sparse exchange


def test_sparse_tensors_come_out_exactly() -> None:
    rng = torch.Generator().manual_seed(3)
    old = {"w": torch.randn(7, 5, generator=rng), "b": torch.randn(4, generator=rng), "s": torch.tensor(2.0)}
    new = {name: value.clone() for name, value in old.items()}
    new["w"][2, 3] += 1.0
    new["w"][6, 4] -= 1e-3
    new["w"][0, 0] += 1e-7
    new["b"] += 1.0
    changes = sparse(new, old, 1e-4)
    assert changes["w"]["index"].tolist() == [13, 34] and changes["w"]["index"].dtype == torch.int32
    assert "index" not in changes["b"]  # as a whole it is smaller
    assert len(changes["s"]["value"]) == 0
    again: Any = wire.decode(wire.encode(changes))  # type: ignore[arg-type]
    got = dense(again, old)
    expected = {name: torch.where((new[name] - old[name]).abs() > 1e-4, new[name], old[name]) for name in old}
    assert same(got, expected)
    assert got["w"][0, 0] == old["w"][0, 0] != new["w"][0, 0]
    assert same(dense(sparse(new, old, 0.0), old), new)
    marks = {"mask": torch.tensor([True, False, True]), "count": torch.tensor([0, 3], dtype=torch.uint8)}
    others = {"mask": torch.tensor([True, True, True]), "count": torch.tensor([255, 3], dtype=torch.uint8)}
    assert same(dense(sparse(others, marks, 0.5), marks), others)
    declared = {"w": "sparse"}
    forms = {name: ("float32", tuple(value.shape)) for name, value in old.items()}
    check({"w": changes}, declared, what="", classes=3, forms=lambda net: forms)


def test_dense_refuses_what_does_not_fit() -> None:
    old = {"w": torch.zeros(4)}
    with pytest.raises(NameMismatch):
        dense({}, old)
    with pytest.raises(NameMismatch):
        dense({"w": {"value": torch.zeros(5)}}, old)
    with pytest.raises(NameMismatch):
        dense({"w": {"index": torch.zeros(1, dtype=torch.int32), "value": torch.zeros(1).double()}}, old)


def entries(places: list[int], count: int | None = None, **kinds: Any) -> dict[str, torch.Tensor]:
    value = torch.zeros(len(places) if count is None else count, dtype=kinds.get("value", torch.float32))
    return {"index": torch.tensor(places, dtype=kinds.get("index", torch.int32)), "value": value}


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([1], "is a list"),
        ({"v": entries([0])}, "'v', which the net does not have"),
        ({"w": torch.zeros(3)}, "not a dict of index and value"),
        ({"w": entries([0]) | {"image": torch.zeros(9)}}, "not a dict of index and value"),
        ({"w": {"index": torch.zeros(1, dtype=torch.int32)}}, "not a dict of index and value"),
        ({"w": entries([0], value=torch.float64)}, "the values of 'w' are a tensor float64"),
        ({"w": entries([0], index=torch.int64)}, "the index of 'w' is a tensor int64"),
        ({"w": entries([0, 1], count=1)}, "2 places for 1 values"),
        ({"w": entries([0, 6])}, "does not increase from 0 to below 6"),
        ({"w": entries([-1, 2])}, "does not increase"),
        ({"w": entries([1, 1])}, "does not increase"),
        ({"w": {"value": torch.zeros(5)}}, "5 values and no index, in the net it has 6"),
        ({"w": {"value": torch.zeros(2, 3)}}, r"float32\[2, 3\]"),
        ({"w": {"value": [1.0]}}, "are a list of 1"),
    ],
)
def test_what_is_no_sparse_tensor_stays_at_the_site(value: Any, said: str) -> None:
    with pytest.raises(EgressError, match=said):
        check(
            {"sigma": value},
            {"sigma": "sparse"},
            what="",
            classes=3,
            forms=lambda net: {"w": ("float32", (2, 3))},
        )


def test_only_changed_entries_travel(tmp_path: Path) -> None:
    """The server's sigma and psi are those that every site holds, and little is sent where little changes."""
    method = dataclasses.replace(METHOD, delta_thres=2e-3)
    federation = Federation(method, tmp_path)
    state = federation.start(3)
    for number in (1, 2, 3):
        before = state
        state = federation.play(state, number)
        for host in federation.hosts.values():
            held: Any = host.memory.before(number + 1, 0, None)["held"]
            assert same(held["sigma"], before.sigma) and same(held["psi"], before.psi)
        for log in federation.clients.calls[0].logs.values():
            assert 0 < log["sent"] < 0.8 and log["confident"] == 1.0
        assert same(dense(state.change["sigma"], before.sigma), state.sigma)
        assert same(dense(state.change["psi"], before.psi), state.psi)
    moved = torch.cat([(state.sigma[n] - before.sigma[n]).flatten().abs() for n in state.sigma])
    assert (moved[moved > 0] > 1.9e-3).all() and bool((moved == 0).any())


def test_small_entries_of_psi_are_sent_as_zero(tmp_path: Path) -> None:
    """With a psi of pure decay and thresholds above it, psi is sparse."""
    method = FedMatch(
        local=LOCAL, lambda_icc=0.0, lambda_a=0.0, lambda_l2=0.0, lambda_l1=1e-9, psi_factor=0.01, l1_thres=1e-3,
        delta_thres=0.0,
    )  # fmt: skip
    state = run(method, tmp_path, 1)
    flat = torch.cat([value.flatten() for value in state.psi.values()])
    assert 0.1 < float((flat == 0).double().mean()) < 1
    assert float(flat[flat != 0].abs().min()) > 1e-3


def test_a_site_that_was_lost_is_sent_all(tmp_path: Path) -> None:
    federation = Federation(METHOD, tmp_path)
    federation.clients.faults = Faults(on_lost="drop")
    state = federation.play(federation.start(5), 1)
    federation.gone = {"y"}
    state = federation.play(state, 2)
    assert state.holders == ("x", "z")
    federation.gone = set()
    before = state
    federation.asked.clear()
    state = federation.play(state, 3)
    own = {q.site: q.own for q in federation.asked if q.function == "local_update"}
    assert own["y"] is not None and own["x"] is None
    assert state.holders == ("x", "y", "z")
    held: Any = federation.hosts["y"].memory.before(4, 0, None)["held"]
    assert same(held["sigma"], before.sigma)


# ------------------------------------------------------------------------------------------------------ the federation


@pytest.mark.parametrize("net", [{}, {"norm": "batch"}])
def test_without_unlabelled_terms_it_is_fedavg_with_equal_weights(net: Any, tmp_path: Path) -> None:
    """E20: the step of sigma is one of theta, with lambda_s as a factor of the learning rate."""
    local = dataclasses.replace(LOCAL, lr=1e-2)
    method = FedMatch(local=local, lambda_s=10.0, **OFF_LAMBDAS, **EXACT)
    federation = Federation(method, tmp_path / "m", net)
    start = federation.start(2)
    got = federation.play(start, 2)
    plain = Federation(
        FedAvg(local=dataclasses.replace(local, lr=1e-1), weights="equal"), tmp_path / "a", net
    )
    expected = plain.play(dataclasses.replace(plain.start(2), model=start.model), 2).model
    for name, value in expected.items():
        torch.testing.assert_close(got.model[name], value, rtol=1e-4, atol=1e-6)


def test_psi_stays_as_it_began_without_unlabelled_terms(tmp_path: Path) -> None:
    method = FedMatch(local=LOCAL, **OFF_LAMBDAS, **EXACT)
    federation = Federation(method, tmp_path)
    start = federation.start(2)
    end = federation.play(start, 2)
    assert same(end.psi, start.psi) and not same(end.sigma, start.sigma)
    initial = tensors_of(cnn())
    for name, value in start.sigma.items():
        assert torch.equal(value, initial[name]) and torch.equal(start.psi[name], 0.2 * value)
        assert torch.equal(start.model[name], start.sigma[name] + start.psi[name])


def test_helpers_come_and_are_used(tmp_path: Path) -> None:
    """They are chosen after the first round for the second where h_interval is 2, H of them, from models that the
    server puts together as the sites trained them."""
    federation = Federation(METHOD, tmp_path)
    state = federation.play(federation.start(4), 1)
    before = federation.start(4)
    asked = [(q.function, q.round) for q in federation.asked]
    assert asked == [("local_update", 1)] * 3 + [("keep_helpers", 1)] * 3
    memory: Any = {name: host.memory.before(2, 0, None) for name, host in federation.hosts.items()}
    assert all(len(m["helpers"]) == 2 for m in memory.values())
    # with two others, the helpers of x are y and z; each psi is the one that its site sent
    psi_of: Any = {}
    for q in federation.asked:
        if q.function == "local_update":
            again = Federation(METHOD, tmp_path / "again")
            value: Any = wire.decode(again.hosts[q.site].handle(
                "local_update", 1, 0, wire.encode(
                    {"whole": {"sigma": before.sigma, "psi": before.psi}, "buffers": {}, "round": 0, "rounds": 4}
                ),
            ))  # fmt: skip
            psi_of[q.site] = dense(value["value"]["psi"], before.psi)
    got = memory["x"]["helpers"]
    assert any(same(got[0], psi_of[name]) and same(got[1], psi_of[other]) for name, other in ("yz", "zy"))
    with_helpers = federation.play(state, 4)
    rounds = [q.round for q in federation.asked if q.function == "keep_helpers"]
    assert rounds == [1] * 3 + [3] * 3
    without = run(dataclasses.replace(METHOD, helpers=0), tmp_path / "without", 4)
    assert encoded(with_helpers) != encoded(without)
    never = Federation(dataclasses.replace(METHOD, h_interval=10), tmp_path / "never")
    assert encoded(never.play(never.start(4), 4)) == encoded(without)


def test_a_round_asks_for_no_net_with_its_first_values(monkeypatch, tmp_path: Path) -> None:
    """Those may be a file of first weights, which a run needs once."""
    federation = Federation(METHOD, tmp_path)
    state, make = federation.start(4), federation.clients.make_net
    asked: list[bool] = []
    monkeypatch.setattr(
        federation.clients, "make_net", lambda name, initial: asked.append(initial) or make(name)
    )
    federation.play(state, 1)
    assert asked == [False]


def test_moments_of_psi_stay_at_the_site(tmp_path: Path) -> None:
    """Without a supervised loss they are the only ones that differ from zero."""
    ends = []
    for kept in ("persist", "reset"):
        local = dataclasses.replace(LOCAL, opt_state=kept)
        method = dataclasses.replace(METHOD, lambda_s=0.0, local=local)
        ends.append(run(method, tmp_path / kept, 2))
    assert same(ends[0].sigma, ends[1].sigma) and not same(ends[0].psi, ends[1].psi)


def test_hidden_labels_are_not_read(tmp_path: Path) -> None:
    federations = [Federation(METHOD, tmp_path / name) for name in "ab"]
    for host in federations[1].hosts.values():
        source: Any = host.source
        source.target[~source.known] = 1 - source.target[~source.known]
    one, other = (f.play(f.start(2), 2) for f in federations)
    assert encoded(one) == encoded(other)


def test_no_local_models_are_offered(tmp_path: Path) -> None:
    for method in (METHOD, PLUS):
        federation = Federation(method, tmp_path / type(method).__name__)
        federation.play(federation.start(2), 2)
        assert federation.clients.models is None


@pytest.mark.parametrize("net", [{}, {"norm": "batch"}])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_resumed(net: Any, optimizer: Any, tmp_path: Path) -> None:
    method = dataclasses.replace(METHOD, local=dataclasses.replace(LOCAL, optimizer=optimizer))
    whole = run(method, tmp_path / "whole", 3, net)
    assert all(bool(torch.isfinite(value).all()) for value in whole.model.values())
    for stop in (1, 2):
        assert encoded(run_with_a_stop(method, tmp_path / f"stopped{stop}", 3, stop, net)) == encoded(whole)


# ----------------------------------------------------------------------------------------------------------- FedMatch+


def test_plus_is_fedmatch_from_the_pre_trained_extractor(tmp_path: Path) -> None:
    federation = Federation(PLUS, tmp_path)
    state = federation.play(federation.start(4), 1)
    assert state.sigma == {} and state.heads
    initial = tensors_of(cnn())
    assert torch.equal(state.model["head.weight"], initial["head.weight"])
    pretrained = state.model
    state = federation.play(state, 2)
    assert state.heads == {} and state.rounds == 4
    held: Any = federation.hosts["x"].memory.before(3, 0, None)["held"]
    for name, value in pretrained.items():
        assert torch.equal(held["sigma"][name], value) and torch.equal(held["psi"][name], 0.2 * value)
    end = federation.play(state, 4)
    calls = [(q.function, q.round) for q in federation.asked if q.site == "x"]
    assert calls == [
        ("pretrain_update", 1), ("local_update", 2), ("keep_helpers", 2), ("local_update", 3), ("local_update", 4),
    ]  # fmt: skip
    assert MEMORY not in federation.hosts["x"].memory.before(5, 0, None)
    # the rest of the rounds alone, from there, with the same seeds
    plain = Federation(PLUS.match, tmp_path / "plain")
    begun = dataclasses.replace(PLUS.match.start(plain.clients.network(pretrained), plain.clients), rounds=3)
    for number in (2, 3, 4):
        plain.clients.begin(number)
        begun = plain.method.round(begun, plain.clients)
    assert same(begun.model, end.model) and same(begun.psi, end.psi)


@pytest.mark.parametrize("stop", [1, 2, 3])
def test_plus_resumed(stop: int, tmp_path: Path) -> None:
    whole = run(PLUS, tmp_path / "whole", 4)
    assert encoded(run_with_a_stop(PLUS, tmp_path / "stopped", 4, stop)) == encoded(whole)


def test_a_helper_is_the_sites_sigma_with_its_psi_in_evaluation_mode(monkeypatch, tmp_path: Path) -> None:
    federation = Federation(METHOD, tmp_path, {"norm": "batch"})
    state = federation.play(federation.start(4), 1)
    given, whole = list[Any](), FedMatch.L_u

    def spied(self: Any, sigma: Any, helpers: Any, *more: Any) -> Any:
        given.append([(helper.training, tensors_of(helper)) for helper in helpers])
        return whole(self, sigma, helpers, *more)

    monkeypatch.setattr(FedMatch, "L_u", spied)
    federation.play(state, 2)
    assert len(given) == 3 and not any(training for models in given for training, _ in models)
    for name in "xyz":
        kept: Any = federation.hosts[name].memory.before(3, 0, None)
        sigma, psis = kept["held"]["sigma"], kept["helpers"]
        assert any(
            all(
                torch.equal(model[n], sigma[n] + psi[n])
                for (_, model), psi in zip(models, psis, strict=True)
                for n in sigma
            )
            for models in given
        )


def test_the_server_compares_sites_with_the_statistics_that_they_sent(monkeypatch, tmp_path: Path) -> None:
    loaded = list[Any]()
    monkeypatch.setattr(fedmatch, "load", lambda net, values: loaded.append(values) or load(net, values))
    federation = Federation(METHOD, tmp_path, {"norm": "batch"})
    federation.play(federation.start(4), 1)
    moved = [name for name in loaded[0] if name.endswith("running_mean")]
    assert len(loaded) == 3 and moved and all(bool(values[name].any()) for values in loaded for name in moved)
