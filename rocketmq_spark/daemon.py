"""Spark's Python daemon, with part of what workers import loaded before they are forked: ``spark.python.daemon.module``.

Spark forks a worker for each task that finds none waiting, and each imports PySpark's worker and this package anew. Here the
daemon has done so, once. What starts threads or draws random numbers when it is imported stays with the workers, as with Spark's
own daemon: numpy (OpenBLAS), pyarrow (jemalloc) and pandas. A fork would lose the threads, and all workers would draw the same.

The package must be installed where executors run, for what ``--py-files`` brings is not there yet when a daemon starts. Planning
and commits have daemons of Spark's own, whatever is set (docs/upstream.md).

Spark has its Python processes import PySpark from a zip without bytecode, so that each compiles what it needs, which takes
longer than all else that it imports. The same modules lie beside that zip, and bytecode is kept of those.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import sys
from collections.abc import Iterable
from pathlib import Path

LOADED = ("pyspark.worker", "rocketmq_spark.spark.datasource", "rocketmq_spark.session.spools")


def beside_the_zip(path: Iterable[str]) -> Path | None:
    """Where the PySpark lies whose zip is in ``path``; None where there is the zip only, as in YARN's containers."""
    for entry in path:
        zipped = Path(entry)
        if zipped.name == "pyspark.zip":
            # SPARK_HOME/python of a distribution; of a package from PyPI what SPARK_HOME, pyspark/, is in.
            for folder in (*zipped.parents[1:2], *zipped.parents[3:4]):
                if (folder / "pyspark" / "daemon.py").is_file():
                    return folder
    return None


def load(*names: str) -> None:
    """Import what can be imported, whatever a package raises: a worker that needs it tries again, and says why."""
    for name in names:
        with contextlib.suppress(BaseException):
            importlib.import_module(name)


def unzipped() -> None:
    """Have PySpark imported from its folder, and everything else from where it would be."""
    folder = beside_the_zip(sys.path)
    if folder is not None:
        sys.path.insert(0, str(folder))
        load("pyspark")  # the place of a package is that of its modules
        sys.path.remove(str(folder))


if __name__ == "__main__":
    unzipped()
    load(*LOADED)
    gc.freeze()  # so that collections of workers do not copy its pages
    from pyspark import daemon

    daemon.manager()
