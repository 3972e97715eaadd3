"""Whether producers see that somebody takes envelopes."""

from __future__ import annotations

from rocketmq_spark import session
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.delay.stream import present
from rocketmq_spark.localbroker import LocalBroker
from tests.live.writes import sink_options


def test_a_job_is_seen_while_it_lives(rocketmq: LocalBroker, topic: str) -> None:
    sender = session.sender(sink_options(rocketmq.name_server))

    def consumed() -> bool:
        return sender.consumed(topic, Deadline.after(30.0))

    assert not consumed()
    with present(topic, name_server=rocketmq.name_server):
        assert consumed()
    assert not consumed()
