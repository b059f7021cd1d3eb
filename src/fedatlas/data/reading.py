"""Reading one case of a site, with everything that can be wrong with it. Checking and training share this code.

A picture is a scan of one slice whose front is its upper edge and whose right is its left edge, so that what shows axial
slices as viewers do shows a picture as it is seen: voxel (x, y, 0) is the pixel in column W-1-x of row H-1-y.

Shapes: C classes, I input channels, X, Y, Z the axes of the scan's file; H rows of a picture, from top to bottom, W
columns, from left to right.
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedatlas.core.errors import DataError
from fedatlas.core.labels import BACKGROUND, LabelSpace, map_labels
from fedatlas.data.datasets.shared.listing import Case, Problem
from fedatlas.data.formats import dicom, flat
from fedatlas.data.index import Naming, SiteIndex
from fedatlas.data.transforms import FileError, read_channels, read_image, require_same_grid


@dataclass(frozen=True)
class Label:
    """A label file, mapped. voxels: class index [X, Y, Z], or masks [C, X, Y, Z]; known: the classes annotated in
    this case; counts: voxels per known class; strayed: class names drawn though the case does not list them."""

    voxels: np.ndarray
    known: frozenset[int]
    counts: dict[int, int]
    strayed: tuple[str, ...]


@dataclass
class Raw:
    """A case as it was read. What could not be read is None, and `problems` says why; notes: what was assumed or
    changed, and is no reason to stop; about: what `inputs.look_of` is told of it."""

    image: np.ndarray | None = None
    affine: np.ndarray = field(default_factory=lambda: np.eye(4))
    label: Label | None = None
    reference: Label | None = None
    problems: list[Problem] = field(default_factory=list)
    notes: list[flat.Note] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)


def read_case(
    index: SiteIndex,
    case: Case,
    space: LabelSpace,
    naming: tuple[Naming, Naming],
    *,
    reference: bool = False,
) -> Raw:
    """A case's image [I, X, Y, Z], its label and, if asked for, its reference, each checked.

    Voxels of a class that the case does not annotate are background in what is returned.
    """
    raw, towards = _image(index, case)
    if case.label is not None:
        with _noting(index, raw):
            raw.label = _label(raw, case, case.label, naming[0], case.annotated, space, index)
    elif case.annotated:
        with _noting(index, raw):
            raw.label = _masks(raw, case, naming[0], case.annotated, space, towards)
    if reference and case.fuller:
        with _noting(index, raw):
            names = case.reference_annotated
            if case.reference is not None:
                raw.reference = _label(raw, case, case.reference, naming[1], names, space, index)
            else:
                raw.reference = _masks(raw, case, naming[1], names, space, towards)
    raw.notes += _contradicted(index, case, space, raw)
    return raw


def read_unlabelled(index: SiteIndex, case: Case) -> Raw:
    """A case's image [I, X, Y, Z], checked, without its label."""
    return _image(index, case)[0]


def _image(index: SiteIndex, case: Case) -> tuple[Raw, tuple[str, str] | None]:
    """The image of a case, and where its picture's rows and columns point to, as far as its file says it."""
    raw = Raw()
    picture = not case.series and flat.is_picture(case.images[0])
    towards: tuple[str, str] | None = None
    with _noting(index, raw):
        if picture:
            found = flat.read_flat(
                case.images, channels=index.channels, pixel=case.pixel, raw=case.raw, site=index.name
            )
            image, affine, towards = found.image, found.affine, found.towards
            raw.notes += found.notes
            raw.about = {"picture": True, "modality": found.modality, "colour": found.colour}
        elif case.series:
            series = dicom.series_of(case.images, case.series)
            volume = dicom.load(series)
            image, affine = volume.voxels[None], volume.affine
            raw.notes += [flat.Note(Path(case.name), note, "see that this is meant") for note in volume.notes]
            raw.about = {"modality": series.modality}
        else:
            image, affine = read_channels(case.images)
        if len(image) != index.channels:
            what = f"{len(image)} channels, but site {index.name} has {index.channels}"
            raise FileError(case.images[0], what, "every case of a federation has the same channels")
        raw.image, raw.affine = image, affine
        if image.size > len(image) and all(channel.min() == channel.max() for channel in image):
            what = f"constant: every value is {float(image.flat[0]):g}"
            raise FileError(case.images[0], what, "export it again, or take the case out")
    return raw, towards


