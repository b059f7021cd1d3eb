"""Fewer bytes on the wire: the difference of two models, compressed, with error feedback.

The sender packs the `difference` of two models; the receiver, who holds the old one, restores it and adds it with
`apply` (both are in `difference.py`). Both sides run the same `restore` on the same bytes and so hold the same model, bit
for bit. What compression left out of a site's change is kept by the site and added to its next one (`with_feedback`), so that
it is delayed and not lost. The server feeds nothing back: what the sites hold is where their changes begin, so that rounding of
what it sends is over with the round, where a mean is the next model; a momentum at the server, and FedDyn, carry it on as they carry the
sites' changes. Only the kinds that round are for it; of what `topk` leaves out most would be lost.

Feedback is for changes that add up from round to round. Running statistics of batch normalisation do not: in every round a site
measures anew how far they are from those that it was sent. They have no feedback, and travel whole, in float32: rounded by the largest
change of a tensor, a variance that became small would come out negative.

Error feedback: Seide, Fu, Droppo, Li, Yu. 1-bit stochastic gradient descent and its application to
data-parallel distributed training of speech DNNs. Interspeech 2014. Karimireddy, Rebjock, Stich, Jaggi. Error
feedback fixes SignSGD and other gradient compression schemes. ICML 2019, arXiv:1901.09847.

Only floating tensors are compressed, but for running statistics. All others (counters, masks) travel exactly, as new values.

Kinds, and the bytes of each number where a float32 has 4:
    bf16: rounded to bfloat16, to nearest even. 2 bytes.
    int8: q = round(x / scale) to nearest even, scale = max |x| / 127 in float32, over a row of the first axis,
        or over the whole of a tensor with fewer than two axes. 1 byte, and 4 per row. A row whose scale would
        be below the smallest normal float32 (all zeros, or |x| < 1.5e-36) has the scale 0.
    topk: the k = max(1, ceil(fraction * n)) numbers of largest |x| of the n of a tensor; of equal ones, those
        of lower index. Each takes 6 bytes: an int32 index into the flat tensor and the value in bfloat16,
        which at equal bytes keeps a third more numbers than float32 values would. A tensor that takes no more
        bytes whole (6k >= 4n) is sent whole and exactly, in float32.

Shapes: N numbers of all compressed tensors, in the order of the sorted names; R rows of them.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedatlas.core.errors import FederationError, NameMismatch, WireError
from fedatlas.core.options import option, options
from fedatlas.core.tensors import Tensors, Tree, require_same
from fedatlas.transport.protection.difference import all_finite, as_difference

LEVELS = 127
"""int8: codes are -127 to 127."""

STATISTICS = "float32"
"""The running statistics among the tensors that travel exactly; of those no other is of this dtype."""

_TINY = torch.finfo(torch.float32).tiny
_MOST = torch.finfo(torch.float32).max
_INDICES = 2**31 - 1


@options
class Comm:
    """Sends only the change from the receiver's model, compressed."""

    up: Literal["none", "bf16", "int8", "topk"] = option("none", "Compression of what the sites send.")
    down: Literal["none", "bf16", "int8"] = option("none", "Compression of what the server sends.")
    fraction: float = option(
        0.01, "topk: share of each tensor's numbers that is sent, the largest; at least one.", gt=0, le=1
    )
    feedback: bool = option(
        True, "Whether a site keeps what compression of its change left out, and adds it to the next one."
    )


def compress(difference: Mapping[str, Tensor], kind: str, *, fraction: float) -> dict[str, Tree]:
    """A difference as a tree for the wire that says by itself how it was compressed, in a handful of tensors
    whatever the number of tensors of the model.

    kind: "bf16", "int8" or "topk"; with "none" the model itself is sent, not a difference.
    fraction: of topk, above 0 and up to 1; without effect on the others.

    Equal differences give equal trees. Raises FloatingPointError, naming the tensor, for a number that is not
    finite or beyond the range of `kind`, and FederationError for an unknown kind or fraction.
    """
    codec = _CODECS.get(kind)
    if codec is None:
        raise FederationError(f"comm: asked to compress by {kind!r}; allowed: {', '.join(_CODECS)}")
    if not 0 < fraction <= 1:
        raise FederationError(f"comm: fraction is {fraction}; allowed: above 0, up to 1")
    form = _Form.of(difference)
    exact: dict[str, Tree] = {
        dtype: torch.cat(
            [
                _flat(difference[name], name)
                if dtype == STATISTICS
                else difference[name].detach().cpu().reshape(-1)
                for name in names
            ]
        )
        for dtype, names in form.exact.items()
    }
    fields = codec.pack(difference, form.floating, float(fraction))
    return {"kind": kind, "digest": form.digest, "exact": exact, **fields}


