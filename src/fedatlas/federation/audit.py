"""`fedatlas audit`: what left a hospital, from its own log."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedatlas.core.errors import RunFolderError
from fedatlas.transport.egress import TORN, read_log
from fedatlas.transport.frames import shown

LOG = "egress.jsonl"
_TENSOR = re.compile(r"\w+\[(\d+(, \d+)*)?\]")
"""How the log says dtype and shape of a tensor; all else is told as it is."""


def logs_of(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Site -> the lines of its log, see `read_log`. folder: a hospital's kit, a site's folder of a run, or a run.

    Raises RunFolderError if there is no log in it.
    """
    paths = [folder / LOG, *sorted(folder.glob(f"sites/*/{LOG}"))]
    logs = {path.parent.name: read_log(path) for path in paths if path.exists()}
    if not logs:
        raise RunFolderError(f"{folder}: no {LOG} in it; nothing left from here, or it is no site's folder")
    return logs


def text_of(logs: Mapping[str, Sequence[Mapping[str, Any]]], *, full: bool = False) -> str:
    """The logs for a person: a line per message, and what is wrong with the log; full: every tensor."""
    lines = []
    for site, entries in logs.items():
        total = sum(entry.get("bytes", 0) for entry in entries)
        messages = sum("half" not in entry and TORN not in entry for entry in entries)
        lines.append(f"{site}: {messages} messages, {total:,} bytes")
        for entry in entries:
            if "half" in entry:
                lines.append(
                    f"  line {entry['line']}: HALF A LINE of {entry['half']:,} bytes, {_left(entry, entries)}"
                )
                continue
            if TORN in entry and not entry["broken"]:
                continue
            if entry["broken"]:
                lines.append(f"  line {entry['line']}: BROKEN, it {entry['broken']}")
                if "sha256" not in entry:
                    continue
            what = f"round {entry['round']} call {entry['call']} {shown(entry['function'])}"
            lines.append(
                f"  {entry['time']}  {shown(entry['run'])}  {shown(entry['method'])}  {what}: {_told(entry['contents'])}; "
                f"{entry['bytes']:,} bytes, SHA-256 {entry['sha256'][:16]}…"
            )
            if full:
                lines += [f"      {shown(path)}: {shown(form)}" for path, form in entry["contents"].items()]
        broken = sum(bool(entry["broken"]) for entry in entries)
        halves = sum("half" in entry for entry in entries)
        crashed = f"; torn by a crash: {halves}" if halves else ""
        lines.append(
            f"  the log is NOT whole: {broken} of its lines do not fit the chain{crashed}"
            if broken
            else f"  every whole line fits the chain{crashed}"
            if halves
            else "  every line fits the chain"
        )
    return "\n".join(lines)


def _left(half: Mapping[str, Any], entries: Sequence[Mapping[str, Any]]) -> str:
    """What is known of half a line."""
    after = [entry for entry in entries if entry["line"] == half["line"] + 1]
    if not after:
        return "the last: a crash while it was written leaves this, or a cut; the next message will be preceded by a mark"
    return f"torn by a crash while it was written: its message was not sent. Marked at {after[0]['time']}"


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
