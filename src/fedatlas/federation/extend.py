"""A federation file with which a run goes on: with sites that join, new classes, or both."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter

from fedatlas import methods
from fedatlas.core.errors import FederationError, require_run
from fedatlas.core.options import not_known
from fedatlas.data.index import SiteConfig
from fedatlas.federation.design import space_of
from fedatlas.federation.file import Federation, load_federation, make_method
from fedatlas.federation.initial import sentence
from fedatlas.federation.tasks import task_of
from fedatlas.federation.usable import record_of
from fedatlas.federation.yaml import load_raw, read_yaml, with_paths
from fedatlas.transport.store import write_atomic


def extend(
    run: Path, file: Path, out: Path, *, model: str = "best", without: Sequence[str] = ()
) -> list[str]:
    """Writes the federation file `out`, which goes on from a model of a run; returns what it says, a sentence each.

    file: what is new, as keys of a federation file: `sites` that join, or replace those of their name; in `labels` the
    names of new classes, otherwise those that the sites bring; every other key stands before the run's. without: sites of
    the run that take no part.

    Raises RunFolderError for a run that is none, FederationError for what cannot be gone on with.
    """
    require_run(run, "run.json")
    if out.exists():
        raise FederationError(f"{out}: exists already; name another file with -o")
    info, space, _ = record_of(run)
    known, of_run = space.names, load_federation(run / "federation.yaml")
    if make_method(of_run).alone:
        raise FederationError(
            f"{run}: its sites trained alone, so it has no model of all to go on from; train one"
        )
    old, new = read_yaml(run / "federation.yaml"), with_paths(load_raw(file), file.resolve().parent)
    if not new and not without:
        raise FederationError(f"{file}: says nothing new; give `sites`, new names in `labels`, or other keys")
    given = new.pop("sites", None) or []
    sites = _sites(old, given, without, file)
    labels = new.pop("labels", None) or {}
    if not isinstance(labels, Mapping):
        raise FederationError(
            f"{file}: labels: got {labels!r}; expected a mapping of keys, as names: [larynx]"
        )
    names = labels.get("names") or []
    if not isinstance(names, list):
        raise FederationError(f"{file}: labels.names: got {names!r}; expected a list, as [{names}]")
    added = [name for name in names if name not in known]
    asked = [str(site["name"]) for site in given]
    # groups and findings may be of classes that are known once the sites that bring them have been read
    later = {} if names else {key: labels[key] for key in ("groups", "findings") if key in labels}
    values: dict[str, Any] = {
        "extends": os.path.relpath((run / "federation.yaml").resolve(), out.resolve().parent),
        "name": f"{old['name']}-extended"[:100],
        "labels": {
            **{key: value for key, value in labels.items() if key not in later},
            "names": [*known, *added],
        },
        "sites": list(sites.values()),
        "init_from": {"path": str(run.resolve()), "model": model},
        "method": methods.continued(of_run.method, make_method(of_run), space),
        **new,
    }
    joined = [name for name in sites if name not in {site["name"] for site in old["sites"]}]
    try:
        federation = _written(values, out, run)
        if not names:
            values["labels"]["names"] += [name for name in _brought(federation, asked) if name not in known]
            values["labels"] |= later
            federation = _written(values, out, run)
    except BaseException:
        out.unlink(missing_ok=True)
        raise
    assert federation.init_from is not None
    told = [
        f"sites: {', '.join(sites)}"
        + "".join(
            f"; {what} {', '.join(names)}" for what, names in (("new", joined), ("without", without)) if names
        )
    ]
    told.append(sentence(federation.init_from, space_of(federation, {})))
    kept = [set(info["sites"].get(name, {}).get("annotated", ())) for name in sites if name not in asked]
    lost = set[str]().union(*(site["annotated"] for site in info["sites"].values())).difference(*kept)
    lost = lost.difference(_brought(federation, asked)) if lost else lost
    if lost:
        elsewhere = [site.name for site in federation.sites if site.name in asked and site.path is None]
        told.append(
            f"nobody annotates {', '.join(name for name in known if name in lost)} any more"
            + (f", unless {' or '.join(elsewhere)} does" if elsewhere else "")
            + "; a run needs a site that does"
        )
    return [*told, f"method: {federation.method['name']}, {federation.rounds} rounds"]


def _sites(old: Mapping[str, Any], new: Any, without: Sequence[str], file: Path) -> dict[str, dict[str, Any]]:
    """name -> site of the federation file: those of the run but `without`, and the new ones. Keys with their defaults are
    left out. Raises FederationError for a site to leave out that is none, and for what is no list of sites."""
    sites = {site["name"]: site for site in old["sites"]}
    for name in without:
        if name not in sites:
            raise not_known("--without: the site", name, sites)
        del sites[name]
    if not isinstance(new, list) or not all(isinstance(site, Mapping) and "name" in site for site in new):
        raise FederationError(f"{file}: sites: expected a list of mappings, each with a name")
    asked = [str(site["name"]) for site in new]
    twice = sorted({name for name in asked if asked.count(name) > 1})
    if twice:
        raise FederationError(f"{file}: sites: {', '.join(twice)} is given twice; each name is allowed once")
    defaults = TypeAdapter(SiteConfig).dump_python(SiteConfig(name="any"), mode="json")  # type: ignore[call-arg]
    kept = {
        name: {key: value for key, value in site.items() if key == "name" or value != defaults.get(key)}
        for name, site in sites.items()
    }
    return kept | {str(site["name"]): dict(site) for site in new}


def _written(values: Mapping[str, Any], out: Path, run: Path) -> Federation:
    """The federation of these values, with the file that holds them."""
    text = yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True, width=120)
    write_atomic(out, f"# Written by `fedatlas extend`: goes on from {run.name}.\n{text}".encode())
    return load_federation(out)


def _brought(federation: Federation, asked: Sequence[str]) -> list[str]:
    """The names of classes that sites which join, or replace others, annotate, of those whose data are here."""
    task, names = task_of(federation), []
    for site in federation.sites:
        if site.name in asked and site.path is not None:
            names += task.read(federation, site, Path(site.path)).brings
    return list(dict.fromkeys(names))
