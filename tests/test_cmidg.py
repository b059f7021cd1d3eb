"""cmidg.py: the official code's numbers, norms kept, masks from 0 to 1, and nothing drawn elsewhere."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.interpolate import BSpline
from torch import Tensor

from fedatlas.core.errors import DataError, FederationError
from fedatlas.core.options import from_dict
from fedatlas.methods.shared.cmidg import (
    CMIDG,
    UFPS_CODE,
    Network,
    blend,
    cmidg,
    control_points,
    filtered,
    gin,
    random_network,
    smooth_mask,
    spline_weights,
)

with np.load(Path(__file__).parent / "vectors" / "cmidg_gin_ipa.npz") as file:
    V = {key: torch.from_numpy(file[key]) for key in file.files}
SIZES = [(24, 20), (17, 33), (12, 14, 10), (7, 9, 16)]


def rng(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images(size: tuple[int, ...], count: int = 3, channels: int = 1) -> Tensor:
    return torch.randn((count, channels, *size), generator=rng(0)) + 0.5


def norms(image: Tensor) -> Tensor:
    return image.double().flatten(1).norm(dim=1)


@pytest.mark.parametrize("name", ["gin_cmidg", "gin_ufps"])
def test_gin_is_the_official_one(name: str) -> None:
    drawn = [
        V[f"{name}/draw{i}_{kind}"] for i, kind in enumerate(["rand", *["randint", "randn", "randn"] * 4])
    ]
    edges, kernels, shifts = drawn[1::3], drawn[2::3], drawn[3::3]
    assert [kernel.shape[-1] for kernel in kernels] == [(1, 3)[int(edge)] for edge in edges]
    network = Network(
        drawn[0],
        tuple(kernel.reshape(2, -1, *kernel.shape[1:]) for kernel in kernels),
        tuple(shift.reshape(2, -1) for shift in shifts),
    )
    out = filtered(V["x"], network)
    torch.testing.assert_close(out, V[f"{name}/out"], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(norms(out), norms(V["x"]), rtol=1e-6, atol=0)
    if name == "gin_ufps":
        torch.testing.assert_close(norms(out).float(), V["frob_out"], rtol=1e-5, atol=0)
        torch.testing.assert_close(norms(V["x"]).float(), V["frob_in"], rtol=1e-6, atol=0)


def test_ipa_is_the_official_one() -> None:
    points, steps = V["ipa/control_points"], (4, 8, 8)
    torch.testing.assert_close(norms(points).float(), torch.ones(2))
    hats = [spline_weights(2 * step + 1, step, 1)[:, 2].float() for step in steps]
    kernel = torch.einsum("i,j,k->ijk", *hats)
    torch.testing.assert_close(kernel, V["ipa/kernel"][0, 0])
    how = CMIDG(order=1, grid=tuple(2 * step for step in steps))
    assert control_points(2, (16, 32, 32), how, rng()).shape == points.shape
    mask = smooth_mask(points, (16, 32, 32), steps, 1)
    torch.testing.assert_close(mask, V["ipa/blend_mask"], atol=1e-4, rtol=0)
    torch.testing.assert_close(blend(V["ipa/a"], V["ipa/b"], mask), V["ipa/blend"], atol=1e-4, rtol=1e-4)


def test_the_official_scaling_of_the_field_leaves_its_mask_alone() -> None:
    field = V["ipa/bias_field"].flatten(1)
    low, high = field.amin(1, keepdim=True), field.amax(1, keepdim=True)
    torch.testing.assert_close(
        (field - low) / (high - low), V["ipa/blend_mask"].flatten(1), atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    "how", [CMIDG(), UFPS_CODE, CMIDG(layers=1, kernels=(5,)), CMIDG(layers=6, channels=4, kernels=(3,))]
)
def test_gin_keeps_each_samples_norm(size: tuple[int, ...], channels: int, how: CMIDG) -> None:
    image = images(size, 4, channels) * torch.tensor([1.0, 0.0, 1e-3, 500.0]).reshape(
        4, *[1] * (len(size) + 1)
    )
    out = gin(image, how, rng())
    torch.testing.assert_close(norms(out), norms(image), rtol=1e-5, atol=0)
    assert out.shape == image.shape and not out[1].any()
    assert not torch.allclose(out[0], image[0], atol=0.05)


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float64])
def test_types_are_kept_and_the_work_is_in_float32_at_least(kind: torch.dtype) -> None:
    image = images((12, 14)).to(kind).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, view = cmidg(image, CMIDG(), rng()), gin(image, CMIDG(), rng())
    assert out.dtype == kind and not out.requires_grad and not view.requires_grad
    exact = gin(image.detach().double(), CMIDG(), rng())
    assert (view.double() - exact).abs().max() <= 4 * torch.finfo(kind).eps * exact.abs().max() + 1e-6 * (
        kind != torch.float64
    )


def test_a_net_per_sample() -> None:
    """Against one ungrouped net after the other."""
    image = images((9, 11), 3, 2)
    net = random_network(3, 2, 2, CMIDG(channels=3), rng())
    assert [tuple(kernel.shape[:3]) for kernel in net.kernels] == [(3, 3, 2), (3, 3, 3), (3, 3, 3), (3, 2, 3)]
    for i, x in enumerate(image):
        y = x[None]
        for layer, (kernel, shift) in enumerate(zip(net.kernels, net.shifts, strict=True)):
            y = F.conv2d(y, kernel[i], shift[i], padding="same")
            y = F.leaky_relu(y) if layer < 3 else y
        y = net.alpha[i] * y[0] + (1 - net.alpha[i]) * x
        torch.testing.assert_close(filtered(image, net)[i], y * x.norm() / y.norm(), atol=1e-4, rtol=1e-4)


def test_slices_are_volumes_of_one_slice() -> None:
    image = images((9, 11))
    flat = random_network(3, 1, 2, CMIDG(kernels=(1, 3)), rng())
    thick = tuple(F.pad(k[..., None, :, :], (0, 0, 0, 0, *[k.shape[-1] // 2] * 2)) for k in flat.kernels)
    volume = filtered(image[:, :, None], Network(flat.alpha, thick, flat.shifts))[:, :, 0]
    torch.testing.assert_close(filtered(image, flat), volume, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("size", SIZES)
def test_the_same_generator_gives_the_same_bits_and_the_global_one_is_left_alone(
    size: tuple[int, ...],
) -> None:
    image, how, before = images(size), CMIDG(grid=(8,)), torch.get_rng_state()
    kept = image.clone()
    found = cmidg(image, how, rng())
    assert torch.equal(found, cmidg(image, how, rng())) and torch.equal(image, kept)
    assert not torch.allclose(found, cmidg(image, how, rng(2)))
    assert torch.equal(torch.get_rng_state(), before)
    one = rng()
    first, second = gin(image, how, one), gin(image, how, one)
    mask = smooth_mask(control_points(3, size, how, one), size, [4] * len(size), how.order)
    assert torch.equal(found, blend(first, second, mask))


@pytest.mark.parametrize("size", SIZES)
def test_no_sample_sees_another(size: tuple[int, ...]) -> None:
    image, how = images(size), CMIDG()
    other = image.clone()
    other[0] = other[0].flip(0, -1) * 7 + 3
    assert torch.equal(cmidg(image, how, rng())[1:], cmidg(other, how, rng())[1:])
    net, points = random_network(3, 1, len(size), how, rng()), control_points(3, size, how, rng())
    alone = Network(net.alpha[1:2], tuple(k[1:2] for k in net.kernels), tuple(s[1:2] for s in net.shifts))
    torch.testing.assert_close(filtered(image, net)[1:2], filtered(image[1:2], alone), atol=1e-5, rtol=1e-5)
    masks = [smooth_mask(part, size, [24] * len(size), 2) for part in (points, points[1:2])]
    torch.testing.assert_close(masks[0][1:2], masks[1])


def test_what_is_drawn() -> None:
    net = random_network(4000, 1, 2, CMIDG(), rng())
    assert 0 <= net.alpha.min() < 0.01 and 0.99 < net.alpha.max() < 1 and abs(net.alpha.mean() - 0.5) < 0.02
    drawn = torch.cat([part.flatten() for part in (*net.kernels, *net.shifts)])
    assert abs(drawn.mean()) < 0.02 and abs(drawn.std() - 1) < 0.02
    one = rng()
    edges = [kernel.shape[-1] for _ in range(100) for kernel in random_network(1, 1, 2, CMIDG(), one).kernels]
    assert set(edges) == {1, 3} and 150 < edges.count(3) < 250


@pytest.mark.parametrize("order", [1, 2, 3])
def test_splines_are_splines_and_reach_every_voxel(order: int) -> None:
    for length, step in itertools.product([1, 2, 3, 5, 8, 13, 40], [1, 2, 3, 4, 7, 24]):
        weight = spline_weights(length, step, order)
        torch.testing.assert_close(weight.sum(1), torch.ones(length, dtype=torch.float64), rtol=0, atol=1e-12)
        assert weight.min() >= 0
    spline = BSpline.basis_element(np.arange(order + 2) - (order + 1) / 2, extrapolate=False)
    column = spline_weights(41, 8, order)[:, 3]
    middle = int(column.argmax())
    expected = np.nan_to_num(spline((np.arange(41) - middle) / 8))
    np.testing.assert_allclose(column.numpy(), expected, atol=1e-12)


@pytest.mark.parametrize("size", [*SIZES, (1, 5), (64, 3, 2)])
@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("grid", [2, 8, 48])
def test_masks_reach_from_0_to_1(size: tuple[int, ...], order: int, grid: int) -> None:
    how = CMIDG(order=order, grid=(grid,))
    points = control_points(5, size, how, rng())
    torch.testing.assert_close(norms(points), torch.ones(5, dtype=torch.float64), rtol=1e-6, atol=0)
    mask = smooth_mask(points, size, [grid // 2] * len(size), order)
    assert mask.shape == (5, 1, *size)
    assert mask.flatten(1).amin(1).tolist() == [0] * 5 and mask.flatten(1).amax(1).tolist() == [1] * 5


def test_masks_are_smooth_and_a_single_voxel_has_one() -> None:
    size, how = (96, 96), CMIDG(grid=(24,))
    mask = smooth_mask(control_points(8, size, how, rng()), size, [12, 12], how.order)
    assert max(float(mask.diff(dim=axis).abs().max()) for axis in (2, 3)) < 0.1
    assert not smooth_mask(control_points(2, (1, 1), how, rng()), (1, 1), [12, 12], 2).any()


@pytest.mark.parametrize("size", SIZES)
def test_each_voxel_lies_between_two_views(size: tuple[int, ...]) -> None:
    image, how, one = images(size, 6, 2), CMIDG(grid=(8,)), rng()
    first, second = gin(image, how, one), gin(image, how, one)
    out, slack = cmidg(image, how, rng()), 1e-5
    assert bool((out >= torch.minimum(first, second) - slack).all())
    assert bool((out <= torch.maximum(first, second) + slack).all())
    assert bool((norms(out) <= 2**0.5 * norms(image) * (1 + slack)).all())
    assert bool((out.flatten(1).abs().amax(1) <= norms(image)).all())
    ones = torch.ones(6, 1, *size)
    assert torch.equal(blend(first, second, ones), first) and torch.equal(
        blend(first, second, 0 * ones), second
    )


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"kernels": [2]}, "odd numbers"),
        ({"kernels": [-1]}, "odd numbers"),
        ({"kernels": []}, "kernels"),
        ({"grid": [7]}, "even number"),
        ({"grid": []}, "even number"),
        ({"grid": [0]}, "even number"),
        ({"order": 4}, "order"),
        ({"layers": 0}, "layers"),
        ({"kernel": [3]}, "kernels"),
    ],
)
def test_settings_are_refused_by_name(values: dict[str, Any], words: str) -> None:
    with pytest.raises(FederationError, match=words):
        from_dict(CMIDG, values, what="cmidg")


def test_images_are_refused() -> None:
    for image in (torch.zeros(2, 1, 5), torch.zeros(2, 1, 5, 5, dtype=torch.int16), torch.zeros(0, 1, 5, 5)):
        for transform in (cmidg, gin):
            with pytest.raises(DataError, match="two or three spatial axes"):
                transform(image, CMIDG(), rng())
    with pytest.raises(FederationError, match=r"\[8, 8\].*3 spatial axes"):
        cmidg(torch.zeros(2, 1, 5, 5, 5), CMIDG(grid=(8, 8)), rng())


def test_the_defaults_are_the_authors() -> None:
    how = CMIDG()
    assert (how.layers, how.channels, how.kernels, how.grid, how.order) == (4, 2, (1, 3), (48,), 2)
    assert (UFPS_CODE.layers, UFPS_CODE.channels, UFPS_CODE.grid, UFPS_CODE.order) == (4, 1, (48,), 1)


def test_a_mask_is_the_same_under_autocast() -> None:
    points = control_points(2, (24, 20), CMIDG(grid=(8,)), torch.Generator().manual_seed(1))
    plain = smooth_mask(points, (24, 20), [4, 4], 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(smooth_mask(points, (24, 20), [4, 4], 2), plain)
