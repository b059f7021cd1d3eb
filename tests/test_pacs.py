# ruff: noqa: F401, F811 (fixtures of test_dicom)
"""A PACS by DICOMweb: what goes wrong with one, and Orthanc, a real one (slow)."""

import base64
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pydicom
import pytest
from dicom_series import NAME, NUMBER, uid, write_series
from test_dicom import asked, hospital, trained, values

from fedatlas.core.errors import FederationError
from fedatlas.data.formats import dicom
from fedatlas.federation import pacs
from fedatlas.federation.pacs import PASSWORD, TOKEN, USER, Credentials, Pacs, PacsError

SERIES = uid("p0/ct")


@pytest.mark.parametrize(
    ("content", "mode", "text"),
    [
        ("user: a\npassword: b", 0o644, "others can read it; run chmod 600 on it"),
        ("user: a", 0o600, "gives user; allowed: user and password, or token"),
        ("user: a\npassword: b\ntoken: c", 0o600, "gives password, token, user; allowed"),
        ("usr: secret-word", 0o600, "has a key 'usr'; allowed: user, password, token"),
        ("secret-word", 0o600, "holds no keys; write"),
        ("a: [secret-word", 0o600, "not readable as YAML"),
        ("user: a\npassword: 0123", 0o600, "password is no text to YAML; put it into quotes"),
        ("token: yes", 0o600, "token is no text to YAML; put it into quotes"),
        (None, 0o600, "cannot be read (No such file or directory)"),
    ],
)
def test_files_of_credentials(content, mode, text, tmp_path) -> None:
    file = tmp_path / "pacs.yaml"
    if content is not None:
        file.write_text(content)
        file.chmod(mode)
    with pytest.raises(FederationError) as told:
        Credentials.read(file, {})
    assert text in str(told.value) and "secret-word" not in str(told.value)


def test_credentials_of_the_environment(tmp_path) -> None:
    assert Credentials.read(None, {USER: "u", PASSWORD: "p"}) == Credentials("u", "p")
    assert (
        Credentials.read(None, {TOKEN: "t"}) == Credentials(token="t")
        and Credentials.read(None, {}) == Credentials()
    )
    assert "secret" not in repr(Credentials("u", "secret", "secret"))
    with pytest.raises(FederationError, match=f"the environment: gives user; allowed.*{PASSWORD}"):
        Credentials.read(None, {USER: "u"})


def test_credentials_end_before_their_line(tmp_path) -> None:
    """As secrets are handed over that were written by echo: no header may hold the end of a line."""
    assert Credentials.read(None, {TOKEN: "t\n"}) == Credentials(token="t")
    told = {USER: "u\n", PASSWORD: " p w \r\n", TOKEN: "\n"}
    assert Credentials.read(None, told) == Credentials("u", " p w ")


class Fake(BaseHTTPRequestHandler):
    """A DICOMweb service that answers as `ways` says: path's end -> a function of the handler."""

    ways: ClassVar[dict[str, Any]] = {}

    def do_GET(self) -> None:
        way = next((way for end, way in self.ways.items() if self.path.partition("?")[0].endswith(end)), None)
        way(self) if way else self.send_error(404)

    do_POST = do_GET

    def log_message(self, *given: Any) -> None:
        pass

    def answer(
        self, content: bytes, kind: str = "application/dicom+json", promised: int | None = None
    ) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(promised or len(content)))
        self.end_headers()
        self.wfile.write(content)


def item(study: str, series: str) -> dict[str, Any]:
    """What DICOMweb answers of a series."""
    return {
        "0020000D": {"vr": "UI", "Value": [study]},
        "0020000E": {"vr": "UI", "Value": [series]},
    }


def says(answer: Any) -> Any:
    return lambda self: self.answer(json.dumps(answer).encode())


def found(count: int) -> Any:
    one = item("1.2.3", SERIES) | {"00080018": {"vr": "UI", "Value": ["1.2.4"]}}
    return says([one] * count)


def cut(self: Fake) -> None:
    """The first objects of a series, and then the service dies."""
    self.answer(
        b"--b\r\nContent-Type: application/dicom\r\n\r\nabc",
        'multipart/related; type="application/dicom"; boundary=b',
        9000,
    )
    self.close_connection = True


def silent(self: Fake) -> None:
    time.sleep(1.5)


@pytest.fixture
def fake(monkeypatch) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Fake)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(Fake, "ways", {})
    yield f"http://127.0.0.1:{server.server_port}/web"
    server.shutdown()


