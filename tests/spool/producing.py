"""A producer with a spool that sends until it is killed; it says each outcome on standard output *after* it has it.

With ``drain`` it sends nothing, and ends when its spool is empty.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import sys
import threading
from concurrent.futures import Future

from rocketmq_spark import Message, Producer
from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.model import SendResult


def say(text: str) -> None:
    os.write(1, f"{text}\n".encode())  # one write: a line is there or not


def main() -> None:
    server, folder, seed, draining = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4] == "drain"
    rng = random.Random(seed)
    one = Producer(
        name_server=server, group="g", on_send_failure="spool", spool_dir=folder, send_timeout="200ms",
        spool_sync=rng.choice(("always", "batch", "never")),
    )  # fmt: skip
    if draining:
        while (metrics := one.spool_metrics()) is not None and metrics.depth:
            threading.Event().wait(0.05)
        one.close()
        say(f"dead {metrics.dead if metrics is not None else None}")
        return
    queues = None
    while queues is None:  # a slow machine takes longer than a send may
        with contextlib.suppress(RocketMQError):
            queues = one.queues("t")

    def told(future: Future[SendResult]) -> None:
        error = future.exception()
        if error is None:
            say(f"{future.result().status.name} {future.result().msg_id}")
        elif not isinstance(error, RocketMQError):
            raise error

    for number in itertools.count():
        message = Message("t", b"%d" % number)
        if number % 3:
            result = one.send(message, queue=rng.choice((None, queues[0])))
            say(f"{result.status.name} {result.msg_id}")
        else:
            one.send_async(message).add_done_callback(told)


if __name__ == "__main__":
    main()
