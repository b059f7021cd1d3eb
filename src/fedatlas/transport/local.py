"""The engine for one machine: sites in turn in this process, or several at once in worker processes.

Both give the same bits: every payload passes through `wire` either way, and nothing of a call survives it.
"""

import contextlib
import json
import math
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from fedatlas.transport.frames import Question, read_frame, write_frame


class InProcess:
    """Serves every site in this process, in turn. A deadline is not enforced: there is nobody to leave waiting.

    answer: writes the answer to a question into its file.
    """

    in_run_folder = True

    def __init__(self, answer: Callable[[Question], None]) -> None:
        self.answer = answer

    def ask(self, questions: Sequence[Question], deadline: float) -> Iterator[tuple[str, str | None]]:
        for question in questions:
            try:
                self.answer(question)
            except OSError as error:
                yield question.site, f"no reply could be written ({error.strerror or error})"
            else:
                yield question.site, None

    def close(self) -> None:
        return


@dataclass(eq=False)
class Worker:
    """A worker process, and what it was last told to open."""

    process: "subprocess.Popen[bytes]"
    opened: bytes = b""

    def open(self, opened: bytes) -> None:
        """Tells the process what the questions that follow are asked of, unless it knows."""
        if opened != self.opened:
            assert self.process.stdin
            with contextlib.suppress(BrokenPipeError):  # whoever asks then finds that it has ended
                write_frame(self.process.stdin, opened)  # type: ignore[arg-type]
            self.opened = opened

    def exchange(self, question: Question, end: float = math.inf) -> bytearray | None:
        """The reply to a question; None if the process ended. Raises TimeoutError where neither has come at `end`, a
        time of `time.monotonic`."""
        assert self.process.stdin and self.process.stdout
        try:
            write_frame(self.process.stdin, question.to_json())  # type: ignore[arg-type]
        except BrokenPipeError:
            return None
        spoken = select.poll()
        spoken.register(self.process.stdout, select.POLLIN)
        while (left := end - time.monotonic()) > 0:
            if spoken.poll(1000 * min(left, LONGEST_POLL)):
                return read_frame(self.process.stdout)  # type: ignore[arg-type]
        raise TimeoutError

    def end(self) -> None:
        self.process.kill()
        self.process.wait()

    def how_it_ended(self) -> str:
        try:
            code = self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.end()
            code = self.process.returncode
        if code >= 0:
            return f"exit code {code}"
        return f"signal {-code}" + (", perhaps for memory" if code == -9 else "")


LONGEST_POLL = 3600.0
"""Seconds of one wait for a worker; the system takes no number as large as a deadline may be."""

_kept: list[Worker] | None = None
"""Idle workers of runs that are over, within `keeping_workers`."""


@contextlib.contextmanager
def keeping_workers() -> Iterator[None]:
    """Within the context, idle worker processes of a run that is over serve the next: torch and MONAI are imported
    once, not once a run. They end with the context."""
    global _kept
    before, _kept = _kept, [] if _kept is None else _kept
    try:
        yield
    finally:
        if before is None:
            ending, _kept = _kept, None
            for worker in ending:
                worker.end()


class Workers:
    """Worker processes, each of which can serve any site. A worker that dies is replaced, and what it was doing
    is asked again once: a call depends on nothing but its payload and the site's memory. One that is at work on a
    question for longer than its deadline is ended; the clock of a question that waits for a worker does not run.

    target: "module:function" which, called with the arguments, returns what answers a question.
    """

    in_run_folder = True

    def __init__(self, target: str, arguments: Mapping[str, Any], n: int, log: Path) -> None:
        self.log, self.n = log, n
        self.opened = json.dumps(
            {"open": target, "arguments": dict(arguments), "log": str(log.absolute())}
        ).encode()
        log.parent.mkdir(parents=True, exist_ok=True)
        self.free: SimpleQueue[Worker | None] = SimpleQueue()
        self.lock = threading.Lock()
        self.running: list[Worker] = []
        self.serving: dict[str, Worker] = {}
        self.closed = False
        for _ in range(n):
            self.free.put(None)

    def start(self) -> None:
        """Starts all workers now, so that they import while the caller makes ready. Otherwise each is started by its
        first question."""
        for _ in range(self.n):
            worker = self.free.get()
            self.free.put(worker or self._start())

    def ask(self, questions: Sequence[Question], deadline: float) -> Iterator[tuple[str, str | None]]:
        pool = ThreadPoolExecutor(self.n)
        late = threading.Event()
        sites = {pool.submit(self.serve, question, late, deadline): question.site for question in questions}
        try:
            for future in as_completed(sites):
                yield sites[future], future.result()
        finally:  # on Ctrl-C too: nobody waits for what is still at work
            late.set()
            pool.shutdown(wait=False, cancel_futures=True)

    def serve(
        self, question: Question, late: threading.Event | None = None, deadline: float = math.inf
    ) -> str | None:
        """Gets one question answered; returns why it could not be, or None. late: set when nobody waits any more.
        deadline: seconds that it may take, from when a worker is free for it."""
        worker = self.free.get()
        end = time.monotonic() + deadline
        try:
            ended = ""
            for _ in range(2):
                if self.closed or (late and late.is_set()):
                    return "too late"
                if worker is None:
                    worker = self._start()
                with self.lock:
                    self.serving[question.site] = worker
                try:
                    reply = worker.exchange(question, end)
                except TimeoutError:
                    self._drop(worker)
                    worker = None
                    return f"no answer within {deadline:g} s (faults.deadline)"
                if reply is not None:
                    return json.loads(reply)["lost"]
                ended = worker.how_it_ended()
                self._drop(worker)
                worker = None
            return f"its worker process ended twice ({ended}); see {self.log.name} at the site"
        finally:
            with self.lock:
                self.serving.pop(question.site, None)
            self.free.put(worker)

    def end(self, site: str) -> None:
        """Ends the worker that serves a site, if one does; it is replaced at the next question."""
        with self.lock:
            if worker := self.serving.get(site):
                worker.process.kill()

    def _drop(self, worker: Worker) -> None:
        """Gives up a worker; another one is started at the next question."""
        worker.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # one that hangs in the system may end late
            worker.process.wait(timeout=5)
        self.running.remove(worker)

    def _start(self) -> Worker:
        worker = None
        while _kept and worker is None:
            worker = _kept.pop()
            worker = None if worker.process.poll() is not None else worker
        if worker is None:
            with self.log.open("ab") as log:
                worker = Worker(
                    subprocess.Popen(
                        [sys.executable, "-m", "fedatlas.transport.worker"],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=log,
                        start_new_session=True,
                    )
                )
        worker.open(self.opened)
        self.running.append(worker)
        return worker

    def close(self) -> None:
        """Ends all workers, at once; within `keeping_workers` those at work, and keeps the idle ones."""
        self.closed = True
        with self.lock:
            at_work = list(self.serving.values())
        for worker in list(self.running):
            if _kept is not None and worker not in at_work:
                _kept.append(worker)
            else:
                worker.end()
