"""Federated MS-KD: its terms in numpy, who teaches where, limiting cases."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from fakes import same
from torch import Tensor
from unet_sites import LOCAL, SPACE, begin, play, resumed, server

from fedatlas import losses
from fedatlas.core.errors import FederationError
from fedatlas.core.labels import LabelSpace
from fedatlas.core.seeds import generator
from fedatlas.losses import LossChoice
from fedatlas.methods.fedavg import FedAvg
from fedatlas.methods.ms_kd import MSKD, L_features, L_logits, region
from fedatlas.methods.pseudo_labels import MethodChoice, PseudoLabels
from fedatlas.methods.shared.features import watched
from fedatlas.methods.shared.teachers import MEMORY, Maker, Teaching
from fedatlas.methods.ufps import UFPS

DICE_BCE = LossChoice(name="dice_bce")
SHORT = Teaching(rounds=1)
METHOD = MSKD(teachers=SHORT, local=LOCAL)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=generator("test", seed), dtype=torch.float64)


def softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max())
    return e / e.sum()


@pytest.mark.parametrize("T", [1.0, 2.0])
def test_the_logits_in_numpy(T: float) -> None:
    z, t, R = draw(2, 4, 3, 3), draw(2, 4, 3, 3, seed=1), draw(2, 3, 3, seed=2) > 0
    speaks = torch.tensor([True, False, True, True])
    terms = []
    for b, i, j in np.ndindex(2, 3, 3):
        if R[b, i, j]:
            p, q = (softmax(one[b, speaks, i, j].numpy() / T) for one in (t, z))
            terms.append(T**2 * (p * np.log(p / q)).sum())
    assert float(L_logits(z, t, speaks, R, T)) == pytest.approx(np.mean(terms))
    z.requires_grad_()
    (gradient,) = torch.autograd.grad(L_logits(z, t, speaks, R, T), z)
    moved = gradient.abs() > 0
    assert torch.equal(moved, (R[:, None] & speaks.reshape(1, -1, 1, 1)).expand_as(moved))
    assert L_logits(z, t, speaks, torch.zeros_like(R), T).item() == 0


def test_the_features_in_numpy() -> None:
    R = draw(2, 4, 4) > 0
    shapes = [(2, 3, 4, 4), (2, 5, 2, 2)]
    ours, theirs = ([draw(*shape, seed=i) for shape in shapes] for i in (1, 2))
    expected = []
    for a, b in zip(ours, theirs, strict=True):
        thin = R[:, :: 4 // a.shape[2], :: 4 // a.shape[2]]
        squares = [
            ((a - b)[n, :, i, j].numpy() ** 2).mean() for n, i, j in np.ndindex(*thin.shape) if thin[n, i, j]
        ]
        expected.append(np.mean(squares))
    assert float(L_features(ours, theirs, R)) == pytest.approx(np.mean(expected))
    assert float(L_features(ours, ours, R)) == 0


def test_the_region_of_a_teacher() -> None:
    masks = torch.eye(4, dtype=torch.bool)[torch.tensor([[0, 1, 2, 3]])].movedim(-1, 1)
    masks[0, :, 3] = False  # a voxel that nobody labels
    assert region(masks, torch.tensor([True, False, True, False])).tolist() == [[True, False, True, False]]


def taught_server() -> tuple[Any, Any]:
    """A server whose sites have all teachers, and the state after the first round."""
    at = server()
    return at, METHOD.round(begin(METHOD, at, 2), at)


def test_the_local_objective_written_out() -> None:
    at, state = taught_server()
    site = at.members["b"]
    assert sorted(site.memory["teachers"]) == ["a", "b"] and state.teachers == {}
    maker = Maker(site, SHORT, LOCAL, LossChoice())
    raw, net = site.batch(torch.tensor([0, 2])), site.network(state.model)
    lessons, masks = METHOD.lessons(maker, raw.image)
    pairs = [(lesson, region(masks, lesson.speaks)) for lesson in lessons]
    terms = METHOD.L(losses.make(METHOD.loss, SPACE), net, maker.complete(raw, masks), pairs)
    assert torch.equal(masks, maker.merged(raw.image).masks)
    with watched(net) as seen:
        z = net(raw.image)
    logits, features = [], []
    for name, own in (("a", {1}), ("b", {2, 3})):
        chosen = [0, *sorted(own)]
        with torch.no_grad(), watched(maker.net(name)) as told:
            z_t = maker.net(name)(raw.image)
        R = masks[:, 0] | torch.stack([masks[:, c] for c in own]).any(0)
        # the teacher's loss is marginal: its background is all but its own classes
        p_own = z_t.softmax(1)[:, sorted(own)]
        p_t, log_p = torch.cat([1 - p_own.sum(1, True), p_own], 1), z[:, chosen].log_softmax(1)
        kl = (p_t * (p_t.log() - log_p)).sum(1)
        logits.append(kl[R].mean())
        each = []
        for a, b in zip(seen.levels, told.levels, strict=True):
            by = 16 // a.shape[2]
            each.append((a - b).square().mean(1)[R[:, ::by, ::by]].mean())
        features.append(torch.stack(each).mean())
    torch.testing.assert_close(terms["logits"], torch.stack(logits).sum())
    torch.testing.assert_close(terms["features"], torch.stack(features).sum())
    plain = losses.supervised(METHOD.loss, site)(net, maker(raw))
    torch.testing.assert_close(terms["supervised"], plain)


def test_weights_of_zero_are_fedavg_on_pseudo_labels() -> None:
    """E18, bit for bit."""
    star = play(PseudoLabels(inner=MethodChoice("fedavg"), teachers=SHORT, local=LOCAL))
    off = dataclasses.replace(METHOD, lambda_logits=0.0, lambda_features=0.0)
    assert same(play(off).model, star.model)
    for one in ("lambda_logits", "lambda_features"):
        assert not same(play(dataclasses.replace(off, **{one: 1.0})).model, star.model)


def test_one_site_has_no_teachers() -> None:
    alone = {"a": {1, 2, 3}}
    assert same(play(METHOD, annotated=alone).model, play(FedAvg(local=LOCAL), annotated=alone).model)


def test_one_resident_teacher_is_all_of_them() -> None:
    every = dataclasses.replace(METHOD, teachers=Teaching(rounds=1, resident="all"))
    assert same(play(METHOD).model, play(every).model)


def test_resumed() -> None:
    assert same(play(METHOD).model, resumed(METHOD, rounds=2).model)


@pytest.mark.parametrize("method", [MSKD, PseudoLabels, lambda **how: UFPS(loss=DICE_BCE, **how)])
def test_what_is_other_for_teachers_is_checked_against_the_rounds(method: Any) -> None:
    """And not against the default, which has no restarts and a lower learning rate."""
    local = dataclasses.replace(LOCAL, schedule="restarts", restart=3)
    method(local=local, teachers=Teaching(local={"restart": 5, "lr_min": 0.005})).check(SPACE)
    with pytest.raises(FederationError, match="lr_min is 0.02 and lr is 0.01"):
        method(local=local, teachers=Teaching(local={"lr_min": 0.02})).check(SPACE)


def test_a_site_without_classes_teaches_nobody() -> None:
    """Its net was trained for findings of the whole image at most, and its head for voxels never."""
    at = server({"a": {1}, "b": {2}, "c": set()})
    state = METHOD.round(begin(METHOD, at, 2), at)
    assert state.teachers == {}
    for name, site in at.members.items():
        assert list(site.memory[MEMORY]) == ["a", "b"], name
        assert list(Maker(site, SHORT, LOCAL, METHOD.loss).models) == ["a", "b"]  # type: ignore[arg-type]


def test_labels_that_do_not_fit_are_refused() -> None:
    overlapping = dataclasses.replace(METHOD, teachers=Teaching(exclusive=False))
    with pytest.raises(FederationError, match="auto takes one class per voxel"):
        overlapping.check(SPACE)
    dataclasses.replace(overlapping, loss=LossChoice(name="dice_bce")).check(SPACE)
    with pytest.raises(FederationError, match="method ms_kd: pseudo labels need exclusive classes"):
        METHOD.check(LabelSpace(("lung", "heart"), exclusive=False))
    METHOD.check(SPACE)
