"""The ConDist loss against the published code, the paper's equations in float64, and a literal slow version."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedatlas.errors import FederationError
from fedatlas.labels import LabelSpace
from fedatlas.losses import LossChoice
from fedatlas.methods.condistfl import ConDistFL

VECTORS = Path(__file__).parents[1] / "vectors"
NAMES = ("background", "liver", "liver tumour", "spleen", "pancreas", "pancreas tumour", "kidney", "tumour")
SPACE = LabelSpace(NAMES, groups=((1, 2), (4, 5), (6, 7)))
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
            M = 0.0 if method.filter and (teacher in F or int(target[(s, *v)]) in F) else 1.0
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
    conditional = method.conditional(V["local_logits"].detach(), B_k, [G for G in O_k if G])
    torch.testing.assert_close(conditional, V[f"{site}_T{tau}_cond_local"], atol=1e-5, rtol=0)
    mask = method.M(V["global_logits"], target, known[0].tolist())
    assert torch.equal(mask.float(), V[f"{site}_mask"])


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
    assert ConDistFL().L_ConDist(z_k, V["global_logits"], covered, known, SPACE).item() == 0


def test_identical_models() -> None:
    """One-hot: 0 where a group has mass. Soft: not 0, for soft Dice of p with itself is 1 - sum p^2 / sum p."""
    hard = V["hard_logits"]
    none = torch.zeros(2, 4, 5, 6, dtype=torch.uint8)
    known = known_of(2, SITES["liver"])
    skipped = ConDistFL().L_ConDist(hard, hard, none, known, SPACE)
    official = ConDistFL(**OFFICIAL).L_ConDist(hard, hard, none, known, SPACE)
    assert skipped.item() == pytest.approx(0, abs=1e-5)
    assert official.item() == pytest.approx(float(V["hard_same_loss"]), abs=1e-5)
    z = V["local_logits"].detach()
    assert ConDistFL().L_ConDist(z, z, none, known, SPACE).item() > 0.05


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
    M = torch.cat([method.M(z_g[s : s + 1], target[s : s + 1], known[s].tolist()) for s in range(3)])
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


def test_needs_exclusive_classes() -> None:
    with pytest.raises(FederationError, match="exclusive: true"):
        ConDistFL().check(LabelSpace(("a", "b"), exclusive=False))
    with pytest.raises(FederationError, match="did you mean"):
        ConDistFL(loss=LossChoice(name="marginal_dice_c")).check(SPACE)
    ConDistFL().check(SPACE)
