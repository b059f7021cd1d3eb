"""Marginal and exclusion losses against the published code's numbers and against literal, slow versions."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedatlas.core.errors import FederationError
from fedatlas.losses import DiceBCE, MarginalDiceCE, MarginalDiceCEExclusion, MaskedDiceBCE
from fedatlas.losses.dice import dice_loss
from fedatlas.losses.marginal import (
    exclusion,
    marginal_ce,
    marginal_dice,
    merge,
    merge_logits,
    merge_probabilities,
)

VECTORS = Path(__file__).parents[1] / "vectors"
ORGANS = {"kidney": [6, 7], "liver": [1, 2], "pancreas": [4, 5], "spleen": [3], "all": [1, 2, 3, 4, 5, 6, 7]}


def vectors(name: str) -> dict[str, Tensor]:
    with np.load(VECTORS / f"{name}.npz") as file:
        return {key: torch.from_numpy(file[key]) for key in file.files}


def known_of(batch: int, classes: int, *foreground: list[int]) -> Tensor:
    """[B, C] with one label set for all samples, or one for each."""
    rows = foreground if len(foreground) == batch else foreground * batch
    return torch.tensor([[c == 0 or c in row for c in range(classes)] for row in rows])


def slow_merge(q: Tensor, target: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
    """[B, C, N] merged probabilities and one-hot target, voxel by voxel."""
    q, target = q.flatten(2), target.flatten(1)
    m, y = torch.zeros_like(q), torch.zeros_like(q)
    for s in range(q.shape[0]):
        for v in range(q.shape[2]):
            for c in range(q.shape[1]):
                m[s, c if known[s, c] else 0, v] += q[s, c, v]
            label = int(target[s, v])
            y[s, label if known[s, label] else 0, v] = 1
    return m, y


def slow_loss(z: Tensor, target: Tensor, known: Tensor, pooled: bool, power: int, below: float) -> float:
    m, y = slow_merge(z.softmax(1), target, known)
    samples, classes, voxels = m.shape
    ce = 0.0
    for s in range(samples):
        for v in range(voxels):
            ce -= math.log(float((m[s, :, v] * y[s, :, v]).sum()))
    dice = []
    for c in range(classes):
        who = [s for s in range(samples) if c == 0 or known[s, c]]
        for part in [who] if pooled and who else [[s] for s in who]:
            overlap = sum(float((m[s, c] * y[s, c]).sum()) for s in part)
            size = sum(float((m[s, c] ** power).sum() + y[s, c].sum()) for s in part)
            d = (2 * overlap + 0.1) / (size + 0.2)
            logarithm = d < below and any(bool(y[s, c].any()) for s in part)  # of a class that is there
            dice.append(1 - below - below * math.log(d / below) if logarithm else 1 - d)
    return ce / (samples * voxels) + sum(dice) / len(dice)


def random_case(seed: int, batch: int, classes: int, size: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    z = 2 * torch.randn(batch, classes, *size, generator=rng, dtype=torch.float64)
    target = torch.randint(0, classes, (batch, *size), generator=rng).to(torch.uint8)
    known = torch.rand(batch, classes, generator=rng) < 0.5
    known[:, 0] = True
    return z, target, known


@pytest.mark.parametrize("organ", ORGANS)
def test_condistfl_supervised_loss(organ: str) -> None:
    v = vectors("condist_marginal_dice_ce")
    known = known_of(2, 8, ORGANS[organ])
    target = v[f"{organ}_gt"][:, 0]
    batch = merge(v["logits"], target, known)
    torch.testing.assert_close(batch.log_m.exp(), v[f"{organ}_merged_prob"], atol=1e-6, rtol=0)
    assert torch.equal(batch.onehot.float(), v[f"{organ}_merged_onehot"])
    assert float(marginal_dice(batch)) == pytest.approx(float(v[f"{organ}_dice"]), abs=1e-5)
    assert float(marginal_ce(batch)) == pytest.approx(float(v[f"{organ}_ce_true_marginal"]), abs=1e-5)
    official = marginal_ce(batch, ce_on_probs=True)
    assert float(official) == pytest.approx(float(v[f"{organ}_ce_official"]), abs=1e-5)

    z = v["logits"].requires_grad_()
    loss = MarginalDiceCE(ce_on_probs=True)(z, target, known)
    assert loss.item() == pytest.approx(float(v[f"{organ}_loss"]), abs=1e-5)
    (grad,) = torch.autograd.grad(loss, z)
    torch.testing.assert_close(grad, v[f"{organ}_grad"], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("flags", ["liver", "kidney_spleen", "all"])
def test_fedmenu_marginal_loss(flags: str) -> None:
    v = vectors("fedmenu_marginal_loss")
    known = v[f"{flags}_class_flag"].bool().expand(2, -1)
    target = v[f"{flags}_target"][:, 0]
    full = v["target_full"][:, 0]
    assert torch.equal(target, torch.where(known[0][full], full, 0))
    z = v["logits"].requires_grad_()
    batch = merge(z, target, known)
    assert batch.classes == [c for c in range(6) if c == 0 or known[0, c]]
    torch.testing.assert_close(batch.log_m.exp(), v[f"{flags}_merged_prob"], atol=1e-6, rtol=0)
    assert torch.equal(batch.onehot.int().argmax(1, keepdim=True), v[f"{flags}_merged_label"])
    merged = merge_probabilities(v["prob"], known)
    torch.testing.assert_close(merged[:, batch.classes], v[f"{flags}_merged_prob"], atol=1e-6, rtol=0)
    ce = marginal_ce(batch, clamp=1e-4)
    dice = marginal_dice(batch, power=2, smooth_numerator=1, smooth_denominator=1)
    assert ce.item() == pytest.approx(float(v[f"{flags}_ce"]), abs=1e-6)
    assert dice.item() == pytest.approx(float(v[f"{flags}_dice"]), abs=1e-6)
    (grad,) = torch.autograd.grad(ce + dice, z)
    torch.testing.assert_close(grad, v[f"{flags}_grad_logits"], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(("name", "label"), [("one_fg", 1), ("one_bg", 0)])
def test_one_voxel_by_hand(name: str, label: int) -> None:
    v = vectors("fedmenu_marginal_loss")
    z = torch.tensor([0.5, 0.2, 0.3]).log().reshape(1, 3, 1, 1, 1)
    batch = merge(z, torch.full((1, 1, 1, 1), label), torch.tensor([[True, True, False]]))
    torch.testing.assert_close(batch.log_m.exp().flatten(), torch.tensor([0.8, 0.2]))
    assert float(marginal_ce(batch)) == pytest.approx(-math.log(0.2 if label else 0.8), rel=1e-6)
    assert float(marginal_ce(batch)) == pytest.approx(float(v[f"{name}_ce"]), abs=1e-6)
    dice = marginal_dice(batch, power=2, smooth_numerator=1, smooth_denominator=1)
    assert float(dice) == pytest.approx(float(v[f"{name}_dice"]), abs=1e-6)


def test_fedmenu_multichannel_dice() -> None:
    v = vectors("fedmenu_binary_losses")
    kwargs = {"power": 2, "smooth_numerator": 1.0, "smooth_denominator": 1.0}
    q, y = v["prob"], v["onehot"].bool()
    assert float(dice_loss(q, y, **kwargs)) == pytest.approx(float(v["dice_mean"]), abs=1e-6)
    assert float(dice_loss(q[:, 1:], y[:, 1:], **kwargs)) == pytest.approx(float(v["dice_ignore0"]), abs=1e-6)


def test_fedmenu_binary_losses() -> None:
    v = vectors("fedmenu_binary_losses")
    fedmenu = {"power": 2, "smooth_numerator": 1.0, "smooth_denominator": 1.0}
    y = (v["target"] == 3)[:, 0].to(torch.uint8)
    known = torch.ones(2, 2, dtype=torch.bool)
    batch = merge(v["bin_prob"].log(), y, known)
    assert float(marginal_ce(batch, clamp=1e-4)) == pytest.approx(float(v["loc_ce"]), abs=1e-6)
    assert float(marginal_dice(batch, **fedmenu)) == pytest.approx(float(v["loc_dice"]), abs=1e-6)


def test_fedmenu_losses_of_several_organs_are_the_mean_of_each() -> None:
    """`dice_and_ce_loss`, with which the official code validates: of every annotated organ, that organ against all else."""
    v = vectors("fedmenu_binary_losses")
    fedmenu = {"power": 2, "smooth_numerator": 1.0, "smooth_denominator": 1.0}
    target = v["target"][:, 0].to(torch.uint8)
    organs = [int(c) + 1 for c in v["dac_num"].nonzero()]
    ce, dice = [], []
    for c in organs:
        known = torch.zeros(2, 6, dtype=torch.bool)
        known[:, [0, c]] = True
        batch = merge(v["prob"].log(), target, known)
        ce.append(float(marginal_ce(batch, clamp=1e-4)))
        dice.append(float(marginal_dice(batch, **fedmenu)))
        assert 1 - dice[-1] == pytest.approx(float(v["dac_per_class"][c - 1]), abs=1e-6)
    assert organs == [1, 3] and v["dac_num"].sum() == 2
    assert sum(ce) / 2 == pytest.approx(float(v["dac_ce"]), abs=1e-6)
    assert sum(dice) / 2 == pytest.approx(float(v["dac_dice"]), abs=1e-6)


@pytest.mark.parametrize("below", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize(
    ("batch", "classes", "size"), [(1, 2, (3,)), (2, 3, (2, 3)), (3, 5, (3, 2)), (4, 4, (2, 1, 2))]
)
def test_mixed_label_sets_equal_the_literal_loop(
    batch: int, classes: int, size: tuple[int, ...], power: Any, pooled: bool, below: float
) -> None:
    loss = MarginalDiceCE(
        smooth_numerator=0.1, smooth_denominator=0.2, power=power, pooled=pooled, log_below=below
    )
    for seed in range(4):
        z, target, known = random_case(seed, batch, classes, size)
        assert float(loss(z, target, known)) == pytest.approx(
            slow_loss(z, target, known, pooled, power, below), abs=1e-9
        )


def test_double_softmax_of_a_mixed_batch_is_that_of_each_sample() -> None:
    z, target, known = random_case(3, 3, 5, (4, 4))
    both = marginal_ce(merge(z, target, known), ce_on_probs=True)
    each = [
        marginal_ce(merge(z[i : i + 1], target[i : i + 1], known[i : i + 1]), ce_on_probs=True)
        for i in range(3)
    ]
    torch.testing.assert_close(both, torch.stack(each).mean())


@pytest.mark.parametrize("seed", range(5))
def test_exclusion_equals_the_literal_loop(seed: int) -> None:
    z, target, known = random_case(seed, 3, 4, (2, 3))
    known[2, 1:] = seed % 2 == 0
    q = z.softmax(1)
    ce, dice = [], []
    for c in range(4):
        log = overlap = squares = n = 0.0
        samples = [s for s in range(3) if known[s, 1:].any() and (c == 0 or not known[s, c])]
        for s in samples:
            for v in np.ndindex(2, 3):
                label = int(target[s][v])
                e = float(label != 0 and bool(known[s, label]))
                p = float(q[s, c][v])
                log, n = log + e * math.log(p + 1), n + e
                overlap, squares = overlap + p * e, squares + p * p
        if samples or c == 0:
            ce.append(log / n if n else 0.0)
            dice.append((2 * overlap + 1) / (squares + n + 1))
    got_ce, got_dice = exclusion(z, target, known)
    assert float(got_ce) == pytest.approx(np.mean(ce), abs=1e-9)
    assert float(got_dice) == pytest.approx(np.mean(dice), abs=1e-9)


def test_exclusion_limits() -> None:
    z, target, known = random_case(0, 2, 4, (3, 3))
    everything = torch.ones_like(known)
    e = (target > 0).double()
    q0 = z.softmax(1)[:, 0]
    ce, dice = exclusion(z, target, everything)  # E10: only channel 0 is penalised
    torch.testing.assert_close(ce, (q0.log1p() * e).sum() / e.sum())
    torch.testing.assert_close(dice, (2 * (q0 * e).sum() + 1) / ((q0 * q0).sum() + e.sum() + 1))

    ce, dice = exclusion(z, torch.zeros_like(target), known)
    assert float(ce) == 0
    assert float(dice) > 0

    certain = torch.full_like(z, -1e4).scatter(1, target.long().unsqueeze(1), 1e4)
    assert float(exclusion(certain, target, everything)[0]) == 0


def exclusion_as_published(z: Tensor, target: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
    """In which a sample that annotates nothing has every class in U."""
    keep = known.clone()
    keep[:, 0] = False
    classes = [c for c in range(z.shape[1]) if c == 0 or not keep[:, c].all()]
    outside, q = ~keep[:, classes], z.softmax(1)[:, classes]
    e = keep.gather(1, target.flatten(1).long()).reshape(target.shape).unsqueeze(1)
    space = tuple(range(2, z.dim()))
    n, log = (e.sum(space) * outside).sum(0), ((q.log1p() * e).sum(space) * outside).sum(0)
    overlap = ((q * e).sum(space) * outside).sum(0)
    size = ((q * q).sum(space) * outside).sum(0) + n
    return (log / n.clamp(min=1)).mean(), ((2 * overlap + 1) / (size + 1)).mean()


@pytest.mark.parametrize(
    "rows", [([1], [1]), ([1], [2, 3]), ([1, 2, 3], [1, 2]), ([1, 2, 3], [1, 2, 3])], ids=str
)
def test_exclusion_keeps_every_bit_where_all_samples_annotate_something(
    rows: tuple[list[int], list[int]],
) -> None:
    z, target, _ = random_case(3, 2, 4, (5, 6))
    z, known = z.float().requires_grad_(), known_of(2, 4, *rows)
    found = []
    for parts in (exclusion(z, target, known), exclusion_as_published(z, target, known)):
        found.append([*parts, *torch.autograd.grad(parts[0] + parts[1], z)])
    assert all(torch.equal(now, before) for now, before in zip(*found, strict=True))


def test_a_sample_without_any_annotation_has_no_part_in_the_exclusion() -> None:
    z, target, _ = random_case(4, 3, 4, (5, 6))
    z, known = z.requires_grad_(), known_of(3, 4, [1], [], [])
    parts = exclusion(z, target, known)
    torch.testing.assert_close(parts, exclusion(z[:1], target[:1], known[:1]))
    (gradient,) = torch.autograd.grad(parts[0] + parts[1], z)
    assert gradient[0].any() and not gradient[1:].any()
    parts = exclusion(z, target, known_of(3, 4, []))
    (gradient,) = torch.autograd.grad(parts[0] + parts[1], z)
    assert [part.item() for part in parts] == [0, 1] and torch.equal(gradient, torch.zeros_like(z))


def test_exclusion_is_added_with_its_weights() -> None:
    z, target, known = random_case(1, 2, 4, (3, 3))
    loss = MarginalDiceCEExclusion(exclusion_ce=2.0, exclusion_dice=3.0)
    ce, dice = exclusion(z, target, known)
    expected = loss.marginal(z, target, known) + 2 * ce + 3 * dice
    torch.testing.assert_close(loss(z, target, known), expected)


def test_everything_known_is_plain_cross_entropy_and_dice() -> None:
    """E9."""
    z, target, known = random_case(2, 2, 5, (4, 4))
    batch = merge(z, target, torch.ones_like(known))
    torch.testing.assert_close(marginal_ce(batch), torch.nn.functional.cross_entropy(z, target.long()))
    onehot = torch.nn.functional.one_hot(target.long(), 5).movedim(-1, 1)
    torch.testing.assert_close(marginal_dice(batch), dice_loss(z.softmax(1), onehot.bool()))


@pytest.mark.parametrize("background", [True, False])
def test_nothing_known_is_a_constant(background: bool) -> None:
    """E9: no cross-entropy, the Dice of a channel of ones, and no gradient."""
    z, target, known = random_case(2, 2, 5, (4, 4))
    known[:, 1:] = False
    z.requires_grad_()
    loss = MarginalDiceCE(background=background)(z, target, known)
    ones = torch.ones(2, 1, 4, 4, dtype=torch.float64)
    assert loss.item() == pytest.approx(float(dice_loss(ones, ones.bool())) if background else 0.0, abs=1e-12)
    (grad,) = torch.autograd.grad(loss, z)
    assert grad.abs().max() < 1e-12


@pytest.mark.parametrize(
    "loss",
    [
        MarginalDiceCE(),
        MarginalDiceCEExclusion(),
        MarginalDiceCE(ce_on_probs=True),
        MarginalDiceCE(log_below=1.0, smooth_numerator=0.01, smooth_denominator=0.01),
    ],
)
@pytest.mark.parametrize("mixed", [True, False])
def test_labels_of_unknown_classes_change_nothing(loss: MarginalDiceCE, mixed: bool) -> None:
    z, target, known = random_case(4, 3, 5, (6, 6))
    known = known if mixed else known_of(3, 5, [1, 3])
    z.requires_grad_()
    outside = ~known.gather(1, target.flatten(1).long()).reshape(target.shape)
    assert outside.any()
    grads = []
    for changed in (target, target.masked_fill(outside, 0)):
        (grad,) = torch.autograd.grad(loss(z, changed, known), z)
        grads.append(grad)
    assert torch.equal(*grads)


@pytest.mark.parametrize(
    "loss",
    [
        MarginalDiceCE(),
        MarginalDiceCEExclusion(),
        MarginalDiceCE(ce_on_probs=True),
        MarginalDiceCE(log_below=1.0, smooth_numerator=0.01, smooth_denominator=0.01),
    ],
)
def test_gradient_of_a_softmax_loss(loss: MarginalDiceCE) -> None:
    """I4: sums to 0 over channels; a constant added to all logits changes nothing."""
    z, target, known = random_case(5, 3, 5, (4, 4))
    z.requires_grad_()
    value = loss(z, target, known)
    (grad,) = torch.autograd.grad(value, z)
    assert grad.abs().max() > 1e-4
    assert grad.sum(1).abs().max() < 1e-12
    torch.testing.assert_close(loss(z + 7, target, known), value)


LOG = MarginalDiceCE(log_below=1.0, smooth_numerator=0.01, smooth_denominator=0.01)


def test_the_logarithm_of_dice_moves_a_class_of_which_nothing_is_found() -> None:
    """10 of 1,000 voxels have the class, which the model gives a probability of about 1e-5 everywhere."""
    z = torch.tensor([0.0, -11.5], dtype=torch.float64).reshape(1, 2, 1).repeat(1, 1, 1000).requires_grad_()
    target = torch.zeros(1, 1000, dtype=torch.uint8)
    target[:, :10] = 1
    known = torch.ones(1, 2, dtype=torch.bool)
    pulls = []
    for loss in (MarginalDiceCE(), LOG):
        (grad,) = torch.autograd.grad(dataclasses.replace(loss, ce=0.0)(z, target, known), z)
        pulls.append(-float(grad[0, 1, :10].sum()))
    assert 0 < pulls[0] < 1e-4
    p, n = math.exp(-11.5) / (1 + math.exp(-11.5)), 10
    # of -log((2 sum p + .01) / (1000 p + n + .01)) / 2 channels, without the small part of the background
    assert (
        pulls[1] == pytest.approx(0.5 * 2 * n * p / (2 * n * p + 0.01), rel=0.02)
        and pulls[1] > 100 * pulls[0]
    )


@pytest.mark.parametrize("below", [0.1, 0.5])
def test_the_logarithm_begins_without_a_step_or_a_bend(below: float) -> None:
    """One voxel with p and y = 1, for which d = 2p / (1 + p); and -log d, where it is all below 1."""
    p = torch.linspace(0.01, 0.99, 197, dtype=torch.float64, requires_grad=True)
    d = (2 * p / (1 + p)).detach()
    y = torch.ones(1, 197, 1, dtype=torch.bool)

    def total(level: float) -> Tensor:
        each = dice_loss(p.reshape(1, -1, 1), y, smooth_denominator=0.0, pooled=False, log_below=level)
        return 197 * each

    (steep,) = torch.autograd.grad(total(below), p)
    (even,) = torch.autograd.grad(total(0.0), p)
    torch.testing.assert_close(steep, even * torch.where(d < below, below / d, 1))
    assert total(1.0).item() == pytest.approx(-float(d.log().sum()))
    expected = torch.where(d < below, 1 - below - below * (d / below).log(), 1 - d)
    assert total(below).item() == pytest.approx(float(expected.sum()))


def test_the_logarithm_of_dice_needs_a_numerator() -> None:
    with pytest.raises(FederationError, match="log_below is 1 and smooth_numerator is 0"):
        MarginalDiceCE(log_below=1.0)


@pytest.mark.parametrize("loss", [MarginalDiceCE, MaskedDiceBCE, DiceBCE])
def test_a_dice_above_1_is_refused(loss) -> None:
    """Of a class that is nowhere, and not found: smooth_numerator / smooth_denominator."""
    with pytest.raises(
        FederationError, match=r"could have a Dice of 1000; allowed: at most smooth_denominator"
    ):
        loss(smooth_numerator=0.01, smooth_denominator=1e-5)
    loss(smooth_numerator=0.01, smooth_denominator=0.01)


def test_gradient_within_the_merged_set_is_proportional_to_probability() -> None:
    z, target, known = random_case(6, 3, 5, (4, 4))
    z.requires_grad_()
    (grad,) = torch.autograd.grad(MarginalDiceCE()(z, target, known), z)
    q = z.detach().softmax(1)
    ratio = grad / q
    for s in range(3):
        merged = [c for c in range(5) if c == 0 or not known[s, c]]
        for c in merged[1:]:
            torch.testing.assert_close(ratio[s, c], ratio[s, 0])


@pytest.mark.parametrize(
    "loss",
    [
        MarginalDiceCE(),
        MarginalDiceCEExclusion(),
        MarginalDiceCE(log_below=1.0, smooth_numerator=0.01, smooth_denominator=0.01),
    ],
)
@pytest.mark.parametrize("size", [1e4, -1e4])
def test_stable_at_large_logits(loss: MarginalDiceCE, size: float) -> None:
    z, target, known = random_case(7, 3, 5, (4, 4))
    z = (z.sign() * size).float().requires_grad_()
    value = loss(z, target, known)
    (grad,) = torch.autograd.grad(value, z)
    assert torch.isfinite(value) and torch.isfinite(grad).all()


@pytest.mark.parametrize(("z1", "cut"), [(-12.0, True), (-7.0, False)])
def test_clamp_bounds_the_loss_and_stops_the_gradient_below(z1: float, cut: bool) -> None:
    z = torch.tensor([0.0, z1, -30.0], dtype=torch.float64).reshape(1, 3, 1, 1).requires_grad_()
    batch = merge(z, torch.ones(1, 1, 1, dtype=torch.uint8), torch.tensor([[True, True, False]]))
    loss = marginal_ce(batch, clamp=1e-4)
    (grad,) = torch.autograd.grad(loss, z)
    expected = -math.log(1e-4) if cut else math.log(1 + math.exp(z1)) - z1
    assert loss.item() == pytest.approx(expected, abs=1e-9)
    assert bool((grad == 0).all()) is cut


def test_large_logits_keep_their_cross_entropy() -> None:
    z = torch.tensor([[1e4, -1e4, 0.0]]).reshape(1, 3, 1, 1)
    batch = merge(z, torch.ones(1, 1, 1, dtype=torch.uint8), torch.tensor([[True, True, False]]))
    assert float(marginal_ce(batch)) == pytest.approx(2e4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    z, target, known = random_case(8, 2, 5, (4, 4))
    half = z.to(dtype).requires_grad_()
    value = MarginalDiceCE()(half, target, known)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, MarginalDiceCE()(half.detach().float(), target, known))
    (grad,) = torch.autograd.grad(value, half)
    assert grad.dtype == dtype and torch.isfinite(grad).all()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(MarginalDiceCE()(half, target, known), value)


def test_merged_logits_are_log_probabilities_of_the_merge() -> None:
    z, _, known = random_case(9, 4, 5, (3, 3))
    merged, valid, classes = merge_logits(z, known)
    expected = merge_probabilities(z.softmax(1), known)[:, classes]
    torch.testing.assert_close(merged.softmax(1), expected)
    assert torch.equal(valid[:, 1:], known[:, classes][:, 1:])


def test_deep_supervision_weights_and_thinned_targets() -> None:
    z, target, known = random_case(10, 2, 3, (8, 8))
    heads = [z, z[..., ::2, ::2], z[..., ::4, ::4], z[..., ::8, ::8]]
    loss = MarginalDiceCE()
    got = loss(heads, target, known)
    weights = [0.5333, 0.2667, 0.1333, 0.0667]
    expected = sum(
        w * loss(z[..., ::k, ::k], target[..., ::k, ::k], known)
        for w, k in zip(weights, (1, 2, 4, 8), strict=True)
    )
    torch.testing.assert_close(got, expected, rtol=3e-4, atol=0)


@pytest.mark.parametrize("shift", range(3))
def test_order_of_samples_changes_nothing(shift: int) -> None:
    z, target, known = random_case(11, 3, 5, (4, 4))
    turned = [x.roll(shift, 0) for x in (z, target, known)]
    torch.testing.assert_close(MarginalDiceCE()(*turned), MarginalDiceCE()(z, target, known))
