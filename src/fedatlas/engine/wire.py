"""Trees to bytes and back. Executes nothing: tensors are safetensors, the rest is JSON, a digest guards both.

Layout: 8 bytes magic, 32 bytes SHA-256 of all that follows, then a safetensors file whose tensors are numbered
and whose metadata holds the structure as JSON. Equal trees give equal bytes. The file is written and read here,
not by the safetensors package, so that a model is copied once each way and not three times.
"""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedatlas.errors import WireError
from fedatlas.tensors import Tree

MAGIC = b"FEDATLS1"
_HEAD = len(MAGIC) + 32
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

Data = bytes | bytearray | memoryview

_MALFORMED = (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RuntimeError)
"""What reading bytes may raise that are no tree of ours, nesting too deep (RecursionError) among them."""


@dataclass(frozen=True)
class TensorForm:
    """Stands for a tensor that was not loaded."""

    dtype: str
    shape: tuple[int, ...]


def encode(tree: Tree) -> bytearray:
    """A tree of tensors and plain values as bytes. Raises TypeError, naming path and type, for anything else."""
    tensors: list[Tensor] = []
    structure = _pack(tree, "tree", tensors)
    header: dict[str, Any] = {"__metadata__": {"tree": json.dumps(structure, separators=(",", ":"))}}
    # widest first, so that every tensor is aligned to its own width
    order = sorted(range(len(tensors)), key=lambda i: -tensors[i].element_size())
    end = 0
    for number in order:
        tensor = tensors[number]
        begin, end = end, end + tensor.numel() * tensor.element_size()
        form = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        header[str(number)] = form
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    data = bytearray(_HEAD + 8 + len(text) + end)
    data[_HEAD : _HEAD + 8] = len(text).to_bytes(8, "little")
    begin = _HEAD + 8 + len(text)
    data[_HEAD + 8 : begin] = text
    view = memoryview(data)
    for number in order:
        raw = tensors[number].detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
        view[begin : begin + len(raw)] = raw.numpy().data
        begin += len(raw)
    view[:_HEAD] = MAGIC + hashlib.sha256(view[_HEAD:]).digest()
    return data


def decode(data: Data, *, copy: bool = True) -> Tree:
    """The tree that `encode` made. Raises WireError for bytes that are truncated, damaged or not ours.

    copy: False makes the tensors share the memory of `data`, which must be writable and used by nobody else.
    """
    structure, header = _header(_checked(data))
    start = _HEAD + 8 + int.from_bytes(data[_HEAD : _HEAD + 8], "little")
    memory = bytearray(memoryview(data)[start:]) if copy else memoryview(data)[start:]
    tensors = {}
    try:
        for number, form in header.items():
            if number == "__metadata__":
                continue
            begin, end = form["data_offsets"]
            dtype = _DTYPES[form["dtype"]]
            if end > begin:
                flat = torch.frombuffer(memory, dtype=torch.uint8, count=end - begin, offset=begin).view(
                    dtype
                )
            else:
                flat = torch.empty(0, dtype=dtype)
            tensors[number] = flat.reshape(form["shape"])
        return _unpack(structure, tensors)
    except _MALFORMED as error:
        raise WireError(f"message: its tensors cannot be read ({type(error).__name__})") from error


def plain(data: Data) -> Tree:
    """The tree with a `TensorForm` in the place of every tensor: no tensor is loaded, the digest not checked."""
    structure, header = _header(memoryview(data)[_HEAD:])
    try:
        forms = {
            n: TensorForm(e["dtype"], tuple(e["shape"])) for n, e in header.items() if n != "__metadata__"
        }
        return _unpack(structure, forms)
    except _MALFORMED as error:
        raise WireError(f"message: its tensors cannot be read ({type(error).__name__})") from error


def _checked(data: Data) -> memoryview:
    view = memoryview(data)
    if len(view) < _HEAD + 8 or bytes(view[: len(MAGIC)]) != MAGIC:
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
    except _MALFORMED as error:
        raise WireError(f"message: its header cannot be read ({type(error).__name__})") from error


def _pack(value: Any, path: str, tensors: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        if value.layout != torch.strided or value.dtype not in _NAMES:
            allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in _NAMES)
            raise TypeError(
                f"{path} is a {value.layout} tensor of {value.dtype}; allowed: dense ones of {allowed}"
            )
        tensors.append(value)
        return ["t", str(len(tensors) - 1)]
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
    if kind == "l" and isinstance(value, list):
        return [_unpack(item, tensors) for item in value]
    if kind == "d":
        return {key: _unpack(item, tensors) for key, item in value.items()}
    raise ValueError(kind)
