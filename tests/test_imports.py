"""Imports run one way only, and the command line starts without anything heavy."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import fedatlas

ROOT = Path(fedatlas.__file__).parent
BASE = {"fedatlas", "__version__", "errors", "seeds", "labels", "options", "memory"}
"""What everything may import."""
ALLOWED = {
    "errors": set(),
    "memory": set(),
    "seeds": set(),
    "options": set(),
    "labels": set(),
    "tensors": set(),
    "organs": set(),
    "outputs": set(),
    "pseudo": set(),
    "data": {"data", "augment", "inference"},
    "augment": set(),
    "cmidg": set(),
    "features": set(),
    "sharpness": {"data.batch", "training", "tensors"},
    "dp_sgd": {"data.batch", "method", "training", "tensors", "privacy"},
    "losses": {"losses", "data.batch", "outputs"},
    "nets": {"nets", "tensors", "organs", "outputs"},
    "method": {"data.batch", "tensors"},
    "training": {"data.batch", "method", "tensors"},
    "methods": {
        "methods",
        "data.batch",
        "method",
        "training",
        "tensors",
        "losses",
        "augment",
        "organs",
        "outputs",
        "features",
        "pseudo",
        "cmidg",
        "sharpness",
        "dp_sgd",
    },
    "compression": {"tensors"},
    "privacy": {"tensors"},
    "secure": {"tensors"},
    "engine": {
        "engine",
        "data.batch",
        "method",
        "tensors",
        "compression",
        "privacy",
        "secure",
        "evaluation.classification",
    },
    "inference": {"tensors", "outputs"},
    "evaluation": {"evaluation", "data.batch", "method", "tensors", "inference", "analysis"},
    "analysis": {"analysis", "data.batch", "tensors", "nets", "outputs"},
    "report": {"report", "evaluation.statistics", "evaluation.classification"},
}
TOP = {
    "experiment", "federation_yaml", "tasks", "build", "session", "trained", "trained_images", "usable", "site", "facts", "deploy", "audit", "check", "catalogue", "cli", "compare", "analyse",
    "__init__", "__main__",
}  # fmt: skip
"""Nothing below imports these."""


def modules() -> list[tuple[str, Path]]:
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found.append((".".join(part for part in parts if part != "__init__") or "__init__", path))
    return found


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return {name.removeprefix("fedatlas.") for name in names if name.startswith("fedatlas.")}


def allows(rule: str, name: str) -> bool:
    return name == rule or name.startswith(rule + ".")


@pytest.mark.parametrize(
    ("module", "path"), modules(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_imports_run_one_way(module: str, path: Path) -> None:
    package = module.split(".")[0]
    if package in TOP:
        return
    assert package in ALLOWED, f"{module}: say in this test what it may import"
    rules, names = BASE | ALLOWED[package], imported(path)
    for name in names:
        # `from a import b` gives a.b and a; a alone is judged by what is taken from it
        longer = any(other.startswith(name + ".") for other in names)
        assert longer or any(allows(rule, name) for rule in rules), f"{module} imports {name}"


def test_no_engine_names_a_method() -> None:
    from fedatlas import methods

    for path in sorted((ROOT / "engine").glob("*.py")):
        words = set(path.read_text().lower().replace('"', " ").replace(".", " ").split())
        assert not words & set(methods.REGISTRY), path.name


@pytest.mark.parametrize(
    "verb",
    [
        "--help",
        "run --help",
        "check --help",
        "list --help",
        "deploy start --help",
        "audit --help",
        "analyse --help",
    ],
)
def test_help_needs_neither_torch_nor_monai(verb: str) -> None:
    code = (
        "import sys\nfrom fedatlas.cli import main\n"
        f"try:\n    main({verb.split()!r})\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "heavy = {'torch', 'monai', 'numpy', 'pydantic', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "example:" in done.stdout or verb in ("--help", "deploy start --help")


@pytest.mark.parametrize("module", ["frames", "relay", "deployment", "local"])
def test_an_engines_own_process_needs_no_torch(module: str) -> None:
    code = f"import sys, fedatlas.engine.{module}\nassert not {{'torch', 'numpy', 'pydantic'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_core_needs_no_engine_and_no_monai() -> None:
    code = (
        "import sys, fedatlas.cli, fedatlas.session, fedatlas.deploy, fedatlas.site\n"
        "assert not {'monai', 'nvflare', 'flwr', 'opacus', 'cryptography', 'Crypto'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_nothing_reads_or_seeds_the_global_generators() -> None:
    for module, path in modules():
        text = path.read_text()
        for word in (
            "np.random.seed",
            "np.random.rand",
            "np.random.normal",
            "import random",
            "import pickle",
        ):
            assert word not in text, f"{module}: {word}"
