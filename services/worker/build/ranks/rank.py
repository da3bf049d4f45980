"""The process of a rank: `python -m services.worker.build.ranks.rank DESCRIPTOR RANK`, started by its worker.

It loads its part of the model and computes what rank 0 orders through the descriptor's socket. Knows no job.
"""

import contextlib
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable

import torch

from services.worker.build.ranks.grid import Orders, load_rank, open_own
from services.worker.errors import CheckpointError
from services.worker.parallel import placement
from services.worker.parallel.channel import Channel, ChannelClosed, Kind
from services.worker.runners.ranks import serve

Receive = Callable[[], tuple[Kind, bytes]]


def compute(channel: Channel, receive: Receive) -> None:
    """Load what the first message asks for, then serve steps until the channel ends."""
    _, content = receive()
    orders = Orders.read(content)
    placement.pin(set(orders.cores))
    if orders.options["engine"] == "gpu":
        torch.cuda.set_device(orders.rank)
    source, draft, options = open_own(orders)
    try:
        rank, _ = load_rank(source, draft, options, orders, lambda *_: None)
    except CheckpointError as error:
        with contextlib.suppress(ChannelClosed):  # Rank 0 may have refused it already.
            channel.send(Kind.REFUSED, str(error).encode())
            receive()  # Connected until rank 0 ends the channel: others may still be connecting.
        return
    channel.send(Kind.READY, str(rank.nbytes).encode())
    with torch.inference_mode():
        serve(rank, receive, channel)


def main() -> None:
    """Serve until rank 0 ends the channel or dies; then end at once, also inside a step that waits for others."""
    descriptor, number = map(int, sys.argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The worker decides when its ranks end.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=descriptor))
    arrived: queue.SimpleQueue[tuple[Kind, bytes]] = queue.SimpleQueue()

    def read() -> None:
        try:
            while True:
                arrived.put(channel.receive())
        except ChannelClosed:
            os._exit(0)

    threading.Thread(target=read, name="orders", daemon=True).start()
    try:
        compute(channel, arrived.get)
    except Exception as error:
        print(f"weft: rank {number} failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)


if __name__ == "__main__":
    main()
