"""MiB: the published loss, what it leaves alone, and its limits."""

import dataclasses
from typing import Any

import pytest
import torch
from fakes import same
from test_local_updates import LOCAL, federation, play, small_unet
from torch import Tensor, nn

from fedatlas.core.labels import LabelSpace
from fedatlas.core.seeds import generator
from fedatlas.methods.fedavg import FedAvg
from fedatlas.methods.fedavgm import FedAvgM
from fedatlas.methods.mib import MiB, l_kd

SPACE = LabelSpace(("background", "a", "b", "new"))
MASKS = LabelSpace(("a", "b", "c", "new"), exclusive=False)


def drawn(seed: str = "z", *shape: int) -> Tensor:
    return torch.randn(*(shape or (2, 4, 3, 3)), generator=generator(seed))


def known(*rows: list[int]) -> Tensor:
    return torch.tensor(rows, dtype=torch.bool)


ONLY_NEW = known([1, 0, 0, 1], [1, 0, 0, 1])


def old_net(old: tuple[int, ...] = (1, 2)) -> nn.Module:
    net = small_unet()
    net.old = old  # type: ignore[assignment]
    return net


def test_the_loss_is_that_of_the_paper() -> None:
    """Eq. (8) and (9), literally, where a sample annotates the new class alone and no voxel has it."""
    z, z_old, target = drawn("z"), drawn("old"), torch.zeros(2, 3, 3, dtype=torch.long)
    q_old = z_old[:, :3].softmax(1)
    q = z.softmax(1)
    merged = torch.stack([q[:, 0] + q[:, 3], q[:, 1], q[:, 2]], 1)
    expected = -(q_old * merged.log()).sum(1).mean()
    assert torch.allclose(l_kd(z, z_old, target, ONLY_NEW, (1, 2), SPACE), expected, atol=1e-6)


def test_labels_count_more_than_the_older_model() -> None:
    z, z_old = drawn("z"), drawn("old")
    target = torch.zeros(2, 3, 3, dtype=torch.long)
    target[0, 0, 0] = 3
    before = l_kd(z, z_old, target, ONLY_NEW, (1, 2), SPACE)
    z_old[0, :, 0, 0] = torch.tensor([0.0, 50.0, 0.0, 0.0])
    assert l_kd(z, z_old, target, ONLY_NEW, (1, 2), SPACE) == before
    assert l_kd(z, z_old, torch.zeros_like(target), ONLY_NEW, (1, 2), SPACE) != before


def test_the_older_model_is_not_asked_for_what_it_does_not_know() -> None:
    z, z_old, target = drawn("z"), drawn("old"), torch.zeros(2, 3, 3, dtype=torch.long)
    before = l_kd(z, z_old, target, ONLY_NEW, (1, 2), SPACE)
    z_old[:, 3] += 7
    assert l_kd(z, z_old, target, ONLY_NEW, (1, 2), SPACE) == before


@pytest.mark.parametrize("space", [SPACE, MASKS], ids=["exclusive", "overlapping"])
def test_what_a_sample_annotates_is_not_distilled(space: LabelSpace) -> None:
    z = drawn("z").requires_grad_()
    target = torch.zeros(2, 3, 3, dtype=torch.long) if space.exclusive else torch.zeros(2, 4, 3, 3)
    row = [1, 1, 1, 0] if space.exclusive else [0, 1, 1, 0]
    value = l_kd(z, drawn("old"), target, known(row, row), (1, 2), space)
    value.backward()
    assert value == 0 and z.grad is not None and not z.grad.any()


def test_each_sample_has_a_label_set_of_its_own() -> None:
    """The loss of a mixed batch is the mean over its samples that are taught."""
    z, z_old, target = drawn("z"), drawn("old"), torch.zeros(2, 3, 3, dtype=torch.long)
    rows = known([1, 1, 0, 0], [1, 0, 0, 1])
    alone = [l_kd(z[i : i + 1], z_old[i : i + 1], target[:1], rows[i : i + 1], (1, 2), SPACE) for i in (0, 1)]
    assert torch.allclose(l_kd(z, z_old, target, rows, (1, 2), SPACE), torch.stack(alone).mean())
    full = known([1, 1, 1, 0], [1, 0, 0, 1])
    assert torch.allclose(l_kd(z, z_old, target, full, (1, 2), SPACE), alone[1])


@pytest.mark.parametrize("shape", [(2, 4, 3, 3), (2, 4)], ids=["voxels", "images"])
def test_overlapping_classes_are_taught_one_by_one(shape: tuple[int, ...]) -> None:
    z, z_old, target = drawn("z", *shape), drawn("old", *shape), torch.zeros(shape)
    p, q = z[:, 1].sigmoid(), z_old[:, 1].sigmoid()
    expected = -(q * p.log() + (1 - q) * (1 - p).log()).mean()
    rows = known([1, 0, 1, 1], [1, 0, 1, 1])
    assert torch.allclose(l_kd(z, z_old, target, rows, (0, 1), MASKS), expected, atol=1e-6)


def test_an_equal_model_is_a_minimum() -> None:
    z, target = drawn("z").requires_grad_(), torch.zeros(2, 3, 3, dtype=torch.long)
    z_old = z.detach().clone()
    z.data[:, 3] = -30  # nothing is new yet
    l_kd(z, z_old, target, ONLY_NEW, (1, 2), SPACE).backward()
    assert z.grad is not None and z.grad.abs().max() < 1e-6


@pytest.mark.parametrize("how", [{"lambda_kd": 0.0}, {}], ids=["no distillation", "no old class"])
def test_without_an_older_model_and_momentum_it_is_fedavg(how: dict[str, Any]) -> None:
    """Bit for bit."""
    expected = play(FedAvg(local=LOCAL), federation()).model
    net = old_net() if how else small_unet()
    state = play(MiB(local=LOCAL, server_momentum=0.0, **how), federation(), net=net)
    assert same(state.model, expected) and not state.teacher


def test_with_momentum_alone_it_is_fedavgm() -> None:
    """Bit for bit."""
    expected = play(FedAvgM(local=LOCAL, beta=0.6), federation()).model
    assert same(play(MiB(local=LOCAL, lambda_kd=0.0), federation(), net=old_net()).model, expected)


def test_the_older_model_stays_that_of_the_start() -> None:
    method, net = MiB(local=LOCAL), old_net()
    start = method.start(net, federation())  # type: ignore[arg-type]
    state = play(method, federation(), net=net)
    assert same(state.teacher, start.teacher) and state.old == (1, 2)
    assert not same(state.model, play(FedAvg(local=LOCAL), federation()).model)
    assert same(start.model, start.teacher)


def test_it_says_what_the_older_model_costs() -> None:
    assert "nothing is distilled" in MiB().examine(small_unet(), ["x"])[0]
    assert "beside that of every round" in MiB().examine(old_net(), ["x"])[0]
    assert not dataclasses.replace(MiB(), lambda_kd=0.0).examine(old_net(), ["x"])


def test_in_every_round_the_older_model_teaches() -> None:
    """And not the one that came of it."""
    at, told = federation(), list[Any]()
    call = at.call
    at.call = lambda function, **payload: told.append(payload["teacher"]) or call(function, **payload)  # type: ignore[method-assign]
    state = play(MiB(local=LOCAL), at, net=old_net())
    assert len(told) > 1 and all(same(teacher, state.teacher) for teacher in told)
    assert not same(state.model, state.teacher)
