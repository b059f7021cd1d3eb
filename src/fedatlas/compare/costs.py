"""What the arms of a comparison cost: rounds, traffic by formula and on the wire, time."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedatlas.compare.plan import Comparison
from fedatlas.evaluation.statistics import mean_of_defined
from fedatlas.federation.file import make_method
from fedatlas.federation.yaml import read_yaml
from fedatlas.transport.rounds import RunFolder, read_json, read_run

MEGABYTE, GIGABYTE = 2**20, 2**30


def formula_gigabytes(rounds: int, sites: int, megabytes: float) -> float:
    """2 R K size: a model to and from each of K sites in each of R rounds, in GB of 1024 MB (ConDistFL, tables 6
    and 7)."""
    return 2 * rounds * sites * megabytes / 1024


def costs(comparison: Comparison, seeds: Mapping[str, Sequence[int]]) -> dict[str, dict[str, Any]]:
    """arm -> means over its finished seeds, and over what is trained for it; arms without one are left out.

    seeds: arm -> those of which the run is finished. rounds; sites: that trained; megabytes: of a model, 2**20 bytes;
    formula: `formula_gigabytes`; wire: training messages of all rounds and of the start as they were sent, in GB of 2**30
    bytes; start: those of the start alone; these three are None where a method merges the data. evaluation: messages
    of validation, None where a method merges the data and logs have none, as before 2026-11-28.
    step_hours: all sites' optimizer steps, None where logs lack those of teachers, as before 2026-11-28; site_hours: all
    that the sites did for training in the rounds, with the hours of what they took from their caches, as when it was made;
    start_hours: the same before the first round, as pre-training; *_relative: over the first arm. server_seconds: of the rounds,
    without what sites did; None where sites ran beside each other.
    """
    found = {
        arm: _mean(
            [
                _of_run(comparison.path(trained, seed), comparison, trained, seed)
                for seed in seeds[arm]
                for trained in comparison.trained(arm)
            ]
        )
        for arm in comparison.arms
        if seeds[arm]
    }
    first = found.get(comparison.arms[0], {})
    for of_arm in found.values():
        for key in ("step", "site"):
            ours, theirs = of_arm[f"{key}_hours"], first.get(f"{key}_hours")
            of_arm[f"{key}_relative"] = ours / theirs if ours is not None and theirs else None
    return found


def _mean(runs: Sequence[Mapping[str, float | None]]) -> dict[str, float | None]:
    return {key: mean_of_defined(run[key] for run in runs) for key in runs[0]}


def _of_run(path: Path, comparison: Comparison, arm: str, seed: int) -> dict[str, float | None]:
    info = read_run(path)
    logs = [read_json(file) for file in RunFolder(path).files("log.json")]
    start = [log for log in logs if log["round"] == 0]
    rounds = [log for log in logs if log["round"] > 0]

    def spent(records: Sequence[Mapping[str, Any]], *keys: str) -> float:
        return sum(cost.get(key) or 0.0 for log in records for cost in log["cost"].values() for key in keys)

    federation = comparison.federations[arm][seed]
    method = make_method(federation)

    saved = sum(site.get("saved_seconds") or 0.0 for log in rounds for site in log["sites"].values())

    def steps() -> float | None:
        first = rounds[0]["sites"].values() if rounds else ()
        before = method.steps_before(federation.rounds, len(training))
        if before and any(site.get("steps", 0) <= before for site in first):
            return None
        found = [
            site["step_seconds"]
            for log in rounds
            for site in log["sites"].values()
            if site.get("step_seconds")
        ]
        return sum(found) / 3600 if found else None

    training = {site for log in rounds for site, cost in log["cost"].items() if "bytes_up" in cost}
    pooled = method.pooled
    megabytes = info["model_bytes"] / MEGABYTE
    ways = ("bytes_down", "bytes_up")
    evaluation = spent(logs, *(f"evaluate_{way}" for way in ways))
    sites = spent(rounds, "seconds")
    wall = sum(log["phases"].get("round", 0.0) for log in rounds)
    in_turn = not (read_yaml(path / "federation.yaml").get("engine") or {}).get("workers")
    return {
        "rounds": len(rounds),
        "sites": len(training),
        "megabytes": megabytes,
        "formula": None if pooled else formula_gigabytes(len(rounds), len(training), megabytes),
        "wire": None if pooled else spent(logs, *ways) / GIGABYTE,
        "start": None if pooled else spent(start, *ways) / GIGABYTE,
        "evaluation": None if pooled and not evaluation else evaluation / GIGABYTE,
        "step_hours": steps(),
        "site_hours": (sites + saved) / 3600,
        "start_hours": spent(start, "seconds") / 3600,
        "server_seconds": max(wall - sites, 0.0) if in_turn else None,
    }
