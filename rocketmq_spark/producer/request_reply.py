"""Request and reply: a message whose consumer answers it, and the answer. Mirrors ``DefaultMQProducer.request``.

A request is stored and consumed like any other message. The reply to a request is not stored for the requester: a broker passes
the reply on over the requester's connection. So the reply is lost if the requester is no longer connected. A request that gets
no reply may have been processed.
"""

from __future__ import annotations

import functools
import logging
import threading
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from rocketmq_spark.base.arguments import check_instance
from rocketmq_spark.base.clock import NO_TIMEOUT_S, Deadline
from rocketmq_spark.base.threads import Failure, Timer, capture
from rocketmq_spark.errors import ClosedError, NotSupported, ReplyTimeout, RocketMQError
from rocketmq_spark.model import Message, MessageQueue, ReceivedMessage, Reply, SendResult
from rocketmq_spark.options.transport import NO_REPLIES
from rocketmq_spark.ports import Replies, Sender
from rocketmq_spark.producer import encoding
from rocketmq_spark.producer.encoding import How
from rocketmq_spark.producer.outgoing import SendCompletion
from rocketmq_spark.producer.send_queue import closed_error
from rocketmq_spark.producer.settings import ProducerSettings
from rocketmq_spark.producer.transactions import TransactionCheck, TransactionProducer
from rocketmq_spark.queues.selection import Selector

logger = logging.getLogger(__name__)

# The share of a request's timeout that may be used to tell brokers where to send replies.
_ANNOUNCE_SHARE = 1 / 3


class _PendingRequest:
    """A request that waits for its reply. The reply, an error or the timeout completes the request, whichever comes first.

    A failed send completes the request with its error. The error of a timeout says that the message is stored. So if the timeout
    comes before the result of the send, the request is completed only when this result arrives.
    """

    def __init__(self, topic: str, msg_id: str) -> None:
        self.future: Future[Reply] = Future()
        self.future.set_running_or_notify_cancel()  # a request that is sent cannot be cancelled
        self.unregister: Callable[[], None] = lambda: None
        self._topic = topic
        self._msg_id = msg_id
        self._lock = threading.Lock()
        self._is_complete = self._is_expired = False
        self._send_result: SendResult | None = None

    def complete(self, outcome: Reply | RocketMQError) -> bool:
        """Set the outcome. Returns False if the request has an outcome already."""
        with self._lock:
            if self._is_complete:
                return False
            self._is_complete = True
        self.unregister()
        set_outcome: Callable[[Any], None] = self.future.set_result
        if isinstance(outcome, RocketMQError):
            set_outcome = self.future.set_exception
        failure = capture(set_outcome, outcome)
        if isinstance(failure, Failure):  # Python's futures do not catch BaseException of callbacks
            failure.log(logger, "a callback of a future failed")
        return True

    def on_send_done(self, completion: SendCompletion) -> None:
        """Record the outcome of the send."""
        if isinstance(completion.outcome, RocketMQError):
            self.complete(completion.outcome)
            return
        with self._lock:
            self._send_result, is_expired = completion.outcome, self._is_expired
        if is_expired:
            self.complete(self._timeout_error(completion.outcome))

    def expire(self) -> None:
        """Record the timeout."""
        with self._lock:
            self._is_expired, send_result = True, self._send_result
        if send_result is not None:
            self.complete(self._timeout_error(send_result))

    def _timeout_error(self, send_result: SendResult) -> ReplyTimeout:
        return ReplyTimeout(
            f"message {self._msg_id} was stored, but no reply arrived in time",
            topic=self._topic,
            queue=str(send_result.queue),
            remedy="Check that its consumers run and reply",
        )


