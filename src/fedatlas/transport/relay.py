"""Between a federation and a distributed engine: questions over a local socket, payloads as files.

An engine's own processes (the server's job, the hospital's client) only carry bytes. The run loop stays in the
process of `fedatlas run`, the data and the net stay in a site's own process; at both ends the engine's process
talks to ours through this module. So an engine's process that dies costs one call and not the run, a training
process that dies costs no engine's job, and an engine never holds a model longer than it takes to pass on.

    fedatlas run --(ServerRelay)-- engine's job ~~ network ~~ engine's client --(SiteRelay)-- site's process

The socket is a Unix socket in a new folder that only this user may enter; a file names it. Imports no torch.
"""

import contextlib
import json
import os
import queue
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedatlas.transport.frames import Question, question_of, read_frame, write_frame

Lost = str
"""Why a site did not answer, for a person: no text of the site's exception is ever in it."""


NOT_STORED = "the server could not store its answer"
"""Begins a reason that is the server's own, and that no site may give."""


NOT_AN_ANSWER = "its answer is not one to this question"


def said_by_site(reason: str) -> Lost:
    """A reason that came from a site: short, printable, and none of the server's own, for which a run may wait."""
    said = "".join(c for c in reason[:200] if c.isprintable())
    return NOT_AN_ANSWER if said.startswith(NOT_STORED) else said


def not_stored(error: OSError) -> Lost:
    return f"{NOT_STORED} ({error.strerror})"


def skewed(whose: str, ahead: float) -> str:
    """A sentence for a clock that is so many seconds ahead of the server's (below 0: behind)."""
    if not ahead:
        return f"{whose} agrees with the server's again"
    how = "ahead of" if ahead > 0 else "behind"
    return f"{whose} is {abs(ahead) / 60:.0f} minutes {how} the server's; set it, nothing of the run depends on it"


class RelayError(Exception):
    """The other end of a relay is not there, or has gone."""


class _Listener:
    """A Unix socket whose path a file names; that file is removed on closing."""

    def __init__(self, address: Path) -> None:
        self.address = address
        self.folder = Path(tempfile.mkdtemp(prefix="fedatlas-"))  # 0700, and short: paths of sockets are
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.bind(str(self.folder / "socket"))
        self.socket.listen()
        address.parent.mkdir(parents=True, exist_ok=True)
        part = address.with_name(f".{address.name}.{os.getpid()}")
        part.write_text(str(self.folder / "socket"), encoding="utf-8")
        os.replace(part, address)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            if self.address.read_text(encoding="utf-8") == str(self.folder / "socket"):
                self.address.unlink()
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def _connect(address: Path, patience: float) -> socket.socket:
    """A connection to the socket that the file `address` names, which may not be there yet."""
    deadline = time.monotonic() + patience
    while True:
        made = socket.socket(socket.AF_UNIX)
        try:
            made.connect(address.read_text(encoding="utf-8"))
            return made
        except OSError as error:
            made.close()
            if time.monotonic() > deadline:
                raise RelayError(f"{address}: nobody listens there ({error})") from None
        time.sleep(0.1)


# ------------------------------------------------------------------------------------------------- at the server


@dataclass(frozen=True)
class Ask:
    """Questions that are put at once. deadline: seconds that the sites have, from now."""

    number: int
    questions: tuple[Question, ...]
    deadline: float


class JobEnd:
    """The engine's end at the server: in its job's process, one for the job's life.

        end = JobEnd(address)
        for ask in end.asks():
            …  # put every question to its site; as each answer arrives, write it to question.reply, then
            end.answered(ask, site)
            …  # or, where the engine knows that none will come
            end.lost(ask, site, "timeout")

    `answered` and `lost` may be called from any thread, and after the deadline (they are then ignored). The loop
    ends when the federation has nothing more to ask, or its process has gone.
    """

    def __init__(self, address: Path, patience: float = 60.0) -> None:
        self.socket = _connect(address, patience)
        self.stream: Any = self.socket.makefile("rwb")
        self.lock = threading.Lock()

    def asks(self) -> Iterator[Ask]:
        try:
            while (frame := read_frame(self.stream)) is not None:
                what = json.loads(frame)
                questions = tuple(question_of(text.encode()) for text in what["questions"])
                yield Ask(what["ask"], questions, what["deadline"])
        except OSError:
            return

    def answered(self, ask: Ask, site: str) -> None:
        self._tell({"ask": ask.number, "site": site, "lost": None})

    def lost(self, ask: Ask, site: str, reason: Lost) -> None:
        self._tell({"ask": ask.number, "site": site, "lost": reason})

    def present(self, sites: Sequence[str]) -> None:
        """Tells which sites the engine has at this moment, for a person to read."""
        self._tell({"present": sorted(sites)})

    def _tell(self, what: dict[str, Any]) -> None:
        with self.lock, contextlib.suppress(OSError, ValueError):
            write_frame(self.stream, json.dumps(what).encode())

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


