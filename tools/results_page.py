"""Makes the tables of the pages docs/results-*.md whose runs have records, and from these and the others the ones of docs/results.md that put
them together: what to take, which README.md has as well, and what `fedatlas` is worth for segmentation and FedAvg for findings, setting by
setting.

    .venv/bin/python tools/results_page.py [NAME ...]

NAME: of a comparison, as its file has it, whose table is made again; without one, all are.
"""

import argparse
import re
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import copysign
from pathlib import Path
from typing import Any

from fedatlas.compare import Comparison, collect, load_comparison, restore_runs, write_table
from fedatlas.federation.yaml import read_yaml

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "results.md"
"""The page that puts all others together."""
PAGES = sorted((ROOT / "docs").glob("results*.md"))
README = ROOT / "README.md"
RECORDED = sorted(path for path in ROOT.glob("experiments/*/records/*") if path.is_dir())
"""Folders of records, each of the runs of one name and profile."""

BEGUN = ("head-neck-pilots-rounds",)
"""Comparisons that are not finished: their records are kept, and no page has a table of them."""

OPPONENTS = {
    "matched": "sites alone, merged; the loss of `fedatlas`",
    "alone": "sites alone, merged; the usual loss",
    "fedavg": "FedAvg",
    "condistfl": "ConDistFL, journal paper",
    "condistfl-matched": "ConDistFL with the loss and momentum of `fedatlas`",
    "centralized": "all data in one place, same labels",
}
"""What `fedatlas` is compared with -> the head of its column."""

ON_A_GPU = {
    "matched": "standalone-matched-mean",
    "fedavg": "fedavg",
    "condistfl": "condistfl",
    "condistfl-matched": "condistfl-matched",
    "centralized": "centralized",
}
"""The arm of each in the two comparisons that were run on a GPU."""


@dataclass(frozen=True)
class Setting:
    """A row: what is asked, the place of its table on the page, the arm that is compared, and those that it is compared with."""

    asked: str
    place: str
    ours: str
    others: Mapping[str, str]


