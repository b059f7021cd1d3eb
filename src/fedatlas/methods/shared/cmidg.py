"""CMIDG: an image as another scanner might have shown it. Pure functions of tensors and a generator.

Ouyang, Chen, Li, Li, Qin, Bai, Rueckert. Causality-inspired single-source domain generalization for medical image
segmentation. IEEE Transactions on Medical Imaging 2022. Used by UFPS (Jiang et al.) for the ascent of sUSAM.

    GIN   g(x) = ||x|| y / ||y||,   y = alpha net(x) + (1 - alpha) x,   alpha ~ U(0, 1)
          net: a few convolutions with kernels and shifts from N(0, 1), leaky ReLU between them
    IPA   x' = m g_1(x) + (1 - m) g_2(x),   m = (f - min f) / (max f - min f),   f = exp(B-spline(random points))

||.|| is the Frobenius norm of a sample, over its channels and voxels. GIN (global intensity non-linear augmentation)
keeps it; single voxels may leave the range of the input. IPA (interventional pseudo-correlation augmentation) blends
two such views by a smooth mask, so that neighbouring organs do not change together: every voxel lies between the
two views, hence ||x'|| <= sqrt(2) ||x||. Labels stay as they are, for nothing moves.

alpha, kernels, shifts, control points and mask are of each sample alone. The sizes of the kernels are drawn once per
batch, and all numbers come from one stream, so what a sample gets depends on its place in the batch and on the
batch's length, though never on what another sample shows.

Differences from the official code: 3D has IPA too (its authors gave only 2D, UFPS extended it); the norm is kept to
rounding, where the code adds 1e-5 to the divisor; quadratic and cubic splines are exact where the code convolves
boxes; no 16-bit arithmetic. The code scales f to [1 - 0.3, 1 + 0.3] before the mask is taken: the mask is the same
without. `grid` counts voxels of the image, where the code's 24 counts those of half its resolution. UFPS's own code
runs narrower nets and linear splines: `UFPS_CODE`.

Shapes: B batch, I input channels, *S spatial, two or three axes, *P control points per axis.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedatlas.core.errors import DataError, FederationError
from fedatlas.core.options import option, options


@options
class CMIDG:
    """How CMIDG draws its random nets and its mask; the defaults are those of its authors."""

    layers: int = option(4, "Convolutions of a random net; the last has no activation.", ge=1)
    channels: int = option(2, "Channels between two convolutions of a random net.", ge=1)
    kernels: tuple[int, ...] = option(
        (1, 3), "Edges that a kernel may have, voxels, odd; each layer draws one.", min_length=1
    )
    grid: tuple[int, ...] = option(
        (48,), "Distance of the mask's control points, voxels, even: one for all axes, or one per axis."
    )
    order: int = option(2, "Degree of the B-spline between the control points.", ge=1, le=3)

    def __post_init__(self) -> None:
        if any(edge < 1 or edge % 2 == 0 for edge in self.kernels):
            raise FederationError(f"cmidg: kernels is {list(self.kernels)}; allowed: odd numbers from 1")
        if len(self.grid) not in (1, 2, 3) or any(step < 2 or step % 2 for step in self.grid):
            raise FederationError(
                f"cmidg: grid is {list(self.grid)}; allowed: one even number from 2, or one per axis"
            )


UFPS_CODE = CMIDG(channels=1, order=1)  # type: ignore[call-arg]
"""The settings of UFPS's official code."""


@dataclass(frozen=True)
class Network:
    """Random shallow nets, one per sample; J and O are a layer's channels in and out, *K its kernel's edges."""

    alpha: Tensor
    """[B], the share of the net in its sample's mixture."""
    kernels: tuple[Tensor, ...]
    """[B, O, J, *K] per layer."""
    shifts: tuple[Tensor, ...]
    """[B, O] per layer."""


def cmidg(image: Tensor, how: CMIDG, rng: torch.Generator) -> Tensor:
    """GIN and IPA: [B, I, *S] float -> a new tensor of the same shape, type and device, without a gradient.

    Draws the first view, the second, then the mask. Raises DataError for an image of another shape or type, and
    FederationError if `how.grid` has another number of axes.
    """
    _check(image)
    steps = _steps(how, image.dim() - 2)
    first, second = gin(image, how, rng), gin(image, how, rng)
    points = control_points(len(image), image.shape[2:], how, rng).to(image.device)
    return blend(first, second, smooth_mask(points, image.shape[2:], steps, how.order))


def gin(image: Tensor, how: CMIDG, rng: torch.Generator) -> Tensor:
    """One GIN view: [B, I, *S] float -> a new tensor of the same shape, type, device and Frobenius norm per sample,
    without a gradient. Raises DataError for an image of another shape or type."""
    _check(image)
    return filtered(image, random_network(len(image), image.shape[1], image.dim() - 2, how, rng))


def random_network(count: int, channels: int, axes: int, how: CMIDG, rng: torch.Generator) -> Network:
    """Nets from `channels` to as many channels for `count` samples. Draws all alpha; then, layer by layer, the edge
    of its kernels, the kernels, the shifts: the order of the official code."""
    alpha = torch.rand(count, generator=rng)
    widths = [channels, *[how.channels] * (how.layers - 1), channels]
    kernels, shifts = [], []
    for entering, leaving in itertools.pairwise(widths):
        edge = how.kernels[int(torch.randint(len(how.kernels), (1,), generator=rng))]
        kernels.append(torch.randn((count, leaving, entering, *[edge] * axes), generator=rng))
        shifts.append(torch.randn((count, leaving), generator=rng))
    return Network(alpha, tuple(kernels), tuple(shifts))


