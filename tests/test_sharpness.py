"""sharpness.py against published vectors, literal versions, limiting cases (E14) and hostile bytes."""

import copy
import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes import same
from torch import Tensor, nn

from fedatlas import nets
from fedatlas.core.batch import Batch
from fedatlas.core.errors import FederationError, NameMismatch, WireError
from fedatlas.core.seeds import isolated
from fedatlas.core.tensors import load, n_bytes, tensors_of
from fedatlas.learning.loop import Local, Loss, Stepper
from fedatlas.methods.shared.sharpness import (
    FARTHEST,
    RATIOS,
    Masks,
    Sharp,
    Sharpness,
    SparseMask,
    Sparsity,
    disagreement,
    either,
    extra_mask,
    masked,
    momentum,
    pack_bits,
    perturbation,
    random_direction,
    ratios,
    scaled_names,
    top,
    unpack_bits,
)
from fedatlas.transport import wire

VECTORS = Path(__file__).parent / "vectors"
CPU = torch.device("cpu")
SGD = Local(optimizer="sgd", momentum=0.0, weight_decay=0.0, schedule="constant", lr=0.1)
Model = dict[str, Tensor]


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def vectors(name: str) -> Model:
    with np.load(VECTORS / f"{name}.npz") as file:
        return {key: torch.from_numpy(file[key]) for key in file.files}


def under(v: Model, prefix: str) -> Model:
    return {key.removeprefix(prefix): value for key, value in v.items() if key.startswith(prefix)}


def close(a: Model, b: Model) -> None:
    assert set(a) == set(b)
    for name, value in a.items():
        torch.testing.assert_close(value, b[name].to(value.dtype), atol=1e-6, rtol=0, msg=name)


def values_of(net: nn.Module) -> Model:
    return {name: p.detach().clone() for name, p in net.named_parameters()}


def batch_of(image: Tensor, target: Tensor) -> Batch:
    return Batch(image, target, torch.ones(len(image), 3, dtype=torch.bool), ["a"] * len(image))


def entropy(net: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(net(batch.image), batch.target)


# ----------------------------------------------------------------------------------------------------------- vectors

PUBLISHED = {
    "fedsam_asam": Sharpness(tiny=1e-16),
    "fedsam_sam": Sharpness(scaled="none"),
    "ufps_asam_nomask": Sharpness(),
    "ufps_usam_nomask": Sharpness(),
}


@pytest.mark.parametrize("row", PUBLISHED)
def test_the_perturbation_is_the_published_one(row: str) -> None:
    v = under(vectors("asam_step"), f"{row}/")
    w = under(v, "w0/")
    scaled = () if row == "fedsam_sam" else [name for name in w if "weight" in name]
    eps = perturbation(w, under(v, "grad_ascent/"), PUBLISHED[row], scaled)
    close({name: w[name] + eps[name] for name in w}, under(v, "w_pert/"))


@pytest.mark.parametrize("row", PUBLISHED)
def test_a_step_is_the_published_one(row: str) -> None:
    every = vectors("asam_step")
    v = under(every, f"{row}/")
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    load(net, under(v, "w0/"))
    ascent = batch_of(every["x_ascent"], every["y"])
    descent = batch_of(every["x_descent"], every["y"])
    if row != "ufps_usam_nomask":
        descent = ascent
    one_step(Stepper(net, SGD, CPU), entropy, (ascent, descent), PUBLISHED[row])
    close(values_of(net), under(v, "w_after/"))


def test_masks_are_the_published_ones() -> None:
    v = vectors("ufps_sparse_masks")
    gradient, mask = under(v, "init/grad/"), under(v, "init/mask/")
    close(top(gradient, 0.4), mask)
    first = SparseMask(Sparsity(score="momentum"), None, None, update=True, rng=rng())
    close(first(gradient), mask)
    close(first.G_mo, under(v, "init/momentum/"))
    local = [top(under(v, f"client{i}/momentum/"), 0.4, by_value=True) for i in range(3)]
    for i, got in enumerate(local):
        close(got, under(v, f"client{i}/localmask/"))
    found = disagreement(local)
    close(found, under(v, "global_mask_paper/"))
    close({name: ~value for name, value in found.items()}, under(v, "global_mask_official/"))


# --------------------------------------------------------------------------------------------------- limiting cases


def norm_net(seed: int = 1) -> nn.Module:
    with isolated("net", seed):
        return nn.Sequential(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))


