"""The one way to send: every request of a producer, of its batches and of a sink's task goes through an engine.

Mirrors ``DefaultMQProducerImpl.sendDefaultImpl`` and ``MQClientAPIImpl.sendMessageAsync``. The engine owns what sending
needs (topics, faults, hooks, the timer) and limits the requests in flight. A driver: decisions are in ``attempts``,
``destination`` and ``in_flight``, which has the lock; the engine sends and waits. Every request begins in ``_start``,
every attempt with an answer ends in ``_judge``, and every request that has an outcome ends in ``_end``, whatever the mode:
attach transactions or metrics there. A spool takes requests that ``_judge`` gave up, before ``_end``.
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
from rocketmq_spark.base.threads import Timer
from rocketmq_spark.errors import ClosedError, RocketMQError, SendFailed
from rocketmq_spark.model import MessageQueue, SendResult
from rocketmq_spark.ports import Sender, Spool
from rocketmq_spark.producer.attempts import FaultTable, RetryAttempt, report_of
from rocketmq_spark.producer.confirming import Confirming, EndKind, end_of, unproved
from rocketmq_spark.producer.destination import QueueChoice
from rocketmq_spark.producer.in_flight import UnderWay, closed
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

    def __str__(self) -> str:
        """For the log: a batch may have thousands of ids."""
        more = f" and {len(self.msg_ids) - 3} more" if len(self.msg_ids) > 3 else ""
        return f"{', '.join(self.msg_ids[:3])}{more} to {self.queue or self.topic}"


class Engine:
    """Sends requests, and tracks those without an outcome. ``close`` also ends its timer.

    Without ``faults`` it has its own fault table. ``in_flight`` counts submitted requests without an outcome;
    ``behind_others`` says whether some of them wait for requests of other callers.
    Requests that fail for temporary reasons, and those left at the close, go to the ``spool`` if there is one, and count as sent.
    Each ``pump`` sends inside the context ``together``. The owner of the engine may set ``confirming``: a submitted request that
    may be stored is then looked up before it is sent again.
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
        self.in_flight, self.behind_others = self._under_way.in_flight, self._under_way.behind_others

    def send(self, outgoing: Outgoing) -> SendResult:
        """All attempts on the calling thread; returns the result or raises the error."""
        self._start(outgoing)
        self._under_way.block(outgoing)
        try:
            outcome = self._attempt_all(outgoing)
        finally:
            self._under_way.unblock(outgoing)
        self._end(outgoing, outcome)
        if isinstance(outcome, RocketMQError):
            raise outcome
        return outcome

    def submit(self, outgoing: Outgoing) -> None:
        """Send without waiting for the answer, which ``done`` receives; a closed engine is an error.

        Waits while the limits are reached. Raises ``SendFailed`` if they still are at the deadline, or if the thread for
        retries cannot start. An interruption (Ctrl-C) is raised after ``done`` was called.
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
        """Whether ``submit`` of a request of ``size`` bytes would not wait; for callers with other work."""
        return self._under_way.has_room(size, ordered)

    def enqueue(self, outgoing: Outgoing) -> bool:
        """Fix the place of ``outgoing`` in the order of its queue, regardless of the limits; False when closed.

        ``pump`` then sends it.
        """
        self._start(outgoing)
        brokers = len(self.topics.brokers()) if self.in_flight.counts_brokers else 1
        try:
            cause = self._under_way.put(outgoing, brokers)
        except ClosedError:
            return False
        if cause is not None:
            self._end(outgoing, _behind(outgoing, cause))
        return True

    def pump(self) -> None:
        """Send the requests that may be sent now. Fetching the route of a new topic may block, and may be interrupted."""
        with self._together():
            taken = deque(self._under_way.take())
            try:
                while taken:
                    outgoing = taken.popleft()
                    if outgoing.refresh:  # on another thread, because a name server may hang
                        self._aside.soon(functools.partial(self._launch, outgoing))
                    else:
                        self._launch(outgoing)
            finally:
                for outgoing in taken:  # after an interruption, put the others back
                    self._over(outgoing, RetryAttempt(0.0, outgoing.refresh))

    def oneway(self, outgoing: Outgoing) -> None:
        """One attempt without an answer. Raises only errors that occur before the bytes reach the socket."""
        self._start(outgoing)
        queue = self._choose(outgoing)
        context = self._context(outgoing, queue, "oneway")
        self._sender.send_oneway(queue, outgoing.request, outgoing.until)
        if context is not None:
            self.hooks.after(context, None, 0)

    def idle(self, deadline: Deadline) -> bool:
        """Wait for all answers. Returns whether all are there at the deadline."""
        return self._under_way.idle(deadline)

    def close(self, deadline: Deadline, wait_s: float = 5.0, keep: bool = True) -> list[Unsent]:
        """Wait for all answers until the deadline. Requests without an answer then fail and are returned.

        With a spool and ``keep`` they go to the spool instead; without ``keep``, because the caller sends them again anyway,
        they fail. A running call of the timer is waited for up to ``wait_s`` seconds.
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
            kept = [i for i, outgoing in enumerate(left) if keep and outgoing.spoolable]
            found = self._spooling.keep([(left[i], None) for i in kept])
            for i, outcome in zip(kept, found, strict=True):
                outcomes[i] = outcome
            self._spooling.close()
        lost = list(blocking)
        for outgoing, outcome in zip(left, outcomes, strict=True):
            self._end(outgoing, outcome)
            if isinstance(outcome, RocketMQError):
                lost.append(outgoing)
        self.timer.close(wait_s)
        return [Unsent(each.topic, each.queue, each.msg_ids) for each in lost]

    def _start(self, outgoing: Outgoing) -> None:
        """Every request begins here."""
        outgoing.begin(self._policy, self._rng)

    def _end(self, outgoing: Outgoing, outcome: Outcome) -> None:
        """Every request ends here, once."""
        attempts = outgoing.attempts
        ended = Ended(outgoing, outcome, attempts.count, attempts.brokers, outgoing.confirmed)
        outgoing.done(ended)

    def _attempt_all(self, outgoing: Outgoing) -> Outcome:
        spooling = _spool_of(self._spooling, outgoing)
        # Requests that are sent ``once`` are not looked up either: a half message is not stored in its topic.
        confirming = None if outgoing.once else self.confirming
        if spooling is not None and spooling.overtakes(outgoing):
            return spooling.keep([(outgoing, None)])[0]
        while True:
            queue: MessageQueue | None = None
            try:
                queue = self._choose(outgoing)
                context, start_ms = self._context(outgoing, queue, "sync"), self.timer.now_ms()
                outcome = _sent(self._sender, confirming, outgoing, queue, self._share(outgoing))
                self._report(queue, context, outcome, start_ms)
            except RocketMQError as e:
                outcome = e
            if confirming is not None:
                outcome = confirming.known(outgoing, queue, outcome)
            verdict = self._judge(outgoing, queue, outcome)
            if not isinstance(verdict, RetryAttempt):
                return verdict if spooling is None else spooling.settled(outgoing, verdict)
            outgoing.refresh = verdict.refresh
            if verdict.pause_s:
                self.timer.pause(verdict.pause_s)

    def _launch(self, outgoing: Outgoing) -> None:
        """Start an attempt whose answer arrives later."""
        number = outgoing.attempts.count
        if not number:
            outgoing.until = outgoing.deadline
            spooling = _spool_of(self._spooling, outgoing)
            if spooling is not None and spooling.overtakes(outgoing):
                spooling.later(outgoing, None, functools.partial(self._over, outgoing))
                return
        queue: MessageQueue | None = None
        try:
            queue = chosen = self._choose(outgoing)
            if outgoing.finished:  # closed while the route was fetched
                return
            context, start_ms = self._context(outgoing, chosen, "async"), self.timer.now_ms()

            def done(outcome: Outcome) -> None:
                try:
                    self._report(chosen, context, outcome, start_ms)
                except Exception:  # a failing callback must not leave the request without an end
                    logger.exception("the outcome of an attempt could not be reported")
                self._landed(outgoing, number, chosen, outcome)

            try:
                if self.confirming is not None:
                    self.confirming.begin(outgoing, chosen)
            except RocketMQError as e:
                done(e)
                return
            self._sender.send_async(chosen, outgoing.remaining, self._share(outgoing), done)
        except RocketMQError as e:
            self._landed(outgoing, number, None, e)
        except Exception as e:  # whatever it is, it must become an outcome
            logger.exception("sending to %s failed", outgoing.topic)
            self._landed(outgoing, number, queue, _unexpected(e, outgoing))
        except BaseException:  # Ctrl-C is raised to the user, but the request still gets an outcome
            self._landed(outgoing, number, queue, _interrupted(outgoing))
            raise

    def _landed(self, outgoing: Outgoing, number: int, queue: MessageQueue | None, outcome: Outcome) -> None:
        if number != outgoing.attempts.count:  # a second outcome of one attempt
            return
        if self.confirming is not None:
            again = functools.partial(self._landed, outgoing, number)
            if not self.confirming.knows(outgoing, queue, outcome, again):
                return
        try:
            verdict = self._judge(outgoing, queue, outcome)
        except Exception as e:
            logger.exception("the outcome of an attempt could not be judged")
            verdict = _unexpected(e, outgoing)
        spooling = _spool_of(self._spooling, outgoing)
        if spooling is not None and isinstance(verdict, RocketMQError):
            spooling.later(outgoing, verdict, functools.partial(self._over, outgoing))
            return
        if self._spooling is not None and isinstance(verdict, SendResult):
            self._spooling.answered(verdict)
        self._over(outgoing, verdict)

    def _over(self, outgoing: Outgoing, verdict: Outcome | RetryAttempt) -> None:
        """An attempt has ended: end its request, or start the next attempt."""
        landing = self._under_way.landed(outgoing, verdict)
        if landing is None:
            return
        if landing.more:  # on another thread: this may be the one that reads answers
            self.timer.later(0, self.pump)
        if isinstance(verdict, RetryAttempt):
            self.timer.later(verdict.pause_s, self.pump)
            return
        self._end(outgoing, verdict)
        for each in landing.behind:
            assert isinstance(verdict, RocketMQError)
            self._end(each, _behind(each, verdict))

    def _choose(self, outgoing: Outgoing) -> MessageQueue:
        return self._choice.queue(outgoing, outgoing.attempts, outgoing.until, outgoing.refresh)

    def _share(self, outgoing: Outgoing) -> Deadline:
        """The deadline of one attempt. The last one may use all of the time, unless a look-up follows."""
        max_s = self._settings.attempt_timeout_s
        if max_s is not None and (outgoing.attempts.more_possible or self.confirming is not None):
            return outgoing.until.within(max_s)
        return outgoing.until

    def _context(self, outgoing: Outgoing, queue: MessageQueue, mode: str) -> SendContext | None:
        """Call the hooks before an attempt. Returns their context; None without hooks."""
        if not self.hooks:
            return None
        group, number = self._settings.group, outgoing.attempts.count + 1
        context = SendContext(group, queue, outgoing.request, mode, number, outgoing.message, outgoing.msg_ids)
        self.hooks.before(context)
        return context

    def _report(self, queue: MessageQueue, context: SendContext | None, outcome: Outcome, start_ms: int) -> None:
        """Report the outcome of an attempt to the fault table and the hooks."""
        now_ms = self.timer.now_ms()
        latency_ms = now_ms - start_ms
        report = report_of(outcome)
        if report is not None:
            self.faults.report(queue.broker_name, latency_ms, now_ms, report.isolated, report.reachable)
        if context is not None:
            self.hooks.after(context, outcome, latency_ms)

    def _judge(self, outgoing: Outgoing, queue: MessageQueue | None, outcome: Outcome) -> Outcome | RetryAttempt:
        """Every attempt ends here: the final outcome, or another attempt."""
        if outgoing.confirmed and isinstance(outcome, SendResult):  # it covers a part; where the rest is, is unknown
            anywhere = outgoing.queue is None and outgoing.attempts.count > 0
            outcome = outcome._replace(queue=None if anywhere else outcome.queue, queue_offset=None, offset_msg_id=None)
        brokers: Collection[str] = ()
        if outgoing.once and end_of(outcome, queue is not None) is not EndKind.REFUSED:  # stored, even if badly
            outgoing.attempts.judge(queue, outcome, brokers, 0.0)
            return outcome
        anywhere = outgoing.queue is None and outgoing.candidates is None
        if anywhere and queue is not None and isinstance(outcome, RocketMQError):
            brokers = self.topics.brokers_of(outgoing.topic)
        verdict = outgoing.attempts.judge(queue, outcome, brokers, outgoing.until.remaining())
        if outgoing.confirmed and isinstance(
            verdict, RocketMQError
        ):  # sending all of it again would store that part twice
            return unproved(verdict, SendFailed(f"{outgoing.confirmed} of its messages are stored"))
        return verdict


def _spool_of(spooling: Spooling | None, outgoing: Outgoing) -> Spooling | None:
    """The spool for a request that fails; None if it may not be spooled."""
    return spooling if outgoing.spoolable else None


def _sent(
    sender: Sender, confirming: Confirming | None, outgoing: Outgoing, queue: MessageQueue, deadline: Deadline
) -> Outcome:
    """One attempt on the calling thread."""
    try:
        if confirming is not None:
            confirming.begin(outgoing, queue)
        return sender.send(queue, outgoing.remaining, deadline)
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
