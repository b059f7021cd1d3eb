"""FedAtlas: one model that knows every class, from sites that each labelled only some.

In Python, as in a notebook:

    federation = fedatlas.load("federation.yaml", rounds=10)
    run = fedatlas.run(federation, on_round=print)
    run.results()                                   a data frame
    run.model()(voxels, spacing=(1, 1, 3))          labels

Each name is imported when it is first used, so that `import fedatlas` needs neither torch nor MONAI.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from fedatlas.core.errors import FedAtlasError
    from fedatlas.federation.api import Model, Run, Seen, change, load, run
    from fedatlas.losses import register as register_loss
    from fedatlas.methods import register as register_method
    from fedatlas.nets import register as register_net

_PLACES = {
    "load": "fedatlas.federation.api",
    "change": "fedatlas.federation.api",
    "run": "fedatlas.federation.api",
    "Run": "fedatlas.federation.api",
    "Model": "fedatlas.federation.api",
    "Seen": "fedatlas.federation.api",
    "register_method": "fedatlas.methods:register",
    "register_loss": "fedatlas.losses:register",
    "register_net": "fedatlas.nets:register",
    "FedAtlasError": "fedatlas.core.errors",
}
"""Name -> where it is, with the name that it has there where that is another."""

__all__ = [
    "FedAtlasError",
    "Model",
    "Run",
    "Seen",
    "__version__",
    "change",
    "load",
    "register_loss",
    "register_method",
    "register_net",
    "run",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(
            f"module 'fedatlas' has no attribute {name!r}; it has {', '.join(sorted(_PLACES))}"
        )
    from importlib import import_module

    module, _, there = _PLACES[name].partition(":")
    return getattr(import_module(module), there or name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PLACES})
