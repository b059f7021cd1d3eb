"""Slices and images as SVG, in millimetres, with masks, contours and maps over them."""

import base64
import io
from collections.abc import Mapping

import numpy as np
from contourpy import contour_generator
from markupsafe import Markup, escape
from PIL import Image

from fedatlas.report.read import Example, Plane

MOST = 320
"""Pixels of the longer side of a whole slice on the page, at most."""
SIDE = 224
"""The same of an example."""
TRUTH = "#ffe14a"
"""The colour of the truth's contour."""


def plane(
    shown: Plane,
    colours: Mapping[str, str],
    titles: Mapping[str, str],
    description: str,
    *,
    measured: bool = True,
) -> Markup:
    """A whole slice: the image in gray, every class's prediction filled in its colour, its truth as a dashed white line, and,
    where its lengths were measured, a bar for the scale. colours: class -> CSS colour; titles: class -> what a reader calls
    it, plain text."""
    height, width = (size * step for size, step in zip(shown.image.shape, shown.spacing, strict=True))
    filled = "".join(
        _area(mask, shown.spacing, colours[name], 0.42, 1, f' data-tip="{escape(titles[name])}"')
        for name, mask in shown.prediction.items()
    )
    outlined = "".join(_line(mask, shown.spacing, "#fff") for mask in shown.truth.values())
    bar = max((b for b in (1, 2, 5, 10, 20, 50, 100, 200) if b <= width / 3), default=width / 3)
    left, base = 0.04 * width, height - 0.04 * width
    scale = (
        ""
        if not measured
        else (
            f'<path d="M{left:.2f} {base:.2f}h{bar:.2f}" fill="none" vector-effect="non-scaling-stroke" stroke="#fff" '
            f'stroke-width="3"/><text x="{left:.2f}" y="{base - 0.02 * width:.2f}" font-size="{0.05 * width:.2f}" '
            f'fill="#fff">{bar:g} mm</text>'
        )
    )
    by, small = smaller(shown.image, MOST)
    spacing = (shown.spacing[0] * by, shown.spacing[1] * by)
    return _slice(small, spacing, filled + outlined + scale, description, box=(width, height))


def labelled(
    image: np.ndarray,
    masks: Mapping[str, np.ndarray],
    colours: Mapping[str, str],
    spacing: tuple[float, float],
    around: np.ndarray,
    description: str,
    truth: Mapping[str, np.ndarray] | None = None,
) -> Markup:
    """One slice: the image in gray, every class filled and outlined in its colour, and the contours of the truth over it as
    dashed yellow lines.

    image [H, W] in 0..1; masks, truth: class -> [H, W]; colours: class -> CSS colour; around [H, W]: what the window is
    cropped to, so that the same window serves several pictures of a slice.
    """
    window = _window(around, spacing)
    drawn = [_area(mask[window], spacing, colours[name], 0.38, 1.4) for name, mask in masks.items()]
    drawn += [_line(mask[window], spacing, TRUTH) for mask in (truth or {}).values()]
    return _slice(image[window], spacing, "".join(drawn), description)


def heated(
    image: np.ndarray,
    cam: np.ndarray,
    truth: np.ndarray,
    spacing: tuple[float, float],
    description: str,
) -> Markup:
    """One slice: the image in gray, a map over it as colour, and the contour of the truth as a dashed yellow line. image, cam
    [H, W] in 0..1, truth [H, W] bool."""
    return _slice(image, spacing, _glow(cam, spacing, 96) + _line(truth, spacing, TRUTH), description)


def example(entry: Example) -> Markup:
    """One image, a pixel for a millimetre, with its Grad-CAM map in colour over it and the map's half height as a line."""
    image, cam = entry.arrays()
    over = ""
    if cam is not None and cam.max() > 0:
        cam = smaller(cam, SIDE)[1]
        over = _glow(cam, (1.0, 1.0), 32) + _line(cam >= 0.5, (1.0, 1.0), "#ffd54a", 1.1, dashed=False)
        over = f'<g class="cam">{over}</g>'
    description = f"{entry.class_}, case {entry.case}, site {entry.site}: score {entry.score:.3f}"
    return _slice(smaller(image, SIDE)[1], (1.0, 1.0), over, description)


