"""The report of a run: one HTML file that needs no network, made from the run folder and nothing else."""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

import numpy as np

from fedatlas import __version__
from fedatlas.evaluation.statistics import RowDict, mean_of_defined, select
from fedatlas.report import analysis, classification, figures, leaks, markup, tables
from fedatlas.report.conclusion import Conclusion, conclude, sentences
from fedatlas.report.tables import METRICS, Cell, Metric, Run, Verdict


def write(run: Path, out: Path | None = None) -> Path:
    """Writes the report of a run folder and returns its path; `out` is run/report.html unless given.

    The same folder gives the same bytes. What an unfinished run does not have yet is named on the page,
    with the command that makes it. Raises RunFolderError where `run` is not a run folder or holds a damaged
    file.
    """
    folder = Path(run)
    target = folder / "report.html" if out is None else Path(out)
    page = render(tables.read(folder), target.parent)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    part.write_text(page, encoding="utf-8", newline="\n")
    os.replace(part, target)
    return target


def render(run: Run, beside: Path | None = None) -> str:
    """The whole page. beside: the folder in which it will lie, to which links are relative; the run folder unless given."""
    private = run.exchange.privacy is not None or run.exchange.secure is not None
    unknown_locals = run.exchange.secure is not None and not run.locals
    chosen = [
        ("labels", "Who annotated what", classification.labels if run.images else _labels, True),
        ("leaks", "Images that give labels away", leaks.section, bool(leaks.there(run))),
        ("curves", "Training", _curves, True),
        ("privacy", "Privacy", _privacy, private),
        (
            "boxes",
            "Global against local models",
            classification.dots if run.images else _boxes,
            not unknown_locals,
        ),
        ("results", "Results by site and class", classification.results if run.images else _results, True),
        ("cases", "Case by case", _cases, not run.images),
        ("findings", "Findings of the whole image", _findings, bool(run.findings)),
        ("pooled", "All sites together", classification.pooled, run.images),
        (
            "overlays",
            *(("Examples", classification.examples) if run.images else ("Overlays", _overlays)),
            True,
        ),
        ("forgetting", "Forgetting matrix", _forgetting, not unknown_locals),
        ("analyses", "Analyses", analysis.sections, bool(analysis.there(run))),
        ("cost", "Cost", _cost, True),
        ("traffic", "Traffic", _traffic, bool(run.rounds)),
        ("configuration", "Configuration", _configuration, True),
    ]
    sections = [(anchor, title, content(run)) for anchor, title, content, shown in chosen if shown]
    if pages := _figure_pages(run, beside or run.folder):
        sections = [(a, title, body + pages if a == "overlays" else body) for a, title, body in sections]
    name = markup.text(run.info.get("name") or run.info.get("id") or run.folder.name)
    links = "".join(f'<a href="#{anchor}">{title}</a>' for anchor, title, _ in sections)
    body = "".join(
        f'<section id="{anchor}" aria-labelledby="{anchor}-h"><h2 id="{anchor}-h">{title}</h2>{content}</section>'
        for anchor, title, content in sections
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width,initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
        "style-src 'unsafe-inline'; script-src 'unsafe-inline'\">\n"
        f"<title>{name} – FedAtlas report</title>\n<style>\n"
        f"{figures.stylesheet()}{figures.heat_stylesheet()}{_STYLE}{classification.STYLE if run.images else ''}</style></head>\n"
        f'<body><a class="skip" href="#main">To the content</a><header><p class="brand">FedAtlas report</p>'
        f'<h1>{name}</h1>{_header(run)}</header><nav aria-label="Sections">{links}</nav>\n'
        f'<main id="main">{body}</main>\n<footer>FedAtlas {escape(__version__)} · run '
        f"{markup.text(run.info.get('id', run.folder.name))} · made from the run folder alone</footer>\n"
        f"<script>{_SCRIPT}</script></body></html>\n"
    )


# ---------------------------------------------------------------------------------------------- header


def _header(run: Run) -> str:
    info = run.info
    n_parameters = tables.number(info.get("n_parameters"))
    planned = info.get("rounds")
    done = len(run.rounds)
    facts = [
        ("Method", markup.text(info.get("method"))),
        ("Net", markup.text(info.get("net"))),
        ("Parameters", "–" if n_parameters is None else f"{n_parameters:,.0f}"),
        ("Rounds", f"{done}" if planned in (None, done) else f"{done} of {markup.text(planned)}"),
        ("Sites", str(len(info["sites"]))),
        ("Classes", str(len(run.classes))),
        ("Seed", markup.text(info.get("seed"))),
        ("Hash", f"<code>{markup.text(str(info.get('hash') or '')[:12])}</code>"),
        ("Started", markup.time(info.get("started"))),
        ("Finished", markup.time(info.get("finished")) if info.get("finished") else "not yet"),
    ]
    if duration := markup.duration(info):
        facts.append(("Took", duration))
    if run.exchange.compressed:
        ways = ((run.exchange.up, "up"), (run.exchange.down, "down"))
        facts.append(
            ("Compression", ", ".join(f"{markup.text(kind)} {way}" for kind, way in ways if kind != "none"))
        )
    if run.exchange.secure is not None:
        facts.append(("Aggregation", "secure"))
    if run.exchange.privacy is not None and run.rounds:
        facts.append(("Privacy", f"ε {_epsilon(run)}, δ {markup.text(run.exchange.privacy.get('delta'))}"))
    notes = []
    if not info.get("finished") or (isinstance(planned, int) and done < planned):
        notes.append(
            markup.note(
                f"This run is not finished: {done} of {markup.text(planned)} rounds are in the folder. {markup.RESUME} goes on."
            )
        )
    return f"{markup.facts(facts)}{''.join(notes)}{_verdicts(run)}"


def _verdicts(run: Run) -> str:
    """The verdict in a sentence, the three numbers of the global model, large, and of every model in a table."""
    found = conclude(run)
    if found is None:
        return markup.note(
            f"No {run.unit} is scored yet. The final evaluation follows the last round; {markup.RESUME} goes on."
        )
    rows, provisional = tables.scored(run)
    title, splits = METRICS[run.measure].title, tables.splits(rows)
    model, split, numbers, baseline = found.model, found.split, found.verdict, found.baseline
    which = "of the last evaluated round" if provisional else f"of {markup.text(figures.model_title(model))}"
    beside = Verdict(None, None, None, 0, 0, 0) if baseline is None else baseline
    clientwise = (
        f"Client-wise {title}",
        numbers.clientwise,
        f"mean over {markup.count(numbers.n_sites, 'site')}, each over its classes",
        beside.clientwise,
    )
    cards = [
        (*classification.card(run, split, model), None) if run.images else clientwise,
        (
            "Annotated there",
            numbers.known,
            f"macro {title} over {markup.count(numbers.n_known, 'pair')} of site and class",
            beside.known,
        ),
        (
            "Never annotated there",
            numbers.unknown,
            f"macro {title} over {markup.count(numbers.n_unknown, 'pair')} of site and class"
            if numbers.n_unknown
            else f"no scored {run.unit} has ground truth for such a class",
            beside.unknown,
        ),
    ]
    boxes = "".join(
        f'<div class="card"><p class="label">{label}</p><p class="big">{markup.number(value, 3)}</p>'
        + (f'<p class="beside">local models {markup.number(local, 3)}</p>' if local is not None else "")
        + f'<p class="sub">{sub}</p></div>'
        for label, value, sub, local in cards
    )
    first = "All sites together" if run.images else "Client-wise"
    head = ["Model", *(f"{t} · {s}" for s in splits for t in (first, "Annotated", "Never annotated"))]
    body = []
    for name in tables.models(rows):
        cells = [f'<th scope="row">{markup.text(figures.model_title(name))}</th>']
        for at in splits:
            of_model = tables.verdict(select(rows, split=at, model=name), run.measure)
            together = tables.pooled_macro(run, at, name).value if run.images else of_model.clientwise
            cells += [markup.cell(value, 3) for value in (together, of_model.known, of_model.unknown)]
        body.append("".join(cells))
    every = markup.table(f"{title} of every model in the same three numbers", head, body, sort=True)
    told = "".join(
        f'<p class="{"aid" if i else "verdict"}">{markup.text(sentence)}</p>'
        for i, sentence in enumerate(sentences(run))
    )
    return (
        f'<div class="told">{told}</div>'
        f'<h2 class="quiet">{title} {which}, {markup.text(split)} {run.unit}s</h2><div class="cards">{boxes}</div>'
        f'<p class="aid">{_about_best(run, found)}“Never annotated there” is the point of partial labels: {title} of a class '
        "at sites whose training data never showed it.</p>"
        f"<details><summary>All models and splits</summary>{every}</details>"
    )