@pytest.mark.parametrize(
    ("ways", "text"),
    [
        ({}, "knows no such address (404)"),
        ({"/series": lambda self: self.send_error(401)}, f"wants credentials (401); give {USER}"),
        ({"/series": lambda self: self.send_error(403)}, "does not allow it to this user (403)"),
        ({"/series": lambda self: self.send_error(500)}, "answered 500; see its log"),
        ({"/series": lambda self: self.answer(b"<html>", "text/html")}, "its answer is no DICOMweb"),
        ({"/series": silent}, "it said nothing for 0.3 s; see that it runs, or raise --timeout"),
        (
            {"/series": says(["9b9c0a8e-0020000D-0020000E"])},  # Orthanc's own service
            "its answer is no DICOMweb (ValueError); correct --dicomweb, which ends where /studies begins",
        ),
        ({"/series": says([{"ID": "9b9c0a8e"}])}, "its answer is no DICOMweb"),
        (
            {"/series": lambda self: self.send_error(400)},
            "does not understand the request (400); correct --dicomweb, which ends where /studies begins",
        ),
        ({"/series": says([item("1.2.1", "1.2.5")])}, "has no series of this UID (case-"),
        ({"/series": found(0)}, "has no series of this UID (case-"),
        ({"/series": found(1), "/instances": found(3), SERIES: cut}, "nothing was stored"),
    ],
)
def test_a_pacs_that_does_not_do_its_part(ways, text, fake, monkeypatch) -> None:
    monkeypatch.setattr(Fake, "ways", ways)
    with pytest.raises(PacsError) as told:
        list(Pacs(fake, timeout=0.3).fetch([SERIES]))
    assert text in str(told.value) and str(told.value).startswith(fake)


def test_a_password_may_have_any_letters(fake, monkeypatch) -> None:
    sent: list[str] = []

    def kept(self: Fake) -> None:
        sent.append(self.headers["Authorization"])
        self.send_error(401)

    monkeypatch.setattr(Fake, "ways", {"/series": kept})
    with pytest.raises(PacsError, match="refused the credentials"):
        list(Pacs(fake, Credentials("Jürgen", "пароль")).fetch([SERIES]))
    assert base64.b64decode(sent[0].removeprefix("Basic ")).decode() == "Jürgen:пароль"


def test_fewer_objects_than_there_are(fake, monkeypatch, tmp_path) -> None:
    file = write_series(tmp_path, np.zeros((4, 4, 2)), np.eye(4), "p0/ct")[0]
    body = b"--b\r\nContent-Type: application/dicom\r\n\r\n" + file.read_bytes() + b"\r\n--b--"
    whole = lambda self: self.answer(body, 'multipart/related; type="application/dicom"; boundary=b')  # noqa: E731
    monkeypatch.setattr(Fake, "ways", {"/series": found(1), "/instances": found(3), SERIES: whole})
    with pytest.raises(PacsError, match="sent 1 of the 3 objects of case-.*nothing was stored"):
        list(Pacs(fake).fetch([SERIES]))


def test_a_pacs_that_does_not_heed_the_filter_leads_into_no_other_study(fake, monkeypatch, tmp_path) -> None:
    file = write_series(tmp_path, np.zeros((4, 4, 2)), np.eye(4), "p0/ct")[0]
    body = b"--b\r\nContent-Type: application/dicom\r\n\r\n" + file.read_bytes() + b"\r\n--b--"
    asked_for: list[str] = []

    def whole(self: Fake) -> None:
        asked_for.append(self.path)
        self.answer(body, 'multipart/related; type="application/dicom"; boundary=b')

    everything = says([item("1.2.1", "1.2.5"), item("1.2.3", SERIES), item("1.2.2", "1.2.6")])
    monkeypatch.setattr(Fake, "ways", {"/series": everything, "/instances": found(1), SERIES: whole})
    assert len(list(Pacs(fake).fetch([SERIES]))) == 1
    assert asked_for == [f"/web/studies/1.2.3/series/{SERIES}"]


def test_an_evaluation_offers_no_cases_without_labels(trained, hospital, tmp_path, capsys) -> None:
    """And says what it found odd about a folder of which it can score a part."""
    folder = next(hospital.glob("*0"))
    (tmp_path / "bare").mkdir()
    for file in folder.glob("*ct*.dcm"):
        shutil.copy(file, tmp_path / "bare")
    asks = ("evaluate", trained, "--format", "dicom", "--json", "--data")
    status, _, err = asked(capsys, *asks, tmp_path / "bare")
    assert status == 1 and "holds no labels" in err and "1 series have no segmentation" in err
    assert "unlabelled" not in err
    shutil.copytree(next(hospital.glob("*1")), tmp_path / "both" / "1")
    shutil.copytree(tmp_path / "bare", tmp_path / "both" / "0")
    status, out, err = asked(capsys, *asks, tmp_path / "both")
    (note,) = [note for note in json.loads(out)["notes"] if "have no segmentation" in note]
    assert status == 0 and f"note: {note}" in err and "unlabelled" not in err


# ------------------------------------------------------------------------------------------------- Orthanc

