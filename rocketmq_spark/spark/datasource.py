"""``format("rocketmq")`` and ``register(spark)``.

Spark creates the data source in several processes and several times, so the constructor only parses. What depends on the role
(source or sink, batch or stream) is checked when the reader or writer is created.

``register`` also adds the environment variables that each starting stream would add, because starting streams may break the map
of these variables. All queries of a Python source share this map. Each stream that starts puts four entries into the map, on its
own thread and without a lock (``PythonStreamingSourceRunner.init``). If two streams start at once, an entry may be lost although
the map counts it. After such a loss, no task of the source can be serialized until the driver ends ("Illegal size 5 of
collection, expected 6"). Entries that already exist are only replaced, which is safe. docs/upstream.md has the proof.
``register`` also makes tasks read every batch if ``spark.kryo.registrationRequired`` is set (see ``source.prefetch``), and lets
the sink check the settings of exactly-once before a query sends anything (see ``sink.exactly_once_checks``).
"""

from __future__ import annotations

import tempfile
import warnings
from typing import TYPE_CHECKING

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql.types import StructType

from rocketmq_spark import options as options_table
from rocketmq_spark.errors import OptionError
from rocketmq_spark.spark import compat, context_settings, spark_options, workers
from rocketmq_spark.spark.conf import READ_BY_TASKS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from rocketmq_spark.columnar.decode.schema import Column
    from rocketmq_spark.spark.sink.writer import RocketMQStreamWriter, RocketMQWriter
    from rocketmq_spark.spark.source.batch_reader import RocketMQReader
    from rocketmq_spark.spark.source.stream_reader import RocketMQStreamReader


