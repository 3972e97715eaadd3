"""``rocketmq-spark port`` reads programs for Kafka. It finds their lines, and nothing in programs of ours."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from rocketmq_spark.cli.kafka_lines import port_report
from rocketmq_spark.cli.kafka_text import CHECK_FORMAT
from rocketmq_spark.options.table import foreign_option
from tests.cli.conftest import documents
from tests.harness import peak_bytes
from tests.test_house import ROOT

PAGES = sorted((ROOT / "docs").rglob("*.md"))
BLOCKS = [
    (f"{path.name}:{number}", block)
    for path in PAGES
    for number, block in enumerate(re.findall(r"^```py(?:thon)?\n(.*?)^```", path.read_text("utf-8"), re.M | re.S))
]
OF_KAFKA = [(name, block) for name, block in BLOCKS if 'format("kafka")' in block]
OURS = [(name, block) for name, block in BLOCKS if 'format("kafka")' not in block]

JOB = """\
from pyspark.sql import SparkSession, functions as F

# format("kafka") in a comment is no finding
spark = SparkSession.builder.config("spark.jars.packages", "org.apache.spark:spark-sql-kafka-0-10_2.13:4.0.0").getOrCreate()
common = {"kafka.bootstrap.servers": "k:9092", "kafka.security.protocol": "SASL_SSL"}
rows = (spark.readStream.format("kafka").options(**common)
        .option("subscribe", "orders").option("includeHeaders", "true")
        .option("startingOffsets", '{"orders": {"0": 12}}')
        .load())
