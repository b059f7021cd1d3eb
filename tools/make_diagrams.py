"""Draws the diagrams of docs/explanation, and what the pages docs/results-*.md measure, as docs/pictures/*.svg: boxes, arrows, bars and
lines. What is a default of a method is read from its class, what was measured from the tables of these pages, or from the records of
runs; everything else is text.

    .venv/bin/python tools/make_diagrams.py
"""

import re
import tempfile
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from math import ceil, floor
from pathlib import Path

from results_page import OPPONENTS, SETTINGS, above, everything, mean_of

from fedatlas.compare.curves import curves
from fedatlas.compare.plan import load_comparison
from fedatlas.compare.records import restore_runs
from fedatlas.methods.shared.phases import begins
from fedatlas.methods.ufps import UFPS
from fedatlas.report.figures.arms import Curve

OUT = Path(__file__).parents[1] / "docs" / "pictures"
EXPERIMENTS = Path(__file__).parents[1] / "experiments"
INK, MUTED, GRID, PAPER = "#1b2128", "#57616c", "#c3cad2", "#ffffff"
STRIPE = "#f4f6f8"
SITE, SERVER, WIRE, LEFT_OUT = "#dbeafd", "#fdebd0", "#e3f5ec", "#eceff2"
"""What is at a site, at the server, on the way between them; and what takes no part."""


@dataclass
class Drawing:
    """An SVG picture, made line by line. Lengths in pixels, from the upper left corner."""

    width: int
    height: int
    title: str
    lines: list[str] = field(default_factory=list)

    def box(
        self, x: float, y: float, w: float, h: float, *text: str, fill: str = PAPER, bold: bool = False
    ) -> None:
        """A rectangle with lines of text in its middle; the first is bold if there are several, or if asked."""
        self.lines.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="6" fill="{fill}" stroke="{MUTED}"/>'
        )
        for number, line in enumerate(text):
            heavy = bold or (number == 0 and len(text) > 1)
            self.text(x + w / 2, y + h / 2 + 17 * (number - (len(text) - 1) / 2) + 4.5, line, bold=heavy)

    def text(
        self, x: float, y: float, text: str, *, at: str = "middle", colour: str = INK, bold: bool = False
    ) -> None:
        """A line of text whose middle, start or end stands at x, on the base line y."""
        weight = ' font-weight="bold"' if bold else ""
        self.lines.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{at}" fill="{colour}" font-size="13"{weight}>{escape(text)}</text>'
        )

    def arrow(self, *points: tuple[float, float], dashed: bool = False, colour: str = INK) -> None:
        """A line over these points, with a head at the last one."""
        way = " ".join(f"{x:g},{y:g}" for x, y in points)
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.lines.append(
            f'<polyline points="{way}" fill="none" stroke="{colour}" stroke-width="1.6"{dash} marker-end="url(#head)"/>'
        )

    def bar(self, x: float, y: float, w: float, h: float, fill: str, text: str = "") -> None:
        """A rectangle without corners, with a text in its middle."""
        self.lines.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" fill="{fill}" stroke="{MUTED}" stroke-width=".7"/>'
        )
        if text:
            self.text(x + w / 2, y + h / 2 + 4.5, text)

    def svg(self) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" role="img" '
            'font-family="DejaVu Sans, Verdana, sans-serif">'
            f"<title>{escape(self.title)}</title>"
            '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
            f'orient="auto-start-reverse"><path d="M0,0 L10,5 L0,10 z" fill="{INK}"/></marker></defs>'
            f'<rect width="{self.width}" height="{self.height}" fill="{PAPER}"/>'
        )
        return head + "\n" + "\n".join(self.lines) + "\n</svg>\n"


def key(d: Drawing, x: float, y: float, entries: Sequence[tuple[str, str]]) -> None:
    """Colours with their meaning, in a row."""
    for fill, meaning in entries:
        d.bar(x, y - 11, 15, 13, fill)
        d.text(x + 21, y, meaning, at="start", colour=MUTED)
        x += 40 + 7.3 * len(meaning)


