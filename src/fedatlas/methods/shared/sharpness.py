"""Sharpness-aware steps, the sparse masks of UFPS, and stochastic weight averaging.

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
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from fedatlas.core import tensors
from fedatlas.core.batch import Batch
from fedatlas.core.errors import FederationError, NameMismatch, WireError
from fedatlas.core.options import option, options
from fedatlas.core.tensors import Tensors, Tree, require_same
from fedatlas.learning.loop import Local, Loss, Step, autocast

Masks = dict[str, Tensor]
"""Boolean tensors of the shapes of the parameters, by their names."""

Views = Callable[[Batch], tuple[Batch, Batch]]
"""What the ascent and the descent see of a batch."""


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


class AscentStep(Step):
    """A step whose gradient is taken at w + eps: SAM, ASAM, and with `mask` sUSAM.

    views: what the ascent and the descent see of a batch; None: both see the batch. mask: M, of the gradient of the
    ascent (every parameter of the optimizer, zeros where it has none); None: 1 everywhere. rng: a CPU generator, for
    `how.direction` random.

    Only parameters of the optimizer that are in the net are perturbed, and they are put back exactly before the
    optimizer moves them. Buffers, as running statistics, are those of the descent alone. The gradient of the ascent is
    clipped as that of the descent is: it changes what `mask` is given, eps hardly. With fp16 an ascent whose gradient
    overflows lowers the loss scale and perturbs nothing; `mask` does not see it. A net with dropout draws for both
    passes. "ascent", in what a step returns, is the loss of the ascent; all else is of the descent.

    gradients: whether a step also returns `ratios` of its gradient at the perturbed weights, before clipping, and that of
    the descent's batch at the weights themselves; one more pass, which changes no weight.

    Raises FederationError if a random direction is asked for without `rng`, and for `gradients` with fp16.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        local: Local,
        device: torch.device,
        how: Sharpness,
        *,
        views: Views | None = None,
        mask: Callable[[Tensors], Masks] | None = None,
        rng: torch.Generator | None = None,
        gradients: bool = False,
    ) -> None:
        super().__init__(optimizer, local, device)
        if gradients and local.precision == "fp16":
            raise FederationError(
                "sharpness: ratios of gradients are asked for, and precision is fp16, which loses small ones; take bf16 or "
                "float32"
            )
        if how.direction == "random" and rng is None:
            raise FederationError(
                "sharpness: direction is random, but the step was given no generator; give it one, or use gradient"
            )
        self.how, self.views, self.mask, self.rng, self.gradients = how, views, mask, rng, gradients
        self.kept: list[tuple[Tensor, Tensor]] = []
        self.plain: list[tuple[Tensor, Tensor]] = []
        self.own: dict[str, Tensor] = {}
        self.unclipped: Tensors = {}
        self.measured: dict[str, Tensor] = {}

    def __call__(self, net: nn.Module, loss: Loss, batch: Batch) -> dict[str, Tensor]:
        """Takes one step; returns the detached loss of the descent, its terms if it has several, and "ascent"."""
        ascent, descent = self.views(batch) if self.views else (batch, batch)
        first, gradient = self._ascend(net, loss, ascent)
        if self.how.share < 1 or self.gradients:
            plain, own = self._ascend(net, loss, descent, keep=self.gradients)[1] or {}, self._own(net)
            if self.how.share < 1:
                self.plain = [(own[name], value) for name, value in plain.items()]
            if self.gradients:
                self.own = own
        if gradient is not None:
            self._perturb(net, gradient)
        del gradient
        try:
            return super().__call__(net, loss, descent) | {"ascent": first} | self.measured
        finally:
            self._restore()

    def apply(self) -> None:
        self._restore()
        if self.gradients:
            self.measured = ratios(self.unclipped, _gradients(self.own))
            self.own, self.unclipped = {}, {}
        share, scale = self.how.share, self.scaler.get_scale()
        for parameter, plain in self.plain:
            if parameter.grad is not None:
                parameter.grad.mul_(share).add_(plain, alpha=(1 - share) * scale)
        self.plain = []
        super().apply()

    def _ascend(
        self, net: nn.Module, loss: Loss, batch: Batch, *, keep: bool = False
    ) -> tuple[Tensor, Tensors | None]:
        """The loss at w and the clipped gradient, None if the gradient overflowed. keep: also keep the
        gradient without clipping."""
        buffers = [(buffer, buffer.clone()) for buffer in net.buffers()]
        with autocast(self.local, self.device):
            value = loss(net, batch)
        total = sum(value.values()) if isinstance(value, dict) else value
        assert isinstance(total, Tensor)
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(total).backward()
        self.scaler.unscale_(self.optimizer)
        if self.scaler.is_enabled():
            self.scaler.update()
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        held = [p.grad for p in self.parameters if p.grad is not None]
        if self.scaler.is_enabled() and not all(bool(torch.isfinite(gradient).all()) for gradient in held):
            return total.detach(), None
        if keep:
            self.unclipped = {name: g.clone() for name, g in _gradients(self._own(net)).items()}
        if self.local.clip is not None:
            nn.utils.clip_grad_norm_(self.parameters, self.local.clip)
        return total.detach(), _gradients(self._own(net))

    @torch.no_grad()
    def _perturb(self, net: nn.Module, gradient: Tensors) -> None:
        own = self._own(net)
        eps = perturbation(own, gradient, self.how, scaled_names(net, self.how.scaled))
        if self.how.direction == "random":
            assert self.rng is not None
            eps = random_direction(eps, self.rng)
        if self.mask is not None:
            eps = masked(eps, self.mask(gradient))
        self.kept = [(p, p.detach().clone()) for p in own.values()]
        for name, p in own.items():
            p.add_(eps[name])

    @torch.no_grad()
    def _restore(self) -> None:
        for parameter, before in self.kept:
            parameter.copy_(before)
        self.kept = []

    def _own(self, net: nn.Module) -> dict[str, Tensor]:
        ids = {id(p) for p in self.parameters}
        return {name: p for name, p in net.named_parameters() if id(p) in ids}


