"""What is compared: the comparison file, and the federations that it stands for.

A comparison file names a federation file and what every arm changes in it. Each (arm, seed) is an ordinary run in a
folder of its own, so that a comparison that was stopped goes on where it was, run by run and round by round.
"""

import copy
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import Field

from fedatlas.core.errors import FederationError
from fedatlas.core.labels import BACKGROUND
from fedatlas.core.options import NAME, from_dict, not_known, option, options
from fedatlas.evaluation.voxels import FINDING_METRICS as OF_FINDINGS
from fedatlas.federation.file import (
    METRICS_OF,
    Federation,
    load_federation,
    make_method,
    parse_federation,
    selects,
)
from fedatlas.federation.yaml import CHOICES, COMPARISON, FILE, expanded, from_folder, order_of, read_yaml
from fedatlas.report.comparison import MILLIMETRES

MOST_LETTERS = 96
"""Of the name of a run without its seed."""
CLAIM = re.compile(r"(Table|Figure) (S?\d+|[IVX]+)[A-Z]?")
"""How a table or figure of a paper is named."""


@options
class Measure:
    """What the tables of a comparison average."""

    metric: str | None = option(
        None, "Of the final evaluation; null: dice, or auroc for labels of whole images."
    )
    split: Literal["test", "validation"] = option("test", "The cases that are scored.")
    model: str = option("best", "best, last or local/<site>.", pattern=r"^(best|last|local/.+)$")
    local: tuple[str, ...] = option(
        (),
        "Arms that are scored by every site's own local model, on the classes that it annotates, in place of `model`.",
    )
    sites: tuple[str, ...] | Literal["train", "test"] | None = option(
        None,
        "Sites that are averaged over: a list of them, or train or test for those of that role; null: all.",
    )
    known: bool | None = option(
        None,
        "true: only classes that the case's own site annotates for the first arm; false: only the others; null: all.",
    )
    postprocess: bool = option(
        False, "Whether the values are those after `evaluation.postprocess`, which every arm then has."
    )


AVERAGES = ("mean", "exclude*", "include*")
"""Columns that average others. The last two, with columns of site and class: without and with starred cells."""


@options
class Layout:
    """The columns of a table of means."""

    columns: Literal["class", "site-class"] = option(
        "class",
        "class: every class over all sites. site-class: every class at every site; a star marks what the site does not "
        "annotate.",
    )
    group: Literal["site", "organ"] | None = option(
        None,
        "What stands together: the columns of a site, or those of an organ and its lesions. Null: site for site-class.",
    )
    average: Literal["columns", "sites"] = option(
        "columns",
        "The last column: over all columns; or sites: over sites, of the mean over a site's classes (Fed-MENU's global "
        "index).",
    )
    cells: Literal["seeds", "cases"] = option(
        "seeds", "seeds: mean ± SD over seeds. cases: mean (SD) over cases, each the mean over seeds."
    )
    against: str | None = option(
        None,
        "Arm that every cell is tested against, by the paired t test over cases; p < 0.05 is underlined. Null: none.",
    )
    correction: Literal["none", "holm"] = option("none", "Of these p values, over all tests of the table.")
    percent: bool = option(False, "Whether values are printed in percent, as `printed` then is.")
    decimals: int | None = option(
        None, "Of what is printed; null: three, of percent two, of millimetres one.", ge=0, le=6
    )
    radar: Literal["values", "normalised"] | None = option(
        None,
        "Radar plots of the table's arms over sites and over classes, on the page. values: one scale; normalised: every "
        "axis from its worst arm to its best.",
    )
    dots: bool = option(
        False,
        "Whether the page shows the table's arms side by side over sites and over classes, mean ± SD over seeds.",
    )

    def __post_init__(self) -> None:
        for key, chosen in (("cells: cases", self.cells == "cases"), ("against", self.against is not None)):
            if chosen and self.columns == "class":
                raise FederationError(
                    f"layout: {key} is of the cases of one site and class, and columns are 'class'; set columns to "
                    "site-class"
                )
        if self.correction != "none" and self.against is None:
            raise FederationError(
                f"layout: correction is {self.correction!r}, and nothing is tested; set against to an arm"
            )
        if self.columns == "class" and self.group == "site":
            raise FederationError(
                "layout: group is 'site', and columns are 'class', over all sites; allowed with it: organ or null. For "
                "columns by site set columns to site-class"
            )


@options
class Table(Measure):
    """A further table of means."""

    title: str | None = option(None, "Caption, for example the number of the paper's table.")
    layout: Layout = option(Layout(), "Its columns.")  # type: ignore[call-arg]
    printed: dict[str, dict[str, float]] = option({}, "Published numbers of it, as `printed`.")


