from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.consumer import ownership
from rocketmq_spark.consumer.member_state import MemberState, OffsetTable
from rocketmq_spark.consumer.offsets import BrokerOffsets, LocalOffsets
from rocketmq_spark.consumer.ownership import Ownership
from rocketmq_spark.consumer.process_queue import ProcessQueue
from rocketmq_spark.consumer.rebalance import ConsumeFrom, ConsumeFromWhere
from rocketmq_spark.consumer.settings import ConsumerSettings
from rocketmq_spark.errors import AccessDenied, BrokerNotFound, CallTimeout, ServerFault
from rocketmq_spark.model import MessageQueue
from tests.consumer.group import GroupBench
from tests.fakes.group_member import GROUP, FakeMember
from tests.fakes.timer import ManualTimer
from tests.queues import q, qs

A = q("a:0")
ALL = qs("a:0-1 b:0-1")


@pytest.mark.parametrize("error", [ServerFault("code 1"), CallTimeout("late")])
def test_queue_whose_offset_is_not_known_waits_a_second(group: GroupBench, error, caplog) -> None:
    group.brokers.send(A, b"1")
    group.brokers.failing["committed a"] = error
    consumer, port = group.start()
    assert group.owned_queues(consumer) == ALL[2:]
    assert "queue T/a/0 is not started yet" in caplog.text
    del group.brokers.failing["committed a"]
    group.time.advance(1)
    assert group.owned_queues(consumer) == ALL
    assert not [request for request in port.seen("pull") if request.offset < 0]


def test_queues_not_started_are_warned_of_per_topic_and_broker(group: GroupBench, caplog) -> None:
    caplog.set_level("INFO")
    group.brokers.failing["committed a"] = AccessDenied("no")
    consumer, _ = group.start()
    for told in (1, 2):
        group.time.advance(5)
        lines = [line.levelname for line in caplog.records if "is not started yet" in line.message]
        assert (lines.count("WARNING"), len(lines) > 8 * told) == (told, True)
        del group.brokers.failing["committed a"]
        group.time.advance(2)
        assert group.owned_queues(consumer) == ALL
        consumer.unsubscribe("T")
        group.time.advance(2)
        group.brokers.failing["committed a"] = AccessDenied("no")
        consumer.subscribe("T")


def test_a_lock_of_a_queue_that_cannot_be_begun_is_given_back(group: GroupBench) -> None:
    """Else the next owner, or the members that are left, would wait until it expires: here for ever."""
    group.brokers.failing["committed a"] = ServerFault("code 1")
    consumer, _ = group.start(ordered=True)
    assert (group.owned_queues(consumer), group.brokers.locks) == (ALL[2:], dict.fromkeys(ALL[2:], "m1"))
    other, _ = group.start(ordered=True)
    consumer.stop(0.1)
    group.brokers.failing.clear()
    group.time.advance(3)
    assert group.owned_queues(other) == ALL


def test_refused_offset_of_one_queue_stops_no_request_for_others(group: GroupBench) -> None:
    group.brokers.failing["committed a"] = AccessDenied("no")
    _, port = group.start()
    assert [queue for queue in port.seen("committed") if queue.broker_name == "a"] == ALL[:2]


def test_queue_without_offset_on_a_slave_blocks_no_other_queue(group: GroupBench) -> None:
    """While the master is away its slave tells the offsets that it has, and no start of the others."""
    real = FakeMember.committed

    def committed(port: FakeMember, named: str, queue: MessageQueue, *rest: Any) -> int | None:
        if queue == A:
            raise BrokerNotFound("the master is down, and its slave may not have the group's offset yet")
        return real(port, named, queue, *rest)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(FakeMember, "committed", committed)
        consumer, _ = group.start()
        assert group.owned_queues(consumer) == ALL[1:]


def test_a_broker_that_hangs_is_asked_once_a_run(group: GroupBench) -> None:
    group.brokers.failing["committed a"] = CallTimeout("late")
    _, port = group.start()
    assert [queue for queue in port.seen("committed") if queue.broker_name == "a"] == [A]


