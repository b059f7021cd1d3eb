"""Overlap and surface metrics of segmentations, in millimetres, with a stated rule for empty masks.

All surface metrics of a pair of masks come from one computation: surfaces are the voxels that a face-connected
erosion removes (a voxel at the border of the volume is on the surface), and distances run between the centres of
surface voxels. Conventions and values are MONAI's. (The public Fed-MENU code calls a voxel a surface voxel also
where it touches the outside with an edge or a corner; its surfaces are thicker and its ASD is smaller.)

Shapes: C classes, *S spatial.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.ndimage import distance_transform_edt
from scipy.spatial import KDTree

from fedatlas.labels import LabelSpace

METRICS = {
    "dice": "Dice similarity coefficient, 2|P∩G| / (|P|+|G|), 0 to 1.",
    "hd95": "Symmetric Hausdorff distance, the larger of the two directed 95th percentiles, in mm.",
    "hd": "Symmetric Hausdorff distance, the largest distance between the surfaces, in mm.",
    "asd": "Average symmetric surface distance, in mm.",
    "nsd": "Normalised surface Dice: the share of both surfaces within a tolerance of the other, 0 to 1.",
}
"""name -> what it is."""

EmptyPolicy = Literal["nan", "zero", "siim"]
EmptyPolicies = EmptyPolicy | Mapping[str, EmptyPolicy]
"""One rule, or one per class by name, with "default" for the others ("nan" without it)."""


@dataclass(frozen=True)
class Score:
    """One value, or None and the reason why there is none. A value given for an empty truth has its reason, too."""

    class_index: int
    metric: str
    value: float | None
    reason: str = ""


def score(
    prediction: np.ndarray,
    truth: np.ndarray,
    space: LabelSpace,
    scored: Sequence[bool],
    spacing: Sequence[float],
    metrics: Sequence[str],
    *,
    tolerance: float = 2.0,
    empty: EmptyPolicies = "nan",
) -> list[Score]:
    """Every metric of every foreground class for which there is a truth.

    prediction, truth: class index [*S] if exclusive, else masks [C, *S]. scored [C]: which classes have a
    truth. spacing: mm per voxel and axis. tolerance: of nsd, in mm. empty: see `score_pair`.
    """
    found = []
    for c in space.foreground:
        if scored[c]:
            rule = empty if isinstance(empty, str) else empty.get(space.names[c], empty.get("default", "nan"))
            pair = (prediction == c, truth == c) if space.exclusive else (prediction[c] > 0, truth[c] > 0)
            values = score_pair(*pair, spacing, metrics, tolerance=tolerance, empty=rule)
            found += [Score(c, metric, *values[metric]) for metric in metrics]
    return found


def score_pair(
    prediction: np.ndarray,
    truth: np.ndarray,
    spacing: Sequence[float],
    metrics: Sequence[str],
    *,
    tolerance: float = 2.0,
    empty: EmptyPolicy = "nan",
) -> dict[str, tuple[float | None, str]]:
    """metric -> (value, "") or (None, reason) for two boolean masks [*S].

    Empty masks: without a truth nothing is defined. With a truth and an empty prediction dice and nsd are 0
    and distances are not defined. `empty="zero"` gives distances of an empty mask as 0 and the overlap of two
    empty masks as 1, as the public Fed-MENU code does; it flatters a model that predicts nothing. `empty="siim"`
    is the rule of the SIIM-ACR challenge: without a truth the overlap is 1 for an empty prediction and 0 for any
    other, with the reason "truth empty", so that cases with a truth can be told from those without.

    Raises ValueError for masks of different shape, a spacing that does not fit them, or an unknown metric.
    """
    if prediction.shape != truth.shape:
        raise ValueError(
            f"prediction has the shape {prediction.shape}, truth {truth.shape}; they must be equal"
        )
    if len(spacing) != prediction.ndim or not all(length > 0 for length in spacing):
        raise ValueError(f"spacing is {tuple(spacing)}; expected {prediction.ndim} positive lengths in mm")
    for metric in metrics:
        if metric not in METRICS:
            raise ValueError(f"metric {metric!r} is not known; known: {', '.join(METRICS)}")
    box = _joint_box(prediction, truth)
    p, g = prediction[box], truth[box]
    size_p, size_g = int(np.count_nonzero(p)), int(np.count_nonzero(g))
    if size_p and size_g:
        values: dict[str, tuple[float | None, str]] = {}
        if "dice" in metrics:
            values["dice"] = (2.0 * int(np.count_nonzero(p & g)) / (size_p + size_g), "")
        if any(metric != "dice" for metric in metrics):
            there, back = surface_distances(p, g, spacing)
            values |= {m: (_of_distances(m, there, back, tolerance), "") for m in metrics if m != "dice"}
        return values
    overlaps = ("dice", "nsd")
    if empty == "zero":
        both = 0.0 if size_p or size_g else 1.0
        return {metric: (both if metric in overlaps else 0.0, "") for metric in metrics}
    if not size_g:
        overlap = (0.0 if size_p else 1.0) if empty == "siim" else None
        return {metric: (overlap if metric in overlaps else None, "truth empty") for metric in metrics}
    return {metric: (0.0, "") if metric in overlaps else (None, "prediction empty") for metric in metrics}


def whole_organs(labels: np.ndarray, space: LabelSpace) -> np.ndarray:
    """Labels, class index [*S] if exclusive, else masks [C, *S], in which an organ's voxels are its own and those of
    its lesions; where classes overlap, a lesion's mask stays beside it."""
    if space.exclusive:
        table = np.arange(len(space), dtype=labels.dtype)
        for lesion, organ in space.organ_of.items():
            table[lesion] = organ
        return table[labels]
    merged = labels.copy()
    for lesion, organ in space.organ_of.items():
        merged[organ] |= labels[lesion]
    return merged