@torch.no_grad()
def filtered(image: Tensor, network: Network) -> Tensor:
    """What given nets make of an image [B, I, *S]: mixed with it by alpha, scaled to its Frobenius norm. A sample of
    zeros stays one."""
    shape, ones = image.shape, [1] * (image.dim() - 1)
    kind = torch.promote_types(image.dtype, torch.float32)
    convolve = F.conv2d if image.dim() == 4 else F.conv3d
    x = image.to(kind)
    with torch.autocast(image.device.type, enabled=False):
        y = x
        for layer, (kernel, shift) in enumerate(zip(network.kernels, network.shifts, strict=True)):
            if layer:
                y = F.leaky_relu(y)
            y = convolve(
                y.reshape(1, -1, *shape[2:]),
                kernel.flatten(0, 1).to(x),
                shift.flatten().to(x),
                padding=kernel.shape[-1] // 2,
                groups=shape[0],
            ).reshape(shape[0], -1, *shape[2:])
        alpha = network.alpha.reshape(-1, *ones).to(x)
        y = alpha * y + (1 - alpha) * x
        return (y * (_norm(x) / _norm(y).clamp_min(1e-12)).reshape(-1, *ones)).to(image.dtype)


def control_points(count: int, size: Sequence[int], how: CMIDG, rng: torch.Generator) -> Tensor:
    """Random control points [B, 1, *P] for images of a size: a random direction per sample, of norm 1. Raises
    FederationError if `how.grid` has another number of axes."""
    steps = _steps(how, len(size))
    places = [_layout(-(-n // 2), step, how.order)[1] for n, step in zip(size, steps, strict=True)]
    points = torch.randn((count, 1, *places), generator=rng)
    return points / _norm(points).reshape(-1, 1, *[1] * len(size))


@torch.no_grad()
def smooth_mask(points: Tensor, size: Sequence[int], steps: Sequence[int], order: int) -> Tensor:
    """The mask [B, 1, *S] that control points [B, 1, *P] span: from 0 to 1 in every sample; 0 where it would be
    constant. The spline is laid out at half the resolution and enlarged linearly.

    steps: the distance of the points, voxels of the half resolution; order: the degree of the spline.
    """
    with torch.autocast(points.device.type, enabled=False):
        field = points
        for axis, (n, step) in enumerate(zip(size, steps, strict=True), start=2):
            weight = spline_weights(-(-n // 2), step, order).to(field)
            field = (field.movedim(axis, -1) @ weight.T).movedim(-1, axis)
        mode = "bilinear" if len(size) == 2 else "trilinear"
        field = F.interpolate(field, size=list(size), mode=mode, align_corners=True).exp()
        low, high = field.flatten(1).aminmax(dim=1)
        ones = [1] * (field.dim() - 1)
        return (field - low.reshape(-1, *ones)) / (high - low).clamp_min(1e-12).reshape(-1, *ones)


def blend(first: Tensor, second: Tensor, mask: Tensor) -> Tensor:
    """mask * first + (1 - mask) * second, voxel by voxel: views [B, I, *S], mask [B, 1, *S] in [0, 1] for all
    channels alike."""
    mask = mask.to(first)
    return mask * first + (1 - mask) * second


def spline_weights(length: int, step: int, order: int) -> Tensor:
    """[length, P]: the share of each of P control points, `step` apart, in each of `length` voxels in a row, by
    B-splines of degree `order`; every row sums to 1, to the rounding of float64."""
    first, count = _layout(length, step, order)
    place = torch.arange(length, dtype=torch.float64)[:, None]
    points = first + step * torch.arange(count, dtype=torch.float64)
    t = (place - points) / step + (order + 1) / 2
    powers = [(-1) ** k * math.comb(order + 1, k) * (t - k).clamp_min(0) ** order for k in range(order + 2)]
    weight = torch.stack(powers).sum(0) / math.factorial(order)
    return torch.where((t > 0) & (t < order + 1), weight, torch.zeros_like(weight))


def _layout(length: int, step: int, order: int) -> tuple[int, int]:
    """The place of the first control point and how many there are: as many inside as fit, in the middle, and
    beyond either end as many as the spline reaches."""
    inside = -(-length // step)
    margin = length - 1 - step * (inside - 1)
    beyond = (order + 1) // 2
    return -(-margin // 2) - step * beyond, inside + 2 * beyond


def _steps(how: CMIDG, axes: int) -> list[int]:
    grid = how.grid * axes if len(how.grid) == 1 else how.grid
    if len(grid) != axes:
        raise FederationError(
            f"cmidg: grid is {list(how.grid)} for images with {axes} spatial axes; allowed: one number, or {axes}"
        )
    return [step // 2 for step in grid]


def _norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x.flatten(1), dim=1)


def _check(image: Tensor) -> None:
    if image.dim() not in (4, 5) or image.numel() == 0 or not image.is_floating_point():
        raise DataError(
            f"cmidg: the image is {image.dtype} of shape {list(image.shape)}; allowed: floating point, "
            "[samples, channels, *spatial] with two or three spatial axes, none of them empty"
        )
