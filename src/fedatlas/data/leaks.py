"""Images that give their labels away: what is drawn can be told from where the image shows anything at all.

Some data sets hold image values only inside a region and inside what was drawn, as treatment plans do. Outside the
region a contour is then visible as a shape on a constant ground, and a net learns to find such shapes. Scores on them
say nothing about other images. The opposite happens, too: labels where the image shows nothing.

Shapes: I input channels; X, Y, Z the axes of the file, Z of one voxel for a picture.
"""

from typing import NamedTuple

import numpy as np
from scipy import ndimage

GROUND = 0.05
"""The constant ground of an image covers at least this share of it; below, there is none."""
NOISE = 0.01
"""Values that differ from the ground's by less than this share of the image's contrast belong to it."""
REACH = 2
"""Voxels; what is visible no farther from a label than this lies at the label."""
HUGS = 0.9
"""Of the visible voxels of a slice, the share at labels from which the slice shows its labels and nothing else."""
SHAPES = 0.01
"""Of the labelled visible voxels, the share in such slices from which a case is told."""
HIDDEN = 0.1
"""Of the labelled voxels, the share on the ground from which a case is told. Air inside a contoured larynx comes to half of it."""


LEAKS = "leaks.npz"
"""In a site's folder of a run: which images give labels away, and the worst slice."""


class Leak(NamedTuple):
    """How far an image gives its labels away.

    shapes: of the labelled visible voxels, the share in slices in which nearly all that is visible lies at a label;
    slices: how many these are, of how many with labels; hidden: of the labelled voxels, the share on the ground;
    axis, place: the slice with the most voxels of the worse of the two.
    """

    shapes: float
    slices: tuple[int, int]
    hidden: float
    axis: int
    place: int

    @property
    def told(self) -> bool:
        """Is it enough for a warning?"""
        return self.shapes >= SHAPES or self.hidden >= HIDDEN

    @property
    def worst(self) -> float:
        """What cases are ranked by: the larger of the two shares."""
        return max(self.shapes, self.hidden)

    def __str__(self) -> str:
        """What was found, for a person."""
        parts = []
        if self.shapes >= SHAPES:
            found, of = self.slices
            parts.append(
                f"{found} of {of} slices show labels alone ({_percent(self.shapes)} of what is drawn)"
            )
        if self.hidden >= HIDDEN:
            parts.append(f"{_percent(self.hidden)} of what is drawn lies on the ground")
        return ", ".join(parts)


def leak_of(image: np.ndarray, drawn: np.ndarray, affine: np.ndarray) -> Leak | None:
    """How far an image gives away what is drawn on it; None where nothing is drawn or the image has no constant ground.

    image [I, X, Y, Z]; drawn [X, Y, Z] bool, the union of all classes; affine [4, 4]. Slices are axial ones.
    """
    ground = ground_of(image)
    if ground is None or not drawn.any():
        return None
    axis = int(np.abs(affine[2, :3]).argmax())
    others = tuple(a for a in range(3) if a != axis)
    box = tuple(
        slice(max(s.start - REACH, 0), s.stop + REACH)
        for s in ndimage.find_objects(drawn.astype(np.uint8))[0]
    )
    near = np.zeros_like(drawn)
    near[box] = ndimage.maximum_filter(drawn[box].astype(np.uint8), size=2 * REACH + 1) > 0
    visible = (~ground).sum(others)
    at_labels = (near & ~ground).sum(others)
    seen = (drawn & ~ground).sum(others)
    hidden = (drawn & ground).sum(others)
    alone = (seen > 0) & (at_labels >= HUGS * visible)
    shapes = float(seen[alone].sum() / max(seen.sum(), 1))
    share = float(hidden.sum() / drawn.sum())
    worse = np.where(alone, seen, 0) if shapes >= share else hidden
    return Leak(
        shapes, (int(alone.sum()), int(((seen + hidden) > 0).sum())), share, axis, int(worse.argmax())
    )


def slice_of(image: np.ndarray, drawn: np.ndarray, affine: np.ndarray, leak: Leak) -> dict[str, np.ndarray]:
    """The slice that a leak names, as viewers show it: rows from the patient's front to the back, columns from the right
    side to the left. image and drawn [X, Y, Z] become image [H, W] in 0..1 and drawn [H, W]; spacing: of rows and
    columns, in mm."""
    across, along = sorted(
        (a for a in range(3) if a != leak.axis), key=lambda a: -abs(float(affine[0, a]))
    )  # towards the patient's side, and towards the front
    planes = [array.take(leak.place, leak.axis) for array in (image, drawn)]
    if along < across:
        planes = [plane.T for plane in planes]
    # columns of the affine point to the patient's right and front; what is seen runs from the right, and from the front
    planes = [
        plane[:: -1 if affine[0, across] > 0 else 1, :: -1 if affine[1, along] > 0 else 1].T
        for plane in planes
    ]
    low, high = float(planes[0].min()), float(planes[0].max())
    shown = ((planes[0] - low) / max(high - low, 1e-6)).astype(np.float32)
    spacing = np.linalg.norm(affine[:3, :3], axis=0)[[along, across]]
    return {"image": shown, "drawn": planes[1], "spacing": spacing.astype(np.float64)}


def ground_of(image: np.ndarray) -> np.ndarray | None:
    """Where an image [I, X, Y, Z] shows nothing: bool [X, Y, Z]. None if it has no constant ground.

    The ground of a channel is the commonest value on the faces of the array; a voxel is on the ground in all channels.
    """
    ground = np.ones(image.shape[1:], bool)
    for channel in image:
        faces = [
            channel.take(end, axis).ravel() for axis in range(3) if channel.shape[axis] > 1 for end in (0, -1)
        ]
        if not faces:
            return None
        values, counts = np.unique(np.concatenate(faces), return_counts=True)
        value = np.float32(values[counts.argmax()])
        some = channel.ravel(order="K")[:: channel.size // 1_000_000 + 1].astype(np.float32)
        contrast = np.percentile(np.abs(some - value), 99)
        for z in range(
            channel.shape[2]
        ):  # slice by slice: distances of the whole scan would be larger than it
            distance = np.abs(channel[..., z].astype(np.float32) - value)
            ground[..., z] &= distance <= NOISE * contrast
    return ground if ground.mean() >= GROUND else None


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 0.995 else "100 %"
