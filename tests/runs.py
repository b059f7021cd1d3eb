"""A small federation, and runs that are no longer than what a test reads of them."""

import contextlib
from pathlib import Path
from typing import Any

import pytest

from fedatlas.core.tensors import to_tree
from fedatlas.federation.file import Federation, parse_federation
from fedatlas.federation.session import run_federation
from fedatlas.phantoms.organs import phantom_sites
from fedatlas.transport import wire
from fedatlas.transport.rounds import Round, RunFolder
from fedatlas.transport.store import DoneWork

FIND = DoneWork.find
"""What tests are without, see `nothing_taken_from_other_runs` in conftest.py."""


def phantom_federation(phantom: Path, cache: Path) -> dict[str, Any]:
    """What `small` gives, for fixtures of a module."""
    return {
        "name": "phantom",
        "sites": phantom_sites(phantom),
        "preprocessing": {"spacing": [4, 4, 4], "window": [-100, 200], "patch": [16, 16], "context": 1},
        "net": {"name": "unet", "filters": [4, 8, 8]},
        "method": {"name": "fedavg"},
        "local": {"optimizer": "adamw", "lr": 0.01, "batch": 4, "steps": 3},
        "rounds": 2,
        "seed": 3,
        "evaluation": {
            "validation": 0.25,
            "metrics": ["dice"],
            "overlays": False,
            "models": ["best", "last"],
            "inference": {"batch": 64},
        },
        "engine": {"cache": str(cache)},
    }


class _Killed(Exception):
    pass


def last_state(chosen: dict[str, Any] | Federation, path: Path, **how: Any) -> bytes:
    """The bytes of the last round's state of a federation, or of its plain values, as its file would hold them.

    The run begins, or goes on from its last complete round, and is killed before it writes the last one: the sites have
    moved on, and nothing is evaluated in the end. So the same call again goes on from the round before.
    """
    federation = parse_federation(chosen, base=Path()) if isinstance(chosen, dict) else chosen
    found, save = list[bytes](), RunFolder.save

    def killed_at_the_last(self: RunFolder, record: Round, *more: Any) -> None:
        if record.number == federation.rounds:
            found.append(bytes(wire.encode(to_tree(record.state))))
            raise _Killed
        save(self, record, *more)

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(_Killed):
        patch.setattr(RunFolder, "save", killed_at_the_last)
        run_federation(federation, path, tell=lambda text: None, resume=True, **how)
    return found[0]
