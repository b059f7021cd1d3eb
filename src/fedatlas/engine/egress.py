"""What leaves a hospital: checked against what the method declares, and written down before it goes.

The log is append-only and chained: every line holds the digest of the line before it, so that a line that is
changed, taken out or put between others is found. Lines cut off at the end are not found by the log alone; the
server's own record of the run holds the bytes that arrived.

What a check of form cannot find is information hidden in the values of a tensor of the right shape.
"""

import fcntl
import functools
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torch import Tensor

from fedatlas.errors import FedAtlasError, RunFolderError
from fedatlas.evaluation.classification import score_edges

FIRST = "0" * 64
"""Stands for the line before the first."""

Forms = Mapping[str, tuple[str, tuple[int, ...]]]
"""The tensors of a net: name -> (dtype, shape)."""


class EgressError(FedAtlasError):
    """A reply holds what the method does not declare; it was not sent."""


def check(
    value: Any,
    declared: Mapping[str, str],
    *,
    what: str,
    classes: int,
    forms: Callable[[str], Forms],
) -> None:
    """Raises EgressError unless a reply holds exactly the declared keys, each of its declared kind:

    model, model:NET    a dict of tensors that the net has too, with the same dtype and shape; perhaps not all of them
    mask, mask:NET      the same with bool tensors
    bits, bits:NET      the same with eight of its positions in a byte, as `sharpness.pack_bits` packs them
    number              one number
    classes             class indices, none twice
    per class           at most one number per class
    rows                rows of evaluation, see `evaluation.evaluate.Row`
    histograms          at most one per class, see `evaluation.classification.Histogram`; with the
                        edges of `score_edges`
    facts               a plain dict of what a site says of itself when it joins
    opaque              bytes of a protocol of ours that are random to who lacks a key (secure aggregation)
    sparse, sparse:NET  some entries of the tensors of a net, as `tensors.sparse` takes them

    classes: how many the label space has; forms: the tensors of a net by its name; what: names the reply.
    """
    if not isinstance(value, dict):
        raise EgressError(f"{what}: a {type(value).__name__} was to be sent; a dict is expected")
    extra, missing = sorted(set(value) - set(declared)), sorted(set(declared) - set(value))
    if extra or missing:
        raise EgressError(
            f"{what}: it declares {', '.join(declared)}; "
            + "; ".join(
                f"{text}: {', '.join(names)}"
                for text, names in (("not declared", extra), ("missing", missing))
                if names
            )
        )
    for key, kind in declared.items():
        base, _, net = kind.partition(":")
        if base not in _CHECKS:
            raise EgressError(f"{what}: {key!r} is declared as {kind!r}; the kinds are {', '.join(_CHECKS)}")
        problem = _CHECKS[base](value[key], classes, lambda net=net: forms(net or "main"))
        if problem:
            raise EgressError(f"{what}: {key!r} is declared as {kind!r}, but {problem}; it was not sent")


def _model(value: Any, classes: int, forms: Callable[[], Forms], mask: bool = False) -> str | None:
    if not isinstance(value, dict):
        return f"is a {type(value).__name__}"
    expected = forms()
    for name, tensor in value.items():
        if not isinstance(tensor, Tensor):
            return f"holds {name!r}, a {type(tensor).__name__}"
        if name not in expected:
            return f"holds the tensor {name!r}, which the net does not have"
        dtype, shape = expected[name]
        got = str(tensor.dtype).removeprefix("torch.")
        if tuple(tensor.shape) != shape or got != ("bool" if mask else dtype):
            return f"{name!r} is {got}{list(tensor.shape)}, in the net it is {dtype}{list(shape)}"
    return None


def _mask(value: Any, classes: int, forms: Callable[[], Forms]) -> str | None:
    return _model(value, classes, forms, mask=True)


def _bits(value: Any, classes: int, forms: Callable[[], Forms]) -> str | None:
    if not isinstance(value, dict):
        return f"is a {type(value).__name__}"
    expected = forms()
    for name, tensor in value.items():
        if name not in expected:
            return f"holds bits of {name!r}, which the net does not have"
        numel = math.prod(expected[name][1])
        size = (numel + 7) // 8
        if not isinstance(tensor, Tensor) or _dtype(tensor) != "uint8" or tuple(tensor.shape) != (size,):
            return f"the bits of {name!r} are {_described(tensor)}, of its {numel} entries they are uint8[{size}]"
    return None


