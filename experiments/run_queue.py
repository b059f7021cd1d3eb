"""Runs several comparisons one after another, goes on where it was stopped, and says what is done and how long the rest takes.

    python experiments/run_queue.py QUEUE.yaml --data DIR             # the work, in order; Ctrl-C is safe
    python experiments/run_queue.py QUEUE.yaml --data DIR --status    # what is done, what runs, hours left
    python experiments/run_queue.py QUEUE.yaml --data DIR --device cuda --workers 0 --at-once 8    # eight runs beside each other

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
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any

from fedatlas.compare.plan import Comparison, load_comparison
from fedatlas.compare.records import restore_runs, use_records
from fedatlas.compare.running import run_comparison, state_of
from fedatlas.core.errors import FedAtlasError
from fedatlas.core.options import from_dict, not_known, option, options
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


Loaded = Sequence[tuple[Comparison, Sequence[str]]]
"""The comparisons of a queue, each with the arms to train."""


@dataclass(frozen=True)
class Progress:
    """How far a comparison is. rounds: finished ones of those that all its runs have, without runs of an earlier comparison; spent:
    hours of these rounds, by their logs; running: runs that are begun, with their rounds, or to be evaluated again."""

    finished: int
    runs: int
    rounds: tuple[int, int]
    spent: float
    running: Sequence[str]

    @property
    def left(self) -> float | None:
        """Hours that its other rounds take, at the speed of the finished ones; None where there is none."""
        done, of = self.rounds
        return self.spent / done * (of - done) if done else 0.0 if not of else None


def load(
    queue: Path,
    data: Path | None,
    runs: Path,
    *,
    device: str | None = None,
    workers: int | None = None,
) -> Loaded:
    """The comparisons of a queue. device, workers: in place of those of `engine`. Raises FederationError for what cannot be read."""
    result = []
    for entry in from_dict(Queue, read_yaml(queue), what=str(queue)).comparisons:
        comparison = load_comparison(
            [queue.parent / entry.file],
            profile=entry.profile,
            data=data / entry.data if data and entry.data else data,
            runs=runs,
            seeds=entry.seeds,
            workers=workers,
            device=device,
        )
        for arm in entry.arms or ():
            if arm not in comparison.arms:
                raise not_known(f"{queue}: {entry.file}: the arm", arm, comparison.arms)
        arms = entry.arms or tuple(comparison.arms)
        result.append((comparison, tuple(one for arm in arms for one in comparison.trained(arm))))
    return result


def progress(comparison: Comparison, arms: Sequence[str], seen: set[Path]) -> Progress:
    """How far the chosen arms are, by their run folders. seen: those of earlier comparisons, which may share runs; those of this one are
    added. Raises RunFolderError for folders of another configuration."""
    finished, spent, done, total = 0, 0.0, 0, 0
    running = []
    for seed in comparison.seeds:
        for arm in arms:
            state, path = state_of(comparison, arm, seed), comparison.path(arm, seed)
            finished += state == "finished"
            if path in seen:
                continue
            seen.add(path)
            logs = sorted(path.glob("rounds/[0-9]*/log.json"))
            rounds = comparison.federations[arm][seed].rounds
            made = [log for log in logs if int(log.parent.name)]
            spent += sum(sum(read_json(log)["phases"].values()) for log in logs) / 3600
            done, total = done + len(made), total + rounds
            if state == "begun":
                running.append(f"{path.name}, round {len(made)} of {rounds}")
            elif state == "to evaluate":
                running.append(f"{path.name}, to be evaluated again")
    return Progress(finished, len(arms) * len(comparison.seeds), (done, total), spent, running)


def status(queue: Loaded) -> str:
    """A line for every comparison, and the hours of all."""
    lines, left, unknown = [], 0.0, 0
    seen: set[Path] = set()
    for comparison, arms in queue:
        name = comparison.name + (f", {comparison.profile}" if comparison.profile else "")
        try:
            at = progress(comparison, arms, seen)
        except FedAtlasError as error:
            lines.append(f"{name}: {str(error).splitlines()[0]}")
            continue
        lines.append(f"{name}: {at.finished} of {at.runs} runs{_rest(at)}")
        lines += [f"  {run}" for run in at.running]
        left += at.left or 0
        unknown += at.left is None
    more = f", and {unknown} comparisons that are not begun" if unknown else ""
    return "\n".join([*lines, f"{left:.1f} hours left{more}"])


def _rest(at: Progress) -> str:
    """What is left of a comparison."""
    if at.finished < at.runs and not at.rounds[1]:
        return ", the others are counted above"
    if at.left is None:
        return ", the others are not begun" if at.finished else ", not begun"
    return f", about {at.left:.1f} h left" if at.left else ""


def turns(queue: Loaded) -> Iterator[tuple[int, Comparison, Sequence[str]]]:
    """The order of the work: a seed of every comparison before the next seed, so that an early stop leaves complete tables. Gives the
    place in the queue, the comparison with this seed alone, and its arms."""
    for position in range(max(len(comparison.seeds) for comparison, _ in queue)):
        for place, (comparison, arms) in enumerate(queue):
            if position < len(comparison.seeds):
                seed = comparison.seeds[position]
                of_seed = {arm: {seed: of[seed]} for arm, of in comparison.federations.items()}
                yield place, replace(comparison, federations=of_seed), arms


def work(queue: Loaded, records: Path | None = None) -> int:
    """Trains all that is missing, one run after another; returns how many failed. records: the folder of records, of runs that are
    finished now, too."""
    failed = 0
    keeping = [use_records(comparison, records, _tell) for comparison, _ in queue]
    for place, comparison, arms in turns(queue):
        print(f"{datetime.now():%H:%M} {comparison.name}, seed {comparison.seeds[0]}", flush=True)
        try:
            failed += len(run_comparison(comparison, arms=arms, tell=_tell, after_run=keeping[place]))
        except FedAtlasError as error:  # its data are not there, those of others may be
            _tell(f"failed: {error}")
            failed += len(arms)
    return failed


def work_beside(queue: Loaded, records: Path | None, at_once: int) -> int:
    """As `work`, so many runs at a time, each in a process of its own. They begin in the order of `turns`; a process that ends of itself,
    such as for want of memory, is a run that failed."""
    failed = 0
    keeping = [use_records(comparison, records, _tell) for comparison, _ in queue]
    once: dict[Path, tuple[int, Comparison, str]] = {}  # comparisons may share runs
    for place, comparison, arms in turns(queue):
        for arm in arms:
            if not _finished(comparison, arm):
                once.setdefault(comparison.path(arm, comparison.seeds[0]), (place, comparison, arm))
    waiting = list(once.values())
    print(f"{datetime.now():%H:%M} {len(waiting)} runs to do, {at_once} at a time", flush=True)
    spawn = get_context("spawn")
    running: dict[int, tuple[Any, connection.Connection, tuple[int, Comparison, str]]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                place, comparison, arm = run = waiting.pop(0)
                said, says = spawn.Pipe(duplex=False)
                process = spawn.Process(target=train, args=(says, comparison, arm))
                process.start()
                says.close()
                running[process.sentinel] = process, said, run
            for sentinel in connection.wait(list(running)):
                process, said, (place, comparison, arm) = running.pop(sentinel)
                process.join()
                seed = comparison.seeds[0]
                try:
                    text, well = said.recv()
                except EOFError:
                    text, well = f"{arm}-s{seed}: failed: its process ended with {process.exitcode}", False
                _tell(f"{datetime.now():%H:%M} {comparison.name}: {text}")
                failed += not well
                if well:
                    keeping[place](arm, seed)
    finally:
        for process, _, _ in running.values():
            process.terminate()
            process.join()
    return failed


def train(says: connection.Connection, comparison: Comparison, arm: str) -> None:
    """Trains the one seed of an arm; sends what is to be told of it, and whether it went well. Ctrl-C is for the process that started this one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    told, run = [""], f"{arm}-s{comparison.seeds[0]}"
    try:
        failed = run_comparison(comparison, arms=[arm], tell=told.append)
        says.send((f"{run}: failed: {failed[run]}" if failed else told[-1], not failed))
    except FedAtlasError as error:  # its data are not there
        says.send((f"{run}: failed: {error}", False))


