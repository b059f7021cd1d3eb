"""A made-up federation of abdominal CT, written to disk as nnU-Net raw: partly annotated organs with tumours.

A patient is an atlas of implicit shapes (lobes, tubes along curves, notches) that is scaled, turned and bent by
smooth random fields, organ by organ and as a whole. Organs that meet share a surface; the smaller one indents the
larger. Stomach, bowel, vessels, muscle and bone have intensities of organs; a patient has a delay and a strength of
enhancement and offsets of its own. No interval of intensities gives a Dice of 0.5 for any class, even one that the
truth has chosen (test).

The parameters were chosen by that test and by the validation Dice of centralized training alone, before any two
methods were compared.

A patient depends on seed, site, split and number only, and is drawn in millimetres, so that it can be scanned with
another spacing. Places are in mm from the middle of the scan: x to the right, y to the front, z to the head.
Shapes: X, Y, Z voxels of a scan along these axes.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import nibabel as nib
import numpy as np
from nibabel import orientations
from scipy import ndimage

from fedatlas.core.errors import DataError, FederationError
from fedatlas.core.labels import BACKGROUND
from fedatlas.core.options import not_known
from fedatlas.core.seeds import seed_of

TUMOUR_OF = {"liver": "liver tumour", "kidneys": "kidney tumour", "pancreas": "pancreas tumour"}
CLASSES = (
    "liver",
    "liver tumour",
    "kidneys",
    "kidney tumour",
    "pancreas",
    "pancreas tumour",
    "spleen",
    "gallbladder",
)
"""The classes of the full truth, in the order of its integers 1, 2, …"""

GROUPS = tuple([organ, tumour] for organ, tumour in TUMOUR_OF.items())
"""The organs with their tumours, for `labels.groups`."""

SIZES = {"tiny": 10.0, "small": 5.0, "large": 3.0}
"""Size -> voxel edge in mm, before a site's own factors: 32 x 28 x 20, 64 x 56 x 40, 107 x 93 x 67 voxels."""

FIELD = (320.0, 280.0, 200.0)
"""What a scan covers, mm."""

Split = Literal["train", "test"]
Size = Literal["tiny", "small", "large"]


@dataclass(frozen=True)
class AbdomenSite:
    """A hospital. labels: class -> its integer there; for a site of test cases only, all classes.

    seconds: typical time of the scan after injection; None: no contrast agent. noise: its deviation, HU. grain:
    length over which it is correlated, mm. spacing: factors of the voxel's edges along x, y, z. axes: where the
    file's axes point. tumours: class -> share of patients with one; 0.4 where not given.
    """

    name: str
    labels: Mapping[str, int]
    seconds: float | None
    noise: float
    grain: float
    spacing: tuple[float, float, float]
    axes: str
    tumours: Mapping[str, float]
    test_only: bool = False


SITES = (
    AbdomenSite(
        "liver", {"liver": 1, "liver tumour": 2}, 70, 10, 4.0, (1, 1, 1), "LPS", {"liver tumour": 0.8}
    ),
    AbdomenSite(
        "kidney", {"kidney tumour": 1, "kidneys": 2}, 32, 12, 3.5, (0.9, 0.9, 1.2), "RAS", {"kidney tumour": 0.8}
    ),
    AbdomenSite(
        "pancreas", {"pancreas": 3, "pancreas tumour": 7}, 45, 11, 5.0, (1.1, 1.1, 0.9), "LAS", {"pancreas tumour": 0.8}
    ),
    AbdomenSite("spleen", {"gallbladder": 2, "spleen": 5}, 170, 12, 4.5, (1.05, 1.05, 1.15), "PSR", {}),
    AbdomenSite(
        "unseen",
        {name: number for number, name in enumerate(CLASSES, start=1)},
        None, 12, 4.0, (1, 1, 1.1), "RPI", {}, test_only=True,
    ),
)  # fmt: skip
"""Four sites that annotate an organ with its tumour, or two organs, each in a phase of its own; and one that is only
tested, without contrast agent."""


