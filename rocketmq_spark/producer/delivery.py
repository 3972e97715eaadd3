"""Bringing one parcel to a broker: choice of the queue, attempts, pauses, fault reports; blocking or with a callback.

Mirrors ``DefaultMQProducerImpl.sendDefaultImpl`` and ``MQClientAPIImpl.sendMessageAsync``. A driver: decisions are in
``attempts``, ``faults`` and ``lanes``; here are the lock round them and the waiting.
"""

from __future__ import annotations

import functools
import logging
import random
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rocketmq_spark.clock import Deadline
from rocketmq_spark.errors import ClosedError, RocketMQError, SendFailed
from rocketmq_spark.model import Message, MessageQueue, SendRequest, SendResult
from rocketmq_spark.ports import Sender
from rocketmq_spark.producer.attempts import Again, Attempts, OutOfTime, report_of
from rocketmq_spark.producer.clockwork import Clockwork
from rocketmq_spark.producer.faults import FaultTable
from rocketmq_spark.producer.hooks import Hooks, SendContext
from rocketmq_spark.producer.lanes import Lanes
from rocketmq_spark.producer.pending import Outcome
from rocketmq_spark.producer.settings import ProducerSettings
from rocketmq_spark.producer.topics import Topics
from rocketmq_spark.queues.selection import RoundRobin

logger = logging.getLogger(__name__)


def _nobody(outcome: Outcome) -> None:
    pass


class Unsent(NamedTuple):
    """What had no answer when the producer was closed; it may have been stored all the same."""

    topic: str
    queue: MessageQueue | None
    msg_ids: Sequence[str]


@dataclass(slots=True, eq=False)
class Parcel:
    """One request on its way: a message or a batch.

    ``pinned`` is the queue that the caller or a selector chose; without it each attempt chooses, at random among what
    ``narrow`` leaves of the queues if it is given. ``lane`` makes parcels of one queue go one after the other; with
    ``timeout_s`` the deadline does not start before the first attempt, so that waiting in the lane does not count.
    ``done`` gets the outcome once, on any thread, and must not block.
    """

    topic: str
    request: SendRequest
    deadline: Deadline
    pinned: MessageQueue | None = None
    lane: MessageQueue | None = None
    narrow: Callable[[Sequence[MessageQueue]], Sequence[MessageQueue]] | None = None
    timeout_s: float | None = None
    done: Callable[[Outcome], None] = _nobody
    message: Message | None = None
    msg_ids: Sequence[str] = ()
    attempts: Attempts = field(init=False)
    refresh: bool = False
    finished: bool = False


