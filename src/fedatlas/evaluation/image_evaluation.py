"""Scoring classifiers of whole images at a site: rows per class, histograms that sites can add up, and pictures.

Shapes: N images, C classes, I input channels, H, W the image.
"""

import itertools
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

import numpy as np
import torch
from torch import Tensor, nn

from fedatlas.analysis.gradcam import gradcam, has_maps
from fedatlas.data.batch import ImageSample
from fedatlas.errors import DataError
from fedatlas.evaluation.classification import (
    Histogram,
    Predictions,
    Threshold,
    bootstrap,
    cells,
    equal_edges,
    score,
)
from fedatlas.evaluation.evaluate import Evaluation, Row
from fedatlas.labels import LabelSpace, SiteLabels
from fedatlas.method import at_site
from fedatlas.seeds import seed_of
from fedatlas.tensors import Tensors

SILENT = "no model of the evaluation speaks for this class"
"""The reason of a class that every member leaves out."""

SHOWN = 4
"""Pictures of each kind that a site keeps per class."""


class ImageSite(Protocol):
    """What evaluation needs of a site."""

    name: str
    folder: Path

    @property
    def labels(self) -> SiteLabels: ...
    def network(self, model: Tensors | None = None, name: str = "main") -> nn.Module: ...
    def volumes(self, split: str) -> Iterator[ImageSample]: ...


@dataclass(frozen=True)
class ImageEvaluator:
    """Scores models at a site; the same at every site of a federation."""

    options: Evaluation
    space: LabelSpace

    @at_site
    def evaluate(
        self,
        site: ImageSite,
        members: list[dict[str, Any]],
        split: str,
        model: str,
        round: int,
        grid: str,
        metrics: list[str],
        overlays: bool,
        thresholds: list[float | None] | None = None,
    ) -> dict[str, Any]:
        """{"rows", "histograms"} over all images of a split, for every class that has a truth at the site.

        members: of the model to evaluate, {"model": tensors, "classes": those it may speak for or None}; a class's
        probability is the mean over the members that may speak for it. grid: "original" is the final evaluation,
        which adds intervals by patient (<metric>_low, <metric>_high, and <metric>_undefined, the share of resamples
        without a value) and the histograms; "federation" is a validation between rounds. thresholds: per class, None
        where there is none. overlays: keep pictures in the site's own folder; they are never part of the answer.

        A row is of the whole site: its case is "". Each class begins with n_positive and n_negative. All metrics of a
        class are resampled alike. In the final evaluation every batch is full, so that what a net says of an image
        does not depend on how many others there are.

        Raises DataError for images of different shapes, ValueError for an unknown metric or another number of
        thresholds than classes.
        """
        final = grid == "original"
        nets = [site.network(member["model"]) for member in members]
        speaking = [[_speaks(member, c) for member in members] for c in range(len(self.space))]
        seen = self._predict(site, nets, np.array(speaking, dtype=bool), split, full=final)
        limits = _limits(thresholds, len(self.space))
        rows: list[dict[str, Any]] = []
        histograms: dict[str, Any] = {}
        edges = equal_edges(self.options.histogram)
        for c, name in enumerate(self.space.names):
            if not seen.known[:, c].any():
                continue
            silent = not any(speaking[c])
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
            place: Any = {
                "split": split,
                "grid": grid,
                "model": model,
                "round": round,
                "site": site.name,
                "case": "",
            }
            rows += [Row(**place, known=known, **cell).to_dict() for cell in columns]
        if overlays:
            folder = site.folder / "overlays" / split / model.replace("/", "_")
            self._keep_pictures(site, nets, speaking, seen, limits, split, folder)
        return {"rows": rows, "histograms": histograms}

    def _predict(
        self, site: ImageSite, nets: Sequence[nn.Module], speaking: np.ndarray, split: str, *, full: bool
    ) -> Predictions:
        """scores float64; those of a class that nobody speaks for are NaN. speaking [C, members]. full: fill the last
        batch up, as the bits of a net's output depend on how many images it is given at once."""
        scores, truth, known, patients = [], [], [], []
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
            given = np.stack([_probabilities(net, images)[: len(batch)] for net in nets])
            scores.append(_merged(given, speaking))
            truth.append(torch.stack([sample.truth for sample in batch]).numpy())
            known.append(torch.stack([sample.scored for sample in batch]).numpy())
            patients += [sample.patient for sample in batch]
        if not scores:
            empty = np.zeros((0, len(self.space)))
            return Predictions(empty, empty, empty.astype(bool), [])
        return Predictions(np.concatenate(scores), np.concatenate(truth), np.concatenate(known), patients)

    def _keep_pictures(
        self,
        site: ImageSite,
        nets: Sequence[nn.Module],
        speaking: Sequence[Sequence[bool]],
        seen: Predictions,
        limits: Sequence[Threshold],
        split: str,
        folder: Path,
    ) -> None:
        """Of each class the images with the highest and the lowest scores among positives and among negatives.

        <class>--<present|absent>-<high|low>-<number>.npz, the name percent-encoded, the number from 1, the most
        extreme first; the whole folder replaces that of an earlier evaluation.
        """
        chosen: dict[int, list[tuple[int, str]]] = {}
        for c in range(len(self.space)):
            for position, kind in _extremes(seen, c):
                chosen.setdefault(position, []).append((c, kind))
        scratch = folder.with_name(f".{folder.name}.part")
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        last = max(chosen, default=-1)
        for position, sample in enumerate(islice(site.volumes(split), last + 1)):
            if position not in chosen:
                continue
            image = _shown(sample.image)
            for c, kind in chosen[position]:
                limit = limits[c].value
                told: dict[str, Any] = {
                    "image": image,
                    "case": sample.case,
                    "class": self.space.names[c],
                    "score": float(seen.scores[position, c]),
                    "truth": bool(seen.truth[position, c] == 1),
                    "threshold": np.nan if limit is None else limit,
                }
                cam = _cam(nets, speaking[c], sample.image, c)
                if cam is not None:
                    told["cam"] = cam
                name = f"{quote(self.space.names[c], safe=' ')}--{kind}.npz"
                with (scratch / name).open("wb") as file:
                    np.savez_compressed(file, **told)
        _replace(folder, scratch)


