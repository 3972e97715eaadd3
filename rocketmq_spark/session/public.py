"""The classes that users make: their options parsed, and wired to what speaks with brokers or a Proxy."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Unpack, cast

from rocketmq_spark import options as options_table
from rocketmq_spark.base import extras
from rocketmq_spark.base.clock import Deadline, epoch_ms
from rocketmq_spark.base.lifecycle import Owner
from rocketmq_spark.client.pulls import wanted_of
from rocketmq_spark.consumer.ahead import ReadAhead
from rocketmq_spark.consumer.pop import simple_consumer
from rocketmq_spark.consumer.pull import pull_consumer
from rocketmq_spark.consumer.pull.assigned import FetchedPart
from rocketmq_spark.consumer.push import consumer as group_consumer
from rocketmq_spark.consumer.push.running import ConsumerTools
from rocketmq_spark.consumer.result import Replier
from rocketmq_spark.consumer.settings import ConsumerSettings
from rocketmq_spark.errors import OptionError
from rocketmq_spark.model import Message, MessageQueue, OffsetRange, PullRequest, ReceivedMessage
from rocketmq_spark.options import Options, transport
from rocketmq_spark.ports import Sender
from rocketmq_spark.producer.confirming import StoredIds
from rocketmq_spark.producer.engine import Unsent
from rocketmq_spark.producer.requests import RequestProducer
from rocketmq_spark.producer.settings import ProducerSettings
from rocketmq_spark.producer.transactions import TransactionCheck
from rocketmq_spark.queues.environment import scope_of
from rocketmq_spark.session import member, pop_member, puller, replies, sender
from rocketmq_spark.session.spools import open_store, resending
from rocketmq_spark.spool.folders import SpoolSettings

if TYPE_CHECKING:
    from rocketmq_spark.consumer.tracing import ListenerTraces
    from rocketmq_spark.options.typed import (
        ConsumerOptions,
        ProducerOptions,
        PullConsumerOptions,
        SimpleConsumerOptions,
    )
    from rocketmq_spark.producer.tracing import TraceProducer
    from rocketmq_spark.pull.reading import PlainRun
    from rocketmq_spark.session.telemetry import Instrumentation


logger = logging.getLogger(__name__)

# For the traces of the last sends, where the time of a close is over.
_LAST_TRACES_S = 1.0


def _parsed(role: str, name_server: str | None, group: str | None, keywords: Mapping[str, object]) -> Options:
    """Options of a public constructor; None is what is not given."""
    given = {"name_server": name_server, "group": group, **keywords}
    return options_table.parse(given, keywords=True).for_role(role)


class Producer(RequestProducer):
    """Sends messages. Defaults are those of RocketMQ's Java client.

    Args:
        name_server: ``host:port``, several separated by ``;``. Required unless ``transport`` is ``grpc``.
        group: Producer group. Required.
        transaction_check: A function that receives an undecided half message (``ReceivedMessage``) and returns a
            ``TransactionState`` or its name: ``COMMIT``, ``ROLLBACK`` or ``UNKNOWN``. A broker may ask any producer of the group.
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
        parsed = _parsed("producer", name_server, group, options)
        if "group" not in parsed.given:
            raise OptionError("option 'group' is required: name the producer group")
        _check_telemetry(parsed)
        settings, spool = ProducerSettings.of(parsed), SpoolSettings.of(parsed)
        stored, opened = _stored_ids(parsed), None
        send, self._traces = _traced_sender(parsed)
        try:
            if spool is not None:
                opened = resending(open_store(spool.folder, parsed, spool), send, settings)
            super().__init__(send, settings, transaction_check, replies(parsed), spool=opened, stored=stored)
        except BaseException:
            if opened is not None:
                opened.close(Deadline.after(0))
            if self._traces is not None:
                self._traces.close(0)
            raise
        if telemetry := _telemetry(self, parsed):
            telemetry.instrument_producer(self)

    def close(self, timeout_s: float | None = None) -> list[Unsent]:
        deadline = self._deadline(timeout_s)
        try:
            return super().close(timeout_s)
        finally:
            if self._traces is not None:
                self._traces.close(max(_LAST_TRACES_S, deadline.remaining()))


def _traced_sender(options: Options) -> tuple[Sender, TraceProducer | None]:
    """What a producer sends with, and who sends its traces if it is traced."""
    plain = sender(options)
    if (traces := _traces(options, options.group, "PRODUCE")) is None:
        return plain, None
    from rocketmq_spark.producer.tracing import TracedSender

    return cast(Sender, TracedSender(plain, traces.append, options.group, options.trace_topic, epoch_ms)), traces


def _listener_traces(options: Options, group: str) -> ListenerTraces | None:
    if (traces := _traces(options, group, "CONSUME")) is None:
        return None
    from rocketmq_spark.consumer.tracing import ListenerTraces

    return ListenerTraces(traces.append, traces.close)


def _traces(options: Options, group: str, kind: str) -> TraceProducer | None:
    if not options.enable_trace:
        return None
    from rocketmq_spark.producer.tracing import TraceProducer

    try:
        return TraceProducer(sender(options), group, kind, options.trace_topic)
    except RuntimeError as e:  # there can be no more threads, which must not keep a consumer from its start
        logger.warning("group %s is not traced: %s", group, e)
        return None


def _stored_ids(options: Options) -> StoredIds | None:
    """What a producer looks up before it repeats a send; None for one that repeats at once."""
    if not options.confirm_ambiguous:
        if "exactly_once_settle" in options.given:
            raise OptionError("option 'exactlyOnceSettle' means nothing without 'confirmAmbiguous'")
        return None
    if not extras.installed("pyarrow"):
        raise OptionError(
            "option 'confirmAmbiguous' needs pyarrow, which is not installed", remedy=extras.command(extras.ARROW)
        )
    from rocketmq_spark.session.looks import asked_ids

    return asked_ids(options)


