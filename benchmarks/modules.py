"""What each module of UFPS costs at a site, over FedAvg on the same pseudo labels, in one run.

rounds: calls of a site's part of a round, a few steps each, with one module at a time and with all of them, over the same
with none (FedAvg*: pseudo labels and plain steps); FedAvg without pseudo labels beside it. "follow" is a round of sUSAM in
which masks and momentum follow the batches, one in `every`; "stay" is any other. steps: a step alone, by what its ascent
sees and how it is masked, over a plain step. teachers: a round of FedAvg* with all teachers held over one at a time. server:
the masks' part over the average of the models. messages: bytes. memory: each in a process of its own, beyond what it held
before its site was made; freed blocks go back, so that the peak is the need.

The site holds its batches ready, random ones: what a module does depends little on what is shown. It annotates the first
organ, every other teacher another. Times are taken and shown as in `benchmarks.experts`.

A larger case: `--patch 160 160 --width 16 --batch 8 --device cuda`.
"""

import argparse
import gc
import multiprocessing
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.experts import clock_of, in_turn, ratio
from benchmarks.timing import show
from fedatlas import losses, methods, nets
from fedatlas.core.batch import Batch
from fedatlas.core.labels import LabelSpace, SiteLabels
from fedatlas.core.options import from_dict
from fedatlas.core.seeds import generator
from fedatlas.core.tensors import Tensors, average, load, tensors_of
from fedatlas.learning.loop import Local, Stepper
from fedatlas.losses import LossChoice
from fedatlas.methods.shared.cmidg import CMIDG, cmidg
from fedatlas.methods.shared.sharpness import (
    Masks,
    Sharp,
    Sharpness,
    SparseMask,
    Sparsity,
    disagreement,
    pack_bits,
    unpack_bits,
)
from fedatlas.methods.shared.teachers import MEMORY
from fedatlas.methods.ufps import BANK, MASKS
from fedatlas.transport.host import peak_mb, reset_peak
from fedatlas.transport.wire import encode

LOSS = {"name": "dice_bce"}
LOCAL = {"lr": 1e-4, "weight_decay": 1e-6, "eps": 1e-5, "clip": 12, "schedule": "constant"}
OFF: dict[str, Any] = {"ws": None, "rce": None, "gmt": None, "ua": None, "sam": None}
ON: dict[str, Any] = {
    "ws": {"start": 0, "end": 0.9},
    "rce": {"start": 0},
    "gmt": {"start": 0},
    "ua": {"start": 0},
    "sam": {"start": 0},
}
STAY, FOLLOW, ROUNDS = 6, 5, 10
"""Rounds, counted from 0, in which the masks of sUSAM stay as they are, and in which they follow the batches."""
BASE = "FedAvg*"
MODULES: dict[str, tuple[dict[str, Any], int]] = {
    BASE: ({}, STAY),
    "WS": ({"ws": ON["ws"]}, STAY),
    "aRCE": ({"rce": ON["rce"]}, STAY),
    "GMT": ({"gmt": ON["gmt"]}, STAY),
    "UA": ({"ua": ON["ua"]}, STAY),
    "CMIDG": ({"sam": {"start": 0, "ascent": "none", "descent": "cmidg"}}, STAY),
    "ASAM": ({"sam": {"start": 0, "ascent": "original", "masks": "none"}}, STAY),
    "USAM": ({"sam": {"start": 0, "masks": "none"}}, STAY),
    "sUSAM, masks stay": ({"sam": ON["sam"]}, STAY),
    "sUSAM, masks follow": ({"sam": ON["sam"]}, FOLLOW),
    "UFPS, masks stay": (ON, STAY),
    "UFPS, masks follow": (ON, FOLLOW),
}


@dataclass(frozen=True)
class Case:
    """width: channels of the net's first level. steps: of a round."""

    width: int
    batch: int
    patch: tuple[int, ...]
    levels: int
    steps: int = 4

    def __str__(self) -> str:
        return f"{len(self.patch)}D, width {self.width}, {self.batch} x {'x'.join(map(str, self.patch))}"

    def make_net(self, classes: int) -> nn.Module:
        options = {"width": self.width, "levels": self.levels}
        dims = len(self.patch)
        return nets.build("ufps_unet", options, in_channels=1, classes=classes, spatial_dims=dims, seed=0)


