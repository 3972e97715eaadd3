"""The ``OffsetReader`` port over remoting: offsets and store times of queues, many at a time."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from rocketmq_spark.base import codes
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import Response
from rocketmq_spark.base.java import LONG_MAX
from rocketmq_spark.client.broker_client import (
    AttributesByTopic,
    BrokerClient,
    BrokerCommand,
    first_queues,
    has_attribute,
    raise_if_retriable,
)
from rocketmq_spark.errors import (
    AccessDenied,
    BrokerNotFound,
    NotSupported,
    RocketMQError,
    ServerFault,
    ServiceNotAvailable,
)
from rocketmq_spark.model import LogState, MessageQueue, QueueBounds
from rocketmq_spark.wire import bodies, rpc
from rocketmq_spark.wire.header import Bytes, Command
from rocketmq_spark.wire.messages import first_stamp

# Keys of GET_BROKER_RUNTIME_INFO for the fields of ``LogState``.
_LOG_STATE_KEYS = (
    "commitLogMaxOffset",
    "dispatchBehindBytes",
    "sendThreadPoolQueueHeadWaitTimeMills",
    "pageCacheLockTimeMills",
)


# Above this number of queues with cached statistics, the statistics of topics that are in no cached route are removed.
_SWEEP_ABOVE_QUEUES = 4096


class _Stats(NamedTuple):
    """Cached statistics of a topic on a broker, for the ``queues`` that callers have requested. An answer with an equal
    ``digest`` is not parsed again, because its body may be large.
    """

    digest: bytes
    bounds: dict[MessageQueue, QueueBounds]
    queues: frozenset[MessageQueue]


class RemotingOffsetReader:
    """Implements ``ports.OffsetReader``. Requests go to masters, unless ``read_from`` selects other replicas."""

    def __init__(self, broker_client: BrokerClient) -> None:
        self.broker_client = broker_client
        self.rpc_client = broker_client.rpc_client
        self._stats_by_broker_and_topic: dict[tuple[str, str], _Stats] = {}
        # The approximate number of queues with cached statistics, and the number above which some statistics are removed.
        self._queue_count, self._sweep_threshold = 0, _SWEEP_ABOVE_QUEUES

    @property
    def late_brokers(self) -> frozenset[str]:
        return self.broker_client.late_brokers()

    def connection(self, broker_name: str) -> tuple[str, int] | None:
        connection = self.broker_client.connection(broker_name)
        return connection if connection is not None and connection[1] else None

    def bounds(
        self,
        queues: Iterable[MessageQueue],
        deadline: Deadline,
        on_error: Callable[[RocketMQError, MessageQueue], None] | None = None,
        read_from: str = "master",
        grace_s: float | None = None,
    ) -> dict[MessageQueue, QueueBounds]:
        """See ``ports.OffsetReader``. Sends one request per topic and broker, all at once.

        If the number of read queues was reduced, a broker does not report the removed queues, and the result does not have
        them. If the request for a topic and broker fails, ``on_error`` gets the error with one of the queues. A Proxy does not
        support the request, so from a Proxy the offsets are requested queue by queue.
        """
        sorted_queues = sorted(dict.fromkeys(queues))
        first_queue_by_key = first_queues(sorted_queues)
        queues_by_key: dict[tuple[str, str], set[MessageQueue]] = {key: set() for key in first_queue_by_key}
        for queue in sorted_queues:
            queues_by_key[queue.broker_name, queue.topic].add(queue)
        commands = [
            BrokerCommand(
                broker, rpc.GET_TOPIC_STATS_INFO.request(topic=self.rpc_client.name_on_wire(topic), bname=broker), topic
            )
            for broker, topic in sorted(first_queue_by_key)
        ]
        bounds: dict[MessageQueue, QueueBounds] = {}
        for command, answer in zip(
            commands, self.broker_client.request_with_grace(commands, deadline, read_from, grace_s), strict=True
        ):
            key = command.broker_name, command.topic
            if answer is None:
                bounds.update(
                    self._stats_by_broker_and_topic[key].bounds if key in self._stats_by_broker_and_topic else {}
                )
                continue
            if isinstance(answer, NotSupported):
                return self.bounds_by_queue(sorted_queues, deadline, on_error)
            requested_queues = queues_by_key[key]
            outcome = (
                answer
                if isinstance(answer, RocketMQError)
                else self._bounds_from(command, answer.body, requested_queues)
            )
            if not isinstance(outcome, RocketMQError):
                bounds.update(outcome)
                continue
            self._stats_by_broker_and_topic.pop(key, None)
            if on_error is None:
                raise outcome
            on_error(outcome, first_queue_by_key[key])
        return {queue: bounds[queue] for queue in sorted_queues if queue in bounds}

    def _bounds_from(
        self, command: BrokerCommand, body: Bytes, requested_queues: set[MessageQueue]
    ) -> dict[MessageQueue, QueueBounds] | BrokerNotFound:
        """Parse an answer. If the answer is equal to the previous answer, reuse the cached result. Answers are often equal,
        because most topics have no new messages.

        An answer names its broker with each queue, which shows whether another broker now has the address. Only requested
        queues are cached, because a broker may report any number of queues.
        """
        key = command.broker_name, command.topic
        cached_stats, digest = self._stats_by_broker_and_topic.get(key), hashlib.blake2b(body).digest()
        if cached_stats is None or cached_stats.digest != digest or not requested_queues <= cached_stats.queues:
            stats = bodies.topic_stats(command.topic, body)
            broker_names = {queue.broker_name for queue in stats}
            if broker_names and command.broker_name not in broker_names:
                message = f"broker {min(broker_names)!r} answers where {command.broker_name!r} was"
                return BrokerNotFound(message, topic=command.topic)
            kept_queues = (
                requested_queues
                if cached_stats is None or requested_queues >= cached_stats.queues
                else requested_queues | cached_stats.queues
            )
            kept_stats = {queue: queue_bounds for queue, queue_bounds in stats.items() if queue in kept_queues}
            # Reuse the queue objects of the cached result, so that all callers keep the same objects.
            queue_objects = (
                cached_stats.bounds
                if cached_stats is not None and list(cached_stats.bounds) == list(kept_stats)
                else kept_stats
            )
            bounds = {
                queue: with_valid_bounds(queue_bounds)
                for queue, queue_bounds in zip(queue_objects, kept_stats.values(), strict=True)
            }
            self._queue_count += len(kept_queues) - (0 if cached_stats is None else len(cached_stats.queues))
            if self._queue_count > self._sweep_threshold:
                self.broker_client.remove_unrouted_entries(self._stats_by_broker_and_topic)
                self._queue_count = len(kept_queues) + sum(
                    len(stats_of_topic.queues) for stats_of_topic in list(self._stats_by_broker_and_topic.values())
                )
                self._sweep_threshold = _SWEEP_ABOVE_QUEUES + 2 * self._queue_count
            cached_stats = self._stats_by_broker_and_topic[key] = _Stats(digest, bounds, frozenset(kept_queues))
        return cached_stats.bounds

    def bounds_by_queue(
        self,
        queues: Sequence[MessageQueue],
        deadline: Deadline,
        on_error: Callable[[RocketMQError, MessageQueue], None] | None = None,
    ) -> dict[MessageQueue, QueueBounds]:
        """Return the same as ``bounds``, with two requests per queue, which a Proxy supports. The answers are never cached."""
        rpc_rows = rpc.GET_MIN_OFFSET, rpc.GET_MAX_OFFSET
        commands = [self.broker_client.queue_command(rpc_row, queue) for queue in queues for rpc_row in rpc_rows]
        answers = iter(self.broker_client.request_each(commands, deadline))
        bounds, failed_brokers = {}, set()
        for queue in queues:
            min_and_max_offset = []
            for rpc_row in rpc_rows:
                answer = next(answers)
                if not isinstance(answer, RocketMQError):
                    min_and_max_offset.append(rpc_row.answer(answer)["offset"])
                elif on_error is None:
                    raise answer
                elif queue.broker_name not in failed_brokers:
                    failed_brokers.add(queue.broker_name)
                    # A Proxy reports a broker that it cannot reach as a fault.
                    on_error(ServiceNotAvailable(*answer.args) if isinstance(answer, ServerFault) else answer, queue)
            if len(min_and_max_offset) == len(rpc_rows):
                min_offset, max_offset = min_and_max_offset
                bounds[queue] = with_valid_bounds(QueueBounds(min_offset, max_offset, 0))
        return bounds

    def first_kept_offsets(
        self,
        group: str,
        queues: Sequence[MessageQueue],
        deadline: Deadline,
        on_error: Callable[[RocketMQError, MessageQueue], None],
    ) -> dict[MessageQueue, int]:
        """See ``ports.OffsetReader``. Pulls messages, because the statistics of a compaction topic omit messages that the topic
        keeps.
        """
        attributes = self.broker_client.attributes(first_queues(queues), deadline)
        compacted_queues = [
            queue for queue in queues if has_attribute(attributes, queue, codes.CLEANUP_POLICY, codes.COMPACTION)
        ]
        answers = self.broker_client.request_pulls(
            [self.broker_client.pull_command_at(group, queue, 0) for queue in compacted_queues], deadline
        )
        attribute_answers = [(queue, attributes[queue.broker_name, queue.topic]) for queue in queues]
        first_offsets = {}
        for queue, answer in [*zip(compacted_queues, answers, strict=True), *attribute_answers]:
            if isinstance(answer, RocketMQError) and (answer.retriable or queue in compacted_queues):
                on_error(answer, queue)
            elif isinstance(answer, Command) and (stamp := first_stamp(answer.body)) is not None:
                first_offsets[queue] = stamp.offset
        return first_offsets

    def max_offsets(self, queues: Sequence[MessageQueue], deadline: Deadline) -> dict[MessageQueue, int]:
        rpc_row = rpc.GET_MAX_OFFSET
        answers = self.broker_client.request_all(
            [self.broker_client.queue_command(rpc_row, queue) for queue in queues], deadline
        )
        return {queue: rpc_row.answer(answer)["offset"] for queue, answer in zip(queues, answers, strict=True)}

    def read_queue_count(self, topic: str, broker_name: str, deadline: Deadline) -> int | None:
        command = rpc.GET_TOPIC_CONFIG.request(topic=self.rpc_client.name_on_wire(topic), bname=broker_name)
        (answer,) = self.broker_client.request_each([BrokerCommand(broker_name, command, topic)], deadline)
        if isinstance(answer, NotSupported | AccessDenied):
            return None
        if isinstance(answer, RocketMQError):
            raise answer
        return bodies.topic_config(answer.body).read_queues

    def search_offsets(
        self,
        times_ms: Mapping[MessageQueue, int],
        deadline: Deadline,
        on_error: Callable[[RocketMQError, MessageQueue], None] | None = None,
        group: str | None = None,
    ) -> dict[MessageQueue, int]:
        """See ``ports.OffsetReader``. The result is the end offset if all messages are older.

        Brokers answer with a wrong offset in three cases, which this method corrects by pulls if a ``group`` is given. Brokers
        before 5.1.4 return the message that is nearest to the time. If all messages of a batch topic are older, brokers return
        its last batch. If several messages of the last millisecond match, brokers return the last of these messages. After old
        files were deleted, the result may also be below the minimum offset, so callers clamp it.
        """
        commands = [
            # A broker fails for a time above Java's largest long, and no message has a larger store time.
            self.broker_client.queue_command(
                rpc.SEARCH_OFFSET_BY_TIMESTAMP, queue, timestamp=min(ms, LONG_MAX), boundaryType="LOWER"
            )
            for queue, ms in times_ms.items()
        ]
        offsets: dict[MessageQueue, int] = {}
        queues_with_nearest_answer = set[MessageQueue]()
        answers = dict(zip(times_ms, self.broker_client.request_each(commands, deadline), strict=True))
        # A broker of RocketMQ 5 fails for a queue of a batch topic that never had a message.
        faulty_queues = [queue for queue, answer in answers.items() if isinstance(answer, ServerFault)]
        bounds = self.bounds_by_queue(faulty_queues, deadline, lambda error, queue: None) if faulty_queues else {}
        for queue, answer in answers.items():
            if queue in bounds and bounds[queue].min_offset >= bounds[queue].max_offset:
                offsets[queue] = bounds[queue].max_offset
            elif not isinstance(answer, RocketMQError):
                offsets[queue] = rpc.SEARCH_OFFSET_BY_TIMESTAMP.answer(answer)["offset"]
                if answer.version < codes.FIRST_VERSION_WITH_SEARCH_BOUNDARY:
                    queues_with_nearest_answer.add(queue)
            elif on_error is None:
                raise answer
            else:
                on_error(answer, queue)
        if group is not None:
            offsets.update(_corrections(self, group, offsets, queues_with_nearest_answer, times_ms, deadline))
        return offsets

    def committed(
        self, group: str, queues: Sequence[MessageQueue], deadline: Deadline
    ) -> dict[MessageQueue, int | None]:
        return self.committed_of_member(group, queues, deadline, zero_if_in_memory=False, read_from="master")

    def committed_of_member(
        self, group: str, queues: Sequence[MessageQueue], deadline: Deadline, zero_if_in_memory: bool, read_from: str
    ) -> dict[MessageQueue, int | None]:
        """Return the group's offset of each queue, None for a queue without an offset.

        With ``zero_if_in_memory``, returns 0 instead of None if the queue's first message is in the broker's memory.
        """
        set_zero_if_not_found = None if zero_if_in_memory else False
        group_on_wire = self.rpc_client.name_on_wire(group)
        commands = [
            self.broker_client.queue_command(
                rpc.QUERY_CONSUMER_OFFSET, queue, consumerGroup=group_on_wire, setZeroIfNotFound=set_zero_if_not_found
            )
            for queue in queues
        ]
        accepted_codes = (Response.SUCCESS, Response.QUERY_NOT_FOUND)
        answers = self.broker_client.request_all(commands, deadline, accepted_codes, read_from)
        return {
            queue: None if a.code == Response.QUERY_NOT_FOUND else rpc.QUERY_CONSUMER_OFFSET.answer(a)["offset"]
            for queue, a in zip(queues, answers, strict=True)
        }

    def store_time_ms(self, group: str, queue: MessageQueue, offset: int, deadline: Deadline) -> int | None:
        """See ``ports.OffsetReader``."""
        return _stored_ms(self._pull(group, queue, offset, 1, deadline), offset)

    def store_times_ms(
        self,
        group: str,
        offsets: Mapping[MessageQueue, int],
        deadline: Deadline,
        read_from: str = "master",
        on_error: Callable[[RocketMQError, MessageQueue], None] | None = None,
    ) -> dict[MessageQueue, int]:
        pulls = [self.broker_client.pull_command_at(group, queue, offset, 1) for queue, offset in offsets.items()]
        answers = self.broker_client.request_pulls(pulls, deadline, read_from)
        store_times: dict[MessageQueue, int] = {}
        for (queue, offset), answer in zip(offsets.items(), answers, strict=True):
            if isinstance(answer, RocketMQError):
                if on_error is not None:
                    on_error(answer, queue)
            elif (stored_ms := _stored_ms(answer, offset)) is not None:
                store_times[queue] = stored_ms
        return store_times

    def sample(self, group: str, queue: MessageQueue, offset: int, deadline: Deadline) -> tuple[int, int]:
        """Total bytes of the messages that one pull at ``offset`` returns, and the number of offsets of these messages.

        An inner batch counts as the number of its messages. A message that cannot be decoded counts as one message.
        """
        answer = self._pull(group, queue, offset, 32, deadline)
        if answer is None or not len(answer.body):
            return 0, 0
        next_offset, stamp = rpc.PULL_MESSAGE.answer(answer)["nextBeginOffset"], first_stamp(answer.body)
        # An inner batch is returned whole, even from an offset in its middle.
        first_offset = min(offset, stamp.offset) if stamp is not None and stamp.is_inner_batch else offset
        return len(answer.body), max(1, next_offset - first_offset)

    def _pull(self, group: str, queue: MessageQueue, offset: int, count: int, deadline: Deadline) -> Command | None:
        """Return the answer to one pull; None if the broker has no message at the offset."""
        (answer,) = self.broker_client.request_pulls(
            [self.broker_client.pull_command_at(group, queue, offset, count)], deadline
        )
        if isinstance(answer, RocketMQError):
            raise answer
        return answer if answer.code == Response.SUCCESS else None

    def log_states(self, brokers: Sequence[str], deadline: Deadline) -> dict[str, LogState | RocketMQError]:
        commands = [BrokerCommand(name, rpc.GET_BROKER_RUNTIME_INFO.request(bname=name), "") for name in brokers]
        answers = self.broker_client.request_each(commands, deadline)
        return {
            name: _retriable_error(answer) if isinstance(answer, RocketMQError) else _log_state(answer)
            for name, answer in zip(brokers, answers, strict=True)
        }

    def broker_indexes_after_replication(self, broker_name: str, deadline: Deadline) -> bool:
        answer = self.broker_client.broker_config(broker_name, deadline)
        if answer is None:
            return True
        if isinstance(answer, RocketMQError):
            if answer.retriable:
                raise answer
            return True
        config = bodies.read_config(answer.body)
        return "true" in (config.get("duplicationEnable"), config.get("enableControllerMode"))

    def is_proxy(self, topic: str, broker_name: str, deadline: Deadline) -> bool:
        (answer,) = self.broker_client.request_each(
            [self.broker_client.queue_command(rpc.GET_MAX_OFFSET, MessageQueue(topic, broker_name, 0))], deadline
        )
        return isinstance(answer, Command) and answer.is_from_proxy

    def check_filter(self, broker_name: str, group: str, topic: str, sql: str, deadline: Deadline) -> bool:
        """See ``ports.OffsetReader``. A broker answers a pull with all messages if the expression is invalid, so expressions
        are checked first.
        """
        body = bodies.client_config_check(self.rpc_client.name_on_wire(group), self.rpc_client.name_on_wire(topic), sql)
        command = rpc.CHECK_CLIENT_CONFIG.request(body, bname=broker_name)
        (answer,) = self.broker_client.request_all([BrokerCommand(broker_name, command, topic)], deadline)
        return not answer.is_from_proxy


def _retriable_error(error: RocketMQError) -> RocketMQError:
    """Return a retriable error for a fault, because a broker that has just started fails until its statistics have a sample."""
    return ServiceNotAvailable(*error.args) if isinstance(error, ServerFault) else error


def _log_state(answer: Command) -> LogState | NotSupported:
    fields = bodies.runtime_info(answer.body)
    try:
        max_offset, behind_bytes, head_wait_ms, lock_ms = (int(fields[name]) for name in _LOG_STATE_KEYS)
    except (KeyError, ValueError) as e:
        return NotSupported(f"a broker does not report {', '.join(_LOG_STATE_KEYS)}: {e}")
    return LogState(max_offset, behind_bytes, head_wait_ms, answer.received_s, lock_ms)


def _corrections(
    offset_reader: RemotingOffsetReader,
    group: str,
    offsets: Mapping[MessageQueue, int],
    queues_with_nearest_answer: set[MessageQueue],
    times_ms: Mapping[MessageQueue, int],
    deadline: Deadline,
) -> Iterator[tuple[MessageQueue, int]]:
    """Yield corrected offsets for times. For ``queues_with_nearest_answer``, brokers return the message that is nearest to the
    time.
    """
    attributes = raise_if_retriable(offset_reader.broker_client.attributes(first_queues(offsets), deadline))
    compacted_queues = {q for q in offsets if has_attribute(attributes, q, codes.CLEANUP_POLICY, codes.COMPACTION)}
    for queue in compacted_queues:
        yield queue, offset_reader.broker_client.first_kept_offset(group, queue, times_ms[queue], deadline)
    other_offsets = {
        q: offset for q, offset in offsets.items() if q not in queues_with_nearest_answer | compacted_queues
    }
    for queue in [
        *_doubtful_queues(offset_reader, group, other_offsets, times_ms, attributes, deadline),
        *(queues_with_nearest_answer - compacted_queues),
    ]:
        store_time_ms = functools.partial(offset_reader.store_time_ms, group, queue, deadline=deadline)
        yield queue, first_offset_since(store_time_ms, offsets[queue], times_ms[queue])


def _doubtful_queues(
    offset_reader: RemotingOffsetReader,
    group: str,
    offsets: Mapping[MessageQueue, int],
    times_ms: Mapping[MessageQueue, int],
    attributes: AttributesByTopic,
    deadline: Deadline,
) -> list[MessageQueue]:
    """Return queues of batch topics whose offset for a time is wrong: the message at the offset is older than the time, or the
    message before the offset is not older.

    If the type of a topic is unknown, permanent errors of the pulls from that topic are ignored.
    """

    def on_error(error: RocketMQError, queue: MessageQueue) -> None:
        if has_attribute(attributes, queue, codes.QUEUE_TYPE, codes.BATCH_QUEUE) or error.retriable:
            raise error

    candidate_offsets = {
        q: offset
        for q, offset in offsets.items()
        if has_attribute(attributes, q, codes.QUEUE_TYPE, codes.BATCH_QUEUE) is not False
    }
    store_times = offset_reader.store_times_ms(group, candidate_offsets, deadline, on_error=on_error)
    previous_offsets = {q: offset - 1 for q, offset in candidate_offsets.items() if offset > 0}
    previous_store_times = offset_reader.store_times_ms(group, previous_offsets, deadline, on_error=on_error)
    doubtful_queues = {q for q, ms in store_times.items() if ms < times_ms[q]} | {
        q for q, ms in previous_store_times.items() if ms >= times_ms[q]
    }
    return sorted(doubtful_queues)


def with_valid_bounds(bounds: QueueBounds) -> QueueBounds:
    """Replace -1, which a broker reports for a queue without a store, by 0."""
    return bounds if bounds.min_offset >= 0 else QueueBounds(0, max(0, bounds.max_offset), bounds.last_update_ms)


def _stored_ms(answer: Command | None, offset: int) -> int | None:
    """The store time of the message at ``offset``, or of the batch with that offset; None without a message."""
    stamp = first_stamp(answer.body) if answer is not None and answer.code == Response.SUCCESS else None
    return stamp.stored_ms if stamp is not None and stamp.offset <= offset else None


def first_offset_since(store_time_ms: Callable[[int], int | None], near_offset: int, time_ms: int) -> int:
    """Return the first offset whose message was stored at or after ``time_ms``. If this offset is near ``near_offset``, the
    search needs few calls of ``store_time_ms``.

    ``store_time_ms`` returns None for offsets without a message: those before the first message, and the end.
    """
    stored_ms = store_time_ms(near_offset)
    if stored_ms is None:
        return near_offset
    older_offset, younger_offset, step = (
        (near_offset, near_offset + 1, 1) if stored_ms < time_ms else (near_offset - 1, near_offset, -1)
    )
    while step > 0 and (stored_ms := store_time_ms(younger_offset)) is not None and stored_ms < time_ms:
        older_offset, younger_offset, step = younger_offset, younger_offset + 2 * step, 2 * step
    while (
        step < 0
        and older_offset >= 0
        and (stored_ms := store_time_ms(older_offset)) is not None
        and stored_ms >= time_ms
    ):
        older_offset, younger_offset, step = max(-1, older_offset + 2 * step), older_offset, 2 * step
    while younger_offset - older_offset > 1:
        middle_offset = (older_offset + younger_offset) // 2
        stored_ms = store_time_ms(middle_offset)
        # An offset without a message is before the first message if the search went down, and at the end if the search went up.
        is_older = stored_ms < time_ms if stored_ms is not None else step < 0
        older_offset, younger_offset = (middle_offset, younger_offset) if is_older else (older_offset, middle_offset)
    return younger_offset
