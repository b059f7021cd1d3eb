"""The command line: every verb is a few lines that call the library. Nothing heavy is imported before a verb."""

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fedatlas import __version__
from fedatlas.core.errors import FedAtlasError

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

    def another_kind(made: argparse.ArgumentParser) -> None:
        made.add_argument(
            "--anyway",
            action="store_true",
            help="go on with images of another kind than the model was trained on",
        )

    def quiet(made: argparse.ArgumentParser) -> None:
        made.add_argument("--quiet", action="store_true", help="show no progress on the terminal")

    def postprocess(made: argparse.ArgumentParser, sentence: str) -> None:
        made.add_argument(
            "--postprocess",
            action="store_true",
            help=f"{sentence} (segmentation): the run's evaluation.postprocess, or else holes are filled and components "
            "under 20 %% of the largest of their class removed",
        )

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
    made.add_argument(
        "--resume", action="store_true", help="go on from the last complete round, whatever engine made it"
    )
    made.add_argument(
        "--engine",
        default="local",
        choices=["local", "nvflare", "flower", "nvflare-local", "flower-local"],
        help="how sites are reached; …-local starts real servers and clients on this machine (default: local)",
    )
    made.add_argument("--deploy", type=Path, help="the deployment's folder, with --engine nvflare or flower")
    made.add_argument("--id", help="name of the run's folder (default: the file's name and hash)")
    made.add_argument(
        "--data-changed",
        action="store_true",
        help="with --resume: go on though a site's data are not those with which the run began",
    )
    as_json(made)

    made = verb(
        "evaluate",
        evaluate,
        "Score a trained model on any folder with ground truth.",
        "fedatlas evaluate runs/demo-1a2b3c4d --data site-x/",
    )
    made.add_argument("run", type=Path, help="the run folder")
    made.add_argument(
        "--data", type=Path, required=True, help="a folder as a site has it; its layout: --format"
    )
    made.add_argument("--table", default="dataset.json", help="file in that folder with the label table")
    made.add_argument("--labels", default="labelsTr", help="folder of training labels in it")
    made.add_argument("--test-labels", default="labelsTs", help="folder of test labels in it")
    made.add_argument(
        "--format",
        help="layout of the folder, one that `fedatlas list datasets` names; default: csv for findings of whole images, "
        "auto (nnunet, msd or monai) for segmentation",
    )
    made.add_argument(
        "--reading",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an option of that format, as table=labels.csv, patient=subject or mask_suffix=_mask",
    )
    made.add_argument(
        "--alias",
        action="append",
        default=[],
        metavar="THEIRS=OURS",
        help="another name of a class or finding",
    )
    made.add_argument("--model", default="best", help="best, last or local/<site> (default: best)")
    made.add_argument("--out", type=Path, help="write all rows to this CSV file")
    made.add_argument("--device", help="cpu, cuda, cuda:0, … (default: that of the run, if it is here)")
    another_kind(made)
    quiet(made)
    postprocess(made, "score once more after post-processing")
    as_json(made)

    made = verb(
        "predict",
        predict,
        "Segment scans or pictures, in their own geometry, or tell the findings of images.",
        "fedatlas predict runs/demo-1a2b3c4d scan.nii.gz -o out/",
    )
    made.add_argument("run", type=Path, help="the run folder")
    made.add_argument(
        "scan",
        type=Path,
        nargs="+",
        help="scans: NIfTI files, those of several channels joined by commas; pictures: PNG, JPEG, TIFF, BMP, GIF or DICOM; "
        "findings: PNG, JPEG or DICOM",
    )
    made.add_argument(
        "-o",
        "--out",
        type=Path,
        required=True,
        help="folder for the result. Scans: a label map each; pictures: labels/<name>.png or masks/<class>/<name>.png, and "
        "predictions.csv; both: classes.json. Findings: findings.csv",
    )
    made.add_argument("--device", help="cpu, cuda, cuda:0, … (default: that of the run, if it is here)")
    made.add_argument("--model", default="best", help="best, last or local/<site> (default: best)")
    made.add_argument("--overwrite", action="store_true", help="replace results that are there already")
    another_kind(made)
    quiet(made)
    postprocess(made, "write labels after post-processing")
    as_json(made)

    made = verb(
        "report", report, "Write a run's report, one HTML file.", "fedatlas report runs/demo-1a2b3c4d"
    )
    made.add_argument("run", type=Path, help="the run folder")
    made.add_argument("--out", type=Path, help="where to write it (default: report.html in the run folder)")
    as_json(made)

    made = verb(
        "compare",
        compare,
        "Train several arms with several seeds under one budget, and make their tables.",
        "fedatlas compare comparison.yaml --profile full --data DIR --table results.md",
    )
    made.add_argument(
        "files",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="a comparison file, or federation files, each an arm",
    )
    made.add_argument("--profile", help="a profile of the comparison file")
    made.add_argument("--data", type=Path, metavar="DIR", help="folder of the sites whose paths are relative")
    made.add_argument("--runs", type=Path, default=Path("runs"), help="folder of all runs (default: runs)")
    made.add_argument("--seeds", type=int, metavar="N", help="how many seeds (default: as the file says)")
    made.add_argument("--arms", metavar="A,B", help="train only these; the tables hold all")
    made.add_argument("--workers", type=int, metavar="N", help="worker processes, in place of engine.workers")
    made.add_argument(
        "--table",
        type=Path,
        metavar="FILE.md",
        help="write the tables between the comparison's marks of a page",
    )
    made.add_argument("--only-table", action="store_true", help="train nothing")
    as_json(made)

    _analyse_verbs(verb, as_json)

    _deploy_verbs(verb, federation)

    made = verb(
        "audit",
        audit,
        "Show what left a hospital: when, what, how many bytes, which digest.",
        "fedatlas audit deploy/site-a",
    )
    made.add_argument("folder", type=Path, help="a hospital's folder, a site's in a run, or a run")
    made.add_argument("--full", action="store_true", help="every tensor with its shape")
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


