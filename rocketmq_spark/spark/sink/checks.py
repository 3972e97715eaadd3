"""Checks before the first row is sent: options, columns, topics, and whether brokers support timers.

``check_columns`` checks the columns of a DataFrame, and reports all wrong columns at once.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    ByteType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from rocketmq_spark import session
from rocketmq_spark.base import process
from rocketmq_spark.base.clock import Deadline, backoff
from rocketmq_spark.base.codes import TopicType
from rocketmq_spark.columnar.encode import columns, kafka
from rocketmq_spark.columnar.encode.columns import RowColumn
from rocketmq_spark.columnar.encode.properties import TIMER_COLUMNS
from rocketmq_spark.errors import MessageRefused, OptionError, RocketMQError, RouteNotFound
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.options import Options, transport
from rocketmq_spark.options.names import resolve
from rocketmq_spark.options.topic_names import EXACT, TopicNames, dots_hint
from rocketmq_spark.ports import Sender
from rocketmq_spark.producer.delays import BrokerTimers, no_timers_error
from rocketmq_spark.producer.encoding import check_topic as check_topic_name
from rocketmq_spark.producer.routing import RouteCache, queues_of_environment
from rocketmq_spark.producer.settings import ProducerSettings
from rocketmq_spark.producer.spool_bridge import is_transient
from rocketmq_spark.queues.environment import check_environment_set, is_by_position, position_problem, scope_of
from rocketmq_spark.session.spools import option_problems as spool_problems
from rocketmq_spark.spark.sink import exactly_once_checks

COLUMNS = columns.COLUMNS
_COLUMN_KINDS: dict[type[DataType], str] = {
    StringType: columns.TEXT,
    BinaryType: columns.BYTES,
    **dict.fromkeys((ByteType, ShortType, IntegerType), columns.INT),
    LongType: columns.LONG,
    TimestampType: columns.TIMESTAMP,
}

logger = logging.getLogger(__name__)

GROUP = "rocketmq_spark_sink"
# The time limit of one attempt to send a batch. If the broker has not answered by then, the next attempt tries another broker.
ATTEMPT_S = 10.0
_MIN_ATTEMPTS = 6
# The approximate memory of a request's Python objects. This size limits the number of waiting requests if their bodies are small.
_REQUEST_OVERHEAD_BYTES = 1 << 10

# For each broker, its name and the number of its queues, in the order of Kafka's partitions.
_QueueCounts = tuple[tuple[str, int], ...]
_MAX_KEPT_NUMBERS, _MAX_SHOWN_BROKERS = 10_000, 100
# How many names of topics a process keeps, to compare them with the names of later writes (option ``topicNames``).
_MAX_KEPT_NAMES = 10_000
_TIMERS_KEY, _TOPICS_KEY, _NUMBERS_KEY = "brokers asked for timers", "topics checked", "partitions of topics"
_NAMES_KEY = "names of topics"
_ALREADY_WARNED = ""  # replaces a kept name after the warning about this name

# The reasons why an environment that is given by its number alone cannot be used in two kinds of writes: writes of streams, and
# writes with column 'topic'.
_REASON_STREAM = (
    "Spark creates the writer of a stream again for each micro-batch, in short-lived processes (foreach_batch_writer keeps "
    "what it counted)"
)
_REASON_TOPIC_COLUMN = "each task finds the topics in column 'topic' by itself"


def _row_column(field: StructField) -> RowColumn:
    spark_type = field.dataType
    kind = next((column_kind for type_, column_kind in _COLUMN_KINDS.items() if isinstance(spark_type, type_)), "")
    if isinstance(spark_type, ArrayType) and isinstance(spark_type.elementType, StringType):
        kind = columns.TEXTS
    if isinstance(spark_type, ArrayType) and isinstance(spark_type.elementType, StructType):
        parts = [(part.name.lower(), type(part.dataType)) for part in spark_type.elementType.fields]
        kind = kafka.HEADERS if parts == [("key", StringType), ("value", BinaryType)] else ""
    if (
        isinstance(spark_type, MapType)
        and isinstance(spark_type.keyType, StringType)
        and isinstance(spark_type.valueType, StringType)
    ):
        kind = columns.TEXT_MAP
    return RowColumn(field.name, kind, spark_type.simpleString())


def check_columns(
    schema: StructType, topic: str | None, selector: object = None, row_id: str | None = None
) -> tuple[dict[str, str], list[str]]:
    """Return the names of the DataFrame's columns by role, including the column of the row id, and the problems with the columns.

    ``selector`` is None if the user set no selector.
    """
    return columns.check_columns([_row_column(field) for field in schema.fields], topic, selector, row_id)


def producer_settings(options: Options) -> ProducerSettings:
    """Return the settings of the sink's producer, which retries after any failure until ``sendTimeout``, and creates no topic."""
    return dataclasses.replace(
        ProducerSettings.of(options),
        group=GROUP,
        attempt_timeout_s=min(ATTEMPT_S, options.send_timeout / _MIN_ATTEMPTS),
        retries=None,
        pinned_retries=None,
        auto_create_topics=False,
        failed_queues_stay_closed=True,
        max_in_flight=None,
        max_in_flight_per_broker=options.max_in_flight,
        max_async_messages=(options.total_batch_max_bytes or 0) // _REQUEST_OVERHEAD_BYTES,
        max_async_bytes=options.total_batch_max_bytes or 0,
    )


