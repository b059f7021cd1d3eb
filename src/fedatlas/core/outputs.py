"""What a net returns, and asking it.

Shapes: B batch, C classes, F findings, *S spatial.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn


@dataclass(frozen=True)
class Mixed:
    """The outputs of a net that segments and, of the same image, tells findings.

    voxels: logits [B, C, *S], or a list of them, the head of full resolution first; findings: logits [B, F].
    """

    voxels: Tensor | Sequence[Tensor]
    findings: Tensor


Outputs = Tensor | Sequence[Tensor] | Mixed
"""Logits [B, C, *S] (whole images: [B, C]); with deep supervision, in training, a list of them, the head of full
resolution first; with findings beside segmentation, `Mixed`."""


Others = Literal["background", "ignored"]
"""What a net that one site trained says, of exclusive classes, in the channels of those that the site does not annotate.
background: that they are background, over which a marginal loss sums them; ignored: nothing, as the loss left them alone."""


def heads(outputs: Outputs) -> Tensor | Sequence[Tensor]:
    """The logits of the classes, findings left aside: [B, C, *S], or one per head."""
    return outputs.voxels if isinstance(outputs, Mixed) else outputs


def voxel_logits(outputs: Outputs) -> Tensor:
    """[B, C, *S] the logits of the head of full resolution."""
    logits = heads(outputs)
    return logits if isinstance(logits, Tensor) else logits[0]


@contextmanager
def evaluating(net: nn.Module) -> Iterator[None]:
    """The net in evaluation mode; the mode of each of its modules is put back."""
    modes = [(module, module.training) for module in net.modules()]
    net.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
