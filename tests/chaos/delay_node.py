"""A node of the delay service as a process with a clock that is not the machine's; it notes what it hands out to be sent.

``python -m tests.chaos.delay_node NAME_SERVER FOLDER CLOCK``: ``CLOCK`` is a file with the ms by which the node's clock is ahead.
"""

from __future__ import annotations

import logging
import mmap
import os
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rocketmq_spark.consumer import upkeep
from rocketmq_spark.delay import envelope_records
from rocketmq_spark.delay.node import NodeSettings, open_node
from rocketmq_spark.model import SpooledSend
from rocketmq_spark.spool.records import Record

GROUP = "delays"
AHEAD = struct.Struct("<q")
HEARTBEAT_S = 2.0  # brokers wait for fewer seconds than by default


def clock(path: Path) -> Callable[[], int]:
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), AHEAD.size, access=mmap.ACCESS_READ)
    return lambda: time.time_ns() // 1_000_000 + int(AHEAD.unpack_from(mapped)[0])


def noting(now_ms: Callable[[], int], sending: Callable[..., Callable[[Record], SpooledSend]]) -> Any:
    """``sending``, and a line for each send: the machine's time, the node's, the due time, the body."""

    def noted(*args: Any) -> Callable[[Record], SpooledSend]:
        send_of = sending(*args)

        def note(record: Record) -> SpooledSend:
            send = send_of(record)
            line = f"{time.time_ns() // 1_000_000} {now_ms()} {record.original_due_ms} {bytes(send.request.body).decode()}\n"
            os.write(1, line.encode())  # one call: a kill leaves whole lines
            return send

        return note

    return noted


def main(name_server: str, folder: str, clock_file: str) -> None:
    over = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: over.set())
    logging.basicConfig(level=logging.INFO, format="%(created).3f %(name)s %(message)s")
    now_ms = clock(Path(clock_file))
    upkeep.HEARTBEAT_INTERVAL_S = HEARTBEAT_S
    envelope_records.send_decoder = noting(now_ms, envelope_records.send_decoder)
    place = NodeSettings(Path(folder), now_ms=now_ms)
    open_node(place, name_server=name_server, group=GROUP).run(over)  # type: ignore[arg-type]


if __name__ == "__main__":
    main(*sys.argv[1:])
