"""data/transforms.py: to the federation's grid and back; files; options."""

from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
from nibabel import orientations
from nibabel.affines import apply_affine
from scipy.spatial.transform import Rotation

from fedatlas.core.errors import DataError, FederationError
from fedatlas.core.labels import LabelSpace
from fedatlas.core.options import from_dict
from fedatlas.data.transforms import (
    FileError,
    Geometry,
    Preprocessing,
    _share,
    doubts_about,
    doubts_of,
    geometry_of,
    image_to_grid,
    labels_to_grid,
    load_scan,
    normalised,
    read_channels,
    read_image,
    require_grid,
    resample,
    restore,
    slice_with_neighbours,
    write_label_map,
)

SPACE = LabelSpace(("background", "a", "b"))
OVERLAP = LabelSpace(("a", "b"), exclusive=False)
GRIDS = [
    ("RAS", (30, 28, 26), (2.0, 2.0, 2.0)),
    ("LPS", (30, 34, 20), (2.0, 1.8, 3.0)),
    ("ASL", (22, 40, 31), (2.6, 1.5, 2.0)),
    ("ILP", (17, 30, 36), (3.7, 2.1, 1.7)),
]


def affine_of(axes: str, shape: tuple[int, ...], spacing: tuple[float, ...]) -> np.ndarray:
    """Voxels -> mm for a grid with these axes whose middle is the world's origin."""
    own = orientations.axcodes2ornt(axes)
    affine = np.zeros((4, 4))
    for i, (axis, flip) in enumerate(own):
        affine[int(axis), i] = flip * spacing[i]
    affine[:3, 3] = -affine[:3, :3] @ ((np.array(shape) - 1) / 2)
    affine[3, 3] = 1
    return affine