@pytest.mark.parametrize(
    ("mode", "first"),
    [
        (ConsumeFrom(), []),
        (ConsumeFrom(ConsumeFromWhere.EARLIEST), [b"0", b"1", b"2"]),
        (ConsumeFrom(ConsumeFromWhere.TIMESTAMP, 7), [b"2"]),
    ],
)
@pytest.mark.parametrize("young", [False, True])
def test_new_group_begins_where_it_says_and_goes_on_from_there(group: GroupBench, mode, first, young) -> None:
    """But for a young queue, all of which it gets in every mode."""
    group.brokers.old, group.brokers.queues[A].first = True, 0 if young else 5
    first = [b"0", b"1", b"2"] if young else first
    group.brokers.send(A, b"0", b"1", b"2")
    consumer, _ = group.start(consume_from=mode)
    group.time.advance(40)
    assert group.bodies() == first
    consumer.stop()
    group.brokers.send(A, b"3")
    group.start(consume_from=ConsumeFrom())
    group.time.advance(1)
    assert group.bodies() == [*first, b"3"]


@pytest.mark.parametrize("clustering", [False, True])
def test_where_a_new_group_begins_is_stored_at_once(group: GroupBench, tmp_path: Path, clustering: bool) -> None:
    """Who is killed a moment later begins there again, and not at the end as it is by then."""
    group.brokers.queues[A].first = 5
    group.start(clustering=clustering, offsets_folder=tmp_path)
    files = tmp_path.rglob("offsets.json")
    assert (group.brokers.offsets if clustering else LocalOffsets(next(files)).load())[A] == 5


def test_where_a_young_queue_begins_is_stored(group: GroupBench) -> None:
    """A broker says 0 of it, as of an offset that it has, and "none" later: then the mode would skip what was not finished."""
    group.brokers.send(A, b"0", b"1", b"2")
    consumer, port = group.start()
    group.workers[0].held = True  # its listener does not come back
    group.time.advance(60)
    group.die(consumer, port)
    group.brokers.queues[A].first = 2
    del group.brokers.queues[A].messages[:2]
    group.start()
    group.time.advance(60)
    assert group.bodies() == [b"2"]


def test_broadcasting_member_skips_nothing_of_a_new_queue(group: GroupBench, tmp_path) -> None:
    """It hears of the queue, or of a topic, some seconds after the first message."""
    group.brokers.send(A, b"old")
    topics, group.brokers.topics = group.brokers.topics, {"T": [A]}
    consumer, port = group.consumer(clustering=False, offsets_folder=tmp_path)
    asked = []

    def search(queue: MessageQueue, epoch_ms: int, *_: Any) -> int:
        asked.append((queue, epoch_ms))
        return 0

    port.search_offset = search  # type: ignore[method-assign]
    consumer.subscribe("T")
    group.time.advance(100)
    began_ms = group.timers[port.client_id][0].wall_ms()
    consumer.start(lambda messages, context: group.got.append(("m1", messages[0].body, 0)))
    group.time.advance(10)
    late_ms = group.timers[port.client_id][0].wall_ms()
    consumer.subscribe("U")
    group.time.advance(10)
    group.brokers.topics = {**topics, "U": qs("a:0", "U")}
    group.brokers.send(ALL[1], b"new")
    group.brokers.send(q("a:0", "U"), b"first")
    group.time.advance(25)
    assert sorted(group.bodies()) == [b"first", b"new"]
    assert sorted(asked) == [*((queue, began_ms) for queue in ALL[1:]), (q("a:0", "U"), late_ms)]


@pytest.mark.parametrize("jump_s", [-3600, 3600])
def test_broadcasting_member_skips_nothing_when_its_clock_jumps(
    group: GroupBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump_s: int
) -> None:
    real, jumped_ms, asked = ManualTimer.wall_ms, 0, []
    monkeypatch.setattr(ManualTimer, "wall_ms", lambda self: real(self) + jumped_ms)
    consumer, port = group.start(clustering=False, offsets_folder=tmp_path)
    began_ms = group.timers[port.client_id][0].wall_ms()
    jumped_ms = 1000 * jump_s
    port.search_offset = lambda queue, epoch_ms, *_: asked.append(epoch_ms) or 0  # type: ignore[method-assign]
    group.time.advance(30)
    group.brokers.topics["T"] = [*ALL, q("c:0")]
    group.brokers.send(q("c:0"), b"new")
    group.time.advance(25)
    assert (group.bodies(), asked) == ([b"new"], [began_ms + jumped_ms])
    assert consumer.stop() == []


