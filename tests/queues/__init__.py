"""Which queue: everything here is tested with values alone; ``read`` loads vectors made by the Java classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rocketmq_spark.model import MessageQueue

VECTORS = Path(__file__).parents[1] / "vectors"


def read(name: str) -> Any:
    return json.loads((VECTORS / f"{name}.json").read_text("utf-8"))["cases"]


def q(text: str, topic: str = "T") -> MessageQueue:
    """``a:3`` is queue 3 of broker a."""
    broker, queue_id = text.rsplit(":", 1)
    return MessageQueue(topic, broker, int(queue_id))


def qs(text: str, topic: str = "T") -> list[MessageQueue]:
    """``a:0-3 b:1`` is five queues."""
    found = []
    for item in text.split():
        broker, ids = item.rsplit(":", 1)
        first, _, last = ids.partition("-")
        found += [MessageQueue(topic, broker, i) for i in range(int(first), int(last or first) + 1)]
    return found


def names(queues: list[MessageQueue]) -> str:
    return " ".join(f"{queue.broker_name}:{queue.queue_id}" for queue in queues)
