"""Where the tables of a comparison are written."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedatlas.compare.curves import curve_figure
from fedatlas.compare.figures import TITLES, write_figures
from fedatlas.compare.overlays import Shown, overlays, subjects
from fedatlas.compare.pictures import box_plots
from fedatlas.compare.plan import Comparison
from fedatlas.compare.radar import radars
from fedatlas.compare.running import Tell
from fedatlas.compare.sweep import exchanges
from fedatlas.engine.store import write_atomic
from fedatlas.errors import FederationError
from fedatlas.report import markup
from fedatlas.report.comparison import html, markdown
from fedatlas.report.figures import CLASS_COLOURS, labelled, stylesheet

PUBLISHED = ("docs", "results.md")
"""The page that holds nothing but what the profile `full` finished."""


def write_page(comparison: Comparison, found: Mapping[str, Any], tell: Tell = lambda text: None) -> Path:
    """comparison.html beside the runs: the tables, the critical-difference diagram, validation over the rounds, averages
    over their number where arms differ in it, radar plots of the tables that ask for them, and, where cases are scored, box plots and pictures of the median case of every site;
    figure-2.html to figure-4.html beside it, see `figures.write_figures`."""
    page = comparison.folder / (f"{comparison.name}.html" if comparison.shared else "comparison.html")
    page.parent.mkdir(parents=True, exist_ok=True)
    seeds = {arm: of_arm["seeds"] for arm, of_arm in found["arms"].items()}
    figures = curve_figure(found) + exchanges(comparison, found) + radars(found)
    if boxes := box_plots(comparison, seeds):
        caption = (
            f"{found['metric']} over {found['split']} cases in which the class is there, of all finished seeds, for the global "
            "model and every local one. A star: not annotated at that site."
        )
        figures += f"<h2>Global and local models</h2>{markup.figure(boxes, markup.text(caption))}"
    shown, problems = overlays(comparison, seeds, tell)
    figures += _pictures(comparison, found, shown, problems)
    if comparison.first.task == "segmentation":
        made = write_figures(
            subjects(comparison, seeds),
            shown,
            problems,
            page.parent,
            arms=comparison.arms,
            name=comparison.name,
            back={"comparison": page.name},
            prefix=f"{comparison.name}-" if comparison.shared else "",
            tell=tell,
        )
        links = (f'<a href="{file.name}">Figure {n}: {TITLES[n]}</a>' for n, file in made.items())
        figures += f"<p>On pages of their own: {', '.join(links)}.</p>"
    write_atomic(page, html(found, figures, stylesheet()).encode())
    return page


def _pictures(
    comparison: Comparison,
    found: Mapping[str, Any],
    shown: Mapping[str, Mapping[str, Shown]],
    problems: Mapping[str, Sequence[str]],
) -> str:
    """A grid: a row per site, the truth and every arm in columns."""
    if not shown and not problems:
        return ""
    names = list(found["classes"])
    every = [one for of_site in shown.values() for one in of_site.values()]
    names += [name for one in every for name in (*one.truth, *one.prediction) if name not in names]
    names = list(dict.fromkeys(names))
    colours = {name: f"var(--c{place % len(CLASS_COLOURS)})" for place, name in enumerate(names)}
    legend = "".join(
        f'<span><i style="background:{c}"></i>{markup.text(name)}</span>' for name, c in colours.items()
    )
    arms = comparison.arms
    cells = ["<p></p>", "<p>image</p>", "<p>truth</p>", *(f"<p>{markup.text(arm)}</p>" for arm in arms)]
    for site, of_site in shown.items():
        first = next(iter(of_site.values()))
        cells.append(f"<p><b>{markup.text(site)}</b><br>{markup.text(first.case)}</p>")
        cells.append(_tile(first, {}, colours, f"image, {first.case}, {site}"))
        cells.append(_tile(first, first.truth, colours, f"truth, {first.case}, {site}"))
        for arm in arms:
            one, told = of_site.get(arm), f"{arm}, {site}"
            why = "no picture" if found["arms"][arm]["seeds"] else "not run"
            cells.append(
                _tile(one, one.prediction, colours, told) if one else f'<div class="none">{why}</div>'
            )
    notes = "".join(
        markup.note(markup.text(f"No picture of {', '.join(of)}: {why}")) for why, of in problems.items()
    )
    grid = f'<div class="grid" style="grid-template-columns:minmax(5rem,auto) repeat({len(arms) + 2},auto)">{"".join(cells)}</div>'
    return (
        "<h2>Pictures</h2><p>The median case of every site by the mean over arms, one slice; a model of the first finished "
        "seed of every arm; the truth as dashed yellow lines. The truth holds the classes that are annotated in the case for "
        f'scoring; what else a model marks may be right.</p><div class="legend">{legend}</div><div class="scroll">{grid if shown else ""}</div>{notes}'
    )


def _tile(one: Shown, masks: Mapping[str, Any], colours: Mapping[str, str], told: str) -> str:
    around = np.any([*one.truth.values(), np.zeros_like(one.image, dtype=bool)], axis=0)
    return labelled(one.image, masks, colours, one.spacing, around, told, one.truth if masks else None)


def write_table(comparison: Comparison, found: Mapping[str, Any], page: Path) -> None:
    """Puts the tables between the marks of the comparison, <!-- NAME --> and <!-- /NAME -->, on a page; where the page
    has no marks they are added at its end.

    Raises FederationError for a page with one mark only, and as `check_page`.
    """
    check_page(comparison, page)
    begin, end = f"<!-- {comparison.name} -->", f"<!-- /{comparison.name} -->"
    text = page.read_text() if page.exists() else ""
    marked = f"{begin}\n\n{markdown(found)}\n{end}"
    first, last = text.find(begin), text.find(end)
    if first < 0 and last < 0:
        text += ("\n" if text and not text.endswith("\n\n") else "") + marked + "\n"
    elif 0 <= first < last and text.count(begin) == text.count(end) == 1:
        text = text[:first] + marked + text[last + len(end) :]
    else:
        raise FederationError(f"{page}: expected {begin} once, and {end} once after it")
    page.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(page, text.encode())


def check_page(comparison: Comparison, page: Path) -> None:
    """FederationError for a page of results and another profile than full."""
    if page.resolve().parts[-2:] == PUBLISHED and comparison.profile != "full":
        raise FederationError(
            f"--table {page}: holds only what the profile full finished, and this is "
            f"{comparison.profile or 'no profile of a comparison file'}; write to another file"
        )
