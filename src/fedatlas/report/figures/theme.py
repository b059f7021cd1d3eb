"""The colours of both themes: figures hold the light ones, which become variables of the page's style sheet.

Class colours are fixed by the position of the class in the label space, site colours and markers by the position of the site;
both are safe for the common colour-vision deficiencies up to eight entries, and every panel is also labelled in words. Curves
of sites carry markers, curves of classes do not.
"""

import re
from collections.abc import Sequence

from markupsafe import Markup

from fedatlas.report.read import Run

# name of the CSS variable -> (on light, on dark). In a figure the light value stands for the variable.
THEME = {
    "paper": ("#ffffff", "#14181f"),
    "ink": ("#1b2128", "#e8ecf1"),
    "muted": ("#57616c", "#a3aebb"),
    "grid": ("#dfe4ea", "#2d3540"),
    "accent": ("#1f5fae", "#7fb4f5"),
    "bad": ("#b3261e", "#ff8a80"),
}
CLASS_COLOURS = (
    ("#0072b2", "#4fa9e6"),
    ("#d55e00", "#ff8f45"),
    ("#00916a", "#2ed3a3"),
    ("#b8558f", "#e79bc6"),
    ("#b07d00", "#edbd3b"),
    ("#3f9bd6", "#93d4ff"),
    ("#7d1f50", "#e2719f"),
    ("#4a3aa0", "#aca0ff"),
    ("#76761c", "#cbc95c"),
    ("#2b8f8a", "#7fe0d3"),
    ("#8a4a1c", "#d9a27b"),
    ("#5a6978", "#b2bfcc"),
)
SITE_COLOURS = (
    ("#3b6fa6", "#7ba9dc"),
    ("#c8475c", "#f58c98"),
    ("#2a8436", "#62c772"),
    ("#a58400", "#dcb945"),
    ("#2596aa", "#68cdea"),
    ("#a43474", "#da7ab2"),
    ("#6a6a6a", "#bababa"),
    ("#7a593a", "#c6a480"),
)
PHASE_COLOURS = (
    ("#2f6db5", "#6ea8ee"),
    ("#93b8e3", "#34557d"),
    ("#8c97a4", "#7d8996"),
    ("#c5ccd4", "#4b5562"),
)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
INK, MUTED, GRID, BAD, PAPER, ACCENT = (
    THEME[name][0] for name in ("ink", "muted", "grid", "bad", "paper", "accent")
)


def stylesheet() -> Markup:
    """The CSS variables of both themes."""

    def block(theme: int) -> str:
        pairs = [(name, colours[theme]) for name, colours in THEME.items()]
        for letter, palette in (("c", CLASS_COLOURS), ("s", SITE_COLOURS), ("p", PHASE_COLOURS)):
            pairs += [(f"{letter}{i}", colours[theme]) for i, colours in enumerate(palette)]
        return "".join(f"--{name}:{value};" for name, value in pairs)

    return Markup(
        f":root{{{block(0)}}}\n@media screen and (prefers-color-scheme:dark){{:root{{{block(1)}}}}}\n"
    )


def class_variable(run: Run, class_: str) -> str:
    """The CSS variable of a class's colour; colours come round again after twelve classes. Of an unknown class the first."""
    if class_ not in run.classes:
        return "c0"
    return f"c{run.classes.index(class_) % len(CLASS_COLOURS)}"


def heat_stylesheet(steps: int = 20) -> Markup:
    """Classes h0 … h20: the cells of heat maps for 0 to 1, with the ink that reads best on each."""
    ends = (((0xF3, 0xF7, 0xFC), (0x0B, 0x4F, 0x9E)), ((0x1B, 0x23, 0x2E), (0x8A, 0xC4, 0xFF)))
    blocks = []
    for low, high in ends:
        rules = []
        for step in range(steps + 1):
            mixed = _mixed(low, high, step / steps)
            ink = max(("#000000", "#ffffff"), key=lambda text, on=mixed: contrast(rgb(text), on))
            rules.append(f".h{step}{{background:{_hex(mixed)};color:{ink}}}")
        blocks.append("".join(rules))
    return Markup(f"{blocks[0]}\n@media screen and (prefers-color-scheme:dark){{{blocks[1]}}}\n")


def contrast(first: Sequence[float], second: Sequence[float]) -> float:
    """The contrast ratio of two sRGB colours (0 to 255) after WCAG 2."""

    def luminance(colour: Sequence[float]) -> float:
        linear = [v / 255 / 12.92 if v <= 10 else ((v / 255 + 0.055) / 1.055) ** 2.4 for v in colour]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


def rgb(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def _mixed(low: Sequence[int], high: Sequence[int], share: float) -> list[int]:
    return [round(a + (b - a) * share) for a, b in zip(low, high, strict=True)]


def _hex(colour: Sequence[int]) -> str:
    return f"#{''.join(f'{value:02x}' for value in colour)}"


SHADES = tuple(_hex(_mixed(rgb(PAPER), rgb(ACCENT), step / 100)) for step in range(101))
"""From the paper's colour to the accent, for maps of values; on the page a mixture of the two in either theme."""

_VARIABLES = {
    **{shade: f"color-mix(in srgb,var(--accent) {step}%,var(--paper))" for step, shade in enumerate(SHADES)},
    **{light: f"var(--{name})" for name, (light, _) in THEME.items()},
    **{
        light: f"var(--{letter}{index})"
        for letter, palette in (("c", CLASS_COLOURS), ("s", SITE_COLOURS), ("p", PHASE_COLOURS))
        for index, (light, _) in enumerate(palette)
    },
}


def in_variables(svg: str) -> str:
    """A figure with the variables of the style sheet in place of the light colours."""
    return re.sub(
        r"(?<=[ ;\"])(fill|stroke): (#[0-9a-f]{6})",
        lambda found: f"{found[1]}: {_VARIABLES.get(found[2], found[2])}",
        svg,
    )


def class_colour(index: int) -> str:
    """Of a class, or of an arm, by its place; colours come round again after twelve."""
    return CLASS_COLOURS[index % len(CLASS_COLOURS)][0]


def site_colour(index: int) -> str:
    """Of a site by its place."""
    return SITE_COLOURS[index % len(SITE_COLOURS)][0]


def model_title(model: str) -> str:
    """A model as a reader calls it: "best" is the global model."""
    return {"best": "global (best)", "last": "global (last)"}.get(model, model)