def _entries(value: Any, classes: int, forms: Callable[[], Forms]) -> str | None:
    if not isinstance(value, dict):
        return f"is a {type(value).__name__}"
    expected = forms()
    for name, entries in value.items():
        if name not in expected:
            return f"holds entries of {name!r}, which the net does not have"
        dtype, shape = expected[name]
        if not isinstance(entries, dict) or not {"value"} <= set(entries) <= {"index", "value"}:
            return f"{name!r} is {_described(entries)}, not a dict of index and value"
        numel = math.prod(shape)
        got, index = entries["value"], entries.get("index")
        if not isinstance(got, Tensor) or got.dim() != 1 or _dtype(got) != dtype:
            return f"the values of {name!r} are {_described(got)}, in the net it is {dtype}{list(shape)}"
        if "index" not in entries:
            if len(got) != numel:
                return f"{name!r} has {len(got)} values and no index, in the net it has {numel}"
            continue
        if not isinstance(index, Tensor) or index.dim() != 1 or _dtype(index) != "int32":
            return f"the index of {name!r} is {_described(index)}, not int32[m]"
        if len(index) != len(got):
            return f"{name!r} has {len(index)} places for {len(got)} values"
        if len(index) and (int(index[0]) < 0 or int(index[-1]) >= numel or bool((index.diff() <= 0).any())):
            return f"the index of {name!r} does not increase from 0 to below {numel}"
    return None


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(value: Any, classes: int, forms: Any) -> str | None:
    return None if _is_number(value) else f"is {_described(value)}"


def _classes(value: Any, classes: int, forms: Any) -> str | None:
    if not isinstance(value, list) or not all(isinstance(c, int) and 0 <= c < classes for c in value):
        return f"is {_described(value)}, not class indices"
    return "names a class twice" if len(set(value)) < len(value) else None


def _per_class(value: Any, classes: int, forms: Any) -> str | None:
    if isinstance(value, Tensor):
        return None if value.dim() == 1 and len(value) <= classes else f"is {_described(value)}"
    if isinstance(value, list) and all(_is_number(item) or item is None for item in value):
        return None if len(value) <= classes else f"holds {len(value)} numbers for {classes} classes"
    return f"is {_described(value)}"


ROW = {
    "split": str, "grid": str, "model": str, "round": int, "site": str, "case": str, "class": str,
    "metric": str, "value": float, "known": bool, "reason": str,
}  # fmt: skip
_LONGEST = 200


def _rows(value: Any, classes: int, forms: Any) -> str | None:
    if not isinstance(value, list):
        return f"is {_described(value)}"
    for row in value:
        if not isinstance(row, dict) or set(row) != set(ROW):
            return "holds something else than rows of evaluation"
        for key, kind in ROW.items():
            item = row[key]
            fits = (_is_number(item) or item is None) if kind is float else isinstance(item, kind)
            if not fits or (isinstance(item, str) and len(item) > _LONGEST):
                return f"a row's {key!r} is {_described(item)}"
    return None


HISTOGRAM = ("edges", "positives", "negatives", "not_finite")
MOST_BINS = 1000


@functools.cache
def _edges_of(count: int) -> tuple[tuple[float, ...], ...]:
    """All bounds that a histogram with so many of them may have."""
    possible = range(max(1, count - 41), min(count, MOST_BINS) + 1)  # at most 20 further bounds at either end
    return tuple(edges for bins in possible if len(edges := score_edges(bins)) == count)


def _histograms(value: Any, classes: int, forms: Any) -> str | None:
    if not isinstance(value, dict):
        return f"is {_described(value)}"
    if len(value) > classes:
        return f"holds {len(value)} histograms for {classes} classes"
    for name, found in value.items():
        if not isinstance(name, str) or len(name) > _LONGEST:
            return "names a class by something else than a short text"
        if not isinstance(found, dict) or set(found) != set(HISTOGRAM):
            return "holds something else than histograms"
        edges, counts = found["edges"], [found["positives"], found["negatives"], [found["not_finite"]]]
        if not isinstance(edges, list) or not 2 <= len(edges) <= len(score_edges(MOST_BINS)):
            return f"a histogram's edges are {_described(edges)}, not the bounds of 1 to {MOST_BINS} bins"
        if any(type(edge) is not float for edge in edges) or tuple(edges) not in _edges_of(len(edges)):
            return "a histogram's edges are not those of `score_edges`, from 0 to 1"
        bins = len(edges) - 1
        for row, expected in zip(counts, (bins, bins, 1), strict=True):
            if not isinstance(row, list) or len(row) != expected:
                return f"a histogram of {bins} bins has counts that are {_described(row)}"
            if not all(type(count) is int and 0 <= count < 1 << 31 for count in row):
                return "a histogram's counts are not whole numbers from 0 on"
        if sum(map(sum, counts)) >= 1 << 31:
            return "a histogram's counts have a sum beyond 2^31"
    return None


def _facts(value: Any, classes: int, forms: Any) -> str | None:
    if any(isinstance(leaf, Tensor) for leaf in _leaves(value)):
        return "holds a tensor"
    return None if isinstance(value, dict) else f"is {_described(value)}"


