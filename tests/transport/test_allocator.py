"""What is freed is kept within the context, and returned outside of it (glibc)."""

import ctypes
import resource
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from fedatlas.transport.allocator import keeping_freed_blocks, return_freed_blocks

try:
    ctypes.CDLL("libc.so.6").mallopt  # noqa: B018
except (OSError, AttributeError):
    pytest.skip("mallopt is glibc's", allow_module_level=True)

SIZE = 48 << 20
"""More than the largest threshold that glibc takes, 32 MiB, as activations of 3D nets are."""
PAGES = SIZE // resource.getpagesize()


def resident() -> int:
    """Pages of this process in memory. (Page faults would tell the same, but not every kernel counts them.)"""
    return int(Path("/proc/self/statm").read_text().split()[1])


def kept_of_a_step() -> int:
    """Pages that stay when a block was filled and freed."""
    before = resident()
    block = bytearray(b"x") * SIZE
    del block
    return resident() - before


def alone(body: Callable[[], None]) -> None:
    """Runs it in a process of its own: in one with other tests behind it a block may lie in a hole that they left, and add no page."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        pool.submit(body).result()


def a_step_that_repeats_finds_its_pages_within_the_context() -> None:
    return_freed_blocks()
    with keeping_freed_blocks():
        assert kept_of_a_step() > PAGES / 2
        assert abs(kept_of_a_step()) < PAGES / 100


def freed_blocks_go_back_outside_and_at_the_end() -> None:
    return_freed_blocks()
    before = resident()
    with keeping_freed_blocks():
        kept_of_a_step()
        within = resident() - before
    assert within > PAGES / 2
    assert resident() - before < PAGES / 10
    assert kept_of_a_step() < PAGES / 10


def memory_goes_back_after_an_error() -> None:
    before = resident()
    with pytest.raises(ValueError, match="from within"), keeping_freed_blocks():
        kept_of_a_step()
        raise ValueError("from within")
    assert resident() - before < PAGES / 10
    assert kept_of_a_step() < PAGES / 10


@pytest.mark.parametrize(
    "body",
    [
        a_step_that_repeats_finds_its_pages_within_the_context,
        freed_blocks_go_back_outside_and_at_the_end,
        memory_goes_back_after_an_error,
    ],
)
def test_of(body: Callable[[], None]) -> None:
    alone(body)
