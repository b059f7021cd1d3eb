"""What every registered method keeps to; a line in the registry is enough to be tested here."""

import dataclasses
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
import yaml
from findings import findings_sites, write_findings
from method_cases import METHODS, NETS, PAIRS, with_method
from torch import Tensor

from fedatlas import methods
from fedatlas.core.contract import sends_of
from fedatlas.core.labels import LabelSpace
from fedatlas.core.tensors import Tensors, from_tree, to_tree
from fedatlas.federation.design import Design, Experiment
from fedatlas.federation.file import make_method, parse_federation, resolved
from fedatlas.federation.session import Hosts, Parties, Running, gather_local, run_federation
from fedatlas.methods.strategies import STRATEGIES
from fedatlas.phantoms.organs import write_phantom
from fedatlas.transport import wire
from fedatlas.transport.local import InProcess
from fedatlas.transport.rounds import RunFolder


@pytest.fixture
def federation(request: pytest.FixtureRequest) -> dict[str, Any]:
    """A small federation of the test's method and task."""
    name, task = request.node.callspec.params["name"], request.node.callspec.params["task"]
    chosen = request.getfixturevalue("small" if task == "segmentation" else "small_images")
    return with_method(chosen, name)


def run_small(small: dict[str, Any], path: Path, **changes: Any) -> bytes:
    """Runs a federation; returns the bytes of the last state."""
    federation = parse_federation(small | changes, base=Path())
    run_federation(federation, path, tell=lambda text: None, resume=True)
    return (path / "models" / "last.fa").read_bytes()


def replies_of(small: dict[str, Any], path: Path, cache: Path) -> dict[str, list[Any]]:
    """Everything that any site sends in the method's start and two rounds, by site."""
    federation = parse_federation(small | {"engine": {"cache": str(cache)}}, base=Path())
    folder = RunFolder(path)
    experiment = Experiment(federation, cache)  # by hand: here some classes are annotated by nobody
    experiment.prepare()
    summaries = {name: source.summary() for name, source in experiment.sources.items()}
    transport = InProcess(Hosts(experiment, folder).answer)
    parties = Parties(experiment, summaries, list(experiment.training), transport)
    sent: dict[str, list[Any]] = {}
    with Running(parties, folder) as running:
        ask = running.clients.transport.ask

        def listen(questions: Any, deadline: float) -> Any:
            for site, lost in ask(questions, deadline):
                question = next(q for q in questions if q.site == site)
                tree = wire.decode(question.reply.read_bytes())
                assert isinstance(tree, dict) and "error" not in tree, tree
                sent.setdefault(site, []).append(tree["value"])
                yield site, lost

        running.clients.transport.ask = listen  # type: ignore[method-assign]
        running.clients.begin(0)
        state = dataclasses.replace(experiment.method.start(experiment.make_net(), running.clients), rounds=2)
        for number in (1, 2):
            running.clients.begin(number)
            state = experiment.method.round(state, running.clients)
            assert state.round == number
            again = from_tree(type(state), wire.decode(wire.encode(to_tree(state))))
            assert wire.encode(to_tree(again)) == wire.encode(to_tree(state))
            assert type(state) is experiment.method.state
    return sent


@pytest.mark.parametrize(("name", "task"), PAIRS)
def test_equal_bits_in_process_in_workers_and_resumed(
    name, task, federation, shared_workers, tmp_path
) -> None:
    small = federation
    small["evaluation"] |= {"models": ["best", "last", "local"]}
    whole = run_small(small, tmp_path / "whole")
    small["evaluation"] |= {"models": ["last"]}
    small["engine"]["workers"] = (
        1  # several at once, and a process for every run: tests/transport/test_local.py
    )
    small["sites"] = list(reversed(small["sites"]))
    assert run_small(small, tmp_path / "workers") == whole
    # only the first round is left, as after a kill: a new process goes on from there
    folder = RunFolder(tmp_path / "workers")
    second = folder.rounds / "0002"
    second.rename(folder.rounds / ".0002.part")
    small["engine"]["workers"] = 0
    assert run_small(small, folder.path) == whole