def _opaque(value: Any, classes: int, forms: Any) -> str | None:
    return None


_CHECKS: dict[str, Callable[[Any, int, Callable[[], Forms]], str | None]] = {
    "model": _model,
    "mask": _mask,
    "bits": _bits,
    "number": _number,
    "classes": _classes,
    "per class": _per_class,
    "rows": _rows,
    "histograms": _histograms,
    "facts": _facts,
    "opaque": _opaque,
    "sparse": _entries,
}

_NAME = re.compile(r"[a-z][a-z_]*")
MOST_NUMBERS = 24


def check_log(numbers: Mapping[str, float], *, what: str) -> None:
    """Raises EgressError for logged numbers that look like one per sample: names with digits or other marks, or
    more than `MOST_NUMBERS` of them."""
    odd = [name for name in numbers if not _NAME.fullmatch(name)]
    if odd:
        raise EgressError(
            f"{what}: logs {odd[0]!r}; the name of a logged number has small letters and _ only, so that none "
            "can stand for a case"
        )
    if len(numbers) > MOST_NUMBERS:
        raise EgressError(
            f"{what}: logs {len(numbers)} numbers; at most {MOST_NUMBERS} leave a site per call"
        )


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return f"a {type(value).__name__}"


def _leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, dict | list):
        for item in tree.values() if isinstance(tree, dict) else tree:
            yield from _leaves(item)
    else:
        yield tree


def contents(value: Any) -> dict[str, str]:
    """A line per thing that a reply holds: path -> dtype and shape of a tensor, type of a plain value, with equal
    neighbours of a long list told as one."""
    found: dict[str, str] = {}

    def walk(item: Any, path: str) -> None:
        if isinstance(item, Tensor):
            found[path] = f"{str(item.dtype).removeprefix('torch.')}{list(item.shape)}"
        elif isinstance(item, dict):
            for key, inner in item.items():
                walk(inner, f"{path}/{key}" if path else key)
        elif isinstance(item, list):
            found[path] = f"{len(item)} × {type(item[0]).__name__}" if item else "nothing"
        else:
            found[path] = type(item).__name__

    walk(value, "")
    return found


# --------------------------------------------------------------------------------------------------------- the log


@dataclass(frozen=True)
class EgressLog:
    """The log of one site. run: the run that what is recorded belongs to; method: its name."""

    path: Path
    run: str = ""
    method: str = ""

    def record(self, what: Mapping[str, Any], data: bytes | bytearray | memoryview) -> None:
        """Appends a line for a message that is about to leave. what: function, round, call and contents.

        Raises OSError where it cannot be written; the message must then not be sent.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            line = {
                "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
                "run": self.run,
                "method": self.method,
                **what,
                "bytes": len(data),
                "sha256": hashlib.sha256(data).hexdigest(),
                "previous": _last_digest(file),
            }
            text = _line(line)
            size = file.seek(0, 2)
            try:
                file.write(text)
                file.flush()
            except OSError:  # half a line would break the chain for ever
                file.truncate(size)
                raise


def _line(plain: Mapping[str, Any]) -> bytes:
    """A line with its own digest, over all that is in it before."""
    text = json.dumps(plain, sort_keys=True, ensure_ascii=False)
    return f"{hashlib.sha256(text.encode()).hexdigest()} {text}\n".encode()


def _last_digest(file: Any) -> str:
    size = file.seek(0, 2)
    if not size:
        return FIRST
    step = 4096
    while True:
        start = max(size - step, 0)
        file.seek(start)
        lines = file.read(size - start).rstrip(b"\n").split(b"\n")
        if len(lines) > 1 or start == 0:
            return lines[-1][:64].decode("ascii", "replace")
        step *= 8


def read_log(path: Path) -> list[dict[str, Any]]:
    """The lines of a log, each with its number from 1 and, under "broken", what is wrong with it ("" if nothing).

    Raises RunFolderError if there is no log.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        raise RunFolderError(f"{path}: cannot be read ({error.strerror or error})") from None
    lines, previous = [], FIRST
    for number, raw in enumerate(text.split(b"\n")[:-1] if text.endswith(b"\n") else text.split(b"\n"), 1):
        digest, _, body = raw.decode("utf-8", "replace").partition(" ")
        broken = ""
        try:
            plain = json.loads(body)
        except ValueError:
            plain, broken = {}, "not a line of the log"
        if not broken and hashlib.sha256(body.encode()).hexdigest() != digest:
            broken = "was changed after it was written"
        elif not broken and plain.get("previous") != previous:
            broken = "does not follow the line before: a line was changed, taken out or put in"
        lines.append({**plain, "line": number, "digest": digest, "broken": broken})
        previous = digest
    return lines
