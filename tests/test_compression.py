"""compression.py: the kinds against their equations, error feedback, exactness on the wire, hostile bytes."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fedatlas import nets
from fedatlas.core.errors import FederationError, NameMismatch, WireError
from fedatlas.core.options import from_dict
from fedatlas.core.tensors import n_bytes, tensors_of
from fedatlas.transport import wire
from fedatlas.transport.protection.compression import (
    Comm,
    compress,
    largest,
    restore,
    with_feedback,
)
from fedatlas.transport.protection.difference import apply, difference

KINDS = ("bf16", "int8", "topk")
Model = dict[str, Tensor]


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def delta(seed: int = 0, spread: float = 1.0) -> Model:
    """A difference with every kind of shape, names not sorted."""
    g = rng(seed)
    shapes = {
        "w": (6, 5, 3),
        "b": (7,),
        "a.scalar": (),
        "none": (0,),
        "no rows": (0, 3),
        "no columns": (3, 0),
    }
    made = {name: torch.randn(shape, generator=g) * spread for name, shape in shapes.items()}
    made["table"] = torch.randn(40, 30, generator=g) * torch.logspace(-6, 3, 40)[:, None]
    made["table"][4] = 0
    made["count"] = torch.tensor(2**53 + 1 + seed)
    made["mask"] = torch.tensor([True, False, seed == 0])
    made["other"] = torch.tensor([[2**31 - 1, -5]], dtype=torch.int32)
    return made


def unet(norm: str = "batch") -> Model:
    options = {"norm": norm}
    return tensors_of(nets.build("unet", options, in_channels=1, classes=5, spatial_dims=3, seed=1))


def over_the_wire(tree: Any) -> Any:
    return wire.decode(wire.encode(tree))


def floats(values: Model) -> Model:
    return {name: tensor for name, tensor in values.items() if tensor.is_floating_point()}


def assert_same_bits(a: Model, b: Model) -> None:
    assert list(a) == list(b)
    for name, tensor in a.items():
        assert (tensor.dtype, tensor.shape) == (b[name].dtype, b[name].shape), name
        raw = [x.contiguous().reshape(-1).view(torch.uint8) for x in (tensor, b[name])]
        assert torch.equal(*raw), name


# the equations, number by number


def slow_bf16(tensor: Tensor, _: float) -> Tensor:
    """To nearest, of two equally near the one with an even last bit, in exact arithmetic on 8-bit mantissas."""

    def one(x: float) -> float:
        if x == 0:
            return x
        mantissa, exponent = math.frexp(x)
        return math.ldexp(round(math.ldexp(mantissa, 8)), exponent - 8)

    return torch.tensor([one(x) for x in tensor.reshape(-1).tolist()]).reshape(tensor.shape)


def slow_int8(tensor: Tensor, _: float) -> Tensor:
    rows = list(tensor) if tensor.dim() >= 2 else [tensor]
    done = []
    for row in rows:
        most = max((abs(x) for x in row.reshape(-1).tolist()), default=0.0)
        scale = torch.tensor(most) / 127
        codes = [
            torch.tensor(float(round(float(torch.tensor(x) / scale)))) if scale > 0 else torch.tensor(0.0)
            for x in row.reshape(-1).tolist()
        ]
        values = [code * scale for code in codes]
        done.append(torch.stack(values).reshape(row.shape) if values else row)
    return torch.stack(done).reshape(tensor.shape) if done else tensor


def slow_topk(tensor: Tensor, fraction: float) -> Tensor:
    values = tensor.reshape(-1).tolist()
    count = max(1, math.ceil(fraction * len(values)))
    if 6 * count >= 4 * len(values):
        return tensor
    order = sorted(range(len(values)), key=lambda i: (-abs(values[i]), i))
    kept = torch.zeros(len(values))
    for i in order[:count]:
        kept[i] = slow_bf16(torch.tensor(values[i]), 0.0)
    return kept.reshape(tensor.shape)


SLOW: dict[str, Callable[[Tensor, float], Tensor]] = {
    "bf16": slow_bf16,
    "int8": slow_int8,
    "topk": slow_topk,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fraction", [0.01, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_restored_is_what_the_equations_say(kind: str, fraction: float, seed: int) -> None:
    given = delta(seed)
    restored = restore(over_the_wire(compress(given, kind, fraction=fraction)), given)
    for name, tensor in floats(given).items():
        assert torch.equal(restored[name], SLOW[kind](tensor, fraction)), name


@pytest.mark.parametrize("kind", KINDS)
def test_sender_and_receiver_restore_the_same_bits(kind: str) -> None:
    given = delta()
    packed = compress(given, kind, fraction=0.1)
    here, there = restore(packed, given), restore(over_the_wire(packed), given)
    assert_same_bits(here, there)
    old = {name: torch.ones_like(tensor) for name, tensor in given.items()}
    assert_same_bits(apply(old, here), apply(old, there))


@pytest.mark.parametrize("kind", KINDS)
def test_integers_and_masks_travel_exactly_as_new_values(kind: str) -> None:
    new, old = delta(0), delta(1)
    restored = restore(over_the_wire(compress(difference(new, old), kind, fraction=0.01)), old)
    model = apply(old, restored)
    for name in ("count", "mask", "other"):
        assert torch.equal(model[name], new[name]) and model[name].dtype == new[name].dtype
    assert int(model["count"]) == 2**53 + 1


def test_error_bounds() -> None:
    given = floats(delta())
    by = {kind: restore(compress(given, kind, fraction=0.1), given) for kind in KINDS}
    for name, tensor in given.items():
        if tensor.numel() == 0:
            continue
        x = tensor.double()
        assert bool(((by["bf16"][name].double() - x).abs() <= x.abs() * 2**-8).all()), name
        rows = x.reshape(x.shape[0], -1) if x.dim() >= 2 else x.reshape(1, -1)
        most = rows.abs().amax(1, keepdim=True)
        error = (by["int8"][name].double().reshape(rows.shape) - rows).abs()
        assert bool((error <= most / 254 * (1 + 2**-15)).all()), name
        # what topk leaves is no more than a random choice of as many would leave, but for the bfloat16
        left = (by["topk"][name].double() - x).square().sum()
        assert float(left) <= float(x.square().sum()) * (0.9 + 2**-15), name


def test_bf16_rounds_halves_to_even() -> None:
    halves = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 1 + 2**-8 + 2**-20])
    restored = restore(compress({"x": halves}, "bf16", fraction=1.0), {"x": halves})["x"]
    assert restored.tolist() == [1.0, 1 + 2**-6, -1.0, 1 + 2**-7]


def test_int8_rounds_halves_to_even() -> None:
    halves = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5])
    restored = restore(compress({"x": halves}, "int8", fraction=1.0), {"x": halves})["x"]
    assert restored.tolist() == [127.0, 0.0, 2.0, 2.0, 0.0, -2.0]


def test_int8_scales_are_of_rows_and_zero_for_rows_of_zeros() -> None:
    given = {"m": torch.tensor([[127.0, 1.0], [0.0, 0.0], [1e-37, -1e-37]]), "v": torch.tensor([254.0, 1.0])}
    packed = compress(given, "int8", fraction=1.0)
    assert isinstance(packed["scales"], Tensor) and isinstance(packed["codes"], Tensor)
    assert packed["scales"].tolist() == [1.0, 0.0, 0.0, 2.0]
    assert packed["codes"].tolist() == [127, 1, 0, 0, 0, 0, 127, 0]


def test_topk_is_exact_where_everything_is_kept() -> None:
    given = delta()
    restored = restore(over_the_wire(compress(given, "topk", fraction=1.0)), given)
    assert_same_bits(restored, given)


def test_topk_takes_the_lower_index_of_equals() -> None:
    flat = torch.tensor([1.0, -2.0, 2.0, -2.0, 0.0, 2.0, -3.0, 1.0])
    assert largest(flat, 3).tolist() == [1, 2, 6]
    assert largest(torch.zeros(9), 4).tolist() == [0, 1, 2, 3]
    assert largest(torch.tensor([-0.0, 0.0, 1e-45, -1e-45]), 1).tolist() == [2]
    ties = torch.randint(-3, 4, (5000,), generator=rng()).float()
    for count in (1, 17, 2500, 5000):
        order = sorted(range(5000), key=lambda i: (-abs(float(ties[i])), i))[:count]
        assert largest(ties, count).tolist() == sorted(order)


@pytest.mark.parametrize("kind", KINDS)
def test_equal_differences_give_equal_bytes_in_any_order_of_names(kind: str) -> None:
    given = {name: tensor.round() for name, tensor in floats(delta()).items()}
    turned = dict(reversed(given.items()))
    bytes_of = [wire.encode(compress(values, kind, fraction=0.2)) for values in (given, given, turned)]
    assert bytes_of[0] == bytes_of[1] == bytes_of[2]
    restored = restore(wire.decode(bytes_of[0]), turned)
    assert list(restored) == list(turned)


@pytest.mark.parametrize("kind", KINDS)
def test_layout_in_memory_does_not_matter(kind: str) -> None:
    wide = torch.randn(8, 6, 5, generator=rng())
    strided = wide.permute(2, 0, 1)
    a = compress({"x": strided}, kind, fraction=0.2)
    b = compress({"x": strided.contiguous()}, kind, fraction=0.2)
    assert wire.encode(a) == wire.encode(b)


# error feedback


@pytest.mark.parametrize("kind", KINDS)
def test_the_residual_is_exactly_what_was_left_out(kind: str) -> None:
    given = delta()
    packed, residual = with_feedback(given, None, kind, fraction=0.05)
    assert list(residual) == list(floats(given))
    restored = restore(over_the_wire(packed), given)
    for name, tensor in floats(given).items():
        assert residual[name].dtype == torch.float32
        assert torch.equal(tensor.double() - restored[name].double(), residual[name].double()), name
    before = {name: tensor.clone() for name, tensor in residual.items()}
    again, second = with_feedback(given, residual, kind, fraction=0.05)
    assert_same_bits(before, residual)
    assert_same_bits(given, delta())
    restored = restore(over_the_wire(again), given)
    for name, tensor in floats(given).items():
        total = tensor + residual[name]
        assert torch.equal(total.double() - restored[name].double(), second[name].double()), name


@pytest.mark.parametrize(("kind", "fraction"), [("bf16", 1.0), ("int8", 1.0), ("topk", 0.02)])
def test_with_feedback_the_sum_of_what_arrives_is_the_sum_of_what_was_meant(
    kind: str, fraction: float
) -> None:
    step = {"w": torch.randn(20, 50, generator=rng()), "b": torch.randn(30, generator=rng(1))}
    steps = 400
    arrived = {name: torch.zeros(tensor.shape, dtype=torch.float64) for name, tensor in step.items()}
    alone = {name: tensor.clone() for name, tensor in arrived.items()}
    residual = None
    gaps = []
    for count in range(1, steps + 1):
        packed, residual = with_feedback(step, residual, kind, fraction=fraction)
        for name, tensor in restore(packed, step).items():
            arrived[name] += tensor
        for name, tensor in restore(compress(step, kind, fraction=fraction), step).items():
            alone[name] += tensor
        meant = {name: tensor.double() * count for name, tensor in step.items()}
        gaps.append(max(float((arrived[n] / count - step[n]).abs().max()) for n in step))
        for name in step:
            rounding = count * 2**-22 * float(meant[name].abs().max())
            assert float((arrived[name] + residual[name] - meant[name]).abs().max()) <= rounding
    assert gaps[-1] < gaps[9] / 10
    without = max(float((alone[n] / steps - step[n]).abs().max()) for n in step)
    assert gaps[-1] < without / 10


@pytest.mark.parametrize("kind", KINDS)
def test_running_statistics_follow_those_of_the_site_and_are_not_fed_back(kind: str) -> None:
    """In every round a site measures them anew: the receiver's come to be these, and what was left out is not counted again."""
    measured = {"norm.running_var": torch.rand(500, generator=rng()) + 0.01, "norm.weight": torch.ones(500)}
    held = {"norm.running_var": torch.ones(500), "norm.weight": torch.ones(500)}
    residual = None
    for _ in range(30):
        packed, residual = with_feedback(difference(measured, held), residual, kind, fraction=0.01)
        held = apply(held, restore(packed, held))
        assert list(residual) == ["norm.weight"]
        assert float(held["norm.running_var"].min()) > 0
    near = (held["norm.running_var"] - measured["norm.running_var"]).abs()
    assert float(near.max()) <= 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_a_variance_that_became_small_stays_positive(kind: str) -> None:
    """Beside one that changed much: rounded by the largest change it would come out as -3.9 by int8."""
    held = {"norm.running_var": torch.tensor([1000.0, 4.0, 2.995]), "norm.running_mean": torch.zeros(3)}
    measured = {"norm.running_var": torch.tensor([1.0, 0.05, 0.001]), "norm.running_mean": torch.ones(3)}
    packed = compress(difference(measured, held), kind, fraction=0.01)
    restored = apply(held, restore(over_the_wire(packed), held))
    for name in held:
        assert torch.allclose(restored[name], measured[name], rtol=1e-3), name


