"""What ConDistFL's teacher costs, online and cached, over FedAvg at the same steps; and how far the two teachers are apart.

One site of the phantom, 3D, one thread. Costs are processor time, of all threads together, so that neither other work on
the machine nor a second core that prepares batches changes much. The share of the cached teacher follows the windows that
it is given per round over the patches of the round, steps x batch; steps are measured in turn, one by one, and what
a round costs is computed from them; whole rounds are measured beside it.

Distance: a net that was trained on all organs is the teacher; what it says of an augmented patch is compared with
what it said of the whole case, cropped and moved.
"""

import contextlib
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.timing import show
from fedatlas import losses, methods
from fedatlas.core.seeds import generator
from fedatlas.core.tensors import tensors_of
from fedatlas.federation.design import Experiment
from fedatlas.federation.file import parse_federation
from fedatlas.learning.augment import OFF, STRONG
from fedatlas.learning.loop import Local, Stepper, train
from fedatlas.losses import LossChoice
from fedatlas.phantoms.organs import phantom_sites, write_phantom
from fedatlas.transport.host import HostedSite, peak_mb, reset_peak

NETS: dict[str, tuple[dict[str, Any], int, int]] = {
    "U-Net 16-64, patches of 24": ({"name": "unet", "filters": [16, 32, 64]}, 24, 40),
    "U-Net 32-128, patches of 24": ({"name": "unet", "filters": [32, 64, 128]}, 24, 15),
    "MedNeXt S, patches of 32": ({"name": "mednext", "size": "S"}, 32, 4),
}
"""What is measured: the net, its patch, and how often."""
RATIOS = (1.0, 0.3, 0.1, 0.05)
METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {"name": "fedavg", "weights": "equal"},
    "online": {"name": "condistfl"},
    "cached": {"name": "condistfl", "teacher": "cached"},
}
BATCH = 2


def federation(root: Path, *, full: bool = False, **changes: Any) -> Experiment:
    """One site of the phantom. full: all organs are annotated."""
    site = phantom_sites(root)[0]
    if full:
        site = {"name": "full", "path": site["path"], "table": "all_labels.json", "labels": "labelsTr_all"}
    plain: dict[str, Any] = {
        "name": "teacher",
        "sites": [site],
        "labels": {"names": ["background", *organs(root)]},
        "preprocessing": {"spacing": [4, 4, 4], "window": [-100, 200], "patch": [24, 24, 24]},
        "net": {"name": "unet", "filters": [16, 32, 64]},
        "method": {"name": "fedavg"},
        "local": {"batch": BATCH, "steps": 10},
        "rounds": 2,
        "evaluation": {"validation": 0.25, "metrics": ["dice"], "overlays": False},
        "engine": {"cache": str(root / "cache")},
    }
    made = Experiment(parse_federation(plain | changes, base=Path()), root / "cache")
    made.prepare()
    return made


def organs(root: Path) -> list[str]:
    import yaml

    table = yaml.safe_load((root / "site-0" / "all_labels.json").read_text())["labels"]
    return [name for name in table if name != "background"]


def hosted(experiment: Experiment, folder: Path, round: int = 1) -> HostedSite:
    ((name, source),) = experiment.training.items()
    parts = (0, name, round, 0)
    return HostedSite(
        name, source, experiment.make_net, {}, generator(*parts), torch.device("cpu"), folder, parts
    )


def costs(root: Path, net: str) -> dict[str, float]:
    """A step of the three methods, with the making of its batch, step by step in turn; a window of the cached teacher;
    and what follows for a round."""
    options, size, repeats = NETS[net]
    preprocessing = {"spacing": [4, 4, 4], "window": [-100, 200], "patch": [size] * 3}
    experiment = federation(root, net=options, preprocessing=preprocessing)
    space, local = experiment.space, Local(batch=BATCH)  # type: ignore[call-arg]
    student, teacher = experiment.make_net(), experiment.make_net().eval().requires_grad_(False)
    supervised = losses.supervised(LossChoice(), hosted(experiment, root / "site"))  # type: ignore[call-arg]
    condist: Any = methods.get("condistfl")()
    by = Stepper(student.train(), local, torch.device("cpu"))
    took: dict[str, list[float]] = {"fedavg": [], "online": [], "cached": [], "window": []}
    asked: dict[str, Any] = {"overlap": 0.25, "windows": 4, "keep": None, "partly": True, "gigabytes": 1.0}
    for turn in range(3):
        site = hosted(experiment, root / "site")
        plain: Any = site.batches(batch=BATCH, steps=repeats)
        began = time.process_time()
        with site.with_predictions(teacher, within=contextlib.nullcontext(), **asked) as told:
            windows = int(site.logged["predicted_windows"])
            took["window"].append((time.process_time() - began) / windows)
            along: Any = told.batches(batch=BATCH, steps=repeats)
            kinds = {
                "fedavg": (plain, supervised),
                "online": (plain, condist.L_total(teacher, 1.0, space)),
                "cached": (along, condist.L_total(None, 1.0, space)),
            }
            for number in range(repeats if turn else 3):
                for kind, (batches, loss) in kinds.items():
                    began = time.process_time()
                    by.step(loss(student, batches._make(number)))
                    took[kind].append(time.process_time() - began)
    seconds = {
        kind: statistics.median(times[3:] if kind in METHODS else times) for kind, times in took.items()
    }
    over = {
        kind: statistics.median(a / b for a, b in zip(took[kind][3:], took["fedavg"][3:], strict=True))
        for kind in ("online", "cached")
    }
    window = seconds["window"] / (seconds["fedavg"] / BATCH)
    found = {f"{kind}, milliseconds": 1000 * value for kind, value in seconds.items()}
    found["online: a step over fedavg's"] = over["online"]
    found["cached: a step over fedavg's, predictions apart"] = over["cached"]
    found["cached: a window over fedavg's time for a patch"] = window
    for ratio in RATIOS:
        found[f"cached: a round over fedavg's at {ratio:g} windows per patch"] = (
            over["cached"] + ratio * window
        )
    return {f"{net}: {name}": value for name, value in found.items()}


