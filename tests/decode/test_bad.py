"""What is done about messages that cannot be decoded: one function, three policies, both paths."""

from __future__ import annotations

import itertools
import logging

import pytest

from rocketmq_spark.base.codes import SysFlag
from rocketmq_spark.columnar.decode.decoder import Decoder
from rocketmq_spark.columnar.decode.rows import ReferenceDecoder
from rocketmq_spark.columnar.decode.schema import (
    BASIC_COLUMNS,
    DECODE_ERROR,
    FULL_COLUMNS,
    BadMessages,
    undecodable_error,
)
from rocketmq_spark.errors import DecodeError
from rocketmq_spark.model import Filter, MessageQueue
from rocketmq_spark.pull.fetched import Hole
from rocketmq_spark.wire.messages import BatchItem, encode_batch
from tests.decode.fetching import QUEUES, Answer, fetch, stored, text

COLUMNS = (*BASIC_COLUMNS, *FULL_COLUMNS, DECODE_ERROR)
INNER = SysFlag.NEED_UNWRAP | SysFlag.INNER_BATCH


def good(offset: int) -> bytes:
    return stored(b"%d" % offset, text(TAGS="a"), queue_offset=offset)


def unpackable(offset: int, flag: int = SysFlag.COMPRESSED) -> bytes:
    return stored(b"no zlib", text(TAGS="a"), queue_offset=offset, sys_flag=flag)


# Each stands at offset 12 in an answer of the offsets 10 to 14.
BAD = {
    "not compressed": unpackable(12),
    "unknown compression": unpackable(12, SysFlag.COMPRESSED | 0x700),
    "an inner batch of garbage": unpackable(12, INNER),
    "body too long": good(12)[:84] + b"\x00\x00\x10\x00" + good(12)[88:],
    "body negative": good(12)[:84] + b"\xff\xff\xff\xf0" + good(12)[88:],
    "properties too long": good(12)[:-9] + b"\x7f\xff" + good(12)[-7:],
    "no magic": good(12)[:4] + b"abcd" + good(12)[8:],
    "size too small": b"\x00\x00\x00\x05" + good(12)[4:],
    "size too large": b"\x00\x01\x00\x00" + good(12)[4:],
}


def damaged(bad: bytes, **around: int):
    answers = [Answer([good(20 * i + n) for n in range(5)], number=0) for i in range(around.get("before", 0))]
    here = Answer([good(10), good(11), bad, good(13), good(14)], number=1, start=10, limit=15, next_offset=15)
    return fetch(*answers, here, Answer([good(n) for n in range(3)], number=2))


def rows(policy: str, bad: bytes, columns=COLUMNS, portion: int | None = None, **around: int):
    decoder = Decoder(QUEUES, columns, "user", bad_messages=BadMessages(policy))
    return [row for batch in decoder.batches(damaged(bad, **around), portion) for row in batch.to_pylist()]


def places(found) -> list[tuple[str, int]]:
    return [(f"{row['topic']}/{row['brokerName']}", row["queueOffset"]) for row in found]


ALL = [*(("t/broker-b", n) for n in range(10, 15)), *(("u/b", n) for n in range(3))]


@pytest.mark.parametrize("portion", [None, 1, 1 << 20])
@pytest.mark.parametrize("what", BAD)
def test_null_makes_a_row_without_body_and_with_the_cause(what, portion):
    found = rows("null", BAD[what], portion=portion)
    assert places(found) == ALL
    bad = found.pop(2)
    assert bad["body"] is None
    assert bad["decodeError"]
    assert all(row["decodeError"] is None and row["body"] == b"%d" % row["queueOffset"] for row in found)


@pytest.mark.parametrize("before", [0, 30])
@pytest.mark.parametrize("what", BAD)
def test_skip_leaves_it_out_and_says_where(what, before, caplog):
    caplog.set_level(logging.WARNING)
    found = rows("skip", BAD[what], before=before)
    assert places(found)[5 * before :] == [place for place in ALL if place != ("t/broker-b", 12)]
    assert len(found) == 5 * before + 7
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("t/broker-b/3: the message at offset 12 cannot be decoded, and is left out: ")


