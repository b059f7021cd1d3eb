"""`fedatlas deploy …`: the folders of a federation across machines, and their keys."""

import argparse
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

from fedatlas.cli import shared
from fedatlas.core.errors import FedAtlasError
from fedatlas.transport.deployment import ENGINES

NAME = "deploy"
SENTENCE = "A federation across machines."
EXAMPLE = "fedatlas deploy init federation.yaml -o deploy/"


def options(made: argparse.ArgumentParser) -> None:
    verbs = made.add_subparsers(title="verbs", required=True, metavar="VERB")

    def part(
        name: str, function: Callable[[argparse.Namespace], int], sentence: str
    ) -> argparse.ArgumentParser:
        made = verbs.add_parser(name, help=sentence, description=sentence)
        made.set_defaults(verb=function)
        return made

    one = part("init", call_init, "Make a folder per party, with keys and certificates, here and offline.")
    shared.federation(one, "--override")
    one.add_argument("-o", "--out", type=Path, required=True, help="the deployment's folder; must be new")
    one.add_argument("--engine", choices=sorted(ENGINES), default="nvflare", help="default: nvflare")
    one.add_argument(
        "--host", default="localhost", help="name or address of the server, as hospitals reach it (localhost)"
    )
    one.add_argument("--port", type=int, default=8002, help="the one port that hospitals reach (8002)")
    one.add_argument(
        "--admin-port", type=int, default=8003, help="for the coordinator's own machine only (8003)"
    )
    one.add_argument("--days", type=int, default=365, help="how long certificates are valid (365)")

    one = part("start", call_start, "Run a party in the foreground; its start.sh calls this.")
    one.add_argument("kit", type=Path, help="the party's folder")
    one.add_argument(
        "--data", action="append", default=[], metavar="PATH", help="a hospital's data; the path stays there"
    )
    one.add_argument("--device", help="where this site trains: cpu, cuda, cuda:0, … (default: cpu)")
    one.add_argument("--case-names", action="store_true", help="send names of cases instead of pseudonyms")
    one.add_argument("--texts", action="store_true", help="send the text of errors, not only their code")
    one.add_argument("--state", type=Path, help="the site's private folder (default: the kit)")
    one.add_argument("--one-run", action="store_true", help=argparse.SUPPRESS)
    one.add_argument("--parent", type=int, help=argparse.SUPPRESS)
    one.add_argument("--cache", type=Path, help="folder of preprocessed cases (default: in the kit)")

    one = part(
        "accept", call_accept, "Take another federation file into a party's folder, with the difference."
    )
    one.add_argument("kit", type=Path, help="the party's folder")
    one.add_argument("federation", type=Path, help="the federation file that this party agrees to")

    one = part(
        "renew", call_renew, "Make a new private key in a party's folder, and what to send for signing."
    )
    one.add_argument("kit", type=Path, help="the party's folder")

    one = part("sign", call_sign, "At the coordinator: answer what `renew` made.")
    one.add_argument("deploy", type=Path, help="the deployment's folder")
    one.add_argument("request", type=Path, help="the file from the party")
    one.add_argument("-o", "--out", type=Path, required=True, help="folder for the answer")
    one.add_argument("--days", type=int, default=365, help="how long the certificate is valid (365)")

    one = part("install", call_install, "Take what the coordinator signed into use.")
    one.add_argument("kit", type=Path, help="the party's folder")
    one.add_argument("answer", type=Path, help="the file from the coordinator")


def call_init(arguments: argparse.Namespace) -> int:
    shared.require_known(arguments)
    if re.match(r"[\w.*-]+=", str(arguments.out)):
        raise FedAtlasError(
            f"-o {arguments.out}: is the folder of the deployment here; to override a key of the file use --override"
        )
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
    print(
        f"{arguments.out / 'authority'}: signs certificates and submits jobs; stays with the coordinator; "
        "`fedatlas run` needs it"
    )
    command = ["fedatlas", "run", str(arguments.federation)]
    command += [part for text in arguments.override for part in ("-o", text)]
    command += ["--engine", arguments.engine, "--deploy", str(arguments.out)]
    print(f"then: {shlex.join(command)}")
    if arguments.host == "localhost":
        print(
            "note: no --host: only parties on this machine reach the server, at localhost; for hospitals, give its name"
        )
    return 0


def call_start(arguments: argparse.Namespace) -> int:
    from fedatlas.federation.deploy import read_kit, start

    data: dict[str, str] = {}
    for text in arguments.data:
        name, equals, path = text.partition("=")
        if not equals or "/" in name:
            name, path = read_kit(arguments.kit)["party"], text
        if name in data:
            raise FedAtlasError(
                f"--data {text}: {data[name]} was given before; one folder holds the data of {name}"
            )
        data[name] = path
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
        parent=arguments.parent,
    )
    return 0


def call_accept(arguments: argparse.Namespace) -> int:
    from fedatlas.federation.deploy import accept

    accept(arguments.kit, arguments.federation, print)
    return 0


def call_renew(arguments: argparse.Namespace) -> int:
    from fedatlas.federation.deploy import adapter, read_kit

    request = adapter(read_kit(arguments.kit)["engine"]).renew(arguments.kit)
    print(
        f"{request}: send this to the coordinator; it holds no secret. The new key stays in {arguments.kit}"
    )
    return 0


def call_sign(arguments: argparse.Namespace) -> int:
    from fedatlas.federation.deploy import adapter, read_kit, require_days

    require_days(arguments.days)
    engine = adapter(read_kit(arguments.deploy / "server")["engine"])
    made = engine.sign(arguments.request, arguments.deploy / "authority", arguments.deploy, arguments.days)
    arguments.out.mkdir(parents=True, exist_ok=True)
    answer = shutil.copy(made, arguments.out / made.name)
    print(f"{answer}: send this back; there, `fedatlas deploy install KIT {made.name}`")
    return 0


def call_install(arguments: argparse.Namespace) -> int:
    from fedatlas.federation.deploy import adapter, read_kit

    adapter(read_kit(arguments.kit)["engine"]).install(arguments.kit, arguments.answer)
    print(f"{arguments.kit}: uses the new key from its next start on")
    return 0
