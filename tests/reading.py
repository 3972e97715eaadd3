"""Sources driven without Spark: the readers that the data source makes, called in Spark's order, offsets as JSON text."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pyspark.sql.datasource import InputPartition
from pyspark.sql.datasource_internal import _SimpleStreamReaderWrapper
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructType,
    TimestampType,
)

from rocketmq_spark import Message, Producer, session
from rocketmq_spark import options as options_table
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.model import MessageQueue, OffsetRange
from rocketmq_spark.spark.compat import ReadLimit
from rocketmq_spark.spark.datasource import RocketMQDataSource
from rocketmq_spark.spark.source.batch_reader import RocketMQReader
from rocketmq_spark.spark.source.stream_reader import RocketMQStreamReader
from tests.helpers import between_looks, indexed
from tests.mockbroker import eventually

Row = dict[str, Any]
# Other ones in each of the processes that share the tests, for they share a broker, too.
_numbers = itertools.count(1_000_000 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")))
_TYPES: dict[str, DataType] = {
    "string": StringType(),
    "int": IntegerType(),
    "bigint": LongType(),
    "binary": BinaryType(),
    "boolean": BooleanType(),
    "float": FloatType(),
    "double": DoubleType(),
    "date": DateType(),
    "timestamp": TimestampType(),
    "array<string>": ArrayType(StringType()),
    "map<string,string>": MapType(StringType(), StringType()),
}


_HEADERS = ArrayType(StructType().add("key", StringType()).add("value", BinaryType()))


def text(value: object) -> str:
    """An option as Spark hands it over."""
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value) if isinstance(value, dict | list) else str(value)


def data_source(options: Mapping[str, object]) -> tuple[RocketMQDataSource, StructType]:
    source = RocketMQDataSource({name: text(value) for name, value in options.items() if value is not None})
    schema = StructType()
    for column in source.schema().split(", "):
        name, kind = column.replace("`", "").rsplit(" ", 1)
        schema.add(name, _HEADERS if kind == "array<struct<key:string,value:binary>>" else _TYPES[kind])
    return source, schema


def batch_reader(mq: LocalBroker | str, **options: object) -> RocketMQReader:
    source, schema = data_source({"nameServer": _server(mq), "routeRefresh": 0, **options})
    return source.reader(schema)


def stream_reader(mq: LocalBroker | str, **options: object) -> RocketMQStreamReader:
    source, schema = data_source({"nameServer": _server(mq), "routeRefresh": 0, **options})
    return source.streamReader(schema)


def _server(mq: LocalBroker | str) -> str:
    return mq if isinstance(mq, str) else mq.name_server


def plan(mq: LocalBroker | str, **options: object) -> list[list[OffsetRange]]:
    """The tasks of a batch read."""
    return ranges_of(batch_reader(mq, **options).partitions())


def ranges_of(partitions: Iterable[InputPartition]) -> list[list[OffsetRange]]:
    return [list(partition.value) for partition in partitions]


def read(mq: LocalBroker | str, **options: object) -> list[Row]:
    """The rows of a batch read, of all that was acknowledged before."""
    if isinstance(mq, LocalBroker):
        indexed(mq)
    reader = batch_reader(mq, **options)
    return rows(reader, reader.partitions())


def rows(reader: RocketMQReader | RocketMQStreamReader, partitions: Iterable[InputPartition]) -> list[Row]:
    """What tasks give; reader and partitions travel as they do in Spark."""
    found: list[Row] = []
    for partition in partitions:
        sent = pickle.loads(pickle.dumps(partition))
        for batch in reader.read(sent):
            found += batch.to_pylist()
    return found


def handed_over(reader: RocketMQStreamReader) -> list[Row] | None:
    """The rows that go to Spark with the plan that was just made; None if tasks read them."""
    if not isinstance(reader, _SimpleStreamReaderWrapper):
        return None
    batches = reader.getCache({}, {})
    return None if batches is None else [row for batch in batches for row in batch.to_pylist()]


def bodies(found: Iterable[Row]) -> list[str]:
    return [row["body"].decode() for row in found]


def positions(offset: str) -> dict[MessageQueue, int]:
    """The next offsets to read that an offset text names."""
    return {
        MessageQueue(topic, broker, int(queue)): value
        for topic, brokers in json.loads(offset)["topics"].items()
        for broker, queues in brokers.items()
        for queue, value in queues.items()
    }


def canonical(offset: Mapping[str, Any]) -> str:
    """As Spark's runner writes it: in the order of the dict."""
    return json.dumps(offset, separators=(",", ":"))


