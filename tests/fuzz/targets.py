"""What stands between bytes of others and a value: beside the decoders of the harness those that stand on them, or elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError as ProtobufError

from rocketmq_spark.admin.brokers import parse_policies, parse_user, parse_users
from rocketmq_spark.base.codes import Request, Response, SysFlag
from rocketmq_spark.client.broker_requests import BrokerRequests
from rocketmq_spark.client.long_polls import to_pull_answer
from rocketmq_spark.client.replies import AwaitedReplies
from rocketmq_spark.client.rpc import RpcClient, error_from_response
from rocketmq_spark.client.transactions import HalfChecks
from rocketmq_spark.columnar.decode import rows as careful
from rocketmq_spark.columnar.decode.decoder import Decoder, batch_of_answers
from rocketmq_spark.columnar.decode.schema import BASIC_COLUMNS
from rocketmq_spark.delay.envelope_records import DeliveryRules, effect_of
from rocketmq_spark.delay.release import DEAD_TOPIC, Progress, QueueCheckpoint, sink_row
from rocketmq_spark.errors import ConnectionLost, DecodeError, LocalProtocolError, RemoteProtocolError, RocketMQError
from rocketmq_spark.grpc_proxy.encoder import ProxySendRequest
from rocketmq_spark.grpc_proxy.member import group_policy, to_popped_message
from rocketmq_spark.grpc_proxy.protos import error_from_status, proto, set_seconds
from rocketmq_spark.grpc_proxy.sender import _outcome
from rocketmq_spark.grpc_proxy.tables import Code, Encoding
from rocketmq_spark.model import NO_FILTER, Filter, MessageQueue, SendRequest, SpooledSend
from rocketmq_spark.model.pull import PullRequest
from rocketmq_spark.model.send import TransactionState
from rocketmq_spark.producer.settings import ProducerSettings
from rocketmq_spark.pull.fetched import FetchedAnswer, FetchedAnswers
from rocketmq_spark.remoting.connection import ServerRequest
from rocketmq_spark.remoting.pool import ConnectOptions, Pool
from rocketmq_spark.remoting.protocol import RemotingProtocol, RequestReceived
from rocketmq_spark.remoting.transport import parse_address
from rocketmq_spark.session.proxy_clients import decompress_body
from rocketmq_spark.spool.records import Record, RecordState, SpoolOwner, Totals
from rocketmq_spark.spool.spool import record_of, send_of
from rocketmq_spark.wire import bodies, envelope, header, identifiers, messages, rpc
from rocketmq_spark.wire.compression import compress
from rocketmq_spark.wire.header import Command
from rocketmq_spark.wire.loose_json import read_json
from rocketmq_spark.wire.messages import BatchItem, encode_batch
from rocketmq_spark.wire.names import NO_SCOPE
from rocketmq_spark.wire.properties import decode_properties
from tests import harness
from tests.decode.fetching import QUEUES, SLACK
from tests.harness import MAX_FRAME, store, unhex, vectors

QUEUE = MessageQueue("t", "b", 0)
RULES = DeliveryRules(ProducerSettings(group="g"), DEAD_TOPIC)
# The requests that brokers push.
PUSHED = (39, 40, 220, 221, 307, 309, 326)
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


def _fetched(data: bytes) -> FetchedAnswers:
    buffer = np.frombuffer(data + SLACK, np.uint8)
    return FetchedAnswers(buffer, [FetchedAnswer(0, -FAR, FAR, FAR, 0, len(data))])


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


def _frames(*commands: Command) -> list[bytes]:
    return [header.encode(command) for command in commands]


# The fields of all requests that brokers push to clients.
_ASKED = {
    "consumerGroup": "g", "group": "g", "topic": "t", "jstackEnable": "false", "timestamp": "1", "isForce": "true",
    "tranStateTableOffset": "1", "commitLogOffset": "2", "msgId": "id", "transactionId": "id", "brokerName": "b",
    "producerGroup": "g", "defaultTopic": "t", "defaultTopicQueueNums": "1", "queueId": "0", "sysFlag": "0", "bornTimestamp": "1",
    "flag": "0", "properties": "CORRELATION_ID\x01id\x02a\x01b\x02", "reconsumeTimes": "0", "unitMode": "false", "bornHost": "h",
    "storeHost": "s", "storeTimestamp": "1",
}  # fmt: skip
_OFFSETS = b'{"offsetTable":{{"brokerName":"b","queueId":0,"topic":"t"}:7}}'
_HALF = store("t", b"x", "PGROUP\x01g\x02TRAN_MSG\x01true\x02UNIQ_KEY\x01id\x02")
_PUSHES = _frames(
    *(Command(code, _ASKED, _OFFSETS if code == Request.RESET_CONSUMER_CLIENT_OFFSET else _HALF) for code in PUSHED)
)
_FOUND = {"nextBeginOffset": "9", "minOffset": "0", "maxOffset": "9", "suggestWhichBrokerId": "0"}
_ANSWERS = _frames(
    Command(Response.SUCCESS, _FOUND, store("t", b"x", "TAGS\x01t\x02", 0, 3, 100), flag=1),
    Command(Response.PULL_NOT_FOUND, _FOUND, flag=1),
    Command(Response.SUCCESS, {"msgId": "id", "queueId": "0", "queueOffset": "5", "offset": "1"}, flag=1, remark="no"),
    Command(Response.NO_PERMISSION, {"forbiddenType": "1"}, flag=1, remark="the consumer's subscription not exist"),
    Command(Response.SYSTEM_ERROR, flag=1, remark="create mapped file failed, server is busy or broken\nand more"),
)


class _Member:
    """A client with a member of each kind. Its work is done at once, on the calling thread."""

    def __init__(self) -> None:
        self.rpc_client = RpcClient(Pool(ConnectOptions()))
        self.requests = BrokerRequests(self.rpc_client, "g", lambda address, question: None)
        self.awaited = AwaitedReplies()
        self.checks = HalfChecks(self.rpc_client, "g", lambda message, place: TransactionState.UNKNOWN)

    def take(self, data: bytes) -> None:
        """Everything that a connection and a client do with the bytes of a server."""
        for event in RemotingProtocol[int](MAX_FRAME, MAX_FRAME // 4).receive(data):
            if isinstance(event, RequestReceived):
                self._take(event)

    def _take(self, asked: RequestReceived) -> None:
        command = asked.command
        request = ServerRequest("h:1", command, lambda reply: None, asked.reply)
        if command.code == Request.PUSH_REPLY_MESSAGE_TO_CLIENT:
            self.awaited.expect("id", lambda reply: None)
            self.awaited.on_reply(request, lambda work: work())
        elif command.code == Request.CHECK_TRANSACTION_STATE:
            self.checks._decode("h:1", command)
        else:
            self.requests("h:1", command)


_MEMBER = _Member()


def _answered(data: bytes) -> None:
    """Read an answer as the answer to each kind of request."""
    command = header.decode(data[4:])
    str(error_from_response(command, "h:1", "t", "t/b/0"))
    for row in rpc.row_by_code.values():
        outcome(Target(lambda _, row=row: row.answer(command), ()), data)  # type: ignore[misc]
    to_pull_answer(PullRequest("g", QUEUE, 0, filter=Filter("t")), command, "h:1", NO_SCOPE)


def _status() -> bytes:
    made = proto("Status")(code=Code.OK, message="no\nyes")
    return bytes(made.SerializeToString())


def _check() -> bytes:
    made = proto("TelemetryCommand")()
    made.recover_orphaned_transaction_command.transaction_id = "id"
    made.recover_orphaned_transaction_command.message.CopyFrom(proto("Message").FromString(_message()))
    return bytes(made.SerializeToString())


def _of_proto(name: str, use: Callable[[Any], object]) -> Callable[[bytes], object]:
    return lambda data: use(proto(name).FromString(data))


_ENVELOPE = envelope.Envelope("t", 5, "id", 1, 0, "UNIQ_KEY\x01id\x02", b"x").pack()
_CANCEL = envelope.cancel_envelope("t", 5, "id", 1)
_SEND = SpooledSend("t", SendRequest("g", b"x", "UNIQ_KEY\x01id\x02"), QUEUE, ("id",), "hash", "k")
_RECORD = Record("send", b"payload", 5, "broker b", b"lane", ((b"id", b"12345678x"), (b"q", b"p")))
_PROTO = (ProtobufError, RocketMQError)

TARGETS: dict[str, Target] = {
    name: Target(decode, harness.samples(name)) for name, decode in harness.DECODERS.items()
} | {
    "leniently": Target(lambda data: list(messages.decode_leniently(data, max_body_bytes=MAX_FRAME)), _stored(), ()),
    "stamp": Target(messages.first_stamp, _stored(), ()),
    "arrow": Target(lambda data: list(Decoder(QUEUES).batches(_fetched(data), 300)), _stored()),
    "carefully": Target(lambda data: careful.decode(_fetched(data), QUEUES, BASIC_COLUMNS, "user"), _stored()),
    "rows of a poll": Target(
        lambda data: batch_of_answers([((QUEUE, 0, [(9, len(data))], data), NO_FILTER)]), _stored()
    ),
    "properties": Target(_text(decode_properties), [b"a\x01b\x02TAGS\x01t\x02", b""], ()),
    "envelope": Target(envelope.unpack, [_ENVELOPE, _CANCEL]),
    "arrival": Target(lambda data: effect_of(RULES, QUEUE, 0, data, 1), [_ENVELOPE, _CANCEL], ()),
    "released": Target(sink_row, [_ENVELOPE, _CANCEL], ()),
    "record": Target(Record.decode, [_RECORD.encode(), record_of(_SEND, 1).encode()]),
    "state": Target(RecordState.decode, [RecordState(3, 5, "why").encode()]),
    "totals": Target(Totals.decode, [Totals(1, 2, 3).encode()]),
    "owner": Target(SpoolOwner.decode, [SpoolOwner().encode()]),
    "send": Target(lambda data: send_of(Record("send", data, 1)), [record_of(_SEND, 1).payload]),
    "seen": Target(QueueCheckpoint.decode, [QueueCheckpoint(1, 5, Progress(1, 2, 3), 4).encode()]),
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
    "popped": Target(
        _of_proto("Message", lambda made: to_popped_message(made, "t", ("b", "h:1"), decompress_body)),
        [_message()],
        _PROTO,
    ),
    "settings": Target(_of_proto("Settings", group_policy), [_settings()], _PROTO),
    "pushed": Target(_MEMBER.take, _PUSHES, (RemoteProtocolError, DecodeError)),
    "answered": Target(_answered, _ANSWERS, (RocketMQError,)),
    "address": Target(_text(parse_address), [b"10.0.0.1:10911", b"[::1]:1", b"h:1"], (ConnectionLost,)),
    "held queues": Target(bodies.owned_queues, harness.samples("json")),
    "group online": Target(bodies.group_online, harness.samples("json")),
    "member filters": Target(bodies.member_filters, harness.samples("json")),
    "consume mode": Target(bodies.consume_mode, harness.samples("json")),
    "all topic configs": Target(
        lambda data: bodies.topic_config(data, "T"),
        [
            b'{"topicConfigTable":{"T":{"topicName":"T","readQueueNums":8,"writeQueueNums":8,"perm":6,"attributes":{"a":"b"}}}}'
        ],
    ),
    "table of queues": Target(lambda data: read_json(data, is_table=True), [*harness.samples("json"), _OFFSETS]),
    "users": Target(parse_users, [b'[{"username":"u","userType":"Super","userStatus":"enable"}]']),
    "user": Target(parse_user, [b'{"username":"u","userType":"Super","userStatus":"enable"}']),
    "policies": Target(
        parse_policies,
        [
            b'[{"subject":"User:u","policies":[{"policyType":"Custom","entries":[{"resource":"Topic:t","actions":["Pub"]}]}]}]'
        ],
    ),
    "status": Target(_of_proto("Status", lambda made: str(error_from_status(made, "h:1", "t"))), [_status()], _PROTO),
    "half message": Target(
        _of_proto(
            "TelemetryCommand",
            lambda made: to_popped_message(
                made.recover_orphaned_transaction_command.message, "t", ("b", "h:1"), decompress_body
            ),
        ),
        [_check()],
        _PROTO,
    ),
    "acknowledged": Target(
        _of_proto("SendMessageResponse", lambda made: _outcome(made, ProxySendRequest(b"", "A,B", False), "t", "h:1")),
        [_acknowledged()],
        _PROTO,
    ),
}
