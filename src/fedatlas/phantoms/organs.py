"""A small made-up federation, written to disk as nnU-Net raw: smooth organs in noise, partly annotated.

It exists for tests and for a first look; nothing in it is tuned for any method.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
from nibabel import orientations

from fedatlas.core.labels import BACKGROUND
from fedatlas.core.seeds import seed_of

ORGANS: dict[str, tuple[tuple[float, float, float], tuple[float, float, float], float]] = {
    "liver": ((0.30, 0.50, 0.62), (0.19, 0.22, 0.20), 110.0),
    "spleen": ((0.76, 0.38, 0.64), (0.11, 0.13, 0.13), 125.0),
    "kidney": ((0.68, 0.34, 0.30), (0.11, 0.12, 0.15), 150.0),
    "tumour": ((0.71, 0.36, 0.33), (0.06, 0.07, 0.07), 60.0),
}
"""Organ -> (centre, half axes) in parts of the body along R-L, P-A, I-S, and its intensity, as HU."""

SPACINGS = ((4.0, 4.0, 5.0), (3.5, 3.5, 4.0), (5.0, 5.0, 4.5), (4.5, 4.0, 6.0))
AXES = ("RAS", "LPS", "LPI", "ASL")


def write_phantom(
    folder: Path,
    *,
    sites: int = 4,
    cases: int = 6,
    test_cases: int = 1,
    shape: tuple[int, int, int] = (24, 24, 20),
    seed: int = 0,
    classes: Sequence[str] = tuple(ORGANS),
) -> Path:
    """Writes site-0, site-1, … into `folder` and returns it.

    Site s annotates two classes, number s and the one after it, under integers of its own; spacing and
    orientation differ per site. labelsTr_all, labelsTs_all and all_labels.json hold the full truth.
    shape: voxels along R-L, P-A, I-S at 4 mm; other spacings keep the body's size.
    """
    names = list(classes)
    unknown = [name for name in names if name not in ORGANS]
    if unknown:
        raise ValueError(f"phantom: no organ {unknown[0]!r}; known: {', '.join(ORGANS)}")
    for site in range(sites):
        root = folder / f"site-{site}"
        own = list(dict.fromkeys([names[site % len(names)], names[(site + 1) % len(names)]]))
        # integers of the site's own: 1 and 2, or 5 and 3
        numbers = (1, 2) if site % 2 == 0 else (5, 3)
        table = {name: numbers[place] for place, name in enumerate(own)}
        full = {name: number for number, name in enumerate(names, start=1)}
        titles = {"Tr": [f"p{site}{n:02d}" for n in range(cases)]}
        titles["Ts"] = [f"p{site}{n:02d}" for n in range(cases, cases + test_cases)]
        for split, listed in titles.items():
            for title in listed:
                _write_case(
                    root, split, title, shape, site, np.random.default_rng(seed_of(seed, title)), table, full
                )
        _write_table(root / "dataset.json", table, numTraining=cases, file_ending=".nii.gz")
        every = {title: names for listed in titles.values() for title in listed}
        _write_table(root / "all_labels.json", full, annotated=every)
    return folder


def phantom_sites(folder: Path) -> list[dict[str, Any]]:
    """The list `sites` of a federation file for what `write_phantom` wrote: s0, s1, …"""
    return [
        {
            "name": root.name.replace("site-", "s"),
            "path": str(root),
            "reference": {
                "table": "all_labels.json",
                "labels": "labelsTr_all",
                "test_labels": "labelsTs_all",
            },
        }
        for root in sorted(folder.glob("site-*"), key=lambda root: int(root.name.removeprefix("site-")))
    ]


def _write_table(path: Path, table: dict[str, int], **more: Any) -> None:
    content = {"channel_names": {"0": "CT"}, "labels": {BACKGROUND: 0} | table} | more
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _write_case(
    root: Path,
    split: str,
    title: str,
    shape: tuple[int, int, int],
    site: int,
    rng: np.random.Generator,
    table: dict[str, int],
    full: dict[str, int],
) -> None:
    spacing = np.array(SPACINGS[site % len(SPACINGS)])
    size = np.maximum(np.rint(np.array(shape) * 4.0 / spacing), 8).astype(int)
    place = np.stack(np.meshgrid(*[(np.arange(n) + 0.5) / n for n in size], indexing="ij"))
    image = np.where(_inside(place, (0.5, 0.5, 0.5), (0.47, 0.42, 0.7)), 30.0, -900.0)
    truth = np.zeros(size, dtype=np.uint8)
    drift = rng.normal(0, 0.02, 3)
    for name, (centre, axes, intensity) in ORGANS.items():
        if name not in full:
            continue
        moved = np.array(centre) + drift + rng.normal(0, 0.012, 3)
        organ = _inside(place, moved, np.array(axes) * rng.uniform(0.88, 1.12, 3))
        if name == "tumour":
            organ &= truth == full["kidney"] if "kidney" in full else True
        image[organ], truth[organ] = intensity, full[name]
    image += rng.normal(0, 25, size)
    strict = np.zeros_like(truth)
    for name, number in table.items():
        strict[truth == full[name]] = number
    affine = np.diag([*spacing, 1.0])
    affine[:3, 3] = rng.uniform(-30, 30, 3)
    _save(root / f"images{split}" / f"{title}_0000.nii.gz", np.rint(image).astype(np.int16), affine, site)
    _save(root / f"labels{split}" / f"{title}.nii.gz", strict, affine, site)
    _save(root / f"labels{split}_all" / f"{title}.nii.gz", truth, affine, site)


def _inside(place: np.ndarray, centre: Any, axes: Any) -> np.ndarray:
    away = (place - np.reshape(centre, (3, 1, 1, 1))) / np.reshape(axes, (3, 1, 1, 1))
    return (away**2).sum(0) < 1


def _save(path: Path, voxels: np.ndarray, affine: np.ndarray, site: int) -> None:
    """Writes a RAS volume with its axes as the site has them; the place in the world stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    turn = orientations.ornt_transform(
        orientations.axcodes2ornt("RAS"), orientations.axcodes2ornt(AXES[site % len(AXES)])
    )
    turned = orientations.apply_orientation(voxels, turn)
    nib.save(nib.Nifti1Image(turned, affine @ orientations.inv_ornt_aff(turn, voxels.shape)), path)  # type: ignore[attr-defined]
