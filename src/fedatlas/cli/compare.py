"""`fedatlas compare`: trains the arms of a comparison and makes its tables."""

import argparse
import json
import sys
from pathlib import Path

from fedatlas.cli import shared
from fedatlas.cli.progress import Progress
from fedatlas.core.errors import FedAtlasError

NAME = "compare"
SENTENCE = "Train several arms with several seeds under one budget, and make their tables."
EXAMPLE = "fedatlas compare comparison.yaml --profile full --data DIR --table results.md"


def options(made: argparse.ArgumentParser) -> None:
    made.add_argument(
        "files",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="a comparison file, or federation files, each an arm",
    )
    made.add_argument("--profile", help="a profile of the comparison file")
    made.add_argument("--data", type=Path, metavar="DIR", help="folder of the sites whose paths are relative")
    shared.runs(made)
    made.add_argument("--seeds", type=int, metavar="N", help="how many seeds (default: as the file says)")
    made.add_argument("--arms", metavar="A,B", help="train only these; the tables hold all")
    made.add_argument("--workers", type=int, metavar="N", help="worker processes, in place of engine.workers")
    made.add_argument("--device", help="where sites train (cpu, cuda, …), in place of engine.device")
    made.add_argument(
        "--table",
        type=Path,
        metavar="FILE.md",
        help="write the tables between the comparison's marks of a page",
    )
    made.add_argument("--only-table", action="store_true", help="train nothing")
    made.add_argument(
        "--against",
        metavar="ARM",
        help="show the differences to this arm, in place of the first one and of `references`; trains nothing and writes no page",
    )
    made.add_argument(
        "--measure",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a key of the file's `measure` for this once, as split=validation, known=false or sites=[a, b]; null: as by "
        "default. Trains nothing and writes no page",
    )
    made.add_argument(
        "--records",
        type=Path,
        metavar="DIR",
        help="keep what the tables need of finished runs, a small file each, and take from there what RUNS lacks",
    )
    shared.as_json(made)


def call(arguments: argparse.Namespace) -> int:
    from fedatlas.compare import (
        check_page,
        collect,
        load_comparison,
        markdown,
        run_comparison,
        use_records,
        write_page,
        write_table,
    )
    from fedatlas.report.verdict import verdict

    for name in ("seeds", "workers"):
        value = getattr(arguments, name)
        if value is not None and value < (1 if name == "seeds" else 0):
            raise FedAtlasError(f"--{name} {value}: must be at least {1 if name == 'seeds' else 0}")
    if arguments.only_table and arguments.arms is not None:
        raise FedAtlasError(
            f"--arms {arguments.arms}: chooses what is trained, and --only-table trains nothing; leave one of them out"
        )
    looks = [f"--against {arguments.against}"] if arguments.against is not None else []
    looks += [f"--measure {each}" for each in arguments.measure]
    for flag, given in (("--table", arguments.table), ("--arms", arguments.arms)) if looks else ():
        if given is not None:
            raise FedAtlasError(
                f"{flag} {given}: with {looks[0]} tables are shown, nothing is trained and no page is written; leave one of "
                "them out"
            )
    only_table = arguments.only_table or bool(looks)
    comparison = load_comparison(
        arguments.files,
        profile=arguments.profile,
        data=arguments.data,
        runs=arguments.runs,
        seeds=arguments.seeds,
        workers=arguments.workers,
        device=arguments.device,
        against=arguments.against,
        measure=shared.values("--measure", arguments.measure, "known=false"),
    )
    if arguments.table:
        check_page(comparison, arguments.table)
    failed: dict[str, str] = {}
    progress = Progress(0, sys.stderr if arguments.json else sys.stdout)
    after_run = use_records(comparison, arguments.records, progress.tell)
    if not only_table:
        arms = None if arguments.arms is None else arguments.arms.split(",")
        try:
            failed = run_comparison(
                comparison, arms=arms, tell=progress.tell, passing=progress.passing, after_run=after_run
            )
        except KeyboardInterrupt:
            progress.tell("stopped; complete rounds are kept. The same command goes on")
            return shared.INTERRUPTED
    tables = collect(comparison)
    arms_made = tables["arms"].values()
    if only_table and not any(made["seeds"] for made in arms_made):
        why = [problem for made in arms_made for problem in made["problems"]]
        raise FedAtlasError(
            f"{looks[0] if looks else '--only-table'}: no arm has a finished run in {comparison.folder}, and the tables would hold nothing; give the folder of the "
            "runs by --runs, or that of their records by --records"
            + "".join(f"\n{problem}" for problem in why[:1])
        )
    if arguments.table:
        write_table(comparison, tables, arguments.table)
    page = None if looks else str(write_page(comparison, tables))  # a page shows what its file asks
    if arguments.json:
        print(json.dumps(tables | {"failed": failed, "page": page}, indent=1))
    else:
        sentences = "\n".join(verdict(tables))
        print(f"{markdown(tables)}\n{sentences}" + (f"\n\npage: {page}" if page else ""))
    for name in failed:
        print(f"failed: {name}", file=sys.stderr)
    return 1 if failed else 0