def world(affine: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return apply_affine(affine, np.stack(np.meshgrid(*map(np.arange, shape), indexing="ij"), -1))


def ball(place: np.ndarray, centre: tuple[float, ...], radii: tuple[float, ...]) -> np.ndarray:
    return (((place - centre) / np.array(radii)) ** 2).sum(-1) < 1


def dice(a: np.ndarray, b: np.ndarray) -> float:
    return 2 * float((a & b).sum()) / float(a.sum() + b.sum())


@pytest.mark.parametrize(
    ("qform", "sform", "unit", "told"),
    [
        (0, 0, "mm", ["neither qform nor sform is set"]),
        (1, 0, "mm", []),
        (0, 2, "unknown", []),
        (0, 0, "micron", ["neither qform nor sform is set", "it is in micrometres"]),
    ],
)
def test_what_a_header_leaves_in_doubt(qform, sform, unit, told, tmp_path: Path) -> None:
    image = nib.Nifti1Image(np.zeros((3, 4, 5), np.uint8), None)  # type: ignore[attr-defined]
    image.set_qform(np.eye(4), qform)
    image.set_sform(np.eye(4), sform)
    image.header.set_xyzt_units(unit)
    nib.save(image, tmp_path / "a.nii.gz")  # type: ignore[attr-defined]
    found = doubts_about(tmp_path / "a.nii.gz")
    assert len(found) == len(told)
    assert all(words in what for words, (what, _) in zip(told, found, strict=True))
    assert doubts_of({}) == [] and doubts_about(tmp_path / "a.png") == []


AXES = np.array([[-0.8, 0, 0, 90], [0, 0.8, 0, -100], [0, 0, 2.5, -50], [0, 0, 0, 1]])
"""Of a scan whose first axis points left."""
TURN = Rotation.from_euler("xyz", [179.99, 0.4, 12], degrees=True).as_matrix()
"""A turn whose quaternion float32 holds badly."""


def changed(affine: np.ndarray, **columns: list[float]) -> np.ndarray:
    """Another affine with these columns: x, y, z, or the place."""
    made = affine.copy()
    for name, values in columns.items():
        made[:3, ("x", "y", "z", "place").index(name)] = values
    return made


FLIPPED, MOVED = changed(AXES, x=[0.8, 0, 0]), changed(AXES, place=[90, -100, -49])
SKEWED = changed(AXES, z=[0, 1.2, 2.2])
TURNED = np.block([[TURN, np.zeros((3, 1))], [np.zeros((1, 3)), np.ones((1, 1))]]) @ AXES
ELSEWHERE, LEFT = "it lies elsewhere by qform than by sform", "left and right are in doubt"


@pytest.mark.parametrize(
    ("qform", "sform", "told"),
    [
        pytest.param((AXES, 1), (AXES, 1), None, id="equal"),
        pytest.param((FLIPPED, 1), (AXES, 1), LEFT, id="left and right exchanged"),
        pytest.param(
            (changed(FLIPPED, place=[-90, -100, -50]), 1), (AXES, 4), LEFT, id="flipped in an atlas"
        ),
        pytest.param((AXES[:, [1, 0, 2, 3]], 1), (AXES, 1), LEFT, id="axes exchanged"),
        pytest.param((MOVED, 1), (AXES, 1), ELSEWHERE, id="another origin"),
        pytest.param((AXES @ np.diag([1, 1, 1.1, 1]), 1), (AXES, 1), ELSEWHERE, id="another spacing"),
        pytest.param((changed(AXES, place=[90.01, -100, -50]), 1), (AXES, 1), None, id="a rounding of it"),
        pytest.param((MOVED, 1), (AXES, 2), None, id="another origin in another space"),
        pytest.param((SKEWED, 1), (SKEWED, 1), None, id="skewed with the nearest qform"),
        pytest.param((changed(SKEWED, x=[0.8, 0, 0]), 1), (SKEWED, 1), LEFT, id="skewed and flipped"),
        pytest.param(
            (changed(SKEWED, place=[0, 0, 0]), 1), (SKEWED, 1), ELSEWHERE, id="skewed, another origin"
        ),
        pytest.param((TURNED, 1), (TURNED, 1), None, id="a turn that quaternions hold badly"),
        pytest.param((FLIPPED, 0), (AXES, 1), None, id="no qform"),
        pytest.param((FLIPPED, 1), (AXES, 0), None, id="no sform"),
    ],
)
def test_qform_and_sform_that_disagree_are_told(qform, sform, told: str | None, tmp_path: Path) -> None:
    image = nib.Nifti1Image(np.zeros((300, 300, 200), np.uint8), None)  # type: ignore[attr-defined]
    image.set_qform(*qform)
    image.set_sform(*sform)
    nib.save(image, tmp_path / "a.nii.gz")  # type: ignore[attr-defined]
    found = doubts_about(tmp_path / "a.nii.gz")
    assert len(found) == (told is not None)
    assert told is None or told in found[0][0]
    header: Any = nib.load(tmp_path / "a.nii.gz").header  # type: ignore[attr-defined]
    rows = {name: header[name] for name in header if not name.startswith("srow")}
    assert doubts_of(rows) == []  # as of a format without them


@pytest.mark.parametrize(("axes", "shape", "spacing"), GRIDS)
def test_a_function_of_the_world_stays_where_it_was(axes, shape, spacing) -> None:
    """Linear interpolation is exact for a linear function, so every inner voxel can be compared."""
    affine = affine_of(axes, shape, spacing)
    field = lambda p: p @ np.array([1.0, 2.0, -3.0]) + 5  # noqa: E731
    preprocessing = Preprocessing(
        orientation="LPS", spacing=(1.5, 1.7, 1.6), normalise="meanstd", mean=0, std=1
    )
    geometry = geometry_of(shape, affine, preprocessing)
    image = image_to_grid(field(world(affine, shape))[None], geometry, preprocessing)[0]
    assert "".join(orientations.aff2axcodes(geometry.grid_affine)) == "LPS"
    assert np.allclose(nib.affines.voxel_sizes(geometry.grid_affine), (1.5, 1.7, 1.6))  # type: ignore[attr-defined]
    want = field(world(geometry.grid_affine, image.shape))
    inner = (slice(2, -2),) * 3
    assert np.abs(image[inner] - want[inner]).max() < 1e-3


@pytest.mark.parametrize(("axes", "shape", "spacing"), GRIDS)
@pytest.mark.parametrize("target", ["RAS", "PIL"])
def test_labels_survive_the_way_there_and_back(axes, shape, spacing, target) -> None:
    affine = affine_of(axes, shape, spacing)
    place = world(affine, shape)
    labels = np.zeros(shape, np.uint8)
    labels[ball(place, (4, -3, 2), (14, 12, 15))] = 1
    labels[ball(place, (6, -3, 5), (7, 6, 7))] = 2
    geometry = geometry_of(shape, affine, Preprocessing(orientation=target, spacing=(2, 2, 2)))
    grid = labels_to_grid(labels, geometry, SPACE)
    there = world(geometry.grid_affine, grid.shape)
    assert dice(grid > 0, ball(there, (4, -3, 2), (14, 12, 15))) > 0.945, "same place in the world"
    onehot = torch.nn.functional.one_hot(torch.from_numpy(grid).long(), 3).movedim(-1, 0).float()
    back = restore(onehot, geometry, exclusive=True)
    assert back.shape == shape and back.dtype == np.uint8
    assert dice(back > 0, labels > 0) > 0.94
    assert dice(back == 2, labels == 2) > 0.88


def test_same_spacing_is_exact() -> None:
    shape, labels = (9, 8, 7), np.random.default_rng(0).integers(0, 3, (9, 8, 7)).astype(np.uint8)
    affine = affine_of("SPL", shape, (3.0, 2.0, 1.0))
    geometry = geometry_of(shape, affine, Preprocessing())
    assert geometry.grid_spacing == (1.0, 2.0, 3.0)
    grid = labels_to_grid(labels, geometry, SPACE)
    assert grid.shape == (7, 8, 9)
    onehot = torch.nn.functional.one_hot(torch.from_numpy(grid).long(), 3).movedim(-1, 0).float()
    assert np.array_equal(restore(onehot, geometry, exclusive=True), labels)


def test_overlapping_masks_go_there_and_back() -> None:
    shape = (30, 28, 26)
    affine = affine_of("RAS", shape, (2.0, 2.0, 2.5))
    place = world(affine, shape)
    masks = np.stack([ball(place, (0, 0, 0), (15, 15, 15)), ball(place, (4, 0, 0), (15, 14, 13))]).astype(
        np.uint8
    )
    geometry = geometry_of(shape, affine, Preprocessing(spacing=(1.7, 2.2, 2.2)))
    grid = labels_to_grid(masks, geometry, OVERLAP)
    back = restore(torch.from_numpy(grid).float(), geometry, exclusive=False)
    assert back.shape == masks.shape
    assert min(dice(back[c] > 0, masks[c] > 0) for c in range(2)) > 0.95


def test_probabilities_are_resampled_before_the_class_is_decided() -> None:
    """Two voxels with .9 and .4 of a class: at a third of the way the mean is above one half, though the
    nearest decision further on is not."""
    geometry = geometry_of((8, 1, 1), np.diag([0.25, 1, 1, 1.0]), Preprocessing(spacing=(1, 1, 1)))
    p = torch.tensor([0.9, 0.4]).reshape(2, 1, 1)
    found = restore(torch.stack([1 - p, p]), geometry, exclusive=True)[:, 0, 0]
    # old centres in units of the new: -.125 + .25 k; p falls below .5 at .8 of the way from .5 to 1.5
    assert found.tolist() == [1, 1, 1, 1, 1, 0, 0, 0]


def test_a_tiny_class_does_not_vanish_and_borders_stay_foreground() -> None:
    shape = (24, 24, 24)
    labels = np.zeros(shape, np.uint8)
    labels[3, 20, 11] = 2
    geometry = geometry_of(shape, np.eye(4), Preprocessing(spacing=(4, 4, 4)))
    grid = labels_to_grid(labels, geometry, SPACE)
    assert np.argwhere(grid == 2).tolist() == [[0, 5, 2]]
    # two classes that share a block: together they fill it, apart neither has half
    labels[:] = 0
    labels[:12], labels[:12, :8] = 1, 2
    assert ((labels_to_grid(labels, geometry, SPACE) > 0)[:3]).all()


@pytest.mark.parametrize(
    ("voxels", "kept"),
    [
        ({2: [(4, 4, 4)], 3: [(5, 5, 5)]}, {2, 3}),
        ({1: [slice(4, 8)], 2: [(4, 4, 4)]}, {1, 2}),
        ({1: [slice(4, 8)], 2: [(5, 5, 5)], 3: [(6, 6, 6)]}, {1, 2, 3}),
        ({1: [(x, y, z) for x in (4, 5) for y in (4, 5) for z in (4, 5)], 2: [(4, 4, 4)]}, {1, 2}),
    ],
)
def test_classes_that_would_vanish_do_not_push_each_other_out(voxels, kept) -> None:
    labels, space = np.zeros((16, 16, 16), np.uint8), LabelSpace(("background", "liver", "tumor", "cyst"))
    for c, places in voxels.items():
        for place in places:
            labels[(place,) * 3 if isinstance(place, slice) else place] = c
    preprocessing = Preprocessing(spacing=(4, 4, 4))
    geometry = geometry_of(labels.shape, np.eye(4), preprocessing)
    found = labels_to_grid(labels, geometry, space)
    assert set(np.unique(found)) == {0, *kept}


def test_a_class_without_a_voxel_that_is_left_does_vanish() -> None:
    """Two classes, and a grid of one voxel that the first has."""
    labels, space = np.ones((4, 4, 4), np.uint8), LabelSpace(("background", "liver", "tumor"))
    labels[0, 0, 0] = 2
    geometry = geometry_of(labels.shape, np.eye(4), Preprocessing(spacing=(4, 4, 4)))
    assert labels_to_grid(labels, geometry, space).ravel().tolist() == [1]


def test_masks_are_resampled_in_their_box_as_in_the_whole() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        old = rng.integers(3, 14, 3)
        mask = rng.random(old) < 0.05
        mask[tuple(rng.integers(old))] = True
        ratio = rng.uniform(0.4, 2.6, 3).tolist()
        new = [max(1, round(n / r)) for n, r in zip(old, ratio, strict=True)]
        region, share = _share(mask, new, ratio)
        whole = np.zeros(new, np.float32)
        whole[region] = share
        assert np.allclose(whole, resample(mask.astype(np.float32), new, ratio), atol=1e-5)


def test_larger_voxels_average_all_smaller_ones() -> None:
    """No aliasing: a pattern that alternates every voxel becomes its mean."""
    stripes = np.tile(np.array([0.0, 1.0], np.float32), 32).reshape(1, 1, 64)
    found = resample(stripes, (1, 1, 16), (1, 1, 4))
    assert np.abs(found[0, 0, 2:-2] - 0.5).max() < 0.02


def test_cubic_follows_a_curve_better_than_linear() -> None:
    x = np.sin(np.arange(40) / 3).astype(np.float32).reshape(40, 1, 1)
    at = (np.arange(80) - 39.5) * 0.5 + 19.5
    errors = [
        np.abs(resample(x, (80, 1, 1), (0.5, 1, 1), order=o)[4:-4, 0, 0] - np.sin(at / 3)[4:-4]).max()
        for o in (1, 3)
    ]
    assert errors[1] < errors[0] / 5


def test_intensity_rules() -> None:
    x = np.array([-1000.0, -54, 100, 258, 3000], np.float32)
    assert np.allclose(normalised(x, Preprocessing(window=(-100, 300))), [0, 0.115, 0.5, 0.895, 1])
    condist = Preprocessing(window=(-54, 258), normalise="meanstd", mean=100, std=50)
    assert np.allclose(normalised(x, condist), [-3.08, -3.08, 0, 3.16, 3.16])
    z = normalised(np.array([0.0, 0, 1, 2, 3], np.float32), Preprocessing())
    assert np.isclose(z[2:].mean(), 0, atol=1e-6) and np.isclose(z[2:].std(), 1, atol=1e-6)
    z = normalised(x, Preprocessing(normalise="zscore", foreground=-60))
    assert np.isclose(z[1:].mean(), 0, atol=1e-6)
    assert (normalised(np.full(4, 7.0, np.float32), Preprocessing()) == 0).all()
    for binary in (np.array([0, 1, 1, 0], np.float32), np.array([-3, 5, 5, -3], np.float32)):
        assert np.allclose(normalised(binary, Preprocessing()), [-1, 1, 1, -1])


def bright(background: float) -> np.ndarray:
    """A ball of a tenth of the volume, brighter than what is around it, of values with noise."""
    noise = np.random.default_rng(0).normal(100, 20, (40, 40, 30)).astype(np.float32)
    inside = ((np.indices(noise.shape) - np.array([20, 20, 15]).reshape(3, 1, 1, 1)) ** 2).sum(0) < 100
    return np.where(inside, background + 200 + noise, background).astype(np.float32)[None]


@pytest.mark.parametrize("order", [1, 3])
@pytest.mark.parametrize("spacing", [(0.78, 0.78, 3.0), (0.69, 0.69, 0.7), (1.1, 1.1, 2.5)])
def test_a_background_does_not_count_whatever_its_value_and_the_spacing(order: int, spacing: Any) -> None:
    """Resampling makes values a rounding beside a background, or below it."""
    preprocessing = Preprocessing(spacing=(1.5, 1.5, 2.0), order=order)  # type: ignore[arg-type]
    geometry = geometry_of((40, 40, 30), np.diag([*spacing, 1.0]), preprocessing)
    found = [
        image_to_grid(bright(background), geometry, preprocessing) for background in (0.0, -1024.0, 1000.0)
    ]
    for other in found[1:]:
        assert np.allclose(found[0], other, atol=1e-3)
    marked = image_to_grid(
        bright(-1024.0), geometry, Preprocessing(**vars(preprocessing) | {"foreground": -1024.0})
    )
    assert np.array_equal(marked, found[1])
    assert np.median(found[0]) < -0.5, "most of it is background, far below the mean of the rest"
    constant = image_to_grid(np.full((1, 40, 40, 30), 7.3, np.float32), geometry, preprocessing)
    assert (constant == 0).all()


def test_a_window_clips_before_zscore_counts() -> None:
    preprocessing = Preprocessing(spacing=(1.5, 1.5, 2.0), window=(-900, 300), normalise="zscore")
    geometry = geometry_of((40, 40, 30), np.diag([0.7, 0.7, 1.0, 1.0]), preprocessing)
    image = bright(-1024.0)
    image[0, :5] = -3000.0
    whole = image_to_grid(image, geometry, Preprocessing(spacing=(1.5, 1.5, 2.0), window=(-900, 300)))
    counted = whole[whole > 0]
    expected = (whole - counted.mean()) / counted.std()
    assert np.allclose(image_to_grid(image, geometry, preprocessing), expected, atol=1e-3)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"orientation": "RAL"}, "orientation is 'RAL'"),
        ({"orientation": "RA"}, "orientation is 'RA'"),
        ({"spacing": (4, 0, 4)}, "spacing"),
        ({"spacing": (4, float("nan"), 4)}, "spacing"),
        ({"window": (10, 10)}, "window"),
        ({"normalise": "window"}, "no window is given"),
        ({"normalise": "meanstd", "mean": 1}, "needs both mean and std"),
        ({"patch": (0, 4)}, "patch"),
    ],
)
def test_options_that_make_no_sense(given: dict[str, Any], told: str) -> None:
    with pytest.raises(FederationError, match=told):
        from_dict(Preprocessing, given, what="preprocessing")


