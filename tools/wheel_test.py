"""What users install: builds the wheel, installs it in an empty environment, and runs a short demo from an empty folder.

python tools/wheel_test.py [--rounds N] [--keep FOLDER]
"""

import argparse
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run(*command: str | Path, cwd: Path) -> str:
    """Runs a command with nothing of the repository in its environment; its output. Ends the test where it fails."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=kept, text=True, capture_output=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))} failed:\n{done.stdout}\n{done.stderr}")
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2, help="of the demo (default: 2)")
    parser.add_argument("--keep", type=Path, help="an empty folder for environment and runs, which stays")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = arguments.keep or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        print(test(work, arguments.rounds))


def test(work: Path, rounds: int) -> str:
    """Builds, installs, runs. Returns what the demo printed."""
    run(sys.executable, "-m", "build", "--wheel", "--outdir", work / "dist", ROOT, cwd=work)
    (wheel,) = (work / "dist").glob("*.whl")
    venv.create(work / "env", with_pip=True)
    python, fedatlas = work / "env/bin/python", work / "env/bin/fedatlas"
    install = ["install", "--quiet", "--constraint", ROOT / "constraints.txt", wheel]
    run(python, "-m", "pip", *install, cwd=work)
    (work / "here").mkdir()
    where = run(python, "-c", "import fedatlas; print(fedatlas.__file__)", cwd=work / "here").strip()
    assert where.startswith(str(work / "env")), f"fedatlas comes from {where}"
    told = run(fedatlas, "demo", "ct", "-o", f"rounds={rounds}", "-o", "local.steps=2", cwd=work / "here")
    (folder,) = (path for path in (work / "here/runs").iterdir() if (path / "run.json").exists())
    assert (folder / "report.html").stat().st_size > 100_000
    run(fedatlas, "list", "methods", cwd=work / "here")
    run(fedatlas, "export", folder, "--to", "safetensors", cwd=work / "here")
    return told


if __name__ == "__main__":
    main()
