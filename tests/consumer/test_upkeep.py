"""What a pull consumer does beside its polls, when its time has come."""

from __future__ import annotations

import itertools
import linecache
import sys
import threading
from types import FrameType

import pytest

from rocketmq_spark.base.clock import Clock, Deadline
from rocketmq_spark.consumer import upkeep
from rocketmq_spark.consumer.offsets import OffsetRequests
from rocketmq_spark.consumer.polls import Polls
from rocketmq_spark.consumer.pull import BasePullConsumer
from rocketmq_spark.consumer.rebalance import StartOffset
from rocketmq_spark.consumer.settings import ConsumerSettings, Subscriptions
from rocketmq_spark.consumer.upkeep import PullMembership, Upkeep
from rocketmq_spark.errors import (
    AccessDenied,
    BrokerNotFound,
    CallTimeout,
    ConnectionLost,
    InvalidParameter,
    RocketMQError,
    ServerFault,
)
from rocketmq_spark.model import NO_FILTER, MessageQueue
from tests.consumer.pull_bench import AT_ONCE, A, B, Hand, bodies, made
from tests.fakes.group_member import QueueMember
from tests.fakes.timer import ManualTimer, Time
from tests.helpers import raising, unlike_ctrl_c, waits_in

QUEUE = MessageQueue("t", "b", 0)


@pytest.fixture
def hand() -> Hand:
    return Hand()


class Kept:
    def __init__(self, auto_commit: bool = True) -> None:
        self.now = 0.0
        self.fake = QueueMember([QUEUE], high=3)
        settings = ConsumerSettings(group="g", auto_commit=auto_commit)
        clock = Clock(lambda: self.now)
        subscriptions = Subscriptions("g", False, lambda: 1)
        self.polls = Polls(self.fake, settings, subscriptions, clock)  # type: ignore[arg-type]
        positions = OffsetRequests(self.fake, settings)  # type: ignore[arg-type]
        self.shared = PullMembership(self.fake, settings, subscriptions, positions, clock, self.polls.reachability)  # type: ignore[arg-type]
        self.time = Time()
        self.one = Upkeep(settings, self.polls, positions, self.shared, clock, ManualTimer(self.time))


def test_new_offsets_are_committed_every_5_seconds() -> None:
    kept = Kept()
    kept.one.apply_assignment({QUEUE: StartOffset(0)})
    kept.one.next_parts(kept.one.start_poll(0.0), 1)
    kept.polls.has_returned_all = True
    for now, commits in ((4.9, 0), (5.0, 1), (10.0, 1)):
        kept.now = now
        kept.one.start_poll(0.0)
        assert len(kept.fake.commits) == commits


def test_idle_queues_commit_their_offsets_again_every_30_seconds() -> None:
    """A master came back with old ones, or a member that was cut off stored its own."""
    kept = Kept()
    kept.one.apply_assignment({QUEUE: StartOffset(0)})
    kept.one.next_parts(kept.one.start_poll(0.0), 1)
    kept.polls.has_returned_all = True
    kept.now = 5.0
    kept.one.start_poll(0.0)
    assert kept.fake.stored == {QUEUE: 3}
    kept.fake.stored[QUEUE] = 1
    for now, stored in ((10.0, 1), (29.9, 1), (30.0, 1), (35.0, 3), (59.0, 3)):
        kept.now = now
        kept.one.start_poll(0.0)
        assert kept.fake.stored == {QUEUE: stored}, now
    assert len(kept.fake.commits) == 2


def test_manually_committed_offsets_are_sent_again_every_30_s() -> None:
    kept = Kept(auto_commit=False)
    kept.one.apply_assignment({QUEUE: StartOffset(0)})
    kept.one.next_parts(kept.one.start_poll(0.0), 1)
    kept.polls.has_returned_all = True
    for now, commits in ((1.0, 1), (2.0, 1), (31.0, 2), (32.0, 2)):
        kept.now = now
        kept.one.start_poll(0.0)
        assert len(kept.fake.commits) == commits - (now in (1.0, 31.0))
        kept.one.commit_finished()
        assert len([each for each in kept.fake.commits if each]) == commits


