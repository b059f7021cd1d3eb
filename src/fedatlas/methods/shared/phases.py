"""When a part of a method begins: in a round, or after a share of all rounds.

Rounds are counted from 1. In an option a number below 1 is that share of all rounds, rounded up (0.6 is the 300th of 500),
0 from the beginning; from 1 on it is the round itself, 1 the first.
"""

import math
from typing import Any

from fedatlas.core.errors import FederationError


def share_of(share: float, rounds: int) -> int:
    """A share of all rounds, in whole rounds: .55 of 100 is 55, though its product in floating point is above it."""
    return math.ceil(share * rounds - 1e-9)


def begins(when: float, rounds: int) -> int:
    """The round, counted from 1, that an option means."""
    return share_of(when, rounds) if when < 1 else int(when)


def runs(module: Any, r: int, rounds: int) -> bool:
    """Whether a module, by its option `start`, is used in round r, counted from 1; None is never."""
    return module is not None and r >= begins(module.start, rounds)


def check_when(what: str, **options: float) -> None:
    """Raises FederationError for a number that is neither a share nor a round. what: begins the text."""
    for name, when in options.items():
        if not math.isfinite(when) or (when >= 1 and when != int(when)):
            raise FederationError(
                f"{what}.{name} is {when}; allowed: a share of all rounds from 0 to below 1, or a whole round, 1 being the "
                "first"
            )


def check_begins(what: str, rounds: int, **options: float) -> None:
    """Raises FederationError for what would not begin within all rounds. what: begins the text."""
    for name, when in options.items():
        if begins(when, rounds) > rounds:
            raise FederationError(
                f"{what}: {name} is {when:g}, and the federation has {rounds} rounds, so that it would never begin; take an "
                "earlier round, a share of all rounds as 0.6, or set what begins there to null"
            )
