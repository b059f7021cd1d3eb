"""The documentation is true: generated pages are current, links lead somewhere, the example method works."""

import dataclasses
import re
import runpy
import sys
import types
from pathlib import Path

import pytest

from fedatlas.engine import wire
from fedatlas.experiment import parse_federation

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("experiments/**/*.md")])


def test_the_reference_is_current() -> None:
    made = runpy.run_path(str(ROOT / "tools" / "make_reference.py"))
    folder = ROOT / "docs" / "reference"
    assert (folder / "federation-file.md").read_text() == made["federation_file"](), "run `make docs`"
    assert (folder / "registered.md").read_text() == made["registered"](), "run `make docs`"
    assert made["KNOWN"].read_text() == made["known"](), "run `make docs`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith(("http:", "https:", "mailto:")):
            assert (page.parent / target).exists(), target


def test_the_example_of_a_method_works(small, tmp_path, monkeypatch) -> None:
    from fedatlas import methods
    from fedatlas.session import run_federation

    page = (ROOT / "docs" / "how-to" / "add-a-method.md").read_text()
    code = re.findall(r"```python\n(.*?)```", page, re.S)[0]
    module = types.ModuleType("example_method")
    monkeypatch.setitem(sys.modules, "example_method", module)
    exec(compile(code, "add-a-method.md", "exec"), module.__dict__)
    monkeypatch.setitem(methods.REGISTRY, "mymomentum", "example_method:FedAvgM")

    def last(method: dict[str, object]) -> dict[str, object]:
        path = tmp_path / str(len(list(tmp_path.iterdir())))
        run_federation(
            parse_federation(small | {"method": method}, base=Path()), path, tell=lambda text: None
        )
        tree = wire.decode((path / "models" / "last.fa").read_bytes())
        assert isinstance(tree, dict)
        return tree

    plain, still, moved = (
        last(m) for m in ({"name": "fedavg"}, {"name": "mymomentum", "beta": 0.0}, {"name": "mymomentum"})
    )
    difference = max(float((plain["model"][n] - still["model"][n]).abs().max()) for n in plain["model"])  # type: ignore[index,union-attr]
    assert difference < 1e-6, "without momentum it is FedAvg, up to the rounding of old - (old - mean)"
    assert wire.encode(moved["model"]) != wire.encode(still["model"])
    assert dataclasses.is_dataclass(module.FedAvgMState)
