"""What a run will take, before it is begun: memory, time and bytes.

Bytes follow from the net's shapes. Time and memory are measured: a few rounds of the federation itself run in worker processes as in
a run, on files of noise of the sites' sizes. So no data are read, and a coordinator who has none can ask, too. What this machine does
beside it slows the trial as it slows the run.
"""

import heapq
import math
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor

from fedatlas.core.contract import sends_of
from fedatlas.core.errors import FedAtlasError, FederationError
from fedatlas.core.labels import LabelSpace
from fedatlas.core.tensors import n_bytes, shapes_of
from fedatlas.data.index import Portions, SiteConfig
from fedatlas.federation.design import POOLED, Design
from fedatlas.federation.file import Federation, resolved
from fedatlas.federation.session import Finished, Running, gather_local
from fedatlas.learning.loop import count_steps
from fedatlas.phantoms.noise import write_images, write_pictures, write_scans
from fedatlas.transport.egress import NetForms, bytes_of
from fedatlas.transport.local import keeping_workers
from fedatlas.transport.protection.compression import sent_bytes
from fedatlas.transport.rounds import Round, RunFolder, run

FEW, MORE = 2, 6
"""Optimizer steps of a round of the trial, which is run with the one and with the other: from their difference follows what a step
waits for its batch, and what a call takes beside its steps."""
ROUNDS = 2
"""Of each of the two runs; the first does not count."""
MOST_SITES = 4
"""Sites of the trial."""
IMAGES = 32
"""Whole images that a site of the trial trains on, and evaluates."""


# ------------------------------------------------------------------------------------------------------ bytes


def bytes_per_round(design: Design, training: int, validating: int) -> dict[str, Any]:
    """Bytes of the models that travel; everything else is small. training, validating: how many sites train, and have cases
    for validation.

    bytes_down, bytes_up: of a site that trains, per round; a method that sends further nets than the model is taken to be
    sent as many. bytes_per_round: of all of them. evaluation_bytes: what an evaluated round sends more, to all that validate.
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
        "evaluation_bytes": model * validating if comm.down == "none" else 0,
    }


def masked_bytes(model: Mapping[str, Tensor]) -> int:
    """The bytes of a model as `fedatlas.transport.protection.secure` sends it: 8 per number, one more for the weight."""
    return 8 + 8 * sum(tensor.numel() for tensor in model.values() if tensor.is_floating_point())


# ------------------------------------------------------------------------------------------------------ the trial


@dataclass(frozen=True)
class Size:
    """What a site has, as far as a forecast needs it. annotated: classes; cases: per split; shape, spacing: of a file in the
    middle, in voxels and mm along the axes left-right, back-front, foot-head; pictures: has it pictures with masks, and no scans
    (these three: segmentation)."""

    annotated: tuple[str, ...]
    cases: Mapping[str, int]
    shape: tuple[int, ...] = ()
    spacing: tuple[float, ...] = ()
    pictures: bool = False


@dataclass(frozen=True)
class Forecast:
    """What a run takes on this machine. seconds_per_step: an optimizer step of a site with its batch; seconds_per_round: all sites' training
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


def forecast(
    federation: Federation,
    space: LabelSpace,
    channels: int,
    sizes: Mapping[str, Size],
    tested: Sequence[int] = (),
) -> Forecast:
    """Runs the trial. sizes: of the sites that train; tested: cases of each site that is only tested on. Raises FederationError where the federation cannot run on noise."""
    chosen = _chosen(federation, sizes)
    measured = Measured()
    with tempfile.TemporaryDirectory(prefix="fedatlas-trial-") as place, keeping_workers():
        sites = made_up(federation, space, channels, {name: sizes[name] for name in chosen}, Path(place))
        trial = replace(
            federation,
            labels=replace(federation.labels, names=space.names),
            sites=tuple(sites),
            evaluation=replace(federation.evaluation, overlays=False, local="last"),
            engine=replace(federation.engine, workers=at_once(federation, len(chosen)), cache=None),
        )
        try:
            for steps in (FEW, MORE):
                _measure(
                    replace(trial, local=replace(federation.local, steps=steps, epochs=None)),
                    RunFolder(Path(place) / f"steps-{steps}"),
                    measured,
                )
        except FedAtlasError as error:
            raise FederationError(
                f"the trial on made-up cases failed, nothing is predicted: {error}"
            ) from None
    if not (measured.steps and measured.validation and measured.final):
        raise FederationError(
            "the trial on made-up cases timed no step or no evaluation; nothing is predicted"
        )
    design = Design(federation, space, channels)
    return added_up(federation, design, sizes, measured, tested)