@pytest.mark.parametrize("what", BAD)
def test_fail_names_the_ways_out(what):
    with pytest.raises(DecodeError) as caught:
        rows("fail", BAD[what])
    for part in ("t/broker-b/3", "rocketmq-spark tail", "option 'badMessage' to 'null'", "'skip'", "offset 1"):
        assert part in str(caught.value)


def test_what_is_stored_with_a_bad_body_is_shown():
    (bad,) = [row for row in rows("null", BAD["unknown compression"]) if row["decodeError"]]
    assert bad["decodeError"] == "Unknown compression type 0x700"
    assert (bad["tags"], bad["sysFlag"]) == ("a", SysFlag.COMPRESSED | 0x700)


@pytest.mark.parametrize("what", ["not compressed", "unknown compression"])
def test_a_body_that_nobody_wants_need_not_be_readable(what):
    columns = tuple(column for column in COLUMNS if column.name != "body")
    fast = Decoder(QUEUES, columns)(damaged(BAD[what])).to_pylist()
    assert places(fast) == ALL
    assert fast == ReferenceDecoder(QUEUES, columns, "user")(damaged(BAD[what])).to_pylist()


def test_unreadable_batch_is_bad_even_if_body_is_not_wanted():
    """Which messages it had, and what their other columns are, stands in its body alone."""
    columns = tuple(column for column in COLUMNS if column.name != "body")
    bad = BAD["an inner batch of garbage"]
    with pytest.raises(DecodeError):
        rows("fail", bad, columns)
    assert places(rows("skip", bad, columns)) == [place for place in ALL if place != ("t/broker-b", 12)]
    found = rows("null", bad, columns)
    assert [row["queueOffset"] for row in found if row["decodeError"]] == [12]
    assert places(found) == ALL


@pytest.mark.parametrize("policy", ["null", "skip"])
@pytest.mark.parametrize(("one", "two"), list(itertools.combinations(BAD, 2)))
def test_both_paths_agree_where_several_are_bad(policy, one, two):
    here = Answer([good(10), BAD[one], good(13)], number=1, start=10, limit=14, next_offset=14)
    fetched = fetch(here, Answer([BAD[two], good(13)], number=2, start=12, limit=14, next_offset=14))
    found = [
        row
        for b in Decoder(QUEUES, COLUMNS, bad_messages=BadMessages(policy)).batches(fetched, None)
        for row in b.to_pylist()
    ]
    assert found == ReferenceDecoder(QUEUES, COLUMNS, "user", bad_messages=BadMessages(policy))(fetched).to_pylist()


def test_unreadable_rest_of_answer_has_row_for_each_offset():
    rest = b"\x00\x00\x00\x05" + good(12)[4:-20]
    fetched = fetch(Answer([good(10), rest], start=10, limit=14, next_offset=14))
    found = Decoder(QUEUES, COLUMNS, bad_messages=BadMessages("null")).batches(fetched, None)
    assert [row["queueOffset"] for batch in found for row in batch.to_pylist()] == [10, 11, 12, 13]


def test_holes_in_answer_beside_bad_one_are_asked_for_again():
    """It may still come: the bad message says nothing about it."""
    asked = []

    def usable(answers, holes):
        asked.append(list(holes))
        return 1

    bad = Answer([good(10), BAD["size too small"]], number=1, start=10, limit=13, next_offset=13)
    skips = Answer([good(0), good(2)], number=2, start=0, limit=3, next_offset=3)
    decoder = Decoder(QUEUES, COLUMNS, "user", count_usable_answers=usable, bad_messages=BadMessages("null"))
    found = [row for batch in decoder.batches(fetch(bad, skips), None) for row in batch.to_pylist()]
    assert asked == [[Hole(1, 1, 2)]]
    assert [row["queueOffset"] for row in found] == [10, 11, 12]