M = TypeVar("M", bound=Measure)


@options
class Sweep:
    """A figure of averages over a number of the federation file in which arms differ."""

    over: tuple[str, ...] = option(
        ...,
        "The key of the number, as rounds or method.sam.start, or several keys that hold the same number in an arm; of "
        "sites by their names, * for all that train.",
        min_length=1,
    )
    beside: tuple[str, ...] = option(
        (), "Further keys in which the arms of one line may differ; name, seed and engine always may."
    )
    title: str | None = option(None, "The number, in words, at the axis; null: the first key.")


EXCHANGE = Sweep(over=("rounds",), beside=("local.steps", "local.epochs", "evaluation"))  # type: ignore[call-arg]
"""How often to exchange."""


@options
class Profile:
    """A budget of a comparison. Every further key of it changes the federation file of all arms."""

    seeds: int | None = option(None, "How many of the file's seeds; null: all.", ge=1)
    rounds: int | None = option(None, "Rounds of every arm; null: as the base says.", ge=1)
    steps: int | None = option(
        None,
        "Optimizer steps per site and round; a method that pools the sites gets those of all sites. Null: as the base "
        "says.",
        ge=1,
    )
    arms: dict[str, dict[str, Any]] = option({}, "Arm -> what it changes in this profile, beside its own.")


Seed = Annotated[int, Field(ge=0, strict=True)]


@options
class ComparisonFile:
    """A comparison file."""

    name: str = option(..., "Names the folder of its runs and its place on a page.", pattern=NAME)
    base: str = option(..., "The federation file, relative to this one.")
    runs: str | None = option(
        None,
        "The name of the folder of its runs, where several files show the same arms; null: its own name.",
        pattern=NAME,
    )
    arms: dict[str, dict[str, Any] | None] = option(
        ..., "Arm -> what it changes in the base; the first is the reference.", min_length=1
    )
    references: dict[str, str] = option(
        {},
        "Arm -> the arm that its difference is to, where arms come in pairs, as with few and with many cases; of all others it "
        "is the first arm.",
    )
    leave_out: tuple[str, ...] = option(
        (),
        "Sites that are left out in turn: every arm is trained once without each of them, as ARM-without-SITE, and the tables "
        "score each of them, all its cases, by the models that never saw it (leave one site out).",
    )
    folds: int | None = option(
        None,
        "Into how many parts the patients of every training site are divided: every arm is trained as often, as ARM-fold-1 and so "
        "on, each time tested on another part, and the tables score every case by the model that never saw it (cross-validation).",
        ge=2,
    )
    seeds: tuple[Seed, ...] = option((0,), "Seeds of every arm.", min_length=1)
    profiles: dict[str, dict[str, Any]] = option({}, "Name -> budget, and what it changes for all arms.")
    measure: Measure = option(Measure(), "What the tables average.")  # type: ignore[call-arg]
    layout: Layout = option(Layout(), "The columns of the table of `measure`.")  # type: ignore[call-arg]
    tables: tuple[Table, ...] = option((), "Further tables of means, beside that of `measure`.")
    sweeps: tuple[Sweep, ...] = option(
        (EXCHANGE,),
        "Figures of the tables' averages over a number; where no two arms differ in it alone there is none.",
    )
    printed: dict[str, dict[str, float]] = option(
        {},
        "Published numbers, which stand beside ours: arm -> column -> value. A column is a class, site/class, mean, "
        "exclude* or include*.",
    )
    analyses: dict[str, tuple[str, ...]] = option(
        {},
        "Analysis, as `fedatlas analyse` has it -> arms whose first seed is shown with it on the page, once it "
        "was made; of hessian the tables have every seed.",
    )
    paper: str | None = option(None, "The short name of the paper whose tables and figures `claims` lists.")
    claims: dict[str, tuple[str, ...]] = option(
        {},
        "Table or figure of the paper that the page repeats, as Table 2 or Figure S4 -> the parts of the page that do.",
    )


