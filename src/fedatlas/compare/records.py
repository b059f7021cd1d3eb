"""What the tables need of finished runs, a small file each: to keep beside the comparison, to give away, and to make the tables from
without training.

A run folder holds models and is large. Its record, FOLDER/<runs>/<arm>-s<seed>.tar.xz, holds the rows of its evaluations, the
logs of its rounds and its settings, the numbers of `fedatlas analyse hessian` where it was made, and of findings of whole images what the model says of every scored image and its labels, by which
intervals are made, with patients as numbers; no model, no image, no path of the machine.
"""

import hashlib
import io
import json
import lzma
import shutil
import tarfile
import tempfile
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path

import yaml

from fedatlas.compare.intervals import has_intervals, predict
from fedatlas.compare.plan import Comparison
from fedatlas.compare.running import AfterRun, Tell, is_of, state_of
from fedatlas.core.errors import FedAtlasError, RunFolderError
from fedatlas.federation.file import Federation, shareable
from fedatlas.federation.yaml import read_yaml
from fedatlas.transport.rounds import SEAL, RunFolder, read_run, sealed, to_json
from fedatlas.transport.store import write_atomic

SUFFIX = ".tar.xz"
ANALYSIS = "analysis/hessian.json"
"""What tables need of an analysis; it may be made long after the run was finished."""
FILES = (
    "run.json",
    "federation.yaml",
    "rows.csv",
    "best.json",
    "thresholds.json",
    "histograms.json",
    ANALYSIS,
)
OF_ROUND = ("log.json", "rows.json")
OF_SITE = "predictions-*.npz"
LARGEST = 2**30
"""Bytes of a record when it is unpacked, about four million rows; more is neither written nor read."""


def record_of(comparison: Comparison, folder: Path, arm: str, seed: int) -> Path:
    """The file of a run's record."""
    path = comparison.path(arm, seed)
    return folder / path.parent.name / f"{path.name}{SUFFIX}"


def use_records(comparison: Comparison, folder: Path | None, tell: Tell) -> AfterRun:
    """`restore_runs`, then `keep_records`; what it returns keeps the record of a run that is finished later. Without a folder
    nothing is taken and nothing kept."""
    if folder is None:
        return lambda arm, seed: None
    if folder.exists() and not folder.is_dir():
        raise RunFolderError(f"{folder}: records are kept in a folder, and this is a file")
    restore_runs(comparison, folder, tell)
    keep_records(comparison, folder, tell)
    return lambda arm, seed: keep_record(comparison, folder, arm, seed, tell)


def restore_runs(comparison: Comparison, folder: Path, tell: Tell = lambda text: None) -> list[str]:
    """Makes the folders of runs that are not there from their records; returns their names.

    Such a run counts as finished, and has no models. A record of another configuration is told and left alone. Raises RunFolderError
    for a file that is no record.
    """
    restored = []
    if not (folder / comparison.folder.name).exists():
        tell(f"{folder / comparison.folder.name}: no records yet")
    for arm, of_seed in comparison.federations.items():
        for seed, federation in of_seed.items():
            file, path = record_of(comparison, folder, arm, seed), comparison.path(arm, seed)
            if path.exists() or not file.exists():
                continue
            files = _unpacked(file)
            _about(file, files)
            path.parent.mkdir(parents=True, exist_ok=True)
            made = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
            _write(files, made)
            made.chmod(0o755)
            if not _taken(federation, made):
                tell(f"{file}: a record of another configuration; not taken")
                shutil.rmtree(made)
                continue
            try:
                made.rename(path)
            except OSError:
                shutil.rmtree(made)
                if not path.exists():
                    raise
                continue  # another process was first
            restored.append(path.name)
    if restored:
        tell(
            f"{len(restored)} finished runs taken from {folder / comparison.folder.name}, without their models"
        )
    return restored


def _taken(federation: Federation, path: Path) -> bool:
    """`is_of`; one with keys that are known no more is of another federation."""
    try:
        return is_of(federation, path)
    except FedAtlasError:
        return False


def keep_records(comparison: Comparison, folder: Path, tell: Tell = lambda text: None) -> list[str]:
    """Writes the records of finished runs that have none, as `keep_record`; returns the names of these runs."""
    return [
        comparison.path(arm, seed).name
        for arm, of_seed in comparison.federations.items()
        for seed in of_seed
        if keep_record(comparison, folder, arm, seed, tell)
    ]