def _analyse_verbs(verb: Any, as_json: Any) -> None:
    """`fedatlas analyse …`: loss landscape, similarity of models, membership inference."""
    top = verb(
        "analyse", None, "Analyse the models of a run.", "fedatlas analyse hessian runs/demo-1a2b3c4d --top 5"
    )
    kinds = top.add_subparsers(title="kinds", required=True, metavar="KIND")

    def part(name: str, sentence: str) -> Any:
        made = kinds.add_parser(name, help=sentence, description=sentence)
        made.set_defaults(verb=analyse, kind=name, keys=[])
        made.add_argument("run", type=Path, help="the run folder")
        made.add_argument("--sites", help="only these, joined by commas (default: all that train)")
        made.add_argument(
            "--data",
            action="append",
            default=[],
            metavar="SITE=PATH",
            help="where a site's data lie, if not where the run's file says",
        )
        made.add_argument("--device", help="cpu, cuda, cuda:0, … (default: that of the run, if it is here)")
        as_json(made)

        def add(flag: str, help: str, **how: Any) -> None:
            made.get_default("keys").append(made.add_argument(flag, help=help, **how).dest)

        add("--seed", "all that is random follows from it (0)", type=int)
        return add

    models = "best, last, local (each site's own), joined by commas (best, else last)"
    labels = {"choices": ["annotated", "reference"]}
    for name, sentence in (
        ("landscape", "The loss around a model, over a plane of two random directions, per site."),
        ("hessian", "How the loss of a model curves: eigenvalues, trace, spectral density, per site."),
    ):
        add = part(name, sentence)
        add("--model", models)
        add("--labels", "annotated: as training saw; reference: all with a truth (annotated)", **labels)
        add("--batches", f"batches of a site ({4 if name == 'landscape' else 2})", type=int)
        add("--batch", "samples of a batch (8)", type=int)
        if name == "landscape":
            add("--grid", "points along each direction (11)", type=int)
            add("--reach", "the largest step, in units of the weights' own norm (1)", type=float)
            add("--level", "flat is a loss at most this above the model's own (0.1)", type=float)
            continue
        add("--top", "eigenvalues (5)", type=int)
        add("--steps", "the most products that these may take (40)", type=int)
        add("--tolerance", "of their error, in parts of the largest (0.001)", type=float)
        add("--samples", "products for the trace (20)", type=int)
        add("--runs", "random vectors for the density (1)", type=int)
        add("--density", "products for each of them (40)", type=int)
        add("--points", "points at which the density is told (201)", type=int)

    add = part("cka", "How alike models are, layer by layer, in their parameters and their activations.")
    add("--model", "best, last, local, joined by commas (best, else last; and local, if there are)")
    add("--against", "another run of the same net, whose models are compared too", metavar="RUN")
    add("--on", "what of a layer (both)", choices=["parameters", "activations", "both"])
    add("--images", "patches, or images, for activations (16)", type=int)
    add("--cells", "cells along every axis, between layers of one model (4)", type=int)

    add = part("membership", "Can an attacker tell a model's training cases from others?")
    add("--model", "the target: local, best or last (local, if there are)", choices=["local", "best", "last"])
    add("--pool", "others: of all sites, or the target's own (all)", choices=["all", "own"])
    add("--labels", "ground truth (reference)", **labels)
    add("--predictions", "whose the attack is tested on (target)", choices=["target", "shadow"])
    add("--image", "let the attack see the image, too", action="store_true", default=None)
    add("--cells", "cells along every axis to which maps are averaged (12)", type=int)
    add("--steps", "training steps of the shadow (200)", type=int)
    add("--attack", "training steps of the attack (300)", type=int)
    add("--cases", "the most cases of a site and split (all)", type=int)


