"""What others add to a registry, of methods, losses or nets: by a decorator in this process, or by an entry point of an installed package.

A class that a notebook registers is known in its process alone. One of an entry point is known wherever the package is
installed: in worker processes, at hospitals and at the server.
"""

import hashlib
import inspect
from collections.abc import Callable
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, TypeVar

from fedatlas.core.errors import FederationError

C = TypeVar("C", bound=type)


class Extensions:
    """The additions to one registry. what: one of its things in a word; group: of the entry points, whose name is that of the
    thing, and whose value is module and class."""

    def __init__(self, what: str, group: str) -> None:
        self.what, self.group = what, group
        self.here: dict[str, type[Any]] = {}

    @cached_property
    def installed(self) -> dict[str, EntryPoint]:
        """name -> entry point."""
        return {entry.name: entry for entry in entry_points(group=self.group)}

    def register(self, name: str, taken: Callable[[], Any]) -> Callable[[C], C]:
        """A decorator that registers a class under a name in this process; a name registered again, as by a cell that is
        run twice, takes the new class. taken: gives the names that are not free. Raises FederationError for one of these."""
        if name in taken() or name in self.installed:
            raise FederationError(
                f"the {self.what} {name!r} is there already; register yours under another name"
            )

        def registered(cls: C) -> C:
            self.here[name] = cls
            return cls

        return registered

    def names(self) -> list[str]:
        """All names, sorted."""
        return sorted({*self.here, *self.installed})

    def find(self, name: str) -> type[Any] | None:
        """The class of a name; None if there is none. Raises FederationError for an entry point that does not load."""
        if name in self.here:
            return self.here[name]
        entry = self.installed.get(name)
        if entry is None:
            return None
        try:
            return entry.load()
        except Exception as error:
            raise FederationError(
                f"the {self.what} {name!r}, {entry.value}, does not load ({type(error).__name__}: {error}); mend or remove "
                "the package that brings it"
            ) from None

    def code_of(self, name: str) -> str | None:
        """The SHA-256, in hex, of the file in which the class of a name is written; None for one of FedAtlas itself, and where there is
        no such file, as in a notebook. Raises as `find`."""
        found = self.find(name)
        if found is None:
            return None
        try:
            file = inspect.getsourcefile(found)
            return hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else None
        except (TypeError, OSError):
            return None

    def require_elsewhere(self, name: str, where: str) -> None:
        """Raises FederationError for what is registered in this process alone and is asked for in another."""
        if name in self.here:
            raise FederationError(
                f"the {self.what} {name!r} is registered in this process alone, and {where}; put it into a package with an "
                f"entry point of the group {self.group}, or run the sites in this process with engine.workers: 0"
            )
