"""The ConDist loss against the published code, the paper's equations in float64, and a literal slow version."""

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedatlas.core.errors import FederationError
from fedatlas.core.labels import LabelSpace
from fedatlas.losses import LossChoice
from fedatlas.methods.condistfl import ConDistFL

VECTORS = Path(__file__).parents[1] / "vectors"
NAMES = ("background", "liver", "liver tumour", "spleen", "pancreas", "pancreas tumour", "kidney", "tumour")
SPACE = LabelSpace(NAMES, groups=((1, 2), (4, 5), (6, 7)))
OVERLAPPING = LabelSpace(("lung", "heart", "nodule", "rib", "clavicle"), groups=((0, 2),), exclusive=False)
SITES = {"kidney": [6, 7], "liver": [1, 2], "pancreas": [4, 5], "spleen": [3]}
OFFICIAL: dict[str, Any] = {"cond": "eps", "empty_group": "one"}


def vectors(name: str) -> dict[str, Tensor]:
    with np.load(VECTORS / f"{name}.npz") as file:
        return {key: torch.from_numpy(file[key]) for key in file.files}


V = vectors("condist_loss")


def known_of(batch: int, foreground: list[int], classes: int = 8) -> Tensor:
    return torch.tensor([[c == 0 or c in foreground for c in range(classes)]] * batch)


def random_case(seed: int, batch: int = 3) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    z_k, z_g = 2 * torch.randn(2, batch, 8, 3, 4, generator=rng, dtype=torch.float64)
    target = torch.randint(0, 8, (batch, 3, 4), generator=rng).to(torch.uint8)
    known = torch.rand(batch, 8, generator=rng) < 0.5
    known[:, 0] = True
    return z_k.requires_grad_(), z_g, target, known


def slow_condist(z_k: Tensor, z_g: Tensor, target: Tensor, known: Tensor, method: ConDistFL) -> float:
    """Eq. (1) to (7), one voxel at a time, each sample with its own label set."""
    z_k = z_k.detach()
    organs = [(0,), *SPACE.organs] if method.group else [(c,) for c in range(8)]
    overlap, mass = [0.0] * len(organs), [0.0] * len(organs)
    present = set()
    for s in range(len(z_k)):
        F = [c for c in range(1, 8) if known[s, c]]
        B = [c for c in range(8) if c not in F]
        if len(B) == 1:
            continue
        for v in np.ndindex(*target.shape[1:]):
            k = [math.exp(float(z_k[(s, c, *v)]) / method.tau) for c in range(8)]
            g = [math.exp(float(z_g[(s, c, *v)]) / method.tau) for c in range(8)]
            teacher = max(range(8), key=lambda c: g[c])
            M = 0.0 if method.filter is not False and (teacher in F or int(target[(s, *v)]) in F) else 1.0
            for i, organ in enumerate(organs):
                G = [c for c in organ if c in B]
                if not G:
                    continue
                present.add(i)
                p_k = sum(k[c] for c in G) / sum(k) / (1 - sum(k[c] for c in F) / sum(k))
                p_g = sum(g[c] for c in G) / sum(g) / (1 - sum(g[c] for c in F) / sum(g))
                overlap[i] += M * p_k * p_g
                mass[i] += M * (p_k + p_g)
    counted = [i for i in sorted(present) if method.empty_group == "one" or mass[i] >= 1e-5]
    return float(np.mean([1 - 2 * overlap[i] / (mass[i] + 1e-5) for i in counted])) if counted else 0.0


@pytest.mark.parametrize("tau", [0.5, 2.0])
@pytest.mark.parametrize("site", SITES)
def test_equals_the_paper(site: str, tau: float) -> None:
    exact = vectors("condist_exact_derived")
    z_k = V["local_logits"].double().requires_grad_()
    known = known_of(2, SITES[site])
    loss = ConDistFL(tau=tau).L_ConDist(z_k, V["global_logits"].double(), V[f"{site}_gt"][:, 0], known, SPACE)
    assert loss.item() == pytest.approx(float(exact[f"{site}_T{tau}_loss"]), abs=1e-6)
    (grad,) = torch.autograd.grad(loss, z_k)
    torch.testing.assert_close(grad, exact[f"{site}_T{tau}_grad"], atol=1e-9, rtol=1e-6)
    assert (grad[:, SITES[site]] == 0).all()


