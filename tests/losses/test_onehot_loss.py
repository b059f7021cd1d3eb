"""The loss of UFPS against the official code's numbers, a literal loop and its limits; what is not annotated."""

import math
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from fedatlas import losses
from fedatlas.core.errors import FederationError
from fedatlas.core.labels import LabelSpace
from fedatlas.core.options import from_dict
from fedatlas.losses.heads import head_weights, thinned
from fedatlas.losses.onehot import DiceBCE, arce_coefficient, channel_target, rce

VECTORS = Path(__file__).parents[1] / "vectors"
KNOWN = torch.tensor([[True, True, False, False], [True, False, True, True], [True, False, False, False]])
Channels = Literal["known", "foreground", "all"]


@pytest.fixture(scope="module")
def v() -> dict[str, Tensor]:
    with np.load(VECTORS / "ufps_loss.npz") as file:
        return {key: torch.from_numpy(file[key]) for key in file.files}


def official(v: dict[str, Tensor]) -> tuple[list[Tensor], Tensor, Tensor]:
    """The heads in our order, the one of full resolution first, the target and what is known."""
    pred = v["pred"]
    return [pred[:, 4], *(pred[:, i] for i in range(4))], v["label"], torch.ones(2, 5, dtype=torch.bool)


def case(seed: int = 1) -> tuple[Tensor, Tensor]:
    """Logits [3, 4, 4, 5] and a target of all classes, whatever is known."""
    rng = torch.Generator().manual_seed(seed)
    z = 2 * torch.randn(3, 4, 4, 5, generator=rng, dtype=torch.float64)
    return z, torch.randint(0, 4, (3, 4, 5), generator=rng)


def test_the_official_loss(v: dict[str, Tensor]) -> None:
    z, y, known = official(v)
    loss = DiceBCE()
    for e in (5, 100, 250, 400, 500):
        plain, factor = loss(z, y, known), arce_coefficient(e, 501)
        assert factor == pytest.approx(float(v[f"rce_coef_e{e}"]), rel=1e-12)
        torch.testing.assert_close(plain, v[f"plain_e{e}"], atol=1e-5, rtol=0)
        both = plain + factor * rce(z, y, known, form="official")
        torch.testing.assert_close(both, v[f"rce_e{e}"], atol=1e-5, rtol=0)
        each = DiceBCE(activation="softmax").per_sample(z, y, known)
        torch.testing.assert_close((v["conf_weight"] * each).mean(), v[f"conf_e{e}"], atol=1e-5, rtol=0)


def test_the_reverse_terms_of_one_head(v: dict[str, Tensor]) -> None:
    z, y, known = official(v)
    torch.testing.assert_close(rce(z[0], y, known, form="official"), v["rbce_head4_official"])
    torch.testing.assert_close(rce(z[0], y, known), v["rce_head4_softmax_SCE"])


def slow(z: Tensor, target: Tensor, channels: str, pooled: bool, softmax: bool) -> float:
    """The loss of one head by loops over samples, channels and voxels."""
    terms, ce, count = [], 0.0, 0
    p, y = {}, {}
    for b in range(3):
        annotated = [c for c in range(1, 4) if KNOWN[b, c]]
        every = {"known": [0, *annotated], "foreground": annotated, "all": [0, 1, 2, 3]}
        kept = every[channels] if annotated else []
        for c in kept:
            label = [int(t) if int(t) in annotated else 0 for t in target[b].flatten()]
            logits = z[b].flatten(1)
            y[b, c] = [float(t == c) for t in label]
            exp = [[math.exp(float(logits[k, i])) for k in kept] for i in range(20)]
            p[b, c] = [
                exp[i][kept.index(c)] / sum(exp[i]) if softmax else 1 / (1 + math.exp(-float(logits[c, i])))
                for i in range(20)
            ]
            for i in range(20):
                s = 1 / (1 + math.exp(-float(logits[c, i])))
                ce -= math.log(s if y[b, c][i] else 1 - s)
                count += 1
    for c in range(4):
        who = [b for b in range(3) if (b, c) in p]
        for part in [who] if pooled and who else [[b] for b in who]:
            pairs = [(a, t) for b in part for a, t in zip(p[b, c], y[b, c], strict=True)]
            size = sum(a * a + t * t for a, t in pairs)
            terms.append(1 - (2 * sum(a * t for a, t in pairs) + 0.01) / (size + 0.01))
    return 0.5 * float(np.mean(terms)) + 0.5 * ce / count


