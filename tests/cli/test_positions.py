"""Where readers are, and what brokers have: with one that is away, and with one that knows nothing of a queue."""

from __future__ import annotations

from rocketmq_spark import options, session
from rocketmq_spark.admin.groups import queue_lags
from rocketmq_spark.cli import lag
from rocketmq_spark.cli.connection import Target
from rocketmq_spark.errors import ConnectionLost
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.model import MessageQueue
from tests.helpers import killed
from tests.reading import feed, names


def test_a_broker_that_is_away_costs_its_queues_alone(pair: LocalBroker) -> None:
    (topic,) = names(1, "away")
    pair.create_topic(topic, 1)
    feed(pair, topic, 6)
    client = session.client(options.parse({"nameServer": pair.name_server, "numRetries": 0}).for_role("batch source"))
    asked = {MessageQueue(topic, name, 0): 1 for name in pair.brokers}
    asked[MessageQueue(topic, "broker-a", 7)] = 5
    whole = queue_lags(client, asked)
    assert whole.errors == []
    ends = {row.queue: row.max_offset for row in whole.rows}
    assert sum(end for end in ends.values() if end is not None) == 6
    assert ends[MessageQueue(topic, "broker-a", 7)] is None
    assert all(row.next_stored_ms for row in whole.rows if row.lag)
    killed(pair, "broker-b")
    part = queue_lags(client, asked)
    assert [(row.queue.broker_name, row.max_offset is None) for row in part.rows] == [
        ("broker-a", False), ("broker-a", True), ("broker-b", True),
    ]  # fmt: skip
    assert [type(error) for error in part.errors] == [ConnectionLost]


def test_a_group_has_the_name_that_it_has_in_the_environment() -> None:
    plain = Target({"name_server": "h:1"})
    assert lag.own_group(plain, "g") == "g"
    assert lag.own_group(Target({"name_server": "h:1", "environment": "2"}), "g") != "g"
