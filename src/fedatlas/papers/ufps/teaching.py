"""Who teaches: what the sites' teachers and the global model say of the same case, and where they agree: Figure S4 of UFPS.

It needs a site's data, and its private memory of the run, which holds the teachers, on this machine.

Shapes: C classes with the background, H rows and W columns of a slice, *S a case.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from fedatlas.compare.overlays import VERSION, Cases, Subject, grey, keep, ras_spacing, there, to_ras, turned
from fedatlas.compare.parts import Page, Part
from fedatlas.compare.plan import Comparison
from fedatlas.compare.running import Tell
from fedatlas.core.errors import DataError, FedAtlasError
from fedatlas.core.labels import known_row
from fedatlas.federation.file import inference_of
from fedatlas.federation.trained import Trained
from fedatlas.learning import inference
from fedatlas.methods.shared.pseudo import Merge
from fedatlas.methods.shared.teachers import MEMORY
from fedatlas.methods.ufps import UFPS, agreement, refined
from fedatlas.papers.ufps import arms_of_ufps
from fedatlas.report import gallery
from fedatlas.report.figures import CLASS_COLOURS, labelled
from fedatlas.transport.store import MemoryStore

KINDS = {"annotated": "annotated", "teachers": "teachers", "global": "global model", "both": "intersection"}
"""What is shown -> its title."""


@dataclass(frozen=True, eq=False)
class Taught:
    """One slice of a training case. image [H, W] in 0..1; spacing [2] in mm; masks: kind -> class -> [H, W] bool. share: of
    the global model's foreground in the whole case that the teachers agree with; intersected: whether the rule of the
    method takes the intersection there."""

    case: str
    image: np.ndarray
    spacing: tuple[float, float]
    masks: Mapping[str, Mapping[str, np.ndarray]]
    share: float
    intersected: bool


def _lacks(comparison: Comparison) -> str:
    """Why the page has no pseudo labels; "" where it has them."""
    return "" if _taught(comparison) else "no arm has the method ufps with gmt"


def _taught(comparison: Comparison) -> list[str]:
    """The arms in which the global model teaches beside the sites' teachers."""
    return [arm for arm, method in arms_of_ufps(comparison).items() if method.gmt is not None]


def teaching(
    comparison: Comparison, subjects: Sequence[Subject], tell: Tell = lambda text: None
) -> tuple[dict[str, dict[str, Taught]], dict[str, list[str]]]:
    """arm -> site -> the pseudo labels of one training case, the middle one by name; and why there are none -> of what.

    subjects: finished runs of arms. Each case is predicted once, and kept in the site's folder of the run.
    """
    found: dict[str, dict[str, Taught]] = {}
    problems: dict[str, list[str]] = {}
    read, arms = Cases(), _taught(comparison)
    for subject in (replace(one, split="train", turns={}) for one in subjects if one.arm in arms):
        for site in (entry.name for entry in subject.federation.sites if entry.role == "train"):
            try:
                found.setdefault(subject.arm, {})[site] = _of_site(subject, site, read, tell)
            except FedAtlasError as error:
                problems.setdefault(str(error).splitlines()[0], []).append(f"{subject.arm} at {site}")
    return {arm: of for arm, of in found.items() if of}, problems


