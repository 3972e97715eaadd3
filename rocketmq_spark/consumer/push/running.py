"""A consumer between its start and its stop: its parts and their timers.

Four threads besides those of the listener: pulls (which never wait), rebalances, commits with other upkeep, and locks. Each queue
whose late messages are sent back has one more. A broker that hangs delays only its own requests.

The upkeep commits, compares subscriptions and consume modes (``consumer/troubles``), and asks for the ends of queues that are
not pulled.
"""

from __future__ import annotations

import itertools
import logging
import platform
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import RETRY_PREFIX
from rocketmq_spark.base.threads import Aside, Timer
from rocketmq_spark.consumer.ahead import ReadAhead
from rocketmq_spark.consumer.process_queue import ProcessQueue
from rocketmq_spark.consumer.push.concurrent import Concurrent
from rocketmq_spark.consumer.push.member_state import MemberState
from rocketmq_spark.consumer.push.offset_store import BrokerOffsets, FileOffsets, LocalOffsets, OffsetStore, file_of
from rocketmq_spark.consumer.push.orderly import Orderly
from rocketmq_spark.consumer.push.ownership import Ownership
from rocketmq_spark.consumer.push.pulling import Backlog, Pulling
from rocketmq_spark.consumer.push.rebalancing import Answers, Rebalancing
from rocketmq_spark.consumer.push.workers import SendBack, Workers
from rocketmq_spark.consumer.result import Listener, Replier
from rocketmq_spark.consumer.rows import RowsDecoder, RowsQueue, batch_listener
from rocketmq_spark.consumer.settings import ConsumerSettings, Subscriptions
from rocketmq_spark.consumer.tracing import ListenerTraces
from rocketmq_spark.consumer.troubles import COMPARE_S, ConsumeModes, Introductions, SubscriptionConflicts
from rocketmq_spark.errors import CallTimeout, ConnectionLost, OptionError, RocketMQError
from rocketmq_spark.model import ReceivedMessage
from rocketmq_spark.model.membership import ConsumerStats, Membership, TopicFigures
from rocketmq_spark.options.paths import confined, expanded
from rocketmq_spark.ports import GroupMember

logger = logging.getLogger(__name__)

TIMEOUT_S = 3.0
FIRST_PERSIST_S = 10.0
FIRST_LOCK_S, LOCK_S = 1.0, 20.0
# A broker that restarts forgets its locks. The connection to a Proxy stays open, so only the next lock request shows the loss.
UNNOTICED_LOCK_S = 3.0
STATS_S = 60.0
ENDS_S, HEARD_MS = 20.0, 30_000  # a queue that is pulled is heard of sooner, also where nothing comes: pulls wait 15 s
HANGS_S = 1.0  # what is asked for nothing any more is not waited for longer: the last words need the time
# What broadcasting members of a host are called in their folder, which must be the same after a restart; Java's default.
INSTANCE_NAME = "DEFAULT"

_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class ConsumerTools:
    """What a consumer is built with: timers, threads of listeners and of single queues, and optionally reading ahead, replies
    to requests, traces, and how answers become rows for a listener of record batches.
    """

    timer: Callable[[str], Timer] = Timer
    workers: Callable[[str, int], Workers] = Workers
    aside: Callable[[], Aside] = Aside
    read_ahead: ReadAhead | None = None
    replier: Replier | None = None
    traces: Callable[[], ListenerTraces | None] = lambda: None
    rows: RowsDecoder | None = None


