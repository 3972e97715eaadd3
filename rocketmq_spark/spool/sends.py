"""Sends as records: a versioned binary envelope whose head is JSON, so that a dump can be read. Pure."""

from __future__ import annotations

import json
import struct
from json.encoder import encode_basestring as _quoted

from rocketmq_spark.errors import DecodeError
from rocketmq_spark.model import MessageQueue, SendRequest, SpooledSend
from rocketmq_spark.queues.selection import is_built_in
from rocketmq_spark.spool.records import Record

KIND = "send"
VERSION = 1

_HEAD = struct.Struct(">BI")
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_REQUEST = (
    '{"group":%s,"properties":%s,"sys_flag":%d,"flag":%d,"born_timestamp_ms":%d,"batch":%s,"reconsume_times":%d,'
    '"max_reconsume_times":%s,"default_topic_queues":%d}'
)


def record_of(send: SpooledSend, now_ms: int) -> Record:
    """The send with all that it takes to send it once more."""
    text = _head(send).encode()
    payload = b"".join((_HEAD.pack(VERSION, len(text)), text, send.request.data))
    return Record(KIND, payload, now_ms, target_of(send), lane_of(send))


def _head(send: SpooledSend) -> str:
    """As JSON, put together by hand: an encoder takes a tenth of the time that a whole addition takes."""
    request, most = send.request, send.request.max_reconsume_times
    about = _REQUEST % (
        _quoted(request.group),
        _quoted(request.properties),
        request.sys_flag,
        request.flag,
        request.born_timestamp_ms,
        "true" if request.batch else "false",
        request.reconsume_times,
        "null" if most is None else int(most),
        request.default_topic_queues,
    )
    ids = ",".join([_quoted(msg_id) for msg_id in send.msg_ids])
    more = ""
    if send.queue is not None:
        more = f',"queue":{_encode([send.queue.broker_name, send.queue.queue_id])}'
    if send.selector is not None:
        more += f',"selector":{_quoted(send.selector)},"arg":{_encode(send.arg)}'
    return f'{{"topic":{_quoted(send.topic)},"msgIds":[{ids}],"request":{about}{more}}}'


def send_of(record: Record) -> SpooledSend:
    """The send of a record. ``DecodeError`` when it is not one that this release reads."""
    data = record.payload
    try:
        version, length = _HEAD.unpack_from(data)
        if version != VERSION:
            raise DecodeError(f"a send of version {version}; this release reads version {VERSION}")
        at = _HEAD.size + length
        head = json.loads(data[_HEAD.size : at])
        queue = MessageQueue(head["topic"], *head["queue"]) if "queue" in head else None
        request = SendRequest(body=data[at:], **head["request"])
        selector = head.get("selector")
        if selector is not None and not is_built_in(selector):  # a writer of the file could have code executed
            raise DecodeError(
                f"selector {selector!r} is none of RocketMQ's, and code that a file names is not executed"
            )
        return SpooledSend(head["topic"], request, queue, tuple(head["msgIds"]), selector, head.get("arg"))
    except (struct.error, ValueError, KeyError, TypeError) as e:
        raise DecodeError(f"a send of {len(data)} bytes cannot be read: {e!r}") from e


def lane_of(send: SpooledSend) -> bytes:
    """What goes to one queue keeps its order, and so does what a selector sends there; empty where there is none."""
    if send.queue is not None:
        return queue_lane(send.queue)
    if send.selector is not None:
        return f"{send.topic}?{send.selector}={json.dumps(send.arg, sort_keys=True)}".encode()
    return b""


def queue_lane(queue: MessageQueue) -> bytes:
    return str(queue).encode()


def target_of(send: SpooledSend) -> str:
    """What it waits for: the broker of its queue, or any that takes its topic."""
    return broker_target(send.queue) if send.queue is not None else topic_target(send.topic)


def broker_target(queue: MessageQueue) -> str:
    return f"broker {queue.broker_name}"


def topic_target(topic: str) -> str:
    return f"topic {topic}"
