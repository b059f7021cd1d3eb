"""The membership attack: who is dealt what, what it sees, and that it finds a model that memorised, and no other."""

import csv
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fedatlas.analysis.membership import AttackNet, deal, evidence, train_attack, uncertainty, verdict
from fedatlas.analysis.runs import analyse
from fedatlas.core.errors import FederationError
from fedatlas.core.seeds import generator
from fedatlas.federation.file import parse_federation
from fedatlas.federation.session import run_federation
from fedatlas.report.analysis import together
from fedatlas.report.page import section
from fedatlas.report.read import read

CLASSES = ("a", "b", "c", "d")
STILL = ("rotation", "scaling", "translation", "mirror", "noise", "blur", "brightness", "contrast", "gamma")


def test_everybody_is_dealt_once() -> None:
    uncertain = torch.rand(20, generator=generator("u")).tolist()
    dealt = deal(9, uncertain, generator("deal"))
    assert sorted(dealt.seen + dealt.hidden) == list(range(9)) and len(dealt.seen) == 4
    assert sorted(dealt.sure + dealt.unsure + dealt.outside) == list(range(20))
    assert (len(dealt.sure), len(dealt.unsure), len(dealt.outside)) == (9, 6, 5)
    assert max(uncertain[n] for n in dealt.sure) <= min(uncertain[n] for n in dealt.unsure)
    assert dealt == deal(9, uncertain, generator("deal")) != deal(9, uncertain, generator("another"))
    smallest = deal(2, [0.0] * 4, generator("deal"))
    assert all(len(part) >= 1 for part in vars(smallest).values())
    for members, rest in ((1, 4), (2, 3)):
        with pytest.raises(FederationError, match="at least 2 and 4"):
            deal(members, [0.0] * rest, generator("deal"))


def test_uncertainty_is_equation_6() -> None:
    p = torch.rand(3, 4, 5, generator=generator("p")).softmax(0).double()
    expected = 0.0
    for c in range(3):
        inside = [v for v in p.flatten(1).T if int(v.argmax()) == c]
        expected += sum(-sum(float(q * q.log()) for q in v) / 3 for v in inside) / (len(inside) + 1) / 3
    assert math.isclose(uncertainty(p, True), expected, rel_tol=1e-9)
    sure = torch.tensor([1.0, 0.0]).view(2, 1, 1).expand(2, 4, 4)
    assert uncertainty(sure, True) == uncertainty(sure, False) == 0
    assert math.isclose(uncertainty(torch.full((2, 3), 0.5), False), math.log(2))


def test_evidence() -> None:
    p, truth = torch.zeros(3, 8, 6, 2), torch.zeros(3, 8, 6, 2)
    p[1, :4] = 1
    truth[1, :2] = 1
    seen = evidence(p, truth, [1], cells=2, image=torch.ones(1, 8, 6, 2))
    assert seen.shape == (4, 2, 2, 2)
    assert seen[:, 0].mean((1, 2)).tolist() == [1, 0.5, 0.5, 1] and not seen[:3, 1].any()
    whole = evidence(torch.tensor([0.2, 0.9]), torch.tensor([0.0, 1.0]), [0, 1], cells=4, image=None)
    assert torch.allclose(whole.flatten(), torch.tensor([0.2, 0.9, 0, 1, 0.2, 0.1]))
    assert evidence(p[:, 0, 0, 0], truth[:, 0, 0, 0], [1], cells=4, image=torch.ones(2, 9, 9)).shape == (
        5,
        4,
        4,
    )


def test_verdict() -> None:
    found = verdict([0.9, 0.8, 0.2], [0.1, 0.6])
    assert found["accuracy_member"] == pytest.approx(2 / 3) and found["accuracy_other"] == 0.5
    assert found["f1_member"] == pytest.approx(2 / 3) and found["f1_other"] == 0.5
    assert found["accuracy"] == pytest.approx(7 / 12) and found["auroc"] == pytest.approx(5 / 6)
    assert verdict([0.1], [0.2]) | {} == {
        "accuracy_member": 0.0,
        "accuracy_other": 1.0,
        "f1_member": 0.0,
        "f1_other": pytest.approx(2 / 3),
        "accuracy": 0.5,
        "f1": pytest.approx(1 / 3),
        "auroc": 0.0,
    }


