"""The one way to send: every request of a producer, of its batches and of a sink's task goes through an engine.

Mirrors ``DefaultMQProducerImpl.sendDefaultImpl`` and ``MQClientAPIImpl.sendMessageAsync``. The engine owns what sending
needs (topics, faults, hooks, the timer) and bounds what is under way. A driver: decisions are in ``attempts``, ``faults``,
``destination`` and ``in_flight``, which has the lock; the engine sends and waits. Every request begins in ``_sending``,
every attempt with an answer ends in ``_judge``, and every request that has an outcome ends in ``_end``, whatever the mode:
attach transactions or metrics there. A spool takes what ``_judge`` gave up, before ``_end``.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import random
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.timer import Timer
from rocketmq_spark.errors import ClosedError, RocketMQError, SendFailed
from rocketmq_spark.model import MessageQueue, SendResult
from rocketmq_spark.ports import Sender, Spool
from rocketmq_spark.producer.attempts import Attempts, RetryAttempt, report_of
from rocketmq_spark.producer.confirming import Confirming, EndKind, end_of, unproved
from rocketmq_spark.producer.destination import QueueChoice
from rocketmq_spark.producer.faults import FaultTable
from rocketmq_spark.producer.in_flight import Sending, UnderWay, closed
from rocketmq_spark.producer.outgoing import Ended, Outcome, Outgoing
from rocketmq_spark.producer.settings import Hooks, ProducerSettings, SendContext
from rocketmq_spark.producer.spooling import Spooling
from rocketmq_spark.producer.topics import Topics

logger = logging.getLogger(__name__)

Together = Callable[[], contextlib.AbstractContextManager[None]]


class Unsent(NamedTuple):
    """A send without an answer when the producer was closed. Its messages may be stored."""

    topic: str
    queue: MessageQueue | None
    msg_ids: Sequence[str]


class _Attempt(NamedTuple):
    """An attempt that has begun. ``context`` is set if there are hooks."""

    queue: MessageQueue
    start_ms: int
    context: SendContext | None


class Engine:
    """Sends what it is handed, and knows what is under way. ``close`` ends its timer too.

    Without ``faults`` it has a fault table of its own. ``in_flight`` counts what was submitted and has no outcome yet.
    What fails for passing reasons, and what is left at the close, goes to the ``spool`` if there is one, and counts as sent.
    What one ``pump`` sends, it sends in the context ``together``. With ``confirming``, which who owns the engine may set, nothing
    that was submitted is sent again while it may be stored: that is looked up first.
    """

    def __init__(
        self,
        sender: Sender,
        settings: ProducerSettings,
        timer: Timer,
        faults: FaultTable | None = None,
        spool: Spool | None = None,
        together: Together = contextlib.nullcontext,
    ) -> None:
        self.topics = Topics(sender, settings)
        self.faults = faults or FaultTable(settings.fault_tables, settings.send_latency_fault, settings.detector)
        self.hooks = Hooks()
        self.timer = timer
        self._sender = sender
        self._settings = settings
        self._policy = settings.retry_policy
        self._aside = timer.beside("route")
        self._choice = QueueChoice(self.topics, self.faults, timer)
        self._rng = random.Random()
        self._spooling = None if spool is None else Spooling(spool, sender, timer)
        self.confirming: Confirming | None = None
        self._together = together
        self._under_way = UnderWay(settings, timer)
        self.in_flight = self._under_way.in_flight

    def send(self, outgoing: Outgoing) -> SendResult:
        """All attempts on the calling thread; returns the result or raises the error."""
        sending = self._sending(outgoing)
        self._under_way.block(sending)
        try:
            outcome = self._attempt_all(sending)
        finally:
            self._under_way.unblock(sending)
        self._end(sending, outcome)
        if isinstance(outcome, RocketMQError):
            raise outcome
        return outcome

    def submit(self, outgoing: Outgoing) -> None:
        """Send without waiting for the answer, which ``done`` receives; a closed engine is an error.

        Waits while there is no room, and raises ``SendFailed`` when there is none in time, or no thread for what comes
        after the answer. What interrupts that is raised, and ``done`` is called.
        """
        try:
            self._under_way.wait_for_room(outgoing)
        except RocketMQError:
            raise
        except BaseException:
            outgoing.done(Ended(outgoing, _interrupted(outgoing)))
            raise
        if self.enqueue(outgoing):
            self.pump()
        else:
            outgoing.done(Ended(outgoing, closed()))

    def has_room(self, size: int, ordered: bool = False) -> bool:
        """Whether ``submit`` of a request of ``size`` bytes would not wait; for callers who have something to do meanwhile."""
        return self._under_way.has_room(size, ordered)

    def enqueue(self, outgoing: Outgoing) -> bool:
        """Fix the place of ``outgoing`` in the order of its queue, whatever the bounds; False when closed.

        ``pump`` sends what may go out now.
        """
        sending = self._sending(outgoing)
        brokers = len(self.topics.brokers()) if self.in_flight.counts_brokers else 1
        try:
            cause = self._under_way.put(sending, brokers)
        except ClosedError:
            return False
        if cause is not None:
            self._end(sending, _behind(outgoing, cause))
        return True

    def pump(self) -> None:
        """Send what may go out now. Asking for the route of a new topic may block, and may be interrupted."""
        with self._together():
            taken = deque(self._under_way.take())
            try:
                while taken:
                    sending = taken.popleft()
                    if sending.refresh:  # a name server that hangs must not hold up the others
                        self._aside.soon(functools.partial(self._launch, sending))
                    else:
                        self._launch(sending)
            finally:
                for sending in taken:  # what interrupts one must not cost the others their turn
                    self._over(sending, RetryAttempt(0.0, sending.refresh))

    def oneway(self, outgoing: Outgoing) -> None:
        """One attempt without an answer; only what fails before the socket is raised."""
        sending = self._sending(outgoing)
        attempt = self._begin(sending, self._choose(sending), "oneway")
        self._sender.send_oneway(attempt.queue, outgoing.request, sending.deadline)
        if attempt.context is not None:
            self.hooks.after(attempt.context, None, 0)

    def idle(self, deadline: Deadline) -> bool:
        """Whether everything under way has its answer by then."""
        return self._under_way.idle(deadline)

    def close(self, deadline: Deadline, wait_s: float = 5.0, keep: bool = True) -> list[Unsent]:
        """Wait until everything under way has its answer; what has none by then is failed and returned.

        With a spool that is where it goes, unless it is not to be kept because the caller sends it again anyway. A call of
        the timer is waited for ``wait_s`` seconds.
        """
        self.idle(deadline)
        if self._spooling is not None:
            self._spooling.drain()
        left, blocking = self._under_way.close()
        self._aside.close(wait_s=0)
        if self.confirming is not None:
            self.confirming.close()
        outcomes: list[Outcome] = [closed() for _ in left]
        if self._spooling is not None:
            kept = [i for i, sending in enumerate(left) if keep and sending.outgoing.spoolable]
            found = self._spooling.keep([(left[i].outgoing, None) for i in kept])
            for i, outcome in zip(kept, found, strict=True):
                outcomes[i] = outcome
            self._spooling.close()
        lost = list(blocking)
        for sending, outcome in zip(left, outcomes, strict=True):
            self._end(sending, outcome)
            if isinstance(outcome, RocketMQError):
                lost.append(sending)
        self.timer.close(wait_s)
        return [Unsent(each.outgoing.topic, each.outgoing.queue, each.outgoing.msg_ids) for each in lost]

    def _sending(self, outgoing: Outgoing) -> Sending:
        """Every request begins here."""
        return Sending(outgoing, outgoing.deadline, Attempts(self._policy, outgoing.queue is not None, self._rng))

    def _end(self, sending: Sending, outcome: Outcome) -> None:
        """Every request ends here, once."""
        attempts = sending.attempts
        ended = Ended(sending.outgoing, outcome, attempts.count, attempts.brokers, sending.confirmed)
        sending.outgoing.done(ended)

    def _attempt_all(self, sending: Sending) -> Outcome:
        spooling = _spool_of(self._spooling, sending)
        # What is sent once is not looked up either: a half message does not lie in its topic.
        confirming = None if sending.outgoing.once else self.confirming
        if spooling is not None and spooling.overtakes(sending.outgoing):
            return spooling.keep([(sending.outgoing, None)])[0]
        while True:
            queue: MessageQueue | None = None
            try:
                queue = self._choose(sending)
                attempt = self._begin(sending, queue, "sync")
                outcome = _sent(self._sender, confirming, sending, queue, self._share(sending))
                self._report(attempt, outcome)
            except RocketMQError as e:
                outcome = e
            if confirming is not None:
                outcome = confirming.known(sending, queue, outcome)
            verdict = self._judge(sending, queue, outcome)
            if not isinstance(verdict, RetryAttempt):
                return verdict if spooling is None else spooling.settled(sending.outgoing, verdict)
            sending.refresh = verdict.refresh
            if verdict.pause_s:
                self.timer.pause(verdict.pause_s)

    def _launch(self, sending: Sending) -> None:
        """An attempt whose answer comes later."""
        number = sending.attempts.count
        if not number:
            sending.deadline = sending.outgoing.deadline
            spooling = _spool_of(self._spooling, sending)
            if spooling is not None and spooling.overtakes(sending.outgoing):
                spooling.later(sending.outgoing, None, functools.partial(self._over, sending))
                return
        queue: MessageQueue | None = None
        try:
            queue = chosen = self._choose(sending)
            if sending.finished:  # closed while a route was asked for
                return
            attempt = self._begin(sending, chosen, "async")

            def done(outcome: Outcome) -> None:
                try:
                    self._report(attempt, outcome)
                except Exception:  # the request must not be stranded because the caller could not be notified
                    logger.exception("the outcome of an attempt could not be reported")
                self._landed(sending, number, chosen, outcome)

            try:
                if self.confirming is not None:
                    self.confirming.begin(sending, chosen)
            except RocketMQError as e:
                done(e)
                return
            self._sender.send_async(chosen, sending.request, self._share(sending), done)
        except RocketMQError as e:
            self._landed(sending, number, None, e)
        except Exception as e:  # whatever it is, it must become an outcome
            logger.exception("sending to %s failed", sending.outgoing.topic)
            self._landed(sending, number, queue, _unexpected(e, sending.outgoing))
        except BaseException:  # Ctrl-C is for the user, and the request has an outcome all the same
            self._landed(sending, number, queue, _interrupted(sending.outgoing))
            raise

    def _landed(self, sending: Sending, number: int, queue: MessageQueue | None, outcome: Outcome) -> None:
        if number != sending.attempts.count:  # a second outcome of one attempt
            return
        if self.confirming is not None:
            again = functools.partial(self._landed, sending, number)
            if not self.confirming.knows(sending, queue, outcome, again):
                return
        try:
            verdict = self._judge(sending, queue, outcome)
        except Exception as e:
            logger.exception("the outcome of an attempt could not be judged")
            verdict = _unexpected(e, sending.outgoing)
        spooling = _spool_of(self._spooling, sending)
        if spooling is not None and isinstance(verdict, RocketMQError):
            spooling.later(sending.outgoing, verdict, functools.partial(self._over, sending))
            return
        if self._spooling is not None and isinstance(verdict, SendResult):
            self._spooling.answered(verdict)
        self._over(sending, verdict)

    def _over(self, sending: Sending, verdict: Outcome | RetryAttempt) -> None:
        """An attempt is over, and so is its request unless there is another one."""
        landing = self._under_way.landed(sending, verdict)
        if landing is None:
            return
        if landing.more:  # not from here: this may be the thread that reads answers
            self.timer.later(0, self.pump)
        if isinstance(verdict, RetryAttempt):
            self.timer.later(verdict.pause_s, self.pump)
            return
        self._end(sending, verdict)
        for each in landing.behind:
            assert isinstance(verdict, RocketMQError)
            self._end(each, _behind(each.outgoing, verdict))

    def _choose(self, sending: Sending) -> MessageQueue:
        return self._choice.queue(sending.outgoing, sending.attempts, sending.deadline, sending.refresh)

    def _share(self, sending: Sending) -> Deadline:
        """The deadline of one attempt: the whole one for the last, unless a look follows it."""
        max_s = self._settings.attempt_timeout_s
        if max_s is not None and (sending.attempts.more_possible or self.confirming is not None):
            return sending.deadline.within(max_s)
        return sending.deadline

    def _begin(self, sending: Sending, queue: MessageQueue, mode: str) -> _Attempt:
        context = None
        if self.hooks:
            outgoing, number = sending.outgoing, sending.attempts.count + 1
            context = SendContext(
                self._settings.group, queue, outgoing.request, mode, number, outgoing.message, outgoing.msg_ids
            )
            self.hooks.before(context)
        return _Attempt(queue, self.timer.now_ms(), context)

    def _report(self, attempt: _Attempt, outcome: Outcome) -> None:
        """Tell the fault table and the hooks the outcome of an attempt."""
        now_ms = self.timer.now_ms()
        latency_ms = now_ms - attempt.start_ms
        report = report_of(outcome)
        if report is not None:
            self.faults.report(attempt.queue.broker_name, latency_ms, now_ms, report.isolated, report.reachable)
        if attempt.context is not None:
            self.hooks.after(attempt.context, outcome, latency_ms)

    def _judge(self, sending: Sending, queue: MessageQueue | None, outcome: Outcome) -> Outcome | RetryAttempt:
        """Every attempt ends here: the final outcome, or another attempt."""
        if sending.confirmed and isinstance(outcome, SendResult):  # of a part of it: where the other is, is not known
            outcome = outcome._replace(queue_offset=None, offset_msg_id=None)
        brokers: Collection[str] = ()
        outgoing = sending.outgoing
        if outgoing.once and end_of(outcome, queue is not None) is not EndKind.REFUSED:  # stored badly is stored, too
            sending.attempts.judge(queue, outcome, brokers, 0.0)
            return outcome
        anywhere = outgoing.queue is None and outgoing.candidates is None
        if anywhere and queue is not None and isinstance(outcome, RocketMQError):
            brokers = self.topics.brokers_of(outgoing.topic)
        verdict = sending.attempts.judge(queue, outcome, brokers, sending.deadline.remaining())
        if sending.confirmed and isinstance(verdict, RocketMQError):  # who sends all of it again stores that part twice
            return unproved(verdict, SendFailed(f"{sending.confirmed} of its messages are stored"))
        return verdict


def _spool_of(spooling: Spooling | None, sending: Sending) -> Spooling | None:
    """What keeps it if it fails."""
    return spooling if sending.outgoing.spoolable else None


def _sent(
    sender: Sender, confirming: Confirming | None, sending: Sending, queue: MessageQueue, deadline: Deadline
) -> Outcome:
    """One attempt on the calling thread."""
    try:
        if confirming is not None:
            confirming.begin(sending, queue)
        return sender.send(queue, sending.request, deadline)
    except RocketMQError as e:
        return e


def _behind(outgoing: Outgoing, cause: RocketMQError) -> SendFailed:
    error = SendFailed(
        f"not sent, because an earlier batch of its queue was given up: {cause.message}",
        cause.addr,
        cause.broker_code,
        outgoing.topic,
        str(outgoing.queue),
        cause.remark,
        cause.remedy,
    )
    error.__cause__ = cause
    return error


def _interrupted(outgoing: Outgoing) -> SendFailed:
    return SendFailed("the send was interrupted; the message may have been stored", topic=outgoing.topic)


def _unexpected(error: Exception, outgoing: Outgoing) -> SendFailed:
    failed = SendFailed(
        f"sending failed in an unexpected way: {type(error).__name__}: {error}",
        topic=outgoing.topic,
        remedy="This is a bug of rocketmq-spark unless the error is of a selector; please report it with the log",
    )
    failed.__cause__ = error
    return failed
