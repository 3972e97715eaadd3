"""Writes DataFrames from the driver: ``foreach_batch_writer`` for any output mode, and ``write_rocketmq``.

Both run exactly one action. The result of the action has the number of acknowledged rows of each task. With Spark Connect,
Spark calls the writer in a process of the server. So the client does not see the attributes of the writer, and the writer logs
in the process of the server.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

import pyarrow as pa
from pyspark import SparkContext

from rocketmq_spark import options as options_table
from rocketmq_spark.base import process
from rocketmq_spark.columnar.encode.content_ids import BatchName
from rocketmq_spark.errors import OptionError
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.options import Options
from rocketmq_spark.producer.rows.routing import log_choice
from rocketmq_spark.spark.checkpoints import batch_notes
from rocketmq_spark.spark.checkpoints.files import Folder, checkpoint_folder
from rocketmq_spark.spark.checkpoints.owners import check_owner
from rocketmq_spark.spark.map_in_arrow import map_in_arrow
from rocketmq_spark.spark.sink import checks, exactly_once_checks
from rocketmq_spark.spark.sink.exactly_once import ExactlyOncePlan, plan_batch, plan_job
from rocketmq_spark.spark.sink.report import BrokerCounts, Written, warn_of_omitted_headers, warn_of_unmatched_messages
from rocketmq_spark.spark.sink.task import write_task

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from rocketmq_spark.options.typed import SinkOptions

logger = logging.getLogger(__name__)

_COUNT_NAMES = (
    "rows",
    "bytes",
    "batches",
    "retries",
    "spooled",
    "already_stored",
    "confirmed",
    "unmatched",
    "found",
    "found_of_batch",
    "left_out",
)
_WRITES_KEY = "exactly-once writes of batches"
# The generated name of a write without ``write_name``.
_GENERATED_NAME = re.compile("topics-[0-9a-f]{16}")
_SCHEMA = ", ".join([*(f"{name} bigint" for name in _COUNT_NAMES), "brokers string", "topic_names array<string>"])


def write_rocketmq(
    df: DataFrame,
    name_server: str | None = None,
    *,
    checkpoint_location: str | None = None,
    write_name: str | None = None,
    **options: Unpack[SinkOptions],
) -> Written:
    """Writes a batch DataFrame. Unlike ``df.write.format("rocketmq").save()``, this function needs no ``mode("append")``.

    Args:
        df: A DataFrame with columns of the sink (docs/options.md, "Columns of the sink").
        name_server: ``host:port``, several separated by ``;``. Required unless ``transport`` is ``grpc``.
        checkpoint_location: The checkpoint location of the query. This argument is necessary if this function is called in
            ``foreachBatch`` with ``delivery_guarantee`` exactly-once. Without this argument, only repeated tasks are
            recognized, and a repeated micro-batch is written again.
        write_name: The name of this write, if a micro-batch is written to one topic more than once: up to 64 letters, digits,
            ``-`` and ``_``. The name must be the same after a restart.
        options: Options of the sink (docs/options.md), in snake_case or camelCase. Durations are milliseconds or text
            (``3s``), sizes bytes or text (``4m``).

    Returns:
        A ``Written``: ``rows`` that brokers acknowledged, their ``bytes`` (bodies and properties) and ``batches``, in all and by
        broker, and the numbers of ``retries`` and of ``spooled`` rows. With exactly-once, ``rows`` also counts rows that the sink
        found in the topic after their acknowledgement was lost.

    Raises:
        OptionError: An option or a column is unknown or has a wrong value or type. Nothing was sent.
        PySparkException: A task failed; ``explain(error)`` returns the line that says why. Rows may have been sent.
    """
    parsed_options = _options(name_server, options)
    if checkpoint_location is None:
        return _write(df, parsed_options, "written", is_micro_batch=False)
    check_owner(checkpoint_location)
    batch = QueryBatch(checkpoint_location, _write_name(write_name, parsed_options))
    return _write(df, parsed_options, "written", is_micro_batch=True, batch=batch)


def _options(name_server: str | None, options: Mapping[str, object]) -> Options:
    return options_table.parse({"name_server": name_server, **options}, keywords=True).for_role("sink")


class QueryBatch(NamedTuple):
    """A micro-batch of a query, by default the last batch, and the name of one write of the batch."""

    checkpoint: str
    write_name: str
    number: int | None = None


def _write_name(name: str | None, options: Options) -> str:
    """Return the name of a write, which is generated from the topics by default."""
    if name is None:
        topics = " ".join(exactly_once_checks.written_topics(options))
        return f"topics-{hashlib.blake2b(topics.encode(), digest_size=8).hexdigest()}"
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name):
        raise OptionError(f"argument 'write_name' is {name!r}; expected up to 64 letters, digits, '-' and '_'")
    return name


class ForeachBatchWriter:
    """Writes micro-batches of any output mode. ``last_report`` has the counts of the last batch, ``total`` the counts of all
    batches.
    """

    def __init__(self, options: Options, batch: QueryBatch | None = None) -> None:
        self._options = options
        self._batch_template = batch
        self.last_report: Written | None = None
        self.total = Written()

    def __call__(self, df: DataFrame, batch_id: int) -> None:
        batch = None if self._batch_template is None else self._batch_template._replace(number=batch_id)
        self.last_report = _write(df, self._options, f"batch {batch_id}", is_micro_batch=True, batch=batch)
        self.total += self.last_report


def foreach_batch_writer(
    name_server: str | None = None,
    *,
    checkpoint_location: str | None = None,
    write_name: str | None = None,
    **options: Unpack[SinkOptions],
) -> ForeachBatchWriter:
    """Returns a function for ``writeStream.foreachBatch``. The function works with output modes append, update and complete.

    If Spark repeats a micro-batch, all of its rows are written again; with ``delivery_guarantee`` exactly-once, only the rows
    that are not stored yet.

    Args:
        name_server: ``host:port``, several separated by ``;``. Required unless ``transport`` is ``grpc``.
        checkpoint_location: The checkpoint location of the query. Required for ``delivery_guarantee`` exactly-once.
        write_name: The name of this write, if a batch is written to one topic more than once: up to 64 letters, digits, ``-`` and
            ``_``. The name must be the same after a restart.
        options: Options of the sink (docs/options.md), in snake_case or camelCase. Durations are milliseconds or text
            (``3s``), sizes bytes or text (``4m``).

    Returns:
        A callable ``(df, batch_id)``. Its ``last_report`` is a ``Written`` (described at ``write_rocketmq``) with the counts of
        the last micro-batch, or None before the first micro-batch. Its ``total`` has the counts of all micro-batches.

    Raises:
        OptionError: An option is unknown, has a wrong value or does not belong to a sink; the error lists all problems. With
            exactly-once, this error is also raised if the Spark context was started without ``exactly_once_conf()``.
    """
    parsed_options = _options(name_server, options)
    if checkpoint_location is not None:
        check_owner(checkpoint_location)
    if not exactly_once_checks.is_exactly_once(parsed_options):
        return ForeachBatchWriter(parsed_options)
    if checkpoint_location is None:
        raise OptionError(
            "argument 'checkpoint_location' is missing, and 'delivery_guarantee' is exactly-once: the ends of the queues before "
            "each batch are noted in the checkpoint",
            remedy="Give the checkpointLocation of the query",
        )
    _check_context(SparkContext._active_spark_context, parsed_options, True)
    return ForeachBatchWriter(parsed_options, QueryBatch(checkpoint_location, _write_name(write_name, parsed_options)))


def _write(
    df: DataFrame, options: Options, write_text: str, is_micro_batch: bool, batch: QueryBatch | None = None
) -> Written:
    columns = checks.check_sink(options, df.schema)
    checks.check_brokers(options, columns, is_micro_batch)
    log_choice(options, columns, is_micro_batch)
    _warn_of_speculation(df)
    if not exactly_once_checks.is_exactly_once(options):
        return _run_write(df, options, columns, None, write_text)
    _check_context(getattr(df.sparkSession, "_sc", None), options, batch is not None)
    if batch is None:
        return _run_write(df, options, columns, plan_job(options), write_text)
    check_owner(batch.checkpoint)
    with _registered_write(df, batch, exactly_once_checks.written_topics(options)):
        plan = plan_batch(options, batch.checkpoint, batch.write_name, batch.number)
        return _run_write(df, options, columns, plan, write_text)


def _run_write(
    df: DataFrame, options: Options, columns: dict[str, str], plan: ExactlyOncePlan | None, write_text: str
) -> Written:
    environment_queues, partition_queues = checks.environment_queues(options), checks.partition_queues(options, columns)
    write_partition = functools.partial(_write_partition, options, columns, environment_queues, partition_queues, plan)
    written, topic_names = Written(), list[str]()
    for row in map_in_arrow(df, write_partition, _SCHEMA, 'write with df.write.format("rocketmq")').collect():
        brokers = {name: BrokerCounts(**counts) for name, counts in json.loads(row["brokers"]).items()}
        written += Written(**{name: row[name] for name in _COUNT_NAMES}, brokers=brokers)
        topic_names += row["topic_names"]
    written = written.of_all_tasks()
    logger.info("%s: %s", write_text, written)
    warn_of_unmatched_messages(written, write_text)
    warn_of_omitted_headers(written, write_text)
    checks.check_topic_names(options, topic_names)
    return written


def _check_context(context: SparkContext | None, options: Options, is_streaming: bool) -> None:
    if context is not None:  # a session of Spark Connect has no context
        conf = context.getConf()
        exactly_once_checks.check_settings(conf.get, is_streaming, "the Spark context")
        exactly_once_checks.check_settle(conf.get, options.exactly_once_settle)


class _QueryRun(NamedTuple):
    """The run of a query that a write belongs to: its session and its job group, which are "" if they are unknown. Only the
    thread of the query sees the job group.
    """

    session: str = ""
    group: str = ""

    @classmethod
    def of_dataframe(cls, df: DataFrame) -> _QueryRun:
        context = getattr(df.sparkSession, "_sc", None)
        if context is None:  # Spark Connect has a process for each run
            return cls()
        spark: Any = df.sparkSession
        return cls(spark._jsparkSession.sessionUUID(), context.getLocalProperty("spark.jobGroup.id") or "")

    def may_equal(self, other: _QueryRun) -> bool:
        return self.session == other.session and (self.group == other.group or not (self.group and other.group))


@contextmanager
def _registered_write(df: DataFrame, batch: QueryBatch, topics: Sequence[str]) -> Iterator[None]:
    """Check and register a write of a batch. If another write of the batch with the same name is running or finished, raise an
    error. A failed write may be repeated.
    """
    folder = checkpoint_folder(batch.checkpoint)
    name = batch_notes.batch_name(folder, batch.write_name, batch.number)
    key, run = (name.query, name.write_name), _QueryRun.of_dataframe(df)
    registration = name, run
    _check_batch_unfinished(folder, name)
    _check_topics(folder, name, topics, run)
    with process.registry_lock():
        earlier_write = process.entries(_WRITES_KEY).get(key)
        if earlier_write is not None and earlier_write[0] == name and run.may_equal(earlier_write[1]):
            raise OptionError(
                f"batch {name.number} is written to {', '.join(topics)} a second time, and both writes have the name "
                f"{name.write_name!r}: after a crash between them, the rows of the second write would count as stored",
                remedy="Give each write of the batch a write_name of its own",
            )
        process.entries(_WRITES_KEY)[key] = registration
    try:
        yield
    except BaseException:
        with process.registry_lock():
            if process.entries(_WRITES_KEY).get(key) is registration:
                del process.entries(_WRITES_KEY)[key]
        raise


def _check_batch_unfinished(folder: Folder, name: BatchName) -> None:
    """Raises ``OptionError`` for a batch that Spark has logged as done. Tasks compare the id of their query with the id in the
    checkpoint, but with Spark Connect, tasks cannot see the id of their query. Without this check, equal rows of another query
    would count as stored.
    """
    if folder.read_bytes(f"commits/{name.number}") is not None:
        raise OptionError(
            f"the query with the checkpoint {folder.name} has already finished batch {name.number}, so the query that writes "
            f"batch {name.number} now is another one",
            remedy="Set checkpoint_location to the checkpointLocation of the query that writes",
        )


def _check_topics(folder: Folder, name: BatchName, topics: Sequence[str], run: _QueryRun) -> None:
    """Raises ``OptionError`` if an earlier run began this write with other topics, and some topics are in both lists. A write
    without a ``write_name`` is named after its topics. So this write has another name than in the earlier run, and would not find
    the rows that are stored in the common topics.
    """
    if not _GENERATED_NAME.fullmatch(name.write_name):
        return
    notes = batch_notes.notes_of_batch(folder, name)
    if any(note.name == name for note in notes):
        return
    for note in notes:
        other_name = note.name
        with process.registry_lock():
            registration = process.entries(_WRITES_KEY).get((other_name.query, other_name.write_name))
        if registration is not None and registration[0] == other_name and run.may_equal(registration[1]):
            continue  # the note is of another write of this run
        if _GENERATED_NAME.fullmatch(other_name.write_name) and set(note.ends.topics) & set(topics):
            raise OptionError(
                f"batch {name.number} was begun for {', '.join(note.ends.topics)}, and the query now writes to "
                f"{', '.join(topics)}; the note of the batch is "
                f"{folder.name}/{batch_notes.NOTES_FOLDER}/{name.number}/{other_name.write_name}",
                remedy="Finish the batch with these topics, and write further ones with a writer of their own. Or go back with: "
                "rocketmq-spark checkpoint rewind, which sends again what the batch has stored. If these are two writes of "
                "a batch, give each a write_name",
            )


def _write_partition(
    options: Options,
    columns: dict[str, str],
    environment_queues: dict[str, tuple[MessageQueue, ...]],
    partition_queues: dict[str, tuple[MessageQueue, ...]],
    plan: ExactlyOncePlan | None,
    batches: Iterator[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    message = write_task(options, columns, environment_queues, batches, plan, partition_queues)
    counts: dict[str, Any] = {name: [getattr(message.written, name)] for name in _COUNT_NAMES}
    brokers = json.dumps({name: asdict(broker_counts) for name, broker_counts in message.written.brokers.items()})
    arrays = [pa.array(counts[name], pa.int64()) for name in _COUNT_NAMES]
    arrays += [pa.array([brokers]), pa.array([list(message.topic_names)], pa.list_(pa.string()))]
    yield pa.RecordBatch.from_arrays(arrays, names=[*_COUNT_NAMES, "brokers", "topic_names"])


def _warn_of_speculation(df: DataFrame) -> None:
    get_setting: Callable[..., Any] = df.sparkSession.conf.get
    if get_setting("spark.speculation", "false") == "true":
        logger.warning(
            "spark.speculation is on: a task that runs twice writes its rows twice. Switch it off for writes, or give "
            "rows an id with option 'messageId', so that readers can drop duplicates"
        )
