"""A Python daemon for Spark that imports PySpark's worker and this package before it forks workers.

Set ``spark.python.daemon.module`` to the name of this module. With Spark's own daemon, each new worker imports PySpark's worker
and this package. This daemon imports both once, for all workers. Workers still import numpy (OpenBLAS), pyarrow (jemalloc) and
pandas. The daemon must not import these packages: they start threads, which do not exist after a fork, or draw random numbers,
which would be the same in all workers.

The package must be installed where executors run, because files of ``--py-files`` do not exist yet when a daemon starts. For
planning and commits Spark always uses its own daemons (docs/upstream.md).

Spark's Python processes import PySpark from a zip without bytecode, so each process compiles the modules of PySpark. Compiling
them takes longer than all other imports. This daemon imports PySpark from the folder beside that zip, where Python keeps the
bytecode.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import sys
from collections.abc import Iterable
from pathlib import Path

PRELOADED_MODULES = ("pyspark.worker", "rocketmq_spark.spark.datasource", "rocketmq_spark.session.spools")


def unzipped_folder(sys_path: Iterable[str]) -> Path | None:
    """Return the folder of the PySpark whose zip is in ``sys_path``; None if there is only the zip, as in YARN's containers."""
    for entry in sys_path:
        archive = Path(entry)
        if archive.name == "pyspark.zip" and archive.parent.match("python/lib"):
            # In a distribution, PySpark is in SPARK_HOME/python. With the package from PyPI, SPARK_HOME is PySpark itself, so the
            # folder above SPARK_HOME is used.
            for folder in (*archive.parents[1:2], *archive.parents[3:4]):
                if (folder / "pyspark" / "daemon.py").is_file():
                    return folder
    return None


def load(*names: str) -> None:
    """Import modules, and ignore errors, because a worker that needs a failed module imports it again and reports the error."""
    for name in names:
        with contextlib.suppress(BaseException):
            importlib.import_module(name)


def import_unzipped() -> None:
    """Import PySpark from its folder instead of the zip. Other packages are imported as before."""
    folder = unzipped_folder(sys.path)
    if folder is not None:
        sys.path.insert(0, str(folder))
        load("pyspark")  # Python imports the other modules of PySpark from the same folder
        sys.path.remove(str(folder))


if __name__ == "__main__":
    import_unzipped()
    load(*PRELOADED_MODULES)
    gc.freeze()  # garbage collections of workers then do not copy the daemon's memory
    from pyspark import daemon

    daemon.manager()