def test_the_attack_learns_what_differs_in_cases_of_any_size() -> None:
    def maps(count: int, error: float) -> list[torch.Tensor]:
        drawn = [torch.rand(2, 3 + n % 2, 2, 2, generator=generator(n)) for n in range(count)]
        return [torch.cat([case, torch.full_like(case[:1], error)]) for case in drawn]

    attack = train_attack(maps(6, 0.1), maps(10, 0.3), ("seed",), steps=30)
    found = verdict(attack.scores(maps(4, 0.12)), attack.scores(maps(4, 0.28)))
    assert found["accuracy"] == 1


@pytest.mark.parametrize("size", [(12, 12, 1), (1, 9, 12), (12, 1, 1), (12, 1), (1, 8)], ids=str)
def test_the_attack_sees_pictures_of_one_slice(size: tuple[int, ...]) -> None:
    maps = [torch.rand(2, *size, generator=generator(n)) for n in range(6)]
    attack = train_attack(maps[:3], maps[3:], ("seed",), steps=1)
    assert len(attack.scores(maps)) == 6


@pytest.mark.parametrize("size", [(12, 12, 12), (9, 2, 3), (8, 2), (11, 12)], ids=str)
def test_along_longer_axes_it_takes_means_of_two(size: tuple[int, ...]) -> None:
    net, x = AttackNet(2, len(size)), torch.rand(3, 2, *size, generator=generator("x"))
    pool: Any = torch.nn.functional.avg_pool2d if len(size) == 2 else torch.nn.functional.avg_pool3d
    relu = torch.nn.functional.leaky_relu
    hidden = relu(net.second(pool(relu(net.first(x), 0.1), 2, ceil_mode=True)), 0.1)
    assert torch.equal(net(x), net.head(hidden.flatten(2).mean(2))[:, 0])


