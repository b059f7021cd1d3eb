"""The live page: where a run stands, of every kind of folder, and in a real browser while a run goes on."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import synthetic_classification
import yaml
from synthetic_run import write_run

from fedatlas.cli import main
from fedatlas.core.errors import DataError, FedAtlasError, RunFolderError, SiteLost
from fedatlas.report.watch import Watched, server, write
from fedatlas.transport.rounds import RunFolder


@pytest.fixture
def unfinished(tmp_path: Path, undrawn: None) -> Path:
    """Two of five rounds; the lock is that of this process."""
    run = write_run(tmp_path / "run", final=False)
    info = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**info, "rounds": 50, "finished": None}))
    (run / "stopped.json").unlink(missing_ok=True)
    lock(run, os.getpid())
    return run


def lock(run: Path, process: int, host: str = "") -> None:
    began = "2026-11-22T10:00:00+00:00"
    (run / "lock").write_text(f"process {process} on {host or socket.gethostname()}, since {began},")


def ask(
    run: Path, function: str, answered: list[str], age: float = 0, asked: Sequence[str] | None = None
) -> None:
    """A question to some sites; None: to all."""
    folder = run / "scratch" / "train" / "000003-000" / function
    folder.mkdir(parents=True)
    for name in ("to-all", *answered):
        (folder / f"{name}.fa").write_text("")
    sites = asked or sorted(json.loads((run / "run.json").read_text())["sites"])
    (folder / "asked.txt").write_text("\n".join(sites))
    os.utime(folder / "to-all.fa", (time.time() - age,) * 2)


def words(text: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", text.partition("</style>")[2]))


def test_a_run_that_goes_on(unfinished: Path) -> None:
    now, page = Watched(unfinished, every=7).look()
    sites = sorted(json.loads((unfinished / "run.json").read_text())["sites"])
    assert (now.state, now.rounds, now.call) == ("runs", 50, None) and now.left and not now.over
    assert '<meta http-equiv="refresh" content="7">' in page
    assert f"Round {now.done + 1} of 50" in words(page)
    ask(unfinished, "local_update", sites[:1], age=3)
    now, page = Watched(unfinished).look()
    assert now.call and now.call.answered == (sites[0],) and set(now.call.waits) == set(sites[1:])
    assert f"{sites[0]} answered; waiting for {', '.join(now.call.waits)}" in words(page)


def test_nobody_waits_for_a_site_that_was_not_asked(unfinished: Path) -> None:
    """As in the validation of a round sites without validation cases, and all sites where their cases are merged."""
    sites = sorted(json.loads((unfinished / "run.json").read_text())["sites"])
    ask(unfinished, "local_update", [], age=1e6, asked=["pooled"])
    now, page = Watched(unfinished).look()
    assert now.call and now.call.waits == ("pooled",) and now.call.late
    assert not any(f"{site} late" in words(page) for site in sites)
    ask(unfinished, "evaluate", sites[:1], asked=sites[:2])
    now, _ = Watched(unfinished).look()
    assert now.call and now.call.answered == (sites[0],) and now.call.waits == (sites[1],)


def test_a_call_that_ends_while_it_is_looked_for(unfinished: Path, monkeypatch) -> None:
    """Its folder is gone between being listed and being read; the newest of the others counts."""
    ask(unfinished, "local_update", [], age=3)
    for gone in ("train/000009-000", "over/000001-000/local_update"):
        (unfinished / "scratch" / gone).mkdir(parents=True)

    def vanishing(listed: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def of(path: Any) -> Any:
            if Path(path).name in ("over", "000009-000"):
                raise FileNotFoundError(2, "No such file or directory", str(path))
            return listed(path)

        return of

    monkeypatch.setattr(os, "listdir", vanishing(os.listdir))
    monkeypatch.setattr(os, "scandir", vanishing(os.scandir))
    now, page = Watched(unfinished).look()
    assert now.call and now.call.function == "local_update" and "waiting for" in words(page)


def test_a_run_folder_that_goes_away_is_told_and_looked_for_again(unfinished: Path, monkeypatch) -> None:
    def gone(*_: Any) -> None:
        raise FileNotFoundError(2, "No such file or directory", "scratch")

    with server(Watched(unfinished), 0) as serving:
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        monkeypatch.setattr("fedatlas.report.watch.stand", gone)
        with pytest.raises(urllib.error.HTTPError, match="503") as error:
            urllib.request.urlopen(f"http://127.0.0.1:{serving.server_address[1]}/")
        assert "No such file or directory" in error.value.read().decode()
        serving.shutdown()


def test_who_takes_longer_than_usual_is_late(unfinished: Path) -> None:
    ask(unfinished, "local_update", [], age=1e5)
    now, page = Watched(unfinished).look()
    assert now.call and now.call.late and "longer than usual" in words(page) and "late:" in words(page)


def test_nobody_is_late_in_the_final_evaluation(unfinished: Path) -> None:
    """It is longer than a round's validation, and there is nothing else to compare it with."""
    info = json.loads((unfinished / "run.json").read_text())
    (unfinished / "run.json").write_text(json.dumps({**info, "rounds": 6}))
    ask(unfinished, "evaluate_several", [], age=1e5)
    now, page = Watched(unfinished).look()
    assert now.done == now.rounds == 6 and now.call and not now.call.late
    assert "The final evaluation." in words(page) and "late:" not in words(page)


