"""Results of administration: topics, groups and brokers as they were at the request, and the lag of a reader. Pure: the time is
an argument, and other modules send the requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rocketmq_spark.base.codes import Perm
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.model.pull import Filter, QueueBounds, QueueData

__all__ = [
    "AccessPolicy",
    "BrokerState",
    "GroupConnection",
    "GroupDescription",
    "OffsetChange",
    "TopicDescription",
    "TopicOnBroker",
    "TopicQueues",
    "UserAccount",
]

# The group under which administration and commands pull and send messages.
GROUP = "rocketmq-spark-cli"
# Logged or shown once instead of a broker's retention. Without TLS, the retention is not requested, because the answer would
# also contain passwords.
RETENTION_NOT_KNOWN = "retention not known without TLS"


def permission(perm: int) -> str:
    """Permission bits as text: ``RW``, ``R``, ``W`` or ``-``."""
    return ("R" if perm & Perm.READ else "") + ("W" if perm & Perm.WRITE else "") or "-"


@dataclass(frozen=True, slots=True)
class TopicQueues:
    """A topic after it was created or resized.

    Args:
        topic: The topic.
        brokers: Its queues on each broker, as the name server reports them.
        hidden: Number of messages in removed queues. They cannot be read until the topic has these queues again.
    """

    topic: str
    brokers: Mapping[str, QueueData]
    hidden: int = 0

    @property
    def write_queues(self) -> int:
        """How many queues take messages."""
        return sum(data.write_queues for data in self.brokers.values())


@dataclass(frozen=True, slots=True)
class TopicOnBroker:
    """A topic as one broker keeps it.

    Args:
        read_queues: Number of queues that can be read.
        write_queues: Number of queues that take messages.
        permission: ``RW``, ``R``, ``W`` or ``-``.
        message_type: ``NORMAL``, ``FIFO``, ``DELAY``, ``TRANSACTION``, ``MIXED``, …; None on brokers before 5.0.
        order: The topic's order flag (``Admin.update_topic``). On brokers before 5.0, whether name servers have an
            ``orderTopicConf`` for it.
        attributes: Its attributes, such as ``queue.type``; empty on brokers before 5.0.
    """

    read_queues: int
    write_queues: int
    permission: str
    message_type: str | None
    order: bool
    attributes: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class TopicDescription:
    """A topic: its settings on each broker, and the offsets of its queues.

    Args:
        topic: The topic.
        brokers: Its settings on each broker.
        queues: First offset, end offset and time of the last message of each queue, including queues without read permission.
    """

    topic: str
    brokers: Mapping[str, TopicOnBroker]
    queues: Mapping[MessageQueue, QueueBounds]

    @property
    def message_type(self) -> str | None:
        """Its message type; if brokers differ, all types, separated by commas. None on brokers that do not have types."""
        return _comma_separated({settings.message_type for settings in self.brokers.values()})

    @property
    def permission(self) -> str | None:
        """Its permission; if brokers differ, all permissions, separated by commas."""
        return _comma_separated({settings.permission for settings in self.brokers.values()})

    @property
    def messages(self) -> int:
        """How many messages its queues have."""
        return sum(bounds.max_offset - bounds.min_offset for bounds in self.queues.values())


def _comma_separated(texts: set[str | None]) -> str | None:
    return ", ".join(sorted(text for text in texts if text is not None)) or None


@dataclass(frozen=True, slots=True)
class GroupConnection:
    """A member of a consumer group, as brokers know it.

    Args:
        client_id: The id of its client. Queues are assigned to members by these ids.
        address: The address from which it is connected, ``host:port``.
        language: What its client is written in, such as ``JAVA``.
        version: The number of its client's version; RocketMQ 5.5.0 is 513.
    """

    client_id: str
    address: str
    language: str
    version: int


@dataclass(frozen=True, slots=True)
class GroupOnline:
    """The members of a consumer group on one broker, and the group's settings that they reported.

    Args:
        members: The members that are connected.
        consume_type: ``CONSUME_PASSIVELY`` (push) or ``CONSUME_ACTIVELY`` (pull).
        message_model: ``CLUSTERING`` or ``BROADCASTING``.
        consume_from_where: Where the group begins in a queue without an offset.
        filters: The subscriptions by topic, as the last heartbeat of any member reported them.
    """

    members: Sequence[GroupConnection]
    consume_type: str
    message_model: str
    consume_from_where: str
    filters: Mapping[str, Filter]


@dataclass(frozen=True, slots=True)
class GroupDescription:
    """A consumer group: its settings, its members and its offsets.

    Args:
        group: The group.
        settings: Its ``SubscriptionGroupConfig`` on each broker, such as ``{"retryMaxTimes": 16}``.
        members: Its members, sorted by client id.
        consume_type: ``CONSUME_PASSIVELY`` (push) or ``CONSUME_ACTIVELY`` (pull); None without members.
        message_model: ``CLUSTERING`` or ``BROADCASTING``; None without members.
        filters: What its members subscribe to, by topic.
        queues: Committed offset and lag of each queue of the topics for which it has offsets, its retry topic included.
    """

    group: str
    settings: Mapping[str, Mapping[str, object]]
    members: Sequence[GroupConnection]
    consume_type: str | None
    message_model: str | None
    filters: Mapping[str, Filter]
    queues: Sequence[QueueLag]

    @property
    def lag(self) -> int | None:
        """How many messages the group has not read, the sum of the known lags of its queues; None if no lag is known."""
        lags = [row.lag for row in self.queues if row.lag is not None]
        return sum(lags) if lags else None


@dataclass(frozen=True, slots=True)
class OffsetChange:
    """A group's committed offset of one queue before and after a change. The group continues at the new offset.

    Args:
        queue: The queue.
        before: The committed offset before; None without one.
        after: The offset that is set.
    """

    queue: MessageQueue
    before: int | None
    after: int

    @property
    def effect(self) -> str:
        """The effect of the change, as a phrase for people."""
        if self.before is None:
            return "begins there"
        difference = self.after - self.before
        return f"skips {difference}" if difference > 0 else f"reads {-difference} again" if difference else "stays"


@dataclass(frozen=True, slots=True)
class BrokerState:
    """One broker process, master or slave, and what it reports of itself.

    Args:
        broker_name: Its name, which a master shares with its slaves.
        cluster: The cluster that it belongs to.
        broker_id: 0 for the master.
        address: Its address, ``host:port``.
        version: Its version as text, such as ``V5_5_0``; None if it did not answer.
        started_ms: When it started, in ms since 1970; None if it did not say.
        put_per_s: Messages stored per second, in the last ten seconds.
        get_per_s: Messages read per second, in the last ten seconds.
        disk_used: How full the disk of its commit log is, 0 to 1.
        facts: Everything that it reports, by the broker's own names (``GET_BROKER_RUNTIME_INFO``); None if it did not answer.
        error: Why its state is unknown; None if it answered.
    """

    broker_name: str
    cluster: str
    broker_id: int
    address: str
    version: str | None = None
    started_ms: int | None = None
    put_per_s: float | None = None
    get_per_s: float | None = None
    disk_used: float | None = None
    facts: Mapping[str, str] | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class UserAccount:
    """A user of ACL 2.0. If brokers have different properties for a user, there is an account for each set of properties.

    Args:
        name: The user name, which is the access key.
        is_super: Whether it may do everything; None if unknown (``Admin.set_user``).
        enabled: Whether it may connect; None if unknown.
        brokers: The brokers that have the user with these properties.
    """

    name: str
    is_super: bool | None
    enabled: bool | None
    brokers: Sequence[str]


@dataclass(frozen=True, slots=True)
class AccessPolicy:
    """What a user of ACL 2.0 may do, or may not do, with a resource.

    Args:
        user: The user name.
        resource: Such as ``Topic:orders``, ``Group:billing*`` or ``Cluster:*``.
        actions: Such as ``Pub``, ``Sub``, ``Get``.
        allowed: True allows the actions, False denies them.
        sources: Only for clients with these addresses or networks; empty for all.
        brokers: The brokers that have this policy.
    """

    user: str
    resource: str
    actions: Sequence[str]
    allowed: bool
    sources: Sequence[str]
    brokers: Sequence[str]


class QueueLag(NamedTuple):
    """The offsets of one queue, and a reader's position in it.

    ``min_offset`` (first) and ``max_offset`` (end) are None if no broker reported them. ``position`` is the next offset to
    read; None if the reader has none. ``next_stored_ms`` is the store time of the next message to read (epoch ms); None if
    unknown.
    """

    queue: MessageQueue
    min_offset: int | None
    position: int | None
    max_offset: int | None
    next_stored_ms: int | None = None

    @property
    def next_offset(self) -> int | None:
        """The first offset to read that is still stored: the higher of ``position`` and ``min_offset``."""
        return None if self.position is None or self.min_offset is None else max(self.position, self.min_offset)

    @property
    def went_back(self) -> bool:
        """Whether the queue ends before the position: its topic was created again, or its broker lost messages."""
        return self.position is not None and self.max_offset is not None and self.position > self.max_offset

    @property
    def lag(self) -> int | None:
        """Unread messages that are still stored; gaps in offsets count too. None if unknown, or if the queue ends before the
        position (``went_back``).
        """
        if self.next_offset is None or self.max_offset is None or self.went_back:
            return None
        return max(0, self.max_offset - self.next_offset)

    @property
    def lost(self) -> int | None:
        """The number of messages that were removed before they were read. None if unknown, or if the queue ends before the
        position (``went_back``).
        """
        if self.position is None or self.min_offset is None or self.went_back:
            return None
        return max(0, self.min_offset - self.position)

    def behind_ms(self, now_ms: int) -> int | None:
        """The age of the next message; 0 if there is none, None if it is unknown."""
        if self.lag == 0:
            return 0
        return None if self.lag is None or self.next_stored_ms is None else max(0, now_ms - self.next_stored_ms)


class Total(NamedTuple):
    """Totals of all queues: unread and lost messages, the age of the oldest unread message, and queues whose lag is unknown.

    The first three are None if no queue's lag is known.
    """

    lag: int | None
    lost: int | None
    behind_ms: int | None
    unknown_queues: int


def total(queues: Iterable[QueueLag], now_ms: int) -> Total:
    """Add up ``queues``. Queues without a known lag are only counted. The total age is unknown if the age of one queue is
    unknown.
    """
    all_queues = list(queues)
    known_lags = [queue_lag for queue_lag in all_queues if queue_lag.lag is not None]
    if not known_lags:
        return Total(None, None, None, len(all_queues))
    ages = [queue_lag.behind_ms(now_ms) for queue_lag in known_lags]
    return Total(
        sum(queue_lag.lag or 0 for queue_lag in known_lags),
        sum(queue_lag.lost or 0 for queue_lag in known_lags),
        None if None in ages else max(age for age in ages if age is not None),
        len(all_queues) - len(known_lags),
    )


class Pace(NamedTuple):
    """Offsets read and written per second between two measurements, and the seconds until the reader has caught up at this pace.

    Unknown values are None. ``catch_up_s`` is also None if the reader does not catch up.
    """

    read_per_s: float | None = None
    written_per_s: float | None = None
    catch_up_s: float | None = None


def pace(earlier_lags: Iterable[QueueLag], later_lags: Iterable[QueueLag], seconds: float) -> Pace:
    """Compute the pace from queues whose lag was known at both measurements. The pace is unknown if offsets decreased: the
    group's offsets were reset, or the topic was created again.
    """
    lags_before = {queue_lag.queue: queue_lag for queue_lag in earlier_lags if queue_lag.lag is not None}
    pairs = [
        (lags_before[queue_lag.queue], queue_lag)
        for queue_lag in later_lags
        if queue_lag.lag is not None and queue_lag.queue in lags_before
    ]
    if not pairs or seconds <= 0:
        return Pace()
    read_counts = [(later.position or 0) - (earlier.position or 0) for earlier, later in pairs]
    written_counts = [(later.max_offset or 0) - (earlier.max_offset or 0) for earlier, later in pairs]
    if min(read_counts) < 0 or min(written_counts) < 0:
        return Pace()
    unread_count, gain = sum(later.lag or 0 for _, later in pairs), sum(read_counts) - sum(written_counts)
    catch_up_s = 0.0 if not unread_count else unread_count * seconds / gain if gain > 0 else None
    return Pace(sum(read_counts) / seconds, sum(written_counts) / seconds, catch_up_s)
