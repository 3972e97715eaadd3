"""Whether producers see that somebody takes envelopes."""

from __future__ import annotations

from collections.abc import Callable

from rocketmq_spark import session
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.delay.stream import present
from rocketmq_spark.localbroker import LocalBroker
from tests.live.writes import sink_options


def test_a_job_is_seen_while_it_lives(rocketmq: LocalBroker, topic: str) -> None:
    sender = session.sender(sink_options(rocketmq.name_server))

    def consumed() -> bool:
        return sender.has_online_consumer(topic, Deadline.after(30.0))

    assert not consumed()
    with present(topic, name_server=rocketmq.name_server):
        assert consumed()
    assert not consumed()


def test_jobs_of_several_topics_do_not_hide_each_other(rocketmq: LocalBroker, make_topic: Callable[..., str]) -> None:
    sender = session.sender(sink_options(rocketmq.name_server))
    one, other = make_topic(), make_topic()
    with present(one, name_server=rocketmq.name_server), present(other, name_server=rocketmq.name_server):
        assert [sender.has_online_consumer(topic, Deadline.after(30.0)) for topic in (one, other)] == [True, True]
