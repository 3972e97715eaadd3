"""Stored messages and batches against the broker's own encoder and the Java client's decoder."""

import struct
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.base.codes import SysFlag
from rocketmq_spark.errors import DecodeError, MessageRefused
from rocketmq_spark.model import MessageQueue, ReceivedMessage
from rocketmq_spark.wire import header, messages, rpc
from rocketmq_spark.wire.compression import compress
from rocketmq_spark.wire.identifiers import OffsetMessageId, host_text
from rocketmq_spark.wire.messages import (
    PORTION_BYTES,
    BatchItem,
    DecodeSettings,
    boundaries,
    decode_at,
    decode_batch,
    decode_leniently,
    decode_messages,
    encode_batch,
    first_portion,
    first_stamp,
)
from rocketmq_spark.wire.properties import encode_properties
from tests import strategies
from tests.harness import check_decoder, in_one_test, outcome, store, unhex, vectors

STORED = vectors("stored_messages")
PULLED = vectors("pull_bodies")
BATCHES = vectors("batch_bodies")


@in_one_test("case", STORED)
def test_stored_messages(case):
    data, expected = unhex(case["stored"]), case["decoded"]
    (message,) = decode_messages(data, "broker-a", check_crc=True)
    assert message.topic == expected["topic"]
    assert message.broker_name == "broker-a"
    assert message.queue_id == expected["queue_id"]
    assert message.queue_offset == expected["queue_offset"]
    assert message.commit_log_offset == expected["physical_offset"]
    assert message.body == unhex(expected["body"])
    assert message.properties == expected["properties"]
    assert message.flag == expected["flag"]
    assert message.sys_flag == expected["sys_flag_after_decode"]
    assert message.born_timestamp == expected["born_timestamp"]
    assert message.store_timestamp == expected["store_timestamp"]
    assert message.born_host == host_text(unhex(expected["born_host"]), expected["born_port"])
    assert message.store_host == host_text(unhex(expected["store_host"]), expected["store_port"])
    assert message.reconsume_times == expected["reconsume_times"]
    assert message.prepared_transaction_offset == expected["prepared_transaction_offset"]
    assert message.store_size == expected["store_size"] == len(data)
    assert message.offset_msg_id == expected["offset_msg_id"]
    assert message.msg_id == expected["msg_id"]
    check_decoder(lambda b: decode_messages(b, "broker-a"), data, [message])


@in_one_test("case", STORED)
def test_the_encoder_of_these_tests_is_the_brokers(case):
    data, expected = unhex(case["stored"]), case["decoded"]
    (message,) = decode_messages(data)
    text = data[-int.from_bytes(properties_length(data, expected), "big") or len(data) :].decode()
    again = store(
        message.topic,
        stored_body(data),
        text,
        message.queue_id,
        message.queue_offset,
        message.commit_log_offset,
        message.flag,
        case["sys_flag"],
        message.born_timestamp,
        message.store_timestamp,
        (unhex(expected["born_host"]), expected["born_port"]),
        (unhex(expected["store_host"]), expected["store_port"]),
        message.reconsume_times,
        message.prepared_transaction_offset,
    )
    version_of_a_short_topic = data[7] == 0xA7 or len(message.topic) > 127
    assert (again == data) == version_of_a_short_topic


def body_start(data):
    sys_flag = data[39]
    return 84 + 12 * bool(sys_flag & 0x10) + 12 * bool(sys_flag & 0x20) + 4


def stored_body(data):
    start = body_start(data)
    return data[start : start + int.from_bytes(data[start - 4 : start], "big")]


def properties_length(data, expected):
    width = 1 if data[7] == 0xA7 else 2
    at = body_start(data) + len(stored_body(data)) + width + len(expected["topic"].encode())
    return data[at : at + 2]


@in_one_test("case", PULLED)
def test_pulled_bodies(case):
    data = unhex(case["body"])
    found = []
    error = None
    try:
        for start, end in boundaries(data):
            found += decode_at(data, start, end, DecodeSettings(""))
    except DecodeError as exc:
        error = exc
    # Java stops at the first bad message without a word; we read the same ones and then raise.
    assert len(found) == case["count"]
    assert [
        {
            "queue_offset": message.queue_offset,
            "topic": message.topic,
            "body": message.body.hex(),
            "properties": message.properties or None,
        }
        for message in found
    ] == [{**decoded, "properties": decoded["properties"] or None} for decoded in case["decoded"]]
    assert (error is None) == (case["label"] == "whole")
    if error is None:
        assert decode_messages(data) == found
    else:
        with pytest.raises(DecodeError, match="byte"):
            decode_messages(data)


