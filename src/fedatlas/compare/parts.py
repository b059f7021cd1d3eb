"""The parts of a comparison's page: for each, what the plan must contain, and the function that draws it.

A file's `claims` name these parts. The same functions say whether a plan has a part, refuse a claim that it does not
meet, and choose what the page shows. A part that a single paper has is in `papers/`, and named here by its place.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup

from fedatlas.compare.curves import class_figure, curve_figure, lacks_curves
from fedatlas.compare.grid import picture_grid
from fedatlas.compare.overlays import Shown, Subject, overlays, subjects
from fedatlas.compare.pictures import box_plots
from fedatlas.compare.plan import Comparison, of_cases
from fedatlas.compare.radar import dots, lacks_dots, lacks_radar, radars
from fedatlas.compare.running import Tell
from fedatlas.compare.sweep import lacks_sweeps, sweeps
from fedatlas.core.errors import FederationError
from fedatlas.core.options import not_known
from fedatlas.report import markup
from fedatlas.report.analysis import TITLES, together
from fedatlas.report.comparison import Claims, Section
from fedatlas.report.tables import described


@dataclass
class Page:
    """What the parts of a page are drawn from. found: as `results.collect` gives it; file: where the page
    is written, and further ones beside it."""

    comparison: Comparison
    found: Mapping[str, Any]
    file: Path
    tell: Tell = field(default=lambda text: None)

    @cached_property
    def seeds(self) -> dict[str, list[int]]:
        """Arm -> its finished seeds."""
        return {arm: of_arm["seeds"] for arm, of_arm in self.found["arms"].items()}

    @cached_property
    def subjects(self) -> list[Subject]:
        """The first finished seed of every arm."""
        return subjects(self.comparison, self.seeds)

    @cached_property
    def pictures(self) -> tuple[dict[str, dict[str, Shown]], dict[str, list[str]]]:
        """`overlays.overlays` of the finished runs."""
        return overlays(self.comparison, self.seeds, self.tell)

    @cached_property
    def beside(self) -> dict[int, Path]:
        """Number -> the page beside this one, which this writes."""
        return _load(PAGES)(self)


class Part(NamedTuple):
    """A part of the page. title: its heading. lacks: why a plan has no such part, "" where it has one. draw: the part as
    HTML, "" while nothing that it shows is there; None for tables, which stand above all figures."""

    title: str
    lacks: Callable[[Comparison], str]
    draw: Callable[[Page], str] | None


def _always(comparison: Comparison) -> str:
    return ""


def of_voxels(comparison: Comparison) -> str:
    """Why a plan has no outlines of cases to show; "" where it has them."""
    if of_cases(comparison):
        return ""
    return f"{comparison.metric} has no values by case, or there are no outlines to show"


def of_volumes(comparison: Comparison) -> str:
    """Why a plan has no volumes to show; "" where it has them."""
    preprocessing = comparison.first.preprocessing
    if (why := of_voxels(comparison)) or preprocessing is None or preprocessing.size is None:
        return why
    return "the images are pictures (preprocessing.size), not volumes"


def _with_local(comparison: Comparison) -> str:
    if comparison.turns:
        return "with leave_out and with folds an arm is several runs, each with local models of its own"
    models = [next(iter(of.values())).evaluation.models for of in comparison.federations.values()]
    return (
        of_voxels(comparison)
        if any("local" in of for of in models)
        else "no arm has local in evaluation.models"
    )


def _analysed(comparison: Comparison, *, kind: str) -> str:
    return "" if comparison.analyses.get(kind) else f"analyses names no arm for {kind}"


def _boxes(page: Page) -> str:
    metric = described(page.found["metric"], pixels=page.found["pixels"])
    boxes = box_plots(page.comparison, page.seeds, metric)
    caption = (
        f"{page.found['metric']} over {page.found['split']} cases in which the class is there, of all finished seeds, for the "
        "global model and every local one. A star: not annotated at that site."
    )
    return markup.figure(boxes, caption) if boxes else ""


def link(page: Page, *, number: int, told: str) -> str:
    """A link to a page beside this one, as HTML; "" where there is none, or nothing on it."""
    if number not in page.beside or not (page.pictures[0] or page.pictures[1]):
        return ""
    return Markup('<p>On a page of its own: <a href="{}">{}</a>.</p>').format(page.beside[number].name, told)


def _pictures(page: Page) -> str:
    shown, problems = page.pictures
    grid = picture_grid(page.comparison.arms, page.found, shown, problems)
    return grid + link(page, number=2, told="the same, a row per arm") if grid else ""


def _analysis(page: Page, *, kind: str) -> str:
    arms = page.comparison.analyses[kind]
    folders = {arm: page.comparison.path(arm, seeds[0]) for arm in arms if (seeds := page.seeds[arm])}
    drawn, missing = together(kind, folders)
    if not missing:
        return drawn
    commands = [Markup("<code>fedatlas analyse {} {}</code>").format(kind, folders[arm]) for arm in missing]
    return drawn + markup.note(Markup("Not there yet; it is made by {}.").format(Markup(", ").join(commands)))


class _Parts(Mapping[str, Part]):
    """Name -> part. One that is written as "module:object" is imported when it is asked for."""

    def __init__(self, parts: Mapping[str, Part | str]) -> None:
        self._parts = parts

    def __getitem__(self, name: str) -> Part:
        part = self._parts[name]
        return _load(part) if isinstance(part, str) else part

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)


def _load(target: str) -> Any:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


PARTS: Mapping[str, Part] = _Parts(
    {
        "means": Part("Means", _always, None),
        "forgetting": Part("Forgetting", _with_local, None),
        "costs": Part("Cost", _always, None),
        "flatness": Part("Flatness", partial(_analysed, kind="hessian"), None),
        "curves": Part("Validation over the rounds", lacks_curves, lambda page: curve_figure(page.found)),
        "class-curves": Part(
            "Validation of every class", lacks_curves, lambda page: class_figure(page.found)
        ),
        "sweeps": Part("Over a number", lacks_sweeps, lambda page: sweeps(page.comparison, page.found)),
        "radar-sites": Part(
            "Over sites", partial(lacks_radar, side="sites"), lambda page: radars(page.found, "sites")
        ),
        "radar-classes": Part(
            "Over classes", partial(lacks_radar, side="classes"), lambda page: radars(page.found, "classes")
        ),
        "dots-sites": Part(
            "Site by site", partial(lacks_dots, side="sites"), lambda page: dots(page.found, "sites")
        ),
        "dots-classes": Part(
            "Class by class", partial(lacks_dots, side="classes"), lambda page: dots(page.found, "classes")
        ),
        "boxes": Part("Global and local models", of_voxels, _boxes),
        "schedules": "fedatlas.papers.ufps.schedules:PART",
        "gradients": "fedatlas.papers.ufps.gradients:PART",
        **{
            kind: Part(title, partial(_analysed, kind=kind), partial(_analysis, kind=kind))
            for kind, title in TITLES.items()
        },
        "pictures": Part("Pictures", of_voxels, _pictures),
        "surfaces": "fedatlas.papers.fedmenu.pages:SURFACES",
        "gradcam": "fedatlas.papers.fedmenu.pages:GRADCAM",
        "pseudo-labels": "fedatlas.papers.ufps.teaching:PART",
    }
)
"""Name -> part, in the order of the page; what a file's `claims` may name."""
BESIDE = {2: "pictures", 3: "surfaces", 4: "gradcam"}
"""The number of a page beside this one -> the part that it belongs to."""
PAGES = "fedatlas.papers.fedmenu.pages:beside"
"""What writes these pages."""


