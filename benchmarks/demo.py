"""A whole federation, as its user starts it, against a bare script of torch that does the same training steps.

`fedatlas run` is started as a process, twice with different numbers of rounds. The difference is the training: imports,
reading and the final evaluation are in both. The bare script (`bare_training`) runs in fresh processes, as many at once as
the federation has workers, and takes as many steps in all. Both are watched from outside: wall, user and system time,
page faults and peak memory.

    python -m benchmarks.demo                    # 2.5D, 3D and whole images, one and two workers
    python -m benchmarks.demo --case 2.5D --workers 2 --precision bf16    # else as in the federation file
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.timing import show

EXPERIMENTS = Path(__file__).parents[1] / "experiments"
FEW, MANY = 1, 7
"""Rounds of the two runs."""

VOXELS = ["method.name=fedavg", "evaluation.overlays=false", "evaluation.metrics=[dice]", "local.steps=25"]
CASES: Mapping[str, tuple[str, list[str]]] = {
    "2.5D": ("quickstart.yaml", VOXELS),
    "2D": ("quickstart.yaml", [*VOXELS, "preprocessing.context=0"]),
    "3D": (
        "quickstart.yaml",
        [*VOXELS, "preprocessing.patch=[48, 48, 32]", "preprocessing.context=0", "net.filters=[16, 32, 64]", "local.batch=2", "local.steps=8", "evaluation.inference.windows=patch"],
    ),
    "whole images": ("quickstart-xray.yaml", ["method.name=fedavg", "local.batch=32", "local.steps=100", "images.size=[64, 64]"]),
}  # fmt: skip
"""name -> a federation file and what is changed in it: a loss alone, and no more evaluation than a run must do."""


def federated(file: Path, changes: list[str], rounds: int, workers: int, folder: Path) -> dict[str, float]:
    """One `fedatlas run`: the figures of the whole process tree, and of its rounds."""
    name = f"{workers}-{rounds}"
    changes = [*changes, f"rounds={rounds}", f"engine.workers={workers}", f"engine.cache={folder / 'cache'}"]
    changes += ["evaluation.every=1000", "evaluation.models=[last]"]
    command = [sys.executable, "-W", "ignore", "-m", "fedatlas", "run", str(file)]
    command += [part for change in changes for part in ("-o", change)]
    process = subprocess.Popen(
        [*command, "--runs", str(folder), "--id", name], stdout=subprocess.DEVNULL, env=_one_thread()
    )
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"fedatlas run ended with {process.returncode}: {' '.join(command)}")
    logs = [json.loads(path.read_text()) for path in sorted((folder / name / "rounds").glob("*/log.json"))]
    return {
        "wall": sum(log["phases"].get("round", 0.0) for log in logs),
        "user": used.ru_utime,
        "system": used.ru_stime,
        "faults": used.ru_minflt,
        "peak_mb": used.ru_maxrss / 1024,
        "steps": sum(site.get("steps", 0) for log in logs for site in log["sites"].values()),
        "step_seconds": sum(site.get("step_seconds", 0.0) for log in logs for site in log["sites"].values()),
        "site_seconds": sum(site["seconds"] for log in logs for site in log["cost"].values()),
        "first_site_seconds": sum(site["seconds"] for site in logs[1]["cost"].values()),
        "first_step_seconds": sum(site["step_seconds"] for site in logs[1]["sites"].values()),
        "first_wall": logs[1]["phases"]["round"],
    }


def bare(
    file: Path, changes: list[str], site: str, steps: int, workers: int, folder: Path
) -> dict[str, float]:
    """The same number of steps in plain loops, `workers` at once: the sums of their figures, the wall time of the slowest."""
    each = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "benchmarks.bare_training", str(file), site, str(steps // workers), str(folder / "cache"), *changes],
            stdout=subprocess.PIPE,
            env=_one_thread(),
        )
        for _ in range(workers)
    ]  # fmt: skip
    told = [json.loads(process.communicate()[0]) for process in each]
    sums = {key: sum(one[key] for one in told) for key in ("user", "system", "faults")}
    return sums | {key: max(one[key] for one in told) for key in ("wall", "peak_mb")}


def _one_thread() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1"}


def measure(case: str, workers: int, precision: str | None) -> dict[str, float]:
    name, changes = CASES[case]
    file, changes = EXPERIMENTS / name, [*changes, *([f"local.precision={precision}"] if precision else [])]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        few, many = (federated(file, changes, rounds, workers, folder) for rounds in (FEW, MANY))
        steps = int(many["steps"] - few["steps"])
        alone = bare(file, changes, "a", steps, workers, folder)
    run: dict[str, Any] = {key: many[key] - few[key] for key in ("user", "system", "faults")}
    # the first round warms up in both; what is left is rounds 2 to MANY
    for key in ("wall", "step_seconds", "site_seconds"):
        run[key] = many[key] - many["first_" + key]
    found = {
        "steps": float(steps),
        "wall, fedatlas over bare": run["wall"] / alone["wall"],
        "user and system, fedatlas over bare": (run["user"] + run["system"])
        / (alone["user"] + alone["system"]),
        "share of a site's time that is no forward, backward or step": 1
        - run["step_seconds"] / run["site_seconds"],
        "share of a round in which a worker has no site": 1 - run["site_seconds"] / workers / run["wall"],
        "peak of the largest process, MiB: fedatlas": many["peak_mb"],
        "peak of the largest process, MiB: bare": alone["peak_mb"],
    }
    for who, figures in (("fedatlas", run), ("bare", alone)):
        found |= {
            f"{who}: seconds of a step": figures["wall"] * workers / steps,
            f"{who}: system over user time": figures["system"] / figures["user"],
            f"{who}: page faults per step": figures["faults"] / steps,
        }
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", choices=list(CASES), action="append")
    parser.add_argument("--workers", type=int, choices=(1, 2), action="append")
    parser.add_argument("--precision", choices=("float32", "bf16"))
    given = parser.parse_args(arguments)
    for case in given.case or ("2.5D", "3D", "whole images"):
        for workers in given.workers or (1, 2):
            print(
                f"-- {case}, {given.precision or 'precision of the file'}, {workers} worker{'s' if workers > 1 else ''}",
                flush=True,
            )
            show(measure(case, workers, given.precision))


if __name__ == "__main__":
    main()
