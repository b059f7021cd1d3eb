"""What is freed is kept within the context, and returned outside of it (glibc)."""

import ctypes
import resource
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


def test_a_step_that_repeats_finds_its_pages_within_the_context() -> None:
    return_freed_blocks()
    with keeping_freed_blocks():
        assert kept_of_a_step() > PAGES / 2
        assert abs(kept_of_a_step()) < PAGES / 100


def test_freed_blocks_go_back_outside_and_at_the_end() -> None:
    return_freed_blocks()
    before = resident()
    with keeping_freed_blocks():
        kept_of_a_step()
        within = resident() - before
    assert within > PAGES / 2
    assert resident() - before < PAGES / 10
    assert kept_of_a_step() < PAGES / 10


def test_memory_goes_back_after_an_error() -> None:
    before = resident()
    with pytest.raises(ValueError, match="from within"), keeping_freed_blocks():
        kept_of_a_step()
        raise ValueError("from within")
    assert resident() - before < PAGES / 10
    assert kept_of_a_step() < PAGES / 10