@pytest.mark.parametrize("tau", [0.5, 2.0])
@pytest.mark.parametrize("site", SITES)
def test_equals_the_official_code(site: str, tau: float) -> None:
    z_k = V["local_logits"].requires_grad_()
    known = known_of(2, SITES[site])
    target = V[f"{site}_gt"][:, 0]
    method = ConDistFL(tau=tau, **OFFICIAL)
    loss = method.L_ConDist(z_k, V["global_logits"], target, known, SPACE)
    assert loss.item() == pytest.approx(float(V[f"{site}_T{tau}_loss_trainer"]), abs=1e-5)
    (grad,) = torch.autograd.grad(loss, z_k)
    torch.testing.assert_close(grad, V[f"{site}_T{tau}_grad_trainer"], atol=1e-6, rtol=1e-4)

    F_k = SITES[site]
    B_k = [c for c in range(8) if c not in F_k]
    O_k = [tuple(c for c in organ if c in B_k) for organ in ((0,), *SPACE.organs)]
    for model in ("local", "global"):
        conditional = method.conditional(V[f"{model}_logits"].detach(), B_k, [G for G in O_k if G])
        torch.testing.assert_close(conditional, V[f"{site}_T{tau}_cond_{model}"], atol=1e-5, rtol=0)
    mask = method.M(V["global_logits"], target, known[0].tolist(), SPACE)
    assert torch.equal(mask.float(), V[f"{site}_mask"])


@pytest.mark.parametrize("tau", [0.5, 2.0])
@pytest.mark.parametrize("site", SITES)
def test_the_official_defaults_are_the_mean_over_samples(site: str, tau: float) -> None:
    """The class's own defaults pool no batch, which is the loss of each sample by itself; that they smooth the numerator,
    too, adds 1e-5 to sums of many voxels."""
    z_k, z_g, gt = V["local_logits"].detach().requires_grad_(), V["global_logits"], V[f"{site}_gt"][:, 0]
    method, known = ConDistFL(tau=tau, **OFFICIAL), known_of(1, SITES[site])
    each = [method.L_ConDist(z_k[[s]], z_g[[s]], gt[[s]], known, SPACE) for s in range(2)]
    loss = torch.stack(each).mean()
    assert loss.item() == pytest.approx(float(V[f"{site}_T{tau}_loss_default"]), abs=1e-6)
    (grad,) = torch.autograd.grad(loss, z_k)
    torch.testing.assert_close(grad, V[f"{site}_T{tau}_grad_default"], atol=1e-7, rtol=0)


@pytest.mark.parametrize("site", SITES)
def test_partial_labels_are_the_full_ones_of_a_site(site: str) -> None:
    own = torch.isin(V["gt_full"], torch.tensor(SITES[site]))
    assert torch.equal(V[f"{site}_gt"], torch.where(own, V["gt_full"], 0))


def test_official_limits() -> None:
    z_k, z_g = V["local_logits"].detach(), V["nounlab_global"]
    none = torch.zeros(2, 4, 5, 6, dtype=torch.uint8)
    everything = known_of(2, list(range(1, 8)))
    for tau, name in [(0.5, "nounlab_loss"), (2.0, "nounlab_loss_T2")]:
        loss = ConDistFL(tau=tau, **OFFICIAL).L_ConDist(z_k, z_g, none, everything, SPACE)
        assert loss.item() == pytest.approx(float(V[name]), abs=1e-5)

    covered = torch.full_like(none, 6)
    known = known_of(2, SITES["kidney"])
    masked = ConDistFL(**OFFICIAL).L_ConDist(z_k, V["global_logits"], covered, known, SPACE)
    assert masked.item() == pytest.approx(float(V["allmasked_loss"]), abs=1e-6)
    skipped = ConDistFL().L_ConDist(z_k, V["global_logits"], covered, known, SPACE)
    assert skipped.item() == 0 == V["allmasked_loss_defaultsmooth"].item()