def _contradicted(index: SiteIndex, case: Case, space: LabelSpace, raw: Raw) -> list[flat.Note]:
    """Notes on findings that the data set tells and the mask of the class that they are about contradicts. The data
    set's word counts for the finding, the mask for the class."""
    notes = []
    about = dict(zip(space.findings, space.finding_of, strict=True))
    for name, present in case.findings:
        c = about.get(index.aliases.get(name, name))
        label = next((of for of in (raw.label, raw.reference) if of is not None and c in of.known), None)
        if c is None or label is None or name not in index.used_findings:
            continue
        if present != (label.counts[c] > 0):
            said, drawn = ("present", "no voxel") if present else ("absent", "voxels")
            what = f"the finding {name!r} is {said}, and {space.names[c]!r} has {drawn} there"
            remedy = "the finding is taken as told, the class as drawn: correct one of them"
            notes.append(flat.Note(case.images[0], what, remedy))
    return notes


@contextmanager
def _noting(index: SiteIndex, raw: Raw) -> Iterator[None]:
    try:
        yield
    except FileError as error:
        raw.problems.append(Problem(index.name, index.file(error.file), error.what, error.remedy))


def _label(
    raw: Raw,
    case: Case,
    path: Path,
    naming: Naming,
    annotated: tuple[str, ...],
    space: LabelSpace,
    index: SiteIndex,
) -> Label:
    known = naming.known(annotated)
    voxels, affine = read_integers(path)
    if raw.image is not None:
        require_same_grid(path, voxels.shape, affine, case.images[0], raw.image.shape[1:], raw.affine)
    mapped, counts = map_integers(voxels, naming, known, space, path)
    kept = {c: sum(n for value, n in counts.items() if _class(naming, value, space) == c) for c in known}
    strayed = {naming.integers[value] for value, n in counts.items() if n} - {BACKGROUND}
    strayed -= {space.names[c] for c in known}
    return Label(mapped, known, kept, tuple(sorted(strayed)))


def _masks(
    raw: Raw,
    case: Case,
    naming: Naming,
    annotated: Sequence[str],
    space: LabelSpace,
    towards: tuple[str, str] | None,
) -> Label | None:
    """The masks of a picture, or what is drawn on a DICOM series, as a label; None where the image itself could not be
    read."""
    known = naming.known(annotated)
    wanted: Any = [(name, mask) for name, mask in case.masks if naming.classes.get(name) in known]
    if case.series:
        if raw.image is None:
            return None
        from fedatlas.data.formats import drawings  # with scikit-image, which nothing else here needs

        shape = raw.image.shape[1:]
        found, notes = drawings.read_masks(wanted, shape, raw.affine, case.name)
    elif flat.is_picture(case.images[0]):
        shape = None if raw.image is None else (raw.image.shape[2], raw.image.shape[1])
        found, notes = flat.read_masks(wanted, shape, towards)
    else:
        raise FileError(
            case.images[0], "a scan with a mask per class", "masks are read for pictures; give it a label map"
        )
    raw.notes += [note for note in notes if note not in raw.notes]
    if shape is None:
        return None
    planes = {c: np.zeros(shape, dtype=bool) for c in sorted(known)}
    for name, mask in found.items():
        planes[naming.classes[name]] |= mask
    voxels, counts, notes = flat.join(
        planes, space, shape, Path(case.name) if case.series else case.images[0]
    )
    voxels = voxels if case.series else flat.standing(voxels)
    raw.notes += [note for note in notes if note not in raw.notes]
    drawn = {naming.classes[name] for name, _ in case.masks if name in naming.classes}
    strayed = tuple(sorted(space.names[c] for c in drawn - known))
    return Label(voxels, known, counts, strayed)


