"""`fedatlas analyse hessian`: how the loss of a model curves, on the training data of every site.

Yao et al., PyHessian, IEEE Big Data 2020; UFPS (Jiang et al., Patterns 2024), Table 4 and Figure 10: the largest
eigenvalue, its ratio to the fifth, the trace and the density of the eigenvalues, of the global model at each client.

Reconstruction: UFPS does not say on how much data; here on a stated number of batches, sampled as in training and not
augmented.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fedatlas.analysis.runs.subject import LossOfModels, Model, Subject, clock, timed
from fedatlas.analysis import hessian as of
from fedatlas.core.options import option, options
from fedatlas.core.seeds import generator


@options
class Hessian(LossOfModels):
    """How the loss of a model curves: eigenvalues, trace, spectral density, per site."""

    top: int = option(5, "Eigenvalues of largest magnitude.", ge=1)
    steps: int = option(40, "The most products that these may take.", ge=1)
    tolerance: float = option(
        1e-3, "They are exact enough where the bound on their error is this part of the largest.", gt=0
    )
    samples: int = option(20, "Products for the trace.", ge=2)
    runs: int = option(1, "Random vectors for the density.", ge=1)
    density: int = option(40, "Products for each of them.", ge=1)
    points: int = option(201, "Points at which the density is told.", ge=2)
    batches: int = option(2, "Batches of a site.", ge=1)


def run(subject: Subject, chosen: Hessian, tell: Callable[[str], None]) -> dict[str, Any]:
    """{"loss", "cost", "spectra": [{"site", "model", "round", "eigenvalues", "errors", "converged", "ratio", "trace",
    "trace_error", "lowest", "density": {"at", "value"}}]}. ratio: of the largest eigenvalue to the last of `top`; lowest: the
    least eigenvalue that the density's runs came upon, below 0 where the model stands in no minimum."""
    names = chosen.model or (subject.usual,)
    work = {
        site: _distinct([m for name in names for m in subject.models(name, site)]) for site in subject.sites
    }
    count = sum(map(len, work.values()))
    size = sum(p.numel() for p in subject.network(next(iter(work.values()))[0][0].member).parameters())
    steps = max(chosen.steps, min(chosen.top, size))
    products = count * (steps + chosen.samples + chosen.runs * chosen.density)
    memory = max(steps, chosen.density) * size * 4 / 2**20
    tell(
        f"hessian: {count} spectra (site and model), {chosen.batches} batches of {chosen.batch}: at most {products:,} "
        f"products with the Hessian, {4 * products * chosen.batches:,} gradients' time, and {memory:,.0f} MiB beside "
        "the net"
    )
    spectra: list[dict[str, Any]] = []

    def draws(what: str) -> torch.Generator:
        return generator(chosen.seed, "hessian", what)

    for site in subject.sites:
        batches = subject.batches(
            site, count=chosen.batches, size=chosen.batch, seed=chosen.seed, labels=chosen.labels
        )
        loss = subject.loss_at(site)
        for model, *equal in work[site]:
            operator = of.Hessian(subject.network(model.member), loss, batches)
            if not spectra:
                one = torch.ones(operator.size, dtype=torch.float64, device=operator.device)
                seconds = timed(functools.partial(operator, one))
                tell(f"hessian: about {clock(products * seconds)}, of one product timed")
            top = min(chosen.top, operator.size)
            largest = of.top_eigenvalues(
                operator,
                top,
                generator=draws("top"),
                tolerance=chosen.tolerance,
                steps=steps,
                keep=torch.float32,
            )
            trace = of.trace(operator, generator=draws("trace"), samples=chosen.samples)
            masses = of.spectral_density(
                operator,
                generator=draws("density"),
                runs=chosen.runs,
                steps=chosen.density,
                keep=torch.float32,
            )
            at, value = masses.density(points=chosen.points)
            last = float(largest.values[-1])
            spectrum = {
                "eigenvalues": largest.values.tolist(),
                "errors": largest.errors.tolist(),
                "converged": largest.converged,
                "steps": largest.steps,
                "ratio": float(largest.values[0]) / last if last else None,
                "trace": trace.value,
                "trace_error": trace.error,
                "lowest": float(masses.nodes[masses.weights > 0].min()),
                "density": {"at": at.tolist(), "value": value.tolist()},
            }
            spectra += [{"site": site, "model": m.name, "round": m.round, **spectrum} for m in (model, *equal)]
            tell(
                f"hessian: {site}, {model.name}: largest {float(largest.values[0]):.4g}, trace {trace.value:.4g}"
            )
    cost = {"products": products, "parameters": size}
    return {"loss": subject.told_loss(), "cost": cost, "spectra": spectra}


def _distinct(models: Sequence[Model]) -> list[list[Model]]:
    """Models of the same values together, as the best and the last where the best round was the last: they have one spectrum."""
    groups: list[list[Model]] = []
    for model in models:
        for group in groups:
            first, other = group[0].member, model.member
            if first.net == other.net and all(
                torch.equal(first.model[name], value) for name, value in other.model.items()
            ):
                group.append(model)
                break
        else:
            groups.append([model])
    return groups
