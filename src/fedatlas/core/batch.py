"""What every loss and every method sees of the data.

Shapes: B batch, C classes, F findings, I input channels, *S spatial.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor


@dataclass
class Batch:
    """image [B, I, *S] float; target [B, *S] class index if exclusive, else [B, C] or [B, C, *S] in {0, 1};
    known [B, C] bool: is class c annotated in this sample; case: where each sample came from (never sent).
    finding [B, F] float in {0, 1} and finding_known [B, F] bool: findings of the whole image beside segmentation;
    None where the label space has none. along [B, C, *S] float: what a model said of each image before it was varied, as
    probabilities that were cropped and moved with it (see `core.contract.Site.with_predictions`); None: nothing was asked."""

    image: Tensor
    target: Tensor
    known: Tensor
    case: list[str]
    finding: Tensor | None = None
    finding_known: Tensor | None = None
    along: Tensor | None = None

    def part(self, samples: slice) -> "Batch":
        """Some of its samples."""
        cut = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: value[samples] for name, value in cut.items() if value is not None})

    def to(self, device: torch.device | str) -> "Batch":
        """The same batch on another device."""
        return replace(
            self,
            image=self.image.to(device, non_blocking=True),
            target=self.target.to(device, non_blocking=True),
            known=self.known.to(device, non_blocking=True),
            finding=None if self.finding is None else self.finding.to(device, non_blocking=True),
            finding_known=None
            if self.finding_known is None
            else self.finding_known.to(device, non_blocking=True),
            along=None if self.along is None else self.along.to(device, non_blocking=True),
        )


@dataclass(frozen=True)
class ImageSample:
    """One image with labels of the whole, as evaluation and prediction see it.

    image [I, H, W] float32, prepared as for training; truth [C] float32 in {0, 1}; known [C] bool: which classes the
    site annotates in it (what training sees); scored [C] bool: for which classes there is a truth. patient: whose.
    """

    case: str
    patient: str
    image: Tensor
    truth: Tensor
    known: Tensor
    scored: Tensor


@dataclass
class Volume(ABC):
    """One case as evaluation and prediction see it. X, Y, Z are the axes of the federation's grid (canonical
    orientation, the federation's spacing); the raw grid is that of the file."""

    case: str
    image: Tensor
    """[I, *S] float32 on the federation's grid, normalised as for training."""
    spacing: tuple[float, ...]
    """Millimetres per voxel on the federation's grid."""
    raw_spacing: tuple[float, ...]
    """Millimetres per voxel on the raw grid."""
    known: Tensor
    """[C] bool: which classes the site annotates in this case (what training sees)."""
    scored: Tensor
    """[C] bool: for which classes there is a truth to score against: `known`, or what the reference holds."""
    whole: bool
    """Does the truth hold organs with their lesions, so that a prediction's lesions count as their organ?"""
    finding: Tensor
    """[F] float32 in {0, 1}: the truth of the findings; nothing meant where `finding_scored` is False."""
    finding_known: Tensor
    """[F] bool: as `known`."""
    finding_scored: Tensor
    """[F] bool: as `scored`."""

    @abstractmethod
    def truth(self, grid: str) -> np.ndarray:
        """The truth on the grid "federation" or "original": class index [*S] if exclusive, else masks [C, *S].
        Only the classes in `scored` mean anything."""

    @abstractmethod
    def restore(self, probabilities: Tensor) -> np.ndarray:
        """Probabilities [C, *S] on the federation's grid -> labels on the raw grid (class index, or masks [C, …]):
        probabilities are resampled first and decided after."""
