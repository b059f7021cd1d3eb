"""Frames on a stream of bytes, questions to sites as plain values, and text from elsewhere for a person to read. Imports
neither torch nor an engine, so that the small processes between a federation and its sites start at once and hold nothing.

A frame is 8 bytes of length and that many bytes.
"""

import json
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO


@dataclass(frozen=True)
class Question:
    """One call of one site. Payloads and the answer are files of `wire` bytes; only their paths stand here.

    shared: what every site gets; own: what this one gets beside it; reply: where the answer is to lie, whole or
    not at all. about: what the site must know of the run to serve the call at all, plain values. memory: the version
    of its private memory that the site starts from, which is that of its last answer that counted; None: the newest.
    most: bytes that an answer with what is declared may have; an engine takes no more of one. None: it is not known.
    """

    site: str
    function: str
    round: int
    call: int
    shared: Path
    own: Path | None
    reply: Path
    about: Mapping[str, Any] = field(default_factory=dict)
    memory: str | None = None
    most: int | None = None

    def head(self) -> bytes:
        """All but the paths and `most`, which mean nothing on another machine, as JSON."""
        plain = {name: getattr(self, name) for name in ("site", "function", "round", "call", "memory")}
        return json.dumps(plain | {"about": dict(self.about)}, sort_keys=True).encode()

    def to_json(self) -> bytes:
        """With the paths: for a process on this machine."""
        # absolute: the other process runs in a folder of its own
        own = str(self.own.absolute()) if self.own else None
        paths = {"shared": str(self.shared.absolute()), "own": own, "reply": str(self.reply.absolute())}
        return json.dumps(json.loads(self.head()) | paths | {"most": self.most}, sort_keys=True).encode()

    def at(self, shared: Path, own: Path | None, reply: Path) -> "Question":
        """The same question with the paths of another machine."""
        return replace(self, shared=shared, own=own, reply=reply)


def question_of(data: bytes | bytearray, **paths: Path | None) -> Question:
    """The question of `Question.to_json`, or of `Question.head` with its paths given.

    Raises ValueError for bytes that are neither.
    """
    plain = json.loads(data)
    if not isinstance(plain, dict):
        raise ValueError("a question is a JSON object")
    for key, end in _ENDS.items():
        if type(plain.get(key)) is not int or not 0 <= plain[key] < end:
            raise ValueError(
                f"a question's {key} is {shown(plain.get(key))}; a whole number below {end:,} is expected"
            )
    if len(str(plain.get("function", ""))) > _LONGEST:
        raise ValueError(f"a question's function has more than {_LONGEST} characters")
    given: dict[str, Any] = {key: plain[key] for key in ("shared", "own", "reply") if key in plain} | paths
    try:
        return Question(
            site=str(plain["site"]),
            function=str(plain["function"]),
            round=int(plain["round"]),
            call=int(plain["call"]),
            shared=Path(given["shared"]),
            own=Path(given["own"]) if given["own"] else None,
            reply=Path(given["reply"]),
            about=dict(plain["about"]),
            memory=None if plain["memory"] is None else str(plain["memory"]),
            most=None if plain.get("most") is None else int(plain["most"]),
        )
    except (KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"a question lacks or misuses {error}") from None


_ENDS = {"round": 10**6, "call": 10**6}
"""Where the numbers of rounds and calls end; files are named by them."""
_LONGEST = 100
"""Characters that the name of a function may have."""


class TooLarge(ValueError):
    """An answer is larger than one with what is declared. most: bytes that such a one may have."""

    def __init__(self, most: int) -> None:
        super().__init__(
            f"its answer has more than the {most:,} bytes that one with what is declared may have"
        )


def write_frame(stream: BinaryIO, data: bytes | bytearray | memoryview) -> None:
    stream.write(len(data).to_bytes(8, "little"))
    stream.write(data)
    stream.flush()


def read_frame(stream: BinaryIO) -> bytearray | None:
    """The next frame; None where the stream has ended, also in the middle of one."""
    head = stream.read(8)
    if len(head) < 8:
        return None
    length = int.from_bytes(head, "little")
    data = bytearray(length)
    view, filled = memoryview(data), 0
    while filled < length:
        got = stream.readinto(view[filled:])  # type: ignore[attr-defined]
        if not got:
            return None
        filled += got
    return data


def printable(text: str, most: int) -> str:
    """What came from elsewhere, for a person to read: at most so many characters, none of them a control character
    except the end of a line."""
    shown = "".join(c if c == "\n" or unicodedata.category(c)[0] != "C" else "?" for c in text[:most])
    return shown + ("…" if len(text) > most else "")


def shown(text: Any, most: int = 200) -> str:
    """As `printable`, on one line."""
    return printable(str(text), most).replace("\n", "?")