def _about_best(run: Run, found: Conclusion) -> str:
    """Which round the global model is of, and why the score that chose it differs from those of the final evaluation."""
    if found.provisional:
        return f"Validation rows of round {found.rows[0]['round']}; there is no final evaluation yet. "
    if found.model == tables.GLOBAL and run.best_rounds:
        each = ", ".join(f"{markup.text(site)} {number}" for site, number in run.best_rounds.items())
        return f"Models of all sites together, each of the round that was best on its own validation cases: {each}. "
    if found.model != tables.GLOBAL or run.best_round is None:
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


# ---------------------------------------------------------------------------------------------- labels


def _labels(run: Run) -> str:
    aid = markup.aid(
        "A filled cell is a class that the site annotated: above, its annotated training cases of all training "
        "cases; below, the annotated voxels. A hatched cell is not annotated, which says nothing about whether "
        "the organ is there."
    )
    sites = run.info["sites"]
    if not sites:
        return aid + markup.note("run.json names no site.")
    head = ["Class", *map(str, sites)]
    body = []
    for class_ in run.classes:
        cells = [markup.class_header(run, class_)]
        for name in sites:
            site = run.sites[name]
            if class_ not in site.annotated:
                cells.append('<td class="none"><span class="sr">not annotated</span></td>')
                continue
            voxels = site.voxels.get(class_)
            small = (
                "" if voxels is None else f'<small title="{voxels:,} voxels">{markup.si(voxels)} vx</small>'
            )
            labelled = site.labelled.get(class_)
            of = site.cases.get("train")
            count = "annotated" if labelled is None else f"{labelled}" + ("" if of is None else f" / {of}")
            cells.append(f'<td class="has">{count}{small}</td>')
        body.append("".join(cells))
    for title, value in (
        (
            "Cases: train · val · test",
            lambda s: " · ".join(str(s.cases.get(k, 0)) for k in ("train", "validation", "test")),
        ),
        ("Spacing, mm", lambda s: markup.listed(" × ".join(f"{v:.3g}" for v in row) for row in s.spacing)),
        ("Orientation", lambda s: markup.listed(s.orientation)),
    ):
        cells = "".join(f'<td class="meta">{markup.text(value(run.sites[name]))}</td>' for name in sites)
        body.append(f'<th scope="row" class="meta">{title}</th>{cells}')
    return aid + markup.table("Annotated classes by site", head, body, kind="matrix")


# ---------------------------------------------------------------------------------------------- curves


def _curves(run: Run) -> str:
    title = METRICS[run.measure].title
    cross = "; a red cross marks a round in which a site was lost" if tables.lost(run) else ""
    aid = markup.aid(
        "Each site has a marker and a colour; the dotted line is the best round, which the global model is "
        f"taken from{cross}."
    )
    if not run.rounds:
        return aid + markup.note(f"No round is complete yet. {markup.RESUME} starts or goes on.")
    parts = [aid]
    if len(run.rounds) == 1:
        parts.append(markup.note("One round only: every curve is a single point."))
    if tables.loss_terms(run):
        parts.append(
            markup.figure(
                figures.loss_curves(run), "Training loss and its terms, mean over the steps of a round"
            )
        )
    elif run.exchange.privacy is not None:
        parts.append(markup.note("With differential privacy the sites keep their losses to themselves."))
    else:
        parts.append(markup.note("No site has logged a loss."))
    if bad := tables.not_finite(run):
        parts.append(
            markup.note(
                f"{markup.count(len(bad), 'logged number')} not finite, left out of the curves: "
                + markup.some(
                    f"{markup.text(term)} at {markup.text(site)} in round {n}" for n, site, term in bad
                )
                + ". Lower the learning rate or clip the gradient."
            )
        )
    if any(entry.rows for entry in run.rounds):
        evaluated = [entry.number for entry in run.rounds if entry.rows]
        parts.append(
            markup.figure(
                figures.site_curves(run),
                f"Validation {title} of the global model by site ({markup.count(len(evaluated), 'evaluated round')})",
            )
        )
        parts.append(
            markup.figure(
                figures.class_curves(run),
                f"Validation {title} of the global model by class; dashed: at sites that never annotated the class",
            )
        )
    else:
        parts.append(
            markup.note(
                f"No round was evaluated, so there is no validation {title}; the federation file says how often."
            )
        )
    gone, there = tables.lost(run), tables.presence(run)
    if gone or len({frozenset(rounds) for rounds in there.values()}) > 1:
        parts.append(markup.figure(figures.presence_figure(run), "Which sites answered each round"))
    elif there:
        parts.append(markup.aid("Every site that was asked to train answered, in every round."))
    if gone:
        body = [
            f'<td class="num">{n or "start"}</td><td>{markup.text(site)}</td><td>{markup.text(why)}</td>'
            for n, site, why in gone
        ]
        parts.append(markup.table(f"Lost sites ({len(gone)})", ["Round", "Site", "Reason"], body))
    merged = bool(there) and not set(there) & set(run.info["sites"])
    for site in run.info["sites"]:
        tested = run.sites[site].role == "test"
        if not merged and not tested and "answered" not in there.get(site, {}).values():
            parts.append(markup.note(f"{markup.text(site)} trained in no round: its curves are empty."))
    return "".join(parts)


# ---------------------------------------------------------------------------------------------- privacy


def _privacy(run: Run) -> str:
    return _differential(run) + _secure(run)


def _differential(run: Run) -> str:
    """Differential privacy: what was promised, what was spent, and what is outside."""
    choice = run.exchange.privacy
    if choice is None:
        return ""
    central = choice.get("mode") == "central"
    who = (
        "the sum of the sites' updates, against the server; a site that takes its own noise off sees less noise"
        if central
        else "what each site sends, against the server and everyone behind it"
    )
    facts = [
        (f"ε after round {run.rounds[-1].number}" if run.rounds else "ε", _epsilon(run)),
        ("δ", markup.text(choice.get("delta"))),
        ("Mode", markup.text(choice.get("mode"))),
        ("Clip, L2", markup.text(choice.get("clip"))),
        ("Noise multiplier", markup.text(choice.get("noise"))),
        ("Updates sent, per site", markup.text(tables.releases(run))),
        ("Neighbours", "one site with any other data"),
    ]
    parts = [
        "<h3>Differential privacy</h3>" if run.exchange.secure is not None else "",
        markup.aid(
            f"Protects {who}. ε counts all that was sent so far, and smaller is stronger: up to 1 is strong, "
            "above 10 promises little."
        ),
        markup.facts(facts),
    ]
    if any(entry.epsilon is not None for entry in run.rounds):
        parts.append(markup.figure(figures.epsilon_curves(run), "Privacy spent over rounds"))
        parts.append(markup.details("ε of every round", _epsilons(run)))
    elif run.rounds:
        parts.append(markup.note("No round has a finite ε: without noise nothing is promised."))
    parts.append(
        markup.note(
            "Not covered by this guarantee: the validation and test scores of this report, the choice of the best "
            "round by them, the numbers of cases and voxels, and that a site answered or was lost."
        )
    )
    return "".join(parts)


