"""data/leaks.py: images that give labels away are found, others are not; `check`, and what a run keeps for its report."""

from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
from PIL import Image
from scipy import ndimage

from fedatlas.core.labels import LabelSpace
from fedatlas.data.checks import check_site
from fedatlas.data.index import SiteConfig, read_site
from fedatlas.data.leaks import Leak, ground_of, leak_of, slice_of
from fedatlas.data.transforms import Preprocessing
from fedatlas.data.voxels import VoxelData
from fedatlas.phantoms.organs import phantom_sites, write_phantom
from fedatlas.report.leaks import there
from fedatlas.report.page import section
from fedatlas.report.read import read

NAMES = ("background", "liver", "spleen", "kidney", "tumour")


def scan(height: int = 20, air: float = -1000.0) -> tuple[np.ndarray, np.ndarray]:
    """A body in constant air with a tube that is drawn through all slices: image [1, 24, 24, height], drawn."""
    x, y = np.meshgrid(np.arange(24), np.arange(24), indexing="ij")
    body = (x - 12) ** 2 + (y - 12) ** 2 < 100
    tube = (x - 9) ** 2 + (y - 12) ** 2 < 7
    plane = np.where(body, np.random.default_rng(0).normal(40, 20, body.shape), air)
    image = np.repeat(plane[..., None], height, 2)
    return image[None].astype(np.float32), np.repeat(tube[..., None], height, 2)


def leaking(height: int = 20, slices: int = 5, **more: Any) -> tuple[np.ndarray, np.ndarray]:
    """The same where the last slices hold values inside the tube alone."""
    image, drawn = scan(height, **more)
    ground = image[0, 0, 0, 0]
    image[0, ..., -slices:] = np.where(drawn[..., -slices:], image[0, ..., -slices:], ground)
    return image, drawn


def test_slices_that_show_labels_alone_are_counted() -> None:
    found = leak_of(*leaking(), np.eye(4))
    assert found is not None and found.told
    assert found.slices == (5, 20) and found.shapes == 0.25 and found.hidden == 0
    assert found.axis == 2 and found.place >= 15
    assert str(found) == "5 of 20 slices show labels alone (25 % of what is drawn)"
    whole = leak_of(*scan(), np.eye(4))
    assert whole is not None and not whole.told and whole.slices == (0, 20)


def test_a_margin_around_the_label_and_a_ground_of_another_value_hide_nothing() -> None:
    """Values may have been kept up to two voxels around what was drawn, in a lossy file whose ground is no minimum."""
    image, drawn = scan(air=0)
    image = np.where(image == 0, 0, np.round(image - 300))
    around: Any = ndimage.binary_dilation(drawn, np.ones((3, 3, 1)), iterations=2)
    image[0, ..., -5:][~around[..., -5:]] = 0
    image += np.random.default_rng(1).integers(0, 2, image.shape)
    found = leak_of(image, drawn, np.eye(4))
    assert found is not None and found.slices == (5, 20) and found.hidden == 0


def test_slices_are_axial_whatever_the_axes_of_the_file() -> None:
    image, drawn = leaking()
    turned = np.eye(4)[[1, 2, 0, 3]]  # the first axis of the file points upwards
    found = leak_of(image.transpose(0, 3, 1, 2), drawn.transpose(2, 0, 1), turned)
    assert found is not None and found.axis == 0 and found.slices == (5, 20)


def test_labels_on_the_ground() -> None:
    image, drawn = scan()
    moved = np.roll(drawn, 12, axis=0)
    found = leak_of(image, moved, np.eye(4))
    assert found is not None and found.told and found.hidden > 0.3
    assert "of what is drawn lies on the ground" in str(found)
    few = drawn.copy()
    few[0, 0, :5] = True
    found = leak_of(image, few, np.eye(4))
    assert found is not None and 0 < found.hidden < 0.1 and not found.told


def test_an_image_without_ground_or_labels_tells_nothing() -> None:
    image, drawn = scan()
    assert leak_of(image, np.zeros_like(drawn), np.eye(4)) is None
    noise = np.random.default_rng(0).normal(size=image.shape)
    assert ground_of(noise) is None and leak_of(noise, np.ones_like(drawn), np.eye(4)) is None
    assert ground_of(np.zeros((1, 1, 1, 1))) is None


def test_two_channels_are_visible_where_either_is() -> None:
    image, drawn = leaking()
    both = np.concatenate([image, scan()[0]])
    found = leak_of(both, drawn, np.eye(4))
    assert found is not None and not found.told


