from __future__ import annotations

from typing import Any

import pytest

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import Response
from rocketmq_spark.consumer.rebalance import ConsumeFrom, ConsumeFromWhere
from rocketmq_spark.errors import BrokerBusy, BrokerError, CallTimeout, GroupNotFound, RocketMQError
from rocketmq_spark.model import Filter, PullAnswer, PullRequest, PullStatus
from tests.consumer.group import GroupBench
from tests.fakes.group_member import RARE, Done, FakeMember
from tests.queues import q, qs

A, B = q("a:0"), q("b:0")


def pulls(port: FakeMember, queue: object = A) -> list[int]:
    return [request.offset for request in port.seen("pull") if request.queue == queue]


def test_each_pull_goes_on_where_the_answer_before_it_ended(group: GroupBench) -> None:
    group.brokers.offsets[A] = 0
    group.brokers.send(A, *(b"x" for _ in range(70)))
    _, port = group.start()
    group.time.advance(0.6)
    assert pulls(port) == [0, 32, 64, 70]


def test_permanent_pull_error_is_warned_of_once_per_broker(group: GroupBench, caplog: pytest.LogCaptureFixture) -> None:
    def warnings() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]

    group.brokers.failing["pull a"] = GroupNotFound("no such group", broker_code=26)
    group.brokers.failing["pull b"] = CallTimeout("late")
    group.start()
    group.time.advance(10)
    (said,) = warnings()
    assert "group g: a pull of T/a/0 at 0 failed: " in said
    assert "no such group" in said
    group.brokers.failing["pull b"] = BrokerError("subscription not latest", broker_code=25)  # the next heartbeat tells
    group.time.advance(5)
    assert len(warnings()) == 1
    del group.brokers.failing["pull a"]
    group.time.advance(2)
    group.brokers.failing["pull a"] = GroupNotFound("no such group", broker_code=26)
    group.time.advance(30)
    assert len(warnings()) == 2


def test_no_pull_asks_for_what_it_says_is_finished(group: GroupBench) -> None:
    group.brokers.offsets[A] = 0
    _, port = group.start(lambda messages, context: 1 / 0 if messages[0].body == b"7" else None)
    for turn in range(4):
        group.brokers.send(A, *(str(i).encode() for i in range(turn, turn + 9)))
        group.time.advance(16)
    told = [(request.offset, request.commit_offset) for request in port.seen("pull") if request.queue == A]
    assert len([commit for _, commit in told if commit]) >= 4
    assert all(offset >= (commit or 0) for offset, commit in told)
    assert told[-1] == (36, 36)


def test_empty_pull_commits_past_no_unfinished_message(group: GroupBench) -> None:
    group.brokers.offsets[A] = 0
    group.brokers.failing |= dict.fromkeys(("send_back", "send_to_retry"), CallTimeout("late"))
    consumer, port = group.start(lambda messages, context: 1 / 0)
    group.brokers.send(A, b"1")
    group.time.advance(40)
    assert pulls(port).count(1) > 1
    assert len(group.got) > 1
    consumer.stop()
    assert group.brokers.offsets[A] == 0
    assert all(not request.commit_offset for request in port.seen("pull") if request.queue == A)


def test_offset_that_went_back_at_its_broker_is_corrected(group: GroupBench) -> None:
    group.brokers.offsets[A] = 0
    consumer, port = group.start()
    group.brokers.send(A, *(b"x" for _ in range(5)))
    group.time.advance(11)
    assert group.brokers.offsets[A] == 5
    group.brokers.offsets[A] = 2  # a later word of an older pull, or a broker that was restarted
    group.time.advance(16)  # the next pull brings it along
    assert (group.brokers.offsets[A], len(group.got)) == (5, 5)
    assert consumer.stats().lag == 0
    assert pulls(port)[-1] == 5


def test_queue_has_one_pull_however_often_it_changes_hands(group: GroupBench) -> None:
    """``FakeMember`` refuses a second one."""
    first, port = group.start()
    for _ in range(5):
        second, _ = group.start()
        group.time.advance(2)
        second.stop()
        group.time.advance(2)
        group.brokers.told()
    assert group.owned_queues(first) == qs("a:0-1 b:0-1")
    assert port.begun[B] >= 5
    group.time.advance(31)
    parked = [request.queue for request, _ in group.brokers.parked if request.queue.topic == "T"]
    assert sorted(parked) == qs("a:0-1 b:0-1")


def test_empty_pull_is_held_15_seconds_and_repeated_at_once(group: GroupBench) -> None:
    _, port = group.start()
    real, allowed_s = port.pull, []

    def pull(request: PullRequest, deadline: Deadline, done: Done) -> None:
        allowed_s.append(deadline.remaining())
        real(request, deadline, done)

    port.pull = pull
    group.time.advance(0.5)
    assert {request.suspend_s for request in port.seen("pull")} == {15.0}
    group.time.advance(14.99)
    assert len(pulls(port)) == 1
    group.time.advance(0.01)
    assert len(pulls(port)) == 2
    assert allowed_s == [pytest.approx(30.0)] * 8  # of four queues
    group.brokers.send(A, b"1")
    group.time.run_due()
    assert group.bodies() == [b"1"]