@pytest.mark.parametrize(("name", "task"), PAIRS)
def test_what_is_sent_is_what_is_declared(name, task, federation, tmp_path, phantom_cache) -> None:
    parsed = parse_federation(federation, base=Path())
    experiment = Experiment(parsed, phantom_cache)
    declared_keys = [sorted(kinds) for kinds in sends_of(experiment.method).values()]
    nets = ["main", *experiment.method.nets]
    tensors = [value for net in nets for value in experiment.make_net(net).state_dict().values()]
    shapes = {tuple(value.shape) for value in tensors}
    most = max(value.numel() for value in tensors)
    for values in replies_of(federation, tmp_path, phantom_cache).values():
        for value in values:
            assert sorted(value) in declared_keys
            for item in value.values():
                for leaf in leaves(item):
                    if isinstance(leaf, Tensor):
                        # of a net, or the chosen entries of one of its tensors with their places
                        assert tuple(leaf.shape) in shapes or (leaf.dim() == 1 and len(leaf) <= most)
            plain = [leaf for leaf in leaves(value) if not isinstance(leaf, Tensor)]
            assert len(plain) <= 1 + len(experiment.space), "more plain values than a count and one per class"


STRATEGY_OPTIONS: dict[str, dict[str, Any]] = {"fednorm": {"groups": {"portal": ["s0"]}}}


def with_strategy(small: dict[str, Any], name: str) -> dict[str, Any]:
    chosen = {"name": name, "options": STRATEGY_OPTIONS.get(name, {})}
    small["evaluation"] |= {"models": ["last"]}
    return with_method(small, "fedmenu", strategy=chosen) | {"net": NETS["fedmenu"] | {"affine": True}}


PLAIN: dict[str, Tensors] = {}


@pytest.fixture
def plain_menu(small, tmp_path_factory) -> Tensors:
    """The model of Fed-MENU with FedAvg, trained once."""
    if not PLAIN:
        federation, path = with_strategy(small, "fedavg"), tmp_path_factory.mktemp("plain") / "run"
        run_small(federation, path)
        method = make_method(parse_federation(federation, base=Path()))
        PLAIN["model"] = RunFolder(path).state(path / "models" / "last.fa", method).model
    return PLAIN["model"]


@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_every_strategy_with_menunet(name, small, tmp_path, plain_menu) -> None:
    """Two rounds, and the same bits after a resume; all but FedAvg differ from it in a tensor of the decoder of a model
    that is evaluated."""
    federation, path = with_strategy(small, name), tmp_path / "run"
    whole = run_small(federation, path)
    folder, method = RunFolder(path), make_method(parse_federation(federation, base=Path()))
    state = folder.state(path / "models" / "last.fa", method)
    evaluated = [m.model for site in ("s0", "") for m in method.eval_members(state, site) if m.net == "main"]
    different = {
        tensor
        for model in evaluated
        for tensor, value in model.items()
        if "decoder" in tensor and not torch.equal(value, plain_menu[tensor])
    }
    assert bool(different) == (name != "fedavg")
    (folder.rounds / "0002").rename(folder.rounds / ".0002.part")
    assert run_small(federation, path) == whole


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
    run_small(federation, tmp_path / "run")
    parsed = parse_federation(federation, base=Path())
    state = RunFolder(tmp_path / "run").state(tmp_path / "run" / "models" / "last.fa", make_method(parsed))
    start = Experiment(parsed, tmp_path / "cache").make_net().state_dict()
    for part in (f"encoder:{m}" for m in range(len(state.organs))):
        assert any(not torch.equal(state.model[n], start[n]) for n in state.parts[part]), part


def leaves(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        return [leaf for item in tree.values() for leaf in leaves(item)]
    return [leaf for item in tree for leaf in leaves(item)] if isinstance(tree, list) else [tree]


@pytest.fixture(scope="module")
def hidden(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], list[list[dict[str, Any]]]]:
    """The names of the labels, and the sites of two federations: in the second all is redrawn that a site does not
    annotate."""
    both = []
    for scrambled in (False, True):
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
        both.append(sites)
    return list(table), both