def test_with_a_filter_nobody_knows_how_many_there_were():
    rest = b"\x00\x00\x00\x05" + good(12)[4:-20]
    fetched = fetch(Answer([good(10), rest], start=10, limit=14, next_offset=14))
    found = Decoder(QUEUES, COLUMNS, "user", Filter("a", "TAG"), bad_messages=BadMessages("null")).batches(
        fetched, None
    )
    assert [row["queueOffset"] for batch in found for row in batch.to_pylist()] == [10, 11]


def test_bad_messages_with_another_tag_are_none_of_ours():
    fetched = fetch(Answer([good(10), stored(b"x", text(TAGS="b"), queue_offset=11, sys_flag=SysFlag.COMPRESSED)]))
    (batch,) = Decoder(QUEUES, COLUMNS, "user", Filter("a", "TAG")).batches(fetched, None)
    assert batch.column("queueOffset").to_pylist() == [10]


def test_inner_batches_among_bad_messages():
    items = [BatchItem(b"%d" % i, text(n=str(i)).decode()) for i in range(3)]
    inner = stored(encode_batch(items), sys_flag=INNER, queue_offset=11)
    fetched = fetch(Answer([good(10), inner, unpackable(14), good(15)], start=10, limit=16, next_offset=16))
    found = Decoder(QUEUES, COLUMNS, bad_messages=BadMessages("null")).batches(fetched, None)
    assert [row["body"] for batch in found for row in batch.to_pylist()] == [b"10", b"0", b"1", b"2", None, b"15"]


def test_the_first_are_logged_each_and_all_are_counted(caplog):
    caplog.set_level(logging.WARNING)
    bad, queue = BadMessages("skip"), MessageQueue("t", "b", 0)
    for offset in range(10):
        bad.add(queue, offset, "why")
    bad.log_summary()
    assert len(caplog.records) == 10
    for offset in range(10, 25):
        bad.add(queue, offset, "why")
    assert len(caplog.records) == 10
    bad.log_summary()
    assert caplog.records[-1].getMessage() == "25 messages in all cannot be decoded; badMessage=skip"


@pytest.mark.parametrize("decode", [Decoder, ReferenceDecoder])
@pytest.mark.parametrize("policy", ["fail", "null", "skip"])
def test_a_task_logs_which_times_are_null(decode, policy, caplog):
    """One line for each column, with the first message of the tags that are read."""
    caplog.set_level(logging.WARNING)
    others = [
        stored(tags, text(TAGS=tags.decode()), queue_offset=at, born_ms=1 << 60)
        for at, tags in enumerate((b"b", b"a", b"a"))
    ]
    fetched = fetch(
        Answer([good(5)]), Answer(others, number=1), Answer([stored(b"x", text(TAGS="a"), store_ms=1 << 60)], number=2)
    )
    bad = BadMessages(policy)
    decoder = decode(QUEUES, BASIC_COLUMNS, "user", topic_filter=Filter("a", "TAG"), bad_messages=bad)
    found = [row for batch in decoder.batches(fetched, 1) for row in batch.to_pylist()]
    assert [(row["bornTimestamp"] is None, row["storeTimestamp"] is None) for row in found] == [
        (False, False),
        (True, False),
        (True, False),
        (False, True),
    ]
    assert not caplog.records
    bad.log_summary()
    born, kept = (record.getMessage() for record in caplog.records)
    assert born.startswith("bornTimestamp is null in 2 rows")
    assert born.endswith("at offset 1 of t/broker-b/3")
    assert kept.startswith("storeTimestamp is null in 1 row,")


def test_an_error_has_queue_and_topic():
    made = undecodable_error(MessageQueue("t", "b", 0), 7, "why")
    assert (made.topic, made.queue) == ("t", "t/b/0")
    assert "the message at offset 7 cannot be decoded: why" in str(made)
    assert """rocketmq-spark tail t --no-follow --count 1 --from '{"t":{"b":{"0":7}}}'; to continue""" in str(made)
