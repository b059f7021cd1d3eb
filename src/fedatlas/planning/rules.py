"""What a newcomer cannot know, proposed from the descriptions of all sites: one rule, one function, one reason.

The rules are those that nnU-Net's paper publishes (Isensee et al., "nnU-Net: a self-configuring method for deep learning-based
biomedical image segmentation", Nature Methods 18, 2021), written from its text and adapted to several sites:

* numbers that nnU-Net takes over all cases of a data set are taken over all sites' cases, from their percentiles;
* a window holds what every site labelled, since each labelled other organs, and each site counts once in mean and deviation;
* a batch is small for the smallest site, since every site makes batches of its own;
* memory is that of a processor or a GPU, whichever trains.

Sizes are in voxels, spacings in mm, along left-right, back-front, foot-head; where another axis is coarse it is proposed as the
last, and sizes and spacings are in the order of `preprocessing.orientation`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedatlas import nets
from fedatlas.core.memory import device_memory, gibibytes
from fedatlas.federation.design import step_memory
from fedatlas.planning.description import Description

AXES = "RAS"
"""Where left-right, back-front and foot-head point, as `preprocessing.orientation` has them by default."""
ANISOTROPIC = 3.0
"""An axis is coarse whose voxels are so many times as long as the shortest side, and nnU-Net's 10th percentile holds."""
LEAST_EDGE = 4
"""The smallest edge of a feature map."""
MOST_OF_A_SITE = 0.05
"""The largest part of a site's voxels that one batch holds."""


@dataclass(frozen=True)
class Machine:
    """What trains. device: as `engine.device`; budget: bytes of a training step; workers: sites that train at a time."""

    device: str = "cpu"
    budget: int = 1 << 30
    workers: int = 1

    @property
    def gpu(self) -> bool:
        return self.device.startswith("cuda")


def this_machine(device: str, workers: int, memory: float | None = None) -> Machine:
    """memory: GiB for a training step where a person says it; None: nnU-Net's 8 GiB of a GPU, 1 GiB on a processor, and at most
    half of what there is."""
    there = device_memory(device) or 4 << 30
    gpu = device.startswith("cuda")
    budget = (8 if gpu else 1) * 2**30 if memory is None else memory * 2**30
    return Machine(device, int(min(budget, there / 2 / max(1, workers))), workers)


@dataclass(frozen=True)
class Proposal:
    """A key of the federation file, its value, the rule that gave it, and why here."""

    key: str
    value: Any
    rule: str
    reason: str


def proposals(
    sites: Sequence[Description], classes: int, machine: Machine, dimensions: int | None = None
) -> list[Proposal]:
    """classes: of the federation, with the background. dimensions: 2 or 3, None: as the rule says."""
    if sites[0].task == "classification":
        return _of_images(sites, classes, machine)
    if all(site.kind == "masks" for site in sites):
        return _of_pictures(sites, classes, machine)
    return _of_scans(sites, classes, machine, dimensions)


# ------------------------------------------------------------------------------------------------------ statistics


def pooled(
    sites: Sequence[Description], of: Callable[[Description], dict[str, list[float]] | None], q: float
) -> list[float]:
    """A percentile over the training cases of all sites, [axes], from the percentiles of each: between two of them a site's cases
    are taken to be evenly spread."""
    grid = np.linspace(0, 100, 401)
    values, weights = [], []
    for site in sites:
        rows = of(site)
        if rows is None:
            continue
        known = sorted((float(key), row) for key, row in rows.items())
        at, table = [place for place, _ in known], np.array([row for _, row in known])
        values.append(np.stack([np.interp(grid, at, column) for column in table.T], axis=1))
        weights.append(np.full(len(grid), site.cases["train"] / len(grid)))
    stacked, weight = np.concatenate(values), np.concatenate(weights)
    return [_quantile(column, weight, q / 100) for column in stacked.T]


