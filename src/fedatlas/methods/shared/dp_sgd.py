"""DP-SGD: training of which a single sample can move no step by more than a fixed length, hidden in noise.

Abadi, Chu, Goodfellow, McMahan, Mironov, Talwar, Zhang. Deep learning with differential privacy. CCS 2016. UFPS (Jiang,
Ma, Zeng, Ying, Patterns 2024, Supplementary Note 10) trains teachers with it and gives neither clip nor noise.

A step on a batch of B samples, with g_i the gradient of the loss of sample i alone:

    g = ( sum_i g_i min(1, clip / ||g_i||) + N(0, (noise clip)^2) ) / B

and the local optimizer goes on from g; what it keeps, `local.clip` and weight decay come after the noise and spend
nothing. A loss that pools its samples, as Dice over a batch does, becomes the mean of the losses of single samples.

The gradients are those of B backward passes, one for each sample: exact for every net and every loss, at the memory of
one sample and one more gradient. Opacus's layers would keep B gradients at a time, and know some layers only; batches are
small here. Opacus is needed for its accountant alone.

What is guaranteed. The unit is a *case* (an image, where labels are of whole images) of one site: compared are this
training and the same one in which every gradient of that case is taken as zero. A case that is drawn j_t times in step t
moves the sum of that step by at most j_t clip, whatever else is in it, so that all steps together are one Gaussian
mechanism with the multiplier noise / sqrt(sum_t j_t^2). `epsilon` is its epsilon for the case that was drawn most often,
by the Rényi accountant of Opacus with a sampling rate of 1. For a case that holds other data instead, take half the noise;
for a patient with k cases, a k-th of it. It covers the models after all steps together.

What is not. Cases are drawn in a shuffled order, epoch by epoch, not each by itself with a fixed chance, and the order
follows from the federation's seed: nobody may count on not knowing who is in a batch. `epsilon_poisson`, the number that
is commonly given for DP-SGD, counts on it: it is that of Poisson sampling at the rate batch / cases, and here no
guarantee. With the noise from the seed (`randomness: seed`) there is a guarantee only against those who do not know the
seed, which the server and all sites do, and for one run on one set of data: another run, or a round that is done again on changed
data, has the same noise, so that it cancels in the difference of their models. That is for studies, whose bits repeat.
`randomness: system` is for protection. Then a training that is done again, after a fault or by a run that was resumed, has
other noise, and is counted beside the first one, whoever saw that: so ε is of all that may have left the site in this run.

Not covered: the order of cases (with class-balanced sampling it follows from the labels), their number, counts that a loss
takes from a site (`pos_weight: balanced`), statistics of preprocessing, validation scores, time, that a site fails; and
everything else that is trained on the same cases without it, as the rounds after private teachers. The loss of a step is
of the data and is not logged. Statistics of batch normalisation are not covered either, and a net that was trained one
sample at a time is not the one that a batch would normalise: such nets are refused, and any whose buffers move.
"""

import contextlib
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedatlas.core.batch import Batch
from fedatlas.core.contract import Site
from fedatlas.core.errors import FederationError
from fedatlas.core.options import option, options
from fedatlas.core.tensors import Tensors, Tree
from fedatlas.learning import loop
from fedatlas.learning.loop import Local, Loss, Stepper
from fedatlas.transport.protection import privacy

MEMORY = "dp_sgd"
"""The key in a site's memory of what was spent."""

_SEEN = (1, 10, 100, 1000)
_ORDERS = (
    [1 + 10 ** (x / 4) for x in range(-28, -4)]
    + [1 + x / 10 for x in range(1, 100)]
    + [*range(11, 64), 80, 96, 128, 192, 256, 512]
)


@options
class DPSGD:
    """Gradients of single samples, clipped, with Gaussian noise on their sum (Abadi 2016)."""

    clip: float = option(1.0, "Largest L2 norm of the gradient of one sample.", gt=0, allow_inf_nan=False)
    noise: float = option(
        sentence="Noise multiplier: the standard deviation of the noise on the sum of a batch, over `clip`; 0: clipping "
        "alone, which protects nothing.",
        ge=0,
        allow_inf_nan=False,
    )
    delta: float = option(1e-5, "δ of the guarantee; well below one over the number of cases.", gt=0, lt=1)
    randomness: Literal["seed", "system"] = option(
        "seed",
        "Where the noise is from. seed: the site's generator; bits repeat, and who knows the federation's seed can take "
        "it off. system: the operating system, for protection; bits do not repeat.",
    )