def claimed(comparison: Comparison, part: str) -> str:
    """What a part repeats of the paper, as plain text: "Figures 5 and 6 of UFPS"; "" for nothing."""
    names = [name for name, parts in comparison.claims.items() if part in parts]
    return f"{', '.join(names)} of {comparison.paper}" if names else ""


def unmet(comparison: Comparison) -> dict[str, str]:
    """Claim -> why the page of this plan does not have it; {} where it has all."""
    found = {}
    for name, parts in comparison.claims.items():
        whys = [f"{part}: {why}" for part in parts if (why := PARTS[part].lacks(comparison))]
        if whys:
            found[name] = "; ".join(whys)
    return found


def check_claims(comparison: Comparison, file: Path) -> None:
    """FederationError for a claim of a part that does not exist, for one without a paper, and, unless a profile makes the
    runs smaller than the file means them, for one that the page will not have."""
    if comparison.claims and not comparison.paper:
        raise FederationError(
            f"{file}: claims: of which paper {next(iter(comparison.claims))} is, is missing; set paper to its short name"
        )
    for name, parts in comparison.claims.items():
        for part in parts:
            if part not in PARTS:
                raise not_known(f"{file}: claims: {name}: the part", part, PARTS)
    for kind, arms in comparison.analyses.items():
        if kind not in TITLES:
            raise not_known(f"{file}: analyses: the analysis", kind, TITLES)
        for arm in arms:
            if arm not in comparison.arms:
                raise not_known(f"{file}: analyses: {kind}: the arm", arm, comparison.arms)
    if comparison.profile in (None, "full"):
        for name, why in unmet(comparison).items():
            raise FederationError(
                f"{file}: claims: {name} of {comparison.paper} would not be on the page: {why}; ask for it, or take the claim "
                "away"
            )


def drawn(page: Page) -> list[Section]:
    """The figures of a page, each part with what it repeats of the paper."""
    sections = []
    for name, part in PARTS.items():
        if part.draw is None or part.lacks(page.comparison):
            continue
        content, claim = part.draw(page), claimed(page.comparison, name)
        if content or claim:
            sections.append(Section(name, part.title, claim, content))
    return sections


def contents(comparison: Comparison) -> Claims | None:
    """What the page repeats of the paper, with the titles of its parts; None where it claims nothing."""
    if comparison.paper is None or not comparison.claims:
        return None
    without = unmet(comparison)
    there = {
        name: {part: PARTS[part].title for part in parts}
        for name, parts in comparison.claims.items()
        if name not in without
    }
    return Claims(comparison.paper, there, without)


def table_claims(comparison: Comparison) -> dict[str, str]:
    """Part among the tables -> what it repeats of the paper."""
    of_tables: Sequence[str] = [name for name, part in PARTS.items() if part.draw is None]
    return {name: claim for name in of_tables if (claim := claimed(comparison, name))}