def _quantile(values: np.ndarray, weights: np.ndarray, q: float) -> float:
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[order]) / weights.sum()
    return float(values[order][min(np.searchsorted(reached, q - 1e-9), len(values) - 1)])


def _at(rows: dict[str, list[float]], q: str = "50") -> np.ndarray:
    return np.asarray(rows[q], dtype=np.float64)


def _middle(sites: Sequence[Description], per_site: Sequence[np.ndarray]) -> list[float]:
    weights = np.array([site.cases["train"] for site in sites], dtype=np.float64)
    return [_quantile(column, weights, 0.5) for column in np.stack(per_site).T]


def _mm(values: Sequence[float]) -> str:
    return " × ".join(f"{value:g}" for value in values)


# ------------------------------------------------------------------------------------------------------ scans


def _of_scans(
    sites: Sequence[Description], classes: int, machine: Machine, dimensions: int | None
) -> list[Proposal]:
    upright, why = target_spacing(sites)
    coarse = coarse_axis(upright)
    order = sorted(range(3), key=lambda axis: axis == coarse)
    spacing = [upright[axis] for axis in order]
    found: list[Proposal] = []
    if order != [0, 1, 2]:
        turned = (
            "the coarse axis last, across which slices lie",
            f"voxels of {_mm(upright)} mm along left-right, back-front, foot-head; spacing and patch are in the order of these letters",
        )
        found.append(Proposal("preprocessing.orientation", "".join(AXES[axis] for axis in order), *turned))
        why = (why[0], f"{why[1]}, along left-right, back-front, foot-head")
    found.append(Proposal("preprocessing.spacing", spacing, *why))
    found += intensities(sites)
    on_grid = [(_at(site.shape) * _at(site.spacing_mm or site.shape) / upright)[order] for site in sites]
    shape = [max(1.0, value) for value in _middle(sites, on_grid)]
    flat = dimensions == 2 or (dimensions is None and (coarse is not None or not machine.gpu))
    if dimensions is not None:
        reason = "asked for"
    elif coarse is not None:
        reason = f"voxels of {_mm(spacing)} mm are {ANISOTROPIC:g} times as long as wide or more along the last axis alone"
    else:
        reason = (
            "a GPU trains blocks"
            if machine.gpu
            else "a step on blocks takes a processor ten times as long as one on slices"
        )
    context = 1 if flat else 0
    channels = len(sites[0].channels) * (2 * context + 1)
    span, mm = (shape[:2], spacing[:2]) if flat else (shape, spacing)
    smallest = min(
        site.cases["train"] * float(np.prod(grid)) for site, grid in zip(sites, on_grid, strict=True)
    )
    what = "median shape under a memory budget"
    patch, net, batch = fitted(span, mm, channels, classes, smallest, machine)
    medians = " × ".join(str(round(n)) for n in shape)
    kind = f"slices with {context} neighbour on each side: {reason}" if flat else f"blocks: {reason}"
    found += [
        Proposal(
            "preprocessing.patch",
            patch,
            what,
            f"{kind}; the median scan has {medians} voxels of that spacing",
        ),
        Proposal(
            "preprocessing.context",
            context,
            "2.5D" if flat else "3D",
            "neighbouring slices that a slice is given",
        ),
    ]
    return [
        *found,
        *_net_and_batch(net, batch, patch, channels, classes, machine),
        *_optimizer(),
        *_length(sites, smallest, on_grid, patch, batch),
    ]


def coarse_axis(spacing: Sequence[float]) -> int | None:
    """The axis along which voxels are ANISOTROPIC times as long as their shortest side, None where there is none or are two."""
    found = [axis for axis, mm in enumerate(spacing) if mm >= ANISOTROPIC * min(spacing)]
    return found[0] if len(found) == 1 else None


