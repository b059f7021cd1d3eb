"""What the files of experiments/ claim of their papers, and that the pages show it."""

from collections.abc import Iterable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_results import fake_runs
from test_compare_tables import menu

from fedatlas.compare import Comparison, collect, load_comparison, write_page
from fedatlas.compare.parts import BESIDE, PARTS, Page, claimed, unmet
from fedatlas.core.errors import FederationError
from fedatlas.federation.yaml import read_yaml

EXPERIMENTS = Path(__file__).parents[1] / "experiments"
PAPERS = {"condistfl": "ConDistFL", "fedmenu": "Fed-MENU", "fedpsl": "FedPSL", "ufps": "UFPS"}
COMPARISONS = sorted(file for file in EXPERIMENTS.rglob("*.yaml") if "arms" in read_yaml(file))
CLAIMING = [file for file in COMPARISONS if "claims" in read_yaml(file)]
FIGURES = {
    "condistfl": {3, 4, 5, 6},
    "fedmenu": {2, 3, 4, 5},
    "fedpsl": {3, 4},
    "ufps": {2, 4, 5, 6, "7A", "7B", "7C", "7D", "8A", "8B", 9, 10, 11, 12, "S1", "S2", "S3", "S4", "S5"},
}
TABLES = {
    "condistfl": {4, 5, 6, 7, 8, 9},
    "fedmenu": {"II", "III", "IV", "V", "VI", "VII"},
    "fedpsl": {"II", "IV", "V"},
    "ufps": {2, 3, 4, *(f"S{n}" for n in range(2, 14))},
}


def _name(file: Path) -> str:
    return f"{file.parent.name}-{file.stem}"


@pytest.mark.parametrize("folder", PAPERS)
def test_the_plans_of_a_paper_have_what_they_claim(folder: str, tmp_path: Path) -> None:
    """Every claim is of parts that the page of its plan draws."""
    found: list[str] = []
    for file in (file for file in CLAIMING if file.parent.name == folder):
        comparison = load_comparison([file], profile="full", runs=tmp_path)
        assert comparison.paper == PAPERS[folder] and unmet(comparison) == {}
        for name, parts in comparison.claims.items():
            assert parts and not any(PARTS[part].lacks(comparison) for part in parts), (file, name)
        found += comparison.claims
    asked = [f"Figure {n}" for n in FIGURES[folder]] + [f"Table {n}" for n in TABLES[folder]]
    assert sorted(found) == sorted(asked), "each of them once"


def test_files_without_a_paper_claim_nothing() -> None:
    assert {file.parent.name for file in CLAIMING} == set(PAPERS)


# ------------------------------------------------------------------------------------------------------------ refusals


def test_a_claim_that_the_page_would_not_show_is_refused(tmp_path: Path) -> None:
    def refused(match: str, **changes: Any) -> None:
        with pytest.raises(FederationError, match=match):
            menu(tmp_path, **{"paper": "P", **changes})

    refused("'Fig. 5' names no table or figure; expected", claims={"Fig. 5": ["means"]})
    refused("'Table 2b' names no table or figure", claims={"Table 2b": ["means"]})
    refused("the part 'radar' does not exist.*known: means,", claims={"Figure 5": ["radar"]})
    refused("of which paper Table 2 is, is missing", paper=None, claims={"Table 2": ["means"]})
    refused("Figure 5 of P would not be on the page: .*layout.radar", claims={"Figure 5": ["radar-sites"]})
    refused("no arm has the net menunet", claims={"Figure 4": ["gradcam"]})
    refused("no two arms differ", claims={"Figure 4": ["sweeps"]})
    refused("no arm has the method ufps with ws", claims={"Figure S1": ["schedules"]})
    refused("ufps with gmt", claims={"Figure S4": ["pseudo-labels"]})
    refused("ufps with sam.gradients", claims={"Figure 4": ["gradients"]})
    refused("analyses names no arm for hessian", claims={"Figure 10": ["hessian"]})
    refused(
        "no arm has local",
        claims={"Figure 3": ["forgetting"]},
        arms={"unet": {"evaluation.models": ["best"]}},
    )
    refused("validated in two rounds", claims={"Figure 2": ["curves"]}, arms={"unet": {"rounds": 1}})
    few = {"columns": "class", "radar": "values"}
    refused(
        "and there are 2 sites",
        claims={"Figure 5": ["radar-sites"]},
        layout=few,
        measure={"sites": ["c1", "c5"]},
    )
    refused("the analysis 'hessians' does not exist", analyses={"hessians": ["unet"]})
    refused("the arm 'none' does not exist", analyses={"hessian": ["none"]})


