"""DoDNet: the official dynamic head, the net written out task by task, heads and logits, parts, and what is refused."""

from typing import Any

import pytest
import torch
from menunet_vectors import vectors
from torch import Tensor
from torch.nn import functional as F

from fedatlas import nets
from fedatlas.core.errors import FederationError
from fedatlas.core.organs import read_heads
from fedatlas.core.tensors import load, parts, tensors_of
from fedatlas.nets.dodnet import DoDNetModule, dynamic_head, head_sizes, standardise

SMALL: dict[str, Any] = {"filters": [8, 16]}
GROUPS = [[5, 4, 6], [1, 2]]
"""Of seven classes: tasks (1, 2), (3,) and (5, 4, 6); the last, with two lesions, has its organ's class second."""
CASES: list[tuple[dict[str, Any], int]] = [
    (SMALL, 2),
    (SMALL, 3),
    ({"filters": [8, 8, 16], "strides": [1, [2, 1], 3]}, 2),
    ({"filters": [4, 6, 6], "strides": [1, [1, 2, 2], [2, 2, 2]], "norm": "instance"}, 3),
    (SMALL | {"standardised": False}, 2),
]


def build(dims: int = 2, classes: int = 7, seed: int = 1, **options: Any) -> Any:
    chosen = SMALL | {"groups": GROUPS} | options
    return nets.build("dodnet", chosen, in_channels=2, classes=classes, spatial_dims=dims, seed=seed)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def test_the_official_dynamic_head() -> None:
    v = vectors("dodnet_dynamic_head")
    assert sum(head_sizes(2)) == v["params"].shape[1] == 162
    torch.testing.assert_close(dynamic_head(v["features"], v["params"]), v["logits"], atol=1e-5, rtol=0)
    # the controller's input of a task, as `forward` makes it: a row of the identity
    assert torch.equal(v["task_onehot"], torch.eye(7)[[2, 5]].to(v["task_onehot"]))
    found = F.conv3d(v["ws_x"], standardise(v["ws_weight"]), padding=1)
    torch.testing.assert_close(found, v["ws_out"], atol=1e-5, rtol=0)