def surface_distances(
    prediction: np.ndarray, truth: np.ndarray, spacing: Sequence[float]
) -> tuple[np.ndarray, np.ndarray]:
    """Distances in mm from every surface voxel of the prediction to the truth's surface, and back.

    Both masks must hold a voxel. Of two exact ways the one measured faster is taken: a search tree over the
    surface points, or a distance map where the surfaces fill more than a quarter of their box, as noise does.
    """
    sampling = np.asarray(spacing, dtype=np.float64)
    edge_p, edge_g = _surface(prediction), _surface(truth)
    points = int(np.count_nonzero(edge_p) + np.count_nonzero(edge_g))
    if points * 4 > edge_p.size:
        return (
            distance_transform_edt(~edge_g, sampling=sampling)[edge_p],  # type: ignore[index]
            distance_transform_edt(~edge_p, sampling=sampling)[edge_g],  # type: ignore[index]
        )
    at_p, at_g = np.argwhere(edge_p) * sampling, np.argwhere(edge_g) * sampling
    return _to_nearest(at_p, at_g, edge_g[edge_p]), _to_nearest(at_g, at_p, edge_p[edge_g])


def _to_nearest(points: np.ndarray, others: np.ndarray, shared: np.ndarray) -> np.ndarray:
    """Distance from each point [N, dims] to the nearest of the others; shared [N]: the point is one of them."""
    distances = np.zeros(len(points))
    if not shared.all():
        tree = KDTree(others, leafsize=32, balanced_tree=False)
        distances[~shared] = tree.query(points[~shared])[0]
    return distances


def _surface(mask: np.ndarray) -> np.ndarray:
    """The voxels that a face-connected erosion removes; outside of the array there is nothing."""
    inner = mask.copy()
    for axis in range(mask.ndim):
        kept, original = inner.swapaxes(0, axis), mask.swapaxes(0, axis)
        kept[1:] &= original[:-1]
        kept[:-1] &= original[1:]
        kept[[0, -1]] = False
    return mask & ~inner


def _joint_box(one: np.ndarray, other: np.ndarray) -> tuple[slice, ...]:
    either = one | other
    box = []
    for axis in range(either.ndim):
        others = tuple(a for a in range(either.ndim) if a != axis)
        where = np.flatnonzero(either.any(axis=others))
        box.append(slice(int(where[0]), int(where[-1]) + 1) if len(where) else slice(0, 0))
    return tuple(box)


def _of_distances(metric: str, there: np.ndarray, back: np.ndarray, tolerance: float) -> float:
    if metric == "hd":
        return float(max(there.max(), back.max()))
    if metric == "hd95":
        return float(max(np.percentile(there, 95), np.percentile(back, 95)))
    if metric == "asd":
        return float((there.sum() + back.sum()) / (len(there) + len(back)))
    # a distance of exactly the tolerance is within it, however its square root was rounded
    tolerance = tolerance * (1 + 1e-6)
    within = np.count_nonzero(there <= tolerance) + np.count_nonzero(back <= tolerance)
    return float(within / (len(there) + len(back)))