Normal = Callable[[torch.Size], Tensor]
"""Standard normal numbers of a shape, on the CPU."""


class Private:
    """The noisy means of clipped gradients of single samples. normal: where the noise is from. spent: counts the steps."""

    def __init__(self, how: DPSGD, normal: Normal, spent: "Spent") -> None:
        self.how, self.normal, self.spent = how, normal, spent
        self.watching = True

    def gradients(self, by: Stepper, loss: Loss, batch: Batch) -> Tensors:
        """The gradients of a step on a batch, by the names of the parameters. The loss is not told: it is not private.

        Raises FederationError where the net's buffers moved, FloatingPointError where a gradient is not finite.
        """
        before = (
            [(name, value, value.clone()) for name, value in by.net.named_buffers()] if self.watching else []
        )
        sums = {name: torch.zeros_like(p) for name, p in by.named.items()} if self.how.noise > 0 else {}
        for i in range(len(batch.image)):
            for name, g in self.clipped(by, loss, batch.part(slice(i, i + 1))).items():
                sums[name] = sums[name].add_(g) if name in sums else g
        for name, value, held in before:
            if not torch.equal(value, held):
                raise FederationError(
                    f"dp_sgd: training moves {name} of the net, which no noise covers; take a net without such "
                    "statistics"
                )
        self.watching = False
        self.spent.add(batch.case)
        sigma = self.how.noise * self.how.clip
        if sigma > 0:
            for value in sums.values():
                value.add_(self.normal(value.shape).to(value), alpha=sigma)
        return {name: value.div_(len(batch.image)) for name, value in sums.items()}

    def clipped(self, by: Stepper, loss: Loss, sample: Batch) -> Tensors:
        """g_i min(1, clip / ||g_i||), of one sample."""
        with by.autocast():
            value = loss(by.net, sample)
        held = by.gradients(value)
        norms = [torch.linalg.vector_norm(g, dtype=torch.float64) for g in held.values()]
        norm = float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0
        if not math.isfinite(norm):
            raise FloatingPointError(
                "dp_sgd: the gradient of a sample is not finite; lower the learning rate"
            )
        scale = min(1.0, self.how.clip / norm) if norm > 0 else 1.0
        return {name: g.mul_(scale) for name, g in held.items()}


def train(
    private: Private | None, site: Site, net: nn.Module, loss: Loss, local: Local, **place: Any
) -> None:
    """One round of training in place, as `learning.loop.train`, whose other arguments `place` holds; private: what
    `accounted` gave, whose steps tell nothing of the loss."""
    if private is None:
        loop.train(site, net, loss, local, **place)
        return
    steps = loop.Loop(site, net, local, **place)
    for batch in steps:
        steps.move(private.gradients(steps, loss, batch))


class Spent:
    """What a site's training has spent. steps: so many. squares: case -> the sum over the steps of the square of how
    often it was in the batch."""

    def __init__(self, kept: Tree = None) -> None:
        held: Any = kept or {"steps": 0, "squares": {}}
        self.steps: int = held["steps"]
        self.squares: Counter[str] = Counter(held["squares"])

    def add(self, cases: list[str]) -> None:
        """A step on these cases."""
        self.steps += 1
        for case, count in Counter(cases).items():
            self.squares[case] += count**2

    def tree(self) -> dict[str, Tree]:
        """As it is kept in a site's memory."""
        return {"steps": self.steps, "squares": dict(sorted(self.squares.items()))}

    @property
    def most(self) -> int:
        """The sum of the case that was drawn most often."""
        return max(self.squares.values(), default=0)


