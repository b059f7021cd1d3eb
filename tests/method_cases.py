"""Every method, those of installed packages too, with every task that it is for, and what the contract's tests need to know of it."""

from dataclasses import dataclass, field
from typing import Any

from fedatlas import methods

METHODS = sorted(methods.names())
PAIRS = [(name, task) for name in METHODS for task in methods.get(name).tasks]
"""Every method with every task that it is for."""


@dataclass(frozen=True)
class Case:
    """What is known of a method; one that is not in `CASES` needs nothing of it.

    quick: options with which it goes through all that it does in two rounds, in a second. net: the federation's net,
    where it needs one of its own. plain: options that leave ordinary training where there is one site and every label;
    None: it never is that.
    """

    quick: dict[str, Any] = field(default_factory=dict)
    net: dict[str, Any] | None = None
    plain: dict[str, Any] | None = field(default_factory=dict)


PHASE: dict[str, Any] = {
    "pretrain_rounds": 1,
    "pretrain": {"dim": 16, "bottleneck": 8, "batch": 4, "steps": 2},
}
UFPS: dict[str, Any] = {
    "teachers": {"rounds": 1},
    "ws": {"start": 1, "end": 3},
    "rce": {"start": 2},
    "gmt": {"start": 2},
    "ua": {"start": 1},
    "sam": {"start": 1, "every": 1},
}
CASES = {
    "cond_dec": Case(net={"name": "cond_unet", "width": 4, "levels": 2}, plain={"scale": 0.0}),
    "cps": Case(plain={"w": 0.0}),
    "fedatlas": Case(
        {"every": 1},
        plain={"exclusion": False, "server_momentum": 0.0, "teach": 0.0},
    ),
    "fed_dodnet": Case(net={"name": "dodnet", "filters": [8, 8]}, plain=None),  # a loss of its own
    "fedalign": Case(plain={"mu": 0.0}),
    "fedasam": Case(plain={"sharpness": {"rho": 0.0}}),
    "fedcrld": Case(net={"name": "crld_unet", "width": 4, "levels": 2}, plain={"lambda_kl": 0.0}),
    "feddyn": Case(plain={"alpha": 0.0}),
    "fedmatch": Case({"h_interval": 2}, plain=None),  # halves of a model in turn
    "fedmatch_plus": Case(PHASE | {"h_interval": 1}, plain=None),
    "fedmenu": Case(
        net={"name": "menunet", "width": 2, "levels": 2}, plain={"agd": "none", "loss": {"name": "auto"}}
    ),
    "fedprox": Case(plain={"mu": 0.0}),
    "fedpsl": Case(plain={"tadl": False}),
    "fedssp": Case(PHASE, plain={"pretrain_rounds": 0}),
    "kim": Case({"pretrain_rounds": 1}, plain=None),  # a loss of its own
    "mixup_pme": Case(plain=None),  # mixed images
    "ms_kd": Case({"teachers": {"rounds": 1}}),
    "pseudo_labels": Case({"teachers": {"rounds": 1}}),
    "ufps": Case(UFPS, plain={"ws": None, "rce": None, "sam": None, "loss": {"name": "auto"}}),
}
NETS = {name: case.net for name, case in CASES.items() if case.net}
"""The net of a method that needs one of its own."""


def case_of(name: str) -> Case:
    return CASES.get(name, Case())


def with_method(federation: dict[str, Any], name: str, **options: Any) -> dict[str, Any]:
    """A federation with the method, and with its net where it needs one of its own."""
    case = case_of(name)
    net = {"net": case.net} if case.net else {}
    return federation | {"method": {"name": name} | case.quick | options} | net
