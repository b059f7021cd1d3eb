"""The documentation is true: generated pages are current, links lead somewhere, the example method works."""

import dataclasses
import re
import runpy
import shutil
import sys
import types
from importlib import metadata
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from runs import last_state
from set_cases import scan as write_scan

from fedatlas import methods, nets
from fedatlas.compare.plan import ComparisonFile, Layout, Measure, load_comparison
from fedatlas.core.tensors import head_of, parts
from fedatlas.federation.file import load_federation, parse_federation
from fedatlas.phantoms.organs import write_phantom
from fedatlas.transport import wire

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("experiments/**/*.md")])
LINK = re.compile(r"\]\(([^)#]*)(?:#([^)]*))?\)")


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "tools" / "make_reference.py"))


def test_what_the_command_line_knows_is_current(reference) -> None:
    pinned = re.search(r"^pydantic==(.*)$", (ROOT / "constraints.txt").read_text(), re.M)
    if (here := metadata.version("pydantic")) != pinned[1]:  # type: ignore[index]
        pytest.skip(f"pydantic {here} may write the same schema in other words than the pinned one")
    assert reference["KNOWN"].read_text() == reference["known"](), "run `make reference`"


@pytest.mark.parametrize("name", ["federation_file", "registered"])
def test_pages_of_the_reference_hold_together(reference, name) -> None:
    page = reference[name]()
    anchors = _anchors(page)
    for target, anchor in LINK.findall(page):
        assert (ROOT / "docs" / "reference" / target).exists() if target else anchor in anchors, anchor


def test_the_methods_of_the_readme_are_for_the_tasks_that_it_ticks() -> None:
    part = (ROOT / "README.md").read_text().partition("### Methods")[2].partition("\n## ")[0]
    told: dict[str, list[str]] = {}
    for line in part.splitlines():
        if line.startswith("| ") and "`" in line:
            names, *ticks = line.strip("|").split("|")[:3]
            both = zip(("segmentation", "classification"), ticks, strict=True)
            tasks = [task for task, tick in both if "✓" in tick]
            told |= dict.fromkeys(re.findall(r"`(\w+)`", names), tasks)
    assert told == {name: list(methods.get(name).tasks) for name in methods.REGISTRY}


def test_every_key_of_a_comparison_file_is_in_its_table() -> None:
    page = (ROOT / "docs" / "how-to" / "compare.md").read_text()
    keys = set(re.findall(r"^\| `([\w.]+)` \|", page.partition("## Keys of the comparison file")[2], re.M))
    names = {
        cls: {field.name for field in dataclasses.fields(cls)} for cls in (ComparisonFile, Measure, Layout)
    }
    assert keys == (names[ComparisonFile] - {"measure", "layout"}) | {
        *(f"measure.{name}" for name in names[Measure]),
        *(f"layout.{name}" for name in names[Layout]),
    }


