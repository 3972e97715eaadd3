"""The public ``Producer``: it parses its options and creates the client for brokers or a Proxy."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Unpack, cast

from rocketmq_spark.base import extras
from rocketmq_spark.base.clock import Deadline, epoch_ms
from rocketmq_spark.errors import OptionError
from rocketmq_spark.options import Options
from rocketmq_spark.ports import Sender
from rocketmq_spark.producer.ambiguity import StoredIds
from rocketmq_spark.producer.bulk import BulkProducer
from rocketmq_spark.producer.engine import Unsent
from rocketmq_spark.producer.settings import ProducerSettings
from rocketmq_spark.producer.transactions import TransactionCheck
from rocketmq_spark.session import instrumentation, parse_options, replies, row_encoder, sender, trace_producer
from rocketmq_spark.session.spools import SpoolSettings, open_send_spool, open_store

if TYPE_CHECKING:
    from rocketmq_spark.options.typed import ProducerOptions
    from rocketmq_spark.producer.tracing import TraceProducer

# ``close`` waits at least this long for the traces of the last sends, even if the timeout of ``close`` has passed.
_MIN_LAST_TRACES_WAIT_S = 1.0


class Producer(BulkProducer):
    """Sends messages. Defaults are those of RocketMQ's Java client.

    Args:
        name_server: ``host:port``, several separated by ``;``. Required unless ``transport`` is ``grpc``.
        group: Producer group. Required.
        transaction_check: A function that receives an undecided half message, which is a transactional message before it is
            committed or rolled back (a ``ReceivedMessage``, over gRPC a ``PoppedMessage``). It returns a ``TransactionState``
            or its name: ``COMMIT``, ``ROLLBACK`` or ``UNKNOWN``. A broker may ask any producer of the group.
        options: Options of a producer (docs/options.md), in snake_case or camelCase. Durations are milliseconds or text
            (``3s``), sizes bytes or text (``4m``).

    Raises:
        OptionError: An option is unknown, has a wrong value or does not belong to a producer. Lists all problems.
    """

    def __init__(
        self,
        name_server: str | None = None,
        group: str | None = None,
        *,
        transaction_check: TransactionCheck | None = None,
        **options: Unpack[ProducerOptions],
    ) -> None:
        parsed_options = parse_options("producer", name_server, group, options)
        if "group" not in parsed_options.given_fields:
            raise OptionError("option 'group' is required: name the producer group")
        settings, spool_settings = ProducerSettings.of(parsed_options), SpoolSettings.of(parsed_options)
        stored_ids, send_spool = _stored_ids(parsed_options), None
        sender_, self._traces = _traced_sender(parsed_options)
        try:
            if spool_settings is not None:
                send_spool = open_send_spool(
                    open_store(spool_settings.folder, parsed_options, spool_settings), sender_, settings
                )
            get_row_encoder = functools.partial(row_encoder, parsed_options)
            super().__init__(
                sender_,
                settings,
                transaction_check,
                replies(parsed_options),
                options=parsed_options,
                row_encoder=get_row_encoder,
                spool=send_spool,
                stored_ids=stored_ids,
            )
        except BaseException:
            if send_spool is not None:
                send_spool.close(Deadline.after(0))
            if self._traces is not None:
                self._traces.close(0)
            raise
        if telemetry := instrumentation(parsed_options, self.client_id):
            telemetry.instrument_producer(self)
        self._close_when_dropped(f"the producer of group {parsed_options.group!r}")

    def close(self, timeout_s: float | None = None) -> list[Unsent]:
        """Stop accepting messages, wait for pending replies and sends, and close the producer.

        With a spool, messages without an answer are spooled, and due records of the spool are sent while time is left. A second
        call does nothing. A call in a forked process does nothing, too. If the call is interrupted, it stops waiting, closes
        the producer, and logs the messages without an answer. Do not call ``close`` in a signal handler, because the signal may
        interrupt a send that holds a lock, and ``close`` might wait for this lock forever. Raise ``SystemExit`` in the handler,
        and close the producer in ``finally`` or at the end of ``with``.

        Args:
            timeout_s: Seconds to wait; the send timeout by default. After this time, requests without a reply fail with
                ``ClosedError``.

        Returns:
            The sends without an answer (topic, queue, message ids). The messages of these sends may be stored.
        """
        deadline = self._deadline(timeout_s)
        try:
            return super().close(timeout_s)
        finally:
            if self._traces is not None:
                self._traces.close(max(_MIN_LAST_TRACES_WAIT_S, deadline.remaining()))


def _traced_sender(options: Options) -> tuple[Sender, TraceProducer | None]:
    """Return the ``Sender`` of a producer, and the producer of its traces, which is None without option 'enableTrace'."""
    sender_ = sender(options)
    if (traces := trace_producer(options, options.group, "PRODUCE")) is None:
        return sender_, None
    from rocketmq_spark.producer.tracing import TracedSender

    return cast(Sender, TracedSender(sender_, traces.append, options.group, options.trace_topic, epoch_ms)), traces


def _stored_ids(options: Options) -> StoredIds | None:
    """Return the object that checks which messages are stored before a send is repeated; None without option
    'confirmAmbiguous'.
    """
    if not options.confirm_ambiguous:
        if "exactly_once_settle" in options.given_fields:
            raise OptionError("option 'exactlyOnceSettle' has no effect without 'confirmAmbiguous'")
        return None
    if not extras.is_installed("pyarrow"):
        raise OptionError(
            "option 'confirmAmbiguous' needs pyarrow, which is not installed",
            remedy=extras.install_command(extras.ARROW),
        )
    from rocketmq_spark.session.stored_ids import live_stored_ids

    return live_stored_ids(options)
