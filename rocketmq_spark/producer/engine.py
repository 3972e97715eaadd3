"""The engine of all sends. Each request of a producer, of its batches and of a sink's task goes through an ``Engine``.

Mirrors ``DefaultMQProducerImpl.sendDefaultImpl`` and ``MQClientAPIImpl.sendMessageAsync``. The engine owns the route cache, the
fault table, the hooks and the timer, and limits the requests in flight. The engine sends and waits. The modules ``retry``,
``routing`` and ``send_queue`` decide what is sent, where, and when. ``send_queue`` has the lock. In all modes a request begins
in ``_start``, an attempt with an answer ends in ``_judge``, and a request with an outcome ends in ``_complete``. If the engine
has a spool, the requests for which ``_judge`` returned an error go to the spool, before ``_complete``.
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
from rocketmq_spark.producer.ambiguity import AmbiguousSendResolver, SendOutcomeKind, classify, unproved_error
from rocketmq_spark.producer.fault_tolerance import FaultTable, broker_report
from rocketmq_spark.producer.outgoing import Outcome, OutgoingSend, SendCompletion
from rocketmq_spark.producer.retry import RetryAttempt
from rocketmq_spark.producer.routing import QueueChooser, RouteCache
from rocketmq_spark.producer.send_queue import SendQueue, closed_error
from rocketmq_spark.producer.settings import Hooks, ProducerSettings, SendContext
from rocketmq_spark.producer.spool_bridge import SpoolBridge

logger = logging.getLogger(__name__)

WriteBatching = Callable[[], contextlib.AbstractContextManager[None]]


class Unsent(NamedTuple):
    """A send that had no answer when the producer was closed. Its messages may be stored."""

    topic: str
    queue: MessageQueue | None
    msg_ids: Sequence[str]

    def __str__(self) -> str:
        """Return a text for the log, with at most three ids, because a batch may have thousands of ids."""
        omitted = f" and {len(self.msg_ids) - 3} more" if len(self.msg_ids) > 3 else ""
        return f"{', '.join(self.msg_ids[:3])}{omitted} to {self.queue or self.topic}"


class Engine:
    """Sends requests, and tracks the requests that have no outcome yet. ``close`` also ends its timer.

    Without ``faults``, the engine creates its own fault table. ``send_window`` counts submitted requests without an outcome;
    ``waits_for_others`` returns whether some of the given requests wait for requests of other callers.
    With a ``spool``, requests that fail for temporary reasons, and those without an outcome at the close, go to the spool and
    count as sent. ``dispatch_ready`` sends inside the context that ``batch_writes`` returns. The owner of the engine may set
    ``ambiguity_resolver``: then a request that may be stored is looked up before it is sent again.
    """

    def __init__(
        self,
        sender: Sender,
        settings: ProducerSettings,
        timer: Timer,
        faults: FaultTable | None = None,
        spool: Spool | None = None,
        batch_writes: WriteBatching = contextlib.nullcontext,
    ) -> None:
        self.routes = RouteCache(sender, settings)
        self.faults = faults or FaultTable(settings.fault_tables, settings.send_latency_fault, settings.detector)
        self.hooks = Hooks()
        self.timer = timer
        self._sender = sender
        self._settings = settings
        self._retry_policy = settings.retry_policy
        self._route_executor = timer.with_own_thread("route")  # starts attempts that first fetch a route
        self._queue_chooser = QueueChooser(self.routes, self.faults, timer)
        self._rng = random.Random()  # chooses the length of pauses before retries
        self._spool_bridge = None if spool is None else SpoolBridge(spool, sender, timer)
        self.ambiguity_resolver: AmbiguousSendResolver | None = None
        self._batch_writes = batch_writes
        self._send_queue = SendQueue(settings, timer)
        self.send_window, self.waits_for_others = self._send_queue.window, self._send_queue.waits_for_others

    def send(self, outgoing: OutgoingSend) -> SendResult:
        """Make all attempts on the calling thread. Returns the result or raises the error."""
        self._start(outgoing)
        self._send_queue.add_blocking_send(outgoing)
        try:
            outcome = self._attempt_all(outgoing)
        finally:
            self._send_queue.remove_blocking_send(outgoing)
        self._complete(outgoing, outcome)
        if isinstance(outcome, RocketMQError):
            raise outcome
        return outcome

    def submit(self, outgoing: OutgoingSend) -> None:
        """Send without waiting for the answer. ``done`` of the request receives the outcome, which is an error if the engine is
        closed.

        Waits while the limits are reached. Raises ``SendFailed`` if the limits are still reached at the deadline, or if the
        thread for retries cannot start. An interruption (Ctrl-C) is raised after ``done`` was called.
        """
        try:
            self._send_queue.wait_for_room(outgoing)
        except RocketMQError:
            raise
        except BaseException:
            outgoing.done(SendCompletion(outgoing, _interruption_error(outgoing)))
            raise
        if self.enqueue(outgoing):
            self.dispatch_ready()
        else:
            outgoing.done(SendCompletion(outgoing, closed_error()))

    def has_room(self, size: int, ordered: bool = False) -> bool:
        """Whether ``submit`` would accept a request of ``size`` bytes without waiting."""
        return self._send_queue.has_room(size, ordered)

    def enqueue(self, outgoing: OutgoingSend) -> bool:
        """Add ``outgoing`` at the end of its ordered queue, regardless of the limits. Returns False if the engine is closed.

        The caller then calls ``dispatch_ready``, which sends the request.
        """
        self._start(outgoing)
        broker_count = len(self.routes.brokers()) if self.send_window.has_limit_per_broker else 1
        try:
            queue_error = self._send_queue.put(outgoing, broker_count)
        except ClosedError:
            return False
        if queue_error is not None:
            self._complete(outgoing, _follower_error(outgoing, queue_error))
        return True

    def dispatch_ready(self) -> None:
        """Send the requests that may be sent now. May block to fetch the route of a new topic, and may be interrupted then."""
        with self._batch_writes():
            ready_sends = deque(self._send_queue.take_ready())
            try:
                while ready_sends:
                    outgoing = ready_sends.popleft()
                    if outgoing.refresh_route:  # on another thread, because a name server may hang
                        self._route_executor.call_soon(functools.partial(self._start_attempt, outgoing))
                    else:
                        self._start_attempt(outgoing)
            finally:
                for (
                    outgoing
                ) in ready_sends:  # after an interruption, the requests that were not started go back to the queue
                    self._apply_verdict(outgoing, RetryAttempt(0.0, outgoing.refresh_route))

    def oneway(self, outgoing: OutgoingSend) -> None:
        """Make one attempt, which gets no answer. Raises only errors that occur before the bytes reach the socket."""
        self._start(outgoing)
        queue = self._choose_queue(outgoing)
        context = self._call_before_hooks(outgoing, queue, "oneway")
        self._sender.send_oneway(queue, outgoing.request, outgoing.attempts_deadline)
        if context is not None:
            self.hooks.call_after(context, None, 0)

    def wait_until_idle(self, deadline: Deadline) -> bool:
        """Wait for all answers. Returns whether all answers have arrived before the deadline."""
        return self._send_queue.wait_until_idle(deadline)

    def close(self, deadline: Deadline, wait_s: float = 5.0, spools_unsent: bool = True) -> list[Unsent]:
        """Wait for all answers until the deadline. Requests that have no answer at the deadline fail and are returned.

        With a spool and ``spools_unsent``, requests without an answer go to the spool instead. Pass ``spools_unsent=False`` if
        the caller itself will send the requests again. Waits up to ``wait_s`` seconds for a running call of the timer.
        """
        self.wait_until_idle(deadline)
        if self._spool_bridge is not None:
            self._spool_bridge.drain()
        unfinished_sends, blocking_sends = self._send_queue.close()
        self._route_executor.close(wait_s=0)
        if self.ambiguity_resolver is not None:
            self.ambiguity_resolver.close()
        outcomes: list[Outcome] = [closed_error() for _ in unfinished_sends]
        if self._spool_bridge is not None:
            indexes = [i for i, outgoing in enumerate(unfinished_sends) if spools_unsent and outgoing.spoolable]
            spool_outcomes = self._spool_bridge.spool([(unfinished_sends[i], None) for i in indexes])
            for i, outcome in zip(indexes, spool_outcomes, strict=True):
                outcomes[i] = outcome
            self._spool_bridge.close()
        unsent_sends = list(blocking_sends)
        for outgoing, outcome in zip(unfinished_sends, outcomes, strict=True):
            self._complete(outgoing, outcome)
            if isinstance(outcome, RocketMQError):
                unsent_sends.append(outgoing)
        self.timer.close(wait_s)
        return [Unsent(send.topic, send.queue, send.msg_ids) for send in unsent_sends]

    def _start(self, outgoing: OutgoingSend) -> None:
        """Begin a request."""
        outgoing.reset_attempts(self._retry_policy, self._rng)

    def _complete(self, outgoing: OutgoingSend, outcome: Outcome) -> None:
        """End a request. This method is called once for each request."""
        retry_state = outgoing.retry_state
        completion = SendCompletion(
            outgoing, outcome, retry_state.attempt_count, retry_state.tried_brokers, outgoing.confirmed_count
        )
        outgoing.done(completion)

    def _attempt_all(self, outgoing: OutgoingSend) -> Outcome:
        spool_bridge = _spool_bridge_for(self._spool_bridge, outgoing)
        # Half messages (``at_most_once``) are not looked up, because they are not stored in their topic.
        resolver = None if outgoing.at_most_once else self.ambiguity_resolver
        if spool_bridge is not None and spool_bridge.must_follow_spool(outgoing):
            return spool_bridge.spool([(outgoing, None)])[0]
        while True:
            queue: MessageQueue | None = None
            try:
                queue = self._choose_queue(outgoing)
                context, start_ms = self._call_before_hooks(outgoing, queue, "sync"), self.timer.now_ms()
                outcome = _send_once(self._sender, resolver, outgoing, queue, self._attempt_deadline(outgoing))
                self._report_attempt(queue, context, outcome, start_ms)
            except RocketMQError as e:
                outcome = e
            if resolver is not None:
                outcome = resolver.resolve(outgoing, queue, outcome)
            verdict = self._judge(outgoing, queue, outcome)
            if not isinstance(verdict, RetryAttempt):
                return verdict if spool_bridge is None else spool_bridge.final_outcome(outgoing, verdict)
            outgoing.refresh_route = verdict.refresh
            if verdict.pause_s:
                self.timer.pause(verdict.pause_s)

    def _start_attempt(self, outgoing: OutgoingSend) -> None:
        """Start an attempt whose answer arrives later."""
        attempt_number = outgoing.retry_state.attempt_count
        if not attempt_number:
            outgoing.attempts_deadline = outgoing.deadline_from_now
            spool_bridge = _spool_bridge_for(self._spool_bridge, outgoing)
            if spool_bridge is not None and spool_bridge.must_follow_spool(outgoing):
                spool_bridge.spool_async(outgoing, None, functools.partial(self._apply_verdict, outgoing))
                return
        queue: MessageQueue | None = None
        try:
            queue = chosen_queue = self._choose_queue(outgoing)
            if outgoing.finished:  # closed while the route was fetched
                return
            context, start_ms = self._call_before_hooks(outgoing, chosen_queue, "async"), self.timer.now_ms()

            def done(outcome: Outcome) -> None:
                try:
                    self._report_attempt(chosen_queue, context, outcome, start_ms)
                except Exception:  # a failing hook must not leave the request without an outcome
                    logger.exception("the outcome of an attempt could not be reported")
                self._on_attempt_done(outgoing, attempt_number, chosen_queue, outcome)

            try:
                if self.ambiguity_resolver is not None:
                    self.ambiguity_resolver.record_lookup_start(outgoing, chosen_queue)
            except RocketMQError as e:
                done(e)
                return
            self._sender.send_async(chosen_queue, outgoing.next_request, self._attempt_deadline(outgoing), done)
        except RocketMQError as e:
            self._on_attempt_done(outgoing, attempt_number, None, e)
        except Exception as e:  # the request must get an outcome
            logger.exception("sending to %s failed", outgoing.topic)
            self._on_attempt_done(outgoing, attempt_number, queue, _unexpected_error(e, outgoing))
        except BaseException:  # Ctrl-C is raised to the user, but the request still gets an outcome
            self._on_attempt_done(outgoing, attempt_number, queue, _interruption_error(outgoing))
            raise

    def _on_attempt_done(
        self, outgoing: OutgoingSend, attempt_number: int, queue: MessageQueue | None, outcome: Outcome
    ) -> None:
        if attempt_number != outgoing.retry_state.attempt_count:  # the attempt already has an outcome
            return
        if self.ambiguity_resolver is not None:
            resume = functools.partial(self._on_attempt_done, outgoing, attempt_number)
            if not self.ambiguity_resolver.resolve_async(outgoing, queue, outcome, resume):
                return
        try:
            verdict = self._judge(outgoing, queue, outcome)
        except Exception as e:
            logger.exception("the outcome of an attempt could not be judged")
            verdict = _unexpected_error(e, outgoing)
        spool_bridge = _spool_bridge_for(self._spool_bridge, outgoing)
        if spool_bridge is not None and isinstance(verdict, RocketMQError):
            spool_bridge.spool_async(outgoing, verdict, functools.partial(self._apply_verdict, outgoing))
            return
        if self._spool_bridge is not None and isinstance(verdict, SendResult):
            self._spool_bridge.report_success(verdict)
        self._apply_verdict(outgoing, verdict)

    def _apply_verdict(self, outgoing: OutgoingSend, verdict: Outcome | RetryAttempt) -> None:
        """Apply the verdict on an attempt: complete its request, or schedule the next attempt."""
        effects = self._send_queue.record_verdict(outgoing, verdict)
        if effects is None:
            return
        if effects.can_send_more:  # on another thread, because this may be the thread that reads answers
            self.timer.call_later(0, self.dispatch_ready)
        if isinstance(verdict, RetryAttempt):
            self.timer.call_later(verdict.pause_s, self.dispatch_ready)
            return
        self._complete(outgoing, verdict)
        for follower in effects.followers:
            assert isinstance(verdict, RocketMQError)
            self._complete(follower, _follower_error(follower, verdict))

    def _choose_queue(self, outgoing: OutgoingSend) -> MessageQueue:
        return self._queue_chooser.choose(
            outgoing, outgoing.retry_state, outgoing.attempts_deadline, outgoing.refresh_route
        )

    def _attempt_deadline(self, outgoing: OutgoingSend) -> Deadline:
        """The deadline of the next attempt. The last attempt may use all of the remaining time, unless a look-up may follow."""
        max_s = self._settings.attempt_timeout_s
        if max_s is not None and (outgoing.retry_state.may_retry or self.ambiguity_resolver is not None):
            return outgoing.attempts_deadline.within(max_s)
        return outgoing.attempts_deadline

    def _call_before_hooks(self, outgoing: OutgoingSend, queue: MessageQueue, mode: str) -> SendContext | None:
        """Call the hooks before an attempt. Returns the context that was passed to the hooks; None without hooks."""
        if not self.hooks:
            return None
        group, attempt_number = self._settings.group, outgoing.retry_state.attempt_count + 1
        context = SendContext(group, queue, outgoing.request, mode, attempt_number, outgoing.message, outgoing.msg_ids)
        self.hooks.call_before(context)
        return context

    def _report_attempt(
        self, queue: MessageQueue, context: SendContext | None, outcome: Outcome, start_ms: int
    ) -> None:
        """Report the outcome of an attempt to the fault table and the hooks."""
        now_ms = self.timer.now_ms()
        latency_ms = now_ms - start_ms
        report = broker_report(outcome)
        if report is not None:
            self.faults.report(queue.broker_name, latency_ms, now_ms, report.isolated, report.reachable)
        if context is not None:
            self.hooks.call_after(context, outcome, latency_ms)

    def _judge(self, outgoing: OutgoingSend, queue: MessageQueue | None, outcome: Outcome) -> Outcome | RetryAttempt:
        """Return the final outcome of a request after an attempt, or a ``RetryAttempt`` if another attempt follows."""
        # Earlier attempts stored some of the messages, so the queue and offset in the result do not apply to all messages.
        if outgoing.confirmed_count and isinstance(outcome, SendResult):
            may_choose_queue = outgoing.queue is None and outgoing.retry_state.attempt_count > 0
            outcome = outcome._replace(
                queue=None if may_choose_queue else outcome.queue, queue_offset=None, offset_msg_id=None
            )
        route_brokers: Collection[str] = ()
        # If the message is or may be stored, it is not sent again, even if it is stored less safely than required.
        if outgoing.at_most_once and classify(outcome, queue is not None) is not SendOutcomeKind.REJECTED:
            outgoing.retry_state.next_action(queue, outcome, route_brokers, 0.0)
            return outcome
        may_choose_queue = outgoing.queue is None and outgoing.filter_queues is None
        if may_choose_queue and queue is not None and isinstance(outcome, RocketMQError):
            route_brokers = self.routes.brokers_of(outgoing.topic)
        verdict = outgoing.retry_state.next_action(
            queue, outcome, route_brokers, outgoing.attempts_deadline.remaining()
        )
        # Sending the whole request again would store the confirmed messages twice.
        if outgoing.confirmed_count and isinstance(verdict, RocketMQError):
            return unproved_error(verdict, SendFailed(f"{outgoing.confirmed_count} of its messages are stored"))
        return verdict


def _spool_bridge_for(spool_bridge: SpoolBridge | None, outgoing: OutgoingSend) -> SpoolBridge | None:
    """Return ``spool_bridge``; None if the request must not be spooled."""
    return spool_bridge if outgoing.spoolable else None


def _send_once(
    sender: Sender,
    resolver: AmbiguousSendResolver | None,
    outgoing: OutgoingSend,
    queue: MessageQueue,
    deadline: Deadline,
) -> Outcome:
    """Make one attempt on the calling thread."""
    try:
        if resolver is not None:
            resolver.record_lookup_start(outgoing, queue)
        return sender.send(queue, outgoing.next_request, deadline)
    except RocketMQError as e:
        return e


def _follower_error(outgoing: OutgoingSend, cause: RocketMQError) -> SendFailed:
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


def _interruption_error(outgoing: OutgoingSend) -> SendFailed:
    return SendFailed("the send was interrupted; the message may have been stored", topic=outgoing.topic)


def _unexpected_error(error: Exception, outgoing: OutgoingSend) -> SendFailed:
    send_error = SendFailed(
        f"sending failed in an unexpected way: {type(error).__name__}: {error}",
        topic=outgoing.topic,
        remedy="This is a bug of rocketmq-spark unless the error comes from a selector; please report it with the log",
    )
    send_error.__cause__ = error
    return send_error
