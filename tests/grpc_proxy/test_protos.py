"""Messages made of the table of facts, in a pool that nobody else sees."""

from __future__ import annotations

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.message import DecodeError

from rocketmq_spark.grpc_proxy.protos import get_ms, get_seconds, proto, set_ms, set_seconds
from rocketmq_spark.grpc_proxy.tables import FIELDS, PACKAGE


def test_every_message_of_field_table_exists_and_round_trips():
    for name in {field.message for field in FIELDS}:
        made = proto(name)
        assert {field.name for field in made.DESCRIPTOR.fields} == {f.name for f in FIELDS if f.message == name}
        assert made.FromString(made().SerializeToString()) == made()


def test_the_bytes_are_protobufs():
    """By hand: field 1 with a length, then a number."""
    assert proto("Address")(host="ab", port=5).SerializeToString() == b"\x0a\x02ab\x10\x05"
    assert proto("MessageQueue").FromString(b"\x2a\x02\x01\x63").accept_message_types == [1, 99]


def test_nothing_collides_with_another_librarys_definitions():
    """Another library registers the same names in the common pool, before or after ours."""
    proto("Resource")
    file = descriptor_pb2.FileDescriptorProto(name="definition.proto", package=PACKAGE, syntax="proto3")
    file.message_type.add(name="Resource").field.add(name="other", number=9, type=9, label=1)
    pool = descriptor_pool.Default()
    pool.Add(file)
    assert [field.name for field in pool.FindMessageTypeByName(f"{PACKAGE}.Resource").fields] == ["other"]
    assert "name" in proto("Resource").DESCRIPTOR.fields_by_name
    with pytest.raises(KeyError):
        pool.FindMessageTypeByName(f"{PACKAGE}.Settings")


@pytest.mark.parametrize("ms", [0, 1, 999, 1_767_225_600_123])
def test_moments(ms):
    system = proto("SystemProperties")()
    set_ms(system.born_timestamp, ms)
    assert get_ms(proto("SystemProperties").FromString(system.SerializeToString()).born_timestamp) == ms


@pytest.mark.parametrize("seconds", [0.0, 0.25, 10.0, 43_200.001])
def test_durations(seconds):
    request = proto("ReceiveMessageRequest")()
    set_seconds(request.invisible_duration, seconds)
    assert get_seconds(request.invisible_duration) == pytest.approx(seconds, abs=1e-6)


def test_what_was_not_set_can_be_told_from_zero():
    assert not proto("SystemProperties")().HasField("priority")
    zero = proto("SystemProperties")(priority=0)
    assert proto("SystemProperties").FromString(zero.SerializeToString()).HasField("priority")


def test_text_that_is_not_utf_8_is_an_error_of_its_answer():
    with pytest.raises(DecodeError):
        proto("Resource").FromString(b"\x12\x02\xff\xfe")


@pytest.mark.parametrize(
    ("seconds", "nanos", "expected"), [(2**62, 0, 365 * 86_400), (-(2**62), 0, 0), (3, -1, 3.0 - 1e-9)]
)
def test_durations_that_nobody_can_wait_for(seconds, nanos, expected):
    request = proto("ReceiveMessageRequest")()
    request.invisible_duration.seconds, request.invisible_duration.nanos = seconds, nanos
    assert get_seconds(request.invisible_duration) == pytest.approx(expected)
