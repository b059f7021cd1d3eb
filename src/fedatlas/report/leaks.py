"""The section of the report on images that give labels away."""

from typing import NamedTuple

import numpy as np

from fedatlas.report import figures, markup
from fedatlas.report.tables import Run, opened

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


def section(run: Run) -> str:
    """Which cases they are, and a picture of the worst of each site whose files are in the run folder."""
    parts = [
        markup.aid(
            "In these cases the labels can be told from where the image shows anything at all: on slices that show what "
            "was drawn and nothing else, or where much is drawn on empty ground. A model learns that, and scores on such "
            "cases do not count. The pictures are the worst slice of each site with the outline of what is drawn."
        )
    ]
    for site, count in there(run).items():
        path = run.folder / "sites" / site / FILE
        if not path.is_file():
            told = f"{markup.text(site)}: {markup.count(count, 'case')}. Which they are is kept at the site."
            parts.append(markup.note(told))
            continue
        with opened(path) as stored:
            kept = Stored(
                site,
                tuple(map(str, stored["cases"])),
                tuple(map(str, stored["texts"])),
                np.asarray(stored["image"]),
                np.asarray(stored["drawn"]).astype(bool),
                (float(stored["spacing"][0]), float(stored["spacing"][1])),
            )
        body = [
            f'<th scope="row">{markup.text(case)}</th><td>{markup.text(text)}</td>'
            for case, text in zip(kept.cases, kept.texts, strict=True)
        ]
        told = f"Site {site}: {markup.count(len(kept.cases), 'case')} that {'gives' if count == 1 else 'give'} labels away"
        parts.append(markup.table(told, ["Case", "What was found"], body))
        parts.append(
            f'<div class="tiles"><figure>{_picture(kept)}<figcaption>{markup.text(kept.cases[0])}<br>'
            f"<small>{markup.text(site)}</small></figcaption></figure></div>"
        )
    return "".join(parts)


def _picture(kept: Stored) -> str:
    return figures.labelled(
        kept.image,
        {},
        {},
        kept.spacing,
        np.zeros_like(kept.drawn),
        f"Case {kept.cases[0]}, site {kept.site}: the worst slice with the outline of what is drawn",
        truth={"drawn": kept.drawn},
    )
