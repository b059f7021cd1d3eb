"""Finished runs of a comparison that never ran, with all that its page is made of."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from fedatlas.compare import Comparison
from fedatlas.compare.overlays import VERSION, Shown, Solids, _to_arrays, cases_of, keep, subjects
from fedatlas.core.labels import BACKGROUND
from fedatlas.evaluation.statistics import POST, rows_text
from fedatlas.federation.file import Federation, hash_of, resolved
from fedatlas.papers.fedmenu.cams import LEVEL, MAPS
from fedatlas.papers.ufps.gradients import LOGGED
from fedatlas.papers.ufps.teaching import KINDS, Taught
from fedatlas.papers.ufps.teaching import _to_arrays as of_taught
from fedatlas.transport.store import write_atomic

FINISHED = "then"


def fake_runs(comparison: Comparison) -> None:
    """A finished run of every arm and seed: rows of the final evaluation, two validated rounds, logs, pictures, pseudo
    labels, and the analyses that the file asks for."""
    seeds = {arm: comparison.seeds for arm in comparison.arms}
    for number, (arm, of_arm) in enumerate(comparison.federations.items()):
        for seed, federation in of_arm.items():
            _fake_run(comparison, comparison.path(arm, seed), federation, 0.5 + 0.01 * number)
    for kind, arms in comparison.analyses.items():
        for arm in arms:
            _write(comparison.path(arm, seeds[arm][0]) / "analysis" / f"{kind}.json", ANALYSES[kind])
    if comparison.first.task == "segmentation":
        _fake_pictures(comparison, seeds)


def _classes(federation: Federation) -> list[str]:
    return [name for name in federation.labels.names or () if name != BACKGROUND]


def _annotated(federation: Federation) -> dict[str, list[str]]:
    """Site -> what it annotates; where only its data tell, a class of its own."""
    names = _classes(federation)
    found = {}
    for place, site in enumerate(federation.sites):
        own = list(site.annotated or [names[place % len(names)]])
        found[site.name] = [] if site.role == "test" else own
    return found


def _fake_run(comparison: Comparison, path: Path, federation: Federation, value: float) -> None:
    annotated = _annotated(federation)
    roles = {site.name: site.role for site in federation.sites}
    about = {
        "hash": hash_of(federation), "finished": FINISHED, "git": "0123", "rounds": 2, "model_bytes": 2**20, "id": path.name, "channels": 1,
        "labels": {"names": list(federation.labels.names or ()), "groups": [], "exclusive": federation.labels.exclusive},
        "sites": {site: {"annotated": names, "role": roles[site]} for site, names in annotated.items()},
    }  # fmt: skip
    if federation.task == "classification":
        about["labels"] |= {"level": "image", "exclusive": False}
    path.mkdir(parents=True, exist_ok=True)
    (path / "federation.yaml").write_text(yaml.safe_dump(resolved(federation)))
    _write(path / "run.json", about)
    training = [site for site, role in roles.items() if role == "train"]
    for number in (1, 2):
        folder = path / "rounds" / f"{number:04d}"
        cost = {"bytes_up": 1, "bytes_down": 1, "seconds": 1}
        ratios = dict(zip(LOGGED, (0.6, -2.0, -0.5, 0.3, 1.2, 2.5), strict=True))
        of_sites = {
            site: {"step_seconds": 1.0} | {name: value + 0.05 * n for name, value in ratios.items()}
            for n, site in enumerate(training)
        }
        log = {"round": number, "phases": {"round": 1}, "sites": of_sites}
        _write(folder / "log.json", log | {"cost": dict.fromkeys(training, cost)})
        rows = _rows(federation, annotated, training, "validation", "global", comparison.metric, value)
        _write(folder / "rows.json", list(rows))
    tables = [comparison, *map(comparison.table, comparison.tables)]
    metrics = dict.fromkeys([*(table.metric for table in tables), comparison.metric])
    models = ["best", *(f"local/{site}" for site in training if "local" in federation.evaluation.models)]
    if federation.evaluation.postprocess is not None:
        models.append(POST + "best")
    final = [
        row
        for metric in metrics
        for model in models
        for row in _rows(federation, annotated, list(roles), "test", model, metric, value)
    ]
    write_atomic(path / "rows.csv", rows_text(final).encode())


def _rows(
    federation: Federation,
    annotated: Mapping[str, list[str]],
    sites: list[str],
    split: str,
    model: str,
    metric: str,
    value: float,
) -> Iterator[dict[str, Any]]:
    whole = federation.task == "classification"
    for s, site in enumerate(sites):
        for c, name in enumerate(_classes(federation)):
            for case in [""] if whole else ["case-0", "case-1"]:
                yield {
                    "split": split, "grid": "original", "model": model, "round": 1, "site": site, "case": case,
                    "class": name, "metric": metric, "value": value + 0.02 * float(np.sin(300 * value + 7 * s + 3 * c)) + 0.005 * (case == "case-1"),
                    "known": name in annotated[site], "reason": "",
                }  # fmt: skip


def _fake_pictures(comparison: Comparison, seeds: dict[str, list[int]]) -> None:
    names = _classes(comparison.first)
    flat = comparison.first.preprocessing is not None and comparison.first.preprocessing.size is not None
    cases = cases_of(comparison, seeds)
    for subject in subjects(comparison, seeds):
        for site, case in cases.items():
            blobs = {name: _blob(place) for place, name in enumerate(names)}
            solids = None if flat else Solids((4.0, 4.0, 4.0), blobs, blobs)
            planes = {name: blob[..., 4] > 0 for name, blob in blobs.items()}
            image = np.linspace(0, 1, 100, dtype=np.float32).reshape(10, 10)
            shown = Shown(case, image, (4.0, 4.0), planes, planes, tuple(names[:1]), solids)
            told = {"version": np.array(VERSION), "finished": np.array(FINISHED)}
            keep(subject.file(site, "compared"), _to_arrays(shown) | told)
            about = {"spacing": np.array((4.0, 4.0))}
            for name in names:
                key = np.array([str(VERSION), str(MAPS), str(LEVEL), FINISHED, case, name])
                arrays = {"image": image, "cam": image, "truth": planes[name], "about": key, **about}
                word = "".join(c if c.isalnum() else "_" for c in name)
                keep(subject.file(site, f"gradcam-{word}"), arrays)
            masks = {kind: planes for kind in KINDS}
            taught = Taught("case-7", image, (4.0, 4.0), masks, 0.84, True)
            file = (
                subject.path / "sites" / site / f"pseudo-train-{subject.model_at(site).replace('/', '_')}.npz"
            )
            keep(file, of_taught(taught) | {"about": np.array([str(VERSION), FINISHED])})


def _blob(place: int) -> np.ndarray:
    """A solid whose place follows from a number."""
    found = np.zeros((10, 10, 10), np.uint8)
    x, y = 2 + 2 * (place % 3), 2 + 2 * (place // 3 % 3)
    found[x : x + 3, y : y + 3, 3:7] = 255
    return found


def _write(file: Path, plain: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(plain))


_TEST = dict.fromkeys(
    ("accuracy_member", "accuracy_other", "accuracy", "f1_member", "f1_other", "f1", "auroc"), 0.5
)
ANALYSES: dict[str, Any] = {
    "landscape": {
        "settings": {"level": 0.1},
        "surfaces": [
            {
                "site": "a", "model": "best", "centre": 0.1, "lowest": 0.1, "near": 0.2, "rise": 0.3, "highest": 1.0,
                "flat": 0.2, "steps": [-1, 0, 1], "losses": [[1.0, 0.5, 1.0], [0.5, 0.1, 0.5], [1.0, 0.5, 0.9]],
            }
        ],
    },
    "hessian": {
        "settings": {"tolerance": 0.01, "labels": "annotated", "batches": 2, "batch": 8, "seed": 0, "top": 5},
        "loss": {"name": "dice_bce", "options": {}},
        "spectra": [
            {
                "site": "a", "model": "best", "round": 2, "eigenvalues": [11.5, 7.0, 6.0, 5.6, 5.4], "ratio": 2.1, "trace": 170.1,
                "trace_error": 3.0, "lowest": -0.1, "converged": True, "steps": 60,
                "density": {"at": [-1.0, 0.0, 5.0, 11.5], "value": [0.01, 1.0, 0.1, 0.01]},
            }
        ],
    },
    "cka": {
        "models": ["best", "local/a"],
        "pairs": [{"first": "best", "second": "local/a", "parameters": {"encoder.0": 0.9, "decoder.0": 0.7}}],
        "means": {"parameters": [[1.0, 0.8], [0.8, 1.0]]},
        "layers": None,
    },
    "membership": {
        "settings": {"pool": "all"},
        "attacks": [
            {
                "target": "local/a", "classes": ["liver"], "cases": {"hidden": 9, "outside": 9}, "shadow": 0.8,
                "target_scores": {"members": 0.9, "others": 0.7}, "test": _TEST,
                "uncertainty": {"members": [0.01, 0.02, 0.02, 0.05], "others": [0.02, 0.04, 0.08]},
            }
        ],
    },
}  # fmt: skip
"""What `fedatlas analyse` might have left, of one site."""
