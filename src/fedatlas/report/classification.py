"""The sections of the report that labels of whole images have in place of those of voxels."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from fedatlas.evaluation.classification import Estimate
from fedatlas.evaluation.statistics import RowDict, mean_of_defined, select
from fedatlas.report import figures, markup, tables
from fedatlas.report.tables import METRICS, ClassValue, Metric, Run

PICTURES = 128
"""Examples on a page with which every kind has four; beyond it, two."""

KINDS = {
    "present-high": "Present, highest scores",
    "present-low": "Present, lowest scores",
    "absent-high": "Absent, highest scores",
    "absent-low": "Absent, lowest scores",
}

_ENDS = ("_low", "_high", "_undefined")
_NO_HISTOGRAMS = (
    "No histograms in this folder (histograms.json), so nothing can be said of all sites' images together. "
    f"{markup.NO_ROWS}"
)


def card(run: Run, split: str, model: str) -> tuple[str, float | None, str]:
    """Title, value and explanation of the number over all sites' images."""
    found = tables.pooled_macro(run, split, model)
    if found.value is None:
        reasons = dict.fromkeys(h.auroc().reason for h in tables.pooled(run, split, model).values())
        return "All sites together", None, next(iter(reasons), "needs the histograms of the final evaluation")
    text = f"macro AUROC over {_classes(found.n)}, of all sites' images as one set, ± {found.error:.3f}"
    return "All sites together", found.value, text


# ---------------------------------------------------------------------------------------------- labels


def labels(run: Run) -> str:
    """The label matrix, with positives and negatives."""
    aid = markup.aid(
        "A filled cell is a class that the site annotated: its positives (+) and negatives (−) among the annotated training "
        "images. A hatched cell is not annotated, which says nothing about whether the finding is there."
    )
    sites = run.info["sites"]
    if not sites:
        return aid + markup.note("run.json names no site.")
    head = ["Class", *(f"{name} (test only)" if run.sites[name].role == "test" else name for name in sites)]
    body = []
    for class_ in run.classes:
        body.append(
            markup.class_header(run, class_) + "".join(_label_cell(run, name, class_) for name in sites)
        )
    for title, of in (
        ("Images: train · val · test", lambda site: site.cases),
        ("Patients: train · val · test", lambda site: site.patients),
    ):
        cells = "".join(f'<td class="meta">{_splits(of(run.sites[name]))}</td>' for name in sites)
        body.append(f'<th scope="row" class="meta">{title}</th>{cells}')
    return aid + markup.table("Annotated classes by site", head, body, kind="matrix")


def _label_cell(run: Run, name: str, class_: str) -> str:
    site = run.sites[name]
    positives, negatives = site.positives.get(class_), site.negatives.get(class_)
    if site.role == "test":
        return (
            '<td class="blank" title="tested on, never trained on">–<span class="sr"> tested on</span></td>'
        )
    if class_ not in site.annotated:
        return '<td class="none"><span class="sr">not annotated</span></td>'
    labelled, of = site.labelled.get(class_), site.cases.get("train")
    small = "" if labelled is None else f"<small>{labelled}{'' if of is None else f' / {of}'} images</small>"
    if positives is None or negatives is None:
        return f'<td class="has">annotated{small}</td>'
    warn = "" if positives and negatives else ' <small class="warn">one value only</small>'
    return f'<td class="has">{positives:,}+ · {negatives:,}−{small}{warn}</td>'


def _splits(counts: object) -> str:
    found = counts if isinstance(counts, dict) else {}
    return " · ".join(markup.text(found.get(split, 0)) for split in ("train", "validation", "test"))


# ---------------------------------------------------------------------------------------------- global and local


