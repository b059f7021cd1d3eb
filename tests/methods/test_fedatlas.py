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
from unet_sites import LOCAL, UNetSite, play, resumed, unet
from voxel_sites import SPACE, draw

from fedatlas.core.contract import sends_of
from fedatlas.core.errors import FederationError
from fedatlas.core.labels import LabelSpace
from fedatlas.core.tensors import tensors_of
from fedatlas.learning.loop import Local
from fedatlas.losses import LossChoice, make
from fedatlas.losses.marginal import MarginalDiceCE, MarginalDiceCEExclusion, marginal_ce, merge
from fedatlas.methods import fedatlas
from fedatlas.methods.fedatlas import NO_CLASS_LOST, FedAtlas, L_taught
from fedatlas.methods.fedavg import FedAvg
from fedatlas.methods.fedopt import FedOpt
from fedatlas.methods.pseudo_labels import MethodChoice, PseudoLabels
from fedatlas.transport.pipeline import PLAIN_ANSWER

OVERLAPPING = LabelSpace(SPACE.names[1:], exclusive=False)
OFF: dict[str, Any] = {"exclusion": False, "server_momentum": 0.0, "teach": 0.0}
EAGER: dict[str, Any] = {"teach": 1.0, "every": 1}


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


def literal(z: Tensor, z_t: Tensor, target: Tensor, known: Tensor, space: LabelSpace) -> float:
    """The loss voxel by voxel, in plain numbers, as its docstring has it."""
    B, C = known.shape
    places = [()] if z.dim() == 2 else [(i, j) for i in range(z.shape[2]) for j in range(z.shape[3])]
    terms = []
    for b in range(B):
        for at in places:
            of, of_t = ([float(one[(b, c, *at)]) for c in range(C)] for one in (z, z_t))
            if space.exclusive:
                free = [0, *(c for c in range(1, C) if not known[b, c])]
                if target[(b, *at)] > 0 and known[b, int(target[(b, *at)])]:
                    terms.append(0.0)
                    continue
                all_p, all_q = (sum(math.exp(one[c]) for c in free) for one in (of, of_t))
                terms.append(
                    -sum(math.exp(of_t[c]) / all_q * math.log(math.exp(of[c]) / all_p) for c in free)
                )
            else:
                for c in range(C):
                    if not known[b, c]:
                        p, q = 1 / (1 + math.exp(-of[c])), 1 / (1 + math.exp(-of_t[c]))
                        terms.append(-(q * math.log(p) + (1 - q) * math.log(1 - p)))
    return sum(terms) / len(terms)


