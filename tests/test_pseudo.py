"""Merging teachers and completing labels: literal loops, who wins, and what always survives (I6)."""

import pytest
import torch
from torch import Tensor

from fedatlas.core.errors import FederationError
from fedatlas.core.seeds import generator
from fedatlas.methods.shared.pseudo import Merge, Merged, completed, completed_overlapping, none_of

B, C, SIZE = 2, 5, (3, 4)
OWNS = ({1}, {2, 3}, {4})
"""Three teachers of the classes 1 to 4."""


def speaks(*classes: int) -> Tensor:
    return torch.tensor([c == 0 or c in classes for c in range(C)])


def logits(seed: int) -> Tensor:
    return torch.randn((B, C, *SIZE), generator=generator("teacher", seed))


def merged(owns: tuple[set[int], ...] = OWNS) -> tuple[Merged, list[Tensor]]:
    merge, every = Merge("ignored"), [logits(i) for i in range(len(owns))]
    for z, own in zip(every, owns, strict=True):
        merge.add(z, speaks(*own))
    return merge.result(), every


def test_merged_teachers_are_those_of_a_loop_over_voxels() -> None:
    found, every = merged()
    assert found.taught.all()
    for b in range(B):
        for x in range(SIZE[0]):
            for y in range(SIZE[1]):
                says = []
                for z, own in zip(every, OWNS, strict=True):
                    known = [0, *sorted(own)]
                    says.append(max(known, key=lambda c, z=z: float(z[b, c, x, y])))
                expected = [all(c == 0 for c in says)]
                expected += [any(c == own for own in says) for c in range(1, C)]
                assert found.masks[b, :, x, y].tolist() == expected
                background = sum(float(z[b, 0, x, y]) for z in every) / len(every)
                assert float(found.logits[b, 0, x, y]) == pytest.approx(background, abs=1e-6)
                assert torch.equal(found.logits[b, 1, x, y], every[0][b, 1, x, y])
                assert torch.equal(found.logits[b, 3, x, y], every[1][b, 3, x, y])


def test_several_teachers_of_a_class_are_averaged_and_half_of_them_suffice() -> None:
    found, every = merged(({1, 2}, {2}, {2}))
    assert torch.allclose(found.logits[:, 2], torch.stack([z[:, 2] for z in every]).mean(0))
    votes = (every[0][:, 2] > every[0][:, :2].amax(1)).int()
    votes = votes + (every[1][:, 2] > every[1][:, 0]).int() + (every[2][:, 2] > every[2][:, 0]).int()
    assert torch.equal(found.masks[:, 2], votes >= 2)
    assert found.taught.tolist() == [True, True, True, False, False]
    assert not found.masks[:, 3:].any() and not found.logits[:, 3:].any()


def test_own_ground_truth_survives_and_every_voxel_has_one_class() -> None:
    found, _ = merged()
    known = torch.stack([speaks(2, 3), speaks(4)])
    rng = generator("target")
    target = torch.randint(0, C, (B, *SIZE), generator=rng)
    target = torch.where(known.gather(1, target.flatten(1)).reshape(target.shape), target, 0)
    made, now = completed(target, known, found.masks, found.taught)
    assert now.all()
    for b in range(B):
        for c in range(1, C):
            if known[b, c]:
                assert torch.equal(made[b] == c, target[b] == c)
        for place in range(SIZE[0] * SIZE[1]):
            t, masks = int(target[b].flatten()[place]), found.masks[b].flatten(1)[:, place]
            lent = [c for c in range(1, C) if masks[c] and not known[b, c]]
            assert int(made[b].flatten()[place]) == (t or (lent[0] if lent else 0))


def test_overlapping_labels_are_as_the_published_code_leaves_them() -> None:
    found, _ = merged()
    known = torch.stack([speaks(2, 3), speaks(4)])
    target = torch.zeros(B, *SIZE, dtype=torch.int64)
    target[0, 0, 0], target[1, 0, 0] = 2, 4
    made, now = completed_overlapping(target, known, found.masks, found.taught)
    assert now.all() and made.dtype == torch.float32
    assert torch.equal(made[:, 0].bool(), found.masks[:, 0])
    assert torch.equal(made[0, 2].bool(), target[0] == 2) and torch.equal(made[1, 4].bool(), target[1] == 4)
    assert torch.equal(made[0, 1].bool(), found.masks[0, 1]) and torch.equal(
        made[1, 2].bool(), found.masks[1, 2]
    )


def test_a_class_without_a_teacher_stays_unknown() -> None:
    found, _ = merged(({1}, {2}))
    known = torch.stack([speaks(1), speaks(2)])
    target = torch.zeros(B, *SIZE, dtype=torch.int64)
    for make in (completed, completed_overlapping):
        made, now = make(target, known, found.masks, found.taught)
        assert now.tolist() == [[True, True, True, False, False]] * 2
        assert not (made[:, 3:].any() if made.dim() == 4 else (made > 2).any())


def test_refused() -> None:
    with pytest.raises(FederationError, match="no teacher"):
        Merge("ignored").result()
    with pytest.raises(FederationError, match="background"):
        Merge("ignored").add(logits(0), torch.tensor([False, True, True, True, True]))


def test_where_the_loss_sums_other_channels_none_of_mine_is_their_sum() -> None:
    """By softmax: the background and all that a teacher does not know together, against each class that it knows."""
    z, speaks = logits(3), torch.tensor([True, False, True, False, False])
    p = z.softmax(1)
    of_two = torch.stack([p[:, [0, 1, 3, 4]].sum(1), p[:, 2]], 1)
    assert torch.allclose(none_of(z, speaks, "background")[:, [0, 2]].softmax(1), of_two)
    assert torch.equal(none_of(z, speaks, "ignored"), z)
    every = torch.ones(5, dtype=torch.bool)
    assert torch.equal(none_of(z, every, "background"), z), (
        "who knows all classes has a background of its own"
    )
    for others, expected in (("background", of_two.argmax(1)), ("ignored", z[:, [0, 2]].argmax(1))):
        merge = Merge(others)
        merge.add(z, speaks)
        assert torch.equal(merge.result().masks[:, 2], expected == 1)
    assert not torch.equal(of_two.argmax(1), z[:, [0, 2]].argmax(1)), "the two readings differ here"