def dots(run: Run) -> str:
    """AUROC of every model at every site, with intervals."""
    aid = markup.aid(
        "Every dot is AUROC of a model at one site, with its 95 % interval over patients where there is room (all "
        "intervals stand in the next section); the bar is the mean of the sites. A filled dot's model was trained with "
        "labels of the class, a hollow one's without."
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
        if not any(row["value"] is not None for row in select(chosen, metric=run.measure)):
            parts.append(markup.note(f"AUROC is not defined at any site on {markup.text(split)} images."))
            continue
        figure = markup.figure(figures.dot_plots(run, chosen, split), f"AUROC on {markup.text(split)} images")
        parts.append(
            figure if position == 0 else markup.details(f"The same on {markup.text(split)} images", figure)
        )
    return "".join(parts)


# ---------------------------------------------------------------------------------------------- results


def results(run: Run) -> str:
    """Every metric by class, site and model, one metric at a time."""
    aid = markup.aid(
        "Value and 95 % interval over patients; n+ and n− are the positives and "
        "negatives that are scored. Below, classes that the site annotates stand apart from those it never annotated, "
        "where a high AUROC means that the finding was learnt from other sites."
    )
    rows, provisional = tables.scored(run)
    if not rows:
        return aid + markup.no_rows()
    parts = [aid]
    if provisional:
        parts.append(
            markup.note(
                f"Provisional: validation rows of round {rows[0]['round']}, no intervals. {markup.NO_ROWS}"
            )
        )
    for position, split in enumerate(tables.splits(rows)):
        of_split = select(rows, split=split)
        panels = []
        for metric in _metrics(of_split):
            described = METRICS.get(metric, Metric(metric, "", 3, True))
            found = tables.class_values(of_split, metric)
            content = "".join(_metric_table(run, found, metric, split, known) for known in (True, False))
            better = "higher" if described.higher_is_better else "lower"
            hint = f'<p class="sub">{_about(metric, run)}{better.capitalize()} is better.</p>'
            panels.append((metric, described.title, hint + content))
        content = _glance(run, of_split) + _choice(f"metric-{split}", f"Metric on {split} images", panels)
        title = f"{markup.text(split).capitalize()} images"
        parts.append(f"<h3>{title}</h3>{content}" if position == 0 else markup.details(title, content))
    parts.append(
        markup.aid(
            "A threshold is fitted per class on the validation images of all sites together, and held fixed in the "
            "intervals. * Some resamples hold one label value only and are not in the interval; hovering tells how many."
        )
    )
    return "".join(parts)


def _metrics(rows: Iterable[RowDict]) -> list[str]:
    return [m for m in tables.metrics(rows) if not m.startswith("n_") and not m.endswith(_ENDS)]


def _about(metric: str, run: Run) -> str:
    if metric == "auroc":
        return "Share of pairs of a positive and a negative in which the positive scores higher; ties count half. "
    if metric in ("ece", "ece_mass"):
        return f"Expected calibration error over {run.bins} bins. "
    if metric == "ap":
        return "Without interpolation; a model that knows nothing reaches the share of positives. "
    return ""


def _choice(name: str, title: str, panels: Sequence[tuple[str, str, str]]) -> str:
    """Panels of which one is shown; (key, title as plain text, content as HTML) of each."""
    anchor = markup.slug(name)
    buttons = "".join(
        f'<input type="radio" name="{anchor}" id="{anchor}-{markup.slug(key)}"{"" if place else " checked"}>'
        f'<label for="{anchor}-{markup.slug(key)}">{markup.text(label)}</label>'
        for place, (key, label, _) in enumerate(panels)
    )
    content = "".join(f"<div>{html}</div>" for _, _, html in panels)
    return f'<div class="choice" role="radiogroup" aria-label="{markup.text(title)}">{buttons}{content}</div>'


def _glance(run: Run, rows: Sequence[RowDict]) -> str:
    """The global model's AUROC as a class × site matrix, outlined where the site annotates the class."""
    model = tables.models(rows)[0]
    found = tables.cells(select(rows, metric=run.measure, model=model), "class", "site")
    known = {(row["class"], row["site"]) for row in select(rows, metric=run.measure, known=True)}
    body = []
    for class_ in run.classes:
        cells = [markup.class_header(run, class_)]
        for name in run.sites:
            own = (class_, name) in known or class_ in run.sites[name].annotated
            words = ("site annotates it", "never annotated here")
            cells.append(markup.heat(found.get((class_, name)), own, words, of="site", zero=0.5))
        body.append("".join(cells))
    return markup.table(
        f"AUROC of {figures.model_title(model)}, in colour from 0.5 to 1; outlined: annotated at the site",
        ["Class", *run.sites],
        body,
        kind="matrix heat",
    )


def _metric_table(
    run: Run, found: dict[tuple[str, str, str], ClassValue], metric: str, split: str, known: bool
) -> str:
    """class × site × model of one metric on one split, either of annotated classes or of the others."""
    described = METRICS.get(metric, Metric(metric, "", 3, True))
    of_kind = {key: at for key, at in found.items() if at.known is known}
    if not of_kind:
        what = "that its site annotates" if known else "that its site never annotated"
        return markup.note(f"No scored {markup.text(split)} image has a truth for a class {what}.")
    names = tables.compared([{"model": model} for _, _, model in of_kind])
    reasons = dict.fromkeys(_plainly(at.reason) for at in of_kind.values() if at.value is None)
    letters = {reason: markup.letter(index) for index, reason in enumerate(reasons)}
    anchor = markup.slug(f"{split}-{metric}-{'known' if known else 'unknown'}")
    body: list[str] = []
    omitted: dict[str, dict[str, list[str]]] = {reason: {} for reason in reasons}
    totals: Counter[str] = Counter()
    for class_ in run.classes:
        for site in run.sites:
            cells = {m: of_kind[class_, site, m] for m in names if (class_, site, m) in of_kind}
            if not cells:
                continue
            first = next(iter(cells.values()))
            line = [
                markup.class_header(run, class_),
                f"<td>{markup.text(site)}</td>",
                markup.cell(first.n_positive, 0),
                markup.cell(first.n_negative, 0),
            ]
            for model in names:
                at = cells.get(model)
                line.append(_value_cell(at, described, letters, anchor))
                if at is not None and at.value is None:
                    reason, where = (
                        _plainly(at.reason),
                        f"{markup.text(run.title(class_))} at {markup.text(site)}",
                    )
                    totals[reason] += 1
                    omitted[reason].setdefault(where, []).append(markup.text(figures.model_title(model)))
            body.append("".join(line))
    title = "annotated by the site" if known else "never annotated here: found or not"
    head = ["Class", "Site", "n+", "n−", *(figures.model_title(model) for model in names)]
    table = markup.table(f"{described.title} on {split}, classes {title}", head, body, sort=True, kind="wide")
    notes = "".join(
        markup.footnote(f"{anchor}-{letters[reason]}", letters[reason], reason, totals[reason], places)
        for reason, places in omitted.items()
    )
    return table + (f'<ul class="notes">{notes}</ul>' if notes else "")


def _plainly(reason: str) -> str:
    """Without the counts, which stand in the row already."""
    return re.sub(r"\d+ (?:positive|negative), ", "", reason)


def _value_cell(at: ClassValue | None, metric: Metric, letters: dict[str, str], anchor: str) -> str:
    if at is None:
        return '<td class="num">–</td>'
    if at.value is None:
        letter = letters[_plainly(at.reason)]
        mark = f'<sup><a href="#{anchor}-{letter}" title="{markup.text(at.reason)}">{letter}</a></sup>'
        return f'<td class="num" data-v="" title="{markup.text(at.reason)}">not defined{mark}</td>'
    value = f"{at.value:.{metric.decimals}f}"
    told, interval = "", ""
    if at.low is not None and at.high is not None:
        interval = f" <i>[{at.low:.{metric.decimals}f}, {at.high:.{metric.decimals}f}]</i>"
        if at.undefined:
            told = f' title="{100 * at.undefined:.1f} % of the resamples have no value"'
            interval += "<sup>*</sup>"
    elif at.no_interval:
        told, interval = f' title="no interval: {markup.text(at.no_interval)}"', " <i>[–]</i>"
    return f'<td class="num" data-v="{at.value:.6g}"{told}>{value}{interval}</td>'


# ---------------------------------------------------------------------------------------------- all sites together


def pooled(run: Run) -> str:
    """What the summed histograms of all sites tell."""
    aid = markup.aid(
        "Every site sends how many positives and negatives it has in each bin of score, and no scores; the sums tell "
        "what one hospital with all images would find. Pairs within a bin count half, so the exact AUROC is within ± of "
        "the value."
    )
    if not run.histograms:
        return aid + markup.note(_NO_HISTOGRAMS)
    parts = [aid]
    for position, split in enumerate(tables.splits([{"split": h.split} for h in run.histograms])):
        content = _pooled_split(run, split)
        title = f"{markup.text(split).capitalize()} images"
        parts.append(f"<h3>{title}</h3>{content}" if position == 0 else markup.details(title, content))
    return "".join(parts)


def _pooled_split(run: Run, split: str) -> str:
    every = [{"model": h.model} for h in run.histograms if h.split == split]
    model, names = tables.models(every)[0], tables.compared(every)
    found = {name: tables.pooled(run, split, name) for name in names}
    body = []
    for class_ in run.classes:
        whole = found[model].get(class_)
        line = [markup.class_header(run, class_)]
        if whole is None:
            body.append(f'{line[0]}<td colspan="{3 + len(names)}">never scored</td>')
            continue
        line += [markup.cell(sum(whole.positives), 0), markup.cell(sum(whole.negatives), 0)]
        line += [
            _estimate(found[name][class_].auroc()) if class_ in found[name] else '<td class="num">–</td>'
            for name in names
        ]
        line.append(_estimate(whole.ece(run.bins)))
        body.append("".join(line))
    macros = [tables.pooled_macro(run, split, name) for name in names]
    eces = [e.value for h in found[model].values() if (e := h.ece(run.bins)).value is not None]
    body.append(
        '<th scope="row">mean</th><td></td><td></td>'
        + "".join(_estimate(Estimate(macro.value, macro.error, "no class")) for macro in macros)
        + markup.cell(mean_of_defined(eces), 3)
    )
    title = figures.model_title
    head = ["Class", "n+", "n−", *(f"AUROC, {title(name)}" for name in names), f"ECE, {title(model)}"]
    caption = f"AUROC and calibration error over all sites' {split} images, with the bounds of their errors"
    shown = markup.text(title(model))
    where = markup.text(split)
    return (
        markup.table(caption, head, body, kind="wide numbers")
        + markup.figure(figures.roc_curves(run, split, model), f"ROC curves of {shown} on {where} images")
        + markup.figure(
            figures.reliability_plots(run, split, model),
            f"Reliability of {shown} on {where} images, {run.bins} bins",
        )
        + _decisions(run, split, model)
    )


def _estimate(found: Estimate) -> str:
    if found.value is None:
        return f'<td class="num" data-v="" title="{markup.text(found.reason)}">not defined<small>{markup.text(_plainly(found.reason))}</small></td>'
    error = "" if found.error is None else f" <i>± {found.error:.3f}</i>"
    return f'<td class="num" data-v="{found.value:.6g}">{found.value:.3f}{error}</td>'


def _decisions(run: Run, split: str, model: str) -> str:
    """Counts at the thresholds."""
    limits = run.thresholds
    if limits is None:
        return markup.note(
            "No thresholds in this folder (thresholds.json): nothing is called positive or negative. The final "
            "evaluation fits them."
        )
    criterion = {"f1": "F1", "youden": "Youden index"}.get(limits.criterion, limits.criterion)
    found = tables.pooled(run, split, model)
    body = []
    for class_ in run.classes:
        head = markup.class_header(run, class_)
        limit, whole = limits.classes.get(class_), found.get(class_)
        if limit is None or limit.value is None:
            reason = markup.text((limit and limit.reason) or "none was fitted")
            body.append(f'{head}<td colspan="10">no threshold: {reason}</td>')
            continue
        first = markup.cell(limit.value, 3) + markup.cell(limit.reached, 3)
        counts = None if whole is None else tables.confusion(whole, limit.value)
        if counts is None:
            why = (
                "never scored"
                if whole is None
                else "the threshold is no edge of the histogram, so counts are not exact"
            )
            body.append(f'{head}{first}<td colspan="8">{why}</td>')
            continue
        tp, fn, fp, tn = counts
        shares = (
            _share(tp, tp + fn),
            _share(tn, tn + fp),
            _share(tp, tp + fp),
            _share(2 * tp, 2 * tp + fp + fn),
        )
        cells = "".join(markup.cell(n, 0) for n in counts) + "".join(markup.cell(s, 3) for s in shares)
        body.append(f"{head}{first}{cells}")
    columns = [
        "threshold",
        f"{criterion}, {limits.split}",
        "found",
        "missed",
        "false alarms",
        "rightly negative",
    ]
    columns += ["sensitivity", "specificity", "precision", "F1"]
    caption = f"Decisions of {figures.model_title(model)} on all sites' {split} images at the thresholds"
    return markup.table(caption, ["Class", *columns], body, kind="wide numbers")


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _classes(n: int) -> str:
    return f"{n} class{'' if n == 1 else 'es'}"


# ---------------------------------------------------------------------------------------------- examples


def examples(run: Run) -> str:
    """The images with the highest and the lowest scores of each class, with Grad-CAM."""
    aid = markup.aid(
        "The images that the model is surest of and those it errs on most, by class, over all sites that keep their "
        "pictures here. In colour, Grad-CAM: which parts raise the class's logit, scaled to its own largest value; the "
        "line is at half of it."
    )
    most = 4 if 16 * len(run.classes) <= PICTURES else 2
    stored, split = {}, ""
    for split in ("test", "validation"):
        if stored := tables.examples(run, split, most):
            break
    if not stored:
        return aid + markup.note(
            f"No pictures in this folder; the final evaluation stores them. {markup.RESUME} finishes the run."
        )
    switch = (
        f'<p class="aid">{markup.text(split).capitalize()} images. '
        '<input type="checkbox" id="cam" checked> <label for="cam">Grad-CAM over the images</label></p>'
    )
    articles = []
    for class_ in (*run.classes, *sorted(set(stored) - set(run.classes))):
        kinds = stored.get(class_, {})
        strips = "".join(
            f'<div class="strip"><p class="sub">{title}</p><div class="tiles">{_tiles(kinds[kind])}</div></div>'
            for kind, title in KINDS.items()
            if kinds.get(kind)
        )
        content = (
            f'<div class="kinds{"" if most > 2 else " few"}">{strips}</div>'
            if strips
            else '<p class="sub">No picture: the class was never scored.</p>'
        )
        articles.append(
            f'<article class="organ"><h3>{markup.swatch(run, class_)}{markup.text(run.title(class_))}</h3>{content}</article>'
        )
    return f"{aid}{switch}{''.join(articles)}"


def _tiles(entries: Sequence[tables.Example]) -> str:
    return "".join(
        f"<figure>{figures.example(entry)}<figcaption><b>{markup.number(entry.score, 3)}</b>{_verdict(entry)}<br>"
        f"{markup.text(entry.case)}<br><small>{markup.text(entry.site)}</small></figcaption></figure>"
        for entry in entries
    )


def _verdict(entry: tables.Example) -> str:
    """Whether the threshold calls the image wrongly."""
    if entry.threshold is None:
        return ""
    called, there = entry.score >= entry.threshold, entry.kind.startswith("present")
    if called == there:
        return ""
    return f' <span class="wrong">{"missed" if there else "false alarm"}</span>'


STYLE = (
    """
.choice{margin:10px 0 18px}
.choice>input{position:absolute;opacity:0;pointer-events:none}
.choice>label{display:inline-block;margin:0 6px 6px 0;padding:3px 12px;border:1px solid var(--grid);border-radius:14px;
  font-size:13.5px;cursor:pointer}
.choice>input:checked+label{border-color:var(--accent);color:var(--accent);font-weight:600}
.choice>input:focus-visible+label{outline:2px solid var(--accent);outline-offset:2px}
.choice>div{display:none}
"""
    + "".join(
        f".choice>input:nth-of-type({n}):checked~div:nth-of-type({n}){{display:block}}\n"
        for n in range(1, 13)
    )
    + """.warn,.wrong{color:var(--bad)}
.wrong{font-weight:600}
.kinds{display:grid;grid-template-columns:1fr 1fr;gap:6px 28px}
.kinds .tiles{grid-template-columns:repeat(4,1fr)}
.kinds.few{grid-template-columns:repeat(4,1fr);gap:6px 18px}
.kinds.few .tiles{grid-template-columns:repeat(2,1fr)}
#overlays .organ{margin-top:18px}
section:has(#cam:not(:checked)) .cam{display:none}
@media (max-width:900px){.kinds,.kinds.few{grid-template-columns:1fr}}
@media print{.choice>label,.choice>input{display:none}.choice>div{display:block}}
"""
)