CASES = {"2D": Case(8, 4, (96, 96), 6), "3D": Case(4, 2, (48, 48, 16), 5)}


@dataclass
class BenchSite:
    """A `method.Site` whose batches are ready."""

    case: Case
    labels: SiteLabels
    ready: list[Batch]
    device: torch.device
    name: str = "site 1"
    n_train: int = 10
    memory: dict[str, Any] = field(default_factory=dict)
    n_labelled: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    n_positive: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    rng: torch.Generator = field(default_factory=lambda: generator("site"))

    def network(self, model: Tensors | None = None, name: str = "main") -> nn.Module:
        net = self.case.make_net(len(self.labels.space))
        if model is not None:
            load(net, model)
        return net.to(self.device).train()

    def batches(self, *, batch: int, steps: int | None = None, epochs: float | None = None) -> list[Batch]:
        return self.ready

    def log(self, **numbers: float) -> None:
        pass


def made(case: Case, teachers: int, device: torch.device) -> tuple[BenchSite, Tensors]:
    """A site with `teachers` teachers, its own included, one organ each; and the global model."""
    classes, rng = teachers + 1, generator("benchmark")
    space = LabelSpace(("background", *(f"organ {m}" for m in range(1, classes))))
    known = torch.tensor([[c < 2 for c in range(classes)]]).repeat(case.batch, 1)
    ready = []
    for _ in range(case.steps):
        image = torch.rand(case.batch, 1, *case.patch, generator=rng)
        target = torch.randint(0, 2, (case.batch, *case.patch), generator=rng)
        ready.append(Batch(image, target, known, [""] * case.batch).to(device))
    site = BenchSite(case, SiteLabels(space, frozenset({1})), ready, device)
    model = tensors_of(site.network())
    kept = {}
    for m in range(1, classes):
        moved = {k: v + 0.02 * torch.randn(v.shape, generator=rng).to(v) for k, v in model.items()}
        kept[f"site {m}"] = {"model": moved, "classes": [m]}
    site.memory = {MEMORY: kept, BANK: torch.rand(100, generator=rng)}
    return site, model


def half(like: Mapping[str, Tensor], number: int) -> Masks:
    """A random mask of half of all positions."""
    rng = generator("mask", number)
    return {name: torch.rand(value.shape, generator=rng) < 0.5 for name, value in like.items()}


def a_round(
    name: str, case: Case, teachers: int, device: torch.device, resident: str = "one"
) -> tuple[Callable[[], Any], BenchSite]:
    """A call of a site's part of a round, with memory of its own. name: one of MODULES, or fedavg."""
    site, model = made(case, teachers, device)
    local = {**LOCAL, "batch": case.batch, "steps": case.steps}
    if name == "fedavg":
        method: Any = from_dict(methods.get(name), {"loss": LOSS, "local": local}, what=name)
        return lambda: method.local_update(site, model=model, round=STAY, rounds=ROUNDS), site
    module, round = MODULES[name]
    given = {"loss": LOSS, "local": local, "teachers": {"resident": resident}, **OFF, **module}
    ufps: Any = from_dict(methods.get("ufps"), given, what=name)
    M_G = pack_bits(half(dict(site.network().named_parameters()), 0))

    def call() -> Any:
        return ufps.local_update(site, model=model, disagree=M_G, round=round, rounds=ROUNDS)

    return call, site


def rounds(
    case: Case, teachers: int, repeats: int, device: torch.device, clock: Callable[[], float]
) -> dict[str, float]:
    """Every module over FedAvg*."""
    things = {name: a_round(name, case, teachers, device)[0] for name in ("fedavg", *MODULES)}
    took = in_turn(things, repeats, clock)
    found = {"FedAvg*: a step, ms": 1000 * statistics.median(took[BASE]) / case.steps}
    for name in things:
        if name != BASE:
            found |= ratio(f"{name} over {BASE}", took[name], took[BASE])
    return found


