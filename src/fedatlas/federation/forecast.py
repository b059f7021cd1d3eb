"""What a run will take, before it is begun: memory, time and bytes.

Bytes follow from the net's shapes. Time and memory are measured: a few rounds of the federation's own method, net, loss and
evaluation run in worker processes as in a run, on made-up cases of the sites' sizes. So no data are read, and a coordinator
who has none can ask, too. What this machine does beside it slows the trial as it slows the run.

Shapes: C classes, F findings, I input channels, *S spatial.
"""

import heapq
import json
import math
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor

from fedatlas.core.batch import Batch, ImageSample, Volume
from fedatlas.core.contract import sends_of
from fedatlas.core.errors import FedAtlasError, FederationError
from fedatlas.core.labels import LabelSpace, SiteLabels, known_row
from fedatlas.core.seeds import generator, seed_of
from fedatlas.core.tensors import n_bytes, shapes_of
from fedatlas.data.sampling import count_steps
from fedatlas.data.transforms import Geometry, geometry_of, restore
from fedatlas.federation.design import POOLED, Design, Experiment
from fedatlas.federation.file import Federation, load_federation, resolved
from fedatlas.federation.session import Finished, Hosts, Parties, Running
from fedatlas.transport.egress import NetForms, bytes_of
from fedatlas.transport.frames import Question
from fedatlas.transport.local import Workers
from fedatlas.transport.rounds import Round, RunFolder, run

STEPS = 4
"""Optimizer steps of a round of the trial; of the first round nothing counts."""
MOST_SITES = 4
"""Sites of the trial."""
IMAGES = 32
"""Whole images that a site of the trial evaluates."""


# ------------------------------------------------------------------------------------------------------ bytes


