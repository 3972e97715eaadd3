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


def evidence_of(position: int, newest_read_ms: int, bounds: QueueBounds) -> RecreationEvidence:
    """Return what the bounds of a queue show that was read up to ``position``. ``newest_read_ms`` is its known store time; 0:
    unknown.
    """
    if position > bounds.max_offset:
        return RecreationEvidence.ENDS_BEFORE
    if position <= bounds.min_offset:
        return RecreationEvidence.EXPIRED
    if not newest_read_ms:
        return RecreationEvidence.NO_STORE_TIME
    newest_ms = bounds.last_update_ms
    if newest_ms <= 0:  # a Proxy does not report it
        return RecreationEvidence.UNDECIDED
    if newest_ms <= newest_read_ms:
        return RecreationEvidence.SAME
    return RecreationEvidence.RECREATED if position == bounds.max_offset else RecreationEvidence.UNDECIDED


def evidence_by_queue(offsets: Offsets, bounds: Bounds) -> dict[MessageQueue, RecreationEvidence]:
    """Return the evidence for each queue that has a position and bounds."""
    newest_read_ms = offsets.newest_store_ms
    return {
        queue: evidence_of(position, newest_read_ms.get(queue, 0), queue_bounds)
        for queue, position in offsets.positions.items()
        if (queue_bounds := bounds.get(queue)) is not None
    }


def queues_to_probe(
    evidence: Mapping[MessageQueue, RecreationEvidence],
    checked: Collection[TopicBroker],
    is_unchanged: Callable[[MessageQueue], bool] = lambda queue: False,
) -> list[MessageQueue]:
    """Return the undecided queues about which brokers must be asked.

    ``checked`` has the topics and brokers that the last plan checked: one undecided queue is enough for each of them, and none if
    another queue is the same as before, or if ``is_unchanged`` is true for an undecided one. If a queue of them was recreated,
    all of their undecided queues are returned.
    """
    undecided: dict[TopicBroker, list[MessageQueue]] = {}
    unchanged, recreated = set[TopicBroker](), set[TopicBroker]()
    for queue, queue_evidence in evidence.items():
        if queue_evidence is RecreationEvidence.UNDECIDED:
            undecided.setdefault(queue[:2], []).append(queue)
        elif queue_evidence is RecreationEvidence.SAME:
            unchanged.add(queue[:2])
        elif queue_evidence is RecreationEvidence.ENDS_BEFORE or queue_evidence is RecreationEvidence.RECREATED:
            recreated.add(queue[:2])
    to_probe: list[MessageQueue] = []
    for key, queues in undecided.items():
        if key not in checked or key in recreated:
            to_probe += queues
        elif key not in unchanged and not any(map(is_unchanged, queues)):
            to_probe.append(min(queues))
    return to_probe


def recreated_queues(
    evidence: Mapping[MessageQueue, RecreationEvidence], with_newer_message: Iterable[MessageQueue]
) -> list[MessageQueue]:
    """Return the queues that were recreated: those that the evidence or the brokers (``with_newer_message``) show, and the queues
    without a known store time of the same topic and broker.
    """
    recreated = {
        *with_newer_message,
        *(queue for queue, queue_evidence in evidence.items() if queue_evidence is RecreationEvidence.RECREATED),
    }
    recreated_brokers = topic_brokers(
        [
            *recreated,
            *(queue for queue, queue_evidence in evidence.items() if queue_evidence is RecreationEvidence.ENDS_BEFORE),
        ]
    )
    if not recreated_brokers:
        return []
    return sorted(
        recreated.union(
            q
            for q, queue_evidence in evidence.items()
            if queue_evidence is RecreationEvidence.NO_STORE_TIME and topic_broker(q) in recreated_brokers
        )
    )