def steps(
    case: Case, teachers: int, repeats: int, device: torch.device, clock: Callable[[], float]
) -> dict[str, float]:
    """A step with an ascent over a plain one."""
    local: Local = from_dict(Local, {**LOCAL, "batch": case.batch}, what="local")
    site, _ = made(case, teachers, device)
    how, sparse, augmentation = Sharpness(), Sparsity(), CMIDG()  # type: ignore[call-arg]
    batch = replace(site.ready[0], known=torch.ones_like(site.ready[0].known))
    loss = losses.supervised(from_dict(LossChoice, LOSS, what="loss"), site)

    def strong() -> Batch:
        return replace(batch, image=cmidg(batch.image, augmentation, site.rng))

    def plain() -> Callable[[], object]:
        by = Stepper(site.network(), local, device)
        return lambda: by.step(loss(by.net, batch))

    def ascending(
        view: Callable[[], Batch], make: Callable[[nn.Module], SparseMask] | None = None
    ) -> Callable[[], object]:
        by = Stepper(site.network(), local, device)
        sharp, mask = Sharp(by, how), make and make(by.net)

        def step() -> None:
            _, g, eps = sharp.ascend(loss, view())
            sharp.step(loss, batch, eps, mask and mask(g))

        return step

    def masks(net: nn.Module, update: bool) -> SparseMask:
        first = SparseMask(sparse, None, None, update=True, rng=site.rng)
        values = dict(net.named_parameters())
        first({name: torch.randn(p.shape, generator=site.rng).to(p) for name, p in values.items()})
        M_G = {name: mask.to(device) for name, mask in half(values, 0).items()}
        return SparseMask(sparse, first.memory(), M_G, update=update, rng=site.rng)

    things = {
        "plain": plain(),
        "ASAM": ascending(lambda: batch),
        "USAM": ascending(strong),
        "sUSAM, masks stay": ascending(strong, lambda net: masks(net, False)),
        "sUSAM, masks follow": ascending(strong, lambda net: masks(net, True)),
        "CMIDG alone": strong,
    }
    took = in_turn(things, repeats, clock)
    found = {"plain, ms": 1000 * statistics.median(took["plain"])}
    for name in things:
        if name != "plain":
            found |= ratio(f"{name} over plain", took[name], took["plain"])
    for name in ("sUSAM, masks stay", "sUSAM, masks follow"):
        found |= ratio(f"{name} over ASAM", took[name], took["ASAM"])
    return found


def residents(
    case: Case, teachers: int, repeats: int, device: torch.device, clock: Callable[[], float]
) -> dict[str, float]:
    """One teacher at a time over all of them held."""
    found: dict[str, float] = {}
    for name in (BASE, "UFPS, masks stay"):
        things = {r: a_round(name, case, teachers, device, r)[0] for r in ("one", "all")}
        took = in_turn(things, repeats, clock)
        found |= ratio(f"{name}: one resident over all, time", took["one"], took["all"])
    return found


def server(
    case: Case, teachers: int, repeats: int, device: torch.device, clock: Callable[[], float]
) -> dict[str, float]:
    """The global mask over the average of the models, as many sites as teachers."""
    _, model = made(replace(case, steps=1), teachers, torch.device("cpu"))
    sent: list[Any] = [pack_bits(half(model, number)) for number in range(teachers)]

    def M_G() -> object:
        return pack_bits(disagreement(unpack_bits(mask, model) for mask in sent))

    things = {"mean": lambda: average([model] * teachers, [1.0] * teachers), "masks": M_G}
    took = in_turn(things, repeats, clock)
    return ratio("global mask over the average", took["masks"], took["mean"])


