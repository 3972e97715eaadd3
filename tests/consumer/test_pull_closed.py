"""Closes of a ``BasePullConsumer`` that are interrupted, or come while something else is under way."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from rocketmq_spark.consumer.pull.pull_consumer import BasePullConsumer
from rocketmq_spark.errors import ClosedError
from tests.consumer.fake_member import AT_ONCE, A, B, FakeMember, Hand, bodies
from tests.consumer.test_consumer_interrupted import in_time, interrupted_once


@pytest.mark.parametrize("exits", [False, True])
@pytest.mark.parametrize("how", ["commit", "poll", "offsets"])
def test_a_signal_handler_may_close_while_a_commit_is_under_way(
    fake: FakeMember, consumer: BasePullConsumer, hand: Hand, how: str, exits: bool, monkeypatch: pytest.MonkeyPatch
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
    fake: FakeMember, consumer: BasePullConsumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer.subscribe("t")
    real: Any = consumer._shared._leave
    monkeypatch.setattr(consumer._shared, "_leave", lambda deadline: (left.append(1), consumer.close(), real(deadline)))
    left: list[int] = []
    assert in_time(consumer.close) is None
    assert (left, fake.joined) == ([1], False)


@pytest.mark.parametrize("where", ["polls", "timer", "commit", "leave"])
def test_a_close_that_is_interrupted_is_continued_by_the_next(
    fake: FakeMember, consumer: BasePullConsumer, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.add(A, 40)
    consumer.subscribe("t")
    consumer.poll(AT_ONCE)
    consumer.poll(AT_ONCE)
    whose: dict[str, tuple[Any, str]] = {
        "polls": (consumer._polls, "close"),
        "timer": (consumer._upkeep._timer, "close"),
        "commit": (fake, "commit"),
        "leave": (consumer._shared, "_leave"),
    }
    interrupted_once(monkeypatch, *whose[where])
    with pytest.raises(KeyboardInterrupt):
        consumer.close()
    assert fake.joined == (where in ("timer", "leave"))
    consumer.close()
    assert (fake.stored, fake.joined, consumer._polls.closed) == ({A: 32}, False, True)


def test_a_close_while_the_group_is_looked_at_is_no_error_of_the_poll(
    fake: FakeMember, consumer: BasePullConsumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer.subscribe("t")
    consumer.poll(AT_ONCE)
    inside, go_on = threading.Event(), threading.Event()
    monkeypatch.setattr(fake, "members", lambda *given: (inside.set(), go_on.wait(60)) and ["me"])
    new = A._replace(queue_id=5)
    fake.low[new], fake.high[new] = 0, 3
    consumer._shared.changed()
    got: list[Any] = []
    polls = threading.Thread(target=lambda: got.append(consumer.poll(30)))
    polls.start()
    assert inside.wait(60)
    consumer.close()
    go_on.set()
    polls.join(60)
    assert (got, consumer.assignment()) == ([[]], [])
