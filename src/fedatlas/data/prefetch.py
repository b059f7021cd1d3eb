"""One thread that works ahead of who reads."""

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")


def prefetch(make: Callable[[int], T], count: int, *, ahead: int = 2) -> Iterator[T]:
    """make(0), make(1), … make(count - 1), in order, made in one thread at most `ahead` before they are read.

    What `make` raises is raised here, in its place. The thread has ended when the iteration has, whether it
    was finished, failed or was given up.
    """
    ready: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue(maxsize=ahead)
    given_up = threading.Event()

    def put(item: tuple[Any, BaseException | None]) -> None:
        while not given_up.is_set():
            try:
                ready.put(item, timeout=0.05)
            except queue.Full:
                continue
            return

    def work() -> None:
        for number in range(count):
            if given_up.is_set():
                return
            try:
                made = make(number)
            except BaseException as error:
                put((None, error))
                return
            put((made, None))

    thread = threading.Thread(target=work, name="prefetch", daemon=True)
    thread.start()
    try:
        for _ in range(count):
            made, error = ready.get()
            if error is not None:
                raise error
            yield made
    finally:
        given_up.set()
        thread.join()
