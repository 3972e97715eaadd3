"""Tags of batch topics: brokers compare those of whole batches, so consumers compare those of messages themselves."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

import pytest

from rocketmq_spark import Producer
from rocketmq_spark.errors import OptionError
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.model import Message
from tests.helpers import stored
from tests.live.consumer.members import Members, members
from tests.live.consumer.test_pull_consumer import Make, group, make
from tests.mockbroker import eventually
from tests.reading import read

__all__ = ["group", "make", "members"]

# The tag of the batch is that of all its messages, or none.
TAGS = ("ab", "aa", "bb", "cab")
WANTED = [f"{i}{tag}" for i, tags in enumerate(TAGS) for tag in tags if tag in "ac"]


@pytest.fixture
def topic(rocketmq: LocalBroker, make_topic: Callable[..., str]) -> str:
    """A queue of four batches, and a single message behind them, which the broker filters by its own tag."""
    name = make_topic(queues=1, batch=True)
    with Producer(name_server=rocketmq.name_server, group="p_tags") as producer:
        for i, tags in enumerate(TAGS):
            producer.send_batch([Message(name, f"{i}{tag}".encode(), tags=tag) for tag in tags])
        producer.send(Message(name, b"last", tags="a"))
    stored(rocketmq, name, sum(map(len, TAGS)) + 1)
    return name


def test_polls_and_rows_have_every_message_of_a_tag(topic: str, make: Make) -> None:
    with make(consume_from_where="earliest") as consumer:
        consumer.subscribe(topic, tags="a || c")
        found: list[str] = []
        while "last" not in found:
            found += [message.body.decode() for message in consumer.poll(20.0)]
        assert found == [*WANTED, "last"]
        consumer.seek_to_beginning()
        found = []
        while "last" not in found:
            found += [body.decode() for body in consumer.poll_arrow(20.0)["body"].to_pylist()]
        assert found == [*WANTED, "last"]


def test_a_member_of_a_group_gets_every_message_of_a_tag(rocketmq: LocalBroker, topic: str, members: Members) -> None:
    consumer = members.make()
    found: list[str] = []
    consumer.subscribe(topic, tags="a || c")
    consumer.start(lambda messages, context: found.extend(message.body.decode() for message in messages))
    eventually(lambda: "last" in found, 60)
    assert consumer.stop() == []
    assert Counter(found) == Counter([*WANTED, "last"])
    assert Counter(row["body"].decode() for row in read(rocketmq, subscribe=topic, tags="a || c")) == Counter(found)


def test_an_sql_expression_is_refused(
    topic: str, make: Make, members: Members, caplog: pytest.LogCaptureFixture
) -> None:
    with make(consume_from_where="earliest") as consumer:
        consumer.subscribe(topic, sql="TAGS = 'a'")
        with pytest.raises(OptionError, match=r"sql is .* is a batch topic, .*Subscribe with tags"):
            consumer.poll(20.0)
    member = members.make()
    member.subscribe(topic, sql="TAGS = 'a'")
    with caplog.at_level(logging.WARNING):
        member.start(lambda messages, context: None)
        eventually(lambda: "is a batch topic" in caplog.text, 60)