SETTINGS = (
    Setting(
        "[head and neck CT, 4,000 local steps](results-ct.md#head-and-neck-ct-with-five-times-the-steps)",
        "head-neck-longest",
        "fedatlas",
        ON_A_GPU,
    ),
    Setting(
        "[the same, both averaged over late rounds](results-ct.md#head-and-neck-ct-with-five-times-the-steps)",
        "head-neck-longest",
        "fedatlas-swa",
        {"matched": "standalone-swa"},
    ),
    Setting(
        "[head and neck CT, 1,600 local steps](results-ct.md#head-and-neck-ct-with-twice-the-steps)",
        "head-neck-long",
        "fedatlas",
        {
            "matched": "standalone-matched-mean",
            "alone": "standalone",
            "fedavg": "fedavg",
            "condistfl-matched": "condistfl-matched",
            "centralized": "centralized",
        },
    ),
    Setting(
        "[the same, 800 local steps](results-ct.md#head-and-neck-ct-strict-partial-labels)",
        "head-neck",
        "fedatlas",
        {
            "matched": "standalone-matched-mean",
            "alone": "standalone",
            "fedavg": "fedavg",
            "condistfl": "condistfl",
            "condistfl-matched": "condistfl-matched",
            "centralized": "centralized",
        },
    ),
    Setting(
        "[the same, all averaged over late rounds](results-ct.md#the-mean-of-late-rounds)",
        "head-neck-swa",
        "fedatlas-swa",
        {"matched": "standalone-swa", "fedavg": "fedavg-swa", "centralized": "centralized-swa"},
    ),
    Setting(
        "[800 local steps, five seeds](results-ct.md#two-more-seeds)",
        "head-neck-five",
        "fedatlas",
        {"matched": "standalone-matched-mean"},
    ),
    Setting(
        "[the same, both averaged over late rounds](results-ct.md#two-more-seeds)",
        "head-neck-five",
        "fedatlas-swa",
        {"matched": "standalone-swa"},
    ),
    Setting(
        "[800 local steps, all averaged, a net of twice the filters](results-ct.md#a-larger-net)",
        "head-neck-wide",
        "fedatlas-swa-wide",
        {"matched": "standalone-swa-wide"},
    ),
    Setting(
        "[in 3D, a net of 5.6 million parameters, 1,600 local steps](results-ct.md#in-3d-on-a-gpu)",
        "head-neck-volumes",
        "fedatlas",
        ON_A_GPU,
    ),
    Setting(
        "[the same, both averaged over late rounds](results-ct.md#in-3d-on-a-gpu)",
        "head-neck-volumes",
        "fedatlas-swa",
        {"matched": "standalone-swa"},
    ),
    Setting(
        "[eight labelled cases at each site](results-ct.md#few-labelled-cases)",
        "head-neck-few",
        "fedatlas-8",
        {
            "matched": "standalone-matched-mean-8",
            "alone": "standalone-8",
            "fedavg": "fedavg-8",
            "condistfl-matched": "condistfl-matched-8",
            "centralized": "centralized-matched-8",
        },
    ),
    Setting(
        "[four labelled cases at each site](results-ct.md#few-labelled-cases)",
        "head-neck-few",
        "fedatlas-4",
        {
            "matched": "standalone-matched-mean-4",
            "alone": "standalone-4",
            "fedavg": "fedavg-4",
            "condistfl-matched": "condistfl-matched-4",
            "centralized": "centralized-matched-4",
        },
    ),
    Setting(
        "[the same, both averaged over late rounds](results-ct.md#few-labelled-cases)",
        "head-neck-few",
        "fedatlas-swa-4",
        {"matched": "standalone-swa-mean-4"},
    ),
    Setting(
        "[two labelled cases at each site](results-ct.md#few-labelled-cases)",
        "head-neck-few",
        "fedatlas-2",
        {
            "matched": "standalone-matched-2",
            "alone": "standalone-2",
            "fedavg": "fedavg-2",
            "condistfl-matched": "condistfl-matched-2",
            "centralized": "centralized-matched-2",
        },
    ),
    Setting(
        "[four cases, two annotators of each organ](results-ct.md#organs-that-several-sites-annotate)",
        "head-neck-annotators",
        "fedatlas-two",
        {
            "matched": "standalone-matched-mean-two",
            "alone": "standalone-two",
            "fedavg": "fedavg-two",
            "condistfl-matched": "condistfl-matched-two",
            "centralized": "centralized-matched-two",
        },
    ),
    Setting(
        "[the same, both averaged over late rounds](results-ct.md#organs-that-several-sites-annotate)",
        "head-neck-annotators",
        "fedatlas-swa-two",
        {"matched": "standalone-swa-mean-two"},
    ),
    Setting(
        "[the same, all 18 to 27 cases](results-ct.md#organs-that-several-sites-annotate)",
        "head-neck-annotators",
        "fedatlas-two-all",
        {"matched": "standalone-matched-mean-two-all"},
    ),
    Setting(
        "[the same, both averaged over late rounds](results-ct.md#organs-that-several-sites-annotate)",
        "head-neck-annotators",
        "fedatlas-swa-two-all",
        {"matched": "standalone-swa-mean-two-all"},
    ),
    Setting(
        "[four cases, all four sites annotate each organ](results-ct.md#organs-that-several-sites-annotate)",
        "head-neck-annotators",
        "fedatlas-four",
        {
            "matched": "standalone-matched-mean-four",
            "alone": "standalone-four",
            "fedavg": "fedavg-four",
            "condistfl-matched": "condistfl-matched-four",
            "centralized": "centralized-matched-four",
        },
    ),
    Setting(
        "[unequal sites: 10, 3, 2 and 1 labelled cases](results-ct.md#sites-of-unequal-size)",
        "head-neck-unequal",
        "fedatlas-down",
        {
            "matched": "standalone-matched-down",
            "fedavg": "fedavg-down",
            "condistfl-matched": "condistfl-matched-down",
            "centralized": "centralized-matched-down",
        },
    ),
    Setting(
        "[the same, 1, 2, 3 and 10](results-ct.md#sites-of-unequal-size)",
        "head-neck-unequal",
        "fedatlas-up",
        {
            "matched": "standalone-matched-mean-up",
            "fedavg": "fedavg-up",
            "condistfl-matched": "condistfl-matched-up",
            "centralized": "centralized-matched-up",
        },
    ),
    Setting(
        "[a protocol that nobody trained on](results-ct.md#a-protocol-that-nobody-trained-on)",
        "head-neck-unseen",
        "fedatlas",
        {
            "matched": "standalone-matched-mean",
            "alone": "standalone",
            "fedavg": "fedavg",
            "condistfl-matched": "condistfl-matched",
            "centralized": "centralized-matched",
        },
    ),
    Setting(
        "[generated CT](results-claims.md#fedatlas-on-generated-ct)",
        "phantom-abdomen-fedatlas",
        "fedatlas",
        {
            "matched": "standalone-matched",
            "alone": "standalone",
            "fedavg": "fedavg",
            "condistfl": "condistfl",
            "condistfl-matched": "condistfl-matched",
            "centralized": "centralized",
        },
    ),
    Setting(
        "[abdominal MR, three cases at each site](results-others.md#abdominal-mr-four-folds)",
        "abdomen-mr",
        "fedatlas",
        {
            "matched": "standalone-matched",
            "alone": "standalone",
            "fedavg": "fedavg",
            "condistfl": "condistfl",
            "condistfl-matched": "condistfl-matched",
            "centralized": "centralized-matched",
        },
    ),
    Setting(
        "[radiographs, overlapping classes](results-others.md#chest-radiographs-2d-overlapping-classes)",
        "chest-xray-seg-long",
        "fedatlas",
        {
            "matched": "standalone-mean",
            "fedavg": "fedavg",
            "condistfl": "condistfl",
            "condistfl-matched": "condistfl-matched",
            "centralized": "centralized",
        },
    ),
)

