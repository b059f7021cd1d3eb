"""The sections of a report about analyses: what `fedatlas analyse` left in a run folder, drawn."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jinja2 import UndefinedError
from markupsafe import Markup

from fedatlas.core.errors import RunFolderError
from fedatlas.report import markup
from fedatlas.report.figures import analyses, model_title
from fedatlas.report.read import Run

Found = Mapping[str, Any]

TITLES = {
    "landscape": "Loss landscape",
    "hessian": "Hessian",
    "cka": "Similarity of models (CKA)",
    "membership": "Membership inference",
}
"""kind -> its heading; the template of this name draws it."""
_MERGED = {
    "landscape": ("surfaces", "model"),
    "hessian": ("spectra", "model"),
    "membership": ("attacks", "target"),
}
"""Analyses whose entries of several runs stand in one table and one figure: where they are, and what names the model."""


def there(run: Run) -> list[str]:
    """The analyses that a run folder holds."""
    return [kind for kind in TITLES if _file(run.folder, kind).is_file()]


def drawn(run: Run) -> list[tuple[str, Found, Markup]]:
    """Every analysis of a run: its kind, what it found, and its part of the page. Raises RunFolderError for a damaged file."""
    parts = []
    for kind in there(run):
        file = _file(run.folder, kind)
        found = _read(file)
        parts.append((kind, found, _drawn(kind, [file], found)))
    return parts


def together(kind: str, folders: Mapping[str, Path]) -> tuple[Markup, list[str]]:
    """An analysis of several runs under one heading, "" where none has it; and the arms that lack it. folders: arm
    -> run folder. Raises RunFolderError for a damaged file."""
    files = {arm: file for arm, folder in folders.items() if (file := _file(folder, kind)).is_file()}
    of_arms = {arm: _read(file) for arm, file in files.items()}
    missing = [arm for arm in folders if arm not in of_arms]
    if kind not in _MERGED:
        parts = (
            Markup("<h3>{}</h3>{}").format(arm, _drawn(kind, [files[arm]], found, f"{kind}-{place}"))
            for place, (arm, found) in enumerate(of_arms.items())
        )
        return Markup("").join(parts), missing
    key, name = _MERGED[kind]
    entries = []
    for arm, found in of_arms.items():
        with _whole(kind, [files[arm]]):
            entries += [{**one, name: f"{arm}, {model_title(str(one[name]))}"} for one in found[key]]
    if not entries:
        return Markup(""), missing
    shown = {**next(iter(of_arms.values())), key: entries}
    return _drawn(kind, list(files.values()), shown, runs=list(of_arms.values())), missing


def settings(found: Found) -> dict[str, str]:
    """With what an analysis was made, and what it cost, as JSON."""
    told = dict(found.get("settings") or {}) | {f"cost: {k}": v for k, v in (found.get("cost") or {}).items()}
    if found.get("loss"):
        told["loss"] = found["loss"]["name"]
    return {key: json.dumps(value) for key, value in told.items()}


def _drawn(
    kind: str, files: Sequence[Path], found: Found, name: str = "", runs: Sequence[Found] | None = None
) -> Markup:
    """name: for the identifiers of its charts, where an analysis stands on a page several times. runs: what each run found, where
    `found` is of several, in which a model's name begins with that of its arm."""
    with _whole(kind, files):
        told = {"found": found, "runs": runs or [found], "draw": analyses, "name": name or kind}
        return markup.render(f"analysis/{kind}.html", **told)


@contextmanager
def _whole(kind: str, files: Sequence[Path]) -> Iterator[None]:
    """Whatever is wrong with what the files hold becomes a RunFolderError that names them."""
    try:
        yield
    except (KeyError, TypeError, IndexError, ValueError, ZeroDivisionError, UndefinedError) as error:
        raise RunFolderError(
            f"{', '.join(map(str, files))}: damaged ({type(error).__name__}: {error}); run `fedatlas analyse {kind}` again"
        ) from None


def kept(folder: Path, kind: str) -> Found | None:
    """What an analysis left in a run folder; None where it was not made. Raises RunFolderError for a damaged file."""
    file = _file(folder, kind)
    return _read(file) if file.is_file() else None


def _file(folder: Path, kind: str) -> Path:
    return folder / "analysis" / f"{kind}.json"


def _read(path: Path) -> Found:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunFolderError(f"{path}: cannot be read ({error}); run the analysis again") from None
    if not isinstance(found, dict):
        raise RunFolderError(f"{path}: holds no mapping; run the analysis again")
    return found