class Consumer(group_consumer.BaseConsumer):
    """Consumes as a member of a group. Defaults are those of RocketMQ's Java client.

    With ``transport="grpc", proxy_endpoint="host:port"`` a Proxy hands out the messages (docs/grpc.md).

    Args:
        name_server: ``host:port``, several separated by ``;``. Required unless ``transport`` is ``grpc``.
        group: Consumer group. Required.
        options: Options of a consumer (docs/options.md), in snake_case or camelCase. Durations are milliseconds or text
            (``3s``), sizes bytes or text (``4m``).

    Raises:
        OptionError: An option is unknown, has a wrong value or does not belong to a consumer. Lists all problems.
    """

    def __init__(
        self, name_server: str | None = None, group: str | None = None, **options: Unpack[ConsumerOptions]
    ) -> None:
        parsed = _parsed("consumer", name_server, group, options)
        if "group" not in parsed.given:
            raise OptionError("option 'group' is required: name the consumer group")
        _check_telemetry(parsed)
        settings = ConsumerSettings.of(parsed, scope_of(parsed).on_wire)
        if settings.popped:
            super().__init__(pop_member(parsed), settings)
        else:
            group = settings.group
            tools = ConsumerTools(
                read_ahead=_read_ahead(parsed, group),
                replier=_replier(parsed, group),
                traces=partial(_listener_traces, parsed, group),
            )
            super().__init__(member(parsed), settings, tools)
        if telemetry := _telemetry(self, parsed):
            telemetry.instrument_consumer(self)


class PullConsumer(pull_consumer.BasePullConsumer):
    """Reads queues that its group shares, or that its user names, whenever it is polled.

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
        parsed = _parsed("pull consumer", name_server, group, options)
        if "group" not in parsed.given:
            raise OptionError("option 'group' is required: name the consumer group")
        _check_telemetry(parsed)
        settings = ConsumerSettings.of(parsed, scope_of(parsed).on_wire)
        super().__init__(member(parsed), settings, _arrow, read_ahead=_read_ahead(parsed, settings.group))
        if telemetry := _telemetry(self, parsed):
            telemetry.instrument_receives(self, "poll", partial(pull_consumer.take_back, self))


class SimpleConsumer(simple_consumer.BaseSimpleConsumer):
    """Receives messages from a Proxy and acknowledges each by itself (docs/grpc.md).

    Args:
        name_server: Not used over gRPC; give ``proxy_endpoint``.
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
        parsed = _parsed("simple consumer", name_server, group, options)
        if parsed.transport != transport.GRPC:
            raise OptionError(
                "option 'transport' of a SimpleConsumer is 'grpc'; expected no other: it speaks with a Proxy"
            )
        if "group" not in parsed.given:
            raise OptionError("option 'group' is required: name the consumer group")
        _check_telemetry(parsed)
        super().__init__(pop_member(parsed), parsed.group, parsed.request_timeout)
        if telemetry := _telemetry(self, parsed):
            telemetry.instrument_receives(self, "receive")


def _check_telemetry(options: Options) -> None:
    """Before anything is opened: who installs what is missing tries again."""
    if options.open_telemetry and not extras.installed("opentelemetry"):
        raise OptionError(
            "option 'openTelemetry' needs opentelemetry-api, which is not installed", remedy=extras.command(extras.OTEL)
        )


def _telemetry(of: Producer | Consumer | PullConsumer | SimpleConsumer, options: Options) -> Instrumentation | None:
    if not options.open_telemetry:
        return None
    from rocketmq_spark.session.telemetry import instrumentation

    return instrumentation(options.group, of.client_id, options.namespace)


def _arrow(parts: Sequence[FetchedPart]) -> tuple[Any, int | None]:
    from rocketmq_spark.columnar.decode.decoder import batch_of  # here, for who polls messages needs no Arrow

    given = {(part.queue, part.filter): part.given() for part in parts if part.begun > part.start}
    answers = (((part.queue, part.start, part.ends, part.stored), part.filter) for part in parts)
    batch, whole = batch_of(answers, given)
    return batch, None if whole else next(islice(parts[0].read(), batch.num_rows, None)).queue_offset


def _replier(options: Options, group: str) -> Replier | None:
    """How listeners answer requests."""
    if (port := replies(options)) is None:
        return None
    owner = Owner("consumer")

    def reply(to: ReceivedMessage, body: bytes, properties: Mapping[str, str] | None) -> None:
        owner.check(False)
        answer = Message(to.topic, body, properties=properties)
        port.reply(to, answer, group, Deadline.after(options.request_timeout))

    return reply


def _read_ahead(options: Options, group: str) -> ReadAhead | None:
    """How a consumer reads ahead; None where numpy is not installed, which that needs: 13 MiB, loaded by the first backlog."""
    if not extras.installed("numpy"):
        return None
    inside = scope_of(options)

    @cache
    def runs() -> Callable[[Sequence[OffsetRange], int, int], PlainRun]:
        from rocketmq_spark.pull.reading import PlainRun

        return partial(PlainRun, replace(puller(options, "hint"), group=group))

    def messages(queue: MessageQueue, start: int, end: int, stored: bytes | memoryview) -> Iterator[ReceivedMessage]:
        return wanted_of(PullRequest(group, queue, start), stored, inside, end)

    return ReadAhead(lambda ranges, offsets, size: runs()(ranges, offsets, size), messages)
