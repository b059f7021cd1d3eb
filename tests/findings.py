"""Small folders of images with findings: blobs, bars and rings in noise."""

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from fedatlas.core.seeds import seed_of

CLASSES = ("blob", "bar", "ring")


def write_findings(
    folder: Path, *, sites: int = 3, cases: int = 16, size: int = 16, seed: int = 0, scramble: bool = False
) -> Path:
    """site-0, site-1, … with images/ and labels.csv. scramble: other truths, on the same images, of the classes that
    `findings_sites` does not count as annotated."""
    rows, columns = np.mgrid[0:size, 0:size] / (size - 1) - 0.5
    for site in range(sites):
        root = folder / f"site-{site}"
        (root / "images").mkdir(parents=True)
        lines = []
        for number in range(cases):
            rng = np.random.default_rng(seed_of(seed, site, number))
            there = dict(zip(CLASSES, (rng.random(3) < 0.5).tolist(), strict=True))
            if number < 4:  # both values of every class in the training images of every site
                there = dict.fromkeys(CLASSES, number % 2 == 0)
            image = rng.normal(0.4, 0.08, (size, size))
            y, x = rng.uniform(-0.2, 0.2, 2)
            away = np.hypot(rows - y, columns - x)
            image += 0.3 * there["blob"] * (away < 0.15)
            image += 0.3 * there["bar"] * (np.abs(rows - y) < 0.06)
            image += 0.3 * there["ring"] * (np.abs(away - 0.3) < 0.06)
            name = f"images/p{site}-{number:02d}.png"
            Image.fromarray((image.clip(0, 1) * 255).astype(np.uint8)).save(root / name)
            if scramble:
                again = np.random.default_rng(seed_of(seed, "scrambled", site, number)).random(3) < 0.5
                other = dict(zip(CLASSES, again.tolist(), strict=True))
                there = {c: there[c] if c in annotated(site) else other[c] for c in CLASSES}
            split = "train" if number < cases - 8 else "validation" if number < cases - 4 else "test"
            lines.append(
                {"file": name, "patient": f"p{site}-{number // 2}", "split": split}
                | {c: int(value) for c, value in there.items()}
            )
        with (root / "labels.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, ["file", "patient", "split", *CLASSES])
            writer.writeheader()
            writer.writerows(lines)
    return folder


def annotated(site: int) -> tuple[str, ...]:
    """Two sites share a class, the third has one of its own."""
    return {0: ("blob", "bar"), 1: ("bar",)}.get(site, ("ring",))


def findings_sites(folder: Path, *, score_all: bool = True) -> list[dict[str, Any]]:
    """The list `sites` of a federation file for what `write_findings` wrote: s0, s1, …"""
    return [
        {
            "name": f"s{number}",
            "path": str(root),
            "format": "csv",
            "reading": {"patient": "patient", "split": "split"},
            "annotated": list(annotated(number)),
            "score_all": score_all,
        }
        for number, root in enumerate(sorted(folder.glob("site-*")))
    ]


def findings_federation(folder: Path, cache: Path) -> dict[str, Any]:
    """A federation on it that trains in a second; plain values, to be changed by a test."""
    federation: Mapping[str, Any] = {
        "name": "findings",
        "task": "classification",
        "labels": {"names": list(CLASSES)},
        "sites": findings_sites(folder),
        "images": {"size": [16, 16]},
        "net": {"name": "cnn", "filters": [8, 8]},
        "method": {"name": "fedavg"},
        "local": {"optimizer": "adam", "lr": 0.01, "weight_decay": 0, "batch": 4, "steps": 3},
        "rounds": 2,
        "seed": 3,
        "evaluation": {"metrics": ["auroc"], "draws": 20, "overlays": False},
        "engine": {"cache": str(cache)},
    }
    return dict(federation)
