"""What the command line must know before anything heavy is imported, kept in `known.json`."""

import json
from collections.abc import Iterable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

KNOWN = Path(__file__).parents[1] / "known.json"
"""The JSON schema of the federation file, what is registered, and the options of analyses, as `tools/make_reference.py` makes them of the code."""


def known() -> dict[str, Any] | None:
    """What KNOWN holds; None where it is missing, or older than the code, as while an option is being written."""
    try:
        made = KNOWN.stat().st_mtime
        # files of one checkout, or of one installation, are written within seconds
        if any(file.stat().st_mtime > made + 60 for file in KNOWN.parent.rglob("*.py")):
            return None
        return json.loads(KNOWN.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def installed(kinds: Iterable[str]) -> set[str]:
    """The names that installed packages add to these registries, as "methods" and "nets", and that KNOWN may lack."""
    return {entry.name for kind in kinds for entry in entry_points(group=f"fedatlas.{kind}")}
