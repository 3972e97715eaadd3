"""Sends many messages with one call, from Arrow columns or from an iterable of messages. Modules that need pyarrow are imported
on use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from rocketmq_spark.base import extras
from rocketmq_spark.base.arguments import check_function, check_instance, check_text
from rocketmq_spark.errors import OptionError
from rocketmq_spark.model import Message, MessageQueue
from rocketmq_spark.producer.request_reply import RequestProducer
from rocketmq_spark.queues.selection import Selector

if TYPE_CHECKING:
    from rocketmq_spark.columnar.encode.encoder import Encoder
    from rocketmq_spark.options import Options
    from rocketmq_spark.producer.rows.calls import CallTools
    from rocketmq_spark.producer.rows.sent import SentRows


class BulkProducer(RequestProducer):
    """A producer that sends many messages with one call. ``options`` are the options of the producer. ``row_encoder`` returns the
    function that creates the transport's encoder of columns.
    """

    def __init__(
        self,
        *args: Any,
        options: Options | None = None,
        row_encoder: Callable[[], Callable[..., Encoder]] | None = None,
        **base_arguments: Any,
    ) -> None:
        self._options, self._row_encoder = options, row_encoder
        super().__init__(*args, **base_arguments)

    def send_arrow(
        self,
        rows: Any,
        topic: str | None = None,
        *,
        selector: str | Selector | None = None,
        timeout_s: float | None = None,
    ) -> SentRows:
        """Send the rows of Arrow data in batches, and wait for the brokers' answers. Needs pyarrow.

        The columns are those of the Spark sink (docs/options.md): ``body`` and any of ``topic``, ``tags``, ``keys``,
        ``properties``, ``shardingKey``, ``queueId``, ``brokerName``, ``delayLevel``, ``delayMs``, ``deliverAt``, ``flag``,
        ``priority``. If ``"hash"``, ``"column"`` or a function chooses the queue of each row, a queue gets its rows in their
        order, one batch at a time. After a batch fails, this call sends no more rows to its queue.

        Args:
            rows: A ``pyarrow`` ``Table`` or ``RecordBatch``, of which all rows are checked before any is sent; or a
                ``RecordBatchReader``, of which each batch is checked before it is sent.
            topic: The topic of all rows. Without this argument, each row names its topic in column ``topic``.
            selector: ``"hash"`` (of column ``shardingKey``), ``"column"`` (``queueId``, and ``brokerName`` if there is one),
                ``"random"``, ``"roundRobin"``, ``"environment"``, ``"module:function"``, or a function of queues, message and
                sharding key that is called for each row. By default, a column ``queueId`` selects ``"column"``, a column
                ``shardingKey`` selects ``"hash"``, and without these columns, batches go to the queues round robin. With
                ``"hash"``, a row whose ``shardingKey`` is null or empty goes to any queue. With ``"column"``, a row whose
                ``queueId`` is null goes to any queue. If the rows have both columns and no selector is given, a row without a
                ``queueId`` goes to the queue of its ``shardingKey``.
            timeout_s: Seconds for all attempts of one batch; the send timeout by default.

        Returns:
            The outcome of each row, in the order of the rows. No error is raised for rows that brokers reject or do not
            acknowledge in time: call ``raise_for_failed`` on the outcome, or check its ``failed``.

        Raises:
            OptionError: A column has a wrong name or type, ``delayMs`` or ``deliverAt`` is used with ``longDelay=dmq``, or
                pyarrow is not installed. Nothing was sent.
            MessageRefused: Some rows can never be sent; the error lists their numbers. If ``rows`` is a reader, the batches
                before the bad batch were sent. If ``rows`` is a table or a record batch, nothing was
                sent.
            RouteNotFound: As for ``send``. If ``rows`` is a reader, earlier batches may have been sent.
            ClosedError: The producer was closed.
        """
        send_timeout_s = self.settings.send_timeout_s if timeout_s is None else timeout_s
        tools = self._call_tools("send_arrow", send_timeout_s)
        if topic is not None:
            check_text("topic", topic, "the name of a topic")
        from rocketmq_spark.producer.rows import inputs

        return inputs.send_arrow(tools, rows, inputs.RowTarget(topic, selector, send_timeout_s))

    def send_many(
        self,
        messages: Iterable[Message],
        *,
        queue: MessageQueue | None = None,
        key: Callable[[Message], object] | None = None,
        timeout_s: float | None = None,
    ) -> SentRows:
        """Send messages in batches, and wait for the brokers' answers. Needs pyarrow.

        Batches are made by topic and queue, whatever the messages' tags and keys are. With ``queue`` or ``key``, messages reach
        their queue in their order, one batch at a time; after a batch fails, this call sends no more messages to its queue.

        Args:
            messages: A list or another sequence, of which all messages are checked before any is sent; or another iterable, which
                is taken, checked and sent in portions.
            queue: The queue of all messages. By default the queues of each topic take batches in turn.
            key: A function that returns the key of a message: a str, int or bool. All messages of a key go to one queue: the
                queue that ``send`` with selector ``"hash"`` chooses for the key. The key becomes the message's sharding key, or
                its message group over gRPC. Messages without a key (None or an empty string) go to any queue.
            timeout_s: Seconds for all attempts of one batch; the send timeout by default.

        Returns:
            The outcome of each message, in the order of the messages. As with ``send_arrow``, failures at brokers are not raised.

        Raises:
            MessageRefused: Some messages can never be sent, or have ``wait_store_ok=False``; the error lists their numbers. If
                ``messages`` is a sequence, nothing was sent. If ``messages`` is another iterable, the portions before the bad
                message were sent.
            OptionError: pyarrow is not installed, or both ``queue`` and ``key`` are given.
            RouteNotFound, ClosedError: As for ``send_arrow``.
        """
        send_timeout_s = self.settings.send_timeout_s if timeout_s is None else timeout_s
        tools = self._call_tools("send_many", send_timeout_s)
        check_instance("messages", messages, Iterable, "an iterable of messages")
        if queue is not None:
            check_instance("queue", queue, MessageQueue, "a MessageQueue, such as queues() returns")
        if key is not None:
            check_function("key", key, "message")
        from rocketmq_spark.producer.rows import inputs

        target = inputs.RowTarget(None, "hash" if key is not None else None, send_timeout_s)
        return inputs.send_many(tools, messages, target, inputs.MessageTarget(queue, key))

    def _call_tools(self, method: str, send_timeout_s: float) -> CallTools:
        """Return the ``CallTools`` of one call. Sends waiting batches first, because their messages precede the messages of the
        call.
        """
        self._owner.check(self._close_lock.locked())
        self._deadline(send_timeout_s)  # checks that the timeout is a number
        if self._options is None or self._row_encoder is None or not extras.is_installed("pyarrow"):
            raise OptionError(
                f"{method} needs pyarrow, which is not installed", remedy=extras.install_command(extras.ARROW)
            )
        from rocketmq_spark.producer.rows.calls import CallTools
        from rocketmq_spark.producer.rows.sender import RowTools

        if self._batching is not None:
            self._batching.batcher.send_all()
        delays, destinations = self._long_delays, self._destinations
        row_tools = RowTools(self._options, self.settings, self._sender, self._engine, self._row_encoder(), delays)
        return CallTools(row_tools, destinations, delays.timers, destinations.spool_fallback, self._close_lock.locked)
