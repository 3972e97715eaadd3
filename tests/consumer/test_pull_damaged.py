"""Polls of what lies elsewhere than it says: damage changed the offset of a message, or shifted its queue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice

import pytest

from rocketmq_spark.base.clock import Clock
from rocketmq_spark.base.codes import INNER_BATCH_MASK, SysFlag
from rocketmq_spark.client.pulled_messages import requested_messages
from rocketmq_spark.consumer.assigned import FetchedPart
from rocketmq_spark.consumer.prefetch import BacklogReader
from rocketmq_spark.consumer.pull import BasePullConsumer
from rocketmq_spark.consumer.rebalance import ConsumeFrom, ConsumeFromWhere
from rocketmq_spark.consumer.settings import ConsumerSettings
from rocketmq_spark.errors import DecodeError
from rocketmq_spark.model import NO_FILTER, Filter, PullAnswer, PullRequest, PullStatus
from rocketmq_spark.session.consumers import _arrow_batch
from rocketmq_spark.wire import messages
from rocketmq_spark.wire.messages import encode_batch
from rocketmq_spark.wire.names import Scope
from tests.consumer.pull_bench import AT_ONCE, A, B, Rows, as_rows, bodies
from tests.consumer.reads import Reads
from tests.fakes.group_member import QueueMember, numbered
from tests.harness import store
from tests.mockbroker import WAIT_S, eventually

SAID = [[7, 8, 9, 10], [5, 1 << 40, 7, 8], [5, 1, 7, 8], [-1, -1, -1, -1], [8, 7, 6, 5]]


def stored_by(
    consumer: BasePullConsumer,
    fake: QueueMember,
    said: list[int],
    wanted: Filter,
    sizes: Mapping[int, int] | None = None,
) -> None:
    """An answer with messages of the offsets 5 to 8, which say others of themselves, some other ``sizes``, too; every second one
    is of another tag.
    """
    tags = ["Aa", "BB"] * 2  # of one hash, so that brokers give both
    parts = [store("t", b"%d" % i, f"TAGS\x01{tags[i]}\x02", 0, one) for i, one in enumerate(said)]
    for i, size in (sizes or {}).items():
        parts[i] = size.to_bytes(4, "big") + parts[i][4:]
    given_to(consumer, fake, b"".join(parts), wanted)


def given_to(consumer: BasePullConsumer, fake: QueueMember, stored: bytes, wanted: Filter = NO_FILTER) -> None:
    """The answer to the pull of offset 5, up to 8."""
    consumer._to_arrow = _arrow_batch
    fake.low[A] = fake.high[A] = fake.stored[A] = 5
    consumer.subscribe("t", tags=wanted.expression)
    assert consumer.poll(AT_ONCE) == []
    ((request, done),) = [waiting for waiting in fake.waiting if waiting[0].queue == A]
    fake.waiting.remove((request, done))
    fake.high[A] = 9
    asked = PullRequest("g", A, 5, filter=request.filter)
    done(
        PullAnswer(
            PullStatus.FOUND,
            9,
            5,
            9,
            stored_messages=stored,
            read_messages=lambda: requested_messages(asked, stored, Scope(), 9),
        )
    )


def rows(consumer: BasePullConsumer) -> list[bytes]:
    return list(consumer.poll_arrow(AT_ONCE).column("body").to_pylist())


@pytest.mark.parametrize("wanted", [NO_FILTER, Filter("Aa")])
@pytest.mark.parametrize("said", SAID)
def test_rows_of_large_answer_resume_by_position_not_by_offset(
    fake: QueueMember, consumer: BasePullConsumer, said: list[int], wanted: Filter, monkeypatch: pytest.MonkeyPatch
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
    fake: QueueMember, consumer: BasePullConsumer, said: list[int], wanted: Filter
) -> None:
    stored_by(consumer, fake, said, wanted)
    assert next(iter(consumer)).body == b"0"
    assert rows(consumer) == ([b"1", b"2", b"3"] if wanted == NO_FILTER else [b"2"])
    consumer.commit()
    assert fake.stored[A] == 9


@pytest.mark.parametrize("how", ["loop", "poll"])
@pytest.mark.parametrize("number", range(4))
def test_message_with_a_damaged_size_shifts_no_other_offset(
    fake: QueueMember, consumer: BasePullConsumer, number: int, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks like two, which is one more than there are offsets: the last one would have that of the next answer's first."""
    monkeypatch.setattr(messages, "PORTION_BYTES", 1)
    stored_by(consumer, fake, [5, 6, 7, 8], NO_FILTER, {number: 93})
    got = []
    for _ in range(4):
        got += consumer.poll(AT_ONCE) if how == "poll" else islice(consumer, 1)
        consumer.commit()
        assert fake.stored[A] == 5 + len(got)
    assert [message.queue_offset for message in got] == [5, 6, 7, 8]
    assert [i for i, message in enumerate(got) if message.decode_error] == [number]
    assert [m.body for m in got if not m.decode_error] == [b"%d" % i for i in range(4) if i != number]


