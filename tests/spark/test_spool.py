"""The sink's spool under Spark: rows that a dead broker does not take live with the worker, and arrive."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from click.testing import CliRunner
from pyspark.sql import SparkSession

from rocketmq_spark import LocalBroker, write_rocketmq
from rocketmq_spark.cli.command import app
from rocketmq_spark.session.spools import spools_in
from rocketmq_spark.spool.spool import SpoolReading
from tests.helpers import killed, stored, stored_now
from tests.live.writes import bodies, numbered
from tests.mockbroker import eventually
from tests.reading import names

ROWS = 400


def test_spooled_rows_count_separately_and_arrive_later(spark: SparkSession, lone: LocalBroker, tmp_path: Path) -> None:
    (topic,) = names(1, "spooled")
    lone.create_topic(topic, queues=4)
    given = {
        "name_server": lone.name_server, "topic": topic, "batch_max_bytes": 2000, "send_timeout": "5s",
        "on_send_failure": "spool", "spool_dir": str(tmp_path / "spools"),
    }  # fmt: skip

    def write(first: int) -> tuple[int, int]:
        df = spark.createDataFrame([(body,) for body in numbered(ROWS, first)], "body string").repartition(2)
        done = write_rocketmq(df, **given)
        return done.rows, done.spooled

    assert write(0) == (ROWS, 0)
    killed(lone, "broker-a")
    assert write(ROWS) == (0, ROWS)
    assert 1 <= len(spools_in(tmp_path / "spools")) <= 2
    lone.restart("broker-a")

    def arrived() -> bool:
        if Counter(bodies(stored_now(lone, topic))).keys() >= set(numbered(2 * ROWS)):
            return True
        # Spark ends a worker that is idle for a minute; until then its spool is in use, and the command says so.
        CliRunner().invoke(app, ["spool", "send", str(tmp_path / "spools"), "--name-server", lone.name_server])
        return False

    eventually(arrived, 100)  # the workers live on between jobs, and send meanwhile
    found = Counter(bodies(stored(lone, topic, 2 * ROWS)))
    assert found.keys() == set(numbered(2 * ROWS))
    assert sum(_depth(path) for path in spools_in(tmp_path / "spools")) == 0
    done = CliRunner().invoke(app, ["spool", "show", str(tmp_path / "spools")])
    assert done.exit_code == 0, done.output


def _depth(path: Path) -> int:
    reading = SpoolReading(path)
    try:
        return reading.totals.depth
    finally:
        reading.close()
