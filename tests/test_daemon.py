"""Spark's Python daemon with this package in it."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyspark
import pytest

from rocketmq_spark import daemon

_LOAD = """
import sys
from rocketmq_spark import daemon
daemon.load("no.such.module", *daemon.PRELOADED_MODULES)
print(*[name for name in daemon.PRELOADED_MODULES if name not in sys.modules])
"""


@pytest.mark.parametrize(
    ("zipped", "package", "found"),
    [
        ("spark/python/lib/pyspark.zip", "spark/python", True),
        ("site/pyspark/python/lib/pyspark.zip", "site", True),
        ("usercache/u/filecache/7/pyspark.zip", "usercache", False),
        ("a/b/pyspark.zip", "a", False),
    ],
)
def test_pyspark_is_taken_from_the_folders_of_spark_only(
    tmp_path: Path, zipped: str, package: str, found: bool
) -> None:
    """On YARN, another user may have the name ``pyspark``, and so a folder of this name beside the caches of others."""
    (tmp_path / package / "pyspark").mkdir(parents=True)
    (tmp_path / package / "pyspark" / "daemon.py").touch()
    assert daemon.unzipped_folder([str(tmp_path / zipped)]) == (tmp_path / package if found else None)


# A worker of Spark's daemon that says what it is; it is found by its name, which begins as PySpark's do.
_PROBE = """
import gc, json, logging, os, signal, sys, threading, warnings
import pyspark.worker

def threads():
    return sorted(open(f"/proc/self/task/{number}/comm").read().strip() for number in os.listdir("/proc/self/task"))

def main(infile, outfile):
    handlers = {each.name: getattr(signal.getsignal(each), "__name__", str(signal.getsignal(each))) for each in signal.Signals}
    begun = threads()
    import random, numpy, pandas, pyarrow.compute
    same = {
        "environment": dict(os.environ), "handlers": handlers, "threads at first": begun, "threads": threads(),
        "active": threading.active_count(), "path": sys.path, "folder": os.getcwd(), "mask": os.umask(0o22),
        "warnings": list(map(str, warnings.filters)), "collector": [gc.isenabled(), *gc.get_threshold()],
        "logging": [logging.root.level, len(logging.root.handlers)], "errors": numpy.geterr(),
        "recursion": sys.getrecursionlimit(), "flags": str(sys.flags),
    }
    drawn = [random.random(), numpy.random.rand(), pandas.Series(range(10**6)).sample(1).item(), os.urandom(8).hex()]
    outfile.write(json.dumps({"same": same, "drawn": drawn}).encode() + b"\\n")
    outfile.flush()
"""


def workers_of(module: str, folder: Path, count: int = 2) -> list[dict[str, Any]]:
    """What workers of a daemon say of themselves, asked as Spark's JVM asks for them."""
    (folder / "pyspark_probe.py").write_text(_PROBE)
    home = Path(pyspark.__file__).parent / "python" / "lib"
    path = os.pathsep.join([*map(str, sorted(home.glob("*.zip"), reverse=True)), str(folder)])
    env = {**os.environ, "PYTHONPATH": path, "PYTHON_WORKER_FACTORY_SECRET": "s", "PYTHONHASHSEED": "0"}
    pipe = subprocess.PIPE
    command = [sys.executable, "-m", module, "pyspark_probe"]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, env=env, cwd=folder) as process:
        assert process.stdout is not None
        (port,) = struct.unpack(">i", process.stdout.read(4))
        told = []
        for _ in range(count):
            with socket.create_connection(("127.0.0.1", port)) as sock, sock.makefile("rwb") as file:
                (pid,) = struct.unpack(">i", file.read(4))
                assert pid != process.pid
                file.write(struct.pack(">i", 1) + b"s")
                file.flush()
                assert file.read(6) == struct.pack(">i", 2) + b"ok"
                told.append(json.loads(file.readline()))
        assert process.stdin is not None
        process.stdin.close()
    return told


