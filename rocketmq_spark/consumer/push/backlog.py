"""Reading ahead for a ``Consumer``: queues that are far behind their ends are left to ``ahead`` for a while.

A pull returns 32 messages and involves three threads; reading ahead has many pulls in flight. A queue is either pulled or read
ahead; only between ``take`` and the start of a read it is neither. The conditions that pause pulls (a full cache, a listener
that blocks the offset) also end a read, and pulls continue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from rocketmq_spark.base.clock import Clock
from rocketmq_spark.base.timer import Timer
from rocketmq_spark.consumer.ahead import FAR_ANSWERS, Ahead, Bounds, Plain, ReadAhead
from rocketmq_spark.consumer.process_queue import ProcessQueue
from rocketmq_spark.consumer.pull.assigned import Ask, FetchedPart
from rocketmq_spark.consumer.push.member_state import MemberState
from rocketmq_spark.consumer.settings import ConsumerSettings
from rocketmq_spark.errors import DecodeError
from rocketmq_spark.model import MASTER_ID, MessageQueue, ReceivedMessage
from rocketmq_spark.wire.messages import portion

PATIENCE_S = 1.0  # pulls are fast enough for slower listeners
RECHECK_S = 0.05  # the interval at which Java checks a full queue

Submit = Callable[[ProcessQueue, Sequence[ReceivedMessage]], None]
Move = Callable[[Mapping[MessageQueue, int]], None]  # resets offsets of queues on another thread; must not block


class BacklogQueue:
    """One queue (``ahead.ReadAheadQueue``). Its messages wait in its process queue, or are on their way there."""

    def __init__(self, held: ProcessQueue, token: int, max_span: int | None) -> None:
        self.held = held
        self.token = token
        self.asked = True
        self.pull_at = 0
        self.end: int | None = None
        self.calm_until = self.retry_at = 0.0
        self.broker_id = MASTER_ID
        self._max_span = max_span
        self.coming = self.coming_bytes = 0

    @property
    def waiting(self) -> int:
        return self.held.count + self.coming

    @property
    def bytes(self) -> int:
        return self.held.bytes + self.coming_bytes

    @property
    def paused(self) -> bool:
        """Whether the queue was dropped, or an unfinished message holds its offset far back."""
        return self.held.dropped or (self._max_span is not None and self.held.span > self._max_span)


class Backlog:
    """The queues of one member that are read ahead."""

    def __init__(self, settings: ConsumerSettings, held: MemberState, timer: Timer, how: ReadAhead) -> None:
        most = settings.thresholds
        self._held = held
        self._timer = timer
        self._max_span = most.max_span
        bounds = Bounds(settings.pull_batch_size, most.max_count, most.max_bytes, PATIENCE_S, RECHECK_S)
        self._far = FAR_ANSWERS * bounds.count
        self._ahead = Ahead(held.changed, self, bounds, how, Clock())
        self._tokens = 0
        self._places: dict[MessageQueue, BacklogQueue] = {}
        # Set by who makes pulls: the next one of a queue, from an offset on; have messages consumed; is all of a queue wanted;
        # have queues go on at other offsets.
        self.pull: Callable[[ProcessQueue, int], None] = lambda queue, offset: None
        self.submit: Submit = lambda queue, messages: None
        self.plain: Plain = lambda queue: False
        self.move: Move = lambda offsets: None
        held.low = bounds.half

    def take(self, queue: ProcessQueue, offset: int) -> bool:
        """Whether ``queue`` is read ahead from ``offset`` on. If not, the caller pulls it."""
        with self._held.lock:
            end = self._held.ends.get(queue.queue)
            if end is None or end - offset < self._far:
                return False
            place = self._place(queue)
            place.pull_at, place.end, place.asked = offset, end, False
            place.asked = queue.queue not in self._ahead.begin(self.plain)
            return not place.asked

    def close(self, wait_s: float) -> None:
        self._ahead.close(wait_s)

    # --- ``ahead.Queues``, with the lock held

    @property
    def places(self) -> Mapping[MessageQueue, BacklogQueue]:
        return self._places

    def hold(self, asks: Iterable[Ask]) -> None:
        for ask in asks:
            self._places[ask.queue].asked = True

    def bring(self, ask: Ask, part: FetchedPart) -> bool:
        place = self._current(ask)
        if place is None:
            return False
        place.coming += part.count
        place.coming_bytes += len(part.stored)
        return True

    def reset(self, ask: Ask, offset: int) -> None:
        """Apply an operator's reset, also if the queue was just dropped: the broker reports a reset only once."""
        self.move({ask.queue: offset})

    def let_go(self, asks: Iterable[Ask], calm_until: float) -> None:
        for ask in asks:
            if (place := self._current(ask)) is not None:
                place.asked = False
                place.calm_until = calm_until
                place.coming = place.coming_bytes = (
                    0  # also for messages that could not be decoded: pulls request them again
                )
        self._timer.later(0, self._go_on)  # also where none is left: what came too late for a read is still free

    # --- without it

    def brought(self, ask: Ask, part: FetchedPart) -> None:
        """Decode messages, on the thread that read them."""
        messages, left = portion(part.read())
        with self._held.lock:
            place = self._current(ask)
            if place is None:
                return
            place.coming -= part.count
            place.coming_bytes -= len(part.stored)
            # No sooner: what is not decoded is to be had again.
            place.pull_at = part.next_offset if left is None else left.queue_offset
            now_ms = self._timer.now_ms()
            place.held.last_pull_ms = now_ms
            place.held.put(messages)
            self._held.figures.pulled(ask.queue.topic, len(messages), None, now_ms)
        self.submit(place.held, messages)
        if left is not None:
            raise DecodeError(
                f"what was read ahead of {ask.queue} becomes large: it is pulled from offset {left.queue_offset} on"
            )

    def _go_on(self) -> None:
        """Continue to pull the queues that are not read ahead."""
        with self._held.lock:
            free = [place for place in self._places.values() if not place.asked]
            for place in free:
                place.asked = True
        for place in free:
            self.pull(place.held, place.pull_at)

    def _place(self, queue: ProcessQueue) -> BacklogQueue:
        place = self._places.get(queue.queue)
        if place is None or place.held is not queue:
            self._tokens += 1
            self._places = {known: one for known, one in self._places.items() if not one.held.dropped}
            place = self._places[queue.queue] = BacklogQueue(queue, self._tokens, self._max_span)
        return place

    def _current(self, ask: Ask) -> BacklogQueue | None:
        place = self._places.get(ask.queue)
        return place if place is not None and place.token == ask.token and not place.held.dropped else None