@dataclass(frozen=True)
class Comparison:
    """What is to be run and compared. federations: arm -> seed -> federation, in order; the first arm is the reference
    of those that are not in references, arm -> its own. folder: holds a run folder per arm and seed. command: what makes the table, for a reader.
    turns: where sites are left out in turn, arm of the tables -> left-out site -> the arm that is trained without it; where folds of
    their cases are, with the number of the fold in place of the site; else empty. folds: how many there are, or None."""

    name: str
    profile: str | None
    federations: Mapping[str, Mapping[int, Federation]]
    measure: Measure
    printed: Mapping[str, Mapping[str, float]]
    folder: Path = Path()
    command: str = ""
    tables: Sequence[Table] = ()
    layout: Layout = field(default_factory=Layout)
    sweeps: Sequence[Sweep] = (EXCHANGE,)
    analyses: Mapping[str, Sequence[str]] = field(default_factory=dict)
    paper: str | None = None
    claims: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Table or figure of the paper -> parts of the page."""
    title: str | None = None
    shared: str | None = None
    """The name of the folder of its runs where that is not its own."""
    references: Mapping[str, str] = field(default_factory=dict)
    turns: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    folds: int | None = None

    @property
    def left_out(self) -> list[str]:
        """The sites that are left out in turn."""
        return [] if self.folds else list(next(iter(self.turns.values()), ()))

    @property
    def compared(self) -> dict[str, str]:
        """Arm -> the arm that its difference is to. Arms that are such a reference themselves have none, unless they name one."""
        first = self.arms[0]
        references = {first, *self.references.values()}
        return {
            arm: self.references.get(arm, first)
            for arm in self.arms
            if arm in self.references or arm not in references
        }

    @property
    def families(self) -> list[list[str]]:
        """The arms in groups, each of those that are compared with one another, by way of others too: one group, unless
        `references` keep settings apart."""
        groups: list[list[str]] = []
        for pair in [{arm} for arm in self.arms] + [{arm, other} for arm, other in self.compared.items()]:
            joined = {*pair, *(arm for group in groups if pair & set(group) for arm in group)}
            groups = [group for group in groups if not pair & set(group)]
            groups.append([arm for arm in self.arms if arm in joined])
        return sorted(groups, key=lambda group: self.arms.index(group[0]))

    @property
    def arms(self) -> list[str]:
        """Those of the tables."""
        return list(self.turns or self.federations)

    def trained(self, arm: str) -> list[str]:
        """What is trained for an arm of the tables: itself, or it without each left-out site or fold in turn."""
        return list(self.turns[arm].values()) if arm in self.turns else [arm]

    def federation(self, arm: str) -> Federation:
        """Of an arm of the tables: its first seed, and without the first site or fold that is left out."""
        return next(iter(self.federations[self.trained(arm)[0]].values()))

    def counts(self, trained: str, site: str) -> bool:
        """Whether the tables hold what a trained arm scores at a site."""
        if self.measure.sites is not None and site not in self.measure.sites:
            return False
        if self.folds:
            return site in {entry.name for entry in self.first.sites if entry.role == "train"}
        return not self.turns or any(of.get(site) == trained for of in self.turns.values())

    @property
    def seeds(self) -> list[int]:
        return list(next(iter(self.federations.values())))

    @property
    def metric(self) -> str:
        return self.measure.metric or selects(self.first)

    @property
    def first(self) -> Federation:
        """Of the reference arm."""
        return self.federation(self.arms[0])

    def path(self, arm: str, seed: int) -> Path:
        """The run folder."""
        return self.folder / f"{arm}-s{seed}"

    def table(self, table: Table) -> "Comparison":
        """The same runs, seen as a further table says."""
        return replace(
            self, measure=table, layout=table.layout, printed=table.printed, title=table.title, tables=()
        )


def load_comparison(
    files: Sequence[Path],
    *,
    profile: str | None = None,
    data: Path | None = None,
    runs: Path = Path("runs"),
    seeds: int | None = None,
    workers: int | None = None,
    device: str | None = None,
    against: str | None = None,
    measure: Mapping[str, Any] | None = None,
) -> Comparison:
    """One comparison file, or federation files of which each is an arm.

    data: the folder from which relative site paths of the base are taken. seeds: how many; of federation files the
    seeds 0, 1, … in place of their own. workers, device: in place of those of `engine`. against, measure: of a comparison
    file: the arm to which the differences of all others are, in place of its first and of `references`, and keys in place of
    those of its `measure`, without its `printed`.

    Raises FederationError naming the file, the key, what was got and what is allowed.
    """
    raw = read_yaml(files[0], expected=COMPARISON if len(files) == 1 else FILE)
    if len(files) == 1 and ("arms" in raw or "base" in raw):
        given = _from_file(files[0], _seen(raw, against, measure or {}), profile, data, seeds)
    elif against is not None or measure:
        asked = f"--against {against}" if against is not None else "--measure"
        raise FederationError(
            f"{asked}: is of a comparison file, and {files[0]} is a federation file; the first of these is the reference, and "
            "the tables have their defaults"
        )
    else:
        given = _from_federations(files, profile, data, seeds)
    shared = given.shared or given.name
    folder = runs / (f"{shared}-{given.profile}" if given.profile else shared)

    def placed(federation: Federation) -> Federation:
        engine = federation.engine
        cache = engine.cache or str((runs / ".cache").resolve())
        workers_ = engine.workers if workers is None else workers
        device_ = device or engine.device
        return replace(federation, engine=replace(engine, cache=cache, workers=workers_, device=device_))

    federations = {
        arm: {seed: placed(federation) for seed, federation in of_arm.items()}
        for arm, of_arm in given.federations.items()
    }
    roles = [(site.name, site.role) for site in given.first.sites]
    words = ["fedatlas compare", *map(_shown, files)]
    words += [f"--profile {profile}"] if profile else []
    words += ["--data DIR"] if data else []
    words += [f"--seeds {seeds}"] if seeds else []
    words += [f"--against {against}"] if against is not None else []
    words += [
        f"--measure {shlex.quote(f'{key}={_in_one_line(value)}')}" for key, value in (measure or {}).items()
    ]
    found = replace(
        given,
        federations=federations,
        folder=folder,
        command=" ".join(words),
        measure=_with_sites(given.measure, roles, files[0]),
        tables=tuple(_with_sites(table, roles, files[0]) for table in given.tables),
    )
    for table in (found, *map(found.table, found.tables)):
        _check_measure(table, files[0])
        _check_layout(table, files[0])
        _check_printed(table, files[0])
    from fedatlas.compare.parts import check_claims  # its parts draw what is planned here

    check_claims(found, files[0])
    return found


def _seen(raw: Mapping[str, Any], against: str | None, measure: Mapping[str, Any]) -> dict[str, Any]:
    """What a comparison file holds, with another reference and other keys of `measure`, as of `load_comparison`."""
    seen = dict(raw)
    arms = raw.get("arms")
    if against is not None and isinstance(arms, Mapping):
        if against not in arms:
            raise not_known(f"--against {against}: the arm", against, arms)
        seen["references"] = {arm: against for arm in arms if arm != against}
    if measure:
        fields = [*Measure.__pydantic_fields__]  # type: ignore[attr-defined]
        for key in measure:
            if key not in fields:
                raise not_known(f"--measure {key}: the key", key, fields)
        before = raw.get("measure") or {}
        seen["measure"] = {**before, **measure} if isinstance(before, Mapping) else before
        seen.pop("printed", None)
    return seen


def _in_one_line(value: Any) -> str:
    """A value as YAML writes it."""
    return yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("\n...\n").strip()


def _with_sites(measure: M, roles: Sequence[tuple[str, str]], file: Path) -> M:
    """With the sites of a role in place of the role. roles: (site, role) of every site."""
    if measure.sites is not None and not measure.sites:
        raise FederationError(f"{file}: measure: sites: is empty; leave it out for all sites")
    if not isinstance(measure.sites, str):
        return measure
    sites = tuple(site for site, role in roles if role == measure.sites)
    if not sites:
        raise FederationError(
            f"{file}: measure: sites is {measure.sites!r}, and no site has that role; list the sites by name"
        )
    return replace(measure, sites=sites)


def _shown(path: Path) -> str:
    if path.is_absolute() and path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    return path.name if path.is_absolute() else str(path)


def _from_file(
    file: Path, raw: dict[str, Any], profile: str | None, data: Path | None, seeds: int | None
) -> Comparison:
    given = from_dict(ComparisonFile, raw, what=str(file))
    _check_names(file, given, profile)
    budget, common = _budget(file, given, profile)
    chosen = _seeds(file, given.seeds, budget.seeds, seeds)
    for arm in budget.arms:
        if arm not in given.arms:
            raise not_known(f"{file}: profiles: {profile}: the arm", arm, given.arms)
    _check_turns(file, given)
    base_path = file.parent / given.base
    base = read_yaml(base_path)
    if data is not None:
        base["sites"] = _from_data(base_path, base, data)
    federations: dict[str, dict[int, Federation]] = {}
    turns: dict[str, dict[str, str]] = {}
    for arm, changes in given.arms.items():
        what = f"{file}: arm {arm}"
        own = [changes or {}, budget.arms.get(arm, {})]
        trained = {arm: _arm(base, base_path, what, budget, common, own)}
        changed = _changed_in_turn(file, given, arm, trained[arm])
        if changed:
            turns[arm] = {turn: f"{arm}-{word}-{turn}" for turn, (word, _) in changed.items()}
            trained = {
                turns[arm][turn]: _arm(
                    base, base_path, f"{what} {word} {turn}", budget, common, [*own, change]
                )
                for turn, (word, change) in changed.items()
            }
        for name, federation in trained.items():
            if name in federations or (turns and name in given.arms):
                key = "folds" if given.folds else "leave_out"
                raise FederationError(f"{file}: {key}: {name} is what two arms are called; rename one")
            named = "-".join(part for part in (given.runs or given.name, profile, name) if part)
            if len(named) > MOST_LETTERS:
                raise FederationError(
                    f"{what}: its runs would be called {named}, {len(named)} letters; allowed: {MOST_LETTERS}. Give the comparison, the "
                    "profile or the arm a shorter name"
                )
            federations[name] = {
                seed: replace(federation, name=f"{named}-s{seed}", seed=seed) for seed in chosen
            }
    return Comparison(
        given.name,
        profile,
        federations,
        given.measure,
        given.printed,
        tables=given.tables,
        sweeps=given.sweeps,
        analyses=given.analyses,
        paper=given.paper,
        claims=given.claims,
        layout=given.layout,
        shared=given.runs,
        references=given.references,
        turns=turns,
        folds=given.folds,
    )


def _check_names(file: Path, given: ComparisonFile, profile: str | None) -> None:
    """Raises FederationError for names that cannot be, and for a profile or an arm of `references` that is none."""
    for claim in given.claims:
        if not CLAIM.fullmatch(claim):
            raise FederationError(
                f"{file}: claims: {claim!r} names no table or figure; expected Table or Figure and its number, as Table 2, "
                "Table IV, Figure S4 or Figure 8A"
            )
    for what, names in (("arm", given.arms), ("profile", given.profiles)):
        for name in names:
            if not re.fullmatch(NAME, name):
                raise FederationError(
                    f"{file}: the {what} {name!r}: a name of letters, digits, '.', '_' and '-' is expected"
                )
    if profile is None and given.profiles:
        raise FederationError(
            f"{file}: say which profile, with --profile; there are: {', '.join(given.profiles)}"
        )
    if profile is not None and profile not in given.profiles:
        raise not_known(f"{file}: the profile", profile, given.profiles)
    for arm, reference in given.references.items():
        for name in (arm, reference):
            if name not in given.arms:
                raise not_known(f"{file}: references: the arm", name, given.arms)
        if arm == reference:
            raise FederationError(f"{file}: references: {arm} is its own reference; name another arm")


def _changed_in_turn(
    file: Path, given: ComparisonFile, arm: str, whole: Federation
) -> dict[str, tuple[str, dict[str, Any]]]:
    """Turn (a site that is left out, or a fold that is tested on) -> the word for it in names of runs, and what changes in
    the arm's federation. Raises FederationError where that cannot be."""
    left_out = {site: ("without", _without(file, arm, whole, site)) for site in given.leave_out}
    tested = {
        str(fold): ("fold", _fold(f"{file}: arm {arm}", whole, fold, given.folds))
        for fold in range(1, (given.folds or 0) + 1)
    }
    return left_out | tested