def test_workers_are_those_of_sparks_own_daemon(tmp_path: Path) -> None:
    """All that a user's program could notice, and that no two of them draw the same random numbers."""
    of_spark, ours = (workers_of(name, tmp_path) for name in ("pyspark.daemon", "rocketmq_spark.daemon"))
    for drawn in zip(*(one["drawn"] for one in (*of_spark, *ours)), strict=True):
        assert len(set(drawn)) == 4, drawn
    first, *others = (one["same"] for one in (*of_spark, *ours))
    assert first["environment"]["PYTHON_WORKER_FACTORY_SECRET"] == "s"
    assert len(first["threads"]) > len(first["threads at first"]) == 1, "numpy and pyarrow start some"
    for other in others:
        assert other == first


def test_preload_starts_no_thread_and_skips_threaded_libraries() -> None:
    look = (
        "import os, sys; from rocketmq_spark import daemon; daemon.load(*daemon.PRELOADED_MODULES); "
        "print(len(os.listdir('/proc/self/task')), {'numpy', 'pandas', 'pyarrow', 'grpc'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", look], capture_output=True, text=True, check=True)
    assert done.stdout == "1 set()\n"


@pytest.mark.parametrize(
    "end", ["raise ValueError('broken')", "import sys; sys.exit(3)", "raise KeyboardInterrupt", "1/0"]
)
def test_a_package_that_fails_in_any_way_stops_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    (tmp_path / "failing_package.py").write_text(end)
    monkeypatch.syspath_prepend(str(tmp_path))
    daemon.load("failing_package", "failing_package.more", "wave")
    assert ("failing_package" in sys.modules, "wave" in sys.modules) == (False, True)
    del sys.modules["wave"]


_UNZIPPED = """
import sys
from rocketmq_spark import daemon
before = [*sys.path]
daemon.import_unzipped()
from pyspark import daemon
print(sys.path == before, daemon.__file__)
"""


def test_preload_imports_worker_modules_and_skips_missing_ones() -> None:
    done = subprocess.run([sys.executable, "-c", _LOAD], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_what_plans_and_commits_does_not_import_pandas() -> None:
    """A quarter of a second in each of Spark's processes for that, which nobody can prepare."""
    look = (
        "from rocketmq_spark.spark.sink import task; from rocketmq_spark.spark.source import stream; "
        "import sys; print('pandas' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_workers_are_forked_from_it(spark) -> None:
    def look(_: int) -> tuple[str, list[str], list[str]]:
        missing = [name for name in daemon.PRELOADED_MODULES if name not in sys.modules]
        zipped = [name for name, module in sys.modules.items() if "pyspark.zip" in str(getattr(module, "__file__", ""))]
        return Path(f"/proc/{os.getppid()}/cmdline").read_text(), missing, zipped

    ((parent, missing, zipped),) = spark.sparkContext.parallelize([0], 1).map(look).collect()
    assert "rocketmq_spark.daemon" in parent
    assert missing == []
    assert zipped == []


@pytest.mark.parametrize(
    ("zipped", "package", "found"),
    [
        ("site-packages/pyspark/python/lib/pyspark.zip", "site-packages/pyspark", "site-packages"),
        ("spark-4.3.0/python/lib/pyspark.zip", "spark-4.3.0/python/pyspark", "spark-4.3.0/python"),
        ("container/pyspark.zip", "elsewhere/pyspark", None),
        ("site-packages/pyspark/python/lib/py4j-src.zip", "site-packages/pyspark", None),
    ],
)
def test_pyspark_is_found_beside_its_zip(tmp_path: Path, zipped: str, package: str, found: str | None) -> None:
    (tmp_path / package).mkdir(parents=True)
    (tmp_path / package / "daemon.py").touch()
    path = [str(tmp_path), str(tmp_path / zipped)]
    assert daemon.unzipped_folder(path) == (None if found is None else tmp_path / found)


def test_a_zip_of_few_folders_is_no_error() -> None:
    assert daemon.unzipped_folder(["pyspark.zip", "/pyspark.zip"]) is None


def test_everything_else_is_imported_from_where_it_was() -> None:
    home = Path(pyspark.__file__).parent
    libraries = os.pathsep.join(map(str, sorted((home / "python" / "lib").glob("*.zip"), reverse=True)))
    done = subprocess.run(
        [sys.executable, "-c", _UNZIPPED],
        env={**os.environ, "PYTHONPATH": libraries},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["True", str(home / "daemon.py")]
