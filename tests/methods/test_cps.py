"""Federated CPS: its loss in numpy, what each net learns, limiting cases."""

import dataclasses
from typing import Any, cast

import numpy as np
import pytest
import torch
from fakes import same
from torch import Tensor
from unet_sites import LOCAL, UNetSite, play, resumed, server, unet

from fedatlas import losses
from fedatlas.core.seeds import generator
from fedatlas.core.tensors import load, tensors_of
from fedatlas.losses import LossChoice
from fedatlas.methods.cps import CPS, taught_by
from fedatlas.methods.fedavg import FedAvg
from fedatlas.methods.shared.redrawn import redrawn


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=generator("test", seed), dtype=torch.float64)


def test_cross_supervision_in_numpy() -> None:
    z, other = draw(2, 3, 4, 5), draw(2, 3, 4, 5, seed=1)
    terms = []
    for b, i, j in np.ndindex(2, 4, 5):
        logits = z[b, :, i, j].numpy()
        best = int(other[b, :, i, j].argmax())
        terms.append(np.log(np.exp(logits).sum()) - logits[best])
    assert float(taught_by(z, other, exclusive=True)) == pytest.approx(np.mean(terms))
    p, wanted = 1 / (1 + np.exp(-z.numpy())), other.numpy() > 0
    expected = -np.where(wanted, np.log(p), np.log(1 - p)).mean()
    assert float(taught_by(z, other, exclusive=False)) == pytest.approx(expected)


def test_the_local_objective_written_out() -> None:
    site = UNetSite("b", {2, 3}, 3)
    batch, first, second = site.batch(torch.tensor([0, 2])), unet(), unet()
    load(second, redrawn(first, generator("second")))
    z_1, z_2 = first(batch.image), second(batch.image)
    terms = CPS(w=1.5).L(losses.for_site(LossChoice(), site), z_1, z_2, batch, exclusive=True)
    L_seg = losses.supervised(LossChoice(), site)
    CE = torch.nn.CrossEntropyLoss()
    torch.testing.assert_close(terms["first"], L_seg(first, batch))
    torch.testing.assert_close(terms["second"], L_seg(second, batch))
    torch.testing.assert_close(terms["cross"], 1.5 * (CE(z_1, z_2.argmax(1)) + CE(z_2, z_1.argmax(1))))
    # each net is moved by its own two terms alone
    whole = torch.autograd.grad(torch.stack(list(terms.values())).sum(), list(second.parameters()))
    own = L_seg(second, batch) + 1.5 * CE(second(batch.image), z_1.detach().argmax(1))
    for a, b in zip(whole, torch.autograd.grad(own, list(second.parameters())), strict=True):
        torch.testing.assert_close(a, b)


def test_the_second_net_is_another_draw() -> None:
    net = unet(norm="batch")
    other, own = redrawn(net, generator("a")), tensors_of(net)
    assert list(other) == list(own)
    for name, value in own.items():
        assert torch.equal(other[name].flatten().sort().values, value.flatten().sort().values)
        assert torch.equal(other[name], value) == (value.unique().numel() == 1)
    state = CPS().start(net, cast(Any, server()))
    assert not same(state.model, state.second)
    assert same(state.second, CPS().start(net, cast(Any, server())).second)


@pytest.mark.parametrize("clip", [None, 0.05])
def test_without_cross_supervision_the_first_net_is_that_of_fedavg(clip: float | None) -> None:
    """E18, bit for bit; the second net is one that began elsewhere."""
    local = dataclasses.replace(LOCAL, clip=clip)
    method = CPS(w=0.0, local=local)
    state, plain = play(method), play(FedAvg(local=local))
    assert same(state.model, plain.model) and not same(state.second, plain.model)
    crossed = play(CPS(local=local))
    assert not same(crossed.model, plain.model)
    assert [member.model for member in method.eval_members(state, "a")] == [state.model]


def test_resumed() -> None:
    method = CPS(local=LOCAL)
    whole, kept = play(method), resumed(method, rounds=2)
    assert same(whole.model, kept.model) and same(whole.second, kept.second)