@contextlib.contextmanager
def accounted(
    how: DPSGD | None, site: Site, net: nn.Module, local: Local, *, memory: str = MEMORY, prefix: str = ""
) -> Iterator[Private | None]:
    """What `train` takes, for all trainings of a net within one call of a site; None: plain steps.

    At the end the site keeps what was spent, by all calls so far, under `memory`, and logs it as `epsilon` and
    `epsilon_poisson`; without noise it logs nothing. With noise of the system calls that are done again are counted each
    time (`Site.lasting`), with noise of the seed, which is the same then, once (`Site.memory`). prefix: begins their names.

    Raises FederationError as `examine`.
    """
    if how is None:
        yield None
        return
    examine(how, net, local)
    repeats = how.randomness == "seed"
    normal, book = (_seeded(site.rng), site.memory) if repeats else (_system(), site.lasting)
    spent = Spent(book.get(memory, site.memory.get(memory)))  # a run of before `lasting` kept it there
    yield Private(how, normal, spent)
    book[memory] = spent.tree()
    if how.noise > 0:
        rate = min(1.0, local.batch / site.n_train)
        told = {
            "epsilon": epsilon(how, spent.most),
            "epsilon_poisson": epsilon_poisson(how, spent.steps, rate),
        }
        site.log(**{f"{prefix}{name}": value for name, value in told.items()})


def examine(how: DPSGD | None, net: nn.Module, local: Local) -> list[str]:
    """What `check` should tell: what is spent, as far as that is known before the training.

    Raises FederationError for a net that cannot be protected, for the precision fp16, whose steps are left out where a
    gradient overflows, and where the extra `privacy` is missing.
    """
    if how is None:
        return []
    check_net(net)
    if local.precision == "fp16":
        raise FederationError(
            "dp_sgd: local.precision is fp16, which leaves out steps according to the data; take bf16 or float32"
        )
    if how.noise == 0:
        return ["dp_sgd: noise is 0: gradients are clipped, and nothing is protected"]
    if how.randomness == "system":
        privacy.SecretNormal()
    spent = ", ".join(f"{epsilon(how, seen):.3g}" for seen in _SEEN)
    seen = ", ".join(map(str, _SEEN))
    told = (
        f"dp_sgd: with clip {how.clip:g} and noise {how.noise:g} a case that is drawn once in {seen} steps spends an "
        f"epsilon of {spent} at delta {how.delta:g}"
    )
    if how.randomness == "seed":
        told += "; who knows the federation's seed can take the noise off, which randomness: system prevents"
    return [told]


def check_net(net: nn.Module) -> None:
    """Raises FederationError for a net with batch normalisation, or with running statistics of another kind."""
    for name, module in net.named_modules():
        kind = type(module).__name__
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise FederationError(
                f"dp_sgd: {name} of the net is {kind}, which mixes the samples of a batch, or keeps statistics that no "
                "noise covers; take a net with group or instance normalisation (net: {norm: instance}, where it has that "
                "option)"
            )
        if getattr(module, "track_running_stats", False):
            raise FederationError(
                f"dp_sgd: {name} of the net is {kind} with running statistics, which no noise covers; take a net "
                "without them"
            )


def epsilon(how: DPSGD, squares: int) -> float:
    """ε of a case whose `Spent.squares` are so many: that of one Gaussian mechanism with the multiplier
    noise / sqrt(squares); 0 for none, inf without noise. Raises as `protection.privacy.epsilon`."""
    if squares == 0:
        return 0.0
    return privacy.epsilon(how.noise / math.sqrt(squares), 1, how.delta, relation="remove")


def epsilon_poisson(how: DPSGD, steps: int, rate: float) -> float:
    """ε of so many steps in which every case is in the batch with the chance `rate`, by itself: adding or removing one.
    From the Rényi accountant of Opacus. inf without noise. Raises as `protection.privacy.epsilon`."""
    if steps == 0 or rate >= 1 or privacy.epsilon(how.noise, 1, how.delta, relation="remove") == math.inf:
        return epsilon(how, steps)
    from opacus.accountants import RDPAccountant  # `protection.privacy.epsilon` told where it is missing

    accountant = RDPAccountant()
    for _ in range(steps):
        accountant.step(noise_multiplier=how.noise, sample_rate=rate)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of an order at the end of its range: still a bound
        return max(0.0, float(accountant.get_epsilon(how.delta, alphas=_ORDERS)))


def _seeded(rng: torch.Generator) -> Normal:
    return lambda shape: torch.randn(shape, generator=rng)


def _system() -> Normal:
    normal = privacy.SecretNormal()
    return lambda shape: normal.draw(shape.numel()).view(shape)