def restore(packed: Tree, like: Mapping[str, Tensor]) -> Tensors:
    """The difference that `compress` packed, as far as it kept it, with the names and shapes of `like` (the
    model it will be applied to). Floating tensors are float32 whatever their dtype in `like`; others have the
    dtype of `like`. Shares no memory with `packed`.

    `packed` comes from elsewhere and nothing in it is trusted: raises NameMismatch if it is of a model of other
    names, shapes or dtypes, and WireError for all else that `compress` cannot have made.
    """
    restored = dict(_restored(packed, _Form.of(like), like))
    return {name: restored[name] for name in like}


def sent_bytes(model: Mapping[str, Tensor], kind: str, fraction: float) -> int:
    """The bytes of a model's values as they are sent; kind: as in `Comm`, "none" among them."""
    total = 0
    for name, tensor in model.items():
        n = tensor.numel()
        if kind == "none" or not tensor.is_floating_point():
            total += n * tensor.element_size()
        elif _is_statistic(name):
            total += 4 * n
        elif kind == "bf16":
            total += 2 * n
        elif kind == "int8":
            total += n + 4 * _rows(tensor.shape)
        else:
            count = _kept(tensor.shape, fraction)
            total += 4 * n if count is None else 6 * count
    return total


def with_feedback(
    difference: Mapping[str, Tensor], residual: Mapping[str, Tensor] | None, kind: str, *, fraction: float
) -> tuple[dict[str, Tree], Tensors]:
    """`compress` of the difference plus what earlier ones left out, and what is now left out.

    residual: floating tensors by name, in float32, without running statistics, as the last call returned it; None: nothing was left out.

    The new residual is the sum minus what the receiver restores from it, which float32 holds exactly: nothing
    is lost but the rounding of the one addition. Neither argument is changed. Memory: two models in float32,
    beside the arguments and the tree.

    Raises what `compress` raises, and NameMismatch for a residual that is of another model.
    """
    adding = {
        name: tensor
        for name, tensor in difference.items()
        if tensor.is_floating_point() and not _is_statistic(name)
    }
    total: Tensors = dict(difference)
    if residual is not None:
        expected = {name: as_difference(tensor) for name, tensor in adding.items()}
        require_same(expected, residual, asked="error feedback, what earlier rounds left out")
        total |= {name: _local(tensor) + _local(residual[name]) for name, tensor in adding.items()}
    packed = compress(total, kind, fraction=fraction)
    left: Tensors = {}
    for name, tensor in _restored(packed, _Form.of(total), total):
        if name in adding:
            # a total is let go when its residual is made
            left[name] = torch.sub(_local(total.pop(name)), tensor, out=tensor)
    return packed, {name: left[name] for name in adding}


@dataclass(frozen=True)
class _Form:
    """What both sides must agree on: the tensors that are compressed by sorted name, those that travel exactly by dtype, of which running
    statistics are `STATISTICS`, and a digest."""

    floating: dict[str, torch.Size]
    exact: dict[str, list[str]]
    digest: str

    @staticmethod
    def of(values: Mapping[str, Tensor]) -> "_Form":
        floating: dict[str, torch.Size] = {}
        exact: dict[str, list[str]] = {}
        listed = []
        for name in sorted(values):
            tensor = values[name]
            dtype = "floating" if tensor.is_floating_point() else str(tensor.dtype).removeprefix("torch.")
            if dtype != "floating" or _is_statistic(name):
                exact.setdefault(STATISTICS if dtype == "floating" else dtype, []).append(name)
            else:
                floating[name] = tensor.shape
            listed.append([name, dtype, list(tensor.shape)])
        text = json.dumps(listed, separators=(",", ":"))
        return _Form(floating, exact, hashlib.sha256(text.encode()).hexdigest()[:32])


Pack = Callable[[Mapping[str, Tensor], Mapping[str, torch.Size], float], dict[str, Tree]]
Unpack = Callable[[dict[str, Any], Mapping[str, torch.Size]], Iterator[tuple[str, Tensor]]]


@dataclass(frozen=True)
class _Codec:
    pack: Pack
    unpack: Unpack
    fields: tuple[str, ...]


def _pack_bf16(
    values: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], fraction: float
) -> dict[str, Tree]:
    packed = torch.empty(_numbers(shapes), dtype=torch.bfloat16)
    for name, begin, end in _spans(shapes):
        packed[begin:end] = _flat(values[name], name)
        if not all_finite(packed[begin:end]):
            raise _too_large(name, "bf16")
    return {"values": packed}


def _unpack_bf16(packed: dict[str, Any], shapes: Mapping[str, torch.Size]) -> Iterator[tuple[str, Tensor]]:
    values = _checked(packed, "values", torch.bfloat16, _numbers(shapes))
    for name, begin, end in _spans(shapes):
        _requireall_finite(values[begin:end], name)
        yield name, values[begin:end].float().reshape(shapes[name])