@dataclass(frozen=True)
class AbdomenCase:
    """A scan in memory, axes x, y, z: image [X, Y, Z] int16 in HU, truth [X, Y, Z] uint8 (place in CLASSES + 1),
    affine [4, 4] to mm."""

    name: str
    image: np.ndarray
    truth: np.ndarray
    affine: np.ndarray


def write_abdomen(
    folder: Path,
    *,
    cases: int | Mapping[str, int] = 16,
    test_cases: int | Mapping[str, int] = 8,
    size: Size = "small",
    seed: int = 0,
    sites: Sequence[AbdomenSite] = SITES,
) -> Path:
    """Writes site-<name> for every site into `folder` and returns it.

    imagesTr, labelsTr, imagesTs, labelsTs and dataset.json hold what a site has, labelsTr_all, labelsTs_all and
    all_labels.json the full truth. A site of test cases only has no Tr folders, and all classes in labelsTs.
    cases, test_cases: one number, or site -> number. Raises FederationError for a bad number or size, and a site that
    does not exist; DataError for a folder that has such a site already.
    """
    counts = {
        split: {site.name: _count(given, what, site, sites) for site in sites}
        for split, what, given in (("train", "cases", cases), ("test", "test_cases", test_cases))
    }
    _voxel(size)
    for site in sites:
        if (folder / f"site-{site.name}").exists():
            raise DataError(
                f"phantom abdomen: {folder / f'site-{site.name}'} is there already; choose an empty folder"
            )
    full = {name: number for number, name in enumerate(CLASSES, start=1)}
    for site in sites:
        root, written = folder / f"site-{site.name}", []
        splits: list[Split] = ["test"] if site.test_only else ["train", "test"]
        for split in splits:
            for number in range(counts[split][site.name]):
                case = draw_case(site, number, split=split, size=size, seed=seed)
                _write_case(root, site, split, case)
                written.append(case.name)
        root.mkdir(parents=True, exist_ok=True)
        training = 0 if site.test_only else counts["train"][site.name]
        _write_table(root / "dataset.json", dict(site.labels), numTraining=training, file_ending=".nii.gz")
        if not site.test_only:
            _write_table(root / "all_labels.json", full, annotated={name: list(CLASSES) for name in written})
    return folder


def abdomen_sites(folder: Path, sites: Sequence[AbdomenSite] = SITES) -> list[dict[str, Any]]:
    """The list `sites` of a federation file for what `write_abdomen` wrote, in the order of `sites`.

    Raises DataError where none of them is in the folder.
    """
    entries: list[dict[str, Any]] = []
    for site in sites:
        root = folder / f"site-{site.name}"
        if not root.is_dir():
            continue
        entry: dict[str, Any] = {"name": site.name, "path": str(root)}
        if site.test_only:
            entries.append(entry | {"role": "test"})
        else:
            entries.append(
                entry
                | {
                    "reference": {
                        "table": "all_labels.json",
                        "labels": "labelsTr_all",
                        "test_labels": "labelsTs_all",
                    }
                }
            )
    if not entries:
        raise DataError(f"phantom abdomen: no site-{sites[0].name} in {folder}; write it with write_abdomen")
    return entries


def draw_case(
    site: AbdomenSite, number: int, *, split: Split = "train", size: Size = "small", seed: int = 0
) -> AbdomenCase:
    """One scan; the same for the same arguments, whatever else is drawn."""
    voxel = _voxel(size)
    parts = (seed, "abdomen", site.name, split, number)
    spacing = voxel * np.array(site.spacing)
    counts = np.maximum(np.rint(np.array(FIELD) / spacing).astype(int), 8)
    axes = [
        ((np.arange(n) - (n - 1) / 2) * step).astype(np.float32)
        for n, step in zip(counts, spacing, strict=True)
    ]
    patient = _Patient(
        np.random.default_rng(seed_of(*parts, "patient")), _tumours(site, split, number, seed), voxel
    )
    rng = np.random.default_rng(seed_of(*parts, "scan"))
    image, truth = _scan(patient, axes, spacing, site, rng)
    place = np.random.default_rng(seed_of(*parts, "place"))
    affine = np.diag([*spacing, 1.0])
    affine[:3, 3] = [axis[0] for axis in axes] + place.uniform(-30, 30, 3)
    return AbdomenCase(f"{site.name}-{split}-{number:03d}", image, truth, affine)