def queues_needing_store_time(offsets: Offsets, bounds: Bounds) -> list[MessageQueue]:
    """Return the queues whose last read message must be fetched to learn its store time, because the bounds do not show it.

    If a queue has unread messages, its newest message may be older than those that were read, because the clock of the broker may
    have been set back. For a compaction topic whose log has expired, brokers report no time. If the server reports no store times
    at all, one queue of each topic and broker without a known store time is enough.
    """
    candidates = {
        queue: queue_bounds
        for queue, position in offsets.positions.items()
        if (queue_bounds := bounds.get(queue)) is not None and position > queue_bounds.min_offset
        if position < queue_bounds.max_offset or queue_bounds.last_update_ms <= 0
    }
    with_times = [q for q, queue_bounds in candidates.items() if queue_bounds.last_update_ms]
    without_times = [q for q, queue_bounds in candidates.items() if not queue_bounds.last_update_ms]
    known = topic_brokers(queue for queue in without_times if queue in offsets.newest_store_ms)
    lowest = {
        topic_broker(queue): queue for queue in sorted(without_times, reverse=True) if topic_broker(queue) not in known
    }
    return sorted([*with_times, *lowest.values()])


def fully_expired(offsets: Offsets, bounds: Bounds) -> list[MessageQueue]:
    """Return the queues without a known store time whose messages are all deleted. If such a queue later has a message before its
    position, it was recreated.
    """
    return [
        queue
        for queue, position in offsets.positions.items()
        if queue in bounds
        and queue not in offsets.newest_store_ms
        and bounds[queue].last_update_ms < 0
        and 0 < position <= bounds[queue].min_offset
    ]