def target_spacing(sites: Sequence[Description]) -> tuple[list[float], tuple[str, str]]:
    """The median over all cases; of an axis that is coarse in voxels and in number the 10th percentile, but not finer than the
    others."""
    middle = pooled(sites, lambda site: site.spacing_mm, 50)
    shape = pooled(sites, lambda site: site.shape, 50)
    worst = int(np.argmax(middle))
    others = [mm for axis, mm in enumerate(middle) if axis != worst]
    spacing, rule = list(middle), "median spacing of all sites' cases"
    if middle[worst] > ANISOTROPIC * max(others) and ANISOTROPIC * shape[worst] < max(shape):
        finer = pooled(sites, lambda site: site.spacing_mm, 10)[worst]
        spacing[worst] = max(finer, max(others))
        rule = "median spacing, and of the coarse axis the 10th percentile"
    spacing = [float(f"{mm:.3g}") for mm in spacing]
    medians = {site.site: _mm(site.spacing_mm["50"]) for site in sites if site.spacing_mm}
    return spacing, (
        rule,
        "medians of the sites: " + ", ".join(f"{name} {mm}" for name, mm in medians.items()),
    )


def intensities(sites: Sequence[Description]) -> list[Proposal]:
    """CT: clipped to the .5 and 99.5 percentiles of labelled voxels, then by their mean and deviation; everything else: every scan
    by itself."""
    held = [values for site in sites if (values := site.intensities[0].foreground)]
    low, high = min((v["0.5"] for v in held), default=0.0), max((v["99.5"] for v in held), default=0.0)
    one = len(sites[0].channels) == 1 and len(held) == len(sites)
    if not one or not all(site.is_ct for site in sites) or low >= high:
        kinds = sorted({name for site in sites for name in site.channels if name})
        why = f"{', '.join(kinds) or 'intensities without a unit'}: no common window"
        return [Proposal("preprocessing.normalise", "zscore", "every scan by itself", why)]
    means = np.array([v["mean"] for v in held])
    square = np.mean([v["std"] ** 2 + v["mean"] ** 2 for v in held])
    mean, std = float(means.mean()), float(np.sqrt(max(square - means.mean() ** 2, 1e-6)))
    ranges = ", ".join(f"{s.site} {v['0.5']:g} to {v['99.5']:g}" for s, v in zip(sites, held, strict=True))
    rule = "percentiles .5 and 99.5 of labelled voxels, the widest of all sites"
    count = "mean and deviation of labelled voxels, every site counted once"
    return [
        Proposal("preprocessing.window", [low, high], rule, f"HU of the sites: {ranges}"),
        Proposal("preprocessing.normalise", "meanstd", "CT has one unit everywhere", "all sites hold CT"),
        Proposal("preprocessing.mean", round(mean, 1), count, "HU"),
        Proposal("preprocessing.std", round(std, 1), count, "HU"),
    ]


