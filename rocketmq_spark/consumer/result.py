"""What a listener's return, or what it raised, means for its messages.

Mirrors ``ConsumeMessageConcurrentlyService.processConsumeResult`` and ``ConsumeMessageOrderlyService``. Nothing but a clear
"done" counts as done: what is raised, and what is returned without being asked for, is a failure.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from rocketmq_spark.model import MessageQueue, ReceivedMessage

MIN_SUSPEND_MS, MAX_SUSPEND_MS = 10, 30_000


# Gets messages (``ReceivedMessage``, from a Proxy ``PoppedMessage``) and a ``Context`` or ``OrderedContext``.
Listener = Callable[[Sequence[Any], Any], object]


@dataclass(frozen=True, slots=True)
class Raised:
    """A listener raised ``error`` instead of returning."""

    error: BaseException


@dataclass(frozen=True, slots=True)
class Retry:
    """Not done; ``level`` as ``Context.retry`` explains."""

    level: int = 0


@dataclass(frozen=True, slots=True)
class Suspend:
    """Not done, and the queue waits; None: as long as the consumer's setting says."""

    ms: int | None = None


class Hold(enum.Enum):
    """What an orderly listener says that commits by itself."""

    COMMIT = "COMMIT"
    ROLLBACK = "ROLLBACK"


@dataclass(slots=True)
class Context:
    """Goes with the messages to a concurrent listener.

    Args:
        queue: Where the messages lie.
        ack_index: The index of the last message that is done, where a listener that returns None did only some; -1: none.
        delay_level: At which level those that are not done come again; see ``retry``.
    """

    queue: MessageQueue
    ack_index: int | None = None
    delay_level: int = 0

    def retry(self, level: int = 0) -> Retry:
        """To be returned: none of the messages is done.

        They come again at ``level`` of the broker's delay levels; 0: later each time, -1: never, they are dead letters.
        """
        return Retry(level)


@dataclass(slots=True)
class OrderedContext:
    """Goes with the messages to an orderly listener. Its queue has no other message under way.

    Args:
        queue: Where the messages lie.
        auto_commit: Whether returning None finishes the messages. Otherwise only ``commit`` does.
    """

    queue: MessageQueue
    auto_commit: bool = True

    def suspend(self, ms: int | None = None) -> Suspend:
        """To be returned: not done. The same messages come again after ``ms`` (10 to 30000), the consumer's setting for None."""
        return Suspend(ms)

    def commit(self) -> Hold:
        """To be returned with ``auto_commit=False``: all messages since the last commit are done."""
        return Hold.COMMIT

    def rollback(self) -> Hold:
        """To be returned with ``auto_commit=False``: all messages since the last commit come again."""
        return Hold.ROLLBACK


class Verdict(NamedTuple):
    """Which messages of a concurrent listener's batch are done, and at which level the others come again.

    ``why`` is a sentence for the log where the listener did something that it should not.
    """

    done: int
    level: int = 0
    why: str | None = None


def ask(listener: Listener, messages: Sequence[Any], context: Context | OrderedContext) -> object:
    """What the listener returns, or ``Raised``."""
    try:
        return listener(messages, context)
    except Exception as e:  # noqa: BLE001 - a listener may raise anything; it is told with the verdict
        return Raised(e)


def concurrent(outcome: object, context: Context, size: int) -> Verdict:
    """What the outcome of ``size`` messages means: their return value, or ``Raised``."""
    if outcome is None:
        last = size - 1 if context.ack_index is None else context.ack_index
        return Verdict(max(0, min(last + 1, size)), context.delay_level)
    if isinstance(outcome, Retry):
        return Verdict(0, outcome.level)
    return Verdict(0, context.delay_level, _complaint(outcome, "None or context.retry()"))


class Step(enum.Enum):
    """What an orderly consumer does next."""

    COMMIT = "COMMIT"
    CONTINUE = "CONTINUE"
    AGAIN = "AGAIN"
    ROLLBACK = "ROLLBACK"


@dataclass(frozen=True, slots=True)
class OrderedVerdict:
    """The step, for how long the queue waits after ``AGAIN`` and ``ROLLBACK``, and ``why`` as in ``Verdict``."""

    step: Step
    pause_ms: int = 0
    why: str | None = None


def ordered(outcome: object, context: OrderedContext, suspend_ms: int) -> OrderedVerdict:
    """What the outcome means. Without a clear word the same messages come again.

    Unlike in Java a rollback is none of success where the consumer commits by itself: nothing would be rolled back.
    """
    if outcome is None:
        return OrderedVerdict(Step.COMMIT if context.auto_commit else Step.CONTINUE)
    pause_ms = _clamped(suspend_ms if not isinstance(outcome, Suspend) or outcome.ms is None else outcome.ms)
    if outcome is Hold.COMMIT:
        return OrderedVerdict(Step.COMMIT)
    if outcome is Hold.ROLLBACK and not context.auto_commit:
        return OrderedVerdict(Step.ROLLBACK, pause_ms)
    if isinstance(outcome, Suspend):
        return OrderedVerdict(Step.AGAIN, pause_ms)
    expected = "None or context.suspend()" + ("" if context.auto_commit else ", context.commit() or context.rollback()")
    return OrderedVerdict(Step.AGAIN, pause_ms, _complaint(outcome, expected))


def once_more(message: ReceivedMessage) -> ReceivedMessage:
    """The message with one more attempt behind it, where no broker counts."""
    return replace(message, reconsume_times=message.reconsume_times + 1)


def slices(messages: Sequence[ReceivedMessage], size: int) -> list[Sequence[ReceivedMessage]]:
    """Consecutive parts of at most ``size``, as listeners get them."""
    return [messages[i : i + size] for i in range(0, len(messages), size)]


def _clamped(ms: int) -> int:
    return min(max(ms, MIN_SUSPEND_MS), MAX_SUSPEND_MS)


def _complaint(outcome: object, expected: str) -> str:
    if isinstance(outcome, Raised):
        return f"the listener raised {type(outcome.error).__name__}: {outcome.error}"
    return f"the listener returned {outcome!r}; expected {expected}"