def test_routes_refresh_every_30_s_and_failure_stops_no_poll(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kept = Kept()
    kept.one.apply_assignment({QUEUE: StartOffset(0)})
    asked: list[str] = []

    def queues(topic: str, deadline: object, refresh: bool = False) -> list[MessageQueue]:
        asked.append(topic)
        raise ConnectionLost("no name server answers")

    monkeypatch.setattr(kept.fake, "queues", queues)
    caplog.set_level("INFO")
    for now in (29.0, 30.0, 31.0, 60.0):
        kept.now = now
        assert kept.one.start_poll(1.0).remaining() > 0
    assert asked == ["t", "t"]
    assert "the route of t cannot be refreshed" in caplog.text


def test_look_that_fails_is_no_end_of_looking(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Kept()
    kept.shared.set_subscription("t", NO_FILTER, lambda address, question: None)
    monkeypatch.setattr(kept.shared, "allocate", lambda owned: 1 / 0)
    kept.one.start_background()
    with pytest.raises(ZeroDivisionError):
        kept.time.advance(1)
    monkeypatch.undo()
    kept.time.advance(1)
    assert kept.polls.assigned_queues() == [QUEUE]


def test_a_turn_that_ctrl_c_left_behind_is_gone_on_with() -> None:
    """It may come between any two lines: nobody would ever look again."""
    kept = Kept()
    kept.shared.set_subscription("t", NO_FILTER, lambda address, question: None)
    kept.one._rebalancing_thread = threading.get_ident()
    kept.one.rebalance_if_due()
    assert kept.polls.assigned_queues() == [QUEUE]
    kept.one.rebalance()


class Interrupts:
    """Raises Ctrl-C at the n-th line of the upkeep, but not at ``with`` and ``try``, where the interpreter lets nothing come."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, frame: FrameType, event: str, arg: object) -> Interrupts | None:
        path = frame.f_code.co_filename
        if path != upkeep.__file__:
            return None
        parted = not linecache.getline(path, frame.f_lineno).lstrip().startswith(("with ", "try:"))
        if event == "line" and parted and not unlike_ctrl_c(frame):
            self.left -= 1
            if self.left == -1:
                raise KeyboardInterrupt
        return self


def interrupted_look(kept: Kept, at: int) -> Interrupts:
    """A look at the group of a consumer that has just subscribed, interrupted at a line."""
    kept.shared.set_subscription("t", NO_FILTER, lambda address, question: None)
    interrupts, before = Interrupts(at), sys.gettrace()
    sys.settrace(interrupts)
    try:
        kept.one.rebalance_if_due()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return interrupts


def test_ctrl_c_during_rebalance_blocks_no_later_rebalance() -> None:
    for at in itertools.count():
        kept = Kept()
        interrupts = interrupted_look(kept, at)
        assert kept.polls.assigned_queues() in ([], [QUEUE])
        kept.polls.assign({})
        for other in (True, False):
            look = threading.Thread(target=kept.one.rebalance, daemon=True)
            look.start() if other else look.run()
            if other:
                look.join(60)
            assert kept.polls.assigned_queues() == [QUEUE], at
            kept.polls.assign({})
        if interrupts.left >= 0:
            assert at > 10
            return


def test_assignment_interrupted_by_ctrl_c_is_made_by_next_poll() -> None:
    """Nobody would look for 20 s otherwise, and polls would give nothing."""
    for at in itertools.count():
        kept = Kept()
        interrupts = interrupted_look(kept, at)
        kept.one.rebalance_if_due()
        assert kept.polls.assigned_queues() == [QUEUE], at
        if interrupts.left >= 0:
            assert at > 10
            return


@pytest.mark.parametrize("nested", ["rebalance_if_due", "rebalance"])
def test_look_is_none_within_a_look(nested: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Kept()
    kept.shared.set_subscription("t", NO_FILTER, lambda address, question: None)
    looks: list[int] = []

    def look(owned: object) -> dict[MessageQueue, int | None]:
        looks.append(1)
        kept.shared.check_soon()
        getattr(kept.one, nested)()
        return {QUEUE: StartOffset(0)}

    monkeypatch.setattr(kept.shared, "allocate", look)
    one = threading.Thread(target=kept.one.rebalance_if_due, daemon=True)
    one.start()
    one.join(60)
    assert (looks, kept.polls.assigned_queues()) == ([1], [QUEUE])


def test_look_is_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two threads the second one skips it, unless it must know that it is done."""
    kept = Kept()
    kept.shared.set_subscription("t", NO_FILTER, lambda address, question: None)
    inside, go_on, looks = threading.Event(), threading.Event(), []

    def look(owned: object) -> dict[MessageQueue, int | None]:
        looks.append(threading.current_thread())
        inside.set()
        assert go_on.wait(60)
        return {QUEUE: StartOffset(0)}

    monkeypatch.setattr(kept.shared, "allocate", look)
    first, second = (threading.Thread(target=kept.one.rebalance, daemon=True) for _ in range(2))
    first.start()
    assert inside.wait(60)
    kept.one.rebalance_if_due()
    assert looks == [first]
    second.start()
    waits_in(second, Upkeep.rebalance)
    assert looks == [first]
    go_on.set()
    for thread in (first, second):
        thread.join(60)
    assert looks == [first, second]


@pytest.mark.parametrize("error", [CallTimeout, ConnectionLost, BrokerNotFound, ServerFault])
def test_a_broker_that_does_not_answer_is_asked_once_a_look(
    error: type[RocketMQError], hand: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A poll would wait for each of its queues: 3 s each. What only a queue is in trouble with holds back no other."""
    far = [MessageQueue("t", "far", i) for i in range(20)]
    fake, asked, real = QueueMember([A, *far]), [0], QueueMember.committed

    def committed(self: QueueMember, group: str, queue: MessageQueue, *rest: Deadline) -> int | None:
        if queue in far:
            asked[0] += 1
            if queue == far[0] or error in (CallTimeout, ConnectionLost):
                raise error("far")
        return real(self, group, queue, *rest)

    monkeypatch.setattr(QueueMember, "committed", committed)
    with made(fake, hand) as consumer:
        consumer.subscribe("t")
        fake.add(A)
        assert bodies(consumer.poll(AT_ONCE)) == [0]
        one = error in (CallTimeout, ConnectionLost)
        assert (asked[0], consumer.assignment()) == ((1, [A]) if one else (20, [A, *far[1:]]))
        monkeypatch.undo()
        hand.now += 1
        consumer.poll(AT_ONCE)
        assert consumer.assignment() == [A, *far]


@pytest.mark.parametrize("error", [InvalidParameter, ServerFault])
def test_queue_removed_from_topic_is_given_up_without_error(
    error: type[RocketMQError], hand: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read queues were reduced. The route of now says so, not only the next one that is due."""
    fake = QueueMember([A, B])
    known = [A, B]

    def queues(topic: str, deadline: Deadline, refresh: bool = False) -> list[MessageQueue]:
        if refresh:
            known[:] = sorted(fake.high)
        return list(known)

    monkeypatch.setattr(fake, "queues", queues)
    with made(fake, hand) as consumer:
        consumer.subscribe("t")
        assert consumer.poll(AT_ONCE) == []
        request, refused = fake.waiting.pop()
        assert request.queue == B
        del fake.high[B]
        refused(error("queueId[1] is illegal", queue=str(B)))
        fake.add(A)
        assert bodies(consumer.poll(AT_ONCE)) == [0]
        assert consumer.assignment() == [A]


@pytest.mark.parametrize("route", ["has it", "is not to be had"])
def test_queue_refused_for_another_reason_raises_error(route: str, hand: Hand, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = QueueMember([A, B])
    with made(fake, hand) as consumer:
        consumer.subscribe("t")
        consumer.poll(AT_ONCE)
        if route != "has it":
            monkeypatch.setattr(fake, "queues", raising(ConnectionLost("gone")))
        fake.waiting[0][1](InvalidParameter("no"))
        with pytest.raises(InvalidParameter):
            consumer.poll(AT_ONCE)
        assert consumer.assignment() == [A, B]


def test_error_of_queue_given_up_meanwhile_is_not_raised(hand: Hand) -> None:
    fake = QueueMember([A, B])
    with made(fake, hand) as consumer:
        consumer.assign([A, B])
        fake.waiting[1][1](AccessDenied("no"))
        consumer.assign([A])
        assert consumer.poll(AT_ONCE) == []


def test_a_poll_that_has_messages_does_not_wait_for_a_look(
    fake: QueueMember, consumer: BasePullConsumer, hand: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker that hangs is asked by the thread that follows the group, for each topic."""
    consumer.subscribe("t")
    assert consumer.poll(AT_ONCE) == []
    fake.add(A, 1)
    hand.now += 20
    monkeypatch.setattr(fake, "members", raising(AssertionError("the poll looked")))
    assert bodies(consumer.poll(AT_ONCE)) == [0]
    monkeypatch.undo()
    fake.has_members("Me", "me")
    hand.time.advance(1.0)
    assert consumer.assignment() == [B]


@pytest.mark.parametrize("how", ["a topic more", "a queue is gone"])
def test_changes_are_applied_at_once_while_polls_have_messages(
    how: str, hand: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, other = QueueMember([A, B]), MessageQueue("u", "b", 0)
    with made(fake, hand) as consumer:
        consumer.subscribe("t")
        assert consumer.poll(AT_ONCE) == []
        hand.time.advance(1.5)
        if how == "a topic more":
            fake.low[other] = fake.high[other] = 0
            fake.add(A, 100)
            consumer.subscribe("u")
            hand.time.run_due()
            assert consumer.assignment() == [A, B, other]
        else:
            refused = fake.waiting.pop()[1]
            del fake.high[B]
            fake.add(A, 100)
            refused(InvalidParameter("queueId[1] is illegal", queue=str(B)))
            assert bodies(consumer.poll(AT_ONCE)) == list(range(32))
            assert consumer.assignment() == [A]


def test_routes_are_not_asked_per_topic_while_name_servers_fail(hand: Hand, monkeypatch: pytest.MonkeyPatch) -> None:
    fake, asked = QueueMember([A, MessageQueue("u", "b", 0)]), list[str]()

    def queues(topic: str, deadline: object, refresh: bool = False) -> list[MessageQueue]:
        asked.append(topic)
        raise CallTimeout("no name server answers")

    with made(fake, hand) as consumer:
        consumer.assign(fake.high)
        monkeypatch.setattr(fake, "queues", queues)
        hand.now += 30
        consumer.poll(AT_ONCE)
        assert asked == ["t"]


def test_group_join_that_lacked_thread_works_at_next_subscribe(
    fake: QueueMember, consumer: BasePullConsumer, hand: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as exhausted:
        exhausted.setattr(ManualTimer, "call_later", raising(RuntimeError("can't start new thread")))
        with pytest.raises(RuntimeError):
            consumer.subscribe("t")
    consumer.subscribe("t")
    hand.time.advance(1.0)
    assert consumer.assignment() == [A, B]


def test_a_topic_whose_leave_was_interrupted_is_read_no_more(hand: Hand, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = QueueMember([A, MessageQueue("u", "b", 0)])
    with made(fake, hand) as consumer:
        for topic in "tu":
            consumer.subscribe(topic, tags="a")
        consumer.poll(AT_ONCE)
        with monkeypatch.context() as interrupted:
            interrupted.setattr(fake, "heartbeat", raising(KeyboardInterrupt()))
            with pytest.raises(KeyboardInterrupt):
                consumer.unsubscribe("u")
        assert consumer.poll(AT_ONCE) == []
        assert consumer.assignment() == [A]
