"""`fedatlas analyse`: every kind on a small run, from the command line to the report, and what it refuses."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from runs import phantom_federation

from fedatlas.analysis.runs import analyse, cka
from fedatlas.analysis.runs.landscape import summary
from fedatlas.analysis.runs.subject import Subject
from fedatlas.analysis.similarity import cka_between
from fedatlas.cli import main
from fedatlas.core.errors import FedAtlasError, FederationError, NameMismatch, RunFolderError
from fedatlas.core.seeds import generator
from fedatlas.federation.file import parse_federation
from fedatlas.federation.session import run_federation
from fedatlas.report.page import render, section
from fedatlas.report.read import read

OPTIONS: dict[str, list[str]] = {
    "landscape": ["--grid", "3", "--batches", "1", "--batch", "2", "--model", "best,local"],
    "hessian": [
        *["--top", "2", "--steps", "4", "--samples", "2", "--density", "3", "--batches", "1", "--batch", "2"],
        *["--sites", "site-a,site-b"],
    ],
    "cka": ["--images", "4"],
    "membership": ["--steps", "2", "--attack", "5", "--cells", "4", "--sites", "site-a"],
}
HEADINGS = {
    "landscape": "Loss landscape",
    "hessian": "Hessian",
    "cka": "Similarity of models (CKA)",
    "membership": "Membership inference",
}


def federation(phantom: Path, cache: Path, **more: Any) -> dict[str, Any]:
    """On a coarser grid, and shorter."""
    whole = phantom_federation(phantom, cache)
    return (
        whole
        | {
            "preprocessing": whole["preprocessing"] | {"spacing": [8, 8, 8]},
            "local": whole["local"] | {"batch": 2, "steps": 2},
            "evaluation": {"validation": 0.25, "metrics": ["dice"], "overlays": False},
        }
        | more
    )


@pytest.fixture(scope="module")
def run(phantom: Path, phantom_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run; analyses are added to it."""
    path = tmp_path_factory.mktemp("analysed") / "runs" / "it"
    plain = federation(phantom, phantom_cache / "coarse")
    run_federation(parse_federation(plain, base=Path()), path, tell=lambda text: None)
    return path


def files(path: Path) -> dict[str, bytes]:
    """All of a run folder but what an analysis and the report write."""
    return {
        str(file.relative_to(path)): file.read_bytes()
        for file in sorted(path.rglob("*"))
        if file.is_file() and "analysis" not in file.parts and file.name != "report.html"
    }