class Owner:
    """One member's ownership without the rest of it: ``begun`` is what it would pull, and from where."""

    def __init__(self, group: GroupBench, ordered: bool = False) -> None:
        self.port = FakeMember(group.brokers, "me")
        group.brokers.groups.add(GROUP)
        settings = ConsumerSettings(group=GROUP, ordered=ordered)
        self.held = MemberState(settings.thresholds)
        self.store = BrokerOffsets(self.port, GROUP, self.held)
        self.begun: list[tuple[MessageQueue, int]] = []
        self.owns = Ownership(
            self.port,
            settings,
            self.held,
            self.store,
            self._begin,
            ManualTimer(group.time),
        )

    def _begin(self, queue: ProcessQueue, offset: int) -> None:
        self.begun.append((queue.queue, offset))


def test_what_was_in_memory_is_forgotten_when_a_queue_comes(group: GroupBench) -> None:
    one = Owner(group)
    one.owns.add([A])
    assert one.owns.drop([A]) == [A]
    group.brokers.offsets[A] = 3
    one.held.offsets.force(A, 99)  # by somebody who was late
    assert one.owns.add([A]) == [A]
    assert one.held.offsets.get(A) == 3
    assert one.begun == [(A, 0), (A, 3)]


def test_queue_is_begun_once_however_often_it_is_added(group: GroupBench) -> None:
    one = Owner(group)
    assert one.owns.add(ALL) == ALL
    assert one.owns.add(ALL) == []
    assert [queue for queue, _ in one.begun] == ALL


def test_late_offset_repair_does_not_touch_a_regained_queue(group: GroupBench) -> None:
    one = Owner(group)
    one.owns.add([A])
    old = one.held.queues[A]
    one.owns.drop([A])
    group.brokers.offsets[A] = 3
    one.owns.add([A])
    one.owns.correct_offset(old, 99)
    assert (one.held.queues[A].dropped, one.held.offsets.get(A), group.brokers.offsets[A]) == (False, 3, 3)


def test_results_count_no_more_from_the_moment_of_a_reset(group: GroupBench) -> None:
    """A result that comes between the reset and the end of the queue would raise the offset again."""
    one, seen = Owner(group), []
    one.owns.add([A])

    def calling(queue: ProcessQueue) -> bool:
        one.held.record_finished_locked(queue, 50)
        seen.append(one.held.offsets.get(A))
        return False

    one.owns.ordered_service = SimpleNamespace(has_call=calling)  # type: ignore[assignment]
    one.owns.reset({A: 5})
    assert set(seen) == {5}
    assert (group.brokers.offsets[A], one.held.queues) == (5, {})


def test_an_offset_that_cannot_be_stored_does_not_keep_a_queue(group: GroupBench) -> None:
    one = Owner(group)
    one.owns.add([A])
    one.held.offsets.force(A, 1)
    group.brokers.failing["commit a"] = CallTimeout("late")
    assert one.owns.drop([A]) == [A]
    assert one.held.owned_queues() == []
    assert group.brokers.offsets[A] == 0


def test_reset_holds_over_a_commit_answered_later(group: GroupBench, monkeypatch) -> None:
    """The reset does not wait for ever, and cannot be stored before that commit: the member keeps it until it is."""
    monkeypatch.setattr(ownership, "TIMEOUT_S", 0.02)
    one = Owner(group)
    one.owns.add([A])
    one.held.offsets.force(A, 50)
    entered, go_on, real = threading.Event(), threading.Event(), one.port.commit

    def late(*given: Any) -> Any:
        if not entered.is_set():
            entered.set()
            assert go_on.wait(60)
        return real(*given)

    one.port.commit = late  # type: ignore[method-assign]
    commit = threading.Thread(target=one.store.persist, args=(Deadline.after(60),), daemon=True)
    commit.start()
    assert entered.wait(60)
    one.owns.reset({A: 5})
    go_on.set()
    commit.join(60)
    one.owns.add([A])
    assert one.begun == [(A, 0), (A, 5)]
    one.store.persist(Deadline.after(60))
    assert group.brokers.offsets[A] == 5