def batches(count: int = 3, seed: int = 5) -> list[Batch]:
    g = rng(seed)
    return [
        batch_of(torch.randn(5, 2, 6, generator=g), torch.randint(3, (5,), generator=g)) for _ in range(count)
    ]


def noisy(batch: Batch) -> tuple[Batch, Batch]:
    return batch_of(batch.image * 1.5 + 0.3, batch.target), batch


LOCALS = {
    "adamw": Local(optimizer="adamw", lr=0.01),
    "sgd": Local(optimizer="sgd", lr=0.05, nesterov=True, clip=0.3),
    "bf16": Local(optimizer="adam", lr=0.01, precision="bf16"),
}


def one_step(
    by: Stepper,
    loss: Loss,
    views: tuple[Batch, Batch],
    how: Sharpness,
    mask: Callable[[Model], Masks] | None = None,
    **given: Any,
) -> Model:
    """A step as methods take it; views: what the ascent and the descent see. What it tells, with the ascent's loss."""
    sharp = Sharp(by, how, **given)
    value, g, eps = sharp.ascend(loss, views[0])
    return sharp.step(loss, views[1], eps, mask(g) if mask and g else None) | {"ascent": value}


def both(batch: Batch) -> tuple[Batch, Batch]:
    return batch, batch


def trained(
    local: Local,
    how: Sharpness | None,
    *,
    views: Callable[[Batch], tuple[Batch, Batch]] = both,
    scale: float | None = None,
    **given: Any,
) -> Model:
    """how: None: by plain steps."""
    by = Stepper(norm_net(), local, CPU)
    if scale is not None:
        by.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    for index, batch in enumerate(batches()):
        by.set_rate(index, of=4)
        if how is not None:
            one_step(by, entropy, views(batch), how, **given)
            continue
        with by.autocast():
            value = entropy(by.net, batch)
        by.step(value)
    return tensors_of(by.net)


def constant(value: bool) -> Callable[[Model], Masks]:
    return lambda gradient: {
        name: torch.full(g.shape, value, dtype=torch.bool) for name, g in gradient.items()
    }


@pytest.mark.parametrize("local", LOCALS.values(), ids=LOCALS)
def test_without_a_perturbation_it_is_the_base_optimizer(local: Local) -> None:
    plain = trained(local, None)
    assert same(trained(local, Sharpness(rho=0)), plain)
    assert same(trained(local, Sharpness(rho=0), views=noisy), plain)
    assert same(trained(local, Sharpness(), mask=constant(False), views=noisy), plain)
    assert not same(trained(local, Sharpness()), plain)


@pytest.mark.parametrize("local", LOCALS.values(), ids=LOCALS)
def test_the_whole_mask_is_asam(local: Local) -> None:
    asam = trained(local, Sharpness())
    assert same(trained(local, Sharpness(), mask=constant(True)), asam)
    every = Sparsity(top=1.0)
    sparse = SparseMask(every, None, None, update=True, rng=rng())
    assert same(trained(local, Sharpness(), mask=sparse), asam)
    tight = SparseMask(Sparsity(), None, None, update=True, rng=rng())
    assert not same(trained(local, Sharpness(), mask=tight), asam)


