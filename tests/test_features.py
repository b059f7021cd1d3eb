"""The maps of encoders: those of every registered net, and what cannot be watched."""

from typing import Any

import pytest
import torch
from torch import nn

from fedatlas import nets
from fedatlas.core.errors import FederationError
from fedatlas.core.seeds import generator
from fedatlas.methods.shared.features import pooled, watched

NETS: dict[str, tuple[dict[str, Any], list[int], list[int]]] = {
    "unet": ({"filters": [4, 6, 8]}, [4, 6, 8], [32, 16, 8]),
    "mednext": ({"size": "S"}, [32, 64, 128, 256, 512], [32, 16, 8, 4, 2]),
    "kim_unet": ({}, [], []),
    "dodnet": ({"filters": [8, 16]}, [8, 16], [32, 16]),
    "menunet": ({"width": 2, "levels": 2}, [6, 12], [32, 16]),
    "organ_heads": ({"backbone": {"name": "unet", "filters": [4, 6, 8]}}, [4, 6, 8], [32, 16, 8]),
    "deeplabv3plus": ({"depths": [1, 1, 1, 1], "dims": [4, 8, 8, 12]}, [4, 8, 12], [8, 4, 2]),
}
"""Options, channels and sizes of the levels of a slice of 32 x 32 and four classes; empty: not compared."""


def net_of(name: str, options: dict[str, Any]) -> nn.Module:
    return nets.build(name, options, in_channels=1, classes=4, spatial_dims=2, seed=1)


@pytest.mark.parametrize("name", sorted(NETS))
def test_the_levels_of_every_net(name: str) -> None:
    options, channels, sizes = NETS[name]
    net = net_of(name, options)
    x = torch.randn(2, 1, 32, 32, generator=generator("x"))
    with watched(net) as seen:
        net(x)
    levels = seen.levels
    if channels:
        assert [m.shape[1] for m in levels] == channels and [m.shape[2] for m in levels] == sizes
    assert seen.bottleneck.shape == levels[-1].shape and seen.bottleneck.requires_grad
    assert pooled(seen.bottleneck).shape == (2, levels[-1].shape[1])
    whole, reached = seen.bottleneck.detach(), []
    hook = next(m for n, m in net.named_modules() if n.endswith(("head", "out_0")) or n == "last")
    handle = hook.register_forward_hook(lambda *_: reached.append(1))
    with torch.no_grad(), watched(net, encoder_only=True) as seen:
        net(x)
    assert torch.equal(seen.bottleneck, whole) and not reached
    handle.remove()
    assert not any(module._forward_hooks for module in net.modules())


def test_grouped_encoders_run_by_themselves() -> None:
    net = net_of("menunet", {"width": 2, "levels": 2, "grouped": True})
    with pytest.raises(ValueError, match="own"), watched(net) as seen:
        torch.testing.assert_close(net(torch.ones(1, 1, 16, 16)), net(torch.ones(1, 1, 16, 16)))
        assert seen.bottleneck.shape == (1, 12, 8, 8) and not net.grouped
        raise ValueError("own")
    assert net.grouped is True


def test_several_forward_passes_give_the_last() -> None:
    net = net_of("unet", {"filters": [4, 6, 8]})
    with watched(net) as seen:
        net(torch.zeros(1, 1, 16, 16))
        net(torch.ones(1, 1, 16, 16))
    with watched(net) as last:
        net(torch.ones(1, 1, 16, 16))
    assert torch.equal(seen.bottleneck, last.bottleneck)


def test_what_cannot_be_watched_is_refused() -> None:
    with watched(net_of("unet", {"filters": [4, 6, 8]})) as seen:
        pass
    for value in ("bottleneck", "levels", "blocks"):
        with pytest.raises(FederationError, match="does not call the modules of its encoder"):
            getattr(seen, value)
    with pytest.raises(FederationError, match="names no part"), watched(nn.Conv2d(1, 1, 1)):
        pass


def test_an_error_within_leaves_no_hook() -> None:
    net = net_of("unet", {"filters": [4, 6, 8]})
    with pytest.raises(ValueError, match="own"), watched(net):
        raise ValueError("own")
    assert not any(module._forward_hooks for module in net.modules())


def test_means_of_half_precision_maps_are_of_float32() -> None:
    maps = torch.rand(2, 3, 9, 11, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert pooled(maps).dtype == torch.float32
    torch.testing.assert_close(pooled(maps).double(), maps.double().mean((2, 3)), atol=1e-6, rtol=0)
    assert pooled(maps.double()).dtype == torch.float64
