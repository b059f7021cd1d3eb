"""The server's job, the app that Flower's SuperLink starts: it takes asks from the federation and puts each question to its site's node.

Imported by processes of Flower alone: it needs the package flwr. Imports no torch.
"""

import json
import logging
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedatlas.core.errors import FedAtlasError
from fedatlas.transport import pki
from fedatlas.transport.flower import compat
from fedatlas.transport.flower.compat import ObjectPullError, fetched, packed, sent
from fedatlas.transport.flower.engine import KIT, SKEW, log_to
from fedatlas.transport.frames import Question, TooLarge
from fedatlas.transport.relay import NOT_AN_ANSWER, Ask, JobEnd, Lost, not_stored, said_by_site

ABSENT = 90.0
"""Seconds without a site's node after which the site is lost: time for a process to be started again."""

log = logging.getLogger("fedatlas")


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
                self._lose(served, put.site, said_by_site(str(head["lost"])))
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

client = ClientApp()
"""Flower demands one of every app. It knows no message: the sites run `node.Node`."""

server = ServerApp()


@server.main()
def _main(grid: Grid, context: Context) -> None:
    from logging.handlers import RotatingFileHandler

    engine = Path(os.environ[KIT]) / "engine"
    log_to(RotatingFileHandler(engine / "job.log", maxBytes=1_000_000, backupCount=1, encoding="utf-8"))
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
