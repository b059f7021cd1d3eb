"""Comparisons of which an arm is several runs, each without another site or fold."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from fedatlas.evaluation.statistics import cell_means, class_means, mean_of_defined

ARMS = {"fedavg": {}, "prox": {"method.name": "fedprox", "local.lr": 0.003}}


def written(folder: Path, federation: dict[str, Any], **more: Any) -> Path:
    """A comparison file of two arms of a federation, and what it has besides."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "base.yaml").write_text(yaml.safe_dump(federation))
    file = {"name": "turns", "base": "base.yaml", "arms": ARMS} | more
    (folder / "turns.yaml").write_text(yaml.safe_dump(file, sort_keys=False))
    return folder / "turns.yaml"


def average(rows: Iterable[Mapping[str, Any]]) -> float | None:
    """The last column of a table, of all its rows at once: the mean over cases, then over sites, then over classes."""
    return mean_of_defined(class_means(cell_means(list(rows))).values())
