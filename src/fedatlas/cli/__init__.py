"""The command line: a verb is a file of this package, whose functions are a few lines that call the library.

Nothing heavy is imported before a verb runs, and of all verbs only the one that is asked for defines its options.

A verb's module has NAME, SENTENCE and EXAMPLE, which `--help` shows, and two functions:

    options(parser)       adds the verb's options
    call(arguments)       does it; returns the exit status

A verb of several (`deploy`, `analyse`) has no `call`: its `options` adds a parser for each, with `verb` as its function.
"""

import argparse
import difflib
import os
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from io import TextIOWrapper
from typing import Any

from fedatlas import __version__
from fedatlas.cli.shared import INTERRUPTED
from fedatlas.core.errors import FedAtlasError

VERBS = (
    "demo",
    "init",
    "describe",
    "plan",
    "check",
    "run",
    "watch",
    "extend",
    "evaluate",
    "predict",
    "export",
    "report",
    "compare",
    "analyse",
    "deploy",
    "audit",
    "listing",
    "schema",
)
"""The modules of the verbs, in the order of `--help`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a verb; returns the exit status: 0, 1 for an error the user can mend, 2 for wrong usage."""
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":
        # a terminal may lack letters that we print, and a path may hold what is no letter
        sys.stdout.reconfigure(errors="backslashreplace")
    argv = sys.argv[1:] if argv is None else argv
    arguments = parser(argv).parse_args(argv)
    try:
        return int(arguments.verb(arguments) or 0)
    except FedAtlasError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output has gone, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:  # a folder that cannot be written, a disk that is full
        print(f"error: {error.filename or 'file'}: {error.strerror or error}", file=sys.stderr)
        return 1
    except RuntimeError as error:
        if not str(error).startswith("Symlink loop"):  # pathlib's, of links that lead to themselves
            raise
        print(f"error: {error}; correct the path", file=sys.stderr)
        return 1


def parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """All verbs with a sentence each, and the options of the one that argv names."""
    top = argparse.ArgumentParser(
        prog="fedatlas",
        description="One model that knows every class, from sites that each labelled only some.",
    )
    top.add_argument("--version", action="version", version=f"fedatlas {__version__}")
    verbs = top.add_subparsers(title="verbs", required=True, metavar="VERB", parser_class=_Verb)
    for name in VERBS:
        module = import_module(f"fedatlas.cli.{name}")
        made = verbs.add_parser(
            module.NAME,
            help=module.SENTENCE,
            description=module.SENTENCE,
            epilog=f"example:\n  {module.EXAMPLE}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if module.NAME in argv:
            made.set_defaults(verb=getattr(module, "call", None))
            module.options(made)
    return top


class _Verb(argparse.ArgumentParser):
    """Takes options before, between and behind the files of a verb: `predict RUN -o out/ SCAN` as well as `predict RUN SCAN -o out/`."""

    _intermixed = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # type: ignore[override]
        if self._intermixed:  # called by the method below
            return super().parse_known_args(args, namespace)
        if self._subparsers is not None:  # a verb of several
            found, unknown = super().parse_known_args(args, namespace)
        else:
            self._intermixed = True
            try:
                found, unknown = self.parse_known_intermixed_args(args, namespace)
            finally:
                self._intermixed = False
        if unknown:  # said here, where the usage names what the verb takes
            self.error(
                f"{' '.join(unknown)}: not known{self._hint(unknown[0], found)} (the usage above shows what is allowed)"
            )
        return found, unknown

    def _hint(self, given: str, found: argparse.Namespace) -> str:
        """A hint at how a key of the file is overridden, or at the option whose name is nearest to the one that was given. found:
        what was understood of the command line."""
        flags = [action.option_strings[0] for action in self._actions if action.dest == "override"]
        for text in found.override if flags else ():
            if any(text.count(opened) > text.count(closed) for opened, closed in ("{}", "[]")):
                return f"; quote a value that has spaces, as {flags[0]} '{text} …'"
        if flags and re.match(r"[A-Za-z][\w.-]*=", given):
            return f"; a key of the file is overridden by {flags[0]} {given}"
        near = difflib.get_close_matches(given.partition("=")[0], self._option_string_actions, n=1)
        return f"; did you mean {near[0]}?" if near else ""
