"""A run for analyses: models, data of the sites, supervised loss."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from fedatlas import losses
from fedatlas.analysis.runs.cases import CaseBatches, cases_of
from fedatlas.federation.design import Experiment, build_net, cache_folder, device_for, training_sites
from fedatlas.core.batch import Batch
from fedatlas.transport import wire
from fedatlas.transport.rounds import RunFolder, read_run
from fedatlas.transport.store import read_whole
from fedatlas.core.errors import FederationError, RunFolderError, require_run
from fedatlas.federation.file import Federation, load_federation, make_method
from fedatlas.core.labels import LabelSpace
from fedatlas.losses import LossChoice
from fedatlas.core.contract import Member, State
from fedatlas.core.options import not_known, option, options
from fedatlas.data.site_data import SiteData
from fedatlas.core.tensors import load

Labels = Literal["annotated", "reference"]


@options
class LossOfModels:
    """What analyses of the loss share: which models, on which batches of which sites."""

    model: tuple[Literal["best", "last", "local"], ...] | None = option(
        None, "Models: best, last, local (each site's own); null: the best one, else the last.", min_length=1
    )
    sites: tuple[str, ...] | None = option(None, "Sites; null: all that train.", min_length=1)
    labels: Labels = option(
        "annotated", "annotated: the labels that training saw; reference: all that a site has a truth for."
    )
    batch: int = option(8, "Samples of a batch.", ge=1)
    seed: int = option(0, "All that is random follows from it.", ge=0)


@dataclass(frozen=True)
class Model:
    """One of the values of a run's net. name: "best", "last", "local/<site>", with "/2" for the second of several that
    a method offers at a site; round: the one after which it was so."""

    name: str
    member: Member
    round: int


class Subject:
    """A run folder, whose sites are taken from this machine.

    sites: the ones to look at, by default all that train. device, data: as of `analyse`.

    Raises RunFolderError for what is no run folder, FederationError for an unknown site or device.
    """

    def __init__(
        self,
        path: Path,
        *,
        sites: Sequence[str] | None = None,
        device: str | None = None,
        data: Mapping[str, str] | None = None,
    ) -> None:
        require_run(path, "federation.yaml", "run.json")
        self.folder = RunFolder(path)
        self.federation = _with_data(load_federation(path / "federation.yaml"), data or {})
        self.info: dict[str, Any] = read_run(path)
        self.space = LabelSpace.from_plain(self.info["labels"])
        self.method = make_method(self.federation)
        self.device = device_for(device, self.federation.engine.device)
        trained = training_sites(self.federation)
        for site in sites or ():
            if site not in trained:
                raise not_known(f"{path}: the site that trains,", site, trained)
        self.sites = [site for site in trained if sites is None or site in sites]

    # ------------------------------------------------------------------------------------------- models

    def state(self, name: str) -> State:
        """ "best" or "last"; of a run that is not finished, "last" is the last complete round. Raises RunFolderError
        where it is not there."""
        kept = self.folder.path / "models" / f"{name}.fa"
        if kept.exists():
            return self.folder.state(kept, self.method)
        rounds = [
            file
            for number in reversed(self.folder.complete())
            if (file := self.folder.rounds / f"{number:04d}" / "state.fa").exists()
        ]
        if name == "best" or not rounds:
            why = "no round was validated; take --model last" if rounds else "no round is complete"
            raise RunFolderError(f"{kept}: missing, {why}")
        return self.folder.state(rounds[0], self.method)

    @cached_property
    def usual(self) -> str:
        """The global model that is looked at where none is named: the best one, else the last."""
        return "best" if (self.folder.path / "models" / "best.fa").exists() else "last"

    def speaking(self, name: str, site: str = "") -> list[Member]:
        """The members of a global model at a site, or of the local model of `site` for "local"."""
        if name == "local":
            return [self._local(site).member]
        return self.method.eval_members(self.state(name), site)

    def models(self, name: str, site: str = "") -> list[Model]:
        """The models of one name at a site: "best" or "last" (several where the method offers several; a selector is
        none of them), or "local", the one that `site` trained."""
        if name == "local":
            return [self._local(site)]
        if name not in ("best", "last"):
            raise RunFolderError(f"--model {name}: not known; allowed: best, last, local")
        state = self.state(name)
        members = [m for m in self.method.eval_members(state, site) if m.chooses is None]
        if len(members) == 1:
            return [Model(name, members[0], state.round)]
        return [Model(f"{name}/{place}", each, state.round) for place, each in enumerate(members, 1)]

    @cached_property
    def locals(self) -> dict[str, tuple[Path, int]]:
        """site -> the file of its local model, and its round: see `RunFolder.local_models`."""
        return self.folder.local_models()

    def _local(self, site: str) -> Model:
        if site not in self.locals:
            there = f"those of {', '.join(self.locals)}" if self.locals else "none"
            raise RunFolderError(
                f"{self.folder.path}: holds no local model of site {site}, but {there}; a run keeps them with its last "
                "round, where the server knows them"
            )
        file, round = self.locals[site]
        kept: Any = wire.decode(read_whole(file), copy=False)
        return Model(f"local/{site}", Member.of_site(kept), round)

    def network(self, member: Member) -> nn.Module:
        """A net with a member's values, on the device, in evaluation mode."""
        net = build_net(
            self.federation, self.method, member.net, channels=self.info["channels"], space=self.space
        )
        load(net, member.model)
        return net.to(self.device).eval()

    # --------------------------------------------------------------------------------------------- data

    @cached_property
    def experiment(self) -> Experiment:
        """The data of the chosen sites, not augmented. Raises RunFolderError where a site's are not here."""
        for site in self.federation.sites:
            if site.name in self.sites and (site.path is None or not Path(site.path).exists()):
                where = "its file names no folder" if site.path is None else f"there is no {site.path}"
                raise RunFolderError(
                    f"{self.folder.path}: the data of site {site.name} are not here, {where}; analyse where they are, "
                    f"give their folder with --data {site.name}=PATH, or name other sites with --sites"
                )
        plain = replace(self.federation, augmentation=_still(self.federation.augmentation))
        cache = cache_folder(self.federation, self.folder.path.parent)
        return Experiment(plain, cache, sites=self.sites, space=self.space)

    @property
    def sources(self) -> dict[str, SiteData]:
        """site -> its data."""
        return self.experiment.sources

    def batches(self, site: str, *, count: int, size: int, seed: int, labels: Labels) -> list[Batch]:
        """Batches of training patches, or images, sampled as in training and not augmented, on the device.

        labels: those that the site annotates, or the reference where the site has one. Raises FederationError where a
        site has no training case with labels.
        """
        parts = (seed, "analyse", site)
        source = self.sources[site]
        source.prepare()
        if not source.n_train:
            raise FederationError(f"site {site}: has no training case; name other sites with --sites")
        if labels == "annotated":
            how: dict[str, Any] = {"epochs": None, "device": self.device}
            return list(source.batches(parts, batch=size, steps=count, **how))
        cases = cases_of(source, site, "train", "reference")
        still = _still(self.federation.augmentation)
        return list(CaseBatches(cases, parts, size, count, self.device, self.federation, self.space, still))

    # --------------------------------------------------------------------------------------------- loss

    @cached_property
    def loss(self) -> LossChoice:
        """The supervised loss of the run's method, without what the method adds to it; where it has none that takes the
        net's outputs as they are, the one that FedAvg has by default."""
        choice = self.method.loss
        if not isinstance(choice, LossChoice):
            return LossChoice()
        try:
            losses.make(choice, self.space)
        except FederationError:
            return LossChoice()
        return choice

    def loss_at(self, site: str) -> Callable[[nn.Module, Batch], Tensor]:
        """The loss of a net on a batch of a site."""
        return losses.supervised(self.loss, cast(Any, self.sources[site]))

    def told_loss(self) -> dict[str, Any]:
        """The loss, as plain values."""
        return {"name": self.loss.name, "options": dict(self.loss.options)}


def _with_data(federation: Federation, data: Mapping[str, str]) -> Federation:
    names = [site.name for site in federation.sites]
    for name in data:
        if name not in names:
            raise not_known("--data: the site", name, names)
    sites = tuple(
        replace(site, path=str(Path(data[site.name]).resolve())) if site.name in data else site
        for site in federation.sites
    )
    return replace(federation, sites=sites)


def _still(augmentation: Any) -> Any:
    """An augmentation that changes nothing."""
    return replace(augmentation, **{f.name: 0.0 for f in fields(augmentation) if f.name.startswith("p_")})


def clock(seconds: float) -> str:
    """A time as a person reads it."""
    if seconds < 90:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def timed(work: Callable[[], Any]) -> float:
    """Seconds that something takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
