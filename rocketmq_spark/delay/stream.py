"""Delays of any length as a Spark stream: envelopes wait in Spark's state store until they are due.

One timer of Spark fires for all envelopes of one second and one shard. Every call of Spark's state is a round trip, so a timer
for each message would cost a round trip per message.

A Spark job that reads envelopes is no member of a consumer group. ``present`` joins a group, because producers do not send
envelopes while no member of a group subscribes to ``dmq_inner_topic``.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from pyspark.sql import Column, DataFrame, Row
from pyspark.sql import functions as sf
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle
from pyspark.sql.types import BinaryType, BooleanType, LongType, StructField, StructType

from rocketmq_spark import options as options_table
from rocketmq_spark import session
from rocketmq_spark.base import codes, extras
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.delay.portions import drop_repeated_bodies, pack, portions, unpack
from rocketmq_spark.delay.release import (
    ALL_TOPICS,
    DEAD_TOPIC,
    SINK_SCHEMA,
    SinkRow,
    dead_letter_row,
    identity_of,
    is_cancellation,
    sink_row,
    without_duplicates,
)
from rocketmq_spark.errors import DecodeError, OptionError
from rocketmq_spark.model import NO_FILTER
from rocketmq_spark.model.membership import BrokerRequest, Membership
from rocketmq_spark.spark.sink.row_checks import SinkChecks
from rocketmq_spark.wire.envelope import DIGEST_AT, DIGEST_END, DUE_AT, INNER_TOPIC, MAGIC, VERSION

# Each topic of envelopes has its own group, because members of one group must not subscribe to different topics.
_GROUP_FORMAT = "rocketmq_delay_job_{topic}"
_REQUEST_TIMEOUT_S, _HEARTBEAT_S = 3.0, 30.0


def _answer_nothing(broker: str, request: BrokerRequest) -> None:
    """Ignores requests of brokers, because this member has no queues."""


@contextlib.contextmanager
def present(topic: str = INNER_TOPIC, **options: object) -> Iterator[None]:
    """Registers a member of a group that subscribes to ``topic``, inside a ``with`` block. Reads nothing.

    Option ``group`` names the group; the default is ``rocketmq_delay_job_`` and the topic.
    """
    parsed = options_table.parse({"group": _GROUP_FORMAT.format(topic=topic), **options}).for_role("pull consumer")
    member = session.member(parsed)
    membership = Membership({topic: NO_FILTER}, {topic: time.time_ns() // 1_000_000}, "CONSUME_ACTIVELY")
    member.queues(topic, Deadline.after(_REQUEST_TIMEOUT_S))  # finds the brokers to which heartbeats go
    leave = member.join(parsed.group, lambda: membership, _answer_nothing, _HEARTBEAT_S)
    try:
        member.heartbeat(Deadline.after(_REQUEST_TIMEOUT_S))
        yield
    finally:
        leave(Deadline.after(_REQUEST_TIMEOUT_S))


__all__ = ["DEAD_TOPIC", "INNER_TOPIC", "delayed"]

_PROVIDER_SETTING = "spark.sql.streaming.stateStore.providerClass"
_ROCKSDB_PROVIDER = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
_MIN_PROTOBUF_VERSION = (6, 33, 5)
# The maximum rows and bytes that a task returns in a micro-batch. Spark puts all rows from the timers of a task into one record
# batch.
_MAX_ROWS, _MAX_BYTES = 50_000, 64 << 20
# The share of these limits for messages that are already due when they arrive (timers get the rest), and the share for the timer
# of one key.
_ON_ARRIVAL_SHARE, _KEY_SHARE = 1 / 2, 1 / 4
# The maximum size of an envelope without the body of its message, with a reserve.
_ENVELOPE_BYTES = 64 << 10
# The number of shards of a second. It is a constant, and not a Spark setting, because a cancellation must find the shard of its
# message after a restart with other settings.
_SHARD_COUNT = 16
# The last whole second (in ms) at which a timer of Spark can fire.
_MAX_DUE_MS = ((1 << 63) - 1) // 1000 * 1000
_COLUMNS = tuple(part.split()[0] for part in SINK_SCHEMA.split(", "))
# The number of rows that are checked at once.
_CHECK_PAGE_ROWS = 256


def delayed(
    messages: DataFrame,
    dead_topic: str = DEAD_TOPIC,
    topics: Collection[str] = ALL_TOPICS,
    sink: Mapping[str, object] | None = None,
) -> DataFrame:
    """Return the delayed messages of ``dmq_inner_topic`` when they are due, as a streaming DataFrame for the sink.

    The columns are the sink's ``topic``, ``body``, ``tags``, ``keys``, ``flag``, ``shardingKey``, ``properties``, and
    ``msgId``, the original message id, for the sink's option ``messageId``.

    No message is early. A message may be late by up to two micro-batches and one second (due times are rounded up to seconds). A
    message with a sharding key goes to the queue of its key, other messages to any queue of their topic, even if the sender chose
    a queue or belongs to an environment that owns only some of the queues (``environmentMode=queues``). An envelope is the
    message of ``dmq_inner_topic`` that contains a delayed message. If an envelope is read again before its message is due, it
    counts once. ``Producer.recall`` cancels a waiting message. If more messages are due than fit into a micro-batch, they are
    sent in the order of their due times, or of their arrival if they arrived after they were due. If the messages of one second
    are too many, only a part of them is sent before the messages of the next second.

    Requires Spark's RocksDB state store, and protobuf on driver and workers (extra ``delay``). The number of tasks that hold
    messages is ``spark.sql.shuffle.partitions`` at the time the checkpoint is created.

    Args:
        messages: A stream of ``dmq_inner_topic``; only its column ``body`` is used.
        dead_topic: The topic for bodies that are not envelopes, and for envelopes whose message cannot or may not be delivered;
            their property ``delayProblem`` has the reason.
        topics: Shell patterns of the topics that messages may go to. System, retry and dead-letter topics are never allowed.
            Name only topics that the sink's user may write to: a broker that denies a topic ends the query.
        sink: The options of the sink, without ``messageId``. With these options, a message that the sink refuses, because of
            its topic or of its content, goes to ``dead_topic``; without them, such a message ends the query. The options become
            part of the job's code, so give keys as ``credentialsFile``.

    Raises:
        OptionError: ``messages`` is not a stream with a column ``body``, or a requirement is missing, or ``sink`` has an option
            that the sink does not have.
    """
    _check_requirements(messages)
    max_bytes = codes.MAX_BODY_BYTES if sink is None else SinkChecks(sink, _COLUMNS).max_bytes
    envelope_start = sf.concat(sf.lit(MAGIC), sf.lit(bytes([VERSION])))
    is_envelope = (sf.length("body") >= DIGEST_END) & (sf.substring("body", 1, len(MAGIC) + 1) == envelope_start)
    due_ms = sf.conv(sf.hex(sf.substring("body", DUE_AT + 1, DIGEST_AT - DUE_AT)), 16, -10).cast("bigint")
    due_ms = sf.least(due_ms, sf.lit(_MAX_DUE_MS))
    # A cancellation must get the same shard as its message.
    identity = sf.when(is_envelope, sf.substring("body", DIGEST_AT + 1, DIGEST_END - DIGEST_AT)).otherwise(
        sf.col("body")
    )
    return (
        messages.select(_truncated_column("body", max_bytes))
        .union(_tick_stream(messages))
        .where("body is not null")
        .select("body", sf.when(is_envelope, due_ms).otherwise(0).alias("due"))
        .select(
            "body",
            sf.pmod(sf.hash(identity), sf.lit(_SHARD_COUNT)).alias("shard"),
            # The first whole second at or after the due time.
            sf.expr("due div 1000 + if(pmod(due, 1000) > 0, 1, 0)").alias("second"),
        )
        .groupBy("shard", "second")
        .transformWithState(_WaitingEnvelopes(dead_topic, tuple(topics), sink), SINK_SCHEMA, "Append", "ProcessingTime")
    )


def _truncated_column(column: str, max_bytes: int) -> Column:
    """Return the bodies, truncated to the maximum size of an envelope whose message has ``max_bytes`` bytes. A longer body can
    only become a dead letter, and a dead letter keeps only the first bytes. Spark truncates the bodies before Python gets them,
    because a few kilobytes may inflate to megabytes.
    """
    return sf.substring(column, 1, max_bytes + _ENVELOPE_BYTES).alias(column)


def _tick_stream(messages: DataFrame) -> DataFrame:
    """Return a stream with a row for every micro-batch, because a restarted query processes timers only when there is new
    data.
    """
    ticks = (
        messages.sparkSession.readStream.format("rate-micro-batch").option("rowsPerBatch", 1).option("numPartitions", 1)
    )
    return ticks.load().select(sf.lit(None).cast("binary"))


class _WaitingEnvelopes(StatefulProcessor):
    """The envelopes of one shard and second. The parameters' names are prescribed by Spark."""

    def __init__(
        self, dead_topic: str, topics: tuple[str, ...] = ALL_TOPICS, sink: Mapping[str, object] | None = None
    ) -> None:
        self._dead_topic = dead_topic
        self._topics = topics
        self._sink = sink
        self._sink_checks: SinkChecks | None = None  # created in the worker
        self._batch_time_ms: Any = None
        self._returned_rows = self._returned_bytes = 0

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._handle = handle
        # Earlier releases kept the envelopes in this list. Spark reads thousands of elements of a list at once, whatever their
        # size.
        self._legacy_bodies = handle.getListState("waiting", StructType([StructField("body", BinaryType())]))
        self._portion_state = handle.getMapState(
            "portions",
            StructType([StructField("number", LongType())]),
            StructType([StructField("bodies", BinaryType())]),
        )
        # The first and the end number of the portions, and whether repeated and cancelled envelopes were removed. These
        # envelopes are removed once, when the timer first fires.
        ends = [StructField("first", LongType()), StructField("end", LongType()), StructField("clean", BooleanType())]
        self._span_state = handle.getValueState("ends", StructType(ends))

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        due_ms, now_ms = key[1] * 1000, timerValues.getCurrentProcessingTimeInMs()
        self._returned_rows_and_bytes(now_ms)
        new_portions = portions(drop_repeated_bodies(bytes(row.body) for row in rows))
        nothing_waits = not (self._span_state.exists() or self._legacy_bodies.exists())
        if due_ms <= now_ms:
            first_portion, second_portion = next(new_portions, []), next(new_portions, None)
            if nothing_waits and second_portion is None and self._has_room(_ON_ARRIVAL_SHARE):
                # These bodies are due already. If they do not fit, the timer returns them.
                yield from self._rows(first_portion)
                return
            new_portions = itertools.chain(
                [first_portion] if second_portion is None else [first_portion, second_portion], new_portions
            )
        self._add(new_portions)
        if nothing_waits:
            self._handle.registerTimer(max(due_ms, now_ms + 1))

    def handleExpiredTimer(
        self,
        key: Any,
        timerValues: Any,
        expiredTimerInfo: Any,
    ) -> Iterator[Row]:
        """Spark calls this method in the order of the timers. If this micro-batch has no room left, the key keeps its position
        among the timers. If the key has used its share, it goes behind all keys that are due now, but not behind keys that
        become due later.
        """
        now_ms, expiry_ms = timerValues.getCurrentProcessingTimeInMs(), expiredTimerInfo.getExpiryTimeInMs()
        earlier_rows_and_bytes = self._returned_rows_and_bytes(now_ms)
        if not self._has_room():
            # The state of the key is not read here: Spark may come here for any number of keys, and each read would take time.
            # The new time must differ from the time of this timer, because Spark deletes this timer after the call.
            self._handle.registerTimer(expiry_ms ^ 1)
            return
        if self._legacy_bodies.exists():
            self._add(portions(bytes(body) for (body,) in self._legacy_bodies.get()))
            self._legacy_bodies.clear()
        if (span := self._span_state.get()) is None:
            return
        first_number, end_number, is_clean = span
        if not is_clean and end_number - first_number > 1:
            self._drop_repeated_and_cancelled(first_number, end_number)
        for number in range(first_number, end_number):
            if number > first_number and not (self._has_room() and self._has_room(_KEY_SHARE, earlier_rows_and_bytes)):
                self._span_state.update((number, end_number, True))
                self._handle.registerTimer(max(now_ms, expiry_ms + 1))
                return
            yield from self._rows(self._portion(number))
            self._portion_state.removeKey((number,))
        self._span_state.clear()

    def _returned_rows_and_bytes(self, now_ms: int) -> tuple[int, int]:
        """Return how many rows, and how many bytes, this task has returned in this micro-batch."""
        if now_ms != self._batch_time_ms:
            self._batch_time_ms, self._returned_rows, self._returned_bytes = now_ms, 0, 0
        return self._returned_rows, self._returned_bytes

    def _has_room(self, share: float = 1.0, earlier_rows_and_bytes: tuple[int, int] = (0, 0)) -> bool:
        """Whether this task may return more rows in this micro-batch: besides ``earlier_rows_and_bytes``, it has returned less
        than ``share`` of its limits.
        """
        row_count, byte_count = earlier_rows_and_bytes
        return (
            self._returned_rows - row_count < share * _MAX_ROWS
            and self._returned_bytes - byte_count < share * _MAX_BYTES
        )

    def _add(self, new_portions: Iterable[list[bytes]]) -> None:
        first_number, end_number, is_clean = self._span_state.get() or (0, 0, False)
        for portion in new_portions:
            self._portion_state.updateValue((end_number,), (pack(portion),))
            end_number += 1
        # Cancellations that arrive after the timer has fired are too late. A late cancellation is not applied, because each
        # late cancellation would need a read of all waiting envelopes.
        self._span_state.update((first_number, end_number, is_clean))

    def _portion(self, number: int) -> list[bytes]:
        state = self._portion_state.getValue((number,))
        assert state is not None
        return list(unpack(bytes(state[0])))

    def _drop_repeated_and_cancelled(self, first_number: int, end_number: int) -> None:
        """Remove repeated and cancelled envelopes from all portions, with one portion in memory at a time."""
        cancelled_identities = {
            identity_of(body)
            for n in range(first_number, end_number)
            for body in self._portion(n)
            if is_cancellation(body)
        }
        seen_identities = set(cancelled_identities)
        for number in range(first_number, end_number):
            bodies = self._portion(number)
            kept_bodies = []
            for body in bodies:
                if (identity := identity_of(body)) not in seen_identities:
                    seen_identities.add(identity)
                    kept_bodies.append(body)
            if len(kept_bodies) < len(bodies):
                self._portion_state.updateValue((number,), (pack(kept_bodies),))

    def close(self) -> None:
        pass

    def _rows(self, bodies: list[bytes]) -> Iterator[Row]:
        self._returned_rows += len(bodies)
        self._returned_bytes += sum(map(len, bodies))
        if self._sink is None:
            return (_row(sink_row(body, self._dead_topic, self._topics)) for body in without_duplicates(bodies))
        checks = self._sink_checks = self._sink_checks or SinkChecks(self._sink, _COLUMNS)
        return self._checked_rows(without_duplicates(bodies), checks)

    def _checked_rows(self, bodies: Iterator[bytes], sink_checks: SinkChecks) -> Iterator[Row]:
        """Return the rows of all bodies. A message that the sink would refuse becomes a dead letter, because the error of the
        sink would end the query.
        """
        while page := list(itertools.islice(bodies, _CHECK_PAGE_ROWS)):
            rows = [
                sink_row(body, self._dead_topic, self._topics, sink_checks.max_bytes, sink_checks.refusal)
                for body in page
            ]
            for index, reason in sink_checks.rejection_reasons(rows).items():
                error = DecodeError(f"the sink does not accept the message in this envelope: {reason}")
                rows[index] = dead_letter_row(page[index], error, self._dead_topic, sink_checks.max_bytes)
            yield from map(_row, rows)


