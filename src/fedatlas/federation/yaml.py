"""A federation file as it is written: YAML with `extends` and overrides, to plain values; and a first look at its keys.

Nothing heavy is imported here, so that a misspelt key is told at once.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from fedatlas.core.errors import FederationError
from fedatlas.core.options import CHOICES, blamed, unknown_key
from fedatlas.data.samples import path as bundled_path
from fedatlas.federation.known import known


def load_raw(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The plain values of a federation file, with `extends` resolved and `key.path=value` overrides applied; paths that
    another file gives are absolute. Raises FederationError."""
    raw = read_yaml(path)
    if "arms" in raw or "base" in raw:
        raise FederationError(
            f"{path}: is a comparison file, as it has {'arms' if 'arms' in raw else 'base'}; expected a federation file, which has sites. A "
            f"comparison is trained by: fedatlas compare {path}"
        )
    for text in sorted(overrides, key=lambda text: order_of(text.partition("=")[0])):
        override(raw, text)
    return raw


def keys_of(overrides: Sequence[str]) -> dict[str, str]:
    """The keys that overrides give -> how they were given, for messages."""
    return {text.partition("=")[0]: f"-o {text}" for text in overrides}


def require_known(path: Path, overrides: Sequence[str] = ()) -> None:
    """Raises FederationError for a key that does not exist, as `load_federation` would; what else is wrong is left to
    it."""
    kept = known()
    if kept is None:
        return
    schema = kept["schema"]

    def walk(value: Any, entry: Mapping[str, Any], loc: tuple[Any, ...], inside: str) -> None:
        if "$ref" in entry:
            entry = schema["$defs"][entry["$ref"].rpartition("/")[2]]
        choices = entry.get("anyOf") or entry.get("oneOf") or [entry]
        if isinstance(value, Mapping):
            if "oneOf" in entry:  # a method or a net
                fits = [c for c in choices if c["properties"]["name"]["const"] == value.get("name")]
                inside, loc = f"{loc[-1]} {value.get('name')}", ()
            else:
                fits = [_resolved(c, schema) for c in choices]
            fits = [c for c in fits if "properties" in c and c.get("additionalProperties") is False]
            if len(fits) != 1:
                return
            allowed = fits[0]["properties"]
            for key, inner in value.items():
                if key not in allowed:
                    source = blamed((*loc, key), str(path), keys_of(overrides), inside)
                    beside = "name" if inside else "extends"  # what is read before the options are
                    names = [name for name in allowed if loc or name != beside]
                    raise unknown_key(source, (*loc, key), names, inside)
                walk(inner, allowed[key], (*loc, key), inside)
        elif isinstance(value, list):
            for choice in choices:
                if isinstance(choice.get("items"), Mapping):
                    for number, inner in enumerate(value):
                        walk(inner, choice["items"], (*loc, number), inside)

    walk(load_raw(path, overrides), {**schema, "additionalProperties": False}, (), "")