@pytest.mark.parametrize(
    ("space", "level"), [(SPACE, "voxel"), (OVERLAPPING, "voxel"), (FINDINGS, "image")], ids=str
)
def test_what_is_taught_equals_the_literal_loss(space: LabelSpace, level: str) -> None:
    z, z_t, target, known = inputs(space, level)
    expected = literal(z, z_t, target, known, space)
    assert float(L_taught(z, z_t, target, known, space)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("space", [SPACE, OVERLAPPING], ids=["exclusive", "overlapping"])
def test_gradients_of_what_is_taught(space: LabelSpace) -> None:
    """They are those of finite differences; annotated classes and labelled voxels have none."""
    z, z_t, target, known = inputs(space)
    z.requires_grad_()
    assert torch.autograd.gradcheck(lambda z: L_taught(z, z_t, target, known, space), z)
    (gradient,) = torch.autograd.grad(L_taught(z, z_t, target, known, space), z)
    assert not gradient[2].any(), "it annotates everything"
    own = known.clone()
    if space.exclusive:
        own[:, 0] = False
        assert not gradient[0].permute(1, 2, 0)[target[0] > 0].any(), "its labelled voxels"
    assert not gradient[own].any() and gradient.any()


@pytest.mark.parametrize(
    ("space", "level"), [(SPACE, "voxel"), (OVERLAPPING, "voxel"), (FINDINGS, "image")], ids=str
)
def test_models_that_agree_teach_nothing(space: LabelSpace, level: str) -> None:
    z, _, target, known = inputs(space, level)
    z.requires_grad_()
    (gradient,) = torch.autograd.grad(L_taught(z, z.detach(), target, known, space), z)
    assert gradient.abs().max() < 1e-15


def test_with_the_marginal_cross_entropy_it_is_expectation_maximisation() -> None:
    """Their sum is the cross-entropy with expected labels: the sample's own where it has one, else the teacher's of the classes that
    are left. At the teacher its gradient is that of the marginal cross-entropy, so that what climbs one climbs the other."""
    z, z_t, target, known = inputs(SPACE)
    known = known.clone()
    known[:, 0] = True
    expected = torch.zeros_like(z)
    for b, own in enumerate(known):
        for at in [(i, j) for i in range(3) for j in range(2)]:
            c = int(target[(b, *at)])
            if c > 0 and own[c]:
                expected[(b, c, *at)] = 1
            else:
                free = [0, *(i for i in range(1, len(SPACE)) if not own[i])]
                expected[b, free, at[0], at[1]] = z_t[b, free, at[0], at[1]].softmax(0)
    complete = -(expected * z.log_softmax(1)).sum(1).mean()
    parts = marginal_ce(merge(z, target, known)) + L_taught(z, z_t, target, known, SPACE)
    assert float(parts) == pytest.approx(float(complete), rel=1e-12)

    z_t.requires_grad_()
    both = marginal_ce(merge(z_t, target, known)) + L_taught(z_t, z_t.detach(), target, known, SPACE)
    (one,) = torch.autograd.grad(marginal_ce(merge(z_t, target, known)), z_t, retain_graph=True)
    (other,) = torch.autograd.grad(both, z_t)
    assert torch.allclose(one, other, rtol=0, atol=1e-15) and one.any()


def test_sure_models_have_finite_gradients() -> None:
    z = torch.tensor([[[200.0]], [[-200.0]], [[0.0]]])[None].requires_grad_()
    space = LabelSpace(("background", "a", "b"))
    known = torch.tensor([[False, False, True]])
    target = torch.zeros(1, 1, 1, dtype=torch.uint8)
    for z_t in (z.detach(), -z.detach()):
        loss = L_taught(z, z_t, target, known, space)
        (gradient,) = torch.autograd.grad(loss, z)
        assert loss.isfinite() and gradient.isfinite().all()


# ------------------------------------------------------------------------------------------------- limiting cases


def test_all_parts_off_is_fedavg_bit_for_bit() -> None:
    off = play(FedAtlas(**OFF, local=LOCAL))
    assert same(off.model, play(FedAvg(weights="equal", local=LOCAL)).model)


def test_the_default_loss_to_its_last_option() -> None:
    """What NO_CLASS_LOST leaves out is as the loss with exclusion has it."""
    made = make(FedAtlas().supervised(SPACE), SPACE)
    assert made == MarginalDiceCEExclusion(
        marginal=MarginalDiceCE(
            dice=1,
            ce=1,
            power=2,
            smooth_numerator=1e-3,
            smooth_denominator=1e-3,
            pooled=True,
            background=True,
            log_below=0.2,
            clamp=1e-4,
            ce_on_probs=False,
        ),
        exclusion_ce=1,
        exclusion_dice=1,
    )


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
    assert same(taught.model, play(FedAtlas(teach=0.0, local=LOCAL), rounds=3, annotated=full).model)


def test_nothing_is_taught_in_the_first_round() -> None:
    """The received model knows nothing then."""
    taught, without = FedAtlas(**EAGER, local=LOCAL), FedAtlas(teach=0.0, local=LOCAL)
    assert same(play(taught, rounds=1).model, play(without, rounds=1).model)
    assert not same(play(taught, rounds=2).model, play(without, rounds=2).model)


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
        assert torch.equal(L_taught(z, z_t, target, known, space), L_taught(z, z_t, hidden, known, space))


# -------------------------------------------------------------------------------------------------- a federation


def test_resumed_it_ends_in_the_same_bits() -> None:
    method = FedAtlas(**EAGER, local=LOCAL)
    assert same(play(method, rounds=3).model, resumed(method, rounds=3).model)


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

    def asked(annotated: set[int], every: int, steps: int = 6, rounds: tuple[int, ...] = (1,)) -> int:
        Counting.asked = 0
        local = dataclasses.replace(LOCAL, steps=steps)
        site = Counting("a", annotated, 2)
        model = {name: value.clone() for name, value in site.network().state_dict().items()}
        method = FedAtlas(every=every, local=local)
        for round in rounds:
            method.local_update(cast(Any, site), model=model, round=round, rounds=9)
        return Counting.asked

    assert (asked({1}, 1), asked({1}, 2)) == (6, 3)
    assert asked({1, 2, 3}, 1) == 0
    # steps are counted over all rounds, so that rounds of a few steps are taught as often
    assert asked({1}, 4, rounds=(1, 2)) == 3
    assert asked({1}, 2, steps=1, rounds=(1, 2, 3, 4)) == 2


def of_images(method: Any) -> Any:
    """The model of three rounds at sites with labels of whole images."""
    method = dataclasses.replace(method, local=Local(optimizer="sgd", batch=4, steps=3, lr=0.1))
    sites = [ImageSite(name, own, 4 + i) for i, (name, own) in enumerate(SETUP_1.items())]
    at = cast(Any, Server(*sites))
    state = dataclasses.replace(method.start(cnn(), at), rounds=3)
    for _ in range(3):
        state = method.round(state, at)
    return state.model


def test_whole_images_are_taught() -> None:
    assert not same(of_images(FedAtlas(**EAGER)), of_images(FedAtlas(teach=0.0)))


@pytest.mark.parametrize(
    ("options", "known"),
    [
        (OFF, FedAvg(weights="equal")),
        ({"teach": 0.0}, FedOpt(optimizer="sgd", lr=1.0, momentum=0.6, weights="equal")),
    ],
    ids=["fedavg", "fedopt"],
)
def test_on_whole_images_it_is_fedavg_or_fedopt_bit_for_bit(options: dict[str, Any], known: Any) -> None:
    """Their losses have no exclusion."""
    assert same(of_images(FedAtlas(**options)), of_images(known))


def test_what_is_sent_is_what_fedavg_sends() -> None:
    """So that secure aggregation can sum it."""
    method = FedAtlas(local=LOCAL)
    assert sends_of(method)["local_update"] == PLAIN_ANSWER
    assert method.summed == FedAvg(weights="equal").summed == "equal"


def test_options_of_an_earlier_teaching() -> None:
    """A run without teaching is one of today's; one with it is not, and says so."""
    before = {"gate": True, "floor": 0.2, "full": 0.7, "every": 2}
    assert FedAtlas.upgraded(before | {"teach": 0.0}) == {"teach": 0.0, "every": 2}
    assert FedAtlas.upgraded({"teach": 1.0}) == {"teach": 1.0}
    for teach in ({"teach": 1.0}, {}):
        with pytest.raises(FederationError, match=r"got gate, floor, full, .*leave them out.*teach to 0"):
            FedAtlas.upgraded(before | teach)
    within = MethodChoice("fedatlas", before | {"teach": 0.0})
    assert PseudoLabels(inner=within, local=LOCAL).method == FedAtlas(teach=0.0, local=LOCAL)


@pytest.mark.parametrize("every", [1, 2, 3])
def test_what_is_taught_less_often_counts_more(monkeypatch, every: int) -> None:
    """Line 5: n times in every n-th batch, so that a round teaches as much whatever n is."""
    monkeypatch.setattr(fedatlas, "L_taught", lambda z, *given: 0 * z.sum() + 1)
    site = UNetSite("a", {1}, 2)
    method = FedAtlas(every=every, teach=0.7, local=dataclasses.replace(LOCAL, steps=6))
    method.local_update(cast(Any, site), model=tensors_of(unet()), round=1, rounds=9)
    assert site.logged["taught"] == pytest.approx(0.7)
