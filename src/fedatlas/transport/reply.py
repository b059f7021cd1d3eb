"""The reply of a site: what a site makes of it, and how the server opens what claims to be one.

{"to": question, "from": installation, "memory": version, "value": answer, "log": numbers, "cost": numbers}
{"to": question, "from": installation, "error": {"code": class of the exception, "text": its text, if it may leave}}
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

from fedatlas.core.errors import DiskFull, FedAtlasError, WireError
from fedatlas.core.tensors import Tree, is_finite, require_same
from fedatlas.transport import wire
from fedatlas.transport.egress import contents
from fedatlas.transport.frames import Question, printable
from fedatlas.transport.store import read_whole
from fedatlas.transport.wire import Data

_COST = ("seconds", "peak_mb")
_CODE, _VERSION, _INSTANCE = (re.compile(form) for form in (r"\w{1,80}", r"[\w:.-]{0,80}", r"[\w-]{0,80}"))


class Refused(FedAtlasError):
    """An answer that cannot be used."""


class Passing(Refused):
    """An answer that cannot be used for a reason that may pass by itself, as a full disk at the site, or damage on the
    way: who may wait asks again."""


@dataclass(frozen=True)
class CallId:
    """Which call of which site a question and its reply belong to."""

    site: str
    function: str
    round: int
    call: int

    def to_plain(self) -> dict[str, Tree]:
        return dict(vars(self))


@dataclass
class Answer:
    """What a site answers to a call. value: what stands for what its function returned; log: numbers by name; cost:
    seconds and peak_mb (MiB)."""

    value: dict[str, Any]
    log: dict[str, float]
    cost: dict[str, float] = field(default_factory=dict)

    def encoded(self, call: CallId, instance: str, memory: str) -> bytearray:
        """The reply. instance: the installation of the site; memory: the version with which the call left it."""
        head: dict[str, Tree] = {"to": call.to_plain(), "from": instance, "memory": memory}
        return wire.encode(head | vars(self))

    def contents(self) -> dict[str, str]:
        """What the egress log says of it, see `egress.contents`."""
        return contents(vars(self))


def sent_again(reply: Data, instance: str) -> tuple[Data, str]:
    """A reply that is sent again, from the installation that the site is now: it may have been moved since; and the
    version of the site's memory that it names."""
    tree: Any = wire.decode(reply, copy=False)
    return wire.encode({**tree, "from": instance}), tree["memory"]


def opened(tree: Any, question: Question, instance: str | None = None) -> dict[str, Any]:
    """A reply with "value", "log", "cost", "from" and "memory", each of its type; what is in "value" is not checked.

    instance: the installation that may answer; None: any. Raises Refused for an error reply and everything that is no
    reply of ours, and of these Passing for a reply to another question, that of another installation, and an error that
    may pass.
    """
    to = tree.get("to") if isinstance(tree, dict) else None
    if not isinstance(to, dict) or not all(type(value) in (str, int) for value in to.values()):
        raise Refused("its answer is not the reply of a site")
    asked = CallId(question.site, question.function, question.round, question.call).to_plain()
    if to != asked:
        answered = ", ".join(f"{name} {printable(str(to.get(name)), 80)}" for name in asked)
        wanted = ", ".join(f"{name} {value}" for name, value in asked.items())
        raise Passing(f"it answered another question ({answered}); asked was {wanted}")
    if not isinstance(tree.get("from"), str) or not _INSTANCE.fullmatch(tree["from"]):
        raise Refused("its answer does not say which installation it is from")
    if instance is not None and tree["from"] != instance:
        raise Passing(
            "another installation answered under its name than the one that joined this run; its folder was copied "
            "and is used in two places, or was made anew"
        )
    if "error" in tree:
        raise _refusal(tree["error"])
    if not isinstance(tree.get("value"), dict):
        raise Refused(f"answered a {type(tree.get('value')).__name__}; functions at a site return a dict")
    if set(tree) != {"to", "from", "memory", "value", "log", "cost"}:
        raise Refused("its answer lacks its log or its cost, or holds more than an answer does")
    log, cost, memory = tree["log"], tree["cost"], tree["memory"]
    if not isinstance(log, dict):
        raise Refused(f"its log is a {type(log).__name__}")
    if not isinstance(cost, dict) or set(cost) != set(_COST) or not all(map(_is_cost, cost.values())):
        raise Refused(f"its cost is not {' and '.join(_COST)}, as numbers from 0 on")
    if not isinstance(memory, str) or not _VERSION.fullmatch(memory):
        raise Refused("its answer does not name the version of its memory")
    return tree


def _is_cost(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= 1e9


def _refusal(error: Any) -> Refused:
    """The exception that stands for an error reply; `error` is its content."""
    code, text = (error.get("code"), error.get("text")) if isinstance(error, dict) else (None, None)
    if not isinstance(code, str) or not _CODE.fullmatch(code) or not isinstance(text, str | None):
        return Refused("it answered with an error that says nothing")
    passing = (OSError.__name__, DiskFull.__name__, WireError.__name__)
    kind = Passing if code in passing else Refused
    return kind(explained(code) if text is None else f"{code}: {text}")


_CODES = {
    "EgressError": "its answer held more than the method declares, and was not sent",
    "FloatingPointError": "its training met a number that is not finite",
    "MemoryError": "it ran out of memory",
    "OSError": "its disk or a file failed it (full?)",
    "DiskFull": "its disk is full",
    "DataChanged": "its data are not those with which this run began; put them back, or go on with --data-changed",
    "DataError": "a case or label of its data is not usable",
    "RunFolderError": "its kept memory is not usable",
    "WireError": "what it received was damaged",
    "FederationMismatch": "it agreed to another federation file, has other versions, or was not joined to this run",
}


def explained(code: str) -> str:
    """What the code of an error reply means; the text of the error stays at the site."""
    meaning = _CODES.get(code, "an error")
    return f"{code}: {meaning}; the text is in errors.log at the site"


def check_numbers(value: Mapping[str, Any], model: Any) -> None:
    """Checks the values of an answer; `model` is the one that was sent with the question, if any was.

    Raises Refused for a number that is not finite, NameMismatch for a model that is not like the one sent.
    """
    for key, item in value.items():
        if not is_finite(item):
            raise Refused(f"its answer holds a number that is not finite, in {key!r}")
    answered = value.get("model")
    if isinstance(model, dict) and isinstance(answered, dict):
        require_same(model, answered, asked="its model")


class Spool:
    """The checked replies to one call, kept on disk and decoded one at a time: `core.contract.Replies`."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        self.files = dict(sorted(files.items()))
        self.sites = list(self.files)

    def __iter__(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for site, path in self.files.items():
            tree = wire.decode(read_whole(path), copy=False)
            assert isinstance(tree, dict)
            yield site, tree["value"]  # type: ignore[misc]
            del tree

    def each(self, key: str) -> Iterator[Any]:
        for path in self.files.values():
            tree: Any = wire.decode(read_whole(path), copy=False)
            item = tree["value"][key]
            del tree
            yield item
            del item

    def plain(self, key: str) -> list[Any]:
        return [self._forms(site)[key] for site in self.sites]

    def has(self, key: str) -> bool:
        """Does every reply hold this key?"""
        return bool(self.sites) and all(key in self._forms(site) for site in self.sites)

    def _forms(self, site: str) -> dict[str, Any]:
        with self.files[site].open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as data:
            tree = wire.plain(memoryview(data))
        assert isinstance(tree, dict) and isinstance(tree["value"], dict)
        return tree["value"]
