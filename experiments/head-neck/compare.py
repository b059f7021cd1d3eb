"""The head and neck comparison: five methods, one budget, three seeds.

    python experiments/head-neck/compare.py --data DIR --profile smoke
    python experiments/head-neck/compare.py --data DIR --profile full --table docs/results.md

Runs one method and seed after the other, skips what is finished, goes on with what was stopped. The table holds
only what the full profile finished; the rest is "not run".
"""

import argparse
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from fedatlas.core.errors import FedAtlasError
from fedatlas.evaluation.statistics import read_rows
from fedatlas.federation.file import Federation, load_federation
from fedatlas.federation.session import run_federation

HERE = Path(__file__).parent
METHODS = {
    "condistfl": {"name": "condistfl"},
    "fedavg": {"name": "fedavg"},
    "standalone": {"name": "standalone"},
    "centralized": {"name": "centralized"},
    "fedprox": {"name": "fedprox", "mu": 0.01},
}
SITES = 4
PROFILES = {
    # rounds, optimizer steps per site and round; centralized takes the steps of all sites together
    "smoke": {"rounds": 2, "steps": 2, "seeds": 1},
    "full": {"rounds": 20, "steps": 20, "seeds": 3},
}


def federation(data: Path, profile: str, method: str, seed: int) -> Federation:
    budget = PROFILES[profile]
    steps = budget["steps"] * (SITES if method == "centralized" else 1)
    changes = {
        "name": f"head-neck-{profile}-{method}-s{seed}",
        "method": METHODS[method],
        "rounds": budget["rounds"],
        "local.steps": steps,
        "seed": seed,
    }
    overrides = [f"{key}={json.dumps(value)}" for key, value in changes.items()]
    overrides += [
        f"sites.{site}.path={json.dumps(str((data / f'site-{site}').resolve()))}" for site in "abcd"
    ]
    return load_federation(HERE / "common.yaml", overrides)


def train(data: Path, runs: Path, profile: str, methods: list[str], seeds: int) -> None:
    began = time.monotonic()
    for seed in range(seeds):
        for method in methods:
            path = runs / profile / f"{method}-s{seed}"
            if finished(path):
                print(f"{path}: finished already")
                continue
            print(f"{path}: begins", flush=True)
            at = time.monotonic()
            run_federation(
                federation(data, profile, method, seed), path, resume=path.exists(), tell=lambda text: None
            )
            print(f"{path}: {(time.monotonic() - at) / 60:.1f} minutes", flush=True)
    print(f"{(time.monotonic() - began) / 3600:.2f} hours")


def finished(path: Path) -> bool:
    info = path / "run.json"
    return info.exists() and json.loads(info.read_text())["finished"] is not None


def values(
    path: Path, metric: str, known: bool | None = None, model: str = "best", split: str = "test"
) -> dict[str, list[float]]:
    """class -> values of all cases of all sites."""
    found: dict[str, list[float]] = {}
    for row in read_rows(path / "rows.csv"):
        wanted = row["model"] == model and row["metric"] == metric and row["split"] == split
        if wanted and (known is None or row["known"] == known) and row["value"] is not None:
            found.setdefault(row["class"], []).append(row["value"])
    return found


def cell(per_seed: list[float], digits: int) -> str:
    if not per_seed:
        return "not run"
    spread = f" ± {np.std(per_seed, ddof=1):.{digits}f}" if len(per_seed) > 1 else ""
    return f"{np.mean(per_seed):.{digits}f}{spread}"


def table(
    runs: Path, classes: list[str], metric: str, known: bool | None, digits: int, split: str = "test"
) -> str:
    """Rows: methods. Columns: organs and their mean; mean ± SD over seeds of the mean over cases."""
    seeds = PROFILES["full"]["seeds"]
    lines = ["| method | seeds | " + " | ".join(classes) + " | macro |", "|---" * (len(classes) + 3) + "|"]
    for method in METHODS:
        paths = [runs / "full" / f"{method}-s{seed}" for seed in range(seeds)]
        model = "best"
        found = [values(path, metric, known, model, split) for path in paths if finished(path)]
        columns = [[float(np.mean(one[name])) for one in found if name in one] for name in classes]
        macro = [float(np.mean([np.mean(v) for v in one.values()])) for one in found if one]
        cells = [cell(column, digits) if column or not found else "–" for column in columns]
        lines.append(
            f"| {method} | {len(found)} of {seeds} | " + " | ".join(cells) + f" | {cell(macro, digits)} |"
        )
    return "\n".join(lines)


def write_tables(runs: Path, page: Path, classes: list[str]) -> None:
    """Replaces the part of a page between the two marks."""
    parts = []
    for split in ("test", "validation"):
        parts.append(
            f"**Dice, {split} cases, every organ that has a truth**\n\n"
            + table(runs, classes, "dice", None, 3, split)
        )
        parts.append(
            f"**Dice, {split} cases, organs that the case's own site never annotated**\n\n"
            + table(runs, classes, "dice", False, 3, split)
        )
        parts.append(
            f"**Dice, {split} cases, organs that the case's own site annotates**\n\n"
            + table(runs, classes, "dice", True, 3, split)
        )
    parts.append(
        "**HD95 in mm, test cases, every organ that has a truth (where both masks hold a voxel)**\n\n"
        + table(runs, classes, "hd95", None, 1)
    )
    marked = "<!-- head-neck tables -->\n\n" + "\n\n".join(parts) + "\n\n<!-- end of head-neck tables -->"
    text = page.read_text()
    text = re.sub(
        r"<!-- head-neck tables -->.*<!-- end of head-neck tables -->", lambda _: marked, text, flags=re.S
    )
    page.write_text(text)


def main() -> int:
    arguments: Any = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--data", type=Path, required=True, help="folder with site-a … site-d")
    arguments.add_argument("--runs", type=Path, default=Path("runs/head-neck"))
    arguments.add_argument("--profile", choices=sorted(PROFILES), default="smoke")
    arguments.add_argument("--methods", nargs="+", choices=sorted(METHODS), default=list(METHODS))
    arguments.add_argument("--seeds", type=int, help="how many (default: the profile's)")
    arguments.add_argument("--table", type=Path, help="write the tables into this page, and train nothing")
    given = arguments.parse_args()
    try:
        if given.table:
            names = load_federation(HERE / "common.yaml").labels.names or ()
            write_tables(given.runs, given.table, [name for name in names if name != "background"])
        else:
            train(
                given.data,
                given.runs,
                given.profile,
                given.methods,
                given.seeds or PROFILES[given.profile]["seeds"],
            )
    except FedAtlasError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; call again to go on")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
