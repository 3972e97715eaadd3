"""Spark's own ceilings: batches that were made before, handed over by a Python data source, and rows that are dropped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    InputPartition,
    WriterCommitMessage,
)

from rocketmq_spark import LocalBroker
from rocketmq_spark.columnar.decode.schema import BASIC_COLUMNS, ddl
from rocketmq_spark.options import parse
from rocketmq_spark.spark.source.batch_reader import RocketMQReader

TASKS = 2


@dataclass(frozen=True, slots=True)
class Share(InputPartition):
    """How many rows a task hands over."""

    rows: int

    @property
    def value(self) -> Any:
        return self.rows


def prepare(broker: LocalBroker, topic: str, path: Path) -> None:
    """One batch of ``topic`` as our source decodes it, written to ``path``."""
    options = parse({"nameServer": broker.name_server, "subscribe": topic}).for_role("batch source")
    reader = RocketMQReader(options, BASIC_COLUMNS)
    batch: pa.RecordBatch = max(reader.read(reader.partitions()[0]), key=len)
    if not len(batch):  # its reader would hand it over for ever
        raise SystemExit(f"{topic} has too few messages: its first task has none")
    with pa.ipc.new_stream(path, batch.schema) as writer:
        writer.write_batch(batch)


class Reader(DataSourceReader):
    def __init__(self, path: str, rows: int) -> None:
        self._path = path
        self._rows = rows

    def partitions(self) -> Sequence[InputPartition]:
        return [Share(self._rows // TASKS + (i < self._rows % TASKS)) for i in range(TASKS)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        assert isinstance(partition, Share)
        (batch,) = pa.ipc.open_stream(Path(self._path).read_bytes())
        left = partition.rows
        while left > 0:
            yield batch.slice(0, min(left, len(batch)))
            left -= len(batch)


class Dropping(DataSourceArrowWriter):
    """Takes Arrow batches and does nothing with them."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        for _ in iterator:
            pass
        return WriterCommitMessage()


class Ceiling(DataSource):
    """``format("ceiling")``: options ``path`` of what ``prepare`` wrote, and ``rows`` to hand over."""

    @classmethod
    def name(cls) -> str:
        return "ceiling"

    def schema(self) -> str:
        return ddl(BASIC_COLUMNS)

    def reader(self, schema: Any) -> DataSourceReader:
        return Reader(self.options["path"], int(self.options["rows"]))

    def writer(self, schema: Any, overwrite: bool) -> Any:
        return Dropping()


def register(spark: SparkSession) -> None:
    spark.dataSource.register(Ceiling)
