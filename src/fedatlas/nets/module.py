"""Base class of the nets: a module that knows its shapes and names its parts."""

import math
from collections.abc import Sequence
from typing import Literal

from torch import nn

from fedatlas.core.errors import FederationError
from fedatlas.core.outputs import Outputs

PAGE = "see docs/how-to/add-a-net.md"
"""Where it is said what a net of one's own holds."""


class Net(nn.Module):
    """A net of a federation.

    forward: [B, in_channels, *S] -> logits [B, classes, *S]; with deep supervision, in training mode, a list
    of logits, the full resolution first. Where level is "image": logits [B, classes]. With findings beside
    segmentation: `Mixed`, the second of them logits [B, findings]. divisor: by what each axis of an input must
    divide. old: the foreground classes that its first weights know already, from another model. by_organ: does it merge
    several answers of its own, as one per organ? Then it is for exclusive classes alone, and no backbone of `organ_heads`.
    """

    level: Literal["voxel", "image"] = "voxel"
    old: tuple[int, ...] = ()
    by_organ: bool = False

    def __init__(self, in_channels: int, classes: int, divisor: Sequence[int], findings: int = 0) -> None:
        super().__init__()
        self.in_channels, self.classes, self.divisor = in_channels, classes, tuple(divisor)
        self.findings = findings

    @property
    def spatial_dims(self) -> int:
        """2 or 3."""
        return len(self.divisor)

    def parts(self) -> dict[str, nn.Module | list[nn.Module]]:
        """The modules of each part; "encoder", "decoder", "head", and, where there are any,
        "deep_supervision" and "image_head". Raises FederationError where a net does not say them."""
        raise FederationError(
            f"net {type(self).__name__}: does not name its parts, by which this method tells its tensors apart; write "
            f'parts(self), which gives {{"encoder": …, "decoder": …, "head": …}}, {PAGE}'
        )

    def check_patch(self, patch: Sequence[int]) -> None:
        """Raises FederationError for a patch that the net cannot take: another number of axes, an axis that
        does not divide by the net's total stride, or a patch that leaves a single voxel at the bottom."""
        if len(patch) != self.spatial_dims:
            raise FederationError(
                f"patch {list(patch)}: has {len(patch)} axes, the net has {self.spatial_dims}"
            )
        fits = all(size > 0 and size % by == 0 for size, by in zip(patch, self.divisor, strict=True))
        if not fits:
            near = [max(by, round(size / by) * by) for size, by in zip(patch, self.divisor, strict=True)]
            raise FederationError(
                f"patch {list(patch)}: does not divide by the net's total stride {list(self.divisor)}; allowed "
                f"are multiples of it, the nearest is {near}"
            )
        if math.prod(patch) == math.prod(self.divisor):
            raise FederationError(
                f"patch {list(patch)}: leaves one voxel at the bottom of the net, which cannot be normalised; "
                f"give a larger multiple of {list(self.divisor)} in at least one axis"
            )


__all__ = ["Net", "Outputs"]