def _anchors(page: str) -> set[str]:
    """Of a page's headings, as they are made where Markdown is shown."""
    text = re.sub(r"```.*?```", "", page, flags=re.S)
    plain = (
        re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in re.findall(r"^#+ (.*)$", text, re.M)
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in LINK.findall(page.read_text()):
        if not target.startswith(("http:", "https:", "mailto:")):
            to = page.parent / target if target else page
            assert to.exists(), target
            assert not anchor or to.suffix != ".md" or anchor in _anchors(to.read_text()), (
                f"{target}#{anchor}"
            )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_lists_begin_after_an_empty_line(page: Path) -> None:
    """Else the site shows them as words of the paragraph above, where GitHub shows a list."""
    item = re.compile(r"([*-]|\d+\.) ")
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    blocks = [block.splitlines() for block in re.split(r"\n\s*\n", text.strip())]
    swallowed = [
        line for first, *rest in blocks if not item.match(first) for line in rest if item.match(line)
    ]
    assert not swallowed, f"an empty line is missing above {swallowed[0][:60]!r}"


def test_the_example_of_a_method_works(small, tmp_path, monkeypatch) -> None:
    from fedatlas import methods

    page = (ROOT / "docs" / "how-to" / "add-a-method.md").read_text()
    code = re.findall(r"```python\n(.*?)```", page, re.S)[0]
    module = types.ModuleType("example_method")
    monkeypatch.setitem(sys.modules, "example_method", module)
    exec(compile(code, "add-a-method.md", "exec"), module.__dict__)
    monkeypatch.setitem(methods.REGISTRY, "mymomentum", "example_method:FedAvgM")

    def last(method: dict[str, object]) -> dict[str, object]:
        tree = wire.decode(
            last_state(small | {"method": method}, tmp_path / str(len(list(tmp_path.iterdir()))))
        )
        assert isinstance(tree, dict)
        return tree

    plain, still, moved = (
        last(m) for m in ({"name": "fedavg"}, {"name": "mymomentum", "beta": 0.0}, {"name": "mymomentum"})
    )
    difference = max(float((plain["model"][n] - still["model"][n]).abs().max()) for n in plain["model"])  # type: ignore[index,union-attr]
    assert difference < 1e-6, "without momentum it is FedAvg, up to the rounding of old - (old - mean)"
    assert wire.encode(moved["model"]) != wire.encode(still["model"])
    assert dataclasses.is_dataclass(module.FedAvgMState)


def test_the_files_of_the_challenge_are_read(tmp_path, monkeypatch) -> None:
    pages = {
        name: (ROOT / "docs" / "how-to" / f"{name}.md").read_text() for name in ("challenge", "add-a-net")
    }
    for block in re.findall(r"```yaml\n(.*?)```", pages["challenge"], re.S):
        (tmp_path / re.findall(r"\w+\.yaml", block)[0]).write_text(block)
    module = types.ModuleType("segres_of_a_team")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(re.findall(r"```python\n(.*?)```", pages["add-a-net"], re.S)[0], module.__dict__)
    monkeypatch.setitem(nets.OTHERS.here, "segres", module.SegRes)
    for name in ("red_median", "green"):
        monkeypatch.setitem(methods.OTHERS.here, name, methods.get("fedavg"))
    hidden = load_federation(tmp_path / "hidden.yaml")
    assert [site.role for site in hidden.sites] == ["train", "train", "train", "test"]
    assert hidden.sites[:3] == load_federation(tmp_path / "base.yaml").sites
    arms = yaml.safe_load((tmp_path / "open.yaml").read_text())["arms"]
    final = yaml.safe_load((tmp_path / "final.yaml").read_text())
    (tmp_path / "final.yaml").write_text(yaml.safe_dump(final | {"arms": arms}, sort_keys=False))
    for file in ("open", "final"):
        comparison = load_comparison([tmp_path / f"{file}.yaml"], profile="full", runs=tmp_path / "runs")
        assert list(comparison.federations) == ["baseline", "team-red", "team-blue", "team-green"]


def test_the_example_of_a_net_works(small, tmp_path, monkeypatch) -> None:
    page = (ROOT / "docs" / "how-to" / "add-a-net.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.S)
    module = types.ModuleType("our_nets.segres")
    monkeypatch.setitem(sys.modules, "our_nets.segres", module)
    exec(compile(code, "add-a-net.md", "exec"), module.__dict__)
    entry = re.findall(r"^segres = \"(.*)\"$", page, re.M)[0]
    monkeypatch.setattr(nets.OTHERS, "installed", {"segres": EntryPoint("segres", entry, "fedatlas.nets")})
    assert "segres" in nets.names()
    for dims in (2, 3):
        net = nets.build("segres", {"width": 8}, in_channels=1, classes=4, spatial_dims=dims, seed=0)
        nets.check_output(net, 4)
        assert set(parts(net)) == {"encoder", "decoder", "head"} and len(head_of(net)) == 2
    rows, features = {"name": "fedavg", "aggregate_unlabelled_rows": False}, {"name": "moon"}
    for method in (
        rows,
        features,
    ):  # the first asks for the head's rows, the other for what the encoder gives
        chosen = {"net": {"name": "segres", "width": 8, "down": [1, 1]}, "method": method}
        assert last_state(small | chosen, tmp_path / str(method["name"]))


def _examples() -> tuple[list[str], str]:
    """The two data sets of the page, and the entry point."""
    page = (ROOT / "docs" / "how-to" / "add-a-data-set.md").read_text()
    (entry,) = re.findall(r"```toml\n\[project\.entry-points\.\"(.*?)\"\]\n(.*?)```", page, re.S)
    return re.findall(r"```python\n(.*?)```", page, re.S), "[{}]\n{}".format(*entry).replace('"', "")


def _harbour(folder: Path) -> Path:
    for number in range(3):
        scan = f"scan_{number}_1"
        label = f"{scan}/organs.nii.gz" if number < 2 else None
        write_scan(folder, f"{scan}/ct.nii.gz", label, number)
    return folder


def test_the_example_of_a_data_set_works_from_another_package(tmp_path, monkeypatch) -> None:
    """As it is installed: a module, and the entry point in the package's metadata."""
    from fedatlas.core.errors import FederationError
    from fedatlas.data import datasets
    from fedatlas.data.checks import check_site
    from fedatlas.data.index import SiteConfig, label_space_of, read_site

    (harbour, _), entry = _examples()
    installed = tmp_path / "installed"
    (installed / "harbour-1.dist-info").mkdir(parents=True)
    (installed / "harbour.py").write_text(harbour)
    (installed / "harbour-1.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: harbour\nVersion: 1\n"
    )
    (installed / "harbour-1.dist-info" / "entry_points.txt").write_text(entry)
    monkeypatch.syspath_prepend(str(installed))
    monkeypatch.setattr(datasets, "_others", datasets._others.__wrapped__)
    root = _harbour(tmp_path / "data")
    config = SiteConfig(name="s", path=str(root), format="harbour", aliases={"liver tumour": "spleen"})  # type: ignore[call-arg]
    index = read_site(config, root)
    assert [(case.name, case.split, case.patient) for case in index.cases] == [
        ("scan_0_1", "train", "0"),
        ("scan_1_1", "train", "1"),
        ("scan_2_1", "test", "2"),
    ]
    assert not [p for p in check_site(index, label_space_of([index.brings])) if p.fatal]
    with pytest.raises(FederationError, match="the key 'lesion' does not exist; did you mean 'lesions'"):
        read_site(dataclasses.replace(config, reading={"lesion": True}), root)
    with pytest.raises(FederationError, match="did you mean 'harbour'"):
        datasets.get("habour")
    sys.modules.pop("harbour")


def test_the_example_of_findings_works_in_the_package(tmp_path, monkeypatch) -> None:
    """As it is written into the folder of data sets."""
    from fedatlas.data import datasets
    from fedatlas.data.datasets.shared.listing import Splitting
    from fedatlas.data.index import SiteConfig, read_image_site

    (_, city), _ = _examples()
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "city.py").write_text(city)
    monkeypatch.setattr(datasets, "__path__", [*datasets.__path__, str(tmp_path / "package")])
    datasets.registry.cache_clear()
    try:
        (tmp_path / "findings.csv").write_text("image_id,class_name\na,Cardiomegaly\nb,\n")
        config = SiteConfig(name="s", path=str(tmp_path), format="city")  # type: ignore[call-arg]
        found = read_image_site(config, tmp_path, channels=1, splitting=Splitting(test=0, validation=0))  # type: ignore[call-arg]
    finally:
        datasets.registry.cache_clear()
        sys.modules.pop("fedatlas.data.datasets.city", None)
    first, second = found.cases
    assert (first.present, second.present) == ({"Cardiomegaly"}, set())
    assert second.absent == {"Cardiomegaly", "Pleural effusion"}


def _three_sites(folder: Path) -> None:
    """The folders that the complete federation file of bring-your-data names, of a phantom's scans."""
    raw = write_phantom(folder / "raw", sites=3, cases=5, test_cases=1, classes=("liver", "spleen", "kidney"))
    for place, name in enumerate(("north", "south", "west")):
        (raw / f"site-{place}").rename(folder / name)
    table = folder / "south" / "dataset.json"
    table.write_text(table.read_text().replace("spleen", "Milz").replace("kidney", "Niere"))
    for name in ("imagesTs", "labelsTs"):
        shutil.rmtree(folder / "south" / name)


def test_the_complete_federation_file_for_scans_works(tmp_path) -> None:
    from fedatlas.federation.check import check_federation_file
    from fedatlas.federation.session import run_federation

    page = (ROOT / "docs" / "how-to" / "bring-your-data.md").read_text()
    part = page[page.index("### A complete federation file") :]
    (text,) = re.findall(r"```yaml\n(.*?)```", part[: part.index("### Three layouts")], re.S)
    assert all("#" in line for line in text.splitlines() if not line.endswith(":") and "path:" not in line)
    (tmp_path / "data").mkdir()
    _three_sites(tmp_path / "data")
    file = tmp_path / "federation.yaml"
    file.write_text(text)

    found = check_federation_file(file, [], tmp_path / "runs")
    assert not [problem["text"] for problem in found["problems"] if problem["fatal"]]
    annotated = {name: set(site["annotated"]) for name, site in found["sites"].items()}
    assert annotated == {"north": {"liver", "spleen"}, "south": {"spleen", "kidney"}, "west": {"kidney"}}
    assert found["sites"]["south"]["cases"]["test"] == 1

    quick = ["rounds=1", "local.steps=2", "net.filters=[4,8,8]", "preprocessing.spacing=[4,4,4]"]
    quick += ["preprocessing.patch=[16,16]", "engine.workers=0"]
    federation = load_federation(file, quick)
    run_federation(federation, tmp_path / "run", tell=lambda text: None)
    assert (tmp_path / "run" / "rows.csv").exists()


def test_what_the_results_advise_is_switched_on_as_they_say() -> None:
    """The pieces of YAML are accepted beside the complete file, and losses and momentum are those of `fedatlas`."""
    from fedatlas.methods.fedatlas import NO_CLASS_LOST, FedAtlas

    page = (ROOT / "docs" / "how-to" / "bring-your-data.md").read_text()
    (text,) = [
        text for text in re.findall(r"```yaml\n(.*?)```", page, re.S) if text.startswith("name: abdomen ")
    ]
    results = (ROOT / "docs" / "results.md").read_text()
    part = results[results.index("### How to switch it on") :]
    pieces = [yaml.safe_load(piece) for piece in re.findall(r"```yaml\n(.*?)```", part, re.S)]
    federations = []
    for piece in pieces:
        whole = yaml.safe_load(text)
        for key, value in piece.items():
            whole[key] = value if key == "method" else whole.get(key, {}) | value
        federations.append(parse_federation(whole, base=ROOT))
    one, merged, few = federations
    assert [each.method["name"] for each in federations] == ["fedatlas", "standalone", "condistfl"]
    for averaged in (one, merged):
        assert averaged.local.schedule == "constant"
        assert averaged.method["swa_start"] == 0.5
    assert merged.evaluation.inference.merge == "mean"
    loss = {"name": "marginal_dice_ce_exclusion", "options": NO_CLASS_LOST}
    assert merged.method["loss"] == few.method["loss"] == loss
    assert few.method["server_momentum"] == FedAtlas.server_momentum


def test_complete_files_begin_with_the_methods_that_are_advised() -> None:
    page = (ROOT / "docs" / "how-to" / "bring-your-data.md").read_text()
    texts = [text for text in re.findall(r"```yaml\n(.*?)```", page, re.S) if text.startswith("name: ")]
    made = [parse_federation(yaml.safe_load(text), base=ROOT) for text in texts]
    advised = {"segmentation": "fedatlas", "classification": "fedavg"}
    assert len(made) == 4 and all(each.method["name"] == advised[each.task] for each in made)
    twenty = (ROOT / "docs" / "how-to" / "twenty-keys.md").read_text()
    assert "Start with `fedatlas` for segmentation, `fedavg` for findings" in twenty


def test_the_site_has_every_page() -> None:
    """The navigation of the site, which is made from the table in README.md, leaves no page out."""
    made = runpy.run_path(str(ROOT / "tools" / "documentation.py"))
    places = {there for pages in made["groups"]().values() for there in pages.values()}
    assert places == {page.relative_to(ROOT / "docs").as_posix() for page in ROOT.glob("docs/**/*.md")} | {
        "changes.md"
    }
    text = (
        "[a](../../README.md#methods) [b](deploy.md) [c](../../src/fedatlas/__init__.py) [d](https://e.org/f)"
    )
    assert made["relinked"](text, "docs/how-to/x.md", "how-to/x.md") == (
        "[a](../index.md#methods) [b](deploy.md) [c](../api/fedatlas.md) [d](https://e.org/f)"
    )


def test_the_twenty_keys_are_keys(reference) -> None:
    """Every key of that page is in the reference, with the default that the page says."""
    keys, section = {}, "top"
    for line in reference["federation_file"]().splitlines():
        section = line.removeprefix("## ") if line.startswith("## ") else section
        if line.startswith("| `"):
            key, _, default, _ = (cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:5])
            keys[section, key.strip("`")] = default
    blocks = {"": "top", "labels": "Labels", "sites[]": "SiteConfig", "preprocessing": "Preprocessing"}
    blocks |= {"net": "net: unet", "local": "Local", "evaluation": "Evaluation", "engine": "Engine"}
    page = (ROOT / "docs" / "how-to" / "twenty-keys.md").read_text()
    rows = re.findall(r"^\| `([a-z_.\[\]]+)` \| ([^|]+) \|", page, re.M)
    assert len(rows) == 20
    for key, default in rows:
        block, _, name = key.rpartition(".")
        assert (blocks[block], name) in keys, key
        told = keys[blocks[block], name]
        assert not told or told == default.strip(), key


