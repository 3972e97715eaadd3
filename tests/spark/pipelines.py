"""Queries over our source and sink in short, and rows in the shape of the Java witness's records."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from chispa import assert_df_equality

from tests.helpers import indexed
from tests.witness import Record, content

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Rows = dict[str, tuple[object, ...]]

_WITHOUT_BODY = ("msgId", "brokerName", "queueId", "queueOffset", "md5(body) md5", "tags", "keys", "properties")


def read(spark: SparkSession, name_server: str, topic: str, **options: object) -> DataFrame:
    """All that was acknowledged before."""
    indexed(name_server)
    return _with(spark.read.format("rocketmq"), nameServer=name_server, subscribe=topic, **options).load()


def read_stream(spark: SparkSession, name_server: str, topic: str, **options: object) -> DataFrame:
    indexed(name_server)
    return _with(spark.readStream.format("rocketmq"), nameServer=name_server, subscribe=topic, **options).load()


def write(frame: DataFrame, name_server: str, **options: object) -> None:
    _with(frame.write.format("rocketmq"), nameServer=name_server, **options).mode("append").save()


def _with(builder: Any, **options: object) -> Any:
    for name, value in options.items():
        builder = builder.option(name, value)
    return builder


def failed_tasks(spark: SparkSession) -> int:
    """Of all that ran in this session so far; one that failed just now is counted a moment later."""
    return int(spark.sparkContext._jsc.sc().statusStore().executorSummary("driver").failedTasks())


def holds(found: DataFrame, schema: str, rows: Iterable[tuple[object, ...]]) -> None:
    """Just these rows, each so often, in columns of these types. For small DataFrames: a difference is shown row by row."""
    expected = found.sparkSession.createDataFrame(list(rows), schema)
    assert_df_equality(found, expected, ignore_row_order=True, ignore_nullable=True)


def holds_bodies(found: DataFrame, texts: Iterable[str]) -> None:
    holds(found.selectExpr("cast(body as string) body"), "body string", ((text,) for text in texts))


def holds_lines(found: DataFrame, texts: Iterable[str]) -> None:
    """Of a text file, or of many."""
    holds(found, "value string", ((text,) for text in texts))


def rows_of(frame: DataFrame) -> list[tuple[str, tuple[object, ...]]]:
    """Message id and content of every row; bodies stay in Spark."""
    table = frame.selectExpr(*_WITHOUT_BODY).toArrow()
    return [
        (row["msgId"], ((row["brokerName"], row["queueId"], row["queueOffset"]), row_content(row)))
        for row in table.to_pylist()
    ]


def row_content(row: dict[str, Any]) -> tuple[object, ...]:
    return content(row["md5"], row["tags"], row["keys"], dict(row["properties"]))


def once(rows: Iterable[tuple[str, tuple[object, ...]]]) -> Rows:
    """The rows by id, of which none may come twice."""
    found: Rows = {}
    for name, row in rows:
        assert name not in found, f"{name} was read twice"
        found[name] = row
    return found


def records(sent: Iterable[Record]) -> Rows:
    return once((record.id, (record.place, record.content)) for record in sent)


def same(found: Rows, expected: Rows) -> None:
    """Equality of big dictionaries with a short message."""
    missing, extra = expected.keys() - found.keys(), found.keys() - expected.keys()
    assert not missing, f"{len(missing)} missing, such as {sorted(missing)[:3]}"
    assert not extra, f"{len(extra)} too many, such as {sorted(extra)[:3]}"
    wrong = [name for name in expected if found[name] != expected[name]]
    assert not wrong, f"{len(wrong)} differ, such as {found[wrong[0]]} for {expected[wrong[0]]}"
