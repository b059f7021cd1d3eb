"""A worker process: reads questions from standard input, tells on standard output when they are answered.

    python -m fedatlas.engine.worker module:function '{"argument": …}'

The function, called with the arguments, returns `answer(question)`, which writes the answer into the question's
file. A request is one frame, `Question.to_json`; a reply one frame, {"lost": null or why there is no answer}.
"""

import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable

from fedatlas.engine.allocator import return_freed_blocks
from fedatlas.engine.frames import Question, question_of, read_frame, write_frame


def main(target: str, arguments: str) -> None:
    replies = os.fdopen(os.dup(1), "wb")
    return_freed_blocks()
    os.dup2(2, 1)  # what a library prints must not fall among the frames
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    module, name = target.split(":")
    answer: Callable[[Question], None] = getattr(importlib.import_module(module), name)(
        **json.loads(arguments)
    )
    requests = sys.stdin.buffer
    while (frame := read_frame(requests)) is not None:
        lost = None
        try:
            answer(question_of(frame))
        except OSError as error:
            lost = f"no reply could be written ({error.strerror or type(error).__name__})"
        write_frame(replies, json.dumps({"lost": lost}).encode())


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
