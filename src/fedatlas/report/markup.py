"""The pieces of HTML that the pages of every task are made of; plain text becomes HTML by `text`."""

from collections.abc import Iterable, Sequence
from datetime import datetime
from html import escape
from typing import Any

from fedatlas.report import figures, tables
from fedatlas.report.tables import Cell, Run

RESUME = "<code>fedatlas run federation.yaml --resume</code>"


def text(value: Any) -> str:
    return "–" if value is None or value == "" else escape(str(value))


def facts(facts: Iterable[tuple[str, str]]) -> str:
    """Names as plain text, values as HTML."""
    listed = "".join(f"<div><dt>{text(name)}</dt><dd>{value}</dd></div>" for name, value in facts)
    return f'<dl class="facts">{listed}</dl>'


def aid(sentence: str) -> str:
    return f'<p class="aid">{sentence}</p>'


def note(html: str) -> str:
    return f'<p class="note" role="note">{html}</p>'


NO_ROWS = f"The final evaluation (rows.csv) is written when the run ends; {RESUME} finishes it."


def no_rows() -> str:
    return note(f"Not there yet. {NO_ROWS}")


def details(title: str, content: str, *, open: bool = False) -> str:
    return f"<details{' open' if open else ''}><summary>{title}</summary>{content}</details>"


def figure(svg: str, caption: str) -> str:
    """The page's script adds a button that saves the chart as PNG."""
    return f'<figure class="chart"><figcaption>{caption}</figcaption><div class="scroll">{svg}</div></figure>'


def table(
    caption: str, head: Sequence[str], body: Iterable[str], *, kind: str = "", sort: bool = False
) -> str:
    """caption and head are plain text; body holds the cells of each row as HTML. The page's script adds a button that
    saves the table as CSV."""
    cells = [
        f'<th scope="col">{f"<button type=button>{text(name)}</button>" if sort else f"<span>{text(name)}</span>"}</th>'
        for name in head
    ]
    lines = "".join(f"<tr>{line}</tr>" for line in body)
    classes = " ".join(filter(None, (kind, "sort" if sort else "")))
    return (
        f'<div class="scroll" role="region" aria-label="{text(caption)}" tabindex="0"><table class="{classes}">'
        f"<caption>{text(caption)}</caption><thead><tr>{''.join(cells)}</tr></thead><tbody>{lines}</tbody></table></div>"
    )


def swatch(run: Run, class_: str) -> str:
    name = figures.class_variable(run, class_) if class_ in run.classes else "c0"
    return f'<span class="swatch" style="background:var(--{name})"></span>'


def class_header(run: Run, class_: str) -> str:
    return f'<th scope="row">{swatch(run, class_)}{text(run.title(class_))}</th>'


def spread(found: tables.Spread | None, decimals: int) -> str:
    """An interval in brackets, or the lowest and the highest value with a dash between them."""
    if found is None:
        return ""
    low, high = f"{found.low:.{decimals}f}", f"{found.high:.{decimals}f}"
    return f"[{low}, {high}]" if found.interval else f"{low}–{high}"


def number(value: float | None, decimals: int) -> str:
    return "–" if tables.number(value) is None else f"{value:.{decimals}f}"


def cell(value: float | None, decimals: int, unit: str = "") -> str:
    if value is None:
        return '<td class="num">–</td>'
    return f'<td class="num" data-v="{value:.6g}">{value:,.{decimals}f}{unit}</td>'


def bytes(value: float | None) -> str:
    if value is None:
        return '<td class="num">–</td>'
    return f'<td class="num" data-v="{value:.0f}">{human(value)}<small>{value:,.0f} B</small></td>'


def human(value: float) -> str:
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            return f"{value:.0f} B" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1000
    raise AssertionError


def si(value: float) -> str:
    for unit in ("", "k", "M"):
        if value < 1000:
            return f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:.3g}G"


def count(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def listed(values: Iterable[str], most: int = 3) -> str:
    every = list(values)
    return ", ".join(every[:most]) + (f" and {len(every) - most} more" if len(every) > most else "")


def some(items: Iterable[str]) -> str:
    return listed(items, most=6)


def letter(index: int) -> str:
    return chr(ord("a") + index) if index < 26 else f"n{index}"


def slug(text: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in text)


def time(value: Any) -> str:
    try:
        moment = datetime.fromisoformat(str(value))
    except ValueError:
        return text(value)
    return text(f"{moment:%Y-%m-%d %H:%M} {moment.tzname() or ''}".strip())


def duration(info: Any) -> str | None:
    try:
        began = datetime.fromisoformat(str(info.get("started")))
        seconds = (datetime.fromisoformat(str(info.get("finished"))) - began).total_seconds()
    except (ValueError, TypeError):
        return None
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours} h {rest // 60:02d} min" if hours else f"{rest // 60} min {rest % 60:02d} s"


def heat(
    cell: Cell | None, outlined: bool, words: tuple[str, str], *, of: str = "case", zero: float = 0.0
) -> str:
    """A cell in colour from `zero` to 1. words: of an outlined cell, and of another; of: what the mean is over."""
    kind = " own" if outlined else ""
    word = words[0] if outlined else words[1]
    if cell is None or cell.summary.mean is None:
        why = "not scored" if cell is None else "not defined"
        return f'<td class="blank{kind}" title="{why}; {word}">–<span class="sr"> {why}; {word}</span></td>'
    step = round(20 * min(max((cell.summary.mean - zero) / (1 - zero), 0.0), 1.0))
    return (
        f'<td class="h{step}{kind}" title="{cell.summary.mean:.3f} over {count(cell.summary.n, of)}; {word}">{cell.summary.mean:.2f}'
        f'<span class="sr"> {word}</span></td>'
    )


def footnote(anchor: str, letter: str, reason: str, total: int, places: dict[str, list[str]]) -> str:
    """Why values are not defined, how many, and, folded, in which rows and models."""
    listed = "; ".join(f"{place}: {', '.join(whose)}" for place, whose in places.items())
    return (
        f'<li id="{anchor}"><sup>{letter}</sup> {text(reason)}: {count(total, "value")} not defined, left out of '
        f"the means.{details('Where', listed)}</li>"
    )
