"""Randomness as a value: every generator is derived from named parts, never from the global one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def seed_of(*parts: str | int) -> int:
    """A 63-bit seed that depends on every part and on their order; equal on every machine."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator(*parts: str | int) -> torch.Generator:
    """A CPU generator seeded by `seed_of(*parts)`."""
    import torch  # here: `seed_of` is needed where a folder is read, which must start at once

    return torch.Generator().manual_seed(seed_of(*parts))


@contextmanager
def isolated(*parts: str | int) -> Iterator[None]:
    """Runs third-party code that draws from torch's global generator as if it had been handed ours.

    Dropout and the initialisers of network libraries know no other source. The global state is put
    back on leaving, so nothing outside is changed by what happens inside.
    """
    import torch

    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        torch.random.manual_seed(seed_of(*parts))
        yield
