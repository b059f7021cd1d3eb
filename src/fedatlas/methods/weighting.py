"""How much each site counts in the mean."""

from typing import Literal

from fedatlas.method import Replies

Weighting = Literal["cases", "equal"]


def site_weights(replies: Replies, rule: Weighting) -> list[float]:
    """[K] the training cases "n" of every reply, or 1 for each."""
    return replies.plain("n") if rule == "cases" else [1] * len(replies.sites)
