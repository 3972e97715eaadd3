"""``register(spark)``: the source made known by hand, with all that a stream would add to its environment there already.

The function of a Python source carries a map of environment variables, which all its queries share. Each stream that
starts puts four more into it, from a thread of its own and without a lock (PythonStreamingSourceRunner.init), so of two
streams that start at once one entry may be lost while the map counts it: from then on no task of that source can be
serialized until the driver ends ("Illegal size 5 of collection, expected 6"). What is there already is only replaced,
which tears nothing. docs/upstream.md has the proof.
"""

from __future__ import annotations

import tempfile
import warnings
from typing import TYPE_CHECKING

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from rocketmq_spark.datasource import RocketMQDataSource
from rocketmq_spark.workers import warn_if_workers_differ

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def register(spark: SparkSession) -> None:
    """Make ``format("rocketmq")`` known to ``spark``, and let several streams start at once.

    Spark finds an installed package by itself; call this where the code came with ``addPyFile``, after another source
    was looked up, or before more than one stream is started. May be called again. On Spark Connect it only registers.
    """
    context = getattr(spark, "_sc", None)  # Spark Connect has none
    if context is not None:
        warn_if_workers_differ(str(context.pythonExec))
        # The source that Spark found by itself serves the sessions that do not call this.
        _try_to_complete_environment(spark)
    spark.dataSource.register(RocketMQDataSource)
    if context is not None:
        _try_to_complete_environment(spark)


def _try_to_complete_environment(spark: SparkSession) -> None:
    """It goes through what is no interface of Spark's, which another Spark may have changed: the source works all the same."""
    try:
        _complete_environment(spark)
    except (Py4JError, PySparkException, AttributeError, TypeError) as e:
        warnings.warn(
            f"streams of format 'rocketmq' that start at once may end each other ({type(e).__name__}: {str(e)[:200]}): this "
            "Spark is another one than those that rocketmq_spark was tested with. Start one after the other",
            stacklevel=3,
        )


def _complete_environment(spark: SparkSession) -> None:
    known = spark._jsparkSession.sessionState().dataSourceManager()
    if not known.dataSourceExists(RocketMQDataSource.name()):
        return
    variables = known.lookupDataSource(RocketMQDataSource.name()).dataSourceCls().envVars()
    for name, value in _of_a_runner(spark).items():
        if not variables.containsKey(name):
            variables.put(name, value)


def _of_a_runner(spark: SparkSession) -> dict[str, str]:
    """What PythonStreamingSourceRunner puts. Each start replaces the values by its own; what counts is that they are there."""
    conf = spark.sparkContext._jsc.sc().conf()
    return {
        "SPARK_LOCAL_DIRS": conf.get("spark.local.dir", tempfile.gettempdir()),
        "SPARK_AUTH_SOCKET_TIMEOUT": str(conf.getTimeAsSeconds("spark.python.authenticate.socketTimeout", "15s")),
        "SPARK_BUFFER_SIZE": str(conf.getInt("spark.buffer.size", 65536)),
        "SPARK_PYTHON_RUNTIME": "PYTHON_WORKER",
    }
