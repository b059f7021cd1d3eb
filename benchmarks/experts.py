"""MENU-Net's time and memory against the number of organs, sub-encoders one by one and grouped, beside a U-Net.

A site that annotates the first organ takes a step of Fed-MENU with and without its auxiliary decoder (S1 + S2, S1), and
a net is asked for its logits (inference). The U-Net is MENU-Net's own with one sub-encoder for all organs and without
AGD, of the width that brings its number of parameters nearest; it takes one plain step on the loss of S1.

Everything of a case is measured in turn, each turn in an order of its own, which is drawn. Ratios are taken within a
turn; shown are their median, least and largest. On a processor times are processor time of one thread, so that other work changes
little; with more threads, and on a GPU, they are those of the clock. The memory of each net is that of a process of
its own, beyond what it held before the net was built; freed blocks go back, so that the peak is the need.

A larger case: `--patch 128 128 64 --width 16 --batch 2 --organs 4 13 --device cuda`.
"""

import argparse
import gc
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn

from benchmarks.timing import show
from fedatlas import losses, methods, nets
from fedatlas.core.batch import Batch
from fedatlas.core.labels import LabelSpace, SiteLabels
from fedatlas.core.seeds import generator
from fedatlas.learning.loop import Local, Stepper, make_optimizer
from fedatlas.methods.fedmenu import auxiliary_loss
from fedatlas.nets.menunet import MENUNet, MENUNetModule
from fedatlas.transport.host import peak_mb, reset_peak

ORGANS = (1, 2, 4, 8, 13)
FORMS = {"one by one": False, "grouped": True}
UNET = "U-Net"
WORK = ("inference", "S1", "S1 + S2")


@dataclass(frozen=True)
class Case:
    """width: channels of the first level of one sub-encoder."""

    width: int
    batch: int
    patch: tuple[int, ...]

    def __str__(self) -> str:
        return f"{len(self.patch)}D, width {self.width}, {self.batch} x {'x'.join(map(str, self.patch))}"


CASES = {"2D": Case(8, 4, (96, 96)), "3D": Case(4, 2, (48, 48, 16))}


@dataclass
class Made:
    """A net and a batch of a site that annotates the first organ."""

    net: MENUNetModule
    data: Batch
    work: dict[str, Callable[[], object]]


def unet_options(organs: int, width: int, dims: int) -> dict[str, Any]:
    """Of the U-Net whose number of parameters is the nearest to MENU-Net's with its AGD."""
    plain: dict[str, Any] = {"groups": (tuple(range(1, organs + 1)),), "agd": False}

    def size(**options: Any) -> int:
        with torch.device("meta"):
            net = MENUNet(**options).build(in_channels=1, classes=organs + 1, spatial_dims=dims)
        return parameters(net)

    goal, below = size(width=width), width
    while size(width=below + 1, **plain) <= goal:
        below += 1
    near = min((below, below + 1), key=lambda w: abs(size(width=w, **plain) - goal))
    return plain | {"width": near}


def parameters(net: nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())


def made(case: Case, organs: int, device: torch.device, *, unet: bool = False) -> Made:
    """What is measured of one net; `grouped` of the net may be changed between calls."""
    dims, classes, rng = len(case.patch), organs + 1, generator("benchmark")
    options = unet_options(organs, case.width, dims) if unet else {"width": case.width}
    built = nets.build("menunet", options, in_channels=1, classes=classes, spatial_dims=dims, seed=0)
    net = cast(MENUNetModule, built.to(device).train())
    known = torch.tensor([[c < 2 for c in range(classes)]]).repeat(case.batch, 1)
    image = torch.rand(case.batch, 1, *case.patch, generator=rng)
    target = torch.randint(0, 2, (case.batch, *case.patch), generator=rng)
    data = Batch(image, target, known, [""] * case.batch).to(device)
    space = LabelSpace(("background", *(f"organ {m}" for m in range(organs))))
    site: Any = SimpleNamespace(labels=SiteLabels(space, frozenset({1})))
    method: Any = methods.get("fedmenu")()
    loss = losses.supervised(method.loss, site)
    local: Any = Local(optimizer="sgd", lr=1e-4, momentum=0.99, nesterov=True, weight_decay=3e-5)  # type: ignore[call-arg]

    def infer() -> Tensor:
        with torch.no_grad():
            return cast(Tensor, net(data.image))

    if unet:
        plain = Stepper(net, local, device)
        return Made(net, data, {"inference": infer, "S1": lambda: plain.step(loss(net, data))})

    def optimizer(*modules: nn.Module) -> torch.optim.Optimizer:
        net.requires_grad_(False)
        for module in modules:
            module.requires_grad_(True)
        return make_optimizer(net, local)

    own = net.encoders[0]
    first, second = optimizer(own, net.decoder, net.head), optimizer(own, net.agd)
    for module in (own, net.decoder, net.head, net.agd):
        module.requires_grad_(True)
    S1, S2 = (Stepper(net, local, device, optimizer=each) for each in (first, second))

    def both() -> None:
        S1.step(loss(net, data))
        S2.step(auxiliary_loss(net(data.image, experts=[0]), data.target, data.known, [net.organs[0]]))

    work = {"inference": infer, "S1": lambda: S1.step(loss(net, data)), "S1 + S2": both}
    return Made(net, data, work)


