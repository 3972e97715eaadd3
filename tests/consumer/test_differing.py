from __future__ import annotations

from pathlib import Path

import pytest

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.consumer.group_health import ConsumeModes, SubscriptionConflicts, differences
from rocketmq_spark.consumer.settings import Subscriptions
from rocketmq_spark.errors import CallTimeout
from rocketmq_spark.model import NO_FILTER, Filter
from tests.consumer.group import GroupBench
from tests.consumer.pull_bench import A, Hand, made
from tests.fakes.group_member import FakeMember, QueueMember


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        (NO_FILTER, Filter("*")),
        (Filter("a || b"), Filter("b||a")),
        (Filter("a > 1", "SQL92"), Filter("a > 1", "SQL92")),
        (Filter("||"), Filter("||")),
    ],
)
def test_what_means_the_same(mine, theirs):
    assert differences({"T": mine}, {"T": theirs}) is None


def test_what_does_not():
    mine = {"T": Filter("a"), "U": NO_FILTER, "V": Filter("a", "SQL92")}
    theirs = {"T": Filter("b"), "W": NO_FILTER, "V": Filter("a")}
    found = differences(mine, theirs)
    assert found is not None
    assert found.text.split("; ") == [
        "topic T is subscribed to with 'a' here and subscribed to with 'b' elsewhere",
        "topic U is subscribed to with '*' here and not subscribed to elsewhere",
        "topic V is subscribed to with 'a' here and subscribed to with 'a' elsewhere",
        "topic W is not subscribed to here and subscribed to with '*' elsewhere",
    ]


def test_what_others_choose_takes_little_memory_and_a_short_line(
    group: GroupBench, caplog: pytest.LogCaptureFixture
) -> None:
    """A member may change its subscriptions each time, and have thousands of them of any length."""
    subscriptions = Subscriptions("g", True, lambda: 1)
    subscriptions.add("T", NO_FILTER)
    member = FakeMember(group.brokers, "m")
    looks = SubscriptionConflicts(member, "g", subscriptions)
    for n in range(120):
        there = {f"{i}{'t' * 250}": Filter(f"{'x' * 30_000} > {n}", "SQL92") for i in range(10)}
        member.filters = lambda *_, there=there: there  # type: ignore[method-assign,misc]
        for _ in range(2):
            looks.check(Deadline.after(1))
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 120  # also if only the end is another
    assert max(map(len, messages)) < 3500
    assert "; and 7 more" in messages[0]
    assert len(looks._logged_digests) == 100


def test_it_is_told_once_and_not_for_a_moment(group: GroupBench, caplog):
    subscriptions = Subscriptions("g", True, lambda: 1)
    subscriptions.add("T", Filter("a"))
    member = FakeMember(group.brokers, "m")
    looks = SubscriptionConflicts(member, "g", subscriptions)

    def look(there: dict[str, Filter]) -> int:
        member.filters = lambda *_: there  # type: ignore[method-assign,assignment]
        looks.check(Deadline.after(1))
        return caplog.text.count("have different subscriptions")

    mine, theirs = subscriptions.filters(), {**subscriptions.filters(), "T": Filter("b")}
    assert [look(there) for there in (mine, theirs, mine, theirs, theirs, theirs, mine, theirs, theirs)] == [
        0, 0, 0, 0, 1, 1, 1, 1, 1,
    ]  # fmt: skip
    assert "topic T is subscribed to with 'a' here" in caplog.text


def test_nothing_is_said_where_brokers_say_nothing(group: GroupBench, caplog):
    subscriptions = Subscriptions("g", True, lambda: 1)
    member = FakeMember(group.brokers, "m")
    looks = SubscriptionConflicts(member, "g", subscriptions)
    looks.check(Deadline.after(1))
    assert not member.calls  # without a topic there is nobody to ask
    subscriptions.add("T", NO_FILTER)
    group.brokers.failing["filters"] = CallTimeout("no answer")
    for _ in range(3):
        looks.check(Deadline.after(1))
    assert not caplog.text


@pytest.mark.parametrize(("tags", "told"), [("a", 1), ("*", 0)])
def test_only_members_with_different_subscriptions_are_warned_of(group: GroupBench, caplog, tags, told):
    group.start()
    other, port = group.consumer()
    other.subscribe("T", tags=tags)
    other.start(lambda messages, context: None)
    group.time.advance(90)
    assert len(port.seen("filters")) == 4
    assert caplog.text.count("have different subscriptions") == told


@pytest.mark.parametrize(("model", "warnings"), [("clustering", 1), ("broadcasting", 0)])
def test_a_member_that_pulls_warns_if_the_group_is_to_pop(
    group: GroupBench, caplog: pytest.LogCaptureFixture, tmp_path: Path, model: str, warnings: int
) -> None:
    group.brokers.modes["T", "b"] = "POP"
    group.start(clustering=model == "clustering", offsets_folder=tmp_path)
    group.time.advance(0)
    assert caplog.text.count("group g: the consume mode of topic T is POP at b, but this member pulls") == warnings
    assert caplog.text.count("mqadmin setConsumeMode -m PULL") == warnings
    group.time.advance(60)
    assert caplog.text.count("the consume mode") == warnings


def test_a_switch_to_pop_while_members_run_is_one_warning(group: GroupBench, caplog: pytest.LogCaptureFixture) -> None:
    group.start(ordered=True)
    group.time.advance(30)
    assert "the consume mode" not in caplog.text
    for mode in ("POP", "PULL", "POP"):
        group.brokers.modes["T", "a"] = mode
        group.time.advance(60)
    assert caplog.text.count("the consume mode of topic T is POP at a") == 2


def test_a_broker_that_does_not_answer_is_not_switched_back(
    group: GroupBench, caplog: pytest.LogCaptureFixture
) -> None:
    subscriptions = Subscriptions("g", True, lambda: 1)
    subscriptions.add("T", NO_FILTER)
    member = FakeMember(group.brokers, "m")
    modes = ConsumeModes(member, "g", subscriptions)
    for answer in ({("T", "a"): "POP"}, {}, {("T", "a"): "POP"}):
        member.consume_modes = lambda *_, answer=answer: answer  # type: ignore[method-assign]
        modes.check(Deadline.after(1))
    assert caplog.text.count("the consume mode") == 1


def test_a_pull_consumer_warns_if_its_group_is_to_pop(caplog: pytest.LogCaptureFixture) -> None:
    fake, hand = QueueMember([A]), Hand()
    fake.brokers.modes["t", "b"] = "POP"
    with made(fake, hand) as consumer:
        consumer.subscribe("t")
        consumer.poll(0)
        hand.time.advance(0)
    assert caplog.text.count("group g: the consume mode of topic t is POP at b, but this member pulls") == 1