def literal(T: Callable[[str, Tensor], Tensor], rho: float, lr: float) -> Model:
    """P10 with plain gradient descent, parameter by parameter."""
    net = norm_net()
    for batch in batches():
        running = {name: b.clone() for name, b in net.named_buffers()}
        entropy(net, batch).backward()
        named = dict(net.named_parameters())
        g = {name: p.grad.clone() for name, p in named.items() if p.grad is not None}
        w = values_of(net)
        n = math.sqrt(sum(float((T(name, w[name]) * g[name]).double().square().sum()) for name in w))
        with torch.no_grad():
            for name, p in named.items():
                p.add_(rho * T(name, w[name]) ** 2 * g[name] / n)
            for name, b in net.named_buffers():
                b.copy_(running[name])
        net.zero_grad()
        entropy(net, batch).backward()
        with torch.no_grad():
            for name, p in named.items():
                assert p.grad is not None
                p.copy_(w[name] - lr * p.grad)
        net.zero_grad()
    return tensors_of(net)


def test_it_is_the_literal_sam_and_asam() -> None:
    sam = literal(lambda _, w: torch.ones_like(w), 0.7, 0.1)
    close(trained(SGD, Sharpness(scaled="none")), sam)
    asam = literal(lambda name, w: w.abs() + 1e-3 if "weight" in name else torch.ones_like(w), 0.7, 0.1)
    close(trained(SGD, Sharpness()), asam)
    layers = literal(
        lambda name, w: w.abs() + 0.01 if name in ("0.weight", "4.weight") else torch.ones_like(w), 0.2, 0.1
    )
    close(trained(SGD, Sharpness(rho=0.2, eta=0.01, scaled="layers")), layers)


def test_asam_with_T_of_one_is_sam() -> None:
    w = {"a": torch.randn(4, 3, generator=rng()), "b": torch.randn(3, generator=rng(1))}
    g = {"a": torch.randn(4, 3, generator=rng(2)), "b": torch.randn(3, generator=rng(3))}
    sam = perturbation(w, g, Sharpness(scaled="none"), ())
    signs = {name: value.sign() for name, value in w.items()}
    close(perturbation(signs, g, Sharpness(eta=0.0), w), sam)
    length = math.sqrt(sum(float(value.square().sum()) for value in sam.values()))
    assert length == pytest.approx(0.7, abs=1e-6)


@pytest.mark.parametrize("name", nets.REGISTRY)
def test_weights_of_modules_are_those_that_published_code_finds_by_name(name: str) -> None:
    net = nets.build(name, {}, in_channels=1, classes=3, spatial_dims=2, seed=0, initial=False)
    assert scaled_names(net, "name") == {name for name, _ in net.named_parameters() if "weight" in name}


def test_which_parameters_are_scaled() -> None:
    net = norm_net()
    assert scaled_names(net, "name") == {"0.weight", "1.weight", "4.weight"}
    assert scaled_names(net, "layers") == {"0.weight", "4.weight"}
    assert scaled_names(net, "none") == frozenset()
    up = nn.ConvTranspose3d(1, 1, 2)
    assert scaled_names(up, "layers") == {"weight"}


def test_a_gradient_of_zero_moves_nothing() -> None:
    w = {"weight": torch.ones(3)}
    assert torch.equal(perturbation(w, {"weight": torch.zeros(3)}, Sharpness(), w)["weight"], torch.zeros(3))


# ------------------------------------------------------------------------------------------------ the step's machinery


def test_the_scale_of_the_loss_changes_nothing() -> None:
    local = Local(optimizer="sgd", lr=0.05, clip=0.3)
    seen: list[Model] = []

    def mask(gradient: Model) -> Masks:
        seen.append({name: g.clone() for name, g in gradient.items()})
        return top(gradient, 0.5)

    plain = trained(local, Sharpness(), mask=mask)
    close(trained(local, Sharpness(), mask=mask, scale=1024.0), plain)
    for before, after in zip(seen[:3], seen[3:], strict=True):
        close(after, before)
        assert math.sqrt(sum(float(g.square().sum()) for g in before.values())) <= 0.3 + 1e-6