def bytes_per_round(design: Design, training: int, everyone: int) -> dict[str, Any]:
    """Bytes of the models that travel; everything else is small. training, everyone: how many sites.

    bytes_down, bytes_up: of a site that trains, per round; a method that sends further nets than the model is taken to be
    sent as many. bytes_per_round: of all of them. evaluation_bytes: what an evaluated round sends more, to all sites.
    """
    federation, values = design.federation, shapes_of(design.shapes())
    comm, model = federation.comm, n_bytes(values)
    forms = NetForms(partial(design.make_net, initial=False))
    others = 0
    for key, kind in sends_of(design.method).get("local_update", {}).items():
        base, _, of = kind.partition(":")
        if base in ("model", "some") and key != "model":
            others += bytes_of(forms(of or "main"))
        elif base == "bits":
            others += sum((math.prod(shape) + 7) // 8 for _, shape in forms(of or "main").values())
    down = sent_bytes(values, comm.down, comm.fraction) + others
    up = others + (masked_bytes(values) if federation.secure else sent_bytes(values, comm.up, comm.fraction))
    return {
        "model_bytes": model,
        "bytes_down": down,
        "bytes_up": up,
        "down": comm.down,
        "up": "masked" if federation.secure else comm.up,
        "bytes_per_round": (down + up) * training,
        "evaluation_bytes": model * everyone if comm.down == "none" else 0,
    }


def sent_bytes(model: Mapping[str, Tensor], kind: str, fraction: float) -> int:
    """The bytes of a model's values as `fedatlas.transport.protection.compression` sends them; kind: as in `comm`."""
    total = 0
    for tensor in model.values():
        n = tensor.numel()
        if kind == "none" or not tensor.is_floating_point():
            total += n * tensor.element_size()
        elif kind == "bf16":
            total += 2 * n
        elif kind == "int8":
            total += n + 4 * (tensor.shape[0] if tensor.ndim > 1 else 1)
        else:
            total += min(6 * max(1, math.ceil(fraction * n)), 4 * n)
    return total


def masked_bytes(model: Mapping[str, Tensor]) -> int:
    """The bytes of a model as `fedatlas.transport.protection.secure` sends it: 8 per number, one more for the weight."""
    return 8 + 8 * sum(tensor.numel() for tensor in model.values() if tensor.is_floating_point())


# ------------------------------------------------------------------------------------------------------ the trial


@dataclass(frozen=True)
class Size:
    """What a site has, as far as a forecast needs it. annotated: classes; cases: per split; shape, spacing: of a file in the
    middle, in voxels and mm along the axes left-right, back-front, foot-head (segmentation)."""

    annotated: tuple[str, ...]
    cases: Mapping[str, int]
    shape: tuple[int, ...] = ()
    spacing: tuple[float, ...] = ()


@dataclass(frozen=True)
class Forecast:
    """What a run takes on this machine. seconds_per_step: an optimizer step of a site; seconds_per_round: all sites' training
    and what the server does; seconds_per_validation, seconds_of_start, seconds_at_end: what comes to it; memory: the largest
    process of a site, libraries included, in bytes; bytes_per_round: between server and sites, with the evaluated rounds'
    share."""

    seconds_per_step: float
    seconds_per_round: float
    seconds_per_validation: float
    seconds_of_start: float
    seconds_at_end: float
    rounds: int
    validations: int
    memory: int
    bytes_per_round: int

    @property
    def seconds(self) -> float:
        """In all, without reading the data."""
        rounds = self.rounds * self.seconds_per_round + self.validations * self.seconds_per_validation
        return self.seconds_of_start + rounds + self.seconds_at_end

    @property
    def bytes(self) -> int:
        """In all rounds."""
        return self.rounds * self.bytes_per_round


def forecast(federation: Federation, space: LabelSpace, channels: int, sizes: Mapping[str, Size]) -> Forecast:
    """Runs the trial. sizes: of every site. Raises FederationError where the method cannot run on made-up cases."""
    chosen = _chosen(federation, sizes)
    rounds = 3
    trial = replace(
        federation,
        sites=tuple(replace(site, path=None) for site in federation.sites if site.name in chosen),
        local=replace(federation.local, steps=STEPS, epochs=None),
        rounds=rounds,
        evaluation=replace(federation.evaluation, every=rounds, overlays=False, local="last"),
        engine=replace(federation.engine, workers=at_once(federation, len(chosen))),
    )
    with tempfile.TemporaryDirectory(prefix="fedatlas-trial-") as place:
        folder = RunFolder(Path(place))
        text = yaml.safe_dump(resolved(trial), sort_keys=False, allow_unicode=True)
        (folder.path / "federation.yaml").write_text(text, encoding="utf-8")
        plain = {"space": space.to_plain(), "channels": channels}
        plain["sizes"] = {name: asdict(_one_case(sizes[name], federation.task)) for name in chosen}
        (folder.path / "trial.json").write_text(json.dumps(plain), encoding="utf-8")
        target = "fedatlas.federation.forecast:open_trial"
        log = folder.path / "workers.log"
        workers = Workers(target, {"run": place}, trial.engine.workers, log)
        try:
            measured = _measured(trial, folder, Trial(trial, folder), workers)
        except FedAtlasError as error:
            raise FederationError(
                f"the trial on made-up cases failed, nothing is predicted: {error}"
            ) from None
    if not (measured.steps and measured.validation and measured.final):
        raise FederationError(
            "the trial on made-up cases timed no step or no evaluation; nothing is predicted"
        )
    design = Design(federation, space, channels)
    return _added_up(federation, design, sizes, chosen, measured)


def at_once(federation: Federation, sites: int) -> int:
    """How many processes train beside each other; one where the sites take turns in a run's own process."""
    return max(1, min(federation.engine.workers, sites))


def _chosen(federation: Federation, sizes: Mapping[str, Size]) -> list[str]:
    training = [site.name for site in federation.sites if site.role == "train" and site.name in sizes]
    if federation.secure or len(training) <= MOST_SITES:
        return training
    covered = sorted(training, key=lambda name: -len(sizes[name].annotated))
    return sorted(covered[: max(MOST_SITES, at_once(federation, len(training)))])


def _one_case(size: Size, task: str) -> Size:
    n = IMAGES if task == "classification" else 1
    return replace(size, cases={"train": max(1, size.cases["train"]), "validation": n, "test": 0})


@dataclass
class _Measured:
    """Of the trial. seconds: site -> of a call of each round, with and without its steps; peak: MiB."""

    steps: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    server: list[float] = field(default_factory=list)
    validation: dict[str, list[float]] = field(default_factory=dict)
    final: dict[str, float] = field(default_factory=dict)
    start: float = 0.0
    peak: float = 0.0


def _measured(trial: Federation, folder: RunFolder, design: "Trial", transport: Workers) -> _Measured:
    found = _Measured()
    summaries = {name: source.summary() for name, source in design.sources.items()}
    parties = Parties(design, summaries, list(design.training), transport)
    with Running(parties, folder) as running:
        what = {"split": "validation", "grid": "federation", "metrics": trial.evaluation.round_metrics}

        def model(state: Any) -> Finished:
            return Finished("last", state.round, lambda: lambda site: design.method.eval_members(state, site))

        def validate(state: Any) -> list[dict[str, Any]]:
            if state.round < trial.rounds:
                return []
            if running.evaluators is not running.clients:
                running.evaluators.begin(state.round)
            return running.evaluate(model(state), **what).rows

        def keep(record: Round) -> None:
            log = record.log
            if record.number < 2:
                if record.number == 0:
                    found.start = sum(c["seconds"] for c in log["cost"].values()) / trial.engine.workers
                return
            longest = 0.0
            for site, numbers in log["sites"].items():
                spent, cost = numbers.get("step_seconds"), log["cost"][site]
                if "seconds" not in cost:
                    continue
                steps = numbers.get("steps") or STEPS
                found.steps.append((cost["seconds"] if spent is None else spent) / steps)
                found.beside.append(0.0 if spent is None else cost["seconds"] - spent)
                longest = max(longest, cost["seconds"])
            found.server.append(max(0.0, log["phases"]["round"] - longest * _turns(trial)))
            for site, cost in log["cost"].items():
                if "evaluate_seconds" in cost:
                    found.validation.setdefault(site, []).append(cost["evaluate_seconds"])
                peaks = [cost[key] for key in ("peak_mb", "evaluate_peak_mb") if key in cost]
                found.peak = max(found.peak, *peaks)

        state = run(
            design.method,
            design.make_net(),
            running.clients,
            trial.rounds,
            evaluate=validate,
            after_round=keep,
        )
        running.evaluators.begin(trial.rounds + 1)
        final = {"split": "validation", "grid": "original", "metrics": trial.evaluation.metrics}
        running.evaluate(model(state), **final)
        costs = running.evaluators.calls[-1].cost
        found.final = {site: cost["seconds"] for site, cost in costs.items()}
    return found


def _turns(trial: Federation) -> int:
    return math.ceil(len(trial.sites) / trial.engine.workers)


def _added_up(
    federation: Federation,
    design: Design,
    sizes: Mapping[str, Size],
    chosen: Sequence[str],
    measured: _Measured,
) -> Forecast:
    """What the trial says of the whole run."""
    step, beside = statistics.median(measured.steps), statistics.median(measured.beside)
    workers = max(1, federation.engine.workers)
    training = [site.name for site in federation.sites if site.role == "train" and site.name in sizes]
    local = federation.local
    trained = {name: sizes[name].cases["train"] for name in training}
    if design.pooled:
        trained = {POOLED: sum(trained.values())}
    calls = {
        n: beside + step * count_steps(local.steps, local.epochs, c, local.batch) for n, c in trained.items()
    }
    per_round = makespan(list(calls.values()), workers) + statistics.median(measured.server)
    middle = statistics.median(v for values in measured.validation.values() for v in values)
    last = statistics.median(measured.final.values())
    unit = IMAGES if federation.task == "classification" else 1

    def evaluated(split: str, per_case: Mapping[str, float], otherwise: float) -> float:
        seconds = [per_case.get(n, otherwise) * s.cases.get(split, 0) / unit for n, s in sizes.items()]
        return makespan(seconds, workers)

    known = {name: statistics.median(values) for name, values in measured.validation.items()}
    models = federation.evaluation.models
    # the best round may be the last; then it is evaluated once
    count = len({"best", "last"} & set(models)) + (len(training) if "local" in models else 0)
    ends = sum(evaluated(split, measured.final, last) for split in ("validation", "test")) * count
    validations = math.ceil(federation.rounds / federation.evaluation.every)
    sent = bytes_per_round(design, len(trained), len(sizes))
    often = validations / federation.rounds
    return Forecast(
        step,
        per_round,
        evaluated("validation", known, middle),
        measured.start,
        ends,
        federation.rounds,
        validations,
        int(measured.peak * 2**20),
        int(sent["bytes_per_round"] + often * sent["evaluation_bytes"]),
    )


def makespan(seconds: Sequence[float], workers: int) -> float:
    """When the last of several tasks ends that begin in their order, each as soon as a worker is free."""
    free = [0.0] * workers
    for one in seconds:
        heapq.heappush(free, heapq.heappop(free) + one)
    return max(free)


# ------------------------------------------------------------------------------------------------------ made-up sites


class Trial(Experiment):
    """A design with made-up sites, as the folder of a trial describes them."""

    def __init__(self, federation: Federation, folder: RunFolder) -> None:
        plain = json.loads((folder.path / "trial.json").read_text(encoding="utf-8"))
        space = LabelSpace.from_plain(plain["space"])
        Design.__init__(self, federation, space, plain["channels"])
        self.indexes = []
        made = {name: MadeUp(self, name, Size(**size)) for name, size in plain["sizes"].items()}
        self.sources = made  # type: ignore[assignment]
        self.training = dict(made)  # type: ignore[assignment]
        if self.pooled:
            cases = {
                split: sum(s.size.cases[split] for s in made.values())
                for split in ("train", "validation", "test")
            }
            names = tuple(dict.fromkeys(name for s in made.values() for name in s.size.annotated))
            first = next(iter(made.values())).size
            self.training = {POOLED: MadeUp(self, POOLED, replace(first, annotated=names, cases=cases))}  # type: ignore[dict-item]


def open_trial(run: str) -> Callable[[Question], None]:
    """`answer(question)` for a worker process of a trial."""
    folder = RunFolder(Path(run))
    return Hosts(Trial(load_federation(folder.path / "federation.yaml"), folder), folder).answer


class MadeUp:
    """A site whose images are noise, and whose labels are boxes; as `transport.host.SiteSource`."""

    def __init__(self, design: Design, name: str, size: Size) -> None:
        self.design, self.name, self.size, self.space = design, name, size, design.space
        taught = frozenset(self.space.index(n) for n in size.annotated if n in self.space.names)
        self.labels = SiteLabels(self.space, taught)
        self.n_train = size.cases["train"]
        self.known = torch.tensor(known_row(self.space, taught))
        self.n_labelled = self.known.long() * self.n_train

    @property
    def n_positive(self) -> Tensor:
        return self.n_labelled

    def summary(self) -> dict[str, Any]:
        """What a run asks of it."""
        return {"cases": dict(self.size.cases), "role": "train", "annotated": list(self.size.annotated)}

    def batches(
        self,
        rng_parts: tuple[str | int, ...],
        *,
        batch: int,
        steps: int | None = None,
        epochs: float | None = None,
        device: torch.device | str = "cpu",
    ) -> "MadeUpBatches":
        """Batches of noise, each the same."""
        made = self._batch(rng_parts, batch).to(device)
        return MadeUpBatches(made, count_steps(steps, epochs, self.n_train, batch))

    def _batch(self, parts: tuple[str | int, ...], batch: int) -> Batch:
        space, (inputs, *size) = self.space, self.design.sample_shape
        rng = generator(*parts)
        image = torch.randn(batch, inputs, *size, generator=rng)
        if space.level == "image":
            target = torch.randint(0, 2, (batch, len(space)), generator=rng).float()
        elif space.exclusive:
            target = torch.zeros(batch, *size, dtype=torch.int64)
            _boxes(target, [c for c in space.foreground if self.known[c]])
        else:
            target = torch.randint(0, 2, (batch, len(space), *size), generator=rng).float()
        found = Batch(image, target, self.known.expand(batch, -1).clone(), [str(n) for n in range(batch)])
        if space.findings:
            found.finding = torch.randint(0, 2, (batch, len(space.findings)), generator=rng).float()
            found.finding_known = torch.ones_like(found.finding, dtype=torch.bool)
        return found

    def volumes(self, split: str) -> Iterator[Any]:
        """The cases of a split."""
        for number in range(self.size.cases[split]):
            yield self._image(number) if self.space.level == "image" else self._volume(number)

    def _image(self, number: int) -> ImageSample:
        rng = generator(self.name, "image", number)
        truth = ((torch.arange(len(self.space)) + number) % 2).float()
        return ImageSample(
            f"case-{number}",
            f"patient-{number}",
            torch.randn(*self.design.sample_shape, generator=rng),
            truth,
            self.known,
            self.known,
        )

    def _volume(self, number: int) -> "MadeUpVolume":
        preprocessing = self.design.federation.preprocessing
        assert preprocessing is not None
        affine = np.diag([*self.size.spacing, 1.0])
        geometry = geometry_of(self.size.shape, affine, preprocessing)
        rng = np.random.default_rng(seed_of(self.name, "volume", number))
        grid = (self.design.channels, *geometry.grid_shape)
        findings = len(self.space.findings)
        return MadeUpVolume(
            case=f"case-{number}",
            image=torch.from_numpy(rng.standard_normal(grid, dtype=np.float32)),
            spacing=geometry.grid_spacing,
            raw_spacing=geometry.spacing,
            known=self.known,
            scored=self.known,
            whole=False,
            finding=torch.ones(findings),
            finding_known=torch.ones(findings, dtype=torch.bool),
            finding_scored=torch.ones(findings, dtype=torch.bool),
            geometry=geometry,
            space=self.space,
        )


class MadeUpBatches:
    """One batch, so many times."""

    def __init__(self, batch: Batch, steps: int) -> None:
        self.batch, self.steps = batch, steps

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Batch]:
        for _ in range(self.steps):
            yield replace(self.batch, image=self.batch.image.clone(), target=self.batch.target.clone())


