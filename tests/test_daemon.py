"""Spark's Python daemon with this package in it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest

from rocketmq_spark import daemon

_LOAD = """
import sys
from rocketmq_spark import daemon
daemon.load("no.such.module", *daemon.LOADED)
print(*[name for name in daemon.LOADED if name not in sys.modules])
"""


_UNZIPPED = """
import sys
from rocketmq_spark import daemon
before = [*sys.path]
daemon.unzipped()
from pyspark import daemon
print(sys.path == before, daemon.__file__)
"""


def test_all_that_workers_import_is_there_and_what_is_not_stops_nobody() -> None:
    done = subprocess.run([sys.executable, "-c", _LOAD], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_what_plans_and_commits_does_not_import_pandas() -> None:
    """A quarter of a second in each of Spark's processes for that, which nobody can prepare."""
    look = (
        "import sys; import rocketmq_spark.sink.writers, rocketmq_spark.source.stream; print('pandas' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_workers_are_forked_from_it(spark) -> None:
    def look(_: int) -> tuple[str, list[str], list[str]]:
        missing = [name for name in daemon.LOADED if name not in sys.modules]
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
    assert daemon.beside_the_zip(path) == (None if found is None else tmp_path / found)


def test_a_zip_of_few_folders_is_no_error() -> None:
    assert daemon.beside_the_zip(["pyspark.zip", "/pyspark.zip"]) is None


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