def _pack_int8(
    values: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], fraction: float
) -> dict[str, Tree]:
    codes = torch.empty(_numbers(shapes), dtype=torch.int8)
    scales = torch.empty(sum(_rows(shape) for shape in shapes.values()))
    row = 0
    for name, begin, end in _spans(shapes):
        rows = _rows(shapes[name])
        if rows == 0:
            continue
        table = _flat(values[name], name).reshape(rows, -1)
        scale = torch.maximum(table.amax(1), -table.amin(1)) / LEVELS
        scale[scale < _TINY] = 0
        if not all_finite(scale * LEVELS):
            raise _too_large(name, "int8")
        quotient = table / torch.where(scale == 0, math.inf, scale)[:, None]
        codes[begin:end] = quotient.round_().reshape(-1)
        scales[row : row + rows] = scale
        row += rows
    return {"codes": codes, "scales": scales}


def _unpack_int8(packed: dict[str, Any], shapes: Mapping[str, torch.Size]) -> Iterator[tuple[str, Tensor]]:
    codes = _checked(packed, "codes", torch.int8, _numbers(shapes))
    scales = _checked(packed, "scales", torch.float32, sum(_rows(shape) for shape in shapes.values()))
    if codes.numel() and int(codes.min()) < -LEVELS:
        raise WireError(f"restoring a difference: a code is {int(codes.min())}; allowed: -127 to 127")
    row = 0
    for name, begin, end in _spans(shapes):
        rows = _rows(shapes[name])
        scale = scales[row : row + rows]
        row += rows
        if not bool(((scale == 0) | (scale >= _TINY)).all()) or not all_finite(scale * LEVELS):
            raise WireError(
                f"restoring a difference: a scale of {name} is negative, subnormal or not finite; "
                f"allowed: 0, and {_TINY:.4g} to {_MOST / LEVELS:.4g}"
            )
        table = codes[begin:end].float()
        if rows:
            table = table.reshape(rows, -1).mul_(scale[:, None])
        yield name, table.reshape(shapes[name])


def _pack_topk(
    values: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], fraction: float
) -> dict[str, Tree]:
    indices: list[Tensor] = []
    kept: list[Tensor] = []
    whole: list[Tensor] = []
    for name, shape in shapes.items():
        flat, count = _flat(values[name], name), _kept(shape, fraction)
        if count is None:
            whole.append(flat)
            continue
        if flat.numel() > _INDICES:
            raise FederationError(
                f"comm: topk of {name}, {flat.numel()} numbers; allowed: up to {_INDICES}; use int8 or bf16"
            )
        index = largest(flat, count)
        value = flat[index].bfloat16()
        if not all_finite(value):
            raise _too_large(name, "topk")
        indices.append(index.int())
        kept.append(value)
    return {
        "fraction": fraction,
        "indices": torch.cat([torch.empty(0, dtype=torch.int32), *indices]),
        "values": torch.cat([torch.empty(0, dtype=torch.bfloat16), *kept]),
        "whole": torch.cat([torch.empty(0), *whole]),
    }


def _unpack_topk(packed: dict[str, Any], shapes: Mapping[str, torch.Size]) -> Iterator[tuple[str, Tensor]]:
    fraction = packed["fraction"]
    if not isinstance(fraction, float) or not 0 < fraction <= 1:
        raise WireError(f"restoring a difference: fraction is {fraction!r}; allowed: above 0, up to 1")
    counts = {name: _kept(shape, fraction) for name, shape in shapes.items()}
    sparse = sum(count for count in counts.values() if count is not None)
    indices = _checked(packed, "indices", torch.int32, sparse)
    values = _checked(packed, "values", torch.bfloat16, sparse)
    dense = _numbers({name: shape for name, shape in shapes.items() if counts[name] is None})
    whole = _checked(packed, "whole", torch.float32, dense)
    place = at = 0
    for name, shape in shapes.items():
        count, numel = counts[name], shape.numel()
        if count is None:
            flat, at = whole[at : at + numel].clone(), at + numel
            _requireall_finite(flat, name)
        else:
            index, value = indices[place : place + count].long(), values[place : place + count]
            place += count
            if int(index[0]) < 0 or int(index[-1]) >= numel or not bool((index[1:] > index[:-1]).all()):
                raise WireError(
                    f"restoring a difference: the indices of {name} are not ascending within 0 to {numel - 1}"
                )
            _requireall_finite(value, name)
            flat = torch.zeros(numel)
            flat[index] = value.float()
        yield name, flat.reshape(shape)


