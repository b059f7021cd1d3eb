"""Differential privacy of what a site sends: its update is clipped, and Gaussian noise is added.

Dwork, Roth. The algorithmic foundations of differential privacy. 2014. For federations: McMahan, Ramage, Talwar,
Zhang. Learning differentially private recurrent language models. ICLR 2018 (here the unit is a site, all sites take
part in every round, and the noise is drawn at the sites).

A site trains as its method says. Its update Δ, all floating tensors of the trained model less those it received, is
scaled to an L2 norm of at most `clip`, noise is added to every entry, and the received model plus that is what it
sends:  received + Δ · min(1, clip / ‖Δ‖) + N(0, σ²).

    mode local     σ = noise · clip. The server is not trusted: what one site sends is private by itself, and
                   weights, averages and models made of it afterwards are too.
    mode central   σ = noise · clip / sqrt(K) at each of K sites, so that the sum of all has noise · clip. What one
                   site sends is hardly private: the server must see the sum alone, which takes secure aggregation,
                   and equal weights, for with others the site with the largest counts more than its share of noise
                   covers. A lost site takes its noise along, and who knows the noise of c sites (those sites)
                   can take it off: `noise_left` says what remains.

The guarantee is (ε, δ)-differential privacy of the unit *site*, over all that it sent or, in central mode, over all
sums; `epsilon` gives ε. Two federations are neighbours where one site differs, in one of two senses:

    remove    the site's update is taken as zero, it changed nothing. The sum moves by at most clip.
    replace   the site holds any other data. The sum moves by at most 2 · clip, so that ε is that of half the noise.

A statement on one patient needs `replace`: with one case more or less the site trains another update, of which no
more is known than that both are within clip. `replace` is therefore the default. Who takes part is public.

Not covered, and therefore either public or not to be sent:

* n, the number of training cases, and anything else in a reply beside the update. A weight that followed from the
  data would tell of them, and in central mode change the sensitivity; declare n once, as a public fact.
* Numbers that a site logs, validation scores, and the norm that `privatise` returns: they stay at the site.
* That a site fails or is late.
* Models from before, as one pretrained on the same cases.
* Integer and boolean buffers. A count of batches tells how many steps a site took; `protect` gives the received value.

Statistics of batch normalisation are floating tensors: the clip and the noise would cover them, but noise makes
variances negative, and the net useless; `privatise` refuses them. Use group or instance normalisation.

A site that answers one question twice with fresh noise has made two releases: count what was sent, not rounds.

The noise: uniform numbers of 53 bits from ChaCha20 (of `cryptography`) under a fresh key of the operating system,
never from the federation's seed, which the server knows and could take the noise off with; Box and Muller's transform
in float64. Known limits: a float64 normal is not a real one. It ends at 8.6 σ, and its low bits can tell which sums were
possible (Mironov, CCS 2012; Jin, McMurtry, Rubinstein, Ohrimenko, S&P 2022). Sum and noise are added in float64
and rounded once to the dtype of the update, float32 as a rule, which hides 29 of these bits; no proof is claimed for
what is left. In central mode each site's part is rounded, to float32 and by `secure.pack`, before the sum: the
steps are to be far smaller than σ, and `check` refuses those above a sixteenth of it.

Shapes: N entries of the update, K sites.
"""

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedatlas.core.errors import FederationError
from fedatlas.core.options import option, options
from fedatlas.core.tensors import Tensors
from fedatlas.transport.protection.difference import apply, difference

_PIECE = 1 << 17
_SMALLEST = 1e-6
"""A noise multiplier below it has no ε worth a number."""


@options
class Privacy:
    """Differential privacy of what a site sends."""

    clip: float = option(
        sentence="Largest L2 norm of a site's update, over all its tensors.", gt=0, allow_inf_nan=False
    )
    noise: float = option(
        sentence="Noise multiplier: the standard deviation of the noise over `clip`.",
        ge=0,
        allow_inf_nan=False,
    )
    delta: float = option(1e-5, "δ of the guarantee; well below one over the number of patients.", gt=0, lt=1)
    mode: Literal["local", "central"] = option(
        "local",
        "local: every site's update is private by itself; central: only their sum is, with secure aggregation.",
    )