def architecture() -> Drawing:
    """One round: what calls what, at the server and at a site."""
    d = Drawing(860, 330, "A round: the method's function at the server asks its own function at every site")
    d.text(150, 24, "server", bold=True)
    d.text(710, 24, "site (one of K)", bold=True)
    d.box(30, 40, 240, 58, "method.round(state, clients)", "the paper's server step", fill=SERVER)
    d.box(30, 150, 240, 58, "clients.call(local_update, …)", "question to every site", fill=SERVER)
    d.box(30, 260, 240, 48, "average(models, weights)", fill=SERVER)
    d.box(330, 150, 200, 58, "engine", "in-process, FLARE, Flower", fill=WIRE)
    d.box(590, 40, 240, 58, "method.local_update(site, …)", "the paper's local training", fill=SITE)
    d.box(590, 150, 240, 58, "egress check, log", "only what is declared leaves", fill=SITE)
    d.box(590, 260, 240, 48, "site.batches: image, target, known", fill=SITE)
    d.arrow((150, 98), (150, 150))
    d.arrow((270, 168), (330, 168))
    d.arrow((530, 168), (560, 168), (560, 69), (590, 69))
    d.arrow((780, 260), (780, 235), (845, 235), (845, 69), (830, 69))
    d.arrow((710, 98), (710, 150))
    d.arrow((590, 192), (530, 192))
    d.arrow((330, 192), (270, 192))
    d.arrow((150, 208), (150, 260))
    d.arrow((30, 284), (12, 284), (12, 69), (30, 69))
    d.text(300, 142, "model", colour=MUTED)
    d.text(300, 224, "replies", colour=MUTED)
    d.text(22, 124, "next State", at="start", colour=MUTED)
    return d


def missing_labels() -> Drawing:
    """The marginal loss: probabilities before and after the merge."""
    names = ["background", "liver", "kidney", "spleen", "pancreas"]
    d = Drawing(860, 250, "The marginal loss adds up the probabilities of what is not annotated")
    d.text(20, 28, "the net's softmax q of a voxel, at a site that annotates liver and spleen", at="start")
    known = {1, 3}
    x = 20
    for c, name in enumerate(names):
        d.bar(x, 42, 160, 34, SITE if c in known else LEFT_OUT, name)
        if c in known:
            d.arrow((x + 80, 76), (x + 80, 150))
        else:
            d.arrow((x + 80, 76), (x + 80, 108), (100, 108), (100, 150), dashed=True)
        x += 164
    d.bar(20, 150, 160, 34, LEFT_OUT, "m₀: the sum")
    d.bar(184, 150, 160, 34, SITE, "m: liver")
    d.bar(512, 150, 160, 34, SITE, "m: spleen")
    d.text(
        20,
        212,
        "Cross-entropy and Dice compare m with the site's labels, whose 0 means “none of mine”.",
        at="start",
    )
    d.text(
        20,
        232,
        "How the grey mass is divided stays open: the exclusion loss, a teacher or the server must say it.",
        at="start",
    )
    return d


def condistfl() -> Drawing:
    """Conditional distillation: what is compared with what."""
    d = Drawing(
        860, 330, "ConDistFL: labels teach the annotated classes, the global model how the rest is divided"
    )
    d.box(20, 130, 130, 60, "batch", "image, labels", fill=SITE)
    d.box(210, 50, 190, 60, "global model", "teacher, as received", fill=SERVER)
    d.box(210, 210, 190, 60, "local model", "in training", fill=SITE)
    d.arrow((150, 150), (180, 150), (180, 80), (210, 80))
    d.arrow((150, 170), (180, 170), (180, 240), (210, 240))
    d.box(460, 50, 170, 60, "softmax over B", "background and U", fill=SERVER)
    d.box(460, 150, 170, 60, "softmax over B", "background and U", fill=SITE)
    d.box(460, 240, 170, 60, "softmax over all", "merged by the labels", fill=SITE)
    d.arrow((400, 80), (460, 80))
    d.arrow((400, 230), (430, 230), (430, 180), (460, 180))
    d.arrow((400, 250), (430, 250), (430, 270), (460, 270))
    d.box(690, 100, 150, 60, "L_ConDist", "Dice, outside of F")
    d.box(690, 240, 150, 60, "L_sup", "marginal loss")
    d.arrow((630, 80), (660, 80), (660, 120), (690, 120))
    d.arrow((630, 180), (660, 180), (660, 140), (690, 140))
    d.arrow((630, 270), (690, 270))
    d.arrow((85, 190), (85, 318), (765, 318), (765, 300), dashed=True)
    d.text(110, 312, "labels of F", at="start", colour=MUTED)
    d.text(
        20,
        24,
        "F: classes that the site annotates; U: the others; B: background and U",
        at="start",
        colour=MUTED,
    )
    return d


