"""The relay job on NVIDIA FLARE: the only two classes of ours that FLARE's processes load, by their path.

The controller, in the job's process at the server, puts every question of an ask to its site as a task of its
own; the executor, in the job's process at a site, passes it to the site's own process. Payloads and answers are
files: a task or a result names them, and the other end fetches them in pieces, so that neither process ever
holds more of one than a few pieces, however large the model and however many the sites.

Imports `nvflare`; nothing outside a FLARE job imports this module.
"""

import contextlib
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nvflare.apis.client import Client
from nvflare.apis.controller_spec import ClientTask, Task, TaskCompletionStatus
from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal
from nvflare.fuel.f3.streaming.download_service import Consumer, Downloadable, ProduceRC, download_object
from nvflare.fuel.f3.streaming.obj_downloader import ObjectDownloader

from fedatlas.transport.deployment import RELAY
from fedatlas.transport.frames import Question, TooLarge, question_of
from fedatlas.transport.relay import Ask, JobEnd, Lost, forward, not_stored, said_by_site

TASK = "ask"
PIECE = 8 * 1024 * 1024
"""Bytes of a file that cross the network in one message."""
PATIENCE = 120.0
"""Seconds after which a piece that did not come is asked for again, at most three times."""
GRACE = 30.0
"""Seconds after its deadline at which a file is no longer offered, and after which a silent site is absent."""


# ------------------------------------------------------------------------------------------------------- files


