"""A site's node: it asks the server for questions, and brings it the answers of the site's own process.

It speaks Flower's Fleet API itself instead of starting `flower-supernode`. So a site never runs code that
came over the network (a SuperNode runs whatever app the server sends), a payload crosses one process at the site
and not three, and a message does not wait for a new Python process.

Imported by the process of a node alone: it needs the package flwr. Imports no torch.
"""

import base64
import contextlib
import datetime
import email.utils
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Message, RecordDict

from fedatlas.core.errors import FedAtlasError
from fedatlas.transport import pki
from fedatlas.transport.deployment import RELAY
from fedatlas.transport.flower import compat
from fedatlas.transport.flower.compat import ObjectPullError, ObjectPushError, fetched, packed, sent
from fedatlas.transport.flower.engine import SKEW, read_json
from fedatlas.transport.frames import question_of
from fedatlas.transport.relay import Lost, forward, skewed

HEARTBEAT = 15.0
"""Seconds; a node that was not heard for twice as long is taken for gone, and its key taken again."""

log = logging.getLogger("fedatlas")


def answer(message: Message, place: Path, relay: Path, seconds: float | None = None) -> Message:
    """The reply to one question: the site's own process is asked through the socket that `relay` names.

    place: the folder with the question's files `shared` and perhaps `own`, where the reply's will lie too. seconds: as of
    `relay.forward`.
    Whatever fails, the server learns a code and no text of the exception; the site's own log has the text.
    """
    own, reply = place / "own", place / "reply"
    try:
        head: Any = message.content["head"]
        own = own if own.exists() else None
        question = question_of(head["question"], shared=place / "shared", own=own, reply=reply)
        lost = forward(relay, question, seconds=seconds)
        content: dict[str, Any] = {"reply": packed(reply, "reply")} if lost is None else {}
    except Exception:
        log.exception("a question could not be answered")
        return refusal(message, FAILED)
    return refusal(message, lost) if lost else reply_to(message, content)


def refusal(message: Message, lost: Lost) -> Message:
    """The reply of a site that has no answer."""
    return reply_to(message, {"head": ConfigRecord({"lost": lost})})


def reply_to(message: Message, content: dict[str, Any]) -> Message:
    """A reply that carries the times of the question, which the server's clock has given: by a clock that goes wrong
    it would have expired."""
    made = Message(RecordDict(content), reply_to=message)  # type: ignore[arg-type]
    made.metadata.created_at, made.metadata.ttl = message.metadata.created_at, message.metadata.ttl
    return made


FAILED = "the site's client failed (its log says why)"


class _Refused(Exception):
    """The server does not take this site's key."""


class _Patient:
    """Repeats a request that the network lost, for `seconds`; in place of Flower's retry, which ends the process."""

    seconds = 300.0

    def invoke(self, call: Callable[[], Any]) -> Any:
        import httpx

        end, pause, warned = time.monotonic() + self.seconds, 0.5, False
        while True:
            try:
                return call()
            except httpx.HTTPStatusError as error:
                if error.response.status_code not in (502, 503, 504) or time.monotonic() > end:
                    raise
            except httpx.TransportError as error:
                if "CERTIFICATE_VERIFY_FAILED" in str(error) or time.monotonic() > end:
                    raise
                if not warned:
                    log.warning("the server cannot be reached (%s); asking on", error)
                    warned = True
            time.sleep(pause)
            pause = min(2 * pause, 5.0)


class Signed:
    """Signs every request of a node with its key and the time, as Flower's `NodeAuthHttpInterceptor` does; the time is
    the server's, which every response tells, so that a clock that goes wrong at a site shuts nobody out."""

    APART = 30.0
    """Seconds by which clocks may differ without a word."""

    def __init__(self, key: Any) -> None:
        self.key, self.public = key, compat.public_key_to_bytes(key.public_key())
        self.ahead = 0.0
        """Seconds by which the server's clock is ahead of this machine's."""

    def intercept(self, context: Any, call_next: Callable[[Any], Any]) -> Any:
        time = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=self.ahead)
        text = time.isoformat()
        signature = compat.sign_message(self.key, text.encode("ascii"))
        headers = context.request.headers
        headers[compat.FLEET_HTTP_PUBLIC_KEY_HEADER] = base64.b64encode(self.public).decode("ascii")
        headers[compat.TIMESTAMP_HEADER] = text
        headers[compat.FLEET_HTTP_SIGNATURE_HEADER] = base64.b64encode(signature).decode("ascii")
        response = call_next(context)
        self.see(response.headers.get("date"))
        return response

    def see(self, date: str | None) -> None:
        """Takes the server's time from a response; what cannot be read is not taken."""
        with contextlib.suppress(TypeError, ValueError):
            there = email.utils.parsedate_to_datetime(str(date))
            ahead = (there - datetime.datetime.now(datetime.UTC)).total_seconds()
            if abs(ahead - self.ahead) > self.APART:
                self.ahead = 0.0 if abs(ahead) <= self.APART else ahead
                log.warning("%s", skewed("this machine's clock", -self.ahead))


