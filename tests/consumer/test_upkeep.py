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
from rocketmq_spark.model import NO_FILTER, MessageQueue
from tests.consumer.fake_member import FakeMember
from tests.producer.scripted import ManualTimer, Time

QUEUE = MessageQueue("t", "b", 0)


class Kept:
    def __init__(self) -> None:
        self.now = 0.0
        self.fake = FakeMember([QUEUE], high=3)
        settings = PullConsumerSettings(group="g")
        clock = Clock(lambda: self.now)
        self.polls = Polls(self.fake, settings, clock)  # type: ignore[arg-type]
        positions = Positions(self.fake, settings)  # type: ignore[arg-type]
        self.shared = Subscribed(self.fake, settings, positions, clock)  # type: ignore[arg-type]
        self.time = Time()
        self.one = Upkeep(settings, self.polls, positions, self.shared, clock, ManualTimer(self.time))


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


def test_4_2_a_look_that_fails_is_no_end_of_looking(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Kept()
    kept.shared.set("t", NO_FILTER, lambda address, question: None)
    monkeypatch.setattr(kept.shared, "look", lambda owned: 1 / 0)
    kept.one.follow()
    with pytest.raises(ZeroDivisionError):
        kept.time.advance(1)
    monkeypatch.undo()
    kept.time.advance(1)
    assert kept.polls.queues() == [QUEUE]


def test_4_3_a_look_is_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Kept()
    kept.shared.set("t", NO_FILTER, lambda address, question: None)
    looks: list[int] = []

    def look(owned: object) -> dict[MessageQueue, int | None]:
        looks.append(1)
        kept.shared.changed()
        kept.one.look()
        return {QUEUE: 0}

    monkeypatch.setattr(kept.shared, "look", look)
    kept.one.look()
    assert looks == [1]
