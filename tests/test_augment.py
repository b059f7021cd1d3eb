"""augment.py: what may change changes, the rest does not, and image and target move together."""

import pytest
import torch

from fedatlas.augment import Augmentation, augment

OFF = {"spatial": 0.0, "intensity": 0.0}


def batch(dims: int, n: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    target = torch.zeros(n, *(20, 24, 16)[:dims], dtype=torch.uint8)
    target[(slice(None), *(slice(5, 12),) * dims)] = 2
    image = target[:, None].float() * 3 + 0.01 * torch.rand(n, 1, *target.shape[1:], generator=rng)
    return image, target


def rng(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_switched_off_nothing_changes() -> None:
    image, target = batch(2)
    found = augment(image, target, Augmentation(**OFF), rng())
    assert torch.equal(found[0], image) and torch.equal(found[1], target)


@pytest.mark.parametrize("dims", [2, 3])
def test_image_and_target_move_together(dims) -> None:
    image, target = batch(dims)
    moved, labels = augment(
        image, target, Augmentation(spatial=1.0, intensity=0.0, rotation=30, translation=0.2), rng()
    )
    assert labels.dtype == target.dtype and set(labels.unique().tolist()) <= {0, 2}
    assert not torch.equal(labels, target)
    agree = ((moved[:, 0] > 3) == (labels == 2)).float().mean()
    assert agree > 0.97


def test_masks_move_as_labels_do() -> None:
    image, target = batch(2)
    options = Augmentation(spatial=1.0, intensity=0.0)
    masks = torch.stack([target == 1, target == 2], 1).to(torch.uint8)
    _, labels = augment(image, target, options, rng())
    _, moved = augment(image, masks, options, rng())
    assert torch.equal(moved[:, 1], (labels == 2).to(torch.uint8)) and not moved[:, 0].any()


def test_a_right_angle_is_a_right_angle_on_any_patch() -> None:
    """A rotation turns voxels, not the unit square: a square stays a square in a patch that is none."""
    target = torch.zeros(1, 40, 20, dtype=torch.uint8)
    target[:, 17:23, 7:13] = 1
    image = target[:, None].float()
    for seed in range(4):
        options = Augmentation(spatial=1.0, intensity=0.0, rotation=180, scaling=(1.0, 1.0), translation=0.0)
        _, labels = augment(image, target, options, rng(seed))
        assert abs(int(labels.sum()) - 36) <= 5


@pytest.mark.parametrize("dims", [2, 3])
def test_mirrors_flip_whole_samples(dims) -> None:
    image, target = batch(dims, 16)
    found, labels = augment(image, target, Augmentation(**OFF, mirror=(0,)), rng())
    flipped = [torch.equal(labels[i], target[i].flip(0)) for i in range(16)]
    assert 2 < sum(flipped) < 14
    for i, was in enumerate(flipped):
        assert torch.equal(found[i], image[i].flip(1) if was else image[i])


def test_intensity_leaves_the_target_and_stays_near() -> None:
    image, target = batch(2)
    found, labels = augment(image, target, Augmentation(spatial=0.0, intensity=1.0), rng())
    assert torch.equal(labels, target) and not torch.equal(found, image)
    assert torch.isfinite(found).all() and (found - image).abs().max() < 3


def test_the_generator_decides_and_the_input_is_left_alone() -> None:
    image, target = batch(3)
    before = image.clone(), target.clone()
    one, other = (augment(image, target, Augmentation(), rng(5)) for _ in range(2))
    assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])
    assert not torch.equal(one[0], augment(image, target, Augmentation(), rng(6))[0])
    assert torch.equal(image, before[0]) and torch.equal(target, before[1])


def test_constant_images_stay_finite() -> None:
    image = torch.full((2, 1, 8, 8), 0.5)
    found, _ = augment(image, torch.zeros(2, 8, 8, dtype=torch.uint8), Augmentation(intensity=1.0), rng())
    assert torch.isfinite(found).all()