class _Offer(Downloadable):
    """A file that another process may fetch in pieces, from wherever it has got to."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self.file = os.open(path, os.O_RDONLY)
        self.size = os.fstat(self.file).st_size

    def produce(self, state: dict[str, int], requester: str) -> tuple[str, bytes | None, dict[str, int]]:
        at = state["at"] if state else 0
        if not isinstance(at, int) or at < 0:
            return ProduceRC.ERROR, None, {}
        if at >= self.size:
            return ProduceRC.EOF, None, {}
        piece = os.pread(self.file, PIECE, at)
        return (ProduceRC.OK, piece, {"at": at + len(piece)}) if piece else (ProduceRC.ERROR, None, {})

    def release(self) -> None:
        file, self.file = self.file, -1
        if file >= 0:
            os.close(file)


class _Sink(Consumer):
    """Writes the pieces to a file, `most` bytes and no more. The next piece travels while one is written."""

    supports_pipelining = True

    def __init__(self, path: Path, most: int | None) -> None:
        super().__init__()
        self.file, self.got, self.failed, self.most = path.open("wb"), 0, False, most
        self.lost: Lost | None = None
        """Why it takes no more."""

    def consume(self, ref_id: str, state: dict[str, int], data: bytes) -> dict[str, int]:
        self.got += len(data)
        if state["at"] != self.got:
            raise ValueError("a piece does not follow the one before")
        if self.most is not None and self.got > self.most:
            self.lost = str(TooLarge(self.most))
            raise TooLarge(self.most)
        try:
            self.file.write(data)
        except OSError as error:
            self.lost = not_stored(error)
            raise
        return {"at": self.got}

    def download_completed(self, ref_id: str) -> None:
        self.file.close()

    def download_failed(self, ref_id: str, reason: str) -> None:
        self.failed = True
        self.file.close()


def _fetch(
    cell: Any, source: str, reference: str, to: Path, stop: Signal, most: int | None = None
) -> Lost | None:
    """Puts the offered file, whole, in `to`, or nothing of it; then returns why. most: bytes that it may have."""
    part = to.with_name(f".{to.name}.part")
    try:
        sink = _Sink(part, most)
    except OSError as error:
        return not_stored(error)
    try:
        download_object(source, reference, PATIENCE, cell, sink, abort_signal=stop)
        done = sink.file.closed and not sink.failed and not stop.triggered
    except Exception:
        done = False
    with contextlib.suppress(OSError):  # as when the disk is full
        sink.file.close()
    with contextlib.suppress(OSError):
        if done:
            os.replace(part, to)
        else:
            part.unlink(missing_ok=True)
    return None if done else sink.lost or "its answer broke off"


# --------------------------------------------------------------------------------------------------- the server


@dataclass
class _Open:
    """An ask under way: its tasks, the files on offer for it, and a signal that ends what is left of it."""

    ask: Ask
    end: float
    offers: ObjectDownloader
    tasks: list[Task] = field(default_factory=list)
    waiting: dict[str, Question] = field(default_factory=dict)
    stop: Signal = field(default_factory=Signal)


class RelayController(Controller):
    """Puts the questions of the federation's process to the sites; ends when there are none any more."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()
        self.open: _Open | None = None
        self.end: JobEnd | None = None
        self.seen: dict[str, float] = {}
        self.gone: set[str] = set()
        self.over = threading.Event()

    def start_controller(self, fl_ctx: FLContext) -> None:
        pass

    def stop_controller(self, fl_ctx: FLContext) -> None:
        self._drop(fl_ctx)

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        self.end = JobEnd(Path(os.environ[RELAY]))
        self.fetchers = ThreadPoolExecutor(8, "fetch")
        threading.Thread(target=self._watch, args=(abort_signal,), daemon=True).start()
        try:
            for ask in self.end.asks():
                self._drop(fl_ctx)
                self._put(ask, fl_ctx)
        finally:
            self.over.set()
            self._drop(fl_ctx)
            self.end.close()
            self.fetchers.shutdown(wait=False, cancel_futures=True)

    def _put(self, ask: Ask, fl_ctx: FLContext) -> None:
        engine: Any = fl_ctx.get_engine()
        cell = engine.get_cell()
        offers = ObjectDownloader(cell, timeout=ask.deadline + GRACE, num_receivers=0)
        now = _Open(ask, time.monotonic() + ask.deadline, offers)
        now.waiting = {question.site: question for question in ask.questions}
        shared: dict[Path, str] = {}
        for question in ask.questions:
            for path in (question.shared, question.own):
                if path is not None and path not in shared:
                    shared[path] = offers.add_object(_Offer(path))
            data = Shareable()
            data["head"] = question.head()
            data["source"] = cell.get_fqcn()
            data["shared"] = shared[question.shared]
            data["own"] = shared[question.own] if question.own is not None else None
            data["seconds"] = ask.deadline
            task = Task(
                name=TASK,
                data=data,
                timeout=max(1, int(ask.deadline + 0.999)),
                result_received_cb=self._received,
                task_done_cb=self._done,
            )
            task.props["site"], task.props["ask"] = question.site, ask.number
            now.tasks.append(task)
        known = {client.name for client in engine.get_clients()}
        with self.lock:
            self.open = now
        for question, task in zip(ask.questions, now.tasks, strict=True):
            if question.site not in known:
                self._close(question.site, ask.number, "it is not part of the engine's present job")
            elif question.site in self.gone:
                self._close(question.site, ask.number, "its engine's client has gone")
            else:
                self.send(task=task, fl_ctx=fl_ctx, targets=[question.site])

    def _received(self, client_task: ClientTask, fl_ctx: FLContext) -> None:
        """Called with FLARE's lock held, so what takes time is left to another thread."""
        now, site = self.open, client_task.client.name
        result, client_task.result = client_task.result, None
        if now is None or client_task.task.props["ask"] != now.ask.number or result is None:
            return
        question = now.waiting.get(site)
        if question is None:
            return
        if result.get_return_code() != ReturnCode.OK or "source" not in result:
            self._close(
                site, now.ask.number, said_by_site(str(result.get("lost") or result.get_return_code()))
            )
            return
        engine: Any = fl_ctx.get_engine()
        cell = engine.get_cell()
        self.fetchers.submit(self._take, now, question, cell, str(result["source"]), str(result["reply"]))

    def _take(self, now: _Open, question: Question, cell: Any, source: str, reference: str) -> None:
        lost = _fetch(cell, source, reference, question.reply, now.stop, question.most)
        self._close(question.site, now.ask.number, lost)

    def _done(self, task: Task, fl_ctx: FLContext) -> None:
        if task.completion_status == TaskCompletionStatus.CLIENT_DEAD:
            self._close(task.props["site"], task.props["ask"], "its engine's client has gone")
        elif task.completion_status not in (TaskCompletionStatus.OK, TaskCompletionStatus.CANCELLED):
            self._close(task.props["site"], task.props["ask"], "no answer before the deadline")

    def _close(self, site: str, number: int, lost: Lost | None) -> None:
        with self.lock:
            now = self.open
            if now is None or now.ask.number != number or site not in now.waiting or self.end is None:
                return
            now.waiting.pop(site)
        if lost is None:
            self.end.answered(now.ask, site)
        else:
            self.end.lost(now.ask, site, lost)

    def _drop(self, fl_ctx: FLContext) -> None:
        """Ends the ask under way and lets go of all it holds; FLARE's own tables keep tasks in cycles."""
        with self.lock:
            now, self.open = self.open, None
        if now is None:
            return
        now.stop.trigger(True)
        now.offers.delete_transaction()
        for task in now.tasks:
            if task.completion_status is None:
                self.cancel_task(task, fl_ctx=fl_ctx)
            task.data = Shareable()
            task.result_received_cb = task.task_done_cb = None

    def _watch(self, abort_signal: Signal) -> None:
        """Ends the loop when the job is aborted, and an ask's transfers at its deadline; tells who is there."""
        announced: list[str] | None = None
        while not self.over.wait(0.2):
            assert self.end is not None
            if abort_signal.triggered:
                self.end.close()
                return
            now = self.open
            if now is not None and time.monotonic() > now.end:
                now.stop.trigger(True)
            busy = now.waiting if now is not None else {}
            alive = time.monotonic() - GRACE
            there = {site for site, at in list(self.seen.items()) if at > alive or site in busy}
            present = sorted(there - self.gone)
            if present != announced:
                self.end.present(present)
                announced = present

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == EventType.BEFORE_PROCESS_TASK_REQUEST:
            peer = fl_ctx.get_peer_context()
            if peer is not None:
                self.seen[peer.get_identity_name()] = time.monotonic()
        elif event_type == EventType.CLIENT_DISCONNECTED:
            site = str(fl_ctx.get_prop(FLContextKey.DISCONNECTED_CLIENT_NAME))
            self.gone.add(site)
            if self.open is not None:
                self._close(site, self.open.ask.number, "its engine's client has gone")
        elif event_type == EventType.CLIENT_RECONNECTED:
            self.gone.discard(fl_ctx.get_prop(FLContextKey.RECONNECTED_CLIENT_NAME))

    def process_result_of_unknown_task(
        self, client: Client, task_name: str, client_task_id: str, result: Shareable, fl_ctx: FLContext
    ) -> None:
        """A late answer, to an ask that is over: it is dropped unread."""


