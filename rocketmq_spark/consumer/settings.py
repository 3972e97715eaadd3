"""The settings and subscriptions of consumers: ``Consumer`` (over remoting or by POP) and ``PullConsumer``.

Names and defaults are those of ``DefaultMQPushConsumer`` and ``DefaultLitePullConsumer``. If a name or a default differs, a
comment gives the reason. Heartbeats, pulls and rebalances read the same ``Subscriptions``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from rocketmq_spark.base.arguments import argument_error, check_synchronous, check_text
from rocketmq_spark.consumer.process_queue import Thresholds
from rocketmq_spark.consumer.rebalance import REBALANCE_INTERVAL_S, Allocate, ConsumeFrom
from rocketmq_spark.errors import OptionError
from rocketmq_spark.model import NO_FILTER, Filter, MessageQueue
from rocketmq_spark.options import Options, transport
from rocketmq_spark.options.paths import check_safe, expand_home
from rocketmq_spark.queues.allocation import allocate
from rocketmq_spark.queues.environment import Environment, check_environment_set, environment_of
from rocketmq_spark.wire.names import group_problem, read_problem, retry_topic
from rocketmq_spark.wire.properties import parse_user_subscription


def checked_topic(topic: object) -> str:
    """Return a topic that a user passed. Raises ``OptionError`` if it is not a valid name of a topic."""
    if not isinstance(topic, str) or (problem := read_problem(topic)):
        raise argument_error(
            "topic", topic, f"the name of a topic ({problem})" if isinstance(topic, str) else "the name of a topic"
        )
    return topic


def parse_filter(tags: str | None, sql: str | None) -> Filter:
    """Return the filter of one subscription. Raises ``OptionError`` for invalid or blank values, and for tags with SQL."""
    for name, value in (("tags", tags), ("sql", sql)):
        if value is not None:
            check_text(name, value, "a str")
    if tags is not None and sql is not None:
        raise OptionError(f"tags are {tags!r} and sql is {sql!r}; expected at most one of them")
    for name, value in (("tags are", tags), ("sql is", sql)):
        try:
            (value or "").encode()
        except UnicodeEncodeError as e:  # heartbeats with this filter could not be encoded
            raise OptionError(f"{name} {value!r}; expected characters that can be sent: {e}") from e
    if sql is not None:
        if not sql.strip():
            raise argument_error("sql", sql, "an SQL92 expression, or None for all messages")
        return Filter(sql, "SQL92")
    try:
        subscription = parse_user_subscription(tags)
    except ValueError as e:
        raise OptionError(f"tags are {tags!r}; expected '*', or one or several tags such as 'a || b' ({e})") from e
    return Filter(tags) if tags and subscription.tags else NO_FILTER


@dataclass(frozen=True, slots=True)
class TopicFilter:
    """The subscription to one topic.

    A broker rejects pulls with a later version than the version in the last heartbeat.

    Attributes:
        filter: The filter of the messages.
        version_ms: The version for brokers, which also changes when queues of the topic are assigned or revoked.
        filter_version_ms: The version with which the filter was set.
        subscribed_ms: When the filter was set, by ``Timer.lease_ms``.
    """

    filter: Filter
    version_ms: int
    filter_version_ms: int
    subscribed_ms: int = field(default=0, compare=False)


class Subscriptions:
    """The subscriptions of one consumer. Each change gives the topic a later version; the other topics keep their versions.

    With ``clustering``, the subscriptions include the group's retry topic, without a filter.
    """

    def __init__(
        self, group: str, clustering: bool, wall_ms: Callable[[], int], lease_ms: Callable[[], int] = lambda: 0
    ) -> None:
        self._wall_ms, self._lease_ms = wall_ms, lease_ms
        self._lock = threading.Lock()
        self._version_ms = wall_ms()
        self._retry_topic_filters: dict[str, TopicFilter] = {}
        if clustering:
            self._retry_topic_filters[retry_topic(group)] = TopicFilter(NO_FILTER, self._version_ms, self._version_ms)
        self._topic_filters: dict[str, TopicFilter] = {}

    def add(self, topic: str, new_filter: Filter) -> None:
        """Subscribe to a topic, or replace its filter."""
        with self._lock:
            version_ms = self._next_version_ms()
            self._topic_filters = {
                **self._topic_filters,
                topic: TopicFilter(new_filter, version_ms, version_ms, self._lease_ms()),
            }

    def restore(self, topic: str, previous_filter: TopicFilter | None) -> None:
        """Restore the subscription that a topic had before its last change; None removes the topic."""
        if previous_filter is None:
            self.remove(topic)
        else:
            self.add(topic, previous_filter.filter)

    def remove(self, topic: str) -> None:
        with self._lock:
            self._topic_filters = {
                subscribed_topic: topic_filter
                for subscribed_topic, topic_filter in self._topic_filters.items()
                if subscribed_topic != topic
            }

    def touch(self, topic: str) -> None:
        """Give the subscription a new version, because the assigned queues of the topic changed."""
        with self._lock:
            for filters in (self._topic_filters, self._retry_topic_filters):
                if topic in filters:
                    filters[topic] = replace(filters[topic], version_ms=self._next_version_ms())

    def topic_filters(self) -> Mapping[str, TopicFilter]:
        """Return all subscriptions by topic, including the retry topic."""
        with self._lock:
            return {**self._topic_filters, **self._retry_topic_filters}

    def filters(self) -> dict[str, Filter]:
        """Return the filters of all subscriptions by topic, including the retry topic."""
        return {topic: topic_filter.filter for topic, topic_filter in self.topic_filters().items()}

    def get(self, topic: str) -> TopicFilter | None:
        return self._topic_filters.get(topic) or self._retry_topic_filters.get(topic)

    def subscribed_ms(self, topic: str) -> int:
        """Return when the topic was subscribed to, by ``Timer.lease_ms``; 0 if there is no subscription."""
        topic_filter = self.get(topic)
        return 0 if topic_filter is None else topic_filter.subscribed_ms

    def filter(self, topic: str) -> Filter:
        """Return the filter of a topic. Without a subscription (an explicitly assigned queue), all messages match."""
        topic_filter = self._topic_filters.get(topic)
        return NO_FILTER if topic_filter is None else topic_filter.filter

    def is_unfiltered(self, queue: MessageQueue) -> bool:
        """Whether a queue is read without a filter."""
        return not self.filter(queue.topic)

    def __bool__(self) -> bool:
        return bool(self._topic_filters)

    def _next_version_ms(self) -> int:
        self._version_ms = max(self._version_ms + 1, self._wall_ms())
        return self._version_ms


MAX_RECONSUME_TIMES = 16
ORDERLY_MAX_RECONSUME_TIMES = (1 << 31) - 1  # no limit
MAX_PULL_BATCH = MAX_CONSUME_BATCH = 1024
# The most messages that a Proxy returns for one request, and how long the Proxy holds a request while there is no message.
MAX_MESSAGES, MAX_WAIT_S = 32, 20.0

# A user without a home folder, as in some containers, must set the option ``localOffsetsDir`` for broadcasting consumers.
_DEFAULT_OFFSETS_FOLDER = Path("~/.rocketmq_offsets")
_Range = tuple[str, float, float, float]  # an option, its value, and the smallest and the largest allowed value
NameOnWire = Callable[[str], str]  # returns the name of a topic or group at brokers


@dataclass(frozen=True, kw_only=True, slots=True)
class ConsumerSettings:
    """The settings of one consumer. Each kind of consumer uses some of the settings. Settings whose names end in ``_s`` are in
    seconds.

    Most attributes have the meaning of the option of the same name. The other attributes are:

    Attributes:
        uses_pop: Whether a Proxy delivers the messages (POP).
        wire_group: The name of the group at brokers, with its namespace or environment.
        name_servers: The name servers and ``wire_group`` together identify the offsets of a broadcasting group.
        arrow: Whether the listener gets record batches.
        pull_batch_size: Messages per pull. (Java's pull consumer requests 10; brokers return at most 32 by default.)
        pull_suspend_s: How long a broker may hold a pull while there is no new message.
        topic_max_count: The limit of cached messages of all queues of a topic together; None if each queue has a limit of its
            own.
        topic_max_bytes: The limit of cached bytes of all queues of a topic together; None if each queue has a limit of its own.
        max_retries: How often a failed message is delivered again. None means 16 times for concurrent consumers, and no limit
            for ``ordered`` consumers.
        consume_timeout_s: How long a listener may take before other members get the message.
        offsets_folder: The folder in which a broadcasting member stores its offsets.
        is_offsets_folder_given: Whether ``offsets_folder`` comes from an option.
    """

    group: str
    uses_pop: bool = False
    wire_group: str | None = None
    name_servers: tuple[str, ...] = ()
    environment: Environment | None = None
    clustering: bool = True
    ordered: bool = False
    arrow: bool = False
    auto_commit: bool = True
    auto_commit_interval_s: float = 5.0
    consume_from: ConsumeFrom = field(default_factory=ConsumeFrom)
    allocate: Allocate = field(default=partial(allocate, "averagely"))
    threads: int = 20
    consume_batch_max_size: int = 1
    pull_batch_size: int = 32
    pull_batch_size_in_bytes: int = 256 * 1024
    pull_interval_s: float = 0.0
    pull_delay_on_error_s: float = 1.0
    pull_delay_when_busy_s: float = 0.02
    pull_suspend_s: float = 15.0
    pull_timeout_s: float = 30.0
    request_timeout_s: float = 3.0
    thresholds: Thresholds = field(default_factory=Thresholds)
    topic_max_count: int | None = None
    topic_max_bytes: int | None = None
    max_retries: int | None = None
    suspend_time_s: float = 1.0
    consume_timeout_s: float = 900.0
    persist_interval_s: float = 5.0
    rebalance_interval_s: float = REBALANCE_INTERVAL_S
    route_refresh_s: float = 30.0
    post_subscription_when_pull: bool = False
    heartbeat_s: float = 30.0
    answer_stacks: bool = True
    answer_direct_messages: bool = True
    offsets_folder: Path = _DEFAULT_OFFSETS_FOLDER
    is_offsets_folder_given: bool = False

    @classmethod
    def from_options(cls, options: Options, name_on_wire: NameOnWire = str) -> ConsumerSettings:
        """Return the settings for these options. ``name_on_wire`` adds the namespace or environment to a name."""
        environment, group = group_in_environment(options)
        batch_max_size = options.consume_message_batch_max_size
        if options.arrow and "consume_message_batch_max_size" not in options.given_fields:
            batch_max_size = MAX_CONSUME_BATCH
        return cls(
            group=group,
            uses_pop=options.transport == transport.GRPC,
            environment=environment,
            clustering=options.model == "clustering",
            ordered=options.ordered,
            arrow=options.arrow,
            auto_commit=options.auto_commit,
            auto_commit_interval_s=options.auto_commit_interval,
            consume_from=ConsumeFrom.parse(options.consume_from_where),
            allocate=allocation_strategy(options, name_on_wire),
            wire_group=name_on_wire(group),
            name_servers=options.name_server,
            threads=options.consume_thread_min,
            consume_batch_max_size=batch_max_size,
            pull_batch_size=options.pull_batch_size,
            pull_batch_size_in_bytes=options.pull_batch_size_in_bytes,
            pull_interval_s=options.pull_interval,
            pull_delay_on_error_s=options.pull_time_delay_when_exception,
            request_timeout_s=options.request_timeout,
            answer_stacks=options.answer_stacks,
            answer_direct_messages=options.answer_direct_messages,
            thresholds=Thresholds(
                options.pull_threshold_for_queue,
                options.pull_threshold_size_for_queue,
                None if options.ordered else options.consume_concurrently_max_span,
            ),
            topic_max_count=options.pull_threshold_for_topic,
            topic_max_bytes=options.pull_threshold_size_for_topic,
            max_retries=options.max_reconsume_times,
            suspend_time_s=options.suspend_current_queue_time,
            consume_timeout_s=options.consume_timeout,
            persist_interval_s=options.persist_consumer_offset_interval,
            rebalance_interval_s=options.rebalance_interval,
            post_subscription_when_pull=options.post_subscription_when_pull,
            offsets_folder=_offsets_folder(options.local_offsets_dir),
            is_offsets_folder_given=options.local_offsets_dir is not None,
        )

    @property
    def may_read_ahead(self) -> bool:
        """Whether queues that are far behind may be read ahead.

        Returns False with a pull interval, or with limits for topics. Also returns False for an ordered listener without option
        ``arrow``, which is too slow to gain from reading ahead.
        """
        is_paced = self.pull_interval_s or self.topic_max_count is not None or self.topic_max_bytes is not None
        return (self.arrow or not self.ordered) and not is_paced

    @property
    def uses_retry_topic(self) -> bool:
        """Whether the consumer subscribes to the group's retry topic. With POP, the Proxy delivers failed messages again."""
        return self.clustering and not self.uses_pop

    @property
    def max_reconsume_times(self) -> int:
        """How often a failed message is redelivered before the message becomes a dead letter."""
        if self.max_retries is not None:
            return self.max_retries
        return ORDERLY_MAX_RECONSUME_TIMES if self.ordered else MAX_RECONSUME_TIMES

    def __post_init__(self) -> None:
        problems = group_problems(self.group) or group_problems(self.wire_group or self.group)
        problems += [
            f"option {name!r} is {value!r}; expected {low:g} to {high:g}"
            for name, value, low, high in self._ranges()
            if not low <= value <= high
        ]
        if problems:
            raise OptionError.of(problems)

    def _ranges(self) -> Sequence[_Range]:
        return (
            ("consumeThreadMin", self.threads, 1, 1000),
            ("consumeMessageBatchMaxSize", self.consume_batch_max_size, 1, MAX_CONSUME_BATCH),
            ("pullBatchSize", self.pull_batch_size, 1, MAX_MESSAGES if self.uses_pop else MAX_PULL_BATCH),
            ("pullInterval", self.pull_interval_s, 0, 65.535),
        )


def _offsets_folder(folder: str | None) -> Path:
    return (
        _DEFAULT_OFFSETS_FOLDER
        if folder is None
        else check_safe(expand_home(folder, "localOffsetsDir"), "localOffsetsDir")
    )


def group_problems(group: str) -> list[str]:
    """Return the problems of the name of a consumer group, as texts for an ``OptionError``; empty if the name is valid."""
    problem = group_problem(group)
    return [f"option 'group' is {group!r}; expected the name of a consumer group ({problem})"] if problem else []


def group_in_environment(options: Options) -> tuple[Environment | None, str]:
    """Return the environment of the options, or None, and the name of the consumer group in this environment."""
    environment = environment_of(options)
    if environment is None:
        return None, options.group
    return environment, environment.group(options.group)


def allocation_strategy(options: Options, name_on_wire: NameOnWire = str) -> Allocate:
    """Return the allocation strategy of the options with its parameters.

    All members of a group in an environment share the environment's queues, so the strategy 'environment' becomes 'averagely'.
    """
    strategy, machine_rooms = options.allocation_strategy, options.machine_rooms
    strategy_name = strategy.lower() if isinstance(strategy, str) else None
    if strategy_name is None:
        check_synchronous("option 'allocationStrategy'", strategy)
    if strategy_name == "environment":
        check_environment_set(options, "allocationStrategy")
        return partial(allocate, "averagely")
    if strategy_name == "machineroomnearby":
        raise OptionError(
            f"option 'allocationStrategy' is {strategy!r}, which needs the room of each member of a group, and members do "
            "not report it; expected module:callable, "
            "or one of averagely, averagelyByCircle, consistentHash, config, machineRoom, environment"
        )
    optional_parameters: dict[str, Any] = {
        "allocationConfig": options.allocation_config,
        "machineRooms": machine_rooms or None,
    }
    if strategy_name == "consistenthash":
        optional_parameters["onWire"] = name_on_wire
    parameters = {name: value for name, value in optional_parameters.items() if value is not None}
    return partial(allocate, strategy, **parameters)
