"""`fedatlas analyse landscape`: the loss of a model around its weights, on the training data of every site.

Li et al., Visualizing the loss landscape of neural nets, NeurIPS 2018; UFPS (Jiang et al., Patterns 2024), Figure 9: the
global model on each client's training set.

Reconstruction: UFPS states neither the number of batches, the grid, nor whether patches are augmented. Here patches are
sampled as in training and not augmented, and all models and sites share the random numbers of the two directions, so that
their surfaces can be compared.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedatlas.analysis.runs.subject import LossOfModels, Model, Subject, clock, timed
from fedatlas.analysis import landscape as of
from fedatlas.core.options import option, options
from fedatlas.core.seeds import generator


@options
class Landscape(LossOfModels):
    """The loss around a model, over a plane of two random directions, per site."""

    grid: int = option(11, "Points along each direction; an odd number holds the model itself.", ge=3)
    reach: float = option(1.0, "The largest step along a direction, in units of the weights' own norm.", gt=0)
    batches: int = option(4, "Batches of a site.", ge=1)
    level: float = option(0.1, "A point is flat where its loss is at most this above the model's own.", gt=0)


def run(subject: Subject, chosen: Landscape, tell: Callable[[str], None]) -> dict[str, Any]:
    """{"loss", "cost", "surfaces": [{"site", "model", "round", "steps", "losses", "centre", …}]}; the numbers of a
    surface are those of `summary`."""
    names = chosen.model or (subject.usual,)
    work = [(site, model) for site in subject.sites for name in names for model in subject.models(name, site)]
    passes = len(work) * chosen.grid**2 * chosen.batches
    tell(
        f"landscape: {len(work)} surfaces (site and model) of {chosen.grid} x {chosen.grid} points, "
        f"{chosen.batches} batches of {chosen.batch} at each: {passes:,} forward passes"
    )
    steps = torch.linspace(-chosen.reach, chosen.reach, chosen.grid, dtype=torch.float64).tolist()
    if chosen.grid % 2:
        steps[chosen.grid // 2] = 0.0
    surfaces: list[dict[str, Any]] = []
    for site in subject.sites:
        batches = subject.batches(
            site, count=chosen.batches, size=chosen.batch, seed=chosen.seed, labels=chosen.labels
        )
        loss = subject.loss_at(site)

        def around(net: nn.Module, at: Sequence[float], some: int) -> Tensor:
            one, two = (of.random_direction(net, generator(chosen.seed, "landscape", n)) for n in (1, 2))
            return of.surface(net, loss, batches[:some], (one, two), first=at).losses  # noqa: B023

        for model in [model for at, model in work if at == site]:
            net = subject.network(model.member)
            if not surfaces:
                seconds = timed(functools.partial(around, net, [0.0], 1))
                tell(f"landscape: about {clock(passes * seconds)}, of one pass timed")
            centre = float(around(net, [0.0], chosen.batches)[0, 0])
            losses = around(net, steps, chosen.batches)
            surfaces.append(_entry(site, model, steps, losses, centre, chosen.level))
            tell(f"landscape: {site}, {model.name}: loss {centre:.4g}, flat {surfaces[-1]['flat']:.0%}")
    return {"loss": subject.told_loss(), "cost": {"forward_passes": passes}, "surfaces": surfaces}


def _entry(
    site: str, model: Model, steps: Sequence[float], losses: Tensor, centre: float, level: float
) -> dict[str, Any]:
    return {
        "site": site,
        "model": model.name,
        "round": model.round,
        "steps": list(steps),
        "losses": losses.tolist(),
        **summary(losses, steps, centre, level),
    }


def summary(losses: Tensor, steps: Sequence[float], centre: float, level: float) -> dict[str, Any]:
    """Numbers of a surface [G, G] around a model whose loss is `centre`.

    lowest, lowest_at: the smallest loss on the grid, and its steps along both directions. rise: the mean loss on the
    grid, less the centre; highest: the largest one, less the centre. flat: the share of points whose loss is at most
    `level` above the centre. near: the mean loss of the points within half the reach of the model, less the centre. finite: the share of points where the loss is finite; the others count in none but
    this, and as not flat.
    """
    good = losses.isfinite()
    values = torch.where(good, losses, math.inf)
    place = int(values.argmin())
    at = torch.tensor(list(steps), dtype=torch.float64)
    far = (at[:, None].square() + at[None, :].square()).sqrt()
    close = good & (far > 0) & (far <= at.abs().max() / 2 + 1e-12)

    def mean(mask: Tensor) -> float:
        return float(losses[mask].mean()) - centre if bool(mask.any()) else math.nan

    return {
        "centre": centre,
        "lowest": float(values.flatten()[place]),
        "lowest_at": [steps[place // len(steps)], steps[place % len(steps)]],
        "rise": mean(good),
        "near": mean(close),
        "highest": float(losses[good].max()) - centre if bool(good.any()) else math.nan,
        "flat": float((good & (losses <= centre + level)).double().mean()),
        "finite": float(good.double().mean()),
    }
