"""Spark's Python daemon, with what workers import loaded before they are forked: ``spark.python.daemon.module``.

Spark forks a worker for each plan of a source, each commit of a sink and each task that finds none waiting, and each imports
pyarrow, numpy and this package anew. Here the daemon has done so, once. The package must be installed where executors run, for
what ``--py-files`` brings is not there yet when a daemon starts.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import sys

from pyspark import daemon

LOADED = (
    "numpy",
    "pyarrow.compute",
    "rocketmq_spark.datasource",
    "rocketmq_spark.sink.task",
    "rocketmq_spark.sink.writers",
    "rocketmq_spark.source.readers",
    "rocketmq_spark.source.stream",
)


def load(*names: str) -> None:
    """Import what can be imported: a worker says better what it lacks, and why it needs that."""
    for name in names:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()  # so that collections of workers do not copy its pages


if __name__ == "__main__":
    load(sys.argv[1], *LOADED)
    daemon.manager()
