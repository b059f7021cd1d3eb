"""A bare echo on Flower: a message with one array per node through the grid, and one back. Nothing of FedAtlas is
imported; the file is the whole app."""

import os
import time
from multiprocessing.connection import Client
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

server = ServerApp()
client = ClientApp()
POLL = 0.1


@server.main()
def ask(grid: Grid, context: Context) -> None:
    """Sends as many bytes as it is told to, over and over, and tells the seconds until all have answered."""
    with Client(os.environ["FEDATLAS_RELAY"]) as line:
        while True:
            try:
                size, number, sites = line.recv()
            except EOFError:
                return
            line.send(seconds(grid, size, number, sites))


def seconds(grid: Grid, size: int, number: int, sites: int) -> float:
    while len(nodes := list(grid.get_node_ids())) < sites:
        time.sleep(0.5)
    sent = np.random.default_rng(number).integers(0, 256, size, np.uint8)
    began = time.perf_counter()
    record = ArrayRecord({"bytes": Array(sent)})
    messages = [Message(RecordDict({"payload": record}), node, "query", ttl=900.0) for node in nodes]
    waiting = set(grid.push_messages(messages))
    answers: list[Any] = []
    while waiting:
        for reply in grid.pull_messages(list(waiting)):
            waiting.discard(reply.metadata.reply_to_message_id)
            if reply.has_content():
                answers.append(reply.content["payload"]["bytes"].numpy())  # type: ignore[index]
        time.sleep(POLL if waiting else 0.0)
    spent = time.perf_counter() - began
    whole = len(answers) == sites and all(np.array_equal(answer, ~sent) for answer in answers)
    return spent if whole else float("nan")


@client.query()
def echo(message: Message, context: Context) -> Message:
    """Answers with the array's bits turned."""
    got: Any = message.content["payload"]["bytes"]  # type: ignore[index]
    record = ArrayRecord({"bytes": Array(np.invert(got.numpy()))})
    return Message(RecordDict({"payload": record}), reply_to=message)
