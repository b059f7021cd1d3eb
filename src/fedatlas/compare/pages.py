"""Where the tables of a comparison are written."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedatlas.compare.parts import Page, contents, drawn, table_claims
from fedatlas.compare.plan import Comparison
from fedatlas.compare.running import Tell
from fedatlas.core.errors import FederationError
from fedatlas.report.comparison import html, markdown
from fedatlas.report.verdict import verdict
from fedatlas.transport.store import write_atomic

PUBLISHED = ("docs", "results")
"""The folder of the pages that hold nothing but what the profiles `full` and `long` finished, and how their names begin."""


def write_page(comparison: Comparison, found: Mapping[str, Any], tell: Tell = lambda text: None) -> Path:
    """comparison.html beside the runs: the verdict, the tables, the critical-difference diagram, and the parts of `parts.PARTS` that the
    plan has, each named after what it repeats of the paper; figure-2.html to figure-4.html beside it, see
    `parts.Page.beside`."""
    file = comparison.folder / (f"{comparison.name}.html" if comparison.shared else "comparison.html")
    file.parent.mkdir(parents=True, exist_ok=True)
    page = Page(comparison, found, file, tell)
    text = html(
        found,
        verdict=verdict(found),
        claims=contents(comparison),
        captions=table_claims(comparison),
        sections=drawn(page),
    )
    write_atomic(file, text.encode())
    return file


def write_table(comparison: Comparison, found: Mapping[str, Any], page: Path) -> None:
    """Puts the tables between the marks of the comparison, <!-- NAME --> and <!-- /NAME -->, on a page; where the page
    has no marks they are added at its end.

    Raises FederationError for a page with one mark only, and as `check_page`.
    """
    check_page(comparison, page)
    begin, end = f"<!-- {comparison.name} -->", f"<!-- /{comparison.name} -->"
    text = page.read_text(encoding="utf-8") if page.exists() else ""
    marked = f"{begin}\n\n{markdown(found, folded=True)}\n{end}"
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
    """FederationError for a page of results and another profile than full, or long, which has more steps."""
    folder, name = page.resolve().parts[-2:]
    if (
        folder == PUBLISHED[0]
        and name.startswith(PUBLISHED[1])
        and comparison.profile not in ("full", "long")
    ):
        raise FederationError(
            f"--table {page}: holds only what the profiles full and long finished, and this is "
            f"{comparison.profile or 'no profile of a comparison file'}; write to another file"
        )