def test_a_number_that_a_round_lacks_is_left_out(unfinished: Path) -> None:
    log = unfinished / "rounds" / "0006" / "log.json"
    found = json.loads(log.read_text())
    found["phases"]["round"] = None
    found["cost"] = {site: {"peak_mb": None, "seconds": None} for site in found["cost"]}
    log.write_text(json.dumps(found))
    assert Watched(unfinished).look()[0].left


def test_a_site_that_was_lost_is_named_with_the_reason(tmp_path: Path, undrawn: None) -> None:
    page = words(Watched(write_run(tmp_path / "run", final=False, lost_always="site-b")).look()[1])
    assert re.search(r"site-b lost in round 6: \w+", page) and "Lost sites" in page


def test_data_that_are_prepared(tmp_path: Path) -> None:
    (tmp_path / "federation.yaml").write_text("name: x\n")
    lock(tmp_path, os.getpid())
    now, page = Watched(tmp_path).look()
    assert now.state == "prepares" and "their data are prepared" in words(page)


def test_a_run_that_is_yet_to_come(tmp_path: Path, undrawn: None, capsys, monkeypatch) -> None:
    """The page waits for the folder, through the moment in which it has its lock alone, and says so."""
    run, out = tmp_path / "runs" / "r", tmp_path / "page.html"
    looks = []

    def passes(seconds: float) -> None:
        looks.append(words(out.read_text(encoding="utf-8")))
        if len(looks) == 1:
            run.mkdir(parents=True)
            lock(run, os.getpid())
        else:
            shutil.rmtree(run)
            write_run(run)

    monkeypatch.setattr("fedatlas.cli.watch.time", SimpleNamespace(sleep=passes))
    assert main(["watch", str(run), "--out", str(out)]) == 0
    assert f"{run}: no such folder yet; the page waits" in capsys.readouterr().err
    assert "There is no such folder yet." in looks[0] and "their data are prepared" in looks[1]
    assert "Finished: all" in words(out.read_text(encoding="utf-8"))


def test_a_run_of_findings_with_its_pictures(tmp_path: Path, undrawn: None) -> None:
    run = synthetic_classification.write_run(tmp_path / "run", classes=("mass",), images=60, draws=20)
    assert 'id="overlays"' in (page := Watched(run).look()[1]) and "Grad-CAM" in page


def test_a_run_that_is_finished(tmp_path: Path, undrawn: None) -> None:
    now, page = Watched(write_run(tmp_path / "run")).look()
    assert now.state == "finished" and now.over and 'http-equiv="refresh"' not in page
    assert "Finished: all" in words(page) and 'id="overlays"' in page


