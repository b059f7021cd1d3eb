"""Training patches, varied: pure functions of tensors and a generator.

Shapes: B batch, I input channels, C classes, *S spatial, two or three axes.
"""

import math
from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedatlas.core.errors import FederationError
from fedatlas.core.options import option, options


@options
class Augmentation:
    """How training patches are varied. Every chance is drawn per patch."""

    rotation: float = option(15.0, "Largest turn about every axis, degrees.", ge=0, le=180)
    turns: Literal["all", "slice"] = option(
        "all", "Of patches with three axes: turns about all of them, or in the slice alone, about the last."
    )
    p_rotation: float = option(0.3, "Chance of a turn.", ge=0, le=1)
    scaling: tuple[float, float] = option((0.85, 1.15), "Smallest and largest magnification.")
    p_scaling: float = option(0.3, "Chance of a magnification.", ge=0, le=1)
    translation: float = option(0.05, "Largest shift along every axis, in parts of the patch.", ge=0, le=0.5)
    p_translation: float = option(0.2, "Chance of a shift.", ge=0, le=1)
    mirror: tuple[int, ...] = option(
        (), "Axes that may be flipped, 0 the first; leave out left-right where classes are left or right."
    )
    p_mirror: float = option(0.5, "Chance of a flip, for each of these axes.", ge=0, le=1)
    elastic: float = option(0.0, "Deviation of an elastic deformation at its control points, voxels.", ge=0)
    p_elastic: float = option(0.2, "Chance of an elastic deformation.", ge=0, le=1)
    noise: float = option(
        0.1, "Largest deviation of Gaussian noise, in deviations of the patch's intensities.", ge=0
    )
    p_noise: float = option(0.15, "Chance of noise.", ge=0, le=1)
    blur: tuple[float, float] = option(
        (0.5, 1.0), "Smallest and largest deviation of a Gaussian blur, voxels."
    )
    p_blur: float = option(0.1, "Chance of a blur.", ge=0, le=1)
    brightness: tuple[float, float] = option((0.75, 1.25), "Smallest and largest factor of the intensities.")
    p_brightness: float = option(0.15, "Chance of a factor.", ge=0, le=1)
    offset: float = option(
        0.0,
        "Largest number that is added to all intensities of a patch, or taken off, after `preprocessing`.",
        ge=0,
    )
    p_offset: float = option(0.15, "Chance of an offset.", ge=0, le=1)
    contrast: tuple[float, float] = option(
        (0.75, 1.25), "Smallest and largest factor of the distance from the mean; the range is kept."
    )
    p_contrast: float = option(0.15, "Chance of another contrast.", ge=0, le=1)
    gamma: tuple[float, float] = option((0.7, 1.5), "Smallest and largest exponent on the patch's range.")
    p_gamma: float = option(0.15, "Chance of an exponent.", ge=0, le=1)

    def __post_init__(self) -> None:
        for name in ("scaling", "blur", "brightness", "contrast", "gamma"):
            low, high = getattr(self, name)
            if not 0 < low <= high:
                raise FederationError(
                    f"augmentation: {name} is {[low, high]}; allowed: two numbers above 0, the lower first"
                )
        if any(axis not in (0, 1, 2) for axis in self.mirror):
            raise FederationError(f"augmentation: mirror is {list(self.mirror)}; axes are 0, 1 and 2")


OFF = Augmentation(  # type: ignore[call-arg]
    p_rotation=0, p_scaling=0, p_translation=0, p_elastic=0, p_noise=0, p_blur=0, p_brightness=0,
    p_contrast=0, p_gamma=0,
)  # fmt: skip
"""No augmentation."""

STRONG = Augmentation(  # type: ignore[call-arg]
    rotation=20, p_rotation=0.8, scaling=(0.75, 1.25), p_scaling=0.8, translation=0.1, p_translation=0.8,
    noise=0.25, p_noise=0.5, blur=(0.5, 1.5), p_blur=0.5, brightness=(0.6, 1.6), p_brightness=0.8,
    contrast=(0.6, 1.6), p_contrast=0.8, gamma=(0.6, 1.7), p_gamma=0.5,
)  # fmt: skip
"""For the strongly varied views of consistency and contrastive learning."""


