"""Figures 2 to 4 of the Fed-MENU paper as pages: of one run, and what they say where they cannot be made."""

import base64
import io
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from method_cases import with_method
from PIL import Image
from test_report_page import Outline

from fedatlas.compare.overlays import Shown, Solids, median_cases, ras_spacing, to_ras
from fedatlas.core.errors import DataError, RunFolderError
from fedatlas.core.seeds import generator, isolated
from fedatlas.federation.file import parse_federation
from fedatlas.federation.session import run_federation
from fedatlas.nets.menunet import MENUNet
from fedatlas.papers.fedmenu import cams
from fedatlas.papers.fedmenu.cams import _window, cut
from fedatlas.papers.fedmenu.pages import run_figures, write_figures
from fedatlas.papers.fedmenu.subencoders import activation
from fedatlas.report import page, read
from fedatlas.report.meshes import TRANSPARENT


def words(file: Path) -> str:
    """The text of a page that is well formed and asks no network."""
    text = file.read_text()
    outline = Outline(text)
    assert "://" not in text
    for target in outline.targets:
        assert target.startswith("data:image/png;base64,") or (file.parent / target).exists(), target[:80]
    return " ".join(outline.text)


def test_a_run_of_fedmenu_has_three_pages(small: dict[str, Any], phantom: Path, tmp_path: Path) -> None:
    shutil.copytree(phantom, tmp_path / "data")
    told: Any = with_method(small, "fedmenu")
    told = told | {"rounds": 1, "local": told["local"] | {"steps": 2}}
    told["evaluation"] = told["evaluation"] | {"models": ["best"]}
    told["engine"] = told["engine"] | {"cache": str(tmp_path / "cache")}
    for site in told["sites"]:
        site["path"] = str(tmp_path / "data" / Path(site["path"]).name)
    run = tmp_path / "runs" / "one"
    run_federation(parse_federation(told, base=tmp_path), run, tell=lambda text: None)
    asked: list[str] = []
    pages = run_figures(run, asked.append)
    assert sorted(pages) == [2, 3, 4] and asked
    sites = [site["name"] for site in told["sites"]]
    two, three, four = (pages[n].read_text() for n in (2, 3, 4))
    for n, file in pages.items():
        assert file == run / f"figure-{n}.html" and f"<title>Figure {n}: " in file.read_text()
    assert two.count('class="overlay"') == 3 * len(sites), "image, truth and one model"
    assert 'class="truth"' in two and 'stroke-dasharray="4 3"' in two
    assert three.count('class="solid"') >= len(sites) and "anterior view" in three
    assert 'class="overlay"' in four and "third block" in four

    # the second time nothing is predicted, and no data are needed
    shutil.rmtree(tmp_path / "data")
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)
    again: list[str] = []
    assert run_figures(run, again.append) == pages and again == []
    assert [pages[n].read_text() for n in (2, 3, 4)] == [two, three, four]

    found = read.read(run)
    assert 'href="figure-4.html"' in page.section(found, "overlays", run)
    assert 'href="../runs/one/figure-3.html"' in page.section(found, "overlays", tmp_path / "other")
    (run / "report.html").touch()  # what they link to
    for file in pages.values():
        words(file)

    # without the data and without what was kept
    for kept in (run / "sites").glob("*/*.npz"):
        kept.unlink()
    pages = run_figures(run)
    for n in (2, 3, 4):
        text = words(pages[n])
        names = ", ".join(f"fedmenu at {site}" for site in sites)
        assert f"No picture of {names}: the site's data are not on this machine (no such folder)" in text
        assert 'class="grid"' not in pages[n].read_text()


def test_a_folder_that_is_no_run_is_told(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="not a run folder"):
        run_figures(tmp_path)


class Run:
    """In place of a subject, one whose pictures are there already."""

    def __init__(self, arm: str, folder: Path) -> None:
        self.arm, self.folder, self.federation = arm, folder, self
        self.net = {"name": "unet"}

    def file(self, site: str, what: str) -> Path:
        return self.folder / f"{self.arm}-{site}-{what}.npz"


def shown(**prediction: np.ndarray) -> Shown:
    truth = {"liver": prediction["liver"]}
    plane: Mapping[str, np.ndarray] = {name: mask[..., 5] > 0 for name, mask in prediction.items()}
    solids = Solids((4.0, 4.0, 4.0), truth, prediction)
    return Shown(
        "case <1>",
        np.zeros((12, 12), np.float32),
        (4.0, 4.0),
        {"liver": plane["liver"]},
        plane,
        ("liver",),
        solids,
    )


def test_organs_that_the_site_does_not_annotate_are_transparent(tmp_path: Path) -> None:
    liver, spleen = np.zeros((12, 12, 12), np.uint8), np.zeros((12, 12, 12), np.uint8)
    liver[6:11, 3:9, 3:9], spleen[1:4, 3:9, 3:9] = 255, 255
    arms: Any = [Run("a & b", tmp_path)]
    pictures = {"s0": {"a & b": shown(liver=liver, spleen=spleen)}}
    pages = write_figures(
        arms,
        pictures,
        {"the data of s1 are not on this machine": ["a & b at s1"]},
        tmp_path,
        arms=["a & b", "later"],
        name="toy",
        back={"comparison": "comparison.html"},
        prefix="toy-",
    )
    assert {n: file.name for n, file in pages.items()} == {2: "toy-figure-2.html", 3: "toy-figure-3.html"}
    (tmp_path / "comparison.html").touch()
    for file in pages.values():
        text = words(file)
        assert "No picture of a & b at s1: the data of s1 are not on this machine" in text
        assert "not run" in text and "case <1>" in text
    found = re.findall(r'src="data:image/png;base64,([^"]*)" alt="([^,]*),', pages[3].read_text())
    assert [alt for _, alt in found] == ["truth", "a &amp; b"]
    truth, arm = (np.asarray(Image.open(io.BytesIO(base64.b64decode(png))))[..., 3] for png, _ in found)
    light = (np.abs(arm - 255 * TRANSPARENT) < 2).mean()
    assert (truth == 255).mean() > 0.02 and (np.abs(truth - 255 * TRANSPARENT) < 2).mean() < 0.002
    assert light > 0.02 and (arm == 255).sum() == pytest.approx((truth == 255).sum(), rel=0.02)