@pytest.mark.parametrize("kind", OPTIONS)
def test_every_kind_from_the_command_line_to_the_report(
    kind: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(run)
    drawn = torch.get_rng_state()
    names = dict(zip(("site-a", "site-b"), Subject(run).sites[:2], strict=True))
    options = [",".join(names.get(part, part) for part in word.split(",")) for word in OPTIONS[kind]]
    assert main(["analyse", kind, str(run), *options]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith(f"{kind}: ") and any(
        word in told[0] for word in ("passes", "products", "predictions")
    )
    assert any(": about " in line for line in told[:3]), "the time is told before the first result"
    file = run / "analysis" / f"{kind}.json"
    first = file.read_bytes()
    found = json.loads(first)
    assert found["kind"] == kind and found["settings"]["seed"] == 0 and found["versions"]["torch"]
    shown = section(read(run), "analyses")
    assert f">{HEADINGS[kind]}</h3>" in shown
    if kind in ("hessian", "landscape"):
        assert re.search(r"<td>global \(\w+\), round \d+</td>", shown), "which round it is of"
    assert main(["analyse", kind, str(run), *options, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == kind
    assert file.read_bytes() == first, "the same seed gives the same bytes"
    assert files(run) == before
    assert torch.equal(torch.get_rng_state(), drawn), "the global generator is left alone"


def test_the_last_round_that_was_the_best_has_one_spectrum(run: Path, tmp_path: Path) -> None:
    path = tmp_path / "same"
    shutil.copytree(run, path)
    few = {
        "top": 2,
        "steps": 3,
        "samples": 2,
        "density": 2,
        "batches": 1,
        "batch": 2,
        "sites": (Subject(run).sites[0],),
    }
    assert Subject(path).state("best").round == Subject(path).state("last").round
    same = analyse("hessian", path, {**few, "model": ("best", "last")}, tell=lambda text: None)
    assert same["cost"]["products"] == 3 + 2 + 2
    best, last = same["spectra"]
    assert (best["model"], last["model"]) == ("best", "last") and {**best, "model": "last"} == last
    shutil.copy(path / "rounds" / "0001" / "state.fa", path / "models" / "best.fa")
    apart = analyse("hessian", path, {**few, "model": ("best", "last")}, tell=lambda text: None)
    assert apart["cost"]["products"] == 2 * (3 + 2 + 2)
    assert apart["spectra"][0]["round"] == 1 and apart["spectra"][0]["trace"] != last["trace"]
    assert apart["spectra"][1] == last


def test_the_report_has_a_section_once_there_is_an_analysis(run: Path, tmp_path: Path) -> None:
    path = tmp_path / "shown"
    shutil.copytree(run, path)
    shutil.rmtree(path / "analysis", ignore_errors=True)
    assert not section(read(path), "analyses")
    analyse("cka", path, {"on": "parameters"}, tell=lambda text: None)
    page = render(read(path))
    assert '<section id="analyses"' in page and 'id="analysis-cka"' in page and "analysis-hessian" not in page


def test_the_loss_is_the_runs_own_at_the_sites_own_labels(run: Path) -> None:
    subject = Subject(run)
    site = subject.sites[0]
    found = analyse(
        "landscape", run, {"sites": (site,), "grid": 3, "batches": 2, "batch": 3}, tell=lambda text: None
    )
    (surface,) = found["surfaces"]
    batches = subject.batches(site, count=2, size=3, seed=0, labels="annotated")
    net = subject.network(subject.models("best", site)[0].member)
    with torch.no_grad():
        expected = sum(float(subject.loss_at(site)(net, batch)) for batch in batches) / 2
    assert surface["centre"] == pytest.approx(expected) == surface["losses"][1][1]
    assert surface["round"] == subject.state("best").round
    known = subject.sources[site].labels.known
    more = subject.batches(site, count=2, size=3, seed=0, labels="reference")
    assert all(batch.known[:, 1:].sum() > sum(list(known)[1:]) * 3 for batch in more)
    present = {int(c) for batch in more for c in batch.target.unique()}
    assert len(present) > 1 and batches[0].image.shape == more[0].image.shape
    alike = zip(more, subject.batches(site, count=2, size=3, seed=0, labels="reference"), strict=True)
    assert all(torch.equal(a.image, b.image) and torch.equal(a.target, b.target) for a, b in alike)


def test_summary_of_a_surface() -> None:
    steps = [-1.0, -0.5, 0.0, 0.5, 1.0]
    at = torch.tensor(steps, dtype=torch.float64)
    losses = 1 + at[:, None] ** 2 + 2 * (at[None, :] - 0.5) ** 2 - 0.5
    found = summary(losses, steps, float(losses[2, 2]), 0.3)
    assert found["lowest"] == 0.5 and found["lowest_at"] == [0.0, 0.5]
    assert found["highest"] == pytest.approx(float(losses.max()) - 1)
    assert found["near"] == pytest.approx((0.25 + 0.25 - 0.5 + 1.5) / 4)
    assert found["flat"] == pytest.approx(float((losses <= 1.3).double().mean())) and found["finite"] == 1
    losses[0, 0] = torch.inf
    assert summary(losses, steps, 1.0, 0.3)["finite"] == 24 / 25


def test_layers_against_layers() -> None:
    from fedatlas.core.seeds import isolated

    with isolated(1):
        net = torch.nn.Sequential(
            torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU(), torch.nn.Conv2d(4, 6, 3, stride=2), torch.nn.AdaptiveAvgPool2d(1),
            torch.nn.Flatten(), torch.nn.Linear(6, 5),
        )  # fmt: skip
    images = [torch.randn(6, 1, 12, 12, generator=generator(n)) for n in range(2)]
    first, second, values = cka_between(net, net, images, cells=2)
    assert first == second == ["0", "2", "5"] and values.shape == (3, 3)
    assert torch.allclose(values, values.T) and torch.allclose(
        values.diag(), torch.ones(3, dtype=torch.float64)
    )
    assert 0 <= values[0, 2] < 0.99
    with pytest.raises(FederationError, match="0 batches"):
        cka_between(net, net, [])


def test_a_run_that_is_not_finished(run: Path, tmp_path: Path) -> None:
    path = tmp_path / "half"
    shutil.copytree(run, path)
    shutil.rmtree(path / "models")
    shutil.rmtree(path / "rounds" / "0002")
    subject = Subject(path)
    assert subject.usual == "last" and subject.models("last")[0].round == 1 and not subject.locals
    how: dict[str, Any] = {"grid": 3, "batches": 1, "batch": 2, "sites": (subject.sites[0],)}
    (surface,) = analyse("landscape", path, how, tell=lambda text: None)["surfaces"]
    assert (surface["model"], surface["round"]) == ("last", 1)
    with pytest.raises(RunFolderError, match="no round was validated; take --model last"):
        analyse("landscape", path, how | {"model": ("best",)}, tell=lambda text: None)
    with pytest.raises(RunFolderError, match=f"no local model of site {subject.sites[0]}"):
        analyse("landscape", path, how | {"model": ("local",)}, tell=lambda text: None)
    with pytest.raises(FederationError, match="one model only"):
        analyse("cka", path, {"on": "parameters"}, tell=lambda text: None)
    shutil.rmtree(path / "rounds")
    with pytest.raises(RunFolderError, match="no round is complete"):
        analyse("hessian", path, {}, tell=lambda text: None)


def test_a_method_with_several_models(run: Path, phantom: Path, phantom_cache: Path, tmp_path: Path) -> None:
    plain = federation(phantom, phantom_cache / "coarse", method={"name": "standalone"}, rounds=1)
    plain["local"]["steps"] = 1
    plain["net"]["filters"] = [4, 8, 6]
    path = tmp_path / "alone"
    run_federation(parse_federation(plain, base=Path()), path, tell=lambda text: None)
    subject = Subject(path)
    count = len(subject.sites)
    names = [model.name for model in subject.models("last", subject.sites[0])]
    assert names == [f"last/{n + 1}" for n in range(count)]
    found = analyse("cka", path, {"on": "parameters"}, tell=lambda text: None)
    assert len(found["models"]) == 2 * count
    with pytest.raises(
        NameMismatch, match=r"models best/1 and it: best; the nets of both have to be the same"
    ):
        analyse("cka", path, {"on": "parameters", "against": str(run)}, tell=lambda text: None)
    how = {"steps": 1, "attack": 1, "cells": 2, "model": "last", "cases": 2}
    (attack,) = analyse("membership", path, how, tell=lambda text: None)["attacks"]
    assert attack["target"] == "last"
    sides = {"members": ("seen", "hidden"), "others": ("sure", "unsure", "outside")}
    for side, parts in sides.items():
        values = attack["uncertainty"][side]
        assert len(values) == sum(attack["cases"][part] for part in parts) and values == sorted(values)
    drawn = section(read(path), "analyses").partition('id="analysis-membership"')[2]
    assert "Uncertainty of members and others: 1 targets" in drawn and "fill: var(--c1)" in drawn
    file = path / "analysis" / "membership.json"
    old = json.loads(file.read_text())
    del old["attacks"][0]["uncertainty"]
    file.write_text(json.dumps(old))
    assert "Uncertainty of members" not in section(read(path), "analyses"), "a file of before it was kept"


def test_parameters_need_no_data(run: Path, tmp_path: Path) -> None:
    path = tmp_path / "away"
    shutil.copytree(run, path)
    file = path / "federation.yaml"
    text = file.read_text()
    sites = Subject(run).federation.sites
    for site in sites:
        text = text.replace(f"path: {site.path}", f"path: {tmp_path / 'gone'}")
    file.write_text(text)
    found = analyse("cka", path, {"on": "parameters"}, tell=lambda text: None)
    same = analyse("cka", path, {"on": "parameters", "against": str(run)}, tell=lambda text: None)
    ours, theirs = same["models"].index("best"), same["models"].index("it: best")
    assert same["means"]["parameters"][ours][theirs] == pytest.approx(1)
    assert len(same["models"]) == 2 * len(found["models"])
    with pytest.raises(RunFolderError, match=r"data of site .* are not here.*--data"):
        analyse("hessian", path, {}, tell=lambda text: None)
    first = Subject(run).sites[0]
    data = {site.name: str(site.path) for site in sites if site.name == first}
    how: dict[str, Any] = {"grid": 3, "batches": 1, "batch": 2, "sites": (first,)}
    (surface,) = analyse("landscape", path, how, data=data, tell=lambda text: None)["surfaces"]
    assert surface["site"] == first


def test_what_is_refused(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*words: str) -> str:
        assert main(["analyse", *words]) == 1
        return capsys.readouterr().err

    assert "not a run folder" in refused("cka", str(tmp_path))
    assert "--data here: expected SITE=PATH" in refused("cka", str(run), "--data", "here")
    assert "does not exist" in refused("hessian", str(run), "--sites", "nowhere")
    assert "does not exist" in refused("hessian", str(run), "--data", "nowhere=x")
    assert "grid" in refused("landscape", str(run), "--grid", "1")
    assert "model" in refused("landscape", str(run), "--model", "worst")
    assert "device: got 'nothing', which cannot be used here (it is no device)" in refused(
        "landscape", str(run), "--device", "nothing"
    )
    assert "pool" in refused("membership", str(run), "--pool", "own", "--model", "best")
    said = refused("membership", str(run), "--labels", "annotated")
    assert "no class that it tells has ground truth in all" in said
    assert "take --labels reference, or take --pool own, or give" in said
    said = refused("membership", str(run), "--labels", "annotated", "--model", "best")
    assert "take --labels reference, or give the sites a reference, or attack local models" in said
    with pytest.raises(FedAtlasError, match=r"analysis 'hesian'.*did you mean 'hessian'"):
        analyse("hesian", run, {})
    with pytest.raises(SystemExit):
        main(["analyse", "cka", "--help"])


def test_a_damaged_file(run: Path, tmp_path: Path) -> None:
    path = tmp_path / "damaged"
    shutil.copytree(run, path)
    (path / "analysis").mkdir(exist_ok=True)
    for text in ("{", "[]", "{}"):
        (path / "analysis" / "hessian.json").write_text(text)
        with pytest.raises(RunFolderError, match=r"hessian\.json"):
            section(read(path), "analyses")


def test_activations_are_of_every_site(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of five sites and 16 images, as by default, and of more sites than images."""
    monkeypatch.setattr(cka, "cases_of", lambda source, *_: [source])

    def batches(cases: list[int], parts: object, count: int, *_: object) -> list[SimpleNamespace]:
        return [SimpleNamespace(image=torch.full((count, 1), cases[0]))]

    monkeypatch.setattr(cka, "CaseBatches", batches)
    for sites, images in ((5, 16), (7, 4), (2, 16)):
        subject: Any = SimpleNamespace(
            sites=range(sites), sources=range(sites), device="cpu", space=None,
            experiment=SimpleNamespace(federation=SimpleNamespace(augmentation=None)),
        )  # fmt: skip
        drawn = torch.cat(cka._images(subject, cka.CKA(images=images), 3)).flatten().tolist()  # type: ignore[call-arg]
        assert set(drawn) == set(range(sites)) and len(drawn) == max(images, sites)