def _epsilon(run: Run) -> str:
    """ε of all that was sent so far."""
    last = run.rounds[-1].epsilon if run.rounds else None
    if last is None:
        return "∞" if run.rounds else "–"
    return f"{last:.3g}" if last < 1000 else f"{last:,.0f}"


def _epsilons(run: Run) -> str:
    body = []
    for entry in run.rounds:
        counted = [tables.number(site.get("releases")) for site in entry.sites.values()]
        most = max((value for value in counted if value is not None), default=None)
        cells = markup.cell(entry.epsilon, 3) + markup.cell(most, 0) + markup.cell(len(counted), 0)
        body.append(f'<th scope="row" class="num">{entry.number}</th>{cells}')
    return markup.table(
        "ε of all that was sent up to each round",
        ["Round", "ε", "updates sent, at most", "sites in the round"],
        body,
        kind="numbers",
    )


def _secure(run: Run) -> str:
    """Secure aggregation: what the server saw, and to which quantum."""
    choice = run.exchange.secure
    if choice is None:
        return ""
    bits = tables.number(choice.get("bits"))
    least = tables.number(choice.get("threshold")) or len(run.info["sites"]) // 2 + 1
    facts = [
        ("Secure aggregation", "on"),
        ("Quantum", "–" if bits is None else f"2<sup>−{bits:.0f}</sup> ≈ {2**-bits:.1e}"),
        ("Sites a sum needs", f"{least:.0f} of {len(run.info['sites'])}"),
    ]
    return (
        ("<h3>Secure aggregation</h3>" if run.exchange.privacy is not None else "")
        + markup.aid(
            "The server saw the weighted sum of the sites' models only, in fixed point with steps of the quantum. "
            "No site's own model is known to it, so local models and the forgetting matrix are left out."
        )
        + markup.facts(facts)
    )


# ---------------------------------------------------------------------------------------------- boxes


def _boxes(run: Run) -> str:
    aid = markup.aid(
        "One box per model over all scored cases of all sites in which the class is there: quartiles, median, "
        "whiskers to 1.5 quartile ranges; a filled box was trained with annotations of the class, an empty one without."
    )
    if not run.rows:
        return aid + markup.no_rows()
    rows, _ = tables.scored(run)
    parts = [aid]
    if not run.locals:
        parts.append(markup.note("No local model was evaluated, so the global model stands alone."))
    elif run.exchange.privacy is not None:
        parts.append(
            markup.aid(
                "With differential privacy a local model is what the site sent: clipped and with noise."
            )
        )
    for position, split in enumerate(tables.splits(rows)):
        chosen = select(rows, split=split)
        if not any(r["value"] is not None for r in select(chosen, metric="dice")):
            continue
        figure = markup.figure(figures.box_plots(run, chosen, split), f"Dice on {markup.text(split)} cases")
        if position == 0 and len({row["site"] for row in chosen}) > 1:
            apart = markup.figure(
                figures.site_boxes(run, chosen, split),
                f"Dice on {markup.text(split)} cases, by class and site",
            )
            figure += markup.details("Every class at every site", apart)
        parts.append(
            figure if position == 0 else markup.details(f"The same on {markup.text(split)} cases", figure)
        )
    return "".join(parts)


# ---------------------------------------------------------------------------------------------- results


def _results(run: Run) -> str:
    aid = markup.aid(
        f"Mean over cases, and behind it [the 95 % interval of the mean] over resampled cases; of fewer than {tables.FEW} "
        "cases the lowest–the highest value instead. Where intervals of two models overlap widely, do not call one better. "
        "Classes that the site annotates stand apart from those it never annotated, where a high Dice means that the organ was "
        "learnt from other sites. ▲ holds a case that is far off, see Case by case."
    )
    (rows, provisional), processed = tables.scored(run), tables.processed(run)
    if not rows:
        return aid + markup.no_rows()
    parts = [aid]
    if provisional:
        parts.append(
            markup.note(
                f"Provisional: validation rows of round {rows[0]['round']}, on the training grid. {markup.NO_ROWS}"
            )
        )
    for position, split in enumerate(tables.splits(rows)):
        of_split = select(rows, split=split)
        parts.append(f"<h3>{markup.text(split).capitalize()} cases</h3>")
        parts.append(_glance(run, of_split, split))
        for metric in tables.metrics(of_split):
            chosen = select(of_split, metric=metric)
            content = "".join(_metric_table(run, chosen, metric, split, known) for known in (True, False))
            described = METRICS.get(metric, Metric(metric, "", 3, True))
            unit = f", {described.unit}" if described.unit else ""
            better = "higher" if described.higher_is_better else "lower"
            hint = f" <small>({better} is better)</small>" if metric in METRICS else ""
            parts.append(
                markup.details(
                    f"{markup.text(described.title)}{unit}{hint}",
                    content,
                    open=metric == "dice" and position == 0,
                )
            )
            if after := select(processed, split=split, metric=metric):
                name = f"{split}, after post-processing"
                content = "".join(_metric_table(run, after, metric, name, known) for known in (True, False))
                parts.append(
                    markup.details(f"{markup.text(described.title)}{unit}, after post-processing", content)
                )
    return "".join(parts)


FINDING_COLUMNS = {
    "n_positive": ("present", 0),
    "n_negative": ("absent", 0),
    "auroc": ("AUROC", 3),
    "ap": ("AP", 3),
    "sensitivity": ("sensitivity", 3),
    "specificity": ("specificity", 3),
}
"""metric -> the head of its column, and its decimals."""


def _findings(run: Run) -> str:
    aid = markup.aid(
        "A yes or no of the whole image, told by a second head of the net: a row per site, over its cases. Sensitivity and "
        "specificity are at the probability below which the finding's class of voxels is emptied."
    )
    if not run.finding_rows:
        return aid + markup.no_rows()
    parts = [aid]
    for position, split in enumerate(tables.splits(run.finding_rows)):
        values: dict[tuple[str, str, str, bool], dict[str, float | None]] = {}
        for row in select(run.finding_rows, split=split):
            place = (row["class"], row["site"], row["model"], row["known"])
            values.setdefault(place, {})[row["metric"]] = row["value"]
        body = [
            "".join(
                [
                    f'<th scope="row">{markup.text(finding)}</th>',
                    f"<td>{markup.text(site)}{'' if known else ' (never trained here)'}</td>",
                    f"<td>{markup.text(figures.model_title(model))}</td>",
                    *(
                        markup.cell(found.get(metric), decimals)
                        for metric, (_, decimals) in FINDING_COLUMNS.items()
                    ),
                ]
            )
            for (finding, site, model, known), found in sorted(values.items(), key=lambda item: item[0][:2])
        ]
        head = ["Finding", "Site", "Model", *(title for title, _ in FINDING_COLUMNS.values())]
        table = markup.table(f"Findings on {split} cases", head, body, sort=True, kind="wide")
        parts.append(
            table if position == 0 else markup.details(f"The same on {markup.text(split)} cases", table)
        )
    return "".join(parts)


