"""Answers to pulls as one batch: the rows that the careful way finds, and filters by the text of tags."""

from __future__ import annotations

import zlib

import pytest

from rocketmq_spark.base.codes import SysFlag
from rocketmq_spark.columnar.decode.decoder import batch_of_answers
from rocketmq_spark.columnar.decode.rows import batch_of_messages
from rocketmq_spark.columnar.decode.schema import BASIC_COLUMNS, arrow_schema
from rocketmq_spark.errors import DecodeError
from rocketmq_spark.model import NO_FILTER, Filter, MessageQueue
from rocketmq_spark.wire import messages
from tests.harness import store

QUEUES = [MessageQueue(topic, "b", 1) for topic in ("t", "u")]


def answer(queue: MessageQueue, *tags: str, start: int = 5) -> tuple[MessageQueue, int, list[tuple[int, int]], bytes]:
    stored = b"".join(
        store(queue.topic, tag.encode(), f"TAGS\x01{tag}\x02", 1, start + i) for i, tag in enumerate(tags)
    )
    return queue, start, [(start + len(tags), len(stored))], stored


def test_rows_of_several_queues() -> None:
    batch, _ = batch_of_answers((answer(queue, "a", "b"), NO_FILTER) for queue in QUEUES)
    assert batch.schema == arrow_schema(BASIC_COLUMNS)
    assert batch.column("topic").to_pylist() == ["t", "t", "u", "u"]
    assert batch.column("queueOffset").to_pylist() == [5, 6, 5, 6]
    assert batch.column("body").to_pylist() == [b"a", b"b", b"a", b"b"]


def test_rows_of_answers_in_a_row() -> None:
    queue, start, _, first = answer(QUEUES[0], "a", "b")
    second = answer(queue, "c", start=7)[3]
    found = (queue, start, [(7, len(first)), (8, len(first) + len(second))], first + second)
    batch, _ = batch_of_answers([(found, NO_FILTER), (answer(QUEUES[1], "d"), NO_FILTER)])
    assert batch.column("queueOffset").to_pylist() == [5, 6, 7, 5]
    assert batch.column("topic").to_pylist() == ["t", "t", "t", "u"]


def test_record_batches_of_consumers_have_no_impossible_time() -> None:
    stored = store("t", b"x", "", 1, 5, born_ms=1_795_000_000 * 10**9)
    polled, _ = batch_of_answers([((QUEUES[0], 5, [(6, len(stored))], stored), NO_FILTER)])
    listened = batch_of_messages(messages.decode_messages(stored))
    for batch in (polled, listened):
        assert batch.column("bornTimestamp").to_pylist() == [None]
        assert batch.column("storeTimestamp").null_count == 0


def test_tags_with_an_equal_hash_are_told_apart() -> None:
    wanted = [Filter("Aa"), NO_FILTER]
    parts = [(answer(queue, "Aa", "BB"), one) for queue, one in zip(QUEUES, wanted, strict=True)]
    assert batch_of_answers(parts)[0].column("tags").to_pylist() == ["Aa", "Aa", "BB"]


def test_rows_that_a_loop_gave_are_left_out_of_their_queue_alone() -> None:
    parts = [(answer(queue, "a", "b", "c"), NO_FILTER) for queue in QUEUES]
    given = {(QUEUES[0], NO_FILTER): 2, (QUEUES[0], Filter("a")): 1, (MessageQueue("t", "other", 1), NO_FILTER): 99}
    batch, _ = batch_of_answers(parts, given)
    rows = zip(batch.column("topic").to_pylist(), batch.column("queueOffset").to_pylist(), strict=True)
    assert list(rows) == [("t", 7), ("u", 5), ("u", 6), ("u", 7)]
    assert batch.schema == arrow_schema(BASIC_COLUMNS)


def test_yielded_rows_are_dropped_whatever_queue_they_name() -> None:
    stored = b"".join(store("t", b"%d" % i, "", 1 + 16 * (i == 0), 5 + i) for i in range(4))
    found = (QUEUES[0], 5, [(9, len(stored))], stored)
    for count in range(4):
        batch, _ = batch_of_answers(
            [(answer(QUEUES[1], "u"), NO_FILTER), (found, NO_FILTER)], {(QUEUES[0], NO_FILTER): count}
        )
        assert batch.column("body").to_pylist() == [b"u", *(b"%d" % i for i in range(count, 4))]


@pytest.mark.parametrize("given", [0, 1])
def test_rows_keep_queue_order_whatever_filter_fetched_them(given: int) -> None:
    one, two = QUEUES
    wanted = [NO_FILTER, Filter("a"), NO_FILTER, Filter("a"), NO_FILTER]
    parts = [(answer(two, "x"), NO_FILTER)]
    parts += [(answer(one, "a", start=5 + i), by) for i, by in enumerate(wanted)]
    batch, _ = batch_of_answers([*parts, (answer(two, "y", start=6), NO_FILTER)], {(one, NO_FILTER): given})
    rows = list(zip(batch.column("topic").to_pylist(), batch.column("queueOffset").to_pylist(), strict=True))
    assert [offset for topic, offset in rows if topic == "t"] == list(range(5 + given, 10))
    assert [offset for topic, offset in rows if topic == "u"] == [5, 6]


def test_an_answer_without_messages_has_no_rows() -> None:
    batch, whole = batch_of_answers([((QUEUES[0], 5, [(6, 0)], b""), NO_FILTER)])
    assert (batch.num_rows, whole) == (0, True)


def test_nothing_has_no_rows() -> None:
    assert batch_of_answers([])[0].num_rows == 0
    assert batch_of_answers([])[0].schema == arrow_schema(BASIC_COLUMNS)


def test_a_bad_message_is_named() -> None:
    with pytest.raises(DecodeError, match=r"t/b/1|b/1"):
        batch_of_answers([((QUEUES[0], 5, [(6, 100)], b"\0" * 100), NO_FILTER)])


def test_of_what_becomes_large_the_first_rows_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = zlib.compress(b"x" * 100_000)
    flag = int(SysFlag.COMPRESSED)
    stored = b"".join(store("t", packed, "", 1, 5 + i, sys_flag=flag) for i in range(5))
    found = (QUEUES[0], 5, [(10, len(stored))], stored)
    monkeypatch.setattr(messages, "PORTION_BYTES", 150_000)
    given, whole, got = 0, False, []
    while not whole:
        batch, whole = batch_of_answers([(found, NO_FILTER)], {(QUEUES[0], NO_FILTER): given})
        given += batch.num_rows
        got.append(batch.column("queueOffset").to_pylist())
        assert set(batch.column("body").to_pylist()) == {b"x" * 100_000}
    assert got == [[5, 6], [7, 8], [9]]
    monkeypatch.setattr(messages, "PORTION_BYTES", 1)
    batch, whole = batch_of_answers([(found, NO_FILTER)])
    assert (batch.num_rows, whole) == (1, False), "one is always given"