def augment(
    image: Tensor,
    target: Tensor,
    how: Augmentation,
    rng: torch.Generator,
    *,
    spacing: Tensor | None = None,
    images: int = 1,
) -> tuple[Tensor, Tensor]:
    """Varies a batch: image [B, I, *S] float; target [B, *S] class index, [B, C, *S] masks, or [B, C], which no
    movement changes. Returns new tensors.

    spacing: [B, axes] voxel size, so that turns are turns in mm; None: voxels are cubes.
    images: the I channels belong to so many images (a slice and its neighbours to one); intensities are varied
        per image.
    """
    image, target = move(image, target, how, rng, spacing=spacing)
    return vary_intensity(image, how, rng, images=images), target


def augment_along(
    image: Tensor,
    target: Tensor,
    along: Tensor,
    how: Augmentation,
    rng: torch.Generator,
    *,
    spacing: Tensor | None = None,
    images: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    """`augment` of a batch that has maps of its images, along [B, C, *S]: they move as the image does, linearly, and
    keep their values. Image and target are bit for bit those of `augment`, with the same random numbers."""
    both, target = move(torch.cat([image, along], 1), target, how, rng, spacing=spacing)
    image, along = both.split([image.shape[1], along.shape[1]], 1)
    return vary_intensity(image, how, rng, images=images), target, along


def move(
    image: Tensor,
    target: Tensor,
    how: Augmentation,
    rng: torch.Generator,
    *,
    spacing: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Turn, magnification, shift, flips and elastic deformation in one resampling: linear for images, nearest for
    targets. What comes in from beyond the patch repeats its edge, in both alike."""
    size, axes = image.shape[2:], image.dim() - 2
    matrix, shift, moved = _placements(len(image), axes, how, rng)
    bent = _chance(len(image), how.p_elastic if how.elastic else 0.0, rng)
    chosen = (moved | bent).nonzero()[:, 0]
    if len(chosen) == 0:
        return image, target
    matrix, shift, bent = matrix[chosen], shift[chosen], bent[chosen]
    if spacing is not None:
        mm = spacing.to(matrix)[chosen]
        matrix = matrix * mm[:, None, :] / mm[:, :, None]
    extent = torch.tensor([float(n) for n in size])
    matrix = matrix * extent[None, None, :] / extent[None, :, None]
    # grid_sample counts axes from the last one
    theta = torch.cat([matrix.flip(1, 2), 2 * shift.flip(1)[:, :, None]], dim=2)
    grid = F.affine_grid(theta, [len(chosen), 1, *size], align_corners=False)
    if bool(bent.any()):
        coarse = torch.randn((len(chosen), axes, *[min(5, n) for n in size]), generator=rng)
        coarse = coarse * (how.elastic * bent.float()).reshape(-1, *[1] * (axes + 1))
        smooth = F.interpolate(
            coarse, size=list(size), mode="trilinear" if axes == 3 else "bicubic", align_corners=True
        )
        voxel = (2 / extent).flip(0)
        grid = grid + smooth.movedim(1, -1) * voxel
    grid, chosen = grid.to(image.device), chosen.to(image.device)
    image, moving = image.clone(), target.dim() > 2
    image[chosen] = F.grid_sample(
        image[chosen], grid, mode="bilinear", padding_mode="border", align_corners=False
    )
    if moving:
        part = target[chosen].float()
        masks = part.dim() == image.dim()
        part = F.grid_sample(
            part if masks else part[:, None], grid, mode="nearest", padding_mode="border", align_corners=False
        )
        target = target.clone()
        target[chosen] = (part if masks else part[:, 0]).to(target.dtype)
    return image, target


def _chance(count: int, p: float, rng: torch.Generator) -> Tensor:
    return torch.rand(count, generator=rng) < p


def _between(count: int | Sequence[int], low: float, high: float, rng: torch.Generator) -> Tensor:
    return low + (high - low) * torch.rand(count, generator=rng)


def _log_between(count: int | Sequence[int], limits: tuple[float, float], rng: torch.Generator) -> Tensor:
    """A factor and its inverse are equally likely."""
    return _between(count, math.log(limits[0]), math.log(limits[1]), rng).exp()


def _placements(
    count: int, axes: int, how: Augmentation, rng: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Where each output voxel is taken from, relative to the patch's centre: matrices [B, axes, axes], shifts
    [B, axes] in parts of the patch, and which samples move at all [B]."""
    matrix = torch.eye(axes).repeat(count, 1, 1)
    turned = _chance(count, how.p_rotation, rng)
    in_slice = axes == 2 or how.turns == "slice"
    for first, second in [(0, 1)] if in_slice else [(0, 1), (0, 2), (1, 2)]:
        angle = _between(count, -1, 1, rng) * math.radians(how.rotation) * turned
        turn = torch.eye(axes).repeat(count, 1, 1)
        turn[:, first, first] = turn[:, second, second] = angle.cos()
        turn[:, first, second], turn[:, second, first] = -angle.sin(), angle.sin()
        matrix = matrix @ turn
    scaled = _chance(count, how.p_scaling, rng)
    factor = torch.where(scaled, 1 / _log_between(count, how.scaling, rng), torch.ones(count))
    matrix = matrix * factor[:, None, None]
    moved = turned | scaled
    for axis in how.mirror:
        if axis < axes:
            flipped = _chance(count, how.p_mirror, rng)
            matrix[:, :, axis] = torch.where(flipped[:, None], -matrix[:, :, axis], matrix[:, :, axis])
            moved = moved | flipped
    shifted = _chance(count, how.p_translation, rng)
    shift = _between((count, axes), -1, 1, rng) * how.translation * shifted[:, None]
    return matrix, shift, moved | shifted


def vary_intensity(image: Tensor, how: Augmentation, rng: torch.Generator, *, images: int = 1) -> Tensor:
    """Noise, blur, brightness, offset, contrast and gamma, in this order; [B, I, *S] -> a new tensor of the same shape."""
    shape = image.shape
    image = image.reshape(shape[0] * images, shape[1] // images, *shape[2:]).clone()
    count, ones = len(image), [1] * (image.dim() - 1)
    dims = tuple(range(1, image.dim()))

    def rows(p: float) -> Tensor:
        # per image; the device's generator is never asked, so that every device draws the same
        return _chance(count, p, rng).nonzero()[:, 0]

    if len(chosen := rows(how.p_noise)):
        strength = _between(len(chosen), 0, how.noise, rng).reshape(-1, *ones).to(image.device)
        drawn = torch.randn((len(chosen), *image.shape[1:]), generator=rng).to(image.device)
        part = image[chosen.to(image.device)]
        image[chosen.to(image.device)] = part + drawn * strength * part.std(dims, correction=0, keepdim=True)
    if len(chosen := rows(how.p_blur)):
        sigma = _between(len(chosen), *how.blur, rng).to(image.device)
        image[chosen.to(image.device)] = blurred(image[chosen.to(image.device)], sigma)
    if len(chosen := rows(how.p_brightness)):
        factor = _log_between(len(chosen), how.brightness, rng).reshape(-1, *ones).to(image.device)
        image[chosen.to(image.device)] *= factor
    # without an offset no number is drawn, so that what was trained before there was one repeats
    if how.offset and len(chosen := rows(how.p_offset)):
        added = _between(len(chosen), -how.offset, how.offset, rng).reshape(-1, *ones).to(image.device)
        image[chosen.to(image.device)] += added
    if len(chosen := rows(how.p_contrast)):
        factor = _log_between(len(chosen), how.contrast, rng).reshape(-1, *ones).to(image.device)
        part = image[chosen.to(image.device)]
        mean, low, high = (
            part.mean(dims, keepdim=True),
            part.amin(dims, keepdim=True),
            part.amax(dims, keepdim=True),
        )
        image[chosen.to(image.device)] = ((part - mean) * factor + mean).clamp(low, high)
    if len(chosen := rows(how.p_gamma)):
        power = _log_between(len(chosen), how.gamma, rng).reshape(-1, *ones).to(image.device)
        part = image[chosen.to(image.device)]
        low = part.amin(dims, keepdim=True)
        span = (part.amax(dims, keepdim=True) - low).clamp_min(1e-6)
        image[chosen.to(image.device)] = ((part - low) / span).clamp(0, 1) ** power * span + low
    return image.reshape(shape)


def blurred(image: Tensor, sigma: Tensor) -> Tensor:
    """A Gaussian blur of an image [B, I, *S] by sigma [B] voxels, along every spatial axis; edges are repeated."""
    reach = max(1, math.ceil(3 * float(sigma.max())))
    steps = torch.arange(-reach, reach + 1, device=image.device)
    weight = torch.exp(-0.5 * (steps / sigma[:, None]) ** 2)
    weight = (weight / weight.sum(1, keepdim=True)).reshape(len(sigma), -1, *[1] * (image.dim() - 1))
    for axis in range(2, image.dim()):
        length = image.shape[axis]
        place = torch.arange(length, device=image.device)
        total = torch.zeros_like(image)
        for tap in range(2 * reach + 1):
            total.addcmul_(
                image.index_select(axis, (place + tap - reach).clamp(0, length - 1)), weight[:, tap]
            )
        image = total
    return image
