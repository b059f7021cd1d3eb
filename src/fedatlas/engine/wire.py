"""Trees to bytes and back. Executes nothing: tensors are safetensors, the rest is JSON, a digest guards both.

Layout: 8 bytes magic, 32 bytes SHA-256 of all that follows, a safetensors file whose tensors are numbered and
whose metadata holds the structure as JSON. Equal trees give equal bytes.
"""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from fedatlas.errors import WireError
from fedatlas.tensors import Tree

MAGIC = b"FEDATLS1"
_HEAD = len(MAGIC) + 32


@dataclass(frozen=True)
class TensorForm:
    """Stands for a tensor that was not loaded."""

    dtype: str
    shape: tuple[int, ...]


def encode(tree: Tree) -> bytes:
    """A tree of tensors and plain values as bytes. Raises TypeError, naming path and type, for anything else."""
    tensors: dict[str, Tensor] = {}
    structure = _pack(tree, "tree", tensors)
    body = safetensors.torch.save(tensors, {"tree": json.dumps(structure, separators=(",", ":"))})
    return MAGIC + hashlib.sha256(body).digest() + body


def decode(data: bytes | memoryview) -> Tree:
    """The tree that `encode` made. Raises WireError for bytes that are truncated, damaged or not ours."""
    body = _checked(data)
    structure, _ = _header(body)
    try:
        tensors = safetensors.torch.load(bytes(body))
    except SafetensorError as error:
        raise WireError(f"message: its tensors cannot be read ({error})") from error
    return _unpack(structure, tensors)


def plain(data: bytes | memoryview) -> Tree:
    """The tree with a `TensorForm` in the place of every tensor: no tensor is loaded."""
    structure, header = _header(memoryview(data)[_HEAD:])
    forms = {n: TensorForm(e["dtype"], tuple(e["shape"])) for n, e in header.items() if n != "__metadata__"}
    return _unpack(structure, forms)


def _checked(data: bytes | memoryview) -> memoryview:
    view = memoryview(data)
    if len(view) < _HEAD or bytes(view[: len(MAGIC)]) != MAGIC:
        raise WireError(
            f"message: {len(view)} bytes that do not begin as one of ours; it is truncated or of another format"
        )
    body = view[_HEAD:]
    if hashlib.sha256(body).digest() != bytes(view[len(MAGIC) : _HEAD]):
        raise WireError(f"message: {len(view)} bytes whose digest differs; it is truncated or damaged")
    return body


def _header(body: memoryview) -> tuple[Any, dict[str, Any]]:
    try:
        length = int.from_bytes(body[:8], "little")
        header = json.loads(bytes(body[8 : 8 + length]))
        return json.loads(header["__metadata__"]["tree"]), header
    except (ValueError, KeyError, TypeError) as error:
        raise WireError(f"message: its header cannot be read ({type(error).__name__})") from error


def _pack(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        if value.layout != torch.strided or value.is_quantized:
            raise TypeError(f"{path} is a {value.layout} tensor; only dense tensors travel")
        number = str(len(tensors))
        # a copy: two entries may share memory, which safetensors refuses
        tensors[number] = value.detach().to("cpu").contiguous().clone()
        return ["t", number]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return ["l", [_pack(item, f"{path}[{i}]", tensors) for i, item in enumerate(value)]]
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"{path} has the key {key!r}, a {type(key).__name__}; keys are strings")
        return ["d", {key: _pack(item, f"{path}[{key!r}]", tensors) for key, item in value.items()}]
    raise TypeError(
        f"{path} is a {type(value).__name__}; allowed: tensors, numbers, strings, None, lists and dicts of them"
    )


def _unpack(packed: Any, tensors: Any) -> Any:
    if not isinstance(packed, list):
        return packed
    kind, value = packed
    if kind == "t":
        return tensors[value]
    if kind == "l":
        return [_unpack(item, tensors) for item in value]
    return {key: _unpack(item, tensors) for key, item in value.items()}
