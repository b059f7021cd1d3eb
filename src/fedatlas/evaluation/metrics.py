"""Overlap, volume and surface metrics of segmentations, in millimetres, with a stated rule for empty masks.

A metric is of a whole case. The slice-wise forms of UFPS's official code, with which its paper's numbers were made, are
metrics of their own with names that say so, so that both can stand in one evaluation: `dice_slicewise`,
`jaccard_slicewise`, `sensitivity_slicewise`, `specificity_slicewise`, and `hd_rows` for its Hausdorff distance, which
is one between the rows of a slice and no distance in space. A slice is a plane of the first two axes, which is axial
in a case of axial slices; a picture is one slice.

All surface metrics of a pair of masks come from one computation: surfaces are the voxels that a face-connected
erosion removes (a voxel at the border of the volume is on the surface; in a picture, or a case of a single slice, pixels and their
four neighbours count), and distances run between the centres of surface voxels. Conventions and values are MONAI's. (The public Fed-MENU code calls a voxel a surface voxel also
where it touches the outside with an edge or a corner; its surfaces are thicker and its ASD is smaller.)

Shapes: C classes, *S spatial.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from scipy.ndimage import distance_transform_edt, find_objects
from scipy.spatial import KDTree

from fedatlas.core.labels import LabelSpace

METRICS = {
    "dice": "Dice similarity coefficient, 2|P∩G| / (|P|+|G|), 0 to 1.",
    "hd95": "Symmetric Hausdorff distance, the larger of the two directed 95th percentiles, in mm.",
    "hd": "Symmetric Hausdorff distance, the largest distance between the surfaces, in mm.",
    "asd": "Average symmetric surface distance, in mm.",
    "nsd": "Normalised surface Dice: the share of both surfaces within a tolerance of the other, 0 to 1.",
    "jaccard": "Jaccard coefficient, |P∩G| / |P∪G|, 0 to 1.",
    "sensitivity": "Sensitivity, |P∩G| / |G|, 0 to 1.",
    "specificity": "Specificity, the share of the voxels outside of G that are outside of P, 0 to 1; it grows with the field of view.",
    "rve": "Relative volume error, ||P| - |G|| / |G|, from 0.",
    "dice_slicewise": "UFPS's official code: the mean of Dice over the slices in which there is a truth.",
    "jaccard_slicewise": "UFPS's official code: the mean of Jaccard over all slices, 0 where both are empty, so that it is low.",
    "sensitivity_slicewise": "UFPS's official code: the mean of sensitivity over the slices in which there is a truth.",
    "specificity_slicewise": "UFPS's official code: the mean of specificity over all slices that the truth does not fill.",
    "hd_rows": "UFPS's official code: the mean over slices of the Hausdorff distance between the rows of both masks, taken "
    "as sets of vectors; no distance in space.",
}
"""name -> what it is."""

OVERLAPS = ("dice", "jaccard", "nsd")
DISTANCES = ("hd95", "hd", "asd")
"""What a rule for empty masks speaks of; the other metrics follow their formula wherever there is a truth."""

LARGEST = dict.fromkeys((*DISTANCES, "hd_rows"), 1e6) | {"rve": 1e12}
"""metric -> a value that none of a scan exceeds; 1 for the others."""

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

    prediction, truth: class index [*S] if exclusive, else masks [C, *S]; a prediction of exclusive classes may be
    masks, too. scored [C]: which classes have a truth. spacing: mm per voxel and axis. tolerance: of nsd, in mm.
    empty: see `score_pair`.
    """
    masks = prediction.ndim > len(spacing)
    boxes: dict[int, tuple[slice, ...]] = {}
    if space.exclusive and prediction.shape == truth.shape and not OF_PLANES.intersection(metrics):
        boxes = class_boxes(prediction, truth, len(space))
    shape = truth.shape[-len(spacing) :]
    found = []
    for c in space.foreground:
        if scored[c]:
            rule = empty if isinstance(empty, str) else empty.get(space.names[c], empty.get("default", "nan"))
            box = boxes.get(c, ...)
            p = prediction[c] > 0 if masks else prediction[box] == c
            g = truth[box] == c if space.exclusive else truth[c] > 0
            values = score_pair(p, g, spacing, metrics, tolerance=tolerance, empty=rule, shape=shape)
            found += [Score(c, metric, *values[metric]) for metric in metrics]
    return found