def _glance(run: Run, rows: Sequence[RowDict], split: str) -> str:
    """The global model's mean Dice as a class × site matrix, outlined where the site annotates the class."""
    model = tables.models(rows)[0]
    found = tables.cells(select(rows, metric="dice", model=model), "class", "site")
    body = []
    for class_ in run.classes:
        cells = [markup.class_header(run, class_)]
        for name, site in run.sites.items():
            cells.append(
                markup.heat(
                    found.get((class_, name)),
                    class_ in site.annotated,
                    ("site annotates it", "never annotated here"),
                )
            )
        body.append("".join(cells))
    return markup.table(
        f"Mean Dice of {figures.model_title(model)} on {split} cases. Outlined: annotated at the site. "
        "Not outlined: never annotated there",
        ["Class", *run.sites],
        body,
        kind="matrix heat",
    )


def _metric_table(run: Run, rows: Sequence[RowDict], metric: str, split: str, known: bool) -> str:
    """site × class × model of one metric on one split, either of annotated classes or of the others."""
    described = METRICS.get(metric, Metric(metric, "", 3, True))
    of_kind = select(rows, known=known)
    title = "annotated by the site" if known else "never annotated here: found or not"
    if not of_kind:
        if known:
            return markup.note(f"No scored case on {markup.text(split)} has a class that its site annotates.")
        return markup.note(
            f"No scored case on {markup.text(split)} has ground truth for a class that its site never annotated; "
            "cases with full labels, listed for evaluation, would show it."
        )
    names = tables.compared(rows)
    found = tables.cells((r for r in of_kind if r["model"] in names), "class", "site", "model")
    far: dict[tuple[str, str, str], list[str]] = {}
    for row in tables.outliers(rows):
        where = (row["class"], row["site"], row["model"])
        far.setdefault(where, []).append(f"{row['case']}: {row['value']:.{described.decimals}f}")
    reasons = list(dict.fromkeys(reason for cell in found.values() for reason in sorted(cell.undefined)))
    letters = {reason: markup.letter(index) for index, reason in enumerate(reasons)}
    anchor = f"{split}-{metric}-{'known' if known else 'unknown'}"
    bars = not known and metric in ("dice", "nsd")
    body: list[str] = []
    omitted: dict[str, dict[str, list[str]]] = {reason: {} for reason in reasons}
    totals: Counter[str] = Counter()
    for class_ in run.classes:
        for site in run.sites:
            cells = {m: found[class_, site, m] for m in names if (class_, site, m) in found}
            if not cells:
                continue
            line = [
                markup.class_header(run, class_),
                f"<td>{markup.text(site)}</td>",
                f'<td class="num">{max(cell.scored for cell in cells.values())}</td>',
            ]
            for name in names:
                cell = cells.get(name)
                line.append(
                    _mean_cell(cell, described, far.get((class_, site, name), []), letters, anchor, bars)
                )
                if cell is None:
                    continue
                totals.update(cell.undefined)
                for reason, count in sorted(cell.undefined.items()):
                    where = f"{markup.text(run.title(class_))} at {markup.text(site)}"
                    omitted[reason].setdefault(where, []).append(
                        f"{markup.text(figures.model_title(name))} {count} of {cell.scored}"
                    )
            body.append("".join(line))
    head = ["Class", "Site", "n", *(figures.model_title(name) for name in names)]
    table = markup.table(f"{described.title} on {split}, classes {title}", head, body, sort=True, kind="wide")
    notes = "".join(
        markup.footnote(
            f"{markup.slug(anchor)}-{letters[reason]}", letters[reason], reason, totals[reason], places
        )
        for reason, places in omitted.items()
    )
    return table + (f'<ul class="notes">{notes}</ul>' if notes else "")


def _mean_cell(
    cell: Cell | None, metric: Metric, far: Sequence[str], letters: dict[str, str], anchor: str, bar: bool
) -> str:
    """far: the cases of the cell that are far off, with their values."""
    if cell is None:
        return '<td class="num">–</td>'
    marks = "".join(
        f'<sup><a href="#{markup.slug(anchor)}-{letters[reason]}" title="{cell.undefined[reason]} of {cell.scored} '
        f'not defined: {markup.text(reason)}">{letters[reason]}</a></sup>'
        for reason in sorted(cell.undefined)
    )
    mean, sd = cell.summary.mean, cell.summary.sd
    if mean is None:
        return f'<td class="num" data-v="">not defined{marks}</td>'
    if far:
        told = markup.text(f"far off: {', '.join(far)}")
        marks += f'<sup class="far" title="{told}">▲<span class="sr"> {told}</span></sup>'
    spread = markup.spread(tables.spread(cell.values), metric.decimals)
    title = f"{markup.count(cell.summary.n, 'case')}" + (
        "" if sd is None else f", SD {sd:.{metric.decimals}f}"
    )
    width = f' style="--v:{100 * min(max(mean, 0), 1):.0f}%"' if bar else ""
    kind = "num bar" if bar else "num"
    return f'<td class="{kind}" data-v="{mean:.6g}" title="{title}"{width}>{mean:.{metric.decimals}f} <i>{spread}</i>{marks}</td>'


# ---------------------------------------------------------------------------------------------- cases

MOST_ROWS = 1500
"""Rows of the table of cases on the page, at most; the run folder's rows.csv holds all."""


def _cases(run: Run) -> str:
    """Every scored class of every case, of the global model; those that are far off first."""
    aid = markup.aid(
        "Every case of the global model, a row per class; click a column to sort, type to filter. ▲ marks a value that is far "
        "off: beyond the quartile of its class by more than three times the range between the quartiles, and by at least 0.1, or "
        "5 mm. Look at such a case before trusting a mean."
    )
    rows, provisional = tables.scored(run)
    if not rows or provisional:
        return aid + markup.no_rows()
    model, parts = tables.models(rows)[0], [aid]
    for position, split in enumerate(tables.splits(rows)):
        of_model = select(rows, split=split, model=model)
        if not of_model:
            continue
        content = _far_off(run, of_model) + _case_table(run, of_model, split)
        title = f"{markup.text(split).capitalize()} cases of {markup.text(figures.model_title(model))}"
        parts.append(f"<h3>{title}</h3>{content}" if position == 0 else markup.details(title, content))
    return "".join(parts)


def _far_off(run: Run, rows: Sequence[RowDict]) -> str:
    """The values that are far off, in words, with the median of their class."""
    far = tables.outliers(rows)
    if not far:
        return '<p class="aid">No value is far off.</p>'
    items = []
    for row in far:
        described = METRICS[row["metric"]]
        same = select(rows, class_=row["class"], metric=row["metric"])
        middle = float(np.median([other["value"] for other in same if other["value"] is not None]))
        unit = f" {described.unit}" if described.unit else ""
        items.append(
            f"<li>▲ <b>{markup.text(run.title(row['class']))}</b>, case {markup.text(row['case'])} at {markup.text(row['site'])}: "
            f"{described.title} {row['value']:.{described.decimals}f}{unit}, the median is {middle:.{described.decimals}f}{unit}</li>"
        )
    more = (
        markup.details(f"{len(items) - 8} more", f'<ul class="far-off">{"".join(items[8:])}</ul>')
        if len(items) > 8
        else ""
    )
    return f'<ul class="far-off">{"".join(items[:8])}</ul>{more}'