values = rows.select(F.col("key"), F.expr("cast(value as string)"), rows["partition"])
values.writeStream.format("kafka").outputMode("update").option("topic", "t").trigger(continuous="1 second").start()
values.write.format("kafka").options(topic="shop.orders", includeHeaders=True, **{"kafka.linger.ms": "5"}).save()
spark.sql("CREATE TABLE t USING kafka OPTIONS (subscribe 'orders')")
"""


JAR = "spark-sql-kafka-0-10_2.13:4.0.0"


def places(name: str, text: str) -> list[tuple[str, str]]:
    return [(place.where, place.kafka) for place in port_report(name, text).lines]


def answer(text: str) -> str:
    (place,) = port_report("job.py", text).lines
    return place.replacement


def test_each_line_that_changes_is_found():
    assert places("job.py", JOB) == [
        ("4", "spark-sql-kafka-0-10_2.13:4.0.0"),
        ("5", "kafka.bootstrap.servers"),
        ("5", "kafka.security.protocol"),
        ("6", 'format("kafka")'),
        ("7", "includeHeaders"),
        ("8", "startingOffsets"),
        ("10", "column key"),
        ("10", "column partition"),
        ("10", "column value"),
        ("11", 'format("kafka")'),
        ("11", 'outputMode("update")'),
        ("11", "trigger(continuous=…)"),
        ("12", 'format("kafka")'),
        ("12", "includeHeaders"),
        ("12", "kafka.linger.ms"),
        ("12", "save()"),
        ("12", "topic"),
        ("13", "USING kafka"),
    ]
    here = {place.kafka: place.replacement for place in port_report("job.py", JOB).lines if place.where == "12"}
    assert here["includeHeaders"] == "remove it: the sink always stores a column headers"
    assert here["kafka.linger.ms"] == foreign_option("kafka.linger.ms")
    assert "remove it: Spark's sources and sinks have no such option" in here["kafka.linger.ms"]
    assert here["topic"].endswith("topicNames=dotsToUnderscores")


@pytest.mark.parametrize(
    "text",
    [
        'FMT = "kafka"\nspark.read.format(FMT).load()',
        'FMT: str = "kafka"\nspark.read.format(FMT).load()',
        'spark.read.load(format="kafka")',
        'spark.read.load(None, "kafka")',
        'spark.readStream.format("Kafka").load()',
        'df.writeStream.start(format="kafka")',
        'df.write.mode("append").save(format="kafka")',
        'df.write.save(None, "kafka", "append")',
        'df.write.save(format="kafka", mode="append")',
        'reader = spark.readStream.format("kafka")',
    ],
)
def test_each_way_to_name_the_format(text):
    assert answer(text) == 'format("rocketmq").option("kafkaColumns", True)'


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ('.option("assign", json.dumps(queues))', "assign"),
        ('.options(endingOffsets=\'{"t": {"0": 5}}\')', "endingOffsets"),
        ('.options(**{"startingOffsets": start})', "startingOffsets"),
        ('.option("startingOffsetsByTimestamp", """{"t": {"0": 17}}""")', "startingOffsetsByTimestamp"),
        ('.option("subscribePattern", r"shop\\..*")', "subscribePattern"),
        ('.option("subscribe", "a.b,c")', "subscribe"),
        ('.option("checkpointLocation", "/c")', "checkpointLocation"),
        ('.option("groupIdPrefix", "g")', "groupIdPrefix"),
        ('.option("startingOffsets", "earliest").option("subscribe", "t").option("subscribePattern", "a_.*")', None),
        ('.option("startingOffsets", \'{"t": "earliest"}\').option("maxOffsetsPerTrigger", 5)', None),
    ],
)
def test_shared_options_are_found_if_their_values_change(options, found):
    names = [kafka for _, kafka in places("job.py", f"spark.readStream{options}.load(format='kafka')")]
    assert names == sorted(['format("kafka")', *([found] if found else [])])
    left = [kafka for _, kafka in places("job.py", f"spark.readStream.format('rocketmq'){options}.load()")]
    assert left == ([found] if found not in (None, "assign", "checkpointLocation", "startingOffsets") else [])


def test_a_time_replaces_offsets_of_the_same_end():
    chain = "spark.read.format('kafka').option({!r}, offsets)"
    for name in ("startingOffsets", "endingOffsets", "startingOffsetsByTimestamp", "endingOffsetsByTimestamp"):
        (place,) = [each for each in port_report("job.py", chain.format(name)).lines if each.kafka == name]
        assert place.replacement.endswith(f"option {name[: name.index('ingO')]}ingTimestamp")


@pytest.mark.parametrize(
    "text",
    [
        '"""Reads orders using Kafka, format("kafka"), with spark-sql-kafka-0-10."""',
        'd = {"key": 1, "value": 2}\nprint(d["key"])',
        'df.writeStream.format("console").outputMode("complete").start()',
        'df.writeStream.outputMode("update").foreachBatch(write).start()',
        'spark.read.format("jdbc").option("timeout", 5).option("key", "k").option("topic", "a.b").load()',
        'df.write.format("delta").save("/t")',
        'log.info("written using kafka")',
        'log.info("compared with spark-sql-kafka")',
        'r = spark.readStream.format("rocketmq")\nr = r.option("kafkaColumns", True)\nr.option("includeHeaders", True).load()',
        'o = {}\no["subscribe"] = "a.b"',
        'w = df.write.format("delta").mode("append")\nw.save()',
        'print("{} and {}".format("kafka", 1))',
    ],
)
def test_what_only_looks_like_kafka_is_no_finding(text):
    other = "rows = spark.read.format('kafka').load()"
    assert places("job.py", f"{text}\n{other}")[:-1] == []


@pytest.mark.parametrize(
    ("text", "kafka"),
    [
        ('df.write.save(format="kafka", mode="overwrite")', 'mode("overwrite")'),
        ('df.write.format("kafka").mode("ignore").save()', 'mode("ignore")'),
        ('df.writeStream.start(format="kafka", outputMode="complete")', 'outputMode("complete")'),
        ('SparkConf().set("spark.kafka.consumer.cache.capacity", 64)', "spark.kafka.consumer.cache.capacity"),
        ('q.lastProgress["sources"][0]["metrics"]["maxOffsetsBehindLatest"]', "maxOffsetsBehindLatest"),
        ('reader = reader.option("kafka.group.id", "g")', "kafka.group.id"),
        ('spark.read.format("kafka").option(key="kafka.group.id", value="g").load()', "kafka.group.id"),
        ('spark.read.format("kafka").option("subscribe", value="a.b").load()', "subscribe"),
        ('o = {}\no["kafka.bootstrap.servers"] = "k:1"', "kafka.bootstrap.servers"),
        ('o = {}\no["kafka.group.id"] = "k:1"\no["subscribe"] = "a.b"', "subscribe"),
        ('o = dict()\no["subscribe"] = "a.b"\nspark.read.format("kafka").options(**o)', "subscribe"),
        ('o: dict = {"subscribe": "a.b"}\nspark.read.load(format="kafka", **o)', "subscribe"),
        ('r = spark.readStream.format("kafka")\nr = r.option("subscribe", "a.b")', "subscribe"),
        ('w = df.writeStream.format("kafka")\nw.outputMode("update").start()', 'outputMode("update")'),
    ],
)
def test_modes_settings_and_metrics(text, kafka):
    assert kafka in [found for _, found in places("job.py", text)]


@pytest.mark.parametrize(("name", "block"), OF_KAFKA, ids=[name for name, _ in OF_KAFKA])
def test_every_option_of_the_pages_jobs_is_found(name, block):
    found = {kafka for _, kafka in places("job.py", block)}
    assert {'format("kafka")', *re.findall(r'"(kafka\.[\w.]+)"', block)} <= found


@pytest.mark.parametrize(("name", "block"), OURS, ids=[name for name, _ in OURS])
def test_a_program_of_ours_has_none(name, block):
    assert places("job.py", block) == []


def test_the_example_has_none():
    text = (ROOT / "examples" / "orders_pipeline.py").read_text("utf-8")
    assert places("orders_pipeline.py", text) == []


def test_clients_and_dstreams():
    text = "from kafka import KafkaProducer\nimport aiokafka\nfrom pyspark.streaming.kafka import KafkaUtils\nimport kafkaesque\n"
    assert places("service.py", text) == [("1", "kafka"), ("2", "aiokafka"), ("3", "pyspark.streaming.kafka")]


def test_cells_that_are_not_python_are_searched_line_by_line():
    cells = [
        {"cell_type": "markdown", "source": ['format("kafka")']},
        {"cell_type": "code", "source": ["%pip install x\n", "FMT = 'kafka'\n", "if x:\n", "    !ls\n"]},
        {"cell_type": "code", "source": "spark.read.format(FMT).load()"},
        {"cell_type": "code", "source": ["%%sql\n", "CREATE TABLE t\n", "USING kafka"]},
        {"cell_type": "code", "source": ['val df = spark.read.format("kafka")']},
        {"cell_type": "code"},
    ]
    lines, searched = port_report("job.ipynb", json.dumps({"cells": cells}))
    assert [(place.where, place.kafka) for place in lines] == [
        ("3:1", 'format("kafka")'), ("4:3", "USING kafka"), ("5:1", 'format("kafka")'),
    ]  # fmt: skip
    assert searched == ["cell 4", "cell 5"]


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("x = 1\n%sql CREATE TABLE t USING kafka OPTIONS (subscribe 'a.b')", [("1:2", "USING kafka"), ("1:2", "subscribe")]),
        ("!spark-submit --packages org.apache.spark:spark-sql-kafka-0-10_2.13:4.0.0 job.py", [("1:1", JAR)]),
        ("if x:\n  !spark-submit \\\n  --packages org.apache.spark:spark-sql-kafka-0-10_2.13:4.0.0\nx = 'kafka'",
         [("1:3", JAR), ("1:4", '"kafka"')]),
        ("%env PYSPARK_SUBMIT_ARGS=--packages org.apache.spark:spark-sql-kafka-0-10_2.13:4.0.0 pyspark-shell", [("1:1", JAR)]),
        ("%scala\nval df = spark.read.format(\"kafka\")", [("1:2", 'format("kafka")')]),
        ("%md\nUse format(\"kafka\")", []),
        ("x = (17\n % y)\nspark.read.format('kafka')", [("1:3", 'format("kafka")')]),
        ("%pip install kafka-python\n!ls kafka", []),
    ],
)  # fmt: skip
def test_magic_lines_of_a_notebook_are_searched(source, found):
    cells = [{"cell_type": "code", "source": source.splitlines(keepends=True)}]
    assert places("job.ipynb", json.dumps({"cells": cells})) == found


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_other_languages_in_a_notebook_of_databricks(end):
    text = """\