def test_slices_bring_their_neighbours() -> None:
    image = np.arange(2 * 5).reshape(2, 1, 1, 5)
    assert slice_with_neighbours(image, 0, 1).ravel().tolist() == [0, 0, 1, 5, 5, 6]
    assert slice_with_neighbours(image, 3, 2).ravel().tolist() == [1, 2, 3, 4, 4, 6, 7, 8, 9, 9]


def save(path: Path, voxels: np.ndarray, affine: np.ndarray | None = None) -> Path:
    nib.save(nib.Nifti1Image(voxels, np.eye(4) if affine is None else affine), path)  # type: ignore[attr-defined]
    return path


@pytest.mark.parametrize(
    ("voxel", "said"), [(7e-4, "seems to count in metres"), (0.2, "lower it, or take the case out")]
)
def test_a_scan_of_less_than_a_voxel_is_refused(voxel: float, said: str) -> None:
    wanted = from_dict(Preprocessing, {"spacing": (3.0, 3.0, 3.0)}, what="preprocessing")
    geometry = geometry_of((9, 9, 9), np.diag([voxel, voxel, voxel, 1]), wanted)
    with pytest.raises(DataError, match=f"a single one; .*{said}"):
        require_grid("scan", geometry, wanted, 2)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    def told(path: Path) -> str:
        with pytest.raises(FileError) as error:
            read_image(path)
        assert isinstance(error.value, DataError) and str(path) in str(error.value)
        return str(error.value)

    whole = save(tmp_path / "whole.nii.gz", np.random.default_rng(0).integers(0, 999, (9, 9, 9), np.int16))
    cut = tmp_path / "cut.nii.gz"
    cut.write_bytes(whole.read_bytes()[:500])
    assert "not a NIfTI file" in told(cut)
    cut.write_bytes(whole.read_bytes()[:-300])
    assert "truncated or damaged" in told(cut)
    short = save(tmp_path / "short.nii", np.zeros((9, 9, 9), np.int16))
    short.write_bytes(short.read_bytes()[:900])
    assert "truncated or damaged" in told(short)
    text = tmp_path / "text.nii.gz"
    text.write_text("not an image")
    assert "not a NIfTI file" in told(text)
    empty = tmp_path / "empty.nii.gz"
    empty.write_bytes(b"")
    assert "not a NIfTI file" in told(empty)
    assert "no such file" in told(tmp_path / "none.nii.gz")
    assert "not three-dimensional" in told(save(tmp_path / "flat.nii", np.zeros((4, 4), np.int16)))
    flat = save(tmp_path / "flat-affine.nii", np.zeros((4, 4, 4), np.int16))
    content = bytearray(flat.read_bytes())
    content[312:328] = bytes(16)  # srow_z
    flat.write_bytes(content)
    assert "its affine is not finite or not invertible" in told(flat)
    assert read_image(save(tmp_path / "one.nii", np.zeros((4, 4, 4, 1), np.int16)))[0].shape == (4, 4, 4)