def fedmenu() -> Drawing:
    """The two steps of a batch in MENU-Net, at a site that annotates one organ of three."""
    d = Drawing(860, 320, "Fed-MENU: two steps of a batch at a site that annotates the liver")
    organs = ["liver", "kidney", "spleen"]
    d.box(20, 130, 90, 60, "image", fill=SITE)
    for number, organ in enumerate(organs):
        y = 50 + 82 * number
        own = organ == "liver"
        d.box(
            190,
            y,
            190,
            56,
            f"sub-encoder: {organ}",
            "moves" if own else "runs, stays as it came",
            fill=SITE if own else LEFT_OUT,
        )
        d.arrow((110, 160), (150, 160), (150, y + 28), (190, y + 28))
        d.arrow((380, y + 28), (430, y + 28), (430, 100), (480, 100))
    d.box(480, 70, 150, 60, "decoder", "moves", fill=SITE)
    d.box(480, 210, 150, 60, "AGD", "moves", fill=SITE)
    d.arrow((380, 62), (455, 62), (455, 240), (480, 240))
    d.box(690, 70, 150, 60, "S1", "marginal, exclusion")
    d.box(690, 210, 150, 60, "S2", "this organ or not")
    d.arrow((630, 100), (690, 100))
    d.arrow((630, 240), (690, 240))
    d.text(
        20,
        24,
        "Step S1 moves the decoder and the site's sub-encoders, step S2 the AGD and the same sub-encoders.",
        at="start",
        colour=MUTED,
    )
    d.text(
        20,
        306,
        "The AGD (auxiliary generic decoder) sees the sub-encoder of the site's own organ alone, and does not predict.",
        at="start",
        colour=MUTED,
    )
    return d


def ufps() -> Drawing:
    """UFPS over the paper's 500 rounds: when each module is used, by the method's defaults."""
    rounds, left, width = 500, 130, 590
    method = UFPS()
    assert method.ws and method.rce and method.gmt and method.ua and method.sam
    d = Drawing(860, 325, "UFPS: the modules over the rounds, at the default settings")
    rows = [
        ("labels", 0.0, None, SITE, "teachers of all sites"),
        ("ws", method.ws.start, method.ws.end, SITE, "sure samples, then all"),
    ]
    rows += [
        ("rce", method.rce.start, None, SITE, "reverse cross-entropy"),
        ("gmt", method.gmt.start, None, SITE, "global model as teacher"),
    ]
    rows += [
        ("ua", method.ua.start, None, SERVER, "averaging by certainty"),
        ("sam", method.sam.start, None, SITE, "sharpness-aware steps"),
    ]

    def at(round: int) -> float:
        return left + width * round / rounds

    for number, (name, start, end, fill, what) in enumerate(rows):
        y = 42 + 34 * number
        first, last = begins(start, rounds), rounds if end is None else begins(end, rounds)
        d.text(left - 12, y + 18, name, at="end", bold=True)
        d.bar(left, y, width, 26, LEFT_OUT)
        d.bar(at(first), y, at(last) - at(first), 26, fill)
        wide = at(last) - at(first) > 8.2 * len(what)
        d.text(
            (at(first) + at(last)) / 2 if wide else at(last) + 8,
            y + 18,
            what,
            at="middle" if wide else "start",
        )
        d.text(left + width + 10, y + 18, f"from round {max(first, 1)}", at="start", colour=MUTED)
    for round in range(0, rounds + 1, 100):
        d.text(at(round), 266, str(round), colour=MUTED)
    d.text(left + width / 2, 286, f"round, of {rounds}", colour=MUTED)
    key(d, 20, 312, [(SITE, "at the sites"), (SERVER, "at the server")])
    d.text(
        20,
        24,
        "Before round 1 every site trains a teacher on its own labels, and gets those of all others.",
        at="start",
        colour=MUTED,
    )
    return d