def test_identical_models() -> None:
    """One-hot: 0 where a group has mass. Soft: not 0, for soft Dice of p with itself is 1 - sum p^2 / sum p."""
    hard = V["hard_logits"]
    none = torch.zeros(2, 4, 5, 6, dtype=torch.uint8)
    known = known_of(2, SITES["liver"])
    skipped = ConDistFL().L_ConDist(hard, hard, none, known, SPACE)
    official = ConDistFL(**OFFICIAL).L_ConDist(hard, hard, none, known, SPACE)
    assert skipped.item() == pytest.approx(0, abs=1e-5)
    assert official.item() == pytest.approx(float(V["hard_same_loss"]), abs=1e-5)
    z = V["global_logits"]
    soft = ConDistFL(**OFFICIAL).L_ConDist(z, z, none, known, SPACE)
    assert soft.item() == pytest.approx(float(V["same_loss"]), abs=1e-5) and soft.item() > 0.05


@pytest.mark.parametrize(
    "options", [{}, {"group": False}, {"filter": False}, {"tau": 2.0, "empty_group": "one"}]
)
def test_mixed_label_sets_equal_the_literal_loop(options: dict[str, Any]) -> None:
    method = ConDistFL(**options)
    for seed in range(6):
        z_k, z_g, target, known = random_case(seed)
        if seed == 1:
            known[1] = True
        loss = method.L_ConDist(z_k, z_g, target, known, SPACE)
        assert loss.item() == pytest.approx(slow_condist(z_k, z_g, target, known, method), abs=1e-9)


def test_everything_known_costs_nothing() -> None:
    """E12: the loss and its gradient are exactly 0."""
    z_k, z_g, target, known = random_case(0)
    loss = ConDistFL().L_ConDist(z_k, z_g, target, torch.ones_like(known), SPACE)
    assert loss.item() == 0
    assert not loss.requires_grad or (torch.autograd.grad(loss, z_k)[0] == 0).all()


def test_a_fully_known_sample_takes_no_part() -> None:
    z_k, z_g, target, known = random_case(1)
    known[1] = True
    rest = [0, 2]
    both = ConDistFL().L_ConDist(z_k, z_g, target, known, SPACE)
    alone = ConDistFL().L_ConDist(z_k[rest], z_g[rest], target[rest], known[rest], SPACE)
    torch.testing.assert_close(both, alone)


def test_known_logits_have_no_gradient_and_no_say() -> None:
    """I5, and the exact conditional sums to 1."""
    z_k, z_g, target, known = random_case(2)
    method = ConDistFL(filter=False)
    loss = method.L_ConDist(z_k, z_g, target, known, SPACE)
    (grad,) = torch.autograd.grad(loss, z_k)
    foreground = known.clone()
    foreground[:, 0] = False
    assert (grad[foreground] == 0).all() and grad.abs().max() > 1e-4
    assert grad.sum(1).abs().max() < 1e-12
    moved = (
        z_k
        + torch.randn(z_k.shape, dtype=z_k.dtype, generator=torch.Generator().manual_seed(0))
        * (foreground[:, :, None, None])
    )
    assert torch.equal(method.L_ConDist(moved, z_g, target, known, SPACE), loss)
    conditional = method.conditional(z_k, [0, 1, 2, 3], [(0,), (1, 2), (3,)])
    torch.testing.assert_close(conditional.sum(1), torch.ones_like(conditional[:, 0]))


def test_masked_voxels_have_no_gradient_and_no_say() -> None:
    z_k, z_g, target, known = random_case(3)
    method = ConDistFL()
    loss = method.L_ConDist(z_k, z_g, target, known, SPACE)
    (grad,) = torch.autograd.grad(loss, z_k)
    M = torch.cat([method.M(z_g[s : s + 1], target[s : s + 1], known[s].tolist(), SPACE) for s in range(3)])
    out = ~M.expand_as(grad)
    assert out.any() and M.any()
    assert (grad[out] == 0).all()
    moved = torch.where(out, z_k + 3 * z_k.roll(1, 1), z_k)
    torch.testing.assert_close(method.L_ConDist(moved, z_g, target, known, SPACE), loss, atol=1e-12, rtol=0)