OF_FINDINGS = {
    "fedatlas": "`fedatlas`",
    "fedpsl": "FedPSL",
    "fedbn": "FedBN",
    "alone": "sites alone, the mean of those who annotate a finding",
    "centralized": "all data in one place, same labels",
}
ARMS_OF_FINDINGS = {
    "fedatlas": "fedatlas",
    "fedpsl": "fedpsl",
    "fedbn": "fedbn",
    "alone": "standalone",
    "centralized": "iml",
}
"""The arm of each, as its comparisons name it; what is trained otherwise has an ending."""

FINDINGS = (
    Setting(
        "[generated radiographs, 1000 images at each site](results-findings.md#is-federation-worth-it-for-findings)",
        "phantom-xray-pays",
        "fedavg",
        ARMS_OF_FINDINGS,
    ),
    Setting(
        "[the same, 100 images](results-findings.md#is-federation-worth-it-for-findings)",
        "phantom-xray-pays",
        "fedavg-n100",
        {name: f"{arm}-n100" for name, arm in ARMS_OF_FINDINGS.items()},
    ),
    Setting(
        "[one finding at each site, 1000 images](results-findings.md#one-finding-at-each-site)",
        "phantom-xray-one-class",
        "fedavg",
        ARMS_OF_FINDINGS,
    ),
    Setting(
        "[the same, four times the steps](results-findings.md#one-finding-at-each-site)",
        "phantom-xray-one-class",
        "fedavg-long",
        {name: f"{arm}-long" for name, arm in ARMS_OF_FINDINGS.items() if name != "fedpsl"},
    ),
)
"""As OPPONENTS and SETTINGS, for findings of whole images."""


@dataclass(frozen=True)
class Advice:
    """A row of the table that says what to take: what one has, what to take then, the place of the table on the page that says so, the
    arm that is taken and the one that it is compared with, in words as well, and what a prediction takes."""

    given: str
    take: str
    place: str
    ours: str
    other: str
    called: str
    needs: str