def test_an_overflow_lowers_the_scale_and_moves_nothing() -> None:
    net, (batch, *_) = norm_net(), batches()
    before = values_of(net)
    by = Stepper(net, SGD, CPU)
    by.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    sharp, masks = Sharp(by, Sharpness()), SparseMask(Sparsity(), None, None, update=True, rng=rng())

    def loss(net: nn.Module, batch: Batch) -> Tensor:
        return entropy(net, batch) * 1e20

    _, g, eps = sharp.ascend(loss, batch)
    assert g == eps == {} and masks(g) == {} and masks.memory() == {}
    sharp.step(loss, batch, eps, masks(g))
    assert by.scaler.get_scale() == 2.0**125
    assert same(values_of(net), before)


def test_weights_and_buffers_come_back_when_the_loss_fails() -> None:
    net, (batch, *_) = norm_net(), batches()
    calls: list[Model] = []

    def fails(net: nn.Module, batch: Batch) -> Tensor:
        calls.append(values_of(net))
        if len(calls) == 2:
            raise RuntimeError("no")
        return entropy(net, batch)

    before = tensors_of(net)
    with pytest.raises(RuntimeError, match="no"):
        one_step(Stepper(net, SGD, CPU), fails, (batch, batch), Sharpness())
    assert same(tensors_of(net), before)
    assert not same(calls[0], calls[1])


def test_terms_are_of_the_descent_and_ascent_is_told() -> None:
    net, (batch, *_) = norm_net(), batches()

    def terms(net: nn.Module, batch: Batch) -> dict[str, Tensor]:
        value = entropy(net, batch)
        return {"a": value, "b": 2 * value}

    ascent, _ = noisy(batch)
    expected, clean = (3 * entropy(copy.deepcopy(net), seen).detach() for seen in (ascent, batch))
    told = one_step(Stepper(net, SGD, CPU), terms, noisy(batch), Sharpness())
    assert set(told) == {"loss", "a", "b", "ascent"}
    assert torch.equal(told["ascent"], expected)
    assert torch.equal(told["loss"], told["a"] + told["b"])
    assert not torch.equal(told["loss"], clean)
    assert not any(value.requires_grad for value in told.values())


def test_ratios_are_equation_10() -> None:
    plain = {"a": torch.tensor([1.0, -2.0, 0.0, 4.0]), "b": torch.tensor([[0.0, 1.0]])}
    moved = {"a": torch.tensor([3.0, -3.0, 0.0, 4.0]), "b": torch.tensor([[0.5, 1.0 - math.e]])}
    # |change| / |plain|: 2, 1/2, unchanged, unchanged, beyond all, e
    found = ratios(plain, moved)
    assert float(found["steeper"]) == pytest.approx(3 / 6)
    every = sorted([math.log(2), math.log(0.5), -FARTHEST, -FARTHEST, FARTHEST, 1.0])
    for name, q in RATIOS.items():
        assert float(found[name]) == pytest.approx(every[round(q * 5)], abs=1e-6), name
    with pytest.raises(NameMismatch):
        ratios(plain, {"a": moved["a"]})


@pytest.mark.parametrize("local", LOCALS.values(), ids=LOCALS)
@pytest.mark.parametrize("how", [Sharpness(), Sharpness(share=0.8)], ids=["whole", "share"])
def test_ratios_change_no_weight(local: Local, how: Sharpness) -> None:
    plain = trained(local, how, views=noisy)
    assert same(trained(local, how, views=noisy, measure=True), plain)