@pytest.mark.parametrize(("unit", "mm"), [("meter", 1e3), ("mm", 1), ("micron", 1e-3), ("unknown", 1)])
def test_units_of_the_header_count(unit: str, mm: float, tmp_path: Path) -> None:
    """What is read is in mm, whatever the file is in; labels that are written have the geometry of the file."""
    affine = affine_of("LPI", (6, 5, 4), (0.5, 0.6, 1.5))
    affine[:3] /= mm
    image = nib.Nifti1Image(np.zeros((6, 5, 4), np.float32), affine)  # type: ignore[attr-defined]
    image.header.set_xyzt_units(unit, "sec")
    nib.save(image, tmp_path / "scan.nii.gz")  # type: ignore[attr-defined]
    _, found, _ = read_image(tmp_path / "scan.nii.gz")
    assert np.allclose(found, affine_of("LPI", (6, 5, 4), (0.5, 0.6, 1.5)), atol=1e-5)
    labels = np.ones((6, 5, 4), np.uint8)
    write_label_map(tmp_path / "labels.nii.gz", labels, tmp_path / "scan.nii.gz")
    written: Any = nib.load(tmp_path / "labels.nii.gz")  # type: ignore[attr-defined]
    assert np.allclose(written.affine, affine) and written.header.get_xyzt_units() == (unit, "sec")
    assert np.array_equal(read_image(tmp_path / "labels.nii.gz")[1], found)


