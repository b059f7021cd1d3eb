"""Comparisons: several arms with several seeds each, under one budget. Arms may differ only where the file says so."""

from fedatlas.compare.intervals import Predictor
from fedatlas.compare.pages import check_page, write_page, write_table
from fedatlas.compare.plan import (
    Comparison,
    ComparisonFile,
    Layout,
    Measure,
    Profile,
    Table,
    change,
    load_comparison,
)
from fedatlas.compare.records import keep_record, keep_records, restore_runs, use_records
from fedatlas.compare.results import collect
from fedatlas.compare.running import rows_of, run_comparison, state_of
from fedatlas.report.comparison import markdown

__all__ = [
    "Comparison",
    "ComparisonFile",
    "Layout",
    "Measure",
    "Predictor",
    "Profile",
    "Table",
    "change",
    "check_page",
    "collect",
    "keep_record",
    "keep_records",
    "load_comparison",
    "markdown",
    "restore_runs",
    "rows_of",
    "run_comparison",
    "state_of",
    "use_records",
    "write_page",
    "write_table",
]
