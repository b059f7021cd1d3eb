"""Scoring classifiers of whole images at a site: rows per class, histograms that sites can add up, and pictures.

Shapes: N images, C classes, I input channels, H, W the image.
"""

import itertools
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import torch
from torch import Tensor, nn

from fedatlas.analysis.gradcam import gradcam, has_maps
from fedatlas.core.contract import Member
from fedatlas.core.errors import DataError
from fedatlas.core.seeds import seed_of
from fedatlas.evaluation.classification import (
    Histogram,
    Predictions,
    Threshold,
    bootstrap,
    cells,
    score,
    score_edges,
)
from fedatlas.evaluation.evaluate import COUNTS, Candidate, EvaluationSite, Evaluator, Row, Scores
from fedatlas.evaluation.pictures import folder_of, grey, put_in_place
from fedatlas.learning import inference

SILENT = "no model of the evaluation speaks for this class"
"""The reason of a class that every member leaves out."""

SHOWN = 4
"""Pictures of each kind that a site keeps per class."""


@dataclass(frozen=True)
class ImageEvaluator(Evaluator):
    """Scores findings of whole images, a row per site."""

    def scores(
        self,
        site: str,
        cases: int | None,
        *,
        split: str,
        model: str,
        round: int,
        grid: str,
        metrics: Sequence[str],
        **_: Any,
    ) -> Scores:
        names = frozenset(self.space.names)
        sets = self._columns(site, split, grid, [model], [round], names) | {"case": frozenset({""})}
        ends = ("", "_low", "_high", "_undefined")
        ranges = {f"{metric}{end}": (0.0, 1.0) for metric in metrics for end in ends}
        ranges |= dict.fromkeys(COUNTS, (0.0, math.inf if cases is None else cases))
        most = len(names) * len(ranges)
        return Scores(sets, ranges, most, cases, self.options.histogram, names)

    def _evaluate(
        self,
        site: EvaluationSite,
        candidates: Sequence[Candidate],
        split: str,
        grid: str,
        metrics: Sequence[str],
        thresholds: list[float | None] | None = None,
    ) -> dict[str, Any]:
        """{"rows", "histograms"}; a class's probability is the mean over the members that may speak for it, or that of the
        one that is chosen for the image.

        The final evaluation adds intervals by patient (<metric>_low, <metric>_high, and <metric>_undefined, the share of
        resamples without a value) and the histograms. thresholds: per class, None where there is none.

        A row is of the whole site: its case is "". Each class begins with n_positive and n_negative. All metrics of a
        class are resampled alike. In the final evaluation every batch is full, so that what a net says of an image
        does not depend on how many others there are.

        Raises DataError for images of different shapes, ValueError for an unknown metric or another number of
        thresholds than classes.
        """
        (candidate,) = candidates  # the histograms and thresholds of an answer are of one model
        model, members = candidate.name, candidate.members
        final = grid == "original"
        panel = Panel(members, [site.network(member.model, member.net) for member in members])
        seen, chosen = self._predict(site, panel, split, full=final)
        limits = _limits(thresholds, len(self.space))
        rows: list[dict[str, Any]] = []
        histograms: dict[str, Any] = {}
        edges = score_edges(self.options.histogram)
        for c, name in enumerate(self.space.names):
            if not seen.known[:, c].any():
                continue
            silent = not panel.speaks(c)
            found = _one_class(seen, c)
            cut = [limits[c]]
            columns = cells(score(found, metrics, cut, bins=self.options.bins), [name])
            if final and self.options.draws:
                for metric in metrics:
                    rng = np.random.default_rng(seed_of("bootstrap", site.name, split, model, name))
                    drawn = bootstrap(
                        found,
                        metric,
                        rng,
                        class_index=0,
                        thresholds=cut,
                        bins=self.options.bins,
                        draws=self.options.draws,
                    )
                    columns += drawn.cells(metric, name)
            if silent:
                columns = [_unsaid(cell) for cell in columns]
            elif final:
                histograms[name] = Histogram.of(*found.of_class(0), edges).to_dict()
            known = c in site.labels.annotated
            place = split, grid, model, candidate.round, site.name, ""
            rows += [Row(*place, known=known, **cell).to_dict() for cell in columns]
        if candidate.overlays:
            folder = folder_of(site.folder, split, model)
            self._keep_pictures(site, panel, seen, chosen, limits, split, folder)
        return {"rows": rows, "histograms": histograms}

    def _predict(
        self, site: EvaluationSite, panel: "Panel", split: str, *, full: bool
    ) -> tuple[Predictions, list[int | None]]:
        """scores float64, as a panel's; and which model was chosen for every image. full: fill the last batch up, as
        the bits of a net's output depend on how many images it is given at once."""
        scores, truth, known, patients = [], [], [], []
        chosen: list[int | None] = []
        samples = iter(site.volumes(split))
        while batch := list(itertools.islice(samples, self.options.batch)):
            shapes = {tuple(sample.image.shape) for sample in batch}
            if len(shapes) > 1:
                raise DataError(
                    f"site {site.name}: the images of {split} have the shapes "
                    f"{', '.join(map(str, sorted(shapes)))}; one is needed, prepare the site again"
                )
            images = torch.stack([sample.image for sample in batch])
            if full and len(batch) < self.options.batch:
                images = torch.cat([images, images[:1].expand(self.options.batch - len(batch), -1, -1, -1)])
            found = panel.predict(images)
            scores.append(found.scores[: len(batch)])
            chosen += found.chosen[: len(batch)]
            truth.append(torch.stack([sample.truth for sample in batch]).numpy())
            known.append(torch.stack([sample.scored for sample in batch]).numpy())
            patients += [sample.patient for sample in batch]
        if not scores:
            empty = np.zeros((0, len(self.space)))
            return Predictions(empty, empty, empty.astype(bool), []), chosen
        seen = Predictions(np.concatenate(scores), np.concatenate(truth), np.concatenate(known), patients)
        return seen, chosen

    def _keep_pictures(
        self,
        site: EvaluationSite,
        panel: "Panel",
        seen: Predictions,
        chosen: Sequence[int | None],
        limits: Sequence[Threshold],
        split: str,
        folder: Path,
    ) -> None:
        """Of each class the images with the highest and the lowest scores among positives and among negatives.

        <class>--<present|absent>-<high|low>-<number>.npz, the name percent-encoded, the number from 1, the most
        extreme first; the whole folder replaces that of an earlier evaluation.
        """
        shown: dict[int, list[tuple[int, str]]] = {}
        for c in range(len(self.space)):
            for position, kind in _extremes(seen, c):
                shown.setdefault(position, []).append((c, kind))
        scratch = folder.with_name(f".{folder.name}.part")
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        last = max(shown, default=-1)
        for position, sample in enumerate(islice(site.volumes(split), last + 1)):
            if position not in shown:
                continue
            image = _shown(sample.image)
            for c, kind in shown[position]:
                limit = limits[c].value
                told: dict[str, Any] = {
                    "image": image,
                    "case": sample.case,
                    "class": self.space.names[c],
                    "score": float(seen.scores[position, c]),
                    "truth": bool(seen.truth[position, c] == 1),
                    "threshold": np.nan if limit is None else limit,
                }
                cam = _cam(panel.speaking(c, chosen[position]), sample.image, c)
                if cam is not None:
                    told["cam"] = cam
                name = f"{quote(self.space.names[c], safe=' ')}--{kind}.npz"
                with (scratch / name).open("wb") as file:
                    np.savez_compressed(file, **told)
        put_in_place(scratch, folder)