def _voxel(size: str) -> float:
    if size not in SIZES:
        raise not_known("phantom abdomen: the size", size, SIZES)
    return SIZES[size]


def _count(given: int | Mapping[str, int], what: str, site: AbdomenSite, sites: Sequence[AbdomenSite]) -> int:
    names = [one.name for one in sites]
    for name in given if isinstance(given, Mapping) else ():
        if name not in names:
            raise not_known(f"phantom abdomen: {what}: the site", name, names)
    if isinstance(given, Mapping) and site.name not in given:
        raise FederationError(f"phantom abdomen: {what} gives no number for the site {site.name}; add it")
    count = given[site.name] if isinstance(given, Mapping) else given
    if count < 0:
        raise FederationError(f"phantom abdomen: {what} is {count}; allowed: 0 or more")
    return count


def _tumours(site: AbdomenSite, split: Split, number: int, seed: int) -> list[str]:
    """The organs in which a patient has tumours: a site's shares are kept closely in any run of numbers."""
    chosen = []
    for organ, tumour in TUMOUR_OF.items():
        rng = np.random.default_rng(seed_of(seed, "abdomen", site.name, split, tumour))
        # multiples of the golden section spread evenly over 0..1
        if (rng.uniform() + number * 0.6180339887) % 1 < site.tumours.get(tumour, 0.4):
            chosen.append(organ)
    return chosen


# ------------------------------------------------------------------------------------------------------- shapes
# Fields [X, Y, Z] in mm, about the signed distance to a surface: negative inside. p: places [3, X, Y, Z], mm.


def _ellipsoid(p: np.ndarray, centre: Sequence[float], half: Sequence[float]) -> np.ndarray:
    q = p - _column(centre)
    q /= _column(half)
    far = np.sqrt((q * q).sum(0))
    q /= _column(half)
    steep = np.sqrt((q * q).sum(0))
    return (far + 1e-6) / (steep + 1e-6 / min(half)) * (far - 1)


def _tube(p: np.ndarray, points: Sequence[Sequence[float]], radii: Sequence[float]) -> np.ndarray:
    """Around a curve through points, with a radius at each, linear between them."""
    nearest = np.full(p.shape[1:], np.inf, dtype=np.float32)
    for (begin, r), (end, s) in pairwise(zip(points, radii, strict=True)):
        along = np.array(end, dtype=np.float32) - np.array(begin, dtype=np.float32)
        q = p - _column(begin)
        t = np.clip(np.tensordot(along, q, 1) / float(along @ along), 0, 1)
        q -= along.reshape(3, 1, 1, 1) * t
        np.minimum(nearest, np.sqrt((q * q).sum(0)) - (r + (s - r) * t), out=nearest)
    return nearest


def _column(values: Sequence[float] | np.ndarray) -> np.ndarray:
    return np.array(values, dtype=np.float32).reshape(3, 1, 1, 1)


def _join(a: np.ndarray, b: np.ndarray, soft: float) -> np.ndarray:
    """The union of two shapes, rounded over `soft` mm where they meet."""
    return np.minimum(a, b) - np.maximum(soft - np.abs(a - b), 0) ** 2 / (4 * soft)


def _without(a: np.ndarray, b: np.ndarray, soft: float) -> np.ndarray:
    """a without b."""
    return -_join(-a, b, soft)


