"""A page of pictures: a grid with a row per model and a column per case, as one HTML file that needs no network."""

from collections.abc import Mapping, Sequence
from html import escape

from fedatlas.report.comparison import STYLE
from fedatlas.report.figures import stylesheet
from fedatlas.report.markup import note


def page(
    title: str,
    told: Sequence[str],
    *,
    columns: Sequence[str] = (),
    rows: Sequence[tuple[str, Sequence[str]]] = (),
    legend: Mapping[str, str] | None = None,
    notes: Sequence[str] = (),
    links: Mapping[str, str] | None = None,
) -> str:
    """The page as HTML.

    title, told and notes: plain text, told a paragraph each. columns: what stands above the cells of every row, HTML.
    rows: what stands before a row, HTML, and its cells, HTML. legend: plain text -> CSS colour. links: plain text ->
    address beside the page.
    """
    grid = ""
    if rows:
        cells = ["<p></p>", *(f"<p>{column}</p>" for column in columns)]
        for head, of_row in rows:
            cells += [f"<p>{head}</p>", *of_row]
        width = f"grid-template-columns:minmax(6rem,auto) repeat({len(columns)},auto)"
        grid = f'<div class="scroll"><div class="grid" style="{width}">{"".join(cells)}</div></div>'
    key = "".join(
        f'<span><i style="background:{colour}"></i>{escape(name)}</span>'
        for name, colour in (legend or {}).items()
    )
    key = f'<div class="legend">{key}</div>' if key else ""
    ways = " · ".join(f'<a href="{escape(to)}">{escape(name)}</a>' for name, to in (links or {}).items())
    more = "".join(note(escape(text)) for text in notes)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{stylesheet()}{STYLE}{_STYLE}</style></head>\n"
        f"<body><main><p>{ways}</p><h1>{escape(title)}</h1>{''.join(f'<p>{escape(text)}</p>' for text in told)}\n"
        f"{key}{grid}\n"
        f"{more}</main></body></html>\n"
    )


def none(why: str) -> str:
    """A cell without a picture. why: plain text."""
    return f'<div class="none">{escape(why)}</div>'


def picture(address: str, description: str) -> str:
    """A cell with a picture at an address; description: plain text."""
    return f'<img class="solid" src="{address}" alt="{escape(description)}" title="{escape(description)}">'


_STYLE = """
.grid { align-items: center }
.grid > p { max-width: 12rem; overflow-wrap: anywhere }
.grid small { color: var(--muted) }
.solid { display: block; width: 13rem; height: 13rem }
.note { padding: .5rem .9rem; border-left: 3px solid var(--accent) }
"""