def test_dropped_queue_is_pulled_no_more(group: GroupBench) -> None:
    consumer, port = group.start()
    group.time.advance(1)
    consumer._running.state.queues[A].dropped = True
    group.brokers.send(A, b"1")
    group.time.advance(0.1)
    assert len(pulls(port)) == 1
    assert group.got == []


@pytest.mark.parametrize(
    ("error", "pause_s"), [(CallTimeout("late"), 1.0), (BrokerBusy("busy", broker_code=Response.FLOW_CONTROL), 0.02)]
)
def test_errors_are_waited_out_and_other_queues_go_on(group: GroupBench, error: RocketMQError, pause_s: float) -> None:
    group.brokers.failing["pull a"] = error
    _, port = group.start()
    group.time.advance(0.501 + 3 * pause_s)
    assert len(pulls(port)) == 4
    group.brokers.send(B, b"1")
    group.time.run_due()
    assert group.bodies() == [b"1"]


def test_an_interval_between_pulls_is_kept(group: GroupBench) -> None:
    group.brokers.offsets[A] = 0
    group.brokers.send(A, *(b"x" for _ in range(64)))
    _, port = group.start(pull_interval_s=2.0)
    group.time.advance(2.4)
    assert pulls(port) == [0]
    group.time.advance(0.2)
    assert pulls(port) == [0, 32]


def test_group_starting_at_earliest_begins_at_the_queue_minimum(group: GroupBench) -> None:
    """Without an offset it asks for 0, which is gone, and is told the minimum."""
    group.brokers.queues[A].first = 100
    group.brokers.send(A, b"1", b"2")
    consumer, port = group.start(consume_from=ConsumeFrom(ConsumeFromWhere.EARLIEST))
    group.time.advance(3)
    assert pulls(port) == [0, 100, 102]
    assert group.bodies() == [b"1", b"2"]
    consumer.stop()
    assert group.brokers.offsets[A] == 102


def test_illegal_offset_is_repaired_and_no_wrong_one_is_stored(group: GroupBench) -> None:
    group.brokers.queues[A].first = 100
    group.brokers.send(A, b"1")
    group.brokers.offsets[A] = 7
    consumer, port = group.start()
    group.time.advance(0.6)
    assert group.brokers.offsets[A] == 100
    group.time.advance(2)
    assert pulls(port) == [7, 100, 101]
    assert group.bodies() == [b"1"]
    consumer.stop()
    assert group.brokers.offsets[A] == 101


def test_illegal_offset_discards_progress_of_messages_in_flight(group: GroupBench) -> None:
    group.brokers.offsets[A] = 0
    group.brokers.send(A, *(b"x" for _ in range(40)))
    consumer, _ = group.start()
    group.workers[0].held = True
    group.time.advance(0.6)
    group.brokers.queues[A].first, group.brokers.queues[A].messages = 0, []  # as if the topic were made again
    group.time.advance(16)
    group.workers[0].let_go()
    group.time.advance(6)
    assert group.brokers.offsets[A] == 0
    assert A in group.owned_queues(consumer)


def test_filter_and_version_go_along(group: GroupBench) -> None:
    consumer, port = group.consumer(post_subscription_when_pull=True, pull_batch_size=5)
    consumer.subscribe("T", tags="a")
    consumer.start(print)
    group.time.advance(1)
    request = port.seen("pull")[0]
    assert (request.filter, request.post_filter, request.count, request.broker_id) == (Filter("a"), True, 5, 0)
    assert request.version_ms > 0


@pytest.mark.parametrize("between", [(), ("x",)])
def test_pull_in_flight_is_repeated_with_newly_set_filter(group: GroupBench, between: tuple[str, ...]) -> None:
    """The answer to the pull under way passes over what is wanted now."""
    consumer, _ = group.consumer()
    consumer.subscribe("T", tags=RARE)
    got: list[bytes] = []
    consumer.start(lambda messages, context: got.extend(message.body for message in messages))
    group.time.advance(2)
    assert group.brokers.parked
    for tags in (*between, None):
        consumer.subscribe("T", tags=tags)
    group.brokers.send(A, b"1", b"2")
    group.time.advance(1)
    assert got == [b"1", b"2"]
    group.time.advance(10)
    assert group.brokers.offsets[A] == 2


@pytest.mark.parametrize("change", ["filter", "left and taken up again"])
def test_offset_reset_answered_to_outdated_pull_is_followed(group: GroupBench, change: str) -> None:
    """Brokers tell it to one pull only, whichever is under way."""
    group.brokers.send(A, *(b"%d" % i for i in range(9)))
    consumer, _ = group.consumer()
    consumer.subscribe("T", tags=RARE)
    got: list[bytes] = []
    consumer.start(lambda messages, context: got.extend(message.body for message in messages))
    group.time.advance(2)
    ((_, done),) = [entry for entry in group.brokers.parked if entry[0].queue == A]
    if change != "filter":
        consumer.unsubscribe("T")
    consumer.subscribe("T")
    group.time.advance(2)
    assert got == []
    done(PullAnswer(PullStatus.OFFSET_ILLEGAL, 7, 0, 9, is_reset=True))
    group.time.advance(60)
    assert (got, group.brokers.offsets[A]) == ([b"7", b"8"], 9)