def test_channels_come_from_files_or_from_a_fourth_axis(tmp_path: Path) -> None:
    voxels = np.random.default_rng(0).random((4, 5, 6, 2)).astype(np.float32)
    both = read_channels([save(tmp_path / "both.nii", voxels)])[0]
    apart = [save(tmp_path / f"{c}.nii", voxels[..., c]) for c in range(2)]
    assert np.array_equal(both, read_channels(apart)[0]) and both.shape == (2, 4, 5, 6)
    save(tmp_path / "1.nii", voxels[..., 1], np.diag([1, 1, 1.1, 1]))
    with pytest.raises(FileError, match="affine differs"):
        read_channels(apart)


def test_label_maps_keep_the_scans_geometry(tmp_path: Path) -> None:
    affine = affine_of("LPI", (6, 5, 4), (1.0, 2.0, 3.0))
    image = nib.Nifti1Image(np.zeros((6, 5, 4), np.float32), affine)  # type: ignore[attr-defined]
    image.header.set_xyzt_units("mm")
    image.set_qform(affine, 1)
    image.set_sform(affine, 4)
    nib.save(image, tmp_path / "scan.nii.gz")  # type: ignore[attr-defined]
    labels = np.random.default_rng(0).integers(0, 9, (6, 5, 4)).astype(np.uint8)
    out = tmp_path / "deep" / "labels.nii.gz"
    write_label_map(out, labels, tmp_path / "scan.nii.gz")
    found: Any = nib.load(out)  # type: ignore[attr-defined]
    assert np.array_equal(np.asarray(found.dataobj), labels) and found.get_data_dtype() == np.uint8
    assert np.allclose(found.affine, affine)
    assert (int(found.header["qform_code"]), int(found.header["sform_code"])) == (1, 4)
    assert [file.name for file in out.parent.iterdir()] == ["labels.nii.gz"]
    masks = np.stack([labels > 2, labels > 4]).astype(np.uint8)
    write_label_map(out, masks, tmp_path / "scan.nii.gz")
    assert nib.load(out).shape == (6, 5, 4, 2)  # type: ignore[attr-defined]
    with pytest.raises(DataError, match="shape"):
        write_label_map(out, labels[1:], tmp_path / "scan.nii.gz")
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be written"):
        write_label_map(tmp_path / "file" / "x.nii.gz", labels, tmp_path / "scan.nii.gz")


