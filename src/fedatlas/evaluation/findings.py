"""Scoring findings of the whole image beside segmentation: one row per finding and metric of a site, not of a case.

Shapes: N cases, F findings.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import Tensor

from fedatlas.core.batch import Volume
from fedatlas.core.labels import LabelSpace
from fedatlas.evaluation.classification import Predictions, Threshold, cells, score

METRICS = ("auroc", "ap", "sensitivity", "specificity")
"""Of every finding; the last two at the gate of inference, where there is one."""


class Findings:
    """What a model says of the findings of one case after another."""

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
        found = cells(score(seen, METRICS, limits), self.space.findings)
        for cell in found:
            f = self.space.findings.index(cell["class_"])
            if seen.known[:, f].any():
                yield cell, bool(known[:, f].any())
