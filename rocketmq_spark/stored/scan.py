"""A scan reads the ids that are stored after noted ends, and waits until no further message of an earlier attempt can arrive.

A message that a broker acknowledged may not be in the broker's index yet, and messages of an earlier attempt may still be on
their way. So a scan has four steps. First, a scan reads the end of each log, waits until the index has reached this end, and
requests the ends of the queues. Second, it reads the ids up to the ends of the queues. Third, it waits for the settle time, in
which every broker must answer. Fourth, it reads the ids that were stored during the settle time.

``LiveStoredIds`` is for a producer with ``confirm_ambiguous``, which scans before it repeats a send that may be stored.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from rocketmq_spark.base.clock import Clock, Deadline
from rocketmq_spark.base.codes import Response
from rocketmq_spark.errors import CallTimeout, ClosedError, RocketMQError, UnprovedError
from rocketmq_spark.model import LogState, MessageQueue, OffsetRange, QueueBounds, QueueEnd
from rocketmq_spark.ports import OffsetReader, RouteReader
from rocketmq_spark.stored.ends import OR_AT_LEAST_ONCE, QueueEnds, last_store_times

logger = logging.getLogger(__name__)

# If a broker did not answer, or its log was locked, for longer than ``MAX_GAP_S``, its settle time begins again. The broker may
# have hung, with unprocessed requests in its sockets and threads.
MAX_GAP_S = 2.0
_POLL_S = 0.5
# A scan waits ``timeout_s`` for a broker that does not answer. For a broker that answers but does not settle, a scan waits this
# many settle times longer.
_UNSETTLED_FACTOR = 3

ReadIds = Callable[[Sequence[OffsetRange]], Iterator[pa.Array]]


@dataclass(frozen=True, slots=True)
class ScanTools:
    """The parts of a scan: the readers, the ``group`` of its requests, ``timeout_s`` for a broker that does not answer,
    ``settle_s`` for messages that are on their way, and ``request_timeout_s`` for one request.
    """

    routes: RouteReader
    offsets: OffsetReader
    read: ReadIds
    timeout_s: float
    settle_s: float
    request_timeout_s: float = 3.0
    group: str = ""
    clock: Clock = field(default_factory=Clock)


class StoredIdScan:
    """One scan of the messages after the ends ``start_ends``. The scan fails if a topic was created again after ``noted_ends``:
    ends that were noted earlier, or ``start_ends`` by default.
    """

    def __init__(self, tools: ScanTools, start_ends: QueueEnds, noted_ends: Sequence[QueueEnds] | None = None) -> None:
        self._tools = tools
        self._start_ends = start_ends
        self._noted_ends = (start_ends,) if noted_ends is None else noted_ends
        self._broker_names = sorted(start_ends.masters)
        self._clock = tools.clock
        self._last_answer_s: dict[str, float] = {}
        self._settle_start_s: dict[str, float] = {}
        self._indexes_after_replication_by_broker: dict[str, bool] = {}

    def run(self, on_ids: Callable[[pa.Array], None]) -> dict[MessageQueue, int]:
        """Call ``on_ids`` with the ids of all messages after the ends ``start_ends``. Returns the later ends, up to which ids
        were read.

        Raises ``UnprovedError`` if the ids cannot be proved to be complete, and the error of a broker that did not answer in
        time.
        """
        first_ends = self._fetch_ends()
        self._read(self._start_ends.ranges(first_ends), on_ids)
        self._wait_until_settled()
        last_ends = self._fetch_ends()
        QueueEnds(first_ends, {}).check_bounds({queue: QueueBounds(0, end, 0) for queue, end in last_ends.items()})
        self._read(QueueEnds(first_ends, {}).ranges(last_ends), on_ids)
        self._retry(self._check_not_recreated)
        return last_ends

    def _read(self, ranges: Sequence[OffsetRange], on_ids: Callable[[pa.Array], None]) -> None:
        if ranges:
            for ids in self._tools.read(ranges):
                on_ids(ids)

    def _fetch_ends(self) -> dict[MessageQueue, int]:
        """Wait until the indexes contain everything that the logs contain now, and return the ends of all queues."""
        log_ends: dict[str, int] = {}
        return self._retry(lambda: self._try_fetch_ends(log_ends))

    def _try_fetch_ends(self, log_ends: dict[str, int]) -> dict[MessageQueue, int] | None:
        self._check_masters()
        deadline = Deadline.after(self._tools.request_timeout_s)
        for name, state in self._fetch_log_states(deadline).items():
            if isinstance(state, RocketMQError):
                raise state
            log_end = log_ends.setdefault(name, state.max_offset)
            is_behind = (
                state.index_lag > 0 if self._indexes_after_replication(name, deadline) else state.indexed_end < log_end
            )
            if is_behind:
                return None
        bounds = self._tools.offsets.bounds(self._start_ends.end_offsets, Deadline.after(self._tools.request_timeout_s))
        self._start_ends.check_bounds(bounds)
        return {queue: bounds[queue].max_offset for queue in self._start_ends.end_offsets}

    def _check_not_recreated(self) -> dict[MessageQueue, int]:
        """Check that topics were not created again. If a topic was created again, other producers may have filled a queue
        beyond a noted end, and then the ends of the queues do not show that messages are missing. This check is the last step,
        because it must be valid for all ids that were read.
        """
        for noted_ends in self._noted_ends:
            deadline = Deadline.after(self._tools.request_timeout_s)
            if noted_ends.last_offsets:
                noted_ends.check_store_times(
                    self._tools.offsets.store_times_ms(
                        self._tools.group, noted_ends.last_offsets, deadline, on_error=_raise
                    )
                )
        return {}

    def _check_masters(self) -> None:
        """Checks that every broker still has its noted master. Uses the current routes, or cached routes if no name server
        answers.
        """
        for topic in self._start_ends.topics:
            try:
                self._tools.routes.get(topic, MAX_GAP_S, Deadline.after(self._tools.request_timeout_s))
            except RocketMQError as e:
                if not e.retriable:
                    raise
                logger.info("could not refresh the route of %s, using the cached one: %s", topic, e)
        for name, noted_address in self._start_ends.masters.items():
            address = self._tools.routes.address(name)
            if address != noted_address:
                raise UnprovedError(
                    f"the master of broker {name} is {address}, and was {noted_address} when the batch began: the new master may "
                    "lack messages that the old master stored",
                    remedy=f"Bring the master back, {OR_AT_LEAST_ONCE}",
                )

    def _indexes_after_replication(self, name: str, deadline: Deadline) -> bool:
        """Whether the broker indexes only messages that its slaves have confirmed. The broker does not report how many messages
        it holds back, so a slave that hangs for longer than the settle time hides messages (docs/exactly-once.md).
        """
        if name not in self._indexes_after_replication_by_broker:
            self._indexes_after_replication_by_broker[name] = self._tools.offsets.broker_indexes_after_replication(
                name, deadline
            )
        return self._indexes_after_replication_by_broker[name]

    def _fetch_log_states(self, deadline: Deadline) -> Mapping[str, LogState | RocketMQError]:
        states = self._tools.offsets.log_states(self._broker_names, deadline)
        for name, state in states.items():
            if isinstance(state, RocketMQError):
                continue
            # The gap ends at the time of this broker's answer, because other brokers may have delayed the round. A long lock of
            # the log restarts the settle time, too. While one send holds the log's lock, because the disk hangs, the broker drops
            # the waiting sends from its request queue. So the queue does not show the sends that wait for the lock.
            has_gap = name not in self._last_answer_s or state.measured_s - self._last_answer_s[name] > MAX_GAP_S
            if has_gap or state.lock_ms > 1000 * MAX_GAP_S:
                self._settle_start_s[name] = state.measured_s
            self._last_answer_s[name] = state.measured_s
        return states

    def _wait_until_settled(self) -> None:
        """Wait until every broker has answered during the whole settle time, and has no send in its queue that arrived before
        the end of this time.
        """
        wait_start_s = self._clock.now()
        while True:
            states = self._fetch_log_states(Deadline.after(self._tools.request_timeout_s))
            unsettled_brokers = [name for name in self._broker_names if not self._is_settled(name, states[name])]
            if not unsettled_brokers:
                return
            name, now = unsettled_brokers[0], self._clock.now()
            if now - max(wait_start_s, self._last_answer_s.get(name, wait_start_s)) > self._tools.timeout_s:
                raise CallTimeout(
                    f"broker {name} does not answer, so that what is stored there cannot be proved",
                    remedy=f"Start broker {name}, {OR_AT_LEAST_ONCE}",
                )
            if now - wait_start_s > self._tools.timeout_s + _UNSETTLED_FACTOR * self._tools.settle_s:
                raise CallTimeout(
                    f"broker {name} answers only sometimes, or keeps sends waiting for its log for long, so that "
                    "what is stored there cannot be proved",
                    remedy=f"See what keeps broker {name} busy, {OR_AT_LEAST_ONCE}",
                )
            self._clock.sleep(_POLL_S)

    def _is_settled(self, name: str, state: LogState | RocketMQError) -> bool:
        if isinstance(state, RocketMQError):
            if not state.retriable:
                raise state
            return False
        settled_duration_s = state.measured_s - self._settle_start_s[name] - self._tools.settle_s
        return settled_duration_s >= 0 and state.head_wait_ms <= 1000 * settled_duration_s

    def _retry(self, attempt: Callable[[], dict[MessageQueue, int] | None]) -> dict[MessageQueue, int]:
        """Repeat ``attempt`` until it returns a value. After the timeout, raise the last error of ``attempt``."""
        end_s, first_error = self._clock.now() + self._tools.timeout_s, None
        for pause in self._clock.pauses():
            error: RocketMQError | None = None
            try:
                value = attempt()
                if value is not None:
                    return value
            except RocketMQError as e:
                if not (e.retriable or isinstance(e, UnprovedError)):
                    raise
                error = e
                if first_error is None:
                    logger.warning("what is stored cannot be read yet, waiting for the brokers: %s", e)
            first_error = error or first_error
            if self._clock.now() >= end_s:
                raise self._timeout_error(error)
            self._clock.sleep(pause)
        raise AssertionError("a clock yields pauses forever")

    def _timeout_error(self, error: RocketMQError | None) -> RocketMQError:
        if error is None:
            error = CallTimeout("a broker did not index its stored messages in time")
        if error.remedy is None:
            error.remedy = f"Start the brokers {', '.join(self._broker_names)}, {OR_AT_LEAST_ONCE}"
        return error


def _raise(error: RocketMQError, _: MessageQueue) -> None:
    raise error


# A function that makes the ``ScanTools`` of one scan from a timeout in seconds and a clock.
MakeTools = Callable[[float, Clock], ScanTools]
# The maximum age of noted ends before they are requested again. From older ends, scans would take long, and retention might
# delete messages that a scan must read.
NOTE_MAX_AGE_S = 60.0
# If a broker did not report the ends of queues, they are requested again only after this time.
_UNAVAILABLE_PAUSE_S = 5.0


class NotedStoredIds:
    """Implements ``producer.ambiguity.StoredIds`` for queues whose ends were noted before anything was sent."""

    def __init__(self, make_tools: MakeTools, ends: QueueEnds) -> None:
        self._make_tools = make_tools
        self._ends = ends
        self._stop_event = threading.Event()

    def end(self, queue: MessageQueue) -> QueueEnd:
        return QueueEnd(self._ends.end_offsets.get(queue, 0), self._ends.masters.get(queue.broker_name, ""))

    def find_stored(
        self, from_offsets: Mapping[MessageQueue, int], master: str, ids: Collection[str], deadline: Deadline
    ) -> set[str]:
        (name,) = {queue.broker_name for queue in from_offsets}
        id_array, found_ids = pa.array(sorted(ids), pa.string()), set[str]()

        def take(stored_ids: pa.Array) -> None:
            found_ids.update(stored_ids.filter(pc.is_in(stored_ids, id_array)).to_pylist())

        tools = self._make_tools(max(1.0, deadline.remaining()), Clock(sleep=self._sleep))
        StoredIdScan(tools, QueueEnds(from_offsets, {name: master}), self._noted_ends(from_offsets, master)).run(take)
        return found_ids

    def _noted_ends(self, queues: Collection[MessageQueue], master: str) -> list[QueueEnds]:
        """Ends of queues that were noted before the sends began. These ends show whether a topic was created again."""
        return [self._ends.ends_of_queues(queues)]

    def stop(self) -> None:
        self._stop_event.set()

    def _sleep(self, seconds: float) -> None:
        if self._stop_event.wait(seconds):
            raise ClosedError("the producer was closed")


class _EndsNote(NamedTuple):
    """The ends of a topic's queues on one broker and the master that reported the ends, or the error. ``previous_note`` is the
    earlier note, which is kept because a send may have begun before this note.
    """

    noted_s: float
    master: str
    ends: QueueEnds
    error: RocketMQError | None = None
    previous_note: _EndsNote | None = None


class LiveStoredIds(NotedStoredIds):
    """Implements ``StoredIds`` for a producer that sends to any queue. The ends of queues are requested before the first send to
    a queue, and again when they are a minute old, or when the broker has another master. One request asks for all queues of a
    topic on a broker.
    """

    def __init__(self, make_tools: MakeTools, clock: Clock | None = None) -> None:
        super().__init__(make_tools, QueueEnds({}, {}))
        self._clock = clock or Clock()
        self._tools = make_tools(0.0, self._clock)
        self._notes: dict[tuple[str, str], _EndsNote] = {}
        self._unavailable_notes: dict[str, _EndsNote] = {}
        # Each broker has its own lock, so that a thread that waits for a hanging broker does not delay sends to other brokers.
        self._broker_locks: dict[str, threading.Lock] = {}

    def end(self, queue: MessageQueue) -> QueueEnd:
        master = self._tools.routes.address(queue.broker_name)
        note = self._cached_note(queue, master)
        if note is None:
            with self._broker_locks.setdefault(queue.broker_name, threading.Lock()):
                note = self._cached_note(queue, master)
                if note is None:
                    note = self._notes[queue.topic, queue.broker_name] = self._request_ends(queue, master)
        if note.error is not None:
            raise note.error.with_traceback(None)
        return QueueEnd(note.ends.end_offsets[queue], master)

    def _cached_note(self, queue: MessageQueue, master: str) -> _EndsNote | None:
        note = self._notes.get((queue.topic, queue.broker_name))
        if note is None or note.master != master or not (note.error or queue in note.ends.end_offsets):
            return None
        return (
            note
            if self._clock.now() - note.noted_s < (NOTE_MAX_AGE_S if note.error is None else _UNAVAILABLE_PAUSE_S)
            else None
        )

    def _request_ends(self, queue: MessageQueue, master: str) -> _EndsNote:
        previous_note = self._notes.get((queue.topic, queue.broker_name))
        if previous_note is not None:
            previous_note = (
                previous_note.previous_note
                if previous_note.error is not None
                else previous_note._replace(previous_note=None)
            )
        unavailable_note = self._unavailable_notes.get(queue.broker_name)
        if (
            unavailable_note is not None
            and unavailable_note.master == master
            and self._clock.now() - unavailable_note.noted_s < _UNAVAILABLE_PAUSE_S
        ):
            # The error of the last request is used, because a request for each further topic would wait for the broker that
            # hangs.
            return unavailable_note._replace(previous_note=previous_note)
        try:
            ends, error = self._request_topic_ends(queue), None
        except RocketMQError as e:
            ends, error = QueueEnds({}, {}), e
        note = _EndsNote(self._clock.now(), master, ends, error, previous_note)
        if isinstance(error, CallTimeout):
            self._unavailable_notes[queue.broker_name] = note
        return note

    def _noted_ends(self, queues: Collection[MessageQueue], master: str) -> list[QueueEnds]:
        newest_notes = [self._notes.get(key) for key in {(queue.topic, queue.broker_name) for queue in queues}]
        notes = [
            note
            for newest in newest_notes
            if newest is not None
            for note in (newest, newest.previous_note)
            if note is not None
        ]
        return [note.ends.ends_of_queues(queues) for note in notes if note.master == master]

    def _request_topic_ends(self, queue: MessageQueue) -> QueueEnds:
        deadline = Deadline.after(self._tools.request_timeout_s)
        try:
            bounds = self._tools.offsets.bounds(self._queues_to_request(queue, deadline), deadline)
        except RocketMQError as e:
            if e.broker_code != Response.TOPIC_NOT_EXIST:
                raise
            return QueueEnds({queue: 0}, {})  # the send will create the topic
        if queue not in bounds:
            raise UnprovedError(
                f"the broker does not report the end of {queue}",
                topic=queue.topic,
                queue=str(queue),
                remedy="Give the topic as many queues for reading as for writing",
            )
        return QueueEnds(
            {counted_queue: bounds[counted_queue].max_offset for counted_queue in bounds}, {}, last_store_times(bounds)
        )

    def _queues_to_request(self, queue: MessageQueue, deadline: Deadline) -> set[MessageQueue]:
        """Return the queue, and the topic's other queues on the same broker, because one request can ask for all of them. The
        other queues come from the route, or from the previous note if no name server answers.
        """
        note = self._notes.get((queue.topic, queue.broker_name))
        try:
            route = self._tools.routes.get(queue.topic, NOTE_MAX_AGE_S, deadline.within(deadline.remaining() / 2))
        except RocketMQError as e:
            if not e.retriable:
                raise
            logger.info("could not refresh the route of %s: %s", queue.topic, e)
            return {queue} if note is None else {queue, *note.ends.end_offsets}
        return {
            queue,
            *(other_queue for other_queue in route.readable_queues() if other_queue.broker_name == queue.broker_name),
        }