STEPS_OF_SIGMA = 16
"""In central mode the noise of a site is at least so many steps of the fixed point in which it is summed."""


def check(choice: Privacy, *, bits: int | None, sites: int, equal_weights: bool) -> None:
    """Raises FederationError for the central mode without secure aggregation, with unequal weights, or with steps of the fixed point
    that the noise of a site does not fill, so that rounding would take it away.

    bits: of secure aggregation, None without; sites: K.
    """
    if choice.mode == "local":
        return
    if bits is None:
        raise FederationError(
            "privacy: mode central protects the sum of the updates only, and without secure aggregation the"
            " server sees each of them; switch secure aggregation on, or use mode local"
        )
    if not equal_weights:
        raise FederationError(
            "privacy: mode central needs equal weights, because a site that counts more than others is not"
            " covered by the noise of all; set the method's weights to equal, or use mode local"
        )
    sigma = choice.noise * choice.clip / math.sqrt(sites)
    if 0 < sigma < STEPS_OF_SIGMA * 2.0**-bits:
        least = math.ceil(math.log2(STEPS_OF_SIGMA / sigma))
        raise FederationError(
            f"privacy: secure.bits is {bits}, by which what a site sends is rounded to steps of {2.0**-bits:.3g}, and its noise of"
            f" {sigma:.3g} (noise · clip / √{sites}) with it; set secure.bits to {least} or more"
        )


def require_libraries() -> None:
    """FederationError where a package that draws the noise, or accounts for it, is missing."""
    SecretNormal()
    _accountant()


class SecretNormal:
    """Standard normal numbers that nobody else can repeat; see the module's text for how.

    Raises FederationError where `cryptography` is missing.
    """

    def __init__(self) -> None:
        try:
            from cryptography.hazmat.primitives.ciphers import Cipher
            from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
        except ImportError:
            raise FederationError(
                'differential privacy needs pip install "fedatlas[privacy]"; cryptography is missing'
            ) from None
        self._stream = Cipher(ChaCha20(os.urandom(32), bytes(16)), mode=None).encryptor()

    def draw(self, count: int) -> Tensor:
        """float64 [count]."""
        pairs = (count + 1) // 2
        bits = np.frombuffer(self._stream.update(bytes(16 * pairs)), dtype="<u8") >> 11
        uniform = torch.from_numpy(bits.astype(np.float64)).mul_(2.0**-53).view(2, pairs)
        radius = uniform[0].add_(2.0**-53).log_().mul_(-2).sqrt_()  # of (0, 1]
        angle = uniform[1].mul_(2 * math.pi)
        return torch.stack([angle.cos().mul_(radius), angle.sin().mul_(radius)]).view(-1)[:count]


def protect(
    trained: Mapping[str, Tensor], received: Mapping[str, Tensor], choice: Privacy, *, sites: int
) -> tuple[Tensors, float]:
    """The model that a site sends in the place of the one it trained, and the norm of its update: see `privatise`.

    Integer and boolean tensors are those that were received. Raises NameMismatch if the two models differ in names,
    shapes or dtypes, and FederationError as `privatise`.
    """
    change = difference(trained, received)
    floating = {name: change[name] for name, tensor in received.items() if tensor.is_floating_point()}
    private, norm = privatise(floating, choice, sites=sites)
    return apply(received, {**received, **private}), norm


def privatise(
    change: Mapping[str, Tensor], choice: Privacy, *, sites: int, normal: SecretNormal | None = None
) -> tuple[Tensors, float]:
    """The update clipped and with noise, and its L2 norm before.

    That norm is not private: it must never be sent, nor logged where the server can read it. It is for people at
    the site, who choose `clip` by it.

    change: the floating tensors of a `difference`, on the CPU. The norm is summed in float64 in the order of its tensors.
    sites: K, all sites of the federation, which share the noise in central mode.
    normal: where the noise comes from; a new SecretNormal unless given.

    Raises FederationError if a tensor is not floating, or a running variance, or not finite.
    """
    require_noisy(choice, change)
    norm = math.sqrt(math.fsum(_square(tensor) for tensor in change.values()))
    if not math.isfinite(norm):
        raise FederationError(
            "privacy: the update is not finite, and nothing was sent; lower the learning rate or clip gradients"
        )
    scale = min(1.0, choice.clip / norm) if norm > 0 else 1.0
    sigma = choice.noise * choice.clip / (math.sqrt(sites) if choice.mode == "central" else 1.0)
    normal = normal or SecretNormal()
    private = {}
    for name, tensor in change.items():
        out = torch.empty(tensor.numel(), dtype=tensor.dtype)
        for entries, piece in zip(tensor.reshape(-1).split(_PIECE), out.split(_PIECE), strict=True):
            wide = entries.to(torch.float64, copy=True).mul_(scale)
            piece.copy_(wide.add_(normal.draw(len(wide)), alpha=sigma))
        private[name] = out.view(tensor.shape)
    return private, norm


