"""Queries whose sources have names, which PySpark 4.3 can do: their offset log has version 2."""

from __future__ import annotations

import functools
import json

import pytest
from click.testing import CliRunner

from rocketmq_spark.cli.command import app
from tests.fix_spark import finish
from tests.helpers import awaited
from tests.reading import feed


@pytest.fixture
def evolving(spark):
    option = "spark.sql.streaming.queryEvolution.enableSourceEvolution"
    spark.conf.set(option, "true")
    yield
    spark.conf.unset(option)


def test_the_commands_read_queries_with_named_sources(spark, evolving, broker_cluster, make_topic, tmp_path):
    orders, prices = make_topic(queues=1), make_topic(queues=1)
    folder = str(tmp_path / "checkpoint")

    def named(name, topic):
        options = {"nameServer": broker_cluster.name_server, "subscribe": topic, "startingOffsets": "earliest"}
        return spark.readStream.format("rocketmq").name(name).options(**options).load()

    def read(*frames):
        writer = functools.reduce(lambda one, more: one.union(more), frames).writeStream.format("noop")
        finish(writer.option("checkpointLocation", folder).trigger(availableNow=True).start())

    def run(*arguments):
        done = CliRunner(env={"ROCKETMQ_NAMESRV": broker_cluster.name_server}).invoke(app, [*arguments, "--json"])
        assert done.exit_code == 0, done.output
        return [json.loads(line) for line in done.stdout.splitlines()]

    feed(broker_cluster, orders, 3)
    feed(broker_cluster, prices, 2)
    read(named("a", orders), named("b", prices))
    feed(broker_cluster, orders, 4)
    read(named("b", prices), named("a", orders))
    feed(broker_cluster, prices, 5)
    shown = run("checkpoint", "show", folder)
    assert [[(r["topic"], r["start"], r["end"]) for r in batch["ranges"]] for batch in shown] == [
        [(orders, 0, 3), (prices, 0, 2)], [(orders, 3, 7)],
    ]  # fmt: skip
    (lag,) = awaited(lambda: run("lag", "--checkpoint", folder), lambda found: found[0]["lag"] == 5)
    assert {(row["topic"], row["lag"]) for row in lag["queues"]} == {(orders, 0), (prices, 5)}
    assert {(row["topic"], row["state"]) for row in run("checkpoint", "diff", folder)} == {
        (orders, "read"), (prices, "behind"),
    }  # fmt: skip
    assert {one["level"] for one in run("doctor", "--checkpoint", folder) if folder in one["check"]} == {"ok"}
    (rewound,) = run("checkpoint", "rewind", folder, "--to-batch", "0", "--yes", "--force")
    assert [(part["topic"], part["start"], part["end"]) for part in rewound["ranges"]] == [(orders, 3, 7)]
    read(named("a", orders), named("b", prices))
    again = run("checkpoint", "show", folder)[-1]
    assert {(part["topic"], part["start"], part["end"]) for part in again["ranges"]} == {(orders, 3, 7), (prices, 2, 7)}