def in_form(net: MENUNetModule, grouped: bool, thing: Callable[[], object]) -> Callable[[], object]:
    """The same with the sub-encoders in one of the two forms."""

    def run() -> object:
        net.grouped = grouped
        return thing()

    return run


def check_equal(it: Made, what: str) -> None:
    """Both forms give the same logits, and a foreign sub-encoder's maps have no graph."""
    one, grouped = (in_form(it.net, form, it.work["inference"])() for form in FORMS.values())
    assert isinstance(one, Tensor) and isinstance(grouped, Tensor)
    torch.testing.assert_close(grouped, one, rtol=1e-3, atol=1e-4, msg=lambda text: f"{what}: {text}")
    assert not any(maps.requires_grad for encoder in it.net.encoders[1:] for maps in encoder(it.data.image))


def in_turn(
    things: Mapping[str, Callable[[], object]], repeats: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """The seconds of each, turn by turn, every turn in an order of its own. Each is called once before, to warm up."""
    for thing in things.values():
        thing()
    seconds: dict[str, list[float]] = {name: [] for name in things}
    for turn in range(repeats):
        for place in torch.randperm(len(things), generator=generator("turn", turn)).tolist():
            name, thing = list(things.items())[place]
            began = clock()
            thing()
            seconds[name].append(clock() - began)
    return seconds


def clock_of(device: torch.device, threads: int) -> Callable[[], float]:
    if device.type == "cuda":

        def waited() -> float:
            torch.cuda.synchronize()
            return time.perf_counter()

        return waited
    return time.process_time if threads == 1 else time.perf_counter


def ratio(name: str, above: Sequence[float], below: Sequence[float]) -> dict[str, float]:
    each = sorted(a / b for a, b in zip(above, below, strict=True))
    return {name: statistics.median(each), f"{name}, least": each[0], f"{name}, largest": each[-1]}


def whole(
    case: Case, organs: Sequence[int], repeats: int, device: torch.device, clock: Callable[[], float]
) -> dict[str, float]:
    """Steps and inference, against the first number of organs, between the forms, and over the U-Net."""
    things: dict[str, Callable[[], object]] = {}
    found: dict[str, float] = {}
    for M in organs:
        menu, unet = made(case, M, device), made(case, M, device, unet=True)
        check_equal(menu, f"{case}, M = {M}")
        found[f"M = {M}: parameters"] = parameters(menu.net)
        found[f"M = {M}: U-Net's over it"] = parameters(unet.net) / parameters(menu.net)
        for work in WORK:
            for form, grouped in FORMS.items():
                things[f"{M} {work} {form}"] = in_form(menu.net, grouped, menu.work[work])
        things |= {f"{M} {work} {UNET}": thing for work, thing in unet.work.items()}
        foreign = range(1, M) if M > 1 else ()
        for form, grouped in FORMS.items() if foreign else ():
            ask = lambda net=menu.net, x=menu.data.image, foreign=foreign: net._encoded(x, foreign)  # noqa: E731
            things[f"{M} foreign {form}"] = in_form(menu.net, grouped, ask)
    took = in_turn(things, repeats, clock)
    for M in organs:
        for work in WORK:
            one, grouped = (took[f"{M} {work} {form}"] for form in FORMS)
            unet = took[f"{M} {'S1' if work == 'S1 + S2' else work} {UNET}"]
            name = f"M = {M}: {work}"
            found[f"{name}: one by one, ms"] = 1000 * statistics.median(one)
            found |= ratio(
                f"{name}: one by one over M = {organs[0]}", one, took[f"{organs[0]} {work} one by one"]
            )
            found |= ratio(f"{name}: grouped over one by one", grouped, one)
            found |= ratio(f"{name}: one by one over the U-Net", one, unet)
            found |= ratio(f"{name}: grouped over the U-Net", grouped, unet)
        for form in FORMS if M > 1 else ():
            share, step = took[f"{M} foreign {form}"], took[f"{M} S1 + S2 {form}"]
            found |= ratio(f"M = {M}: {form}: share of foreign sub-encoders in S1 + S2", share, step)
    return found


def encoders(
    case: Case, organs: Sequence[int], repeats: int, device: torch.device, clock: Callable[[], float]
) -> dict[str, float]:
    """The sub-encoders alone: grouped over one by one, without gradients, with those of one, and of all."""
    things: dict[str, Callable[[], object]] = {}
    kinds = {"no gradient": 0, "gradient of one": 1, "gradient of all": None}
    organs = [M for M in organs if M > 1]

    def run(net: MENUNetModule, x: Tensor, trained: int | None, grouped: bool) -> None:
        net.grouped = grouped
        for m, encoder in enumerate(net.encoders):
            encoder.requires_grad_(trained is None or m < trained)
        with torch.set_grad_enabled(trained != 0):
            levels = net._encoded(x, range(len(net.encoders)))
            if trained == 0:
                return
            torch.stack([m.sum() for level in levels for m in level if m.requires_grad]).sum().backward()
        net.zero_grad(set_to_none=True)

    for M in organs:
        it = made(case, M, device)
        for kind, trained in kinds.items():
            for form, grouped in FORMS.items():
                things[f"{M} {kind} {form}"] = lambda it=it, trained=trained, grouped=grouped: run(
                    it.net, it.data.image, trained, grouped
                )
    took = in_turn(things, repeats, clock)
    found: dict[str, float] = {}
    for M in organs:
        for kind in kinds:
            one, grouped = (took[f"{M} {kind} {form}"] for form in FORMS)
            found[f"M = {M}: {kind}: one by one, ms"] = 1000 * statistics.median(one)
            found |= ratio(f"M = {M}: {kind}: grouped over one by one", grouped, one)
    return found


def peaks(case: Case, organs: int, form: str, device: torch.device) -> dict[str, float]:
    """MiB at the peak of each kind of work, beyond what there was before the net: weights, momentum, batch, maps."""
    cuda = device.type == "cuda"

    def reset() -> None:
        gc.collect()
        torch.cuda.reset_peak_memory_stats(device) if cuda else reset_peak()

    def peak() -> float:
        return torch.cuda.max_memory_allocated(device) / 2**20 if cuda else peak_mb()

    # what libraries load at the first step is not the net's
    for thing in made(Case(1, 1, (32,) * len(case.patch)), 2, device).work.values():
        thing()
    reset()
    before, found = peak(), {}
    it = made(case, organs, device, unet=form == UNET)
    it.net.grouped = FORMS.get(form, False)
    for name, thing in it.work.items():
        if name == "S1":  # the first step makes the momentum
            thing()
        reset()
        thing()
        found[name] = peak() - before
    return found


def memory(case: Case, organs: Sequence[int], device: torch.device, threads: int) -> dict[str, float]:
    """`peaks` of every net, each in a process of its own."""
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**16)  # of the processes: freed blocks go back to the system
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.experts"])
    found: dict[str, float] = {}
    with context.Pool(1, torch.set_num_threads, (threads,), maxtasksperchild=1) as pool:
        for M in organs:
            of = {form: pool.apply(peaks, (case, M, form, device)) for form in (*FORMS, UNET)}
            for work in WORK:
                found |= {f"M = {M}: {work}: {form}, MiB": of[form][work] for form in of if work in of[form]}
    return found


PARTS: dict[str, Callable[..., dict[str, float]]] = {
    "encoders": encoders,
    "steps": whole,
    "memory": memory,
}


def main(arguments: Sequence[str] = ()) -> dict[str, float]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks experts", description=__doc__)
    parser.add_argument("--case", choices=list(CASES), action="append", help="all of them by default")
    parser.add_argument("--part", choices=list(PARTS), action="append", help="all of them by default")
    parser.add_argument("--organs", type=int, nargs="+", default=list(ORGANS))
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
        case, organs, repeats = CASES[name], args.organs, args.repeats
        case = Case(args.width or case.width, args.batch or case.batch, tuple(args.patch or case.patch))
        if args.quick:
            case, organs, repeats = Case(1, 1, (32,) * len(case.patch)), [1, 3], 1
        for part in args.part or PARTS:
            if part == "memory":
                numbers = memory(case, organs, device, args.threads)
            else:
                numbers = PARTS[part](case, organs, repeats, device, clock)
            found |= {f"{case}: {part}: {text}": value for text, value in numbers.items()}
    return found


if __name__ == "__main__":
    show(main(sys.argv[1:]))
