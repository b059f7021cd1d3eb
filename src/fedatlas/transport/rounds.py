"""The one round loop, and the run folder that makes every complete round a point to resume from."""

import contextlib
import hashlib
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import FrozenInstanceError, asdict, dataclass, replace
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from typing import Any, Protocol, TypeVar

from torch import nn

from fedatlas.core.contract import Clients, Method, State
from fedatlas.core.errors import DataError, FedAtlasError, RunFolderError, WireError, first_of, parse_json
from fedatlas.core.tensors import Tree, from_tree, is_finite, to_tree
from fedatlas.transport import wire
from fedatlas.transport.clients import Call
from fedatlas.transport.host import ADDED, peak_mb, reset_peak
from fedatlas.transport.locks import lock
from fedatlas.transport.reply import Spool
from fedatlas.transport.store import not_waiting, read_whole, sync_folder, with_room, write_atomic

T = TypeVar("T")
HELD = "held.fa"
"""In a round's folder: the models that the sites hold, as far as compression made them of the server's."""


class RoundClients(Clients, Protocol):
    """Clients that learn when a round begins, and record its calls."""

    calls: list[Call]
    models: Spool | None
    remembered: dict[str, str]

    @property
    def everyone(self) -> list[str]: ...
    def begin(self, round: int) -> None: ...


@dataclass(frozen=True)
class Round:
    """What is kept of one complete round. log: training and cost per site; rows: validation, as dicts."""

    number: int
    state: State
    log: dict[str, Any]
    rows: list[dict[str, Any]]


def run(
    method: Method,
    net: nn.Module,
    clients: RoundClients,
    rounds: int,
    *,
    state: State | None = None,
    evaluate: Callable[[State], list[dict[str, Any]]] | None = None,
    evaluators: RoundClients | None = None,
    after_round: Callable[[Round], None] | None = None,
) -> State:
    """Runs a method for `rounds` rounds and returns the last state.

    state: where to go on; None begins with `method.start(net, clients)`.
    evaluate: called on the state of every complete round; its rows go into the round's record.
    evaluators: whom `evaluate` asks, whose calls go into the record, too; None: `clients`.
    after_round: is given the record of every complete round, and of the start as round 0.

    Raises SiteLost as `clients` does, and FedAtlasError where a method returns no state, does not count its rounds, or
    makes a model whose values are not finite.
    """
    if state is None:
        clients.begin(0)
        clients.remembered.update(dict.fromkeys(clients.everyone, ""))
        began_with = method.start(net, clients)
        _require_state(began_with, f"{type(method).__name__}.start")
        state = replace(began_with, round=0, rounds=rounds)
        if after_round:
            after_round(Round(0, state, _log(0, clients.calls, {}, 0.0, clients.remembered), []))
    while state.round < rounds:
        number = state.round + 1
        asked = [clients] if evaluators is None or evaluators is clients else [clients, evaluators]
        for each in asked:
            each.begin(number)
        reset_peak()
        began = time.perf_counter()
        with _explained(method, number):
            state = method.round(state, clients)
        trained = time.perf_counter()
        peak = peak_mb()
        _require_state(state, f"{type(method).__name__}.round, round {number}")
        if state.round != number:
            raise FedAtlasError(
                f"{type(method).__name__}.round returned the state of round {state.round}, expected {number}; "
                "it ends with replace(state, round=state.round + 1, …)"
            )
        rows = evaluate(state) if evaluate else []
        phases = {"round": trained - began, "evaluate": time.perf_counter() - trained}
        if after_round:
            calls = [call for each in asked for call in each.calls]
            after_round(Round(number, state, _log(number, calls, phases, peak, clients.remembered), rows))
    return state


def _require_state(state: Any, where: str) -> None:
    """Raises FedAtlasError for what is no state, or holds a model with values that are no numbers, before it is kept."""
    if not isinstance(state, State):
        raise FedAtlasError(
            f"{where}: returned a {type(state).__name__}, expected a State; a round ends with replace(state, model=…, "
            "round=state.round + 1)"
        )
    broken = [name for name, value in state.model.items() if not is_finite(value)]
    if broken:
        raise FedAtlasError(
            f"{where}: the model holds values that are NaN or infinite, in {first_of(broken, 3)}; the round is not kept. "
            "Look at what the server does with the models of the sites, and at the last steps there, as by a rate that is "
            "too high"
        )


