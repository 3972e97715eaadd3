from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from rocketmq_spark.base import complaints
from rocketmq_spark.consumer.push import BaseConsumer
from rocketmq_spark.errors import AccessDenied, CallTimeout, NotSupported, OptionError, RocketMQError, ServerFault
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.model.membership import ResetOffsets
from rocketmq_spark.queues.allocation import allocate
from rocketmq_spark.queues.environment import Environment
from tests.consumer.group import GroupBench
from tests.fakes.group_member import RETRY, FakeMember
from tests.helpers import raising
from tests.models import SteppingMachine, model_test, step
from tests.queues import q, qs
from tests.scale import examples

ALL = qs("a:0-1 b:0-1")


def runs(port: FakeMember) -> int:
    return port.seen("members").count("T")


def test_balanced_member_looks_every_twenty_seconds(group: GroupBench) -> None:
    _, port = group.start()
    group.time.advance(2)
    before = runs(port)
    group.time.advance(57)
    assert runs(port) - before == 2
    group.time.advance(20)
    assert runs(port) - before == 3


def test_balanced_member_looks_as_often_as_it_is_told(group: GroupBench) -> None:
    _, port = group.start(rebalance_interval_s=7.0)
    group.time.advance(2)
    before = runs(port)
    group.time.advance(70)
    assert runs(port) - before == 10


def test_a_balanced_member_without_notices_looks_every_5_seconds(group: GroupBench) -> None:
    _, port = group.start()
    port.receives_notices = False
    group.time.advance(21)
    before = runs(port)
    group.time.advance(50)
    assert runs(port) - before == 10


def test_unbalanced_member_retries_each_second_and_keeps_queues(group: GroupBench, caplog) -> None:
    broken = False

    def strategy(me, queues, members):
        if broken:
            raise ZeroDivisionError("mine")
        return allocate("averagely", me, queues, members)

    consumer, port = group.start(allocate=strategy)
    group.time.advance(2)
    broken = True
    group.brokers.told()
    group.time.advance(0.1)
    before = runs(port)
    group.time.advance(10)
    assert runs(port) - before == 10
    assert group.owned_queues(consumer) == ALL
    assert "the allocation strategy failed: ZeroDivisionError: mine" in caplog.text


def test_nothing_moves_while_nothing_changes(group: GroupBench) -> None:
    members = [group.start() for _ in range(3)]
    group.time.advance(5)
    owned = [group.owned_queues(consumer) for consumer, _ in members]
    begun = [dict(port.begun) for _, port in members]
    before = [runs(port) for _, port in members]
    group.time.advance(61)
    assert [runs(port) - was for (_, port), was in zip(members, before, strict=True)] == [3, 3, 3]
    assert [group.owned_queues(consumer) for consumer, _ in members] == owned == [ALL[:2], ALL[2:3], ALL[3:]]
    assert [dict(port.begun) for _, port in members] == begun


def test_new_queues_are_owned_with_the_next_rebalance(group: GroupBench) -> None:
    first, _ = group.start()
    second, _ = group.start()
    group.time.advance(5)
    group.brokers.topics["T"] = qs("a:0-3 b:0-3")
    group.time.advance(20)
    assert group.owned_queues(first) + group.owned_queues(second) == qs("a:0-3 b:0-3")
    group.brokers.send(q("b:3"), b"new")
    group.time.advance(1)
    assert group.bodies() == [b"new"]


def test_queues_of_a_broker_that_left_go_and_are_pulled_no_more(group: GroupBench) -> None:
    consumer, port = group.start()
    group.time.advance(5)
    group.brokers.topics["T"] = qs("a:0-1")
    group.time.advance(20)
    assert group.owned_queues(consumer) == ALL[:2]
    port.calls.clear()
    group.time.advance(60)
    asked = {request.queue.broker_name for request in port.seen("pull")}
    stored = {queue.broker_name for offsets in port.seen("commit") for queue in offsets}
    assert (asked, stored - {"a"}) == ({"a"}, set())
    assert not [queue for queue in consumer._running.state.offsets.all_offsets() if queue.broker_name == "b"]


def warned(caplog: pytest.LogCaptureFixture, words: str) -> int:
    return sum(words in record.getMessage() for record in caplog.records if record.levelname == "WARNING")