# ------------------------------------------------------------------------------------------------------ a site


class RelayExecutor(Executor):
    """Passes a question to the site's own process, and its answer back; an error leaves as a code alone."""

    def __init__(self) -> None:
        super().__init__()
        self.offers: ObjectDownloader | None = None
        self.root: Path | None = None

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == EventType.START_RUN:
            engine: Any = fl_ctx.get_engine()
            relay = Path(engine.get_workspace().get_root_dir()) / "relay"
            shutil.rmtree(relay, ignore_errors=True)  # what a job that was killed has left
            relay.mkdir(mode=0o700, exist_ok=True)
            self.root = relay / str(fl_ctx.get_job_id())
            self.root.mkdir(mode=0o700)
        elif event_type == EventType.END_RUN:
            self._forget()
            if self.root is not None:
                shutil.rmtree(self.root, ignore_errors=True)

    def execute(
        self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal
    ) -> Shareable:
        self._forget()
        assert self.root is not None
        folder = Path(tempfile.mkdtemp(dir=self.root))
        try:
            engine: Any = fl_ctx.get_engine()
            reply = self._answer(folder, shareable, engine.get_cell(), abort_signal)
        except Exception as error:
            reply = _lost(f"its engine's client failed ({type(error).__name__})")
        if "source" not in reply:
            shutil.rmtree(folder, ignore_errors=True)
        return make_reply(ReturnCode.TASK_ABORTED) if abort_signal.triggered else reply

    def _answer(self, folder: Path, data: Shareable, cell: Any, abort_signal: Signal) -> Shareable:
        end = time.monotonic() + float(data["seconds"])
        stop = Signal(parent=abort_signal)
        timer = threading.Timer(float(data["seconds"]), stop.trigger, args=(True,))
        timer.daemon = True
        timer.start()
        try:
            shared, own, answer = folder / "shared", folder / "own", folder / "reply"
            for name, to in (("shared", shared), ("own", own)):
                if data[name] is not None and _fetch(cell, data["source"], data[name], to, stop):
                    return _lost("its engine's client could not fetch the question")
            question = question_of(
                data["head"], shared=shared, own=own if data["own"] is not None else None, reply=answer
            )
            lost = _until(stop, lambda: forward(Path(os.environ[RELAY]), question, end - time.monotonic()))
        finally:
            timer.cancel()
        for path in (shared, own):
            path.unlink(missing_ok=True)
        if lost is not None:
            return _lost(lost)
        # as long as the question has time: it may have to queue behind other sites' answers
        left = max(end - time.monotonic(), 0.0) + GRACE + PATIENCE
        self.offers = ObjectDownloader(
            cell, timeout=left, num_receivers=1, transaction_done_cb=_delete, folder=folder
        )
        reply = Shareable()
        reply["source"], reply["reply"] = cell.get_fqcn(), self.offers.add_object(_Offer(answer))
        return reply

    def _forget(self) -> None:
        """Withdraws the answer before, should nobody have fetched it."""
        offers, self.offers = self.offers, None
        if offers is not None:
            offers.delete_transaction()


def _delete(transaction: str, status: str, objects: list[Any], folder: Path, **_: Any) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def _lost(reason: Lost) -> Shareable:
    reply = make_reply(ReturnCode.OK)
    reply["lost"] = reason
    return reply


def _until(stop: Signal, wait: Callable[[], Lost | None]) -> Lost | None:
    """What `wait` returns, or a reason when `stop` comes first; the thread is then left behind."""
    result: list[Lost | None] = []
    thread = threading.Thread(target=lambda: result.append(wait()), daemon=True)
    thread.start()
    while thread.is_alive() and not stop.triggered:
        thread.join(0.05)
    return result[0] if result else "no answer before the deadline"
