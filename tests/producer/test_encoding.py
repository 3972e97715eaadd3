from __future__ import annotations

import array
import math
import random
import zlib
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from rocketmq_spark.client.sender import ItemEncoder
from rocketmq_spark.errors import MessageRefused
from rocketmq_spark.model import Message
from rocketmq_spark.options.transport import FEATURES, GRPC
from rocketmq_spark.producer.accumulator import BatchEntry, BatchKey, MessageBatch
from rocketmq_spark.producer.encoding import (
    How,
    accumulated_batch,
    batch_item,
    batch_request,
    explicit_batch,
    prepare,
    single_request,
)
from rocketmq_spark.producer.settings import ProducerSettings
from rocketmq_spark.wire.messages import BatchItem, decode_batch
from rocketmq_spark.wire.properties import decode_properties

SETTINGS = ProducerSettings(group="g")
ITEMS = ItemEncoder()


def properties_of(message: Message, **how: Any) -> dict[str, str]:
    return dict(decode_properties(prepare(message, "ID", SETTINGS, How(**how)).properties))


@pytest.mark.parametrize(
    ("topic", "text"),
    [
        ("", "topic is blank"),
        ("  ", "topic is blank"),
        (None, "topic is blank"),
        ("a b", "illegal characters"),
        ("тема", "illegal characters"),
        ("t" * 128, "longer than topic max length: 127"),
        ("SCHEDULE_TOPIC_XXXX", "is forbidden"),
        ("RMQ_SYS_TRANS_HALF_TOPIC", "is forbidden"),
        ("OFFSET_MOVED_EVENT", "is forbidden"),
    ],
)
def test_topic_that_no_broker_takes(topic: Any, text: str) -> None:
    with pytest.raises(MessageRefused, match=text):
        prepare(Message(topic, b"x"), "ID", SETTINGS)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (None, "the message body is null"),
        (b"", "body length is zero"),
        ("text", "body is str; expected bytes"),
        (b"x" * 101, "MAX: 100, it has 101 bytes"),
    ],
)
def test_body_that_no_broker_takes(body: Any, text: str) -> None:
    with pytest.raises(MessageRefused, match=text):
        prepare(Message("T", body), "ID", ProducerSettings(group="g", max_message_size=100))


def test_the_largest_body_is_taken_and_views_are_too() -> None:
    prepare(Message("T" * 127, b"x" * 4194304), "ID", SETTINGS)
    prepared = prepare(Message("T", memoryview(b"abc")), "ID", SETTINGS)  # type: ignore[arg-type]
    assert single_request(prepared, SETTINGS, 1).body == b"abc"


def test_properties_of_a_message() -> None:
    message = Message("T", b"x", tags="vip", keys=["k1", "k2"], properties={"own": "1"}, wait_store_ok=False)
    assert properties_of(message) == {
        "KEYS": "k1 k2", "TAGS": "vip", "own": "1", "WAIT": "false", "UNIQ_KEY": "ID",
    }  # fmt: skip
    assert properties_of(Message("T", b"x"))["WAIT"] == "true"
    assert message.properties == {"own": "1"}


@pytest.mark.parametrize("name", ["KEYS", "UNIQ_KEY", "DELAY", "TIMER_DELAY_MS", "PGROUP", "INNER_NUM", "WAIT"])
def test_reserved_names_are_refused(name: str) -> None:
    with pytest.raises(MessageRefused, match=f"Property {name} belongs to RocketMQ"):
        prepare(Message("T", b"x", properties={name: "1"}), "ID", SETTINGS)


@pytest.mark.parametrize("properties", [{"a\x01": "b"}, {"a": "b\x02"}, {"": "b"}, {"a": "x" * 33_000}])
def test_properties_that_would_be_torn_apart_or_are_too_long(properties: dict[str, str]) -> None:
    with pytest.raises(MessageRefused) as e:
        prepare(Message("T", b"x", properties=properties), "ID", SETTINGS)
    assert e.value.topic == "T"


def test_a_priority_goes_over_grpc_only() -> None:
    proxied = ProducerSettings(group="g", features=FEATURES[GRPC])
    prepared = prepare(Message("T", b"x", priority=7), "ID", proxied)
    assert decode_properties(prepared.properties)["_SYS_MSG_PRIORITY_"] == "7"
    with pytest.raises(MessageRefused, match="priority is -1; expected a whole number"):
        prepare(Message("T", b"x", priority=-1), "ID", proxied)
    for wrong in (2**31, 2**32 + 1, 1.5, True, "1"):
        with pytest.raises(MessageRefused, match="a whole number from 0 to 2147483647"):
            prepare(Message("T", b"x", priority=wrong), "ID", proxied)  # type: ignore[arg-type]
    with pytest.raises(MessageRefused, match="transport=grpc"):
        prepare(Message("T", b"x", priority=0), "ID", SETTINGS)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (Message("T", b"x", properties={"a": "b", "p": "a\nb"}), "property 'p' has the control character '\\\\n'"),
        (Message("T", b"x", properties={"a\x85": "b"}), "control character '\\\\x85'"),
        (Message("T", b"x", keys=["k\t"]), "property 'KEYS'"),
        (Message("T", b"x", tags="a|b"), "accepts no tag with '|'"),
    ],
)
def test_message_proxy_would_refuse_is_refused_before_batching(message, said) -> None:
    with pytest.raises(MessageRefused, match=said.replace("|", "[|]")) as e:
        prepare(message, "ID", ProducerSettings(group="g", features=FEATURES[GRPC]))
    assert e.value.topic == "T"
    assert prepare(message, "ID", SETTINGS), "brokers take it"


