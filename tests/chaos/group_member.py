"""A process with a concurrent and an ordered member, as users write them; it says what it gets and ends with SIGTERM.

``python -m tests.chaos.group_member NAME_SERVER TOPIC GROUP ORDERED_GROUP messages|rows``; a line is out before its listener
returns.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from rocketmq_spark import Consumer
from rocketmq_spark.base.codes import RETRY_PREFIX
from rocketmq_spark.model import ReceivedMessage


def noting(group: str) -> Callable[[Sequence[ReceivedMessage], Any], None]:
    def listener(messages: Sequence[ReceivedMessage], context: Any) -> None:
        at = time.time_ns() // 1_000_000
        lines = "".join(line(at, group, message) for message in messages)
        os.write(1, lines.encode())  # one call: a kill leaves whole lines

    return listener


def noting_rows(group: str) -> Callable[[Any, Any], None]:
    def listener(batch: Any, context: Any) -> None:
        at, times = time.time_ns() // 1_000_000, int(context.queue.topic.startswith(RETRY_PREFIX))
        rows = batch.select(["msgId", "brokerName", "queueId", "queueOffset", "body"]).to_pylist()
        os.write(1, "".join(line_of(at, group, *row.values(), times) for row in rows).encode())

    return listener


def line(at: int, group: str, m: ReceivedMessage) -> str:
    return line_of(at, group, m.msg_id, m.broker_name, m.queue_id, m.queue_offset, m.body, m.reconsume_times)


def line_of(at: int, group: str, *what: Any) -> str:
    """As Consume.java writes it: the id of a message, broker, queue, offset, body, and how often it had been sent back."""
    said = dict(zip(("id", "broker", "queue", "offset", "body", "times"), what, strict=True))
    return json.dumps({"at": at, "group": group, **said, "body": said["body"].decode()}) + "\n"


def main(name_server: str, topic: str, group: str, ordered_group: str, what: str) -> None:
    over, end = os.pipe()

    def ended(*_: object) -> None:
        """An event's own lock may be held by who waits for it, below this handler."""
        os.write(end, b"x")
        faulthandler.dump_traceback_later(60)  # where it hangs, if it does

    signal.signal(signal.SIGTERM, ended)
    common: dict[str, Any] = {
        "name_server": name_server,
        "consume_from_where": "earliest",
        "arrow": what == "rows",
    }
    listening = noting_rows if what == "rows" else noting
    with Consumer(group=group, **common) as one, Consumer(group=ordered_group, ordered=True, **common) as other:
        for consumer in (one, other):
            consumer.subscribe(topic)
            consumer.start(listening(consumer.settings.group))
        os.write(1, b'{"started": true}\n')
        os.read(over, 1)


if __name__ == "__main__":
    main(*sys.argv[1:])
