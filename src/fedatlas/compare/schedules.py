"""The weights of samples by the uncertainty of their pseudo labels, as the arms have them: Figure S1 of UFPS."""

import torch

from fedatlas.compare.plan import Comparison
from fedatlas.federation.file import make_method
from fedatlas.methods.ufps import UFPS, WeightScheduler, weigher
from fedatlas.report import markup
from fedatlas.report.figures.arms import weight_panels

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Of a schedule's rounds, at which its weights are drawn."""
POINTS = 201


def lacks_schedules(comparison: Comparison) -> str:
    """Why the page has no schedules; "" where it has them."""
    return "" if _schedulers(comparison) else "no arm has the method ufps with ws"


def schedules(comparison: Comparison) -> str:
    """A panel for every schedule that an arm has, as HTML: w(U) over normalised uncertainties that are spread evenly, at
    several rounds. It needs no run."""
    bank = torch.linspace(0, 1, POINTS)
    panels = {}
    for scheduler, arms in _schedulers(comparison):
        period = 1000
        lines = {
            f"r = {share:g} R": weigher(bank, scheduler, round(share * period), period)(bank).tolist()
            for share in SHARES
        }
        panels[f"{scheduler.schedule}: {', '.join(arms)}"] = lines
    svg = weight_panels(panels, (bank - bank.mean()).tolist())
    told = (
        "The weight w(U) of a sample in the loss by its normalised uncertainty, (U - mean) / (largest - least), at r of R "
        "rounds of the schedule; here uncertainties are spread evenly."
    )
    return markup.figure(svg, told)


def _schedulers(comparison: Comparison) -> list[tuple[WeightScheduler, list[str]]]:
    """Every curve that differs -> the arms that have it; when a schedule begins and ends changes no curve."""
    found: dict[str, tuple[WeightScheduler, list[str]]] = {}
    for arm, of_arm in comparison.federations.items():
        method = make_method(next(iter(of_arm.values())))
        if isinstance(method, UFPS) and method.ws is not None:
            ws = method.ws
            shape = {
                "tail_shift": (ws.threshold,),
                "base_decrement": (ws.alpha,),
                "round_trip": (ws.threshold, ws.beta, ws.width, ws.centre),
            }[ws.schedule]
            found.setdefault(repr((ws.schedule, shape)), (ws, []))[1].append(arm)
    return list(found.values())
