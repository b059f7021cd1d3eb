"""How much memory there is, and errors for what cannot fit in it, before it is tried."""

import os
from contextlib import suppress
from pathlib import Path

from fedatlas.core.errors import FedAtlasError

_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def machine_memory() -> int | None:
    """Bytes of memory that this process can have at most: those of the machine, or of its container where that has
    fewer. None where the system does not say. Swap does not count: training that swaps does not end."""
    limits = []
    if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", ()):
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for name in _LIMITS:
        try:
            limits.append(int(Path(name).read_text(encoding="utf-8")))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    with suppress(ImportError):  # Windows, where an exported bundle may run, has no `resource`
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit != resource.RLIM_INFINITY:
            limits.append(limit)
    return min((count for count in limits if count > 0), default=None)


def device_memory(device: str) -> int | None:
    """Bytes of memory of a device by its name: of a GPU its own, else `machine_memory`. None where it is not known."""
    if device.startswith("cuda"):
        import torch

        if not torch.cuda.is_available():
            return None
        return torch.cuda.get_device_properties(torch.device(device)).total_memory
    return machine_memory()


def require_memory(
    needed: float, what: str, remedy: str, error: type[FedAtlasError], device: str = "cpu"
) -> None:
    """Raises `error` where `needed` bytes are more than the device has.

    needed: what is held at the least, so that nothing that would have fitted is refused; what: begins the sentence,
    and names what is asked for.
    """
    there = device_memory(device)
    if there is not None and needed > there:
        name = "this machine" if device == "cpu" else device
        raise error(
            f"{what} takes {gibibytes(needed)} of memory or more, and {name} has {gibibytes(there)}; {remedy}"
        )


def gibibytes(count: float) -> str:
    """Bytes in units of 2^30, of 2^20 where they are few."""
    return f"{count / 2**30:,.1f} GiB" if count >= 2**30 / 10 else f"{count / 2**20:,.1f} MiB"