def messages(
    case: Case, teachers: int, repeats: int, device: torch.device, clock: Callable[[], float]
) -> dict[str, float]:
    """Bytes of the messages of a round: what sUSAM and UA add to FedAvg's."""
    found: dict[str, float] = {}
    sizes = {}
    for name in (BASE, "sUSAM, masks follow", "UFPS, masks follow"):
        call, site = a_round(name, case, teachers, device)
        sizes[name] = len(encode(call()))
        if name.startswith("sUSAM"):
            weights = sum(p.numel() for p in site.network().parameters())
            found["parameters"] = weights
            kept = site.memory[MASKS]
            found["kept at the site over the model"] = len(encode(kept)) / sizes[BASE]
            M_G: Any = pack_bits(half(dict(site.network().named_parameters()), 0))
            found["global mask to a site over the model"] = len(encode(M_G)) / sizes[BASE]
    found["FedAvg*: an answer, bytes"] = sizes[BASE]
    for name, size in sizes.items():
        if name != BASE:
            found[f"{name}: added to an answer over the model"] = size / sizes[BASE] - 1
    return found


def peak_of(name: str, case: Case, teachers: int, device: torch.device, resident: str) -> float:
    """MiB at the peak of a round, beyond what there was before its site: net, teachers, moments, batches, maps."""
    cuda = device.type == "cuda"

    def reset() -> None:
        gc.collect()
        torch.cuda.reset_peak_memory_stats(device) if cuda else reset_peak()

    def peak() -> float:
        return torch.cuda.max_memory_allocated(device) / 2**20 if cuda else peak_mb()

    # what libraries load at the first round is not the site's
    tiny = replace(case, width=1, batch=2, patch=(32,) * len(case.patch), steps=1)
    a_round(name, tiny, teachers, device, resident)[0]()
    reset()
    before = peak()
    call, _ = a_round(name, case, teachers, device, resident)
    call()
    reset()
    call()
    return peak() - before


def memory(case: Case, counts: Sequence[int], device: torch.device, threads: int) -> dict[str, float]:
    """`peak_of` each, in a process of its own."""
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**16)  # of the processes: freed blocks go back to the system
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.modules"])
    found: dict[str, float] = {}
    with context.Pool(1, torch.set_num_threads, (threads,), maxtasksperchild=1) as pool:
        for count in counts:
            asked = [(BASE, "one"), (BASE, "all")]
            if count == counts[0]:
                asked += [("fedavg", "one"), *((name, "one") for name in MODULES if name != BASE)]
            for name, resident in asked:
                text = f"{name}, {resident} of {count} teachers held, MiB"
                found[text] = pool.apply(peak_of, (name, case, count, device, resident))
    return found


PARTS: dict[str, Callable[..., dict[str, float]]] = {
    "rounds": rounds,
    "steps": steps,
    "teachers": residents,
    "server": server,
    "messages": messages,
    "memory": memory,
}


def main(arguments: Sequence[str] = ()) -> dict[str, float]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks modules", description=__doc__)
    parser.add_argument("--case", choices=list(CASES), action="append", help="all of them by default")
    parser.add_argument("--part", choices=list(PARTS), action="append", help="all of them by default")
    parser.add_argument("--teachers", type=int, nargs="+", default=[3, 8])
    parser.add_argument("--patch", type=int, nargs="+", help="in place of a case's: two axes or three")
    parser.add_argument("--width", type=int)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="two small nets, once; tells only that it runs")
    args = parser.parse_args(arguments)
    device = torch.device(args.device)
    torch.set_num_threads(args.threads)
    clock, found = clock_of(device, args.threads), {}
    for name in args.case or ([f"{len(args.patch)}D"] if args.patch else CASES):
        case, counts, repeats = CASES[name], args.teachers, args.repeats
        patch = tuple(args.patch or case.patch)
        case = replace(case, width=args.width or case.width, batch=args.batch or case.batch, patch=patch)
        if args.quick:
            case, counts, repeats = Case(1, 2, (32,) * len(case.patch), 3, steps=1), [2], 1
        for part in args.part or PARTS:
            if part == "memory":
                numbers = memory(case, counts, device, args.threads)
            else:
                numbers = {}
                for count in counts if part == "teachers" else counts[:1]:
                    told = PARTS[part](case, count, repeats, device, clock)
                    numbers |= {f"{count} teachers: {text}": value for text, value in told.items()}
            found |= {f"{case}: {part}: {text}": value for text, value in numbers.items()}
    return found


if __name__ == "__main__":
    show(main(sys.argv[1:]))
