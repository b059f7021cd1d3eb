"""egress.py: what a method tries to smuggle stays at the site, and the log shows what was done to it."""

import errno
import fcntl
import hashlib
import json
import resource
import signal
from pathlib import Path

import pytest
import torch

from fedatlas import nets
from fedatlas.cli import main
from fedatlas.core.contract import at_site
from fedatlas.core.errors import DataError
from fedatlas.core.labels import LabelSpace, SiteLabels
from fedatlas.core.tensors import forms_of, tensors_of
from fedatlas.federation.audit import logs_of, text_of
from fedatlas.transport import wire
from fedatlas.transport.egress import EgressError, EgressLog, NetForms, check, check_log, contents, read_log
from fedatlas.transport.host import Host
from fedatlas.transport.pipeline import Policy

FORMS = {"conv.weight": ("float32", (4, 1, 3, 3)), "conv.bias": ("float32", (4,))}
DECLARED = {"model": "model", "n": "cases"}


def model(**changes) -> dict:
    return {"conv.weight": torch.zeros(4, 1, 3, 3), "conv.bias": torch.zeros(4)} | changes


def refused(value, declared=DECLARED, classes=3) -> str:
    with pytest.raises(EgressError) as caught:
        check(value, declared, what="the answer", classes=classes, forms=lambda net: FORMS)
    return str(caught.value)


def test_what_is_declared_passes() -> None:
    check({"model": model(), "n": 3}, DECLARED, what="", classes=3, forms=lambda net: FORMS)
    part = {"model": {"conv.bias": torch.zeros(4)}, "n": 3}
    check(part, DECLARED | {"model": "some"}, what="", classes=3, forms=lambda net: FORMS)
    declared = {"m": "some:other", "c": "classes", "p": "per class"}
    value = {"m": {"conv.bias": torch.ones(4)}, "c": [2, 0], "p": [0, 3, 1]}
    asked = []
    check(value, declared, what="", classes=3, forms=lambda net: asked.append(net) or FORMS)
    assert asked == ["other"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"model": model(), "n": 3, "image": torch.zeros(1, 32, 32)}, "not declared: image"),
        ({"model": model()}, "missing: n"),
        (
            {"model": model(batch=torch.zeros(2, 1, 32, 32)), "n": 3},
            "the tensor 'batch', which the net does not",
        ),
        (
            {"model": model(**{"conv.bias": torch.zeros(2, 32, 32)}), "n": 3},
            r"'conv.bias' is float32[2, 32, 32], in the net it is float32[4]",
        ),
        ({"model": model(**{"conv.bias": torch.zeros(4).double()}), "n": 3}, "is float64[4], in the net"),
        ({"model": model(), "n": [0.1, 0.2, 0.3]}, "'n' is declared as 'cases', but is a list of 3"),
        ({"model": model(), "n": torch.zeros(5)}, "but is a tensor float32[5]"),
        ({"model": model(), "n": "patient 7"}, "but is a str"),
        ({"model": {"conv.bias": ["patient 7"]}, "n": 1}, "holds 'conv.bias', a list"),
        ({"model": {"conv.bias": torch.zeros(4)}, "n": 1}, "lacks the tensors conv.weight"),
        (torch.zeros(1, 32, 32), "a Tensor was to be sent"),
    ],
)
def test_smuggled_things_are_refused(value, text: str) -> None:
    assert text in refused(value)


@pytest.mark.parametrize(
    ("kind", "value", "text"),
    [
        ("classes", [0, 7], "not class indices"),
        ("classes", [1, 1], "names a class twice"),
        ("findings", [0, True], "not indices of findings"),
        ("findings", [1, 1], "names a finding twice"),
        ("per class", [0.1] * 4, "holds 4 numbers for 3 classes"),
        ("per class", torch.zeros(3), "is a tensor float32[3]"),
        ("bits", {"conv.bias": torch.zeros(4)}, "the bits of 'conv.bias' are a tensor float32[4]"),
        (
            "bits",
            {
                "conv.weight": torch.zeros(5, dtype=torch.uint8),
                "conv.bias": torch.tensor([16], dtype=torch.uint8),
            },
            "the bits of 'conv.bias' go beyond its 4 entries",
        ),
        ("rows", [{"case": "x"}], "something else than rows"),
        ("facts", {"scan": torch.zeros(3)}, "holds a tensor"),
    ],
)
def test_every_kind_has_its_limits(kind: str, value, text: str) -> None:
    assert text in refused({"x": value}, {"x": kind})


