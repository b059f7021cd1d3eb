"""From a scan's own grid to the federation's grid, and back.

The federation's grid has canonical axes and a fixed spacing. It shares its centre with the scan's field of
view, so that neither drifts against the other, and its spacing is exact. Between the two only axes are
permuted and flipped, and each axis is resampled on its own; oblique scans stay oblique.

Shapes: C classes, I input channels, X, Y, Z the axes of a scan, *S those of the federation's grid.
"""

import gzip
import itertools
import math
import os
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import nibabel as nib
import numpy as np
import torch
from nibabel import orientations
from nibabel.filebasedimages import ImageFileError
from nibabel.quaternions import quat2mat
from nibabel.spatialimages import HeaderDataError
from torch import Tensor

from fedatlas.core.errors import DataError, FederationError
from fedatlas.core.labels import LabelSpace
from fedatlas.core.memory import gibibytes, require_memory
from fedatlas.core.options import option, options
from fedatlas.data.inputs import Look, look_of

AXES = ("LR", "PA", "IS")


@options
class Preprocessing:
    """From a site's files to the federation's grid, and the size of what is trained on."""

    orientation: str = option("RAS", "Where the axes point: one letter of L/R, one of P/A, one of I/S.")
    spacing: tuple[float | None, float | None, float | None] = option(
        (None, None, None), "Millimetres per voxel along these axes; null keeps the scan's own."
    )
    size: tuple[int, int] | None = option(
        None, "Rows and columns to which a picture is resized, whatever its shape; null: by `spacing`."
    )
    order: Literal[1, 3] = option(1, "Resampling of images: 1 linear, 3 cubic.")
    window: tuple[float, float] | None = option(
        None, "Intensities are clipped to this range first, as CT in HU; null: no clipping."
    )
    normalise: Literal["auto", "window", "zscore", "meanstd"] = option(
        "auto",
        "window: the window to 0..1; zscore: mean 0 and deviation 1 in every scan; meanstd: by the given mean "
        "and std; auto: window where one is given, else zscore.",
    )
    foreground: float | None = option(
        None, "zscore counts voxels above this intensity only; null: above the scan's least."
    )
    mean: float | None = option(None, "Subtracted by meanstd, after clipping.")
    std: float | None = option(None, "Divided by in meanstd.", gt=0)
    patch: tuple[int, ...] = option(
        (64, 64),
        "Voxels per training patch; two numbers: slices across the last axis.",
        min_length=2,
        max_length=3,
    )
    context: int = option(1, "Neighbouring slices given on each side, for patches of two numbers.", ge=0)

    def __post_init__(self) -> None:
        letters = sorted(next((pair for pair in AXES if letter in pair), "") for letter in self.orientation)
        if letters != sorted(AXES):
            raise FederationError(
                f"preprocessing: orientation is {self.orientation!r}; allowed: one of L/R, one of P/A and one of "
                "I/S in any order, as RAS"
            )
        if any(mm is not None and not mm > 0 for mm in self.spacing):
            raise FederationError(f"preprocessing: spacing is {list(self.spacing)}; millimetres are above 0")
        if self.size is not None and any(n < 1 for n in self.size):
            raise FederationError(f"preprocessing: size is {list(self.size)}; rows and columns are 1 or more")
        if self.size is not None and any(mm is not None for mm in self.spacing):
            raise FederationError(
                f"preprocessing: size is {list(self.size)} and spacing {list(self.spacing)}; give one of them"
            )
        if any(size < 1 for size in self.patch):
            raise FederationError(f"preprocessing: patch is {list(self.patch)}; sizes are 1 or more")
        if self.window is not None and not self.window[0] < self.window[1]:
            raise FederationError(
                f"preprocessing: window is {list(self.window)}; the first must be the lower"
            )
        if self.normalise == "window" and self.window is None:
            raise FederationError("preprocessing: normalise is 'window', but no window is given")
        if self.normalise == "meanstd" and (self.mean is None or self.std is None):
            raise FederationError("preprocessing: normalise is 'meanstd'; it needs both mean and std")
        if self.size is not None and len(self.patch) == 2 and self.context:
            raise FederationError(
                f"preprocessing: size is {list(self.size)} and context {self.context}; pictures have no neighbouring "
                "slices; set context: 0"
            )


@options
class Sampling:
    """How training patches are chosen."""

    balanced: float = option(
        0.5,
        "Chance that a patch is centred on an annotated class, drawn uniformly from those of the site; "
        "the others are drawn uniformly from its cases.",
        ge=0,
        le=1,
    )


# ------------------------------------------------------------------------------------------------ files


class FileError(DataError):
    """A problem with one file. The message comes in parts, so that a caller can add the site's name."""

    def __init__(self, file: Path, what: str, remedy: str) -> None:
        super().__init__(f"{file}: {what}; {remedy}")
        self.file, self.what, self.remedy = file, what, remedy


_RESTORE = "copy or convert it again"
UNITS = {1: ("metres", 1e3), 3: ("micrometres", 1e-3)}
"""Units of length other than mm that a NIfTI header may name (xyzt_units), and how many mm they have."""


