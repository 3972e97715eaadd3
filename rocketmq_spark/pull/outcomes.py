"""What an answer to a pull means for a reader that keeps its offsets itself. This module is pure.

RocketMQ's own clients always continue at ``nextBeginOffset``. For a reader that keeps its offsets itself, this offset may be
wrong, because code 21 can mean expired data, an index that lags behind an acknowledged send, a topic that was created again, or
an operator's reset. The rules are in docs/guarantees.md.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

from rocketmq_spark.base.codes import OFFSET_RESET, PULL_FORBIDDEN_REMARK, READ_FORBIDDEN_TYPES, Response
from rocketmq_spark.errors import AccessDenied, BrokerError, error_for
from rocketmq_spark.model import OffsetRange
from rocketmq_spark.remoting.bulk import EmptyAnswer


class Cause(enum.Enum):
    """Why offsets cannot be read any more."""

    TRUNCATED = "truncated by retention"
    TOPIC_DELETED = "topic deleted"
    QUEUE_GONE = "queue gone"
    WENT_BACK = "offset went back: the topic was deleted and made again, or the broker lost its tail"
    NOT_KEPT = "the compaction topic does not keep it: sent in a batch without a key, or the topic was made again"


OnLoss = Callable[[OffsetRange, Cause], None]


@dataclass(frozen=True, slots=True)
class Continue:
    """There is no message before ``offset``, so the next pull begins at ``offset``."""

    offset: int


@dataclass(frozen=True, slots=True)
class RepeatPull:
    """Repeat the pull after a pause. ``reroute`` says that the address of the broker may have changed."""

    reroute: bool = False


@dataclass(frozen=True, slots=True)
class Reconnect:
    """Repeat the pull on a new connection."""


@dataclass(frozen=True, slots=True)
class Lost:
    """Messages before ``end_offset`` are lost."""

    end_offset: int
    cause: Cause


@dataclass(frozen=True, slots=True)
class Suspect:
    """Messages may be lost, or the broker may lag, so the pull is repeated during the grace period. After the grace period, the
    messages before ``end_offset`` count as lost. If ``end_offset`` is None, all remaining messages of the range count as
    lost.
    """

    cause: Cause
    end_offset: int | None = None


@dataclass(frozen=True, slots=True)
class Reset:
    """An operator reset the group to ``offset``. The broker reports the reset to one pull only. A reader that does not use the
    group's offsets repeats the pull.
    """

    offset: int


Decision = Continue | RepeatPull | Reconnect | Lost | Suspect | Reset


# The codes of temporary errors: the broker is busy, is starting, or no longer has the queue.
_TEMPORARY_CODES = frozenset(
    {
        Response.SYSTEM_BUSY,
        Response.SERVICE_NOT_AVAILABLE,
        Response.FLOW_CONTROL,
        Response.NOT_LEADER_FOR_QUEUE,
        Response.FILTER_DATA_NOT_EXIST,
        Response.FILTER_DATA_NOT_LATEST,
    }
)


# Remarks that a slave sends with the code for "nothing matched" if only its master can answer the pull.
_MASTER_ONLY_REMARKS = frozenset(
    {"OFFSET_TOO_SMALL", "OFFSET_OVERFLOW_BADLY", "NO_MESSAGE_IN_QUEUE", "NO_MATCHED_LOGIC_QUEUE", OFFSET_RESET}
)


def judge(start: int, answer: EmptyAnswer) -> Decision | BrokerError:
    """Decide how to react to an answer to a pull at ``start``, an offset that the broker had when the read was planned."""
    code = answer.code
    if code == Response.PULL_NOT_FOUND:
        return _judge_not_found(start, answer)
    if code == Response.PULL_RETRY_IMMEDIATELY:
        return _judge_nothing_matched(start, answer)
    if code == Response.PULL_OFFSET_MOVED:
        return _judge_moved_offset(start, answer)
    if code == Response.GO_AWAY:
        return Reconnect()
    if code == Response.NO_PERMISSION:
        is_unreadable = (
            PULL_FORBIDDEN_REMARK in answer.remark
            if answer.forbidden_type is None
            else answer.forbidden_type in READ_FORBIDDEN_TYPES
        )
        return RepeatPull() if is_unreadable else _error_of(answer)
    if code in _TEMPORARY_CODES:
        return RepeatPull(reroute=code != Response.SYSTEM_BUSY)
    if code == Response.TOPIC_NOT_EXIST:
        return Suspect(Cause.TOPIC_DELETED)
    if code == Response.INVALID_PARAMETER:
        return Suspect(Cause.QUEUE_GONE)
    return _error_of(answer)


def _judge_not_found(start: int, answer: EmptyAnswer) -> Decision:
    next_offset = answer.next_offset
    if next_offset is not None and next_offset > start:
        if answer.remark == "OFFSET_FOUND_NULL":  # the index, or one of its files, is missing or not open yet
            return Suspect(Cause.TRUNCATED, next_offset)
        return Continue(next_offset)
    return Suspect(Cause.WENT_BACK)  # the queue ends before the end that the plan saw


def _judge_nothing_matched(start: int, answer: EmptyAnswer) -> Decision:
    next_offset = answer.next_offset
    if next_offset is None or next_offset <= start or answer.remark in _MASTER_ONLY_REMARKS:
        return RepeatPull(reroute=True)
    if answer.remark == "MESSAGE_WAS_REMOVING":
        return Lost(next_offset, Cause.TRUNCATED)
    if answer.min_offset is not None and answer.min_offset > start:
        return Lost(answer.min_offset, Cause.TRUNCATED)  # the messages before the minimum offset were removed
    return Continue(next_offset)


def _judge_moved_offset(start: int, answer: EmptyAnswer) -> Decision:
    if answer.remark == OFFSET_RESET:
        return RepeatPull() if answer.next_offset is None else Reset(answer.next_offset)
    min_offset = answer.min_offset
    if min_offset is None and answer.remark == "OFFSET_TOO_SMALL":
        min_offset = answer.next_offset
    if min_offset is not None and min_offset > start:
        return Lost(min_offset, Cause.TRUNCATED)
    return Suspect(Cause.WENT_BACK)


def _error_of(answer: EmptyAnswer) -> BrokerError:
    error_class = error_for(answer.code, answer.remark)
    remedy = None
    if issubclass(error_class, AccessDenied):
        remedy = "A reader needs Sub and Get on the topic and Sub on the group (access denied is never retried)"
    elif answer.code in (
        Response.SUBSCRIPTION_GROUP_NOT_EXIST,
        Response.SUBSCRIPTION_NOT_EXIST,
        Response.SUBSCRIPTION_NOT_LATEST,
    ):
        remedy = "Create the consumer group on the broker, or name an existing one with option 'group'"
    elif "SQL92" in answer.remark:
        remedy = "Set enablePropertyFilter=true in the broker's configuration, or filter with option 'tags'"
    return error_class("the broker refused a pull", None, answer.code, None, None, answer.remark, remedy)
