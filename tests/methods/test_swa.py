"""Stochastic weight averaging: the published formula, the mean of late rounds, what it leaves alone, resume."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes import same
from torch import Tensor
from unet_sites import LOCAL, SPACE, begin, play, resumed, server

from fedatlas.core.errors import FederationError
from fedatlas.federation.file import parse_federation
from fedatlas.federation.session import run_federation
from fedatlas.methods.centralized import Centralized
from fedatlas.methods.condistfl import ConDistFL
from fedatlas.methods.fedalign import FedAlign
from fedatlas.methods.fedatlas import FedAtlas
from fedatlas.methods.fedavg import FedAvg
from fedatlas.methods.moon import MOON
from fedatlas.methods.pseudo_labels import MethodChoice, PseudoLabels
from fedatlas.methods.shared.swa import first, swa, swa_count
from fedatlas.methods.standalone import Standalone

VECTORS = Path(__file__).parents[1] / "vectors"
FEDERATED = [FedAtlas, ConDistFL, MOON, FedAlign, FedAvg, Standalone]
ALL = [*FEDERATED, Centralized]


def sites_of(method: Any) -> dict[str, set[int]]:
    return {"all": {1, 2, 3}} if method.pooled else {"a": {1}, "b": {2, 3}}


def rounds_of(method: Any, rounds: int) -> list[Any]:
    """The states after each round."""
    at = server(sites_of(method))
    states = [begin(method, at, rounds)]
    for _ in range(rounds):
        states.append(method.round(states[-1], at))
    return states[1:]


def models_of(state: Any) -> dict[str, dict[str, Tensor]]:
    return state.models if hasattr(state, "models") else {"model": state.model}


@pytest.mark.parametrize("of", ALL, ids=lambda of: of.__name__)
def test_the_result_is_the_mean_of_the_models_of_late_rounds(of: type[Any]) -> None:
    """Rounds are those without it until the last, in which the mean of rounds 2 to 4, taken in float64, stands in place of the model."""
    plain, averaged = (rounds_of(of(local=LOCAL, swa_start=start), 4) for start in (None, 0.5))
    for one, other in zip(plain[:-1], averaged[:-1], strict=True):
        assert same(one.model, other.model) and not one.late
        assert all(same(model, models_of(other)[name]) for name, model in models_of(one).items())
    assert [bool(state.late) for state in averaged] == [False, True, True, False]
    for name, model in models_of(averaged[-1]).items():
        assert not same(model, models_of(plain[-1])[name])
        for key, value in model.items():
            late = [models_of(state)[name][key].double() for state in plain[1:]]
            torch.testing.assert_close(value.double(), sum(late) / 3, atol=1e-6, rtol=0, msg=key)


@pytest.mark.parametrize("of", ALL, ids=lambda of: of.__name__)
def test_the_mean_of_the_last_round_alone_is_its_model(of: type[Any]) -> None:
    plain, averaged = (rounds_of(of(local=LOCAL, swa_start=start), 2)[-1] for start in (None, 2))
    assert all(same(model, models_of(averaged)[name]) for name, model in models_of(plain).items())


@pytest.mark.parametrize("of", FEDERATED, ids=lambda of: of.__name__)
def test_it_resumes_to_the_same_bits(of: type[Any]) -> None:
    method = of(local=LOCAL, swa_start=2)
    there, again = play(method, 4), resumed(method, 4)
    assert all(same(model, models_of(again)[name]) for name, model in models_of(there).items())


def test_what_is_evaluated_before_the_last_round_is_the_plain_model() -> None:
    method = FedAtlas(local=LOCAL, swa_start=1)
    state = rounds_of(method, 3)[1]
    assert state.late and same(method.eval_members(state, "a")[0].model, state.model)


def test_with_it_one_round_counts_for_all_local_models() -> None:
    """A site would choose among plain models, and the means, which are there after the last round, would not be scored at all."""
    assert (
        Standalone(local=LOCAL).chosen_by_site and not Standalone(local=LOCAL, swa_start=0.5).chosen_by_site
    )


def test_no_plain_model_is_the_best_of_a_run_with_it(small, tmp_path) -> None:
    """Its last round is, however it scores; so it is for the method within pseudo labels."""
    small |= {"rounds": 3, "method": {"name": "fedavg", "swa_start": 2}}
    small["evaluation"] |= {"every": 1, "models": ["best", "last"]}
    run_federation(parse_federation(small, base=tmp_path), tmp_path / "run", tell=lambda text: None)
    assert json.loads((tmp_path / "run" / "best.json").read_text())["round"] == 3
    within = PseudoLabels(local=LOCAL, inner=MethodChoice("fedavg", {"swa_start": 2}))
    for method, first_one in ((FedAvg(local=LOCAL), 1), (FedAvg(local=LOCAL, swa_start=2), 40), (within, 40)):
        assert method.best_from(40) == first_one


def test_when_it_begins() -> None:
    assert [first(start, 40) for start in (0, 0.5, 0.75, 1, 30)] == [1, 20, 30, 1, 30]


def test_it_says_what_it_does_and_refuses_what_cannot_be() -> None:
    assert FedAtlas(local=LOCAL).plan(40) == []
    constant = dataclasses.replace(LOCAL, schedule="constant")
    assert FedAtlas(local=constant, swa_start=0.5).plan(40) == [
        "swa_start: the model is the mean of those after rounds 20 to 40"
    ]
    cosine = dataclasses.replace(LOCAL, schedule="cosine")
    assert "constant is meant for it" in FedAtlas(local=cosine, swa_start=0.5).plan(40)[1]
    with pytest.raises(FederationError, match="swa_start is 50, and the federation has 40 rounds"):
        FedAtlas(local=LOCAL, swa_start=50).plan(40)
    for of in ALL:
        with pytest.raises(FederationError, match=r"swa_start is 1.5; allowed: a share"):
            of(local=LOCAL, swa_start=1.5).check(SPACE)
    with pytest.raises(FederationError, match="0 and more"):
        swa({}, {}, -1)
    with pytest.raises(FederationError, match="1 and more"):
        swa_count(3, start=0, cycle=0)


def test_swa_is_the_published_one() -> None:
    with np.load(VECTORS / "fedsam_swa.npz") as file:
        models, means = (torch.from_numpy(file[key]) for key in ("server_models", "swa_models"))
    average: dict[str, Tensor] = {}
    for i, model in enumerate(models):
        n = swa_count(i, start=0, cycle=2)
        if n is not None:
            average = swa(average or {"w": model}, {"w": model}, n)
        torch.testing.assert_close(average["w"], means[i].to(average["w"].dtype), atol=1e-6, rtol=0)


def test_fedasam_averages_the_models_after_the_first() -> None:
    models = [{"w": torch.full((2,), float(i * i)), "count": torch.tensor(i)} for i in range(13)]
    assert [swa_count(i, start=3, cycle=3) for i in range(3, 13)] == [
        0, None, None, 0, None, None, 1, None, None, 2,
    ]  # fmt: skip
    assert swa_count(2, start=3, cycle=3) is None
    average = models[3]
    for i, model in enumerate(models):
        n = swa_count(i, start=3, cycle=3)
        average = average if n is None else swa(average, model, n)
    assert average["w"].tolist() == pytest.approx([(36 + 81 + 144) / 3] * 2)
    assert int(average["count"]) == 12
    assert torch.equal(swa(models[2], models[1], 0)["w"], models[1]["w"])
