"""Scoring models at a site, and choosing among rounds.

Shapes: C classes, *S spatial.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from fedatlas.core.batch import Volume
from fedatlas.core.contract import Member, at_site
from fedatlas.core.errors import FederationError
from fedatlas.core.labels import LabelSpace
from fedatlas.core.options import not_known, option, options
from fedatlas.core.tensors import Tensors, tensors_of
from fedatlas.evaluation.classification import METRICS as IMAGE_METRICS
from fedatlas.evaluation.findings import METRICS as FINDING_METRICS
from fedatlas.evaluation.findings import Findings
from fedatlas.evaluation.metrics import LARGEST, METRICS, EmptyPolicy, Score, score, whole_organs
from fedatlas.evaluation.pictures import Pictures
from fedatlas.evaluation.postprocess import Postprocess, classes_of, postprocess
from fedatlas.evaluation.statistics import POST, client_wise_index, macro_over_classes, select
from fedatlas.learning import inference
from fedatlas.learning.inference import Inference, Nets


@options
class Evaluation:
    """What is measured, when, and how the best round is chosen."""

    validation: float = option(
        0.2, "Share of a site's training patients that is kept from training for validation.", ge=0, lt=1
    )
    every: int = option(1, "Rounds between validations; the last round is always validated.", ge=1)
    metrics: tuple[str, ...] = option(
        (),
        "Of the final evaluation; empty: dice, hd95, asd, nsd, or for labels of whole images auroc, ap, f1, "
        "sensitivity, specificity, ece.",
    )
    round_metrics: tuple[str, ...] = option(
        (),
        "Of the validations during training; empty: dice, or auroc for labels of whole images, which select.",
    )
    test: float = option(
        0.2,
        "Whole images: share of a site's patients that is tested on, where its tables name no test cases.",
        ge=0,
        lt=1,
    )
    split_seed: int = option(
        0,
        "Decides which patients are in which split (of label maps: by a site's `split`), and `cases`; the file's "
        "seed does not.",
        ge=0,
    )
    threshold: Literal["f1", "youden"] = option(
        "f1",
        "Whole images: what the threshold of a class is best for, on the validation images of all sites together.",
    )
    bins: int = option(10, "Whole images: bins of the calibration error.", ge=1)
    draws: int = option(
        1000,
        "Whole images: resamples of patients behind every interval of the final evaluation; 0: none.",
        ge=0,
    )
    histogram: int = option(
        100,
        "Whole images: bins of equal width in which a site counts its positives and negatives by score, for curves over all "
        "sites; the first and the last are split further, by halves towards 0 and 1.",
        ge=1,
        le=1000,
    )
    batch: int = option(32, "Whole images: images predicted at a time.", ge=1)
    tolerance: float = option(2.0, "Of nsd, in mm.", gt=0)
    empty: EmptyPolicy | dict[str, EmptyPolicy] = option(
        "nan",
        "Empty masks: nan leaves what is not defined out, zero is Fed-MENU's code, siim scores an empty truth 1 if the "
        "prediction is empty and 0 if not; or {class: rule, default: rule}.",
    )
    postprocess: Postprocess | None = option(
        None,
        "Segmentation: the final evaluation scores every model once more after its labels were processed so, as the model "
        "post/<model>; null: it does not.",
    )
    select_weights: Literal["classes", "sites"] = option(
        "classes",
        "The best round by the mean over all classes of all sites, or by the client-wise global index.",
    )
    models: tuple[Literal["best", "last", "local"], ...] = option(
        ("best", "last", "local"),
        "Of the final evaluation: the best round, the last, every site's local model.",
    )
    local: Literal["last", "best"] = option(
        "last",
        "Which local model of a site: of the last round, or of the round in which it was best on the site's own "
        "validation cases, as for standalone; best sends every site its model once more in validated rounds.",
    )
    overlays: bool = option(
        True, "Whether sites keep pictures of their worst, median and best cases and of every class's worst."
    )
    inference: Inference = option(Inference(), "How a volume is predicted.")

    def __post_init__(self) -> None:
        for name in (*self.metrics, *self.round_metrics):
            if name not in METRICS and name not in IMAGE_METRICS:
                raise not_known("evaluation: the metric", name, [*METRICS, *IMAGE_METRICS])
        if self.round_metrics and not {"dice", "auroc"} & set(self.round_metrics):
            raise FederationError(
                f"evaluation: round_metrics are {list(self.round_metrics)}; dice (for whole images: auroc), which "
                "selects, must be in"
            )


@dataclass(frozen=True)
class Row:
    """One value. known: was this class annotated for training in this case; reason: why the value is undefined, or a
    note that the truth is empty."""

    split: str
    grid: str
    model: str
    round: int
    site: str
    case: str
    class_: str
    metric: str
    value: float | None
    known: bool
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        """With the key "class" for class_."""
        return {name.rstrip("_"): value for name, value in vars(self).items()}


@dataclass(frozen=True)
class Scores:
    """What the rows and histograms of one evaluation at one site may hold: `transport.egress.Scores`.

    columns: of a row -> the values that it may have; ranges: metric -> its least and largest value; most: rows;
    bins: of a histogram; cases: that are scored, None where it is not known; names: of classes with a histogram.
    """

    columns: Mapping[str, frozenset[Any]]
    ranges: Mapping[str, tuple[float, float]]
    most: int | None
    cases: int | None = None
    bins: int = 0
    names: frozenset[str] = frozenset()


COUNTS = ("n_positive", "n_negative")
"""The rows with which `classification.cells` begins a class."""


class EvaluationSite(Protocol):
    """What evaluation needs of a site."""

    name: str
    folder: Path

    def network(self, model: Tensors | None = None, name: str = "main") -> nn.Module: ...
    def volumes(self, split: str) -> Iterator[Volume]: ...


@dataclass(frozen=True)
class Candidate:
    """A model to evaluate at a site: its name, the round it is of, and the members that are it there. overlays: whether
    the site keeps pictures of its cases, in its own folder."""

    name: str
    round: int
    members: Sequence[Member]
    overlays: bool = False


def question(candidates: Sequence[Candidate]) -> dict[str, Any]:
    """The candidates as they travel to a site, {"models", "asked"}: tensors that several of them hold, the very same or
    equal ones, travel once. `asked` says of each member at which place of `models` its tensors are."""
    models: list[Tensors] = []
    asked = []
    for candidate in candidates:
        members = [
            {**member.to_payload(), "model": place_of(member.model, models)} for member in candidate.members
        ]
        asked.append({**vars(candidate), "members": members})
    return {"models": models, "asked": asked}


def place_of(model: Tensors, models: list[Tensors]) -> int:
    """Index of a model in a list; appends the model if the list does not hold an equal one."""
    for place, other in enumerate(models):
        if other is model or _equal(other, model):
            return place
    models.append(model)
    return len(models) - 1


def _equal(one: Tensors, other: Tensors) -> bool:
    return list(one) == list(other) and all(
        a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(one.values(), other.values(), strict=True)
    )


def candidates_of(models: Sequence[Tensors], asked: Sequence[Mapping[str, Any]]) -> list[Candidate]:
    """What `question` was given."""
    found = []
    for one in asked:
        members = [Member.from_payload({**told, "model": models[told["model"]]}) for told in one["members"]]
        found.append(Candidate(**{**one, "members": members}))
    return found


@dataclass(frozen=True)
class Evaluator:
    """Scores models at a site; the same at every site of a federation. patch, context: as `inference` takes them;
    orientation: where the axes of the federation's grid point, for pictures."""

    options: Evaluation
    patch: tuple[int, ...]
    context: int
    space: LabelSpace
    orientation: str = "RAS"

    def __post_init__(self) -> None:
        """Raises FederationError for a rule, or post-processing, of a class that the space does not hold, and for
        windows that do not fit the patch."""
        inference.check_windows(self.patch, self.options.inference)
        if self.options.postprocess:
            classes_of(self.space, self.options.postprocess)
        for name in self.options.empty if isinstance(self.options.empty, dict) else ():
            if name != "default" and name not in self.space.names:
                raise not_known("evaluation: empty: the class", name, [*self.space.names, "default"])

    def scores(
        self,
        site: str,
        cases: int | None,
        *,
        split: str,
        grid: str,
        metrics: Sequence[str],
        model: str = "",
        round: int = 0,
        asked: Sequence[Mapping[str, Any]] = (),
        **_: Any,
    ) -> Scores:
        """What `evaluate`, or `evaluate_several`, may answer to these arguments at a site with so many cases in the
        split."""
        rounds = {one["name"]: one["round"] for one in asked} or {model: round}
        models = set(rounds)
        if grid == "original" and self.options.postprocess:
            models |= {POST + name for name in rounds}
        names, findings = self.space.names, self.space.findings
        sets = {
            key: frozenset({value}) for key, value in {"split": split, "grid": grid, "site": site}.items()
        }
        sets |= {"model": frozenset(models), "round": frozenset(rounds.values())}
        sets |= {"class": frozenset((*names, *findings))}
        most = math.inf if cases is None else cases
        ranges = {metric: (0.0, LARGEST.get(metric, 1.0)) for metric in metrics}
        if findings:
            ranges |= dict.fromkeys(FINDING_METRICS, (0.0, 1.0)) | dict.fromkeys(COUNTS, (0.0, most))
        per_finding = len(FINDING_METRICS) + len(COUNTS)
        rows, more = len(names) * len(metrics) * len(models), len(findings) * per_finding * len(rounds)
        return Scores(sets, ranges, None if cases is None else cases * rows + more, cases)

    @at_site
    def evaluate(
        self,
        site: EvaluationSite,
        members: list[dict[str, Any]],
        split: str,
        model: str,
        round: int,
        grid: str,
        metrics: list[str],
        overlays: bool,
    ) -> dict[str, Any]:
        """Rows for every case of a split, and every class that has a truth there.

        members: of the model to evaluate, as `Member.to_payload` gives them. grid: "original" scores on the file's
        voxels, there also after `postprocess`, "federation" on the common grid. overlays: keep pictures in the site's own folder; they are never part
        of the answer, and need dice among the metrics.
        """
        given = [Member.from_payload(member) for member in members]
        return self._evaluate(site, [Candidate(model, round, given, overlays)], split, grid, metrics)

    @at_site
    def evaluate_several(
        self,
        site: EvaluationSite,
        models: list[Tensors],
        asked: list[dict[str, Any]],
        split: str,
        grid: str,
        metrics: list[str],
    ) -> dict[str, Any]:
        """As `evaluate`, of several models, one after the other in the rows. Each case is read once, and a net that
        several of them have as a member is asked once per case. models, asked: as `question` gives them."""
        return self._evaluate(site, candidates_of(models, asked), split, grid, metrics)

    def _evaluate(
        self,
        site: EvaluationSite,
        candidates: Sequence[Candidate],
        split: str,
        grid: str,
        metrics: Sequence[str],
    ) -> dict[str, Any]:
        folder = site.folder / "overlays" / split
        seen = [_Seen(candidate, self.space, folder, self.orientation) for candidate in candidates]
        nets = Nets(site.network)
        for volume in site.volumes(split):
            truth = volume.truth(grid)
            truth = whole_organs(truth, self.space) if volume.whole else truth
            predictions = inference.predict_each(
                [candidate.members for candidate in candidates],
                nets,
                volume.image,
                self.patch,
                self.context,
                self.options.inference,
                self.space,
            )
            for one, told in zip(seen, predictions, strict=True):
                self._score_case(one, told, volume, truth, (split, grid, site.name), metrics)
        rows: list[dict[str, Any]] = []
        for one in seen:
            rows += one.rows
            if one.pictures:
                one.pictures.close()
            place = (split, grid, one.candidate.name, one.candidate.round, site.name, "")
            for cell, known in one.findings.cells(self.options.inference.gate):
                rows.append(Row(*place, known=known, **cell).to_dict())
        return {"rows": rows}

    def _score_case(
        self,
        seen: "_Seen",
        told: inference.Prediction,
        volume: Volume,
        truth: np.ndarray,
        place: tuple[str, str, str],
        metrics: Sequence[str],
    ) -> None:
        """Adds what one model said of a case to what was seen of it. truth: on the grid that is scored; place: split,
        grid, site."""
        split, grid, site = place
        model, found = seen.candidate.name, told.voxels
        seen.findings.see(volume, told.findings)
        if grid == "original":
            prediction, spacing = volume.restore(found), volume.raw_spacing
        else:
            prediction, spacing = _decide(found, self.space.exclusive), volume.spacing
        if volume.whole:
            prediction = whole_organs(prediction, self.space)
        scored = {model: self._score(volume, prediction, truth, spacing, metrics)}
        if grid == "original" and self.options.postprocess:
            clean = postprocess(prediction, self.space, self.options.postprocess)
            scored[POST + model] = self._score(volume, clean, truth, spacing, metrics)
        for version, scores in scored.items():
            for s in scores:
                name, known = self.space.names[s.class_index], bool(volume.known[s.class_index])
                where = (split, grid, version, seen.candidate.round, site, volume.case)
                seen.rows.append(Row(*where, name, s.metric, s.value, known, s.reason).to_dict())
        if seen.pictures:
            plain = (s for s in scored[model] if s.metric == "dice")
            dice = {s.class_index: s.value for s in plain if s.value is not None}
            if dice:
                truth, labels = volume.truth("federation"), _decide(found, self.space.exclusive)
                if volume.whole:
                    truth, labels = whole_organs(truth, self.space), whole_organs(labels, self.space)
                seen.pictures.see(volume, truth, labels, dice)

    def _score(
        self,
        volume: Volume,
        prediction: np.ndarray,
        truth: np.ndarray,
        spacing: Sequence[float],
        metrics: Sequence[str],
    ) -> list[Score]:
        tolerance, empty = self.options.tolerance, self.options.empty
        scored = volume.scored.tolist()
        return score(
            prediction, truth, self.space, scored, spacing, metrics, tolerance=tolerance, empty=empty
        )