def _fold(what: str, whole: Federation, fold: int, folds: int | None) -> dict[str, Any]:
    """What changes in an arm's federation where a fold of the cases of its training sites is tested on. Raises FederationError where
    its cases are not divided by the federation file."""
    if whole.task != "segmentation":
        raise FederationError(
            f"{what}: folds: are for segmentation; whole images are divided by `evaluation.test` and `evaluation.split_seed`, of which "
            "arms may have several"
        )
    share = whole.evaluation.validation
    return {
        "sites": {
            site.name: {
                "split": {"test": 0, "folds": folds, "fold": fold}
                | ({"validation": float(share)} if site.split is None else {})
            }
            for site in whole.sites
            if site.role == "train"
        }
    }


def _without(file: Path, arm: str, whole: Federation, site: str) -> dict[str, Any]:
    """What changes in an arm's federation where a site is left out: all its cases test. Raises FederationError where it cannot be
    left out."""
    roles = {entry.name: entry.role for entry in whole.sites}
    if site not in roles:
        raise not_known(f"{file}: leave_out: the site", site, roles)
    if roles[site] != "train":
        raise FederationError(
            f"{file}: leave_out: the site {site} does not train in arm {arm}, its role is {roles[site]}; leave out sites that "
            "train"
        )
    if sum(role == "train" for role in roles.values()) == 1:
        raise FederationError(
            f"{file}: leave_out: {site} is the only site that trains in arm {arm}; two or more are needed"
        )
    return {"sites": {site: {"role": "test", "split": None, "cases": None}}}


