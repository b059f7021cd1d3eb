"""What runs inside Flower's processes: the server's job, a site's node, and the server itself with its gate.

    python -m fedatlas.transport.flower.app serve KIT      the server (Flower's SuperLink)
    python -m fedatlas.transport.flower.app attend KIT     a site's node

The node speaks Flower's Fleet API itself instead of starting `flower-supernode`. So a site never runs code that
came over the network (a SuperNode runs whatever app the server sends), a payload crosses one process at the site
and not three, and a message does not wait for a new Python process.

Imported by processes of Flower alone: it needs the package flwr. Imports no torch.
"""

import base64
import contextlib
import datetime
import email.utils
import json
import logging
import os
import queue
import secrets
import shutil
import signal
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedatlas.core.errors import FedAtlasError
from fedatlas.transport import pki
from fedatlas.transport.deployment import RELAY, bound, listens_at
from fedatlas.transport.flower import compat
from fedatlas.transport.flower.compat import ObjectPullError, ObjectPushError, fetched, packed, sent
from fedatlas.transport.flower.engine import SECRET_HEADER, read_json
from fedatlas.transport.frames import Question, TooLarge, question_of
from fedatlas.transport.relay import Ask, JobEnd, Lost, forward, skewed

KIT = "FEDATLAS_KIT"
"""The environment variable in which the server's job finds its kit."""
HEARTBEAT = 15.0
"""Seconds; a node that was not heard for twice as long is taken for gone, and its key taken again."""
ABSENT = 90.0
"""Seconds without a site's node after which the site is lost: time for a process to be started again."""
SKEW = 15.0
"""Seconds that a message outlives its deadline, because clocks differ."""

log = logging.getLogger("fedatlas")


