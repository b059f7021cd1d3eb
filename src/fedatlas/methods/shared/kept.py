"""Which tensors of a net a site keeps: those of normalisation layers, or of named parts."""

from collections.abc import Collection, Iterable

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from fedatlas.core.errors import FederationError
from fedatlas.core.options import not_known
from fedatlas.core.tensors import Tensors, forms_of, parts

BATCH = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
NORMS = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
"""Batch and instance, group, layer and root-mean-square normalisation, and what is derived of them."""


def norm_layers(net: nn.Module, kinds: tuple[type[nn.Module], ...] = NORMS) -> list[nn.Module]:
    """The normalisation layers of a net, by what they are and not by their names."""
    return [module for module in net.modules() if isinstance(module, kinds)]


def names_in(net: nn.Module, modules: Iterable[nn.Module]) -> tuple[str, ...]:
    """The names that the tensors of some modules have in a net (`tensors_of`), in its order. Raises FederationError
    where a module is not part of it."""
    own = {id(tensor) for module in modules for tensor in module.state_dict(keep_vars=True).values()}
    travelling = forms_of(net)
    live = {name: id(t) for name, t in net.state_dict(keep_vars=True).items() if name in travelling}
    if own - set(live.values()):
        raise FederationError(
            f"net {type(net).__name__}: does not hold {len(own - set(live.values()))} tensors"
        )
    return tuple(name for name, tensor in live.items() if tensor in own)


def names_of_parts(net: nn.Module, chosen: Iterable[str], what: str) -> tuple[str, ...]:
    """The names of the tensors of some parts of a net, in its order. what: where the parts were named. Raises
    FederationError for a part that the net does not have."""
    known = parts(net)
    named: set[str] = set()
    for part in chosen:
        if part not in known:
            raise not_known(f"{what}: the part of {type(net).__name__}", part, known)
        named |= set(known[part])
    return tuple(name for name in forms_of(net) if name in named)


def chosen(model: Tensors, names: Collection[str]) -> Tensors:
    """The tensors of a model that have these names."""
    return {name: model[name] for name in names}


def nothing_kept(name: str, net: nn.Module) -> str:
    """Of a net whose normalisation has nothing that could be kept."""
    affine = "; set net.affine to true" if getattr(net, "agd", None) is not None else ""
    return f"{name}: no such layer of {type(net).__name__} has parameters or statistics, so that it is FedAvg{affine}"
