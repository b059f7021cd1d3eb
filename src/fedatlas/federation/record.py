"""run.json, the record of a run: what ran, on what, with which versions; and whether a folder is of this very run."""

import hashlib
import os
import platform
import subprocess
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml
from torch import nn

import fedatlas
from fedatlas.core.errors import RunFolderError
from fedatlas.core.tensors import n_bytes, tensors_of
from fedatlas.evaluation.evaluate import AFTER_TRAINING
from fedatlas.federation.design import Design, arithmetic, versions
from fedatlas.federation.file import (
    Federation,
    differences,
    extensible,
    flat_difference,
    hash_of,
    load_federation,
    resolved,
)
from fedatlas.federation.yaml import read_yaml
from fedatlas.transport.rounds import RunFolder, read_run, sealed, to_json
from fedatlas.transport.store import write_atomic

Tell = Callable[[str], None]


def is_finished(folder: RunFolder, federation: Federation) -> bool:
    """Was every round done, and the final evaluation written?"""
    done = folder.complete()[-1:] == [federation.rounds] and (folder.path / "rows.csv").exists()
    return done and (folder.path / "run.json").exists() and read_run(folder.path)["finished"] is not None


def changed_evaluation(folder: RunFolder, federation: Federation) -> list[str]:
    """The keys of the final evaluation in which a run folder differs from a federation, if it differs in nothing else and holds
    the state to go on from; else none. Such a run is evaluated again, with the bits of one that had these options from the start."""
    written = folder.path / "federation.yaml"
    was = read_yaml(written)
    if read_run(folder.path)["finished"] is not None:
        was = resolved(load_federation(written))  # an option that did not exist then has its default
    keys = list(differences(was, resolved(federation)))
    taken = tuple(f"evaluation.{name}." for name in AFTER_TRAINING)
    trained = folder.complete()
    there = bool(trained) and (folder.rounds / f"{trained[-1]:04d}" / "state.fa").exists()
    return keys if there and all(f"{key}.".startswith(taken) for key in keys) else []


def _text(plain: Mapping[str, Any]) -> bytes:
    """How a run writes its federation file."""
    return yaml.safe_dump(dict(plain), sort_keys=False, allow_unicode=True).encode()


def _is_resolved(data: bytes, federation: Federation) -> bool:
    """Is this a file as runs write it, with every key, of this federation or another one?"""
    try:
        plain = yaml.safe_load(data)
    except (yaml.YAMLError, ValueError, RecursionError):
        return False
    return isinstance(plain, dict) and plain.keys() == resolved(federation).keys() and _text(plain) == data


def claim(folder: RunFolder, federation: Federation, resume: bool, tell: Tell) -> None:
    """Makes the run folder, or checks that it belongs to this very configuration, or to one of which the final evaluation alone
    differs."""
    path, written = folder.path / "run.json", folder.path / "federation.yaml"
    text = _text(resolved(federation))
    digest = hashlib.sha256(text).hexdigest()
    if not path.exists():
        folder.path.mkdir(parents=True, exist_ok=True)
        if written.exists() and not _is_resolved(written.read_bytes(), federation):
            raise RunFolderError(
                f"{written}: was not written by a run, and one in this folder would replace it; give the run another name "
                "with --id, or another folder with --runs"
            )
        write_atomic(written, text)
        return
    info = read_run(folder.path)
    changed = [] if info["hash"] == hash_of(federation) else changed_evaluation(folder, federation)
    if info["hash"] != hash_of(federation) and not changed:
        raise RunFolderError(
            f"{folder.path}: belongs to another configuration:\n"
            f"{flat_difference(read_yaml(written), resolved(federation))}\n"
            "Give the new run a name of its own with --id, or put the values back"
        )
    if not resume:
        raise RunFolderError(
            f"{folder.path}: exists already; go on with --resume, or give the new run a name with --id"
        )
    if changed:
        again = "is evaluated again, not trained" if info["finished"] else "goes on"
        tell(f"{folder.path}: {again}, as it differs in {', '.join(changed)} alone")
        info |= {"hash": hash_of(federation), "federation": digest, "finished": None}
        info.pop("rows", None)
        for scores in ("rows.csv", "histograms.json", "thresholds.json"):  # of the options of before
            (folder.path / scores).unlink(missing_ok=True)
        write_atomic(path, to_json(sealed(info, SEALED)))
    if info.get("federation") == digest and written.read_bytes() != text:
        write_atomic(written, text)  # of this change, or of one that broke off