def test_unknown_members_are_warned_of_again_after_a_while(
    group: GroupBench, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(complaints, "WARNING_INTERVAL_S", 0.0)
    group.start()
    group.time.advance(5)
    group.brokers.failing["members"] = CallTimeout("late")
    group.time.advance(100)
    assert warned(caplog, "cannot read the members of topic T") > 2


@pytest.mark.parametrize("error", [AccessDenied("no right"), NotSupported("a name server")])
def test_a_refusal_that_lasts_is_warned_of_at_once(
    error: RocketMQError, group: GroupBench, caplog: pytest.LogCaptureFixture
) -> None:
    group.start()
    group.time.advance(5)
    group.brokers.failing["members"] = error
    group.brokers.told()
    group.time.advance(0.5)
    assert warned(caplog, "cannot read the members of topic T") == 1
    group.time.advance(10)
    assert warned(caplog, "cannot read the members of topic T") == 1


def test_unreadable_members_are_warned_of_once_until_readable(
    group: GroupBench, caplog: pytest.LogCaptureFixture
) -> None:
    def warnings() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]

    error = ServerFault("no consumer for this group", broker_code=1)
    group.brokers.failing["members"] = error
    group.start()
    group.time.advance(15)
    assert warnings() == []
    group.time.advance(60)
    (said,) = warnings()
    assert "group g: cannot read the members of topic T" in said
    del group.brokers.failing["members"]
    group.time.advance(20)
    group.brokers.failing["members"] = error
    group.time.advance(60)
    assert len(warnings()) == 2


def test_a_broker_that_has_not_heard_of_a_member_is_told_at_once(group: GroupBench) -> None:
    first, port = group.start()
    second, _ = group.start()
    group.time.advance(5)
    told = len(port.seen("heartbeat"))
    group.brokers.members.pop("m1")  # it was restarted, and the other one was quicker
    group.time.advance(21)
    assert len(port.seen("heartbeat")) > told
    assert (group.owned_queues(first), group.owned_queues(second)) == (ALL[:2], ALL[2:])
    told = len(port.seen("heartbeat"))
    group.time.advance(60)
    assert len(port.seen("heartbeat")) == told
    group.brokers.members.clear()
    group.brokers.failing["members"] = ServerFault("no consumer for this group", broker_code=1)
    group.time.advance(21)
    assert "m1" in group.brokers.members


