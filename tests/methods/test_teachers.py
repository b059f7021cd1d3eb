"""Models that teach: how they are trained, sent and asked, whichever method they are of."""

import dataclasses
from typing import Any, cast

import pytest
import torch
from fakes import same
from torch import nn
from unet_sites import LOCAL, UNetSite, begin, play, server, unet

from fedatlas.core.tensors import tensors_of
from fedatlas.losses import LossChoice
from fedatlas.methods.condistfl import ConDistFL
from fedatlas.methods.fedatlas import FedAtlas
from fedatlas.methods.kim import Kim
from fedatlas.methods.mib import MiB
from fedatlas.methods.moon import MOON
from fedatlas.methods.ms_kd import MSKD
from fedatlas.methods.pseudo_labels import PseudoLabels
from fedatlas.methods.shared.teachers import MEMORY, Maker, Teaching, train_teacher
from fedatlas.methods.ufps import UFPS, GlobalMainTeacher

SHORT = Teaching(rounds=1)
OFF: Any = {"ws": None, "rce": None, "ua": None, "sam": None}
TAUGHT: dict[str, Any] = {
    "condistfl": ConDistFL(local=LOCAL),
    "fedatlas": FedAtlas(local=LOCAL, every=1),
    "mib": MiB(local=LOCAL),
    "moon": MOON(local=LOCAL),
    "kim global": Kim(local=LOCAL, lambda_local=0.0),
    "kim local": Kim(local=LOCAL, lambda_global=0.0, pretrain_rounds=1),
    "ms_kd": MSKD(teachers=SHORT, local=LOCAL),
    "pseudo_labels": PseudoLabels(local=LOCAL, teachers=SHORT),
    "ufps": UFPS(local=LOCAL, teachers=SHORT, gmt=GlobalMainTeacher(start=1), **OFF),
}


@pytest.mark.parametrize("name", TAUGHT)
def test_whoever_teaches_is_asked_in_evaluation_mode(name: str) -> None:
    """Else it would drop out, and normalise by the batch: a pass without gradients is one of a teacher."""
    asked: list[bool] = []

    def make() -> nn.Module:
        net = unet()
        net.old = (1,)  # type: ignore[assignment]
        net.register_forward_pre_hook(
            lambda module, given: None if torch.is_grad_enabled() else asked.append(module.training)
        )
        return net

    play(TAUGHT[name], make=make)
    assert asked and not any(asked)


def test_a_site_that_was_lost_gets_its_teachers_when_it_is_back() -> None:
    at, method = server({"a": {1}, "b": {2}, "c": {3}}), TAUGHT["ms_kd"]
    at.silent = "c"
    state = method.round(begin(method, at, 3), at)
    assert state.served == ["a", "b"] and sorted(state.teachers) == ["a", "b"]
    at.silent = ""
    state = method.round(state, at)
    assert state.served == ["a", "b", "c"] and state.teachers == {}
    assert all(sorted(site.memory[MEMORY]) == ["a", "b"] for site in at.members.values())


def test_the_rate_of_a_teacher_falls_over_its_own_rounds() -> None:
    """And not over those of the federation, of which it may have fewer."""
    falling, start = dataclasses.replace(LOCAL, schedule="cosine"), tensors_of(unet())

    def teacher(rounds: int) -> Any:
        site: Any = UNetSite("a", {1}, 3)
        how = Teaching(rounds=2, choose="last")
        return train_teacher(site, start, rounds, how, local=falling, loss=LossChoice())["teacher"]

    assert same(teacher(9), teacher(2))


def test_local_models_of_kim_have_a_schedule_of_their_own_too() -> None:
    start = tensors_of(unet())
    method = Kim(local=dataclasses.replace(LOCAL, schedule="cosine"), pretrain_rounds=2)
    many, few = (
        method.pretrain_update(cast(Any, UNetSite("a", {1}, 3)), start, rounds)["teacher"]
        for rounds in (9, 2)
    )
    assert same(many, few)


@pytest.mark.parametrize(
    ("own", "others"), [("dice_bce", "ignored"), ("marginal_dice_ce", "background"), (None, "ignored")]
)
def test_other_channels_of_a_teacher_are_read_by_its_own_loss(own: str | None, others: str) -> None:
    site: Any = UNetSite("a", {1}, 3)
    rounds = LossChoice(name="marginal_dice_ce" if own == "dice_bce" else "dice_bce")
    assert Maker(site, Teaching(loss=own and LossChoice(name=own)), LOCAL, rounds).others == others