def test_a_lone_scan_is_refused_where_training_would_refuse_it(tmp_path: Path) -> None:
    voxels = np.random.default_rng(0).standard_normal((8, 8, 8))
    voxels[0, 0, 0] = 1e39
    space = LabelSpace(("background", "a"))
    with pytest.raises(DataError, match=r"wide\.nii\.gz: its intensities overflow; give a window"):
        load_scan([save(tmp_path / "wide.nii.gz", voxels)], Preprocessing(), space)
    with pytest.raises(DataError, match=r"even\.nii\.gz: constant on the federation's grid"):
        load_scan([save(tmp_path / "even.nii.gz", np.full((8, 8, 8), 3.0))], Preprocessing(), space)


def test_a_lone_scan_has_no_truth(tmp_path: Path) -> None:
    path = save(tmp_path / "scan.nii.gz", np.random.default_rng(0).random((8, 8, 8)).astype(np.float32))
    scan = load_scan([path], Preprocessing(spacing=(2, 2, 2)), SPACE)
    assert scan.image.shape == (1, 4, 4, 4) and scan.image.dtype == torch.float32
    assert scan.geometry.spacing == (1, 1, 1)
    voxels = np.zeros((8, 8, 8), np.float32)
    voxels[0, 0, :2] = np.nan, np.inf
    with pytest.raises(DataError, match="2 voxels that are NaN or infinite"):
        load_scan([save(path, voxels)], Preprocessing(), SPACE)