def _resolved(entry: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    return schema["$defs"][entry["$ref"].rpartition("/")[2]] if "$ref" in entry else entry


def with_weights(net: Any, change: Callable[[str], str]) -> Any:
    """The options of a net, or of its backbone, with another path of the file of first weights."""
    if not isinstance(net, Mapping):
        return net
    changed = {key: with_weights(value, change) if key == "backbone" else value for key, value in net.items()}
    given = changed.get("weights")
    return changed | {"weights": change(given)} if isinstance(given, str) else changed


def from_folder(base: Path) -> Callable[[str], str]:
    """A path of a file of weights, absolute; relative ones are taken from `base`."""
    return lambda path: str(followed(base / expanded(path)))


def expanded(path: str | Path) -> Path:
    """A path with the folder of a user in the place of `~`. Raises FederationError where there is no such user."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        user = Path(path).parts[0]
        raise FederationError(
            f"{path}: {user} is the folder of a user whom this machine does not know; write ~/ for your own, or ./{user} for a folder "
            "of that name"
        ) from None


def followed(path: Path) -> Path:
    """`path`, absolute and without links. Raises FederationError for one that is none."""
    try:
        return path.resolve()
    except (RuntimeError, ValueError) as error:  # links that lead to themselves; a letter that no path has
        raise FederationError(f"{str(path)!r}: is no path that can be followed ({error})") from None


def with_paths(raw: Mapping[str, Any], base: Path) -> dict[str, Any]:
    """The values of a file in the folder `base`, with every path absolute: of sites, of first weights, of `init_from` and of
    `log.tensorboard`."""
    values, change = dict(raw), from_folder(base)
    if isinstance(values.get("sites"), list | tuple):
        values["sites"] = [_absolute(site, change) for site in values["sites"]]
    if "net" in values:
        values["net"] = with_weights(values["net"], change)
    start, log = values.get("init_from"), values.get("log")
    if isinstance(start, str):  # a path alone
        start = values["init_from"] = {"path": start}
    if isinstance(start, Mapping) and isinstance(start.get("path"), str):
        values["init_from"] = {**start, "path": change(start["path"])}
    if isinstance(log, Mapping) and isinstance(log.get("tensorboard"), str):
        values["log"] = {**log, "tensorboard": change(log["tensorboard"])}
    return values


def _absolute(site: Any, change: Callable[[str], str]) -> Any:
    if not isinstance(site, Mapping) or not isinstance(site.get("path"), str):
        return site
    given = site["path"]
    if given.startswith("bundled:"):
        return {**site, "path": str(bundled_path() / given.removeprefix("bundled:"))}
    return {**site, "path": change(given)}


class _Strict(yaml.SafeLoader):
    """YAML in which a key given twice is an error. A value that cannot be what it is written as is one of YAML, which names
    its line: a date that does not exist, a number that no float can hold or that has colons, a text that no file or name can."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep)
            if isinstance(value, int | float) and ":" in node.value:  # YAML 1.1 counts by sixties: 1:30 is 90
                raise ValueError
            if isinstance(value, int):
                float(value)
            elif isinstance(value, str) and b"\0" in value.encode():
                raise ValueError
        except (ValueError, KeyError, AttributeError, OverflowError):
            what = f"{str(node.value)[:40]!r} is no {node.tag.rpartition(':')[2]} that can be used"
            raise yaml.constructor.ConstructorError(None, None, what, node.start_mark) from None
        return value


def _mapping(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[str] = set()
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise yaml.constructor.ConstructorError(
                None, None, "a key is a word, not a list or a mapping", key.start_mark
            )
        if key.value in seen:
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {key.value!r} is given twice", key.start_mark
            )
        seen.add(key.value)
    return yaml.SafeLoader.construct_mapping(loader, node, deep=True)


_Strict.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


FILE = "a federation file, which begins as `name: trial`"
COMPARISON = "a comparison file, which begins with its `name`, its `base` (a federation file) and its `arms`"


def read_yaml(path: Path, seen: tuple[Path, ...] = (), expected: str = FILE) -> dict[str, Any]:
    """The plain values of a YAML file, with `extends` resolved. expected: what it is to be, for messages, FILE or COMPARISON."""
    if followed(path) in seen:
        raise FederationError(f"{path}: extends itself, by way of {', '.join(str(p) for p in seen)}")
    try:
        raw = yaml.load(path.read_text(encoding="utf-8"), _Strict)
    except FileNotFoundError:
        raise FederationError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise FederationError(f"{path}: is a folder; expected {expected}") from None
    except UnicodeDecodeError as error:
        raise FederationError(
            f"{path}: is no text, its byte {error.start} is not UTF-8; expected {expected}"
        ) from None
    except OSError as error:
        raise FederationError(f"{path}: cannot be read ({error.strerror or error})") from error
    except yaml.YAMLError as error:
        raise FederationError(f"{path}: not valid YAML: {error}") from None
    except RecursionError:
        raise FederationError(f"{path}: cannot be read (nested too deeply)") from None
    if not isinstance(raw, dict):
        holds = f"holds {'a list' if isinstance(raw, list) else f'{raw!r:.40}'}"
        raise FederationError(f"{path}: {'is empty' if raw is None else holds}; expected {expected}")
    parent = raw.pop("extends", None)
    if parent is None:
        return raw
    if not isinstance(parent, str) or not parent:
        raise FederationError(f"{path}: extends: got {parent!r}; the name of one file is expected")
    base_path = path.parent / parent
    base = read_yaml(base_path, (*seen, followed(path)), expected)
    return merged(with_paths(base, base_path.parent), raw)


def merged(base: Any, over: Any, key: str = "") -> Any:
    """`over` on `base`: mappings key by key; another choice of `CHOICES` replaces the whole block, and so does any
    `init_from`, whose digest is of its path."""
    if not (isinstance(base, dict) and isinstance(over, dict)) or key == "init_from":
        return over
    if key in CHOICES and over.get("name", base.get("name")) != base.get("name"):
        return over
    return base | {k: merged(base[k], value, k) if k in base else value for k, value in over.items()}


def order_of(path: str) -> tuple[int, int, bool]:
    """Where a key.path comes when several are set at once: first the blocks of `CHOICES`, of which another name replaces the whole, the outer
    ones before the inner ones and a name before the rest of its block; then all others as they are given. So the options of a choice may
    be given before it or after it."""
    above, _, last = path.rpartition(".")
    name = last == "name" and above.rpartition(".")[2] in CHOICES
    return (0, path.count(".") - name, not name) if name or last in CHOICES else (1, 0, False)


def override(raw: dict[str, Any], text: str) -> None:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise FederationError(f"-o {text}: expected key.path=value, as in -o local.lr=0.01")
    try:
        parsed = yaml.load(value, _Strict)
    except yaml.YAMLError:
        parsed = value
    parts = key.split(".")
    place: Any = raw
    for depth, part in enumerate(parts):
        last = depth == len(parts) - 1
        if isinstance(place, list):
            names = [item.get("name") if isinstance(item, dict) else None for item in place]
            index = names.index(part) if part in names else int(part) if part.isdigit() else -1
            if not 0 <= index < len(place):
                known = ", ".join(str(name) for name in names)
                raise FederationError(
                    f"-o {text}: no entry {part!r} in {'.'.join(parts[:depth])}; known: {known}"
                )
            if last:
                place[index] = parsed
            place = place[index]
        elif isinstance(place, dict):
            if last:
                if part == "name" and depth and parts[depth - 1] in CHOICES and place.get("name") != parsed:
                    place.clear()
                place[part] = parsed
            else:
                place = place.setdefault(part, {})
        else:
            raise FederationError(f"-o {text}: {'.'.join(parts[:depth])} is {place!r} and has no keys")
