"""What ``send_arrow`` and ``send_many`` are given: checked as a whole, and cut into portions for a ``RowCall``."""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from rocketmq_spark.columnar.encode.columns import (
    INT,
    TEXT,
    Key,
    RowColumn,
    batch_of,
    check_columns,
    check_features,
    of_arrow,
    plain_batch,
    plain_bytes,
)
from rocketmq_spark.columnar.encode.properties import TIMERS, BadRows
from rocketmq_spark.errors import MessageRefused, OptionError
from rocketmq_spark.model import Message, MessageQueue
from rocketmq_spark.options import Options, transport
from rocketmq_spark.producer.rows.calls import (
    CallTools,
    MessagesOfCall,
    MessagesOfIterator,
    Portion,
    RowCall,
    RowsOfCall,
    RowsOfReader,
)
from rocketmq_spark.producer.rows.routing import log_choice
from rocketmq_spark.producer.rows.sent import SentRows
from rocketmq_spark.queues.selection import Select

BATCH_BYTES = 1 << 20
# So much is encoded at once: several batches, and few enough to stay in caches.
PORTION_BYTES, PORTION_ROWS = 8 << 20, 1 << 16
PORTION_MESSAGES, CHUNK_MESSAGES = 1 << 14, 256
# Of messages, which may be large, so many are taken at most before their bytes are looked at.
_MAX_UNSIZED = 32
# A table of smaller chunks is copied into larger ones.
SMALL_CHUNK_ROWS = 4096


class MessageTarget(NamedTuple):
    """Where the messages of ``send_many`` go."""

    queue: MessageQueue | None = None
    key: Key | None = None


_MESSAGE_COLUMNS = [RowColumn(name, TEXT, TEXT) for name in ("body", "topic", "shardingKey")]
_QUEUE_COLUMNS = [*_MESSAGE_COLUMNS, RowColumn("queueId", INT, INT), RowColumn("brokerName", TEXT, TEXT)]


class RowTarget(NamedTuple):
    """What the caller of ``send_arrow`` says beside the rows."""

    topic: str | None = None
    selector: str | Select | None = None
    timeout_s: float | None = None


def send_arrow(tools: CallTools, data: Any, how: RowTarget) -> SentRows:
    """``BulkProducer.send_arrow``. Anything that exports an Arrow stream is read as a reader."""
    kind: type[BadRows] = RowsOfCall
    batches: Iterable[pa.RecordBatch]
    if isinstance(data, pa.RecordBatch):
        schema, batches = data.schema, [data]
    elif isinstance(data, pa.Table):
        schema, batches = data.schema, _with_large_chunks(data).to_batches()
    elif hasattr(data, "__arrow_c_stream__"):
        reader = data if isinstance(data, pa.RecordBatchReader) else pa.RecordBatchReader.from_stream(data)
        kind, schema, batches = RowsOfReader, reader.schema, reader
    else:
        raise OptionError(f"send_arrow got {type(data).__name__}; expected a Table, RecordBatch or RecordBatchReader")
    options, columns = call_options(tools.rows.options, how, of_arrow(schema))
    log_choice(options, columns, once=True)
    groups: Iterable[Sequence[Portion]] = _portions_of_arrow(
        batches, columns, tools.is_closing if kind is RowsOfReader else _never
    )
    if kind is RowsOfCall:
        groups = [[portion for group in groups for portion in group]]
    return RowCall(tools, options, kind).run(groups)


def send_many(tools: CallTools, messages: Iterable[Message], how: RowTarget, place: MessageTarget) -> SentRows:
    """``BulkProducer.send_many``."""
    features = tools.rows.settings.features
    if place.queue is not None and place.key is not None:
        raise OptionError("send_many got a queue and a key; expected one of them, for a key chooses the queue")
    if place.queue is not None and features.chooses_queues:
        raise MessageRefused(f"the messages name {place.queue}, but {features.chooses_queues}")
    options, _ = call_options(tools.rows.options, how, _MESSAGE_COLUMNS if place.queue is None else _QUEUE_COLUMNS)
    kind = MessagesOfCall if isinstance(messages, Sequence) else MessagesOfIterator
    ends = tools.is_closing if kind is MessagesOfIterator else _never
    groups: Iterable[Sequence[Portion]] = _portions_of_messages(iter(messages), kind, place, features.priorities, ends)
    if kind is MessagesOfCall:
        groups = [[portion for group in groups for portion in group]]
    return RowCall(tools, options, kind).run(groups)


def _never() -> bool:
    return False


def _portions_of_arrow(
    batches: Iterable[pa.RecordBatch], columns: Mapping[str, str], ends: Callable[[], bool]
) -> Iterator[Sequence[Portion]]:
    for batch in batches:
        last = ends()  # as of messages
        yield [Portion(each, columns) for each in _split_batch(batch, columns)]
        if last:
            return


