"""The fast path gives what the careful path gives, and both give what RocketMQ's own decoder gave."""

from __future__ import annotations

import datetime
import pickle
import struct

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rocketmq_spark.base.codes import SysFlag
from rocketmq_spark.columnar.decode import rows as careful
from rocketmq_spark.columnar.decode import stored_messages
from rocketmq_spark.columnar.decode.decoder import Decoder
from rocketmq_spark.columnar.decode.schema import (
    BASIC_COLUMNS,
    EARLIEST_MS,
    FULL_COLUMNS,
    LATEST_MS,
    BadMessages,
    arrow_schema,
)
from rocketmq_spark.errors import DecodeError
from rocketmq_spark.model import Filter, MessageQueue
from rocketmq_spark.wire import compression
from rocketmq_spark.wire.messages import BatchItem, encode_batch
from tests.decode.fetching import QUEUES, Answer, fetch, fetches, one, stored, text
from tests.harness import in_one_test, store, unhex, vectors
from tests.scale import examples

STORED = vectors("stored_messages")
PULLED = vectors("pull_bodies")
EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


def both(fetched, include="user", columns=(*BASIC_COLUMNS, *FULL_COLUMNS)):
    """The batch, checked in itself and against the careful path."""
    decoder = Decoder(QUEUES, columns, include)
    fast = decoder(fetched)
    fast.validate(full=True)
    parts = list(decoder.batches(fetched, 300))
    assert pa.Table.from_batches(parts).equals(pa.Table.from_batches([fast]))
    assert fast.schema.equals(arrow_schema(columns))
    slow = careful.decode(fetched, QUEUES, columns, include)
    assert rows(fast) == rows(slow)
    return fast


@pytest.mark.parametrize(("count", "size"), [(10, 10), (5000, 1000), (3, 2 << 20), (20_000, 1)])
def test_portions_are_the_batch_in_parts_of_about_a_mebibyte(count, size):
    fetched = one(*(stored(bytes(size), text(TAGS="t"), queue_offset=i) for i in range(count)))
    decoder = Decoder(QUEUES)
    whole = decoder(fetched)
    portions = list(decoder.batches(fetched, 1 << 20))
    assert pa.Table.from_batches(portions).combine_chunks().to_batches() == [whole]
    assert all(len(portion) == 1 or portion.nbytes <= (1 << 20) + 4096 for portion in portions)
    assert len(portions) == 1 or portions[0].nbytes >= min(size, 1 << 19)


def rows(batch):
    """Maps have no order, but they may not have a name twice."""
    found = batch.to_pylist()
    for row in found:
        if row.get("properties") is not None:
            row["properties"] = sorted(row["properties"])
    return found


@in_one_test("case", STORED)
def test_stored_messages_of_java(case):
    data, expected = unhex(case["stored"]), case["decoded"]
    (row,) = both(one(data), "all").to_pylist()
    assert row["queueId"] == expected["queue_id"]
    assert row["queueOffset"] == expected["queue_offset"]
    assert row["body"] == unhex(expected["body"])
    assert dict(row["properties"]) == expected["properties"]
    assert row["tags"] == expected["properties"].get("TAGS")
    assert row["msgId"] == expected["msg_id"]
    assert (row["bornTimestamp"] - EPOCH) // datetime.timedelta(milliseconds=1) == expected["born_timestamp"]
    assert (row["storeTimestamp"] - EPOCH) // datetime.timedelta(milliseconds=1) == expected["store_timestamp"]
    assert (row["topic"], row["brokerName"]) == ("t", "broker-a")


def test_all_stored_messages_of_java_in_one_buffer():
    found = both(one(*(unhex(case["stored"]) for case in STORED)), "all")
    assert found.column("body").to_pylist() == [unhex(case["decoded"]["body"]) for case in STORED]


@in_one_test("case", [case for case in PULLED if case["label"] == "whole"])
def test_pulled_bodies_of_java(case):
    body = unhex(case["body"])
    found = both(fetch(Answer([body] if body else [], start=-(1 << 63), next_offset=(1 << 63) - 1)), "all")
    assert found.num_rows == case["count"]
    for row, expected in zip(found.to_pylist(), case["decoded"], strict=True):
        assert row["queueOffset"] == expected["queue_offset"]
        assert row["body"] == unhex(expected["body"])