class RunningConsumer:
    """One started consumer; with ``ordered`` settings, ``listener`` is an ordered one."""

    def __init__(
        self,
        port: GroupMember,
        settings: ConsumerSettings,
        subscriptions: Subscriptions,
        listener: Listener,
        make: ConsumerTools,
    ) -> None:
        make_timer = make.timer
        name = f"rocketmq-{settings.group}-{next(_numbers)}"
        self._port = port
        self._settings = settings
        self._subscriptions = subscriptions
        self._pulls, self._upkeep = make_timer(f"{name}-pull"), make_timer(f"{name}-upkeep")
        self._locks = make_timer(f"{name}-lock")
        self._workers = make.workers(f"{name}-listener", settings.threads)
        self.held = MemberState(settings.thresholds)
        self._store = self._offset_store()
        self._pulling = Pulling(port, settings, self.held, self._pulls, subscriptions.get, self._repair)
        self._ownership = Ownership(port, settings, self.held, self._store, self._pulling.begin, self._pulls)
        self._ownership.subscribed_ms = subscriptions.at_ms
        rebalances = make_timer(f"{name}-rebalance")
        self.rebalancing = Rebalancing(port, settings, self.held, subscriptions, self._ownership, rebalances)
        if make.rows is not None:
            self._pulling.unpack, listener = make.rows, batch_listener(listener, make.rows.to_batch)
            self._ownership.make_queue = partial(RowsQueue, make.rows.to_batch)
        self._traces = make.traces()
        if self._traces is not None:
            listener = self._traces.around(listener, settings)
        self._consuming = self._consumer_of(listener, make)
        self._consuming.replier = make.replier
        self._pulling.consuming, self._pulling.move = self._consuming, self.rebalancing.move
        introductions = Introductions(port, rebalances, self.rebalancing.wake)
        self._pulling.unknown, self._pulling.lost = introductions.refused, introductions.lost
        if isinstance(self._consuming, Orderly):
            self._pulling.unready = self._consuming.lock_soon
        if make.read_ahead is not None and settings.reads_ahead:
            self._pulling.read_ahead(Backlog(settings, self.held, self._pulls, make.read_ahead))
        self._differing = SubscriptionConflicts(port, settings.group, subscriptions)
        self._modes = ConsumeModes(port, settings.group, subscriptions)
        self._answers = Answers(self.held, self.rebalancing, self._membership, self._consuming, settings, self._upkeep)
        self._leave: Callable[[Deadline], None] | None = None

    def begin(self) -> None:
        """Join the group, send a heartbeat, and rebalance.

        Raises ``LocalProtocolError`` for a second member in a process, ``OptionError`` for an environment without queues
        or if another member has locked the offset file, and ``OffsetError`` if that file is damaged.
        """
        self._store.begin()
        self._find_routes()
        self._leave = self._port.join(self._settings.group, self._membership, self._answers, self._settings.heartbeat_s)
        self._port.heartbeat(Deadline.after(TIMEOUT_S))
        self.rebalancing.begin()
        self._upkeep.every(self._settings.persist_interval_s, self._persist, FIRST_PERSIST_S)
        self._upkeep.every(STATS_S, self._log_stats, STATS_S)
        self._upkeep.every(COMPARE_S, self._look_at_others, COMPARE_S)
        self._upkeep.every(ENDS_S, self._look_at_ends, ENDS_S)
        if self._settings.clustering:
            self._upkeep.every(COMPARE_S, self._look_at_modes, 0.0)
        if isinstance(self._consuming, Concurrent):
            timeout_s = self._settings.consume_timeout_s
            self._upkeep.every(timeout_s, self._consuming.clean, timeout_s)
        elif self._settings.clustering:
            self._locks.every(LOCK_S, self._ownership.lock_all, FIRST_LOCK_S)
            self._locks.every(UNNOTICED_LOCK_S, self._renew_locks_at_proxy, UNNOTICED_LOCK_S)

    def _renew_locks_at_proxy(self) -> None:
        if not self._port.has_notices:
            self._ownership.lock_all()

    def settle(self) -> None:
        """Wait until the first queues have begun: what is sent from then on lies behind their start."""
        self.rebalancing.first(TIMEOUT_S)

    def end(self, deadline: Deadline) -> list[ReceivedMessage]:
        """Leave the group; returns messages that listeners have at ``deadline``. Requests to brokers may take ``TIMEOUT_S`` more.

        No pull or listener call begins after this. A broker that hangs takes no time from listeners. If Ctrl-C ends the wait,
        the group is left nevertheless; another call completes the steps that Ctrl-C interrupted.
        """
        try:
            self._answers.closed = True
            self._consuming.close()
            self.rebalancing.stop()
            self._pulling.close(min(HANGS_S, deadline.remaining()))
            over = self._workers.close(deadline)
            if isinstance(self._consuming, Concurrent):
                over = self._consuming.idle(deadline) and over
            if not over:
                logger.warning("group %s: listeners did not finish before the timeout", self._settings.group)
            return self._consuming.unfinished()
        finally:
            self._say_last_words(Deadline.after(max(TIMEOUT_S, deadline.remaining())))

    def _say_last_words(self, deadline: Deadline) -> None:
        hanging = deadline.within(HANGS_S)
        try:
            for close in (self.rebalancing.close, self._upkeep.close, self._locks.close):
                close(hanging.remaining())
            self._ownership.leave(deadline)
            self.rebalancing.settle()  # a pull may have received a reset meanwhile
        finally:
            if self._leave is not None:
                self._leave(deadline)
                self._leave = None  # not before: an interrupted one is repeated
            self._store.end()
            if self._traces is not None:
                self._traces.close(deadline.remaining())

    def changed(self) -> None:
        """Report changed subscriptions to brokers now, because they reject pulls with a filter that they do not know."""
        self._port.heartbeat(Deadline.after(TIMEOUT_S))
        self.rebalancing.wake()

    @property
    def listens_here(self) -> bool:
        """Whether the calling thread runs a listener; ``end`` waits for these."""
        return self._workers.here

    def stats(self) -> ConsumerStats:
        stats = self.held.stats()
        topics = {topic for topic in self._subscriptions.all() if not topic.startswith(RETRY_PREFIX)}
        return stats if topics <= self.rebalancing.shared else replace(stats, lag=None)  # some queues are not known yet

    def figures(self) -> dict[str, TopicFigures]:
        """Return the recent figures of each topic."""
        with self.held.lock:
            return self.held.figures.all(self._subscriptions.all(), self._pulls.now_ms())

    def _consumer_of(self, listener: Listener, make: ConsumerTools) -> Concurrent | Orderly:
        settings, held = self._settings, self.held
        send_back = None
        if settings.clustering:
            send_back = SendBack(self._port, settings.group, settings.max_reconsume_times, held)
        if not settings.ordered:
            return Concurrent(listener, settings, held, self._workers, self._pulls, send_back, make.aside())
        ordered = Orderly(listener, settings, held, self._workers, self._pulls, send_back)
        ordered.left = self.rebalancing.wake
        if settings.clustering:
            ordered.relock, ordered.locks = self._ownership.relock, self._locks
            ordered.connection = self._port.connection
        self._ownership.orderly = ordered
        return ordered

    def _offset_store(self) -> OffsetStore:
        settings = self._settings
        if settings.clustering:
            return BrokerOffsets(self._port, settings.group, self.held, lambda queue: self._consuming.ready(queue))
        client = f"{platform.node()}@{INSTANCE_NAME}"
        group = settings.wire_group or settings.group
        file = file_of(expanded(settings.offsets_folder, "localOffsetsDir"), client, group, settings.name_servers)
        if settings.offsets_folder_given:  # other options are parts of the path, and links may have changed
            confined(file, "localOffsetsDir")
        return FileOffsets(LocalOffsets(file), self.held, lambda queue, by: self._port.bounds(queue, by).max_offset)

    def _membership(self) -> Membership:
        each = self._subscriptions.each()
        return Membership(
            {topic: one.filter for topic, one in each.items()},
            {topic: one.version_ms for topic, one in each.items()},
            message_model="CLUSTERING" if self._settings.clustering else "BROADCASTING",
            consume_from_where=self._settings.consume_from.where.value,
        )

    def _repair(self, queue: ProcessQueue, offset: int) -> None:
        self.rebalancing.repair(queue, offset)

    def _find_routes(self) -> None:
        """Fetch routes, so that heartbeats have addresses. Each rebalance retries missing routes."""
        for topic in self._subscriptions.all():
            try:
                self.rebalancing.queues(topic, Deadline.after(TIMEOUT_S))
            except OptionError:
                raise
            except RocketMQError as e:
                # A retry topic does not exist before the first failed message of its group.
                level = logging.DEBUG if topic.startswith(RETRY_PREFIX) else logging.INFO
                logger.log(level, "topic %s has no route yet: %s", topic, e)

    def _persist(self) -> None:
        self._workers.start_missing()  # where the system had no threads to give, work waits for them
        self._store.persist(Deadline.after(TIMEOUT_S))

    def _look_at_others(self) -> None:
        self._differing.look(Deadline.after(TIMEOUT_S))

    def _look_at_modes(self) -> None:
        self._modes.look(Deadline.after(TIMEOUT_S))

    def _look_at_ends(self) -> None:
        """Ask for the ends of queues that are not pulled, such as full ones: the lag would be that of their last pull."""
        now_ms, deadline = self._pulls.now_ms(), Deadline.after(TIMEOUT_S)
        troubled: set[str] = set()  # brokers that do not answer: waited for once
        for queue in self.held.owned():
            if now_ms - queue.end_updated_ms <= HEARD_MS:
                continue
            end = None
            if queue.queue.broker_name not in troubled and not deadline.expired:
                try:
                    end = self._port.bounds(queue.queue, deadline).max_offset
                except RocketMQError as e:
                    logger.debug("the end of %s is unknown: %s", queue.queue, e)
                    if isinstance(e, CallTimeout | ConnectionLost):
                        troubled.add(queue.queue.broker_name)
            self.held.heard(queue, end, now_ms)

    def _log_stats(self) -> None:
        logger.info("group %s: %s", self._settings.group, self.stats())
