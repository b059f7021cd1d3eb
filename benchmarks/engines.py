"""Rounds on NVIDIA FLARE and on Flower: seconds and memory without training, start-up, their share in a round of real
training, and what our adapters add to a bare echo application on the same engine.

    python -m benchmarks engines [--part rounds|startup|share|echo] [--engine nvflare|flower] [--mb 40 336]

Real servers and clients over loopback, four sites. What is compared is taken in turn, in one run. Sums of PSS are
sampled every quarter of a second, so a short peak may be missed. Linux only.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGES = {"nvflare": "nvflare", "flower": "flwr"}
ENGINES = tuple(PACKAGES)
LARGE = 100
"""10**6 bytes from which a model is large: fewer repeats, none of them to warm up."""


class Party:
    """A process of `benchmarks.engine_party`; a context, at whose end nothing that it started is left."""

    def __init__(self, kind: str, mb: float) -> None:
        self.kind, self.mb = kind, mb
        self.seen: dict[int, str] = {}
        """Its processes, ever: pid -> when it was started, so that a number used again is told apart."""

    def __enter__(self) -> "Party":
        self.folder = tempfile.TemporaryDirectory(prefix="fedatlas-bench-")
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.engine_party", self.kind, f"{self.mb}"]
        self.log = (Path(self.folder.name) / "party.log").open("wb")
        self.process = subprocess.Popen(
            [*command, self.folder.name],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
        )
        try:
            self.startup = self._heard()["seconds"]
            self.roots: dict[str, int] = self._heard()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _heard(self) -> dict[str, Any]:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            text = Path(self.log.name).read_text(errors="replace")[-2000:]
            raise RuntimeError(f"{self.kind}: its process has ended\n{text}")
        return json.loads(line)

    def do(self, command: str) -> dict[str, Any]:
        assert self.process.stdin
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()
        return self._heard()

    def watched(self, command: str) -> dict[str, Any]:
        """The same, with the largest sums of PSS (10**6 bytes) of the engine's own processes while it ran: at the
        server, of the site with most, and of all."""
        over = threading.Event()
        peaks: dict[str, float] = {}

        def watch() -> None:
            while not over.wait(0.25):
                now = self.held()
                for name, value in now.items():
                    peaks[name] = max(peaks.get(name, 0.0), value)

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            return self.do(command) | {f"pss {name}": value for name, value in peaks.items()}
        finally:
            over.set()
            watcher.join()

    def held(self) -> dict[str, float]:
        tree = self._tree()
        pss = {party: sum(_pss(pid) for pid in _below(tree, root)) for party, root in self.roots.items()}
        if not pss:
            return {}
        return {
            "server": pss["server"],
            "site": max(value for party, value in pss.items() if party != "server"),
            "all": sum(pss.values()),
        }

    def _tree(self) -> dict[int, list[int]]:
        tree = _children()
        self.seen |= {pid: _began(pid) for pid in _below(tree, self.process.pid)}
        return tree

    def __exit__(self, *_: object) -> None:
        self._tree()
        assert self.process.stdin
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for pid, began in self.seen.items():
            if began and _began(pid) == began:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.log.close()
        self.folder.cleanup()


def _children() -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            found.setdefault(parent, []).append(int(entry.name))
    return found


def _below(tree: dict[int, list[int]], root: int) -> Iterator[int]:
    """A process and all that descend from it."""
    yield root
    for child in tree.get(root, []):
        yield from _below(tree, child)


def _began(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _pss(pid: int) -> float:
    """10**6 bytes; 0 for a process that has gone."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0.0
    return next(
        (int(line.split()[1]) * 1024 / 1e6 for line in text.splitlines() if line.startswith("Pss:")), 0.0
    )


def median_of(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g}, n={len(values)})"