def _deploy_verbs(verb: Any, federation: Any) -> None:
    """`fedatlas deploy …`: the folders of a federation across machines, and their keys."""
    top = verb(
        "deploy", None, "A federation across machines.", "fedatlas deploy init federation.yaml -o deploy/"
    )
    verbs = top.add_subparsers(title="verbs", required=True, metavar="VERB")

    def part(name: str, function: Any, sentence: str) -> argparse.ArgumentParser:
        made = verbs.add_parser(name, help=sentence, description=sentence)
        made.set_defaults(verb=function)
        return made

    made = part("init", deploy_init, "Make a folder per party, with keys and certificates, here and offline.")
    made.add_argument("federation", type=Path, help="the federation file (YAML)")
    made.add_argument(
        "--override", action="append", default=[], metavar="KEY.PATH=VALUE", help="override a key of the file"
    )
    made.add_argument("-o", "--out", type=Path, required=True, help="the deployment's folder; must be new")
    made.add_argument("--engine", choices=["nvflare", "flower"], default="nvflare", help="default: nvflare")
    made.add_argument(
        "--host", default="localhost", help="name or address of the server, as hospitals reach it (localhost)"
    )
    made.add_argument("--port", type=int, default=8002, help="the one port that hospitals reach (8002)")
    made.add_argument(
        "--admin-port", type=int, default=8003, help="for the coordinator's own machine only (8003)"
    )
    made.add_argument("--days", type=int, default=365, help="how long certificates are valid (365)")

    made = part("start", deploy_start, "Run a party in the foreground; its start.sh calls this.")
    made.add_argument("kit", type=Path, help="the party's folder")
    made.add_argument(
        "--data", action="append", default=[], metavar="PATH", help="a hospital's data; the path stays there"
    )
    made.add_argument("--device", help="where this site trains: cpu, cuda, cuda:0, … (default: cpu)")
    made.add_argument("--case-names", action="store_true", help="send names of cases instead of pseudonyms")
    made.add_argument("--texts", action="store_true", help="send the text of errors, not only their code")
    made.add_argument("--state", type=Path, help="the site's private folder (default: the kit)")
    made.add_argument("--one-run", action="store_true", help=argparse.SUPPRESS)
    made.add_argument("--cache", type=Path, help="folder of preprocessed cases (default: in the kit)")

    made = part(
        "accept", deploy_accept, "Take another federation file into a party's folder, with the difference."
    )
    made.add_argument("kit", type=Path, help="the party's folder")
    made.add_argument("federation", type=Path, help="the federation file that this party agrees to")

    made = part(
        "renew", deploy_renew, "Make a new private key in a party's folder, and what to send for signing."
    )
    made.add_argument("kit", type=Path, help="the party's folder")

    made = part("sign", deploy_sign, "At the coordinator: answer what `renew` made.")
    made.add_argument("deploy", type=Path, help="the deployment's folder")
    made.add_argument("request", type=Path, help="the file from the party")
    made.add_argument("-o", "--out", type=Path, required=True, help="folder for the answer")
    made.add_argument("--days", type=int, default=365, help="how long the certificate is valid (365)")

    made = part("install", deploy_install, "Take what the coordinator signed into use.")
    made.add_argument("kit", type=Path, help="the party's folder")
    made.add_argument("answer", type=Path, help="the file from the coordinator")