def _log_to(handler: logging.Handler) -> None:
    handler.setFormatter(logging.Formatter("%(asctime)s fedatlas: %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False


# --------------------------------------------------------------------------------------------------- at a hospital


def answer(message: Message, place: Path, relay: Path) -> Message:
    """The reply to one question: the site's own process is asked through the socket that `relay` names.

    place: the folder with the question's files `shared` and perhaps `own`, where the reply's will lie too.
    Whatever fails, the server learns a code and no text of the exception; the site's own log has the text.
    """
    own, reply = place / "own", place / "reply"
    try:
        head: Any = message.content["head"]
        own = own if own.exists() else None
        question = question_of(head["question"], shared=place / "shared", own=own, reply=reply)
        lost = forward(relay, question)
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

client = ClientApp()
"""Flower demands one of every app. It knows no message: the sites run `Node`."""


class _Stop(BaseException):
    """This process was asked to end."""


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
                    reply = answer(message, place, self.relay)
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
    except _Stop:
        return 0
    except _Refused as error:
        log.error("%s", error)
    except httpx.TransportError as error:
        log.error("the server at %s cannot be reached: %s", node.server, error)
    finally:
        shutil.rmtree(node.folder, ignore_errors=True)
    return 1


# --------------------------------------------------------------------------------------------- at the server, the job


def sites_of(nodes: Iterable[Any], keys: Path) -> tuple[dict[str, Any], list[str]]:
    """Maps Flower's nodes to sites by the key that authenticates their requests.

    nodes: Flower's NodeInfo, of which `node_id` and `public_key` (PEM) count and what a node says of itself does
    not. keys: the folder of <site>.pub. Returns the node of each site, and for a person what was refused.
    """

    owners: dict[bytes, list[str]] = {}
    refused = []
    for path in sorted(keys.glob("*.pub")):
        try:
            owners.setdefault(compat.public_key_to_bytes(pki.public_openssh_of(path)), []).append(path.stem)
        except FedAtlasError as error:
            refused.append(str(error))
    refused += [f"one key is registered for {names}: refused" for names in owners.values() if len(names) > 1]
    node_of: dict[str, Any] = {}
    for node in nodes:
        names = owners.get(bytes(node.public_key), [])
        if len(names) == 1 and names[0] not in node_of:
            node_of[names[0]] = node
        elif len(names) == 1:
            refused.append(f"a second node for site {names[0]}: refused")
        elif not names:
            refused.append(f"node {node.node_id} with a key that is no site's: refused")
    return node_of, refused


@dataclass
class _Put:
    """A question on its way. expires: on the clock of time.monotonic."""

    site: str
    nonce: str
    activated: str
    expires: float


@dataclass
class _Open:
    """An ask that is being served."""

    ask: Ask
    end: float
    waiting: dict[str, Question]
    puts: dict[str, _Put] = field(default_factory=dict)


class Post:
    """Messages between the server's job and the nodes, by Flower's Runtime API."""

    def __init__(self, grid: Any) -> None:
        self.grid, self.client = grid, compat.runtime_client(grid)
        self.run, self.node = grid.run.run_id, grid.node
        self.coming: dict[str, str] = {}
        """The message that was asked -> the reply to it that is being fetched."""
        self.found: dict[str, Message | Lost | Exception | None] = {}
        self.came = threading.Event()

    def nodes(self) -> Iterable[Any]:
        """Flower's NodeInfo of every node that is there."""
        return self.grid.get_nodes()

    def put(self, messages: Sequence[Message]) -> list[str]:
        """Sends them; returns their ids, "" for one that Flower did not take."""

        def announce(heads: list[Any], trees: list[Any]) -> Any:
            return self.client.PushMessages(
                compat.runtime.PushAppMessagesRequest(messages_list=heads, message_object_trees=trees)
            )

        return list(sent(messages, announce, compat.pusher(self.client, self.node, self.run)).message_ids)

    def take(
        self,
        names: Iterable[str],
        place: Callable[[str], Path],
        most: Callable[[str], int | None] = lambda message: None,
        end: Callable[[], float] = lambda: 0.0,
    ) -> Iterator[tuple[str, Message | Lost | None]]:
        """The replies that have come whole to the messages with these ids, with the message's id. Each is fetched by a thread
        of its own, so that none waits for a slow one.

        place, most: where a reply's bytes go, and how many they may be, by that id. end: when it is given up, on the clock of time.monotonic.
        None for a reply that broke off; a text, for a person, for one that is malformed or cannot be stored.
        """
        names = list(names)
        pull = compat.make_pull_object_fn_protobuf(self.client.PullObject, self.node, self.run)
        if new := [name for name in names if name not in self.coming]:
            response = self.client.PullMessages(compat.runtime.PullAppMessagesRequest(message_ids=new))
            for head, tree in zip(response.messages_list, response.message_object_trees, strict=True):
                asked = head.metadata.reply_to_message_id
                self.coming[asked] = head.metadata.message_id
                fetch = partial(fetched, tree, pull, {"reply": place(asked)}, most(asked), end)
                threading.Thread(target=self._fetch, args=(asked, place(asked), fetch), daemon=True).start()
        if not self.coming.keys().isdisjoint(names):
            self.came.wait(0.2)
            self.came.clear()
        for asked in [name for name in names if name in self.found]:
            reply, message = self.found.pop(asked), self.coming.pop(asked)
            if isinstance(reply, Exception):
                raise reply
            yield asked, reply
            self.forget(message)

    def _fetch(self, asked: str, path: Path, fetch: Callable[[], Message]) -> None:
        """Fetches the reply to a message, whose bytes go to `path`."""
        found: Message | Lost | Exception | None
        try:
            found = fetch()
        except ObjectPullError as error:
            log.warning("an answer broke off: %s", error)
            found = None
            if path.is_file():  # its place may be given up by now
                path.unlink(missing_ok=True)
        except TooLarge as error:
            log.warning("an answer is refused: %s", error)
            found = str(error)
        except ValueError as error:
            log.warning("an answer is refused: %s", error)
            found = NOT_AN_ANSWER
        except OSError as error:
            log.error("an answer cannot be stored: %s", error)
            found = not_stored(error)
        except Exception as error:  # of the way to Flower's server: raised where the reply is taken
            found = error
        self.found[asked] = found
        self.came.set()

    def forget(self, name: str) -> None:
        """Lets Flower drop what it keeps of a message."""

        self.client.ConfirmMessageReceived(
            compat.messages.ConfirmMessageReceivedRequest(
                node=self.node, run_id=self.run, message_object_id=name
            )
        )


NOT_AN_ANSWER = "its answer is not one to this question"


def not_stored(error: OSError) -> Lost:
    return f"the server could not store its answer ({error.strerror})"


class Desk:
    """The server's job: takes asks from the federation and puts each question to its site's node.

    sites: who may be asked. A question whose node was started again meanwhile is put again.
    """

    def __init__(self, post: Post, keys: Path, sites: Sequence[str], end: JobEnd) -> None:
        self.post, self.keys, self.sites, self.end = post, keys, tuple(sites), end
        self.nodes: dict[str, Any] = {}
        self.seen = dict.fromkeys(self.sites, time.monotonic())
        self.looked = 0.0
        self.complaints: set[str] = set()
        self.stale: dict[str, float] = {}
        """Messages whose answers nobody waits for any more, and when they expire."""

    def run(self) -> None:
        """Until the federation has nothing more to ask, or its process has gone."""
        asks: queue.SimpleQueue[Ask | None] = queue.SimpleQueue()

        def feed() -> None:
            for ask in self.end.asks():
                asks.put(ask)
            asks.put(None)

        threading.Thread(target=feed, daemon=True).start()
        while True:
            self._look()
            try:
                ask = asks.get(timeout=2.0)
            except queue.Empty:
                continue
            if ask is None:
                return
            self._serve(ask, asks)

    def _look(self) -> None:
        """Who is there, at most every 2 s; and lets go of late answers."""
        if time.monotonic() - self.looked < 2.0:
            return
        self.looked = now = time.monotonic()
        nodes, refused = sites_of(self.post.nodes(), self.keys)
        for text in set(refused) - self.complaints:
            log.warning("%s", text)
        self.complaints = set(refused)
        nodes = {site: node for site, node in nodes.items() if site in self.sites}
        if nodes.keys() != self.nodes.keys():
            log.info("sites present: %s", ", ".join(sorted(nodes)) or "none")
            self.end.present(sorted(nodes))
        self.nodes = nodes
        self.seen |= dict.fromkeys(nodes, now)
        if self.stale:
            for message, _ in self.post.take(list(self.stale), lambda message: Path(os.devnull)):
                self.stale[message] = 0.0
        for message in [message for message, expires in self.stale.items() if now > expires]:
            self._drop(message)

    def _drop(self, message: str) -> None:
        self.stale.pop(message, None)
        self.post.forget(message)

    def _serve(self, ask: Ask, asks: "queue.SimpleQueue[Ask | None]") -> None:
        """Until every site has answered or is lost, or the federation asks something else."""
        served = _Open(ask, time.monotonic() + ask.deadline, {q.site: q for q in ask.questions})
        for site in sorted(served.waiting.keys() - set(self.sites)):
            self._lose(served, site, "not a site of this deployment")
        self.looked = 0.0
        pause = 0.1
        try:
            while served.waiting and asks.empty():
                now = time.monotonic()
                if now > served.end:
                    for site in sorted(served.waiting):
                        self._lose(served, site, f"no answer within {ask.deadline:g} s (faults.deadline)")
                    break
                self._look()
                self._put([site for site in served.waiting if self._is_new(served, site)], served)
                for site in sorted(served.waiting):
                    if site not in self.nodes and now - self.seen[site] > ABSENT:
                        self._lose(served, site, f"not connected for {ABSENT:g} s")
                pause = 0.1 if self._collect(served) else min(1.2 * pause, 1.0)
                time.sleep(pause if served.waiting else 0.0)
        finally:
            served.end = 0.0  # what is still on its way is given up
        self.stale |= {message: put.expires for message, put in served.puts.items()}

    def _is_new(self, served: _Open, site: str) -> bool:
        """Whether this site's node, as it was last started, was not yet asked."""
        node = self.nodes.get(site)
        return node is not None and all(
            (put.site, put.activated) != (site, node.last_activated_at) for put in served.puts.values()
        )

    def _put(self, sites: Sequence[str], served: _Open) -> None:
        records: dict[Path, ArrayRecord] = {}  # one for all messages: it travels to the server once
        messages, puts = [], []
        left = max(served.end - time.monotonic(), 1.0) + SKEW
        for site in sites:
            question = served.waiting[site]
            if question.shared not in records:
                records[question.shared] = packed(question.shared, "shared")
            nonce = secrets.token_hex(
                16
            )  # comes back with the reply: nobody but the node that was asked can answer
            content: dict[str, Any] = {
                "head": ConfigRecord({"question": question.head()}),
                "shared": records[question.shared],
            }
            if question.own is not None:
                content["own"] = packed(question.own, "own")
            node = self.nodes[site]
            messages.append(Message(RecordDict(content), node.node_id, "query", ttl=left, group_id=nonce))
            puts.append(_Put(site, nonce, node.last_activated_at, time.monotonic() + left))
        if messages:
            served.puts |= {
                name: put for name, put in zip(self.post.put(messages), puts, strict=True) if name
            }

    def _collect(self, served: _Open) -> bool:
        """Takes the answers that have come. Returns whether there was one."""
        questions = {question.site: question for question in served.ask.questions}

        def place(message: str) -> Path:
            reply = questions[served.puts[message].site].reply
            return reply.with_name(f".{reply.name}.{message[:16]}")

        def most(message: str) -> int | None:
            return questions[served.puts[message].site].most

        heard = False
        for message, reply in self.post.take(list(served.puts), place, most, lambda: served.end):
            heard = True
            part, put = place(message), served.puts.pop(message)
            if put.site in served.waiting:
                self._judge(served, put, message, reply, part)
            part.unlink(missing_ok=True)
        return heard

    def _judge(
        self, served: _Open, put: _Put, message: str, reply: Message | Lost | None, part: Path
    ) -> None:
        """One reply of a site that is waited for; its bytes lie in `part`."""
        if isinstance(reply, str):
            self._lose(served, put.site, reply)
            return
        if reply is None or (reply.has_error() and reply.error.code in _GONE):
            log.warning("site %s: its node has gone", put.site)
            self.nodes.pop(put.site, None)  # until it is seen again; it is then asked again
            self.looked = 0.0
            self._drop(message)
            return
        if reply.has_error():
            self._lose(served, put.site, f"the site's client failed (Flower's code {reply.error.code})")
            return
        try:
            if reply.metadata.group_id != put.nonce:
                raise ValueError("it answers another question")
            if "head" in reply.content:
                head: Any = reply.content["head"]
                self._lose(served, put.site, "".join(c for c in str(head["lost"])[:200] if c.isprintable()))
                return
            if "reply" not in reply.content or not part.exists():
                raise ValueError("it holds no bytes of an answer")
            os.replace(part, served.waiting[put.site].reply)
        except (KeyError, TypeError, ValueError) as error:
            log.warning("site %s: its answer is refused: %s", put.site, error)
            self._lose(served, put.site, NOT_AN_ANSWER)
        except OSError as error:
            self._lose(served, put.site, not_stored(error))
        else:
            del served.waiting[put.site]
            self.end.answered(served.ask, put.site)

    def _lose(self, served: _Open, site: str, reason: str) -> None:
        log.warning("site %s is lost: %s", site, reason)
        del served.waiting[site]
        self.end.lost(served.ask, site, reason)


_GONE = frozenset({3, 4, 5})
"""Flower's codes for a message, an answer or a node that is no longer there: the question is put again."""

server = ServerApp()


@server.main()
def _main(grid: Grid, context: Context) -> None:
    from logging.handlers import RotatingFileHandler

    engine = Path(os.environ[KIT]) / "engine"
    _log_to(RotatingFileHandler(engine / "job.log", maxBytes=1_000_000, backupCount=1, encoding="utf-8"))
    path = engine / "jobs" / f"{int(str(context.run_config['job']), 16):016x}.json"
    about = json.loads(path.read_text(encoding="utf-8"))
    path.unlink()
    end = JobEnd(Path(about["relay"]))
    try:
        Desk(Post(grid), engine / "sites", about["sites"], end).run()
    except Exception as error:
        log.error("the job fails: %s: %s", type(error).__name__, error)
        raise
    finally:
        end.close()


# ---------------------------------------------------------------------------------------------- at the server, itself


class Gate:
    """Stands before Flower's web application: the Fleet API alone for everyone, the rest for the admin port.

    admin: the admin port. secret: what a request to the Control API must carry. Requests to Flower's Runtime API
    are authenticated by Flower (a shared secret, then a token for each task).
    """

    def __init__(self, app: Any, admin: int, secret: str) -> None:
        self.app, self.admin, self.secret = app, admin, secret.encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # Flower has no web sockets
            return
        who = f"{scope['client'][0] if scope['client'] else '?'}: {scope['method']} {scope['path'][:100]!r}"

        async def tell(event: Any) -> None:
            if event["type"] == "http.response.start" and event["status"] in (401, 403, 404, 412):
                log.warning("refused (HTTP %d) %s", event["status"], who)
            await send(event)

        if self._allows(scope):
            await self.app(scope, receive, tell)
            return
        await tell({"type": "http.response.start", "status": 403, "headers": [(b"content-length", b"0")]})
        await tell({"type": "http.response.body", "body": b""})

    def _allows(self, scope: Mapping[str, Any]) -> bool:
        path = scope["path"]
        if scope["server"][1] != self.admin:
            return path.startswith("/v1/fleet/")
        if path.startswith("/v1/control/"):
            given = dict(scope["headers"]).get(SECRET_HEADER.encode(), b"")
            return secrets.compare_digest(given, self.secret)
        return path.startswith("/v1/runtime/")


class Register:
    """Keeps the keys that Flower knows equal to the files in a folder of <site>.pub."""

    def __init__(self, state: Any, keys: Path) -> None:
        self.state, self.keys = state, keys
        self.known: dict[str, bytes] = {}
        self.complaints: set[str] = set()

    def follow(self) -> None:
        """Reads the folder once. A damaged file takes its site out, and is logged."""

        registered: dict[str, bytes] = {}
        for path in sorted(self.keys.glob("*.pub")):
            try:
                registered[path.stem] = compat.public_key_to_bytes(pki.public_openssh_of(path))
            except FedAtlasError as error:
                if str(error) not in self.complaints:
                    log.error("%s", error)
                    self.complaints.add(str(error))
        for site in [site for site, key in self.known.items() if registered.get(site) != key]:
            node = self.state.get_node_id_by_public_key(self.known.pop(site))
            if node is not None:
                self.state.delete_node(compat.NOOP_FLWR_AID, node)
            log.info("the key of site %s is no longer registered", site)
        for site, key in registered.items():
            if site not in self.known:
                self.known[site] = key
                try:
                    self.state.create_node(compat.NOOP_FLWR_AID, compat.NOOP_ACCOUNT_NAME, key, 0)
                    log.info("the key of site %s is registered", site)
                except ValueError:
                    log.error(
                        "the key of site %s was taken out before: start the server again, or renew it", site
                    )

    def watch(self) -> None:
        while True:
            time.sleep(2.0)
            try:
                self.follow()
            except OSError as error:
                log.error("the keys of the sites cannot be read: %s", error)


class _ToldTls(ssl.SSLObject):
    """One end of a TLS connection; what is no TLS, or TLS that fails, is logged."""

    def do_handshake(self) -> None:
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError as error:
            log.warning(
                "refused a connection: no TLS, or not with this server's certificate (%s)", error.reason
            )
            raise


class Kept:
    """A process that is started again when it ends by itself: without Flower's executor no job would ever start."""

    PAUSE = 1.0

    def __init__(self, command: Sequence[str]) -> None:
        self.command = list(command)
        self.over = threading.Event()
        self.process = subprocess.Popen(self.command)
        self.keeper = threading.Thread(target=self._keep, daemon=True)
        self.keeper.start()

    def _keep(self) -> None:
        while not self.over.wait(self.PAUSE):
            code = self.process.poll()
            if code is not None:
                log.warning("%s ended (%d); it is started again", self.command[0], code)
                self.process = subprocess.Popen(self.command)

    def end(self) -> None:
        self.over.set()
        self.keeper.join()
        self.process.terminate()
        self.process.wait()


def serve(kit: Path) -> int:
    """The server's process. Returns its exit status; raises FedAtlasError where a port is taken."""
    import uvicorn

    engine = kit / "engine"
    about = read_json(engine / "server.json")
    admin = int(about["admin_port"])
    secret = secrets.token_hex(32)
    pki.write(engine / "admin.secret", secret.encode(), secret=True)
    pki.write(engine / "executor.secret", secrets.token_hex(32).encode(), secret=True)
    os.environ[KIT] = str(kit)
    sockets = [bound("127.0.0.1", admin), bound(listens_at(about["host"]), int(about["port"]))]

    def run(app: Any, host: str, port: int, **settings: Any) -> None:
        register = Register(app.state.linkstate_factory.state(), engine / "sites")
        register.follow()
        threading.Thread(target=register.watch, daemon=True).start()
        settings |= {"access_log": False, "timeout_graceful_shutdown": 1}
        settings = {name: value for name, value in settings.items() if name not in ("reload", "workers")}
        command = ["flower-superexec", "--root-certificates", str(engine / "ca.crt")]
        command += ["--runtime-api-address", f"127.0.0.1:{admin}", "--parent-pid", str(os.getpid())]
        command += ["--superexec-auth-secret-file", str(engine / "executor.secret")]
        executor = Kept(command)
        config = uvicorn.Config(Gate(app, admin, secret), **settings)
        config.load()
        assert config.ssl is not None
        config.ssl.sslobject_class = _ToldTls
        try:
            uvicorn.Server(config).run(sockets=sockets)
        finally:
            executor.end()

    arguments = ["--host", "127.0.0.1", "--port", str(admin), "--enable-supernode-auth"]
    arguments += ["--ssl-certfile", str(engine / "server.crt"), "--ssl-keyfile", str(engine / "server.key")]
    arguments += ["--ssl-ca-certfile", str(engine / "ca.crt"), "--disable-runtime-dependency-installation"]
    arguments += ["--isolation", "process", "--superexec-auth-secret-file", str(engine / "executor.secret")]
    compat.superlink(arguments, run)
    return 0


def main() -> int:
    _log_to(logging.StreamHandler())

    def stop(number: int, frame: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise _Stop

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    role, kit = sys.argv[1], Path(sys.argv[2])
    try:
        return serve(kit) if role == "serve" else attend(kit)
    except _Stop:
        return 0
    except FedAtlasError as error:
        log.error("%s", error)
        return 1


if __name__ == "__main__":
    sys.exit(main())