def at_once(federation: Federation, sites: int) -> int:
    """How many processes train beside each other; one where the sites take turns in a run's own process."""
    return max(1, min(federation.engine.workers, sites))


def _chosen(federation: Federation, sizes: Mapping[str, Size]) -> list[str]:
    training = [site.name for site in federation.sites if site.role == "train" and site.name in sizes]
    if federation.secure or len(training) <= MOST_SITES:
        return training
    covered = sorted(training, key=lambda name: -len(sizes[name].annotated))
    return sorted(covered[: max(MOST_SITES, at_once(federation, len(training)))])


def made_up(
    federation: Federation, space: LabelSpace, channels: int, sizes: Mapping[str, Size], place: Path
) -> list[SiteConfig]:
    """Writes a folder of noise for each site, and returns the sites of a federation that reads them. A class that none of them
    annotates, as others of the federation do, is the first one's."""
    covered = {name for size in sizes.values() for name in size.annotated}
    rest = [space.names[c] for c in space.foreground if space.names[c] not in covered]
    sites: list[SiteConfig] = []
    for name, size in sizes.items():
        folder, own = place / name, [*size.annotated, *rest]
        rest = []
        how: dict[str, Any] = {}
        if federation.task == "classification":
            counts = {"train": IMAGES, "validation": IMAGES}
            keys = write_images(folder, own, federation.images.size, channels=channels, cases=counts)
        else:
            how, shape = {"split": Portions(validation=1)}, size.shape  # type: ignore[call-arg]
            if size.pictures:
                told = list(space.findings)
                keys = write_pictures(
                    folder, own, shape[:2], size.spacing[:2], channels=channels, cases=2, findings=told
                )
            else:
                assert federation.preprocessing is not None
                window = federation.preprocessing.window
                keys = write_scans(
                    folder, own, shape, size.spacing, channels=channels, cases=2, window=window
                )
        sites.append(SiteConfig(name=name, path=str(folder), **keys, **how))  # type: ignore[call-arg]
    return sites


@dataclass
class Measured:
    """Of the trial, in seconds. steps: of a step alone; predicting: of what a model is first made to say of a training case;
    beside: steps of a round -> of a call without these two; validation, final: site -> of its unit of cases; peak: MiB."""

    steps: list[float] = field(default_factory=list)
    predicting: list[float] = field(default_factory=list)
    beside: dict[int, list[float]] = field(default_factory=dict)
    server: list[float] = field(default_factory=list)
    validation: dict[str, float] = field(default_factory=dict)
    final: dict[str, float] = field(default_factory=dict)
    start: float = 0.0
    peak: float = 0.0


