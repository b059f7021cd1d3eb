"""The published sizes on a GPU: seconds of a step, peak memory, and what ConDistFL costs over FedAvg.

    python -m benchmarks.gpu                      # everything, on cuda
    python -m benchmarks.gpu --device cpu --small # the same code on small inputs, where there is no GPU

Every net takes its steps in float32, bf16 and fp16, with tensors in the usual and in channels-last order, and through
`torch.compile`. Batches are copied from ordinary and from pinned memory. The paper of ConDistFL reports 1.102
times the hours of FedAvg for its training on CT (MedNeXt, 128^3) and 1.135 for that on radiographs (DeepLabV3+). Last, one
real run of the head and neck federation, if its data are given (`--data DIR`), twice: do its bits repeat?

Without a GPU it says so and ends with 2.
"""

import argparse
import hashlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from fedatlas import losses, methods, nets
from fedatlas.core.batch import Batch
from fedatlas.core.labels import LabelSpace, SiteLabels
from fedatlas.core.seeds import generator
from fedatlas.core.tensors import load, tensors_of
from fedatlas.learning.loop import Local, Loss, Stepper

Shape = tuple[int, ...]
NETS: dict[str, tuple[str, dict[str, Any], Shape]] = {
    "MedNeXt-S, 2 x 128^3": ("mednext", {"size": "S"}, (2, 1, 128, 128, 128)),
    "MedNeXt-B, 2 x 128^3": ("mednext", {"size": "B"}, (2, 1, 128, 128, 128)),
    "U-Net 32-512, 2 x 128^3": ("unet", {"filters": [32, 64, 128, 256, 512]}, (2, 1, 128, 128, 128)),
    "UFPS's U-Net, 4 x 256^2": ("ufps_unet", {}, (4, 1, 256, 256)),
    "DeepLabV3+ on ConvNeXt V2, 8 x 256^2": ("deeplabv3plus", {}, (8, 1, 256, 256)),
    "MENU-Net, 2 x 96 x 96 x 32": ("menunet", {}, (2, 1, 96, 96, 32)),
}
"""name -> net, options, shape of a batch. DenseNet-121 stands apart: its labels are of whole images."""
IMAGES = ("DenseNet-121, 32 x 224^2", "densenet121", (32, 1, 224, 224))
CLASSES, ANNOTATED = 8, (1, 2)
WAYS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
    "bf16, channels last": {"precision": "bf16", "last": True},
    "bf16, compiled": {"precision": "bf16", "compiled": True},
}


def smaller(shape: Shape) -> Shape:
    """A shape that a processor takes in a moment."""
    return (2, *shape[1:2], *(32 for _ in shape[2:]))


def batch_of(shape: Shape, device: torch.device, whole: bool) -> tuple[Batch, LabelSpace]:
    rng = generator("gpu", *shape)
    names = tuple(f"class {c}" for c in range(CLASSES))
    space = (
        LabelSpace(names, exclusive=False, level="image") if whole else LabelSpace(("background", *names[1:]))
    )
    known = torch.tensor([[c == 0 or c in ANNOTATED for c in range(CLASSES)]]).repeat(shape[0], 1)
    target = (
        torch.randint(0, 2, (shape[0], CLASSES), generator=rng).float()
        if whole
        else torch.randint(0, 1 + len(ANNOTATED), (shape[0], *shape[2:]), generator=rng)
    )
    return Batch(torch.rand(shape, generator=rng), target, known, [""] * shape[0]).to(device), space


