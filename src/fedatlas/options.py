"""User input as frozen dataclasses: one line and one sentence per option, checked once, where it enters.

The YAML schema, the command line's overrides and the reference pages are derived from these classes.
"""

from typing import Any, TypeVar, dataclass_transform

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

T = TypeVar("T")

_CONFIG = ConfigDict(extra="forbid", validate_default=False, use_attribute_docstrings=False)


def option(default: Any = ..., sentence: str = "", **limits: Any) -> Any:
    """A field with its default (none: required), the sentence that explains it, and limits as pydantic's
    `Field` takes them (gt, ge, le, min_length, …). A mutable default is copied for every instance."""
    if isinstance(default, list | dict | set):
        return Field(default_factory=lambda: type(default)(default), description=sentence, **limits)
    return Field(default=default, description=sentence, **limits)


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(option, Field))
def options(cls: type[T]) -> type[T]:
    """A frozen, keyword-only dataclass that checks types and limits when it is made; unknown keys are errors."""
    return dataclass(frozen=True, kw_only=True, config=_CONFIG)(cls)  # type: ignore[return-value]
