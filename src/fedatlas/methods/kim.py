"""Federated learning with knowledge distillation from a global and from pre-trained local models.

Kim, Park, Kang, Jin, Adeli, Pohl, Park. Federated learning with knowledge distillation for multi-organ segmentation
with partially labeled datasets. Med. Image Anal. 95, 2024. A baseline of ConDistFL (`condistfl.py`).

One net with a head per organ: sigmoid channels for the organ with its lesions and for each lesion. Before the first
round every site trains a net of its own on its own labels, and the server hands these to all other sites, once. Then
a site learns the channels that a sample annotates from its labels (Dice and binary cross-entropy) and all others from
the global model of the round (global distillation) and from local models of other sites, some of which are drawn at
every step (local distillation).

The heads are read from the logits of the federation's net (`core.organs.read_heads`), so that the largest logit
is the merge of the heads. With the net `organ_heads` they are independent, as the paper has them, and of the organs of its
option `groups`, by default those of `labels.groups`; with any other net for exclusive classes they share the background's
channel. Where classes overlap every channel is a head.

Differences from the paper
    A site may annotate several organs, a sample any classes: each channel of a head is either learnt from the sample's
    labels or distilled, and a local model speaks for the channels that its site annotates. A class without a lesion
    has one channel. The paper's own setting is recovered where every site annotates one whole head. Sites, not
    organs, are drawn: `local_teachers`; how many is not known to us. How long the local models are trained is not
    stated, `pretrain_rounds`. Reconstruction: the merge of the heads, which the paper leaves open. Findings of the
    whole image, which the paper has not, are learnt from labels alone. Kim's own net is `organ_heads` on the backbone
    `kim_unet`, a reconstruction too.
    The optimizer is that of the federation; the paper's is sgd with lr 0.01, momentum 0.9, schedule poly, batch 2,
    for 1000 rounds of 80 steps.

Differences from the official code
    Its class of local distillation takes the drawn heads for the site's own in the global term, which therefore
    distils the annotated head and not the drawn ones: switch `sampled_only`. Its branch `flkd` calls a training
    function without the global model and cannot run.

Shapes: B batch, C classes, H channels of all heads (C - 1 if exclusive, else C), *S spatial.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from fedatlas import losses
from fedatlas.core.batch import Batch
from fedatlas.core.contract import Clients, Site, State, at_site
from fedatlas.core.labels import LabelSpace
from fedatlas.core.options import option, options
from fedatlas.core.outputs import heads as voxel_heads
from fedatlas.core.tensors import Tensors, Tree, average, tensors_of, to_tree
from fedatlas.learning.loop import Loss, forget_optimizer, train
from fedatlas.losses import LossChoice
from fedatlas.losses.masked import masked_bce
from fedatlas.methods.shared.averaging import SENDS, Weighted, Weighting, site_weights
from fedatlas.methods.shared.heads import head_known, head_space, head_target, heads, heads_of, with_groups_of
from fedatlas.methods.shared.teachers import steps_of

TEACHERS = "teachers"
"""The key in a site's memory of the local models of the other sites."""


@dataclass(frozen=True)
class KimState(State):
    """teachers: site -> its pre-trained model, kept until all sites have received all models.
    classes: site -> annotated classes. served: sites that have received them."""

    teachers: dict[str, Tensors] = field(default_factory=dict)
    classes: dict[str, list[int]] = field(default_factory=dict)
    served: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Teacher:
    """A pre-trained local model, in evaluation mode; speaks [H] bool: the channels that its site annotates."""

    net: nn.Module
    speaks: Tensor


