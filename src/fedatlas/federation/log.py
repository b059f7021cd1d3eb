"""The key `log`: a run's numbers for TensorBoard and MLflow, written by their own libraries, beside the run folder."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedatlas.core.errors import FedAtlasError, FederationError
from fedatlas.core.options import option, options
from fedatlas.transport.rounds import Round, read_json, to_json
from fedatlas.transport.store import write_atomic

Numbers = dict[str, float]
"""name -> value, of one round."""
Writer = Callable[[int, Numbers], None]


@options
class Log:
    """Where the numbers of a run are written, too. Not part of the file's hash."""

    tensorboard: str | None = option(
        None, "A folder for TensorBoard, in which the run has one of its name; relative to the file."
    )
    mlflow: str | None = option(
        None, "The address at which MLflow keeps runs, as http://127.0.0.1:5000 or a folder."
    )


def numbers(record: Round) -> Numbers:
    """What is written of a round: every term that a site logged, its seconds and memory, and the mean validation scores by
    class and by site. No case by itself."""
    found = {
        f"{term}/{site}": value for site, log in record.log["sites"].items() for term, value in log.items()
    }
    for site, cost in record.log["cost"].items():
        found |= {f"{what}/{site}": cost[what] for what in ("seconds", "peak_mb") if what in cost}
    groups: dict[str, list[float]] = {}
    for row in record.rows:
        if row["value"] is not None:
            for kind in ("class", "site"):
                groups.setdefault(f"validation {row['metric']} by {kind}/{row[kind]}", []).append(
                    row["value"]
                )
    found |= {name: float(np.mean(values)) for name, values in groups.items()}
    return {name: float(value) for name, value in found.items() if value is not None and np.isfinite(value)}


@contextlib.contextmanager
def writers(
    log: Log, name: str, folder: Path, tell: Callable[[str], None]
) -> Iterator[Callable[[Round], None]]:
    """A function that writes a complete round to wherever `log` says. One that fails is told and not asked again: the run
    goes on, and its folder has all numbers.

    name: of the federation; folder: of the run, whose name is that of the run there, too. Raises FederationError where a
    package is missing, or the place cannot be used."""
    with contextlib.ExitStack() as stack:
        there: dict[str, Writer] = {}
        if log.tensorboard is not None:
            there["tensorboard"] = stack.enter_context(_tensorboard(Path(log.tensorboard) / folder.name))
        if log.mlflow is not None:
            there["mlflow"] = stack.enter_context(_mlflow(log.mlflow, name, folder))

        def write(record: Round) -> None:
            for kind, writer in list(there.items()):
                try:
                    writer(record.number, numbers(record))
                except Exception as error:  # whatever a library or its server comes up with
                    del there[kind]
                    tell(f"log.{kind}: cannot be written any more ({error}); the run goes on without it")

        yield write


@contextlib.contextmanager
def _tensorboard(place: Path) -> Iterator[Writer]:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise FederationError(
            "log.tensorboard: needs the package tensorboard, which is not installed: pip install 'fedatlas[log]'"
        ) from None
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FederationError(
            f"log.tensorboard: {place}: cannot be made ({error.strerror}); name another folder"
        ) from None
    made: list[Any] = []

    def write(number: int, values: Numbers) -> None:
        if not made:  # rounds from this one on that an earlier try wrote are void
            made.append(SummaryWriter(str(place), purge_step=number))
        for name, value in values.items():
            made[0].add_scalar(name, value, number)
        made[0].flush()

    try:
        yield write
    finally:
        for writer in made:
            writer.close()


@contextlib.contextmanager
def _mlflow(address: str, name: str, folder: Path) -> Iterator[Writer]:
    try:
        import mlflow  # type: ignore[import-not-found]
    except ImportError:
        raise FederationError(
            "log.mlflow: needs the package mlflow, which is not installed: pip install mlflow"
        ) from None
    kept = folder / "mlflow.json"
    try:
        mlflow.set_tracking_uri(address)
        mlflow.set_experiment(name)
        known: Mapping[str, Any] = read_json(kept) if kept.exists() else {}
        if known.get("address") == address:
            run = mlflow.start_run(run_id=known["run"])
        else:
            run = mlflow.start_run(run_name=folder.name)
            write_atomic(kept, to_json({"address": address, "run": run.info.run_id}))
    except FedAtlasError:
        raise
    except Exception as error:
        raise FederationError(f"log.mlflow: {address}: cannot be used ({error}); is the server up?") from None
    # MLflow allows letters, digits and _ - . / and spaces in the name of a metric
    plain = lambda name: "".join(c if c.isalnum() or c in "_-./ " else "_" for c in name)  # noqa: E731
    status = "FAILED"
    try:
        yield lambda number, values: mlflow.log_metrics({plain(k): v for k, v in values.items()}, step=number)
        status = "FINISHED"
    except KeyboardInterrupt:
        status = "KILLED"
        raise
    finally:
        with contextlib.suppress(Exception):
            mlflow.end_run(status)