def with_client_overhead(deadline: Deadline, questions: int) -> Deadline:
    """Return ``deadline`` plus the time that the client itself needs for ``questions`` requests."""
    return Deadline(deadline.end_s + questions * CLIENT_OVERHEAD_S)


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
        self._unchanged: frozenset[TopicBroker] = frozenset()
        # The time of the last check, and the bounds that it got.
        self._last_check: tuple[int, Bounds] = (0, {})
        # The connection of each broker at the last check.
        self._connections: dict[str, object] = {}

    def start(self, bounds: Bounds) -> None:
        """Start a run whose known store times come from ``bounds``, so that the first check need not ask brokers."""
        self._connections = self._connections_of(bounds)
        self._unchanged, self._last_check = topic_brokers(bounds), (self._now_ms(), bounds)

    def check(
        self, offsets: Offsets, bounds: Bounds, deadline: Deadline, connections: Mapping[str, object] | None = None
    ) -> RecreationResult:
        """Return the queues of ``offsets`` that were recreated, or whose broker lost the end of its store and stored new
        messages.

        ``connections`` are the connections of the brokers before ``bounds`` were fetched, by default the present ones.
        """
        reconnected = self._reconnected_brokers(bounds, connections or {})
        # Of all queues of a recreated topic, only one that was missing at the last check may have an old position.
        returned = topic_brokers(
            queue for queue in offsets.positions if queue in bounds and queue not in self._last_check[1]
        )
        self._unchanged = frozenset(key for key in self._unchanged - returned if key[1] not in reconnected)
        evidence = evidence_by_queue(offsets, bounds)
        unanswered: dict[TopicBroker, RocketMQError] = {}
        to_probe = queues_to_probe(evidence, self._unchanged, self._unchanged_since_last_check(bounds))
        with_newer_message = self._with_newer_messages(offsets, to_probe, deadline, unanswered)
        recreated_brokers = topic_brokers(with_newer_message) & self._unchanged
        if recreated_brokers:
            others = {
                queue
                for queue, key in evidence.items()
                if key is RecreationEvidence.UNDECIDED and topic_broker(queue) in recreated_brokers
            } - {*to_probe}
            with_newer_message += self._with_newer_messages(offsets, others, deadline, unanswered)
        # If a broker did not answer for a topic, the plan omits all of its queues there, also those that were surely recreated.
        recreated = [
            queue for queue in recreated_queues(evidence, with_newer_message) if topic_broker(queue) not in unanswered
        ]
        # Recreated queues are checked again, because a batch that waits for more messages is planned again from the same start.
        # A queue that ended before its position may have grown past it until then.
        ending_before = topic_brokers(queue for queue, key in evidence.items() if key is RecreationEvidence.ENDS_BEFORE)
        self._unchanged = topic_brokers(bounds) - unanswered.keys() - topic_brokers(recreated) - ending_before
        self._last_check = self._now_ms(), bounds
        return RecreationResult(recreated, unanswered)

    def _unchanged_since_last_check(self, bounds: Bounds) -> Callable[[MessageQueue], bool]:
        """Return a function that tells whether a queue has the minimum offset of the last check, and this offset is not 0.

        Such a queue was not recreated: a recreated queue begins at 0, and its first messages expire much later. Always false over
        a Proxy, which hides that a broker restarted: a broker that lost the end of its store still has the same minimum offset.
        """
        checked_at_ms, bounds_before = self._last_check
        if not 0 <= self._now_ms() - checked_at_ms < _UNCHANGED_MS:
            return lambda queue: False

        def is_unchanged(queue: MessageQueue) -> bool:
            queue_bounds, bounds_then = bounds[queue], bounds_before.get(queue)
            return (
                bounds_then is not None
                and 0 < queue_bounds.min_offset == bounds_then.min_offset
                and queue_bounds.last_update_ms != 0
            )

        return is_unchanged

    def _reconnected_brokers(self, bounds: Bounds, connections: Mapping[str, object]) -> set[str]:
        """Return the brokers with another connection than at the last check: they may have crashed and restarted.

        ``connections`` may be older than the present connections. Then the next check reports the broker again.
        """
        before, now = self._connections, self._connections_of(bounds)
        self._connections = {**now, **{name: connection for name, connection in connections.items() if name in now}}
        return {name for name, connection in now.items() if before.get(name) != connection}

    def _connections_of(self, bounds: Bounds) -> dict[str, object]:
        reader = self._reader()
        return {name: reader.connection(name) for name in {queue.broker_name for queue in bounds}}

    def newest_store_ms(self, offsets: Offsets, bounds: Bounds, deadline: Deadline) -> dict[MessageQueue, int]:
        """Return the newest store times that the bounds do not show, for the queues of ``queues_needing_store_time`` and
        ``fully_expired``. Queues whose broker does not answer are omitted.
        """
        last_read = {queue: offsets.positions[queue] - 1 for queue in queues_needing_store_time(offsets, bounds)}
        deadline = with_client_overhead(deadline, len(last_read))
        stored = self._reader().store_times_ms(self._group, last_read, deadline) if last_read else {}
        newest_ms = {queue: max(stored_ms, bounds[queue].last_update_ms) for queue, stored_ms in stored.items()}
        return newest_ms | dict.fromkeys(fully_expired(offsets, bounds), self._now_ms())

    def _with_newer_messages(
        self,
        offsets: Offsets,
        queues: Iterable[MessageQueue],
        deadline: Deadline,
        unanswered: dict[TopicBroker, RocketMQError],
    ) -> list[MessageQueue]:
        """Return those of ``queues`` whose message before the position is newer than the known store time."""
        newest_read_ms = {queue: offsets.newest_store_ms[queue] for queue in queues}
        if not newest_read_ms:
            return []
        deadline = with_client_overhead(deadline, len(newest_read_ms))

        def note_error(error: RocketMQError, queue: MessageQueue) -> None:
            unanswered.setdefault(topic_broker(queue), error)

        reader = self._reader()
        first_newer = reader.search_offsets(
            {queue: mark + 1 for queue, mark in newest_read_ms.items()}, deadline, note_error
        )
        suspected = sorted(queue for queue, offset in first_newer.items() if offset < offsets.positions[queue])
        last_read = {
            queue: offsets.positions[queue] - 1 for queue in suspected if topic_broker(queue) not in unanswered
        }
        # Old brokers answer with the nearest message, so all of several hundred queues may be suspected: one call asks for all.
        stored = reader.store_times_ms(self._group, last_read, deadline) if last_read else {}
        recreated = []
        for queue, offset in last_read.items():
            if topic_broker(queue) in unanswered:
                continue
            # The clocks of masters differ, and old brokers answer with the nearest message, so the message before the position
            # decides. If compaction has removed it, the first newer message decides.
            try:
                stored_ms = stored.get(queue)
                if stored_ms is None:
                    stored_ms = reader.store_time_ms(self._group, queue, offset, deadline)
                if stored_ms is None:
                    stored_ms = reader.store_time_ms(self._group, queue, first_newer[queue], deadline)
            except RocketMQError as e:
                note_error(e, queue)
                continue
            if stored_ms is not None and stored_ms > newest_read_ms[queue]:
                recreated.append(queue)
        return recreated