def test_room_is_left_for_what_the_broker_adds() -> None:
    assert prepare(Message("T", b"x", properties={"a": "x" * 32_450}), "I", SETTINGS)
    with pytest.raises(MessageRefused, match="exceed"):
        prepare(Message("T", b"x", properties={"a": "x" * 32_560}), "I", SETTINGS)


def test_delay_levels_and_timers_become_properties() -> None:
    message = Message("T", b"x")
    assert properties_of(message, delay_level=3)["DELAY"] == "3"
    assert "DELAY" not in properties_of(message, delay_level=0)
    assert properties_of(message, delay=1.5)["TIMER_DELAY_MS"] == "1500"
    assert properties_of(message, delay=timedelta(minutes=1))["TIMER_DELAY_MS"] == "60000"
    assert properties_of(message, deliver_at=1_700_000_000_000)["TIMER_DELIVER_MS"] == "1700000000000"
    moment = datetime(2026, 1, 1, tzinfo=UTC)
    assert properties_of(message, deliver_at=moment)["TIMER_DELIVER_MS"] == "1767225600000"
    assert prepare(message, "ID", SETTINGS, How(delay=1)).delayed
    assert not prepare(message, "ID", SETTINGS, How(delay=0, queue=None)).delayed


@pytest.mark.parametrize(
    "how",
    [
        {"delay_level": -1}, {"delay_level": True}, {"delay_level": "3"}, {"delay": -1}, {"delay": "3s"},
        {"deliver_at": 0}, {"deliver_at": "now"}, {"deliver_at": 1.5}, {"delay_level": 1, "delay": 1},
        # Brokers add the time to a delay, and what overflows is due at once.
        {"delay": math.inf}, {"delay": math.nan}, {"delay": (1 << 63) / 1000 - 1}, {"deliver_at": 1 << 63},
    ],
)  # fmt: skip
def test_delays_that_mean_nothing(how: Any) -> None:
    with pytest.raises(MessageRefused, match=r"delay|deliver_at"):
        properties_of(Message("T", b"x"), **how)


def test_bodies_are_compressed_from_the_limit_on() -> None:
    for size, compressed in ((4095, False), (4096, True)):
        request = single_request(prepare(Message("T", b"x" * size, flag=9), "ID", SETTINGS), SETTINGS, 77)
        assert (request.sys_flag, request.flag, request.born_timestamp_ms) == (0x301 if compressed else 0, 9, 77)
        assert (zlib.decompress(request.body) if compressed else request.body) == b"x" * size
        if compressed:
            assert request.body == zlib.compress(b"x" * size, 5)


@pytest.mark.parametrize(("kind", "flag"), [("none", 0), ("lz4", 0x101), ("zstd", 0x201)])
def test_other_compressions(kind: str, flag: int) -> None:
    settings = ProducerSettings(group="g", compression=kind, compress_above=1)
    assert single_request(prepare(Message("T", b"xyz" * 99), "ID", settings), settings, 0).sys_flag == flag


def test_the_last_byte_of_a_body() -> None:
    settings = ProducerSettings(group="g", max_message_size=10)
    assert prepare(Message("T", b"x" * 10), "ID", settings).message.body == b"x" * 10
    with pytest.raises(MessageRefused, match="MAX: 10, it has 11 bytes"):
        prepare(Message("T", b"x" * 11), "ID", settings)


def test_batch_may_have_as_many_bytes_as_a_message() -> None:
    size = len(batch_of(Message("T", b"x" * 10), Message("T", b"y")).body)
    assert len(batch_of(Message("T", b"x" * 10), Message("T", b"y"), max_message_size=size).body) == size
    with pytest.raises(MessageRefused, match=f"the encoded batch has {size} bytes, more than the {size - 1} allowed"):
        batch_of(Message("T", b"x" * 10), Message("T", b"y"), max_message_size=size - 1)


@pytest.mark.parametrize("kind", ["zlib", "lz4", "zstd"])
def test_body_that_compression_makes_larger_is_sent_plain(kind: str) -> None:
    settings = ProducerSettings(group="g", compression=kind, compress_above=1)
    body = random.Random(0).randbytes(5000)
    request = single_request(prepare(Message("T", body), "ID", settings), settings, 0)
    assert (request.body, request.sys_flag) == (body, 0)