def test_a_statistic_that_is_not_finite_is_refused() -> None:
    held = {"norm.running_var": torch.ones(3)}
    with pytest.raises(FloatingPointError, match="norm.running_var"):
        compress({"norm.running_var": torch.tensor([1.0, math.inf, 1.0])}, "int8", fraction=0.01)
    packed = compress(held, "int8", fraction=0.01)
    packed["exact"]["float32"][1] = math.nan  # type: ignore[index, call-overload]
    with pytest.raises(WireError, match="norm.running_var holds a number that is not finite"):
        restore(packed, held)


def test_a_residual_of_another_model_is_refused() -> None:
    given = delta()
    for change in (
        {"w": torch.zeros(6, 5, 2)},
        {"more": torch.zeros(1)},
        {"w": torch.zeros(6, 5, 3, dtype=torch.float64)},
    ):
        _, residual = with_feedback(given, None, "int8", fraction=1.0)
        with pytest.raises(NameMismatch, match="earlier rounds"):
            with_feedback(given, residual | change, "int8", fraction=1.0)


# differences


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_models_of_other_floating_dtypes(dtype: torch.dtype, kind: str) -> None:
    g = rng()
    old = {"w": torch.randn(9, 8, generator=g).to(dtype), "s": torch.tensor(0.5, dtype=dtype)}
    new = {name: tensor + torch.randn(tensor.shape, generator=g) * 0.1 for name, tensor in old.items()}
    new = {name: tensor.to(dtype) for name, tensor in new.items()}
    change = difference(new, old)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert all(tensor.dtype == wide for tensor in change.values())
    assert_same_bits(apply(old, {name: torch.zeros_like(tensor) for name, tensor in change.items()}), old)
    restored = restore(over_the_wire(compress(change, kind, fraction=1.0)), old)
    assert all(tensor.dtype == torch.float32 for tensor in restored.values())
    model = apply(old, restored)
    for name, tensor in new.items():
        literal = (old[name].double() + restored[name].double()).float().to(dtype)
        if dtype == torch.float64:
            literal = old[name] + restored[name].double()
        assert model[name].dtype == dtype
        assert torch.equal(model[name], literal)
        assert torch.allclose(model[name].double(), tensor.double(), atol=0.01)


