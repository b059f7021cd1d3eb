"""wire.py: what goes in comes out, and nothing else is accepted."""

import hashlib
import json

import pytest
import safetensors.torch
import torch

from fedatlas.core.errors import WireError
from fedatlas.core.tensors import tensors_of
from fedatlas.transport import wire

TREE = {
    "model": {"w": torch.randn(3, 2), "half": torch.randn(3).bfloat16(), "count": torch.tensor(7)},
    "mask": torch.tensor([True, False, True]),
    "empty": torch.zeros(0, 4),
    "plain": [1, 2.5, None, True, "text", {"t": ["t", "0"]}],
    "doubles": torch.randn(2, 2).double().t(),
}


def equal(one, other) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return type(one) is type(other) and one == other


@pytest.mark.parametrize("copy", [True, False])
def test_round_trip(copy: bool) -> None:
    data = wire.encode(TREE)
    assert equal(wire.decode(data, copy=copy), TREE)
    assert wire.encode(TREE) == data


def test_plain_values_without_tensors() -> None:
    found = wire.plain(wire.encode(TREE))
    assert found["plain"] == TREE["plain"]
    assert found["mask"].is_meta and found["mask"].dtype == torch.bool and found["mask"].shape == (3,)


def test_the_body_is_a_safetensors_file() -> None:
    kept = safetensors.torch.load(bytes(wire.encode(TREE)[40:]))
    assert any(torch.equal(value, TREE["model"]["w"]) for value in kept.values() if value.shape == (3, 2))


def test_a_file_that_the_package_wrote_is_read() -> None:
    """As messages were written first: the package lays tensors end to end, too, in an order of its own."""
    tensors = {
        str(n): value for n, value in enumerate([torch.tensor([True]), torch.zeros(0), torch.randn(3)])
    }
    tree = json.dumps(["l", [["t", number] for number in tensors]])
    body = safetensors.torch.save(tensors, {"tree": tree})
    data = wire.MAGIC + hashlib.sha256(body).digest() + body
    assert equal(wire.decode(data), list(tensors.values()))


def test_a_net_travels() -> None:
    values = tensors_of(torch.nn.BatchNorm2d(4))
    assert equal(wire.decode(wire.encode(values)), values)


@pytest.mark.parametrize("cut", [0, 7, 39, 45, 200, -1])
def test_truncated_messages_are_refused(cut: int) -> None:
    with pytest.raises(WireError, match=r"truncated|damaged"):
        wire.decode(wire.encode(TREE)[:cut])


def test_any_flipped_bit_is_refused() -> None:
    data = wire.encode(TREE)
    for position in range(0, len(data), 37):
        damaged = bytearray(data)
        damaged[position] ^= 4
        with pytest.raises(WireError):
            wire.decode(damaged)


@pytest.mark.parametrize(
    ("tree", "text"),
    [
        ({"a": {1}}, r"tree\['a'\] is a set"),
        ({"a": [object()]}, r"tree\['a'\]\[0\] is a object"),
        ({1: 2}, "keys are strings"),
        ({"a": (1, 2)}, "is a tuple"),
        ({"a": torch.zeros(1, dtype=torch.complex64)}, "complex64"),
    ],
)
def test_other_types_are_refused(tree, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        wire.encode(tree)


def test_a_truth_value_is_0_or_1() -> None:
    data = wire.encode({"mask": torch.tensor([True, False])})
    data[-1] = 7
    data[8:40] = hashlib.sha256(data[40:]).digest()
    with pytest.raises(WireError, match="neither 0 nor 1"):
        wire.decode(data)
