"""Spark's Python daemon with this package in it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from rocketmq_spark import daemon

_LOAD = """
import sys
from rocketmq_spark import daemon
daemon.load("no.such.module", *daemon.LOADED)
print(*[name for name in daemon.LOADED if name not in sys.modules])
"""


def test_all_that_workers_import_is_there_and_what_is_not_stops_nobody() -> None:
    done = subprocess.run([sys.executable, "-c", _LOAD], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_workers_are_forked_from_it(spark) -> None:
    def look(_: int) -> tuple[str, list[str]]:
        return Path(f"/proc/{os.getppid()}/cmdline").read_text(), [n for n in daemon.LOADED if n not in sys.modules]

    ((parent, missing),) = spark.sparkContext.parallelize([0], 1).map(look).collect()
    assert "rocketmq_spark.daemon" in parent
    assert missing == []
