"""Draws docs/pictures/ from the finished demo and the bundled scans. No number in a picture is typed by hand.

    make demo
    .venv/bin/python tools/make_pictures.py runs/demo

For the crop of the comparison's page it needs a `chromium` in the PATH; without it that picture is left as it is.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
from scipy import ndimage

from fedatlas.data import samples
from fedatlas.evaluation.statistics import cell_means, read_rows, select
from fedatlas.federation.audit import logs_of

ROOT = Path(__file__).parents[1]
FEDERATED, ALONE = "fedatlas-s0", "standalone-s0"
FINER = 8  # times as many pixels as voxels: outlines are drawn smoothly, the CT is interpolated
WINDOW = (-160.0, 240.0)  # HU, soft tissue
INK, MUTED, GRID, BAD = "#1b2128", "#57616c", "#dfe4ea", "#b3261e"
DOWN, UP = "#1f5fae", "#a65e00"
COLOURS = ("#45a5ff", "#ff8c32", "#2ed3a3", "#ffd92e", "#ff4d4d", "#b78cff", "#ff74c8")  # of organs, on grey
PAGE = 1120  # pixels across of the crop

Masks = Mapping[str, np.ndarray]


class Missing(Exception):
    """Something that a picture is made from is not there."""


def require(runs: Path) -> None:
    """Raises Missing unless the demo is finished in this folder."""
    needed = [
        *(
            f"{FEDERATED}/{name}"
            for name in ("run.json", "rows.csv", "models/best.fa", "sites/a/egress.jsonl")
        ),
        *(f"{ALONE}/{name}" for name in ("run.json", "rows.csv")),
        "comparison.html",
    ]
    gone = [name for name in needed if not (runs / name).exists()]
    if gone:
        raise Missing(
            f"{runs}: not the folder of a finished demo, {', '.join(gone)} missing; run `make demo`"
        )


# ---- what the pictures show -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Slice:
    """An axial slice as a radiologist sees it, the patient's right on the left. image [H, W] in 0..1; own: what the site
    annotated, truth: every contour that there is, answer: the model's; class -> mask [H, W]."""

    site: str
    case: str
    image: np.ndarray
    own: Masks
    truth: Masks
    answer: Masks


def volume(path: Path) -> tuple[np.ndarray, tuple[float, ...]]:
    """[X, Y, Z] with the axes to the right, to the front and up, and the millimetres along them."""
    image = nib.as_closest_canonical(nib.load(path))  # type: ignore[attr-defined]
    return np.asarray(image.dataobj), tuple(float(mm) for mm in image.header.get_zooms()[:3])  # type: ignore[attr-defined]


def upright(plane: np.ndarray, spacing: tuple[float, ...], order: int) -> np.ndarray:
    """[X, Y] -> finer pixels [H, W], equally many per millimetre along both axes."""
    least = min(spacing[:2])
    finer = ndimage.zoom(
        plane.astype(np.float32), [FINER * mm / least for mm in spacing[:2]], order=order, mode="nearest"
    )
    return finer.T[::-1, ::-1]


def masks_of(plane: np.ndarray, table: Mapping[str, int], spacing: tuple[float, ...]) -> Masks:
    return {
        name: upright(plane == number, spacing, 1) > 0.5
        for name, number in table.items()
        if name != "background" and (plane == number).any()
    }


