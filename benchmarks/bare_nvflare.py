"""A bare echo on NVIDIA FLARE: a task with a numpy array in its Shareable, broadcast, and an array back. FLARE's own
way for large arrays moves it. Nothing of FedAtlas is imported."""

import os
import time
from multiprocessing.connection import Client
from typing import Any

import numpy as np
from nvflare.apis.controller_spec import ClientTask, Task
from nvflare.apis.executor import Executor
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal


class Asker(Controller):
    """Broadcasts as many bytes as it is told to, over and over, and tells the seconds until all have answered."""

    def start_controller(self, fl_ctx: FLContext) -> None:
        pass

    def stop_controller(self, fl_ctx: FLContext) -> None:
        pass

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        with Client(os.environ["FEDATLAS_RELAY"]) as line:
            while not abort_signal.triggered:
                if not line.poll(0.5):
                    continue
                try:
                    size, number, sites = line.recv()
                except EOFError:
                    return
                line.send(self._seconds(size, number, sites, fl_ctx, abort_signal))

    def _seconds(self, size: int, number: int, sites: int, fl_ctx: FLContext, abort: Signal) -> float:
        data = Shareable()
        sent = np.random.default_rng(number).integers(0, 256, size, np.uint8)
        data["payload"] = sent
        answers: list[Any] = []

        def take(client_task: ClientTask, fl_ctx: FLContext) -> None:
            assert client_task.result is not None
            answers.append(client_task.result["payload"])
            client_task.result = None

        task = Task(name="ask", data=data, timeout=900, result_received_cb=take)
        began = time.perf_counter()
        self.broadcast_and_wait(
            task=task, fl_ctx=fl_ctx, min_responses=sites, wait_time_after_min_received=0, abort_signal=abort
        )
        seconds = time.perf_counter() - began
        whole = len(answers) == sites and all(np.array_equal(answer, ~sent) for answer in answers)
        task.data = Shareable()
        return seconds if whole else float("nan")


class Echo(Executor):
    """Answers with the array's bits turned."""

    def execute(
        self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal
    ) -> Shareable:
        reply = Shareable()
        reply["payload"] = np.invert(shareable["payload"])
        return reply