@pytest.mark.parametrize(
    ("channels", "activation"),
    [("known", "sigmoid"), ("known", "softmax"), ("foreground", "sigmoid"), ("all", "sigmoid")],
)
@pytest.mark.parametrize("pooled", [True, False])
def test_label_sets_mix_in_a_batch(
    channels: Channels, activation: Literal["sigmoid", "softmax"], pooled: bool
) -> None:
    z, target = case()
    loss = DiceBCE(channels=channels, activation=activation, pooled=pooled)
    want = slow(z, target, channels, pooled, activation == "softmax")
    assert float(loss(z, target, KNOWN)) == pytest.approx(want, abs=1e-6)


@pytest.mark.parametrize("activation", ["sigmoid", "softmax"])
def test_unknown_channels_have_no_gradient_and_no_say(activation: Literal["sigmoid", "softmax"]) -> None:
    z, target = case(2)
    loss = DiceBCE(activation=activation)
    unknown = (~KNOWN).reshape(3, 4, 1, 1)
    moved = torch.where(unknown, 90.0, z)
    for value in (loss, lambda *given: loss.per_sample(*given).sum(), rce):
        z.requires_grad_()
        got = value(z, target, KNOWN)
        (grad,) = torch.autograd.grad(got, z)
        assert (grad[~KNOWN] == 0).all() and grad.isfinite().all()
        assert (grad[KNOWN][:-1] != 0).any()
        torch.testing.assert_close(value(moved, target, KNOWN), got)


@pytest.mark.parametrize("activation", ["sigmoid", "softmax"])
def test_a_sample_that_annotates_nothing_teaches_nothing(activation: Literal["sigmoid", "softmax"]) -> None:
    """Neither in a batch nor alone: that nothing was annotated does not make all of it background."""
    z, target = case(2)
    assert not KNOWN[2, 1:].any()
    z.requires_grad_()
    reverse = lambda *given: rce(*given, form="official")  # noqa: E731
    every = DiceBCE(activation=activation, channels="all")
    for value in (DiceBCE(activation=activation), every, rce, reverse):
        (grad,) = torch.autograd.grad(value(z, target, KNOWN), z)
        assert (grad[2] == 0).all() and (grad[0] != 0).any()
        alone = value(z[2:], target[2:], KNOWN[2:])
        (grad,) = torch.autograd.grad(alone, z)
        assert float(alone.detach()) == 0 and (grad == 0).all()


def test_foreground_trains_no_background_and_all_trains_everything() -> None:
    z, target = case(3)
    z.requires_grad_()
    (grad,) = torch.autograd.grad(DiceBCE(channels="foreground")(z, target, KNOWN), z)
    assert (grad[:, 0] == 0).all() and (grad[2] == 0).all() and (grad[0, 1] != 0).any()
    (grad,) = torch.autograd.grad(DiceBCE(channels="all")(z, target, KNOWN), z)
    assert (grad[:2] != 0).any(-1).any(-1).all(), "of samples that annotate something"
    nothing = DiceBCE(channels="foreground")(z, target, torch.zeros_like(KNOWN))
    (grad,) = torch.autograd.grad(nothing, z)
    assert float(nothing.detach()) == 0 and (grad == 0).all()


