"""The engine for one machine: sites in turn in this process, or several at once in worker processes.

Both give the same bits: every payload passes through `wire` either way, and nothing of a call survives it.
"""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from concurrent.futures import TimeoutError as Late
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from fedatlas.engine.frames import Question, read_frame, write_frame


class InProcess:
    """Serves every site in this process, in turn. A deadline is not enforced: there is nobody to leave waiting.

    answer: writes the answer to a question into its file.
    """

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


class Workers:
    """Worker processes, each of which can serve any site. A worker that dies is replaced, and what it was doing
    is asked again once: a call depends on nothing but its payload and the site's memory.

    target: "module:function" which, called with the arguments, returns what answers a question.
    """

    def __init__(self, target: str, arguments: Mapping[str, Any], n: int, log: Path) -> None:
        self.command = [sys.executable, "-m", "fedatlas.engine.worker", target, json.dumps(dict(arguments))]
        self.log, self.n = log, n
        log.parent.mkdir(parents=True, exist_ok=True)
        self.free: SimpleQueue[subprocess.Popen[bytes] | None] = SimpleQueue()
        self.lock = threading.Lock()
        self.running: list[subprocess.Popen[bytes]] = []
        self.serving: dict[str, subprocess.Popen[bytes]] = {}
        self.closed = False
        for _ in range(n):
            self.free.put(None)

    def ask(self, questions: Sequence[Question], deadline: float) -> Iterator[tuple[str, str | None]]:
        pool = ThreadPoolExecutor(self.n)
        late = threading.Event()
        waiting: dict[Future[str | None], str] = {
            pool.submit(self.serve, question, late): question.site for question in questions
        }
        turns = -(-len(questions) // self.n)  # the last of them begins when others have ended
        try:
            for future in as_completed(list(waiting), timeout=deadline * turns):
                yield waiting.pop(future), future.result()
        except Late:
            late.set()
            for site in sorted(waiting.values()):
                self.end(site)
                yield site, f"no answer within {deadline:g} s (faults.deadline)"
        finally:  # on Ctrl-C too: nobody waits for what is still at work
            late.set()
            pool.shutdown(wait=False, cancel_futures=True)

    def serve(self, question: Question, late: threading.Event | None = None) -> str | None:
        """Gets one question answered; returns why it could not be, or None. late: set when nobody waits any more."""
        worker = self.free.get()
        try:
            ended = ""
            for _ in range(2):
                if self.closed or (late and late.is_set()):
                    return "too late"
                if worker is None:
                    worker = self._start()
                with self.lock:
                    self.serving[question.site] = worker
                reply = _exchange(worker, question)
                if reply is not None:
                    return json.loads(reply)["lost"]
                ended = _how_it_ended(worker)
                self.running.remove(worker)
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
                worker.kill()

    def _start(self) -> "subprocess.Popen[bytes]":
        with self.log.open("ab") as log:
            worker = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        self.running.append(worker)
        return worker

    def close(self) -> None:
        """Ends all workers, at once."""
        self.closed = True
        for worker in list(self.running):
            worker.kill()
        for worker in list(self.running):
            worker.wait()


def _exchange(worker: "subprocess.Popen[bytes]", question: Question) -> bytearray | None:
    assert worker.stdin and worker.stdout
    try:
        write_frame(worker.stdin, question.to_json())  # type: ignore[arg-type]
        return read_frame(worker.stdout)  # type: ignore[arg-type]
    except BrokenPipeError:
        return None


def _how_it_ended(worker: "subprocess.Popen[bytes]") -> str:
    deadline = time.monotonic() + 5
    while worker.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    if worker.returncode is None:
        worker.kill()
        worker.wait()
    code = worker.wait()
    return (
        f"signal {-code}" + (", perhaps for memory" if code == -9 else "")
        if code < 0
        else f"exit code {code}"
    )