def test_findings_are_those_of_the_net() -> None:
    net = nets.build(
        "unet", {"filters": [4, 4, 8]}, in_channels=1, classes=2, spatial_dims=2, seed=0, findings=2
    )
    forms = NetForms(lambda _: net)
    check({"f": [1, 0]}, {"f": "findings"}, what="", classes=2, forms=forms)
    with pytest.raises(EgressError, match="not indices of findings"):
        check({"f": [2]}, {"f": "findings"}, what="", classes=2, forms=forms)


def test_a_kind_that_does_not_exist_is_told() -> None:
    assert "'n' is declared as 'numbr'; the kinds are model, some, bits, sparse, number" in refused(
        {"n": 1}, {"n": "numbr"}
    )


def test_a_long_text_does_not_leave_as_a_row() -> None:
    row = {
        "split": "test", "grid": "original", "model": "best", "round": 1, "site": "a", "case": "c", "class": "x",
        "metric": "dice", "value": 0.5, "known": True, "reason": "",
    }  # fmt: skip
    check({"rows": [row]}, {"rows": "rows"}, what="", classes=3, forms=lambda net: FORMS)
    assert "a row's 'reason'" in refused({"rows": [row | {"reason": "x" * 300}]}, {"rows": "rows"})
    assert "a row's 'value'" in refused({"rows": [row | {"value": [1.0]}]}, {"rows": "rows"})


def test_logged_numbers_cannot_stand_for_cases() -> None:
    check_log({"loss": 1.0, "step_seconds": 0.2}, what="")
    with pytest.raises(EgressError, match="'case_17'"):
        check_log({"case_17": 0.5}, what="the answer")
    letters = "abcdefghijklmnopqrstuvwxyz"
    with pytest.raises(EgressError, match="logs 26 numbers; at most 24"):
        check_log({f"x_{letter}": 0.0 for letter in letters}, what="the answer")


@at_site
def leak(site, what) -> dict:
    """A method's function that sends what it must not."""
    if what == "log":
        site.log(**{f"case_{i}": 0.1 for i in range(3)})
    net = site.network()
    extra = {"batch": torch.zeros(2, 1, 32, 32)} if what == "image" else {}
    return {"model": tensors_of(net) | extra, "n": 3} | ({"losses": [0.1] * 3} if what == "losses" else {})


class Source:
    """A site's data, as little as a host needs."""

    n_train = 3
    n_labelled = torch.zeros(2, dtype=torch.int64)
    labels = SiteLabels(LabelSpace(("background", "x")), frozenset({1}))

    def batches(self, *_, **__):
        raise AssertionError("not asked for here")

    volumes = batches


def host(folder: Path, texts: bool = True) -> Host:
    net = torch.nn.Conv2d(1, 4, 3)
    log = EgressLog(folder / "egress.jsonl", "run", "leaky")
    return Host(
        "a",
        Source(),
        {"leak": leak},
        lambda _: net,
        folder,
        Policy({"leak": DECLARED}, log=log, texts=texts),
        seed=1,
    )


@pytest.mark.parametrize("what", ["image", "losses", "log"])
def test_a_host_refuses_and_writes_down(tmp_path, what: str) -> None:
    site = host(tmp_path)
    fine = wire.decode(site.handle("leak", 1, 0, wire.encode({"what": "nothing"})))
    assert fine["value"]["n"] == 3
    reply = site.handle("leak", 1, 1, wire.encode({"what": what}))
    tree = wire.decode(reply)
    assert tree["error"]["code"] == "EgressError" and "value" not in tree and len(reply) < 1000
    lines = read_log(tmp_path / "egress.jsonl")
    assert [line["function"] for line in lines] == ["leak", "leak"] and not any(l["broken"] for l in lines)
    assert lines[0]["contents"]["value/model/weight"] == "float32[4, 1, 3, 3]"
    assert lines[0]["bytes"] > 200
    assert "error/text (site a: the answer to leak" in text_of(logs_of(tmp_path))
    assert lines[1]["contents"] == {f"error/{key}": said for key, said in tree["error"].items()}, (
        "and its text"
    )