_CODECS = {
    "bf16": _Codec(_pack_bf16, _unpack_bf16, ("values",)),
    "int8": _Codec(_pack_int8, _unpack_int8, ("codes", "scales")),
    "topk": _Codec(_pack_topk, _unpack_topk, ("fraction", "indices", "values", "whole")),
}


def largest(flat: Tensor, count: int) -> Tensor:
    """The indices, ascending, of the `count` numbers of largest magnitude in a finite float32 tensor [n]; of
    equal ones those of lower index. 0 < count <= n."""
    # without its sign, a float32 is ordered as its bits are
    bits = flat.abs().view(torch.int32).numpy()
    least = np.partition(bits, bits.size - count)[bits.size - count]
    above = np.flatnonzero(bits > least)
    ties = np.flatnonzero(bits == least)[: count - above.size]
    return torch.from_numpy(np.sort(np.concatenate([above, ties])))


def _restored(packed: Tree, form: _Form, like: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a packed difference, one at a time, checked; not in the order of `like`."""
    if not isinstance(packed, dict) or not isinstance(kind := packed.get("kind"), str):
        raise WireError("restoring a difference: the message is not a compressed difference")
    codec = _CODECS.get(kind)
    if codec is None:
        raise WireError(
            f"restoring a difference: it is compressed by {kind[:40]!r}; allowed: {', '.join(_CODECS)}"
        )
    expected = {"kind", "digest", "exact", *codec.fields}
    if set(packed) != expected:
        raise WireError(
            f"restoring a difference by {kind}: got the keys {str(sorted(packed))[:200]}, "
            f"expected {sorted(expected)}"
        )
    if not isinstance(digest := packed["digest"], str) or digest != form.digest:
        raise NameMismatch(
            f"restoring a difference: it is of a model of other names, shapes or dtypes (digest "
            f"{str(digest)[:40]!r}) than the {len(like)} tensors here (digest {form.digest!r}); both "
            "sides need the same net, its options included"
        )
    exact: Any = packed["exact"]
    if not isinstance(exact, dict) or set(exact) != set(form.exact):
        got = str(sorted(exact) if isinstance(exact, dict) else type(exact).__name__)[:200]
        raise WireError(f"restoring a difference: its exact tensors are {got}, expected {sorted(form.exact)}")
    for dtype, names in form.exact.items():
        shapes = {name: like[name].shape for name in names}
        statistics = dtype == STATISTICS
        flat = _checked(exact, dtype, torch.float32 if statistics else like[names[0]].dtype, _numbers(shapes))
        if dtype == "bool" and flat.numel() and int(flat.view(torch.uint8).max()) > 1:
            raise WireError("restoring a difference: a bool is neither 0 nor 1")
        for name, begin, end in _spans(shapes):
            if statistics:
                _requireall_finite(flat[begin:end], name)
            yield name, flat[begin:end].clone().reshape(shapes[name])
    yield from codec.unpack(packed, form.floating)


def _checked(fields: Mapping[str, Any], key: str, dtype: torch.dtype, numel: int) -> Tensor:
    value = fields[key]
    if not isinstance(value, Tensor) or value.dtype != dtype or value.shape != (numel,):
        got = f"{value.dtype}{list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise WireError(f"restoring a difference: {key} is {got}, expected {dtype}[{numel}]")
    return value.detach().cpu()


def _is_statistic(name: str) -> bool:
    """Is a tensor with this name a running mean or variance of batch normalisation?"""
    return name.rpartition(".")[2] in ("running_mean", "running_var")


def _kept(shape: torch.Size, fraction: float) -> int | None:
    """How many numbers topk keeps of a tensor; None: it is sent whole."""
    numel = shape.numel()
    count = max(1, math.ceil(fraction * numel))
    return None if 6 * count >= 4 * numel else count


def _rows(shape: torch.Size) -> int:
    """How many scales int8 has for a tensor."""
    if shape.numel() == 0:
        return 0
    return shape[0] if len(shape) >= 2 else 1


def _numbers(shapes: Mapping[str, torch.Size]) -> int:
    return sum(shape.numel() for shape in shapes.values())


def _spans(shapes: Mapping[str, torch.Size]) -> Iterator[tuple[str, int, int]]:
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + shape.numel()
        yield name, begin, end


def _flat(tensor: Tensor, name: str) -> Tensor:
    flat = _local(tensor).reshape(-1)
    if not all_finite(flat):
        raise FloatingPointError(f"{name}: its difference is not finite in float32 and cannot be compressed")
    return flat


def _requireall_finite(tensor: Tensor, name: str) -> None:
    if not all_finite(tensor):
        raise WireError(f"restoring a difference: {name} holds a number that is not finite")


def _too_large(name: str, kind: str) -> FloatingPointError:
    return FloatingPointError(f"{name}: its difference exceeds the range of {kind}")


def _local(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float32)