def privacy() -> Drawing:
    """What is done to a reply on its way from a site to the server."""
    d = Drawing(860, 330, "A reply on its way from a site to the server")
    d.text(
        20,
        28,
        "privacy, comm and secure are keys of the federation file, off by default.",
        at="start",
        colour=MUTED,
    )
    d.box(20, 80, 160, 60, "method's reply", "model, counts", fill=SITE)
    d.box(230, 80, 160, 60, "privacy", "clipped, with noise", fill=SITE)
    d.box(440, 45, 160, 55, "comm", "change, compressed", fill=SITE)
    d.box(440, 120, 160, 55, "secure", "masked for a sum", fill=SITE)
    d.text(520, 115, "or", colour=MUTED)
    d.box(660, 80, 180, 60, "egress check, log", "declared? then it leaves", fill=SITE)
    d.arrow((180, 110), (230, 110))
    d.arrow((390, 110), (415, 110), (415, 72), (440, 72))
    d.arrow((390, 110), (415, 110), (415, 147), (440, 147))
    d.arrow((600, 72), (630, 72), (630, 110), (660, 110))
    d.arrow((600, 147), (630, 147), (630, 110), (660, 110))
    d.arrow((750, 140), (750, 225))
    d.text(762, 187, "TLS", at="start", colour=MUTED)
    d.box(660, 225, 180, 60, "server's own check", "before it is decoded", fill=SERVER)
    d.box(440, 225, 160, 60, "restored, or summed", "secure: sums alone", fill=SERVER)
    d.box(230, 225, 160, 60, "method.round", "the next model", fill=SERVER)
    d.arrow((660, 255), (600, 255))
    d.arrow((440, 255), (390, 255))
    key(d, 20, 318, [(SITE, "at the site"), (SERVER, "at the server")])
    return d


