"""inference.py: windows and slices must not change what a pointwise net says."""

from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pytest
import torch
from monai.inferers.utils import sliding_window_inference
from torch import Tensor, nn

from fedatlas import nets
from fedatlas.core.contract import Member
from fedatlas.core.errors import FederationError
from fedatlas.core.labels import LabelSpace
from fedatlas.core.tensors import tensors_of
from fedatlas.data.transforms import slice_with_neighbours
from fedatlas.federation.file import inference_of, parse_federation
from fedatlas.learning.inference import (
    Inference,
    Nets,
    Prediction,
    mean_of_owners,
    neighbours,
    predict_each,
    predict_together,
    probabilities,
    restrict,
    surest,
    together,
)


class Pointwise(nn.Module):
    """Logits that depend on one voxel and all its channels alone."""

    def __init__(self, channels: int, dims: int) -> None:
        super().__init__()
        self.conv = (nn.Conv2d if dims == 2 else nn.Conv3d)(channels, 3, 1)
        torch.nn.init.normal_(self.conv.weight, generator=torch.Generator().manual_seed(0))
        torch.nn.init.zeros_(self.conv.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


@pytest.mark.parametrize("shape", [(5, 8, 8), (8, 8, 8), (13, 9, 17)])
@pytest.mark.parametrize("blend", ["gaussian", "constant"])
@pytest.mark.parametrize("exclusive", [True, False])
def test_windows(shape, blend, exclusive) -> None:
    net = Pointwise(2, 3)
    image = torch.rand(2, *shape, generator=torch.Generator().manual_seed(1))
    found = probabilities(net, image, (8, 8, 8), 0, Inference(blend=blend), exclusive=exclusive)
    logits = net(image[None])[0].detach()
    assert torch.allclose(found, logits.softmax(0) if exclusive else logits.sigmoid(), atol=1e-5)
    assert net.training


@pytest.mark.parametrize("shape", [(8, 8, 5), (6, 11, 3), (8, 8, 1)])
@pytest.mark.parametrize("context", [0, 1, 2])
def test_slices_see_their_neighbours(shape, context) -> None:
    net = Pointwise(2 * (2 * context + 1), 2)
    image = torch.rand(2, *shape, generator=torch.Generator().manual_seed(1))
    found = probabilities(net, image, (8, 8), context, Inference(batch=2), exclusive=True)
    for z in range(shape[-1]):
        near = [min(max(z + offset, 0), shape[-1] - 1) for offset in range(-context, context + 1)]
        stack = torch.stack([image[i, ..., at] for i in range(2) for at in near])
        assert torch.allclose(found[..., z], net(stack[None])[0].softmax(0), atol=1e-5)
        assert torch.equal(neighbours(image, torch.tensor([z]), context)[0], stack)
        # training cuts its patches with code of its own, which must agree
        assert torch.equal(
            torch.from_numpy(slice_with_neighbours(image.numpy(), z, context)).flatten(0, 1), stack
        )


def test_without_a_background_a_class_needs_a_sigmoid_above_a_half() -> None:
    net, how = Pointwise(1, 2), Inference(background="zero")
    torch.nn.init.constant_(net.conv.bias[0], 1.0)  # what an untrained channel happens to say
    image = torch.randn(1, 8, 8, 2, generator=torch.Generator().manual_seed(1))
    found = probabilities(net, image, (8, 8), 0, how, exclusive=True).argmax(0)
    z = net.conv.weight[:, 0, 0, 0].detach()[1:, None, None, None] * image
    p, best = z.sigmoid().max(0)
    assert torch.equal(found, torch.where(p > 0.5, best + 1, 0))
    plain = probabilities(net, image, (8, 8), 0, Inference(), exclusive=True).argmax(0)
    assert not torch.equal(plain, found)
    overlapping = (probabilities(net, image, (8, 8), 0, h, exclusive=False) for h in (how, Inference()))
    assert torch.equal(*overlapping)


def test_the_mode_of_every_module_is_put_back() -> None:
    net = nn.Sequential(Pointwise(1, 3), nn.Dropout(0.5))
    net[0].eval()
    image = torch.rand(1, 4, 4, 4, generator=torch.Generator().manual_seed(1))
    found = [probabilities(net, image, (4, 4, 4), 0, Inference(), exclusive=True) for _ in range(2)]
    assert torch.equal(*found), "dropout is on"
    assert (net.training, net[0].training, net[1].training) == (True, False, True)


def test_float32_comes_out_of_a_half_precision_net() -> None:
    class Half(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([x, 2 * x], dim=1).bfloat16()

    image = torch.rand(1, 5, 9, 6, generator=torch.Generator().manual_seed(1))
    found = probabilities(Half(), image, (4, 4, 4), 0, Inference(), exclusive=True)
    logits = Half()(image[None])[0].float()
    assert found.dtype == torch.float32 and torch.allclose(found, logits.softmax(0), atol=1e-6)


def test_restricted_models_give_the_rest_to_the_background() -> None:
    p = torch.tensor([0.1, 0.2, 0.3, 0.4])[:, None]
    assert torch.allclose(restrict(p, [2], True)[:, 0], torch.tensor([0.7, 0, 0.3, 0]))
    assert torch.allclose(restrict(p, [2], False)[:, 0], torch.tensor([0, 0, 0.3, 0]))


class Fixed(nn.Module):
    """The same logits [C] at every voxel."""

    def __init__(self, *logits: float) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.tensor(logits, dtype=torch.float32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.logits.reshape(1, -1, 1, 1).expand(len(x), -1, *x.shape[2:])


def test_channels_that_nothing_trained_are_left_out_of_the_softmax() -> None:
    """Class 2 is the site's; in channel 1 an untrained net says 9 everywhere, which hides it as background, and does not where
    it is ignored. Two members of one model that speak for different classes are not mixed up."""
    space, image = LabelSpace(("background", "a", "b")), torch.zeros(1, 8, 8, 2)
    weights = {"logits": torch.tensor([0.0, 9.0, 2.0])}
    members = [Member(weights, (2,)), Member(weights, (1,))]
    nets = Nets(lambda model, name: Fixed(*model["logits"].tolist()))
    found = {}
    for others in ("background", "ignored"):
        how = Inference(others=others)
        found[others] = [
            one.voxels[:, 0, 0, 0]
            for one in predict_each([[members[0]], [members[1]]], nets, image, (8, 8), 0, how, space)
        ]
        again = predict_together([members[0]], lambda _: Fixed(0, 9, 2), image, (8, 8), 0, how, space)
        assert torch.allclose(again.voxels[:, 0, 0, 0], found[others][0])
    p = torch.tensor([0.0, 9.0, 2.0]).softmax(0)
    assert torch.allclose(found["background"][0], torch.stack([p[0] + p[1], torch.tensor(0.0), p[2]]))
    two = torch.tensor([0.0, 2.0]).softmax(0)
    assert torch.allclose(found["ignored"][0], torch.stack([two[0], torch.tensor(0.0), two[1]]))
    assert found["ignored"][1].argmax() == 1 and found["background"][0].argmax() == 0
    every = Member(weights, (1, 2))  # a site that annotates all classes
    (whole,) = predict_each([[every]], nets, image, (8, 8), 0, Inference(others="ignored"), space)
    assert torch.allclose(whole.voxels[:, 0, 0, 0], p)


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ({"name": "standalone"}, "background"),
        ({"name": "standalone", "loss": {"name": "dice_bce"}}, "ignored"),
        ({"name": "standalone", "loss": {"name": "dice_bce", "options": {"channels": "all"}}}, "background"),
        ({"name": "ufps", "teachers": {"loss": {"name": "dice_bce"}}}, "ignored"),
        ({"name": "fed_dodnet"}, "ignored"),
        ({"name": "fedmenu"}, "background"),
    ],
)
def test_what_other_channels_say_follows_the_loss_of_the_method(method, expected, small) -> None:
    given = parse_federation(small | {"method": method}, base=Path())
    assert inference_of(given).others == expected
    evaluation = small["evaluation"] | {"inference": {"others": "background"}}
    assert (
        inference_of(
            parse_federation(small | {"method": method, "evaluation": evaluation}, base=Path())
        ).others
        == "background"
    )


def test_the_surest_foreground_wins() -> None:
    one = torch.tensor([[0.4, 0.9, 0.6], [0.6, 0.1, 0.4], [0.0, 0.0, 0.0]])
    two = torch.tensor([[0.2, 0.8, 0.1], [0.0, 0.0, 0.0], [0.8, 0.2, 0.9]])
    members = [(one, [1]), (two, [2])]
    merged = surest(members, True)
    assert merged.argmax(0).tolist() == [2, 0, 2]
    assert torch.allclose(merged.sum(0), torch.ones(3))
    assert surest([(one, [1])], True) is one
    assert torch.equal(surest(members, False), torch.maximum(one, two))


def some_members(
    n: int, owned: Sequence[Sequence[int]], exclusive: bool
) -> list[tuple[Tensor, Sequence[int]]]:
    """n members of four classes as they come from `restrict`."""
    random = torch.Generator().manual_seed(n)
    given = [torch.randn(4, 20, 20, generator=random) for _ in range(n)]
    given = [one.softmax(0) if exclusive else one.sigmoid() for one in given]
    return [(restrict(one, own, exclusive), own) for one, own in zip(given, owned, strict=True)]


def mean_of_owners_one_voxel(members: Sequence[tuple[Tensor, Sequence[int]]]) -> int:
    """The label of one voxel, [C] each."""
    label, strength = 0, 0.0
    for c in range(1, len(members[0][0])):
        own = [one for one, classes in members if c in classes]
        if own:
            said = sum(float(one[c]) for one in own) / len(own)
            if said > max(strength, sum(float(one[0]) for one in own) / len(own)):
                label, strength = c, said
    return label


@pytest.mark.parametrize("owned", [[[1, 2], [2, 3], [3, 1]], [[1], [1, 2], [1]], [[1, 2, 3], [1], []]])
def test_several_owners_have_one_opinion(owned) -> None:
    members = some_members(3, owned, exclusive=True)
    before = [voxels.clone() for voxels, _ in members]
    merged = mean_of_owners(iter(members), True)
    assert torch.allclose(merged.sum(0), torch.ones(20, 20)) and bool((merged >= 0).all())
    labels = merged.argmax(0)
    for x, y in product(range(20), range(20)):
        alone = mean_of_owners_one_voxel([(voxels[:, x, y], classes) for voxels, classes in members])
        assert labels[x, y] == alone
    assert len(labels.unique()) > 2 and not torch.equal(labels, surest(iter(members), True).argmax(0))
    assert all(torch.equal(voxels, kept) for (voxels, _), kept in zip(members, before, strict=True))


def test_with_one_owner_each_both_ways_to_merge_give_the_same_labels() -> None:
    members = some_members(3, [[1], [2], [3]], exclusive=True)
    assert torch.equal(mean_of_owners(members, True).argmax(0), surest(members, True).argmax(0))
    members = some_members(2, [[1, 3], [2]], exclusive=True)
    assert torch.equal(mean_of_owners(members, True).argmax(0), surest(members, True).argmax(0))
    members = some_members(2, [[0, 2], [1, 3]], exclusive=False)
    assert torch.equal(mean_of_owners(members, False), surest(members, False))


def test_overlapping_classes_have_the_mean_of_their_owners() -> None:
    members = some_members(3, [[0, 1], [1], [1, 2]], exclusive=False)
    merged = mean_of_owners(members, False)
    (one, _), (two, _), (three, _) = members
    assert torch.equal(merged[0], one[0]) and torch.equal(merged[2], three[2])
    assert torch.allclose(merged[1], (one[1] + two[1] + three[1]) / 3) and not merged[3].any()


@pytest.mark.parametrize(("merge", "label"), [("surest", 1), ("mean", 0)])
def test_who_decides_is_an_option(merge, label) -> None:
    space = LabelSpace(("background", "a"))
    sure, unsure = torch.tensor([[0.4], [0.6]]), torch.tensor([[0.9], [0.1]])
    told = [(Prediction(sure), Member({}, (1,))), (Prediction(unsure), Member({}))]
    found = together(iter(told), space, Inference(merge=merge))
    assert found.voxels.argmax(0).tolist() == [label]


def small_unet(dims: int, channels: int, seed: int = 0) -> nn.Module:
    """With instance norm, so that what it says of a voxel depends on all that it is given."""
    return nets.build(
        "unet", {"filters": [4, 6, 8]}, in_channels=channels, classes=3, spatial_dims=dims, seed=seed
    ).eval()


@torch.inference_mode()
def by_windows(net: nn.Module, image: Tensor, patch: tuple[int, ...], context: int, how: Inference) -> Tensor:
    """MONAI's windows over everything, also over what is no larger than a patch."""

    def slide(inputs: Tensor) -> Tensor:
        found = sliding_window_inference(
            inputs, patch, how.batch, lambda x: net(x).softmax(1), overlap=how.overlap, mode=how.blend
        )
        assert isinstance(found, Tensor)
        return found

    if len(patch) == 3:
        return slide(image[None])[0]
    batches = torch.arange(image.shape[-1]).split(how.batch)
    slices = [slide(neighbours(image, index, context)) for index in batches]
    return torch.cat(slices).movedim(0, -1)


@pytest.mark.parametrize("blend", ["gaussian", "constant"])
@pytest.mark.parametrize("context", [0, 1])
def test_slices_are_predicted_as_by_monais_windows(blend, context) -> None:
    net, how = small_unet(2, 2 * context + 1), Inference(blend=blend, batch=4)
    random = torch.Generator().manual_seed(1)
    for rows, columns in product((5, 8, 13), repeat=2):
        image = torch.rand(1, rows, columns, 5, generator=random)
        found = probabilities(net, image, (8, 8), context, how, exclusive=True)
        assert found.shape == (3, rows, columns, 5) and found.is_contiguous()
        assert torch.allclose(found, by_windows(net, image, (8, 8), context, how), rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", [(5, 8, 7), (8, 8, 8), (9, 8, 6), (13, 9, 17)])
def test_volumes_are_predicted_as_by_monais_windows(shape) -> None:
    net, how = small_unet(3, 1), Inference()
    image = torch.rand(1, *shape, generator=torch.Generator().manual_seed(1))
    found = probabilities(net, image, (8, 8, 8), 0, how, exclusive=True)
    assert torch.allclose(found, by_windows(net, image, (8, 8, 8), 0, how), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("shape", "size"), [((13, 17), (16, 20)), ((5, 17), (8, 20)), ((20, 8), (20, 8))])
def test_whole_slices_are_padded_to_what_the_net_can_take(shape, size) -> None:
    net, whole = small_unet(2, 3), Inference(windows="whole", batch=2)
    given = []
    net.register_forward_pre_hook(lambda module, inputs: given.append(tuple(inputs[0].shape)))
    image = torch.rand(1, *shape, 5, generator=torch.Generator().manual_seed(1))
    found = probabilities(net, image, (8, 8), 1, whole, exclusive=True)
    assert given == [(2, 3, *size), (2, 3, *size), (1, 3, *size)]
    low = [(of - there) // 2 for of, there in zip(size, shape, strict=True)]
    stack = neighbours(image, torch.arange(5), 1)
    padded = torch.zeros(5, 3, *size)
    inner = tuple(slice(at, at + n) for at, n in zip(low, shape, strict=True))
    padded[(..., *inner)] = stack
    with torch.inference_mode():
        said = torch.cat([net(part).softmax(1) for part in padded.split(2)])
        expected = said[(..., *inner)].movedim(0, -1)
    assert torch.allclose(found, expected, rtol=0, atol=1e-6)


def test_a_slice_of_at_most_a_patch_is_whole_either_way() -> None:
    net = small_unet(2, 1)
    for rows, columns in product((3, 7, 8), repeat=2):
        image = torch.rand(1, rows, columns, 3, generator=torch.Generator().manual_seed(rows))
        ways = [Inference(windows=windows) for windows in ("patch", "whole")]
        patch, whole = (probabilities(net, image, (8, 8), 0, how, exclusive=True) for how in ways)
        assert torch.equal(patch, whole)


def test_whole_is_refused_where_it_cannot_be() -> None:
    whole, image = Inference(windows="whole"), torch.rand(1, 9, 9, 9)
    with pytest.raises(FederationError, match=r"patch is \[8, 8, 8\]; give a patch of two numbers"):
        probabilities(small_unet(3, 1), image, (8, 8, 8), 0, whole, exclusive=True)
    with pytest.raises(FederationError, match=r"which Pointwise does not; use patch"):
        probabilities(Pointwise(1, 2), image, (8, 8), 0, whole, exclusive=True)


def test_bf16_gives_float32_probabilities_near_those_of_float32() -> None:
    net = small_unet(2, 1)
    image = torch.rand(1, 13, 9, 3, generator=torch.Generator().manual_seed(1))
    kinds = []
    net.register_forward_hook(lambda module, inputs, outputs: kinds.append(outputs.dtype))
    half, full, plain = (
        probabilities(net, image, (8, 8), 0, Inference(precision=p), exclusive=True)
        for p in ("bf16", "float32", None)
    )
    assert set(kinds) == {torch.bfloat16, torch.float32}
    assert half.dtype == full.dtype == torch.float32 and torch.equal(full, plain)
    assert torch.allclose(half.sum(0), torch.ones(13, 9, 3), atol=1e-6), "softmax is of float32"
    assert 0 < float((half - full).abs().max()) < 0.05


@pytest.mark.parametrize(
    ("local", "given", "used"),
    [
        ("float32", None, "float32"),
        ("bf16", None, "bf16"),
        ("fp16", None, "float32"),
        ("bf16", "float32", "float32"),
        ("float32", "bf16", "bf16"),
    ],
)
def test_the_precision_of_prediction_follows_that_of_training(local, given, used) -> None:
    plain = {
        "name": "x",
        "sites": [{"name": "a", "path": "."}],
        "preprocessing": {},
        "method": {"name": "fedavg"},
        "local": {"precision": local},
        "evaluation": {"inference": {"precision": given}},
    }
    assert inference_of(parse_federation(plain, base=Path())).precision == used


def merge_all_at_once(members: list[Tensor]) -> Tensor:
    merged = torch.stack(members).mean(0)
    highest = torch.zeros_like(merged[0])
    for member in members:
        value, best = member.max(0)
        wins = (best > 0) & (value > highest)
        merged = torch.where(wins, member, merged)
        highest = torch.where(wins, value, highest)
    return merged


@pytest.mark.parametrize("n", [2, 3, 7])
def test_models_merge_one_at_a_time_as_all_at_once(n) -> None:
    random = torch.Generator().manual_seed(n)
    members = [torch.randn(4, 20, 20, generator=random).softmax(0).round(decimals=1) for _ in range(n)]
    before = [member.clone() for member in members]
    each = [(member, (1, 2, 3)) for member in members]
    assert torch.allclose(surest(iter(each), True), merge_all_at_once(members), rtol=0, atol=1e-6)
    assert torch.equal(surest(iter(each), False), torch.stack(members).amax(0))
    assert all(map(torch.equal, members, before)), "what was given is changed"


def test_a_net_is_asked_once_for_all_groups_that_have_it() -> None:
    space, how = LabelSpace(("background", "a", "b")), Inference()
    models = [tensors_of(small_unet(2, 1, seed)) for seed in range(3)]
    image = torch.rand(1, 8, 8, 4, generator=torch.Generator().manual_seed(1))
    groups = [
        [Member(models[0], (1,)), Member(models[1], (2,))],
        [Member(models[1], (2,)), Member(models[2])],
        [Member(models[0], (1,))],
        [Member(models[1])],
    ]
    asked, made = [], []

    def make(model: dict[str, Tensor], name: str = "main") -> nn.Module:
        made.append(name)
        net = small_unet(2, 1)
        net.load_state_dict(model)
        net.register_forward_pre_hook(lambda module, inputs: asked.append(len(inputs[0])))
        return net

    for _ in range(2):  # what a net held before plays no part
        asked.clear()
        nets_ = Nets(make)
        found = list(predict_each(groups, nets_, image, (8, 8), 0, how, space))
        assert asked == [4, 4, 4] and set(made) == {"main"}
        for members, told in zip(groups, found, strict=True):
            alone = predict_together(
                members, lambda i, members=members: make(members[i].model), image, (8, 8), 0, how, space
            )
            assert torch.equal(told.voxels, alone.voxels)
