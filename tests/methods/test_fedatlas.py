"""FedAtlas: its equations against a literal version, limiting cases, what it sends, lost sites, resume."""

import dataclasses
import math
from typing import Any, cast

import pytest
import torch
from fakes import Server, same
from image_sites import SETUP_1, ImageSite, cnn
from image_sites import SPACE as FINDINGS
from torch import Tensor
from unet_sites import ANNOTATED, LOCAL, UNetSite, begin, play, resumed, server
from voxel_sites import SPACE, draw

from fedatlas.core.contract import sends_of
from fedatlas.core.errors import FederationError
from fedatlas.core.labels import LabelSpace
from fedatlas.learning.loop import Local
from fedatlas.losses import LossChoice
from fedatlas.methods.fedatlas import NO_CLASS_LOST, FedAtlas, L_taught, against_rest, counted
from fedatlas.methods.fedavg import FedAvg
from fedatlas.methods.fedopt import FedOpt
from fedatlas.transport.pipeline import PLAIN_ANSWER

OVERLAPPING = LabelSpace(SPACE.names[1:], exclusive=False)
OFF: dict[str, Any] = {"exclusion": False, "server_momentum": 0.0, "teach": 0.0}
EAGER: dict[str, Any] = {"teach": 1.0, "floor": 0.0, "full": 0.001, "every": 1}
"""Every class that is found at all teaches with its full weight, in every batch."""


def known_of(space: LabelSpace) -> Tensor:
    """Three samples: two annotate different classes, one annotates all."""
    known = torch.zeros(3, len(space), dtype=torch.bool)
    known[0, [1, 2]], known[1, 3], known[2] = True, True, True
    return known


def inputs(space: LabelSpace, level: str = "voxel") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    size = (3, 2) if level == "voxel" else ()
    C = len(space)
    z, z_t = 2 * draw(3, C, *size), 2 * draw(3, C, *size, seed=1)
    if space.exclusive:
        target = torch.tensor([[[0, 1], [2, 0], [1, 2]], [[3, 0], [0, 0], [3, 3]], [[1, 2], [3, 4], [5, 0]]])
    else:
        target = (draw(3, C, *size, seed=2) > 0).double()
    return z, z_t, target, known_of(space)


def literal(z: Tensor, z_t: Tensor, target: Tensor, known: Tensor, r: Tensor, space: LabelSpace) -> float:
    """The loss voxel by voxel, in plain numbers, as its docstring has it."""
    B, C = known.shape
    places = [()] if z.dim() == 2 else [(i, j) for i in range(z.shape[2]) for j in range(z.shape[3])]

    def probability(logits: Tensor, b: int, c: int, at: tuple[int, ...]) -> float:
        if not space.exclusive:
            return 1 / (1 + math.exp(-float(logits[(b, c, *at)])))
        B_k = [0, *(i for i in range(1, C) if not known[b, i])]
        e = {i: math.exp(float(logits[(b, i, *at)])) for i in B_k}
        return e[c] / sum(e.values())

    total, lacked = 0.0, 0
    for c in space.foreground:
        rows = [b for b in range(B) if not known[b, c]]
        if not rows:
            continue
        lacked += 1
        pairs = []
        for b in rows:
            for at in places:
                if space.exclusive and target[(b, *at)] > 0 and known[b, int(target[(b, *at)])]:
                    continue
                pairs.append((probability(z, b, c, at), probability(z_t, b, c, at)))
        term = -sum(q * math.log(p) + (1 - q) * math.log(1 - p) for p, q in pairs) / len(pairs)
        if places != [()]:
            overlap = sum(p * q for p, q in pairs)
            sizes = sum(p * p + q * q for p, q in pairs)
            term += 1 - (2 * overlap + 1) / (sizes + 1)
        total += float(r[c]) * term
    return total / lacked


