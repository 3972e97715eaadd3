"""Rows that the timers of brokers do not serve, on a real broker: ``longDelay`` in the sink."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from rocketmq_spark.errors import MessageRefused
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.wire.envelope import INNER_TOPIC
from tests.helpers import stored
from tests.live.delay.serving import DAYS_10, Node
from tests.live.writes import Writes, frame, writes

__all__ = ["writes"]


@pytest.fixture
def node(rocketmq: LocalBroker, tmp_path: Path):
    with Node(tmp_path / "node", name_server=rocketmq.name_server) as one:
        yield one


def test_rows_of_the_sink_go_the_same_ways(rocketmq: LocalBroker, make_topic: Any, node: Node, writes: Writes) -> None:
    """Of one frame: at once, by the broker's timer, and by the service."""
    topic = make_topic(queues=2)
    rows = frame(
        body=["now", "soon", "far", "at"],
        tags=["t"] * 4,
        delayMs=[None, 1000, 1000 * DAYS_10, None],
        deliverAt=[None, None, None, datetime.now(UTC) + timedelta(days=9)],
        flag=[1, 2, 3, 4],
    )
    written = writes(rows, topic=topic, longDelay="dmq")
    assert written.rows == 4
    assert sum(queue.topic == INNER_TOPIC for queue, _ in writes.requests) == 2
    assert node.holds(2)
    assert {message.body for message in stored(rocketmq, topic, 2)} == {b"now", b"soon"}
    node.step_s = DAYS_10
    found = {message.body: message for message in stored(rocketmq, topic, 4)}
    assert {b"far", b"at"} < found.keys()
    assert [(found[name].tags, found[name].flag) for name in (b"far", b"at")] == [("t", 3), ("t", 4)]
    # Bodies of rows have ids of their own, as all messages do.
    assert len({message.msg_id for message in found.values()}) == 4


def test_rows_are_refused_when_nobody_takes_them(rocketmq: LocalBroker, topic: str, writes: Writes) -> None:
    rows = frame(body=["far"], delayMs=[1000 * DAYS_10])
    with pytest.raises(MessageRefused, match="no member of a consumer group consumes dmq_inner_topic"):
        writes(rows, topic=topic, longDelay="dmq")
