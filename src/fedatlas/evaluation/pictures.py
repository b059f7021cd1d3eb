"""Whole slices of cases, for pictures that stay at a site.

Shapes: C classes of the foreground, X, Y, Z voxels, H rows and W columns of a slice.
"""

import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from nibabel import orientations

from fedatlas.core.batch import Volume
from fedatlas.core.labels import LabelSpace

PLANES = ("axial", "coronal", "sagittal")
"""Of a case in space. Seen from below, from the front, and from the left: the patient's right, or front, is on the left."""

CASE = "case"
"""Begins the names of the pictures that were chosen by the mean over the classes of a case."""


_NAME = re.compile(r"\w[\w.-]*")


def folder_of(site: Path, split: str, model: str) -> Path:
    """Where a site keeps the pictures of a model. site: its private folder. Raises ValueError for a split or a model, which the
    server names, that could lead out of it."""
    parts = [split, *model.split("/", 1)]
    if not all(_NAME.fullmatch(part) for part in parts):
        raise ValueError(
            f"pictures of the split {split!r}, model {model!r}; names have letters, digits, _, . and -"
        )
    return site / "overlays" / split / "_".join(parts[1:])


class Pictures:
    """Pictures of a site's worst, median and best case, and of the worst case of every class, with all classes in them; in a
    folder that is replaced when all cases were seen."""

    def __init__(self, space: LabelSpace, folder: Path, orientation: str) -> None:
        self.space, self.folder, self.orientation = space, folder, orientation
        self.scratch = folder.with_name(f".{folder.name}.part")
        self.cases: list[tuple[float, str, Path]] = []
        self.worst: dict[int, tuple[float, str]] = {}
        shutil.rmtree(self.scratch, ignore_errors=True)
        self.scratch.mkdir(parents=True)

    def see(
        self, volume: Volume, truth: np.ndarray, prediction: np.ndarray, dice: Mapping[int, float]
    ) -> None:
        """truth, prediction: on the federation's grid. dice: class -> its value in this case, where it is defined; a
        case without one is left out."""
        if not dice:
            return
        mean = float(np.mean(list(dice.values())))
        path = self.scratch / f"seen-{len(self.cases)}.npz"
        self._write(path, volume, truth, prediction, dice, mean, None)
        self.cases.append((mean, volume.case, path))
        for c, value in dice.items():
            if c not in self.worst or (value, volume.case) < self.worst[c]:
                self.worst[c] = (value, volume.case)
                path = self.scratch / f"class-{quote(self.space.names[c], safe=' ')}--worst.npz"
                self._write(path, volume, truth, prediction, dice, value, c)

    def close(self) -> None:
        """Puts the chosen pictures in place: case--<worst|median|best>.npz and class-<class>--worst.npz, the name
        percent-encoded. Two cases have no median, one is the best."""
        ranked = [path for _, _, path in sorted(self.cases)]
        chosen = {"best": ranked[-1]} if ranked else {}
        if len(ranked) > 1:
            chosen["worst"] = ranked[0]
        if len(ranked) > 2:
            chosen["median"] = ranked[(len(ranked) - 1) // 2]
        for rank, path in chosen.items():
            path.rename(self.scratch / f"{CASE}--{rank}.npz")
        for path in self.scratch.glob("seen-*.npz"):
            path.unlink()
        put_in_place(self.scratch, self.folder)

    def _write(
        self,
        path: Path,
        volume: Volume,
        truth: np.ndarray,
        prediction: np.ndarray,
        dice: Mapping[int, float],
        value: float,
        around: int | None,
    ) -> None:
        space = self.space
        told = {
            "case": volume.case,
            "value": value,
            "class": "" if around is None else space.names[around],
            "names": np.array([space.names[c] for c in space.foreground], dtype=str),
            "dice": np.array([dice.get(c, np.nan) for c in space.foreground]),
            "scored": np.array([bool(volume.scored[c]) for c in space.foreground]),
        }
        drawn, marked = masks_of(truth, space), masks_of(prediction, space)
        drawn &= told["scored"].reshape(-1, *[1] * (drawn.ndim - 1))
        chosen = None if around is None else list(space.foreground).index(around)
        image = volume.image[0].float().numpy()
        with path.open("wb") as file:
            np.savez_compressed(
                file, **told, **planes(image, drawn, marked, volume.spacing, self.orientation, chosen)
            )


def put_in_place(scratch: Path, folder: Path) -> None:
    """Puts a whole folder in the place of another; a reader finds one of the two, or for a moment none."""
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    scratch.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def masks_of(labels: np.ndarray, space: LabelSpace) -> np.ndarray:
    """Labels on one grid, class index [*S] if exclusive, else masks [C, *S], as bool masks [C, *S] of the foreground."""
    return np.stack([labels == c if space.exclusive else labels[c] > 0 for c in space.foreground])


def planes(
    image: np.ndarray,
    truth: np.ndarray,
    prediction: np.ndarray,
    spacing: Sequence[float],
    orientation: str,
    around: int | None = None,
) -> dict[str, Any]:
    """Slices of a case as viewers show them, by "<plane>-<what>": image [H, W] in 0..1, truth and prediction [C, H, W]
    bool, spacing [2] in mm.

    image [*S]; truth, prediction [C, *S]; orientation: where the axes point. Of a picture, or of a single slice, there is
    one plane. around: the class whose largest areas decide the slices; None: as many classes as possible, each area over
    the largest of its class. Where there is no truth, the prediction decides.
    """
    image = grey(image)
    if image.ndim == 3:
        image = to_ras(image, orientation)
        truth, prediction = (
            np.stack([to_ras(mask, orientation) for mask in masks]) for masks in (truth, prediction)
        )
        spacing = ras_spacing(spacing, orientation)
    else:
        image, truth, prediction = image[..., None], truth[..., None], prediction[..., None]
        spacing = (*spacing[:2], 1.0)
    deciding = truth if truth.any() else prediction
    if around is not None:
        deciding = truth if truth[around].any() else prediction
        deciding = deciding[around : around + 1]
    found: dict[str, Any] = {}
    for plane, axis in zip(PLANES, (2, 1, 0), strict=True):
        if image.shape[2] == 1 and axis != 2:
            continue
        others = tuple(1 + other for other in range(3) if other != axis)
        areas = deciding.sum(others, dtype=float)
        at = int((areas / np.maximum(areas.max(1, keepdims=True), 1)).sum(0).argmax())
        rest = [step for other, step in enumerate(spacing) if other != axis]
        found |= {
            f"{plane}-image": turned(image.take(at, axis)),
            f"{plane}-truth": np.stack([turned(mask) for mask in truth.take(at, 1 + axis)]),
            f"{plane}-prediction": np.stack([turned(mask) for mask in prediction.take(at, 1 + axis)]),
            f"{plane}-spacing": np.asarray(rest[::-1], dtype=np.float64),
        }
    return found


def to_ras(voxels: np.ndarray, letters: str) -> np.ndarray:
    """Voxels [X, Y, Z] whose axes point as the letters say, with axes to the right, the front and up."""
    return orientations.apply_orientation(voxels, _turn(letters))


def ras_spacing(spacing: Sequence[float], letters: str) -> tuple[float, ...]:
    """The spacing of `to_ras`."""
    place = _turn(letters)[:, 0].astype(int)
    return tuple(float(spacing[list(place).index(axis)]) for axis in range(3))


def _turn(letters: str) -> np.ndarray:
    own, ras = (orientations.axcodes2ornt(tuple(axes)) for axes in (letters, "RAS"))
    return orientations.ornt_transform(own, ras)


def grey(image: np.ndarray) -> np.ndarray:
    """Intensities in 0..1, float32, the most extreme 0.5 % at either end cut off."""
    low, high = np.percentile(image, [0.5, 99.5])
    return np.clip((image - low) / max(high - low, 1e-6), 0, 1).astype(np.float32)


def turned(plane: np.ndarray) -> np.ndarray:
    """A plane whose axes point to the right or the front, and to the front or up, as viewers show it."""
    return np.ascontiguousarray(plane.T[::-1, ::-1])