# Databricks notebook source
F = "kafka"
# COMMAND ----------
# MAGIC %md Use format("kafka")
# COMMAND ----------
# MAGIC %sql
# MAGIC
# MAGIC CREATE TABLE t USING kafka OPTIONS (subscribe 'a.b')
# COMMAND ----------
# MAGIC %scala
# MAGIC val df = spark.readStream.format("kafka").load()
spark.read.format(F).load()
""".replace("\n", end)
    found = [("11", 'format("kafka")'), ("12", 'format("kafka")'), ("8", "USING kafka"), ("8", "subscribe")]
    assert sorted(places("job.py", text)) == found
    assert port_report("job.py", text).searched_parts == ["the text after # MAGIC"]
    for name, comment in (("job.sql", "--"), ("Job.scala", "//")):
        ((line, _),) = places(
            name, f'SELECT 1{end}{comment} MAGIC %python{end}{comment} MAGIC spark.read.format("kafka"){end}'
        )
        assert line == "3"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "Job.scala",
            'spark.readStream\n.format("kafka")\n.option("kafka.group.id", "g")\n.option("assign", """{"t":[0]}""")\n'
            '.outputMode("update")',
        ),
        (
            "job.sql",
            "CREATE TABLE t\nUSING KAFKA\nOPTIONS (`kafka.group.id` 'g',\nstartingOffsets '{\"t\":{\"0\":3}}',\n"
            "includeHeaders 'true')",
        ),
        (
            "submit.sh",
            "spark-submit \\\n  --packages org.apache.spark:spark-sql-kafka-0-10_2.13:4.0 \\\n  --conf kafka.group.id=g \\\n"
            "  --conf spark.kafka.producer.cache.timeout=1m \\\n  --conf kafka.acks=all",
        ),
    ],
)
def test_other_languages_by_lines(name, text):
    lines, searched = port_report(name, text)
    assert [place.where for place in lines] == ["2", "3", "4", "5"]
    assert searched == [name]


COLUMNS_JOB = """\
rows = spark.readStream.format("kafka").load()
good = rows.where("offset > 5 and topic = 'value'").withColumn("headers", F.lit(None))
good.select("key", F.expr("cast(timestamp as timestamp) as t"), good.value, good["partition"]).limit(1)
rows.createTempView("t"); spark.sql("SELECT cast(value AS STRING) FROM t")
sent = other.selectExpr("id AS key", "CAST(x AS timestamp)", '''1
  AS r.value''', "my_value", "value(1)", "keys.value_1")
