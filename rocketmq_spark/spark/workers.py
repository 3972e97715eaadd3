"""Checks that the Python of Spark's workers can import this package.

Spark runs ``python3`` from the path unless ``PYSPARK_PYTHON`` names another Python. In a virtual environment that is not
activated, ``python3`` lacks the package, and Spark reports "Failed to find the data source: rocketmq". This error is the most
common problem of new users.

``import rocketmq_spark`` always imports this module, so the module imports little; the functions of the check import the rest.
"""

from __future__ import annotations

import functools
import os
import sys

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
    import warnings

    warnings.warn(
        f"Spark's workers run {program}, which cannot import rocketmq_spark and pyarrow, while this driver runs "
        f"{sys.executable}: Spark will not find the format 'rocketmq'. Before the session is created, activate the virtual "
        f"environment, or set PYSPARK_PYTHON: os.environ['PYSPARK_PYTHON'] = sys.executable",
        stacklevel=3,
    )


def can_import(program: str) -> bool:
    """Whether ``program`` can import this package and pyarrow; True if the answer cannot be determined."""
    import shutil

    path = shutil.which(program)
    return path is None or os.path.abspath(path) == os.path.abspath(sys.executable) or _can_import(path)


def _can_import(path: str) -> bool:
    import subprocess

    from rocketmq_spark.base import process

    call = process.python_call("-c", _IMPORT_PROBE, program=path)
    try:
        return subprocess.run(**call, capture_output=True, timeout=_PROBE_TIMEOUT_S).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return True  # no warning, because it is unknown whether the import would fail


def check_workers_with_pyspark() -> None:
    """Check the Python of Spark's workers now if this program has imported PySpark, otherwise when it imports PySpark.

    pytest loads this package as a plug-in before tests can choose the Python of workers. So with pytest, the import of
    PySpark starts no check, and only ``register`` checks the Python of workers.
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
    """Return the Python program that Spark's workers run. This is the program of the session; without a session, the program that
    ``PYSPARK_PYTHON`` names.
    """
    context = getattr(getattr(sys.modules["pyspark"], "SparkContext", None), "_active_spark_context", None)
    return str(context.pythonExec) if context is not None else os.environ.get("PYSPARK_PYTHON") or "python3"