def test_a_difference_of_float64_is_taken_before_it_is_rounded() -> None:
    new, old = torch.tensor(1 + 2.0**-40, dtype=torch.float64), torch.tensor(1.0, dtype=torch.float64)
    change = difference({"x": new}, {"x": old})
    assert float(change["x"]) == 2.0**-40
    assert torch.equal(apply({"x": old}, change)["x"], new)


def test_nothing_given_is_changed_or_shared() -> None:
    new, old = delta(0), delta(1)
    change = difference(new, old)
    packed = over_the_wire(compress(change, "topk", fraction=1.0))
    restored = restore(packed, old)
    model = apply(old, restored)
    kept = {name: tensor.clone() for name, tensor in model.items()}
    for values in (change, restored):
        for tensor in values.values():
            tensor.zero_()
    assert_same_bits(model, kept)
    for tensor in model.values():
        tensor.zero_()
    assert_same_bits(new, delta(0))
    assert_same_bits(old, delta(1))
    assert_same_bits(restore(packed, old), difference(new, old))


def test_models_that_differ_are_refused() -> None:
    new, old = delta(0), delta(1)
    with pytest.raises(NameMismatch, match="missing: b"):
        difference({name: t for name, t in new.items() if name != "b"}, old)
    change = difference(new, old)
    for bad in ({"w": torch.zeros(3)}, {"x": torch.zeros(3)}, {"b": torch.zeros(7, dtype=torch.float64)}):
        with pytest.raises(NameMismatch, match="applying a difference"):
            apply(old, change | bad)


