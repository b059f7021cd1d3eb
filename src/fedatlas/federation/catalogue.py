"""What is registered, with the first sentence of each: `fedatlas list`."""

import inspect
from collections.abc import Mapping
from typing import Any

from fedatlas import losses, methods, nets
from fedatlas.data import datasets
from fedatlas.evaluation import classification, metrics


def catalogue(what: str) -> dict[str, str]:
    """name -> sentence, for "methods", "nets", "datasets", "losses" or "metrics"."""
    if what == "methods":
        return {name: first_sentence(methods.get(name)) for name in methods.names()}
    registry: Mapping[str, Any] = {
        "nets": {name: nets.get(name) for name in nets.names()},
        "datasets": {
            name: f"{data.title} {data.kind.capitalize()}{'' if data.pixels == 'any' else f', {data.pixels}'}."
            for name in datasets.known()
            if (data := datasets.get(name))
        },
        "losses": {name: losses.find(name) for name in losses.names()},
        "metrics": {
            **metrics.METRICS,
            **{
                name: f"{metrics.METRICS[name]} Of whole images: {sentence}"
                if name in metrics.METRICS
                else sentence
                for name, sentence in classification.METRICS.items()
            },
        },
    }[what]
    return {
        name: entry if isinstance(entry, str) else first_sentence(entry) for name, entry in registry.items()
    }


def first_sentence(thing: Any) -> str:
    """The first paragraph of a docstring on one line."""
    return " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split())
