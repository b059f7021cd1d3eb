"""Scoring labels of voxels, and findings beside them: rows per case, class and metric, and pictures.

Shapes: C classes, F findings, *S spatial.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedatlas.core.batch import Volume
from fedatlas.core.contract import at_site
from fedatlas.core.labels import LabelSpace
from fedatlas.core.options import not_known
from fedatlas.core.tensors import Tensors
from fedatlas.evaluation.classification import Predictions, Threshold, cells
from fedatlas.evaluation.classification import score as score_findings
from fedatlas.evaluation.evaluate import (
    COUNTS,
    Candidate,
    EvaluationSite,
    Evaluator,
    Row,
    Scores,
    candidates_of,
)
from fedatlas.evaluation.metrics import LARGEST, Score, score, whole_organs
from fedatlas.evaluation.pictures import Pictures, folder_of
from fedatlas.evaluation.postprocess import classes_of, postprocess
from fedatlas.evaluation.statistics import POST
from fedatlas.learning import inference
from fedatlas.learning.inference import Nets

FINDING_METRICS = ("auroc", "ap", "sensitivity", "specificity")
"""Of every finding; the last two at the gate of inference, where there is one."""


@dataclass(frozen=True)
class VoxelEvaluator(Evaluator):
    """Scores segmentation: a row per case, of a finding per site. In the final evaluation on the files' voxels, there also
    after `postprocess`.

    patch, context: as `inference` takes them; orientation: where the axes of the federation's grid point, for pictures,
    which need dice among the metrics.
    """

    patch: tuple[int, ...]
    context: int
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
        rounds = {one["name"]: one["round"] for one in asked} or {model: round}
        models = set(rounds)
        if grid == "original" and self.options.postprocess:
            models |= {POST + name for name in rounds}
        names, findings = self.space.names, self.space.findings
        sets = self._columns(site, split, grid, models, rounds.values(), (*names, *findings))
        most = math.inf if cases is None else cases
        ranges = {metric: (0.0, LARGEST.get(metric, 1.0)) for metric in metrics}
        if findings:
            ranges |= dict.fromkeys(FINDING_METRICS, (0.0, 1.0)) | dict.fromkeys(COUNTS, (0.0, most))
        per_finding = len(FINDING_METRICS) + len(COUNTS)
        rows, more = len(names) * len(metrics) * len(models), len(findings) * per_finding * len(rounds)
        return Scores(sets, ranges, None if cases is None else cases * rows + more, cases)

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
        self._require(split, metrics)
        asked = [one | {"overlays": one["overlays"] and self.options.overlays} for one in asked]
        return self._evaluate(site, candidates_of(models, asked), split, grid, metrics)

    def _evaluate(
        self,
        site: EvaluationSite,
        candidates: Sequence[Candidate],
        split: str,
        grid: str,
        metrics: Sequence[str],
    ) -> dict[str, Any]:
        seen = [_Seen(candidate, self.space) for candidate in candidates]
        for one in seen:
            if one.candidate.overlays:
                folder = folder_of(site.folder, split, one.candidate.name)
                one.pictures = Pictures(self.space, folder, self.orientation)
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
            prediction, spacing = decide(found, self.space.exclusive), volume.spacing
        versions = {model: prediction}
        if grid == "original" and self.options.postprocess:
            versions[POST + model] = postprocess(prediction, self.space, self.options.postprocess)
        if volume.whole:
            versions = {version: whole_organs(labels, self.space) for version, labels in versions.items()}
        scored = {
            version: self._score(volume, labels, truth, spacing, metrics)
            for version, labels in versions.items()
        }
        for version, scores in scored.items():
            for s in scores:
                name, known = self.space.names[s.class_index], bool(volume.known[s.class_index])
                where = (split, grid, version, seen.candidate.round, site, volume.case)
                seen.rows.append(Row(*where, name, s.metric, s.value, known, s.reason).to_dict())
        if seen.pictures:
            plain = (s for s in scored[model] if s.metric == "dice")
            dice = {s.class_index: s.value for s in plain if s.value is not None}
            if dice:
                truth, labels = volume.truth("federation"), decide(found, self.space.exclusive)
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


def decide(probabilities: Tensor, exclusive: bool) -> np.ndarray:
    """Probabilities [C, *S] -> class index [*S] (uint8, int16 from 256 classes on), or masks [C, *S] uint8 of classes above
    one half."""
    if not exclusive:
        return (probabilities > 0.5).to(torch.uint8).numpy()
    return probabilities.argmax(0).to(torch.uint8 if len(probabilities) < 256 else torch.int16).numpy()


class _Seen:
    """What was seen of a model so far at a site."""

    def __init__(self, candidate: Candidate, space: LabelSpace) -> None:
        self.candidate, self.findings = candidate, Findings(space)
        self.rows: list[dict[str, Any]] = []
        self.pictures: Pictures | None = None


class Findings:
    """What a model says of the findings of the whole image, one case after another: one row per finding and metric of a
    site, not of a case."""

    def __init__(self, space: LabelSpace) -> None:
        self.space = space
        self.scores: list[np.ndarray] = []
        self.truth: list[np.ndarray] = []
        self.scored: list[np.ndarray] = []
        self.known: list[np.ndarray] = []
        self.cases: list[str] = []

    def see(self, volume: Volume, probabilities: Tensor | None) -> None:
        """probabilities [F]; None where the net tells none, and then nothing is scored."""
        if probabilities is None:
            return
        self.scores.append(probabilities.double().numpy())
        self.truth.append(volume.finding.numpy())
        self.scored.append(volume.finding_scored.numpy())
        self.known.append(volume.finding_known.numpy())
        self.cases.append(volume.case)

    def cells(self, gate: float | None) -> Iterator[tuple[dict[str, Any], bool]]:
        """(class, metric, value and reason of a row; does the site annotate the finding in any of these cases), for
        every finding that has a truth in any of them."""
        if not self.cases:
            return
        seen = Predictions(np.stack(self.scores), np.stack(self.truth), np.stack(self.scored), self.cases)
        limits = [Threshold(gate, None, "no gate is set")] * len(self.space.findings)
        known = np.stack(self.known)
        found = cells(score_findings(seen, FINDING_METRICS, limits), self.space.findings)
        for cell in found:
            f = self.space.findings.index(cell["class_"])
            if seen.known[:, f].any():
                yield cell, bool(known[:, f].any())