@in_one_test("case", [case for case in PULLED if case["label"] != "whole"])
def test_bodies_that_java_gives_up_silently_are_errors(case):
    data = fetch(Answer([unhex(case["body"])], start=5, limit=9, next_offset=9))
    with pytest.raises(DecodeError, match="at or after offset 5"):
        Decoder(QUEUES)(data)


LENIENT = settings(
    max_examples=examples(300), deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


@LENIENT
@given(fetches(), st.sampled_from(["none", "user", "all"]))
def test_random_messages(fetched, include):
    both(fetched, include)


@settings(LENIENT, max_examples=100)
@given(fetches(inner=True), st.sampled_from(["user", "all"]))
def test_random_messages_with_inner_batches(fetched, include):
    both(fetched, include)


@settings(LENIENT, max_examples=60)
@given(fetches(), st.permutations(BASIC_COLUMNS), st.integers(1, len(BASIC_COLUMNS)))
def test_any_columns(fetched, columns, count):
    both(fetched, columns=tuple(columns[:count]))


@settings(LENIENT, max_examples=60)
@given(fetches(max_answers=40))
def test_answers_in_lock_step(fetched):
    begins, ends = (np.array([getattr(p, name) for p in fetched.answers], np.int64) for name in ("begin", "end"))
    together = stored_messages._boundaries_in_lock_step(fetched.buffer, begins, ends)
    in_turn = stored_messages._boundaries_one_by_one(fetched.buffer, begins, ends)
    assert [part.tolist() for part in together] == [part.tolist() for part in in_turn]
    both(fetched)


@settings(LENIENT, max_examples=examples(500))
@given(fetches(max_answers=2, beyond=0), st.data())
def test_damaged_messages_are_refused_or_read_the_same_by_both(fetched, data):
    body = [i for answer in fetched.answers for i in range(answer.begin, answer.end)]
    if not body:
        return
    for _ in range(data.draw(st.integers(1, 3))):
        # Only where lengths, magic and flags stand: most other damage is content.
        fetched.buffer[data.draw(st.sampled_from(body))] = data.draw(st.integers(0, 255))
    assert outcome(lambda: rows(Decoder(QUEUES)(fetched))) == outcome(
        lambda: rows(careful.decode(fetched, QUEUES, BASIC_COLUMNS, "user"))
    )


def test_message_without_length_is_error_behind_damaged_offset():
    first, second = stored(b"a", queue_offset=1), stored(b"b", queue_offset=2)
    fetched = fetch(Answer([first, second], start=0, limit=3, next_offset=3))
    begin = fetched.answers[0].begin
    fetched.buffer[begin + 20] = 1  # the offset's highest byte
    fetched.buffer[begin + len(first) + 3] = 1
    fetched.buffer[begin + len(first) + 2] = 0
    assert outcome(lambda: rows(Decoder(QUEUES)(fetched))) is DecodeError
    assert outcome(lambda: rows(careful.decode(fetched, QUEUES, BASIC_COLUMNS, "user"))) is DecodeError


def outcome(decode):
    try:
        return decode()
    except DecodeError:
        return DecodeError


# --- cases of their own


def test_uniform_messages():
    rows = [text(UNIQ_KEY=f"id{i:030}", TAGS=f"t{i % 3}", KEYS=f"k{i} l{i}", region="eu", n=str(i)) for i in range(100)]
    found = both(one(*(stored(b"%d" % i, p, queue_offset=i) for i, p in enumerate(rows))))
    assert found.column("tags").to_pylist() == [f"t{i % 3}" for i in range(100)]
    assert found.column("keys").to_pylist() == [[f"k{i}", f"l{i}"] for i in range(100)]
    assert found.column("msgId")[99].as_py() == f"id{99:030}"
    assert found.column("properties").to_pylist() == [[("region", "eu"), ("n", str(i))] for i in range(100)]


def test_missing_tags_and_keys_are_null_and_empty_body_is_empty():
    found = both(one(stored(b"", b"")))
    (row,) = found.to_pylist()
    assert (row["body"], row["tags"], row["keys"], row["properties"]) == (b"", None, None, [])


def test_properties_left_out_are_null():
    assert both(one(stored(b"", text(a="b"))), "none").column("properties").to_pylist() == [None]


def test_of_a_repeated_name_the_last_value_counts():
    properties = b"a\x01one\x02TAGS\x01x\x02a\x01two\x02TAGS\x01y\x02"
    for fetched in (one(stored(properties=properties)), one(stored(properties=properties), stored(queue_offset=1))):
        row = both(fetched).to_pylist()[0]
        assert (row["tags"], row["properties"]) == ("y", [("a", "two")])


def test_bytes_that_are_not_utf8_become_replacement_characters():
    found = both(one(stored(properties=b"TAGS\x01\xff\xfe\x02n\xc3\x01\xe4v\x02")))
    (row,) = found.to_pylist()
    assert row["tags"] == "\ufffd\ufffd"
    assert row["properties"] == [("n\ufffd", "\ufffdv")]


@pytest.mark.parametrize("kind", [SysFlag.ZLIB, SysFlag.LZ4, SysFlag.ZSTD, 0])
def test_compressed_bodies(kind):
    body = b"compress me " * 500
    flags = SysFlag.COMPRESSED | kind
    packed = compression.compress(body, kind or SysFlag.ZLIB)
    fetched = one(
        stored(packed, sys_flag=flags), stored(b"plain", queue_offset=1), stored(b"", sys_flag=flags, queue_offset=2)
    )
    assert both(fetched).column("body").to_pylist() == [body, b"plain", b""]


@pytest.mark.parametrize("flags", [0x1, 0x101, 0x4001, -0x7FFFFFFF, 0x3D])
@pytest.mark.parametrize("body", [b"", b"compress me"])
def test_system_flags_do_not_depend_on_neighbours(flags, body):
    """An inner batch beside it sends a message the careful way."""
    packed = compression.compress(body, flags & 0x700) if body else b""
    hosts = {"born": (bytes(16), 1), "stored": (bytes(16), 2)} if flags & 0x30 else {}
    message = stored(packed, sys_flag=flags, **hosts)
    inner = stored(encode_batch([BatchItem(b"x")]), sys_flag=0xC0, queue_offset=1)
    alone = both(one(message)).column("sysFlag")[0].as_py()
    assert both(one(message, inner)).column("sysFlag")[0].as_py() == alone == (flags & ~1 if body else flags)


def test_a_broken_compressed_body_names_its_message():
    fetched = fetch(Answer([stored(b"no zlib", sys_flag=SysFlag.COMPRESSED, queue_offset=41)], number=2))
    with pytest.raises(DecodeError, match=r"the message at offset 41 .*queue u/b/3"):
        Decoder(QUEUES)(fetched)


@pytest.mark.parametrize("born", [4, 16])
@pytest.mark.parametrize("host", [4, 16])
def test_addresses_of_both_families(born, host):
    fetched = one(
        stored(b"body", text(a="1"), born=(b"\x01" * born, 5), stored=(b"\x02" * host, 10911), log_offset=77),
        stored(b"other", text(a="2"), queue_offset=1),
    )
    row = both(fetched).to_pylist()[0]
    assert row["msgId"] == (b"\x02" * host + struct.pack(">iq", 10911, 77)).hex().upper()
    assert (row["body"], row["properties"]) == (b"body", [("a", "1")])


def test_long_topics():
    fetched = one(
        *(stored(b"b", text(a="1"), topic=topic, queue_offset=i) for i, topic in enumerate(["n" * 200, "t", "m" * 127]))
    )
    assert both(fetched).column("properties").to_pylist() == [[("a", "1")]] * 3


def test_inner_batches_are_unwrapped_and_cut_at_the_start():
    items = [BatchItem(b"%d" % i, text(n=str(i)).decode()) for i in range(4)]
    outer = stored(
        encode_batch(items), text(INNER_NUM="4"), sys_flag=SysFlag.NEED_UNWRAP | SysFlag.INNER_BATCH, queue_offset=10
    )
    fetched = fetch(Answer([outer, stored(b"next", queue_offset=14)], start=12, limit=15, next_offset=15))
    found = both(fetched)
    assert found.column("queueOffset").to_pylist() == [12, 13, 14]
    assert found.column("body").to_pylist() == [b"2", b"3", b"next"]


def test_extra_messages_are_dropped_only_if_answer_overshoots():
    many = [stored(b"%d" % i, queue_offset=i) for i in range(5)]
    asked_for_three = fetch(Answer(many, start=0, limit=3, next_offset=5))
    assert both(asked_for_three).column("queueOffset").to_pylist() == [0, 1, 2]
    # A queue whose index was shifted: positions 0 to 2 hold messages that say 0, 2 and 3.
    shifted = fetch(Answer([many[0], many[2], many[3]], start=0, limit=3, next_offset=3))
    assert both(shifted).column("queueOffset").to_pylist() == [0, 2, 3]


def test_overshooting_answer_is_cut_apart_from_shifted_queue():
    """Each is cut by its own rule."""
    beyond = Answer([stored(queue_offset=i) for i in range(5)], number=0, start=0, limit=3, next_offset=5)
    shifted = Answer([stored(queue_offset=i) for i in (0, 2, 3)], number=1, start=0, limit=3, next_offset=3)
    for order in ((beyond, shifted), (shifted, beyond)):
        found = both(fetch(*order)).select(["brokerName", "queueOffset"]).to_pylist()
        places = sorted((row["brokerName"], row["queueOffset"]) for row in found)
        assert places == [*(("broker-a", n) for n in (0, 1, 2)), *(("broker-b", n) for n in (0, 2, 3))]


@pytest.mark.parametrize("damaged", [False, True])
def test_overshooting_filtered_answer_has_its_end_looked_up(damaged):
    """Positions 0 to 4 hold messages that say 0, 1, 3, 4 and 5; the first three were asked for."""
    made = [stored(b"x", text(TAGS="a"), queue_offset=i) for i in (0, 1, 3, 4, 5)]
    if damaged:  # its magic number: such an answer goes the careful way
        made[0] = made[0][:4] + bytes(4) + made[0][8:]
    healthy = Answer([stored(b"y", text(TAGS="a"), queue_offset=i) for i in range(5)], 1, 0, 3, 5)
    asked = []

    def correct_ends(answers):
        asked.extend((answer.range_number, answer.limit) for answer in answers)
        return [answer._replace(limit=4 if answer.range_number == 0 else 3) for answer in answers]

    decoder = Decoder(QUEUES, topic_filter=Filter("a"), correct_ends=correct_ends, bad_messages=BadMessages("null"))
    found = pa.Table.from_batches(decoder.batches(fetch(Answer(made, 0, 0, 3, 5), healthy), None)).to_pylist()
    places = [(row["brokerName"], row["queueOffset"]) for row in found]
    expected = [*(("broker-a", n) for n in (0, 1, 3)), *(("broker-b", n) for n in range(3))]
    assert sorted(places) == expected
    assert asked == [(0, 3), (1, 3)]


def test_end_is_not_looked_up_if_all_messages_lie_before_it():
    def correct_ends(answers):
        raise AssertionError(answers)

    fetched = fetch(Answer([stored(queue_offset=i) for i in range(3)], start=0, limit=3, next_offset=9))
    assert Decoder(QUEUES, correct_ends=correct_ends)(fetched).num_rows == 3


def test_nothing_left_is_an_empty_batch():
    assert both(fetch(Answer([stored(queue_offset=7)], start=0, limit=7, next_offset=8))).num_rows == 0


def test_topic_and_broker_are_those_of_the_queue_that_was_asked():
    fetched = fetch(*(Answer([stored(queue_offset=i)], number=i) for i in range(3)))
    assert both(fetched).select(["topic", "brokerName"]).to_pylist() == [
        {"topic": queue.topic, "brokerName": queue.broker_name} for queue in QUEUES
    ]


# The last one is a time of today in nanoseconds.
@pytest.mark.parametrize("ms", [-(1 << 63), (1 << 63) - 1, EARLIEST_MS - 1, LATEST_MS + 1, 1_795_000_000 * 10**9])
def test_a_time_outside_of_the_calendar_is_null(ms):
    fields = [{"born_ms": ms, "store_ms": 1}, {"born_ms": 2, "store_ms": ms}, {"born_ms": 3, "store_ms": 4}]
    found = both(one(*(stored(queue_offset=at, **times) for at, times in enumerate(fields))))
    assert milliseconds(found.column("bornTimestamp")) == [None, 2, 3]
    assert milliseconds(found.column("storeTimestamp")) == [1, None, 4]


@pytest.mark.parametrize("ms", [EARLIEST_MS, -1, 0, LATEST_MS])
def test_every_time_of_the_calendar_is_kept(ms):
    found = both(one(stored(born_ms=ms, store_ms=ms)))
    assert milliseconds(found.column("bornTimestamp")) == milliseconds(found.column("storeTimestamp")) == [ms]


def milliseconds(times):
    return [None if value is None else value // 1000 for value in times.cast(pa.int64()).to_pylist()]


def malformed():
    good = stored(b"body", text(a="b"), queue_offset=30)
    yield "size too small", struct.pack(">i", 20) + good[4:]
    yield "size negative", struct.pack(">i", -5) + good[4:]
    yield "size beyond the answer", struct.pack(">i", len(good) + 1) + good[4:]
    yield "cut off", good[:-1]
    yield "unknown magic", good[:4] + b"\xcb\xd4\x31\x94" + good[8:]
    yield "body too long", good[:84] + struct.pack(">i", 1000) + good[88:]
    yield "body negative", good[:84] + struct.pack(">i", -1) + good[88:]
    yield "body of 2 GiB", good[:84] + struct.pack(">i", (1 << 31) - 1) + good[88:]
    yield "topic too long", good[:92] + b"\xff" + good[93:]
    yield "properties too short", good[:94] + struct.pack(">h", 3) + good[96:]
    yield "properties negative", good[:94] + struct.pack(">h", -3) + good[96:]


@pytest.mark.parametrize(("why", "bad"), list(malformed()), ids=[why for why, _ in malformed()])
@pytest.mark.parametrize("before", [0, 1, 30])
def test_malformed_messages_name_queue_and_offset(why, bad, before):
    """``before`` answers of other queues stand in front: from 24 on boundaries are found in lock step."""
    good = [Answer([stored(queue_offset=i)], number=0) for i in range(before)]
    bad_answer = Answer([stored(queue_offset=29), bad], number=1, start=29, limit=31, next_offset=31)
    with pytest.raises(DecodeError, match=r"at or after offset 29 .*queue t/broker-b/3") as caught:
        Decoder(QUEUES)(fetch(*good, bad_answer))
    assert "rocketmq-spark tail" in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_values_outlive_the_buffer():
    """Buffers are used again: nothing of a batch may point into one."""
    fetched = one(*(stored(b"%03d" % i, text(TAGS="t", UNIQ_KEY=f"{i:032}", a="b"), queue_offset=i) for i in range(50)))
    found = Decoder(QUEUES)(fetched)
    before = found.to_pylist()
    fetched.buffer[:] = 0
    assert found.to_pylist() == before


def test_a_decoder_may_be_used_again():
    decoder = Decoder([MessageQueue("t", "b", 0)])
    for count in (3, 20_000, 1):
        found = decoder(one(*(stored(b"x", text(TAGS="t"), queue_offset=i) for i in range(count))))
        assert found.num_rows == count
        assert found.column("topic").unique().to_pylist() == ["t"]
        assert isinstance(found, pa.RecordBatch)


@pytest.mark.parametrize("size", [32_767, 32_768, 65_535])
def test_oversized_properties_are_read_alike_by_both_decoders(size):
    """Their length is a short to Java, which never writes one below 0."""
    value = "v" * (size - 3)
    (row,) = both(one(store("t", b"x", f"a\x01{value}\x02"))).to_pylist()
    assert row["properties"] == [("a", value)]
