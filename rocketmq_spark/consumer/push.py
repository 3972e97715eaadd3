"""A member of a consumer group: Java's ``DefaultMQPushConsumer``, with a function as its listener."""

from __future__ import annotations

import itertools
import logging
import platform
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from rocketmq_spark.base.arguments import check_seconds
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import RETRY_PREFIX
from rocketmq_spark.base.process import Closeable, OwnerProcess, defer_close, on_signals, signal_safe
from rocketmq_spark.base.threads import Latch
from rocketmq_spark.consumer.broker_requests import BrokerRequestHandler
from rocketmq_spark.consumer.concurrent import ConcurrentConsumeService
from rocketmq_spark.consumer.group_health import (
    COMPARISON_INTERVAL_S,
    ConsumeModes,
    Reregistration,
    SubscriptionConflicts,
)
from rocketmq_spark.consumer.listener import DeferredListener, Listener, check_listener
from rocketmq_spark.consumer.member_state import MemberState
from rocketmq_spark.consumer.offsets import BrokerOffsets, FileOffsets, LocalOffsets, OffsetStore, offsets_path
from rocketmq_spark.consumer.ordered import OrderedConsumeService
from rocketmq_spark.consumer.ownership import Ownership
from rocketmq_spark.consumer.pop import RunningPopConsumer
from rocketmq_spark.consumer.prefetch import BacklogQueues
from rocketmq_spark.consumer.process_queue import ProcessQueue
from rocketmq_spark.consumer.pulling import Pulling
from rocketmq_spark.consumer.rebalancing import Rebalancing
from rocketmq_spark.consumer.rows import RowsQueue, batch_listener
from rocketmq_spark.consumer.send_back import SendBack
from rocketmq_spark.consumer.settings import ConsumerSettings, Subscriptions, checked_topic, parse_filter
from rocketmq_spark.consumer.tools import CLOSE_TIMEOUT_S, STATS_INTERVAL_S, TIMEOUT_S, ConsumerTools
from rocketmq_spark.errors import CallTimeout, ConnectionLost, OptionError, RocketMQError
from rocketmq_spark.model import ReceivedMessage
from rocketmq_spark.model.membership import ConsumerStats, Membership, TopicFigures
from rocketmq_spark.model.message import PoppedMessage
from rocketmq_spark.options.paths import check_safe, expand_home
from rocketmq_spark.ports import GroupMember, PopMember

logger = logging.getLogger(__name__)

_STOP_CHECK_INTERVAL_S = (
    0.05  # how often a listener that calls ``stop`` checks whether another thread is stopping the consumer
)