def test_the_median_case_is_of_cases_that_hold_the_class() -> None:
    rows = [
        {"site": "b", "case": f"c{i}", "value": v, "reason": "truth empty" if i == 3 else ""}
        for i, v in enumerate((0.9, 0.1, 0.5, 0.7, None))
    ]
    assert median_cases(["a", "b"], rows) == {"b": "c2"}, "c1 and c0 beside it; c3 holds none"


def test_axes_are_turned_to_the_right_the_front_and_up() -> None:
    voxels = np.arange(24).reshape(2, 3, 4)
    assert to_ras(voxels, "RAS") is not None and np.array_equal(to_ras(voxels, "RAS"), voxels)
    turned = to_ras(voxels, "SLA")  # up, left, front
    assert turned.shape == (3, 4, 2) and np.array_equal(turned, voxels.transpose(1, 2, 0)[::-1])
    assert ras_spacing((5.0, 1.0, 2.0), "SLA") == (1.0, 2.0, 5.0)


def test_a_window_lies_inside_and_is_padded_as_in_prediction() -> None:
    image = torch.arange(30.0).reshape(1, 5, 6)
    assert torch.equal(cut(image, (2, 3), (3, 4)), image[:, 1:4, 1:5])
    assert torch.equal(cut(image, (0, 5), (3, 4)), image[:, :3, 2:])
    padded = cut(image, (2, 5), (8, 4))
    assert torch.equal(padded[:, 1:6], image[:, :, 2:])
    assert not padded[:, 0].any() and not padded[:, 6:].any()


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("letters", ["RAS", "LPS", "ARS", "SLA"])
def test_a_map_is_shown_as_viewers_show_it_however_the_grid_is_turned(letters, dims, monkeypatch) -> None:
    """The patient's right, or front, is on the left, and the front, or what is above, at the top."""
    monkeypatch.setattr(cams, "activation", lambda net, seen, *_, **__: seen[0].abs())
    image, mask, spacing = (
        np.random.default_rng(0).random((9, 11, 7)),
        np.zeros((9, 11, 7), bool),
        (1.0, 2.0, 3.0),
    )
    mask[4, 5, 3] = True
    order = [("RAS" if letter in "RAS" else "LPI").index(letter) for letter in letters]

    def turn(voxels: np.ndarray) -> np.ndarray:
        flipped = (axis for axis, letter in enumerate(letters) if letter in "LPI")
        return np.flip(voxels.transpose(order), tuple(flipped)).copy()

    volume: Any = SimpleNamespace(
        image=torch.from_numpy(turn(image))[None], spacing=[spacing[axis] for axis in order], case="c0"
    )
    asked = SimpleNamespace(patch=turn(image).shape[:dims], orientation=letters, context=0)
    trained: Any = SimpleNamespace(preprocessing=asked, space=SimpleNamespace(exclusive=True))
    across = order[2] if dims == 2 else 2
    plane, cam, truth, (high, wide) = cams._window(volume, turn(mask), trained, None, 0, 3)
    expected = np.take(image, (4, 5, 3)[across], across).T[::-1, ::-1]
    np.testing.assert_allclose(plane, expected, rtol=1e-6)
    np.testing.assert_allclose(cam, expected / (expected if dims == 2 else image).max(), rtol=1e-6)
    assert np.array_equal(truth, mask.take((4, 5, 3)[across], across).T[::-1, ::-1])
    assert (wide, high) == tuple(np.delete(spacing, across))


def test_of_a_net_in_three_dimensions_the_window_lies_around_the_organ() -> None:
    with isolated("net"):
        net: Any = MENUNet(width=2, levels=2).build(in_channels=1, classes=3, spatial_dims=3)
    mask = np.zeros((20, 24, 16), bool)
    mask[12:16, 3:9, 5], mask[14, 5, 6] = True, True
    image = torch.randn(1, 20, 24, 16, generator=generator("image")) + 5 * torch.from_numpy(mask)
    volume: Any = SimpleNamespace(image=image, spacing=(1.0, 2.0, 3.0), case="c0")
    asked = SimpleNamespace(patch=[8, 16, 8], orientation="RAS", context=0)
    trained: Any = SimpleNamespace(preprocessing=asked, space=SimpleNamespace(exclusive=True))
    plane, cam, truth, spacing = _window(volume, mask, trained, net, 1, 3)
    assert plane.shape == cam.shape == truth.shape == (16, 8), "rows run from the front to the back"
    assert truth.sum() == 24 and spacing == (2.0, 1.0)
    inner = image[0, 10:18, :16, 5].numpy()
    np.testing.assert_array_equal(plane, inner.T[::-1, ::-1])
    whole = activation(net, image[:, 10:18, :16, 1:9], 1)
    np.testing.assert_allclose(cam, (whole / whole.max())[..., 4].numpy().T[::-1, ::-1], atol=1e-6)
    with pytest.raises(DataError, match="holds none of it"):
        _window(volume, mask & False, trained, net, 1, 3)
