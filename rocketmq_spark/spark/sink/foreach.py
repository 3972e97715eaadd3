"""Writing from the driver's side: a function for ``foreachBatch``, which serves every output mode, and one for DataFrames.

Both run exactly one action, whose result is what each task had acknowledged. On Spark Connect Spark calls the function in
a process of the server, so that what it keeps is not seen by the client; it logs there.
"""

from __future__ import annotations

import functools
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Unpack

import pyarrow as pa

from rocketmq_spark import options as options_table
from rocketmq_spark.errors import OptionError
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.options import Options
from rocketmq_spark.spark.sink import checks
from rocketmq_spark.spark.sink.report import AtBroker, Written
from rocketmq_spark.spark.sink.writers import write_task

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from rocketmq_spark.options.typed import SinkOptions

logger = logging.getLogger(__name__)

_COUNTS = ("rows", "bytes", "batches", "retries", "spooled")
_SCHEMA = ", ".join([*(f"{name} bigint" for name in _COUNTS), "brokers string"])


def write_rocketmq(df: DataFrame, name_server: str | None = None, **options: Unpack[SinkOptions]) -> Written:
    """Writes a batch DataFrame. Unlike ``df.write.format("rocketmq").save()`` it needs no ``mode("append")``.

    Args:
        df: Its columns are those of the sink (docs/options.md, "Columns of the sink").
        name_server: ``host:port``, several separated by ``;``. Required unless ``transport`` is ``grpc``.
        options: Options of the sink (docs/options.md), in snake_case or camelCase. Durations are milliseconds or text
            (``3s``), sizes bytes or text (``4m``).

    Returns:
        The counts of what brokers acknowledged: rows, bytes of bodies, batches, retries and spooled rows, with what each
        broker acknowledged.

    Raises:
        OptionError: An option or a column is unknown or has a wrong value or type. Nothing was sent.
        PySparkException: A task failed; ``explain(error)`` returns the line that says why. Rows of other tasks were sent.
    """
    return _write(df, _options(name_server, options), "written", once=False)


def _options(name_server: str | None, options: Mapping[str, object]) -> Options:
    return options_table.parse({"name_server": name_server, **options}, keywords=True).for_role("sink")


class ForeachBatchWriter:
    """Writes micro-batches of any output mode; ``last_report`` has the counts of the last one, ``total`` those of all."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self.last_report: Written | None = None
        self.total = Written()

    def __call__(self, df: DataFrame, batch_id: int) -> None:
        self.last_report = _write(df, self._options, f"batch {batch_id}", once=True)
        self.total += self.last_report


def foreach_batch_writer(name_server: str | None = None, **options: Unpack[SinkOptions]) -> ForeachBatchWriter:
    """Returns a function for ``writeStream.foreachBatch``. It works with output modes append, update and complete.

    A micro-batch that Spark repeats is written again.

    Args:
        name_server: ``host:port``, several separated by ``;``. Required unless ``transport`` is ``grpc``.
        options: Options of the sink (docs/options.md), in snake_case or camelCase. Durations are milliseconds or text
            (``3s``), sizes bytes or text (``4m``).

    Returns:
        A callable ``(df, batch_id)`` that keeps the counts of the last micro-batch as ``last_report``.

    Raises:
        OptionError: An option is unknown, has a wrong value or does not belong to a sink. Lists all problems.
    """
    return ForeachBatchWriter(_options(name_server, options))


def _write(df: DataFrame, options: Options, what: str, once: bool) -> Written:
    names = checks.check(options, df.schema)
    checks.check_brokers(options, names, once)
    _warn_of_speculation(df)
    # Not a lambda, whose own module Spark would have to send: workers import this one.
    send = functools.partial(_send, options, names, checks.positions(options))
    written = Written()
    for row in _map_in_arrow(df, send).collect():
        brokers = {name: AtBroker(**counts) for name, counts in json.loads(row["brokers"]).items()}
        written += Written(**{name: row[name] for name in _COUNTS}, brokers=brokers)
    logger.info("%s: %s", what, written)
    return written


def _map_in_arrow(df: DataFrame, send: Callable[..., Any]) -> DataFrame:
    """PySpark's ``mapInArrow`` asks for pandas, and warns of its newest releases, although it makes no use of it."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "PySpark does not yet fully support pandas", FutureWarning)
            return df.mapInArrow(send, _SCHEMA)
    except ImportError as e:
        raise OptionError(
            f"PySpark cannot run a function over Arrow batches here: {e}",
            remedy='Install pandas, or write with df.write.format("rocketmq")',
        ) from e


def _send(
    options: Options,
    names: dict[str, str],
    positions: dict[str, tuple[MessageQueue, ...]],
    batches: Iterator[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    done = write_task(options, names, positions, batches)
    values: dict[str, Any] = {name: [getattr(done, name)] for name in _COUNTS}
    brokers = json.dumps({name: asdict(part) for name, part in done.brokers.items()})
    arrays = [pa.array(values[name], pa.int64()) for name in _COUNTS]
    yield pa.RecordBatch.from_arrays([*arrays, pa.array([brokers])], names=[*_COUNTS, "brokers"])


def _warn_of_speculation(df: DataFrame) -> None:
    get: Callable[..., Any] = df.sparkSession.conf.get
    if get("spark.speculation", "false") == "true":
        logger.warning(
            "spark.speculation is on: a task that runs twice writes its rows twice. Switch it off for writing, or give "
            "rows an id with option 'messageId', so that readers can drop repeated ones"
        )