def seconds_of(step: Callable[[], object], device: torch.device, repeats: int) -> float:
    """The median of a step, after three to warm up."""
    taken = []
    for number in range(3 + repeats):
        _wait(device)
        began = time.perf_counter()
        step()
        _wait(device)
        if number >= 3:
            taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def steps(
    name: str,
    kind: str,
    options: dict[str, Any],
    shape: Shape,
    device: torch.device,
    repeats: int,
    ways: Sequence[str],
) -> None:
    """Prints one line per way, and what ConDistFL's step takes beside FedAvg's."""
    whole = kind == IMAGES[1]
    for way in ways:
        how = WAYS[way]
        if how.get("precision") == "fp16" and device.type != "cuda":
            continue
        try:
            print(
                f"{name}; {way}: {_measured(kind, options, shape, device, repeats, whole, **how)}", flush=True
            )
        except (torch.cuda.OutOfMemoryError, RuntimeError) as error:
            print(f"{name}; {way}: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)


def _measured(
    kind: str,
    options: dict[str, Any],
    shape: Shape,
    device: torch.device,
    repeats: int,
    whole: bool,
    *,
    precision: str = "float32",
    last: bool = False,
    compiled: bool = False,
) -> str:
    data, space = batch_of(shape, device, whole)
    layout = torch.preserve_format
    if last:
        layout = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
        data = replace(data, image=data.image.contiguous(memory_format=layout))

    def made() -> nn.Module:
        net = nets.build(
            kind, options, in_channels=shape[1], classes=CLASSES, spatial_dims=len(shape) - 2, seed=0
        )
        return net.to(device, memory_format=layout)

    local = Local(optimizer="adamw", lr=1e-4, precision=precision)  # type: ignore[call-arg,arg-type]
    here = SimpleNamespace(
        labels=SiteLabels(space, frozenset(ANNOTATED)),
        n_labelled=torch.ones(CLASSES, dtype=torch.int64),
        n_positive=torch.ones(CLASSES, dtype=torch.int64),
    )
    choice = losses.LossChoice() if not whole else losses.LossChoice(name="masked_bce")  # type: ignore[call-arg]
    student = made()
    plain = losses.supervised(choice, here)  # type: ignore[arg-type]
    by = Stepper(student, local, device)
    called: Any = torch.compile(student) if compiled else student

    def step(loss: Loss) -> None:
        with by.autocast():
            value = loss(called, data)
        by.step(value)

    _reset(device)
    fedavg = seconds_of(lambda: step(plain), device, repeats)
    found = f"{fedavg:.4f} s, {_peak(device)}"
    if whole or kind not in ("unet", "mednext", "deeplabv3plus"):
        return found
    teacher = made().eval().requires_grad_(False)
    load(teacher, tensors_of(student))
    objective = methods.get("condistfl")().L_total(
        torch.compile(teacher) if compiled else teacher, 1.0, space
    )
    _reset(device)
    condist = seconds_of(lambda: step(objective), device, repeats)
    return f"{found}; ConDistFL {condist:.4f} s, {_peak(device)}, {condist / fedavg:.3f} of FedAvg"


def _reset(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _peak(device: torch.device) -> str:
    if device.type != "cuda":
        return "memory not measured"
    return f"{torch.cuda.max_memory_allocated(device) / 1e9:.1f} GB"


def copies(shape: Shape, device: torch.device) -> None:
    """A batch from ordinary and from pinned memory."""
    plain = torch.rand(shape)
    ways = {"ordinary": plain}
    if device.type == "cuda":
        ways["pinned"] = plain.pin_memory()
    for way, tensor in ways.items():
        found = seconds_of(lambda tensor=tensor: tensor.to(device, non_blocking=True), device, 20)
        print(f"a batch {'x'.join(map(str, shape))} from {way} memory: {found * 1000:.3f} ms", flush=True)


def real_run(data: Path, device: str) -> None:
    """Two runs of the head and neck federation with one seed, and whether their models are equal bit for bit."""
    experiments = Path(__file__).parents[1] / "experiments" / "head-neck"
    digests = []
    with tempfile.TemporaryDirectory() as folder:
        for number in (1, 2):
            began = time.perf_counter()
            changes = [f"engine.device={device}", "engine.workers=0", "rounds=4", "local.precision=bf16"]
            changes += ["method.name=condistfl", "evaluation.metrics=[dice]"]
            changes += [f"sites.{site}.path={data / f'site-{site}'}" for site in "abcd"]
            command = [
                sys.executable,
                "-m",
                "fedatlas",
                "run",
                str(experiments / "common.yaml"),
                "--runs",
                folder,
            ]
            command += ["--id", f"run-{number}", *(part for change in changes for part in ("-o", change))]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            model = Path(folder) / f"run-{number}" / "models" / "last.fa"
            file = model if model.exists() else model.with_name("best.fa")
            digests.append(hashlib.sha256(file.read_bytes()).hexdigest())
            print(
                f"head and neck, 4 rounds of 20 steps at 4 sites: {time.perf_counter() - began:.1f} s",
                flush=True,
            )
    print(f"two runs with one seed give {'equal' if digests[0] == digests[1] else 'different'} models")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="small inputs")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--ways", default=";".join(WAYS), help=f"some of: {'; '.join(WAYS)}")
    parser.add_argument(
        "--nets", default="", help="only nets whose name has one of these words in it, parted by ;"
    )
    parser.add_argument("--data", type=Path, help="the folder of head and neck CT, with site-a to site-d")
    given = parser.parse_args()
    ways = [way.strip() for way in given.ways.split(";")]
    if not set(ways) <= set(WAYS):
        parser.error(f"--ways {given.ways}: some of {'; '.join(WAYS)} are expected, parted by ;")
    words = [word.strip() for word in given.nets.split(";") if word.strip()]
    named = [*NETS.items(), (IMAGES[0], (IMAGES[1], {}, IMAGES[2]))]
    for word in words:
        if not any(word in name for name, _ in named):
            parser.error(f"--nets {given.nets}: {word!r} is in no name of {'; '.join(n for n, _ in named)}")
    if given.device.startswith("cuda") and not torch.cuda.is_available():
        print("no GPU that torch can use is here; --device cpu --small runs the same code on a processor")
        return 2
    device = torch.device(given.device)
    if device.type == "cuda":
        print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}")
    for name, (kind, options, shape) in named:
        if not words or any(word in name for word in words):
            size = smaller(shape) if given.small else shape
            steps(name, kind, options, size, device, given.repeats, ways)
    copies((2, 1, 32, 32, 32) if given.small else (2, 1, 128, 128, 128), device)
    if given.data:
        real_run(given.data, given.device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