def deploy_init(arguments: argparse.Namespace) -> int:
    from fedatlas.federation.yaml import require_known

    require_known(arguments.federation, arguments.override)
    from fedatlas.federation.deploy import init
    from fedatlas.federation.file import load_federation

    federation = load_federation(arguments.federation, arguments.override)
    kits = init(
        federation,
        arguments.out,
        engine=arguments.engine,
        host=arguments.host,
        port=arguments.port,
        admin_port=arguments.admin_port,
        days=arguments.days,
    )
    print(f"{kits[0]}: for the coordinator; start it with {kits[0] / 'start.sh'}")
    for kit in kits[1:]:
        print(
            f"{kit}: move it to {kit.name} (it holds a private key); there, start.sh --data /path/of/the/data"
        )
    print(f"{arguments.out / 'authority'}: signs certificates; keep it with the coordinator, and offline")
    print(f"then: fedatlas run {arguments.federation} --engine {arguments.engine} --deploy {arguments.out}")
    return 0


def deploy_start(arguments: argparse.Namespace) -> int:
    from fedatlas.federation.deploy import read_kit, start

    data = {}
    for text in arguments.data:
        name, equals, path = text.partition("=")
        data |= {name: path} if equals and "/" not in name else {read_kit(arguments.kit)["party"]: text}
    start(
        arguments.kit,
        data,
        lambda text: print(text, flush=True),
        state=arguments.state,
        one_run=arguments.one_run,
        cache=arguments.cache,
        case_names=arguments.case_names,
        texts=arguments.texts,
        device=arguments.device,
    )
    return 0


def deploy_accept(arguments: argparse.Namespace) -> int:
    from fedatlas.federation.deploy import accept

    accept(arguments.kit, arguments.federation, print)
    return 0


def deploy_renew(arguments: argparse.Namespace) -> int:
    from fedatlas.federation.deploy import adapter, read_kit

    request = adapter(read_kit(arguments.kit)["engine"]).renew(arguments.kit)
    print(
        f"{request}: send this to the coordinator; it holds no secret. The new key stays in {arguments.kit}"
    )
    return 0


def deploy_sign(arguments: argparse.Namespace) -> int:
    from fedatlas.federation.deploy import adapter, read_kit

    engine = adapter(read_kit(arguments.deploy / "server")["engine"])
    made = engine.sign(arguments.request, arguments.deploy / "authority", arguments.deploy, arguments.days)
    arguments.out.mkdir(parents=True, exist_ok=True)
    answer = shutil.copy(made, arguments.out / made.name)
    print(f"{answer}: send this back; there, `fedatlas deploy install KIT {made.name}`")
    return 0


def deploy_install(arguments: argparse.Namespace) -> int:
    from fedatlas.federation.deploy import adapter, read_kit

    adapter(read_kit(arguments.kit)["engine"]).install(arguments.kit, arguments.answer)
    print(f"{arguments.kit}: uses the new key from its next start on")
    return 0


def analyse(arguments: argparse.Namespace) -> int:
    from fedatlas.analysis.runs import analyse as run_analysis

    options = {key: value for key in arguments.keys if (value := getattr(arguments, key)) is not None}
    several = {"sites": arguments.sites}
    if arguments.kind != "membership":
        several["model"] = options.pop("model", None)
    options |= {key: tuple(value.split(",")) for key, value in several.items() if value}
    data = {}
    for text in arguments.data:
        site, equals, path = text.partition("=")
        if not equals:
            raise FedAtlasError(f"--data {text}: expected SITE=PATH, as in --data site-a=/path/of/the/data")
        data[site] = path
    out = sys.stderr if arguments.json else sys.stdout
    found = run_analysis(
        arguments.kind,
        arguments.run,
        options,
        device=arguments.device,
        data=data,
        tell=lambda text: print(text, file=out, flush=True),
    )
    if arguments.json:
        print(json.dumps(found, indent=1))
    else:
        file = arguments.run / "analysis" / f"{arguments.kind}.json"
        print(f"numbers: {file}\nfigures: in the report, with `fedatlas report {arguments.run}`")
    return 0