def class_boxes(one: np.ndarray, other: np.ndarray, classes: int) -> dict[int, tuple[slice, ...]]:
    """class -> the smallest box that holds it in both of two maps of class indices [*S], which are read once each;
    empty where it is in neither. Background left out."""
    found = [find_objects(labels, classes - 1) for labels in (one, other)]
    return {c: _around(*pair, dims=one.ndim) for c, pair in enumerate(zip(*found, strict=True), start=1)}


def _around(*boxes: tuple[slice, ...] | None, dims: int) -> tuple[slice, ...]:
    there = [box for box in boxes if box is not None]
    if not there:
        return (slice(0, 0),) * dims
    sides = zip(*there, strict=True)
    return tuple(slice(min(s.start for s in side), max(s.stop for s in side)) for side in sides)


def score_pair(
    prediction: np.ndarray,
    truth: np.ndarray,
    spacing: Sequence[float],
    metrics: Sequence[str],
    *,
    tolerance: float = 2.0,
    empty: EmptyPolicy = "nan",
    shape: Sequence[int] | None = None,
) -> dict[str, tuple[float | None, str]]:
    """metric -> (value, "") or (None, reason) for two boolean masks [*S].

    shape: of the case, where the masks are a box of it that holds all of both; metrics in OF_PLANES need whole masks. An axis
    along which the case has one voxel has no part in the surface metrics.

    Empty masks: without a truth nothing is defined. With a truth and an empty prediction dice, jaccard and nsd are 0,
    distances are not defined, and the rest is what its formula gives. `empty="zero"` gives distances of an empty mask as 0 and the overlap of two
    empty masks as 1, as the public Fed-MENU code does; it flatters a model that predicts nothing. `empty="siim"`
    is the rule of the SIIM-ACR challenge: without a truth the overlap is 1 for an empty prediction and 0 for any
    other, with the reason "truth empty", so that cases with a truth can be told from those without. Both rules are of
    OVERLAPS and DISTANCES only.

    Raises ValueError for masks of different shape, a spacing that does not fit them, or an unknown metric.
    """
    _refuse(prediction, truth, spacing, metrics)
    box, shape = joint_box(prediction, truth), prediction.shape if shape is None else tuple(shape)
    p, g = prediction[box], truth[box]
    count = Counts(*(int(np.count_nonzero(mask)) for mask in (p & g, p, g)), all=math.prod(shape))
    found: dict[str, tuple[float | None, str]] = {}
    if count.truth:
        found = {metric: (of(count), "") for metric, of in _OF_COUNTS.items() if metric in metrics}
        if sliced := [metric for metric in metrics if metric in _OF_SLICES]:
            slices = counts_by_slice(prediction, truth)
            found |= {metric: (_OF_SLICES[metric](slices), "") for metric in sliced}
        if "hd_rows" in metrics:
            found["hd_rows"] = (float(row_distances(prediction, truth).mean()), "")
    if count.prediction and count.truth:
        if surface := [metric for metric in metrics if metric in (*DISTANCES, "nsd")]:
            flat = [axis for axis, voxels in enumerate(shape) if voxels == 1 and max(shape) > 1]
            steps = [mm for axis, mm in enumerate(spacing) if axis not in flat]
            there, back = surface_distances(p.squeeze(tuple(flat)), g.squeeze(tuple(flat)), steps)
            found |= {metric: (_of_distances(metric, there, back, tolerance), "") for metric in surface}
    else:
        overlap, distance = _of_empty(count, empty)
        reason = "" if count.truth else "truth empty"
        found |= {metric: (overlap, reason) for metric in metrics if metric in OVERLAPS}
        found |= {metric: (distance, reason) for metric in metrics if metric in DISTANCES}
    for metric in metrics:
        if found.get(metric, (None, ""))[0] is None:
            of_truth = "prediction empty" if metric in DISTANCES else "truth fills the case"
            found[metric] = (None, of_truth if count.truth else "truth empty")
    return {metric: found[metric] for metric in metrics}


def _refuse(
    prediction: np.ndarray, truth: np.ndarray, spacing: Sequence[float], metrics: Sequence[str]
) -> None:
    """Raises ValueError for what `score_pair` cannot score."""
    if prediction.shape != truth.shape:
        raise ValueError(
            f"prediction has the shape {prediction.shape}, truth {truth.shape}; they must be equal"
        )
    if len(spacing) != prediction.ndim or not all(length > 0 for length in spacing):
        raise ValueError(f"spacing is {tuple(spacing)}; expected {prediction.ndim} positive lengths in mm")
    for metric in metrics:
        if metric not in METRICS:
            raise ValueError(f"metric {metric!r} is not known; known: {', '.join(METRICS)}")


