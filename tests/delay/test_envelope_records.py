"""Envelopes as records, and what is sent of them."""

from __future__ import annotations

import dataclasses
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.base.codes import SysFlag
from rocketmq_spark.delay import envelope_records
from rocketmq_spark.delay.release import DEAD_TOPIC, PROBLEM_PROPERTY, sink_row
from rocketmq_spark.model import MessageQueue, Resent
from rocketmq_spark.producer.settings import ProducerSettings
from rocketmq_spark.spool.records import Record, due_ms_of_identity
from rocketmq_spark.wire.envelope import QUEUE, Envelope, cancel_envelope
from rocketmq_spark.wire.properties import decode_properties

INNER = MessageQueue("dmq_inner_topic", "broker-a", 3)
PROPERTIES = (
    "UNIQ_KEY\x01ID\x02KEYS\x01k1 k2\x02TAGS\x01paid\x02__SHARDINGKEY\x01u-7\x02WAIT\x01true\x02region\x01eu\x02"
)
ORDER = Envelope("orders", 5000, "ID", 1000, 7, PROPERTIES, b"body")
RULES = envelope_records.DeliveryRules(ProducerSettings(group="g"), DEAD_TOPIC)
SEND = envelope_records.send_decoder(RULES)


def record(envelope: Envelope, offset: int = 9) -> Record:
    found = envelope_records.effect_of(RULES, INNER, offset, envelope.pack(), 1)
    assert found.record is not None
    return found.record


def test_the_original_is_as_its_sender_made_it() -> None:
    send = SEND(record(ORDER))
    assert (send.topic, send.queue, send.msg_ids) == ("orders", None, ("ID",))
    request = send.request
    assert (request.body, request.flag, request.born_timestamp_ms, request.sys_flag) == (b"body", 7, 1000, 0)
    assert decode_properties(request.properties) == decode_properties(PROPERTIES)


def test_a_large_body_is_compressed_as_of_any_message() -> None:
    request = SEND(record(ORDER._replace(body=b"x" * 5000))).request
    assert (zlib.decompress(request.body), bool(request.sys_flag & SysFlag.COMPRESSED)) == (b"x" * 5000, True)


def test_chosen_queue_is_kept_and_its_property_is_dropped() -> None:
    send = SEND(record(ORDER._replace(properties=f"{PROPERTIES}{QUEUE}\x01broker:b:2\x02")))
    assert send.queue == MessageQueue("orders", "broker:b", 2)
    assert QUEUE not in decode_properties(send.request.properties)
    assert SEND(record(ORDER._replace(properties=f"{QUEUE}\x01nonsense\x02"))).queue is None


def test_what_is_sent_twice_has_one_first_mark_wherever_it_lies() -> None:
    first, again = record(ORDER, 9), record(ORDER._replace(born_ms=2000), 10)
    assert first.marks[0] == again.marks[0]
    assert record(ORDER._replace(due_ms=6000)).marks[0] != first.marks[0]
    assert due_ms_of_identity(first.marks[0][1]) == 5000


def test_the_due_time_is_absolute() -> None:
    found = [envelope_records.effect_of(RULES, INNER, 9, ORDER.pack(), now_ms).due_ms for now_ms in (1, 4000, 9000)]
    assert found == [5000] * 3


@given(st.integers(-(1 << 63), (1 << 63) - 1))
def test_any_due_time_can_be_kept(due_ms: int) -> None:
    found = envelope_records.effect_of(RULES, INNER, 9, ORDER._replace(due_ms=due_ms).pack(), 1)
    assert found.due_ms == max(0, due_ms)
    assert found.record is not None
    assert envelope_records.offset_and_due(found.record.marks[1][1]) == (9, found.due_ms)


@pytest.mark.parametrize("body", [b"hello", ORDER.pack()[:40], b"RDMQ\x02" + ORDER.pack()[5:]])
def test_invalid_envelope_becomes_dead_letter_with_reason(body: bytes) -> None:
    found = envelope_records.effect_of(RULES, INNER, 9, body, 1)
    assert (found.due_ms, found.cancelled_mark) == (0, None)
    assert found.record is not None
    send = SEND(found.record)
    assert (send.topic, send.request.body) == (DEAD_TOPIC, body)
    assert "envelope of a delayed message" in decode_properties(send.request.properties)[PROBLEM_PROPERTY]


def test_what_takes_back_names_the_mark() -> None:
    found = envelope_records.effect_of(RULES, INNER, 12, cancel_envelope("orders", 5000, "ID", 2000), 1)
    assert found == envelope_records.EnvelopeEffect(None, 5000, record(ORDER).marks[0])


