"""What every registered loss keeps to; a line in the registry, or an entry point of an installed package, is enough to be tested here."""

import dataclasses
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from fedatlas import losses
from fedatlas.core.errors import FederationError
from fedatlas.core.labels import LabelSpace

LOSSES = losses.names()
SPACES = {
    "exclusive": LabelSpace(("background", "liver", "kidney", "spleen")),
    "overlapping": LabelSpace(("left lung", "right lung", "heart", "trachea"), exclusive=False),
    "images": LabelSpace(("effusion", "nodule", "mass", "oedema"), exclusive=False, level="image"),
}
SIZES = {"exclusive": (8, 8), "overlapping": (8, 8), "images": ()}


class Labels(NamedTuple):
    """z: logits [3, 4, *S]. target: as the space has it, 0 where nothing is annotated. hidden: the same, but with labels of
    what is not annotated. known: [3, 4], another row for each sample."""

    z: Tensor
    target: Tensor
    hidden: Tensor
    known: Tensor


def labels_of(kind: str) -> Labels:
    rng = torch.Generator().manual_seed(4)
    exclusive = SPACES[kind].exclusive
    known = torch.tensor(
        [[exclusive, True, False, True], [exclusive, False, True, False], [exclusive] + [True] * 3]
    )
    z = torch.randn(3, 4, *SIZES[kind], generator=rng)
    if exclusive:
        full = torch.randint(0, 4, (3, *SIZES[kind]), generator=rng)
        annotated = known.gather(1, full.flatten(1)).reshape(full.shape)
    else:
        full = (torch.rand(z.shape, generator=rng) < 0.5).to(torch.uint8)
        annotated = known.reshape(3, 4, *[1] * len(SIZES[kind])).expand_as(full)
    return Labels(z, torch.where(annotated, full, 0), full, known)


@pytest.fixture(params=LOSSES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def made(name: str) -> dict[str, losses.LossFunction]:
    """The loss with its defaults, for each kind of labels that it is for."""
    found = {}
    for kind, space in SPACES.items():
        try:
            found[kind] = losses.make(losses.LossChoice(name=name), space)
        except FederationError as refused:
            assert "allowed: auto" in str(refused), "it is refused for another reason than the kind of labels"
    assert found, "it is for no kind of labels"
    return found


def value_and_gradient(
    loss: losses.LossFunction, z: Tensor, target: Tensor, known: Tensor
) -> tuple[Tensor, Tensor]:
    z = z.clone().requires_grad_()
    value = loss(z, target, known)
    assert value.shape == () and bool(value.isfinite())
    (gradient,) = torch.autograd.grad(value, z)
    assert bool(gradient.isfinite().all())
    return value.detach(), gradient


def test_every_option_has_a_default_and_its_sentence(name: str) -> None:
    cls = losses.find(name)
    assert cls and cls.__doc__ and cls.__doc__.strip()
    cls()
    for field in dataclasses.fields(cls):
        sentence = cls.__pydantic_fields__[field.name].description
        assert sentence and sentence.rstrip().endswith("."), f"{name}.{field.name} has no sentence"


def test_labels_that_are_not_annotated_have_no_say(made: dict[str, losses.LossFunction]) -> None:
    """Neither in the value nor in a gradient, which of sigmoids is 0 there."""
    for kind, loss in made.items():
        z, target, hidden, known = labels_of(kind)
        value, gradient = value_and_gradient(loss, z, target, known)
        again, same = value_and_gradient(loss, z, hidden, known)
        assert torch.equal(value, again) and torch.equal(gradient, same)
        assert bool((gradient != 0).any())
        if not SPACES[kind].exclusive:
            assert bool((gradient[~known] == 0).all()), f"{kind}: what is not annotated has a gradient"


def test_where_nothing_is_annotated_nothing_breaks(made: dict[str, losses.LossFunction]) -> None:
    for kind, loss in made.items():
        z, target, _, known = labels_of(kind)
        nothing = torch.zeros_like(known)
        nothing[:, 0] = SPACES[kind].exclusive  # the background is always known
        value, gradient = value_and_gradient(loss, z, torch.zeros_like(target), nothing)
        if not SPACES[kind].exclusive:
            assert value == 0 and not bool(gradient.any())


@pytest.mark.parametrize("size", [0.1, 60.0], ids=["small", "large"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_logits_of_any_size_and_precision(
    made: dict[str, losses.LossFunction], size: float, dtype: torch.dtype
) -> None:
    for kind, loss in made.items():
        z, target, _, known = labels_of(kind)
        value_and_gradient(loss, (size * z).to(dtype), target, known)


def test_several_heads(made: dict[str, losses.LossFunction]) -> None:
    """As of a net with deep supervision, the one of full resolution first; every one of them learns."""
    for kind, loss in made.items():
        if SIZES[kind]:
            z, target, _, known = labels_of(kind)
            heads = [z.clone().requires_grad_(), z[..., ::2, ::2].clone().requires_grad_()]
            value = loss(heads, target, known)
            gradients = torch.autograd.grad(value, heads)
            assert value.shape == () and all(bool((g != 0).any() and g.isfinite().all()) for g in gradients)
