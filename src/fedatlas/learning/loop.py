"""Local training: the loop over a round's batches, and the optimizer with its schedule, precision and clipping.

A method writes its own loop, so that the algorithm of its paper stands in its own file:

    loop = Loop(site, net, self.local, round=round, rounds=rounds)
    for batch in loop:
        with loop.autocast():
            loss = ...
        loop.step(loss)

`train` is this loop for a loss of a net and a batch. Where the paper changes the step, `gradients` and `move` stand in the
place of `step`: loop.move(loop.gradients(loss)) is the same. A second optimizer comes by `Loop.also`.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from fedatlas.core.batch import Batch
from fedatlas.core.contract import Site
from fedatlas.core.errors import FederationError
from fedatlas.core.options import option, options
from fedatlas.core.tensors import Tensors, Tree

Value = Tensor | dict[str, Tensor]
"""A loss, a scalar, or its terms, which are summed and logged by name."""

Loss = Callable[[nn.Module, Batch], Value]
"""The loss of a net on a batch."""


@options
class Local:
    """Training at a site between two exchanges."""

    optimizer: Literal["adamw", "adam", "sgd"] = option("adamw", "The local optimizer.")
    lr: float = option(1e-3, "Learning rate after the warm-up, before it falls.", gt=0)
    weight_decay: float = option(1e-2, "Decoupled for adamw, added to the gradient for the others.", ge=0)
    momentum: float = option(0.9, "Momentum of sgd.", ge=0, lt=1)
    nesterov: bool = option(False, "Nesterov's form of sgd's momentum.")
    eps: float = option(1e-8, "Added to the denominator of adam and adamw.", gt=0)
    batch: int = option(2, "Patches, or slices, per step.", gt=0)
    steps: int | None = option(100, "Optimizer steps per round; give this or `epochs`.", gt=0)
    epochs: float | None = option(
        None, "Passes over the training cases per round; give this or `steps`.", gt=0
    )
    schedule: Literal["constant", "cosine", "poly", "restarts"] = option(
        "cosine",
        "How the learning rate falls over all steps of all rounds; poly has the exponent 0.9, restarts is one cosine "
        "after another, each of the length `restart`.",
    )
    restart: int | None = option(
        None, "Length of each cosine of `restarts`, in `schedule_unit`; null for the others.", gt=0
    )
    lr_min: float = option(0.0, "Learning rate at the end of a fall.", ge=0)
    warmup: int = option(
        0, "Length of the first, linear rise of the learning rate, in `schedule_unit`.", ge=0
    )
    warmup_from: float | None = option(
        None,
        "Learning rate at the first step of the warm-up, whose last step then has `lr` (a single one has this); null: "
        "lr / (warmup + 1), and `lr` at the step after the last.",
        ge=0,
    )
    schedule_unit: Literal["steps", "rounds"] = option("steps", "What `warmup` and `restart` count.")
    clip: float | None = option(None, "Largest norm of the gradient.", gt=0)
    precision: Literal["float32", "bf16", "fp16"] = option(
        "float32", "Arithmetic of the forward pass; fp16 scales the loss and needs a GPU."
    )
    opt_state: Literal["persist", "reset"] = option(
        "persist", "Whether the optimizer's moments stay at the site from round to round."
    )

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.epochs is None):
            raise FederationError(
                f"local: steps is {self.steps} and epochs is {self.epochs}; give one and set the other to null"
            )
        if (self.schedule == "restarts") != (self.restart is not None):
            raise FederationError(
                f"local: schedule is {self.schedule} and restart is {self.restart}; restarts needs a length, the others "
                "take null"
            )
        for name, value in (("lr_min", self.lr_min), ("warmup_from", self.warmup_from)):
            if value is not None and value > self.lr:
                raise FederationError(f"local: {name} is {value} and lr is {self.lr}; give at most lr")


class Stepper:
    """An optimizer of a net with its schedule, loss scaling (fp16) and clipping, as `local` names them.

    local: with warm-up and restarts counted in steps (`in_steps`). optimizer: of some parameters of `net`, in place of the one that `local` names. clipped:
    modules whose gradients are clipped each by itself; None: those of all parameters are clipped together.

    Raises FederationError for fp16 without a GPU.
    """

    def __init__(
        self,
        net: nn.Module,
        local: Local,
        device: torch.device,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        clipped: Sequence[nn.Module] | None = None,
    ) -> None:
        if local.precision == "fp16" and device.type != "cuda":
            raise FederationError(
                f"local: precision fp16 needs a GPU, the device is {device}; use float32 or bf16"
            )
        self.net, self.local, self.device = net, local, device
        self.optimizer = optimizer or make_optimizer(net, local)
        self.scaler = torch.amp.GradScaler(device.type, enabled=local.precision == "fp16")
        together = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.clipped = [together] if clipped is None else [list(module.parameters()) for module in clipped]
        own = {id(p) for p in together}
        self.named: dict[str, nn.Parameter] = {n: p for n, p in net.named_parameters() if id(p) in own}
        """The parameters that it moves, by their names in the net."""
        self.factor = 1.0
        """The learning rate of this step, divided by `local.lr`."""
        self.overflows = 0
        """Steps at which nothing moved, as a gradient overflowed in fp16; each halves the scale of the loss."""
        self._unstepped = False
        """Whether the last gradients were read and never stepped along; the scaler then wants `update` before the next."""

    def set_rate(self, step: int, *, of: int) -> None:
        """Sets the learning rate of step `step`, counted from 0, out of `of`; a group of parameters with an
        "initial_lr" has that in place of `local.lr`."""
        self.factor = lr_factor(self.local, step, of)
        for group in self.optimizer.param_groups:
            group["lr"] = group.get("initial_lr", self.local.lr) * self.factor

    @property
    def rate(self) -> float:
        """The learning rate of this step (of the first group of parameters)."""
        return float(self.optimizer.param_groups[0]["lr"])

    def autocast(self) -> torch.autocast:
        """The arithmetic of the forward pass."""
        return autocast(self.local, self.device)

    def step(self, loss: Value) -> None:
        """Moves the parameters by one step of the optimizer along the gradient of a loss."""
        self._backward(loss)
        self._move()

    def gradients(self, loss: Value) -> Tensors:
        """The gradient of a loss, by the names of the parameters, without those on which the loss does not depend; {}
        where it overflows in fp16. Nothing moves. They are the parameters' own `.grad`: `clip` changes them in place, and the next
        backward pass replaces them."""
        self._backward(loss)
        held = {name: p.grad for name, p in self.named.items() if p.grad is not None}
        if self.scaler.is_enabled() and not all(bool(g.isfinite().all()) for g in held.values()):
            return {}
        return held

    def move(self, gradients: Mapping[str, Tensor | None]) -> None:
        """Moves the parameters by one step of the optimizer along these gradients, clipped; one that has none stays as
        it is with any optimizer. After an overflow in fp16 nothing moves."""
        for name, parameter in self.named.items():
            parameter.grad = gradients.get(name)
        self._move()

    def clip(self) -> None:
        """Clips the gradients that the parameters hold, in place, by `local.clip`."""
        if self.local.clip is not None:
            for parameters in self.clipped:
                nn.utils.clip_grad_norm_(parameters, self.local.clip)

    def _backward(self, loss: Value) -> None:
        if self._unstepped:
            self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(total(loss)).backward()
        self.scaler.unscale_(self.optimizer)
        self._unstepped = self.scaler.is_enabled()

    def _move(self) -> None:
        self.clip()
        self.scaler.step(self.optimizer)
        before = self.scaler.get_scale()
        self.scaler.update()
        self.overflows += self.scaler.get_scale() < before
        self._unstepped = False


class Loop(Stepper):
    """The batches of one round at a site, to be read once, and the optimizer of the net that learns from them.

    When the last batch is done the optimizer's state goes to `site.memory`, and the means of what was noted are logged. With fp16 the
    scale of the loss is kept, too, also where `local.opt_state` is reset, and the steps at which nothing moved are logged as
    "overflows", if there are any. A loop that is left early, by `break` or an exception, keeps and logs nothing.

    round: this one, counted from 0; rounds: how many there are. They place the round on the learning-rate schedule. memory: the key in `site.memory`
    under which the optimizer's state is kept, until `forget_optimizer`. prefix: begins the names in the log, where a site trains several nets.
    optimizer, clipped: see `Stepper`.

    Reading the batches raises FloatingPointError where a mean is not finite.
    """

    def __init__(
        self,
        site: Site,
        net: nn.Module,
        local: Local,
        *,
        round: int,
        rounds: int,
        memory: str = "optimizer",
        prefix: str = "",
        optimizer: torch.optim.Optimizer | None = None,
        clipped: Sequence[nn.Module] | None = None,
    ) -> None:
        self.batches = site.batches(batch=local.batch, steps=local.steps, epochs=local.epochs)
        local = in_steps(local, len(self.batches))
        super().__init__(net.train(), local, site.device, optimizer=optimizer, clipped=clipped)
        self.site, self.prefix = site, prefix
        self.first_step, self.all_steps = round * len(self.batches), rounds * len(self.batches)
        self.means: dict[str, float] = {}
        """The means of what was noted, after the last batch."""
        self._sums: dict[str, Tensor] = {}
        self._steppers: dict[str, Stepper] = {}
        self._add(memory, self)

    def also(self, net: nn.Module, *, memory: str, optimizer: torch.optim.Optimizer | None = None) -> Stepper:
        """A second optimizer, which follows the schedule of the loop and has a state of its own."""
        second = Stepper(net, self.local, self.device, optimizer=optimizer)
        self._add(memory, second)
        return second

    def step(self, loss: Value) -> None:
        """As `Stepper.step`, and notes the loss."""
        self.note(loss)
        super().step(loss)

    def note(self, value: Value | None = None, /, **numbers: Tensor) -> None:
        """Adds to the means of the round what is of this batch: a loss, as "loss", with its terms, and other numbers. The means
        are over all batches, also those in which a number was not noted."""
        if value is not None:
            numbers = {"loss": total(value)} | (value if isinstance(value, dict) else {}) | numbers
        for name, number in numbers.items():
            added = number.detach().double()
            self._sums[name] = self._sums[name] + added if name in self._sums else added

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        seconds = 0.0
        for count, batch in enumerate(self.batches):
            began = time.perf_counter()
            for stepper in self._steppers.values():
                stepper.set_rate(self.first_step + count, of=self.all_steps)
            yield batch
            seconds += time.perf_counter() - began
        self.means = {name: float(value) / len(self) for name, value in self._sums.items()}
        bad = sorted(name for name, value in self.means.items() if not math.isfinite(value))
        if bad:
            raise FloatingPointError(
                f"{', '.join(bad)} not finite within {len(self)} steps; lower the learning rate or clip"
            )
        if self.local.opt_state == "persist":
            for key, stepper in self._steppers.items():
                self.site.memory[key] = optimizer_tree(stepper.optimizer, stepper.net)
        for key, stepper in self._steppers.items():
            if stepper.scaler.is_enabled():
                self.site.memory[_scale(key)] = cast(Tree, stepper.scaler.state_dict())
        named = {f"{self.prefix}{name}": value for name, value in self.means.items()}
        self.site.log(**named, steps=len(self), step_seconds=seconds)
        if overflows := sum(stepper.overflows for stepper in self._steppers.values()):
            self.site.log(overflows=overflows)

    def _add(self, key: str, stepper: Stepper) -> None:
        self._steppers[key] = stepper
        if self.local.opt_state == "persist" and key in self.site.memory:
            restore_optimizer(stepper.optimizer, stepper.net, self.site.memory[key])
        if stepper.scaler.is_enabled() and _scale(key) in self.site.memory:
            stepper.scaler.load_state_dict(cast(dict[str, Any], self.site.memory[_scale(key)]))


def _scale(key: str) -> str:
    """Where the scale of the loss is kept beside the optimizer's state of this key."""
    return f"{key} scale"


