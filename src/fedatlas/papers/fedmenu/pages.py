"""Figures 2 to 4 of the Fed-MENU paper as pages of their own, for a comparison or for one run.

Xu, Deng, Gateno, Yan. Federated multi-organ segmentation with inconsistent labels. IEEE Trans. Med. Imaging, 2023.

Figure 2: the segmentations of one case of every site, with the truth as dashed yellow contours. Figure 3: the same cases as
surfaces in three dimensions, organs that the case's site does not annotate see-through. Figure 4: Grad-CAM of the
sub-encoders.

The cases are the median ones of every site. Pages need the sites' data on this machine once; what the models make of the
cases is kept in the run folders.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fedatlas.compare.overlays import VERSION, Shown, Solids, Subject, keep, median_cases, predicted
from fedatlas.compare.parts import BESIDE, Page, Part, claimed, link, of_volumes, of_voxels
from fedatlas.compare.plan import Comparison
from fedatlas.compare.running import Tell, kept_model
from fedatlas.core.errors import require_object, require_run
from fedatlas.evaluation.statistics import read_rows, select
from fedatlas.federation.file import load_federation
from fedatlas.papers.fedmenu.cams import Cam, cams, explained, has_organs
from fedatlas.report import gallery
from fedatlas.report.figures import CLASS_COLOURS, heated, labelled
from fedatlas.report.meshes import Solid, inline, limits, render, surface
from fedatlas.transport.rounds import read_json
from fedatlas.transport.store import write_atomic

TITLES = {
    2: "segmentations of the same cases",
    3: "segmentations in three dimensions",
    4: "Grad-CAM of the sub-encoders",
}
Pictures = Mapping[str, Mapping[str, Shown]]
"""Site -> arm -> what its model makes of the site's case."""
Problems = Mapping[str, Sequence[str]]
"""Why there is no picture -> of what."""


def write_figures(
    subjects: Sequence[Subject],
    shown: Pictures,
    problems: Problems,
    folder: Path,
    *,
    arms: Sequence[str],
    name: str,
    back: Mapping[str, str],
    prefix: str = "",
    claims: Mapping[int, str] | None = None,
    tell: Tell = lambda text: None,
) -> dict[int, Path]:
    """Writes figure-2.html, figure-3.html and, where an arm's net has sub-encoders, figure-4.html into a folder; returns
    number -> page.

    arms: every one, in order; of those without a subject the page says that they were not run. name: what the pages are
    about. back: links on every page, plain text -> address. claims: number -> what the page repeats of another paper, in
    place of its number in that of Fed-MENU. A page that cannot be made holds why.
    """
    pages = {2: _two(shown, problems, arms, subjects)}
    if any(one.solids for of_site in shown.values() for one in of_site.values()) or not shown:
        pages[3] = _three(shown, problems, arms, subjects)
    if chosen := explained(subjects):
        pages[4] = _four(chosen, shown, problems, tell)
    files = {number: folder / f"{prefix}figure-{number}.html" for number in pages}
    for number, parts in pages.items():
        others = {TITLES[n]: file.name for n, file in files.items() if n != number}
        title = f"{(claims or {}).get(number) or f'Figure {number}'}: {TITLES[number]}, {name}"
        write_atomic(files[number], gallery.page(title, gallery.grid(**parts), {**back, **others}).encode())
    for number in set(TITLES) - set(files):
        (folder / f"{prefix}figure-{number}.html").unlink(missing_ok=True)
    return files


def beside(page: Page) -> dict[int, Path]:
    """Writes the pages beside that of a comparison; returns number -> page, see `write_figures`."""
    comparison, (shown, problems) = page.comparison, page.pictures
    return write_figures(
        page.subjects,
        shown,
        problems,
        page.file.parent,
        arms=comparison.arms,
        name=comparison.name,
        back={"comparison": page.file.name},
        prefix=f"{comparison.name}-" if comparison.shared else "",
        claims={number: claimed(comparison, part) for number, part in BESIDE.items()},
        tell=page.tell,
    )


def _with_subencoders(comparison: Comparison) -> str:
    federations = (next(iter(of.values())) for of in comparison.federations.values())
    return of_voxels(comparison) if any(map(has_organs, federations)) else "no arm has the net menunet"


SURFACES = Part("In three dimensions", of_volumes, partial(link, number=3, told="surfaces of the same cases"))
GRADCAM = Part("Grad-CAM", _with_subencoders, partial(link, number=4, told="Grad-CAM of the sub-encoders"))


