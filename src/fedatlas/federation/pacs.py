"""An archive of images (PACS) by DICOMweb: series are fetched from it, and results stored back.

Messages name the archive and pseudonyms of series (`dicom.pseudonym`), no patient. What is stored has UIDs that follow from
the series, the model, the labels, and names and codes of the classes: storing the same result again makes no second object.
"""

import importlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fedatlas.core.errors import FedAtlasError, FederationError

STUDY, SERIES = "0020000D", "0020000E"
"""The tags of the UIDs of a study and of a series."""
ADDRESS = "correct --dicomweb, which ends where /studies begins"
"""What to do where another service answers."""
USER, PASSWORD, TOKEN = "FEDATLAS_PACS_USER", "FEDATLAS_PACS_PASSWORD", "FEDATLAS_PACS_TOKEN"
"""Environment variables with the credentials."""


class PacsError(FedAtlasError):
    """The archive did not do what it was asked for; the message says what to do."""


@dataclass(frozen=True)
class Credentials:
    """Who asks: user and password, or a token; empty: nobody in particular."""

    user: str = ""
    password: str = field(default="", repr=False)
    token: str = field(default="", repr=False)

    @classmethod
    def read(cls, file: Path | None, environment: Mapping[str, str] = os.environ) -> "Credentials":
        """Those of a YAML file (`user` and `password`, or `token`) that nobody else can read, or of the environment.

        Raises FederationError for a file that is missing, can be read by others or holds something else, and for a user
        without a password or with a token.
        """
        where = "the environment"
        found: Any = {"user": environment.get(USER), "password": environment.get(PASSWORD)}
        found["token"] = environment.get(TOKEN)
        if file is not None:
            where, found = f"--credentials {file}", _yaml(file)
        # a secret that was written as a line ends with it
        known = {key: text for key, value in found.items() if (text := (value or "").rstrip("\r\n"))}
        if set(known) not in (set(), {"user", "password"}, {"token"}):
            raise FederationError(
                f"{where}: gives {', '.join(sorted(known))}; allowed: user and password, or token (in the environment: "
                f"{USER} and {PASSWORD}, or {TOKEN})"
            )
        return cls(**known)


def _yaml(file: Path) -> dict[str, Any]:
    import yaml

    try:
        if file.stat().st_mode & 0o077:
            raise FederationError(f"--credentials {file}: others can read it; run chmod 600 on it")
        found = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise FederationError(f"--credentials {file}: cannot be read ({error.strerror or error})") from None
    except (yaml.YAMLError, ValueError):  # its message would quote the file
        raise FederationError(
            f"--credentials {file}: not readable as YAML; write `user: …` and `password: …`"
        ) from None
    if not isinstance(found, dict):
        raise FederationError(
            f"--credentials {file}: holds no keys; write `user: …` and `password: …`, or `token: …`"
        )
    strange = sorted(str(key) for key in found if key not in ("user", "password", "token"))
    if strange:
        raise FederationError(
            f"--credentials {file}: has a key {strange[0]!r}; allowed: user, password, token"
        )
    other = [key for key, value in found.items() if not isinstance(value, str | None)]
    if other:  # 0123 would be 83, and yes True
        raise FederationError(f"--credentials {file}: {other[0]} is no text to YAML; put it into quotes")
    return found


LONGEST = 24 * 60 * 60
"""Seconds for which an archive may be waited for."""


