"""Post-processing of predicted labels: holes are filled, small components removed (UFPS).

Shapes: C classes, *S spatial; an axis of one voxel, as pictures have it, is not looked along.
"""

from typing import Literal

import numpy as np
from scipy.ndimage import generate_binary_structure, label

from fedatlas.core.labels import LabelSpace
from fedatlas.core.options import not_known, option, options
from fedatlas.evaluation.metrics import joint_box


@options
class Postprocess:
    """What becomes of predicted labels on the grid on which they are scored."""

    holes: bool = option(
        True,
        "Whether holes are filled: voxels outside of a class from which no way over faces leads out of it.",
    )
    share: float = option(
        0.2,
        "Components of a class that are smaller than this share of its largest are removed; 0: none.",
        ge=0,
        le=1,
    )
    connectivity: Literal["faces", "edges", "corners"] = option(
        "corners",
        "What joins the voxels of a component; corners: all 26 neighbours in space, 8 in a picture.",
    )
    classes: tuple[str, ...] | None = option(
        None,
        "Classes that are processed, as organs, of which a patient has one; null: all of the foreground.",
    )
    channels: Literal["exclusive", "independent"] = option(
        "exclusive",
        "Of exclusive classes. exclusive: a voxel stays of one class. independent: as UFPS's official code, which scores every "
        "class alone, so that a filled hole may hold another class; label maps that are written are exclusive in either case.",
    )


def clean(mask: np.ndarray, options: Postprocess) -> np.ndarray:
    """A boolean mask [*S] without holes, then without small components, as the options say."""
    found = np.zeros_like(mask)
    deep = mask.squeeze()
    if not mask.any() or not deep.ndim:
        return mask
    # no hole of a mask reaches the border of its box
    box = joint_box(deep, deep)
    inside = deep[box]
    if options.holes:
        inside = filled(inside)
    if options.share:
        inside = _large(inside, options.share, options.connectivity)
    found.squeeze()[box] = inside
    return found


def postprocess(labels: np.ndarray, space: LabelSpace, options: Postprocess) -> np.ndarray:
    """Labels on one grid after `options`: class index [*S] if exclusive, else masks [C, *S]. With
    `channels: independent` also masks, where classes are exclusive.

    Every chosen class of the foreground is processed alone. Where the space is exclusive a voxel that its own class
    still claims stays with it, so that a filled hole takes only background and what other classes lost; of several
    classes that claim a voxel the first has it, and what none claims is background. A second time changes nothing.

    Raises FederationError for a class that the space does not hold.
    """
    chosen = classes_of(space, options)
    if not space.exclusive:
        found = labels.copy()
        for c in chosen:
            found[c] = clean(labels[c] > 0, options)
        return found
    claims = {c: clean(labels == c, options) for c in chosen}
    if options.channels == "independent":
        masks = np.stack([labels == c for c in range(len(space))])
        for c, claim in claims.items():
            masks[c] = claim
        return masks
    found = labels.copy()
    for c, claim in claims.items():
        found[(labels == c) & ~claim] = 0
    free = found == 0
    for c in reversed(chosen):
        found[claims[c] & free] = c
    return found


def classes_of(space: LabelSpace, options: Postprocess) -> list[int]:
    """The classes that are processed. Raises FederationError for one that the space does not hold."""
    names = [space.names[c] for c in space.foreground]
    for name in options.classes or ():
        if name not in names:
            raise not_known("evaluation: postprocess: classes: the class", name, names)
    return [c for c in space.foreground if options.classes is None or space.names[c] in options.classes]


def filled(mask: np.ndarray) -> np.ndarray:
    """A boolean mask [*S] with its holes. What touches the border of the array is open there, and no hole."""
    around = np.pad(~mask, 1, constant_values=True)
    parts, _ = label(around)  # type: ignore[misc]
    return (parts != parts[(0,) * mask.ndim])[(slice(1, -1),) * mask.ndim]


def _large(mask: np.ndarray, share: float, connectivity: str) -> np.ndarray:
    """A boolean mask [*S] without the components that are smaller than a share of the largest."""
    rank = {"faces": 1, "edges": min(2, mask.ndim), "corners": mask.ndim}[connectivity]
    parts, count = label(mask, generate_binary_structure(mask.ndim, rank))  # type: ignore[misc]
    if count < 2:
        return mask
    sizes = np.bincount(parts.ravel())
    sizes[0] = 0
    # a size of exactly that share stays, however the product was rounded
    keep = sizes >= share * sizes.max() * (1 - 1e-9)
    keep[0] = False
    return keep[parts]