def test_labels_of_unknown_classes_change_nothing() -> None:
    z_k, z_g, target, known = random_case(4)
    outside = ~known.gather(1, target.flatten(1).long()).reshape(target.shape)
    hidden = target.masked_fill(outside, 0)
    loss = ConDistFL().L_ConDist
    assert torch.equal(loss(z_k, z_g, target, known, SPACE), loss(z_k, z_g, hidden, known, SPACE))


def test_singleton_groups_are_no_groups() -> None:
    """E13."""
    z_k, z_g, target, known = random_case(5)
    flat = LabelSpace(NAMES)
    expected = ConDistFL(group=False).L_ConDist(z_k, z_g, target, known, SPACE)
    assert torch.equal(ConDistFL().L_ConDist(z_k, z_g, target, known, flat), expected)


def test_no_gradient_reaches_the_teacher() -> None:
    z_k, z_g, target, known = random_case(6)
    z_g.requires_grad_()
    loss = ConDistFL().L_ConDist(z_k, z_g, target, known, SPACE)
    assert torch.autograd.grad(loss, z_g, allow_unused=True) == (None,)


@pytest.mark.parametrize("cond", ["exact", "eps"])
def test_stable_at_large_logits(cond: Any) -> None:
    z_k, z_g, target, known = random_case(7)
    z_k = (z_k.detach().sign() * 1e4).float().requires_grad_()
    loss = ConDistFL(cond=cond).L_ConDist(z_k, z_g.sign().float() * 1e4, target, known, SPACE)
    (grad,) = torch.autograd.grad(loss, z_k)
    assert torch.isfinite(loss) and torch.isfinite(grad).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    z_k, z_g, target, known = random_case(8)
    low, high = z_k.detach().to(dtype), z_k.detach().to(dtype).float()
    method = ConDistFL()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = method.L_ConDist(low, z_g.to(dtype), target, known, SPACE)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, method.L_ConDist(high, z_g.to(dtype).float(), target, known, SPACE))


@pytest.mark.parametrize("rounds", [30, 120])
def test_lambda_is_that_of_the_official_code(rounds: int) -> None:
    expected = vectors("condist_lambda_schedule")[f"lambda_{rounds}"]
    got = [ConDistFL().lambda_at(r, rounds) for r in range(rounds)]
    torch.testing.assert_close(torch.tensor(got, dtype=torch.float64), expected, atol=1e-12, rtol=0)
    assert ConDistFL().lambda_at(0, 1) == 0.01


def test_options_that_do_not_fit_the_classes_are_refused() -> None:
    with pytest.raises(FederationError, match="cond is eps.*overlapping classes allow: exact"):
        ConDistFL(cond="eps").check(OVERLAPPING)
    with pytest.raises(FederationError, match="did you mean"):
        ConDistFL(loss=LossChoice(name="marginal_dice_c")).check(SPACE)
    for space in (SPACE, OVERLAPPING):
        ConDistFL().check(space)


# -------------------------------------------------------------------------------------- overlapping classes


def overlapping_case(seed: int, batch: int = 3) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    z_k, z_g = 2 * torch.randn(2, batch, 5, 2, 3, generator=rng, dtype=torch.float64)
    target = (torch.rand(batch, 5, 2, 3, generator=rng) < 0.3).float()
    known = torch.rand(batch, 5, generator=rng) < 0.5
    return z_k.requires_grad_(), z_g, target, known