def test_messages_behind_a_bad_one_can_be_read():
    case = next(case for case in PULLED if case["label"] == "bad magic in first message")
    data = unhex(case["body"])
    (start, end), *rest = boundaries(data)
    with pytest.raises(DecodeError, match="unknown magic") as caught:
        decode_at(data, start, end, DecodeSettings("broker-a"))
    assert caught.value.queue.startswith("broker-a/")
    assert rest
    for start, end in rest:
        assert len(decode_at(data, start, end, DecodeSettings(""))) == 1


@in_one_test(
    "case",
    [case for case in vectors("live_exchanges") if case["label"].startswith("pull") and case["response_body_length"]],
)
def test_live_pulls(case):
    request = header.decode(unhex(case["request"])[4:])
    response = header.decode(memoryview(unhex(case["response"])[4:]))
    asked, answer = rpc.PULL_MESSAGE.arguments(request), rpc.PULL_MESSAGE.answer(response)
    found = decode_messages(response.body, "broker-a", check_crc=True)
    assert {message.topic for message in found} == {asked["topic"]}
    assert {message.queue_id for message in found} == {asked["queueId"]}
    offsets = [message.queue_offset for message in found]
    assert offsets == sorted(set(offsets))
    assert asked["queueOffset"] <= offsets[0] <= offsets[-1] < answer["nextBeginOffset"]
    assert all(OffsetMessageId.parse(m.offset_msg_id).host == m.store_host for m in found)


def test_live_message_born_over_ipv6():
    case = next(case for case in vectors("live_exchanges") if case["label"] == "pull IPv6 born host")
    (message,) = decode_messages(header.decode(unhex(case["response"])[4:]).body)
    assert message.sys_flag & SysFlag.BORNHOST_V6
    assert message.born_host.startswith("[::1]:")
    assert message.store_host == "127.0.0.1:21911"


@in_one_test("case", BATCHES)
def test_batches(case):
    items = [
        BatchItem(unhex(item["body"]), encode_properties(item["properties"]), item["flag"]) for item in case["messages"]
    ]
    assert encode_batch(items).hex() == case["encoded"] == case["encoded_by_message_batch"]
    assert [encode_batch([item]).hex() for item in items] == [item["single"] for item in case["messages"]]
    check_decoder(decode_batch, unhex(case["encoded"]), items)


@pytest.mark.parametrize("kind", [None, SysFlag.ZLIB, SysFlag.LZ4, SysFlag.ZSTD])
@in_one_test("case", BATCHES)
def test_inner_batches(case, kind):
    body, flags = unhex(case["encoded"]), int(SysFlag.NEED_UNWRAP | SysFlag.INNER_BATCH)
    if kind and body:
        body, flags = compress(body, kind), flags | kind | SysFlag.COMPRESSED
    count = f"INNER_NUM\x01{case['inner_count']}\x02"
    outer = store("T", body, count, queue_offset=case["inner_base_offset"], sys_flag=flags, queue_id=3)
    found = decode_messages(outer, "b")
    assert [
        {"queue_offset": m.queue_offset, "flag": m.flag, "body": m.body.hex(), "properties": m.properties}
        for m in found
    ] == case["unwrapped_from_inner_batch"]
    assert len(found) == case["inner_count"]
    assert {(m.topic, m.queue_id, m.broker_name) for m in found} <= {("T", 3, "b")}


def test_a_batch_flag_alone_unwraps_nothing():
    for flag in (SysFlag.NEED_UNWRAP, SysFlag.INNER_BATCH):
        (message,) = decode_messages(store("T", b"plain", sys_flag=flag))
        assert message.body == b"plain"


@given(st.lists(strategies.batch_items(), max_size=5))
def test_batches_there_and_back(items):
    check_decoder(decode_batch, encode_batch(items), items)


