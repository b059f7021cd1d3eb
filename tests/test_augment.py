"""augment.py: what may change changes, the rest does not, and image and target move together."""

import time
from typing import Any

import pytest
import torch

from fedatlas.core.errors import FederationError
from fedatlas.learning.augment import OFF, Augmentation, augment, blurred

STILL: dict[str, Any] = {
    f"p_{name}": 0
    for name in (
        "rotation",
        "scaling",
        "translation",
        "mirror",
        "elastic",
        "noise",
        "blur",
        "brightness",
        "offset",
        "contrast",
        "gamma",
    )
}
MOVED = STILL | {"p_rotation": 1, "p_scaling": 1, "p_translation": 1, "p_elastic": 1, "elastic": 1.0}
VARIED = STILL | {"p_noise": 1, "p_blur": 1, "p_brightness": 1, "p_contrast": 1, "p_gamma": 1}


def batch(dims: int, n: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    target = torch.zeros(n, *(20, 24, 16)[:dims], dtype=torch.int64)
    target[(slice(None), *(slice(5, 12),) * dims)] = 2
    noise = torch.rand(n, 1, *target.shape[1:], generator=rng(0))
    return target[:, None].float() * 3 + 0.01 * noise, target


def rng(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_switched_off_nothing_changes() -> None:
    image, target = batch(2)
    found = augment(image, target, OFF, rng())
    assert torch.equal(found[0], image) and torch.equal(found[1], target)


@pytest.mark.parametrize("dims", [2, 3])
def test_image_and_target_move_together(dims: int) -> None:
    image, target = batch(dims)
    moved, labels = augment(image, target, Augmentation(**MOVED, rotation=30, translation=0.2), rng())
    assert moved.shape == image.shape and labels.dtype == target.dtype
    assert set(labels.unique().tolist()) == {0, 2} and not torch.equal(labels, target)
    assert ((moved[:, 0] > 3) == (labels == 2)).float().mean() > 0.97


def test_masks_move_as_labels_do_and_image_labels_not_at_all() -> None:
    image, target = batch(2)
    how = Augmentation(**MOVED)
    _, labels = augment(image, target, how, rng())
    masks = torch.stack([target == 1, target == 2], 1).float()
    _, moved = augment(image, masks, how, rng())
    assert torch.equal(moved[:, 1], (labels == 2).float()) and not moved[:, 0].any()
    present = torch.tensor([[0.0, 1.0]] * 4)
    assert torch.equal(augment(image, present, how, rng())[1], present)


@pytest.mark.parametrize("dims", [2, 3])
def test_each_movement_does_what_it_is_called(dims: int) -> None:
    """The middle and the spread of a block, before and after; many draws."""
    image, target = batch(dims, 64)
    volume = float((target[0] > 0).sum())

    def found(**how: Any) -> tuple[torch.Tensor, torch.Tensor]:
        labels = augment(image, target, Augmentation(**STILL | how), rng())[1]
        sizes = (labels > 0).flatten(1).sum(1) / volume
        middles = torch.stack([(one > 0).nonzero().float().mean(0) for one in labels])
        return sizes, middles

    sizes, _ = found(p_scaling=1, scaling=(1.4, 1.4))
    assert abs(float(sizes.mean()) - 1.4**dims) < 0.25
    sizes, middles = found(p_translation=1, translation=0.1)
    assert abs(float(sizes.mean()) - 1) < 0.02
    span = middles.amax(0) - middles.amin(0)
    assert torch.allclose(span, 0.2 * torch.tensor(target.shape[1:]).float(), atol=1.3)
    sizes, _ = found(p_rotation=1, rotation=45)
    assert abs(float(sizes.mean()) - 1) < 0.08


def test_a_turn_is_a_turn_in_millimetres() -> None:
    """A bar of 40 x 8 mm turned by a right angle is a bar of 8 x 40 mm, on voxels of 2 x 4 mm in a patch that is no square."""
    target = torch.zeros(1, 40, 24, dtype=torch.int64)
    target[0, 10:30, 11:13] = 1
    how = Augmentation(**STILL | {"p_rotation": 1}, rotation=180)
    best = 0.0
    want = torch.zeros(40, 24, dtype=torch.bool)
    want[18:22, 7:17] = True
    for seed in range(60):
        labels = augment(target[:, None].float(), target, how, rng(seed), spacing=torch.tensor([[2.0, 4.0]]))[
            1
        ]
        assert abs(int(labels.sum()) - 40) <= 12, "size is kept"
        best = max(best, float((2 * (want & (labels[0] > 0)).sum()) / (want.sum() + labels.sum())))
    assert best > 0.85


@pytest.mark.parametrize("dims", [2, 3])
def test_mirrors_flip_whole_samples(dims: int) -> None:
    image, target = batch(dims, 16)
    how = Augmentation(**STILL | {"p_mirror": 0.5}, mirror=(0,))
    found, labels = augment(image, target, how, rng())
    flipped = [torch.equal(labels[i], target[i].flip(0)) for i in range(16)]
    assert 2 < sum(flipped) < 14
    for i, was in enumerate(flipped):
        assert torch.allclose(found[i], image[i].flip(1) if was else image[i], atol=1e-4)


@pytest.mark.parametrize("dims", [2, 3])
def test_intensities_change_and_stay_near(dims: int) -> None:
    image, target = batch(dims)
    for name in ("noise", "blur", "brightness", "contrast", "gamma"):
        found, labels = augment(image, target, Augmentation(**STILL | {f"p_{name}": 1}), rng())
        assert torch.equal(labels, target) and not torch.equal(found, image), name
        assert torch.isfinite(found).all() and (found - image).abs().max() < 4, name
    gamma, _ = augment(image, target, Augmentation(**STILL | {"p_gamma": 1, "p_contrast": 1}), rng())
    assert gamma.max() <= image.max() + 1e-4 and gamma.min() >= image.min() - 1e-4, "the range is kept"


def test_slices_of_one_image_are_varied_alike_and_images_apart() -> None:
    image = torch.rand(2, 1, 8, 8, generator=rng(0)).repeat(1, 6, 1, 1)
    how = Augmentation(**STILL | {"p_brightness": 1})
    one = augment(image, torch.zeros(2, 8, 8), how, rng())[0]
    assert all(torch.equal(one[:, 0], one[:, c]) for c in range(6))
    two = augment(image, torch.zeros(2, 8, 8), how, rng(), images=2)[0]
    assert torch.equal(two[:, 0], two[:, 2]) and torch.equal(two[:, 3], two[:, 5])
    assert not torch.equal(two[:, 0], two[:, 3])


def test_blur_is_a_gaussian() -> None:
    point = torch.zeros(1, 1, 31, 31)
    point[0, 0, 15, 15] = 1
    found = blurred(point, torch.tensor([2.0]))[0, 0]
    place = torch.arange(31.0) - 15
    assert abs(float(found.sum()) - 1) < 1e-5
    assert abs(float((found.sum(0) * place**2).sum()) - 4) < 0.2
    flat = torch.full((2, 1, 5, 6, 7), 3.0)
    assert torch.allclose(blurred(flat, torch.tensor([0.5, 1.0])), flat)


def test_the_generator_decides_and_the_input_is_left_alone() -> None:
    image, target = batch(3)
    before = image.clone(), target.clone()
    how = Augmentation(**MOVED | {name: 1 for name in VARIED if VARIED[name]})
    one, other = (augment(image, target, how, rng(5)) for _ in range(2))
    assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])
    assert not torch.equal(one[0], augment(image, target, how, rng(6))[0])
    assert torch.equal(image, before[0]) and torch.equal(target, before[1])