late = rows.withWatermark("timestamp", "1 hour").groupBy(F.window("timestamp", "1 hour"), "key")
def other_rows(given): given.value
given = rows.limit(1)
both = rows.limit(1)
both = spark.table("t")
query = rows.writeStream.format("delta").start()
both.value, query.offset, other.value, other["key"], d.get("value"), good.offset(3), print("key")
other.select("key", F.col("value")).where("offset > 1"); F.col("key"); spark.sql("SELECT key FROM u")
sent.write.format("kafka").mode("append").save()
"""


def test_columns_are_listed_where_they_are_certain():
    found = [(place.where, place.kafka) for place in port_report("job.py", COLUMNS_JOB).lines]
    assert found == [
        ("1", 'format("kafka")'),
        ("2", "column headers"),
        ("2", "column offset"),
        ("2", "column topic"),
        ("3", "column key"),
        ("3", "column partition"),
        ("3", "column timestamp"),
        ("3", "column value"),
        ("4", "column value"),
        ("5", "column key"),
        ("6", "column value"),
        ("7", "column key"),
        ("7", "column timestamp"),
        ("15", 'format("kafka")'),
    ]
    here = {place.kafka: place.replacement for place in port_report("job.py", COLUMNS_JOB).lines}
    assert here["column offset"] == "stays, with kafkaColumns=true; without it: 'queueOffset'"
    assert here["column topic"] == "stays, with kafkaColumns=true"
    by_line = {
        place.where: place.replacement for place in port_report("job.py", COLUMNS_JOB).lines if "key" in place.kafka
    }
    assert by_line["3"].endswith("without it: 'keys' (array<string>)")
    assert "without it: 'shardingKey', which" in by_line["5"]
    assert places("job.py", COLUMNS_JOB.replace("kafka", "rocketmq")) == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "job.sql",
            "CREATE TABLE t USING rocketmq OPTIONS (kafkaColumns 'true', includeHeaders 'true', "
            'assign \'{"a":{"broker-a":[0,1]}}\', startingOffsets \'{"a":{"b":{"0":17}}}\');',
        ),
        ("Job.scala", 'df.writeStream.format("console").outputMode("update").start()'),
        (
            "Job.scala",
            'spark.readStream\n  .option("includeHeaders", "true")\n  // a comment\n  .format("rocketmq")\n  .load()',
        ),
        ("Job.scala", "// kafka.bootstrap.servers is gone\n/* USING kafka\n * kafka.acks\n */"),
        ("job.sql", "-- USING kafka before"),
        ("job.sh", "# --packages spark-sql-kafka-0-10\nspark-submit job.py"),
    ],
)
def test_texts_of_other_formats_and_comments_have_none(name, text):
    assert places(name, text) == []
    kafka = 'spark.read.format("kafka").option("includeHeaders", "true").load()\n'
    assert [place for _, place in places(name, kafka + text)] == ['format("kafka")', "includeHeaders"]


def test_a_statement_may_have_several_lines():
    sql = "CREATE TABLE a USING rocketmq;\nCREATE TABLE t\nUSING\nkafka\nOPTIONS (includeHeaders 'true')"
    assert places("job.sql", sql) == [("3", "USING kafka"), ("5", "includeHeaders")]


def test_a_program_may_say_its_encoding():
    text = "# -*- coding: latin-1 -*-\nx = '\xe4'\nspark.read.format('kafka').load()".encode("latin-1")
    assert [(place.where, place.kafka) for place in port_report("job.py", text).lines] == [("3", 'format("kafka")')]


KAFKA = ['format("kafka")']


@pytest.mark.parametrize(
    "text",
    [
        'FMT = "kafka"\nFMT = "rocketmq"\nspark.read.format(FMT).load()',
        'spark.read.format("kafka" if old else "rocketmq").load()',
        'spark.read.format(name or "kafka").load()',
        'spark.read.format(os.environ.get("FORMAT", "kafka")).load()',
        'spark.read.format(fmt := "kafka").load()',
        'class Job:\n  fmt = "kafka"\nspark.read.format(Job.fmt).load()',
        'job.fmt = "kafka"\nspark.read.format(job.fmt).load()',
        'cfg = Config(fmt="kafka")\nspark.read.format(cfg.fmt).load()',
        'def read(fmt="kafka"):\n  return spark.read.format(fmt).load()',
        'def read(fmt="rocketmq"):\n  return spark.read.format(fmt).load()\nread("kafka")',
        'def read(*, fmt):\n  return spark.read.format(fmt).load()\nread(fmt="kafka")',
        'def fmt():\n  return "kafka"\nspark.read.format(fmt()).load()',
        'class J:\n  def __init__(self, f):\n    self.f = f\n  def r(self):\n    spark.read.format(self.f)\nJ("kafka").r()',
        'spark.read.format(*["kafka"]).load()',
        'fmts = ["kafka", *fmts]\nspark.read.format(fmts[0]).load()',
        'old, new = "kafka", "rocketmq"\nspark.read.format(old).load()',
        'FORMATS = ("kafka", "rocketmq")\nspark.read.format(FORMATS[0]).load()',
        'for fmt in ["rocketmq", "kafka"]:\n  spark.read.format(fmt).load()',
        'CFG = {"source": {"format": "kafka"}}\nspark.read.format(CFG["source"]["format"]).load()',
        'CFG = {}\nCFG["format"] = "kafka"\nspark.read.format(CFG.get("format")).load()',
        'spark.read.load(**{"format": "kafka"})',
        'K = "kaf"\nspark.read.format(f"{K}ka").load()\n',
        'spark.read.format(" KAFKA ".strip().lower()).load()',
        'spark.read.format("org.apache.spark.sql.kafka010.KafkaSourceProvider").load()',
        'class C:\n  def f(self):\n    self.o = {}\n    self.o["f"] = "kafka"\n    spark.read.format(self.o["f"])',
        'class B:\n  def __init__(self, f="csv"):\n    self.f = f\nclass C(B):\n  pass\nc = C("kafka")\nspark.read.format(c.f)',
        'class F(str, Enum):\n  KAFKA = "kafka"\nF(x)\nspark.read.format(F.KAFKA.value)',
    ],
)
def test_a_computed_format_is_resolved(text):
    assert [kafka for _, kafka in places("job.py", text)] == KAFKA


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("spark.read.format(cfg.fmt).load()", "format(cfg.fmt)"),
        ("from settings import FMT\nspark.read.format(FMT).load()", "format(FMT)"),
        ("def read(fmt):\n  return spark.read.format(fmt).load()", "format(fmt)"),
        ('def read(fmt="rocketmq"):\n  return spark.read.format(fmt).load()', "format(fmt)"),
        ("def read(reader, fmt):\n  return reader.format(fmt)", "format(fmt)"),
        ('spark.read.format(f"{name}").load()', "format(f'{name}')"),
        ("spark.read.load(format=fmt)", "format(fmt)"),
        ("spark.read.format(*names)", "format(*names)"),
        ('other.FMT = "delta"\nspark.read.format(settings.FMT).load()', "format(settings.FMT)"),
        ("class J:\n  def __init__(self, fmt):\n    self.fmt = fmt\nspark.read.format(J(x).fmt)", "format(J(x).fmt)"),
        ('spark.read.format(cfg.fmt or "rocketmq").load()', "format(cfg.fmt or 'rocketmq')"),
        ("df.write.save(None, fmt)", "format(fmt)"),
        ("spark.read.load(**options)", "load(**…)"),
        ('spark.sql(f"CREATE TABLE t USING {fmt}")', "USING …"),
        ('spark.sql("CREATE TABLE t USING " + fmt)', "USING …"),
        ('spark.sql("CREATE TABLE t USING %s" % fmt)', "USING …"),
        ('spark.sql("CREATE TABLE t USING {}".format(fmt))', "USING …"),
        ('text = "CREATE TABLE t "\ntext += "USING " + fmt', "USING …"),
        ('@dataclass\nclass C:\n  fmt: str = "csv"\nc = C(**conf)\nspark.read.format(c.fmt)', "format(c.fmt)"),
        ('@dataclass\nclass C:\n  fmt: str = "csv"\nc = C(conf.x)\nspark.read.format(c.fmt)', "format(c.fmt)"),
        (
            '@dataclass\nclass C:\n  fmt: str = "csv"\nc = dacite.from_dict(C, x)\nspark.read.format(c.fmt)',
            "format(c.fmt)",
        ),
        (
            '@dataclass\nclass C:\n  fmt: str = "csv"\n  @classmethod\n  def of(cls, x):\n    return cls(**x)\n'
            "c = C.of(x)\nspark.read.format(c.fmt)",
            "format(c.fmt)",
        ),
        ('@json\nclass C:\n  fmt: str = "csv"\nc = C.from_json(x)\nspark.read.format(c.fmt)', "format(c.fmt)"),
        (
            '@dataclass\nclass C:\n  fmt: str = "csv"\nc = replace(C(), fmt=conf.x)\nspark.read.format(c.fmt)',
            "format(c.fmt)",
        ),
        ('class C(NamedTuple):\n  fmt: str = "csv"\nc = C(*argv)\nspark.read.format(c.fmt)', "format(c.fmt)"),
        ('class C(pydantic.BaseSettings):\n  fmt: str = "csv"\nspark.read.format(C().fmt)', "format(C().fmt)"),
        (
            'class B(BaseModel):\n  fmt: str = "csv"\nclass C(B):\n  pass\nc = C()\nspark.read.format(c.fmt)',
            "format(c.fmt)",
        ),
        ('class C:\n  fmt = "csv"\nsetattr(C, "fmt", x.y)\nspark.read.format(C.fmt)', "format(C.fmt)"),
        ('class C:\n  fmt = "csv"\nC.__dict__.update(x)\nspark.read.format(C.fmt)', "format(C.fmt)"),
        (
            'class C:\n  def f(self):\n    self.o = {"f": "csv"}\n    self.o.update(x.y)\n    spark.read.format(self.o["f"])',
            "format(self.o['f'])",
        ),
        (
            'class C:\n  def f(self):\n    self.o = {"f": "csv"}\n    self.o[k] = x.y\n    spark.read.format(self.o["f"])',
            "format(self.o['f'])",
        ),
        ('o = {"a": {"f": "csv"}}\no["a"]["f"] = x.y\nspark.read.format(o["a"]["f"])', "format(o['a']['f'])"),
        ('o = {"a": {"f": "csv"}}\no["a"].update(f=x.y)\nspark.read.format(o["a"]["f"])', "format(o['a']['f'])"),
        ('o = {"f": "csv"}\np = o\np["f"] = x.y\nspark.read.format(o["f"])', "format(o['f'])"),
        ('o = {"f": "csv"}\ndef f(p):\n  p.update(x.y)\nf(o)\nspark.read.format(o["f"])', "format(o['f'])"),
        ('o = {"f": "csv"}\no["f"], a = x.y\nspark.read.format(o["f"])', "format(o['f'])"),
        ('fmt = "csv"\nmatch x:\n  case {"f": fmt}:\n    pass\nspark.read.format(fmt)', "format(fmt)"),
        (
            'def f():\n  fmt = "csv"\n  def g():\n    nonlocal fmt\n    fmt = x.y\n  g()\n  spark.read.format(fmt)',
            "format(fmt)",
        ),
    ],
)
def test_a_format_that_is_not_known_is_to_be_checked(text, shown):
    (line,) = port_report("job.py", text).lines
    assert (line.kafka, line.replacement) == (shown, CHECK_FORMAT)
    assert line.where == str(text.count("\n", 0, max(text.find("USING"), text.find("format("), text.find("load("))) + 1)


@pytest.mark.parametrize(
    "text",
    [
        'log.info("kafka")',
        'getattr(spark.read, "format")("Kafka").load()',
        'make(source="kafka")',
        'F = {"a": "kafka"}',
    ],
)
def test_a_text_that_may_become_a_format_is_to_be_checked(text):
    assert [kafka for _, kafka in places("job.py", text)] == ['"kafka"']


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("Job.scala", "spark.readStream.format(fmt).load()"),
        ("Job.scala", 'val fmt = "kafka"'),
        ("Job.scala", 'spark.readStream.format(s"$fmt").load()'),
        ("Job.scala", 'spark.readStream.format(conf.get("format")).load()'),
        ("job.properties", "source.type=kafka"),
        ("job.sql", "CREATE TABLE t USING ${fmt}"),
        ("job.yaml", "format: kafka"),
        ("job.sh", "submit job.py --format kafka"),
    ],
)
def test_other_languages_have_texts_to_be_checked(name, text):
    assert len(places(name, text)) == 1
    assert places("Job.java", 'String.format("%s", x);\nformatter.format(date);') == []
    assert places("job.sql", "SELECT * FROM a JOIN b USING (id)") == []


@pytest.mark.parametrize(
    "lines",
    [
        'w = df.writeStream\nw.format("kafka").outputMode("update").start()',
        'w = df.writeStream\nw.format("kafka")\nw.outputMode("update")\nw.start()',
        'w = df.writeStream.outputMode("update")\nx = w\nx.start(format="kafka")',
        'def send(w):\n  w.outputMode("update").start()\nsend(df.writeStream.format("kafka"))',
        'def make():\n  return df.writeStream.format("kafka")\nmake().outputMode("update").start()',
        'class J:\n  def f(self):\n    self.w = df.writeStream.format("kafka")\n  def g(self):\n'
        '    self.w.outputMode("update").start()',
    ],
)
def test_a_writer_in_a_variable_belongs_to_its_format(lines):
    text = f'df = spark.readStream.format("kafka").load()\n{lines}'
    assert sorted(kafka for _, kafka in places("job.py", text)) == [*KAFKA * 2, 'outputMode("update")']


@pytest.mark.parametrize(
    ("text", "kafka"),
    [
        ('T = ["a.b", "c"]\nspark.read.format("kafka").option("subscribe", ",".join(T)).load()', "subscribe"),
        ('T = ["a.b"]\nspark.read.format("kafka").option("subscribe", T[0]).load()', "subscribe"),
        ('spark.read.format("kafka").option("subscribe", f"{PREFIX}.customers").load()', "subscribe"),
        ('spark.read.format("kafka").option("subscribe", PREFIX + ".customers").load()', "subscribe"),
        ('spark.read.format("kafka").option("startingOffsets", \'{"a.b": "earliest"}\').load()', "startingOffsets"),
        ('O = dict(B, endingOffsets=json.dumps(x))\nspark.read.format("kafka").options(**O).load()', "endingOffsets"),
        ('O = {**B, "assign": \'{"t":[1]}\'}\nspark.read.format("kafka").options(**O).load()', "assign"),
        ('O = B | {"subscribe": "a.b"}\nspark.read.format("kafka").options(**O).load()', "subscribe"),
        ('O = {}\nO.update(subscribe="a.b")\nspark.read.format("kafka").options(**O).load()', "subscribe"),
        ('O = {"x": 1}\nO["subscribe"] = "a.b"\nspark.read.format("kafka").options(**O).load()', "subscribe"),
        ('def o():\n  return {"subscribe": "a.b"}\nspark.read.format("kafka").options(**o()).load()', "subscribe"),
        ('r = spark.read.format("kafka")\nfor k, v in {"subscribe": "a.b"}.items():\n  r.option(k, v)', "subscribe"),
        ('spark.read.format("kafka").options(**given).load()', "options"),
        ('spark.sql(f"""CREATE TABLE t USING kafka\nOPTIONS (assign \'{json.dumps(x)}\')""")', "assign"),
        ("spark.sql(\"CREATE TABLE t USING kafka OPTIONS (subscribe 'a.b')\")", "subscribe"),
        ('df.write.format("kafka").option("failOnDataLoss", False).mode("append").save()', "failOnDataLoss"),
        ('df.write.format("kafka").options(**{"subscribe": "t"}).mode("append").save()', "subscribe"),
        ('spark.read.format("kafka").load().where(F.col("topic") == "a.b")', "column topic"),
        ('spark.read.format("kafka").load().where("topic = \'a.b\'")', "column topic"),
        ('spark.read.format("kafka").load().select(F.split("topic", "[.]")[1])', "column topic"),
        ('df.withColumn("topic", F.lit("a.b")).write.format("kafka").mode("append").save()', "column topic"),
        ('df.selectExpr("\'a.b\' AS topic").write.format("kafka").mode("append").save()', "column topic"),
    ],
)
def test_options_and_names_that_are_computed(text, kafka):
    lines = port_report("job.py", text).lines
    assert kafka in [line.kafka for line in lines if not line.replacement.startswith("stays")]


