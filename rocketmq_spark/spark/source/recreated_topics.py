"""Topics that were deleted and created again under the same name, and queues that a narrowed topic no longer reads.

The queues of a recreated topic start at offset 0. While they end before the old positions, their ends show it. After that
only time does: every message of the new topic is younger than all of the old one. So offsets carry a *mark* for each queue,
the newest store time seen, and the last message that was read must not be younger than its mark.

For most queues the statistics that every plan asks for are enough. ``RecreationWatch`` asks brokers about the rest: one
question per topic and broker, since a topic's queues are deleted together there. It asks about all such queues when a run
begins, when a broker comes back and may have lost part of its store (a new connection shows it), when a queue comes back after
its topic was narrowed, and when one queue has shown a sign.

``RemovedQueues`` finds queues that their living broker no longer reads because the topic was narrowed: what they still hold is
given up.
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

# A topic and a broker that has queues of it.
TopicBroker = tuple[str, str]
# Retention is hours; brokers whose disks are full delete sooner, but not a new topic down to the very offset of the old one.
_UNCHANGED_MS = 60_000
# What a question costs on this side, on a slow and busy machine: 100,000 of them take longer than one request may.
CLIENT_OVERHEAD_S = 0.0001


class RecreationEvidence(enum.Enum):
    """What a queue's statistics say of its past."""

    EXPIRED = "nothing that was read is left in it"
    NO_STORE_TIME = "it has no mark"
    SAME = "its newest message is not younger than the mark"
    ENDS_BEFORE = "it ends before the position"
    RECREATED = "the message before the position is its newest one, and younger than the mark"
    UNDECIDED = "only the message before the position shows it"


def evidence_of(position: int, mark: int, bounds: QueueBounds) -> RecreationEvidence:
    """What statistics say of a queue that was read up to ``position``; a ``mark`` of 0 is none."""
    if position > bounds.max_offset:
        return RecreationEvidence.ENDS_BEFORE
    if position <= bounds.min_offset:
        return RecreationEvidence.EXPIRED
    if not mark:
        return RecreationEvidence.NO_STORE_TIME
    newest_ms = bounds.last_update_ms
    if newest_ms <= 0:  # a Proxy does not tell it
        return RecreationEvidence.UNDECIDED
    if newest_ms <= mark:
        return RecreationEvidence.SAME
    return RecreationEvidence.RECREATED if position == bounds.max_offset else RecreationEvidence.UNDECIDED


def evidence_by_queue(read: Offsets, bounds: Bounds) -> dict[MessageQueue, RecreationEvidence]:
    """Of all queues that have a position and bounds."""
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
    """The open queues to ask about.

    ``watched`` shares were looked at a moment ago. One of their open queues stands for all, and none is needed where
    another queue proves that the topic is the same, or one of them ``stayed``; all are asked about where one shows that it
    is not.
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
    """The queues that were made again: those that ``seen`` shows or brokers report, and those without a mark beside them."""
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
    """Queues whose marks are times of messages, which are asked for.

    A newest message that lies behind the position may be older than what was read, when the broker's clock was put back in
    between. Of a compaction topic whose log expired statistics tell none. Where the server reports no store times at all, it
    is one queue of each topic and broker that has no mark to go by.
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
    """Queues without a mark of which nothing is left: what ever stands before their positions is of another topic."""
    return [
        queue
        for queue, position in read.positions.items()
        if queue in bounds
        and queue not in read.newest_store_ms
        and bounds[queue].last_update_ms < 0
        and 0 < position <= bounds[queue].min_offset
    ]


def with_client_overhead(deadline: Deadline, questions: int) -> Deadline:
    """With time for this side's work: brokers are given none for it."""
    return Deadline(deadline.at + questions * CLIENT_OVERHEAD_S)


def topic_broker(queue: MessageQueue) -> TopicBroker:
    return queue[:2]


def topic_brokers(queues: Iterable[MessageQueue]) -> frozenset[TopicBroker]:
    return frozenset(queue[:2] for queue in queues)


class RecreationResult(NamedTuple):
    """Queues that were made again, and the shares of which that is not known because a broker did not answer."""

    recreated: list[MessageQueue]
    unanswered: dict[TopicBroker, RocketMQError]