class Run:
    """One run of a streaming query. ``offset`` is the last line of its log; give it to the next run."""

    def __init__(
        self,
        mq: LocalBroker | str,
        offset: str | None = None,
        *,
        available_now: bool = False,
        compacted: bool = False,
        **options: object,
    ) -> None:
        """``compacted``: a broker may remove messages between two reads of the same offsets."""
        self.compacted = compacted
        if isinstance(mq, LocalBroker):
            indexed(mq)
        self.reader = stream_reader(mq, **options)
        if available_now:
            self.reader.prepareForTriggerAvailableNow()
        self.limit = self.reader.getDefaultReadLimit()
        self.offset = canonical(self.reader.initialOffset()) if offset is None else offset
        self.read: list[str] = []

    def latest(self, limit: ReadLimit | None = None) -> str:
        return canonical(self.reader.latestOffset(json.loads(self.offset), limit or self.limit))

    def ahead(self, count: int | None = None) -> str:
        """The next end, as soon as the driver's view, which may be a moment old, has something new; with ``count`` so many
        offsets: a broker that is a fifth of a second slower than another is left out of a batch.
        """
        begin, found = sum(self.positions.values()), [self.offset]

        def there() -> bool:
            found[0] = self.latest()
            return found[0] != self.offset and (count is None or sum(positions(found[0]).values()) - begin >= count)

        eventually(there, 30)
        return found[0]

    def plan(self, end: str) -> list[InputPartition]:
        return list(self.reader.partitions(json.loads(self.offset), json.loads(end)))

    def batch(self, limit: ReadLimit | None = None) -> list[Row]:
        """The next batch; empty when there is none."""
        end = self.latest(limit)
        if end == self.offset:
            return []
        partitions = self.plan(end)
        handed = handed_over(self.reader)
        found = rows(self.reader, partitions)
        if handed is not None:
            still = [row for row in handed if row in found] if self.compacted else handed
            assert still == found, "the driver and a task read different rows"
        self.offset = end
        self.read += bodies(found)
        return found

    def to_end(self) -> None:
        """All batches of a run with fixed ends. A batch of which everything is lost has no rows."""
        begin = None
        while begin != self.offset:
            begin = self.offset
            self.batch()

    def until(self, condition: Callable[[], object], seconds: float = 60.0) -> None:
        """Batches until ``condition`` holds."""
        deadline = Deadline.after(seconds)
        while not condition():
            assert not deadline.expired, f"not in time; {len(self.read)} read, now at {self.offset}"
            began = time.perf_counter()
            if not self.batch():
                between_looks(began, 0.02)

    def drain(self, expected: Iterable[str], seconds: float = 60.0) -> None:
        """Batches until all that is expected was read, and nothing of this run twice."""
        wanted = set(expected)
        self.until(lambda: wanted <= set(self.read), seconds)
        assert not [body for body, times in Counter(self.read).items() if times > 1]

    @property
    def positions(self) -> dict[MessageQueue, int]:
        return positions(self.offset)


def names(count: int, prefix: str = "m") -> list[str]:
    """Names that nothing else in this session has: of topics, groups, bodies."""
    return [f"{prefix}-{next(_numbers)}" for _ in range(count)]


def feed(
    mq: LocalBroker | str,
    topic: str,
    count: int = 10,
    queues: Sequence[int | MessageQueue] | None = None,
    connection: Mapping[str, str] | None = None,
    **message: Any,
) -> list[str]:
    """Send ``count`` messages, in equal parts to the queues of the topic (or those ids); returns when all can be read."""
    made = names(count)
    post(mq, [Message(topic, body.encode(), **message) for body in made], queues, connection)
    return made


def post(
    mq: LocalBroker | str,
    messages: Sequence[Message],
    queues: Sequence[int | MessageQueue] | None = None,
    connection: Mapping[str, str] | None = None,
) -> None:
    """Send messages of one topic, in slices to its queues in their order; returns when all can be read."""
    topic = messages[0].topic
    parsed = options_table.parse({"nameServer": _server(mq), **(connection or {})}).for_role("producer")
    session.client(parsed).routes.forget(topic)  # the tests change topics while they are fed
    ends: dict[MessageQueue, int] = {}
    with Producer(name_server=_server(mq), group="feed", send_timeout="30s", **(connection or {})) as producer:
        targets = [q for q in sorted(producer.queues(topic)) if queues is None or q in queues or q.queue_id in queues]
        step = -(-len(messages) // len(targets))
        for number, queue in enumerate(targets):
            max_batch = 1 if topic.startswith("%RETRY%") else 500  # those cannot be batched
            for at in range(number * step, min((number + 1) * step, len(messages)), max_batch):
                part = messages[at : min(at + max_batch, (number + 1) * step)]
                result = producer.send_batch(part, queue) if max_batch > 1 else producer.send(part[0], queue=queue)
                assert result.queue_offset is not None
                ends[queue] = result.queue_offset + len(part)
    await_indexed(mq, ends, connection)


def await_indexed(
    mq: LocalBroker | str, ends: Mapping[MessageQueue, int], connection: Mapping[str, str] | None = None
) -> None:
    """The index is made a moment after the acknowledgement."""
    parsed = options_table.parse({"nameServer": _server(mq), **(connection or {})}).for_role("producer")
    brokers = session.client(parsed).offset_reader

    def indexed() -> bool:
        found = brokers.bounds(ends, Deadline.after(30.0))
        return all(queue in found and found[queue].max_offset >= end for queue, end in ends.items())

    eventually(indexed, 30)
