"""The images of a run that give labels away."""

from typing import NamedTuple

import numpy as np
from markupsafe import Markup

from fedatlas.report import figures
from fedatlas.report.read import Run, opened

FILE = "leaks.npz"


class Stored(NamedTuple):
    """What a site kept: its cases and what was found in each, the worst first, and the worst slice."""

    site: str
    cases: tuple[str, ...]
    texts: tuple[str, ...]
    image: np.ndarray
    drawn: np.ndarray
    spacing: tuple[float, float]


def there(run: Run) -> dict[str, int]:
    """Site -> how many of its images give labels away; without sites that have none."""
    told = {str(name): int((about or {}).get("leaks") or 0) for name, about in run.info["sites"].items()}
    return {name: count for name, count in told.items() if count}


def stored(run: Run, site: str) -> Stored | None:
    """What a site kept; None where its files are not in the run folder."""
    path = run.folder / "sites" / site / FILE
    if not path.is_file():
        return None
    with opened(path) as found:
        return Stored(
            site,
            tuple(map(str, found["cases"])),
            tuple(map(str, found["texts"])),
            np.asarray(found["image"]),
            np.asarray(found["drawn"]).astype(bool),
            (float(found["spacing"][0]), float(found["spacing"][1])),
        )


def picture(kept: Stored) -> Markup:
    """The worst slice with the outline of what is drawn."""
    return figures.labelled(
        kept.image,
        {},
        {},
        kept.spacing,
        np.zeros_like(kept.drawn),
        f"Case {kept.cases[0]}, site {kept.site}: the worst slice with the outline of what is drawn",
        truth={"drawn": kept.drawn},
    )
