"""The same training without FedAtlas's engine: a plain loop of torch, for `benchmarks.demo` to compare with.

    python -m benchmarks.bare_training FEDERATION.yaml SITE STEPS CACHE [key=value …]

Net, loss, optimizer and batches are those of the federation file; the loop is torch's own, and the allocator is left as
it is. The batches of a few steps are made before the loop and taken again and again, so nothing is read in it. Prints one JSON
object: seconds of the loop and of its process.
"""

import json
import resource
import sys
import time
from pathlib import Path

import torch

from fedatlas import losses
from fedatlas.federation.design import Experiment
from fedatlas.federation.file import load_federation

PREPARED = 8
"""Batches that are made before the loop."""


def main(file: str, name: str, steps: int, cache: str, changes: list[str]) -> dict[str, float]:
    federation = load_federation(Path(file), changes)
    experiment = Experiment(federation, Path(cache), sites=[name])
    experiment.prepare()
    torch.set_num_threads(federation.threads_per_site)
    local, site = federation.local, experiment.training[name]
    made = site.batches(("bare",), batch=local.batch, steps=PREPARED, epochs=None, device=torch.device("cpu"))
    batches = list(made)
    net = experiment.make_net().train()
    optimizer = (
        torch.optim.SGD(
            net.parameters(),
            lr=local.lr,
            momentum=local.momentum,
            nesterov=local.nesterov,
            weight_decay=local.weight_decay,
        )
        if local.optimizer == "sgd"
        else torch.optim.Adam(net.parameters(), lr=local.lr, weight_decay=local.weight_decay)
    )
    loss = losses.supervised(experiment.method.loss, site)  # type: ignore[attr-defined,arg-type]
    before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    for step in range(steps):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=local.precision == "bf16"):
            value = loss(net, batches[step % PREPARED])
        optimizer.zero_grad(set_to_none=True)
        value.backward()
        optimizer.step()
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
    return {
        "wall": wall,
        "user": after.ru_utime - before.ru_utime,
        "system": after.ru_stime - before.ru_stime,
        "faults": after.ru_minflt - before.ru_minflt,
        "peak_mb": after.ru_maxrss / 1024,
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4], sys.argv[5:])))
