"""Settings of Spark for this connector. docs/performance.md has the effect of each setting."""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

# Spark's default manager uses Hadoop's FileContext, which takes a large part of the time of a small batch. These managers rename
# through the FileSystem class, so their renames are as atomic as the renames of the file system. The first name is that of Spark
# 4.1 and newer.
_CHECKPOINT_MANAGERS = (
    "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager",
    "org.apache.spark.sql.execution.streaming.FileSystemBasedCheckpointFileManager",
)

_UNIX_SOCKETS = "spark.python.unix.domain.socket.enabled"
# The longest path of a socket that Linux and macOS allow, and the length of the name that Spark adds to the folder:
# "/.<uuid>.sock".
_MAX_SOCKET_PATH_BYTES, _SOCKET_NAME_BYTES = 103, 43

# If this environment variable is set, tasks read every batch of a stream, and the driver reads none (see ``source.prefetch``).
READ_BY_TASKS = "ROCKETMQ_SPARK_READ_BY_TASKS"


def low_latency_conf() -> dict[str, Any]:
    """Return settings that shorten micro-batches, for ``SparkSession.builder.config(map=...)``.

    Give these settings before the session starts. Checkpoints must be on a local disk or on HDFS, whose renames are atomic. On an
    object store, omit ``spark.sql.streaming.checkpointFileManagerClass`` and use the class for that store. The value of this
    setting is the name of a class, which depends on the version of Spark. So this function looks for the class in Spark's jars,
    and omits the setting if it does not find the class, as with Spark Connect.

    Whoever may write to Spark's Unix sockets can run code in the driver. So if the umask of this process lets other users write
    to new files, this function logs a warning and omits the setting for Unix sockets. Start executors on other machines with
    umask 022 or 077, too.
    """
    manager = _checkpoint_manager()
    return {
        **_unix_socket_settings(),
        "spark.sql.execution.python.udf.buffer.size": "1048576",
        **({"spark.sql.streaming.checkpointFileManagerClass": manager} if manager else {}),
        "spark.sql.adaptive.enabled": "false",
    }


def _unix_socket_settings() -> dict[str, str]:
    from rocketmq_spark.base import folders  # imported here: only few drivers call this function

    if not folders.others_may_write_new_files():
        return {_UNIX_SOCKETS: "true"}
    text = "%s is not set, because the umask %03o lets other users write to new files, also to Spark's sockets; use umask 022"
    logger.warning(text, _UNIX_SOCKETS, folders.creation_mask())
    return {}


def private_socket_settings(folder: Path) -> dict[str, str]:
    """Return settings with which Spark creates its Unix sockets in ``folder``; no settings if the path is too long for a socket.
    Only this user may have access to the folder, and it must exist on all machines of the session.
    """
    if len(os.fsencode(folder)) + _SOCKET_NAME_BYTES > _MAX_SOCKET_PATH_BYTES:
        return {}
    return {_UNIX_SOCKETS: "true", "spark.python.unix.domain.socket.dir": str(folder)}


@functools.cache
def _checkpoint_manager() -> str | None:
    """Return the class name of the checkpoint manager in Spark's jars; None if the jars lack the class, or are not on this
    machine.
    """
    import zipfile  # imported here: only few drivers call this function

    for jar in _spark_jars("spark-sql_*.jar"):
        try:
            with zipfile.ZipFile(jar) as classes:
                names = set(classes.namelist())
        except (OSError, zipfile.BadZipFile):
            continue
        for manager in _CHECKPOINT_MANAGERS:
            if f"{manager.replace('.', '/')}.class" in names:
                return manager
    return None


def _spark_jars(pattern: str) -> list[Path]:
    """Return Spark's jars that match ``pattern``, from the folder that PySpark's launcher uses: SPARK_HOME if it is set,
    otherwise PySpark's own folder.
    """
    spark_home = os.environ.get("SPARK_HOME") or _pyspark_folder()
    return sorted(Path(spark_home, "jars").glob(pattern)) if spark_home is not None else []


def has_data_sources() -> bool:
    """Whether the installed PySpark has data sources in Python. Looks for the module without importing it, because the import
    takes a second.
    """
    package = _pyspark_folder()
    return package is not None and PathFinder.find_spec("pyspark.sql.datasource", [f"{package}/sql"]) is not None


def _pyspark_folder() -> str | None:
    """Return the folder of PySpark; None if it is not installed."""
    try:
        spec = importlib.util.find_spec("pyspark")
    except (ModuleNotFoundError, ValueError):  # raised by some finders, and for a module without a spec
        return None
    return next(iter(spec.submodule_search_locations or ()), None) if spec is not None else None


def exactly_once_conf() -> dict[str, Any]:
    """Return the settings that ``deliveryGuarantee`` exactly-once needs, for ``SparkSession.builder.config(map=...)``.

    Set these settings before the Spark context starts. A sink cannot detect that Spark retries a stage within a batch, or that
    a repeated batch splits its rows into other tasks; these settings prevent both.
    """
    return {
        "spark.stage.maxConsecutiveAttempts": "1",
        "spark.stage.ignoreDecommissionFetchFailure": "false",
        "spark.speculation": "false",
        "spark.sql.adaptive.streaming.stateless.enabled": "false",
    }
