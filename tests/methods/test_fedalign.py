"""FedAlign: the published numbers, the slimmed block by slicing, limiting cases."""

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from fakes import same
from torch import Tensor, nn
from torch.nn import functional as F
from unet_sites import LOCAL, UNetSite, play, resumed, unet

from fedatlas import losses, nets
from fedatlas.core.errors import FederationError
from fedatlas.core.seeds import generator
from fedatlas.losses import LossChoice
from fedatlas.methods.fedalign import FedAlign, K, L_lip, kept, slimmed, top_eigenvalue, transmitting_matrix
from fedatlas.methods.fedavg import FedAvg
from fedatlas.methods.shared.features import Call, watched

VECTORS = Path(__file__).parents[1] / "vectors"


def test_the_published_numbers() -> None:
    with np.load(VECTORS / "fedalign_lipschitz.npz") as file:
        v = {key: torch.from_numpy(file[key]) for key in file.files}
    X = transmitting_matrix(v["t_in"], v["t_out"])
    torch.testing.assert_close(X, v["tm_t"], atol=1e-5, rtol=0)
    torch.testing.assert_close(X @ X.transpose(1, 2), v["TM_t"], atol=1e-5, rtol=0)
    X_s = transmitting_matrix(v["s_in"], v["s_out"])
    torch.testing.assert_close(X_s @ X_s.transpose(1, 2), v["TM_s"], atol=1e-5, rtol=0)
    K_t, K_s = K(v["t_in"], v["t_out"]), K(v["s_in"], v["s_out"])
    torch.testing.assert_close(K_t, v["eig_t"], atol=1e-5, rtol=0)
    torch.testing.assert_close(K_s, v["eig_s"], atol=1e-5, rtol=0)
    torch.testing.assert_close(F.mse_loss(K_s, K_t), v["loss"], atol=1e-5, rtol=0)


def test_the_top_eigenvalue() -> None:
    A = torch.randn(3, 6, 6, generator=generator("A"), dtype=torch.float64)
    A = A @ A.transpose(1, 2)
    expected = torch.linalg.eigvalsh(A)[:, -1].reshape(3, 1, 1)
    torch.testing.assert_close(top_eigenvalue(A, 500), expected)
    assert (top_eigenvalue(torch.zeros(2, 3, 3)) == 0).all()


def test_maps_of_two_resolutions_meet_at_the_coarser_one() -> None:
    a, b = torch.ones(1, 2, 4, 6, 8), torch.full((1, 3, 2, 3, 4), 2.0)
    assert torch.equal(transmitting_matrix(a, b), torch.full((1, 2, 3), 2.0))
    assert torch.equal(transmitting_matrix(b, a), torch.full((1, 3, 2), 2.0))


@pytest.mark.parametrize("norm", ["instance", "batch"])
def test_a_slimmed_block_is_the_block_of_the_first_channels(norm: str) -> None:
    block = cast(Any, unet(filters=[4, 8, 16], norm=norm)).downs[-1].train()
    x = torch.randn(2, 8, 8, 8, generator=generator("x"))

    def normal(y: Tensor, layer: nn.Module, keep: int) -> Tensor:
        mean = y.mean((2, 3) if norm == "instance" else (0, 2, 3), keepdim=True)
        var = y.var((2, 3) if norm == "instance" else (0, 2, 3), keepdim=True, unbiased=False)
        w, b = (cast(Tensor, p)[:keep].reshape(1, -1, 1, 1) for p in (layer.weight, layer.bias))
        return F.leaky_relu((y - mean) / (var + 1e-5).sqrt() * w + b, 0.01)

    one, two = block.conv1.conv, block.conv2.conv
    y = F.conv2d(x[:, :2], one.weight[:4, :2], one.bias if one.bias is None else one.bias[:4], 2, 1)
    y = normal(y, block.norm1, 4)
    y = normal(F.conv2d(y, two.weight[:, :4], two.bias, 1, 1), block.norm2, 16)
    with slimmed(block, 0.25):
        torch.testing.assert_close(block(x), y, atol=1e-5, rtol=1e-4)
    assert (
        kept(8, 0.25) == 2 and kept(3, 0.25) == 1 and not any(m._forward_pre_hooks for m in block.modules())
    )
    full = block(x)
    assert not torch.allclose(full, y, atol=1e-2)
    # the sub-block gives a quarter of the channels, too
    small = F.conv2d(x[:, :2], one.weight[:4, :2], one.bias if one.bias is None else one.bias[:4], 2, 1)
    small = F.conv2d(
        normal(small, block.norm1, 4),
        two.weight[:4, :4],
        two.bias if two.bias is None else two.bias[:4],
        1,
        1,
    )
    small = normal(small, block.norm2, 4)
    expected = F.mse_loss(K(x[:, :2], small), K(x, full))
    torch.testing.assert_close(L_lip(Call(block, x, [full]), 0.25, 10), expected, rtol=1e-4, atol=1e-6)


