"""How much Spark's Python processes import: each has 10 s to connect back, and without bytecode files each compiles all of it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.fix_spark import environment

# Of the source files of all modules that a process imports. CPython compiles about 4 MB in a second of CPU time.
MOST_BYTES = 12_000_000
READER = ("rocketmq_spark.spark.datasource", "rocketmq_spark.spark.source.batch_reader")
STREAM_READER = ("rocketmq_spark.spark.datasource", "rocketmq_spark.spark.source.stream_reader")
WRITER = ("rocketmq_spark.spark.datasource", "rocketmq_spark.spark.sink.writer")
OF_WRITERS = "columnar.encode producer.engine producer.rows spool spark.sink spark.checkpoints"
OF_READERS = "spark.source.stream spark.source.batch_reader spark.source.stream_reader consumer"
# Each kind of process: PySpark's module, our modules that it imports, and our modules that it must not import.
KINDS = {
    "finds the source": ("pyspark.sql.worker.lookup_data_sources", ("pyspark_rocketmq",), "base options spark"),
    "makes the source": (
        "pyspark.sql.worker.create_data_source",
        (READER[0], "rocketmq_spark.columnar.decode.schema"),
        f"session client remoting {OF_WRITERS} {OF_READERS}",
    ),
    "plans a batch": ("pyspark.sql.worker.plan_data_source_read", READER, f"{OF_WRITERS} columnar.decode.decoder"),
    "plans a stream": (
        "pyspark.sql.streaming.python_streaming_source_runner",
        STREAM_READER,
        f"{OF_WRITERS} columnar.decode.decoder",
    ),
    "reads": ("pyspark.worker", (*READER, *STREAM_READER, "rocketmq_spark.columnar.decode.decoder"), OF_WRITERS),
    "plans a write": ("pyspark.sql.worker.write_into_data_source", WRITER, OF_READERS),
    "writes": ("pyspark.worker", WRITER, OF_READERS),
    "commits": ("pyspark.sql.worker.python_streaming_sink_runner", WRITER, OF_READERS),
}
NEVER_IMPORTED = "cli localbroker delay notebook aio admin grpc_proxy consumer.push testing"
SCRIPT = """
import importlib, os, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
package = "rocketmq_spark."
files = {str(getattr(module, "__file__", None)) for module in list(sys.modules.values())}
size = sum(os.path.getsize(file) for file in files if file.endswith(".py"))
print(*(name.removeprefix(package) for name in sys.modules if name.startswith(package)), "pandas" in sys.modules, size)
"""


@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_imports_little_and_only_what_it_uses(kind: str) -> None:
    spark, ours, banned = KINDS[kind]
    command = [sys.executable, "-c", SCRIPT, spark, *ours]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    *modules, pandas, size = done.stdout.split()
    wrong = [
        name
        for name in modules
        for place in (*banned.split(), *NEVER_IMPORTED.split())
        if name == place or name.startswith(f"{place}.")
    ]
    assert wrong == []
    assert pandas == "False"
    assert 0 < int(size) < MOST_BYTES
