"""What every registered net keeps to; a line in the registry, or an entry point of an installed package, is enough to be tested here."""

from typing import Any

import pytest
import torch

from fedatlas import nets
from fedatlas.core.errors import FederationError
from fedatlas.core.outputs import Mixed
from fedatlas.core.tensors import head_of, load, parts, tensors_of

NETS = [name for name in nets.names() if name != "simsiam_heads"]  # that one is of features, not of images
CLASSES = 5


def made(name: str, dims: int, seed: int = 1) -> nets.Net:
    """The net with its defaults. A net that is for images of two axes alone says so, and is tested with those."""
    try:
        return nets.build(name, {}, in_channels=2, classes=CLASSES, spatial_dims=dims, seed=seed)
    except FederationError as error:
        if dims == 3 and "takes images of 2 axes" in str(error):
            pytest.skip(str(error))
        raise


def size_of(net: nets.Net) -> list[int]:
    smallest = int(getattr(net, "smallest", 0))
    return [max(2 * by, smallest) for by in net.divisor]


@pytest.fixture(params=NETS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("dims", [2, 3])
def test_outputs_fit_the_classes(name: str, dims: int) -> None:
    with nets.without_values():
        net = made(name, dims)
    assert (net.in_channels, net.classes, net.spatial_dims) == (2, CLASSES, dims)
    assert net.training
    size = size_of(net)
    nets.check_patch(net, size)
    nets.check_output(net, CLASSES, patch=size)
    if net.level == "voxel":
        nets.check_output(net, CLASSES, patch=[3 * by for by in net.divisor])
        for axis in range(dims):
            if net.divisor[axis] > 1:
                with pytest.raises(FederationError, match="does not divide"):
                    nets.check_patch(net, [n + (i == axis) for i, n in enumerate(size)])


def test_weights_depend_on_the_seed_alone_and_take_gradients(name: str) -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    net = made(name, 2)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    first, again, other = tensors_of(net), tensors_of(made(name, 2)), tensors_of(made(name, 2, seed=2))
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)
    outputs: Any = net(torch.randn(2, 2, *size_of(net), generator=torch.Generator().manual_seed(0)))
    outputs = outputs.voxels if isinstance(outputs, Mixed) else outputs
    sum(head.square().mean() for head in (outputs if isinstance(outputs, list) else [outputs])).backward()
    lacking = [key for key, value in net.named_parameters() if value.requires_grad and value.grad is None]
    assert len(lacking) < len(first) / 2, "less than half of the net speaks to its outputs"
    assert all(torch.isfinite(value.grad).all() for value in net.parameters() if value.grad is not None)


def test_every_tensor_has_one_name_and_one_part(name: str) -> None:
    net = made(name, 2)
    values = tensors_of(net)
    assert list(values) == list(net.state_dict()), "a tensor has two names"
    named = parts(net)
    assert sorted(n for names in named.values() for n in names) == sorted(values)
    assert any(part.split(":")[0] == "encoder" for part in named)
    other = made(name, 2, seed=2)
    load(other, values)
    x = torch.randn(1, 2, *size_of(net), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        one, two = net.eval()(x), other.eval()(x)
    assert torch.equal(one, two), (
        "what a net gives depends on something that is neither a parameter nor a saved buffer"
    )
    if (
        "head" in named and name != "organ_heads"
    ):  # whose head has a row per organ: methods that average rows refuse it
        assert head_of(net)


def test_every_option_has_its_sentence(name: str) -> None:
    cls = nets.get(name)
    assert cls.__doc__
    assert all(field.description for field in cls.__pydantic_fields__.values())