def slice_of(site: str, run: Path, out: Path) -> Slice:
    """Of the site's first test case, by name: of the slices with an organ that the site annotated the one with the most organs;
    of several the one with the most of the site's, then the one whose smallest organ is largest."""
    from fedatlas.federation.predict import predict_scans

    root = samples.path() / f"site-{site}"
    scan = sorted((root / "imagesTs").glob("*.nii.gz"))[0]
    case = scan.name.removesuffix("_0000.nii.gz")
    found = predict_scans(run, [[scan]], out / site)
    image, spacing = volume(scan)
    own, _ = volume(root / "labelsTs" / f"{case}.nii.gz")
    truth, _ = volume(root / "labelsTs_all" / f"{case}.nii.gz")
    answer, _ = volume(Path(found["scans"][0]["labels"]))
    own_table = json.loads((root / "dataset.json").read_text())["labels"]
    table = json.loads((root / "all_labels.json").read_text())["labels"]

    def worth(z: int) -> tuple[bool, int, int, int]:
        sizes = [int((truth[:, :, z] == table[name]).sum()) for name in table if name != "background"]
        there = [size for size in sizes if size > 3]
        mine = [
            name for name in own_table if name != "background" and (own[:, :, z] == own_table[name]).sum() > 3
        ]
        return bool(mine), len(there), len(mine), min(there, default=0)

    z = max(range(image.shape[2]), key=worth)
    low, high = WINDOW
    grey = np.clip((upright(image[:, :, z], spacing, 3) - low) / (high - low), 0, 1)
    classes = {name: int(number) for number, name in found["classes"].items()}
    found_masks = (masks_of(own[:, :, z], own_table, spacing), masks_of(truth[:, :, z], table, spacing))
    return cut(Slice(site, case, grey, *found_masks, masks_of(answer[:, :, z], classes, spacing)))


def dice_cells(runs: Path, arm: str, model: str) -> dict[tuple[str, str], float | None]:
    """(site, class) -> mean Dice over its test cases."""
    rows = read_rows(runs / arm / "rows.csv")
    return cell_means(select(rows, split="test", metric="dice", model=model))


def traffic(run: Path) -> dict[str, Any]:
    """What a run sent: by site and kind of message how many and how many bytes, from the sites' own logs, and the bytes
    that each got in training."""
    up: dict[str, dict[str, list[int]]] = {}
    for site, entries in logs_of(run).items():
        kinds = up.setdefault(site, {"models": [0, 0], "scores": [0, 0]})
        for entry in entries:
            of_kind = kinds[
                "models" if any("[" in form for form in entry.get("contents", {}).values()) else "scores"
            ]
            of_kind[0] += 1
            of_kind[1] += entry["bytes"]
    down = dict.fromkeys(up, 0)
    for log in sorted(run.glob("rounds/*/log.json")):
        for site, cost in json.loads(log.read_text())["cost"].items():
            down[site] += cost["bytes_down"]
    return {"up": up, "down": down}


# ---- drawing --------------------------------------------------------------------------------------------------------


def plain(name: str) -> str:
    return name.replace("_", " ")


def style() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update(
        {"font.family": ["DejaVu Sans"], "font.size": 10, "text.color": INK, "axes.labelcolor": INK}
        | {"axes.edgecolor": GRID, "xtick.color": MUTED, "ytick.color": INK, "figure.facecolor": "white"}
    )
    import matplotlib.pyplot as plt

    return plt


def save(figure: Any, path: Path, colours: Iterable[str] = ()) -> None:
    from PIL import Image

    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "raw.png"
        figure.savefig(raw, dpi=106 if colours else 120, facecolor="white")
        shrink(Image.open(raw), path, colours)


def shrink(image: Any, path: Path, colours: Iterable[str] = ()) -> None:
    """A PNG of at most 256 colours, which is a third of the size. colours: that lie over grey; the palette then holds greys
    and each of these over them, as greys alone would take it all."""
    from matplotlib.colors import to_rgb
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    palette = None
    if colours:
        triples = [(grey, grey, grey) for grey in (*np.linspace(0, 0.95, 48), 1)]  # white stays white
        for colour in map(np.array, map(to_rgb, colours)):
            triples += [tuple(0.5 * colour + 0.5 * grey) for grey in np.linspace(0, 1, 17)]
            triples += [tuple(share * colour + (1 - share)) for share in (0.25, 0.75)]
            triples += [tuple(share * colour) for share in (0.25, 0.5, 0.75, 1)]
        palette = Image.new("P", (1, 1))
        palette.putpalette([round(255 * value) for triple in triples[:256] for value in triple])
    image.convert("RGB").quantize(256, palette=palette, dither=0).save(path, optimize=True)


