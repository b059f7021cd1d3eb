"""From a net and a volume to class probabilities: windows in 3D, slices with their neighbours in 2.5D.

Shapes: C classes, F findings, I input channels, *S spatial.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from monai.inferers.utils import sliding_window_inference
from torch import Tensor, nn

from fedatlas.labels import LabelSpace
from fedatlas.options import option, options
from fedatlas.outputs import Mixed, voxel_logits


@options
class Inference:
    """How a volume that is larger than a patch is predicted."""

    overlap: float = option(0.5, "Share of a window that the next one covers again.", ge=0, lt=1)
    blend: Literal["gaussian", "constant"] = option(
        "gaussian", "Weight of a window's voxels where windows overlap."
    )
    batch: int = option(8, "Windows, or slices, at a time.", gt=0)
    gate: float | None = option(
        0.5,
        "A class of voxels that a finding is about is emptied where the finding is less probable than this; null: never.",
        ge=0,
        le=1,
    )


@dataclass(frozen=True)
class Prediction:
    """Probabilities of a case, float32 on the CPU: voxels [C, *S]; findings [F], None where the net tells none."""

    voxels: Tensor
    findings: Tensor | None = None


def neighbours(image: Tensor, index: Tensor, context: int) -> Tensor:
    """Slices [N, I * (2 * context + 1), X, Y] of a volume [I, X, Y, Z], each with its neighbours along the last
    axis, as training sees them: channel by channel from the lowest neighbour to the highest; at the ends the
    last slice is repeated."""
    offsets = torch.arange(-context, context + 1)
    near = (index[:, None] + offsets[None, :]).clamp(0, image.shape[-1] - 1)
    stack = image[..., near]  # [I, X, Y, N, 2 * context + 1]
    return stack.permute(3, 0, 4, 1, 2).flatten(1, 2)


def probabilities(
    net: nn.Module, image: Tensor, patch: Sequence[int], context: int, options: Inference, *, exclusive: bool
) -> Tensor:
    """[C, *S] the voxels of `predict`."""
    return predict(net, image, patch, context, options, exclusive=exclusive).voxels


@torch.inference_mode()
def predict(
    net: nn.Module, image: Tensor, patch: Sequence[int], context: int, options: Inference, *, exclusive: bool
) -> Prediction:
    """What a net says of an image [I, *S].

    patch: three numbers for windows in 3D, two for slices along the last axis with `context` neighbours on
    either side. Softmax if exclusive, else sigmoid, in float32; probabilities are blended, not logits. A finding of a
    volume is as probable as in the window, or slice, that says most. A volume smaller than a patch is padded with 0 on
    both sides. The mode of the net and of each of its modules is put back.
    """
    modes = [(module, module.training) for module in net.modules()]
    net.eval()
    told: list[Tensor] = []
    try:
        device = next((tensor.device for tensor in net.parameters()), image.device)

        def of_windows(windows: Tensor) -> Tensor:
            outputs = net(windows)
            if isinstance(outputs, Mixed):
                told.append(outputs.findings.float().sigmoid().amax(0).cpu())
            logits = voxel_logits(outputs).float()
            return logits.softmax(1) if exclusive else logits.sigmoid()

        def slide(inputs: Tensor) -> Tensor:
            if tuple(inputs.shape[2:]) == tuple(patch):
                return of_windows(inputs)
            found = sliding_window_inference(
                inputs, tuple(patch), options.batch, of_windows, overlap=options.overlap, mode=options.blend
            )
            assert isinstance(found, Tensor)
            return found

        image = image.float()
        if len(patch) == 3:
            voxels = slide(image[None].to(device))[0].cpu()
        else:
            slices = []
            for index in torch.arange(image.shape[-1]).split(options.batch):
                slices.append(slide(neighbours(image, index, context).to(device)).cpu())
            voxels = torch.cat(slices).movedim(0, -1).contiguous()
        return Prediction(voxels, torch.stack(told).amax(0) if told else None)
    finally:
        for module, mode in modes:
            module.training = mode


def together(
    members: Sequence[tuple[Prediction, Sequence[int] | None]], space: LabelSpace, gate: float | None
) -> Prediction:
    """Several models' predictions, each with the classes that it may speak for (None: all), as one.

    Voxels: `restrict`, then `merge`. A finding is the mean over the models that may speak for the class that it is
    about, or where it is about none, over all. Then the classes whose finding is below `gate` are emptied.
    """
    voxels = [
        found.voxels if classes is None else restrict(found.voxels, classes, space.exclusive)
        for found, classes in members
    ]
    merged = Prediction(merge(voxels, space.exclusive))
    told = [(found.findings, classes) for found, classes in members if found.findings is not None]
    if not told:
        return merged
    findings = []
    for f, about in enumerate(space.finding_of):
        speak = [p[f] for p, classes in told if classes is None or about is None or about in classes]
        findings.append(torch.stack(speak).mean() if speak else torch.tensor(float("nan")))
    merged = replace(merged, findings=torch.stack(findings))
    return merged if gate is None else gated(merged, space, gate)


def gated(found: Prediction, space: LabelSpace, gate: float) -> Prediction:
    """A prediction in which every class that a finding is about is empty where that finding is below `gate`. What it
    had goes to the background if classes are exclusive. A finding that is NaN (nobody speaks for it) empties nothing."""
    assert found.findings is not None
    about = zip(space.finding_of, found.findings.tolist(), strict=True)
    empty = {c for c, p in about if c is not None and p < gate}
    if not empty:
        return found
    kept = [c for c in space.foreground if c not in empty]
    return replace(found, voxels=restrict(found.voxels, kept, space.exclusive))


def restrict(probabilities: Tensor, classes: Sequence[int], exclusive: bool) -> Tensor:
    """Probabilities [C, *S] of a model that may speak for `classes` alone: what it gives to other foreground
    classes goes to the background if exclusive, and becomes 0 otherwise."""
    kept = torch.zeros_like(probabilities)
    for c in sorted(classes):
        kept[c] = probabilities[c]
    if exclusive:
        others = [c for c in range(1, len(probabilities)) if c not in classes]
        kept[0] = probabilities[[0, *others]].sum(0)
    return kept


def merge(members: Sequence[Tensor], exclusive: bool) -> Tensor:
    """Probabilities [C, *S] of several models as one.

    Exclusive: at a voxel where a member's largest probability is of the foreground, the member with the
    largest such probability decides; where there is none, the mean of all. Otherwise the largest per class.
    """
    if len(members) == 1:
        return members[0]
    if not exclusive:
        return torch.stack(list(members)).amax(0)
    merged = torch.stack(list(members)).mean(0)
    highest = torch.zeros_like(merged[0])
    for member in members:
        value, best = member.max(0)
        wins = (best > 0) & (value > highest)
        merged = torch.where(wins, member, merged)
        highest = torch.where(wins, value, highest)
    return merged
