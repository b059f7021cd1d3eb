"""Reading training batches from the cache against preprocessing every case whenever a patch of it is needed."""

import tempfile
import time
from pathlib import Path

from benchmarks.timing import alternate, show
from fedatlas.data.transforms import load_scan
from fedatlas.federation.design import Experiment
from fedatlas.federation.file import load_federation

ROOT = Path(__file__).parents[1]


def main() -> dict[str, float]:
    federation = load_federation(ROOT / "experiments" / "quickstart.yaml")
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        experiment = Experiment(federation, Path(folder))
        experiment.prepare()
        fill = time.perf_counter() - began
        began = time.perf_counter()
        experiment = Experiment(federation, Path(folder))
        experiment.prepare()
        again = time.perf_counter() - began
        source = experiment.sources["a"]
        files = [list(item.case.images) for item in source.items["train"]]
        count = 0

        def cached() -> None:
            nonlocal count
            count += 1
            for _ in source.batches(("benchmark", count), batch=16, steps=1):
                pass

        def uncached() -> None:
            for place in range(16):
                load_scan(files[place % len(files)], federation.preprocessing, experiment.space)

        found = alternate({"cached": cached, "uncached": uncached}, 5)
    return {
        "filling the cache, seconds": fill,
        "opening a full cache, seconds": again,
        "a batch of 16 slices from the cache, ms": 1000 * found["cached"],
        "the same without a cache, ms": 1000 * found["uncached"],
        "times faster with the cache": found["uncached"] / found["cached"],
    }


if __name__ == "__main__":
    show(main())