class BaseConsumer(Closeable):
    """Consumes messages as a member of a group. The group shares the queues; in a broadcasting group, each member has all
    queues.

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
        self._owner = OwnerProcess("consumer")
        self._tools = tools or ConsumerTools()
        clock = self._tools.make_timer(f"rocketmq-{settings.group}-clock")
        self._subscriptions = Subscriptions(settings.group, settings.uses_retry_topic, clock.wall_ms, clock.lease_ms)
        # ``start`` and ``stop`` hold this lock. The lock is reentrant, because a signal handler that interrupts ``start`` or
        # ``stop`` may call ``stop``.
        self._lifecycle_lock = threading.RLock()
        self._is_starting_or_stopping = False  # whether the thread that holds the lock starts or stops the consumer
        self._is_stopping = False  # whether the thread that holds the lock stops the consumer
        self._running: RunningConsumer | RunningPopConsumer | None = None
        self._stop_requested = Latch()
        self._closed = self._has_stopped = False

    @signal_safe
    def subscribe(self, topic: str, tags: str | None = None, sql: str | None = None) -> None:
        """Consume messages of ``topic``. All members of a group must have the same subscriptions.

        This method may be called again for other topics or to change a filter, even while the consumer runs.

        Args:
            topic: The topic.
            tags: One tag or several (``a || b``); by default, all messages match.
            sql: An SQL92 expression, for brokers with ``enablePropertyFilter``; it cannot be combined with ``tags``.

        Raises:
            OptionError: The filter is wrong.
        """
        self._owner.check(self._closed)
        new_filter = parse_filter(tags, sql)
        previous_filter = self._subscriptions.get(checked_topic(topic))
        self._subscriptions.add(topic, new_filter)
        try:
            self._send_subscriptions()
        except RocketMQError as e:
            if not e.retriable:  # the Proxy would reject all later changes because of this subscription
                self._subscriptions.restore(topic, previous_filter)
            raise

    @signal_safe
    def unsubscribe(self, topic: str) -> None:
        """Stop consuming ``topic``. The offsets of its queues are committed, and other members get the queues."""
        self._owner.check(self._closed)
        self._subscriptions.remove(checked_topic(topic))
        self._send_subscriptions()

    @signal_safe
    def start(self, listener: Listener) -> None:
        """Join the group and call ``listener(messages, context)`` on background threads.

        The method returns when the start offsets of the first assigned queues are set, so that later messages are not skipped.
        If a broker does not answer, the method returns after 6 s at most. Over gRPC, it returns when the Proxy has accepted the
        subscriptions.

        The consumer runs until ``stop``, even if your program drops the last reference to the consumer. Keep a reference to
        call ``stop``.

        If the listener returns None, the messages are done. If the listener raises, or returns ``context.retry()`` or another
        value, the messages are sent back and delivered again later. With option ``model`` broadcasting, failed messages are
        dropped, with a warning in the log. An ordered consumer retries failed messages in place, and accepts the return values
        that ``OrderedContext`` describes.

        With option ``arrow``, the listener is called with ``(batch, context)``. The batch is a ``pyarrow.RecordBatch`` with the
        same columns as a batch of ``PullConsumer.poll_arrow``, and has at most ``consumeMessageBatchMaxSize`` rows of
        ``context.queue``, in the order of the queue. The return value of the listener counts for the whole batch. If only the
        first rows are done, the listener sets ``context.ack_index`` to the index of the last row that is done, and returns
        None. Rows that fail are sent back one by one. An ordered consumer retries the whole batch in place.

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
            # The attribute is set before the start, so that ``stop`` can stop an interrupted start.
            running = self._running = self._new_running(listener)
            self._is_starting_or_stopping = True
            try:
                running.start()
                if isinstance(running, RunningConsumer) and not self._closed:
                    running.wait_for_first_rebalance()
            except BaseException:  # includes Ctrl-C: the group must not keep a member that consumes nothing
                running.stop(Deadline.after(0))
                self._running = None
                raise
            finally:
                self._is_starting_or_stopping = False
            if self._closed:  # a signal handler, or a thread whose timeout is over, called ``stop`` during the start
                self.stop(0)

    def run(self, listener: Listener) -> None:
        """Call ``listener``, as ``start`` does, until SIGINT, SIGTERM or ``stop``; then stop, and return. Signals end this call
        only in the main thread.
        """
        with on_signals(self._stop_requested.set, signal.SIGINT, signal.SIGTERM):
            self.start(listener)
            self._stop_requested.wait()
        self.stop()

    def stop(self, timeout_s: float = 30.0) -> list[ReceivedMessage] | list[PoppedMessage]:
        """Leave the group.

        Waits for running listeners, commits offsets, and releases the queues to other members. Messages that are not finished,
        such as the messages of a listener that calls ``stop`` itself, are delivered again, to the new owner of their queue.
        Over remoting (the default ``transport``), no new listener call begins. Over gRPC, listeners are still called with
        messages that the Proxy has already handed out, until the timeout.

        A second call waits for the first call, or completes the first call if it was interrupted. A call from a listener
        returns at once if another thread is stopping the consumer, because that thread waits for the listener. If a signal
        handler calls ``stop`` while another method of this consumer runs in the same thread, ``stop`` returns at once, and the
        consumer leaves the group when that method returns.

        Args:
            timeout_s: Seconds to wait for listeners. If a broker does not answer, the call takes up to 3 s more.

        Returns:
            The messages that listeners still had after the timeout.

        Raises:
            OptionError: ``timeout_s`` is not a number. The consumer continues.
        """
        if not self._owner.is_current:
            return []
        wait_s = _stop_timeout(timeout_s)
        self._closed = True
        if defer_close(lambda: self._stop(wait_s)):
            return []
        return self._stop(wait_s)

    @signal_safe
    def _stop(self, wait_s: float) -> list[ReceivedMessage] | list[PoppedMessage]:
        self._stop_requested.set()
        if not self._acquire_lifecycle_lock(Deadline.after(wait_s)):
            return []
        try:
            if self._running is None or self._has_stopped or self._is_starting_or_stopping:
                return []
            self._is_starting_or_stopping = self._is_stopping = True
            try:
                unfinished_messages = self._running.stop(Deadline.after(wait_s))
                self._has_stopped = True
                return unfinished_messages
            finally:
                self._is_starting_or_stopping = self._is_stopping = False
        finally:
            self._lifecycle_lock.release()

    def _acquire_lifecycle_lock(self, deadline: Deadline) -> bool:
        """Return whether the lock was acquired. False after the timeout, and if the caller is a listener while another thread
        is stopping the consumer, because that thread waits for the listener.
        """
        running = self._running
        if running is None or not running.is_listener_thread:
            return self._lifecycle_lock.acquire(timeout=deadline.remaining())
        while not self._lifecycle_lock.acquire(timeout=min(_STOP_CHECK_INTERVAL_S, deadline.remaining())):
            if self._is_stopping or deadline.expired:
                return False
        return True

    def close(self) -> list[ReceivedMessage] | list[PoppedMessage]:
        """Call ``stop`` with its default timeout of 30 s, and return its result."""
        return self.stop()

    @signal_safe
    def stats(self) -> ConsumerStats:
        """Return counts since the start, and recent figures by topic.

        Returns:
            ``ConsumerStats`` with ``consumed``, ``failed``, ``sent_back``, ``cached``, ``lag``, ``rebalances`` and ``topics``.
            Before ``start``, the counts are 0, ``lag`` is None, and ``topics`` is empty.

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
    """Return the timeout of ``stop``, limited to the longest wait of ``threading``, less a second for rounding errors."""
    return max(0.0, min(check_seconds("timeout_s", timeout_s), threading.TIMEOUT_MAX - 1))


FIRST_COMMIT_DELAY_S = 10.0
FIRST_LOCK_DELAY_S, LOCK_INTERVAL_S = 1.0, 20.0  # of the renewals of an ordered consumer's locks
# A broker that restarts forgets its locks. A member behind a Proxy notices the restart only at its next lock request, because
# the connection to the Proxy stays open.
NO_NOTICES_LOCK_INTERVAL_S = 3.0
# Each answer to a pull has the end offset of its queue, and pulls are answered within 15 s. The end offsets of queues that are
# not pulled are requested.
END_OFFSETS_INTERVAL_S, MAX_END_OFFSET_AGE_MS = 20.0, 30_000
# The instance name in the folder of a broadcasting member. The name is fixed (Java's default), because the folder must be the
# same after a restart.
INSTANCE_NAME = "DEFAULT"
_consumer_numbers = itertools.count()


class RunningConsumer:
    """A consumer between its start and its stop: its parts and their timers. If the settings are ``ordered``, ``listener`` is
    an ordered listener.

    Besides the threads of the listener, there are four threads: for pulls (which never wait), for rebalances, for commits with
    other upkeep, and for locks. Each queue whose late messages are sent back has one more thread. A broker that hangs delays
    only the requests to this broker.

    The upkeep thread commits offsets, compares subscriptions and consume modes (``consumer/group_health``), and reads the end
    offsets of queues that are not pulled.
    """

    def __init__(
        self,
        port: GroupMember,
        settings: ConsumerSettings,
        subscriptions: Subscriptions,
        listener: Listener,
        tools: ConsumerTools,
    ) -> None:
        make_timer = tools.make_timer
        name = f"rocketmq-{settings.group}-{next(_consumer_numbers)}"
        self._port = port
        self._settings = settings
        self._subscriptions = subscriptions
        self._pull_timer, self._upkeep_timer = make_timer(f"{name}-pull"), make_timer(f"{name}-upkeep")
        self._lock_timer = make_timer(f"{name}-lock")
        self._workers = tools.make_workers(f"{name}-listener", settings.threads)
        self.state = MemberState(settings.thresholds)
        self._store = self._new_offset_store()
        self._pulling = Pulling(port, settings, self.state, self._pull_timer, subscriptions.get, self._correct_offset)
        self._ownership = Ownership(port, settings, self.state, self._store, self._pulling.pull_later, self._pull_timer)
        self._ownership.subscribed_ms = subscriptions.subscribed_ms
        rebalance_timer = make_timer(f"{name}-rebalance")
        self.rebalancing = Rebalancing(port, settings, self.state, subscriptions, self._ownership, rebalance_timer)
        if tools.rows_decoder is not None:
            self._pulling.decode, listener = tools.rows_decoder, batch_listener(listener, tools.rows_decoder.to_batch)
            self._ownership.make_queue = partial(RowsQueue, tools.rows_decoder.to_batch)
        self._traces = tools.make_traces()
        if self._traces is not None:
            listener = self._traces.wrap(listener, settings)
        self._consume_service = self._new_consume_service(listener, tools)
        self._consume_service.replier = tools.replier
        self._pulling.consume_service, self._pulling.reset_offsets_soon = (
            self._consume_service,
            self.rebalancing.reset_soon,
        )
        reregistration = Reregistration(port, rebalance_timer, self.rebalancing.schedule)
        self._pulling.on_unknown_member, self._pulling.on_connection_lost = (
            reregistration.on_unknown_member,
            reregistration.on_connection_lost,
        )
        if isinstance(self._consume_service, OrderedConsumeService):
            self._pulling.on_not_ready = self._consume_service.request_lock_soon
        if tools.backlog_reader is not None and settings.may_read_ahead:
            self._pulling.use_backlog_queues(
                BacklogQueues(settings, self.state, self._pull_timer, tools.backlog_reader)
            )
        self._subscription_conflicts = SubscriptionConflicts(port, settings.group, subscriptions)
        self._consume_modes = ConsumeModes(port, settings.group, subscriptions)
        self._request_handler = BrokerRequestHandler(
            self.state, self.rebalancing, self._membership, self._consume_service, settings, self._upkeep_timer
        )
        self._leave_group: Callable[[Deadline], None] | None = None

    def start(self) -> None:
        """Join the group, send a heartbeat, and rebalance.

        Raises ``LocalProtocolError`` if this process already has a member, ``OptionError`` if the environment has no queues or
        another member has locked the offset file, and ``OffsetError`` if the offset file is damaged.
        """
        self._store.open()
        self._fetch_routes()
        self._leave_group = self._port.join(
            self._settings.group, self._membership, self._request_handler, self._settings.heartbeat_s
        )
        self._port.heartbeat(Deadline.after(TIMEOUT_S))
        self.rebalancing.start()
        self._upkeep_timer.call_repeatedly(self._settings.persist_interval_s, self._commit, FIRST_COMMIT_DELAY_S)
        self._upkeep_timer.call_repeatedly(STATS_INTERVAL_S, self._log_stats, STATS_INTERVAL_S)
        self._upkeep_timer.call_repeatedly(COMPARISON_INTERVAL_S, self._check_subscriptions, COMPARISON_INTERVAL_S)
        self._upkeep_timer.call_repeatedly(END_OFFSETS_INTERVAL_S, self._read_end_offsets, END_OFFSETS_INTERVAL_S)
        if self._settings.clustering:
            self._upkeep_timer.call_repeatedly(COMPARISON_INTERVAL_S, self._check_consume_modes, 0.0)
        if isinstance(self._consume_service, ConcurrentConsumeService):
            timeout_s = self._settings.consume_timeout_s
            self._upkeep_timer.call_repeatedly(timeout_s, self._consume_service.send_late_messages_back, timeout_s)
        elif self._settings.clustering:
            self._lock_timer.call_repeatedly(LOCK_INTERVAL_S, self._ownership.renew_locks, FIRST_LOCK_DELAY_S)
            self._lock_timer.call_repeatedly(
                NO_NOTICES_LOCK_INTERVAL_S, self._renew_locks_without_notices, NO_NOTICES_LOCK_INTERVAL_S
            )

    def _renew_locks_without_notices(self) -> None:
        if not self._port.receives_notices:
            self._ownership.renew_locks()

    def wait_for_first_rebalance(self) -> None:
        """Wait for the first rebalance. The rebalance sets the start offsets of the assigned queues, so that later messages are
        not skipped.
        """
        self.rebalancing.wait_for_first_run(TIMEOUT_S)

    def stop(self, deadline: Deadline) -> list[ReceivedMessage]:
        """Leave the group. Returns the messages that listeners have not finished at ``deadline``. Requests to brokers may take
        ``TIMEOUT_S`` more.

        No pull and no call of a listener starts after the call of this method. A broker that hangs does not shorten the time
        for listeners. If Ctrl-C ends the wait, the consumer leaves the group all the same; another call completes the steps
        that Ctrl-C interrupted.
        """
        try:
            self._request_handler.closed = True
            self._consume_service.close()
            self.rebalancing.stop()
            self._pulling.close(min(CLOSE_TIMEOUT_S, deadline.remaining()))
            all_ended = self._workers.close(deadline)
            if isinstance(self._consume_service, ConcurrentConsumeService):
                all_ended = self._consume_service.wait_for_calls(deadline) and all_ended
            if not all_ended:
                logger.warning("group %s: listeners did not finish before the timeout", self._settings.group)
            return self._consume_service.unfinished_messages()
        finally:
            self._leave_and_close(Deadline.after(max(TIMEOUT_S, deadline.remaining())))

    def _leave_and_close(self, deadline: Deadline) -> None:
        close_deadline = deadline.within(CLOSE_TIMEOUT_S)
        try:
            for close in (self.rebalancing.close, self._upkeep_timer.close, self._lock_timer.close):
                close(close_deadline.remaining())
            self._ownership.leave(deadline)
            self.rebalancing.apply_resets()  # a pull may have reported a reset since ``rebalancing.close``
        finally:
            if self._leave_group is not None:
                self._leave_group(deadline)
                self._leave_group = None  # set after the call, so that a second ``stop`` repeats an interrupted call
            self._store.close()
            if self._traces is not None:
                self._traces.close(deadline.remaining())

    def send_subscriptions(self) -> None:
        """Report changed subscriptions to brokers now, because they reject pulls with a filter that they do not know."""
        self._port.heartbeat(Deadline.after(TIMEOUT_S))
        self.rebalancing.schedule()

    @property
    def is_listener_thread(self) -> bool:
        """Whether the calling thread runs a listener; ``stop`` waits for these threads."""
        return self._workers.is_worker_thread

    def stats(self) -> ConsumerStats:
        stats = self.state.stats()
        topics = {topic for topic in self._subscriptions.filters() if not topic.startswith(RETRY_PREFIX)}
        # The lag is unknown while queues of a topic are not assigned yet.
        return stats if topics <= self.rebalancing.balanced_topics else replace(stats, lag=None)

    def figures(self) -> dict[str, TopicFigures]:
        """Return the recent figures of each topic."""
        with self.state.lock:
            return self.state.figures.figures_of_topics(self._subscriptions.filters(), self._pull_timer.now_ms())

    def _new_consume_service(
        self, listener: Listener, tools: ConsumerTools
    ) -> ConcurrentConsumeService | OrderedConsumeService:
        settings, state = self._settings, self.state
        send_back = None
        if settings.clustering:
            send_back = SendBack(self._port, settings.group, settings.max_reconsume_times, state)
        if not settings.ordered:
            return ConcurrentConsumeService(
                listener, settings, state, self._workers, self._pull_timer, send_back, tools.make_per_queue_threads()
            )
        service = OrderedConsumeService(listener, settings, state, self._workers, self._pull_timer, send_back)
        service.on_queue_free = self.rebalancing.schedule
        if settings.clustering:
            service.request_locks, service.lock_timer = self._ownership.request_locks, self._lock_timer
            service.connection = self._port.connection
        self._ownership.ordered_service = service
        return service

    def _new_offset_store(self) -> OffsetStore:
        settings = self._settings
        if settings.clustering:
            return BrokerOffsets(
                self._port, settings.group, self.state, lambda queue: self._consume_service.is_ready(queue)
            )
        client_folder = f"{platform.node()}@{INSTANCE_NAME}"
        group = settings.wire_group or settings.group
        path = offsets_path(
            expand_home(settings.offsets_folder, "localOffsetsDir"), client_folder, group, settings.name_servers
        )
        # The path is checked again, because values of other options were added to it, and links may have changed since the
        # first check.
        if settings.is_offsets_folder_given:
            check_safe(path, "localOffsetsDir")
        return FileOffsets(
            LocalOffsets(path), self.state, lambda queue, deadline: self._port.bounds(queue, deadline).max_offset
        )

    def _membership(self) -> Membership:
        topic_filters = self._subscriptions.topic_filters()
        return Membership(
            {topic: topic_filter.filter for topic, topic_filter in topic_filters.items()},
            {topic: topic_filter.version_ms for topic, topic_filter in topic_filters.items()},
            message_model="CLUSTERING" if self._settings.clustering else "BROADCASTING",
            consume_from_where=self._settings.consume_from.where.value,
        )

    def _correct_offset(self, queue: ProcessQueue, offset: int) -> None:
        self.rebalancing.correct_offset_soon(queue, offset)

    def _fetch_routes(self) -> None:
        """Fetch the routes of the topics, because heartbeats need the addresses of brokers. Each rebalance fetches missing
        routes again.
        """
        for topic in self._subscriptions.filters():
            try:
                self.rebalancing.queues(topic, Deadline.after(TIMEOUT_S))
            except OptionError:
                raise
            except RocketMQError as e:
                # A retry topic does not exist before the first failed message of its group.
                level = logging.DEBUG if topic.startswith(RETRY_PREFIX) else logging.INFO
                logger.log(level, "topic %s has no route yet: %s", topic, e)

    def _commit(self) -> None:
        self._workers.start_missing_threads()  # an earlier start of a thread may have failed
        self._store.persist(Deadline.after(TIMEOUT_S))

    def _check_subscriptions(self) -> None:
        self._subscription_conflicts.check(Deadline.after(TIMEOUT_S))

    def _check_consume_modes(self) -> None:
        self._consume_modes.check(Deadline.after(TIMEOUT_S))

    def _read_end_offsets(self) -> None:
        """Read the end offsets of queues that are not pulled, such as full queues, because the end offsets of their last pulls
        are out of date.
        """
        now_ms, deadline = self._pull_timer.now_ms(), Deadline.after(TIMEOUT_S)
        # The set has the brokers that do not answer, so that only the first queue of each broker waits for an answer.
        unavailable_brokers: set[str] = set()
        for process_queue in self.state.owned_queues():
            if now_ms - process_queue.end_updated_ms <= MAX_END_OFFSET_AGE_MS:
                continue
            end_offset = None
            if process_queue.queue.broker_name not in unavailable_brokers and not deadline.expired:
                try:
                    end_offset = self._port.bounds(process_queue.queue, deadline).max_offset
                except RocketMQError as e:
                    logger.debug("the end of %s is unknown: %s", process_queue.queue, e)
                    if isinstance(e, CallTimeout | ConnectionLost):
                        unavailable_brokers.add(process_queue.queue.broker_name)
            self.state.record_end_offset(process_queue, end_offset, now_ms)

    def _log_stats(self) -> None:
        logger.info("group %s: %s", self._settings.group, self.stats())
