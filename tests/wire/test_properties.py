"""Property strings as Java writes and reads them, and what we refuse to write."""

import pytest
from hypothesis import given

from rocketmq_spark.base.codes import MAX_PROPERTIES_BYTES, RESERVED_PROPERTIES
from rocketmq_spark.errors import MessageRefused
from rocketmq_spark.model import Message
from rocketmq_spark.wire.properties import decode_properties, encode_properties, is_reserved, message_properties
from tests import strategies
from tests.harness import in_one_test, vectors

CASES = vectors("properties")


@in_one_test("case", CASES)
def test_reading_as_java(case):
    assert bytes.fromhex(case["encoded_utf8"]).decode() == case["encoded"]
    assert decode_properties(case["encoded"]) == case["decoded"]


WRITTEN = [case for case in CASES if case["properties"] is not None]


@in_one_test("case", WRITTEN)
def test_writing_as_java(case):
    pairs = {name: value for name, value in case["properties"].items() if value is not None}
    if "" in pairs or any(c in text for pair in pairs.items() for text in pair for c in "\x01\x02"):
        # Java writes these and reads something else back.
        with pytest.raises(MessageRefused):
            encode_properties(case["properties"])
    else:
        assert encode_properties(case["properties"]) == case["encoded"]


@given(strategies.properties)
def test_there_and_back(properties):
    assert decode_properties(encode_properties(properties)) == properties


@pytest.mark.parametrize("text", ["\x01", "\x02", "a\x01b", "a\x02", "\x02\x01"])
def test_separators_are_refused(text):
    for properties in ({"fine": "fine", "name": text}, {text: "value"}, {"x": None, text: "value"}):
        with pytest.raises(MessageRefused, match="separator"):
            encode_properties(properties)


def test_the_refusal_names_the_property():
    with pytest.raises(MessageRefused, match="'bad'"):
        encode_properties({"good": "x", "bad": "\x02", "also good": "y"})


def test_size_counts_bytes():
    value = "x" * (MAX_PROPERTIES_BYTES - 3)
    assert len(encode_properties({"a": value})) == MAX_PROPERTIES_BYTES
    with pytest.raises(MessageRefused, match="32768"):
        encode_properties({"a": value + "x"})
    assert encode_properties({"a": "\u00e9" * 5}, max_bytes=13)
    with pytest.raises(MessageRefused, match="13 bytes"):
        encode_properties({"a": "\u00e9" * 5}, max_bytes=12)
    with pytest.raises(MessageRefused, match="UTF-8"):
        encode_properties({"a": "\ud800"})


def test_properties_of_a_message():
    message = Message("T", b"", tags="red", keys=("k1", "k2"), properties={"amount": "5"})
    assert message_properties(message, UNIQ_KEY="id", WAIT=None) == {
        "KEYS": "k1 k2", "TAGS": "red", "amount": "5", "UNIQ_KEY": "id", "WAIT": None,
    }  # fmt: skip
    assert message_properties(Message("T", b"")) == {}


@pytest.mark.parametrize("keys", [["John Smith"], ("a", "b "), ["", " "]])
def test_key_with_a_blank_is_refused_but_a_text_of_keys_is_not(keys):
    with pytest.raises(MessageRefused, match="has a blank, and RocketMQ splits keys at blanks"):
        message_properties(Message("T", b"", keys=keys))
    assert message_properties(Message("T", b"", keys=" ".join(keys) + " k")) == {
        "KEYS": " ".join([*"".join(f"{key} " for key in keys).split(), "k"])
    }


@pytest.mark.parametrize("name", [*sorted(RESERVED_PROPERTIES), "__RMQ.TRANSIENT.NEW"])
def test_reserved_names_are_refused_from_users(name):
    assert is_reserved(name)
    with pytest.raises(MessageRefused, match="belongs to RocketMQ"):
        message_properties(Message("T", b"", properties={name: "x"}))


def test_users_names_are_free():
    assert not is_reserved("SPARK_ROW_ID")
    assert not is_reserved("keys")