def test_a_sum_that_overflows_is_refused() -> None:
    old = {"x": torch.tensor([6e4], dtype=torch.float16)}
    with pytest.raises(FloatingPointError, match="x: .* not finite in float16"):
        apply(old, {"x": torch.tensor([6e4])})


# what cannot be compressed


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", KINDS)
def test_numbers_that_are_not_finite_are_named(kind: str, bad: float) -> None:
    for name, place in (("table", (3, 7)), ("b", (2,)), ("a.scalar", ())):
        given = delta()
        given[name][place] = bad
        with pytest.raises(FloatingPointError, match=f"{name}: .*not finite"):
            compress(given, kind, fraction=0.01)
        with pytest.raises(FloatingPointError, match=name):
            with_feedback(given, None, kind, fraction=0.01)


@pytest.mark.parametrize("kind", ["bf16", "topk"])
def test_numbers_beyond_bfloat16_are_named(kind: str) -> None:
    given = {"x": torch.zeros(50)}
    given["x"][3] = torch.finfo(torch.float32).max
    with pytest.raises(FloatingPointError, match=f"x: .*range of {kind}"):
        compress(given, kind, fraction=0.01)


def test_the_largest_float32_survives_int8_or_is_named() -> None:
    for value in (3e38, -3.4e38, torch.finfo(torch.float32).max):
        given = {"x": torch.tensor([value, 1.0])}
        try:
            restored = restore(compress(given, "int8", fraction=1.0), given)
        except FloatingPointError as error:
            assert "range of int8" in str(error)
            continue
        assert bool(torch.isfinite(restored["x"]).all())


