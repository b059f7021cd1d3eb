"""How gradients at perturbed weights differ from plain ones, over the rounds: Figure 4 of UFPS, from the sites' logs."""

from collections.abc import Mapping, Sequence

from fedatlas.compare.plan import Comparison
from fedatlas.evaluation.statistics import mean_of_defined
from fedatlas.federation.file import make_method
from fedatlas.methods.shared.sharpness import RATIOS
from fedatlas.methods.ufps import UFPS
from fedatlas.report import markup
from fedatlas.report.figures.arms import gradient_panels
from fedatlas.transport.rounds import read_json

LOGGED = ("steeper", *RATIOS)


def lacks_gradients(comparison: Comparison) -> str:
    """Why the page has no ratios of gradients; "" where it has them."""
    return "" if _arms(comparison) else "no arm has the method ufps with sam.gradients"


def _arms(comparison: Comparison) -> list[str]:
    """The arms whose sites log ratios."""
    found = []
    for arm, of_arm in comparison.federations.items():
        method = make_method(next(iter(of_arm.values())))
        if isinstance(method, UFPS) and method.sam is not None and method.sam.gradients:
            found.append(arm)
    return found


def gradients(comparison: Comparison, seeds: Mapping[str, Sequence[int]]) -> str:
    """Two panels for every arm whose sites log ratios, as HTML: the share of steeper gradients, and the quantiles of r;
    means over the steps of a round and the finished seeds. "" where nothing is logged yet."""
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
    return markup.figure(gradient_panels(found, list(RATIOS)), told)


def _logged(
    comparison: Comparison, arm: str, seeds: Sequence[int]
) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Site -> logged number -> (round, the mean over the seeds), of rounds with such numbers."""
    values: dict[str, dict[str, dict[int, list[float]]]] = {}
    for seed in seeds:
        for file in sorted((comparison.path(arm, seed) / "rounds").glob("[0-9]*/log.json")):
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
