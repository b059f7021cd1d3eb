"""The tables of docs/results-*.md of which the records are kept: made again from these, they are what the pages hold."""

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

from fedatlas.compare import write_table
from fedatlas.compare.records import SUFFIX

ROOT = Path(__file__).parents[2]
TOOL = SimpleNamespace(**runpy.run_path(str(ROOT / "tools" / "results_page.py")))


def test_there_are_records() -> None:
    assert TOOL.RECORDED


@pytest.mark.parametrize("records", TOOL.RECORDED, ids=lambda path: path.name)
def test_a_table_is_what_its_records_say(records: Path, tmp_path: Path) -> None:
    """Of every comparison of which two arms or more have records, but those that are begun, which have no table until they are finished."""
    page = tmp_path / "page.md"
    text = "".join(path.read_text() for path in sorted((ROOT / "docs").glob("results*.md")))
    page.write_text(text)
    names, told = set[str](), 0
    for comparison, there, found in TOOL.recorded(records, tmp_path):
        names |= set(there)
        if comparison.name in TOOL.BEGUN:
            assert len(there) < sum(map(len, comparison.federations.values())), "finished: give it a table"
            assert not TOOL.table_of(text, comparison.name)
            told += 1
        elif TOOL.is_table(found):
            write_table(comparison, found, page)
            assert page.read_text() == text, "run tools/results_page.py"
            told += 1
    assert told
    unused = {record.name for record in records.iterdir()} - {f"{name}{SUFFIX}" for name in names}
    assert not unused, "records that belong to no run of a comparison"