@dataclass
class MadeUpVolume(Volume):
    """A case of noise with boxes as its truth."""

    geometry: Geometry
    space: LabelSpace

    def truth(self, grid: str) -> np.ndarray:
        """See `Volume`."""
        shape = self.geometry.grid_shape if grid == "federation" else self.geometry.shape
        classes = [c for c in self.space.foreground if self.known[c]]
        if self.space.exclusive:
            found = torch.zeros(shape, dtype=torch.uint8)
            _boxes(found[None], classes)
            return found.numpy()
        masks = np.zeros((len(self.space), *shape), dtype=np.uint8)
        for c in classes:
            masks[(c, *(slice(n // 4, n // 4 + max(1, n // 5)) for n in shape))] = 1
        return masks

    def restore(self, probabilities: Tensor) -> np.ndarray:
        """See `Volume`."""
        return restore(probabilities, self.geometry, self.space.exclusive)


def _boxes(target: Tensor, classes: Sequence[int]) -> None:
    """Draws a box of each class into labels [B, *S], beside each other along the first axis."""
    size = target.shape[1:]
    for number, c in enumerate(classes):
        first, stop = (size[0] * n // max(1, len(classes)) for n in (number, number + 1))
        rest = (slice(n // 3, n // 3 + max(1, n // 4)) for n in size[1:])
        target[(slice(None), slice(first, max(first + 1, (first + stop) // 2)), *rest)] = c
