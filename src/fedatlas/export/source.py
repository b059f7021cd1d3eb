"""The source of some functions with all that they use of this package, as one module that needs FedAtlas no more.

What an exported model does before and behind its net is then the very text that trained and scored it: nothing is written
twice, and nothing drifts apart.
"""

import ast
import builtins
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

PACKAGE = "fedatlas"
Place = tuple[str, str]
"""A module, and a name at its top."""


def extracted(module: str, names: Sequence[str], title: str) -> str:
    """The text of a module that holds the names of another, and all that these use. title: its docstring.

    Annotations are kept and stay text, so that what they alone name is left out. Raises ValueError where two modules give
    one name to two things, where a name is not defined at the top of its module, and where a function imports from this package inside of it.
    """
    imports: dict[str, str] = {}
    texts: dict[Place, str] = {}

    def visit(place: Place, called: str) -> None:
        """Adds what a place defines; `called` is its name where it is used."""
        module, name = place
        node = _defined(module).get(name)
        if node is None:
            raise ValueError(f"{module}: does not define {name} at its top")
        if isinstance(node, ast.Import | ast.ImportFrom):
            alias = next(a for a in node.names if (a.asname or a.name.partition(".")[0]) == name)
            if isinstance(node, ast.Import) or not _is_ours(node):
                text = ast.unparse(_one_of(node, alias))
                if imports.setdefault(name, text) != text:
                    raise ValueError(f"{module}: {text}, and elsewhere {imports[name]}; agree on one")
                return
            if _is_module(f"{node.module}.{alias.name}"):
                raise ValueError(f"{module}: imports the module {node.module}.{alias.name}; import its names")
            visit((str(node.module), alias.name), called)
            return
        if called != name or name in imports or any(n == name and m != module for m, n in texts):
            raise ValueError(
                f"{module}: {name} is used as {called}, or two things have that name; rename one"
            )
        place = module, min(_bound(node) if isinstance(node, ast.Assign) else {name})  # FEW, MANY = 64, 128
        if place in texts:
            return
        if any(_is_ours(inner) for inner in ast.walk(node) if isinstance(inner, ast.ImportFrom)):
            raise ValueError(f"{module}: {name} imports from this package inside of it")
        texts[place] = ""  # so that functions may use each other
        for used in dict.fromkeys(_used(node)):
            if used not in _bound(node):
                visit((module, used), used)
        del texts[place]  # behind what it uses
        texts[place] = _text(module, node)

    for name in names:
        visit((module, name), name)
    head = [f'"""{title}"""', "", "from __future__ import annotations", "", *sorted(imports.values()), ""]
    return "\n".join(head) + "\n\n" + "\n\n\n".join(text.strip("\n") for text in texts.values()) + "\n"


def _is_ours(node: ast.Import | ast.ImportFrom) -> bool:
    return isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == PACKAGE


def _is_module(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


@cache
def _source(module: str) -> tuple[str, ast.Module]:
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        raise ValueError(f"{module}: no such module")
    text = Path(spec.origin).read_text(encoding="utf-8")
    return text, ast.parse(text)


@cache
def _defined(module: str) -> dict[str, ast.stmt]:
    """name -> the statement at the top of a module that defines it."""
    found: dict[str, ast.stmt] = {}
    for node in _source(module)[1].body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            found |= dict.fromkeys(_bound(node), node)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name.partition(".")[0]: node for alias in node.names}
    return found


def _one_of(node: ast.Import | ast.ImportFrom, alias: ast.alias) -> ast.stmt:
    """An import of one of its names alone."""
    return ast.Import([alias]) if isinstance(node, ast.Import) else ast.ImportFrom(node.module, [alias], 0)


def _bound(node: ast.AST) -> set[str]:
    """The names to which a statement, or anything in it, gives a value."""
    found = set[str]()
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
            found.add(inner.id)
        elif isinstance(inner, ast.ExceptHandler | ast.FunctionDef) and inner.name:
            found.add(inner.name)
        elif isinstance(inner, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name.partition(".")[0] for alias in inner.names}
    return found


def _used(node: ast.AST) -> Iterator[str]:
    """The names that a statement reads and does not bind itself; those of annotations aside, which stay text."""
    own: set[str] = set()
    if isinstance(node, ast.FunctionDef | ast.Lambda):
        own = {inner.arg for inner in ast.walk(node.args) if isinstance(inner, ast.arg)}
        own |= _bound(node)
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.Name):
                names: Iterable[str] = (child.id,)
            else:
                names = _used(child) if isinstance(child, ast.AST) else ()
            yield from (each for each in names if each not in own and not hasattr(builtins, each))


def _text(module: str, node: ast.stmt) -> str:
    lines = _source(module)[0].splitlines()
    first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", []))])
    return "\n".join(lines[first - 1 : node.end_lineno])