def test_pictures_say_what_they_are_made_from(tmp_path, capsys) -> None:
    drawn = runpy.run_path(str(ROOT / "tools" / "make_pictures.py"))
    assert drawn["main"]([str(tmp_path)]) == 1
    assert "fedatlas-s0/run.json" in (told := capsys.readouterr().err) and "make demo" in told
    sizes = [file.stat().st_size for file in (ROOT / "docs" / "pictures").iterdir()]
    assert max(sizes) < 150_000 and sum(sizes) < 600_000


def test_diagrams_are_as_the_code_draws_them() -> None:
    """One of them shows defaults of a method."""
    drawn = runpy.run_path(str(ROOT / "tools" / "make_diagrams.py"))
    for draw in drawn["DIAGRAMS"]:
        file = drawn["OUT"] / f"{draw.__name__}.svg"
        assert file.read_text() == draw().svg(), "run tools/make_diagrams.py"


@pytest.mark.parametrize("place", ["answer", "answer-findings"])
def test_the_answer_is_what_the_tables_say(place: str) -> None:
    """The tables at the top of the results are made from the others: each difference is that of the means, `fedatlas` first."""
    made = SimpleNamespace(**runpy.run_path(str(ROOT / "tools" / "results_page.py")))
    page = made.everything()
    assert made.PAGE.read_text() == made.filled(made.PAGE.read_text(), page), "run tools/results_page.py"
    answer = next(answer for answer in made.ANSWERS if answer.place == place)
    rows = made.table_of(page, place).strip().splitlines()[2:]
    assert len(rows) == len(answer.settings)
    for row, setting in zip(rows, answer.settings, strict=True):
        ours, *cells = row.strip("| ").split(" | ")[1:]
        told = dict(zip(answer.opponents, cells, strict=True))
        assert {name for name, cell in told.items() if cell != "–"} == set(setting.others)
        for name in setting.others:
            value, low, high = (float(number) for number in re.findall(r"[+-]\.\d+", told[name]))
            assert low <= value <= high
            low_sign, high_sign = re.findall(r"([+-])\.\d+", told[name])[1:]
            assert told[name].startswith("**") == (low_sign == high_sign)
            assert value == pytest.approx(
                float(ours) - made.mean_of(page, setting.place, setting.others[name]), abs=0.0016
            )