def _liver(p: np.ndarray) -> np.ndarray:
    right = _ellipsoid(p, (62, 4, 22), (54, 66, 62))
    left = _ellipsoid(p, (5, 46, 36), (60, 27, 34))
    both = _join(right, left, 20)
    return _without(both, _ellipsoid(p, (14, -8, -24), (40, 36, 42)), 10)


def _spleen(p: np.ndarray) -> np.ndarray:
    return _without(_ellipsoid(p, (-86, -26, 38), (28, 42, 44)), _ellipsoid(p, (-46, 4, 34), (36, 36, 44)), 8)


def _kidney(p: np.ndarray, side: int, height: float) -> np.ndarray:
    bean = _ellipsoid(p, (58 * side, -38, height), (27, 25, 50))
    return _without(bean, _ellipsoid(p, (38 * side, -32, height), (15, 12, 15)), 6)


def _pancreas(p: np.ndarray) -> np.ndarray:
    curve = ((35, 10, -34), (27, 14, -17), (3, 22, -3), (-26, 14, 6), (-54, -8, 14), (-70, -20, 20))
    return _tube(p, curve, (15, 15, 11, 12, 12, 10))


def _gallbladder(p: np.ndarray) -> np.ndarray:
    return _tube(p, ((38, 32, -4), (38, 44, -20), (38, 50, -34)), (8, 14, 16))


def _stomach(p: np.ndarray) -> np.ndarray:
    curve = ((-44, 20, 64), (-58, 36, 40), (-42, 54, 12), (4, 58, -8), (26, 42, -12))
    return _tube(p, curve, (24, 26, 20, 13, 9))


@dataclass(frozen=True)
class _Piece:
    """A part of the anatomy. centre: what it is turned and scaled about. bumps: deviation of its surface, mm.
    bonus: mm by which it prevails over a neighbour."""

    organ: str
    shape: Callable[[np.ndarray], np.ndarray]
    centre: tuple[float, float, float]
    bumps: float
    bonus: float = 0.0


_PIECES = (
    _Piece("liver", _liver, (50, 15, 25), 2.8),
    _Piece("kidneys", lambda p: _kidney(p, 1, -28), (58, -38, -28), 1.8, 16.0),
    _Piece("kidneys", lambda p: _kidney(p, -1, -14), (-58, -38, -14), 1.8, 16.0),
    _Piece("pancreas", _pancreas, (-15, 5, -5), 1.4, 14.0),
    _Piece("spleen", _spleen, (-84, -26, 38), 2.5, 10.0),
    _Piece("gallbladder", _gallbladder, (38, 42, -18), 1.2, 20.0),
    _Piece("stomach", _stomach, (-40, 40, 25), 3.0, 4.0),
)


class _Waves:
    """A smooth random field: a sum of plane waves, so that it has a value at any place."""

    def __init__(
        self,
        rng: np.random.Generator,
        lengths: tuple[float, float],
        deviation: float,
        parts: int = 1,
        waves: int = 10,
    ) -> None:
        direction = rng.standard_normal((waves, 3))
        direction /= np.linalg.norm(direction, axis=1, keepdims=True)
        self.k = 2 * np.pi / rng.uniform(*lengths, (waves, 1)) * direction
        self.phase = rng.uniform(0, 2 * np.pi, (parts, waves))
        self.size = deviation * (2 / waves) ** 0.5

    def at(self, axes: Sequence[np.ndarray]) -> np.ndarray:
        """[parts, X, Y, Z] at the places of a grid, as a product of functions of x, y and z."""
        x, y, z = (np.exp(1j * np.outer(k, axis)) for k, axis in zip(self.k.T, axes, strict=True))
        plane = x[:, :, None] * y[:, None, :]
        made = []
        for phase in self.phase:
            turned = (np.exp(1j * phase)[:, None, None] * plane).reshape(len(plane), -1).T
            left = np.concatenate([np.real(turned), -np.imag(turned)], axis=1).astype(np.float32)
            right = np.concatenate([np.real(z), np.imag(z)]).astype(np.float32)
            made.append(self.size * (left @ right).reshape(len(axes[0]), len(axes[1]), len(axes[2])))
        return np.stack(made)