def told_of_a_reset(group: GroupBench, offset: int) -> None:
    """As brokers since 5.2.0 do it: the offset is stored, and one pull is told of it."""
    ((_, done),) = [entry for entry in group.brokers.parked if entry[0].queue == A]
    group.brokers.offsets[A] = offset
    done(PullAnswer(PullStatus.OFFSET_ILLEGAL, offset, 0, 9, is_reset=True))


@pytest.mark.parametrize("when", ["while listeners are waited for", "while the last words are said"])
def test_offset_reset_received_during_stop_is_committed_last(
    group: GroupBench, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    group.brokers.send(A, *(b"%d" % i for i in range(9)))
    consumer, port = group.start()
    group.time.advance(1)
    assert len(group.bodies()) == 9
    part, name = (port, "commit") if when == "while the last words are said" else (group.workers[0], "close")
    real = getattr(part, name)

    def beside(*given: Any) -> Any:
        monkeypatch.undo()
        told_of_a_reset(group, 2)
        return real(*given)

    monkeypatch.setattr(part, name, beside)
    consumer.stop()
    assert group.brokers.offsets[A] == 2


@pytest.mark.parametrize("when", ["before it is released", "while its offset is stored", "behind that"])
def test_offset_reset_during_queue_handover_reaches_new_owner(
    group: GroupBench, monkeypatch: pytest.MonkeyPatch, when: str, caplog: pytest.LogCaptureFixture
) -> None:
    group.brokers.send(A, *(b"%d" % i for i in range(9)))
    consumer, port = group.start(name="m2")
    group.time.advance(1)
    assert len(group.bodies()) == 9
    owns = consumer._running._ownership
    part, name = (port, "commit") if when == "while its offset is stored" else (owns, "_release")
    real = getattr(part, name)

    def beside(*given: Any) -> Any:
        if A not in given[name == "commit"]:
            return real(*given)
        monkeypatch.setattr(part, name, real)
        if when != "behind that":
            told_of_a_reset(group, 2)
            return real(*given)
        done = real(*given)
        told_of_a_reset(group, 2)
        return done

    monkeypatch.setattr(part, name, beside)
    other, _ = group.start(name="m1")
    group.time.advance(30)
    assert A in group.owned_queues(other)
    assert [who for who, _, _ in group.got].count("m1") == 7
    assert group.brokers.offsets[A] == 9
    assert "reset" in caplog.text


def test_pull_answer_from_before_resubscribing_is_pulled_again(group: GroupBench) -> None:
    consumer, _ = group.consumer()
    consumer.subscribe("T", tags=RARE)
    got: list[bytes] = []
    consumer.start(lambda messages, context: got.extend(message.body for message in messages))
    group.time.advance(2)
    consumer.unsubscribe("T")
    group.brokers.send(A, b"1")
    consumer.subscribe("T")
    group.time.advance(3)
    assert got == [b"1"]


def test_an_answer_counts_where_queues_have_changed_meanwhile(group: GroupBench) -> None:
    _, port = group.start()
    group.time.advance(2)
    group.brokers.topics["T"] = qs("a:0-1 b:0")
    group.time.advance(20)
    pulls = len(port.seen("pull"))
    group.brokers.send(A, b"1")
    group.time.advance(0.1)
    assert len(port.seen("pull")) == pulls + 1


def test_the_replica_that_the_last_answer_suggested_is_asked(group: GroupBench, monkeypatch) -> None:
    from dataclasses import replace

    real = group.brokers.answer
    monkeypatch.setattr(group.brokers, "answer", lambda request: replace(real(request), broker_id=1))
    group.brokers.offsets[A] = 0
    group.brokers.send(A, b"1")
    _, port = group.start()
    group.time.advance(0.6)
    assert [request.broker_id for request in port.seen("pull") if request.queue == A] == [0, 1]


def test_member_without_queues_does_nothing(group: GroupBench) -> None:
    group.brokers.topics["T"] = []
    _, port = group.start()
    group.time.advance(0.6)
    due = len(group.time.due)
    group.time.advance(15)
    assert not port.seen("pull")
    assert len(group.time.due) <= due


def test_bounds_of_a_topic_count_for_all_its_queues_together(group: GroupBench) -> None:
    consumer, _ = group.start(topic_max_count=100)
    group.workers[0].held = True
    group.time.advance(1)
    for queue in qs("a:0-1 b:0-1"):
        group.brokers.send(queue, *(b"x" for _ in range(200)))
    group.time.advance(1)
    cached = [held.count for held in consumer._running.state.owned_queues()]
    assert [25 < count <= 25 + 32 for count in cached] == [True] * 4, cached
