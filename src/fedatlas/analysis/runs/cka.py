"""`fedatlas analyse cka`: how alike models are, layer by layer.

Kornblith et al., Similarity of neural network representations revisited, ICML 2019; UFPS (Jiang et al., Patterns 2024),
Supplementary Figure S3: linear CKA of the layers' parameters, rows being output filters.

Reconstruction: UFPS does not say which models its figure compares, nor what the rows are beyond "network parameters"; here
every two of the global model, the sites' local models, and those of another run. CKA of activations, as Kornblith et al.
measure it, stands beside that of parameters; so does CKA between any two layers of the global model, whose outputs are
averaged over equally many cells first, as layers differ in size.
"""

import math
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedatlas.analysis.runs.cases import CaseBatches, cases_of
from fedatlas.analysis.runs.subject import Subject, clock, timed
from fedatlas.analysis.similarity import cka_activations, cka_between, cka_parameters
from fedatlas.core.errors import FederationError, NameMismatch
from fedatlas.core.options import option, options


@options
class CKA:
    """How alike models are, layer by layer, in their parameters and their activations."""

    model: tuple[Literal["best", "last", "local"], ...] | None = option(
        None,
        "Models: best, last, local (each site's own); null: the best one, else the last, and local ones if there are.",
        min_length=1,
    )
    sites: tuple[str, ...] | None = option(
        None, "Sites whose local models and images are taken; null: all that train.", min_length=1
    )
    against: str | None = option(
        None, "The folder of another run of the same net: its models are compared too."
    )
    on: Literal["parameters", "activations", "both"] = option(
        "both", "What of a layer is compared; parameters need no data."
    )
    images: int = option(16, "Patches, or whole images, for activations, over all sites.", ge=2)
    cells: int = option(4, "Cells along every axis, between layers of one model.", ge=1)
    seed: int = option(0, "Patches follow from it.", ge=0)


def run(subject: Subject, chosen: CKA, tell: Callable[[str], None]) -> dict[str, Any]:
    """{"cost", "models", "pairs": [{"first", "second", "parameters": {layer: value}, "activations": {layer: value}}],
    "means": {"parameters": [[…]], "activations": [[…]]}, "layers": {"model", "names", "values"}}; means: over the layers
    that are defined, [models, models]. What was not asked for is null."""
    other = None if chosen.against is None else Subject(Path(chosen.against), device=str(subject.device))
    members = _members(subject, chosen, "")
    if other is not None:
        members += _members(other, chosen, f"{other.info['id']}: ")
    if len(members) < 2 and chosen.on == "parameters":
        raise FederationError(
            f"analyse cka: {subject.folder.path} holds one model only, {members[0][0]}; give another run with --against, "
            "or take --on both, for the layers of that model"
        )
    pairs = list(combinations(range(len(members)), 2))
    active = chosen.on != "parameters"
    size = min(8, chosen.images)
    passes = (2 * len(pairs) + 2) * math.ceil(chosen.images / size) if active else 0
    tell(
        f"cka: {len(members)} models, {len(pairs)} pairs"
        + (f"; activations of {chosen.images} images: {passes:,} forward passes of {size}" if active else "")
    )
    nets = [make() for _, make in members]
    images = _images(subject, chosen, size) if active else []
    if images:
        seconds = timed(lambda: nets[0](images[0]))
        tell(
            f"cka: about {clock(passes * seconds)} of forward passes, of one timed; sums over positions add to it"
        )
    compared: list[dict[str, Any]] = []
    for a, b in pairs:
        entry: dict[str, Any] = {"first": members[a][0], "second": members[b][0]}
        try:
            if chosen.on != "activations":
                entry["parameters"] = cka_parameters(nets[a], nets[b])
            if active:
                entry["activations"] = cka_activations(nets[a], nets[b], images)
        except NameMismatch as error:
            raise NameMismatch(
                f"{error} (models {members[a][0]} and {members[b][0]}; the nets of both have to be the same)"
            ) from None
        compared.append(entry)
    means = {
        what: _matrix(len(members), pairs, [entry[what] for entry in compared])
        for what in ("parameters", "activations")
        if compared and what in compared[0]
    }
    layers = None
    if active:
        names, _, values = cka_between(nets[0], nets[0], images, cells=chosen.cells)
        layers = {"model": members[0][0], "names": names, "values": values.tolist()}
    return {
        "cost": {"forward_passes": passes, "pairs": len(pairs)},
        "models": [name for name, _ in members],
        "pairs": compared,
        "means": means,
        "layers": layers,
    }


def _members(subject: Subject, chosen: CKA, prefix: str) -> list[tuple[str, Callable[[], nn.Module]]]:
    """The models of a run, each with what makes its net."""
    names: Sequence[str] = chosen.model or (
        (subject.usual, "local") if set(subject.locals) & set(subject.sites) else (subject.usual,)
    )
    models = []
    for name in names:
        if name != "local":
            models += subject.models(name)
            continue
        sites = [site for site in subject.sites if site in subject.locals]
        models += [model for site in sites or subject.sites[:1] for model in subject.models("local", site)]
    return [(prefix + model.name, lambda m=model: subject.network(m.member)) for model in models]


def _images(subject: Subject, chosen: CKA, size: int) -> list[Tensor]:
    """Batches of patches (or whole images) of the sites' validation cases; of their training cases where none has any.
    They are spread over the sites, and centred as in training."""
    for split in ("validation", "train"):
        by_site = {
            site: cases
            for site in subject.sites
            if (cases := cases_of(subject.sources[site], site, split, "reference", 4))
        }
        if by_site:
            break
    else:
        raise FederationError("analyse cka: no site has a case for activations; take --on parameters")
    share = math.ceil(chosen.images / len(by_site))
    federation, space = subject.experiment.federation, subject.space
    drawn: list[list[Tensor]] = []
    for site, cases in by_site.items():
        parts = (chosen.seed, "cka", site)
        still = federation.augmentation
        batches = CaseBatches(cases, parts, share, 1, subject.device, federation, space, still)
        drawn.append([image for batch in batches for image in batch.image])
    # the sites in turn, and one image of each at least, so that the cut leaves none out
    in_turn = [image for turn in zip(*drawn, strict=True) for image in turn]
    every = in_turn[: max(chosen.images, len(drawn))]
    return [torch.stack(every[place : place + size]) for place in range(0, len(every), size)]


def _matrix(
    count: int, pairs: Sequence[tuple[int, int]], values: Sequence[dict[str, float]]
) -> list[list[float]]:
    """[count, count] the means over layers, 1 on the diagonal."""
    matrix = [[1.0] * count for _ in range(count)]
    for (a, b), of_layers in zip(pairs, values, strict=True):
        good = [value for value in of_layers.values() if math.isfinite(value)]
        mean = sum(good) / len(good) if good else math.nan
        matrix[a][b] = matrix[b][a] = mean
    return matrix
