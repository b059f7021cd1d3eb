"""Heads per organ and logits of exclusive classes, each read as the other: pure functions of tensors.

Shapes: B batch, C classes with the background, *S spatial.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from fedatlas.core.errors import FederationError

Groups = Sequence[Sequence[int]]
"""Every foreground class 1..C-1 once: for each organ its class, then those of its lesions."""


def merge_heads(h: Tensor, groups: Groups) -> Tensor:
    """Logits z [B, C, *S] of exclusive classes from the heads h [B, C - 1, *S] (class c is channel c - 1).

    The largest z is the merge of the heads: background where no organ's logit is above 0 (probability 0.5), else the
    organ with the largest; within it the lesion with the largest logit if that is above 0. `read_heads` gives h
    back, and its gradient through both is that of the identity. Of heads in half precision z is float32, as a lesion's logit
    would be rounded to the steps of its organ's.
    """
    if h.dtype in (torch.float16, torch.bfloat16):
        h = h.float()
    z: list[Tensor] = [torch.zeros_like(h[:, 0])] * (h.shape[1] + 1)
    for organ, *lesions in groups:
        z[organ] = h[:, organ - 1]
        if lesions:
            inside = [h[:, c - 1] for c in lesions]
            z[organ] = z[organ] - torch.stack(inside).amax(0).relu()
            for c, lesion in zip(lesions, inside, strict=True):
                z[c] = z[organ] + lesion
    return torch.stack(z, 1)


def read_heads(z: Tensor, groups: Groups) -> Tensor:
    """The heads [B, C - 1, *S] that logits z [B, C, *S] of exclusive classes stand for: of an organ the largest logit
    among it and its lesions, less that of the background; of a lesion its logit less that of its organ."""
    h: list[Tensor] = [z[:, 0]] * (z.shape[1] - 1)
    for organ, *lesions in groups:
        largest = torch.stack([z[:, c] for c in (organ, *lesions)]).amax(0) if lesions else z[:, organ]
        h[organ - 1] = largest - z[:, 0]
        for c in lesions:
            h[c - 1] = z[:, c] - z[:, organ]
    return torch.stack(h, 1)


def check_groups(groups: Sequence[Sequence[int]], classes: int, *, what: str) -> None:
    """Raises FederationError, beginning with `what`, for a group that is empty or holds the background, an unknown class
    or a class of another group."""
    members = [c for group in groups for c in group]
    if not all(groups) or len(set(members)) < len(members) or not set(members) <= {*range(1, classes)}:
        raise FederationError(
            f"{what}: groups are {[list(group) for group in groups]}; each holds one class or more of 1 to "
            f"{classes - 1}, and no class is in two"
        )


def complete(groups: Iterable[Sequence[int]], classes: int) -> tuple[tuple[int, ...], ...]:
    """The groups, then every foreground class in none of them as an organ without lesions."""
    given = tuple(tuple(group) for group in groups)
    inside = {c for group in given for c in group}
    return (*given, *((c,) for c in range(1, classes) if c not in inside))
