"""How gradients at perturbed weights differ from plain ones, over the rounds: Figure 4 of UFPS, from the sites' logs."""

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba

from fedatlas.compare.parts import Page, Part
from fedatlas.compare.plan import Comparison
from fedatlas.evaluation.statistics import mean_of_defined
from fedatlas.methods.shared.sharpness import RATIOS
from fedatlas.papers.ufps import arms_of_ufps
from fedatlas.report import markup
from fedatlas.report.figures.chart import Key, chart, line, line_key, short, whole_numbers
from fedatlas.report.figures.theme import MARKERS, MUTED, site_colour
from fedatlas.transport.rounds import RunFolder, read_json

LOGGED = ("steeper", *RATIOS)


def _lacks(comparison: Comparison) -> str:
    """Why the page has no ratios of gradients; "" where it has them."""
    return "" if _arms(comparison) else "no arm has the method ufps with sam.gradients"


def _arms(comparison: Comparison) -> list[str]:
    """The arms whose sites log ratios."""
    return [
        arm
        for arm, method in arms_of_ufps(comparison).items()
        if method.sam is not None and method.sam.gradients
    ]


def _draw(page: Page) -> str:
    """Two panels for every arm whose sites log ratios, as HTML: the share of steeper gradients, and the quantiles of r;
    means over the steps of a round and the finished seeds. "" where nothing is logged yet."""
    comparison, seeds = page.comparison, page.seeds
    found = {arm: of for arm in _arms(comparison) if (of := _logged(comparison, arm, seeds[arm]))}
    if not found:
        return ""
    over = {
        arm: mean_of_defined(value for site in sites.values() for _, value in site["steeper"])
        for arm, sites in found.items()
    }
    told = (
        "How the gradients at the perturbed weights differ from those at the weights themselves, of the same batch: of all "
        "numbers the share with r > 0, where r = log |(g - g plain) / g plain|; and the median of r, with its quarters as a "
        "band and tenths as thin lines. Means over the steps of a round and the finished seeds. Of all rounds and sites: "
        + ", ".join(f"{arm} {value:.1%}" for arm, value in over.items() if value is not None)
        + " of the numbers have r > 0."
    )
    return markup.figure(_panels(found, list(RATIOS)), told)


def _logged(
    comparison: Comparison, arm: str, seeds: Sequence[int]
) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Site -> logged number -> (round, the mean over the seeds, left-out sites and folds), of rounds with such numbers."""
    values: dict[str, dict[str, dict[int, list[float]]]] = {}
    for seed in seeds:
        folders = [RunFolder(comparison.path(trained, seed)) for trained in comparison.trained(arm)]
        for file in (file for folder in folders for file in folder.files("log.json")):
            log = read_json(file)
            for site, numbers in log["sites"].items():
                for name in LOGGED:
                    if numbers.get(name) is not None:
                        of_site = values.setdefault(site, {}).setdefault(name, {})
                        of_site.setdefault(log["round"], []).append(numbers[name])
    return {
        site: {
            name: [(number, sum(of) / len(of)) for number, of in sorted(rounds.items())]
            for name, rounds in names.items()
        }
        for site, names in values.items()
        if len(names) == len(LOGGED)
    }


def _panels(
    arms: Mapping[str, Mapping[str, Mapping[str, Sequence[tuple[int, float]]]]], quantiles: Sequence[str]
) -> Markup:
    """Of every arm two panels: the share "steeper" of every site over the rounds, and five quantiles of r: lines for the
    outer ones and the middle one, a band between the others. arms: arm -> site -> name -> (round, value)."""
    sites = list(dict.fromkeys(site for of_arm in arms.values() for site in of_arm))
    low, quarter, half, three_quarters, high = quantiles

    def look(site: str) -> dict[str, Any]:
        index = sites.index(site)
        return {"color": site_colour(index), "marker": MARKERS[index % len(MARKERS)]}

    def panel(axis: Axes, of: tuple[str, bool]) -> None:
        arm, share = of
        for site, found in arms[arm].items():
            axis.plot(*zip(*found["steeper" if share else half], strict=True), **look(site))
            if share:
                continue
            rounds = [number for number, _ in found[half]]
            below, above = ([value for _, value in found[name]] for name in (quarter, three_quarters))
            colour = look(site)["color"]
            axis.fill_between(rounds, below, above, facecolor=to_rgba(colour, 0.16), edgecolor="none")
            for name in (low, high):
                line(axis, found[name], color=colour, linewidth=0.7, linestyle=(0, (3, 2)))
        axis.axhline(0.5 if share else 0.0, color=MUTED, linewidth=0.8)
        if share:
            axis.set_ylim(0, 1)
        axis.set_title(f"{short(arm, 40)}: {'share with r > 0' if share else 'r'}")
        whole_numbers(axis)
        axis.set_xlabel("round")

    keys: list[Key] = [line_key(short(site, 30), **look(site)) for site in sites]
    told = f"Ratios of gradients over rounds: {', '.join(arms)}"
    panels = [(arm, share) for arm in arms for share in (True, False)]
    return chart("gradients", told, panels, panel, columns=2, height=2.7, keys=keys)


PART = Part("Gradients at perturbed weights", _lacks, _draw)
