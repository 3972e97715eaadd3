"""A Proxy in memory: it lends what is put into it, as a real one does (tests/contracts), and notes what it is told.

A question for messages waits until something comes, or the Proxy closes.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.consumer.simple import MIN_INVISIBLE_S, MIN_WAIT_S
from rocketmq_spark.errors import ClosedError, LocalProtocolError, NotFound, RocketMQError, RouteNotFound
from rocketmq_spark.model import Filter
from rocketmq_spark.model.message import GroupPolicy, PoppedMessage, PopTarget

_numbers = itertools.count()
_LOOK_S = 0.02


class FakeProxy:
    """Implements ``ports.PopMember``; ``failing`` has errors by verb. Leases end as time goes on, which ``now_s`` tells.

    Without ``waits`` an empty place answers a receive at once, as if the time of the receive were over.
    """

    client_id = "me"

    def __init__(self, now_s: Callable[[], float] = time.monotonic, waits: bool = True, **places: int) -> None:
        self.now_s = now_s
        self.waits = waits
        self.counts = dict(places)
        self.told: list[tuple[Any, ...]] = []
        self.failing: dict[str, RocketMQError] = {}
        self.said = GroupPolicy(3, True, (10.0, 30.0))
        self.filters: list[Mapping[str, Filter]] = []
        self.lying: defaultdict[tuple[str, int], list[PoppedMessage]] = defaultdict(list)
        self.lent: dict[str, tuple[int, PoppedMessage]] = {}  # by receipt: where each lies again when the time is over
        self.until: dict[str, float] = {}  # of every receipt, also of those that others replaced
        self.takes: Callable[[], None] = lambda: None  # while an answer comes
        self.receives: list[tuple[str, int, int, float]] = []  # topic, place, count, seconds invisible
        self.waiting = self.answered = 0
        self.changed = threading.Condition()
        self.closed, self.closes, self.goodbye_s = False, 0, 0.0

    def put(self, *messages: PoppedMessage, place: int = 0) -> None:
        with self.changed:
            for message in messages:
                self.lying[message.topic, place].append(message)
            self.changed.notify_all()

    def answer(self) -> None:
        """The questions that wait have waited for long enough."""
        with self.changed:
            self.answered += 1
            self.changed.notify_all()

    def subscribe(self, filters: Mapping[str, Filter], deadline: Deadline) -> None:
        if "subscribe" in self.failing:
            raise self.failing["subscribe"]
        self.filters.append(dict(filters))
        self.closed = False

    def policy(self) -> GroupPolicy:
        return self.said

    def target_count(self, topic: str, deadline: Deadline) -> int:
        if "target_count" in self.failing:
            raise self.failing["target_count"]
        if topic not in self.counts:
            raise RouteNotFound("no such topic", topic=topic)
        return self.counts[topic]

    def receive(
        self, target: PopTarget, count: int, invisible_s: float, wait_s: float, deadline: Deadline
    ) -> Sequence[PoppedMessage]:
        assert invisible_s >= MIN_INVISIBLE_S, "an error of the Proxy"
        assert wait_s >= MIN_WAIT_S, "an error of the Proxy: 40018"
        assert deadline.remaining() > wait_s, "the answer would come too late"
        with self.changed:
            if self.filters and target[0] not in self.filters[-1]:
                raise LocalProtocolError("the topic is not subscribed to", topic=target[0])
            if "receive" in self.failing:
                raise self.failing.pop("receive")
            self.waiting += 1
            self.receives.append((*target, count, invisible_s))
            self.changed.notify_all()
            end, answered = Deadline.after(wait_s if self.waits else 0.0), self.answered
            while not (self.closed or self._there(*target) or end.expired or self.answered > answered):
                self.changed.wait(_LOOK_S)  # nobody tells when a lease ends
            self.waiting -= 1
            if self.closed:
                raise ClosedError("the channel was closed")
            found = self.lying[target][:count]
            del self.lying[target][:count]
            lent = [self._lend(message, target[1], invisible_s) for message in found]
            self.takes()
            return lent

    def ack(self, message: PoppedMessage, deadline: Deadline) -> None:
        """With a receipt that was replaced it is no error, and comes again all the same."""
        with self.changed:
            self._note("ack", message)
            self.lent.pop(message.receipt, None)

    def change_invisible(self, message: PoppedMessage, invisible_s: float, deadline: Deadline) -> None:
        """With a receipt that was replaced it comes once more than it should."""
        with self.changed:
            self._note("change", message, invisible_s)
            place, _ = self.lent.pop(message.receipt, (0, message))
            message.receipt = self._lend(message, place, invisible_s).receipt

    def forward_to_dlq(self, message: PoppedMessage, deadline: Deadline) -> None:
        """Whatever its receipt, even when its time is over."""
        with self.changed:
            self._note("dlq", message)
            self.lent.pop(message.receipt, None)

    def close(self, deadline: Deadline) -> None:
        with self.changed:
            self.closed, self.goodbye_s = True, deadline.remaining()
            self.closes += 1
            self.changed.notify_all()

    def _note(self, verb: str, message: PoppedMessage, *what: Any) -> None:
        if verb in self.failing:
            raise self.failing[verb]
        if verb != "dlq" and self.until.get(message.receipt, 0.0) <= self.now_s():
            raise NotFound("the Proxy refused: invalid receipt handle", topic=message.topic)
        self.told.append((verb, message.msg_id, *what))

    def _lend(self, message: PoppedMessage, place: int, invisible_s: float) -> PoppedMessage:
        lent = replace(message, receipt=f"receipt {next(_numbers)}")
        self.until[lent.receipt] = self.now_s() + invisible_s
        self.lent[lent.receipt] = place, replace(lent)
        return lent

    def _there(self, topic: str, place: int) -> bool:
        """Whether there is something, of which the time is over included."""
        for receipt in [one for one in self.lent if self.until[one] <= self.now_s()]:
            at, message = self.lent.pop(receipt)
            again = replace(message, delivery_attempt=message.delivery_attempt + 1)
            self.lying[message.topic, at].append(again)
        return bool(self.lying[topic, place])