PLUGIN = "/usr/lib/orthanc/libOrthancDicomWeb.so"


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.fixture
def orthanc(tmp_path, hospital, monkeypatch) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Orthanc with DICOMweb and a password, which holds the first case: its URL and its process."""
    binary = shutil.which("Orthanc") or shutil.which("Orthanc", path="/usr/sbin")
    plugins = sorted(Path(PLUGIN).parent.glob(f"{Path(PLUGIN).name}*"))
    if binary is None or not plugins:
        pytest.skip("Orthanc with DICOMweb is not installed (Debian: orthanc, orthanc-dicomweb)")
    port = free_port()
    settings = {
        "StorageDirectory": str(tmp_path / "db"),
        "IndexDirectory": str(tmp_path / "db"),
        "HttpPort": port,
        "DicomServerEnabled": False,
        "AuthenticationEnabled": True,
        "RegisteredUsers": {"radiology": "a secret"},
        "Plugins": [str(plugins[0])],
        "DicomWeb": {"Enable": True, "Root": "/dicom-web/"},
    }
    (tmp_path / "orthanc.json").write_text(json.dumps(settings))
    with (tmp_path / "orthanc.log").open("wb") as log:
        process = subprocess.Popen([binary, tmp_path / "orthanc.json"], stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}/dicom-web"
    monkeypatch.setenv(USER, "radiology")
    monkeypatch.setenv(PASSWORD, "a secret")
    try:
        for _ in range(240):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            time.sleep(0.25)
        folder = next(hospital.glob("*0"))
        data = [pydicom.dcmread(file) for file in sorted(folder.glob("*ct*.dcm"))]
        client_of(url).store_instances(data)
        yield url, process
    finally:
        process.kill()
        process.wait()


def client_of(url: str) -> Any:
    return Pacs(url, Credentials("radiology", "a secret"))._client


def segmentations(url: str) -> list[Any]:
    return [
        found
        for kind in ("SEG", "RTSTRUCT")
        for found in client_of(url).search_for_series(search_filters={"Modality": kind})
    ]


@pytest.mark.slow
def test_orthanc_gives_a_series_and_keeps_its_segmentation(
    orthanc, trained, hospital, tmp_path, capsys
) -> None:
    url, _ = orthanc
    asks = ("predict", trained, "--dicomweb", url, "--series", SERIES)
    status, out, err = asked(capsys, *asks, "--store")
    assert status == 0 and f"stored at {url}: 1 (seg)" in out, err
    assert asked(capsys, *asks, "--store", "--as", "rtstruct", "-o", tmp_path / "out")[0] == 0
    assert asked(capsys, *asks, "--store")[0] == 0  # the same once more is no other object
    kept = segmentations(url)
    assert len(kept) == 2
    client = client_of(url)
    for one in kept:
        (study, series) = (one[tag]["Value"][0] for tag in ("0020000D", "0020000E"))
        (data,) = client.retrieve_series(study, series)
        assert study == uid("p0", "study") and (data.PatientName, data.PatientID) == (NAME, f"{NUMBER}-0")
        data.save_as(tmp_path / f"{data.Modality}.dcm")
    folder = next(hospital.glob("*0"))
    assert asked(capsys, "predict", trained, folder, "-o", tmp_path / "out", "--as", "seg")[0] == 0
    name = dicom.pseudonym(SERIES)
    local, remote = (
        pydicom.dcmread(file) for file in (tmp_path / "out" / f"{name}_seg.dcm", tmp_path / "SEG.dcm")
    )
    assert local.SOPInstanceUID == remote.SOPInstanceUID and local.PixelData == remote.PixelData
    found = dicom.find([*folder.glob("*ct*.dcm"), tmp_path / "SEG.dcm", tmp_path / "RTSTRUCT.dcm"]).series[0]
    assert [drawing.kind for drawing in sorted(found.drawings, key=lambda d: d.kind)] == ["RTSTRUCT", "SEG"]
    said = out + err
    assert not any(word in said for word in (*NAME.split("^"), NUMBER, "a secret"))


@pytest.mark.slow
def test_orthanc_refuses_and_dies(orthanc, trained, tmp_path, capsys, monkeypatch) -> None:
    url, process = orthanc
    asks = ("predict", trained, "--dicomweb", url, "--series", SERIES, "--store", "--timeout", "10")
    status, _, err = asked(capsys, "predict", trained, "--dicomweb", url, "--series", "1.2.3.4", "--store")
    assert status == 1 and "has no series of this UID (case-" in err
    monkeypatch.setenv(PASSWORD, "wrong")
    status, _, err = asked(capsys, *asks)
    assert status == 1 and "refused the credentials (401)" in err and "wrong" not in err
    monkeypatch.setenv(PASSWORD, "a secret")
    assert segmentations(url) == []
    fetch = Pacs.fetch

    def killed(self: Pacs, uids: Any) -> Any:
        """The PACS stands still after some objects, as one that dies midway does to those who wait."""
        for number, data in enumerate(fetch(self, uids)):
            if number == 3:
                os.kill(process.pid, signal.SIGSTOP)
            yield data

    with monkeypatch.context() as patch:
        patch.setattr(pacs.Pacs, "fetch", killed)
        status, _, err = asked(capsys, *asks[:-1], "2")
    os.kill(process.pid, signal.SIGCONT)
    assert status == 1 and ("said nothing for 2 s" in err or "connection broke" in err), err
    assert segmentations(url) == []
    process.kill()
    process.wait()
    status, _, err = asked(capsys, *asks)
    assert status == 1 and "could not be reached; see that it runs; nothing was stored" in err
