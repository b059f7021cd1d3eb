"""Who was in the training data: an attack on a model by a shadow of it, as pure functions of tensors.

Jiang et al., UFPS, Patterns 2024, Supplementary Note 10; Shokri et al., Membership inference attacks against machine
learning models, IEEE S&P 2017.

Shapes: N cases, C classes, *S the grid of a case, M maps, *G cells.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedatlas.core.errors import FederationError
from fedatlas.core.seeds import generator, isolated


@dataclass(frozen=True)
class Deal:
    """Who plays what, as places among the members and among the rest. seen: half of the members, which the attacker has,
    and hidden, the other half; sure and unsure: the 60 % of three quarters of the rest that the target is most certain of,
    and the 40 % that it is least certain of; outside: the last quarter."""

    seen: list[int]
    hidden: list[int]
    sure: list[int]
    unsure: list[int]
    outside: list[int]


def deal(members: int, uncertainty: Sequence[float], rng: torch.Generator) -> Deal:
    """Deals `members` cases of the target's training, and the rest by the target's uncertainty of each.

    Raises FederationError for fewer than two members or four others, as each part needs a case.
    """
    rest = len(uncertainty)
    if members < 2 or rest < 4:
        raise FederationError(
            f"membership: {members} cases of the target's training and {rest} others; at least 2 and 4 are needed"
        )
    order = torch.randperm(members, generator=rng).tolist()
    half = members // 2
    others = torch.randperm(rest, generator=rng).tolist()
    quarter = max(1, rest // 4)
    outside, pool = others[:quarter], others[quarter:]
    pool.sort(key=lambda n: (uncertainty[n], n))
    low = min(max(1, round(0.6 * len(pool))), len(pool) - 1)
    return Deal(
        sorted(order[:half]), sorted(order[half:]), sorted(pool[:low]), sorted(pool[low:]), sorted(outside)
    )


def uncertainty(p: Tensor, exclusive: bool) -> float:
    """Of probabilities [C, *S] of a case. Exclusive: the mean over all classes c of the mean entropy (over C) of the
    voxels that are predicted to be of c, 0 where there are none (UFPS, Eq. 6); otherwise the mean over classes and voxels
    of the entropy of a yes or no."""
    p = p.double()
    if not exclusive:
        return float(-(torch.xlogy(p, p) + torch.xlogy(1 - p, 1 - p)).mean())
    entropy = -torch.xlogy(p, p).mean(0)
    hard = F.one_hot(p.argmax(0), len(p)).movedim(-1, 0).double()
    axes = tuple(range(1, p.dim()))
    return float(((entropy * hard).sum(axes) / (hard.sum(axes) + 1)).mean())


def evidence(p: Tensor, truth: Tensor, classes: Sequence[int], *, cells: int, image: Tensor | None) -> Tensor:
    """What the attack sees of a case, [M, *G] float32: of each of `classes` its probability, its truth and how far they
    are apart, and the image's channels where it is given, each averaged over at most `cells` cells along every axis.

    p, truth: [C, *S], or [C] of a whole image; image: [I, *S].
    """
    p, truth = p.float(), truth.float()
    chosen = list(classes)
    maps = torch.cat([p[chosen], truth[chosen], (p[chosen] - truth[chosen]).abs()])
    if maps.dim() == 1:
        size = (1, 1) if image is None else tuple(image.shape[1:])
        maps = maps[:, None, None].expand(-1, *size)
    if image is not None:
        maps = torch.cat([maps, image.float()])
    grid = [min(length, cells) for length in maps.shape[1:]]
    pool = F.adaptive_avg_pool2d if len(grid) == 2 else F.adaptive_avg_pool3d
    return pool(maps[None], grid)[0]  # type: ignore[arg-type]


class AttackNet(nn.Module):
    """Two convolutions, a mean over all cells, and a logit for "member": [B, M, *G] -> [B]."""

    def __init__(self, maps: int, axes: int, width: int = 16) -> None:
        super().__init__()
        conv: type[nn.Conv2d] | type[nn.Conv3d] = nn.Conv2d if axes == 2 else nn.Conv3d
        self.first = conv(maps, width, 3, padding=1)
        self.second = conv(width, width, 3, padding=1)
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.leaky_relu(self.first(x), 0.1)
        if max(hidden.shape[2:]) >= 8:
            pool = F.avg_pool2d if hidden.dim() == 4 else F.avg_pool3d
            kernel = [min(2, length) for length in hidden.shape[2:]]
            hidden = pool(hidden, kernel, ceil_mode=True)
        hidden = F.leaky_relu(self.second(hidden), 0.1)
        return self.head(hidden.flatten(2).mean(2))[:, 0]


@dataclass(frozen=True)
class Attack:
    """A trained attack: mean and deviation of its input maps, and its net."""

    mean: Tensor
    scale: Tensor
    net: AttackNet

    def scores(self, maps: Sequence[Tensor]) -> list[float]:
        """The probability that each case was a member."""
        self.net.eval()
        with torch.no_grad():
            return [float(self.net(((case - self.mean) / self.scale)[None])[0].sigmoid()) for case in maps]


def train_attack(
    members: Sequence[Tensor],
    others: Sequence[Tensor],
    parts: tuple[str | int, ...],
    *,
    steps: int,
    batch: int = 16,
    lr: float = 3e-3,
) -> Attack:
    """An attack that tells `members` from `others` (maps [M, *G] each), by cross-entropy in which both weigh the same.

    Cases may differ in size; a step takes `batch` of them. parts: all that is random follows from them.
    """
    every = [*members, *others]
    bits = torch.tensor([1.0] * len(members) + [0.0] * len(others))
    weight = torch.where(bits > 0, len(every) / (2 * len(members)), len(every) / (2 * len(others)))
    # every case counts the same, whatever its size
    mean = torch.stack([case.flatten(1).mean(1) for case in every]).mean(0)
    square = torch.stack([case.flatten(1).square().mean(1) for case in every]).mean(0)
    scale = (square - mean.square()).clamp(min=1e-8).sqrt()
    axes = every[0].dim() - 1
    shape = (-1, *[1] * axes)
    with isolated(*parts, "attack"):
        net = AttackNet(len(mean), axes)
    attack = Attack(mean.view(shape), scale.view(shape), net)
    ready = [(case - attack.mean) / attack.scale for case in every]
    optimizer = torch.optim.AdamW(net.parameters(), lr=lr, weight_decay=1e-2)
    rng = generator(*parts, "attack", "order")
    queue: list[int] = []
    with torch.enable_grad():
        for step in range(steps):
            if len(queue) < min(batch, len(every)):
                queue += torch.randperm(len(every), generator=rng).tolist()
            now, queue = queue[:batch], queue[batch:]
            for group in optimizer.param_groups:
                group["lr"] = lr * 0.5 * (1 + math.cos(math.pi * step / steps))
            alike: dict[torch.Size, list[int]] = {}
            for n in now:
                alike.setdefault(ready[n].shape, []).append(n)
            logits = torch.cat([net(torch.stack([ready[n] for n in some])) for some in alike.values()])
            chosen = [n for some in alike.values() for n in some]
            loss = F.binary_cross_entropy_with_logits(logits, bits[chosen], weight[chosen])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
    return attack


def verdict(members: Sequence[float], others: Sequence[float], threshold: float = 0.5) -> dict[str, float]:
    """How well scores tell members from others: accuracy and F1 of either class, their means, and AUROC.

    Accuracy of a class is the share of its cases that are told right; F1 of a class without a hit is 0.
    """
    hit, miss = sum(s > threshold for s in members), sum(s <= threshold for s in members)
    wrong, right = sum(s > threshold for s in others), sum(s <= threshold for s in others)

    def f1(hits: int, missed: int, false: int) -> float:
        return 2 * hits / (2 * hits + missed + false) if hits else 0.0

    scores = {
        "accuracy_member": hit / len(members),
        "accuracy_other": right / len(others),
        "f1_member": f1(hit, miss, wrong),
        "f1_other": f1(right, wrong, miss),
    }
    above = sum((m > o) + 0.5 * (m == o) for m in members for o in others)
    return scores | {
        "accuracy": (scores["accuracy_member"] + scores["accuracy_other"]) / 2,
        "f1": (scores["f1_member"] + scores["f1_other"]) / 2,
        "auroc": above / (len(members) * len(others)),
    }
