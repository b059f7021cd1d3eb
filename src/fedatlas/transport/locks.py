"""The kernel's lock of an open file. Imports no torch: the small processes of a deployment lock, too."""

import fcntl
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any


def lock(file: IO[Any], place: Path, tell: Callable[[str], None], *, otherwise: str) -> None:
    """Locks an open file, which stands for `place`, for this process. The lock is the kernel's: it ends when the file is
    closed, and with the process however that ends.

    tell: called where the file system has no locks, with what nobody makes sure of then (`otherwise`). Raises
    BlockingIOError where another process holds it.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:
        tell(f"{place}: cannot be locked ({error.strerror or error}); {otherwise}")
