"""Surfaces of masks in millimetres, and pictures of several of them, without a screen and without OpenGL.

Shapes: X, Y, Z voxels; V vertices; F triangles.
"""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from mpl_toolkits.mplot3d.art3d import Poly3DCollection
from PIL import Image
from scipy.ndimage import gaussian_filter
from skimage.measure import marching_cubes

from fedatlas.core.errors import DataError

CELLS = 80
"""Along the longest side of a volume, at most about so many cells go into a surface."""
TRANSPARENT = 0.35
"""The opacity of a surface that is see-through."""
SMOOTHING = 0.7
"""Standard deviation, in cells, of the Gaussian that takes the steps off a surface."""
ELEVATION, AZIMUTH = 14.0, 80.0
"""Where the viewer stands, in degrees: above the horizontal plane, and from the patient's right to the front."""
SIDE = 340
"""Pixels of a picture's side."""


@dataclass(frozen=True, eq=False)
class Mesh:
    """vertices [V, 3] in mm; faces [F, 3], places of vertices, counter-clockwise seen from outside."""

    vertices: np.ndarray
    faces: np.ndarray

    @property
    def normals(self) -> np.ndarray:
        """[F, 3]: outward, as long as twice the triangle's area in mm²."""
        a, b, c = (self.vertices[self.faces[:, corner]] for corner in range(3))
        return np.cross(b - a, c - a)

    @property
    def area(self) -> float:
        """In mm²."""
        return float(np.linalg.norm(self.normals, axis=1).sum() / 2)


@dataclass(frozen=True, eq=False)
class Solid:
    """A surface as it is drawn: in one colour (#rrggbb), and see-through or not."""

    mesh: Mesh
    colour: str
    transparent: bool = False


def factors(shape: Sequence[int], spacing: Sequence[float], cells: int = CELLS) -> tuple[int, ...]:
    """By how many voxels per axis a mask is made coarser, so that its longest side has about `cells` cells and these
    are as nearly cubes as the voxels allow."""
    edge = max(n * step for n, step in zip(shape, spacing, strict=True)) / cells
    return tuple(max(1, round(edge / step)) for step in spacing)


