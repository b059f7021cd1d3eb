"""FedCRLD: contrastive re-localization and history distillation.

Qi, Yang, He, Liu, Islam, Li. Contrastive re-localization and history distillation in federated CMR segmentation. MICCAI
2022. A baseline of UFPS (Jiang, Ma, Zeng, Ying, Patterns 2024).

A site has a private encoder beside the shared one, and attention joins the two (`nets.crld_unet`). It remembers a
momentum model, the moving mean of what it has trained so far, from which it distils:

    L_sup  +  .2 CE(p, p_mo)  +  MSE(g, g_mo) + MSE(l, l_mo)  +  (KL(g || l) + KL(l || g)) / 2

for the predictions p and the lowest maps g and l of the shared and the private encoder; _mo marks those of the momentum
model, which get no gradient. The private encoder and the momentum model stay with the site; a site's model is evaluated
as it was trained, before averaging.

Where sites annotate different classes, as in UFPS, every class is asked of the models of the sites that annotate it
(`owners`), at a site that trains nothing, too: the numbers that UFPS prints for organs that a site does not annotate
(Table S2) demand it. `speaks: site` is the protocol of FedCRLD's own paper, whose sites annotate all classes: a site's own
model says all of them.

A site sends what is private all the same, with the rest of its model, because the server asks for evaluations and must
have the site's model for that; other sites are given it for evaluation alone. For training a site takes it from its own
memory. The momentum model is never sent.

Difference from UFPS, which speaks of the distance of predictions where the official code has .2 CE: as the code.

Differences from the official code, which follow the paper: there, neither the download of the shared parameters nor the
momentum update takes effect, because both are assigned to the variables of a loop. Its mean over sites is not
weighted, as with `weights: equal`.

What sites have in common is all but the private encoder, as UFPS has it. In the official code it is the shared encoder
alone: `common: encoder`, with which attention, decoder and head are private, too.

Differences from the official code: there, the momentum model learns from labels, too, and KL is divided by the number of
channels as well.

Reconstruction: the momentum model moves once a round, after training. A site that has none yet, in its first round,
leaves out the terms that need it. The supervised loss is one that respects missing labels. KL is of the softmax over
channels, MSE and KL are means over samples and voxels, and p_mo is soft. Where classes overlap, the cross-entropy is
binary, the mean over classes.

Shapes: B batch, C classes, d channels of the lowest maps, *S spatial.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedatlas import losses
from fedatlas.core.batch import Batch
from fedatlas.core.contract import Clients, Member, Site, State, at_site
from fedatlas.core.errors import FederationError
from fedatlas.core.options import option, options
from fedatlas.core.outputs import voxel_logits
from fedatlas.core.tensors import Tensors, parts, tensors_of
from fedatlas.learning.loop import Loss, train
from fedatlas.methods.shared.averaging import Weighted, Weighting, answer, mean
from fedatlas.methods.shared.kept import chosen, names_of_parts
from fedatlas.methods.shared.owners import SENDS, WHO_SPEAKS, Speaks, speakers

PRIVATE = "private_encoder"
"""The part of a net that stays with the site."""

OWN, MOMENTUM = "fedcrld.own", "fedcrld.momentum"
"""The keys of a site's memory with what of its net is private and with its momentum model."""


@dataclass(frozen=True)
class CRLDState(State):
    """model: the mean of everything. private: the tensors that sites keep, by name. models: site -> the tensors that
    take the place of the mean's when it is evaluated. classes: site -> the classes that it annotates."""

    private: tuple[str, ...] = ()
    models: dict[str, Tensors] = field(default_factory=dict)
    classes: dict[str, list[int]] = field(default_factory=dict)


