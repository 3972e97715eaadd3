"""Polls of what lies elsewhere than it says: damage changed the offset of a message, or shifted its queue."""

from __future__ import annotations

import pytest

from rocketmq_spark.client.pulls import wanted_of
from rocketmq_spark.consumer.pull.pull_consumer import BasePullConsumer
from rocketmq_spark.model import NO_FILTER, Filter, PullAnswer, PullRequest, PullStatus
from rocketmq_spark.session.consumers import _arrow
from rocketmq_spark.wire import messages
from rocketmq_spark.wire.names import Scope
from tests.consumer.fake_member import AT_ONCE, A, FakeMember
from tests.harness import store

SAID = [[7, 8, 9, 10], [5, 1 << 40, 7, 8], [5, 1, 7, 8], [-1, -1, -1, -1], [8, 7, 6, 5]]


def stored_by(consumer: BasePullConsumer, fake: FakeMember, said: list[int], wanted: Filter) -> None:
    """An answer with messages of the offsets 5 to 8, which say others of themselves; every second one is of another tag."""
    consumer._to_arrow = _arrow
    fake.low[A] = fake.high[A] = fake.stored[A] = 5
    consumer.subscribe("t", tags=wanted.expression)
    assert consumer.poll(AT_ONCE) == []
    ((request, done),) = [waiting for waiting in fake.waiting if waiting[0].queue == A]
    fake.waiting.remove((request, done))
    tags = ["Aa", "BB"] * 2  # of one hash, so that brokers give both
    stored = b"".join(store("t", b"%d" % i, f"TAGS\x01{tags[i]}\x02", 0, one) for i, one in enumerate(said))
    fake.high[A] = 9
    asked = PullRequest("g", A, 5, filter=request.filter)
    done(PullAnswer(PullStatus.FOUND, 9, 5, 9, stored=stored, read=lambda: wanted_of(asked, stored, Scope(), 9)))


def rows(consumer: BasePullConsumer) -> list[bytes]:
    return list(consumer.poll_arrow(AT_ONCE).column("body").to_pylist())


@pytest.mark.parametrize("wanted", [NO_FILTER, Filter("Aa")])
@pytest.mark.parametrize("said", SAID)
def test_rows_of_what_becomes_large_go_on_where_they_were_left_and_not_where_they_say(
    fake: FakeMember, consumer: BasePullConsumer, said: list[int], wanted: Filter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "PORTION_BYTES", 1)
    stored_by(consumer, fake, said, wanted)
    expected = [0, 1, 2, 3] if wanted == NO_FILTER else [0, 2]
    for number in expected:
        assert rows(consumer) == [b"%d" % number]
        consumer.commit()
        assert number < (consumer.committed(A) or 0) - 5 <= expected[-1] + 2, "behind what was given, and no further"
        if number + 1 in expected:
            assert consumer.committed(A) == 5 + number + 1
    assert rows(consumer) == []
    consumer.commit()
    assert fake.stored[A] == 9


@pytest.mark.parametrize("wanted", [NO_FILTER, Filter("Aa")])
@pytest.mark.parametrize("said", SAID)
def test_rows_behind_a_message_of_a_loop_are_all_others(
    fake: FakeMember, consumer: BasePullConsumer, said: list[int], wanted: Filter
) -> None:
    stored_by(consumer, fake, said, wanted)
    assert next(iter(consumer)).body == b"0"
    assert rows(consumer) == ([b"1", b"2", b"3"] if wanted == NO_FILTER else [b"2"])
    consumer.commit()
    assert fake.stored[A] == 9