def _class(naming: Naming, value: int, space: LabelSpace) -> int | None:
    name = naming.integers[value]
    return None if name == BACKGROUND else space.index(name)


def read_integers(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """A label file's integers [X, Y, Z] and its affine. Raises FileError for values that are not whole."""
    voxels, affine, _ = read_image(path)
    if voxels.ndim != 3:
        raise FileError(
            path, f"of shape {list(voxels.shape)}", "a label file holds one integer per voxel, in 3D"
        )
    if np.issubdtype(voxels.dtype, np.floating):
        whole = np.rint(voxels)
        off = ~(np.abs(voxels - whole) < 1e-3)
        if off.any():
            what = (
                f"holds {float(voxels[off][0]):g} in {int(off.sum())} voxels; label files hold whole numbers"
            )
            raise FileError(path, what, "resample labels by nearest neighbour, or export them as integers")
        voxels = whole.astype(np.int64)
    return voxels, affine


def map_integers(
    voxels: np.ndarray, naming: Naming, known: frozenset[int], space: LabelSpace, path: Path
) -> tuple[np.ndarray, dict[int, int]]:
    """Integers [X, Y, Z] -> class index [X, Y, Z] or masks [C, X, Y, Z], where what is not in `known` is
    background; and how often each integer occurs. By `map_labels`, applied to the values that occur."""
    low, high = int(voxels.min()), int(voxels.max())
    slices = range(voxels.shape[2])
    counted: dict[int, int] = {}
    for z in slices:  # slice by slice: an index array of the whole scan would be eight times its size
        for value, n in zip(*np.unique(voxels[..., z], return_counts=True), strict=True):
            counted[int(value)] = counted.get(int(value), 0) + int(n)
    values = np.array(sorted(counted))
    wrong = [int(value) for value in values if int(value) not in naming.integers]
    if wrong:
        table = ", ".join(f"{number}={name}" for number, name in sorted(naming.integers.items()))
        what = f"holds the label integer {wrong[0]}, which is not in the table ({table})"
        raise FileError(path, what, "add it to the table under its name, or correct the file")
    mapped = map_labels(values, naming.integers, space, annotated=known, source=str(path))
    found = np.empty((*mapped.shape[:-1], *voxels.shape), dtype=mapped.dtype, order="F")
    dense = high - low < 1 << 16
    table_of = np.zeros((*mapped.shape[:-1], high - low + 1), mapped.dtype) if dense else mapped
    if dense:
        table_of[..., values - low] = mapped
    for z in slices:
        flat = voxels[..., z]
        place = flat.astype(np.int64) - low if dense else np.searchsorted(values, flat)
        found[..., z] = table_of[..., place]
    return found, counted


def gathered(index: SiteIndex, notes: Sequence[flat.Note]) -> list[Problem]:
    """Notes of a site as problems that are not fatal: one for all that say the same, with the first file."""
    groups: dict[tuple[str, str], list[flat.Note]] = {}
    for note in notes:
        groups.setdefault((note.what, note.remedy), []).append(note)
    found = []
    for (what, remedy), equal in groups.items():
        share = max((note.share for note in equal if note.share is not None), default=None)
        what += "" if share is None else f" (up to {100 * share:.2g} %)"
        what += f"; {len(equal)} such files" if len(equal) > 1 else ""
        found.append(Problem(index.name, index.file(equal[0].file), what, remedy, False))
    return found


def refuse(problems: list[Problem]) -> None:
    """Raises DataError for the first fatal problem, and says how many there are."""
    fatal = [problem for problem in problems if problem.fatal]
    if fatal:
        more = f" ({len(fatal) - 1} more: `fedatlas check` lists them)" if len(fatal) > 1 else ""
        raise DataError(f"{fatal[0]}{more}")


def digest(image: np.ndarray) -> str:
    """A hash of an image's voxels, their type left aside."""
    mark = hashlib.blake2b(str(image.shape).encode(), digest_size=16)
    for channel in image:
        for z in range(channel.shape[-1]):
            mark.update(np.ascontiguousarray(channel[..., z], dtype=np.float32).tobytes())
    return mark.hexdigest()