def interval(ratios: Sequence[float], draws: int = 10_000) -> tuple[float, float]:
    """The 95 % percentile bootstrap interval of the median."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(draws))
    return medians[int(0.025 * draws)], medians[int(0.975 * draws)]


# ----------------------------------------------------------------------------------------------------------- the parts


def rounds(engine: str, mb: float) -> None:
    """A call that sends the model and gets one back from every site, and their average, against the local engine."""
    with Party("local", mb) as local, Party(engine, mb) as party:
        both = {"local": local, engine: party}
        tiny: dict[str, list[float]] = {name: [] for name in both}
        found: dict[str, list[dict[str, float]]] = {name: [] for name in both}
        for _ in range(7):
            for name, one in both.items():
                tiny[name].append(one.do("ping")["seconds"])
        repeats = 2 if mb >= LARGE else 6
        for _ in range(repeats):
            for name, one in both.items():
                found[name].append(one.watched("round"))
        empty = party.held()
    print(f"start-up, s: local {local.startup:.3g}, {engine} {party.startup:.3g}")
    for name in both:
        print(f"{name}: tiny question to all sites, s: {median_of(tiny[name])}")
    warm = 0 if mb >= LARGE else 1
    seconds = {name: [one["seconds"] for one in found[name][warm:]] for name in both}
    for name in both:
        print(f"{name}: round, s: {median_of(seconds[name])}; first {found[name][0]['seconds']:.3g}")
        server, site = (max(one[key] for one in found[name]) for key in ("server", "site"))
        print(f"{name}: our peak in float32 models: server {server:.2f}, site {site:.2f}")
    pairs = [ours / local for ours, local in zip(seconds[engine], seconds["local"], strict=True)]
    print(f"{engine}: round over local: {median_of(pairs)}")
    for what in ("server", "site", "all"):
        peak = max(one.get(f"pss {what}", 0.0) for one in found[engine])
        print(
            f"{engine}: its own processes, PSS, MB: {what}: peak {peak:.0f}, after {empty.get(what, 0.0):.0f}"
        )


def startup(engine: str, repeats: int = 3) -> None:
    """From kits that exist to the first answer of all four sites."""
    found: dict[str, list[float]] = {"local": [], engine: []}
    for _ in range(repeats):
        for name in found:
            with Party(name, 1) as party:
                found[name].append(party.startup)
    for name, values in found.items():
        print(f"{name}: start-up to the first answer of all sites, s: {median_of(values)}")


def share(engines: Sequence[str]) -> None:
    """ConDistFL on the demo's data, four rounds of real training on every engine, the first of which warms up."""
    from fedatlas.federation.across import gather_trial
    from fedatlas.federation.file import load_federation
    from fedatlas.federation.session import gather_local, run_federation

    changes = ["rounds=4", "engine.workers=4", "evaluation.every=1000", "evaluation.overlays=false"]
    changes += ["evaluation.models=[last]", "evaluation.metrics=[dice]"]
    changes += ["method.name=condistfl", "local.steps=25", "local.batch=16", "net.filters=[16, 32, 64, 128]"]
    federation = load_federation(ROOT / "experiments" / "quickstart.yaml", changes)
    trained: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="fedatlas-bench-") as folder:
        for name in ("local", *engines):
            path = Path(folder) / "runs" / name
            gather: Any = gather_local if name == "local" else gather_trial(name)
            run_federation(federation, path, gather=gather, tell=lambda text: None)
            logs = [json.loads(file.read_text()) for file in sorted(path.glob("rounds/*/log.json"))]
            logs = [log for log in logs if log["round"] >= 2]
            trained[name] = [log["phases"]["round"] for log in logs]
            print(f"{name}: a round of training, s: {median_of(trained[name])}", flush=True)
            # what a site tells of its own call begins when it has the question, and ends before the answer is encoded
            slowest = [max(cost["seconds"] for cost in log["cost"].values()) for log in logs]
            outside = [whole - site for whole, site in zip(trained[name], slowest, strict=True)]
            part = [100 * one / whole for one, whole in zip(outside, trained[name], strict=True)]
            print(
                f"{name}: of it outside the slowest site, s: {median_of(outside)}; %: {median_of(part)}",
                flush=True,
            )
    for name in engines:
        with Party(name, 1) as party:
            tiny = statistics.median(party.do("ping")["seconds"] for _ in range(7))
        whole = statistics.median(trained[name])
        print(f"{name}: tiny question {tiny:.3g} s, of a round of training {tiny / whole:.2%}")


def echo(engine: str, mb: float) -> None:
    """Opaque bytes to four sites and others back: through our adapter, and by a bare application, in turn."""
    pairs = 2 if mb >= LARGE else 7
    with Party(engine, mb) as ours, Party(f"bare-{engine}", mb) as bare:
        both = {"ours": ours, "bare": bare}
        tiny = {name: [one.do("ping")["seconds"] for _ in range(5)] for name, one in both.items()}
        found: dict[str, list[dict[str, float]]] = {"ours": [], "bare": []}
        for number in range(pairs + 1):
            for name in ("ours", "bare") if number % 2 else ("bare", "ours"):
                found[name].append(both[name].watched("raw"))
    for name in both:
        print(f"{engine}, {name}: tiny question, s: {median_of(tiny[name])}")
        seconds = [one["seconds"] for one in found[name][1:]]
        print(f"{engine}, {name}: {mb:g} MB to four sites and back, s: {median_of(seconds)}")
        peak = max(one.get("pss all", 0.0) for one in found[name])
        print(f"{engine}, {name}: all processes of the engine, PSS, MB: {peak:.0f}")
    ratios = [a["seconds"] / b["seconds"] for a, b in zip(found["ours"][1:], found["bare"][1:], strict=True)]
    low, high = interval(ratios)
    print(
        f"{engine}: ours over bare, {mb:g} MB: {statistics.median(ratios):.3f} [{low:.3f}, {high:.3f}], n={pairs}"
    )


PARTS: dict[str, Callable[..., None]] = {"rounds": rounds, "startup": startup, "share": share, "echo": echo}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks engines", description=__doc__)
    parser.add_argument("--part", choices=PARTS, action="append", help="default: all")
    parser.add_argument("--engine", choices=ENGINES, action="append", help="default: both")
    parser.add_argument("--mb", type=float, nargs="+", default=[40.0], help="sizes of the model, 10**6 bytes")
    chosen = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was started is ended on the way out
    engines = [name for name in chosen.engine or ENGINES if find_spec(PACKAGES[name])]
    for name in set(chosen.engine or ENGINES) - set(engines):
        print(f'{name} is not installed, and left out: pip install "fedatlas[{name}]"')
    print(
        f"{time.strftime('%Y-%m-%d %H:%M')} UTC{-time.timezone // 3600:+d}, {os.cpu_count()} cores, load {os.getloadavg()}"
    )
    for part in chosen.part or PARTS:
        if part == "share":
            print("-- share", flush=True)
            share(engines)
            continue
        for engine in engines:
            for mb in chosen.mb if part != "startup" else (None,):
                print(f"-- {part}, {engine}" + (f", {mb:g} MB" if mb else ""), flush=True)
                PARTS[part](*((engine, mb) if mb else (engine,)))
    print(f"load at the end {os.getloadavg()}")


if __name__ == "__main__":
    main()
