"""FedSSP: federated self-supervised pre-training, then fine-tuning on partial labels.

A baseline of: Dong, Kampffmeyer, Voiculescu, Xing. Federated partially supervised learning with limited
decentralized medical images. IEEE Trans. Med. Imaging 2023 (FedPSL), Section VII-B.

In the first rounds the sites train the extractor without labels (SimSiam, `simsiam.py`) and all is averaged. Then
SimSiam's heads are dropped, the classifier's own head, untouched so far, is put on the extractor, and the rest of the
rounds is FedAvg with the masked supervised loss.

Reconstruction: the paper gives one sentence. How many rounds each phase has, the heads' widths and the weights of the
mean are not stated; "the prediction heads are fine-tuned" is read as fine-tuning of the whole net, switch
`freeze_encoder`. In the first phase the model that is evaluated is the net as it is, with an untrained head.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

from torch import Tensor, nn

from fedatlas import losses
from fedatlas.core.batch import Batch
from fedatlas.core.contract import Clients, NetSpec, Site, State, at_site
from fedatlas.core.options import option, options
from fedatlas.core.tensors import Tensors, average, tensors_of
from fedatlas.learning.loop import Local, Loss, train
from fedatlas.losses import LossChoice
from fedatlas.methods.shared import simsiam
from fedatlas.methods.shared.averaging import Weighted, site_weights
from fedatlas.methods.shared.simsiam import HEADS, PreTraining


@dataclass(frozen=True)
class SSPState(State):
    """heads: SimSiam's projector and predictor; empty once they are dropped."""

    heads: Tensors = field(default_factory=dict)


@options
class FedSSP(Weighted):
    """Federated SimSiam without labels, then FedAvg with the labels there are (FedPSL's baseline)."""

    state: ClassVar[type[State]] = SSPState
    tasks: ClassVar[tuple[str, ...]] = ("classification",)
    sends: ClassVar[dict[str, dict[str, str]]] = {
        "pretrain_update": simsiam.SENDS,
        "local_update": {"model": "model", "n": "cases"},
    }

    pretrain_rounds: int | None = option(
        None, "Rounds of pre-training, of the federation's rounds; null: half of them.", ge=0
    )
    pretrain: PreTraining = option(PreTraining(), "SimSiam: its local training, views and heads.")
    freeze_encoder: bool = option(False, "Whether fine-tuning leaves the extractor as it is.")
    loss: LossChoice = option(LossChoice(), "The supervised loss of fine-tuning.")
    local: Local = option(Local(), "Fine-tuning at a site between two exchanges.")

    @property
    def nets(self) -> dict[str, NetSpec]:
        return self.pretrain.nets

    def plan(self, rounds: int) -> list[str]:
        """Raises FederationError where no round is left after the pre-training."""
        simsiam.phase_rounds(self.pretrain_rounds, rounds, method="fedssp")
        return super().plan(rounds)

    def start(self, net: nn.Module, clients: Clients) -> SSPState:
        return SSPState(model=tensors_of(net), heads=tensors_of(clients.network(name=HEADS)))

    def round(self, state: SSPState, clients: Clients) -> SSPState:
        first = simsiam.phase_rounds(self.pretrain_rounds, state.rounds, method="fedssp")
        if state.round < first:
            place: dict[str, Any] = {"round": state.round, "rounds": first}
            replies = clients.call(self.pretrain_update, model=state.model, heads=state.heads, **place)
            model, heads = simsiam.averaged(replies, self.weights)
        else:
            place = {"round": state.round - first, "rounds": state.rounds - first}
            replies = clients.call(self.local_update, model=state.model, **place)
            model, heads = average(replies.each("model"), site_weights(replies, self.weights)), {}
        return dataclasses.replace(state, model=model, heads=heads, round=state.round + 1)

    @at_site
    def pretrain_update(
        self, site: Site, model: Tensors, heads: Tensors, round: int, rounds: int
    ) -> dict[str, Any]:
        return simsiam.pretrain(site, model, heads, self.pretrain, round=round, rounds=rounds)

    @at_site
    def local_update(self, site: Site, model: Tensors, round: int, rounds: int) -> dict[str, Any]:
        simsiam.forget(site)
        net = site.network(model)
        loss = losses.supervised(self.loss, site)
        if self.freeze_encoder:
            loss = frozen(cast(Any, net).parts()["encoder"], loss)
        train(site, net, loss, self.local, round=round, rounds=rounds)
        return {"model": tensors_of(net), "n": site.n_train}


def frozen(encoder: nn.Module, loss: Loss) -> Loss:
    """The same loss with the encoder in evaluation mode; its parameters require no gradient from now on."""
    encoder.requires_grad_(False)

    def of_the_head(net: nn.Module, batch: Batch) -> Tensor | dict[str, Tensor]:
        encoder.eval()
        return loss(net, batch)

    return of_the_head