def check_sink(options: Options, schema: StructType, is_stream: bool = False) -> dict[str, str]:
    """Return the names of the DataFrame's columns by role.

    One ``OptionError`` lists all problems that can be found without a broker.

    With ``is_stream``, the write is a stream, for which Spark creates a new writer in each micro-batch.
    """
    selector = options.queue_selector if "queue_selector" in options.given_fields else None
    if options.kafka_columns:
        column_by_role, problems = kafka.check_columns(
            list(map(_row_column, schema.fields)), options.topic, options.message_id
        )
        problems += _kafka_selector_problems(selector, column_by_role)
    else:
        column_by_role, problems = check_columns(schema, options.topic, selector, options.message_id)
    # Each row may get a property that marks its empty body, so tasks add a column of properties if the DataFrame has none.
    if options.empty_bodies == "mark" and "properties" not in column_by_role:
        is_name_free = (
            "properties" not in column_by_role.values()
        )  # with Kafka's columns, the row id may be in a column of this name
        column_by_role["properties"] = "properties" if is_name_free else "properties (emptyBodies)"
    problems += _option_problems(options) + exactly_once_checks.option_problems(options, column_by_role)
    if is_by_position(options) and (is_stream or options.topic is None):
        problems.append(position_problem(options, _REASON_STREAM if is_stream else _REASON_TOPIC_COLUMN))
    problems += columns.check_features(column_by_role, transport.features(options))
    if problems:
        raise OptionError.of(problems)
    return column_by_role


def _kafka_selector_problems(selector: object, column_by_role: Mapping[str, str]) -> list[str]:
    problems = []
    if selector == "column":
        problems.append(
            "option 'queueSelector' is 'column', but 'kafkaColumns' has no queueId: use its column 'partition'"
        )
    if selector == "hash" and "shardingkey" not in column_by_role:
        problems.append("queueSelector 'hash' needs a column 'key'")
    if selector is not None and kafka.PARTITION in column_by_role:
        problems.append(f"column 'partition' has no effect with queueSelector {selector!r}: drop one of the two")
    return problems


def _option_problems(options: Options) -> list[str]:
    problems = []
    selector = options.queue_selector
    if selector == "machineRoom" and not options.machine_rooms:
        problems.append("queueSelector 'machineRoom' needs option 'machineRooms'")
    if selector == "environment":
        problems += _problems_of(lambda: check_environment_set(options, "queueSelector"))
    if options.machine_rooms and selector != "machineRoom":
        problems.append("option 'machineRooms' has no effect without queueSelector 'machineRoom'")
    if "batch_max_bytes" in options.given_fields and (options.batch_max_bytes or 0) > options.max_message_size:
        problems.append(
            f"option 'batchMaxBytes' is {options.batch_max_bytes}, more than 'maxMessageSize' "
            f"{options.max_message_size}, which brokers allow for a batch too"
        )
    if callable(selector) or ":" in selector:
        problems += _problems_of(lambda: resolve(selector, "queueSelector"))
    problems += _problems_of(lambda: producer_settings(options))
    problems += spool_problems(options)
    for name, topic in [("topic", options.topic), *(("allowedTopics", topic) for topic in options.allowed_topics)]:
        if topic is not None:
            try:
                check_topic_name(topic, scope_of(options))
            except MessageRefused as e:
                problems.append(f"option {name!r} is {topic!r}: {e.message}{dots_hint(topic)}")
    return problems