@dataclass(frozen=True)
class Said:
    """What a panel says of images. scores [N, C] float64, NaN for a class that nobody speaks for. chosen: of every
    image the output of the selector, from 0, whose model spoke; None where none was chosen."""

    scores: np.ndarray
    chosen: list[int | None]


class Panel:
    """The members of an evaluation as one classifier; nets: theirs, one each."""

    def __init__(self, members: Sequence[Member], nets: Sequence[nn.Module]) -> None:
        self.members, self.nets, self.selector = members, nets, inference.chooser(members)

    def speaking(self, c: int, chosen: int | None) -> list[nn.Module]:
        """The nets that speak for a class in an image for which this was chosen."""
        who = inference.speakers(self.members, chosen)
        return [self.nets[i] for i in who if self._may(i, c)]

    def speaks(self, c: int) -> bool:
        """Can anybody speak for a class?"""
        # those that a selector chooses among speak for all, and are chosen in some images only
        return bool(self.speaking(c, None))

    def predict(self, images: Tensor) -> Said:
        """Of images [N, I, H, W]. All nets are given all of them: what one says of an image depends on no choice."""
        chosen: list[int | None] = [None] * len(images)
        if self.selector is not None:
            told = torch.from_numpy(_outputs(self.nets[self.selector], images)).softmax(1)
            chosen = [inference.chosen_by(of_one, self.members) for of_one in told]
        scores: np.ndarray | None = None
        for choice in dict.fromkeys(chosen):
            where = [i for i, of_one in enumerate(chosen) if of_one == choice]
            who = inference.speakers(self.members, choice)
            given = np.stack([_probabilities(self.nets[i], images) for i in who])
            if scores is None:
                scores = np.full(given.shape[1:], np.nan)
            for c in range(given.shape[2]):
                may = [j for j, i in enumerate(who) if self._may(i, c)]
                if may:
                    scores[where, c] = given[may, :, c].mean(0)[where]
        assert scores is not None
        return Said(scores, chosen)

    def _may(self, place: int, c: int) -> bool:
        own = self.members[place].classes
        return own is None or c in own


