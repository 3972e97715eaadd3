"""Listeners, their contexts, and what a return value or exception of a listener means for the messages.

Mirrors ``ConsumeMessageConcurrentlyService.processConsumeResult`` and ``ConsumeMessageOrderlyService``. Only None and
``OrderedContext.commit()`` mean success. An exception or any other return value means failure.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Integral
from typing import Any, NamedTuple, Protocol, TypeVar

from rocketmq_spark.base.arguments import argument_error, check_function, check_instance
from rocketmq_spark.base.threads import Failure, safe_text
from rocketmq_spark.errors import NotSupported, OptionError
from rocketmq_spark.model import MessageQueue, ReceivedMessage
from rocketmq_spark.options.transport import NO_REPLIES

MIN_SUSPEND_MS, MAX_SUSPEND_MS = 10, 30_000
MAX_LEVEL = (1 << 31) - 1  # brokers reduce a level that is too high to their highest level


class Listener(Protocol):
    """The function that a ``Consumer`` calls with messages: ``listener(messages, context)``.

    ``messages`` is a tuple of ``ReceivedMessage``, or of ``PoppedMessage`` over gRPC; with option ``arrow`` it is a
    ``pyarrow.RecordBatch`` with rows of one queue. ``context`` is a ``Context``, or an ``OrderedContext`` if the consumer is
    ordered. Return None if the messages are done, or a value that a method of ``context`` returned. An exception, or any other
    value, means that the messages failed.
    """

    # The arguments are positional, so that users may name them freely. The types of the arguments depend on the kind of
    # consumer.
    def __call__(self, messages: Any, context: Any, /) -> object: ...


def check_listener(listener: object, arrow: bool, coroutines: bool = False) -> None:
    """Raise ``OptionError`` unless ``listener`` can be called as a ``Listener``. ``coroutines`` allows coroutine functions, too.

    Without this check, each call of an unsuitable function would fail, and its messages would become dead letters. A class is
    rejected, because calling a class only creates an object.
    """
    signature = "batch, context" if arrow else "messages, context"
    if isinstance(listener, type):
        raise argument_error("listener", listener, f"a function that takes ({signature})")
    check_function("listener", listener, signature, allows_coroutines=coroutines)


@dataclass(frozen=True, slots=True)
class Redeliver:
    """A listener's result: the messages failed. ``level`` means the same as in ``Context.retry``."""

    level: int = 0

    def __post_init__(self) -> None:
        _check_level(self.level)


@dataclass(frozen=True, slots=True)
class Suspend:
    """A listener's result: the messages failed, and the queue pauses for ``ms`` (None: option ``suspendCurrentQueueTime``)."""

    ms: float | None = None

    def __post_init__(self) -> None:
        if (
            self.ms is not None
            and not _is_integer(self.ms)
            and not (isinstance(self.ms, float) and not math.isnan(self.ms))
        ):
            raise OptionError(f"suspend got {safe_text(self.ms)} ms; expected a number of milliseconds, or None")


class CommitAction(enum.Enum):
    """The decision of an ordered listener with ``auto_commit=False``."""

    COMMIT = "COMMIT"
    ROLLBACK = "ROLLBACK"


# Answers a request: the message, the body of the answer, its properties.
Replier = Callable[[ReceivedMessage, bytes, Mapping[str, str] | None], None]


class ReplyingContext:
    """Base class of contexts: a listener may answer messages that are requests (``Producer.request``)."""

    __slots__ = ("_messages", "_replier")

    _messages: Sequence[ReceivedMessage]
    _replier: Replier | None

    def reply(
        self, body: bytes, *, to: ReceivedMessage | None = None, properties: Mapping[str, str] | None = None
    ) -> None:
        """Answer a request, before or after its message is done.

        If the message is delivered again and answered again, the requester uses the first answer.

        Args:
            body: The answer, which must not be empty.
            to: The request; it may be omitted if the listener got one message. With option ``arrow``, ``to`` must be omitted,
                so only a batch with one row can be answered.
            properties: The user's own properties of the answer.

        Raises:
            OptionError: The listener got several messages, and ``to`` is not given.
            MessageRefused: The message is not a request, or the answer is empty or too large. Nothing was sent.
            RocketMQError: The requester did not get the answer. If the listener does not catch the error, the message fails.
            NotSupported: The answer went through a Proxy, which does not forward replies.
        """
        replier = getattr(self, "_replier", None)
        if replier is None:
            raise NotSupported(NO_REPLIES)
        if to is None:
            if len(self._messages) != 1:
                raise OptionError(
                    f"the listener got {len(self._messages)} messages; expected reply(body, to=message) with one of them"
                )
            to = self._messages[0]
        check_instance("to", to, ReceivedMessage, "the ReceivedMessage that is a request")
        replier(to, body, properties)