def test_a_smaller_profile_says_what_it_lacks(tmp_path: Path) -> None:
    arms = {"a-1": {"rounds": 2}, "a-2": {"rounds": 4}}
    profiles = {"full": {}, "smoke": {"arms": {"a-1": {"rounds": 2}, "a-2": {"rounds": 2}}}}
    told = {"paper": "P", "claims": {"Figure 5": ["sweeps"], "Table 1": ["means"]}, "profiles": profiles}
    with pytest.raises(FederationError, match="profile"):
        menu(tmp_path, arms=arms, **told)
    file = tmp_path / "menu.yaml"
    assert unmet(load_comparison([file], profile="full")) == {}
    smoke = load_comparison([file], profile="smoke", runs=tmp_path)
    page = write_page(smoke, collect(smoke)).read_text()
    assert "Without Figure 5: sweeps: sweeps is over rounds, in which alone no two arms differ" in page
    assert "After P: Table 1" in page


# --------------------------------------------------------------------------------------------------------------- pages


class Nesting(HTMLParser):
    """Checks that tags nest, and that no identifier is there twice."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.ids: list[str] = []
        self.feed(text)
        self.close()
        assert self.stack == [] and len(self.ids) == len(set(self.ids))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag not in ("meta", "br", "img"):
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.ids += [value or "" for name, value in attrs if name == "id"]

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag


def check_page(comparison: Comparison, claims: Iterable[str]) -> None:
    """The page made from the runs has each claim's parts, with something drawn under its name."""
    page = write_page(comparison, collect(comparison))
    text = page.read_text()
    Nesting(text)
    for claim in claims:
        for part in comparison.claims[claim]:
            section = text.partition(f'<section id="{part}">')[2].partition("</section>")[0]
            assert claim in section.partition("</p>" if PARTS[part].draw is None else "</h2>")[0], (
                claim,
                part,
            )
            assert "Nothing to show" not in section and "Not there yet" not in section, (claim, part)
            assert any(mark in section for mark in ("<svg", "<table", "<a href")), (claim, part)
            assert 'class="none"' not in section, (claim, part)
            number = next((n for n, name in BESIDE.items() if name == part), None)
            if number is not None:
                (beside,) = page.parent.glob(f"*figure-{number}.html")
                drawn = beside.read_text()
                assert beside.name in section and f"<h1>{claimed(comparison, part)}: " in drawn
                assert "<svg" in drawn or 'class="solid"' in drawn
                assert "No picture" not in drawn and 'class="none"' not in drawn


def everything(folder: Path) -> Comparison:
    """A plan that asks for all parts, each as a figure of its own."""
    base = {
        "name": "small",
        "labels": {"names": ["background", "liver", "kidney", "spleen"]},
        "sites": [{"name": name, "path": name} for name in ("a", "b", "c")],
        "preprocessing": {"spacing": [4, 4, 4], "window": [-100, 200], "patch": [16, 16], "context": 1},
        "net": {"name": "menunet", "width": 2, "levels": 2},
        "method": {"name": "ufps", "sam": {"gradients": True}, "ua": None},
        "evaluation": {"models": ["best", "local"]},
    }
    file = {
        "name": "small",
        "base": "base.yaml",
        "arms": {f"ufps-{rounds}": {"rounds": rounds} for rounds in (2, 4)},
        "layout": {"columns": "site-class", "radar": "normalised", "dots": True},
        "analyses": {kind: ["ufps-2", "ufps-4"] for kind in ("landscape", "hessian", "cka", "membership")},
        "paper": "P",
        "claims": {f"Figure {n}": [part] for n, part in enumerate(PARTS, 1)},
    }
    (folder / "base.yaml").write_text(yaml.safe_dump(base))
    (folder / "small.yaml").write_text(yaml.safe_dump(file, sort_keys=False))
    return load_comparison([folder / "small.yaml"], runs=folder / "runs")


def test_a_page_shows_every_part_under_its_name(tmp_path: Path) -> None:
    comparison = everything(tmp_path)
    empty = write_page(comparison, collect(comparison)).read_text()
    figures = [name for name, part in PARTS.items() if part.draw is not None]
    assert empty.count("Nothing to show yet") == len(figures) - 1, "only the schedules need no run"
    fake_runs(comparison)
    check_page(comparison, comparison.claims)
    text = (comparison.folder / "comparison.html").read_text()
    for told in (
        "agreed 84%: the intersection",
        "ufps-2, global (best)",
        "tail_shift: ufps-2, ufps-4",
        "share with r &gt; 0",
    ):
        assert told in text, told
    assert "fedatlas analyse" not in text
    (comparison.path("ufps-4", 0) / "analysis" / "hessian.json").unlink()
    draw = PARTS["hessian"].draw
    assert draw is not None
    again = draw(Page(comparison, collect(comparison), tmp_path / "page.html"))
    assert f"<code>fedatlas analyse hessian {comparison.path('ufps-4', 0)}</code>" in again
    assert "ufps-2, global (best)" in again and "ufps-4, global (best)" not in again


@pytest.mark.slow
@pytest.mark.parametrize("file", CLAIMING, ids=_name)
def test_pages_from_tiny_results_show_what_is_claimed(file: Path, tmp_path: Path) -> None:
    comparison = load_comparison([file], profile="full", runs=tmp_path, seeds=1)
    fake_runs(comparison)
    check_page(comparison, comparison.claims)