def _check_turns(file: Path, given: ComparisonFile) -> None:
    """FederationError where sites or folds are left out in turn and something else needs one model for all cases."""
    measures = (given.measure, *given.tables)
    asked = {
        "analyses": bool(given.analyses),
        "measure: local": any(measure.local for measure in measures),
        "measure: split: validation": any(measure.split == "validation" for measure in measures),
    }
    if given.folds and given.leave_out:
        raise FederationError(
            f"{file}: folds and leave_out: a comparison leaves out one of the two; take one away"
        )
    if given.folds:
        asked["measure: sites: test"] = any(measure.sites == "test" for measure in measures)
        why = (
            "the tables score the cases of sites that train, each once, by the common model that never saw it"
        )
        _refuse(f"{file}: folds: {why}; take folds away, or", asked)
    if not given.leave_out:
        return
    listed = ", ".join(given.leave_out)
    if len(set(given.leave_out)) < len(given.leave_out):
        raise FederationError(f"{file}: leave_out: {listed} names a site twice")
    asked |= {
        "measure: model": any(measure.model.startswith("local/") for measure in measures),
        "measure: known": any(measure.known is not None for measure in measures),
        "measure: sites: train or test": any(isinstance(measure.sites, str) for measure in measures),
    }
    why = "the tables score each of these sites by the common model of the others, on its test cases"
    _refuse(f"{file}: leave_out: {listed}: {why}; take leave_out away, or", asked)
    for site in (site for measure in measures for site in measure.sites or ()):
        if site not in given.leave_out:
            raise not_known(f"{file}: leave_out: the site of measure: sites", site, given.leave_out)


