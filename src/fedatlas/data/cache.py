"""Preprocessed cases on disk: a folder per case and key, written whole or not at all, read through mmap.

The key is a hash of everything that decides the content: the code's version, the preprocessing, the label
mapping, and path, size and time of change of every file. Entries of another key are left alone; the whole
folder may be deleted at any time.
"""

import dataclasses
import hashlib
import json
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedatlas.core.errors import DataError, unwritable

VERSION = 9
"""Raised whenever the code writes other numbers for the same input, or more about it."""


@dataclass(frozen=True)
class Stored:
    """An array on disk; `open` maps it."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    order: str
    offset: int

    def open(self) -> np.ndarray:
        """The array, read only; pages are read when they are touched and belong to the system's cache."""
        if 0 in self.shape:
            return np.empty(self.shape, self.dtype)
        # what np.load(mmap_mode="r") gives, without reading the header again for every patch
        with open(self.path, "rb") as file:
            pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        order = "F" if self.order == "F" else "C"
        return np.ndarray(self.shape, self.dtype, pages, self.offset, order=order)


@dataclass(frozen=True)
class Entry:
    """What is kept of a case: arrays by name, and plain values."""

    arrays: dict[str, Stored]
    meta: dict[str, Any]


def key_of(content: Mapping[str, Any], files: Sequence[Path]) -> str:
    """The key of an entry made from `content`, plain values, and from these files as they are now."""
    stats = [(str(file), file.stat()) for file in files]
    identity = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    text = json.dumps([VERSION, content, identity], sort_keys=True, default=_plain)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _plain(value: Any) -> Any:
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) else sorted(value)  # type: ignore[arg-type]


def load(folder: Path) -> Entry | None:
    """The entry in a folder; None if there is none or it is damaged."""
    try:
        kept = json.loads((folder / "entry.json").read_text(encoding="utf-8"))
        arrays = {}
        for name, (dtype, shape, order, offset) in kept["arrays"].items():
            stored = Stored(str(folder / f"{name}.npy"), dtype, tuple(shape), order, offset)
            size = offset + int(np.prod(shape)) * np.dtype(dtype).itemsize
            if os.stat(stored.path).st_size != size:
                return None
            arrays[name] = stored
        return Entry(arrays, kept["meta"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def fetch(folder: Path, make: Callable[[], tuple[Mapping[str, np.ndarray], Mapping[str, Any]]]) -> Entry:
    """The entry in `folder`, made first if it is not there. Several processes may do so at once.

    Raises DataError if the folder cannot be written, as on a full disk; nothing is left behind then.
    """
    found = load(folder)
    if found is None:
        arrays, meta = make()
        _write(folder, arrays, meta)
        found = load(folder)
    if found is None:
        raise DataError(f"cache: {folder} was changed while it was written; delete it and begin again")
    return found


def _write(folder: Path, arrays: Mapping[str, np.ndarray], meta: Mapping[str, Any]) -> None:
    temporary: Path | None = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=".new-", dir=folder.parent))
        forms = {}
        for name, array in arrays.items():
            path = temporary / f"{name}.npy"
            with path.open("wb") as file:
                np.save(file, array)
            form = np.load(path, mmap_mode="r") if array.size else array
            order = "F" if form.flags.f_contiguous and not form.flags.c_contiguous else "C"
            offset = path.stat().st_size - array.nbytes
            forms[name] = (form.dtype.str, form.shape, order, offset)
        (temporary / "entry.json").write_text(json.dumps({"arrays": forms, "meta": meta}), encoding="utf-8")
        _place(temporary, folder)
    except OSError as error:
        raise unwritable(error)(
            f"cache: {folder.parent} cannot be written ({error.strerror or error}); free space, or choose "
            "another folder with `engine.cache`"
        ) from None
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


def _place(temporary: Path, folder: Path) -> None:
    try:
        os.rename(temporary, folder)
    except OSError:
        if load(folder) is not None:  # another process was first; both wrote the same
            return
        aside = Path(tempfile.mkdtemp(prefix=".old-", dir=folder.parent))
        if folder.exists():
            os.replace(folder, aside / "damaged")
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(temporary, folder)


def sweep(folder: Path, hours: float = 24) -> None:
    """Removes what processes that were killed while writing left behind so long ago."""
    for left in [*folder.glob(".new-*"), *folder.glob(".old-*")]:
        try:
            if time.time() - left.stat().st_mtime > hours * 3600:
                shutil.rmtree(left, ignore_errors=True)
        except OSError:
            continue