def test_what_to_take_is_what_the_tables_say() -> None:
    """Each row says by how much the mean of what it takes is above that of the other."""
    made = SimpleNamespace(**runpy.run_path(str(ROOT / "tools" / "results_page.py")))
    page = made.everything()
    readme = made.README.read_text()
    assert readme == made.filled_readme(readme, page), "run tools/results_page.py"
    rows = made.table_of(page, "to-take").strip().splitlines()[2:]
    for row, advice in zip(rows, made.TO_TAKE, strict=True):
        value, low, high = (float(number) for number in re.findall(r"[+-]\.\d+", row.split(" | ")[3]))
        assert low <= value <= high
        means = [made.mean_of(page, advice.place, arm) for arm in (advice.ours, advice.other)]
        assert value == pytest.approx(means[0] - means[1], abs=0.0016)


def test_means_on_validation_cases_are_of_their_table_else_of_the_best_round() -> None:
    made = SimpleNamespace(**runpy.run_path(str(ROOT / "tools" / "results_page.py")))
    means = "| arm | seeds | liver | mean |\n| --- | --- | --- | --- |\n| a | 3 | 0.1 | 0.900 ± 0.001 |\n"
    of_cases = f"**Validation cases, Dice: dice, model last**\n\n{means.replace('900', '700')}| b | 3 | 0.1 | **0.650 ± 0.002** |\n\n"
    rounds = "Validation over the rounds: auroc.\n\n| arm | evaluated rounds | best | last |\n| --- | --- | --- | --- |\n| a | 12 | 0.8 ± 0.1 | 0.6 ± 0.1 |\n\n"
    page = "".join(
        f"<!-- {place} -->\n\n{means}\n{tables}<!-- /{place} -->\n"
        for place, tables in (("both", rounds + of_cases), ("rounds", rounds), ("neither", ""))
    )
    assert made.validation_of(page, "both", "a") == 0.7
    assert made.validation_of(page, "both", "b") == 0.65
    assert made.validation_of(page, "rounds", "a") == 0.8
    assert made.validation_of(page, "neither", "a") is None
    with pytest.raises(ValueError, match="the table rounds has no mean of b on validation cases"):
        made.validation_of(page, "rounds", "b")


def test_a_number_that_the_tables_lack_is_named() -> None:
    made = SimpleNamespace(**runpy.run_path(str(ROOT / "tools" / "results_page.py")))
    page = made.everything()
    with pytest.raises(ValueError, match="the table head-neck has no difference of condistfl to fedavg"):
        made.difference(page, "head-neck", "condistfl", "fedavg")
    with pytest.raises(ValueError, match="the table head-neck has no mean of nobody"):
        made.above(page, "head-neck", "nobody", "fedatlas")
    # nor of a table below, where a seed is not finished
    row, unfinished = "| fedavg | 3 |", "| fedavg | 2 of 3 |"
    part = made.table_of(page, "head-neck")
    assert part.count(row) > 1
    once = page.replace(part, part.replace(row, unfinished, 1))
    with pytest.raises(ValueError, match="the table head-neck has no mean of fedavg"):
        made.above(once, "head-neck", "fedatlas", "fedavg")
    with pytest.raises(ValueError, match="the table nowhere has no mean of fedatlas"):
        made.mean_of(page, "nowhere", "fedatlas")
    with pytest.raises(ValueError, match="no place to-take"):
        made.filled_readme("no marks", page)