def _refuse(what: str, asked: Mapping[str, bool]) -> None:
    """FederationError for the first key that is asked for."""
    for key, there in asked.items():
        if there:
            raise FederationError(f"{what} {key}")


def _budget(file: Path, given: ComparisonFile, profile: str | None) -> tuple[Profile, dict[str, Any]]:
    """A profile, and what it changes in the federation of all arms."""
    if profile is None:
        return Profile(), {}  # type: ignore[call-arg]
    raw = given.profiles[profile] or {}
    keys = [*Profile.__pydantic_fields__]  # type: ignore[attr-defined]
    allowed = [*Federation.__pydantic_fields__]  # type: ignore[attr-defined]
    for key in raw:
        if key not in keys and key.partition(".")[0] not in allowed:
            raise not_known(f"{file}: profiles: {profile}: the key", key, [*keys, *allowed])
    own = from_dict(Profile, {k: v for k, v in raw.items() if k in keys}, what=f"{file}: profiles: {profile}")
    return own, {k: v for k, v in raw.items() if k not in keys}


def _seeds(file: Path, listed: Sequence[int], wanted: int | None, asked: int | None) -> list[int]:
    if len(set(listed)) < len(listed):
        raise FederationError(f"{file}: seeds: {list(listed)} holds one twice")
    count = asked or wanted or len(listed)
    if count > len(listed):
        raise FederationError(f"{file}: {count} seeds were asked for, and the file lists {list(listed)}")
    return list(listed[:count])


def _arm(
    base: Mapping[str, Any],
    base_path: Path,
    what: str,
    budget: Profile,
    common: Mapping[str, Any],
    own: Sequence[Mapping[str, Any]],
) -> Federation:
    """The federation of an arm: base, what the profile changes, its budget, what the arm changes."""
    raw = copy.deepcopy(dict(base))
    for key in ("seed", "name"):
        if any(key in changes for changes in (common, *own)):
            belongs = "`seeds` of the comparison" if key == "seed" else "the name of the arm"
            raise FederationError(f"{what}: {key}: every run has its own, by {belongs}; leave it out here")
    change(raw, common, what)
    if budget.rounds:
        raw["rounds"] = budget.rounds
    if budget.steps:
        change(raw, {"local": {"steps": budget.steps, "epochs": None}}, what)
    for changes in own:
        change(raw, changes, what)
    named = {key for changes in own for key in _keys(changes)}
    if "local.epochs" in named and "local.steps" not in named:
        raw["local"]["steps"] = None
    if "local.steps" in named and "local.epochs" not in named:
        raw["local"]["epochs"] = None
    federation = parse_federation(raw, base=base_path.parent, source=what)
    own_steps = named & {"local.steps", "local.epochs"}
    if budget.steps and not own_steps and make_method(federation).pooled:
        training = sum(site.role == "train" for site in federation.sites)
        federation = replace(federation, local=replace(federation.local, steps=budget.steps * training))
    return federation


def _keys(changes: Any, prefix: str = "") -> Iterable[str]:
    for key, value in changes.items():
        yield f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _keys(value, f"{prefix}{key}.")


def change(raw: dict[str, Any], changes: Mapping[str, Any], what: str) -> None:
    """Changes a raw federation in place. A key is a key of the file, with a mapping that is merged, or a key.path;
    under `sites` names stand for entries, and * for all of them. Another method or net by name replaces the whole
    block, in whatever order its name and its options are given.

    Raises FederationError for a path that leads nowhere.
    """
    for key, value in sorted(changes.items(), key=lambda item: order_of(str(item[0]))):
        _change(raw, str(key).split("."), copy.deepcopy(value), f"{what}: {key}", ())


