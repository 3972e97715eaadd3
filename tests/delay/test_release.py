"""What comes out of an envelope."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rocketmq_spark.base import codes
from rocketmq_spark.base.codes import RESERVED_PROPERTIES
from rocketmq_spark.delay import release
from rocketmq_spark.delay.release import (
    DEAD_TOPIC,
    PROBLEM_PROPERTY,
    SINK_SCHEMA,
    SinkRow,
    sink_row,
    without_duplicates,
)
from rocketmq_spark.errors import DecodeError, MessageRefused
from rocketmq_spark.wire.envelope import QUEUE, DecodedEnvelope, Envelope, cancel_envelope
from rocketmq_spark.wire.properties import decode_properties, encode_properties

PROPERTIES = (
    "UNIQ_KEY\x01ID\x02KEYS\x01k1 k2\x02TAGS\x01paid\x02__SHARDINGKEY\x01u-7\x02"
    "WAIT\x01true\x02region\x01eu\x02名\x01名\x02"
)


def test_the_original_has_all_that_its_sender_gave_it() -> None:
    body = Envelope("orders", 1, "ID", 2, 9, PROPERTIES, b"x").pack()
    expected = SinkRow("orders", b"x", "paid", "k1 k2", 9, "u-7", {"region": "eu", "名": "名"}, "ID")
    assert sink_row(body) == expected


def test_what_it_had_not_is_null_but_for_an_id_that_stays() -> None:
    found = sink_row(Envelope("orders", 1, "", 2, 0, "", b"x").pack())
    assert found == SinkRow("orders", b"x", None, None, 0, None, {}, "1DC79179E5710EE3B12E08CBF3F4882E")
    assert sink_row(Envelope("orders", 1, "", 3, 0, "", b"x").pack()).msg_id != found.msg_id


def test_no_property_of_rocketmqs_own_comes_out_as_the_users() -> None:
    text = "".join(f"{name}\x01v\x02" for name in RESERVED_PROPERTIES)
    assert sink_row(Envelope("orders", 1, "", 2, 0, text, b"x").pack()).properties == {}


@pytest.mark.parametrize("topic", [DEAD_TOPIC, "mine"])
def test_what_is_no_envelope_is_a_dead_letter_with_the_reason(topic: str) -> None:
    found = sink_row(b"hello", topic)
    assert (found.topic, found.body, len(found.msg_id)) == (topic, b"hello", 32)
    assert "no envelope of a delayed message" in found.properties[PROBLEM_PROPERTY]


def test_a_message_that_came_twice_counts_once_and_order_stays() -> None:
    first, again, other = (
        Envelope("orders", 5, id_, born, 0, "", b"x").pack() for id_, born in (("a", 1), ("a", 2), ("b", 1))
    )
    assert list(without_duplicates([b"b", first, b"a", b"b", again, other, b"a"])) == [b"b", first, b"a", other]


def test_what_is_taken_back_does_not_come_out() -> None:
    one, other = (Envelope("orders", 5, id_, 1, 0, "", b"x").pack() for id_ in "ab")
    assert list(without_duplicates([one, other, cancel_envelope("orders", 5, "a", 3)])) == [other]
    assert list(without_duplicates([one, cancel_envelope("orders", 6, "a", 3)])) == [one]
    newer = cancel_envelope("orders", 5, "a", 3).replace(b"RDMQ\1", b"RDMQ\2")
    assert list(without_duplicates([one, newer])) == [one, newer]


def test_the_schema_names_the_fields_in_their_order() -> None:
    names = [part.split()[0].lower() for part in SINK_SCHEMA.split(", ")]
    assert names == [name.replace("_", "") for name in SinkRow._fields]


_NAMES = st.sampled_from(["TAGS", "UNIQ_KEY", "a", "b", "DELAY", QUEUE, "é", ""])
_TEXTS = st.lists(
    st.tuples(_NAMES, st.text("xé\x01", max_size=3), st.sampled_from(["\x02", "\x02", "\x02", "\x02\x02", ""]))
)


@given(_TEXTS, st.booleans())
@example([("a", "x", "\x02\x02"), ("b", "x", "")], False)  # as many ends as pairs, and none at the end
@example([("a", "x", "\x02"), ("b", "x\x01", "\x02\x02")], False)
@example([("a", "x", "\x02\x02")], False)
@example([("a", "x", "\x02"), (QUEUE, "b:1", "\x02"), ("DELAY", "1", "\x02")], False)
@example([("a", "é" * 20_000, "\x02")], False)
def test_original_keeps_properties_as_if_encoded_anew(parts: list[tuple[str, str, str]], long: bool) -> None:
    text = "".join(f"{name}\x01{value}{end}" for name, value, end in parts)
    text += f"z\x01{'y' * codes.MAX_PROPERTIES_BYTES}\x02" if long else ""
    read = {
        n: v
        for n, v in decode_properties(text).items()
        if n in release._DELIVERED_PROPERTIES or n not in release._INTERNAL_PROPERTIES
    }
    opened = DecodedEnvelope("t", 0, b"", 0, 0, text, b"x", 0)
    try:
        expected = encode_properties(read, codes.MAX_PROPERTIES_BYTES - codes.BROKER_PROPERTIES_RESERVE)
    except MessageRefused as refused:
        with pytest.raises(DecodeError, match=re.escape(refused.message[:100])):
            release.original(opened)
        return
    found = release.original(opened)
    assert (found.properties, found.encoded_properties) == (read, expected)
