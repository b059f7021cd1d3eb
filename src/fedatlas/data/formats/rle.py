"""Masks as run lengths, as the SIIM-ACR Pneumothorax Segmentation challenge writes them.

A text of whole numbers in pairs, "offset length offset length …": each run of mask pixels begins `offset` pixels after
the end of the run before it (the first one: after the first pixel of the picture), counted down the columns, from the
left column to the right one. "-1" is an empty mask.

Shapes: H rows, from top to bottom; W columns, from left to right.
"""

from pathlib import Path

import numpy as np

from fedatlas.data.datasets.shared.listing import EMPTY
from fedatlas.data.transforms import FileError

_AGAIN = "correct the row, or take it out"


def decode(text: str, shape: tuple[int, int], source: str | Path) -> np.ndarray:
    """The mask, bool [H, W], of run lengths in a picture of `shape` (H, W).

    Raises FileError that names `source`, as a table and its line, for text that is no list of whole numbers, an odd
    count of them, a negative offset (such a run would overlap the one before), a length below 1, and runs beyond the
    picture.
    """
    mask = np.zeros(shape[0] * shape[1], dtype=bool)
    if text.strip() == EMPTY:
        return mask.reshape(shape)
    where = Path(source)
    try:
        numbers = np.array([max(-1 << 40, min(int(part), 1 << 40)) for part in text.split()], dtype=np.int64)
    except ValueError:
        wrong = next(part for part in text.split() if not _is_whole(part))
        raise FileError(where, f"run lengths hold {wrong[:20]!r}, which is no whole number", _AGAIN) from None
    if len(numbers) == 0:
        raise FileError(where, "empty run lengths", f'write "{EMPTY}" for an empty mask, or take the row out')
    if len(numbers) % 2:
        what = f"{len(numbers)} numbers; run lengths come in pairs of offset and length"
        raise FileError(where, what, f"complete the row: {_AGAIN}")
    offsets, lengths = numbers[::2], numbers[1::2]
    for run in np.flatnonzero((offsets < 0) | (lengths < 1))[:1]:
        if offsets[run] < 0:
            what = f"run {run + 1} has the offset {offsets[run]}: it would overlap the run before"
            remedy = "offsets count from the end of the run before and are 0 or more; " + _AGAIN
        else:
            what = f"run {run + 1} has the length {lengths[run]}; lengths are 1 or more"
            remedy = _AGAIN
        raise FileError(where, what, remedy)
    ends = np.cumsum(offsets + lengths)
    beyond = np.flatnonzero((ends > mask.size) | (ends < 0))
    if len(beyond):
        what = (
            f"run {beyond[0] + 1} of {len(ends)} ends at pixel {ends[beyond[0]]:,}, beyond the {mask.size:,} pixels "
            f"of a picture of {shape[0]}×{shape[1]}"
        )
        remedy = "see that the picture has the size the runs were drawn on, and that starts are relative, not absolute"
        raise FileError(where, what, remedy)
    steps = np.zeros(mask.size + 1, dtype=np.int8)
    np.add.at(steps, ends - lengths, 1)
    np.add.at(steps, ends, -1)
    return np.ascontiguousarray((np.cumsum(steps[:-1]) > 0).reshape(shape[1], shape[0]).T)


def encode(mask: np.ndarray) -> str:
    """The run lengths of a mask [H, W]; anything but 0 is inside. `decode` gives the same mask back."""
    flat = np.concatenate([[False], (np.asarray(mask) != 0).T.reshape(-1), [False]])
    edges = np.flatnonzero(flat[1:] != flat[:-1])
    if len(edges) == 0:
        return EMPTY
    starts, ends = edges[::2], edges[1::2]
    offsets = starts - np.concatenate([[0], ends[:-1]])
    return " ".join(f"{offset} {length}" for offset, length in zip(offsets, ends - starts, strict=True))


def _is_whole(part: str) -> bool:
    try:
        int(part)
        return True
    except ValueError:
        return False