def test_a_damaged_body_is_given_by_its_tag_to_polls_as_to_rows() -> None:
    tags, packed = ["Aa", "BB", "Aa", ""], int(SysFlag.COMPRESSED)
    stored = [store("t", b"%d" % i, f"TAGS\x01{tag}\x02", 0, 5 + i, sys_flag=packed) for i, tag in enumerate(tags)]
    stored[2] = stored[2][:4] + bytes(84) + stored[2][88:]  # of this nobody knows the tag, nor of the next
    got = list(requested_messages(PullRequest("g", A, 5, filter=Filter("Aa")), b"".join(stored), Scope(), 9))
    assert [(m.queue_offset, bool(m.decode_error)) for m in got] == [(5, True), (7, True), (8, True)]


def test_of_more_messages_than_offsets_the_last_ones_are_one() -> None:
    """Nothing that damage does to sizes makes that of whole messages; all bytes are given."""
    stored = [store("t", b"%d" % i, "", 0, 5 + i) for i in range(4)]
    got = list(requested_messages(PullRequest("g", A, 5), b"".join(stored), Scope(), 7))
    assert [(m.queue_offset, m.body) for m in got] == [(5, b"0"), (6, b"".join(stored[1:]))]
    assert (got[0].decode_error, bool(got[1].decode_error)) == (None, True)


def test_rows_of_a_batch_with_false_offsets_are_a_decode_error(
    fake: QueueMember, consumer: BasePullConsumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is one message, and several rows: what is committed behind some rows would be behind others that were not given."""
    batch = encode_batch([(b"0", "", 0), (b"1", "", 0), (b"2", "", 0)])
    stored = store("t", batch, "", 0, 6, sys_flag=INNER_BATCH_MASK) + store("t", b"3", "", 0, 8)
    given_to(consumer, fake, stored)
    monkeypatch.setattr(messages, "PORTION_BYTES", 1)
    for _ in range(2):
        with pytest.raises(
            DecodeError, match=r"outside of the requested offsets .*poll\(\) returns the message undecoded"
        ):
            rows(consumer)
    consumer.commit()
    assert fake.stored[A] == 5
    got = consumer.poll(AT_ONCE) + consumer.poll(AT_ONCE)
    assert [(m.queue_offset, m.decode_error is None) for m in got] == [(5, False), (8, True)]
    assert rows(consumer) == []


@pytest.mark.parametrize("why", ["damaged", "large"])
@pytest.mark.parametrize("given", [2, 5])
def test_rows_after_an_abandoned_loop_span_at_most_one_answer(
    fake: QueueMember, given: int, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop takes several answers together: what cannot be rows is in the one that it was left in, and not in those before."""
    monkeypatch.setattr("tests.consumer.reads.COUNT", 8)
    fake.add(A, 1000)
    reads, asked = Reads(), list[object]()

    def to_arrow(parts: Sequence[FetchedPart]) -> tuple[Rows, int | None]:
        asked.append(parts)
        assert len(asked) < 50, "it is tried for ever"
        found = [one for part in parts for one in part.read()]
        if why == "damaged" and any(one.queue_offset == given for one in found):
            raise DecodeError("damaged", queue=str(A))
        return Rows(found[:1]), found[1].queue_offset if found[1:] else None

    ahead = BacklogReader(
        reads.begin, lambda queue, start, end, stored: [numbered(queue, i) for i in range(start, end)]
    )
    settings = ConsumerSettings(group="g", consume_from=ConsumeFrom(ConsumeFromWhere.EARLIEST), pull_batch_size=8)
    with BasePullConsumer(fake, settings, to_arrow, Clock(), ahead) as consumer:  # type: ignore[arg-type]
        consumer.assign([A])
        eventually(lambda: reads.given > 2)
        consumer.poll(WAIT_S)
        consumer.seek(A, 0)
        assert bodies(islice(consumer, given)) == [*range(given)]
        if why == "damaged":
            with pytest.raises(DecodeError):
                consumer.poll_arrow(WAIT_S)
            assert bodies(consumer.poll(WAIT_S))[0] == given
        else:
            for number in range(given, 20):
                asked.clear()
                assert bodies(consumer.poll_arrow(WAIT_S).messages) == [number]


def test_answer_without_rows_is_finished_by_the_same_poll(fake: QueueMember, consumer: BasePullConsumer) -> None:
    """A filter may leave out all of it. Nothing that came behind it in its queue would be committed any more."""

    def to_arrow(parts: Sequence[FetchedPart]) -> tuple[Rows, int | None]:
        if fake.high[B]:
            return as_rows(parts)
        fake.add(B, 1)
        return Rows([]), None

    consumer._to_arrow = to_arrow
    consumer.assign([A, B])
    fake.add(A, 2)
    assert bodies(consumer.poll_arrow(WAIT_S).messages) == [0]
    assert fake.high[B] == 1
    consumer.commit()
    assert fake.stored == {A: 2, B: 1}