@pytest.mark.parametrize(
    ("space", "level"), [(SPACE, "voxel"), (OVERLAPPING, "voxel"), (FINDINGS, "image")], ids=str
)
def test_what_is_taught_equals_the_literal_loss(space: LabelSpace, level: str) -> None:
    z, z_t, target, known = inputs(space, level)
    r = torch.tensor([0.3, 1.0, 0.5, 0.0, 0.7, 1.0][: len(space)], dtype=torch.float64)
    expected = literal(z, z_t, target, known, r, space)
    assert float(L_taught(z, z_t, target, known, r, space)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("space", [SPACE, OVERLAPPING], ids=["exclusive", "overlapping"])
def test_gradients_of_what_is_taught(space: LabelSpace) -> None:
    """They are those of finite differences; annotated logits, labelled voxels and classes without trust have none."""
    z, z_t, target, known = inputs(space)
    r = torch.ones(len(space), dtype=torch.float64)
    r[-1] = 0
    z.requires_grad_()
    assert torch.autograd.gradcheck(lambda z: L_taught(z, z_t, target, known, r, space), z)
    (gradient,) = torch.autograd.grad(L_taught(z, z_t, target, known, r, space), z)
    assert not gradient[2].any(), "it annotates everything"
    own = known.clone()
    if space.exclusive:
        own[:, 0] = False
        assert not gradient[0].permute(1, 2, 0)[target[0] > 0].any(), "its labelled voxels"
    else:
        assert not gradient[:, -1].any(), "a class without trust is no part of another's rest"
    assert not gradient[own].any() and gradient.any()


def test_teaching_is_least_where_the_models_agree() -> None:
    """Of the cross-entropy alone, which whole images have: where p = q its gradient is 0."""
    z, _, target, known = inputs(FINDINGS, "image")
    z.requires_grad_()
    r = torch.ones(len(FINDINGS), dtype=torch.float64)
    (gradient,) = torch.autograd.grad(L_taught(z, z.detach(), target, known, r, FINDINGS), z)
    assert gradient.abs().max() < 1e-15


def test_sure_models_have_finite_gradients() -> None:
    z = torch.tensor([[[200.0]], [[-200.0]], [[0.0]]])[None].requires_grad_()
    space = LabelSpace(("background", "a", "b"))
    known = torch.tensor([[False, False, True]])
    target = torch.zeros(1, 1, 1, dtype=torch.uint8)
    for z_t in (z.detach(), -z.detach()):
        loss = L_taught(z, z_t, target, known, torch.ones(3), space)
        (gradient,) = torch.autograd.grad(loss, z)
        assert loss.isfinite() and gradient.isfinite().all()


def test_one_class_that_is_lacked_is_a_coin_against_the_background() -> None:
    z, _, _, _ = inputs(SPACE)
    known = torch.ones(3, len(SPACE), dtype=torch.bool)
    known[:, 4] = False
    log_p, log_rest = against_rest(z, known, SPACE)
    assert log_p[:, 4].exp() == pytest.approx((z[:, 4] - z[:, 0]).sigmoid().numpy(), rel=1e-12)
    assert log_rest[:, 4].exp() == pytest.approx((z[:, 0] - z[:, 4]).sigmoid().numpy(), rel=1e-9)


@pytest.mark.parametrize("space", [SPACE, OVERLAPPING], ids=["exclusive", "overlapping"])
def test_counts_are_of_annotated_classes(space: LabelSpace) -> None:
    z, _, target, known = inputs(space)
    found = counted(z, target, known, space)
    hard = z.argmax(1)
    for c in range(len(space)):
        both = either = 0
        for b in range(3):
            if known[b, c] and c in space.foreground:
                p = (hard[b] == c if space.exclusive else z[b, c] > 0).flatten().tolist()
                y = (target[b] == c if space.exclusive else target[b, c] == 1).flatten().tolist()
                both += sum(i and j for i, j in zip(p, y, strict=True))
                either += sum(p) + sum(y)
        assert found[:, c].tolist() == [both, either]


def test_trust_is_the_clipped_dice_of_all_sites() -> None:
    method = FedAtlas(floor=0.2, full=0.7, local=LOCAL)
    overlap = [[0, 10, 0, 0, 5], [0, 5, 1, 0, 0]]
    size = [[0, 30, 0, 0, 10], [0, 30, 20, 0, 0]]
    # Dice: 30/60, 2/20, nobody annotates it, 10/10
    trust = method.trust(overlap, size, [0.0, 0.0, 0.9, 0.4, 0.0])
    assert trust == pytest.approx([0.0, 0.6, 0.0, 0.4, 1.0])
    assert method.trust(overlap, size, [])[3] == 0, "before anybody was asked"


# ------------------------------------------------------------------------------------------------- limiting cases


def test_all_parts_off_is_fedavg_bit_for_bit() -> None:
    off = play(FedAtlas(**OFF, local=LOCAL))
    assert same(off.model, play(FedAvg(weights="equal", local=LOCAL)).model)


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_without_teaching_it_is_fedopt_with_exclusion_bit_for_bit(precision: Any) -> None:
    local = dataclasses.replace(LOCAL, precision=precision)
    for options in (NO_CLASS_LOST, {"exclusion_ce": 2.0}):
        exclusion = LossChoice(name="marginal_dice_ce_exclusion", options=options)
        expected = play(FedOpt(loss=exclusion, momentum=0.6, local=local), rounds=3)
        own = LossChoice() if options is NO_CLASS_LOST else LossChoice(options=options)
        assert same(play(FedAtlas(teach=0.0, loss=own, local=local), rounds=3).model, expected.model)


def test_where_everything_is_annotated_everywhere_nothing_is_taught() -> None:
    full = {"a": {1, 2, 3}, "b": {1, 2, 3}}
    taught = play(FedAtlas(**EAGER, local=LOCAL), rounds=3, annotated=full)
    assert any(taught.trust)
    assert same(taught.model, play(FedAtlas(teach=0.0, local=LOCAL), rounds=3, annotated=full).model)


def test_a_class_that_is_not_known_well_teaches_nothing() -> None:
    """In the first round no class is, and none here after it."""
    strict = play(FedAtlas(teach=1.0, floor=0.999, full=1.0, every=1, local=LOCAL), rounds=3)
    assert not any(strict.trust)
    without = play(FedAtlas(teach=0.0, local=LOCAL), rounds=3)
    assert same(strict.model, without.model)
    assert not same(play(FedAtlas(**EAGER, local=LOCAL), rounds=3).model, without.model), "the others do"


def test_labels_of_other_classes_are_never_looked_at() -> None:
    """`known` alone decides: a target that holds a class which its site does not annotate changes nothing."""
    for space in (SPACE, OVERLAPPING):
        z, z_t, target, known = inputs(space)
        hidden = target.clone()
        if space.exclusive:
            own = known.clone()
            own[:, 0] = True
            hidden[~own.gather(1, target.flatten(1)).reshape(target.shape)] = 0
        else:
            hidden[~known] = 0
        r = torch.ones(len(space), dtype=torch.float64)
        assert torch.equal(
            L_taught(z, z_t, target, known, r, space), L_taught(z, z_t, hidden, known, r, space)
        )
        assert torch.equal(counted(z, target, known, space), counted(z, hidden, known, space))


# -------------------------------------------------------------------------------------------------- a federation


@pytest.mark.parametrize("gate", [True, False])
def test_resumed_it_ends_in_the_same_bits(gate: bool) -> None:
    method = FedAtlas(**EAGER, gate=gate, local=LOCAL)
    whole, again = play(method, rounds=3), resumed(method, rounds=3)
    assert same(whole.model, again.model) and whole.trust == again.trust


def test_a_lost_site_leaves_the_trust_of_its_classes() -> None:
    method = FedAtlas(**EAGER, local=LOCAL)
    at = server()
    state = method.round(begin(method, at, 3), at)
    at.silent = "a"  # the only one with class 1
    after = method.round(state, at)
    assert ANNOTATED["a"] == {1} and after.trust[1] == state.trust[1] > 0


def test_the_teacher_is_asked_in_every_nth_batch() -> None:
    """And not by a site that lacks nothing."""

    class Counting(UNetSite):
        asked = 0

        def network(self, model: Any = None, name: str = "main") -> Any:
            net = super().network(model, name)

            def count(module: Any, _: Any) -> None:
                Counting.asked += not module.training

            net.register_forward_pre_hook(count)
            return net

    def asked(annotated: set[int], every: int) -> int:
        Counting.asked = 0
        local = dataclasses.replace(LOCAL, steps=6)
        site = Counting("a", annotated, 2)
        model = {name: value.clone() for name, value in site.network().state_dict().items()}
        trust = [0.0, 1.0, 1.0, 0.0]
        method = FedAtlas(teach=1.0, every=every, local=local)
        method.local_update(cast(Any, site), model=model, trust=trust, round=1, rounds=3)
        return Counting.asked

    assert (asked({1}, 1), asked({1}, 2), asked({1}, 4)) == (6, 3, 1)
    assert asked({1, 2}, 1) == 0, "the class that it lacks teaches nothing"
    assert asked({1, 2, 3}, 1) == 0


def test_whole_images_are_taught() -> None:
    def trained(**options: Any) -> Any:
        sites = [ImageSite(name, own, 4 + i) for i, (name, own) in enumerate(SETUP_1.items())]
        at = cast(Any, Server(*sites))
        method = FedAtlas(**options, local=Local(optimizer="sgd", batch=4, steps=3, lr=0.1))
        state = dataclasses.replace(method.start(cnn(), at), rounds=3)
        for _ in range(3):
            state = method.round(state, at)
        return state

    eager = trained(**EAGER)
    assert any(eager.trust) and not same(eager.model, trained(teach=0.0).model)


@pytest.mark.parametrize(
    ("options", "counts"), [({"teach": 1}, True), ({"teach": 1, "gate": False}, False), ({}, False)]
)
def test_what_is_sent(options: dict[str, Any], counts: bool) -> None:
    """Without counts its answer is FedAvg's, which secure aggregation can sum."""
    method = FedAtlas(**options, local=LOCAL)
    at = server()
    at.method = method
    reply = at.call(method.local_update, model=begin(method, at, 2).model, trust=[], round=0, rounds=2)
    assert all(sorted(value) == sorted(method.sends) for _, value in reply)
    assert ("overlap" in method.sends) == counts
    assert (sends_of(method)["local_update"] == PLAIN_ANSWER) != counts


def test_a_floor_above_full_is_an_error() -> None:
    with pytest.raises(FederationError, match=r"floor is 0\.8 and full is 0\.7.*below"):
        FedAtlas(floor=0.8, local=LOCAL).check(SPACE)
