"""Files that are whole or absent, and the private memory of a site, versioned by round and call."""

import contextlib
import errno
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, TypeVar

from fedatlas.core.errors import DataChanged, RunFolderError, WireError, first_of
from fedatlas.core.tensors import Tree
from fedatlas.transport import wire
from fedatlas.transport.wire import Data


@dataclass(frozen=True)
class _Waiting:
    tell: Callable[[str], None]
    patience: float


T = TypeVar("T")
_WAITING: ContextVar[_Waiting | None] = ContextVar("waiting", default=None)
_FULL = (errno.ENOSPC, errno.EDQUOT)
PAUSE = 2.0
"""Seconds between two looks at a disk that is full."""
LITTLE = 1 << 20
"""A disk with fewer free bytes counts as full where something failed for a reason that is not known."""


@contextlib.contextmanager
def waiting_for_room(tell: Callable[[str], None], patience: float) -> Iterator[None]:
    """While it is open, `with_room`, `write_atomic` and `make_room` of this thread wait where a disk is full, at most
    `patience` seconds each, and tell when that begins and ends."""
    token = _WAITING.set(_Waiting(tell, patience))
    try:
        yield
    finally:
        _WAITING.reset(token)


@contextlib.contextmanager
def not_waiting() -> Iterator[None]:
    """While it is open, nobody waits for room, not even within `waiting_for_room`."""
    token = _WAITING.set(None)
    try:
        yield
    finally:
        _WAITING.reset(token)


def lacked_room(folder: Path, reason: str) -> bool:
    """Did something fail, as far as can be told, because the disk of this folder is full, and is this within
    `waiting_for_room`? reason: why it failed, in words."""
    if _WAITING.get() is None:
        return False
    return any(os.strerror(number) in reason for number in _FULL) or shutil.disk_usage(folder).free < LITTLE


def _waits(path: Path, why: str) -> Iterator[None]:
    """Goes on for as long as somebody may wait for room; each step is a pause."""
    waiting = _WAITING.get()
    if waiting is None:
        return
    waiting.tell(
        f"{path}: {why}; waits for room, at most {waiting.patience:g} s, and then goes on. Ctrl-C ends the run, which "
        "--resume takes up"
    )
    end = time.monotonic() + waiting.patience
    while time.monotonic() < end:
        time.sleep(PAUSE)
        yield


def _has_room() -> None:
    if waiting := _WAITING.get():
        waiting.tell("there is room again; the run goes on")


def make_room(folder: Path, needed: int) -> None:
    """Waits until a folder's disk has room for so many bytes; does nothing outside of `waiting_for_room`, and gives up
    when its patience is over."""
    free = shutil.disk_usage(folder).free
    if free >= needed:
        return
    for _ in _waits(
        folder, f"{free / 1e6:,.1f} MB are free; what is to come may take {needed / 1e6:,.1f} MB"
    ):
        if shutil.disk_usage(folder).free >= needed:
            _has_room()
            return


def with_room(path: Path, write: Callable[[], T]) -> T:
    """Calls what writes to `path`, within `waiting_for_room` again and again while the disk is full. Raises OSError as the
    file system does; it names the path where the disk is full, and where the file system names none."""
    try:
        return _named(path, write)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        full = error
    for _ in _waits(path, full.strerror or "the disk is full"):
        try:
            done = _named(path, write)
        except OSError as error:
            if error.errno not in _FULL:
                raise
        else:
            _has_room()
            return done
    raise full


def _named(path: Path, write: Callable[[], T]) -> T:
    try:
        return write()
    except OSError as error:
        if error.errno in _FULL or error.filename is None:
            error.filename = str(path)
        raise


def write_atomic(path: Path, data: Data, *, durable: bool = True, secret: bool = False) -> None:
    """Writes a file so that, whatever happens, `path` holds the old bytes or all of the new ones.

    durable: False for what need not outlive a crash of the machine. secret: nobody but this user may read it. Raises OSError as the file system does (disk full,
    unless `waiting_for_room`); then `path` is as it was.
    """
    with_room(path, lambda: _write(path, data, durable, secret))


