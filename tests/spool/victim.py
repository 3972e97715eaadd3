"""A process that adds and redelivers until it is killed; it says each fact on standard output *after* it holds.

``added N``: record N is durable. ``sent N``: it was delivered, and settled afterwards.
"""

from __future__ import annotations

import itertools
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rocketmq_spark.base.threads import Timer
from rocketmq_spark.model import Resent
from rocketmq_spark.spool.lanes import Schedule
from rocketmq_spark.spool.records import Record
from rocketmq_spark.spool.redelivery import Redelivery
from rocketmq_spark.spool.store import Store

LANES = (b"", b"", b"l", b"m")


def say(text: str) -> None:
    os.write(1, f"{text}\n".encode())  # one write: a line is there or not


def main() -> None:
    path, first, seed, adding = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "add"
    rng = random.Random(seed)
    store = Store(path, sync=rng.choice(("always", "batch", "never")))

    def handle(records: Sequence[Record], done: Callable[[Resent], None]) -> None:
        if adding and rng.random() < 0.4:
            done(Resent(None, "down", is_temporary=True))
            return
        for record in records:
            say(f"sent {record.payload.decode()} {record.lane.decode()}")
        done(Resent())

    def now_ms() -> int:
        return time.time_ns() // 1_000_000

    schedule = Schedule((0.01,) * 1000)
    redelivery = Redelivery(store, {"k": handle}, now_ms, Timer("redelivery"), schedule)
    redelivery.batch_policy.predicate = lambda head: lambda other: rng.random() < 0.7
    redelivery.wake()
    if not adding:
        while len(store):
            threading.Event().wait(0.01)
            redelivery.wake()
        say(f"dead {store.totals.dead}")
        store.close()
        return
    for number in itertools.count(first):
        lane = LANES[number % len(LANES)]
        store.add([(Record("k", str(number).encode(), now_ms(), "", lane), now_ms() + rng.randrange(20))])
        say(f"added {number}")
        redelivery.wake()


if __name__ == "__main__":
    main()
