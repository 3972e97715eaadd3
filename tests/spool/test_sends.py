"""Sends as records: everything comes back, UNIQ_KEY included (3-13, G2.11)."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.errors import DecodeError
from rocketmq_spark.model import MessageQueue, SendRequest, SpooledSend
from rocketmq_spark.queues.selection import SELECTORS
from rocketmq_spark.spool.records import Record
from rocketmq_spark.spool.spool import SEND_KIND, _head, lane_of, record_of, send_of, target_of
from tests.queues import q
from tests.strategies import queues

ints = st.integers(-(2**31), 2**31 - 1)
requests = st.builds(
    SendRequest,
    group=st.text(),
    body=st.binary(),
    properties=st.text(),
    sys_flag=ints,
    flag=ints,
    born_timestamp_ms=st.integers(0, 2**62),
    batch=st.booleans(),
    reconsume_times=ints,
    max_reconsume_times=st.none() | ints,
    default_topic_queues=ints,
)


@given(requests, st.none() | queues, st.lists(st.text()))
def test_send_comes_back_with_its_ids(request: SendRequest, queue: object, ids: list[str]) -> None:
    send = SpooledSend(queue.topic if queue else "T", request, queue, tuple(ids))
    assert send_of(record_of(send, 7)) == send


@given(
    st.none() | queues,
    st.sampled_from(SELECTORS),
    st.none() | st.text() | st.integers() | st.just({"room": [1, 'ä"\n']}),
)
def test_a_selector_comes_back_with_its_argument(queue: object, selector: str, arg: object) -> None:
    send = SpooledSend(queue.topic if queue else "T", SendRequest("g", b"x"), queue, ("id",), selector, arg)
    assert send_of(record_of(send, 7)) == send


def test_encoded_head_contains_every_field_of_send() -> None:
    request = SendRequest("g", b"", "KEYS\x01é\x02", 1, 2, 3, True, 4, 5, 6)
    head = json.loads(_head(SpooledSend("T", request, q("a:1"), ("id",), "hash", "7")))
    fields = {name: value for name, value in request._asdict().items() if name != "body"}
    whole = {"topic": "T", "msgIds": ["id"], "request": fields, "queue": ["a", 1], "selector": "hash", "arg": "7"}
    assert head == whole


def test_a_batch_in_a_buffer_is_copied() -> None:
    send = SpooledSend("T", SendRequest("g", memoryview(b"items"), batch=True))
    assert send_of(record_of(send, 7)).request.body == b"items"


def test_lanes_are_queues_or_what_a_selector_was_given() -> None:
    request = SendRequest("g", b"x")
    assert lane_of(SpooledSend("T", request)) == b""
    assert lane_of(SpooledSend("T", request, q("a:1"))) == b"T/a/1"
    first = lane_of(SpooledSend("T", request, None, (), "hash", "7"))
    assert first == lane_of(SpooledSend("T", request, None, (), "hash", "7"))
    assert first != lane_of(SpooledSend("T", request, None, (), "hash", 7))


def test_it_waits_for_the_broker_of_its_queue_or_for_its_topic() -> None:
    request = SendRequest("g", b"x")
    assert target_of(SpooledSend("T", request)) == "topic T"
    assert target_of(SpooledSend("T", request, q("a:1"))) == "broker a"


@pytest.mark.parametrize("payload", [b"", b"\x01\0\0\0\x02{}", b"\x02\0\0\0\x00", b"\x01\0\0\0\x09{"])
def test_what_is_no_send_says_so(payload: bytes) -> None:
    with pytest.raises(DecodeError):
        send_of(Record(SEND_KIND, payload, 1))


def test_code_that_a_file_names_is_not_executed() -> None:
    """Whoever may write to the folder is not whoever may run code."""
    send = SpooledSend("T", SendRequest("g", b"x"), None, ("id",), "os:abort")
    with pytest.raises(DecodeError, match="selector 'os:abort' is not a selector of RocketMQ"):
        send_of(record_of(send, 7))


@pytest.mark.parametrize(
    ("place", "value"),
    [("msgIds", [1]), ("topic", ["t"]), ("queue", ["a", "0"]), ("queue", [1, 0]), ("request", {"group": 1}),
     ("request", {"properties": 5}), ("request", {"flag": "1"}), ("request", {"batch": "no"}),
     ("request", {"max_reconsume_times": True})],
)  # fmt: skip
def test_a_send_with_values_of_other_types_says_so(place: str, value: object) -> None:
    """Otherwise a command that shows it would fail, and not show the records behind it, which are sent."""
    head = json.loads(_head(SpooledSend("t", SendRequest("g", b"x"), q("a:1"), ("id",))))
    head[place] = {**head[place], **value} if isinstance(value, dict) else value
    text = json.dumps(head).encode()
    with pytest.raises(DecodeError, match="other types than this package writes"):
        send_of(Record(SEND_KIND, b"\1" + len(text).to_bytes(4) + text + b"x", 1))


@pytest.mark.parametrize(
    ("topic", "queue"), [("", None), ("", q("a:1")), ("t", q(":1")), ("t", q("a:-1")), ("t", q(f"a:{1 << 31}"))]
)
def test_a_send_to_what_cannot_exist_says_so(topic: str, queue: MessageQueue | None) -> None:
    queue = None if queue is None else queue._replace(topic=topic)
    with pytest.raises(DecodeError, match="has no topic or broker, or no valid queue id"):
        send_of(record_of(SpooledSend(topic, SendRequest("g", b"x"), queue, ("id",)), 7))
