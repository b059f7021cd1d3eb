"""The command line: every verb is a few lines that call the library. Nothing heavy is imported before a verb."""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedatlas import __version__
from fedatlas.errors import FedAtlasError

INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a verb; returns the exit status: 0, 1 for an error the user can mend, 2 for wrong usage."""
    arguments = parser().parse_args(argv)
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


def parser() -> argparse.ArgumentParser:
    """All verbs with their options and an example each."""
    top = argparse.ArgumentParser(
        prog="fedatlas",
        description="One model that knows every class, from sites that each labelled only some.",
    )
    top.add_argument("--version", action="version", version=f"fedatlas {__version__}")
    verbs = top.add_subparsers(title="verbs", required=True, metavar="VERB")

    def verb(name: str, function: Any, sentence: str, example: str) -> argparse.ArgumentParser:
        made = verbs.add_parser(
            name,
            help=sentence,
            description=sentence,
            epilog=f"example:\n  {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        made.set_defaults(verb=function)
        return made

    def federation(made: argparse.ArgumentParser) -> None:
        made.add_argument("federation", type=Path, help="the federation file (YAML)")
        made.add_argument(
            "-o",
            "--override",
            action="append",
            default=[],
            metavar="KEY.PATH=VALUE",
            help="override a key of the file",
        )
        made.add_argument(
            "--runs", type=Path, default=Path("runs"), help="folder of all runs (default: runs)"
        )

    def as_json(made: argparse.ArgumentParser) -> None:
        made.add_argument("--json", action="store_true", help="print the result as JSON")

    made = verb("check", check, "Read everything, train nothing.", "fedatlas check federation.yaml")
    federation(made)
    as_json(made)

    made = verb(
        "run",
        run,
        "Train a federation, evaluate it, write its report.",
        "fedatlas run federation.yaml -o rounds=20",
    )
    federation(made)
    made.add_argument("--resume", action="store_true", help="go on from the last complete round")
    made.add_argument("--id", help="name of the run's folder (default: the file's name and hash)")
    as_json(made)

    made = verb(
        "evaluate",
        evaluate,
        "Score a trained model on any folder with ground truth.",
        "fedatlas evaluate runs/demo-1a2b3c4d --data site-x/",
    )
    made.add_argument("run", type=Path, help="the run folder")
    made.add_argument(
        "--data", type=Path, required=True, help="a folder as a site has it (nnU-Net raw, MSD, MONAI)"
    )
    made.add_argument("--table", default="dataset.json", help="file in that folder with the label table")
    made.add_argument("--labels", default="labelsTr", help="folder of training labels in it")
    made.add_argument("--test-labels", default="labelsTs", help="folder of test labels in it")
    made.add_argument(
        "--alias", action="append", default=[], metavar="THEIRS=OURS", help="another name of a class"
    )
    made.add_argument("--model", default="best", help="best, last or local/<site> (default: best)")
    made.add_argument("--out", type=Path, help="write all rows to this CSV file")
    as_json(made)

    made = verb(
        "predict",
        predict,
        "Segment a scan, in its own geometry.",
        "fedatlas predict runs/demo-1a2b3c4d scan.nii.gz -o out/",
    )
    made.add_argument("run", type=Path, help="the run folder")
    made.add_argument(
        "scan",
        type=Path,
        nargs="+",
        help="NIfTI files; a scan of several channels: its files joined by commas",
    )
    made.add_argument("-o", "--out", type=Path, required=True, help="folder for label maps and classes.json")
    made.add_argument("--model", default="best", help="best, last or local/<site> (default: best)")
    as_json(made)

    made = verb(
        "report", report, "Write a run's report, one HTML file.", "fedatlas report runs/demo-1a2b3c4d"
    )
    made.add_argument("run", type=Path, help="the run folder")
    made.add_argument("--out", type=Path, help="where to write it (default: report.html in the run folder)")
    as_json(made)

    made = verb("list", listing, "List what is registered, a sentence each.", "fedatlas list methods")
    made.add_argument("what", choices=["methods", "nets", "datasets", "losses", "metrics"])
    as_json(made)

    made = verb(
        "schema",
        schema,
        "Print the JSON schema of the federation file.",
        "fedatlas schema > federation.schema.json",
    )
    return top


def check(arguments: argparse.Namespace) -> int:
    from fedatlas.check import check_federation_file, text_of

    result = check_federation_file(arguments.federation, arguments.override, arguments.runs)
    print(json.dumps(result, indent=1) if arguments.json else text_of(result))
    return 1 if any(problem["fatal"] for problem in result["problems"]) else 0


def run(arguments: argparse.Namespace) -> int:
    from fedatlas.experiment import load_federation
    from fedatlas.report.page import write
    from fedatlas.session import run_federation, run_path

    federation = load_federation(arguments.federation, arguments.override)
    path = run_path(federation, arguments.runs, arguments.id)
    out = sys.stderr if arguments.json else sys.stdout
    progress = Progress(federation.rounds, out)
    try:
        run_federation(
            federation,
            path,
            resume=arguments.resume,
            tell=progress.tell,
            watch=progress.site,
            after_round=progress.round,
        )
    except KeyboardInterrupt:
        progress.tell(f"stopped; complete rounds are kept in {path}. Go on with --resume")
        return INTERRUPTED
    page = write(path)
    if arguments.json:
        from fedatlas.session import summary

        print(json.dumps(summary(path) | {"report": str(page)}, indent=1))
    else:
        progress.tell(f"run:    {path}\nreport: {page}")
    return 0


def evaluate(arguments: argparse.Namespace) -> int:
    from fedatlas.trained import evaluate_folder, evaluation_table

    aliases = {}
    for text in arguments.alias:
        theirs, equals, ours = text.partition("=")
        if not equals:
            raise FedAtlasError(f"--alias {text}: expected THEIRS=OURS, as in --alias cord=spinal_cord")
        aliases[theirs] = ours
    rows, ignored = evaluate_folder(
        arguments.run,
        arguments.data,
        model=arguments.model,
        aliases=aliases,
        table=arguments.table,
        labels=arguments.labels,
        test_labels=arguments.test_labels,
        out=arguments.out,
    )
    if arguments.json:
        print(json.dumps({"rows": rows, "ignored": ignored}, indent=1))
    else:
        print(evaluation_table(rows))
        if ignored:
            print(f"not scored, the model does not know them: {', '.join(ignored)}")
    return 0


def predict(arguments: argparse.Namespace) -> int:
    from fedatlas.trained import predict_scans

    scans = [[Path(part) for part in str(scan).split(",")] for scan in arguments.scan]
    result = predict_scans(arguments.run, scans, arguments.out, model=arguments.model)
    if arguments.json:
        print(json.dumps(result, indent=1))
    else:
        for entry in result["scans"]:
            found = ", ".join(f"{name} {volume:.1f} ml" for name, volume in entry["millilitres"].items())
            print(f"{entry['labels']}: {found or 'nothing found'}")
    return 0


def report(arguments: argparse.Namespace) -> int:
    from fedatlas.report.page import write

    page = write(arguments.run, arguments.out)
    print(json.dumps({"report": str(page)}) if arguments.json else page)
    return 0


def listing(arguments: argparse.Namespace) -> int:
    from fedatlas.catalogue import catalogue

    entries = catalogue(arguments.what)
    if arguments.json:
        print(json.dumps(entries, indent=1))
    else:
        width = max(len(name) for name in entries)
        for name, sentence in entries.items():
            print(f"{name:{width}}  {sentence}")
    return 0


def schema(arguments: argparse.Namespace) -> int:
    from fedatlas.experiment import json_schema

    print(json.dumps(json_schema(), indent=1))
    return 0


class Progress:
    """What a run tells a person: a line per round, and on a terminal what is going on inside it."""

    def __init__(self, rounds: int, out: Any) -> None:
        self.rounds, self.out = rounds, out
        self.began = time.monotonic()
        self.durations: list[float] = []
        self.live = out.isatty()

    def tell(self, text: str) -> None:
        self._line(text)

    def site(self, site: str, function: str, log: dict[str, float], cost: dict[str, float]) -> None:
        if self.live:
            loss = f" loss {log['loss']:.3f}" if "loss" in log else ""
            self._transient(f"  {site}: {function}{loss}, {cost['seconds']:.1f} s")

    def round(self, record: Any, best: Any) -> None:
        if record.number == 0:
            self.began = time.monotonic()
            return
        now = time.monotonic()
        self.durations.append(now - self.began)
        self.began = now
        losses = "  ".join(
            f"{site} {log['loss']:.3f}" for site, log in sorted(record.log["sites"].items()) if "loss" in log
        )
        text = f"round {record.number:>{len(str(self.rounds))}}/{self.rounds}  loss {losses}"
        if record.rows and best.round:
            score = f"{best.last_score:.3f}" if best.last_score is not None else "not defined"
            text += f"  validation Dice {score} (best {best.score:.3f} in round {best.round})"
        for site, reason in record.log["lost"].items():
            text += f"\n  lost {site}: {reason}"
        recent = self.durations[-5:]
        left = (self.rounds - record.number) * sum(recent) / len(recent)
        self._line(f"{text}  {self.durations[-1]:.1f} s, {_clock(left)} left")

    def _line(self, text: str) -> None:
        clear = "\r\x1b[2K" if self.live else ""
        print(f"{clear}{text}", file=self.out, flush=True)

    def _transient(self, text: str) -> None:
        print(f"\r\x1b[2K{text}", end="", file=self.out, flush=True)


def _clock(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    minutes, rest = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


if __name__ == "__main__":
    sys.exit(main())
