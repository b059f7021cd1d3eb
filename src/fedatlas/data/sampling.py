"""Training patches: which case, where in it, and the voxels, padded where the volume ends.

Shapes: I input channels, C classes, *S the federation's grid, *P the patch.
"""

from collections.abc import Sequence

import numpy as np

from fedatlas.data.transforms import slice_with_neighbours

PER_SLICE = 64
"""Voxels kept per class and slice as centres of patches; a slice with more is thinned evenly."""


def class_voxels(
    target: np.ndarray, classes: Sequence[int], exclusive: bool
) -> tuple[np.ndarray, dict[int, list[int]]]:
    """Where classes are on the grid: rows (x, y, z, weight) int32, ordered by class and z, and each class's first
    row and the row after its last. Weight: the voxels of the class in that slice, over the rows kept of it, in
    256ths. A class without voxels has no rows."""
    found: list[np.ndarray] = []
    spans: dict[int, list[int]] = {}
    begin = 0
    for c in classes:
        places = np.argwhere(np.moveaxis(target == c if exclusive else target[c] > 0, 2, 0))[:, [1, 2, 0]]
        slices, first, count = np.unique(places[:, 2], return_index=True, return_counts=True)
        rows = []
        for start, number in zip(first[: len(slices)], count, strict=True):
            kept = min(int(number), PER_SLICE)
            chosen = start + np.arange(kept) * number // kept
            weight = np.full((kept, 1), max(1, round(256 * number / kept)))
            rows.append(np.concatenate([places[chosen], weight], axis=1))
        if rows:
            block = np.concatenate(rows).astype(np.int32)
            spans[c] = [begin, begin + len(block)]
            begin += len(block)
            found.append(block)
    return (np.concatenate(found) if found else np.zeros((0, 4), np.int32)), spans


class ClassVoxels:
    """The voxels of one class in one case, to draw patch centres from: uniform over the voxels; with `slices`, uniform
    over the slices that hold the class and then over its voxels in that slice.

    rows: as `class_voxels` gives them for the class; they are not kept, but given again to `pick`.
    """

    def __init__(self, rows: np.ndarray, *, slices: bool) -> None:
        z = rows[:, 2]
        self.firsts = np.flatnonzero(np.r_[True, z[1:] != z[:-1], True]) if slices else None
        self.heaped = None if slices else np.cumsum(rows[:, 3], dtype=np.int64)

    def pick(self, rows: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """A voxel (x, y, z)."""
        if self.firsts is not None:
            which = rng.integers(len(self.firsts) - 1)
            return rows[rng.integers(self.firsts[which], self.firsts[which + 1]), :3]
        assert self.heaped is not None
        return rows[int(np.searchsorted(self.heaped, rng.integers(self.heaped[-1]), side="right")), :3]


def patch_start(
    shape: Sequence[int], patch: Sequence[int], centre: np.ndarray | None, rng: np.random.Generator
) -> list[int]:
    """The first voxel of a patch: around `centre`, moved into the volume, or uniform where it is None.
    Along an axis that is shorter than the patch the volume stands in the patch's middle."""
    start = []
    for axis, size in enumerate(patch):
        room = shape[axis] - size
        if room <= 0:
            start.append(-((-room) // 2))
        elif centre is None:
            start.append(int(rng.integers(room + 1)))
        else:
            start.append(int(np.clip(centre[axis] - size // 2, 0, room)))
    return start


def cut(array: np.ndarray, start: Sequence[int], patch: Sequence[int], out: np.ndarray) -> None:
    """Copies the patch at `start` of an array [..., *S] into `out` [..., *P]; beyond the volume `out` is left
    as it is."""
    source, place = [], []
    for axis, (first, size) in enumerate(zip(start, patch, strict=True)):
        length = array.shape[array.ndim - len(patch) + axis]
        low, high = max(first, 0), min(first + size, length)
        source.append(slice(low, high))
        place.append(slice(low - first, high - first))
    out[(..., *place)] = array[(..., *source)]


def cut_case(
    image: np.ndarray,
    target: np.ndarray,
    patch: Sequence[int],
    context: int,
    centre: np.ndarray | None,
    rng: np.random.Generator,
    out_image: np.ndarray,
    out_target: np.ndarray,
) -> None:
    """One training patch of a case: image [I, *S], target [*S] or [C, *S] -> out_image [I, *P], or
    [I * (2 * context + 1), *P] for slices; out_target [*P] or [C, *P].

    Beyond the volume both are 0, as where inference pads.
    """
    out_image[...] = 0
    out_target[...] = 0
    if len(patch) == 2:
        at = int(rng.integers(image.shape[-1])) if centre is None else int(centre[2])
        image, target = slice_with_neighbours(image, at, context), target[..., at]
        out_image = out_image.reshape(*image.shape[:2], *patch)
    start = patch_start(target.shape[-len(patch) :], patch, centre, rng)
    cut(image, start, patch, out_image)
    cut(target, start, patch, out_target)
