"""The producer without transactions and requests. Mirrors ``DefaultMQProducer`` over the port ``Sender``.

Several threads may share a producer. A forked process must create a new producer. The producer owns its timers. The modules
before this module in ``ORDER`` (tests/test_house.py) make the decisions.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future
from datetime import datetime, timedelta

from rocketmq_spark.base.arguments import (
    argument_error,
    check_function,
    check_instance,
    check_seconds,
    check_synchronous,
    check_text,
)
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.dropped import ClosedWhenDropped
from rocketmq_spark.base.process import OwnerProcess
from rocketmq_spark.base.threads import Timer
from rocketmq_spark.errors import MessageRefused, RocketMQError
from rocketmq_spark.model import Message, MessageQueue, SendResult, SpoolMetrics
from rocketmq_spark.ports import Sender, Spool
from rocketmq_spark.producer import batching, encoding
from rocketmq_spark.producer.accumulator import MessageBatch
from rocketmq_spark.producer.ambiguity import AmbiguousSendResolver, StoredIds
from rocketmq_spark.producer.at_exit import register_at_exit
from rocketmq_spark.producer.batching import BatchingClient, encode_batch_messages
from rocketmq_spark.producer.delays import BrokerTimers, DelayRouter, caller_result, cancel_request, send_to_all
from rocketmq_spark.producer.encoding import How, PreparedMessage
from rocketmq_spark.producer.engine import Engine, Unsent
from rocketmq_spark.producer.fault_tolerance import FaultTable
from rocketmq_spark.producer.futures import FutureRegistry
from rocketmq_spark.producer.housekeeping import Housekeeping
from rocketmq_spark.producer.outgoing import (
    Callback,
    NonblockingCallback,
    Outcome,
    OutgoingSend,
    SendCompletion,
    ignore_completion,
    outcome_with_ids,
    with_group_order,
    with_message_ids,
)
from rocketmq_spark.producer.routing import Destinations, SpoolFallback
from rocketmq_spark.producer.settings import Hook, ProducerSettings
from rocketmq_spark.producer.spool_bridge import selector_function
from rocketmq_spark.queues.selection import Selector
from rocketmq_spark.wire.envelope import INNER_TOPIC, DelayHandle
from rocketmq_spark.wire.identifiers import RecallHandle, UniqKeys

logger = logging.getLogger(__name__)

_id_source = UniqKeys()
_producer_numbers = itertools.count()


class BaseProducer(ClosedWhenDropped):
    """Sends messages of one producer group. A producer is open after its creation: call ``close``, or use the producer as a
    context manager.

    Producers with the same ``sharing_key`` share an accumulator. The producer closes its ``spool``. With ``stored_ids``, a
    send that may be stored is looked up before it is sent again.
    """

    def __init__(
        self,
        sender: Sender,
        settings: ProducerSettings,
        sharing_key: str | None = None,
        make_timer: Callable[[str], Timer] = Timer,
        spool: Spool | None = None,
        stored_ids: StoredIds | None = None,
    ) -> None:
        name = f"rocketmq-{settings.group}-{next(_producer_numbers)}"
        self.settings, self._sender, self._spool = settings, sender, spool
        self.client_id = sender.client_id
        self._owner = OwnerProcess("producer")  # rejects calls in a forked process
        self._close_lock = threading.Lock()  # locked from the first close on
        self._engine = Engine(sender, settings, make_timer(f"{name}-send"), spool=spool)
        if stored_ids is not None:
            self._engine.ambiguity_resolver = AmbiguousSendResolver(stored_ids, self._engine.timer)
        self._futures = FutureRegistry(make_timer(f"{name}-callback"))
        self._housekeeping_timer = make_timer(f"{name}-housekeeping")
        fallback = None if spool is None else SpoolFallback(spool, sender)
        self._destinations = Destinations(self._engine.routes, self._engine.timer, settings.environment, fallback)
        is_transient = None if fallback is None else fallback.is_transient
        self._long_delays = DelayRouter(
            sender, BrokerTimers(sender, {}), settings, self._engine.timer.wall_ms, is_transient
        )
        self._batching: BatchingClient | None = None
        if settings.auto_batch:
            self._engine.timer.start()  # start the thread now, because sending a batch must not wait
            self._accumulator_name = sharing_key or name
            batcher = batching.join_accumulator(self._accumulator_name, settings, lambda: make_timer(f"{name}-batch"))
            self._batching = BatchingClient(batcher, self, self._futures, self._engine.routes, settings, sender.encoder)
        register_at_exit(self)
        Housekeeping(sender, self._engine.routes, self._engine.faults, settings).start(self._housekeeping_timer)
        self._unregister = sender.join(settings.group, settings.heartbeat_s, settings.transaction_check)

    @property
    def _is_open(self) -> bool:
        return not self._close_lock.locked()

    @property
    def faults(self) -> FaultTable:
        """The table of avoided brokers (``sendLatencyFault``). ``help(producer.faults)`` describes what you may set."""
        return self._engine.faults

    def spool_metrics(self) -> SpoolMetrics | None:
        """Return the figures of the spool; None without a spool."""
        return None if self._spool is None else self._spool.metrics()

    def add_hook(self, before: Hook | None = None, after: Hook | None = None) -> None:
        """Call functions around every attempt of a send, on the attempt's thread. They must not block; their errors are logged.

        Args:
            before: A function that is called with a ``SendContext`` before each attempt. The context has ``group``, ``queue``,
                ``mode``, ``attempt``, ``message`` and ``msg_ids``.
            after: A function that is called with the same ``SendContext`` after the attempt. The context then also has ``result``
                or ``error``, and ``latency_ms``.
        """
        for name, hook in (("before", before), ("after", after)):
            if hook is not None:
                check_function(name, hook, "context")
        self._engine.hooks.add(before, after)

    def queues(self, topic: str) -> list[MessageQueue]:
        """Return the queues that accept messages of ``topic``. Raises ``RouteNotFound`` as ``send`` does."""
        self._owner.check(self._close_lock.locked())
        encoding.check_topic(topic, self.settings.scope)
        return list(self._destinations.queues(topic, self._deadline(None)))

    def send(
        self,
        message: Message,
        *,
        queue: MessageQueue | None = None,
        selector: str | Selector | None = None,
        arg: object = None,
        delay_level: int | None = None,
        delay: float | timedelta | None = None,
        deliver_at: int | datetime | None = None,
        timeout_s: float | None = None,
    ) -> SendResult:
        """Send a message and wait for the answer. Retries twice at most within the timeout, if possible on other brokers.

        Without ``queue`` and ``selector``, messages go to the topic's queues in turn; option ``sendLatencyFault`` avoids slow
        brokers. With ``queue`` or ``selector``, the message goes to the chosen queue, or the send fails, as in Java.

        Args:
            message: The message to send. A body has at most ``max_message_size`` bytes.
            queue: The queue to send to, one of ``queues(message.topic)``.
            selector: ``"hash"``, ``"random"``, ``"roundRobin"``, ``"machineRoom"``, ``"environment"``, ``"column"`` or
                ``"module:function"``; or a function of the topic's queues, the message and ``arg`` that returns a queue.
            arg: For the selector: key to hash, rooms, environment number, ``(broker name, queue id)``; for a function, anything.
            delay_level: Deliver after the delay of this level in the broker's delay table; the first level is 1, 0 is at once.
                Give at most one of ``delay_level``, ``delay`` and ``deliver_at``.
            delay: Deliver after this time: seconds, or a timedelta.
            deliver_at: Deliver at this time: a datetime, or milliseconds since 1970.
            timeout_s: Seconds for all attempts together (default: option ``sendTimeout``, 3 s). A message with a timeout of
                its own is never batched automatically, as in Java.

        Returns:
            Where the message is, and how safely it is stored. With option ``onSendFailure=spool`` the status is ``SPOOLED``
            if the send failed for a temporary reason: the message is in the spool and is sent later.

        Raises:
            MessageRefused, SelectorError: No broker would take this message, or the selector fails or chooses no queue.
            RouteNotFound: None of the topic's brokers is up, or there is no such topic. Over remoting, the default
                ``transport``, brokers with ``autoCreateTopicEnable`` (RocketMQ's default) create a missing topic instead.
            SendFailed: All attempts failed. If there was only one attempt, its own error is raised, such as ``CallTimeout``.
                Without ``confirm_ambiguous`` the message may nevertheless be stored.
            UnprovedError: With ``confirm_ambiguous``: the message may be stored, and its broker could not confirm it.
            ClosedError: The producer was closed.
        """
        how = How(queue, selector, arg, delay_level, delay, deliver_at, timeout_s)
        prepared, destination, deadline = self._check_and_resolve(message, how)
        if self._batching is not None and destination.selector is None and self._batching.is_batchable(prepared, how):
            promise, batch = self._batching.add(prepared, destination.queue, sender_waits=True)
            if batch is not None:
                return self._batching.result(batch, promise)
        return caller_result(self._engine.send(self._outgoing(prepared, destination, deadline)), prepared)

    def send_async(
        self,
        message: Message,
        callback: Callback | None = None,
        *,
        queue: MessageQueue | None = None,
        selector: str | Selector | None = None,
        arg: object = None,
        delay_level: int | None = None,
        delay: float | timedelta | None = None,
        deliver_at: int | datetime | None = None,
        timeout_s: float | None = None,
    ) -> Future[SendResult]:
        """Send without waiting. The outcome, a ``SendResult`` or an error, is in the returned future and passed to ``callback``.

        All callbacks run on one thread of the producer, so a callback that blocks delays the others. Functions of
        ``Future.add_done_callback`` may run on the thread that reads answers, and must not block. All other arguments are those
        of ``send``.

        Raises:
            MessageRefused, SelectorError, ClosedError: These errors are raised at once. Other errors are in the future, except
                ``RocketMQError`` and ``SendFailed`` in the cases below.
            RocketMQError: The route is unavailable, and ``queue``, ``selector``, ``delay`` or ``deliver_at`` needs the route.
            SendFailed: Too many messages were unacknowledged during the whole timeout.
        """
        # Only this package creates a ``NonblockingCallback``, so its type is not checked.
        if callback is not None and not isinstance(callback, NonblockingCallback):
            _check_callback(callback)
        is_plain = queue is None and selector is None and delay_level is None and delay is None and deliver_at is None
        if self._batching is not None and is_plain and timeout_s is None:
            self._owner.check(self._close_lock.locked())
            if (promise := self._batching.try_add_plain_message(message, callback)) is not None:
                return promise
        how = How(queue, selector, arg, delay_level, delay, deliver_at, timeout_s)
        prepared, destination, deadline = self._check_and_resolve(message, how)
        if self._batching is not None and destination.selector is None and self._batching.is_batchable(prepared, how):
            promise, batch = self._batching.add(prepared, destination.queue, sender_waits=False, callback=callback)
            if batch is not None:
                return promise
        promise = self._futures.create(callback, prepared.msg_id)

        def done(completion: SendCompletion) -> None:
            outcome = completion.outcome
            self._futures.resolve(
                [promise], [caller_result(outcome, prepared) if isinstance(outcome, SendResult) else outcome]
            )

        try:
            outgoing = self._outgoing(prepared, destination, deadline, done)
            if self._batching is not None and outgoing.ordered:
                self._batching.batcher.send_all()  # earlier messages are sent first
            self._engine.submit(outgoing)
        except RocketMQError:  # no room below the limits before the deadline: withdraw the promise
            self._futures.discard()
            raise
        return promise

    def send_oneway(
        self,
        message: Message,
        *,
        queue: MessageQueue | None = None,
        selector: str | Selector | None = None,
        arg: object = None,
        delay_level: int | None = None,
        delay: float | timedelta | None = None,
        deliver_at: int | datetime | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Send without an answer, so it stays unknown whether the message was stored. The arguments are those of ``send``."""
        how = How(queue, selector, arg, delay_level, delay, deliver_at, timeout_s)
        prepared, destination, deadline = self._check_and_resolve(message, how)
        if destination.queue is None:
            self._destinations.queues(prepared.message.topic, deadline)
        self._engine.oneway(self._outgoing(prepared, destination, deadline))

    def send_batch(
        self, messages: Collection[Message], queue: MessageQueue | None = None, timeout_s: float | None = None
    ) -> SendResult:
        """Send ``messages`` of one topic in one request, to ``queue`` or any queue; tags may differ.

        ``timeout_s`` seconds replace the send timeout. ``msg_id`` of the result has all ids, separated by commas. Raises as
        ``send``, and ``MessageRefused`` if the batch is empty or too large, has a delayed message, or mixes topics or
        ``wait_store_ok``.
        """
        self._owner.check(self._close_lock.locked())
        check_instance("messages", messages, Collection, "a list of messages")
        deadline, now_ms = self._deadline(timeout_s), self._engine.timer.wall_ms()
        ids = _id_source.next_many(len(messages) + 1, now_ms)
        prepared_messages = [
            encoding.prepare(message, msg_id, self.settings, How(queue))
            for message, msg_id in zip(messages, ids, strict=False)
        ]
        request = encoding.explicit_batch(prepared_messages, None, self.settings, now_ms, self._sender.encoder)
        topic = prepared_messages[0].message.topic
        self._destinations.check_queue(topic, queue, deadline)
        if (storage := self._engine.routes.fetch_storage(topic, deadline)) is not None:
            request = encoding.with_storage_properties(request, prepared_messages, ids[-1], storage)
        outgoing = OutgoingSend(topic, request, deadline, queue, msg_ids=ids[:-1])
        return with_message_ids(self._engine.send(outgoing), ids[:-1], ids[-1])

    def flush(self, timeout_s: float | None = None) -> bool:
        """Send lingering batches, and wait until all sends are answered. Failures are in the futures and are not raised.

        Waits ``timeout_s`` seconds, by default the send timeout. Raises ``ClosedError`` in a forked process.

        Returns:
            Whether everything was answered.
        """
        self._owner.check(False)  # in a forked process, waiting messages belong to the parent
        deadline = self._deadline(timeout_s)
        if self._batching is not None:
            self._batching.batcher.send_all()
        return self._futures.wait_until_empty(deadline) and self._engine.wait_until_idle(deadline)

    def recall(self, topic: str, recall_handle: str) -> str:
        """Cancel a delayed message of ``topic`` before it is delivered. ``recall_handle`` is in the result of its send.

        Returns the message id. With ``longDelay=dmq``, a message that is almost due may be delivered nevertheless.

        Raises:
            BrokerError: The message is due or delivered already.
            MessageRefused: The handle belongs to another topic, or, with ``longDelay=dmq``, the message is due already.
            LocalProtocolError: ``recall_handle`` is not a handle.
            RocketMQError: With ``longDelay=dmq``, a queue of the inner topic (docs/delay.md) cannot be written. The message may
                be delivered.
        """
        self._owner.check(self._close_lock.locked())
        check_text("recall_handle", recall_handle, "the recall_handle of a result")
        encoding.check_topic(topic, self.settings.scope)
        deadline = self._deadline(None)
        if (delay_handle := DelayHandle.parse(recall_handle)) is not None:
            return self._cancel_envelope(delay_handle, topic, deadline)
        handle = RecallHandle.parse(recall_handle)
        if handle.topic != (scope := self.settings.scope).name_on_wire(
            topic
        ):  # the handle has the name that brokers use
            raise MessageRefused(f"the recall handle belongs to topic {scope.user_name(handle.topic)!r}", topic=topic)
        self._destinations.queues(topic, deadline)  # the broker's address comes with the route
        return self._sender.recall(topic, handle.broker_name, recall_handle, self.settings.group, deadline)

    def _cancel_envelope(self, handle: DelayHandle, topic: str, deadline: Deadline) -> str:
        """Send a cancellation to the queue of the envelope, and then to all other queues. Copies of the envelope may be in the
        other queues, and each node of the delay service knows only its own queues.
        """
        now_ms = self._engine.timer.wall_ms()
        request = cancel_request(handle, topic, _id_source.next(now_ms), self.settings, now_ms)
        envelope_queue = MessageQueue(INNER_TOPIC, handle.broker_name, handle.queue_id)
        queues = dict.fromkeys((envelope_queue, *self._destinations.queues(INNER_TOPIC, deadline)))
        # The cancellation is not spooled, because a spool could send it too late, while the caller counts the message as
        # cancelled.
        send_to_all(
            queues,
            lambda queue: self._engine.send(OutgoingSend(INNER_TOPIC, request, deadline, queue, spoolable=False)),
        )
        return handle.msg_id

    def close(self, timeout_s: float | None = None) -> list[Unsent]:
        """Close the producer within ``timeout_s``; ``Producer.close``, which users call, has the details."""
        if not self._owner.is_current or not self._close_lock.acquire(blocking=False):
            return []
        deadline = self._deadline(timeout_s)
        with contextlib.ExitStack() as cleanup:  # all calls run, even if an earlier one is interrupted
            cleanup.callback(lambda: self._unregister(Deadline.after(self.settings.send_timeout_s)))
            cleanup.callback(self._futures.close)
            cleanup.callback(self._housekeeping_timer.close)
            if self._spool is not None:
                spool = self._spool
                cleanup.callback(lambda: spool.close(deadline))
            try:
                if self._batching is not None:
                    batching.leave_accumulator(self._accumulator_name, self._batching.batcher)
                self._futures.wait_until_empty(deadline)
                return self._close_engine(deadline)
            except BaseException:
                deadline = Deadline.after(0)
                self._close_engine(deadline)
                raise

    def _close_engine(self, deadline: Deadline) -> list[Unsent]:
        """Close the engine, and log the sends that have no answer at the deadline."""
        unsent = self._engine.close(deadline)
        if unsent:
            log_arguments = self.settings.group, len(unsent), ", ".join(map(str, unsent[:10]))
            logger.warning("producer of %s closed: %d sends have no answer, among them %s", *log_arguments)
        return unsent

    def at_exit(self, deadline: Deadline) -> dict[str, RocketMQError]:
        """Internal, called when the program ends without ``close``: send lingering batches until ``deadline``. Returns the errors
        by message id.
        """
        if not self._owner.is_current or self._close_lock.locked():
            return {}
        deadline, failures = deadline.within(self.settings.send_timeout_s), self._futures.collect_failures()
        if self._batching is not None:
            self._batching.batcher.send_all()
        self._futures.wait_until_empty(deadline)
        self._engine.close(deadline, wait_s=0.0)
        if self._spool is not None:
            self._spool.close(Deadline.after(0))
        return failures

    def enqueue_batch(self, batch: MessageBatch, done: Callable[[Outcome], None]) -> bool:
        """Internal: queue ``batch`` of the accumulator for sending; ``done`` receives its outcome (``BatchOwner``)."""
        batch_id = _id_source.next(now_ms := self._engine.timer.wall_ms())
        encode_batch_messages(batch, lambda count: _id_source.next_many(count, now_ms), self._sender.encoder, now_ms)
        ids, is_stored_whole = (
            [entry.msg_id for entry in batch.entries],
            self._engine.routes.is_stored_whole(batch.key.topic),
        )
        outgoing = OutgoingSend(
            batch.key.topic,
            encoding.accumulated_batch(
                batch, batch_id if is_stored_whole else None, self.settings, now_ms, self._sender.encoder
            ),
            self._deadline(None),
            batch.key.queue,
            ordered=True,
            done=lambda completion: done(outcome_with_ids(completion.outcome, ids, batch_id)),
            msg_ids=ids,
        )
        return self._engine.enqueue(outgoing)

    def dispatch_ready(self, on_other_thread: bool = False) -> None:
        """Internal: send the enqueued requests (``batching.BatchOwner``), on the timer thread if ``on_other_thread`` is set."""
        if on_other_thread:
            self._engine.timer.call_soon(self._engine.dispatch_ready)
        else:
            self._engine.dispatch_ready()

    def _deadline(self, timeout_s: float | None) -> Deadline:
        return Deadline.after(
            self.settings.send_timeout_s if timeout_s is None else check_seconds("timeout_s", timeout_s)
        )

    def _check_and_resolve(self, message: Message, how: How) -> tuple[PreparedMessage, How, Deadline]:
        """Check the producer's state, the message, and the route, in Java's order. Returns the prepared message, its destination,
        and the deadline.
        """
        self._owner.check(self._close_lock.locked())
        deadline = self._deadline(how.timeout_s)
        msg_id = _id_source.next(self._engine.timer.wall_ms())
        prepared = encoding.prepare(message, msg_id, self.settings, how)
        destination = self._destinations.resolve(message, how, deadline)
        if prepared.delayed and how.delay_level is None:
            queues = functools.partial(self._destinations.queues_or_empty, message.topic, deadline)
            prepared, destination = self._long_delays.route(prepared, destination, queues, deadline)
        return prepared, destination, deadline

    def _outgoing(
        self,
        prepared: PreparedMessage,
        destination: How,
        deadline: Deadline,
        done: Callable[[SendCompletion], None] = ignore_completion,
    ) -> OutgoingSend:
        message, selection = prepared.message, destination.selection
        request = encoding.single_request(prepared, self.settings, self._engine.timer.wall_ms())
        outgoing = OutgoingSend(
            message.topic,
            request,
            deadline,
            destination.queue,
            filter_queues=None if selection is None else selector_function(message.topic, *selection),
            done=done,
            message=message,
            msg_ids=(prepared.msg_id,),
            selection=selection,
        )
        return (
            with_group_order(outgoing, self._batching is not None)
            if self.settings.features.queue_choice_problem
            else outgoing
        )


def _check_callback(callback: object) -> None:
    """Check a callback, but not its parameters: each send may have another callback, and the check must be fast."""
    if not callable(callback):
        raise argument_error("callback", callback, "a function that takes (outcome)")
    check_synchronous("callback", callback)