@pytest.mark.parametrize("ordered", [False, True])
def test_reset_during_the_last_commit_of_a_member_is_stored(group: GroupBench, ordered: bool) -> None:
    """Whichever thread is quicker: after that commit nothing would be left of the queue here."""
    one = Owner(group, ordered)
    one.owns.add([A])
    one.held.offsets.force(A, 50)
    waits, left = threading.Event(), threading.Event()
    reset = threading.Thread(target=one.owns.reset, args=({A: 5},), daemon=True)
    commit, persist = one.port.commit, one.store.persist

    def committed(*given: Any) -> Any:
        if not waits.is_set():
            reset.start()
            assert waits.wait(60)
        return commit(*given)

    def persisted(*given: Any) -> None:
        if threading.current_thread() is reset:
            waits.set()
            assert left.wait(60)
        persist(*given)

    one.port.commit, one.store.persist = committed, persisted  # type: ignore[method-assign]
    one.owns.leave(Deadline.after(60))
    left.set()
    reset.join(60)
    assert (group.brokers.offsets[A], one.held.queues, group.brokers.locks) == (5, {}, {})


@pytest.mark.parametrize(("after_s", "begins"), [(60, 3), (60.1, 7)])
def test_unstored_reset_is_kept_for_one_minute(
    group: GroupBench, after_s: float, begins: int, caplog: pytest.LogCaptureFixture
) -> None:
    """By then the group may be elsewhere. The log says that it is given up."""
    one = Owner(group)
    one.owns.add([A])
    group.brokers.failing["commit"] = CallTimeout("late")
    one.owns.reset({A: 3})
    group.brokers.failing.clear()
    group.brokers.offsets[A] = 7
    group.time.advance(after_s - 0.001)
    one.owns.add([A])
    assert one.begun[1:] == [(A, begins)]
    assert ("dropped the reset to offset 3 of T/a/0: no broker stored it" in caplog.text) == (begins == 7)


def test_unstored_reset_survives_failing_rebalances_of_its_queue(group: GroupBench) -> None:
    one = Owner(group)
    one.owns.add([A])
    group.brokers.failing |= {"commit": CallTimeout("late"), "committed": CallTimeout("late")}
    one.owns.reset({A: 3})
    for _ in range(10):
        group.time.advance(30)
        assert one.owns.add([A]) == []
    group.brokers.failing.clear()
    assert one.owns.add([A]) == [A]
    assert one.begun[1:] == [(A, 3)]


def test_progress_after_an_unstored_reset_is_kept(group: GroupBench) -> None:
    """Neither is the reset lost with the second release, nor is what was finished since given again."""
    one = Owner(group)
    one.owns.add([A])
    group.brokers.offsets[A] = 50
    group.brokers.failing["commit"] = CallTimeout("late")
    one.owns.reset({A: 3})
    one.owns.add([A])
    one.held.offsets.raise_to(A, 9)
    one.owns.drop([A])
    one.owns.add([A])
    group.brokers.failing.clear()
    one.owns.drop([A])
    one.owns.add([A])
    assert one.begun[1:] == [(A, 3), (A, 9), (A, 9)]
    group.brokers.offsets[A] = 12  # by another member, later: nothing of the reset is left here
    one.owns.drop([A])
    group.brokers.offsets[A] = 12
    one.owns.add([A])
    assert one.begun[-1] == (A, 12)


@pytest.mark.parametrize(("mine", "begins"), [([A], 5), ([], 9)])
def test_queue_restarts_at_its_reset_if_no_other_member_had_it(
    group: GroupBench, mine: list[MessageQueue], begins: int
) -> None:
    """Whatever is stored after the reset: of its own pull, which was slow, or what that member finished."""
    one = Owner(group)
    one.owns.add([A])
    one.held.offsets.force(A, 9)
    one.owns.reset({A: 5})
    group.brokers.offsets[A] = 9
    one.owns.drop_foreign_resets("U", [])
    one.owns.drop_foreign_resets("T", mine)
    one.owns.add([A])
    assert one.begun[1:] == [(A, begins)]


