"""The charts of a run."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba

from fedatlas.evaluation.classification import Histogram
from fedatlas.evaluation.statistics import RowDict, client_wise_index, grouped, mean_of_defined, select, table
from fedatlas.report import read, tables
from fedatlas.report.figures.chart import (
    DASHED,
    DOTTED,
    LOST,
    Key,
    Point,
    box,
    chart,
    columns_of,
    line,
    line_key,
    patch_key,
    said,
    short,
    tip,
    whole_numbers,
)
from fedatlas.report.figures.theme import (
    ACCENT,
    BAD,
    GRID,
    INK,
    MARKERS,
    MUTED,
    PAPER,
    PHASE_COLOURS,
    SITE_COLOURS,
    class_colour,
    model_title,
    site_colour,
)
from fedatlas.report.read import Run

_CHANCE: dict[str, Any] = {"color": MUTED, "linewidth": 1, "linestyle": DOTTED}


def _colour(run: Run, class_: str) -> str:
    return class_colour(run.classes.index(class_))


def _site_style(run: Run, site: str) -> dict[str, Any]:
    index = list(run.sites).index(site) if site in run.sites else len(run.sites)
    return {
        "color": site_colour(index),
        "marker": MARKERS[index % len(MARKERS)],
        "markevery": max(1, len(run.rounds) // 10),
        "linestyle": "-" if index < len(SITE_COLOURS) else (0, (4, 1.5)),
    }


def _site_keys(run: Run, sites: Sequence[str] | None = None, **more: Any) -> list[Key]:
    names = run.sites if sites is None else sites
    return [line_key(short(s, 30), **{**_site_style(run, s), "markevery": None, **more}) for s in names]


def _parties(run: Run) -> list[str]:
    """Whoever has a log or a cost in any round: sites, or the one that merges their data."""
    return [party for party in run.parties if any(party in (*e.sites, *e.cost) for e in run.rounds)]


def _mark_keys(run: Run, *, lost: bool = True) -> list[Key]:
    """What the marks of the best round, and of rounds in which a site was lost, mean."""
    keys = []
    if run.best_round is not None:
        keys.append(line_key(f"best round ({run.best_round})", **_CHANCE))
    if lost and tables.lost(run):
        keys.append(line_key("a site was lost", **LOST))
    return keys


def _mark_lost(axis: Axes, run: Run) -> None:
    rounds = sorted({number for number, _, _ in tables.lost(run) if number})
    if rounds:
        axis.plot(rounds, [0.03] * len(rounds), **LOST, transform=axis.get_xaxis_transform(), zorder=5)


def _round_axis(axis: Axes, run: Run, *, best: bool = True, label: bool = True) -> None:
    first, last = run.rounds[0].number, run.rounds[-1].number
    margin = max(0.5, 0.02 * (last - first))
    axis.set_xlim(first - margin, last + margin)
    whole_numbers(axis)
    if label:
        axis.set_xlabel("round")
    if best and run.best_round is not None:
        axis.axvline(run.best_round, **_CHANCE, zorder=0.5)


# ---------------------------------------------------------------------------------------------- over rounds


def loss_curves(run: Run) -> Markup:
    """The loss and every further term, per party over rounds."""
    terms, parties = tables.loss_terms(run), _parties(run)

    def panel(axis: Axes, term: str) -> None:
        for party in parties:
            values = [(r.number, read.number(r.sites.get(party, {}).get(term))) for r in run.rounds]
            line(axis, values, of=f"{party}, {term}", **_site_style(run, party))
        axis.set_title(_term_title(term, terms))
        _round_axis(axis, run)
        if term == terms[0]:
            _mark_lost(axis, run)

    told = f"Training loss and its terms ({', '.join(terms)}) per site over rounds"
    columns = min(3, max(2, len(terms)))
    keys = _site_keys(run, parties) + _mark_keys(run)
    return chart("loss", told, terms, panel, columns=columns, height=2.5, keys=keys)


def _term_title(term: str, terms: Sequence[str]) -> str:
    """A term of the loss as a panel calls it."""
    if term == "loss":
        return "training loss" if tables.main_loss(terms) == "loss" else "loss, all terms together"
    return f"training loss: {term}" if term == tables.main_loss(terms) else term


Means = dict[tuple[int, bool, str, str], float | None]
"""(round, known, site, class) -> mean over cases."""


def _round_means(run: Run) -> Means:
    return {
        (entry.number, *key): mean.mean
        for entry in run.rounds
        for key, mean in table(select(entry.rows, metric=run.measure), "known", "site", "class").items()
    }


def _over_rounds(
    run: Run, means: Means, known: bool, site: str | None = None, class_: str | None = None
) -> list[Point]:
    """(round, mean) where there is one; over all sites, or all classes, where none is given."""
    found: list[Point] = []
    for entry in run.rounds:
        value = mean_of_defined(
            mean
            for (number, of_known, at, name), mean in means.items()
            if (number, of_known) == (entry.number, known) and site in (None, at) and class_ in (None, name)
        )
        if value is not None:
            found.append((entry.number, value))
    return found


def site_curves(run: Run) -> Markup:
    """Validation scores per site over rounds: classes annotated there, and classes never annotated there."""
    means, title = _round_means(run), tables.METRICS[run.measure].title
    sides = [known for known in (True, False) if any(key[1] is known for key in means)]

    def panel(axis: Axes, known: bool) -> None:
        for site in run.sites:
            line(axis, _over_rounds(run, means, known, site), of=f"{site}, {title}", **_site_style(run, site))
        axis.set_title("classes annotated at the site" if known else "classes never annotated at the site")
        axis.set_ylim(-0.03, 1.03)
        _round_axis(axis, run)
        _mark_lost(axis, run)

    told = f"Validation {title} of the global model per site over rounds"
    keys, y = _site_keys(run) + _mark_keys(run), f"{title}, mean over classes"
    return chart(f"{run.measure}-site", told, sides, panel, columns=2, height=2.9, keys=keys, y=y)


def class_curves(run: Run) -> Markup:
    """Validation scores over rounds, one panel per class: at sites that annotate it, and at those that do not."""
    means, title = _round_means(run), tables.METRICS[run.measure].title

    def panel(axis: Axes, name: str) -> None:
        colour = _colour(run, name)
        for known, dash in ((True, "-"), (False, DASHED)):
            for site in run.sites:
                values = _over_rounds(run, means, known, site, name)
                line(axis, values, color=colour, linestyle=dash, linewidth=0.7, alpha=0.45)
            who = "mean over sites that annotate it" if known else "mean over the other sites"
            values = _over_rounds(run, means, known, class_=name)
            line(axis, values, of=who, color=colour, linestyle=dash, linewidth=2)
        if not axis.lines:
            said(axis, "never scored")
        axis.set_title(short(run.title(name), 24))
        axis.set_ylim(-0.04, 1.04)
        _round_axis(axis, run, label=False)

    keys = [
        line_key("mean over sites that annotate the class", color=INK, linewidth=2),
        line_key("mean over sites that do not", color=INK, linewidth=2, linestyle=DASHED),
        line_key("one site", color=INK, linewidth=0.7, alpha=0.6),
    ]
    return chart(
        f"{run.measure}-class",
        f"Validation {title} of the global model per class over rounds",
        run.classes,
        panel,
        columns=columns_of(len(run.classes), 3, 5),
        height=1.75,
        keys=keys + _mark_keys(run, lost=False),
        x="round",
        share=True,
    )


def _bars_and_lines(
    run: Run,
    name: str,
    told: str,
    unit: str,
    titles: tuple[str, str],
    bars: Mapping[str, Sequence[float]],
    lines: Mapping[str, Sequence[float | None]],
) -> Markup:
    """Two panels over rounds: what adds up, as bars on each other, and every party, as lines."""
    numbers = [entry.number for entry in run.rounds]

    def panel(axis: Axes, adds: bool) -> None:
        axis.set_title(titles[0] if adds else titles[1])
        if adds:
            below = np.zeros(len(numbers))
            for index, (title, values) in enumerate(bars.items()):
                colour = PHASE_COLOURS[index % len(PHASE_COLOURS)][0]
                axis.bar(numbers, values, bottom=below, width=0.85, color=colour, label=title, linewidth=0)
                for x, under, value in zip(numbers, below, values, strict=True):
                    tip(axis, x, under + value / 2, f"{title}, round {x}: {value:.3g} {unit}")
                below = below + np.asarray(values)
            if bars:
                axis.legend(loc="upper right", ncols=2)
            axis.set_ylim(0, 1.35 * max(below.max(initial=0.0), 1e-9))
        else:
            for party, values in lines.items():
                points = list(zip(numbers, values, strict=True))
                line(axis, points, of=f"{party}, {unit}", decimals=1, **_site_style(run, party))
            axis.set_ylim(0, 1.1 * axis.get_ylim()[1])
        _round_axis(axis, run, best=False)

    return chart(name, told, (True, False), panel, columns=2, height=2.4, keys=_site_keys(run, list(lines)))


def cost_figure(run: Run) -> Markup:
    """Seconds of every round by phase, and seconds of every party."""
    phases = dict.fromkeys(name for entry in run.rounds for name in entry.phases)
    return _bars_and_lines(
        run,
        "cost",
        "Seconds per round by phase, and seconds per round of every site",
        "s",
        ("seconds per round, by phase", "seconds per round, by site"),
        {p: [read.number(entry.phases.get(p)) or 0.0 for entry in run.rounds] for p in phases},
        {p: [read.number(r.cost.get(p, {}).get("seconds")) for r in run.rounds] for p in _parties(run)},
    )


_UNITS = (("kB", 1e3), ("MB", 1e6), ("GB", 1e9), ("TB", 1e12))


def traffic_figure(run: Run) -> Markup:
    """What travelled per round: of all parties by kind, and of every party."""
    kinds = {key: title for key, title in tables.TRAFFIC.items() if tables.traffic(run.rounds, key)}
    most = max((tables.all_bytes([entry]) for entry in run.rounds), default=0.0)
    unit, scale = next((u, v) for u, v in _UNITS if most < 1000 * v or u == _UNITS[-1][0])
    return _bars_and_lines(
        run,
        "traffic",
        "Bytes per round by kind over all sites, and of every site",
        unit,
        (f"{unit} per round, all sites", f"{unit} per round, by site"),
        {title: [tables.traffic([e], key) / scale for e in run.rounds] for key, title in kinds.items()},
        {p: [tables.all_bytes([e], p) / scale or None for e in run.rounds] for p in _parties(run)},
    )


def presence_figure(run: Run) -> Markup:
    """Which sites answered each round: a bar where a site did, a cross where it was lost."""
    found = tables.presence(run)
    at = {
        what: [(n, place) for place, of in enumerate(found.values()) for n, got in of.items() if got == what]
        for what in ("lost", "lost in evaluation")
    }
    crosses, rings = at.values()
    ring: dict[str, Any] = {"marker": "o", "linestyle": "none", "color": PAPER, "markeredgecolor": BAD}

    def panel(axis: Axes, _: None) -> None:
        for place, (site, rounds) in enumerate(found.items()):
            there = [number for number, what in sorted(rounds.items()) if what != "lost"]
            spans = [(number - 0.42, 0.84) for number in there]
            merged = _joined(spans) if len(run.rounds) > 60 else spans
            colour = str(_site_style(run, site)["color"])
            axis.broken_barh(merged, (place - 0.2, 0.4), facecolors=colour, linewidth=0)
        line(axis, crosses, **LOST)
        line(axis, rings, **ring, markeredgewidth=1.6)
        axis.set_yticks(range(len(found)), [short(site, 22) for site in found])
        axis.set_ylim(len(found) - 0.4, -0.6)
        axis.grid(visible=False)
        _round_axis(axis, run, best=False)

    keys = [patch_key("answered", facecolor=MUTED)]
    keys += [line_key("lost", **LOST)] if crosses else []
    keys += [line_key("trained, lost in the evaluation", **ring)] if rings else []
    told, height = "Which sites answered in each round, and which were lost", 0.45 + 0.24 * len(found)
    return chart("presence", told, [None], panel, columns=1, height=height, keys=keys)


def _joined(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """(begin, length) of spans of neighbouring rounds, made one."""
    joined: list[tuple[float, float]] = []
    for begin, length in spans:
        if joined and begin - sum(joined[-1]) < 0.5:
            joined[-1] = (joined[-1][0], begin + length - joined[-1][0])
        else:
            joined.append((begin, length))
    return joined


def epsilon_curves(run: Run) -> Markup:
    """ε so far over rounds, and, where rounds were evaluated, the client-wise validation score against it."""
    spent, title = [(entry.number, entry.epsilon) for entry in run.rounds], tables.METRICS[run.measure].title
    bought = [
        (entry.epsilon, index)
        for entry in run.rounds
        if entry.epsilon is not None
        and (index := client_wise_index(select(entry.rows, metric=run.measure))) is not None
    ]
    style: dict[str, Any] = {"color": ACCENT, "marker": "o", "markevery": max(1, len(spent) // 10)}

    def panel(axis: Axes, over_rounds: bool) -> None:
        if over_rounds:
            line(axis, spent, of="ε so far", **style)
            axis.set_title("ε so far")
            axis.set_ylim(0, None)
            _round_axis(axis, run)
        else:
            axis.plot(*zip(*bought, strict=True), **style)
            axis.set_title(f"validation {title}, client-wise, against ε")
            axis.set_xlabel("ε so far")
            axis.set_ylim(-0.03, 1.03)

    told = f"Privacy spent, ε, over rounds, and validation {title} against it"
    sides, keys = (True, False) if bought else (True,), _mark_keys(run, lost=False)
    return chart("epsilon", told, sides, panel, columns=2, height=2.2, keys=keys)


# ---------------------------------------------------------------------------------------------- models beside each other


def _by_model(
    run: Run,
    name: str,
    told: str,
    rows: Sequence[RowDict],
    of_model: Callable[[Axes, str, str, int], bool],
    height: float,
    keys: Sequence[Key],
) -> Markup:
    """A panel per class with a row per model over scores from 0 to 1. of_model: draws a class and model at a place, and says
    whether there was anything to draw."""
    names = tables.compared(rows)

    def panel(axis: Axes, class_: str) -> None:
        drawn = [of_model(axis, class_, model, place) for place, model in enumerate(names)]
        axis.set_yticks(range(len(names)), [short(model_title(m), 22) for m in names])
        axis.set_ylim(len(names) - 0.4, -0.6)
        axis.set_xlim(-0.03, 1.03)
        axis.grid(axis="y", visible=False)
        axis.set_title(short(run.title(class_), 28))
        if not any(drawn):
            there = select(rows, class_=class_, metric=run.measure)
            said(axis, "not defined at any site" if run.images and there else "never scored")

    columns = columns_of(len(run.classes), *((2, 3) if len(run.classes) <= 6 else (3, 4)))
    x = tables.METRICS[run.measure].title
    return chart(name, told, run.classes, panel, columns=columns, height=height, keys=keys, x=x, share=True)


def _with_class(rows: Sequence[RowDict]) -> list[RowDict]:
    """Dice of the cases in which the class is."""
    return [r for r in select(rows, metric="dice") if r["value"] is not None and tables.has_truth(r)]


def box_plots(run: Run, rows: Sequence[RowDict], split: str) -> Markup:
    """Dice per class over all scored cases in which it is there: a box for the global model, one per local model."""
    dice = grouped(_with_class(rows), "class", "model")

    def of_model(axis: Axes, class_: str, model: str, place: int) -> bool:
        if seen := dice.get((class_, model)):
            told = [f"{row['case']} at {row['site']}: {row['value']:.3f}" for row in seen]
            box(
                axis,
                [row["value"] for row in seen],
                place,
                _colour(run, class_),
                filled=run.annotates(model, class_),
                width=0.62,
                told=told if len(told) <= 30 else [],
                across=True,
            )
        return bool(seen)

    keys = [
        patch_key("trained with annotations of the class", facecolor=MUTED, edgecolor=MUTED, alpha=0.55),
        patch_key("trained without", facecolor="none", edgecolor=MUTED),
    ]
    told = f"Box plots of Dice on {split}, per class, global model and local models"
    height = 0.55 + 0.21 * len(tables.compared(rows))
    return _by_model(run, f"boxes-{split}", told, rows, of_model, height, keys)


def dot_plots(run: Run, rows: Sequence[RowDict], split: str) -> Markup:
    """AUROC per class: a row per model, in it a dot per site, its interval unless there are too many to tell apart,
    and the mean of the sites."""
    found = tables.class_values(rows, run.measure)
    names, sites = tables.compared(rows), list(run.sites)
    title, roomy = tables.METRICS[run.measure].title, dots_have_intervals(run, rows)
    step = min((0.8 if roomy else 0.5) / max(len(sites), 1), 0.25)
    height = 0.65 + len(names) * (max(0.22, 0.085 * len(sites)) if roomy else 0.22)

    def of_model(axis: Axes, class_: str, model: str, place: int) -> bool:
        if place == 0:
            axis.axvline(0.5, **_CHANCE, zorder=0.5)
        seen = [(site, at) for site in sites if (at := found.get((class_, site, model)))]
        for site, at in seen:
            if at.value is None:
                continue
            y = place + (sites.index(site) - (len(sites) - 1) / 2) * step
            style, interval = _site_style(run, site), ""
            if at.low is not None and at.high is not None:
                interval = f" [{at.low:.3f}, {at.high:.3f}]"
                if roomy:
                    axis.plot([at.low, at.high], [y, y], color=style["color"], linewidth=1.1)
            inside = style["color"] if run.annotates(model, class_) else PAPER
            look = {"color": style["color"], "marker": style["marker"], "markerfacecolor": inside}
            axis.plot(at.value, y, markersize=4 if roomy else 3, **look)
            tip(axis, at.value, y, f"{model_title(model)} at {site}: {at.value:.3f}{interval}")
        mean = mean_of_defined(at.value for _, at in seen)
        if mean is not None:
            axis.plot([mean, mean], [place - 0.42, place + 0.42], color=INK, linewidth=1.8)
        return mean is not None

    dot = {"color": MUTED, "marker": "o", "linestyle": "none"}
    bar = {"color": INK, "marker": "|", "markersize": 9, "linestyle": "none", "markeredgewidth": 1.8}
    keys = [
        *_site_keys(run, linestyle="none"),
        line_key("trained with labels of the class", **dot),
        line_key("trained without", **dot, markerfacecolor=PAPER),
        line_key("mean of the sites", **bar),
        line_key("chance", **_CHANCE),
    ]
    told = f"{title} on {split} per class, model and site; global and local models"
    return _by_model(run, f"dots-{split}", told, rows, of_model, height, keys)


def dots_have_intervals(run: Run, rows: Sequence[RowDict]) -> bool:
    """Does `dot_plots` draw the intervals of these rows?"""
    return len(tables.compared(rows)) * len(run.sites) <= 36


class Box(NamedTuple):
    """Values of one model in one panel. group: what it stands with, as an arm; trained: did its training see
    annotations of the class?"""

    group: str
    model: str
    values: Sequence[float]
    trained: bool


class Panel(NamedTuple):
    """Boxes of one class."""

    title: str
    boxes: Sequence[Box]


def site_boxes(run: Run, rows: Sequence[RowDict], split: str) -> Markup:
    """As `box_plots`, apart by site; a star where the site does not annotate the class. "" where no scored case has a class."""
    found = grouped(_with_class(rows), "class", "site", "model")
    panels = []
    for class_ in run.classes:
        boxes = [
            Box(
                site if class_ in run.sites[site].annotated else f"{site} *",
                model,
                [row["value"] for row in found[class_, site, model]],
                run.annotates(model, class_),
            )
            for site in run.sites
            for model in tables.compared(rows)
            if (class_, site, model) in found
        ]
        if boxes:
            panels.append(Panel(run.title(class_), boxes))
    dice = tables.described("dice")
    return distributions(panels, list(run.sites), dice, f"site-boxes-{split}") if panels else Markup("")


def distributions(
    panels: Sequence[Panel], sites: Sequence[str], described: tables.Metric, name: str
) -> Markup:
    """In every panel groups side by side, as arms or sites, each with a box for the global model and one per local model.

    sites: all of the federation, in their order, which gives local models their colours. described: the metric.
    """
    order = {f"local/{site}": place for place, site in enumerate(sites)}
    models = sorted({box.model for panel in panels for box in panel.boxes}, key=lambda m: order.get(m, -1))
    most, step = max(len({box.group for box in panel.boxes}) for panel in panels), 0.84 / len(models)
    columns = max(1, min(3, 48 // (most * len(models)), len(panels)))
    pointed = sum(len(box.values) for panel in panels for box in panel.boxes) <= 4000

    def colour(model: str) -> str:
        return site_colour(order[model]) if model in order else INK

    def panel_of(axis: Axes, panel: Panel) -> None:
        groups = list(dict.fromkeys(box.group for box in panel.boxes))
        for one in panel.boxes:
            who = f"{one.group}, {model_title(one.model)}"
            box(
                axis,
                one.values,
                groups.index(one.group) + (models.index(one.model) - (len(models) - 1) / 2) * step,
                colour(one.model),
                filled=one.trained,
                width=0.8 * step,
                told=[f"{who}: {v:.{described.decimals}f}" for v in one.values] if pointed else [],
            )
        axis.set_title(short(panel.title, 44))
        axis.set_xlim(-0.55, len(groups) - 0.45)
        axis.grid(axis="x", visible=False)
        for border in range(len(groups) - 1):
            axis.axvline(border + 0.5, color=GRID, linewidth=0.7)
        if described.higher_is_better:
            axis.set_ylim(-0.03, 1.03)
        axis.set_xticks(range(len(groups)), [short(group, 16) for group in groups])

    keys = [
        patch_key(
            f"local, {short(model.removeprefix('local/'), 24)}" if model in order else "global",
            facecolor=to_rgba(colour(model), 0.4),
            edgecolor=colour(model),
        )
        for model in models
    ]
    keys.append(patch_key("empty: trained without the class", facecolor="none", edgecolor=MUTED))
    groups = dict.fromkeys(box.group for panel in panels for box in panel.boxes)
    told = f"Box plots of {described.title} by class and model: {', '.join(groups)}"
    return chart(name, told, panels, panel_of, columns=columns, height=1.9, keys=keys, y=described.label)


# ---------------------------------------------------------------------------------------------- all sites together


def _unit_squares(
    run: Run, name: str, told: str, x: str, y: str, panel: Callable[[Axes, str], bool], keys: Sequence[Key],
    together: Mapping[str, Histogram],
) -> Markup:  # fmt: skip
    """One panel per class over the unit square, with its diagonal. panel: draws a class, and says whether there was anything
    to draw."""

    def of_class(axis: Axes, class_: str) -> None:
        axis.plot([0, 1], [0, 1], **_CHANCE, zorder=0.5)
        if not panel(axis, class_):
            said(axis, "not defined" if class_ in together else "never scored")
        axis.set_aspect("equal")
        axis.set_xlim(-0.02, 1.02)
        axis.set_ylim(-0.02, 1.02)
        axis.set_title(short(run.title(class_), 28))

    columns = max(3, columns_of(len(run.classes), 3, 5))
    return chart(
        name, told, run.classes, of_class, columns=columns, height=0.3, keys=keys, x=x, y=y, share=True,
        square=True,
    )  # fmt: skip


def roc_curves(run: Run, split: str, model: str) -> Markup:
    """ROC curves of one model per class: all sites' images together, and every site alone."""
    together = tables.pooled(run, split, model)
    alone: dict[str, dict[str, Histogram]] = {}
    for entry in run.histograms:
        if (entry.split, entry.model) == (split, model):
            alone.setdefault(entry.class_, {})[entry.site] = entry.histogram
    limits = run.thresholds.classes if run.thresholds else {}
    mark = {"color": INK, "marker": "o", "markerfacecolor": PAPER, "markersize": 6, "linestyle": "none"}

    def panel(axis: Axes, class_: str) -> bool:
        def draw(histogram: Histogram, **style: Any) -> bool:
            curve = histogram.roc()
            if curve:
                axis.plot(curve.false_positive_rate, curve.true_positive_rate, **style)
            return bool(curve)

        for site, histogram in alone.get(class_, {}).items():
            style = _site_style(run, site)
            draw(histogram, color=style["color"], linewidth=0.9, linestyle=style["linestyle"])
        whole, limit = together.get(class_), limits.get(class_)
        if whole is None or not draw(whole, color=_colour(run, class_), linewidth=2.4):
            return False
        cut = None if limit is None or limit.value is None else tables.confusion(whole, limit.value)
        if cut is not None:
            sensitivity, specificity, *_ = cut.shares()
            assert sensitivity is not None and specificity is not None, "a curve has both"
            axis.plot(1 - specificity, sensitivity, **mark, markeredgewidth=1.6)
        return True

    there = {site for sites in alone.values() for site in sites}
    keys = [
        line_key("all sites together", color=INK, linewidth=2.4),
        *([line_key("threshold", **mark)] if limits else []),
        line_key("chance", **_CHANCE),
        *_site_keys(run, [site for site in run.sites if site in there], marker="", linewidth=0.9),
    ]
    told = f"ROC curves on {split}, per class"
    return _unit_squares(run, f"roc-{split}", told, "1 − specificity", "sensitivity", panel, keys, together)


def reliability_plots(run: Run, split: str, model: str) -> Markup:
    """Mean score against the share of positives per class and bin, with the share of images in each bin."""
    together = tables.pooled(run, split, model)

    def panel(axis: Axes, class_: str) -> bool:
        colour, whole = _colour(run, class_), together.get(class_)
        bins = whole.reliability(run.bins) if whole and not whole.reason else []
        total = sum(b.n for b in bins)
        for b in bins:
            middle, width = (b.lower + b.upper) / 2, 0.92 * (b.upper - b.lower)
            axis.bar(middle, b.n / total, width=width, color=colour, alpha=0.25, linewidth=0)
        points = [(b.mean_score, b.positive_share) for b in bins if b.n]
        if points:
            axis.plot(*zip(*points, strict=True), color=colour, marker="o", linewidth=1.8)  # type: ignore[arg-type]
        return bool(points)

    keys = [
        line_key("share of positives at the mean score of a bin", color=INK, linewidth=1.8, marker="o"),
        patch_key("share of images in the bin", facecolor=INK, alpha=0.25),
        line_key("perfect", **_CHANCE),
    ]
    told = f"Reliability on {split}, per class"
    return _unit_squares(run, f"reliability-{split}", told, "score", "share", panel, keys, together)
