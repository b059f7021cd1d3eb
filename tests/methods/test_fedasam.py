"""FedASAM: limiting cases, a literal local loop, the running mean of FedSAM's code."""

import dataclasses
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from fakes import same
from unet_sites import LOCAL, UNetSite, play, resumed, server, unet

from fedatlas import losses
from fedatlas.core.tensors import average, tensors_of
from fedatlas.learning.loop import Local
from fedatlas.losses import LossChoice
from fedatlas.methods.fedasam import SWA, FedASAM, slowed
from fedatlas.methods.fedavg import FedAvg
from fedatlas.methods.shared.sharpness import Sharpness

VECTORS = Path(__file__).parents[1] / "vectors"
NEVER = SWA(start=1.0)


def test_a_radius_of_zero_is_fedavg() -> None:
    """E14, bit for bit."""
    got = play(FedASAM(sharpness=Sharpness(rho=0.0), swa=NEVER, local=LOCAL))
    assert same(got.model, play(FedAvg(local=LOCAL)).model)
    assert not same(got.model, play(FedASAM(swa=NEVER, local=LOCAL)).model)


def test_without_the_mean_it_is_asam_and_fedavg() -> None:
    """E17, against a loop written out; what is evaluated is the plain model."""
    local = Local(
        optimizer="sgd", lr=0.05, momentum=0.0, weight_decay=0.0, batch=2, steps=2, schedule="constant"
    )
    method = FedASAM(swa=NEVER, local=local)
    state = play(method)
    assert state.swa == {} and method.eval_members(state, "a")[0].model is state.model
    at = server()
    model = tensors_of(at.members["a"].network())
    for round in range(2):
        ends, counts = [], []
        for site in at.members.values():
            site.round, net = round, site.network(model)
            loss = losses.supervised(LossChoice(), site)  # type: ignore[arg-type]
            for batch in site.batches(batch=2, steps=2):
                named = dict(net.named_parameters())
                gradients = torch.autograd.grad(loss(net, batch), list(named.values()))
                T = [
                    p.detach().abs() + 0.001 if "weight" in n else torch.ones_like(p)
                    for n, p in named.items()
                ]
                length = (
                    torch.stack([(t * g).square().sum() for t, g in zip(T, gradients, strict=True)])
                    .sum()
                    .sqrt()
                )
                before = [p.detach().clone() for p in named.values()]
                with torch.no_grad():
                    for p, t, g in zip(named.values(), T, gradients, strict=True):
                        p += 0.7 * t * t * g / (length + 1e-8)
                gradients = torch.autograd.grad(loss(net, batch), list(named.values()))
                with torch.no_grad():
                    for p, w, g in zip(named.values(), before, gradients, strict=True):
                        p.copy_(w - 0.05 * g)
            ends.append(tensors_of(net))
            counts.append(site.n_train)
        model = average(ends, counts)
    for name, value in model.items():
        torch.testing.assert_close(state.model[name], value, atol=1e-5, rtol=1e-4)


def test_the_mean_is_that_of_the_published_code() -> None:
    with np.load(VECTORS / "fedsam_swa.npz") as file:
        models, expected = file["server_models"], file["swa_models"]
    method, average = FedASAM(swa=SWA(start=0.0, cycle=2)), {}
    for round, (model, after) in enumerate(zip(models, expected, strict=True)):
        average = method.averaged(average, {"w": torch.from_numpy(model)}, round, len(models))
        np.testing.assert_allclose(average["w"], after, atol=1e-6)


def test_the_mean_is_evaluated_and_trains_nobody() -> None:
    plain = play(FedASAM(swa=NEVER, local=LOCAL), rounds=4)
    method = FedASAM(swa=SWA(start=0.25, cycle=1), local=LOCAL)
    state = play(method, rounds=4)
    assert same(state.model, plain.model)
    (member,) = method.eval_members(state, "a")
    assert member.model is state.swa and not same(member.model, state.model)
    # the model of round 3 replaces that of round 2, with which the mean began
    method = FedASAM(swa=SWA(start=0.5, cycle=1), local=LOCAL)
    assert method.start_of_mean(4) == 2 and same(play(method, rounds=4).swa, plain.model)


def test_the_learning_rate_is_lowest_where_a_model_enters() -> None:
    method = FedASAM(swa=SWA(start=0.5, cycle=4, low=0.2))
    factors = [method.lr_factor(round, 20) for round in range(20)]
    assert factors[:11] == [1.0] * 11
    assert factors[11:19] == pytest.approx([0.8, 0.6, 0.4, 0.2] * 2)
    rates = slowed(dataclasses.replace(LOCAL, lr=0.1, lr_min=0.05), 0.2)
    assert (rates.lr, rates.lr_min, rates.warmup_from) == pytest.approx((0.02, 0.01, None))
    once = dataclasses.replace(method, swa=SWA(start=0.5, cycle=1, low=0.2))
    assert {once.lr_factor(round, 20) for round in range(20)} == {1.0}


def test_a_share_of_rounds_is_not_rounded_past_the_round_that_is_meant() -> None:
    """.55 of 100 is 55.000000000000007 in floating point."""
    for rounds, start, first in ((100, 0.55, 55), (200, 0.55, 110), (50, 0.56, 28), (10, 0.75, 8)):
        assert FedASAM(swa=SWA(start=start)).start_of_mean(rounds) == first


def test_rounds_before_the_start_are_those_of_fedavg() -> None:
    late = play(FedASAM(asam_start=1, swa=NEVER, local=LOCAL), rounds=2)
    assert same(play(FedASAM(asam_start=2, swa=NEVER, local=LOCAL)).model, play(FedAvg(local=LOCAL)).model)
    assert not same(late.model, play(FedAvg(local=LOCAL)).model)
    assert not same(late.model, play(FedASAM(swa=NEVER, local=LOCAL)).model)


def test_resumed_before_and_after_each_start() -> None:
    method = FedASAM(asam_start=1, swa=SWA(start=0.5, cycle=1), local=LOCAL)
    whole, kept = play(method, rounds=4), resumed(method, rounds=4)
    assert same(whole.model, kept.model) and same(whole.swa, kept.swa) and whole.swa


def test_a_half_that_has_no_round_is_told() -> None:
    assert FedASAM().plan(4) == []
    (told,) = FedASAM().plan(3)
    assert told.startswith("fedasam: swa.start is 0.75, with which the mean begins in none of 3 rounds")
    (told,) = FedASAM(asam_start=4).plan(4)
    assert told.startswith("fedasam: asam_start is 4, counted from 0, and the federation has 4 rounds")


def test_a_slowed_warm_up_begins_lower_too() -> None:
    rates = slowed(dataclasses.replace(LOCAL, lr=0.1, warmup=2, warmup_from=0.05), 0.2)
    assert (rates.lr, rates.warmup_from) == pytest.approx((0.02, 0.01))


def test_a_site_trains_at_the_rate_of_its_place_in_the_cycle() -> None:
    cycled = FedASAM(swa=SWA(start=0.25, cycle=2, low=0.2), local=LOCAL)
    for round, factor in ((1, 1.0), (2, 0.6), (3, 0.2)):
        by_hand = FedASAM(swa=SWA(start=1.0), local=slowed(LOCAL, factor))
        ends = [
            method.local_update(cast(Any, UNetSite("a", {1}, 3)), tensors_of(unet()), round, 4)["model"]
            for method in (cycled, by_hand)
        ]
        assert same(*ends), round
