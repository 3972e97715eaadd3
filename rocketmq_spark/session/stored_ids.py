"""Creates the readers of stored messages (``stored``) that the exactly-once sink and ``confirmAmbiguous`` need."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from rocketmq_spark.base.clock import Clock
from rocketmq_spark.errors import OptionError
from rocketmq_spark.model import OffsetRange
from rocketmq_spark.options import Options, transport
from rocketmq_spark.session import client, offsets, puller, routes
from rocketmq_spark.stored.ends import QueueEnds, id_reader
from rocketmq_spark.stored.scan import MAX_GAP_S, LiveStoredIds, NotedStoredIds, ScanTools

_PULL_BATCH_SIZE = 1024


def scan_tools(
    options: Options,
    timeout_s: float | None = None,
    clock: Clock | None = None,
    on_ranges: Callable[[Sequence[OffsetRange]], None] = lambda parts: None,
) -> ScanTools:
    """Return the objects that a scan of stored ids uses. The scan waits ``timeout_s`` for a broker (default: the send timeout).
    It calls ``on_ranges`` with each list of ranges before it reads the ids in these ranges.
    """
    read_options = dataclasses.replace(
        options, pull_batch_size=_PULL_BATCH_SIZE, read_from="master", read_deadline=options.send_timeout
    )
    return ScanTools(
        routes(options),
        offsets(options),
        id_reader(lambda: puller(read_options), on_ranges),
        options.send_timeout if timeout_s is None else timeout_s,
        options.exactly_once_settle,
        options.request_timeout,
        options.group,
        clock or Clock(),
    )


def noted_stored_ids(options: Options, ends: QueueEnds) -> NotedStoredIds:
    """Return the stored ids for a task of the sink. ``ends`` are the end offsets of the queues, which the driver recorded before
    the batch.
    """
    return NotedStoredIds(lambda timeout_s, clock: scan_tools(options, timeout_s, clock), ends)


def close_connections(options: Options) -> None:
    """Close the connections of this process. The operating system drops the bytes that it has not sent yet."""
    client(options).rpc_client.pool.close_connections()


def live_stored_ids(options: Options) -> LiveStoredIds:
    """Return the stored ids for a producer with option ``confirmAmbiguous``. Raises ``OptionError`` for incompatible options."""
    if problems := list(_option_problems(options)):
        raise OptionError.of(problems)
    return LiveStoredIds(lambda timeout_s, clock: scan_tools(options, timeout_s, clock))


def _option_problems(options: Options) -> Iterator[str]:
    if options.transport == transport.GRPC:
        yield "option 'confirmAmbiguous' is true, but 'transport' is 'grpc': a Proxy does not report what brokers have stored"
    if options.on_send_failure == "spool":
        yield "option 'confirmAmbiguous' is true, but 'onSendFailure' is 'spool': spooled messages are sent later, unchecked"
    if options.require_store_ok == "ok":
        yield "option 'confirmAmbiguous' is true, but 'requireStoreOk' is 'ok': stored messages without a flush are sent again"
    settle_s, send_timeout_s = options.exactly_once_settle, options.send_timeout
    if settle_s <= MAX_GAP_S:
        yield f"option 'exactlyOnceSettle' is {settle_s:g} s; expected more than {MAX_GAP_S:g} s, for which a broker may hang"
    min_send_timeout_s = options.request_timeout + settle_s
    if send_timeout_s <= min_send_timeout_s:
        yield (
            f"option 'sendTimeout' is {send_timeout_s:g} s; with 'confirmAmbiguous' expected more than "
            f"{min_send_timeout_s:g} s, for one attempt ('requestTimeout') and a scan of stored ids ('exactlyOnceSettle')"
        )
