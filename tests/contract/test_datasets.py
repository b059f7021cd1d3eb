"""What every registered data set keeps to; a file in fedatlas/data/datasets and a `Fake` are enough to be tested here."""

import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from set_cases import FAKES, STATES, Fake, Rule, Said, State, changes_of

from fedatlas.core.errors import FedAtlasError, FederationError
from fedatlas.core.labels import LabelSpace
from fedatlas.data import datasets
from fedatlas.data.checks import check_federation, check_site
from fedatlas.data.datasets import DataSet
from fedatlas.data.datasets.shared.listing import Splitting
from fedatlas.data.images import Images, check_images
from fedatlas.data.index import SiteConfig, label_space_of, naming_of, read_image_site, read_site
from fedatlas.data.reading import read_case
from fedatlas.planning.recognise import recognised

NAMES = tuple(datasets.registry())
NONE = Splitting(test=0, validation=0)  # type: ignore[call-arg]
FOLDER = "Klinik Süd (1) #2 100%"
"""A site's folder; every data set is read from one with such a name."""


def fake_of(name: str) -> Fake:
    if name not in FAKES:
        pytest.fail(f"the data set {name} has no fake: add a Fake of it to FAKES in tests/set_cases.py")
    return FAKES[name]


def config_of(name: str, root: Path) -> SiteConfig:
    return SiteConfig(name="s", path=str(root), format=name, reading=dict(fake_of(name).reading))  # type: ignore[call-arg]


@dataclasses.dataclass
class Seen:
    """Case -> own class name -> its state; case -> its own classes that are annotated; and every sentence that
    FedAtlas says of the folder, in its own errors and problems."""

    states: dict[str, dict[str, State]] = dataclasses.field(default_factory=dict)
    said: list[str] = dataclasses.field(default_factory=list)


def look(name: str, root: Path) -> Seen:
    """Reads a folder and every file of it."""
    try:
        if datasets.get(name).kind == "findings":
            return _findings(name, root)
        return _voxels(name, root)
    except FedAtlasError as error:
        return Seen(said=[str(error)])


def _findings(name: str, root: Path) -> Seen:
    found = read_image_site(config_of(name, root), root, channels=1, splitting=NONE)
    space = LabelSpace(found.findings, exclusive=False, level="image")
    problems = [*check_federation([found], space), *check_images(found, Images(), [])]  # type: ignore[call-arg]
    seen = Seen(said=list(map(str, problems)))
    for case in found.cases:
        own: dict[str, State] = dict.fromkeys(found.findings, "open")
        own |= dict.fromkeys(case.present, "present") | dict.fromkeys(case.absent, "absent")
        seen.states[case.name] = own
    return seen


def _voxels(name: str, root: Path) -> Seen:
    index = read_site(config_of(name, root), root)
    space = label_space_of([index.brings], exclusive=False)
    seen = Seen(said=list(map(str, check_site(index, space))))
    for case in index.cases:
        label = read_case(index, case, space, naming_of(index, space)).label
        counts = {} if label is None else {space.names[c]: n for c, n in label.counts.items()}
        own: dict[str, State] = dict.fromkeys(space.names, "open")
        seen.states[case.name] = own | {c: "present" if n else "absent" for c, n in counts.items()}
    return seen


@pytest.fixture
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The folder of the test's data set."""
    (tmp_path / FOLDER).mkdir()
    return fake_of(request.node.callspec.params["name"]).write(tmp_path / FOLDER)


@pytest.mark.parametrize("name", NAMES)
def test_it_describes_itself(name) -> None:
    data = datasets.get(name)
    assert (
        data.title.endswith(".") and "\n" not in data.title and data.title[0].isupper()
    ) or name == "nnunet"
    if data.options is not None:
        data.options()  # every option has a default
        for key, field in data.options.__pydantic_fields__.items():
            assert field.description, f"{name}: the option {key} has no sentence"


@pytest.mark.parametrize("name", NAMES)
def test_it_is_read_with_three_states_per_case_and_class(name, root) -> None:
    fake, seen = fake_of(name), look(name, root)
    assert fake.examples.keys() == STATES - fake.never.keys(), (
        "an example, or why there is none, for every state"
    )
    for state, (case, own) in fake.examples.items():
        assert seen.states[case][own] == state, (case, own)
    assert len(seen.states) >= 3 and all(text.startswith("site s: ") for text in seen.said)


@pytest.mark.parametrize("name", NAMES)
def test_its_folder_is_recognised(name, root) -> None:
    """Those with a dataset.json or a list by that alone."""
    found, index = recognised(root, "s")
    assert found.format == ("auto" if (root / found.table).is_file() else name)
    assert index.cases


