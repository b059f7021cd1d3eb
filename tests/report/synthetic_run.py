"""Writes a run folder as the engine and the evaluation leave it, with invented but plausible numbers."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedatlas.evaluation.statistics import COLUMNS, rows_text
from fedatlas.transport.store import write_atomic

ORGANS = ("brainstem", "spinal_cord", "parotid_left", "parotid_right", "mandible", "larynx", "oesophagus")


def write_run(
    folder: Path,
    *,
    classes: Sequence[str] = ORGANS,
    sites: Sequence[str] = ("site-a", "site-b", "site-c", "site-d"),
    rounds: int = 6,
    planned: int | None = None,
    final: bool = True,
    overlays: bool = True,
    evaluated: bool = True,
    lost_always: str | None = None,
    never_scored: Sequence[str] = (),
    nan_loss: bool = False,
    cases: int = 5,
    splits: Sequence[str] = ("validation", "test"),
    models: Sequence[str] = ("best", "last"),
    exchange: str = "",
) -> Path:
    """Each site annotates every len(sites)-th pair of classes; every case is scored for every class.

    exchange: further lines of the federation file. With "privacy", sites log their releases alone, and ε is
    1.5 more every round; with "secure", there are no local models.
    """
    private, summed = "privacy:" in exchange, "secure:" in exchange
    rng = np.random.default_rng(3)
    folder.mkdir(parents=True)
    annotated = {
        site: [name for place, name in enumerate(classes) if place // 2 % len(sites) == number]
        for number, site in enumerate(sites)
    }
    present = [site for site in sites if site != lost_always]
    level = {name: float(rng.uniform(0.45, 0.9)) for name in classes}

    def rows(split: str, grid: str, model: str, number: int, progress: float, metrics: Sequence[str]) -> list:
        lines = []
        for site in sites:
            for case in range(cases):
                for name in classes:
                    if name in never_scored:
                        continue
                    known = name in annotated[site]
                    owner = model.removeprefix("local/")
                    seen = not model.startswith("local/") or name in annotated.get(owner, ())
                    dice = level[name] * progress * (1.0 if known else 0.82) * (1.0 if seen else 0.0)
                    dice = float(np.clip(dice + rng.normal(0, 0.05), 0, 1)) if seen else 0.0
                    for metric in metrics:
                        value, reason = dice, ""
                        if metric in ("hd95", "asd"):
                            value = 2 + (30 if metric == "hd95" else 12) * (1 - dice)
                            if dice == 0:
                                value, reason = None, "prediction empty"
                        elif metric == "nsd":
                            value = min(1.0, dice * 1.05)
                        if case == 0 and name == classes[-1]:
                            value, reason = None, "truth empty"
                        lines.append(
                            dict(
                                zip(
                                    COLUMNS,
                                    (split, grid, model, number, site, f"{site}-{case:03d}", name, metric,
                                     value, known, reason),
                                    strict=True,
                                )
                            )
                        )  # fmt: skip
        return lines

    (folder / "federation.yaml").write_text(
        f"name: head & neck\nrounds: 6\nlabels: <all>\n{exchange}", encoding="utf-8"
    )
    (folder / "run.json").write_text(
        json.dumps(
            {
                "id": folder.name,
                "name": "Head and neck, four hospitals",
                "hash": "3f9c0b7a51e2",
                "versions": {"fedatlas": "0.1.0", "torch": "2.13.0", "monai": "1.6.1"},
                "git": "a318b2f",
                "started": "2026-01-05T10:00:00+00:00",
                "finished": "2026-01-05T10:07:41+00:00" if final else None,
                "machine": {"platform": "Linux", "processor": "x86_64", "cores": 2, "torch_threads": 2},
                "method": "condistfl",
                "net": "unet2d",
                "n_parameters": 1_234_567,
                "model_bytes": 4_938_268,
                "rounds": planned or rounds,
                "seed": 0,
                "labels": {"names": ["background", *classes], "groups": [], "exclusive": True},
                "sites": {
                    site: {
                        "annotated": annotated[site],
                        "cases": {"train": 9 + number, "validation": cases, "test": cases},
                        "labelled": {name: 9 + number - (number % 2) for name in annotated[site]},
                        "voxels": {
                            name: 1500 * 7 ** (place % 4) for place, name in enumerate(annotated[site])
                        },
                        "spacing": [[0.98, 0.98, 2.5 + number], [1.17, 1.17, 3.0]],
                        "orientation": ["LPS"] if number % 2 else ["LPS", "RAS"],
                    }
                    for number, site in enumerate(sites)
                },
            }
        ),
        encoding="utf-8",
    )
    start = {"round": 0, "sites": {}, "phases": {}, "lost": {}, "server_peak_mb": 0.0}
    start["cost"] = {
        site: {"seconds": 0.1, "peak_mb": 90.0, "bytes_down": 64, "bytes_up": 128} for site in present
    }
    for name in ("0000", ".0009.part"):
        place = folder / "rounds" / name
        place.mkdir(parents=True)
        (place / "log.json").write_text(json.dumps(start) if name == "0000" else "{", encoding="utf-8")
        (place / "rows.json").write_text("[]", encoding="utf-8")
    for number in range(1, rounds + 1):
        progress = 1 - np.exp(-2.2 * number / rounds)
        place = folder / "rounds" / f"{number:04d}"
        place.mkdir(parents=True)
        lost = {lost_always: "did not answer within 60 s"} if lost_always else {}
        if number == 3 and not lost_always:
            lost = {sites[-1]: "update not finite: loss <inf>"}
        active = [site for site in sites if site not in lost]
        log = {
            "round": number,
            "sites": {
                site: {
                    "loss": float("nan")
                    if nan_loss and site == sites[0]
                    else 1.6 - progress + rng.normal(0, 0.03),
                    "marginal": 1.1 - 0.7 * progress + rng.normal(0, 0.02),
                    "condist": 0.5 - 0.3 * progress + rng.normal(0, 0.02),
                    "steps": 40,
                    "step_seconds": 8.4,
                }
                for site in active
            },
            "cost": {
                site: {
                    "seconds": 9.0 + rng.normal(0, 0.2),
                    "peak_mb": 812.0 + 3 * len(site),
                    "bytes_down": 4_938_268,
                    "bytes_up": 4_938_268 + 640,
                    "evaluate_seconds": 5.1,
                    "evaluate_peak_mb": 640.0,
                    "evaluate_bytes_down": 4_938_268,
                    "evaluate_bytes_up": 2_048,
                }
                for site in active
            },
            "phases": {"round": 37.0 + rng.normal(0, 1), "evaluate": 5.5 + rng.normal(0, 0.3)},
            "lost": lost,
            "server_peak_mb": 133.0,
            "epsilon": 1.5 * number if private else None,
        }
        if private:
            log["sites"] = {site: {"releases": float(number)} for site in active}
        (place / "log.json").write_text(json.dumps(log), encoding="utf-8")
        entries = rows("validation", "federation", "global", number, progress, ["dice"]) if evaluated else []
        (place / "rows.json").write_text(json.dumps(entries), encoding="utf-8")
    if rounds and evaluated:
        (folder / "best.json").write_text(json.dumps({"round": rounds, "score": 0.7131}), encoding="utf-8")
    if final:
        lines = []
        for split in splits:
            for model in (*models, *(f"local/{site}" for site in present if not summed)):
                lines += rows(split, "original", model, rounds, 0.9, ["dice", "hd95", "asd", "nsd"])
        write_atomic(folder / "rows.csv", rows_text(lines).encode())
    if overlays and final:
        shown = [name for name in classes if name not in never_scored]
        for site in sites:
            for rank, shift in (("worst", 9), ("median", 4), ("best", 1)) if shown else ():
                _picture(folder, site, f"case--{rank}", "", shown, shift + rng.uniform(0, 2), rng)
            for name in shown:
                kept = f"class-{name.replace('/', '_')}--worst"
                _picture(folder, site, kept, name, shown, 9 + rng.uniform(0, 2), rng)
    return folder


SHAPES = {"axial": (50, 160), "coronal": (30, 160), "sagittal": (30, 50)}
SPACINGS = {"axial": (3.0, 1.0), "coronal": (4.0, 1.0), "sagittal": (4.0, 3.0)}


def _picture(
    folder: Path,
    site: str,
    kept: str,
    about: str,
    classes: Sequence[str],
    shift: float,
    rng: np.random.Generator,
) -> None:
    """Three planes with a disc per class beside each other, its prediction moved by `shift` mm."""
    told: dict[str, np.ndarray] = {}
    dice = np.zeros(len(classes))
    for plane, shape in SHAPES.items():
        spacing = SPACINGS[plane]
        y, x = np.mgrid[: shape[0], : shape[1]].astype(float)
        y, x = (y - shape[0] / 2) * spacing[0], (x - shape[1] / 2) * spacing[1]
        body = (x / 70) ** 2 + (y / 65) ** 2 < 1
        places = [-55 + 110 * (k + 0.5) / len(classes) for k in range(len(classes))]
        truth = np.stack([((x - at) / 7) ** 2 + ((y + 5) / 20) ** 2 < 1 for at in places])
        prediction = np.stack([((x - at - shift) / 7) ** 2 + ((y + 5) / 18) ** 2 < 1 for at in places])
        image = np.clip(0.45 * body + 0.15 * truth.any(0) + 0.04 * rng.normal(size=shape), 0, 1)
        told |= {
            f"{plane}-image": image.astype(np.float32),
            f"{plane}-truth": truth,
            f"{plane}-prediction": prediction,
            f"{plane}-spacing": np.array(spacing),
        }
        if plane == "axial":
            dice = 2 * (truth & prediction).sum((1, 2)) / (truth.sum((1, 2)) + prediction.sum((1, 2)))
    path = folder / "sites" / site / "overlays" / "test" / "best" / f"{kept}.npz"
    path.parent.mkdir(parents=True, exist_ok=True)
    value = dice[list(classes).index(about)] if about else dice.mean()
    told |= {"names": np.array(classes, dtype=str), "dice": dice, "scored": np.ones(len(classes), bool)}
    np.savez(path, **told, case=f"{site}-{kept.rpartition('--')[2]}", value=value, **{"class": about})  # type: ignore[arg-type]