class Delivery:
    """Sends parcels, and knows which are still under way."""

    def __init__(
        self,
        sender: Sender,
        topics: Topics,
        settings: ProducerSettings,
        clockwork: Clockwork,
        faults: FaultTable | None = None,
    ) -> None:
        self.faults = faults or FaultTable(settings.fault_tables, settings.send_latency_fault, settings.detector)
        self.hooks = Hooks()
        self._sender = sender
        self._topics = topics
        self._settings = settings
        self._policy = settings.retry_policy
        self._clockwork = clockwork
        self._aside = clockwork.beside("route")
        self._rng = random.Random()
        self._lanes: Lanes[Parcel] = Lanes(settings.max_in_flight)
        self._shut: dict[MessageQueue | None, RocketMQError] = {}
        self._bytes = 0
        self._changed = threading.Condition()
        self._blocking: set[Parcel] = set()
        self._indexes = threading.local()
        self._closed = False

    def send(self, parcel: Parcel) -> SendResult:
        """All attempts of ``parcel`` on the calling thread; returns the result or raises the error."""
        parcel.attempts = self._attempts(parcel)
        with self._changed:
            self._blocking.add(parcel)
        try:
            return self._send(parcel)
        finally:
            with self._changed:
                self._blocking.discard(parcel)
                self._changed.notify_all()

    def _send(self, parcel: Parcel) -> SendResult:
        while True:
            queue: MessageQueue | None = None
            try:
                queue = self._choose(parcel)
                context, start = self._begin(parcel, queue, "sync"), self._clockwork.now_ms()
                outcome: Outcome = self._try(parcel, queue)
                self._settle(queue, outcome, start, context)
            except RocketMQError as e:
                outcome = e
            verdict = self._judge(parcel, queue, outcome)
            if isinstance(verdict, SendResult):
                return verdict
            if isinstance(verdict, RocketMQError):
                raise verdict
            parcel.refresh = verdict.refresh
            if verdict.pause_s:
                self._clockwork.pause(verdict.pause_s)

    def _try(self, parcel: Parcel, queue: MessageQueue) -> Outcome:
        try:
            return self._sender.send(queue, parcel.request, self._share(parcel))
        except RocketMQError as e:
            return e

    def oneway(self, parcel: Parcel) -> None:
        """One attempt without an answer; only what fails before the socket is raised."""
        parcel.attempts = self._attempts(parcel)
        queue = self._choose(parcel)
        context = self._begin(parcel, queue, "oneway")
        self._sender.send_oneway(queue, parcel.request, parcel.deadline)
        if context is not None:
            self.hooks.after(context, None, 0)

    def admit(self, size: int, deadline: Deadline) -> None:
        """Wait until another asynchronous send of ``size`` bytes is within the bounds; ``SendFailed`` in the end."""
        with self._changed:
            while not self._closed and not self._has_room(size):
                if deadline.expired:
                    raise SendFailed(
                        f"{len(self._lanes)} asynchronous sends with {self._bytes} bytes are not answered yet",
                        remedy="Send more slowly, or wait for results",
                    )
                self._clockwork.hold(self._changed, deadline.remaining())

    def _has_room(self, size: int) -> bool:
        messages, most = len(self._lanes), self._settings.max_async_messages
        return not messages or (messages < most and self._bytes + size <= self._settings.max_async_bytes)

    def enqueue(self, parcel: Parcel) -> bool:
        """Put ``parcel`` into its lane, unless closed; ``pump`` sends what is ready, so that order is fixed first."""
        parcel.attempts = self._attempts(parcel)
        with self._changed:
            if self._closed:
                return False
            cause = self._shut.get(parcel.lane)
            if cause is None:
                self._lanes.put(parcel, parcel.lane)
                self._bytes += len(parcel.request.body)
        if cause is not None:
            parcel.done(_behind(parcel, cause))
        return True

    def pump(self) -> None:
        """Send what may go out now. Asking for the route of a new topic may block."""
        with self._changed:
            released = self._lanes.take(self._clockwork.now_ms())
        for parcel in released:
            if parcel.refresh:  # a name server that hangs must not hold up the others
                self._aside.later(0, functools.partial(self._launch, parcel))
            else:
                self._launch(parcel)

    def _launch(self, parcel: Parcel) -> None:
        if parcel.timeout_s is not None and not parcel.attempts.count:
            parcel.deadline = Deadline.after(parcel.timeout_s)
        attempt = parcel.attempts.count
        try:
            queue = self._choose(parcel)
            context, start = self._begin(parcel, queue, "async"), self._clockwork.now_ms()

            def done(outcome: Outcome) -> None:
                try:
                    self._settle(queue, outcome, start, context)
                except Exception:  # the parcel must not be stranded because nobody could be told
                    logger.exception("the outcome of an attempt could not be reported")
                self._landed(parcel, attempt, queue, outcome)

            self._sender.send_async(queue, parcel.request, self._share(parcel), done)
        except RocketMQError as e:
            self._landed(parcel, attempt, None, e)
        except Exception as e:  # whatever it is, it must become an outcome
            logger.exception("sending to %s failed", parcel.topic)
            self._landed(parcel, attempt, None, _unexpected(e, parcel))

    def _landed(self, parcel: Parcel, attempt: int, queue: MessageQueue | None, outcome: Outcome) -> None:
        if attempt != parcel.attempts.count:  # a second outcome of one attempt
            return
        try:
            verdict = self._judge(parcel, queue, outcome)
        except Exception as e:
            logger.exception("the outcome of an attempt could not be judged")
            verdict = _unexpected(e, parcel)
        behind: list[Parcel] = []
        with self._changed:
            if parcel.finished:  # given up by ``close`` before its answer came
                return
            if isinstance(verdict, Again):
                parcel.refresh = verdict.refresh
                self._lanes.again(parcel, self._clockwork.now_ms() + int(verdict.pause_s * 1000))
            else:
                behind = self._finish(parcel, verdict)
            more = self._lanes.blocked
        if more:  # not from here: this may be the thread that reads answers
            self._clockwork.later(0, self.pump)
        if isinstance(verdict, Again):
            self._clockwork.later(verdict.pause_s, self.pump)
            return
        parcel.done(verdict)
        for each in behind:
            assert isinstance(verdict, RocketMQError)
            each.done(_behind(each, verdict))

    def _finish(self, parcel: Parcel, outcome: Outcome) -> list[Parcel]:
        """What fails with it: the parcels that wait for the same queue, since none may overtake another."""
        behind: list[Parcel] = []
        if parcel.lane is not None and isinstance(outcome, RocketMQError):
            behind = self._lanes.shut(parcel)
            if self._settings.lanes_stay_shut:
                self._shut[parcel.lane] = outcome
        else:
            self._lanes.done(parcel)
        for each in (parcel, *behind):
            each.finished = True
            self._bytes -= len(each.request.body)
        self._changed.notify_all()
        return behind

    def widen(self, most: int) -> None:
        """Let ``most`` parcels of ``enqueue`` be out at once from now on."""
        with self._changed:
            self._lanes.window = most

    def idle(self, deadline: Deadline) -> bool:
        """Whether everything under way has its answer by then."""
        with self._changed:
            while (len(self._lanes) or self._blocking) and not deadline.expired:
                self._clockwork.hold(self._changed, deadline.remaining())
            return not len(self._lanes) and not self._blocking

    def close(self, deadline: Deadline) -> list[Unsent]:
        """Wait until everything under way has its answer; what has none by then is failed and returned."""
        self.idle(deadline)
        with self._changed:
            self._closed = True
            left = self._lanes.drop()
            for parcel in left:
                parcel.finished = True
            self._bytes = 0
            blocking = list(self._blocking)
            self._changed.notify_all()
        self._aside.close(wait_s=0)
        for parcel in left:
            parcel.done(closed())
        return [Unsent(p.topic, p.pinned, p.msg_ids) for p in left + blocking]

    def due_probes(self, now_ms: int) -> list[str]:
        """Brokers that the detector should probe now."""
        with self._changed:
            return self.faults.due_probes(now_ms, self._settings.detect_interval_ms)

    def probed(self, broker: str, answered: bool) -> None:
        with self._changed:
            self.faults.probed(broker, answered)

    def forget_brokers_without_route(self) -> None:
        brokers = self._topics.brokers()
        with self._changed:
            self.faults.retain(brokers)

    def _attempts(self, parcel: Parcel) -> Attempts:
        return Attempts(self._policy, parcel.pinned is not None, self._rng)

    def _choose(self, parcel: Parcel) -> MessageQueue:
        """The queue of the next attempt, after a fresh route if the last attempt asked for one."""
        if parcel.deadline.expired:
            raise OutOfTime("the send timeout is over", topic=parcel.topic)
        if parcel.pinned is not None:
            if parcel.refresh:
                self._topics.queues(parcel.topic, parcel.deadline, refresh=True)
            return parcel.pinned
        queues = self._topics.queues(parcel.topic, parcel.deadline, parcel.refresh)
        if parcel.narrow is not None:
            queues, index = parcel.narrow(queues), RoundRobin()
        else:
            index = self._index(parcel.topic, queues)
        if parcel.attempts.count and self.faults.enabled:
            index.reset()
        return self._pick(queues, index, parcel.attempts.last_broker)

    def _pick(self, queues: Sequence[MessageQueue], index: RoundRobin, last_broker: str | None) -> MessageQueue:
        try:
            with self._changed:
                return self.faults.pick(queues, index, last_broker, self._clockwork.now_ms())
        except Exception:  # the choice of a queue must never be why a message is not sent
            logger.exception("fault tolerance failed; going round the queues instead")
            return index.pick(queues, last_broker)

    def _index(self, topic: str, queues: Sequence[MessageQueue]) -> RoundRobin:
        """This thread's index into ``queues``; a new list starts a new one, as a new publish info does in Java."""
        indexes: dict[str, tuple[Sequence[MessageQueue], RoundRobin]] = self._indexes.__dict__
        known = indexes.get(topic)
        if known is None or known[0] is not queues:
            known = indexes[topic] = (queues, RoundRobin())
        return known[1]

    def _share(self, parcel: Parcel) -> Deadline:
        """The deadline of one attempt: the whole one for the last."""
        most = self._settings.attempt_timeout_s
        if most is not None and parcel.attempts.more_possible:
            return parcel.deadline.within(most)
        return parcel.deadline

    def _begin(self, parcel: Parcel, queue: MessageQueue, mode: str) -> SendContext | None:
        if not self.hooks:
            return None
        attempt = parcel.attempts.count + 1
        context = SendContext(
            self._settings.group, queue, parcel.request, mode, attempt, parcel.message, parcel.msg_ids
        )
        self.hooks.before(context)
        return context

    def _settle(self, queue: MessageQueue, outcome: Outcome, start_ms: int, context: SendContext | None) -> None:
        """Report the outcome of an attempt to the fault table and to the hooks."""
        now_ms = self._clockwork.now_ms()
        report = report_of(outcome)
        if report is not None:
            with self._changed:
                self.faults.report(queue.broker_name, now_ms - start_ms, now_ms, report.isolated, report.reachable)
        if context is not None:
            self.hooks.after(context, outcome, now_ms - start_ms)

    def _judge(self, parcel: Parcel, queue: MessageQueue | None, outcome: Outcome) -> Outcome | Again:
        brokers: Collection[str] = ()
        if isinstance(outcome, RocketMQError) and queue is not None and parcel.pinned is None and parcel.narrow is None:
            brokers = self._topics.brokers_of(parcel.topic)
        return parcel.attempts.judge(queue, outcome, brokers, parcel.deadline.remaining())


def _behind(parcel: Parcel, cause: RocketMQError) -> SendFailed:
    error = SendFailed(
        f"not sent, because an earlier batch of its queue was given up: {cause.message}",
        cause.addr,
        cause.broker_code,
        parcel.topic,
        str(parcel.lane),
        cause.remark,
        cause.remedy,
    )
    error.__cause__ = cause
    return error


def _unexpected(error: Exception, parcel: Parcel) -> SendFailed:
    failed = SendFailed(
        f"sending failed in an unexpected way: {type(error).__name__}: {error}",
        topic=parcel.topic,
        remedy="This is a bug of rocketmq-spark unless the error is of a selector; please report it with the log",
    )
    failed.__cause__ = error
    return failed


def closed() -> ClosedError:
    return ClosedError("the producer was closed before the message was acknowledged; it may have been stored")
