"""`fedatlas report`: writes a run's report, one HTML file."""

import argparse
import sys
from pathlib import Path

from fedatlas.cli import shared
from fedatlas.core.errors import FedAtlasError

NAME = "report"
SENTENCE = "Write a run's report, one HTML file."
EXAMPLE = "fedatlas report runs/demo-1a2b3c4d"


def options(made: argparse.ArgumentParser) -> None:
    made.add_argument("run", type=Path, help="the run folder")
    made.add_argument("--out", type=Path, help="where to write it (default: report.html in the run folder)")
    shared.as_json(made)


def call(arguments: argparse.Namespace) -> int:
    shared.require_page(arguments.out)
    from fedatlas.papers.fedmenu.pages import run_figures
    from fedatlas.report.page import write

    if (arguments.run / "run.json").exists():
        try:
            run_figures(arguments.run)
        except FedAtlasError as error:  # the report of what there is can be made
            print(f"no figure pages: {str(error).splitlines()[0]}", file=sys.stderr)
        except OSError as error:  # a run folder that may only be read
            said = f"{error.filename or arguments.run}: {error.strerror or error}"
            print(f"no figure pages, the run folder cannot keep them: {said}", file=sys.stderr)
    page = write(arguments.run, arguments.out)
    shared.show(arguments, {"report": str(page)}, str(page))
    return 0
