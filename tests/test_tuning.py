"""Spark knows the names of the settings. It would accept a misspelt one without an error."""

from __future__ import annotations

import pyspark.sql.datasource

from rocketmq_spark import low_latency_conf

MANAGER = "spark.sql.streaming.checkpointFileManagerClass"


def test_spark_takes_the_checkpoint_manager(spark, tmp_path) -> None:
    hadoop = spark._jvm.org.apache.hadoop
    conf = hadoop.conf.Configuration(spark.sparkContext._jsc.hadoopConfiguration())
    conf.set(MANAGER, low_latency_conf()[MANAGER])
    package = low_latency_conf()[MANAGER].rpartition(".")[0]  # Spark 4.1 moved it
    made = getattr(spark._jvm, f"{package}.CheckpointFileManager").create(hadoop.fs.Path(str(tmp_path)), conf)
    assert made.getClass().getName() == low_latency_conf()[MANAGER]


def test_spark_knows_the_other_settings(spark) -> None:
    known = spark._jvm.org.apache.spark.internal.config.ConfigEntry
    unknown = [n for n in low_latency_conf() if n != MANAGER and known.findEntry(n) is None]
    # Spark 4.1 added Unix sockets; 4.0 ignores their setting.
    no_sockets = not hasattr(pyspark.sql.datasource, "DataSourceStreamArrowWriter")
    assert unknown == (["spark.python.unix.domain.socket.enabled"] if no_sockets else [])


def test_each_call_returns_a_new_dict() -> None:
    low_latency_conf().clear()
    assert low_latency_conf()
