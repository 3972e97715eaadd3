"""``rocketmq-spark port`` reads programs for Kafka. It finds their lines, and nothing in programs of ours."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rocketmq_spark.cli.kafka_lines import findings
from tests.cli.conftest import documents
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
spark.sql("CREATE TABLE t USING kafka OPTIONS (subscribe 'orders')")
"""


def places(name: str, text: str) -> list[tuple[str, str]]:
    return [(place.where, place.kafka) for place in findings(name, text)]


def test_each_line_that_names_kafka_is_found():
    assert places("job.py", JOB) == [
        ("4", "spark-sql-kafka-0-10_2.13:4.0.0"),
        ("5", "kafka.bootstrap.servers"),
        ("5", "kafka.security.protocol"),
        ("6", 'format("kafka")'),
        ("7", "includeHeaders"),
        ("8", "startingOffsets"),
        ("10", "key"),
        ("10", "partition"),
        ("10", "value"),
        ("11", 'format("kafka")'),
        ("11", 'outputMode("update")'),
        ("11", "trigger(continuous=…)"),
        ("12", "USING kafka"),
    ]


@pytest.mark.parametrize(("name", "block"), OF_KAFKA, ids=[name for name, _ in OF_KAFKA])
def test_every_option_and_column_of_the_pages_jobs_is_found(name, block):
    found = {kafka for _, kafka in places("job.py", block)}
    assert set(re.findall(r'"(kafka\.[\w.]+)"', block)) <= found
    assert 'format("kafka")' in found
    assert not {"key", "value"} & set(re.findall(r"\w+", block)) - found - {"key", "value"}


@pytest.mark.parametrize(("name", "block"), OURS, ids=[name for name, _ in OURS])
def test_a_program_of_ours_has_none(name, block):
    assert places("job.py", block) == []


def test_the_example_has_none():
    text = (ROOT / "examples" / "orders_pipeline.py").read_text("utf-8")
    assert places("orders_pipeline.py", text) == []


def test_clients_and_dstreams():
    text = "from kafka import KafkaProducer\nimport aiokafka\nfrom pyspark.streaming.kafka import KafkaUtils\nimport kafkaesque\n"
    assert places("service.py", text) == [("1", "kafka"), ("2", "aiokafka"), ("3", "pyspark.streaming.kafka")]


def test_a_notebook_is_searched_cell_by_cell():
    cells = [
        {"cell_type": "markdown", "source": ['format("kafka")']},
        {"cell_type": "code", "source": ["%pip install x\n", 'rows = spark.read.format("kafka").load()']},
        {"cell_type": "code", "source": ['rows.select("value")']},
    ]
    text = json.dumps({"cells": cells})
    assert places("job.ipynb", text) == [("2:2", 'format("kafka")'), ("3:1", "value")]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("Job.scala", 'spark.readStream\n  .format("kafka")\n  .option("kafka.group.id", "g")'),
        ("job.sql", "CREATE TABLE t\nUSING KAFKA\nOPTIONS (`kafka.group.id` 'g')"),
        (
            "submit.sh",
            "spark-submit \\\n  --packages org.apache.spark:spark-sql-kafka-0-10_2.13:4.0 \\\n  --conf kafka.group.id=g",
        ),
    ],
)
def test_other_languages_by_lines(name, text):
    assert [where for where, _ in places(name, text)] == ["2", "3"]


def test_the_command_lists_lines_and_its_exit_code_says_whether_there_are_any(run, tmp_path):
    job = tmp_path / "job.py"
    job.write_text(JOB)
    done = run("port", str(job), "--json")
    assert done.exit_code == 1
    rows = documents(done.stdout)
    assert rows[1] == {
        "line": "5",
        "kafka": "kafka.bootstrap.servers",
        "rocketmq": "the address of the cluster is option 'nameServer', a name server's host:port",
    }
    job.write_text("print('done')")
    assert run("port", str(job)).exit_code == 0


@pytest.mark.parametrize("text", ["def (", b"\xff\xfe"])
def test_a_program_that_cannot_be_read_is_wrong_usage(run, tmp_path: Path, text):
    job = tmp_path / "job.py"
    job.write_bytes(text if isinstance(text, bytes) else text.encode())
    done = run("port", str(job))
    assert (done.exit_code, f"{job} cannot be read" in done.stderr) == (2, True)
    assert run("port", str(tmp_path / "none.py")).exit_code == 2
