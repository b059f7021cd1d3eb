"""The server's peak memory for one round of FedAvg at 4 and at 64 sites, in float32 models.

The sites are played by one prepared reply on disk, so the process holds what a server holds.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.timing import show
from fedatlas.core.contract import State, at_site
from fedatlas.core.seeds import generator
from fedatlas.core.tensors import average
from fedatlas.transport.clients import SiteClients
from fedatlas.transport.egress import Declaration
from fedatlas.transport.frames import Question
from fedatlas.transport.host import peak_mb, reset_peak
from fedatlas.transport.local import InProcess
from fedatlas.transport.pipeline import ServerPipeline
from fedatlas.transport.reply import Answer, CallId

MODEL_MB = 64


@at_site
def update() -> None:
    """Named in the call; the replies are prepared."""


def one_round(sites: int) -> dict[str, float]:
    rng = generator("model")
    model = {f"layer {i}": torch.randn(1024, 1024, generator=rng) for i in range(MODEL_MB // 4)}
    with tempfile.TemporaryDirectory() as folder:
        names = [f"site-{i:02d}" for i in range(sites)]
        ready = {name: Path(folder) / f"{name}.ready" for name in names}
        for name, path in ready.items():
            answer = Answer({"model": model, "n": 3}, {}, {"seconds": 0.0, "peak_mb": 0.0})
            path.write_bytes(answer.encoded(CallId(name, "update", 0, 0), "", ""))

        def serve(question: Question) -> None:
            os.rename(ready[question.site], question.reply)

        forms = {name: (str(v.dtype).removeprefix("torch."), tuple(v.shape)) for name, v in model.items()}
        declaration = Declaration({"update": {"model": "model", "n": "cases"}}, forms=lambda net: forms)
        pipeline = ServerPipeline(declaration=declaration)
        clients = SiteClients(names, InProcess(serve), Path(folder) / "scratch", pipeline=pipeline)
        state = State(model)
        del model
        reset_peak()
        before = peak_mb()
        replies = clients.call(update, model=state.model)
        state = State(average(replies.each("model"), replies.plain("n")))
        return {"models": 1 + (peak_mb() - before) / MODEL_MB}


def main() -> dict[str, float]:
    found = {}
    # glibc keeps freed blocks of a few MiB; with the threshold fixed they go back, and what is left is the need
    for allocator, settings in (
        ("as it is", {}),
        ("returning blocks", {"MALLOC_MMAP_THRESHOLD_": str(2**20)}),
    ):
        peaks = []
        for sites in (4, 64):
            command = [sys.executable, "-m", "benchmarks.server_memory", str(sites)]
            done = subprocess.run(
                command, check=True, capture_output=True, text=True, env=os.environ | settings
            )
            peaks.append(json.loads(done.stdout)["models"])
            found[f"allocator {allocator}, {sites} sites, peak in models"] = peaks[-1]
        found[f"allocator {allocator}, 64 sites over 4"] = peaks[1] / peaks[0]
    return found


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(one_round(int(sys.argv[1]))))
    else:
        show(main())