def _turn(angles: np.ndarray) -> np.ndarray:
    """[3, 3] from angles about x, y and z, radians."""
    made = np.eye(3)
    for axis, angle in enumerate(angles):
        i, j = (n for n in range(3) if n != axis)
        one = np.eye(3)
        one[i, i] = one[j, j] = np.cos(angle)
        one[i, j], one[j, i] = -np.sin(angle), np.sin(angle)
        made = one @ made
    return made.astype(np.float32)


def _moved(
    p: np.ndarray, turn: np.ndarray, scale: np.ndarray, centre: Sequence[float], shift: np.ndarray
) -> np.ndarray:
    """The places as a shape sees them that is scaled and turned about `centre`, then shifted."""
    about = _column(centre)
    q = p - about - _column(shift)
    q = np.tensordot(turn.T, q, 1)
    q /= _column(scale)
    return q + about


@dataclass(frozen=True)
class _Growth:
    """A tumour: organ, place in the scan, radius and half axes (as factors), and how far the organ bulges."""

    organ: str
    centre: np.ndarray
    radius: float
    stretch: np.ndarray
    bumps: _Waves
    margin: float


class _Patient:
    """The anatomy of a patient, at any place of the scan."""

    def __init__(self, rng: np.random.Generator, tumours: Sequence[str], voxel: float) -> None:
        self.turn = _turn(rng.normal(0, 0.05, 3))
        self.scale = np.exp(rng.normal(0, 0.05)) * np.exp(rng.normal(0, 0.03, 3))
        self.shift = rng.normal(0, 5, 3)
        self.bend = _Waves(rng, (120, 300), 5.0, parts=3)
        self.warp = _Waves(rng, (60, 120), 2.0, parts=3)
        self.fat, self.muscle = rng.uniform(5, 22), rng.uniform(12, 19)
        self.poses = [
            (
                _turn(rng.normal(0, 0.1, 3)),
                np.exp(rng.normal(0, 0.09)) * np.exp(rng.normal(0, 0.06, 3)),
                rng.normal(0, 4, 3),
                _Waves(rng, (30, 80), piece.bumps),
            )
            for piece in _PIECES
        ]
        self.bowel = _Waves(rng, (35, 70), 1.0)
        self.content = _Waves(rng, (60, 120), 1.0)
        self.texture = _Waves(rng, (25, 60), 1.0, parts=2)
        self.fine = _Waves(rng, (14, 30), 1.0)
        self.curve = rng.normal(0, 6)
        self.tone = _Tone(rng)
        self.growths: list[_Growth] = []
        self._grow(rng, tumours, voxel)

    def _grow(self, rng: np.random.Generator, tumours: Sequence[str], voxel: float) -> None:
        """Places the tumours at places of a fixed coarse grid, inside their organ."""
        axes = [np.arange(-n / 2 + 6, n / 2, 12).astype(np.float32) for n in FIELD]
        fields, piece = self.pieces(self.places(axes), axes)
        for organ in TUMOUR_OF:
            # drawn for every organ, so that one tumour does not change the others
            own = np.random.default_rng(rng.integers(2**63))
            if organ not in tumours:
                continue
            mine = [i for i, one in enumerate(_PIECES) if one.organ == organ]
            inside, depth = np.isin(piece, mine), -fields[mine].min(0)
            low, high = {"liver": (11, 26), "kidneys": (12, 24), "pancreas": (13, 20)}[organ]
            for _ in range(int(own.choice([1, 1, 2, 3])) if organ == "liver" else 1):
                radius = max(own.uniform(low, high), voxel)
                least = 0.4 * radius if organ == "liver" else 2.0
                where = np.argwhere(inside & (depth > min(least, 0.8 * depth[inside].max())))
                place = where[own.integers(len(where))]
                stretch = np.exp(own.normal(0, 0.15, 3))
                bumps = _Waves(own, (1.2 * radius, 3 * radius), 0.12 * radius)
                centre = np.array([axis[i] for axis, i in zip(axes, place, strict=True)])
                self.growths.append(_Growth(organ, centre, radius, stretch, bumps, own.uniform(-4, 1.5)))

    def places(self, axes: Sequence[np.ndarray]) -> np.ndarray:
        """[3, X, Y, Z] the places of a grid in the atlas, mm."""
        p = np.stack(np.meshgrid(*axes, indexing="ij")).astype(np.float32)
        p += self.bend.at(axes)
        p += self.warp.at(axes)
        return _moved(p, self.turn, self.scale, (0, 0, 0), self.shift)

    def growth(self, growth: _Growth, axes: Sequence[np.ndarray]) -> np.ndarray:
        """[X, Y, Z] the shape of a tumour before it is confined to its organ."""
        squares = [
            ((axis - c) / s) ** 2 for axis, c, s in zip(axes, growth.centre, growth.stretch, strict=True)
        ]
        far = np.sqrt(squares[0][:, None, None] + squares[1][None, :, None] + squares[2][None, None, :])
        return far - growth.radius + growth.bumps.at(axes)[0]

    def pieces(self, p: np.ndarray, axes: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """The field of every piece [pieces, X, Y, Z], and which piece has a voxel [X, Y, Z], -1: none."""
        fields = np.stack(
            [
                one.shape(_moved(p, turn, scale, one.centre, shift)) + bumps.at(axes)[0]
                for one, (turn, scale, shift, bumps) in zip(_PIECES, self.poses, strict=True)
            ]
        )
        for growth in self.growths:
            if growth.organ == "liver":
                continue
            # a thin organ bulges around its tumour
            i = self._piece_of(growth, fields, axes)
            fields[i] = _join(fields[i], self.growth(growth, axes) + growth.margin, 5)
        bonus = np.array([one.bonus for one in _PIECES], dtype=np.float32).reshape(-1, 1, 1, 1)
        depth = np.where(fields < 0, fields - bonus, 1e3)
        return fields, np.where((fields < 0).any(0), depth.argmin(0), -1)

    def _piece_of(self, growth: _Growth, fields: np.ndarray, axes: Sequence[np.ndarray]) -> int:
        """The piece of the tumour's organ that is nearest to its centre: of two kidneys the one it lies in."""
        at = tuple(int(np.abs(axis - c).argmin()) for axis, c in zip(axes, growth.centre, strict=True))
        mine = [i for i, one in enumerate(_PIECES) if one.organ == growth.organ]
        return min(mine, key=lambda i: float(fields[(i, *at)]))


# ------------------------------------------------------------------------------------------------- intensities

_TONES = {
    "liver": (54, 64, 88, 80),
    "spleen": (46, 96, 96, 84),
    "cortex": (34, 125, 122, 106),
    "medulla": (34, 72, 108, 104),
    "pancreas": (40, 84, 86, 76),
    "gallbladder": (12, 12, 12, 14),
    "muscle": (52, 58, 70, 70),
    "artery": (42, 220, 130, 98),
    "vein": (42, 72, 130, 98),
    "wall": (40, 72, 82, 76),
}
"""HU without contrast agent, and 30, 70 and 180 s after its injection."""

_SECONDS = (30.0, 70.0, 180.0)


class _Tone:
    """A patient's intensities."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.delay = np.exp(rng.normal(0, 0.2))
        self.strength = np.exp(rng.normal(0, 0.2))
        self.offset = {name: rng.normal(0, 7) for name in _TONES}
        self.content = rng.uniform(40, 115), rng.uniform(30, 60)
        self.drink = rng.uniform(5, 110)
        self.bone = rng.uniform(110, 170)
        self.contrast = {
            organ: (1 if rng.uniform() < 0.15 else -1) * rng.uniform(40, 65) for organ in TUMOUR_OF
        }

    def of(self, tissue: str, seconds: float | None) -> float:
        """HU of a tissue so long after injection."""
        plain, *later = _TONES[tissue]
        shown = plain + self.offset[tissue]
        if seconds is None:
            return shown
        enhanced = float(np.interp(np.log(seconds * self.delay), np.log(_SECONDS), later))
        return shown + self.strength * (enhanced - plain)


def _scan(
    patient: _Patient,
    axes: Sequence[np.ndarray],
    spacing: np.ndarray,
    site: AbdomenSite,
    rng: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray]:
    """Image [X, Y, Z] int16, HU, and truth [X, Y, Z] uint8."""
    p = patient.places(axes)
    fields, piece = patient.pieces(p, axes)
    piece = _whole(piece, len(_PIECES))
    truth = np.zeros(piece.shape, dtype=np.uint8)
    for i, one in enumerate(_PIECES):
        if one.organ in CLASSES:
            truth[piece == i] = CLASSES.index(one.organ) + 1
    tone, seconds = patient.tone, site.seconds
    hu = _background(patient, p, axes, fields.min(0), seconds)
    texture, lobules = patient.texture.at(axes), patient.fine.at(axes)[0]
    for i, one in enumerate(_PIECES):
        here = piece == i
        if one.organ == "kidneys":
            cortex = np.clip((fields[i][here] + 9) / 3 + texture[1][here], 0, 1)
            medulla = tone.of("medulla", seconds)
            hu[here] = medulla + (tone.of("cortex", seconds) - medulla) * cortex
        elif one.organ == "stomach":
            hu[here] = np.where(fields[i][here] > -4, tone.of("wall", seconds), tone.drink)
        else:
            mottle = {"gallbladder": 0.0, "pancreas": 14 * lobules[here]}.get(one.organ, 7 * texture[0][here])
            hu[here] = tone.of(one.organ, seconds) + mottle
    for growth in patient.growths:
        shape = patient.growth(growth, axes)
        organ = CLASSES.index(growth.organ) + 1
        here = (shape < 0) & np.isin(truth, (organ, organ + 1))
        tissues = ("cortex", "medulla") if growth.organ == "kidneys" else (growth.organ,)
        contrast, plain = tone.contrast[growth.organ], [tone.of(tissue, seconds) for tissue in tissues]
        base = max(plain) if contrast > 0 else min(plain)
        core = np.clip((-shape[here] - 0.5 * growth.radius) / (0.5 * growth.radius), 0, 1)
        hu[here] = base + contrast - 14 * core + 6 * texture[1][here]
        truth[here] = organ + 1
    hu = ndimage.gaussian_filter(hu, 0.5)
    noise = ndimage.gaussian_filter(rng.standard_normal(hu.shape, dtype=np.float32), site.grain / 2 / spacing)
    hu += site.noise * np.exp(rng.normal(0, 0.12)) * noise / noise.std()
    return np.rint(np.clip(hu, -1024, 1500)).astype(np.int16), truth


def _background(
    patient: _Patient, p: np.ndarray, axes: Sequence[np.ndarray], nearest: np.ndarray, seconds: float | None
) -> np.ndarray:
    """HU of everything but the organs: air, fat, muscle, bone, vessels, lungs, bowel. nearest: distance to an organ."""
    x, y, z = p
    tone = patient.tone
    texture = patient.texture.at(axes)[1]
    cavity = ((np.abs(x / 118) ** 2.4 + np.abs((y - 8) / 80) ** 2.4) ** (1 / 2.4) - 1) * 95
    muscle = tone.of("muscle", seconds) + 8 * texture
    hu = np.full(x.shape, -1000, dtype=np.float32)
    hu[cavity < patient.muscle + patient.fat] = -100
    hu = np.where(cavity < patient.muscle, muscle, hu)
    inside = cavity < 0
    hu[inside] = -95
    content, spread = tone.content
    loops = inside & (nearest > 4) & (z < 34) & (y > -32)
    w = patient.bowel.at(axes)[0]
    filling = content + spread * patient.content.at(axes)[0]
    hu = np.where(loops & (w > -0.5), np.where(w > -0.15, filling, tone.of("wall", seconds)), hu)
    for side in (-1, 1):
        psoas = np.hypot((x - side * (34 - 0.08 * (z - 40))) / 1.0, (y + 48) / 1.15) - np.clip(
            15 - 0.12 * z, 0, 22
        )
        back = np.hypot((x - 34 * side) / 1.5, y + 86) - 17
        hu = np.where((psoas < 0) & inside | (back < 0), muscle, hu)
    dome = 92 - 55 * ((x / 118) ** 2 + ((y - 8) / 80) ** 2)
    hu = np.where(inside & (z > dome) & (nearest > 0), -820 + 30 * texture, hu)
    bend = patient.curve * np.sin(z / 60)
    bone = tone.bone + 45 * patient.fine.at(axes)[0]
    disc = np.cos(2 * np.pi * z / 36) > 0.75
    body = np.hypot(x - bend, (y + 62) * 1.1) < 20
    hu = np.where(body, np.where(disc, 80, bone), hu)
    arch = (np.abs(x - bend) < 5) & (y < -84) & (y > -108) | (np.abs(y + 88) < 4) & (np.abs(x - bend) < 30)
    hu = np.where(arch & ~disc, bone + 80, hu)
    hu = np.where(np.hypot(x - bend, y + 84) < 7, 35, hu)
    hu = np.where(np.hypot(x + 9 - bend, y + 33) < 9, tone.of("artery", seconds), hu)
    hu = np.where(np.hypot((x - 17 - bend) / 1.2, y + 33) < 8.5, tone.of("vein", seconds), hu)
    return hu.astype(np.float32)


def _whole(piece: np.ndarray, count: int) -> np.ndarray:
    """Leaves of every piece the largest connected part."""
    kept = np.full_like(piece, -1)
    for i in range(count):
        mask = piece == i
        labelled: Any = ndimage.label(mask)
        parts = labelled[0]
        sizes = np.bincount(parts.ravel())[1:]
        if len(sizes) > 1:
            mask = parts == sizes.argmax() + 1
        kept[mask] = i
    return kept


# -------------------------------------------------------------------------------------------------------- files


def _write_case(root: Path, site: AbdomenSite, split: Split, case: AbdomenCase) -> None:
    end = "Tr" if split == "train" else "Ts"
    strict = np.zeros(len(CLASSES) + 1, dtype=np.uint8)
    for name, number in site.labels.items():
        strict[CLASSES.index(name) + 1] = number
    _save(root / f"images{end}" / f"{case.name}_0000.nii.gz", case.image, case.affine, site.axes)
    _save(root / f"labels{end}" / f"{case.name}.nii.gz", strict[case.truth], case.affine, site.axes)
    if not site.test_only:
        _save(root / f"labels{end}_all" / f"{case.name}.nii.gz", case.truth, case.affine, site.axes)


def _write_table(path: Path, table: dict[str, int], **more: Any) -> None:
    content = {"channel_names": {"0": "CT"}, "labels": {BACKGROUND: 0} | table} | more
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _save(path: Path, voxels: np.ndarray, affine: np.ndarray, axes: str) -> None:
    """Writes a volume with its axes as the site has them; its place in the world stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    turn = orientations.ornt_transform(orientations.axcodes2ornt("RAS"), orientations.axcodes2ornt(axes))
    turned = orientations.apply_orientation(voxels, turn)
    nib.save(nib.Nifti1Image(turned, affine @ orientations.inv_ornt_aff(turn, voxels.shape)), path)  # type: ignore[attr-defined]