ONE_MODEL = "one model"
TO_TAKE = (
    Advice(
        "each organ [annotated at two sites](results-ct.md#organs-that-several-sites-annotate), four labelled cases at each site",
        "`fedatlas`, [averaged](results-ct.md#the-mean-of-late-rounds)",
        "head-neck-annotators",
        "fedatlas-swa-two",
        "standalone-swa-mean-two",
        "merged models, averaged",
        ONE_MODEL,
    ),
    Advice(
        "the same, with all 18 to 27 cases, 800 local steps",
        "`fedatlas`, averaged",
        "head-neck-annotators",
        "fedatlas-swa-two-all",
        "standalone-swa-mean-two-all",
        "merged models, averaged",
        ONE_MODEL,
    ),
    Advice(
        "nearly every organ [annotated at one site](results-ct.md#few-labelled-cases), four labelled cases at each",
        "`fedatlas`, averaged",
        "head-neck-few",
        "fedatlas-swa-4",
        "standalone-swa-mean-4",
        "merged models, averaged",
        ONE_MODEL,
    ),
    Advice(
        "the same, with [18 to 27 cases](results-ct.md#two-more-seeds), 800 local steps, five seeds",
        "merged models, averaged; `fedatlas`, averaged, if there is to be one model",
        "head-neck-five",
        "standalone-swa",
        "fedatlas-swa",
        "`fedatlas`, averaged",
        "the models of all sites",
    ),
    Advice(
        "the same, [4,000 local steps](results-ct.md#head-and-neck-ct-with-five-times-the-steps)",
        "`fedatlas`, averaged",
        "head-neck-longest",
        "fedatlas-swa",
        "standalone-swa",
        "merged models, averaged",
        ONE_MODEL,
    ),
    Advice(
        "the same 18 to 27 cases [in 3D](results-ct.md#in-3d-on-a-gpu), a net of 5.6 million parameters, 1,600 local steps",
        "`fedatlas`, averaged",
        "head-neck-volumes",
        "fedatlas-swa",
        "standalone-swa",
        "merged models, averaged",
        ONE_MODEL,
    ),
    Advice(
        "organs on images of [a hospital that does not train](results-ct.md#a-protocol-that-nobody-trained-on)",
        "`fedatlas`",
        "head-neck-unseen",
        "fedatlas",
        "standalone-matched-mean",
        "merged models",
        ONE_MODEL,
    ),
    Advice(
        "[sites of unequal size](results-ct.md#sites-of-unequal-size): 10, 3, 2 and 1 labelled cases",
        "`fedatlas`, or a little better ConDistFL with [the loss and the momentum of `fedatlas`](results.md#how-to-switch-it-on)",
        "head-neck-unequal",
        "fedatlas-down",
        "standalone-matched-down",
        "merged models, the surest decides",
        ONE_MODEL,
    ),
    Advice(
        "[classes that overlap](results-others.md#chest-radiographs-2d-overlapping-classes)",
        "`fedatlas`",
        "chest-xray-seg-long",
        "fedatlas",
        "standalone-mean",
        "merged models",
        ONE_MODEL,
    ),
    Advice(
        "[findings of whole images](results-findings.md#is-federation-worth-it-for-findings) (generated radiographs), three of six at each of four sites",
        "`fedavg`",
        "phantom-xray-pays",
        "fedavg",
        "standalone",
        "merged models",
        ONE_MODEL,
    ),
    Advice(
        "the same, [one of four findings at each site](results-findings.md#one-finding-at-each-site)",
        "every site alone",
        "phantom-xray-one-class",
        "standalone",
        "fedavg",
        "`fedavg`",
        "the models of all sites",
    ),
)
"""What to take, by what one has."""


def files_of(records: Path) -> dict[str, Path]:
    """The comparisons that have the runs of a folder of records: name -> file."""
    runs, _, profile = records.name.rpartition("-")
    found = {}
    for file in sorted(records.parents[1].glob("*.yaml")):
        plain = read_yaml(file)
        if "arms" in plain and runs == plain.get("runs", plain["name"]) and profile in plain["profiles"]:
            found[plain["name"]] = file
    return found


def recorded(
    records: Path, runs: Path, only: Collection[str] = ()
) -> Iterator[tuple[Comparison, list[str], Mapping[str, Any]]]:
    """Of a folder of records the comparisons that have its runs, each with the names of the runs that are there and what they came
    to, with the command as it is given from the project's root; runs: a folder for them, which is none of a user's; only: the names of
    those that are wanted, none for all."""
    profile = records.name.rpartition("-")[2]
    for name, file in files_of(records).items():
        if not only or name in only:
            place = runs / records.parents[1].name / f"{file.stem}-{profile}"
            comparison = load_comparison(
                [file], profile=profile, data=runs / "no data are needed", runs=place
            )
            names, found = restore_runs(comparison, records.parent), collect(comparison)
            yield comparison, names, found | {"command": found["command"].replace(f"{ROOT}/", "")}