@pytest.mark.parametrize("name", NAMES)
def test_its_cases_have_one_order(name, root, tmp_path) -> None:
    """Whatever order the file system gives."""
    copy = tmp_path / "copy"
    for file in sorted((file for file in root.rglob("*") if file.is_file()), reverse=True):
        other = copy / file.relative_to(root)
        other.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, other)
    assert list(look(name, copy).states) == list(look(name, root).states)


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_that_is_missing_or_empty_is_named(name, tmp_path) -> None:
    (said,) = look(name, tmp_path / "nowhere").said
    assert "nowhere: no such folder" in said
    (tmp_path / FOLDER).mkdir()
    said = look(name, tmp_path / FOLDER).said
    assert any(FOLDER in text for text in said), said


CHANGES = [(name, what) for name in NAMES if name in FAKES for what in changes_of(FAKES[name])]


@pytest.mark.parametrize(("name", "what"), CHANGES)
def test_what_is_wrong_is_named_or_follows_a_rule(name, what, root) -> None:
    outcome = changes_of(fake_of(name))[what](root)
    seen = look(name, root)
    if isinstance(outcome, Said):
        assert any(outcome.word in text for text in seen.said), (outcome, seen.said)
    else:
        assert isinstance(outcome, Rule) and outcome.sentence
        assert not outcome.drops or not [case for case in seen.states if outcome.drops in case]
        if outcome.open is not None:
            case, own = outcome.open
            assert seen.states[case][own] == "open", outcome.sentence
    assert not [text for text in seen.said if "Traceback" in text or "Errno" in text], seen.said


@pytest.mark.parametrize("name", NAMES)
def test_a_file_whose_name_is_not_utf8_is_named_or_passed_over(name, root) -> None:
    """As unpacked from an archive of an old system."""
    fake = fake_of(name)
    file = fake.first(root, fake.image)
    ending = file.name.partition(".")[2] if ".nii" in file.name else file.suffix[1:]
    odd = os.fsdecode(b"gr\xf6\xdfe" + (b"_0000." if "_0000." in file.name else b".")) + ending
    try:
        shutil.copy(file, file.with_name(odd))
    except OSError:
        pytest.skip("this file system takes no such name")
    seen = look(name, root)
    "\n".join((*seen.said, *seen.states)).encode()
    assert seen.states or any("gr\\udcf6\\udcdfe" in text for text in seen.said), seen.said


# ---------------------------------------------------------------------------------------------- the registry


def test_names_and_nearest_names() -> None:
    assert NAMES == tuple(sorted(NAMES)) == tuple(sorted(FAKES))
    assert datasets.names() == datasets.names("volumes", "masks", "findings") == NAMES
    assert set(datasets.known()) >= set(NAMES) and datasets.find("amso22") is None
    with pytest.raises(FederationError, match="'amso22' does not exist; did you mean 'amos22'"):
        datasets.get("amso22")
    with pytest.raises(ValueError, match="'amso22' does not exist; did you mean 'amos22'"):
        config_of_format("amso22")


def config_of_format(name: str) -> SiteConfig:
    return SiteConfig(name="s", format=name)  # type: ignore[call-arg]


def test_the_registry_needs_nothing_heavy() -> None:
    code = (
        "import sys\nfrom fedatlas.data import datasets, index\ndatasets.registry()\n"
        "heavy = {'torch', 'monai', 'nibabel', 'pydicom', 'PIL', 'scipy'} & set(sys.modules)\nassert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_module_without_a_data_set_is_named(tmp_path, monkeypatch) -> None:
    (tmp_path / "lonely.py").write_text("")
    (tmp_path / "_helper.py").write_text("1 / 0")
    monkeypatch.setattr(datasets, "__path__", [*datasets.__path__, str(tmp_path)])
    with pytest.raises(TypeError, match=r"lonely: must hold DATASET = DataSet\(name='lonely'"):
        datasets.registry.__wrapped__()
    sys.modules.pop("fedatlas.data.datasets.lonely")


@pytest.mark.parametrize(
    ("value", "words"),
    [("nowhere.at_all:DATASET", "does not load"), ("json:dumps", "is not a DataSet of that name")],
)
def test_an_entry_point_that_is_wrong_is_named(value, words, monkeypatch) -> None:
    from importlib.metadata import EntryPoint

    monkeypatch.setattr(
        datasets, "_others", lambda: {"harbour": EntryPoint("harbour", value, datasets.GROUP)}
    )
    with pytest.raises(FederationError, match=f"'harbour'.*{words}"):
        datasets.find("harbour")


def test_a_reader_that_returns_something_else_is_named(tmp_path) -> None:
    from fedatlas.data.datasets.shared.listing import Layout

    data = DataSet("odd", "volumes", "Odd.", lambda layout: [])  # type: ignore[arg-type, return-value]
    with pytest.raises(TypeError, match="odd must return a Listing, and returned a list"):
        datasets.read(data, Layout("s", tmp_path), {})
