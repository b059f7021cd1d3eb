"""What leaves a hospital: checked against what the method declares, and written down before it goes.

The server checks every answer by the same rules when it arrives, since it does not know what runs at a site: first
by names, kinds, shapes and sizes, before a tensor is read (`Message.forms` gives tensors without values), then by
values.

The log is append-only and chained: every line holds the digest of the line before it, so that a line that is
changed, taken out or put between others is found, unless all digests after it are computed anew, which needs no key: note the
last digest elsewhere. Lines cut off at the end are not found by the log alone; the server's own record of the run holds the bytes
that arrived.

What a check of form cannot find is information hidden in the values of a tensor of the right shape.
"""

import contextlib
import fcntl
import functools
import hashlib
import json
import math
import os
import re
import unicodedata
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from fedatlas.core.errors import FedAtlasError, RunFolderError
from fedatlas.core.tensors import forms_of
from fedatlas.evaluation.classification import score_edges
from fedatlas.transport.frames import printable

FIRST = "0" * 64
"""Stands for the line before the first."""

Forms = Mapping[str, tuple[str, tuple[int, ...]]]
"""The tensors of a net: name -> (dtype, shape)."""


class EgressError(FedAtlasError):
    """A reply holds what the method does not declare; it was not sent."""


class Scores(Protocol):
    """What the rows and histograms of one evaluation at one site may hold.

    columns: of a row -> the values that it may have; ranges: metric -> its least and largest value; most: rows;
    bins: of a histogram; cases: that are scored. None: not known here.
    """

    @property
    def columns(self) -> Mapping[str, Collection[Any]]: ...
    @property
    def ranges(self) -> Mapping[str, tuple[float, float]]: ...
    @property
    def most(self) -> int | None: ...
    @property
    def bins(self) -> int: ...
    @property
    def cases(self) -> int | None: ...
    @property
    def names(self) -> Collection[str]: ...


@dataclass(frozen=True)
class Asked:
    """What is known of a question where its answer is checked; what is None is not known there.

    payload: of the question. cases: training cases of the site, as it said when it joined. scores: where it is an
    evaluation. facts: says what is wrong with a site's facts, None if nothing is.
    """

    payload: Mapping[str, Any] = field(default_factory=dict)
    cases: int | None = None
    scores: Scores | None = None
    facts: Callable[[Mapping[str, Any]], str | None] | None = None


class NetForms:
    """The tensors of a federation's nets, by name; of "NET.parameters" and "NET.buffers" only those."""

    def __init__(self, make_net: Callable[[str], nn.Module]) -> None:
        self.make_net = make_net
        self._known: dict[str, Forms] = {}
        self._findings: dict[str, int] = {}

    def __call__(self, name: str) -> Forms:
        if name not in self._known:
            net, _, part = name.partition(".")
            made = self.make_net(net)
            self._known[name], self._findings[net] = forms_of(made, part), getattr(made, "findings", 0)
        return self._known[name]

    def findings(self) -> int:
        """How many findings of the whole image the federation's net tells."""
        self("main")
        return self._findings["main"]


@dataclass(frozen=True)
class Declaration:
    """What the sites of a federation may answer, at a site and at the server alike.

    sends: function -> key -> kind, see `check`; classes: how many the label space has; forms: the tensors of a net
    by its name; asked: (site, function, payload) -> what is known of that question.
    """

    sends: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    classes: int = 0
    forms: Callable[[str], Forms] = field(default_factory=lambda: lambda net: {})
    asked: Callable[[str, str, Mapping[str, Any]], Asked] = field(
        default_factory=lambda: lambda site, function, payload: Asked(payload)
    )

    def about(self, kind: str, asked: Asked) -> "_About":
        base, _, net = kind.partition(":")
        if base not in _KINDS:
            raise EgressError(f"{kind!r}; the kinds are {', '.join(_DECLARED)}")
        findings = getattr(self.forms, "findings", lambda: _MOST_FINDINGS)
        return _About(self.classes, lambda: self.forms(net or "main"), asked, findings)