def test_ratios_are_of_the_descents_batch_before_clipping() -> None:
    (batch, *_), how = batches(), Sharpness(rho=0.5)
    told = {}
    for clip in (None, 1e-3):
        local = dataclasses.replace(SGD, clip=clip)
        told[clip] = one_step(Stepper(norm_net(), local, CPU), entropy, noisy(batch), how, measure=True)
    net = norm_net()
    values = dict(net.named_parameters())
    g = dict(
        zip(values, torch.autograd.grad(entropy(net, noisy(batch)[0]), list(values.values())), strict=True)
    )
    base = torch.autograd.grad(entropy(net, batch), list(values.values()))
    eps = perturbation({n: p.detach() for n, p in values.items()}, g, how, scaled_names(net, "name"))
    with torch.no_grad():
        for name, p in values.items():
            p.add_(eps[name])
    after = torch.autograd.grad(entropy(net, batch), list(values.values()))
    expected = ratios(dict(zip(values, base, strict=True)), dict(zip(values, after, strict=True)))
    for name, value in expected.items():
        assert told[None][name] == pytest.approx(float(value), abs=1e-5), name
    # the clipped ascent is a little shorter by `tiny` alone
    assert float(told[1e-3]["steeper"]) == pytest.approx(float(expected["steeper"]), abs=0.05), (
        "not 1, as against a clipped one"
    )
    with pytest.raises(FederationError, match="fp16"):
        by = Stepper(net, SGD, CPU)
        by.local = dataclasses.replace(SGD, precision="fp16")
        Sharp(by, how, measure=True)


def test_the_mixture_is_clipped_and_neither_of_its_parts_before() -> None:
    """share: 0.8 of the gradient at w + eps and 0.2 of that at w, both far beyond the clip."""
    (batch, *_), how, net = batches(), Sharpness(rho=0.5, share=0.8), norm_net()
    start = values_of(net)
    one_step(Stepper(net, dataclasses.replace(SGD, clip=1e-3), CPU), entropy, (batch, batch), how)
    moved = {name: p.detach() - start[name] for name, p in net.named_parameters()}
    again = norm_net()
    values = dict(again.named_parameters())

    def gradient() -> Model:
        return dict(
            zip(values, torch.autograd.grad(entropy(again, batch), list(values.values())), strict=True)
        )

    plain = gradient()
    eps = perturbation({n: p.detach() for n, p in values.items()}, plain, how, scaled_names(again, "name"))
    with torch.no_grad():
        for name, p in values.items():
            p.add_(eps[name])
    steep = gradient()
    mixed = {name: 0.8 * steep[name] + 0.2 * plain[name] for name in values}
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in mixed.values()))
    assert norm > 0.1
    for name, step in moved.items():
        torch.testing.assert_close(step, -SGD.lr * 1e-3 / norm * mixed[name], atol=2e-7, rtol=1e-3)


def test_what_is_not_trained_is_not_perturbed() -> None:
    net, (batch, *_) = norm_net(), batches()
    seen: list[Model] = []

    def loss(net: nn.Module, batch: Batch) -> Tensor:
        seen.append(values_of(net))
        return entropy(net, batch)

    idle = nn.Parameter(torch.ones(2))
    net.register_parameter("idle_weight", idle)
    optimizer = torch.optim.SGD([idle, *net[4].parameters()], lr=0.1)  # type: ignore[index]
    given: list[Model] = []

    def mask(gradient: Model) -> Masks:
        given.append(gradient)
        return constant(True)(gradient)

    one_step(Stepper(net, SGD, CPU, optimizer=optimizer), loss, (batch, batch), Sharpness(), mask)
    moved = {name for name in seen[0] if not torch.equal(seen[0][name], seen[1][name])}
    assert moved == {"4.weight", "4.bias"}
    assert set(given[0]) == {"4.weight", "4.bias", "idle_weight"}
    assert torch.equal(given[0]["idle_weight"], torch.zeros(2)) and torch.equal(idle, torch.ones(2))


def test_a_random_direction_is_as_long_as_the_perturbation() -> None:
    eps = {"a": torch.randn(30, 20, generator=rng()), "b": torch.zeros(7)}
    drawn = random_direction(eps, rng(1))
    lengths = [float(torch.cat([v.flatten() for v in x.values()]).norm()) for x in (eps, drawn)]
    assert lengths[0] == pytest.approx(lengths[1], rel=1e-5)
    assert same(drawn, random_direction(eps, rng(1))) and not same(drawn, random_direction(eps, rng(2)))
    assert bool((drawn["b"] != 0).all())
    how = Sharpness(direction="random")
    with pytest.raises(FederationError, match="no generator"):
        Sharp(Stepper(norm_net(), SGD, CPU), how)
    random = trained(SGD, how, rng=(first := rng()))
    assert not same(random, trained(SGD, Sharpness()))
    assert same(random, trained(SGD, how, rng=rng())) and not torch.equal(
        first.get_state(), rng().get_state()
    )