def test_a_run_that_was_killed(unfinished: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    lock(unfinished, dead.pid)
    now, page = Watched(unfinished).look()
    assert now.state == "stopped" and "ended without a word" in words(page) and "--resume" in words(page)
    lock(unfinished, dead.pid, host="another-machine")
    assert Watched(unfinished).look()[0].state == "runs", "of another machine nothing is known"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (SiteLost("site b: no answer within 5 s"), r"Stopped: site b: no answer within 5 s \("),
        (KeyboardInterrupt(), r"Stopped: by hand \(Ctrl-C\)"),
        (DataError("site b: case_7: a hole"), "Stopped: DataError; see what the run itself said"),
        (ValueError("case_7"), "Stopped: ValueError; see what the run itself said"),
    ],
)
def test_why_a_run_stopped(unfinished: Path, error: BaseException, said: str) -> None:
    """Not by the name of a case."""
    folder = RunFolder(unfinished)
    with pytest.raises(type(error)), folder.explained():
        raise error
    now, page = Watched(unfinished).look()
    assert now.over and re.search(said, words(page)) and "case_7" not in page
    with folder.explained():
        assert Watched(unfinished).look()[0].state == "runs", "it goes on"
    assert Watched(unfinished).look()[0].state == "runs"


@pytest.mark.parametrize("cut", ['{"when": "2026', "[]", '{"when": null}'])
def test_a_reason_that_cannot_be_read(unfinished: Path, cut: str) -> None:
    (unfinished / "stopped.json").write_text(cut)
    now, page = Watched(unfinished).look()
    assert now.state == "stopped"
    assert "Stopped: for a reason that cannot be read, stopped.json is damaged." in words(page)


def test_the_server_gives_the_page_to_this_machine_alone(unfinished: Path) -> None:
    with server(Watched(unfinished), 0) as serving:
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        host, port = serving.server_address[:2]
        assert host == "127.0.0.1"
        address = f"http://127.0.0.1:{port}/"
        with urllib.request.urlopen(address) as answer:
            assert b"FedAtlas live" in answer.read() and answer.headers["Cache-Control"] == "no-store"
        for path, name in (("rounds/0001/log.json", None), ("", "evil.example:80")):
            asked = urllib.request.Request(address + path, headers={"Host": name} if name else {})
            with pytest.raises(urllib.error.HTTPError, match="404"):
                urllib.request.urlopen(asked)
        with pytest.raises(FedAtlasError, match=f"--port {port}: cannot be used"):
            server(Watched(unfinished), int(port))
        (unfinished / "rounds" / "0001" / "log.json").write_text("{")
        with pytest.raises(urllib.error.HTTPError, match="503"):
            urllib.request.urlopen(address)
        serving.shutdown()


def test_charts_are_drawn_for_one_that_looks_at_a_time(unfinished: Path, monkeypatch) -> None:
    """Two tabs at once: matplotlib's settings are those of the process."""
    watched, drawing, most = Watched(unfinished), list[str](), list[int]()

    def section(run: Any, template: str) -> str:
        drawing.append(template)
        time.sleep(0.2)
        most.append(len(drawing))
        drawing.remove(template)
        return template

    monkeypatch.setattr("fedatlas.report.page.section", section)
    tabs = [threading.Thread(target=watched.look) for _ in range(3)]
    for tab in tabs:
        tab.start()
    for tab in tabs:
        tab.join()
    assert set(most) == {1} and len(most) == len(watched._drawn[1]), "drawn once, and kept"


def test_a_file_where_no_server_may_run(tmp_path: Path, undrawn: None, capsys) -> None:
    run, out = write_run(tmp_path / "run"), tmp_path / "deep" / "page.html"
    assert main(["watch", str(run), "--out", str(out)]) == 0
    assert "finished, " in capsys.readouterr().out and "FedAtlas live" in out.read_text()
    assert [path.name for path in out.parent.iterdir()] == ["page.html"]