def _case_table(run: Run, rows: Sequence[RowDict], split: str) -> str:
    metrics, order = tables.metrics(rows), {name: place for place, name in enumerate(run.classes)}
    far = {(row["site"], row["case"], row["class"], row["metric"]) for row in tables.outliers(rows)}
    found: dict[tuple[str, str, str], dict[str, RowDict]] = {}
    for row in rows:
        found.setdefault((row["site"], row["case"], row["class"]), {})[row["metric"]] = row
    body = []
    for (site, case, class_), of in sorted(
        found.items(), key=lambda item: (*item[0][:2], order.get(item[0][2], 0))
    ):
        known = any(row["known"] for row in of.values())
        cells = [
            f'<th scope="row">{markup.text(case)}</th><td>{markup.text(site)}</td>',
            f"<td>{markup.swatch(run, class_)}{markup.text(run.title(class_))}</td><td>{'yes' if known else 'never'}</td>",
        ]
        for metric in metrics:
            row, described = of.get(metric), METRICS.get(metric, Metric(metric, "", 3, True))
            if row is None or row["value"] is None:
                why = "not scored" if row is None else row["reason"]
                cells.append(f'<td class="num" data-v="" title="{markup.text(why)}">–</td>')
                continue
            mark = ' <span class="far">▲</span>' if (site, case, class_, metric) in far else ""
            cells.append(
                f'<td class="num" data-v="{row["value"]:.6g}">{row["value"]:,.{described.decimals}f}{mark}</td>'
            )
        body.append("".join(cells))
    cut = ""
    if len(body) > MOST_ROWS:
        cut = markup.note(
            f"The first {MOST_ROWS:,} of {len(body):,} rows; rows.csv in the run folder holds all of them."
        )
    titles = [
        METRICS[m].title + (f", {METRICS[m].unit}" if METRICS[m].unit else "") if m in METRICS else m
        for m in metrics
    ]
    head = ["Case", "Site", "Class", "Annotated there", *titles]
    table = markup.table(
        f"Every class of every {split} case", head, body[:MOST_ROWS], sort=True, kind="wide cases filter"
    )
    return cut + table


# ---------------------------------------------------------------------------------------------- overlays


def _overlays(run: Run) -> str:
    aid = markup.aid(
        "Whole slices of a case in three planes, with every class: the prediction filled in the colour of the class, the "
        "ground truth as a dashed white line; all planes of a case are to one scale. The slices are those that show most of the "
        "classes. As on a viewer, the patient's right is on the left of axial and coronal slices, the front on the left of sagittal ones."
    )
    stored, split = [], ""
    for split in ("test", "validation"):
        if stored := tables.overlays(run, split):
            break
    if not stored:
        return aid + markup.note(
            f"No overlays in this folder; the final evaluation stores them. {markup.RESUME} finishes the run."
        )
    named = dict.fromkeys(
        [*run.classes, *sorted({c for entry in stored for c in entry.dice} - set(run.classes))]
    )
    colours = {
        name: figures.CLASS_COLOURS[place % len(figures.CLASS_COLOURS)][1] for place, name in enumerate(named)
    }
    key = "".join(
        f'<span><i style="background:{colours[name]}"></i>{markup.text(run.title(name))}</span>'
        for name in named
    )
    whole = [entry for entry in stored if not entry.class_]
    parts = [aid, f'<p class="aid">{markup.text(split).capitalize()} cases.</p>']
    parts.append(f'<div class="legend">{key}<span><i class="dash"></i>ground truth</span></div>')
    for rank, entry in tables.pick(whole) if whole else ():
        parts.append(_shown(run, entry, f"{rank.capitalize()} case", colours))
    worst = []
    for name in named:
        of_class = [entry for entry in stored if entry.class_ == name]
        if of_class:
            lowest = min(of_class, key=lambda entry: (entry.value, entry.site, entry.case))
            worst.append(_shown(run, lowest, f"{run.title(name)}, worst case", colours))
        else:
            worst.append(
                f'<p class="sub">{markup.text(run.title(name))}. No overlay: the class was never scored.</p>'
            )
    parts.append(markup.details("The worst case of every class", "".join(worst), open=not whole))
    return "".join(parts)


def _shown(run: Run, entry: tables.Overlay, title: str, colours: Mapping[str, str]) -> str:
    """A case in its planes, each as wide as it is in millimetres, and its values by class."""
    planes = entry.planes()
    annotated = run.sites.get(entry.site, tables.SiteInfo()).annotated
    tiles = "".join(
        f'<figure style="flex:{shown.image.shape[1] * shown.spacing[1]:.0f} 1 0">'
        + figures.plane(
            shown,
            colours,
            {name: run.title(name) for name in colours},
            f"{title}, {shown.name}, case {entry.case}, site {entry.site}: image, prediction and ground truth",
        )
        + f"<figcaption>{shown.name}</figcaption></figure>"
        for shown in planes
    )
    values = ", ".join(
        f'<span class="of"><i style="background:{colours[name]}"></i>{markup.text(run.title(name))} '
        f"{value:.2f}{'' if name in annotated else '*'}</span>"
        for name, value in entry.dice.items()
    )
    of = f"Dice {entry.value:.3f}" if entry.class_ else f"mean Dice {entry.value:.3f}"
    star = " * never annotated at this site" if set(entry.dice) - set(annotated) else ""
    return (
        f'<article class="case"><h3>{markup.text(title)}: {markup.text(entry.case)} <small>at {markup.text(entry.site)}, {of}</small></h3>'
        f'<div class="planes">{tiles}</div><p class="sub">{values}{star}</p></article>'
    )


def _figure_pages(run: Run, beside: Path) -> str:
    """Links to the pages figure-2.html and so on of the run folder; "" where there are none."""
    found = sorted(run.folder.glob("figure-[0-9].html"))
    links = ", ".join(
        f'<a href="{markup.text(Path(os.path.relpath(file, beside)).as_posix())}">Figure {file.stem[-1]}</a>'
        for file in found
    )
    return f"<p>On pages of their own, as in the Fed-MENU paper: {links}.</p>" if links else ""


# ---------------------------------------------------------------------------------------------- forgetting


def _forgetting(run: Run) -> str:
    title = METRICS[run.measure].title
    over = "the sites where it is defined" if run.images else "the scored cases of all sites"
    aid = markup.aid(
        f"Mean {title} of a model over {over}. Outlined: the model was trained with "
        "annotations of the class; a low value outside an outline is what a site alone forgets or never learns."
    )
    if not run.rows:
        return aid + markup.no_rows()
    rows, _ = tables.scored(run)
    parts = [aid]
    if not run.locals:
        parts.append(markup.note("No local model was evaluated, so there is one row only."))
    for split in tables.splits(rows):
        found = tables.cells(select(rows, split=split, metric=run.measure), "model", "class")
        body = []
        for model in tables.compared(rows):
            cells = [f'<th scope="row">{markup.text(figures.model_title(model))}</th>']
            for class_ in run.classes:
                cells.append(
                    markup.heat(
                        found.get((model, class_)),
                        run.annotates(model, class_),
                        ("trained with it", "trained without it"),
                        of="site" if run.images else "case",
                        zero=0.5 if run.images else 0.0,
                    )
                )
            mean = mean_of_defined(found[model, c].summary.mean for c in run.classes if (model, c) in found)
            cells.append(markup.cell(mean, 2))
            body.append("".join(cells))
        caption = f"Mean {title} on {split} {run.unit}s, model × class"
        parts.append(
            markup.table(
                caption, ["Model", *map(run.title, run.classes), "mean"], body, kind="matrix heat upright"
            )
        )
    return "".join(parts)


# ---------------------------------------------------------------------------------------------- cost


