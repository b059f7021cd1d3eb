"""Analyses of a run: loss landscape, Hessian, similarity of models, membership inference.

Every kind answers for any run of any method, finished or not, where the data are. It reads the run folder, writes
`analysis/<kind>.json` in it, which the report shows, and changes nothing else there. The same seed gives the same file.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from fedatlas.analysis.runs import cka, hessian, landscape, membership
from fedatlas.analysis.runs.subject import Subject
from fedatlas.federation.design import versions
from fedatlas.transport.rounds import to_json
from fedatlas.transport.store import write_atomic
from fedatlas.core.options import from_dict, not_known

__all__ = ["KINDS", "analyse", "schemas"]

KINDS: Mapping[str, tuple[type, Callable[..., dict[str, Any]]]] = {
    "landscape": (landscape.Landscape, landscape.run),
    "hessian": (hessian.Hessian, hessian.run),
    "cka": (cka.CKA, cka.run),
    "membership": (membership.Membership, membership.run),
}
"""kind -> its options, whose docstring is its sentence, and what it runs."""


def schemas() -> dict[str, dict[str, Any]]:
    """Kind -> the JSON schema of its options."""
    return {kind: TypeAdapter(cls).json_schema() for kind, (cls, _) in KINDS.items()}


def analyse(
    kind: str,
    path: Path,
    options: Mapping[str, Any],
    *,
    device: str | None = None,
    data: Mapping[str, str] | None = None,
    tell: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Analyses a run folder, and returns what it wrote to `analysis/<kind>.json`, where a number that is not defined is None.

    options: those of the kind that differ from their defaults. device: where it computes; by default that of the run, if
    it is here. data: site -> folder, for sites whose data lie elsewhere than the run's file says. tell: is told what it
    will cost before it starts.

    Raises FederationError for an unknown kind or option, RunFolderError for what is no run folder, lacks the model, or
    has sites whose data are not here.
    """
    if kind not in KINDS:
        raise not_known("the analysis", kind, KINDS)
    cls, run = KINDS[kind]
    chosen = from_dict(cls, options, what=f"analyse {kind}")
    subject = Subject(path, sites=getattr(chosen, "sites", None), device=device, data=data)
    kept = to_json(
        {
            "kind": kind,
            "run": subject.info["id"],
            "settings": asdict(chosen) | {"device": str(subject.device)},
            "versions": versions(),
            **run(subject, chosen, tell),
        }
    )
    write_atomic(path / "analysis" / f"{kind}.json", kept)
    return json.loads(kept)
