"""Runs several comparisons one after another, goes on where it was stopped, and says what is done and how long the rest takes.

    python experiments/run_queue.py QUEUE.yaml --data DIR             # the work, in order; Ctrl-C is safe
    python experiments/run_queue.py QUEUE.yaml --data DIR --status    # what is done, what runs, hours left

A queue names comparisons; of each all arms and seeds of a profile are run, or those that it lists:

    comparisons:
      - {file: head-neck/menu.yaml, profile: full}
      - {file: ufps/table-2.yaml, profile: full, arms: [fedavg, ufps], seeds: 1, data: other-data}

With `--records FOLDER` what the tables need of every finished run is kept there, a small file each, and runs of which it is there are not
trained again. Paths are relative to the queue's file; `data` to the folder that --data names. What is being trained belongs to one revision of
the code: start long work from a clone that nobody edits (`git clone . ../work && cd ../work`), since a run that is resumed
with other code may have other numbers.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from fedatlas.compare.plan import Comparison, load_comparison
from fedatlas.compare.records import restore_runs, use_records
from fedatlas.compare.running import run_comparison, state_of
from fedatlas.core.errors import FedAtlasError
from fedatlas.core.options import from_dict, option, options
from fedatlas.federation.yaml import read_yaml
from fedatlas.transport.rounds import read_json


@options
class Entry:
    """A comparison in a queue."""

    file: str = option(..., "The comparison file, relative to the queue.")
    profile: str | None = option(None, "Its profile.")
    arms: tuple[str, ...] | None = option(None, "Arms to train; null: all.", min_length=1)
    seeds: int | None = option(None, "How many of its seeds; null: all.", ge=1)
    data: str | None = option(None, "The folder of its sites, relative to --data; null: that folder.")


@options
class Queue:
    """What is to be run, in this order."""

    comparisons: tuple[Entry, ...] = option(..., "The comparisons.", min_length=1)


@dataclass(frozen=True)
class Progress:
    """How far a comparison is. rounds: finished ones of those that all its runs have; spent: hours of these rounds, by
    their logs; running: runs that are begun, with their rounds."""

    finished: int
    runs: int
    rounds: tuple[int, int]
    spent: float
    running: Sequence[str]

    @property
    def left(self) -> float | None:
        """Hours that its other rounds take, at the speed of the finished ones; None where there is none."""
        done, of = self.rounds
        return self.spent / done * (of - done) if done else None


def load(queue: Path, data: Path | None, runs: Path) -> list[tuple[Comparison, tuple[str, ...]]]:
    """The comparisons of a queue, each with the arms to train. Raises FederationError for what cannot be read."""
    result = []
    for entry in from_dict(Queue, read_yaml(queue), what=str(queue)).comparisons:
        place = data / entry.data if data and entry.data else data
        comparison = load_comparison(
            [queue.parent / entry.file], profile=entry.profile, data=place, runs=runs, seeds=entry.seeds
        )
        arms = entry.arms or tuple(comparison.arms)
        result.append((comparison, tuple(one for arm in arms for one in comparison.trained(arm))))
    return result


def progress(comparison: Comparison, arms: Sequence[str]) -> Progress:
    """How far the chosen arms are, by their run folders. Raises RunFolderError for folders of another configuration."""
    finished, spent, done, total = 0, 0.0, 0, 0
    running = []
    for seed in comparison.seeds:
        for arm in arms:
            state, path = state_of(comparison, arm, seed), comparison.path(arm, seed)
            logs = sorted(path.glob("rounds/[0-9]*/log.json"))
            rounds = comparison.federations[arm][seed].rounds
            made = [log for log in logs if int(log.parent.name)]
            spent += sum(sum(read_json(log)["phases"].values()) for log in logs) / 3600
            done, total = done + len(made), total + rounds
            finished += state == "finished"
            if state == "begun":
                running.append(f"{path.name}, round {len(made)} of {rounds}")
    return Progress(finished, len(arms) * len(comparison.seeds), (done, total), spent, running)


def status(queue: Sequence[tuple[Comparison, Sequence[str]]]) -> str:
    """A line for every comparison, and the hours of all."""
    lines, left, unknown = [], 0.0, 0
    for comparison, arms in queue:
        try:
            at = progress(comparison, arms)
        except FedAtlasError as error:
            lines.append(f"{comparison.folder.name}: {str(error).splitlines()[0]}")
            continue
        hours = f", about {at.left:.1f} h left" if at.left else "" if at.left == 0 else ", not begun"
        lines.append(f"{comparison.folder.name}: {at.finished} of {at.runs} runs{hours}")
        lines += [f"  {run}" for run in at.running]
        left += at.left or 0
        unknown += at.left is None
    more = f", and {unknown} comparisons that are not begun" if unknown else ""
    return "\n".join([*lines, f"{left:.1f} hours left{more}"])


def work(queue: Sequence[tuple[Comparison, Sequence[str]]], records: Path | None = None) -> int:
    """Trains all that is missing, a seed of every comparison before the next seed, so that an early stop leaves complete
    tables; returns how many runs failed. records: the folder of records, of runs that are finished now, too."""
    failed = 0
    keeping = [use_records(comparison, records, _tell) for comparison, _ in queue]
    for position in range(max(len(comparison.seeds) for comparison, _ in queue)):
        for (comparison, arms), after_run in zip(queue, keeping, strict=True):
            if position >= len(comparison.seeds):
                continue
            seed = comparison.seeds[position]
            one = {arm: {seed: of[seed]} for arm, of in comparison.federations.items()}
            began = f"{datetime.now():%H:%M}"
            print(f"{began} {comparison.folder.name}, seed {seed}", flush=True)
            only = replace(comparison, federations=one)
            failed += len(run_comparison(only, arms=arms, tell=_tell, after_run=after_run))
    return failed


def _tell(text: str) -> None:
    print(f"  {text}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("queue", type=Path)
    parser.add_argument(
        "--data", type=Path, metavar="DIR", help="folder of the sites whose paths are relative"
    )
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of all runs (default: runs)")
    parser.add_argument(
        "--records", type=Path, metavar="FOLDER", help="where records of finished runs are kept"
    )
    parser.add_argument("--status", action="store_true", help="train nothing, say how far it is")
    given = parser.parse_args(argv)
    try:
        queue = load(given.queue, given.data, given.runs)
        if given.status:
            for comparison, _ in queue:
                if given.records:
                    restore_runs(comparison, given.records, _tell)
            print(status(queue))
            return 0
        failed = work(queue, given.records)
        print(status(queue))
    except FedAtlasError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; complete rounds are kept. The same command goes on", file=sys.stderr)
        return 130
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