def _gradients(parameters: Mapping[str, Tensor]) -> Tensors:
    """The gradients that parameters hold, zeros where there is none."""
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.detach() for name, p in parameters.items()
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
    """A site's masks in one round of sUSAM: the `mask` of an `AscentStep` (Alg. 3, lines 18 to 27 and 39).

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
        """M for a batch whose ascent has this gradient."""
        how = self.how
        if self.first:
            self.G_mo = dict(gradient)
            self.M = top(gradient, how.top)
        elif self.update:
            by_momentum = how.score == "momentum"
            seen = {name: g.abs() for name, g in gradient.items()} if by_momentum else gradient
            self.G_mo = momentum(self.G_mo, seen, how.alpha)
            local = self._top_momentum() if by_momentum else top(gradient, how.top)
            self.M = local
            if self.disagree is not None:
                self.M = either(local, extra_mask(local, self.disagree, how.extra, self.rng, draw=how.draw))
        return self.M

    def memory(self) -> dict[str, Tree]:
        """{"momentum": G_mo, "mask": the last M, packed}, on the CPU, to be kept for the next round; {} where no
        gradient was seen."""
        if not self.G_mo:
            return {}
        kept: dict[str, Tree] = {name: value.cpu() for name, value in self.G_mo.items()}
        return {"momentum": kept, "mask": dict(pack_bits(self.M))}

    def sent(self) -> dict[str, Tensor]:
        """M_i, the top T_L of |G_mo|, packed: one bit for each parameter; {} where no gradient was seen."""
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


# --------------------------------------------------------------------------------------------------------------- SWA


def swa(average: Mapping[str, Tensor], model: Mapping[str, Tensor], n: int) -> Tensors:
    """(1 - a) average + a model with a = 1 / (n + 1), where the average is over n models; n = 0 gives the model.

    Summed as by `core.tensors.average`: in float64, cast once; of integer tensors the larger. Raises FederationError for a
    negative n, NameMismatch for models of different form.

    Izmailov, Podoprikhin, Garipov, Vetrov, Wilson. Averaging weights leads to wider optima and better generalization.
    UAI 2018.
    """
    if n < 0:
        raise FederationError(f"swa: the average is over {n} models; allowed: 0 and more")
    return tensors.average([average, model], [n, 1])


def swa_count(round: int, *, start: int, cycle: int) -> int | None:
    """The n with which the model of a round enters `swa`; None: it does not. It enters at `start` and every `cycle`
    rounds after it. As in FedSAM's code n is 0 a second time at start + cycle: that model replaces the first.

    Raises FederationError for a cycle below 1.
    """
    if cycle < 1:
        raise FederationError(f"swa: a cycle of {cycle} rounds; allowed: 1 and more")
    if round < start or (round - start) % cycle:
        return None
    return max((round - start) // cycle - 1, 0)
