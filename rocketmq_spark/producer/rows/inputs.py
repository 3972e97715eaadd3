"""The arguments of ``send_arrow`` and ``send_many``: checked, and split into portions for a ``RowCall``."""

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
    RowColumn,
    ShardingKeyOf,
    check_columns,
    check_features,
    converted_batch,
    converted_bytes,
    message_batch,
    row_columns,
)
from rocketmq_spark.columnar.encode.properties import TIMER_COLUMNS, BadRows
from rocketmq_spark.errors import MessageRefused, OptionError
from rocketmq_spark.model import Message, MessageQueue
from rocketmq_spark.options import Options, transport
from rocketmq_spark.producer.rows.calls import (
    BadMessagesOfCall,
    BadMessagesOfIterator,
    BadRowsOfCall,
    BadRowsOfReader,
    CallTools,
    Portion,
    RowCall,
)
from rocketmq_spark.producer.rows.routing import log_choice
from rocketmq_spark.producer.rows.sent import SentRows
from rocketmq_spark.queues.selection import Selector

DEFAULT_BATCH_BYTES = 1 << 20
# The rows of a portion are encoded together. A portion is large enough for several batches, and small enough for the caches of
# the processor.
PORTION_BYTES, PORTION_ROWS = 8 << 20, 1 << 16
# The maximum number of messages in a portion, and of messages that become columns at once.
PORTION_MESSAGES, CHUNK_MESSAGES = 1 << 14, 256
# The maximum number of messages that are taken from an iterator before their bytes are counted, because messages may be large.
_MAX_UNCOUNTED_MESSAGES = 32
# If the chunks of a table have fewer rows than this on average, they are combined, because small chunks make small batches.
SMALL_CHUNK_ROWS = 4096


class MessageTarget(NamedTuple):
    """The queue of the messages of ``send_many``, or the function that returns a message's key."""

    queue: MessageQueue | None = None
    key: ShardingKeyOf | None = None


_MESSAGE_COLUMNS = [RowColumn(name, TEXT, TEXT) for name in ("body", "topic", "shardingKey")]
_QUEUE_COLUMNS = [*_MESSAGE_COLUMNS, RowColumn("queueId", INT, INT), RowColumn("brokerName", TEXT, TEXT)]


class RowTarget(NamedTuple):
    """The arguments of ``send_arrow`` besides the rows."""

    topic: str | None = None
    selector: str | Selector | None = None
    timeout_s: float | None = None


def send_arrow(tools: CallTools, data: Any, target: RowTarget) -> SentRows:
    """Implements ``BulkProducer.send_arrow``. An object that exports an Arrow stream is read as a reader."""
    bad_rows_type: type[BadRows] = BadRowsOfCall
    batches: Iterable[pa.RecordBatch]
    if isinstance(data, pa.RecordBatch):
        schema, batches = data.schema, [data]
    elif isinstance(data, pa.Table):
        schema, batches = data.schema, _with_large_chunks(data).to_batches()
    elif hasattr(data, "__arrow_c_stream__"):
        reader = data if isinstance(data, pa.RecordBatchReader) else pa.RecordBatchReader.from_stream(data)
        bad_rows_type, schema, batches = BadRowsOfReader, reader.schema, reader
    else:
        raise OptionError(f"send_arrow got {type(data).__name__}; expected a Table, RecordBatch or RecordBatchReader")
    options, columns = call_options(tools.row_tools.options, target, row_columns(schema))
    log_choice(options, columns, once=True)
    groups: Iterable[Sequence[Portion]] = _portions_of_arrow(
        batches, columns, tools.is_closing if bad_rows_type is BadRowsOfReader else _is_never_closing
    )
    if bad_rows_type is BadRowsOfCall:
        groups = [[portion for group in groups for portion in group]]
    return RowCall(tools, options, bad_rows_type).run(groups)