class ServerRelay:
    """The federation's end at the server. Jobs may come and go under it.

    address: the file that names the socket. A question that the job before could not answer is put to the next
    one, as long as its deadline has not passed.
    """

    def __init__(self, address: Path) -> None:
        self.listener = _Listener(address)
        self.events: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.job: tuple[int, Any] | None = None
        """The present job: its number, counted from 1, and its stream."""
        self.connection: socket.socket | None = None
        self.jobs = 0
        """How many jobs have connected so far."""
        self.asked = 0
        """The number of the job that was asked last."""
        self.present: list[str] = []
        self.number = 0
        self.failed: str | None = None
        """Why no job can be had at present."""
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def connected(self) -> bool:
        return self.job is not None

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self.listener.socket.accept()
            except OSError:
                return
            self.drop()
            self.connection, stream = connection, connection.makefile("rwb")
            self.jobs += 1
            self.job = self.jobs, stream
            self.events.put({"job": self.jobs})
            threading.Thread(target=self._listen, args=(stream, self.jobs), daemon=True).start()

    def _listen(self, stream: Any, job: int) -> None:
        with contextlib.suppress(OSError, ValueError):
            while (frame := read_frame(stream)) is not None:
                what = json.loads(frame)
                if "present" in what:
                    self.present = what["present"]
                else:
                    self.events.put(what)
        if self.job == (job, stream):
            self.job = None
            self.events.put({"gone": job})

    def ask(self, questions: Sequence[Question], deadline: float) -> Iterator[tuple[str, Lost | None]]:
        """Yields (site, None) when its answer lies in its file, (site, reason) when none will; in any order.

        deadline: seconds from now, after which every site that is left is lost. While no job can be had (`fail`), all
        are lost at once.
        """
        end = time.monotonic() + deadline
        waiting = {question.site: question for question in questions}
        self._put(list(waiting.values()), end)
        while waiting:
            if failed := self.failed:
                for site in sorted(waiting):
                    yield site, failed
                return
            try:
                event = self.events.get(timeout=max(end - time.monotonic(), 0.0))
            except queue.Empty:
                for site in sorted(waiting):
                    yield site, f"no answer within {deadline:g} s (faults.deadline)"
                return
            if event.get("job", 0) > self.asked:  # a new job, after the one that was asked has ended
                self._put(list(waiting.values()), end)
            elif event.get("ask") == self.number and event["site"] in waiting:
                waiting.pop(event["site"])
                yield event["site"], event["lost"]

    def _put(self, questions: Sequence[Question], end: float) -> None:
        self.number += 1  # before all else: a late answer to the ask before is none to this one
        present = self.job
        if present is None or not questions:
            return
        self.asked, stream = present
        left = max(end - time.monotonic(), 1.0)
        what = {"ask": self.number, "deadline": left, "questions": [q.to_json().decode() for q in questions]}
        with contextlib.suppress(OSError, ValueError):  # a job that is just going: its end is the next event
            write_frame(stream, json.dumps(what).encode())

    def fail(self, reason: Lost) -> None:
        """No job can be had: every question that is open, and every later one, is lost, until `mend`."""
        before, self.failed = self.failed, reason
        if before is None:
            self.events.put({"failed": reason})  # wakes whoever waits, and then sees it

    def mend(self) -> None:
        """A job can be had again."""
        self.failed = None

    def drop(self) -> None:
        """Lets the present job go; it ends by itself."""
        connection, self.connection, self.job = self.connection, None, None
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def close(self) -> None:
        self.drop()
        self.listener.close()


# -------------------------------------------------------------------------------------------------- at a hospital


def forward(
    address: Path, question: Question, patience: float = 60.0, seconds: float | None = None
) -> Lost | None:
    """Puts a question to the site's own process, from the engine's client process; blocks until the answer lies in
    `question.reply`. Returns None, or why there is none.

    patience: how many seconds the site's process may take to be there (it may just be starting again). seconds: how
    long anybody waits for the answer; then the connection is closed, and the next question may come. None: for ever.
    """
    end = time.monotonic() + (seconds or 0.0)
    try:
        connection = _connect(address, patience if seconds is None else min(patience, seconds))
    except RelayError:
        return "the site's own process is not running"
    with connection:
        if seconds is not None:
            connection.settimeout(max(end - time.monotonic(), 0.1))
        stream: Any = connection.makefile("rwb")
        try:
            write_frame(stream, question.to_json())
            frame = read_frame(stream)
        except TimeoutError:
            return "no answer before the deadline"
        except OSError:
            frame = None
    return "the site's own process has gone" if frame is None else json.loads(frame)["lost"]


class SiteRelay:
    """The site's end: listens, and hands every question to `serve`, one at a time.

    serve: writes the answer to `question.reply` and returns None, or returns why there is none; its event is set
    when nobody waits for the answer any more. end: makes what is served for a site come to an end.

    A question that comes while another is at work means that nobody waits for that one: its work is ended, so that
    a site that was late once is not late for ever.
    """

    def __init__(
        self,
        address: Path,
        serve: Callable[[Question, threading.Event], Lost | None],
        end: Callable[[str], None] = lambda site: None,
    ) -> None:
        self.listener, self.serve, self.end = _Listener(address), serve, end
        self.turn = threading.Lock()
        self.present: tuple[str, threading.Event] | None = None
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self.listener.socket.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError), connection.makefile("rwb") as stream:
            frame = read_frame(stream)  # type: ignore[arg-type]
            if frame is None:
                return
            try:
                lost = self._served(question_of(frame))
            except ValueError:
                lost = "a question that cannot be read"
            write_frame(stream, json.dumps({"lost": lost}).encode())  # type: ignore[arg-type]

    def _served(self, question: Question) -> Lost | None:
        if (present := self.present) is not None:
            present[1].set()
            self.end(present[0])
        late = threading.Event()
        with self.turn:
            self.present = (question.site, late)
            try:
                return self.serve(question, late)
            finally:
                self.present = None

    def close(self) -> None:
        self.listener.close()