def _problems_of(check: Callable[[], object]) -> list[str]:
    try:
        check()
    except OptionError as e:
        return [line.removeprefix("  - ") for line in e.message.split("\n") if line]
    return []


def check_topic_names(options: Options, names: Iterable[str]) -> None:
    """Check that all tasks of a write used the same name for each topic. ``names`` are the names that the tasks used. The driver
    makes this check, because a task sees only its own rows.

    Logs one warning if an earlier write of this process over the same connection used another name for a topic. The other name is
    no error, because the earlier write may belong to another query.
    """
    if options.topic_names == EXACT:
        return
    try:
        topic_names = TopicNames(options.topic_names, names)
    except ValueError as e:
        raise OptionError(
            f"{e}; tasks of this write have stored rows of both names in this one topic",
            remedy="Rename one of the two in the column 'topic', and write the batch again",
        ) from None
    connection = session.connection_key(options)
    names_by_key = {(connection, topic_names.rocketmq_name(name)): name for name in topic_names.original_names}
    with process.registry_lock():
        kept_names: dict[tuple[object, str], str] = process.entries(_NAMES_KEY)
        earlier_names: dict[str, str] = {}
        for key, name in names_by_key.items():
            earlier_name = kept_names.get(key)
            if earlier_name is not None:
                del kept_names[key]  # so that the newest name becomes the last entry
            if earlier_name is None or earlier_name == name:
                kept_names[key] = name
            else:
                kept_names[key] = _ALREADY_WARNED
                if earlier_name != _ALREADY_WARNED:
                    earlier_names[name] = earlier_name
        while len(kept_names) > _MAX_KEPT_NAMES:
            del kept_names[next(iter(kept_names))]
    for name, earlier_name in earlier_names.items():
        logger.warning(
            "this write stored rows of topic %r in topic %s, and an earlier write of this process stored rows of topic %r in "
            "the same topic. If that is not intended, use one name in the column 'topic' of all writes",
            name,
            topic_names.rocketmq_name(name),
            earlier_name,
        )


def check_topic(sender: Sender, topic: str, options: Options, must_exist: bool = False) -> None:
    """Checks that rows can be sent to ``topic``: the topic must exist and have a writable queue.

    If no name server answers, no broker is registered, or the topic has no master, the check waits as long as a send would wait,
    and then raises the first error. If name servers report that the topic has no route, the check asks again. After
    ``numRetries`` such reports, the topic counts as missing. A report counts only if a broker was registered before the
    report.

    ``must_exist`` means that the topic existed before. Its brokers may not have registered yet at a name server that was
    restarted, so the check waits in this case, too.
    """
    _wait_for_route(
        sender, topic, options, must_exist, lambda deadline, refresh: sender.publish_queues(topic, deadline, refresh)
    )


def numbered_queues(sender: Sender, topic: str, options: Options) -> tuple[MessageQueue, ...]:
    """Returns the topic's queues by partition number. Like ``check_topic`` with ``must_exist``, this function waits for the route
    up to ``sendTimeout``. Warns if the numbers changed since the last write of this process over the same connection.
    """
    queues = tuple(
        _wait_for_route(sender, topic, options, True, lambda deadline, _: sender.partition_queues(topic, deadline))
    )
    counts = tuple(
        (name, sum(1 for _ in broker_queues))
        for name, broker_queues in itertools.groupby(queues, lambda queue: queue.broker_name)
    )
    # The key does not contain the sender, because exactly-once writes have another sender for each batch.
    key = session.connection_key(options), topic
    with process.registry_lock():
        kept_counts_by_topic: dict[tuple[object, str], _QueueCounts] = process.entries(_NUMBERS_KEY)
        previous_counts = kept_counts_by_topic.get(key, ())
        if previous_counts:
            del kept_counts_by_topic[key]
        kept_counts_by_topic[key] = counts  # now the last entry, because it is the newest
        while sum(1 + len(kept_counts) for kept_counts in kept_counts_by_topic.values()) > _MAX_KEPT_NUMBERS:
            del kept_counts_by_topic[next(iter(kept_counts_by_topic))]
    if not _keeps_numbers(counts, previous_counts):
        logger.warning(
            "the partition numbers of topic %s changed since the last write of this process: now %s, before %s. Brokers that are "
            "down have no numbers",
            topic,
            _numbers_text(counts),
            _numbers_text(previous_counts),
        )
    return queues