def test_texts_of_a_long_program_are_no_formats():
    names = [f"a{i}" for i in range(200)]
    text = "".join(f"{name} = {' + '.join(names)}\n" for name in names)
    text += "".join(f'print("{{}} of {name}".format({name}))\n' for name in names)
    assert places("job.py", f"{text}spark.read.format('kafka').load()") == [("401", 'format("kafka")')]


@pytest.mark.parametrize(("name", "legal"), [("server1.flatten", "server1_flatten"), ("my group", "my_group")])
def test_a_group_is_given_a_legal_name(name, legal):
    text = f'spark.read.format("kafka").option("kafka.group.id", "{name}").load()'
    (here,) = [line.replacement for line in port_report("job.py", text).lines if line.kafka == "kafka.group.id"]
    assert here == f"option group={legal}: RocketMQ's names of groups have only letters, digits, %, |, - and _"


READ = 'spark.read.format("rocketmq").option("kafkaColumns", True).load()'
WRITE = 'write.format("rocketmq").option("kafkaColumns", True).mode("append")'
RENAMED = f'{WRITE}.option("topicNames", "dotsToUnderscores")'


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (f"r = {READ}\nr.where(\"topic = 'a.b'\")", ["2"]),
        (f'r = {READ}\nr.where(F.col("topic") == "a.b")', ["2"]),
        (f'r = {READ}\nr.where(r.topic.isin("a.b", "c"))', ["2"]),
        (f'r = {READ}\nr.select(F.split("topic", r"\\.")[1])', ["2"]),
        (f'r = {READ}\nr.where(F.col("topic").rlike("shop[.]x"))', ["2"]),
        (f"r = {READ}\nr.where(\"topic rlike 'shop\\\\.x'\")", ["2"]),
        (f'{READ}.withColumn("topic", F.lit("a.b")).{WRITE}.save()', ["1"]),
        (f'd = df.withColumn("topic", F.lit("a.b"))\nd.{WRITE}.save()', ["1"]),
        (f"df.selectExpr(\"'a.b' AS topic\").{WRITE}.save()", ["1"]),
        (f'df.withColumn("topic", F.lit("a.b")).{RENAMED}.save()', []),
        (f'{READ}.withColumn("topic", F.lit("a.b")).{RENAMED}.save()', []),
        (f'df.withColumn("topic", F.lit("a.b")).{WRITE}.options(**more).save()', []),
        (f'df.withColumn("topic", F.lit("a.b")).{WRITE}.option("topic", "t").save()', []),
        (f'df.where(F.col("topic") == "a.b").{RENAMED}.save()', []),
        (f"r = {READ}\nr.where(\"topic = 'a_b'\").select(F.split('topic', '_')[1])", []),
        (f'r = {READ}\nr.where(F.col("topic").rlike("shop_.*"))', []),
        (f"r = {READ}\nr.where(\"topic rlike 'shop_.*'\")", []),
        (f"r = {READ}\nr.selectExpr(\"regexp_extract(topic, 'shop_(.*)', 1) AS t\")", []),
        (f"r = {READ}\nr.where(\"topic is not null and tags = 'x.y'\")", []),
    ],
)
def test_a_ported_program_has_topics_with_dots(text, lines):
    assert places("job.py", text) == [(line, "column topic") for line in lines]


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ('spark.readStream.format("rocketmq").option("subscribe", "a.b").load()', ["subscribe"]),
        ('spark.readStream.format("rocketmq").option("group", "a.b").load()', ["group"]),
        ('spark.read.format("rocketmq").option("kafka.x", 1).load()', ["kafka.x"]),
        ('spark.read.format("rocketmq").option("assign", \'{"t":[0]}\').load()', ["assign"]),
        ('spark.read.format("rocketmq").option("startingOffsets", \'{"t":{"0":5}}\').load()', ["startingOffsets"]),
        ('df.writeStream.format("rocketmq").outputMode("update").start()', ['outputMode("update")']),
        ('df.write.format("rocketmq").save()', ["save()"]),
        ('df.write.format("rocketmq").option("includeHeaders", 1).mode("append").save()', ["includeHeaders"]),
        ('spark.read.format("rocketmq").option("topicNames", x).option("subscribe", "a.b").load()', []),
        ('spark.read.format("rocketmq").options(**o).option("subscribe", "a.b").load()', []),
        ('spark.read.format("rocketmq").option("assign", \'{"t":{"b":[0]}}\').load()', []),
        ('spark.read.format("rocketmq").option("startingOffsets", \'{"t":{"b":{"0":5}}}\').load()', []),
        ('spark.read.format("rocketmq").option("startingOffsets", offsets).load(**more)', []),
        ('spark.read.format("rocketmq").option("assign", f\'{{"{t}":{{"b":[0]}}}}\').load()', []),
        ('spark.read.format("rocketmq").option("assign", f\'{{"{t}":[0]}}\').load()', ["assign"]),
        ('o = {"failOnDataLoss": 1}\nw = {**o}\nw.pop("failOnDataLoss")\ndf.write.format("rocketmq").options(**w)', []),
        ('o = {"subscribe": "t"}\ndel o["subscribe"]\ndf.write.format("rocketmq").options(**o)', []),
        ('o = {"includeHeaders": "true"}\nspark.read.format("rocketmq").options(**o).load().select("key")', []),
        ('F = "rocketmq"\ndef read(f=F):\n  return spark.read.format(f).option("includeHeaders", 1)\nread()', []),
    ],
)
def test_a_program_for_rocketmq_has_what_is_left_of_kafka(text, left):
    assert [kafka for _, kafka in places("job.py", text)] == left