class RocketMQDataSource(compat.DataSource):
    """Apache RocketMQ as a Spark data source; see docs/options.md."""

    def __init__(self, options: dict[str, str]) -> None:
        super().__init__(options)
        own_options, self._spark_options = spark_options.split(options)
        self._options = options_table.parse(own_options)

    @classmethod
    def name(cls) -> str:
        return "rocketmq"

    def schema(self) -> str:
        from rocketmq_spark.columnar.decode.schema import columns_of, ddl

        return ddl(columns_of(self._options))

    def reader(self, schema: StructType) -> RocketMQReader:
        compat.require_classes('a batch read with format("rocketmq")', "DataSourceReader")
        from rocketmq_spark.spark.source.batch_reader import PushdownReader, RocketMQReader, is_pushdown_enabled

        reader_class = PushdownReader if self._options.predicate_pushdown and is_pushdown_enabled() else RocketMQReader
        return reader_class(*self._source("batch source", schema))

    def streamReader(self, schema: StructType) -> RocketMQStreamReader:
        compat.require_classes('a stream from format("rocketmq")', "DataSourceStreamReader")
        from rocketmq_spark.spark.source.stream_reader import RocketMQStreamReader

        # For prefetched rows, Spark may compare the declared columns with the Arrow schema of the rows. The columns of this
        # schema are nullable and have no comments. If a declared column is not nullable or has a comment, the stream does not
        # prefetch.
        nullability_keys = ("nullable", "containsNull", "valueContainsNull")
        is_plain = not any(f'"{name}":false' in schema.json() for name in nullability_keys) and not any(
            field.metadata for field in schema
        )
        return RocketMQStreamReader(*self._source("stream source", schema), supports_prefetch=is_plain)

    def writer(self, schema: StructType, overwrite: bool) -> RocketMQWriter:
        compat.require_classes('a write with format("rocketmq")', "DataSourceArrowWriter")
        from rocketmq_spark.spark.sink.writer import RocketMQWriter

        spark_options.check(self._spark_options, "batch sink")
        if overwrite:
            raise OptionError("rocketmq topics cannot be overwritten", remedy='Write with .mode("append")')
        return RocketMQWriter(self._options.for_role("sink"), schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> RocketMQStreamWriter:
        compat.require_classes('a stream to format("rocketmq")', "DataSourceStreamArrowWriter")
        from rocketmq_spark.spark.sink.exactly_once_checks import check_progress
        from rocketmq_spark.spark.sink.writer import RocketMQStreamWriter

        spark_options.check(self._spark_options, "stream sink")
        if overwrite:
            raise OptionError(
                "rocketmq topics cannot be overwritten",
                remedy='Use outputMode("append"), or foreachBatch with foreach_batch_writer for other modes',
            )
        checkpoint = self.options.get("checkpointLocation") or self.options.get("checkpointlocation")
        options = self._options.for_role("sink")
        check_progress(options, spark_options.tracks_asynchronously(self._spark_options))
        return RocketMQStreamWriter(options, schema, checkpoint)

    def _source(self, role: str, schema: StructType) -> tuple[options_table.Options, tuple[Column, ...]]:
        """The options of a source, after the checks that need no broker, and the columns to build."""
        from rocketmq_spark.columnar.decode.schema import columns_of, columns_of_schema
        from rocketmq_spark.spark.source.checks import check_source

        spark_options.check(self._spark_options, role)
        return check_source(self._options, role), columns_of_schema(columns_of(self._options), schema)


def register(spark: SparkSession) -> None:
    """Register ``format("rocketmq")`` with ``spark``, and let several streams start at once.

    Spark finds an installed package without this call. Call ``register`` before several streams are started, or if the package
    was shipped with ``addPyFile`` after Spark had looked up another source. ``register`` may be called again. On Spark Connect,
    ``register`` only registers the format.

    Args:
        spark: The session whose streams use the format.

    Raises:
        OptionError: The installed PySpark has no data sources in Python, as is the case with PySpark 3.5. The remedy names the
            functions to use instead.
    """
    compat.require_classes("register", "DataSource")
    context = getattr(spark, "_sc", None)  # a session of Spark Connect has no context
    if context is not None:
        workers.warn_if_workers_differ(str(context.pythonExec))
        # If Spark has found this source by itself, all sessions can use the source. If the source were registered again, Spark
        # would warn here and at the start of each stream.
        if _try_to_complete_environment(spark):
            return
    try:
        spark.dataSource.register(RocketMQDataSource)
    except PySparkException as e:
        # Spark found the source by itself. PySpark 4.0 refuses to replace the source that Spark found; newer versions replace it.
        if "[DATA_SOURCE_ALREADY_EXISTS]" not in str(e):
            raise
    if context is not None:
        _try_to_complete_environment(spark)


def _try_to_complete_environment(spark: SparkSession) -> bool:
    """Add the environment variables, and return whether Spark knows the source.

    This function uses internals of Spark. If a version of Spark has other internals, this function warns that streams which start
    at once may break each other; everything else of the source works.
    """
    try:
        return _complete_environment(spark)
    except (Py4JError, PySparkException, AttributeError, TypeError) as e:
        warnings.warn(
            f"streams of format 'rocketmq' that start at once may break each other ({type(e).__name__}: {str(e)[:200]}): "
            "rocketmq_spark was not tested with this version of Spark. Start the streams one after the other",
            stacklevel=3,
        )
        return False


def _complete_environment(spark: SparkSession) -> bool:
    source_manager = spark._jsparkSession.sessionState().dataSourceManager()
    if not source_manager.dataSourceExists(RocketMQDataSource.name()):
        return False
    variables = source_manager.lookupDataSource(RocketMQDataSource.name()).dataSourceCls().envVars()
    for name, value in _runner_variables(spark).items():
        if not variables.containsKey(name):
            variables.put(name, value)
    conf = spark.sparkContext.getConf()
    variables.put(context_settings.SETTINGS_VARIABLE, context_settings.encoded_settings(conf.get))
    if conf.get("spark.kryo.registrationRequired", "false").lower() == "true":
        variables.put(READ_BY_TASKS, "1")
    return True


def _runner_variables(spark: SparkSession) -> dict[str, str]:
    """The environment variables that PythonStreamingSourceRunner adds. Each start of a stream replaces the values, so only the
    names matter.
    """
    conf = spark.sparkContext._jsc.sc().conf()
    return {
        "SPARK_LOCAL_DIRS": conf.get("spark.local.dir", tempfile.gettempdir()),
        "SPARK_AUTH_SOCKET_TIMEOUT": str(conf.getTimeAsSeconds("spark.python.authenticate.socketTimeout", "15s")),
        "SPARK_BUFFER_SIZE": str(conf.getInt("spark.buffer.size", 65536)),
        "SPARK_PYTHON_RUNTIME": "PYTHON_WORKER",
    }