def _of_site(subject: Subject, site: str, read: Cases, tell: Tell) -> Taught:
    file, about = subject.file(site, "pseudo"), np.array([str(VERSION), subject.finished])
    if file.exists():
        with np.load(file, allow_pickle=False) as kept:
            if np.array_equal(kept["about"], about):
                return _from_arrays(kept)
    there(subject, site)
    teachers = _teachers(subject.path, site)
    trained = subject.trained(site)
    cases = read.names(subject, trained, site)
    if not cases:
        raise DataError("the site has no training case here")
    case = cases[(len(cases) - 1) // 2]
    tell(f"{subject.arm}: pseudo labels of {case} at {site}")
    taught = _made(read(subject, trained, site, case), trained, teachers)
    keep(file, _to_arrays(taught) | {"about": about})
    return taught


def _teachers(run: Path, site: str) -> dict[str, Any]:
    """The teachers in a site's memory. DataError where it is not on this machine, or holds none."""
    store = MemoryStore(run / "sites" / site / "memory")
    versions = store.versions()
    tree = store.before(1, 0, versions[-1]) if versions else {}
    found = cast(dict[str, Any], tree.get(MEMORY, {}))
    if not found:
        raise DataError("the site's memory with the teachers is not on this machine, or holds none")
    return {name: found[name] for name in sorted(found)}


def _made(volume: Any, trained: Trained, teachers: Mapping[str, Any]) -> Taught:
    method, space, grid = trained.method, trained.space, trained.preprocessing
    assert isinstance(method, UFPS) and method.gmt is not None
    how = inference_of(trained.federation)

    def probabilities(model: Any) -> Tensor:
        net = trained.network(model)
        return inference.probabilities(net, volume.image, grid.patch, grid.context, how, exclusive=True)

    assert how.others is not None
    merge = Merge(how.others)
    for one in teachers.values():  # a constant for all classes of a voxel changes nothing
        merge.add(probabilities(one["model"])[None].log(), torch.tensor(known_row(space, one["classes"])))
    merged = merge.result()
    (member,) = trained.members
    of_global = probabilities(member.model)[None]
    taught = merged.taught.reshape(1, -1, *[1] * (of_global.dim() - 2))
    winner = of_global.masked_fill(~taught, -1).argmax(1, keepdim=True)
    by_global = winner == torch.arange(len(space)).reshape(taught.shape)
    _, intersected = refined(by_global, merged.masks, method.gmt)
    share = float(agreement(by_global, merged.masks)[0])
    truth = torch.from_numpy(volume.truth("federation").astype(np.int64))
    annotated = torch.stack([(truth == c) & bool(volume.known[c]) for c in range(len(space))])
    every = {
        "annotated": annotated,
        "teachers": merged.masks[0],
        "global": by_global[0],
        "both": (by_global & merged.masks)[0],
    }
    letters, image, spacing = grid.orientation, volume.image[0].float().numpy(), tuple(volume.spacing)
    masks = {
        kind: {space.names[c]: of[c].numpy() for c in space.foreground if bool(taught[0, c].any())}
        for kind, of in every.items()
    }
    if image.ndim == 3:
        image, spacing = to_ras(image, letters), ras_spacing(spacing, letters)
        masks = {kind: {n: to_ras(m, letters) for n, m in of.items()} for kind, of in masks.items()}
        shown = [mask for kind in ("teachers", "global") for mask in masks[kind].values()]
        areas = np.array([mask.sum((0, 1)) for mask in shown], dtype=float)
        at = int((areas / np.maximum(areas.max(1, keepdims=True), 1)).sum(0).argmax())
        image = image[..., at]
        masks = {kind: {n: m[..., at] for n, m in of.items()} for kind, of in masks.items()}
    return Taught(
        volume.case,
        turned(grey(image)),
        (float(spacing[1]), float(spacing[0])),
        {kind: {n: turned(m) for n, m in of.items()} for kind, of in masks.items()},
        share,
        bool(intersected[0]),
    )


def _to_arrays(taught: Taught) -> dict[str, Any]:
    arrays: dict[str, Any] = {"case": np.array(taught.case), "image": taught.image}
    arrays |= {"spacing": np.array(taught.spacing), "share": np.array(taught.share)}
    arrays["intersected"] = np.array(taught.intersected)
    return arrays | {f"{kind}:{name}": mask for kind, of in taught.masks.items() for name, mask in of.items()}


def _from_arrays(kept: Any) -> Taught:
    masks: dict[str, dict[str, np.ndarray]] = {kind: {} for kind in KINDS}
    for key in kept.files:
        kind, colon, name = key.partition(":")
        if colon:
            masks[kind][name] = kept[key]
    first, second = (float(v) for v in kept["spacing"])
    share, intersected = float(kept["share"]), bool(kept["intersected"])
    return Taught(str(kept["case"]), kept["image"], (first, second), masks, share, intersected)


def _figure(found: Mapping[str, Mapping[str, Taught]], problems: Mapping[str, Sequence[str]]) -> str:
    """A grid with a row per arm and site, as HTML; "" where there is nothing to say."""
    if not found and not problems:
        return ""
    every = [one for of in found.values() for one in of.values()]
    names = dict.fromkeys(name for one in every for of in one.masks.values() for name in of)
    colours = {name: f"var(--c{place % len(CLASS_COLOURS)})" for place, name in enumerate(names)}
    rows = []
    for arm, of_arm in found.items():
        for site, one in of_arm.items():
            taken = "the intersection" if one.intersected else "the global model"
            shown = [{}, *(one.masks[kind] for kind in KINDS)]
            around = np.any(
                [m for of in shown for m in of.values()] + [np.zeros_like(one.image, dtype=bool)], axis=0
            )
            cells = [
                labelled(one.image, masks, colours, one.spacing, around, f"{kind}, {arm}, {site}, {one.case}")
                for kind, masks in zip(["image", *KINDS.values()], shown, strict=True)
            ]
            about = gallery.about(f"{arm}, {site}", one.case, f"agreed {one.share:.0%}: {taken}")
            rows.append((about, cells))
    told = (
        "Pseudo labels of one training case of every site, of the first finished seed: what the site annotates; what the "
        "sites' teachers say; what the global model says; and where both say the same. Agreed: the share of the global "
        "model's foreground in the whole case that the teachers agree with, and what the arm's rule teaches there."
    )
    notes = [f"No pseudo labels of {', '.join(of)}: {why}" for why, of in problems.items()]
    return gallery.grid([told], ["image", *KINDS.values()], rows, legend=colours, notes=notes, first="8rem")


def _draw(page: Page) -> str:
    return _figure(*teaching(page.comparison, page.subjects, page.tell))


PART = Part("Pseudo labels", _lacks, _draw)
