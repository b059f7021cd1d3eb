"""Losses by name, and the errors of a wrong choice."""

import dataclasses
from typing import Any

import pytest
import torch

from fedatlas import losses
from fedatlas.core.errors import FederationError
from fedatlas.core.labels import LabelSpace
from fedatlas.losses.heads import head_weights, thinned

SOFT = LabelSpace(("background", "liver", "spleen"))
SIGM = LabelSpace(("liver", "spleen"), exclusive=False)


def test_auto_follows_the_label_space() -> None:
    assert isinstance(losses.make(losses.LossChoice(), SOFT), losses.MarginalDiceCE)
    assert isinstance(losses.make(losses.LossChoice(), SIGM), losses.MaskedDiceBCE)


def test_options_arrive() -> None:
    loss = losses.make(losses.LossChoice(name="marginal_dice_ce", options={"power": 2}), SOFT)
    assert loss == losses.MarginalDiceCE(power=2)
    nested = losses.LossChoice(name="marginal_dice_ce_exclusion", options={"marginal": {"clamp": 0.01}})
    loss = losses.make(nested, SOFT)
    assert isinstance(loss, losses.MarginalDiceCEExclusion) and loss.marginal.clamp == 0.01


@pytest.mark.parametrize(
    ("choice", "space", "said"),
    [
        ({"name": "marginal_dice"}, SOFT, "did you mean 'marginal_dice_ce'"),
        ({"options": {"clmp": 0.1}}, SOFT, "did you mean 'clamp'"),
        ({"options": {"clamp": 2.0}}, SOFT, "clamp: got 2.0"),
        ({"name": "masked_bce"}, SOFT, "allowed: auto, marginal_dice_ce"),
        ({"name": "marginal_dice_ce"}, SIGM, "allowed: auto, masked_dice_bce"),
        ({"name": "masked_bce", "options": {"pos_weight": [1.0]}}, SIGM, "1 values for 2 classes"),
    ],
)
def test_wrong_choices(choice: dict[str, Any], space: LabelSpace, said: str) -> None:
    with pytest.raises(FederationError, match=said):
        losses.make(losses.LossChoice(**choice), space)


@pytest.mark.parametrize("name", losses.REGISTRY)
def test_every_loss_and_option_has_its_sentence(name: str) -> None:
    cls = losses.REGISTRY[name]
    assert cls.__doc__ and cls.__doc__.strip()
    for field in dataclasses.fields(cls):
        assert field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        assert cls.__pydantic_fields__[field.name].description


def test_head_weights_are_those_of_condistfl() -> None:
    assert head_weights(4) == pytest.approx([0.5333, 0.2667, 0.1333, 0.0667], abs=5e-5)
    assert head_weights(1) == [1.0]


def test_thinned_target_takes_the_centres_of_strided_convolutions() -> None:
    target = torch.arange(2 * 6 * 4).reshape(2, 6, 4)
    assert torch.equal(thinned(target, (3, 2)), target[:, ::2, ::2])
    assert torch.equal(thinned(target, (6, 4)), target)
    assert torch.equal(thinned(target, (2, 4)), target[:, ::3])
