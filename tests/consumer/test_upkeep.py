"""What a pull consumer does beside its polls, when its time has come."""

from __future__ import annotations

import pytest

from rocketmq_spark.clock import Clock
from rocketmq_spark.consumer.polls import Polls
from rocketmq_spark.consumer.positions import Positions
from rocketmq_spark.consumer.pull_settings import PullConsumerSettings
from rocketmq_spark.consumer.subscribed import Subscribed
from rocketmq_spark.consumer.upkeep import Upkeep
from rocketmq_spark.errors import ConnectionLost
from rocketmq_spark.model import MessageQueue
from tests.consumer.fake_member import FakeMember

QUEUE = MessageQueue("t", "b", 0)


class Kept:
    def __init__(self) -> None:
        self.now = 0.0
        self.fake = FakeMember([QUEUE], high=3)
        settings = PullConsumerSettings(group="g")
        clock = Clock(lambda: self.now)
        self.polls = Polls(self.fake, settings, clock)  # type: ignore[arg-type]
        positions = Positions(self.fake, settings)  # type: ignore[arg-type]
        shared = Subscribed(self.fake, "g", positions, clock, self.polls.wake)  # type: ignore[arg-type]
        self.one = Upkeep(settings, self.polls, positions, shared, clock)


def test_1_9_offsets_are_committed_every_5_seconds_while_there_are_new_ones() -> None:
    kept = Kept()
    kept.one.have({QUEUE: 0})
    kept.one.next(kept.one.begin(0.0), 1)
    for now, commits in ((4.9, 0), (5.0, 1), (10.0, 1)):
        kept.now = now
        kept.one.begin(0.0)
        assert len(kept.fake.commits) == commits


def test_routes_are_looked_at_every_30_seconds_and_polls_go_on_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kept = Kept()
    kept.one.have({QUEUE: 0})
    asked: list[str] = []

    def queues(topic: str, deadline: object, refresh: bool = False) -> list[MessageQueue]:
        asked.append(topic)
        raise ConnectionLost("no name server answers")

    monkeypatch.setattr(kept.fake, "queues", queues)
    caplog.set_level("INFO")
    for now in (29.0, 30.0, 31.0, 60.0):
        kept.now = now
        assert kept.one.begin(1.0).remaining() > 0
    assert asked == ["t", "t"]
    assert "the route of t cannot be refreshed" in caplog.text