def topology(
    patch: Sequence[float], spacing: Sequence[float], most: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Strides and kernels of every level. An axis is halved while its edge stays LEAST_EDGE or more and its voxels are less than
    twice as long as the shortest; a longer one is neither halved nor mixed by the kernel."""
    size, mm = list(patch), list(spacing)
    strides, kernels = [[1] * len(size)], [[1 if m >= 2 * min(mm) else 3 for m in mm]]
    while len(strides) < most:
        able = [axis for axis in range(len(size)) if size[axis] >= 2 * LEAST_EDGE]
        if not able:
            break
        finest = min(mm[axis] for axis in able)
        halved = [axis in able and mm[axis] < 2 * finest for axis in range(len(size))]
        kernels.append([3 if half or m < 2 * min(mm) else 1 for half, m in zip(halved, mm, strict=True)])
        strides.append([2 if half else 1 for half in halved])
        size = [n / 2 if half else n for n, half in zip(size, halved, strict=True)]
        mm = [2 * m if half else m for m, half in zip(mm, halved, strict=True)]
    return strides, kernels


def fitted(
    shape: Sequence[float],
    spacing: Sequence[float],
    channels: int,
    classes: int,
    voxels: float,
    machine: Machine,
) -> tuple[list[int], dict[str, Any], int]:
    """Patch, net and batch that fit the budget: the patch begins as the median shape and loses of its longest axis until two
    samples fit; then the batch grows while there is room. voxels: of the smallest site."""
    most = (6 if len(shape) == 3 else 7) if machine.gpu else 5
    wanted = [max(16.0, n) for n in shape]
    while True:
        strides, kernels = topology(wanted, spacing, most)
        by = [math.prod(level[axis] for level in strides) for axis in range(len(wanted))]
        patch = [max(b, math.ceil(n / b - 0.25) * b) for n, b in zip(wanted, by, strict=True)]
        net = _net(strides, kernels, machine)
        if _bytes(net, patch, channels, classes, 2) <= machine.budget or max(wanted) <= 16:
            break
        longest = max(range(len(wanted)), key=lambda axis: wanted[axis] / shape[axis])
        longest = longest if wanted[longest] > 16 else int(np.argmax(wanted))
        wanted[longest] = max(16.0, wanted[longest] * 0.9)
    batch, cap = 2, (128 if len(patch) == 2 else 16) if machine.gpu else 16
    part = MOST_OF_A_SITE * voxels / math.prod(patch)
    while 2 * batch <= min(cap, part) and _bytes(net, patch, channels, classes, 2 * batch) <= machine.budget:
        batch *= 2
    return patch, net, batch


def _net(strides: list[list[int]], kernels: list[list[int]], machine: Machine) -> dict[str, Any]:
    flat = len(strides[0]) == 2
    first, last = (32, 512 if flat else 320) if machine.gpu else (16, 256)
    net: dict[str, Any] = {
        "name": "unet",
        "filters": [min(last, first * 2**level) for level in range(max(3, len(strides)))],
    }
    plain = all(set(level) == {2} for level in strides[1:]) and all(set(level) == {3} for level in kernels)
    if not plain or len(strides) < 3:
        missing = max(0, 3 - len(strides))
        net["strides"] = strides + [[1] * len(strides[0])] * missing
        net["kernels"] = kernels + [[3] * len(strides[0])] * missing
    return net


def _bytes(net: dict[str, Any], size: Sequence[int], channels: int, classes: int, batch: int) -> int:
    chosen = {key: value for key, value in net.items() if key != "name"}
    with nets.without_values():
        made = nets.build(
            net["name"], chosen, in_channels=channels, classes=classes, spatial_dims=len(size), seed=0
        )
    return step_memory(made, (batch, channels, *size), "adamw").likely


def _net_and_batch(
    net: dict[str, Any], batch: int, patch: Sequence[int], channels: int, classes: int, machine: Machine
) -> list[Proposal]:
    need, budget = _bytes(net, patch, channels, classes, batch), gibibytes(machine.budget)
    room = f"of {budget} that it may take"
    if need > machine.budget:
        room = f"where it may take {budget}; nothing smaller is proposed, so give it more memory"
    levels = len(net["filters"])
    width = (
        "32 channels first, as nnU-Net"
        if machine.gpu
        else "16 channels first, a quarter of nnU-Net's work, on a processor"
    )
    return [
        Proposal(
            "net",
            net,
            "depth by patch size",
            f"{levels} levels leave {LEAST_EDGE} voxels or more of {_mm(patch)}; {width}",
        ),
        Proposal(
            "local.batch",
            batch,
            "2 at least, more while memory lasts",
            f"a step takes about {gibibytes(need)} {room}; more than 2 only while a batch holds {MOST_OF_A_SITE:.0%} of the smallest site's voxels at most",
        ),
    ]


def _optimizer() -> list[Proposal]:
    rule, why = "SGD with Nesterov's momentum, as nnU-Net", "as in this project's comparisons of segmentation"
    recipe = {"optimizer": "sgd", "lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-4}
    return [Proposal(f"local.{key}", value, rule, why) for key, value in recipe.items()]


def _length(
    sites: Sequence[Description],
    smallest: float,
    on_grid: Sequence[np.ndarray],
    patch: Sequence[int],
    batch: int,
) -> list[Proposal]:
    voxels = [site.cases["train"] * float(np.prod(grid)) for site, grid in zip(sites, on_grid, strict=True)]
    return _steps(float(np.median(voxels)) / (math.prod(patch) * batch))


def _steps(per_pass: float) -> list[Proposal]:
    steps = int(min(100, max(10, round(per_pass))))
    return [
        Proposal(
            "local.steps",
            steps,
            "one pass over the median site's data, 10 to 100 steps",
            f"a pass is {per_pass:.0f} steps",
        ),
        Proposal(
            "rounds", 100, "100 exchanges", "raise it while the validation curve still rises at the end"
        ),
        Proposal("evaluation.every", 5, "every 5 rounds", "a validation takes about as long as a round"),
    ]


# ------------------------------------------------------------------------------------------------------ pictures


def _of_pictures(sites: Sequence[Description], classes: int, machine: Machine) -> list[Proposal]:
    columns, rows = (max(1.0, n) for n in pooled(sites, lambda site: site.shape, 50)[:2])
    largest = 512 if machine.gpu else 256
    factor = min(1.0, largest / max(rows, columns))
    size = [max(32, 32 * round(n * factor / 32)) for n in (rows, columns)]
    channels = len(sites[0].channels)
    smallest = min(site.cases["train"] for site in sites) * float(math.prod(size))
    # the grid's first axis is left-right: the columns
    patch, net, batch = fitted(size[::-1], [1, 1], channels, classes, smallest, machine)
    median = f"the median picture has {rows:g} rows and {columns:g} columns"
    found = [
        Proposal(
            "preprocessing.size",
            size,
            "median size, in steps of 32",
            f"{median}; at most {largest} on {machine.device}",
        ),
        Proposal("preprocessing.normalise", "zscore", "every picture by itself", "grey values have no unit"),
        Proposal(
            "preprocessing.patch",
            patch,
            "median shape under a memory budget",
            "columns and rows of a training patch",
        ),
        Proposal("preprocessing.context", 0, "2D", "pictures have no neighbours"),
    ]
    passes = (
        float(np.median([site.cases["train"] for site in sites])) * math.prod(size) / math.prod(patch) / batch
    )
    return [
        *found,
        *_net_and_batch(net, batch, patch, channels, classes, machine),
        *_optimizer(),
        *_steps(passes),
    ]


def _of_images(sites: Sequence[Description], classes: int, machine: Machine) -> list[Proposal]:
    rows, columns = pooled(sites, lambda site: site.shape, 50)
    largest = 224 if machine.gpu else 128
    size = [max(32, 32 * round(min(n, largest) / 32)) for n in (rows, columns)]
    channels = 3 if any(site.colour for site in sites) else 1
    net: dict[str, Any] = {"name": "densenet121"} if machine.gpu else {"name": "cnn"}
    fewest = min(site.cases["train"] for site in sites)
    batch = 4
    while (
        2 * batch <= min(32, max(8, MOST_OF_A_SITE * fewest))
        and _bytes(net, size, channels, classes, 2 * batch) <= machine.budget
    ):
        batch *= 2
    median = f"the median image has {rows:g} rows and {columns:g} columns"
    return [
        Proposal(
            "images.size",
            size,
            "median size, in steps of 32",
            f"{median}; at most {largest} on {machine.device}",
        ),
        Proposal(
            "images.channels",
            channels,
            "colour where a site has it",
            "colour" if channels == 3 else "all images are grey",
        ),
        Proposal(
            "net", net, "by what trains", "a DenseNet-121 needs a GPU, a small net of convolutions does not"
        ),
        Proposal(
            "local.batch",
            batch,
            "8 to 32, while memory lasts",
            f"the smallest site has {fewest} training images, and a batch holds {MOST_OF_A_SITE:.0%} of them where that is 8 or more",
        ),
        *_steps(float(np.median([site.cases["train"] for site in sites])) / batch),
    ]
