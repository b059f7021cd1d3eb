"""Pictures of the same cases on a comparison's page: a row per site, the truth and every arm in columns."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedatlas.compare.overlays import Shown
from fedatlas.report import gallery
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
    rows = []
    for site, of_site in shown.items():
        first = next(iter(of_site.values()))
        cells = [
            _tile(first, {}, colours, f"image, {first.case}, {site}"),
            _tile(first, first.truth, colours, f"truth, {first.case}, {site}"),
        ]
        for arm in arms:
            why = "no picture" if found["arms"][arm]["seeds"] else "not run"
            one = of_site.get(arm)
            cells.append(_tile(one, one.prediction, colours, f"{arm}, {site}") if one else gallery.none(why))
        rows.append((gallery.about(site, first.case), cells))
    told = (
        "The median case of every site by the mean over arms, one slice; a model of the first finished seed of every arm; the "
        "truth as dashed yellow lines. The truth holds the classes that are annotated in the case for scoring; what else a "
        "model marks may be right."
    )
    notes = [f"No picture of {', '.join(of)}: {why}" for why, of in problems.items()]
    return gallery.grid([told], ["image", "truth", *arms], rows, legend=colours, notes=notes, first="5rem")


def _tile(one: Shown, masks: Mapping[str, Any], colours: Mapping[str, str], told: str) -> str:
    around = np.any([*one.truth.values(), np.zeros_like(one.image, dtype=bool)], axis=0)
    return labelled(one.image, masks, colours, one.spacing, around, told, one.truth if masks else None)