class Node:
    """A site's node: one per process. Raises FedAtlasError for a kit that is not usable."""

    def __init__(self, kit: Path, relay: Path) -> None:
        engine = kit / "engine"
        about, key = read_json(engine / "site.json"), pki.private_openssh_of(engine / "site.key")
        self.site, self.server = about["site"], about["server"]
        self.relay, self.public = relay, compat.public_key_to_bytes(key.public_key())
        self.patient = _Patient()
        self.folder = engine / "tmp"
        shutil.rmtree(self.folder, ignore_errors=True)  # of a process that was killed
        self.folder.mkdir(mode=0o700)
        self.client = compat.FleetHttpClient.from_server_address(
            self.server,
            False,
            (engine / "ca.crt").read_bytes(),
            [
                compat.RuntimeVersionHttpInterceptor(component_name="SuperNode"),
                Signed(key),
            ],
            retry_invoker=self.patient,  # type: ignore[arg-type]
        )
        self.node: Any = None
        self.resting = threading.Event()

    def attend(self) -> None:
        """Answers questions until the process is asked to end. Raises _Refused where the server takes no key."""
        import httpx

        while True:
            self._activate()
            try:
                self._answer_all()
            except httpx.HTTPStatusError as error:
                if error.response.status_code != httpx.codes.UNAUTHORIZED:
                    raise
                log.warning(
                    "the server no longer knows this node: it was restarted, or the key was taken out"
                )
            finally:
                self._rest()

    def _activate(self) -> None:
        import httpx

        request = compat.fleet.ActivateNodeRequest(public_key=self.public, heartbeat_interval=HEARTBEAT)
        end, warned = time.monotonic() + 90.0, False
        while True:
            try:
                self.node = compat.nodes.Node(node_id=self.client.ActivateNode(request).node_id)
                break
            except httpx.HTTPStatusError as error:
                code = error.response.status_code
                text = f"the server at {self.server} refuses the key of site {self.site} (HTTP {code})"
                if time.monotonic() > end:
                    raise _Refused(
                        f"{text}: it is not registered there, or another process uses it"
                    ) from None
                if not warned:
                    log.warning(
                        "%s: not registered, or still in use by a process that crashed; asking on", text
                    )
                    warned = True
            time.sleep(3.0)
        self.resting.clear()
        threading.Thread(target=self._beat, args=(self.node,), daemon=True).start()
        log.info("site %s attends the server at %s", self.site, self.server)

    def _beat(self, node: Any) -> None:
        """Keeps this node present while it works on an answer."""
        import httpx

        while not self.resting.wait(HEARTBEAT / 3):
            with contextlib.suppress(httpx.HTTPError):  # the main thread's next request meets the same
                self.client.SendNodeHeartbeat(
                    compat.heartbeat.SendNodeHeartbeatRequest(node=node, heartbeat_interval=HEARTBEAT)
                )

    def _rest(self) -> None:
        """Tells the server, so that this site's next process is taken at once."""

        self.resting.set()
        self.patient.seconds = 0.0
        with contextlib.suppress(Exception):
            self.client.DeactivateNode(compat.fleet.DeactivateNodeRequest(node_id=self.node.node_id))
        self.patient.seconds = _Patient.seconds

    def _answer_all(self) -> None:
        pause = 0.1
        while True:
            response = self.client.PullMessages(compat.fleet.PullMessagesRequest(node=self.node))
            if response.messages_list:
                self._answer(response.messages_list[0], response.message_object_trees[0])
                pause = 0.1
            else:
                time.sleep(pause)
                pause = min(1.3 * pause, 1.0)

    def _answer(self, head: Any, tree: Any) -> None:
        """One message, from its first object to the last of its reply."""
        import httpx

        client, node, run = self.client, self.node, head.metadata.run_id
        pull = compat.make_pull_object_fn_protobuf(client.PullObject, node, run)
        confirm = compat.make_confirm_message_received_fn_protobuf(client.ConfirmMessageReceived, node, run)
        spent = 0.0
        end = time.monotonic() + head.metadata.ttl - SKEW

        def announce(heads: list[Any], trees: list[Any]) -> Any:
            request = compat.fleet.PushMessagesRequest(
                node=node, messages_list=heads, message_object_trees=trees
            )
            request.clientapp_runtime_list.append(spent)
            return client.PushMessages(request)

        try:
            with contextlib.ExitStack() as stack:
                try:
                    place = Path(
                        stack.enter_context(tempfile.TemporaryDirectory(prefix="ask-", dir=self.folder))
                    )
                    message = fetched(tree, pull, {"shared": place / "shared", "own": place / "own"})
                    confirm(tree.object_id)
                    start = time.monotonic()
                    reply = answer(message, place, self.relay, end - start)
                    spent = time.monotonic() - start
                except (ValueError, OSError):
                    log.exception("a question could not be taken in")
                    confirm(tree.object_id)
                    reply = refusal(compat.message_from_proto(head), FAILED)
                sent([reply], announce, compat.pusher(client, node, run))
        except httpx.HTTPStatusError as error:
            if error.response.status_code == httpx.codes.UNAUTHORIZED:
                raise
            log.info("a question or its answer is no longer wanted (HTTP %d)", error.response.status_code)
        except (ObjectPullError, ObjectPushError, httpx.TransportError, OSError) as error:
            log.warning("a question or its answer was lost on the way: %s", error)


def attend(kit: Path) -> int:
    """A site's process. Returns its exit status."""
    if RELAY not in os.environ:
        raise FedAtlasError(f"the environment variable {RELAY} does not name the site's socket: use start.sh")
    import httpx

    node = Node(kit, Path(os.environ[RELAY]))
    try:
        node.attend()
    except _Refused as error:
        log.error("%s", error)
    except httpx.TransportError as error:
        log.error("the server at %s cannot be reached: %s", node.server, error)
    finally:
        shutil.rmtree(node.folder, ignore_errors=True)
    return 1