def _keeps_numbers(counts: _QueueCounts, earlier_counts: _QueueCounts) -> bool:
    """Whether each earlier number still belongs to the same queue."""
    last_index = len(earlier_counts) - 1
    if last_index < 0 or len(counts) <= last_index:
        return last_index < 0
    (name, count), (name_before, count_before) = counts[last_index], earlier_counts[last_index]
    return counts[:last_index] == earlier_counts[:last_index] and name == name_before and count >= count_before


def _numbers_text(counts: _QueueCounts) -> str:
    """Return the partition numbers of each broker as text: ``0 to 3 on broker-a, 4 to 7 on broker-b``."""
    ends = itertools.accumulate(count for _, count in counts)
    parts = [f"{end - count} to {end - 1} on {name}" for (name, count), end in zip(counts, ends, strict=True)]
    return ", ".join(parts[:_MAX_SHOWN_BROKERS] + ["…"] * (len(parts) > _MAX_SHOWN_BROKERS))


def _wait_for_route(
    sender: Sender,
    topic: str,
    options: Options,
    must_exist: bool,
    fetch: Callable[[Deadline, bool], Sequence[MessageQueue]],
) -> Sequence[MessageQueue]:
    """Call ``fetch(deadline, refresh)`` until it returns, the topic proves missing, or ``sendTimeout`` ends. ``refresh`` is true
    after a failure.
    """
    deadline, pauses = Deadline.after(options.send_timeout), backoff(max(0.1, options.retry_interval), 2.0)
    first_error: RocketMQError | None = None
    no_route_count, has_brokers = 0, False
    while True:
        try:
            return fetch(deadline, first_error is not None)
        except RocketMQError as error:
            e = error
        is_missing = isinstance(e, RouteNotFound)
        if not e.retriable or (is_missing and e.broker_code is None):
            raise e
        if first_error is None:
            first_error = e
            logger.warning("topic %s cannot be checked yet: %s", topic, e)
        no_route_count += is_missing and has_brokers  # an answer counts only if brokers were registered before it
        has_brokers = has_brokers or (is_missing and _has_any_broker(sender))
        counts_as_missing = no_route_count >= max(1, options.num_retries) and not must_exist
        if counts_as_missing or deadline.expired:
            raise _route_error(
                sender, e if counts_as_missing else first_error, None if counts_as_missing else options.send_timeout
            )
        deadline.pause(next(pauses))


def _route_error(sender: Sender, cause: RocketMQError, waited_s: float | None) -> RocketMQError:
    if isinstance(cause, RouteNotFound):
        cause = sender.with_similar_topics(cause)
    waited_text = "" if waited_s is None else f"; waited for {waited_s:g} s, option 'sendTimeout'"
    message, topic = f"{cause.message}{waited_text}", cause.topic
    return type(cause)(message, cause.addr, cause.broker_code, topic, remark=cause.remark, remedy=cause.remedy)


def check_timers(
    sender: Sender,
    topic: str,
    options: Options,
    column_by_role: Mapping[str, str],
    brokers: Collection[str] | None = None,
) -> None:
    """Check that the topic's brokers have timers if rows may need timers, because old brokers would deliver such rows at once.

    With ``longDelay=dmq`` nothing is checked, because each row is sent in the way that its brokers support.
    """
    timer_columns = [column_by_role[name] for name in TIMER_COLUMNS if name in column_by_role]
    if not timer_columns or options.long_delay == "dmq":
        return
    deadline = Deadline.after(options.request_timeout)
    if brokers is None:
        brokers = {queue.broker_name for queue in sender.publish_queues(topic, deadline)}
    if brokers_without_timers := timer_cache(sender, options).brokers_without_timers(topic, brokers, deadline):
        problem = no_timers_error(f"column {' and '.join(map(repr, timer_columns))}", brokers_without_timers, topic)
        raise OptionError(problem.message, topic=topic, remedy=problem.remedy)


