"""Trees to bytes and back. Executes nothing: tensors are safetensors, the rest is JSON, a digest guards both.

Layout: 8 bytes magic, 32 bytes SHA-256 of all that follows, then a safetensors file whose tensors are numbered
and whose metadata holds the structure as JSON. The tensors lie end to end, and the structure names each once. Equal
trees give equal bytes. The file is written and read here, not by the safetensors package, so that a model is copied
once each way and not three times.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedatlas.core.errors import WireError
from fedatlas.core.tensors import Tree

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
_AXES, _ENTRIES = 32, 1 << 40
"""The most axes and entries of a tensor."""
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

Data = bytes | bytearray | memoryview

MOST_DEPTH = 100
"""How deep lists and dicts may lie in each other."""


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
    return Message.of(data).tree(copy=copy)


def plain(data: Data) -> Tree:
    """`Message.forms` of bytes that were checked before: the digest is not checked again."""
    return Message.of(data, digest=False).forms()


@dataclass(frozen=True)
class Message:
    """Bytes of `encode` whose tensors were not read yet.

    structure: as `_pack` gives it; entries: number of a tensor -> (dtype, shape, first byte, last byte + 1);
    body: the bytes of all tensors.
    """

    structure: Any
    entries: Mapping[str, tuple[torch.dtype, tuple[int, ...], int, int]]
    body: memoryview

    @classmethod
    def of(cls, data: Data, *, most: int | None = None, digest: bool = True) -> "Message":
        """Checks the bytes as far as it can be done without reading a tensor.

        most: bytes that the header may have, which holds everything but the values of tensors; a longer one is not
        parsed. Raises WireError for bytes that are truncated, damaged or not ours.
        """
        view = memoryview(data)
        if len(view) < _HEAD + 8 or bytes(view[: len(MAGIC)]) != MAGIC:
            raise WireError(
                f"message: {len(view)} bytes that do not begin as one of ours; it is truncated or of another format",
                damaged=True,
            )
        if digest and hashlib.sha256(view[_HEAD:]).digest() != bytes(view[len(MAGIC) : _HEAD]):
            raise WireError(
                f"message: {len(view)} bytes whose digest differs; it is truncated or damaged", damaged=True
            )
        length = int.from_bytes(view[_HEAD : _HEAD + 8], "little")
        start = _HEAD + 8 + length
        if start > len(view):
            raise WireError(f"message: a header of {length} bytes in {len(view)}; it is truncated or damaged")
        if most is not None and length > most:
            raise WireError(f"message: plain values and names of {length:,} bytes; allowed are {most:,}")
        try:
            header = json.loads(bytes(view[_HEAD + 8 : start]))
            structure = json.loads(header.pop("__metadata__")["tree"])
            entries = {number: _entry(form, len(view) - start) for number, form in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise WireError(f"message: its header cannot be read ({type(error).__name__})") from error
        spans = sorted(entry[2:] for entry in entries.values())
        if [0, *(end for _, end in spans)] != [*(begin for begin, _ in spans), len(view) - start]:
            raise WireError(f"message: its tensors do not lie end to end in its {len(view) - start:,} bytes")
        return cls(structure, entries, view[start:])

    def forms(self) -> Tree:
        """The tree with tensors that have a dtype and a shape, and no memory (on the device "meta")."""
        forms = {
            number: torch.empty(shape, dtype=dtype, device="meta")
            for number, (dtype, shape, _, _) in self.entries.items()
        }
        return self._unpacked(forms)

    def tree(self, *, copy: bool = True) -> Tree:
        """The tree itself; copy: as in `decode`. Raises WireError for values that no tensor of ours can have."""
        memory = bytearray(self.body) if copy else self.body
        tensors = {}
        for number, (dtype, shape, begin, end) in self.entries.items():
            if end == begin:
                tensors[number] = torch.empty(shape, dtype=dtype)
                continue
            raw = torch.frombuffer(memory, dtype=torch.uint8, count=end - begin, offset=begin)
            if dtype == torch.bool and int(raw.max()) > 1:
                raise WireError("message: a truth value of a tensor is neither 0 nor 1")
            tensors[number] = raw.view(dtype).reshape(shape)
        return self._unpacked(tensors)

    def _unpacked(self, tensors: dict[str, Tensor]) -> Tree:
        tree = _unpack(self.structure, tensors, 0)
        if tensors:
            raise WireError(f"message: its structure leaves out {len(tensors)} of its tensors")
        return tree


def _entry(form: Any, most: int) -> tuple[torch.dtype, tuple[int, ...], int, int]:
    """dtype, shape, begin and end of a tensor in a body of `most` bytes. Raises ValueError, KeyError or TypeError
    unless they fit together."""
    if len(form["shape"]) > _AXES:  # first, since a product of very many numbers takes long
        raise ValueError(len(form["shape"]))
    dtype, shape = _DTYPES[form["dtype"]], tuple(form["shape"])
    begin, end = form["data_offsets"]
    if any(type(number) is not int or not 0 <= number <= _ENTRIES for number in shape):
        raise ValueError(shape)
    if any(type(number) is not int or number < 0 for number in (begin, end)):
        raise ValueError(begin, end)
    if begin % dtype.itemsize or end > most or end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError(shape)
    if math.prod(max(number, 1) for number in shape) > _ENTRIES:  # where one axis is 0
        raise ValueError(shape)
    return dtype, shape, begin, end


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


def _unpack(packed: Any, tensors: dict[str, Tensor], depth: int) -> Any:
    """What `_pack` packed; takes the tensors that it names out of `tensors`, so that none is named twice."""
    if packed is None or isinstance(packed, bool | int | float | str):
        return packed
    if depth > MOST_DEPTH:
        raise WireError(f"message: its values lie more than {MOST_DEPTH} deep in each other")
    match packed:
        case ["t", str(number)] if number in tensors:
            return tensors.pop(number)
        case ["l", list(items)]:
            return [_unpack(item, tensors, depth + 1) for item in items]
        case ["d", dict(items)]:
            return {key: _unpack(item, tensors, depth + 1) for key, item in items.items()}
    raise WireError("message: its structure cannot be read")
