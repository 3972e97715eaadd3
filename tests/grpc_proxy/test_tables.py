"""Every row of the table of facts against what a real Proxy says of itself by server reflection."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto

from rocketmq_spark.grpc_proxy.tables import ENUMS, FIELDS, PACKAGE, RPCS, SERVICE
from rocketmq_spark.localbroker import LocalBroker

_REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
_FILE_OF_SYMBOL, _FILES, _FILE = 4, 4, 1  # fields of its request, of its answer, and of what is in that


@pytest.fixture(scope="module")
def files(proxied: LocalBroker) -> list[FileDescriptorProto]:
    """The files that define the service and its messages."""
    found: dict[str, FileDescriptorProto] = {}
    with grpc.insecure_channel(proxied.proxy_grpc) as channel:
        for symbol in (SERVICE, f"{PACKAGE}.Message"):
            name = symbol.encode()
            request = bytes([_FILE_OF_SYMBOL << 3 | 2, len(name)]) + name
            for answer in channel.stream_stream(_REFLECTION)(iter([request]), timeout=60):
                for number, value in fields(answer):
                    if number == _FILES:
                        made = [FileDescriptorProto.FromString(file) for at, file in fields(value) if at == _FILE]
                        found.update((file.name, file) for file in made)
    return [file for file in found.values() if file.package == PACKAGE]


def fields(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Number and content of each field that has a length; texts of protobuf taken apart by hand."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at, value, shift = at + 1, value | (byte & 127) << shift, shift + 7
            if byte < 128:
                return value

    while at < len(data):
        key = varint()
        if key & 7 == 2:
            length = varint()
            yield key >> 3, data[at : at + length]
            at += length
        else:
            assert key & 7 == 0
            varint()


def kind(field: FieldDescriptorProto) -> str:
    """A field's type in the words of the table."""
    known = {
        "google.protobuf.Timestamp": "time",
        "google.protobuf.Duration": "duration",
        f"{PACKAGE}.Message.UserPropertiesEntry": "map",
    }
    if field.type == FieldDescriptorProto.TYPE_MESSAGE:
        name = field.type_name.lstrip(".")
        return known.get(name, name.removeprefix(f"{PACKAGE}."))
    return FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()


def test_every_field_is_as_the_proxy_says(files):
    told = {
        (message.name, field.name): (
            field.number,
            kind(field),
            field.label == FieldDescriptorProto.LABEL_REPEATED and kind(field) != "map",
        )
        for file in files
        for message in file.message_type
        for field in message.field
    }
    assert len(FIELDS) > 100
    assert {(f.message, f.name): (f.number, f.kind, f.repeated) for f in FIELDS} == {
        (f.message, f.name): told.get((f.message, f.name)) for f in FIELDS
    }


def test_every_number_is_as_the_proxy_says(files):
    told = {enum.name: {value.name: value.number for value in enum.value} for file in files for enum in file.enum_type}
    for enum in ENUMS:
        assert {each.name: each.value for each in enum} == {
            each.name: told[enum.__name__].get(each.name) for each in enum
        }


def test_every_call_is_as_the_proxy_says(files):
    told = {
        method.name: (
            method.input_type.removeprefix(f".{PACKAGE}."),
            method.output_type.removeprefix(f".{PACKAGE}."),
            method.client_streaming,
            method.server_streaming,
        )
        for file in files
        for service in file.service
        for method in service.method
    }
    assert {rpc.name: tuple(rpc[1:]) for rpc in RPCS} == {rpc.name: told.get(rpc.name) for rpc in RPCS}
