"""MixUp-PME: every case of two labels, and the mixture itself."""

from pathlib import Path

import pytest
import torch
from hosted_images import Federation, encoded, run, run_with_a_stop

from fedatlas.core.batch import Batch
from fedatlas.learning.loop import Local
from fedatlas.methods.mixup_pme import MixUpPME, mixed

LOCAL = Local(batch=4, steps=3, lr=1e-2)


def test_the_four_cases_of_two_labels() -> None:
    """Both annotate; only one; only the other; neither."""
    image = torch.stack([torch.full((1, 2, 2), 1.0), torch.full((1, 2, 2), 5.0)])
    known = torch.tensor([[True, True, False, False], [True, False, True, False]])
    target = torch.tensor([[1.0, 1.0, 9.0, 9.0], [0.0, 9.0, 0.0, 9.0]])
    p = torch.tensor([[0.5, 0.5, 0.2, 0.5], [0.5, 0.6, 0.5, 0.5]])
    x, y, m = mixed(Batch(image, target, known, []), p, torch.tensor([0.25, 1.0]), torch.tensor([1, 0]))
    assert x[0].unique().tolist() == [0.25 * 1 + 0.75 * 5] and x[1].unique().tolist() == [5.0]
    assert m.tolist() == [[True, True, True, False]] * 2
    torch.testing.assert_close(y[0, :3], torch.tensor([0.25, 0.25 + 0.75 * 0.6, 0.25 * 0.2]))
    torch.testing.assert_close(y[1, :3], torch.tensor([0.0, 0.6, 0.0]))


@pytest.mark.parametrize("alpha", [0.2, 1.0, 8.0])
def test_shares_are_of_the_beta_distribution(alpha: float) -> None:
    rng = torch.Generator().manual_seed(1)
    share, partner = MixUpPME(alpha=alpha).pairs(20000, rng)
    assert sorted(partner.tolist()) == list(range(20000))
    assert float(share.min()) >= 0 and float(share.max()) <= 1
    assert float(share.mean()) == pytest.approx(0.5, abs=0.01)
    assert float(share.var()) == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.05)


def test_pairs_follow_from_the_generator_alone() -> None:
    method = MixUpPME()
    torch.manual_seed(0)
    one = method.pairs(6, torch.Generator().manual_seed(2))
    torch.manual_seed(1)
    other = method.pairs(6, torch.Generator().manual_seed(2))
    assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])


def test_no_gradient_through_a_pseudo_label(tmp_path: Path) -> None:
    """A class that nobody of a batch annotates moves nothing of its row."""
    federation = Federation(
        MixUpPME(local=Local(batch=4, steps=2, optimizer="sgd", weight_decay=0.0)), tmp_path
    )
    source = federation.hosts["pooled"].source
    source.known[:, 3] = False  # type: ignore[attr-defined]
    start = federation.start(1)
    end = federation.play(start, 1)
    assert torch.equal(end.model["head.weight"][3], start.model["head.weight"][3])
    assert not torch.equal(end.model["head.weight"][0], start.model["head.weight"][0])


def test_the_pass_for_pseudo_labels_moves_no_statistics(tmp_path: Path) -> None:
    """Of batch normalisation: one pass of each step counts, that of the mixed images."""
    end = run(MixUpPME(local=LOCAL), tmp_path, 1, {"norm": "batch"})
    counts = {int(value) for name, value in end.model.items() if name.endswith("num_batches_tracked")}
    assert counts == {LOCAL.steps}


def test_hidden_labels_are_not_read(tmp_path: Path) -> None:
    federations = [Federation(MixUpPME(local=LOCAL), tmp_path / name) for name in "ab"]
    source = federations[1].hosts["pooled"].source
    source.target[~source.known] = float("nan")  # type: ignore[attr-defined]
    one, other = (f.play(f.start(2), 2) for f in federations)
    assert encoded(one) == encoded(other)


def test_resumed(tmp_path: Path) -> None:
    method = MixUpPME(local=LOCAL)
    whole = run(method, tmp_path / "whole", 2)
    assert encoded(run_with_a_stop(method, tmp_path / "stopped", 2, 1)) == encoded(whole)