def keep_record(
    comparison: Comparison, folder: Path, arm: str, seed: int, tell: Tell = lambda text: None
) -> bool:
    """Writes the record of a run that is finished and has none; whether it did.

    A record that is there stays, and where the run has other values than its record that is told; one without predictions, which can
    be made now, or without the run's analysis as it is now, is made again, and one of another configuration is replaced. A run folder of another configuration has no record.
    Where a run's images or models are not here, its record has no predictions, which is told, as is a run that is too large for a record.
    Raises RunFolderError for a file in a record's place that is none.
    """
    path, file = comparison.path(arm, seed), record_of(comparison, folder, arm, seed)
    try:
        if state_of(comparison, arm, seed) != "finished":
            return False
    except FedAtlasError:
        return False  # where the tables are made it is told
    same, there = False, dict[str, bytes]()
    if file.exists():
        there = _unpacked(file)
        _about(file, there)
        with tempfile.TemporaryDirectory() as made:
            _write(there, Path(made))
            same = _taken(comparison.federations[arm][seed], Path(made))
    if same:
        if there["rows.csv"] != (path / "rows.csv").read_bytes():
            tell(f"{path}: other values than its record {file}, which stays")
            return False
        new = (path / ANALYSIS).exists() and (path / ANALYSIS).read_bytes() != there.get(ANALYSIS)
        if not new and (not has_intervals(comparison) or any(name.startswith("sites/") for name in there)):
            return False
    try:
        predict(comparison, arm, seed)
    except FedAtlasError as error:
        tell(f"{file}: without predictions, of which intervals by patient are made: {error}")
        if same:
            return False
    files = _files(path)
    if (size := sum(map(len, files.values()))) > LARGEST:
        tell(
            f"{path}: has no record, which would hold {size / 2**20:.0f} MiB of rows and logs, and at most {LARGEST / 2**20:.0f} "
            "are read back; keep the run's folder, or validate in fewer rounds (evaluation.every)"
        )
        return False
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(file, _packed(files))
    return True


def _write(files: Mapping[str, bytes], folder: Path) -> None:
    """Lays out the files of a record as a run folder."""
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


def _files(path: Path) -> dict[str, bytes]:
    """Name -> content of what a record holds of a run folder."""
    found = {name: (path / name).read_bytes() for name in FILES if (path / name).exists()}
    plain = read_yaml(path / "federation.yaml")
    workers = (plain.get("engine") or {}).get("workers", 0)
    told = shareable(plain) | {"engine": {"workers": workers}}
    found["federation.yaml"] = yaml.safe_dump(told, sort_keys=False).encode()
    about = read_run(path)
    about["machine"] = {
        key: value for key, value in (about.get("machine") or {}).items() if key != "platform"
    }
    about["federation"] = hashlib.sha256(found["federation.yaml"]).hexdigest()
    seal = about.pop(SEAL, None)
    found["run.json"] = to_json(sealed(about, seal["of"]) if seal else about)
    for name in OF_ROUND:
        for file in RunFolder(path).files(name):
            found[file.relative_to(path).as_posix()] = file.read_bytes()
    for file in (path / "sites").glob(f"*/{OF_SITE}"):
        found[file.relative_to(path).as_posix()] = file.read_bytes()
    return found


def _packed(files: Mapping[str, bytes]) -> bytes:
    """The same bytes for the same files."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:xz", preset=9, format=tarfile.USTAR_FORMAT) as archive:
        for name in sorted(files):
            entry = tarfile.TarInfo(name)
            entry.size = len(files[name])
            archive.addfile(entry, io.BytesIO(files[name]))
    return made.getvalue()


def _unpacked(file: Path) -> dict[str, bytes]:
    """Name -> content; RunFolderError for anything but a record."""
    found, size = dict[str, bytes](), 0
    try:
        with tarfile.open(file, mode="r:xz") as archive:
            for entry in archive:
                reader = archive.extractfile(entry) if entry.isreg() and _belongs(entry.name) else None
                if reader is None:
                    raise RunFolderError(f"{file}: not a record of a run; it holds {entry.name!r}")
                size += entry.size
                if size > LARGEST:
                    raise RunFolderError(
                        f"{file}: holds more than {LARGEST / 2**20:.0f} MiB, which no record does; remove it, or fetch it again"
                    )
                found[entry.name] = reader.read()
    except (tarfile.TarError, lzma.LZMAError, EOFError, OSError) as error:
        raise RunFolderError(
            f"{file}: cannot be read as a record ({error}); remove it, or fetch it again"
        ) from None
    lacking = [name for name in ("run.json", "federation.yaml", "rows.csv") if name not in found]
    if lacking:
        raise RunFolderError(f"{file}: not a record of a run; it has no {' and no '.join(lacking)}")
    return found


def _belongs(name: str) -> bool:
    """Whether a record holds a file of this name."""
    if name in FILES:
        return True
    parts = name.split("/")
    if len(parts) != 3:
        return False
    of_round = parts[0] == "rounds" and parts[1].isdigit() and parts[2] in OF_ROUND
    return of_round or (parts[0] == "sites" and bool(parts[1].strip(".")) and fnmatchcase(parts[2], OF_SITE))


def _about(file: Path, files: Mapping[str, bytes]) -> dict[str, object]:
    """run.json of a record."""
    try:
        found = json.loads(files["run.json"])
        if isinstance(found, dict) and "hash" in found and found.get("finished"):
            return found
    except ValueError:
        pass
    raise RunFolderError(f"{file}: not a record of a run; its run.json is damaged, or not of a finished run")
