"""What every registered method keeps to; a line in the registry, or an entry point of an installed package, is enough to be tested here."""

import copy
import dataclasses
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
import yaml
from findings import findings_federation, findings_sites, write_findings
from method_cases import METHODS, NETS, PAIRS, case_of, with_method
from runs import last_state, phantom_federation
from torch import Tensor

from fedatlas import methods
from fedatlas.core.contract import State, sends_of
from fedatlas.core.labels import LabelSpace
from fedatlas.core.tensors import Tensors, from_tree, to_tree
from fedatlas.evaluation.statistics import read_rows
from fedatlas.federation.design import Design, Experiment
from fedatlas.federation.file import Federation, make_method, parse_federation, resolved
from fedatlas.federation.session import Hosts, Parties, Running, gather_local, run_federation
from fedatlas.methods.strategies import STRATEGIES
from fedatlas.phantoms.abdomen import SITES, abdomen_sites, write_abdomen
from fedatlas.phantoms.organs import write_phantom
from fedatlas.transport import rounds, wire
from fedatlas.transport.clients import Transport
from fedatlas.transport.frames import Question
from fedatlas.transport.local import InProcess
from fedatlas.transport.rounds import RunFolder

BY_NAME = {site.name: site for site in SITES}
ABDOMEN = (
    BY_NAME["liver"],
    BY_NAME["kidney"],
    dataclasses.replace(BY_NAME["spleen"], labels={"liver": 2, "spleen": 5}),
    BY_NAME["unseen"],
)
"""Two sites with an organ and its lesions, one with two organs, of which the first has one, too; and one that is only
tested. Three that train, because the sum of two is the same in any order."""
Values = Callable[[str, str], dict[str, Any]]


