"""Pictures of the same cases on a comparison's page: a row per site, the truth and every arm in columns."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedatlas.compare.overlays import Shown
from fedatlas.report import markup
from fedatlas.report.figures import CLASS_COLOURS, labelled


def picture_grid(
    arms: Sequence[str],
    found: Mapping[str, Any],
    shown: Mapping[str, Mapping[str, Shown]],
    problems: Mapping[str, Sequence[str]],
) -> str:
    """The grid as HTML, and why pictures are missing; "" where there is nothing to say. shown, problems: as of
    `overlays.overlays`."""
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
        "<p>The median case of every site by the mean over arms, one slice; a model of the first finished "
        "seed of every arm; the truth as dashed yellow lines. The truth holds the classes that are annotated in the case for "
        f'scoring; what else a model marks may be right.</p><div class="legend">{legend}</div><div class="scroll">{grid if shown else ""}</div>{notes}'
    )


def _tile(one: Shown, masks: Mapping[str, Any], colours: Mapping[str, str], told: str) -> str:
    around = np.any([*one.truth.values(), np.zeros_like(one.image, dtype=bool)], axis=0)
    return labelled(one.image, masks, colours, one.spacing, around, told, one.truth if masks else None)
