"""Local training: the optimizer, its schedule, precision, clipping, and the plain step."""

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from fedatlas.core.batch import Batch
from fedatlas.core.contract import Site
from fedatlas.core.errors import FederationError
from fedatlas.core.options import option, options
from fedatlas.core.tensors import Tree

Loss = Callable[[nn.Module, Batch], "Tensor | dict[str, Tensor]"]
"""The loss of a net on a batch; a dict is summed, and its terms are logged by name."""


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
        "Learning rate at the first step of the warm-up, whose last step then has `lr`; null: lr / (warmup + 1), and "
        "`lr` at the step after the last.",
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


def train(
    site: Site,
    net: nn.Module,
    loss: Loss,
    local: Local,
    *,
    round: int,
    rounds: int,
    memory: str = "optimizer",
    optimizer: torch.optim.Optimizer | None = None,
    step: "Callable[[torch.optim.Optimizer, Local, torch.device], Step] | None" = None,
    prefix: str = "",
) -> dict[str, float]:
    """Trains `net` in place for one round of `local`; logs and returns the means of the loss and its terms.

    round, rounds: counted from 0; they place the round on the learning-rate schedule.
    memory: the key in `site.memory` under which the optimizer's state is kept.
    optimizer: in place of the one that `local` names. step: makes the step in place of `Step`. prefix: begins the names of
    the losses in the log, where a site trains several nets.

    Raises FloatingPointError where the mean loss is not finite.
    """
    net.train()
    optimizer = optimizer or make_optimizer(net, local)
    if local.opt_state == "persist" and memory in site.memory:
        restore_optimizer(optimizer, net, site.memory[memory])
    batches = site.batches(batch=local.batch, steps=local.steps, epochs=local.epochs)
    take = (step or Step)(optimizer, in_steps(local, len(batches)), site.device)
    sums: dict[str, Tensor] = {}
    seconds = 0.0
    for count, batch in enumerate(batches):
        began = time.perf_counter()
        take.at(round * len(batches) + count, of=rounds * len(batches))
        for name, value in take(net, loss, batch).items():
            sums[name] = sums[name] + value.double() if name in sums else value.double()
        seconds += time.perf_counter() - began
    if local.opt_state == "persist":
        site.memory[memory] = optimizer_tree(optimizer, net)
    means = {name: float(value) / len(batches) for name, value in sums.items()}
    bad = sorted(name for name, value in means.items() if not math.isfinite(value))
    if bad:
        raise FloatingPointError(
            f"{', '.join(bad)} not finite within {len(batches)} steps; lower the learning rate or clip"
        )
    named = {f"{prefix}{name}": value for name, value in means.items()}
    site.log(**named, steps=len(batches), step_seconds=seconds)
    return means


class Step:
    """One optimizer step after another: precision, loss scaling, clipping, the schedule."""

    def __init__(self, optimizer: torch.optim.Optimizer, local: Local, device: torch.device) -> None:
        if local.precision == "fp16" and device.type != "cuda":
            raise FederationError(
                f"local: precision fp16 needs a GPU, the device is {device}; use float32 or bf16"
            )
        self.optimizer, self.local, self.device = optimizer, local, device
        self.scaler = torch.amp.GradScaler(device.type, enabled=local.precision == "fp16")
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]

    def at(self, step: int, *, of: int) -> None:
        """Sets the learning rate of step `step`, counted from 0, out of `of`; a group of parameters with an
        "initial_lr" has that in place of `local.lr`."""
        for group in self.optimizer.param_groups:
            group["lr"] = group.get("initial_lr", self.local.lr) * lr_factor(self.local, step, of)

    def __call__(self, net: nn.Module, loss: Loss, batch: Batch) -> dict[str, Tensor]:
        """Takes one step and returns the detached loss, and its terms if it has several."""
        with autocast(self.local, self.device):
            value = loss(net, batch)
        terms = value if isinstance(value, dict) else {}
        total = sum(terms.values()) if isinstance(value, dict) else value
        assert isinstance(total, Tensor)
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(total).backward()
        self.apply()
        return {"loss": total.detach()} | {name: term.detach() for name, term in terms.items()}

    def apply(self) -> None:
        """Moves the parameters by the gradients that they hold, clipped."""
        if self.local.clip is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.parameters, self.local.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()


def autocast(local: Local, device: torch.device) -> torch.autocast:
    """The arithmetic of the forward pass."""
    dtype = torch.float16 if local.precision == "fp16" else torch.bfloat16
    return torch.autocast(device.type, dtype=dtype, enabled=local.precision != "float32")


def emulates_bf16(device: torch.device) -> bool:
    """Does this processor lack instructions for bf16, so that bf16 is right but slower than float32? False on a GPU and
    where torch cannot tell."""
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()
    named = [there for name, there in capabilities.items() if "bf16" in name]
    return device.type == "cpu" and bool(named) and not any(named)


def in_steps(local: Local, per_round: int) -> Local:
    """`local` with its warm-up and restarts counted in steps. per_round: steps of a round."""
    if local.schedule_unit == "steps":
        return local
    restart = None if local.restart is None else local.restart * per_round
    return dataclasses.replace(local, schedule_unit="steps", warmup=local.warmup * per_round, restart=restart)


def lr_factor(local: Local, step: int, total: int) -> float:
    """The learning rate of a step, counted from 0, over `local.lr`. local: as `in_steps` gives it."""
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
    if not isinstance(tree, dict) or not set(tree) <= set(parameters):
        raise FederationError(
            "site memory: the optimizer's state is of another net; remove it or use another run folder"
        )
    for name, entry in tree.items():
        parameter = parameters[name]
        assert isinstance(entry, dict)
        optimizer.state[parameter] = {
            # the step counter of Adam stays on the CPU, the moments live beside their parameter
            key: value.clone().to("cpu" if value.dim() == 0 else parameter.device)
            if isinstance(value, Tensor)
            else value
            for key, value in entry.items()
        }