@dataclass(frozen=True)
class _About:
    """What a value is checked against. forms: of the net that its kind names; findings: how many the federation's net tells."""

    classes: int
    forms: Callable[[], Forms]
    asked: Asked
    findings: Callable[[], int]

    def floats(self) -> int:
        """The entries of all floating tensors."""
        return sum(math.prod(shape) for dtype, shape in self.forms().values() if "float" in dtype)


def check(
    value: Any,
    declared: Mapping[str, str],
    *,
    what: str,
    classes: int,
    forms: Callable[[str], Forms],
    asked: Asked | None = None,
) -> None:
    """Raises EgressError unless `problem_of` finds nothing. what: names the reply."""
    problem = problem_of(value, declared, Declaration({}, classes, forms), asked or Asked())
    if problem:
        raise EgressError(f"{what}: {problem}; it was not sent")


def problem_of(value: Any, declared: Mapping[str, str], declaration: Declaration, asked: Asked) -> str | None:
    """What is wrong with a reply; None if it holds exactly the declared keys, each of its declared kind:

    model, model:NET    a dict of all tensors of a net, with its dtypes and shapes
    some, some:NET      the same of some of its tensors
    bits, bits:NET      of all tensors, or of none, eight positions in a byte, as `sharpness.pack_bits` packs them
    sparse, sparse:NET  some entries of all tensors of a net, as `core.tensors.sparse` takes them
    number              one finite number, up to 10^15
    cases               the training cases of the site, a whole number from 1 on
    classes             class indices, none twice
    findings            indices of findings of the whole image, none twice
    per class           a list of one number from 0 on for each class
    rows                rows of evaluation, see `evaluation.evaluate.Row`
    histograms          at most one per class, see `evaluation.classification.Histogram`; with the
                        edges of `score_edges`
    facts               a plain dict of what a site says of itself when it joins

    NET is the name of a net ("main" if left out), followed by ".parameters" or ".buffers" where only those of its
    tensors are meant. The other kinds are forms in which `stages` send.

    Tensors may be without values (on the device "meta"); then only what is known without them is checked. Raises
    EgressError for a kind that does not exist.
    """
    if not isinstance(value, dict):
        return f"a {type(value).__name__} was to be sent; a dict is expected"
    extra, missing = sorted(set(value) - set(declared)), sorted(set(declared) - set(value))
    if extra or missing:
        return f"it declares {', '.join(declared)}; " + "; ".join(
            f"{text}: {_listed(names)}"
            for text, names in (("not declared", extra), ("missing", missing))
            if names
        )
    for key, kind in declared.items():
        try:
            about = declaration.about(kind, asked)
        except EgressError as error:
            raise EgressError(f"{key!r} is declared as {error}") from None
        problem = _KINDS[kind.partition(":")[0]].check(value[key], about)
        if problem:
            return f"{key!r} is declared as {kind!r}, but {problem}"
    return None


def largest(declared: Mapping[str, str], declaration: Declaration, asked: Asked) -> tuple[int, int]:
    """The bytes that names and plain values, and that tensors may have in a reply of `wire`."""
    names, tensors = ROOM, 0
    for kind in declared.values():
        more = _KINDS[kind.partition(":")[0]].bytes(declaration.about(kind, asked))
        names, tensors = names + more[0], tensors + more[1]
    return names, tensors


ROOM = 1 << 20
"""Bytes for all that a reply holds beside its value: what it answers, log, cost, or the text of an error."""
_NAMED, _CHARACTERS = 512, 7
"""Bytes of a tensor's entry beside its name; and of a character, as JSON in JSON may write it."""


def _listed(names: list[str]) -> str:
    shown = ", ".join(printable(name, 80) for name in names[:6])
    return shown + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def _named_tensors(value: Any, about: _About, *, whole: bool) -> str | None:
    if not isinstance(value, dict):
        return f"is {_described(value)}"
    expected = about.forms()
    for name, tensor in value.items():
        if not isinstance(tensor, Tensor):
            return f"holds {printable(name, 80)!r}, {_described(tensor)}"
        if name not in expected:
            return f"holds the tensor {printable(name, 80)!r}, which the net does not have"
        own, shape = expected[name]
        if tuple(tensor.shape) != shape or _dtype(tensor) != own:
            return f"{name!r} is {_dtype(tensor)}{list(tensor.shape)}, in the net it is {own}{list(shape)}"
    lacking = [name for name in expected if name not in value] if whole else []
    return f"lacks the tensors {_listed(lacking)}" if lacking else None


