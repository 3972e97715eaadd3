"""Message ids and recall handles against Java's, and the uniqueness of our own ids."""

import os
import random
from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.errors import LocalProtocolError
from rocketmq_spark.wire.identifiers import OffsetMessageId, RecallHandle, UniqKey, UniqKeys, host_text
from tests import strategies
from tests.harness import unhex, vectors

NOON = int(datetime(2024, 2, 10, 12).timestamp() * 1000)


@pytest.mark.parametrize("case", vectors("offset_msg_ids"), ids=lambda case: case["offset_msg_id"])
def test_offset_message_ids(case):
    found = OffsetMessageId.parse(case["offset_msg_id"])
    assert (found.address.hex(), found.port, found.offset) == (case["address"], case["port"], case["offset"])
    assert str(found) == case["offset_msg_id"]
    assert OffsetMessageId.parse(case["offset_msg_id"].lower()) == found
    assert found.host == host_text(unhex(case["address"]), case["port"])


@pytest.mark.parametrize("text", ["", "0", "7F", "x" * 32, "7F000001" * 3, "7F000001" * 5, "\u0661" * 32, "7F" * 24])
def test_other_texts_are_no_ids(text):
    for kind in (OffsetMessageId, UniqKey):
        with pytest.raises(LocalProtocolError, match="hexadecimal"):
            kind.parse(text)


def test_host_texts():
    assert host_text(bytes([10, 0, 0, 255]), 10911) == "10.0.0.255:10911"
    assert host_text(bytes(15) + b"\x01", 1) == "[::1]:1"


@pytest.mark.parametrize("case", vectors("uniq_keys"), ids=lambda case: case["uniq_key"])
def test_uniq_keys(case):
    found = UniqKey.parse(case["uniq_key"])
    assert found.address.hex() == case["ip"]
    assert found.pid == case["pid"]
    assert host_text(found.address, 0).startswith(("[", case["ip_text"]))
    assert str(found) == case["uniq_key"]


def test_our_keys_have_javas_layout():
    keys = UniqKeys(random.Random(1), address=bytes([10, 1, 2, 3]))
    first, second = UniqKey.parse(keys.next(NOON)), UniqKey.parse(keys.next(NOON + 5))
    assert first.address == bytes([10, 1, 2, 3])
    assert first.pid == os.getpid() & 0xFFFF
    assert first.month_ms == (9 * 24 + 12) * 3_600_000
    assert second.month_ms == first.month_ms + 5
    assert (second.counter - first.counter) % 65536 == 1
    assert len(str(first)) == 32
    assert len(UniqKeys(address=bytes(16)).next(NOON)) == 56


def test_time_of_a_key_across_months():
    keys = UniqKeys(random.Random(1))
    for moment in (
        datetime(2024, 12, 31, 23, 59, 59),
        datetime(2025, 1, 1),
        datetime(2024, 1, 1),
        datetime(2024, 3, 5),
    ):
        begin = moment.replace(day=1, hour=0, minute=0, second=0)
        assert UniqKey.parse(keys.next(int(moment.timestamp() * 1000))).month_ms == round(
            (moment.timestamp() - begin.timestamp()) * 1000
        )


def test_more_keys_than_the_counter_has():
    keys = UniqKeys(random.Random(2))
    assert len({*keys.next_many(150_000, NOON), *keys.next_many(150_000, NOON)}) == 300_000


def test_two_sources_do_not_meet():
    assert not set(UniqKeys().next_many(1000, NOON)) & set(UniqKeys().next_many(1000, NOON))


def test_a_forked_child_makes_other_keys(monkeypatch):
    keys = UniqKeys(address=bytes(4))
    parent = UniqKey.parse(keys.next(NOON))
    monkeypatch.setattr(os, "getpid", lambda: parent.pid + 1)
    child = UniqKey.parse(keys.next(NOON))
    assert child.pid == (parent.pid + 1) & 0xFFFF
    assert child.loader != parent.loader
    assert UniqKey.parse(keys.next(NOON)).loader == child.loader


@pytest.mark.parametrize("case", vectors("recall_handles"), ids=lambda case: case["handle"])
def test_recall_handles(case):
    handle = RecallHandle(case["topic"], case["broker_name"], int(case["timestamp"]), case["message_id"])
    assert str(handle) == case["handle"]
    assert RecallHandle.parse(case["handle"]) == handle


@given(strategies.names, strategies.names, st.integers(0), strategies.names)
def test_recall_handles_there_and_back(topic, broker, deliver_ms, message_id):
    handle = RecallHandle(topic, broker, deliver_ms, message_id)
    assert RecallHandle.parse(str(handle)) == handle


@pytest.mark.parametrize(
    "text",
    ["", "!!", "djEg", "djEgYSBiIGMgZA==", "djIgYSBiIDEgZA==", "/w==", "djEgYSBiIDEgZA", "djEgYSBi!IDEgZA==", "\u00e9"],
)
def test_other_texts_are_no_handles(text):
    with pytest.raises(LocalProtocolError, match="recall handle"):
        RecallHandle.parse(text)


@given(st.text(max_size=40))
def test_any_text_is_a_handle_or_refused(text):
    for parse in (RecallHandle.parse, OffsetMessageId.parse, UniqKey.parse):
        try:
            parse(text)
        except LocalProtocolError:
            pass
