"""The opponents of UFPS on pseudo labels: each runs within `pseudo_labels`, on labels that teachers complete."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from fakes import same
from method_cases import NETS
from torch import nn
from unet_sites import LOCAL, SPACE, play, resumed, unet

from fedatlas import losses, methods, nets
from fedatlas.core.options import from_dict
from fedatlas.federation.file import parse_federation
from fedatlas.federation.session import run_federation
from fedatlas.learning.loop import Local
from fedatlas.methods import pseudo_labels
from fedatlas.methods.pseudo_labels import MethodChoice, PseudoLabels
from fedatlas.methods.shared.teachers import Teaching

ONE = dataclasses.replace(LOCAL, steps=1)
LOSS = {"loss": {"name": "dice_bce", "options": {"channels": "known"}}}
INNER: dict[str, dict[str, Any]] = {
    "fedavg": LOSS,
    "fedprox": LOSS,
    "moon": LOSS,
    "fedalign": LOSS,
    "fedasam": LOSS | {"swa": {"start": 0.5}},
    "cps": LOSS,
    "fed_dodnet": {"own": ["decoder", "controller"], "speaks": "site"},
}
OFF = {
    "fedprox": {"mu": 0.0},
    "moon": {"mu": 0.0},
    "fedalign": {"mu": 0.0},
    "fedasam": {"sharpness": {"rho": 0.0}, "swa": {"start": 1.0}},
    "cps": {"w": 0.0},
}


def star(name: str, local: Local = LOCAL, **options: Any) -> PseudoLabels:
    chosen = MethodChoice(name, {**INNER[name], **options})
    return PseudoLabels(inner=chosen, teachers=Teaching(rounds=1), local=local)


def dodnet() -> nn.Module:
    return nets.build("dodnet", {"filters": [8, 8]}, in_channels=1, classes=4, spatial_dims=2, seed=3)


@pytest.mark.parametrize("name", sorted(INNER))
def test_every_opponent_learns_from_pseudo_labels(name: str) -> None:
    method, make = star(name, ONE), dodnet if name == "fed_dodnet" else unet
    method.check(SPACE)
    method.examine(make(), ["a", "b"])
    got = play(method, make=make)
    alone = from_dict(methods.get(name), {**INNER[name], "local": ONE}, what=name)
    for site in ("a", "b"):
        for mine, other in zip(
            method.eval_members(got, site),
            alone.eval_members(play(alone, make=make), site),
            strict=True,
        ):
            assert not same(mine.model, other.model)
    assert got.teachers == {} and got.served == ["a", "b"]


def test_teachers_have_the_loss_of_the_method_within() -> None:
    """That of `fedatlas` is open in the file."""
    within = PseudoLabels(inner=MethodChoice("fedatlas"), local=LOCAL)
    assert within.teachers_loss(SPACE) == within.method.supervised(SPACE) != within.loss  # type: ignore[attr-defined]
    assert star("fedavg").teachers_loss(SPACE).name == "dice_bce"
    alone = PseudoLabels(inner=MethodChoice("standalone"), local=LOCAL)
    assert any("one round counts for all" in note for note in alone.examine(unet(), ["a", "b"]))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(OFF))
def test_without_its_own_term_every_opponent_is_fedavg_on_pseudo_labels(name: str) -> None:
    """E17, E18, bit for bit."""
    plain = play(star("fedavg")).model
    assert same(play(star(name, **OFF[name])).model, plain)
    assert not same(play(star(name)).model, plain)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(INNER.keys() - {"fed_dodnet"}))
def test_resumed(name: str) -> None:
    assert same(play(star(name), rounds=3).model, resumed(star(name), rounds=3).model)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cps", "fed_dodnet", "fedasam", "moon"])
def test_in_a_federation_resumed_to_the_same_bits(name: str, small: dict[str, Any], tmp_path: Path) -> None:
    method = {"name": "pseudo_labels", "teachers": {"rounds": 1}}
    small["method"] = method | {"inner": {"name": name, "options": INNER[name]}}
    small["net"] = NETS.get(name, small["net"])
    federation, path = parse_federation(small, base=Path()), tmp_path / "run"
    found = []
    for _ in range(2):
        run_federation(federation, path, tell=lambda text: None, resume=True)
        found.append((path / "models" / "last.fa").read_bytes())
        (path / "rounds" / "0002").rename(path / "rounds" / ".0002.part")
    assert found[0] == found[1]


def test_teachers_are_trained_with_the_loss_that_the_method_within_takes(monkeypatch) -> None:
    seen, real = list[Any](), pseudo_labels.train_teacher
    monkeypatch.setattr(
        pseudo_labels, "train_teacher", lambda *a, **k: seen.append(k["loss"]) or real(*a, **k)
    )
    within = PseudoLabels(inner=MethodChoice("fedatlas"), teachers=Teaching(rounds=1), local=LOCAL)
    play(within, rounds=1)
    assert seen == [within.teachers_loss(SPACE)] * 2 and seen[0].name == "marginal_dice_ce_exclusion"


def test_the_method_within_is_told_that_everything_is_annotated(monkeypatch) -> None:
    told, real = list[Any](), losses.supervised
    monkeypatch.setattr(losses, "supervised", lambda loss, site: told.append(site) or real(loss, site))
    play(PseudoLabels(teachers=Teaching(rounds=1), local=LOCAL), rounds=1)
    within = [site.labels.annotated for site in told if isinstance(site, pseudo_labels.CompletedSite)]
    assert within == [{1, 2, 3}] * 2
