"""User input as frozen dataclasses: one line and one sentence per option, checked once, where it enters.

The YAML schema, the command line's overrides and the reference pages are derived from these classes.
"""

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar, dataclass_transform

from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from fedatlas.errors import FederationError

T = TypeVar("T")

_CONFIG = ConfigDict(extra="forbid", validate_default=False, use_attribute_docstrings=False)


def option(default: Any = ..., sentence: str = "", **limits: Any) -> Any:
    """A field with its default (none: required), the sentence that explains it, and limits as pydantic's
    `Field` takes them (gt, ge, le, min_length, …). A mutable default is copied for every instance."""
    if isinstance(default, list | dict | set):
        return Field(default_factory=lambda: type(default)(default), description=sentence, **limits)
    return Field(default=default, description=sentence, **limits)


@dataclass_transform(frozen_default=True, kw_only_default=True)
def options(cls: type[T]) -> type[T]:
    """A frozen, keyword-only dataclass that checks types and limits when it is made; unknown keys are errors."""
    return dataclass(frozen=True, kw_only=True, config=_CONFIG)(cls)  # type: ignore[return-value]


def not_known(what: str, name: str, known: Iterable[str]) -> FederationError:
    """The error for a name that does not exist: it names the nearest one and lists all."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ";"
    return FederationError(f"{what} {name!r} does not exist{hint} known: {', '.join(names)}")


def from_dict(cls: type[T], values: Mapping[str, Any], *, what: str) -> T:
    """An `@options` class from a dict, as it stands in a file. Raises FederationError that names `what`, the
    key, the nearest known key if it is misspelt, and what is allowed."""
    known = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    for key in values:
        if key not in known:
            raise not_known(f"{what}: the option", str(key), known)
    try:
        return cls(**values)
    except ValidationError as error:
        listed = [f"{'.'.join(map(str, e['loc']))} is {e['input']!r}: {e['msg']}" for e in error.errors()]
        raise FederationError(f"{what}: " + "; ".join(listed)) from error