def _change(place: Any, path: list[str], value: Any, what: str, above: tuple[str, ...]) -> None:
    part, rest = path[0], path[1:]
    if isinstance(place, list):
        names = [item.get("name") if isinstance(item, dict) else None for item in place]
        if part != "*" and part not in names:
            raise not_known(f"{what}: the entry of {'.'.join(above)}", part, [str(name) for name in names])
        for entry, name in zip(place, names, strict=True):
            if part in ("*", name):
                _into(entry, rest, value, what, (*above, str(name)))
        return
    if not isinstance(place, dict):
        raise FederationError(f"{what}: {'.'.join(above)} is {place!r} and has no keys")
    old = place.get(part)
    if not rest and not isinstance(value, Mapping):
        if part == "name" and above and above[-1] in CHOICES and old != value:
            place.clear()
        place[part] = value
    elif not rest and part in CHOICES:
        if not isinstance(old, dict) or value.get("name", old.get("name")) != old.get("name"):
            place[part] = value
        else:
            _into(old, [], value, what, (*above, part))
    elif not rest and not isinstance(old, dict | list):
        place[part] = value
    else:
        _into(place.setdefault(part, {}), rest, value, what, (*above, part))


def _into(place: Any, rest: list[str], value: Any, what: str, above: tuple[str, ...]) -> None:
    if rest:
        _change(place, rest, value, what, above)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _change(place, [str(key)], item, what, above)
    else:
        raise FederationError(
            f"{what}: {value!r} given for the whole of {'.'.join(above)}; expected its keys"
        )


def _from_data(path: Path, base: Mapping[str, Any], data: Path) -> Any:
    """The sites of a federation file, with those of their paths that the file gives as relative ones under `data`."""
    sites = base.get("sites")
    if not isinstance(sites, list):
        return sites
    written = _as_written(path)
    found = []
    for site, own in zip(sites, written, strict=True):
        given = own.get("path") if isinstance(own, dict) else None
        if (
            isinstance(given, str)
            and not given.startswith(("bundled:", "~"))
            and not Path(given).is_absolute()
        ):
            site = {**site, "path": from_folder(expanded(data))(given)}
        found.append(site)
    return found


def _as_written(path: Path) -> list[Any]:
    """The list `sites` of the file, or of the nearest base file that has one."""
    raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    return raw["sites"] if "sites" in raw else _as_written(path.parent / str(raw["extends"]))


def _from_federations(
    files: Sequence[Path], profile: str | None, data: Path | None, seeds: int | None
) -> Comparison:
    if profile is not None:
        raise FederationError(
            f"--profile {profile}: federation files have no profiles; give a comparison file"
        )
    federations: dict[str, dict[int, Federation]] = {}
    for file in files:
        raw = read_yaml(file)
        if "arms" in raw:
            raise FederationError(f"{file}: is a comparison file; give one alone, or federation files only")
        if data is not None:
            raw["sites"] = _from_data(file, raw, data)
            federation = parse_federation(raw, base=file.parent, source=str(file))
        else:
            federation = load_federation(file)
        if federation.name in federations:
            raise FederationError(
                f"{file}: is called {federation.name!r}, as another of the files; every arm needs a name of its own"
            )
        chosen = range(seeds) if seeds else [federation.seed]
        federations[federation.name] = {seed: replace(federation, seed=seed) for seed in chosen}
    first, *others = federations
    kinds = {name: next(iter(of_arm.values())).task for name, of_arm in federations.items()}
    for name in others:
        if kinds[name] != kinds[first]:
            raise FederationError(
                f"{first} is for {kinds[first]}, {name} for {kinds[name]}; they do not compare"
            )
        (one, *_), (another, *_) = federations[first], federations[name]
        if one != another:
            raise FederationError(
                f"{first} has the seed {one}, {name} {another}; give --seeds, so that all have the same"
            )
    title = "-vs-".join(federations) if len(federations) < 3 else f"{first}-and-{len(others)}-others"
    return Comparison(title, None, federations, Measure(), {})  # type: ignore[call-arg]


def of_findings(comparison: Comparison) -> bool:
    """Is the metric one of findings beside segmentation? Sensitivity and specificity are, unless they are evaluated of
    voxels, too."""
    return (
        comparison.metric in OF_FINDINGS
        and comparison.first.task == "segmentation"
        and comparison.metric not in comparison.first.evaluation.metrics
    )


def of_cases(comparison: Comparison) -> bool:
    """Is the metric one of cases, each of which has a row: that of voxels?"""
    return comparison.first.task == "segmentation" and not of_findings(comparison)