def forget_optimizer(site: Site, memory: str) -> None:
    """Removes what a `Loop` kept under this key."""
    for key in (memory, _scale(memory)):
        site.memory.pop(key, None)


def train(
    site: Site,
    net: nn.Module,
    loss: Loss,
    local: Local,
    *,
    round: int,
    rounds: int,
    memory: str = "optimizer",
    prefix: str = "",
) -> dict[str, float]:
    """Trains `net` in place for one round of `local` with plain steps; logs and returns the means of the loss and its terms.
    The other arguments, and what is raised, are those of `Loop`."""
    loop = Loop(site, net, local, round=round, rounds=rounds, memory=memory, prefix=prefix)
    for batch in loop:
        with loop.autocast():
            value = loss(net, batch)
        loop.step(value)
    return loop.means


def total(loss: Value) -> Tensor:
    """The sum of the terms of a loss, a scalar."""
    if isinstance(loss, Tensor):
        return loss
    value = sum(loss.values())
    assert isinstance(value, Tensor)
    return value


def autocast(local: Local, device: torch.device) -> torch.autocast:
    """The autocast context of the forward pass; off for float32."""
    dtype = torch.float16 if local.precision == "fp16" else torch.bfloat16
    return torch.autocast(device.type, dtype=dtype, enabled=local.precision != "float32")


