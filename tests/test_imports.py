"""Imports run one way only, and the command line starts without anything heavy."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fedatlas
from fedatlas.federation.known import known

ROOT = Path(fedatlas.__file__).parent
MAY_IMPORT = {
    "core": "",
    "losses": "core",
    "nets": "core",
    "learning": "core",
    "phantoms": "core",
    "transport.protection": "core",
    "data": "core learning",
    "analysis": "core nets",
    "evaluation": "core learning analysis",
    "report": "core evaluation",
    "transport": "core evaluation transport.protection",
    "transport.nvflare": "core transport",
    "transport.flower": "core transport",
    "methods.shared": "core losses learning transport.protection",
    "methods": "core losses learning methods.shared",
    "federation": "core losses nets learning phantoms data evaluation transport transport.protection methods",
    "planning": "core nets data transport federation",
    "analysis.runs": "core losses learning data evaluation transport analysis federation",
    "compare": "core data evaluation report transport federation",
    "export": "core nets learning data evaluation report federation",
    "papers": "core nets learning evaluation report transport methods methods.shared federation compare",
}
"""Package -> all others that it may import. No engine imports a method, no method an engine; what stands below knows nothing
of what stands above. The command line alone may import everything."""


def package_of(module: str) -> str:
    """The longest package of the table that a module lies in."""
    parts = module.split(".")
    names = [".".join(parts[:n]) for n in (2, 1)]
    return next((name for name in names if name in MAY_IMPORT), parts[0])


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


def test_no_package_stands_above_itself() -> None:
    below = {package: set(names.split()) for package, names in MAY_IMPORT.items()}
    while below:
        lowest = {package for package, names in below.items() if not names & below.keys()}
        assert lowest, f"a circle among {sorted(below)}"
        below = {package: names for package, names in below.items() if package not in lowest}


def test_every_package_is_in_the_table() -> None:
    packages = {path.parent.relative_to(ROOT).as_posix() for path in ROOT.glob("*/*.py")} - {"cli"}
    assert packages == {name for name in MAY_IMPORT if "." not in name}
    assert {path.name for path in ROOT.glob("*.py")} <= {"__init__.py", "__main__.py"}


@pytest.mark.parametrize(
    ("module", "path"), modules(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_imports_run_one_way(module: str, path: Path) -> None:
    package = package_of(module)
    if package in ("cli", "__init__", "__main__"):
        return
    allowed = {package, "__version__", *MAY_IMPORT[package].split()}
    for name in imported(path):
        # `from fedatlas import a` gives "fedatlas" and "fedatlas.a"; the first is judged by what is taken from it
        assert package_of(name) in allowed, f"{module} imports {name}, and may not: see MAY_IMPORT"


FLOWER = {"flwr.app", "flwr.clientapp", "flwr.serverapp"}
"""What Flower documents."""


def test_one_module_knows_what_flower_does_not_document() -> None:
    users = set()
    for module, path in modules():
        names = [
            node.module
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "flwr"
        ]
        users |= {module for name in names if name not in FLOWER}
    assert users == {"transport.flower.compat"}


STRATEGIES = "fedavg fedprox fedavgm feddyn scaffold fedbn fednorm fedsm"
COMPOSED = {
    # not a method: it puts what these do on the means of Fed-MENU's parts, and calls their own functions for it
    "strategies": STRATEGIES,
    # whose option `strategy` it is
    "fedmenu": "strategies",
    # the options of its modules, which would bury the algorithm
    "ufps": "ufps_options",
}
"""Module of methods -> all other modules of methods that it may import."""


@pytest.mark.parametrize("path", sorted((ROOT / "methods").glob("*.py")), ids=lambda path: path.stem)
def test_a_method_imports_no_other_method(path: Path) -> None:
    others = {other.stem for other in path.parent.glob("*.py")} - {"__init__", path.stem}
    names = {name.split(".")[1] for name in imported(path) if name.startswith("methods.")}
    assert names & others == set(COMPOSED.get(path.stem, "").split()), (
        "what two methods need goes to methods/shared"
    )


ITS_DEFAULT = {"federation.file": "fedavg"}
"""The method of a federation file that names none."""


def test_nobody_outside_methods_names_a_method() -> None:
    """No name of a method is compared with or looked up, and no class of one is used. Sentences may name a paper. Modules of
    `papers` may: what they draw are options of their method, which they take from its class."""
    from fedatlas import methods

    classes = {target.rpartition(":")[2] for target in methods.REGISTRY.values()}
    names = methods.REGISTRY.keys() - {"fedatlas"}  # which is the name of the package and of its command, too
    for module, path in modules():
        if package_of(module).partition(".")[0] in ("methods", "papers"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            where = f"{module}:{getattr(node, 'lineno', '')}"
            if isinstance(node, ast.Constant) and node.value != ITS_DEFAULT.get(module):
                assert node.value not in names, f"{where} names the method {node.value}"
            if isinstance(node, ast.Name | ast.Attribute):
                name = node.id if isinstance(node, ast.Name) else node.attr
                assert name not in classes, f"{where} uses {name}"
            if (
                isinstance(node, ast.ImportFrom)
                and node.module
                and node.module.startswith("fedatlas.methods.")
            ):
                shared = node.module.startswith("fedatlas.methods.shared")
                assert shared, f"{where} imports {node.module}; take a method by `methods.get`"


def test_comparisons_name_no_paper() -> None:
    """Only the places of parts in `papers` hold such a name."""
    for module, path in modules():
        if package_of(module) != "compare":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                words = set(re.findall(r"\w+", node.value)) & {"ufps", "fedmenu", "menunet"}
                place = node.value.startswith("fedatlas.papers.") and module == "compare.parts"
                assert not words or place, f"{module}:{node.lineno} names {words}"


def test_the_test_of_names_sees_a_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "session.py"
    monkeypatch.setattr(sys.modules[__name__], "modules", lambda: [("federation.session", file)])
    for text in ('x = "fedprox"', "y = z.FedProx", "from fedatlas.methods.fedprox import proximal"):
        file.write_text(text)
        with pytest.raises(AssertionError, match=r"federation\.session:1"):
            test_nobody_outside_methods_names_a_method()
    file.write_text('"""As FedProx, `fedprox`."""')
    test_nobody_outside_methods_names_a_method()


@pytest.mark.parametrize(
    "verb",
    [
        "--help",
        "run --help",
        "check --help",
        "list --help",
        "deploy start --help",
        "audit --help",
        "export --help",
        "demo --help",
        "analyse --help",
    ],
)
def test_help_needs_neither_torch_nor_monai(verb: str) -> None:
    if verb.startswith("analyse") and known() is None:
        pytest.skip("known.json is older than the code: run tools/make_reference.py")
    code = (
        "import sys\nfrom fedatlas.cli import main\n"
        f"try:\n    main({verb.split()!r})\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "heavy = {'torch', 'monai', 'numpy', 'pydantic', 'matplotlib', 'jinja2'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "example:" in done.stdout or verb in ("--help", "deploy start --help")


@pytest.mark.parametrize("module", ["frames", "relay", "deployment", "local"])
def test_an_engines_own_process_needs_no_torch(module: str) -> None:
    code = f"import sys, fedatlas.transport.{module}\nassert not {{'torch', 'numpy', 'pydantic'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_core_needs_no_engine_and_no_monai() -> None:
    code = (
        "import sys, fedatlas.cli, fedatlas.federation.session, fedatlas.federation.across, fedatlas.federation.site\n"
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
