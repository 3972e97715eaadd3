"""Heartbeat data of a member of a consumer group, requests of brokers to the member, and the answers.

Values only, named as in Java's ``ConsumerData``, ``ConsumerRunningInfo`` and ``ConsumeMessageDirectlyResult``; ``wire/bodies``
encodes them.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rocketmq_spark.model import Filter, MessageQueue, ReceivedMessage


@dataclass(frozen=True, slots=True)
class Membership:
    """A consumer as heartbeats describe it: its settings, and its subscriptions with the time of their last change."""

    subscriptions: Mapping[str, Filter]
    versions_ms: Mapping[str, int] = field(default_factory=dict)
    consume_type: str = "CONSUME_PASSIVELY"
    message_model: str = "CLUSTERING"
    consume_from_where: str = "CONSUME_FROM_LAST_OFFSET"
    unit_mode: bool = False


@dataclass(frozen=True, slots=True)
class MembersChanged:
    """A broker's notice that a member joined or left, or changed its subscription (request 40). It expects no answer."""


@dataclass(frozen=True, slots=True)
class ResetOffsets:
    """A broker's request to continue at these offsets (220, from ``mqadmin resetOffsetByTime``). It expects no answer."""

    topic: str
    offsets: Mapping[MessageQueue, int]


@dataclass(frozen=True, slots=True)
class GetConsumedOffsets:
    """A broker's request for the consumed offsets of ``topic`` (221). The answer is an offset for each queue."""

    topic: str


@dataclass(frozen=True, slots=True)
class GetRunningInfo:
    """A broker's request for the state of the member (307). The answer is a ``RunningInfo``. It contains the stacks of threads
    if ``includes_stacks`` is true.
    """

    includes_stacks: bool = False


@dataclass(frozen=True, slots=True)
class ConsumeDirectly:
    """A broker's request to pass this message to the listener now (309). The answer is a ``DirectResult``; no offset changes. The
    body may be compressed.
    """

    message: ReceivedMessage


@dataclass(frozen=True, slots=True)
class QueueInfo:
    """The state of one queue of a member. Offsets are None if nothing is cached; times are ms since 1970, None for never."""

    commit_offset: int | None = None
    cached_min_offset: int | None = None
    cached_max_offset: int | None = None
    cached_count: int = 0
    cached_bytes: int = 0
    locked: bool = False
    dropped: bool = False
    last_lock_ms: int | None = None
    last_pull_ms: int | None = None
    last_consume_ms: int | None = None


@dataclass(frozen=True, slots=True)
class TopicFigures:
    """Recent figures of one topic.

    Args:
        pull_ms: Mean time of a pull in the last minute, in ms; None if there was none.
        pulled_per_s: Messages pulled per second, in the last minute.
        consume_ms: Mean time of a call of the listener in the last minute, in ms. If the last minute had no call, the mean of
            the last hour; None without a call.
        consumed_per_s: Messages finished per second, in the last minute.
        failed_per_s: Messages that failed per second, in the last minute.
        failed: Messages that failed in the last hour.
    """

    pull_ms: float | None = None
    pulled_per_s: float = 0.0
    consume_ms: float | None = None
    consumed_per_s: float = 0.0
    failed_per_s: float = 0.0
    failed: int = 0


@dataclass(frozen=True, slots=True)
class ConsumerStats:
    """Counts of a consumer since its start, and its current state: the value of ``Consumer.stats()``.

    Args:
        consumed: Messages that a listener finished.
        failed: Messages that a listener did not finish; each attempt counts.
        sent_back: Messages that were returned to the broker, which delivers them again later.
        cached: Messages that were pulled and are not finished.
        lag: Unfinished messages in the consumer's queues, up to the ends that brokers reported within the last minute. None
            while the end of a queue, or the list of the consumer's queues, is unknown; always None over gRPC.
        rebalances: How often the assigned queues of a topic changed.
        topics: Recent figures by topic, the retry topic included.
    """

    consumed: int = 0
    failed: int = 0
    sent_back: int = 0
    cached: int = 0
    lag: int | None = None
    rebalances: int = 0
    topics: Mapping[str, TopicFigures] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class RunningInfo:
    """A member as ``mqadmin consumerStatus`` shows it; ``properties`` are its settings by Java's names.

    ``started_ms`` is in ms since 1970. Tools need it, because they compare only the subscriptions of members that have run for
    two minutes.
    """

    membership: Membership
    started_ms: int
    ordered: bool = False
    threads: int = 0
    properties: Mapping[str, str] = field(default_factory=dict)
    queues: Mapping[MessageQueue, QueueInfo] = field(default_factory=dict)
    topics: Mapping[str, TopicFigures] = field(default_factory=dict, repr=False)
    stacks: str | None = None


class DirectOutcome(enum.Enum):
    """The outcome of a listener's call with one message, as in Java's ``CMResult``."""

    SUCCESS = "CR_SUCCESS"
    LATER = "CR_LATER"
    ROLLBACK = "CR_ROLLBACK"
    COMMIT = "CR_COMMIT"
    THROW_EXCEPTION = "CR_THROW_EXCEPTION"
    RETURN_NULL = "CR_RETURN_NULL"


@dataclass(frozen=True, slots=True)
class DirectResult:
    """The answer to ``ConsumeDirectly``; ``remark`` is the text of the listener's exception."""

    outcome: DirectOutcome
    spent_ms: int
    ordered: bool = False
    auto_commit: bool = True
    remark: str | None = None


BrokerRequest = MembersChanged | ResetOffsets | GetConsumedOffsets | GetRunningInfo | ConsumeDirectly
RequestAnswer = Mapping[MessageQueue, int] | RunningInfo | DirectResult

# A function that answers a broker's request. It gets the broker's address and the request, runs on a thread of the group, and
# may block. It returns None if the broker expects no answer.
RequestCallback = Callable[[str, BrokerRequest], RequestAnswer | None]