@pytest.fixture(scope="module")
def memorised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose two sites hold noise with drawn labels: what their local models tell, they know by heart."""
    folder = tmp_path_factory.mktemp("memorised")
    for site in range(2):
        root, rng, lines = folder / f"site-{site}", np.random.default_rng(site), []
        (root / "images").mkdir(parents=True)
        for split, count in (("train", 24), ("validation", 4), ("test", 28)):
            for number in range(count):
                name = f"images/{split}-{number:02d}.png"
                Image.fromarray((255 * rng.random((8, 8))).astype(np.uint8)).save(root / name)
                about: dict[str, Any] = {"file": name, "patient": name, "split": split}
                lines.append(about | {c: int(v) for c, v in zip(CLASSES, rng.random(4) < 0.5, strict=True)})
        with (root / "labels.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(lines[0]))
            writer.writeheader()
            writer.writerows(lines)
    reading = {"patient": "patient", "split": "split"}
    federation = {
        "name": "memorised",
        "task": "classification",
        "labels": {"names": list(CLASSES)},
        "sites": [
            {"name": f"s{n}", "path": str(folder / f"site-{n}"), "format": "csv", "reading": reading}
            for n in range(2)
        ],
        "images": {"size": [8, 8]},
        "augmentation": {f"p_{name}": 0 for name in STILL},
        "net": {"name": "cnn", "filters": [16, 32]},
        "local": {"optimizer": "adam", "lr": 0.01, "weight_decay": 0, "batch": 12, "steps": 100},
        "rounds": 1,
        "seed": 3,
        "evaluation": {"metrics": ["auroc"], "draws": 0, "overlays": False, "models": ["best"]},
    }
    run_federation(parse_federation(federation, base=folder), folder / "runs" / "it", tell=lambda text: None)
    return folder / "runs" / "it"


def test_a_model_that_memorised_is_found_out_and_one_that_never_saw_is_not(memorised: Path) -> None:
    how = {"pool": "own", "steps": 100, "attack": 150, "sites": ("s0",)}

    def attack(**more: Any) -> dict[str, Any]:
        (found,) = analyse("membership", memorised, how | more, tell=lambda text: None)["attacks"]
        return found

    leaks = attack()
    assert leaks["classes"] == list(CLASSES) and leaks["cases"]["hidden"] == 12
    assert leaks["target_scores"]["members"] > 0.95 and leaks["target_scores"]["others"] < 0.65
    assert leaks["test"]["auroc"] > 0.85 and leaks["test"]["accuracy_member"] > 0.8

    local = memorised / "rounds" / "0001" / "local"
    shutil.copy(local / "s0.fa", memorised / "s0.fa")
    try:
        shutil.copy(local / "s1.fa", local / "s0.fa")  # the model of a site that never saw the data of s0
        silent = attack()
    finally:
        shutil.move(memorised / "s0.fa", local / "s0.fa")
    assert silent["target_scores"]["members"] < 0.65
    assert 0.2 < silent["test"]["auroc"] < 0.75 and silent["test"]["accuracy"] < 0.7


@pytest.mark.parametrize(
    ("sites", "pool", "others"),
    [(None, "own", 32), (("s0", "s1"), "own", 32), (("s1",), "own", 32), (None, "all", 88)],
)
def test_the_others_of_a_sites_own_pool_are_its_own_cases(
    memorised: Path, sites: tuple[str, ...] | None, pool: str, others: int
) -> None:
    how = {"pool": pool, "sites": sites, "steps": 1, "attack": 1}
    told: list[str] = []
    attacks = analyse("membership", memorised, how, tell=told.append)["attacks"]
    assert [attack["target"] for attack in attacks] == [f"local/{site}" for site in sites or ("s0", "s1")]
    assert {len(attack["uncertainty"]["others"]) for attack in attacks} == {others}
    assert f"{2 * len(attacks) * (24 + others)} predictions of cases at most" in told[0]


def test_that_an_attack_can_tell_sites_is_said_of_one_run_and_of_several(
    memorised: Path, tmp_path: Path
) -> None:
    analyse("membership", memorised, {"steps": 1, "attack": 1}, tell=lambda text: None)
    note = "The others come from other sites, too"
    assert note in section(read(memorised), "analyses")
    found = json.loads((memorised / "analysis" / "membership.json").read_text())
    for arm, changes in (
        ("own", {"settings": found["settings"] | {"pool": "own"}}),
        ("global", {"attacks": [found["attacks"][0] | {"target": "best"}]}),
    ):
        (tmp_path / arm / "analysis").mkdir(parents=True)
        (tmp_path / arm / "analysis" / "membership.json").write_text(json.dumps(found | changes))
    folders = {arm: tmp_path / arm for arm in ("own", "global")}
    page, missing = together("membership", folders)
    assert note not in page and not missing and "own, " in page and "global, " in page
    page, _ = together("membership", folders | {"all": memorised})
    assert page.count(note) == 1


def test_whole_images_have_every_analysis(memorised: Path) -> None:
    tiny = {"batches": 1, "batch": 8, "sites": ("s0",)}
    quiet: dict[str, Any] = {"tell": lambda text: None}
    (flat,) = analyse("landscape", memorised, tiny | {"grid": 3}, **quiet)["surfaces"]
    assert flat["site"] == "s0" and flat["losses"][1][1] == pytest.approx(flat["centre"])
    how = {"top": 1, "steps": 3, "samples": 2, "density": 3, "labels": "reference"}
    (spectrum,) = analyse("hessian", memorised, tiny | how, **quiet)["spectra"]
    assert len(spectrum["eigenvalues"]) == 1
    alike = analyse("cka", memorised, {"images": 8}, **quiet)
    assert alike["models"] == ["best", "local/s0", "local/s1"]
    seen = analyse(
        "membership", memorised, {"model": "best", "image": True, "steps": 2, "attack": 2}, **quiet
    )
    (attack,) = seen["attacks"]
    assert attack["target"] == "best" and attack["cases"]["seen"] + attack["cases"]["hidden"] == 48