def test_the_text_of_an_error_stays_where_it_must(tmp_path) -> None:
    reply = wire.decode(host(tmp_path, texts=False).handle("leak", 1, 0, wire.encode({"other": 1})))
    assert reply["error"] == {"code": "TypeError"}
    assert read_log(tmp_path / "egress.jsonl")[0]["contents"] == {"error/code": "TypeError"}
    assert "unexpected keyword argument" in (tmp_path / "errors.log").read_text()


@pytest.mark.parametrize("texts", [False, True])
def test_what_is_no_text_has_an_answer(tmp_path, monkeypatch, texts: bool) -> None:
    """A file's name of another encoding in an error, and a function that a server names by half a character."""
    site = host(tmp_path, texts=texts)

    def fails(site, **payload) -> dict:
        raise DataError("M\udcfcller.nii.gz: cannot be read")

    monkeypatch.setitem(site.functions, "leak", fails)
    assert wire.decode(site.handle("leak", 1, 0, wire.encode({})))["error"]["code"] == "DataError"
    assert wire.decode(site.handle("\ud800", 1, 1, wire.encode({})))["error"]["code"] == "FedAtlasError"
    assert "M\\udcfcller.nii.gz" in (tmp_path / "errors.log").read_text()
    lines = read_log(tmp_path / "egress.jsonl")
    assert [line["function"] for line in lines] == ["leak", "?"] and not any(line["broken"] for line in lines)