def count_steps(steps: int | None, epochs: float | None, n_train: int, batch: int) -> int:
    """How many batches a call trains on: `steps`, or as many as `epochs` passes over the training cases need.
    Raises ValueError unless exactly one of them is given."""
    if (steps is None) == (epochs is None):
        raise ValueError(f"batches: steps is {steps} and epochs is {epochs}; give exactly one")
    return steps if epochs is None else max(1, math.ceil(epochs * n_train / batch - 1e-9))  # type: ignore[return-value]


def in_steps(local: Local, per_round: int) -> Local:
    """`local` with its warm-up and restarts counted in steps. per_round: steps of a round."""
    if local.schedule_unit == "steps":
        return local
    restart = None if local.restart is None else local.restart * per_round
    return dataclasses.replace(local, schedule_unit="steps", warmup=local.warmup * per_round, restart=restart)


def lr_factor(local: Local, step: int, total: int) -> float:
    """The learning rate of a step, counted from 0, divided by `local.lr`. local: as `in_steps` gives it."""
    if step < local.warmup:
        if local.warmup_from is None:
            return (step + 1) / (local.warmup + 1)
        first = local.warmup_from / local.lr
        return first + (1 - first) * step / max(local.warmup - 1, 1)
    if local.schedule == "constant":
        return 1.0
    done = (step - local.warmup) / max(total - local.warmup, 1)
    if local.restart is not None:
        done = (step - local.warmup) % local.restart / local.restart
    fallen = (1 - done) ** 0.9 if local.schedule == "poly" else 0.5 * (1 + math.cos(math.pi * done))
    last = local.lr_min / local.lr
    return last + (1 - last) * fallen


