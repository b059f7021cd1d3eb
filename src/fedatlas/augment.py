"""Random views of a batch: pure functions of tensors and a generator, in 2D and in 3D.

Shapes: B batch, I input channels, C classes, *S spatial.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from fedatlas.options import option, options

Range = tuple[float, float]


@options
class Augmentation:
    """How training patches are varied. Every sample draws for itself."""

    spatial: float = option(0.5, "Chance that a sample is rotated, scaled and moved.", ge=0, le=1)
    rotation: float = option(15.0, "Largest angle in degrees, about every axis in 3D.", ge=0, le=180)
    scaling: Range = option((0.85, 1.15), "Size of what is seen; above 1 enlarges.")
    translation: float = option(0.05, "Largest shift, as a share of the patch.", ge=0, le=1)
    mirror: tuple[int, ...] = option(
        (), "Axes of the patch, from 0, that are flipped at random; none keeps left and right."
    )
    intensity: float = option(0.5, "Chance that a sample's values are changed.", ge=0, le=1)
    contrast: Range = option((0.8, 1.2), "Factor on the distance of values from their mean.")
    brightness: float = option(0.1, "Largest amount added, in deviations of the sample's values.", ge=0)
    gamma: Range = option((0.8, 1.25), "Exponent on the values, scaled to 0..1 and back.")
    noise: float = option(
        0.05, "Largest deviation of added Gaussian noise, in deviations of the sample's values.", ge=0
    )


def augment(
    image: Tensor, target: Tensor, options: Augmentation, rng: torch.Generator
) -> tuple[Tensor, Tensor]:
    """A varied copy of a batch on the CPU.

    image: [B, I, *S] float; target: [B, *S] class index, or masks [B, C, *S]. The image is interpolated
    linearly, the target takes its nearest neighbour; what comes from outside is the border's value in the
    image and 0 in the target.
    """
    if options.spatial > 0:
        image, target = _spatial(image, target, options, rng)
    for axis in options.mirror:
        image, target = _mirror(image, target, axis, rng)
    return (_intensity(image, options, rng) if options.intensity > 0 else image), target


def _uniform(n: int, low: float, high: float, rng: torch.Generator) -> Tensor:
    return low + (high - low) * torch.rand(n, generator=rng)


def _chosen(n: int, chance: float, rng: torch.Generator) -> Tensor:
    return torch.rand(n, generator=rng) < chance


def _spatial(
    image: Tensor, target: Tensor, options: Augmentation, rng: torch.Generator
) -> tuple[Tensor, Tensor]:
    n, dims = len(image), image.dim() - 2
    chosen = _chosen(n, options.spatial, rng)
    turn = torch.eye(dims).repeat(n, 1, 1)
    for i in range(dims):
        for j in range(i + 1, dims):
            angle = _uniform(n, -options.rotation, options.rotation, rng) * math.pi / 180
            plane = torch.eye(dims).repeat(n, 1, 1)
            plane[:, i, i] = plane[:, j, j] = angle.cos()
            plane[:, i, j], plane[:, j, i] = -angle.sin(), angle.sin()
            turn = turn @ plane
    turn = turn / _uniform(n, *options.scaling, rng)[:, None, None]
    shift = _uniform(n * dims, -2 * options.translation, 2 * options.translation, rng).reshape(n, dims, 1)
    if not bool(chosen.any()):
        return image, target
    # angles are those of voxels: grid coordinates run from -1 to 1 along every axis, whatever its length,
    # and name the last axis first
    sizes = torch.tensor(image.shape[2:], dtype=torch.float32).flip(0)
    turn = turn * (sizes[None, None, :] / sizes[None, :, None])
    some = chosen.nonzero()[:, 0]
    theta = torch.cat([turn, shift], 2)[some]
    grid = F.affine_grid(theta, [len(some), 1, *image.shape[2:]], align_corners=False)
    masks = target if target.dim() == image.dim() else target[:, None]
    moved = F.grid_sample(image[some], grid, mode="bilinear", padding_mode="border", align_corners=False)
    labels = F.grid_sample(
        masks[some].float(), grid, mode="nearest", padding_mode="zeros", align_corners=False
    )
    image, masks = image.clone(), masks.clone()
    image[some], masks[some] = moved, labels.to(masks.dtype)
    return image, masks if target.dim() == image.dim() else masks[:, 0]


def _mirror(image: Tensor, target: Tensor, axis: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    some = _chosen(len(image), 0.5, rng).nonzero()[:, 0]
    dims = image.dim() - 2
    image, target = image.clone(), target.clone()
    image[some] = image[some].flip(axis - dims)
    target[some] = target[some].flip(axis - dims)
    return image, target


def _intensity(image: Tensor, options: Augmentation, rng: torch.Generator) -> Tensor:
    n = len(image)
    chosen = _chosen(n, options.intensity, rng)
    draws = {
        "contrast": _uniform(n, *options.contrast, rng),
        "brightness": _uniform(n, -options.brightness, options.brightness, rng),
        "gamma": _uniform(n, *options.gamma, rng),
        "noise": _uniform(n, 0, options.noise, rng),
    }
    gaussian = torch.randn(image.shape, generator=rng) if options.noise > 0 else None
    some = chosen.nonzero()[:, 0]
    if not len(some):
        return image
    draws = {name: value[some].reshape(-1, *[1] * (image.dim() - 1)) for name, value in draws.items()}
    values = image[some]
    axes = tuple(range(1, image.dim()))
    low, high = values.amin(axes, keepdim=True), values.amax(axes, keepdim=True)
    span = (high - low).clamp(min=1e-6)
    values = ((values - low) / span).clamp(min=0).pow(draws["gamma"]) * span + low
    mean, deviation = values.mean(axes, keepdim=True), values.std(axes, keepdim=True)
    values = (values - mean) * draws["contrast"] + mean + draws["brightness"] * deviation
    if gaussian is not None:
        values = values + draws["noise"] * deviation * gaussian[some]
    image = image.clone()
    image[some] = values
    return image
