"""MOON: its loss in numpy, the local objective written out, limiting cases."""

import dataclasses
import math
from typing import Any, cast

import numpy as np
import pytest
import torch
from fakes import Server, same
from image_sites import cnn
from torch import Tensor, nn
from unet_sites import LOCAL, UNetSite, play, resumed, server, unet

from fedatlas import losses
from fedatlas.core.seeds import generator
from fedatlas.losses import LossChoice
from fedatlas.methods.fedavg import FedAvg
from fedatlas.methods.moon import MEMORY, MOON, l_con


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / np.sqrt((a @ a) * (b @ b)))


def test_the_contrastive_loss_in_numpy() -> None:
    z, g, p = (torch.randn(3, 5, generator=generator("test", i), dtype=torch.float64) for i in range(3))
    expected = []
    for row in range(3):
        near, far = (math.exp(cosine(z[row].numpy(), o[row].numpy()) / 0.5) for o in (g, p))
        expected.append(-math.log(near / (near + far)))
    assert float(l_con(z, g, p, 0.5)) == pytest.approx(np.mean(expected))
    assert float(l_con(z, g, g, 0.5)) == pytest.approx(math.log(2))
    assert float(l_con(z, z, -z, 0.1)) == pytest.approx(math.log1p(math.exp(-20)))


def mean_of_bottleneck(net: nn.Module, x: Tensor) -> Tensor:
    for down in cast(Any, net).downs:
        x = down(x)
    return x.mean((2, 3))


def test_the_local_objective_written_out() -> None:
    site = UNetSite("b", {2, 3}, 3)
    batch = site.batch(torch.tensor([0, 2]))
    net, w_glob, w_prev = (unet() for _ in range(3))
    for number, one in enumerate((net, w_glob, w_prev)):
        with torch.no_grad():
            for parameter in one.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator("move", number)))
    l_sup = losses.supervised(LossChoice(), site)  # type: ignore[arg-type]
    terms = cast(dict[str, Tensor], MOON(mu=2.0).l(l_sup, w_glob, w_prev)(net, batch))
    contrast = 2.0 * l_con(*(mean_of_bottleneck(one, batch.image) for one in (net, w_glob, w_prev)), 0.5)
    torch.testing.assert_close(terms["contrast"], contrast)
    torch.testing.assert_close(terms["supervised"], l_sup(net, batch))
    ours = torch.autograd.grad(torch.stack(list(terms.values())).sum(), list(net.parameters()))
    other = torch.autograd.grad(contrast + l_sup(net, batch), list(net.parameters()))
    for a, b in zip(ours, other, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)


def test_mu_of_zero_and_the_first_round_are_fedavg() -> None:
    """E18, bit for bit."""
    plain = play(FedAvg(local=LOCAL))
    assert same(play(MOON(mu=0.0, local=LOCAL)).model, plain.model)
    assert not same(play(MOON(local=LOCAL)).model, plain.model)
    first = play(FedAvg(local=LOCAL), rounds=1).model
    assert same(play(MOON(local=LOCAL), rounds=1).model, first)
    assert not same(play(MOON(first="redrawn", local=LOCAL), rounds=1).model, first)


def test_the_site_keeps_what_it_sent() -> None:
    at, method = server(), MOON(local=LOCAL)
    state = dataclasses.replace(method.start(unet(), cast(Any, at)), rounds=2)
    replies = at.call(method.local_update, model=state.model, round=0, rounds=2)
    for name, reply in replies:
        assert same(at.members[name].memory[MEMORY], reply["model"]) and sorted(reply) == ["model", "n"]


def test_resumed() -> None:
    for first in ("none", "redrawn"):
        method = MOON(first=first, local=LOCAL)
        assert same(play(method, rounds=3).model, resumed(method, rounds=3).model)


def test_labels_of_whole_images() -> None:
    from image_sites import ImageSite

    def run(method: Any) -> Any:
        at = Server(ImageSite("1", {0, 1}, 6), ImageSite("2", {2, 3}, 5))
        state = dataclasses.replace(method.start(cnn(), cast(Any, at)), rounds=2)
        for _ in range(2):
            state = method.round(state, at)
        return state.model

    assert not same(run(MOON(local=LOCAL)), run(FedAvg(local=LOCAL)))
    assert same(run(MOON(mu=0.0, local=LOCAL)), run(FedAvg(local=LOCAL)))