@pytest.mark.parametrize("kind", KINDS)
def test_subnormal_numbers(kind: str) -> None:
    given = {"x": torch.tensor([1e-45, -1e-40, 1e-38, 0.0, 2e-38] * 4)}
    packed, residual = with_feedback(given, None, kind, fraction=0.1)
    restored = restore(over_the_wire(packed), given)
    assert torch.equal(restored["x"].double() + residual["x"].double(), given["x"].double())


def test_unknown_kinds_and_fractions() -> None:
    with pytest.raises(FederationError, match="'none'; allowed: bf16, int8, topk"):
        compress(delta(), "none", fraction=0.1)
    for fraction in (0.0, -1.0, 1.5, math.nan):
        with pytest.raises(FederationError, match="fraction is"):
            compress(delta(), "topk", fraction=fraction)


def test_options() -> None:
    assert Comm() == Comm(up="none", down="none", fraction=0.01, feedback=True)
    assert from_dict(Comm, {"up": "topk", "fraction": 1}, what="comm").fraction == 1.0
    for bad in ({"up": "zip"}, {"fraction": 0}, {"fraction": 1.1}, {"feedbak": True}):
        with pytest.raises(FederationError, match="comm"):
            from_dict(Comm, bad, what="comm")


@pytest.mark.parametrize("kind", KINDS)
def test_models_with_nothing_to_compress(kind: str) -> None:
    for given in ({}, {"none": torch.zeros(0, 4)}, {"count": torch.tensor(3)}, {"s": torch.tensor(2.0)}):
        packed, residual = with_feedback(given, None, kind, fraction=0.01)
        assert_same_bits(restore(over_the_wire(packed), given), given)
        assert set(residual) == set(floats(given))


# bytes


