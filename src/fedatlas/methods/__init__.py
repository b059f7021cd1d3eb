"""Methods by name. One paper, one file; a method is imported when it is asked for."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, TypeVar

from fedatlas.core.contract import Method
from fedatlas.core.errors import FederationError
from fedatlas.core.extensions import Extensions
from fedatlas.core.labels import LabelSpace
from fedatlas.core.options import not_known, own_first

REGISTRY: dict[str, str] = {
    "fedatlas": "fedatlas.methods.fedatlas:FedAtlas",
    "fedavg": "fedatlas.methods.fedavg:FedAvg",
    "fedprox": "fedatlas.methods.fedprox:FedProx",
    "fedavgm": "fedatlas.methods.fedavgm:FedAvgM",
    "fedopt": "fedatlas.methods.fedopt:FedOpt",
    "feddyn": "fedatlas.methods.feddyn:FedDyn",
    "scaffold": "fedatlas.methods.scaffold:Scaffold",
    "fedbn": "fedatlas.methods.fedbn:FedBN",
    "fednorm": "fedatlas.methods.fednorm:FedNorm",
    "fedsm": "fedatlas.methods.fedsm:FedSM",
    "fedpsl": "fedatlas.methods.fedpsl:FedPSL",
    "fedssp": "fedatlas.methods.fedssp:FedSSP",
    "fedmatch": "fedatlas.methods.fedmatch:FedMatch",
    "fedmatch_plus": "fedatlas.methods.fedmatch:FedMatchPlus",
    "fixmatch": "fedatlas.methods.fixmatch:FixMatch",
    "mixup_pme": "fedatlas.methods.mixup_pme:MixUpPME",
    "mib": "fedatlas.methods.mib:MiB",
    "condistfl": "fedatlas.methods.condistfl:ConDistFL",
    "kim": "fedatlas.methods.kim:Kim",
    "fedmenu": "fedatlas.methods.fedmenu:FedMENU",
    "fed_dodnet": "fedatlas.methods.fed_dodnet:FedDoDNet",
    "local_parts": "fedatlas.methods.local_parts:LocalParts",
    "cond_dec": "fedatlas.methods.cond_dec:CondDec",
    "fedcrld": "fedatlas.methods.fedcrld:FedCRLD",
    "fedasam": "fedatlas.methods.fedasam:FedASAM",
    "moon": "fedatlas.methods.moon:MOON",
    "fedalign": "fedatlas.methods.fedalign:FedAlign",
    "cps": "fedatlas.methods.cps:CPS",
    "ms_kd": "fedatlas.methods.ms_kd:MSKD",
    "ufps": "fedatlas.methods.ufps:UFPS",
    "pseudo_labels": "fedatlas.methods.pseudo_labels:PseudoLabels",
    "standalone": "fedatlas.methods.standalone:Standalone",
    "centralized": "fedatlas.methods.centralized:Centralized",
}
"""Name -> "module:class"."""

CONTINUES = "mib"
"""The method with which a run goes on to new classes, where none is named: it keeps the old ones by distillation."""

OTHERS = Extensions("method", "fedatlas.methods")
"""Methods of other packages, and of this process."""

M = TypeVar("M", bound=type[Method])


def register(name: str) -> Callable[[M], M]:
    """A decorator: registers a method in this process, see `Extensions.register`."""
    return OTHERS.register(name, lambda: REGISTRY)


def names() -> list[str]:
    """All methods: of this package, then of others."""
    return [*REGISTRY, *OTHERS.names()]


def get(name: str) -> type[Method]:
    """The class of a method. Raises FederationError, naming the nearest method, for an unknown name, and for a class that
    does not derive from `Method`."""
    if name in REGISTRY:
        module, _, cls = REGISTRY[name].partition(":")
        found = getattr(importlib.import_module(module), cls)
    else:
        found = OTHERS.find(name)
        if found is None:
            raise not_known("the method", name, names())
        module, cls = found.__module__, getattr(found, "__name__", name)
    if not (isinstance(found, type) and issubclass(found, Method)):
        raise FederationError(
            f"method {name}: {cls} of {module} does not derive from fedatlas.core.contract.Method; write class {cls}(Method), "
            "see docs/how-to/add-a-method.md"
        )
    return found


def continued(given: Mapping[str, Any], method: Method, space: LabelSpace) -> dict[str, Any]:
    """`method` of a federation file that goes on from a run: CONTINUES with the options that both have, and the supervised
    loss that the run's method took. given, method: the run's, as its file has it and made from it."""
    from fedatlas.losses import LossChoice
    from fedatlas.methods.shared.averaging import Supervised

    if given["name"] == CONTINUES:
        return dict(given)
    own = own_first(get(CONTINUES))
    shared = {key: value for key, value in given.items() if key in own and key != "loss"}
    if isinstance(method, Supervised) and method.supervised(space) != LossChoice():
        shared["loss"] = asdict(method.supervised(space))
    return {**shared, "name": CONTINUES}