def slow_overlapping(z_k: Tensor, z_g: Tensor, target: Tensor, known: Tensor, method: ConDistFL) -> float:
    """All 2^C labellings of a voxel, their probabilities under independent Bernoulli variables, and the definition
    of a conditional probability."""
    z_k = z_k.detach()
    organs = OVERLAPPING.organs if method.group else tuple((c,) for c in range(5))
    overlap, mass = [0.0] * (1 + len(organs)), [0.0] * (1 + len(organs))
    present = set()

    def conditional(z: Tensor, event: Any, F: list[int]) -> float:
        s = [1 / (1 + math.exp(-float(value) / method.tau)) for value in z]
        both = given = 0.0
        for y in itertools.product((0, 1), repeat=5):
            if not any(y[c] for c in F):
                p = math.prod(s[c] if y[c] else 1 - s[c] for c in range(5))
                given += p
                both += p if event(y) else 0.0
        return both / given

    for b in range(len(z_k)):
        F, U = [[c for c in range(5) if bool(known[b, c]) == side] for side in (True, False)]
        if not U:
            continue
        for v in np.ndindex(*target.shape[2:]):
            at_k, at_g = z_k[(b, slice(None), *v)], z_g[(b, slice(None), *v)]
            out = any(at_g[c] > 0 or target[(b, c, *v)] > 0 for c in F)
            M = 0.0 if method.filter and out else 1.0
            for i, organ in enumerate([tuple(U), *organs]):
                G = [c for c in organ if c in U]
                if not G:
                    continue
                present.add(i)
                wanted = i > 0

                def event(y: tuple[int, ...], G: list[int] = G, wanted: bool = wanted) -> bool:
                    return any(y[c] for c in G) == wanted

                p_k, p_g = conditional(at_k, event, F), conditional(at_g, event, F)
                overlap[i] += M * p_k * p_g
                mass[i] += M * (p_k + p_g)
    counted = [i for i in sorted(present) if method.empty_group == "one" or mass[i] >= 1e-5]
    return float(np.mean([1 - 2 * overlap[i] / (mass[i] + 1e-5) for i in counted])) if counted else 0.0


@pytest.mark.parametrize("tau", [0.5, 2.0])
@pytest.mark.parametrize(
    "options",
    [{}, {"group": False}, {"filter": True}, {"filter": True, "group": False, "empty_group": "one"}],
)
def test_overlapping_equals_the_definition(options: dict[str, Any], tau: float) -> None:
    method = ConDistFL(tau=tau, **options)
    for seed in range(4):
        z_k, z_g, target, known = overlapping_case(seed)
        if seed == 1:
            known[1] = True
        loss = method.L_ConDist(z_k, z_g, target, known, OVERLAPPING)
        assert loss.item() == pytest.approx(slow_overlapping(z_k, z_g, target, known, method), abs=1e-9)


@pytest.mark.parametrize("filter", [None, True])
def test_overlapping_gradient(filter: bool | None) -> None:
    z_k, z_g, target, known = overlapping_case(9)
    method = ConDistFL(filter=filter)

    def loss(z: Tensor) -> Tensor:
        return method.L_ConDist(z, z_g, target, known, OVERLAPPING)

    assert torch.autograd.gradcheck(loss, (z_k,), eps=1e-6, atol=1e-8)
    (grad,) = torch.autograd.grad(loss(z_k), z_k)
    assert (grad[known] == 0).all() and (grad[~known] != 0).any()
    noise = torch.randn(z_k.shape, dtype=z_k.dtype, generator=torch.Generator().manual_seed(0))
    moved = z_k + noise * known[:, :, None, None]
    assert torch.equal(loss(moved), loss(z_k))