# ------------------------------------------------------------------------------------------------------------- masks


def scores(seed: int, ties: bool = False) -> Model:
    g = rng(seed)
    shapes = {"w": (6, 5, 3), "b": (7,), "scalar": (), "none": (0,), "a": (40,)}
    made = {name: torch.randn(shape, generator=g) for name, shape in shapes.items()}
    return {name: value.round() if ties else value for name, value in made.items()}


def places(mask: Masks) -> set[int]:
    flat = torch.cat([m.reshape(-1) for m in mask.values()])
    return set(flat.nonzero()[:, 0].tolist())


@pytest.mark.parametrize("by_value", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.004, 0.1, 0.4, 0.99, 1.0])
@pytest.mark.parametrize("ties", [False, True])
def test_top_is_the_literal_top(share: float, ties: bool, by_value: bool) -> None:
    given = scores(3, ties)
    flat = torch.cat([v.reshape(-1) for v in given.values()]).tolist()
    rank = sorted(range(len(flat)), key=lambda i: (-(flat[i] if by_value else abs(flat[i])), i))
    mask = top(given, share, by_value=by_value)
    assert places(mask) == set(rank[: int(share * len(flat))])
    assert {name: (m.dtype, m.shape) for name, m in mask.items()} == {
        name: (torch.bool, v.shape) for name, v in given.items()
    }


def test_sites_disagree_where_some_but_not_all_have_a_place() -> None:
    masks = [top(scores(seed), 0.4) for seed in range(3)]
    some, every = (f(*map(places, masks)) for f in (set.union, set.intersection))
    assert places(disagreement(masks)) == some - every
    assert places(disagreement(iter(masks[::-1]))) == some - every
    assert not places(disagreement([masks[0]] * 3))
    a, b = ({"w": torch.tensor(x)} for x in ([True, False, False], [False, False, True]))
    assert places(disagreement([a, b])) == {0, 2}  # disjoint masks: the union
    assert not places(disagreement([a]))


@pytest.mark.parametrize("draw", ["all", "tensor"])
@pytest.mark.parametrize("share", [0.0, 0.05, 0.1, 0.5, 1.0])
def test_the_extra_mask_is_drawn_where_sites_disagree(draw: Any, share: float) -> None:
    for seed in range(5):
        masks = [top(scores(seed + i), 0.4) for i in range(3)]
        local, others = masks[0], disagreement(masks)
        made = extra_mask(local, others, share, rng(seed), draw=draw)
        assert not places(made) & places(local) and places(made) <= places(others)  # I7
        groups = [list(local)] if draw == "all" else [[name] for name in local]
        for names in groups:
            free = sum(int((others[n] & ~local[n]).sum()) for n in names)
            size = sum(local[n].numel() for n in names)
            assert sum(int(made[n].sum()) for n in names) == min(int(share * size), free)
        assert same(made, extra_mask(local, others, share, rng(seed), draw=draw))
        union = either(local, made)
        assert places(union) == places(local) | places(made)


def test_the_extra_mask_is_drawn_evenly() -> None:
    local = {"a": torch.zeros(4, dtype=torch.bool), "b": torch.zeros(16, dtype=torch.bool)}
    local["b"][3] = True
    everywhere = {name: torch.ones_like(m) for name, m in local.items()}
    g, counts = rng(), torch.zeros(20)
    for _ in range(2000):
        made = extra_mask(local, everywhere, 0.25, g)
        counts += torch.cat([m.float() for m in made.values()])
    assert counts[7] == 0
    expected = 2000 * 5 / 19
    assert bool((counts[torch.arange(20) != 7] - expected).abs().max() < 5 * math.sqrt(expected))