@options
class FedCRLD(Weighted):
    """A private encoder beside the shared one, joined by attention, with distillation from a momentum model (Qi 2022)."""

    state: ClassVar[type[State]] = CRLDState
    tasks: ClassVar[tuple[str, ...]] = ("segmentation",)
    sends: ClassVar[dict[str, str]] = SENDS
    own_tensors: ClassVar[bool] = True

    lambda_ce: float = option(0.2, "Weight of the cross-entropy with the momentum model's predictions.", ge=0)
    lambda_mse: float = option(
        1.0, "Weight of the distances of both lowest maps to the momentum model's.", ge=0
    )
    lambda_kl: float = option(1.0, "Weight of the divergence of shared and private lowest maps.", ge=0)
    momentum: float = option(0.5, "Share of itself that the momentum model keeps in a round.", ge=0, le=1)
    common: Literal["all_but_private_encoder", "encoder"] = option(
        "all_but_private_encoder",
        "What the sites have in common: all but the private encoder, as in UFPS, or the shared encoder alone, as in the "
        "official code.",
    )
    evaluate: Literal["before", "after"] = option(
        "before",
        "Whether a site is evaluated before averaging, as it was trained, or after, with the mean of what is common.",
    )
    speaks: Speaks = option("owners", WHO_SPEAKS)
    weights: Weighting = option(
        "cases", "n_k/n: a site counts by its training cases, or all count equally, as in the official code."
    )

    def start(self, net: nn.Module, clients: Clients) -> CRLDState:
        return CRLDState(tensors_of(net), private=private_of(net, self.common))

    def round(self, state: CRLDState, clients: Clients) -> CRLDState:
        replies = clients.call(
            self.local_update,
            model=state.model,
            private=list(state.private),
            round=state.round,
            rounds=state.rounds,
        )
        model, models = mean(replies, state, self.weights), dict(state.models)
        for site, values in zip(replies.sites, replies.each("model"), strict=True):
            models[site] = values if self.evaluate == "before" else chosen(values, state.private)
        classes = state.classes | dict(zip(replies.sites, replies.plain("classes"), strict=True))
        return dataclasses.replace(state, model=model, models=models, classes=classes, round=state.round + 1)

    def eval_members(self, state: CRLDState, site: str) -> list[Member]:
        """The sites' models, as `evaluate` and `speaks` say."""
        return speakers(state.model, state.models, state.classes, site, self.speaks)

    @at_site
    def local_update(
        self, site: Site, model: Tensors, private: list[str], round: int, rounds: int
    ) -> dict[str, Any]:
        own: Any = site.memory.get(OWN, {})
        history: Any = site.memory.get(MOMENTUM)
        net, teacher = site.network(model | own), None
        if history is not None and (self.lambda_ce or self.lambda_mse):
            teacher = site.network(history).eval()
        train(site, net, self.L(site, teacher), self.local, round=round, rounds=rounds)
        reply = answer(site, net, per_class=False)
        site.memory[OWN] = dict(chosen(reply["model"], private))
        site.memory[MOMENTUM] = dict(moved(history, reply["model"], self.momentum))
        return reply | {"classes": sorted(site.labels.annotated)}

    def L(self, site: Site, teacher: nn.Module | None) -> Loss:
        """The local objective. teacher: the momentum model, in evaluation mode; None: without its terms."""
        L_sup, exclusive = losses.for_site(self.loss, site), site.labels.space.exclusive

        def of(net: nn.Module, batch: Batch) -> dict[str, Tensor]:
            outputs, (g, l) = net(batch.image, bottlenecks=True)
            terms = {"supervised": losses.on_batch(L_sup, outputs, batch, self.loss.findings)}
            if self.lambda_kl:
                terms["kl"] = self.lambda_kl * symmetric_kl(g, l)
            if teacher is not None:
                with torch.no_grad():
                    told, (g_mo, l_mo) = teacher(batch.image, bottlenecks=True)
                if self.lambda_ce:
                    terms["momentum_ce"] = self.lambda_ce * cross_entropy(
                        voxel_logits(outputs), voxel_logits(told), exclusive=exclusive
                    )
                if self.lambda_mse:
                    distance = F.mse_loss(g.float(), g_mo.float()) + F.mse_loss(l.float(), l_mo.float())
                    terms["momentum_mse"] = self.lambda_mse * distance
            return terms

        return of

    def examine(self, net: nn.Module, sites: Sequence[str]) -> list[str]:
        """Raises FederationError for a net without a private encoder."""
        private_of(net, self.common)
        return []


def symmetric_kl(a: Tensor, b: Tensor) -> Tensor:
    """The mean of KL(a || b) and KL(b || a), for the softmax over the channels of maps [B, d, *S]; the mean over samples
    and voxels."""
    log_a, log_b = a.float().log_softmax(1), b.float().log_softmax(1)
    return ((log_a.exp() - log_b.exp()) * (log_a - log_b)).sum(1).mean() / 2


def cross_entropy(z: Tensor, told: Tensor, *, exclusive: bool) -> Tensor:
    """The cross-entropy of predictions with those of a teacher, the mean over samples and voxels; where classes are not
    exclusive that of sigmoids, the mean over classes too. z, told: logits [B, C, *S]."""
    z, told = z.float(), told.float()
    if exclusive:
        return -(told.softmax(1) * z.log_softmax(1)).sum(1).mean()
    return F.binary_cross_entropy_with_logits(z, told.sigmoid())


def moved(history: Tensors | None, model: Tensors, momentum: float) -> Tensors:
    """The moving mean: `momentum` times itself and the rest of the model; the model where there is none yet. Integers and
    booleans are those of the model."""
    if history is None:
        return model
    return {
        name: momentum * history[name] + (1 - momentum) * value if value.is_floating_point() else value
        for name, value in model.items()
    }


def private_of(net: nn.Module, common: str) -> tuple[str, ...]:
    """The names of the tensors that stay with a site, see `FedCRLD.common`. Raises FederationError for a net without a
    private encoder."""
    if PRIVATE not in parts(net):
        raise FederationError(
            f"method fedcrld: the net {type(net).__name__} has no private encoder; set net.name to crld_unet"
        )
    own = [PRIVATE] if common != "encoder" else [part for part in parts(net) if part != "encoder"]
    return names_of_parts(net, own, "method fedcrld")