SEALED = ("channels", "federation", "hash", "labels", "sites")
"""What the seal of run.json is of."""


def describe(folder: RunFolder, design: Design, sites: Mapping[str, Any], net: nn.Module) -> None:
    """Writes run.json, where there is none yet: what runs, on what, with which versions. sites: what each says of its data."""
    path = folder.path / "run.json"
    if path.exists():
        return
    federation, space = design.federation, design.space
    info = {
        "id": folder.path.name,
        "name": federation.name,
        "hash": hash_of(federation),
        "federation": hashlib.sha256((folder.path / "federation.yaml").read_bytes()).hexdigest(),
        "versions": versions(),
        "git": git_revision(),
        "started": now(),
        "finished": None,
        "machine": {
            "platform": platform.platform(),
            "processor": platform.processor() or platform.machine(),
            "arithmetic": arithmetic(federation.engine.device),
            "cores": os.cpu_count(),
            "torch_threads": federation.threads_per_site,
        },
        "method": federation.method["name"],
        "net": federation.net["name"],
        "n_parameters": sum(parameter.numel() for parameter in net.parameters()),
        "model_bytes": n_bytes(tensors_of(net)),
        "channels": design.channels,
        "rounds": federation.rounds,
        "seed": federation.seed,
        "labels": space.to_plain(),
        "sites": dict(sites),
    }
    if code := code_of_others(federation):
        info[CODE] = code
    write_atomic(path, to_json(sealed(info, SEALED)))


CODE = "code"
"""The key of run.json with `code_of_others`, and then, with "_changed", of what `note_code` saw."""


def code_of_others(federation: Federation) -> dict[str, str]:
    """What of a federation other packages bring, as "method mine" -> the SHA-256 of the file in which it is written."""
    found = {f"{others.what} {name}": others.code_of(name) for others, name in extensible(federation)}
    return {what: code for what, code in found.items() if code}


def differing_code(info: Mapping[str, Any], federation: Federation) -> list[str]:
    """What of `code_of_others` is written otherwise now than when the run with this record began, or went on last."""
    then, now = info.get(CODE) or {}, code_of_others(federation)
    return [what for what in then if what in now and then[what] != now[what]]


def note_code(folder: RunFolder, federation: Federation, tell: Tell) -> None:
    """Writes into run.json, and tells, where training goes on with other code of a method or a loss of one's own."""
    info = read_run(folder.path)
    changed = differing_code(info, federation)
    if not changed:
        return
    seen = {"after_round": folder.complete()[-1], "of": changed}
    info |= {CODE: code_of_others(federation), f"{CODE}_changed": [*info.get(f"{CODE}_changed", []), seen]}
    write_atomic(folder.path / "run.json", to_json(info))
    tell(
        f"note: goes on with other code of {' and '.join(changed)} than the rounds before were trained with; for a run of one kind begin "
        "anew, with --id"
    )


THEN = " and then "
"""Stands between the kinds of processor on which a run was trained one after another."""


def note_processor(folder: RunFolder, device: str, tell: Tell) -> None:
    """Writes into run.json, and tells, where training goes on on another kind of processor than it was on last."""
    path = folder.path / "run.json"
    info = read_run(folder.path)
    was, now = info["machine"].get("arithmetic"), arithmetic(device)
    if was is None or was.rpartition(THEN)[2] == now:
        return
    info["machine"]["arithmetic"] = f"{was}{THEN}{now}"
    write_atomic(path, to_json(info))
    tell(
        f"continues on another kind of processor ({now}; it was {was}), which rounds differently, as another seed would"
    )


def note_change(folder: RunFolder, sites: Sequence[str]) -> None:
    """Writes into run.json after which round which sites' data changed."""
    path = folder.path / "run.json"
    info = read_run(folder.path)
    change = {"after_round": folder.complete()[-1], "sites": sorted(sites)}
    write_atomic(path, to_json({**info, "data_changed": [*info.get("data_changed", []), change]}))


def git_revision(where: Path = Path(fedatlas.__file__).parent) -> str | None:
    """The revision of the source tree this package runs from, "+" if a file of the package was changed or is new; None if it is not one."""
    try:
        ask = ["git", "-C", str(where), "rev-parse", "HEAD"]
        revision = subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip()
        ask = ["git", "-C", str(where), "status", "--porcelain", "--", "."]
        changed = subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
    return revision + ("+" if changed else "")


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
