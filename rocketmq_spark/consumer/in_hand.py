"""Messages that a Proxy has lent to a consumer with a listener, and what became of those before them. One lock guards it.

Nothing is asked of anybody here: who acts holds the lock for a decision, and lets go of it for the deed.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rocketmq_spark.clock import Deadline
from rocketmq_spark.consumer.figures import ConsumerFigures
from rocketmq_spark.consumer.held import Stats
from rocketmq_spark.membership import TopicFigures
from rocketmq_spark.popped import PoppedMessage


@dataclass(eq=False, slots=True)
class Lent:
    """A message that is nobody else's until ``until_ms``, which is put off as long as it is ours.

    ``since_ms`` is when it came, or when the listener got it; ``caller`` is the thread whose listener has it. One question
    about it is asked at a time, under ``asking``: each makes the receipt void that the others would bring along.
    """

    message: PoppedMessage
    until_ms: int
    since_ms: int
    caller: int | None = None
    settled: bool = False
    asking: threading.Lock = field(default_factory=threading.Lock)


class InHand:
    """Of one consumer; times are those of its timer, in ms."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._lent: dict[int, Lent] = {}  # by identity, in the order in which they came
        self._counts: Counter[str] = Counter()
        self._figures = ConsumerFigures()

    def came(self, topic: str, messages: Sequence[PoppedMessage], until_ms: int, now_ms: int) -> list[Lent]:
        """These were handed out now."""
        lent = [Lent(message, until_ms, now_ms) for message in messages]
        with self._lock:
            self._figures.pulled(topic, len(messages), None, now_ms)
            self._lent |= {id(one): one for one in lent}
        return lent

    def begin(self, lent: Lent, now_ms: int) -> bool:
        """The listener of this thread gets it, unless its time is over: then it is somebody else's, and gone from here."""
        with self._lock:
            if now_ms >= lent.until_ms:
                self._forget(lent)
                return False
            lent.caller, lent.since_ms = threading.get_ident(), now_ms
            self._changed.notify_all()
            return True

    def called(self, lent: Lent, done: bool, now_ms: int) -> None:
        """What the listener made of it."""
        with self._lock:
            self._counts["consumed" if done else "failed"] += 1
            self._figures.consumed(lent.message.topic, int(done), int(not done), now_ms - lent.since_ms, now_ms)

    def waits(self, lent: Lent, now_ms: int) -> None:
        """The listener has it no more, and gets it again."""
        with self._lock:
            lent.caller, lent.since_ms = None, now_ms

    def end(self, lent: Lent, sent_back: bool = False) -> None:
        """It is not ours any more; ``sent_back``: to be handed out later."""
        with self._lock:
            self._counts["sent back"] += sent_back
            self._forget(lent)

    def all(self) -> list[Lent]:
        with self._lock:
            return list(self._lent.values())

    def room(self, topic: str, waiting: int, wait_s: float) -> bool:
        """Whether fewer than ``waiting`` messages of a topic wait for a listener, now or within so many seconds: those that
        wait behind one which fails again and again are in the way of no other topic.
        """
        with self._lock:
            return self._changed.wait_for(lambda: self._waiting(topic) < waiting, wait_s)

    def finish(self, deadline: Deadline) -> list[PoppedMessage]:
        """Wait until nothing is in hand, and give what listeners still have in the end.

        A listener that asks this itself holds up others behind it: only those that are called already are waited for then.
        """
        me = threading.get_ident()
        with self._lock:
            ended = {me, None} if any(one.caller == me for one in self._lent.values()) else set()
            self._changed.wait_for(
                lambda: all(one.caller in ended for one in self._lent.values()), max(0.0, deadline.remaining())
            )
            return [one.message for one in self._lent.values() if one.caller is not None]

    def stats(self) -> Stats:
        with self._lock:
            counts = self._counts
            return Stats(counts["consumed"], counts["failed"], counts["sent back"], len(self._lent))

    def figures(self, topics: Iterable[str], now_ms: int) -> dict[str, TopicFigures]:
        """What became of each topic's messages lately."""
        with self._lock:
            return self._figures.all(topics, now_ms)

    def _waiting(self, topic: str) -> int:
        return sum(one.caller is None and one.message.topic == topic for one in self._lent.values())

    def _forget(self, lent: Lent) -> None:
        self._lent.pop(id(lent), None)
        self._changed.notify_all()