@pytest.mark.parametrize("texts", [False, True])
def test_nothing_leaves_unwritten(tmp_path, monkeypatch, texts: bool) -> None:
    """A full disk at the site: the log cannot be written, so the answer is a code and nothing else."""
    site = host(tmp_path, texts=texts)

    def full(self, what, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(EgressLog, "record", full)
    reply = wire.decode(site.handle("leak", 1, 0, wire.encode({"what": "nothing"})))
    assert reply["error"] == {"code": "OSError"}


def test_a_full_disk_leaves_no_half_line(tmp_path) -> None:
    """As many bytes as there is room for are written; then the log is as it was, and goes on when there is room again."""
    path = tmp_path / "egress.jsonl"
    before = b"".join(write(path, 2))
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 100, limit[1]))
    try:
        with pytest.raises(OSError):
            write(path, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_bytes() == before
    write(path, 1)
    assert len(read_log(path)) == 3 and not broken(path)


def test_a_log_is_written_where_the_file_system_has_no_locks(tmp_path, monkeypatch) -> None:
    def flock(file, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    path = tmp_path / "egress.jsonl"
    assert len(write(path, 2)) == 2 and broken(path) == {}


def write(path: Path, n: int = 4) -> list[bytes]:
    log = EgressLog(path, "run", "fedavg")
    for i in range(n):
        log.record({"function": "f", "round": i, "call": 0, "contents": contents({"n": i})}, b"x" * i)
    return path.read_bytes().splitlines(keepends=True)


def broken(path: Path) -> dict[int, str]:
    return {line["line"]: line["broken"] for line in read_log(path) if line["broken"]}


def test_a_log_that_was_touched_shows_it(tmp_path) -> None:
    path = tmp_path / "egress.jsonl"
    lines = write(path)
    assert broken(path) == {} and [line["round"] for line in read_log(path)] == [0, 1, 2, 3]
    path.write_bytes(b"".join([lines[0], lines[1].replace(b'"bytes": 1', b'"bytes": 9'), *lines[2:]]))
    assert broken(path) == {2: "was changed after it was written"}
    path.write_bytes(b"".join([lines[0], *lines[2:]]))
    assert list(broken(path)) == [2] and "taken out" in broken(path)[2]
    path.write_bytes(b"".join([lines[0], lines[2], lines[1], lines[3]]))
    assert list(broken(path)) == [2, 3, 4]
    body = lines[1].decode().rstrip().partition(" ")[2]
    forged = json.dumps(json.loads(body) | {"bytes": 9}, sort_keys=True, ensure_ascii=False)
    line = f"{hashlib.sha256(forged.encode()).hexdigest()} {forged}\n".encode()
    path.write_bytes(b"".join([lines[0], line, *lines[2:]]))
    assert list(broken(path)) == [3], "a forged line with a digest of its own breaks the chain after it"


def test_long_lines_are_chained_too(tmp_path) -> None:
    path = tmp_path / "egress.jsonl"
    log = EgressLog(path, "run", "fedavg")
    for i in range(3):
        log.record({"contents": {f"tensor {j}": "float32[1]" for j in range(2000)}, "round": i}, b"")
    assert broken(path) == {}


def test_forms_are_those_of_the_tensors_that_travel() -> None:
    net = torch.nn.BatchNorm2d(2)
    forms = forms_of(net)
    assert forms == {n: (str(v.dtype)[6:], tuple(v.shape)) for n, v in tensors_of(net).items()}
    assert forms["num_batches_tracked"] == ("int64", ())


def test_a_line_torn_by_a_crash_is_marked_at_the_next_start(tmp_path) -> None:
    """So that a crash and a forgery can be told apart, then and later."""
    path = tmp_path / "egress.jsonl"
    lines = write(path)
    for cut in (1, 40, 64, 65, 200, len(lines[3]) - 2):
        path.write_bytes(b"".join(lines[:3]) + lines[3][:cut])
        assert broken(path) == {} and read_log(path)[3]["half"] == cut
        assert "the last: a crash while it was written leaves this" in text_of(logs_of(tmp_path))
        more = write(path, 2)
        assert len(more) == 7 and broken(path) == {}
        found = read_log(path)
        assert [line.get("half") for line in found] == [None, None, None, cut, None, None, None]
        assert found[4]["torn"]["bytes"] == cut and found[4]["previous"] == found[2]["digest"]
        told = text_of(logs_of(tmp_path))
        assert f"line 4: HALF A LINE of {cut} bytes, torn by a crash" in told and "5 messages" in told
        assert told.endswith("every whole line fits the chain; torn by a crash: 1")


def test_a_forgery_is_no_crash(tmp_path) -> None:
    path = tmp_path / "egress.jsonl"
    lines = write(path)
    path.write_bytes(b"".join(lines[:3]) + lines[3][:90])
    *_, mark, after = write(path, 1)
    whole = [*lines[:3], lines[3][:90] + b"\n", mark, after]
    path.write_bytes(b"".join(whole))
    assert broken(path) == {}
    forged = {
        "half a line within": [lines[0], lines[1][:90] + b"\n", *lines[2:]],
        "a mark elsewhere": [lines[0], lines[1][:90] + b"\n", mark, *lines[2:]],
        "another half line": [*lines[:3], lines[3][:80] + b"\n", mark, after],
        "a mark of nothing": [*lines[:3], mark, after],
        "a line taken out": [lines[0], lines[1], *whole[3:]],
    }
    for what, text in forged.items():
        path.write_bytes(b"".join(text))
        assert broken(path), what
        assert "the log is NOT whole" in text_of(logs_of(tmp_path)), what


def line_of(plain: dict) -> bytes:
    text = json.dumps(plain, sort_keys=True)
    return f"{hashlib.sha256(text.encode()).hexdigest()} {text}\n".encode()


WITHOUT = object()


@pytest.mark.parametrize("chained", [False, True])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((field, WITHOUT) for field in ("time", "run", "method", "function", "round", "call", "contents")),
        *((field, WITHOUT) for field in ("bytes", "sha256")),
        ("time", 7),
        ("run", None),
        ("round", "1"),
        ("call", True),
        ("contents", [1]),
        ("contents", {"a": None}),
        ("bytes", "9"),
        ("bytes", -1),
        pytest.param("bytes", 10**4000, id="bytes-4001 digits"),
        ("sha256", 64),
        ("sha256", "a" * 63),
        ("half", "x"),
        ("half", 5),
    ],
)
def test_a_line_without_the_fields_of_a_line_is_broken(tmp_path, chained: bool, field: str, value) -> None:
    """Whatever a line holds, `audit` says so and ends with no traceback, also where its digest was made anew."""
    first = write(tmp_path / "egress.jsonl", 1)[0]
    plain = json.loads(first[65:])
    changed = {name: item for name, item in (plain | {field: value}).items() if item is not WITHOUT}
    line = line_of(changed) if chained else first[:65] + line_of(changed)[65:]
    (tmp_path / "egress.jsonl").write_bytes(line)
    (entry,) = logs_of(tmp_path)[tmp_path.name]
    assert f"{field!r}" in entry["broken"] and ("was changed" in entry["broken"]) is not chained
    told = text_of(logs_of(tmp_path), full=True)
    assert "1 messages, 0 bytes\n  line 1: BROKEN, it " in told and "HALF A LINE" not in told
    assert told.endswith("the log is NOT whole: 1 of its lines are BROKEN")
    assert main(["audit", str(tmp_path)]) == 1


