"""What an answer to a pull means for a reader that owns its offsets: pure decisions, no waiting.

RocketMQ's own clients follow ``nextBeginOffset`` wherever it leads. A reader with offsets of its own must not: the same
code 21 stands for data that expired, for an index that lags behind an acknowledged send, for a topic that was made
again and for an operator's reset. Rules: docs/guarantees.md.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

from rocketmq_spark.base.codes import OFFSET_RESET, UNREADABLE, Response
from rocketmq_spark.errors import AccessDenied, BrokerError, error_for
from rocketmq_spark.model import OffsetRange
from rocketmq_spark.remoting.bulk import Answer


class Cause(enum.Enum):
    """Why offsets cannot be read any more."""

    TRUNCATED = "truncated by retention"
    TOPIC_DELETED = "topic deleted"
    QUEUE_GONE = "queue gone"
    WENT_BACK = "offset went back: the topic was deleted and made again, or the broker lost its tail"


OnLoss = Callable[[OffsetRange, Cause], None]


@dataclass(frozen=True, slots=True)
class Continue:
    """Nothing to read before ``at``: ask there now."""

    at: int


@dataclass(frozen=True, slots=True)
class RepeatPull:
    """Ask the same once more after a pause; ``reroute`` when the address may have changed."""

    reroute: bool = False


@dataclass(frozen=True, slots=True)
class Reconnect:
    """Ask the same on a new connection."""


@dataclass(frozen=True, slots=True)
class Lost:
    """What is missing before ``until`` is gone for good."""

    until: int
    cause: Cause


@dataclass(frozen=True, slots=True)
class Suspect:
    """It looks like loss but may be lag: ask again for a while, then it is loss up to ``until``, or of all the rest."""

    cause: Cause
    until: int | None = None


@dataclass(frozen=True, slots=True)
class Reset:
    """An operator moved the group to ``at``, which its broker says to one pull only: who owns its offsets asks the same again."""

    at: int


Decision = Continue | RepeatPull | Reconnect | Lost | Suspect | Reset

# Answers that say "not now": the broker is busy, starting, or not the right one any more.
_PASSING = frozenset(
    {
        Response.SYSTEM_BUSY,
        Response.SERVICE_NOT_AVAILABLE,
        Response.FLOW_CONTROL,
        Response.NOT_LEADER_FOR_QUEUE,
        Response.FILTER_DATA_NOT_EXIST,
        Response.FILTER_DATA_NOT_LATEST,
    }
)
# A slave says these with the code for "nothing matched": only its master knows.
_BOUNDS_REMARKS = frozenset(
    {"OFFSET_TOO_SMALL", "OFFSET_OVERFLOW_BADLY", "NO_MESSAGE_IN_QUEUE", "NO_MATCHED_LOGIC_QUEUE", OFFSET_RESET}
)


def judge(start: int, answer: Answer) -> Decision | BrokerError:
    """What to do about ``answer`` to a pull at ``start``, which the broker was known to have when the read began."""
    code = answer.code
    if code == Response.PULL_NOT_FOUND:
        return _not_found(start, answer)
    if code == Response.PULL_RETRY_IMMEDIATELY:
        return _nothing_matched(start, answer)
    if code == Response.PULL_OFFSET_MOVED:
        return _moved(start, answer)
    if code == Response.GO_AWAY:
        return Reconnect()
    if code == Response.NO_PERMISSION and answer.forbidden in UNREADABLE:
        return RepeatPull()
    if code in _PASSING:
        return RepeatPull(reroute=code != Response.SYSTEM_BUSY)
    if code == Response.TOPIC_NOT_EXIST:
        return Suspect(Cause.TOPIC_DELETED)
    if code == Response.INVALID_PARAMETER:
        return Suspect(Cause.QUEUE_GONE)
    return _refusal(answer)


def _not_found(start: int, answer: Answer) -> Decision:
    beyond = answer.next_offset
    if beyond is not None and beyond > start:
        if answer.remark == "OFFSET_FOUND_NULL":  # a file of the index is missing, all of it, or not open yet
            return Suspect(Cause.TRUNCATED, beyond)
        return Continue(beyond)
    return Suspect(Cause.WENT_BACK)  # the end of the queue, before the end that the plan saw


def _nothing_matched(start: int, answer: Answer) -> Decision:
    beyond = answer.next_offset
    if beyond is None or beyond <= start or answer.remark in _BOUNDS_REMARKS:
        return RepeatPull(reroute=True)
    if answer.remark == "MESSAGE_WAS_REMOVING":
        return Lost(beyond, Cause.TRUNCATED)
    if answer.min_offset is not None and answer.min_offset > start:
        return Lost(answer.min_offset, Cause.TRUNCATED)  # nothing that the filter wants, or nothing that is left
    return Continue(beyond)


def _moved(start: int, answer: Answer) -> Decision:
    if answer.remark == OFFSET_RESET:
        return RepeatPull() if answer.next_offset is None else Reset(answer.next_offset)
    low = answer.min_offset
    if low is None and answer.remark == "OFFSET_TOO_SMALL":
        low = answer.next_offset
    if low is not None and low > start:
        return Lost(low, Cause.TRUNCATED)
    return Suspect(Cause.WENT_BACK)


def _refusal(answer: Answer) -> BrokerError:
    kind = error_for(answer.code, answer.remark)
    remedy = None
    if issubclass(kind, AccessDenied):
        remedy = "A reader needs Sub and Get on the topic and Sub on the group (access denied is never retried)"
    elif answer.code in (
        Response.SUBSCRIPTION_GROUP_NOT_EXIST,
        Response.SUBSCRIPTION_NOT_EXIST,
        Response.SUBSCRIPTION_NOT_LATEST,
    ):
        remedy = "Create the consumer group on the broker, or name an existing one with option 'group'"
    elif "SQL92" in answer.remark:
        remedy = "Set enablePropertyFilter=true in the broker's configuration, or filter with option 'tags'"
    return kind("the broker refused a pull", None, answer.code, None, None, answer.remark, remedy)
