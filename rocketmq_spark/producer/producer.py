"""The producer: what its user calls. Mirrors ``DefaultMQProducer`` over the port ``Sender``.

It may be used from several threads. A process that was forked must make its own. A driver: it owns the threads of its
clockworks, and everything that decides is in the modules before it.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import itertools
import logging
import os
import platform
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Unpack

from rocketmq_spark import codes
from rocketmq_spark.clock import Deadline
from rocketmq_spark.errors import CallTimeout, ClosedError, MessageRefused, RocketMQError, RouteNotFound
from rocketmq_spark.model import Message, MessageQueue, SendResult
from rocketmq_spark.ports import Sender
from rocketmq_spark.producer import batching, encoding
from rocketmq_spark.producer.accumulator import Batch, Entry, Key
from rocketmq_spark.producer.clockwork import Clockwork
from rocketmq_spark.producer.encoding import How, Prepared
from rocketmq_spark.producer.engine import Engine, Unsent
from rocketmq_spark.producer.faults import FaultTable
from rocketmq_spark.producer.hooks import Hook
from rocketmq_spark.producer.outgoing import Ended, Outcome, Outgoing, nobody
from rocketmq_spark.producer.pending import Callback, Pending
from rocketmq_spark.producer.results import with_ids
from rocketmq_spark.producer.settings import ProducerSettings
from rocketmq_spark.producer.upkeep import Upkeep
from rocketmq_spark.queues.selection import Select, select
from rocketmq_spark.wire.identifiers import RecallHandle, UniqKeys

logger = logging.getLogger(__name__)

_ids = UniqKeys()
_numbers = itertools.count()
# A synchronous sender of a batch waits this much longer than the batch may take: its error says more than ours.
_BATCH_SLACK_S = 1.0


class Producer:
    """Sends messages of one group. Open when made; ``close`` it, or use it as a context manager."""

    def __init__(
        self,
        sender: Sender,
        settings: ProducerSettings,
        client_id: str | None = None,
        make_clockwork: Callable[[str], Clockwork] = Clockwork,
    ) -> None:
        name = f"rocketmq-{settings.group}-{next(_numbers)}"
        self.settings = settings
        self.client_id = client_id or f"{platform.node()}@{os.getpid()}#{time.monotonic_ns()}"
        self._sender = sender
        self._pid = os.getpid()
        self._engine = Engine(sender, settings, make_clockwork(f"{name}-send"))
        self._pending = Pending(make_clockwork(f"{name}-callback"))
        self._chores = make_clockwork(f"{name}-upkeep")
        self._closing = threading.Lock()
        self._batcher: batching.Batcher | None = None
        if settings.auto_batch:
            self._batcher = batching.share(self.client_id, settings, lambda: make_clockwork(f"{name}-batch"))
        _open.add(self)
        Upkeep(sender, self._engine, settings).start(self._chores, self.client_id)

    def __enter__(self) -> Producer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def faults(self) -> FaultTable:
        """The latency fault table; ``enabled``, ``detecting`` and ``tables`` may be changed while sending."""
        return self._engine.faults

    def add_hook(self, before: Hook | None = None, after: Hook | None = None) -> None:
        """Call ``before`` and ``after`` round every attempt."""
        self._engine.hooks.add(before, after)

    def queues(self, topic: str) -> list[MessageQueue]:
        """The queues that messages of ``topic`` can go to."""
        self._check_open()
        encoding.check_topic(topic)
        return list(self._queues(topic, self._deadline(None)))

    def send(self, message: Message, **how: Unpack[How]) -> SendResult:
        """Send and wait for the broker's answer; retried on other brokers within the timeout."""
        prepared, pinned, deadline = self._admitted(message, how)
        if self._batches(prepared, how):
            result, batch = self._accumulate(prepared, pinned, waits=True)
            if batch is not None:
                return self._batch_result(batch, result)
        return with_ids(self._engine.send(self._outgoing(prepared, pinned, deadline)), (prepared.msg_id,))

    def send_async(self, message: Message, callback: Callback | None = None, **how: Unpack[How]) -> Future[SendResult]:
        """Send without waiting. The outcome is in the future, and ``callback`` gets it on a thread of its own.

        What is wrong with the message, its topic's route or its selector is raised at once. Functions that are added to
        the future itself may run on the thread that reads answers: they must not block, ``callback`` may.
        """
        prepared, pinned, deadline = self._admitted(message, how)
        if self._batches(prepared, how):
            result, batch = self._accumulate(prepared, pinned, waits=False, callback=callback)
            if batch is not None:
                return result
        result, ticket = self._pending.expect(callback, prepared.msg_id)

        def done(ended: Ended) -> None:
            ticket(_identified(ended.outcome, (prepared.msg_id,)))

        try:
            self._engine.submit(self._outgoing(prepared, pinned, deadline, done))
        except RocketMQError:  # there was no room in time: nothing is promised
            self._pending.forget()
            raise
        return result

    def send_oneway(self, message: Message, **how: Unpack[How]) -> None:
        """Send and do not wait; whether it arrived is never known."""
        prepared, pinned, deadline = self._admitted(message, how)
        if pinned is None:
            self._queues(message.topic, deadline)
        self._engine.oneway(self._outgoing(prepared, pinned, deadline))

    def send_batch(
        self, messages: Collection[Message], queue: MessageQueue | None = None, timeout_s: float | None = None
    ) -> SendResult:
        """Send ``messages`` of one topic in one request; tags may differ. The result's ids are joined by commas."""
        self._check_open()
        deadline, now_ms = self._deadline(timeout_s), self._engine.clockwork.wall_ms()
        ids = _ids.take(len(messages) + 1, now_ms)
        prepared = [
            encoding.prepare(message, msg_id, self.settings) for message, msg_id in zip(messages, ids, strict=False)
        ]
        request = encoding.explicit_batch(prepared, ids[-1], self.settings, now_ms)
        topic = prepared[0].message.topic
        self._check_queue(topic, queue, deadline)
        outgoing = Outgoing(topic, request, deadline, queue, msg_ids=ids[:-1])
        return with_ids(self._engine.send(outgoing), ids[:-1], ids[-1])

    def flush(self, timeout_s: float | None = None) -> bool:
        """Send what waits for company, and say whether everything under way was answered in time."""
        deadline = self._deadline(timeout_s)
        if self._batcher is not None:
            self._batcher.send_all()
        return self._pending.none_left(deadline) and self._engine.idle(deadline)

    def recall(self, topic: str, recall_handle: str) -> str:
        """Take back a timer message that is not delivered yet, by the handle in its result; returns its id."""
        self._check_open()
        deadline = self._deadline(None)
        handle = RecallHandle.parse(recall_handle)
        if handle.topic != topic:
            raise MessageRefused(f"the recall handle belongs to topic {handle.topic!r}", topic=topic)
        self._queues(topic, deadline)  # the broker's address comes with the route
        return self._sender.recall(topic, handle.broker_name, recall_handle, self.settings.group, deadline)

    def close(self, timeout_s: float | None = None) -> list[Unsent]:
        """Take no more messages, wait for what is under way, and return what has no answer by then.

        Waits for the send timeout by default. A second call does nothing, nor does one in a forked process.
        """
        if os.getpid() != self._pid or not self._closing.acquire(blocking=False):
            return []
        deadline = self._deadline(timeout_s)
        if self._batcher is not None:
            batching.unshare(self.client_id, self._batcher)
        self._pending.none_left(deadline)
        unsent = self._engine.close(deadline)
        if unsent:
            group, count = self.settings.group, len(unsent)
            logger.warning("producer of %s closed: %d sends have no answer, among them %s", group, count, unsent[:10])
        self._chores.close()
        self._pending.close()
        self._sender.unregister(self.client_id, self.settings.group, Deadline.after(self.settings.send_timeout_s))
        return unsent

    def at_exit(self) -> dict[str, RocketMQError]:
        """The program ends without ``close``: send what waits for company. What fails from now on, by message id."""
        if os.getpid() != self._pid or self._closing.locked():
            return {}
        deadline, lost = self._deadline(None), self._pending.watch()
        if self._batcher is not None:
            self._batcher.send_all()
        self._pending.none_left(deadline)
        self._engine.close(deadline, wait_s=0.0)
        return lost

    def enqueue_batch(self, batch: Batch, done: Callable[[Outcome], None]) -> bool:
        """A batch of the accumulator leaves: it is this producer's to send (``batching.Owner``)."""
        now_ms = self._engine.clockwork.wall_ms()
        batch_id = _ids.next(now_ms)
        ids = [entry.msg_id for entry in batch.entries]
        outgoing = Outgoing(
            batch.key.topic,
            encoding.accumulated_batch(batch, batch_id, self.settings, now_ms),
            self._deadline(None),
            batch.key.queue,
            ordered=True,
            done=lambda ended: done(_identified(ended.outcome, ids, batch_id)),
            msg_ids=ids,
        )
        return self._engine.enqueue(outgoing)

    def pump(self) -> None:
        """Send what is enqueued (``batching.Owner``)."""
        self._engine.pump()

    def _check_open(self) -> None:
        if os.getpid() != self._pid:
            raise ClosedError(
                f"this producer belongs to process {self._pid}, from which this one was forked",
                remedy="Make a producer in this process",
            )
        if self._closing.locked():
            raise ClosedError("the producer is closed")

    def _deadline(self, timeout_s: float | None) -> Deadline:
        return Deadline.after(self.settings.send_timeout_s if timeout_s is None else timeout_s)

    def _admitted(self, message: Message, how: How) -> tuple[Prepared, MessageQueue | None, Deadline]:
        """The checks in Java's order: state, message, route; then the queue if one was chosen."""
        self._check_open()
        deadline = self._deadline(how.get("timeout_s"))
        msg_id = _ids.next(self._engine.clockwork.wall_ms())
        prepared = encoding.prepare(message, msg_id, self.settings, how)
        queue, selector = how.get("queue"), how.get("selector")
        if queue is not None and selector is not None:
            raise MessageRefused("a message goes to a queue or through a selector, not both", topic=message.topic)
        if selector is not None:
            return prepared, self._select(message, selector, how.get("arg"), deadline), deadline
        self._check_queue(message.topic, queue, deadline)
        return prepared, queue, deadline

    def _queues(self, topic: str, deadline: Deadline) -> Sequence[MessageQueue]:
        return self._engine.topics.awaited(topic, deadline, self._engine.clockwork.pause)

    def _select(self, message: Message, selector: str | Select, arg: object, deadline: Deadline) -> MessageQueue | None:
        queues = self._queues(message.topic, deadline)
        name = selector.lower() if isinstance(selector, str) else ""
        if name == "roundrobin" or (name == "environment" and self.settings.environment is not None and arg is None):
            return None  # the default: avoids bad brokers, may be retried elsewhere, stays in the environment
        queue = select(selector, queues, copy.copy(message), arg)
        if deadline.expired:
            raise CallTimeout("sendSelectImpl call timeout: selecting a queue took too long", topic=message.topic)
        return queue

    def _check_queue(self, topic: str, queue: MessageQueue | None, deadline: Deadline) -> None:
        if queue is None:
            return
        encoding.check_queue(topic, queue)
        if self._engine.topics.any_topic() is None:  # nobody asked for an address so far, perhaps
            with contextlib.suppress(RouteNotFound):
                self._queues(topic, deadline)
        environment = self.settings.environment
        if environment is not None and queue not in self._queues(topic, deadline):
            raise MessageRefused(f"{queue} does not belong to environment {environment.name!r}", topic=topic)

    def _outgoing(
        self, prepared: Prepared, queue: MessageQueue | None, deadline: Deadline, done: Callable[[Ended], None] = nobody
    ) -> Outgoing:
        request, message = (
            encoding.single_request(prepared, self.settings, self._engine.clockwork.wall_ms()),
            prepared.message,
        )
        return Outgoing(message.topic, request, deadline, queue, done=done, message=message, msg_ids=(prepared.msg_id,))

    def _batches(self, prepared: Prepared, how: How) -> bool:
        """Whether the message may wait for company (the gate of ``DefaultMQProducer.canBatch``)."""
        return (
            self._batcher is not None
            and how.get("timeout_s") is None
            and not prepared.delayed
            and not prepared.message.topic.startswith(codes.RETRY_PREFIX)
        )

    def _accumulate(
        self,
        prepared: Prepared,
        queue: MessageQueue | None,
        waits: bool,
        callback: Callback | None = None,
    ) -> tuple[Future[SendResult], Batch | None]:
        """The future result and the batch that took the message; no batch when it must be sent directly."""
        assert self._batcher is not None
        message = prepared.message
        key = Key(message.topic, queue, message.wait_store_ok, message.tags or None, waits)
        item = encoding.batch_item(prepared)
        result, ticket = self._pending.expect(callback, prepared.msg_id)
        batch = None
        try:
            batch = self._batcher.add(key, Entry(item, len(message.body), prepared.msg_id, message.keys, ticket), self)
        finally:
            if batch is None:  # refused, or not taken: nothing is promised
                self._pending.forget()
        return result, batch

    def _batch_result(self, batch: Batch, result: Future[SendResult]) -> SendResult:
        assert self._batcher is not None
        self._batcher.wait(batch, result)
        if not self._engine.clockwork.wait(result, self.settings.send_timeout_s + _BATCH_SLACK_S):
            raise CallTimeout("the batch has no answer in time; it may have been stored", topic=batch.key.topic)
        return result.result()


# Those that nobody closed so far. What they hold keeps them alive.
_open: weakref.WeakSet[Producer] = weakref.WeakSet()


@atexit.register
def _leave() -> None:
    for producer in list(_open):
        lost = producer.at_exit()
        if lost:
            shown, cause = ", ".join(list(lost)[:10]), next(iter(lost.values()))
            sys.stderr.write(
                f"rocketmq-spark: the producer of group {producer.settings.group!r} was not closed, and {len(lost)} "
                f"messages are not acknowledged: {shown}{', …' if len(lost) > 10 else ''}. {cause}\n"
            )


def _identified(outcome: Outcome, ids: Sequence[str], batch_id: str | None = None) -> Outcome:
    return with_ids(outcome, ids, batch_id) if isinstance(outcome, SendResult) else outcome
