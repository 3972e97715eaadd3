"""Finds topics that were deleted and created again under the same name.

The queues of a recreated topic start at offset 0. A queue that ends before the position of the query was recreated. When a
recreated queue has grown past the position, only store times show it: every message of the new topic is newer than all messages
of the old topic. So the offsets record the newest store time of each queue, and the message before the position must not be
newer.

For most queues, the bounds that each plan fetches are enough. ``RecreationWatch`` asks brokers about the other queues: about one
queue of each topic and broker, because a broker deletes the queues of a topic together. It asks about all of them when a run
begins, when a broker may have lost part of its store in a crash (the client connected to it again), when a queue returns after
its topic had fewer queues, and when one queue of the topic was recreated.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

from rocketmq_spark.base.clock import Deadline, epoch_ms
from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.model import MessageQueue, QueueBounds
from rocketmq_spark.ports import OffsetReader
from rocketmq_spark.spark.source.offsets import Bounds, Offsets

# The name of a topic, and of a broker that has queues of the topic.
TopicBroker = tuple[str, str]
# If the minimum offset has not changed for less than this time, the topic is the same. Retention takes hours. A broker with a
# full disk deletes messages sooner, but a new topic would have to reach exactly the minimum offset of the old one.
_UNCHANGED_MS = 60_000
# The time that the client needs for a request about one queue on a slow machine: 100,000 of them take longer than the timeout.
CLIENT_OVERHEAD_S = 0.0001


class RecreationEvidence(enum.Enum):
    """What the bounds of a queue show about its past."""

    EXPIRED = "all messages that were read are deleted"
    NO_STORE_TIME = "no store time is known"
    SAME = "the newest message is not newer than the known store time"
    ENDS_BEFORE = "the queue ends before the position"
    RECREATED = "the message before the position is the newest message, and newer than the known store time"
    UNDECIDED = "only the message before the position can show it"


def evidence_of(position: int, mark: int, bounds: QueueBounds) -> RecreationEvidence:
    """Return what the bounds of a queue show that was read up to ``position``. ``mark`` is its known store time; 0: unknown."""
    if position > bounds.max_offset:
        return RecreationEvidence.ENDS_BEFORE
    if position <= bounds.min_offset:
        return RecreationEvidence.EXPIRED
    if not mark:
        return RecreationEvidence.NO_STORE_TIME
    newest_ms = bounds.last_update_ms
    if newest_ms <= 0:  # a Proxy does not report it
        return RecreationEvidence.UNDECIDED
    if newest_ms <= mark:
        return RecreationEvidence.SAME
    return RecreationEvidence.RECREATED if position == bounds.max_offset else RecreationEvidence.UNDECIDED


def evidence_by_queue(read: Offsets, bounds: Bounds) -> dict[MessageQueue, RecreationEvidence]:
    """Return the evidence for each queue that has a position and bounds."""
    marks = read.newest_store_ms
    return {
        queue: evidence_of(position, marks.get(queue, 0), there)
        for queue, position in read.positions.items()
        if (there := bounds.get(queue)) is not None
    }


def queues_to_probe(
    seen: Mapping[MessageQueue, RecreationEvidence],
    watched: Collection[TopicBroker],
    stayed: Callable[[MessageQueue], bool] = lambda queue: False,
) -> list[MessageQueue]:
    """Return the undecided queues about which brokers must be asked.

    ``watched`` has the topics and brokers that the last plan checked: one undecided queue is enough for each of them, and none if
    another queue is the same as before, or if ``stayed`` is true for an undecided one. If a queue of them was recreated, all of
    their undecided queues are returned.
    """
    of_share: dict[TopicBroker, list[MessageQueue]] = {}
    same, changed = set[TopicBroker](), set[TopicBroker]()
    for queue, one in seen.items():
        if one is RecreationEvidence.UNDECIDED:
            of_share.setdefault(queue[:2], []).append(queue)
        elif one is RecreationEvidence.SAME:
            same.add(queue[:2])
        elif one is RecreationEvidence.ENDS_BEFORE or one is RecreationEvidence.RECREATED:
            changed.add(queue[:2])
    asked: list[MessageQueue] = []
    for mine, queues in of_share.items():
        if mine not in watched or mine in changed:
            asked += queues
        elif mine not in same and not any(map(stayed, queues)):
            asked.append(min(queues))
    return asked


def recreated_queues(
    seen: Mapping[MessageQueue, RecreationEvidence], younger: Iterable[MessageQueue]
) -> list[MessageQueue]:
    """Return the queues that were recreated: those that the evidence or the brokers (``younger``) show, and the queues without a
    known store time of the same topic and broker.
    """
    proven = {*younger, *(queue for queue, one in seen.items() if one is RecreationEvidence.RECREATED)}
    beside = topic_brokers([*proven, *(queue for queue, one in seen.items() if one is RecreationEvidence.ENDS_BEFORE)])
    if not beside:
        return []
    return sorted(
        proven.union(
            q for q, one in seen.items() if one is RecreationEvidence.NO_STORE_TIME and topic_broker(q) in beside
        )
    )


def queues_to_stamp(read: Offsets, bounds: Bounds) -> list[MessageQueue]:
    """Return the queues whose last read message must be fetched to learn its store time, because the bounds do not show it.

    If a queue has unread messages, its newest message may be older than those that were read, because the clock of the broker may
    have been set back. For a compaction topic whose log has expired, brokers report no time. If the server reports no store times
    at all, one queue of each topic and broker without a known store time is enough.
    """
    begun = {
        queue: there
        for queue, position in read.positions.items()
        if (there := bounds.get(queue)) is not None and position > there.min_offset
        if position < there.max_offset or there.last_update_ms <= 0
    }
    signs = [q for q, of in begun.items() if of.last_update_ms]
    untold = [q for q, of in begun.items() if not of.last_update_ms]
    marked = topic_brokers(queue for queue in untold if queue in read.newest_store_ms)
    lowest = {topic_broker(queue): queue for queue in sorted(untold, reverse=True) if topic_broker(queue) not in marked}
    return sorted([*signs, *lowest.values()])


def fully_expired(read: Offsets, bounds: Bounds) -> list[MessageQueue]:
    """Return the queues without a known store time whose messages are all deleted. If such a queue later has a message before its
    position, it was recreated.
    """
    return [
        queue
        for queue, position in read.positions.items()
        if queue in bounds
        and queue not in read.newest_store_ms
        and bounds[queue].last_update_ms < 0
        and 0 < position <= bounds[queue].min_offset
    ]


def with_client_overhead(deadline: Deadline, questions: int) -> Deadline:
    """Return ``deadline`` plus the time that the client itself needs for ``questions`` requests."""
    return Deadline(deadline.at + questions * CLIENT_OVERHEAD_S)


def topic_broker(queue: MessageQueue) -> TopicBroker:
    return queue[:2]


def topic_brokers(queues: Iterable[MessageQueue]) -> frozenset[TopicBroker]:
    return frozenset(queue[:2] for queue in queues)


class RecreationResult(NamedTuple):
    """The queues that were recreated, and the topics and brokers for which this is unknown, because the broker did not answer."""

    recreated: list[MessageQueue]
    unanswered: dict[TopicBroker, RocketMQError]


class RecreationWatch:
    """Finds recreated queues in each plan of a run. ``now_ms`` is the driver's clock."""

    def __init__(self, reader: Callable[[], OffsetReader], group: str, now_ms: Callable[[], int] = epoch_ms) -> None:
        self._reader = reader
        self._group = group
        self._now_ms = now_ms
        # The topics and brokers that the last check found unchanged.
        self._checked: frozenset[TopicBroker] = frozenset()
        # The time of the last check, and the bounds that it got.
        self._last_check: tuple[int, Bounds] = (0, {})
        # The connection of each broker at the last check.
        self._connections: dict[str, object] = {}

    def start(self, bounds: Bounds) -> None:
        """Start a run whose known store times come from ``bounds``, so that the first check need not ask brokers."""
        self._connections = self._connections_of(bounds)
        self._checked, self._last_check = topic_brokers(bounds), (self._now_ms(), bounds)

    def check(
        self, read: Offsets, bounds: Bounds, deadline: Deadline, connections: Mapping[str, object] | None = None
    ) -> RecreationResult:
        """Return the queues of ``read`` that were recreated, or whose broker lost the end of its store and stored new messages.

        ``connections`` are the connections of the brokers before ``bounds`` were fetched, by default the present ones.
        """
        interrupted = self._reconnected_brokers(bounds, connections or {})
        # Of all queues of a recreated topic, only one that was missing at the last check may have an old position.
        returned = topic_brokers(
            queue for queue in read.positions if queue in bounds and queue not in self._last_check[1]
        )
        self._checked = frozenset(one for one in self._checked - returned if one[1] not in interrupted)
        seen = evidence_by_queue(read, bounds)
        unanswered: dict[TopicBroker, RocketMQError] = {}
        asked = queues_to_probe(seen, self._checked, self._unchanged_since_last_check(bounds))
        found = self._with_younger_messages(read, asked, deadline, unanswered)
        suspicious = topic_brokers(found) & self._checked
        if suspicious:
            rest = {
                queue
                for queue, one in seen.items()
                if one is RecreationEvidence.UNDECIDED and topic_broker(queue) in suspicious
            } - {*asked}
            found += self._with_younger_messages(read, rest, deadline, unanswered)
        # If a broker did not answer for a topic, the plan omits all of its queues there, also those that were surely recreated.
        changed = [queue for queue in recreated_queues(seen, found) if topic_broker(queue) not in unanswered]
        # Recreated queues are checked again, because a batch that waits for more messages is planned again from the same start.
        # A queue that ended before its position may have grown past it until then.
        ended = topic_brokers(queue for queue, one in seen.items() if one is RecreationEvidence.ENDS_BEFORE)
        self._checked = topic_brokers(bounds) - unanswered.keys() - topic_brokers(changed) - ended
        self._last_check = self._now_ms(), bounds
        return RecreationResult(changed, unanswered)

    def _unchanged_since_last_check(self, bounds: Bounds) -> Callable[[MessageQueue], bool]:
        """Return a function that tells whether a queue has the minimum offset of the last check, and this offset is not 0.

        Such a queue was not recreated: a recreated queue begins at 0, and its first messages expire much later. Always false over
        a Proxy, which hides that a broker restarted: a broker that lost the end of its store still has the same minimum offset.
        """
        when_ms, before = self._last_check
        if not 0 <= self._now_ms() - when_ms < _UNCHANGED_MS:
            return lambda queue: False

        def stayed(queue: MessageQueue) -> bool:
            there, was = bounds[queue], before.get(queue)
            return was is not None and 0 < there.min_offset == was.min_offset and there.last_update_ms != 0

        return stayed

    def _reconnected_brokers(self, bounds: Bounds, connections: Mapping[str, object]) -> set[str]:
        """Return the brokers with another connection than at the last check: they may have crashed and restarted.

        ``connections`` may be older than the present connections. Then the next check reports the broker again.
        """
        before, now = self._connections, self._connections_of(bounds)
        self._connections = {**now, **{name: known for name, known in connections.items() if name in now}}
        return {name for name, connection in now.items() if before.get(name) != connection}

    def _connections_of(self, bounds: Bounds) -> dict[str, object]:
        reader = self._reader()
        return {name: reader.connection(name) for name in {queue.broker_name for queue in bounds}}

    def newest_store_ms(self, read: Offsets, bounds: Bounds, deadline: Deadline) -> dict[MessageQueue, int]:
        """Return the newest store times that the bounds do not show, for the queues of ``queues_to_stamp`` and ``fully_expired``.
        Queues whose broker does not answer are omitted.
        """
        last = {queue: read.positions[queue] - 1 for queue in queues_to_stamp(read, bounds)}
        deadline = with_client_overhead(deadline, len(last))
        stored = self._reader().store_times_ms(self._group, last, deadline) if last else {}
        marks = {queue: max(stored_ms, bounds[queue].last_update_ms) for queue, stored_ms in stored.items()}
        return marks | dict.fromkeys(fully_expired(read, bounds), self._now_ms())

    def _with_younger_messages(
        self,
        read: Offsets,
        asked: Iterable[MessageQueue],
        deadline: Deadline,
        unanswered: dict[TopicBroker, RocketMQError],
    ) -> list[MessageQueue]:
        """Return those of ``asked`` whose message before the position is newer than the known store time."""
        marks = {queue: read.newest_store_ms[queue] for queue in asked}
        if not marks:
            return []
        deadline = with_client_overhead(deadline, len(marks))

        def note(error: RocketMQError, queue: MessageQueue) -> None:
            unanswered.setdefault(topic_broker(queue), error)

        reader = self._reader()
        first = reader.search_offsets({queue: mark + 1 for queue, mark in marks.items()}, deadline, note)
        suspected = sorted(queue for queue, offset in first.items() if offset < read.positions[queue])
        last = {queue: read.positions[queue] - 1 for queue in suspected if topic_broker(queue) not in unanswered}
        # Old brokers answer with the nearest message, so all of several hundred queues may be suspected: one call asks for all.
        stored = reader.store_times_ms(self._group, last, deadline) if last else {}
        found = []
        for queue, offset in last.items():
            if topic_broker(queue) in unanswered:
                continue
            # The clocks of masters differ, and old brokers answer with the nearest message, so the message before the position
            # decides. If compaction has removed it, the first newer message decides.
            try:
                stored_ms = stored.get(queue)
                if stored_ms is None:
                    stored_ms = reader.store_time_ms(self._group, queue, offset, deadline)
                if stored_ms is None:
                    stored_ms = reader.store_time_ms(self._group, queue, first[queue], deadline)
            except RocketMQError as e:
                note(e, queue)
                continue
            if stored_ms is not None and stored_ms > marks[queue]:
                found.append(queue)
        return found
