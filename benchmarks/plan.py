"""What `fedatlas plan` predicts, beside a short run of the same file, for 2.5D CT, 3D MR and findings.

The file is what `fedatlas init` writes for the folders site-* in three folders of the data: head-neck-ct, abdomen-mr and
chest-xray-findings. Then `fedatlas plan` and `fedatlas run` are started as a user starts them, with the same few rounds.

    python -m benchmarks plan --data FOLDER                           # on idle cores: seconds of a clock
    python -m benchmarks plan --data FOLDER --processor               # beside other work: seconds of a processor
    python -m benchmarks plan --data FOLDER --case findings --change local.steps=5

With --processor every clock in the processes of the trial and of the run counts their processor time. Then what a worker waits for
is not in the numbers, and the server's share, which is in no worker, is left out.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from fedatlas.federation.forecast import makespan

CASES = {
    "2.5D CT": ("head-neck-ct", ["--dimensions", "2"]),
    "3D MR": ("abdomen-mr", ["--dimensions", "3"]),
    "findings": ("chest-xray-findings", []),
}
"""name -> the folder of its sites, and options of `fedatlas init`."""
ROUNDS = 4
"""Of the run: the first warms up, the second and the fourth are validated."""
PROCESSOR = "import time\ntime.perf_counter = time.process_time\n"


def told(arguments: list[Any], folder: Path, processor: bool) -> str:
    """What a verb prints."""
    path = os.environ.get("PYTHONPATH", "")
    more = {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{folder}{os.pathsep}{path}" if processor else path}
    command = [sys.executable, "-W", "ignore", "-m", "fedatlas", *map(str, arguments)]
    return subprocess.run(
        command, stdout=subprocess.PIPE, check=True, text=True, env=os.environ | more
    ).stdout


def measured(run: Path, processor: bool) -> dict[str, float]:
    """What a run took, under the names of a forecast."""
    workers = max(1, yaml.safe_load((run / "federation.yaml").read_text())["engine"]["workers"])
    logs = [json.loads(path.read_text()) for path in sorted((run / "rounds").glob("*/log.json"))]
    later = [log for log in logs if log["round"] > 1]

    def seconds(log: dict[str, Any], key: str, phase: str) -> float:
        spent = [cost[key] for _, cost in sorted(log["cost"].items()) if key in cost]
        return makespan(spent, workers) if processor else log["phases"][phase]

    costs = [cost for log in logs for cost in log["cost"].values()]
    bytes_ = [value for cost in costs for key, value in cost.items() if "bytes" in key]
    validated = [log for log in later if log["phases"]["evaluate"]]
    return {
        "seconds_per_round": statistics.median(seconds(log, "seconds", "round") for log in later),
        "seconds_per_validation": statistics.median(
            seconds(log, "evaluate_seconds", "evaluate") for log in validated
        ),
        "memory": max(value for cost in costs for key, value in cost.items() if "peak_mb" in key) * 2**20,
        "bytes": float(sum(bytes_)),
    }


def compare(case: str, data: Path, changes: list[str], processor: bool, folder: Path) -> None:
    """Prints the prediction, what the run took, and by how much the first misses the second."""
    name, options = CASES[case]
    sites, file = sorted((data / name).glob("site-*")), folder / "federation.yaml"
    if not sites:
        raise SystemExit(f"{data / name}: holds no folder site-*; give the folder above it with --data")
    (folder / "sitecustomize.py").write_text(PROCESSOR)
    told(["init", *sites, "-o", file, "--yes", "--quiet", *options], folder, False)
    changes = [f"rounds={ROUNDS}", "evaluation.every=2", "evaluation.models=[last]", *changes]
    given = [file, *(part for change in changes for part in ("-o", change))]
    plan = json.loads(told(["plan", *given, "--json", "--quiet"], folder, processor))["forecast"]
    told(["run", *given, "--runs", folder, "--id", "run"], folder, processor)
    for key, real in measured(folder / "run", processor).items():
        print(
            f"{key}: predicted {plan[key]:.4g}, the run {real:.4g}, {plan[key] / real - 1:+.1%}", flush=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="the folder that holds the three")
    parser.add_argument("--case", choices=list(CASES), action="append")
    parser.add_argument("--change", action="append", default=[], metavar="KEY.PATH=VALUE")
    parser.add_argument("--processor", action="store_true")
    given = parser.parse_args()
    for case in given.case or list(CASES):
        print(f"-- {case}{', processor time' if given.processor else ''}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            compare(case, given.data, given.change, given.processor, Path(folder))


if __name__ == "__main__":
    main()
