"""Settings of Spark for this connector, and a check that Spark's workers can import it.

docs/performance.md has the effect of each setting.

Spark runs ``python3`` from the path unless ``PYSPARK_PYTHON`` names another Python. In a virtual environment that is not
activated, ``python3`` lacks the package, and Spark reports "Failed to find the data source: rocketmq". This error is the most
common problem of new users.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import sys
import warnings
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

# If this environment variable is set, tasks read every batch of a stream: ``source.partition_reader``.
READ_BY_TASKS = "ROCKETMQ_SPARK_READ_BY_TASKS"


def low_latency_conf() -> dict[str, Any]:
    """Return settings that shorten micro-batches, for ``SparkSession.builder.config(map=...)``.

    Give these settings before the session starts. Checkpoints must be on a local disk or on HDFS, whose renames are atomic. On an
    object store, omit ``spark.sql.streaming.checkpointFileManagerClass`` and use the class for that store. If this function does
    not find Spark's jars, as with Spark Connect, it omits this setting, too, because the name of the class depends on the version
    of Spark.

    Whoever may write to Spark's Unix sockets can run code in the driver. So if the umask of this process lets other users write
    to new files, this function logs a warning and omits the setting for Unix sockets. Start executors on other machines with
    umask 022 or 077, too.
    """
    manager = _checkpoint_manager()
    return {
        **_unix_sockets(),
        "spark.sql.execution.python.udf.buffer.size": "1048576",
        **({"spark.sql.streaming.checkpointFileManagerClass": manager} if manager else {}),
        "spark.sql.adaptive.enabled": "false",
    }


def _unix_sockets() -> dict[str, str]:
    from rocketmq_spark.base import folders  # here, because every worker imports this module, and few drivers call this

    if not folders.new_files_are_open():
        return {_UNIX_SOCKETS: "true"}
    text = "%s is not set, because the umask %03o lets other users write to new files, also to Spark's sockets; use umask 022"
    logger.warning(text, _UNIX_SOCKETS, folders.creation_mask())
    return {}


def private_sockets(folder: Path) -> dict[str, str]:
    """Return settings with which Spark creates its Unix sockets in ``folder``, which only this user may use, and which exists on
    all machines of the session; none if its path is too long for a socket.
    """
    if len(os.fsencode(folder)) + _SOCKET_NAME_BYTES > _MAX_SOCKET_PATH_BYTES:
        return {}
    return {_UNIX_SOCKETS: "true", "spark.python.unix.domain.socket.dir": str(folder)}


@functools.cache
def _checkpoint_manager() -> str | None:
    """Return the class name of the checkpoint manager in Spark's jars; None if the jars lack the class, or are not on this
    machine.
    """
    import zipfile  # here, because every worker imports this module, and few drivers call this

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
    """Whether the installed PySpark has data sources in Python. Looks for the module without an import, which takes a second."""
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

    Set them before the Spark context starts. A sink cannot detect that Spark retries a stage within a batch, or that a repeated
    batch splits its rows into other tasks; these settings prevent both.
    """
    return {
        "spark.stage.maxConsecutiveAttempts": "1",
        "spark.stage.ignoreDecommissionFetchFailure": "false",
        "spark.speculation": "false",
        "spark.sql.adaptive.streaming.stateless.enabled": "false",
    }


_IMPORT_PROBE = (
    "import importlib.util as u, sys; sys.exit(any(u.find_spec(n) is None for n in ('rocketmq_spark', 'pyarrow')))"
)
_PROBE_TIMEOUT_S = 10.0
_WORKER_MODULES = ("pyspark.", "rocketmq_spark.daemon")


@functools.cache
def warn_if_workers_differ(program: str) -> None:
    """Warn once if ``program``, the Python of Spark's workers on this machine, lacks this package or pyarrow.

    A program that does not exist on this machine is not checked, because workers may run on other machines. The Python of this
    process is not checked, either.
    """
    if can_import(program):
        return
    warnings.warn(
        f"Spark's workers run {program}, which cannot import rocketmq_spark and pyarrow, while this driver runs "
        f"{sys.executable}: Spark will not find the format 'rocketmq'. Before the session is created, activate the virtual "
        f"environment, or set PYSPARK_PYTHON: os.environ['PYSPARK_PYTHON'] = sys.executable",
        stacklevel=3,
    )


def can_import(program: str) -> bool:
    """Whether ``program`` can import this package and pyarrow; True if the answer cannot be determined."""
    import shutil  # here, because every worker imports this module, and few drivers call this

    path = shutil.which(program)
    return path is None or os.path.abspath(path) == os.path.abspath(sys.executable) or _can_import(path)


def _can_import(path: str) -> bool:
    import subprocess

    from rocketmq_spark.base import process

    call = process.python_call("-c", _IMPORT_PROBE, program=path)
    try:
        return subprocess.run(**call, capture_output=True, timeout=_PROBE_TIMEOUT_S).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return True  # the answer is unknown, and a warning needs a known problem


def check_workers_with_pyspark() -> None:
    """Check the Python of Spark's workers now if this program has imported PySpark, otherwise when it imports PySpark.

    pytest loads this package as a plug-in before tests can choose the Python of workers, so there only ``register`` checks.
    """
    if "pyspark" in sys.modules:
        _check_workers()
    elif "pytest" not in sys.modules:
        sys.meta_path.insert(0, _PySparkImportHook())


class _PySparkImportHook:
    """An import hook that finds no module. It checks the Python of Spark's workers once, when PySpark is imported."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        # The hook waits for "pyspark.sql", which each real import of PySpark imports: "pyspark" may also be looked up by a
        # program that only checks whether PySpark is installed.
        if name == "pyspark.sql":
            sys.meta_path.remove(self)
            _check_workers()


def _check_workers() -> None:
    main_spec = getattr(sys.modules["__main__"], "__spec__", None)
    if not (main_spec and main_spec.name.startswith(_WORKER_MODULES)):
        warn_if_workers_differ(program_of_workers())


def program_of_workers() -> str:
    """Return the Python program that Spark's workers run. The session knows it; if there is no session, ``PYSPARK_PYTHON`` names
    it.
    """
    context = getattr(getattr(sys.modules["pyspark"], "SparkContext", None), "_active_spark_context", None)
    return str(context.pythonExec) if context is not None else os.environ.get("PYSPARK_PYTHON") or "python3"