def _measure(trial: Federation, folder: RunFolder, found: Measured) -> None:
    """Runs the federation of a trial, and adds what it took."""
    folder.path.mkdir()
    text = yaml.safe_dump(resolved(trial), sort_keys=False, allow_unicode=True)
    (folder.path / "federation.yaml").write_text(text, encoding="utf-8")
    parties = gather_local(trial, folder, lambda text: None)
    steps, last, design = trial.local.steps or 0, trial.local.steps == MORE, parties.design
    with Running(parties, folder) as running:

        def model(state: Any) -> Finished:
            return Finished("last", state.round, lambda: lambda site: design.method.eval_members(state, site))

        def validate(state: Any) -> list[dict[str, Any]]:
            if not last or state.round < ROUNDS:
                return []
            metrics = trial.evaluation.round_metrics
            return running.evaluate(model(state), split="validation", grid="federation", metrics=metrics).rows

        def keep(record: Round) -> None:
            cost = record.log["cost"]
            if record.number == 0:
                found.start = sum(c["seconds"] for c in cost.values()) / trial.engine.workers
            if record.number < ROUNDS:
                return
            calls = [spent["seconds"] for _, spent in sorted(cost.items()) if "seconds" in spent]
            round_took = record.log["phases"]["round"]
            found.server.append(max(0.0, round_took - makespan(calls, trial.engine.workers)))
            for site, numbers in record.log["sites"].items():
                if "seconds" in cost[site]:
                    spent = numbers.get("step_seconds", cost[site]["seconds"])
                    predicting = numbers.get("predicting_seconds", 0.0)
                    found.steps.append(spent / steps)
                    found.predicting.append(predicting)
                    found.beside.setdefault(steps, []).append(cost[site]["seconds"] - spent - predicting)
            for site, spent in cost.items():
                if "evaluate_seconds" in spent:
                    found.validation[site] = spent["evaluate_seconds"]
                peaks = [spent[key] for key in ("peak_mb", "evaluate_peak_mb") if key in spent]
                found.peak = max(found.peak, *peaks)

        state = run(
            design.method,
            design.make_net(),
            running.clients,
            ROUNDS,
            evaluate=validate,
            evaluators=running.evaluators,
            after_round=keep,
        )
        if last:
            running.evaluators.begin(ROUNDS + 1)
            metrics = trial.evaluation.metrics
            running.evaluate(model(state), split="validation", grid="original", metrics=metrics)
            costs = running.evaluators.calls[-1].cost
            found.final = {site: cost["seconds"] for site, cost in costs.items()}


def added_up(
    federation: Federation,
    design: Design,
    sizes: Mapping[str, Size],
    measured: Measured,
    tested: Sequence[int] = (),
) -> Forecast:
    """What the trial says of the whole run. tested: see `forecast`; a case of these sites takes as long as the median."""
    few, more = (statistics.median(measured.beside[steps]) for steps in (FEW, MORE))
    waited = max(0.0, (more - few) / (MORE - FEW))
    step, beside = statistics.median(measured.steps) + waited, max(0.0, few - FEW * waited)
    predicting = statistics.median(measured.predicting)
    workers = max(1, federation.engine.workers)
    training = [site.name for site in federation.sites if site.role == "train" and site.name in sizes]
    local = federation.local
    trained = {name: sizes[name].cases["train"] for name in training}
    if design.pooled:
        trained = {POOLED: sum(trained.values())}
    calls = [
        beside + predicting * cases + step * count_steps(local.steps, local.epochs, cases, local.batch)
        for cases in trained.values()
    ]
    teachers = [
        step * (design.method.steps_before(federation.rounds, len(trained), cases) or 0)
        for cases in trained.values()
    ]
    per_round = makespan(calls, workers) + statistics.median(measured.server)
    unit = IMAGES if federation.task == "classification" else 1

    def evaluated(split: str, per_unit: Mapping[str, float]) -> float:
        otherwise = statistics.median(per_unit.values())
        seconds = [per_unit.get(n, otherwise) * s.cases.get(split, 0) / unit for n, s in sizes.items()]
        seconds += [otherwise * cases / unit for cases in tested if split == "test"]
        return makespan(seconds, workers)

    models = federation.evaluation.models
    # the best round may be the last; then it is evaluated once
    count = len({"best", "last"} & set(models)) + (len(training) if "local" in models else 0)
    ends = sum(evaluated(split, measured.final) for split in ("validation", "test")) * count
    validations = math.ceil(federation.rounds / federation.evaluation.every)
    validating = sum(bool(size.cases.get("validation")) for size in sizes.values())
    sent = bytes_per_round(design, len(trained), validating)
    often = validations / federation.rounds
    return Forecast(
        step,
        per_round,
        evaluated("validation", measured.validation),
        measured.start + makespan(teachers, workers),
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