def _portions_of_messages(
    messages: Iterator[Message], kind: type[BadRows], place: MessageTarget, priorities: bool, ends: Callable[[], bool]
) -> Iterator[Sequence[Portion]]:
    """Portions of enough messages for some batches, until it ``ends``. They become columns a few at a time: what Python's garbage
    collector finds alive it looks at again and again, and messages that go soon it does not.
    """
    first = 0
    parts: list[pa.RecordBatch] = []
    last = False  # what ends is given up, so that the result says why there is no more
    while few := [] if last or (parts and ends()) else _next_messages(messages):
        bad_rows = kind(first)
        batch = batch_of(few, bad_rows, *place)
        if "priority" in batch.schema.names and not priorities:
            bad_rows.rows(np.arange(len(few)), "it or another has a priority, which only gRPC supports")
        if place.queue is not None:
            elsewhere = [each.topic != place.queue.topic for each in few]
            bad_rows.add(np.array(elsewhere), f"its topic is not that of {place.queue}")
        bad_rows.raise_if_any()
        first += len(few)
        if parts and batch.schema != parts[0].schema:
            last = ends()
            yield [_portion(parts)]
            parts = []
        parts.append(batch)
        if sum(map(len, parts)) >= PORTION_MESSAGES or sum([part.nbytes for part in parts]) >= PORTION_BYTES:
            last = ends()
            yield [_portion(parts)]
            parts = []
    if parts:
        yield [_portion(parts)]


_body = operator.attrgetter("body")


def _next_messages(messages: Iterator[Message]) -> list[Message]:
    """The next ones, fewer if they are large: what an iterator would give is not in memory yet."""
    found: list[Message] = []
    size = 0
    while size < PORTION_BYTES and (left := CHUNK_MESSAGES - len(found)):
        found += (more := list(itertools.islice(messages, min(len(found) + 1, _MAX_UNSIZED, left))))
        if not more:
            break
        try:
            size += sum(map(len, map(_body, more)))
        except (AttributeError, TypeError):  # what is no message is refused with its number
            break
    return found


def _portion(parts: Sequence[pa.RecordBatch]) -> Portion:
    (batch,) = pa.Table.from_batches(parts).combine_chunks().to_batches()
    return Portion(batch, {name: name for name in batch.schema.names})


def _with_large_chunks(table: pa.Table) -> pa.Table:
    """Each chunk is encoded by itself, and small ones would make small batches."""
    chunks = max((column.num_chunks for column in table.columns), default=1)
    return table.combine_chunks() if chunks > 1 and len(table) < chunks * SMALL_CHUNK_ROWS else table


def _split_batch(batch: pa.RecordBatch, columns: Mapping[str, str]) -> Iterator[pa.RecordBatch]:
    rows = len(batch)
    step = max(1, min(PORTION_ROWS, rows * PORTION_BYTES // max(1, plain_bytes(batch))))
    for start in range(0, rows, step):
        yield from _halve_large(batch.slice(start, step), columns)


def _halve_large(batch: pa.RecordBatch, columns: Mapping[str, str]) -> Iterator[pa.RecordBatch]:
    """In smaller parts where the large rows of a batch stand together."""
    if len(batch) > 1 and plain_bytes(batch) > 2 * PORTION_BYTES:
        middle = len(batch) // 2
        yield from _halve_large(batch.slice(0, middle), columns)
        yield from _halve_large(batch.slice(middle), columns)
    else:
        yield plain_batch(batch, columns)


_SELECTORS = {name.lower(): name for name in (*transport.SELECTORS, "column", "environment")}


def call_options(options: Options, how: RowTarget, columns: Sequence[RowColumn]) -> tuple[Options, dict[str, str]]:
    """The options of one call, and its columns by role. One ``OptionError`` lists everything that is wrong."""
    if isinstance(how.selector, str):
        how = how._replace(selector=_SELECTORS.get(how.selector.lower(), how.selector))
    by_role, problems = check_columns(columns, how.topic, how.selector)
    features = transport.features(options)
    problems += check_features(by_role, features) + _selector_problems(options, how, by_role)
    if timed := [by_role[name] for name in TIMERS if name in by_role and options.long_delay == "dmq"]:
        problems.append(f"column {timed[0]!r} cannot be sent with option 'longDelay' dmq: send such rows with send")
    if problems:
        raise OptionError.of(problems)
    most = options.max_message_size
    return dataclasses.replace(
        options,
        topic=how.topic,
        queue_selector=how.selector or "roundRobin",
        given=options.given | {"queue_selector"} if how.selector is not None else options.given - {"queue_selector"},
        auto_batch=True,
        batch_max_bytes=min(options.batch_max_bytes or BATCH_BYTES, most),
        send_timeout=options.send_timeout if how.timeout_s is None else how.timeout_s,
    ), by_role


def _selector_problems(options: Options, how: RowTarget, by_role: Mapping[str, str]) -> list[str]:
    selector, chooses = how.selector, transport.features(options).chooses_queues
    if chooses and "queueid" in by_role:
        return [f"column {by_role['queueid']!r} names a queue, but {chooses}"]
    if selector is None or (callable(selector) and not chooses):
        return []
    taken = transport.SELECTORS if chooses else tuple(_SELECTORS.values())
    if selector not in taken and (chooses or ":" not in str(selector)):
        why = f", for {chooses}" if chooses else ", or a function"
        return [f"selector is {selector!r}; expected one of {', '.join(taken)}{why}"]
    if selector == "environment" and options.environment is None:
        return ["selector 'environment' needs option 'environment'"]
    return []
