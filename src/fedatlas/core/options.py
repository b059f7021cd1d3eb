"""User input as frozen dataclasses: one line and one sentence per option, checked once, where it enters.

The YAML schema, the command line's overrides and the reference pages are derived from these classes.
"""

import dataclasses
import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, TypeVar, dataclass_transform

from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass
from pydantic.fields import FieldInfo

from fedatlas.core.errors import FederationError, did_you_mean

T = TypeVar("T")

CHOICES = frozenset({"method", "net", "strategy", "loss", "inner"})
"""Blocks whose `name` says what the other keys of the block are: another name begins the block anew."""

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
"""Names that become those of folders, as of a run or a site."""

Natural = Annotated[int, Field(ge=1)]
"""An entry of an option: a whole number from 1 on, as the channels of a level."""


def own_first(cls: Any) -> list[str]:
    """The names of the options of a class, its own before those of the class that it derives from."""
    names = [field.name for field in dataclasses.fields(cls)]
    by_class = [
        name for each in cls.__mro__ for name in vars(each).get("__annotations__", {}) if name in names
    ]
    return list(dict.fromkeys(by_class))


def _ordered(schema: dict[str, Any], cls: type[Any]) -> None:
    """Puts the properties of a JSON schema in the order of `own_first`."""
    properties = schema.get("properties", {})
    schema["properties"] = {name: properties[name] for name in own_first(cls) if name in properties}


_CONFIG = ConfigDict(
    extra="forbid",
    allow_inf_nan=False,
    validate_default=False,
    use_attribute_docstrings=False,
    json_schema_extra=_ordered,
)


def option(default: Any = ..., sentence: str = "", **limits: Any) -> Any:
    """A field with its default (none: required), the sentence that explains it, and limits as pydantic's
    `Field` takes them (gt, ge, le, min_length, …). A mutable default is copied for every instance."""
    if isinstance(default, list | dict | set):
        return Field(default_factory=lambda: type(default)(default), description=sentence, **limits)
    return Field(default=default, description=sentence, **limits)


def _counts(hint: Any) -> bool:
    """Is a value of this type a number, or made of numbers alone?"""
    of = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Literal:
        return any(type(value) is int for value in of)
    return hint in (int, float) or (hint is not Any and any(map(_counts, of)) and bool not in of)


def _no_bool(value: Any) -> Any:
    """Refuses true and false, which pydantic takes for 1 and 0."""
    if isinstance(value, bool):
        raise ValueError(f"a number is expected, not {str(value).lower()}")
    for entry in value if isinstance(value, list | tuple) else ():
        _no_bool(entry)
    return value


@dataclass_transform(frozen_default=True, kw_only_default=True)
def options(cls: type[T]) -> type[T]:
    """A frozen, keyword-only dataclass that checks types and limits when it is made; unknown keys are errors."""
    for name, hint in vars(cls).get("__annotations__", {}).items():
        if isinstance(field := vars(cls).get(name), FieldInfo) and _counts(hint):
            field.metadata.append(BeforeValidator(_no_bool))
    return dataclass(frozen=True, kw_only=True, config=_CONFIG)(cls)  # type: ignore[return-value]


def not_known(what: str, name: str, known: Iterable[str], of: str = "") -> FederationError:
    """The error for a name that does not exist: it names the nearest one and lists all. of: what has these names, as "method
    fedavg", where `what` does not say it."""
    names = list(known)
    hint = did_you_mean(name.rpartition(".")[2], names)
    return FederationError(
        f"{what} {name!r} does not exist;{hint}{of and f' of {of},'} known: {', '.join(names) or 'none'}"
    )


def unknown_key(source: str, loc: Sequence[Any], known: Iterable[str], inside: str = "") -> FederationError:
    """The error for a key of a file that does not exist. loc: the keys above it, and itself. One with points, as `-o` and the arms
    of a comparison have them, is shown as a file has it."""
    names, key = list(known), ".".join(map(str, loc))
    block, *within = str(loc[-1]).split(".")
    if not within or block not in names:
        return not_known(f"{source}: the key", key, names, inside)
    nested = f"{block}: " + "".join(f"{{{part}: " for part in within) + "…" + "}" * len(within)
    return FederationError(f"{source}: the key {key!r} does not exist; write {nested}")