@pytest.mark.parametrize("torn", [None, {}, {"bytes": "9", "sha256": "a" * 64}])
def test_a_mark_of_half_a_line_has_its_fields_too(tmp_path, torn) -> None:
    path = tmp_path / "egress.jsonl"
    whole = write(path, 1)
    path.write_bytes(whole[0] + whole[0][:90])
    mark = write(path, 1)[2]
    path.write_bytes(
        b"".join([whole[0], whole[0][:90], b"\n", line_of(json.loads(mark[65:]) | {"torn": torn})])
    )
    assert "'torn'; allowed is a dict of bytes and sha256" in logs_of(tmp_path)[tmp_path.name][2]["broken"]
    untimed = {name: item for name, item in json.loads(mark[65:]).items() if name != "time"}
    path.write_bytes(b"".join([whole[0], whole[0][:90], b"\n", line_of(untimed)]))
    told = text_of(logs_of(tmp_path))
    assert "line 2: HALF A LINE" in told and "line 3: BROKEN, it lacks the field 'time'" in told


def test_sizes_beyond_any_tensor_s_are_told_as_they_are(tmp_path) -> None:
    first = write(tmp_path / "egress.jsonl", 1)[0]
    forms = {"a": f"float32[{'9' * 5000}]", "b": f"float32[{', '.join('9' * 5000)}]", "c": "float32[2, 3]"}
    (tmp_path / "egress.jsonl").write_bytes(line_of(json.loads(first[65:]) | {"contents": forms}))
    assert "1 tensors with 6 numbers, a (float32[999" in text_of(logs_of(tmp_path))


def test_a_last_line_that_lacks_its_end_alone_is_whole(tmp_path) -> None:
    path = tmp_path / "egress.jsonl"
    lines = write(path)
    path.write_bytes(b"".join(lines)[:-1])
    assert not any("half" in line for line in read_log(path))
    write(path, 1)
    assert broken(path) == {} and len(read_log(path)) == 5 and not any("torn" in l for l in read_log(path))


def test_a_log_is_shown_without_what_moves_the_cursor(tmp_path) -> None:
    """The server names the run: its name must not write over what else the log says."""
    run = "r\x1b[1A\x1b[2K\r\n  every line fits the chain\u202e"
    log = EgressLog(tmp_path / "egress.jsonl", run, "fedavg")
    log.record(
        {"function": "hello\n", "round": 0, "call": 0, "contents": {"a\nb": "f\x1b", "t": "no case [x]"}},
        b"x",
    )
    lines = text_of(logs_of(tmp_path), full=True).splitlines()
    assert len(lines) == 5 and all(c.isprintable() for line in lines for c in line)
    assert "r?[1A?[2K??  every line fits the chain?" in lines[1]
