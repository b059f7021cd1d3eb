"""The pseudo labels of teachers and global model, and ratios of gradients, on the page of a comparison that was run."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from fedatlas.compare import collect, load_comparison, run_comparison
from fedatlas.compare.overlays import subjects
from fedatlas.compare.parts import PARTS, Page
from fedatlas.papers.ufps.teaching import KINDS, teaching


def test_a_run_shows_who_teaches_and_how_steep_gradients_are(
    small: dict[str, Any], phantom: Path, tmp_path: Path
) -> None:
    shutil.copytree(phantom, tmp_path / "data")
    method: Any = {"name": "ufps", "ws": None, "rce": None, "ua": None, "teachers": {"rounds": 1}}
    method |= {"gmt": {"start": 1, "v": 0.0}, "sam": {"start": 1, "masks": "none", "gradients": True}}
    method["sam"]["cmidg"] = {"kernels": [1], "grid": [2, 2]}
    base = small | {"method": method, "engine": {"cache": str(tmp_path / "cache")}}
    base["local"] = base["local"] | {"steps": 2}
    base["evaluation"] = base["evaluation"] | {"models": ["best"]}
    for site in base["sites"]:
        site["path"] = str(tmp_path / "data" / Path(site["path"]).name)
    claims = {"Figure 4": ["gradients"], "Figure S4": ["pseudo-labels"]}
    file = {"name": "toy", "base": "base.yaml", "arms": {"ufps": {}}}
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(base))
    (tmp_path / "toy.yaml").write_text(
        yaml.safe_dump(file | {"paper": "UFPS", "claims": claims}, sort_keys=False)
    )
    comparison = load_comparison([tmp_path / "toy.yaml"], runs=tmp_path / "runs")
    assert run_comparison(comparison, tell=lambda text: None) == {}

    finished = {arm: comparison.seeds for arm in comparison.arms}
    told: list[str] = []
    found, problems = teaching(comparison, subjects(comparison, finished), told.append)
    training = [site["name"] for site in base["sites"] if site.get("role", "train") == "train"]
    assert problems == {} and len(told) == len(training)
    for of_arm in found.values():
        assert list(of_arm) == training
        for one in of_arm.values():
            assert set(one.masks) == set(KINDS) and one.intersected, "v is 0"
            both = {n: one.masks["global"][n] & one.masks["teachers"][n] for n in one.masks["both"]}
            assert all(np.array_equal(both[name], one.masks["both"][name]) for name in both)
            assert 0 <= one.share <= 1 or one.share == np.inf
            assert any(mask.any() for mask in one.masks["annotated"].values()) or one.image.size

    page, drawn = Page(comparison, collect(comparison), tmp_path / "page.html"), {}
    for name in ("pseudo-labels", "gradients"):
        draw = PARTS[name].draw
        assert draw is not None
        drawn[name] = draw(page)
    assert drawn["pseudo-labels"].count("<svg") == 5 * len(training)
    assert ": the intersection" in drawn["pseudo-labels"]
    assert "of the numbers have r &gt; 0" in drawn["gradients"] and "<svg" in drawn["gradients"]

    # kept, so that neither data nor the sites' memory are needed again
    shutil.rmtree(tmp_path / "data")
    for arm in comparison.arms:
        for memory in (comparison.path(arm, 0) / "sites").glob("*/memory"):
            shutil.rmtree(memory)
    again, problems = teaching(comparison, subjects(comparison, finished), told.append)
    assert len(told) == len(training) and problems == {} and again["ufps"].keys() == found["ufps"].keys()
    for kept in comparison.folder.glob("*/sites/*/pseudo-*.npz"):
        kept.unlink()
    nothing, problems = teaching(comparison, subjects(comparison, finished))
    assert nothing == {} and [len(of) for of in problems.values()] == [len(training)]
    shutil.copytree(phantom, tmp_path / "data")
    _, problems = teaching(comparison, subjects(comparison, finished))
    assert list(problems) == ["the site's memory with the teachers is not on this machine, or holds none"]
