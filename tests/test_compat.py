"""A PySpark that lacks a part of the data source API: everything can be imported, and errors name the missing class."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from rocketmq_spark.errors import OptionError
from rocketmq_spark.spark import compat
from rocketmq_spark.spark.datasource import RocketMQDataSource, register
from tests.fix_spark import environment
from tests.schemas import struct

# Each fork hides one part, and then imports everything that a user or Spark may import. Before that, the parent imports what does
# not depend on these parts, so that the forks are quick.
IMPORTS = """
import importlib, json, os, sys, traceback

import numpy, pyarrow, pyspark.sql.datasource, pyspark.sql.streaming.listener
import rocketmq_spark.session, rocketmq_spark.producer.rows.sender, rocketmq_spark.columnar.decode.decoder
try:
    import pyspark.sql.streaming.datasource
except ImportError:
    pass

for part in json.loads(sys.argv[1]):
    child = os.fork()
    if not child:
        try:
            module, _, name = part.partition(":")
            if not name:
                sys.modules[module] = None
            elif hasattr(sys.modules.get(module), name):
                delattr(sys.modules[module], name)
            import rocketmq_spark
            for public in rocketmq_spark.__all__:
                getattr(rocketmq_spark, public)
            for inner in ("source.batch_reader", "source.stream_reader", "sink.writer", "datasource"):
                importlib.import_module(f"rocketmq_spark.spark.{inner}")
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        print(part)
"""


def test_every_name_is_importable_without_each_part_of_the_api() -> None:
    modules = sorted(set(compat.MODULE_BY_CLASS.values()))
    parts = [*modules, *(f"{module}:{name}" for name, module in compat.MODULE_BY_CLASS.items())]
    assert len(parts) > 20
    command = [sys.executable, "-c", IMPORTS, json.dumps(parts)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


@pytest.mark.parametrize(
    ("make", "given", "missing"),
    [
        ("reader", [], "DataSourceReader"),
        ("streamReader", [], "DataSourceStreamReader"),
        ("writer", [False], "DataSourceArrowWriter"),
        ("streamWriter", [False], "DataSourceStreamArrowWriter"),
    ],
)
def test_a_use_that_needs_a_missing_class_names_it(monkeypatch, make, given, missing) -> None:
    monkeypatch.setitem(compat._classes_by_name, missing, None)
    made = RocketMQDataSource({"nameServer": "127.0.0.1:1", "subscribe": "t"})
    with pytest.raises(
        OptionError, match=rf'format\("rocketmq"\) needs pyspark.sql.datasource.{missing}, which .*PySpark'
    ) as e:
        getattr(made, make)(struct("topic string, body binary"), *given)
    assert "foreach_batch_writer" in str(e.value)


def test_register_names_the_missing_api(monkeypatch) -> None:
    monkeypatch.setitem(compat._classes_by_name, "DataSource", None)
    with pytest.raises(OptionError, match=r"register needs pyspark\.sql\.datasource\.DataSource, which"):
        register(None)  # type: ignore[arg-type]
