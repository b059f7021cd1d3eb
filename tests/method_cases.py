"""Every method with every task that it is for, as the contract runs them."""

from typing import Any

from fedatlas import methods
from fedatlas.method import declared

METHODS = sorted(methods.REGISTRY)
PAIRS = [(name, task) for name in METHODS for task in declared(methods.get(name), "tasks")]
"""Every method with every task that it is for."""
PHASE: dict[str, Any] = {
    "pretrain_rounds": 1,
    "pretrain": {"dim": 16, "bottleneck": 8, "batch": 4, "steps": 2},
}
PHASES = {
    "fedssp": PHASE,
    "fedmatch": {"h_interval": 2},
    "kim": {"pretrain_rounds": 1},
    "fedmatch_plus": PHASE | {"h_interval": 1},
}
"""What a method needs to go through all that it does in two rounds, in a second."""
