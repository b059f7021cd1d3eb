"""A worker process: reads requests from standard input, tells on standard output when they are answered.

    python -m fedatlas.transport.worker

A request is one frame. {"open": "module:function", "arguments": {…}, "log": file}: the function, called with the
arguments, returns `answer(question)`, which writes the answer into the question's file; what the process prints from
then on goes to the end of the log. A `Question.to_json` is answered by what was opened last; the reply is one frame,
{"lost": null or why there is no answer}.
"""

import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable

from fedatlas.transport.allocator import return_freed_blocks
from fedatlas.transport.frames import Question, question_of, read_frame, write_frame


def main() -> None:
    replies = os.fdopen(os.dup(1), "wb")
    return_freed_blocks()
    os.dup2(2, 1)  # what a library prints must not fall among the frames
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    answer: Callable[[Question], None] | None = None
    requests = sys.stdin.buffer
    while (frame := read_frame(requests)) is not None:
        request = json.loads(bytes(frame))
        if "open" in request:
            answer = None  # what was opened before goes first
            _print_into(request["log"])
            module, name = request["open"].split(":")
            answer = getattr(importlib.import_module(module), name)(**request["arguments"])
            continue
        assert answer, "opened before it is asked"
        lost = None
        try:
            answer(question_of(frame))
        except OSError as error:
            lost = f"no reply could be written ({error.strerror or type(error).__name__})"
        write_frame(replies, json.dumps({"lost": lost}).encode())


def _print_into(log: str) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    with open(log, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


if __name__ == "__main__":
    main()
