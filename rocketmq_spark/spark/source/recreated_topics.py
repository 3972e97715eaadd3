"""Finds topics that were deleted and created again under the same name.

The queues of a recreated topic start at offset 0. A queue that ends before the position of the query was recreated. If a
recreated queue has grown past the position, only store times show that it was recreated, because every message of the new topic
is newer than all messages of the old topic. So the offsets record the newest store time of each queue. If the message before the
position is newer than the recorded time, the queue was recreated.

For most queues, the bounds that each plan fetches are enough. ``RecreationWatch`` asks brokers about the other queues. It asks
about one queue of each topic and broker, because a broker deletes all its queues of a topic together. ``RecreationWatch`` asks
about all of the other queues when a run begins, when the client connected to a broker again (the broker may have lost part of its
store in a crash), when a queue returns after its topic had fewer queues, and when one queue of the topic was recreated.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from itertools import starmap
from operator import itemgetter, ne
from typing import NamedTuple

from rocketmq_spark.base.clock import Deadline, epoch_ms
from rocketmq_spark.errors import RocketMQError, TopicNotFound
from rocketmq_spark.model import MessageQueue, QueueBounds
from rocketmq_spark.ports import OffsetReader
from rocketmq_spark.spark.source.offsets import Bounds, Offsets

# The name of a topic, and of a broker that has queues of the topic.
TopicBroker = tuple[str, str]
# By broker, the first and the last connection from which bounds may come. The two connections are equal, unless the connection
# changed while bounds were fetched.
Connections = Mapping[str, tuple[object, object]]
# The maximum age of a check with which minimum offsets are compared. If a queue still has the same minimum offset, and the offset
# is not 0, its topic was not recreated, because the minimum offset of a new topic stays 0 until retention deletes messages.
# This takes hours. A broker with a full disk deletes messages sooner, but a new topic would have to reach exactly the minimum
# offset of the old topic.
_MAX_CHECK_AGE_MS = 60_000
# The minimum age of messages that retention has deleted. If a topic is created again between a poll and the plan that uses the
# poll, the new messages are younger than this.
_MIN_EXPIRED_AGE_MS = 60_000
# The time that the client itself needs for a request about one queue on a slow machine. For 100,000 requests, this time alone
# is longer than the timeout.
CLIENT_OVERHEAD_S = 0.0001


class RecreationEvidence(enum.Enum):
    """What the bounds of a queue show about its past."""

    EXPIRED = "all messages that were read are deleted"
    NO_STORE_TIME = "no store time is known"
    SAME = "the newest message is not newer than the known store time"
    ENDS_BEFORE = "the queue ends before the position"
    RECREATED = "the message before the position is the newest message, and newer than the known store time"
    UNDECIDED = "only the message before the position can show whether the queue was recreated"


# The evidence of a queue that was not recreated, or about which nothing can be known.
_HEALTHY = (RecreationEvidence.SAME, RecreationEvidence.EXPIRED, RecreationEvidence.NO_STORE_TIME)


def evidence_of(position: int, known_store_ms: int, bounds: QueueBounds) -> RecreationEvidence:
    """Return what the bounds show of a queue that was read up to ``position``. ``known_store_ms`` is the known store time of the
    queue, or 0.
    """
    if position > bounds.max_offset:
        return RecreationEvidence.ENDS_BEFORE
    if position <= bounds.min_offset:
        return RecreationEvidence.EXPIRED
    if not known_store_ms:
        return RecreationEvidence.NO_STORE_TIME
    newest_ms = bounds.last_update_ms
    if newest_ms <= 0:  # a Proxy does not report the store time
        return RecreationEvidence.UNDECIDED
    if newest_ms <= known_store_ms:
        return RecreationEvidence.SAME
    return RecreationEvidence.RECREATED if position == bounds.max_offset else RecreationEvidence.UNDECIDED


def evidence_by_queue(offsets: Offsets, bounds: Bounds) -> dict[MessageQueue, RecreationEvidence]:
    """Return the evidence for each queue that has a position and bounds."""
    evidence: dict[MessageQueue, RecreationEvidence] = {}
    known_store_times_ms = offsets.newest_store_ms
    same, undecided = RecreationEvidence.SAME, RecreationEvidence.UNDECIDED
    for queue, position in offsets.positions.items():
        if (queue_bounds := bounds.get(queue)) is None:
            continue
        known_store_ms = known_store_times_ms.get(queue, 0)
        min_offset, max_offset, newest_ms = queue_bounds
        # Most queues of a healthy topic are in the first case (no new messages) or in the second case (new messages). Both cases
        # are decided here, because a function call for each queue takes time.
        if min_offset < position <= max_offset and 0 < newest_ms <= known_store_ms:
            evidence[queue] = same
        elif min_offset < position < max_offset and 0 < known_store_ms < newest_ms:
            evidence[queue] = undecided
        else:
            evidence[queue] = evidence_of(position, known_store_ms, queue_bounds)
    return evidence


def queues_to_probe(
    evidence: Mapping[MessageQueue, RecreationEvidence],
    checked_pairs: Collection[TopicBroker],
    has_unchanged_queue: Callable[[Iterable[MessageQueue]], bool] = lambda queues: False,
) -> list[MessageQueue]:
    """Return the undecided queues about which brokers must be asked.

    ``checked_pairs`` has the pairs of a topic and a broker that the last plan checked. For a checked pair, only one undecided
    queue is returned. No queue of a checked pair is returned if the evidence of one of its queues is ``SAME``, or if
    ``has_unchanged_queue`` is true for its undecided queues. All undecided queues are returned for a pair that was not checked,
    or that has a recreated queue.
    """
    undecided_by_pair: dict[TopicBroker, list[MessageQueue]] = {}
    unchanged_pairs, recreated_pairs = set[TopicBroker](), set[TopicBroker]()
    for queue, queue_evidence in evidence.items():
        if queue_evidence is RecreationEvidence.UNDECIDED:
            undecided_by_pair.setdefault(queue[:2], []).append(queue)
        elif queue_evidence is RecreationEvidence.SAME:
            unchanged_pairs.add(queue[:2])
        elif queue_evidence is RecreationEvidence.ENDS_BEFORE or queue_evidence is RecreationEvidence.RECREATED:
            recreated_pairs.add(queue[:2])
    probed_queues: list[MessageQueue] = []
    for pair, queues in undecided_by_pair.items():
        if pair not in checked_pairs or pair in recreated_pairs:
            probed_queues += queues
        elif pair not in unchanged_pairs and not has_unchanged_queue(queues):
            probed_queues.append(min(queues))
    return probed_queues


def recreated_queues(
    evidence: Mapping[MessageQueue, RecreationEvidence], queues_with_newer_message: Iterable[MessageQueue]
) -> list[MessageQueue]:
    """Return the queues that were recreated: ``queues_with_newer_message``, and the queues that the evidence proves to be
    recreated. If a queue has no known store time, it counts as recreated if another queue of its topic and broker was recreated.
    """
    proven_queues = {*queues_with_newer_message, *_queues_with_evidence(evidence, RecreationEvidence.RECREATED)}
    recreated_pairs = topic_broker_pairs(
        [*proven_queues, *_queues_with_evidence(evidence, RecreationEvidence.ENDS_BEFORE)]
    )
    if not recreated_pairs:
        return []
    return sorted(
        proven_queues.union(
            q
            for q, queue_evidence in evidence.items()
            if queue_evidence is RecreationEvidence.NO_STORE_TIME and topic_broker(q) in recreated_pairs
        )
    )


def _queues_with_evidence(
    evidence: Mapping[MessageQueue, RecreationEvidence], kind: RecreationEvidence
) -> list[MessageQueue]:
    return [queue for queue, queue_evidence in evidence.items() if queue_evidence == kind]


def queues_needing_store_time(offsets: Offsets, bounds: Bounds) -> list[MessageQueue]:
    """Return the queues for which the store time of the last read message must be fetched, because the bounds do not show it.

    If a queue has unread messages, its newest message may have an older time than the messages that were read, because the clock
    of the broker may have been set back. For a compaction topic whose log has expired, brokers report no time. If the server
    reports no store times at all, one queue of each topic and broker is enough, and no queue is needed if a queue of the same
    topic and broker already has a known store time.
    """
    candidates = {
        queue: queue_bounds
        for queue, position in offsets.positions.items()
        if (queue_bounds := bounds.get(queue)) is not None and position > queue_bounds.min_offset
        if position < queue_bounds.max_offset or queue_bounds.last_update_ms <= 0
    }
    if not candidates:
        return []
    queues_with_time = [q for q, queue_bounds in candidates.items() if queue_bounds.last_update_ms]
    queues_without_time = [q for q, queue_bounds in candidates.items() if not queue_bounds.last_update_ms]
    known_pairs = topic_broker_pairs(queue for queue in queues_without_time if queue in offsets.newest_store_ms)
    lowest_queues = {
        topic_broker(queue): queue
        for queue in sorted(queues_without_time, reverse=True)
        if topic_broker(queue) not in known_pairs
    }
    return sorted([*queues_with_time, *lowest_queues.values()])


def expired_queues(offsets: Offsets, bounds: Bounds) -> list[MessageQueue]:
    """Return the queues that have no known store time, and of which all messages are deleted. If a returned queue later has a
    message before its position, the queue was recreated.
    """
    return [
        queue
        for queue, position in offsets.positions.items()
        if queue in bounds
        and queue not in offsets.newest_store_ms
        and bounds[queue].last_update_ms < 0
        and 0 < position <= bounds[queue].min_offset
    ]


def with_client_overhead(deadline: Deadline, request_count: int) -> Deadline:
    """Return ``deadline`` plus the time that the client itself needs for ``request_count`` requests."""
    return Deadline(deadline.end_s + request_count * CLIENT_OVERHEAD_S)


# Returns the name of the broker of a queue. A poll calls this function for each queue, and ``itemgetter`` is fast.
broker_name_of: Callable[[MessageQueue], str] = itemgetter(1)
# Returns the topic and the broker of a queue. A plan calls this function for each queue, and ``itemgetter`` is fast.
topic_broker: Callable[[MessageQueue], TopicBroker] = itemgetter(0, 1)


def topic_broker_pairs(queues: Iterable[MessageQueue]) -> frozenset[TopicBroker]:
    return frozenset(map(topic_broker, queues))


class RecreationResult(NamedTuple):
    """The queues that were recreated, and the errors of brokers that did not answer whether queues of a topic were recreated.

    If ``is_decided`` is true, the bounds decided about all queues, so a second check of the same bounds would have the same
    result.
    """

    recreated_queues: list[MessageQueue]
    errors: dict[TopicBroker, RocketMQError]
    is_decided: bool = False


def _has_unchanged_queue(bounds: Bounds, bounds_before: Bounds, queues: Iterable[MessageQueue]) -> bool:
    """Whether any of ``queues`` has the same minimum offset as in ``bounds_before``, and the offset is not 0.

    A queue with an unchanged minimum offset was not recreated, because a recreated queue begins at 0, and its first messages
    expire much later. The result is False if a Proxy reported the bounds, because a Proxy hides a crash of the broker. A
    broker that lost the end of its store in a crash has the same minimum offset as before.
    """
    for queue in queues:
        queue_bounds, queue_bounds_before = bounds[queue], bounds_before.get(queue)
        if queue_bounds_before is None or queue_bounds.last_update_ms == 0:
            continue
        if 0 < queue_bounds.min_offset == queue_bounds_before.min_offset:
            return True
    return False


def _queues_recreated_since_poll(
    offset_reader: OffsetReader,
    group: str,
    store_times_ms: Mapping[MessageQueue, int],
    bounds: Bounds,
    deadline: Deadline,
) -> set[MessageQueue]:
    """Return the queues that were recreated since the broker reported ``bounds``. ``store_times_ms`` are the store times of
    messages that are not the newest message of their queue.

    Such a message is newer than the newest message of ``bounds`` only if the queue was recreated, or if the clock of the broker
    was set back. If the clock was set back, the newest message of ``bounds`` is still in the queue. If a broker does not answer
    whether it is, its error is raised.
    """
    newest_offsets = {
        queue: bounds[queue].max_offset - 1
        for queue, store_time_ms in store_times_ms.items()
        if 0 < bounds[queue].last_update_ms < store_time_ms
    }
    if not newest_offsets:
        return set()

    def raise_unless_topic_missing(error: RocketMQError, queue: MessageQueue) -> None:
        if not isinstance(error, TopicNotFound):
            raise error

    newest_ms = offset_reader.store_times_ms(group, newest_offsets, deadline, on_error=raise_unless_topic_missing)
    return {queue for queue in newest_offsets if newest_ms.get(queue) != bounds[queue].last_update_ms}


class RecreationWatch:
    """Finds recreated queues in each plan of a run. ``get_offset_reader`` returns the port, ``now_ms`` the driver's time."""

    def __init__(
        self, get_offset_reader: Callable[[], OffsetReader], group: str, now_ms: Callable[[], int] = epoch_ms
    ) -> None:
        self._get_offset_reader = get_offset_reader
        self._group = group
        self._now_ms = now_ms
        # The topics and brokers that the last check found unchanged.
        self._unchanged_pairs: frozenset[TopicBroker] = frozenset()
        # The time of the last check, and the bounds that were checked.
        self._last_check: tuple[int, Bounds] = (0, {})
        # The connections from which the bounds of the last check may come.
        self._connections: Connections = {}

    def start(self, bounds: Bounds, connections: Connections) -> None:
        """Start a run whose known store times come from ``bounds``. The first check need not ask brokers about these queues.

        ``connections`` are the connections from which ``bounds`` may come.
        """
        self._connections = connections
        self._unchanged_pairs, self._last_check = topic_broker_pairs(bounds), (self._now_ms(), bounds)

    def note_unchanged(self) -> None:
        """Note that the bounds are still the bounds of the last check, whose evidence decided about all queues."""
        self._last_check = self._now_ms(), self._last_check[1]

    def check(self, offsets: Offsets, bounds: Bounds, deadline: Deadline, connections: Connections) -> RecreationResult:
        """Return the queues of ``offsets`` that were recreated, or whose broker lost the end of its store and stored new
        messages.

        ``connections`` are the connections from which ``bounds`` may come.
        """
        reconnected_brokers = self._reconnected_brokers(connections)
        # The last check has found the topics that were recreated before it. But it could not check queues that were missing at
        # that time. So only queues that were missing may still have a position in the old topic.
        checked_at_ms, bounds_before = self._last_check
        new_queues = () if bounds.keys() <= bounds_before.keys() else bounds.keys() - bounds_before.keys()
        returned_pairs = (
            topic_broker_pairs([queue for queue in new_queues if queue in offsets.positions]) if new_queues else ()
        )
        if returned_pairs or reconnected_brokers:
            self._unchanged_pairs = frozenset(
                [
                    pair
                    for pair in self._unchanged_pairs
                    if pair not in returned_pairs and pair[1] not in reconnected_brokers
                ]
            )
        evidence = evidence_by_queue(offsets, bounds)
        if all(map(_HEALTHY.__contains__, evidence.values())):
            self._unchanged_pairs, self._last_check = topic_broker_pairs(bounds), (self._now_ms(), bounds)
            return RecreationResult([], {}, is_decided=True)
        errors: dict[TopicBroker, RocketMQError] = {}
        is_recent = 0 <= self._now_ms() - checked_at_ms < _MAX_CHECK_AGE_MS
        probed_queues = queues_to_probe(
            evidence, self._unchanged_pairs, partial(_has_unchanged_queue, bounds, bounds_before if is_recent else {})
        )
        queues_with_newer_message = self._queues_with_newer_message(offsets, probed_queues, deadline, errors)
        recreated_pairs = topic_broker_pairs(queues_with_newer_message) & self._unchanged_pairs
        if recreated_pairs:  # if one queue of a pair was recreated, all queues of the pair are checked
            undecided_queues = _queues_with_evidence(evidence, RecreationEvidence.UNDECIDED)
            other_queues = {queue for queue in undecided_queues if topic_broker(queue) in recreated_pairs} - {
                *probed_queues
            }
            queues_with_newer_message += self._queues_with_newer_message(offsets, other_queues, deadline, errors)
        evidence_kinds = evidence.values()
        is_decided = RecreationEvidence.UNDECIDED not in evidence_kinds
        if not (
            queues_with_newer_message
            or RecreationEvidence.RECREATED in evidence_kinds
            or RecreationEvidence.ENDS_BEFORE in evidence_kinds
        ):
            self._unchanged_pairs, self._last_check = (
                topic_broker_pairs(bounds) - errors.keys(),
                (self._now_ms(), bounds),
            )
            return RecreationResult([], errors, is_decided)
        # If a broker did not answer for a topic, the plan omits all queues of this topic on this broker, also queues that were
        # surely recreated.
        confirmed_queues = [
            queue
            for queue in recreated_queues(evidence, queues_with_newer_message)
            if topic_broker(queue) not in errors
        ]
        # The next plan checks recreated queues again, because a batch that waits for more messages is planned again from the same
        # start. Until the next plan, a queue that ended before its position may have grown past this position.
        pairs_ending_before = topic_broker_pairs(_queues_with_evidence(evidence, RecreationEvidence.ENDS_BEFORE))
        self._unchanged_pairs = (
            topic_broker_pairs(bounds) - errors.keys() - topic_broker_pairs(confirmed_queues) - pairs_ending_before
        )
        self._last_check = self._now_ms(), bounds
        return RecreationResult(confirmed_queues, errors, is_decided)

    def _reconnected_brokers(self, connections: Connections) -> set[str]:
        """Return the brokers that may have crashed and restarted since they reported the bounds of the last check.

        If the client connected to a broker again while bounds were fetched, the bounds may come from either connection, so both
        this check and the next check return the broker.
        """
        last_connections, self._connections = self._connections, connections
        if connections == last_connections and not any(starmap(ne, connections.values())):
            return set()
        return {
            name
            for name, (first, last) in connections.items()
            if first != last or first != last_connections.get(name, (None, None))[0]
        }

    def newest_store_ms(self, offsets: Offsets, bounds: Bounds, deadline: Deadline) -> dict[MessageQueue, int]:
        """Return the newest store times that the bounds do not show, for the queues of ``queues_needing_store_time`` and
        ``expired_queues``. A queue is omitted if its broker does not answer. A queue is also omitted if there may be another
        message at the offset than when the broker reported ``bounds``: if the client connected to the broker again, because the
        broker may have restarted, or if the topic may have been created again.
        """
        last_read_offsets = {
            queue: offsets.positions[queue] - 1 for queue in queues_needing_store_time(offsets, bounds)
        }
        deadline = with_client_overhead(deadline, len(last_read_offsets))
        newest_ms = dict.fromkeys(expired_queues(offsets, bounds), self._now_ms() - _MIN_EXPIRED_AGE_MS)
        if not last_read_offsets:
            return newest_ms
        offset_reader = self._get_offset_reader()
        store_times_ms = offset_reader.store_times_ms(self._group, last_read_offsets, deadline)
        restarted_brokers = {
            name
            for name in {*map(broker_name_of, store_times_ms)}
            if name in self._connections and offset_reader.connection(name) != self._connections[name][1]
        }
        recreated_queues = _queues_recreated_since_poll(offset_reader, self._group, store_times_ms, bounds, deadline)
        return newest_ms | {
            queue: max(store_time_ms, bounds[queue].last_update_ms)
            for queue, store_time_ms in store_times_ms.items()
            if queue.broker_name not in restarted_brokers and queue not in recreated_queues
        }

    def _queues_with_newer_message(
        self,
        offsets: Offsets,
        queues: Iterable[MessageQueue],
        deadline: Deadline,
        errors: dict[TopicBroker, RocketMQError],
    ) -> list[MessageQueue]:
        """Return those of ``queues`` in which the message before the position is newer than the known store time of the queue."""
        known_store_times_ms = {queue: offsets.newest_store_ms[queue] for queue in queues}
        if not known_store_times_ms:
            return []
        deadline = with_client_overhead(deadline, len(known_store_times_ms))

        def note_error(error: RocketMQError, queue: MessageQueue) -> None:
            errors.setdefault(topic_broker(queue), error)

        offset_reader = self._get_offset_reader()
        first_newer_offsets = offset_reader.search_offsets(
            {queue: known_ms + 1 for queue, known_ms in known_store_times_ms.items()}, deadline, note_error
        )
        suspected_queues = sorted(
            queue for queue, offset in first_newer_offsets.items() if offset < offsets.positions[queue]
        )
        last_read_offsets = {
            queue: offsets.positions[queue] - 1 for queue in suspected_queues if topic_broker(queue) not in errors
        }
        # Old brokers answer a search by time with the nearest message, so several hundred queues may be suspected without
        # reason. One call fetches the store times of all suspected queues.
        store_times_ms = (
            offset_reader.store_times_ms(self._group, last_read_offsets, deadline) if last_read_offsets else {}
        )
        queues_with_newer_message = []
        for queue, offset in last_read_offsets.items():
            if topic_broker(queue) in errors:
                continue
            # The offset that was found is no proof, because the clocks of masters differ, and old brokers answer with the nearest
            # message. The store time of the message before the position is the proof. If compaction has removed this message, the
            # store time of the first newer message is used.
            try:
                store_time_ms = store_times_ms.get(queue)
                if store_time_ms is None:
                    store_time_ms = offset_reader.store_time_ms(self._group, queue, offset, deadline)
                if store_time_ms is None:
                    store_time_ms = offset_reader.store_time_ms(
                        self._group, queue, first_newer_offsets[queue], deadline
                    )
            except RocketMQError as e:
                note_error(e, queue)
                continue
            if store_time_ms is not None and store_time_ms > known_store_times_ms[queue]:
                queues_with_newer_message.append(queue)
        return queues_with_newer_message
