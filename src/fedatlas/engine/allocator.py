"""The memory of a process, returned when it is freed. Imports no torch."""

import contextlib
import ctypes

_M_MMAP_THRESHOLD = -3
BLOCK = 1 << 20


def return_freed_blocks() -> None:
    """Makes glibc give blocks of 1 MiB and more back to the system when they are freed.

    By itself it raises that limit, up to 32 MiB, with every block that it sees freed, and then keeps the tensors of
    one model for the next: a server held 6.5 models where it needs 4.1 (docs/benchmarks.md). Elsewhere than on
    glibc nothing happens.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").mallopt(_M_MMAP_THRESHOLD, BLOCK)