def _limits(thresholds: Sequence[float | None] | None, classes: int) -> list[Threshold]:
    if thresholds is None:
        return [Threshold(None, None, "none was given")] * classes
    if len(thresholds) != classes:
        raise ValueError(f"{len(thresholds)} thresholds; expected one for each of {classes} classes")
    return [Threshold(value) for value in thresholds]


@torch.no_grad()
def _outputs(net: nn.Module, images: Tensor) -> np.ndarray:
    """[N, outputs] float64 of images [N, I, H, W]; the net is left in evaluation mode."""
    net.eval()
    device = next((p.device for p in net.parameters()), images.device)
    return net(images.to(device)).double().cpu().numpy()


def _probabilities(net: nn.Module, images: Tensor) -> np.ndarray:
    """[N, C] float64."""
    return torch.from_numpy(_outputs(net, images)).sigmoid().numpy()


def _one_class(seen: Predictions, c: int) -> Predictions:
    """[N, 1]."""
    scores, truth, known = (array[:, c : c + 1] for array in (seen.scores, seen.truth, seen.known))
    return Predictions(scores, truth, known, seen.patients)


def _unsaid(cell: Mapping[str, Any]) -> dict[str, Any]:
    return dict(cell) if cell["value"] is not None else {**cell, "reason": SILENT}


def _extremes(seen: Predictions, c: int) -> list[tuple[int, str]]:
    """(position, kind) of the pictures of a class; none is of two kinds."""
    scores = seen.scores[:, c]
    found = []
    for value, truth in ((1, "present"), (0, "absent")):
        where = np.flatnonzero(seen.known[:, c] & (seen.truth[:, c] == value) & np.isfinite(scores))
        ranked = where[np.argsort(-scores[where], kind="stable")].tolist()
        high = ranked[: min(SHOWN, (len(ranked) + 1) // 2)]
        low = ranked[::-1][: min(SHOWN, len(ranked) // 2)]
        for end, positions in (("high", high), ("low", low)):
            found += [(position, f"{truth}-{end}-{n}") for n, position in enumerate(positions, 1)]
    return found


def _shown(image: Tensor) -> np.ndarray:
    """[I, H, W] -> [H, W] float32 in 0..1, the mean of the channels."""
    return grey(image.float().mean(0).numpy())


def _cam(nets: Sequence[nn.Module], image: Tensor, c: int) -> np.ndarray | None:
    """The mean of the nets' Grad-CAM maps, its largest value 1; None where no net has maps, or its logits are not made
    of their means."""
    maps = [gradcam(net, image, c) for net in nets if has_maps(net) and net.neck is None]
    if not maps:
        return None
    mean = torch.stack(maps).mean(0)
    return (mean / mean.max() if mean.max() > 0 else mean).numpy()
