"""One worker process for all runs of a test session: torch and MONAI are imported once, not once a run.

The way to a worker is that of the package, process, pipes, files and all. `tests/engine/test_local.py` starts workers
as `session` does, a process each, and kills them.
"""

import importlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedatlas.engine.frames import Question
from fedatlas.engine.local import Workers

KEY = "opened with"


class OneWorker:
    """Called in place of `Workers`; what it returns leaves the process alive when it is closed."""

    def __init__(self, log: Path) -> None:
        self.workers = Workers("one_worker:open_any", {}, 1, log)

    def __call__(self, target: str, arguments: Mapping[str, Any], n: int, log: Path) -> "Transport":
        return Transport(self.workers, json.dumps([target, dict(arguments)]))

    def close(self) -> None:
        self.workers.close()


class Transport:
    def __init__(self, workers: Workers, opened: str) -> None:
        self.workers, self.opened = workers, opened

    def ask(self, questions: Sequence[Question], deadline: float) -> Iterator[tuple[str, str | None]]:
        told = [replace(question, about={**question.about, KEY: self.opened}) for question in questions]
        return self.workers.ask(told, deadline)

    def close(self) -> None:
        return


def open_any() -> Callable[[Question], None]:
    """In the worker: opens what each question was asked of, and keeps the newest."""
    kept: dict[str, Callable[[Question], None]] = {}

    def answer(question: Question) -> None:
        about = dict(question.about)
        opened = about.pop(KEY)
        if opened not in kept:
            kept.clear()
            target, arguments = json.loads(opened)
            module, name = target.split(":")
            kept[opened] = getattr(importlib.import_module(module), name)(**arguments)
        kept[opened](replace(question, about=about))

    return answer
