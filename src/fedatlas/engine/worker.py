"""A worker process of the local engine: reads calls from standard input, answers on standard output.

    python -m fedatlas.engine.worker module:function '{"argument": …}'

The function, called with the arguments, returns `host(site) -> Host`. A frame is 8 bytes of length and a wire
message; a request is three frames (what to run, shared payload, own payload or nothing), a reply one.
"""

import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import BinaryIO

from fedatlas.engine import wire
from fedatlas.engine.host import Host
from fedatlas.engine.wire import Data


def write_frame(stream: BinaryIO, data: Data) -> None:
    stream.write(len(data).to_bytes(8, "little"))
    stream.write(data)
    stream.flush()


def read_frame(stream: BinaryIO) -> bytearray | None:
    """The next frame; None where the stream has ended, also in the middle of one."""
    head = stream.read(8)
    if len(head) < 8:
        return None
    length = int.from_bytes(head, "little")
    data = bytearray(length)
    view, filled = memoryview(data), 0
    while filled < length:
        got = stream.readinto(view[filled:])  # type: ignore[attr-defined]
        if not got:
            return None
        filled += got
    return data


def main(target: str, arguments: str) -> None:
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not fall among the frames
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    module, name = target.split(":")
    make_host: Callable[[str], Host] = getattr(importlib.import_module(module), name)(**json.loads(arguments))
    requests = sys.stdin.buffer
    while (head := read_frame(requests)) is not None:
        shared, own = read_frame(requests), read_frame(requests)
        what = wire.decode(head)
        if shared is None or own is None or not isinstance(what, dict):
            return
        site, function, round, call = (what[key] for key in ("site", "function", "round", "call"))
        reply = make_host(str(site)).handle(str(function), int(round), int(call), shared, own or None)  # type: ignore[arg-type]
        write_frame(replies, reply)


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