@pytest.mark.parametrize("name", [name for name, task in PAIRS if task == "segmentation"])
def test_blindness(name, small, hidden, phantom_cache, tmp_path) -> None:
    """What a site draws of classes that it does not annotate changes nothing that it sends."""
    names, federations = hidden
    small |= {"method": {"name": name}, "labels": {"names": names}, "evaluation": {"validation": 0.0}}
    small["net"] = NETS.get(name, small["net"])
    sent = [
        replies_of(small | {"sites": sites}, tmp_path / str(number), phantom_cache)
        for number, sites in enumerate(federations)
    ]
    assert wire.encode(to_tree(sent[0])) == wire.encode(to_tree(sent[1]))


@pytest.fixture(scope="module")
def hidden_findings(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    """As `hidden`, with findings of whole images."""
    folders = [
        write_findings(tmp_path_factory.mktemp("findings"), scramble=scrambled) for scrambled in (False, True)
    ]
    return [findings_sites(folder, score_all=False) for folder in folders]


@pytest.mark.parametrize(("name", "task"), [pair for pair in PAIRS if pair[1] == "classification"])
def test_blindness_to_findings(name, task, federation, hidden_findings, phantom_cache, tmp_path) -> None:
    sent = [
        replies_of(federation | {"sites": sites}, tmp_path / str(number), phantom_cache)
        for number, sites in enumerate(hidden_findings)
    ]
    assert wire.encode(to_tree(sent[0])) == wire.encode(to_tree(sent[1]))


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


@pytest.mark.parametrize("name", METHODS)
def test_only_marked_functions_can_be_called(name) -> None:
    method = methods.get(name)()
    for function in method.functions().values():
        assert function.at_site
    assert not {"start", "round"} & set(method.functions())


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


EXTRAS_OFF = {
    "cond_dec": {"scale": 0.0},
    "fedcrld": {"lambda_kl": 0.0},
    "feddyn": {"alpha": 0.0},
    "fedmenu": {"agd": "none", "loss": {"name": "auto"}},
    "cps": {"w": 0.0},
    "fedalign": {"mu": 0.0},
    "fedasam": {"sharpness": {"rho": 0.0}},
    "fedprox": {"mu": 0.0},
    "fedpsl": {"tadl": False},
    "fedssp": {"pretrain_rounds": 0},
    "ufps": {"ws": None, "rce": None, "sam": None, "loss": {"name": "auto"}},
}
"""What makes a method ordinary training where there is one site and every label."""
ONE_SITE = [
    pair
    for pair in PAIRS
    if not pair[0].startswith(
        ("fedmatch", "mixup", "kim", "fed_dodnet")
    )  # halves of a model in turn; mixed images; own loss
]


@pytest.mark.parametrize(("name", "task"), ONE_SITE)
def test_one_round_at_one_site_with_all_labels_is_ordinary_training(
    name, task, federation, tmp_path, phantom_cache
) -> None:
    """E23: a federation of one fully labelled site, for one round, is a plain training loop."""
    from fedatlas import losses
    from fedatlas.core.seeds import generator
    from fedatlas.core.tensors import tensors_of
    from fedatlas.learning.loop import train
    from fedatlas.transport.host import HostedSite

    first = federation["sites"][0]
    one = {"name": "one", "path": first["path"]}
    if task == "segmentation":
        sites = [one | {"table": "all_labels.json", "labels": "labelsTr_all"}]
    else:
        sites = [one | {"format": "csv", "reading": first["reading"]}]
    method = {"name": name} | EXTRAS_OFF.get(name, {})
    federation = parse_federation(federation | {"sites": sites, "method": method, "rounds": 1}, base=Path())
    folder = RunFolder(tmp_path)
    parties = gather_local(federation, folder, lambda text: None)
    experiment = parties.design
    assert isinstance(experiment, Experiment)
    (trained,) = experiment.training
    with Running(parties, folder) as running:
        running.clients.begin(0)
        state = dataclasses.replace(experiment.method.start(experiment.make_net(), running.clients), rounds=1)
        running.clients.begin(1)
        state = experiment.method.round(state, running.clients)
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
def test_killed_at_random_instants(name, task, federation, tmp_path) -> None:
    """kill -9 eight times, at instants drawn over the length of a whole run; what comes out in the end is what
    one run gives."""
    file = tmp_path / "federation.yaml"
    file.write_text(yaml.safe_dump(federation | {"rounds": 6}))

    def start(run: str) -> "subprocess.Popen[bytes]":
        command = [
            sys.executable,
            "-m",
            "fedatlas.cli",
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
