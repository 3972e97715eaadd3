"""A consumer that receives messages and acknowledges each of them: Java's ``SimpleConsumer``, over the port ``PopMember``.

The consumer has no queues, and needs no rebalance. Each message is delivered to one member of the group. If the message is not
acknowledged in time, it is delivered again, perhaps to another member.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence

from rocketmq_spark.base.arguments import argument_error, check_instance, is_integer
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.dropped import ClosedWhenDropped
from rocketmq_spark.base.process import OwnerProcess, defer_close, signal_safe
from rocketmq_spark.consumer.settings import MAX_MESSAGES, MAX_WAIT_S, checked_topic, parse_filter
from rocketmq_spark.errors import OptionError, RocketMQError
from rocketmq_spark.model import Filter
from rocketmq_spark.model.message import PoppedMessage, PopTarget
from rocketmq_spark.options.parsing import duration, text
from rocketmq_spark.ports import PopMember
from rocketmq_spark.wire.names import group_problem

# Invisible times that a Proxy accepts in a request for messages. ``change_invisible`` may later shorten the invisible time to
# 0.
MIN_INVISIBLE_S, MAX_INVISIBLE_S = 10.0, 43_200.0
# The minimum time for which a Proxy holds a request without messages, even if a request asks for a shorter time.
MIN_WAIT_S = 5.0
_SUBSCRIBE_TIMEOUT_S, _LEAVE_TIMEOUT_S = 10.0, 5.0


class BaseSimpleConsumer(ClosedWhenDropped):
    """Receives messages as a member of a group. Call ``subscribe`` first, and ``close`` at the end, or use a ``with`` block.

    It is safe to use from several threads. A forked process must create a consumer of its own.
    """

    def __init__(self, member: PopMember, group: str, request_timeout_s: float = 3.0) -> None:
        if problem := group_problem(group):
            raise OptionError(f"option 'group' is {group!r}; expected the name of a consumer group ({problem})")
        self.group = group
        self.client_id = member.client_id
        self._member = member
        self._request_timeout_s = request_timeout_s
        self._owner = OwnerProcess("consumer")
        self._lock = threading.Lock()
        self._filters: dict[str, Filter] = {}
        # Held while a change is sent to the Proxy, so that two changes do not overwrite each other.
        self._change_lock = threading.RLock()
        self._receive_count = 0
        self._closed = self._is_leaving = self._has_left = False

    @property
    def _is_open(self) -> bool:
        return not self._closed

    @signal_safe
    def subscribe(self, topic: str, tags: str | None = None, sql: str | None = None) -> None:
        """Receive messages of ``topic``. A second call for the topic changes the filter.

        All members of a group must have the same subscriptions.

        Args:
            topic: The topic.
            tags: One tag or several (``a || b``); by default, all messages match.
            sql: An SQL92 expression; it cannot be combined with ``tags``.

        Raises:
            OptionError: The filter is wrong.
            ConnectionLost: No endpoint of the Proxy answers. The previous subscription stays, as after every error.
        """
        self._owner.check(False)  # checked before the lock, which nobody would release in a forked process
        added_filter = {checked_topic(topic): parse_filter(tags, sql)}
        with self._change_lock:
            self._owner.check(self._closed)
            filters = self._filters | added_filter
            try:
                self._send_filters(filters)
            except RocketMQError:  # the member at the Proxy must not keep the new filters
                with contextlib.suppress(RocketMQError):
                    self._send_filters(self._filters, 0.0)
                raise
            self._filters = filters

    @signal_safe
    def unsubscribe(self, topic: str) -> None:
        """Receive no more messages of ``topic``. The topic is removed even if no endpoint answers. This method then
        raises ``ConnectionLost``.
        """
        self._owner.check(False)
        checked_topic(topic)
        with self._change_lock:
            self._owner.check(self._closed)
            self._filters = {
                subscribed_topic: topic_filter
                for subscribed_topic, topic_filter in self._filters.items()
                if subscribed_topic != topic
            }
            self._send_filters(self._filters)

    @signal_safe
    def receive(
        self, max_messages: int = MAX_MESSAGES, invisible: str | float = "30s", wait: str | float = "5s"
    ) -> Sequence[PoppedMessage]:
        """Return the next messages. Each call asks the next broker or topic, in turn.

        Each message is invisible to other members for ``invisible``. A message for which ``ack`` is not called within this time
        is delivered again. If there is no message, a call takes at least 5 s, because the Proxy holds the request for this
        time, even if ``wait`` is shorter.

        Args:
            max_messages: The largest number of messages to return, 1 to 32.
            invisible: A duration from 10 s to 12 h: ``"30s"``, or seconds.
            wait: How long to wait for a message: ``"10s"``, or seconds.

        Returns:
            The messages; an empty list if no message came within ``wait``.

        Raises:
            OptionError: An argument is wrong, or there is no subscription.
            RouteNotFound: A topic does not exist. Only a call that asks for this topic raises the error; later calls ask for
                the other topics.
        """
        self._owner.check(self._closed)
        check_max_messages(max_messages)
        if not self._filters:
            raise OptionError("the consumer has no subscription; expected subscribe() before receive()")
        invisible_s, receive_deadline = (
            _invisible_duration("invisible", invisible, MIN_INVISIBLE_S),
            Deadline.after(_seconds("wait", wait)),
        )
        while targets := self._targets():
            with self._lock:
                target = targets[self._receive_count % len(targets)]
                self._receive_count += 1
            if isinstance(target, RocketMQError):
                self._owner.check(self._closed)
                raise target
            max_wait_s = MIN_WAIT_S if len(targets) > 1 else MAX_WAIT_S
            wait_s = max(MIN_WAIT_S, min(max_wait_s, receive_deadline.remaining()))
            deadline = Deadline.after(wait_s + self._request_timeout_s)
            try:
                messages = self._member.receive(target, max_messages, invisible_s, wait_s, deadline)
            except RocketMQError:
                self._owner.check(self._closed)  # raises ``ClosedError`` if another thread closed the consumer
                raise
            if messages or receive_deadline.expired or self._closed:
                return messages
        return []  # another thread unsubscribed the last topic

    @signal_safe
    def ack(self, message: PoppedMessage) -> None:
        """Acknowledge ``message``, so that it is not delivered again.

        Raises:
            NotFound: The invisible time of the message is over, so the message was or will be delivered again.
        """
        self._send_request(self._member.ack, message)

    @signal_safe
    def change_invisible(self, message: PoppedMessage, duration: str | float) -> None:
        """Deliver ``message`` again after ``duration``, unless it is acknowledged before.

        Args:
            message: A message that was received and not acknowledged.
            duration: The time from now until the delivery, 0 s to 12 h: ``"30s"``, or seconds. Brokers deliver up to two
                seconds later.
        """
        self._owner.check(self._closed)
        check_instance("message", message, PoppedMessage, "a message that receive() returned")
        self._member.change_invisible(
            message, _invisible_duration("duration", duration, 0.0), Deadline.after(self._request_timeout_s)
        )

    @signal_safe
    def forward_to_dlq(self, message: PoppedMessage) -> None:
        """Move ``message`` to the group's dead-letter topic, ``%DLQ%<group>``."""
        self._send_request(self._member.forward_to_dlq, message)

    def close(self) -> None:
        """Leave the group. Messages that were not acknowledged are delivered again when their invisible time is over."""
        self._closed = True
        if not self._owner.is_current or defer_close(self.close):
            return
        self._leave()

    @signal_safe
    def _leave(self) -> None:
        if not self._has_left:
            self._is_leaving = True
            self._member.close(Deadline.after(_LEAVE_TIMEOUT_S))
            self._has_left = True  # set after the call, so that a second ``close`` repeats an interrupted call

    def _send_filters(self, filters: dict[str, Filter], wait_s: float = _SUBSCRIBE_TIMEOUT_S) -> None:
        try:
            self._member.subscribe(filters, Deadline.after(wait_s))
        finally:
            if self._is_leaving:  # another thread left the group, but this request may have joined again
                self._member.close(Deadline.after(_LEAVE_TIMEOUT_S))

    def _send_request(self, request: Callable[[PoppedMessage, Deadline], None], message: PoppedMessage) -> None:
        self._owner.check(self._closed)
        check_instance("message", message, PoppedMessage, "a message that receive() returned")
        request(message, Deadline.after(self._request_timeout_s))

    def _targets(self) -> list[PopTarget | RocketMQError]:
        """Return the targets to request messages from. For a topic without a route, the list has the error, so that the other
        topics are still read.
        """
        targets: list[PopTarget | RocketMQError] = []
        for topic in self._filters:
            try:
                targets += [
                    (topic, number)
                    for number in range(self._member.target_count(topic, Deadline.after(self._request_timeout_s)))
                ]
            except RocketMQError as e:
                targets.append(e)
        return targets


def check_max_messages(max_messages: object) -> None:
    if not is_integer(max_messages) or not 1 <= max_messages <= MAX_MESSAGES:  # type: ignore[operator]
        raise argument_error("max_messages", max_messages, f"a whole number from 1 to {MAX_MESSAGES}")


def _seconds(name: str, value: str | float) -> float:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise argument_error(name, value, "a duration, such as 30s, or a number of seconds")
    try:
        return duration(text(f"{round(value * 1000)}ms" if isinstance(value, int | float) else value))
    except OverflowError:
        raise OptionError(f"{name} is {value!r}; expected a finite number of seconds") from None
    except ValueError as e:
        raise OptionError(f"{name} is {value!r}; expected {e}") from e


def _invisible_duration(name: str, value: str | float, min_s: float) -> float:
    seconds = _seconds(name, value)
    if not min_s <= seconds <= MAX_INVISIBLE_S:
        raise OptionError(f"{name} is {value!r}; expected {min_s:g}s to 12h, which is what a Proxy accepts")
    return seconds
