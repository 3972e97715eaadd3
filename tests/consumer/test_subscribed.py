"""A pull consumer's side of the group: when it looks, and what it makes of what it sees."""

from __future__ import annotations

import pytest

from rocketmq_spark.base.clock import Clock
from rocketmq_spark.consumer.offsets import OffsetRequests
from rocketmq_spark.consumer.reachability import Reachability
from rocketmq_spark.consumer.rebalance import StartOffset
from rocketmq_spark.consumer.settings import ConsumerSettings, Subscriptions
from rocketmq_spark.consumer.upkeep import PullMembership
from rocketmq_spark.errors import AccessDenied, CallTimeout, RocketMQError, RouteNotFound
from rocketmq_spark.model import NO_FILTER, Filter, MessageQueue
from tests.consumer.pull_bench import Hand, made
from tests.fakes.group_member import QueueMember

QUEUES = [MessageQueue("t", "b", i) for i in range(3)]


class Seen:
    def __init__(self) -> None:
        self.now = 0.0
        self.fake = QueueMember(QUEUES)
        settings = ConsumerSettings(group="g")
        positions = OffsetRequests(self.fake, settings)  # type: ignore[arg-type]
        clock = Clock(lambda: self.now)
        self.subscriptions = Subscriptions("g", False, lambda: 1)
        contact = Reachability("g", clock)
        self.one = PullMembership(self.fake, settings, self.subscriptions, positions, clock, contact)  # type: ignore[arg-type]


def nobody(address: str, question: object) -> None:
    """Asks nothing."""


@pytest.fixture
def seen() -> Seen:
    found = Seen()
    found.one.set_subscription("t", NO_FILTER, nobody)
    return found


def test_rebalance_waits_20_s_or_1_s_while_queue_is_missing(seen: Seen) -> None:
    assert seen.one.wait_s() == 0.0
    assert seen.one.allocate([]) == dict.fromkeys(QUEUES, StartOffset(0, False))
    assert seen.one.wait_s() == 20.0
    seen.fake.unknown[QUEUES[1]] = RocketMQError("ill")
    assert seen.one.allocate([]) == {QUEUES[0]: StartOffset(0, False), QUEUES[2]: StartOffset(0, False)}
    assert seen.one.wait_s() == 1.0


def test_a_member_that_gets_no_notices_looks_every_5_seconds(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seen.fake, "receives_notices", False)
    seen.one.allocate([])
    assert seen.one.wait_s() == 5.0


def test_a_change_that_is_told_while_it_looks_counts(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    def members(*args: object) -> list[str]:
        seen.one.check_soon()
        return ["me"]

    monkeypatch.setattr(seen.fake, "members", members)
    seen.one.allocate([])
    assert seen.one.wait_s() == 0.0


def test_without_an_answer_everything_stays(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    def members(*args: object) -> list[str]:
        raise RocketMQError("nobody answers")

    monkeypatch.setattr(seen.fake, "members", members)
    assert seen.one.allocate(QUEUES[:2]) == dict.fromkeys(QUEUES[:2])
    assert not seen.one.is_balanced


def test_a_topic_that_is_not_there_is_not_subscribed_to(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    def queues(*args: object) -> list[MessageQueue]:
        raise RouteNotFound("no such topic")

    monkeypatch.setattr(seen.fake, "queues", queues)
    with pytest.raises(RouteNotFound):
        seen.one.set_subscription("u", NO_FILTER, nobody)
    assert list(seen.one.topics) == ["t"]


def test_leaving_is_told_once(seen: Seen) -> None:
    assert seen.fake.joined
    seen.one.leave()
    assert not seen.fake.joined
    seen.one.leave()


def test_members_that_want_other_messages_are_told_once(fake, hand, caplog, monkeypatch) -> None:
    """As a ``Consumer`` does: half of what each wants goes to queues of the other."""
    with made(fake, hand) as consumer:
        consumer.subscribe("t", tags="a")
        hand_on(hand, 60)
        assert "different subscriptions" not in caplog.text
        monkeypatch.setattr(fake, "filters", lambda *_: {"t": Filter("b")})
        hand_on(hand, 19)
        assert "different subscriptions" not in caplog.text, "it may be for a moment"
        hand_on(hand, 120)
    assert (
        caplog.text.count("members of group g have different subscriptions: topic t is subscribed to with 'a' here")
        == 1
    )


def hand_on(hand: Hand, seconds: int) -> None:
    for _ in range(seconds):
        hand.now += 1
        hand.time.advance(1)


def warnings(caplog, text: str) -> int:
    return sum(text in line.message and line.levelname == "WARNING" for line in caplog.records)


def test_what_fails_each_second_is_a_warning_once_until_it_ends(seen: Seen, caplog, monkeypatch) -> None:
    errors = [AccessDenied("no"), AccessDenied("no"), CallTimeout("late"), None, CallTimeout("late")]

    def members(*args: object) -> list[str]:
        if (error := errors.pop(0)) is not None:
            raise error
        return ["me"]

    monkeypatch.setattr(seen.fake, "members", members)
    told = []
    while errors:
        seen.one.allocate(QUEUES)
        assert seen.one.is_balanced == (len(errors) == 1)
        told.append(warnings(caplog, "the assignment of topic t stays unchanged"))
    assert told == [1, 1, 2, 2, 3]


def test_unreadable_start_offsets_warn_once_per_topic_and_broker(seen: Seen, caplog) -> None:
    seen.fake.unknown = dict.fromkeys(QUEUES, AccessDenied("no"))
    for _ in range(3):
        assert seen.one.allocate([]) == {}
    assert warnings(caplog, "its start offset cannot be read yet") == 1
    seen.fake.unknown.clear()
    assert len(seen.one.allocate([])) == 3
    seen.fake.unknown = dict.fromkeys(QUEUES, AccessDenied("no"))
    seen.one.allocate([])
    assert warnings(caplog, "its start offset cannot be read yet") == 2
