from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.consumer import ordered
from rocketmq_spark.consumer.process_queue import Thresholds
from rocketmq_spark.consumer.push import BaseConsumer
from rocketmq_spark.errors import CallTimeout, RemoteProtocolError
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.model.membership import ResetOffsets
from tests.consumer.group import GroupBench
from tests.helpers import raising
from tests.queues import q, qs

A = q("a:0")
ALL = qs("a:0-1 b:0-1")


def started(group: GroupBench, listener: Any = None, **how: Any) -> Any:
    consumer, port = group.start(listener, ordered=True, **how)
    group.time.advance(1.6)
    return consumer, port


@contextmanager
def hanging(group: GroupBench, *bodies: bytes, **how: Any) -> Iterator[tuple[BaseConsumer, Callable[[], None]]]:
    """A member whose listener has the first message of b:0 and does not come back, and what lets it come back."""
    inside, free = threading.Event(), threading.Event()

    def listener(messages: Any, context: Any) -> None:
        if not inside.is_set():
            inside.set()
            assert free.wait(60)

    def go_on() -> None:
        free.set()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()

    consumer, _ = started(group, listener, **how)
    threads = group.workers[0].threads = []
    group.brokers.send(q("b:0"), *bodies)
    group.time.advance(0.1)
    assert inside.wait(60)
    try:
        yield consumer, go_on
    finally:
        go_on()


def test_queues_are_locked_before_pulls_and_every_20_seconds(group: GroupBench) -> None:
    _, port = started(group)
    assert group.brokers.locks == dict.fromkeys(ALL, "m1")
    order = [verb for verb, _ in port.calls]
    assert order.index("lock") < order.index("committed") < order.index("pull")
    before = len(port.seen("lock"))
    group.time.advance(60)
    assert len(port.seen("lock")) - before == 3


def test_without_notices_locks_are_renewed_every_3_seconds(group: GroupBench) -> None:
    """A Proxy keeps the connection while its broker restarts and forgets the locks."""
    _, port = group.start(ordered=True)
    port.receives_notices = False
    group.time.advance(2)
    before = len(port.seen("lock"))
    group.time.advance(60)
    assert 22 <= len(port.seen("lock")) - before <= 24


