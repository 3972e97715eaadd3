"""Spark's Python daemon, with what workers import loaded before they are forked: ``spark.python.daemon.module``.

Spark forks a worker for each task that finds none waiting, and each imports pyarrow, numpy and this package anew. Here the
daemon has done so, once. The package must be installed where executors run, for what ``--py-files`` brings is not there yet when
a daemon starts. Planning and commits have daemons of Spark's own, whatever is set (docs/upstream.md).

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

LOADED = (
    "numpy",
    "pandas",  # pyarrow imports it when it is given Python's objects
    "pyarrow.compute",
    "rocketmq_spark.datasource",
    "rocketmq_spark.sink.task",
    "rocketmq_spark.sink.writers",
    "rocketmq_spark.source.readers",
    "rocketmq_spark.source.stream",
)


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


def unzipped() -> None:
    """Have PySpark imported from its folder, and everything else from where it would be."""
    folder = beside_the_zip(sys.path)
    if folder is not None:
        sys.path.insert(0, str(folder))
        importlib.import_module("pyspark")  # the place of a package is that of its modules
        sys.path.remove(str(folder))


def load(*names: str) -> None:
    """Import what can be imported: a worker says better what it lacks, and why it needs that."""
    for name in names:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()  # so that collections of workers do not copy its pages


if __name__ == "__main__":
    unzipped()
    load(sys.argv[1], *LOADED)
    from pyspark import daemon

    daemon.manager()