def is_table(found: Mapping[str, Any]) -> bool:
    """Whether there is anything to compare: two arms or more."""
    return sum(bool(row["seeds"]) for row in found["arms"].values()) > 1


def make_tables(pages: Sequence[Path], only: Collection[str] = ()) -> None:
    """Makes every table of the pages again that has records, or those of the comparisons named in `only`."""
    names = {name for records in RECORDED for name in files_of(records)}
    if unknown := sorted(set(only) - names):
        raise SystemExit(
            f"no records of comparisons named {', '.join(unknown)}; there are: {', '.join(sorted(names))}"
        )
    with tempfile.TemporaryDirectory() as runs:
        for records in RECORDED:
            if not files_of(records):
                raise ValueError(
                    f"{records.relative_to(ROOT)}: no comparison file has these runs and this profile"
                )
            for comparison, _, found in recorded(records, Path(runs), only):
                for page in pages:
                    if is_table(found) and table_of(page.read_text(), comparison.name):
                        write_table(comparison, found, page)


def table_of(page: str, place: str) -> str:
    """What stands between the marks of a place."""
    return page.partition(f"<!-- {place} -->")[2].partition(f"<!-- /{place} -->")[0]


def first_table(page: str, place: str) -> str:
    """The table of means of a place, without those below it."""
    return table_of(page, place).partition("| arm | seeds |")[2].partition("\n\n")[0]


def difference(page: str, place: str, arm: str, reference: str) -> tuple[float, float, float]:
    """A difference and its interval from a table of the page, of `arm` to `reference`.

    Raises ValueError where the page has none, or a seed of either is not finished.
    """
    table = table_of(page, place)
    for one in (arm, reference):
        mean_of(page, place, one)
    name = arm if f"| difference to {reference} |" in table else f"{arm} - {reference}"
    number = r"([+-]\d+\.\d+)"
    start = rf"^\| {re.escape(name)} \| \d+ \| "
    of_cases = re.search(rf"{start}{number} \| {number} to {number} \|", table, re.MULTILINE)
    of_findings = rf"{start}[^|]*\|[^|]*\|[^|]*\| {number} \({number} to {number}\) \|"
    found = of_cases or re.search(of_findings, table, re.MULTILINE)
    if found is None:
        raise ValueError(f"the pages of results: the table {place} has no difference of {arm} to {reference}")
    value, low, high = map(float, found.groups())
    return value, low, high


def above(page: str, place: str, arm: str, other: str) -> tuple[float, float, float]:
    """By how much an arm of a table of the page is above another, with the interval, whichever of the two its differences are to.

    Raises ValueError where the page has none.
    """
    try:
        return difference(page, place, arm, other)
    except ValueError:
        value, low, high = difference(page, place, other, arm)
        return -value, -high, -low  # a bound of +0.000 is -0.000 then, which side of 0 it is on


def mean_of(page: str, place: str, arm: str) -> float:
    """An arm's mean over all columns in the first table of a place. Raises ValueError where the page has none, or a seed is not
    finished."""
    row = rf"^\| {re.escape(arm)} \| \d+ \|.*\| \**(\d\.\d+)[^|]*\|$"
    found = re.search(row, first_table(page, place), re.MULTILINE)
    if found is None:
        raise ValueError(f"the pages of results: the table {place} has no mean of {arm}")
    return float(found[1])


