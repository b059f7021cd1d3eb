"""The report of a run: one HTML file that needs no network, made from the run folder and nothing else."""

import os
import re
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fedatlas import __version__
from fedatlas.evaluation.statistics import select
from fedatlas.report import analysis, leaks, markup, read, results, tables
from fedatlas.report.conclusion import Conclusion, conclude, sentences
from fedatlas.report.read import Run


def write(run: Path, out: Path | None = None) -> Path:
    """Writes the report of a run folder and returns its path; `out` is run/report.html unless given.

    The same folder gives the same bytes. What an unfinished run does not have yet is named on the page,
    with the command that makes it. Raises RunFolderError where `run` is not a run folder or holds a damaged
    file.
    """
    folder = Path(run)
    target = folder / "report.html" if out is None else Path(out)
    page = render(read.read(folder), target.parent)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    part.write_text(page, encoding="utf-8", newline="\n")
    os.replace(part, target)
    return target


def sections(run: Run) -> list[tuple[str, str, str]]:
    """Anchor, heading and template (of `templates/report/`) of every section that a run has, in their order."""
    private = run.exchange.privacy is not None or run.exchange.secure is not None
    local = run.exchange.secure is None or bool(run.locals)
    every = [
        ("labels", "Who annotated what", "labels", True),
        ("leaks", "Images that give labels away", "leaks", bool(leaks.there(run))),
        ("curves", "Training", "curves", True),
        ("privacy", "Privacy", "privacy", private),
        ("boxes", "Global against local models", "models", local),
        ("results", "Results by site and class", "results", True),
        ("cases", "Case by case", "cases", not run.images),
        ("findings", "Findings of the whole image", "findings", bool(run.findings)),
        ("pooled", "All sites together", "pooled", run.images),
        ("overlays", "Examples", "examples", run.images),
        ("overlays", "Overlays", "overlays", not run.images),
        ("forgetting", "Forgetting matrix", "forgetting", local),
        ("analyses", "Analyses", "analyses", bool(analysis.there(run))),
        ("cost", "Cost", "cost", True),
        ("traffic", "Traffic", "traffic", bool(run.rounds)),
        ("configuration", "Configuration", "configuration", True),
    ]
    return [(anchor, title, template) for anchor, title, template, shown in every if shown]


def render(run: Run, beside: Path | None = None) -> str:
    """The whole page. beside: the folder in which it will lie, to which links are relative; the run folder unless given."""
    found = conclude(run)
    return markup.render(
        "report.html",
        **_values(run, beside),
        name=run.info.get("name") or run.info.get("id") or run.folder.name,
        version=__version__,
        sections=sections(run),
        found=found,
        told=sentences(run),
        about_best=_about_best(run, found),
    )


def section(run: Run, template: str, beside: Path | None = None) -> str:
    """One section of the page alone, by its template; beside as of `render`."""
    return markup.render(f"report/{template}.html", **_values(run, beside))


def _values(run: Run, beside: Path | None) -> dict[str, Any]:
    """What the templates of sections use."""
    rows, provisional = tables.scored(run)
    return {
        "run": run,
        "info": run.info,
        "epsilon": _epsilon(run),
        "score": tables.METRICS[run.measure].title,
        "rows": rows,
        "provisional": provisional,
        "processed": tables.processed(run),
        "splits": tables.splits(rows),
        "pages": _beside(run, beside or run.folder),
        "analysis": analysis,
        "leaks": leaks,
        "results": results,
    }


def _about_best(run: Run, found: Conclusion | None) -> str:
    """Which round the global model is of, and why the score that chose it differs from those of the final evaluation."""
    if found is None:
        return ""
    if found.provisional:
        return f"Validation rows of round {found.rows[0]['round']}; there is no final evaluation yet. "
    if found.model != read.GLOBAL:
        return ""
    if run.best_rounds:
        each = ", ".join(f"{site} {number}" for site, number in run.best_rounds.items())
        return f"Models of all sites together, each of the round that was best on its own validation cases: {each}. "
    if run.best_round is None:
        return ""
    if run.best_score is None:
        return f"Global model: best round {run.best_round}. "
    text = f"Global model: best round {run.best_round}, validation score {run.best_score:.3f}. "
    if run.images:
        return text
    final = tables.verdict(select(tables.scored(run)[0], split="validation", model=found.model), run.measure)
    if final.known is None:
        return text
    return (
        f"{text}That score chose the round and was measured during training on the federation's common grid ({_spacing(run)}); "
        f"the final evaluation puts the same model's labels back on the grid of each scan, where the validation cases score "
        f"{final.known:.3f} on annotated classes. Small differences between the two come from resampling. "
    )


def _spacing(run: Run) -> str:
    """The common grid in words."""
    given = run.plain.get("preprocessing")
    steps = given.get("spacing") if isinstance(given, dict) else None
    return f"{' × '.join(f'{step:g}' for step in steps)} mm" if steps and all(steps) else "training"


def _epsilon(run: Run) -> str:
    """ε of all that was sent so far."""
    if run.epsilon is None:  # none is finite
        return "∞" if run.rounds or run.releases else "–"
    return f"{run.epsilon:.3g}" if run.epsilon < 1000 else f"{run.epsilon:,.0f}"


def _beside(run: Run, folder: Path) -> list[tuple[str, str]]:
    """Title and address of the pages figure-2.html and so on of the run folder."""
    found = []
    for file in sorted(run.folder.glob("figure-[0-9].html")):
        title = re.search("<title>(.*?)</title>", file.read_text(encoding="utf-8", errors="replace"))
        found.append(
            (
                unescape(title[1]) if title else file.stem,
                quote(Path(os.path.relpath(file, folder)).as_posix()),
            )
        )
    return found
