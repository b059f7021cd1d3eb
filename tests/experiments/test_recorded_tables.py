"""The tables of docs/results.md, and of its page of what is begun, of which the records are kept: made again from these, they are
what the pages hold."""

from pathlib import Path

import pytest

from fedatlas.compare import collect, load_comparison, markdown, restore_runs
from fedatlas.compare.records import SUFFIX
from fedatlas.federation.yaml import read_yaml

ROOT = Path(__file__).parents[2]
RECORDED = sorted(path for path in ROOT.glob("experiments/*/records/*") if path.is_dir())


def test_there_are_records() -> None:
    assert RECORDED


def comparisons(records: Path) -> list[Path]:
    """The files whose runs a folder of records has, of those that have its profile."""
    name, _, profile = records.name.rpartition("-")
    files = {file: read_yaml(file) for file in sorted(records.parents[1].glob("*.yaml"))}
    return [
        file
        for file, plain in files.items()
        if "arms" in plain and name == plain.get("runs", plain["name"]) and profile in plain["profiles"]
    ]


@pytest.mark.parametrize("records", RECORDED, ids=lambda path: path.name)
def test_a_table_is_what_its_records_say(records: Path, tmp_path: Path) -> None:
    """Of every comparison of which two arms or more have records."""
    page = "".join(path.read_text() for path in sorted((ROOT / "docs").glob("results*.md")))
    names, told = set[str](), 0
    for file in comparisons(records):
        comparison = load_comparison(
            [file],
            profile=records.name.rpartition("-")[2],
            data=tmp_path / "no data are needed",
            runs=tmp_path / file.stem,
        )
        names |= set(restore_runs(comparison, records.parent))
        found = collect(comparison)
        if sum(bool(row["seeds"]) for row in found["arms"].values()) > 1:
            # the command names the file as it was given
            made = markdown(found).replace(f"{ROOT}/", "")
            assert f"<!-- {comparison.name} -->\n\n{made}\n<!-- /{comparison.name} -->" in page
            told += 1
    assert told
    unused = {record.name for record in records.iterdir()} - {f"{name}{SUFFIX}" for name in names}
    assert not unused, "records that belong to no run of a comparison"