def make_optimizer(net: nn.Module, local: Local) -> torch.optim.Optimizer:
    """A fresh optimizer over the parameters of `net` that require a gradient. On a processor a step of adam and adamw is
    one pass over each parameter and its moments (`fused`); torch's fused sgd fails where some parameters have had a
    gradient before and others not."""
    parameters = [p for p in net.parameters() if p.requires_grad]
    if local.optimizer == "sgd":
        return torch.optim.SGD(
            parameters,
            lr=local.lr,
            momentum=local.momentum,
            nesterov=local.nesterov,
            weight_decay=local.weight_decay,
        )
    fused = all(p.device.type == "cpu" for p in parameters) or None
    kind = torch.optim.AdamW if local.optimizer == "adamw" else torch.optim.Adam
    return kind(parameters, lr=local.lr, eps=local.eps, weight_decay=local.weight_decay, fused=fused)


def optimizer_tree(optimizer: torch.optim.Optimizer, net: nn.Module) -> dict[str, Tree]:
    """The moments of an optimizer, by the names of the parameters of `net`."""
    name_of = {id(p): name for name, p in net.named_parameters()}
    tree: dict[str, Tree] = {}
    for parameter, entry in optimizer.state.items():
        tree[name_of[id(parameter)]] = {
            key: value.detach().cpu().clone() if isinstance(value, Tensor) else value
            for key, value in entry.items()
        }
    return tree


def restore_optimizer(optimizer: torch.optim.Optimizer, net: nn.Module, tree: Tree) -> None:
    """Puts back what `optimizer_tree` took. Raises FederationError if it is of another net."""
    parameters = dict(net.named_parameters())
    other = FederationError(
        "site memory: the optimizer's state is of another net; remove it or use another run folder"
    )
    if not isinstance(tree, dict) or not set(tree) <= set(parameters):
        raise other
    for name, entry in tree.items():
        parameter = parameters[name]
        assert isinstance(entry, dict)
        moments = [value for value in entry.values() if isinstance(value, Tensor) and value.dim()]
        if any(moment.shape != parameter.shape for moment in moments):
            raise other  # torch's fused optimizers do not look at shapes, and would write beyond the moments
        optimizer.state[parameter] = {
            # the step counter of Adam stays on the CPU, the moments live beside their parameter
            key: value.clone().to("cpu" if value.dim() == 0 else parameter.device)
            if isinstance(value, Tensor)
            else value
            for key, value in entry.items()
        }