def _cost(run: Run) -> str:
    aid = markup.aid("Where the time went, and how much memory each party needed.")
    if not run.rounds:
        return aid + markup.note(f"No round is complete yet. {markup.RESUME} starts or goes on.")
    parts = [aid]
    if any(entry.phases or entry.cost for entry in run.rounds):
        parts.append(markup.figure(figures.cost_figure(run), "Seconds per round by phase and by site"))
    else:
        parts.append(markup.note("The rounds of this folder hold no cost."))
    phases = list(dict.fromkeys(name for entry in run.rounds for name in entry.phases))
    seconds = {
        p: [s for e in run.rounds if (s := tables.number(e.phases.get(p))) is not None] for p in phases
    }
    total = sum(sum(values) for values in seconds.values())
    if phases:
        body = [
            f'<th scope="row">{markup.text(phase)}</th>{markup.cell(sum(values), 1)}{markup.cell(mean_of_defined(values), 2)}'
            f"{markup.cell(min(values, default=None), 2)}{markup.cell(max(values, default=None), 2)}"
            f"{markup.cell(100 * sum(values) / total if total else None, 1, ' %')}"
            for phase, values in seconds.items()
        ]
        body.append(
            f'<th scope="row">all</th>{markup.cell(total, 1)}{markup.cell(total / len(run.rounds), 2)}<td></td><td></td><td class="num">100.0 %</td>'
        )
        head = ["Phase", "total, s", "per round, s", "least", "most", "share"]
        parts.append(
            markup.table(
                f"Seconds per phase over {markup.count(len(run.rounds), 'round')}", head, body, kind="numbers"
            )
        )

    parts.append(_site_costs(run))
    return "".join(parts)


def _names(run: Run) -> list[str]:
    """Whoever has a cost: the sites, and the one that merges them."""
    return sorted({*run.info["sites"], *(site for entry in run.rounds for site in entry.cost)})


def _site_costs(run: Run) -> str:
    """Time and memory of every site over all rounds, training apart from evaluation."""

    def of(site: str, key: str) -> list[float]:
        return [v for e in run.rounds if (v := tables.number(e.cost.get(site, {}).get(key))) is not None]

    body = []
    for site in _names(run):
        spent, evaluated = sum(of(site, "seconds")), of(site, "evaluate_seconds")
        if not of(site, "seconds") and not evaluated:
            body.append(f'<th scope="row">{markup.text(site)}</th><td colspan="5">took part in no round</td>')
            continue
        steps = sum(tables.number(e.sites.get(site, {}).get("step_seconds")) or 0.0 for e in run.rounds)
        cells = [
            markup.cell(len(of(site, "seconds")), 0),
            markup.cell(spent, 1),
            markup.cell(100 * steps / spent if spent and steps else None, 1, " %"),
            markup.cell(sum(evaluated) or None, 1),
            markup.cell(max(of(site, "peak_mb") + of(site, "evaluate_peak_mb"), default=None), 0),
        ]
        body.append(f'<th scope="row">{markup.text(site)}</th>{"".join(cells)}')
    peaks = [entry.server_peak_mb for entry in run.rounds if entry.server_peak_mb is not None]
    body.append(f'<th scope="row">server</th>{4 * "<td></td>"}{markup.cell(max(peaks, default=None), 0)}')
    head = ["Site", "rounds", "training, s", "in steps", "evaluation, s", "peak, MiB"]
    return markup.table("Time and memory by site", head, body, kind="wide numbers")


# ---------------------------------------------------------------------------------------------- traffic


def _traffic(run: Run) -> str:
    """Bytes by round and site, and by what they were compressed."""
    parts = [
        markup.aid(
            "Bytes of the messages as they were sent, without the engine's own framing and encryption: down is from "
            "the server to a site, up is back. The final evaluation after the last round is not counted."
        )
    ]
    if not any(tables.traffic(run.records, key) for key in tables.TRAFFIC):
        return parts[0] + markup.note("The rounds of this folder hold no bytes.")
    if run.exchange.compressed:
        parts.append(_compression(run))
    if any(tables.traffic(run.rounds, key) for key in tables.TRAFFIC):
        parts.append(markup.figure(figures.traffic_figure(run), "Bytes per round, by kind and by site"))
    names = _names(run)
    whole = {site: sum(tables.traffic(run.records, key, site) for key in tables.TRAFFIC) for site in names}
    everything = sum(whole.values())
    body = []
    for site in names:
        cells = []
        for key in tables.TRAFFIC:
            sent = [v for e in run.rounds if (v := tables.number(e.cost.get(site, {}).get(key))) is not None]
            cells.append(markup.bytes(mean_of_defined(sent)))
        for keys in (("bytes_down", "evaluate_bytes_down"), ("bytes_up", "evaluate_bytes_up")):
            cells.append(markup.bytes(sum(tables.traffic(run.records, key, site) for key in keys)))
        cells.append(markup.cell(100 * whole[site] / everything, 1, " %"))
        body.append(f'<th scope="row">{markup.text(site)}</th>{"".join(cells)}')
    head = [
        "Site",
        *(f"{title} / round" for title in tables.TRAFFIC.values()),
        "down, all",
        "up, all",
        "share",
    ]
    parts.append(markup.table("Bytes by site", head, body, kind="wide numbers"))
    records = [entry for entry in run.records if entry.number or entry.cost]
    body = [
        f'<th scope="row" class="num">{entry.number or "start"}</th>'
        + "".join(f'<td class="num">{_exact_bytes(entry.cost.get(site, {}))}</td>' for site in names)
        for entry in records
    ]
    table = markup.table(
        "Bytes down / up, exact, by round and site; those of the evaluation behind a plus",
        ["Round", *names],
        body,
        kind="wide numbers",
    )
    parts.append(markup.details("Bytes of every round and site", table))
    return "".join(parts)


def _compression(run: Run) -> str:
    """Which compression was on, and the size of a model without it."""
    exchange, size = run.exchange, tables.number(run.info.get("model_bytes"))
    share = "" if exchange.fraction is None else f", the largest {100 * exchange.fraction:g} %"

    def named(kind: str) -> str:
        return "none" if kind == "none" else markup.text(kind) + (share if kind == "topk" else "")

    facts = [("Compression up", named(exchange.up)), ("Compression down", named(exchange.down))]
    facts.append(("Error feedback", "on" if exchange.feedback else "off"))
    facts.append(("A model, uncompressed", "–" if size is None else markup.human(size)))
    held = (
        markup.aid(
            "A model that a site holds already, as from the last evaluation, is named and not sent again."
        )
        if exchange.down != "none"
        else ""
    )
    return markup.facts(facts) + held


def _exact_bytes(cost: Mapping[str, float]) -> str:
    found = []
    for way in ("bytes_down", "bytes_up"):
        trained, evaluated = tables.number(cost.get(way)), tables.number(cost.get(f"evaluate_{way}"))
        found.append("–" if trained is None else f"{trained:,.0f}")
        if evaluated is not None:
            found[-1] += f" + {evaluated:,.0f}"
    return " / ".join(found)


# ---------------------------------------------------------------------------------------------- configuration