@contextlib.contextmanager
def _explained(method: Method, number: int) -> Iterator[None]:
    """Says of an error of a method's server which round it broke in. Raises FedAtlasError where a method keeps something on itself."""
    where = f"{type(method).__name__}.round, round {number}"
    try:
        yield
    except FrozenInstanceError as error:
        raise FedAtlasError(
            f"{where}: {error}. A method keeps nothing on itself; what it must know in the next round is a field of its State"
        ) from error
    except FedAtlasError:
        raise
    except Exception as error:
        error.add_note(f"in {where}")
        raise


def _log(
    number: int, calls: list[Call], phases: dict[str, float], peak: float, memory: Mapping[str, str]
) -> dict[str, Any]:
    """Adds up the calls of a round: per site its numbers, its cost of training apart from evaluation, and why it was lost
    first."""
    sites: dict[str, dict[str, float]] = {}
    cost: dict[str, dict[str, float]] = {}
    lost: dict[str, str] = {}
    for call in calls:
        for site, reason in call.lost.items():
            lost.setdefault(site, f"{call.function}: {reason}")
        prefix = "evaluate_" if call.function == "evaluate" else ""
        for site, numbers in call.logs.items():
            logged = sites.setdefault(site, {})
            for key, value in numbers.items():  # a call of its own may have trained teachers
                logged[key] = value + (logged.get(key, 0.0) if key in ADDED else 0.0)
        for site, spent in call.cost.items():
            total = cost.setdefault(site, {})
            for key, value in spent.items():
                name = prefix + key
                total[name] = (
                    max(total.get(name, 0.0), value) if key == "peak_mb" else total.get(name, 0) + value
                )
    private = [(call.epsilon, call.released) for call in calls if call.released is not None]
    return {
        "round": number,
        "memory": dict(sorted(memory.items())),
        "epsilon": private[-1][0] if private else None,
        "released": asdict(private[-1][1]) if private else None,
        "sites": sites,
        "cost": cost,
        "phases": phases,
        "lost": lost,
        "server_peak_mb": peak,
    }