def _speaks(member: Mapping[str, Any], c: int) -> bool:
    return member["classes"] is None or c in member["classes"]


def _limits(thresholds: Sequence[float | None] | None, classes: int) -> list[Threshold]:
    if thresholds is None:
        return [Threshold(None, None, "none was given")] * classes
    if len(thresholds) != classes:
        raise ValueError(f"{len(thresholds)} thresholds; expected one for each of {classes} classes")
    return [Threshold(value) for value in thresholds]


@torch.no_grad()
def _probabilities(net: nn.Module, images: Tensor) -> np.ndarray:
    """[N, C] float64 of images [N, I, H, W]; the net is left in evaluation mode."""
    net.eval()
    device = next((p.device for p in net.parameters()), images.device)
    return net(images.to(device)).double().sigmoid().cpu().numpy()


def _merged(given: np.ndarray, speaking: np.ndarray) -> np.ndarray:
    """[members, N, C] -> [N, C]; NaN for a class that nobody speaks for. speaking [C, members]."""
    found = np.full(given.shape[1:], np.nan)
    for c, who in enumerate(speaking):
        if who.any():
            found[:, c] = given[who, :, c].mean(0)
    return found


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
    """[I, H, W] -> [H, W] float32 in 0..1, the mean of the channels between its 0.5th and 99.5th percentile."""
    grey = image.float().mean(0).numpy()
    low, high = np.percentile(grey, [0.5, 99.5])
    return np.clip((grey - low) / max(high - low, 1e-6), 0, 1).astype(np.float32)


def _cam(nets: Sequence[nn.Module], speaking: Sequence[bool], image: Tensor, c: int) -> np.ndarray | None:
    """The mean of the members' Grad-CAM maps, its largest value 1; None where no member's net has maps."""
    maps = [
        gradcam(net, image, c) for net, speaks in zip(nets, speaking, strict=True) if speaks and has_maps(net)
    ]
    if not maps:
        return None
    mean = torch.stack(maps).mean(0)
    return (mean / mean.max() if mean.max() > 0 else mean).numpy()


def _replace(folder: Path, scratch: Path) -> None:
    """Puts a whole folder in the place of another; a reader finds one of the two, or for a moment none."""
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.rename(folder, old)
    os.rename(scratch, folder)
    shutil.rmtree(old, ignore_errors=True)
