"""Spark settings that go with this connector; docs/performance.md says what each is worth."""

from __future__ import annotations

# Where PySpark 4.2 and 4.3 have it. Spark's default manager goes through Hadoop's FileContext, a good part of the
# time of a small batch; this one renames through the FileSystem class, as atomic as the file system's rename is.
_CHECKPOINT_MANAGER = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"


def low_latency_conf() -> dict[str, str]:
    """Settings that lower the time of a micro-batch, for ``SparkSession.builder.config(map=...)``.

    They must be there when the session starts. Checkpoints have to lie on a local disk or on HDFS, whose renames are
    atomic; on an object store leave ``spark.sql.streaming.checkpointFileManagerClass`` out and use the store's own.
    """
    return {
        "spark.python.unix.domain.socket.enabled": "true",
        "spark.sql.execution.python.udf.buffer.size": "1048576",
        "spark.sql.streaming.checkpointFileManagerClass": _CHECKPOINT_MANAGER,
        "spark.sql.adaptive.enabled": "false",
    }
