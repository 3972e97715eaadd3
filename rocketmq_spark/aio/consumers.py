"""Consumers for coroutines. Each class wraps a consumer of ``session/consumers``."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, Unpack

from rocketmq_spark.aio.loop import YIELD_AFTER_S, AsyncClient, CoroutineListener, EventLoop
from rocketmq_spark.consumer.listener import Listener, check_listener
from rocketmq_spark.consumer.pull import DEFAULT_POLL_TIMEOUT_S, checked_timeout, next_answer, take_messages
from rocketmq_spark.consumer.settings import MAX_MESSAGES
from rocketmq_spark.consumer.simple import check_max_messages
from rocketmq_spark.errors import ClosedError
from rocketmq_spark.model import MessageQueue, ReceivedMessage
from rocketmq_spark.model.membership import ConsumerStats
from rocketmq_spark.model.message import PoppedMessage
from rocketmq_spark.session import consumers

if TYPE_CHECKING:
    from rocketmq_spark.options.typed import ConsumerOptions, PullConsumerOptions, SimpleConsumerOptions

logger = logging.getLogger(__name__)

# The maximum number of messages that are decoded in the event loop without a pause. Decoding so many messages takes some
# milliseconds.
_MAX_DECODED_MESSAGES = 500


class Consumer(AsyncClient):
    """Consumes messages as a member of a group, with a coroutine function as its listener; see ``rocketmq_spark.Consumer``.

    Args:
        name_server: ``host:port``, several separated by ``;``. Required unless ``transport`` is ``grpc``.
        group: Consumer group. Required.
        options: Options of a consumer (docs/options.md), in snake_case or camelCase.
    """

    def __init__(
        self, name_server: str | None = None, group: str | None = None, **options: Unpack[ConsumerOptions]
    ) -> None:
        super().__init__()
        self._consumer = consumers.Consumer(name_server, group, **options)

    async def subscribe(self, topic: str, tags: str | None = None, sql: str | None = None) -> None:
        """Consume all messages of ``topic``, or only the messages that match ``tags`` or ``sql``; see
        ``rocketmq_spark.Consumer.subscribe``.
        """
        await self._run_on_thread(self._consumer.subscribe, topic, tags, sql)

    async def unsubscribe(self, topic: str) -> None:
        """Stop consuming ``topic``."""
        await self._run_on_thread(self._consumer.unsubscribe, topic)

    async def start(self, listener: Callable[[Any, Any], Any]) -> None:
        """Join the group, and await ``listener(messages, context)`` in this event loop whenever messages arrive.

        Option 'consumeThreadMin' limits how many calls run at the same time. Return values and exceptions of the listener mean
        the same as for ``rocketmq_spark.Consumer``. ``context.reply`` may wait for a broker: await
        ``asyncio.to_thread(context.reply, body)``. A listener that is not a coroutine function runs on threads.

        Args:
            listener: A coroutine function or a function. It has the arguments of a ``rocketmq_spark.Listener``.

        Raises:
            OptionError, LocalProtocolError, RocketMQError: As ``rocketmq_spark.Consumer.start``.
        """
        self._check_open()
        settings = self._consumer.settings
        check_listener(listener, settings.arrow, coroutines=True)
        thread_listener: Listener = functools.partial(self._loop.run, listener)
        if inspect.iscoroutinefunction(listener) and not settings.ordered and not settings.uses_pop:
            thread_listener = CoroutineListener(self._loop, listener, settings.threads)
        self._loop.on_loop_closed = self._leave_group
        await self._loop.call(self._consumer.start, thread_listener)

    def _leave_group(self) -> None:
        """Leave the group after the event loop was closed, because every call of the listener would fail. The other members of
        the group then get the messages.
        """
        logger.warning(
            "the event loop of a consumer was closed before the consumer, which now leaves group %s; close the consumer first",
            self._consumer.settings.group,
        )
        self._consumer.stop(0.0)

    async def run(self, listener: Callable[[Any, Any], Any]) -> None:
        """Call ``start`` with ``listener``, wait until the task is cancelled, and close the consumer.

        ``asyncio.run`` cancels the task at Ctrl-C. For SIGTERM, call ``loop.add_signal_handler(signal.SIGTERM, task.cancel)``.
        """
        try:
            await self.start(listener)
        except asyncio.CancelledError:  # ``start`` may still run on a thread, and join the group
            await self.close()
            raise
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            await self.close()

    def stats(self) -> ConsumerStats:
        """Return counts since the start; see ``rocketmq_spark.Consumer.stats``."""
        return self._consumer.stats()

    async def close(self, timeout_s: float = 30.0) -> Sequence[ReceivedMessage | PoppedMessage]:
        """Leave the group. Listener calls that run longer than ``timeout_s`` are cancelled; their messages are redelivered.

        Do not await ``close`` in a listener, because ``close`` waits for the listener. Instead, set an event, and let another
        task close.

        Args:
            timeout_s: Seconds to wait for listener calls.

        Returns:
            The messages of the cancelled calls.
        """
        if self._is_closed:
            return []
        self._check_open()
        return await self._close_with_code(functools.partial(self._consumer.stop, timeout_s))


class PullConsumer(AsyncClient):
    """Returns messages when you poll it, from the queues that the group assigns to it or that you name; see
    ``rocketmq_spark.PullConsumer``.

    ``async for message in consumer`` yields messages without end. A message is finished when ``commit`` is called, or when a
    later poll or the ``async for`` loop fetches more messages. A new ``async for`` loop continues after the last message that an
    earlier loop yielded. Only one task at a time may use a consumer.

    Args:
        name_server: ``host:port``, several separated by ``;``. Required.
        group: Consumer group. Required.
        options: Options of a pull consumer (docs/options.md), in snake_case or camelCase.
    """

    def __init__(
        self, name_server: str | None = None, group: str | None = None, **options: Unpack[PullConsumerOptions]
    ) -> None:
        super().__init__(max_threads=1)  # a PullConsumer serves one thread at a time
        self._consumer = consumers.PullConsumer(name_server, group, **options)
        # The future of a poll that is running, perhaps one whose caller was cancelled.
        self._answer_future: asyncio.Future[Iterator[ReceivedMessage]] | None = None
        self._remaining_messages: Iterator[ReceivedMessage] = iter(())  # messages that were not returned or yielded yet

    async def subscribe(self, topic: str, tags: str | None = None, sql: str | None = None) -> None:
        """Share the queues of ``topic`` with the group; see ``rocketmq_spark.PullConsumer.subscribe``."""
        await self._run_on_thread(self._consumer.subscribe, topic, tags, sql)

    async def unsubscribe(self, topic: str) -> None:
        """Stop reading ``topic``, and release its queues; see ``rocketmq_spark.PullConsumer.unsubscribe``."""
        await self._run_on_thread(self._consumer.unsubscribe, topic)

    async def queues(self, topic: str) -> Sequence[MessageQueue]:
        """Return the readable queues of ``topic``, sorted."""
        return await self._run_on_thread(self._consumer.queues, topic)

    async def assign(self, queues: Iterable[MessageQueue]) -> None:
        """Read exactly these ``queues``, without sharing them with the group."""
        await self._run_on_thread(self._consumer.assign, queues)

    async def assignment(self) -> list[MessageQueue]:
        """Return the queues that are read now, sorted."""
        return await self._run_on_thread(self._consumer.assignment)

    async def pause(self, *queues: MessageQueue) -> None:
        """Return no messages of these ``queues`` until ``resume``. Raises ``OffsetError`` if a queue is not assigned."""
        await self._run_on_thread(self._consumer.pause, *queues)

    async def resume(self, *queues: MessageQueue) -> None:
        """Return messages of these ``queues`` again. Raises ``OffsetError`` if a queue is not assigned."""
        await self._run_on_thread(self._consumer.resume, *queues)

    async def seek(self, queue: MessageQueue, offset: int) -> None:
        """Continue at ``offset`` of ``queue``. Raises ``OffsetError`` if the queue is not assigned or has no such offset."""
        await self._run_on_thread(self._consumer.seek, queue, offset)

    async def seek_to_beginning(self, *queues: MessageQueue) -> None:
        """Continue ``queues``, by default all, at the first message that the broker keeps."""
        await self._run_on_thread(self._consumer.seek_to_beginning, *queues)

    async def seek_to_end(self, *queues: MessageQueue) -> None:
        """Continue ``queues``, by default all, after the last message."""
        await self._run_on_thread(self._consumer.seek_to_end, *queues)

    async def seek_to_timestamp(self, epoch_ms: int, *queues: MessageQueue) -> None:
        """Continue ``queues``, by default all, at the first message stored at or after ``epoch_ms`` (ms since 1970)."""
        await self._run_on_thread(self._consumer.seek_to_timestamp, epoch_ms, *queues)

    async def commit(self, offsets: Mapping[MessageQueue, int] | None = None) -> None:
        """Commit ``offsets``; by default, the offsets of all messages that were returned or yielded."""
        await self._run_on_thread(self._consumer.commit, offsets)

    async def committed(self, queue: MessageQueue) -> int | None:
        """Return the committed offset of ``queue``; None if no offset was committed."""
        return await self._run_on_thread(self._consumer.committed, queue)

    async def poll(self, timeout_s: float = DEFAULT_POLL_TIMEOUT_S) -> list[ReceivedMessage]:
        """Return messages of one queue, in the order of the queue, as soon as there are any. After ``timeout_s`` seconds without
        messages, return an empty list. The list ends after 500 messages, or with the message that brings the decompressed bodies
        to 64 MiB.
        """
        deadline_s = time.monotonic() + checked_timeout(timeout_s)
        while True:
            self._check_open()
            if messages := self._take_messages():
                return messages
            remaining_s = deadline_s - time.monotonic()
            await self._fetch(max(0.0, min(remaining_s, DEFAULT_POLL_TIMEOUT_S)))
            if remaining_s <= 0:
                return self._take_messages()

    def _take_messages(self) -> list[ReceivedMessage]:
        # The attribute is empty while ``take_messages`` runs. If ``take_messages`` raises, its iterator must not be used again,
        # because the consumer returns the same messages again.
        remaining_messages, self._remaining_messages = self._remaining_messages, iter(())
        messages = take_messages(self._consumer, remaining_messages, _MAX_DECODED_MESSAGES)
        self._remaining_messages = remaining_messages
        return messages

    async def __aiter__(self) -> AsyncIterator[ReceivedMessage]:
        while not self._is_closed:
            pause_at = time.monotonic() + YIELD_AFTER_S
            for message in self._remaining_messages:
                yield message
                if time.monotonic() > pause_at:  # an answer may have hundreds of messages
                    await asyncio.sleep(0)
                    pause_at = time.monotonic() + YIELD_AFTER_S
            try:
                await self._fetch(DEFAULT_POLL_TIMEOUT_S)
            except ClosedError:
                if not self._is_closed:
                    raise

    async def _fetch(self, wait_s: float) -> None:
        """Wait for an answer. If an earlier poll was cancelled, wait for the answer to that poll, because no caller got its
        messages. The earlier poll may have a longer timeout than ``wait_s``, so this method waits for at most ``wait_s``.
        """
        earlier_future = self._answer_future
        future = earlier_future or self._loop.start(next_answer, self._consumer, wait_s)
        self._answer_future = future
        await asyncio.wait((future,), timeout=wait_s if future is earlier_future else None)
        if future.done():
            self._answer_future = None
            self._remaining_messages = future.result()

    async def close(self) -> None:
        """Stop, and leave the group; see ``rocketmq_spark.PullConsumer.close``."""
        if self._is_closed:
            return
        self._check_open()
        await self._close_with_code(self._consumer.close)  # ``close`` also ends a poll


class SimpleConsumer(AsyncClient):
    """Receives messages from a Proxy. Await ``ack`` for each message that you have processed; see
    ``rocketmq_spark.SimpleConsumer``.

    Args:
        name_server: Not used. Pass ``group`` and ``proxy_endpoint`` by keyword.
        group: Consumer group. Required.
        options: Options of a simple consumer (docs/options.md), in snake_case or camelCase; ``proxy_endpoint`` is required.
    """

    def __init__(
        self, name_server: str | None = None, group: str | None = None, **options: Unpack[SimpleConsumerOptions]
    ) -> None:
        super().__init__()
        self._consumer = consumers.SimpleConsumer(name_server, group, **options)
        self._receive_loop = EventLoop()  # separate, because waiting receives must not delay acknowledgements
        self._unclaimed_messages: list[PoppedMessage] = []  # messages of cancelled calls of ``receive``
        # Unanswered requests of cancelled calls.
        self._abandoned_requests: list[asyncio.Future[Sequence[PoppedMessage]]] = []

    async def subscribe(self, topic: str, tags: str | None = None, sql: str | None = None) -> None:
        """Receive all messages of ``topic``, or only messages with one of ``tags`` (``a || b``), or messages that match
        ``sql``.
        """
        await self._run_on_thread(self._consumer.subscribe, topic, tags, sql)

    async def unsubscribe(self, topic: str) -> None:
        """Receive no more messages of ``topic``."""
        await self._run_on_thread(self._consumer.unsubscribe, topic)

    async def receive(
        self, max_messages: int = MAX_MESSAGES, invisible: str | float = "30s", wait: str | float = "5s"
    ) -> Sequence[PoppedMessage]:
        """Return up to ``max_messages`` messages; an empty list if no message came within ``wait``.

        During the time ``invisible``, other members of the group do not get the returned messages. If a call is cancelled, the
        next call returns the messages of the cancelled call, and waits if these messages have not arrived. Their invisible time
        began with the cancelled call.
        """
        self._check_open()
        check_max_messages(max_messages)
        while self._abandoned_requests and not self._unclaimed_messages:
            await self._wait_for(self._abandoned_requests.pop())
            self._check_open()
        if self._unclaimed_messages:
            messages, self._unclaimed_messages = (
                self._unclaimed_messages[:max_messages],
                self._unclaimed_messages[max_messages:],
            )
            return messages
        receive_future = self._receive_loop.start(
            copy_context().run, self._consumer.receive, max_messages, invisible, wait
        )
        try:
            await self._wait_for(receive_future)
        except asyncio.CancelledError:
            receive_future.add_done_callback(self._keep_messages)
            raise
        return receive_future.result()

    async def _wait_for(self, receive_future: asyncio.Future[Sequence[PoppedMessage]]) -> None:
        """Wait for ``receive_future``. If this wait is cancelled, a later call of ``receive`` waits for the future."""
        try:
            await asyncio.wait((receive_future,))
        except asyncio.CancelledError:
            self._abandoned_requests.append(receive_future)
            raise

    def _keep_messages(self, receive_future: asyncio.Future[Sequence[PoppedMessage]]) -> None:
        if not receive_future.cancelled() and receive_future.exception() is None:
            self._unclaimed_messages += receive_future.result()

    async def ack(self, message: PoppedMessage) -> None:
        """Acknowledge ``message`` after you have processed it."""
        await self._run_on_thread(self._consumer.ack, message)

    async def change_invisible(self, message: PoppedMessage, duration: str | float) -> None:
        """Have ``message`` delivered again after ``duration``, unless it is acknowledged before."""
        await self._run_on_thread(self._consumer.change_invisible, message, duration)

    async def forward_to_dlq(self, message: PoppedMessage) -> None:
        """Move ``message`` to the group's dead-letter topic."""
        await self._run_on_thread(self._consumer.forward_to_dlq, message)

    async def close(self) -> None:
        """Leave the group. Messages that were not acknowledged are delivered again when their invisible time is over."""
        if self._is_closed:
            return
        self._check_open()
        await self._close_with_code(self._stop)

    def _stop(self) -> None:
        try:
            self._consumer.close()
        finally:
            self._receive_loop.close()
