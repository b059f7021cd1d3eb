"""Grids of pictures, with a row per model or case: within a page, or as a page of their own that needs no network."""

from collections.abc import Mapping, Sequence

from markupsafe import Markup

from fedatlas.report.markup import render

Rows = Sequence[tuple[str, Sequence[Markup]]]
"""What stands before a row, and its cells."""


def page(title: str, content: Markup, links: Mapping[str, str]) -> str:
    """A page. title: plain text; links: plain text -> address beside the page."""
    return render("pictures.html", title=title, content=content, links=links)


def grid(
    told: Sequence[str],
    columns: Sequence[str],
    rows: Rows,
    *,
    legend: Mapping[str, str] | None = None,
    notes: Sequence[str] = (),
    first: str = "6rem",
) -> Markup:
    """The grid, a paragraph for each of `told` above it, and notes below. columns: what stands above the cells of every row;
    legend: name -> CSS colour; first: the least width of what stands before the rows. All text is plain or `Markup`."""
    return render(
        "grid.html", told=told, columns=columns, rows=rows, colours=legend, notes=notes, first=first
    )


def about(name: str, *more: str) -> Markup:
    """What stands before a row or above a column: a name, and smaller lines below it."""
    lines = Markup("").join(Markup("<br><small>{}</small>").format(line) for line in more)
    return Markup("<b>{}</b>{}").format(name, lines)


def none(why: str) -> Markup:
    """A cell without a picture."""
    return Markup('<div class="none">{}</div>').format(why)


def picture(address: str, description: str) -> Markup:
    """A cell with a picture at an address."""
    return Markup('<img class="solid" src="{0}" alt="{1}" title="{1}">').format(address, description)
