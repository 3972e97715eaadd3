"""Which topics store batches whole."""

from __future__ import annotations

import pytest

from rocketmq_spark.clock import Deadline
from rocketmq_spark.errors import ConnectionLost
from rocketmq_spark.producer import batch_topics
from rocketmq_spark.producer.batch_topics import BatchTopics

SOON = Deadline.after(60.0)


class Saying:
    """A sender whose brokers say these things, in turn."""

    def __init__(self, *said: bool | Exception | None) -> None:
        self.said = list(said)

    def keeps_batches(self, topic: str, deadline: Deadline) -> bool | None:
        said = self.said.pop(0)
        if isinstance(said, Exception):
            raise said
        return said


@pytest.mark.parametrize("said", [True, False])
def test_each_topic_is_asked_about_once(said: bool) -> None:
    topics = BatchTopics(Saying(said, not said))  # type: ignore[arg-type]
    assert [topics.has(topic, SOON) for topic in ("t", "t", "u", "t")] == [said, said, not said, said]


@pytest.mark.parametrize("unsaid", [None, ConnectionLost("gone")])
def test_while_nobody_says_it_the_topic_is_an_ordinary_one_and_asked_about_later(
    unsaid: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = Saying(unsaid, unsaid, True)
    topics = BatchTopics(sender)  # type: ignore[arg-type]
    assert [topics.has("t", SOON) for _ in range(3)] == [False] * 3
    assert len(sender.said) == 2
    topics = BatchTopics(sender)  # type: ignore[arg-type]
    monkeypatch.setattr(batch_topics, "AGAIN_S", -1.0)
    assert [topics.has("t", SOON) for _ in range(3)] == [False, True, True]