def test_a_voxel_of_an_unknown_class_is_background() -> None:
    target = torch.tensor([[0, 1, 2, 3]])
    y = channel_target(target, torch.tensor([[False, True, False, False]]))
    assert y[0].tolist() == [[1, 0, 1, 1], [0, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    onehot = torch.nn.functional.one_hot(target, 4).movedim(-1, 1).float()
    assert torch.equal(channel_target(onehot, torch.tensor([[False, True, False, False]])), y)


def test_channels_of_a_target_may_overlap_or_be_empty() -> None:
    given = torch.tensor([[[1.0, 0, 0], [1, 0, 1], [1, 0, 1]]])
    assert torch.equal(channel_target(given, torch.ones(1, 3, dtype=torch.bool)), given)
    y = channel_target(given, torch.tensor([[True, True, False]]))
    assert y[0].tolist() == [[1, 0, 0], [1, 0, 1], [0, 0, 0]]


@pytest.mark.parametrize("channels", ["known", "foreground", "all"])
def test_the_loss_of_each_sample(channels: Channels) -> None:
    z, target = case(4)
    heads = [z, z[:, :, ::2, ::2] + 1]
    loss = DiceBCE(channels=channels)
    got = loss.per_sample(heads, target, KNOWN)
    one = [loss([h[i : i + 1] for h in heads], target[i : i + 1], KNOWN[i : i + 1]) for i in range(3)]
    assert torch.equal(got, torch.stack(one))
    same = KNOWN[:1].expand(3, -1)
    mean = loss.per_sample(z, target, same).mean()
    torch.testing.assert_close(DiceBCE(channels=channels, pooled=False)(z, target, same), mean)


def test_weights_of_heads() -> None:
    z, target = case(5)
    heads = [z, z + 1, z[:, :, ::2, ::2]]
    alone = [float(DiceBCE()(h, thinned(target, h.shape[2:]), KNOWN)) for h in heads]
    reverse = [float(rce(h, thinned(target, h.shape[2:]), KNOWN)) for h in heads]
    choices: list[tuple[Any, list[float]]] = [
        ("encoder", [1, 0.1, 0.2]),
        ("halving", head_weights(3)),
        ([0.0, 2.0, 0.5], [0.0, 2.0, 0.5]),
    ]
    for chosen, weights in choices:
        got = float(DiceBCE(head_weights=chosen)(heads, target, KNOWN))
        assert got == pytest.approx(sum(w * a for w, a in zip(weights, alone, strict=True)))
        got = float(rce(heads, target, KNOWN, head_weights=chosen))
        assert got == pytest.approx(sum(w * a for w, a in zip(weights, reverse, strict=True)))
    assert float(DiceBCE(head_weights=[3.0, 2.0])(z, target, KNOWN)) == pytest.approx(alone[0])
    with pytest.raises(FederationError, match="2 values, the net has 3 heads"):
        DiceBCE(head_weights=[1.0, 2.0])(heads, target, KNOWN)


def test_limits_of_the_reverse_term() -> None:
    target = torch.randint(0, 3, (2, 6), generator=torch.Generator().manual_seed(1))
    right = torch.nn.functional.one_hot(target, 3).movedim(-1, 1).double() * 200
    known = torch.ones(2, 3, dtype=torch.bool)
    assert float(rce(right, target, known)) == pytest.approx(0, abs=1e-12)
    assert float(rce(right, (target + 1) % 3, known)) == pytest.approx(4)
    assert float(rce(right, (target + 1) % 3, known, log_zero=-2.5)) == pytest.approx(2.5)
    assert float(rce(0 * right, target, known)) == pytest.approx(4 * 2 / 3)


def test_the_official_reverse_term_is_linear_in_the_logits() -> None:
    z, target = case(6)
    z.requires_grad_()
    known = torch.ones(3, 4, dtype=torch.bool)
    (grad,) = torch.autograd.grad(rce(z, target, known, form="official"), z)
    torch.testing.assert_close(grad, -channel_target(target, known).double() / z.numel())
    factor = 3.0
    zero, once, thrice = (
        float(rce(k * z.detach(), target, known, form="official")) for k in (0.0, 1.0, factor)
    )
    assert thrice - zero == pytest.approx(factor * (once - zero))


def test_the_coefficient_of_the_reverse_term() -> None:
    assert arce_coefficient(500, 500) == pytest.approx(0.01)
    assert arce_coefficient(0, 500) == pytest.approx(0.01 * math.exp(-20))
    assert arce_coefficient(475, 500, alpha=0.1) == pytest.approx(0.1 / math.e)
    assert [arce_coefficient(r, 500, growing=False) for r in (0, 200, 500)] == [0.01] * 3


def test_a_perfect_net_has_no_loss() -> None:
    _, target = case(7)
    y = channel_target(target, KNOWN).double()
    assert float(DiceBCE()(100 * y - 50, target, KNOWN)) == pytest.approx(0, abs=1e-9)


def test_it_is_chosen_by_name() -> None:
    space = LabelSpace(("background", "liver", "spleen"))
    choice = losses.LossChoice(name="dice_bce", options={"head_weights": [1, 0.5], "channels": "all"})
    assert losses.make(choice, space) == DiceBCE(head_weights=[1.0, 0.5], channels="all")
    with pytest.raises(FederationError, match="does not fit"):
        losses.make(choice, LabelSpace(("liver", "spleen"), exclusive=False))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"activation": "softmax", "channels": "foreground"}, "needs the background"),
        ({"head_weights": [1, -1]}, "at least 0"),
        ({"head_weights": "decoder"}, "head_weights"),
        ({"power": 3}, "power"),
        ({"chanels": "all"}, "did you mean 'channels'"),
    ],
)
def test_wrong_options(options: dict[str, Any], said: str) -> None:
    with pytest.raises(FederationError, match=said):
        from_dict(DiceBCE, options, what="loss dice_bce")


def test_half_precision_and_whole_logits() -> None:
    z, target = case(8)
    got = DiceBCE()(z.bfloat16(), target, KNOWN)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, DiceBCE()(z.bfloat16().float(), target, KNOWN))
