"""Closes of a ``BasePullConsumer`` that are interrupted, or come while something else is under way."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from rocketmq_spark.consumer.pull import BasePullConsumer
from rocketmq_spark.errors import CallTimeout, ClosedError, OffsetError
from tests.consumer.pull_bench import AT_ONCE, A, B, Hand, bodies, made
from tests.consumer.test_consumer_interrupted import in_time, interrupted_once
from tests.consumer.test_pull_interrupted import Interrupted
from tests.fakes.group_member import QueueMember


@pytest.mark.parametrize("exits", [False, True])
@pytest.mark.parametrize("how", ["commit", "poll", "offsets"])
def test_a_signal_handler_may_close_while_a_commit_is_under_way(
    fake: QueueMember, consumer: BasePullConsumer, hand: Hand, how: str, exits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.add(A, 40)
    consumer.subscribe("t")
    assert bodies(consumer.poll(AT_ONCE)) == list(range(32))
    assert bodies(consumer.poll(AT_ONCE)) == list(range(32, 40))  # what the poll before gave is finished
    real, came = fake.commit, [1]

    def commit(*given: Any) -> Any:
        if came:
            came.pop()
            consumer.close()
            assert fake.joined
            if exits:
                raise SystemExit
        return real(*given)

    monkeypatch.setattr(fake, "commit", commit)
    hand.now += 10
    calls = {
        "commit": consumer.commit,
        "poll": lambda: consumer.poll(AT_ONCE),
        "offsets": lambda: consumer.commit({B: 0}),
    }
    raised = in_time(calls[how])
    assert isinstance(raised, SystemExit) if exits else raised is None
    assert (came, fake.joined, consumer.assignment()) == ([], False, [])
    assert fake.stored[A] == (32 if how == "offsets" else 40)
    with pytest.raises(ClosedError):
        consumer.poll(AT_ONCE)
    commits = len(fake.commits)
    consumer.close()
    assert len(fake.commits) == commits


def test_a_signal_handler_may_close_a_consumer_that_closes(
    fake: QueueMember, consumer: BasePullConsumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer.subscribe("t")
    real: Any = consumer._group._leave_group
    monkeypatch.setattr(
        consumer._group, "_leave_group", lambda deadline: (left.append(1), consumer.close(), real(deadline))
    )
    left: list[int] = []
    assert in_time(consumer.close) is None
    assert (left, fake.joined) == ([1], False)


class Signalled:
    """A lock with a signal handler that comes while it is held, once."""

    def __init__(self, real: Any, handler: Callable[[], object]) -> None:
        self.real = real
        self.left = [handler]

    def __enter__(self) -> None:
        self.real.__enter__()
        if self.left:
            self.left.pop()()

    def __exit__(self, *how: Any) -> None:
        self.real.__exit__(*how)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


CALLS: dict[str, Callable[[BasePullConsumer], object]] = {
    "poll": lambda consumer: consumer.poll(60),
    "poll_arrow": lambda consumer: consumer.poll_arrow(60),
    "loop": lambda consumer: list(consumer),
    "commit": lambda consumer: consumer.commit(),
    "committed": lambda consumer: consumer.committed(A),
    "queues": lambda consumer: consumer.queues("t"),
    "assignment": lambda consumer: consumer.assignment(),
    "seek": lambda consumer: consumer.seek(A, 40),
    "seek_to_beginning": lambda consumer: consumer.seek_to_beginning(A),
    "seek_to_end": lambda consumer: consumer.seek_to_end(A),
    "seek_to_timestamp": lambda consumer: consumer.seek_to_timestamp(40, A),
    "pause": lambda consumer: consumer.pause(A),
    "resume": lambda consumer: consumer.resume(A),
    "unsubscribe": lambda consumer: consumer.unsubscribe("t"),
    "close": lambda consumer: consumer.close(),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_signal_handler_may_close_above_any_call(
    fake: QueueMember, consumer: BasePullConsumer, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The threads that bring the answers of brokers need the lock that the call holds."""
    fake.add(A, 40)
    consumer.subscribe("t")
    while bodies(consumer.poll(AT_ONCE)):
        pass
    real, closed = fake.commit, []

    def commit(*given: Any) -> Any:
        brings = threading.Thread(target=consumer._polls.queue_infos, daemon=True)
        brings.start()
        brings.join(10)
        assert not brings.is_alive(), "it hangs"
        return real(*given)

    def handler() -> None:
        closed.append(consumer.close())
        assert fake.joined

    monkeypatch.setattr(fake, "commit", commit)
    whose = consumer._offsets if call in ("committed", "queues") else consumer._polls
    if whose is consumer._polls:
        monkeypatch.setattr(consumer._polls, "_lock", Signalled(consumer._polls._lock, handler))
    else:
        real_queues = fake.queues
        monkeypatch.setattr(fake, "queues", lambda *given: (handler(), real_queues(*given))[1])
    raised = in_time(lambda: CALLS[call](consumer))
    assert raised is None or isinstance(raised, ClosedError | OffsetError)
    assert (closed, fake.joined, consumer._polls.closed, consumer.assignment()) == ([None], False, True, [])
    assert fake.stored.get(A, 0) == (0 if call == "seek_to_beginning" else 40)


