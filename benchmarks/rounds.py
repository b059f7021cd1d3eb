"""What a round costs beside its training steps: round time over the sum of the sites' pure steps.

The demo's federation on the bundled CT, sites in turn in one process, FedAvg; sampling and augmentation run ahead in
a thread. Evaluation is not part of a round.
"""

import json
import tempfile
from pathlib import Path

from benchmarks.timing import show
from fedatlas.experiment import load_federation
from fedatlas.session import run_federation

ROOT = Path(__file__).parents[1]


def main() -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        changes = [
            "method.name=fedavg",
            "rounds=4",
            "local.steps=25",
            "engine.workers=0",
            "evaluation.every=1000",
        ]
        changes += ["evaluation.overlays=false", "evaluation.models=[last]", "evaluation.metrics=[dice]"]
        federation = load_federation(ROOT / "experiments" / "quickstart.yaml", changes)
        path = Path(folder) / "run"
        run_federation(federation, path, tell=lambda text: None)
        logs = [json.loads(file.read_text()) for file in sorted(path.glob("rounds/*/log.json"))]
    # the first round warms up
    ratios = []
    for log in logs[2:]:
        steps = sum(site["step_seconds"] for site in log["sites"].values())
        ratios.append(log["phases"]["round"] / steps)
    return {f"round {number}: round over steps": ratio for number, ratio in enumerate(ratios, start=2)} | {
        "mean round over steps": sum(ratios) / len(ratios)
    }


if __name__ == "__main__":
    show(main())
