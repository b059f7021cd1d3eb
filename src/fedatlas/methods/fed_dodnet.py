"""Fed-DoDNet: a net with a dynamic head, in a federation.

The net: Zhang, Xie, Xia, Shen. DoDNet: learning to segment multi-organ and tumors from multiple partially labeled
datasets. CVPR 2021 (`nets.dodnet`). In a federation: Xu, Deng, Gateno, Yan. Federated multi-organ segmentation with
inconsistent labels. IEEE Trans. Med. Imaging, 2023, Table VI: FedAvg of all its parameters.

A task is an organ with its lesions. A site trains the tasks of which a sample of the batch annotates a class; the
loss is Dice and binary cross-entropy of the heads' sigmoids over what is annotated. All parts of the net are averaged
over all sites, whatever they annotate: the controller makes the heads of all organs.

With `own: [decoder, controller]` it is DOD*, a baseline of UFPS (Jiang, Ma, Zeng, Ying, Patterns 2024, Table 2 and its
supplement, S6.6), without the latter's pseudo-labels: these parts stay with the site, and a site's model is evaluated as it
was trained, before averaging. It is combined with the multi-decoder setting: every organ is asked of the decoder and the
controller of the site that annotates it (`owners`), at a site that trains nothing, too. `speaks: site` asks the site's own
model for all organs, which for organs that the site does not annotate was never trained. For training a site takes its
parts from its own memory. It sends them all the same, because the server asks for evaluations; other sites are given them
for evaluation alone.

Differences from the papers: a sample may annotate several organs, which are learnt from one pass of encoder and
decoder, or an organ without its lesions. The tasks are those of the net (`net.groups`). The deep supervision that UFPS
mentions is not here. The loss is the mean over all pairs of a sample and a class that it annotates; the official code takes
the mean over the samples of each channel first, and that over channels then, which differs where a batch annotates its
classes unequally often.

Shapes: B batch, C classes with the background, H channels of all heads (C - 1), *S spatial.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol, cast

import torch
from torch import Tensor, nn

from fedatlas import losses
from fedatlas.core.batch import Batch
from fedatlas.core.contract import Clients, Member, Site, State, at_site
from fedatlas.core.errors import FederationError
from fedatlas.core.labels import LabelSpace
from fedatlas.core.options import option, options
from fedatlas.core.organs import Groups
from fedatlas.core.outputs import Others
from fedatlas.core.tensors import Tensors, tensors_of
from fedatlas.learning.loop import Loss, train
from fedatlas.losses import LossChoice
from fedatlas.methods.shared.averaging import SENDS, Weighted, Weighting, answer, mean
from fedatlas.methods.shared.heads import head_known, head_space, head_target
from fedatlas.methods.shared.kept import chosen, names_of_parts
from fedatlas.methods.shared.owners import SENDS as SENDS_OWNED
from fedatlas.methods.shared.owners import WHO_SPEAKS, Speaks, speakers

RATE = 0.01
"""Learning rate of both papers, with SGD."""

MEMORY = "fed_dodnet.own"
"""The key of a site's memory with the tensors that it keeps."""


class DynamicHead(Protocol):
    """A net whose controller makes a head per task; `forward(x, tasks=...)` gives the heads, see `nets.dodnet`."""

    organs: Groups
    controller: nn.Module


@dataclass(frozen=True)
class DoDState(State):
    """model: the mean of everything. kept: the tensors that sites keep, by name. models: site -> the tensors that take
    the place of the mean's when it is evaluated. classes: site -> the classes that it annotates."""

    kept: tuple[str, ...] = ()
    models: dict[str, Tensors] = field(default_factory=dict)
    classes: dict[str, list[int]] = field(default_factory=dict)


