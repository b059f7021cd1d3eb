"""The templates of the pages, and what they say of plain values. Plain text is escaped where a template puts it; what is HTML
already has the type `Markup`. A name that a template uses and nobody gives is an error."""

from datetime import datetime
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from fedatlas.core.errors import first_of
from fedatlas.evaluation.statistics import mean_of_defined, select
from fedatlas.report import figures, read, tables

RESUME = Markup("<code>fedatlas run federation.yaml --resume</code>")
LATER = Markup("The final evaluation (rows.csv) is written when the run ends; {} finishes it.").format(RESUME)


def render(template: str, **values: Any) -> Markup:
    """A template of `templates/` with these values."""
    return Markup(_environment().get_template(template).render(values))


@cache
def _environment() -> Environment:
    made = Environment(
        loader=PackageLoader("fedatlas.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.do"],
    )
    made.filters |= {"fixed": fixed, "shown": shown, "finite": read.number, "as_model": figures.model_title}
    made.tests["local"] = lambda model: str(model).startswith("local/")
    made.globals |= {
        "file": lambda name: Markup(made.loader.get_source(made, name)[0]),  # type: ignore[union-attr]
        "resume": RESUME,
        "later": LATER,
        "no_rows": note(Markup("Not there yet. {}").format(LATER)),
        "shade": lambda share: round(20 * min(max(share, 0.0), 1.0)),
        "figures": figures,
        "read": read,
        "tables": tables,
        "model_title": figures.model_title,
        "mean_of_defined": mean_of_defined,
        "select": select,
    }
    made.globals |= {
        of.__name__: of for of in (clock, count, duration, figure, human, first_of, note, si, slug, time)
    }
    pieces = made.get_template("macros.html").module
    made.globals |= {name: of for name, of in vars(pieces).items() if not name.startswith("_")}
    return made


# ---------------------------------------------------------------------------------------------- pieces


def figure(svg: str, caption: str) -> Markup:
    """A chart, an SVG element, with its caption; the page's script adds a button that saves it as PNG."""
    return Markup(
        '<figure class="chart"><figcaption>{}</figcaption><div class="scroll">{}</div></figure>'
    ).format(caption, Markup(svg))


def note(text: str) -> Markup:
    """A sentence that stands out."""
    return Markup('<p class="note" role="note">{}</p>').format(text)


# ---------------------------------------------------------------------------------------------- plain values in words


def shown(value: Any) -> Any:
    """The value, or a dash where there is none."""
    return "–" if value is None or value == "" else value


def fixed(value: float | None, decimals: int) -> str:
    """A number with so many decimals; a dash where it is none, or not finite."""
    got = read.number(value)
    return "–" if got is None else f"{got:,.{decimals}f}"


def spread(found: tables.Spread | None, decimals: int) -> str:
    """An interval in brackets, or the lowest and the highest value with a dash between them."""
    if found is None:
        return ""
    low, high = f"{found.low:.{decimals}f}", f"{found.high:.{decimals}f}"
    return f"[{low}, {high}]" if found.interval else f"{low}–{high}"


def human(value: float) -> str:
    """Bytes."""
    for unit in ("B", "kB", "MB", "GB"):
        if value < (999.5 if unit == "B" else 999.995):  # else it is rounded to 1000
            return f"{value:.0f} B" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1000
    return f"{value:.2f} TB"


def si(value: float) -> str:
    """A count with three digits."""
    for unit in ("", "k", "M"):
        if value < 999.5:  # else it is rounded to 1000
            return f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:.3g}G"


def count(count: int, what: str) -> str:
    """A number of things, as 1 class or 1,200 cases."""
    plural = "" if count == 1 else "es" if what.endswith("s") else "s"
    return f"{count:,} {what}{plural}"


def letter(index: int) -> str:
    """Of a footnote."""
    return chr(ord("a") + index) if index < 26 else f"n{index}"


def slug(text: str) -> str:
    """A text as an anchor."""
    return "".join(c if c.isalnum() else "-" for c in text)


def time(value: Any) -> str:
    """A moment of run.json, to the minute."""
    try:
        moment = datetime.fromisoformat(str(value))
    except ValueError:
        return shown(value)
    return f"{moment:%Y-%m-%d %H:%M} {moment.tzname() or ''}".strip()


def clock(seconds: float) -> str:
    """Hours and minutes; seconds where it is less than an hour."""
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours} h {rest // 60:02d} min" if hours else f"{rest // 60} min {rest % 60:02d} s"


def duration(info: Any) -> str | None:
    """How long a run took; None where that is not known."""
    try:
        began = datetime.fromisoformat(str(info.get("started")))
        seconds = (datetime.fromisoformat(str(info.get("finished"))) - began).total_seconds()
    except (ValueError, TypeError):
        return None
    return clock(seconds)