@dataclass(frozen=True)
class Pacs:
    """An archive. url: of its DICOMweb service; timeout: seconds that a connection, and each silence in an answer, may
    take. Raises FederationError for a URL that is none or holds credentials."""

    url: str
    credentials: Credentials = Credentials()
    timeout: float = 30.0

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            host, given = parts.hostname, parts.username or parts.password
        except ValueError:
            parts, host, given = None, None, None
        if given:
            raise FederationError(
                f"--dicomweb: the URL holds credentials, which others would see; give them by {USER} and {PASSWORD}, or "
                "--credentials"
            )
        if parts is None or parts.scheme not in ("http", "https") or not host:
            raise FederationError(
                f"--dicomweb {self.url}: not a URL of a DICOMweb service, as https://pacs.example.org/dicom-web"
            )
        if not 0 < self.timeout <= LONGEST:
            raise FederationError(f"--timeout {self.timeout:g}: seconds are above 0, and {LONGEST} at most")

    @property
    def in_the_clear(self) -> bool:
        """Do credentials or images cross a network without encryption?"""
        parts = urlsplit(self.url)
        return parts.scheme == "http" and parts.hostname not in ("localhost", "127.0.0.1", "::1")

    @cached_property
    def _client(self) -> Any:
        try:
            api = importlib.import_module("dicomweb_client.api")
            requests = importlib.import_module("requests")
        except ImportError:
            raise FederationError(
                '--dicomweb needs dicomweb-client; run pip install "fedatlas[dicom]"'
            ) from None
        session = requests.Session()
        session.trust_env = True
        if self.credentials.user:
            session.auth = (self.credentials.user.encode(), self.credentials.password.encode())
        headers = {"Authorization": f"Bearer {self.credentials.token}"} if self.credentials.token else None
        client = api.DICOMwebClient(self.url, session=session, headers=headers, timeout=self.timeout)
        client.set_http_retry_params(retry=False)
        return client

    def fetch(self, uids: Sequence[str]) -> Iterator[Any]:
        """The objects of these series, pydicom Datasets. Raises FederationError for a text that is no UID, PacsError where
        a series is not there, or the answer holds fewer objects than the archive says it has."""
        from fedatlas.data.formats.dicom import pseudonym

        for uid in uids:
            if not re.fullmatch(r"[0-9]+(\.[0-9]+)+", uid) or len(uid) > 64:
                raise FederationError(
                    "--series: not a UID; with --dicomweb it is the Series Instance UID: numbers and dots, 64 letters at most"
                )
        for uid in uids:
            name = pseudonym(uid)
            with self._asked(f"asked for {name}"):
                found = self._client.search_for_series(search_filters={"SeriesInstanceUID": uid})
                # not every archive heeds the filter
                studies = {_uid(one, STUDY) for one in found if _uid(one, SERIES) == uid} - {""}
                if not studies:
                    raise PacsError(f"{self.url}: has no series of this UID ({name}); correct --series")
                study = min(studies)
                there = len(self._client.search_for_instances(study, uid))
                count = 0
                for data in self._client.iter_series(study, uid):
                    count += 1
                    yield data
                if count < there:
                    raise PacsError(
                        f"{self.url}: sent {count} of the {there} objects of {name}; nothing was stored, try again"
                    )

    def store(self, made: Sequence[Any]) -> None:
        """Stores objects, all in one request, and asks whether they are there. Raises PacsError if not."""
        with self._asked(
            "was sent the results",
            "; whether they arrived is not known, and the same command once more does no harm",
        ):
            self._client.store_instances(made)
        with self._asked(
            "was asked whether the results are there", "; try again: the same result is stored once"
        ):
            for data in made:
                where = str(data.StudyInstanceUID), str(data.SeriesInstanceUID)
                filters = {"SOPInstanceUID": str(data.SOPInstanceUID)}
                if not self._client.search_for_instances(*where, search_filters=filters):
                    raise PacsError(f"{self.url}: took the results and does not have them; see its log")

    @contextmanager
    def _asked(self, what: str, more: str = "; nothing was stored") -> Iterator[None]:
        """Every way in which a request fails, as a PacsError."""
        self._client  # noqa: B018 (says so where a package is missing)
        requests = importlib.import_module("requests")

        def no_dicomweb(error: Exception) -> PacsError:
            reason = f"its answer is no DICOMweb ({type(error).__name__}); {ADDRESS}"
            return PacsError(f"{self.url}: {what}, {reason}{more}")

        try:
            yield
        except FedAtlasError:
            raise
        except ValueError as error:  # also of JSON, which requests counts among errors of the network
            raise no_dicomweb(error) from None
        except requests.exceptions.HTTPError as error:
            status = error.response.status_code
            reasons = {
                400: f"does not understand the request (400); {ADDRESS}, or see its log",
                401: f"refused the credentials (401); correct {USER} and {PASSWORD}, {TOKEN} or --credentials",
                403: "does not allow it to this user (403); ask who runs it",
                404: f"knows no such address (404); {ADDRESS}",
            }
            if status == 401 and self.credentials == Credentials():
                reasons[401] = (
                    f"wants credentials (401); give {USER} and {PASSWORD}, {TOKEN} or --credentials"
                )
            reason = reasons.get(status, f"answered {status}; see its log")
            raise PacsError(f"{self.url}: {what}, {reason}{more}") from None
        except requests.exceptions.Timeout:
            reason = f"it said nothing for {self.timeout:g} s; see that it runs, or raise --timeout"
            raise PacsError(f"{self.url}: {what}, {reason}{more}") from None
        except requests.exceptions.SSLError:
            reason = "its certificate is not trusted; name that of its authority in REQUESTS_CA_BUNDLE"
            raise PacsError(f"{self.url}: {what}, {reason}{more}") from None
        except (
            requests.exceptions.ConnectionError,
            requests.exceptions.ChunkedEncodingError,
            OSError,
        ) as error:
            broken = "Incomplete" in str(error) or "aborted" in str(error) or "reset" in str(error)
            reason = "the connection broke" if broken else "it could not be reached"
            raise PacsError(f"{self.url}: {what}, {reason}; see that it runs{more}") from None
        except Exception as error:  # of libraries for HTTP, multipart messages and DICOM
            raise no_dicomweb(error) from None


def _uid(answer: Any, tag: str) -> str:
    """A UID in an item of an answer to a search; "" where it is not there. Raises ValueError for an item that is no object
    with tags, as of a service that is no DICOMweb."""
    if not isinstance(answer, Mapping) or not any(re.fullmatch("[0-9A-Fa-f]{8}", key) for key in answer):
        raise ValueError("not an object with tags")
    values = answer.get(tag, {}).get("Value") or [""]
    return str(values[0]).strip()
