"""Writes a run folder of labels of whole images as the engine and the evaluation leave it, with invented scores.

The rows and histograms are those of the scores, so that the page can be checked against them.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from fedatlas.evaluation.classification import (
    Histogram,
    Predictions,
    Threshold,
    bootstrap,
    cells,
    equal_edges,
    fit_thresholds,
    score,
)
from fedatlas.evaluation.statistics import rows_text
from fedatlas.transport.store import write_atomic

FINDINGS = ("effusion", "mass", "nodule", "pneumonia", "cardiomegaly")
METRICS = ("auroc", "ap", "f1", "sensitivity", "specificity", "ece")


def write_run(
    folder: Path,
    *,
    classes: Sequence[str] = FINDINGS,
    sites: Sequence[str] = ("north", "south", "west"),
    test_only: Sequence[str] = ("reference",),
    rounds: int = 6,
    planned: int | None = None,
    final: bool = True,
    overlays: bool = True,
    evaluated: bool = True,
    histograms: bool = True,
    thresholds: bool = True,
    local: bool = True,
    draws: int = 40,
    images: int = 90,
    one_value: Sequence[tuple[str, str]] = (),
    never_scored: Sequence[str] = (),
    splits: Sequence[str] = ("validation", "test"),
) -> Path:
    """Site number k annotates every class whose place is k or k + 1 modulo the sites; test_only sites none.

    one_value: (site, class) that has no positive.
    """
    rng = np.random.default_rng(5)
    folder.mkdir(parents=True)
    annotated = {
        site: [name for place, name in enumerate(classes) if (place - k) % len(sites) < 2]
        for k, site in enumerate(sites)
    } | {site: [] for site in test_only}
    every = [*sites, *test_only]
    ease = {name: 0.5 + 0.45 * place for place, name in enumerate(classes)}
    truths = {
        (site, split): np.stack(
            [
                (rng.random(images) < 0.12 + 0.05 * place) & ((site, name) not in one_value)
                for place, name in enumerate(classes)
            ],
            1,
        )
        for site in every
        for split in ("validation", "test")
    }

    def scores(site: str, split: str, model: str, progress: float) -> np.ndarray:
        columns = []
        for place, name in enumerate(classes):
            owner = model.removeprefix("local/")
            seen = not model.startswith("local/") or name in annotated[owner]
            shift = ease[name] * progress * (1.0 if seen else 0.1) * (1.0 if name in annotated[site] else 0.8)
            z = rng.normal(size=images) + 2 * shift * truths[site, split][:, place] - 1.2
            columns.append(1 / (1 + np.exp(-z)))
        return np.stack(columns, 1)

    def rows(
        site: str, split: str, grid: str, model: str, number: int, found: Predictions, limits: list[Threshold]
    ) -> list[dict[str, Any]]:
        whole = grid == "original"
        metrics = METRICS if whole else ("auroc",)
        columns = cells(score(found, metrics, limits), classes)
        for c, name in enumerate(classes):
            for metric in metrics if whole and draws else ():
                own = np.random.default_rng(c)
                drawn = bootstrap(found, metric, own, class_index=c, thresholds=limits, draws=draws)
                columns += drawn.cells(metric, name)
        place = {"split": split, "grid": grid, "model": model, "round": number, "site": site, "case": ""}
        found_rows = []
        for cell in columns:
            name = cell.pop("class_")
            if name not in never_scored:
                found_rows.append(place | cell | {"class": name, "known": name in annotated[site]})
        return found_rows

    def predictions(site: str, split: str, model: str, progress: float) -> Predictions:
        known = np.ones((images, len(classes)), dtype=bool)
        known[:, [classes.index(name) for name in never_scored]] = False
        patients = [f"{site}-{n // 2}" for n in range(images)]
        return Predictions(
            scores(site, split, model, progress), truths[site, split].astype(float), known, patients
        )

    site_info = {}
    for k, site in enumerate(every):
        test = site in test_only
        cases = {"train": 0 if test else 300 + 40 * k, "validation": 0 if test else images, "test": images}
        site_info[site] = {
            "annotated": annotated[site],
            "cases": cases,
            "patients": {split: n // 2 for split, n in cases.items()},
            "labelled": {name: cases["train"] for name in annotated[site]},
            "positives": {name: 0 if (site, name) in one_value else 31 + 7 * k for name in annotated[site]},
            "negatives": {name: cases["train"] - 31 - 7 * k for name in annotated[site]},
        } | ({"role": "test"} if test else {})
    info = {
        "id": folder.name,
        "name": "Findings, three hospitals",
        "hash": "77aa01c2",
        "versions": {"fedatlas": "0.1.0", "torch": "2.13.0"},
        "git": "cf227d6",
        "started": "2026-01-05T10:00:00+00:00",
        "finished": "2026-01-05T11:07:41+00:00" if final else None,
        "machine": {"platform": "Linux", "cores": 2},
        "method": "fedpsl",
        "net": "densenet121",
        "n_parameters": 6_958_981,
        "model_bytes": 27_000_000,
        "rounds": planned or rounds,
        "seed": 0,
        "labels": {"names": list(classes), "groups": [], "exclusive": False, "level": "image"},
        "sites": site_info,
    }
    (folder / "run.json").write_text(json.dumps(info), encoding="utf-8")
    (folder / "federation.yaml").write_text(
        "name: findings\ntask: classification\nevaluation: {bins: 10}\n", encoding="utf-8"
    )
    none = [Threshold(None, None, "none was given")] * len(classes)
    for number in range(1, rounds + 1):
        progress = 1 - float(np.exp(-2.2 * number / rounds))
        place = folder / "rounds" / f"{number:04d}"
        place.mkdir(parents=True)
        log = {
            "round": number,
            "sites": {site: {"loss": 0.7 - 0.4 * progress + 0.02 * k} for k, site in enumerate(sites)},
            "cost": {
                site: {"seconds": 9.0, "peak_mb": 900.0, "bytes_down": 27_000_000, "bytes_up": 27_000_640}
                for site in sites
            },
            "phases": {"round": 30.0, "evaluate": 4.0},
            "lost": {},
            "server_peak_mb": 200.0,
        }
        (place / "log.json").write_text(json.dumps(log), encoding="utf-8")
        lines: list[dict[str, Any]] = []
        for site in sites if evaluated else ():
            found = predictions(site, "validation", "global", progress)
            lines += rows(site, "validation", "federation", "global", number, found, none)
        (place / "rows.json").write_text(json.dumps(lines), encoding="utf-8")
    if rounds and evaluated:
        (folder / "best.json").write_text(json.dumps({"round": rounds, "score": 0.81}), encoding="utf-8")
    if not final:
        return folder

    edges = equal_edges(100)
    models = ["best", *(f"local/{site}" for site in sites if local)]
    asked = [
        (split, model, site)
        for split in splits
        for model in models
        for site in every
        if split == "test" or site in sites
    ]
    given = {key: predictions(key[2], key[0], key[1], 0.9) for key in asked}
    sums = []
    for c in range(len(classes)):
        parts = [
            Histogram.of(*found.of_class(c), edges)
            for (split, model, _), found in given.items()
            if (split, model) == (splits[0], "best")
        ]
        total = parts[0]
        for part in parts[1:]:
            total += part
        sums.append(total)
    limits = fit_thresholds(sums, "f1")
    lines, counted = [], []
    for (split, model, site), found in given.items():
        lines += rows(site, split, "original", model, rounds, found, limits if thresholds else none)
        for c, name in enumerate(classes):
            if name not in never_scored:
                told = Histogram.of(*found.of_class(c), edges).to_dict()
                counted.append(
                    {"split": split, "model": model, "site": site, "class": name, "histogram": told}
                )
    write_atomic(folder / "rows.csv", rows_text(lines).encode())
    if histograms:
        (folder / "histograms.json").write_text(json.dumps(counted), encoding="utf-8")
    if thresholds:
        fitted = {
            name: {"value": t.value, "reached": t.reached, "reason": t.reason}
            for name, t in zip(classes, limits, strict=True)
        }
        (folder / "thresholds.json").write_text(
            json.dumps({"split": splits[0], "criterion": "f1", "classes": fitted}), encoding="utf-8"
        )
    if overlays:
        for site in every:
            found = given.get(("test", "best", site))
            if found is not None:
                _examples(
                    folder / "sites" / site / "overlays" / "test" / "best", site, classes, found, limits
                )
    return folder


def _examples(
    folder: Path, site: str, classes: Sequence[str], found: Predictions, limits: Sequence[Threshold]
) -> None:
    folder.mkdir(parents=True)
    rng = np.random.default_rng(len(site))
    y, x = np.mgrid[:96, :80] / 96
    for c, name in enumerate(classes):
        if not found.known[:, c].any():
            continue
        for truth, kind in ((1, "present"), (0, "absent")):
            where = np.flatnonzero(found.truth[:, c] == truth)
            ranked = where[np.argsort(-found.scores[where, c])]
            for end, chosen in (("high", ranked[:4]), ("low", ranked[::-1][:4])):
                for n, at in enumerate(chosen.tolist(), 1):
                    lungs = np.exp(-(((x - 0.27) / 0.12) ** 2) - ((y - 0.5) / 0.3) ** 2)
                    lungs += np.exp(-(((x - 0.57) / 0.12) ** 2) - ((y - 0.5) / 0.3) ** 2)
                    spot = np.exp(-(((x - 0.25) / 0.07) ** 2) - ((y - 0.4 - 0.05 * c) / 0.07) ** 2)
                    image = 0.75 - 0.5 * lungs + 0.2 * truth * spot + 0.03 * rng.normal(size=x.shape)
                    limit = limits[c].value
                    np.savez_compressed(
                        folder / f"{quote(name, safe=' ')}--{kind}-{end}-{n}.npz",
                        image=np.clip(image, 0, 1).astype(np.float32),
                        cam=(spot / spot.max()).astype(np.float32),
                        case=np.array(f"{site}-{at:03d}"),
                        score=np.float64(found.scores[at, c]),
                        truth=np.bool_(truth),
                        threshold=np.float64(np.nan if limit is None else limit),
                        **{"class": np.array(name)},  # type: ignore[arg-type]
                    )