def smaller(image: np.ndarray, most: int) -> tuple[int, np.ndarray]:
    """The means of square blocks, so that no side is longer than `most`, and the side of a block."""
    by = -(-max(image.shape) // most)
    if by == 1 or min(image.shape) < by:
        return 1, image
    rows, columns = (size // by * by for size in image.shape)
    blocks = image[:rows, :columns].reshape(rows // by, by, columns // by, by)
    return by, blocks.mean((1, 3))


def _slice(
    image: np.ndarray,
    spacing: tuple[float, float],
    drawn: str,
    description: str,
    box: tuple[float, float] | None = None,
) -> Markup:
    """A slice in gray with what is drawn over it. box: width and height, if not those of the image."""
    pixels = Image.fromarray(np.round(255 * np.clip(image, 0, 1)).astype(np.uint8), "L")
    wide, high = box or (image.shape[1] * spacing[1], image.shape[0] * spacing[0])
    return Markup(
        f'<svg class="overlay" viewBox="0 0 {wide:.2f} {high:.2f}" role="img" aria-label="{escape(description)}">'
        f"<title>{escape(description)}</title>{_picture(pixels, image.shape, spacing)}{drawn}</svg>"
    )


def _picture(pixels: Image.Image, shape: tuple[int, ...], spacing: tuple[float, float]) -> str:
    """A picture over as many millimetres as an image of this shape has."""
    file = io.BytesIO()
    pixels.save(file, format="PNG", optimize=True)
    return (
        f'<image width="{shape[1] * spacing[1]:.2f}" height="{shape[0] * spacing[0]:.2f}" preserveAspectRatio="none" '
        f'href="data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"/>'
    )


def _glow(cam: np.ndarray, spacing: tuple[float, float], most: int) -> str:
    """A map in 0..1 as a picture of at most so many rows and columns, from clear over red to yellow; the browser smooths
    it. "" where nothing is positive."""
    if cam.max() <= 0:
        return ""
    rows, columns = (max(1, min(most, size)) for size in cam.shape)
    y = np.linspace(0, cam.shape[0] - 1, rows).round().astype(int)
    x = np.linspace(0, cam.shape[1] - 1, columns).round().astype(int)
    small = np.clip(cam[np.ix_(y, x)], 0, 1)
    pixels = np.empty((rows, columns, 4), np.uint8)
    pixels[..., 0] = 255
    pixels[..., 1] = np.round(220 * small**1.5)
    pixels[..., 2] = 30
    pixels[..., 3] = np.round(150 * small)
    return _picture(Image.fromarray(pixels, "RGBA"), cam.shape, spacing)


def _area(
    mask: np.ndarray, spacing: tuple[float, float], colour: str, opacity: float, width: float, more: str = ""
) -> str:
    """A mask filled and outlined in a colour; "" for an empty one."""
    if not mask.any():
        return ""
    return (
        f'<path d="{contours(mask, spacing)}" fill="{colour}" fill-opacity="{f"{opacity:g}".lstrip("0")}" fill-rule="evenodd" '
        f'stroke="{colour}" stroke-width="{width:g}" vector-effect="non-scaling-stroke"{more}/>'
    )


def _line(
    mask: np.ndarray, spacing: tuple[float, float], colour: str, width: float = 1.5, *, dashed: bool = True
) -> str:
    """The outline of a mask as a line that shows on any ground; "" for an empty one."""
    if not mask.any():
        return ""
    line = f'd="{contours(mask, spacing)}" fill="none" vector-effect="non-scaling-stroke"'
    dashes = ' class="truth" stroke-dasharray="4 3"' if dashed else ""
    return (
        f'<path {line} stroke="#000" stroke-opacity=".5" stroke-width="{width + 1.2:g}"/>'
        f'<path {line} stroke="{colour}" stroke-width="{width:g}"{dashes}/>'
    )


def _window(mask: np.ndarray, spacing: tuple[float, float]) -> tuple[slice, slice]:
    """The part of a slice that is shown: a square in mm around the mask, at least 40 % of the shorter side."""
    extent = [size * step for size, step in zip(mask.shape, spacing, strict=True)]
    if not mask.any():
        return slice(None), slice(None)
    ends = [(np.flatnonzero(mask.any(1 - axis))[[0, -1]] + (0, 1)) * spacing[axis] for axis in (0, 1)]
    side = max(2.2 * max(float(end - start) for start, end in ends), 0.4 * min(extent))
    cuts = []
    for axis in (0, 1):
        size = min(side, extent[axis])
        start = min(max(float(ends[axis].mean()) - size / 2, 0.0), extent[axis] - size)
        first = round(start / spacing[axis])
        cuts.append(slice(first, max(first + 1, round((start + size) / spacing[axis]))))
    return cuts[0], cuts[1]


def contours(mask: np.ndarray, spacing: tuple[float, float]) -> str:
    """The outlines of a mask as the data of an SVG path, in mm; pixel (0, 0) covers the first spacing."""
    padded = np.pad(mask.astype(float), 1)
    lines = contour_generator(
        x=(np.arange(padded.shape[1]) - 0.5) * spacing[1],
        y=(np.arange(padded.shape[0]) - 0.5) * spacing[0],
        z=padded,
    ).lines(0.5)
    return "".join(
        "M" + "L".join(f"{x:.2f} {y:.2f}" for x, y in np.asarray(line)[:-1]) + "Z" for line in lines
    )