def require_noisy(choice: Privacy, tensors: Mapping[str, Tensor]) -> None:
    """Raises FederationError for a tensor that can carry no noise: one that is not floating, or a running variance."""
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise FederationError(f"privacy: {name} is {tensor.dtype}; only floating tensors can carry noise")
        if choice.noise > 0 and name.rpartition(".")[2] == "running_var":
            raise FederationError(
                f"privacy: {name} is a variance of batch normalisation, which noise would make negative; use a"
                " net with group or instance normalisation"
            )


def noise_left(choice: Privacy, *, sites: int, left: int, known: int = 0) -> float:
    """The noise multiplier of one release, for `epsilon`.

    In local mode it is `noise`. In central mode it is that of the sum over the `left` of `sites` sites that
    answered, against someone who knows the noise of `known` of them: 0 for the server, 1 for a site that took
    part, more for those who join forces: noise · sqrt((left - known) / sites).
    """
    if not 0 <= known <= left <= sites or sites == 0:
        raise ValueError(
            f"noise_left: {known} known of {left} left of {sites} sites; allowed: known ≤ left ≤ sites"
        )
    return choice.noise * (math.sqrt((left - known) / sites) if choice.mode == "central" else 1.0)


def epsilon(
    noise: float | Sequence[float],
    releases: int,
    delta: float,
    *,
    relation: Literal["remove", "replace"] = "replace",
) -> float:
    """ε, at `delta`, of `releases` updates of one site (or, in central mode, sums); inf without noise.

    noise: the multiplier, or one per release; see `noise_left`.
    relation: which federations are neighbours, see the module's text.

    From the Rényi accountant of Opacus with a sampling rate of 1, which is an upper bound: at a δ of 1e-5, 3 to
    11 % above the exact ε where that is between 0.1 and 300. Later releases may depend on earlier ones.

    Raises FederationError where Opacus is missing, or for values that make no sense.
    """
    equal = isinstance(noise, int | float)
    each = [float(noise)] if equal else [float(value) for value in noise]
    if releases < 0 or not (equal or len(each) == releases):
        raise FederationError(
            f"privacy: {len(each)} noise multipliers for {releases} releases; one each is needed"
        )
    if not 0 < delta < 1 or not all(value >= 0 and math.isfinite(value) for value in each):
        raise FederationError(
            f"privacy: delta is {delta} and the noise {noise}; allowed: delta between 0 and 1, noise finite and"
            " not negative"
        )
    if releases == 0:
        return 0.0
    multipliers = [value / 2 if relation == "replace" else value for value in each]
    if min(multipliers) < _SMALLEST:
        return math.inf
    accountant = _accountant()
    # what `step` would come to: (noise multiplier, sampling rate, steps)
    accountant.history = [(multiplier, 1.0, releases if equal else 1) for multiplier in multipliers]
    return max(0.0, float(accountant.get_epsilon(delta, alphas=_orders())))


def _accountant() -> Any:
    try:
        from opacus.accountants import RDPAccountant
    except ImportError:
        raise FederationError(
            'the accountant of differential privacy needs pip install "fedatlas[privacy]"; opacus is missing'
        ) from None
    return RDPAccountant()


def _orders() -> list[float]:
    """Rényi orders close enough that the best of them is within 0.1 % of the best of all."""
    return [float(order) for order in 1 + np.logspace(-7, 9, 1600)]


def _square(tensor: Tensor) -> float:
    return math.fsum(float(piece.double().square().sum()) for piece in tensor.reshape(-1).split(_PIECE))