def test_a_record_waits_for_whatever_takes_its_original() -> None:
    assert record(ORDER).target == "topic orders"
    assert record(ORDER._replace(properties=f"{QUEUE}\x01b:2\x02")).target == "broker b"
    assert dataclasses.replace(record(ORDER), target="").kind == envelope_records.DELAYED_KIND


HOSTILE = {
    "a retry topic": ORDER._replace(topic="%RETRY%billing"),
    "a dead letter topic": ORDER._replace(topic="%DLQ%billing"),
    "a system topic": ORDER._replace(topic="SCHEDULE_TOPIC_XXXX"),
    "a topic of 65,535 bytes": ORDER._replace(topic="t" * 65_535),
    "an illegal topic": ORDER._replace(topic="a b"),
    "no body": ORDER._replace(body=b""),
    "properties of 40,000 bytes": ORDER._replace(properties=f"a\x01{'x' * 40_000}\x02"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_what_no_producer_could_have_sent_is_a_dead_letter(what: str) -> None:
    """It is due at once: it waits for nothing that may come."""
    data = HOSTILE[what].pack()
    found = envelope_records.effect_of(RULES, INNER, 9, data, 1)
    assert (found.due_ms, found.cancelled_mark) == (0, None)
    assert found.record is not None
    assert found.record.target == f"topic {DEAD_TOPIC}"
    send = SEND(found.record)
    assert (send.topic, send.queue, zlib.decompress(send.request.body) if send.request.sys_flag else send.request.body) == (
        DEAD_TOPIC, None, data,
    )  # fmt: skip
    assert (
        "the message in this envelope is not delivered" in decode_properties(send.request.properties)[PROBLEM_PROPERTY]
    )
    row = sink_row(data)
    assert (row.topic, row.body, row.tags, row.keys) == (DEAD_TOPIC, data, None, None)
    assert len(row.properties[PROBLEM_PROPERTY]) < 1100


def test_an_empty_body_is_a_dead_letter_that_brokers_take() -> None:
    found = envelope_records.effect_of(RULES, INNER, 9, b"", 1)
    assert found.record is not None
    assert SEND(found.record).request.body == sink_row(b"").body == b"(empty)"


@pytest.mark.parametrize("number", ["9" * 5000, "-1", "1e3", str(1 << 40), "٣", ""])
def test_a_queue_that_is_none_is_any_queue(number: str) -> None:
    send = SEND(record(ORDER._replace(properties=f"{PROPERTIES}{QUEUE}\x01b:{number}\x02")))
    assert (send.topic, send.queue) == ("orders", None)
    assert QUEUE not in decode_properties(send.request.properties)


def test_only_topics_that_are_allowed_are_delivered_to() -> None:
    policy = envelope_records.redelivery_policy(
        envelope_records.DeliveryRules(ProducerSettings(group="g"), DEAD_TOPIC, ("ord*", "bills")), 64
    )
    to_some = policy.decoders[envelope_records.DELAYED_KIND]
    for topic, there in {"orders": "orders", "bills": "bills", "bills2": DEAD_TOPIC, "Orders": DEAD_TOPIC}.items():
        envelope = ORDER._replace(topic=topic)
        assert to_some(record(envelope)).topic == there
        assert sink_row(envelope.pack(), topics=("ord*", "bills")).topic == there


def test_original_message_is_sent_without_broker_instructions() -> None:
    mine = f"{PROPERTIES}DELAY\x013\x02REAL_TOPIC\x01secrets\x02TIMER_DELIVER_MS\x019\x02TRAN_MSG\x01true\x02PGROUP\x01p\x02"
    assert decode_properties(SEND(record(ORDER._replace(properties=mine))).request.properties) == decode_properties(
        PROPERTIES
    )
    assert sink_row(ORDER._replace(properties=mine).pack()).properties == {"region": "eu"}


def test_a_reason_in_a_file_has_no_control_characters() -> None:
    """Each attempt to send it failed with a traceback, and escape codes reached consumers of dead letters."""
    policy = envelope_records.redelivery_policy(RULES, 64)
    assert policy.dead_letters is not None
    dead = policy.dead_letters.create(record(ORDER), Resent(error="no route ? there"))
    assert dead is not None
    changed = dataclasses.replace(dead, payload=dead.payload.replace(b"no route ?", b"no\x01route \x1b"))
    sent = policy.decoders[envelope_records.DEAD_LETTER_KIND](changed)
    assert decode_properties(sent.request.properties)[PROBLEM_PROPERTY] == "no?route ? there"