def whole_rounds(root: Path, ratio: float = 0.1, repeats: int = 3) -> dict[str, float]:
    """The same as it is: rounds of the three methods in turn."""
    experiment = federation(root)
    model = tensors_of(experiment.make_net())

    def a_round(kind: str, steps: int) -> tuple[float, float, dict[str, float]]:
        local = Local(batch=BATCH, steps=steps)  # type: ignore[call-arg]
        options = {name: value for name, value in METHODS[kind].items() if name != "name"}
        method: Any = methods.get(METHODS[kind]["name"])(local=local, **options)
        site = hosted(experiment, root / "site")
        reset_peak()
        began = time.process_time()
        method.local_update(site, model=model, round=0, rounds=2)
        return time.process_time() - began, peak_mb(), site.logged

    windows = a_round("cached", 2)[2]["predicted_windows"]
    steps = round(windows / ratio / BATCH)
    rounds = [{kind: a_round(kind, steps) for kind in METHODS} for _ in range(repeats)]
    text = f"whole rounds of {steps} steps, {windows:g} windows"
    found = {}
    for kind in ("online", "cached"):
        shares = sorted(r[kind][0] / r["fedavg"][0] for r in rounds)
        found[f"{text}: {kind} over fedavg"] = statistics.median(shares)
        found[f"{text}: {kind} over fedavg, least"] = shares[0]
        found[f"{text}: {kind} over fedavg, largest"] = shares[-1]
    for kind in METHODS:
        found[f"{text}: {kind}: largest memory of the process, MiB"] = max(r[kind][1] for r in rounds)
    found["weights of a second net, MiB"] = sum(t.numel() * t.element_size() for t in model.values()) / 2**20
    return found


def distances(root: Path, steps: int = 300) -> dict[str, float]:
    """How far the cached teacher is from the online one."""
    full = federation(root, full=True)
    teacher = full.make_net()
    local = Local(batch=BATCH, steps=steps, lr=3e-3)  # type: ignore[call-arg]
    site = hosted(full, root / "full")
    train(site, teacher, losses.supervised(LossChoice(), site), local, round=0, rounds=1)  # type: ignore[call-arg]
    teacher.eval().requires_grad_(False)
    found = {"teacher: its loss at the end of training": site.logged["loss"]}
    for text, augmentation in (("none", OFF), ("default", None), ("strong", STRONG)):
        fields = OFF.__dataclass_fields__ if augmentation else ()
        changes: dict[str, Any] = {"augmentation": {name: getattr(augmentation, name) for name in fields}}
        experiment = federation(root, **changes)
        space, condist = experiment.space, methods.get("condistfl")()
        sums = torch.zeros(5, dtype=torch.float64)
        asked: dict[str, Any] = {
            "overlap": 0.25, "windows": 4, "keep": None, "partly": True, "gigabytes": 1.0
        }  # fmt: skip
        own = hosted(experiment, root / "site")
        with own.with_predictions(teacher, within=contextlib.nullcontext(), **asked) as told:
            for batch in told.batches(batch=BATCH, steps=40):
                z, p = teacher(batch.image), batch.along
                assert isinstance(z, torch.Tensor) and p is not None
                q = z.softmax(1)
                some = (q.argmax(1) > 0) | (p.argmax(1) > 0)
                differ = q.argmax(1) != p.argmax(1)
                z_k = near(z)
                loss = [
                    condist.L_ConDist(z_k, z_g, batch.target, batch.known, space)
                    for z_g in (z, p.clamp(min=1e-30).log())
                ]
                sums += torch.tensor(
                    [
                        (q - p).abs().mean(),
                        differ.float().mean(),
                        (differ & some).sum() / some.sum().clamp(min=1),
                        loss[0],
                        loss[1],
                    ]
                )
        names = (
            "mean difference of a probability",
            "voxels of another class",
            "the same, of voxels that either calls an organ",
            "ConDist loss of a perturbed student, online",
            "ConDist loss of a perturbed student, cached",
        )
        found |= {f"augmentation {text}: {n}": float(v) / 40 for n, v in zip(names, sums, strict=True)}
    return found


def near(z: torch.Tensor) -> torch.Tensor:
    """The logits of a student that is near the teacher."""
    return z + 0.5 * torch.randn(z.shape, generator=generator("student"))


def main() -> dict[str, float]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        root = write_phantom(Path(folder), sites=1, cases=4, test_cases=0, shape=(40, 40, 32), seed=1)
        found: dict[str, float] = {}
        for net in NETS:
            found |= costs(root, net)
        return found | whole_rounds(root) | distances(root)


if __name__ == "__main__":
    show(main())
