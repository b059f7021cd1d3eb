"""A step that adds a correction to every gradient: a control variate, or the gradient of a regulariser."""

from collections.abc import Callable

import torch
from torch import Tensor

from fedatlas.learning.loop import Local, Step


class CorrectedStep(Step):
    """A step that adds to every gradient, before it is clipped, `correction(parameter, gradient)`. A parameter
    without a gradient is left alone, so that what a site does not train stays as it is with any optimizer."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        local: Local,
        device: torch.device,
        correction: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        super().__init__(optimizer, local, device)
        self.correction = correction

    @torch.no_grad()
    def apply(self) -> None:
        held = [(p, p.grad) for p in self.parameters if p.grad is not None]
        scale = self.scaler.get_scale()
        # with fp16 a step whose gradients overflow is not taken, and tells nothing
        if not self.scaler.is_enabled() or all(bool(torch.isfinite(gradient).all()) for _, gradient in held):
            for parameter, gradient in held:
                plain = gradient if scale == 1 else gradient / scale
                gradient.add_(self.correction(parameter, plain), alpha=scale)
        super().apply()