@pytest.mark.parametrize("filter", [False, True])
@pytest.mark.parametrize("tau", [0.5, 2.0])
def test_one_class_left_is_the_exclusive_form(tau: float, filter: bool) -> None:
    """With U = {u} the two forms are one another under z'_u = z_u - z_0."""
    rng = torch.Generator().manual_seed(3)
    z_k, z_g = 2 * torch.randn(2, 2, 3, 4, 5, generator=rng, dtype=torch.float64)
    # the two filters read annotated classes off a softmax and off sigmoids: here both are sure
    sure = torch.rand(2, 4, 5, generator=rng) < 0.3
    z_g[:, 1] = torch.where(sure, 50.0, -50.0).double()
    target = torch.randint(0, 2, (2, 4, 5), generator=rng)
    exclusive, two = LabelSpace(("background", "a", "u")), LabelSpace(("a", "u"), exclusive=False)
    z_k.requires_grad_()
    method = ConDistFL(tau=tau, filter=filter)
    known = torch.tensor([[True, True, False]] * 2)
    expected = method.L_ConDist(z_k, z_g, target, known, exclusive)
    substituted = [torch.stack([z[:, 1], z[:, 2] - z[:, 0]], 1) for z in (z_k, z_g)]
    masks = torch.stack([target == 1, target == 2], 1).float()
    loss = method.L_ConDist(substituted[0], substituted[1], masks, known[:, 1:], two)
    torch.testing.assert_close(loss, expected, atol=1e-12, rtol=0)
    grads = [torch.autograd.grad(value, z_k, retain_graph=True)[0] for value in (loss, expected)]
    torch.testing.assert_close(grads[0], grads[1], atol=1e-12, rtol=1e-9)
    assert grads[0].abs().max() > 1e-4


def test_overlapping_limits() -> None:
    z_k, z_g, target, known = overlapping_case(4)
    everything = ConDistFL().L_ConDist(z_k, z_g, target, torch.ones_like(known), OVERLAPPING)
    assert everything.item() == 0
    assert not everything.requires_grad or (torch.autograd.grad(everything, z_k)[0] == 0).all()
    # tau -> 0: every probability becomes 0 or 1
    hard = ConDistFL(tau=1e-4).overlapping(z_k, [(0, 2), (1,)])
    some = torch.stack([(z_k[:, [0, 2]] > 0).any(1), z_k[:, 1] > 0], 1)
    torch.testing.assert_close(hard, torch.cat([~some.any(1, keepdim=True), some], 1).double())
    same = ConDistFL(tau=1e-4).L_ConDist(z_k, z_k, target, known, OVERLAPPING)
    assert same.item() == pytest.approx(0, abs=1e-5)
    # groups of one are no groups; hidden labels and logits of annotated classes have no say
    flat = LabelSpace(OVERLAPPING.names, exclusive=False)
    alone = ConDistFL(group=False).L_ConDist(z_k, z_g, target, known, OVERLAPPING)
    assert torch.equal(ConDistFL().L_ConDist(z_k, z_g, target, known, flat), alone)
    hidden = target * known[:, :, None, None]
    for filter in (False, True):
        loss = ConDistFL(filter=filter).L_ConDist
        args = (known, OVERLAPPING)
        assert torch.equal(loss(z_k, z_g, target, *args), loss(z_k, z_g, hidden, *args))


def test_overlapping_classes_keep_voxels_of_annotated_ones_by_default() -> None:
    z_k, z_g, _, known = overlapping_case(5)
    covered = torch.ones(3, 5, 2, 3)
    by_default = ConDistFL().L_ConDist(z_k, z_g, covered, known, OVERLAPPING)
    assert by_default > 0
    assert torch.equal(by_default, ConDistFL(filter=False).L_ConDist(z_k, z_g, covered, known, OVERLAPPING))
    assert ConDistFL(filter=True).L_ConDist(z_k, z_g, covered, known, OVERLAPPING) == 0


def test_overlapping_is_stable_at_large_logits() -> None:
    z_k, z_g, target, known = overlapping_case(6)
    z_k = (z_k.detach().sign() * 1e4).float().requires_grad_()
    loss = ConDistFL().L_ConDist(z_k, z_g.sign().float() * 1e4, target, known, OVERLAPPING)
    (grad,) = torch.autograd.grad(loss, z_k)
    assert torch.isfinite(loss) and torch.isfinite(grad).all()
    # a probability of 1e-20 and its distance from 1 both keep their digits
    small = ConDistFL(tau=1.0).overlapping(torch.tensor([[-46.0, -46.0]])[:, :, None, None], [(0,), (1,)])
    assert small[0, 1].item() == pytest.approx(math.exp(-46), rel=1e-5)
