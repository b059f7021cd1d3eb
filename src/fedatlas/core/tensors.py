"""The only code that touches weight names: a model as named tensors, loading, parts, averaging, trees.

Shapes: K models.
"""

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar, Union, get_origin, get_type_hints

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvTransposeNd

from fedatlas.core.errors import FederationError, NameMismatch, first_of

Tensors = dict[str, Tensor]
"""The only form in which a model is kept, sent or averaged: parameters and saved buffers, each once."""

Tree = Union[Tensor, float, int, str, bool, None, list["Tree"], dict[str, "Tree"]]  # noqa: UP007  (recursive)
"""What may cross a wire or be kept: tensors and plain values, in lists and in dicts with string keys."""

Weights = Sequence[float] | Tensor
"""One weight per model [K], or one per model and row of a tensor's first axis [K, rows]."""

T = TypeVar("T")


def _live(net: nn.Module) -> dict[str, Tensor]:
    """The tensors of a net by name, sharing its memory; of several names of one tensor, the first."""
    saved = net.state_dict(keep_vars=True)
    seen: set[int] = set()
    live = {}
    for name, tensor in saved.items():
        if not isinstance(tensor, Tensor):
            raise NameMismatch(
                f"{type(net).__name__}: {name!r} is a {type(tensor).__name__}; only tensors travel"
            )
        if id(tensor) not in seen:
            seen.add(id(tensor))
            live[name] = tensor
    return live


def tensors_of(net: nn.Module) -> Tensors:
    """A copy, on the CPU, of every parameter and saved buffer of a net; aliases are left out."""
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in _live(net).items()}


def shapes_of(net: nn.Module) -> Tensors:
    """As `tensors_of`, on the meta device: the shapes and types alone."""
    return {name: torch.empty_like(tensor, device="meta") for name, tensor in _live(net).items()}


