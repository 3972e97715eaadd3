"""Sends as records: a versioned binary envelope whose head is JSON, so that a dump can be read. Pure."""

from __future__ import annotations

import json
import struct
from typing import Any

from rocketmq_spark.errors import DecodeError
from rocketmq_spark.model import MessageQueue, SendRequest, SpooledSend
from rocketmq_spark.spool.records import Record

KIND = "send"
VERSION = 1

_HEAD = struct.Struct(">BI")
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_FIELDS = (
    "group",
    "properties",
    "sys_flag",
    "flag",
    "born_timestamp_ms",
    "batch",
    "reconsume_times",
    "max_reconsume_times",
    "default_topic_queues",
)


def record_of(send: SpooledSend, now_ms: int) -> Record:
    """The send with all that it takes to send it once more."""
    head: dict[str, Any] = {
        "topic": send.topic,
        "msgIds": list(send.msg_ids),
        "request": {name: getattr(send.request, name) for name in _FIELDS},
    }
    if send.queue is not None:
        head["queue"] = [send.queue.broker_name, send.queue.queue_id]
    if send.selector is not None:
        head |= {"selector": send.selector, "arg": send.arg}
    text = _encode(head).encode()
    payload = b"".join((_HEAD.pack(VERSION, len(text)), text, send.request.body))
    return Record(KIND, payload, now_ms, target_of(send), lane_of(send))


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
        return SpooledSend(head["topic"], request, queue, tuple(head["msgIds"]), head.get("selector"), head.get("arg"))
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
