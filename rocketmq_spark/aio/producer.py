"""A producer for coroutines. It wraps ``session/producers.Producer``.

Sends of one iteration of the event loop begin together, so that they need few writes. A send begins in the event loop if it does
not block: its route is cached, and there is room for unacknowledged messages. All other sends begin on threads. A send to a topic
whose route is not cached requests the route first. Sends that wait for room begin in the order in which they were called.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping
from contextvars import Context, copy_context
from datetime import datetime, timedelta
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

from rocketmq_spark.aio.loop import YIELD_AFTER_S, AsyncClient, EventLoop
from rocketmq_spark.base.arguments import check_function, check_seconds
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.threads import Failure, capture, start_thread, without_blocking
from rocketmq_spark.errors import SendFailed
from rocketmq_spark.model import Message, MessageQueue, ReceivedMessage, Reply, SendResult
from rocketmq_spark.model.send import HalfState, TransactionState
from rocketmq_spark.producer.encoding import DEFAULT_HOW, How
from rocketmq_spark.producer.engine import Unsent
from rocketmq_spark.producer.outgoing import NonblockingCallback
from rocketmq_spark.producer.request_reply import has_cached_route, sends_without_waiting
from rocketmq_spark.producer.transactions import HalfMessage, weakly_bound
from rocketmq_spark.queues.selection import Selector
from rocketmq_spark.remoting.connection import batch_writes
from rocketmq_spark.session import producers

if TYPE_CHECKING:
    from rocketmq_spark.options.typed import ProducerOptions
    from rocketmq_spark.producer.rows.sent import SentRows

logger = logging.getLogger(__name__)

# Sends of larger bodies begin on threads, because compressing 256 KiB takes up to 50 ms.
MAX_LOOP_BODY_BYTES = 64 * 1024
# Cause and remedy for a send that was passed to a thread and did not begin within its timeout.
_NO_ROOM_CAUSE_AND_REMEDY = "too many messages are unacknowledged", "Send more slowly, or await earlier sends first"
_NO_ROUTE_CAUSE_AND_REMEDY = "too many sends wait for routes of topics", "Check that a name server answers"


class AsyncHalfMessage:
    """A half message of ``Producer.transaction`` or ``Producer.send_half``; see ``rocketmq_spark.HalfMessage``.

    Args:
        half: The half message that this wraps.
        call: Runs a function on a thread.
    """

    def __init__(self, half: HalfMessage, call: Callable[..., Any]) -> None:
        self._half_message = half
        self._call_on_thread = call
        self.message, self.result = half.message, half.result

    @property
    def state(self) -> HalfState:
        """The state as this process knows it; see ``rocketmq_spark.HalfMessage.state``."""
        return self._half_message.state

    async def commit(self, timeout_s: float | None = None) -> None:
        """Deliver the message. ``timeout_s`` and errors are as in ``rocketmq_spark.HalfMessage.commit``."""
        await self._call_on_thread(self._half_message.commit, timeout_s)

    async def rollback(self, timeout_s: float | None = None) -> None:
        """Drop the message. ``timeout_s`` and errors are as in ``rocketmq_spark.HalfMessage.commit``."""
        await self._call_on_thread(self._half_message.rollback, timeout_s)


class _UnstartedSend(NamedTuple):
    """A send that has not begun."""

    future: asyncio.Future[SendResult]
    message: Message
    how: How
    queued_at_s: float  # time of the monotonic clock
    context: Context  # the context of the coroutine that sends the message


class _UnstartedSendSet:
    """The sends that threads have not begun yet."""

    def __init__(self) -> None:
        # ``with`` enters the lock itself, not the condition, so that Ctrl-C cannot leave the lock held.
        self._lock = threading.RLock()
        self._condition = threading.Condition(self._lock)
        self._futures: set[asyncio.Future[SendResult]] = set()

    def add(self, send: _UnstartedSend) -> None:
        with self._lock:
            self._futures.add(send.future)

    def discard(self, send: _UnstartedSend) -> None:
        """Remove ``send``. May be called twice for a send: once when no thread can start, and once if a thread begins the send
        later nevertheless.
        """
        with self._lock:
            self._futures.discard(send.future)
            self._condition.notify_all()

    def wait_until_empty(self, deadline: Deadline) -> bool:
        """Wait until all sends have begun. Returns False if ``deadline`` expires."""
        with self._lock:
            return self._condition.wait_for(lambda: not self._futures, deadline.remaining())


class _SendThread:
    """Begins sends one after the other. The thread has no reference to the producer, so that the thread ends after the producer
    was dropped.
    """

    def __init__(self) -> None:
        self._sends: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, begin: Callable[[], None]) -> None:
        """Let the thread call ``begin``. If no thread can start, raises ``RuntimeError`` and never calls ``begin``."""
        self._thread = self._thread or start_thread("rocketmq-aio-send", functools.partial(_begin_each, self._sends))
        self._sends.put(begin)

    def is_empty(self) -> bool:
        return self._sends.empty()

    def end(self) -> None:
        """End the thread after the queued sends. ``put`` starts a new thread, for example after a close that failed."""
        if self._thread is not None:
            self._thread = None
            self._sends.put(None)

    def __del__(self) -> None:
        self._sends.put(None)


def _begin_each(sends: SimpleQueue[Callable[[], None] | None]) -> None:
    while (begin := sends.get()) is not None:
        begin()
        del begin  # ``begin`` refers to the producer; without ``del``, the producer stays alive while this thread waits


class Producer(AsyncClient):
    """Sends messages from coroutines. Options, arguments and errors are those of ``rocketmq_spark.Producer``.

    Args:
        name_server: ``host:port``, several separated by ``;``. Required unless ``transport`` is ``grpc``.
        group: Producer group. Required.
        transaction_check: A function or a coroutine function that receives an undecided half message and returns a
            ``TransactionState`` or its name.
        options: Options of a producer (docs/options.md), in snake_case or camelCase.
    """

    def __init__(
        self,
        name_server: str | None = None,
        group: str | None = None,
        *,
        transaction_check: Callable[[Any], Any] | None = None,
        **options: Unpack[ProducerOptions],
    ) -> None:
        super().__init__()
        check = None
        if transaction_check is not None:
            check_function("transaction_check", transaction_check, "message", allows_coroutines=True)
            self._transaction_check = transaction_check
            check = functools.partial(self._loop.run, weakly_bound(transaction_check))
        self._producer = producers.Producer(name_server, group, transaction_check=check, **options)
        self._new_sends: deque[_UnstartedSend] = deque()  # sends of this iteration of the event loop
        self._begun_count = 0  # total number of sends that were taken from ``_new_sends``
        self._send_thread = _SendThread()
        self._unstarted_sends = _UnstartedSendSet()
        self._bulk_loop = EventLoop()  # separate threads for calls that may take long

    async def queues(self, topic: str) -> list[MessageQueue]:
        """Return the queues that messages of ``topic`` can go to."""
        return await self._run_on_thread(self._producer.queues, topic)

    async def send(
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
        """Send, and wait for the broker's answer. The arguments are those of ``rocketmq_spark.Producer.send``.

        Coroutines that send at the same time do not wait for each other. To keep an order, await each send before the next. A
        send that is cancelled has no effect if it had not begun; otherwise the message may be stored.
        """
        loop = self._check_open()
        if timeout_s is not None:
            # An invalid timeout is an error here, because an error on a thread would leave the future without a result.
            check_seconds("timeout_s", timeout_s)
        how = How(queue, selector, arg, delay_level, delay, deliver_at, timeout_s)
        future = loop.create_future()
        self._new_sends.append(_UnstartedSend(future, message, how, time.monotonic(), copy_context()))
        if len(self._new_sends) == 1:
            loop.call_soon(self._begin_new_sends)
        result: SendResult = await future
        return result

    def _begin_new_sends(self) -> None:
        """Begin the sends that were requested in this iteration of the event loop. Yields to the event loop after some
        milliseconds.
        """
        pause_at = time.monotonic() + YIELD_AFTER_S
        try:
            with without_blocking(), batch_writes():
                while self._new_sends and (self._is_closed or time.monotonic() <= pause_at):
                    send = self._new_sends.popleft()
                    self._begun_count += 1
                    try:
                        outcome = capture(self._begin_or_pass_to_thread, send)
                    except BaseException:  # an interrupt (Ctrl-C) is raised to the user
                        send.future.cancel()
                        raise
                    if isinstance(outcome, Failure):
                        self._loop.set_outcome(send.future, _start_error(outcome.error, send))
        finally:  # after an interrupt, the remaining sends still begin
            if self._new_sends:
                self._loop.running_loop().call_soon(self._begin_new_sends)

    def _begin_or_pass_to_thread(self, send: _UnstartedSend) -> None:
        message, how = send.message, send.how
        if not _is_well_typed(message):  # the producer rejects such a message at once
            self._begin(send)
        elif not has_cached_route(self._producer, message.topic, how.timeout_s is how.delay_level is None):
            # The send thread does not begin this send, because a slow route must not delay sends to other topics.
            self._pass_to_thread(
                send, lambda: self._loop.start(self._begin_on_thread, send, _NO_ROUTE_CAUSE_AND_REMEDY)
            )
        elif (
            self._can_begin_in_loop(message, how)
            and self._send_thread.is_empty()
            and sends_without_waiting(self._producer, message)
        ):
            self._begin(send)
        else:
            begin = functools.partial(self._begin_on_thread, send, _NO_ROOM_CAUSE_AND_REMEDY)
            self._pass_to_thread(send, lambda: self._send_thread.put(begin))

    def _can_begin_in_loop(self, message: Message, how: How) -> bool:
        """Whether a send can begin in the event loop. A delayed message cannot, because the delays that its broker supports may
        have to be requested. A large body cannot, because compressing it takes long.
        """
        return how.delay is how.deliver_at is None and len(message.body) <= MAX_LOOP_BODY_BYTES

    def _pass_to_thread(self, send: _UnstartedSend, start: Callable[[], object]) -> None:
        self._unstarted_sends.add(send)
        try:
            start()
        except BaseException:  # no thread can start
            self._unstarted_sends.discard(send)
            raise

    def _begin_on_thread(self, send: _UnstartedSend, cause_and_remedy: tuple[str, str]) -> None:
        """Begin a send on a thread. If the send has waited for longer than its timeout, it fails with ``cause_and_remedy``."""
        try:
            own_timeout_s = send.how.timeout_s
            timeout_s = self._producer.settings.send_timeout_s if own_timeout_s is None else own_timeout_s
            if time.monotonic() - send.queued_at_s < timeout_s:
                self._begin(send)
                return
            cause, remedy = cause_and_remedy
            text = f"{cause}, and this one has waited for the whole send timeout"
            self._loop.set_outcome(send.future, SendFailed(text, topic=send.message.topic, remedy=remedy))
        finally:
            self._unstarted_sends.discard(send)

    def _begin(self, send: _UnstartedSend) -> None:
        future, message, how, _, context = send
        if future.done():  # the send was cancelled or has failed
            return
        on_outcome = NonblockingCallback(functools.partial(self._loop.set_outcome, future))
        send_arguments = {} if how == DEFAULT_HOW else how._asdict()
        outcome = capture(
            context.run, functools.partial(self._producer.send_async, message, on_outcome, **send_arguments)
        )
        if isinstance(outcome, Failure):
            self._loop.set_outcome(future, outcome.error)

    async def send_oneway(self, message: Message, **how: Any) -> None:
        """Send without waiting for an answer, so it stays unknown whether the message was stored.

        ``how`` are the keyword arguments of ``rocketmq_spark.Producer.send_oneway``.
        """
        await self._run_on_thread(self._producer.send_oneway, message, **how)

    async def send_batch(
        self, messages: Collection[Message], queue: MessageQueue | None = None, timeout_s: float | None = None
    ) -> SendResult:
        """Send ``messages`` of one topic in one request, to ``queue`` or to any queue. See
        ``rocketmq_spark.Producer.send_batch``.
        """
        return await self._run_on_thread(self._producer.send_batch, messages, queue, timeout_s)

    async def send_arrow(self, rows: Any, topic: str | None = None, **how: Any) -> SentRows:
        """Send the ``rows`` of Arrow data to ``topic``, on a thread. See ``rocketmq_spark.Producer.send_arrow``.

        ``how`` are the other keyword arguments of ``rocketmq_spark.Producer.send_arrow``. Cancelling a call that has begun does
        not stop it.
        """
        self._check_open()
        return await self._bulk_loop.call(self._producer.send_arrow, rows, topic, **how)

    async def send_many(self, messages: Iterable[Message], **how: Any) -> SentRows:
        """Send ``messages`` in batches. A thread iterates over the messages and sends them. See
        ``rocketmq_spark.Producer.send_many``.

        ``how`` are the other keyword arguments of ``rocketmq_spark.Producer.send_many``. Cancelling a call that has begun does
        not stop it.
        """
        self._check_open()
        return await self._bulk_loop.call(self._producer.send_many, messages, **how)

    async def request(self, message: Message, **how: Any) -> Reply:
        """Send a message, and wait for the reply of a consumer that receives it.

        ``how`` are the keyword arguments of ``rocketmq_spark.Producer.request``.
        """
        reply_future = await self._run_on_thread(self._producer.request_async, message, **how)
        future: asyncio.Future[Reply] = self._loop.running_loop().create_future()
        reply_future.add_done_callback(
            lambda answered_future: self._loop.set_outcome(
                future, answered_future.exception() or answered_future.result()
            )
        )
        return await future

    async def reply(self, to: ReceivedMessage, body: bytes, *, properties: Mapping[str, str] | None = None,
                    timeout_s: float | None = None) -> None:  # fmt: skip
        """Answer the request ``to`` with ``body`` and ``properties``, within ``timeout_s`` seconds (default: send timeout)."""
        await self._run_on_thread(self._producer.reply, to, body, properties=properties, timeout_s=timeout_s)

    async def send_half(self, message: Message, *, timeout_s: float | None = None) -> AsyncHalfMessage:
        """Store a half message, which is delivered when you commit it. See ``rocketmq_spark.Producer.send_half``.

        If the call is cancelled, the message is rolled back, so you may send another message.
        """
        self._check_open()
        half_message = await self._store_half_message(
            functools.partial(self._producer.send_half, message, timeout_s=timeout_s)
        )
        return AsyncHalfMessage(half_message, self._loop.call_after_close)

    async def _store_half_message(self, store: Callable[[], HalfMessage]) -> HalfMessage:
        """Store a half message on a thread. If the caller is cancelled, roll back the half message, because the caller cannot
        decide it. Without the rollback, the broker would check the half message, and the check could find the data of the
        caller's second attempt and commit both messages.
        """
        roll_back = functools.partial(self._producer._decide_at_end, decision=TransactionState.ROLLBACK)
        return await self._loop.call_or_undo(roll_back, store)

    @contextlib.asynccontextmanager
    async def transaction(self, message: Message, *, timeout_s: float | None = None) -> AsyncIterator[AsyncHalfMessage]:
        """Store ``message`` as a half message, run the block, and commit; roll back if the block raises or is cancelled.

        ``timeout_s`` seconds replace the send timeout of the half message.
        """
        self._check_open()
        transaction = self._producer.transaction(message, timeout_s=timeout_s)
        half_message = await self._store_half_message(transaction.__enter__)
        try:
            yield AsyncHalfMessage(half_message, self._loop.call_after_close)
        except BaseException as e:
            with contextlib.suppress(type(e)):  # ``__exit__`` may raise ``e``, which is raised below
                await self._leave_block(half_message, transaction.__exit__, type(e), e, e.__traceback__)
            raise
        await self._leave_block(half_message, transaction.__exit__, None, None, None)

    async def _leave_block(self, half_message: HalfMessage, leave: Callable[..., object], *error: object) -> None:
        """Commit or roll back at the end of a block, even if the block has closed the producer."""
        try:
            await self._loop.call_after_close(leave, *error)
        except RuntimeError as e:
            # No thread can start. The block is finished, so the half message must not be rolled back when the object is dropped.
            if e not in error:
                logger.warning(
                    "half message %s is not decided; its broker will check it: %s", half_message.result.msg_id, e
                )
                half_message._abandon()

    async def recall(self, topic: str, recall_handle: str) -> str:
        """Cancel a delayed message of ``topic`` by the ``recall_handle`` of its result; returns the message id."""
        return await self._run_on_thread(self._producer.recall, topic, recall_handle)

    async def flush(self, timeout_s: float | None = None) -> bool:
        """Send lingering batches, and wait until all sends are answered.

        Returns False if sends are still unanswered after ``timeout_s`` seconds (default: send timeout).
        """
        self._check_open()
        deadline, last_begun_count = self._deadline(timeout_s), self._begun_count + len(self._new_sends)
        self._begin_new_sends()
        while self._begun_count < last_begun_count:  # each iteration of the event loop begins some sends
            if deadline.expired:
                return False
            await asyncio.sleep(0)
        return await self._loop.call(self._flush, deadline)

    def _on_closed(self, close_future: asyncio.Future[Any]) -> None:
        super()._on_closed(close_future)
        if self._loop.is_shut_down:
            self._bulk_loop.close()

    def _flush(self, deadline: Deadline) -> bool:
        return self._unstarted_sends.wait_until_empty(deadline) and self._producer.flush(deadline.remaining())

    async def close(self, timeout_s: float | None = None) -> list[Unsent]:
        """Accept no more sends, wait up to ``timeout_s`` seconds (default: send timeout), and return the sends that have no
        answer.
        """
        if self._is_closed:
            return []
        self._check_open()
        self._is_closed = True
        try:
            self._begin_new_sends()
        except BaseException:  # after an interrupt (Ctrl-C), the user can call ``close`` again
            self._is_closed = False
            raise
        return await self._close_with_code(functools.partial(self._close, timeout_s))

    def _close(self, timeout_s: float | None) -> list[Unsent]:
        deadline = self._deadline(timeout_s)
        self._unstarted_sends.wait_until_empty(deadline)  # threads must have begun all earlier sends
        self._send_thread.end()
        return self._producer.close(deadline.remaining())

    def _deadline(self, timeout_s: float | None) -> Deadline:
        return self._producer._deadline(timeout_s)  # raises ``OptionError`` for a timeout that is not a number


def _is_well_typed(message: object) -> bool:
    """Whether ``message`` is a ``Message`` whose topic and body have the right types."""
    return isinstance(message, Message) and isinstance(message.topic, str) and hasattr(message.body, "__len__")


def _start_error(error: BaseException, send: _UnstartedSend) -> BaseException:
    if not isinstance(error, RuntimeError):
        return error
    return SendFailed(
        f"nothing was sent: {error}", topic=send.message.topic, remedy="Raise the limit of threads and processes"
    )
