"""Which data set a folder is, and how it is read: what a person would otherwise write under `sites`."""

import os
import re
import unicodedata
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedatlas.core.errors import DataError, FedAtlasError, FederationError
from fedatlas.core.options import from_dict
from fedatlas.data import datasets
from fedatlas.data.datasets.chestxray14 import CLASSES, FILE, FINDINGS, NOTHING, PATIENT
from fedatlas.data.datasets.shared.findings import empty, is_mark, read_table
from fedatlas.data.datasets.shared.listing import Splitting
from fedatlas.data.index import AUTO, Reference, SiteConfig, SiteIndex, read_image_site, read_site

PATIENT_NAME = re.compile(
    r"(?<!in)(?<!out)(patient|subject)('?s)?[ _-]*(id|no|nr|number|name|key|uid|code|pseudonym)?$", re.I
)
"""Columns that say who the patient is, as "Patient ID", and not something of it, as "Patient Age" or "inpatient"."""
DEMOGRAPHIC = {
    "age", "sex", "gender", "male", "female", "man", "woman", "smoker", "smoking", "smoked", "smokes", "race", "ethnicity",
    "ethnic", "hispanic", "insurance", "insured", "language", "religion", "marital",
}  # fmt: skip
"""Words of columns that say something of a person, which are no findings though they may be 0 or 1."""
PATIENT_IN_PATH = (r"(patient\d+)", r"([Pp]atient[ _-]?\d+)", r"([Ss]ubject[ _-]?\d+)", r"(sub-[A-Za-z0-9]+)")
SPLITS = ("train", "training", "val", "valid", "validation", "test")


def site_name(folder: Path) -> str:
    """The name of a site that its folder suggests, without accents."""
    letters = unicodedata.normalize("NFKD", folder.resolve().name.replace("ß", "ss"))
    plain = "".join(letter for letter in letters if not unicodedata.combining(letter))
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", plain).strip("-._")
    return name or "site"


def recognised(
    folder: Path, name: str, form: str | None = None, reading: Mapping[str, Any] | None = None
) -> tuple[SiteConfig, SiteIndex]:
    """A site's keys of the federation file, and its index.

    form, reading: the layout and its options where a person says them; None: they follow from what the folder holds.
    Raises DataError or FederationError for a folder that is not there, that no reader understands, or that several do.
    """
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "no such folder"
        raise DataError(
            f"{folder}: {what}; give the folder of a site, or descriptions (*.json) that `fedatlas describe` wrote"
        )
    given = dict(reading or {})
    if form is not None:
        datasets.require(form, "the data set", also=(AUTO,))
    elif given:
        raise FederationError(
            f"--reading {next(iter(given))}=…: options belong to a layout; name it with --format, one of "
            f"{', '.join(datasets.known())}"
        )
    config = from_dict(SiteConfig, {"name": name, "path": str(folder.resolve())}, what="the site")
    if form is None:
        config = _guessed(config, folder)
    else:
        config = replace(config, format=form, reading=given)
    index = _index(config)
    if not any(case.labelled and case.split == "train" for case in index.cases):
        why = f"; {_first_problem(index)}" if index.problems else ""
        raise DataError(
            f"site {name}: {folder}: read as {config.format}, no labelled training case is there{why}"
        )
    return config, index


def columns_told(config: SiteConfig, index: SiteIndex) -> str:
    """As what each column of a site's table was taken, a sentence; "" for layouts without such a table."""
    if config.format != "csv":
        return ""
    reading = {"table": "labels.csv", "file": "file"} | config.reading
    patient = reading.get("patient") or ("found in the path" if "patient_in" in reading else "in no column")
    taken = {"image": reading["file"], "patient": patient}
    taken |= {key.replace("_", " "): reading[key] for key in ("split", "no_finding") if key in reading}
    taken |= {
        "findings": ", ".join(index.findings),
        "ignored": ", ".join(reading.get("ignored", ())) or "none",
    }
    listed = "; ".join(f"{what}: {columns}" for what, columns in taken.items())
    return f"site {config.name}: columns of {reading['table']}: {listed}; if that is not so, say it with --format csv and --reading"


def _index(config: SiteConfig) -> SiteIndex:
    data = datasets.find(config.format) if config.format != AUTO else None
    folder = Path(str(config.path))
    if data is not None and data.kind == "findings":
        return read_image_site(config, folder, channels=1, splitting=Splitting(test=0.2, validation=0.2))  # type: ignore[call-arg]
    return read_site(config, folder)


def _first_problem(index: SiteIndex) -> str:
    """A fatal one before a note."""
    return str(min(index.problems, key=lambda problem: not problem.fatal))


def _guessed(config: SiteConfig, folder: Path) -> SiteConfig:
    """The site with its layout. Label tables come first, then masks per class, then tables of findings, then the data
    sets that have a layout of their own."""
    if (folder / config.table).is_file():
        fuller = Reference()  # type: ignore[call-arg]
        there = (folder / fuller.table).is_file() and (folder / fuller.labels).is_dir()
        return replace(config, reference=fuller) if there else config
    if (folder / "masks").is_dir() and (folder / "images").is_dir():
        return replace(config, format="masks")
    tables = {
        file: found
        for file in sorted(folder.glob("*.csv"))
        if file.is_file() and (found := _table(config.name, file))
    }
    if len(tables) > 1:
        names = ", ".join(file.name for file in tables)
        raise DataError(
            f"site {config.name}: {folder}: several tables hold findings: {names}; say which with --format csv "
            "--reading table=NAME"
        )
    if tables:
        form, reading = next(iter(tables.values()))
        return replace(config, format=form, reading=reading)
    readable = {
        name: labelled
        for name in datasets.known()
        if name not in ("nnunet", "csv", "masks") and (labelled := _labelled(config, name)) is not None
    }
    # without a labelled case, the reader of the only layout that fits says why there is none
    fitting = [name for name in readable if any(readable.values()) <= readable[name]]
    if len(fitting) == 1:
        return replace(config, format=fitting[0])
    if any(readable.values()):
        raise DataError(
            f"site {config.name}: {folder}: may be {' or '.join(fitting)}; say which with --format"
        )
    raise DataError(_not_understood(config.name, folder, config.table))