class RequestProducer(TransactionProducer):
    """A producer that sends requests and replies. ``replies`` is None if the transport does not support them."""

    def __init__(
        self,
        sender: Sender,
        settings: ProducerSettings,
        check: TransactionCheck | None = None,
        replies: Replies | None = None,
        make_timer: Callable[[str], Timer] = Timer,
        **base_arguments: Any,
    ) -> None:
        self._replies = replies
        self._request_timer = make_timer(f"rocketmq-{settings.group}-request")
        # ``with`` enters this lock, not the condition: Ctrl-C can interrupt the entry to a condition halfway, but not the entry
        # to a lock.
        self._requests_lock = threading.RLock()
        self._requests_changed = threading.Condition(self._requests_lock)
        self._announce_lock = threading.Lock()
        self._requests: dict[str, _PendingRequest] = {}
        self._is_announced = False  # whether all brokers know where replies go
        self._is_closing = False  # whether new requests are rejected
        self._is_closed = False
        self._unregister_replies: Callable[[Deadline], None] | None = None
        super().__init__(sender, settings, check, make_timer=make_timer, **base_arguments)

    def request(
        self,
        message: Message,
        *,
        queue: MessageQueue | None = None,
        selector: str | Selector | None = None,
        arg: object = None,
        timeout_s: float | None = None,
    ) -> Reply:
        """Send a message, and wait for the reply of a consumer that gets it (``context.reply`` or ``Producer.reply``).

        The message goes to consumers of all groups that subscribe to its topic; the first reply counts. A send that is retried
        may store the request twice. Requests are not batched and not spooled.

        Args:
            message: What to send.
            queue: The queue to send to, as for ``send``.
            selector: Chooses the queue, as for ``send``.
            arg: For the selector.
            timeout_s: Seconds for the send and the reply together; the send timeout by default.

        Raises:
            ReplyTimeout: The request was stored, but no reply arrived in time.
            RocketMQError: The errors of ``send``.
            NotSupported: Through a Proxy, which does not forward replies. Nothing was sent.
        """
        return self.request_async(message, queue=queue, selector=selector, arg=arg, timeout_s=timeout_s).result()

    def request_async(
        self,
        message: Message,
        *,
        queue: MessageQueue | None = None,
        selector: str | Selector | None = None,
        arg: object = None,
        timeout_s: float | None = None,
    ) -> Future[Reply]:
        """Send a request without waiting for its reply: the returned future has the reply, or the error.

        The arguments are those of ``request``. The first call, and the first after a ``ReplyTimeout``, waits until brokers know
        where to send this producer's replies. Functions added by ``Future.add_done_callback`` must not block.
        """
        replies = self._supported_replies()
        prepared, destination, deadline = self._check_and_resolve(
            message, How(queue, selector, arg, timeout_s=timeout_s)
        )
        correlation_id = str(uuid.uuid4())
        prepared = encoding.as_request(prepared, correlation_id, self.client_id, deadline.remaining())
        request = _PendingRequest(message.topic, prepared.msg_id)
        with self._requests_lock:
            if self._is_closing:
                raise ClosedError("the producer is closed")
            self._requests[correlation_id] = request
        request.future.add_done_callback(lambda _: self._remove_request(correlation_id))
        try:
            self._announce(replies, deadline.within(deadline.remaining() * _ANNOUNCE_SHARE))
            request.unregister = replies.expect(correlation_id, request.complete)
            if (remaining_s := deadline.remaining()) < NO_TIMEOUT_S / 2:  # an unlimited timeout needs no timer call
                self._request_timer.call_later(remaining_s, functools.partial(self._expire_request, correlation_id))
            outgoing = self._outgoing(prepared, destination, deadline, request.on_send_done)._replace(spoolable=False)
            self._engine.submit(outgoing)
            if request.future.done():  # a close may have completed the request before ``unregister`` was set
                request.unregister()
        except BaseException:  # also Ctrl-C: the request must end, because the caller does not get its future
            request.complete(closed_error())
            raise
        return request.future

    def reply(
        self,
        to: ReceivedMessage,
        body: bytes,
        *,
        properties: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Answer a request that was received by any consumer of this program. A listener may use ``context.reply`` instead.

        Args:
            to: The request.
            body: The answer, not empty.
            properties: The user's own properties of the answer.
            timeout_s: Seconds for all attempts together instead of the send timeout.

        Raises:
            MessageRefused: The message is not a request, or the answer is empty or too large. Nothing was sent.
            RocketMQError: The requester did not get the answer; perhaps it has ended.
            NotSupported: Through a Proxy, which does not forward replies. Nothing was sent.
        """
        replies = self._supported_replies()
        self._owner.check(self._close_lock.locked())
        check_instance("to", to, ReceivedMessage, "the ReceivedMessage that is a request")
        answer = Message(to.topic, body, properties=properties)
        replies.reply(to, answer, self.settings.group, self._deadline(timeout_s))

    def close(self, timeout_s: float | None = None) -> list[Any]:
        """Close the producer within ``timeout_s``; ``Producer.close``, which users call, has the details."""
        if not self._owner.is_current:
            return []
        deadline = self._deadline(timeout_s)
        try:
            with self._requests_lock:
                self._is_closing = True
                while self._requests and not deadline.expired:
                    self._request_timer.wait_notified(self._requests_changed, deadline.remaining())
        except BaseException:
            deadline = Deadline.after(0)
            raise
        finally:
            unsent = super().close(deadline.remaining())
            for request in list(self._requests.values()):
                request.complete(closed_error())
            self._request_timer.close()
            with self._requests_lock:
                self._is_closed = True
                unregister, self._unregister_replies = self._unregister_replies, None
            if unregister is not None:
                unregister(Deadline.after(self.settings.send_timeout_s))
        return unsent

    def _supported_replies(self) -> Replies:
        if self._replies is None:
            raise NotSupported(NO_REPLIES)
        return self._replies

    def _announce(self, replies: Replies, deadline: Deadline) -> None:
        """Tell all brokers where to send replies. If a request got no reply, the next request tells the brokers again, because
        a broker may not know a new connection of this client yet.
        """
        with self._requests_lock:
            if self._is_announced:
                return
            if self._is_closed:  # meanwhile the producer was closed, so a registration would stay forever
                raise closed_error()
            if self._unregister_replies is None:
                self._unregister_replies = replies.join(self.settings.group, self.settings.heartbeat_s)
        if not self._announce_lock.acquire(timeout=deadline.remaining()):
            return  # the thread of another request waits for a broker that hangs; the other brokers know the address already
        try:
            if not self._is_announced:
                replies.announce(deadline)
                self._is_announced = True
        finally:
            self._announce_lock.release()

    def _expire_request(self, correlation_id: str) -> None:
        """Expire the request with this id. The timer has the id, and not the request, so that completed requests can be
        garbage-collected.
        """
        if (request := self._requests.get(correlation_id)) is not None:
            self._is_announced = False
            request.expire()

    def _remove_request(self, correlation_id: str) -> None:
        with self._requests_lock:
            self._requests.pop(correlation_id, None)
            self._requests_changed.notify_all()


def sends_without_waiting(producer: RequestProducer, message: Message) -> bool:
    """Whether ``send_async`` would send ``message`` at once: it neither waits nor sends another request first. The message must
    have no delay.
    """
    engine = producer._engine
    may_wait = producer._spool is not None or engine.ambiguity_resolver is not None
    return not may_wait and has_cached_route(producer, message.topic, False) and engine.has_room(len(message.body))


def has_cached_route(producer: RequestProducer, topic: str, batched: bool) -> bool:
    """Whether the route of ``topic`` is cached, so that a send does not fetch it. With ``batched``, the topic's
    ``BatchStorage`` must be cached, too, if the producer batches automatically.
    """
    routes = producer._engine.routes
    must_fetch_storage = batched and producer._batching is not None and topic not in routes.storage
    return not must_fetch_storage and bool(routes.brokers_of(topic))
