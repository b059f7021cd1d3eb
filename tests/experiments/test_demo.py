"""The demo: what `make demo` compares is comparable, and its test cases choose nothing."""

from pathlib import Path

import pytest

from fedatlas import cli
from fedatlas.cli import main
from fedatlas.compare import Comparison, load_comparison
from fedatlas.federation.design import Experiment
from fedatlas.methods.fedatlas import NO_CLASS_LOST

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    runs = tmp_path_factory.mktemp("runs")
    return load_comparison([ROOT / "experiments" / "demo.yaml"], runs=runs)


def test_make_demo_runs_this_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], demo: Comparison
) -> None:
    """The file of `experiments/` is the one that travels with the package, and what to try next is named with a run of it."""
    assert "/fedatlas demo\n" in (ROOT / "Makefile").read_text()
    asked: list[list[str]] = []
    monkeypatch.setattr(cli, "main", lambda argv: asked.append(argv) or 0)
    assert main(["demo"]) == 0
    assert asked[0][0] == "compare" and (ROOT / "experiments/demo.yaml").samefile(asked[0][1])
    words = capsys.readouterr().out.split("try:      fedatlas predict ")[1].split()
    assert (
        words[0].endswith(f"{demo.name}/{demo.path(demo.arms[0], demo.seeds[0]).name}")
        and Path(words[1]).is_file()
    )


def test_overrides_are_of_one_federation(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "-o", "rounds=1"]) == 1
    assert "use `fedatlas demo ct`" in capsys.readouterr().err


def test_arms_differ_in_their_method_alone(demo: Comparison) -> None:
    """Same data, net, local training and loss. What is evaluated at the end may differ."""
    assert list(demo.federations) == ["fedatlas", "fedavg", "standalone"] and list(demo.seeds) == [0]
    arms = [of[0] for of in demo.federations.values()]
    for name in ("sites", "labels", "preprocessing", "net", "local", "rounds", "sampling", "augmentation"):
        assert all(getattr(arm, name) == getattr(arms[0], name) for arm in arms), name
    own = {"name": "marginal_dice_ce_exclusion", "options": NO_CLASS_LOST}  # of fedatlas, if it is given none
    assert "loss" not in arms[0].method and [arm.method["loss"] for arm in arms[1:]] == [own, own]
    assert len({arm.method["name"] for arm in arms}) == 3


def test_it_is_scored_on_test_cases_of_every_site(demo: Comparison, tmp_path: Path) -> None:
    assert demo.measure.split == "test" and all(table.split == "test" for table in demo.tables)
    experiment = Experiment(demo.federations["fedatlas"][0], tmp_path)
    for source in experiment.sources.values():
        assert {split: len(items) for split, items in source.items.items()} == {  # type: ignore[attr-defined]
            "train": 4,
            "validation": 2,
            "test": 2,
        }


def test_forgetting_can_show(demo: Comparison) -> None:
    """Local models are scored, and the last local steps still move them."""
    first = demo.federations["fedatlas"][0]
    assert "local" in first.evaluation.models and first.local.lr_min > 0
