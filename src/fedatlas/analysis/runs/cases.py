"""Whole cases with a truth, and batches cut from them.

Shapes: I input channels, C classes, *S the federation's grid, or H, W of an image.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedatlas.learning.augment import Augmentation, augment
from fedatlas.core.batch import Batch
from fedatlas.data.sampling import ClassVoxels, class_voxels, cut_case
from fedatlas.core.errors import FederationError
from fedatlas.federation.file import Federation
from fedatlas.core.labels import LabelSpace
from fedatlas.core.seeds import generator, seed_of


@dataclass(frozen=True, eq=False)
class Case:
    """image [I, *S] float32; target: class index [*S], masks [C, *S], or [C] of a whole image; known [C] bool: what the
    target tells; spacing: mm per voxel of the grid, () of an image."""

    name: str
    site: str
    image: Tensor
    target: np.ndarray
    known: Tensor
    spacing: tuple[float, ...] = ()

    @cached_property
    def voxels(self) -> tuple[np.ndarray, dict[int, list[int]]]:
        """Where its classes are, as `class_voxels` gives them; found once."""
        classes = [c for c, known in enumerate(self.known.tolist()) if known]
        exclusive = self.target.ndim == self.image.dim() - 1
        return class_voxels(self.target, [c for c in classes if c or not exclusive], exclusive)

    def mask(self, c: int) -> np.ndarray:
        """[*S] or, of a whole image, [] bool: where class c is."""
        indexed = bool(self.spacing) and self.target.ndim == self.image.dim() - 1
        return np.asarray(self.target == c if indexed else self.target[c] > 0)

    def taught(self, target: np.ndarray, known: Tensor) -> "Case":
        """The same image with other labels."""
        return replace(self, target=target, known=known)


def cases_of(
    source: Any, site: str, split: str, labels: Literal["annotated", "reference"], most: int | None = None
) -> list[Case]:
    """The cases of a site's split that have labels, in order of name. labels: only what the site annotates, or all that
    there is a truth for. most: so many at most, spread evenly over the names."""
    cases, classes = [], list(source.labels.space.foreground)
    for given in source.volumes(split):
        known = given.known if labels == "annotated" else given.scored
        if not bool(known[classes].any()):
            continue
        image = given.image.float()
        if not hasattr(given, "restore"):  # an image with labels of the whole
            target = (given.truth * known).numpy().astype(np.float32)
            cases.append(Case(given.case, site, image, target, known))
            continue
        target = given.truth("federation")
        if target.ndim == image.dim() - 1:
            target = np.where(known.numpy()[target], target, 0)
        else:
            target = target * known.numpy().reshape(-1, *[1] * (target.ndim - 1))
        cases.append(Case(given.case, site, image, target, known, tuple(given.spacing)))
    if most is not None and len(cases) > most:
        cases = [cases[place * len(cases) // most] for place in range(most)]
    return cases


class CaseBatches:
    """Batches of patches (or of whole images) of cases, chosen as in training: where no patch is class-balanced, every case
    comes once before any comes again. Every reading gives the same ones.

    parts: all that is random follows from them. Raises FederationError for no cases.
    """

    def __init__(
        self,
        cases: Sequence[Case],
        parts: tuple[str | int, ...],
        batch: int,
        steps: int,
        device: torch.device,
        federation: Federation,
        space: LabelSpace,
        augmentation: Augmentation,
    ) -> None:
        if not cases:
            raise FederationError("analyse: no case has such labels; take --labels annotated, or other sites")
        self.cases, self.parts, self.batch, self.steps, self.device = cases, parts, batch, steps, device
        self.federation, self.space, self.augmentation = federation, space, augmentation
        self.whole = space.level == "image"
        self.holders: dict[int, list[int]] = {}
        for number, case in enumerate(cases if not self.whole else ()):
            for c in case.voxels[1]:
                self.holders.setdefault(c, []).append(number)
        self.holders = dict(sorted(self.holders.items()))

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Batch]:
        return (self._make(step) for step in range(self.steps))

    def _make(self, step: int) -> Batch:
        rng = np.random.default_rng(seed_of(*self.parts, "patches", step))
        chosen, images, targets = [], [], []
        for place in range(self.batch):
            number, centre = self._choose(step * self.batch + place, rng)
            image, target = self._cut(self.cases[number], centre, rng)
            chosen.append(self.cases[number])
            images.append(image)
            targets.append(target)
        image, target = np.stack(images), np.stack(targets)
        how: dict[str, Any] = {"images": chosen[0].image.shape[0]}
        if not self.whole:
            axes = image.ndim - 2
            how["spacing"] = torch.tensor([case.spacing[:axes] for case in chosen])
        moved, labels = augment(
            torch.from_numpy(image).to(self.device),
            torch.from_numpy(target).to(self.device),
            self.augmentation,
            generator(*self.parts, "augment", step),
            **how,
        )
        known = torch.stack([case.known for case in chosen]).to(self.device)
        return Batch(moved, labels, known, [case.name for case in chosen])

    def _choose(self, count: int, rng: np.random.Generator) -> tuple[int, np.ndarray | None]:
        if self.holders and rng.random() < self.federation.sampling.balanced:
            classes = list(self.holders)
            c = classes[int(rng.integers(len(classes)))]
            number = self.holders[c][int(rng.integers(len(self.holders[c])))]
            rows, spans = self.cases[number].voxels
            first, stop = spans[c]
            of_class = rows[first:stop]
            return number, ClassVoxels(of_class, slices=len(self._patch) == 2).pick(of_class, rng)
        passes, place = divmod(count, len(self.cases))
        order = np.random.default_rng(seed_of(*self.parts, "order", passes)).permutation(len(self.cases))
        return int(order[place]), None

    @property
    def _patch(self) -> Sequence[int]:
        assert self.federation.preprocessing is not None
        return self.federation.preprocessing.patch

    def _cut(
        self, case: Case, centre: np.ndarray | None, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        if self.whole:
            return case.image.numpy(), case.target.astype(np.float32)
        assert self.federation.preprocessing is not None
        patch, context = self._patch, self.federation.preprocessing.context
        channels = len(case.image) * (2 * context + 1 if len(patch) == 2 else 1)
        image = np.empty((channels, *patch), np.float32)
        exclusive = self.space.exclusive
        target = np.empty(
            patch if exclusive else (len(self.space), *patch), np.int64 if exclusive else np.float32
        )
        cut_case(case.image.numpy(), case.target, patch, context, centre, rng, image, target)
        return image, target