def validation_of(page: str, place: str, arm: str) -> float | None:
    """An arm's mean on validation cases: of its models that are scored on test cases, or, where the place has no table of these, of the
    best round. None where it has neither. Raises ValueError where it has one without the arm."""
    for title, cells in (
        ("Validation cases, Dice: ", r".*\| \**(\d\.\d+)[^|]*\|$"),
        ("Validation over the rounds: ", r"(\d\.\d+) "),
    ):
        table = table_of(page, place).partition(title)[2].partition("\n\n")[2].partition("\n\n")[0]
        if table:
            found = re.search(rf"^\| {re.escape(arm)} \| \d+ \| {cells}", table, re.MULTILINE)
            if found is None:
                raise ValueError(
                    f"the pages of results: the table {place} has no mean of {arm} on validation cases"
                )
            return float(found[1])
    return None


@dataclass(frozen=True)
class Answer:
    """A table at the top of the page: where it stands, as the tables of comparisons stand at the name of theirs; its measure; the method
    that is compared; what with -> the head of its column; and its rows."""

    place: str
    measure: str
    ours: str
    opponents: Mapping[str, str]
    settings: Sequence[Setting]

    def made(self, page: str) -> str:
        """A row per setting, with the mean of the method and by how much it is above each other way to train.

        Raises ValueError where the page lacks one of these numbers.
        """
        lines = [
            f"| {self.measure} | {self.ours} | {' | '.join(self.opponents.values())} |",
            f"|---|---|{'---|' * len(self.opponents)}",
        ]
        for setting in self.settings:
            cells = [
                _shown(above(page, setting.place, setting.ours, setting.others[name]))
                if name in setting.others
                else "–"
                for name in self.opponents
            ]
            mean = f"{mean_of(page, setting.place, setting.ours):.3f}"[1:]
            lines.append(f"| {setting.asked} | {mean} | {' | '.join(cells)} |")
        return "\n".join(lines)


ANSWERS = (
    Answer("answer", "Dice", "`fedatlas`", OPPONENTS, SETTINGS),
    Answer("answer-findings", "AUROC", "FedAvg", OF_FINDINGS, FINDINGS),
)


def to_take(page: str) -> str:
    """The table that says what to take. Raises ValueError where the page lacks one of its numbers."""
    lines = [
        "| for | take | against | lead | on validation cases | at prediction |",
        "|---|---|---|---|---|---|",
    ]
    for row in TO_TAKE:
        by = _shown(above(page, row.place, row.ours, row.other))
        ours, other = (validation_of(page, row.place, arm) for arm in (row.ours, row.other))
        seen = "–" if ours is None or other is None else _short(ours - other)
        lines.append(f"| {row.given} | {row.take} | {row.called} | {by} | {seen} | {row.needs} |")
    return "\n".join(lines)


def _shown(by: tuple[float, float, float]) -> str:
    """A difference with its interval, bold where this is on one side of 0."""
    value, low, high = by
    shown = _short(value)
    sure = copysign(1, low) == copysign(1, high)
    return f"{f'**{shown}**' if sure else shown} ({_short(low)} to {_short(high)})"


def _short(value: float) -> str:
    return re.sub(r"^([+-])0\.", r"\1.", f"{value:+.3f}")


def everything() -> str:
    """What all pages of results say, as one text."""
    return "\n".join(page.read_text() for page in PAGES)


def filled(page: str, text: str) -> str:
    """docs/results.md with its tables as those in `text`, of all pages, say. Raises ValueError where a place for one of them is lacking."""
    tables = {"to-take": to_take(text)} | {answer.place: answer.made(text) for answer in ANSWERS}
    for place, table in tables.items():
        page = _with_table(page, place, table)
    return page


def filled_readme(readme: str, text: str) -> str:
    """README.md with the table of what to take as docs/results.md has it."""
    return _with_table(readme, "to-take", to_take(text).replace("](results", "](docs/results"))


def _with_table(text: str, place: str, table: str) -> str:
    old = table_of(text, place)
    if not old:
        raise ValueError(f"no place {place}: it stands between <!-- {place} --> and <!-- /{place} -->")
    return text.replace(f"<!-- {place} -->{old}", f"<!-- {place} -->\n\n{table}\n\n", 1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument(
        "names", metavar="NAME", nargs="*", help="a comparison, as its file has it; without one, all"
    )
    make_tables(PAGES, parser.parse_args().names)
    PAGE.write_text(filled(PAGE.read_text(), everything()))
    README.write_text(filled_readme(README.read_text(), everything()))