def gains() -> Drawing:
    """By how much one model of all sites is above other ways to train: a row for each setting of the page's table, and beside each other a
    field for each of the others, all of one scale."""
    page = everything()
    found = [
        {name: above(page, setting.place, setting.ours, other) for name, other in setting.others.items()}
        for setting in SETTINGS
    ]
    unit, gap, row, left, top = 15, 44, 25, 16 + max(7.3 * len(plain(one.asked)) for one in SETTINGS), 116
    bottom = top + row * len(SETTINGS)
    d = Drawing(0, bottom + 58, "One model of all sites, trained by fedatlas, against other ways to train")
    for number, setting in enumerate(SETTINGS):
        y = top + row * (number + 0.5)
        if number % 2:  # a stripe; it is as wide as all fields, which end where d.width will
            d.lines.append(f'<rect x="0" y="{y - row / 2:g}" width="100%" height="{row}" fill="{STRIPE}"/>')
        d.text(left - 12, y + 4.5, plain(setting.asked), at="end")
    x = left + gap / 2
    for name, called in OPPONENTS.items():
        told = [differences.get(name) for differences in found]
        least = min(-1, floor(100 * min(by[1] for by in told if by)))
        most = max(1, ceil(100 * max(by[2] for by in told if by)))
        zero, middle = x - unit * least, x + unit * (most - least) / 2
        head = textwrap.wrap(plain(called), max(12, unit * (most - least) // 8))
        for number, line in enumerate(head):
            d.text(middle, top - 14 - 17 * (len(head) - 1 - number), line, bold=True)
        for points in range(least, most + 1):
            at = zero + unit * points
            d.lines.append(
                f'<line x1="{at:g}" y1="{top}" x2="{at:g}" y2="{bottom}" stroke="{GRID if points else INK}"/>'
            )
            if points % 5 == 0 or (points in (least, most) and 2 <= abs(points) <= 4):
                d.text(at, bottom + 18, f"{points:+d}" if points else "0", colour=MUTED)
        for number, by in enumerate(told):
            if by is None:
                continue
            value, low, high = (100 * unit * one for one in by)
            y = top + row * (number + 0.5)
            d.bar(zero + low, y - 1.5, high - low, 3, INK)
            d.bar(zero + value - 3, y - 6, 6, 12, SERVER)
        x += unit * (most - least) + gap
    d.width = ceil(x)
    d.text(
        (left + x) / 2,
        bottom + 44,
        "fedatlas less the other, mean Dice in points (95 % interval over cases): right of 0 fedatlas is better",
        colour=MUTED,
    )
    return d


def plain(text: str) -> str:
    """A cell of the page without its link and its marks of code."""
    return re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text).replace("`", "")


BUDGETS = ("chest-xray-seg", "chest-xray-seg-long")
"""The same comparison on radiographs with 200 and with 800 local steps: places of tables."""

LINES = {
    "fedatlas": ("fedatlas", "#1b6ca8"),
    "centralized": ("all data in one place", "#1b2128"),
    "kim": ("Kim et al.", "#8a6d1f"),
    "condistfl": ("ConDistFL", "#b3541e"),
    "fedatlas-no-teaching": ("fedatlas without teaching", "#6ba3cf"),
    "fedavg": ("FedAvg", "#4f8f4f"),
    "standalone-mean": ("sites alone, merged by the mean", "#a33b6d"),
    "standalone": ("sites alone, merged, the surest", "#d08bb0"),
    "standalone-better": ("sites alone, merged, the better way", "#a33b6d"),
}
"""Arm, or a line of CASES that has several -> what its line is called, and its colour."""


@dataclass
class Levels:
    """A field of mean Dice, from its lowest to its highest hundredth, between two heights; names stand to the right of it."""

    drawing: Drawing
    left: float
    right: float
    hundredths: range
    top: float = 40
    bottom: float = 370

    def y(self, value: float) -> float:
        low, high = self.hundredths[0] / 100, self.hundredths[-1] / 100
        return self.bottom - (self.bottom - self.top) * (value - low) / (high - low)

    def grid(self) -> None:
        for hundredths in self.hundredths:
            level = self.y(hundredths / 100)
            self.drawing.lines.append(
                f'<line x1="{self.left:g}" y1="{level:g}" x2="{self.right:g}" y2="{level:g}" stroke="{GRID}"/>'
            )
            self.drawing.text(self.left - 92, level + 4.5, f".{hundredths}", colour=MUTED)
        self.drawing.text(self.left - 92, 20, "mean Dice", colour=MUTED)

    def line(self, arm: str, points: Sequence[tuple[float, float]]) -> None:
        """Through these pairs of x, in pixels, and Dice."""
        way = " ".join(f"{x:g},{self.y(value):g}" for x, value in points)
        self.drawing.lines.append(
            f'<polyline points="{way}" fill="none" stroke="{LINES[arm][1]}" stroke-width="2.4"/>'
        )

    def told(self, values: Mapping[str, float], *, named: bool = True) -> None:
        """Every arm's value, from the best to the last a line apart; right of the field with its name, else left of it."""
        at = self.top - 20  # every line keeps its distance
        for arm in sorted(values, key=lambda arm: -values[arm]):
            called, colour = LINES[arm]
            at = max(at + 17, self.y(values[arm]) + 4.5)
            text = f"{values[arm]:.3f}"[1:]
            if named:
                self.drawing.text(self.right + 12, at, f"{text}  {called}", at="start", colour=colour)
            else:
                self.drawing.text(self.left - 12, at, text, at="end", colour=colour)


def budget() -> Drawing:
    """What four times as many local steps do to each way to train, on radiographs with overlapping classes."""
    page = everything()
    d = Drawing(760, 440, "Mean Dice on radiographs after 200 and after 800 local steps")
    field = Levels(d, 150, 430, range(82, 93, 2))
    field.grid()
    arms = [arm for arm in LINES if not arm.startswith("standalone-")]  # by the mean with 800 steps alone
    before, after = ({arm: mean_of(page, place, arm) for arm in arms} for place in BUDGETS)
    field.told(before, named=False)
    field.told(after)
    for arm in arms:
        field.line(arm, [(field.left, before[arm]), (field.right, after[arm])])
    for x, steps in ((field.left, "200 local steps"), (field.right, "800 local steps")):
        d.text(x, field.bottom + 34, steps, colour=MUTED)
    return d


def rounds() -> Drawing:
    """How validation rises over the rounds, from the records of the longer comparison on radiographs."""
    d = Drawing(760, 440, "Mean Dice of the global model on validation cases of radiographs, over the rounds")
    field = Levels(d, 150, 430, range(82, 95, 2))
    field.grid()
    with tempfile.TemporaryDirectory() as runs:
        folder = EXPERIMENTS / "chest-xray-seg"
        comparison = load_comparison([folder / "long.yaml"], profile="long", data=folder, runs=Path(runs))
        restore_runs(comparison, folder / "records")
        found = curves(comparison, {arm: comparison.seeds for arm in comparison.arms})
    means = {
        arm: Curve(
            [list(zip(*seed, strict=True)) for seed in zip(of["rounds"], of["values"], strict=True)], 0
        ).mean()
        for arm, of in found.items()
        if arm in LINES and arm != "standalone"
    }
    numbers = [number for number, _ in means["fedatlas"]]
    first, last = numbers[0], numbers[-1]

    def x(number: int) -> float:
        return field.left + (field.right - field.left) * (number - first) / (last - first)

    for arm, points in means.items():
        field.line(arm, [(x(number), value) for number, value in points])
    field.told({arm: points[-1][1] for arm, points in means.items()})
    for number in numbers:
        d.text(x(number), field.bottom + 22, str(number), colour=MUTED)
    d.text((field.left + field.right) / 2, field.bottom + 44, "rounds of 20 local steps", colour=MUTED)
    return d


CASES = {
    "fedatlas": (
        ("head-neck-few", "fedatlas-2"),
        ("head-neck-few", "fedatlas-4"),
        ("head-neck-few", "fedatlas-8"),
        ("head-neck", "fedatlas"),
    ),
    "standalone-better": (
        ("head-neck-few", "standalone-matched-2"),
        ("head-neck-few", "standalone-matched-mean-4"),
        ("head-neck-few", "standalone-matched-mean-8"),
        ("head-neck", "standalone-matched-mean"),
    ),
    "fedavg": (
        ("head-neck-few", "fedavg-2"),
        ("head-neck-few", "fedavg-4"),
        ("head-neck-few", "fedavg-8"),
        ("head-neck", "fedavg"),
    ),
}
"""Line -> a table's place and its arm, with 2, 4, 8 and all labelled cases at every site. Merged models: the way to merge that is better on
validation cases, which is the surest with two cases and the mean with four and eight; with all, where they do not tell, the mean."""


def cases() -> Drawing:
    """What more labelled cases are worth, on head and neck CT with 800 local steps."""
    page = everything()
    d = Drawing(760, 440, "Mean Dice on head and neck CT over the labelled cases at every site")
    field = Levels(d, 150, 430, range(48, 69, 2))
    field.grid()
    xs = [field.left + (field.right - field.left) * number / 3 for number in range(4)]
    values = {line: [mean_of(page, *one) for one in where] for line, where in CASES.items()}
    for line, means in values.items():
        field.line(line, list(zip(xs, means, strict=True)))
    field.told({line: means[0] for line, means in values.items()}, named=False)
    field.told({line: means[-1] for line, means in values.items()})
    for x, number in zip(xs, ("2", "4", "8", "all: 18 to 27"), strict=True):
        d.text(x, field.bottom + 22, number, colour=MUTED)
    d.text((xs[0] + xs[-1]) / 2, field.bottom + 44, "labelled cases at every site", colour=MUTED)
    return d


DIAGRAMS = (architecture, missing_labels, condistfl, fedmenu, ufps, privacy, gains, budget, rounds, cases)

if __name__ == "__main__":
    for draw in DIAGRAMS:
        (OUT / f"{draw.__name__}.svg").write_text(draw().svg())