@pytest.mark.parametrize("finish", [OffsetTable.raise_to, OffsetTable.set])
def test_progress_of_another_member_outranks_a_stored_reset(group: GroupBench, finish: Any) -> None:
    """It could not be stored at first, and its queue was given up later, with what could not be stored either."""
    one = Owner(group)
    one.owns.add([A])
    group.brokers.failing["commit"] = CallTimeout("late")
    one.owns.reset({A: 3})
    one.owns.add([A])
    group.brokers.failing.clear()
    one.store.persist(Deadline.after(60))
    finish(one.held.offsets, A, 9)
    group.brokers.failing["commit"] = CallTimeout("late")
    one.owns.drop([A])
    group.brokers.offsets[A] = 12
    one.owns.add([A])
    assert one.begun[1:] == [(A, 3), (A, 12)]


@pytest.mark.parametrize("stores", [True, False])
def test_reset_of_a_queue_between_release_and_start_counts(
    group: GroupBench, stores: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The newest wins, and the log names what was reset and what is not here."""
    one = Owner(group)
    one.owns.add([A])
    if not stores:
        group.brokers.failing["commit"] = CallTimeout("late")
    one.owns.reset({A: 40})
    one.owns.reset({A: 10, q("b:0"): 5})
    assert group.brokers.offsets == {A: 10 if stores else 0}
    assert one.held.offsets.all_offsets() == {}
    one.owns.add([A])
    assert one.begun[1:] == [(A, 10)]
    assert "offsets are reset to {'T/a/0': 40}" in caplog.text
    assert "between two owners are reset to {'T/a/0': 10}" in caplog.text
    assert "did not reset them: {'T/b/0': 5}" in caplog.text


def test_reset_of_a_released_queue_is_stored_for_its_next_member(group: GroupBench) -> None:
    one = Owner(group)
    one.owns.add([A])
    one.held.offsets.force(A, 50)
    one.owns.drop([A])
    one.owns.reset({A: 0})
    assert group.brokers.offsets[A] == 0
    group.brokers.offsets[A] = 5  # the next member's
    one.owns.add([A])
    assert one.begun[-1] == (A, 5)


def test_a_queue_that_has_been_away_for_long_is_not_reset_here(
    group: GroupBench, caplog: pytest.LogCaptureFixture
) -> None:
    one = Owner(group)
    one.owns.add([A])
    one.held.offsets.force(A, 50)
    one.owns.drop([A])
    group.time.advance(60.1)
    one.owns.reset({A: 0})
    assert group.brokers.offsets[A] == 50
    assert "did not reset them: {'T/a/0': 0}" in caplog.text
    assert "are reset to" not in caplog.text


def test_queue_reset_while_being_added_starts_in_the_next_run(group: GroupBench) -> None:
    """The offset that was read may be from before the reset."""
    one = Owner(group)
    group.brokers.offsets[A] = 50
    real = one.port.committed

    def committed(*given: Any) -> int | None:
        del one.port.committed
        found = real(*given)
        one.owns.reset({A: 5})
        return found

    one.port.committed = committed  # type: ignore[method-assign]
    assert one.owns.add([A]) == []
    assert one.owns.add([A]) == [A]
    assert one.begun == [(A, 5)]


@pytest.mark.parametrize("meanwhile", ["leaves", "adds it"])
def test_what_happens_while_a_queue_is_added_counts(group: GroupBench, meanwhile: str) -> None:
    """Who leaves has no queue afterwards and keeps no lock; a queue that another run was first to begin is begun once."""
    one = Owner(group, ordered=True)
    real = one.port.committed

    def committed(*given: Any) -> int | None:
        del one.port.committed
        if meanwhile == "leaves":
            one.owns.leave(Deadline.after(3))
        else:
            assert one.owns.add([A]) == [A]
        return real(*given)

    one.port.committed = committed  # type: ignore[method-assign]
    assert one.owns.add([A]) == []
    left = meanwhile == "leaves"
    assert (len(one.begun), one.held.queues.keys()) == ((0, set()) if left else (1, {A}))
    assert group.brokers.locks == ({} if left else {A: "me"})
