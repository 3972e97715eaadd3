"""Made-up orders for the demo and for ``produce --rate``, and the rhythm in which they are sent."""

from __future__ import annotations

import json
import random
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from rocketmq_spark.model import Message

REGIONS = ("africa", "america", "asia", "europe", "oceania")
_CHANNELS = ("app", "shop", "web")
# Sending in small groups costs little; waking up for every message would not.
_TICK_S = 0.02


@dataclass(frozen=True, slots=True)
class Order:
    """An order as it travels: a JSON body, tags with the channel, its id as key."""

    order_id: str
    region: str
    cents: int
    channel: str
    at_s: float

    def message(self, topic: str) -> Message:
        # A double prints the shortest text that reads back as itself, so two decimals stay exact.
        moment = datetime.fromtimestamp(self.at_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        body = {"order_id": self.order_id, "region": self.region, "amount": self.cents / 100, "ts": moment}
        return Message(topic, json.dumps(body).encode(), tags=self.channel, keys=[self.order_id])


class Orders:
    """An endless supply. Times never go back, even when the clock of the machine does."""

    def __init__(self, prefix: str = "o", rng: random.Random | None = None) -> None:
        self._prefix = prefix
        self._rng = rng or random.Random()
        self._number = 0
        self._ahead_s = time.time() - time.monotonic()

    def next(self) -> Order:
        self._number += 1
        rng = self._rng
        cents = rng.randrange(100, 50_000)
        return Order(
            f"{self._prefix}-{self._number}",
            rng.choice(REGIONS),
            cents,
            rng.choice(_CHANNELS),
            self._ahead_s + time.monotonic(),
        )


def parse_rate(text: str) -> float:
    """``100``, ``100/s`` or ``30/m`` as messages per second."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(?:/(s|m))?", text.strip())
    rate = float(match[1]) / (60 if match[2] == "m" else 1) if match else 0.0
    if rate <= 0:
        raise ValueError(f"{text!r} is not a rate such as 100/s or 30/m")
    return rate


def paced(per_second: float, count: int | None, stop: threading.Event) -> Iterator[int]:
    """How many to send now, again and again, until ``count`` is reached or ``stop`` is set.

    A sender that was held up catches up: the rate holds over the whole time.
    """
    begin = time.monotonic()
    sent = 0
    while not stop.is_set() and (count is None or sent < count):
        due = int((time.monotonic() - begin) * per_second) + 1
        due = due if count is None else min(due, count)
        if due > sent:
            yield due - sent
            sent = due
        else:
            stop.wait(max(_TICK_S, begin + sent / per_second - time.monotonic()))