@pytest.fixture(scope="module")
def values_of(findings: Path, phantom_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Values:
    """The plain values of a small federation of a method and a task, to be changed by a test."""
    folder = write_abdomen(
        tmp_path_factory.mktemp("abdomen"), cases=3, test_cases=1, size="tiny", sites=ABDOMEN
    )
    segmentation: dict[str, Any] = {
        "name": "abdomen",
        "labels": {
            "names": ["background", "liver", "liver tumour", "kidneys", "kidney tumour", "spleen"],
            "groups": [["liver", "liver tumour"], ["kidneys", "kidney tumour"]],
        },
        "sites": abdomen_sites(folder, ABDOMEN),
        "preprocessing": {"spacing": [10, 10, 10], "window": [-160, 240], "patch": [16, 16], "context": 1},
        "net": {"name": "unet", "filters": [4, 8, 8]},
        "local": {"optimizer": "adamw", "lr": 0.01, "batch": 4, "steps": 2},
        "rounds": 2,
        "seed": 3,
        "evaluation": {
            "validation": 0.34,
            "every": 2,
            "metrics": ["dice"],
            "overlays": False,
            "inference": {"batch": 64},
        },
        "engine": {"cache": str(folder / ".cache")},
    }
    classification = findings_federation(findings, phantom_cache / "findings")
    of_task = {"segmentation": segmentation, "classification": classification}
    return lambda name, task: with_method(copy.deepcopy(of_task[task]), name)


Sent = dict[str, list[tuple[str, dict[str, Any]]]]
"""What sites answered: site -> the function and the value of every answer."""


@dataclass(frozen=True)
class Whole:
    """A finished run of a method: its federation file as plain values, what the sites answered, and the states after the
    start and every round."""

    name: str
    task: str
    values: dict[str, Any]
    path: Path
    design: Design
    sent: Sent
    states: list[State]

    @property
    def last(self) -> bytes:
        return (self.path / "models" / "last.fa").read_bytes()


@dataclass(frozen=True)
class Listening:
    """A transport under which every answer is kept in `sent`: site -> (function, value)."""

    inner: Transport
    sent: Sent

    def ask(self, questions: Sequence[Question], deadline: float) -> Iterator[tuple[str, str | None]]:
        asked = {question.site: question for question in questions}
        for site, lost in self.inner.ask(questions, deadline):
            tree: Any = wire.decode(asked[site].reply.read_bytes())
            assert "error" not in tree, tree
            self.sent.setdefault(site, []).append((asked[site].function, tree["value"]))
            yield site, lost

    def close(self) -> None:
        self.inner.close()


@pytest.fixture(scope="module", params=PAIRS, ids="-".join)
def whole(
    request: pytest.FixtureRequest, values_of: Values, tmp_path_factory: pytest.TempPathFactory
) -> Whole:
    """Two rounds of every method with every task that it is for, in this process; the tests of one pair follow each other."""
    name, task = request.param
    values, path = values_of(name, task), tmp_path_factory.mktemp(name) / "whole"
    sent: Sent = {}
    states: list[State] = []
    designs: list[Design] = []

    def gather(federation: Federation, folder: RunFolder, tell: Any) -> Parties:
        parties = gather_local(federation, folder, tell)
        designs.append(parties.design)
        return dataclasses.replace(parties, transport=Listening(parties.transport, sent))

    scored = {"evaluation": values["evaluation"] | {"models": ["best", "local"]}}
    run_federation(
        parse_federation(values | scored, base=Path()),
        path,
        tell=lambda text: None,
        gather=gather,
        after_round=lambda record, best: states.append(record.state),
    )
    return Whole(name, task, values, path, designs[0], sent, states)


def test_equal_bits_in_workers_and_resumed(whole: Whole, shared_workers: None, tmp_path: Path) -> None:
    """Whatever the order of sites, and though their memory has moved on when the last round is begun again."""
    values = whole.values | {"sites": list(reversed(whole.values["sites"]))}
    # several workers at once, and a process for every run: tests/transport/test_local.py
    in_workers = values | {"engine": values["engine"] | {"workers": 1}}
    assert last_state(in_workers, tmp_path / "run") == whole.last
    assert RunFolder(tmp_path / "run").complete() == [0, 1]
    assert last_state(values, tmp_path / "run") == whole.last


def test_a_state_can_be_kept(whole: Whole) -> None:
    assert [state.round for state in whole.states] == [0, 1, 2]
    for state in whole.states:
        assert type(state) is whole.design.method.state
        kept = wire.encode(to_tree(state))
        again = from_tree(type(state), wire.decode(kept))
        assert wire.encode(to_tree(again)) == kept


def test_what_is_sent_is_what_is_declared(whole: Whole) -> None:
    declared = sends_of(whole.design.method)
    nets = ["main", *whole.design.method.nets]
    tensors = [value for net in nets for value in whole.design.make_net(net).state_dict().values()]
    shapes = {tuple(value.shape) for value in tensors}
    most = max(value.numel() for value in tensors)
    answers = [answer for of_site in whole.sent.values() for answer in of_site]
    training = [(function, value) for function, value in answers if function in declared]
    assert 0 < len(training) < len(answers), "others are answers to the evaluation"
    for function, value in training:
        assert sorted(value) == sorted(declared[function])
        for item in value.values():
            for leaf in leaves(item):
                if isinstance(leaf, Tensor):
                    # of a net, or the chosen entries of one of its tensors with their places
                    assert tuple(leaf.shape) in shapes or (leaf.dim() == 1 and len(leaf) <= most)
        plain = [leaf for leaf in leaves(value) if not isinstance(leaf, Tensor)]
        of_kind = {
            "number": 1,
            "cases": 1,
            "classes": len(whole.design.space),
            "per class": len(whole.design.space),
        }
        most_plain = sum(of_kind.get(kind, 0) for kind in declared[function].values())
        assert len(plain) <= most_plain, (
            "more plain values than a count, or one per class, for each that is declared"
        )


def test_every_site_is_scored(whole: Whole) -> None:
    """With lesions, and at a site that is only tested and annotates nothing."""
    rows = [row for row in read_rows(whole.path / "rows.csv") if row["split"] == "test"]
    assert {row["site"] for row in rows} == {site["name"] for site in whole.values["sites"]}
    tested = [row for row in rows if row["site"] == "unseen"]
    assert not any(row["known"] for row in tested)
    assert {row["class"] for row in rows} >= {*whole.design.space.names} - {"background"}
    if whole.task == "segmentation":
        assert {row["class"] for row in tested} == {*whole.design.space.names} - {"background"}
        values = [row["value"] for row in rows if row["value"] is not None]
        assert values and all(0 <= value <= 1 for value in values)


STRATEGY_OPTIONS: dict[str, dict[str, Any]] = {"fednorm": {"groups": {"portal": ["s0"]}}}


def with_strategy(small: dict[str, Any], name: str) -> dict[str, Any]:
    chosen = {"name": name, "options": STRATEGY_OPTIONS.get(name, {})}
    return with_method(small, "fedmenu", strategy=chosen) | {"net": NETS["fedmenu"] | {"affine": True}}


def decoders_of(federation: dict[str, Any], last: bytes) -> Tensors:
    """What the decoders of all models that are evaluated at a site hold, by the model's place and the tensor's name."""
    method = make_method(parse_federation(federation, base=Path()))
    state = from_tree(method.state, wire.decode(last))
    return {
        f"{place} {tensor}": value
        for site in ("s0", "")
        for place, member in enumerate(method.eval_members(state, site))
        if member.net == "main"
        for tensor, value in member.model.items()
        if "decoder" in tensor
    }


@pytest.fixture(scope="module")
def plain_decoder(phantom: Path, phantom_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Tensors:
    """That of Fed-MENU with FedAvg, by the tensor's name."""
    federation = with_strategy(phantom_federation(phantom, phantom_cache), "fedavg")
    found = decoders_of(federation, last_state(federation, tmp_path_factory.mktemp("plain") / "run"))
    return {name.partition(" ")[2]: value for name, value in found.items()}


@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_every_strategy_with_menunet(name, small, tmp_path, plain_decoder) -> None:
    """Two rounds, and the same bits after a resume; all but FedAvg differ from it in a tensor of the decoder of a model
    that is evaluated."""
    federation, path = with_strategy(small, name), tmp_path / "run"
    whole = last_state(federation, path)
    found = decoders_of(federation, whole)
    different = {
        n for n, value in found.items() if not torch.equal(value, plain_decoder[n.partition(" ")[2]])
    }
    assert bool(different) == (name != "fedavg")
    assert last_state(federation, path) == whole


def test_the_organs_of_a_net_are_those_of_the_labels(small, tmp_path) -> None:
    """And those of its own option where it has any."""
    names = ["background", "liver", "tumour", "spleen"]
    labels = {"names": names, "groups": [["liver", "tumour"]]}
    aliases = {"aliases": {"kidney": "tumour"}}
    for net in (NETS["fedmenu"], NETS["fed_dodnet"]):
        organs = []
        for own in ({}, {"groups": [[2, 3]]}, {"groups": []}):
            chosen = {"labels": labels, "net": net | own, "sites": [s | aliases for s in small["sites"]]}
            parsed = parse_federation(small | chosen, base=Path())
            kept = parse_federation(resolved(parsed), base=Path())  # as the run folder has it
            space = LabelSpace(tuple(names), ((1, 2),))
            organs.append(Design(parsed, space, 1).make_net().organs)
            assert Design(kept, space, 1).make_net().organs == organs[-1]
        assert organs == [((1, 2), (3,)), ((1,), (2, 3)), ((1,), (2,), (3,))]


def test_centralized_menunet_trains_every_sub_encoder_at_one_site(small, tmp_path) -> None:
    federation = with_method(small, "fedmenu", pooled=True) | {"rounds": 1}
    parsed = parse_federation(federation, base=Path())
    state: Any = from_tree(make_method(parsed).state, wire.decode(last_state(federation, tmp_path / "run")))
    start = Experiment(parsed, tmp_path / "cache").make_net().state_dict()
    for part in (f"encoder:{m}" for m in range(len(state.organs))):
        assert any(not torch.equal(state.model[n], start[n]) for n in state.parts[part]), part


def leaves(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        return [leaf for item in tree.values() for leaf in leaves(item)]
    return [leaf for item in tree for leaf in leaves(item)] if isinstance(tree, list) else [tree]


@pytest.fixture(scope="module")
def hidden(phantom_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Task -> what differs in two federations: in the second all is redrawn that a site does not annotate."""
    found: dict[str, list[dict[str, Any]]] = {"segmentation": [], "classification": []}
    for scrambled in (False, True):
        folder = write_findings(tmp_path_factory.mktemp("findings"), scramble=scrambled)
        found["classification"].append({"sites": findings_sites(folder, score_all=False)})
        folder = write_phantom(
            tmp_path_factory.mktemp("data") / "data", sites=2, cases=3, test_cases=0, seed=1
        )
        sites = []
        for index, place in enumerate(sorted(path for path in folder.iterdir() if path.is_dir())):
            table = yaml.safe_load((place / "all_labels.json").read_text())["labels"]
            organs = [label for label in table if label != "background"]
            annotated = organs[:1] if index == 0 else organs[1:2]
            sites.append(
                {
                    "name": place.name,
                    "path": str(place),
                    "table": "all_labels.json",
                    "labels": "labelsTr_all",
                    "annotated": annotated,
                }
            )
            if scrambled:
                others = [
                    number for label, number in table.items() if label not in (*annotated, "background")
                ]
                for path in sorted((place / "labelsTr_all").glob("*.nii.gz")):
                    scramble(path, others, table[annotated[0]])
        labels = {"names": list(table)}
        found["segmentation"].append({"sites": sites, "labels": labels, "evaluation": {"validation": 0.0}})
    return found


def replies_of(values: dict[str, Any], path: Path, cache: Path) -> Sent:
    """Everything that any site sends in the method's start and two rounds."""
    experiment = Experiment(parse_federation(values, base=Path()), cache)
    experiment.prepare()  # by hand: here some classes are annotated by nobody
    summaries = {name: source.summary() for name, source in experiment.sources.items()}
    folder, sent = RunFolder(path), Sent()
    transport = Listening(InProcess(Hosts(experiment, folder).answer), sent)
    with Running(Parties(experiment, summaries, list(experiment.training), transport), folder) as running:
        rounds.run(experiment.method, experiment.make_net(), running.clients, 2)
    return dict(sorted(sent.items()))


@pytest.mark.parametrize(("name", "task"), PAIRS)
def test_blindness(name, task, values_of, hidden, phantom_cache, tmp_path) -> None:
    """What is drawn, or told of images, of classes that a site does not annotate changes nothing that it sends."""
    values = values_of(name, task)
    one, other = (
        replies_of(values | changes, tmp_path / str(number), phantom_cache)
        for number, changes in enumerate(hidden[task])
    )
    assert one and wire.encode(to_tree(one)) == wire.encode(to_tree(other))


def scramble(path: Path, hidden: list[int], kept: int) -> None:
    """Redraws the hidden classes at random over everything that is not the kept class."""
    image = nib.load(path)
    labels = np.asarray(image.dataobj).copy()  # type: ignore[attr-defined]
    rng = np.random.default_rng(len(path.name))
    free = labels != kept
    labels[free] = rng.choice([0, *hidden], size=int(free.sum()))
    nib.save(nib.Nifti1Image(labels, image.affine, image.header), path)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", METHODS)
def test_every_hyper_parameter_has_its_sentence(name) -> None:
    cls = methods.get(name)
    assert cls.__doc__
    for field in dataclasses.fields(cls):
        sentence = cls.__pydantic_fields__[field.name].description
        assert sentence and sentence.rstrip().endswith("."), f"{name}.{field.name} has no sentence"


DEFAULTS = {
    "fedavg": {"weights": "cases"},
    "fedmenu": {
        "agg": "expert_half",
        "non_expert": 0.5,
        "agd": "shared",
        "weights": "cases",
        "pooled": False,
    },
    "fed_dodnet": {"own": [], "evaluate": "before", "speaks": "owners", "weights": "cases"},
    "fedbn": {"norms": "all", "keep": [], "speaks": "owners", "weights": "cases"},
    "fedprox": {"mu": 0.01},
    "local_parts": {"keep": ["head"], "evaluate": "before", "weights": "cases"},
    "fedcrld": {
        "lambda_ce": 0.2,
        "lambda_mse": 1.0,
        "lambda_kl": 1.0,
        "evaluate": "before",
        "speaks": "owners",
        "weights": "cases",
    },
    "fedasam": {"asam_start": 0, "weights": "cases"},
    "moon": {"mu": 1.0, "tau": 0.5, "first": "none"},
    "fedalign": {"mu": 0.45, "width": 0.25, "iterations": 10},
    "cps": {"w": 1.5, "weights": "cases"},
    "ms_kd": {"lambda_logits": 1.0, "lambda_features": 1.0, "T": 1.0},
    "fedavgm": {"beta": 0.9, "damping": 0, "weights": "cases"},
    "fedopt": {
        "optimizer": "sgd",
        "lr": None,
        "momentum": 0.6,
        "beta1": 0.9,
        "beta2": 0.99,
        "tau": 1e-3,
        "weights": "equal",
    },
    "fedpsl": {
        "tdma": True,
        "tadl": True,
        "alpha": 1e-3,
        "phi_in_outer": "updated",
        "order": 2,
        "outer": "local",
    },
    "fixmatch": {"threshold": 0.75, "lambda_u": 1.0},
    "feddyn": {"alpha": 0.01},
    "scaffold": {"eta_g": 1.0, "control": "steps"},
    "condistfl": {
        "tau": 0.5,
        "lambda_start": 0.01,
        "lambda_end": 1.0,
        "group": True,
        "filter": None,
        "cond": "exact",
        "empty_group": "skip",
        "weights": "equal",
    },
}


@pytest.mark.parametrize("name", sorted(DEFAULTS))
def test_defaults_are_those_of_the_atlas(name) -> None:
    method = methods.get(name)()
    assert {key: getattr(method, key) for key in DEFAULTS[name]} == DEFAULTS[name]


@pytest.mark.parametrize(("name", "task"), [pair for pair in PAIRS if case_of(pair[0]).plain is not None])
def test_one_round_at_one_site_with_all_labels_is_ordinary_training(
    name, task, values_of, tmp_path, phantom_cache
) -> None:
    """E23: a federation of one fully labelled site, for one round, is a plain training loop."""
    from fedatlas import losses
    from fedatlas.core.seeds import generator
    from fedatlas.core.tensors import tensors_of
    from fedatlas.learning.loop import train
    from fedatlas.transport.host import HostedSite

    values = values_of(name, task)
    first = values["sites"][0]
    one = {"name": "one", "path": first["path"]}
    if task == "segmentation":
        names = [name for name in values["labels"]["names"] if name != "background"]
        one |= {"table": "all_labels.json", "labels": "labelsTr_all", "annotated": names}
    else:
        one |= {"format": "csv", "reading": first["reading"]}
    method = {"name": name} | (case_of(name).plain or {})
    federation = parse_federation(values | {"sites": [one], "method": method, "rounds": 1}, base=Path())
    folder = RunFolder(tmp_path)
    parties = gather_local(federation, folder, lambda text: None)
    experiment = parties.design
    assert isinstance(experiment, Experiment)
    (trained,) = experiment.training
    with Running(parties, folder) as running:
        state = rounds.run(experiment.method, experiment.make_net(), running.clients, 1)
        result = experiment.method.eval_members(state, "one")[0].model
    parts = (federation.seed, trained, 1, 0)
    site = HostedSite(
        trained,
        experiment.training[trained],
        experiment.make_net,
        {},
        generator(*parts),
        torch.device("cpu"),
        tmp_path,
        parts,
    )
    net = site.network()
    loss = losses.supervised(losses.LossChoice(), site)
    train(site, net, loss, federation.local, round=0, rounds=1)
    assert wire.encode(tensors_of(net)) == wire.encode(result)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "task"), PAIRS)
def test_killed_at_random_instants(name, task, values_of, tmp_path) -> None:
    """kill -9 eight times, at instants drawn over the length of a whole run; what comes out in the end is what
    one run gives."""
    file = tmp_path / "federation.yaml"
    file.write_text(yaml.safe_dump(values_of(name, task) | {"rounds": 6}))

    def start(run: str) -> "subprocess.Popen[bytes]":
        command = [
            sys.executable,
            "-m",
            "fedatlas",
            "run",
            str(file),
            "--runs",
            str(tmp_path),
            "--id",
            run,
            "--resume",
        ]
        return subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )

    began = time.monotonic()
    assert start("whole").wait() == 0
    length = time.monotonic() - began
    instants, kills = random.Random(name + task), 0
    for _ in range(8):
        child = start("killed")
        try:
            assert child.wait(timeout=instants.uniform(0, length)) == 0
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            kills += 1
    assert start("killed").wait() == 0 and kills > 0
    last = [(tmp_path / run / "models" / "last.fa").read_bytes() for run in ("whole", "killed")]
    assert last[0] == last[1]
