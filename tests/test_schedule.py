"""The learning rate from step to step: warm-up, falls, restarts, and what they are counted in."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedatlas.core.errors import FederationError
from fedatlas.core.options import from_dict
from fedatlas.learning.loop import Local, Stepper, in_steps, lr_factor, make_optimizer

VECTORS = Path(__file__).parent / "vectors"
UFPS = {
    "lr": 1e-4,
    "schedule": "restarts",
    "lr_min": 1e-6,
    "schedule_unit": "rounds",
    "warmup": 10,
    "restart": 3,
}
"""Rounds of UFPS; the vector has 4 steps in each."""


def rates(local: Local, total: int) -> list[float]:
    return [local.lr * lr_factor(local, step, total) for step in range(total)]


def official() -> list[float]:
    with np.load(VECTORS / "ufps_lr_schedule.npz") as file:
        return file["lr"].tolist()


def test_the_official_schedule() -> None:
    """The official code reaches the full rate after 40 steps and begins to fall a step later."""
    local = Local(**UFPS | {"schedule_unit": "steps", "warmup": 41, "restart": 12}, warmup_from=0.0)
    assert rates(local, 100) == pytest.approx(official(), abs=1e-12, rel=0)


def test_the_schedule_of_the_paper() -> None:
    """A straight line from 1e-6 over ten rounds; then the official cosines, from the first step of a round on."""
    local = in_steps(Local(**UFPS, warmup_from=1e-6), 4)
    assert (local.schedule_unit, local.warmup, local.restart) == ("steps", 40, 12)
    assert in_steps(local, 4) == local
    line = [1e-6 + (1e-4 - 1e-6) * step / 39 for step in range(40)]
    assert rates(local, 99) == pytest.approx(line + official()[41:], abs=1e-12, rel=0)


def test_restarts_are_those_of_torch() -> None:
    local = Local(lr=0.3, lr_min=0.02, schedule="restarts", restart=5, steps=1)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=local.lr)
    theirs = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=5, eta_min=local.lr_min)
    want = []
    for _ in range(17):
        want.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        theirs.step()
    assert rates(local, 17) == pytest.approx(want, abs=1e-12, rel=0)


@pytest.mark.parametrize("schedule", ["constant", "cosine", "poly"])
@pytest.mark.parametrize("warmup", [0, 4])
def test_defaults_are_the_formulas_to_the_last_bit(schedule: Any, warmup: int) -> None:
    local = Local(lr=0.037, schedule=schedule, warmup=warmup)
    for step in range(25):
        done = (step - warmup) / (25 - warmup)
        fall = {"constant": 1.0, "cosine": 0.5 * (1 + math.cos(math.pi * done))}
        want = (step + 1) / (warmup + 1) if step < warmup else fall.get(schedule) or (1 - done) ** 0.9
        assert lr_factor(in_steps(local, 5), step, 25) == want


@pytest.mark.parametrize("schedule", ["cosine", "poly"])
def test_a_fall_ends_at_the_least_rate(schedule: Any) -> None:
    local = Local(lr=0.2, lr_min=0.05, schedule=schedule)
    got = rates(local, 1000)
    assert got[0] == 0.2 and min(got) == got[-1] == pytest.approx(0.05, abs=1e-3)
    assert Local(lr=0.2).lr * lr_factor(Local(lr=0.2), 999, 1000) < 1e-5


def test_a_warm_up_begins_and_ends_where_it_is_told_to() -> None:
    assert rates(Local(lr=0.5, warmup=5, warmup_from=0.1), 9)[:6] == pytest.approx(
        [0.1, 0.2, 0.3, 0.4, 0.5, 0.5]
    )
    assert rates(Local(lr=0.5, warmup=1, warmup_from=0.1), 9)[:2] == pytest.approx([0.1, 0.5])


def test_steps_follow_the_schedule_and_eps_arrives() -> None:
    net = nn.Linear(1, 1)
    local = in_steps(Local(**UFPS, warmup_from=1e-6, eps=1e-5), 4)
    descent = Stepper(net, local, torch.device("cpu"))
    assert descent.optimizer.defaults["eps"] == 1e-5
    for index in (0, 39, 45):
        descent.set_rate(index, of=100)
        assert descent.rate == rates(local, 100)[index]
    assert make_optimizer(net, Local()).defaults["eps"] == torch.optim.AdamW(net.parameters()).defaults["eps"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"schedule": "restarts"}, "needs a length"),
        ({"restart": 3}, "schedule is cosine and restart is 3"),
        ({"schedule": "restarts", "restart": 0}, "restart"),
        ({"lr": 1e-3, "lr_min": 1e-2}, "give at most lr"),
        ({"lr": 1e-3, "warmup_from": 1e-2}, "give at most lr"),
        ({"schedule": "restart", "restart": 3}, "schedule"),
        ({"schedule_unit": "epochs"}, "schedule_unit"),
    ],
)
def test_what_does_not_fit(options: dict[str, Any], said: str) -> None:
    with pytest.raises(FederationError, match=said):
        from_dict(Local, options, what="local")