def test_momentum_is_equation_11() -> None:
    old, g = scores(1), scores(2)
    close(momentum(old, g, 0.9), {name: 0.9 * old[name] + 0.1 * g[name] for name in g})
    with pytest.raises(NameMismatch, match="momentum"):
        momentum({"other": torch.ones(1)}, g, 0.9)


def play(how: Sparsity, rounds: list[tuple[bool, int]], disagree: Masks | None) -> list[tuple[Masks, ...]]:
    """The masks of each batch of rounds (update, batches), through the wire between them, and what is sent."""
    kept: Any = None
    said = []
    for index, (update, count) in enumerate(rounds):
        masker = SparseMask(how, kept, disagree, update=update, rng=rng(index))
        masks = [masker(scores(10 * index + b)) for b in range(count)]
        sent = wire.decode(wire.encode(dict(masker.sent())))
        kept = wire.decode(wire.encode(masker.memory()))
        said.append((*masks, unpack_bits(sent, scores(0))))
    return said


def test_the_masks_of_rounds_are_those_of_the_paper() -> None:
    others = disagreement([top(scores(seed), 0.4) for seed in (7, 8)])
    first, quiet, update, later = play(Sparsity(), [(False, 2), (False, 2), (True, 2), (False, 1)], others)
    for b in (0, 1):
        assert same(first[b], top(scores(b), 0.4))
    assert same(first[2], top(scores(1), 0.4))  # G_mo is the last gradient of the first round
    assert same(quiet[0], first[1]) and same(quiet[1], first[1]) and same(quiet[2], first[2])
    G = scores(1)
    for b in (0, 1):
        g = scores(20 + b)
        G = {name: 0.9 * G[name] + 0.1 * g[name] for name in g}
        local = top(g, 0.4)
        assert places(local) < places(update[b])
        extra = places(update[b]) - places(local)
        assert extra <= places(others) and len(extra) == min(
            int(0.1 * 138), len(places(others) - places(local))
        )
    assert same(update[2], top(G, 0.4))
    assert same(later[0], update[1]) and same(later[1], update[2])


def test_the_masks_of_rounds_as_published_code_has_them() -> None:
    how = Sparsity(score="momentum", draw="tensor", history="momentum")
    everywhere = constant(True)(scores(0))
    first, update, later = play(how, [(True, 1), (True, 1), (False, 1)], everywhere)
    assert same(first[0], top(scores(0), 0.4))
    G = {name: 0.9 * scores(0)[name] + 0.1 * g.abs() for name, g in scores(10).items()}
    by_value = top(G, 0.4, by_value=True)
    assert places(update[0]) > places(by_value) and same(update[1], by_value)
    assert same(later[0], by_value)
    alone = play(how, [(True, 1), (True, 1)], None)
    assert same(alone[1][0], by_value)  # no site has sent a mask: nothing extra


def test_a_published_update() -> None:
    v = vectors("ufps_sparse_masks")
    gradient, after = under(v, "upd/grad/"), under(v, "upd/momentum/")
    others = {name: m.bool() for name, m in under(v, "global_mask_paper/").items()}
    how = Sparsity(score="momentum", draw="tensor")
    kept: Any = {"momentum": under(v, "init/momentum/"), "mask": pack_bits(top(gradient, 0.4))}
    masker = SparseMask(how, kept, others, update=True, rng=rng())
    mask = masker(gradient)
    close(masker.G_mo, after)
    local = top(after, 0.4, by_value=True)
    close(local, under(v, "upd/topk/"))
    published = {name: m.bool() for name, m in under(v, "upd/mask/").items()}
    for name, m in published.items():
        extra = m & ~local[name]
        assert bool((extra <= others[name]).all())
        assert int(extra.sum()) == int((mask[name] & ~local[name]).sum()), name
    w = under(vectors("asam_step"), "ufps_asam_nomask/w0/")
    eps = perturbation(w, gradient, Sharpness(), [name for name in w if "weight" in name])
    close(masked(eps, published), under(v, "upd/eps/"))


