"""A scan that was turned and resampled gives the same organ at the same place of the world."""

from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch
from nibabel.affines import apply_affine
from scipy.ndimage import affine_transform
from torch import Tensor, nn

from fedatlas.core.labels import LabelSpace
from fedatlas.data.transforms import Preprocessing, load_scan, write_label_map
from fedatlas.learning.inference import Inference, probabilities

SPACE = LabelSpace(("background", "bright"))


class Bright(nn.Module):
    """Class 1 where the windowed value is above 0.5; sees one voxel at a time."""

    def forward(self, x: Tensor) -> Tensor:
        middle = x[:, x.shape[1] // 2 : x.shape[1] // 2 + 1]
        return torch.cat([0.5 - middle, middle - 0.5], 1) * 40


def organ(
    path: Path, rotation: np.ndarray, spacing: tuple[float, float, float], axes: tuple[int, int, int]
) -> np.ndarray:
    """Writes a scan of one ellipsoid, sampled on a grid of its own, and returns the ellipsoid's centre in mm."""
    centre, radii = np.array([6.0, -9.0, 4.0]), np.array([14.0, 10.0, 18.0])
    size = np.array([90.0, 80.0, 100.0])
    shape = np.ceil(size / spacing).astype(int)
    affine = np.eye(4)
    affine[:3, :3] = rotation @ np.diag(spacing)
    affine[:3, 3] = -affine[:3, :3] @ ((shape - 1) / 2)
    world = apply_affine(affine, np.stack(np.meshgrid(*map(np.arange, shape), indexing="ij"), -1))
    distance = np.sqrt((((world - centre) / radii) ** 2).sum(-1))
    image = np.clip(200 - 200 * (distance - 1) * 4, -200, 600).astype(np.int16)
    permuted = np.transpose(image, axes)
    turn = np.eye(4)[:, [*axes, 3]]
    nib.save(nib.Nifti1Image(permuted, affine @ turn), path)
    return centre


QUARTER = np.array([[0.0, -1, 0], [1, 0, 0], [0, 0, 1]])
TILT = np.array([[0.98, -0.199, 0], [0.199, 0.98, 0], [0, 0, 1]])


@pytest.mark.parametrize("patch", [(32, 32), (24, 24, 24)], ids=["2.5D", "3D"])
@pytest.mark.parametrize(
    ("rotation", "spacing", "axes"),
    [
        (np.eye(3), (2.0, 2.0, 3.0), (0, 1, 2)),
        (np.diag([-1.0, -1, 1]), (1.6, 2.7, 2.2), (2, 0, 1)),
        (QUARTER @ np.diag([1.0, 1, -1]), (3.1, 1.9, 2.5), (1, 0, 2)),
        (TILT, (2.0, 2.3, 4.1), (0, 2, 1)),
    ],
    ids=["plain", "mirrored", "quarter turn", "oblique"],
)
def test_the_same_organ_at_the_same_place(tmp_path, patch, rotation, spacing, axes) -> None:
    scan, out = tmp_path / "scan.nii.gz", tmp_path / "labels.nii.gz"
    centre = organ(scan, rotation, spacing, axes)
    preprocessing = Preprocessing(spacing=(2.5, 2.5, 2.5), window=(-200, 600), patch=patch)
    volume = load_scan([scan], preprocessing, SPACE)
    found = probabilities(Bright(), volume.image, patch, 1, Inference(), exclusive=True)
    write_label_map(out, volume.restore(found), scan)
    labels, source = nib.load(out), nib.load(scan)
    assert labels.shape == source.shape and np.allclose(labels.affine, source.affine)
    mask = np.asarray(labels.dataobj) == 1
    world = apply_affine(labels.affine, np.argwhere(mask))
    assert np.abs(world.mean(0) - centre).max() < 0.5, "mm"
    volume_mm3 = mask.sum() * np.prod(source.header.get_zooms())
    # the value 200, half of the window, is reached on the ellipsoid itself; interpolation rounds it off: a tenth
    # of the volume is 0.5 mm of its radii, a fifth of a voxel
    assert volume_mm3 == pytest.approx(4 / 3 * np.pi * 14 * 10 * 18, rel=0.1)


def test_resampling_a_scan_moves_nothing(tmp_path) -> None:
    """A resampled file of the same scan, against the file itself: overlap in the world."""
    first, second = tmp_path / "a.nii.gz", tmp_path / "b.nii.gz"
    organ(first, np.eye(3), (2.0, 2.0, 2.0), (0, 1, 2))
    source = nib.load(first)
    step = np.array([1.4, 0.8, 1.7])
    shape = np.ceil(np.array(source.shape) / step).astype(int)
    values = affine_transform(
        np.asarray(source.dataobj).astype(float),
        np.diag(step),
        output_shape=tuple(shape),
        order=1,
        mode="nearest",
    )
    nib.save(nib.Nifti1Image(values.astype(np.int16), source.affine @ np.diag([*step, 1.0])), second)
    preprocessing = Preprocessing(spacing=(3, 3, 3), window=(-200, 600), patch=(24, 24, 24))
    masks = []
    for scan in (first, second):
        volume = load_scan([scan], preprocessing, SPACE)
        masks.append(
            volume.restore(
                probabilities(Bright(), volume.image, (24, 24, 24), 1, Inference(), exclusive=True)
            )
            == 1
        )
    points = apply_affine(np.linalg.inv(source.affine) @ nib.load(second).affine, np.argwhere(masks[1]))
    at = np.rint(points).astype(int)
    inside = masks[0][tuple(np.clip(at, 0, np.array(masks[0].shape) - 1).T)]
    assert inside.mean() > 0.95
