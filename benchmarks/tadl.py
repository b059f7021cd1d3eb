"""A TADL step of FedPSL over a plain step of the same batch, first and second order, and over its floor.

The floor counts passes, a backward one as two forward ones. A plain step on a batch B costs 3 B. TADL takes the loss of
one half at theta and that of the other at theta': 3 B, if the step between them is not differentiated. Second order
adds a Hessian-vector product of the first half, which is a backward pass through that half's forward and backward
pass: at least 2 x 3 x B / 2 = 3 B. So the floor is 1 for first order and 2 for second order.

Also the rounds per minute and peak memory of a site with FedAvg and with FedPSL, on the bundled chest X-rays.
"""

import json
import tempfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.timing import alternate, show
from fedatlas import losses, methods, nets
from fedatlas.core.batch import Batch
from fedatlas.core.labels import LabelSpace, SiteLabels
from fedatlas.core.seeds import generator
from fedatlas.federation.file import load_federation
from fedatlas.federation.session import run_federation
from fedatlas.learning.loop import Local, Stepper

ROOT = Path(__file__).parents[1]
SPACE = LabelSpace(("a", "b", "c", "d", "e", "f"), exclusive=False, level="image")
CASES = {
    "cnn, 32 images of 64x64": ("cnn", {"norm": "batch"}, 32, 64),
    "densenet121, 8 images of 64x64": ("densenet121", {}, 8, 64),
}


def steps(kind: str, options: dict[str, str], batch: int, size: int, repeats: int = 7) -> dict[str, float]:
    torch.set_num_threads(1)
    rng = generator("benchmark")
    known = torch.tensor([[c < 3 for c in range(len(SPACE))]]).repeat(batch, 1)
    target = torch.randint(0, 2, (batch, len(SPACE)), generator=rng).float()
    data = Batch(torch.rand(batch, 1, size, size, generator=rng), target, known, [""] * batch)
    local = Local(optimizer="sgd", lr=1e-4, batch=batch, opt_state="reset")  # type: ignore[call-arg]
    here: Any = SimpleNamespace(
        labels=SiteLabels(SPACE, frozenset(range(3))),
        device=torch.device("cpu"),
        memory={},
        batches=lambda **asked: [data],
        log=lambda **numbers: None,
    )
    chosen = losses.LossChoice(name="masked_bce")  # type: ignore[call-arg]
    loss = losses.supervised(chosen, here)

    def net() -> torch.nn.Module:
        return nets.build(kind, options, in_channels=1, classes=len(SPACE), spatial_dims=2, seed=0)

    plain, made = net(), {}
    by = Stepper(plain, local, torch.device("cpu"))
    for order in (1, 2):
        method: Any = methods.get("fedpsl")(order=order, local=local, loss=chosen)
        made[f"order {order}"] = partial(method.client_update, here, net(), 0, 1)
    found = alternate({"plain": lambda: by.step(loss(plain, data)), **made}, repeats)
    return {"plain step, seconds": found["plain"]} | {
        f"{name} over plain (floor {floor})": found[name] / found["plain"]
        for name, floor in (("order 1", 1), ("order 2", 2))
    }


def rounds(method: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        changes = [f"method.name={method}", "rounds=4", "local.steps=15", "engine.workers=0"]
        changes += ["evaluation.every=1000", "evaluation.overlays=false", "evaluation.models=[last]"]
        changes += ["evaluation.draws=0"]
        path = Path(folder) / "run"
        run_federation(
            load_federation(ROOT / "experiments" / "quickstart-xray.yaml", changes),
            path,
            tell=lambda text: None,
        )
        logs = [json.loads(file.read_text()) for file in sorted(path.glob("rounds/*/log.json"))][2:]
    seconds = sum(log["phases"]["round"] for log in logs) / len(logs)
    pure = sum(site["step_seconds"] for log in logs for site in log["sites"].values()) / len(logs)
    peak = max(cost["peak_mb"] for log in logs for cost in log["cost"].values())
    return {
        f"{method}: rounds per minute (3 sites in turn, 15 steps each)": 60 / seconds,
        f"{method}: round over its pure steps": seconds / pure,
        f"{method}: peak of the process, MiB": peak,
    }


def main() -> dict[str, float]:
    found = {f"{case}: {name}": value for case, how in CASES.items() for name, value in steps(*how).items()}
    return found | rounds("fedavg") | rounds("fedpsl")


if __name__ == "__main__":
    show(main())
