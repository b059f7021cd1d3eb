"""Every benchmark can be imported: what it takes from the package is there."""

import importlib
from pathlib import Path

import benchmarks
import pytest

NAMES = sorted(
    file.stem for file in Path(benchmarks.__file__).parent.glob("*.py") if not file.stem.startswith("__")
)


@pytest.mark.parametrize("name", NAMES)
def test_its_imports_exist(name: str) -> None:
    importlib.import_module(f"benchmarks.{name}")