def test_constant_images_stay_finite() -> None:
    image = torch.full((2, 1, 8, 8), 0.5)
    found, _ = augment(image, torch.zeros(2, 8, 8, dtype=torch.int64), Augmentation(**VARIED), rng())
    assert torch.isfinite(found).all()


@pytest.mark.parametrize("given", [{"scaling": (0, 1)}, {"gamma": (2, 1)}, {"mirror": (3,)}])
def test_options_that_make_no_sense(given: dict[str, Any]) -> None:
    with pytest.raises(FederationError, match=next(iter(given))):
        Augmentation(**given)


def test_it_is_fast_enough_for_one_core() -> None:
    """16 x 3 x 64 x 64 with the default chances; the quickest of many, as the machine may be busy."""
    image = torch.rand(16, 3, 64, 64, generator=rng())
    target = torch.zeros(16, 64, 64, dtype=torch.int64)
    seconds = []
    for seed in range(40):
        began = time.perf_counter()
        augment(image, target, Augmentation(), rng(seed % 5))
        seconds.append(time.perf_counter() - began)
    assert sorted(seconds)[10] < 0.03


def test_turns_in_the_slice_leave_slices_where_they_are() -> None:
    """UFPS turns in the slice; an image that is one number per slice is moved by no such turn, and by others."""
    levels = torch.arange(8.0).reshape(1, 1, 1, 1, 8).expand(4, 1, 8, 8, 8)
    target = levels[:, 0].to(torch.uint8)
    turned = {"rotation": 40.0, "p_rotation": 1.0}
    for turns, same in (("slice", True), ("all", False)):
        how = Augmentation(**STILL | turned | {"turns": turns})
        image, moved = augment(levels, target, how, torch.Generator().manual_seed(3))
        assert torch.allclose(image, levels, atol=1e-4) == same and torch.equal(moved, target) == same
    flat = levels.transpose(2, 4)
    how = Augmentation(**STILL | turned | {"turns": "slice"})
    assert not torch.allclose(
        augment(flat, target, how, torch.Generator().manual_seed(3))[0], flat, atol=1e-2
    )


def test_an_offset_is_one_number_for_a_patch() -> None:
    image, target = torch.randn(6, 2, 5, 5, generator=torch.Generator().manual_seed(1)), torch.zeros(6, 5, 5)
    how = Augmentation(**STILL | {"offset": 0.25, "p_offset": 1.0})
    found, _ = augment(image, target, how, torch.Generator().manual_seed(2), images=2)
    added = (found - image).flatten(2)
    assert torch.allclose(added, added[:, :, :1].expand_as(added), atol=1e-6)
    assert len(added[:, :, 0].flatten().unique()) == 12 and 0.1 < float(added.abs().max()) <= 0.25
    assert (added.min() < 0) and (added.max() > 0)


def test_without_an_offset_no_random_number_is_drawn_for_it() -> None:
    """What was trained before there were offsets repeats."""
    image, target = torch.randn(3, 1, 6, 6), torch.zeros(3, 6, 6)
    one, other = torch.Generator().manual_seed(2), torch.Generator().manual_seed(2)
    a, _ = augment(image, target, Augmentation(), one)
    b, _ = augment(image, target, Augmentation(p_offset=1.0), other)
    assert torch.equal(a, b) and torch.equal(one.get_state(), other.get_state())