def from_dict(
    cls: type[T],
    values: Mapping[str, Any],
    *,
    what: str,
    given: Mapping[str, str] | None = None,
    inside: str = "",
) -> T:
    """An `@options` class from a dict, as it stands in a file. Raises FederationError that names `what`, the
    key, the nearest known key if it is misspelt, and what is allowed. given, inside: see `blamed`."""
    try:
        return TypeAdapter(cls).validate_python(_on_defaults(cls, values))
    except ValidationError as error:
        raise FederationError("\n".join(explain(error, cls, what, given, inside))) from None


def blamed(loc: Iterable[Any], source: str, given: Mapping[str, str] | None, inside: str = "") -> str:
    """Who gave a key, for a message. given: key -> how it was given, for those that the source did not give, as
    overrides. inside: the block of the source in which `loc` begins, and the name that it has there, as "method fedavg"."""
    block = inside.partition(" ")[0]
    key = ".".join(map(str, (*([block] if block else []), *loc)))
    for mine, text in (given or {}).items():
        if key == mine or key.startswith(f"{mine}.") or mine.startswith(f"{key}."):
            return text
    return f"{source}: {block}" if block else source


def _on_defaults(cls: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values, and where one is a mapping for a key whose default is a set of options, what that default says of the
    keys that the mapping leaves out; a default of another `name` says nothing."""
    fields = getattr(cls, "__pydantic_fields__", {})
    filled = dict(values)
    for key, value in values.items():
        default = fields[key].default if key in fields else None
        if (
            not isinstance(value, Mapping)
            or not dataclasses.is_dataclass(default)
            or isinstance(default, type)
        ):
            continue
        held = {field.name: getattr(default, field.name) for field in dataclasses.fields(default)}
        if value.get("name", held.get("name")) == held.get("name"):
            filled[key] = held | _on_defaults(type(default), value)
    return filled


def explain(
    error: ValidationError,
    cls: Any,
    source: str,
    given: Mapping[str, str] | None = None,
    inside: str = "",
) -> list[str]:
    """What is wrong with the values for an `@options` class, a line each: the key by its path, what was got,
    what is allowed. source: where the values came from, as a file; given, inside: see `blamed`."""
    lines, every, block = list[str](), error.errors(), inside.partition(" ")[0]
    expected: dict[str, list[str]] = {}
    for item in every:
        loc = tuple(item["loc"])
        if item["type"] == "too_short" and any(
            tuple(other["loc"][: len(loc)]) == loc != other["loc"] for other in every
        ):
            continue  # entries that are wrong themselves are not counted
        what = blamed(loc, source, given, inside)
        where = f"{what}: {'.'.join(_told(loc))}"
        kind = item["type"]
        if kind in ("unexpected_keyword_argument", "extra_forbidden"):
            lines.append(str(unknown_key(what, loc, _keys_at(cls, loc[:-1]), inside)))
        elif kind.startswith("missing") and isinstance(loc[-1], int):  # a place of a list
            if len(item["input"]) == loc[-1]:
                got = f"got {list(item['input'])}, which has {loc[-1]} of {_length_at(cls, loc[:-1])} entries"
                lines.append(f"{what}: {'.'.join(_told(loc[:-1]))}: {got}; give them all")
        elif kind.startswith("missing"):
            lines.append(f"{where}: missing; it must be given")
        elif kind in _BLOCKS and item["input"] is None:
            lines.append(f"{where}: is empty; expected {_BLOCKS[kind]}")
        elif kind == "dataclass_type":
            keys = ", ".join(_keys_at(cls, loc))
            lines.append(f"{where}: got {item['input']!r}; expected a mapping with the keys {keys}")
        elif kind in ("dict_type", "mapping_type"):
            form = ""
            if loc and loc[-1] in CHOICES:
                key = ".".join(map(str, (*([block] if block else []), *loc)))
                form = f", as {loc[-1]}: {{name: {item['input']}}}. On the command line: -o {key}.name={item['input']}"
            lines.append(f"{where}: got {item['input']!r}; expected a mapping of keys{form}")
        elif kind == "too_short":
            about = item.get("ctx", {})
            least, there = about.get("min_length", 1), about.get("actual_length", 0)
            lines.append(
                f"{where}: has {there} {'entry' if there == 1 else 'entries'}; {least} or more are needed"
            )
        elif kind in ("tuple_type", "list_type") and isinstance(item["input"], Mapping):
            lines.append(f"{where}: is a mapping; expected {_BLOCKS[kind]}")
        elif kind in ("tuple_type", "list_type"):
            given_text = str(item["input"]).strip("[ ]")
            several = [part.strip() for part in given_text.split(",")]
            example = ", ".join(several if len(several) > 1 else several * _length_at(cls, loc))
            lines.append(f"{where}: got {item['input']!r}; expected a list, as [{example}]")
        elif kind in _EXPECTED:  # one line for all alternatives of a type
            got = f"{where}: got {item['input']!r}; "
            if got not in expected:
                lines.append(got)
            expected.setdefault(got, []).append(_EXPECTED[kind].format(**_shown(item.get("ctx", {}))))
            share = re.fullmatch(r"(\d{1,2}) ?%", str(item["input"]))
            if share and kind == "float_parsing":
                expected[got][-1] = f"a number, as {int(share[1]) / 100:g}, is expected"
        else:
            message = item["msg"].removeprefix("Value error, ")
            lines.append(f"{where}: got {item['input']!r}; {message[:1].lower()}{message[1:]}")
    return [line + _joined(expected.get(line, ())) for line in lines]


def _joined(expected: Iterable[str]) -> str:
    """What the alternatives of a type expect, once each, in one clause."""
    several, end = list(dict.fromkeys(expected)), " is expected"
    if len(several) > 1 and all(text.endswith(end) for text in several):
        return " or ".join(text.removesuffix(end) for text in several) + end
    return ", or ".join(several)


def _shown(about: Mapping[str, Any]) -> dict[str, Any]:
    """What pydantic says of a limit, in words where it is a pattern."""
    pattern = about.get("pattern")
    words = "letters A to Z, digits and . _ - are allowed, a letter or digit first"
    limits = {key: f"{value:g}" if isinstance(value, float) else value for key, value in about.items()}
    return {**limits, "pattern": words if pattern == NAME else f"it must match {pattern}"}


_EXPECTED = {
    "string_pattern_mismatch": "{pattern}",
    "string_type": "a text is expected",
    "string_too_long": "at most {max_length} characters are allowed",
    "string_too_short": "at least {min_length} characters are needed",
    "int_type": "a whole number is expected",
    "int_parsing": "a whole number is expected",
    "int_from_float": "a whole number is expected",
    "float_type": "a number is expected",
    "float_parsing": "a number is expected",
    "finite_number": "a finite number is expected",
    "bool_type": "true or false is expected",
    "bool_parsing": "true or false is expected",
    "literal_error": "allowed: {expected}",
    "greater_than": "a number above {gt} is expected",
    "greater_than_equal": "{ge} or more is expected",
    "less_than": "a number below {lt} is expected",
    "less_than_equal": "{le} or less is expected",
}
"""What is said of a value, by the kind of pydantic's error."""


def _told(loc: tuple[str | int, ...]) -> list[str]:
    """A path without the names that pydantic gives to the alternatives of a type."""
    return [str(part) for part in loc if not (isinstance(part, str) and ("[" in part or part in _PLAIN))]


_PLAIN = ("bool", "int", "float", "str")

_LIST = "a list, whose entries begin with a dash (-) each"
_BLOCKS = dict.fromkeys(("tuple_type", "list_type"), _LIST) | dict.fromkeys(
    ("dataclass_type", "dict_type", "mapping_type"), "a mapping of keys"
)
"""Kind of an error -> what was expected, of keys that hold others."""


def _length_at(cls: Any, loc: tuple[str | int, ...]) -> int:
    """The least length of the list at a path, at least 1."""
    for part in loc[:-1]:
        cls = _inner(typing.get_type_hints(cls)[part]) if part in _names(cls) else cls
    if loc[-1] not in _names(cls):
        return 1
    hint = typing.get_type_hints(cls)[loc[-1]]
    for each in (hint, *typing.get_args(hint)):
        of = typing.get_args(each)
        if typing.get_origin(each) is tuple and Ellipsis not in of:
            return len(of)
    limits = cls.__pydantic_fields__[loc[-1]].metadata
    return max(1, *(getattr(limit, "min_length", 1) for limit in limits), 1)


def _keys_at(cls: Any, loc: tuple[str | int, ...]) -> list[str]:
    for part in loc:
        if part in _names(cls):
            cls = _inner(typing.get_type_hints(cls)[part])
    return _names(cls)


def _names(cls: Any) -> list[str]:
    return own_first(cls) if dataclasses.is_dataclass(cls) else []


def _inner(hint: Any) -> Any:
    """The dataclass inside an optional or a tuple of it."""
    for candidate in (hint, *typing.get_args(hint)):
        if isinstance(candidate, type) and dataclasses.is_dataclass(candidate):
            return candidate
        if typing.get_origin(candidate) in (tuple, typing.Union, types.UnionType):
            return _inner(typing.get_args(candidate)[0])
    return hint
