"""What a run came to, in sentences: for the end of `fedatlas run` and the beginning of the report."""

import shlex
from pathlib import Path
from typing import NamedTuple

from fedatlas.evaluation.statistics import RowDict, select
from fedatlas.report import read, tables
from fedatlas.report.read import Run
from fedatlas.report.tables import METRICS, Verdict

NOT_GLOBAL = "The global model was not scored: `evaluation.models` names local models alone."


class Conclusion(NamedTuple):
    """The global model in numbers.

    rows: those of the model and split. baseline: of every site's own local model at that very site, None where no
    local model was evaluated there; beside: of the global model at these sites, where others are scored, too; sites: how many they
    are. provisional: are they of a round, because there is no final evaluation yet?
    """

    model: str
    split: str
    rows: list[RowDict]
    verdict: Verdict
    baseline: Verdict | None
    beside: Verdict | None
    sites: int
    provisional: bool


def conclude(run: Run) -> Conclusion | None:
    """The conclusion of a run: of test cases where there are any; None where no global model is scored."""
    rows, provisional = tables.scored(run)
    model = next((name for name in read.models(rows) if not name.startswith("local/")), None)
    if model is None:
        return None
    split = next(s for s in tables.splits(rows) if select(rows, split=s, model=model))
    chosen = select(rows, split=split, model=model)
    at_home = [r for r in select(rows, split=split) if r["model"] == f"local/{r['site']}"]
    found = tables.verdict(at_home, run.measure)
    baseline = found if found.n_known or found.n_unknown else None
    at = {row["site"] for row in at_home}
    others = {row["site"] for row in chosen} - at
    beside = (
        tables.verdict((row for row in chosen if row["site"] in at), run.measure)
        if baseline and others
        else None
    )
    verdict = tables.verdict(chosen, run.measure)
    return Conclusion(model, split, chosen, verdict, baseline, beside, len(at), provisional)


def sentences(run: Run) -> list[str]:
    """The verdict: the model's scores, and beside them those of the baseline where there is one."""
    found = conclude(run)
    if found is None:
        return [NOT_GLOBAL if tables.scored(run)[0] else f"No {run.unit} is scored yet."]
    title, sites = METRICS[run.measure].title, len({row["site"] for row in found.rows})
    cases = len({(row["site"], row["case"]) for row in found.rows})
    which = f"{_cases(run, found)} of {sites} site{'' if sites == 1 else 's'}"
    which = which if run.images else f"{cases} {which}"
    if absent := _absent(run, found):
        return [f"{_model(run, found)[0].upper()}{_model(run, found)[1:]} was scored on {which}. {absent}"]
    scores = (
        (found.verdict.known, "on classes that the site annotated"),
        (found.verdict.unknown, "on classes that it never annotated"),
    )
    told = " and ".join(f"{value:.3f} {where}" for value, where in scores if value is not None)
    lines = [f"On {which}, {_model(run, found)} reaches a mean {title} of {told or 'no defined value'}."]
    if found.baseline is not None:

        def both(of: Verdict) -> str:
            return _number(of.known) + (
                f" and {_number(of.unknown)}" if found.verdict.unknown is not None else ""
            )

        lines.append(
            f"The baseline, every site's own model at that site ({_local(run)}), reaches {both(found.baseline)}"
            + (
                f"; at these {found.sites} of {sites} sites the global model reaches {both(found.beside)}."
                if found.beside
                else "."
            )
        )
    if found.split == "validation" and not found.provisional:
        chose = f"these {run.unit}s also chose the round, so the numbers are optimistic"
        which = chose if found.model == read.GLOBAL else f"these {run.unit}s are of validation"
        lines.append(f"There are no test {run.unit}s: {which}.")
    return lines


def lines(run: Run, report: Path) -> list[str]:
    """The verdict for a terminal, a line each: the model, the baseline where there is one, the next command."""
    found, folder = conclude(run), run.folder
    after = f"next:     fedatlas predict {shlex.quote(str(folder))} {'IMAGE.png' if run.images or run.pictures else 'SCAN.nii.gz'} -o out/   (report: {report})"
    if found is None:
        why = "no global model is scored" if tables.scored(run)[0] else "nothing is scored"
        return [f"model:    {folder / 'models'}; {why}", after]
    title = METRICS[run.measure].title

    def both(verdict: Verdict) -> str:
        return f"{_number(verdict.known)} on annotated classes, {_number(verdict.unknown)} on never annotated ones"

    file = folder / "models" / f"{found.model}.fa"
    if absent := _absent(run, found):
        return [f"model:    {file}, {_round(run, found)}. {absent}", after]
    told = [
        f"model:    {file}, {_round(run, found)}: macro {title}, {_cases(run, found)}: {both(found.verdict)}"
    ]
    if found.baseline is not None:
        told.append(f"baseline: every site's own model at that site ({_local(run)}): {both(found.baseline)}")
        if found.beside:
            told.append(f"          the global model at these {found.sites} sites: {both(found.beside)}")
    return [*told, after]


def _absent(run: Run, found: Conclusion) -> str:
    """Why there is no verdict, where the metric that it is given in was not measured; "" where it was."""
    metrics = tables.metrics(found.rows)
    if run.measure in metrics:
        return ""
    titles, verdict = ", ".join(tables.described(name).title for name in metrics), METRICS[run.measure].title
    return f"There is no verdict, which is in {verdict}: `evaluation.metrics` has {titles} alone."


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