def test_an_unanswered_lock_stops_listeners_soon_behind_a_proxy(
    group: GroupBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four seconds after the broker went down: three until the request, and one without an answer."""
    consumer, port = started(group)
    port.receives_notices = False
    group.time.advance(7.5)  # a moment ago locks were renewed
    went_down = group.time.now
    waited_s: list[float] = []

    def lock(name: str, queues: Sequence[MessageQueue], deadline: Deadline) -> set[MessageQueue]:
        waited_s.append(deadline.remaining())
        return set()

    monkeypatch.setattr(port, "lock", lock)
    while consumer._running._consume_service.is_ready(consumer._running.state.queues[A]):
        group.time.advance(0.1)
    assert group.time.now - went_down + waited_s[0] <= 4.1


def test_failed_message_retries_in_place_blocking_only_its_queue(group: GroupBench) -> None:
    consumer, port = started(
        group, lambda messages, context: 1 / 0 if messages[0].body == b"1" and messages[0].reconsume_times < 2 else None
    )
    group.brokers.send(A, b"1", b"2")
    group.brokers.send(q("a:1"), b"other")
    group.time.advance(1.5)
    assert group.bodies() == [b"1", b"other", b"1"]
    group.time.advance(2)
    assert [entry for entry in group.got if entry[1] != b"other"] == [
        ("m1", b"1", 0), ("m1", b"1", 1), ("m1", b"1", 2), ("m1", b"2", 0),
    ]  # fmt: skip
    assert port.seen("send_back") == []
    consumer.stop()
    assert group.brokers.offsets[A] == 2


@pytest.mark.parametrize(
    "does",
    [
        raising(SystemExit("mine")),
        raising(type("Odd", (Exception,), {"__str__": lambda self: 1 / 0})()),
        lambda messages, context: messages.pop(0),
        lambda messages, context: context.suspend("5s"),
        lambda messages, context: ...,
    ],
)
def test_message_is_retried_after_any_failure_of_its_listener(group: GroupBench, does: Any) -> None:
    fails = [True, True, False]
    consumer, _ = started(group, lambda messages, context: does(messages, context) if fails.pop(0) else None)
    fails += [False]
    group.brokers.send(A, b"1", b"2")
    group.time.advance(60)
    assert [entry[1:] for entry in group.got] == [(b"1", 0), (b"1", 1), (b"1", 2), (b"2", 0)]
    assert consumer._running._consume_service.is_ready(consumer._running.state.queues[A])
    consumer.stop()
    assert group.brokers.offsets[A] == 2


@pytest.mark.parametrize("what", ["listener", "dead letter"])
def test_a_bug_behind_the_listener_ends_no_queue(group: GroupBench, what: str, monkeypatch) -> None:
    _, port = started(group, lambda messages, context: 1 / 0 if messages[0].body == b"1" else None, max_retries=0)
    if what == "listener":
        real, turns = ordered.judge_ordered_outcome, [raising(SystemExit("a bug"))]
        monkeypatch.setattr(ordered, "judge_ordered_outcome", lambda *given: (turns.pop() if turns else real)(*given))
    else:
        port.send_to_retry = raising(SystemExit("a bug"))
    group.brokers.send(A, b"1", b"2")
    group.time.advance(0.1)
    monkeypatch.undo()
    port.__dict__.pop("send_to_retry", None)
    group.time.advance(2)
    assert group.bodies()[-1] == b"2"
    assert [m.body for m in group.brokers.dead] == [b"1"]


@pytest.mark.parametrize("error", [RemoteProtocolError("garbage"), CallTimeout("late"), SystemExit("a bug")])
def test_failed_lock_request_is_repeated_every_three_seconds(
    group: GroupBench, error: Any, caplog: pytest.LogCaptureFixture
) -> None:
    _, port = started(group)
    real, asked = port.lock, []

    def lock(name: str, queues: Any, deadline: Any) -> set[Any]:
        if len(queues) > 1:
            return set()  # of the looks at all of them: somebody else has the lock
        asked.append(queues)
        raise error

    port.lock = lock
    group.brokers.send(A, b"1")
    group.time.advance(20)
    group.got.clear()
    group.brokers.send(A, b"2")
    group.time.advance(1)
    asked.clear()
    group.time.advance(9.3)  # three times 3.1
    assert (group.got, len(asked)) == ([], 3)
    assert "could not lock T/a/0, retrying: " in caplog.text
    port.lock = real
    group.time.advance(5)
    assert group.bodies() == [b"2"]


@pytest.mark.parametrize(("uncommitted", "standing"), [(30, False), (40, True)])
def test_listener_that_commits_too_rarely_is_reported_as_stalled(
    group: GroupBench, caplog: pytest.LogCaptureFixture, uncommitted: int, standing: bool
) -> None:
    def listener(messages: Any, context: Any) -> Any:
        return context.commit() if len(group.got) % uncommitted == 0 else None

    how: dict[str, Any] = {"auto_commit": False, "thresholds": Thresholds(30, 1000, None), "pull_batch_size": 16}
    started(group, listener, **how)
    group.brokers.send(A, *[b"1"] * 100)
    group.time.advance(60)
    assert len(group.got) == (32 if standing else 100)
    said = "T/a/0 is stalled: its listener gets no more messages until it commits: 32 messages are cached, "
    assert caplog.text.count(said) == standing


def test_a_queue_gives_its_thread_to_others_after_a_minute(group: GroupBench, tmp_path: Path) -> None:
    def listener(messages: Any, context: Any) -> None:
        group.time.now += 25

    started(group, listener, clustering=False, offsets_folder=tmp_path)  # nobody looks at locks meanwhile
    group.workers[0].held = True
    group.brokers.send(A, b"1", b"2", b"3", b"4", b"5")
    group.brokers.send(q("a:1"), b"other")
    group.time.advance(0.1)
    group.workers[0].let_go()
    group.time.advance(200)
    assert group.bodies() == [b"1", b"2", b"3", b"other", b"4", b"5"]


def test_calls_and_failures_are_reported(group: GroupBench, caplog: pytest.LogCaptureFixture) -> None:
    def listener(messages: Any, context: Any) -> None:
        group.time.now += 0.25
        if not messages[0].reconsume_times:
            raise ValueError("mine")

    consumer, _ = started(group, listener)
    group.brokers.send(A, b"1")
    group.time.advance(3)
    topic = consumer.stats().topics["T"]
    assert (topic.consume_ms, topic.failed) == (250.0, 1)
    assert caplog.messages == ["messages of T/a/0 failed: the listener raised ValueError: mine"]


def test_a_queue_tells_when_its_listener_was_called_last(group: GroupBench) -> None:
    consumer, _ = started(group)
    group.time.advance(10)
    group.brokers.send(A, b"1")
    group.time.advance(0.1)
    consumed_ms = {queue: held.last_consume_ms for queue, held in consumer._running.state.queues.items()}
    assert consumed_ms.pop(A) > max(consumed_ms.values()) + 10_000


def test_a_queue_waits_for_as_long_as_the_listener_says(group: GroupBench) -> None:
    started(group, lambda messages, context: None if messages[0].reconsume_times else context.suspend(5000))
    group.brokers.send(A, b"1")
    group.time.advance(2)
    group.brokers.send(A, b"2")  # what comes meanwhile waits behind it
    group.time.advance(2.9)
    assert len(group.got) == 1
    group.time.advance(0.3)
    assert group.bodies()[:3] == [b"1", b"1", b"2"]


def test_manual_commit_ends_messages_and_rollback_repeats_them(group: GroupBench) -> None:
    answers = iter([None, None, "rollback", None, None, "commit", None])

    def listener(messages: Any, context: Any) -> Any:
        word = next(answers)
        return getattr(context, word)() if word else None

    consumer, _ = started(group, listener, auto_commit=False)
    group.brokers.send(A, b"1", b"2", b"3", b"4")
    group.time.advance(0.5)
    assert group.bodies() == [b"1", b"2", b"3"]
    assert consumer.stats().cached == 4
    group.time.advance(1)
    assert group.bodies()[3:] == [b"1", b"2", b"3", b"4"]
    consumer.stop()
    assert group.brokers.offsets[A] == 3


def test_who_leaves_stores_offsets_before_the_locks_are_free(group: GroupBench) -> None:
    consumer, port = started(group)
    for number, queue in enumerate(ALL):
        group.brokers.send(queue, *[b"x"] * number)
    group.time.advance(0.1)
    consumer.stop()
    assert group.brokers.offsets == {queue: number for number, queue in enumerate(ALL)}
    order = [verb for verb, _ in port.calls]
    assert len(order) - order[::-1].index("commit") < order.index("unlock") + 1 < order.index("leave") + 1
    assert group.brokers.locks == {}


def test_queue_locked_by_another_is_taken_when_it_is_free(group: GroupBench) -> None:
    group.brokers.locks[A] = "somebody"
    consumer, port = started(group)
    assert group.owned_queues(consumer) == ALL[1:]
    assert not [request for request in port.seen("pull") if request.queue == A]
    del group.brokers.locks[A]
    group.time.advance(1.1)
    assert group.owned_queues(consumer) == ALL


def test_queue_changes_hands_only_when_its_listener_is_through(group: GroupBench) -> None:
    with hanging(group, b"one", b"two") as (first, go_on):
        second, _ = started(group)
        assert (group.owned_queues(first), group.owned_queues(second)) == (ALL[:2], [q("b:1")])
        group.time.advance(10)
        assert group.owned_queues(second) == [q("b:1")]
        assert group.brokers.locks[q("b:0")] == "m1"
        go_on()
        group.time.advance(2.1)
        assert group.owned_queues(second) == ALL[2:]
    # The first one gets no more of it, and the second one begins behind what the first one finished under its lock.
    assert group.got == [("m1", b"one", 0), ("m2", b"two", 0)]


@pytest.mark.parametrize("clustering", [True, False])
def test_queue_revoked_and_regained_in_a_call_repeats_nothing(
    group: GroupBench, tmp_path: Path, clustering: bool
) -> None:
    """A topic is shrunk and widened again. Java repeats the message of that call."""
    b = q("b:0")
    with hanging(group, b"one", b"two", clustering=clustering, offsets_folder=tmp_path) as (consumer, go_on):
        group.brokers.topics["T"] = [queue for queue in ALL if queue != b]
        old = consumer._running.state.queues[b]
        while not old.dropped:
            group.time.advance(1)
        group.time.advance(8)
        assert (old.released, group.brokers.locks.get(b)) == (False, "m1" if clustering else None)
        go_on()
        group.workers[0].threads = None
        group.time.advance(2)
        assert b not in consumer._running.state.queues
        group.brokers.topics["T"] = ALL
        group.time.advance(25)
    assert (group.bodies(), old.released) == ([b"one", b"two"], True)


def test_revoked_queue_waits_for_its_listener_despite_old_lock(group: GroupBench) -> None:
    """Else two members would have it when a rebalance comes shortly before the next renewal."""
    b = q("b:0")
    with hanging(group, b"one", b"two") as (consumer, go_on):
        lock, lease_ms = consumer._running.state.queues[b].lock, consumer._running._ownership._lease_ms
        while lease_ms() - (lock.requested_ms or 0) < 18_000:
            group.time.advance(0.5)
        second, _ = started(group)
        group.time.advance(4)
        assert lease_ms() - (lock.requested_ms or 0) > 20_000
        assert (group.brokers.locks[b], group.bodies()) == ("m1", [b"one"])
        go_on()
        group.time.advance(2.1)
    assert (group.owned_queues(second), group.bodies()) == (ALL[2:], [b"one", b"two"])


def test_a_call_that_ends_without_the_lock_stores_nothing(group: GroupBench) -> None:
    """The broker was restarted and gave the lock of a revoked queue to another member, which is further."""
    b = q("b:0")
    with hanging(group, b"one", b"two") as (consumer, go_on):
        started(group)
        assert consumer._running.state.queues[b].dropped
        group.brokers.connections["b"] = 2
        group.brokers.locks[b] = "another"
        group.brokers.offsets[b] = 2
        go_on()
        group.time.advance(10)
        assert group.brokers.offsets[b] == 2


def test_call_ending_after_its_queue_returned_changes_no_offset(group: GroupBench) -> None:
    """It hung so long that another member got the queue, finished more of it, and left."""
    b = q("b:0")
    with hanging(group, b"one", b"two") as (consumer, go_on):
        second, _ = started(group)
        group.time.advance(30)
        assert group.bodies() == [b"one", b"one", b"two"]
        second.stop()
        group.time.advance(5)
        assert (consumer._running.state.queues[b].dropped, group.brokers.offsets[b]) == (False, 2)
        go_on()
        group.workers[0].threads = None
        group.time.advance(10)
        assert (group.brokers.offsets[b], consumer._running.state.offsets.get(b)) == (2, 2)
    assert len(group.got) == 3


def test_call_ending_while_its_queue_is_released_stores_nothing(group: GroupBench, monkeypatch) -> None:
    """Between the last commit and the end of the release, the next owner may lock the queue and be further."""
    b = q("b:0")
    with hanging(group, b"one", b"two") as (consumer, go_on):
        running = consumer._running
        unlock = running._port.unlock

        def slow(group_name: str, queues: Any, deadline: Any) -> None:
            unlock(group_name, queues, deadline)
            group.brokers.offsets[b] = 2
            go_on()
            running._store.persist(deadline)

        monkeypatch.setattr(running._port, "unlock", slow)
        consumer.stop(0.1)
    assert group.brokers.offsets[b] == 2


@pytest.mark.parametrize("how", ["reset", "repair", "reset, hangs for long"])
def test_repaired_or_reset_queue_waits_for_the_running_call(group: GroupBench, how: str) -> None:
    """As Java's lock of a queue does: a reset or a repaired offset makes a new process queue, and the listener is one."""
    b = q("b:0")
    with hanging(group, b"one", b"two") as (consumer, go_on):
        running = consumer._running
        old = running.state.queues[b]
        running.rebalancing.correct_offset_soon(old, 0) if how == "repair" else running.rebalancing.reset({b: 0})
        group.time.advance(30 if "long" in how else 5)
        assert group.bodies() == [b"one"]
        assert group.brokers.locks[b] == "m1"
        assert group.brokers.offsets[b] == 0  # at once, although the listener is not through
        assert (running.state.queues[b] is old) == ("long" not in how)
        go_on()
        group.workers[0].threads = None
        group.time.advance(2.1)
    assert group.bodies() == [b"one", b"one", b"two"]
    assert old not in running.state.queues.values()
    consumer.stop()
    assert group.brokers.offsets[b] == 2


def test_of_two_that_wait_for_a_call_the_last_one_comes_after_it(group: GroupBench) -> None:
    """The other one is gone, and nobody works for it any more."""
    b = q("b:0")
    with hanging(group, b"one", b"two") as (consumer, go_on):
        running = consumer._running
        for offset in (1, 0):
            running.rebalancing.reset({b: offset})
            group.time.advance(0.1)
            assert group.brokers.offsets[b] == offset  # at once, although the listener is not through
            group.time.advance(30)
        go_on()
        group.workers[0].threads = None
        group.time.advance(0.1)
    assert group.bodies() == [b"one", b"one", b"two"]
    assert running._consume_service._scheduled_queues == set()


def test_queue_with_a_lost_lock_is_released_despite_its_listener(group: GroupBench) -> None:
    """Nor does it come back to a second call beside the first."""
    b = q("b:0")
    with hanging(group, b"one", b"two") as (consumer, go_on):
        held = consumer._running.state
        old = held.queues[b]
        group.brokers.locks[b] = "somebody"
        group.time.advance(19.6)  # a look at the locks: this one is not ours any more
        assert not consumer._running._consume_service.is_ready(old)
        consumer._running.rebalancing.reset({b: 0})
        group.time.advance(2)
        assert b not in held.queues
        del group.brokers.locks[b]
        group.time.advance(2.1)
        assert group.brokers.locks[b] == "m1"
        assert (held.queues[b].count, group.bodies()) == (2, [b"one"])
        go_on()
        group.workers[0].threads = None
        group.time.advance(0.1)
    assert group.bodies() == [b"one", b"one", b"two"]


def test_the_lock_counts_from_its_question(group: GroupBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer to it, and to where the queues begin, may be long under way; the brokers' minute begins when they give it."""
    consumer, port = group.consumer(ordered=True)

    def slow(real: Callable[..., Any], *given: Any, **how: Any) -> Any:
        group.time.now += 9.0
        return real(*given, **how)

    for verb in ("lock", "committed"):
        monkeypatch.setattr(port, verb, partial(slow, getattr(port, verb)))
    consumer.subscribe("T")
    began_ms = int(group.time.now * 1000)
    consumer.start(print)
    group.time.advance(0)
    held = consumer._running.state.queues
    assert {held[queue].lock.requested_ms for queue in ALL} == {began_ms}
    assert not held[ALL[-1]].lock.is_held(began_ms + 30_001, 1)


def test_a_renewed_lock_counts_from_its_question_too(group: GroupBench, monkeypatch: pytest.MonkeyPatch) -> None:
    consumer, port = started(group)
    real = port.lock

    def slow(*given: Any) -> Any:
        asked_ms.append(int(group.time.now * 1000))
        found = real(*given)
        group.time.now += 2.5
        return found

    asked_ms: list[int] = []
    monkeypatch.setattr(port, "lock", slow)
    group.time.advance(20)
    assert {each.lock.requested_ms for each in consumer._running.state.owned_queues()} == {asked_ms[-1]}


def test_listener_that_hangs_does_not_keep_a_queue_for_ever(group: GroupBench) -> None:
    with hanging(group, b"one"):
        second, _ = started(group)
        group.time.advance(24)
        assert group.owned_queues(second) == ALL[2:]


def test_lost_lock_stops_the_queue_until_it_is_granted_again(group: GroupBench) -> None:
    consumer, _ = started(group)
    group.brokers.locks[A] = "somebody"
    group.time.advance(20)
    assert not consumer._running._consume_service.is_ready(consumer._running.state.queues[A])
    group.brokers.send(A, b"1")
    group.time.advance(1)
    assert group.got == []
    group.brokers.locks[A] = "m1"
    group.time.advance(4)
    assert group.bodies() == [b"1"]


def cut_off(group: GroupBench) -> BaseConsumer:
    """A member that finished the first of three messages of A, and does not have the lock; another one finished them all.

    The first member's offset was not stored, and the other two messages are in its memory.
    """
    consumer, _ = started(group)
    group.brokers.failing["commit"] = CallTimeout("late")
    group.brokers.send(A, b"1")
    group.time.advance(1)
    group.brokers.locks[A] = "another"
    group.time.advance(20)
    group.brokers.send(A, b"2", b"3")
    group.brokers.offsets[A] = 3
    group.brokers.failing.clear()
    return consumer


def test_cut_off_member_continues_after_what_another_finished(group: GroupBench, caplog) -> None:
    """Else those messages would come again after later ones."""
    consumer = cut_off(group)
    group.time.advance(10)
    assert group.brokers.offsets[A] == 3
    group.brokers.locks[A] = consumer.client_id
    group.time.advance(10)
    assert "another member consumed T/a/0 up to offset 3 meanwhile: continuing there, not at 1" in caplog.text
    group.brokers.send(A, b"4")
    group.time.advance(10)
    assert (group.bodies(), group.brokers.offsets[A]) == ([b"1", b"4"], 4)


def test_leaving_without_a_lock_overwrites_no_newer_offset(group: GroupBench) -> None:
    cut_off(group).stop(0.1)
    assert group.brokers.offsets[A] == 3


def test_lock_counts_only_once_the_committed_offset_is_known(group: GroupBench) -> None:
    consumer = cut_off(group)
    group.brokers.locks[A] = consumer.client_id
    group.brokers.failing["committed"] = CallTimeout("late")
    group.time.advance(10)
    assert (group.bodies(), group.owned_queues(consumer)) == ([b"1"], ALL)
    group.brokers.failing.clear()
    group.time.advance(10)
    group.brokers.send(A, b"4")
    group.time.advance(10)
    assert group.bodies() == [b"1", b"4"]


@pytest.mark.parametrize("size", [1, 3])
def test_batches_of_a_queue_come_one_after_the_other(group: GroupBench, size: int) -> None:
    """Also of what comes while the listener has a batch, and threads are free for it."""
    running, most, later = [0], [0], [b"%d" % i for i in range(50, 100)]

    def listener(messages: Any, context: Any) -> None:
        running[0] += 1
        most[0] = max(most[0], running[0])
        if later:
            group.brokers.send(A, later.pop(0))
        group.time.run_due()
        running[0] -= 1

    started(group, listener, consume_batch_max_size=size)
    group.brokers.send(A, *(b"%d" % i for i in range(50)))
    group.time.advance(1)
    assert group.bodies() == [b"%d" % i for i in range(100)]
    assert most == [1]


def test_a_broadcasting_member_needs_no_locks(group: GroupBench, tmp_path) -> None:
    _, port = started(group, clustering=False, offsets_folder=tmp_path)
    group.brokers.send(A, b"1", b"2")
    group.time.advance(30)
    assert group.bodies() == [b"1", b"2"]
    assert port.seen("lock") == port.seen("unlock") == []


def test_a_machine_that_slept_does_not_believe_in_its_locks(group: GroupBench) -> None:
    """The broker counted on, and gave the queue to another member."""
    consumer, _ = group.start(ordered=True)
    group.time.advance(2)
    group.brokers.send(A, b"1")
    group.time.advance(0)
    assert group.bodies() == [b"1"]
    group.time.slept_ms = 61_000
    group.brokers.locks[A] = "another"
    group.brokers.send(A, b"2")
    group.time.advance(2)
    assert group.bodies() == [b"1"]
    group.brokers.locks[A] = consumer.client_id
    group.time.advance(5)
    assert group.bodies() == [b"1", b"2"]


def test_old_reset_repeats_nothing_another_member_finished(group: GroupBench) -> None:
    """What this one had finished last could not be stored when the queue went."""
    _, port = started(group)
    group.brokers.send(A, *(b"%d" % i for i in range(5)))
    group.time.advance(10)
    port.asked("a:1", ResetOffsets("T", {A: 4}))
    group.time.advance(100)
    group.brokers.failing["commit a"] = CallTimeout("late")
    group.brokers.send(A, b"5")
    group.time.advance(1)
    other, _ = group.start(ordered=True, name="m0")
    group.time.advance(10)
    group.brokers.failing.clear()
    group.brokers.send(A, b"6", b"7")
    group.time.advance(1)
    assert other.stop() == []
    group.got.clear()
    group.time.advance(10)
    assert (group.got, group.brokers.offsets[A], group.brokers.locks[A]) == ([], 8, "m1")