def _not_understood(name: str, folder: Path, table: str) -> str:
    inner = [f for f in sorted(folder.iterdir()) if f.is_dir() and not f.name.startswith(".")]
    sites = [f for f in inner if (f / table).is_file() or (f / "masks").is_dir() or any(f.glob("*.csv"))]
    if sites:
        return f"{folder}: holds folders of sites, as {sites[0].name}, and is none itself; give {folder}/*"
    return (
        f"site {name}: {folder}: no layout is recognised: no {table} with a label table, no images/ with masks/<class>/, no "
        f"table (*.csv) of findings, no series in DICOM; arrange it as docs/how-to/bring-your-data.md says, or name the layout with --format: "
        f"{', '.join(datasets.known())}"
    )


def _labelled(config: SiteConfig, form: str) -> bool | None:
    """Does the reader of a data set find a labelled case in the folder? None: it cannot read the folder at all."""
    try:
        index = _index(replace(config, format=form))
    except FedAtlasError:
        return None
    return any(case.labelled for case in index.cases)


def _table(site: str, path: Path) -> tuple[str, dict[str, Any]] | None:
    """How a table of findings is read, the layout and its options; None for a table that holds none."""
    with path.open("rb") as file:
        start = file.readline().decode("utf-8-sig", "replace")
    delimiter = max(",;\t", key=start.count)
    try:
        header, rows, _ = read_table(site, path, [], delimiter=delimiter)
    except DataError:
        return None
    if {FILE, FINDINGS, PATIENT} <= set(header) and delimiter == ",":
        official = all((path.parent / name).is_file() for name in ("train_val_list.txt", "test_list.txt"))
        cells = {part.strip() for row in rows for part in row.values[FINDINGS].split("|") if not empty(part)}
        reading: dict[str, Any] = {"table": path.name} | ({} if official else {"splits": "seed"})
        strange = sorted(cells - {*CLASSES, NOTHING})
        if strange:  # another collection in the same columns
            no_class = [name for name in strange if name.lower() in ("other", "others")]
            reading |= {"classes": sorted(cells - {*no_class, NOTHING}), "others": no_class, "source": site}
        return "chestxray14", reading
    return _columns(path, header, [row.values for row in rows], delimiter)


def _patient_column(names: list[str]) -> str | None:
    """The column that names the patient."""
    return next((name for name in names if PATIENT_NAME.search(name)), None)


def _demographic(name: str) -> bool:
    words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)
    return bool(DEMOGRAPHIC & {word.lower() for word in words})


def _patient_in(paths: list[str]) -> str | None:
    """The expression that finds a patient in every path, and fewer patients than paths."""
    for expression in PATIENT_IN_PATH:
        found = [re.search(expression, path) for path in paths]
        if 1 < len({match[1] for match in found if match}) < len(paths) and all(found):
            return expression
    return None


def _columns(
    path: Path, header: tuple[str, ...], rows: list[dict[str, str]], delimiter: str
) -> tuple[str, dict[str, Any]] | None:
    """A table with a column per class. Its parts are known by what they hold: files that are there, marks, splits."""
    first = rows[:50]
    for folder in (".", "images", "pictures", "png"):
        base = path.parent / folder
        # a cell may be a report, which is too long for the name of a file
        file = next(
            (n for n in header if first and all(v[n] and os.path.isfile(base / v[n]) for v in first)), None
        )
        if file is not None:
            break
    else:
        return None
    reading: dict[str, Any] = {"table": path.name, "file": file}
    reading |= {} if folder == "." else {"images": folder}
    reading |= {} if delimiter == "," else {"delimiter": delimiter}
    rest = [name for name in header if name and name != file]
    held = {name: {row[name] for row in rows if not empty(row[name])} for name in rest}
    patient = _patient_column(rest)
    patient_in = None if patient else _patient_in([row[file] for row in rows])
    split = next((n for n in rest if held[n] and {v.lower() for v in held[n]} <= set(SPLITS)), None)
    nothing = next((n for n in rest if re.fullmatch(r"no[ _]?findings?|normal", n, re.I)), None)
    known = {"patient": patient, "patient_in": patient_in, "split": split, "no_finding": nothing}
    reading |= {key: value for key, value in known.items() if value}
    rest = [name for name in rest if name not in (patient, split, nothing)]
    classes = [name for name in rest if all(map(is_mark, held[name])) and not _demographic(name)]
    if not classes:
        return None
    ignored = [name for name in rest if name not in classes]
    defaults = {"table": "labels.csv", "file": "file"}
    reading = {key: value for key, value in reading.items() if defaults.get(key) != value}
    return "csv", reading | ({"ignored": ignored} if ignored else {})