def test_bodies_are_bytes_whatever_the_items_of_a_view() -> None:
    words = memoryview(array.array("I", [1, 2, 3]))
    small = ProducerSettings(group="g", max_message_size=11)
    for view in (words, memoryview(b"abcdef")[::2], memoryview(bytearray(b"xy"))):
        prepared = prepare(Message("T", view), "ID", SETTINGS)  # type: ignore[arg-type]
        assert single_request(prepared, SETTINGS, 0).body == view.tobytes()
        (item,) = decode_batch(batch_item(prepared, ITEMS, 5))
        assert item.body == view.tobytes()
    with pytest.raises(MessageRefused, match="it has 12 bytes"):
        prepare(Message("T", words), "ID", small)  # type: ignore[arg-type]


def test_empty_properties_are_refused_by_name() -> None:
    with pytest.raises(MessageRefused, match="Property 'b' is empty, and brokers drop empty properties") as e:
        prepare(Message("T", b"x", properties={"a": "1", "b": ""}), "ID", SETTINGS)
    assert e.value.topic == "T"


def test_a_batch_item_equals_the_contracts_bytes() -> None:
    prepared = prepare(Message("T", b"1"), "ID", SETTINGS)
    (item,) = decode_batch(batch_item(prepared, ITEMS, 5))
    assert item == BatchItem(b"1", prepared.properties, 0)


def batch_of(*messages: Message, **settings: Any) -> Any:
    chosen = ProducerSettings(group="g", **settings)
    return explicit_batch([prepare(m, f"ID{i}", chosen) for i, m in enumerate(messages)], "BATCH", chosen, 5, ITEMS)


def test_an_explicit_batch_keeps_its_messages_as_they_are() -> None:
    request = batch_of(Message("T", b"1", tags="A"), Message("T", b"22" * 3000, tags="B", flag=2))
    assert (request.batch, request.sys_flag, request.group) == (True, 0, "g")
    assert decode_properties(request.properties) == {"WAIT": "true", "UNIQ_KEY": "BATCH"}
    items = decode_batch(request.body)
    assert [bytes(item.body) for item in items] == [b"1", b"22" * 3000]
    assert [decode_properties(item.properties)["TAGS"] for item in items] == ["A", "B"]
    assert [decode_properties(item.properties)["UNIQ_KEY"] for item in items] == ["ID0", "ID1"]


def test_what_an_explicit_batch_may_not_be() -> None:
    for messages, text in (
        ((), "has no messages"),
        ((Message("%RETRY%g", b"1"),), "Retry Group is not supported"),
        ((Message("T", b"1"), Message("U", b"1")), "topic of the messages in one batch should be the same"),
        ((Message("T", b"1"), Message("T", b"1", wait_store_ok=False)), "waitStoreMsgOK .* should be the same"),
    ):
        with pytest.raises(MessageRefused, match=text):
            batch_of(*messages)
    for how in (How(delay_level=1), How(delay=1), How(deliver_at=1_700_000_000_000)):
        delayed = prepare(Message("T", b"1"), "ID", SETTINGS, how)
        with pytest.raises(MessageRefused, match="not supported for batching"):
            explicit_batch([delayed], "BATCH", SETTINGS, 0, ITEMS)
    fits = prepare(Message("T", b"1"), "ID", SETTINGS)
    with pytest.raises(MessageRefused, match=r"Message 1 of a batch: .* does not fit"):
        explicit_batch([fits, fits._replace(properties="x" * 40_000)], "BATCH", SETTINGS, 0, ITEMS)
    with pytest.raises(MessageRefused, match="more than the 100 allowed"):
        batch_of(Message("T", b"1" * 60), Message("T", b"1" * 60), max_message_size=100)


def test_an_accumulated_batch_has_one_tag_one_id_and_all_keys() -> None:
    batch = MessageBatch(BatchKey("T", None, False, "vip", True), None, 0, 10)
    for name, keys in (("A", ("k1", "k2")), ("B", ("k2", "k3"))):
        prepared = prepare(Message("T", b"x", keys=keys), name, SETTINGS)
        assert batch.add(BatchEntry(batch_item(prepared, ITEMS, 5), 1, name, keys, None), 1 << 20)
    request = accumulated_batch(batch, "BATCH", SETTINGS, 5, ITEMS)
    assert decode_properties(request.properties) == {
        "WAIT": "false", "UNIQ_KEY": "BATCH", "TAGS": "vip", "KEYS": "k1 k2 k3",
    }  # fmt: skip
    ids = [decode_properties(item.properties)["UNIQ_KEY"] for item in decode_batch(request.body)]
    assert (ids, request.batch) == (["A", "B"], True)


def test_items_that_are_encoded_already_are_sent_as_they_are() -> None:
    for body, properties in ((b"items" * 2000, {}), (memoryview(b"items"), {"a": "b"})):
        request = batch_request(body, properties, SETTINGS, 3)
        assert (request.body, request.batch, request.sys_flag, request.born_timestamp_ms) == (body, True, 0, 3)
        assert (decode_properties(request.properties), request.group) == (properties, "g")
