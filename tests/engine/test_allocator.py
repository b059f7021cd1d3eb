"""What is freed is kept within the context, and returned outside of it (glibc)."""

import ctypes
import resource
from pathlib import Path

import pytest

from fedatlas.engine.allocator import keeping_freed_blocks, return_freed_blocks

try:
    ctypes.CDLL("libc.so.6").mallopt  # noqa: B018
except (OSError, AttributeError):
    pytest.skip("mallopt is glibc's", allow_module_level=True)

SIZE = 48 << 20
"""More than the largest threshold that glibc takes, 32 MiB, as activations of 3D nets are."""
PAGES = SIZE // resource.getpagesize()


def faults_of_a_step() -> int:
    """New pages for a block that is filled and freed, once one like it was."""
    _ = bytearray(b"x") * SIZE
    del _
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    _ = bytearray(b"x") * SIZE
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1])


def test_a_step_that_repeats_needs_no_new_pages_within_the_context() -> None:
    with keeping_freed_blocks():
        assert faults_of_a_step() < PAGES / 100


def test_freed_blocks_go_back_outside_and_at_the_end() -> None:
    return_freed_blocks()
    before = resident()
    with keeping_freed_blocks():
        faults_of_a_step()
        within = resident() - before
    assert within > PAGES / 2
    assert resident() - before < PAGES / 10
    assert faults_of_a_step() > PAGES / 2


def test_memory_goes_back_after_an_error() -> None:
    with pytest.raises(ValueError, match="from within"), keeping_freed_blocks():
        raise ValueError("from within")
    assert faults_of_a_step() > PAGES / 2
