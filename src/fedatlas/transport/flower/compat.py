"""Everything of Flower that is not its public interface: a new version of Flower is a matter of this module alone.

Its messages, clients and headers, which it keeps to itself, are taken from where they are now; what has to reach into an
object of Flower's is a function here. Needs the package flwr, and imports no torch.
"""

import hashlib
import json
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
from flwr.app import Array, ArrayRecord, Message
from flwr.app.message import remove_content_from_message
from flwr.app.message.arraychunk import ArrayChunk
from flwr.common.constant import (
    FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE,
    NOOP_ACCOUNT_NAME,
    NOOP_FLWR_AID,
    TIMESTAMP_HEADER,
)
from flwr.common.serde import fab_to_proto, message_from_proto, message_to_proto, user_config_to_proto
from flwr.proto import control_pb2, fleet_pb2, heartbeat_pb2, message_pb2, node_pb2, runtime_pb2
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_head_values_from_object_content,
    get_object_id,
    get_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_confirm_message_received_fn_protobuf,
    make_pull_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectPullError,
    ObjectPushError,
    ObjectUnavailableError,
    inflate_object_from_contents,
)
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message
from flwr.supernode.fleet_http_client import FleetHttpClient

from fedatlas.transport.frames import TooLarge

__all__ = [
    "FLEET_HTTP_PUBLIC_KEY_HEADER",
    "FLEET_HTTP_SIGNATURE_HEADER",
    "NOOP_ACCOUNT_NAME",
    "NOOP_FLWR_AID",
    "TIMESTAMP_HEADER",
    "ControlHttpClient",
    "FleetHttpClient",
    "ObjectPullError",
    "ObjectPushError",
    "RuntimeVersionHttpInterceptor",
    "make_confirm_message_received_fn_protobuf",
    "make_pull_object_fn_protobuf",
    "message_from_proto",
    "public_key_to_bytes",
    "sign_message",
]

control: Any = control_pb2
fleet: Any = fleet_pb2
heartbeat: Any = heartbeat_pb2
messages: Any = message_pb2
nodes: Any = node_pb2
runtime: Any = runtime_pb2
"""Flower's messages to its servers, whose classes exist at run time only."""


def runtime_client(grid: Any) -> Any:
    """The client of the Runtime API behind a ServerApp's grid."""
    return grid._runtime_client


def pusher(client: Any, node: Any, run: int) -> Callable[[str, bytes, str], bool]:
    """The `push` of `sent`, through a client of the Fleet or Runtime API, from a node and of a run."""

    def push(name: str, content: bytes, session: str) -> bool:
        request = messages.PushObjectRequest(
            node=node, run_id=run, object_id=name, object_content=content, session_id=session
        )
        return client.PushObject(request).stored

    return push


def start_request(name: str, publisher: str, module: str, code: bytes, config: Mapping[str, str]) -> Any:
    """The request that starts a job.

    name, publisher: of its app, whose one module defines `server` and `client`. config: settings of the job, by key.
    """
    from flwr.cli.build import build_fab_from_files

    keys = "".join(f'{key} = ""\n' for key in config)
    project = f"""[project]
name = "{name}"
version = "1.0.0"
license = "Apache-2.0"
dependencies = []
[tool.flwr.app]
publisher = "{publisher}"
[tool.flwr.app.components]
serverapp = "{module}:server"
clientapp = "{module}:client"
{"[tool.flwr.app.config]" if config else ""}
{keys}"""
    content, _ = build_fab_from_files({"pyproject.toml": project.encode(), f"{module}.py": code})
    fab = fab_to_proto(Fab(hashlib.sha256(content).hexdigest(), content, {}))
    return control.StartRunRequest(fab=fab, override_config=user_config_to_proto(dict(config)))


def superlink(arguments: Sequence[str], run: Callable[..., None]) -> None:
    """Runs Flower's SuperLink with these arguments of its command line, until it ends.

    run: called as `uvicorn.run`, in the place of it, with the web application that Flower made.
    """
    module: Any = import_module("flwr.superlink.cli.flower_superlink")
    module.uvicorn = SimpleNamespace(run=run)  # the one place where Flower starts its web server
    sys.argv = ["flower-superlink", *arguments]
    module.flower_superlink()


# ------------------------------------------------------------------------------- files as Flower's objects, and back
#
# Flower holds a message as a tree of objects: the message, its records, their arrays, and an array's bytes in
# chunks of 5 MB. Its own functions build the whole tree in memory, several times over. These here move one chunk
# at a time between a file and the network.


class _Chunk(ArrayChunk):
    """Some bytes of a file, as Flower's ArrayChunk: read when they are sent."""

    def __init__(self, path: Path, start: int, length: int) -> None:
        self.path, self.start, self.length = path, start, length
        self.number = get_object_id(self.deflate())

    def deflate(self) -> bytes:
        with self.path.open("rb") as file:
            file.seek(self.start)
            data = file.read(self.length)
        return ArrayChunk(memoryview(data)).deflate()

    @property
    def object_id(self) -> str:
        return self.number