def _bits(value: Any, about: _About) -> str | None:
    if not isinstance(value, dict):
        return f"is {_described(value)}"
    expected = about.forms()
    for name, tensor in value.items():
        if name not in expected:
            return f"holds bits of {printable(name, 80)!r}, which the net does not have"
        numel = math.prod(expected[name][1])
        size = (numel + 7) // 8
        if not isinstance(tensor, Tensor) or _dtype(tensor) != "uint8" or tuple(tensor.shape) != (size,):
            return f"the bits of {name!r} are {_described(tensor)}, of its {numel} entries they are uint8[{size}]"
        if numel % 8 and not tensor.is_meta and int(tensor[-1]) >> numel % 8:
            return f"the bits of {name!r} go beyond its {numel} entries"
    lacking = [name for name in expected if name not in value] if value else []
    return f"lacks the bits of {_listed(lacking)}" if lacking else None


def _entries(value: Any, about: _About) -> str | None:
    if not isinstance(value, dict):
        return f"is {_described(value)}"
    expected = about.forms()
    for name, entries in value.items():
        if name not in expected:
            return f"holds entries of {printable(name, 80)!r}, which the net does not have"
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
        if len(index) != len(got) or len(index) > numel:
            return f"{name!r} has {len(index)} places for {len(got)} values of {numel}"
        if len(index) == 0 or index.is_meta:
            continue
        if int(index[0]) < 0 or int(index[-1]) >= numel or bool((index.diff() <= 0).any()):
            return f"the index of {name!r} does not increase from 0 to below {numel}"
    return None if list(value) == list(expected) else "is not of all tensors, in their order"


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


_MOST_NUMBER = 1e15


def _is_number(value: Any) -> bool:
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    return plain and -_MOST_NUMBER <= value <= _MOST_NUMBER


def _is_a(value: Any, kind: type) -> bool:
    """A truth value is no number."""
    return isinstance(value, kind) and isinstance(value, bool) == (kind is bool)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 31


def _number(value: Any, about: _About) -> str | None:
    return None if _is_number(value) else f"is {_described(value)}"


def _cases(value: Any, about: _About) -> str | None:
    if not _is_count(value) or value < 1:
        return f"is {_described(value)}, not a number of cases"
    joined_with = about.asked.cases
    return (
        None
        if joined_with in (None, value)
        else f"is {value}; the site joined with {joined_with} training cases"
    )


def _classes(value: Any, about: _About) -> str | None:
    if not isinstance(value, list) or not all(type(c) is int and 0 <= c < about.classes for c in value):
        return f"is {_described(value)}, not class indices"
    return "names a class twice" if len(set(value)) < len(value) else None


_MOST_FINDINGS = 1 << 10
"""Where the federation's net is not known."""


def _findings(value: Any, about: _About) -> str | None:
    count = about.findings()
    if not isinstance(value, list) or not all(type(f) is int and 0 <= f < count for f in value):
        return f"is {_described(value)}, not indices of findings"
    return "names a finding twice" if len(set(value)) < len(value) else None


def _per_class(value: Any, about: _About) -> str | None:
    if not isinstance(value, list) or not all(_is_number(item) and item >= 0 for item in value):
        return f"is {_described(value)}, not numbers from 0 on"
    if len(value) != about.classes:
        return f"holds {len(value)} numbers for {about.classes} classes"
    return None


ROW = {
    "split": str, "grid": str, "model": str, "round": int, "site": str, "case": str, "class": str,
    "metric": str, "value": float, "known": bool, "reason": str,
}  # fmt: skip
_LONGEST = 200
_MOST_ROWS = 1_000_000
_TOLERANCE = 1e-9


