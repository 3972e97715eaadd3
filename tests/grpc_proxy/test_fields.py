"""Bytes of protobuf's fields, read back by protobuf itself."""

from __future__ import annotations

import pytest

from rocketmq_spark.grpc_proxy.protos import VARINTS, content_field, number_field, proto
from rocketmq_spark.grpc_proxy.tables import Code


@pytest.mark.parametrize("value", [0, 1, 127, 128, 300, (1 << 14) - 1, 1 << 14, (1 << 31) - 1])
def test_numbers(value):
    data = number_field("SystemProperties", "queue_id", value)
    assert proto("SystemProperties").FromString(data).queue_id == value
    assert data == proto("SystemProperties")(queue_id=value).SerializeToString()


def test_only_small_numbers_are_kept():
    before = len(VARINTS)
    assert VARINTS[(1 << 30) + 7] == VARINTS[(1 << 30) + 7]
    assert len(VARINTS) == before


def test_texts_bytes_and_messages_within_messages():
    status = number_field("Status", "code", Code.OK) + content_field("Status", "message", "fein ✓".encode())
    answer = proto("SendMessageResponse").FromString(content_field("SendMessageResponse", "status", status))
    assert (answer.status.code, answer.status.message) == (Code.OK, "fein ✓")


def test_a_field_that_is_in_no_row():
    with pytest.raises(ValueError, match="not enough values"):
        content_field("Status", "colour", b"")