class RunFolder:
    """runs/<id>: rounds/NNNN/ (state, log, rows), models/, sites/, and what the experiment writes beside them.

    A round's folder appears under its name only when it is whole. States older than the last two are removed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def rounds(self) -> Path:
        return self.path / "rounds"

    @contextlib.contextmanager
    def held(self, tell: Callable[[str], None]) -> Iterator[None]:
        """Locks the folder for this process while the context is open, see `lock`, and makes it if need be. tell: called
        where the file system has no locks.

        Raises RunFolderError where the folder cannot be made or written, and, naming the process and its machine, where
        another process holds it.
        """
        path = self.path / "lock"

        def opened() -> FileIO:
            self.path.mkdir(parents=True, exist_ok=True)
            return path.open("a+b", buffering=0)

        def signed() -> None:
            file.truncate(0)
            began = datetime.now(UTC).isoformat(timespec="seconds")
            file.write(f"process {os.getpid()} on {socket.gethostname()}, since {began},".encode())

        with self._written(path, opened) as file:
            try:
                lock(file, self.path, tell, otherwise="see that no other process works on this run")
            except BlockingIOError:
                file.seek(0)
                raise RunFolderError(
                    f"{self.path}: {file.read().decode().strip() or 'another process'} works on this run; wait until it has "
                    "ended, or begin another run with --id"
                ) from None
            self._written(path, signed)
            yield

    def _written(self, file: Path, write: Callable[[], T]) -> T:
        try:
            return with_room(file, write)
        except OSError as error:
            raise RunFolderError(
                f"{self.path}: cannot be made or written ({error.strerror or error}); choose another place with --runs"
            ) from None

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Keeps in stopped.json why a run stopped, where the context ends with an error; while it goes on there is none."""
        kept = self.path / "stopped.json"
        kept.unlink(missing_ok=True)
        try:
            yield
        except BaseException as error:
            why = "by hand (Ctrl-C)"
            if not isinstance(error, KeyboardInterrupt):
                said = isinstance(error, FedAtlasError) and not isinstance(error, DataError)
                # what is said of data may name a case
                why = (
                    str(error).splitlines()[0]
                    if said
                    else f"{type(error).__name__}; see what the run itself said"
                )
            now = datetime.now(UTC).isoformat(timespec="seconds")
            with contextlib.suppress(OSError), not_waiting():
                write_atomic(kept, to_json({"when": now, "why": why}))
            raise

    def site(self, name: str) -> Path:
        """The private folder of a site that is served on this machine."""
        return self.path / "sites" / name

    def complete(self) -> list[int]:
        """The numbers of all complete rounds."""
        folders = (path.name for path in self.rounds.glob("[0-9][0-9][0-9][0-9]*") if path.is_dir())
        return sorted(int(name) for name in folders if re.fullmatch("[0-9]+", name))

    def files(self, name: str) -> list[Path]:
        """The file of this name of every complete round that has one, in order."""
        paths = (self.rounds / f"{number:04d}" / name for number in self.complete())
        return [path for path in paths if path.exists()]

    def save(
        self, record: Round, models: Spool | None = None, held: Mapping[str, Tree] | None = None
    ) -> None:
        """Keeps a complete round; `models`: the sites' local models, kept with it if given. held: what the sites hold of
        what they were sent, see `held_after`."""
        final = self.rounds / f"{record.number:04d}"
        part = self.rounds / f".{record.number:04d}.part"
        shutil.rmtree(part, ignore_errors=True)
        try:
            write_atomic(part / "state.fa", wire.encode(to_tree(record.state)))
            write_atomic(part / "log.json", to_json(sealed(record.log)))
            write_atomic(part / "rows.json", to_json(record.rows))
            if held:
                write_atomic(part / HELD, wire.encode(dict(held)))
            for site, reply in models or ():
                kept = {key: reply.get(key) for key in ("model", "classes", "findings")}
                write_atomic(part / "local" / f"{site}.fa", wire.encode(kept))
            if final.exists():
                shutil.rmtree(final)
            os.rename(part, final)
        except OSError as error:
            shutil.rmtree(part, ignore_errors=True)
            raise RunFolderError(
                f"{final}: round {record.number} could not be written ({error.strerror}); the rounds before it "
                "are intact, make room and go on with --resume"
            ) from error
        sync_folder(self.rounds)
        for number in self.complete():
            if number < record.number - 1:
                for name in ("state.fa", HELD):
                    (self.rounds / f"{number:04d}" / name).unlink(missing_ok=True)
                shutil.rmtree(self.rounds / f"{number:04d}" / "local", ignore_errors=True)

    def latest(self, method: Method) -> State | None:
        """The state of the last complete round that can be read; None if no round was completed.

        What a later round left behind, damaged, half or without its state, is removed. Raises RunFolderError if rounds were
        completed and no state can be read.
        """
        for part in self.rounds.glob(".*.part"):
            shutil.rmtree(part, ignore_errors=True)
        damaged = []
        for number in reversed(self.complete()):
            path = self.rounds / f"{number:04d}" / "state.fa"
            if not path.exists():
                damaged.append(f"{path}: missing")
                continue
            try:
                state = self.state(path, method)
                self.held_after(number)
            except RunFolderError as error:
                damaged.append(str(error))
                continue
            for later in self.complete():
                if later > number:
                    part = self.rounds / f".{later:04d}.part"
                    os.rename(self.rounds / f"{later:04d}", part)
                    shutil.rmtree(part)
            return state
        if damaged:  # those before the last two keep no state
            raise RunFolderError(f"{self.path}: no round can be resumed. " + "; ".join(damaged[:2]))
        return None

    def state(self, path: Path, method: Method) -> State:
        """A kept state. Raises RunFolderError if the file is missing, damaged or of another method."""
        try:
            return from_tree(method.state, wire.decode(read_whole(path), copy=False))
        except FileNotFoundError:
            raise RunFolderError(f"{path}: missing; the run has no complete round yet") from None
        except (WireError, TypeError, KeyError, ValueError, AttributeError, OSError) as error:
            reason = (
                str(error) if isinstance(error, WireError | TypeError | OSError) else type(error).__name__
            )
            raise RunFolderError(f"{path}: cannot be read ({reason})") from error

    def held_after(self, number: int) -> dict[str, Any]:
        """What was kept as `held` with a round; empty where nothing was. Raises RunFolderError where it cannot be read."""
        path = self.rounds / f"{number:04d}" / HELD
        try:
            kept: Any = wire.decode(read_whole(path), copy=False) if path.exists() else {}
        except (WireError, OSError) as error:
            raise RunFolderError(f"{path}: cannot be read ({error})") from error
        return kept

    def log(self, number: int) -> dict[str, Any]:
        """The log of a complete round. Raises RunFolderError where it is not what was written."""
        path = self.rounds / f"{number:04d}" / "log.json"
        log = read_json(path)
        require_seal(path, log)
        return log

    def records(self) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
        """(log, rows) of every complete round, in order."""
        return [(self.log(n), read_json(self.rounds / f"{n:04d}" / "rows.json")) for n in self.complete()]

    def keep_model(self, name: str, number: int) -> None:
        """Copies the state of round `number`, which must be one of the last two, to models/<name>.fa."""
        data = (self.rounds / f"{number:04d}" / "state.fa").read_bytes()
        write_atomic(self.path / "models" / f"{name}.fa", data)

    def keep_local(self, site: str, number: int) -> None:
        """Copies a site's local model of round `number`, one of the last two, to models/local/<site>.fa."""
        data = (self.rounds / f"{number:04d}" / "local" / f"{site}.fa").read_bytes()
        write_atomic(self.path / "models" / "local" / f"{site}.fa", data)

    @property
    def choices(self) -> dict[str, dict[str, Any]]:
        """site -> {"round", "score"} of its local model that was best on its own validation cases, which is
        models/local/<site>.fa; empty where sites did not choose."""
        file = self.path / "models" / "local.json"
        return read_json(file) if file.exists() else {}

    def local_models(self) -> dict[str, tuple[Path, int]]:
        """site -> the file of its local model, and its round: that which the site chose, else of the last round."""
        numbers = self.complete()
        last = numbers[-1] if numbers else 0
        files = sorted((self.rounds / f"{last:04d}" / "local").glob("*.fa"))
        models = {file.stem: (file, last) for file in files}
        for site, kept in self.choices.items():
            models[site] = (self.path / "models" / "local" / f"{site}.fa", kept["round"])
        return dict(sorted(models.items()))

    def best_is_last(self, rounds: int) -> bool:
        """Is the best model of a finished run that of its last round? rounds: so many it has."""
        best = read_json(self.path / "best.json")
        return all(kept["round"] == rounds for kept in (best, *best.get("sites", {}).values()))