@pytest.mark.parametrize("outputs", [2, 3])
@pytest.mark.parametrize("dims", [2, 3])
def test_the_head_is_three_convolutions_for_each_sample_by_itself(dims: int, outputs: int) -> None:
    maps, values = draw(3, 8, *(2, 3, 4)[:dims]), draw(3, 144 + 9 * outputs, seed=1)
    convolve = F.conv2d if dims == 2 else F.conv3d
    for sample, own, found in zip(maps, values.tolist(), dynamic_head(maps, values), strict=True):
        weights: list[Tensor] = []
        for out in (8, 8, outputs):
            weights.append(torch.tensor([[own.pop(0) for _ in range(8)] for _ in range(out)]))
        x = sample[None]
        for place, weight in enumerate(weights):
            bias = torch.tensor([own.pop(0) for _ in weight], dtype=x.dtype)
            x = x.relu() if place else x
            x = convolve(x, weight.to(x).reshape(len(weight), 8, *[1] * dims), bias)
        assert not own
        torch.testing.assert_close(found, x[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("standardised", [True, False])
def test_one_pass_of_the_backbone_is_the_whole_net_once_for_every_task(standardised: bool) -> None:
    net = build(standardised=standardised).double()
    v = tensors_of(net)

    def layer(x: Tensor, name: str, stride: int = 1) -> Tensor:
        w = v[f"{name}.conv.weight"]
        if standardised:
            rows = w.flatten(1)
            w = ((rows - rows.mean(1, keepdim=True)) / rows.std(1, keepdim=True)).reshape(w.shape)
        x = F.conv2d(x, w, stride=stride, padding=w.shape[-1] // 2)
        return F.group_norm(x, 8, v[f"{name}.norm.weight"], v[f"{name}.norm.bias"])

    def block(x: Tensor, name: str) -> Tensor:
        return (x + layer(layer(x, f"{name}.first").relu(), f"{name}.second")).relu()

    def whole(x: Tensor, task: list[float]) -> Tensor:
        top = block(layer(x, "downs.0.0").relu(), "downs.0.2")
        low = block(layer(top, "downs.1.0", 2).relu(), "downs.1.2")
        up = F.interpolate(layer(low, "ups.0.narrow").relu(), scale_factor=2, mode="bilinear")
        maps = F.conv2d(block(top + up, "ups.0.refine"), v["last.weight"], v["last.bias"])
        asked = torch.tensor([task] * len(x), dtype=x.dtype)[:, :, None, None]
        seen = torch.cat([F.adaptive_avg_pool2d(low, 1), asked], 1)
        values = F.conv2d(seen, v["controller.weight"][:, :, None, None], v["controller.bias"])
        return dynamic_head(maps, values.flatten(1))

    x = draw(2, 2, 6, 4)
    with torch.no_grad():
        heads = net(x, tasks=range(3))
    for m, (task, head) in enumerate(zip(torch.eye(3).tolist(), heads, strict=True)):
        torch.testing.assert_close(head, whole(x, task)[:, : len(net.organs[m])])
    assert len({round(float(head[0, 0, 0, 0]), 6) for head in heads}) == 3, "tasks differ"


def test_the_logits_of_classes_and_the_heads_are_each_read_from_the_other() -> None:
    net = build().double()
    assert net.organs == ((1, 2), (3,), (5, 4, 6)) and net.outputs == 3
    x = draw(2, 2, 8, 8)
    with torch.no_grad():
        z, heads = net(x), net(x, tasks=[0, 1, 2])
        third, first = net(x, tasks=[2, 0])
    assert [head.shape[1] for head in heads] == [2, 1, 3]
    assert torch.equal(third, heads[2]) and torch.equal(first, heads[0])
    h = torch.cat(heads, 1)[:, [0, 1, 2, 4, 3, 5]]  # of classes 1 to 6
    torch.testing.assert_close(read_heads(z, net.organs), h)
    organ, lesion = heads[0].unbind(1)
    torch.testing.assert_close(z[:, 2], organ - lesion.relu() + lesion)
    torch.testing.assert_close(z[:, 3], heads[1][:, 0])
    assert net(x, tasks=[]) == []


def test_a_task_that_is_not_asked_for_gets_no_gradient() -> None:
    net = build()
    net(draw(2, 2, 8, 8, dtype=torch.float32), tasks=[0, 2])[1].square().mean().backward()
    column = net.controller.weight.grad[:, 16:].abs().sum(0)
    assert column[0] == column[1] == 0 and column[2] > 0
    alone = build(classes=4, groups=[])
    alone(draw(2, 2, 8, 8, dtype=torch.float32)).square().mean().backward()
    second = alone.controller.weight.grad.split(head_sizes(2))[2].unflatten(0, (2, 8))[1]
    assert not second.any(), "no organ has a lesion"


@pytest.mark.parametrize(("options", "dims"), CASES)
def test_shapes_names_and_parts(options: dict[str, Any], dims: int) -> None:
    net = build(dims, **options)
    nets.check_output(net, 7)
    size = [2 * by for by in net.divisor]
    nets.check_patch(net, size)
    x = draw(2, 2, *size, dtype=torch.float32)
    values = tensors_of(net)
    named = parts(net)
    assert set(named) == {"encoder", "decoder", "controller"} and {"last.weight"} <= set(named["decoder"])
    assert sorted(n for names in named.values() for n in names) == sorted(values)
    other = build(dims, seed=2, **options)
    assert any(not torch.equal(value, values[n]) for n, value in tensors_of(other).items())
    load(other, values)
    with torch.no_grad():
        assert net(x).shape == (2, 7, *size) and torch.equal(other.eval()(x), net(x))


def test_the_number_of_its_parameters() -> None:
    with torch.device("meta"):
        net = nets.get("dodnet")(groups=((1, 2), (3, 4))).build(in_channels=1, classes=10, spatial_dims=3)
    assert isinstance(net, DoDNetModule) and len(net.organs) == 7
    f = (32, 64, 128, 256, 256)
    down = sum(27 * w * (a + 2 * w) + 6 * w for a, w in zip((1, *f[:-1]), f, strict=True))
    up = sum(w * (a + 54 * w) + 6 * w for a, w in zip(f[:0:-1], f[-2::-1], strict=True))
    count = sum(p.numel() for p in net.parameters())
    assert count == down + up + 8 * 33 + 162 * (256 + 7 + 1) == 16_029_688


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"filters": [8]}, "filters: has 1 "),
        ({"filters": [8, 12]}, r"filters are \[8, 12\]; allowed with norm group: multiples of 8"),
        ({"filters": [8, 0], "norm": "instance"}, r"filters\.1: got 0; .*1 or more"),
        ({"strides": [1]}, "allowed: 2 entries"),
        ({"strides": [2, 2]}, "the first of them 1"),
        ({"strides": [1, 4]}, "a number of 1 to 3"),
        ({"strides": [1, [2, 2, 2]]}, "or 2 of them"),
        ({"groups": [[0, 1]]}, "net dodnet: groups are"),
        ({"groups": [[1, 2], [2]]}, "no class is in two"),
        ({"filter": [8, 8]}, "did you mean 'filters'"),
    ],
)
def test_what_does_not_fit_is_named(options: dict[str, Any], told: str) -> None:
    with pytest.raises(FederationError, match=told):
        build(**options)


def test_classes_that_overlap_are_refused() -> None:
    nets.check_classes("dodnet", build(), exclusive=True)
    with pytest.raises(FederationError, match="is for exclusive classes"):
        nets.check_classes("dodnet", build(), exclusive=False)
