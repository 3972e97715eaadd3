"""``read_rocketmq``: a batch read as a function, for every PySpark from 3.5 on.

The driver plans the same tasks as ``spark.read.format("rocketmq")``, and makes a DataFrame with one row for each task, which
contains the pickled task. With ``mapInArrow``, the workers read the messages of these tasks.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Unpack

import pyarrow as pa

from rocketmq_spark import options as options_table
from rocketmq_spark.columnar.decode.schema import Column, columns_of, ddl
from rocketmq_spark.errors import OptionError
from rocketmq_spark.options import Options
from rocketmq_spark.spark.map_in_arrow import map_in_arrow
from rocketmq_spark.spark.source import partition_reader
from rocketmq_spark.spark.source.batch_reader import RocketMQReader
from rocketmq_spark.spark.source.checks import check_source

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from rocketmq_spark.options.typed import SourceOptions

_ALTERNATIVE = 'read with spark.read.format("rocketmq")'


def read_rocketmq(
    spark: SparkSession,
    name_server: str | None = None,
    *,
    group: str | None = None,
    **options: Unpack[SourceOptions],
) -> DataFrame:
    """Returns messages as a batch DataFrame, with the columns of ``spark.read.format("rocketmq")``.

    This function is for PySpark 3.5, which has no data sources in Python. It also works with every later version. The call
    fixes the start and the end of each queue, so each action on the DataFrame reads the same messages. Every action builds all
    columns, unless option ``columns`` names fewer, and predicates are not pushed to the brokers.

    Args:
        spark: A session with a ``SparkContext``: not one of Spark Connect.
        name_server: ``host:port``, several separated by ``;``.
        group: The consumer group whose committed offsets ``starting_offsets`` or ``ending_offsets`` name.
        options: Options of the batch source (docs/options.md), in snake_case or camelCase. Durations are milliseconds or text
            (``3s``), sizes bytes or text (``4m``).

    Returns:
        A DataFrame with a row for each message.

    Raises:
        OptionError: An option is unknown, has a wrong value or does not belong to a batch source; the session has no
            ``SparkContext``; or pandas is not installed.
        RocketMQError: The brokers did not answer or rejected a request, or a topic, a start or an end does not exist.
    """
    parsed = options_table.parse({"name_server": name_server, "group": group, **options}, keywords=True)
    checked_options, columns = check_source(parsed, "batch source"), columns_of(parsed)
    context = getattr(spark, "_sc", None)
    if context is None:
        raise OptionError(
            "read_rocketmq needs a SparkContext, which this session does not have (Spark Connect, shared clusters)",
            remedy=f"There, {_ALTERNATIVE}",
        )
    partitions = RocketMQReader(checked_options, columns).partitions()
    pickled_partitions = [(bytearray(pickle.dumps(partition)),) for partition in partitions]
    # The number of slices is the number of rows, so that each task of Spark gets one row. ``createDataFrame`` runs no job,
    # because it gets the schema.
    rows: Any = context.parallelize(pickled_partitions, len(pickled_partitions)) if pickled_partitions else []
    tasks = spark.createDataFrame(rows, "task binary")
    return map_in_arrow(tasks, functools.partial(_read, checked_options, columns), ddl(columns), _ALTERNATIVE)


def _read(options: Options, columns: tuple[Column, ...], batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        for task in batch.column(0).to_pylist():
            yield from partition_reader.read_partition(options, columns, pickle.loads(task))