def to_json(value: Any) -> bytes:
    """JSON with sorted keys; numbers that are not finite become null."""
    return (json.dumps(_finite(value), indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()


SEAL = "seal"


def sealed(plain: Mapping[str, Any], keys: Iterable[str] | None = None) -> dict[str, Any]:
    """Plain values with a digest of those under `keys` (None: of all), which shows a later change."""
    chosen = {key: plain[key] for key in (sorted(plain) if keys is None else keys)}
    return {**plain, SEAL: {"of": sorted(chosen), "sha256": _digest(chosen)}}


def require_seal(path: Path, plain: Mapping[str, Any]) -> None:
    """Raises RunFolderError where values of a file are not those that `sealed` saw. A file without a seal, of an
    older version, is not checked."""
    seal = plain.get(SEAL)
    if seal is None:
        return
    try:
        same = _digest({key: plain[key] for key in seal["of"]}) == seal["sha256"]
    except (KeyError, TypeError):
        same = False
    if not same:
        raise RunFolderError(
            f"{path}: was changed after the run wrote it, in {', '.join(map(str, _of(seal)))}; restore the file"
        )


def read_run(path: Path) -> dict[str, Any]:
    """The record of a run, run.json of its folder. Raises RunFolderError where it is missing, damaged, lacks what every
    run writes, or was changed since."""
    file = path / "run.json"
    info = read_json(file)
    missing = [
        key
        for key in ("labels", "channels", "hash", "sites", "finished")
        if not isinstance(info, dict) or key not in info
    ]
    if missing:
        raise RunFolderError(f"{file}: lacks {', '.join(missing)}; a run's record has them, restore the file")
    require_seal(file, info)
    return info


def _of(seal: Any) -> list[Any]:
    of = seal.get("of") if isinstance(seal, Mapping) else None
    return of if isinstance(of, list) else ["what it holds"]


def _digest(plain: Mapping[str, Any]) -> str:
    return hashlib.sha256(to_json(plain)).hexdigest()


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if abs(value) != float("inf") and value == value else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def read_json(path: Path) -> Any:
    """Raises RunFolderError if the file is missing or not JSON, or holds a whole number that no float can hold."""
    try:
        return parse_json(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise RunFolderError(f"{path}: cannot be read (nested too deeply)") from None
    except (OSError, ValueError) as error:
        raise RunFolderError(f"{path}: cannot be read ({error})") from error