def paint(axes: Any, image: np.ndarray, masks: Masks, colours: Mapping[str, str]) -> None:
    from matplotlib.colors import to_rgb

    axes.imshow(image, cmap="gray", vmin=0, vmax=1, interpolation="bilinear")
    for name, mask in masks.items():
        layer = np.zeros((*mask.shape, 4))
        layer[mask] = (*to_rgb(colours[name]), 0.5)
        axes.imshow(layer, interpolation="nearest")
        axes.contour(mask, levels=[0.5], colors=[colours[name]], linewidths=1.6)
    bare(axes)


def bare(axes: Any) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    for side in axes.spines.values():
        side.set_visible(False)


def legend(figure: Any, names: Iterable[str], colours: Mapping[str, str], **place: Any) -> None:
    from matplotlib.patches import Patch

    keys = [Patch(facecolor=colours[name], label=plain(name)) for name in names]
    figure.legend(handles=keys, frameon=False, handlelength=1, handleheight=1, **place)


def around(image: np.ndarray) -> tuple[slice, slice]:
    """The square that holds the patient."""
    there = ndimage.binary_opening(image > 0.05, iterations=FINER // 2)
    ends = []
    for axis in (1, 0):
        found = np.flatnonzero(there.any(axis))
        ends.append((int(found[0]), int(found[-1]) + 1))
    side = min(max(high - low for low, high in ends) + 2 * FINER, *image.shape)
    starts = [
        min(max((low + high - side) // 2, 0), size - side)
        for (low, high), size in zip(ends, image.shape, strict=True)
    ]
    return slice(starts[0], starts[0] + side), slice(starts[1], starts[1] + side)


def cut(one: Slice) -> Slice:
    part = around(one.image)

    def of(masks: Masks) -> Masks:
        return {name: mask[part] for name, mask in masks.items()}

    return Slice(one.site, one.case, one.image[part], of(one.own), of(one.truth), of(one.answer))


def sites_picture(
    slices: list[Slice], annotated: Mapping[str, list[str]], colours: Mapping[str, str], path: Path
) -> None:
    """A column per site; what it annotated, all contours, the federated model's answer."""
    plt = style()
    titles = ("annotated\nat the site", "all contours\n(only scored)", "answer of the\nfederated model")
    figure, grid = plt.subplots(3, len(slices), figsize=(9.4, 7.25), squeeze=False)
    for column, one in enumerate(slices):
        for row, masks in enumerate((one.own, one.truth, one.answer)):
            paint(grid[row][column], one.image, masks, colours)
        names = " and\n".join(plain(name) for name in annotated[one.site])
        grid[0][column].set_title(f"site {one.site}", fontsize=12, fontweight="bold", pad=34)
        grid[0][column].text(
            0.5,
            1.03,
            names,
            transform=grid[0][column].transAxes,
            ha="center",
            va="bottom",
            fontsize=9.5,
            color=MUTED,
        )
    for row, title in enumerate(titles):
        grid[row][0].text(
            -0.06, 0.5, title, transform=grid[row][0].transAxes, ha="right", va="center", fontsize=10
        )
    legend(figure, colours, colours, loc="lower center", ncols=len(colours), fontsize=9, columnspacing=1.1)
    figure.subplots_adjust(left=0.145, right=0.995, top=0.885, bottom=0.05, wspace=0.03, hspace=0.04)
    save(figure, path, colours.values())
    plt.close(figure)


def losses_picture(one: Slice, colours: Mapping[str, str], path: Path) -> None:
    """What one site's labels say, what an ordinary loss makes of it, and what a marginal loss makes of it."""
    plt = style()
    from matplotlib.patches import Patch

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(9.4, 3.75))
    inside = one.image > 0.02
    inside = ndimage.binary_fill_holes(ndimage.binary_opening(inside, iterations=4))
    known = np.any([*one.own.values()], axis=0)
    paint(left, one.image, one.own, colours)
    left.set_title(f"what site {one.site} annotated", fontsize=11)

    wrong = {name: mask & ~known for name, mask in one.truth.items() if name not in one.own}
    paint(middle, one.image, one.own, colours)
    tint = np.zeros((*known.shape, 4))
    tint[inside & ~known] = (0.35, 0.65, 1.0, 0.30)
    middle.imshow(tint, interpolation="nearest")
    for mask in wrong.values():
        layer = np.zeros((*mask.shape, 4))
        layer[mask] = (0.85, 0.1, 0.1, 0.6)
        middle.imshow(layer, interpolation="nearest")
    middle.set_title("what an ordinary loss is taught", fontsize=11)

    paint(right, one.image, one.own, colours)
    hatch = np.zeros((*known.shape, 4))
    rows, columns = np.indices(known.shape)
    stripes = (rows + columns) % 14 < 3
    hatch[inside & ~known & stripes] = (1, 1, 1, 0.55)
    right.imshow(hatch, interpolation="nearest")
    right.set_title("what the marginal loss is taught", fontsize=11)

    keys = [Patch(facecolor=colours[name], label=plain(name)) for name in colours if name in one.own]
    keys += [
        Patch(facecolor="#5aa6ff80", label="“background”"),
        Patch(facecolor="#d91a1a99", label="organs, taught as absent"),
        Patch(
            facecolor="#777777",
            edgecolor="white",
            hatch="///",
            label="none of the annotated organs, else no opinion",
        ),
    ]
    figure.legend(
        handles=keys, loc="lower center", ncols=len(keys), frameon=False, fontsize=8.2, columnspacing=1.2
    )
    figure.subplots_adjust(left=0.01, right=0.99, top=0.92, bottom=0.1, wspace=0.03)
    save(figure, path)
    plt.close(figure)


def dice_picture(runs: Path, info: Mapping[str, Any], names: list[str], path: Path) -> None:
    """Dice per organ and site: each site alone, and the one federated model."""
    plt = style()
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    together, merged = dice_cells(runs, FEDERATED, "best"), dice_cells(runs, ALONE, "best")
    sites = list(info["sites"])
    figure, panels = plt.subplots(1, len(sites), figsize=(9.4, 4.3), sharey=True)
    for panel, site in zip(panels, sites, strict=True):
        own = info["sites"][site]["annotated"]
        alone = dice_cells(runs, ALONE, f"local/{site}")
        for row, name in enumerate(names):
            if name in own:
                panel.axhspan(row - 0.46, row + 0.46, color="#eef3f9", zorder=0)
            here, there = together.get((site, name)), alone.get((site, name)) if name in own else None
            if here is None:
                continue
            if there is not None:
                panel.plot([there, here], [row, row], color="#9aa5b1", lw=2, zorder=1)
                panel.plot(there, row, "o", mfc="white", mec=UP, mew=2, ms=10.5, zorder=2)
            elif name not in own:
                panel.plot(0, row, "x", color=UP, ms=6, mew=1.6, zorder=2)
            if merged.get((site, name)) is not None:
                panel.plot(merged[site, name], row, "|", color="#333333", ms=13, mew=1.8, zorder=4)
            panel.plot(here, row, "o", color=DOWN, ms=6, zorder=3)
        panel.set_title(f"cases of site {site}", fontsize=11)
        panel.set_xlim(-0.05, 1)
        panel.set_xticks([0, 0.5, 1], ["0", "0.5", "1"])
        panel.set_ylim(len(names) - 0.5, -0.5)
        panel.grid(axis="x", color=GRID, lw=0.8)
        panel.tick_params(length=0)
        panel.set_axisbelow(True)
        for side in panel.spines.values():
            side.set_visible(False)
    panels[0].set_yticks(range(len(names)), [plain(name) for name in names])
    keys = [
        Line2D([], [], ls="", marker="o", color=DOWN, ms=6, label="one federated model"),
        Line2D([], [], ls="", marker="o", mfc="white", mec=UP, mew=2, ms=9, label="the site's own model"),
        Line2D([], [], ls="", marker="x", color=UP, ms=6, mew=1.6, label="which does not know the organ"),
        Line2D(
            [], [], ls="", marker="|", color="#333333", ms=12, mew=1.8, label="all sites' own models, merged"
        ),
        Patch(facecolor="#e3ebf5", label="annotated at the site"),
    ]
    figure.legend(
        handles=keys,
        loc="lower center",
        ncols=5,
        frameon=False,
        fontsize=8.2,
        columnspacing=1.1,
        handletextpad=0.3,
    )
    cases = sum(site["cases"]["test"] for site in info["sites"].values())
    figure.supxlabel(f"Dice, mean over the test cases of the site ({cases} cases in all, seed {info['seed']})", fontsize=9.5, y=0.085)  # fmt: skip
    figure.subplots_adjust(left=0.12, right=0.985, top=0.93, bottom=0.2, wspace=0.07)
    save(figure, path)
    plt.close(figure)


def kilobytes(count: int) -> str:
    return f"{count / 1e6:.2f} MB" if count >= 1e6 else f"{count / 1e3:.0f} kB"


def travels_picture(run: Path, info: Mapping[str, Any], path: Path) -> None:
    """The sites, the server and what goes between them, with the bytes of this run. SVG, text stays text."""
    found = traffic(run)
    sites = list(info["sites"])
    width, left, box = 940, 20, 215
    step = (width - 2 * left - box) / (len(sites) - 1)
    parts: list[str] = []

    def text(x: float, y: float, words: str, size: float = 13, *, fill: str = INK, weight: str = "normal", anchor: str = "middle") -> None:  # fmt: skip
        parts.append(
            f'<text x="{x:.0f}" y="{y:.0f}" font-size="{size}" fill="{fill}" font-weight="{weight}" '
            f'text-anchor="{anchor}">{escape(words)}</text>'
        )

    def rect(x: float, y: float, w: float, h: float, fill: str, stroke: str) -> None:
        parts.append(
            f'<rect x="{x:.0f}" y="{y:.0f}" width="{w:.0f}" height="{h:.0f}" rx="8" fill="{fill}" stroke="{stroke}"/>'
        )

    parts.append(f'<rect width="{width}" height="452" fill="white"/>')
    rect(width / 2 - 290, 16, 580, 82, "#eef3f9", DOWN)
    text(width / 2, 41, "server", 16, weight="bold")
    text(
        width / 2,
        62,
        f"averages the models, {info['rounds']} rounds; chooses the best round by validation scores",
    )
    text(
        width / 2,
        83,
        f"one model: {info['n_parameters']:,} numbers, {kilobytes(info['model_bytes'])}",
        fill=MUTED,
    )
    for place, site in enumerate(sites):
        about, up, down = info["sites"][site], found["up"][site], found["down"][site]
        x = left + place * step
        middle = x + box / 2
        foot = width / 2 + (place - (len(sites) - 1) / 2) * 140
        for shift, mark in ((-7, "down"), (7, "up")):
            head, tail = (100, 184) if mark == "up" else (184, 100)
            ends = {100: foot + shift, 184: middle + shift}
            colour = DOWN if mark == "down" else UP
            parts.append(
                f'<line x1="{ends[tail]:.0f}" y1="{tail}" x2="{ends[head]:.0f}" y2="{head}" stroke="{colour}" '
                f'stroke-width="2" marker-end="url(#{mark})"/>'
            )
        (models, model_bytes), (scores, score_bytes) = up["models"], up["scores"]
        text(middle, 204, f"↓ {info['rounds']} models, {kilobytes(down)}", 12, fill=DOWN)
        text(middle, 219, f"↑ {models} models, {kilobytes(model_bytes)}", 12, fill=UP)
        text(middle, 234, f"↑ {scores} lists of scores, {kilobytes(score_bytes)}", 12, fill=UP)
        rect(x, 246, box, 112, "#faf7f1", "#c9b58f")
        text(middle, 270, f"site {site}", 16, weight="bold")
        text(middle, 291, " and ".join(plain(name) for name in about["annotated"]), 12.5)
        cases = about["cases"]
        text(middle, 314, f"{cases['train']} scans train,", 12.5, fill=MUTED)
        text(middle, 331, f"{cases['validation']} validate, {cases['test']} test", 12.5, fill=MUTED)
        text(middle, 349, "images and label maps stay here", 12, fill=BAD)
    text(left, 386, "Leaves a site:", 13, weight="bold", anchor="start")
    text(left + 130, 386, "the weights, the number of training cases, means such as the loss, seconds and memory;", anchor="start")  # fmt: skip
    text(left + 130, 404, "when it joins, names of classes, counts per class, ranges of spacing and intensity; scores per case.", anchor="start")  # fmt: skip
    text(left, 430, "Never leaves:", 13, weight="bold", fill=BAD, anchor="start")
    text(
        left + 130, 430, "images, label maps, predictions, pictures of cases, paths of files.", anchor="start"
    )
    marks = "".join(
        f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0 8 4 0 8z" fill="{colour}"/></marker>'
        for name, colour in (("down", DOWN), ("up", UP))
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} 452" font-family="DejaVu Sans, Verdana, sans-serif">'
        f"<defs>{marks}</defs>\n" + "\n".join(parts) + "\n</svg>\n"
    )


def page_picture(runs: Path, path: Path, height: int) -> bool:
    """The top of the comparison's page, as a browser shows it; False where there is no chromium."""
    browser = shutil.which("chromium")
    if not browser:
        return False
    from PIL import Image

    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "page.png"
        subprocess.run(
            [
                *(browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
                *(
                    f"--screenshot={raw}",
                    f"--user-data-dir={folder}/profile",
                    f"--window-size={PAGE},{height}",
                ),
                (runs / "comparison.html").resolve().as_uri(),
            ],
            check=True,
            capture_output=True,
            timeout=120,
        )
        shrink(Image.open(raw), path)
    return True


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("runs", type=Path, help="the folder of the demo's runs, runs/demo")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "pictures")
    parser.add_argument("--height", type=int, default=600, help="of the crop of the page, in pixels")
    given = parser.parse_args(arguments)
    try:
        require(given.runs)
    except Missing as error:
        print(error, file=sys.stderr)
        return 1
    run = given.runs / FEDERATED
    info = json.loads((run / "run.json").read_text())
    names = [name for name in info["labels"]["names"] if name != "background"]
    colours = dict(zip(names, COLOURS, strict=True))
    annotated = {site: about["annotated"] for site, about in info["sites"].items()}
    with tempfile.TemporaryDirectory() as folder:
        slices = [slice_of(site, run, Path(folder)) for site in info["sites"]]
    sites_picture(slices, annotated, colours, given.out / "sites.png")
    most = max(slices, key=lambda one: (len(one.own), len(one.truth) - len(one.own)))
    losses_picture(most, colours, given.out / "losses.png")
    dice_picture(given.runs, info, names, given.out / "dice.png")
    travels_picture(run, info, given.out / "travels.svg")
    if not page_picture(given.runs, given.out / "comparison.png", given.height):
        print("no chromium here: comparison.png is left as it was", file=sys.stderr)
    for file in sorted(given.out.iterdir()):
        print(f"{file}  {file.stat().st_size / 1000:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
