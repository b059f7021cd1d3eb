"""Sharpness-aware steps, and the sparse masks of UFPS.

SAM: Foret, Kleiner, Mobahi, Neyshabur. Sharpness-aware minimization for efficiently improving generalization.
ICLR 2021. ASAM: Kwon, Kim, Park, Choi. ASAM: adaptive sharpness-aware minimization for scale-invariant learning of
deep neural networks. ICML 2021. In federated learning: Caldarola, Caputo, Ciccone. Improving generalization in
federated learning by seeking flat minima. ECCV 2022. Sparse masks (sUSAM) and the equation numbers: Jiang, Ma, Zeng,
Ying. UFPS: a unified framework for partially annotated federated segmentation in heterogeneous data distribution.
Patterns 2024.

    ascent     g~ = grad F(w; x~),  eps = rho T_w^2 g~ / (||T_w g~|| + tiny),  T_w = |w| + eta or 1
    descent    g = grad F(w + M eps; x),  then a step of the base optimizer with g from w         Eq. (14)
    local      M_L = the T_L share of the parameters with the largest |g~|
    momentum   G_mo <- alpha G_mo + (1 - alpha) g~; a site sends M_i = top T_L of |G_mo|           Eq. (11)
    global     M_G = 0 where sum_i M_i is 0 or N, else 1: where the N sites disagree              Eq. (12)
    extra      |M_E| = min(T_G |g~|, |G_N|), drawn from G_N = {M_L = 0, M_G = 1};  M = M_L or M_E   Eq. (13)

x~ is x in SAM and ASAM, a strong augmentation of x in UFPS. The norm is that of the whole gradient; the mask comes
after it. SAM is T_w = 1 for every parameter; M = 1 everywhere is ASAM, M = 0 or rho = 0 the base optimizer.

Masks are boolean, by the names of parameters.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from fedatlas.core.batch import Batch
from fedatlas.core.errors import FederationError, NameMismatch, WireError
from fedatlas.core.options import option, options
from fedatlas.core.tensors import Tensors, Tree, require_same
from fedatlas.learning.loop import Loss, Stepper, total

Masks = dict[str, Tensor]
"""Boolean tensors of the shapes of the parameters, by their names."""


@options
class Sharpness:
    """How far, and along what, the weights move before the gradient of a sharpness-aware step is taken."""

    rho: float = option(0.7, "rho: radius of the perturbation.", ge=0)
    eta: float = option(1e-3, "eta: added to |w| in T_w.", ge=0)
    tiny: float = option(
        1e-8, "Added to the norm of the gradient; FedSAM's code has 1e-16, UFPS's 1e-8.", ge=1e-30
    )
    scaled: Literal["name", "layers", "none"] = option(
        "name",
        "For which parameters T_w is |w| + eta: name, the weight of every module, that of normalisation too, as published "
        "code finds it by its name; layers, the weights of convolutions and linear layers; none, SAM.",
    )
    direction: Literal["gradient", "random"] = option(
        "gradient", "random: a Gaussian direction, as long as the perturbation along the gradient."
    )
    share: float = option(
        1.0,
        "The share in a step of the gradient at the perturbed weights; the rest is that at the weights themselves.",
        ge=0,
        le=1,
    )


@options
class Sparsity:
    """The masks of sUSAM. The defaults of score, draw and history are the paper's; their other values are those of
    the published code."""

    top: float = option(0.4, "T_L: share of the parameters in a local mask.", ge=0, le=1)
    extra: float = option(0.1, "T_G: largest share of the parameters in the extra mask.", ge=0, le=1)
    alpha: float = option(0.9, "alpha: what the momentum of the gradient keeps of itself.", ge=0, le=1)
    score: Literal["gradient", "momentum"] = option(
        "gradient",
        "What ranks the parameters in the local mask: gradient, |g~|; momentum, the value of G_mo, which then gathers "
        "|g~|; a site's first round ranks by |g~| in both.",
    )
    draw: Literal["all", "tensor"] = option(
        "all", "Whether the extra mask is drawn from all parameters at once, or of each tensor its own T_G."
    )
    history: Literal["merged", "momentum"] = option(
        "merged",
        "The mask of rounds without an update: merged, the last M, local and extra; momentum, the top T_L of G_mo.",
    )


# ------------------------------------------------------------------------------------------------------ perturbation


def scaled_names(net: nn.Module, by: Literal["name", "layers", "none"]) -> frozenset[str]:
    """The parameters whose T_w is |w| + eta; see `Sharpness.scaled`."""
    if by == "none":
        return frozenset()
    scaled = {
        id(getattr(module, kernel, None))
        for module in net.modules()
        if by == "name" or isinstance(module, nn.Linear | nn.modules.conv._ConvNd)
        for kernel in ("weight", "in_proj_weight")  # the second: of attention
    }
    return frozenset(name for name, p in net.named_parameters() if id(p) in scaled)


@torch.no_grad()
def perturbation(
    weights: Mapping[str, Tensor], gradient: Mapping[str, Tensor], how: Sharpness, scaled: Collection[str]
) -> Tensors:
    """eps = rho T_w^2 g / (||T_w g|| + tiny), the norm over all tensors together; in ASAM's metric its length is rho.

    scaled: names of the parameters with T_w = |w| + eta; T_w is 1 for the others. `how.direction` is not looked at.
    Raises NameMismatch unless gradient and weights agree in names, shapes and dtypes.
    """
    require_same(weights, gradient, asked="the perturbation of a gradient")
    scale = {name: w.abs().add_(how.eta) for name, w in weights.items() if name in scaled}
    eps = {name: scale[name] * g if name in scale else g.clone() for name, g in gradient.items()}
    factor = how.rho / (_norm(eps) + how.tiny)
    for name, value in eps.items():
        if name in scale:
            value.mul_(scale.pop(name))
        value.mul_(factor.to(value.device))
    return eps


@torch.no_grad()
def random_direction(eps: Mapping[str, Tensor], rng: torch.Generator) -> Tensors:
    """A Gaussian direction over all tensors together, of the length of `eps`. rng: a CPU generator."""
    drawn = {name: torch.randn(value.shape, generator=rng).to(value) for name, value in eps.items()}
    factor = _norm(eps) / _norm(drawn).clamp_min(torch.finfo(torch.float32).tiny)
    return {name: value.mul_(factor.to(value)) for name, value in drawn.items()}


@torch.no_grad()
def masked(eps: Mapping[str, Tensor], mask: Mapping[str, Tensor]) -> Tensors:
    """M eps, exactly 0 where the mask is False. Raises NameMismatch for a mask of other names or shapes, or one that
    is not boolean."""
    _require_masks(mask, eps, asked="the mask of a perturbation")
    return {name: value.masked_fill(~mask[name].to(value.device), 0) for name, value in eps.items()}


def _norm(values: Mapping[str, Tensor]) -> Tensor:
    if not values:
        return torch.zeros(())
    norms = [
        torch.linalg.vector_norm(value, dtype=torch.promote_types(value.dtype, torch.float32))
        for value in values.values()
    ]
    return torch.linalg.vector_norm(torch.stack([norm.to(norms[0]) for norm in norms]))


def _require_masks(mask: Mapping[str, Tensor], like: Mapping[str, Tensor], *, asked: str) -> None:
    expected = {
        name: torch.empty(value.shape, dtype=torch.bool, device="meta") for name, value in like.items()
    }
    require_same(expected, mask, asked=asked)


RATIOS = {
    "ratio_low": 0.1,
    "ratio_quarter": 0.25,
    "ratio_half": 0.5,
    "ratio_three_quarters": 0.75,
    "ratio_high": 0.9,
}
"""The quantiles of r, Eq. (10), that are logged."""
FARTHEST = 20.0
"""What stands for an r beyond it, on either side."""


@torch.no_grad()
def ratios(plain: Mapping[str, Tensor], perturbed: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """How gradients at perturbed weights differ from those at the weights themselves, Eq. (10):
    r = log |(g - g_plain) / g_plain| of every number of all tensors together.

    Returns "steeper", the share of numbers with r > 0, and the quantiles RATIOS of r, each of the nearest rank. A number
    that is 0 in both gradients counts as unchanged. Raises NameMismatch for gradients of different form.
    """
    require_same(plain, perturbed, asked="the ratio of gradients")
    base = _flat(plain).float()
    change = (_flat(perturbed).float() - base).abs()
    r = (change.log() - base.abs().log()).nan_to_num(-FARTHEST).clamp(-FARTHEST, FARTHEST)
    ordered = r.sort().values
    found = {"steeper": (r > 0).float().mean()}
    return found | {name: ordered[round(q * (len(r) - 1))] for name, q in RATIOS.items()}


class Sharp:
    """Steps whose gradient is taken at w + eps: SAM, ASAM, and with masks sUSAM.

        f, g, eps = sharp.ascend(loss, ascent)      g~ and eps at w, of what the ascent sees
        sharp.step(loss, descent, eps, M)           a step from w by the gradient at w + M eps of what the descent sees

    by: the optimizer, whose parameters alone are perturbed. rng: a CPU generator, for `how.direction` random. measure:
    whether a step also tells the `ratios` of its gradient, before clipping, to that of the descent's batch at the weights
    themselves; one more pass, which changes no weight.

    Buffers, as running statistics, are those of the descent alone. A net with dropout draws for both passes.

    Raises FederationError if a random direction is asked for without `rng`, and for `measure` with fp16.
    """

    def __init__(
        self, by: Stepper, how: Sharpness, *, rng: torch.Generator | None = None, measure: bool = False
    ) -> None:
        if measure and by.local.precision == "fp16":
            raise FederationError(
                "sharpness: ratios of gradients are asked for, and precision is fp16, which loses small ones; take bf16 or "
                "float32"
            )
        if how.direction == "random" and rng is None:
            raise FederationError(
                "sharpness: direction is random, but the step was given no generator; give it one, or use gradient"
            )
        self.by, self.how, self.rng, self.measure = by, how, rng, measure
        self.scaled = scaled_names(by.net, how.scaled)

    def ascend(self, loss: Loss, batch: Batch) -> tuple[Tensor, Tensors, Tensors]:
        """The loss at w, detached; its gradient g~, clipped as that of a step is, which changes the masks that are made of it,
        eps hardly; and eps. Both are of all parameters, g~ 0 where there is no gradient; {} where it overflows in fp16."""
        value, gradient = self._at_weights(loss, batch)
        if not gradient:
            return value, {}, {}
        self.by.clip()
        eps = perturbation(self.by.named, gradient, self.how, self.scaled)
        if self.how.direction == "random":
            assert self.rng is not None
            eps = random_direction(eps, self.rng)
        return value, gradient, eps

    def step(
        self, loss: Loss, batch: Batch, eps: Tensors, mask: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """One step of the optimizer from w, by the gradient at w + M eps. eps: as `ascend` gives it; {}: there is none.
        mask: M; None: 1 everywhere. Returns the loss at w + M eps, "loss", its terms, and the ratios, detached. Raises as
        `masked`."""
        plain: Tensors = {}
        if self.how.share < 1 or self.measure:
            _, plain = self._at_weights(loss, batch)
        with self.perturbed(eps if mask is None else masked(eps, mask)):
            with self.by.autocast():
                value = loss(self.by.net, batch)
            g = self.by.gradients(value)
        told = {"loss": total(value)} | (value if isinstance(value, dict) else {})
        told = {name: number.detach() for name, number in told.items()}
        if self.measure:
            told |= ratios(plain, self._filled(g))
        if plain and self.how.share < 1:
            for name, own in g.items():
                own.mul_(self.how.share).add_(plain[name], alpha=1 - self.how.share)
        self.by.move(g)
        return told

    @contextmanager
    def perturbed(self, eps: Tensors) -> Iterator[None]:
        """Within it the weights are w + eps; at its end they are w again, exactly."""
        w = {name: self.by.named[name] for name in eps}
        kept = {name: p.detach().clone() for name, p in w.items()}
        with torch.no_grad():
            for name, p in w.items():
                p.add_(eps[name])
        try:
            yield
        finally:
            with torch.no_grad():
                for name, p in w.items():
                    p.copy_(kept[name])

    def _at_weights(self, loss: Loss, batch: Batch) -> tuple[Tensor, Tensors]:
        """The loss at w and its gradient, not clipped; the buffers of the net stay as they are."""
        buffers = [(buffer, buffer.clone()) for buffer in self.by.net.buffers()]
        with self.by.autocast():
            value = loss(self.by.net, batch)
        gradient = self.by.gradients(value)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        return total(value).detach(), self._filled(gradient) if gradient else {}

    def _filled(self, gradient: Tensors) -> Tensors:
        return {
            name: gradient[name].detach() if name in gradient else torch.zeros_like(p)
            for name, p in self.by.named.items()
        }


# ------------------------------------------------------------------------------------------------------------- masks


@torch.no_grad()
def top(scores: Mapping[str, Tensor], share: float, *, by_value: bool = False) -> Masks:
    """The int(share N) largest |scores| of the N numbers of all tensors together; of equal ones those that come
    first, in the order of the tensors. by_value: rank by the scores themselves, so that negative ones come last.

    Raises FederationError for a share outside 0 to 1, FloatingPointError for a score that is not finite.
    """
    if not 0 <= share <= 1:
        raise FederationError(f"a mask of the top {share} of all parameters; allowed: a share of 0 to 1")
    shapes = {name: score.shape for name, score in scores.items()}
    flat = _flat(scores)
    flat = flat if by_value else flat.abs()
    if not bool(torch.isfinite(flat).all()):
        raise FloatingPointError(
            "a mask is ranked by scores of which some are not finite; lower the learning rate"
        )
    count = int(share * flat.numel())
    if count == 0:
        return _split(torch.zeros_like(flat, dtype=torch.bool), shapes)
    least = torch.topk(flat, count, sorted=False).values.min()
    chosen = flat > least
    ties = (flat == least).nonzero()[:, 0]
    chosen[ties[: count - int(chosen.sum())]] = True
    return _split(chosen, shapes)


@torch.no_grad()
def momentum(old: Mapping[str, Tensor], gradient: Mapping[str, Tensor], alpha: float) -> Tensors:
    """alpha G_mo + (1 - alpha) g, Eq. (11), on the devices of the gradient. Raises NameMismatch if they differ in
    form."""
    require_same(gradient, old, asked="the momentum of a gradient")
    return {name: old[name].to(g.device).mul(alpha).add_(g, alpha=1 - alpha) for name, g in gradient.items()}


@torch.no_grad()
def disagreement(masks: Iterable[Mapping[str, Tensor]]) -> Masks:
    """M_G, Eq. (12): True where some of the sites' masks are True and some False. They are read one at a time.

    Raises NameMismatch if they differ in names or shapes or are not boolean, FederationError if there are none.
    """
    some: Masks = {}
    every: Masks = {}
    count = 0
    for count, mask in enumerate(masks, 1):
        if count == 1:
            _require_masks(mask, mask, asked="the global mask: mask 1")
            some, every = dict(mask), dict(mask)
            continue
        require_same(some, mask, asked=f"the global mask: mask {count}")
        some = {name: value | mask[name] for name, value in some.items()}
        every = {name: value & mask[name] for name, value in every.items()}
    if count == 0:
        raise FederationError("the global mask: no site sent a mask; at least one is needed")
    return {name: value & ~every[name] for name, value in some.items()}


@torch.no_grad()
def extra_mask(
    local: Mapping[str, Tensor],
    disagree: Mapping[str, Tensor],
    share: float,
    rng: torch.Generator,
    *,
    draw: Literal["all", "tensor"] = "all",
) -> Masks:
    """M_E, Eq. (13): min(int(share N), |G_N|) positions drawn without replacement from G_N, those outside the local
    mask in which the sites disagree. draw: from all tensors together, N their numbers; or from each by itself, where
    one of fewer than 1/share numbers gets none. rng: a CPU generator.

    Raises NameMismatch if the masks differ in form, FederationError for a share outside 0 to 1.
    """
    if not 0 <= share <= 1:
        raise FederationError(f"an extra mask of {share} of all parameters; allowed: a share of 0 to 1")
    _require_masks(local, local, asked="the extra mask")
    require_same(local, disagree, asked="the extra mask: the global mask")
    made: Masks = {}
    for names in [list(local)] if draw == "all" else [[name] for name in local]:
        free = _flat({name: disagree[name].to(local[name].device) & ~local[name] for name in names})
        places = free.nonzero()[:, 0]
        size = min(int(share * free.numel()), len(places))
        drawn = torch.randperm(len(places), generator=rng)[:size].to(places.device)
        chosen = torch.zeros_like(free)
        chosen[places[drawn]] = True
        made |= _split(chosen, {name: local[name].shape for name in names})
    return made


def either(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Masks:
    """The union of two masks. Raises NameMismatch if they differ in form or are not boolean."""
    _require_masks(a, a, asked="the union of two masks")
    require_same(a, b, asked="the union of two masks")
    return {name: value | b[name].to(value.device) for name, value in a.items()}


def _flat(values: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([value.reshape(-1) for value in values.values()]) if values else torch.zeros(0)


def _split(flat: Tensor, shapes: Mapping[str, torch.Size]) -> Masks:
    pieces = flat.split([shape.numel() for shape in shapes.values()])
    return {name: piece.reshape(shape) for (name, shape), piece in zip(shapes.items(), pieces, strict=True)}


class SparseMask:
    """A site's masks in one round of sUSAM (Alg. 3, lines 19 to 27, and 39).

    kept: what `memory` gave after the site's last round of sUSAM; None or {}: this is its first, in which every batch
    gives M = M_L and G_mo = g~. update: whether masks and momentum follow each batch of this round (r mod r_fre = 1);
    otherwise M stays as it was and G_mo gathers nothing. Without effect in the first round. disagree: M_G; None: no
    site has sent a mask yet, and there is no extra one. rng: a CPU generator.

    Raises NameMismatch if the saved masks belong to another net.
    """

    def __init__(
        self,
        how: Sparsity,
        kept: Tree,
        disagree: Masks | None,
        *,
        update: bool,
        rng: torch.Generator,
    ) -> None:
        held: Any = kept or {}
        self.how, self.disagree, self.update, self.rng = how, disagree, update, rng
        self.first = not held
        self.G_mo: Tensors = held.get("momentum", {})
        self.M: Masks = unpack_bits(held["mask"], self.G_mo) if held else {}
        if held and not update and how.history == "momentum":
            self.M = self._top_momentum()

    def __call__(self, gradient: Tensors) -> Masks:
        """M for a batch whose ascent has this gradient; of {}, as of an overflow, {}."""
        how = self.how
        if not gradient:
            return {}
        if self.first:  # line 19
            self.M = top(gradient, how.top)  # line 20
            self.G_mo = dict(gradient)  # line 21
        elif self.update:  # line 22
            by_momentum = how.score == "momentum"
            seen = {name: g.abs() for name, g in gradient.items()} if by_momentum else gradient
            self.G_mo = momentum(self.G_mo, seen, how.alpha)  # line 24
            M_L = self._top_momentum() if by_momentum else top(gradient, how.top)  # line 23
            self.M = M_L
            if self.disagree is not None:
                M_E = extra_mask(M_L, self.disagree, how.extra, self.rng, draw=how.draw)
                self.M = either(M_L, M_E)
        return self.M  # line 26: else the last one

    def memory(self) -> dict[str, Tree]:
        """{"momentum": G_mo, "mask": the last M, packed}, on the CPU, to be kept for the next round; {} where no
        gradient was seen."""
        if not self.G_mo:
            return {}
        kept: dict[str, Tree] = {name: value.cpu() for name, value in self.G_mo.items()}
        return {"momentum": kept, "mask": dict(pack_bits(self.M))}

    def sent(self) -> dict[str, Tensor]:
        """M_i, the top T_L of |G_mo|, packed: one bit for each parameter (line 39); {} where no gradient was seen."""
        return pack_bits(self._top_momentum()) if self.G_mo else {}

    def _top_momentum(self) -> Masks:
        return top(self.G_mo, self.how.top, by_value=self.how.score == "momentum")


def pack_bits(masks: Mapping[str, Tensor]) -> Tensors:
    """Masks with eight positions in a byte: uint8 [ceil(n / 8)] by name, the first position in the lowest bit, on the
    CPU. Raises NameMismatch for a mask that is not boolean."""
    _require_masks(masks, masks, asked="packing masks")
    return {
        name: torch.from_numpy(np.packbits(mask.detach().cpu().reshape(-1).numpy(), bitorder="little"))
        for name, mask in masks.items()
    }


def unpack_bits(packed: Tree, like: Mapping[str, Tensor]) -> Masks:
    """The masks that `pack_bits` packed, of the names and shapes of `like`, on the CPU.

    `packed` may come from elsewhere and nothing in it is trusted: raises NameMismatch for other names, WireError for
    all else that `pack_bits` cannot have made.
    """
    if not isinstance(packed, dict):
        raise WireError(f"unpacking masks: got a {type(packed).__name__}, expected a dict of packed masks")
    if set(packed) != set(like):
        missing = sorted(set(like) - set(packed))
        extra = sorted(map(str, set(packed) - set(like)))
        raise NameMismatch(
            f"unpacking masks: {len(packed)} masks for {len(like)} parameters; missing: "
            f"{', '.join(missing[:6]) or 'none'}; not known: {', '.join(extra[:6])[:200] or 'none'}"
        )
    return {name: _unpacked(packed[name], name, value.shape) for name, value in like.items()}


def _unpacked(packed: Any, name: str, shape: torch.Size) -> Tensor:
    numel = shape.numel()
    size = math.ceil(numel / 8)
    if not isinstance(packed, Tensor) or packed.dtype != torch.uint8 or packed.shape != (size,):
        got = f"{packed.dtype}{list(packed.shape)}" if isinstance(packed, Tensor) else type(packed).__name__
        raise WireError(f"unpacking masks: {name} is {got}, expected torch.uint8[{size}]")
    bits = np.unpackbits(packed.detach().cpu().numpy(), bitorder="little")
    if bits[numel:].any():
        raise WireError(f"unpacking masks: {name} has bits set beyond its {numel} positions")
    return torch.from_numpy(bits[:numel]).bool().reshape(shape)
