"""The settings of ``Consumer``, ``PullConsumer``, and consumers of a Proxy's messages (POP), and their subscriptions.

Names and defaults are those of ``DefaultMQPushConsumer`` and ``DefaultLitePullConsumer`` unless a comment gives a reason.
Heartbeats, pulls and rebalances all read one copy of the subscriptions.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from rocketmq_spark.base.arguments import synchronous, text, wrong
from rocketmq_spark.consumer.process_queue import Thresholds
from rocketmq_spark.consumer.rebalance import REBALANCE_INTERVAL_S, Allocate, ConsumeFrom
from rocketmq_spark.errors import OptionError
from rocketmq_spark.model import NO_FILTER, Filter, MessageQueue
from rocketmq_spark.options import Options, transport
from rocketmq_spark.options.paths import confined, expanded
from rocketmq_spark.queues.allocation import allocate
from rocketmq_spark.queues.environment import Environment, check_chosen, environment_of
from rocketmq_spark.wire.names import group_problem, read_problem, retry_topic
from rocketmq_spark.wire.properties import user_subscription


def checked_topic(topic: object) -> str:
    """Return a topic that a user names. Raises ``OptionError`` for an invalid name and other types."""
    if not isinstance(topic, str) or (problem := read_problem(topic)):
        raise wrong(
            "topic", topic, f"the name of a topic ({problem})" if isinstance(topic, str) else "the name of a topic"
        )
    return topic


def filter_of(tags: str | None, sql: str | None) -> Filter:
    """Return the filter of one subscription. Raises ``OptionError`` for tags with SQL, blank ones, and other types."""
    for name, given in (("tags", tags), ("sql", sql)):
        if given is not None:
            text(name, given, "a str")
    if tags is not None and sql is not None:
        raise OptionError(f"tags are {tags!r} and sql is {sql!r}; expected at most one of them")
    for name, given in (("tags are", tags), ("sql is", sql)):
        try:
            (given or "").encode()
        except UnicodeEncodeError as e:  # encoding it for a heartbeat would fail for all topics
            raise OptionError(f"{name} {given!r}; expected characters that can be sent: {e}") from e
    if sql is not None:
        if not sql.strip():
            raise wrong("sql", sql, "an SQL92 expression, or None for all messages")
        return Filter(sql, "SQL92")
    try:
        wanted = user_subscription(tags)
    except ValueError as e:
        raise OptionError(f"tags are {tags!r}; expected '*' or such as 'a || b', one or several ({e})") from e
    return Filter(tags) if tags and wanted.tags else NO_FILTER


@dataclass(frozen=True, slots=True)
class TopicFilter:
    """The filter of one topic. Its version is ``since_ms``; it was set ``at_ms`` by the clock of leases.

    A broker rejects pulls with a later version than that of the last heartbeat.
    """

    filter: Filter
    version_ms: int
    since_ms: int
    at_ms: int = field(default=0, compare=False)


class Subscriptions:
    """The subscriptions of one consumer. Each change of a topic gets a later version, and affects no other topic.

    With ``clustering``, they include the group's retry topic, without a filter.
    """

    def __init__(
        self, group: str, clustering: bool, wall_ms: Callable[[], int], lease_ms: Callable[[], int] = lambda: 0
    ) -> None:
        self._wall_ms, self._lease_ms = wall_ms, lease_ms
        self._lock = threading.Lock()
        self._version_ms = wall_ms()
        self._retry: dict[str, TopicFilter] = {}
        if clustering:
            self._retry[retry_topic(group)] = TopicFilter(NO_FILTER, self._version_ms, self._version_ms)
        self._topics: dict[str, TopicFilter] = {}

    def add(self, topic: str, wanted: Filter) -> None:
        """Subscribe to a topic."""
        with self._lock:
            version_ms = self._later()
            self._topics = {**self._topics, topic: TopicFilter(wanted, version_ms, version_ms, self._lease_ms())}

    def put_back(self, topic: str, before: TopicFilter | None) -> None:
        """Restore the subscription of a topic before its last change; None removes it."""
        if before is None:
            self.remove(topic)
        else:
            self.add(topic, before.filter)

    def remove(self, topic: str) -> None:
        with self._lock:
            self._topics = {known: each for known, each in self._topics.items() if known != topic}

    def touch(self, topic: str) -> None:
        """Give the subscription a new version, because queues of the topic changed."""
        with self._lock:
            for topics in (self._topics, self._retry):
                if topic in topics:
                    topics[topic] = replace(topics[topic], version_ms=self._later())

    def each(self) -> Mapping[str, TopicFilter]:
        """All subscriptions, including the retry topic."""
        with self._lock:
            return {**self._topics, **self._retry}

    def all(self) -> dict[str, Filter]:
        """The filters of ``each``."""
        return {topic: each.filter for topic, each in self.each().items()}

    def get(self, topic: str) -> TopicFilter | None:
        return self._topics.get(topic) or self._retry.get(topic)

    def at_ms(self, topic: str) -> int:
        """Return when a topic was subscribed to, by the clock of leases; 0 if it is not."""
        known = self.get(topic)
        return 0 if known is None else known.at_ms

    def filter(self, topic: str) -> Filter:
        """Return the filter of a topic; one that accepts everything without a subscription, for explicitly assigned queues."""
        known = self._topics.get(topic)
        return NO_FILTER if known is None else known.filter

    def plain(self, queue: MessageQueue) -> bool:
        """Return whether a queue is read without a filter."""
        return not self.filter(queue.topic)

    def __bool__(self) -> bool:
        return bool(self._topics)

    def _later(self) -> int:
        self._version_ms = max(self._version_ms + 1, self._wall_ms())
        return self._version_ms


MAX_RECONSUME_TIMES = 16
ORDERLY_MAX_RECONSUME_TIMES = (1 << 31) - 1  # without a limit
MAX_PULL_BATCH = MAX_CONSUME_BATCH = 1024
# What a broker hands out at once, and for how long a question for which there is nothing yet waits at a Proxy.
MAX_MESSAGES, MAX_WAIT_S = 32, 20.0

# A user without a home, as in some containers, has no broadcasting consumers without option ``localOffsetsDir``.
_DEFAULT_OFFSETS = Path("~/.rocketmq_offsets")
_Range = tuple[str, float, float, float]
OnWire = Callable[[str], str]  # a topic or group as brokers know it


@dataclass(frozen=True, kw_only=True, slots=True)
class ConsumerSettings:
    """Settings of one consumer; times in seconds. Each kind uses those that it needs.

    ``popped``: a Proxy hands the messages out. ``arrow``: the listener gets record batches. ``max_tries`` None: 16 repetitions
    of a failed message, endless ones where ``ordered``. ``topic_count`` and ``topic_bytes`` bound what is cached of a whole topic
    instead of each queue. ``offsets_folder`` is where a broadcasting member keeps its offsets, under ``wire_group`` and
    ``name_servers``: groups of one name in two namespaces or clusters are different groups.
    ``offsets_folder_given`` is whether an option names it. ``consume_timeout_s`` is how long a
    listener may take; with ``popped``, other members then get the message.

    ``pull_suspend_s`` is what brokers may take until they answer "nothing new".

    Java's pull consumer asks for 10 messages a pull; 32 is what a broker gives at most unless it is configured otherwise.
    """

    group: str
    popped: bool = False
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
    topic_count: int | None = None
    topic_bytes: int | None = None
    max_tries: int | None = None
    suspend_time_s: float = 1.0
    consume_timeout_s: float = 900.0
    persist_interval_s: float = 5.0
    rebalance_interval_s: float = REBALANCE_INTERVAL_S
    route_refresh_s: float = 30.0
    post_subscription_when_pull: bool = False
    heartbeat_s: float = 30.0
    answer_stacks: bool = True
    answer_direct_messages: bool = True
    offsets_folder: Path = _DEFAULT_OFFSETS
    offsets_folder_given: bool = False

    @classmethod
    def of(cls, options: Options, on_wire: OnWire = str) -> ConsumerSettings:
        """Return the settings for these options. ``on_wire`` adds the namespace or environment to a name."""
        environment, group = isolated(options)
        batch_max_size = options.consume_message_batch_max_size
        if options.arrow and "consume_message_batch_max_size" not in options.given:
            batch_max_size = MAX_CONSUME_BATCH
        return cls(
            group=group,
            popped=options.transport == transport.GRPC,
            environment=environment,
            clustering=options.model == "clustering",
            ordered=options.ordered,
            arrow=options.arrow,
            auto_commit=options.auto_commit,
            auto_commit_interval_s=options.auto_commit_interval,
            consume_from=ConsumeFrom.of(options.consume_from_where),
            allocate=allocation(options, on_wire),
            wire_group=on_wire(group),
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
            topic_count=options.pull_threshold_for_topic,
            topic_bytes=options.pull_threshold_size_for_topic,
            max_tries=options.max_reconsume_times,
            suspend_time_s=options.suspend_current_queue_time,
            consume_timeout_s=options.consume_timeout,
            persist_interval_s=options.persist_consumer_offset_interval,
            rebalance_interval_s=options.rebalance_interval,
            post_subscription_when_pull=options.post_subscription_when_pull,
            offsets_folder=_offsets_folder(options.local_offsets_dir),
            offsets_folder_given=options.local_offsets_dir is not None,
        )

    @property
    def reads_ahead(self) -> bool:
        """Whether queues that are far behind may be read ahead: without a pull interval or limits of a topic. An ordered listener
        of messages is not fast enough to need it.
        """
        paced = self.pull_interval_s or self.topic_count is not None or self.topic_bytes is not None
        return (self.arrow or not self.ordered) and not paced

    @property
    def retry_topic(self) -> bool:
        """Whether failed messages return through a retry topic that the consumer subscribes to. A Proxy handles those of POP."""
        return self.clustering and not self.popped

    @property
    def max_reconsume_times(self) -> int:
        """How often a failed message is redelivered before it becomes a dead letter."""
        if self.max_tries is not None:
            return self.max_tries
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
            ("pullBatchSize", self.pull_batch_size, 1, MAX_MESSAGES if self.popped else MAX_PULL_BATCH),
            ("pullInterval", self.pull_interval_s, 0, 65.535),
        )


def _offsets_folder(folder: str | None) -> Path:
    return _DEFAULT_OFFSETS if folder is None else confined(expanded(folder, "localOffsetsDir"), "localOffsetsDir")


def group_problems(group: str) -> list[str]:
    """Return what is wrong with the name of a consumer group, as a sentence about its option; empty if it is valid."""
    problem = group_problem(group)
    return [f"option 'group' is {group!r}; expected the name of a consumer group ({problem})"] if problem else []


def isolated(options: Options) -> tuple[Environment | None, str]:
    """Return the environment of the options, if any, and the consumer group to use: that of the environment, or the given one."""
    environment = environment_of(options)
    if environment is None:
        return None, options.group
    return environment, environment.group(options.group)


def allocation(options: Options, on_wire: OnWire = str) -> Allocate:
    """Return the allocation strategy of the options with its parameters. Only its members share an environment's queues."""
    strategy, rooms = options.allocation_strategy, options.machine_rooms
    name = strategy.lower() if isinstance(strategy, str) else None
    if name is None:
        synchronous("option 'allocationStrategy'", strategy)
    if name == "environment":
        check_chosen(options, "allocationStrategy")
        return partial(allocate, "averagely")
    if name == "machineroomnearby":
        raise OptionError(
            f"option 'allocationStrategy' is {strategy!r}, which needs the room of each member of a group, and members do "
            "not report it; expected module:callable, "
            "or one of averagely, averagelyByCircle, consistentHash, config, machineRoom, environment"
        )
    config: dict[str, Any] = {"allocationConfig": options.allocation_config, "machineRooms": rooms or None}
    if name == "consistenthash":
        config["onWire"] = on_wire
    known = {name: value for name, value in config.items() if value is not None}
    return partial(allocate, strategy, **known)