def problem_of_text(text: Any, most: int = _LONGEST) -> str | None:
    """Why a text of a site is not taken into tables; None if it is: one line of at most `most` characters that no
    spreadsheet takes for a formula."""
    if not isinstance(text, str) or len(text) > most:
        return f"{_described(text)}" + (f" of {len(text)} characters" if isinstance(text, str) else "")
    if any(unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") for c in text):
        return "a text with control characters"
    start = unicodedata.normalize("NFKC", text).strip()
    if start[:1] in ("=", "@") or (start[:1] in ("+", "-") and not re.fullmatch(r"[+-][\w.-]*", start)):
        return f"{text[:40]!r}, which a spreadsheet takes for a formula"
    return None


def _rows(value: Any, about: _About) -> str | None:
    if not isinstance(value, list):
        return f"is {_described(value)}"
    scores = about.asked.scores
    if scores is not None and scores.most is not None and len(value) > scores.most:
        return f"holds {len(value)} rows; {scores.cases} cases have at most {scores.most}"
    for row in value:
        if not isinstance(row, dict) or row.keys() != ROW.keys():
            return "holds something else than rows of evaluation"
        for key, kind in ROW.items():
            item = row[key]
            fits = (_is_number(item) or item is None) if kind is float else _is_a(item, kind)
            if not fits:
                return f"a row's {key!r} is {_described(item)}"
            if kind is str and (wrong := problem_of_text(item)):
                return f"a row's {key!r} is {wrong}"
        if scores is None:
            continue
        for key, allowed in scores.columns.items():
            if row[key] not in allowed:
                wanted = ", ".join(map(repr, sorted(allowed)[:6]))
                return f"a row's {key!r} is {row[key]!r}; asked was for {wanted}"
        low, high = scores.ranges.get(row["metric"], (math.inf, -math.inf))
        if low > high:
            return f"a row's 'metric' is {row['metric']!r}, which was not asked for"
        if row["value"] is not None and not low - _TOLERANCE <= row["value"] <= high + _TOLERANCE:
            return f"a row's {row['metric']} is {row['value']:g}; it lies within {low:g} and {high:g}"
    return None


HISTOGRAM = ("edges", "positives", "negatives", "not_finite")
MOST_BINS = 1000


@functools.cache
def _edges_of(count: int) -> tuple[tuple[float, ...], ...]:
    """All bounds that a histogram with so many of them may have."""
    possible = range(max(1, count - 41), min(count, MOST_BINS) + 1)  # at most 20 further bounds at either end
    return tuple(edges for bins in possible if len(edges := score_edges(bins)) == count)


def _histograms(value: Any, about: _About) -> str | None:
    if not isinstance(value, dict):
        return f"is {_described(value)}"
    if len(value) > about.classes:
        return f"holds {len(value)} histograms for {about.classes} classes"
    scores = about.asked.scores
    for name, histogram in value.items():
        if problem_of_text(name):
            return "names a class by something else than a short text"
        if scores is not None and name not in scores.names:
            return f"holds a histogram of {name!r}, which is no class"
        if not isinstance(histogram, dict) or set(histogram) != set(HISTOGRAM):
            return "holds something else than histograms"
        edges, counts = (
            histogram["edges"],
            [histogram["positives"], histogram["negatives"], [histogram["not_finite"]]],
        )
        if not isinstance(edges, list) or not 2 <= len(edges) <= len(score_edges(MOST_BINS)):
            return f"a histogram's edges are {_described(edges)}, not the bounds of 1 to {MOST_BINS} bins"
        if any(type(edge) is not float for edge in edges) or tuple(edges) not in _edges_of(len(edges)):
            return "a histogram's edges are not those of `score_edges`, from 0 to 1"
        bins = len(edges) - 1
        if scores is not None and tuple(edges) != score_edges(scores.bins):
            return f"a histogram has {bins} bins that are not those of {scores.bins}, which were asked for"
        for row, expected in zip(counts, (bins, bins, 1), strict=True):
            if not isinstance(row, list) or len(row) != expected:
                return f"a histogram of {bins} bins has counts that are {_described(row)}"
            if not all(_is_count(count) for count in row):
                return "a histogram's counts are not whole numbers from 0 on"
        total = sum(map(sum, counts))
        if total >= 1 << 31:
            return "a histogram's counts have a sum beyond 2^31"
        if scores is not None and scores.cases is not None and total > scores.cases:
            return f"a histogram counts {total} of {scores.cases} cases"
    return None


MOST_FACTS = 1 << 24
"""Bytes of what a site says of itself."""


def _facts(value: Any, about: _About) -> str | None:
    if not isinstance(value, dict):
        return f"is {_described(value)}"
    if any(isinstance(leaf, Tensor) for leaf in _leaves(value)):
        return "holds a tensor"
    return about.asked.facts(value) if about.asked.facts else None


# the forms in which `stages` send


def _compressed(value: Any, about: _About) -> str | None:
    """Checks the form only. `compression.restore` judges the content, whose size is limited before."""
    if not isinstance(value, dict) or set(value) != {"difference"}:
        return f"is {_described(value)}, not a compressed difference"
    return None


def _masked(value: Any, about: _About) -> str | None:
    length = 1 + about.floats()
    if not isinstance(value, Tensor) or _dtype(value) != "int64" or tuple(value.shape) != (length,):
        return f"is {_described(value)}, not int64[{length}]"
    return None


def _sealed(value: Any, sizes: Mapping[str, int]) -> str | None:
    """Is it a dict of so many bytes each?"""
    if not isinstance(value, dict) or set(value) != set(sizes):
        return f"is {_described(value)}, not one of {', '.join(sizes)}"
    for name, size in sizes.items():
        item = value[name]
        if not isinstance(item, Tensor) or _dtype(item) != "uint8" or tuple(item.shape) != (size,):
            return f"holds for {name} {_described(item)}, not uint8[{size}]"
    return None


def _public(value: Any, about: _About) -> str | None:
    return _sealed(value, dict.fromkeys(("seal", "mask", "digest"), 32))


def _shares(value: Any, about: _About) -> str | None:
    return _sealed(value, dict.fromkeys(about.asked.payload["publics"], 12 + 64 + 16))


def _revealed(value: Any, about: _About) -> str | None:
    if not isinstance(value, dict) or set(value) != {"seeds", "keys"}:
        return f"is {_described(value)}, not seeds and keys"
    asked = {"seeds": about.asked.payload["survivors"], "keys": about.asked.payload["dropped"]}
    for kind, sites in asked.items():
        if problem := _sealed(value[kind], dict.fromkeys(sites, 32)):
            return f"of its {kind} {problem}"
    return None


def bytes_of(forms: Forms, more: int = 0) -> int:
    """Of the values of all tensors; more: for every entry."""
    return sum(math.prod(shape) * (_WIDTHS[dtype] + more) for dtype, shape in forms.values())


def _of_tensors(more: int = 0) -> Callable[[_About], tuple[int, int]]:
    """For every tensor of the net one, or two."""

    def count(about: _About) -> tuple[int, int]:
        forms = about.forms()
        return sum(2 * (_NAMED + _CHARACTERS * len(name)) for name in forms), bytes_of(forms, more)

    return count


_WIDTHS = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip


def _of_rows(about: _About) -> tuple[int, int]:
    scores = about.asked.scores
    most = _MOST_ROWS if scores is None or scores.most is None else min(scores.most, _MOST_ROWS)
    return most * (_NAMED + 3 * _CHARACTERS * _LONGEST), 0


def _of_peers(about: _About) -> tuple[int, int]:
    payload = about.asked.payload
    sites = [
        *payload.get("publics", ()),
        *payload.get("survivors", ()),
        *payload.get("dropped", ()),
        "",
        "",
        "",
    ]
    return sum(_NAMED + _CHARACTERS * len(site) for site in sites), 128 * len(sites)


@dataclass(frozen=True)
class _Kind:
    """check: what is wrong with a value, None if nothing is. bytes: (of names and plain values, of tensors) that it
    may have."""

    check: Callable[[Any, _About], str | None]
    bytes: Callable[[_About], tuple[int, int]]


_DECLARED: dict[str, _Kind] = {
    "model": _Kind(functools.partial(_named_tensors, whole=True), _of_tensors()),
    "some": _Kind(functools.partial(_named_tensors, whole=False), _of_tensors()),
    "bits": _Kind(_bits, _of_tensors()),
    "sparse": _Kind(_entries, _of_tensors(4)),
    "number": _Kind(_number, lambda about: (64, 0)),
    "cases": _Kind(_cases, lambda about: (64, 0)),
    "classes": _Kind(_classes, lambda about: (32 * about.classes, 0)),
    "findings": _Kind(_findings, lambda about: (32 * about.findings(), 0)),
    "per class": _Kind(_per_class, lambda about: (32 * about.classes, 0)),
    "rows": _Kind(_rows, _of_rows),
    "histograms": _Kind(
        _histograms, lambda about: (about.classes * (_CHARACTERS * _LONGEST + 64 * (MOST_BINS + 1)), 0)
    ),
    "facts": _Kind(_facts, lambda about: (MOST_FACTS, 0)),
}
_KINDS = _DECLARED | {
    "compressed": _Kind(_compressed, _of_tensors(5)),
    "masked": _Kind(_masked, lambda about: (_NAMED, 8 * (1 + about.floats()))),
    "public": _Kind(_public, _of_peers),
    "shares": _Kind(_shares, _of_peers),
    "revealed": _Kind(_revealed, _of_peers),
}

_NAME = re.compile(r"[a-z][a-z_]*")
MOST_NUMBERS = 24


def check_log(numbers: Mapping[str, float], *, what: str) -> None:
    """Raises EgressError unless `problem_of_log` finds nothing."""
    if problem := problem_of_log(numbers):
        raise EgressError(f"{what}: {problem}")


def problem_of_log(numbers: Mapping[str, Any]) -> str | None:
    """What is wrong with logged numbers; None if they cannot be one per sample: at most `MOST_NUMBERS` of them, with
    names without digits or other marks."""
    odd = [name for name in numbers if not _NAME.fullmatch(name) or len(name) > _LONGEST]
    if odd:
        return (
            f"logs {printable(odd[0], 80)!r}; the name of a logged number has small letters and _ only, so that none "
            "can stand for a case"
        )
    if len(numbers) > MOST_NUMBERS:
        return f"logs {len(numbers)} numbers; at most {MOST_NUMBERS} leave a site per call"
    for name, value in numbers.items():  # one that is not finite is shown as such
        if not isinstance(value, float) and not _is_number(value):
            return f"logs {name!r}, which is {_described(value)}"
    return None


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {_dtype(value)}{list(value.shape)}"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if type(value) is float:
        return f"{value:g}"
    if type(value) is int:
        return str(value) if abs(value) < 1 << 64 else "a whole number beyond 2^64"
    return f"a {type(value).__name__}"


def _leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, dict | list):
        for item in tree.values() if isinstance(tree, dict) else tree:
            yield from _leaves(item)
    else:
        yield tree