def test_what_does_not_fit_a_batch_is_refused():
    for item in (BatchItem(b"", "x" * 40_000), BatchItem(b"", "\ud800"), BatchItem(b"", "", 1 << 31)):
        with pytest.raises(MessageRefused, match=r"Message 1 of a batch: .* does not fit the layout of a batch"):
            encode_batch([BatchItem(b"good"), item])


@pytest.mark.parametrize(
    "data",
    [
        b"\x00",
        bytes(21),
        bytes(16) + b"\x00\x00\x00\x01" + bytes(2),
        bytes(16) + b"\xff\xff\xff\xff" + bytes(2),
        bytes(20) + b"\x00\x01",
        bytes(20) + b"\xff\xff",
    ],
)
def test_malformed_batches(data):
    with pytest.raises(DecodeError, match="Item 0"):
        decode_batch(data)


def test_announced_sizes_of_items_do_not_count():
    assert decode_batch(b"\xff\xff\xff\xff" + bytes(18)) == [BatchItem(b"")]


def test_a_malformed_inner_batch_is_refused():
    with pytest.raises(DecodeError, match="Item 0 of a batch"):
        decode_messages(store("T", b"no batch", sys_flag=SysFlag.NEED_UNWRAP | SysFlag.INNER_BATCH))


def test_bodies_that_are_not_what_their_flag_says():
    poison = store("T", b"not compressed", sys_flag=SysFlag.COMPRESSED)
    data = store("T", b"before") + poison + store("T", b"after")
    with pytest.raises(DecodeError, match=rf"byte {len(store('T', b'before'))} of an answer: Not a zlib body"):
        decode_messages(data)
    bodies = [
        outcome(lambda _, s=s, e=e: decode_at(data, s, e, DecodeSettings(""))[0].body, b"") for s, e in boundaries(data)
    ]
    assert bodies == [b"before", DecodeError, b"after"]
    with pytest.raises(DecodeError, match="Unknown compression type 0x700"):
        decode_messages(store("T", b"x", sys_flag=0x701))


def test_a_body_larger_than_allowed_when_decompressed():
    data = store("T", compress(bytes(1000)), sys_flag=SysFlag.COMPRESSED)
    assert decode_messages(data, max_body_bytes=1000)[0].body == bytes(1000)
    with pytest.raises(DecodeError, match="larger than 999"):
        decode_messages(data, max_body_bytes=999)


def test_crc_is_checked_on_demand():
    data = bytearray(store("T", b"content"))
    data[8:12] = b"\x00\x00\x00\x01"
    assert decode_messages(bytes(data))[0].body == b"content"
    with pytest.raises(DecodeError, match="CRC"):
        decode_messages(bytes(data), check_crc=True)


@in_one_test("case", vectors("crc"))
def test_crc(case):
    data = unhex(case["data"])
    assert messages.body_crc(data) == case["crc"]
    if case["crc_property"] is not None:
        assert messages.crc_property(messages.body_crc(data)).encode().hex() == case["crc_property"]


@pytest.mark.parametrize("size", [-1, 0, 3, 90, 1 << 30])
def test_sizes_that_lead_nowhere(size):
    good = store("T", b"content")
    data = good + size.to_bytes(4, "big", signed=True) + bytes(100)
    found = []
    with pytest.raises(DecodeError, match=f"{size} bytes at byte {len(good)}"):
        found.extend(boundaries(data))
    assert list(boundaries(good)) == [(0, len(good))]


def test_lengths_inside_that_do_not_add_up():
    data = bytearray(store("T", b"content", "a\x01b\x02"))
    for at in (*range(84, 88), 95, 97, 98):
        broken = bytes(data[:at]) + bytes([data[at] ^ 0x80]) + bytes(data[at + 1 :])
        with pytest.raises(DecodeError, match="byte 0 of an answer"):
            decode_messages(broken)


def test_other_encodings_of_text_do_not_stop_readers():
    data = store("T", b"", "name\x01value\x02").replace(b"value", b"\xd6\xd0\xce\xc4!")
    (message,) = decode_messages(data)
    assert "\ufffd" in message.properties["name"]


def test_a_view_is_as_good_as_bytes():
    data = store("T", b"content") * 3
    assert decode_messages(memoryview(data)) == decode_messages(data)
    assert all(type(message.body) is bytes for message in decode_messages(memoryview(data)))