def test_a_run_that_fails_is_not_the_last_one(group: GroupBench, monkeypatch: pytest.MonkeyPatch) -> None:
    consumer, port = group.start()
    group.time.advance(5)
    group.brokers.members.clear()
    group.brokers.failing["members"] = ServerFault("no consumer for this group", broker_code=1)
    monkeypatch.setattr(port, "heartbeat", lambda deadline: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # of the timer, which logs it
        group.time.advance(21)
    monkeypatch.undo()
    group.brokers.failing.clear()
    group.brokers.topics["T"] = qs("a:0-1 b:0-2")
    group.time.advance(45)
    assert group.owned_queues(consumer) == qs("a:0-1 b:0-2")


def test_trouble_of_one_topic_does_not_touch_the_others(group: GroupBench, monkeypatch, caplog) -> None:
    group.brokers.topics["A"] = qs("a:0", "A")
    consumer, port = group.consumer()
    real = port.queues

    def queues(topic, deadline, refresh=False):
        if topic == "A":
            raise TypeError("a bug")
        return real(topic, deadline, refresh)

    monkeypatch.setattr(port, "queues", lambda topic, *rest: real(topic, *rest))
    consumer.subscribe("A")
    consumer.subscribe("T")
    consumer.start(print)
    monkeypatch.setattr(port, "queues", queues)
    group.time.advance(21)
    assert group.owned_queues(consumer) == ALL
    assert "topic A could not be rebalanced" in caplog.text


@pytest.mark.parametrize("what", ["queues", "members"])
def test_when_nobody_tells_queues_or_members_all_stays_as_it_is(group: GroupBench, what: str) -> None:
    consumer, _ = group.start()
    group.time.advance(2)
    group.brokers.failing[what] = CallTimeout("late")
    group.brokers.told()
    group.time.advance(60)
    assert group.owned_queues(consumer) == ALL


def test_many_calls_make_one_run_and_none_sooner_than_a_second(group: GroupBench) -> None:
    consumer, port = group.start()
    before = runs(port)
    for _ in range(100):
        consumer._running.rebalancing.schedule()
    group.time.advance(0.9)
    assert runs(port) == before
    group.time.advance(0.2)
    assert runs(port) == before + 1


def test_heartbeats_tell_everybody_of_a_change(group: GroupBench) -> None:
    _, port = group.start()
    first, second = (membership.versions_ms for membership in port.seen("heartbeat"))
    assert (first["T"] < second["T"], first[RETRY] == second[RETRY]) == (True, True)


def test_no_run_after_the_end(group: GroupBench) -> None:
    consumer, port = group.start()
    consumer.stop()
    before = len(port.calls)
    consumer._running.rebalancing.schedule()
    group.time.advance(60)
    assert len(port.calls) == before


class Handing(SteppingMachine):
    """Members come, go and die while messages are sent: nothing is lost, and every queue has one owner in the end. With ordered
    listeners nothing comes again but of a queue of a member that died, once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.group = GroupBench(self.patch)
        self.group.brokers.offsets = dict.fromkeys(ALL, 0)
        self.queue_of: dict[bytes, MessageQueue] = {}
        self.running: list[tuple[BaseConsumer, FakeMember]] = []
        self.may_return: Counter[MessageQueue] = Counter()
        self.ordered, self.how = False, dict[str, Any]()

    @initialize(strategy=st.sampled_from(["averagely", "averagelyByCircle", "consistentHash"]), ordered=st.booleans())
    def begin(self, strategy: str, ordered: bool) -> None:
        self.ordered = ordered
        self.how = {"allocate": partial(allocate, strategy), "ordered": ordered}

    @step()
    def join(self) -> None:
        if len(self.running) < 6:
            self.running.append(self.group.start(**self.how))
            self.did["shared"] += len(self.running) > 1

    def one_of_them(self, which: int) -> tuple[BaseConsumer, FakeMember]:
        """A member that goes: at once, where it was the only one and has just come."""
        if not self.running:
            self.join()
        return self.running.pop(which % len(self.running))

    def unfinished_messages(self, consumer: BaseConsumer) -> list[MessageQueue]:
        """Its queues of which not all is committed."""
        brokers = self.group.brokers
        return [q for q in self.group.owned_queues(consumer) if brokers.offsets[q] < len(brokers.queues[q].messages)]

    @step(which=st.integers(0, 9))
    def leave(self, which: int) -> None:
        consumer, _ = self.one_of_them(which)
        self.did["left_with_work"] += bool(self.unfinished_messages(consumer))
        consumer.stop(1)

    @step(which=st.integers(0, 9))
    def die(self, which: int) -> None:
        """Without a word; the broker notices that the connection is gone, and keeps the locks for a minute."""
        consumer, port = self.one_of_them(which)
        self.did["died_with_work"] += bool(self.unfinished_messages(consumer))
        self.may_return.update(self.unfinished_messages(consumer))
        self.group.die(consumer, port)
        for queue, owner in list(self.group.brokers.locks.items()):
            if owner == port.client_id:
                self.group.brokers.timer.call_later(60, lambda queue=queue: self.group.brokers.locks.pop(queue, None))
        self.group.brokers.told()

    @step(queue=st.sampled_from(ALL), count=st.integers(1, 40), seconds=st.sampled_from([0.0, 0.1]))
    def send(self, queue: MessageQueue, count: int, seconds: float) -> None:
        """Who has the queue consumes them in a moment, and commits seconds later."""
        sent = [b"%d" % i for i in range(len(self.queue_of), len(self.queue_of) + count)]
        self.queue_of |= dict.fromkeys(sent, queue)
        self.group.brokers.send(queue, *sent)
        self.group.time.advance(seconds)

    @step(seconds=st.floats(0.01, 8))
    def wait(self, seconds: float) -> None:
        self.group.time.advance(seconds)

    def teardown(self) -> None:
        if not self.running:
            self.running.append(self.group.start(**self.how))
        self.group.time.advance(120)
        owned = sorted(queue for consumer, _ in self.running for queue in self.group.owned_queues(consumer))
        assert owned == ALL
        assert set(self.group.bodies()) == self.queue_of.keys()
        ends = {queue: len(self.group.brokers.queues[queue].messages) for queue in ALL}
        assert {queue: self.group.brokers.offsets[queue] for queue in ALL} == ends
        for queue in ALL if self.ordered else ():
            came = [int(body) for body in self.group.bodies() if self.queue_of[body] == queue]
            assert sum(after <= before for before, after in pairwise(came)) <= self.may_return[queue]
            self.did["in_order"] += len(came) > 1
        for consumer in self.group.consumers:
            consumer.stop(0.1)
        self.patch.undo()


TestHanding = model_test(
    Handing,
    settings(max_examples=examples(150), stateful_step_count=25),
    shared=15,
    left_with_work=2,
    died_with_work=3,
    in_order=4,
)


def test_environment_limits_shared_queues_but_not_retry_queues(group: GroupBench) -> None:
    mine = Environment.of("2", "2")
    consumers = [group.start(environment=mine)[0] for _ in range(2)]
    group.time.advance(3)
    assert sorted(queue for one in consumers for queue in group.owned_queues(one)) == qs("a:1 b:1")
    assert [len(group.owned_queues(one)) for one in consumers] == [1, 1]
    group.brokers.topics[RETRY] = qs("a:0 b:0", RETRY)
    group.time.advance(25)
    assert sorted(queue for one in consumers for queue in group.owned_queues(one, RETRY)) == qs("a:0 b:0", RETRY)


def test_an_environment_without_queues_is_refused_at_the_start(group: GroupBench) -> None:
    consumer, port = group.consumer(environment=Environment.of("3", "3"))
    consumer.subscribe("T")
    with pytest.raises(OptionError, match="option 'environments' is 3; expected at most 2"):
        consumer.start(lambda messages, context: None)
    assert port.seen("join") == []


def test_an_environment_that_loses_its_queues_keeps_what_it_had(
    group: GroupBench, caplog: pytest.LogCaptureFixture
) -> None:
    consumer, _ = group.start(environment=Environment.of("2", "2"))
    group.time.advance(2)
    group.brokers.topics["T"] = qs("a:0 b:0")
    group.time.advance(25)
    assert group.owned_queues(consumer) == qs("a:1 b:1")
    assert "the assignment of topic T stays unchanged" in caplog.text


def test_broadcasting_member_gets_only_queues_of_its_environment(group: GroupBench, tmp_path: Path) -> None:
    consumer, _ = group.start(environment=Environment.of("1", "2"), clustering=False, offsets_folder=tmp_path)
    group.time.advance(2)
    assert group.owned_queues(consumer) == qs("a:0 b:0")


def test_rebalance_that_lacked_thread_runs_at_next_wakeup(group: GroupBench, monkeypatch: pytest.MonkeyPatch) -> None:
    consumer, port = group.start()
    group.time.advance(2)
    rebalancing = consumer._running.rebalancing
    with monkeypatch.context() as patch:
        patch.setattr(rebalancing._timer, "call_later", raising(RuntimeError("can't start new thread")))
        with pytest.raises(RuntimeError):
            rebalancing.schedule()
    asked = len(port.seen("members"))
    rebalancing.schedule()
    group.time.run_due()
    assert len(port.seen("members")) > asked


@pytest.mark.parametrize(
    "when", ["before its queues are released", "behind that", "while brokers are told that it leaves"]
)
def test_a_reset_that_comes_while_a_consumer_ends_is_stored(
    group: GroupBench, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    group.brokers.send(q("a:0"), b"1", b"2", b"3")
    consumer, port = group.start()
    group.time.advance(1)
    running = consumer._running
    assert running is not None
    part, name = {
        "before its queues are released": (running._upkeep_timer, "close"),
        "behind that": (running._ownership, "leave"),
    }.get(when, (running, "_leave_group"))
    last_words = getattr(part, name)

    def reset_beside(*given: object) -> None:
        if part is not running:
            last_words(*given)
        assert port.asked is not None
        port.asked("a:1", ResetOffsets("T", {q("a:0"): 1}))
        if part is running:
            last_words(*given)

    monkeypatch.setattr(part, name, reset_beside)
    consumer.stop()
    assert group.brokers.offsets[q("a:0")] == 1