def forms_of(net: nn.Module, part: str = "") -> dict[str, tuple[str, tuple[int, ...]]]:
    """name -> (dtype, shape) of what `tensors_of` gives; nothing is copied. part: "parameters" or "buffers", only
    those; "": all."""
    if part not in ("", "parameters", "buffers"):
        raise ValueError(f"part {part!r} of a net's tensors; allowed: parameters, buffers, or none for all")
    return {
        name: (_dtype(tensor), tuple(tensor.shape))
        for name, tensor in _live(net).items()
        if not part or isinstance(tensor, nn.Parameter) == (part == "parameters")
    }


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def load(net: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Copies `values` into a net, in place. Raises NameMismatch, before anything is changed, unless names,
    shapes and dtypes are equal."""
    live = _live(net)
    require_same(live, values, asked=type(net).__name__)
    with torch.no_grad():
        for name, tensor in live.items():
            tensor.copy_(values[name])


def require_same(expected: Mapping[str, Tensor], got: Mapping[str, Tensor], *, asked: str) -> None:
    """Raises NameMismatch, listing the difference, unless both have the same names, shapes and dtypes."""
    missing = [name for name in expected if name not in got]
    extra = [name for name in got if name not in expected]
    differ = [
        f"{name} is {_form(got[name])}, expected {_form(tensor)}"
        for name, tensor in expected.items()
        if name in got and _form(got[name]) != _form(tensor)
    ]
    if missing or extra or differ:
        parts = [("missing", missing), ("not known", extra), ("of another form", differ)]
        listed = "; ".join(f"{what}: {first_of(names, 6)}" for what, names in parts if names)
        raise NameMismatch(f"{asked}: the tensors do not fit, nothing was loaded. {listed}")


def _form(tensor: Tensor) -> str:
    return f"{_dtype(tensor)}{list(tensor.shape)}"


def parts(net: nn.Module) -> dict[str, tuple[str, ...]]:
    """The named parts of a net: part -> names of its tensors. A net names its parts by module identity, with
    a method `parts() -> dict[str, nn.Module | list[nn.Module]]`; what it does not name is the part "rest". Of a wrapper,
    as DataParallel, they are the parts of the net within.

    Raises NameMismatch if two parts share a tensor.
    """
    inner = next((module for module in net.modules() if callable(getattr(module, "parts", None))), None)
    declared: Mapping[str, Any] = {} if inner is None else inner.parts()  # type: ignore
    name_of = {id(tensor): name for name, tensor in _live(net).items()}
    owner: dict[str, str] = {}
    for part, modules in declared.items():
        for module in [modules] if isinstance(modules, nn.Module) else modules:
            for tensor in module.state_dict(keep_vars=True).values():
                name = name_of[id(tensor)]
                if owner.setdefault(name, part) != part:
                    raise NameMismatch(
                        f"{type(net).__name__}: {name} is in the parts {owner[name]!r} and {part!r}"
                    )
    named: dict[str, list[str]] = {part: [] for part in declared}
    for name in name_of.values():
        named.setdefault(owner.get(name, "rest"), []).append(name)
    return {part: tuple(names) for part, names in named.items() if names}


def head_of(net: nn.Module, part: str = "head") -> dict[str, int]:
    """The tensors of a part of a net that has one entry per class, each with the axis along which its classes lie: the
    first, but the second of the kernel of a transposed convolution.

    Raises FederationError where the net names no such part, or a tensor of it does not have one entry per class.
    """
    names = parts(net).get(part, ())
    if not names:
        raise FederationError(
            f'net {type(net).__name__}: names no part "{part}", whose rows are to be told apart by class; take a '
            "registered net, or average all rows alike"
        )
    kernels = {
        f"{name}.weight".lstrip(".")
        for name, module in net.named_modules()
        if isinstance(module, _ConvTransposeNd)
    }
    shapes = {name: shape for name, (_, shape) in forms_of(net).items()}
    axes = {name: int(name in kernels) for name in names}
    sizes = {name: shapes[name][axis] if shapes[name] else 0 for name, axis in axes.items()}
    classes = getattr(net, "classes", max(sizes.values()))
    for name, size in sizes.items():
        if size != classes:
            raise FederationError(
                f"net {type(net).__name__}: {name} of its {part} is {list(shapes[name])}, not one row for each "
                f"of {classes} classes; its rows cannot be told apart"
            )
    return axes


def average(
    models: Iterable[Mapping[str, Tensor]],
    weights: Weights,
    *,
    each: Mapping[str, Weights] | None = None,
) -> Tensors:
    """The weighted mean of K models of equal names, in one pass over them and in their order (P7).

    weights: [K], need not sum to one; the sum is divided by once, at the end.
    each: tensor name -> weights of its own, [K], or [K, rows] for one weight per row of the first axis.
        For a part of a net: `dict.fromkeys(parts(net)["decoder"], weights)`.

    Floating tensors are summed in float64 and cast back once, so the mean of equal models is that model,
    bit for bit, where its tensors are narrower than float64. Integer tensors (counters) become the largest of the K; boolean ones must be equal.
    Memory: the sum in float64 and one model, whatever K is; models are read one at a time.

    Raises NameMismatch if the models differ in form, ValueError for weights that are negative, not
    finite, of another number than the models, or that sum to zero (for a row: nobody may speak for it).
    """
    rule = {name: _checked(value, name) for name, value in (each or {}).items()}
    common = _checked(weights, "the weights")
    total: Tensors = {}
    form: Mapping[str, Tensor] = {}
    count = 0
    for model in models:
        if count == 0:
            form = {name: torch.empty_like(tensor, device="meta") for name, tensor in model.items()}
            unknown = [name for name in rule if name not in model]
            if unknown:
                raise NameMismatch(
                    f"average: weights are given for {first_of(unknown, 6)}, which the models do not have"
                )
        require_same(form, model, asked=f"average: model {count + 1}")
        if count >= len(common):
            raise ValueError(f"average: {len(common)} weights, but more models than that")
        for name, tensor in model.items():
            _add(total, name, tensor, rule.get(name, common)[count])
        model = tensor = None  # the next one is read when this one is gone
        count += 1
    if count == 0 or count != len(common):
        raise ValueError(
            f"average: {len(common)} weights for {count} models; one each is needed, and at least one"
        )
    for name, kept in form.items():
        if kept.is_floating_point():
            divisor = rule.get(name, common).sum(0)
            if bool((divisor <= 0).any()):
                raise ValueError(f"average: the weights of {name} sum to zero; at least one must be positive")
            total[name] = (total[name].div_(_as_rows(divisor, total[name]))).to(kept.dtype)
    return total


def _add(total: Tensors, name: str, tensor: Tensor, weight: Tensor) -> None:
    if tensor.is_floating_point():
        if name not in total:
            total[name] = torch.zeros(tensor.shape, dtype=torch.float64)
        if weight.dim() == 0:
            total[name].add_(tensor, alpha=float(weight))
        else:
            total[name].addcmul_(tensor.double(), _as_rows(weight, tensor))
    elif name not in total:
        total[name] = tensor.clone()
    elif tensor.dtype == torch.bool:
        if not torch.equal(total[name], tensor):
            raise NameMismatch(
                f"average: {name} is boolean and differs between models; masks are not averaged"
            )
    else:
        total[name] = torch.maximum(total[name], tensor)


def _checked(weights: Weights, what: str) -> Tensor:
    values = torch.as_tensor(weights, dtype=torch.float64)
    if values.dim() not in (1, 2):
        raise ValueError(f"average: {what} have shape {list(values.shape)}; allowed: [K] and [K, rows]")
    if not bool(torch.isfinite(values).all()) or bool((values < 0).any()):
        raise ValueError(f"average: {what} must be finite and not negative, got {values.tolist()}")
    return values


def _as_rows(weight: Tensor, tensor: Tensor) -> Tensor:
    if weight.dim() == 0:
        return weight
    if tensor.dim() == 0 or len(weight) != tensor.shape[0]:
        raise ValueError(f"average: {len(weight)} row weights for a tensor of shape {list(tensor.shape)}")
    return weight.reshape(-1, *[1] * (tensor.dim() - 1))


def sparse(new: Mapping[str, Tensor], old: Mapping[str, Tensor], threshold: float) -> dict[str, Tensors]:
    """What `dense` makes of `old` the entries of `new` that differ from it by more than `threshold`:

        {name: {"index": places in the flattened tensor, int32 [m], increasing; "value": the new entries, [m]}}

    Where m is more than half of a tensor, which is then smaller whole, "index" is left out and "value" is the whole
    tensor, flattened, with the old entries where they are kept. Of tensors that are not floating every entry that differs is taken.
    Raises NameMismatch for models of different form.
    """
    require_same(old, new, asked="sparse")
    return {name: _sparse(tensor.flatten(), old[name].flatten(), threshold) for name, tensor in new.items()}


def _sparse(new: Tensor, old: Tensor, threshold: float) -> Tensors:
    moved = (new - old).abs() > threshold if new.is_floating_point() else new != old
    index = moved.nonzero()[:, 0]
    if 2 * len(index) > len(new):
        return {"value": torch.where(moved, new, old)}
    return {"index": index.to(torch.int32), "value": new[index]}


def dense(changes: Mapping[str, Tensors], old: Mapping[str, Tensor]) -> Tensors:
    """New tensors: `old` with the entries that `sparse` took put in their places, exactly.

    Raises NameMismatch for other names, dtypes or more entries than `old` has.
    """
    values: Tensors = {}
    if list(changes) != list(old):
        raise NameMismatch(f"dense: changes of {first_of(changes, 6)}; the tensors are {first_of(old, 6)}")
    for name, tensor in old.items():
        value, index = changes[name]["value"], changes[name].get("index")
        if value.dtype != tensor.dtype or len(value) > tensor.numel():
            raise NameMismatch(f"dense: {_form(value)} for {name}, which is {_form(tensor)}")
        flat = tensor.flatten().clone() if index is not None else value
        if index is not None:
            flat[index.long()] = value
        values[name] = flat.reshape(tensor.shape)
    return values


def is_finite(tree: "Tree") -> bool:
    """Is every number of a tree finite: floating tensors and plain floats alike."""
    if isinstance(tree, Tensor):
        return not tree.is_floating_point() or bool(torch.isfinite(tree).all())
    if isinstance(tree, float):
        return math.isfinite(tree)
    if isinstance(tree, dict):
        return all(is_finite(value) for value in tree.values())
    return all(is_finite(value) for value in tree) if isinstance(tree, list) else True


def to_tree(value: Any) -> "Tree":
    """A dataclass of tensors and plain values as a tree; tuples become lists, keys stay strings.

    Raises TypeError, naming the path, for anything else.
    """
    return _to_tree(value, "value")


def _to_tree(value: Any, path: str) -> "Tree":
    if value is None or isinstance(value, Tensor | bool | int | float | str):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            f.name: _to_tree(getattr(value, f.name), f"{path}.{f.name}") for f in dataclasses.fields(value)
        }
    if isinstance(value, Mapping):
        bad = [key for key in value if not isinstance(key, str)]
        if bad:
            raise TypeError(f"{path}: the key {bad[0]!r} is a {type(bad[0]).__name__}; keys are strings")
        return {key: _to_tree(item, f"{path}[{key!r}]") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_tree(item, f"{path}[{i}]") for i, item in enumerate(value)]
    raise TypeError(
        f"{path} is a {type(value).__name__}; allowed: tensors, numbers, strings, None, lists, dicts, dataclasses"
    )


def from_tree(cls: type[T], tree: "Tree") -> T:
    """The dataclass that `to_tree` made `tree` from: fields annotated as tuples become tuples again.

    A field that has a default may be missing: the tree is of a version that did not have it. Raises TypeError if the fields
    differ otherwise.
    """
    if not isinstance(tree, Mapping):
        raise TypeError(f"{cls.__name__}: expected a dict of its fields, got {type(tree).__name__}")
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    names, none = {field.name for field in fields}, dataclasses.MISSING
    needed = {field.name for field in fields if field.default is none and field.default_factory is none}
    if not needed <= set(tree) <= names:
        raise TypeError(f"{cls.__name__}: has the fields {sorted(names)}, got {sorted(tree)}")
    hints = get_type_hints(cls)
    return cls(**{name: _from_tree(hints[name], value) for name, value in tree.items()})


def _from_tree(hint: Any, value: Any) -> Any:
    if isinstance(value, dict) and dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return from_tree(hint, value)
    if isinstance(value, list) and (hint is tuple or get_origin(hint) is tuple):
        return tuple(_from_tree(tuple, item) if isinstance(item, list) else item for item in value)
    return value


def n_bytes(values: Mapping[str, Tensor] | Collection[Tensor]) -> int:
    """The bytes of the tensors' values."""
    tensors = values.values() if isinstance(values, Mapping) else values
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
