"""inference.py: windows and slices must not change what a pointwise net says."""

import pytest
import torch
from torch import Tensor, nn

from fedatlas.data.transforms import stack_slices
from fedatlas.inference import Inference, merge, neighbours, probabilities, restrict


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
        assert torch.equal(torch.from_numpy(stack_slices(image.numpy(), z, context)), stack)


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


def test_the_surest_foreground_wins() -> None:
    one = torch.tensor([[0.4, 0.9, 0.6], [0.6, 0.1, 0.4], [0.0, 0.0, 0.0]])
    two = torch.tensor([[0.2, 0.8, 0.1], [0.0, 0.0, 0.0], [0.8, 0.2, 0.9]])
    merged = merge([one, two], True)
    assert merged.argmax(0).tolist() == [2, 0, 2]
    assert torch.allclose(merged.sum(0), torch.ones(3))
    assert merge([one], True) is one
    assert torch.equal(merge([one, two], False), torch.maximum(one, two))