class RecreationWatch:
    """Looks for queues that were made again, plan after plan of one run. ``now_ms`` is the driver's clock."""

    def __init__(self, reader: Callable[[], OffsetReader], group: str, now_ms: Callable[[], int] = epoch_ms) -> None:
        self._reader = reader
        self._group = group
        self._now_ms = now_ms
        self._checked: frozenset[TopicBroker] = frozenset()
        self._last_check: tuple[int, Bounds] = (0, {})  # when the last look was, and what it saw
        self._connections: dict[str, object] = {}

    def start(self, bounds: Bounds) -> None:
        """The run begins with the queues as they are now: ``bounds``, which came a moment ago, are what its marks come from."""
        self._connections = self._connections_of(bounds)
        self._checked, self._last_check = topic_brokers(bounds), (self._now_ms(), bounds)

    def check(
        self, read: Offsets, bounds: Bounds, deadline: Deadline, connections: Mapping[str, object] | None = None
    ) -> RecreationResult:
        """What became of the queues of ``read``: whether they are those of another topic, or of a store that was filled anew.

        ``connections`` are those of before ``bounds`` were asked for, by broker; without them those of now.
        """
        interrupted = self._reconnected_brokers(bounds, connections or {})
        # A queue that was missing at the last check may be the only queue of its topic with a position from before a recreation.
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
        # Of what does not answer nothing is moved: its queues are left out of the plan, proven or not.
        changed = [queue for queue in recreated_queues(seen, found) if topic_broker(queue) not in unanswered]
        # What was found is found again, as often as a plan begins here because it waits for more; a queue that ended before
        # its position may be refilled by then.
        ended = topic_brokers(queue for queue, one in seen.items() if one is RecreationEvidence.ENDS_BEFORE)
        self._checked = topic_brokers(bounds) - unanswered.keys() - topic_brokers(changed) - ended
        self._last_check = self._now_ms(), bounds
        return RecreationResult(changed, unanswered)

    def _unchanged_since_last_check(self, bounds: Bounds) -> Callable[[MessageQueue], bool]:
        """Whether messages were removed from a queue before the last look, and none since: a topic that is made again begins at
        0, and it takes far longer than this until its first messages expire.

        Not at a Proxy, which hides that a broker came back: one that lost the end of its store has its minimum still.
        """
        when_ms, before = self._last_check
        if not 0 <= self._now_ms() - when_ms < _UNCHANGED_MS:
            return lambda queue: False

        def stayed(queue: MessageQueue) -> bool:
            there, was = bounds[queue], before.get(queue)
            return was is not None and 0 < there.min_offset == was.min_offset and there.last_update_ms != 0

        return stayed

    def _reconnected_brokers(self, bounds: Bounds, connections: Mapping[str, object]) -> set[str]:
        """Brokers that were connected to anew since what the last look saw, perhaps because they crashed and came back.

        What is seen now may be older than the newest connection: the next look then counts that once more.
        """
        before, now = self._connections, self._connections_of(bounds)
        self._connections = {**now, **{name: known for name, known in connections.items() if name in now}}
        return {name for name, connection in now.items() if before.get(name) != connection}

    def _connections_of(self, bounds: Bounds) -> dict[str, object]:
        reader = self._reader()
        return {name: reader.connection(name) for name in {queue.broker_name for queue in bounds}}

    def newest_store_ms(self, read: Offsets, bounds: Bounds, deadline: Deadline) -> dict[MessageQueue, int]:
        """Marks of which statistics do not say enough, as far as brokers answer: see ``queues_to_stamp`` and
        ``fully_expired``."""
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
        """Those of ``asked`` whose message before the position is younger than the mark."""
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
        # Old brokers take the nearest message, so that each of hundreds of queues may be suspected: all are asked at once.
        stored = reader.store_times_ms(self._group, last, deadline) if last else {}
        found = []
        for queue, offset in last.items():
            if topic_broker(queue) in unanswered:
                continue
            # Clocks of masters differ, and old brokers take the nearest message: the one before the position decides.
            # Compaction may have removed that one; then the first younger one does.
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
