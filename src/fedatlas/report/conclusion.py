"""What a run came to, in sentences: for the end of `fedatlas run` and the beginning of the report."""

from pathlib import Path
from typing import NamedTuple

from fedatlas.evaluation.statistics import RowDict, select
from fedatlas.report import read, tables
from fedatlas.report.read import Run
from fedatlas.report.tables import METRICS, Verdict


class Conclusion(NamedTuple):
    """The global model in numbers.

    rows: those of the model and split. baseline: of every site's own local model at that very site, None where no
    local model was evaluated there. provisional: are they of a round, because there is no final evaluation yet?
    """

    model: str
    split: str
    rows: list[RowDict]
    verdict: Verdict
    baseline: Verdict | None
    provisional: bool


def conclude(run: Run) -> Conclusion | None:
    """The conclusion of a run: of test cases where there are any; None where nothing is scored."""
    rows, provisional = tables.scored(run)
    if not rows:
        return None
    model = read.models(rows)[0]
    split = next(s for s in tables.splits(rows) if select(rows, split=s, model=model))
    chosen = select(rows, split=split, model=model)
    at_home = [r for r in select(rows, split=split) if r["model"] == f"local/{r['site']}"]
    found = tables.verdict(at_home, run.measure)
    baseline = found if found.n_known or found.n_unknown else None
    return Conclusion(model, split, chosen, tables.verdict(chosen, run.measure), baseline, provisional)


def sentences(run: Run) -> list[str]:
    """The verdict: the model's scores, and beside them those of the baseline where there is one."""
    found = conclude(run)
    if found is None:
        return [f"No {run.unit} is scored yet."]
    title, sites = METRICS[run.measure].title, len({row["site"] for row in found.rows})
    cases = len({(row["site"], row["case"]) for row in found.rows})
    which = f"{_cases(run, found)} of {sites} site{'' if sites == 1 else 's'}"
    which = which if run.images else f"{cases} {which}"
    scores = (
        (found.verdict.known, "on classes that the site annotated"),
        (found.verdict.unknown, "on classes that it never annotated"),
    )
    told = " and ".join(f"{value:.3f} {where}" for value, where in scores if value is not None)
    lines = [f"On {which}, {_model(run, found)} reaches a mean {title} of {told or 'no defined value'}."]
    if found.baseline is not None:
        both = [_number(value) for value in (found.baseline.known, found.baseline.unknown)]
        lines.append(
            f"The baseline, every site's own model at that site ({_local(run)}), reaches {both[0]}"
            + (f" and {both[1]}." if found.verdict.unknown is not None else ".")
        )
    if found.split == "validation" and not found.provisional:
        lines.append(
            f"There are no test {run.unit}s: these {run.unit}s also chose the round, so the numbers are optimistic."
        )
    return lines


def lines(run: Run, report: Path) -> list[str]:
    """The verdict for a terminal, a line each: the model, the baseline where there is one, the next command."""
    found, folder = conclude(run), run.folder
    after = f"next:     fedatlas predict {folder} {'IMAGE.png' if run.images else 'SCAN.nii.gz'} -o out/   (report: {report})"
    if found is None:
        return [f"model:    {folder / 'models'}; nothing is scored", after]
    title = METRICS[run.measure].title

    def both(verdict: Verdict) -> str:
        return f"{_number(verdict.known)} on annotated classes, {_number(verdict.unknown)} on never annotated ones"

    file = folder / "models" / f"{found.model}.fa"
    told = [
        f"model:    {file}, {_round(run, found)}: macro {title}, {_cases(run, found)}: {both(found.verdict)}"
    ]
    if found.baseline is not None:
        told.append(f"baseline: every site's own model at that site ({_local(run)}): {both(found.baseline)}")
    return [*told, after]


def _cases(run: Run, found: Conclusion) -> str:
    return f"{found.split} {run.unit}s"


def _model(run: Run, found: Conclusion) -> str:
    return f"the global model ({run.info.get('method')}, {_round(run, found)})"


def _round(run: Run, found: Conclusion) -> str:
    number = found.rows[0]["round"]
    planned = run.info.get("rounds")
    return f"round {number}" + ("" if planned is None else f" of {planned}")


def _local(run: Run) -> str:
    return "local models before the average" if run.locals else "local models"


def _number(value: float | None) -> str:
    return "not defined" if value is None else f"{value:.3f}"
