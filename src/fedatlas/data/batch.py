"""What every loss and every method sees of the data.

Shapes: B batch, C classes, I input channels, *S spatial.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass
class Batch:
    """image [B, I, *S] float; target [B, *S] class index if exclusive, else [B, C] or [B, C, *S] in {0, 1};
    known [B, C] bool: is class c annotated in this sample; case: where each sample came from (never sent)."""

    image: Tensor
    target: Tensor
    known: Tensor
    case: list[str]

    def to(self, device: torch.device | str) -> "Batch":
        """The same batch on another device."""
        return replace(
            self,
            image=self.image.to(device, non_blocking=True),
            target=self.target.to(device, non_blocking=True),
            known=self.known.to(device, non_blocking=True),
        )