@options
class FedDoDNet(Weighted):
    """FedAvg of DoDNet, whose head is made for every organ; all of it shared, or parts kept (Zhang 2021, Xu 2023)."""

    state: ClassVar[type[State]] = DoDState
    tasks: ClassVar[tuple[str, ...]] = ("segmentation",)

    others: ClassVar[Others] = "ignored"
    """A site trains the heads of the tasks that it annotates."""

    own: list[str] = option(
        [], "Parts of the net that a site keeps; none (Fed-DoDNet), or decoder and controller (DOD* of UFPS)."
    )
    evaluate: Literal["before", "after"] = option(
        "before",
        "Where sites keep parts: whether a site is evaluated before averaging, as it was trained, or after, with the "
        "mean of all other parts.",
    )
    speaks: Speaks = option("owners", WHO_SPEAKS)
    loss: LossChoice = option(
        LossChoice(name="masked_dice_bce", options={"smooth_denominator": 1.0, "pooled": False}),
        "The loss of the heads; one for classes that are not exclusive. Options that are given take the place of all of these.",
    )

    @property
    def sends(self) -> dict[str, str]:
        return SENDS_OWNED if self.own else SENDS

    @property
    def own_tensors(self) -> bool:
        return bool(self.own)

    @property
    def summed(self) -> Weighting | None:
        return None if self.own else self.weights

    def start(self, net: nn.Module, clients: Clients) -> DoDState:
        return DoDState(tensors_of(net), kept=self.kept(net))

    def kept(self, net: nn.Module) -> tuple[str, ...]:
        """The names of the tensors of the parts `own`. Raises as `examine`."""
        tasks_of(net)
        return names_of_parts(net, self.own, "method fed_dodnet: own")

    def round(self, state: DoDState, clients: Clients) -> DoDState:
        replies = clients.call(
            self.local_update,
            model=state.model,
            kept=list(state.kept),
            round=state.round,
            rounds=state.rounds,
        )
        model, models, classes = mean(replies, state, self.weights), dict(state.models), dict(state.classes)
        if state.kept:
            for site, values in zip(replies.sites, replies.each("model"), strict=True):
                models[site] = values if self.evaluate == "before" else chosen(values, state.kept)
            classes |= zip(replies.sites, replies.plain("classes"), strict=True)
        return dataclasses.replace(state, model=model, models=models, classes=classes, round=state.round + 1)

    def eval_members(self, state: DoDState, site: str) -> list[Member]:
        """Where sites keep parts, their models as `evaluate` and `speaks` say; else the mean."""
        return speakers(state.model, state.models, state.classes, site, self.speaks)

    @at_site
    def local_update(
        self, site: Site, model: Tensors, kept: list[str], round: int, rounds: int
    ) -> dict[str, Any]:
        own: Any = site.memory.get(MEMORY, {})
        net = site.network(model | own)
        loss = self.L(tasks_of(net), site.labels.space)
        train(site, net, loss, self.local, round=round, rounds=rounds)
        reply = answer(site, net, per_class=False)
        if not kept:
            return reply
        site.memory[MEMORY] = dict(chosen(reply["model"], kept))
        return reply | {"classes": sorted(site.labels.annotated)}

    def L(self, organs: Groups, space: LabelSpace) -> Loss:
        """The local objective: the loss of the heads of the tasks that a batch annotates. organs: the classes of each
        task, the organ first."""
        space = dataclasses.replace(space, groups=tuple(map(tuple, organs)))
        L_heads = losses.make(self.loss, head_space(space))

        def of(net: nn.Module, batch: Batch) -> Tensor:
            known = head_known(batch.known, space)
            annotated = batch.known.any(0).tolist()
            # where there is none, one head that takes no part: its gradient is 0
            tasks = [m for m, organ in enumerate(organs) if any(annotated[c] for c in organ)] or [0]
            found = net(batch.image, tasks=tasks)
            z = all_heads(found, [organs[m] for m in tasks], known.shape[1])
            return L_heads(z, head_target(batch.target, batch.known, space), known)

        return of

    def check(self, space: LabelSpace) -> None:
        """Raises FederationError where the hyper-parameters do not fit the label space."""
        if not space.exclusive:
            raise FederationError(
                "method fed_dodnet: is for exclusive classes, and labels.exclusive is false; its heads are of organs "
                "with the lesions in them, which are read out as exclusive classes"
            )
        losses.make(self.loss, head_space(space))

    def examine(self, net: nn.Module, sites: Sequence[str]) -> list[str]:
        """A note where the learning rate is above that of the papers. Raises FederationError where the net has no dynamic head, or lacks a
        part of `own`."""
        self.kept(net)
        if self.local.optimizer != "sgd" or self.local.lr <= RATE:
            return []
        return [
            f"method fed_dodnet: local.lr is {self.local.lr:g}; its papers have {RATE:g} with sgd. At 0.05 heads were lost in the first steps: "
            "their ReLUs stayed 0 everywhere, and nothing was found"
        ]


def all_heads(found: Sequence[Tensor], organs: Groups, H: int) -> Tensor:
    """[B, H, *S] logits: class c is channel c - 1, and 0 where it is of none of the organs. found: of each organ,
    [B, its classes, *S]."""
    z = [torch.zeros_like(found[0][:, 0])] * H
    for organ, head in zip(organs, found, strict=True):
        for c, logit in zip(organ, head.unbind(1), strict=True):
            z[c - 1] = logit
    return torch.stack(z, 1)


def tasks_of(net: nn.Module) -> Groups:
    """The classes of every task of the net with a dynamic head that `net` is, or wraps. Raises FederationError where
    there is none."""
    for module in net.modules():
        # not isinstance: from Python 3.12 on that of a protocol does not see what a module registers
        if hasattr(module, "organs") and hasattr(module, "controller"):
            return cast(DynamicHead, module).organs
    raise FederationError(
        f"method fed_dodnet: the net {type(net).__name__} has no dynamic head; set net.name to dodnet"
    )
