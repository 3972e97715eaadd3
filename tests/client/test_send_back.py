"""Messages that are given back: by their broker, or as a copy with the properties that the broker would have written."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from rocketmq_spark.base.codes import DELAY_LEVELS, Request, Response, SysFlag
from rocketmq_spark.client.send_back import retry_copy
from rocketmq_spark.errors import MessageRefused, NotFound, RocketMQError
from rocketmq_spark.model import MessageQueue, ReceivedMessage
from rocketmq_spark.wire.compression import decompress
from rocketmq_spark.wire.messages import decode_messages
from rocketmq_spark.wire.properties import decode_properties
from tests.client.conftest import Parts
from tests.harness import store
from tests.mockbroker import MockBroker, ok, refuse, route


def message(body: bytes = b"x", text: str = "UNIQ_KEY\x01ID\x02TAGS\x01a\x02", times: int = 0) -> ReceivedMessage:
    (found,) = decode_messages(store("t", body, text, 1, 5, 77, 9, reconsumed=times), "broker-a")
    return found


def test_broker_is_asked_to_move_a_message(broker: MockBroker, parts: Parts) -> None:
    parts.routes.get("t")
    broker.on(Request.CONSUMER_SEND_MSG_BACK, [ok(), refuse(Response.QUERY_NOT_FOUND, "gone")])
    parts.member.send_back("g", message(), -1, 16, parts.soon)
    (asked,) = broker.seen(Request.CONSUMER_SEND_MSG_BACK)
    assert asked.ext == {
        "offset": "77", "group": "g", "delayLevel": "-1", "originMsgId": "ID", "originTopic": "t", "unitMode": "false",
        "maxReconsumeTimes": "16", "bname": "broker-a",
    }  # fmt: skip
    with pytest.raises(NotFound, match="gone"):
        parts.member.send_back("g", message(), 0, 16, parts.soon)


def test_copy_says_what_the_broker_would_have_said() -> None:
    request = retry_copy("g", message(times=2), 16, lambda name: f"ns%{name}", 33)
    assert (request.body, request.sys_flag, request.flag) == (b"x", 0, 9)
    assert (request.born_timestamp_ms, request.group, request.reconsume_times, request.max_reconsume_times) == (
        33,
        "CLIENT_INNER_PRODUCER",
        3,
        16,
    )
    assert decode_properties(request.properties) == {
        "UNIQ_KEY": "ID", "TAGS": "a", "ORIGIN_MESSAGE_ID": "ID", "RETRY_TOPIC": "ns%t", "RECONSUME_TIME": "3",
        "MAX_RECONSUME_TIMES": "16", "DELAY": "5",
    }  # fmt: skip


def test_retries_use_the_sixteen_documented_delay_levels() -> None:
    levels = [
        decode_properties(retry_copy("g", message(times=times), 16, str, 33).properties)["DELAY"] for times in range(16)
    ]
    assert [DELAY_LEVELS[int(level) - 1] for level in levels] == (
        ["10s", "30s", "1m", "2m", "3m", "4m", "5m", "6m", "7m", "8m", "9m", "10m", "20m", "30m", "1h", "2h"]
    )


def test_retry_copy_keeps_first_id_and_drops_transaction_mark() -> None:
    again = message(text="UNIQ_KEY\x01ID\x02ORIGIN_MESSAGE_ID\x01FIRST\x02TRAN_MSG\x01true\x02")
    properties = decode_properties(retry_copy("g", again, 16, str, 33).properties)
    assert properties["ORIGIN_MESSAGE_ID"] == "FIRST"
    assert "TRAN_MSG" not in properties


def test_a_large_copy_is_compressed() -> None:
    request = retry_copy("g", message(b"y" * 5000), 16, str, 33)
    assert len(request.body) < 5000
    assert decompress(request.body, request.sys_flag) == b"y" * 5000


def test_what_cannot_be_decoded_is_copied_as_it_is_stored() -> None:
    flags = int(SysFlag.INNER_BATCH | SysFlag.NEED_UNWRAP | SysFlag.COMPRESSED | SysFlag.LZ4)
    properties = {"UNIQ_KEY": "ID", "TAGS": "a", "own": "1", "INNER_NUM": "30", "INNER_BASE": "5"}
    damaged = replace(message(), body=b"bytes", sys_flag=flags, properties=properties, decode_error="no magic")
    request = retry_copy("g", damaged, 0, str, 33)
    assert (request.body, request.sys_flag) == (b"bytes", int(SysFlag.COMPRESSED | SysFlag.LZ4))
    found = decode_properties(request.properties)
    assert (found["TAGS"], found["own"], found.keys() & {"INNER_NUM", "INNER_BASE"}) == ("a", "1", set())
    assert retry_copy("g", replace(damaged, body=b"y" * 5000), 0, str, 33).body == b"y" * 5000


@pytest.mark.parametrize("times", [2**31 - 1, 2**31 - 5, -(2**31), -1])
def test_a_copy_has_possible_numbers_whatever_its_sender_wrote(times: int) -> None:
    request = retry_copy("g", message(times=times), 2**31 - 1, str, 33)
    assert 0 < request.reconsume_times < 2**31
    assert (request.reconsume_times > request.max_reconsume_times) == (times > 2**30)  # then it is a dead letter
    level = int(decode_properties(request.properties)["DELAY"])
    assert 3 <= level < 2**31


@pytest.mark.parametrize(
    "name", ["INNER_NUM", "TIMER_DELIVER_MS", "TIMER_DELAY_SEC", "INNER_MULTI_DISPATCH", "TRAN_MSG", "PGROUP", "POP_CK"]
)
def test_a_copy_has_no_property_that_a_broker_acts_on(name: str) -> None:
    """Brokers do not look at those of a message of a batch, and refuse a single message because of some."""
    request = retry_copy("g", replace(message(), properties={name: "9" * 19, "own": "1"}), 16, str, 33)
    assert decode_properties(request.properties).keys() & {name, "own"} == {"own"}


@pytest.mark.parametrize("size", [0, (4 << 20) + 1])
def test_a_body_that_no_broker_takes_is_not_copied(size: int) -> None:
    flags = int(SysFlag.COMPRESSED)  # damaged, so it is not compressed once more
    with pytest.raises(MessageRefused, match=f"the message has {size} bytes; expected 1 to"):
        retry_copy("g", replace(message(), body=bytes(size), sys_flag=flags, decode_error="bad"), 16, str, 33)


def test_retry_copy_goes_to_retry_topic_on_any_working_broker(broker: MockBroker, parts: Parts) -> None:
    with MockBroker() as other:
        broker.on(Request.GET_ROUTEINFO_BY_TOPIC, route(1, {"broker-a": broker.address, "broker-b": other.address}))
        other.on(Request.SEND_MESSAGE_V2, refuse(Response.SERVICE_NOT_AVAILABLE, "full"))
        broker.on(Request.SEND_MESSAGE_V2, ok(msgId="X", queueId=0, queueOffset=1))
        parts.member.send_to_retry("g", message(), 16, parts.soon)
        assert len(other.seen(Request.SEND_MESSAGE_V2)) == 1  # not where the message lies, and nothing works, first
        (sent,) = broker.seen(Request.SEND_MESSAGE_V2)
        assert sent.ext["b"] == "%RETRY%g"
        assert json.loads(sent.ext["j"]) == 1
        assert sent.ext["l"] == "16"  # or the group's own number of attempts counts, and a dead letter comes again


def test_a_copy_that_nobody_takes_is_an_error(broker: MockBroker, parts: Parts) -> None:
    broker.on(Request.SEND_MESSAGE_V2, refuse(Response.SERVICE_NOT_AVAILABLE, "full"))
    with pytest.raises(RocketMQError, match="full"):
        parts.member.send_to_retry("g", message(), 16, parts.soon)
    assert len(broker.seen(Request.SEND_MESSAGE_V2)) == 3


def test_the_queue_of_a_message_is_where_it_lies() -> None:
    assert message().queue == MessageQueue("t", "broker-a", 1)
