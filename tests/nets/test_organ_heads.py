"""One head per organ: the merge of heads against the rule in words, its inverse, and the net."""

import pytest
import torch
from torch import Tensor

from fedatlas import nets
from fedatlas.core import seeds
from fedatlas.core.errors import FederationError
from fedatlas.core.options import from_dict
from fedatlas.core.organs import complete, merge_heads, read_heads
from fedatlas.nets.organ_heads import OrganHeads, OrganHeadsNet

GROUPS = ((1, 2), (3,), (5, 4, 6))
"""An organ with a lesion, one without, and one whose class comes after that of one of its two lesions."""


def random_heads(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3


def by_the_rule(h: list[float]) -> int:
    """The class of one voxel; h: the logits of classes 1 to 6."""
    organ, lesions = max(((c, les) for c, *les in GROUPS), key=lambda group: h[group[0] - 1])
    if h[organ - 1] <= 0:
        return 0
    best = max(lesions, key=lambda c: h[c - 1], default=None)
    return best if best is not None and h[best - 1] > 0 else organ


def test_the_largest_logit_is_the_merge_of_the_heads() -> None:
    h = random_heads(2, 6, 30, 30)
    expected = [[by_the_rule(voxel) for voxel in sample.flatten(1).T.tolist()] for sample in h]
    assert {c for sample in expected for c in sample} == set(range(7))
    assert merge_heads(h, GROUPS).argmax(1).flatten(1).tolist() == expected


@pytest.mark.parametrize(
    ("h", "z"),
    [
        ([-1.0, 5.0, -2.0, 0.0, -3.0, 0.0], [0.0, -6.0, -1.0, -2.0, -3.0, -3.0, -3.0]),  # lesion, no organ
        ([2.0, -1.0, 1.0, -4.0, -1.0, -2.0], [0.0, 2.0, 1.0, 1.0, -5.0, -1.0, -3.0]),
        ([2.0, 0.5, 3.0, 1.0, 4.0, 3.0], [0.0, 1.5, 2.0, 3.0, 2.0, 1.0, 4.0]),
    ],
)
def test_merged_logits_in_numbers(h, z) -> None:
    found = merge_heads(torch.tensor(h).reshape(1, 6, 1), GROUPS)
    assert found.flatten().tolist() == z


def test_reading_gives_the_heads_back_and_the_gradient_of_the_identity() -> None:
    h = random_heads(2, 6, 4, 5).requires_grad_()
    again = read_heads(merge_heads(h, GROUPS), GROUPS)
    torch.testing.assert_close(again, h)
    upstream = random_heads(2, 6, 4, 5).flip(0)
    (gradient,) = torch.autograd.grad(again, h, upstream)
    torch.testing.assert_close(gradient, upstream)


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
def test_heads_in_half_precision_are_merged_in_full(precision: torch.dtype) -> None:
    """A lesion's logit of 0.05 beside its organ's of 20 would be lost in the steps of that."""
    h = (random_heads(2, 6, 30, 30) + 10 * torch.tensor([1.0, 0, 0, 0, 1, 0]).reshape(1, 6, 1, 1)).to(
        precision
    )
    z = merge_heads(h, GROUPS)
    assert z.dtype == torch.float32 and torch.equal(z, merge_heads(h.float(), GROUPS))
    torch.testing.assert_close(read_heads(z, GROUPS), h.float(), atol=1e-5, rtol=0)
    assert merge_heads(h.float(), GROUPS).dtype == torch.float32
    assert merge_heads(h.double(), GROUPS).dtype == torch.float64


def test_the_net_gives_full_precision_under_autocast() -> None:
    net, x = make().eval(), torch.randn(1, 1, 16, 16, generator=torch.Generator().manual_seed(2))
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        h, z = net.backbone(x), net(x)
    assert h.dtype == torch.bfloat16
    torch.testing.assert_close(read_heads(z, net.groups), h.float(), atol=1e-5, rtol=0)


def test_reading_ignores_a_constant_on_all_logits() -> None:
    z = random_heads(1, 7, 3, 3)
    torch.testing.assert_close(read_heads(z + 5, GROUPS), read_heads(z, GROUPS))


def test_classes_in_no_group_are_organs_of_their_own() -> None:
    assert complete([(5, 4, 6), (1, 2)], 8) == ((5, 4, 6), (1, 2), (3,), (7,))


def make(classes: int = 7, spatial_dims: int = 2, **options: object) -> OrganHeadsNet:
    options = {"backbone": {"name": "unet", "filters": [4, 8, 8]}, "groups": [[1, 2], [5, 4, 6]]} | options
    chosen = from_dict(OrganHeads, options, what="net organ_heads")
    with seeds.isolated(1):
        return chosen.build(in_channels=1, classes=classes, spatial_dims=spatial_dims)


@pytest.mark.parametrize("spatial_dims", [2, 3])
def test_the_net_fits_its_label_space_and_its_heads_are_those_of_the_backbone(spatial_dims) -> None:
    net = make(spatial_dims=spatial_dims)
    nets.check_output(net, 7)
    assert set(net.parts()) >= {"encoder", "decoder", "head"}
    x = torch.randn(2, 1, *[16] * spatial_dims, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        net.eval()
        h, z = net.backbone(x), net(x)
    assert h.shape[1] == 6
    torch.testing.assert_close(read_heads(z, net.groups), h)


def test_deep_supervision_merges_every_output() -> None:
    net = make(backbone={"name": "unet", "filters": [4, 8, 8, 8], "deep_supervision": True})
    outputs = net.train()(torch.zeros(2, 1, 32, 32))
    assert [tuple(z.shape[:2]) for z in outputs] == [(2, 7)] * len(outputs) and len(outputs) > 1


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"backbone": {"name": "cnn"}}, "backbone.name is 'cnn'; allowed: unet"),
        ({"backbone": {"name": "organ_heads"}}, "backbone.name is 'organ_heads'; allowed: unet"),
        ({"backbone": {"name": "cond_unet"}}, "backbone.name is 'cond_unet'; allowed: unet"),
        ({"backbone": {}}, "backbone.name is None"),
        ({"backbone": {"name": "unet", "width": 3}}, "net unet"),
        ({"groups": [[0, 1]]}, "of 1 to 6"),
        ({"groups": [[7]]}, "of 1 to 6"),
        ({"groups": [[1, 2], [2, 3]]}, "no class is in two"),
        ({"groups": [[]]}, "each holds one class or more"),
    ],
)
def test_what_does_not_fit_is_named(options, told) -> None:
    with pytest.raises(FederationError, match=told):
        make(**options)


def test_backbones_are_the_nets_for_voxels_that_are_not_by_organ() -> None:
    by_organ = {name for name in nets.FOR_LEVEL["voxel"] if nets.net_of(name).by_organ}
    assert by_organ == {"organ_heads", "menunet", "dodnet", "cond_unet"}
    for name in nets.FOR_LEVEL["voxel"]:
        with nets.without_values():
            net = nets.build(name, {}, in_channels=1, classes=3, spatial_dims=2, seed=0)
        assert type(net) is nets.net_of(name)
        if name in by_organ:
            with pytest.raises(FederationError, match="is for exclusive classes"):
                nets.check_classes(name, net, exclusive=False)
        else:
            nets.check_classes(name, net, exclusive=False)