def unit_of(xyzt_units: Any) -> tuple[str, float]:
    """The unit of a NIfTI header's affine, and how many mm it has. A header that names none is taken to mean mm."""
    return UNITS.get(int(xyzt_units) & 7, ("mm", 1.0))


def in_mm(affine: np.ndarray, xyzt_units: Any) -> np.ndarray:
    """The affine [4, 4] of a NIfTI file, which is in its header's unit, in mm."""
    scaled = np.array(affine, dtype=np.float64)
    scaled[:3] *= unit_of(xyzt_units)[1]
    return scaled


def doubts_of(header: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Why the place of a scan may be another than its NIfTI header lets one think: what is in doubt, and what to do, each.
    A header without these keys, as of another format, leaves nothing in doubt."""
    found = []
    if int(header.get("qform_code", 1)) == 0 and int(header.get("sform_code", 1)) == 0:
        what = "neither qform nor sform is set: left and right are a guess"
        found.append((what, "convert it again from its source, with orientation"))
    apart = _disagreement(header)
    if apart:
        found.append((apart, "see which of them is right, and write it into both"))
    unit = unit_of(header.get("xyzt_units", 0))[0]
    if unit != "mm":
        what = f"its header says that it is in {unit}, and so it was read"
        found.append((what, "if it is in mm, mend the unit in its header (xyzt_units)"))
    return found


def _disagreement(header: Mapping[str, Any]) -> str:
    """In what qform and sform of a NIfTI header disagree; nothing where one of them is not set, or the header has no rows of them.

    qform holds no shears: it is compared with the one that is nearest to sform. Codes that differ name two spaces, as the
    scanner's and an atlas's, which may lie apart; that axes are exchanged or flipped no registration explains.
    """
    codes = [int(header.get(name, 0)) for name in ("qform_code", "sform_code")]
    rows = [*(f"quatern_{i}" for i in "bcd"), *(f"qoffset_{i}" for i in "xyz"), *(f"srow_{i}" for i in "xyz")]
    if min(codes) <= 0 or any(name not in header for name in ("dim", "pixdim", *rows)):
        return ""
    *numbers, x, y, z = (np.asarray(header[name], dtype=np.float64) for name in rows)
    sform, turn, place = np.stack([x, y, z]), np.array(numbers[:3]), np.array(numbers[3:])
    sizes = np.asarray(header["pixdim"], dtype=np.float64)[:4]
    lengths = np.sqrt((sform[:, :3] ** 2).sum(0))
    u, _, v = np.linalg.svd(sform[:, :3] / lengths)
    nearest = u @ v * lengths
    # rounded to float32, b, c and d may be longer than 1
    qform = quat2mat([math.sqrt(max(0.0, 1 - float(turn @ turn))), *turn]) * sizes[1:]
    qform[:, 2] *= -1 if sizes[0] < 0 else 1
    cosines = (qform * nearest).sum(0)
    if (cosines < math.cos(math.radians(45)) * np.sqrt((qform**2).sum(0)) * lengths).any():
        return "its axes point elsewhere by qform than by sform, which was read: left and right are in doubt"
    steps = np.maximum(np.asarray(header["dim"])[1:4], 1) - 1.0
    corners = np.array(list(itertools.product((0, 1), repeat=3))) * steps
    off = np.linalg.norm(corners @ (qform - nearest).T + place - sform[:, 3], axis=1)
    # a tenth of a voxel, and more far from the first one: float32 holds a turn to a thousandth
    allowed = 0.1 * lengths.min() + 1e-3 * np.linalg.norm(corners * lengths, axis=1)
    if codes[0] == codes[1] and (off > allowed).any():
        return "it lies elsewhere by qform than by sform, which was read"
    return ""


def doubts_about(path: Path) -> list[tuple[str, str]]:
    """`doubts_of` a file that can be read; none about a file that is no NIfTI."""
    if not path.name.lower().endswith((".nii", ".nii.gz")):
        return []
    image: Any = nib.load(path)
    return doubts_of(image.header)


def read_image(path: Path) -> tuple[np.ndarray, np.ndarray, nib.Nifti1Header]:
    """The voxels of a NIfTI file [X, Y, Z], or [X, Y, Z, channels], in their own type after the header's
    scaling; its affine [4, 4] in mm, whatever the header's unit; its header.

    A compressed file is read to its end, and its checksum compared. Raises FileError, a DataError, for a file that is
    missing, truncated, damaged, of another format, not 3D, or without a usable affine.
    """
    try:
        path.stat()
        image: Any = nib.load(path)
        if not isinstance(image, nib.Nifti1Image):
            raise FileError(path, f"a {type(image).__name__}", "only NIfTI is read: .nii or .nii.gz")
        if path.name.lower().endswith(".gz"):
            # the checksum stands at the stream's end, which reading the voxels alone does not reach
            with gzip.open(path) as stream:
                image = type(image).from_stream(stream)
                voxels = np.asanyarray(image.dataobj)
                while stream.read(1 << 20):
                    pass
        else:
            voxels = np.asanyarray(image.dataobj)
    except FileNotFoundError:
        raise FileError(path, "no such file", "add it, or take the case out") from None
    except ImageFileError:
        raise FileError(path, "not a NIfTI file, or its beginning is damaged", _RESTORE) from None
    except MemoryError:
        claimed: Any = nib.load(path)
        size = gibibytes(math.prod(claimed.shape) * claimed.get_data_dtype().itemsize)
        what = f"its header claims {'×'.join(map(str, claimed.shape))} voxels, {size}, more than memory holds"
        raise FileError(path, what, _RESTORE) from None
    except (EOFError, zlib.error, ValueError, OSError, OverflowError, HeaderDataError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise FileError(path, f"truncated or damaged ({first})", _RESTORE) from None
    while voxels.ndim > 3 and voxels.shape[-1] == 1:
        voxels = voxels[..., 0]
    if voxels.ndim not in (3, 4) or 0 in voxels.shape:
        raise FileError(path, f"of shape {list(voxels.shape)}, not three-dimensional", "give a 3D volume")
    if not np.issubdtype(voxels.dtype, np.number) or np.iscomplexobj(voxels):
        raise FileError(path, f"its voxels are {voxels.dtype}", "give one number per voxel")
    affine = in_mm(np.asarray(image.affine), image.header["xyzt_units"])
    lengths = np.sqrt((affine[:3, :3] ** 2).sum(0))
    if not np.isfinite(affine).all() or not abs(np.linalg.det(affine[:3, :3])) > 1e-9 * lengths.prod():
        raise FileError(path, "its affine is not finite or not invertible", "mend qform and sform")
    return voxels, affine, image.header


def write_label_map(path: Path, labels: np.ndarray, like: Path | np.ndarray) -> None:
    """Writes labels, [X, Y, Z] or masks [C, X, Y, Z] (the last axis of the file), in the geometry of the scan
    `like`: its affine, its qform and sform with their codes, its units; or by an affine alone. Written whole or not at all.

    Raises DataError where the shapes differ or the folder cannot be written.
    """
    if isinstance(like, Path):
        source: Any = nib.load(like)
    else:
        source = nib.Nifti1Image(np.empty(labels.shape[-3:], np.uint8), like)
        source.header.set_xyzt_units("mm")
    shape = labels.shape[-3:]
    if labels.ndim not in (3, 4) or shape != source.shape[:3]:
        raise DataError(
            f"{path}: labels of shape {list(labels.shape)} for {like} of {list(source.shape[:3])}"
        )
    largest = int(labels.max(initial=0))
    voxels = np.moveaxis(labels, 0, -1) if labels.ndim == 4 else labels
    header = source.header.copy()
    header.set_data_dtype(np.uint8 if largest < 256 else np.int16)
    header.set_slope_inter(1, 0)
    header["cal_min"] = header["cal_max"] = 0
    header["descrip"] = b"FedAtlas labels"
    image = nib.Nifti1Image(voxels.astype(header.get_data_dtype()), source.affine, header)
    with saved(path) as temporary:
        nib.save(image, temporary)


@contextmanager
def saved(path: Path) -> Iterator[Path]:
    """A temporary name beside `path`, with its ending, that becomes `path` when all went well."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        ending = ".nii.gz" if path.name.endswith(".gz") else path.suffix
        handle, name = tempfile.mkstemp(prefix=".", suffix=ending, dir=path.parent)
        os.close(handle)
        temporary = Path(name)
        try:
            yield temporary
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise DataError(
            f"{path}: cannot be written ({error.strerror or error}); free or change the folder"
        ) from None


# --------------------------------------------------------------------------------------------- geometry


@dataclass(frozen=True)
class Geometry:
    """A scan's grid and its place on the federation's grid.

    shape, spacing: of the scan's file, in voxels and mm; axes: where its axes point, as "LPS".
    turned_shape, turned_spacing: the same after reorientation. grid_shape, grid_spacing: *S.
    """

    affine: np.ndarray
    shape: tuple[int, ...]
    spacing: tuple[float, ...]
    axes: str
    canonical: str
    turned_shape: tuple[int, ...]
    turned_spacing: tuple[float, ...]
    grid_shape: tuple[int, ...]
    grid_spacing: tuple[float, ...]

    @property
    def grid_affine(self) -> np.ndarray:
        """Voxel indices of the federation's grid -> the scan's world, mm."""
        turned = self.affine @ orientations.inv_ornt_aff(self._turn(), self.shape)
        scale = np.divide(self.grid_spacing, self.turned_spacing)
        middle = lambda shape: (np.asarray(shape) - 1) / 2  # noqa: E731
        place = np.eye(4)
        place[:3, :3] = np.diag(scale)
        place[:3, 3] = middle(self.turned_shape) - scale * middle(self.grid_shape)
        return turned @ place

    def _turn(self) -> np.ndarray:
        own = orientations.axcodes2ornt(self.axes)
        return orientations.ornt_transform(own, orientations.axcodes2ornt(self.canonical))

    def turn(self, voxels: np.ndarray) -> np.ndarray:
        """[X, Y, Z] of the scan with its axes permuted and flipped to the canonical ones; a view."""
        return orientations.apply_orientation(voxels, self._turn())

    def turn_back(self, voxels: np.ndarray) -> np.ndarray:
        """What `turn` did, undone."""
        own, canonical = orientations.axcodes2ornt(self.axes), orientations.axcodes2ornt(self.canonical)
        return orientations.apply_orientation(voxels, orientations.ornt_transform(canonical, own))


def require_picture(
    path: Path,
    preprocessing: Preprocessing,
    where: str = "",
    remedy: str = "set `preprocessing.spacing` in its place",
) -> None:
    """Raises DataError, beginning with `where`, for a NIfTI file where `size` is given: it is of pictures."""
    if preprocessing.size is not None and path.name.lower().endswith((".nii", ".nii.gz")):
        raise DataError(
            f"{where}{path}: a scan, and `preprocessing.size` is for pictures, {list(preprocessing.size)} rows and "
            f"columns; {remedy}"
        )


SKEW = 0.5
"""Degrees off a right angle beyond which a scan's axes are told to be skew."""


def skew_of(affine: np.ndarray) -> float:
    """By how many degrees the axes of a scan are off right angles, as a tilted gantry makes them."""
    axes = affine[:3, :3] / np.sqrt((affine[:3, :3] ** 2).sum(0))
    between = [abs(float(axes[:, a] @ axes[:, b])) for a, b in ((0, 1), (0, 2), (1, 2))]
    return math.degrees(math.asin(min(1.0, max(between))))


def skew_told(affine: np.ndarray) -> str:
    """What is said of a scan whose axes are skew; nothing where they are not."""
    skew = skew_of(affine)
    return (
        f"its axes are {skew:.1f}° off a right angle, and are taken as if they met at one"
        if skew > SKEW
        else ""
    )


def require_grid(where: str, geometry: Geometry, preprocessing: Preprocessing, volumes: int) -> None:
    """Raises DataError, beginning with `where`, for a scan that is shorter than a voxel of the federation's grid, and for
    a grid of which the machine cannot hold so many volumes in float32."""
    places = zip(
        geometry.turned_shape, geometry.turned_spacing, geometry.grid_spacing, geometry.canonical, strict=True
    )
    for n, old, new, letter in places:
        if n > 1 and n * old < new:
            metres = n * old < 1  # no scan of a body is as short
            raise DataError(
                f"{where}: is {n * old:g} mm long towards {letter}, and `preprocessing.spacing` makes voxels of {new:g} mm "
                "there: a single one; "
                + (
                    "its header seems to count in metres and does not say so, so that it is read in mm: write it in mm"
                    if metres
                    else "lower it, or take the case out"
                )
            )
    grid, size = math.prod(geometry.grid_shape), "×".join(map(str, geometry.grid_shape))
    spacing = "×".join(f"{mm:g}" for mm in geometry.grid_spacing)
    what = f"{where}: on a grid of {size} voxels of {spacing} mm it"
    remedy = "raise `preprocessing.spacing`, or correct the spacing that the file says"
    require_memory(4 * volumes * grid, what, remedy, DataError)


def geometry_of(shape: Sequence[int], affine: np.ndarray, preprocessing: Preprocessing) -> Geometry:
    """The geometry of a scan of this shape and affine. `size` counts along A/P (rows) and L/R (columns)."""
    spacing = tuple(float(mm) for mm in np.sqrt((affine[:3, :3] ** 2).sum(0)))
    own = orientations.io_orientation(affine)
    turn = orientations.ornt_transform(own, orientations.axcodes2ornt(preprocessing.orientation))
    # turn[i] says which axis of the result the scan's axis i becomes
    order = np.argsort(turn[:, 0])
    turned_shape = tuple(int(shape[i]) for i in order)
    turned_spacing = tuple(spacing[i] for i in order)
    grid_spacing = tuple(
        own if wanted is None else float(wanted)
        for own, wanted in zip(turned_spacing, preprocessing.spacing, strict=True)
    )
    grid_shape = tuple(
        max(1, round(n * old / new))
        for n, old, new in zip(turned_shape, turned_spacing, grid_spacing, strict=True)
    )
    if preprocessing.size is not None:
        wanted = dict(zip("APLR", (preprocessing.size[0],) * 2 + (preprocessing.size[1],) * 2, strict=True))
        letters = preprocessing.orientation
        grid_shape = tuple(wanted.get(a, n) for a, n in zip(letters, turned_shape, strict=True))
        extent = [n * mm for n, mm in zip(turned_shape, turned_spacing, strict=True)]
        grid_spacing = tuple(mm / n for mm, n in zip(extent, grid_shape, strict=True))
    return Geometry(
        affine,
        tuple(int(n) for n in shape),
        spacing,
        "".join(str(letter) for letter in orientations.ornt2axcodes(own)),
        preprocessing.orientation,
        turned_shape,
        turned_spacing,
        grid_shape,
        grid_spacing,
    )


# ------------------------------------------------------------------------------------------- resampling


def _taps(old: int, new: int, ratio: float, order: int) -> tuple[np.ndarray, np.ndarray]:
    """Interpolation along one axis: indices [new, taps] of old voxels, and their weights [new, taps].

    ratio: new spacing over old. Both axes share their middle; beyond its ends the old one goes on with its last
    voxel. Where voxels become larger the kernel widens with them, so that all old voxels count (no aliasing).
    """
    centre = (np.arange(new) - (new - 1) / 2) * ratio + (old - 1) / 2
    width = max(1.0, ratio)
    reach = (1 if order == 1 else 2) * width
    first = np.floor(centre - reach).astype(np.int64) + 1
    index = first[:, None] + np.arange(int(np.ceil(2 * reach)))
    away = np.abs(index - centre[:, None]) / width
    if order == 1:
        weight = np.clip(1 - away, 0, None)
    else:  # Keys' cubic convolution, a = -1/2
        near, far = (1.5 * away - 2.5) * away**2 + 1, ((2.5 - 0.5 * away) * away - 4) * away + 2
        weight = np.where(away < 1, near, np.where(away < 2, far, 0))
    weight /= weight.sum(1, keepdims=True)
    # a sampled kernel that was widened is a little off its centre: tilted, it keeps linear functions exactly
    off = index - (weight * index).sum(1, keepdims=True)
    spread = (weight * off**2).sum(1, keepdims=True)
    drift = centre[:, None] - (weight * index).sum(1, keepdims=True)
    weight += weight * off * drift / np.where(spread > 1e-9, spread, 1)
    return index.clip(0, old - 1), weight.astype(np.float32)


def _ratio(new: Sequence[float], old: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(new, old, strict=True)]


def resample(
    volume: np.ndarray,
    shape: Sequence[int],
    ratio: Sequence[float],
    *,
    order: int = 1,
    region: Sequence[slice] | None = None,
) -> np.ndarray:
    """A volume [X, Y, Z] float32 on a grid of another shape with the same middle, axis by axis; the volume itself
    where nothing changes.

    ratio: new voxel size over old, per axis. region: the part of the new grid that is wanted, with its bounds; the
    values are those of the whole, bit by bit.
    """
    old = volume.shape
    todo = _changed(old, shape, ratio, order)
    if region is not None:
        volume = volume[tuple(slice(None) if axis in todo else part for axis, part in enumerate(region))]
    # the axis that shrinks most goes first: less is left for the others
    for axis in sorted(todo, key=lambda axis: shape[axis] / old[axis]):
        index, weight = todo[axis]
        if region is not None:
            index, weight = index[region[axis]], weight[region[axis]]
            low, high = int(index.min()), int(index.max()) + 1
            volume = volume[tuple(slice(low, high) if a == axis else slice(None) for a in range(3))]
            index = index - low
        volume = _weighted(volume, axis, index, weight)
    return volume


def _changed(
    old: Sequence[int], new: Sequence[int], ratio: Sequence[float], order: int
) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """axis -> its `_taps`, for axes that are resampled at all."""
    return {
        axis: _taps(before, after, by, order)
        for axis, (before, after, by) in enumerate(zip(old, new, ratio, strict=True))
        if after != before or abs(by - 1) > 1e-6
    }


def _weighted(volume: np.ndarray, axis: int, index: np.ndarray, weight: np.ndarray) -> np.ndarray:
    form = [-1 if other == axis else 1 for other in range(3)]
    total = np.take(volume, index[:, 0], axis)
    total *= weight[:, 0].reshape(form)
    for tap in range(1, index.shape[1]):
        part = np.take(volume, index[:, tap], axis)
        part *= weight[:, tap].reshape(form)
        total += part
    return total


def _share(
    mask: np.ndarray, shape: Sequence[int], ratio: Sequence[float]
) -> tuple[tuple[slice, ...], np.ndarray]:
    """`resample` of a mask [X, Y, Z] that is not empty, computed only where it is not zero: the region and the
    shares in it."""
    box, region, taps = [], [], []
    for axis in range(3):
        filled = np.flatnonzero(mask.any(axis=tuple(other for other in range(3) if other != axis)))
        low, high = int(filled[0]), int(filled[-1]) + 1
        index, weight = _taps(mask.shape[axis], shape[axis], ratio[axis], 1)
        weight = np.where((index >= low) & (index < high), weight, np.float32(0))
        hit = np.flatnonzero(weight.any(axis=1))
        first, last = int(hit[0]), int(hit[-1]) + 1
        box.append(slice(low, high))
        region.append(slice(first, last))
        taps.append((index[first:last].clip(low, high - 1) - low, weight[first:last]))
    share = mask[tuple(box)].astype(np.float32)
    for axis, (index, weight) in enumerate(taps):
        share = _weighted(share, axis, index, weight)
    return tuple(region), share


def image_to_grid(image: np.ndarray, geometry: Geometry, preprocessing: Preprocessing) -> np.ndarray:
    """An image [I, X, Y, Z] on the federation's grid [I, *S] float32: turned, resampled, then normalised."""
    ratio = _ratio(geometry.grid_spacing, geometry.turned_spacing)
    changes = bool(_changed(geometry.turned_shape, geometry.grid_shape, ratio, preprocessing.order))
    channels = []
    with np.errstate(over="ignore", invalid="ignore"):  # `require_intensities` tells of it
        for channel in image:
            turned = np.ascontiguousarray(geometry.turn(channel), dtype=np.float32)
            base = None
            if changes and _rule(preprocessing) == "zscore":
                # weights add up to 1 but for a rounding, so that a background stays what it was if that is 0
                base = float(turned.min()) if preprocessing.foreground is None else preprocessing.foreground
                turned = turned - np.float32(base) if base else turned
            turned = resample(turned, geometry.grid_shape, ratio, order=preprocessing.order)
            channels.append(normalised(turned, preprocessing, base))
    return np.stack(channels)


def require_intensities(
    where: str, image: np.ndarray, on_grid: np.ndarray, preprocessing: Preprocessing
) -> None:
    """Raises DataError for an image [I, X, Y, Z] whose form on the federation's grid [I, *S] is not finite, or of one value in
    every channel. where: begins the message."""
    if not np.isfinite(on_grid).all():
        raise DataError(f"{where}: its intensities overflow; give a window")
    if on_grid.size > len(on_grid) and not np.ptp(on_grid, axis=(1, 2, 3)).any():
        window = preprocessing.window
        clipped = f" after clipping to the window {list(window)}" if window else ""
        raise DataError(
            f"{where}: constant on the federation's grid{clipped}: its values are {image.min():g} to {image.max():g}; correct "
            "`preprocessing`, or take the case out"
        )


def as_stored(image: np.ndarray) -> np.ndarray:
    """An image on the grid in the precision in which it is kept on disk: half where no value is beyond 64, as half
    precision keeps 11 bits, else single."""
    return image.astype(np.float16 if float(np.abs(image).max()) <= 64 else np.float32)


def image_for_prediction(
    where: str, image: np.ndarray, geometry: Geometry, preprocessing: Preprocessing
) -> np.ndarray:
    """An image [I, X, Y, Z] as evaluation reads it from the disk, [I, *S] float32, bit for bit. Raises DataError as
    `require_intensities`."""
    on_grid = image_to_grid(image, geometry, preprocessing)
    require_intensities(where, image, on_grid, preprocessing)
    return as_stored(on_grid).astype(np.float32, copy=False)


def _rule(preprocessing: Preprocessing) -> Literal["window", "zscore", "meanstd"]:
    """What `normalise` comes to."""
    if preprocessing.normalise == "auto":
        return "zscore" if preprocessing.window is None else "window"
    return preprocessing.normalise


def normalised(channel: np.ndarray, preprocessing: Preprocessing, base: float | None = None) -> np.ndarray:
    """Intensities as the net sees them, float32. Under zscore a scan of one intensity becomes 0; where the foreground has one voxel, or
    one intensity, as in a mask, mean and deviation are of the whole channel.

    base: of a channel that was resampled for zscore, the intensity above which voxels count, which was subtracted before: what
    lay on it is 0, and resampling may have made lower values. None: nothing was subtracted."""
    rule, window, moved = _rule(preprocessing), preprocessing.window, base or 0.0
    if window is not None:
        channel = channel.clip(window[0] - moved, window[1] - moved)
    if rule == "window":
        assert window is not None
        shift, scale = window[0], window[1] - window[0]
    elif rule == "meanstd":
        assert preprocessing.mean is not None and preprocessing.std is not None
        shift, scale = preprocessing.mean, preprocessing.std
    else:
        if preprocessing.foreground is not None:
            least = preprocessing.foreground - moved
        elif base is None:
            least = float(channel.min())
        else:
            least = 0.0 if window is None else max(0.0, window[0] - moved)
        inside = channel[channel > least]
        inside = inside if inside.size > 1 and inside.max() > inside.min() else channel
        shift = float(inside.mean(dtype=np.float64))
        scale = max(float(inside.std(dtype=np.float64)), 1e-6)
    return (channel - np.float32(shift)) / np.float32(scale)


def labels_to_grid(labels: np.ndarray, geometry: Geometry, space: LabelSpace) -> np.ndarray:
    """Labels on the federation's grid: class index [X, Y, Z] -> [*S], or masks [C, X, Y, Z] -> [C, *S].

    The rule: each class's mask is resampled linearly, as an image, and gives the class's share of every new
    voxel. A new voxel is foreground where all classes together hold half of it, and takes the class with the
    largest share; overlapping classes each need half. A class that would vanish keeps the voxel in which its
    share is largest, so that what is present stays present; where classes exclude each other, of the voxels that are not another
    class's only one. Where all of them are, it does vanish.
    """
    if geometry.grid_shape == geometry.turned_shape and np.allclose(
        geometry.grid_spacing, geometry.turned_spacing, rtol=1e-6
    ):
        turned = [geometry.turn(mask) for mask in (labels[None] if space.exclusive else labels)]
        return np.ascontiguousarray(turned[0]) if space.exclusive else np.stack(turned)
    ratio = _ratio(geometry.grid_spacing, geometry.turned_spacing)
    grid, half = geometry.grid_shape, np.float32(0.5 - 1e-6)  # half in the reals may miss it by a rounding
    index = np.zeros(grid, dtype=labels.dtype)
    masks = np.zeros((len(space), *grid), dtype=np.uint8) if not space.exclusive else index[None]
    total, best = np.zeros(grid, dtype=np.float32), np.zeros(grid, dtype=np.float32)
    shares: dict[int, tuple[tuple[slice, ...], np.ndarray]] = {}
    for c in space.foreground:
        mask = labels == c if space.exclusive else labels[c] > 0
        if not mask.any():
            continue
        region, share = _share(geometry.turn(mask), grid, ratio)
        if space.exclusive:
            total[region] += share
            larger = share > best[region]
            best[region] = np.where(larger, share, best[region])
            index[region][larger] = c
            if share.max() < 1:  # a class that has a whole voxel keeps it
                shares[c] = region, share
        else:
            kept = masks[c][region]
            kept[...] = share >= half
            if not kept.any():
                kept.flat[int(share.argmax())] = 1
    if not space.exclusive:
        return masks
    index[total < half] = 0
    for c, (region, share) in shares.items():
        if not (index == c).any():
            _keep_one(index, c, region, share)
    return index


def _keep_one(index: np.ndarray, c: int, region: tuple[slice, ...], share: np.ndarray) -> None:
    """Gives a class without a voxel the one of its largest share that is not another class's only one, if there is one."""
    alone = np.flatnonzero(np.bincount(index.ravel()) == 1)
    here = index[region]
    for place in np.argsort(-share, axis=None, kind="stable"):
        if share.flat[place] <= 0:
            return
        if here.flat[place] == 0 or here.flat[place] not in alone:
            here.flat[place] = c
            return


def restore(probabilities: Tensor, geometry: Geometry, exclusive: bool) -> np.ndarray:
    """Probabilities [C, *S] on the federation's grid -> labels on the scan's grid: class index [X, Y, Z] (uint8,
    int16 from 256 classes on), or masks [C, X, Y, Z] uint8 of classes above one half.

    Probabilities are resampled and the class is decided after, one class at a time and only where it may be chosen,
    so that memory is that of a few volumes of the scan's size whatever C is.
    """
    if tuple(probabilities.shape[1:]) != geometry.grid_shape:
        raise DataError(
            f"restore: probabilities of shape {list(probabilities.shape[1:])}, the grid of this scan is "
            f"{list(geometry.grid_shape)}"
        )
    ratio = _ratio(geometry.turned_spacing, geometry.grid_spacing)
    p = probabilities.detach().float().cpu().numpy()
    shape = geometry.turned_shape
    # an exclusive class that is chosen has at least the mean of all classes
    least = float(p.sum(0).min()) / len(p) if exclusive else 0.5
    regions = {c: _where_above(p[c], least, shape, ratio) for c in range(1 if exclusive else 0, len(p))}
    if not exclusive:
        masks = np.zeros((len(p), *geometry.shape), dtype=np.uint8)
        for c, region in regions.items():
            if region is not None:
                geometry.turn(masks[c])[region] = resample(p[c], shape, ratio, region=region) > 0.5
        return masks
    winner = np.zeros(shape, dtype=np.uint8 if len(p) < 256 else np.int16)
    there = [region for region in regions.values() if region is not None]
    if there:
        box = tuple(
            slice(min(part.start for part in parts), max(part.stop for part in parts))
            for parts in zip(*there, strict=True)
        )
        best = np.array(resample(p[0], shape, ratio, region=box))  # a copy, also where nothing is resampled
        for c, region in regions.items():
            if region is None:
                continue
            value = resample(p[c], shape, ratio, region=region)
            before = best[
                tuple(slice(r.start - b.start, r.stop - b.start) for r, b in zip(region, box, strict=True))
            ]
            winner[region][value > before] = c
            np.maximum(before, value, out=before)
    return np.ascontiguousarray(geometry.turn_back(winner))


def _where_above(
    volume: np.ndarray, least: float, shape: Sequence[int], ratio: Sequence[float]
) -> tuple[slice, ...] | None:
    """A box of the new grid outside of which `resample` of a volume [*S] gives less than `least`; None: it does so
    everywhere."""
    everywhere = tuple(slice(0, n) for n in shape)
    taps = _changed(volume.shape, shape, ratio, 1)
    # with weights from 0 to 1 no value is above all those that it is made of
    if not least > 0 or any((weight < 0).any() for _, weight in taps.values()):
        return everywhere
    high = volume >= least * (1 - 1e-3)  # weights add up to 1 but for a rounding
    region = []
    for axis in range(3):
        filled = np.flatnonzero(high.any(axis=tuple(other for other in range(3) if other != axis)))
        if not len(filled):
            return None
        first, last = int(filled[0]), int(filled[-1])
        if axis in taps:
            index, weight = taps[axis]
            hit = np.flatnonzero(((index >= first) & (index <= last) & (weight > 0)).any(axis=1))
            if not len(hit):
                return None
            first, last = int(hit[0]), int(hit[-1])
        region.append(slice(first, last + 1))
    return tuple(region)


def slice_with_neighbours(image: np.ndarray, at: int, context: int) -> np.ndarray:
    """Slice `at` of an image [I, X, Y, Z] with `context` neighbours on each side: [I, 2 * context + 1, X, Y], where
    entry k is slice at + k - context; beyond the ends the last slice is repeated. A view where nothing is repeated."""
    first, stop = at - context, at + context + 1
    if first >= 0 and stop <= image.shape[-1]:
        return np.moveaxis(image[..., first:stop], -1, 1)
    index = np.clip(np.arange(first, stop), 0, image.shape[-1] - 1)
    return np.moveaxis(image[..., index], -1, 1)


# ------------------------------------------------------------------------------------------- lone scans


@dataclass
class Scan:
    """A scan without a truth. image [I, *S] float32 on the federation's grid, normalised as for training."""

    image: Tensor
    geometry: Geometry
    exclusive: bool
    look: dict[str, Any]
    """See `inputs.look_of`."""

    def restore(self, probabilities: Tensor) -> np.ndarray:
        """See `restore`."""
        return restore(probabilities, self.geometry, self.exclusive)


def read_channels(paths: Sequence[Path]) -> tuple[np.ndarray, np.ndarray]:
    """The images of one case as [I, X, Y, Z], and their common affine.

    A file per channel, or one 4D file whose last axis is the channel. Raises FileError for what `read_image`
    refuses, for voxels that are not finite, and for channels of different shape or affine.
    """
    channels: list[np.ndarray] = []
    affine = np.eye(4)
    for number, path in enumerate(paths):
        voxels, own, _ = read_image(path)
        if voxels.ndim == 4 and len(paths) > 1:
            raise FileError(
                path, f"of shape {list(voxels.shape)}", "give a 3D file per channel, or one 4D file"
            )
        if np.issubdtype(voxels.dtype, np.floating) and not np.isfinite(voxels).all():
            count = int(voxels.size - np.isfinite(voxels).sum())
            what = f"holds {count} voxels that are NaN or infinite"
            raise FileError(path, what, "replace them, as by the value of air, or take the case out")
        if number == 0:
            affine = own
        else:
            require_same_grid(path, voxels.shape, own, paths[0], channels[0].shape, affine)
        channels += list(np.moveaxis(voxels, -1, 0)) if voxels.ndim == 4 else [voxels]
    return (channels[0][None] if len(channels) == 1 else np.stack(channels)), affine


def require_same_grid(
    path: Path,
    shape: Sequence[int],
    affine: np.ndarray,
    other: Path,
    other_shape: Sequence[int],
    other_affine: np.ndarray,
) -> None:
    """Raises FileError unless two files of a case have one shape and one affine: by either, every corner of the
    volume lies within a hundredth of the smallest voxel of the same place."""
    if tuple(shape) != tuple(other_shape):
        what = f"of shape {list(shape)}, but {other.name} is {list(other_shape)}"
        raise FileError(path, what, "both must be on one grid: convert them together")
    size = np.sqrt((other_affine[:3, :3] ** 2).sum(0)).min()
    corners = np.array([[x, y, z, 1] for x in (0, 1) for y in (0, 1) for z in (0, 1)], dtype=float)
    corners[:, :3] *= np.asarray(shape[:3]) - 1
    apart = float(np.abs(corners @ (affine - other_affine).T).max())
    if apart > 1e-2 * size:
        what = f"its affine differs from that of {other.name}: voxels lie up to {apart:.3g} mm apart"
        raise FileError(
            path, what, "both must be on one grid: resample the label, or copy the image's header"
        )


def load_scan(
    paths: Sequence[Path],
    preprocessing: Preprocessing,
    space: LabelSpace,
    *,
    read: Callable[[Sequence[Path]], tuple[np.ndarray, np.ndarray]] = read_channels,
    require: Callable[[Look], None] = lambda look: None,
) -> Scan:
    """A lone scan, one file per channel, ready for prediction. Its image is the one that evaluation reads from the disk,
    bit for bit. read: as `read_channels`, for other files than NIfTI; require: is shown the image's look before anything is computed, and may raise. Raises DataError naming the file."""
    require_picture(paths[0], preprocessing, remedy="the model was trained on pictures: give it one")
    image, affine = read(paths)
    geometry = geometry_of(image.shape[1:], affine, preprocessing)
    look = look_of(image, spacing=geometry.turned_spacing)
    require(look)
    require_grid(str(paths[0]), geometry, preprocessing, len(image) + len(space))
    on_grid = image_for_prediction(str(paths[0]), image, geometry, preprocessing)
    return Scan(torch.from_numpy(on_grid), geometry, space.exclusive, look)