AnyContext = TypeVar("AnyContext", bound=ReplyingContext)


def with_replier(context: AnyContext, messages: Sequence[ReceivedMessage], replier: Replier | None) -> AnyContext:
    """Return the context prepared for a call with these messages, so that ``reply`` can answer them."""
    context._messages, context._replier = messages, replier
    return context


class Context(ReplyingContext):
    """Passed to a concurrent listener together with messages. Setting an invalid value raises ``OptionError``.

    Args:
        queue: The queue of the messages.
    """

    __slots__ = ("_ack_index", "_delay_level", "queue")

    def __init__(self, queue: MessageQueue) -> None:
        self.queue = queue
        self._ack_index: int | None = None
        self._delay_level = 0

    @property
    def ack_index(self) -> int | None:
        """The index of the last message, or row, that is done; -1 means none, None (the default) means all.

        If only the first messages are done, set this index, and return None from the listener.
        """
        return self._ack_index

    @ack_index.setter
    def ack_index(self, index: int | None) -> None:
        self._ack_index = None if index is None else _index_of(index)

    @property
    def delay_level(self) -> int:
        """The delay level for the redelivery of messages that are not done; see ``retry``."""
        return self._delay_level

    @delay_level.setter
    def delay_level(self, level: int) -> None:
        _check_level(level)
        self._delay_level = level

    def retry(self, level: int = 0) -> Redeliver:
        """Return this from the listener if none of the messages is done.

        The broker delivers the messages again after the delay of ``level`` in its delay table, which begins with level 1. Level
        0 increases the delay with each attempt. Level -1 makes the messages dead letters at once.
        """
        return Redeliver(level)


@dataclass(slots=True)
class OrderedContext(ReplyingContext):
    """Passed to an ordered listener together with messages.

    During the call, no other messages of the queue are processed. Over gRPC, if the messages have a message group, no other
    messages of the message group are processed.

    Args:
        queue: The queue of the messages.
        auto_commit: Whether returning None finishes the messages; option ``autoCommit`` by default. If False, the listener
            finishes messages by returning ``commit()``. Over gRPC, the value is always True.
    """

    queue: MessageQueue
    auto_commit: bool = True

    def suspend(self, ms: float | None = None) -> Suspend:
        """Return this from the listener if the messages are not done.

        The messages are delivered again after ``ms`` milliseconds (10 to 30000; default: option ``suspendCurrentQueueTime``).
        """
        return Suspend(ms)

    def commit(self) -> CommitAction:
        """Return this from the listener with ``auto_commit=False``: all messages since the last commit are done.

        Until the commit, the messages count as cached: a queue with more cached messages than option 'pullThresholdForQueue' is
        not pulled.
        """
        return CommitAction.COMMIT

    def rollback(self) -> CommitAction:
        """Return this from the listener with ``auto_commit=False``: all messages since the last commit are delivered again."""
        return CommitAction.ROLLBACK


class AcknowledgingContext(OrderedContext):
    """The context over gRPC: each message is acknowledged separately, so a later ``commit`` has nothing to finish."""

    __slots__ = ()

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "auto_commit" and not value:
            raise OptionError(
                f"auto_commit is {safe_text(value)}, but over gRPC each message is acknowledged by itself; expected True",
                remedy="Return None for a message that is done, or context.suspend() for a message that is not done",
            )
        super().__setattr__(name, value)


class ListenerCall:
    """A call of a listener that must start now, because its timeout has begun.

    Call the listener with ``messages`` and ``context``. Then call this object once with the outcome, on a thread that may block.
    """

    __slots__ = ("context", "messages")

    def __init__(self, messages: Any, context: Any) -> None:
        self.messages, self.context = messages, context

    def __call__(self, outcome: object) -> None:
        """Receive the listener's return value, or ``Failure``."""
        raise NotImplementedError


# Returns the next call of the listener; None if the listener must not be called, because the consumer has stopped or lost the
# queue.
NextCall = Callable[[], ListenerCall | None]


class DeferredListener:
    """An internal concurrent listener that calls the user's code later and on another thread, such as in an event loop."""

    def submit(self, next_call: NextCall, count: int, at_front: bool = False) -> None:
        """Queue ``count`` calls without blocking; with ``at_front``, before all waiting calls.

        If this method raises, no call begins.
        """
        raise NotImplementedError

    def __call__(self, messages: Any, context: Any) -> object:
        """Raise ``NotImplementedError``: callers use ``submit``."""
        raise NotImplementedError


OutcomeCallback = Callable[[object], None]


class _ObservedCall(ListenerCall):
    __slots__ = ("_call", "_on_outcome")

    def __init__(self, call: ListenerCall, on_outcome: OutcomeCallback) -> None:
        super().__init__(call.messages, call.context)
        self._call, self._on_outcome = call, on_outcome

    def __call__(self, outcome: object) -> None:
        self._on_outcome(outcome)
        self._call(outcome)