def test_a_run_that_stopped_before_it_had_a_record(tmp_path: Path, undrawn: None, capsys) -> None:
    (tmp_path / "lock").write_text("")
    (tmp_path / "stopped.json").write_text('{"why": "site a: no such folder", "when": 0}')
    assert main(["watch", str(tmp_path), "--out", str(tmp_path / "page.html")]) == 0
    assert capsys.readouterr().out.endswith("before its first round\n")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["run/rounds"], "run/rounds: not a run folder, it holds no federation.yaml"),
        (["run/run.json"], "run/run.json: no such folder"),
        (["run", "--every", "0"], "error: --every 0: allowed are 1 to 86400 seconds"),
        (["run", "--every", "nan"], "error: --every nan: allowed are 1 to 86400 seconds"),
        (["run", "--every", "inf"], "error: --every inf: allowed are 1 to 86400 seconds"),
        (["run", "--port", "70000"], "error: --port 70000: allowed are ports from 0 to 65535"),
        (["run", "--out", "run/run.json/page.html"], "run.json"),
    ],
)
def test_what_cannot_be_watched(
    tmp_path: Path, undrawn: None, capsys, monkeypatch, more: list[str], said: str
) -> None:
    write_run(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    assert main(["watch", *more]) == 1
    assert said in capsys.readouterr().err


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="not a run folder"):
        Watched(tmp_path)


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def seen(profile: Path, address: str) -> str:
    """What a browser has of a page, with its scripts run."""
    assert BROWSER is not None
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", f"--user-data-dir={profile}"]
    done = subprocess.run(
        [BROWSER, *flags, "--dump-dom", address], capture_output=True, timeout=60, text=True, check=True
    )
    return words(done.stdout)


def until(look: Callable[[], str], wanted: str, seconds: float = 180) -> str:
    end = time.monotonic() + seconds
    while not re.search(wanted, text := look()):
        assert time.monotonic() < end, f"{wanted!r} did not come: {text[:600]}"
        time.sleep(1)
    return text


def round_in(text: str) -> int:
    """The round that a page says is on; 0 where it says none."""
    found = re.search(r"Round (\d+) of 500", text)
    return int(found[1]) if found else 0


@pytest.mark.slow
@pytest.mark.skipif(
    BROWSER is None, reason="no Chromium on this machine; install it with: apt-get install chromium"
)
def test_a_browser_sees_a_run_whose_worker_dies_and_which_is_killed(
    small: dict[str, Any], tmp_path: Path
) -> None:
    """The worker process of a site is killed in a round, and the run goes on with another; then the run itself is."""
    small |= {
        "rounds": 500,
        "local": small["local"] | {"steps": 40},
        "faults": {"on_lost": "drop"},
    }
    small["engine"] = small["engine"] | {"workers": 2}
    file, run = tmp_path / "federation.yaml", tmp_path / "runs" / "r"
    file.write_text(yaml.safe_dump(small))
    cli = [sys.executable, "-m", "fedatlas"]
    running = subprocess.Popen([*cli, "run", str(file), "--runs", str(tmp_path / "runs"), "--id", "r"])
    watching = None
    try:
        until(lambda: str((run / "federation.yaml").exists()), "True")
        watching = subprocess.Popen(
            [*cli, "watch", str(run), "--port", "0"], stdout=subprocess.PIPE, text=True
        )
        assert watching.stdout
        address = watching.stdout.readline().split()[0]
        look = lambda: seen(tmp_path / "profile", address)  # noqa: E731
        until(look, r"Round [3-9]\d* of 500")
        children = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGKILL)
        at = re.search(r"Round (\d+) of 500", look())
        assert at
        until(lambda: str(round_in(look()) > int(at[1]) + 1), "True")  # a round may take less than a look
        running.kill()
        running.wait()
        text = until(look, "Stopped: its process ended without a word")
        assert "goes on" in text
    finally:
        for process in (running, watching):
            if process is not None:
                process.kill()
                process.wait()


def test_the_page_is_written_whole_or_not_at_all(unfinished: Path, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    out.write_text("old")
    (unfinished / "rounds" / "0001" / "log.json").write_text("{")
    with pytest.raises(RunFolderError):
        write(Watched(unfinished), out)
    assert out.read_text() == "old"