def _configuration(run: Run) -> str:
    info = run.info
    machine = info.get("machine") or {}
    pairs = [
        ("run", info.get("id")),
        ("hash", info.get("hash")),
        ("git", info.get("git") or "not a git checkout"),
        *((f"machine: {key}", value) for key, value in machine.items()),
        *sorted((str(k), v) for k, v in (info.get("versions") or {}).items()),
    ]
    body = [
        f'<th scope="row">{markup.text(name)}</th><td><code>{markup.text(value)}</code></td>'
        for name, value in pairs
    ]
    parts = [
        markup.aid("What repeats this run: the resolved federation file, the versions and the machine."),
        markup.table("Versions and machine", ["What", "Value"], body),
    ]
    if run.federation is None:
        parts.append(
            markup.note("federation.yaml is missing from the run folder; copy the file that was run into it.")
        )
    else:
        parts.append(
            markup.details(
                "federation.yaml, resolved", f"<pre><code>{markup.text(run.federation)}</code></pre>"
            )
        )
    return "".join(parts)


_STYLE = """
*{box-sizing:border-box}
html{color-scheme:light dark;scroll-behavior:smooth}
body{margin:0 auto;padding:0 28px 48px;max-width:1240px;background:var(--paper);color:var(--ink);
  font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;
  font-variant-numeric:tabular-nums}
header{padding-top:34px}
.brand{margin:0;color:var(--accent);font-weight:650;font-size:13px;letter-spacing:.09em;text-transform:uppercase}
h1{margin:2px 0 18px;font-size:34px;line-height:1.15;letter-spacing:-.015em;overflow-wrap:anywhere}
h2{margin:0 0 4px;font-size:23px;letter-spacing:-.01em}
h2.quiet{margin:22px 0 8px;font-size:15px;color:var(--muted);font-weight:600;letter-spacing:0}
h3{margin:26px 0 6px;font-size:16.5px}
section{padding-top:42px}
nav{position:sticky;top:0;z-index:5;display:flex;flex-wrap:wrap;gap:2px 20px;margin:24px -28px 0;
  padding:9px 28px;background:var(--paper);border-block:1px solid var(--grid);font-size:13.5px}
section{scroll-margin-top:24px}
a{color:var(--accent);text-underline-offset:2px}
nav a{text-decoration:none}
nav a:hover{text-decoration:underline}
:focus-visible{outline:2px solid var(--accent);outline-offset:2px}
.skip{position:absolute;left:-9999px}
.skip:focus{left:8px;top:8px;background:var(--paper);padding:6px 10px;z-index:9}
.sr{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%);white-space:nowrap}
.aid{margin:2px 0 14px;color:var(--muted);max-width:88ch}
.note{margin:12px 0;padding:10px 14px;border-left:3px solid var(--accent);max-width:100ch;
  background:color-mix(in srgb,var(--accent) 8%,transparent)}
code,pre{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;font-size:.9em}
code{overflow-wrap:anywhere}
pre{margin:8px 0;padding:14px 16px;overflow-x:auto;border:1px solid var(--grid);border-radius:6px;line-height:1.45}
pre code{overflow-wrap:normal}
.facts{display:flex;flex-wrap:wrap;gap:10px 26px;margin:0}
section .facts{margin:4px 0 14px}
.facts dt{color:var(--muted);font-size:12.5px}
.facts dd{margin:0;font-weight:550;overflow-wrap:anywhere}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(230px,1fr));gap:14px;margin:0 0 12px}
.card{padding:14px 18px;border:1px solid var(--grid);border-radius:10px}
.card p{margin:0}
.card .label{font-weight:600}
.card .big{font-size:40px;line-height:1.2;font-weight:650;letter-spacing:-.02em}
.card:last-child{border-color:var(--accent)}
.card:last-child .big{color:var(--accent)}
.told{margin:20px 0 0}
.verdict{margin:0 0 8px;font-size:20px;line-height:1.4;font-weight:550;max-width:70ch}
.card .beside{font-size:14px;color:var(--muted)}
.far{color:var(--bad);cursor:help}
.far-off{margin:6px 0 14px;padding-left:4px;list-style:none;font-size:14px}
.get{margin-left:10px;padding:1px 9px;border:1px solid var(--grid);border-radius:10px;background:none;color:var(--muted);
  font:12px/1.5 inherit;font-family:inherit;cursor:pointer}
.get:hover{color:var(--accent);border-color:var(--accent)}
.find{margin-left:10px;padding:2px 8px;border:1px solid var(--grid);border-radius:6px;background:none;color:inherit;
  font:13px inherit;font-family:inherit}
.tips circle{fill:transparent;pointer-events:all}
.tips circle:hover{stroke:var(--ink);stroke-width:1.2}
#tip{position:fixed;z-index:20;display:none;max-width:300px;padding:4px 9px;border-radius:6px;pointer-events:none;
  background:var(--ink);color:var(--paper);font-size:12.5px}
.sub,small{color:var(--muted);font-size:12.5px}
figure{margin:0}
.chart{margin:18px 0 26px}
.chart figcaption{margin-bottom:6px;font-weight:600}
.scroll{overflow-x:auto;max-width:100%}
svg.plot{display:block;width:100%;height:auto;
  font-family:system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
svg.plot *,.slim *{stroke-linejoin:round;stroke-linecap:butt}
table{width:100%;margin:10px 0 16px;border-collapse:collapse;font-size:13.5px;line-height:1.35}
caption{padding:0 0 7px;text-align:left;font-weight:600;font-size:14px}
th,td{padding:5px 10px;border-bottom:1px solid var(--grid);text-align:left;vertical-align:top}
thead th{border-bottom:1.5px solid var(--muted);vertical-align:bottom;font-weight:600;color:var(--muted)}
tbody th{font-weight:550;white-space:nowrap;background:var(--paper);position:sticky;left:0}
td.num,th.num{text-align:right;white-space:nowrap}
td i{color:var(--muted);font-style:normal}
td small{display:block}
sup{font-size:10.5px;line-height:0;margin-left:2px}
table.wide thead th:nth-child(n+3),table.numbers thead th:nth-child(n+2){text-align:right}
table.wide th,table.wide td{white-space:nowrap}
table.sort thead button{all:unset;cursor:pointer;color:inherit}
table.sort thead button:focus-visible{outline:2px solid var(--accent)}
table.sort thead button::after{content:" ↕";opacity:.45}
th[aria-sort=ascending] button::after{content:" ↑";opacity:1}
th[aria-sort=descending] button::after{content:" ↓";opacity:1}
.scroll:has(table.cases){max-height:640px;overflow:auto}
table.cases thead th{position:sticky;top:0;z-index:1;background:var(--paper)}
table.cases thead th:nth-child(3),table.cases thead th:nth-child(4){text-align:left}
td.bar{background:linear-gradient(var(--accent),var(--accent)) left bottom/var(--v,0) 3px no-repeat}
.swatch{display:inline-block;width:10px;height:10px;margin-right:8px;border-radius:2px}
table.matrix{border-collapse:separate;border-spacing:3px}
table.matrix thead th{border:0;text-align:center;overflow-wrap:anywhere}
table.matrix thead th:first-child{text-align:left}
table.matrix th,table.matrix td{border:0}
table.matrix thead th{font-size:13px}
table.matrix td{min-width:64px;padding:5px 8px;border-radius:4px;text-align:center;white-space:nowrap}
td.has{background:color-mix(in srgb,var(--accent) 17%,var(--paper));font-weight:600}
td.has small{font-weight:400}
td.none,td.blank{background:repeating-linear-gradient(135deg,var(--grid) 0 1px,transparent 1px 7px)}
td.blank{color:var(--muted)}
table.matrix td.meta{white-space:normal;max-width:150px;font-size:12.5px;color:var(--muted)}
th.meta{font-size:12.5px;color:var(--muted)}
table.heat td{vertical-align:middle}
td.own{box-shadow:inset 0 0 0 2px var(--ink);font-weight:650}
table.upright thead th:not(:first-child) span{display:inline-block;writing-mode:vertical-rl;transform:rotate(180deg);
  max-height:190px;text-align:left}
table.upright td{min-width:46px}
details{margin:10px 0}
summary{cursor:pointer;font-weight:600;padding:3px 0}
summary small{font-weight:400}
.notes{margin:0 0 18px;padding:0;list-style:none;font-size:12.5px;color:var(--muted)}
.notes details{margin:0 0 4px 12px;max-width:120ch}
.notes summary{font-weight:400;padding:0}
.organ h3,.case h3{margin:0 0 4px;padding-bottom:4px;border-bottom:1px solid var(--grid);overflow-wrap:anywhere}
.case{margin:18px 0 26px}
.case h3 small{font-weight:400}
.planes{display:flex;gap:10px;align-items:flex-start}
.planes figure{min-width:0;max-width:560px}
.planes figcaption{font-size:12.5px;color:var(--muted)}
.planes .overlay{aspect-ratio:auto}
.legend{display:flex;flex-wrap:wrap;gap:4px 18px;margin:8px 0 4px;font-size:13.5px}
.legend i,.of i{display:inline-block;width:11px;height:11px;margin-right:6px;border-radius:2px}
.of{white-space:nowrap}
.legend .dash{height:0;border-top:2px dashed var(--ink);border-radius:0;width:18px;vertical-align:middle}
.strip .sub{margin:6px 0 4px}
.tiles{display:grid;grid-template-columns:repeat(3,1fr);gap:10px}
.overlay{display:block;width:100%;aspect-ratio:1;height:auto;background:#000;border-radius:5px;
  font-family:system-ui,Arial,sans-serif}
.tiles figcaption{margin-top:4px;font-size:12.5px;line-height:1.35;overflow-wrap:anywhere}
.tiles .val{float:right;font-weight:600}
footer{margin-top:48px;padding-top:12px;border-top:1px solid var(--grid);color:var(--muted);font-size:12.5px}
.slim{display:none}
.slim>svg{display:block;width:100%;height:auto;margin:0 0 12px}
.key svg{max-width:100%;height:auto;vertical-align:middle;margin:0 10px 4px 0}
@media screen and (max-width:700px){svg.plot.wide{position:absolute;width:0;height:0}.slim{display:block}}
svg.plot:not(.wide){min-width:760px}
@media (max-width:640px){body{padding:0 14px 32px}nav{margin-inline:-14px;padding-inline:14px;position:static}
  .planes{flex-direction:column}.planes figure{width:100%;flex:none!important}.verdict{font-size:17px}
  h1{font-size:27px}}
@media print{*{print-color-adjust:exact;-webkit-print-color-adjust:exact}
  body{max-width:none;padding:0;font-size:11px}nav,.skip,.get,.find,table.sort thead button::after{display:none}
  .scroll,.scroll:has(table.cases){overflow:visible;max-height:none}svg.plot:not(.wide){min-width:0}table{font-size:9.5px}tbody th{position:static}
  figure,.organ,.case,tr,.card{break-inside:avoid}h2,h3,caption{break-after:avoid}}
"""