def run_figures(path: Path, tell: Tell = lambda text: None) -> dict[int, Path]:
    """The pages of one finished run, in its folder; none where whole images are classified, or before the run ends.
    Raises RunFolderError where it is not a run folder."""
    require_run(path, "run.json", "federation.yaml")
    federation, file = load_federation(path / "federation.yaml"), path / "run.json"
    about = require_object(file, read_json(file))
    if federation.task != "segmentation" or not about.get("finished") or not (path / "rows.csv").exists():
        return {}
    every = read_rows(path / "rows.csv")
    rows = select(every, metric="dice", split="test") or select(every, metric="dice")
    if not rows:
        return {}
    model = kept_model(path, "best" if select(rows, model="best") else "last")
    rows = select(rows, model=model, split=rows[0]["split"])
    subject = Subject(federation.method["name"], path, federation, model, rows[0]["split"], path.parent)
    cases = median_cases([site.name for site in federation.sites], rows)
    shown, problems = predicted([subject], cases, tell)
    return write_figures(
        [subject],
        shown,
        problems,
        path,
        arms=[subject.arm],
        name=federation.name,
        back={"report": "report.html"},
        tell=tell,
    )


def _two(
    shown: Pictures, problems: Problems, arms: Sequence[str], subjects: Sequence[Subject]
) -> dict[str, Any]:
    names = _names(shown)
    colours = {name: f"var(--c{place % len(CLASS_COLOURS)})" for place, name in enumerate(names)}
    firsts = [next(iter(of_site.values())) for of_site in shown.values()]

    def tile(one: Shown, masks: Mapping[str, np.ndarray], told: str, truth: bool = True) -> str:
        around = np.any([*one.truth.values(), np.zeros_like(one.image, dtype=bool)], axis=0)
        outlined = one.truth if truth else None
        return labelled(one.image, masks, colours, one.spacing, around, told, outlined)

    rows = [
        ("image", [tile(one, {}, f"image, {one.case}", truth=False) for one in firsts]),
        ("truth", [tile(one, one.truth, f"truth, {one.case}") for one in firsts]),
    ]
    for arm in arms:
        cells = [
            tile(of_site[arm], of_site[arm].prediction, f"{arm}, {of_site[arm].case}")
            if arm in of_site
            else gallery.none(_why(arm, subjects))
            for of_site in shown.values()
        ]
        rows.append((arm, cells))
    told = [
        "One slice of the median case of every site. The ground truth is superimposed on every segmentation as dashed "
        "yellow lines: of the classes that are annotated in the case for scoring. What else a model marks may be right."
    ]
    return _parts(shown, problems, told, rows, colours)


def _three(
    shown: Pictures, problems: Problems, arms: Sequence[str], subjects: Sequence[Subject]
) -> dict[str, Any]:
    # a picture holds its colours, so that they are the same in both themes
    colours = {name: CLASS_COLOURS[place % len(CLASS_COLOURS)][0] for place, name in enumerate(_names(shown))}
    truths: list[str] = []
    found: dict[str, list[str]] = {arm: [] for arm in arms}
    for site, of_site in shown.items():
        first = next(iter(of_site.values()))
        truth: list[Solid] = []
        if (solids := first.solids) is not None:
            annotated = [name for name in first.annotated() if name in solids.truth]
            truth = _solids(solids.truth, solids, annotated, annotated, colours)
        drawn = {
            arm: _solids(one.solids.prediction, one.solids, colours, one.annotated(), colours)
            for arm, one in of_site.items()
            if one.solids is not None
        }
        every = [solid.mesh for of in (truth, *drawn.values()) for solid in of]
        box = limits(every) if every else None

        def cell(solids: Sequence[Solid], told: str, file: Path, box: Any = box) -> str:
            return (
                gallery.picture(inline(_png(file, solids, box)), told) if solids else gallery.none("nothing")
            )

        files = {one.arm: one.file(site, "solid") for one in subjects}
        of_truth = next(one for one in subjects if one.arm in of_site).file(site, "solid-truth")
        truths.append(cell(truth, f"truth, {site}, from the front", of_truth))
        for arm, cells in found.items():
            if arm in drawn:
                cells.append(cell(drawn[arm], f"{arm}, {site}, from the front", files[arm]))
            else:
                cells.append(gallery.none(_why(arm, subjects) if solids else "one slice only"))
    rows = [("truth", truths), *found.items()]
    told = [
        "The median case of every site, seen from the front (anterior view) and a little from above: the patient's right is "
        "on the left, the head above. All pictures of a case have one scale and one viewpoint.",
        "Opaque: organs that the site annotates in the case. Transparent: segmentations of organs that it does not. The "
        "truth holds annotated organs only. What lies inside an opaque organ, as a lesion, is hidden.",
    ]
    return _parts(shown, problems, told, rows, colours)


