"""Every benchmark can be imported: what it takes from the package is there. What one refuses is told as it tells it."""

import importlib
import subprocess
import sys
from pathlib import Path

import benchmarks
import pytest

NAMES = sorted(
    file.stem for file in Path(benchmarks.__file__).parent.glob("*.py") if not file.stem.startswith("__")
)


@pytest.mark.parametrize("name", NAMES)
def test_its_imports_exist(name: str) -> None:
    importlib.import_module(f"benchmarks.{name}")


def test_what_a_benchmark_refuses_is_told_without_a_traceback() -> None:
    command = [sys.executable, "-m", "benchmarks", "gpu", "--ways", "quickly"]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert done.returncode == 2 and "--ways quickly: some of float32" in done.stderr
    assert "Traceback" not in done.stderr
