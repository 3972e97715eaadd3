"""The public consumers: they parse their options and create the client for brokers or a Proxy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Unpack

from rocketmq_spark.base import extras
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.process import OwnerProcess
from rocketmq_spark.client.pulled_messages import requested_messages
from rocketmq_spark.consumer import pull, simple
from rocketmq_spark.consumer import push as group_consumer
from rocketmq_spark.consumer.assigned import FetchedPart
from rocketmq_spark.consumer.listener import Replier
from rocketmq_spark.consumer.prefetch import BacklogReader
from rocketmq_spark.consumer.rows import RowsDecoder
from rocketmq_spark.consumer.settings import ConsumerSettings
from rocketmq_spark.consumer.tools import ConsumerTools
from rocketmq_spark.errors import DecodeError, OptionError
from rocketmq_spark.model import Message, MessageQueue, OffsetRange, PullRequest, ReceivedMessage
from rocketmq_spark.options import Options, transport
from rocketmq_spark.queues.environment import scope_of
from rocketmq_spark.session import instrumentation, member, parse_options, pop_member, puller, replies, trace_producer

if TYPE_CHECKING:
    from rocketmq_spark.consumer.tracing import ListenerTraces
    from rocketmq_spark.options.typed import ConsumerOptions, PullConsumerOptions, SimpleConsumerOptions
    from rocketmq_spark.pull.read_ahead import PlainRead


class Consumer(group_consumer.BaseConsumer):
    """Consumes as a member of a group. Defaults are those of RocketMQ's Java client.

    With ``transport="grpc", proxy_endpoint="host:port"`` a Proxy hands out the messages (docs/grpc.md). With ``arrow=True`` the
    listener gets Arrow record batches (docs/how-to/record-batches.md).

    Args:
        name_server: ``host:port``, several separated by ``;``. Required unless ``transport`` is ``grpc``.
        group: Consumer group. Required.
        options: Options of a consumer (docs/options.md), in snake_case or camelCase. Durations are milliseconds or text
            (``3s``), sizes bytes or text (``4m``).

    Raises:
        OptionError: An option is unknown, has a wrong value or does not belong to a consumer. Lists all problems. Also raised
            if option ``arrow`` is set, and pyarrow or numpy is not installed.
    """

    def __init__(
        self, name_server: str | None = None, group: str | None = None, **options: Unpack[ConsumerOptions]
    ) -> None:
        parsed_options = parse_options("consumer", name_server, group, options)
        if "group" not in parsed_options.given_fields:
            raise OptionError("option 'group' is required: name the consumer group")
        settings = ConsumerSettings.from_options(parsed_options, scope_of(parsed_options).name_on_wire)
        if settings.uses_pop:
            super().__init__(pop_member(parsed_options), settings)
        else:
            group = settings.group
            tools = ConsumerTools(
                backlog_reader=_backlog_reader(parsed_options, group),
                replier=_replier(parsed_options, group),
                make_traces=partial(_listener_traces, parsed_options, group),
                rows_decoder=_rows_decoder(settings) if settings.arrow else None,
            )
            super().__init__(member(parsed_options), settings, tools)
        if telemetry := instrumentation(parsed_options, self.client_id):
            telemetry.instrument_consumer(self, "_new_running")


class PullConsumer(pull.BasePullConsumer):
    """Returns messages when you call ``poll``. The messages are from the queues that the group assigns to this consumer
    (``subscribe``), or from queues that you name (``assign``).

    Args:
        name_server: ``host:port``, several separated by ``;``. Required.
        group: Consumer group. Required.
        options: Options of a pull consumer (docs/options.md), in snake_case or camelCase. Durations are milliseconds or
            text (``3s``), sizes bytes or text (``4m``).

    Raises:
        OptionError: An option is unknown, has a wrong value or does not belong to a pull consumer. Lists all problems.
    """

    def __init__(
        self, name_server: str | None = None, group: str | None = None, **options: Unpack[PullConsumerOptions]
    ) -> None:
        parsed_options = parse_options("pull consumer", name_server, group, options)
        if "group" not in parsed_options.given_fields:
            raise OptionError("option 'group' is required: name the consumer group")
        settings = ConsumerSettings.from_options(parsed_options, scope_of(parsed_options).name_on_wire)
        super().__init__(
            member(parsed_options),
            settings,
            _arrow_batch,
            backlog_reader=_backlog_reader(parsed_options, settings.group),
        )
        if telemetry := instrumentation(parsed_options, self.client_id):
            telemetry.instrument_receives(self, "_poll", itemgetter(0))
        self._close_when_dropped(f"the pull consumer of group {parsed_options.group!r}")


class SimpleConsumer(simple.BaseSimpleConsumer):
    """Receives messages from a Proxy. Call ``ack`` for each message that is done; a message without ``ack`` is delivered again
    (docs/grpc.md).

    Args:
        name_server: Not used. Pass ``group`` and ``proxy_endpoint`` by keyword.
        group: Consumer group. Required.
        options: Options of a simple consumer (docs/options.md), in snake_case or camelCase; ``proxy_endpoint`` is required.
            Durations are milliseconds or text (``3s``), sizes bytes or text (``4m``).

    Raises:
        OptionError: An option is unknown, has a wrong value or does not belong to a simple consumer. Lists all problems.
    """

    def __init__(
        self, name_server: str | None = None, group: str | None = None, **options: Unpack[SimpleConsumerOptions]
    ) -> None:
        options.setdefault("transport", transport.GRPC)
        parsed_options = parse_options("simple consumer", name_server, group, options)
        if parsed_options.transport != transport.GRPC:
            raise OptionError("option 'transport' of a SimpleConsumer must be 'grpc', because it connects to a Proxy")
        if "group" not in parsed_options.given_fields:
            raise OptionError("option 'group' is required: name the consumer group")
        super().__init__(pop_member(parsed_options), parsed_options.group, parsed_options.request_timeout)
        if telemetry := instrumentation(parsed_options, self.client_id):
            telemetry.instrument_receives(self, "receive")
        self._close_when_dropped(f"the simple consumer of group {parsed_options.group!r}")


def _listener_traces(options: Options, group: str) -> ListenerTraces | None:
    if (traces := trace_producer(options, group, "CONSUME")) is None:
        return None
    from rocketmq_spark.consumer.tracing import ListenerTraces

    return ListenerTraces(traces.append, traces.close)


def _arrow_batch(parts: Sequence[FetchedPart]) -> tuple[Any, int | None]:
    """Return a record batch of ``parts``. If the batch lacks the last messages of the first part, also return the offset at
    which these messages begin.
    """
    from rocketmq_spark.columnar.decode.decoder import batch_of_answers  # only ``poll_arrow`` needs Arrow

    skip_counts = {
        (part.queue, part.filter): part.returned_count() for part in parts if part.returned_up_to > part.start
    }
    answers = (((part.queue, part.start, part.ends, part.stored), part.filter) for part in parts)
    try:
        batch, is_complete = batch_of_answers(answers, skip_counts)
        return batch, None if is_complete else _offset_after(parts[0], batch.num_rows)
    except DecodeError as e:
        e.remedy = "poll() returns the message undecoded, and continues after it"
        raise


def _rows_decoder(settings: ConsumerSettings) -> RowsDecoder:
    """Return the decoder of answers to record batches. Raises ``OptionError`` if pyarrow or numpy is not installed."""
    for package in ("pyarrow", "numpy"):
        if not extras.is_installed(package):
            problem = f"option 'arrow' needs {package}, which is not installed"
            raise OptionError(problem, remedy=extras.install_command(extras.ARROW))
    from rocketmq_spark.columnar.decode.decoder import batch_of_answers
    from rocketmq_spark.columnar.decode.rows import batch_of_messages

    def decode_answers(parts: Sequence[FetchedPart]) -> Any:
        try:
            batch, is_complete = batch_of_answers(
                ((part.queue, part.start, part.ends, part.stored), part.filter) for part in parts
            )
        except DecodeError:
            return None
        return batch if is_complete else None

    # For its first array, pyarrow imports pandas, which takes a second. The first call of the listener must not wait for this
    # import.
    batch_of_messages(())
    return RowsDecoder(settings.consume_batch_max_size, decode_answers, batch_of_messages)


def _offset_after(part: FetchedPart, row_count: int) -> int:
    """Return the offset after the first ``row_count`` rows. Raises ``DecodeError`` if the offset is uncertain, for example
    after a stored batch with impossible offsets. ``row_count`` counts each message of such a batch, but ``poll`` returns the
    batch as one message.
    """
    for index, message in enumerate(part.read()):
        if index == row_count:
            return message.queue_offset
        if message.decode_error is not None:
            raise DecodeError(message.decode_error, topic=part.queue.topic, queue=str(part.queue))
    raise DecodeError(
        f"an answer has {row_count} rows, but fewer messages", topic=part.queue.topic, queue=str(part.queue)
    )


def _replier(options: Options, group: str) -> Replier | None:
    """Return the object by which listeners answer requests."""
    if (replies_port := replies(options)) is None:
        return None
    owner = OwnerProcess("consumer")

    def reply(request: ReceivedMessage, body: bytes, properties: Mapping[str, str] | None) -> None:
        owner.check(False)
        answer = Message(request.topic, body, properties=properties)
        replies_port.reply(request, answer, group, Deadline.after(options.request_timeout))

    return reply


def _backlog_reader(options: Options, group: str) -> BacklogReader | None:
    """Return the reader of backlogs; None if numpy is not installed. The reader imports numpy, which needs 13 MiB, at the first
    backlog.
    """
    if not extras.is_installed("numpy"):
        return None
    scope = scope_of(options)

    @cache
    def read_opener() -> Callable[[Sequence[OffsetRange], int, int], PlainRead]:
        from rocketmq_spark.pull.read_ahead import PlainRead

        return partial(PlainRead, replace(puller(options, "hint"), group=group))

    def decode_messages(
        queue: MessageQueue, start_offset: int, end_offset: int, stored: bytes | memoryview
    ) -> Iterable[ReceivedMessage]:
        return requested_messages(PullRequest(group, queue, start_offset), stored, scope, end_offset)

    return BacklogReader(lambda ranges, offsets, size: read_opener()(ranges, offsets, size), decode_messages)