def test_the_local_objective() -> None:
    """The term is mu times the supervised loss; only the block gets a gradient from it, and only what is slimmed."""
    site = UNetSite("b", {2, 3}, 3)
    batch, net = site.batch(torch.tensor([0, 1])), unet(norm="batch")
    L_sup = losses.supervised(LossChoice(), site)  # type: ignore[arg-type]
    terms = cast(dict[str, Tensor], FedAlign().L(L_sup)(net, batch))
    assert terms["lipschitz"].item() == pytest.approx(0.45 * terms["supervised"].item())
    # running statistics are those of one pass
    tracked = [b for n, b in net.named_buffers() if n.endswith("num_batches_tracked")]
    assert tracked and all(int(count) == 1 for count in tracked)
    block = cast(Any, net).downs[-1]
    gradients = torch.autograd.grad(terms["lipschitz"], list(net.parameters()), allow_unused=True)
    own = {id(p) for p in block.parameters()}
    for p, g in zip(net.parameters(), gradients, strict=True):
        assert (g is not None) == (id(p) in own)
    ids = [id(p) for p in net.parameters()]
    first = gradients[ids.index(id(block.conv1.conv.weight))]
    assert first is not None and first[:, :1].any() and not first[:, 1:].any()
    with watched(net) as seen:
        L_sup(net, batch)
    (call,) = seen.blocks
    assert call.module is block
    lipschitz = L_lip(call, 0.25, 10)
    torch.testing.assert_close(
        first,
        0.45 * terms["supervised"].detach() / lipschitz.detach()
        * torch.autograd.grad(lipschitz, block.conv1.conv.weight)[0],
        rtol=1e-3,
        atol=1e-6,
    )  # fmt: skip


def test_mu_of_zero_is_fedavg() -> None:
    """E18, bit for bit. So is a block that is not slimmed: it is its own target."""
    plain = play(FedAvg(local=LOCAL), rounds=1).model
    assert same(play(FedAlign(mu=0.0, local=LOCAL), rounds=1).model, plain)
    assert not same(play(FedAlign(local=LOCAL), rounds=1).model, plain)
    whole = play(FedAlign(width=1.0, local=LOCAL), rounds=1).model
    for name, value in whole.items():
        torch.testing.assert_close(value, plain[name])


def test_resumed() -> None:
    method = FedAlign(local=LOCAL)
    assert same(play(method).model, resumed(method, rounds=2).model)


def test_a_block_without_convolutions_is_refused() -> None:
    call = Call(nn.ReLU(), torch.zeros(1, 2, 4, 4), [torch.zeros(1, 2, 4, 4)])
    with pytest.raises(FederationError, match="ends with a ReLU"):
        L_lip(call, 0.25, 10)


def test_a_block_that_is_the_whole_encoder_is_refused() -> None:
    """Its input would be the image, and no bottleneck would be slimmed."""
    small: dict[str, dict[str, Any]] = {"menunet": {"width": 2, "levels": 2}, "deeplabv3plus": {}}
    for name, options in small.items():
        with nets.without_values():
            net = nets.build(name, options, in_channels=3, classes=3, spatial_dims=2, seed=1)
        with pytest.raises(FederationError, match="is one module.*allowed: a net whose encoder is a list"):
            FedAlign().examine(net, [])
        assert FedAlign(mu=0.0).examine(net, []) == []
    assert FedAlign().examine(unet(), []) == []
