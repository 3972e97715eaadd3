"""A member of a consumer group: Java's ``DefaultMQPushConsumer``, with a function as its listener."""

from __future__ import annotations

import signal
import threading
from dataclasses import replace
from typing import Any

from rocketmq_spark.base.arguments import seconds
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.process import Closing, Owner, entry, on_signals, postponed
from rocketmq_spark.base.threads import Latch
from rocketmq_spark.consumer.listener import DeferredListener, Listener, check_listener
from rocketmq_spark.consumer.pop import RunningPopConsumer
from rocketmq_spark.consumer.push.running import RunningConsumer
from rocketmq_spark.consumer.settings import ConsumerSettings, Subscriptions, checked_topic, parse_filter
from rocketmq_spark.consumer.tools import ConsumerTools
from rocketmq_spark.errors import OptionError, RocketMQError
from rocketmq_spark.model import ReceivedMessage
from rocketmq_spark.model.membership import ConsumerStats
from rocketmq_spark.model.message import PoppedMessage
from rocketmq_spark.ports import GroupMember, PopMember

_STOP_CHECK_S = 0.05  # how often a listener that calls ``stop`` checks whether another thread is stopping the consumer


class BaseConsumer(Closing):
    """Consumes messages as a member of a group. The group shares the queues; in a broadcasting group each member has all of them.

    If ``settings.uses_pop``, a Proxy delivers the messages one by one, and members have no queues.
    Subscribe, then call ``run`` or ``start`` once. ``stop``, or the end of a ``with`` block, leaves the group.
    """

    def __init__(
        self,
        port: GroupMember | PopMember,
        settings: ConsumerSettings,
        tools: ConsumerTools | None = None,
    ) -> None:
        self.settings = settings
        self.client_id = port.client_id
        self._port: Any = port  # a ``PopMember`` if ``settings.uses_pop``, otherwise a ``GroupMember``
        self._owner = Owner("consumer")
        self._tools = tools or ConsumerTools()
        clock = self._tools.timer(f"rocketmq-{settings.group}-clock")
        self._subscriptions = Subscriptions(settings.group, settings.uses_retry_topic, clock.wall_ms, clock.lease_ms)
        # For start and stop; reentrant, because a signal handler may interrupt either.
        self._lifecycle_lock = threading.RLock()
        self._is_starting_or_stopping = False  # whether a thread, which has the lock, starts or stops the consumer
        self._is_stopping = False  # whether that thread stops it
        self._running: RunningConsumer | RunningPopConsumer | None = None
        self._stop_requested = Latch()
        self._closed = self._has_stopped = False

    @entry
    def subscribe(self, topic: str, tags: str | None = None, sql: str | None = None) -> None:
        """Consume messages of ``topic``. All members of a group must have the same subscriptions.

        May be called again, for other topics or to change a filter, also while the consumer runs.

        Args:
            topic: The topic.
            tags: One tag or several (``a || b``); by default, all messages match.
            sql: An SQL92 expression, for brokers with ``enablePropertyFilter``. Not together with ``tags``.

        Raises:
            OptionError: The filter is wrong.
        """
        self._owner.check(self._closed)
        new_filter = parse_filter(tags, sql)
        previous = self._subscriptions.get(checked_topic(topic))
        self._subscriptions.add(topic, new_filter)
        try:
            self._send_subscriptions()
        except RocketMQError as e:
            if not e.retriable:  # the Proxy would reject all later changes because of this subscription
                self._subscriptions.restore(topic, previous)
            raise

    @entry
    def unsubscribe(self, topic: str) -> None:
        """Stop consuming ``topic``. The offsets of its queues are committed, and other members get the queues."""
        self._owner.check(self._closed)
        self._subscriptions.remove(checked_topic(topic))
        self._send_subscriptions()

    @entry
    def start(self, listener: Listener) -> None:
        """Join the group and call ``listener(messages, context)`` on background threads.

        Returns when the start offsets of the first assigned queues are set, so messages sent after that are not skipped; or, if
        a broker does not answer, after 6 s at most. Over gRPC it returns when the Proxy has accepted the subscriptions.

        The consumer runs until ``stop``, even if your program drops the last reference to it. Keep a reference to call ``stop``.

        If the listener returns None, the messages are done. If it returns ``context.retry()`` or another value, or raises,
        the messages are sent back and delivered again later; with option ``model`` broadcasting they are dropped, with a warning
        in the log. An ordered consumer retries them in place instead, and accepts the return values that ``OrderedContext``
        describes.

        With option ``arrow`` the listener is called with ``(batch, context)``. The batch is a ``pyarrow.RecordBatch`` with the
        same columns as one of ``PullConsumer.poll_arrow``, and has at most ``consumeMessageBatchMaxSize`` rows, all of
        ``context.queue`` and in its order. What the listener returns counts for the whole batch, unless only its first rows are
        done: then set ``context.ack_index`` to the index of the last of these rows, and return None. Rows that fail are sent
        back one by one. An ordered consumer retries the whole batch in place.

        Raises:
            LocalProtocolError: This process already has a member of the group.
            OptionError: ``listener`` cannot be called with these arguments, or is a coroutine function (for these, use
                ``rocketmq_spark.aio``); the consumer has no subscription, or was started already; another broadcasting
                consumer uses the same offset file; or, over gRPC, the consumer is ordered and its group is not.
            OffsetError: The consumer broadcasts, and neither its offset file nor the backup of this file can be read.
            RocketMQError: Over gRPC, no endpoint of the Proxy accepted the subscriptions.
        """
        self._owner.check(self._closed)
        if not isinstance(listener, DeferredListener):
            check_listener(listener, self.settings.arrow)
        with self._lifecycle_lock:
            self._owner.check(self._closed)
            if not self._subscriptions:
                raise OptionError("the consumer has no subscription; expected subscribe() before start()")
            if self._running is not None:
                raise OptionError("the consumer was started already; expected one listener for each consumer")
            # Assigned before it starts, so that an interrupted start can be stopped.
            running = self._running = self._new_running(listener)
            self._is_starting_or_stopping = True
            try:
                running.start()
                if isinstance(running, RunningConsumer) and not self._closed:
                    running.wait_for_first_rebalance()
            except BaseException:  # also Ctrl-C: the group must not have a member that consumes nothing
                running.stop(Deadline.after(0))
                self._running = None
                raise
            finally:
                self._is_starting_or_stopping = False
            if self._closed:  # a signal handler, or a thread whose timeout is over, called ``stop`` during the start
                self.stop(0)

    def run(self, listener: Listener) -> None:
        """Call ``listener``, as ``start`` does, until SIGINT, SIGTERM or ``stop``; then stop, and return. Signals end it
        only if it is called in the main thread.
        """
        with on_signals(self._stop_requested.set, signal.SIGINT, signal.SIGTERM):
            self.start(listener)
            self._stop_requested.wait()
        self.stop()

    def stop(self, timeout_s: float = 30.0) -> list[ReceivedMessage] | list[PoppedMessage]:
        """Leave the group.

        Waits for running listeners, commits offsets, and releases the queues to other members. Messages that are not finished
        are delivered again, to the new owner of their queue. That includes the messages of a listener that calls ``stop``
        itself. Over remoting (the default ``transport``), no new listener call begins. Over gRPC, listeners are still called
        with messages that the Proxy has already handed out, until the timeout.

        A second call waits for the first one, or continues it after an interruption. A call from a listener returns at once if
        another thread is stopping the consumer, because that thread waits for the listener. If a signal handler calls ``stop``
        while another method of this consumer runs in the same thread, ``stop`` returns at once, and the consumer leaves the
        group when that method returns.

        Args:
            timeout_s: Seconds to wait for listeners. A broker that does not answer may take 3 s more.

        Returns:
            The messages that a listener still had after that time.

        Raises:
            OptionError: ``timeout_s`` is not a number. Nothing has changed.
        """
        if not self._owner.here:
            return []
        wait_s = _stop_timeout(timeout_s)
        self._closed = True
        if postponed(lambda: self._stop(wait_s)):
            return []
        return self._stop(wait_s)

    @entry
    def _stop(self, wait_s: float) -> list[ReceivedMessage] | list[PoppedMessage]:
        self._stop_requested.set()
        if not self._acquire_lifecycle_lock(Deadline.after(wait_s)):
            return []
        try:
            if self._running is None or self._has_stopped or self._is_starting_or_stopping:
                return []
            self._is_starting_or_stopping = self._is_stopping = True
            try:
                unfinished = self._running.stop(Deadline.after(wait_s))
                self._has_stopped = True
                return unfinished
            finally:
                self._is_starting_or_stopping = self._is_stopping = False
        finally:
            self._lifecycle_lock.release()

    def _acquire_lifecycle_lock(self, deadline: Deadline) -> bool:
        """Return False after the timeout, or if this is a listener that another thread waits for while it stops the consumer."""
        running = self._running
        if running is None or not running.is_listener_thread:
            return self._lifecycle_lock.acquire(timeout=deadline.remaining())
        while not self._lifecycle_lock.acquire(timeout=min(_STOP_CHECK_S, deadline.remaining())):
            if self._is_stopping or deadline.expired:
                return False
        return True

    def close(self) -> list[ReceivedMessage] | list[PoppedMessage]:
        """Call ``stop`` with its default timeout of 30 s, and return its result."""
        return self.stop()

    @entry
    def stats(self) -> ConsumerStats:
        """Return counts since the start, and recent figures by topic.

        Returns:
            ``ConsumerStats`` with ``consumed``, ``failed``, ``sent_back``, ``cached``, ``lag``, ``rebalances`` and ``topics``;
            before ``start`` the counts are 0, ``lag`` is None and ``topics`` is empty.

        Raises:
            ClosedError: The consumer belongs to another process.
        """
        self._owner.check(False)
        running = self._running
        return ConsumerStats() if running is None else replace(running.stats(), topics=running.figures())

    def _new_running(self, listener: Listener) -> RunningConsumer | RunningPopConsumer:
        settings = self.settings
        if settings.uses_pop:
            return RunningPopConsumer(self._port, settings, self._subscriptions, listener, self._tools)
        return RunningConsumer(self._port, settings, self._subscriptions, listener, self._tools)

    def _send_subscriptions(self) -> None:
        if self._running is not None:
            self._running.send_subscriptions()


def _stop_timeout(timeout_s: float) -> float:
    """Return the timeout of ``stop``: at most the longest wait of ``threading``, less the rounding error of a deadline."""
    return max(0.0, min(seconds("timeout_s", timeout_s), threading.TIMEOUT_MAX - 1))
