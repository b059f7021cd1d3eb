"""The net of FedCRLD: its attention in numbers, which encoder is asked where, its parts, and what it refuses."""

from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedatlas import nets
from fedatlas.core.errors import FederationError
from fedatlas.core.seeds import generator, isolated
from fedatlas.core.tensors import parts, tensors_of
from fedatlas.nets.crld_unet import Attention


def build(dims: int = 2, **options: Any) -> Any:
    chosen = {"width": 4, "max_width": 8, "levels": 3} | options
    return nets.build("crld_unet", chosen, in_channels=2, classes=3, spatial_dims=dims, seed=1)


def images(dims: int) -> Tensor:
    return torch.randn(2, 2, *[8] * dims, generator=generator("images"))


@pytest.mark.parametrize("dims", [2, 3])
def test_outputs_and_parts(dims: int) -> None:
    net, x = build(dims), images(dims)
    nets.check_output(net, 3)
    outputs, (g, l) = net(x, bottlenecks=True)
    assert [tuple(head.shape) for head in outputs] == [(2, 3, *[8] * dims)] * 2
    assert g.shape == l.shape == (2, 8, *[2] * dims) and not torch.allclose(g, l)
    torch.testing.assert_close(outputs, net(x))
    assert net.eval()(x).shape == (2, 3, *[8] * dims)
    named = parts(net)
    assert list(named) == ["encoder", "private_encoder", "attention", "decoder", "head", "deep_supervision"]
    assert sorted(name for names in named.values() for name in names) == sorted(tensors_of(net))
    assert len(named["encoder"]) == len(named["private_encoder"])
    cast(Tensor, sum(head.square().mean() for head in net.train()(x))).backward()
    without = [name for name, p in net.named_parameters() if p.grad is None]
    assert without == []


def encoded(net: Any, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """The images, and the maps of every level, of the shared encoder and of the private one."""
    g, l = [x], [x]
    for a, b in zip(net.encoder, net.private_encoder, strict=True):
        g.append(a(g[-1]))
        l.append(b(l[-1]))
    return g, l


def test_which_encoder_is_asked_where() -> None:
    """The maps by hand: the mean of both above, attention at the bottom, asked by the private encoder."""
    net, x = build().eval(), images(2)
    g, l = encoded(net, x)
    maps = [(a + b) / 2 for a, b in zip(g[1:-1], l[1:-1], strict=True)]
    expected = net.head(net.decoder([*maps, net.attention(l[-1], g[-1])]))
    torch.testing.assert_close(net(x), expected)
    assert not torch.allclose(expected, net.head(net.decoder([*maps, net.attention(g[-1], l[-1])])))


def test_attention_in_loops() -> None:
    """Cross-attention, then self-attention, a head and a token at a time."""
    with isolated("attention"):
        attention = Attention(4, 2)
    l, g = (torch.randn(1, 4, 2, 3, generator=generator("maps", i)) for i in range(2))

    def tokens(maps: Tensor) -> Tensor:
        return maps[0].flatten(1).T

    def attend(module: Any, asking: Tensor, asked: Tensor) -> Tensor:
        w, b = module.in_proj_weight, module.in_proj_bias
        q, k, v = (x @ w[i : i + 4].T + b[i : i + 4] for x, i in ((asking, 0), (asked, 4), (asked, 8)))
        rows = []
        for n in range(len(q)):
            heads = []
            for h in (slice(0, 2), slice(2, 4)):
                share = torch.stack([(q[n, h] * k[m, h]).sum() / 2**0.5 for m in range(len(k))]).softmax(0)
                heads.append((share[:, None] * v[:, h]).sum(0))
            rows.append(torch.cat(heads))
        return module.out_proj(torch.stack(rows))

    def normal(z: Tensor) -> Tensor:
        return (z - z.mean(1, keepdim=True)) / (z.var(1, correction=0, keepdim=True) + 1e-5).sqrt()

    z = normal(tokens(l) + attend(attention.cross, tokens(l), tokens(g)))
    z = normal(z + attend(attention.own, z, z))
    torch.testing.assert_close(attention(l, g), z.T.reshape(1, 4, 2, 3))


def test_what_does_not_fit_is_named() -> None:
    with pytest.raises(FederationError, match=r"attention_heads is 3, the lowest level has 8 channels"):
        build(attention_heads=3)
    with pytest.raises(FederationError, match="net crld_unet: strides are"):
        build(strides=[2])


def test_heads_of_levels_read_the_mean_of_both_encoders() -> None:
    net, x = build().train(), images(2)
    g, l = encoded(net, x)
    (_, told), bottom = net(x, bottlenecks=True)
    expected = F.interpolate(net.heads[0]((g[2] + l[2]) / 2), x.shape[2:], mode="bilinear")
    torch.testing.assert_close(told, expected)
    torch.testing.assert_close(bottom, (g[-1], l[-1]))
