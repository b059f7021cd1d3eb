"""Sigmoid losses against literal loops; the gradient of what is not annotated is exactly zero."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from fedatlas.losses import MaskedBCE, MaskedDiceBCE
from fedatlas.losses.masked import masked_bce, masked_dice


def random_case(seed: int, *shape: int) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    z = 2 * torch.randn(*shape, generator=rng, dtype=torch.float64)
    target = (torch.rand(*shape, generator=rng) < 0.4).to(torch.uint8)
    known = torch.rand(*shape[:2], generator=rng) < 0.5
    known[0, 0] = True
    return z, target, known


@pytest.mark.parametrize("shape", [(1, 1), (3, 4), (2, 3, 2), (2, 3, 2, 3)])
@pytest.mark.parametrize("weighted", [True, False])
def test_bce_equals_the_literal_loop(shape: tuple[int, ...], weighted: bool) -> None:
    z, target, known = random_case(1, *shape)
    weights = [1.5 + c if weighted else 1.0 for c in range(shape[1])]
    total = count = 0.0
    for index in np.ndindex(*shape):
        if known[index[:2]]:
            s = 1 / (1 + math.exp(-float(z[index])))
            y = float(target[index])
            total -= weights[index[1]] * y * math.log(s) + (1 - y) * math.log(1 - s)
            count += 1
    pos_weight = torch.tensor(weights, dtype=torch.float64) if weighted else None
    assert float(masked_bce(z, target, known, pos_weight=pos_weight)) == pytest.approx(
        total / count, abs=1e-9
    )
    loss = MaskedBCE(pos_weight=weights if weighted else None)
    assert float(loss(z, target, known)) == pytest.approx(total / count, abs=1e-9)


@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("power", [1, 2])
def test_dice_equals_the_literal_loop(pooled: bool, power: int) -> None:
    z, target, known = random_case(2, 3, 4, 2, 3)
    s, y = z.sigmoid(), target.double()
    terms = []
    for c in range(4):
        who = [b for b in range(3) if known[b, c]]
        for part in [who] if pooled and who else [[b] for b in who]:
            overlap = sum(float((s[b, c] * y[b, c]).sum()) for b in part)
            size = sum(float((s[b, c] ** power).sum() + (y[b, c] ** power).sum()) for b in part)
            terms.append(1 - (2 * overlap + 0.01) / (size + 0.02))
    got = masked_dice(
        z, target, known, power=power, smooth_numerator=0.01, smooth_denominator=0.02, pooled=pooled
    )
    assert float(got) == pytest.approx(np.mean(terms), abs=1e-9)


@pytest.mark.parametrize("loss", [MaskedDiceBCE(), MaskedDiceBCE(pooled=False), MaskedBCE()])
def test_unknown_channels_have_no_gradient_and_no_say(loss: MaskedDiceBCE) -> None:
    z, target, known = random_case(3, 3, 4, 5, 5)
    z.requires_grad_()
    value = loss(z, target, known)
    (grad,) = torch.autograd.grad(value, z)
    assert (grad[~known] == 0).all()
    assert (grad[known] != 0).any()
    mask = known.reshape(3, 4, 1, 1)
    flipped = torch.where(mask, target, 1 - target)
    moved = torch.where(mask, z, 100.0)
    assert torch.equal(loss(moved, flipped, known), value)


@pytest.mark.parametrize("loss", [MaskedDiceBCE(), MaskedDiceBCE(pooled=False), MaskedBCE()])
def test_nothing_known_is_zero_with_zero_gradient(loss: MaskedDiceBCE) -> None:
    z, target, known = random_case(4, 2, 3, 4)
    z.requires_grad_()
    value = loss(z, target, torch.zeros_like(known))
    (grad,) = torch.autograd.grad(value, z)
    assert value.item() == 0
    assert (grad == 0).all()


@pytest.mark.parametrize("size", [1e4, -1e4])
def test_stable_at_large_logits(size: float) -> None:
    z, target, known = random_case(5, 2, 3, 4)
    z = (z.sign() * size).float().requires_grad_()
    value = MaskedDiceBCE()(z, target, known)
    (grad,) = torch.autograd.grad(value, z)
    assert torch.isfinite(value) and torch.isfinite(grad).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    z, target, known = random_case(6, 2, 3, 4)
    half = z.to(dtype)
    value = MaskedDiceBCE()(half, target, known)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, MaskedDiceBCE()(half.float(), target, known))


def test_heads_of_lower_resolution() -> None:
    z, target, known = random_case(7, 2, 3, 8, 8)
    got = MaskedBCE()([z, z[..., ::2, ::2]], target, known)
    low = MaskedBCE()(z[..., ::2, ::2], target[..., ::2, ::2], known)
    torch.testing.assert_close(got, (2 * MaskedBCE()(z, target, known) + low) / 3)