def contents(value: Any) -> dict[str, str]:
    """A line per thing that a reply holds: path -> dtype and shape of a tensor, type of a plain value, with equal
    neighbours of a long list as one."""
    lines: dict[str, str] = {}

    def walk(item: Any, path: str) -> None:
        if isinstance(item, Tensor):
            lines[path] = f"{str(item.dtype).removeprefix('torch.')}{list(item.shape)}"
        elif isinstance(item, dict):
            for key, inner in item.items():
                walk(inner, f"{path}/{key}" if path else key)
        elif isinstance(item, list):
            lines[path] = f"{len(item)} × {type(item[0]).__name__}" if item else "nothing"
        else:
            lines[path] = type(item).__name__

    walk(value, "")
    return lines


# --------------------------------------------------------------------------------------------------------- the log


@dataclass(frozen=True)
class EgressLog:
    """The log of one site. run: the identifier of the run; method: the name of its method."""

    path: Path
    run: str = ""
    method: str = ""

    def record(self, what: Mapping[str, Any], data: bytes | bytearray | memoryview) -> None:
        """Appends a line for a message that is about to leave; it is on the disk when this returns. what: function,
        round, call and contents.

        Half a line at the end, which a crash has left, is followed by a line that says so and goes on with the chain
        from the last whole line. Raises OSError where the log cannot be written; the message must then not be sent.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+b", buffering=0) as file:
            # where the file system has no locks, a site is served by one process at a time all the same
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
            size = file.seek(0, 2)
            last, rest = _ending(file)
            previous = last[:64].decode("ascii", "replace") if last else FIRST
            text = b""
            if rest and _of_line(rest)[1]:  # whole, but for the end of the line
                text, previous = b"\n", rest[:64].decode()
            elif rest:
                mark = self._line({TORN: _torn(rest)}, previous)
                text, previous = b"\n" + mark, mark[:64].decode()
            content = {**what, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            try:
                left = memoryview(text + self._line(content, previous))
                while left:
                    left = left[file.write(left) :]
                os.fsync(file.fileno())
            except OSError:  # half a line would have to be explained
                file.truncate(size)
                raise

    def _line(self, what: Mapping[str, Any], previous: str) -> bytes:
        """A line with its own digest, over all that is in it before."""
        time = datetime.now(UTC).isoformat(timespec="milliseconds")
        plain = {"time": time, "run": self.run, "method": self.method, **what, "previous": previous}
        text = json.dumps(plain, sort_keys=True, ensure_ascii=False)
        return f"{hashlib.sha256(text.encode()).hexdigest()} {text}\n".encode()


TORN = "torn"
"""The key of a line that speaks of the half line before it."""


def _torn(rest: bytes) -> dict[str, Any]:
    return {"bytes": len(rest), "sha256": hashlib.sha256(rest).hexdigest()}


def _ending(file: Any) -> tuple[bytes, bytes]:
    """The last line of a log that has an end, without it, and the bytes behind it."""
    size, step = file.seek(0, 2), 4096
    while True:
        start = max(size - step, 0)
        file.seek(start)
        text = file.read(size - start)
        end = text.rfind(b"\n")
        begin = text.rfind(b"\n", 0, max(end, 0))
        if start == 0 or begin >= 0:
            return text[begin + 1 : max(end, 0)], text[end + 1 :]
        step *= 8


def _of_line(raw: bytes) -> tuple[dict[str, Any], bool]:
    """The record of a line ({} if the line is not valid), and whether its digest matches."""
    digest, _, body = raw.decode("utf-8", "replace").partition(" ")
    try:
        plain = json.loads(body)
    except (ValueError, RecursionError):
        return {}, False
    if not isinstance(plain, dict):
        return {}, False
    return plain, hashlib.sha256(body.encode()).hexdigest() == digest


def read_log(path: Path) -> list[dict[str, Any]]:
    """The lines of a log, each with its number from 1 and, under "broken", what is wrong with it ("" if nothing).

    Half a line as a crash leaves it is not broken; it has "half", its bytes, and is the last one, or the line after
    it marks it (`TORN`) and goes on with the chain. Raises RunFolderError if there is no log.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        raise RunFolderError(f"{path}: cannot be read ({error.strerror or error})") from None
    raws = text.split(b"\n")
    ended = raws[-1] == b""
    raws = raws[:-1] if ended else raws
    lines, previous = [], FIRST
    for number, raw in enumerate(raws, 1):
        plain, own = _of_line(raw)
        digest = raw[:64].decode("utf-8", "replace")
        about = {**plain, "line": number, "digest": digest, "broken": ""}
        if not plain and (_is_marked(raw, raws[number:], previous) or (number == len(raws) and not ended)):
            lines.append(about | {"half": len(raw)})
            continue
        if not plain:
            about["broken"] = "not a line of the log"
        elif not own:
            about["broken"] = "was changed after it was written"
        elif plain.get("previous") != previous:
            about["broken"] = "does not follow the line before: a line was changed, taken out or put in"
        elif TORN in plain and "half" not in (lines[-1] if lines else {}):
            about["broken"] = "speaks of half a line before it, which is not there"
        lines.append(about)
        previous = digest
    return lines


def _is_marked(raw: bytes, after: list[bytes], previous: str) -> bool:
    """Is this the half line of which the next line speaks, which follows the last whole one?"""
    plain, own = _of_line(after[0]) if after else ({}, False)
    return own and plain.get(TORN) == _torn(raw) and plain.get("previous") == previous
