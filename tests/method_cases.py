"""Every method with every task that it is for, as the contract runs them."""

from typing import Any

from fedatlas import methods

METHODS = sorted(methods.REGISTRY)
PAIRS = [(name, task) for name in METHODS for task in methods.get(name).tasks]
"""Every method with every task that it is for."""
PHASE: dict[str, Any] = {
    "pretrain_rounds": 1,
    "pretrain": {"dim": 16, "bottleneck": 8, "batch": 4, "steps": 2},
}
PHASES = {
    "fedssp": PHASE,
    "fedmatch": {"h_interval": 2},
    "kim": {"pretrain_rounds": 1},
    "pseudo_labels": {"teachers": {"rounds": 1}},
    "ms_kd": {"teachers": {"rounds": 1}},
    "ufps": {
        "teachers": {"rounds": 1},
        "ws": {"start": 1, "end": 3},
        "rce": {"start": 2},
        "gmt": {"start": 2},
        "ua": {"start": 1},
        "sam": {"start": 1, "every": 1},
    },
    "fedmatch_plus": PHASE | {"h_interval": 1},
}
"""What a method needs to go through all that it does in two rounds, in a second."""
NETS: dict[str, dict[str, Any]] = {
    "fedmenu": {"name": "menunet", "width": 2, "levels": 2},
    "fed_dodnet": {"name": "dodnet", "filters": [8, 8]},
    "cond_dec": {"name": "cond_unet", "width": 4, "levels": 2},
    "fedcrld": {"name": "crld_unet", "width": 4, "levels": 2},
}
"""The net of a method that needs one of its own."""


def with_method(federation: dict[str, Any], name: str, **options: Any) -> dict[str, Any]:
    """A federation with the method, and with its net where it needs one of its own."""
    net = {"net": NETS[name]} if name in NETS else {}
    return federation | {"method": {"name": name} | PHASES.get(name, {}) | options} | net