def _row(message: SinkRow) -> Row:
    return Row(**dict(zip(_COLUMNS, message, strict=True)))


def _check_requirements(messages: DataFrame) -> None:
    problems = []
    body_type = dict(messages.dtypes).get("body")
    if not messages.isStreaming or body_type != "binary":
        stream_text = "a stream" if messages.isStreaming else "no stream"
        problems.append(
            f"delayed() got {stream_text} whose column 'body' is {body_type}; "
            f"expected readStream of topic {INNER_TOPIC!r}, where it is binary"
        )
    if (provider := messages.sparkSession.conf.get(_PROVIDER_SETTING, None)) != _ROCKSDB_PROVIDER:
        problems.append(
            f"{_PROVIDER_SETTING} is {provider}; expected {_ROCKSDB_PROVIDER}: set it with spark.conf.set "
            "before the query starts"
        )
    if problem := protobuf_problem():
        problems.append(problem)
    if problems:
        raise OptionError.of(problems)


def protobuf_problem(version: str | None = None) -> str | None:
    """Return what is missing here for Spark's state in Python; None if nothing is missing. Spark would report the problem only
    after a worker has crashed.
    """
    if version is None:
        try:
            version = importlib.metadata.version("protobuf")
        except importlib.metadata.PackageNotFoundError:
            version = "none"
    if tuple(map(int, re.findall(r"\d+", version)[:3])) >= _MIN_PROTOBUF_VERSION:
        return None
    expected_version = ".".join(map(str, _MIN_PROTOBUF_VERSION))
    return (
        f"protobuf is {version} here; expected {expected_version} or newer, in workers too: "
        f"{extras.install_command(extras.DELAY)}"
    )