def _check_measure(comparison: Comparison, file: Path) -> None:
    """FederationError where the runs will not hold what the tables average."""
    measure = comparison.measure
    table = "measure" if comparison.title is None else f"tables: {comparison.title!r}"
    at = "measure." if comparison.title is None else f"{table}: "
    for arm, of_arm in comparison.federations.items():
        federation = next(iter(of_arm.values()))
        known = METRICS_OF[federation.task][0]
        if comparison.folds and of_findings(comparison):
            raise FederationError(
                f"{file}: {at}metric is {comparison.metric}, which is of all images of a site together, and with folds each is tested "
                "by another model; ask for a metric of voxels, as dice, or take folds away"
            )
        if federation.labels.findings and of_findings(comparison):
            if measure.postprocess:
                raise FederationError(
                    f"{file}: {at}postprocess: {comparison.metric} of findings is of no outline; leave it out"
                )
            continue
        if comparison.metric not in known:
            raise not_known(
                f"{file}: {table}: metric: for {federation.task} the metric", comparison.metric, known
            )
        evaluation = federation.evaluation
        if comparison.metric not in evaluation.metrics:
            raise FederationError(
                f"{file}: {at}metric is {comparison.metric}, and the arm {arm} evaluates only "
                f"{', '.join(evaluation.metrics)}; add it to evaluation.metrics"
            )
        key, model = (
            ("local holds the arm", "local")
            if arm in measure.local
            else (f"model is {measure.model}", measure.model)
        )
        if model.partition("/")[0] not in evaluation.models:
            raise FederationError(
                f"{file}: {at}{key}, and the arm {arm} evaluates only "
                f"{', '.join(evaluation.models)}; add it to evaluation.models"
            )
        if measure.postprocess and evaluation.postprocess is None:
            raise FederationError(
                f"{file}: {at}postprocess is true, and the arm {arm} has no evaluation.postprocess; set it there, as "
                "`evaluation: {postprocess: {}}` for its defaults"
            )
        names = [site.name for site in federation.sites]
        if measure.model.startswith("local/") and measure.model.removeprefix("local/") not in names:
            raise not_known(
                f"{file}: {table}: model: local/, the site", measure.model.removeprefix("local/"), names
            )
        for site in measure.sites or ():
            if site not in names:
                raise not_known(f"{file}: {table}: sites: the site", site, names)


def _check_layout(comparison: Comparison, file: Path) -> None:
    """FederationError where a table is to show arms that do not exist, or cases or a unit that its metric lacks."""
    layout, measure, metric = comparison.layout, comparison.measure, comparison.metric
    for key, arms in (("measure: local", measure.local), ("layout: against", filter(None, [layout.against]))):
        for arm in arms:
            if arm not in comparison.arms:
                raise not_known(f"{file}: {key}: the arm", arm, comparison.arms)
    by_case = {
        "measure: local": bool(measure.local),
        "layout: cells: cases": layout.cells == "cases",
        "layout: against": layout.against is not None,
    }
    of_voxels = comparison.first.task == "segmentation" and not of_findings(comparison)
    for key, asked in by_case.items():
        if asked and not of_voxels:
            raise FederationError(
                f"{file}: {key}: {metric} has no values by case; allowed for "
                f"{', '.join(METRICS_OF['segmentation'][0])}"
            )
    if layout.percent and metric in MILLIMETRES:
        raise FederationError(f"{file}: layout: percent: {metric} is in mm; leave percent out of this table")


def _check_printed(comparison: Comparison, file: Path) -> None:
    """FederationError for a published number of an arm or column that the table does not have."""
    federation = comparison.first
    sites = [site.name for site in federation.sites]
    classes = [name for name in federation.labels.names or () if name != BACKGROUND]
    by_site = comparison.layout.columns == "site-class"
    averages = AVERAGES if by_site else AVERAGES[:1]
    own = [f"{arm}/{site}" for arm in comparison.measure.local if by_site for site in sites]
    for arm, values in comparison.printed.items():
        if arm not in (*comparison.arms, *own):
            raise not_known(f"{file}: printed: the arm", arm, [*comparison.arms, *own])
        for column in values:
            if column in averages:
                continue
            site, slash, name = column.rpartition("/")
            if bool(slash) != by_site:
                expected = "site/class, " if by_site else "a class or "
                raise FederationError(
                    f"{file}: printed: {arm}: the column {column!r}; with layout.columns {comparison.layout.columns} "
                    f"expected {expected}{', '.join(averages)}"
                )
            if slash and site not in sites:
                raise not_known(f"{file}: printed: {arm}: {column}: the site", site, sites)
            if classes and name not in (*classes, *federation.labels.findings):
                raise not_known(f"{file}: printed: {arm}: the class", name, classes)