def audit(arguments: argparse.Namespace) -> int:
    from fedatlas.federation.audit import logs_of, text_of

    logs = logs_of(arguments.folder)
    if arguments.json:
        print(json.dumps(logs, indent=1))
    else:
        print(text_of(logs, full=arguments.full))
    return 1 if any(line["broken"] for lines in logs.values() for line in lines) else 0


def check(arguments: argparse.Namespace) -> int:
    from fedatlas.federation.yaml import require_known

    require_known(arguments.federation, arguments.override)
    from fedatlas.federation.check import check_federation_file, text_of

    result = check_federation_file(arguments.federation, arguments.override, arguments.runs)
    print(json.dumps(result, indent=1) if arguments.json else text_of(result))
    return 1 if any(problem["fatal"] for problem in result["problems"]) else 0


def run(arguments: argparse.Namespace) -> int:
    from fedatlas.federation.yaml import require_known

    require_known(arguments.federation, arguments.override)
    from fedatlas.federation.file import load_federation
    from fedatlas.federation.session import run_federation, run_path
    from fedatlas.report.conclusion import lines
    from fedatlas.report.page import write
    from fedatlas.report.tables import read

    federation = load_federation(arguments.federation, arguments.override)
    path = run_path(federation, arguments.runs, arguments.id)
    gather = _gather(arguments.engine, arguments.deploy, arguments.data_changed)
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
            gather=gather,
        )
    except KeyboardInterrupt:
        progress.tell(f"stopped; complete rounds are kept in {path}. Go on with --resume")
        return INTERRUPTED
    page = write(path)
    if arguments.json:
        from fedatlas.federation.session import summary

        print(json.dumps(summary(path) | {"report": str(page)}, indent=1))
    else:
        progress.tell("\n".join(lines(read(path), page)))
    return 0


def _gather(engine: str, deploy: Path | None, data_changed: bool) -> Any:
    """How the sites of a run are found."""
    from fedatlas.federation import deploy as across
    from fedatlas.federation.session import gather_local

    name, _, local = engine.partition("-")
    if (name != "local" and not local) != (deploy is not None):
        raise FedAtlasError(
            f"--engine {engine} needs --deploy, the folder that `fedatlas deploy init` made"
            if deploy is None
            else f"--deploy goes with --engine nvflare or flower, not with {engine}"
        )
    if deploy is not None:
        return across.gather(name, deploy, data_changed=data_changed)
    if name == "local":
        return partial(gather_local, data_changed=data_changed)
    return across.gather_trial(name, data_changed=data_changed)


def evaluate(arguments: argparse.Namespace) -> int:
    from fedatlas.federation.trained import evaluate_folder, evaluation_table, task_name
    from fedatlas.federation.trained_images import evaluate_images, image_table

    aliases = {}
    for text in arguments.alias:
        theirs, equals, ours = text.partition("=")
        if not equals:
            raise FedAtlasError(f"--alias {text}: expected THEIRS=OURS, as in --alias cord=spinal_cord")
        aliases[theirs] = ours
    of_images = task_name(arguments.run) == "classification"
    chosen: dict[str, Any] = {"model": arguments.model, "out": arguments.out, "device": arguments.device}
    chosen |= {"anyway": arguments.anyway, "warn": _warn}
    reading = {}
    for text in arguments.reading:
        key, equals, value = text.partition("=")
        if not equals:
            raise FedAtlasError(f"--reading {text}: expected KEY=VALUE, as in --reading table=labels.csv")
        reading[key] = _plain(value)
    layout: dict[str, Any] = {
        "format": arguments.format or ("csv" if of_images else "auto"),
        "reading": reading,
    }
    with Counter(arguments.quiet) as counter:
        chosen["seen"] = counter.seen
        if of_images:
            _only_of_voxels(arguments)
            rows, ignored = evaluate_images(
                arguments.run, arguments.data, aliases=aliases, **layout, **chosen
            )
        else:
            rows, ignored = evaluate_folder(
                arguments.run,
                arguments.data,
                aliases=aliases,
                table=arguments.table,
                labels=arguments.labels,
                test_labels=arguments.test_labels,
                post=arguments.postprocess,
                **layout,
                **chosen,
            )
    if arguments.json:
        print(json.dumps({"rows": rows, "ignored": ignored}, indent=1))
    else:
        print(image_table(rows) if of_images else evaluation_table(rows))
        if ignored:
            print(f"not scored, the model does not know them: {', '.join(ignored)}")
    return 0


