"""Data sets: one file of this folder, one data set, which describes itself in the object `DATASET`.

A file whose name begins with `_` and the folder `shared` hold no data set. A data set of another package is one by its
entry point: group `fedatlas.datasets`, name of the format, module and object.
"""

import os
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Literal, get_args

from fedatlas.core.errors import DataError, FederationError
from fedatlas.core.options import from_dict, not_known
from fedatlas.data.datasets.shared.listing import Layout, Listing

Kind = Literal["volumes", "masks", "findings"]
VOXELS: tuple[Kind, ...] = ("volumes", "masks")
"""The kinds with labels of voxels."""
Pixels = Literal["CT in HU", "CT in HU or MR", "grey", "grey or colour", "any"]

GROUP = "fedatlas.datasets"
"""The group of entry points for data sets of other packages."""


@dataclass(frozen=True)
class DataSet:
    """How a folder of one data set is read.

    name: its `format` in a federation file. kind: volumes are scans with label maps, masks are pictures with a mask per
    class, findings are images with labels of the whole image. title: one plain sentence. read: folder -> cases, without
    voxels. pixels: what its files hold. options: the class of the site's
    key `reading`, None for none. has_table: does it read its labels from the file that the site's key `table` names?
    """

    name: str
    kind: Kind
    title: str
    read: Callable[[Layout], Listing]
    pixels: Pixels = "any"
    options: type[Any] | None = None
    has_table: bool = False


@cache
def registry() -> Mapping[str, DataSet]:
    """Name -> data set, of those in this package."""
    found: dict[str, DataSet] = {}
    for module in sorted(pkgutil.iter_modules(__path__), key=lambda module: module.name):
        if module.name.startswith("_") or module.ispkg:
            continue
        data = getattr(import_module(f"{__name__}.{module.name}"), "DATASET", None)
        if not isinstance(data, DataSet) or data.name != module.name:
            raise TypeError(
                f"{__name__}.{module.name}: must hold DATASET = DataSet(name={module.name!r}, …); put what data sets share "
                "into the folder shared"
            )
        found[data.name] = data
    return found


def names(*kinds: Kind) -> tuple[str, ...]:
    """The data sets of these kinds in this package, sorted; of all kinds, where none is given."""
    return tuple(name for name, data in registry().items() if data.kind in (kinds or get_args(Kind)))


def find(name: str) -> DataSet | None:
    """The data set of a name: of this package, else of an entry point; None if there is none.

    Raises FederationError for an entry point that does not load, or holds no data set of that name.
    """
    if name in registry():
        return registry()[name]
    entry = _others().get(name)
    if entry is None:
        return None
    try:
        data = entry.load()
    except Exception as error:
        raise FederationError(
            f"the data set {name!r}, {entry.value}, does not load ({type(error).__name__}: {error}); mend or remove the "
            "package that brings it"
        ) from None
    if not isinstance(data, DataSet) or data.name != name:
        raise FederationError(
            f"the data set {name!r}: {entry.value} is not a DataSet of that name; mend the entry point of its package"
        )
    return data


def get(name: str) -> DataSet:
    """As `find`. Raises FederationError, naming the nearest, for an unknown name."""
    require(name, "the data set")
    return find(name)  # type: ignore[return-value]


@cache
def _others() -> Mapping[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def known(*kinds: Kind) -> tuple[str, ...]:
    """As `names`, and the data sets of other packages."""
    kinds = kinds or get_args(Kind)
    others = [data for name in sorted(_others().keys() - registry().keys()) if (data := find(name))]
    return (*names(*kinds), *(data.name for data in others if data.kind in kinds))


def require(name: str, what: str, *kinds: Kind, also: tuple[str, ...] = ()) -> None:
    """Raises FederationError, which names the nearest, if no data set of these kinds has that name. kinds: none for
    all; also: further names that are allowed."""
    if name in also:
        return
    data, kinds = find(name), kinds or get_args(Kind)
    if data is None or data.kind not in kinds:
        raise not_known(what, name, (*also, *known(*kinds)))


def read(data: DataSet, layout: Layout, reading: Mapping[str, Any]) -> Listing:
    """The cases of a folder. reading: the options, unchecked, as of a federation file."""
    if data.options is not None:
        layout = replace(
            layout, options=from_dict(data.options, reading, what=f"site {layout.site}: reading")
        )
    elif reading:
        having = ", ".join(name for name, other in registry().items() if other.options)
        raise FederationError(
            f"site {layout.site}: reading: the layout {data.name} has no options; leave it out. Layouts with options: "
            f"{having}"
        )
    try:
        listing = data.read(layout)
        if not isinstance(listing, Listing):
            raise TypeError(
                f"the reader of {data.name} must return a Listing, and returned a {type(listing).__name__}"
            )
        "\n".join(_texts(listing)).encode()
    except UnicodeEncodeError:
        raise DataError(
            f"site {layout.site}: {_shown(_not_utf8(layout.root))}: the name is not UTF-8, as archives of old systems have "
            "it, and cannot be written into tables; rename it, and whatever else is named so"
        ) from None
    problems = (replace(p, file=_shown(p.file), what=_shown(p.what)) for p in listing.problems)
    return replace(listing, problems=tuple(problems))


def _texts(listing: Listing) -> Iterator[str]:
    """The names and files of all cases."""
    for case in listing.cases:
        yield from (case.name, case.patient)
        yield from map(str, (*case.images, *case.label_files))


def _not_utf8(root: Path) -> str:
    """The first file or folder below a folder whose name is not UTF-8; the folder itself if there is none."""
    for base, folders, files in os.walk(root):
        for name in sorted((*folders, *files)):
            if name != _shown(name):
                return str(Path(base, name).relative_to(root))
    return str(root)


def _shown(text: str) -> str:
    """A text as it can be printed: bytes of a file's name that are not UTF-8 are written out."""
    return text.encode("utf-8", "backslashreplace").decode()