def restored_in_full(p: torch.Tensor, geometry: Geometry, exclusive: bool) -> np.ndarray:
    """Every class resampled over the whole scan."""
    ratio = [a / b for a, b in zip(geometry.turned_spacing, geometry.grid_spacing, strict=True)]
    values = np.stack([resample(channel, geometry.turned_shape, ratio) for channel in p.numpy()])
    if not exclusive:
        return np.stack([geometry.turn_back(value > 0.5) for value in values])
    return geometry.turn_back(values.argmax(0))


@pytest.mark.parametrize("spacing", [(2, 2, 2), (4, 3, 5), (1.1, 2, 6), (None, 3, None), (None, None, None)])
@pytest.mark.parametrize(("axes", "shape", "mm"), GRIDS)
def test_classes_are_restored_where_they_may_be_as_everywhere(axes, shape, mm, spacing) -> None:
    """Small structures, noise, nothing at all; sums that are not 1; overlapping classes."""
    geometry = geometry_of(
        shape, affine_of(axes, shape, mm), Preprocessing(orientation="LPS", spacing=spacing)
    )
    random = torch.Generator().manual_seed(sum(shape))
    noise = torch.randn(4, *geometry.grid_shape, generator=random)
    z = noise.clone()
    z[0] += 6
    x, y, w = (n // 2 for n in geometry.grid_shape)
    z[1, x : x + 3, y:, :w] += 7
    z[2, : x // 2, : y // 2] += 6.5  # beside it, undecided
    for p in (
        z.softmax(0),
        noise.softmax(0),
        (z * 5).softmax(0),
        z.softmax(0) * torch.rand(z[0].shape, generator=random),
    ):
        found = restore(p, geometry, exclusive=True)
        assert np.array_equal(found, restored_in_full(p, geometry, True))
    nothing = torch.zeros_like(z)
    nothing[0] = 1
    assert not restore(nothing, geometry, exclusive=True).any()
    masks = restore(z.sigmoid(), geometry, exclusive=False)
    assert masks.shape == (4, *shape) and masks.dtype == np.uint8
    assert np.array_equal(masks, restored_in_full(z.sigmoid(), geometry, False))