def coarse(mask: np.ndarray, by: Sequence[int]) -> np.ndarray:
    """The share of every block that a mask [X, Y, Z] fills, uint8 from 0 to 255; by: voxels of a block per axis."""
    short = [(0, -size % factor) for size, factor in zip(mask.shape, by, strict=True)]
    whole = np.pad(mask.astype(np.float32), short)
    split = [n for size, factor in zip(whole.shape, by, strict=True) for n in (size // factor, factor)]
    return np.round(255 * whole.reshape(split).mean((1, 3, 5))).astype(np.uint8)


def surface(share: np.ndarray, spacing: Sequence[float]) -> Mesh | None:
    """Where what fills the cells passes one half, by marching cubes; None where a mask is empty.

    share [X, Y, Z] as of `coarse`, or a mask; spacing: mm per cell. The corner of the first cell is (0, 0, 0). A mask too
    small for one half anywhere is cut at half its largest value. Raises DataError for another number of axes or a
    spacing that is not positive.
    """
    if share.ndim != 3 or len(spacing) != 3 or not all(step > 0 for step in spacing):
        raise DataError(
            f"a surface of shape {list(share.shape)} with spacing {list(spacing)}; three axes and three positive lengths "
            "in mm are needed"
        )
    filled = share > 0
    if not filled.any():
        return None
    # what is cut out keeps a margin, in which the surface closes and the Gaussian fades
    ends = [np.flatnonzero(filled.any(tuple(a for a in range(3) if a != axis)))[[0, -1]] for axis in range(3)]
    inner = share[tuple(slice(first, last + 1) for first, last in ends)].astype(np.float32)
    margin = 3
    padded = np.pad(inner / (255 if share.dtype == np.uint8 else 1), margin)
    smooth = gaussian_filter(padded, SMOOTHING, mode="constant")
    cut = smooth if smooth.max() > 0.5 else padded
    level = min(0.5, float(cut.max()) / 2)
    vertices, faces, _, _ = marching_cubes(cut, level, spacing=tuple(spacing))
    first = np.array([first for first, _ in ends]) - margin + 0.5
    mesh = Mesh(vertices + first * np.asarray(spacing), faces)
    volume = np.einsum("fd,fd->", mesh.vertices[faces].mean(1), mesh.normals)
    return mesh if volume > 0 else Mesh(mesh.vertices, faces[:, ::-1])


def collection(solids: Sequence[Solid]) -> Poly3DCollection:
    """All triangles that face the viewer, shaded by how they stand to the light (Lambert), as if every solid were opaque.
    They are one collection, so that matplotlib sorts them by depth across the solids."""
    to_viewer, _, to_light = _directions()
    corners, colours = [np.zeros((0, 3, 3))], [np.zeros((0, 3))]
    for solid in solids:
        normals = solid.mesh.normals
        normals = normals / np.maximum(np.linalg.norm(normals, axis=1, keepdims=True), 1e-12)
        seen = normals @ to_viewer > 0
        bright = 0.42 + 0.58 * np.clip(normals[seen] @ to_light, 0, 1)
        corners.append(solid.mesh.vertices[solid.mesh.faces[seen]])
        colours.append(bright[:, None] * np.array(to_rgb(solid.colour)))
    # without antialiasing the edges between triangles do not show; the picture is made smaller instead
    return Poly3DCollection(
        np.concatenate(corners), facecolors=np.concatenate(colours), linewidths=0, antialiased=False
    )


def _directions() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Unit vectors to the viewer, to the viewer's right, and to the light, which is above the left shoulder."""
    e, a = np.radians([ELEVATION, AZIMUTH])
    viewer = np.array([np.cos(e) * np.cos(a), np.cos(e) * np.sin(a), np.sin(e)])
    right = np.array([-np.sin(a), np.cos(a), 0.0])
    light = viewer + 0.7 * np.array([0.0, 0.0, 1.0]) - 0.5 * right
    return viewer, right, light / np.linalg.norm(light)


def limits(meshes: Sequence[Mesh]) -> tuple[np.ndarray, np.ndarray]:
    """The lowest and the highest corner, in mm, of what holds all meshes."""
    corners = np.concatenate([mesh.vertices for mesh in meshes])
    return corners.min(0), corners.max(0)


def render(solids: Sequence[Solid], box: tuple[np.ndarray, np.ndarray]) -> bytes:
    """A PNG file of SIDE x SIDE pixels with a clear background: the solids seen from the front and a little from above,
    in parallel projection. Their axes are x to the patient's right, y to the front, z up.

    What is transparent covers what is behind it by TRANSPARENT, and where several such surfaces lie over each other, the
    one in front is seen. box: as `limits`, what the picture holds; the same box gives the same scale and viewpoint.
    """
    opaque = [solid for solid in solids if not solid.transparent]
    drawn = _drawn([opaque] if len(opaque) == len(solids) else [opaque, solids], box)
    # where an opaque solid is in front, both pictures are the same
    mixed = drawn[0] + TRANSPARENT * (drawn[-1] - drawn[0])
    opacity = mixed[..., 3:]
    colours = mixed[..., :3] / np.maximum(opacity, 1e-6)
    pixels = np.round(255 * np.clip(np.concatenate([colours, opacity], 2), 0, 1)).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="PNG")
    return file.getvalue()


def _drawn(scenes: Sequence[Sequence[Solid]], box: tuple[np.ndarray, np.ndarray]) -> list[np.ndarray]:
    """[SIDE, SIDE, 4] of each: red, green and blue times opacity, and opacity, in 0..1."""
    figure = Figure(figsize=(2 * SIDE / 100, 2 * SIDE / 100), dpi=100, facecolor="none")
    canvas = FigureCanvasAgg(figure)
    axes: Any = figure.add_axes((0, 0, 1, 1), projection="3d", facecolor="none")
    axes.set_axis_off()
    axes.set_proj_type("ortho")
    viewer, right, _ = _directions()
    plane = np.stack([right, np.cross(viewer, right)])
    corners = np.array(list(product(*zip(*box, strict=True))))
    half = float(np.ptp(corners @ plane.T, axis=0).max()) / 2 or 1.0
    for axis, centre in zip("xyz", (box[0] + box[1]) / 2, strict=True):
        getattr(axes, f"set_{axis}lim")(centre - half, centre + half)
    axes.set_box_aspect(
        (1, 1, 1), zoom=1.55
    )  # with which a length of 2 * half fills all but a margin of the picture
    axes.view_init(elev=ELEVATION, azim=AZIMUTH)
    found = []
    for solids in scenes:
        shown = axes.add_collection3d(collection(solids), autolim=False)
        canvas.draw()
        shown.remove()
        pixels = np.asarray(canvas.buffer_rgba(), dtype=np.float64) / 255
        pixels[..., :3] *= pixels[..., 3:]
        found.append(pixels.reshape(SIDE, 2, SIDE, 2, 4).mean((1, 3)))
    return found


def inline(png: bytes) -> str:
    """A PNG file as an address that holds it."""
    return "data:image/png;base64," + base64.b64encode(png).decode()