_SCRIPT = """
for (const table of document.querySelectorAll("table.sort")) {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  heads.forEach((head, column) => head.firstChild.addEventListener("click", () => {
    const up = head.getAttribute("aria-sort") === "descending" ? true : head.hasAttribute("aria-sort") ? false : column < 2;
    heads.forEach(other => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const key = row => { const cell = row.cells[column]; return cell.dataset.v ?? cell.textContent.trim(); };
    const empty = text => text === "" || text === "–";
    const rows = [...body.rows].sort((a, b) => {
      const x = key(a), y = key(b);
      if (empty(x) || empty(y)) return empty(x) - empty(y);
      const order = isNaN(x) || isNaN(y) ? x.localeCompare(y, undefined, {numeric: true}) : x - y;
      return up ? order : -order;
    });
    body.append(...rows);
  }));
}
const made = (tag, kind, text) => Object.assign(document.createElement(tag), {className: kind, textContent: text});
const save = (name, href) => Object.assign(document.createElement("a"), {download: name, href}).click();
const named = text => text.trim().toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-|-$/g, "").slice(0, 60) || "fedatlas";
const words = cell => { const c = cell.cloneNode(true); c.querySelectorAll("sup,.sr,.get").forEach(n => n.remove()); return c.textContent.trim(); };
const csv = table => [...table.tHead.rows, ...table.tBodies[0].rows].map(row => [...row.cells].map(cell =>
  `"${(cell.dataset.v ?? words(cell)).replaceAll('"', '""')}"`).join(",")).join("\\n") + "\\n";
for (const table of document.querySelectorAll("table")) {
  const title = table.caption.textContent, button = made("button", "get", "CSV");
  button.type = "button";
  button.addEventListener("click", () => save(`${named(title)}.csv`, URL.createObjectURL(new Blob([csv(table)], {type: "text/csv"}))));
  table.caption.append(button);
  if (table.classList.contains("filter")) {
    const box = Object.assign(made("input", "find", ""), {type: "search", placeholder: "filter rows", ariaLabel: "Filter rows"});
    box.addEventListener("input", () => { const wanted = box.value.toLowerCase();
      for (const row of table.tBodies[0].rows) row.hidden = !row.textContent.toLowerCase().includes(wanted); });
    table.caption.append(box);
  }
}
function png(svg, name) {
  const size = {width: svg.viewBox.baseVal.width * 1.5, height: svg.viewBox.baseVal.height * 1.5}, copy = svg.cloneNode(true), look = getComputedStyle(document.documentElement);
  const colours = ["paper", "ink", "muted", "grid", "accent", "bad", ...["c", "s", "p"].flatMap(l => [...Array(12).keys()].map(n => l + n))];
  const style = document.createElementNS(svg.namespaceURI, "style");
  style.textContent = `:root{${colours.map(c => `--${c}:${look.getPropertyValue("--" + c)}`).join(";")}}text{font-family:sans-serif}.tips{display:none}`;
  copy.prepend(style);
    copy.setAttribute("width", size.width); copy.setAttribute("height", size.height);
  const image = new Image();
  image.onload = () => {
    const canvas = Object.assign(document.createElement("canvas"), {width: 2 * size.width, height: 2 * size.height});
    const draw = canvas.getContext("2d");
    draw.fillStyle = look.getPropertyValue("--paper"); draw.fillRect(0, 0, canvas.width, canvas.height);
    draw.drawImage(image, 0, 0, canvas.width, canvas.height);
    save(`${name}.png`, canvas.toDataURL("image/png"));
  };
  image.src = "data:image/svg+xml;charset=utf-8," + encodeURIComponent(new XMLSerializer().serializeToString(copy));
}
for (const chart of document.querySelectorAll("figure.chart")) {
  const button = made("button", "get", "PNG"), title = chart.querySelector("figcaption");
  const name = named(title.textContent);
  button.type = "button";
  button.addEventListener("click", () => png(chart.querySelector("svg"), name));
  title.append(button);
}
const tip = made("div", "", ""); tip.id = "tip"; document.body.append(tip);
for (const kind of ["pointerover", "pointerdown"]) addEventListener(kind, event => {
  const text = event.target.dataset?.tip;
  tip.style.display = text ? "block" : "none";
  if (!text) return;
  tip.textContent = text;
  tip.style.left = Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 8) + "px";
  tip.style.top = Math.max(event.clientY - tip.offsetHeight - 10, 4) + "px";
});
addEventListener("beforeprint", () => document.querySelectorAll("section > details, header > details").forEach(d => d.open = true));
"""