class Counts(NamedTuple):
    """Voxels of both masks, of the prediction, of the truth, and in all; numbers, or arrays [Z], one entry per slice."""

    both: Any
    prediction: Any
    truth: Any
    all: Any


def counts_by_slice(prediction: np.ndarray, truth: np.ndarray) -> Counts:
    """Of two boolean masks [X, Y, Z], or [X, Y], which are one slice."""
    p, g = (np.atleast_3d(mask) for mask in (prediction, truth))
    sizes = [np.count_nonzero(mask, axis=(0, 1)) for mask in (p & g, p, g)]
    return Counts(*sizes, all=np.full(p.shape[2], p.shape[0] * p.shape[1]))


def _of_empty(count: Counts, empty: EmptyPolicy) -> tuple[float | None, float | None]:
    """The overlap and the distance where one of the masks is empty, or both are; None: not defined."""
    if empty == "zero":
        return (0.0 if count.prediction or count.truth else 1.0), 0.0
    if count.truth:
        return 0.0, None
    if empty == "siim":
        return (0.0 if count.prediction else 1.0), None
    return None, None


def _specificity(count: Counts) -> float | None:
    outside = count.all - count.truth
    return (outside - count.prediction + count.both) / outside if outside else None


_OF_COUNTS: Mapping[str, Callable[[Counts], float | None]] = {
    "dice": lambda n: 2.0 * n.both / (n.prediction + n.truth),
    "jaccard": lambda n: n.both / (n.prediction + n.truth - n.both),
    "sensitivity": lambda n: n.both / n.truth,
    "specificity": _specificity,
    "rve": lambda n: abs(n.prediction - n.truth) / n.truth,
}
"""metric -> its value where there is a truth."""


def _over(top: np.ndarray, below: np.ndarray, where: np.ndarray | None = None) -> float | None:
    """The mean of top / below over slices, 0 for 0 / 0; where: which slices count, None for all. None without one."""
    if where is not None:
        top, below = top[where], below[where]
    return float(np.divide(top, np.maximum(below, 1)).mean()) if len(top) else None


_OF_SLICES: Mapping[str, Callable[[Counts], float | None]] = {
    "dice_slicewise": lambda n: _over(2.0 * n.both, n.prediction + n.truth, n.truth > 0),
    "jaccard_slicewise": lambda n: _over(n.both, n.prediction + n.truth - n.both),
    "sensitivity_slicewise": lambda n: _over(n.both, n.truth, n.truth > 0),
    "specificity_slicewise": lambda n: _over(
        n.all - n.truth - n.prediction + n.both, n.all - n.truth, n.truth < n.all
    ),
}
"""metric -> its value where there is a truth in any slice."""


OF_PLANES = frozenset({*_OF_SLICES, "hd_rows"})
"""Metrics that take slices one by one, empty ones, too."""


def row_distances(prediction: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """[Z]: UFPS's official "Hausdorff distance" of every slice of two boolean masks [X, Y, Z], or [X, Y].

    A slice is taken for a set of Y vectors of X numbers, 0 or 1: its rows, as a viewer shows them. What comes out is the
    largest distance from a row of one mask to the nearest row of the other, wherever that row stands: the root of a
    number of voxels. (`code/utils/metric.py` L76-87, `torch.cdist` of two planes.)
    """
    p, g = (np.atleast_3d(mask) for mask in (prediction, truth))
    found = np.zeros(p.shape[2])
    x, y, z = joint_box(p, g)
    rest = y.stop - y.start < p.shape[1]  # a row that is empty in both
    for index in range(z.start, z.stop):
        one, other = (mask[x, y, index].T.astype(np.float32) for mask in (p, g))
        if rest:
            one, other = (np.pad(rows, ((0, 1), (0, 0))) for rows in (one, other))
        apart = one.sum(1)[:, None] + other.sum(1)[None] - 2 * one @ other.T
        found[index] = math.sqrt(max(apart.min(1).max(), apart.min(0).max()))
    return found


def whole_organs(labels: np.ndarray, space: LabelSpace) -> np.ndarray:
    """Labels, class index [*S], or masks [C, *S] where classes overlap or are bool, in which an organ's voxels are its own
    and those of its lesions; of masks, a lesion's stays beside it."""
    if space.exclusive and labels.dtype != bool:
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


def joint_box(one: np.ndarray, other: np.ndarray) -> tuple[slice, ...]:
    """The smallest box that holds two boolean masks [*S]; empty where both are."""
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