def _plain(text: str) -> Any:
    """A value as a federation file would hold it."""
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def predict(arguments: argparse.Namespace) -> int:
    from fedatlas.federation.trained import predict_scans, task_name

    if task_name(arguments.run) == "classification":
        return _predict_images(arguments)
    scans = [_files_of(scan) for scan in arguments.scan]
    chosen = _prediction(arguments) | {"post": arguments.postprocess}
    with Counter(arguments.quiet) as counter:
        result = predict_scans(arguments.run, scans, arguments.out, **chosen, seen=counter.seen)
    if arguments.json:
        print(json.dumps(result, indent=1))
    else:
        for entry in result["scans"]:
            found = [f"{name} {volume:.1f} ml" for name, volume in entry["millilitres"].items()]
            found += [f"{name} {count:,} pixels" for name, count in entry.get("pixels", {}).items()]
            found += [f"{name} {p:.3f}" for name, p in entry.get("findings", {}).items()]
            print(f"{entry['labels']}: {', '.join(found) or 'nothing found'}")
    return 0


def _prediction(arguments: argparse.Namespace) -> dict[str, Any]:
    given = {name: getattr(arguments, name) for name in ("model", "device", "overwrite", "anyway")}
    return given | {"warn": _warn}


def _files_of(scan: Path) -> list[Path]:
    """The files of one scan, joined by commas, unless the comma is in the name of a file that is there."""
    text = str(scan)
    return [scan] if "," not in text or os.path.exists(text) else [Path(part) for part in text.split(",")]


