"""What stands between bytes of others and a value: beside the decoders of the harness those that stand on them, or elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError as ProtobufError

from rocketmq_spark.base.codes import SysFlag
from rocketmq_spark.columnar.decode import rows as careful
from rocketmq_spark.columnar.decode.decoder import Decoder, batch_of
from rocketmq_spark.columnar.decode.schema import BASIC
from rocketmq_spark.delay.envelope_records import arrival
from rocketmq_spark.delay.release import Progress, Seen, released
from rocketmq_spark.errors import DecodeError, LocalProtocolError, RemoteProtocolError, RocketMQError
from rocketmq_spark.grpc_proxy.facts import Code, Encoding
from rocketmq_spark.grpc_proxy.member import policy, popped
from rocketmq_spark.grpc_proxy.outgoing import ProxySendRequest
from rocketmq_spark.grpc_proxy.protos import proto, set_seconds
from rocketmq_spark.grpc_proxy.sender import _outcome
from rocketmq_spark.model import NO_FILTER, MessageQueue, SendRequest, SpooledSend
from rocketmq_spark.pull.answers import Fetched, Piece
from rocketmq_spark.session.proxied import unpack
from rocketmq_spark.spool.records import Record, RecordState, SpoolOwner, Totals
from rocketmq_spark.spool.spool import record_of, send_of
from rocketmq_spark.wire import envelope, identifiers, messages
from rocketmq_spark.wire.compression import compress
from rocketmq_spark.wire.messages import BatchItem, encode_batch
from rocketmq_spark.wire.properties import decode_properties
from tests import harness
from tests.decode.fetching import QUEUES, SLACK
from tests.harness import MAX_FRAME, store, unhex, vectors

QUEUE = MessageQueue("t", "b", 0)
FAR = (1 << 63) - 1


class Target(NamedTuple):
    """A decoder, well-formed inputs to begin with, and what it may raise."""

    decode: Callable[[bytes], object]
    samples: Sequence[bytes]
    raises: tuple[type[Exception], ...] = (DecodeError, RemoteProtocolError)


def _stored() -> list[bytes]:
    plain = [unhex(case["stored"]) for case in vectors("stored_messages")]
    items = encode_batch(BatchItem(b"x%d" % i, "a\x01b\x02", i) for i in range(5))
    inner = int(SysFlag.NEED_UNWRAP | SysFlag.INNER_BATCH)
    packed = compress(items, SysFlag.ZLIB)
    whole = [store("t", items, "TAGS\x01t\x02", 3, 7, sys_flag=inner)]
    return [*plain, *whole, store("t", packed, "", 3, 7, sys_flag=inner | int(SysFlag.COMPRESSED))]


def outcome(target: Target, data: bytes) -> object:
    """The value, or the class of the refusal. Any other exception passes through and fails the test."""
    try:
        return target.decode(data)
    except target.raises as error:
        return type(error)


def _fetched(data: bytes) -> Fetched:
    buffer = np.frombuffer(data + SLACK, np.uint8)
    return Fetched(buffer, [Piece(0, -FAR, FAR, FAR, 0, len(data))])


def _text(parse: Callable[[str], object]) -> Callable[[bytes], object]:
    return lambda data: parse(data.decode("utf-8", "replace"))


def _message() -> bytes:
    made = proto("Message")(body=b"packed")
    made.system_properties.message_id, made.system_properties.body_encoding = "ID", Encoding.GZIP
    made.system_properties.receipt_handle, made.system_properties.tag = "r", "t"
    made.user_properties["k"] = "v"
    return bytes(made.SerializeToString())


def _settings() -> bytes:
    made = proto("Settings")()
    grown = made.backoff_policy.exponential_backoff
    set_seconds(grown.initial, 1)
    set_seconds(grown.max, 100)
    grown.multiplier = 2
    return bytes(made.SerializeToString())


def _acknowledged() -> bytes:
    made = proto("SendMessageResponse")()
    made.status.code = Code.OK
    made.entries.add(message_id="A,B", offset=7).status.code = Code.OK
    return bytes(made.SerializeToString())


def _of_proto(name: str, use: Callable[[Any], object]) -> Callable[[bytes], object]:
    return lambda data: use(proto(name).FromString(data))


_ENVELOPE = envelope.Envelope("t", 5, "id", 1, 0, "UNIQ_KEY\x01id\x02", b"x").pack()
_CANCEL = envelope.cancelling("t", 5, "id", 1)
_SEND = SpooledSend("t", SendRequest("g", b"x", "UNIQ_KEY\x01id\x02"), QUEUE, ("id",), "hash", "k")
_RECORD = Record("send", b"payload", 5, "broker b", b"lane", ((b"id", b"12345678x"), (b"q", b"p")))
_PROTO = (ProtobufError, RocketMQError)

TARGETS: dict[str, Target] = {
    name: Target(decode, harness.samples(name)) for name, decode in harness.DECODERS.items()
} | {
    "leniently": Target(lambda data: list(messages.decode_leniently(data, max_body_bytes=MAX_FRAME)), _stored(), ()),
    "stamp": Target(messages.stamp, _stored(), ()),
    "arrow": Target(lambda data: list(Decoder(QUEUES).batches(_fetched(data), 300)), _stored()),
    "carefully": Target(lambda data: careful.decode(_fetched(data), QUEUES, BASIC, "user"), _stored()),
    "rows of a poll": Target(lambda data: batch_of([((QUEUE, 0, [(9, len(data))], data), NO_FILTER)]), _stored()),
    "properties": Target(_text(decode_properties), [b"a\x01b\x02TAGS\x01t\x02", b""], ()),
    "envelope": Target(envelope.unpack, [_ENVELOPE, _CANCEL]),
    "arrival": Target(lambda data: arrival(QUEUE, 0, data, 1), [_ENVELOPE, _CANCEL], ()),
    "released": Target(released, [_ENVELOPE, _CANCEL], ()),
    "record": Target(Record.decode, [_RECORD.encode(), record_of(_SEND, 1).encode()]),
    "state": Target(RecordState.decode, [RecordState(3, 5, "broker b", "why").encode()]),
    "totals": Target(Totals.decode, [Totals(1, 2, 3).encode()]),
    "owner": Target(SpoolOwner.decode, [SpoolOwner().encode()]),
    "send": Target(lambda data: send_of(Record("send", data, 1)), [record_of(_SEND, 1).payload]),
    "seen": Target(Seen.decode, [Seen(1, 5, Progress(1, 2, 3), 4).encode()]),
    "recall handle": Target(
        _text(identifiers.RecallHandle.parse),
        [case["handle"].encode() for case in vectors("recall_handles")],
        (LocalProtocolError,),
    ),
    "message id": Target(
        _text(identifiers.OffsetMessageId.parse), [b"7F00000100002A9F0000000000000001"], (LocalProtocolError,)
    ),
    "unique key": Target(
        _text(identifiers.UniqKey.parse), [b"7F0000010BB418B4AAC28F7A8F3A0000"], (LocalProtocolError,)
    ),
    "popped": Target(_of_proto("Message", lambda made: popped(made, "t", ("b", "h:1"), unpack)), [_message()], _PROTO),
    "settings": Target(_of_proto("Settings", policy), [_settings()], _PROTO),
    "acknowledged": Target(
        _of_proto("SendMessageResponse", lambda made: _outcome(made, ProxySendRequest(b"", "A,B", False), "t", "h:1")),
        [_acknowledged()],
        _PROTO,
    ),
}
