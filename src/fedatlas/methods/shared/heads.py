"""The channels of heads that each tell an organ, or one of its lesions, from all the rest.

Where classes exclude each other every foreground class has a channel: of an organ it and its lesions together, of a lesion
the lesion. Where they overlap every class has one.

Shapes: B batch, C classes, H channels of all heads (C - 1 if exclusive, else C), *S spatial.
"""

import dataclasses

import torch
from torch import Tensor, nn

from fedatlas.core.labels import LabelSpace
from fedatlas.core.organs import complete, read_heads
from fedatlas.core.outputs import voxel_logits
from fedatlas.losses.heads import full_precision


def with_groups_of(net: nn.Module, space: LabelSpace) -> LabelSpace:
    """The label space with the groups of the net `organ_heads`, where `net` is or wraps one: its heads are of these organs, which
    its option `groups` may name otherwise than `labels.groups` does."""
    own = (m.groups for m in net.modules() if getattr(m, "by_organ", False) and hasattr(m, "groups"))
    return next((dataclasses.replace(space, groups=groups) for groups in own), space)


def head_space(space: LabelSpace) -> LabelSpace:
    """The channels of all heads as classes that overlap."""
    if not space.exclusive:
        return space
    return LabelSpace(space.names[1:], tuple(tuple(c - 1 for c in g) for g in space.groups), exclusive=False)


def heads(z: Tensor, space: LabelSpace) -> Tensor:
    """The heads [B, H, *S] of a net's logits z [B, C, *S], in full precision; the organ of a group of classes is the
    first that the federation names in it."""
    z = full_precision(z)
    return read_heads(z, complete(space.groups, len(space))) if space.exclusive else z


def heads_of(net: nn.Module, image: Tensor, space: LabelSpace) -> Tensor:
    """The heads of a net in evaluation mode."""
    return heads(voxel_logits(net(image)), space)


def head_known(known: Tensor, space: LabelSpace) -> Tensor:
    """[B, H] bool: whether the channel's class is annotated; known [B, C]."""
    return known[:, 1:] if space.exclusive else known


def head_target(target: Tensor, known: Tensor, space: LabelSpace) -> Tensor:
    """[B, H, *S] float: of an organ the voxels of it and its annotated lesions, of a lesion its own.

    target: [B, *S] class index if exclusive, else masks [B, H, *S], which stay as they are; known [B, C].
    """
    if not space.exclusive:
        return target
    own = [(target == c) & known[:, c].reshape(-1, *[1] * (target.dim() - 1)) for c in space.foreground]
    masks = list(own)
    for organ, *lesions in complete(space.groups, len(space)):
        for c in lesions:
            masks[organ - 1] = masks[organ - 1] | own[c - 1]
    return torch.stack(masks, 1).float()