@pytest.mark.parametrize("where", ["polls", "timer", "commit", "leave"])
def test_a_close_that_is_interrupted_is_continued_by_the_next(
    fake: QueueMember, consumer: BasePullConsumer, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.add(A, 40)
    consumer.subscribe("t")
    consumer.poll(AT_ONCE)
    consumer.poll(AT_ONCE)
    whose: dict[str, tuple[Any, str]] = {
        "polls": (consumer._polls, "close"),
        "timer": (consumer._upkeep._timer, "close"),
        "commit": (fake, "commit"),
        "leave": (consumer._group, "_leave_group"),
    }
    interrupted_once(monkeypatch, *whose[where])
    with pytest.raises(KeyboardInterrupt):
        consumer.close()
    assert fake.joined == (where in ("timer", "leave"))
    consumer.close()
    assert (fake.stored, fake.joined, consumer._polls.closed) == ({A: 32, B: 0}, False, True)


def test_close_during_a_rebalance_is_no_error_of_the_poll(
    fake: QueueMember, consumer: BasePullConsumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer.subscribe("t")
    consumer.poll(AT_ONCE)
    inside, go_on = threading.Event(), threading.Event()
    monkeypatch.setattr(fake, "members", lambda *given: (inside.set(), go_on.wait(60)) and ["me"])
    new = A._replace(queue_id=5)
    fake.low[new], fake.high[new] = 0, 3
    consumer._group.check_soon()
    got: list[Any] = []
    polls = threading.Thread(target=lambda: got.append(consumer.poll(30)))
    polls.start()
    assert inside.wait(60)
    consumer.close()
    go_on.set()
    polls.join(60)
    assert (got, consumer.assignment()) == ([[]], [])


@pytest.mark.parametrize("call", ["subscribe", "another", "unsubscribe"])
def test_close_during_a_subscription_change_leaves_the_group(
    fake: QueueMember, consumer: BasePullConsumer, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the group would have a member that does nothing, and its share of the queues would be read by none."""
    if call != "subscribe":
        consumer.subscribe("t")
    inside, go_on = threading.Event(), threading.Event()
    whose, name = (fake, "queues") if call != "unsubscribe" else (consumer._group, "set_subscription")
    real = getattr(whose, name)

    def slow(*given: Any) -> Any:
        inside.set()
        assert go_on.wait(60)
        return real(*given)

    monkeypatch.setattr(whose, name, slow)
    raised: list[BaseException | None] = []
    change = consumer.unsubscribe if call == "unsubscribe" else consumer.subscribe
    changes = threading.Thread(target=lambda: raised.append(in_time(lambda: change("t"))), daemon=True)
    changes.start()
    assert inside.wait(60)
    consumer.close()
    go_on.set()
    changes.join(60)
    assert not fake.joined
    assert isinstance(raised[0], ClosedError)


def test_seek_is_stored_even_after_an_unanswered_commit(
    fake: QueueMember, consumer: BasePullConsumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The offset that was committed before that is sought: else a restart would begin behind what was not consumed again."""
    fake.add(A, 40)
    consumer.assign([A])
    consumer.poll(AT_ONCE)
    consumer.commit()
    assert bodies(consumer.poll(AT_ONCE)) == list(range(32, 40))

    def unanswered(group: str, offsets: dict[Any, int], deadline: Any) -> dict[Any, CallTimeout]:
        fake.stored.update(offsets)
        return {queue: CallTimeout("late") for queue in offsets}

    with monkeypatch.context() as patched:
        patched.setattr(fake, "commit", unanswered)
        with pytest.raises(CallTimeout):
            consumer.commit()
    assert fake.stored[A] == 40
    consumer.seek(A, 32)
    consumer.close()
    assert fake.stored[A] == 32


def test_without_auto_commit_a_close_commits_nothing(fake: QueueMember) -> None:
    fake.add(A, 3)
    with made(fake, auto_commit=False) as consumer:
        consumer.assign([A])
        assert bodies(consumer.poll(AT_ONCE)) == [0, 1, 2]
        consumer.poll(AT_ONCE)  # they are finished now
    assert fake.commits == []


@pytest.mark.parametrize("how", ["close", "unsubscribe"])
def test_ctrl_c_during_close_or_unsubscribe_loses_no_offset(how: str) -> None:
    """Queues are given up before their offsets are stored."""
    for at in itertools.count():
        fake = QueueMember([A, B])
        fake.add(A, 40)
        fake.add(B, 3)
        consumer = made(fake)
        consumer.subscribe("t")
        while consumer.poll(AT_ONCE):
            pass
        consumer._upkeep.start_poll(AT_ONCE)
        interrupt, before = Interrupted(consumer, at), sys.gettrace()
        sys.settrace(interrupt)
        try:
            consumer.close() if how == "close" else consumer.unsubscribe("t")
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        consumer.close()
        assert (fake.stored, fake.joined) == ({A: 40, B: 3}, False), at
        if interrupt.over():
            assert at > 50
            return


def test_what_a_look_gave_up_before_ctrl_c_is_stored_by_the_next(
    fake: QueueMember, consumer: BasePullConsumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.add(A, 9)
    fake.add(B, 9)
    consumer.subscribe("t")
    while consumer.poll(AT_ONCE):
        pass
    fake.has_members("a", "me")
    consumer._group.check_soon()
    interrupted_once(monkeypatch, fake, "commit")
    with pytest.raises(KeyboardInterrupt):
        consumer.poll(AT_ONCE)
    assert (consumer.assignment(), fake.stored) == ([B], {A: 0, B: 0})
    consumer.poll(AT_ONCE)
    assert fake.stored == {A: 9, B: 0}