@pytest.mark.parametrize("v6", [(), ("born",), ("stored",), ("born", "stored")])
def test_when_a_message_was_stored_is_known_without_decoding_it(v6):
    hosts = {name: (b"\x01" * (16 if name in v6 else 4), 7) for name in ("born", "stored")}
    whole = store("t", b"no zlib", queue_offset=9, store_ms=777, sys_flag=SysFlag.COMPRESSED, **hosts)
    assert first_stamp(whole + b"more") == (9, 777, False)
    assert first_stamp(store("t", b"x", queue_offset=9, store_ms=777, sys_flag=SysFlag.INNER_BATCH)) == (9, 777, True)
    for cut in (0, 40, 80):
        assert first_stamp(whole[:cut]) is None
    assert first_stamp(whole[:4] + b"\0\0\0\0" + whole[8:]) is None


def test_messages_read_from_a_queue_are_labelled_with_that_queue():
    """A consumer knows its queue by the user's name, and what cannot be decoded says nothing."""
    queue = MessageQueue("t", "b", 3)
    good = store("ns%t", b"x", queue_id=1)
    found = list(decode_leniently(good + b"\0" * 100, "b", queue=queue))
    assert [(m.topic, m.queue, m.decode_error is None) for m in found] == [("t", queue, True), ("t", queue, False)]


class Counted:
    """Counts how often a size is read."""

    size, reads = 4, 0

    def unpack_from(self, data: bytes, at: int) -> tuple[int]:
        self.reads += 1
        return struct.unpack_from(">i", data, at)


def test_apparent_messages_behind_a_bad_one_are_followed_once(monkeypatch):
    """Each of them leads to the next, and the last to nowhere: followed anew from each, that is a minute for 4 MiB."""
    seeming = store("T", b"")
    data = bytes(8) + 2000 * seeming + bytes(3)
    monkeypatch.setattr(messages, "_INT", counted := Counted())
    (raw,) = decode_leniently(data)
    assert raw.body == data
    assert raw.decode_error is not None
    assert 2000 <= counted.reads < 2 * 2000 + 10


@given(
    st.lists(st.sampled_from([store("T", b"x"), store("T", b""), b"\0", b"\xda\xa3\x20\xa7", bytes(90)]), max_size=8)
)
def test_reading_resumes_where_messages_follow_to_the_end(parts):
    data = bytes(4) + b"".join(parts)

    def leads_to_the_end(start: int) -> bool:
        try:
            return data[start + 4 : start + 8] == store("T", b"")[4:8] and bool(list(boundaries(data[start:])))
        except DecodeError:
            return False

    expected = next((start for start in range(1, len(data)) if leads_to_the_end(start)), len(data))
    first, *others = decode_leniently(data)
    assert len(first.body) == expected
    assert len(others) == len(list(boundaries(data[expected:])))


def test_portion_ends_when_large_and_has_at_least_one_message() -> None:
    small, large = (received(body) for body in (b"x", b"x" * (PORTION_BYTES + 1)))
    assert first_portion(iter([])) == ([], None)
    assert first_portion(iter([large, small, small])) == ([large], small)
    assert first_portion(iter([small, large, small])) == ([small, large], small)
    many = [small] * 200_000
    found, left = first_portion(iter(many))
    assert (100_000 < len(found) < 140_000, left) == (True, small), "an object has a size, too"


def received(body: bytes) -> ReceivedMessage:
    queue = MessageQueue("t", "b", 0)
    return ReceivedMessage("t", queue, 0, 0, body, {}, 0, 0, 0, 0, "", "", 0, 0, 0, "")


def test_large_inner_batch_is_unpacked_one_by_one_or_not_at_all() -> None:
    """5.7 KB, compressed, may be three million messages."""
    items = [BatchItem(b"x" * 10, "", i) for i in range(60_000)]
    for batch, good in ((encode_batch(items), True), (encode_batch(items)[:-1], False)):
        stored = store("t", batch, queue_offset=7, sys_flag=SysFlag.NEED_UNWRAP | SysFlag.INNER_BATCH)
        messages = decode_leniently(stored)
        first = next(messages)
        if not good:
            assert first.decode_error is not None
            assert list(messages) == []
            continue
        assert (first.queue_offset, first.body) == (7, b"x" * 10)
        tracemalloc.start()
        count = sum(1 for _ in messages)
        size = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert count == 59_999
        assert size < 2_000_000
