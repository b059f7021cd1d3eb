"""ConDistFL's switches: what a step is made of, what is averaged, what stays from round to round, what the teacher costs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes import Server, same
from test_local_updates import Drawn, federation, play, small_unet
from torch import Tensor, nn

from fedatlas import losses
from fedatlas.core.batch import Batch
from fedatlas.core.labels import LabelSpace
from fedatlas.core.outputs import Mixed
from fedatlas.core.seeds import generator
from fedatlas.core.tensors import average, tensors_of
from fedatlas.learning.loop import Local
from fedatlas.losses import LossChoice
from fedatlas.losses.heads import thinned
from fedatlas.methods.condistfl import ConDistFL
from fedatlas.methods.fedavg import FedAvg

LOCAL = Local(batch=2, steps=3, lr=1e-2)
OFF: dict[str, Any] = {"lambda_start": 0.0, "lambda_end": 0.0}
SPACE = LabelSpace(("background", "a", "b", "c"), groups=((2, 3),))
MASKS = LabelSpace(("a", "b", "c", "d"), groups=((2, 3),), exclusive=False)


class Says(nn.Module):
    """A net that says what it is told, and remembers what it was shown and how."""

    def __init__(self, outputs: Tensor | Sequence[Tensor]):
        super().__init__()
        self.outputs: Any = outputs
        self.weight = nn.Parameter(torch.ones(()))
        self.shown: list[Tensor] = []
        self.inference: list[bool] = []

    def forward(self, image: Tensor) -> Any:
        self.shown.append(image)
        self.inference.append(torch.is_inference_mode_enabled())
        if isinstance(self.outputs, Tensor):
            return self.outputs * self.weight
        return [head * self.weight for head in self.outputs]


def batch_of(space: LabelSpace, size: tuple[int, ...] = (8, 8)) -> Batch:
    rng = generator("batch")
    masks = (torch.rand(2, len(space), *size, generator=rng) < 0.3).float()
    target = torch.randint(0, 4, (2, *size), generator=rng)
    known = torch.tensor([[space.exclusive, True, False, False]] * 2)
    image = torch.randn(2, 1, *size, generator=rng)
    return Batch(image, target if space.exclusive else masks, known, ["", ""])


class Masks(Drawn):
    """A site whose classes overlap."""

    def batches(self, **asked: Any) -> list[Batch]:  # type: ignore[override]
        batches = super().batches(**asked)
        for batch in batches:
            batch.target = torch.stack([batch.target == c for c in range(4)], 1).float()
        return batches


def overlapping() -> Server:
    return Server(
        Masks("x", {0, 1}, 3, small_unet, MASKS), Masks("y", {2, 3}, 5, small_unet, MASKS), Masks("z", {1, 2}, 2, small_unet, MASKS)
    )  # fmt: skip


@pytest.mark.parametrize("space", [SPACE, MASKS], ids=["exclusive", "overlapping"])
def test_all_heads_are_supervised_and_the_first_is_distilled(space: LabelSpace) -> None:
    rng = generator("heads")
    heads = [torch.randn(2, 4, n, n, generator=rng).requires_grad_() for n in (8, 4, 2, 1)]
    z_g, batch = torch.randn(2, 4, 8, 8, generator=rng), batch_of(space)
    method = ConDistFL()
    terms: Any = method.L_total(Says(z_g), 0.3, space)(Says(heads), batch)
    plain = losses.make(LossChoice(), space)
    expected = sum(
        weight * plain(head, thinned(batch.target, head.shape[2:]), batch.known)
        for weight, head in zip([8 / 15, 4 / 15, 2 / 15, 1 / 15], heads, strict=True)
    )
    torch.testing.assert_close(terms["supervised"], expected)
    condist = method.L_ConDist(heads[0], z_g, batch.target, batch.known, space)
    torch.testing.assert_close(terms["condist"], 0.3 * condist)
    first, *others = torch.autograd.grad(terms["condist"], heads, allow_unused=True)
    assert first.abs().max() > 0 and others == [None] * 3


def test_findings_beside_segmentation_are_supervised_and_not_distilled() -> None:
    rng = generator("mixed")
    z_k, z_g = torch.randn(2, 2, 4, 8, 8, generator=rng)
    f_k = torch.randn(2, 1, generator=rng).requires_grad_()
    batch = batch_of(MASKS)
    batch.finding, batch.finding_known = torch.ones(2, 1), torch.tensor([[True], [False]])

    class Tells(Says):
        def forward(self, image: Tensor) -> Any:
            return Mixed(super().forward(image), f_k)

    method = ConDistFL(loss=LossChoice(findings=0.5))
    terms: Any = method.L_total(Tells(z_g), 1.0, MASKS)(Tells(z_k), batch)
    plain: Any = method.L_total(Says(z_g), 1.0, MASKS)(Says(z_k), batch)
    assert torch.equal(terms["condist"], plain["condist"])
    told = -nn.functional.logsigmoid(f_k[0, 0])
    torch.testing.assert_close(terms["supervised"], plain["supervised"] + 0.5 * told)


@pytest.mark.parametrize("double_softmax", [False, True])
def test_the_cross_entropy_of_the_public_code_is_a_switch(double_softmax: bool) -> None:
    with np.load(Path(__file__).parents[1] / "vectors" / "condist_marginal_dice_ce.npz") as file:
        v = {name: torch.from_numpy(file[name]) for name in file.files}
    space = LabelSpace(("background", *"abcdefg"))
    known = torch.tensor([[c in (0, 6, 7) for c in range(8)]] * 2)
    batch = Batch(torch.zeros(2, 1, 4, 5, 6), v["kidney_gt"][:, 0], known, ["", ""])
    choice = LossChoice(name="marginal_dice_ce", options={"ce_on_probs": double_softmax})
    objective = ConDistFL(loss=choice).L_total(Says(v["logits"]), 1.0, space)
    terms: Any = objective(Says(v["logits"]), batch)
    ce = v["kidney_ce_official"] if double_softmax else v["kidney_ce_true_marginal"]
    torch.testing.assert_close(terms["supervised"], v["kidney_dice"] + ce, atol=1e-5, rtol=0)


def test_the_teacher_is_shown_the_same_batch_without_gradients() -> None:
    batch, student, teacher = batch_of(SPACE), Says(torch.randn(2, 4, 8, 8)), Says(torch.randn(2, 4, 8, 8))
    terms: Any = ConDistFL(tau=2.0).L_total(teacher, 1.0, SPACE)(student, batch)
    sum(terms.values()).backward()
    assert teacher.inference == [True] and student.inference == [False]
    assert teacher.shown[0] is batch.image and student.shown[0] is batch.image
    assert teacher.weight.grad is None and student.weight.grad is not None


def test_the_teacher_computes_in_the_precision_of_the_student() -> None:
    found: list[torch.dtype] = []

    class Watched(Drawn):
        def network(self, *given: Any, **more: Any) -> nn.Module:
            net = super().network(*given, **more)
            net.register_forward_hook(lambda module, image, outputs: found.append(outputs.dtype))
            return net

    for precision, dtype in (("bf16", torch.bfloat16), ("float32", torch.float32)):
        found.clear()
        method = ConDistFL(local=Local(batch=2, steps=2, precision=precision))  # type: ignore[arg-type]
        play(method, Server(Watched("x", {1}, 3, small_unet)), rounds=1)
        assert found == [dtype] * 4


def test_the_teacher_has_no_optimizer_and_does_not_move() -> None:
    nets_made: list[nn.Module] = []

    class Watched(Drawn):
        def network(self, *given: Any, **more: Any) -> nn.Module:
            nets_made.append(super().network(*given, **more))
            return nets_made[-1]

    def make() -> nn.Module:
        return small_unet(norm="batch")

    site = Watched("x", {1}, 3, make)
    play(ConDistFL(local=LOCAL), Server(site), rounds=1, net=make())
    teacher, student = nets_made
    assert same(tensors_of(teacher), tensors_of(make())) and not same(tensors_of(student), tensors_of(make()))
    assert not teacher.training and not any(p.requires_grad for p in teacher.parameters())
    assert len(site.memory["optimizer"]) == len(list(student.parameters()))


@pytest.mark.parametrize(("rule", "weights"), [("cases", [3, 5, 2]), ("equal", [1, 1, 1])])
def test_the_mean_is_weighted_as_asked(rule: Any, weights: list[int]) -> None:
    method = ConDistFL(weights=rule, local=LOCAL)
    assert method.summed == rule
    clients, start = federation(), tensors_of(small_unet())
    each = [
        method.local_update(clients.members[name], model=start, round=0, rounds=1)["model"]
        for name in clients.sites
    ]
    assert same(play(method, federation(), rounds=1).model, average(each, weights))


@pytest.mark.parametrize(
    "local", [LOCAL, Local(batch=2, steps=3, optimizer="sgd", clip=1.0, lr=0.1, opt_state="reset")]
)
@pytest.mark.parametrize("clients", [federation, overlapping], ids=["exclusive", "overlapping"])
def test_without_distillation_it_is_fedavg(clients: Any, local: Local) -> None:
    """E11, bit for bit."""
    expected = play(FedAvg(weights="equal", local=local), clients()).model
    for options in ({}, {"filter": True}, {"group": False, "tau": 2.0}):
        assert same(play(ConDistFL(**OFF, **options, local=local), clients()).model, expected)
    assert not same(play(ConDistFL(local=local), clients()).model, expected)


def test_overlapping_classes_that_are_all_known_are_fedavg() -> None:
    def full() -> Server:
        return Server(*(Masks(name, {0, 1, 2, 3}, 4, small_unet, MASKS) for name in ("x", "y")))

    expected = play(FedAvg(weights="equal", local=LOCAL), full()).model
    assert same(play(ConDistFL(local=LOCAL), full()).model, expected)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_optimizer_and_schedule_go_on_from_round_to_round(optimizer: Any) -> None:
    """Two rounds of n steps at one site are one round of 2 n."""

    class Stream(Drawn):
        """The batches of the rounds, one after the other, however they are asked for."""

        def batches(
            self, *, batch: int, steps: int | None = None, epochs: float | None = None
        ) -> list[Batch]:
            found: list[Batch] = []
            for number in range(2) if steps == 6 else [self.round]:
                self.round = number
                found += super().batches(batch=batch, steps=3)
            return found

    def run(rounds: int, state: Any = "persist", **options: Any) -> Any:
        local = Local(
            batch=2, steps=6 // rounds, lr=1e-2, optimizer=optimizer, opt_state=state, schedule="cosine", warmup=2
        )  # fmt: skip
        return play(ConDistFL(local=local, **options), Server(Stream("x", {1}, 3, small_unet)), rounds).model

    whole = run(1, **OFF)
    assert same(run(2, **OFF), whole)
    assert not same(run(2, "reset", **OFF), whole)
