"""A process with one consumer of a Proxy's messages, as users write them; it says what it gets, and is killed at will.

``python -m tests.live.grpc.popper KIND ENDPOINT TOPIC GROUP INVISIBLE_S``; a line is out before its message is acknowledged. What
begins with ``poison`` always fails. Less than the consumers' own time of being invisible is for short tests, at a
Proxy that allows it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from rocketmq_spark import Consumer, SimpleConsumer
from rocketmq_spark.consumer import pop
from rocketmq_spark.consumer import simple as simple_module
from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.model.message import PoppedMessage

POISON = b"poison"


def say(**what: object) -> None:
    os.write(1, (json.dumps(what) + "\n").encode())  # one call: a kill leaves whole lines


def took(message: PoppedMessage) -> bool:
    """Whether it may be acknowledged."""
    say(id=message.msg_id, attempt=message.delivery_attempt)
    return not message.body.startswith(POISON)


def simple(endpoint: str, topic: str, group: str, invisible_s: float) -> None:
    """It goes on whatever the Proxy says: what was not acknowledged comes again."""
    simple_module.MIN_INVISIBLE_S = min(invisible_s, simple_module.MIN_INVISIBLE_S)
    pause = threading.Event()
    with SimpleConsumer(proxy_endpoint=endpoint, group=group) as consumer:
        consumer.subscribe(topic)
        say(started=True)
        while True:
            try:
                found = consumer.receive(invisible=invisible_s)
            except RocketMQError as e:
                sys.stderr.write(f"{e}\n")
                pause.wait(0.1)
                continue
            for message in found:
                settle(consumer, message)


def settle(consumer: SimpleConsumer, message: PoppedMessage) -> None:
    try:
        if took(message):
            consumer.ack(message)
        else:
            consumer.change_invisible(message, simple_module.MIN_INVISIBLE_S)
    except RocketMQError as e:
        sys.stderr.write(f"{e}\n")


def lease(invisible_s: float, put: Callable[[object, str, float], None] = setattr) -> None:
    """Consumers with a listener have messages for so long, and ask for more time three times as often."""
    put(pop, "INVISIBLE_S", invisible_s)
    put(pop, "MAX_WAIT_S", invisible_s * 2 / 3)  # what comes at its end must have time left
    put(pop, "RENEW_INTERVAL_S", invisible_s / 3)


def push(endpoint: str, topic: str, group: str, invisible_s: float) -> None:
    lease(min(invisible_s, pop.INVISIBLE_S))

    def listener(messages: Sequence[PoppedMessage], context: Any) -> object:
        return None if took(messages[0]) else context.retry(1)

    with Consumer(transport="grpc", proxy_endpoint=endpoint, group=group) as consumer:
        consumer.subscribe(topic)
        consumer.start(listener)
        say(started=True)
        threading.Event().wait()


KINDS = {"simple": simple, "push": push}

if __name__ == "__main__":
    kind, *names, seconds = sys.argv[1:]
    KINDS[kind](*names, float(seconds))
