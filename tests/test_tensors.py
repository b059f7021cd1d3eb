"""tensors.py: names, loading, parts, averaging, trees."""

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

from fedatlas.core.contract import State
from fedatlas.core.errors import NameMismatch
from fedatlas.core.tensors import average, from_tree, is_finite, load, parts, tensors_of, to_tree


class Aliased(nn.Module):
    """A net whose state dict holds the same tensors under two names, as MONAI's DynUNet does."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(2)
        self.again = nn.ModuleList([self.first])

    def parts(self) -> dict[str, nn.Module]:
        return {"body": self.first}


def models(k: int, seed: int = 0) -> list[dict[str, Tensor]]:
    rng = torch.Generator().manual_seed(seed)
    return [
        {
            "w": torch.randn(4, 3, generator=rng),
            "h": torch.randn(5, generator=rng).bfloat16(),
            "n": torch.randint(0, 9, (), generator=rng),
        }
        for _ in range(k)
    ]


def test_aliases_are_named_once_and_round_trip() -> None:
    net, other = Aliased(), Aliased()
    values = tensors_of(net)
    assert len(net.state_dict()) == len(values) + 2
    load(other, values)
    assert all(torch.equal(values[name], value) for name, value in tensors_of(other).items())


def test_a_copy_is_taken() -> None:
    net = Aliased()
    values = tensors_of(net)
    with torch.no_grad():
        net.first.weight.add_(1)
    assert not torch.equal(values["first.weight"], net.first.weight)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda v: v.pop("first.bias"), "missing: first.bias"),
        (lambda v: v.update(extra=torch.zeros(1)), "not known: extra"),
        (
            lambda v: v.update({"first.bias": torch.zeros(3)}),
            r"first.bias is float32\[3\], expected float32\[2\]",
        ),
        (lambda v: v.update({"first.bias": torch.zeros(2).double()}), r"float64\[2\], expected float32\[2\]"),
    ],
)
def test_any_difference_is_refused_and_nothing_is_loaded(change, text: str) -> None:
    net = Aliased()
    before = tensors_of(net)
    values = {name: value + 1 for name, value in tensors_of(net).items()}
    change(values)
    with pytest.raises(NameMismatch, match=text):
        load(net, values)
    assert all(torch.equal(before[name], value) for name, value in tensors_of(net).items())


def test_parts_cover_every_tensor_once() -> None:
    found = parts(Aliased())
    assert found["body"] == ("first.weight", "first.bias")
    assert sorted(name for names in found.values() for name in names) == sorted(tensors_of(Aliased()))


def test_parts_that_share_a_tensor_are_refused() -> None:
    net = Aliased()
    net.parts = lambda: {"a": net.first, "b": net.again}  # type: ignore[method-assign,assignment,return-value]
    with pytest.raises(NameMismatch, match="first.weight"):
        parts(net)


@pytest.mark.parametrize("weights", [[1, 1, 1], [34, 22, 7], [0.1, 0.7, 0.2], [0, 0, 3]])
def test_the_mean_of_equal_models_is_that_model(weights: list[float]) -> None:
    model = models(1)[0]
    rows = torch.tensor(weights, dtype=torch.float64)[:, None].repeat(1, 4) + torch.rand(3, 4).double()
    mean = average([model] * 3, weights, each={"w": rows})
    assert all(torch.equal(mean[name], value) for name, value in model.items())


def test_against_a_literal_mean() -> None:
    three, weights = models(3), [3.0, 1.0, 2.0]
    rows = torch.tensor([[1.0, 0, 2, 1], [0, 0, 1, 1], [4, 5, 0, 1]])
    mean = average(iter(three), weights, each={"w": rows})
    for row in range(4):
        literal = sum(float(rows[k, row]) * three[k]["w"][row].double() for k in range(3)) / float(
            rows[:, row].sum()
        )
        assert torch.equal(mean["w"][row], literal.float())
    literal = sum(weights[k] * three[k]["h"].double() for k in range(3)) / 6
    assert torch.equal(mean["h"], literal.bfloat16())
    assert mean["n"] == max(int(model["n"]) for model in three) and mean["n"].dtype == torch.int64


def test_averages_refuse_what_they_cannot_mean() -> None:
    three = models(3)
    with pytest.raises(ValueError, match="2 weights"):
        average(three, [1, 1])
    with pytest.raises(ValueError, match="4 weights for 3 models"):
        average(three, [1, 1, 1, 1])
    with pytest.raises(ValueError, match="sum to zero"):
        average(three, [0, 0, 0])
    with pytest.raises(ValueError, match="finite and not negative"):
        average(three, [1, -1, 1])
    with pytest.raises(ValueError, match="the weights of w sum to zero"):
        average(three, [1, 1, 1], each={"w": torch.tensor([[1.0, 0, 1, 1]] * 3)})
    with pytest.raises(NameMismatch, match="which the models do not have"):
        average(three, [1, 1, 1], each={"v": [1, 1, 1]})
    with pytest.raises(NameMismatch, match="model 2"):
        average([three[0], {"w": three[0]["w"]}], [1, 1])
    with pytest.raises(NameMismatch, match="boolean"):
        average([{"m": torch.tensor([True])}, {"m": torch.tensor([False])}], [1, 1])
    with pytest.raises(ValueError, match="at least one"):
        average([], [])


@dataclass(frozen=True)
class Kept(State):
    """A state as a method may define it."""

    banks: dict[str, list[float]] = field(default_factory=dict)
    classes: tuple[int, ...] = ()
    pairs: tuple[tuple[int, int], ...] = ()


def test_a_state_survives_as_a_tree() -> None:
    state = Kept(models(1)[0], 3, 7, {"a": [1.5, 2.0]}, (1, 2), ((1, 2), (3, 4)))
    again = from_tree(Kept, to_tree(state))
    assert again.classes == (1, 2) and again.pairs == ((1, 2), (3, 4)) and again.banks == state.banks
    assert torch.equal(again.model["w"], state.model["w"])
    with pytest.raises(TypeError, match="fields"):
        from_tree(State, to_tree(state))


def test_a_tree_holds_nothing_else() -> None:
    with pytest.raises(TypeError, match=r"value\['a'\]\[1\] is a set"):
        to_tree({"a": [1, {2}]})
    with pytest.raises(TypeError, match="keys are strings"):
        to_tree({1: 2})


def test_finite_sees_every_leaf() -> None:
    assert is_finite({"a": [torch.zeros(2), 1.0, None, "nan", torch.tensor([3])]})
    assert not is_finite({"a": [torch.tensor([0.0, float("nan")])]})
    assert not is_finite({"a": [float("inf")]})
