"""What a pull consumer answers to brokers, question by question."""

from __future__ import annotations

from typing import Any

import pytest

from rocketmq_spark.base.clock import Clock, Deadline
from rocketmq_spark.consumer.broker_requests import PullRequestHandler
from rocketmq_spark.consumer.polls import Polls
from rocketmq_spark.consumer.rebalance import StartOffset
from rocketmq_spark.consumer.settings import ConsumerSettings, Subscriptions
from rocketmq_spark.model import NO_FILTER, MessageQueue
from rocketmq_spark.model.membership import (
    ConsumeDirectly,
    GetConsumedOffsets,
    GetRunningInfo,
    MembersChanged,
    Membership,
    QueueInfo,
    ResetOffsets,
    RunningInfo,
)
from tests.fakes.group_member import QueueMember, numbered

A, B, OTHER = MessageQueue("t", "b", 0), MessageQueue("t", "b", 1), MessageQueue("u", "b", 0)
MEMBERSHIP = Membership({"t": NO_FILTER}, 7, "CONSUME_ACTIVELY")


class Asked:
    def __init__(self) -> None:
        self.fake = QueueMember([A, B, OTHER])
        subscriptions = Subscriptions("g", False, lambda: 1)
        self.polls = Polls(self.fake, ConsumerSettings(group="g"), subscriptions, Clock())  # type: ignore[arg-type]
        self.looks = 0
        self.stored: list[dict[MessageQueue, int]] = []
        self.answers = PullRequestHandler(
            self.polls, lambda: MEMBERSHIP, self.look, lambda o: self.stored.append(dict(o))
        )

    def look(self) -> None:
        self.looks += 1

    def __call__(self, question: Any) -> Any:
        return self.answers("b:1", question)


@pytest.fixture
def asked() -> Asked:
    made = Asked()
    made.fake.add(A, 40)
    made.polls.assign({A: StartOffset(0), B: StartOffset(0), OTHER: StartOffset(0)})
    made.polls.wait(Deadline.after(0), 1)
    made.polls.has_returned_all = True
    made.polls.finish_returned_messages()
    return made


def test_a_change_of_members_is_looked_at(asked: Asked) -> None:
    assert asked(MembersChanged()) is None
    assert asked.looks == 1


def test_a_reset_moves_the_queues_that_are_ours_and_is_stored(asked: Asked, caplog: pytest.LogCaptureFixture) -> None:
    away = MessageQueue("t", "b", 9)
    assert asked(ResetOffsets("t", {A: 3, away: 5})) is None
    assert f"did not reset them: {[away]}" in caplog.text
    assert asked.stored == [{A: 3}]
    (part,) = asked.polls.wait(Deadline.after(0), 1)
    assert (part.queue, part.start) == (A, 3)


def test_offsets_are_those_of_what_is_finished_of_the_topic(asked: Asked) -> None:
    assert asked(GetConsumedOffsets("t")) == {A: 32, B: 0}
    assert asked(GetConsumedOffsets("nothing")) == {}


def test_it_tells_what_it_has_of_each_queue(asked: Asked) -> None:
    told = asked(GetRunningInfo(includes_stacks=False))
    assert isinstance(told, RunningInfo)
    assert told.queues == {
        A: QueueInfo(commit_offset=32, cached_min_offset=32, cached_max_offset=39, cached_count=8),
        B: QueueInfo(commit_offset=0),
        OTHER: QueueInfo(commit_offset=0),
    }
    assert (told.membership, told.ordered, told.stacks) == (MEMBERSHIP, False, None)
    assert told.started_ms > 1_600_000_000_000
    assert "MainThread" in asked(GetRunningInfo(includes_stacks=True)).stacks


def test_stacks_are_not_answered_if_the_consumer_refuses(asked: Asked) -> None:
    refusing = PullRequestHandler(asked.polls, lambda: MEMBERSHIP, asked.look, lambda o: None, answers_stacks=False)
    info = refusing("b:1", GetRunningInfo(includes_stacks=True))
    assert isinstance(info, RunningInfo)
    assert (info.stacks, info.membership) == (None, MEMBERSHIP)


def test_what_only_a_listener_could_do_is_refused(asked: Asked) -> None:
    assert asked(ConsumeDirectly(numbered(A, 0))) is None