def _warn(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


def _only_of_voxels(arguments: argparse.Namespace) -> None:
    if arguments.postprocess:
        raise FedAtlasError(
            f"--postprocess: processes outlines, and {arguments.run} is a run of findings of whole images; leave it out"
        )


def _predict_images(arguments: argparse.Namespace) -> int:
    from fedatlas.federation.trained_images import predict_images

    _only_of_voxels(arguments)
    with Counter(arguments.quiet) as counter:
        result = predict_images(
            arguments.run, arguments.scan, arguments.out, seen=counter.seen, **_prediction(arguments)
        )
    if arguments.json:
        print(json.dumps(result, indent=1))
        return 0
    for entry in result["images"]:
        told = {name: f"{p:.3f}" for name, p in entry["probability"].items() if p is not None}
        found = [
            name + (" *" if entry["present"].get(name) else "") + f" {text}" for name, text in told.items()
        ]
        print(f"{entry['image']}: {', '.join(found)}")
    if any(limit is not None for limit in result["thresholds"].values()):
        print("* at or above the threshold that was fitted in the run")
    for name, reason in result["no_threshold"].items():
        print(f"{name}: probabilities only, no threshold ({reason})")
    print(f"table: {result['table']}")
    return 0


def compare(arguments: argparse.Namespace) -> int:
    from fedatlas.compare import (
        check_page,
        collect,
        load_comparison,
        markdown,
        run_comparison,
        write_page,
        write_table,
    )
    from fedatlas.report.verdict import verdict

    for name in ("seeds", "workers"):
        value = getattr(arguments, name)
        if value is not None and value < (1 if name == "seeds" else 0):
            raise FedAtlasError(f"--{name} {value}: must be at least {1 if name == 'seeds' else 0}")
    comparison = load_comparison(
        arguments.files,
        profile=arguments.profile,
        data=arguments.data,
        runs=arguments.runs,
        seeds=arguments.seeds,
        workers=arguments.workers,
    )
    if arguments.table:
        check_page(comparison, arguments.table)
    failed: dict[str, str] = {}
    if not arguments.only_table:
        progress = Progress(0, sys.stderr if arguments.json else sys.stdout)
        arms = arguments.arms.split(",") if arguments.arms else None
        try:
            failed = run_comparison(comparison, arms=arms, tell=progress.tell, passing=progress.passing)
        except KeyboardInterrupt:
            progress.tell("stopped; complete rounds are kept. The same command goes on")
            return INTERRUPTED
    found = collect(comparison)
    if arguments.table:
        write_table(comparison, found, arguments.table)
    page = write_page(comparison, found)
    if arguments.json:
        print(json.dumps(found | {"failed": failed, "page": str(page)}, indent=1))
    else:
        told = "\n".join(verdict(found))
        print(f"{markdown(found)}\n{told}\n\npage: {page}")
    for name in failed:
        print(f"failed: {name}", file=sys.stderr)
    return 1 if failed else 0


def report(arguments: argparse.Namespace) -> int:
    from fedatlas.compare.figures import run_figures
    from fedatlas.report.page import write

    if (arguments.run / "run.json").exists():
        try:
            run_figures(arguments.run)
        except FedAtlasError as error:  # the report of what there is can be made
            print(f"no figure pages: {str(error).splitlines()[0]}", file=sys.stderr)
    page = write(arguments.run, arguments.out)
    print(json.dumps({"report": str(page)}) if arguments.json else page)
    return 0


def listing(arguments: argparse.Namespace) -> int:
    from fedatlas.federation.yaml import known

    kept = known()
    if kept is None:
        from fedatlas.federation.catalogue import catalogue

        entries = catalogue(arguments.what)
    else:
        entries = kept["registered"][arguments.what]
    if arguments.json:
        print(json.dumps(entries, indent=1))
    else:
        width = max(len(name) for name in entries)
        for name, sentence in entries.items():
            print(f"{name:{width}}  {sentence}")
    return 0


def schema(arguments: argparse.Namespace) -> int:
    from fedatlas.federation.yaml import known

    kept = known()
    if kept is None:
        from fedatlas.federation.file import json_schema

        print(json.dumps(json_schema(), indent=1))
    else:
        print(json.dumps(kept["schema"], indent=1))
    return 0


TITLES = {"dice": "Dice", "auroc": "AUROC"}


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
        from fedatlas.report.tables import main_loss

        if self.live:
            told = main_loss(log)
            loss = f" loss {log[told]:.3f}" if told else ""
            self._transient(f"  {site}: {function}{loss}, {cost['seconds']:.1f} s")

    def passing(self, text: str) -> None:
        """What a terminal shows until the next line."""
        if self.live:
            self._transient(f"  {text.splitlines()[0]}")

    def round(self, record: Any, best: Any) -> None:
        from fedatlas.report.tables import main_loss

        if record.number == 0:
            self.began = time.monotonic()
            return
        now = time.monotonic()
        self.durations.append(now - self.began)
        self.began = now
        sites = record.log["sites"]
        told = main_loss(term for log in sites.values() for term in log)
        losses = "  ".join(f"{site} {log[told]:.3f}" for site, log in sorted(sites.items()) if told in log)
        which = "loss" if told in (None, "loss") else f"{told} loss"
        text = f"round {record.number:>{len(str(self.rounds))}}/{self.rounds}  {which} {losses}"
        if record.rows and best.round:
            score = f"{best.last_score:.3f}" if best.last_score is not None else "not defined"
            text += f"  validation {TITLES.get(best.metric, best.metric)} {score} (best {best.score:.3f} in round {best.round})"
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


class Counter:
    """What `predict` and `evaluate` show while they work, on stderr and only on a terminal: the case that is next, how
    many there are, and the time left."""

    def __init__(self, quiet: bool) -> None:
        self.out, self.live = sys.stderr, sys.stderr.isatty() and not quiet
        self.began: float | None = None

    def seen(self, done: int, total: int, name: str) -> None:
        """Before a case: how many are done, of how many. The first case tells nothing of the time left."""
        if not self.live:
            return
        if self.began is None:
            self.began = time.monotonic()
        left = (time.monotonic() - self.began) / done * (total - done) if done else None
        clock = "" if left is None else f", {_clock(left)} left"
        print(
            f"\r\x1b[2K  {min(done + 1, total)} of {total}{clock}  {name}", end="", file=self.out, flush=True
        )

    def __enter__(self) -> "Counter":
        return self

    def __exit__(self, *exception: object) -> None:
        if self.live:
            print("\r\x1b[2K", end="", file=self.out, flush=True)


def _clock(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    minutes, rest = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


if __name__ == "__main__":
    sys.exit(main())