@pytest.mark.parametrize(
    "text",
    [
        "def f():\n  return f()\nf().load()\nspark.read.format(f()).load()",
        "a = b\nb = a\nspark.read.format(a).load()",
        "".join(f"a{i} = a{i * 7 % 50} + a{i * 3 % 50}\n" for i in range(50)) + "spark.read.format(a7).load()",
        "".join(f"a{i + 1} = a{i}.x()\na{i + 1} = a{i}.y()\n" for i in range(99)) + "a99.write.format(a99).save()",
        "r = spark.read\n" + "".join(f"r = r.option('kafka.a{i}', x)\n" for i in range(500)) + "r.format(x)",
    ],
)
def test_circular_and_long_programs_are_read(text):
    assert [line.replacement for line in port_report("job.py", text).lines].count(CHECK_FORMAT) == 1


PROGRAMS = {
    "items": lambda n: "o = {}\n" + "".join(f'o["k{i}"] = o["a"]\n' for i in range(n)) + 'read.format("kafka").options(**o)',
    "kafka items": lambda n: "o = {}\n" + "".join(f'o["kafka.k{i}"] = o["kafka.a"]\n' for i in range(n)),
    "items of an attribute": lambda n: "o = self.o = {}\n" + "".join(f'self.o["kafka.k{i}"] = self.o["a"]\n' for i in range(n)),
    "a chain": lambda n: 'spark.read.format("kafka")' + "".join(f".option('kafka.a{i}', x)" for i in range(n)) + ".load()",
    "a written chain": lambda n: "spark.table('t')" + ".x(1)" * n + '.write.format("kafka").save()',
    "a sum": lambda n: "x = " + " + ".join(["'a'"] * n) + "\nspark.read.format(x)",
    "copies": lambda n: "o0 = {}\n" + "".join(f"o{i + 1} = o{i}\no{i + 1}['k'] = o{i}['k']\n" for i in range(n // 2)),
}  # fmt: skip


def calls_of_report(name, text):
    """How many functions, also of C, the report of a program calls."""
    count = 0

    def counted(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(counted)
    try:
        port_report(name, text)
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_work_of_a_report_grows_with_lines_not_their_square(program):
    """Four times as many lines would call sixteen times as many functions if the work grew with the square."""
    assert calls_of_report("job.py", program(400)) < 8 * calls_of_report("job.py", program(100))


def test_a_program_of_a_thousand_lines_is_read():
    counts = [len(port_report("job.py", program(1000)).lines) for program in PROGRAMS.values()]
    assert counts == [1, 1000, 1000, 1001, 2, 1, 0]


def test_work_of_a_report_grows_with_uses_on_a_line_of_text():
    line = 'format("kafka") x = "kafka" '
    assert len(port_report("job.scala", line * 1000).lines) == 2
    assert calls_of_report("job.scala", line * 400) < 8 * calls_of_report("job.scala", line * 100)


# 32 values of 64 Ki characters, from few lines.
LONG = "a0 = 'x'\n" + "".join(f"a{i + 1} = a{i} + a{i}\n" for i in range(16))
LONG += "b = " + "".join(f"a16 + '{i}' if os.x else " for i in range(31)) + "a16 + 'z'\n"
SHORT = "s = " + "".join(f"'{i}' if os.x else " for i in range(31)) + "'z'\n"
LISTS = "l = " + "".join(f"[b, '{i}'] if os.x else " for i in range(31)) + "[b]\n"


@pytest.mark.parametrize(
    "text",
    [
        f"c = ''.join([{', '.join(['b'] * 999)}])\n",
        f"{SHORT}{LISTS}c = s.join(l)\n",
        f"c = json.dumps([{', '.join(['a16'] * 999)}])\n",
        "".join(f"c{i} = b + '{i}'\n" for i in range(300))
        + f"c = os.x or {' or '.join(f'c{i}' for i in range(300))}\n",
    ],
    ids=["parts", "separators and lists", "JSON", "lines"],
)
def test_a_small_program_does_not_take_much_memory(text):
    program = (
        f"{LONG}{text}spark.read.format('kafka').option('kafka.bootstrap.servers', 'h:1').option('subscribe', c).load()"
    )
    assert peak_bytes(lambda: port_report("job.py", program)) < 32 << 20


def test_port_lists_lines_and_exits_with_1_if_there_are_any(run, tmp_path):
    job = tmp_path / "job.py"
    job.write_text("\ufeff" + JOB, encoding="utf-8")
    done = run("port", str(job), "--json")
    assert done.exit_code == 1
    rows = documents(done.stdout)
    assert rows[1] == {
        "line": "5",
        "kafka": "kafka.bootstrap.servers",
        "rocketmq": "the address of the cluster is option 'nameServer', a name server's host:port",
    }
    assert "emptyBodies=mark" in run("port", str(job)).stderr
    job.write_text("print('done')")
    done = run("port", str(job))
    assert (done.exit_code, done.stdout) == (0, "")
    job.write_text("import aiokafka")
    assert "emptyBodies" not in run("port", str(job)).stderr
    job.write_text("print('done')")
    job = job.rename(tmp_path / "job.scala")
    assert "job.scala was searched as text" in run("port", str(job)).stderr


@pytest.mark.parametrize(
    "text",
    ["def (", b"\xff\xfe", "x=" + "(" * 50_000, "x=" + "-" * 200_000 + "1", "x=" + "+".join(["1"] * 100_000), "x=\0"],
)
def test_a_program_that_cannot_be_read_is_wrong_usage(run, tmp_path: Path, text):
    job = tmp_path / "job.py"
    job.write_bytes(text if isinstance(text, bytes) else text.encode())
    done = run("port", str(job))
    assert (done.exit_code, f"{job} cannot be" in done.stderr) == (2, True)
    assert run("port", str(tmp_path / "none.py")).exit_code == 2


NO_NOTEBOOK = "it is not a notebook of format 4: expected a JSON object with a list 'cells'"


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("n.ipynb", b"{}", NO_NOTEBOOK),
        ("n.ipynb", b"[1]", NO_NOTEBOOK),
        ("n.ipynb", b'{"cells": [{"cell_type": "code", "source": null}]}', NO_NOTEBOOK),
        ("n.ipynb", b"{", "a notebook must be JSON: "),
        ("Job.scala", b"// \xe9", "byte 3 is not UTF-8: save the file as UTF-8"),
        ("job.py", b'x = "\xe9"', "save the file as UTF-8, or name its encoding in the first line"),
    ],
)
def test_an_unreadable_file_has_a_remedy(run, tmp_path: Path, name, text, problem):
    (tmp_path / name).write_bytes(text)
    done = run("port", str(tmp_path / name))
    assert (done.exit_code, problem in " ".join(done.stderr.split())) == (2, True)