def check_types(options: Options, topic: str, column_by_role: Mapping[str, str]) -> None:
    """Over gRPC, check that the topic accepts the type of messages that these columns make, because a Proxy rejects other
    types.
    """
    accepted_types = session.message_types(options, topic, Deadline.after(options.request_timeout))
    if not accepted_types:
        return
    delay_columns = [name for name in exactly_once_checks.DELAY_COLUMNS if name in column_by_role]
    message_type = transport.message_type(
        bool(delay_columns), "shardingkey" in column_by_role, "priority" in column_by_role
    )
    columns_by_type = {
        TopicType.DELAY: delay_columns,
        TopicType.FIFO: ["shardingkey"],
        TopicType.PRIORITY: ["priority"],
    }
    columns_text = " and ".join(repr(column_by_role[name]) for name in columns_by_type.get(message_type, []))
    if message_type not in accepted_types:
        raise OptionError(
            f"option 'topic' is {topic!r}, which takes messages of type {' or '.join(sorted(accepted_types))}; "
            + (f"column {columns_text} of the DataFrame makes" if columns_text else "the columns of the DataFrame make")
            + f" {message_type} ones",
            topic=topic,
            remedy=f"Make a topic with attribute message.type={message_type}"
            + (
                f", or write without {columns_text}"
                if columns_text
                else ", or add the columns that the type needs: keys, delays or priorities"
            ),
        )


def timer_cache(sender: Sender, options: Options) -> BrokerTimers:
    """Return the process's cache of the timers of brokers. Without this cache, each short task would ask the brokers again."""
    return BrokerTimers(sender, process.get_or_create(_TIMERS_KEY, session.connection_key(options), dict))


def check_brokers(options: Options, column_by_role: Mapping[str, str], once_per_process: bool = False) -> None:
    """Check the topic of option ``topic`` with its brokers. With ``once_per_process`` the check is not repeated.

    Spark creates a stream's writer for every micro-batch, and again to commit the batch. The later writers must not fail or wait
    while brokers are down. The tasks find out whether rows can be sent.
    """
    if options.topic is None:
        return
    # All writes to one cluster and namespace have the same sender. An environment that has its own topics has its own sender.
    sender = session.sender(options)
    key = (sender, options.topic, repr(sorted(column_by_role)))
    checked_topics = process.entries(_TOPICS_KEY)
    if once_per_process and key in checked_topics:
        return
    try:
        if once_per_process:
            _check_route_now(sender, options.topic, options.request_timeout)
        else:
            check_topic(sender, options.topic, options)
        check_timers(sender, options.topic, options, column_by_role)
        check_types(options, options.topic, column_by_role)
    except RocketMQError as e:
        may_wait = once_per_process or (options.on_send_failure == "spool" and is_transient(e, sender))
        if not may_wait or isinstance(e, OptionError) or (isinstance(e, RouteNotFound) and _has_any_broker(sender)):
            raise
        logger.warning("topic %s cannot be checked now: %s", options.topic, e)
        return
    checked_topics[key] = True


def environment_queues(options: Options) -> dict[str, tuple[MessageQueue, ...]]:
    """Return the queues of the topic in an environment that is given by its number alone; empty for other environments.

    The driver determines the queues for all tasks. If each task determined the queues when it starts, tasks might use different
    queues. Waits for the route up to the send timeout.
    """
    if options.topic is None or not is_by_position(options):
        return {}
    sink_settings, sender = producer_settings(options), session.sender(options)
    assert sink_settings.environment is not None
    queues_by_topic = queues_of_environment(sender, sink_settings.environment)
    if options.topic not in queues_by_topic:
        deadline = Deadline.after(options.send_timeout)
        RouteCache(sender, sink_settings).wait_for_queues(options.topic, deadline, deadline.pause)
    return {options.topic: queues_by_topic[options.topic]}


def partition_queues(options: Options, column_by_role: Mapping[str, str]) -> dict[str, tuple[MessageQueue, ...]]:
    """If rows name partitions, return the queues of the topic in the order of Kafka's partitions. The result is empty if rows
    name no partitions, or if they name their topics.

    The driver determines the queues for all tasks of a write, so that all tasks use the same numbers even if the route changes.
    """
    if options.topic is None or kafka.PARTITION not in column_by_role:
        return {}
    return {options.topic: numbered_queues(session.sender(options), options.topic, options)}


def _check_route_now(sender: Sender, topic: str, timeout_s: float) -> None:
    deadline = Deadline.after(timeout_s)
    try:
        try:
            sender.publish_queues(topic, deadline)
        except RouteNotFound as e:
            if e.broker_code is None or not _has_any_broker(sender):
                raise
            sender.publish_queues(topic, deadline, refresh=True)  # a broker may have registered meanwhile
    except RouteNotFound as e:
        if e.broker_code is None:
            raise
        raise sender.with_similar_topics(e) from None


def _has_any_broker(sender: Sender) -> bool:
    """Whether any broker is registered. If a broker is registered, a topic without a route does not exist."""
    try:
        return sender.has_broker()
    except RocketMQError:
        return False