def _decide(probabilities: Tensor, exclusive: bool) -> np.ndarray:
    return (probabilities.argmax(0) if exclusive else (probabilities > 0.5)).to(torch.uint8).numpy()


class _Seen:
    """What was seen of a model so far at a site. folder: of all models' pictures; orientation: as of `Evaluator`."""

    def __init__(self, candidate: Candidate, space: LabelSpace, folder: Path, orientation: str) -> None:
        self.candidate, self.findings = candidate, Findings(space)
        self.rows: list[dict[str, Any]] = []
        own = folder / candidate.name.replace("/", "_")
        self.pictures = Pictures(space, own, orientation) if candidate.overlays else None


def own_score(evaluator: Any, metric: str) -> Callable[[Any, nn.Module], float | None]:
    """What `core.contract.Site.score` gives of a site and a net, by an evaluator of a task and the metric that chooses rounds."""

    def score(site: Any, net: nn.Module) -> float | None:
        members = [Member(tensors_of(net), tuple(sorted(site.labels.annotated))).to_payload()]
        what = {"split": "validation", "model": "", "round": 0, "grid": "federation", "metrics": [metric]}
        rows = evaluator.evaluate(site, members, **what, overlays=False)["rows"]
        return selection_score(rows, "classes", metric)

    return score


def selection_score(
    rows: Iterable[Mapping[str, Any]], weights: str = "classes", metric: str = "dice"
) -> float | None:
    """The validation score of a round on annotated classes only. None if no value is defined.

    metric: dice, or auroc for whole images. weights: "classes": mean over the classes of all sites (each site's class once, ConDistFL);
    "sites": the client-wise global index (Fed-MENU).
    """
    dice = select(rows, metric=metric, known=True)
    if weights == "sites":
        return client_wise_index(dice)
    # a class at a site is one entry
    return macro_over_classes([{**row, "class": (row["site"], row["class"])} for row in dice])