def _png(file: Path, solids: Sequence[Solid], box: tuple[np.ndarray, np.ndarray]) -> bytes:
    """`meshes.render`, kept in a file."""
    about = hashlib.sha256(repr((VERSION, [(solid.colour, solid.transparent) for solid in solids])).encode())
    for array in (*box, *(part for solid in solids for part in (solid.mesh.vertices, solid.mesh.faces))):
        about.update(np.ascontiguousarray(array).tobytes())
    key = about.hexdigest()
    if file.exists():
        with np.load(file, allow_pickle=False) as kept:
            if str(kept["about"]) == key:
                return kept["png"].tobytes()
    png = render(solids, box)
    keep(file, {"about": np.array(key), "png": np.frombuffer(png, np.uint8)})
    return png


def _solids(
    masks: Mapping[str, np.ndarray],
    of: Solids,
    chosen: Iterable[str],
    annotated: Sequence[str],
    colours: Mapping[str, str],
) -> list[Solid]:
    found = ((name, surface(masks[name], of.spacing)) for name in chosen if name in masks)
    return [Solid(mesh, colours[name], name not in annotated) for name, mesh in found if mesh is not None]


def _four(subjects: Sequence[Subject], shown: Pictures, problems: Problems, tell: Tell) -> dict[str, Any]:
    found, without = cams(subjects, shown, tell=tell)
    arms = [one.arm for one in subjects if any(one.arm in of for of in found.values())]
    rows = []
    for organ in sorted(found, key=_names(shown).index):
        of = found[organ]
        first = next(iter(of.values()))
        head = gallery.about(organ, f"{first.case}, {first.site}")
        image = heated(
            first.image, np.zeros_like(first.cam), first.truth, first.spacing, f"image, {organ}, {first.case}"
        )
        rows.append((head, [image, *(_cam(of.get(arm), f"{arm}, {organ}") for arm in arms)]))
    told = [
        "Where the sub-encoder of an organ looks: Grad-CAM of the output of its third block (of the last one, where there "
        "are fewer), for the sum of the organ's logits over the voxels that the net predicts to be of it. Dashed yellow: the "
        "ground truth.",
        "Every map is over its own largest value. One window of the size that the net is trained on, around the organ; the "
        "slice with most of it. No colour: the net predicts none of the organ there, or nothing speaks for it.",
    ]
    listed = {**problems, **without}
    return {
        "told": told,
        "columns": ["image", *arms],
        "rows": rows,
        "notes": _notes(listed, bool(found)),
    }


def _cam(cam: Cam | None, told: str) -> str:
    if cam is None:
        return gallery.none("no map")
    return heated(cam.image, cam.cam, cam.truth, cam.spacing, f"{told}, {cam.case}")


def _names(shown: Pictures) -> list[str]:
    """The classes, in the order of the label space."""
    every = [one for of_site in shown.values() for one in of_site.values()]
    return list(dict.fromkeys(name for one in every for name in (*one.prediction, *one.truth)))


def _why(arm: str, subjects: Sequence[Subject]) -> str:
    return "no picture" if any(one.arm == arm for one in subjects) else "not run"


def _parts(
    shown: Pictures,
    problems: Problems,
    told: list[str],
    rows: Sequence[tuple[str, Sequence[str]]],
    colours: Mapping[str, str],
) -> dict[str, Any]:
    firsts = {site: next(iter(of_site.values())) for site, of_site in shown.items()}
    return {
        "told": told,
        "columns": [gallery.about(site, one.case) for site, one in firsts.items()],
        "rows": rows if shown else [],
        "legend": colours,
        "notes": _notes(problems, bool(shown)),
    }


def _notes(problems: Problems, any_picture: bool) -> list[str]:
    notes = [f"No picture of {', '.join(of)}: {why}" for why, of in problems.items()]
    if not any_picture and not notes:
        notes = ["No picture: no case was scored in a finished run."]
    return notes