def packed(path: Path, name: str) -> ArrayRecord:
    """A record with one array: the bytes of the file, which must stay as they are until they were sent."""
    size = path.stat().st_size
    starts = range(0, size, FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE)
    chunks = [_Chunk(path, at, min(FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE, size - at)) for at in starts]
    array = Array("uint8", (size,), f"fedatlas.{name}", b"")
    # where Flower keeps an array's chunks, once it has cut them from the array's data
    array.__dict__["_chunks"] = [(chunk.object_id, chunk) for chunk in chunks]
    record = ArrayRecord()
    record["bytes"] = array  # its constructor would copy the array, without the chunks
    return record


def _ahead(call: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
    """What `call` returns for each item, in order; two at a time and no more."""
    with ThreadPoolExecutor(2) as pool:
        flying: deque[Any] = deque()
        for item in items:
            flying.append(pool.submit(call, item))
            if len(flying) == 2:
                yield flying.popleft().result()
        while flying:
            yield flying.popleft().result()


def sent(messages: Sequence[Message], announce: Callable[[list[Any], list[Any]], Any], push: Any) -> Any:
    """Announces the messages, then sends their objects that the server lacks. Returns the last announcement.

    announce: of Flower's messages and trees, returns a response with `objects_to_push` and `session_id`. push: of
    an object's id, its content and the session, returns whether it was stored. Raises ObjectPushError where
    the server takes them no longer.
    """
    with no_object_id_recompute():
        for message in messages:
            message.metadata.__dict__["_message_id"] = message.object_id
        trees = [get_object_tree(message) for message in messages]
        heads = [message_to_proto(remove_content_from_message(message)) for message in messages]
        objects: dict[str, Any] = {}
        for message in messages:
            objects |= get_all_nested_objects(message)
    response: Any = None

    def send(name: str) -> bool:
        return push(name, objects[name].deflate(), response.session_id)

    for _ in range(3):  # again where an answer was lost on the way, or the session has ended
        response = announce(heads, trees)
        lacking = set(response.objects_to_push)
        if all(list(_ahead(send, [name for name in objects if name in lacking]))):
            return response
    raise ObjectPushError(heads[0].metadata.message_id, heads[0].metadata.run_id, response.session_id)


def fetched(
    tree: Any,
    pull: Callable[[str], bytes],
    places: Mapping[str, Path],
    most: int | None = None,
    end: Callable[[], float] = lambda: math.inf,
) -> Message:
    """A message whose arrays went into files on the way: `places` has a file for each name of `packed`, of `most` bytes and
    no more.

    Raises TooLarge where one has more, ValueError for a message that is malformed or truncated, or has an array with another name, and
    ObjectPullError where an object does not come within ten minutes, or before `end`, on the clock of time.monotonic.
    """
    contents: dict[str, bytes] = {}
    nothing = ArrayChunk(memoryview(b"")).deflate()

    def patiently(name: str) -> bytes:
        late, pause = time.monotonic() + 600.0, 0.05
        while True:
            if time.monotonic() > end():
                raise ObjectPullError(name, "the time for it is over")
            try:
                return pull(name)
            except ObjectUnavailableError:  # the sender is still at it
                if time.monotonic() > late:
                    raise ObjectPullError(name, "it did not come within ten minutes") from None
            time.sleep(pause)
            pause = min(1.5 * pause, 1.0)

    def visit(node: Any) -> None:
        content = contents[node.object_id] = patiently(node.object_id)
        kind, children, _ = get_object_head_values_from_object_content(content)
        if kind != Array.__qualname__:
            for child in node.children:
                visit(child)
            return
        about = json.loads(content[content.index(b"\0") + 1 :])
        place = places.get(str(about["stype"]).removeprefix("fedatlas."))
        if place is None:
            raise ValueError("an array that is not of this protocol")
        length = about["shape"][0]
        if type(length) is not int or length < 0:
            raise ValueError("an array without a length")
        if most is not None and length > most:
            raise TooLarge(most)
        with place.open("wb") as file:
            size = 0
            for chunk in _ahead(patiently, [children[number] for number in about["arraychunk_ids"]]):
                piece = memoryview(chunk)[chunk.index(b"\0") + 1 :]
                size += len(piece)
                if size > length:
                    break
                file.write(piece)
        if size != length:
            raise ValueError(f"{size} bytes of {length} have come")
        contents.update(dict.fromkeys(children, nothing))

    try:
        visit(tree)
        message = inflate_object_from_contents(tree.object_id, contents)
    except (ObjectPullError, ValueError, OSError, httpx.HTTPError):  # TooLarge is a ValueError
        raise
    except Exception as error:  # Flower reads by protobuf and more, each with errors of its own
        raise ValueError(f"a malformed message ({type(error).__name__})") from None
    if not isinstance(message, Message):
        raise ValueError("not a message")
    message.metadata.__dict__["_message_id"] = tree.object_id
    return message