def _finished(comparison: Comparison, arm: str) -> bool:
    """Whether the one seed of an arm is trained."""
    try:
        return state_of(comparison, arm, comparison.seeds[0]) == "finished"
    except FedAtlasError:
        return False  # the process that would train it says why it cannot


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
    parser.add_argument("--device", help="where sites train (cpu, cuda, …), in place of engine.device")
    parser.add_argument(
        "--workers", type=int, metavar="N", help="worker processes, in place of engine.workers"
    )
    parser.add_argument(
        "--at-once",
        type=int,
        default=1,
        metavar="N",
        help="so many runs beside each other, as on a GPU, of which a small net leaves most idle; each has engine.workers of its own "
        "if --workers does not say 0",
    )
    parser.add_argument("--status", action="store_true", help="train nothing, say how far it is")
    given = parser.parse_args(argv)
    try:
        for name, least in (("workers", 0), ("at_once", 1)):
            value = getattr(given, name)
            if value is not None and value < least:
                raise FedAtlasError(f"--{name.replace('_', '-')} {value}: must be at least {least}")
        queue = load(given.queue, given.data, given.runs, device=given.device, workers=given.workers)
        if given.status:
            for comparison, _ in queue:
                if given.records:
                    restore_runs(comparison, given.records, _tell)
            print(status(queue))
            return 0
        if given.at_once > 1:
            failed = work_beside(queue, given.records, given.at_once)
        else:
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