def send_many(
    tools: CallTools, messages: Iterable[Message], target: RowTarget, message_target: MessageTarget
) -> SentRows:
    """Implements ``BulkProducer.send_many``."""
    features = tools.row_tools.settings.features
    if message_target.queue is not None and message_target.key is not None:
        raise OptionError(
            "send_many got a queue and a key; expected only one of them, because the key chooses the queue"
        )
    if message_target.queue is not None and features.queue_choice_problem:
        raise MessageRefused(f"the messages name {message_target.queue}, but {features.queue_choice_problem}")
    options, _ = call_options(
        tools.row_tools.options, target, _MESSAGE_COLUMNS if message_target.queue is None else _QUEUE_COLUMNS
    )
    bad_rows_type = BadMessagesOfCall if isinstance(messages, Sequence) else BadMessagesOfIterator
    is_closing = tools.is_closing if bad_rows_type is BadMessagesOfIterator else _is_never_closing
    groups: Iterable[Sequence[Portion]] = _portions_of_messages(
        iter(messages), bad_rows_type, message_target, features.supports_priorities, is_closing
    )
    if bad_rows_type is BadMessagesOfCall:
        groups = [[portion for group in groups for portion in group]]
    return RowCall(tools, options, bad_rows_type).run(groups)


def _is_never_closing() -> bool:
    return False


def _portions_of_arrow(
    batches: Iterable[pa.RecordBatch], columns: Mapping[str, str], is_closing: Callable[[], bool]
) -> Iterator[Sequence[Portion]]:
    for batch in batches:
        is_last = is_closing()  # stop after the portion at which the producer begins to close
        yield [Portion(part, columns) for part in _split_batch(batch, columns)]
        if is_last:
            return


def _portions_of_messages(
    messages: Iterator[Message],
    bad_rows_type: type[BadRows],
    target: MessageTarget,
    supports_priorities: bool,
    is_closing: Callable[[], bool],
) -> Iterator[Sequence[Portion]]:
    """Yield messages as portions of columns, each large enough for several batches. Stops after the portion at which
    ``is_closing`` returns True.

    A few messages at a time become columns, so that the messages are freed soon. Python's garbage collector repeatedly visits
    objects that stay alive.
    """
    first_row = 0
    parts: list[pa.RecordBatch] = []
    is_last = False  # whether the producer was closing when the last portion was yielded
    while chunk := [] if is_last or (parts and is_closing()) else _next_messages(messages):
        bad_rows = bad_rows_type(first_row)
        batch = message_batch(chunk, bad_rows, *target)
        if "priority" in batch.schema.names and not supports_priorities:
            bad_rows.add_rows(np.arange(len(chunk)), "this message or another has a priority, which only gRPC supports")
        if target.queue is not None:
            is_of_other_topic = [message.topic != target.queue.topic for message in chunk]
            bad_rows.add(np.array(is_of_other_topic), f"its topic is not that of {target.queue}")
        bad_rows.raise_if_any()
        first_row += len(chunk)
        if parts and batch.schema != parts[0].schema:
            is_last = is_closing()
            yield [_portion(parts)]
            parts = []
        parts.append(batch)
        if sum(map(len, parts)) >= PORTION_MESSAGES or sum([part.nbytes for part in parts]) >= PORTION_BYTES:
            is_last = is_closing()
            yield [_portion(parts)]
            parts = []
    if parts:
        yield [_portion(parts)]


_body_of = operator.attrgetter("body")


def _next_messages(messages: Iterator[Message]) -> list[Message]:
    """The next messages of an iterator; fewer if they are large, so that they need little memory."""
    chunk: list[Message] = []
    size = 0
    while size < PORTION_BYTES and (max_count := CHUNK_MESSAGES - len(chunk)):
        chunk += (
            next_messages := list(itertools.islice(messages, min(len(chunk) + 1, _MAX_UNCOUNTED_MESSAGES, max_count)))
        )
        if not next_messages:
            break
        try:
            size += sum(map(len, map(_body_of, next_messages)))
        except (AttributeError, TypeError):  # an object that is not a message is rejected later, with its number
            break
    return chunk