@options
class Kim(Weighted):
    """FedAvg plus distillation of every head that a sample does not annotate, from two kinds of teachers (Kim 2024)."""

    tasks: ClassVar[tuple[str, ...]] = ("segmentation",)
    state: ClassVar[type[State]] = KimState
    lambda_gt: float = option(1.0, "Weight of the supervised loss.", ge=0)
    lambda_global: float = option(1.0, "Weight of the distillation from the global model.", ge=0)
    lambda_local: float = option(
        1.0, "Weight of the distillation from local models; 0: none are pre-trained.", ge=0
    )
    T: float = option(1.0, "Temperature of teachers and student.", gt=0)
    pretrain_rounds: int | None = option(
        None,
        "How long a site's own model is trained before the first round, in rounds of `local`, within one call "
        "(faults.deadline); null: as long as the federation has rounds.",
        ge=1,
    )
    local_teachers: int | None = option(
        1, "Local models of other sites that are drawn at every step; null: all.", ge=1
    )
    sampled_only: bool = option(
        False,
        "Whether the global model teaches every head but those of the drawn local models, the annotated one included "
        "(official code), instead of every head that is not annotated.",
    )
    weights: Weighting = option("equal", "All sites count equally, or by their training cases.")
    loss: LossChoice = option(
        LossChoice(name="masked_dice_bce", options={"smooth_denominator": 1.0, "pooled": False}),
        "The supervised loss of the heads; one for classes that are not exclusive. Options that are given take the place of all of these.",
    )

    @property
    def sends(self) -> dict[str, dict[str, str]]:
        teacher = {"teacher": "model:main", "classes": "classes"}
        return {"pretrain_update": teacher if self.lambda_local else SENDS, "local_update": SENDS}

    @property
    def summed(self) -> Weighting | None:
        return None if self.lambda_local else self.weights

    def steps_before(self, rounds: int, sites: int, cases: int | None = None) -> int | None:
        alone = not self.lambda_local or sites < 2
        return 0 if alone else steps_of(self.local, self.pretrain_rounds or rounds, cases)

    def start(self, net: nn.Module, clients: Clients) -> KimState:
        return KimState(model=tensors_of(net))

    def round(self, state: KimState, clients: Clients) -> KimState:
        teachers, classes, served = dict(state.teachers), dict(state.classes), list(state.served)
        if state.round == 0 and self.lambda_local and len(clients.sites) > 1:
            for site, reply in clients.call(self.pretrain_update, model=state.model, rounds=state.rounds):
                teachers[site], classes[site] = reply["teacher"], reply["classes"]
        told = {name: {"model": teachers[name], "classes": classes[name]} for name in sorted(teachers)}
        others: dict[str, dict[str, Any]] = {site: {} for site in clients.sites}
        for site in clients.sites if told else ():
            if site not in served:
                others[site]["teachers"] = {name: one for name, one in told.items() if name != site}
        place: dict[str, Any] = {"round": state.round, "rounds": state.rounds}
        replies = clients.call(self.local_update, each=others if told else None, model=state.model, **place)
        if teachers:
            served = sorted({*served, *replies.sites})
        if set(served) >= set(clients.sites):
            teachers, classes = {}, {}
        model = average(replies.each("model"), site_weights(replies, self.weights))
        return dataclasses.replace(
            state, model=model, teachers=teachers, classes=classes, served=served, round=state.round + 1
        )

    @at_site
    def pretrain_update(self, site: Site, model: Tensors, rounds: int) -> dict[str, Any]:
        """A model of the site alone, from the common start; one that was trained to the same bits before is taken from the
        site's cache (`Site.once`)."""
        length = self.pretrain_rounds or rounds
        of = cast(dict[str, Tree], to_tree({"start": model, "method": self, "rounds": length}))
        teacher = site.once("kim-teacher", of, lambda: dict(self._trained_alone(site, model, length)))
        return {"teacher": teacher, "classes": sorted(site.labels.annotated)}

    def _trained_alone(self, site: Site, model: Tensors, length: int) -> Tensors:
        net, memory = site.network(model), "teacher optimizer"
        alone = dataclasses.replace(self, lambda_gt=1.0)  # here is no other term to weigh it against
        loss = alone.L(None, [], with_groups_of(net, site.labels.space), site.rng)
        for round in range(length):
            train(site, net, loss, self.local, round=round, rounds=length, memory=memory)
        forget_optimizer(site, memory)
        return tensors_of(net)

    @at_site
    def local_update(
        self,
        site: Site,
        model: Tensors,
        round: int,
        rounds: int,
        teachers: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> dict[str, Any]:
        """teachers: the other sites' local models, {"model", "classes"} by site; given once, then remembered."""
        if teachers is not None:
            site.memory[TEACHERS] = cast(Tree, {name: dict(teachers[name]) for name in sorted(teachers)})
        kept = cast(dict[str, Any], site.memory.get(TEACHERS, {})) if self.lambda_local else {}
        F_local = [teacher(site, kept[name]["model"], kept[name]["classes"]) for name in sorted(kept)]
        F_global = site.network(model).eval().requires_grad_(False) if self.lambda_global else None
        net = site.network(model)
        loss = self.L(F_global, F_local, with_groups_of(net, site.labels.space), site.rng)
        train(site, net, loss, self.local, round=round, rounds=rounds)
        return {"model": tensors_of(net), "n": site.n_train}

    def L(
        self,
        F_global: nn.Module | None,
        F_local: Sequence[Teacher],
        space: LabelSpace,
        rng: torch.Generator,
    ) -> Loss:
        """The local objective with its terms. F_global: the global model of the round; None leaves its term out, as
        an empty F_local does with the other. rng: draws local teachers."""
        L_sup = losses.make(self.loss, head_space(space))

        def of(net: nn.Module, batch: Batch, known: Tensor) -> dict[str, Tensor]:
            drawn = self.draw(F_local, known, rng)
            with torch.inference_mode():
                z_local = [(one.speaks, heads_of(one.net, batch.image, space)) for one in drawn]
                z_global = None if F_global is None else heads_of(F_global, batch.image, space)
            outputs = net(batch.image)
            logits = voxel_heads(outputs)
            z = heads(logits, space) if isinstance(logits, Tensor) else [heads(one, space) for one in logits]
            first = z if isinstance(z, Tensor) else z[0]

            def L_gt(outputs: Tensor | Sequence[Tensor], target: Tensor, known: Tensor) -> Tensor:
                return L_sup(z, head_target(target, known, space), head_known(known, space))

            supervised = losses.on_batch(L_gt, outputs, batch, self.loss.findings)
            terms = {"supervised": self.lambda_gt * supervised}
            if z_global is not None:
                taught = ~known
                if self.sampled_only:
                    taught = torch.ones_like(known)
                    for speaks, _ in z_local:
                        taught = taught & ~speaks
                terms["global"] = self.lambda_global * L_KD(first, z_global, taught, self.T)
            if z_local:
                parts = [(L_KD(first, z_t, ~known & s, self.T), (~known & s).sum()) for s, z_t in z_local]
                pairs = torch.stack([count for _, count in parts]).sum().clamp(min=1)
                terms["local"] = self.lambda_local * torch.stack([v * n / pairs for v, n in parts]).sum()
            return terms

        return lambda net, batch: of(net, batch, head_known(batch.known, space))

    def draw(self, F_local: Sequence[Teacher], known: Tensor, rng: torch.Generator) -> list[Teacher]:
        """The local teachers of one step, out of those that speak for a channel that a sample lacks; known [B, H]."""
        useful = [one for one in F_local if bool((one.speaks & ~known).any())]
        if self.local_teachers is None or len(useful) <= self.local_teachers:
            return useful
        chosen = torch.randperm(len(useful), generator=rng)[: self.local_teachers]
        return [useful[i] for i in sorted(chosen.tolist())]

    def check(self, space: LabelSpace) -> None:
        """Raises FederationError where the hyper-parameters do not fit the label space."""
        losses.make(self.loss, head_space(space))


def L_KD(z: Tensor, z_t: Tensor, taught: Tensor, T: float = 1.0) -> Tensor:
    """Binary cross-entropy of the student's logits z [B, H, *S] with the teacher's probabilities, of logits z_t, over
    the channels that are taught [B, H] and all voxels. 0, with a gradient of 0, where none is."""
    return masked_bce(z / T, (z_t.detach() / T).sigmoid(), taught)


def teacher(site: Site, model: Tensors, classes: Sequence[int]) -> Teacher:
    """A local model that speaks for the given foreground classes."""
    space = site.labels.space
    speaks = torch.tensor([c in set(classes) for c in space.foreground], device=site.device)
    return Teacher(site.network(model).eval().requires_grad_(False), speaks)