@pytest.mark.parametrize(("kind", "share"), [("bf16", 0.51), ("int8", 0.26), ("topk", 0.021)])
@pytest.mark.parametrize("norm", ["instance", "batch"])
def test_share_of_the_bytes_of_a_real_net(kind: str, share: float, norm: str) -> None:
    model = unet(norm)
    change = {
        name: torch.randn(t.shape, generator=rng()) if t.is_floating_point() else t
        for name, t in model.items()
    }
    packed = compress(change, kind, fraction=0.01)
    sent = len(wire.encode(packed))
    assert sent <= share * n_bytes(model)
    assert len([v for v in packed.values() if isinstance(v, Tensor)]) <= 3
    assert_same_bits(restore(over_the_wire(packed), model), restore(packed, model))


# bytes that were not made by compress


def _set(**fields: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda tree: tree | fields


def _poke(key: str, place: int, value: Any) -> Callable[[dict[str, Any]], Any]:
    def change(tree: dict[str, Any]) -> Any:
        tree[key][place] = value
        return tree

    return change


def _drop(key: str) -> Callable[[dict[str, Any]], Any]:
    return lambda tree: {name: value for name, value in tree.items() if name != key}


HOSTILE: list[tuple[str, Callable[[dict[str, Any]], Any], str]] = [
    ("bf16", lambda tree: None, "not a compressed difference"),
    ("bf16", lambda tree: [tree], "not a compressed difference"),
    ("bf16", lambda tree: torch.zeros(3), "not a compressed difference"),
    ("bf16", _drop("kind"), "not a compressed difference"),
    ("bf16", _set(kind=3), "not a compressed difference"),
    ("bf16", _set(kind="zip"), "'zip'; allowed: bf16, int8, topk"),
    ("bf16", _set(kind="none"), "'none'; allowed"),
    ("bf16", _set(kind="int8"), "got the keys"),
    ("bf16", _set(images=torch.zeros(9)), "got the keys"),
    ("bf16", _drop("exact"), "got the keys"),
    ("bf16", _set(exact=[]), "exact tensors are list"),
    ("bf16", _set(exact={}), "exact tensors are"),
    ("bf16", _set(values=3.0), "values is float"),
    ("bf16", _set(values=torch.zeros(4).bfloat16()), "values is torch.bfloat16"),
    ("bf16", _set(values=torch.zeros(1300)), "values is torch.float32"),
    ("bf16", _poke("values", 5, math.nan), "not finite"),
    ("bf16", _poke("values", -1, -math.inf), "not finite"),
    ("int8", _set(scales=torch.ones(2)), "scales is torch.float32"),
    ("int8", _set(codes=torch.zeros(5)), "codes is torch.float32"),
    ("int8", _poke("codes", 9, -128), "code is -128"),
    ("int8", _poke("scales", 0, math.nan), "scale of a.scalar"),
    ("int8", _poke("scales", 9, math.inf), "scale of table"),
    ("int8", _poke("scales", 9, 1e38), "scale of table"),
    ("int8", _poke("scales", 9, -1.0), "scale of table"),
    ("int8", _poke("scales", 9, 1e-40), "scale of table"),
    ("topk", _set(fraction=0.5), "is torch"),
    ("topk", _set(fraction=math.nan), "fraction is nan"),
    ("topk", _set(fraction=-1.0), "fraction is -1"),
    ("topk", _set(fraction=True), "fraction is True"),
    ("topk", _set(fraction="1"), "fraction is '1'"),
    ("topk", _set(indices=torch.zeros(5)), "indices is"),
    ("topk", _set(values=None), "values is NoneType"),
    ("topk", _set(whole=torch.zeros(2)), "whole is"),
    ("topk", _poke("indices", 0, -1), "indices of b are not ascending within 0 to 6"),
    ("topk", _poke("indices", 0, 7), "indices of b are not ascending within 0 to 6"),
    ("topk", _poke("indices", 5, 2**31 - 1), "indices of table are not ascending"),
    ("topk", lambda tree: tree | {"indices": tree["indices"].flip(0)}, "not ascending"),
    ("topk", _poke("values", 0, math.inf), "b holds a number that is not finite"),
    ("topk", _poke("whole", 0, math.nan), "a.scalar holds a number that is not finite"),
]


@pytest.mark.parametrize(("kind", "change", "text"), HOSTILE)
def test_hostile_payloads_are_refused(kind: str, change: Callable[[Any], Any], text: str) -> None:
    tree = over_the_wire(compress(delta(), kind, fraction=0.05))
    restore(tree, delta())
    with pytest.raises(WireError, match=text) as caught:
        restore(over_the_wire(change(tree)), delta())
    assert len(str(caught.value)) < 500


def test_equal_indices_are_refused() -> None:
    tree = over_the_wire(compress(delta(), "topk", fraction=0.05))
    tree["indices"][6] = tree["indices"][5]
    with pytest.raises(WireError, match="not ascending"):
        restore(tree, delta())


def test_a_bool_that_is_neither_is_refused() -> None:
    tree = over_the_wire(compress(delta(), "bf16", fraction=1.0))
    tree["exact"]["bool"].view(torch.uint8)[0] = 7
    with pytest.raises(WireError, match="neither 0 nor 1"):
        restore(tree, delta())


@pytest.mark.parametrize(
    "change",
    [
        lambda values: values.update(more=torch.zeros(1)),
        lambda values: values.pop("b"),
        lambda values: values.update(renamed=values.pop("b")),
        lambda values: values.update(w=torch.zeros(5, 6, 3)),
        lambda values: values.update(count=torch.tensor(1, dtype=torch.int32)),
        lambda values: values.update(count=torch.tensor(1.0)),
        lambda values: values.update(b=torch.zeros(7, dtype=torch.int64)),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_models_of_another_form_are_refused(kind: str, change: Callable[[Model], Any]) -> None:
    like = delta()
    change(like)
    with pytest.raises(NameMismatch, match="other names, shapes or dtypes"):
        restore(over_the_wire(compress(delta(), kind, fraction=0.1)), like)


@pytest.mark.parametrize("digest", [None, 3, [], "x" * 5000, torch.zeros(2)])
def test_digests_of_other_types_are_refused(digest: Any) -> None:
    tree = compress(delta(), "int8", fraction=1.0)
    with pytest.raises(NameMismatch) as caught:
        restore(tree | {"digest": digest}, delta())
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("kind", KINDS)
def test_any_tree_of_the_right_names_is_restored_or_refused(kind: str) -> None:
    """Every field replaced by every other thing that a wire can carry: refused with a clear error."""
    things: list[Any] = [None, True, -1, 0.5, "x", [], {}, torch.zeros(()), torch.zeros(2, 3), torch.zeros(0)]
    made = compress(delta(), kind, fraction=0.05)
    for key in made:
        for thing in things:
            with pytest.raises((WireError, NameMismatch)):
                restore(over_the_wire(made | {key: thing}), delta())
    for dtype in made["exact"]:  # type: ignore[union-attr]
        for thing in things:
            with pytest.raises((WireError, NameMismatch)):
                restore(made | {"exact": made["exact"] | {dtype: thing}}, delta())  # type: ignore[operator]


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_numbers_are_restored_finite_or_refused(kind: str) -> None:
    """Random bytes in one tensor: never an error of another class, never a number that is not finite."""
    g = rng()
    accepted = 0
    for trial in range(200):
        tree = over_the_wire(compress(delta(), kind, fraction=0.05))
        tensors = [value for value in tree.values() if isinstance(value, Tensor)]
        raw = tensors[trial % len(tensors)].view(torch.uint8)
        place = torch.randint(0, raw.numel(), (3,), generator=g)
        raw[place] = torch.randint(0, 256, (3,), generator=g, dtype=torch.uint8)
        try:
            restored = restore(tree, delta())
        except WireError:
            continue
        accepted += 1
        assert all(bool(torch.isfinite(tensor).all()) for tensor in floats(restored).values())
    assert 0 < accepted < 200


def test_topk_of_two_of_three_numbers_is_sent_whole() -> None:
    """They take 12 bytes either way, and whole they are exact."""
    change = {"w": torch.tensor([1.0, 2.0, 1 / 3])}
    packed = compress(change, "topk", fraction=0.6)
    assert len(packed["indices"]) == 0 and torch.equal(restore(packed, change)["w"], change["w"])