class _ObservedListener(DeferredListener):
    def __init__(self, listener: DeferredListener, on_start: Callable[[Any, Any], OutcomeCallback]) -> None:
        self._listener, self._on_start = listener, on_start

    def submit(self, next_call: NextCall, count: int, at_front: bool = False) -> None:
        self._listener.submit(partial(self._next_observed_call, next_call), count, at_front)

    def _next_observed_call(self, next_call: NextCall) -> ListenerCall | None:
        call = next_call()
        return None if call is None else _ObservedCall(call, self._on_start(call.messages, call.context))


def observed_listener(listener: DeferredListener, on_start: Callable[[Any, Any], OutcomeCallback]) -> Listener:
    """Wrap ``listener``, so that each of its calls is observed.

    ``on_start`` gets the messages and the context before each call, and returns a function that gets the outcome. ``on_start``
    and the returned function must not raise.
    """
    return _ObservedListener(listener, on_start)


class Verdict(NamedTuple):
    """How many messages of a concurrent listener's batch are done, and the delay level for the redelivery of the other
    messages.

    ``problem`` is a text for the log if the listener raised or returned an invalid value.
    """

    done_count: int
    delay_level: int = 0
    problem: str | None = None


def judge_concurrent_outcome(outcome: object, context: Context, size: int) -> Verdict:
    """Return the verdict for ``size`` messages. ``outcome``: the listener's return value, or ``Failure``."""
    if outcome is None:
        last_index = size - 1 if context.ack_index is None else context.ack_index
        return Verdict(max(0, min(last_index + 1, size)), context.delay_level)
    if isinstance(outcome, Redeliver):
        return Verdict(0, outcome.level)
    return Verdict(0, context.delay_level, _problem_of(outcome, "None or context.retry()"))


class OrderedAction(enum.Enum):
    """What an ordered consumer does with the messages of a call."""

    COMMIT = "COMMIT"
    CONTINUE = "CONTINUE"
    RETRY = "RETRY"
    ROLLBACK = "ROLLBACK"


@dataclass(frozen=True, slots=True)
class OrderedVerdict:
    """The action after a call of an ordered listener.

    ``pause_ms`` is the pause of the queue after ``RETRY`` and ``ROLLBACK``. ``problem`` is a text for the log, as in
    ``Verdict``.
    """

    action: OrderedAction
    pause_ms: int = 0
    problem: str | None = None


def judge_ordered_outcome(outcome: object, context: OrderedContext, suspend_ms: int) -> OrderedVerdict:
    """Return the verdict for one call. An invalid outcome means that the same messages are delivered again.

    With ``auto_commit``, a rollback would roll nothing back, so it counts as a failure, unlike in Java.
    """
    if outcome is None:
        return OrderedVerdict(OrderedAction.COMMIT if context.auto_commit else OrderedAction.CONTINUE)
    pause_ms = _clamped_ms(suspend_ms if not isinstance(outcome, Suspend) or outcome.ms is None else outcome.ms)
    if outcome is CommitAction.COMMIT:
        return OrderedVerdict(OrderedAction.COMMIT)
    if outcome is CommitAction.ROLLBACK and not context.auto_commit:
        return OrderedVerdict(OrderedAction.ROLLBACK, pause_ms)
    if isinstance(outcome, Suspend):
        return OrderedVerdict(OrderedAction.RETRY, pause_ms)
    expected = "None or context.suspend()" + ("" if context.auto_commit else ", context.commit() or context.rollback()")
    return OrderedVerdict(OrderedAction.RETRY, pause_ms, _problem_of(outcome, expected))


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _index_of(value: object) -> int:
    """Return the index as an ``int``. Integers of numpy are accepted, too."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise OptionError(f"ack_index is {safe_text(value)}; expected the index of a message, -1 or None")
    return int(value)


def _check_level(level: object) -> None:
    if not _is_integer(level) or not -1 <= level <= MAX_LEVEL:  # type: ignore[operator]
        raise OptionError(
            f"the delay level is {safe_text(level)}; expected -1 for a dead letter, 0 for an increasing delay, or "
            "a level of the broker"
        )


def _clamped_ms(ms: float) -> int:
    return round(min(max(ms, MIN_SUSPEND_MS), MAX_SUSPEND_MS))


def _problem_of(outcome: object, expected: str) -> str:
    if isinstance(outcome, Failure):
        return f"the listener raised {outcome}"
    hint = "; rocketmq_spark.aio awaits coroutines" if hasattr(type(outcome), "__await__") else ""
    return f"the listener returned {safe_text(outcome)}; expected {expected}{hint}"
