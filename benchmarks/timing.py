"""Timing of several things in one run, taken in turn so that a busy moment hits all of them.

Seconds are processor time of all threads of this process: other work on the machine is not counted.
"""

import statistics
import time
from collections.abc import Callable, Mapping


def alternate(things: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """The median processor seconds of each; every one is called once before, to warm up."""
    for thing in things.values():
        thing()
    seconds: dict[str, list[float]] = {name: [] for name in things}
    for _ in range(repeats):
        for name, thing in things.items():
            began = time.process_time()
            thing()
            seconds[name].append(time.process_time() - began)
    return {name: statistics.median(values) for name, values in seconds.items()}


def show(found: Mapping[str, float]) -> None:
    for name, value in found.items():
        print(f"{name}: {value:.4g}")
