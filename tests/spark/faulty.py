"""Our source and sink with faults in their tasks: at the first attempt a worker dies, or raises, in the middle.

Importable, so that workers unpickle it by reference, and with it everything that is shared in a process.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

from pyspark import TaskContext
from pyspark.sql.datasource import DataSource, DataSourceArrowWriter, DataSourceReader, DataSourceStreamReader

from rocketmq_spark.spark.compat import SupportsTriggerAvailableNow
from rocketmq_spark.spark.datasource import RocketMQDataSource


def first_attempt() -> bool:
    context = TaskContext.get()
    assert context is not None
    return context.attemptNumber() == 0


def strike(fault: str) -> None:
    """Nothing at later attempts: Spark tries a task again."""
    if not first_attempt():
        return
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    raise RuntimeError("struck on purpose")


class FaultySource(DataSource):
    """Options as ours, and ``fault``: ``killed`` or ``raises``."""

    def __init__(self, options: dict[str, str]) -> None:
        given = dict(options)
        self.fault = given.pop("fault")
        self.inner = RocketMQDataSource(given)

    @classmethod
    def name(cls) -> str:
        return "rocketmq_faulty"

    def schema(self) -> str:
        return self.inner.schema()

    def reader(self, schema: Any) -> DataSourceReader:
        return FaultyReader(self.inner.reader(schema), self.fault)

    def streamReader(self, schema: Any) -> DataSourceStreamReader:
        return FaultyStreamReader(self.inner.streamReader(schema), self.fault)

    def writer(self, schema: Any, overwrite: bool) -> DataSourceArrowWriter:
        return FaultyWriter(self.inner.writer(schema, overwrite), self.fault)


def _read(inner: Any, partition: Any, fault: str) -> Iterator[Any]:
    """One batch goes out, then comes the fault; a partition with a single batch ends with it."""
    batches = inner.read(partition)
    yield from (batch for _, batch in zip(range(1), batches, strict=False))
    strike(fault)
    yield from batches


class FaultyReader(DataSourceReader):
    def __init__(self, inner: Any, fault: str) -> None:
        self.inner, self.fault = inner, fault

    def partitions(self) -> Any:
        return self.inner.partitions()

    def read(self, partition: Any) -> Iterator[Any]:
        return _read(self.inner, partition, self.fault)


class FaultyStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, inner: Any, fault: str) -> None:
        self.inner, self.fault = inner, fault

    def getDefaultReadLimit(self) -> Any:
        return self.inner.getDefaultReadLimit()

    def initialOffset(self) -> Any:
        return self.inner.initialOffset()

    def latestOffset(self, start: Any = None, limit: Any = None) -> Any:
        return self.inner.latestOffset(start, limit)

    def prepareForTriggerAvailableNow(self) -> None:
        self.inner.prepareForTriggerAvailableNow()

    def partitions(self, start: Any, end: Any) -> Any:
        return self.inner.partitions(start, end)

    def read(self, partition: Any) -> Iterator[Any]:
        return _read(self.inner, partition, self.fault)


class FaultyWriter(DataSourceArrowWriter):
    """Half of the rows are sent, and acknowledged, before the fault."""

    def __init__(self, inner: Any, fault: str) -> None:
        self.inner, self.fault = inner, fault

    def write(self, iterator: Any) -> Any:
        batches = list(iterator)
        if first_attempt():
            self.inner.write(iter(batches[: len(batches) // 2]))
            strike(self.fault)
        return self.inner.write(iter(batches))

    def commit(self, messages: Any) -> None:
        self.inner.commit(messages)

    def abort(self, messages: Any) -> None:
        self.inner.abort(messages)
