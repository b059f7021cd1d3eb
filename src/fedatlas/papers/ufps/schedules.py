"""The weights of samples by the uncertainty of their pseudo labels, as the arms have them: Figure S1 of UFPS."""

from collections.abc import Mapping, Sequence

import torch
from markupsafe import Markup
from matplotlib.axes import Axes

from fedatlas.compare.parts import Page, Part
from fedatlas.compare.plan import Comparison
from fedatlas.methods.ufps import WeightScheduler, weigher
from fedatlas.papers.ufps import arms_of_ufps
from fedatlas.report import markup
from fedatlas.report.figures.chart import chart, columns_of, line_key, wrapped
from fedatlas.report.figures.theme import class_colour

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Of a schedule's rounds, at which its weights are drawn."""
POINTS = 201


def _lacks(comparison: Comparison) -> str:
    """Why the page has no schedules; "" where it has them."""
    return "" if _schedulers(comparison) else "no arm has the method ufps with ws"


def _draw(page: Page) -> str:
    """A panel for every schedule that an arm has, as HTML: w(U) over normalised uncertainties that are spread evenly, at
    several rounds. It needs no run."""
    bank = torch.linspace(0, 1, POINTS)
    panels = {}
    for scheduler, arms in _schedulers(page.comparison):
        period = 1000
        lines = {
            f"r = {share:g} R": weigher(bank, scheduler, round(share * period), period)(bank).tolist()
            for share in SHARES
        }
        panels[f"{scheduler.schedule}: {', '.join(arms)}"] = lines
    svg = _panels(panels, (bank - bank.mean()).tolist())
    told = (
        "The weight w(U) of a sample in the loss by its normalised uncertainty, (U - mean) / (largest - least), at r of R "
        "rounds of the schedule; here uncertainties are spread evenly."
    )
    return markup.figure(svg, told)


def _schedulers(comparison: Comparison) -> list[tuple[WeightScheduler, list[str]]]:
    """Every curve that differs -> the arms that have it; when a schedule begins and ends changes no curve."""
    found: dict[str, tuple[WeightScheduler, list[str]]] = {}
    for arm, method in arms_of_ufps(comparison).items():
        if method.ws is not None:
            ws = method.ws
            shape = {
                "tail_shift": (ws.threshold,),
                "base_decrement": (ws.alpha,),
                "round_trip": (ws.threshold, ws.beta, ws.width, ws.centre),
            }[ws.schedule]
            found.setdefault(repr((ws.schedule, shape)), (ws, []))[1].append(arm)
    return list(found.values())


def _panels(panels: Mapping[str, Mapping[str, Sequence[float]]], at: Sequence[float]) -> Markup:
    """Weights of samples over their normalised uncertainty: title -> name of a line -> its values at `at`. All panels have
    the same lines."""

    def panel(axis: Axes, title: str) -> None:
        for index, values in enumerate(panels[title].values()):
            axis.plot(at, values, linewidth=1.5, color=class_colour(index))
        axis.set_title(wrapped(title, 44))
        axis.set_xlabel("normalised uncertainty")
        axis.set_ylabel("weight")

    lines = next(iter(panels.values()))
    keys = [line_key(name, color=class_colour(index)) for index, name in enumerate(lines)]
    told = f"Weights of samples by their uncertainty: {', '.join(panels)}"
    return chart(
        "weights",
        told,
        panels,
        panel,
        columns=columns_of(len(panels), 2, 3) if len(panels) > 1 else 1,
        height=2.6,
        keys=keys,
    )


PART = Part("Weights of samples", _lacks, _draw)