def _write(path: Path, data: Data, durable: bool, secret: bool) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.unlink(missing_ok=True)  # should a process of this number have left one, its mode would stay
        handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if secret else 0o666)
        with open(handle, "wb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    if durable:
        sync_folder(path.parent)


def errors_log(folder: Path) -> TextIO:
    """The errors.log of a site's folder, to append to; made for this user alone, since errors name cases. What is no
    text, as of a file whose name is in another encoding than UTF-8, is written with escapes."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder / "errors.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    return open(handle, "a", encoding="utf-8", errors="backslashreplace")


def read_whole(path: Path) -> bytearray:
    """A file's bytes, in memory that may be written to, held once."""
    with path.open("rb") as file:
        data = bytearray(os.fstat(file.fileno()).st_size)
        del data[file.readinto(data) :]
    return data


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


DATA = "data.json"
"""The file, in a site's folder of a run, of the digests of its data."""


def guard_data(
    file: Path, data: Mapping[str, str], site: str, *, begins: bool = False, accept: bool = False
) -> bool:
    """Compares a site's data with those with which its run began. They are remembered, as digests, in `file`, which
    stays with the site's private memory and is for this user alone, since it names cases.

    data: case -> its digest. begins: the run has no complete round, and takes them as they are. accept: go on with
    changed data, which are remembered from then on. Returns whether they changed. Raises DataChanged, naming the cases;
    RunFolderError where the file cannot be read.
    """
    if begins or not file.exists():
        write_atomic(file, json.dumps(data, indent=1, sort_keys=True).encode(), secret=True)
        return False
    try:
        before = dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise RunFolderError(f"{file}: cannot be read ({type(error).__name__}); restore it") from None
    changes = {
        "changed": sorted(case for case in data if case in before and data[case] != before[case]),
        "gone": sorted(set(before) - set(data)),
        "new": sorted(set(data) - set(before)),
    }
    if not any(changes.values()):
        return False
    if accept:
        write_atomic(file, json.dumps(data, indent=1, sort_keys=True).encode(), secret=True)
        return True
    listed = "; ".join(f"{how}: {first_of(cases, 5)}" for how, cases in changes.items() if cases)
    raise DataChanged(
        f"site {site}: its data are not those with which this run began ({listed}); put them back, begin another run with "
        "--id, or go on with the changed data with --data-changed"
    )


class DoneWork:
    """What a site's long work came to, in files that outlive a run and may be deleted at any time.

    folder: theirs. world: all that decides what work comes to beside what it is said to be of, as plain values; asked for when
    the first work is looked for.
    """

    def __init__(self, folder: Path, world: Callable[[], Mapping[str, Any]]) -> None:
        self.folder, self._world = folder, world
        self._told: str | None = None

    def file(self, what: str, of: Mapping[str, Tree]) -> Path:
        """The file of a work. what: its name; of: plain values and tensors that decide it."""
        if self._told is None:
            self._told = json.dumps(self._world(), sort_keys=True)
        told = wire.encode({"what": what, "of": dict(of), "world": self._told})
        return self.folder / f"{what}-{hashlib.sha256(told).hexdigest()[:32]}.fa"

    def find(self, file: Path) -> dict[str, Any] | None:
        """What was kept; None if nothing was, or cannot be read."""
        try:
            found = wire.decode(read_whole(file), copy=False)
        except (OSError, WireError):
            return None
        return found if isinstance(found, dict) else None

    def keep(self, file: Path, done: dict[str, Tree]) -> None:
        """Where the file cannot be written, as on a full disk, the work is done again when it is next asked for."""
        with contextlib.suppress(OSError), not_waiting():
            write_atomic(file, wire.encode(done), durable=False)


class MemoryStore:
    """A site's private memory between calls: one file per call that changed it.

    Calls are numbered (round, call). A call starts from the newest version that is older than itself, so a
    round that is done again, after a lost reply or by a server that resumed, starts from the same memory. One more
    file holds what lasts whatever is done again.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def before(self, round: int, call: int, version: str | None = None) -> dict[str, Tree]:
        """The memory from which call `call` of round `round` starts; empty if nothing was ever kept.

        version: the one to start from, by its name, "" for none; None: the newest that is older than the call.
        Raises RunFolderError where the file that holds it is missing or damaged.
        """
        start = self._start(round, call, version)
        if start is None:
            return {}
        path = self._path(start)
        try:
            return self._read(path)
        except FileNotFoundError:
            raise RunFolderError(
                f"{path}: missing; it is the site's private memory of this run, without which it cannot go on"
            ) from None

    def lasting(self) -> dict[str, Tree]:
        """What was kept by `save_lasting`; empty if nothing was. Raises RunFolderError where the file is damaged."""
        try:
            return self._read(self._lasting)
        except FileNotFoundError:
            return {}

    def save_lasting(self, kept: dict[str, Tree]) -> None:
        """Keeps what the next call finds, of whatever round; it is on disk when this returns."""
        data = wire.encode(kept)
        before = self._lasting.read_bytes() if self._lasting.exists() else wire.encode({})
        if data != before:
            write_atomic(self._lasting, data)

    def save(self, round: int, call: int, memory: dict[str, Tree], version: str | None = None) -> None:
        """Keeps the memory after a call, unless it is what the call began with, from `version` as in `before`;
        forgets what no resume needs, and what came of calls between the two, whose answers did not count."""
        data = wire.encode(memory)
        start = self._start(round, call, version)
        unchanged = not memory if start is None else self._path(start).read_bytes() == data
        for other in self._versions():
            if other >= (round, call) or (start is None or other > start):
                self._path(other).unlink()
        if unchanged:
            return
        write_atomic(self._path((round, call)), data)
        # a server resumes at the start of this round, or of the one before if its newest state is lost
        needed = self._newest_before((round - 1, 0))
        for old in self._versions():
            if needed is not None and old < needed:
                self._path(old).unlink()

    @property
    def _lasting(self) -> Path:
        return self.folder / "lasting.fa"

    def _read(self, path: Path) -> dict[str, Tree]:
        """Raises FileNotFoundError, or RunFolderError where it is damaged."""
        try:
            tree = wire.decode(read_whole(path), copy=False)
        except FileNotFoundError:
            raise
        except (WireError, OSError) as error:
            raise RunFolderError(
                f"{path}: the site's memory cannot be read ({error}); remove the run folder or restore the file"
            ) from error
        assert isinstance(tree, dict)
        return tree

    def _start(self, round: int, call: int, version: str | None) -> tuple[int, int] | None:
        if version is None:
            return self._newest_before((round, call))
        return (int(version[:6]), int(version[7:])) if version else None

    def versions(self) -> list[str]:
        """The names of all that is kept, oldest first, by round and call."""
        return [self._path(version).stem for version in self._versions()]

    def after(self, round: int, call: int) -> str:
        """The name of the version with which a call left the memory; "" if nothing is kept."""
        version = self._newest_before((round, call + 1))
        return self._path(version).stem if version else ""

    def kept(self, version: str) -> bytes:
        """The bytes of a version, by its name; empty for "", of which nothing is kept."""
        return (self.folder / f"{version}.fa").read_bytes() if version else b""

    def put_back(self, version: str, data: Data) -> None:
        """Keeps a version as it was, by its name and bytes; it may have been forgotten since."""
        path = self.folder / f"{version}.fa"
        if not path.exists() or path.read_bytes() != data:
            write_atomic(path, data)

    def _path(self, version: tuple[int, int]) -> Path:
        return self.folder / f"{version[0]:06d}-{version[1]:03d}.fa"

    def _versions(self) -> list[tuple[int, int]]:
        names = [path.stem for path in self.folder.glob("[0-9]*-[0-9]*.fa")]
        return sorted((int(name[:6]), int(name[7:])) for name in names)

    def _newest_before(self, limit: tuple[int, int]) -> tuple[int, int] | None:
        older = [version for version in self._versions() if version < limit]
        return older[-1] if older else None
