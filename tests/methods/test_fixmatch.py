"""FixMatch: the limiting case, the mean of its paper, and that labels which are not there are not read."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from hosted_images import Federation, encoded, run, run_with_a_stop

from fedatlas.learning.loop import Local
from fedatlas.losses.consistency import is_confident
from fedatlas.methods.centralized import Centralized
from fedatlas.methods.fixmatch import FixMatch, unlabelled

LOCAL = Local(batch=4, steps=3, lr=1e-2)


@pytest.mark.parametrize("net", [{}, {"norm": "batch"}, {"dropout": 0.5}])
@pytest.mark.parametrize("off", [{"threshold": 1.01}, {"lambda_u": 0.0}])
def test_without_pseudo_labels_it_is_centralized(net: Any, off: Any, tmp_path: Path) -> None:
    """E19, bit for bit: batches, dropout and the running statistics of norms are the same."""
    expected = run(Centralized(local=LOCAL), tmp_path / "c", 2, net).model
    got = run(FixMatch(local=LOCAL, **off), tmp_path / "f", 2, net).model
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    on = run(FixMatch(local=LOCAL, threshold=0.5), tmp_path / "on", 2, net).model
    assert any(not torch.equal(on[name], expected[name]) for name in expected)


def test_the_mean_is_over_all_unlabelled_pairs() -> None:
    rng = torch.Generator().manual_seed(0)
    z, p = 2 * torch.randn(5, 3, generator=rng), torch.rand(5, 3, generator=rng)
    known = torch.rand(5, 3, generator=rng) < 0.4
    total, pairs = 0.0, 0
    for b in range(5):
        for c in range(3):
            if known[b, c]:
                continue
            pairs += 1
            if max(float(p[b, c]), 1 - float(p[b, c])) >= 0.75:
                q = torch.sigmoid(z[b, c]).double()
                total -= float(torch.log(q if p[b, c] > 0.5 else 1 - q))
    assert pairs > 0
    assert float(unlabelled(z, p, known, 0.75)) == pytest.approx(total / pairs, rel=1e-5)


def test_only_confident_pairs_without_label_have_a_gradient() -> None:
    z = torch.zeros(2, 3, requires_grad=True)
    p = torch.tensor([[0.9, 0.6, 0.1], [0.75, 0.25, 0.74]], requires_grad=True)
    known = torch.tensor([[True, False, False], [False, False, False]])
    sure = is_confident(p, known, 0.75)
    assert sure.tolist() == [[False, False, True], [True, True, False]]
    unlabelled(z, p, known, 0.75).backward()
    assert z.grad is not None and p.grad is None
    assert ((z.grad != 0) == sure).all()
    assert z.grad[0, 2] > 0 > z.grad[1, 0]  # towards absent, towards present


def test_nothing_unlabelled_gives_zero() -> None:
    z = torch.randn(2, 3, requires_grad=True)
    value = unlabelled(z, torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bool), 0.75)
    value.backward()
    assert float(value.detach()) == 0 and z.grad is not None and not z.grad.any()


def test_hidden_labels_are_not_read(tmp_path: Path) -> None:
    federations = [Federation(FixMatch(local=LOCAL, threshold=0.5), tmp_path / name) for name in "ab"]
    source: Any = federations[1].hosts["pooled"].source
    source.target[~source.known] = 1 - source.target[~source.known]
    one, other = (f.play(f.start(2), 2) for f in federations)
    assert encoded(one) == encoded(other)


def test_it_is_logged_how_many_are_confident(tmp_path: Path) -> None:
    for threshold, expected in ((0.5, 1.0), (1.5, 0.0)):
        federation = Federation(FixMatch(local=LOCAL, threshold=threshold), tmp_path / str(threshold))
        federation.play(federation.start(1), 1)
        assert federation.clients.calls[0].logs["pooled"]["confident"] == expected


def test_resumed(tmp_path: Path) -> None:
    method = FixMatch(local=dataclasses.replace(LOCAL), threshold=0.5)
    whole = run(method, tmp_path / "whole", 2)
    assert encoded(run_with_a_stop(method, tmp_path / "stopped", 2, 1)) == encoded(whole)
