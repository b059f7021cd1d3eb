"""What glibc does with memory that is freed: keep it while a process computes, return it while a process holds models.

A training step frees and allocates the same activations again and again. Where every freed block goes back to the
system, each comes back as new pages that the system first fills with zeros: a step of the demo then takes more than
twice as long, nearly half of it in the system (docs/benchmarks.md). A server that only averages has the opposite need:
with freed blocks kept, it held 6.5 models where 4.1 are enough. So a process returns what it frees, except within
`keeping_freed_blocks`, in which every call at a site runs.

Elsewhere than on glibc nothing happens. Imports no torch.
"""

import contextlib
import ctypes
import functools
from collections.abc import Iterator

# malloc.h
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -2, -3, -4
_MMAP_MAX = 65536
"""glibc's own limit of mapped blocks."""
RETURNED = 1 << 20
"""A freed block of at least so many bytes is returned."""
_LARGEST = 2**31 - 1


@functools.cache
def _libc() -> ctypes.CDLL | None:
    try:
        libc = ctypes.CDLL("libc.so.6")
        _ = libc.mallopt, libc.malloc_trim
    except (OSError, AttributeError):
        return None
    libc.malloc_trim.argtypes = [ctypes.c_size_t]
    return libc


def return_freed_blocks() -> None:
    """From now on, freed blocks of 1 MiB and more go back to the system, and so does what was kept until now."""
    if (libc := _libc()) is None:
        return
    libc.mallopt(_M_MMAP_MAX, _MMAP_MAX)
    libc.mallopt(_M_MMAP_THRESHOLD, RETURNED)
    libc.mallopt(_M_TRIM_THRESHOLD, RETURNED)
    libc.mallopt(_M_TOP_PAD, 0)
    libc.malloc_trim(0)


@contextlib.contextmanager
def keeping_freed_blocks() -> Iterator[None]:
    """Within the context the process keeps what it frees, of any size, for the next allocation; at the end
    everything that is free goes back, as after `return_freed_blocks`."""
    if (libc := _libc()) is None:
        yield
        return
    libc.mallopt(_M_MMAP_MAX, 0)
    libc.mallopt(_M_TRIM_THRESHOLD, _LARGEST)
    libc.mallopt(_M_TOP_PAD, 64 << 20)
    try:
        yield
    finally:
        return_freed_blocks()
