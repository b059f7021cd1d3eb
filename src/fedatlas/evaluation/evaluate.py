"""What is measured at a site, and choosing among rounds."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import nn

from fedatlas.core.contract import Member, at_site
from fedatlas.core.errors import FederationError
from fedatlas.core.labels import LabelSpace, SiteLabels
from fedatlas.core.options import option, options
from fedatlas.core.tensors import Tensors, tensors_of
from fedatlas.evaluation.metrics import EmptyPolicy
from fedatlas.evaluation.postprocess import Postprocess
from fedatlas.evaluation.statistics import client_wise_index, macro_over_classes, select
from fedatlas.learning.inference import Inference


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
        "sites; of 100 or more the first and the last are split further, by halves towards 0 and 1.",
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
        if self.round_metrics and not {"dice", "auroc"} & set(self.round_metrics):
            raise FederationError(
                f"evaluation: round_metrics are {list(self.round_metrics)}; dice (for whole images: auroc), which "
                "selects, must be in"
            )


AFTER_TRAINING = ("metrics", "postprocess", "overlays", "draws", "threshold")
"""The options that the final evaluation alone takes: where nothing else was changed, a run is evaluated again and not trained."""


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
    """What evaluation needs of a site. volumes: its cases with a truth, as `core.batch.Volume` or `ImageSample`."""

    name: str
    folder: Path

    @property
    def labels(self) -> SiteLabels: ...
    def network(self, model: Tensors | None = None, name: str = "main") -> nn.Module: ...
    def volumes(self, split: str) -> Iterator[Any]: ...


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
class Evaluator(ABC):
    """Scores models at a site; the same at every site of a federation. What depends on what the labels are of stands in
    `evaluation.voxels` and `evaluation.images`."""

    options: Evaluation
    space: LabelSpace

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
        **extra: Any,
    ) -> dict[str, Any]:
        """{"rows", …} of all cases of a split, for every class that has a truth.

        members: of the model to evaluate, as `Member.to_payload` gives them. grid: "original" is the final evaluation, on
        the files' own grids; "federation" is a validation between rounds, on the common one. overlays: keep pictures in
        the site's own folder; they are never part of the answer. extra: what `_evaluate` takes beside these, see
        `federation.tasks.Task.extra`.
        """
        self._require(split, metrics)
        given = [Member.from_payload(member) for member in members]
        candidate = Candidate(model, round, given, overlays and self.options.overlays)
        return self.evaluate_here(site, candidate, split, grid, metrics, **extra)

    def evaluate_here(
        self,
        site: EvaluationSite,
        candidate: Candidate,
        split: str,
        grid: str,
        metrics: Sequence[str],
        **extra: Any,
    ) -> dict[str, Any]:
        """As `evaluate`, of any split and by any metric: for rows that stay on the machine that has the cases."""
        return self._evaluate(site, [candidate], split, grid, metrics, **extra)

    def _require(self, split: str, metrics: Sequence[str]) -> None:
        """Raises FederationError unless this is an evaluation that the federation file has, which is what a site agreed to: never of
        cases that train, and by its metrics alone."""
        if split not in ("validation", "test"):
            raise FederationError(f"asked to evaluate the split {split[:40]!r}; allowed: validation, test")
        # outside a federation there is none
        known = dict.fromkeys((*self.options.metrics, *self.options.round_metrics))
        if known and (unknown := [metric for metric in metrics if metric not in known]):
            raise FederationError(
                f"asked to evaluate by {', '.join(metric[:40] for metric in unknown[:5])}; the federation file has: {', '.join(known)}"
            )

    @abstractmethod
    def _evaluate(
        self,
        site: EvaluationSite,
        candidates: Sequence[Candidate],
        split: str,
        grid: str,
        metrics: Sequence[str],
    ) -> dict[str, Any]:
        """`evaluate` of several models."""

    @abstractmethod
    def scores(self, site: str, cases: int | None, **asked: Any) -> Scores:
        """What the rows may hold in which a site with so many cases in the split (None: not known) answers to these
        arguments of any function that is marked `@at_site`."""

    def _columns(
        self,
        site: str,
        split: str,
        grid: str,
        models: Iterable[str],
        rounds: Iterable[int],
        classes: Iterable[str],
    ) -> dict[str, frozenset[Any]]:
        """`Scores.columns` of any kind of labels."""
        columns = {"split": [split], "grid": [grid], "model": models, "round": rounds, "site": [site]}
        return {key: frozenset(values) for key, values in (columns | {"class": classes}).items()}


def own_score(evaluator: Any, metric: str) -> Callable[[Any, nn.Module], float | None]:
    """What `core.contract.Site.score` gives of a site and a net, by an evaluator of a task and the metric that chooses rounds."""

    def score(site: Any, net: nn.Module) -> float | None:
        classes, findings = (tuple(sorted(of)) for of in (site.labels.annotated, site.labels.findings))
        members = [Member(tensors_of(net), classes, findings=findings).to_payload()]
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
