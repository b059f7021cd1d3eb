"""`fedatlas audit`: what left a hospital, from its own log."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedatlas.core.errors import RunFolderError
from fedatlas.transport.egress import TORN, read_log
from fedatlas.transport.frames import shown

LOG = "egress.jsonl"
_TENSOR = re.compile(r"\w+\[(\d{1,19}(, \d{1,19}){0,63})?\]", re.ASCII)
"""How the log says dtype and shape of a tensor; all else is told as it is."""

_TEXT, _COUNT, _DIGEST = "a text", "a whole number from 0 to 2^63 - 1", "a SHA-256 in hex"
_CONTENTS, _HALF = "a dict of texts", "a dict of bytes and sha256"
_OF_EVERY_LINE = {"time": _TEXT, "run": _TEXT, "method": _TEXT}
_OF_A_MESSAGE = _OF_EVERY_LINE | {
    "function": _TEXT,
    "round": _COUNT,
    "call": _COUNT,
    "contents": _CONTENTS,
    "bytes": _COUNT,
    "sha256": _DIGEST,
}
_OF_A_MARK = _OF_EVERY_LINE | {TORN: _HALF}
"""What `EgressLog` writes into a line: field -> what it holds."""


def logs_of(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Site -> the lines of its log, see `read_log`. folder: a hospital's kit, a site's folder of a run, or a run.

    A line that does not have the fields of a message, or of a mark of half a line, is "broken" as well. Raises
    RunFolderError if there is no log in it.
    """
    paths = [folder / LOG, *sorted(folder.glob(f"sites/*/{LOG}"))]
    logs = {path.parent.name: [_judged(line) for line in read_log(path)] for path in paths if path.exists()}
    if not logs:
        if not folder.is_dir():
            why = "no such folder; give a hospital's folder, a site's in a run, or a run"
        elif any((folder / name).is_file() for name in ("kit.yaml", "run.json")):
            why = f"no {LOG} in it: nothing has left from here yet"
        else:
            why = f"no {LOG} in it, and it is no hospital's folder and no run; give one, or a site's folder in a run"
        raise RunFolderError(f"{folder}: {why}")
    return logs


def _judged(entry: dict[str, Any]) -> dict[str, Any]:
    """A line of `read_log`, of which "broken" also says what is wrong with its fields."""
    nothing_read = entry.keys() <= {"line", "digest", "broken"}
    problem = None if _is_half(entry) or nothing_read else _problem_of(entry)
    if problem is None:
        return entry
    return entry | {"broken": f"{entry['broken']}; it {problem}" if entry["broken"] else problem}


def _is_half(entry: Mapping[str, Any]) -> bool:
    """Is this half a line as a crash leaves it? A line that says so of itself is none: only `read_log` says it."""
    return "half" in entry and "previous" not in entry and not entry["broken"]


def _problem_of(entry: Mapping[str, Any]) -> str | None:
    """What is wrong with the fields of a line that is not half a line; None: nothing."""
    if "half" in entry:
        return "has the field 'half', which the log does not write"
    fields = _OF_A_MARK if TORN in entry else _OF_A_MESSAGE
    for field, kind in fields.items():
        if field not in entry:
            return f"lacks the field {field!r}; it has to have {', '.join(fields)}"
        if not _holds(entry[field], kind):
            value = entry[field]
            got = (
                f"{shown(value, 40)!r}"
                if isinstance(value, str | int | float)
                else f"a {type(value).__name__}"
            )
            return f"has {got} as {field!r}; allowed is {kind}"
    return None


def _holds(value: Any, kind: str) -> bool:
    """Is this value what a field of this kind holds?"""
    if kind == _COUNT:
        return type(value) is int and 0 <= value < 1 << 63
    if kind == _DIGEST:
        return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None
    if kind == _CONTENTS:
        return isinstance(value, dict) and all(isinstance(form, str) for form in value.values())
    if kind == _HALF:
        return (
            isinstance(value, dict)
            and set(value) == {"bytes", "sha256"}
            and _holds(value["bytes"], _COUNT)
            and _holds(value["sha256"], _DIGEST)
        )
    return isinstance(value, str)


def text_of(logs: Mapping[str, Sequence[Mapping[str, Any]]], *, full: bool = False) -> str:
    """The logs for a person: a line per message, and what is wrong with the log; full: every tensor."""
    lines = []
    for site, entries in logs.items():
        halves = sum(map(_is_half, entries))
        total = sum(entry["bytes"] for entry in entries if _is_message(entry))
        messages = len(entries) - halves - sum(TORN in entry for entry in entries)
        lines.append(f"{site}: {messages} messages, {total:,} bytes")
        for entry in entries:
            if _is_half(entry):
                lines.append(
                    f"  line {entry['line']}: HALF A LINE of {entry['half']:,} bytes, {_left(entry, entries)}"
                )
                continue
            if TORN in entry and not entry["broken"]:
                continue
            if entry["broken"]:
                lines.append(f"  line {entry['line']}: BROKEN, it {entry['broken']}")
                if not _is_message(entry):
                    continue
            what = f"round {entry['round']} call {entry['call']} {shown(entry['function'])}"
            lines.append(
                f"  {shown(entry['time'])}  {shown(entry['run'])}  {shown(entry['method'])}  {what}: {_told(entry['contents'])}; "
                f"{entry['bytes']:,} bytes, SHA-256 {entry['sha256'][:16]}…"
            )
            if full:
                lines += [f"      {shown(path)}: {shown(form)}" for path, form in entry["contents"].items()]
        broken = sum(bool(entry["broken"]) for entry in entries)
        crashed = f"; torn by a crash: {halves}" if halves else ""
        lines.append(
            f"  the log is NOT whole: {broken} of its lines are BROKEN{crashed}"
            if broken
            else f"  every whole line fits the chain{crashed}"
            if halves
            else "  every line fits the chain"
        )
    return "\n".join(lines)


def _is_message(entry: Mapping[str, Any]) -> bool:
    """Does the line have all that is told of a message?"""
    return TORN not in entry and _problem_of(entry) is None


def _left(half: Mapping[str, Any], entries: Sequence[Mapping[str, Any]]) -> str:
    """What is known of half a line."""
    after = [entry for entry in entries if entry["line"] == half["line"] + 1]
    if not after:
        return "the last: a crash while it was written leaves this, or a cut; the next message will be preceded by a mark"
    return f"torn by a crash while it was written: its message was not sent. Marked at {shown(after[0].get('time'))}"


def _told(contents: Mapping[str, str]) -> str:
    """What a message holds, with tensors counted."""
    tensors = [form for form in contents.values() if _TENSOR.fullmatch(form)]
    numbers = sum(_product(form[form.index("[") + 1 : form.index("]")]) for form in tensors)
    plain = [
        f"{shown(path)} ({shown(form)})" for path, form in contents.items() if not _TENSOR.fullmatch(form)
    ]
    if len(plain) > 8:
        plain = [f"{len(plain)} plain values (--full lists them)"]
    counted = [f"{len(tensors)} tensors with {numbers:,} numbers"] if tensors else []
    return ", ".join([*counted, *plain])


def _product(sizes: str) -> int:
    product = 1
    for size in sizes.split(","):
        product *= int(size or 1)
    return product