def _portion(parts: Sequence[pa.RecordBatch]) -> Portion:
    (batch,) = pa.Table.from_batches(parts).combine_chunks().to_batches()
    return Portion(batch, {name: name for name in batch.schema.names})


def _with_large_chunks(table: pa.Table) -> pa.Table:
    """Combine small chunks, because each chunk is encoded separately, and small chunks would make small batches."""
    chunk_count = max((column.num_chunks for column in table.columns), default=1)
    return table.combine_chunks() if chunk_count > 1 and len(table) < chunk_count * SMALL_CHUNK_ROWS else table


def _split_batch(batch: pa.RecordBatch, columns: Mapping[str, str]) -> Iterator[pa.RecordBatch]:
    row_count = len(batch)
    rows_per_part = max(1, min(PORTION_ROWS, row_count * PORTION_BYTES // max(1, converted_bytes(batch))))
    for start in range(0, row_count, rows_per_part):
        yield from _halve_large_batch(batch.slice(start, rows_per_part), columns)


def _halve_large_batch(batch: pa.RecordBatch, columns: Mapping[str, str]) -> Iterator[pa.RecordBatch]:
    """Split a batch further if its large rows are adjacent."""
    if len(batch) > 1 and converted_bytes(batch) > 2 * PORTION_BYTES:
        middle = len(batch) // 2
        yield from _halve_large_batch(batch.slice(0, middle), columns)
        yield from _halve_large_batch(batch.slice(middle), columns)
    else:
        yield converted_batch(batch, columns)


_SELECTORS = {name.lower(): name for name in (*transport.SELECTORS, "column", "environment")}


def call_options(options: Options, target: RowTarget, columns: Sequence[RowColumn]) -> tuple[Options, dict[str, str]]:
    """The options of one call, and its columns by role. One ``OptionError`` lists everything that is wrong."""
    if isinstance(target.selector, str):
        target = target._replace(selector=_SELECTORS.get(target.selector.lower(), target.selector))
    column_by_role, problems = check_columns(columns, target.topic, target.selector)
    features = transport.features(options)
    problems += check_features(column_by_role, features) + _selector_problems(options, target, column_by_role)
    if timer_columns := [
        column_by_role[name] for name in TIMER_COLUMNS if name in column_by_role and options.long_delay == "dmq"
    ]:
        problems.append(
            f"column {timer_columns[0]!r} cannot be sent with option 'longDelay' dmq: send such rows with send"
        )
    if problems:
        raise OptionError.of(problems)
    max_bytes = options.max_message_size
    return dataclasses.replace(
        options,
        topic=target.topic,
        queue_selector=target.selector or "roundRobin",
        given_fields=options.given_fields | {"queue_selector"}
        if target.selector is not None
        else options.given_fields - {"queue_selector"},
        auto_batch=True,
        batch_max_bytes=min(options.batch_max_bytes or DEFAULT_BATCH_BYTES, max_bytes),
        send_timeout=options.send_timeout if target.timeout_s is None else target.timeout_s,
    ), column_by_role


def _selector_problems(options: Options, target: RowTarget, column_by_role: Mapping[str, str]) -> list[str]:
    selector, queue_choice_problem = target.selector, transport.features(options).queue_choice_problem
    if queue_choice_problem and "queueid" in column_by_role:
        return [f"column {column_by_role['queueid']!r} names a queue, but {queue_choice_problem}"]
    if selector is None or (callable(selector) and not queue_choice_problem):
        return []
    allowed_selectors = transport.SELECTORS if queue_choice_problem else tuple(_SELECTORS.values())
    if selector not in allowed_selectors and (queue_choice_problem or ":" not in str(selector)):
        reason = f", because {queue_choice_problem}" if queue_choice_problem else ", or a function"
        return [f"selector is {selector!r}; expected one of {', '.join(allowed_selectors)}{reason}"]
    if selector == "environment" and options.environment is None:
        return ["selector 'environment' needs option 'environment'"]
    return []
