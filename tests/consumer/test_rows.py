"""Rows of answers as brokers store them: those of the messages that a listener of messages would get, whatever damage did."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark import Consumer
from rocketmq_spark.base import extras
from rocketmq_spark.base.codes import INNER_BATCH_MASK, SysFlag
from rocketmq_spark.client.pulled_messages import requested_messages
from rocketmq_spark.columnar.decode.rows import batch_of_messages
from rocketmq_spark.consumer import rows
from rocketmq_spark.consumer.assigned import FetchedPart
from rocketmq_spark.consumer.listener import DeferredListener, ListenerCall, NextCall
from rocketmq_spark.consumer.rows import Rows, RowsDecoder, RowsQueue
from rocketmq_spark.consumer.settings import ConsumerSettings
from rocketmq_spark.errors import OptionError
from rocketmq_spark.model import NO_FILTER, Filter, MessageQueue, PullRequest, ReceivedMessage
from rocketmq_spark.session.consumers import _rows_decoder
from rocketmq_spark.wire import messages
from rocketmq_spark.wire.messages import encode_batch
from rocketmq_spark.wire.names import Scope
from tests.consumer.messages import messages as found_at
from tests.harness import store

A, B = MessageQueue("t", "b", 0), MessageQueue("t", "b", 1)
RETRY = MessageQueue("%RETRY%g", "b", 0)
LARGE, FEW = 60, 5  # decoded by columns, or as messages


def stored(count: int, start: int = 0, tags: Sequence[str] = ("",), queue: MessageQueue = A) -> list[bytes]:
    return [
        store(
            queue.topic,
            b"%d" % i,
            f"UNIQ_KEY\x01{i:032X}\x02TAGS\x01{tags[i % len(tags)]}\x02k\x01v{i}\x02",
            queue.queue_id,
            i,
            1000 * i,
        )
        for i in range(start, start + count)
    ]


def retried(count: int) -> list[bytes]:
    properties = "RETRY_TOPIC\x01orders\x02UNIQ_KEY\x01A\x02"
    return [store("%RETRY%g", b"%d" % i, properties, 0, i, reconsumed=2) for i in range(count)]


def part_of(
    pieces: Sequence[bytes],
    start: int = 0,
    end: int | None = None,
    queue: MessageQueue = A,
    wanted: Filter = NO_FILTER,
) -> FetchedPart:
    data, end = b"".join(pieces), start + len(pieces) if end is None else end
    asked = PullRequest("g", queue, start, filter=wanted)
    return FetchedPart(
        queue, start, [(end, len(data))], data, lambda *_: requested_messages(asked, data, Scope(), end), wanted
    )


def unpacked(*parts: FetchedPart, most: int = 1024) -> list[list[Rows]]:
    return [
        found
        for found, left in _rows_decoder(ConsumerSettings(group="g", consume_batch_max_size=most))(parts)
        if not left
    ]


def check(found: Sequence[Rows], part: FetchedPart) -> list[ReceivedMessage]:
    """The rows are those of the messages of the part, and lie where these do; returns the messages."""
    expected = list(part.read())
    assert [message for each in found for message in each] == expected
    at = part.start
    for each in found:
        assert at <= each.queue_offset < each.next_offset <= part.next_offset
        at = each.next_offset
        own = list(each)
        assert (each.queue_offset, each.next_offset) == (own[0].queue_offset, own[-1].queue_offset + 1)
        assert len(each) == each.batch.num_rows == len(own)
        assert each.batch.equals(batch_of_messages(own))
        assert each.byte_count > 0
    return expected


@pytest.mark.parametrize("count", [FEW, LARGE])
def test_an_answer_is_one_call(count: int) -> None:
    part = part_of(stored(count, 7), 7)
    ((found,),) = unpacked(part)
    check([found], part)
    assert (found.queue_offset, found.next_offset, found[3].body) == (7, 7 + count, b"10")


@pytest.mark.parametrize("count", [FEW, LARGE])
def test_or_as_many_as_rows_are_too_many(count: int) -> None:
    part = part_of(stored(count, 7), 7)
    (found,) = unpacked(part, most=2)
    check(found, part)
    assert [len(each) for each in found[:-1]] == [2] * (len(found) - 1)
    assert sum(each.byte_count for each in found) == pytest.approx(unpacked(part)[0][0].byte_count, rel=0.1)


def test_parts_are_decoded_together_and_each_has_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    makes = _rows_decoder(ConsumerSettings(group="g", consume_batch_max_size=40))
    by_columns = makes._decode_columns
    monkeypatch.setattr(makes, "_decode_columns", lambda parts: calls.append(len(parts)) or by_columns(parts))
    parts = [part_of(stored(LARGE, 7), 7), part_of(stored(30, 100, queue=B), 100, queue=B), part_of(stored(3), 0)]
    for (found, left), part in zip(makes(parts), parts, strict=True):
        check(found, part)
        assert left is None
    assert calls == [3]


@pytest.mark.parametrize("odd", ["gap", "retry", "queue", "before", "behind", "damage", "offset"])
def test_a_part_that_is_not_plain_is_decoded_alone(odd: str) -> None:
    plain, other = part_of(stored(LARGE, 7), 7), part_of(stored(LARGE, 7, queue=B), 7, queue=B)
    if odd == "gap":
        other = part_of([each for i, each in enumerate(stored(LARGE, queue=B)) if i % 7], 0, LARGE, B)
    elif odd == "retry":
        other = part_of(retried(LARGE), 0, queue=RETRY)
    elif odd == "queue":
        other = part_of(stored(LARGE, 7), 7, queue=B)
    elif odd in ("before", "behind"):
        other = part_of(stored(LARGE, 10 if odd == "behind" else 5, queue=B), 7, queue=B)
    elif odd == "damage":
        other = part_of([*stored(LARGE, queue=B), b"\0" * 100], 0, LARGE + 1, B)
    else:
        other = part_of([*stored(LARGE, queue=B), *stored(1, 3, queue=B)], 0, LARGE + 1, B)
    for parts in ((plain, other), (other, plain)):
        for found, part in zip(unpacked(*parts), parts, strict=True):
            check(found, part)


@pytest.mark.parametrize("count", [FEW, LARGE])
def test_rows_of_the_retry_topic_have_the_topic_that_was_sent_to(count: int) -> None:
    part = part_of(retried(count), queue=RETRY)
    ((found,),) = unpacked(part)
    check([found], part)
    assert set(found.batch.column("topic").to_pylist()) == {"orders"}
    assert {message.reconsume_times for message in found} == {2}


@pytest.mark.parametrize("count", [FEW, LARGE])
def test_tags_of_the_same_hash_are_left_out(count: int) -> None:
    part = part_of(stored(count, tags=("Aa", "BB")), wanted=Filter("Aa"))
    (found,) = unpacked(part)
    assert {message.tags for message in check(found, part)} == {"Aa"}
    assert unpacked(part_of(stored(count, tags=("BB",)), wanted=Filter("Aa"))) == [[]]


@pytest.mark.parametrize("count", [FEW, LARGE])
def test_undecodable_message_becomes_row_without_body(count: int, caplog: pytest.LogCaptureFixture) -> None:
    pieces = stored(count)
    packed = zlib.compress(b"large" * 100)
    pieces[1] = store("t", packed, "", 0, 1, sys_flag=SysFlag.COMPRESSED)
    pieces[3] = store("t", b"no zlib", "", 0, 3, sys_flag=SysFlag.COMPRESSED)
    part = part_of(pieces)
    ((found,),) = unpacked(part)
    check([found], part)
    bodies = found.batch.column("body").to_pylist()
    assert (bodies[1], bodies[3], bodies[4]) == (b"large" * 100, None, b"4")
    assert "t/b/0: the message at offset 3 cannot be decoded; its row has no body" in caplog.text
    assert found[3].body == b"no zlib"


@pytest.mark.parametrize("size", [1, 91, 93])
def test_damaged_message_size_costs_only_one_row_its_body(size: int) -> None:
    pieces = stored(LARGE)
    pieces[20] = size.to_bytes(4, "big") + pieces[20][4:]
    part = part_of(pieces)
    ((found,),) = unpacked(part)
    assert len(check([found], part)) == LARGE
    assert found.batch.column("body").null_count == 1


def test_rows_of_inner_batches_are_messages_of_their_own() -> None:
    batches = [
        store("t", encode_batch([(b"%d" % i, "", 0) for i in range(at, at + 20)]), "", 0, at, sys_flag=INNER_BATCH_MASK)
        for at in range(0, 80, 20)
    ]
    part = part_of(batches, 0, 80)
    ((found,),) = unpacked(part)
    assert [message.body for message in check([found], part)] == [b"%d" % i for i in range(80)]
    inside = part_of(batches[:3], 5, 60)  # brokers return whole batches
    ((found,),) = unpacked(inside)
    assert [message.queue_offset for message in check([found], inside)] == [*range(5, 60)]


@pytest.mark.parametrize("count", [FEW, LARGE])
def test_what_becomes_too_large_is_left(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "PORTION_BYTES", 1)
    part = part_of(stored(count, 7), 7)
    makes = _rows_decoder(ConsumerSettings(group="g"))
    ((found, left),) = makes([part])
    assert ([len(each) for each in found], left) == ([1], 8)


def test_where_rows_and_messages_differ_all_count_as_failed(caplog: pytest.LogCaptureFixture) -> None:
    """So that none is lost."""
    part = part_of(stored(LARGE))
    less = batch_of_messages(list(part.read())[1:])
    makes = RowsDecoder(30, lambda parts: less, batch_of_messages)
    ((found, _),) = makes([part])
    assert [len(each) for each in found] == [30, 29]
    for each in found:
        assert [message.queue_offset for message in each[25:]] == [*range(LARGE)]
    assert "59 rows were decoded, but 60 messages" in caplog.text


def test_attempts_in_place_are_counted() -> None:
    ((found,),) = unpacked(part_of(stored(FEW)))
    again = found.with_next_attempt().with_next_attempt()
    assert [message.reconsume_times for message in (*again, again[0], *again[1:3])] == [2] * 8
    assert found[0].reconsume_times == 0


@pytest.mark.parametrize("package", ["pyarrow", "numpy"])
def test_without_a_package_the_option_says_what_to_install(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "is_installed", lambda module: module != package)
    with pytest.raises(OptionError, match=rf"option 'arrow' needs {package}.*\n?.*pip install 'pyarrow"):
        Consumer("127.0.0.1:1", "g", arrow=True)


def filled(*bounds: tuple[int, int]) -> tuple[RowsQueue, list[Rows]]:
    """A queue with the rows of the offsets of each call."""
    queue = RowsQueue(batch_of_messages, A)
    found = [Rows.from_messages(found_at(*range(*each), queue=A), batch_of_messages) for each in bounds]
    assert queue.put(found) == sum(end - start for start, end in bounds)
    return queue, found


def test_offset_waits_for_oldest_batch_and_passes_finished_ones() -> None:
    queue, (first, second, third) = filled((0, 3), (3, 7), (9, 10))
    assert (queue.count, queue.span, queue.offsets, queue.waiting_count) == (8, 9, (0, 9), 3)
    assert queue.remove(second) == 0
    assert queue.remove(first) == 9
    assert queue.remove(third) == 10
    assert (queue.count, queue.bytes, queue.remove(third)) == (0, 0, None)


def test_rows_pulled_again_replace_cached_ones_not_yet_consumed() -> None:
    queue, _ = filled((0, 3))
    assert queue.put([Rows.from_messages(found_at(0, queue=A), batch_of_messages)]) == 0
    assert queue.count == 1
    assert len(queue.take(1)) == 1
    assert queue.put([Rows.from_messages(found_at(0, 1, queue=A), batch_of_messages)]) == 0
    assert (queue.count, queue.commit(), queue.count, queue.bytes) == (1, 1, 0, 0)


def test_a_call_is_late_if_it_holds_up_the_offset() -> None:
    queue, (first, second) = filled((0, 3), (3, 7))
    assert (queue.late_messages(second), queue.late_messages(first)) == ((), first)
    queue.remove(first)
    assert (queue.late_messages(first), queue.late_messages(second)) == ((), second)
    assert queue.late_messages(found_at(3, queue=A)) == ()


@pytest.mark.parametrize("dead", [[0], [1], [2], [0, 1], [1, 2], [0, 2]])
def test_rows_left_by_dead_letters_are_retried_one_by_one(dead: list[int]) -> None:
    queue, _ = filled((0, 3), (3, 5))
    taken = queue.take(1)
    queue.mark_dead_letters([taken[i] for i in dead])
    left = [message for i, message in enumerate(taken) if i not in dead]
    queue.put_back_for_retry(left, one_by_one=True)
    assert queue.count == len(left) + 2
    for again in ("rollback", "retry"):
        rows = queue.take(1)
        assert [(m.queue_offset, m.reconsume_times) for m in rows] == [(left[0].queue_offset, 1)]
        if again == "rollback":
            queue.rollback()
    queue.put_back_for_retry(rows, one_by_one=True)
    assert [message.reconsume_times for message in queue.take(1)] == [2]
    for following in left[1:]:
        assert queue.commit() == following.queue_offset
        assert [message.queue_offset for message in queue.take(1)] == [following.queue_offset]
    assert queue.commit() == 3
    assert len(queue.take(1)) == 2


def test_a_call_that_is_a_dead_letter_is_not_rolled_back() -> None:
    queue, _ = filled((0, 3), (3, 5))
    queue.mark_dead_letters(queue.take(1))
    queue.take(1)
    queue.rollback()
    assert [message.queue_offset for message in queue.take(1)] == [3, 4]
    assert (queue.commit(), queue.count) == (5, 0)


def test_nothing_waits_again_after_a_reset() -> None:
    queue, _ = filled((0, 3))
    taken = queue.take(1)
    queue.clear()
    queue.put_back_for_retry(taken, one_by_one=False)
    queue.put_back_for_retry(list(taken), one_by_one=True)
    queue.mark_dead_letters(taken)
    assert (len(queue.take(1)), queue.count, queue.bytes, queue.commit()) == (0, 0, 0, None)


def test_damaged_offset_is_corrected_beside_filtered_out_message() -> None:
    """The first message says that it is the second one, which is of another tag: offset 0 is not finished before it is."""
    pieces = [*stored(2, tags=("Aa", "BB")), *stored(LARGE, 2, tags=("Aa",))]
    pieces[0] = pieces[0][:20] + (1).to_bytes(8, "big") + pieces[0][28:]
    part = part_of(pieces, wanted=Filter("Aa"))
    (found,) = unpacked(part)
    check(found, part)
    assert found[0].queue_offset == 0


@given(
    st.integers(1, 9),
    st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 255)), max_size=4),
    st.sampled_from([NO_FILTER, Filter("Aa")]),
    st.integers(1, 1024),
    st.booleans(),
)
def test_rows_are_those_of_the_messages_whatever_damage_did(
    count: int, flips: list[tuple[int, int]], wanted: Filter, most: int, together: bool
) -> None:
    data = bytearray(b"".join(stored(count, tags=("Aa", "BB"))))
    for at, value in flips:
        data[at % len(data)] = value
    logging.disable(logging.WARNING)
    before, rows.MIN_COLUMNAR_ROWS = rows.MIN_COLUMNAR_ROWS, 1
    try:
        part, plain = part_of([bytes(data)], 0, count, wanted=wanted), part_of(stored(3, queue=B), queue=B)
        for found, each in zip(unpacked(*((part, plain) if together else (part,)), most=most), (part, plain)):  # noqa: B905
            check(found, each)
    finally:
        rows.MIN_COLUMNAR_ROWS = before
        logging.disable(logging.NOTSET)


def test_a_listener_whose_calls_wait_for_their_turn_gets_batches() -> None:
    class Later(DeferredListener):
        def submit(self, turn: NextCall, times: int, first: bool = False) -> None:
            calls.extend(turn() for _ in range(times))

    class Noted(ListenerCall):
        def __call__(self, outcome: object) -> None:
            outcomes.append(outcome)

    calls: list[ListenerCall | None] = []
    outcomes: list[object] = []
    given = iter([Noted(found_at(1), "context"), None])
    listener = rows.batch_listener(Later(), batch_of_messages)
    assert isinstance(listener, DeferredListener)
    listener.submit(lambda: next(given), 2)
    call, nothing = calls
    assert (nothing, call is not None) == (None, True)
    assert call is not None
    assert (call.messages.column("body").to_pylist(), call.context) == ([found_at(1)[0].body], "context")
    call(None)
    assert outcomes == [None]