def test_nothing_is_kept_or_sent_before_a_gradient() -> None:
    masker = SparseMask(Sparsity(), None, None, update=True, rng=rng())
    assert masker.memory() == {} and masker.sent() == {}
    assert SparseMask(Sparsity(), masker.memory(), None, update=True, rng=rng()).first


def test_bits() -> None:
    masks = top(scores(4), 0.4)
    packed = pack_bits(masks)
    assert n_bytes(packed) == sum(math.ceil(m.numel() / 8) for m in masks.values())
    assert packed["b"].tolist() == [sum(int(bit) << i for i, bit in enumerate(masks["b"]))]
    assert same(unpack_bits(wire.decode(wire.encode(dict(packed))), scores(0)), masks)
    like = scores(0)
    for broken, error in (
        (None, WireError),
        ({}, NameMismatch),
        (packed | {"more": packed["b"]}, NameMismatch),
        (packed | {"b": packed["w"]}, WireError),
        (packed | {"b": packed["b"].int()}, WireError),
        (packed | {"b": 3}, WireError),
        (packed | {"b": torch.tensor([128], dtype=torch.uint8)}, WireError),
    ):
        with pytest.raises(error, match="unpacking masks"):
            unpack_bits(broken, like)  # type: ignore[arg-type]


def test_errors_say_what_was_asked() -> None:
    mask = top(scores(0), 0.4)
    floats = {name: m.float() for name, m in mask.items()}
    for call, error, text in (
        (lambda: top(scores(0), 1.5), FederationError, "share of 0 to 1"),
        (lambda: top({"w": torch.tensor([1.0, math.nan])}, 0.5), FloatingPointError, "not finite"),
        (lambda: extra_mask(mask, mask, -0.1, rng()), FederationError, "share of 0 to 1"),
        (lambda: extra_mask(mask, floats, 0.1, rng()), NameMismatch, "global mask"),
        (lambda: extra_mask(floats, floats, 0.1, rng()), NameMismatch, "extra mask"),
        (lambda: disagreement([]), FederationError, "no site"),
        (lambda: disagreement([floats]), NameMismatch, "mask 1"),
        (lambda: disagreement([mask, floats]), NameMismatch, "mask 2"),
        (lambda: either(mask, floats), NameMismatch, "union"),
        (lambda: masked(scores(0), floats), NameMismatch, "mask of a perturbation"),
        (lambda: masked(scores(0), {"w": mask["w"]}), NameMismatch, "mask of a perturbation"),
        (lambda: pack_bits(floats), NameMismatch, "packing"),
        (lambda: perturbation(scores(0), {}, Sharpness(), ()), NameMismatch, "perturbation"),
    ):
        with pytest.raises(error, match=text):
            call()


def test_all_passes_run_in_the_precision_of_the_steps() -> None:
    """Ascent, the pass at the weights themselves, descent."""
    kinds: list[torch.dtype] = []

    def loss(net: nn.Module, batch: Batch) -> Tensor:
        kinds.append(net(batch.image).dtype)
        return entropy(net, batch)

    batch, *_ = batches()
    sharp = Sharp(Stepper(norm_net(), Local(precision="bf16"), CPU), Sharpness(share=0.5))
    _, _, eps = sharp.ascend(loss, batch)
    sharp.step(loss, batch, eps)
    assert kinds == [torch.bfloat16] * 3


def test_ratios_are_of_the_gradient_at_the_perturbed_weights_whatever_its_share() -> None:
    batch, *_ = batches()
    found = []
    for share in (1.0, 0.5, 0.0):
        sharp = Sharp(Stepper(norm_net(), Local(), CPU), Sharpness(share=share), measure=True)
        _, _, eps = sharp.ascend(entropy, batch)
        told = sharp.step(entropy, batch, eps)
        found.append({name: value for name, value in told.items() if name != "loss"})
    assert found[0] == found[1] == found[2] and found[0]["ratio_half"] > -20