def test_pictures_masked_by_their_labels(tmp_path: Path) -> None:
    """One picture of which the outlined part alone was kept, and one that is whole."""
    image, drawn = scan(1)
    grey = np.clip(image[0, ..., 0] + 120, 0, 255).astype(np.uint8)
    for name, shown in (("whole", grey), ("masked", np.where(drawn[..., 0], grey, 0))):
        for folder, content in (("images", shown), ("masks/lung", drawn[..., 0] * np.uint8(255))):
            (tmp_path / folder).mkdir(parents=True, exist_ok=True)
            Image.fromarray(content.astype(np.uint8)).save(tmp_path / folder / f"{name}.png")
    index = read_site(SiteConfig(name="s", path=str(tmp_path), format="masks"), tmp_path)  # type: ignore[call-arg]
    told = [
        str(p) for p in check_site(index, LabelSpace(("background", "lung"))) if "give labels away" in p.what
    ]
    assert len(told) == 1 and "in 1 of 2 cases. masked: 1 of 1 slices show labels alone" in told[0]


def test_the_slice_is_seen_from_below_with_the_front_up() -> None:
    image, drawn = np.zeros((3, 4, 2), np.float32), np.zeros((3, 4, 2), bool)
    image[0, 3, 1], drawn[2, 0, 1] = 1, True  # in RAS: left in front; right at the back
    shown = slice_of(image, drawn, np.diag([2.0, 3.0, 5.0, 1.0]), Leak(1, (1, 1), 0, 2, 1))
    assert shown["image"].shape == (4, 3) and shown["image"][0, 2] == 1 and shown["drawn"][3, 0]
    assert shown["spacing"].tolist() == [3, 2]
    turned = np.array([[0, 0, 5, 0], [-3, 0, 0, 0], [0, 2, 0, 0], [0, 0, 0, 1.0]])  # the file's axes: P, S, R
    again = slice_of(
        image.transpose(1, 2, 0)[::-1], drawn.transpose(1, 2, 0)[::-1], turned, Leak(1, (1, 1), 0, 1, 1)
    )
    assert np.array_equal(again["image"], shown["image"]) and np.array_equal(again["drawn"], shown["drawn"])
    assert again["spacing"].tolist() == [3, 5]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> VoxelData:
    """Two of the four cases of a phantom's site lose, on black slices, all but what is drawn."""
    world = write_phantom(tmp_path_factory.mktemp("world"), sites=1, cases=3, test_cases=1)
    for place, name in (("Tr", "p000"), ("Ts", "p003")):
        file = world / "site-0" / f"images{place}" / f"{name}_0000.nii.gz"
        image: Any = nib.load(file)  # type: ignore[attr-defined]
        drawn = np.asarray(nib.load(world / "site-0" / f"labels{place}_all" / f"{name}.nii.gz").dataobj) > 0  # type: ignore[attr-defined]
        voxels = np.asarray(image.dataobj).copy()
        voxels[..., 12:] = np.where(drawn[..., 12:], voxels[..., 12:], voxels.min())
        nib.save(nib.Nifti1Image(voxels, image.affine), file)  # type: ignore[attr-defined]
    config = SiteConfig(**phantom_sites(world)[0])
    preprocessing = Preprocessing(spacing=(4, 4, 4), window=(-100, 200), patch=(16, 16))
    cache = tmp_path_factory.mktemp("cache")
    return VoxelData(read_site(config, world), LabelSpace(NAMES), preprocessing, cache=cache, validation=0)


def test_check_names_the_cases(site: VoxelData) -> None:
    told = [p for p in check_site(site.indexes[0], site.space) if "give labels away" in p.what]
    assert len(told) == 1 and not told[0].fatal
    assert "in 2 of 4 cases" in told[0].what and "p000: " in told[0].what and "p003: " in told[0].what
    assert "p001" not in str(told[0]) and "look at slice " in told[0].remedy


def test_a_run_counts_them_and_its_report_shows_the_worst(site: VoxelData, tmp_path: Path) -> None:
    assert list(site.leaks()) and set(site.leaks()) == {"p000", "p003"} and site.summary()["leaks"] == 2
    run = tmp_path / "run"
    run.mkdir()
    sites = '{"s": {"annotated": [], "cases": {}, "leaks": 2}, "far": {"leaks": 1}, "old": {}}'
    (run / "run.json").write_text(f'{{"labels": {{"names": ["background", "liver"]}}, "sites": {sites}}}')
    site.keep_leaks(run / "sites" / "s")
    found = read(run)
    assert there(found) == {"far": 1, "s": 2} or there(found) == {"s": 2, "far": 1}
    page = section(found, "leaks")
    assert "p000" in page and "p003" in page and "slices show labels alone" in page
    assert (
        "<svg" in page
        and 'class="truth"' in page
        and "far: 1 case. Which they are is kept at the site" in page
    )
