"""The evaluation of a net on the demo's test cases, on the files' own grids, against a bare script of torch and MONAI.

    OMP_NUM_THREADS=1 python -m benchmarks evaluation

Both predict the same cases with the same net, take the probabilities to the scan's grid, decide the class and score every
organ by Dice, HD95, ASD and NSD; each in a process of its own, in turn. The bare script has it easier: it is given images
on the common grid and truths as arrays, where ours reads the truth from its file. The net is trained for a few steps, so that
there are organs to score.
"""

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

LABELS = ("table=all_labels.json", "labels=labelsTr_all", "test_labels=labelsTs_all")
PATCH, CONTEXT, BATCH = (64, 64), 1, 8
METRICS = ("dice", "hd95", "asd", "nsd")
WAYS = {
    "ours": [],
    "whole": ["evaluation.inference.windows=whole"],
    "whole_bf16": ["evaluation.inference.windows=whole", "evaluation.inference.precision=bf16"],
}
"""Name -> what is changed of the demo's file."""


def demo(folder: Path, changes: list[str]) -> Any:
    """The demo's federation with the data of its sites, every one with the full truth as its own labels."""
    from fedatlas.federation.design import Experiment
    from fedatlas.federation.file import load_federation

    file = Path(__file__).parents[1] / "experiments" / "quickstart.yaml"
    full = [f"sites.{s}.{key}" for s in "abcd" for key in LABELS]
    full += [f"sites.{s}.reference=null" for s in "abcd"]
    return Experiment(load_federation(file, [*full, *changes]), folder / "cache")


def prepare(folder: Path, steps: int, cases: int) -> None:
    """Trains the net, and keeps it and what the bare script is given."""
    from monai.losses.dice import DiceCELoss

    from fedatlas.data.site_data import pool

    experiment = demo(folder, [])
    experiment.prepare()
    net = experiment.make_net()
    loss = DiceCELoss(to_onehot_y=True, softmax=True, include_background=False, batch=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    sites = pool(list(experiment.sources.values()))  # type: ignore[arg-type]
    for batch in sites.batches(("benchmark",), batch=16, steps=steps):
        optimizer.zero_grad()
        loss(net(batch.image), batch.target[:, None]).backward()
        optimizer.step()
    torch.save(net.eval(), folder / "net.pt")
    for site, source in experiment.sources.items():
        for volume in itertools.islice(source.volumes("test"), cases):
            truth = volume.geometry.turn(volume.truth("original"))
            kept = {"image": volume.image.numpy(), "truth": truth, "spacing": volume.geometry.turned_spacing}
            np.savez(folder / f"{site}-{volume.case}.npz", **kept)


def ours(folder: Path, changes: list[str], cases: int) -> dict[str, float]:
    from fedatlas.core.tensors import tensors_of

    experiment = demo(folder, changes)
    net = torch.load(folder / "net.pt", weights_only=False)
    member = {"model": tensors_of(net), "classes": None}
    began, dice = time.perf_counter(), []
    for name, source in experiment.sources.items():
        site = SimpleNamespace(
            name=name,
            folder=folder,
            network=lambda model, kind: net,
            volumes=lambda split, source=source: itertools.islice(source.volumes(split), cases),
        )
        what = {"split": "test", "model": "best", "round": 1, "grid": "original", "metrics": list(METRICS)}
        rows = experiment.evaluator.evaluate(site, [member], **what, overlays=False)["rows"]
        dice += [row["value"] for row in rows if row["metric"] == "dice" and row["value"] is not None]
    return {"seconds": time.perf_counter() - began, "dice": float(np.mean(dice))}


@torch.inference_mode()
def bare(folder: Path) -> dict[str, float]:
    from monai.inferers.utils import sliding_window_inference
    from monai.metrics.hausdorff_distance import compute_hausdorff_distance
    from monai.metrics.meandice import compute_dice
    from monai.metrics.surface_dice import compute_surface_dice
    from monai.metrics.surface_distance import compute_average_surface_distance

    net = torch.load(folder / "net.pt", weights_only=False)
    began, dice = time.perf_counter(), []

    def predictor(windows: Tensor) -> Tensor:
        return net(windows).softmax(1)

    for file in sorted(folder.glob("*.npz")):
        with np.load(file) as kept:
            image, truth, spacing = torch.from_numpy(kept["image"]), kept["truth"], tuple(kept["spacing"])
        z = torch.arange(image.shape[-1])
        near = [image[0, ..., (z + k).clamp(0, len(z) - 1)] for k in range(-CONTEXT, CONTEXT + 1)]
        slices = torch.stack(near).permute(3, 0, 1, 2)
        found = sliding_window_inference(slices, PATCH, BATCH, predictor, overlap=0.5, mode="gaussian")
        assert isinstance(found, Tensor)
        p = nn.functional.interpolate(found.movedim(0, -1)[None], truth.shape, mode="trilinear")
        label, classes = p.argmax(1)[0], p.shape[1]
        hot = [
            nn.functional.one_hot(m.long(), classes).movedim(-1, 0)[None]
            for m in (label, torch.from_numpy(truth.astype(np.int64)))
        ]
        dice.append(compute_dice(*hot, include_background=False))
        compute_hausdorff_distance(*hot, percentile=95, spacing=spacing)
        compute_average_surface_distance(*hot, symmetric=True, spacing=spacing)
        compute_surface_dice(*hot, [2.0] * (classes - 1), spacing=spacing)
    return {"seconds": time.perf_counter() - began, "dice": float(torch.cat(dice).nanmean())}


def main(steps: int, cases: int, repeats: int) -> dict[str, float]:
    found: dict[str, list[dict[str, float]]] = {name: [] for name in ("bare", *WAYS)}
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.evaluation", "--folder", scratch]
        command += ["--steps", str(steps), "--cases", str(cases)]
        subprocess.run([*command, "--way", "prepare"], check=True)
        for _, name in itertools.product(range(repeats), found):
            told = subprocess.run([*command, "--way", name], check=True, capture_output=True, text=True)
            found[name].append(json.loads(told.stdout.splitlines()[-1]))
    print(
        "seconds: "
        + ", ".join(f"{name} {median(r['seconds'] for r in of):.3g}" for name, of in found.items())
    )
    result = {}
    for name in WAYS:
        pairs = zip(found["bare"], found[name], strict=True)
        result[f"bare_over_{name}"] = median(b["seconds"] / o["seconds"] for b, o in pairs)
    return result | {f"dice_{name}": of[0]["dice"] for name, of in found.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--way", choices=["prepare", "bare", *WAYS], help="part of the benchmark, on its own")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--steps", type=int, default=300, help="of training, 16 slices each")
    parser.add_argument("--cases", type=int, default=2, help="of every site")
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.way is None:
        for key, value in main(given.steps, given.cases, given.repeats).items():
            print(f"{key}: {value:.4g}")
    elif given.way == "prepare":
        prepare(given.folder, given.steps, given.cases)
    else:
        told = bare(given.folder) if given.way == "bare" else ours(given.folder, WAYS[given.way], given.cases)
        print(json.dumps(told))
