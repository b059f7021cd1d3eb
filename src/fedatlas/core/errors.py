"""The errors that FedAtlas raises on purpose; the command line prints them without a traceback."""

import difflib
import errno
import json
from collections.abc import Iterable
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args


class FedAtlasError(Exception):
    """Something the user can mend. Its text says what was asked, what was got and what is allowed."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint at the name that is nearest to the one that was given, or nothing; capitals count least."""
    alike = {each.casefold(): each for each in known}
    near = difflib.get_close_matches(name.casefold(), alike, n=1, cutoff=0.6)
    return f" did you mean {alike[near[0]]!r}?" if near else ""


class FederationError(FedAtlasError):
    """The federation file, or what it points to, is not usable."""


class DataError(FedAtlasError):
    """A case, a label or a data set on disk is not usable. Names the site, the file and the remedy."""


class DataChanged(DataError):
    """A site's data are not those with which its run began."""


class DiskFull(DataError):
    """The disk, or the quota, on which a site keeps what it makes of its data is full. This may pass."""


def unwritable(error: OSError) -> type[DataError]:
    """What to raise where a site's file cannot be written: DiskFull if that is the reason."""
    # numpy's error of a file that it could write in part has no number
    return DiskFull if error.errno in (errno.ENOSPC, errno.EDQUOT, None) else DataError


class NameMismatch(FedAtlasError):
    """Two models differ in the names, shapes or dtypes of their tensors."""


class WireError(FedAtlasError):
    """A message is truncated, damaged or of another format. damaged: its bytes are not those that were sent."""

    def __init__(self, text: str, *, damaged: bool = False) -> None:
        super().__init__(text)
        self.damaged = damaged


class SiteLost(FedAtlasError):
    """A site did not answer, or its answer was refused, and the federation's rule is to stop."""


class RunFolderError(FedAtlasError):
    """A run folder cannot be used: it belongs to another configuration, or is incomplete."""


def first_of(names: Iterable[object], most: int = 3) -> str:
    """The first names, and how many more there are."""
    every = [str(name) for name in names]
    return ", ".join(every[:most]) + (f" and {len(every) - most} more" if len(every) > most else "")


def require_run(path: Path, *files: str) -> None:
    """Raises RunFolderError where `path` is no run folder that holds these files. A folder of runs is told which it has."""
    missing = [name for name in files if not (path / name).is_file()]
    if not missing:
        return
    if not path.is_dir():
        raise RunFolderError(
            f"{path}: no such folder; a run folder is what `fedatlas run` makes, as runs/<id>"
        )
    runs = sorted(found.parent for found in path.glob("*/run.json"))
    remedy = (
        f"it holds runs, give one of them: {first_of(runs, 4)}"
        if runs
        else "`fedatlas run` makes one, as runs/<id>"
    )
    raise RunFolderError(f"{path}: not a run folder, it holds no {' and no '.join(missing)}; {remedy}")


_KINDS = {
    dict: "an object",
    list: "a list",
    str: "a text",
    int: "a whole number",
    float: "a number",
    NoneType: "null",
}


def require_object(source: Path | str, found: Any, /, **wanted: type | UnionType) -> dict[str, Any]:
    """`found`, which was read of a JSON file, if it is an object whose keys hold what is wanted, as round=int. A key may be
    missing where None is wanted, too, as in hash=str | None. Raises RunFolderError for anything else, naming the `source`."""
    if not isinstance(found, dict):
        raise RunFolderError(
            f"{source}: holds {_shown(found)}; an object is expected. Restore it, or run again"
        )
    for key, kind in wanted.items():
        value = found.get(key)
        if isinstance(value, bool) or not isinstance(value, kind):
            got = f"{key} is {_shown(value)}" if key in found else f"has no {key}"
            kinds = " or ".join(_KINDS[each] for each in get_args(kind) or (kind,))
            raise RunFolderError(f"{source}: {got}; {kinds} is expected. Restore it, or run again")
    return found


def _shown(value: Any) -> str:
    return _KINDS[type(value)] if isinstance(value, dict | list) else json.dumps(value)[:60]


def parse_json(text: str) -> Any:
    """JSON. Raises ValueError also for a whole number that no float can hold, and for half a letter, which no file can."""
    found = json.loads(text, parse_int=_whole)
    if "\\ud" in text.lower():
        json.dumps(found, ensure_ascii=False).encode()
    return found


def _whole(digits: str) -> int:
    if len(digits) > 300:
        raise ValueError(f"a whole number of {len(digits)} digits")
    return int(digits)
